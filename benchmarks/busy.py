"""How busy the lab's own runs keep a GPU: of the time of a step, sampling and data included, what its kernels take.

    python benchmarks/busy.py mnist                          # DP-PSAC, 300 steps
    python benchmarks/busy.py celeba-male --method dp-psasc-star --steps 30
    python benchmarks/busy.py digits                         # on the CPU: the time of a step alone

The steps are those of `dpscale train`, one run alone on the machine, without the measurements in between. Half of them
are timed by the clock before and half after torch's profiler adds up the kernels and copies of a tenth as many.
"""

import argparse
import math
import statistics

import torch

import harness
from dpscale.lab import runner
from dpscale.lab.presets import METHODS, PRESETS
from dpscale.lab.provenance import installed_versions
from dpscale.lab.runner import Job

WARM = 5  # the first step compiles


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("preset", help=f"one of {', '.join(PRESETS)}")
    parser.add_argument("--method", default="dp-psac", help=f"one of {', '.join(METHODS)}; default: dp-psac")
    parser.add_argument("--steps", type=int, default=300, help="steps that are timed, default: 300")
    args = parser.parse_args()
    try:
        config, chosen = PRESETS[args.preset], METHODS[args.method]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    if args.steps < 20:
        raise SystemExit(f"--steps is {args.steps}, not an integer >= 20.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_num_threads(1)  # as in the lab
    part = args.steps // 10
    enough = math.ceil((WARM + 11 * part) * config.batch / runner.whole(config).size) + 1
    config = config.replace(epochs=max(enough, config.epochs), precision=None if device == "cuda" else "float32")
    steps = runner.steps(
        Job(config=config, method=chosen.name, seed=0, choice=config.given(chosen), noise_multiplier=1.0)
    )

    def step() -> None:
        next(steps)

    for _ in range(WARM):
        step()
    taken = [harness.seconds(step, device, part) for _ in range(5)]
    busy = harness.busy(step, part) if device == "cuda" else None
    taken += [harness.seconds(step, device, part) for _ in range(5)]
    wall = statistics.median(taken)
    shown = f"{1e3 * wall:.2f} ms a step (median of 10 times {part}, {1e3 * min(taken):.2f} to {1e3 * max(taken):.2f})"
    if busy is not None:
        shown += f", of which {1e3 * busy:.2f} ms are kernels and copies: {100 * busy / wall:.0f}%"
    where = torch.cuda.get_device_name() if device == "cuda" else installed_versions()["cpu"]
    print(f"{args.preset}, {chosen.title}, {config.precision}, torch {torch.__version__}, {where}: {shown}")


if __name__ == "__main__":
    main()
