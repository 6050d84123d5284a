"""Samplers: what they draw, how it is padded, and that the event tells the same story."""

import dataclasses
import itertools
import math
from fractions import Fraction

import dp_accounting
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dpscale.sampling import SAMPLERS, Draw, FixedSize, FullBatch, Poisson, Sampling, Shuffled


def make(name: str, size: int, batch: int) -> Sampling:
    if name == "full-batch":
        return FullBatch(size=size)
    return SAMPLERS[name](size=size, batch=batch)


def draws(sampling: Sampling, count: int, *, seed: int = 0, start: int = 0) -> list[np.ndarray]:
    return list(itertools.islice(sampling.draws(np.random.default_rng(seed), start=start), count))


sizes = st.integers(1, 200).flatmap(lambda size: st.tuples(st.just(size), st.integers(1, size)))
names = st.sampled_from(sorted(SAMPLERS))
seeds = st.integers(0, 2**32)


@given(names, sizes, seeds)
@settings(max_examples=150, deadline=None)
def test_indices_are_in_range_and_without_duplicates(name, size_batch, seed):
    size, batch = size_batch
    for indices in draws(make(name, size, batch), 5, seed=seed):
        assert indices.dtype == np.int64
        assert len(np.unique(indices)) == len(indices)
        assert np.all((indices >= 0) & (indices < size))


@given(names, sizes, seeds)
@settings(max_examples=100, deadline=None)
def test_a_draw_has_a_row_for_every_index(name, size_batch, seed):
    for number, indices in enumerate(draws(make(name, *size_batch), 5, seed=seed), 1):
        draw = Draw.of(number, indices)
        assert draw.number == number and draw.mask.dtype == np.bool_
        np.testing.assert_array_equal(draw.indices, indices)
        assert draw.mask.tolist() == ([True] * len(indices) or [False])


@given(sizes, seeds)
@settings(max_examples=50, deadline=None)
def test_fixed_size_draws_exactly_the_batch(size_batch, seed):
    size, batch = size_batch
    assert {len(i) for i in draws(FixedSize(size=size, batch=batch), 10, seed=seed)} == {batch}


@given(sizes, seeds)
@settings(max_examples=50, deadline=None)
def test_shuffled_covers_each_sample_once_per_epoch(size_batch, seed):
    size, batch = size_batch
    sampling = Shuffled(size=size, batch=batch)
    stream = draws(sampling, 2 * sampling.steps_per_epoch, seed=seed)
    for epoch in (stream[: sampling.steps_per_epoch], stream[sampling.steps_per_epoch :]):
        np.testing.assert_array_equal(np.sort(np.concatenate(epoch)), np.arange(size))
        assert max(len(b) for b in epoch) == batch


def test_shuffled_orders_each_epoch_anew():
    sampling = Shuffled(size=50, batch=50)
    first, second = draws(sampling, 2)
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, np.arange(50))


def test_full_batch_is_every_sample_every_step():
    for indices in draws(FullBatch(size=7), 3):
        np.testing.assert_array_equal(indices, np.arange(7))


@given(names, sizes, seeds, st.integers(0, 20))
@settings(max_examples=60, deadline=None)
def test_a_run_resumes_from_its_seed_and_step(name, size_batch, seed, start):
    sampling = make(name, *size_batch)
    whole = draws(sampling, start + 3, seed=seed)
    for a, b in zip(whole[start:], draws(sampling, 3, seed=seed, start=start), strict=True):
        np.testing.assert_array_equal(a, b)


def test_steps_and_seeds_give_different_draws():
    sampling = FixedSize(size=1000, batch=100)
    a, b = draws(sampling, 2, seed=1)
    c = draws(sampling, 1, seed=2)[0]
    assert not np.array_equal(a, b) and not np.array_equal(a, c)


def z_scores(counts: np.ndarray, size: int, rate: float) -> tuple[float, float]:
    """How many deviations the mean and the variance of ``counts`` lie from those of a binomial."""
    n, variance = len(counts), size * rate * (1 - rate)
    mean_z = (counts.mean() - size * rate) / math.sqrt(variance / n)
    variance_z = (counts.var(ddof=1) / variance - 1) / math.sqrt(2 / n)
    return float(mean_z), float(variance_z)


