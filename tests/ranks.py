"""What the tests of distributed training run on every rank: `torchrun tests/ranks.py FOLDER RUN...`.

A run is a name of `CASES` or of `FAULTS`. What came of it on a rank is saved in the folder, for the test to compare.
"""

import contextlib
import logging
import os
import queue
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import dpscale
from dpscale.sharding import buckets

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
    source: str = "fast"
    batch: int = 12
    steps: int = 8
    scaling: Any = CLIP
    sampling: Any = None
    momentum: Any = None
    micro_batch: int | None = None
    compile: Any = False
    optimizer: str = "SGD"
    model: Any = mlp
    records: int | None = None  # of each person, who has three

    def plan(self):
        noise = {"noise_multiplier": 1.0} if self.noise else {"unsafe_no_noise": True}
        sampling = self.sampling or dpscale.Poisson(size=SIZE // 3 if self.records else SIZE, batch=self.batch)
        return dpscale.Plan(scaling=self.scaling, sampling=sampling, steps=self.steps, momentum=self.momentum, **noise)


def dataset(case):
    rows = data(case.plan().sampling.size * (3 if case.records else 1))
    owners = torch.randperm(len(rows), generator=torch.Generator().manual_seed(3)) // 3
    return rows if case.records is None else dpscale.by_user(rows, owners, records=case.records)


def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
            self.outer.weight = self.inner.weight

        def forward(self, x):
            return self.outer(torch.tanh(self.inner(x)))[:, :3]

    torch.manual_seed(0)
    return Tied()


def partly():
    """Frozen parameters, some that no forward meets, and one that is smaller than the number of ranks."""

    class Partly(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.idle, self.scale = mlp(), nn.Linear(3, 3), nn.Parameter(torch.ones(1))
            self.inner[0].requires_grad_(False)

        def forward(self, x):
            return self.inner(x) * self.scale

    return Partly()


EMA = dpscale.PerSampleEMA(gamma=0.3)
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
    "per-sample": Case(sampling=dpscale.FullBatch(size=SIZE), momentum=EMA, steps=4),
    "psasc-per-sample-micro": Case(
        scaling=dpscale.PSASC(C=0.5, s=0.5),
        sampling=dpscale.FullBatch(size=SIZE - 1),
        momentum=EMA,
        steps=4,
        micro_batch=4,
        wrapper="ddp",
    ),
    "psac-window": Case(
        scaling=dpscale.PSAC(C=0.5),
        sampling=dpscale.FullBatch(size=SIZE),
        steps=4,
        micro_batch=7,
        momentum=replace(EMA, keep="weights", tolerance=0.4),
    ),
    "psasc-inner-outer-micro-empty": Case(
        scaling=dpscale.PSASC(C=0.5, s=0.5),
        momentum=dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.2),
        batch=3,
        micro_batch=1,
        steps=12,
        wrapper="ddp",
    ),
    "autos-disk-traced-empty": Case(
        scaling=dpscale.AutoS(C=0.5), momentum=dpscale.DiSK(kappa=0.7, gamma=0.5), batch=3, compile=interpreted
    ),
    "psac-heavy-ball-empty-backward": Case(
        scaling=dpscale.PSAC(C=0.5), momentum=dpscale.HeavyBall(gamma1=0.3), batch=2, steps=12, how="backward"
    ),
    "tied": Case(model=tied, how="backward", wrapper="ddp"),
    "partly": Case(model=partly, optimizer="Adam", wrapper="ddp", how="backward"),
    "micro": Case(micro_batch=2),
    "empty": Case(batch=3, steps=12),
    "empty-backward": Case(batch=2, steps=12, how="backward", wrapper="ddp"),
    "adam": Case(optimizer="Adam", wrapper="inner"),
    "shuffled": Case(sampling=dpscale.Shuffled(size=SIZE, batch=9), how="backward", wrapper="inner"),
    "fixed": Case(sampling=dpscale.FixedSize(size=SIZE, batch=7), wrapper="closure"),
    "secure": Case(source="secure", wrapper="ddp"),
    "traced-micro": Case(compile=interpreted, micro_batch=3, wrapper="ddp"),
    "parts": Case(how="parts", wrapper="ddp"),
    "people": Case(records=2, batch=5, micro_batch=2),
    "people-empty-backward": Case(records=3, batch=2, steps=12, how="backward", wrapper="ddp"),
    "people-parts": Case(records=2, batch=5, how="parts"),
}
SHARDED = {
    "fsdp-" + name: replace(PLAIN[name], wrapper="fsdp", noise=False)
    for name in ("long", "psasc-inner-outer-micro-empty", "autos-disk-traced-empty", "psac-heavy-ball-empty-backward",
                 "psasc-per-sample-micro", "psac-window", "empty-backward", "adam", "shuffled", "fixed", "tied",
                 "partly")
}  # fmt: skip
SHARDED["fsdp-layers"] = Case(wrapper="fsdp-layers", noise=False)
SHARDED["fsdp-some"] = Case(wrapper="fsdp-some", noise=False, how="backward")
CASES = PLAIN | SHARDED
COMPILED = {"compiled": Case(wrapper="ddp", compile=True), "fsdp-compiled": replace(SHARDED["fsdp-long"], compile=True)}


