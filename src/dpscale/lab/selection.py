"""``dpscale tune``: an experiment whose search is paid for, within the budget of its preset."""

import dataclasses
import itertools
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn

from dpscale import checkpoint
from dpscale.lab import runner
from dpscale.lab.presets import METHODS, Choice, Config
from dpscale.lab.progress import OnProgress, ignore
from dpscale.ledger import Ledger
from dpscale.plan import Plan
from dpscale.selection import Selection
from dpscale.tuning import FILE, Try, tune

METHOD = METHODS["dp-psasc"]


def space(config: Config) -> dict[str, list[float]]:
    """What is searched: the normalized rate, C, s and the outer momentum."""
    gamma1s = list(config.gamma1s or (0.1, 0.3))
    return {"rate": list(config.grid), "C": [config.C, 4 * config.C], "s": [0.5, 0.7, 0.9], "gamma1": gamma1s}


def job(config: Config, choice: dict[str, Any], plan: Plan, seed: int | None) -> tuple[runner.Job, Plan]:
    """A try: what is run, and under which plan. Without a seed its noise is the operating system's."""
    one = config.replace(C=choice["C"], s=choice["s"], diagnostics=False)
    picked, rule = Choice(rate=choice["rate"], gamma1=choice["gamma1"]), METHOD.scaling(one)
    assert rule is not None and plan.noise_multiplier is not None
    made = runner.Job(
        config=one, method=METHOD.name, seed=secrets.randbits(62) if seed is None else seed, choice=picked,
        noise_multiplier=plan.noise_multiplier, role="search", fresh=seed is None,
    )  # fmt: skip
    return made, dataclasses.replace(plan, scaling=rule, momentum=METHOD.momentum_of(one, picked))


def select(
    config: Config, selection: Selection, folder: Path, seed: int | None = None,
    on_try: Callable[[int], None] = lambda done: None, ledger: Path | None = None,
    on_progress: OnProgress = ignore,
) -> dict[str, Any]:  # fmt: skip
    """Search rate, C, s and outer momentum of DP-PSASC; all tries together cost the ε of the configuration.

    Scores are noisy counts of held-out training samples. The test data measure the best once, at the end.
    """
    held, whole = runner.load(config, "search"), runner.load(config, "final")
    plan = selection.calibrate(runner.planned(config, held), epsilon=config.epsilon, delta=config.delta)
    file = folder / FILE  # tries that were begun have used their seeds
    numbers = itertools.count(1 + (checkpoint.read(file)["begun"] if file.exists() else 0))

    def train(choice: dict[str, Any], plan: Plan) -> Try:
        own_seed = None if seed is None else seed + next(numbers)  # no two tries share their noise
        made, own = job(config, choice, plan, own_seed)
        return Try(model=runner.trained(made, own, held, on_progress), plan=own, about={"seeded": seed is not None})

    def correct(model: nn.Module) -> float:
        return round(runner.evaluate(model, held, config)[0] * len(held.test_labels))

    found = tune(
        train, space(config), correct, plan=plan, selection=selection, folder=folder, seed=seed, on_try=on_try,
        ledger=None if ledger is None else Ledger(ledger),
    )  # fmt: skip
    every = dataclasses.replace(plan, steps=round(selection.tries * (plan.steps or 0)), epochs=None)
    costs = {
        "epsilon": selection.epsilon(plan, config.delta), "delta": config.delta,
        "epsilon_of_one_try": dataclasses.replace(plan, accountant="pld").epsilon(config.delta),
        "epsilon_if_all_were_released": every.epsilon(config.delta),
    }  # fmt: skip
    if found is None:
        return {**costs, "choice": None, "test_accuracy": None, "statement": None}
    found.card().save(folder / "card.json")
    model = runner.untrained(config, held)
    model.load_state_dict(found.state)
    return {
        **costs, "choice": found.choice, "score": found.score, "held_out": len(held.test_labels),
        "test_accuracy": runner.evaluate(model, whole, config)[0], "statement": found.statement,
        "noise_multiplier": plan.noise_multiplier, "state": found.state,
    }  # fmt: skip
