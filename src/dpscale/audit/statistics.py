"""What releases say about the mechanism that made them: lower bounds on ε, and tests of the exact distribution.

Releases are in units of the bound. The coordinate of canary j is its own: in step t it holds c_j·b_tj + σ·z_tj, with
c_j what the canary adds to a sum that it is in (1 or 0; 1 or -1 under replace-one), b_tj whether it was drawn, and z
standard normal. A coordinate that no sample moves holds σ·z alone. All p-values are of this model, which the plan
claims, and hold without approximation except where said.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special, stats

from dpscale import accounting
from dpscale.sampling import FixedSize, FullBatch, Poisson, Sampling, Shuffled

if TYPE_CHECKING:
    from dpscale.plan import Plan

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

CHOOSING = 5  # one canary in so many is spent on choosing the threshold at which the others are judged
GUESSES = (0.03, 0.1, 0.3, 1.0)  # shares of the canaries that are guessed, highest and lowest scores each
_PAIRS = 3000  # most steps that are compared with each other
_REACH, _FARTHEST = 0.25, 2.1  # by how much of its logarithm the noise is changed at a time, and at most


@dataclass(frozen=True)
class Trace:
    """What one run has released.

    Attributes:
        scores: per canary, the adversary's log likelihood ratio of "in" against "out", (M,).
        inside: per canary, whether it was in the data, (M,).
        adds: per canary, c_j, (M,).
        totals: per canary, the sum of its coordinate over all steps, (M,).
        signals: per step, Σ_j c_j·(coordinate j), (T,).
        blanks: coordinates that no sample moves, (T, K).
    """

    scores: Floats
    inside: Bools
    adds: Floats
    totals: Floats
    signals: Floats
    blanks: Floats


@dataclass(frozen=True)
class Check:
    """One test of the releases against what the plan claims; ``p_value`` is small where they do not fit."""

    name: str
    p_value: float
    measured: str


@dataclass(frozen=True)
class Point:
    """A threshold's false positive and false negative rate, each with its Clopper-Pearson interval (low, high)."""

    fpr: float
    fnr: float
    fpr_interval: tuple[float, float]
    fnr_interval: tuple[float, float]


def log_ratio(y: Floats, sigma: float, rate: float, exchanged: bool) -> Floats:
    """log p(y | in)/p(y | out) of one release: in, it is (1-q)·N(0, σ²) + q·N(1, σ²).

    Out, it is N(0, σ²), or, if ``exchanged`` for a sample that adds -1, (1-q)·N(0, σ²) + q·N(-1, σ²).
    """
    none, drawn = (np.log1p(-rate) if rate < 1 else -np.inf), math.log(rate)
    inside = np.logaddexp(none, drawn + (y - 0.5) / sigma**2)
    outside = np.logaddexp(none, drawn + (-y - 0.5) / sigma**2) if exchanged else 0.0
    return np.asarray(inside - outside)


# -- Tests of the exact distribution ---------------------------------------------------------------------------------


def checks(plan: "Plan", traces: list[Trace]) -> tuple[Check, ...]:
    """Every test of the releases against what the plan claims. Multiply the least p-value by their number."""
    sigma = plan.noise_multiplier
    assert sigma is not None
    blanks = np.concatenate([trace.blanks for trace in traces]) / sigma
    return (*_of_noise(blanks), *_of_canaries(plan.sampling, sigma, traces))


def _of_noise(z_TK: Floats) -> list[Check]:
    whole = float(np.square(z_TK).sum())
    return [
        Check("size of the noise", _both(stats.chi2(z_TK.size), whole), f"{math.sqrt(whole / z_TK.size):.4f} of it"),
        Check("shape of the noise", float(stats.kstest(z_TK.ravel(), "norm").pvalue), "Kolmogorov-Smirnov"),
        _spread("noise the same size in every step", _sizes(z_TK)),
        _spread("noise the same size in every coordinate", _sizes(z_TK.T)),
        _unrelated("fresh noise in every step", z_TK[:_PAIRS]),
        _unrelated("fresh noise in every coordinate", z_TK.T),
    ]


def _sizes(z: Floats) -> Floats:
    """Of each row its sum of squares, as a standard normal number."""
    squares, chi2 = np.square(z).sum(1), stats.chi2(z.shape[1])
    return _normal(chi2.cdf(squares), chi2.sf(squares))


