"""The planner's advice against a sweep: accuracy over batch and epochs at one budget, the advised setting among them.

    python experiments/sweep.py --data digits                       # minutes on two cores
    python experiments/sweep.py --data mnist,fashion-mnist --device cuda --processes 16    # minutes
    python experiments/sweep.py --picture docs/figures/sweep.png    # from what results/sweep.json holds

A cell is one batch and number of epochs at the same (N, ε, δ). Its learning rate is searched: three rates around the
middle of those that the plan advises, and more while the best is at an end. Accuracy is on a tenth of the training data
that is held out, averaged over splits; no test data are read. This search is not counted in ε.

MNIST and FashionMNIST are scattering coefficients, normalized image by image, under one linear layer; digits are pixels
under the lab's small CNN. Runs of all cells share the processes. Cells that are in the file are not run again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.advice import rates_for
from dpscale.lab.data import Data, hold_out, load
from dpscale.lab.models import digits_cnn
from dpscale.lab.scattering import scattered
from dpscale.lab.workers import pool

RULE = dpscale.PSAC(C=1.0, r=1e-3)
MOMENTUM = 0.9
RESULTS = Path(__file__).parents[1] / "results" / "sweep.json"


@dataclass(frozen=True)
class Task:
    """A data set at its budget, the model for it, and the grid."""

    samples: Callable[[], Data]
    build: Callable[[], nn.Module]
    epsilon: float
    batches: tuple[int, ...]
    epochs: tuple[float, ...]


def linear() -> nn.Module:
    """One layer, from zero."""
    layer = nn.Linear(81 * 7 * 7, 10)
    nn.init.zeros_(layer.weight)
    return layer


def scattering(name: str, size: int | None = None) -> Data:
    """Coefficients of its training images, normalized image by image."""
    data = scattered(load(name, train_size=size))

    def normalized(images: Tensor) -> Tensor:
        return torch.cat([F.group_norm(part.float(), 27).flatten(1) for part in images.split(1000)])

    return Data(
        name=data.name, classes=10, train_images=normalized(data.train_images), train_labels=data.train_labels,
        test_images=normalized(data.test_images[:1]), test_labels=data.test_labels[:1],
    )  # fmt: skip


TASKS = {
    "digits": Task(lambda: load("digits"), digits_cnn, 3.0, (64, 256, 1024), (10, 40, 160)),
    "mnist": Task(lambda: scattering("mnist"), linear, 3.0, (512, 2048, 8192), (5, 20, 80)),
    "fashion-mnist": Task(
        lambda: scattering("fashion-mnist", 40_000), linear, 9.0, (512, 2048, 8192), (5, 20, 80)
    ),
}  # fmt: skip
DELTA = 1e-5


def planned(size: int, epsilon: float, batch: int, epochs: float) -> dpscale.Plan:
    """At the budget."""
    plan = dpscale.Plan(scaling=RULE, sampling=dpscale.Poisson(size=size, batch=batch), epochs=epochs)
    return plan.calibrate(epsilon=epsilon, delta=DELTA)


@lru_cache
def splits_of(name: str, count: int, device: str) -> list[Data]:
    """A data set with another tenth held out each time."""
    data = TASKS[name].samples()
    return [_on(device, hold_out(data, 0.1, split)) for split in range(count)]


def _on(device: str, data: Data) -> Data:
    tensors = ("train_images", "train_labels", "test_images", "test_labels")
    return replace(data, **{name: getattr(data, name).to(device) for name in tensors})


def accuracy(name: str, split: int, count: int, plan: dpscale.Plan, rate: float, device: str) -> float:
    """Of a private run at a normalized rate, on what one of ``count`` splits holds out."""
    task, data = TASKS[name], splits_of(name, count, device)[split]
    torch.manual_seed(split)
    model = task.build().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * (1 - MOMENTUM) / plan.bound, momentum=MOMENTUM)
    private = dpscale.privatize(model, optimizer, plan, seed=split, compile=False)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for batch in private.batches(TensorDataset(data.train_images, data.train_labels)):
        private.step(batch, loss_fn)
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def cell(name: str, size: int, count: int, batch: int, epochs: float, workers: Executor, device: str) -> dict[str, Any]:
    """The best rate of a setting, and how accurate it is."""
    task, begin = TASKS[name], time.perf_counter()
    plan = planned(size, task.epsilon, min(batch, size), epochs)
    assert plan.steps and plan.noise_multiplier
    noise = plan.noise_multiplier / (plan.expected_batch * plan.steps**0.5)
    lowest, highest = rates_for(plan.steps, noise, sum(p.numel() for p in task.build().parameters()))
    tries: dict[float, list[float]] = {}
    rates = [(lowest * highest) ** 0.5 * factor for factor in (0.5, 1.0, 2.0)]
    while rates:
        runs = {
            rate: [workers.submit(accuracy, name, split, count, plan, rate, device) for split in range(count)]
            for rate in rates
        }
        tries |= {rate: [run.result() for run in each] for rate, each in runs.items()}
        best = max(tries, key=lambda rate: statistics.mean(tries[rate]))
        rates = [best / 2] if best == min(tries) else [best * 2] if best == max(tries) else []
    return {
        "batch": batch, "epochs": epochs, "steps": plan.steps, "noise_multiplier": plan.noise_multiplier,
        "cumulative_noise": noise, "rate": best, "accuracy": statistics.mean(tries[best]), "each": tries[best],
        "tries": {f"{rate:.4g}": found for rate, found in sorted(tries.items())},
        "seconds": round(time.perf_counter() - begin),
    }  # fmt: skip


def grid(task: Task, size: int) -> Iterator[tuple[int, float, bool]]:
    """(Batch, epochs, whether it is the advised one.)"""
    advice = dpscale.advise(size=size, epsilon=task.epsilon, delta=DELTA)
    yield advice.batch, advice.epochs, True
    yield from ((batch, epochs, False) for epochs in task.epochs for batch in task.batches)


def sweep(
    names: Sequence[str], path: Path, count: int, only: int | None = None, processes: int = 1, device: str = "cpu"
) -> None:
    """Run the cells that the file does not have yet, those with the most steps first."""
    known = json.loads(path.read_text()) if path.exists() else {}
    left = []
    for name in names:
        rows, size = known.setdefault(name, []), splits_of(name, count, "cpu")[0].size
        done = {(row["batch"], row["epochs"]) for row in rows}
        cells = [each for each in grid(TASKS[name], size) if each[:2] not in done][:only]
        left += [(epochs * size / batch, name, size, batch, epochs, advised) for batch, epochs, advised in cells]
    if not left:
        return
    with pool(processes) as workers, ThreadPoolExecutor(len(left) if processes > 1 else 1) as cells:
        begun = {
            cells.submit(cell, name, size, count, batch, epochs, workers, device): (name, advised)
            for _, name, size, batch, epochs, advised in sorted(left, reverse=True)
        }
        for done in as_completed(begun):
            name, advised = begun[done]
            found = done.result() | {"advised": advised, "epsilon": TASKS[name].epsilon}
            known[name] = sorted([*known[name], found], key=lambda r: (not r["advised"], r["epochs"], r["batch"]))
            path.write_text(json.dumps(known, indent=1) + "\n")
            shown = "{batch:>6} x {epochs:<6g} {steps:>6} steps  rate {rate:<8.3g} {accuracy:.4f}  {seconds} s"
            print(f"{name}: {shown.format(**found)}{'  (advised)' if advised else ''}", flush=True)


def picture(path: Path, out: Path) -> None:
    """Accuracy over the batch, a line for each number of epochs; the advised setting is marked."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    found = json.loads(path.read_text())
    figure, axes = plt.subplots(1, len(found), figsize=(4 * len(found), 3.4), squeeze=False, layout="constrained")
    for axis, (name, rows) in zip(axes[0], found.items(), strict=True):
        for epochs in sorted({row["epochs"] for row in rows if not row["advised"]}):
            line = sorted((r["batch"], r["accuracy"]) for r in rows if r["epochs"] == epochs and not r["advised"])
            axis.plot(*zip(*line, strict=True), "o-", label=f"{epochs:g} epochs")
        for row in (row for row in rows if row["advised"]):
            axis.plot(row["batch"], row["accuracy"], "k*", ms=13, label=f"advised: {row['epochs']:g} epochs")
        axis.set(title=f"{name}, ε = {rows[0]['epsilon']:g}", xlabel="batch", xscale="log")
        axis.legend(fontsize=8)
    axes[0][0].set_ylabel("accuracy on held-out data")
    figure.savefig(out, dpi=150)


def main() -> None:
    """Run and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="", help=f"some of {','.join(TASKS)}")
    parser.add_argument("--splits", type=int, default=2, help="of the training data, and seeds (%(default)s)")
    parser.add_argument("--cells", type=int, help="run so many of each data set at most")
    parser.add_argument("--processes", type=int, default=1, help="side by side (%(default)s)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="(%(default)s)")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, help="draw what the file holds")
    args = parser.parse_args()
    if unknown := sorted({*args.data.split(",")} - {*TASKS, ""}):
        parser.error(f"--data: {', '.join(unknown)} is not among {', '.join(TASKS)}.")
    names = [name for name in args.data.split(",") if name]
    sweep(names, args.out, args.splits, args.cells, args.processes, args.device)
    if args.picture:
        picture(args.out, args.picture)


if __name__ == "__main__":
    main()
