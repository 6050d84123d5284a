"""The optimizer that all contenders have, and what Opacus needs for a step."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from models import Task


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


def opacus_parts(mode: str, task: Task, model: nn.Module, data: TensorDataset) -> tuple[nn.Module, Any, nn.Module]:
    """Opacus's model, optimizer and criterion, for batches that are drawn elsewhere."""
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader

    class Loss(nn.Module):
        reduction = "mean"

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            losses = task.losses(out, y)
            return losses if self.reduction == "none" else losses.mean()

    private, optimizer, *rest = PrivacyEngine().make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3),
        data_loader=DataLoader(data, batch_size=task.batch), noise_multiplier=1.0, max_grad_norm=1.0,
        poisson_sampling=False, grad_sample_mode=mode, **({"criterion": Loss()} if mode == "ghost" else {}),
    )  # fmt: skip
    return private, optimizer, rest[0] if mode == "ghost" else Loss()