def wrap(model, wrapper):
    """(What the script calls, what it passes to privatize.)"""
    if not distributed.is_initialized() or wrapper == "plain":
        return model, model
    if wrapper.startswith("fsdp"):
        places = {"fsdp": (), "fsdp-layers": (0, 2), "fsdp-some": (0, 4)}[wrapper]
        for layer in (*(model[place] for place in places), *([model] if wrapper != "fsdp-some" else ())):
            fully_shard(layer)
        return model, model
    wrapped = DistributedDataParallel(model)
    return wrapped, model if wrapper == "inner" else wrapped


def whole(p):
    return p.full_tensor() if hasattr(p, "full_tensor") else p


def train(case):
    called, given = wrap(case.model(), case.wrapper)
    optimizer = getattr(torch.optim, case.optimizer)((p for p in given.parameters() if p.requires_grad), lr=0.05)
    private = dpscale.privatize(
        given, optimizer, case.plan(), seed=7, micro_batch=case.micro_batch, compile=case.compile, noise=case.source
    )
    loss = (lambda _, batch: loss_fn(called, batch)) if case.wrapper == "closure" else loss_fn
    drawn = []
    for batch in private.batches(dataset(case)):
        drawn.append(batch.draw.indices.tolist())
        if len(drawn) == 3:  # an evaluation in between, as wrappers do it
            with torch.no_grad():
                called(data()[:][0])
        if case.how == "step":
            private.step(batch, loss)
        else:
            for part in private.parts(batch, 2) if case.how == "parts" else [batch]:
                private.backward(loss(called, part), part)
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


# What must be refused, on every rank and with the same words -------------------------------------------------------


def private(model=None, *, optimizer=None, lr=0.05, seed=7, **changes):
    model = mlp() if model is None else model
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    case = replace(Case(), **changes)
    return dpscale.privatize(model, optimizer, case.plan(), seed=seed, noise=case.source)


def frozen(model, rank):
    model[0].requires_grad_(rank == 0)
    return model


def other_plan(rank):
    private(batch=12 + rank)


def other_optimizer(rank):
    private(lr=0.05 * (1 + rank))


def optimizer_refused(rank):
    model = mlp()
    private(model, optimizer=torch.optim.SGD(model[rank:].parameters(), lr=0.05))


def other_size(rank):
    private().batches(data(SIZE - rank))


def other_rows(rank):
    whole = data()[:]
    private().batches(TensorDataset(*(t.roll(rank, 0) for t in whole)))


def other_order(rank):
    """The same samples, known by other places: one of them would be on both ranks."""
    order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(rank)).tolist()
    private().batches(torch.utils.data.Subset(data(), order))


def stepping(run, loss=loss_fn, at=3, change=lambda: None):
    """Steps, with something that happens before step ``at``; what every rank has then released is part of an error."""
    try:
        for step, batch in enumerate(run.batches(data()), 1):
            if step == at:
                change()
            run.step(batch, loss)
    except Exception as error:
        error.args = (f"{error} [after {run.steps_taken} steps]",)
        raise


def raising(rank):
    seen = []

    def loss(model, batch):
        seen.append(run.steps_taken)
        if rank == 1 and seen[-1] == 2:
            raise KeyError("a broken record")
        return loss_fn(model, batch)

    run = private()
    stepping(run, loss)


