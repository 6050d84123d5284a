"""A glance at a few rows and at the whole batch: whether there is anything that a look would have to judge.

A look finds out where the samples are, and judges what it sees. Once that is known of a model, other rows, lengths,
sizes and settings need less: losses in other company and alone, what is left behind, and what arrives in each row,
weighted and in other company. Whatever is not as expected, for a good reason or a bad one, is left to a look.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import Shared, Site, Sites, Tape, shapes_of
from dpscale.engine.verify.credit import arrived, insides, misplaced
from dpscale.engine.verify.look import Subject
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
    """

    def __init__(
        self, subject: Subject, batch: Any, kept: Sequence[int], *, sites: Sites | None, draws: bool, drops: bool,
        eps: float, seed: int,
    ) -> None:  # fmt: skip
        self._subject, self._batch, self._kept = subject, batch, list(kept)
        self._sites, self._draws, self._drops, self._eps, self._seed = sites, draws, drops, eps, seed
        self._learned: list[Shared] = []
        self._surroundings = Surroundings(subject.model, subject.loss_fn)

    def __call__(self, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        """Whether all is as expected.

        Args:
            singles: rows of the batch that were collated alone, by their place.
            rest: other parts of the batch that these were collated with.
        """
        try:
            with torch.autograd.set_detect_anomaly(False):
                few = self._few_apart()
                fine = (
                    few is not None
                    and (self._whole_apart(few) if self._sites is None else self._credited(few, self._sites))
                    and (not singles or self._draws or self._collated(singles, rest))
                )
            if fine and self._sites is not None:
                for op, constants in self._learned:
                    self._sites.add(op, Site("shared", constants=frozenset({shapes_of(constants)})))
            return fine
        except UnsupportedModel:
            raise
        except Exception:  # a model need not take every row that was put together
            return False
        finally:
            self._surroundings.require_parameters_kept(self._surroundings.restore(thorough=True))

    def _run(self, data: Any) -> tuple[Tensor, Any]:
        """Losses, and what is left behind."""
        with own_randomness(self._seed), torch.enable_grad(), Undropped():
            losses = self._subject.run(copied(data)).detach()
        return losses, self._surroundings.left_behind()

    def _stays(self, ours: tuple[Tensor, Any], data: Any, i: int) -> bool:
        """Whether row i and the state are, with these data, what they were."""
        losses, left = self._run(data)
        if not same(ours[0][i], losses[i]):
            return False
        self._surroundings.compare(ours[1], left)
        return True

    def _few_apart(self) -> Tensor | None:
        """The losses of a few rows, if each has the same among empty ones, and the one in the middle, the rarest, among
        copies of itself and alone."""
        rows, middle = take(self._batch, self._kept), ROWS // 2
        ours = self._run(rows)
        company = [(replaced(rows, neutral(rows), [i]), i) for i in range(ROWS)]
        if not all(self._stays(ours, data, i) for data, i in [(take(rows, [middle] * ROWS), middle), *company]):
            return None
        if not self._draws and not self._near(ours[0][middle], self._run(take(rows, [middle]))[0][0], ours[0]):
            return None
        return ours[0]

    def _whole_apart(self, few: Tensor) -> bool:
        """In the whole batch rows have the losses that they have among few, and one that is like most also among copies
        of itself."""
        last = self._kept[-1]
        ours = self._run(self._batch)
        return self._as_among(few, ours[0]) and self._stays(ours, self._copies(last), last)

    def _as_among(self, few: Tensor, whole: Tensor) -> bool:
        return self._draws or all(self._near(whole[i], one, few) for i, one in zip(self._kept, few, strict=True))

    def _copies(self, i: int) -> Any:
        return take(self._batch, [i] * count_of(self._batch))

    def _near(self, a: Tensor, b: Tensor, scale: Tensor) -> bool:
        return near(a, b, scale, self._eps)

    def _collated(self, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        losses = torch.cat([self._run(part)[0] for part in (self._batch, *rest)])
        own = [self._run(single)[0][0] for single in singles.values()]
        return all(any(close(loss, one, losses, self._eps) for loss in losses) for one in own)

    def _credited(self, few: Tensor, sites: Sites) -> bool:
        """The same with dropout; and what arrives in a row is of its own loss alone, weighted and in other company."""
        rows, middle, last = take(self._batch, self._kept), ROWS // 2, self._kept[-1]
        whole = self._taped(sites, self._batch, last, weighted=True)
        if whole is None:
            return False
        # One that is like most without the rarest; and the rarest among empty ones.
        for i, ours, data in (
            (last, whole, self._copies(last)),
            (middle, self._taped(sites, rows, middle), replaced(rows, neutral(rows), [middle])),
        ):
            theirs = self._taped(sites, data, i)
            if ours is None or theirs is None or not same(ours.losses[i], theirs.losses[i]):
                return False
            if len(ours.rows) != len(theirs.rows) or not all(map(_alike, ours.rows, theirs.rows)):
                return False
            if not _same_constants(ours.shared, theirs.shared):
                return False
            self._learned += ours.shared
            self._surroundings.compare(ours.left, theirs.left)
        return self._as_among(few, self._run(self._batch)[0] if self._drops else whole.losses)

    def _taped(self, sites: Sites, data: Any, i: int, weighted: bool = False) -> "_Taped | None":
        """What a taped run gives of row i; None if gradients go astray, or past the tape."""
        shared: list[Shared] = []
        with own_randomness(self._seed), torch.enable_grad():
            with Tape(self._subject.parameters, None, sites, count_of(data), lenient=True, shared=shared) as tape:
                losses = self._subject.run(copied(data))
            places = insides(tape) if not tape.lost and losses.requires_grad else []
            astray = not places or (weighted and misplaced(losses, places, self._seed) is not None)
            rows = [] if astray else arrived(losses, places, i)
        left = self._surroundings.left_behind()
        return None if astray else _Taped(losses.detach(), rows, left, shared)


@dataclass(frozen=True)
class _Taped:
    losses: Tensor
    rows: list[Tensor | None]
    left: Any
    shared: list[Shared]


def _same_constants(ours: list[Shared], theirs: list[Shared]) -> bool:
    """Whether what parameters alone meet is the same in other company, to the bit: a table of positions cut to a new
    length, and not rows that were routed there."""
    return [op for op, _ in ours] == [op for op, _ in theirs] and all(
        len(a) == len(b) and all(map(same, a, b)) for (_, a), (_, b) in zip(ours, theirs, strict=True)
    )


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether the same arrives, to rounding: in another place of a batch it may be added up in another order."""
    if a is None or b is None:
        return a is b
    if a.shape != b.shape:
        return False
    off, size = torch.linalg.vector_norm(a - b), torch.linalg.vector_norm(a)
    return not bool(torch.isfinite(size)) or bool(off <= torch.finfo(a.dtype).eps ** 0.5 * size)
