"""`linear`: y = x Wᵀ + b over any number of leading dimensions; `matmul`, `mm`, `addmm`: y = x W (+ b).

Sample i's gradient of W is Σ_t g_t a_tᵀ over its positions t. Its squared norm is Σ_{t,t'} (a_t·a_t')(g_t·g_t')
(the Gram identity), which needs T² numbers a sample instead of I·O. With the matrix on the right, as Hugging Face's
Conv1D and raw code write it, that is transposed: an `Outer` whose operands have changed places. A parameter on the
left, or one that is not a matrix, goes to the generic rule.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscale.engine import kernels
from dpscale.engine.layout import example_size
from dpscale.engine.rules.arithmetic import reduced
from dpscale.engine.rules.forms import (
    Call,
    Dense,
    Form,
    Rule,
    as_multiplied,
    chunks,
    same,
    side_by_side,
    size,
    slack,
    wide,
)

CHUNK = 1 << 26
"""How many numbers of instantiated per-sample gradients to hold at once."""

PASS = 64
"""Multiplications that cost a CPU as much as to write and twice read one number of a gradient that is kept."""


@dataclass(frozen=True)
class Outer(Form):
    """Gradients that are sums of outer products over positions: G_i = Σ_t g_t a_tᵀ, shape (O, I)."""

    a_BTI: Tensor
    g_BTO: Tensor

    @property
    def _fast(self) -> bool:
        """Whether CUDA kernels take the operands as they are."""
        return self.a_BTI.shape[1] >= kernels.SHORT and kernels.available(self.a_BTI, self.g_BTO)

    @property
    def _fast_gram(self) -> bool:
        return self.a_BTI.shape[1] >= kernels.SHORT and kernels.gram_available(self.a_BTI, self.g_BTO)

    @property
    def gram(self) -> bool:
        """Whether T² pairs are cheaper than I·O entries. If not, the gradients are also smaller than the operands."""
        t, i, o = self.a_BTI.shape[1], self.a_BTI.shape[2], self.g_BTO.shape[2]
        half = 2 if self._fast_gram else 1  # the kernel does half of the symmetric pairs
        return t == 1 or t * (i + o) <= half * i * o

    @property
    def _pays(self) -> bool:
        """Whether the gradients are worth keeping though T² pairs are cheaper: the weighted sum then needs no product.

        Where they are no larger than the operands, and going through them costs less than the pairs. Not on CUDA, where
        the pairs have a kernel.
        """
        t, i, o = self.a_BTI.shape[1], self.a_BTI.shape[2], self.g_BTO.shape[2]
        return not self.a_BTI.is_cuda and i * o <= t * (i + o) and t * t * (i + o) > PASS * i * o

    def settle(self) -> Form:
        """The gradients themselves where that is cheaper, if they fit."""
        numbers = example_size(len(self.a_BTI)) * self.a_BTI.shape[2] * self.g_BTO.shape[2]
        return self if (self.gram and not self._pays) or numbers > CHUNK else self.kept()

    @cached_property
    def _aligned(self) -> tuple[Tensor, Tensor]:
        return kernels.aligned(self.a_BTI), kernels.aligned(self.g_BTO)

    @cached_property
    def _by_gram(self) -> tuple[Tensor, Tensor]:
        """Squared norms, and the norms of the terms (B, T), by the Gram identity."""
        a, g = self._aligned
        return kernels.gram_norm2(a, g) if self._fast_gram else kernels.gram_norm2_plain(wide(a), wide(g))

    def terms(self) -> Tensor:
        """The norms of the terms g_t a_tᵀ, (B, T): what the rounding of their sum is relative to."""
        if self.gram and self.a_BTI.shape[1] > 1:
            return self._by_gram[1]
        return size(self.a_BTI, 2) * size(self.g_BTO, 2)

    def kept(self) -> Dense:
        """The gradients, laid out as they are made fastest; of 16-bit operands rounded, as autograd rounds them."""
        if self._fast:
            a, g = self._aligned
            made = kernels.keep(a.unsqueeze(1), g.unsqueeze(1))[:, 0]
            return Dense(made[:, : self.g_BTO.shape[2], : self.a_BTI.shape[2]])
        # On CPUs a product of many small matrices is up to ten times as fast if its right operand is in row order.
        return Dense(torch.bmm(wide(self.a_BTI).mT, wide(self.g_BTO).contiguous()), (1, 0))

    def norm2(self) -> Tensor:
        """By the Gram identity, or by the gradients a chunk of samples at a time."""
        if self.a_BTI.shape[1] == 1:
            return (size(self.a_BTI, 2) * size(self.g_BTO, 2)).squeeze(1).square()
        if self.gram:
            squares, sizes = self._by_gram
            return squares.clamp(min=0) + slack(sizes)  # rounding may leave a tiny negative
        if self._fast:
            a, g = self._aligned
            return kernels.square(a.unsqueeze(1), g.unsqueeze(1)) + slack(self.terms())
        a, g = wide(self.a_BTI), wide(self.g_BTO)
        step = max(1, CHUNK // (a.shape[2] * g.shape[2]))
        parts = [Dense(Outer(a[chunk], g[chunk]).per_sample()) for chunk in chunks(len(a), step)]
        return torch.cat([p.norm2() for p in parts]) + slack(self.terms())

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One matrix product over samples and positions together."""
        a, g = self._aligned
        if self._fast:
            summed = kernels.weigh(a.unsqueeze(1), g.unsqueeze(1), weights_B)[0]
        else:
            summed = kernels.weigh_wide(wide(a), wide(g), weights_B)
        return summed[: self.g_BTO.shape[2], : self.a_BTI.shape[2]].contiguous()

    def per_sample(self) -> Tensor:
        """(B, O, I)."""
        return torch.bmm(wide(self.g_BTO).mT, wide(self.a_BTI))

    def onto(self, columns_IK: Tensor) -> "Outer":
        """The inputs times the columns."""
        a = wide(self.a_BTI)
        return Outer(a @ columns_IK.to(a.dtype), wide(self.g_BTO))

    def join(self, other: Form) -> "Outer | None":
        """Concatenate along the positions: the Gram identity then has the cross terms of the two uses.

        Of one and the same input the output gradients are added instead: Σ g_t a_tᵀ is linear in them.
        """
        if not isinstance(other, Outer):
            return None
        if same(self.a_BTI, other.a_BTI):
            return Outer(self.a_BTI, wide(self.g_BTO) + wide(other.g_BTO))
        return Outer(side_by_side(self.a_BTI, other.a_BTI), side_by_side(self.g_BTO, other.g_BTO))


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
            # Rounded first, as autocast does it: a compiler then sees that it is the operand of the forward.
            a_BTI = call.rows(as_multiplied(call.arguments["input"], g)).flatten(1, -2)
            yield "weight", Outer(a_BTI, g_BTO)
        if "bias" in call.wanted:
            yield "bias", Dense(wide(g_BTO).sum(1))