def raising_and_going_on(rank):
    """The draw is outstanding still, on every rank: it can be tried again."""
    run, failed = private(), []
    for batch in run.batches(data()):
        try:
            run.step(batch, (lambda *_: 1 / 0) if rank == 1 and run.steps_taken == 2 else loss_fn)
        except (RuntimeError, ZeroDivisionError) as error:
            failed.append(type(error).__name__)
            run.step(batch, loss_fn)
    return failed, torch.cat([p.detach().flatten() for p in run.model.parameters()])


def coupled(rank):
    """What one rank's rows show is enough."""
    stepping(private(), (lambda m, b: loss_fn(m, b) + m(b[0]).mean()) if rank == 1 else loss_fn)


def raising_beside_an_empty_share(rank):
    """Rank 0 has the one row of a draw, and rank 1 none."""
    rows = []
    run = private(batch=1, seed=0)
    try:
        for batch in run.batches(data()):
            rows.append(len(batch.draw.indices))
            run.step(batch, (lambda *_: 1 / 0) if rank == 0 else loss_fn)
    except Exception as error:
        error.args = (f"{error} [{rows[-1]} rows]",)
        raise


def skipping(rank):
    run = private()
    batches = run.batches(data())
    run.step(next(batches), loss_fn)
    batch = [next(batches) for _ in range(1 + rank)][-1]
    run.step(batch, loss_fn)


def drifting(rank, model=None):
    run = private(model)

    def drift():
        with torch.no_grad():
            run.model[4].bias += 1e-6 * rank

    stepping(run, at=4, change=drift)


def drifting_between(rank):
    """Not at a power of two."""
    run = private()

    def drift():
        with torch.no_grad():
            run.model[2].weight[0, 0] += 1e-6 * rank
            run.model[0].bias += 1e-6 * rank

    stepping(run, at=7, change=drift)


def freezing(rank):
    run = private()
    stepping(run, change=lambda: run.model[0].bias.requires_grad_(rank == 0))


def other_modes(rank):
    """One rank has evaluated the model alone, and left it so."""
    run = private()
    stepping(run, change=lambda: run.model.train(rank == 0))


def drifting_frozen(rank):
    model = mlp()
    model[0].requires_grad_(False)
    run = private(model, optimizer=torch.optim.SGD(model[2:].parameters(), lr=0.05))

    def drift():
        with torch.no_grad():
            model[0].bias += 1e-6 * rank

    stepping(run, at=4, change=drift)


def other_state(rank):
    """Each rank has that of a run of its own. Their epochs have other orders: a sample would be on both ranks."""
    own = [distributed.new_group([r]) for r in range(2)][rank]
    changes = {"sampling": dpscale.Shuffled(size=SIZE, batch=9)}
    model, plan = mlp(), replace(Case(), steps=7, **changes).plan()
    alone = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, group=own)
    alone.step(next(batches := alone.batches(data())), loss_fn)
    assert len(batches) == 6
    run = private(steps=7, **changes)
    try:
        run.load_state_dict(alone.state_dict())
    except RuntimeError as error:
        error.args = (f"{error} [after {run.steps_taken} steps]",)
        raise


def load_cut_short(rank):
    """On one rank, when its key is another already: going on, the ranks would have other draws and other noise."""
    changes = {"lr": 0.0, "noise": False}
    for batch in (batches := (run := private(**changes)).batches(data())):
        run.step(batch, loss_fn)
        break
    run.save(FOLDER[0] / "cut")
    run = private(**changes)
    if rank == 1:
        run.model.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    with contextlib.suppress(ZeroDivisionError, RuntimeError):
        run.load(FOLDER[0] / "cut")
    assert run.steps_taken == 1 and len(batches) == 7
    stepping(run)


def other_call(rank, model=None):
    run = private(model)
    batches = run.batches(data())
    batches = run.batches(data()) if rank == 1 else batches
    run.step(next(batches), loss_fn)


def fsdp1(rank):
    private(FullyShardedDataParallel(mlp(), device_id=torch.device("cpu")))


def tensor_parallel(rank):
    mesh = init_device_mesh("cpu", (2,))
    private(parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}))


def replicated_shards(rank):
    private(fully_shard(mlp(), mesh=init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "shards"))))


def other_dimension(rank):
    private(fully_shard(nn.Linear(4, 3, bias=False), shard_placement_fn=lambda p: Shard(1)))


def mixed_precision(rank):
    private(fully_shard(mlp(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)))


def offloaded(rank):
    private(fully_shard(mlp(), offload_policy=CPUOffloadPolicy(pin_memory=False)))


