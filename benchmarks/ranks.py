"""The loop on several ranks beside plain DistributedDataParallel at the same global batch.

    torchrun --standalone --nproc-per-node 2 benchmarks/ranks.py
    torchrun --standalone --nproc-per-node 8 benchmarks/ranks.py --device cuda --models 4-conv-cnn --batch 4096
    torchrun --standalone --nproc-per-node 1 benchmarks/ranks.py --device cuda    # what a group of one costs

Contenders take turns, as in loop.py: a ratio is the median over rounds of the time relative to plain DDP in the same
round, on rank 0. The plain loop takes random batches of the expected size, and the same share of it on every rank. On
one rank all are relative to the same compiled steps of a process without a group.
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpscale
from contenders import sgd
from harness import Step, median_ratio, seconds
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
        private = dpscale.privatize(model, sgd(model), plan, compile=compile)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--models", default="digits-cnn,4-conv-cnn")
    parser.add_argument("--batch", type=int, default=256, help="over all ranks")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1, help="of a turn (%(default)s)")
    args = parser.parse_args()
    alone = os.environ["WORLD_SIZE"] == "1"
    contenders = {**({"step compiled": ours(lambda model: model, compile=True)} if alone else {}), **CONTENDERS}
    device = f"cuda:{os.environ['LOCAL_RANK']}" if args.device == "cuda" else args.device
    torch.set_num_threads(1)
    for name in args.models.split(","):
        task = TASKS[name]
        torch.manual_seed(0)
        data = TensorDataset(*Task(task.make, task.shape, SAMPLES, task.classes, task.tokens).data(device))
        task = Task(task.make, task.shape, args.batch, task.classes, task.tokens)
        steps = []
        for k, make in enumerate(contenders.values()):
            if k == alone:  # the step of a process alone was made before there was a group
                distributed.init_process_group()
            torch.manual_seed(0)
            steps.append(make(task, task.make().to(device), data))
        for step in steps * (100 if args.device == "cuda" else 3):  # until every size was met
            step()
        # Not `turns`, where every rank would choose for itself how many rounds to take.
        turns = [lambda step=step: [step() for _ in range(args.steps)] for step in steps]
        rounds = [[seconds(turn, args.device) / args.steps for turn in turns] for _ in range(args.rounds)]
        times = list(zip(*rounds, strict=True))
        if distributed.get_rank() == 0:
            for contender, own in zip(contenders, times, strict=True):
                ratio, low, high = median_ratio(own, times[0])
                milliseconds = 1e3 * statistics.median(own)
                print(f"{name:12} {contender:20} {milliseconds:8.1f} ms  {ratio:.2f}x ({low:.2f} to {high:.2f})")
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