def test_poisson_batch_sizes_have_the_binomial_mean_and_variance():
    """Accepts the right rate and rejects one that is 3% off.

    5 deviations either way on two scores: a right sampler fails one seed in about 10^6 (and this seed is fixed).
    2000 batches of 512 know the mean to 0.1%, so a rate 3% off lies 30 deviations away.
    """
    sampling = Poisson(size=60_000, batch=512)
    counts = np.array([len(i) for i in draws(sampling, 2000)])
    mean_z, variance_z = z_scores(counts, sampling.size, sampling.rate)
    assert abs(mean_z) < 5 and abs(variance_z) < 5
    for wrong in (0.97, 1.03):
        assert abs(z_scores(counts, sampling.size, sampling.rate * wrong)[0]) > 10
    # A constant batch size has the right mean and must be told apart by its variance.
    assert abs(z_scores(np.full(2000, 512), sampling.size, sampling.rate)[1]) > 10


@pytest.mark.parametrize("sampling", [Poisson(size=40, batch=10), FixedSize(size=40, batch=10)])
def test_every_sample_and_every_pair_is_drawn_at_its_rate(sampling):
    """Samples are chosen alike, and pairs as independence (or a uniform subset) demands; 5 deviations each."""
    steps = 4000
    member = np.zeros((steps, 40))
    for row, indices in zip(member, draws(sampling, steps), strict=True):
        row[indices] = 1
    rate = sampling.rate
    pair = rate**2 if isinstance(sampling, Poisson) else rate * 9 / 39
    singles, pairs = member.mean(0), (member.T @ member / steps)[np.triu_indices(40, 1)]
    assert np.abs(singles - rate).max() < 5 * math.sqrt(rate * (1 - rate) / steps)
    assert np.abs(pairs - pair).max() < 5 * math.sqrt(pair * (1 - pair) / steps)


@pytest.mark.parametrize(("size", "batch"), [(60_000, 512), (1000, 1), (64, 60), (8, 8)])
def test_spread_is_the_deviation_of_a_batch_size(size, batch):
    sampling = Poisson(size=size, batch=batch)
    assert math.isclose(sampling.spread, stats.binom.std(size, sampling.rate))
    assert FixedSize(size=size, batch=batch).spread == Shuffled(size=size, batch=batch).spread == 0
    assert FullBatch(size=size).spread == 0


def test_trap_06_the_event_belongs_to_the_sampler():
    gaussian = dp_accounting.GaussianDpEvent
    composed = dp_accounting.SelfComposedDpEvent
    assert Poisson(size=60_000, batch=512).event(0.9, 10) == composed(
        dp_accounting.PoissonSampledDpEvent(512 / 60_000, gaussian(0.9)), 10
    )
    # One sample takes another's place: the sum moves by 2·bound, so the noise is worth half.
    assert FixedSize(size=60_000, batch=512).event(0.9, 10) == composed(
        dp_accounting.SampledWithoutReplacementDpEvent(60_000, 512, gaussian(0.45)), 10
    )
    assert FullBatch(size=5).event(0.9, 10) == composed(gaussian(0.9), 10)
    assert FullBatch(size=5, adjacency="replace-one").event(0.9, 10) == composed(gaussian(0.45), 10)
    # Shuffled batches are never accounted as sampled ones: one release per epoch begun (4 steps each here).
    shuffled = Shuffled(size=10, batch=3)
    assert [shuffled.event(1.0, k) for k in (1, 4, 5, 8)] == [composed(gaussian(1.0), n) for n in (1, 1, 2, 2)]
    assert dataclasses.replace(shuffled, adjacency="replace-one").event(1.0, 4) == composed(gaussian(0.5), 1)
    assert "NO amplification" in shuffled.note
    assert not any(make(name, 10, 3).note for name in SAMPLERS if name != "shuffled")
    # No drop_last: a short last batch is drawn.
    assert [len(b) for b in draws(shuffled, 4)] == [3, 3, 3, 1]


@pytest.mark.parametrize("name", SAMPLERS)
def test_no_steps_are_no_event(name):
    assert make(name, 10, 3).event(1.0, 0) == dp_accounting.NoOpDpEvent()


