"""One run: a method, a seed, a record. A run chooses nothing on the test data: accuracy is that of the last epoch."""

import copy
import datetime
import math
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

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
from dpscale.lab.config import METHODS, OUTER, SCHEDULES, SEARCH_SEED, Choice, Config
from dpscale.lab.data import Data, hold_out
from dpscale.lab.data import load as load_data
from dpscale.lab.datasets.folder import data_folder
from dpscale.lab.encoders import features
from dpscale.lab.finetuning import FineTuned
from dpscale.lab.models import MODELS, large, standardized
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
    in `dpscale.engine.phases`; None while the run trains. ``loss`` is exact: None where data are private.
    """

    step: int
    steps: int
    epoch: int
    epochs: int
    loss: float | None
    plan: Plan | None
    delta: float
    phase: str | None = None

    def epsilon(self) -> float | None:
        """ε spent so far; None for a run that is not private."""
        return None if self.plan is None else self.plan.epsilon(delta=self.delta, steps=self.step)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Step:
    loss: Tensor
    norms: Tensor | None = None
    weights: Tensor | None = None


@dataclass(eq=False)
class _Watch:
    """The diagnostics of a run; ``on`` while they are taken."""

    on: bool = False
    norms: diagnostics.Norms = field(default_factory=diagnostics.Norms)
    similarity: diagnostics.Similarity = field(default_factory=diagnostics.Similarity)
    mean_weight: list[float | None] = field(default_factory=list)

    def take(self, epoch: int, steps: list[_Step]) -> None:
        """Note norms and weights of an epoch's steps."""
        weights = [step.weights for step in steps if step.weights is not None]
        self.mean_weight.append(_mean(weights))
        if self.on:
            self.norms.add(epoch, [step.norms for step in steps if step.norms is not None], weights)

    def to_dict(self) -> dict[str, Any] | None:
        """Plain values for a record; None if there are none."""
        found = {"norms": self.norms.to_dict(), "similarity": self.similarity.to_dict()}
        if not any(found.values()):
            return None
        return {"not_private": True, "note": diagnostics.NOTE, **found, "mean_weight": self.mean_weight}


@dataclass(eq=False)
class _Trained:
    """What came of a run so far."""

    curves: dict[str, list[float | None]] = field(
        default_factory=lambda: {"epoch": [], "train_loss": [], "accuracy": []}
    )
    loss: float = math.nan
    begun: float = 0.0  # when the cold start was over


def calibrate(config: Config) -> float:
    """The noise multiplier of every private method: it depends on sampling, steps and budget, not on the rule."""
    plan = Plan(scaling=Clip(C=1.0), sampling=_sampling(config, size(config)), epochs=config.epochs)
    noise_multiplier = plan.calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
    assert noise_multiplier is not None
    return noise_multiplier


