"""`linear`: y = x Wᵀ + b over any number of leading dimensions.

Sample i's gradient of W is Σ_t g_t a_tᵀ over its positions t. Its squared norm is Σ_{t,t'} (a_t·a_t')(g_t·g_t')
(the Gram identity), which needs T² numbers a sample instead of I·O.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscale.engine import kernels
from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Change, Dense, Form, slack, wide

CHUNK = 1 << 26
"""How many numbers of instantiated per-sample gradients to hold at once."""


@dataclass(frozen=True)
class Outer(Form):
    """Gradients that are sums of outer products over positions: G_i = Σ_t g_t a_tᵀ, shape (O, I)."""

    a_BTI: Tensor
    g_BTO: Tensor

    @property
    def gram(self) -> bool:
        """Whether T² pairs are cheaper than I·O entries. If not, the gradients are also smaller than the operands."""
        t, i, o = self.a_BTI.shape[1], self.a_BTI.shape[2], self.g_BTO.shape[2]
        half = 2 if kernels.available(self.a_BTI, self.g_BTO) else 1  # the kernel does half of the symmetric pairs
        return t == 1 or t * (i + o) <= half * i * o

    def settle(self) -> Form:
        """The gradients themselves where that is cheaper, if they fit."""
        numbers = len(self.a_BTI) * self.a_BTI.shape[2] * self.g_BTO.shape[2]
        return self if self.gram or numbers > CHUNK else Dense(self.per_sample())

    def norm2(self) -> Tensor:
        """By the Gram identity, or by the gradients a chunk of samples at a time."""
        a, g = wide(self.a_BTI), wide(self.g_BTO)
        if self.a_BTI.shape[1] == 1:
            return a.square().sum((1, 2)) * g.square().sum((1, 2))
        if self.gram:
            fast = kernels.available(self.a_BTI, self.g_BTO)
            squares, sizes = kernels.gram_norm2(self.a_BTI, self.g_BTO) if fast else kernels.gram_norm2_plain(a, g)
            return squares.clamp(min=0) + slack(sizes)  # rounding may leave a tiny negative
        sizes = torch.linalg.vector_norm(a, dim=2) * torch.linalg.vector_norm(g, dim=2)
        step = max(1, CHUNK // (a.shape[2] * g.shape[2]))
        parts = [Dense(Outer(a[k : k + step], g[k : k + step]).per_sample()) for k in range(0, len(a), step)]
        return torch.cat([p.norm2() for p in parts]) + slack(sizes)

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One matrix product over samples and positions together."""
        a, g = wide(self.a_BTI), wide(self.g_BTO)
        g = g * weights_B.to(g.dtype).view(-1, 1, 1)
        return torch.mm(g.flatten(0, 1).t(), a.flatten(0, 1))

    def per_sample(self) -> Tensor:
        """(B, O, I)."""
        return torch.bmm(wide(self.g_BTO).mT, wide(self.a_BTI))

    def map(self, change: Change) -> "Outer":
        """Change both operands."""
        return Outer(change(self.a_BTI), change(self.g_BTO))

    def join(self, other: Form) -> "Outer | None":
        """Concatenate along the positions: the Gram identity then has the cross terms of the two uses."""
        if not isinstance(other, Outer):
            return None
        a = torch.cat([wide(self.a_BTI), wide(other.a_BTI)], 1)
        return Outer(a, torch.cat([wide(self.g_BTO), wide(other.g_BTO)], 1))


class Linear(Rule):
    """The rule of `torch.nn.functional.linear`."""

    functions = (F.linear,)
    names = ("input", "weight", "bias")
    trainable = ("weight", "bias")

    def accepts(self, call: Call) -> bool:
        """Any leading dimension may hold the batch; the features may not."""
        return bool(call.layout.dim < call.arguments["input"].ndim - 1)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """An outer-product form for the weight, sums over positions for the bias."""
        g_BTO = call.rows(g).flatten(1, -2)
        if "weight" in call.wanted:
            yield "weight", Outer(call.rows(call.arguments["input"]).flatten(1, -2), g_BTO)
        if "bias" in call.wanted:
            yield "bias", Dense(wide(g_BTO).sum(1))
