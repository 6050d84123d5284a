"""Layer, RMS, group and instance norm: y = x̂·w + b, where x̂ is one sample's input normalized by its own statistics.

The gradients of w and b have as many entries as there are features, so they are simply formed per sample.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.rules.forms import Call, Dense, Form, Rule, wide


class Normalization(Rule):
    """What three of them share: recompute x̂, then sum g·x̂ and g over everything but the sample and the feature."""

    trainable: tuple[str, ...] = ("weight", "bias")

    @abstractmethod
    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """x̂, by the same operation without its scale and shift."""

    def accepts(self, call: Call) -> bool:
        """The batch must lie before the features (channel norms: in dimension 0)."""
        x, features = call.arguments["input"], _features(call)
        return call.layout.dim < x.ndim - features if features else call.layout.dim == 0

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Dense gradients of scale and shift."""
        g_rows = call.rows(wide(g))
        features = _features(call)
        # Rows are (B, *one sample's shape). Keep the sample and the features, sum the rest.
        keep = set(range(g_rows.ndim - features, g_rows.ndim)) if features else {2}
        rest = [d for d in range(1, g_rows.ndim) if d not in keep]
        if "weight" in call.wanted:
            x_hat = call.rows(self.normalized(call, wide(call.arguments["input"])))
            yield "weight", Dense((g_rows * x_hat).sum(rest) if rest else g_rows * x_hat)
        if "bias" in call.wanted:
            yield "bias", Dense(g_rows.sum(rest) if rest else g_rows)


def _features(call: Call) -> int:
    """How many trailing dimensions are features; 0: the features are the channels, dimension 1."""
    return len(call.get("normalized_shape", ()))


class LayerNorm(Normalization):
    """The rule of `torch.layer_norm`."""

    functions = (torch.layer_norm,)
    names = ("input", "normalized_shape", "weight", "bias", "eps", "cudnn_enable")

    def normalized(self, call: Call, x: Tensor) -> Tensor:
        """Zero mean, unit variance over the features."""
        return torch.layer_norm(x, call.arguments["normalized_shape"], eps=call.get("eps", 1e-5))


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


class GroupNorm(Rule):
    """The rule of `torch.group_norm`, from the sums that its own backward takes: a compiled step takes them once."""

    functions = (torch.group_norm,)
    names = ("input", "num_groups", "weight", "bias", "eps", "cudnn_enabled")
    trainable = ("weight", "bias")

    def accepts(self, call: Call) -> bool:
        """The batch must be in dimension 0."""
        return call.layout.dim == 0

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Dense gradients of scale and shift."""
        x, g = (_dense(wide(t)) for t in (call.arguments["input"], g))
        e_NC = _over_positions(g)
        if "weight" in call.wanted:
            statistics = _statistics(x, call.arguments["num_groups"], call.get("eps", 1e-5))
            yield "weight", Dense(call.rows(_scale_gradient(g, x, e_NC, *statistics)).sum(1))
        if "bias" in call.wanted:
            yield "bias", Dense(call.rows(e_NC).sum(1))


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Tensor:  # fmt: skip
    """`torch.group_norm`, which on CUDA lays images out anew: here result and gradients lie as the input does."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x = wide(x)  # as autocast has it
    out: Tensor = _GroupNorm.apply(x, weight, bias, num_groups, eps)  # type: ignore[no-untyped-call]
    return out


class _GroupNorm(torch.autograd.Function):
    """One multiplication and addition per entry, by coefficients of its image and channel, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float) -> Tensor:
        """x̂·w + b."""
        ctx.save_for_backward(x, weight)
        ctx.groups, ctx.eps = groups, eps
        mean_NC, inverse_NC = (_each(t, x) for t in _statistics(wide(x), groups, eps))
        scale_NC = inverse_NC if weight is None else inverse_NC * weight
        shift_NC = -mean_NC * scale_NC if bias is None else bias - mean_NC * scale_NC
        return (wide(x) * _at_positions(scale_NC, x) + _at_positions(shift_NC, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """The input's gradient (w·g - mean of w·g - x̂ · mean of w·g·x̂)/deviation, means over the group."""
        given, weight = ctx.saved_tensors
        x, g = wide(given), wide(g)
        mean_NG, inverse_NG = _statistics(x, ctx.groups, ctx.eps)
        e_NC = _over_positions(g)
        d_NC = _scale_gradient(g, x, e_NC, mean_NG, inverse_NG)
        size = math.prod(x.shape[1:]) // ctx.groups
        p_NG, q_NG = (
            (t if weight is None else t * weight).unflatten(1, (ctx.groups, -1)).sum(2) / size for t in (e_NC, d_NC)
        )
        inverse_NC = _each(inverse_NG, x)
        of_g = inverse_NC if weight is None else inverse_NC * weight
        of_x = -q_NG * inverse_NG * inverse_NG
        rest = -of_x * mean_NG - p_NG * inverse_NG
        of_g, of_x, rest = (_at_positions(t, x) for t in (of_g, _each(of_x, x), _each(rest, x)))
        _, scaled, shifted, *_ = ctx.needs_input_grad
        sums = d_NC.sum(0) if scaled else None, e_NC.sum(0) if shifted else None
        return (g * of_g + x * of_x + rest).to(given.dtype), *sums, None, None


def _statistics(x: Tensor, groups: int, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and inverse deviation of each group of channels, (N, G)."""
    images, channels, *space = x.shape
    sizes = images, channels, math.prod(space)
    if _native(x):
        _, mean, inverse = torch.native_group_norm(x, None, None, *sizes, groups, eps)
        return mean, inverse
    # Channel by channel first, which lie side by side; then the spread of their means comes in.
    of_channels = torch.var_mean(x.reshape(sizes), 2, correction=0)
    variance_NGC, mean_NGC = (t.unflatten(1, (groups, -1)) for t in of_channels)
    mean = mean_NGC.mean(2)
    variance = (variance_NGC + (mean_NGC - mean.unsqueeze(2)).square()).mean(2)
    return mean, (variance + eps).rsqrt()


def _native(x: Tensor) -> bool:
    """Whether torch's own kernel takes it as it lies."""
    return x.is_contiguous() or x.device.type == "cpu"


def _over_positions(t: Tensor) -> Tensor:
    """(N, C)."""
    return t.reshape(*t.shape[:2], math.prod(t.shape[2:])).sum(dim=[2])


def _scale_gradient(g: Tensor, x: Tensor, e_NC: Tensor, mean_NG: Tensor, inverse_NG: Tensor) -> Tensor:
    """Σ g·x̂ over positions from Σ g·x and e = Σ g: (Σ g·x - mean·e)/deviation."""
    d_NC = _over_positions(torch.mul(g, x))
    return (d_NC - e_NC * _each(mean_NG, x)) * _each(inverse_NG, x)


def _each(t_NG: Tensor, x: Tensor) -> Tensor:
    """Of a group, for each of its channels: (N, C)."""
    images, groups = t_NG.shape
    return t_NG.unsqueeze(2).expand(images, groups, x.shape[1] // groups).reshape(images, x.shape[1])


def _at_positions(t_NC: Tensor, x: Tensor) -> Tensor:
    return t_NC.view(*t_NC.shape, *[1] * (x.ndim - 2))


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


def _dense(t: Tensor) -> Tensor:
    """Without gaps; channels last stays so."""
    last = t.ndim == 4 and t.is_contiguous(memory_format=torch.channels_last)
    return t if last else t.contiguous()
