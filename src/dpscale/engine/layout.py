"""Which rows of a tensor belong to which sample.

A tensor that carries a batch does so along one dimension of size n = outer · B · inner, where the sample is the middle
index: (B, T, d) has outer = inner = 1; flattened to (B·T, d), inner = T; time first and flattened to (T·B, d),
outer = T. `Layout` names that dimension.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The dimension that holds the batch, and how many rows stand around each sample in it.

    ``outer`` and ``inner`` are those of the probe. At another size, the one that is 1 stays 1 and the other takes what
    is left (a longer sequence), so that a layout found on three samples serves every batch.
    """

    dim: int
    outer: int
    inner: int

    def split(self, rows: int, samples: int) -> tuple[int, int] | None:
        """(outer, inner) of a dimension of ``rows`` rows that holds ``samples`` samples; None if it cannot."""
        if samples == 0 or rows % samples:
            return None
        each = rows // samples
        if self.outer == self.inner == 1:  # one row per sample says nothing of where more of them would stand
            return (1, 1) if each == 1 else None
        if self.outer == 1:
            return 1, each
        if self.inner == 1:
            return each, 1
        return (self.outer, self.inner) if self.outer * self.inner == each else None

    def per_sample(self, t: Tensor, samples: int) -> Tensor:
        """View ``t`` as (B, *shape), where shape is ``t``'s with the batch dimension cut down to one sample's rows."""
        split = self.split(t.shape[self.dim], samples)
        if split is None:
            raise ValueError(f"a dimension of {t.shape[self.dim]} rows does not hold {samples} samples")
        outer, inner = split
        if outer == 1:
            t = t.unflatten(self.dim, (samples, inner))
            return t if self.dim == 0 else t.movedim(self.dim, 0)
        t = t.unflatten(self.dim, (outer, samples, inner)).movedim(self.dim + 1, 0)
        return t.flatten(self.dim + 1, self.dim + 2)

    def spread(self, values_B: Tensor, like: Tensor) -> Tensor:
        """Repeat one value per sample over that sample's rows, shaped to broadcast against ``like``."""
        split = self.split(like.shape[self.dim], len(values_B))
        assert split is not None
        outer, inner = split
        rows = values_B.view(1, -1, 1).expand(outer, -1, inner).reshape(-1)
        return rows.view([-1 if d == self.dim else 1 for d in range(like.ndim)])


def example_size(size: int) -> int:
    """A size, or the example of one that is a symbol: for choices that are right for every size."""
    return size.node.hint if isinstance(size, torch.SymInt) else size


def candidates(shape: Sequence[int], smaller: Sequence[int], samples: int, fewer: int) -> list[Layout]:
    """Every layout that a tensor could have, given its shapes on ``samples`` and on ``fewer`` samples."""
    if len(shape) != len(smaller):
        return []
    grows = [d for d in range(len(shape)) if shape[d] != smaller[d]]
    if len(grows) != 1 or shape[grows[0]] * fewer != smaller[grows[0]] * samples:
        return []
    each = shape[grows[0]] // samples
    # Batch first and batch last of the flattened dimension before the mixed ones: the usual, if evidence allows it.
    inners = sorted((i for i in range(1, each + 1) if each % i == 0), key=lambda i: (i != each, i != 1, i))
    return [Layout(grows[0], each // i, i) for i in inners]
