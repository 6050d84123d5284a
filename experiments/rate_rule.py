"""A learning rate without the data, against rates that were searched: how many points does it lose?

    python experiments/rate_rule.py

The rule: rate = κ/(T·ν·√d·f), the normalized rate at which the noise that all weights have gathered in the end has
norm κ. T are the steps, ν is the cumulative noise, d is the number of parameters, and f is √(mean of the schedule's
squares): 1 for a constant rate, √(3/8) for a cosine. κ is fitted on the other data sets and judged on the one left out.
Beside it: rate = κ/(T·mean of the schedule), which knows neither noise nor model.

Curves are the searches in results/: accuracy on held-out training images at each rate, averaged over momenta, splits
and seeds. Between rates accuracy is interpolated in log(rate); outside of them it is that of the nearest.
"""

import csv
import itertools
import json
import math
import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"
SHAPES = {"mnist": (1, 28, 28), "fashion-mnist": (1, 28, 28), "cifar10-simclr": (2048,), "celeba-male": (3, 64, 64),
          "imagenette": (3, 160, 160)}  # fmt: skip
CLASSES = {"celeba-male": 2}
MEAN = {"constant": 1.0, "cosine": 0.5}
ROOT = {"constant": 1.0, "cosine": math.sqrt(3 / 8)}
UNIT_NORM = {"cifar10-simclr"}
"""Data whose rows have norm 1, where the others have about 1 in every coordinate."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Accuracy over rates, all else being equal."""

    data: str
    model: str
    method: str
    optimizer: str
    schedule: str
    steps: int
    noise: float
    parameters: int
    accuracy: Mapping[float, float]

    @property
    def best(self) -> float:
        """The best rate."""
        return max(self.accuracy, key=lambda rate: self.accuracy[rate])

    def at(self, rate: float) -> float:
        """Accuracy at a rate, between those that were tried; that of the nearest one outside of them."""
        tried = sorted(self.accuracy)
        if rate <= tried[0] or rate >= tried[-1]:
            return self.accuracy[tried[0] if rate <= tried[0] else tried[-1]]
        low, high = next((a, b) for a, b in itertools.pairwise(tried) if a <= rate <= b)
        share = math.log(rate / low) / math.log(high / low)
        return (1 - share) * self.accuracy[low] + share * self.accuracy[high]

    def loss(self, rate: float) -> float:
        """Points that a rate loses against the best one."""
        return 100 * (self.accuracy[self.best] - self.at(rate))

    def inside(self, rate: float) -> bool:
        """Whether it is between rates that were tried."""
        return min(self.accuracy) <= rate <= max(self.accuracy)


def by_noise(curve: Curve) -> float:
    """Norm of the noise that all weights have gathered in the end, at rate 1."""
    return curve.steps * curve.noise * math.sqrt(curve.parameters) * ROOT[curve.schedule]


def by_steps(curve: Curve) -> float:
    """How far a run can go at rate 1."""
    return curve.steps * MEAN[curve.schedule]