def _of_canaries(sampling: Sampling, sigma: float, traces: list[Trace]) -> list[Check]:
    z, counts = [], []
    for trace in traces:
        steps, moved = len(trace.signals), trace.adds != 0
        level = trace.totals * np.where(moved, trace.adds, 1.0)
        drawn, noise = often(sampling, steps), sigma * math.sqrt(steps)
        z += [_counted(level[moved], *drawn, noise), level[~moved] / noise]
        if sampling.independent:
            many = int(moved.sum())
            counts.append(_counted(trace.signals, *in_batch(sampling, many), sigma * math.sqrt(many)))
    inside, every = np.concatenate(z[::2]), np.concatenate(z)
    mean, largest = float(inside.sum() / math.sqrt(len(inside))), float(np.abs(every).max())
    found = [
        Check("what canaries add, all together", 2 * float(special.ndtr(-abs(mean))), f"{mean:+.2f} deviations off"),
        Check("what each canary adds", min(1.0, len(every) * 2 * float(special.ndtr(-largest))), f"{largest:.2f}"
              f" deviations off at most, of {len(every):,}"),
        _spread("spread of what canaries add", every),
    ]  # fmt: skip
    return [*found, *([_spread("sizes of the batches", np.concatenate(counts))] if counts else [])]


def often(sampling: Sampling, steps: int) -> tuple[Floats, Floats]:
    """(How often one sample may be drawn in so many steps, with which probability.)"""
    if isinstance(sampling, FullBatch):
        return np.array([float(steps)]), np.ones(1)
    if isinstance(sampling, Shuffled):
        epochs, rest = divmod(steps, sampling.steps_per_epoch)
        late = rest * sampling.batch / sampling.size
        return np.array([epochs, epochs + 1.0]), np.array([1 - late, late])
    return _likely(stats.binom(steps, sampling.rate))


def in_batch(sampling: Sampling, many: int) -> tuple[Floats, Floats]:
    """(How many of so many samples may be in one batch, with which probability), for independent draws."""
    match sampling:
        case Poisson():
            return _likely(stats.binom(many, sampling.rate))
        case FixedSize():
            return _likely(stats.hypergeom(sampling.size, many, sampling.batch))
    return np.array([float(many)]), np.ones(1)


def _likely(counts: stats.rv_discrete) -> tuple[Floats, Floats]:
    """What a count may be, but for 1e-13 of its mass."""
    k = np.arange(counts.ppf(1e-14), counts.isf(1e-14) + 1)
    return k, counts.pmf(k)


def _counted(y: Floats, counts: Floats, mass: Floats, noise: float) -> Floats:
    """Standard normal numbers in the place of count + noise·z, through its exact distribution."""
    z = [(y - k) / noise for k in counts]
    below, above = (sum(m * special.ndtr(sign * each) for each, m in zip(z, mass, strict=True)) for sign in (1, -1))
    return _normal(np.asarray(below), np.asarray(above))


def _normal(below: Floats, above: Floats) -> Floats:
    """Standard normal numbers, from the probability of what lies below and above each of them."""
    below, above = np.maximum(below, 1e-300), np.maximum(above, 1e-300)
    return np.asarray(np.where(below < above, special.ndtri(below), -special.ndtri(above)))


def _both(distribution: stats.rv_continuous, value: float) -> float:
    return min(1.0, 2 * min(float(distribution.cdf(value)), float(distribution.sf(value))))


def _spread(name: str, z: Floats) -> Check:
    """Whether numbers that should be standard normal scatter as such."""
    whole = float(np.square(z).sum())
    return Check(name, _both(stats.chi2(len(z)), whole), f"{math.sqrt(whole / len(z)):.4f} of it")


def _unrelated(name: str, z: Floats) -> Check:
    """Whether any two rows have to do with each other: ⟨a, b⟩/‖a‖ is standard normal for every pair of fresh ones."""
    products = np.triu(z @ z.T, 1) / np.maximum(np.linalg.norm(z, axis=1, keepdims=True), 1e-300)
    largest, pairs = float(np.abs(products).max()), len(z) * (len(z) - 1) // 2
    told = f"{largest:.2f} deviations at most, of {pairs:,} pairs"
    return Check(name, min(1.0, pairs * 2 * float(special.ndtr(-largest))), told)


# -- Lower bounds on ε -----------------------------------------------------------------------------------------------


def highest(errors: Floats, trials: float, level: float) -> Floats:
    """The upper end of Clopper and Pearson's interval for a rate, one-sided at ``level``."""
    full = errors >= trials
    return np.where(full, 1.0, stats.beta.ppf(level, errors + 1, np.where(full, 1, trials - errors)))


