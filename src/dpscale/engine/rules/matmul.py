"""`matmul`, `mm`, `addmm`: y = x W (+ b) with the matrix on the right, as Hugging Face's Conv1D and raw code write it.

Sample i's gradient of W is Σ_t a_t g_tᵀ over its positions t: that of `linear`, transposed, so an `Outer` whose
operands have changed places. A parameter on the left, or one that is not a matrix, goes to the generic rule.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.rules.arithmetic import reduced
from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Dense, Form, as_multiplied, wide
from dpscale.engine.rules.linear import Outer


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
        return call.layout.dim == 0 and ("input" not in call.wanted or _is_bias(call.arguments["input"]))

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


def _is_bias(t: Tensor) -> bool:
    return t.ndim < 2 or t.shape[0] == 1


def _times(g: Tensor, factor: float) -> Tensor:
    return g if factor == 1 else wide(g) * factor
