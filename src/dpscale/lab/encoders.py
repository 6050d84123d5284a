"""Frozen public networks, and the names that other files have for their weights. Nothing here trains."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class FrozenNorm(nn.Module):
    """BatchNorm with stored statistics, in any mode: ``(x - mean) / sqrt(var + eps) × weight + bias`` per channel.

    It mixes no samples, so an image's features do not depend on the batch that it is in.
    """

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, *, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
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


def _stages(blocks: Sequence[int], width: int, make: Callable[[int, int, int, bool], nn.Module]) -> nn.ModuleList:
    """The stages of a ResNet of bottlenecks, made from (channels in, filters, stride, projection).

    Filters are ``width`` in the first stage and double from stage to stage. The first block of each has a projection
    and, after the first stage, stride 2.
    """
    made, channels = nn.ModuleList(), width
    for index, count in enumerate(blocks):
        filters, stage = width * 2**index, nn.ModuleList()
        for block in range(count):
            stage.append(make(channels, filters, 2 if index > 0 and block == 0 else 1, block == 0))
            channels = 4 * filters
        made.append(stage)
    return made


def through(stages: Iterable[nn.Module], x_NCHW: Tensor) -> Tensor:
    """Every block of every stage in turn."""
    for stage in stages:
        assert isinstance(stage, nn.ModuleList)
        for block in stage:
            x_NCHW = block(x_NCHW)
    return x_NCHW


def _pooled(stages: nn.ModuleList, x_NCHW: Tensor) -> Tensor:
    """Every block in turn, then the mean over the last map."""
    return through(stages, x_NCHW).mean(dim=(2, 3))


# -- ResNet-50 of Keras ----------------------------------------------------------------------------------------

_KerasNorm = partial(ConvNorm, bias=True, eps=1e-3)


class ResNet50(nn.Module):
    """Keras's ResNet-50, trained on ImageNet's labels: RGB images in [0, 1] -> 2048 features, a mean over the last map.

    It differs from torch's usual one: a block's stride is in its first 1×1 convolution, convolutions have biases,
    BatchNorm's eps is 1e-3, and the input is BGR in [0, 255] minus a mean (done here, in `forward`).

    Args:
        blocks, width, classes: as published by default; smaller for tests.
    """

    mean_bgr: Tensor

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = _KerasNorm(3, width, 7, stride=2)
        self.stages = _stages(blocks, width, Bottleneck)
        self.classifier = nn.Linear(4 * width * 2 ** (len(blocks) - 1), classes)
        mean = torch.tensor((103.939, 116.779, 123.68)).view(1, 3, 1, 1)
        self.register_buffer("mean_bgr", mean, persistent=False)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Features ``(N, 32 × width)`` of RGB images in [0, 1]."""
        return _pooled(self.stages, self.maps(images_NCHW, 0))

    def maps(self, images_NCHW: Tensor, stages: int) -> Tensor:
        """What the stem and the first ``stages`` stages make of RGB images in [0, 1]."""
        x = F.relu(self.stem(images_NCHW.flip(1) * 255.0 - self.mean_bgr))
        x = F.max_pool2d(x, 3, stride=2, padding=1)  # Keras pads with zeros: the same, after a ReLU
        return through(self.stages[:stages], x)


class Bottleneck(nn.Module):
    """1×1 (with the stride), 3×3, 1×1 to four times the filters; plus the input, projected if shapes change."""

    def __init__(self, channels: int, filters: int, stride: int, project: bool) -> None:
        super().__init__()
        self.reduce, self.middle = _KerasNorm(channels, filters, stride=stride), _KerasNorm(filters, filters, 3)
        self.expand = _KerasNorm(filters, 4 * filters)
        self.shortcut = _KerasNorm(channels, 4 * filters, stride=stride) if project else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Residual sum, then ReLU."""
        shortcut = x_NCHW if self.shortcut is None else self.shortcut(x_NCHW)
        return F.relu(self.expand(F.relu(self.middle(F.relu(self.reduce(x_NCHW))))) + shortcut)


def read_tfjs(path: Path) -> dict[str, Tensor]:
    """The weights of a TensorFlow.js layers model by name, float32, kernels (height, width, in, out).

    A group's shards are one stream of bytes, cut anywhere; its weights follow each other in it without gaps.

    Args:
        path: ``model.json``; the shards lie beside it.
    """
    found: dict[str, Tensor] = {}
    for group in json.loads(path.read_text(encoding="utf-8"))["weightsManifest"]:
        stream = bytearray(b"".join((path.parent / name).read_bytes() for name in group["paths"]))
        shapes = {weight["name"]: weight["shape"] for weight in group["weights"]}
        parts = torch.frombuffer(stream, dtype=torch.float32).split([math.prod(shape) for shape in shapes.values()])
        found |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return found


def from_keras(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Keras's weights under the names and in the layout of ``model``."""
    theirs = {ours: found[_keras_name(ours)] for ours in model.state_dict()}
    return {name: (t.permute(3, 2, 0, 1) if t.ndim == 4 else t.t()).contiguous() for name, t in theirs.items()}


_KERAS_TENSORS = {
    "conv.weight": ("res", "kernel"), "conv.bias": ("res", "bias"), "norm.weight": ("bn", "gamma"),
    "norm.bias": ("bn", "beta"), "norm.running_mean": ("bn", "moving_mean"),
    "norm.running_var": ("bn", "moving_variance"),
}  # fmt: skip
_KERAS_BRANCHES = {"reduce": "branch2a", "middle": "branch2b", "expand": "branch2c", "shortcut": "branch1"}