def _errors(scores: Floats, inside: Bools, thresholds: Floats) -> tuple[Floats, Floats]:
    """How many outside are taken for inside at each threshold, and how many inside for outside."""
    out, within = np.sort(scores[~inside]), np.sort(scores[inside])
    positives, negatives = len(out) - np.searchsorted(out, thresholds), np.searchsorted(within, thresholds)
    return positives.astype(np.float64), negatives.astype(np.float64)


@dataclass(frozen=True)
class Judged:
    """Errors at one threshold, among canaries that had no part in choosing it."""

    false_positives: int
    outside: int
    false_negatives: int
    inside: int

    def at_most(self, confidence: float) -> tuple[float, float]:
        """(FPR, FNR), both of which hold together at ``confidence``."""
        level = 1 - (1 - confidence) / 2
        pairs = (self.false_positives, self.outside), (self.false_negatives, self.inside)
        fpr, fnr = (float(highest(np.array(float(errors)), trials, level)) for errors, trials in pairs)
        return fpr, fnr


def judge(scores: Floats, inside: Bools, worth: Callable[[Floats, Floats], Floats], caution: float) -> Judged:
    """Errors at the threshold of most ``worth``, given FPR and FNR: chosen on some canaries, counted on the others.

    ``caution`` is the confidence at which rates are looked at when choosing, so that luck is not chosen.
    """
    choosing = np.arange(len(scores)) % CHOOSING == 0
    thresholds = np.unique(np.quantile(scores[choosing], np.linspace(0, 1, 401)))
    chosen = zip(_errors(scores[choosing], inside[choosing], thresholds), _sides(inside[choosing]), strict=True)
    likely = [highest(errors, trials, caution) for errors, trials in chosen]
    best = thresholds[[int(np.argmax(worth(*likely)))]]
    (positives,), (negatives,) = _errors(scores[~choosing], inside[~choosing], best)
    outside, within = _sides(inside[~choosing])
    return Judged(int(positives), outside, int(negatives), within)


def _sides(inside: Bools) -> tuple[int, int]:
    return int((~inside).sum()), int(inside.sum())


def by_threshold(scores: Floats, inside: Bools, delta: float, confidence: float) -> float:
    """ε, at least, of any mechanism with these error rates: (1 - δ - FNR)/FPR <= e^ε, and the other way round."""

    def epsilon(fpr: Floats, fnr: Floats) -> Floats:
        return np.maximum(*(np.log(np.maximum(1 - delta - b, 1e-300) / a) for a, b in ((fpr, fnr), (fnr, fpr))))

    fpr, fnr = judge(scores, inside, epsilon, 0.975).at_most(confidence)
    return max(0.0, float(epsilon(np.array(fpr), np.array(fnr))))


@dataclass(frozen=True)
class Curve:
    """δ(ε) of a plan, at many ε; never below the true one."""

    epsilons: Floats
    deltas: Floats

    @classmethod
    def of(cls, plan: "Plan", delta: float) -> "Curve":
        """With ε from 0 to beyond that of ``delta``."""
        most, event = max(4.0, 1.5 * min(plan.epsilon(delta), 100.0)), plan.event()
        epsilons = most * np.linspace(0, 1, 80) ** 2  # denser where the curve bends
        found = [accounting.delta(event, epsilon=float(e), adjacency=plan.adjacency) for e in epsilons]
        return cls(epsilons, np.array(found))

    def least_fnr(self, fpr: Floats) -> Floats:
        """What no adversary gets below at these FPR; never above the true trade-off curve."""
        one = 1 - self.deltas - np.multiply.outer(fpr, np.exp(self.epsilons))
        other = np.exp(-self.epsilons) * (1 - self.deltas - fpr[:, None])
        return np.asarray(np.maximum(0.0, np.maximum(one, other).max(1)))

    def above(self, fpr: float, fnr: float) -> float:
        """By how much the curve lies above a point; the point refutes it if that is more than 0."""
        return float(self.least_fnr(np.array([fpr]))[0]) - fnr


def central(scores: Floats, inside: Bools) -> Judged:
    """The errors at the threshold that tells most if the curve is much like that of a Gaussian."""
    return judge(scores, inside, lambda fpr, fnr: -special.ndtri(fpr) - special.ndtri(fnr), 1 - 1e-6)


