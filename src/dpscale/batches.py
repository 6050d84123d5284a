"""From the samples of a draw to a batch of fixed shape, whose padding comes last."""

import copy
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from dpscale.engine.functions import PLAIN


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
    if isinstance(batch, Tensor):
        has_rows = batch.ndim > 0 and len(batch) == count
        if more and batch.ndim > 0 and len(batch) == count + more:
            raise ValueError(
                f"collate_fn has made {len(batch)} rows of {count} samples. Each row counts as a sample, so there must "
                "be one for each. Put views of a sample into a dimension of their own."
            )
        return torch.cat([batch, batch[:1].expand(more, *batch.shape[1:])]) if has_rows and more else batch
    if isinstance(batch, MutableMapping):
        longer = copy.copy(batch)
        for name, value in batch.items():
            longer[name] = _longer(value, count, more)
        return longer
    if isinstance(batch, (list, tuple)):
        if _plain_rows(batch, count):
            return type(batch)([*batch, *batch[:1] * more])
        return _like(batch, [_longer(value, count, more) for value in batch])
    if isinstance(batch, PLAIN):
        return batch
    raise ValueError(
        "collate_fn must return tensors, or tuples, lists and dictionaries of them: only these can be padded. Got "
        f"{type(batch).__name__} instead. Make that of the batch in the loop."
    )


def part_of(batch: Any, part: slice, count: int) -> Any:
    """The rows ``part`` of whatever in a batch has ``count`` of them, lists of plain values included."""
    if isinstance(batch, Tensor):
        return batch[part]
    if isinstance(batch, MutableMapping):
        fewer = copy.copy(batch)
        for name, value in batch.items():
            fewer[name] = part_of(value, part, count)
        return fewer
    if _plain_rows(batch, count):
        return batch[part]
    if isinstance(batch, (list, tuple)):
        return _like(batch, [part_of(value, part, count) for value in batch])
    return batch


def _plain_rows(batch: Any, count: int) -> bool:
    """Whether it is a list of a plain value for each sample: names, say."""
    listed = isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields")
    return listed and len(batch) == count and all(isinstance(value, PLAIN) for value in batch)


def _like(batch: list[Any] | tuple[Any, ...], values: list[Any]) -> Any:
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


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
