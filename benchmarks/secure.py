"""What cryptographic noise costs: numbers a second beside the fast source, and its share of a private step.

    python benchmarks/secure.py                         # on the CPU: the digits CNN
    python benchmarks/secure.py --device cuda           # the 4-conv CNN and GPT-2 small, TF32; a minute
    python benchmarks/secure.py --device cuda --tune    # the kernel's shapes, alone

Numbers a second are those of `Noise.add` on one tensor, sums read and written. On CUDA all times are between events.
The share of a step is the time of adding the noise to sums of the model's shapes, over that of a whole private step
with the same source. The two sources take turns in one run, which is compiled once.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale
import harness
from dpscale.noise import Key, kernel, noise_from
from models import TASKS, Task

SOURCES = ("fast", "secure")
RUNS = {"cpu": ("digits-cnn",), "cuda": ("4-conv-cnn", "gpt2")}
SIZES = {"cpu": (1 << 20, 1 << 23), "cuda": (1 << 16, 1 << 20, 1 << 24, 124_439_808)}
SHAPES = [(128, 4), (256, 4), (512, 4), (64, 2), (128, 2), (256, 8), (512, 8), (1024, 8)]


def seconds(work: Callable[[], Any], device: str, rounds: int = 15) -> float:
    """Of one call, the median over rounds; on CUDA the time between events, with the launches in it."""
    work()
    if device == "cpu":
        return statistics.median(harness.seconds(work, device) for _ in range(5))
    taken = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        taken.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(taken)


def speed(device: str) -> Iterator[str]:
    yield f"{'numbers':>12} " + " ".join(f"{name + ', ns each':>18} {'10⁹/s':>8}" for name in SOURCES)
    for size in SIZES[device]:
        sums, row = {"w": torch.zeros(size, device=device)}, f"{size:12,} "
        for name in SOURCES:
            noise = noise_from(name, Key(0))
            taken = seconds(lambda noise=noise, sums=sums: noise.add(sums, 1.0, 1), device)
            row += f"{1e9 * taken / size:18.4f} {size / taken / 1e9:8.3f} "
        yield row


def tuned() -> Iterator[str]:
    yield "kernel alone, 2²⁶ numbers: lanes, warps, ms, 10⁹/s"
    flat = torch.zeros(1 << 26, device="cuda")
    for lanes, warps in SHAPES:
        taken = seconds(partial(kernel.add_, flat, bytes(32), 0, 1.0, lanes, warps), "cuda")
        yield f"{lanes:6} {warps:3} {1e3 * taken:8.3f} {len(flat) / taken / 1e9:8.2f}"


def run_of(task: Task, device: str) -> tuple[Any, Callable[[], Any]]:
    """A private run of the task's model, and its step."""
    data = TensorDataset(*(torch.cat([t] * 8) for t in task.data(device)))
    model = task.make().to(device)
    plan = dpscale.Plan(
        scaling=dpscale.PSASC(C=1.0, s=0.5, r=1e-3), sampling=dpscale.Poisson(size=len(data), batch=task.batch),
        steps=10**7, noise_multiplier=1.0,
    )  # fmt: skip
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=1e-4), plan)
    batches = iter(private.batches(data))

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        return task.losses(model(batch[0]), batch[1])

    return private, lambda: private.step(next(batches), loss_fn)


def shares(name: str, device: str) -> Iterator[str]:
    private, step = run_of(TASKS[name], device)
    for _ in range(5):
        step()
    sums = {n: torch.zeros_like(p) for n, p in private.model.named_parameters()}
    count = sum(t.numel() for t in sums.values())
    sources = {each: noise_from(each, Key(0)) for each in SOURCES}

    def step_with(source: str) -> None:
        private._state.noise = sources[source]
        step()

    steps = [lambda each=each: step_with(each) for each in SOURCES]
    taken = harness.turns(steps, device, 20)
    for source, times in zip(SOURCES, taken, strict=True):
        whole = statistics.median(times)
        noise = seconds(lambda source=source: sources[source].add(sums, 1.0, 1), device)
        yield (
            f"{name:>12} {count:12,} {TASKS[name].batch:6} {source:>7} {1e3 * whole:10.3f} {1e3 * noise:10.3f} "
            f"{100 * noise / whole:8.2f}%"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--tune", action="store_true", help="time the kernel's shapes, and nothing else")
    args = parser.parse_args()
    harness.use("tf32" if args.device == "cuda" else "fp32")
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    print(f"torch {torch.__version__}, {where}")
    if args.tune:
        print(*tuned(), sep="\n")
        return
    for line in speed(args.device):
        print(line, flush=True)
    names = "step of", "parameters", "batch", "source", "step, ms", "noise, ms", "share"
    print(f"\n{' '.join(map(str.rjust, names, (12, 12, 6, 7, 10, 10, 9)))}")
    for name in RUNS[args.device]:
        for line in shares(name, args.device):
            print(line, flush=True)


if __name__ == "__main__":
    main()
