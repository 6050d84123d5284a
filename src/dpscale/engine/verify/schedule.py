"""When to look: before the first release, when something new comes, and every so often after.

A model is trusted as far as it was looked at. Coupling that shows only for some values, lengths or settings is caught
when they come: before they are released. Checks after the first take no more than a small share of a run's time, once
the run is longer than a few steps.
"""

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from dpscale.engine.verify.rows import Features, Novelty

SHARE = 0.02
"""Of a run's time that later checks may take."""

FORCED = {"far": 64, "rows": 16, "settings": 16, "remainders": 8, "sizes": 0}
"""Checks that are made whatever they cost: at rows far from all before, as all of a new length are; at other new rows;
at new settings; at the first batch of each remainder by eight. Not at every new size."""


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
        novelty = self._novelty.setdefault(shapes, Novelty())
        nothing: tuple[Sequence[int], bool] = [], False
        new, far = nothing if rows is None else novelty.new(rows)
        reasons = {
            "far": far, "rows": len(new) > 0, "settings": not self._is_known(kind, setting, shapes),
            "remainders": size % 8 not in self._remainders, "sizes": size not in self._met,
        }  # fmt: skip
        if not self._is_due(kind, size, reasons, now):
            return None
        thorough = kind not in self._kinds or self._long_ago(now)
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
        power_of_two = self._sums & (self._sums - 1) == 0
        return power_of_two or (affordable and self._long_ago(now))

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
