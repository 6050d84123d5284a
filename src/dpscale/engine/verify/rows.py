"""Which rows of a batch to look at, and what to put in the place of the others.

Rows are chosen to differ: a mixing of rows shows only where they do. What tells rows apart at little cost are counts
and extremes of each tensor: how many entries are zero (lengths, masks), negative (ignored labels), the smallest and the
largest integer, whether all numbers are finite.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpscale.engine.compat import tree_leaves, tree_map

Features = NDArray[np.float64]
"""(B, F): numbers that tell the rows of a batch apart."""

FEW = 16
"""Values of a feature that are each remembered; beyond, only the smallest and the largest."""


def features(batch: Any) -> Features | None:
    """Of each row; None where the data are on another device, which would have to be waited for."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    if any(t.device.type != "cpu" for t in tensors):
        return None
    columns = [column for t in tensors for column in _columns(t.detach().reshape(len(t), -1))]
    return torch.stack(columns, 1).numpy() if columns and len(columns[0]) else None


def _columns(t_BN: Tensor) -> Iterator[Tensor]:
    if t_BN.shape[1] == 0:
        return
    yield (t_BN != 0).sum(1).double()
    if t_BN.is_floating_point() or t_BN.is_complex():
        yield torch.isfinite(t_BN).all(1).double()
    elif t_BN.dtype != torch.bool:
        yield (t_BN < 0).sum(1).double()
        yield t_BN.amin(1).double()
        yield t_BN.amax(1).double()


class Novelty:
    """What rows have been like so far, and which are like none of them."""

    def __init__(self) -> None:
        self._values: list[set[float]] = []
        self._range: Features | None = None

    def new(self, rows: Features) -> NDArray[np.int64]:
        """Numbers of the rows that are like none before; from now on they are known."""
        if self._range is None or self._range.shape[1] != rows.shape[1]:
            self._values = [set(np.unique(column)[: FEW + 1].tolist()) for column in rows.T]
            self._range = np.stack([rows.min(0), rows.max(0)])
            return np.zeros(0, dtype=np.int64)
        low, high = self._range
        strange = ((rows < low) | (rows > high)).any(1)
        for k, values in enumerate(self._values):
            if len(values) <= FEW and not values.issuperset(now := set(np.unique(rows[:, k]).tolist())):
                strange |= ~np.isin(rows[:, k], list(values))
                values |= now
        self._range = np.stack([np.minimum(low, rows.min(0)), np.maximum(high, rows.max(0))])
        return np.flatnonzero(strange)


def choose(
    rows: Features | None, available: NDArray[np.int64], first: Sequence[int], count: int, rng: np.random.Generator
) -> list[int]:
    """Rows to keep, as different as they are: ``first`` before any other, then extremes, then any; repeated if few."""
    chosen = [int(i) for i in rng.permutation(np.asarray(first, dtype=np.int64))][:count]
    if rows is not None and rows.shape[1] and len(available):
        varied = np.flatnonzero(np.ptp(rows[available], axis=0) > 0)
        for column in rng.permutation(varied):
            values = rows[available, column]
            for i in (available[values.argmin()], available[values.argmax()]):
                if i not in chosen and len(chosen) < count:
                    chosen.append(int(i))
    for i in rng.permutation(available):
        if i not in chosen and len(chosen) < count:
            chosen.append(int(i))
    return [chosen[k % len(chosen)] for k in range(count)]


def take(batch: Any, rows: Sequence[int]) -> Any:
    """These rows of a batch, copied."""

    def some(t: Any) -> Any:
        return t[torch.as_tensor(rows, device=t.device)] if isinstance(t, Tensor) else t

    return tree_map(some, batch)


def neutral(batch: Any) -> Any:
    """A batch of the same shape with nothing in it."""
    return tree_map(lambda t: torch.zeros_like(t) if isinstance(t, Tensor) else t, batch)


def replaced(batch: Any, others: Any, keep: Sequence[int]) -> Any:
    """``others``, with the kept rows of ``batch`` in their places."""

    def put(t: Any, other: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        mixed = other.clone()
        mixed[list(keep)] = t[list(keep)]
        return mixed

    return tree_map(put, batch, others)


def companies(batch: Any, rows: Features | None, rng: np.random.Generator) -> Iterator[Callable[[], Any]]:
    """What may stand in the place of all rows: shuffled ones, copies of one that is extreme, nothing at all."""
    samples = len(next(t for t in tree_leaves(batch) if isinstance(t, Tensor)))
    everyone = np.arange(samples)
    extremes = choose(rows, everyone, (), 2, rng) if samples else []

    def shuffled() -> Any:
        return take(batch, rng.permutation(samples).tolist())

    yield shuffled
    for i in extremes:
        yield partial(take, batch, [i] * samples)
    yield lambda: neutral(batch)