def sharded_teacher(rank):
    teacher = fully_shard(mlp(1))
    stepping(private(), lambda m, b: loss_fn(m, b) + (m(b[0]) - teacher(b[0]).detach()).square().mean(1))


def other_group(rank):
    """Shards over both ranks, and a group of one."""
    own = [distributed.new_group([r]) for r in range(2)][rank]
    model = fully_shard(mlp())
    dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), Case().plan(), group=own)


def stranger(rank):
    first = distributed.new_group([0])
    if rank == 1:
        model = mlp()
        dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), Case().plan(), group=first)
    raise RuntimeError("rank 0 is not asked")


def group_of_one(rank):
    """Each rank trains by itself, as it was told to."""
    own = [distributed.new_group([r]) for r in range(2)][rank]
    model = mlp(rank)
    run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), Case().plan(), seed=rank, group=own)
    return [len(batch.draw.indices) for batch in run.batches(data()) if run.step(batch, loss_fn)]


class Scaled(nn.Module):
    """A model with a buffer, which DistributedDataParallel sends to all ranks in every forward."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("scale", torch.full((3,), 0.5))

    def forward(self, x):
        return self.inner(x) * self.scale


def buffers(rank):
    """Ranks run different numbers of forwards: to look at their rows, and none for an empty share."""
    called, given = wrap(Scaled(), "ddp")
    run = private(given, batch=2)
    stepping(run, lambda _, batch: loss_fn(called, batch))
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def other_buffer(rank):
    """Changed by hand on one rank, before the fourth step; what was logged then, and after how many steps."""
    run, said = private(Scaled()), []
    handler = logging.Handler()
    handler.emit = lambda record: said.append((record.getMessage(), run.steps_taken))
    logging.getLogger("dpscale").addHandler(handler)

    def change():
        run.model.scale += 0.1 * rank

    stepping(run, at=4, change=change)
    logging.getLogger("dpscale").removeHandler(handler)
    return run.steps_taken, [(text, steps) for text, steps in said if "disagree" in text]


def drifting_with_a_buffer(rank):
    run = private(Scaled())

    def drift():
        run.model.scale += 0.1 * rank
        with torch.no_grad():
            run.model.inner[4].bias += 1e-6 * rank

    stepping(run, at=4, change=drift)


def another_way(rank):
    """One rank has its sums in another precision and order, as an engine that takes a slower way may."""
    run = private()
    scaled_sum = run._engine.scaled_sum

    def other(*args, **kwargs):
        out = scaled_sum(*args, **kwargs)
        return replace(out, grads={n: g.double() for n, g in reversed(out.grads.items())})

    run._engine.scaled_sum = other if rank == 1 else scaled_sum
    stepping(run)
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def in_buckets(rank):
    """As in a large model: several collectives for a sum, and for parameters."""
    for module in (dpscale.distributed, dpscale.sharding):
        module.buckets = partial(buckets, size=20)
    try:
        return [train(replace(Case(noise=False), wrapper=wrapper))["parameters"] for wrapper in ("plain", "fsdp")]
    finally:
        for module in (dpscale.distributed, dpscale.sharding):
            module.buckets = buckets


def twice(rank):
    """Two runs, one after the other, on one model; what wraps it belongs to the second."""
    found = []
    for wrapper in ("ddp", "fsdp"):
        called, given = wrap(mlp(), wrapper)
        for _ in range(2):
            run = private(given, noise=False)
            for batch in run.batches(data()):
                run.backward(loss_fn(called, batch))
                run.optimizer.step()
                run.optimizer.zero_grad()
        found.append(torch.cat([whole(p).detach().flatten() for p in run.model.parameters()]))
    return found


def left(rank):
    """A forward, and then the loop is left: the model is in shards."""
    model = fully_shard(mlp())
    run = private(model)
    batches = run.batches(data())
    loss_fn(model, next(batches))
    during = {type(p).__name__ for p in model.parameters()}
    batches._batches.close()
    return during, {type(p).__name__ for p in model.parameters()}


def public(rank, ranks=2):
    """On public data wrappers do what they do elsewhere: gradients are averaged over the ranks."""
    found = []
    for wrapper in ("ddp", "fsdp"):
        called, given = wrap(mlp(), wrapper)
        run, rows = private(given, noise=False), SIZE // ranks
        for k, batch in enumerate(run.batches(data())):
            if k == 2:
                with run.public_data():
                    loss_fn(called, data()[rank * rows : (rank + 1) * rows]).mean().backward()
                    run.optimizer.step()
                    run.optimizer.zero_grad()
            run.step(batch, loss_fn)
        found.append(torch.cat([whole(p).detach().flatten() for p in run.model.parameters()]))
    return found


def key(rank):
    """From the operating system, and the same on both ranks."""
    run = private(seed=None)
    batches = [batch.draw.indices.tolist() for batch in run.batches(data()) if run.step(batch, loss_fn)]
    return batches, run._state.noise.key.derive("x"), torch.cat([p.detach().flatten() for p in run.model.parameters()])


def resumed(rank, folder):
    """Three steps, a save, and the rest in a new run, booked in a ledger by the first rank for all."""
    books = dpscale.Ledger(folder / "books.db", epsilon=100, delta=1e-3)
    found = []
    for part in range(2):
        model = mlp(seed=part)
        plan = replace(Case(), momentum=dpscale.HeavyBall(gamma1=0.3), wrapper="ddp").plan()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        run = dpscale.privatize(DistributedDataParallel(model), optimizer, plan, seed=3, ledger=books, run="both")
        if part:
            assert run.load(folder / "run.ckpt") == {"epoch": 1}
        for batch in run.batches(data()):
            run.step(batch, loss_fn)
            if run.steps_taken == 3:
                break
        if not part:
            run.save(folder / "run.ckpt", {"epoch": 1})
        values = torch.cat([p.detach().flatten() for p in model.parameters()])
        key = run._state.noise.key.derive("x")
        found.append((run.steps_taken, run.epsilon(1e-3), key, values, run.statement(1e-3)))
        run.close()
        distributed.barrier()
    return found, books.runs()[0].charged


REMEMBERED = {
    "none": None, "heavy-ball": dpscale.HeavyBall(gamma1=0.3), "disk": dpscale.DiSK(kappa=0.7, gamma=0.5),
    "inner-outer": dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.2), "per-sample": EMA,
}  # fmt: skip


def halves(momentum, wrapper="plain", load=None, save=None):
    """Half of a run in which nothing is random, that is saved, or the other half, or both."""
    _, model = wrap(mlp(seed=0 if load is None else 5), wrapper)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    case = Case(sampling=dpscale.FullBatch(size=SIZE), momentum=REMEMBERED[momentum], steps=4, noise=False)
    run = dpscale.privatize(model, optimizer, case.plan(), seed=3)
    if load is not None:
        assert run.load(load) == {"of": momentum}
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        if save is not None and run.steps_taken == 2:
            run.save(save, {"of": momentum})
            break
    return torch.cat([whole(p).detach().flatten() for p in model.parameters()])


def saved(rank):
    """Saved whole and in shards, and resumed the other way."""
    found = {}
    for momentum in REMEMBERED:
        for wrapper, other in (("ddp", "fsdp"), ("fsdp", "plain")):
            path = FOLDER[0] / f"{momentum}-{wrapper}.ckpt"
            halves(momentum, wrapper, save=path)
            found[momentum, wrapper] = halves(momentum, other, load=path)
    return found


def resumed_on_more(rank):
    """What one process has saved."""
    wrappers = ("plain", "fsdp") * 3
    return {
        momentum: halves(momentum, wrapper, load=FOLDER[0] / f"{momentum}.ckpt")
        for momentum, wrapper in zip(REMEMBERED, wrappers, strict=False)
    }


def shuffled_part(rank):
    """Three batches of an epoch of seven."""
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=9), steps=7)
    drawn = []
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        drawn += batch.draw.indices.tolist()
        if run.steps_taken == 3:
            run.save(FOLDER[0] / "shuffled.ckpt")
            return drawn


def beside_dcp(rank):
    """Model and optimizer by torch's own checkpoints, in shards, and the state of the run beside them."""
    folder = FOLDER[0] / "dcp"
    for part in range(2):
        model = fully_shard(mlp(seed=part))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
        case = Case(sampling=dpscale.FullBatch(size=SIZE), momentum=REMEMBERED["inner-outer"], steps=4, noise=False)
        run = dpscale.privatize(model, optimizer, case.plan())
        if part:
            load_dcp(run, folder)
        for batch in run.batches(data()):
            run.step(batch, loss_fn)
            if not part and run.steps_taken == 2:
                parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
                dcp.save(parts, checkpoint_id=folder)
                state = run.state_dict()
                if rank == 0:
                    torch.save(state, folder / "run.pt")
                distributed.barrier()
                break
    return torch.cat([whole(p).detach().flatten() for p in model.parameters()])


