"""Batches with packed sequences. Rows of a `PackedSequence` are time steps, by the length of their samples: none of
them is a sample. So a batch holds padded rows and their lengths, which are packed again for the model.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from dpscale.engine import LossFn
from dpscale.engine.arguments import over_rows


class Padded(NamedTuple):
    """What a batch holds of a `PackedSequence`: a row for each sample, in the order in which samples were packed.

    Attributes:
        rows: (B, T, …), zeros after each sample's end.
        lengths: (B,).
    """

    rows: Tensor
    lengths: Tensor

    def packed(self) -> PackedSequence:
        """As the model takes it."""
        lengths = self.lengths.to("cpu", torch.int64)
        return pack_padded_sequence(self.rows, lengths, batch_first=True, enforce_sorted=False)


def holds(data: Any, kind: type) -> bool:
    """Whether there is one of that type in a batch."""
    if isinstance(data, kind):
        return True
    inside = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return any(holds(value, kind) for value in inside if not isinstance(value, (Tensor, str, int, float)))


def unpacked(data: Any) -> Any:
    """A batch with padded rows in place of packed sequences."""
    if not holds(data, PackedSequence):
        return data
    return over_rows(data, lambda t: Padded(*pad_packed_sequence(t, batch_first=True)), leaf=PackedSequence)


def packed(data: Any) -> Any:
    """A batch with packed sequences as its ``collate_fn`` made them."""
    return over_rows(data, Padded.packed, leaf=Padded) if holds(data, Padded) else data


def over_packed(loss_fn: Callable[[Any, Any], Tensor]) -> LossFn:
    """A loss of packed sequences as one of padded rows."""

    @functools.wraps(loss_fn, assigned=(), updated=())
    def losses(model: Any, batch: Any) -> Tensor:
        return loss_fn(model, packed(batch))

    return losses