def run(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Record:
    """Train once and say what came of it. ``on_progress`` is called after every epoch, and at each phase before."""
    job.config.require_device()
    with _exact_products():
        start, data = time.perf_counter(), load(job.config, job.role, job.seed)
        model, plan, watch = _model(job.config, job.seed, data), _plan(job, data), _Watch()
        trained = _train(job, data, model, plan, watch, on_progress or (lambda _: None))
        seconds = time.perf_counter() - trained.begun, trained.begun - start
        return _record(job, data, model, plan, watch, trained, seconds)


def rehearse(job: Job) -> None:
    """Take the first step of a run, which compiles it, and forget the run: the compiler keeps it on disk."""
    next(steps(replace(job, ledger=None)))  # nobody sees what it releases


def steps(job: Job) -> Iterator[Any]:
    """The steps of a run as they are taken, nothing measured between them: for those who time them."""
    with _exact_products():
        data = load(job.config, job.role, job.seed)
        yield from _steps(_model(job.config, job.seed, data), job, data, _plan(job, data), _Watch())


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


def _train(
    job: Job, data: Data, model: nn.Module, plan: Plan | None, watch: _Watch, on_progress: Callable[[Progress], None]
) -> _Trained:
    """All epochs, measured now and then and at the end."""
    config, sampling = job.config, _sampling(job.config, data.size)
    ends = [0, *(sampling.steps(epoch) for epoch in range(1, config.trained(job.role) + 1))]
    epochs = len(ends) - 1
    measured = copy.deepcopy(model) if config.average else model
    points = _MEASURED // 2 if large(config.model) else _MEASURED
    every = epochs if job.role == "search" else math.ceil(epochs / points)  # of a try nobody sees the curve
    taken, done = _steps(model, job, data, plan, watch), _Trained(begun=time.perf_counter())

    def tell(epoch: int, phase: str | None = None) -> None:
        if epoch == 0 and phase is None:
            done.begun = time.perf_counter()  # the cold start is over
        loss = (done.curves["train_loss"] or [None])[-1]
        on_progress(Progress(
            step=ends[epoch], steps=ends[-1], epoch=epoch, epochs=epochs, loss=math.nan if loss is None else loss,
            plan=plan, delta=config.delta, phase=phase,
        ))  # fmt: skip

    for epoch in range(1, epochs + 1):
        watch.on = config.diagnostics and epoch > config.epochs - config.last_epochs
        seen = []
        with listening(partial(tell, epoch - 1)):
            for number in range(ends[epoch - 1], ends[epoch]):
                seen.append(next(taken))
                if config.average:
                    _average(measured, model, number + 1, config.average)
        if config.diagnostics:
            watch.take(epoch, seen)
        due = epoch % every == 0 or epoch == epochs
        accuracy, done.loss = evaluate(measured, data, config) if due else (None, done.loss)
        for name, value in (("epoch", epoch), ("train_loss", _mean([step.loss for step in seen]))):
            done.curves[name].append(value)
        done.curves["accuracy"].append(accuracy)
        tell(epoch)
    return done


def _record(
    job: Job, data: Data, model: nn.Module, plan: Plan | None, watch: _Watch, trained: _Trained,
    seconds: tuple[float, float],
) -> Record:  # fmt: skip
    config, method, final = job.config, METHODS[job.method], job.role == "final"
    scaling, accuracy = method.scaling(config), trained.curves["accuracy"][-1]
    assert accuracy is not None  # the last epoch is measured
    return Record(
        config=config.to_dict(), method=method.name, title=_title(job), about=method.about, role=job.role,
        seed=job.seed, repeat=job.repeat, choice=job.choice.to_dict(),
        scaling=None if scaling is None else {"rule": method.rule, **vars(scaling)}, learning_rate=job.learning_rate,
        # The search is not counted, so its runs state no epsilon: nobody should add theirs to a claim.
        epsilon=plan.epsilon(delta=config.delta) if plan and final else None, delta=config.delta if plan else None,
        noise_multiplier=plan.noise_multiplier if plan else None, plan=plan.to_dict() if plan else None,
        statement=_statement(plan, job), curves=trained.curves, accuracy=accuracy,
        loss=trained.loss if math.isfinite(trained.loss) else None,
        seconds=round(seconds[0], 3), cold_seconds=round(seconds[1], 3),
        data={"train": data.size, "test": len(data.test_labels), **data.provenance, **_public(model)},
        diagnostics=watch.to_dict(), search=job.search, command=job.command, numerics=NUMERICS,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        versions={**installed_versions(), **device.gpu_name()},
    )  # fmt: skip


_OPTIMIZERS = {"sgd": "SGD", "nadam": "NAdam"}


def _title(job: Job) -> str:
    method = METHODS[job.method]
    return method.title if method.rule else method.title.replace("SGD", _OPTIMIZERS[job.config.optimizer])


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
def _average(average: nn.Module, model: nn.Module, step: int, most: float) -> None:
    """a = keep·a + (1 - keep)·w, in which keep = min(most, t/(t + 10)) after step t: the start is soon forgotten."""
    keep = min(most, step / (step + 10))
    for a, w in zip(average.parameters(), model.parameters(), strict=True):
        a.lerp_(w, 1 - keep)


def planned(config: Config, data: Data) -> Plan:
    """What one run on these data does, its noise still to be calibrated."""
    return Plan(scaling=Clip(C=1.0), sampling=_sampling(config, data.size), epochs=config.epochs)


def untrained(config: Config, data: Data, seed: int = 0) -> nn.Module:
    """The model of a configuration as it begins, to load weights into."""
    return _model(config, seed, data)


def trained(job: Job, plan: Plan, data: Data) -> nn.Module:
    """The model of a private run under this plan, or the average of its weights where the configuration has one."""
    job.config.require_device()
    with _exact_products():
        model = _model(job.config, job.seed, data)
        average = copy.deepcopy(model)
        for number, _ in enumerate(_train_private(model, plan, job, data, _Watch()), start=1):
            if job.config.average:
                _average(average, model, number, job.config.average)
    return average if job.config.average else model


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, config: Config) -> tuple[float, float]:
    """Accuracy and mean loss on the data to measure on, a part at a time."""
    training = model.training
    model.eval()
    part = max(1, _EVALUATED // data.test_images[0].numel())
    right, loss = 0, 0.0
    for k in range(0, len(data.test_labels), part):
        labels = data.test_labels[k : k + part]
        with _autocast(config, labels.device):
            logits = model(prepared(data.test_images[k : k + part], config)).float()
        right += int((logits.argmax(1) == labels).sum())
        loss += nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    model.train(training)
    return right / len(data.test_labels), loss / len(data.test_labels)


def prepared(images: Tensor, config: Config) -> Tensor:
    """Pixels as the model takes them: from 0…255 to [0, 1], then shifted and divided by public constants."""
    shift, scale = config.normalize
    x = images.float() / 255 if images.dtype == torch.uint8 else images.float()
    return x if (shift, scale) == (0.0, 1.0) else (x - shift) / scale


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
def _on_device(
    name: str, train_size: int | None, encoder: str | None, held_out: float | None, split: int, place: str
) -> Data:
    data = _whole(name, train_size, encoder)
    return (data if held_out is None else hold_out(data, held_out, split)).to(place)


def load(config: Config, role: str, seed: int = SEARCH_SEED) -> Data:
    """The data of a run, where it trains; a search sees the training part only, split once more, by each of its seeds
    in another way."""
    search = role == "search"
    held_out, split = (config.held_out, max(0, seed - SEARCH_SEED)) if search else (None, 0)
    return _on_device(config.data, config.train_size, config.encoder, held_out, split, device.name())


def size(config: Config) -> int:
    """Number of training samples."""
    return _whole(config.data, config.train_size, config.encoder).size


def shape(config: Config) -> tuple[int, ...]:
    """Of one sample."""
    return tuple(_whole(config.data, config.train_size, config.encoder).train_images.shape[1:])


def _sampling(config: Config, samples: int) -> Sampling:
    if config.sampling == "full-batch":
        return FullBatch(size=samples)
    # A search trains on fewer samples; the same share of them per step leaves steps and noise as they will be.
    return Poisson(size=samples, batch=max(1, round(config.batch * samples / size(config))))


def total_steps(job: Job) -> int:
    """Steps of a run."""
    return _sampling(job.config, size(job.config)).steps(job.config.trained(job.role))


def _plan(job: Job, data: Data) -> Plan | None:
    method = METHODS[job.method]
    scaling = method.scaling(job.config)
    if scaling is None:
        return None
    return Plan(
        scaling=scaling, sampling=_sampling(job.config, data.size), epochs=job.config.trained(job.role),
        noise_multiplier=job.noise_multiplier, delta=job.config.delta,
        momentum=method.momentum_of(job.config, job.choice),
    )  # fmt: skip


def _model(config: Config, seed: int, data: Data) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[config.model](tuple(data.train_images.shape[1:]), data.classes)
    if isinstance(model, FineTuned):
        model.load_public(data_folder())
    return (standardized(model) if config.standardize else model).to(data.train_labels.device)


def _public(model: nn.Module) -> dict[str, str]:
    """Where the public weights of a model come from, if it has any."""
    return model.provenance if isinstance(model, FineTuned) else {}


def _optimizer(model: nn.Module, job: Job, momentum: float = 0.0) -> Optimizer:
    if job.config.optimizer == "nadam":
        return torch.optim.NAdam(model.parameters(), lr=job.learning_rate)
    return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=momentum)