def load_dcp(run, folder):
    parts = dict(zip(("model", "optimizer"), get_state_dict(run.model, run.optimizer), strict=True))
    dcp.load(parts, checkpoint_id=folder)
    set_state_dict(run.model, run.optimizer, model_state_dict=parts["model"], optim_state_dict=parts["optimizer"])
    run.load_state_dict(torch.load(folder / "run.pt", weights_only=True))


def sharded_call(rank):
    """One rank begins its loop anew: the other would wait for its shards, and it for the other's word."""
    other_call(rank, fully_shard(mlp()))


def sharded_forward(rank):
    """One rank has left the loop, the other runs its own forward."""
    model = fully_shard(mlp())
    run = private(model)
    batches = run.batches(data())
    if rank == 1:
        run.save(FOLDER[0] / "nowhere")
    loss_fn(model, next(batches))


def partly_sharded(shift):
    model = mlp()
    fully_shard(model[0])
    with torch.no_grad():
        model[4].bias += shift
    return model


def sharded_buffer(rank):
    model = mlp()
    model.register_buffer("shift", torch.tensor(float(rank)))
    private(fully_shard(model))


def saving_alone(rank):
    run = private()
    if rank == 0:
        run.save(FOLDER[0] / "nowhere")
    run.batches(data())


def mixed_types(rank):
    """A layer in half precision among others."""

    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(6, 5).bfloat16()

        def forward(self, x):
            return self.linear(x.bfloat16()).float()

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), Half(), nn.Linear(5, 3))
    if distributed.is_initialized():
        fully_shard(model[1])
        fully_shard(model)
    stepping(run := private(model, noise=False))
    return torch.cat([whole(p).detach().float().flatten() for p in run.model.parameters()])


