"""What the tests of distributed training run on every rank: `torchrun tests/ranks.py FOLDER RUN...`.

A run is a name of `CASES` or of `FAULTS`. What came of it on a rank is saved in the folder, for the test to compare.
"""

import os
import sys
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpscale

SIZE = 60
CLIP = dpscale.Clip(C=0.5)


def data(size=SIZE):
    g = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(size, 4, generator=g), torch.randint(0, 3, (size,), generator=g))


def mlp(seed=0, width=6):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def interpreted(graph, inputs):
    """In place of a compiler, which takes long: the traced graph as it is."""
    return graph


@dataclass(frozen=True)
class Case:
    """A run to be compared with the same run in one process."""

    wrapper: str = "plain"
    how: str = "step"
    noise: bool = True
    batch: int = 12
    steps: int = 8
    scaling: Any = CLIP
    sampling: Any = None
    momentum: Any = None
    micro_batch: int | None = None
    compile: Any = False
    optimizer: str = "SGD"

    def plan(self):
        noise = {"noise_multiplier": 1.0} if self.noise else {"unsafe_no_noise": True}
        sampling = self.sampling or dpscale.Poisson(size=SIZE, batch=self.batch)
        return dpscale.Plan(scaling=self.scaling, sampling=sampling, steps=self.steps, momentum=self.momentum, **noise)


PLAIN = {
    "long": Case(steps=50),
    "long-ddp": Case(steps=50, wrapper="ddp", how="backward"),
    "psasc-inner-outer": Case(
        scaling=dpscale.PSASC(C=0.5, s=0.5, r=0.01), momentum=dpscale.InnerOuter(K0=2, gamma0=0.5, gamma1=0.2)
    ),
    "psac-disk": Case(scaling=dpscale.PSAC(C=0.5, r=0.01), momentum=dpscale.DiSK(kappa=0.7, gamma=0.5), wrapper="ddp"),
    "autos-heavy-ball": Case(
        scaling=dpscale.AutoS(C=0.5, r=0.01), momentum=dpscale.HeavyBall(gamma1=0.3), wrapper="ddp", how="backward"
    ),
    "per-sample": Case(sampling=dpscale.FullBatch(size=SIZE), momentum=dpscale.PerSampleEMA(gamma=0.3), steps=4),
    "micro": Case(micro_batch=2),
    "empty": Case(batch=3, steps=12),
    "empty-backward": Case(batch=2, steps=12, how="backward", wrapper="ddp"),
    "adam": Case(optimizer="Adam", wrapper="inner"),
    "shuffled": Case(sampling=dpscale.Shuffled(size=SIZE, batch=9), how="backward", wrapper="inner"),
    "fixed": Case(sampling=dpscale.FixedSize(size=SIZE, batch=7), wrapper="closure"),
    "traced": Case(compile=interpreted, wrapper="ddp"),
}
SHARDED = {
    "fsdp-" + name: replace(PLAIN[name], wrapper="fsdp", noise=False)
    for name in ("long", "psasc-inner-outer", "psac-disk", "autos-heavy-ball", "per-sample", "micro", "empty",
                 "empty-backward", "adam", "shuffled", "traced")
}  # fmt: skip
SHARDED["fsdp-layers"] = Case(wrapper="fsdp-layers", noise=False)
SHARDED["fsdp-some"] = Case(wrapper="fsdp-some", noise=False, how="backward")
SHARDED["fsdp-noise"] = Case(wrapper="fsdp", steps=2)
CASES = PLAIN | SHARDED
ON = {2: tuple(CASES), 4: ("long", "long-ddp", "psasc-inner-outer", "per-sample", "micro", "empty", "empty-backward",
                          "fsdp-long", "fsdp-empty", "fsdp-empty-backward", "fsdp-some", "fsdp-noise")}  # fmt: skip
"""Which are run on how many ranks."""


def wrap(model, wrapper):
    """(What the script calls, what it passes to privatize.)"""
    if not distributed.is_initialized() or wrapper == "plain":
        return model, model
    if wrapper.startswith("fsdp"):
        layers = {"fsdp": [model], "fsdp-layers": [model[0], model[2], model], "fsdp-some": [model[0], model[4]]}
        for layer in layers[wrapper]:
            fully_shard(layer)
        return model, model
    wrapped = DistributedDataParallel(model)
    return wrapped, model if wrapper == "inner" else wrapped


def whole(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def train(case):
    called, given = wrap(mlp(), case.wrapper)
    optimizer = getattr(torch.optim, case.optimizer)(given.parameters(), lr=0.05)
    private = dpscale.privatize(
        given, optimizer, case.plan(), seed=7, micro_batch=case.micro_batch, compile=case.compile
    )
    loss = (lambda _, batch: loss_fn(called, batch)) if case.wrapper == "closure" else loss_fn
    drawn = []
    for batch in private.batches(data()):
        drawn.append(batch.draw.indices.tolist())
        if case.how == "step":
            private.step(batch, loss)
        else:
            private.backward(loss(called, batch), batch)
            optimizer.step()
            optimizer.zero_grad()
    parameters = torch.cat([whole(p).detach().flatten() for p in given.parameters()])
    shards = {n: type(p).__name__ for n, p in given.named_parameters()}
    with torch.no_grad():  # an evaluation, as ever
        outputs = called(data()[:][0])
    kept = {type(v).__name__ for each in optimizer.state.values() for v in each.values() if v is not None and v.ndim}
    return {
        "drawn": drawn, "parameters": parameters, "outputs": outputs, "steps": private.steps_taken, "shards": shards,
        "state": kept, "epsilon": private.epsilon(1e-3) if case.steps == 50 and case.noise else None,
    }  # fmt: skip


FAULTS = {}


def main(folder, *names):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PATIENCE", "60"))))
    torch.set_num_threads(1)
    rank = distributed.get_rank()
    for name in names:
        try:
            found = train(CASES[name]) if name in CASES else FAULTS[name](rank)
        except Exception as error:
            if name in CASES:
                raise
            found = f"{type(error).__name__}: {error}"
        torch.save(found, Path(folder) / f"{name}-{rank}.pt")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
