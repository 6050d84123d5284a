"""A public network whose last stages are trained on, with its BatchNorm frozen at its public statistics.

Frozen, BatchNorm is a fixed affine map of each channel: no sample sees another one.
"""

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.lab.datasets.folder import checksum
from dpscale.lab.encoders import registry
from dpscale.lab.encoders.features import prepare


class FineTuned(nn.Module):
    """An encoder and a linear layer that starts at zero; the convolutions of the last ``stages`` are trained too.

    Images, RGB in [0, 1], are enlarged to ``size`` × ``size``; features are divided by their norm, as for a probe.
    """

    def __init__(self, encoder: registry.Encoder, classes: int, *, stages: int, size: int = 160) -> None:
        super().__init__()
        self.public, self.size = encoder, size
        self.provenance: dict[str, str] = {}
        self.body = encoder.build().requires_grad_(False)
        assert isinstance(self.body.stages, nn.ModuleList)
        for layer in self.body.stages[-stages:].modules():
            if isinstance(layer, nn.Conv2d):
                layer.requires_grad_(True)
        self.head = nn.Linear(encoder.features, classes)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, images_NCHW: Tensor) -> Tensor:
        """Logits."""
        features = self.body(prepare(images_NCHW, self.size))
        logits: Tensor = self.head(F.normalize(features.float(), dim=1))
        return logits

    def load_public(self, folder: Path) -> None:
        """Take the encoder's weights from the data folder; they are fetched if a registry has them."""
        path = registry.checkpoint(self.public, folder)
        self.body.load_state_dict(self.public.load(path).state_dict())
        self.provenance = {"weights": self.public.name, "weights_sha256": checksum(path, "sha256")}