def curves() -> list[Curve]:
    """Every search in results/ that tried two rates or more."""
    found: dict[tuple[Any, ...], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, rate, accuracy in (*_records(), *_explored(), *_digits()):
        found[key][rate].append(accuracy)
    names = [name for name in Curve.__dataclass_fields__ if name != "accuracy"]
    return [
        Curve(**dict(zip(names, key, strict=True)), accuracy={r: statistics.mean(a) for r, a in sorted(tries.items())})
        for key, tries in found.items() if len(tries) > 1
    ]  # fmt: skip


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        yield from map(json.loads, file)


def _records() -> Iterator[tuple[tuple[Any, ...], float, float]]:
    """Searches of the lab."""
    for path in sorted([*RESULTS.glob("*.jsonl"), *(RESULTS / "tried").glob("*.jsonl")]):
        for r in _lines(path):
            c, plan = r["config"], r["plan"]
            if r["role"] != "search" or plan is None or r["method"] == "dp-psasc-star":
                continue
            nu = plan["noise_multiplier"] / plan["sampling"]["batch"] / math.sqrt(plan["steps"])
            key = (c["preset"], c["model"], r["method"], c["optimizer"], c.get("schedule") or "constant",
                   plan["steps"], nu, _parameters(c["model"], c["preset"]))  # fmt: skip
            yield key, r["choice"]["rate"], r["accuracy"]


def _explored() -> Iterator[tuple[tuple[Any, ...], float, float]]:
    """Other networks and batches, on MNIST and FashionMNIST."""
    for r in _lines(RESULTS / "tried/record/explored.jsonl"):
        if r["views"] == 0 and r["average"] == 0 and r["method"] != "dp-psasc-star":
            nu = r["noise_multiplier"] / r["batch"] / math.sqrt(r["steps"])
            key = (r["preset"], r["model"], r["method"], "sgd", r["schedule"], r["steps"], nu, r["parameters"])
            yield key, r["rate"], r["accuracy"]


def _digits() -> Iterator[tuple[tuple[Any, ...], float, float]]:
    path = RESULTS / "tried/digits-rates.csv"
    if path.exists():
        with path.open(encoding="utf-8", newline="") as file:
            for r in csv.DictReader(file):
                key = ("digits", "digits_cnn", "dp-psac", "sgd", r["schedule"], int(r["steps"]), float(r["noise"]),
                       int(r["parameters"]))  # fmt: skip
                yield key, float(r["rate"]), float(r["accuracy"])


_counted: dict[tuple[str, str], int] = {}


def _parameters(model: str, preset: str) -> int:
    import torch

    from dpscale.lab.models import MODELS

    if (model, preset) not in _counted:
        with torch.device("meta"):
            made = MODELS[model](SHAPES[preset], CLASSES.get(preset, 10))
        _counted[model, preset] = sum(p.numel() for p in made.parameters())
    return _counted[model, preset]


def fitted(known: Sequence[Curve], scale: Callable[[Curve], float]) -> float:
    """κ of the best rates, where the best one is not the last that was tried; every data set counts alike."""
    found: dict[str, list[float]] = defaultdict(list)
    for curve in known:
        if curve.best not in (min(curve.accuracy), max(curve.accuracy)):
            found[curve.data].append(math.log(curve.best * scale(curve)))
    return math.exp(statistics.mean(map(statistics.mean, found.values())))


def judged(known: Sequence[Curve], scale: Callable[[Curve], float]) -> dict[str, dict[str, float]]:
    """Of each data set, judged by a κ from all others: the rule's rate over the best one, and the points lost."""
    found = {}
    for name in sorted({curve.data for curve in known}):
        own = [c for c in known if c.data == name]
        kappa = fitted([c for c in known if c.data != name and c.data not in UNIT_NORM], scale)
        rates = [kappa / scale(c) for c in own]
        found[name] = {
            "kappa": kappa, "curves": len(own),
            "rate_over_best": math.exp(statistics.mean(math.log(r / c.best) for r, c in zip(rates, own, strict=True))),
            "points_lost": statistics.mean(c.loss(r) for r, c in zip(rates, own, strict=True)),
            "most_lost": max(c.loss(r) for r, c in zip(rates, own, strict=True)),
            "inside": sum(c.inside(r) for r, c in zip(rates, own, strict=True)) / len(own),
            "best_at_end": sum(c.best in (min(c.accuracy), max(c.accuracy)) for c in own) / len(own),
        }  # fmt: skip
    return found


def proxies(known: Sequence[Curve], first: str = "mnist", second: str = "fashion-mnist") -> tuple[float, float]:
    """Points lost on average by the best rate of one data set on the other, as it is and scaled by their noise."""
    of: dict[tuple[str, ...], Curve] = {(c.data, c.model, c.method, c.schedule): c for c in known}
    as_it_is, scaled = [], []
    for (data, *rest), curve in of.items():
        other = of.get((second if data == first else first, *rest)) if data in (first, second) else None
        if other is not None:
            as_it_is.append(curve.loss(other.best))
            scaled.append(curve.loss(other.best * by_noise(other) / by_noise(curve)))
    return statistics.mean(as_it_is), statistics.mean(scaled)


def measure_digits(seeds: Sequence[int] = (1, 2)) -> None:
    """Search digits, here and now: the preset's batch, and a small one with many steps."""
    from dpscale.lab import runner, selection
    from dpscale.lab.presets import PRESETS

    rows = []
    for batch, epochs, schedule in ((256, 15, "constant"), (64, 44, "constant"), (64, 44, "cosine")):
        config = PRESETS["digits"].replace(batch=batch, epochs=epochs, schedule=schedule, momentum="none")
        held = runner.load(config, "search")
        plan = runner.planned(config, held).calibrate(epsilon=config.epsilon, delta=config.delta)
        assert plan.steps and plan.noise_multiplier
        noise = plan.noise_multiplier / plan.expected_batch / math.sqrt(plan.steps)
        for rate in (2.0**k for k in range(-5, 4)):
            for seed in seeds:
                job, own = selection.job(config, {"rate": rate, "C": 1.0, "s": 1.0, "gamma1": 1.0}, plan, seed)
                model = runner.trained(job, own, held)
                rows.append({
                    "schedule": schedule, "steps": plan.steps, "noise": noise,
                    "parameters": sum(p.numel() for p in model.parameters()), "rate": rate, "seed": seed,
                    "accuracy": runner.evaluate(model, held, config)[0],
                })  # fmt: skip
                print(rows[-1], flush=True)
    with (RESULTS / "tried/digits-rates.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def main() -> None:
    """Print both rules, data set by data set; with ``--digits`` search digits before."""
    if "--digits" in sys.argv:
        measure_digits()
    known = [curve for curve in curves() if curve.optimizer == "sgd"]
    for title, scale in (("by noise", by_noise), ("by steps", by_steps)):
        whole = [curve for curve in known if curve.data not in UNIT_NORM]
        print(f"{title}: kappa of all but unit-norm data {fitted(whole, scale):.3g}")
        for name, row in judged(known, scale).items():
            print(f"  {name:<15}", "  ".join(f"{key} {value:.3g}" for key, value in row.items()))
    print("the other of MNIST and FashionMNIST as a proxy loses {:.2f}, and {:.2f} if scaled".format(*proxies(known)))
    nadam = [curve for curve in curves() if curve.optimizer == "nadam"]
    for c in nadam:
        print(f"  {c.data} {c.model} {c.schedule} {c.method}: best {c.best:g} of {min(c.accuracy):g} to "
              f"{max(c.accuracy):g}; 2e-3 loses {c.loss(2e-3):.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
