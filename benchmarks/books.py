"""What a ledger and checkpoints cost of a run: the time that is spent in them, of all time of the run.

    python benchmarks/books.py                       # the paper's CNN on 28×28 images, 300 steps of 256 samples
    python benchmarks/books.py --steps 1000 --batch 64 --save-every 100

The images are noise, which takes as long as any others. The run has one thread. Time is told by the clock, which sees
the waits for the disk and what else the machine does, and as processor time, which sees neither. The price of the plan
is computed once when the run is admitted, and shown apart.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale import booking, privatizing, training
from dpscale.lab.models import MODELS
from dpscale.lab.provenance import installed_versions

CLOCKS = {"seconds": time.perf_counter, "processor_seconds": time.process_time}
spent = {clock: dict.fromkeys(("admission", "reservations", "saves"), 0.0) for clock in CLOCKS}


def read() -> dict[str, float]:
    return {clock: now() for clock, now in CLOCKS.items()}


def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **options: Any) -> Any:
        begin = read()
        try:
            return function(*args, **options)
        finally:
            for clock, end in read().items():
                spent[clock][name] += end - begin[clock]

    return wrapper


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="default: 300")
    parser.add_argument("--batch", type=int, default=256, help="expected; default: 256")
    parser.add_argument("--save-every", type=int, default=50, help="steps between two checkpoints; default: 50")
    args = parser.parse_args()
    torch.set_num_threads(1)
    size = 20 * args.batch
    data = TensorDataset(torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,)))
    model = MODELS["paper_cnn"]((1, 28, 28), 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    plan = dpscale.Plan(
        scaling=dpscale.PSASC(C=0.25, s=0.55), sampling=dpscale.Poisson(size=size, batch=args.batch), steps=args.steps
    ).calibrate(epsilon=3, delta=1e-5)
    booking.Booking.reserve = timed("reservations", booking.Booking.reserve)  # type: ignore[method-assign]
    privatizing.open_run = timed("admission", privatizing.open_run)  # type: ignore[assignment]
    training.Private.save = timed("saves", training.Private.save)  # type: ignore[method-assign]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        books = dpscale.Ledger(Path(folder) / "ledger", epsilon=3, delta=1e-5)
        begin = read()
        private = dpscale.privatize(model, optimizer, plan, ledger=books)
        for batch in private.batches(data):
            private.step(batch, loss_fn)
            if private.steps_taken % args.save_every == 0:
                private.save(Path(folder) / "checkpoint")
        private.close()
        whole = {clock: end - begin[clock] for clock, end in read().items()}
        stretches = books.runs()[0].stretches
    found = {
        clock: {"whole": round(whole[clock], 1)} | {n: f"{100 * one / whole[clock]:.2f}%" for n, one in parts.items()}
        for clock, parts in spent.items()
    } | {
        "stretches": len(stretches), "longest": max(s.last - s.first for s in stretches),
        "torch": torch.__version__, "cpu": installed_versions()["cpu"],
    }  # fmt: skip
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
