"""A sample of what `mixing` makes; the whole table is ``benchmarks/mixing.py``."""

from functools import cache

import pytest

from .mixing import AGREEMENTS, OWN, PLACES, STEPS, TYPES, Mixing, draw, every_mixing, run, shows

outcome = cache(run)
MIXING = [m for m in every_mixing() if m.mixes]
PLAIN = [m for m in MIXING if m.agreement == 50]
# Where all types behave much alike one of them is run, another for each quantity.
OTHERS = [m for a in (0, 90) for i, m in enumerate(m for m in MIXING if m.agreement == a) if i % 3 == i // 3 % 3]


@pytest.mark.parametrize("mixing", [m for m in MIXING if m.agreement in (0, 50)], ids=str)
def test_the_family_does_mix(mixing):
    """Without the engine: where half of the rows differ, nearly every batch shows it."""
    assert sum(shows(mixing, draw(mixing, seed)) for seed in range(8)) >= 6


def test_fewer_batches_show_it_where_more_rows_agree():
    for place in PLACES:
        shares = []
        for agreement in AGREEMENTS[1:]:
            mixing = Mixing("maximum", place, "integer", agreement)
            shares.append(sum(shows(mixing, draw(mixing, seed)) for seed in range(60)) / 60)
        assert shares[0] > 0.95 and 0.5 < shares[1] < 0.95 and shares[2] < 0.4


@pytest.mark.parametrize("agreement", AGREEMENTS)
@pytest.mark.parametrize("type", TYPES)
@pytest.mark.parametrize("place", PLACES)
def test_a_row_may_use_its_own_mark(place, type, agreement):
    mixing = Mixing(OWN, place, type, agreement)
    assert not any(shows(mixing, draw(mixing, seed)) for seed in range(2))
    done = outcome(mixing, 0)
    assert not done.refused and done.steps == STEPS


@pytest.mark.parametrize("mixing", PLAIN + OTHERS, ids=str)
def test_mixing_is_refused(mixing):
    """Before the end, though one row in ten may be all that shows it."""
    assert outcome(mixing, 0).refused


def test_mixing_that_most_rows_show_is_refused_before_anything_is_released():
    refused = [outcome(m, 0).refused and outcome(m, 0).steps == 0 for m in PLAIN]
    assert sum(refused) >= 0.95 * len(refused)
