"""ResNet-50 trained on ImageNet's labels, as Keras defines it (version 1, the weights of its authors)."""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.lab.encoders.layers import ConvNorm, pooled, stages

_EPS = 1e-3
_MEAN_BGR = (103.939, 116.779, 123.68)


class ResNet50(nn.Module):
    """Keras's ResNet-50: RGB images in [0, 1] -> 2048 features, the mean over the last map.

    It differs from torch's usual one: a block's stride is in its first 1×1 convolution, convolutions have biases,
    BatchNorm's eps is 1e-3, and the input is BGR in [0, 255] minus a mean (done here, in `forward`).

    Args:
        blocks, width, classes: as published by default; smaller for tests.
    """

    mean_bgr: Tensor

    def __init__(self, blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> None:
        super().__init__()
        self.stem = ConvNorm(3, width, 7, stride=2, bias=True, eps=_EPS)
        self.stages = stages(blocks, width, Bottleneck)
        self.classifier = nn.Linear(4 * width * 2 ** (len(blocks) - 1), classes)
        self.register_buffer("mean_bgr", torch.tensor(_MEAN_BGR).view(1, 3, 1, 1), persistent=False)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Features ``(N, 32 × width)`` of RGB images in [0, 1]."""
        x = images_NCHW.flip(1) * 255.0 - self.mean_bgr
        x = F.relu(self.stem(x))
        x = F.max_pool2d(x, 3, stride=2, padding=1)  # Keras pads with zeros: the same, after a ReLU
        return pooled(self.stages, x)

    def classify(self, images_NCHW: Tensor) -> Tensor:
        """Logits over ImageNet's classes, in the usual order."""
        logits: Tensor = self.classifier(self(images_NCHW))
        return logits


class Bottleneck(nn.Module):
    """1×1 (with the stride), 3×3, 1×1 to four times the filters; plus the input, projected if shapes change."""

    def __init__(self, channels: int, filters: int, stride: int, project: bool) -> None:
        super().__init__()
        self.reduce = ConvNorm(channels, filters, stride=stride, bias=True, eps=_EPS)
        self.middle = ConvNorm(filters, filters, 3, bias=True, eps=_EPS)
        self.expand = ConvNorm(filters, 4 * filters, bias=True, eps=_EPS)
        self.shortcut = ConvNorm(channels, 4 * filters, stride=stride, bias=True, eps=_EPS) if project else None

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Residual sum, then ReLU."""
        shortcut = x_NCHW if self.shortcut is None else self.shortcut(x_NCHW)
        x = F.relu(self.reduce(x_NCHW))
        x = F.relu(self.middle(x))
        return F.relu(self.expand(x) + shortcut)


def from_keras(found: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Keras's weights under the names and in the layout of ``model``."""
    return {ours: _torch_layout(found[_keras_name(ours)]) for ours in model.state_dict()}


_KERAS_TENSORS = {
    "conv.weight": ("res", "kernel"),
    "conv.bias": ("res", "bias"),
    "norm.weight": ("bn", "gamma"),
    "norm.bias": ("bn", "beta"),
    "norm.running_mean": ("bn", "moving_mean"),
    "norm.running_var": ("bn", "moving_variance"),
}
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


def _torch_layout(tensor: Tensor) -> Tensor:
    return (tensor.permute(3, 2, 0, 1) if tensor.ndim == 4 else tensor.t()).contiguous()
