"""How the cost of a private step grows with the batch, the sequence, the width and the number of parameter tensors.

    python benchmarks/growth.py
    python benchmarks/growth.py --device cuda --precision tf32 --warm 8
    python benchmarks/growth.py --modes eager --only T

One quantity grows at a time, from a stack of residual linear layers over sequences (two tensors each). A step is
forward, backward, scaling, noise and update on one batch. Eager is compared with eager and compiled with compiled, in
turns; a ratio is the median over rounds.
"""

import argparse
import statistics
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import harness
from contenders import ours, plain
from harness import Row, Step, Table, figure

BASE = {
    "cpu": {"B": 32, "T": 32, "width": 128, "layers": 4},
    "cuda": {"B": 64, "T": 128, "width": 512, "layers": 4},
}
GROWTH = {
    "cpu": {"B": (8, 32, 128, 512), "T": (1, 8, 32, 128, 512), "width": (32, 128, 512), "layers": (1, 4, 16, 64)},
    "cuda": {
        "B": (8, 64, 512, 2048),
        "T": (1, 8, 32, 128, 512, 2048),
        "width": (128, 512, 2048),
        "layers": (1, 4, 16, 64),
    },
}
MODES = ("eager", "compiled")


class Residual(nn.Module):
    """x + GELU(W x + b). Without x the numbers of a deep stack become too small for a CPU to compute with at speed."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.linear(x))


class Stack:
    """A task of `step`: layers of width × width over (B, T, width), one loss per sample."""

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        return out.float().square().mean((1, 2)) + 0 * y


def step_of(mode: str, private: bool, size: dict[str, int], args: argparse.Namespace, precision: str) -> Step:
    torch.manual_seed(0)
    width = size["width"]
    layers = [Residual(width) for _ in range(size["layers"])]
    x = torch.randn(size["B"], size["T"], width, device=args.device)
    y = torch.zeros(size["B"], device=args.device)
    make = (ours if private else plain)(mode == "compiled")
    return make(Stack(), nn.Sequential(*layers).to(args.device), x, y, harness.casting(args.device, precision))


def measure(item: str, args: argparse.Namespace) -> Iterator[Row]:
    precision, name = item.split("/")
    harness.use(precision)
    what, value = name.split("=")
    size = BASE[args.device] | {what: int(value)}
    row: Row = {}
    for mode in args.modes:
        if args.ahead and mode == "eager":
            continue
        try:
            steps = [step_of(mode, private, size, args, precision) for private in (False, True)]
            for step in steps:
                step()
                step()
            harness.insist_compiled()
            if not args.ahead:
                base, private = harness.turns(steps, args.device, args.rounds)
                row[f"{mode}_plain_ms"], row[f"{mode}_ms"] = (1e3 * statistics.median(t) for t in (base, private))
                row[f"{mode}_ratio"], *row[f"{mode}_quartiles"] = harness.median_ratio(private, base)
        except Exception as error:
            harness.NOTES.said.clear()
            row[f"{mode}_error"] = harness.complaint(error)
        steps = []
        harness.release(args.device)
    if any(f"{mode}_error" in row for mode in args.modes):
        row["note"] = "; ".join(row[f"{mode}_error"] for mode in args.modes if f"{mode}_error" in row)
    yield row


def columns(modes: list[str]) -> dict[str, tuple[int, object]]:
    found = {
        "grows": (8, lambda row: row["item"].split("/")[1].split("=")[0]),
        "to": (6, lambda row: row["item"].split("=")[1]),
        "precision": (9, lambda row: row["item"].split("/")[0]),
    }
    for mode in modes:
        found |= {
            f"plain {mode} ms": (17, figure(f"{mode}_plain_ms", ".2f")),
            f"dpscale {mode} ms": (19, figure(f"{mode}_ms", ".2f")),
            f"{mode} ratio": (14, figure(f"{mode}_ratio", ".2f")),
        }
    return found | {"note": (4, lambda row: row.get("note") or " ")}


def main() -> None:
    parser = harness.arguments(__doc__, rounds=15)
    parser.add_argument("--modes", default=",".join(MODES), help=f"of {', '.join(MODES)}")
    args = parser.parse_args()
    args.modes = [mode for mode in MODES if mode in args.modes.split(",")]
    if args.items:
        harness.serve(args, lambda item: measure(item, args))
        return
    names = [f"{what}={value}" for what, values in GROWTH[args.device].items() for value in values]
    print(f"{harness.machine(args)}, from {', '.join(f'{k} = {v}' for k, v in BASE[args.device].items())}")
    table = Table(args, columns(args.modes), 3)
    for row in harness.measured(args, harness.wanted(args, names)):
        table.add(row)


if __name__ == "__main__":
    main()
