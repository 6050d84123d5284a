"""When to look: before the first release, when something new comes, and every so often after.

A model is trusted as far as it was looked at. Coupling that shows only for some values, lengths or settings is caught
when they come: before they are released; what begins unseen, once there are twice as many sums as at the last check.
Checks after the first take no more than a small share of a run's time, once the run is longer than a few steps.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from dpscale.engine.verify.rows import Features

SHARE = 0.02
"""Of a run's time that later checks may take."""

FORCED = {"far": 64, "rows": 16, "settings": 16, "remainders": 8, "sizes": 0}
"""Checks that are made whatever they cost: at rows far from all before, as all of a new length are; at other new rows;
at new settings; at the first batch of each remainder by eight. Not at every new size."""

FEW = 16
"""Values of a feature that are each remembered; beyond, only the smallest and the largest."""


@dataclass(frozen=True)
class Due:
    """What is due before a sum.

    Attributes:
        first: rows to look at before others.
        thorough: a look; otherwise a glance.
    """

    first: list[int] = field(default_factory=list)
    thorough: bool = False


class Schedule:
    """Decides before each sum whether to look, and at which rows first."""

    def __init__(self) -> None:
        self.looks = 0
        self._sums = 0
        self._checked = 0  # the sum before which a check was last due
        self._kinds: set[Hashable] = set()
        self._settings: set[Hashable] = set()
        self._now: Hashable = None  # of the last sum, if it was known
        self._novelty: dict[Hashable, Novelty] = {}
        self._sizes: list[int] = []
        self._met: set[int] = set()  # sizes that were looked at
        self._remainders: set[int] = set()  # of those, by eight: what some forwards ask of a size
        self._forced = dict(FORCED)
        self._started: float | None = None
        self._last = 0.0, 0.0  # when the last check ended, and its seconds
        self._spent = 0.0  # seconds in checks after the first

    def due(self, kind: Hashable, setting: Hashable, shapes: Hashable, size: int, rows: Features | None) -> Due | None:
        """What is due, if anything is.

        Args:
            kind: what the model and its loss are. Never seen before: look.
            setting: numbers, modes and objects that they hold. Never seen before: glance.
            shapes: of a sample; likewise. Rows are compared with those of the same shapes.
            size: how many rows this batch has; likewise, if it is a record.
            rows: their features; likewise, if some are unlike all before.
        """
        self._sums += 1
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        novelty = self._novelty.get(shapes) or self._novelty.setdefault(shapes, Novelty())
        nothing: tuple[Sequence[int], bool] = [], False
        new, far = nothing if rows is None else novelty.new(rows)
        reasons = {
            "far": far, "rows": len(new) > 0, "settings": not self._is_known(kind, setting, shapes),
            "remainders": size % 8 not in self._remainders, "sizes": size not in self._met,
        }  # fmt: skip
        if not self._is_due(kind, size, reasons, now):
            return None
        thorough, self._checked = kind not in self._kinds or self._long_ago(now), self._sums
        self._kinds.add(kind)
        self._settings.add((kind, setting, shapes))
        self._sizes = [min([size, *self._sizes]), max([size, *self._sizes])]
        self._met.add(size)
        self._remainders.add(size % 8)
        if rows is not None:  # rows that are not looked at stay new
            novelty.learn(rows)
        return Due([int(i) for i in new] if len(new) < size else [], thorough)

    def _is_known(self, *now: Hashable) -> bool:
        """Whether such a kind, setting and shapes were looked at; most steps are like the one before."""
        if now == self._now:
            return True
        known = now in self._settings
        self._now = now if known else None
        return known

    def _is_due(self, kind: Hashable, size: int, reasons: Mapping[str, bool], now: float) -> bool:
        if kind not in self._kinds:
            return True
        if not 0.9 * self._sizes[0] - 2 <= size <= 1.1 * self._sizes[1] + 2:  # a forward may ask for the size
            return True
        affordable = self._spent <= SHARE * (now - (self._started or now))
        for reason in (name for name, holds in reasons.items() if holds):
            if self._forced[reason] or affordable:
                self._forced[reason] = max(0, self._forced[reason] - 1)
                return True
        return self._sums >= 2 * self._checked or (affordable and self._long_ago(now))

    def looked(self, seconds: float) -> None:
        """A check was made."""
        if self.looks:
            self._spent += seconds
        self.looks += 1
        self._last = time.perf_counter(), seconds

    def forget(self) -> None:
        """Look again at the next sum: something was met that no look has seen."""
        self._kinds.clear()
        self._settings.clear()
        self._now = None

    def _long_ago(self, now: float) -> bool:
        """The time since the last check is worth one more."""
        when, seconds = self._last
        return now - when >= 2 * seconds / SHARE


_NONE = np.zeros(0, dtype=np.int64)


class Novelty:
    """What rows have been like so far, and which are like none of them."""

    def __init__(self) -> None:
        self._values: list[set[float]] = []
        self._range: Features | None = None
        self._usual: Features = np.zeros((2, 0))  # from where to where nothing is new
        self._few = np.zeros(0, dtype=np.int64)  # features of few values but more than one, and those values in a table
        self._table = np.zeros((0, 1, 1))

    def new(self, rows: Features) -> tuple[NDArray[np.int64], bool]:
        """Numbers of the rows that are like none before, the farthest from those first, all of them at first; and
        whether one is farther than those were from each other."""
        if self._range is None or self._range.shape[1] != rows.shape[1]:
            return np.arange(len(rows)), True
        (low, high), (least, most) = self._range, self._usual
        strange = (rows.T[self._few, None] != self._table).all(1).any(0)
        if not strange.any() and (rows >= least).all() and (rows <= most).all():  # as nearly always
            return _NONE, False
        beyond = ((rows < least) | (rows > most)).any(1)
        out = np.maximum(low - rows, rows - high).clip(0) / np.maximum(high - low, 1e-9 * np.abs(high) + 1e-200)
        new = np.flatnonzero(strange | beyond)
        far = out[new].max(1)
        return new[np.lexsort((~strange[new], -far))], bool((far >= 1).any())

    def learn(self, rows: Features) -> None:
        """From now on such rows are known."""
        if self._range is None or self._range.shape[1] != rows.shape[1]:
            self._values, self._range = [set() for _ in rows.T], np.stack([rows.min(0), rows.max(0)])
        self._range = np.stack([np.minimum(self._range[0], rows.min(0)), np.maximum(self._range[1], rows.max(0))])
        for values, column in zip(self._values, rows.T, strict=True):
            if len(values) <= FEW:
                found = np.unique(column)
                many = len(column) > FEW // 4 and len(found) == len(column)  # no two rows are alike in it
                values.update(range(FEW + 1) if many else found[: FEW + 1].tolist())
        counts = np.array([len(values) for values in self._values])
        self._few = np.flatnonzero((counts > 1) & (counts <= FEW))
        most = int(max(counts[self._few], default=1))
        self._table = np.array([(list(self._values[k]) * most)[:most] for k in self._few]).reshape(-1, most, 1)
        # Of many values there is always a next extreme.
        margin = np.where(counts <= FEW, 0.0, 0.1 * (self._range[1] - self._range[0]))
        self._usual = self._range + np.stack([-margin, margin])
