"""What the host spends on a private step: everything but the computation itself.

    python benchmarks/host.py                              # a small CNN and a ViT
    python benchmarks/host.py --tasks vit-s16 --profile    # and where the time goes
    python benchmarks/host.py --tasks tiny-cnn --eager     # an eager step, with its operations
    python benchmarks/host.py --draws                      # drawing alone, from ever larger data

A step waits for the device once, to learn whether every norm is finite; what the host does from there to the start of
the next step leaves the device idle unless noise and update take longer. Here the compiled step is replaced by its
answer, computed once, and the noise is not drawn: what is left is `private.batches` and `private.step` as users call
them, with momentum and SGD, on tensors of a few numbers each. Processor time of this thread, the least of many runs.
"""

import argparse
import cProfile
import pstats
import sys
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale
import dpscale.noise.fast
from dpscale.chances import Secret
from dpscale.engine import Engine
from dpscale.engine.compile.finite_flag import publish
from dpscale.lab.models import normed_cnn
from dpscale.momentum import HeavyBall
from dpscale.training import Private
from models import GPT2, ViT

STEPS, RUNS = 10, 100


def tiny_cnn() -> nn.Module:
    layers = [nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 10))


TASKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "tiny-cnn": (tiny_cnn, (1, 8, 8)),
    "mnist-cnn": (normed_cnn, (1, 28, 28)),
    "vit-s16": (lambda: ViT(width=12, heads=2, image=32), (3, 32, 32)),
    "gpt2": (lambda: GPT2(vocabulary=101, width=12, heads=2, length=8), (8,)),
}
"""Models with as many tensors and modules as the real ones, and samples."""


def losses(model: Callable[..., Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return F.cross_entropy(out.flatten(1, -2).mean(1) if out.ndim > 2 else out, batch[1], reduction="none")


def answered(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """In place of a compiler: the answer to the first batch, whatever is asked."""
    answer = graph(*inputs)
    yes = torch.tensor(True)

    def run(*_: Tensor) -> Any:
        publish(answer[0], yes)
        return answer

    return run


def stepping(name: str, eager: bool) -> tuple[Callable[[], None], nn.Module]:
    make, shape = TASKS[name]
    torch.manual_seed(0)
    model = make()
    x = torch.randint(0, 100, (64, *shape)) if len(shape) == 1 else torch.randn(64, *shape)
    plan = dpscale.Plan(
        scaling=dpscale.PSASC(C=1.0, s=0.5, r=1e-3), sampling=dpscale.Poisson(size=64, batch=16),
        steps=(RUNS + 20) * STEPS, noise_multiplier=1.0, momentum=HeavyBall(gamma1=0.1),
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, foreach=True)
    private = dpscale.privatize(model, optimizer, plan, seed=0, compile=not eager)
    if not eager:
        private._engine = Engine(model, compile=answered)
    batches = iter(private.batches(TensorDataset(x, torch.randint(0, 10, (64,)))))

    def step() -> None:
        private.step(next(batches), losses)

    for _ in range(3 * STEPS):
        step()
    return step, model


def crossed(step: Callable[[], None]) -> int:
    """Files of the library whose functions are entered in `Private.step`; the fewest of some steps, as some check."""
    package, fewest, inside = str(Path(dpscale.__file__).parent), sys.maxsize, Private.step.__code__
    for _ in range(STEPS):
        files, within = set[str](), False

        def entered(frame: Any, event: str, _: Any, files: set[str] = files) -> None:
            nonlocal within
            if frame.f_code is inside:
                within = event == "call"
            if within and event == "call" and frame.f_code.co_filename.startswith(package):
                files.add(frame.f_code.co_filename)

        sys.setprofile(entered)
        step()
        sys.setprofile(None)
        fewest = min(fewest, len(files))
    return fewest


def draws() -> None:
    """Poisson draws at one rate: those of N = 10⁷ may take no work and no memory that grows with N."""
    print(f"{'draws':<8} {'N':>10} {'rate':>6} {'ms a draw':>10} {'KiB at its peak':>16}")
    for name, source in {"usual": np.random.default_rng, "secure": lambda: Secret(bytes(32))}.items():
        for rate, size in [(1e-4, 10**k) for k in range(4, 8)] + [(1e-6, 10**k) for k in range(7, 10)]:
            drawn = dpscale.Poisson(size=size, batch=max(1, round(rate * size))).draws(source())
            taken = []
            for _ in range(RUNS):
                start = time.thread_time()
                next(drawn)
                taken.append(1e3 * (time.thread_time() - start))
            tracemalloc.start()
            next(drawn)
            peak = tracemalloc.get_traced_memory()[1] / 1024
            tracemalloc.stop()
            print(f"{name:<8} {size:>10} {rate:>6.0e} {np.median(taken):>10.3f} {peak:>16.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=",".join(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--profile", action="store_true", help="list the functions that take longest")
    parser.add_argument("--eager", action="store_true", help="time an eager step, its operations included")
    parser.add_argument("--draws", action="store_true", help="time drawing alone")
    args = parser.parse_args()
    if args.draws:
        draws()
        return
    unknown = sorted(set(args.tasks.split(",")) - set(TASKS))
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Tasks are {', '.join(TASKS)}.")
    torch.set_num_threads(1)
    dpscale.noise.fast._standard_normal = lambda *_: Tensor.zero_
    print(f"torch {torch.__version__}, {'task':<10} {'tensors':>8} {'modules':>8} {'ms a step':>10} {'files':>6}")
    for name in args.tasks.split(","):
        step, model = stepping(name, args.eager)
        taken = []
        for _ in range(RUNS):
            start = time.thread_time()
            for _ in range(STEPS):
                step()
            taken.append(1e3 * (time.thread_time() - start) / STEPS)
        counts = f"{len(list(model.parameters())):>8} {len(list(model.modules())):>8}"
        print(f"{'':<{len(torch.__version__) + 7}} {name:<10} {counts} {min(taken):>10.2f} {crossed(step):>6}")
        if args.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda step=step: [step() for _ in range(STEPS)])
            pstats.Stats(profile).sort_stats("cumulative").print_stats(30)


if __name__ == "__main__":
    main()
