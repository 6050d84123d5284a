"""From the samples of a draw to a batch of fixed shape, whose padding comes last."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpscale.engine.modules import PLAIN


class Batches(Iterator[Any]):
    """The batches of a loop; ``len`` is how many are left."""

    def __init__(self, batches: Iterator[Any], left: int) -> None:
        self._batches, self._left = batches, left

    def __len__(self) -> int:
        return self._left

    def __next__(self) -> Any:
        batch = next(self._batches)
        self._left -= 1
        return batch


@dataclass(frozen=True)
class Padded:
    """Collates the samples drawn and only then pads, with copies of the first row, to a multiple of ``rows``.

    A ``collate_fn`` may put its samples into another order. Were the padding among them, it could take the place of
    samples, which are counted by their place, and be counted itself, many times over.
    """

    collate: Callable[[list[Any]], Any]
    rows: int

    def __call__(self, samples: list[Any]) -> tuple[int, Any]:
        """(How many samples came, a batch of a whole number of micro-batches.)"""
        count = len(samples)  # before `collate`, which may change the list
        return count, _longer(self.collate(samples), count, -count % self.rows)


def _longer(batch: Any, count: int, more: int) -> Any:
    """Whatever in a batch has ``count`` rows, with ``more`` copies of the first."""

    def longer(rows: Any) -> Any:
        if not isinstance(rows, Tensor):
            return type(rows)([*rows, *rows[:1] * more])
        if more and rows.ndim > 0 and len(rows) == count + more:
            raise ValueError(
                f"collate_fn has made {len(rows)} rows of {count} samples. Each row counts as a sample, so there must "
                "be one for each. Put views of a sample into a dimension of their own."
            )
        has_rows = rows.ndim > 0 and len(rows) == count
        return torch.cat([rows, rows[:1].expand(more, *rows.shape[1:])]) if has_rows and more else rows

    def other(value: Any) -> Any:
        if isinstance(value, PLAIN):
            return value
        raise ValueError(
            "collate_fn must return tensors, or tuples, lists and dictionaries of them: only these can be padded. Got "
            f"{type(value).__name__} instead. Make that of the batch in the loop."
        )

    return _over(batch, count, longer, other)


def part_of(batch: Any, part: slice, count: int) -> Any:
    """The rows ``part`` of whatever in a batch has ``count`` of them, lists of plain values included."""
    return _over(batch, count, lambda rows: rows[part], lambda value: value)


def _over(batch: Any, count: int, change: Callable[[Any], Any], other: Callable[[Any], Any]) -> Any:
    """A batch with a change of its tensors and of its lists of ``count`` plain values, and another of what is neither
    that nor a container."""
    if isinstance(batch, Tensor) or _plain_rows(batch, count):
        return change(batch)
    if isinstance(batch, MutableMapping):
        changed = copy.copy(batch)
        for name, value in batch.items():
            changed[name] = _over(value, count, change, other)
        return changed
    if isinstance(batch, (list, tuple)):
        values = [_over(value, count, change, other) for value in batch]
        return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)
    return other(batch)


def _plain_rows(batch: Any, count: int) -> bool:
    """Whether it is a list of a plain value for each sample: names, say."""
    listed = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    return listed and len(batch) == count and all(isinstance(value, PLAIN) for value in batch)


class Given:
    """Knows the tensors of batches that were handed out, as long as somebody has them, by the number of their draw."""

    def __init__(self) -> None:
        self._draws: MutableMapping[Any, int] = WeakIdKeyDictionary()

    def add(self, batch: Any, draw: int) -> None:
        """They are of this draw."""
        for tensor in _tensors(batch):
            self._draws[tensor] = draw

    def draws(self, batch: Any) -> set[int]:
        """Those that tensors of this batch are known to be of."""
        return {self._draws[tensor] for tensor in _tensors(batch) if tensor in self._draws}


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (Mapping, list, tuple)):
        for value in batch.values() if isinstance(batch, Mapping) else batch:
            yield from _tensors(value)


def chosen_rows(tensors: Sequence[Tensor], draws: Iterator[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """The chosen rows of each tensor, on the device where it is."""
    for chosen in draws:
        there = {device: chosen.to(device, non_blocking=True) for device in {t.device for t in tensors}}
        yield tuple(t[there[t.device]] for t in tensors)
