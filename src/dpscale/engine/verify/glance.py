"""A glance at a few rows, by a handful of forwards: whether there is anything that a look would have to judge.

A look finds out where the samples are, and judges what it sees. Once that is known of a model, other rows, lengths and
sizes need less: losses in other company and alone, what is left behind, and where gradients arrive in the whole batch.
Whatever is not as expected, for a good reason or a bad one, is left to a look.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.phases import still_at
from dpscale.engine.tape.tape import Sites, Tape
from dpscale.engine.verify.credit import insides, misplaced
from dpscale.engine.verify.look import Subject
from dpscale.engine.verify.places import ROWS
from dpscale.engine.verify.probe import Undropped
from dpscale.engine.verify.randomness import own_randomness
from dpscale.engine.verify.rows import count_of, neutral, replaced, take
from dpscale.engine.verify.state import Surroundings
from dpscale.engine.verify.values import near, same


class Glance:
    """One glance at a subject.

    Args:
        subject: the model and its losses.
        batch: any batch of it.
        kept: the rows to look at.
        sites: where the samples are in its operations; None if that is not known.
        draws: whether it draws random numbers, so that a row alone has others than in company.
        seed: for the runs.
    """

    def __init__(
        self, subject: Subject, batch: Any, kept: Sequence[int], *, sites: Sites | None, draws: bool, seed: int
    ) -> None:  # fmt: skip
        self._subject, self._batch, self._kept = subject, batch, list(kept)
        self._sites, self._draws, self._seed = sites, draws, seed
        self._surroundings = Surroundings(subject.model, subject.loss_fn, copy_large=False)

    def __call__(self, *, whole: bool, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        """Whether all is as expected.

        Args:
            whole: put the whole batch into other company, too: a forward may do otherwise with more rows.
            singles: rows of the batch that were collated alone, by their place.
            rest: other parts of the batch that these were collated with.
        """
        try:
            with torch.autograd.set_detect_anomaly(False):
                return (
                    self._rows_apart(whole)
                    and (not singles or self._collated(singles, rest))
                    and (self._sites is None or self._credited(self._sites))
                )
        except UnsupportedModel:
            raise
        except Exception:  # a model need not take every row that was put together
            return False
        finally:
            self._surroundings.require_parameters_kept(self._surroundings.restore(thorough=True))

    def _run(self, data: Any) -> tuple[Tensor, Any]:
        """Losses, and what is left behind."""
        still_at("checking that samples are kept apart")
        with own_randomness(self._seed), torch.enable_grad(), Undropped():
            losses = self._subject.run(data).detach()
        return losses, self._surroundings.left_behind()

    def _stays(self, ours: tuple[Tensor, Any], data: Any, keep: Sequence[int]) -> bool:
        """Whether the kept rows and the state are, with these data, what they were."""
        losses, left = self._run(data)
        self._surroundings.compare(ours[1], left)
        return all(same(ours[0][i], losses[i]) for i in keep)

    def _rows_apart(self, whole: bool) -> bool:
        """Each row among empty ones; the one in the middle, the rarest, also among copies of itself and alone."""
        rows, middle = take(self._batch, self._kept), ROWS // 2
        ours = self._run(rows)
        company = [(replaced(rows, neutral(rows), [i]), i) for i in range(ROWS)]
        if not all(self._stays(ours, data, [i]) for data, i in [(take(rows, [middle] * ROWS), middle), *company]):
            return False
        alone = self._draws or self._near(ours[0][middle], self._run(take(rows, [middle]))[0][0], ours[0])
        return alone and (not whole or self._whole_apart(ours[0]))

    def _whole_apart(self, few: Tensor) -> bool:
        """Rows of the whole batch among copies of one, and as they are among few."""
        samples = count_of(self._batch)
        keep = sorted(set(self._kept[: max(1, samples // 2)]))
        data = replaced(self._batch, take(self._batch, [self._kept[0]] * samples), keep)
        ours = self._run(self._batch)
        near = self._draws or all(self._near(ours[0][i], one, few) for i, one in zip(self._kept, few, strict=True))
        return near and self._stays(ours, data, keep)

    @staticmethod
    def _near(a: Tensor, b: Tensor, scale: Tensor) -> bool:
        return near(a, b, scale, torch.finfo(scale.dtype).eps)

    def _collated(self, singles: Mapping[int, Any], rest: Sequence[Any]) -> bool:
        if self._draws:
            return True
        losses = torch.cat([self._run(part)[0] for part in (self._batch, *rest)])
        own = [self._run(single)[0][0] for single in singles.values()]
        return all(any(self._near(loss, one, losses) for loss in losses) for one in own)

    def _credited(self, sites: Sites) -> bool:
        """Whether gradients arrive in the rows that they are of."""
        samples = count_of(self._batch)
        with own_randomness(self._seed), torch.enable_grad():
            with Tape(self._subject.parameters, None, sites, samples, lenient=True) as tape:
                losses = self._subject.run(self._batch)
            wrong = not tape.lost and losses.requires_grad and misplaced(losses, insides(tape), self._seed) is not None
        self._surroundings.left_behind()
        return not tape.lost and not wrong
