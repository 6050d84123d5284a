"""One run: a method, a seed, a record. A run chooses nothing on the test data: accuracy is that of the last epoch."""

import copy
import datetime
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from dpscale.checks import require
from dpscale.engine import LossFn
from dpscale.engine.modules import structure
from dpscale.engine.phases import listening, phase
from dpscale.lab import device, diagnostics
from dpscale.lab.augment import augmented
from dpscale.lab.data import Data, hold_out
from dpscale.lab.data import load as load_data
from dpscale.lab.datasets.disk import data_folder
from dpscale.lab.features import features
from dpscale.lab.models import MODELS, FineTuned, large, standardized
from dpscale.lab.presets import METHODS, OUTER, SCHEDULES, SEARCH_SEED, Choice, Config
from dpscale.lab.provenance import NUMERICS, installed_versions
from dpscale.lab.records import Record, Role
from dpscale.lab.scattering import SCATTERING, scattered
from dpscale.ledger import Ledger
from dpscale.momentum import over_views, views
from dpscale.noise import Key
from dpscale.plan import Plan
from dpscale.sampling import FullBatch, Poisson, Sampling
from dpscale.scaling import Clip
from dpscale.shapes import Sizes
from dpscale.training import privatize

_MEASURED = 10
"""A run is measured so many times at most, one of a large model half as often."""

_EVALUATED = 6_000_000
"""Numbers of input that are evaluated at once."""

_LONG = 1000
"""Steps from which on a run is compiled on the CPU too: some 20 s, which make a step up to three times as fast."""

