"""Selection: how many settings are tried, at random, and what releasing the best of them costs.

Trying ten learning rates on private data and keeping the best costs more than one run, and less than ten, if how many
are tried is random and nothing but the best is released (Papernot and Steinke, *Hyperparameter Tuning with Renyi
Differential Privacy*, 2022, Theorems 2 and 6). `tuning.tune` makes the tries.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import dp_accounting
import numpy as np
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from scipy import optimize

from dpscale.checks import is_number, quiet, require, require_positive, require_probability, settle_numbers
from dpscale.plan import SEARCH, Plan, rounded_up, written
from dpscale.privacy_curves import Renyi
from dpscale.sampling import Adjacency


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
        settle_numbers(self)
        require(is_number(self.tries) and self.tries >= 1, "Selection", "tries", "a number >= 1", self.tries)
        require(is_number(self.shape) and self.shape >= 0, "Selection", "shape", "a number >= 0, or inf", self.shape)
        if self.score_noise is not None:
            require_positive("Selection", "score_noise", self.score_noise, action="Public scores need none: None.")

    def epsilon(self, plan: Plan, delta: float) -> float:
        """What the selection costs in all, by Rényi DP: of those trained on, or held out, whoever loses more."""
        return self.cost(plan.event(), plan.adjacency, delta)

    def cost(self, event: dp_accounting.DpEvent, adjacency: Adjacency, delta: float) -> float:
        """`epsilon`, from what one try releases and the adjacency that this holds under."""
        require_probability("Selection.epsilon", "delta", delta, action="Take it well below 1/size, such as 1e-5.")
        return max(float(each.get_epsilon(delta)) for each in self._accountants(event, adjacency))

    def renyi(self, event: dp_accounting.DpEvent, adjacency: Adjacency) -> Renyi:
        """The same in Rényi DP, which adds up with that of other releases: at each order, of whoever loses more there.

        In another search, or in a run beside it, those who were held out may be trained on.
        """
        found = np.stack([accountant.rdp for accountant in self._accountants(event, adjacency)]).max(0)
        return Renyi(np.where(found > 0, found, np.inf))  # 0 or less comes of rounding, and counts as not known

    def delta(self, plan: Plan, epsilon: float) -> float:
        """The δ that the selection costs at ``epsilon``."""
        return max(float(each.get_delta(epsilon)) for each in self._accountants(plan.event(), plan.adjacency))

    def _accountants(self, event: dp_accounting.DpEvent, adjacency: Adjacency) -> list[Any]:
        """Of those who are trained on, and of those who are held out: nobody is both."""
        require(
            adjacency != "replace-one", "Selection.epsilon", "plan", "one whose neighbours have a sample more",
            adjacency, "Sample by Poisson(...): Rényi DP of draws of a fixed size is not known to fit.",
        )  # fmt: skip
        scores = [] if self.score_noise is None else [dp_accounting.GaussianDpEvent(self.score_noise)]
        found = [dp_accounting.rdp.RdpAccountant() for _ in (event, *scores)]
        with quiet("absl"):  # it warns of every order that it leaves out, which only makes the bound a little looser
            for accountant, each in zip(found, (event, *scores), strict=True):
                accountant.compose(RepeatAndSelectDpEvent(each, self.tries, self.shape))
        return found

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

    def facts(self, plan: Plan, delta: float) -> dict[str, str]:
        """What a statement says of the best try, and after it, as `Plan.facts`, of one try by itself."""
        kind = "Poisson" if math.isinf(self.shape) else f"truncated negative binomial (shape {self.shape:g})"
        score = (
            "of public data" if self.score_noise is None
            else f"a count of held-out people with noise of standard deviation {self.score_noise:g}"
        )  # fmt: skip
        one = plan.facts(delta)
        alone, *about = (one.pop(name) for name in ("Guarantee", "Unit of privacy", "Adjacency"))
        return {
            "Guarantee": f"({rounded_up(self.epsilon(plan, delta))}, {delta:g})-differential privacy of "
            "the best try, by Rényi DP of repeat-and-select.",
            "Tries": f"a random number, {kind}, {self.tries:g} on average, drawn once; only the best is released.",
            "Score": f"{score}.", "Unit of privacy": about[0], "Adjacency": about[1], "One try by itself": alone, **one,
        }  # fmt: skip

    def not_counted(self, plan: Plan) -> list[str]:
        """What its ε leaves out: the search is in it."""
        return [line for line in plan.not_counted if line != SEARCH]

    def statement(self, plan: Plan, delta: float) -> str:
        """What to tell a reviewer of the best try."""
        return written(self.facts(plan, delta), self.not_counted(plan))

    def to_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON, which has no infinity."""
        return {name: "inf" if value == math.inf else value for name, value in dataclasses.asdict(self).items()}

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Selection":
        """The selection that `to_dict` has made plain."""
        return Selection(**{name: math.inf if value == "inf" else value for name, value in plain.items()})


def _halting(shape: float, mean: float) -> float:
    """γ of a truncated negative binomial of that mean (Definition 1 there); a hair too large: never more tries."""

    def excess(log_gamma: float) -> float:
        gamma = math.exp(log_gamma)
        above = math.log(1 / gamma) if shape == 0 else -math.expm1(shape * log_gamma) / shape
        return (1 / gamma - 1) / above - mean

    return min(1.0, math.exp(optimize.brentq(excess, -60.0, -1e-12)) * (1 + 1e-8))
