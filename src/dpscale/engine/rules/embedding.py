"""`embedding`: y_t = W[index_t].

Sample i's gradient of W adds g_t to row index_t for each position t: Σ_t e(index_t) g_tᵀ. Positions with the same index
share a row, so the squared norm is Σ_{t,t'} [index_t = index_t'] g_t·g_t'.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Change, Form, slack, wide


@dataclass(frozen=True)
class Rows(Form):
    """Gradients that add vectors to chosen rows of a (V, D) table."""

    index_BT: Tensor
    g_BTD: Tensor
    table: int

    def norm2(self) -> Tensor:
        """Sum the positions that share a row, then square."""
        g = wide(self.g_BTD)
        # Slot of position t: the first position of the same sample with the same index. No table-sized buffer.
        same = self.index_BT.unsqueeze(2) == self.index_BT.unsqueeze(1)
        first = same.to(torch.uint8).argmax(2)
        summed = torch.zeros_like(g).scatter_add_(1, first.unsqueeze(2).expand_as(g), g)
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

    def map(self, change: Change) -> "Rows":
        """Change the vectors; the indices stay."""
        return Rows(self.index_BT, change(self.g_BTD), self.table)

    def join(self, other: Form) -> "Rows | None":
        """Concatenate along the positions."""
        if not isinstance(other, Rows):
            return None
        index = torch.cat([self.index_BT, other.index_BT], 1)
        return Rows(index, torch.cat([wide(self.g_BTD), wide(other.g_BTD)], 1), self.table)


class Embedding(Rule):
    """The rule of `torch.embedding`, which `torch.nn.functional.embedding` and `torch.nn.Embedding` call."""

    functions = (torch.embedding,)
    names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
    trainable = ("weight",)

    def accepts(self, call: Call) -> bool:
        """The batch must be in the indices' own dimensions. Scaling by frequency counts over the batch: refused."""
        if call.get("scale_grad_by_freq", False):
            raise UnsupportedModel(
                "embedding with scale_grad_by_freq=True divides one sample's gradient by how often its tokens occur "
                "in the whole batch, so samples are coupled. Build the Embedding without scale_grad_by_freq."
            )
        return bool(call.layout.dim < call.arguments["input"].ndim)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Rows of the table, none for the padding index."""
        index_BT = call.rows(call.arguments["input"]).flatten(1)
        g_BTD = call.rows(g).flatten(1, -2)
        table = len(call.arguments["weight"])
        padding = call.get("padding_idx", -1)
        if padding is not None and padding >= 0:
            g_BTD = g_BTD.masked_fill((index_BT == padding).unsqueeze(2), 0)
        yield "weight", Rows(index_BT, g_BTD, table)
