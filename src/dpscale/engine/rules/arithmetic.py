"""`add`, `sub`, `mul`, `div` with a parameter that is broadcast over the batch: raw scales, shifts, position tables.

y = f(x, p) element by element, so sample i's gradient of p is g·∂f/∂p, summed over the dimensions of that sample's
rows along which p was repeated:

    y = x + α·p:  α·g       y = x·p:  g·x       y = x / p:  −g·(x/p)/p       y = p / x:  g / x

and `prelu`: y = x where x > 0, else p·x, with one p or one per channel (dimension 1).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.rules.forms import Call, Dense, Form, Rule, wide


def _family(*names: str) -> tuple[Callable[..., Any], ...]:
    """An operation under all its names: function, method, operator, and the twins that write their first argument."""
    methods = [called for n in names for called in (n, f"{n}_", f"__{n}__", f"__i{n}__")]
    places = [*((torch, name) for name in names), *((torch.Tensor, method) for method in methods)]
    return tuple(getattr(owner, name) for owner, name in places if hasattr(owner, name))


ADD = _family("add")
SUBTRACT = _family("sub", "subtract")
MULTIPLY = _family("mul", "multiply")
DIVIDE = _family("div", "divide", "true_divide", "truediv")


class Arithmetic(Rule):
    """The rule of the four operations, in place or not, with the parameter on either side."""

    functions = ADD + SUBTRACT + MULTIPLY + DIVIDE
    names = ("input", "other")
    trainable = ("input", "other")

    def accepts(self, call: Call) -> bool:
        """A parameter that every row of the batch's dimension gets; a quotient that is not rounded; real numbers."""
        x, p = _roles(call)
        dims = max(p.ndim, x.ndim if isinstance(x, Tensor) else 0)
        batch = p.ndim - (dims - call.layout.dim)  # the batch's dimension, counted in p's own
        repeated = batch < 0 or p.shape[batch] == 1
        real = not (p.is_complex() or (isinstance(x, Tensor) and x.is_complex()))
        return bool(repeated and real and call.get("rounding_mode") is None)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """The gradients themselves: they are no larger than g."""
        x, p = _roles(call)
        slot = next(iter(call.wanted))
        g_rows = call.rows(wide(g))
        if call.function in MULTIPLY:
            g_rows = g_rows * call.rows(x.expand(g.shape))
        elif call.function in DIVIDE and slot == "input":
            g_rows = g_rows / call.rows(x.expand(g.shape))
        elif call.function in DIVIDE:
            p = wide(p)
            g_rows = call.rows(-wide(g) * (x / p / p))
        elif slot == "other":
            alpha = call.get("alpha", 1) * (-1 if call.function in SUBTRACT else 1)
            g_rows = g_rows if alpha == 1 else g_rows * alpha
        yield slot, Dense(reduced(g_rows, p.shape))


class PReLU(Rule):
    """The rule of `torch.prelu`: ∂y/∂w is x where x is not positive."""

    functions = (torch.prelu, torch.Tensor.prelu)
    names = ("input", "weight")
    trainable = ("weight",)

    def accepts(self, call: Call) -> bool:
        """The batch may lie anywhere but in the channels."""
        return call.layout.dim != 1 or call.arguments["weight"].numel() == 1

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """g·min(x, 0), summed over all but the channels."""
        weight, channels = call.arguments["weight"], call.arguments["weight"].numel()
        grad = call.rows(wide(g) * call.arguments["input"].clamp(max=0))
        grad = reduced(grad, (channels, *[1] * (g.ndim - 2)) if channels > 1 else ())
        yield "weight", Dense(grad.reshape(-1, *weight.shape))


def reduced(g_rows: Tensor, shape: Sequence[int]) -> Tensor:
    """(B, *shape): per-sample rows of a result, summed to the shape of an operand that was broadcast to it."""
    missing = g_rows.ndim - 1 - len(shape)
    repeated = [1 + d for d in range(missing)]
    repeated += [1 + missing + d for d, n in enumerate(shape) if n == 1 and g_rows.shape[1 + missing + d] != 1]
    summed = g_rows.sum(repeated) if repeated else g_rows
    return summed.reshape(len(g_rows), *shape)


def _roles(call: Call) -> tuple[Any, Tensor]:
    """(what stands beside it, the parameter)."""
    (slot,) = call.wanted
    return call.arguments["other" if slot == "input" else "input"], call.arguments[slot]
