"""Selection that is paid for: try settings at random, release only the best, and count what that costs.

Trying ten learning rates on private data and keeping the best costs more than one run, and less than ten, if how many
are tried is random and nothing but the best is released (Papernot and Steinke, *Hyperparameter Tuning with Renyi
Differential Privacy*, 2022, Theorems 2 and 6). The score that decides must be private as well: a noisy count of people
who were held out, or anything on public data.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize
from torch import Tensor, nn

from dpscale import checkpoint
from dpscale.checks import is_number, require, require_positive, require_probability
from dpscale.noise import Key
from dpscale.plan import Plan
from dpscale.training import Private

log = logging.getLogger("dpscale")

Choice = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How many settings are tried, at random, and how noisy their scores are.

    Args:
        tries: how many on average, at least 1.
        shape: of the distribution: a truncated negative binomial. 1 is the geometric one, 0 the logarithmic one, inf
            the Poisson one, which may try nothing.
        score_noise: standard deviation of the noise on a score that counts held-out people, each of whom changes it by
            at most 1. None: scores are of public data.
    """

    tries: float = 8.0
    shape: float = 1.0
    score_noise: float | None = None

    def __post_init__(self) -> None:
        require(is_number(self.tries) and self.tries >= 1, "Selection", "tries", "a number >= 1", self.tries)
        require(is_number(self.shape) and self.shape >= 0, "Selection", "shape", "a number >= 0, or inf", self.shape)
        if self.score_noise is not None:
            require_positive("Selection", "score_noise", self.score_noise, action="Public scores need none: None.")

    def epsilon(self, plan: Plan, delta: float) -> float:
        """What the selection costs in all, by Rényi DP: of those trained on, or held out, whoever loses more."""
        require_probability("Selection.epsilon", "delta", delta, action="Take it well below 1/size, such as 1e-5.")
        require(
            plan.adjacency != "replace-one", "Selection.epsilon", "plan", "one whose neighbours have a sample more",
            plan.adjacency, "Sample by Poisson(...): Rényi DP of draws of a fixed size is not known to fit.",
        )  # fmt: skip
        events = [plan.event()]
        if self.score_noise is not None:  # nobody is both trained on and held out
            events.append(dp_accounting.GaussianDpEvent(self.score_noise))
        return max(self._cost(event, delta) for event in events)

    def _cost(self, event: dp_accounting.DpEvent, delta: float) -> float:
        accountant = dp_accounting.rdp.RdpAccountant()
        accountant.compose(RepeatAndSelectDpEvent(event, self.tries, self.shape))
        return float(accountant.get_epsilon(delta))

    def calibrate(self, plan: Plan, *, epsilon: float, delta: float) -> Plan:
        """The plan with the least noise at which the whole selection costs at most ``epsilon``."""
        require_positive("Selection.calibrate", "epsilon", epsilon, action="It is the budget of all tries together.")

        def excess(log_sigma: float) -> float:
            return self.epsilon(replace(plan, noise_multiplier=math.exp(log_sigma)), delta) - epsilon

        action = "Raise epsilon, lower tries, or raise score_noise."
        require(excess(7.0) < 0, "Selection.calibrate", "epsilon", "enough for so many tries", epsilon, action)
        root = optimize.brentq(excess, -2.0, 7.0, xtol=1e-5) if excess(-2.0) > 0 else -2.0
        return replace(plan, noise_multiplier=math.exp(root + 2e-5), delta=delta)

    def draw(self, generator: np.random.Generator) -> int:
        """How many to try."""
        if math.isinf(self.shape):
            return int(generator.poisson(self.tries))
        if self.tries == 1:
            return 1
        gamma = _halting(self.shape, self.tries)
        if self.shape == 0:
            return int(generator.logseries(1 - gamma))
        while True:
            if number := int(generator.negative_binomial(self.shape, gamma)):
                return number