def _schedule(optimizer: Optimizer, config: Config, steps: int) -> LRScheduler:
    left = SCHEDULES[config.schedule]
    return LambdaLR(optimizer, lambda step: left(step / steps))


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


def _steps(model: nn.Module, job: Job, data: Data, plan: Plan | None, watch: _Watch) -> Iterator[_Step]:
    return _train_plain(model, job, data) if plan is None else _train_private(model, plan, job, data, watch)


def _train_private(model: nn.Module, plan: Plan, job: Job, data: Data, watch: _Watch) -> Iterator[_Step]:
    config, optimizer, losses = job.config, _optimizer(model, job), _losses_of(job.config)
    parameters, ledger = structure(model).trainable, None if job.ledger is None else Ledger(job.ledger)
    assert plan.steps is not None
    named = f"{config.preset}, {job.method}, seed {job.seed}, {job.role}, {secrets.token_hex(4)}"
    private = privatize(
        model, optimizer, plan, seed=None if job.fresh else job.seed, micro_batch=config.micro_batch,
        compile=data.train_labels.is_cuda or plan.steps >= _LONG, ledger=ledger, run=named if ledger else None,
    )  # fmt: skip
    schedule, viewed = _schedule(optimizer, config, plan.steps), _viewed(job, data.train_labels.device)
    gamma1 = getattr(plan.momentum, "gamma1", 1.0)
    released = diagnostics.Released(optimizer, parameters, gamma1) if config.diagnostics else None
    for drawn in private.batches(TensorDataset(data.train_images, data.train_labels)):
        batch = drawn.map(viewed)
        before = {n: p.detach().clone().requires_grad_() for n, p in parameters.items()} if watch.on else {}
        out = private.step(batch, losses)
        schedule.step()
        if watch.on and released is not None:
            watch.similarity.add(released.gradient, _mean_gradient(model, before, losses, batch, out.mask))
        # Without diagnostics nothing more is taken: to pick the samples drawn would wait for the device at every step.
        seen = (out.norms[out.mask], out.weights[out.mask]) if config.diagnostics else (None, None)
        yield _Step(loss=out.loss, norms=seen[0], weights=seen[1])