def ahead(rank):
    """Batches are taken ahead of their use, by a thread; the ranks release them in order."""
    run, taken = private(), queue.Queue(2)
    thread = threading.Thread(target=lambda: [taken.put(each) for each in (*run.batches(data()), None)], daemon=True)
    thread.start()
    while (batch := taken.get()) is not None:
        run.step(batch, loss_fn)
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def ledger_on_one(rank):
    ledger = dpscale.Ledger(FOLDER[0] / f"{rank}.db", epsilon=100, delta=1e-3) if rank else None
    model = mlp()
    dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.05), Case().plan(), seed=7, ledger=ledger)


def noise_in_shards(rank, source="fast"):
    """Two steps of noise alone, in units of its standard deviation."""
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(300, 401))
    plan = replace(Case(), batch=12, steps=2).plan()
    run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, noise=source)
    steps = []
    for batch in run.batches(data()):
        before = [p.to_local().detach().clone() for p in model.parameters()]
        run.step(batch, lambda m, b: m(b[0].repeat(1, 75)).sum(1) * 0)
        moved = [b - p.to_local().detach() for b, p in zip(before, model.parameters(), strict=True)]
        steps.append(torch.cat([m.flatten() for m in moved]) * plan.expected_batch / plan.noise_std)
    return steps


FOLDER: list[Path] = []
"""Where this launch leaves what came of it."""

