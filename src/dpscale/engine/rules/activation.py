"""`prelu`: y = x where x > 0, else w·x, with one w or one per channel (dimension 1)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dpscale.engine.rules.arithmetic import reduced
from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Dense, Form, wide


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
