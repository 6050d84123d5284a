"""`conv_transpose1d`, `2d`, `3d`: any stride, padding, output padding, dilation and number of groups.

The transpose of a convolution sends y's gradient g to x by that convolution, so ⟨g, y⟩ = ⟨conv(g, W), x⟩: the gradient
of W is that of an ordinary convolution whose input is g and whose output gradient is x. `Patches` does the rest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.convolution import Patches, per_dim
from dpscale.engine.rules.forms import Dense, Form, as_multiplied, wide


@dataclass(frozen=True)
class TransposedPatches(Patches):
    """`Patches` with the roles exchanged: ``x`` holds the output gradient and ``g`` the input."""

    output_padding: tuple[int, ...]

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One ordinary weight gradient of the transposed convolution."""
        return self._weight_gradient(self.g, self.x, weights_B, True, self.output_padding)


class TransposedConvolution(Rule):
    """The rule of `torch.conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`."""

    functions = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
    trainable = ("weight", "bias")

    def accepts(self, call: Call) -> bool:
        """The batch must be in dimension 0."""
        return call.layout.dim == 0 and call.arguments["input"].ndim == call.arguments["weight"].ndim

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Patches of the output gradient for the weight, sums over positions for the bias."""
        weight, g_rows = call.arguments["weight"], call.rows(g)
        space = weight.ndim - 2
        if "weight" in call.wanted:
            yield (
                "weight",
                TransposedPatches(
                    g_rows,
                    call.rows(as_multiplied(call.arguments["input"], g)),
                    weight.shape,
                    per_dim(call.get("stride", 1), space),
                    per_dim(call.get("padding", 0), space),
                    per_dim(call.get("dilation", 1), space),
                    call.get("groups", 1),
                    per_dim(call.get("output_padding", 0), space),
                ),
            )
        if "bias" in call.wanted:
            yield "bias", Dense(wide(g_rows).transpose(1, 2).flatten(2).sum(2))
