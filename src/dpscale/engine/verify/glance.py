"""A glance at a few rows and at the whole batch: whether there is anything that a look would have to judge.

A look finds out where the samples are, and judges what it sees. Once that is known of a model, other rows, lengths,
sizes and settings need less: losses in other company and alone, what is left behind, and what is credited to each
row, weighted and in other company. Whatever is not as expected, for a good reason or a bad one, is left to a look.
"""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import Shared, Site, Sites, Tape, shapes_of, unrecorded
from dpscale.engine.verify.credit import TapedRun, arrived, credited_alike, insides, misplaced
from dpscale.engine.verify.look import Subject
from dpscale.engine.verify.own import OwnRun
from dpscale.engine.verify.places import ROWS
from dpscale.engine.verify.probe import Undropped
from dpscale.engine.verify.randomness import own_randomness
from dpscale.engine.verify.rows import copied, count_of, neutral, replaced, take
from dpscale.engine.verify.state import Surroundings
from dpscale.engine.verify.values import close, near, same


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
    """

    def __init__(
        self, subject: Subject, batch: Any, kept: Sequence[int], *, sites: Sites | None, draws: bool, drops: bool,
        eps: float, seed: int, own: OwnRun | None = None,
    ) -> None:  # fmt: skip
        self._subject, self._batch, self._kept = subject, batch, list(kept)
        self._sites, self._draws, self._drops, self._eps, self._seed = sites, draws, drops, eps, seed
        self._own = own
        self._learned: list[Shared] = []
        self._surroundings = Surroundings(subject.model, subject.loss_fn)

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
        few = self._few_apart(self._sites)
        whole = None if few is None else self._whole_apart() if self._sites is None else self._credited(self._sites)
        if few is None or whole is None:
            return False
        if not self._draws and not all(self._near(whole[i], one, few) for i, one in zip(self._kept, few, strict=True)):
            return False  # rows have other losses than they have among few
        return not singles or self._collated(whole, singles, rest)

    def _run(self, data: Any) -> tuple[Tensor, Any]:
        """Losses without dropout, and what is left behind."""
        with own_randomness(self._seed), torch.enable_grad(), self._undropped():
            losses = self._subject.run(copied(data)).detach()
        return losses, self._surroundings.left_behind()

    def _undropped(self) -> AbstractContextManager[Any]:
        return Undropped() if self._drops else unrecorded()

    def _stays(self, ours: tuple[Tensor, Any], data: Any, i: int) -> bool:
        """Whether row i and the state are, with these data, what they were."""
        losses, left = self._run(data)
        if not same(ours[0][i], losses[i]):
            return False
        self._surroundings.compare(ours[1], left)
        return True

    def _few_apart(self, sites: Sites | None) -> Tensor | None:
        """The losses of a few rows, if each has the same among empty ones, and the one in the middle, the rarest, among
        copies of itself and alone; what is credited to that one is the same, too."""
        rows, middle = take(self._batch, self._kept), ROWS // 2
        company = [(replaced(rows, neutral(rows), [i]), i) for i in range(ROWS)]
        ours = self._run(rows)
        if sites is not None:  # taped runs are compared with taped ones: operations may round in another way there
            data, i = company.pop(middle)
            if not self._agree(self._taped(sites, rows), self._taped(sites, data), i):
                return None
        if not all(self._stays(ours, data, i) for data, i in [(take(rows, [middle] * ROWS), middle), *company]):
            return None
        if not self._draws and not self._near(ours[0][middle], self._run(take(rows, [middle]))[0][0], ours[0]):
            return None
        return ours[0]

    def _whole_apart(self) -> Tensor | None:
        """The losses of the whole batch, if one that is like most has the same among copies of itself."""
        last = self._kept[-1]
        ours = self._run(self._batch)
        return ours[0] if self._stays(ours, self._copies(last), last) else None

    def _copies(self, i: int) -> Any:
        return take(self._batch, [i] * count_of(self._batch))

    def _near(self, a: Tensor, b: Tensor, scale: Tensor) -> bool:
        return near(a, b, scale, self._eps)

    def _collated(self, whole: Tensor, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        losses = torch.cat([whole, *(self._run(part)[0] for part in rest)])
        own = [self._run(single)[0][0] for single in singles.values()]
        return all(any(close(loss, one, losses, self._eps) for loss in losses) for one in own)

    def _credited(self, sites: Sites) -> Tensor | None:
        """The losses of the whole batch without dropout, if with it one row that is like most has the same among copies
        of itself, and what arrives in a row is of its own loss alone: weighted, and in other company."""
        last = self._kept[-1]
        if self._own is None:
            ours = self._taped(sites, self._batch, weighted=True)
        else:
            ours = self._own(sites, self._surroundings, self._seed, [])
        if ours is None:
            return None
        if not self._agree(ours, self._taped(sites, self._copies(last), self._own), last):
            return None
        return self._run(self._batch)[0] if self._drops else ours.losses

    def _agree(self, ours: TapedRun | None, theirs: TapedRun | None, i: int) -> bool:
        """Whether row i, what is credited to it and the state are the same in both runs; and what parameters alone
        meet."""
        if ours is None or theirs is None or ours.astray or not same(ours.losses[i], theirs.losses[i]):
            return False
        if not credited_alike(ours, theirs, [i]) or not _same_constants(ours.shared, theirs.shared):
            return False
        self._learned += ours.shared
        self._surroundings.compare(ours.left, theirs.left)
        return True

    def _taped(
        self, sites: Sites, data: Any, beside: OwnRun | None = None, *, weighted: bool = False
    ) -> TapedRun | None:
        """A taped run, with the random numbers of that beside it; None if gradients go past the tape."""
        shared: list[Shared] = []
        with own_randomness(self._seed if beside is None else beside.before), torch.enable_grad():
            with Tape(self._subject.parameters, None, sites, count_of(data), lenient=True, shared=shared) as tape:
                losses = self._subject.run(copied(data))
            places = insides(tape) if not tape.lost and losses.requires_grad else []
            grads = arrived(losses, places)
            astray = weighted and misplaced(losses, places, self._seed, grads, keep=False) is not None
        left = self._surroundings.left_behind()
        return TapedRun(tape, losses.detach(), grads, astray, left, shared) if places else None


def _same_constants(ours: list[Shared], theirs: list[Shared]) -> bool:
    """Whether what parameters alone meet is the same in other company, to the bit: a table of positions cut to a new
    length, and not rows that were routed there."""
    return [op for op, _ in ours] == [op for op, _ in theirs] and all(
        len(a) == len(b) and all(map(same, a, b)) for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )
