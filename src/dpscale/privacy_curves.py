"""Privacy curves: upper bounds on δ(ε) of composed Gaussian releases, with and without subsampling.

Discretised and composed by dp-accounting (connect the dots: rounding is pessimistic). Its own distributions serve the
Gaussian and the Poisson-sampled Gaussian. Sampling without replacement under replace-one it does not have; its tight
curve is, with Q = N(0, σ²), P = N(1, σ²) as far apart as the sensitivity, γ the rate, and ε >= 0,

    δ(ε) = H_{e^ε}((1-γ)Q + γP ‖ Q) = γ · H_α(P ‖ Q),   α = 1 + (e^ε - 1)/γ
    δ(-ε) = 1 - e^{-ε} + e^{-ε} δ(ε)                                              (its mirror)

(Zhu, Dong & Wang 2022, "Optimal accounting of differential privacy via characteristic function", on subsampling
under replace-one).
"""

import math
from collections.abc import Iterable
from functools import lru_cache, reduce
from typing import Any, Literal, NamedTuple, Protocol

import dp_accounting
import numpy as np
from dp_accounting.pld import pld_pmf
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution, from_gaussian_mechanism
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy import special

from dpscale.checks import quiet

Floats = NDArray[np.float64]

FINEST = 2.5e-5  # grid interval of the privacy loss below which rounding errors outweigh the gain
COARSEST = 50.0  # above it, at ε in the millions, a grid is not worth its making
CELLS_STEP, CELLS_TOTAL = 40_000, 1_000_000  # most grid cells of one step, and of all steps composed
TAIL = 35.0  # ln(1/mass) beyond which dp-accounting cuts a composed grid (1e-15)
LEAST_DELTA = 1e-10  # below it the rounding of the Fourier transform shows: RDP alone answers
LEAST_SIGMA = 1e-6  # less noise than this is reported as none
_ORDERS = list(rdp_privacy_accountant.DEFAULT_RDP_ORDERS)


class Part(NamedTuple):
    """One kind of release: a Gaussian of noise std / sensitivity ``sigma``, on a share ``rate`` of the data."""

    kind: Literal["gaussian", "poisson", "fixed-size"]
    sigma: float
    rate: float = 1.0


class Curve(Protocol):
    """An upper bound on a mechanism's privacy curve, read either way."""

    def epsilon(self, delta: float) -> float:
        """The ε at ``delta``."""

    def delta(self, epsilon: float) -> float:
        """The δ at ``epsilon``."""


class _Exact(NamedTuple):
    """The Gaussian mechanism (Balle & Wang 2018); without noise, no privacy at all."""

    sigma: float

    def epsilon(self, delta: float) -> float:
        return float(dp_accounting.get_epsilon_gaussian(self.sigma, delta))

    def delta(self, epsilon: float) -> float:
        return float(_gaussian(np.array(epsilon), self.sigma)) if self.sigma > 0 else 1.0


class Renyi(NamedTuple):
    """Rényi DP (Mironov 2017), converted at the best of dp-accounting's orders. What several releases have adds up."""

    rdp: Floats

    @staticmethod
    def total(of: Iterable["Renyi"]) -> "Renyi":
        """That of all of them together, whatever each has seen of those before (Proposition 1 there)."""
        return Renyi(np.sum([np.zeros(len(_ORDERS)), *(each.rdp for each in of)], axis=0))

    def epsilon(self, delta: float) -> float:
        """The ε at ``delta``."""
        return float(rdp_privacy_accountant.compute_epsilon(_ORDERS, self.rdp, delta)[0])

    def delta(self, epsilon: float) -> float:
        """The δ at ``epsilon``."""
        return float(rdp_privacy_accountant.compute_delta(_ORDERS, self.rdp, epsilon)[0])


class _Pld(NamedTuple):
    """A privacy loss distribution of dp-accounting."""

    pld: Any

    def epsilon(self, delta: float) -> float:
        return float(self.pld.get_epsilon_for_delta(delta)) if delta >= LEAST_DELTA else math.inf

    def delta(self, epsilon: float) -> float:
        return max(float(self.pld.get_delta_for_epsilon(float(epsilon))), LEAST_DELTA)


@lru_cache(maxsize=4)
def curves(parts: frozenset[tuple[Part, int]], *, pld: bool) -> tuple[Curve, ...]:
    """Upper bounds that hold for the composition of ``parts``, each by itself; none if there are no parts."""
    if not parts:
        return ()
    if any(part.sigma < LEAST_SIGMA for part, _ in parts):
        return (_Exact(0.0),)
    rdp = renyi_of(parts)
    if not pld:
        return (rdp,)
    # Sampling never costs privacy, so the Gaussian on all of the data bounds each part. It is the answer itself
    # where nothing is sampled, and the best one where ε is beyond any grid.
    unsampled = _Exact(sum(count / part.sigma**2 for part, count in parts) ** -0.5)
    gaussian = sum(count / part.sigma**2 for part, count in parts if part.kind == "gaussian")
    sampled = [(part, count) for part, count in parts if part.kind != "gaussian"]
    if not sampled:
        return (unsampled,)
    if gaussian:
        sampled.append((Part("gaussian", gaussian**-0.5), 1))
    interval = _interval(sampled)
    if interval > COARSEST:
        return (unsampled, rdp)
    composed = [_pld(part, interval).self_compose(count) for part, count in sampled]
    return (_Pld(reduce(lambda a, b: a.compose(b), composed)), unsampled, rdp)


