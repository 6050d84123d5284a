"""Whole training loops beside plain PyTorch, Opacus and vmap(grad), in one run.

    python benchmarks/loop.py                                               # small models on the CPU
    python benchmarks/loop.py --models 4-conv-cnn,transformer --loader 2    # from a DataLoader with two workers
    python benchmarks/loop.py --device cuda --campaign --warm 16 --minutes 9 --json loop.json  # docs/performance.md
    python benchmarks/loop.py --device cuda --models gpt2 --cold            # first steps, empty and warm cache
    python benchmarks/loop.py --run 2000                                    # whole runs, compiling included
    python benchmarks/loop.py --ranks 2                                     # two processes, beside plain DDP: ranks.py

A step is what users write: draw, index or load, forward, backward, scaling, noise, update. dpscale, Opacus and vmap
take Poisson draws; the plain loop takes random batches of the expected size, with CUDA graphs on CUDA. So all figures
are per *expected* sample. Contenders take turns with the plain loop, so that a busy machine slows both alike; a ratio
is the median over *usual* rounds, those in which dpscale did not look at the model. What its looks cost stands apart:
`checks` is the share of a run of 10,000 steps, from the looks so far and their mean time, at one look for each power of
two from there on. (More are made, but only while all of them together stay under 2% of a run.) `to step` is the ratio
to dpscale's first. `rows` is what dpscale computes per sample drawn. `host` is the time of the host without its waits
for the device, on CUDA. Memory is that of a step at its peak, data included: of usual steps, and of one in which
dpscale looked at the model. vmap(grad) goes in micro-batches.
"""

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import dpscale
import harness
from campaign import CAMPAIGN, HELD, STEP, Part
from contenders import opacus_parts, sgd
from dpscale.engine.compile.finite_flag import FiniteFlag
from harness import Context, Job, Memory, Row, Step, Table, figure
from models import TASKS, Task

CPU = ("digits-cnn", "4-conv-cnn", "probe", "transformer")
CUDA = ("4-conv-cnn", "resnet9-64", "resnet9-160", "vit-s16", "gpt2", "gpt2-lora")
ON_CPU = {"4-conv-cnn": 256, "probe": 256}
"""Other batches than a task's own."""
DATA = 1 << 30
"""Bytes of samples to draw from, at most."""
STEPS = 10**7
RULE = dpscale.PSASC(C=1.0, s=0.5, r=1e-3)
RUN = 10_000
"""Steps of the run of which the share of looks is told."""


class Looks(NamedTuple):
    """How often dpscale has looked at the model in so many steps, and the seconds of all looks but the first."""

    count: int = 0
    seconds: float = 0.0
    steps: int = 0