def test_trap_07_the_expected_batch_is_a_constant_without_a_floor():
    sampling = Poisson(size=60_000, batch=512)
    assert sampling.batch == 512
    assert sampling.rate == 512 / 60_000
    assert sampling.rate * 60_000 == pytest.approx(512, rel=1e-15)
    # The realised sizes vary; the constant that divides does not.
    assert len({len(i) for i in draws(sampling, 20)}) > 1
    assert Poisson(size=59_999, batch=512).batch == Poisson(size=60_001, batch=512).batch == 512


def test_trap_19_an_empty_draw_is_one_masked_row():
    sampling = Poisson(size=1000, batch=1)
    batches = draws(sampling, 50)
    empty = [b for b in batches if len(b) == 0]
    assert empty, "a Poisson batch of expectation 1 is empty once in e times"
    draw = Draw.of(1, empty[0])
    assert draw.mask.tolist() == [False] and not len(draw.indices)


def test_trap_26_steps_are_counted_exactly():
    assert Poisson(size=60_000, batch=512).steps(20) == 2344
    # int(1/(1/n)) loses a step for n = 49, 98, 103, …; n steps per epoch are n.
    for n in range(1, 300):
        assert Poisson(size=n, batch=1).steps(1) == Shuffled(size=n, batch=1).steps(1) == n
        assert Poisson(size=10 * n, batch=10).steps(3) == 3 * n
    assert Poisson(size=1000, batch=10).steps(0.1) == 10
    assert Poisson(size=1000, batch=10).steps(0.3) == 30  # 0.3·100 in floats is below 30, 0.1·3 above
    assert Poisson(size=1000, batch=10).steps(0.301) == 31
    assert Shuffled(size=10, batch=3).steps(20) == 80
    assert FullBatch(size=10).steps(20) == 20


@given(sizes, st.integers(1, 100))
@settings(max_examples=100, deadline=None)
def test_steps_cover_the_epochs_and_no_more(size_batch, epochs):
    size, batch = size_batch
    steps = Poisson(size=size, batch=batch).steps(epochs)
    assert steps * Fraction(batch, size) >= epochs > (steps - 1) * Fraction(batch, size)


@pytest.mark.parametrize("name", SAMPLERS)
def test_public_quantities(name):
    sampling = make(name, 100, 20)
    assert sampling.rate == sampling.batch / 100
    assert sampling.sensitivity_factor == (2 if sampling.adjacency == "replace-one" else 1)
    assert "100" in sampling.describe()
    assert dataclasses.replace(sampling, size=200).size == 200


def test_adjacencies():
    adjacencies = {name: make(name, 10, 2).adjacency for name in SAMPLERS}
    assert adjacencies == {
        "poisson": "add-remove",
        "fixed-size": "replace-one",
        "full-batch": "add-remove",
        "shuffled": "zero-out",
    }


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: Poisson(size=0, batch=1), r"'size' parameter of Poisson.*>= 1. Got 0.*dataset is empty"),
        (lambda: FullBatch(size=0), r"'size' parameter of FullBatch.*dataset is empty"),
        (lambda: Poisson(size=10.0, batch=1), r"'size' parameter.*integer.*Got 10\.0.*Pass len\(dataset\)"),
        (lambda: FixedSize(size=10, batch=0), r"'batch' parameter of FixedSize.*>= 1. Got 0.*expected number"),
        (lambda: Shuffled(size=10, batch=11), r"at most size = 10. Got 11.*smaller batch"),
        (lambda: FullBatch(size=10, adjacency="zero-out"), r"'add-remove' or 'replace-one'. Got 'zero-out'"),
        (lambda: Shuffled(size=10, batch=2, adjacency="add-remove"), r"'zero-out' or 'replace-one'. Got 'add-re"),
        (lambda: Poisson(size=10, batch=2).steps(0), r"'epochs' parameter of Poisson.steps.*Got 0 instead"),
        (lambda: Shuffled(size=10, batch=2).steps(math.inf), r"'epochs' parameter of Shuffled.steps.*Got inf"),
        (lambda: Poisson(size=10, batch=2).event(-1.0, 1), r"'noise_multiplier'.*>= 0. Got -1.0"),
        (lambda: Poisson(size=10, batch=2).event(1.0, -1), r"'steps' parameter of Poisson.event.*Got -1"),
        (lambda: Poisson(size=10, batch=2).draws(np.random.default_rng(0), start=-1), r"'start'.*Got -1"),
    ],
)
def test_errors_name_the_argument_and_the_next_action(call, text):
    with pytest.raises(ValueError, match=text):
        call()