_OPTIMIZERS = {"sgd": "SGD", "nadam": "NAdam"}


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `run` needs besides a place to report to: plain values, so that it travels to another process.

    Args:
        noise_multiplier: of every private method, since all share sampling, steps and budget.
        role, repeat, search, command: as in `Record`.
        ledger: where the run is booked, under a name of its own each time.
        fresh: draws and noise are the operating system's, and not of the seed.
    """

    config: Config
    method: str
    seed: int
    choice: Choice
    noise_multiplier: float = 0.0
    role: Role = "final"
    repeat: int = 0
    search: dict[str, Any] | None = None
    command: str = ""
    ledger: Path | None = None
    fresh: bool = False

    @property
    def learning_rate(self) -> float:
        """What the optimizer gets."""
        return METHODS[self.method].learning_rate(self.config, self.choice)

    @property
    def points(self) -> int:
        """At how many points it takes gradients at each step: so many times as long it takes."""
        momentum = METHODS[self.method].momentum_of(self.config, self.choice)
        return 1 if momentum is None or METHODS[self.method].rule is None else momentum.evaluations


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands: steps and epochs done, and of how many.

    ``epsilon()`` takes a moment, so it is computed for those who ask. ``phase`` is what keeps the next step waiting, as
    in `dpscale.engine.phases`; None while the run trains.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float
    plan: Plan | None
    delta: float
    phase: str | None = None

    def epsilon(self) -> float | None:
        """ε spent so far; None for a run that is not private."""
        return None if self.plan is None else self.plan.epsilon(delta=self.delta, steps=self.step)


# -- data and plans --------------------------------------------------------------------------------------------


@cache
def _whole(name: str, train_size: int | None, encoder: str | None) -> Data:
    """The data of an experiment, where it was read: images may still lie in a file."""
    data = load_data(name, train_size=train_size)
    if train_size is not None:
        ok = len(data.train_labels.unique()) == data.classes
        must, action = "such that every class has a sample", "Take more (--train-size)."
        require(ok, "Config", "train_size", must, train_size, action)
    if encoder == SCATTERING:
        return scattered(data)
    return data if encoder is None else features(data, encoder, normalize="l2")


@cache
def _on_device(held_out: float | None, split: int, place: str, *which: Any) -> Data:
    data = _whole(*which)
    return (data if held_out is None else hold_out(data, held_out, split)).to(place)


def _which(config: Config) -> tuple[Any, ...]:
    return config.data, config.train_size, config.encoder


def load(config: Config, role: str, seed: int = SEARCH_SEED) -> Data:
    """The data of a run, where it trains; a search sees the training part only, split once more, by each of its seeds
    in another way."""
    held_out, split = (config.held_out, max(0, seed - SEARCH_SEED)) if role == "search" else (None, 0)
    return _on_device(held_out, split, device.name(), *_which(config))


def size(config: Config) -> int:
    """Number of training samples."""
    return _whole(*_which(config)).size


def shape(config: Config) -> tuple[int, ...]:
    """Of one sample."""
    return tuple(_whole(*_which(config)).train_images.shape[1:])


def sampling(config: Config, samples: int | None = None) -> Sampling:
    """How batches are drawn. A search trains on fewer samples; the same share of them per step leaves steps and noise
    as they will be."""
    samples = size(config) if samples is None else samples
    if config.sampling == "full-batch":
        return FullBatch(size=samples)
    return Poisson(size=samples, batch=max(1, round(config.batch * samples / size(config))))


def planned(config: Config, data: Data | None = None) -> Plan:
    """What one run on these data does, its noise still to be calibrated."""
    sampled = sampling(config, None if data is None else data.size)
    return Plan(scaling=Clip(C=1.0), sampling=sampled, epochs=config.epochs)


def calibrate(config: Config) -> float:
    """The noise multiplier of every private method: it depends on sampling, steps and budget, not on the rule."""
    found = planned(config).calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
    assert found is not None
    return found


def _plan(job: Job, data: Data) -> Plan | None:
    method = METHODS[job.method]
    scaling = method.scaling(job.config)
    if scaling is None:
        return None
    return Plan(
        scaling=scaling, sampling=sampling(job.config, data.size), epochs=job.config.trained(job.role),
        noise_multiplier=job.noise_multiplier, delta=job.config.delta,
        momentum=method.momentum_of(job.config, job.choice),
    )  # fmt: skip


# -- runs ------------------------------------------------------------------------------------------------------


def run(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Record:
    """Train once and say what came of it. ``on_progress`` is called after every epoch, and at each phase before."""
    job.config.require_device()
    with _exact_products():
        start, data = time.perf_counter(), load(job.config, job.role, job.seed)
        training = _Training(job, data, _plan(job, data))
        training.epochs(on_progress or (lambda _: None))
        seconds = time.perf_counter() - training.begun, training.begun - start
        return _record(job, data, training, *seconds)


def rehearse(job: Job) -> None:
    """Take the first step of a run, which compiles it, and forget the run: the compiler keeps it on disk."""
    next(steps(replace(job, ledger=None)))  # nobody sees what it releases


def steps(job: Job) -> Iterator[Any]:
    """The steps of a run as they are taken, nothing measured between them: for those who time them."""
    with _exact_products():
        data = load(job.config, job.role, job.seed)
        yield from _Training(job, data, _plan(job, data)).steps()


def trained(job: Job, plan: Plan, data: Data) -> nn.Module:
    """The model of a private run under this plan, or the average of its weights where the configuration has one."""
    job.config.require_device()
    with _exact_products():
        training = _Training(job, data, plan)
        for _ in training.steps():
            pass
    return training.measured


@contextmanager
def _exact_products() -> Iterator[None]:
    """No TF32, which torch has on for convolutions: the bound is as strict as the plan says."""
    places: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [place.allow_tf32 for place in places]
    for place in places:
        place.allow_tf32 = False
    try:
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


class _Step(NamedTuple):
    loss: Tensor
    norms: Tensor | None = None
    weights: Tensor | None = None


class _Training:
    """A run under way: what is trained, and what came of it so far."""

    def __init__(self, job: Job, data: Data, plan: Plan | None) -> None:
        self.job, self.data, self.plan = job, data, plan
        self.model = untrained(job.config, data, job.seed)
        self.measured = copy.deepcopy(self.model) if job.config.average else self.model
        self.watch = diagnostics.Watch()
        self.curves: dict[str, list[float | None]] = {"epoch": [], "train_loss": [], "accuracy": []}
        self.loss, self.begun = math.nan, time.perf_counter()  # begun when the cold start is over

    def steps(self) -> Iterator[_Step]:
        """Every step as it is taken."""
        most = self.job.config.average
        taken = _train_plain if self.plan is None else _train_private
        for number, step in enumerate(taken(self), start=1):
            if most:  # a = keep·a + (1 - keep)·w: the start is soon forgotten
                keep = min(most, number / (number + 10))
                with torch.no_grad():
                    for a, w in zip(self.measured.parameters(), self.model.parameters(), strict=True):
                        a.lerp_(w, 1 - keep)
            yield step

    def epochs(self, on_progress: Callable[[Progress], None]) -> None:
        """All epochs, measured now and then and at the end."""
        config, role = self.job.config, self.job.role
        epochs, drawn = config.trained(role), sampling(config, self.data.size)
        ends = [0, *(drawn.steps(epoch) for epoch in range(1, epochs + 1))]
        points = _MEASURED // 2 if large(config.model) else _MEASURED
        every = epochs if role == "search" else math.ceil(epochs / points)  # of a try nobody sees the curve

        def tell(epoch: int, phase: str | None = None) -> None:
            if epoch == 0 and phase is None:
                self.begun = time.perf_counter()
            loss = (self.curves["train_loss"] or [None])[-1]
            on_progress(Progress(
                step=ends[epoch], steps=ends[-1], epoch=epoch, epochs=epochs, loss=math.nan if loss is None else loss,
                plan=self.plan, delta=config.delta, phase=phase,
            ))  # fmt: skip

        taken = self.steps()
        for epoch in range(1, epochs + 1):
            self.watch.on = config.diagnostics and epoch > config.epochs - config.last_epochs
            with listening(partial(tell, epoch - 1)):
                seen = [next(taken) for _ in range(ends[epoch - 1], ends[epoch])]
            if config.diagnostics:
                norms, weights = ([v for v in each if v is not None] for each in list(zip(*seen, strict=True))[1:])
                self.watch.epoch(epoch, norms, weights)
            accuracy = None
            if epoch % every == 0 or epoch == epochs:
                accuracy, self.loss = evaluate(self.measured, self.data, config)
            told = {"epoch": epoch, "train_loss": diagnostics.mean([step.loss for step in seen]), "accuracy": accuracy}
            for name, value in told.items():
                self.curves[name].append(value)
            tell(epoch)


def _record(job: Job, data: Data, training: _Training, seconds: float, cold_seconds: float) -> Record:
    config, method, plan, final = job.config, METHODS[job.method], training.plan, job.role == "final"
    scaling, accuracy = method.scaling(config), training.curves["accuracy"][-1]
    assert accuracy is not None  # the last epoch is measured
    title = method.title if method.rule else method.title.replace("SGD", _OPTIMIZERS[config.optimizer])
    public = training.model.provenance if isinstance(training.model, FineTuned) else {}
    return Record(
        config=config.to_dict(), method=method.name, title=title, about=method.about, role=job.role, seed=job.seed,
        repeat=job.repeat, choice=job.choice.to_dict(),
        scaling=None if scaling is None else {"rule": method.rule, **vars(scaling)}, learning_rate=job.learning_rate,
        # The search is not counted, so its runs state no epsilon: nobody should add theirs to a claim.
        epsilon=plan.epsilon(delta=config.delta) if plan and final else None, delta=config.delta if plan else None,
        noise_multiplier=plan.noise_multiplier if plan else None, plan=plan.to_dict() if plan else None,
        statement=_statement(plan, job), curves=training.curves, accuracy=accuracy,
        loss=training.loss if math.isfinite(training.loss) else None, seconds=round(seconds, 3),
        cold_seconds=round(cold_seconds, 3),
        data={"train": data.size, "test": len(data.test_labels), **data.provenance, **public},
        diagnostics=training.watch.to_dict(), search=job.search, command=job.command, numerics=NUMERICS,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={**installed_versions(), **device.gpu_name()},
    )  # fmt: skip


def _statement(plan: Plan | None, job: Job) -> str:
    if plan is None:
        name = _OPTIMIZERS[job.config.optimizer]
        return f"Not private: plain {name} without clipping and without noise. It is here for comparison only."
    if job.role != "final":
        return ""
    return (
        f"{plan.statement(delta=job.config.delta)}\nBatches and noise come from the seed {job.seed}, so that the run "
        "can be repeated. Whoever knows a seed can take the noise away: the guarantee is that of the same run without "
        "one."
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, config: Config) -> tuple[float, float]:
    """Accuracy and mean loss on the data to measure on, a part at a time."""
    training = model.training
    model.eval()
    part = max(1, _EVALUATED // data.test_images[0].numel())
    right, loss = 0, 0.0
    for images, labels in zip(data.test_images.split(part), data.test_labels.split(part), strict=True):
        with _autocast(config, labels.device):
            logits = model(prepared(images, config)).float()
        right += int((logits.argmax(1) == labels).sum())
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    model.train(training)
    return right / len(data.test_labels), loss / len(data.test_labels)


# -- steps -----------------------------------------------------------------------------------------------------


def untrained(config: Config, data: Data, seed: int = 0) -> nn.Module:
    """The model of a configuration as it begins."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[config.model](tuple(data.train_images.shape[1:]), data.classes)
    if isinstance(model, FineTuned):
        model.load_public(data_folder())
    return (standardized(model) if config.standardize else model).to(data.train_labels.device)


