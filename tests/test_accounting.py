"""Accounting: the figures of the specification, dp-accounting's own answers, exact formulas, and extremes."""

import itertools
import math
import tracemalloc

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import given, settings
from hypothesis import strategies as st

from dpscale import accounting, privacy_curves
from dpscale.sampling import FixedSize, FullBatch, Poisson, Sampling, Shuffled

# (size, batch, epochs, epsilon, delta, noise multiplier by PLD, by RDP): the five settings of the paper; the
# multipliers are those computed independently with dp-accounting for the specification, to four digits.
SETTINGS = {
    "mnist": (60_000, 512, 20, 3, 1e-5, 0.8917, 0.9378),
    "fashion-mnist": (40_000, 512, 60, 9, 1e-5, 0.7910, 0.8211),
    "cifar10": (50_000, 1024, 40, 2, 1e-5, 1.9691, 2.1082),
    "celeba": (162_079, 512, 10, 8, 5e-6, 0.5134, 0.5380),
    "imagenette": (9_464, 256, 50, 8, 1e-4, 0.9114, 0.9577),
}


def cost(sampling: Sampling, sigma: float, steps: int, delta: float = 1e-5, accountant: str = "pld") -> float:
    return accounting.epsilon(
        sampling.event(sigma, steps), delta=delta, adjacency=sampling.adjacency, accountant=accountant
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize("name", SETTINGS)
def test_calibration_gives_the_multipliers_of_the_specification(name, accountant):
    size, batch, epochs, epsilon, delta, pld, rdp = SETTINGS[name]
    sampling = Poisson(size=size, batch=batch)
    steps = sampling.steps(epochs)
    sigma = accounting.calibrate_noise_multiplier(
        lambda sigma: sampling.event(sigma, steps),
        epsilon=epsilon,
        delta=delta,
        adjacency=sampling.adjacency,
        accountant=accountant,
    )
    assert sigma == pytest.approx(pld if accountant == "pld" else rdp, abs=0.002)
    spent = cost(sampling, sigma, steps, delta, accountant)
    assert epsilon * (1 - 1e-3) < spent <= epsilon


def test_what_was_computed_once_is_not_computed_again(monkeypatch):
    def calibrated():
        sampling = Poisson(size=100, batch=10)
        return accounting.calibrate_noise_multiplier(
            lambda sigma: sampling.event(sigma, 7), epsilon=2, delta=1e-4, adjacency=sampling.adjacency
        )

    once = calibrated()
    monkeypatch.setattr(accounting, "curves", None)
    assert calibrated() == once


def test_poisson_agrees_with_the_library_s_own_accountant():
    """At the library's interval 1e-4 both round pessimistically; ours may be coarser by a few 1e-5."""
    for size, batch, sigma, steps in ((60_000, 512, 1.2, 500), (100, 30, 3.0, 20), (10, 9, 8.0, 7)):
        sampling = Poisson(size=size, batch=batch)
        theirs = PLDAccountant().compose(sampling.event(sigma, steps))
        assert cost(sampling, sigma, steps) == pytest.approx(theirs.get_epsilon(1e-5), rel=2e-4)
        ours = accounting.delta(sampling.event(sigma, steps), epsilon=0.5, adjacency="add-remove")
        assert ours == pytest.approx(theirs.get_delta(0.5), rel=1e-3, abs=2e-10)


def test_trap_06_sampling_without_replacement_costs_what_it_costs():
    """Accounted as Poisson, or under replace-one without the factor 2, the same noise would claim 2.94."""
    fixed, poisson = FixedSize(size=60_000, batch=512), Poisson(size=60_000, batch=512)
    assert cost(fixed, 0.9, 2344) == pytest.approx(27.8, abs=0.2)
    assert cost(poisson, 0.9, 2344) == pytest.approx(2.94, abs=0.01)
    assert cost(fixed, 0.9, 2344, accountant="rdp") > cost(fixed, 0.9, 2344)
    with pytest.raises(ValueError, match=r"adjacency.*must be 'replace-one'. Got 'add-remove'.*sampling.adjacency"):
        accounting.epsilon(fixed.event(0.9, 10), delta=1e-5, adjacency="add-remove")
    with pytest.raises(ValueError, match=r"adjacency.*must be 'add-remove'. Got 'replace-one'.*sampling.adjacency"):
        accounting.epsilon(poisson.event(0.9, 10), delta=1e-5, adjacency="replace-one")


def test_one_step_without_replacement_has_the_amplified_gaussian_s_delta():
    """For one step the curve is closed: δ(ε) = γ·δ_Gauss(ln(1 + (e^ε - 1)/γ)), here at sensitivity 2·bound."""
    fixed = FixedSize(size=100, batch=10)
    for sigma, epsilon in itertools.product((0.7, 2.0, 6.0), (0.0, 0.1, 1.0)):
        inner = accounting.delta(
            dp_accounting.GaussianDpEvent(sigma / 2),
            epsilon=math.log1p(math.expm1(epsilon) / 0.1),
            adjacency="replace-one",
        )
        ours = accounting.delta(fixed.event(sigma, 1), epsilon=epsilon, adjacency="replace-one")
        assert ours == pytest.approx(0.1 * inner, rel=1e-3, abs=2e-10)


@pytest.mark.parametrize("sampling", [FullBatch(size=9), FullBatch(size=9, adjacency="replace-one")])
@pytest.mark.parametrize("steps", [1, 30, 2344])
def test_full_batch_is_the_exact_gaussian(sampling, steps):
    sigma = 40.0
    exact = dp_accounting.get_epsilon_gaussian(sigma / sampling.sensitivity_factor / math.sqrt(steps), 1e-5)
    assert cost(sampling, sigma, steps) == pytest.approx(exact, rel=1e-9)
    assert cost(sampling, sigma, steps, accountant="rdp") > exact
    back = accounting.delta(sampling.event(sigma, steps), epsilon=exact, adjacency=sampling.adjacency)
    assert back == pytest.approx(1e-5, rel=1e-6)


@pytest.mark.parametrize("adjacency", ["zero-out", "replace-one"])
def test_shuffled_is_the_exact_gaussian_over_epochs(adjacency):
    sampling = Shuffled(size=60_000, batch=512, adjacency=adjacency)
    exact = dp_accounting.get_epsilon_gaussian(6.0 / sampling.sensitivity_factor / math.sqrt(20), 1e-5)
    assert cost(sampling, 6.0, sampling.steps(20)) == pytest.approx(exact, rel=1e-9)
    assert cost(sampling, 6.0, sampling.steps(20) - 117) == pytest.approx(exact, rel=1e-9)
    assert cost(sampling, 6.0, sampling.steps(20) - 118) < exact


def test_a_sampler_that_takes_everything_is_a_full_batch():
    full = cost(FullBatch(size=9), 3.0, 10)
    assert cost(Poisson(size=9, batch=9), 3.0, 10) == full
    assert cost(FixedSize(size=9, batch=9), 3.0, 10) == cost(FullBatch(size=9, adjacency="replace-one"), 3.0, 10)


@given(
    st.sampled_from([Poisson, FixedSize, Shuffled]),
    st.floats(0.4, 20),
    st.integers(1, 50),
    st.integers(1, 1000),
    st.sampled_from([1e-3, 1e-5, 1e-8]),
)
@settings(max_examples=5, deadline=None, derandomize=True)
def test_pld_is_below_rdp_and_cost_grows_with_steps_and_falls_with_noise(kind, sigma, batch, steps, delta):
    sampling = kind(size=1000, batch=batch)
    pld = cost(sampling, sigma, steps, delta)
    assert 0 <= pld <= cost(sampling, sigma, steps, delta, "rdp")
    assert cost(sampling, sigma, 2 * steps, delta) >= pld * (1 - 1e-3)
    assert cost(sampling, 1.5 * sigma, steps, delta) <= pld * (1 + 1e-3)


def test_epsilon_and_delta_are_inverse():
    sampling = Poisson(size=1000, batch=50)
    event = sampling.event(1.0, 200)
    for accountant in ("pld", "rdp"):
        epsilon = accounting.epsilon(event, delta=1e-4, adjacency="add-remove", accountant=accountant)
        back = accounting.delta(event, epsilon=epsilon, adjacency="add-remove", accountant=accountant)
        assert back == pytest.approx(1e-4, rel=1e-2)


@pytest.mark.parametrize(
    ("sampling", "epsilon", "delta"),
    [
        (FixedSize(size=1000, batch=20), 2.0, 1e-4),
        (FullBatch(size=1000), 0.5, 1e-5),
        (Shuffled(size=1000, batch=20), 50.0, 1e-5),
        (Poisson(size=1000, batch=20), 0.05, 1e-4),
        (Poisson(size=1000, batch=20), 200.0, 1e-4),
    ],
)
def test_calibrated_noise_is_never_above_the_target_and_tight(sampling, epsilon, delta):
    sigma = accounting.calibrate_noise_multiplier(
        lambda sigma: sampling.event(sigma, 100), epsilon=epsilon, delta=delta, adjacency=sampling.adjacency
    )
    assert cost(sampling, sigma, 100, delta) <= epsilon
    assert cost(sampling, sigma * (1 - 2e-4), 100, delta) > epsilon


@pytest.mark.parametrize(
    ("sampling", "sigma"),
    [(Poisson(size=1000, batch=20), 0.8), (Shuffled(size=1000, batch=20), 4.0), (FullBatch(size=1000), 4.0)],
)
def test_calibrated_steps_are_the_most_that_fit(sampling, sigma):
    steps = accounting.calibrate_steps(
        lambda steps: sampling.event(sigma, steps), epsilon=3.0, delta=1e-5, adjacency=sampling.adjacency
    )
    assert steps > 0
    assert cost(sampling, sigma, steps) <= 3.0 < cost(sampling, sigma, steps + 1)


def test_trap_23_epsilon_before_the_first_step_is_zero():
    for sampling in (Poisson(size=10, batch=2), FixedSize(size=10, batch=2), Shuffled(size=10, batch=2)):
        for accountant in ("pld", "rdp"):
            assert cost(sampling, 1.0, 0, accountant=accountant) == 0.0
    assert accounting.delta(dp_accounting.NoOpDpEvent(), epsilon=0.0, adjacency="add-remove") == 0.0


@pytest.mark.parametrize(
    ("kind", "sigma", "steps"),
    [
        (Poisson, 0.1, 100_000),
        (Poisson, 0.05, 1),
        (Poisson, 1e-3, 100_000),
        (Poisson, 0.5, 10**7),
        (FixedSize, 0.1, 100_000),
    ],
)
def test_trap_23_large_epsilon_in_bounded_memory(kind, sigma, steps):
    """At the library's own interval the first of these grids would have 3·10^8 cells."""
    sampling = kind(size=10_000, batch=100)
    privacy_curves._pld.cache_clear()
    privacy_curves.curves.cache_clear()
    tracemalloc.start()
    epsilon = cost(sampling, sigma, steps)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 250e6
    assert 10 < epsilon < math.inf
    # Subsampling amplifies: never above the cost of taking every sample at every step.
    gaussian = sigma / sampling.sensitivity_factor / math.sqrt(steps)
    assert epsilon <= dp_accounting.get_epsilon_gaussian(gaussian, 1e-5)


def test_trap_23_a_coarse_grid_is_still_close():
    """100,000 steps at σ = 0.1, rate 0.01: by the central limit theorem ε ≈ T·mean + 4.26·√T·deviation."""
    z = np.linspace(-12, 12, 20_001)
    mass = np.exp(-(z**2) / 2) / np.exp(-(z**2) / 2).sum()
    x = np.stack([0.1 * z, 1 + 0.1 * z])
    loss = np.logaddexp(math.log(0.99), math.log(0.01) + (x - 0.5) / 0.1**2)
    weight = np.array([[0.99], [0.01]]) * mass
    mean = (weight * loss).sum()
    deviation = math.sqrt((weight * loss**2).sum() - mean**2)
    expected = 1e5 * mean + 4.265 * math.sqrt(1e5) * deviation
    assert cost(Poisson(size=100, batch=1), 0.1, 100_000) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("sigma", [1e-9, 1e-5, 0.01, 1.0, 1e3, 1e8])
@pytest.mark.parametrize("kind", [Poisson, FixedSize, Shuffled])
def test_trap_23_extreme_arguments_give_a_number(kind, sigma):
    sampling = kind(size=1000, batch=10)
    costs = [cost(sampling, sigma, 1000, delta) for delta in (1e-300, 1e-30, 1e-12, 0.5, 1 - 1e-12)]
    if sigma == 1e-9:  # so little noise is reported as none
        assert costs == [math.inf] * 5
    else:
        assert costs == sorted(costs, reverse=True)
        assert costs[-1] >= 0 and costs[0] < math.inf


def test_a_delta_too_small_for_a_transform_is_left_to_rdp():
    """Below 1e-10 the rounding of the Fourier transform shows, so the grid must have no say, either way."""
    sampling = Poisson(size=1000, batch=10)
    assert cost(sampling, 1.0, 100, 1e-11) == cost(sampling, 1.0, 100, 1e-11, "rdp")
    assert cost(sampling, 1.0, 100, 1e-9) < cost(sampling, 1.0, 100, 1e-9, "rdp")
    grid = privacy_curves.curves(frozenset({(privacy_curves.Part("poisson", 1.0, 0.01), 100)}), pld=True)[0]
    assert grid.epsilon(0.99e-10) == math.inf
    assert grid.delta(30.0) == 1e-10


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_no_noise_is_no_privacy(accountant):
    sampling = Poisson(size=10, batch=2)
    assert cost(sampling, 0.0, 1, accountant=accountant) == math.inf
    mixed = dp_accounting.ComposedDpEvent([dp_accounting.NonPrivateDpEvent(), sampling.event(1.0, 3)])
    keywords = {"adjacency": "add-remove", "accountant": accountant}
    assert accounting.epsilon(mixed, delta=1e-5, **keywords) == math.inf
    assert accounting.delta(mixed, epsilon=5.0, **keywords) == 1.0


def test_events_compose():
    """Two runs cost more than each and at most their sum; splitting one run in two changes nothing."""
    sampling = Poisson(size=1000, batch=20)
    first, second = sampling.event(1.0, 100), FullBatch(size=1000).event(30.0, 10)
    both = dp_accounting.ComposedDpEvent([first, second])
    costs = [accounting.epsilon(e, delta=1e-5, adjacency="add-remove") for e in (first, second, both)]
    assert max(costs[:2]) < costs[2] < sum(costs[:2])
    split = dp_accounting.ComposedDpEvent([sampling.event(1.0, 40), sampling.event(1.0, 60)])
    assert accounting.epsilon(split, delta=1e-5, adjacency="add-remove") == costs[0]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    ("event", "name"),
    [
        (dp_accounting.LaplaceDpEvent(1.0), "LaplaceDpEvent"),
        (dp_accounting.UnsupportedDpEvent(), "UnsupportedDpEvent"),
        (
            dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.LaplaceDpEvent(1.0)),
            "PoissonSampledDpEvent of LaplaceDpEvent",
        ),
    ],
)
def test_unknown_events_are_refused_by_name(event, name, accountant):
    with pytest.raises(NotImplementedError, match=rf"event {name}\. Use an event of one of dpscale's samplers"):
        accounting.epsilon(event, delta=1e-5, adjacency="add-remove", accountant=accountant)