def renyi_of(parts: Iterable[tuple[Part, int]]) -> Renyi:
    """Rényi DP of the composition of ``parts``."""
    return Renyi.total(Renyi(count * _rdp(part)) for part, count in parts)


@lru_cache(maxsize=64)
def _rdp(part: Part) -> Floats:
    """Rényi divergences of one release. Where rounding makes them 0 or less they count as not known."""
    if part.sigma < LEAST_SIGMA:
        return np.full(len(_ORDERS), np.inf)
    event = dp_accounting.GaussianDpEvent(part.sigma)
    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if part.kind == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(part.rate, event)
    elif part.kind == "fixed-size":
        # The library takes two sizes and uses their ratio only. It does not double the sensitivity itself.
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        event = dp_accounting.SampledWithoutReplacementDpEvent(1.0, part.rate, event)
    with quiet("absl"):  # it warns of every order that it leaves out, which only makes the bound a little looser
        rdp: Floats = rdp_privacy_accountant.RdpAccountant(_ORDERS, relation).compose(event).rdp
    return np.where(rdp > 0, rdp, np.inf)


def _range(part: Part) -> tuple[float, float]:
    """The privacy losses ten deviations out on either side; the mass beyond is below 1e-23."""
    far = (0.5 + 10 * part.sigma) / part.sigma**2
    least, most = np.logaddexp(np.log1p(-part.rate), math.log(part.rate) + np.array([-far, far]))
    return float(least if part.kind == "poisson" else -most), float(most)


def _interval(parts: list[tuple[Part, int]]) -> float:
    """The grid interval, a power of two times `FINEST`, at which no grid exceeds its number of cells.

    dp-accounting cuts the composed grid by Chernoff's bound on the loss L: at (T·ln E[e^{λL}] + 35)/λ, the
    least over 20 values of λ. The same bound, here by quadrature, tells the width before any grid is made.
    """
    ranges = [_range(part) for part, _ in parts]
    reach = max(most - least for least, most in ranges)
    lambdas = np.minimum(np.arange(1, 21) / reach, 1e3)
    log_moments = sum(count * _log_moments(part, tuple(lambdas)) for part, count in parts)
    width = float(np.min((log_moments + TAIL) / lambdas)) + 2 * reach
    needed = max(reach / CELLS_STEP, width / CELLS_TOTAL, FINEST)
    return FINEST * 2.0 ** math.ceil(math.log2(needed / FINEST))


@lru_cache(maxsize=64)
def _log_moments(part: Part, lambdas: tuple[float, ...]) -> Floats:
    """ln E[e^{λL}] of one release's privacy loss L under (1-γ)N(0, σ²) + γN(1, σ²)."""
    z = np.linspace(-10, 10, 1001)
    x = np.stack([part.sigma * z, 1 + part.sigma * z])
    log_rates = np.log([[1 - part.rate], [part.rate]])
    loss = np.logaddexp(log_rates[0], log_rates[1] + (x - 0.5) / part.sigma**2)
    log_mass = log_rates - z**2 / 2 - np.log(np.sum(np.exp(-(z**2) / 2)))
    log_moments = special.logsumexp(log_mass + np.multiply.outer(lambdas, loss), axis=(1, 2))
    return np.asarray(log_moments, dtype=np.float64)


@lru_cache(maxsize=32)
def _pld(part: Part, interval: float) -> Any:
    """The privacy loss distribution of one release, discretised pessimistically."""
    if part.kind == "fixed-size":
        least, most = _range(part)
        first, last = math.floor(least / interval), math.ceil(most / interval)
        deltas = _without_replacement(np.arange(first, last + 1, dtype=np.float64) * interval, part.sigma, part.rate)
        pmfs = [pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(interval, first, last, deltas)]
    else:
        pld = from_gaussian_mechanism(part.sigma, sampling_prob=part.rate, value_discretization_interval=interval)
        pmfs = [pld._pmf_remove] if pld._symmetric else [pld._pmf_remove, pld._pmf_add]
    # Dense, because the library's sparse form computes size**count, digit by digit, to decide on its own form.
    return PrivacyLossDistribution(*(pmf.to_dense_pmf() for pmf in pmfs))


def _without_replacement(eps: Floats, sigma: float, rate: float) -> Floats:
    """The curve of the module's docstring, mirror included."""
    size = np.abs(eps)
    # Beyond e^ε of 1e200 the ratio overflows, and α is e^ε/γ to the last digit.
    log_alpha = np.where(size > 460, size - math.log(rate), np.log1p(np.expm1(size) / rate))
    delta = rate * _gaussian(log_alpha, sigma)
    return np.clip(np.where(eps >= 0, delta, -np.expm1(eps) + np.exp(-size) * delta), 0, 1)


def _gaussian(eps: Floats, sigma: float) -> Floats:
    """H_{e^ε}(N(1, σ²) ‖ N(0, σ²)) = Φ(1/2σ - εσ) - e^ε Φ(-1/2σ - εσ), by logarithms."""
    first = special.log_ndtr(0.5 / sigma - eps * sigma)
    second = eps + special.log_ndtr(-0.5 / sigma - eps * sigma)
    return np.asarray(np.exp(first) * -np.expm1(np.minimum(second - first, 0)))
