"""Events -> epsilon, and back: what a run has cost, and how much noise or how many steps a budget allows.

An event (from a sampler) says what happened; this module says what it costs, by dp-accounting's tools:

| event                            | accountant="pld"                              | accountant="rdp" |
|----------------------------------|-----------------------------------------------|------------------|
| Gaussian, composed               | exact: one Gaussian of noise σ/√T             | Rényi DP         |
| Poisson-sampled Gaussian         | privacy loss distributions, add and remove    | Rényi DP         |
| Gaussian sampled w/o replacement | privacy loss distribution, replace-one, tight | Rényi DP         |
| no noise, or not private         | inf                                           | inf              |
| nothing (`NoOpDpEvent`)          | 0                                             | 0                |
| anything else                    | refused by name                               | refused by name  |

Guarantee: every answer is an upper bound on the true ε (or δ). Grids round pessimistically, a grid too large
for memory is made coarser, and "pld" is never above "rdp" because it gives the smaller of the two. The curves
themselves are in `privacy_curves`.
"""

import math
from collections import Counter
from collections.abc import Callable
from functools import lru_cache

import dp_accounting
import numpy as np
from scipy import optimize

from dpscale.checks import is_number, require, require_choice, require_positive, require_probability
from dpscale.privacy_curves import Part, Renyi, curves, renyi_of
from dpscale.sampling import Accountant, Adjacency


def epsilon(
    event: dp_accounting.DpEvent, *, delta: float, adjacency: Adjacency, accountant: Accountant = "pld"
) -> float:
    """The ε that ``event`` costs at ``delta``: an upper bound, 0 for nothing done, inf without noise.

    Example:
        >>> event = dp_accounting.GaussianDpEvent(1.0)
        >>> round(epsilon(event, delta=1e-5, adjacency="add-remove"), 3)
        4.377
    """
    require_probability("epsilon", "delta", delta, action="Take it well below 1/size, such as 1e-5.")
    return _spent(event, delta, adjacency, accountant)


def delta(
    event: dp_accounting.DpEvent, *, epsilon: float, adjacency: Adjacency, accountant: Accountant = "pld"
) -> float:
    """The δ that ``event`` costs at ``epsilon``: an upper bound, 0 for nothing done, 1 without noise."""
    ok = is_number(epsilon) and 0 <= epsilon < math.inf
    require(ok, "delta", "epsilon", "a finite number >= 0", epsilon, "It is the budget to be spent.")
    with np.errstate(all="ignore"):  # far tails overflow and underflow as they should
        bounds = curves(_checked_parts(event, adjacency, accountant), pld=accountant == "pld")
        return min((min(max(curve.delta(epsilon), 0.0), 1.0) for curve in bounds), default=0.0)


def renyi(event: dp_accounting.DpEvent, *, adjacency: Adjacency) -> Renyi:
    """What ``event`` costs in Rényi DP, at the orders of dp-accounting."""
    return renyi_of(_parts(event, adjacency).items())


def calibrate_noise_multiplier(
    event_for: Callable[[float], dp_accounting.DpEvent], *, epsilon: float, delta: float, adjacency: Adjacency,
    accountant: Accountant = "pld",
) -> float:  # fmt: skip
    """The least noise multiplier whose event costs at most ``epsilon`` at ``delta``.

    Guarantee: the cost at the result is <= ``epsilon``; the result is within 1e-4 (relative) of the least.
    """
    owner = "calibrate_noise_multiplier"
    _require_target(owner, epsilon, delta)
    seen: dict[float, float] = {}

    def excess(log_sigma: float) -> float:
        sigma = math.exp(log_sigma)
        if sigma not in seen:
            seen[sigma] = _spent(event_for(sigma), delta, adjacency, accountant)
        # In logarithms the curve is nearly a line, which is what makes the search short.
        return math.log(min(max(seen[sigma], epsilon * 1e-9), epsilon * 1e9) / epsilon)

    lower, upper = 0.0, 0.0
    while excess(upper) > 0:
        lower, upper = upper, upper + 1
        action = "Raise epsilon or delta, or take fewer steps."
        require(upper < 60, owner, "epsilon", "reachable with finite noise", epsilon, action)
    while excess(lower) <= 0:
        lower, upper = lower - 0.5, lower
        action = "Nothing, or next to nothing, is released: ask for more steps or a smaller epsilon."
        require(lower > -13, owner, "epsilon", "small enough to need noise", epsilon, action)
    # Brent's method ends with two values around the root, at most xtol apart; the one within budget is meant.
    optimize.brentq(excess, lower, upper, xtol=2e-5, rtol=1e-12)
    return min(sigma for sigma, cost in seen.items() if cost <= epsilon)


