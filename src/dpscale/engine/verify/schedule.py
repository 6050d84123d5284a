"""When to look: before the first release, when something new comes, and every so often after.

A model is trusted as far as it was looked at. Coupling that shows only for some values is caught when they come: rows
unlike any before are looked at before they are released. Looks after the first take no more than a small share of a
run's time, once the run is longer than a few steps.
"""

import time
from collections.abc import Hashable
from dataclasses import dataclass, field

from dpscale.engine.verify.rows import Features, Novelty

SHARE = 0.02
"""Of a run's time that later looks may take."""

ALWAYS = 64
"""Looks at new rows that are taken whatever they cost."""

EARLY = 16
"""Sums up to which a look is taken at the powers of two, whatever it costs."""


@dataclass(frozen=True)
class Due:
    """What is due before a sum.

    Attributes:
        first: rows to look at before others.
        thorough: a look; otherwise a glance.
        whole: put the whole batch into other company too.
    """

    first: list[int] = field(default_factory=list)
    thorough: bool = False
    whole: bool = False


class Schedule:
    """Decides before each sum whether to look, and at which rows first."""

    def __init__(self) -> None:
        self.looks = 0
        self._sums = 0
        self._known: set[tuple[Hashable, Hashable]] = set()
        self._last = 0.0, 0.0
        self._novelty: dict[Hashable, Novelty] = {}
        self._started: float | None = None
        self._spent = 0.0  # seconds in looks after the first
        self._at_new_rows = 0
        self._sizes: list[int] = []

    def due(self, kind: Hashable, shapes: Hashable, size: int, rows: Features | None) -> Due | None:
        """What is due, if anything is.

        Args:
            kind: what the model and its loss are now. Never seen before: look.
            shapes: of a sample. Rows are compared with those of the same shapes.
            size: how many rows this batch has.
            rows: their features.
        """
        self._sums += 1
        now = time.perf_counter()
        if self._started is None:
            self._started = now
        novelty = self._novelty.setdefault(shapes, Novelty())
        new = [] if rows is None else novelty.new(rows).tolist()
        due = self._decide(kind, shapes, size, new, now)
        if due is not None and rows is not None:  # rows that are not looked at stay new
            novelty.learn(rows)
        return due

    def _decide(self, kind: Hashable, shapes: Hashable, size: int, new: list[int], now: float) -> Due | None:
        if (kind, shapes) not in self._known:
            other_shapes = any(known == kind for known, _ in self._known)
            self._known.add((kind, shapes))
            self._sizes.append(size)
            return Due(new if len(new) < size else [], thorough=not other_shapes)
        if not 0.9 * min(self._sizes) <= size <= 1.1 * max(self._sizes):  # a forward may do otherwise with more rows
            self._sizes.append(size)
            return Due(new, whole=True)
        affordable = self._spent <= SHARE * (now - (self._started or now))
        if new and (self._at_new_rows < ALWAYS or affordable):
            self._at_new_rows += 1
            return Due(new)
        if affordable and self._long_ago(now):
            return Due(thorough=True)
        power_of_two = self._sums & (self._sums - 1) == 0
        return Due(whole=True) if power_of_two and self._sums <= EARLY else None

    def looked(self, seconds: float) -> None:
        """A look was taken."""
        if self.looks:
            self._spent += seconds
        self.looks += 1
        self._last = time.perf_counter(), seconds

    def forget(self) -> None:
        """Look again at the next sum: something was met that no look has seen."""
        self._known.clear()

    def _long_ago(self, now: float) -> bool:
        """The time since the last look is worth one more."""
        when, seconds = self._last
        return now - when >= 2 * seconds / SHARE
