"""`embedding`: y_t = W[index_t].

Sample i's gradient of W adds g_t to row index_t for each position t: Σ_t e(index_t) g_tᵀ. Positions with the same index
share a row, so the squared norm is Σ_{t,t'} [index_t = index_t'] g_t·g_t'.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Form, side_by_side, slack, wide
from dpscale.engine.rules.linear import Outer


@dataclass(frozen=True)
class Rows(Form):
    """Gradients that add vectors to chosen rows of a (V, D) table."""

    index_BT: Tensor
    g_BTD: Tensor
    table: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], index_BT: Tensor, g_BTD: Tensor) -> Self:
        """Of a lookup, by its arguments: none for the padding index."""
        padding = arguments.get("padding_idx")
        if padding is not None and padding >= 0:
            g_BTD = g_BTD.masked_fill((index_BT == padding).unsqueeze(2), 0)
        return cls(index_BT, g_BTD, len(arguments["weight"]))

    def norm2(self) -> Tensor:
        """Sum the positions that share a row, then square."""
        g = wide(self.g_BTD)
        slot_BT = slots(self.index_BT)
        summed = torch.zeros_like(g).scatter_add_(1, slot_BT.unsqueeze(2).expand_as(g), g)
        return summed.square().sum((1, 2)) + slack(torch.linalg.vector_norm(g, dim=2))

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One scatter-add over samples and positions together."""
        g = wide(self.g_BTD) * weights_B.to(wide(self.g_BTD).dtype).view(-1, 1, 1)
        return g.new_zeros(self.table, g.shape[2]).index_add_(0, self.index_BT.flatten(), g.flatten(0, 1))

    def per_sample(self) -> Tensor:
        """(B, V, D)."""
        g = wide(self.g_BTD)
        out = g.new_zeros(len(g), self.table, g.shape[2])
        return out.scatter_add_(1, self.index_BT.unsqueeze(2).expand_as(g), g)

    def join(self, other: Form) -> "Rows | None":
        """Concatenate along the positions."""
        if not isinstance(other, Rows):
            return None
        index = torch.cat([self.index_BT, other.index_BT], 1)
        return Rows(index, side_by_side(self.g_BTD, other.g_BTD), self.table)

    def crosses(self, other: Form) -> bool:
        """With the outer products of a head that is tied to the table."""
        return isinstance(other, Outer)

    def cross(self, other: Form) -> Tensor:
        """2⟨Σ_t e(index_t) g_tᵀ, Σ_s h_s a_sᵀ⟩ = 2 Σ_{t,s} h_s[index_t] · (g_t·a_s): T·S numbers, not V·D."""
        assert isinstance(other, Outer)
        g_BTD, a_BSD, h_BSV = wide(self.g_BTD), wide(other.a_BTI), wide(other.g_BTO)
        index = self.index_BT.unsqueeze(1).expand(-1, a_BSD.shape[1], -1)
        product = (torch.bmm(a_BSD, g_BTD.mT) * h_BSV.gather(2, index)).sum((1, 2))
        # The two may cancel each other: the rounding of the larger terms is then as large as what is left.
        table = torch.linalg.vector_norm(g_BTD, dim=2).sum(1)
        return 2 * product + slack(torch.stack([table, other.terms().sum(1)], 1))


class Embedding(Rule):
    """The rule of `torch.embedding`, which `torch.nn.functional.embedding` and `torch.nn.Embedding` call."""

    functions = (torch.embedding,)
    names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
    trainable = ("weight",)

    def accepts(self, call: Call) -> bool:
        """The batch must be in the indices' own dimensions. Scaling by frequency counts over the batch: refused."""
        if call.get("scale_grad_by_freq", False):
            refuse_scaling_by_frequency("embedding", "Embedding")
        return bool(call.layout.dim < call.arguments["input"].ndim)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Rows of the table, none for the padding index."""
        index_BT = call.rows(call.arguments["input"]).flatten(1)
        yield "weight", Rows.of(call.arguments, index_BT, call.rows(g).flatten(1, -2))


def slots(index_BT: Tensor) -> Tensor:
    """(B, T): positions of a row get the same number below T exactly if they have the same index.

    The number is the rank of the index among the row's: no buffer of the table's size, and no T² comparisons.
    """
    ordered, position = index_BT.sort(1)
    rank = ordered.diff(dim=1, prepend=ordered[:, :1]).ne(0).cumsum(1)
    return torch.empty_like(position).scatter_(1, position, rank)


def refuse_scaling_by_frequency(function: str, module: str) -> NoReturn:
    """Counting over the batch couples the samples."""
    raise UnsupportedModel(
        f"{function} with scale_grad_by_freq=True divides one sample's gradient by how often its tokens occur in the "
        f"whole batch, so samples are coupled. Build the {module} without scale_grad_by_freq."
    )