@dataclass
class Setting:
    """What a loop is made of: one task's model and data, and how to run it."""

    task: Task
    model: nn.Module
    data: TensorDataset
    cast: Context
    args: argparse.Namespace

    @property
    def device(self) -> str:
        return self.args.device

    def losses(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with self.cast():
            return self.task.losses(model(batch[0]), batch[1])

    def drawn(self) -> Iterator[tuple[Tensor, ...]]:
        """Poisson draws, for contenders that have none of their own."""
        sampling = dpscale.Poisson(size=len(self.data), batch=self.task.batch)
        draws = (indices for indices in sampling.draws(np.random.default_rng(0)) if len(indices))
        if self.args.loader is not None:
            loader = DataLoader(self.data, batch_sampler=(d.tolist() for d in draws), **self.loading())
            yield from (tuple(t.to(self.device, non_blocking=True) for t in batch) for batch in loader)
        for indices in draws:
            chosen = torch.from_numpy(indices).to(self.device, non_blocking=True)
            yield tuple(t[chosen] for t in self.data.tensors)

    def loading(self) -> dict[str, object]:
        return {"num_workers": self.args.loader, "pin_memory": self.device == "cuda"}


@dataclass
class Loop:
    """One contender's: a step, and what is known of it."""

    step: Step
    rows: list[int] = field(default_factory=list)  # computed, draw by draw
    samples: list[int] = field(default_factory=list)
    looks: Callable[[], Looks] = Looks


def plain(compiled: bool) -> Callable[[Setting], Loop]:
    def make(setting: Setting) -> Loop:
        optimizer, batch = sgd(setting.model), setting.task.batch

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return setting.losses(setting.model, (x, y)).mean()

        cuda_graphs = {"mode": "reduce-overhead"} if setting.device == "cuda" else {}
        run = torch.compile(loss, dynamic=False, **cuda_graphs) if compiled else loss

        def batches() -> Iterator[tuple[Tensor, ...]]:
            if setting.args.loader is not None:
                sampler = RandomSampler(setting.data, replacement=True, num_samples=batch * 10**6)
                loader = DataLoader(setting.data, batch, sampler=sampler, **setting.loading())
                yield from (tuple(t.to(setting.device, non_blocking=True) for t in each) for each in loader)
            while True:
                chosen = torch.randint(len(setting.data), (batch,), device=setting.device)
                yield tuple(t[chosen] for t in setting.data.tensors)

        source = batches()

        def step() -> None:
            run(*next(source)).backward()
            optimizer.step()
            optimizer.zero_grad()

        return Loop(step)

    return make


def ours(how: str = "step", parts: int = 1, **options: object) -> Callable[[Setting], Loop]:
    """`private.step` or `private.backward`, in the loop of the README."""

    def make(setting: Setting) -> Loop:
        model, batch = setting.model, setting.task.batch
        micro_batch = batch // parts if parts > 1 else None
        optimizer = sgd(model)
        sampling = dpscale.Poisson(size=len(setting.data), batch=batch)
        steps = setting.args.run or STEPS
        plan = dpscale.Plan(scaling=RULE, sampling=sampling, steps=steps, noise_multiplier=1.0)
        private = dpscale.privatize(model, optimizer, plan, micro_batch=micro_batch, **options)
        loader = setting.loading() if setting.args.loader is not None else {}
        batches = iter(private.batches(setting.data, **loader))
        loop = Loop(lambda: None)

        cast, losses = setting.cast, setting.task.losses  # as users' loss functions, this one holds no data set

        def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            with cast():
                return losses(model(batch[0]), batch[1])

        def step() -> None:
            batch = next(batches)
            if loader:
                batch = batch.to(setting.device, non_blocking=True)
            count = len(batch.draw.indices)
            loop.samples.append(count)
            if how == "step":
                private.step(batch, loss_fn)
                split = private._padding.sizes.parts(count) if private._padding else [(None, count)]
                loop.rows.append(sum(rows for _, rows in split))
            else:
                private.backward(loss_fn(model, batch.data))
                optimizer.step()
                optimizer.zero_grad()
                loop.rows.append(count)

        schedule = private._engine._schedule
        loop.step, loop.looks = step, lambda: Looks(schedule.looks, schedule._spent, private.steps_taken)
        return loop

    return make


def opacus(mode: str) -> Callable[[Setting], Loop]:
    def make(setting: Setting) -> Loop:
        private, optimizer, criterion = opacus_parts(mode, setting.task, setting.model, setting.data)
        batches = setting.drawn()

        def step() -> None:
            x, y = next(batches)
            optimizer.zero_grad()
            with setting.cast():
                loss = criterion(private(x), y)
            loss.backward()
            optimizer.step()

        return Loop(step)

    return make


def vmapped(compiled: bool) -> Callable[[Setting], Loop]:
    """vmap(grad) in micro-batches of one size, the last one padded with samples of weight 0."""

    def make(setting: Setting) -> Loop:
        model, task, chunk = setting.model, setting.task, min(setting.args.chunk, setting.task.batch)
        optimizer = sgd(model)
        parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        fixed = {n: p for n, p in model.named_parameters() if not p.requires_grad}

        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with setting.cast():
                return task.losses(torch.func.functional_call(model, {**fixed, **values}, (x[None],)), y[None])[0]

        gradient = torch.func.vmap(torch.func.grad(loss), (None, 0, 0), randomness="different")

        def summed(values: dict[str, Tensor], x: Tensor, y: Tensor, mask: Tensor) -> dict[str, Tensor]:
            grads = gradient(values, x, y)
            norms = torch.stack([g.flatten(1).square().sum(1) for g in grads.values()]).sum(0).sqrt()
            weights = RULE.weight(norms) * mask
            return {n: torch.einsum("b,b...->...", weights, g) for n, g in grads.items()}

        run = torch.compile(summed, dynamic=False) if compiled else summed
        batches = setting.drawn()

        def step() -> None:
            x, y = next(batches)
            count = len(x)
            more = -count % chunk
            x, y = (torch.cat([t, t.new_zeros(more, *t.shape[1:])]) for t in (x, y))
            mask = (torch.arange(len(x), device=x.device) < count).float()
            total: dict[str, Tensor] = {}
            values = {n: p.detach() for n, p in parameters.items()}
            for k in range(0, len(x), chunk):
                part = run(values, *(t[k : k + chunk].clone() for t in (x, y, mask)))
                total = {n: total[n] + g if total else g.clone() for n, g in part.items()}
            for n, p in parameters.items():
                p.grad = (total[n] + torch.randn_like(p)) / task.batch
            optimizer.step()
            optimizer.zero_grad()

        return Loop(step)

    return make


LOOPS: dict[str, Callable[[Setting], Loop]] = {
    "plain compiled": plain(True),  # the base of every ratio comes first
    "plain": plain(False),
    "step": ours(),
    "step eager": ours(compile=False),
    "step compiled": ours(compile=True),
    "step in 4 parts": ours(compile=True, parts=4),
    "backward": ours("backward"),
    "Opacus hooks": opacus("hooks"),
    "Opacus ghost": opacus("ghost"),
    "vmap": vmapped(False),
    "vmap compiled": vmapped(True),
}
BASES = ("plain compiled", "plain")
USUAL = {"cpu": tuple(LOOPS), "cuda": tuple(name for name in LOOPS if name != "step compiled")}
"""On CUDA a step is compiled unless told otherwise."""


class Waits:
    """Seconds that the host has spent waiting for the device to say whether norms are finite."""

    def __init__(self) -> None:
        self.seconds, original = 0.0, FiniteFlag.read

        def read(flag: FiniteFlag) -> bool:
            start = time.perf_counter()
            found = original(flag)
            self.seconds += time.perf_counter() - start
            return found

        FiniteFlag.read = read  # type: ignore[method-assign]


WAITS = Waits()


def setting_of(name: str, precision: str, args: argparse.Namespace) -> Setting:
    task = TASKS[name]
    batch = args.batch or (ON_CPU.get(name, task.batch) if args.device == "cpu" else task.batch)
    torch.manual_seed(0)
    one = replace(task, batch=1).data("cpu")
    size = max(8 * batch, min(args.samples or 50 * batch, DATA // sum(t.nbytes for t in one)))
    data = replace(task, batch=size).data("cpu" if args.loader is not None else args.device)
    model = task.make().to(args.device)
    return Setting(
        replace(task, batch=batch), model, TensorDataset(*data), harness.casting(args.device, precision), args
    )


def start(contender: str, make: Callable[[], Setting], args: argparse.Namespace) -> tuple[Row, Loop | None]:
    """A contender's first steps: how long two of them take, and the memory of one. An error is an answer."""
    row: Row = {"contender": contender}
    harness.NOTES.said.clear()
    try:
        memory = Memory(args.device)
        setting = make()
        row["batch"] = setting.task.batch
        begin = time.perf_counter()
        loop = LOOPS[contender](setting)
        if args.run:
            for _ in range(args.run):
                loop.step()
            harness.synchronize(args.device)
            row["run_seconds"] = time.perf_counter() - begin
            return row, None

        def twice() -> None:
            loop.step()
            loop.step()

        row["cold_seconds"] = harness.seconds(twice, args.device)
        if contender in ("step compiled", "step in 4 parts") or (contender == "step" and args.device == "cuda"):
            harness.insist_compiled()
        harness.insist_whole()
        if args.ahead or args.first:
            return row, None
        warm(loop.step, args)
        resident = [*setting.model.parameters(), *setting.model.buffers(), *setting.data.tensors]
        row |= peaks(memory, loop, resident, args.peaks)
        return row, loop
    except Exception as error:
        row |= {"error": harness.complaint(error), "starved": harness.out_of_memory(error)}
        return row, None


def peaks(memory: Memory, loop: Loop, resident: list[Tensor], count: int) -> Row:
    """Memory of usual steps, and of one in which dpscale looked at the model, if there was one."""
    usual: list[float] = []
    looked: list[float] = []
    for _ in range(count):
        before = loop.looks().count
        peak = memory.peak(loop.step, resident)
        if peak is not None:
            (looked if loop.looks().count > before else usual).append(peak)
    found = {"peak_mib": statistics.median_low(usual)} if usual else {}
    return found | ({"checked_mib": max(looked)} if looked else {})


def warm(step: Step, args: argparse.Namespace) -> None:
    """Steps until every size of batch was met, or enough time has passed; the 64th sum, before which dpscale looks at
    the model, is not among them: the memory of that is measured."""
    begin = time.perf_counter()
    for _ in range(57):
        step()
        if time.perf_counter() - begin > args.patience:
            break
    harness.synchronize(args.device)


def measure(
    item: str, args: argparse.Namespace, setting_of: Callable[[str, str, argparse.Namespace], Setting] = setting_of
) -> Iterator[Row]:
    """The rows of one model at one precision.

    Args:
        setting_of: from its name and precision to the model and its data.
    """
    name, precision = item.split("/")
    make = partial(setting_of, name, precision, args)
    harness.use(precision)
    torch._dynamo.reset()  # lets go of the graphs of the item before, whose memory would count as this one's
    base: Loop | None = None
    found: Row | None = None
    ours: float | None = None
    for contender in args.contenders:
        row, loop = start(contender, make, args)
        if row.get("starved") and base is not None:  # perhaps it fits alone
            base = None
            harness.release(args.device)
            row, loop = start(contender, make, args)
        if loop is not None:
            try:
                compare(row, loop, base, found, args)
            except Exception as error:
                row["error"] = harness.complaint(error)
        if base is None and found is None and contender in BASES and "error" not in row:
            base, found = loop, row
        if "ratio" in row and (ours is not None or contender.startswith("step")):
            ours = ours or row["ratio"]
            row["to_step"] = row["ratio"] / ours
        loop = None
        yield row
        harness.release(args.device)


def compare(row: Row, loop: Loop, base: Loop | None, found: Row | None, args: argparse.Namespace) -> None:
    """Time the loop, in turns of some steps with the base where that is alive, until there are enough usual rounds."""
    together = [loop] if base is None else [loop, base]
    usual: list[list[tuple[float, float]]] = []  # seconds of each, and of the host alone, round by round
    looked: list[list[tuple[float, float]]] = []
    loop.rows.clear()
    loop.samples.clear()
    for _ in range(2 * args.rounds):
        before = loop.looks().count
        turns = [turn(each, args) for each in together]
        (looked if loop.looks().count > before else usual).append(turns)
        if len(usual) == args.rounds:
            break
    rounds = usual or looked
    taken = [[seconds for seconds, _ in column] for column in zip(*rounds, strict=True)]
    row["milliseconds"] = 1e3 * statistics.median(taken[0])
    row["microseconds_per_sample"] = 1e3 * row["milliseconds"] / row["batch"]
    if args.device == "cuda":
        row["host_milliseconds"] = 1e3 * statistics.median(turns[0][1] for turns in rounds)
    if loop.samples:
        row["rows"] = sum(loop.rows) / sum(loop.samples)
    against = taken[1] if len(taken) > 1 else [1e-3 * (found or row)["milliseconds"]] * len(taken[0])
    row["base_milliseconds"] = 1e3 * statistics.median(against)  # in the same rounds
    row["ratio"], *row["quartiles"] = harness.median_ratio(taken[0], against)
    row["turns"] = {"usual": usual, "looked": looked}  # (of the contender, of the base)
    row |= price_of(loop.looks(), 1e-3 * row["milliseconds"])
    peak = (found or row).get("peak_mib")
    if peak and "peak_mib" in row:
        row["peak_ratio"] = row["peak_mib"] / peak


def turn(loop: Loop, args: argparse.Namespace) -> tuple[float, float]:
    """Seconds of a step in a turn of some: in all, and of the host alone."""
    harness.synchronize(args.device)
    begin, waited = time.perf_counter(), WAITS.seconds
    for _ in range(args.steps):
        loop.step()
    host = time.perf_counter() - begin - (WAITS.seconds - waited)
    harness.synchronize(args.device)
    return (time.perf_counter() - begin) / args.steps, host / args.steps


def price_of(looks: Looks, step: float) -> Row:
    """What looks at the model cost of a long run of such steps, the first left out, which the cold start has in it."""
    if looks.count < 2:
        return {}
    each = looks.seconds / (looks.count - 1)
    more = math.floor(math.log2(RUN)) - math.floor(math.log2(looks.steps)) if looks.steps < RUN else 0
    share = (looks.seconds + more * each) / (RUN * step)
    return {"looks": looks.count - 1, "in_steps": looks.steps, "look_milliseconds": 1e3 * each, "look_share": share}


COLUMNS = {
    "model": (12, lambda row: row["item"].split("/")[0]),
    "precision": (9, lambda row: row["item"].split("/")[1]),
    "loop": (16, lambda row: row.get("contender")),
    "B": (5, figure("batch", "d")),
    "run s": (7, figure("run_seconds", ".1f")),
    "ms/step": (9, figure("milliseconds", ".2f")),
    "us/sample": (9, figure("microseconds_per_sample", ".1f")),
    "ratio": (6, figure("ratio", ".2f")),
    "quartiles": (11, lambda row: "{:.2f}-{:.2f}".format(*row["quartiles"]) if "quartiles" in row else None),
    "to step": (7, figure("to_step", ".2f")),
    "checks": (6, figure("look_share", ".1%")),
    "rows": (5, figure("rows", ".3f")),
    "host ms": (7, figure("host_milliseconds", ".2f")),
    "peak MiB": (9, figure("peak_mib", ",.0f")),
    "peak ratio": (10, figure("peak_ratio", ".2f")),
    "checked MiB": (11, figure("checked_mib", ",.0f")),
    "cold s": (7, figure("cold_seconds", ".1f")),
    "warm s": (7, figure("cached_seconds", ".1f")),
    "note": (4, lambda row: row.get("note") or " "),
}


def apart(args: argparse.Namespace, item: str, contender: str, times: int, *flags: str) -> list[Row]:
    """The rows of processes of a contender's own, one after the other, that begin with an empty compiler's cache."""
    with tempfile.TemporaryDirectory(prefix="dpscale-cold-") as directory:
        args.cache = Path(directory)
        with harness.compiler_cache(args) as environment:
            flags = ("--contenders", contender, *flags)
            return [row for _ in range(times) for row in harness.rows(Job([item], flags), environment, args.until)]


def cold(args: argparse.Namespace, items: list[str]) -> None:
    """The first two steps of each contender, with an empty and then with a warm cache."""
    table = Table(args, {k: COLUMNS[k] for k in ("model", "precision", "loop", "B", "cold s", "warm s", "note")}, 3)
    for item in items:
        for contender in args.contenders:
            row, again = apart(args, item, contender, 2, "--first")
            missing = {"note": again["error"]} if "error" in again else {}
            table.add({"contender": contender} | row | {"cached_seconds": again.get("cold_seconds")} | missing)


def runs(args: argparse.Namespace, items: list[str]) -> None:
    """Whole runs of each contender, compiling included, in turns with plain ones; with an empty cache, and a warm one
    if that is asked for."""
    names = ("model", "precision", "loop", "B", "run s", "ratio", "quartiles", "note")
    table = Table(args, {k: COLUMNS[k] for k in names}, 3)
    times = 2 if args.cached else 1
    for item in items:
        taken: dict[str, list[float]] = {contender: [] for contender in args.contenders}
        for _ in range(args.rounds):
            rows = {contender: apart(args, item, contender, times)[-1] for contender in args.contenders}
            for contender, row in rows.items():
                taken[contender].append(row.get("run_seconds", float("nan")))
        for contender, row in rows.items():
            ratio, *quartiles = harness.median_ratio(taken[contender], taken[args.contenders[0]])
            median = statistics.median(taken[contender])
            table.add(row | {"run_seconds": median, "ratio": ratio, "quartiles": quartiles})


def on_ranks(count: int, given: list[str]) -> int:
    """The table of ranks.py, started on so many processes with the other options that were given."""
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
         str(Path(__file__).with_name("ranks.py")), *given], check=False,
    )  # fmt: skip
    return found.returncode


def arguments() -> argparse.Namespace:
    parser = harness.arguments(__doc__, rounds=7)
    parser.add_argument("--models", help=f"of {', '.join(TASKS)}, or all (small ones on the CPU unless told)")
    parser.add_argument("--contenders", help=f"of {', '.join(LOOPS)}")
    parser.add_argument("--batch", type=int, help="another expected batch than the model's")
    parser.add_argument("--samples", type=int, help="in the data set; 50 batches unless told, and 1 GiB at most")
    parser.add_argument("--steps", type=int, default=10, help="of a turn (%(default)s)")
    parser.add_argument("--loader", type=int, metavar="N", help="data from a DataLoader with N workers")
    parser.add_argument("--chunk", type=int, default=32, help="micro-batch of vmap(grad) (%(default)s)")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds to warm up at most (%(default)s)")
    parser.add_argument("--peaks", type=int, default=6, help="steps whose memory is measured (%(default)s)")
    parser.add_argument("--campaign", action="store_true", help="what campaign.py lists, or what of it is asked for")
    parser.add_argument("--cold", action="store_true", help="time first steps, with an empty and with a warm cache")
    parser.add_argument("--run", type=int, metavar="N", help="time whole runs of so many steps, compiling included")
    parser.add_argument("--cached", action="store_true", help="with --run: where the same was compiled before")
    parser.add_argument("--ranks", type=int, metavar="W", help="processes, beside plain DDP (with options of ranks.py)")
    parser.add_argument("--first", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    usual = CPU if args.device == "cpu" else CUDA
    every = [*{model: None for part in CAMPAIGN for model in part.models}] if args.campaign else usual
    if args.campaign:
        args.precision = ",".join({precision: None for part in CAMPAIGN for precision in part.precisions})
    args.models = list(every) if args.models in (None, "all") else args.models.split(",")
    default = list(STEP) if args.cold or args.run else list(LOOPS) if args.campaign else USUAL[args.device]
    chosen = args.contenders.split(",") if args.contenders else default
    unknown = sorted({*args.models, *chosen} - {*TASKS, *LOOPS})
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}")
    absent = "" if find_spec("opacus") else "Opacus"
    args.contenders = [name for name in LOOPS if name in chosen and not (absent and name.startswith(absent))]
    args.absent = f"; {absent} is not installed" if absent else ""
    return args


def main() -> None:
    several = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    several.add_argument("--ranks", type=int)
    if (known := several.parse_known_args())[0].ranks:
        sys.exit(on_ranks(known[0].ranks, known[1]))
    args = arguments()
    if args.items:
        harness.serve(args, lambda item: measure(item, args))
        return
    print(f"{harness.machine(args)}, {args.rounds} rounds of {args.steps} steps{args.absent}")
    if args.cold or args.run:
        items = [f"{name}/{precision}" for name in args.models for precision in harness.precisions(args)]
        (cold if args.cold else runs)(args, items)
        return
    chosen = tuple(args.contenders)
    parts = CAMPAIGN if args.campaign else [Part(args.models, tuple(harness.precisions(args)), chosen)]
    jobs = [job for part in parts for job in jobs_of(part, args)]
    with harness.compiler_cache(args) as environment:
        if args.warm:
            harness.ahead(compilations(jobs), environment, args)
        table = Table(args, {k: column for k, column in COLUMNS.items() if k != "run s"}, 3)
        for row in harness.in_turn(jobs, environment, args.until):
            if args.warm or args.cache:
                row["cached_seconds"] = row.pop("cold_seconds", None)
            table.add(row)


def jobs_of(part: Part, args: argparse.Namespace) -> Iterator[Job]:
    """A process for each model and precision, of what was asked for; none where only the base of others is left."""
    contenders = [name for name in LOOPS if name in part.contenders and name in args.contenders]
    if not contenders or (contenders == [part.contenders[0]] and len(part.contenders) > 1):
        return
    for precision in part.precisions:
        for name in part.models:
            if name in args.models:
                flags = ("--contenders", ",".join(contenders), *part.flags)
                yield Job([f"{name}/{precision}"], flags, len(contenders), HELD.get(name, {}).get(precision, 0.0))


def compilations(jobs: list[Job]) -> dict[str, Job]:
    """Every compiled contender of the jobs, each alone, the slowest first."""
    found: dict[str, Job] = {}
    for name in [*HELD, *(name for name in TASKS if name not in HELD)]:
        for contender in sorted(LOOPS, key=lambda loop: "step" not in loop):
            compiles = "compiled" in contender or ("step" in contender and "eager" not in contender)
            for job in jobs if compiles else []:
                if job.items[0].split("/")[0] == name and contender in job.flags[1].split(","):
                    gib = job.gib / (1 if contender == "step" else 3)
                    found[f"{job.items[0]}/{contender}"] = Job(job.items, ("--contenders", contender), 1, gib)
    return found


if __name__ == "__main__":
    main()
