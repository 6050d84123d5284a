"""``dpscale tune``: an experiment whose search is paid for, within the budget of its preset."""

import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpscale.lab import runner
from dpscale.lab.models import MODELS
from dpscale.lab.presets import METHODS, Choice, Config
from dpscale.plan import Plan
from dpscale.sampling import Poisson
from dpscale.training import Private, privatize
from dpscale.tuning import Selection, tune

METHOD = METHODS["dp-psasc"]
SHARES = 0.5, 0.7, 0.9
"""Values of s to try."""


def select(
    config: Config, selection: Selection, folder: Path, seed: int | None = None,
    on_try: Callable[[int], None] = lambda done: None,
) -> dict[str, Any]:  # fmt: skip
    """Search rate, C, s and outer momentum of DP-PSASC; all tries together cost the ε of the configuration.

    Scores are noisy counts of held-out training samples. The test data measure the best once, at the end.
    """
    held = runner.load(config, "search")
    whole = runner.load(config, "final")
    batch = max(1, round(config.batch * held.size / whole.size))
    planned = Plan(scaling=_rule(config), sampling=Poisson(size=held.size, batch=batch), epochs=config.epochs)
    plan = selection.calibrate(planned, epsilon=config.epsilon, delta=config.delta)
    data = TensorDataset(held.train_images, held.train_labels)
    space = {
        "rate": list(config.grid), "C": [config.C, 4 * config.C], "s": list(SHARES),
        "gamma1": list(config.gamma1s or (config.gamma1,)),
    }  # fmt: skip

    numbers = itertools.count(1)

    def train(choice: dict[str, Any], plan: Plan) -> Private:
        one = config.replace(C=choice["C"], s=choice["s"])
        picked = Choice(rate=choice["rate"], gamma1=choice["gamma1"], K0=None, gamma0=None)
        own = dataclasses.replace(plan, scaling=_rule(one), momentum=METHOD.momentum_of(one, picked))
        model = MODELS[config.model](tuple(held.train_images.shape[1:]), held.classes).to(held.train_labels.device)
        rate = METHOD.learning_rate(one, picked)
        own_seed = None if seed is None else seed + next(numbers)  # no two tries share their noise
        private = privatize(model, torch.optim.SGD(model.parameters(), lr=rate), own, seed=own_seed)
        for each in private.batches(data):
            private.step(each, losses)
        return private

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        logits = model(runner.prepared(batch[0], config))
        return nn.functional.cross_entropy(logits.float(), batch[1], reduction="none")

    def correct(model: nn.Module) -> float:
        return round(runner.evaluate(model, held, config)[0] * len(held.test_labels))

    found = tune(train, space, correct, plan=plan, selection=selection, folder=folder, seed=seed, on_try=on_try)
    single = dataclasses.replace(plan, accountant="pld")
    steps = plan.steps or 0
    costs = {
        "epsilon": selection.epsilon(plan, config.delta), "delta": config.delta,
        "epsilon_of_one_try": single.epsilon(config.delta),
        "epsilon_if_all_were_released": dataclasses.replace(
            plan, steps=round(selection.tries * steps), epochs=None
        ).epsilon(config.delta),
    }  # fmt: skip
    if found is None:
        return {**costs, "choice": None, "test_accuracy": None, "statement": None}
    model = MODELS[config.model](tuple(held.train_images.shape[1:]), held.classes).to(held.train_labels.device)
    model.load_state_dict(found.state)
    return {
        **costs, "choice": found.choice, "score": found.score, "held_out": len(held.test_labels),
        "test_accuracy": runner.evaluate(model, whole, config)[0], "statement": found.statement,
        "noise_multiplier": plan.noise_multiplier, "state": found.state,
    }  # fmt: skip


def _rule(config: Config) -> Any:
    rule = METHOD.scaling(config)
    assert rule is not None
    return rule
