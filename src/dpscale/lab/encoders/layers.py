"""What frozen encoders are made of. Nothing here trains: BatchNorm uses its stored statistics in any mode."""

from collections.abc import Callable, Sequence

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


class ConvNorm(nn.Sequential):
    """A convolution, padded by half its kernel, and BatchNorm; no activation."""

    def __init__(
        self, channels: int, filters: int, kernel: int = 1, *, stride: int = 1, bias: bool = False, eps: float = 1e-5
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, filters, kernel, stride=stride, padding=kernel // 2, bias=bias)
        self.norm = FrozenNorm(filters, eps=eps)


def stages(blocks: Sequence[int], width: int, make: Callable[[int, int, int, bool], nn.Module]) -> nn.ModuleList:
    """The stages of a ResNet of bottlenecks, from ``width`` channels to 4 times the filters of the last stage.

    Args:
        blocks: how many each stage has. The first block of each has a projection and, after the first stage, stride 2.
        width: filters of the first stage, and channels that go into it; doubled from stage to stage.
        make: a block from (channels in, filters, stride, projection).
    """
    made, channels = nn.ModuleList(), width
    for index, count in enumerate(blocks):
        filters, stage = width * 2**index, nn.ModuleList()
        for block in range(count):
            stage.append(make(channels, filters, 2 if index > 0 and block == 0 else 1, block == 0))
            channels = 4 * filters
        made.append(stage)
    return made


def pooled(stages: nn.ModuleList, x_NCHW: Tensor) -> Tensor:
    """Every block in turn, then the mean over the last map."""
    for stage in stages:
        assert isinstance(stage, nn.ModuleList)
        for block in stage:
            x_NCHW = block(x_NCHW)
    return x_NCHW.mean(dim=(2, 3))
