"""Five ways to choose settings on digits at ε = 3: paid selection, all tries composed, an uncounted search,
the rule for rates; and a few tries at more noise, whose best rate is scaled.

    python experiments/tuned_digits.py --seeds 10 --out results/tuned-digits.json

Every way trains on the same four fifths of the training images and measures once on the test images. Those that search
draw settings of the same space, and score them on the held-out fifth. What differs is the noise that the budget leaves
to each try, and what the search costs in truth.
"""

import argparse
import dataclasses
import json
import logging
import math
import tempfile
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from scipy import stats

from dpscale import accounting
from dpscale.advice import rates_for
from dpscale.lab import runner, selection
from dpscale.lab.presets import PRESETS
from dpscale.plan import Plan
from dpscale.selection import Selection

CONFIG = PRESETS["digits"]
PAID = Selection(tries=8, score_noise=5)
TRIES = 8
GIVEN = {"C": CONFIG.C, "s": CONFIG.s, "gamma1": CONFIG.gamma1}


def composed_plan(plan: Plan, tries: int) -> Plan:
    """The noise at which so many runs, all released, cost the budget."""
    whole = dataclasses.replace(plan, steps=tries * (plan.steps or 0), epochs=None)
    sigma = whole.calibrate(epsilon=CONFIG.epsilon, delta=CONFIG.delta).noise_multiplier
    return dataclasses.replace(plan, noise_multiplier=sigma, delta=CONFIG.delta)


def score_noise(tries: int) -> float:
    """Of so many counts of held-out people, all released, for the budget."""
    return accounting.calibrate_noise_multiplier(
        lambda sigma: dp_accounting.SelfComposedDpEvent(dp_accounting.GaussianDpEvent(sigma), tries),
        epsilon=CONFIG.epsilon, delta=CONFIG.delta, adjacency="add-remove",
    )  # fmt: skip


def best_of(plan: Plan, choices: list[dict[str, Any]], noise: float, seed: int) -> float:
    """Test accuracy of the try with the best score."""
    held, whole = runner.load(CONFIG, "search"), runner.load(CONFIG, "final")
    random, found = np.random.default_rng(seed), []
    for number, choice in enumerate(choices):
        made, own = selection.job(CONFIG, choice, plan, seed + number)
        model = runner.trained(made, own, held)
        right = round(runner.evaluate(model, held, CONFIG)[0] * len(held.test_labels))
        found.append((right + noise * random.normal(), runner.evaluate(model, whole, CONFIG)[0]))
    return max(found)[1]


def drawn(seed: int) -> list[dict[str, Any]]:
    """Settings of the space, as `tune` draws them."""
    random, space = np.random.default_rng(seed), selection.space(CONFIG)
    return [{name: values[random.integers(len(values))] for name, values in space.items()} for _ in range(TRIES)]


def advised(plan: Plan) -> float:
    """The rate that the rule has without the data."""
    assert plan.steps and plan.noise_multiplier
    parameters = sum(p.numel() for p in runner.untrained(CONFIG, runner.load(CONFIG, "search")).parameters())
    noise = plan.noise_multiplier / plan.expected_batch / math.sqrt(plan.steps)
    return math.sqrt(math.prod(rates_for(plan.steps, noise, parameters)))


QUIET, SPREAD = 3.0, (1 / 3, 1.0, 3.0)
"""Rates that are tried before the run, around the rule's, each with so many times its noise."""


def scaled_plan(plan: Plan) -> Plan:
    """The noise at which a run, and before it a try of each rate at `QUIET` times the noise, cost the budget."""

    def event(sigma: float) -> dp_accounting.DpEvent:
        tries = plan.sampling.event(QUIET * sigma, len(SPREAD) * (plan.steps or 0))
        return dp_accounting.ComposedDpEvent([tries, plan.sampling.event(sigma, plan.steps or 0)])

    sigma = accounting.calibrate_noise_multiplier(
        event, epsilon=CONFIG.epsilon, delta=CONFIG.delta, adjacency=plan.adjacency
    )
    return dataclasses.replace(plan, noise_multiplier=sigma, delta=CONFIG.delta)