def _keras_name(ours: str) -> str:
    if ours.startswith("classifier."):
        return "fc1000/kernel" if ours.endswith("weight") else "fc1000/bias"
    where, layer, tensor = ours.rsplit(".", 2)
    kind, tensor = _KERAS_TENSORS[f"{layer}.{tensor}"]
    if where == "stem":
        return f"{'conv1' if kind == 'res' else 'bn_conv1'}/{tensor}"
    _, stage, block, branch = where.split(".")
    return f"{kind}{int(stage) + 2}{chr(ord('a') + int(block))}_{_KERAS_BRANCHES[branch]}/{tensor}"


# -- SimCLRv2 --------------------------------------------------------------------------------------------------


class SimCLRv2(nn.Module):
    """RGB images in [0, 1] -> ``32 × width`` features (4096), the mean over the last map; 140 million parameters.

    ResNet-50, twice as wide, with selective kernels (Chen et al., 2020, https://arxiv.org/abs/2006.10029). The layers
    follow its TensorFlow definition, with its asymmetric "SAME" padding of pools; a port that pads pools on both sides,
    or counts the padding in averages, sees slightly other features from the same weights.

    Args:
        blocks, width, ratio: as published by default; smaller for tests. ``ratio`` is the selective kernels'.
    """

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 128, ratio: float = 0.0625) -> None:
        super().__init__()
        half = width // 2
        self.stem = nn.ModuleList([ConvNorm(3, half, 3, stride=2), ConvNorm(half, half, 3), ConvNorm(half, width, 3)])
        self.stages = _stages(blocks, width, partial(SelectiveBottleneck, ratio))

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Features of RGB images in [0, 1]."""
        x = images_NCHW
        for layer in self.stem:
            x = F.relu(layer(x))
        return _pooled(self.stages, F.max_pool2d(_pad_same(x, 3, 2), 3, stride=2))


class SelectiveBottleneck(nn.Module):
    """1×1, selective 3×3 (with the stride), 1×1 to four times the filters; plus the input, pooled and projected."""

    def __init__(self, ratio: float, channels: int, filters: int, stride: int, project: bool) -> None:
        super().__init__()
        self.stride = stride
        self.reduce, self.expand = ConvNorm(channels, filters), ConvNorm(filters, 4 * filters)
        self.select = SelectiveKernel(filters, stride=stride, ratio=ratio)
        self.shortcut = ConvNorm(channels, 4 * filters) if project else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Residual sum, then ReLU."""
        shortcut = x_NCHW if self.shortcut is None else self.shortcut(_average_pool(x_NCHW, self.stride))
        return F.relu(self.expand(self.select(F.relu(self.reduce(x_NCHW)))) + shortcut)


class SelectiveKernel(nn.Module):
    """Two 3×3 convolutions, mixed per channel by weights that the whole map decides.

    With branches a and b: z = ReLU(norm(W mean(a + b))), and the output is softmax over the two of (A z, B z), applied
    to a and b. (Li et al., https://arxiv.org/abs/1903.06586, with both kernels 3×3, as SimCLRv2 has it.)
    """

    def __init__(self, filters: int, *, stride: int, ratio: float) -> None:
        super().__init__()
        squeezed = max(int(filters * ratio), 32)
        self.branches, self.squeeze = ConvNorm(filters, 2 * filters, 3, stride=stride), ConvNorm(filters, squeezed)
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
    pooled = F.avg_pool2d(F.pad(x_NCHW, (0, 1, 0, 1)), 2, stride=stride)
    inside = x_NCHW.new_ones((1, 1, *x_NCHW.shape[2:]))
    return pooled / F.avg_pool2d(F.pad(inside, (0, 1, 0, 1)), 2, stride=1) if stride == 1 else pooled


def from_converted(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """The encoder in a converted checkpoint (``r50_2x_sk1.pth``, or its tensors as safetensors) as ``model`` names it.

    The projection head and the linear classifier are left out.
    """
    ours = {_converted_name(name): name for name in model.state_dict()}
    held = {name.removeprefix("resnet."): tensor for name, tensor in found.items()}
    return {
        ours.get(name, name): tensor for name, tensor in held.items()
        if not name.startswith(("head.", "fc.")) and not name.endswith(".num_batches_tracked")
    }  # fmt: skip


_CONVERTED = {
    "reduce.conv": "net.0", "reduce.norm": "net.1.0", "select.branches.conv": "net.2.main_conv.0",
    "select.branches.norm": "net.2.main_conv.1.0", "select.squeeze.conv": "net.2.mixing_conv.0",
    "select.squeeze.norm": "net.2.mixing_conv.1.0", "select.mix": "net.2.mixing_conv.2", "expand.conv": "net.3",
    "expand.norm": "net.4.0", "shortcut.conv": "projection.shortcut.2", "shortcut.norm": "projection.bn.0",
}  # fmt: skip
"""Layers of a block here, and in the files of the public converter."""


def _converted_name(ours: str) -> str:
    where, tensor = ours.rsplit(".", 1)
    if where.startswith("stem."):
        _, index, layer = where.split(".")
        return f"net.0.{2 * int(index)}.{tensor}" if layer == "conv" else f"net.0.{2 * int(index) + 1}.0.{tensor}"
    _, stage, block, layer = where.split(".", 3)
    return f"net.{int(stage) + 1}.blocks.{block}.{_CONVERTED[layer]}.{tensor}"
