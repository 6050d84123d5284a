"""SimCLRv2's encoder: ResNet-50, twice as wide, with selective kernels.

Chen et al., *Big Self-Supervised Models are Strong Semi-Supervised Learners*, 2020 (https://arxiv.org/abs/2006.10029).
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.lab.encoders.layers import ConvNorm, pooled, stages


class SimCLRv2(nn.Module):
    """RGB images in [0, 1] -> ``32 × width`` features (4096), the mean over the last map; 140 million parameters.

    The layers follow SimCLRv2's TensorFlow definition, with its asymmetric "SAME" padding of pools; a port that pads
    pools on both sides, or counts the padding in averages, sees slightly other features from the same weights.

    Args:
        blocks, width, ratio: as published by default; smaller for tests. ``ratio`` is the selective kernels'.
    """

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 128, ratio: float = 0.0625) -> None:
        super().__init__()
        half = width // 2
        self.stem = nn.ModuleList([ConvNorm(3, half, 3, stride=2), ConvNorm(half, half, 3), ConvNorm(half, width, 3)])
        self.stages = stages(blocks, width, partial(SelectiveBottleneck, ratio))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Features of RGB images in [0, 1]."""
        x = images_NCHW
        for layer in self.stem:
            x = F.relu(layer(x))
        x = F.max_pool2d(_pad_same(x, 3, 2), 3, stride=2)
        return pooled(self.stages, x)


class SelectiveBottleneck(nn.Module):
    """1×1, selective 3×3 (with the stride), 1×1 to four times the filters; plus the input, pooled and projected."""

    def __init__(self, ratio: float, channels: int, filters: int, stride: int, project: bool) -> None:
        super().__init__()
        self.stride = stride
        self.reduce = ConvNorm(channels, filters)
        self.select = SelectiveKernel(filters, stride=stride, ratio=ratio)
        self.expand = ConvNorm(filters, 4 * filters)
        self.shortcut = ConvNorm(channels, 4 * filters) if project else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Residual sum, then ReLU."""
        shortcut = x_NCHW if self.shortcut is None else self.shortcut(_average_pool(x_NCHW, self.stride))
        x = F.relu(self.reduce(x_NCHW))
        return F.relu(self.expand(self.select(x)) + shortcut)


class SelectiveKernel(nn.Module):
    """Two 3×3 convolutions, mixed per channel by weights that the whole map decides.

    With branches a and b: z = ReLU(norm(W mean(a + b))), and the output is softmax over the two of (A z, B z), applied
    to a and b. (Li et al., https://arxiv.org/abs/1903.06586, with both kernels 3×3, as SimCLRv2 has it.)
    """

    def __init__(self, filters: int, *, stride: int, ratio: float) -> None:
        super().__init__()
        squeezed = max(int(filters * ratio), 32)
        self.branches = ConvNorm(filters, 2 * filters, 3, stride=stride)
        self.squeeze = ConvNorm(filters, squeezed)
        self.mix = nn.Conv2d(squeezed, 2 * filters, 1, bias=False)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """The mixture of both branches."""
        both_N2CHW = F.relu(self.branches(x_NCHW)).unflatten(1, (2, -1))
        pooled_NC11 = both_N2CHW.sum(1).mean(dim=(2, 3), keepdim=True)
        mixing_N2C11 = self.mix(F.relu(self.squeeze(pooled_NC11))).unflatten(1, (2, -1)).softmax(1)
        mixed: Tensor = (both_N2CHW * mixing_N2C11).sum(1)
        return mixed


def _pad_same(x_NCHW: Tensor, kernel: int, stride: int) -> Tensor:
    # TensorFlow's "SAME": as much as the last window lacks, the odd one at the end. Zeros: the input is never negative.
    height, width = (max((-(-size // stride) - 1) * stride + kernel - size, 0) for size in x_NCHW.shape[2:])
    return F.pad(x_NCHW, (width // 2, width - width // 2, height // 2, height - height // 2))


def _average_pool(x_NCHW: Tensor, stride: int) -> Tensor:
    # 2×2. With stride 2, zeros at the end count; with stride 1, "SAME", they do not: the mean is over what is there.
    if stride == 1:
        inside = x_NCHW.new_ones((1, 1, *x_NCHW.shape[2:]))
        return F.avg_pool2d(F.pad(x_NCHW, (0, 1, 0, 1)), 2, stride=1) / F.avg_pool2d(F.pad(inside, (0, 1, 0, 1)), 2, 1)
    return F.avg_pool2d(F.pad(x_NCHW, (0, 1, 0, 1)), 2, stride=stride)


def from_converted(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The encoder in a converted checkpoint (``r50_2x_sk1.pth``, or its tensors as safetensors) as ``model`` names it.

    The projection head and the linear classifier are left out.
    """
    ours = {_converted_name(name): name for name in model.state_dict()}
    held = {name.removeprefix("resnet."): tensor for name, tensor in found.items()}
    foreign = ("head.", "fc.")
    return {
        ours.get(name, name): tensor
        for name, tensor in held.items()
        if not name.startswith(foreign) and not name.endswith(".num_batches_tracked")
    }


_CONVERTED = {
    "reduce.conv": "net.0",
    "reduce.norm": "net.1.0",
    "select.branches.conv": "net.2.main_conv.0",
    "select.branches.norm": "net.2.main_conv.1.0",
    "select.squeeze.conv": "net.2.mixing_conv.0",
    "select.squeeze.norm": "net.2.mixing_conv.1.0",
    "select.mix": "net.2.mixing_conv.2",
    "expand.conv": "net.3",
    "expand.norm": "net.4.0",
    "shortcut.conv": "projection.shortcut.2",
    "shortcut.norm": "projection.bn.0",
}
"""Layers of a block here, and in the files of the public converter."""


def _converted_name(ours: str) -> str:
    where, tensor = ours.rsplit(".", 1)
    if where.startswith("stem."):
        _, index, layer = where.split(".")
        return f"net.0.{2 * int(index)}.{tensor}" if layer == "conv" else f"net.0.{2 * int(index) + 1}.0.{tensor}"
    _, stage, block, layer = where.split(".", 3)
    return f"net.{int(stage) + 1}.blocks.{block}.{_CONVERTED[layer]}.{tensor}"
