"""The command that computes features. `dpscale.cli` puts it on the command line."""

import time
from pathlib import Path
from typing import Annotated

import typer

from dpscale.lab.commands import Json, print_json
from dpscale.lab.options import Device, Folder


def features(
    dataset: Annotated[str, typer.Argument(help="Name of a data set of colour images, such as cifar10.")],
    encoder: Annotated[str, typer.Option(help="simclrv2-r50-2x-sk1 or resnet50-imagenet.")],
    checkpoint: Annotated[
        Path | None, typer.Option(help="File of weights (.safetensors, .pth); default: in the data folder.")
    ] = None,
    folder: Folder = None,
    device: Device = None,
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
    from dpscale.lab.datasets.progress import progress
    from dpscale.lab.encoders.features import extract

    start = time.perf_counter()
    with progress(f"features {dataset}", quiet=as_json) as bar:
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
