"""Steps on one batch, from a task, a model and the batch; and what Opacus needs for a step."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.engine import Engine
from dpscale.noise import Key, Noise
from harness import Context, Step
from models import Task


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3, foreach=True)


def plain(compiled: bool) -> Callable[..., Step]:
    def make(task: Task, model: nn.Module, x: Tensor, y: Tensor, cast: Context) -> Step:
        optimizer = sgd(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            with cast():
                return task.losses(model(x), y).mean()

        cuda_graphs = {"mode": "reduce-overhead"} if x.is_cuda else {}
        run = torch.compile(loss, dynamic=False, **cuda_graphs) if compiled else loss

        def step() -> None:
            run(x, y).backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def ours(compiled: bool) -> Callable[..., Step]:
    def make(task: Task, model: nn.Module, x: Tensor, y: Tensor, cast: Context) -> Step:
        optimizer, fast = sgd(model), Engine(model, compile=True).scaled_sum
        rule, noise, count = dpscale.PSASC(C=1.0, s=0.5, r=1e-3), Noise(Key()), [0]
        mask = torch.ones(len(x), dtype=torch.bool, device=x.device)
        parameters = dict(model.named_parameters())

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            with cast():
                return task.losses(model(batch[0]), batch[1])

        def step() -> None:
            count[0] += 1
            if compiled:
                out = fast(loss_fn, (x, y), rule, mask)
            else:
                out = dpscale.scaled_sum(model, loss_fn, (x, y), rule, mask)
            noise.add(out.grads, 1.0, count[0])
            torch._foreach_div_(list(out.grads.values()), len(x))
            for name, mean in out.grads.items():
                parameters[name].grad = mean
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


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
