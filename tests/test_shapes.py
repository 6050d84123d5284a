"""Sizes of batches: every draw is covered, little is computed in vain, and there are few of them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from dpscale.sampling import FixedSize, FullBatch, Poisson, Shuffled
from dpscale.shapes import Sizes


@st.composite
def plans(draw):
    size = draw(st.integers(1, 5000))
    return Poisson(size=size, batch=draw(st.integers(1, size))), draw(st.none() | st.integers(1, 600))


@given(plans(), st.floats(0, 1))
def test_parts_cover_a_draw_once_and_in_order(plan, share):
    sampling, micro_batch = plan
    sizes, count = Sizes.of(sampling, micro_batch), round(share * sampling.size)
    parts = sizes.parts(count)
    rows = [k for part, _ in parts for k in range(part.start, part.stop)]
    assert rows == list(range(count))
    for part, computed in parts:
        assert part.stop - part.start <= computed and computed in sizes.rows
    assert all(part.stop - part.start == sizes.rows[-1] for part, _ in parts[:-1]), "a part more than is needed"


@given(plans())
def test_there_are_few_sizes_and_none_beyond_what_was_asked_for(plan):
    sampling, micro_batch = plan
    rows = Sizes.of(sampling, micro_batch).rows
    assert 1 <= len(rows) <= 5 and list(rows) == sorted(set(rows)) and rows[0] >= 1
    assert rows[-1] <= max(sampling.size, 2) and (micro_batch is None or rows[-1] <= micro_batch)


def computed(sampling, micro_batch=None):
    """Rows computed per sample drawn, and the share of draws in several parts, from the binomial distribution."""
    sizes = Sizes.of(sampling, micro_batch)
    counts = np.arange(1, sampling.size + 1)
    chance = stats.binom.pmf(counts, sampling.size, sampling.rate)
    likely = chance > 1e-12
    parts = [sizes.parts(int(n)) for n in counts[likely]]
    rows = np.array([sum(rows for _, rows in each) for each in parts])
    several = np.array([len(each) > 1 for each in parts])
    return chance[likely] @ rows / sampling.batch, chance[likely] @ several


LIMITS = {16: 1.15, 24: 1.15, 32: 1.15, 64: 1.08, 100: 1.08, 256: 1.05, 300: 1.05, 512: 1.05, 1024: 1.05, 4096: 1.05}


@pytest.mark.parametrize("size", [5_000, 60_000])
@pytest.mark.parametrize("batch", LIMITS)
def test_little_is_computed_in_vain(batch, size):
    rows, several = computed(Poisson(size=size, batch=batch))
    assert 1 <= rows <= LIMITS[batch]
    assert several < 0.01


@pytest.mark.parametrize("batch", [64, 256, 512, 1024])
def test_little_is_computed_in_vain_in_four_parts(batch):
    assert computed(Poisson(size=60_000, batch=batch), batch // 4)[0] <= 1.05


@pytest.mark.parametrize("sampling", [FixedSize(size=60, batch=7), Shuffled(size=60, batch=7), FullBatch(size=60)])
def test_draws_of_one_size_have_one_shape(sampling):
    assert Sizes.of(sampling).rows == (sampling.batch,)
    assert Sizes.of(sampling, sampling.batch).rows == (sampling.batch,)
    assert Sizes.of(FixedSize(size=60, batch=12), 4).rows == (4,)


@pytest.mark.parametrize("shares", [1, 2, 8])
def test_shares_of_a_draw_have_sizes_of_their_own(shares):
    """Every share of a draw fits, also the first one, which has a row more; little is computed in vain."""
    sampling = Poisson(size=60_000, batch=512)
    rows = Sizes.of(sampling, shares=shares).rows
    assert rows[0] < 512 / shares < rows[-1] <= 580 / shares + 8
    assert Sizes.of(FixedSize(size=60, batch=7), shares=2).rows == (4,)
    assert Sizes.of(FixedSize(size=60, batch=12), 3, shares=2).rows == (3,)


def test_a_draw_beyond_the_largest_size_goes_in_two_parts():
    sizes = Sizes.of(Poisson(size=60_000, batch=16))
    assert sizes.rows == (12, 15, 18, 21, 27)
    assert sizes.parts(28) == [(slice(0, 27), 27), (slice(27, 28), 12)]
    assert sizes.parts(1) == [(slice(0, 1), 12)] and sizes.parts(0) == []
