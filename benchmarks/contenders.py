"""Who is timed: for each, from a task, a model and a batch to one whole training step."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

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


def opacus(mode: str) -> Callable[..., Step]:
    def make(task: Task, model: nn.Module, x: Tensor, y: Tensor, cast: Context) -> Step:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        class Loss(nn.Module):
            reduction = "mean"

            def forward(self, out: Tensor, y: Tensor) -> Tensor:
                losses = task.losses(out, y)
                return losses if self.reduction == "none" else losses.mean()

        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        made = PrivacyEngine().make_private(
            module=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-3), data_loader=loader,
            noise_multiplier=1.0, max_grad_norm=1.0, poisson_sampling=False, grad_sample_mode=mode,
            **({"criterion": Loss()} if mode == "ghost" else {}),
        )  # fmt: skip
        private, optimizer, *rest = made
        criterion = rest[0] if mode == "ghost" else Loss()

        def step() -> None:
            optimizer.zero_grad()
            with cast():
                loss = criterion(private(x), y)
            loss.backward()
            optimizer.step()

        return step

    return make


def vmapped(task: Task, model: nn.Module, x: Tensor, y: Tensor, cast: Context) -> Step:
    """vmap(grad): every sample's whole gradient."""
    optimizer = sgd(model)
    parameters = dict(model.named_parameters())

    def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        with cast():
            return task.losses(torch.func.functional_call(model, values, (x[None],)), y[None])[0]

    gradient = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))

    def step() -> None:
        grads = gradient({n: p.detach() for n, p in parameters.items()}, x, y)
        norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
        weights = 1 / norms.clamp(min=1)
        for n, p in parameters.items():
            p.grad = (torch.einsum("b,b...->...", weights, grads[n]) + torch.randn_like(p)) / len(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


CONTENDERS: dict[str, Callable[..., Step]] = {
    "plain compiled": plain(True),  # the base of every ratio comes first
    "plain": plain(False),
    "dpscale compiled": ours(True),
    "dpscale": ours(False),
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
    "vmap(grad)": vmapped,
}
COMPILED = ("plain compiled", "dpscale compiled")
BASES = ("plain compiled", "plain")
