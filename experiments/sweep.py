"""The planner's advice against a sweep: accuracy over batch and epochs at one budget, the advised setting among them.

    python experiments/sweep.py --data digits                       # minutes on two cores
    python experiments/sweep.py --data mnist,fashion-mnist          # about an hour each
    python experiments/sweep.py --picture docs/figures/sweep.png    # from what results/sweep.json holds

A cell is one batch and number of epochs at the same (N, ε, δ). Its learning rate is searched: three rates around the
middle of those that the plan advises, and more while the best is at an end. Accuracy is on a tenth of the training data
that is held out, averaged over splits; no test data are read. This search is not counted in ε.

MNIST and FashionMNIST are scattering coefficients, normalized image by image, under one linear layer; digits are pixels
under the lab's small CNN. Cells that are in the file are not run again.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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


def accuracy(task: Task, data: Data, plan: dpscale.Plan, rate: float, seed: int) -> float:
    """Of a private run at a normalized rate, on what ``data`` hold out."""
    torch.manual_seed(seed)
    model = task.build()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate * (1 - MOMENTUM) / plan.bound, momentum=MOMENTUM)
    private = dpscale.privatize(model, optimizer, plan, seed=seed)

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    for batch in private.batches(TensorDataset(data.train_images, data.train_labels)):
        private.step(batch, loss_fn)
    with torch.no_grad():
        return float((model(data.test_images).argmax(1) == data.test_labels).float().mean())


def cell(task: Task, splits: list[Data], batch: int, epochs: float) -> dict[str, Any]:
    """The best rate of a setting, and how accurate it is."""
    size, begin = splits[0].size, time.perf_counter()
    plan = planned(size, task.epsilon, min(batch, size), epochs)
    assert plan.steps and plan.noise_multiplier
    noise = plan.noise_multiplier / (plan.expected_batch * plan.steps**0.5)
    lowest, highest = rates_for(plan.steps, noise, sum(p.numel() for p in task.build().parameters()))
    tries: dict[float, list[float]] = {}
    rates = [(lowest * highest) ** 0.5 * factor for factor in (0.5, 1.0, 2.0)]
    while rates:
        for rate in rates:
            tries[rate] = [accuracy(task, data, plan, rate, seed) for seed, data in enumerate(splits)]
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


def sweep(name: str, path: Path, count: int, only: int | None = None) -> None:
    """Run the cells of a data set that the file does not have yet."""
    known = json.loads(path.read_text()) if path.exists() else {}
    rows = known.setdefault(name, [])
    task = TASKS[name]
    data = task.samples()
    splits = [hold_out(data, 0.1, split) for split in range(count)]
    for batch, epochs, advised in list(grid(task, splits[0].size))[:only]:
        if any((row["batch"], row["epochs"]) == (batch, epochs) for row in rows):
            continue
        rows.append(cell(task, splits, batch, epochs) | {"advised": advised, "epsilon": task.epsilon})
        path.write_text(json.dumps(known, indent=1) + "\n")
        shown = "{batch:>6} x {epochs:<6g} {steps:>6} steps  rate {rate:<8.3g} {accuracy:.4f}  {seconds} s"
        print(f"{name}: {shown.format(**rows[-1])}{'  (advised)' if advised else ''}", flush=True)


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
    parser.add_argument("--cells", type=int, help="run so many at most")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, help="draw what the file holds")
    args = parser.parse_args()
    for name in filter(None, args.data.split(",")):
        sweep(name, args.out, args.splits, args.cells)
    if args.picture:
        picture(args.out, args.picture)


if __name__ == "__main__":
    main()
