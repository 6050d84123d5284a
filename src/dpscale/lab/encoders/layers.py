"""What frozen encoders are made of. Nothing here trains: BatchNorm uses its stored statistics in any mode."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenNorm(nn.Module):
    """BatchNorm with stored statistics: ``(x - mean) / sqrt(var + eps) × weight + bias`` per channel.

    It mixes no samples, so an image's features do not depend on the batch that it is in.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Normalize each channel."""
        return F.batch_norm(x_NCHW, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


class ConvNorm(nn.Module):
    """A convolution, padded by half its kernel, and BatchNorm."""

    def __init__(
        self, channels: int, filters: int, kernel: int = 1, *, stride: int = 1, bias: bool = False, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel, stride=stride, padding=kernel // 2, bias=bias)
        self.norm = FrozenNorm(filters, eps=eps)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Convolve and normalize; no activation."""
        out: Tensor = self.norm(self.conv(x_NCHW))
        return out