def prepared(images: Tensor, config: Config) -> Tensor:
    """Pixels as the model takes them: from 0…255 to [0, 1], then shifted and divided by public constants."""
    shift, scale = config.normalize
    x = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    return x if (shift, scale) == (0.0, 1.0) else (x - shift) / scale


def _optimizer(model: nn.Module, job: Job, steps: int, momentum: float = 0.0) -> tuple[Optimizer, LRScheduler]:
    """With the schedule of its learning rate."""
    left, made = SCHEDULES[job.config.schedule], partial(torch.optim.SGD, momentum=momentum)
    kind: Any = torch.optim.NAdam if job.config.optimizer == "nadam" else made
    optimizer: Optimizer = kind(model.parameters(), lr=job.learning_rate)
    return optimizer, LambdaLR(optimizer, lambda step: left(step / steps))


def _autocast(config: Config, place: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(place.type, torch.bfloat16, enabled=config.precision == "bf16")


def _losses_of(config: Config) -> LossFn:
    def losses(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        with _autocast(config, images.device):
            logits = model(prepared(images, config))
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none")

    return over_views(losses) if config.augment else losses


def _viewed(job: Job, place: torch.device) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """What makes the views of a batch; without augmentation the batch is its own."""
    random = torch.Generator(place).manual_seed(job.seed)  # of the views alone: no part of the mechanism
    transform = partial(augmented, amounts=job.config.augment, random=random)
    return partial(views, count=job.config.views, transform=transform) if job.config.augment else lambda batch: batch


def _train_private(run: _Training) -> Iterator[_Step]:
    job, config, data, plan, watch = run.job, run.job.config, run.data, run.plan, run.watch
    assert plan is not None and plan.steps is not None
    (optimizer, schedule), losses = _optimizer(run.model, job, plan.steps), _losses_of(config)
    parameters, ledger = structure(run.model).trainable, None if job.ledger is None else Ledger(job.ledger)
    named = f"{config.preset}, {job.method}, seed {job.seed}, {job.role}, {secrets.token_hex(4)}"
    private = privatize(
        run.model, optimizer, plan, seed=None if job.fresh else job.seed, micro_batch=config.micro_batch,
        compile=data.train_labels.is_cuda or plan.steps >= _LONG, ledger=ledger, run=named if ledger else None,
    )  # fmt: skip
    viewed, gamma1 = _viewed(job, data.train_labels.device), getattr(plan.momentum, "gamma1", 1.0)
    released = diagnostics.Released(optimizer, parameters, gamma1) if config.diagnostics else None
    for drawn in private.batches(TensorDataset(data.train_images, data.train_labels)):
        batch = drawn.map(viewed)
        before = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()} if watch.on else {}
        out = private.step(batch, losses)
        schedule.step()
        if watch.on and released is not None:
            plain = _mean_gradient(run.model, before, losses, batch, out.mask)
            watch.cosines.append(diagnostics.cosine(released.gradient, plain))
        # Without diagnostics nothing more is taken: to pick the samples drawn would wait for the device at every step.
        yield _Step(out.loss, *((out.norms[out.mask], out.weights[out.mask]) if config.diagnostics else ()))


def _mean_gradient(
    model: nn.Module, weights: dict[str, Tensor], losses: LossFn, batch: Any, mask: Tensor
) -> dict[str, Tensor]:
    """Of the samples drawn, by plain autograd, at the weights that the step saw."""
    each = losses(lambda x: torch.func.functional_call(model, weights, (x,)), batch)
    grads = torch.autograd.grad((each * mask).sum() / mask.sum().clamp(min=1), list(weights.values()))
    return dict(zip(weights, grads, strict=True))


def _train_plain(run: _Training) -> Iterator[_Step]:
    """Plain PyTorch on the batches that a private run of the same seed draws, divided by the same constant."""
    job, config, data = run.job, run.job.config, run.data
    place, compiled = data.train_labels.device, data.train_labels.is_cuda
    heavy = 1 - config.constants(job.choice)["gamma1"] if config.momentum in OUTER else 0.0  # torch's heavy ball
    sampled = sampling(config, data.size)
    steps = sampled.steps(config.trained(job.role))
    (optimizer, schedule), viewed = _optimizer(run.model, job, steps, heavy), _viewed(job, place)
    losses = torch.compile(_losses_of(config), dynamic=False) if compiled else _losses_of(config)
    draws = sampled.draws(Key(job.seed).generator("sampling"))

    def step() -> Tensor:
        chosen = torch.from_numpy(next(draws)).to(place)
        optimizer.zero_grad()
        seen = []
        for rows, drawn in _parts(chosen, _plain_rows(config, data)):
            each = losses(run.model, viewed((data.train_images[rows], data.train_labels[rows]))) * drawn
            (each.sum() / sampled.batch).backward()
            seen.append(each.detach().sum())
        optimizer.step()
        schedule.step()
        return torch.stack(seen).sum() / len(chosen)

    for number in range(steps):
        with phase("compiling") if compiled and number == 0 else nullcontext():
            loss = step()
        yield _Step(loss)


def _plain_rows(config: Config, data: Data) -> int | None:
    """Rows of a part of a plain batch, or of all of it. On CUDA, padded: a try's like a final run's, so that one
    compiled step serves both."""
    if config.micro_batch is not None or not data.train_labels.is_cuda:
        return config.micro_batch
    return max(Sizes.of(sampling(config, samples)).rows[-1] for samples in (data.size, size(config)))


def _parts(chosen: Tensor, rows: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """A batch in parts of so many rows, the last one padded, with 1 for each row that was drawn; None: all of it.

    An empty batch has one part, of padding alone: its gradient is 0.
    """
    rows = len(chosen) if rows is None else rows
    for begin in range(0, max(1, len(chosen)), max(1, rows)):
        part = chosen[begin : begin + rows]
        drawn = torch.arange(rows, device=chosen.device) < len(part)
        yield nn.functional.pad(part, (0, rows - len(part))), drawn.float()
