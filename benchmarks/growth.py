"""How the cost of a private step grows with the batch, the sequence, the width and the number of parameter tensors.

    python benchmarks/growth.py
    python benchmarks/growth.py --device cuda

One quantity grows at a time, from a small stack of linear layers over sequences. The ratio is to the plain eager step
in the same run (median of alternating rounds); the private step is eager too.
"""

import argparse
import statistics
import time

import torch
from torch import Tensor, nn

from step import ours, plain

BASE = {"B": 32, "T": 32, "width": 128, "layers": 4}
GROWTH = {"B": (8, 32, 128, 512), "T": (1, 8, 32, 128, 512), "width": (32, 128, 512), "layers": (1, 4, 16, 64)}


class Stack:
    """A task of `step`: layers of width × width over (B, T, width), one loss per sample."""

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        return out.square().mean((1, 2)) + 0 * y


def seconds(step, device: str) -> float:
    start = time.perf_counter()
    step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    print(f"torch {torch.__version__}, {args.device}, {torch.get_num_threads()} threads, base {BASE}")
    print(f"{'grows':<10}{'to':>6}{'plain ms':>11}{'dpscale ms':>12}{'ratio':>8}")
    for name, values in GROWTH.items():
        for value in values:
            size = BASE | {name: value}
            steps = []
            for make in (plain(False), ours(False)):
                torch.manual_seed(0)
                width = size["width"]
                layers = [m for _ in range(size["layers"]) for m in (nn.Linear(width, width), nn.GELU())]
                x = torch.randn(size["B"], size["T"], size["width"], device=args.device)
                y = torch.zeros(size["B"], device=args.device)
                cast = lambda: torch.autocast(args.device, enabled=False)  # noqa: E731
                steps.append(make(Stack(), nn.Sequential(*layers).to(args.device), x, y, cast))
            rounds = [[seconds(step, args.device) for step in steps] for _ in range(args.rounds + 2)][2:]
            a, b = (1e3 * statistics.median(column) for column in zip(*rounds, strict=True))
            ratio = statistics.median(ours / base for base, ours in rounds)
            print(f"{name:<10}{value:>6}{a:>11.2f}{b:>12.2f}{ratio:>8.2f}", flush=True)


if __name__ == "__main__":
    main()