def _mean_gradient(
    model: nn.Module, weights: dict[str, Tensor], losses: LossFn, batch: Any, mask: Tensor
) -> dict[str, Tensor]:
    """Of the samples drawn, by plain autograd, at the weights that the step saw."""
    each = losses(lambda x: torch.func.functional_call(model, weights, (x,)), batch)
    grads = torch.autograd.grad((each * mask).sum() / mask.sum().clamp(min=1), list(weights.values()))
    return dict(zip(weights, grads, strict=True))


def _train_plain(model: nn.Module, job: Job, data: Data) -> Iterator[_Step]:
    """Plain PyTorch on the batches that a private run of the same seed draws, divided by the same constant."""
    config, place, compiled = job.config, data.train_labels.device, data.train_labels.is_cuda
    heavy = 1 - config.constants(job.choice)["gamma1"] if config.momentum in OUTER else 0.0  # torch's heavy ball
    optimizer, sampling = _optimizer(model, job, heavy), _sampling(config, data.size)
    steps = sampling.steps(config.trained(job.role))
    losses, schedule, viewed = _losses_of(config), _schedule(optimizer, config, steps), _viewed(job, place)
    losses = torch.compile(losses, dynamic=False) if compiled else losses
    draws = sampling.draws(Key(job.seed).generator("sampling"))

    def step() -> Tensor:
        chosen = torch.from_numpy(next(draws)).to(place)
        optimizer.zero_grad()
        seen = []
        for rows, drawn in _parts(chosen, _plain_rows(config, data)):
            each = losses(model, viewed((data.train_images[rows], data.train_labels[rows]))) * drawn
            (each.sum() / sampling.batch).backward()
            seen.append(each.detach().sum())
        optimizer.step()
        schedule.step()
        return torch.stack(seen).sum() / len(chosen)

    for number in range(steps):
        with phase("compiling") if compiled and number == 0 else nullcontext():
            loss = step()
        yield _Step(loss=loss)


def _plain_rows(config: Config, data: Data) -> int | None:
    """Rows of a part of a plain batch, or of all of it. On CUDA, padded: a try's like a final run's, so that one
    compiled step serves both."""
    if config.micro_batch is not None or not data.train_labels.is_cuda:
        return config.micro_batch
    return max(Sizes.of(_sampling(config, samples)).rows[-1] for samples in (data.size, size(config)))


def _parts(chosen: Tensor, rows: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """A batch in parts of so many rows, the last one padded, with 1 for each row that was drawn; None: all of it.

    An empty batch has one part, of padding alone: its gradient is 0.
    """
    rows = len(chosen) if rows is None else rows
    for begin in range(0, max(1, len(chosen)), max(1, rows)):
        part = chosen[begin : begin + rows]
        drawn = torch.arange(rows, device=chosen.device) < len(part)
        yield nn.functional.pad(part, (0, rows - len(part))), drawn.float()


def _mean(values: list[Tensor]) -> float | None:
    finite = torch.cat([v.detach().float().reshape(-1) for v in values]) if values else torch.empty(0)
    finite = finite[torch.isfinite(finite)]  # the loss of an empty batch is none at all
    return finite.mean().item() if len(finite) else None
