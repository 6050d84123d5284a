"""What Opacus does with models that need care, beside dpscale: the facts behind the README's table.

    python benchmarks/peers.py

For each model, one sample is added to a batch and the released sum (no noise, clip norm 1) is compared with and without
it: the distance is the sensitivity that was really spent, which must not exceed 1. Or the model is refused.
"""

import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpscale

warnings.filterwarnings("ignore")


class Flattened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x.reshape(-1, 4)).view(len(x), -1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(6, 4), nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.table(x)).mean(1)


class RawScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.a = nn.Parameter(torch.ones(4)), nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x * self.scale)


class FunctionalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(F.batch_norm(self.a(x), None, None, training=True))


def norm_without_affine() -> nn.Module:
    norm = nn.BatchNorm1d(8, affine=False, track_running_stats=False)
    return nn.Sequential(nn.Linear(4, 8), norm, nn.Linear(8, 8))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "plain linear": (lambda: nn.Linear(4, 8), lambda: torch.randn(5, 4)),
    "(B,T,d) flattened to (B·T,d)": (Flattened, lambda: torch.randn(5, 20, 4)),
    "tied embedding and head": (Tied, lambda: torch.randint(0, 6, (5, 7))),
    "raw nn.Parameter on the root": (RawScale, lambda: torch.randn(5, 4)),
    "BatchNorm without affine": (norm_without_affine, lambda: torch.randn(5, 4)),
    "functional batch_norm": (FunctionalNorm, lambda: torch.randn(5, 4)),
}


def ours(model: nn.Module, x: Tensor) -> Tensor:
    out = dpscale.scaled_sum(model, lambda m, b: 100 * m(b[0]).square().flatten(1).sum(1), (x,), dpscale.Clip(C=1.0))
    return torch.cat([g.flatten() for g in out.grads.values()])


def opacus(model: nn.Module, x: Tensor) -> Tensor:
    from opacus import PrivacyEngine
    from torch.utils.data import DataLoader, TensorDataset

    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    loader = DataLoader(TensorDataset(x), batch_size=len(x))
    private, optimizer, _ = PrivacyEngine().make_private(
        module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=0.0, max_grad_norm=1.0,
        poisson_sampling=False, loss_reduction="sum",
    )  # fmt: skip
    (100 * private(x).square().flatten(1).sum(1)).sum().backward()
    optimizer.step()
    return torch.cat([p.summed_grad.flatten() for p in model.parameters()])


def sensitivity(release: Callable[[nn.Module, Tensor], Tensor], make: Callable[[], nn.Module], x: Tensor) -> str:
    def run(rows: Tensor) -> Tensor:
        torch.manual_seed(0)
        return release(make().train(), rows)

    try:
        return f"{(run(x) - run(x[:-1])).norm().item():.2f}"
    except Exception as error:
        return f"refused: {type(error).__name__}"


def main() -> None:
    import opacus as peer

    print(f"sensitivity measured at clip norm 1; Opacus {peer.__version__}, torch {torch.__version__}")
    print(f"{'model':<32}{'dpscale':<28}{'Opacus':<28}")
    for name, (make, inputs) in CASES.items():
        torch.manual_seed(1)
        x = inputs()
        print(f"{name:<32}{sensitivity(ours, make, x):<28}{sensitivity(opacus, make, x):<28}")


if __name__ == "__main__":
    main()