class MatMul(Rule):
    """The rule of ``x @ W``: `torch.matmul`, `torch.mm` and their methods."""

    functions = (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
    names = ("input", "other")
    trainable = ("other",)

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """`mm` calls its second argument mat2."""
        bound = super().bind(args, kwargs)
        if "mat2" in bound:
            bound["other"] = bound.pop("mat2")
        return bound

    def accepts(self, call: Call) -> bool:
        """A matrix on the right; the batch in any dimension of x but the features."""
        x, weight = call.arguments["input"], call.arguments["other"]
        return bool(weight.ndim == 2 and x.ndim >= 2 and call.layout.dim < x.ndim - 1)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """The outer products of `linear`, transposed."""
        yield "other", _right(call, call.arguments["input"], g)


class AddMM(Rule):
    """The rule of `torch.addmm`: beta · input + alpha · mat1 @ mat2."""

    functions = (torch.addmm, torch.Tensor.addmm)
    names = ("input", "mat1", "mat2")
    trainable = ("input", "mat2")

    def accepts(self, call: Call) -> bool:
        """The batch in the rows of the result; a bias that every row gets."""
        bias = call.arguments["input"]
        return call.layout.dim == 0 and ("input" not in call.wanted or bias.ndim < 2 or bias.shape[0] == 1)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """An outer-product form for the matrix, sums over positions for the bias."""
        if "mat2" in call.wanted:
            yield "mat2", _right(call, call.arguments["mat1"], _times(g, call.get("alpha", 1)))
        if "input" in call.wanted:
            g_rows = _times(call.rows(wide(g)), call.get("beta", 1))
            yield "input", Dense(reduced(g_rows, call.arguments["input"].shape))


def _right(call: Call, x: Tensor, g: Tensor) -> Outer:
    """Rows of x are rows of the result, so the samples are where the result has them."""
    return Outer(call.rows(g).flatten(1, -2), call.rows(as_multiplied(x, g)).flatten(1, -2))


def _times(g: Tensor, factor: float) -> Tensor:
    return g if factor == 1 else wide(g) * factor