def scaled(plan: Plan, seed: int) -> float:
    """Rates tried at more noise, all of it composed; the best one, scaled to less noise, for the run."""
    held, random, found = runner.load(CONFIG, "search"), np.random.default_rng(seed), []
    assert plan.noise_multiplier is not None
    loud = dataclasses.replace(plan, noise_multiplier=QUIET * plan.noise_multiplier)
    for number, factor in enumerate(SPREAD):
        rate = factor * advised(loud)
        made, own = selection.job(CONFIG, GIVEN | {"rate": rate}, loud, seed + number)
        right = runner.evaluate(runner.trained(made, own, held), held, CONFIG)[0] * len(held.test_labels)
        found.append((right + score_noise(len(SPREAD)) * random.normal(), rate))
    return best_of(plan, [GIVEN | {"rate": QUIET * max(found)[1]}], 0.0, seed + 50)


def measured(way: str, seed: int) -> float:
    """Test accuracy of a way to choose."""
    base = runner.planned(CONFIG, runner.load(CONFIG, "search"))
    single = base.calibrate(epsilon=CONFIG.epsilon, delta=CONFIG.delta)
    if way == "paid":
        with tempfile.TemporaryDirectory() as folder:
            return float(selection.select(CONFIG, PAID, Path(folder), seed)["test_accuracy"])
    if way == "composed":
        return best_of(composed_plan(base, TRIES), drawn(seed), score_noise(TRIES), seed + 100)
    if way == "uncounted":
        return best_of(single, drawn(seed), 0.0, seed + 200)
    if way == "scaled":
        return scaled(scaled_plan(base), seed + 400)
    return best_of(single, [GIVEN | {"rate": advised(single)}], 0.0, seed + 300)


def costs() -> dict[str, dict[str, float]]:
    """Noise multiplier of a try, ε of one try, and ε of all that each way has to answer for."""
    base, delta = runner.planned(CONFIG, runner.load(CONFIG, "search")), CONFIG.delta
    paid = PAID.calibrate(base, epsilon=CONFIG.epsilon, delta=delta)
    every, single = composed_plan(base, TRIES), base.calibrate(epsilon=CONFIG.epsilon, delta=delta)

    def row(plan: Plan, whole: float) -> dict[str, float]:
        assert plan.noise_multiplier is not None
        return {"noise_multiplier": plan.noise_multiplier, "one_try": plan.epsilon(delta), "whole": whole}

    def all_of(plan: Plan) -> float:
        return dataclasses.replace(plan, steps=TRIES * (plan.steps or 0), epochs=None).epsilon(delta)

    return {
        "paid": row(paid, PAID.epsilon(paid, delta)), "composed": row(every, all_of(every)),
        "uncounted": row(single, all_of(single)), "none": row(single, single.epsilon(delta)),
        "scaled": row(scaled_plan(base), CONFIG.epsilon),
    }  # fmt: skip


def interval(values: list[float]) -> tuple[float, float]:
    """Mean and half of Student's 95% interval."""
    half = stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)) if values[1:] else 0.0
    return float(np.mean(values)), float(half)


def main() -> None:
    """Measure every way at every seed, and print the table; ways that are not named stay as they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--ways", default="paid,composed,uncounted,none,scaled")
    parser.add_argument("--out", type=Path, required=True)
    asked = parser.parse_args()
    logging.getLogger("absl").setLevel(logging.ERROR)  # of Rényi orders that are left out, which only costs
    found = json.loads(asked.out.read_text(encoding="utf-8")) if asked.out.exists() else {}
    for way in asked.ways.split(","):
        accuracies = [measured(way, 1000 * (seed + 1)) for seed in range(asked.seeds)]
        found[way] = {**costs()[way], "accuracies": accuracies, "mean_and_half": interval(accuracies)}
    asked.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for name, row in found.items():
        mean, half = row["mean_and_half"]
        print(f"{name:<10} sigma {row['noise_multiplier']:.3f}  one try {row['one_try']:.2f}  "
              f"whole {row['whole']:.2f}  test accuracy {100 * mean:.1f} ± {100 * half:.1f}%")  # fmt: skip


if __name__ == "__main__":
    main()
