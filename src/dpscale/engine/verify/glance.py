"""A glance at a few rows and at the whole batch: whether there is anything that a look would have to judge.

A look finds out where the samples are, and judges what it sees. Once that is known of a model, other rows, lengths,
sizes and settings need less: losses in other company and alone, what is left behind, and what is credited to each
row, weighted and in other company. Whatever is not as expected, for a good reason or a bad one, is left to a look.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import Shared, Site, Sites, shapes_of, unrecorded
from dpscale.engine.verify.collation import Alone, farness
from dpscale.engine.verify.credit import TapedRun, by_row, coarseness, levels
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS
from dpscale.engine.verify.probe import DroppingTape, Undropped, UndroppedTape, drop_alike, masks_of
from dpscale.engine.verify.rows import count_of, neutral, odd_among, replaced, take
from dpscale.engine.verify.runs import Runs, Subject
from dpscale.engine.verify.values import Gradient, added, apart, near, reshaped, same, size


class Glance:
    """One glance at a subject.

    Args:
        subject: the model and its losses.
        batch: any batch of it.
        kept: the rows to look at, the rarest in the middle.
        sites: where the samples are in its operations; None if that is not known.
        draws: whether it draws random numbers, so that a row alone has others than in company.
        drops: whether it has dropout, which is left out of what is compared with few rows.
        eps: of the coarsest numbers that it computes with.
        seed: for the runs.
        own: the run of the step itself, if that may be the one of the whole batch.

    Attributes:
        odd: rows whose loss or gradient is not finite, of which nothing can be compared.
    """

    def __init__(
        self, subject: Subject, batch: Any, kept: Sequence[int], *, sites: Sites | None, draws: bool, drops: bool,
        eps: float, seed: int, own: OwnRun | None = None,
    ) -> None:  # fmt: skip
        self._batch, self._kept, self._sites, self._own = batch, list(kept), sites, own
        self._draws, self._drops, self._eps = draws, drops, eps
        self._runs = Runs(subject, seed)
        self._runs.seeded = draws
        self._surroundings = self._runs.surroundings
        self._learned: list[Shared] = []
        self.odd: set[int] = set()

    def __call__(self, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        """Whether all is as expected.

        Args:
            singles: rows of the batch that were collated alone, by their place.
            rest: other parts of the batch that these were collated with.
        """
        fine = False
        try:
            with torch.autograd.set_detect_anomaly(False):
                fine = self._as_expected({} if self._draws else singles, rest)
            if fine and self._sites is not None:
                for op, constants in self._learned:
                    self._sites.add(op, Site("shared", constants=frozenset({shapes_of(constants)})))
            return fine
        except UnsupportedModel:
            raise
        except Exception:  # a model need not take every row that was put together
            return False
        finally:
            if self._own is not None and not fine:
                self._own.drop()
            self._surroundings.require_parameters_kept(self._surroundings.restore(thorough=True))

    def _as_expected(self, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        rows = take(self._batch, self._kept)
        if self._sites is None:
            losses, sent = self._unfollowed(rows), self._sent_alone
        else:
            run = self._followed(self._sites, rows)
            losses, sent = (None, self._sent_alone) if run is None else (run.losses, partial(self._credited_to, run))
        return losses is not None and (not singles or self._collated(losses, sent, singles, rest))

    def _sent_alone(self, i: int) -> Gradient:
        return self._alone(take(self._batch, [i] * ROWS))[1]

    def _credited_to(self, run: TapedRun, i: int) -> Gradient:
        return self._runs.credited(run, {i: 1.0})[0]

    def _unfollowed(self, rows: Any) -> Tensor | None:
        """The losses of the whole batch, if they are each sample's own: so are the gradients, one sample at a time."""
        few, whole = self._few_apart(rows, range(ROWS)), self._run(self._batch)
        if few is None or not self._stays(whole, self._run(self._copies()), self._kept[-1]):
            return None
        losses, _ = whole
        if not self._draws:
            near = [self._near(losses[i], few[k], few) for k, i in enumerate(self._kept)]
            if not all(near) or not self._near(few[ROWS // 2], self._alone(rows)[0], few):
                return None
        return losses

    def _followed(self, sites: Sites, rows: Any) -> TapedRun | None:
        """The run of the whole batch, if its losses and what is credited to a row are those of that row alone: the
        rarest of few has the same among empty ones, one that is like most has the same among copies of itself in the
        whole batch, dropout included; and all of these have there what they have among few, and alone."""
        middle, last, alone = ROWS // 2, self._kept[-1], [{k: 1.0} for k in range(ROWS)]
        # Taped runs are compared with taped ones: operations may round in another way there.
        few = self._taped(sites, rows)
        each = self._agree(few, self._taped(sites, replaced(rows, neutral(rows), [middle])), middle, alone)
        others = [i for i in range(ROWS) if i != middle]
        if few is None or each is None or self._few_apart(rows, others, few) is None:
            return None
        level = levels([size(one) for one in each])
        mixture = by_row(self._kept, level)
        if self._own is None:
            whole = self._taped(sites, self._batch, dropped=True, weighted=True)
        else:
            whole = self._own(sites, self._surroundings, self._runs.seed, [])
        mixtures = [{last: 1.0}] if self._draws or self._drops else [{last: 1.0}, mixture]
        credit = self._agree(whole, self._taped(sites, self._copies(), dropped=True, like=whole), last, mixtures)
        if credit is not None and self._drops:
            if whole is None or not self._drops_alike(sites, few, whole):
                return None
            whole = self._taped(sites, self._batch)
        if whole is None or credit is None:
            return None
        self.odd = {i for i, weight in zip(self._kept, level, strict=True) if not weight} | odd_among(whole.losses)
        if self._draws:
            return whole if self._as_among_few_that_drew_alike(whole, level, rows) else None
        credit = self._runs.credited(whole, mixture) if self._drops else credit
        as_among_few = self._as_among_few((few.losses, each), (whole.losses, credit[-1]), level, rows)
        return whole if as_among_few else None

    def _drops_alike(self, sites: Sites, few: TapedRun, whole: TapedRun) -> bool:
        """Whether dropout is that of few rows, and with it the rarest row has the loss that it has in the whole batch
        among copies of itself, too."""
        samples, i = count_of(self._batch), self._kept[ROWS // 2]
        mode = DroppingTape(
            self._runs.subject.parameters, None, sites, samples, lenient=True, masks=masks_of(whole.tape)
        )
        start = None if self._own is None else self._own.before
        losses = self._runs.losses(mode, take(self._batch, [i] * samples), start).detach()
        self._surroundings.compare(whole.left, self._surroundings.left_behind())
        return same(whole.losses[i], losses[i]) and (self._draws or drop_alike(few.tape, whole.tape))

    def _as_among_few_that_drew_alike(self, whole: TapedRun, level: Sequence[float], rows: Any) -> bool:
        """The same of a model that draws: few rows are given what was drawn for them in the whole batch."""
        runs, samples = self._runs, count_of(self._batch)
        if samples <= ROWS:
            return True
        many, weights = runs.numbered(), by_row(self._kept, level)
        theirs = runs.losses(many, self._batch)
        credit = runs.gradient(theirs, [weights.get(i, 0.0) for i in range(samples)])
        self._surroundings.left_behind()
        if not np.isfinite(size(credit)):
            self.odd |= runs.without_gradient(whole)
        found = runs.drawn_alike(rows, (many.draws, self._kept, samples), level)
        if found is None:
            return True
        ours, own = found
        return (
            all(self._near(theirs[i], ours[k], theirs) for k, i in enumerate(self._kept))
            and apart(credit, own, reshaped(self._eps)) is None
        )

    def _as_among_few(
        self, ours: tuple[Tensor, Sequence[Gradient]], theirs: tuple[Tensor, Gradient], level: Sequence[float],
        rows: Any,
    ) -> bool:  # fmt: skip
        """Whether our rows have the losses and gradients that they have among few, and the one in the middle alone."""
        (few, each), (whole, mixture) = ours, theirs
        (loss, alone), middle = self._alone(rows), ROWS // 2
        return (
            all(self._near(whole[i], few[k], whole) for k, i in enumerate(self._kept))
            and self._near(few[middle], loss, few)
            and apart(alone, each[middle], reshaped(self._eps)) is None
            and apart(mixture, added(each, level), reshaped(self._eps)) is None
        )

    def _alone(self, rows: Any) -> tuple[Tensor, Gradient]:
        """The loss of the row in the middle alone, and what it sends to the parameters."""
        losses = self._runs.losses(self._undropped(), take(rows, [ROWS // 2]))
        sent = self._runs.gradient(losses, [1.0])
        self._surroundings.left_behind()
        return losses[0].detach(), sent

    def _run(self, data: Any) -> tuple[Tensor, Any]:
        """Losses without dropout, and what is left behind."""
        losses = self._runs.losses(self._undropped(), data).detach()
        return losses, self._surroundings.left_behind()

    def _undropped(self) -> AbstractContextManager[Any]:
        return Undropped() if self._drops else unrecorded()

    def _stays(self, ours: tuple[Tensor, Any], theirs: tuple[Tensor, Any], i: int) -> bool:
        """Whether the loss of row i and the state are in one run what they are in another."""
        if not same(ours[0][i], theirs[0][i]):
            return False
        self._surroundings.compare(ours[1], theirs[1])
        return True

    def _few_apart(self, rows: Any, among: Sequence[int], taped: TapedRun | None = None) -> Tensor | None:
        """The losses of a few rows, if some have the same among empty ones, and the one in the middle, the rarest,
        among copies of itself.

        A taped run of them will do to compare with, if it agrees to the bit: operations may round in another way there.
        """
        middle, empty = ROWS // 2, neutral(rows)
        company = [(take(rows, [middle] * ROWS), middle), *((replaced(rows, empty, [i]), i) for i in among)]
        runs = [(self._run(data), i) for data, i in company]
        if taped is not None and taped.left is None and all(
            left is None and same(taped.losses[i], losses[i]) for (losses, left), i in runs
        ):  # fmt: skip
            return taped.losses
        ours = self._run(rows)
        return ours[0] if all(self._stays(ours, theirs, i) for theirs, i in runs) else None

    def _copies(self) -> Any:
        return take(self._batch, [self._kept[-1]] * count_of(self._batch))

    def _near(self, a: Tensor, b: Tensor, scale: Tensor) -> bool:
        return near(a, b, scale, self._eps)

    def _collated(
        self, whole: Tensor, gradient_of: Callable[[int], Gradient], singles: Mapping[int, Any], rest: Sequence[Any]
    ) -> bool:
        """Whether some rows have the losses and gradients of samples that were collated alone."""
        left = dict(singles)
        for place, single in singles.items():
            losses = self._runs.losses(self._undropped(), single)
            left[place] = Alone(single, losses[0].detach(), self._runs.gradient(losses, [1.0]), self._eps)
            self._surroundings.left_behind()
        left = {p: alone for p, alone in left.items() if farness(alone, whole, p, self._eps, gradient_of)}
        start = len(whole)
        for part in rest if left else ():
            losses = self._runs.losses(self._undropped(), part)
            sent = partial(self._runs.sent_by, losses)
            left = {p: alone for p, alone in left.items() if farness(alone, losses, p - start, self._eps, sent)}
            self._surroundings.left_behind()
            start += len(losses)
        return not left

    def _agree(
        self, ours: TapedRun | None, theirs: TapedRun | None, i: int, mixtures: Sequence[Mapping[int, float]]
    ) -> list[Gradient] | None:
        """What our run credits to mixtures, row i alone among them, if that row, what is credited to it and the state
        are the same in both runs; and what parameters alone meet."""
        if ours is None or theirs is None or ours.astray or not same(ours.losses[i], theirs.losses[i]):
            return None
        alone: Mapping[int, float] = {i: 1.0}
        credit, (other,) = self._runs.credited(ours, *mixtures), self._runs.credited(theirs, alone)
        if apart(credit[mixtures.index(alone)], other, coarseness(ours)) is not None:
            return None
        if not _same_constants(ours.shared, theirs.shared):
            return None
        self._learned += ours.shared
        self._surroundings.compare(ours.left, theirs.left)
        return credit

    def _taped(
        self, sites: Sites, data: Any, *, dropped: bool = False, weighted: bool = False, like: TapedRun | None = None
    ) -> TapedRun | None:
        """A taped run; with dropout, at the random numbers of the step's own, which drops what another one did. None if
        gradients go past the tape."""
        again = partial(DroppingTape, masks=masks_of(None if like is None else like.tape))
        tape = again if dropped or not self._drops else UndroppedTape
        start = None if self._own is None or not dropped else self._own.before
        run = self._runs.taped(tape, sites, data, start, weighted=weighted, shared=[])
        return run if run.grads else None


def _same_constants(ours: list[Shared], theirs: list[Shared]) -> bool:
    """Whether what parameters alone meet is the same in other company, to the bit: a table of positions cut to a new
    length, and not rows that were routed there."""
    return [op for op, _ in ours] == [op for op, _ in theirs] and all(
        len(a) == len(b) and all(map(same, a, b)) for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )
