"""Which rows of a batch to look at, and what to put in the place of the others.

Rows are chosen to differ: a mixing of rows shows only where they do. What tells rows apart at little cost are counts
and extremes of each tensor: how many entries are zero (lengths, masks), negative (ignored labels), the smallest and the
largest integer, whether all numbers are finite.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpscale.engine import native
from dpscale.engine.arguments import has_rows, over_rows, plain_tensors, tensors_in
from dpscale.engine.compat import version

Features = NDArray[np.float64]
"""(B, F): numbers that tell the rows of a batch apart. A column lies in one stretch: columns are what is searched."""


def features(batch: Any, *, wait: bool = False) -> Features | None:
    """Of each row; None where the data are on another device, unless it is ``wait``ed for."""
    tensors = tensors_in(batch)
    if any(t.device.type != "cpu" for t in tensors) and not wait:
        return None
    columns = [each for t in tensors for each in _told(t.detach().reshape(len(t), -1))]
    return np.concatenate(columns).T if columns and columns[0].size else None


def _told(t_BN: Tensor) -> Iterator[NDArray[np.float64]]:
    """Columns of one tensor, some together: those of `_columns`, in one pass where that can be done."""
    if (found := native.rows(t_BN)) is None:
        yield from (column[None].cpu().numpy() for column in _columns(t_BN))
        return
    if t_BN.is_floating_point():
        yield np.ones((1, len(t_BN)))
    yield found


class FeatureTable:
    """Features of the rows of tensors that batches are chosen from, all worked out at once: on an accelerator, where a
    step would have to wait for them. Anew when somebody has written into the tensors, as far as torch knows of it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors
        self._versions: list[int] = []
        self._table: Features | None = None

    def __getitem__(self, indices: NDArray[np.int64]) -> Features | None:
        if (now := [version(t) for t in self._tensors]) != self._versions:
            self._versions, self._table = now, features(self._tensors, wait=True)
        return None if self._table is None else self._table.T.take(indices, 1).T


def _columns(t_BN: Tensor) -> Iterator[Tensor]:
    """How many entries are not zero; whether all are finite; how many are negative; the least and the greatest."""
    if t_BN.shape[1] == 0:
        return
    if t_BN.dtype == torch.bool:
        yield t_BN.sum(1).double()
        return
    t_BN = t_BN.abs() if t_BN.is_complex() else t_BN
    least, greatest = t_BN.amin(1), t_BN.amax(1)
    if t_BN.is_floating_point():
        finite = torch.isfinite(least) & torch.isfinite(greatest)  # NaN is the least and the greatest of its row
        yield finite.double()
        if not finite.all():
            t_BN = torch.nan_to_num(t_BN, 0.0)
            least, greatest = t_BN.amin(1), t_BN.amax(1)
    # Sums of signs, whose whole numbers float32 holds, are ten times as fast as counts of what is true.
    exact = torch.float32 if t_BN.shape[1] < 1 << 24 else torch.float64
    signs = torch.sign(t_BN)
    balance, nonzero = signs.sum(1, dtype=exact), signs.abs_().sum(1, dtype=exact)
    yield nonzero.double()
    yield (nonzero - balance).double() / 2
    yield least.double()
    yield greatest.double()


def choose(
    rows: Features | None, available: NDArray[np.int64], first: Sequence[int], count: int, rng: np.random.Generator
) -> list[int]:
    """Rows to keep, as different as they are: ``first``, the rarest, extremes, any; and last one that is like most.

    Repeated where there are few. The one that comes first stands in the middle: whatever is sorted by what sets it
    apart, up or down, moves it.
    """
    chosen = [int(i) for i in first][: max(1, count - 1)]
    candidates: list[int] = []
    common = rng.permutation(available).tolist()
    if rows is not None and rows.shape[1] and len(available):
        own = rows[available]
        alike = _shared(own)
        rarest = rng.permutation(np.flatnonzero(alike < max(1, len(available) // 4) + 1))
        rarest = rarest[np.argsort(alike[rarest], kind="stable")][:2]
        one = int(rarest[0]) if len(rarest) else int(rng.integers(len(own)))
        candidates += available[[one, _unlike(own, one, rng), *rarest]].tolist()
        for column in rng.permutation(np.flatnonzero(np.ptp(own, axis=0) > 0)):
            candidates += [int(available[own[:, column].argmin()]), int(available[own[:, column].argmax()])]
        common = available[rng.permutation(np.flatnonzero(alike >= alike.max() - 0.5))].tolist() + common
    candidates += rng.permutation(available).tolist()
    for most, some in ((count - 1, candidates), (count, common)):
        for i in some:
            if i not in chosen and len(chosen) < most:
                chosen.append(i)
    chosen = [chosen[k % len(chosen)] for k in range(count)]
    middle = count // 2
    chosen[0], chosen[middle] = chosen[middle], chosen[0]
    return chosen


def _unlike(rows: Features, one: int, rng: np.random.Generator) -> int:
    """A row that differs from that one in as many as it can of the features that many rows share: what is finite, the
    label; in those of two values first."""
    kinds = np.array([len(np.unique(column)) for column in rows.T])
    shared = (kinds > 1) & (kinds <= max(2, len(rows) // 2))
    apart = (rows[:, shared] != rows[one, shared]) @ (1 / kinds[shared])
    order = rng.permutation(len(rows))
    return int(order[apart[order].argmax()])


def _shared(rows: Features) -> NDArray[np.float64]:
    """By how many rows, at least, each shares one of its features; those that tell all rows apart do not count."""
    least = np.full(len(rows), len(rows), dtype=np.float64)
    for column in rows.T:
        _, inverse, counts = np.unique(column, return_inverse=True, return_counts=True)
        if len(counts) <= max(2, len(rows) // 2):  # of two values before others
            least = np.minimum(least, counts[inverse] + len(counts) / 1000)
    return least


def odd_among(losses: Tensor) -> set[int]:
    """The rows whose loss is not finite."""
    return set(torch.isfinite(losses).logical_not().nonzero().flatten().tolist())


def count_of(batch: Any) -> int:
    """Rows of a batch."""
    return len(tensors_in(batch)[0])


def take(batch: Any, rows: Sequence[int]) -> Any:
    """These rows of a batch, copied."""
    count = count_of(batch)

    def some(values: Any) -> Any:
        if not has_rows(values, count):
            return values
        if isinstance(values, Tensor):
            return values[torch.as_tensor(rows, device=values.device)]
        return type(values)([values[i] for i in rows])

    return over_rows(batch, some, count)


def copied(batch: Any) -> Any:
    """The batch in memory of its own: a forward may write into what it is given."""
    return over_rows(batch, lambda rows: rows.clone() if isinstance(rows, Tensor) else rows)


def anew(batch: Any) -> Any:
    """The batch in containers of its own: a forward may put something else in its place."""
    return batch if type(batch) is tuple and plain_tensors(batch) is not None else over_rows(batch, lambda rows: rows)


def neutral(batch: Any) -> Any:
    """The batch with zeros, False and empty strings in place of its values."""

    def blank(rows: Any) -> Any:
        return torch.zeros_like(rows) if isinstance(rows, Tensor) else type(rows)([blank_of(rows)] * len(rows))

    return over_rows(batch, blank, count_of(batch))


def blank_of(values: Sequence[Any]) -> Any:
    """Of the type of these: 0, False, an empty string."""
    return None if not values or values[0] is None else type(values[0])()


def replaced(batch: Any, others: Any, keep: Sequence[int]) -> Any:
    """``others``, with the kept rows of ``batch`` in their places."""
    theirs: list[Any] = []
    over_rows(others, theirs.append, count_of(others))
    each = iter(theirs)

    def put(rows: Any) -> Any:
        mixed = next(each)
        if isinstance(rows, Tensor):
            mixed = mixed.clone()
            mixed[list(keep)] = rows[list(keep)]
            return mixed
        return type(rows)([rows[i] if i in keep else other for i, other in enumerate(mixed)])

    return over_rows(batch, put, count_of(batch))


def extreme_rows(samples: int, rows: Features | None, rng: np.random.Generator) -> list[int]:
    """Two rows of a batch that are unlike the others, if any are."""
    return choose(rows, np.arange(samples if rows is None else min(samples, len(rows))), (), 2, rng)
