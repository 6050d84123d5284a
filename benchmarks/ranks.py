"""The loop on several ranks beside plain DistributedDataParallel at the same global batch.

    python benchmarks/loop.py --ranks 2
    python benchmarks/loop.py --ranks 8 --device cuda --models 4-conv-cnn --batch 4096
    python benchmarks/loop.py --ranks 1 --device cuda --models 4-conv-cnn --batch 512 --only compiled   # a group of one

Each starts this script by torchrun. Contenders take turns of many steps, each round in the other direction: a ratio is
the median over rounds of the time relative to plain DDP in the same round, on rank 0. The plain loop takes random
batches of the expected size, and the same share of it on every rank; the private ones take the same draws as each
other. On one rank all are relative to the same compiled steps of a process without a group.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpscale
from contenders import sgd
from harness import NOTES, Row, Step, Table, arguments, insist_compiled, median_ratio, seconds, use
from loop import COLUMNS
from models import TASKS, Task

SAMPLES = 4096


def plain(task: Task, model: nn.Module, data: TensorDataset) -> Step:
    called = DistributedDataParallel(model)
    optimizer, share = sgd(model), task.batch // distributed.get_world_size()
    device = data.tensors[0].device

    def step() -> None:
        chosen = torch.randint(len(data), (share,), device=device)
        x, y = (t[chosen] for t in data.tensors)
        task.losses(called(x), y).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ours(wrap: Callable[[nn.Module], nn.Module], compile: bool = False) -> Callable[..., Step]:
    def make(task: Task, model: nn.Module, data: TensorDataset) -> Step:
        model = wrap(model)
        sampling = dpscale.Poisson(size=len(data), batch=task.batch)
        plan = dpscale.Plan(scaling=dpscale.PSASC(C=1.0, s=0.5, r=1e-3), sampling=sampling, steps=10**7,
                            noise_multiplier=1.0)  # fmt: skip
        private = dpscale.privatize(model, sgd(model), plan, seed=0, compile=compile)
        batches: Iterator[dpscale.Batch] = private.batches(data)

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            return task.losses(model(batch[0]), batch[1])

        return lambda: private.step(next(batches), loss_fn)

    return make


CONTENDERS: dict[str, Callable[..., Step]] = {
    "plain DDP": plain,  # the base of every ratio
    "step, DDP": ours(DistributedDataParallel),
    "step, fully_shard": ours(fully_shard),
    "step compiled, DDP": ours(DistributedDataParallel, compile=True),
}


def measure(name: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one model."""
    alone = os.environ["WORLD_SIZE"] == "1"
    every = {**({"step compiled": ours(lambda model: model, compile=True)} if alone else {}), **CONTENDERS}
    base, *others = every
    contenders = {n: every[n] for n in (base, *(n for n in others if any(part in n for part in args.only.split(","))))}
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else args.device
    task = TASKS[name]
    torch.manual_seed(0)
    data = TensorDataset(*replace(task, batch=SAMPLES).data(device))
    task = replace(task, batch=args.batch)
    steps = []
    for k, make in enumerate(contenders.values()):
        if k == alone and not distributed.is_initialized():  # a process alone has made its step before
            distributed.init_process_group()
        torch.manual_seed(0)
        steps.append(make(task, task.make().to(device), data))
    for step in steps * (100 if args.device == "cuda" else 3):  # until every size was met
        step()
    insist_compiled()
    NOTES.said.clear()
    # Not `turns`, where every rank would choose for itself how many rounds to take.
    times: list[list[float]] = [[] for _ in steps]
    for number in range(args.rounds):
        for k in sorted(range(len(steps)), reverse=number % 2 == 1):
            times[k].append(seconds(steps[k], args.device, args.steps))
    for contender, own in zip(contenders, times, strict=True):
        ratio, *quartiles = median_ratio(own, times[0])
        yield {"item": f"{name}/{args.precision}", "contender": contender, "batch": args.batch, "ratio": ratio,
               "quartiles": quartiles, "milliseconds": 1e3 * statistics.median(own),
               "microseconds_per_sample": 1e6 * statistics.median(own) / args.batch}  # fmt: skip
    if alone:  # several ranks keep theirs: gloo may wait for ever if they meet once more
        distributed.destroy_process_group()


def main() -> None:
    parser = arguments(__doc__, rounds=15)
    parser.add_argument("--models", default="digits-cnn,4-conv-cnn")
    parser.add_argument("--batch", type=int, default=256, help="over all ranks")
    parser.add_argument("--steps", type=int, help="of a turn (10, on CUDA 100)")
    args = parser.parse_args()
    args.steps = args.steps or (100 if args.device == "cuda" else 10)
    if args.precision not in ("fp32", "tf32"):
        parser.error("--precision must be fp32 or tf32 here.")
    use(args.precision)
    torch.set_num_threads(1)
    first = os.environ["RANK"] == "0"
    names = ("model", "loop", "B", "ms/step", "us/sample", "ratio", "quartiles")
    columns = {**COLUMNS, "loop": (18, COLUMNS["loop"][1])}
    table = Table(args, {name: columns[name] for name in names}, 3) if first else None
    for name in args.models.split(","):
        for row in measure(name, args):
            if table is not None:
                table.add(row)
    if distributed.is_initialized():
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