def _halting(shape: float, mean: float) -> float:
    """γ of a truncated negative binomial of that mean (Definition 1 there); a hair too large: never more tries."""

    def excess(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        above = math.log(1 / gamma) if shape == 0 else -math.expm1(shape * log_gamma) / shape
        return (1 / gamma - 1) / above - mean

    return min(1.0, math.exp(optimize.brentq(excess, -60.0, -1e-12)) * (1 + 1e-8))


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best of the tries, which may be released: nothing else of them may.

    Attributes:
        choice: its setting.
        state: its model's state_dict.
        score: its noisy score.
        epsilon, delta: what the whole selection costs.
        statement: for a reviewer.
    """

    choice: Choice
    state: dict[str, Tensor]
    score: float
    epsilon: float
    delta: float
    statement: str

    def __repr__(self) -> str:
        return f"Tuned(choice={self.choice}, score={self.score:.4g}, epsilon={self.epsilon:.4g}, delta={self.delta:g})"


def tune(
    train: Callable[[Choice, Plan], Private], space: Mapping[str, Sequence[Any]], score: Callable[[nn.Module], float],
    *, plan: Plan, selection: Selection | None = None, delta: float | None = None, folder: str | Path | None = None,
    seed: int | None = None, on_try: Callable[[int], None] = lambda done: None,
) -> Tuned | None:  # fmt: skip
    """Train with settings drawn at random, and return the best; the number of tries is random too.

    Guarantee: what is returned is (ε, δ)-differentially private, ε = ``selection.epsilon(plan, delta)``, for those who
    were trained on and those who were held out alike, if nothing else of the tries is published.

    Args:
        train: ``train(choice, plan)`` trains a new model under that plan, with any scaling and momentum of its own
            (``dataclasses.replace(plan, scaling=..., momentum=...)``), and returns its `Private`. What it logs or
            writes is not paid for.
        space: values to choose from, by name, each equally likely.
        score: how good a model is. With ``selection.score_noise``, a count of held-out people, none of whom is trained
            on; noise is added here. Otherwise any number, of public data.
        plan: calibrated, of one try: `Selection.calibrate` does that for a budget of all of them.
        selection: None: `Selection()`.
        delta: None: the plan's.
        folder: where to keep how far it is, for this user's eyes alone; the same call goes on there. None: nowhere.
        seed: as for `privatize`.
        on_try: called with how many tries are done.

    Returns:
        the best try; None if none was made, which only a Poisson number (``shape=inf``) allows.
    """
    selection = selection or Selection()
    delta = plan.delta if delta is None else delta
    require(delta is not None, "tune", "delta", "given, or that of the plan", delta)
    assert delta is not None
    require(len(space) > 0 and all(len(v) for v in space.values()), "tune", "space", "values by name", dict(space))
    epsilon = selection.epsilon(plan, delta)
    log.info("dpscale: the selection costs epsilon = %.4g at delta %g, %.3g tries on average.", epsilon, delta,
             selection.tries)  # fmt: skip
    file = None if folder is None else Path(folder) / "tuning.ckpt"
    found = _begun(file, selection, plan, space, Key(seed).generator("tuning/number"))
    while found["done"] < found["number"]:
        key = Key(None if seed is None else seed + found["done"])
        drawn = key.generator("tuning/choice")
        index = {name: int(drawn.integers(len(values))) for name, values in space.items()}
        private = train({name: space[name][k] for name, k in index.items()}, plan)
        _require_as_planned(private.plan, plan)
        noisy = float(score(private.model)) + (selection.score_noise or 0.0) * key.generator("tuning/score").normal()
        best = found["best"]
        if best is None or (not math.isnan(noisy) and noisy > best["score"]):
            state = {name: t.detach().cpu().clone() for name, t in private.model.state_dict().items()}
            found["best"] = {"index": index, "score": noisy if not math.isnan(noisy) else -math.inf, "state": state}
        private.close()
        found["done"] += 1
        if file is not None:
            checkpoint.write(file, found)
        on_try(found["done"])
    if found["best"] is None:
        return None
    chosen = {name: space[name][k] for name, k in found["best"]["index"].items()}
    said = _statement(selection, plan, epsilon, delta)
    return Tuned(choice=chosen, state=found["best"]["state"], score=found["best"]["score"], epsilon=epsilon,
                 delta=delta, statement=said)  # fmt: skip


def _begun(
    file: Path | None, selection: Selection, plan: Plan, space: Mapping[str, Sequence[Any]],
    generator: np.random.Generator,
) -> dict[str, Any]:  # fmt: skip
    """How far a search is; a new one has drawn its number of tries."""
    terms = repr((selection, plan, {name: list(values) for name, values in space.items()}))
    if file is not None and file.exists():
        found: dict[str, Any] = checkpoint.read(file)
        require(found["terms"] == terms, "tune", "folder", "of this very search", str(file.parent),
                "It holds another one: another plan, selection or space. Take another folder.")  # fmt: skip
        return found
    found = {"terms": terms, "number": selection.draw(generator), "done": 0, "best": None}
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write(file, found)
    return found


def _require_as_planned(ran: Plan, plan: Plan) -> None:
    """Tries that cost something else than was counted are refused."""
    for name in ("sampling", "noise_multiplier", "steps"):
        ours, theirs = getattr(plan, name), getattr(ran, name)
        require(ours == theirs, "tune", "train", f"such that its run has the {name} of the plan, {ours}", theirs,
                "Only scaling and momentum may differ: dataclasses.replace(plan, scaling=...).")  # fmt: skip


def _statement(selection: Selection, plan: Plan, epsilon: float, delta: float) -> str:
    kind = "Poisson" if math.isinf(selection.shape) else f"truncated negative binomial (shape {selection.shape:g})"
    score = (
        "of public data" if selection.score_noise is None
        else f"a count of held-out people with noise of standard deviation {selection.score_noise:g}"
    )  # fmt: skip
    return (
        f"Guarantee: ({math.ceil(epsilon * 1e4) / 1e4:g}, {delta:g})-differential privacy of the best try, by Rényi DP "
        f"of repeat-and-select.\nTries: a random number, {kind}, {selection.tries:g} on average; only the best is "
        f"released.\nScore: {score}.\nOne try by itself:\n{plan.statement(delta)}"
    )
