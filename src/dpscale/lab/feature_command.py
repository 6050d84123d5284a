"""The command that computes features. `dpscale.cli` puts it on the command line."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dpscale.lab.commands import Json, print_json
from dpscale.lab.options import Folder

if TYPE_CHECKING:
    from dpscale.lab.datasets.folder import OnProgress, Progress


def features(
    dataset: Annotated[str, typer.Argument(help="Name of a data set of colour images, such as cifar10.")],
    encoder: Annotated[str, typer.Option(help="simclrv2-r50-2x-sk1 or resnet50-imagenet.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="File of weights (.safetensors, .pth); default: in the data folder.")
    ] = None,
    folder: Folder = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")] = None,
    batch: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 128,
    size: Annotated[int, typer.Option(min=1, help="Images are resized to SIZE x SIZE.")] = 224,
    half: Annotated[bool, typer.Option("--half", help="Store float16: half the bytes.")] = False,
    as_json: Json = False,
) -> None:
    """Compute the features of a data set under a frozen public encoder, once; they stay in the data folder.

    \b
    Example:
      dpscale features cifar10 --encoder resnet50-imagenet
      dpscale features cifar10 --encoder simclrv2-r50-2x-sk1 --checkpoint r50_2x_sk1.pth --device cuda
    """
    from dpscale.lab.encoders import registry

    chosen = registry.encoder(encoder)  # refused before a data set is read
    import torch

    from dpscale.lab import data
    from dpscale.lab.encoders.features import extract

    start = time.perf_counter()
    with _bar(f"features {dataset}", quiet=as_json) as bar:
        images = data.load(dataset, folder, on_progress=bar)
        found = extract(
            images, chosen, folder=folder, checkpoint=checkpoint, device=device, batch=batch, size=size,
            dtype=torch.float16 if half else torch.float32, on_progress=bar,
        )  # fmt: skip
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        shapes = {"train": list(found.train.shape), "test": list(found.test.shape)}
        print_json(
            {"shapes": shapes, "file": str(found.path), "reused": found.reused, "seconds": seconds}
            | {"provenance": dict(found.provenance)}
        )
        return
    what = "found, same provenance" if found.reused else "computed"
    typer.echo(
        f"{dataset} under {chosen.title}: {len(found.train)} + {len(found.test)} rows of {found.train.shape[1]} "
        f"features, {what}  ({seconds:.0f} s)"
    )
    typer.echo(f"Weights: SHA-256 {found.provenance['weights_sha256']}")
    typer.echo(f"Features: {found.path}")


@contextmanager
def _bar(title: str, *, quiet: bool) -> Iterator["OnProgress"]:
    """A bar over images on stderr; without a terminal plain lines, one for each tenth of them; silent if ``quiet``."""
    from rich.progress import MofNCompleteColumn, TextColumn

    from dpscale.lab import terminal

    with terminal.bar(MofNCompleteColumn(), TextColumn("{task.fields[state]}"), quiet=quiet) as bar:
        if bar is None:
            yield (lambda _: None) if quiet else _lines(title)
            return
        task = bar.add_task(title, total=None, state="reading the images")

        def show(now: "Progress") -> None:
            speed = bar.tasks[0].speed
            state = now.what if not now.done or speed is None else f"{speed:.0f} images/s"
            bar.update(task, completed=now.done, total=now.total, state=state)

        yield show


def _lines(title: str) -> "OnProgress":
    """Says in lines how far something is when it has begun, and at each tenth. What is refused before is one line."""
    from dpscale.lab import terminal

    dues: dict[str, Callable[[int, int], bool]] = {}

    def show(now: "Progress") -> None:
        if not now.done or not now.total:
            return
        first = now.what not in dues
        if dues.setdefault(now.what, terminal.tenths())(now.done, now.total) or first:
            terminal.line(f"[{now.done}/{now.total} {now.unit}] {title}: {now.what}")

    return show
