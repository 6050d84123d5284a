"""Layer, RMS, group and instance norm: y = x̂·w + b, where x̂ is one sample's input normalized by its own statistics.

The gradients of w and b have as many entries as there are features, so they are simply formed per sample.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator

import torch
from torch import Tensor

from dpscale.engine.rules.base import Call, Rule
from dpscale.engine.rules.forms import Dense, Form, wide


class Normalization(Rule):
    """What three of them share: recompute x̂, then sum g·x̂ and g over everything but the sample and the feature."""

    trainable: tuple[str, ...] = ("weight", "bias")

    @abstractmethod
    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """x̂, by the same operation without its scale and shift."""

    @abstractmethod
    def feature_dims(self, call: Call) -> int:
        """How many trailing dimensions are features; 0: the features are the channels, dimension 1."""

    def accepts(self, call: Call) -> bool:
        """The batch must lie before the features (channel norms: in dimension 0)."""
        x, features = call.arguments["input"], self.feature_dims(call)
        return call.layout.dim < x.ndim - features if features else call.layout.dim == 0

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Dense gradients of scale and shift."""
        g_rows = call.rows(wide(g))
        features = self.feature_dims(call)
        # Rows are (B, *one sample's shape). Keep the sample and the features, sum the rest.
        keep = set(range(g_rows.ndim - features, g_rows.ndim)) if features else {2}
        rest = [d for d in range(1, g_rows.ndim) if d not in keep]
        if "weight" in call.wanted:
            x_hat = call.rows(self.normalized(call, wide(call.arguments["input"])))
            yield "weight", Dense((g_rows * x_hat).sum(rest) if rest else g_rows * x_hat)
        if "bias" in call.wanted:
            yield "bias", Dense(g_rows.sum(rest) if rest else g_rows)


class LayerNorm(Normalization):
    """The rule of `torch.layer_norm`."""

    functions = (torch.layer_norm,)
    names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")

    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """Zero mean, unit variance over the features."""
        return torch.layer_norm(x, call.arguments["normalized_shape"], eps=call.get("eps", 1e-5))

    def feature_dims(self, call: Call) -> int:
        """As many as the normalized shape has."""
        return len(call.arguments["normalized_shape"])


class RMSNorm(Normalization):
    """The rule of `torch.rms_norm`; it has no shift."""

    functions = (torch.rms_norm,)
    names = ("input", "normalized_shape", "weight", "eps")
    trainable = ("weight",)

    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """Unit mean square over the features."""
        eps = call.get("eps")
        if eps is None:  # torch takes the machine epsilon of the input's own type
            eps = torch.finfo(call.arguments["input"].dtype).eps
        return torch.rms_norm(x, call.arguments["normalized_shape"], eps=eps)

    def feature_dims(self, call: Call) -> int:
        """As many as the normalized shape has."""
        return len(call.arguments["normalized_shape"])


class GroupNorm(Rule):
    """The rule of `torch.group_norm`.

    From the sums that its own backward takes, d = Σ g·x and e = Σ g over the positions of each channel: the gradient of
    the shift is e, that of the scale (d - mean·e)/deviation. In a compiled step they are computed once for both.
    """

    functions = (torch.group_norm,)
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    trainable = ("weight", "bias")

    def accepts(self, call: Call) -> bool:
        """The batch must be in dimension 0."""
        return call.layout.dim == 0

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Dense gradients of scale and shift."""
        x, g = (_dense(wide(t)) for t in (call.arguments["input"], g))
        groups = call.arguments["num_groups"]
        images, channels, *space = x.shape
        sizes = images, channels, math.prod(space)
        e_NC = g.reshape(sizes).sum(dim=[2])
        if "weight" in call.wanted:
            _, mean, inverse = torch.native_group_norm(x, None, None, *sizes, groups, call.get("eps", 1e-5))
            d_NGC, e_NGC = (t.unflatten(1, (groups, -1)) for t in (torch.mul(g, x).reshape(sizes).sum(dim=[2]), e_NC))
            scale_NGC = (d_NGC - e_NGC * mean.unsqueeze(2)) * inverse.unsqueeze(2)
            yield "weight", Dense(call.rows(scale_NGC.flatten(1)).sum(1))
        if "bias" in call.wanted:
            yield "bias", Dense(call.rows(e_NC).sum(1))


class InstanceNorm(Normalization):
    """The rule of `torch.instance_norm`, which runs the statistics of each sample, or frozen running ones."""

    functions = (torch.instance_norm,)
    names = (
        "input", "weight", "bias", "running_mean", "running_var", "use_input_stats", "momentum", "eps", "cudnn_enabled",
    )  # fmt: skip

    def accepts(self, call: Call) -> bool:
        """Only with the sample's own statistics; running ones go to the generic rule."""
        return super().accepts(call) and bool(call.get("use_input_stats", True))

    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """Zero mean, unit variance over each channel of each sample."""
        return torch.instance_norm(x, None, None, None, None, True, 0.0, call.get("eps", 1e-5), False)

    def feature_dims(self, call: Call) -> int:
        """Channels."""
        return 0


def _dense(t: Tensor) -> Tensor:
    """As `torch.group_norm` lays out what it is given: without gaps, on the CPU also channels last."""
    last = t.ndim == 4 and t.device.type == "cpu" and t.is_contiguous(memory_format=torch.channels_last)
    return t if last else t.contiguous()