def refutes(judged: Judged, claimed: Curve) -> Check:
    """Whether an adversary does better than the claimed curve allows."""
    low, high = -12.0, 0.0  # log10 of the p-value
    while high - low > 0.01:
        middle = (low + high) / 2
        refuted = claimed.above(*judged.at_most(1 - 10**middle)) > 0
        low, high = (low, middle) if refuted else (middle, high)
    fpr, fnr = judged.false_positives / judged.outside, judged.false_negatives / judged.inside
    return Check("errors of the adversary, against the claimed curve", 10**high, f"FPR {fpr:.4f}, FNR {fnr:.4f}")


def by_curve(judged: Judged, plan: "Plan", delta: float, confidence: float) -> float:
    """ε, at least, if the trade-off curve is that of this plan with some noise multiplier.

    Curves of more noise lie higher. The bound is the ε of the least noise whose curve lies above the measured error
    rates, and so is refuted. Curves from dp-accounting lie below the true ones: what refutes them refutes those.
    """
    point = judged.at_most(confidence)
    sigma = plan.noise_multiplier
    assert sigma is not None

    def with_noise(log_factor: float) -> "Plan":
        return replace(plan, noise_multiplier=sigma * math.exp(log_factor))

    def above(log_factor: float) -> float:
        return Curve.of(with_noise(log_factor), delta).above(*point)

    low, high = -_REACH, 0.0
    while above(high) <= 0:
        low, high = high, high + _REACH
        if high > _FARTHEST:
            return 0.0
    while above(low) > 0:
        low, high = low - _REACH, low
        if low < -_FARTHEST:
            return with_noise(high).epsilon(delta)
    within = 2e-3
    return with_noise(optimize.brentq(above, low, high, xtol=within) + within).epsilon(delta)


def by_guesses(scores: Floats, inside: Bools, delta: float, confidence: float) -> float:
    """ε, at least, from how many of the surest guesses are right, however canaries influence each other.

    Steinke, Nasr & Jagielski (2023), "Privacy auditing with one (1) training run", Theorem 5.2: of r guesses about m
    fair coins, v are right with probability at most P[W >= v] + 2·m·δ·max_i P[v - i <= W < v]/i, for W binomial of r
    and e^ε/(1 + e^ε). The numbers of guesses in `GUESSES` are all tried, and paid for.
    """
    low, high = 0.0, 40.0
    while high - low > 1e-3:  # the larger ε is, the likelier are so many right guesses
        middle = (low + high) / 2
        low, high = (middle, high) if lucky(scores, inside, delta, middle).p_value < 1 - confidence else (low, middle)
    return low


def lucky(scores: Floats, inside: Bools, delta: float, epsilon: float) -> Check:
    """Whether more of the surest guesses are right than ε allows."""
    order, m = np.argsort(scores), len(scores)
    tried = []
    for share in GUESSES:
        k = max(1, round(share * m / 2))
        right = int((~inside[order[:k]]).sum() + inside[order[-k:]].sum())
        tried.append((_by_chance(m, 2 * k, right, delta, epsilon), right, 2 * k))
    p, right, guesses = min(tried)
    return Check("right guesses of the adversary", min(1.0, len(GUESSES) * p), f"{right} of {guesses}")


def _by_chance(m: int, r: int, right: int, delta: float, epsilon: float) -> float:
    correct = stats.binom(r, special.expit(epsilon))
    i = np.arange(1, right + 1)
    near = float(np.max(np.cumsum(correct.pmf(right - i)) / i, initial=0.0))
    return min(1.0, float(correct.sf(right - 1)) + 2 * m * delta * near)


def points(scores: Floats, inside: Bools, confidence: float) -> tuple[Point, ...]:
    """Error rates at thresholds that are spread over the curve, each with its own interval."""
    thresholds = np.unique(np.quantile(scores, special.ndtr(np.linspace(-2.5, 2.5, 21))))
    level = 1 - (1 - confidence) / 2
    rates = []
    for errors, trials in zip(_errors(scores, inside, thresholds), _sides(inside), strict=True):
        rates.append((errors / trials, 1 - highest(trials - errors, trials, level), highest(errors, trials, level)))
    return tuple(
        Point(fpr=float(a), fnr=float(b), fpr_interval=(float(al), float(ah)), fnr_interval=(float(bl), float(bh)))
        for (a, al, ah), (b, bl, bh) in zip(zip(*rates[0], strict=True), zip(*rates[1], strict=True), strict=True)
    )
