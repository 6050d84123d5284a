"""How the cost of a private loop grows with the batch, the sequence, the width, the layers and the size of the data.

    python benchmarks/growth.py --json docs/figures/growth.json                        # small sizes on the CPU
    python benchmarks/growth.py --device cuda --precision tf32 --warm 12 --json docs/figures/growth.json
    python docs/make_figures.py                                                        # and one picture of it

One quantity grows at a time, from a stack of residual linear layers over sequences. A step is what users write, as in
loop.py: draw by Poisson, index, forward, backward, scaling, noise, update; beside the compiled plain loop, in turns. A
ratio is the median over rounds in which dpscale did not look at the model. N grows over short, narrow samples, so that
ten million of them fit into memory. `draw` is drawing the indices alone.
"""

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale
import harness
import loop
from harness import Row, Table, figure
from loop import Setting
from models import Task

BASE = {
    "cpu": {"B": 32, "T": 32, "width": 128, "layers": 4},
    "cuda": {"B": 64, "T": 128, "width": 512, "layers": 4},
}
SHORT = {"T": 1, "width": 64}
"""Of the samples of which there are many."""
GROWTH = {
    "cpu": {
        "B": (8, 64, 512, 4096), "N": (10**3, 10**4, 10**5, 10**6, 10**7), "T": (1, 8, 32, 128),
        "width": (32, 128, 512), "layers": (1, 4, 16),
    },
    "cuda": {
        "B": (8, 64, 512, 4096), "N": (10**3, 10**4, 10**5, 10**6, 10**7), "T": (1, 16, 128, 1024),
        "width": (128, 512, 2048), "layers": (1, 4, 16, 64),
    },
}  # fmt: skip
DRAWS = 200


class Residual(nn.Module):
    """x + GELU(W x + b). Without x the numbers of a deep stack become too small for a CPU to compute with at speed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


@dataclass(frozen=True)
class Stack(Task):
    """Layers of width × width over samples of (T, width), one loss per sample."""

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        return torch.randn(self.batch, *self.shape, device=device), torch.zeros(self.batch, device=device)

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        return out.float().square().mean((1, 2)) + 0 * y


def names(device: str) -> list[str]:
    """The points of the picture, such as 'T=1024'. The one that panels have in common comes first, once."""
    grown = [f"{what}={value}" for what, values in GROWTH[device].items() for value in values]
    return ["base", *(name for name in grown if size_of(name, device) != size_of("base", device))]


def size_of(name: str, device: str) -> dict[str, int]:
    """Every quantity at a point."""
    what, _, value = name.partition("=")
    size = BASE[device] | (SHORT if what == "N" else {}) | ({what: int(value)} if value else {})
    return {"N": 8 * size["B"]} | size


def setting_of(name: str, precision: str, args: argparse.Namespace) -> Setting:
    size = size_of(name, args.device)
    width, layers = size["width"], size["layers"]
    task = Stack(
        lambda: nn.Sequential(*(Residual(width) for _ in range(layers))), (size["T"], width), size["B"], classes=0
    )
    torch.manual_seed(0)
    data = TensorDataset(*replace(task, batch=size["N"]).data(args.device))
    return Setting(task, task.make().to(args.device), data, harness.casting(args.device, precision), args)


def drawing(size: dict[str, int]) -> float:
    """Seconds of a draw: the median of many."""
    draws = dpscale.Poisson(size=size["N"], batch=size["B"]).draws(np.random.default_rng(0))
    return float(np.median(np.diff([time.perf_counter() for _ in islice(draws, DRAWS)])))


def measured(item: str, args: argparse.Namespace) -> Iterator[Row]:
    size = size_of(item.split("/")[0], args.device)
    for row in loop.measure(item, args, setting_of):
        yield row | {"size": size} | ({} if args.ahead else {"draw_milliseconds": 1e3 * drawing(size)})


def main() -> None:
    parser = harness.arguments(__doc__, rounds=5)
    parser.add_argument("--steps", type=int, default=10, help="of a turn (%(default)s)")
    parser.set_defaults(
        contenders=["plain compiled", "step compiled"], run=None, first=False, loader=None, patience=1.5, peaks=0
    )
    args = parser.parse_args()
    if args.items:
        harness.serve(args, lambda item: measured(item, args))
        return
    print(f"{harness.machine(args)}, from {', '.join(f'{k} = {v}' for k, v in BASE[args.device].items())}")
    chosen = ("model", "precision", "loop", "B", "ms/step", "ratio", "quartiles", "rows", "host ms", "cold s", "note")
    columns = {name: loop.COLUMNS[name] for name in chosen} | {"draw ms": (7, figure("draw_milliseconds", ".3f"))}
    table = Table(args, columns, 3)
    items = [f"{name}/{precision}" for precision in harness.precisions(args) for name in names(args.device)]
    for row in harness.measured(args, [item for item in items if any(part in item for part in args.only.split(","))]):
        table.add(row)


if __name__ == "__main__":
    main()
