"""The whole batch as one of the runs of a look.

Whatever a few rows show, in the whole batch, too, rows keep losses and gradients: when the others become copies of one,
and beside how they are among few. Gradients arrive in the rows that they are of, whatever the others send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import Sites, Tape
from dpscale.engine.verify.credit import TapedRun, by_row, coarseness, levels
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS, Obstacle
from dpscale.engine.verify.probe import DroppingTape, Mask, Numbered, UndroppedTape, drop_alike, masks_of
from dpscale.engine.verify.refusals import RATE, Refusals
from dpscale.engine.verify.rows import count_of, odd_among, replaced, take
from dpscale.engine.verify.runs import Runs
from dpscale.engine.verify.values import Gradient, added, apart, near, reshaped, rounding, size

ALONE = "an operation cannot be run for one sample ({})"
ASTRAY = "what arrives in a row is not of that row's loss alone: rows change places, or meet"


@dataclass(frozen=True)
class _Whole:
    """What a run of the whole batch gave.

    Attributes:
        losses: (B,).
        left: what it left behind.
        credit: what it credits to each of some mixtures of rows; none where that cannot be told.
        rounding: by how much of itself that may be off in another such run.
        astray: whether gradients arrived in rows that they are not of.
        start: where its random numbers began, if not at the seed.
        draws: what was drawn, if each operation was seeded.
        odd: rows without a finite gradient, which hide what it credits to others.
        masks: of its dropouts.
    """

    losses: Tensor
    left: Any
    credit: Sequence[Gradient] = ()
    rounding: float = 0.0
    astray: bool = False
    start: list[Any] | None = None
    draws: Mapping[int, Tensor] = field(default_factory=dict)
    odd: frozenset[int] = frozenset()
    masks: Sequence[Mask] = ()


class WholeBatch:
    """Compares runs of the whole batch with each other, and with one of a few rows.

    Args:
        runs: of the subject.
        refusals: what is said of differences.
        batch: all of it.
        kept: the rows that are looked at.
        few: the run of those alone: the operations, the losses, and the gradient of each row's loss if it is known.
        known: where the samples are in the operations; None if they cannot be followed.
        own: the run of the step itself, if that may be one of these.
        again: whether such a model was looked at before.
    """

    def __init__(
        self, runs: Runs, refusals: Refusals, batch: Any, kept: Sequence[int],
        few: tuple[Numbered, Tensor, Sequence[Gradient]], *, known: Sites | None, own: OwnRun | None, again: bool,
    ) -> None:  # fmt: skip
        self._runs, self._refusals, self._batch, self._kept = runs, refusals, batch, kept
        self._base, self._few, self._each = few
        self._known, self._own, self._again = known, own, again
        self._rows, self._samples = take(batch, kept), count_of(batch)
        self._level = levels([size(one) for one in self._each]) if self._each else [1.0] * len(kept)

    def __call__(self) -> set[int]:
        """The rows that are found odd: nothing of them is finite."""
        ways = self._companies()
        weights = [by_row(keep, [self._level[self._kept.index(i)] for i in keep]) for keep, _ in ways]
        ours = self._first([*weights, by_row(self._kept, self._level)])
        odd = odd_among(ours.losses) | ours.odd
        if not odd & {*self._kept}:
            odd |= {i for i, weight in zip(self._kept, self._level, strict=True) if not weight}
        for k, (keep, other) in enumerate(ways):
            self._in_company(ours, k, keep, other, weights[k])
        if ours.draws and self._samples > ROWS:
            self._as_among_few_that_drew_alike(ours)
        elif not self._draws and ways:
            self._as_among_few(ours)
        if ours.astray:
            raise Obstacle(ASTRAY)
        return odd

    @property
    def _draws(self) -> bool:
        return self._base.draws_freely or self._runs.drew or self._runs.drew_own

    def _companies(self) -> list[tuple[list[int], int]]:
        """Rows that are kept, and one whose copies take the place of the others.

        The second is that of a glance, which may have seen something there. What rows are among few shows what comes of
        an extreme one. If they draw other numbers there, two rows are put among copies of themselves: one of them is
        not extreme.
        """
        if self._samples < 2:
            return []
        several, first, last = sorted({*self._kept[: max(1, self._samples // 2)]}), self._kept[0], self._kept[-1]
        return [(several, first), ([last], last), ([first], first)][: 3 if self._draws else 1 + self._again]

    def _first(self, weights: Sequence[Mapping[int, float]]) -> _Whole:
        """The step's own run, if there is one that others can be compared with."""
        if self._known is None:
            return self._run(self._batch, weights)
        if self._base.draws_freely:  # numbers are the same for all companies only if each operation is seeded
            run, ours = self._runs.taped(Tape, self._known, self._batch, weighted=True), self._run(self._batch, weights)
            hidden = not all(np.isfinite(size(each)) for each in ours.credit)
            odd = frozenset(self._runs.without_gradient(run)) if hidden else frozenset()
            return replace(ours, astray=run.astray, odd=odd)
        own = None if self._own is None else self._own(self._known, self._runs.surroundings, self._runs.seed)
        run = own or self._runs.taped(DroppingTape, self._known, self._batch, weighted=True)
        if not self._draws and not drop_alike(self._base, run.tape):
            raise UnsupportedModel(RATE)
        start = None if self._own is None or own is None else self._own.before
        credit, masks = self._credited(run, weights), masks_of(run.tape)
        return _Whole(run.losses, run.left, credit, coarseness(run), run.astray, start, masks=masks)

    def _run(
        self, data: Any, weights: Sequence[Mapping[int, float]], start: list[Any] | None = None, *,
        bare: bool = False, masks: Sequence[Mask] = (),
    ) -> _Whole:  # fmt: skip
        """A run of as many rows as the batch has, ``bare`` of dropout or with such masks; taped, unless each operation
        must be seeded."""
        runs = self._runs
        if self._known is not None and not self._base.draws_freely:
            tape = UndroppedTape if bare else partial(DroppingTape, masks=masks)
            run = runs.taped(tape, self._known, data, start)
            return _Whole(run.losses, run.left, self._credited(run, weights), coarseness(run))
        mode = runs.numbered()
        losses = runs.losses(mode, data, start)
        if self._known is not None and not (runs.drew or drop_alike(self._base, mode)):
            raise UnsupportedModel(RATE)
        credit: list[Gradient] = []
        if self._known is not None:
            credit = [runs.gradient(losses, [each.get(i, 0.0) for i in range(len(losses))]) for each in weights]
        left = runs.surroundings.left_behind()
        return _Whole(losses.detach(), left, credit, reshaped(self._base.eps), draws=mode.draws)

    def _credited(self, run: TapedRun, weights: Sequence[Mapping[int, float]]) -> list[Gradient]:
        try:
            return self._runs.credited(run, *weights) if run.grads else []
        except (UnsupportedModel, RuntimeError, ValueError, IndexError, NotImplementedError) as error:
            raise Obstacle(ALONE.format(error)) from error

    def _in_company(self, ours: _Whole, k: int, keep: Sequence[int], other: int, weights: Mapping[int, float]) -> None:
        """Some rows of the whole batch among copies of one. To rounding: rows that are packed are of other shapes."""
        data = replaced(self._batch, take(self._batch, [other] * self._samples), keep)
        theirs = self._run(data, [weights], ours.start, masks=ours.masks)
        for i in keep:
            if not near(ours.losses[i], theirs.losses[i], ours.losses, self._base.eps, rounding(self._base.eps)):
                self._refusals.refuse(self._batch, data, i)
        self._runs.surroundings.compare(ours.left, theirs.left)
        if not ours.credit or not theirs.credit or apart(ours.credit[k], theirs.credit[0], ours.rounding) is None:
            return
        if ours.astray or (
            self._known is not None and self._runs.taped(Tape, self._known, data, ours.start, weighted=True).astray
        ):
            raise Obstacle(ASTRAY)
        self._refusals.refuse_gradient(self._batch, data, keep[0])

    def _as_among_few(self, ours: _Whole) -> None:
        """The rows that are looked at have the losses and gradients that they have among few; without dropout, as
        those."""
        if self._base.drops:
            ours = self._run(self._batch, [by_row(self._kept, self._level)], bare=True)
        self._require_alike(ours, self._few)
        if ours.credit and not ours.astray:
            mixture = added(self._each, self._level)
            self._refusals.require_credit_near(mixture, ours.credit[-1], self._level, self._samples, self._base.eps)

    def _as_among_few_that_drew_alike(self, ours: _Whole) -> None:
        """The same of a model that draws: few rows are given what was drawn for them in the whole batch."""
        drawn = ours.draws, self._kept, self._samples
        found = self._runs.drawn_alike(self._rows, drawn, self._level)
        if found is None:
            return
        few, mixture = found
        self._require_alike(ours, few)
        if ours.credit and not ours.astray:
            self._refusals.require_credit_near(
                mixture, ours.credit[-1], self._level, self._samples, self._base.eps, drawn
            )

    def _require_alike(self, ours: _Whole, few: Tensor) -> None:
        for k, i in enumerate(self._kept):
            self._refusals.require_near(k, few, ROWS, ours.losses[i], self._samples, self._base.eps, ours.losses)