def calibrate_steps(
    event_for: Callable[[int], dp_accounting.DpEvent], *, epsilon: float, delta: float, adjacency: Adjacency,
    accountant: Accountant = "pld",
) -> int:  # fmt: skip
    """The largest number of steps whose event costs at most ``epsilon`` at ``delta``.

    Guarantee: the cost at the result is <= ``epsilon``, and one step more costs more (or rounds to more).
    """
    _require_target("calibrate_steps", epsilon, delta)

    def fits(steps: int, by: Accountant = accountant) -> bool:
        return _spent(event_for(steps), delta, adjacency, by) <= epsilon

    action = "One step alone costs more: raise noise_multiplier or epsilon."
    require(fits(1), "calibrate_steps", "epsilon", "enough for one step", epsilon, action)
    good = 1
    while good < 2**30 and fits(2 * good, "rdp"):  # never below "pld", and quick: a first guess
        good *= 2
    bad = 2 * good
    while fits(bad):
        good, bad = bad, 2 * bad
        action = "A billion steps fit: lower noise_multiplier, or choose the steps yourself."
        require(bad < 2**31, "calibrate_steps", "epsilon", "small enough to limit the steps", epsilon, action)
    while bad - good > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if fits(middle) else (good, middle)
    return good


def _require_target(owner: str, epsilon: float, delta: float) -> None:
    require_positive(owner, "epsilon", epsilon, action="It is the privacy budget; 1 to 10 is usual.")
    require_probability(owner, "delta", delta, action="Take it well below 1/size, such as 1e-5.")


def _spent(event: dp_accounting.DpEvent, delta: float, adjacency: Adjacency, accountant: Accountant) -> float:
    return _epsilon(_checked_parts(event, adjacency, accountant), delta, accountant == "pld")


@lru_cache(maxsize=4096)  # the same plan is asked for again and again: by calibration, statements, cards and ledgers
def _epsilon(parts: frozenset[tuple[Part, int]], delta: float, pld: bool) -> float:
    with np.errstate(all="ignore"):  # far tails overflow and underflow as they should
        return min((curve.epsilon(delta) for curve in curves(parts, pld=pld)), default=0.0)


def _checked_parts(
    event: dp_accounting.DpEvent, adjacency: Adjacency, accountant: Accountant
) -> frozenset[tuple[Part, int]]:
    require_choice("epsilon", "accountant", accountant, Accountant, action="'pld' is the tighter one.")
    require_choice("epsilon", "adjacency", adjacency, Adjacency, action="Pass sampling.adjacency.")
    return frozenset(_parts(event, adjacency).items())


def _parts(event: dp_accounting.DpEvent, adjacency: Adjacency, count: int = 1) -> Counter[Part]:
    """How often each kind of release occurs in ``event``; refuses what it does not know, by name."""
    if count == 0:
        return Counter()
    match event:
        case dp_accounting.NoOpDpEvent():
            return Counter()
        case dp_accounting.NonPrivateDpEvent():
            return Counter({Part("gaussian", 0.0): count})
        case dp_accounting.SelfComposedDpEvent():
            return _parts(event.event, adjacency, count * event.count)
        case dp_accounting.ComposedDpEvent():
            return sum((_parts(e, adjacency, count) for e in event.events), Counter())
        case dp_accounting.GaussianDpEvent():
            return Counter({Part("gaussian", event.noise_multiplier): count})
        case dp_accounting.PoissonSampledDpEvent(event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma)):
            _require_match(event, adjacency, adjacency != "replace-one", "'add-remove'")
            part = Part("poisson", sigma, event.sampling_probability)
        case dp_accounting.SampledWithoutReplacementDpEvent(
            event=dp_accounting.GaussianDpEvent(noise_multiplier=sigma)
        ):
            _require_match(event, adjacency, adjacency == "replace-one", "'replace-one'")
            part = Part("fixed-size", sigma, event.sample_size / event.source_dataset_size)
        case _:
            inner = getattr(event, "event", None)
            name = type(event).__name__ + (f" of {type(inner).__name__}" if inner is not None else "")
            raise NotImplementedError(
                f"No accounting is known for the event {name}. Use an event of one of dpscale's samplers "
                "(Sampling.event), or dp_accounting's own accountants."
            )
    if part.rate >= 1:  # every sample, every time: nothing is hidden by sampling
        part = Part("gaussian", sigma)
    return Counter({part: count} if part.rate > 0 else {})


def _require_match(event: dp_accounting.DpEvent, adjacency: Adjacency, ok: bool, must: str) -> None:
    action = "The sampler knows its adjacency: pass sampling.adjacency."
    require(ok, type(event).__name__, "adjacency", must, adjacency, action)
