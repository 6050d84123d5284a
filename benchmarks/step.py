"""Time and memory of one training step beside plain PyTorch and Opacus, all in one run.

    python benchmarks/step.py                                          # digits and 4-conv CNN, B = 256, on the CPU
    python benchmarks/step.py --device cuda --tasks all --precision tf32
    python benchmarks/step.py --device cuda --tasks gpt2,vit-s16 --precision bf16 --json results.json

Every row is a whole step (forward, backward, scaling, noise, SGD update) on the same batch. The contenders take turns,
round by round, so that a busy machine slows them all alike; a ratio is the median over rounds of the time relative to
the same round of the compiled (or, without it, the eager) plain step. Memory is what the CUDA allocator has reserved
for a step, model and batch included. Cold start is the time of the first two steps.
"""

import argparse
import contextlib
import gc
import json
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dpscale
from dpscale.engine.compiled import Fast
from dpscale.noise import Key, add_noise
from models import TASKS, Task

Step = Callable[[], None]
Context = Callable[[], contextlib.AbstractContextManager[Any]]


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
        optimizer, fast = sgd(model), Fast(model)
        rule, key, count = dpscale.PSASC(C=1.0, s=0.5, r=1e-3), Key(), [0]
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
            noisy = add_noise(out.grads, 1.0, key, count[0])
            for (name, _), mean in zip(noisy.items(), torch._foreach_div(list(noisy.values()), len(x)), strict=True):
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
    "plain": plain(False),
    "plain compiled": plain(True),
    "dpscale": ours(False),
    "dpscale compiled": ours(True),
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
    "vmap(grad)": vmapped,
}


def measure(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    task, cuda = TASKS[name], args.device == "cuda"
    if args.batch:
        task = Task(task.make, task.shape, args.batch, task.classes)
    cast: Context = lambda: torch.autocast(args.device, torch.bfloat16, enabled=args.precision == "bf16")  # noqa: E731
    rows: list[dict[str, Any]] = []
    steps: dict[str, Step] = {}
    for contender in args.contenders:
        torch.manual_seed(0)
        gc.collect()
        if cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_reserved() if cuda else 0
        row: dict[str, Any] = {"task": name, "contender": contender, "precision": args.precision}
        rows.append(row)
        try:
            x, y = task.data(args.device)
            step = CONTENDERS[contender](task, task.make().to(args.device), x, y, cast)
            start = time.perf_counter()
            step()
            step()
            if cuda:
                torch.cuda.synchronize()
            row["cold_seconds"] = time.perf_counter() - start
            if cuda:  # reserved, not allocated: what a CUDA graph holds for itself counts too
                torch.cuda.synchronize()
                gc.collect()
                torch.cuda.empty_cache()
                step()
                torch.cuda.synchronize()
                row["peak_mib"] = (torch.cuda.memory_reserved() - held) / 2**20
            steps[contender] = step
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {str(error).splitlines()[0][:80] if str(error) else ''}"
    times: dict[str, list[float]] = {c: [] for c in steps}
    for k in range(args.rounds + 2):
        for contender, step in steps.items():
            if cuda:
                torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            if cuda:
                torch.cuda.synchronize()
            if k >= 2:  # two rounds of warm-up
                times[contender].append(time.perf_counter() - start)
    base = "plain compiled" if "plain compiled" in times else "plain"
    for row in rows:
        seconds = times.get(row["contender"])
        if seconds:
            ratios = sorted(s / b for s, b in zip(seconds, times[base], strict=True))
            row["milliseconds"] = 1e3 * statistics.median(seconds)
            row["ratio"] = statistics.median(ratios)
            row["quartiles"] = [ratios[len(ratios) // 4], ratios[3 * len(ratios) // 4]]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="digits-cnn,4-conv-cnn", help=f"of {', '.join(TASKS)}, or all")
    parser.add_argument("--contenders", default=None, help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--batch", type=int, default=None, help="another batch size than the task's")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "tf32", "bf16"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()
    args.contenders = args.contenders.split(",") if args.contenders else list(CONTENDERS)
    tasks = list(TASKS) if args.tasks == "all" else args.tasks.split(",")
    warnings.filterwarnings("ignore")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = args.precision != "fp32"
    chip = torch.cuda.get_device_name() if args.device == "cuda" else f"{torch.get_num_threads()} CPU threads"
    print(
        f"torch {torch.__version__}, python {platform.python_version()}, {chip}, {args.precision}, {args.rounds} rounds"
    )
    print(f"{'task':<12}{'contender':<18}{'ms/step':>9}{'ratio':>7}{'quartiles':>12}{'peak MiB':>10}{'cold s':>8}")
    rows: list[dict[str, Any]] = []
    for name in tasks:
        for row in measure(name, args):
            rows.append(row)
            if "error" in row:
                print(f"{row['task']:<12}{row['contender']:<18}  {row['error']}", flush=True)
                continue
            low, high = row["quartiles"]
            peak = f"{row['peak_mib']:.0f}" if "peak_mib" in row else "-"
            print(
                f"{row['task']:<12}{row['contender']:<18}{row['milliseconds']:>9.2f}{row['ratio']:>7.2f}"
                f"{f'{low:.2f}-{high:.2f}':>12}{peak:>10}{row['cold_seconds']:>8.1f}",
                flush=True,
            )
        gc.collect()
        torch._dynamo.reset()
    if args.json:
        args.json.write_text(json.dumps({"command": sys.argv, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