def calibrate(**changes):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add-remove"} | changes
    return accounting.calibrate_noise_multiplier(lambda s: dp_accounting.GaussianDpEvent(s), **arguments)


def steps_for(sigma, **changes):
    arguments = {"epsilon": 1.0, "delta": 1e-5, "adjacency": "add-remove"} | changes
    return accounting.calibrate_steps(lambda n: FullBatch(size=9).event(sigma, n), **arguments)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: calibrate(epsilon=0), r"'epsilon' parameter of calibrate_noise_multiplier.*Got 0.*budget"),
        (lambda: calibrate(delta=1.0), r"'delta' parameter.*\(0, 1\). Got 1.0.*below 1/size"),
        (lambda: calibrate(accountant="clt"), r"'accountant'.*'pld' or 'rdp'. Got 'clt'"),
        (lambda: calibrate(adjacency="swap"), r"'adjacency'.*'zero-out'. Got 'swap'.*sampling.adjacency"),
        (lambda: calibrate(epsilon=1e13), r"small enough to need noise.*smaller epsilon"),
        (lambda: steps_for(1.0), r"enough for one step. Got 1.0.*raise noise_multiplier or epsilon"),
        (lambda: steps_for(1e9), r"small enough to limit the steps.*choose the steps yourself"),
        (lambda: steps_for(1.0, epsilon=-1.0), r"'epsilon' parameter of calibrate_steps.*Got -1.0"),
        (
            lambda: accounting.delta(dp_accounting.NoOpDpEvent(), epsilon=-1, adjacency="add-remove"),
            r"'epsilon' parameter of delta.*>= 0. Got -1",
        ),
    ],
)
def test_errors_name_the_argument_and_the_next_action(call, text):
    with pytest.raises(ValueError, match=text):
        call()