FAULTS = {
    "seed": lambda rank: private(seed=rank),
    "plan": other_plan,
    "source": lambda rank: private(source=["fast", "secure"][rank]),
    "values": lambda rank: private(mlp(rank)),
    "shape": lambda rank: private(mlp(width=6 + rank)),
    "dtype": lambda rank: private(mlp().to([torch.float32, torch.float64][rank])),
    "frozen": lambda rank: private(frozen(mlp(), rank)),
    "optimizer": other_optimizer,
    "optimizer refused": optimizer_refused,
    "size": other_size,
    "rows": other_rows,
    "order": other_order,
    "raising": raising,
    "going on": raising_and_going_on,
    "coupled": coupled,
    "empty share": raising_beside_an_empty_share,
    "skipping": skipping,
    "drifting": drifting,
    "drifting between": drifting_between,
    "freezing": freezing,
    "modes": other_modes,
    "drifting frozen": drifting_frozen,
    "state": other_state,
    "load cut short": load_cut_short,
    "call": other_call,
    "fsdp1": fsdp1,
    "tensor parallel": tensor_parallel,
    "replicas": replicated_shards,
    "dimension": other_dimension,
    "precision": mixed_precision,
    "offloaded": offloaded,
    "teacher": sharded_teacher,
    "other group": other_group,
    "stranger": stranger,
    "group of one": group_of_one,
    "public": public,
    "buffers": buffers,
    "other buffer": other_buffer,
    "drifting with a buffer": drifting_with_a_buffer,
    "another way": another_way,
    "buckets": in_buckets,
    "twice": twice,
    "left": left,
    "key": key,
    "resumed": lambda rank: resumed(rank, FOLDER[0]),
    "saved": saved,
    "shuffled part": shuffled_part,
    "dcp": beside_dcp,
    "sharded call": sharded_call,
    "sharded forward": sharded_forward,
    "sharded part": lambda rank: private(partly_sharded(rank)),
    "sharded drifting": lambda rank: drifting(rank, partly_sharded(0)),
    "sharded buffer": sharded_buffer,
    "saving alone": saving_alone,
    "mixed types": mixed_types,
    "ahead": ahead,
    "ledger on one": ledger_on_one,
    "noise": noise_in_shards,
    "secure noise": partial(noise_in_shards, source="secure"),
}


# A rank that is lost -------------------------------------------------------------------------------------------------


def losing(rank, how):
    """Rank 1 dies or stalls in the midst of step 3; or when all have agreed on it, before it has given its sum."""
    run = private(fully_shard(mlp()) if "shards" in how else None)
    total = run._ranks.total

    def dying(*args):
        if run.steps_taken == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return total(*args)

    if "sum" in how and rank == 1:
        run._ranks.total = dying

    def loss(model, batch):
        if rank == 1 and run.steps_taken == 2 and "sum" not in how:
            if how == "stalled":
                time.sleep(3600)
            os.kill(os.getpid(), signal.SIGKILL)
        return loss_fn(model, batch)

    stepping(run, loss)


LOST = {"stalled": 30} | dict.fromkeys(
    ("killed", "killed in shards", "killed in the sum", "killed in the sum of shards"), 3600
)
"""How a rank is lost, and the timeout of the process group, in seconds: of the one that stalls a short one, which it
takes to be noticed, yet long for two ranks on a busy machine to wait for each other."""

RUNS = {name: lambda rank, case=case: train(case) for name, case in (CASES | COMPILED).items()} | FAULTS
RUNS["resumed on more"] = resumed_on_more
ON = {2: (*CASES, *FAULTS), 4: ("long", "long-ddp", "psasc-per-sample-micro", "psasc-inner-outer-micro-empty", "empty",
                                "empty-backward", "fsdp-long", "fsdp-empty-backward", "fsdp-some", "fsdp-partly",
                                "fsdp-psasc-inner-outer-micro-empty", "resumed on more")}  # fmt: skip
"""Which are run on how many ranks."""

RUNS |= {how: partial(losing, how=how) for how in LOST}


def main(folder, *names):
    distributed.init_process_group("gloo", timeout=timedelta(seconds=float(os.environ.get("PATIENCE", "3600"))))
    torch.set_num_threads(1)
    FOLDER.append(Path(folder))
    rank = distributed.get_rank()
    for name in names:
        try:
            found = RUNS[name](rank)
        except Exception as error:
            if name not in FAULTS and name not in LOST:
                raise
            found = f"{type(error).__name__}: {error}"
        torch.save(found, Path(folder) / f"{name}-{rank}.pt")
    distributed.destroy_process_group()


def lose(folder):
    """Lose a rank in every way at once. Not by torchrun, which would end the others itself."""
    from .processes import HANGS, group_of

    started = []
    with contextlib.ExitStack() as groups:
        for how, patience in LOST.items():
            for variables in groups.enter_context(group_of(2)):
                if (child := os.fork()) == 0:
                    signal.alarm(HANGS)
                    os.environ |= variables | {"PATIENCE": str(patience)}
                    main(folder, how)
                    os._exit(0)
                started.append(child)
        for survivor in started[::2]:
            os.waitpid(survivor, 0)
    for lost in started[1::2]:
        os.kill(lost, signal.SIGKILL)
        os.waitpid(lost, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
