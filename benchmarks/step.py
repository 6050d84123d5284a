"""Time of one training step beside plain PyTorch and Opacus, all in one run.

    python benchmarks/step.py                       # digits CNN and the 4-conv CNN, B = 256, CPU
    python benchmarks/step.py --json results.json
    python benchmarks/step.py --device cuda --batch 512

Every row is a whole step (forward, backward, scaling, noise, SGD update) on the same batch. The contenders take
turns, round by round, so that a busy machine slows them all alike; the figure is the median over rounds of the time
relative to plain PyTorch in the same round. Peak memory is the allocator's on CUDA and is not measured on the CPU.
"""

import argparse
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpscale
from dpscale.lab.models import digits_cnn, paper_cnn
from dpscale.noise import Key, add_noise

MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "digits-cnn": (digits_cnn, (1, 8, 8)),
    "4-conv-cnn": (paper_cnn, (1, 28, 28)),
}
Step = Callable[[], None]


def plain(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(model: nn.Module, x: Tensor, y: Tensor) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rule, key, count = dpscale.Clip(C=1.0), Key(), [0]

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def step() -> None:
        count[0] += 1
        out = dpscale.scaled_sum(model, loss_fn, (x, y), rule)
        noisy = add_noise(out.grads, 1.0, key, count[0])
        for name, p in model.named_parameters():
            p.grad = noisy[name] / len(x)
        optimizer.step()
        optimizer.zero_grad()

    return step


def opacus(mode: str) -> Callable[[nn.Module, Tensor, Tensor], Step]:
    def make(model: nn.Module, x: Tensor, y: Tensor) -> Step:
        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        made = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=1.0, max_grad_norm=1.0,
            poisson_sampling=False, grad_sample_mode=mode,
            **({"criterion": nn.CrossEntropyLoss()} if mode == "ghost" else {}),
        )  # fmt: skip
        private, optimizer, *rest = made
        criterion = rest[0] if mode == "ghost" else F.cross_entropy

        def step() -> None:
            optimizer.zero_grad()
            criterion(private(x), y).backward()
            optimizer.step()

        return step

    return make


CONTENDERS: dict[str, Callable[[nn.Module, Tensor, Tensor], Step]] = {
    "plain PyTorch": plain,
    "dpscale": ours,
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
}


def measure(name: str, batch: int, device: str, rounds: int) -> list[dict[str, object]]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    x, y = torch.randn(batch, *shape, device=device), torch.randint(0, 10, (batch,), device=device)
    steps: dict[str, Step] = {}
    for contender, build in CONTENDERS.items():
        try:
            steps[contender] = build(make().to(device), x, y)
            steps[contender]()
        except ImportError as error:
            print(f"left out: {contender} ({error}); pip install 'dpscale[bench]'", file=sys.stderr)
            steps.pop(contender, None)
    times: dict[str, list[float]] = {c: [] for c in steps}
    memory: dict[str, int] = {}
    for _ in range(rounds + 3):
        for contender, step in steps.items():
            if device == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            step()
            if device == "cuda":
                torch.cuda.synchronize()
                memory[contender] = torch.cuda.max_memory_allocated()
            times[contender].append(time.perf_counter() - start)
    rows: list[dict[str, object]] = []
    for contender, seconds in times.items():
        seconds, base = seconds[3:], times["plain PyTorch"][3:]  # three rounds of warm-up
        ratios = sorted(s / b for s, b in zip(seconds, base, strict=True))
        rows.append(
            {
                "model": name,
                "contender": contender,
                "milliseconds": 1e3 * statistics.median(seconds),
                "ratio": statistics.median(ratios),
                "ratio_quartiles": [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]],
                "peak_bytes": memory.get(contender),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="opacus")
    warnings.filterwarnings("ignore", message=".*backward hook.*")
    chip = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {chip}, B = {args.batch}, {args.rounds} rounds"
    )
    print(f"{'model':<12}{'contender':<16}{'ms/step':>9}{'x plain':>9}{'quartiles':>14}{'peak MiB':>10}")
    rows = []
    for name in MODELS:
        for row in measure(name, args.batch, args.device, args.rounds):
            rows.append(row)
            low, high = row["ratio_quartiles"]
            peak = f"{row['peak_bytes'] / 2**20:.0f}" if row["peak_bytes"] else "-"
            print(
                f"{row['model']:<12}{row['contender']:<16}{row['milliseconds']:>9.2f}{row['ratio']:>9.2f}"
                f"{f'{low:.2f}-{high:.2f}':>14}{peak:>10}"
            )
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
