"""One run: a method, a seed, a record. A run chooses nothing on the test data: accuracy is that of the last epoch."""

import copy
import datetime
import math
import secrets
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import NAdam, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler
from torch.utils.data import TensorDataset

from dpscale.checks import require
from dpscale.engine import LossFn
from dpscale.engine.modules import structure
from dpscale.engine.phases import listening
from dpscale.lab import device, diagnostics, features, scattering
from dpscale.lab.augment import augmented, stored
from dpscale.lab.data import Data, hold_out
from dpscale.lab.data import load as load_data
from dpscale.lab.datasets.disk import data_folder
from dpscale.lab.models import MODELS, FineTuned, large, standardized
from dpscale.lab.presets import METHODS, OUTER, SCHEDULES, SEARCH_SEED, Choice, Config
from dpscale.lab.progress import OnProgress, Progress, ignore
from dpscale.lab.provenance import NUMERICS, installed_versions
from dpscale.lab.records import Record, Role
from dpscale.ledger import Ledger
from dpscale.momentum import over_views, views
from dpscale.noise import Key
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.sampling import FullBatch, Poisson, Sampling
from dpscale.scaling import Clip

_MEASURED = 10
"""A run is measured so many times at most, one of a large model half as often."""

_EVALUATED = 6_000_000
"""Numbers of input that are evaluated at once."""

_PRECOMPUTED = 250
"""Images whose maps are computed at once."""

_LONG = 1000
"""Steps from which on a run is compiled on the CPU too: some 20 s, which make a step up to three times as fast."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `run` needs besides a place to report to: plain values, so that it travels to another process."""

    config: Config
    method: str
    seed: int
    choice: Choice
    noise_multiplier: float = 0.0  # of every private method, since all share sampling, steps and budget
    role: Role = "final"  # this and the next three as in `Record`
    repeat: int = 0
    search: dict[str, Any] | None = None
    command: str = ""
    ledger: Path | None = None  # where the run is booked, under a name of its own each time
    fresh: bool = False  # draws and noise are the operating system's, and not of the seed

    @property
    def learning_rate(self) -> float:
        """What the optimizer gets."""
        return METHODS[self.method].learning_rate(self.config, self.choice)

    @property
    def points(self) -> int:
        """At how many points it takes gradients at each step: so many times as long it takes."""
        momentum = METHODS[self.method].momentum_of(self.config, self.choice)
        return 1 if momentum is None or METHODS[self.method].rule is None else momentum.evaluations


def said(plan: Plan | None, delta: float, step: int, loss: float | None = None) -> str:
    """What a run has come to after so many steps: its loss, unless data are private, and the ε spent so far."""
    told = [] if loss is None else [f"training loss {loss:.3f}"]
    return ", ".join(told if plan is None else [*told, f"epsilon {plan.epsilon(delta=delta, steps=step):.2f}"])


# -- data and plans --------------------------------------------------------------------------------------------


@cache
def _whole(name: str, train_size: int | None, encoder: str | None) -> Data:
    """The data of an experiment, where it was read: images may still lie in a file."""
    data = load_data(name, train_size=train_size)
    ok = train_size is None or len(data.train_labels.unique()) == data.classes
    must, action = "such that every class has a sample", "Take more (--train-size)."
    require(ok, "Config", "train_size", must, train_size, action)
    if encoder == scattering.SCATTERING:
        return scattering.scattered(data)
    return data if encoder is None else features.features(data, encoder)


@cache
def _precomputed(model: str, mirrored: bool, precision: str, place: str, *which: Any) -> Data:
    """The data with the maps of a fine-tuned network in place of the images: (N, views, channels, height, width), of
    every training image and, with ``mirrored``, of its mirror image.

    Each row is a fixed, public function of its own image, and a sample's views stay its own: nothing couples.
    """
    data = _whole(*which)
    network = _public(MODELS[model](tuple(data.train_images.shape[1:]), data.classes)).to(place)
    assert isinstance(network, FineTuned)

    def maps(images: Tensor, *turns: tuple[int, ...]) -> Tensor:
        with torch.no_grad(), _autocast(precision, torch.device(place)):
            parts = (some.to(place) for some in images.split(_PRECOMPUTED))
            return torch.cat([torch.stack([network.maps(_pixels(x.flip(t))) for t in turns], 1) for x in parts])

    with _without_tf32():
        train = maps(data.train_images, *([(), (-1,)] if mirrored else [()]))
        test = maps(data.test_images, ())
    made = {"model": model, "dtype": str(train.dtype).split(".")[-1], "mirrored": mirrored}
    provenance = {**data.provenance, "precomputed": made}
    return replace(data, train_images=train, test_images=test, provenance=provenance)


@cache
def _on_device(
    held_out: float | None, split: int, place: str, precomputed: tuple[str, bool, str] | None, *which: Any
) -> Data:
    data = _whole(*which) if precomputed is None else _precomputed(*precomputed, place, *which)
    return (data if held_out is None else hold_out(data, held_out, split)).to(place)


def whole(config: Config) -> Data:
    """All data of an experiment."""
    return _whole(config.data, config.train_size, config.encoder)


def load(config: Config, role: str, seed: int = SEARCH_SEED) -> Data:
    """The data of a run, where it trains; a search sees the training part only, split once more, by each of its seeds
    in another way."""
    held_out, split = (config.held_out, max(0, seed - SEARCH_SEED)) if role == "search" else (None, 0)
    maps = (config.model, bool(config.augment), config.precision) if config.precomputed else None
    return _on_device(held_out, split, device.name(), maps, config.data, config.train_size, config.encoder)


def sampling(config: Config, samples: int) -> Sampling:
    """How batches are drawn. A search trains on fewer samples; the same share of them per step leaves steps and noise
    as they will be."""
    if config.sampling == "full-batch":
        return FullBatch(size=samples)
    return Poisson(size=samples, batch=max(1, round(config.batch * samples / whole(config).size)))


def planned(config: Config, data: Data | None = None) -> Plan:
    """What one run on these data does, its noise still to be calibrated."""
    sampled = sampling(config, (data or whole(config)).size)
    return Plan(scaling=Clip(C=1.0), sampling=sampled, epochs=config.epochs)


def calibrate(config: Config) -> float:
    """The noise multiplier of every private method: it depends on sampling, steps and budget, not on the rule."""
    found = planned(config).calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
    assert found is not None
    return found


def _plan(job: Job, data: Data) -> Plan | None:
    config, method = job.config, METHODS[job.method]
    scaling = method.scaling(config)
    return None if scaling is None else Plan(
        scaling=scaling, sampling=sampling(config, data.size), epochs=config.trained(job.role), delta=config.delta,
        noise_multiplier=job.noise_multiplier, momentum=method.momentum_of(config, job.choice),
    )  # fmt: skip


# -- runs ------------------------------------------------------------------------------------------------------


def run(job: Job, on_progress: OnProgress = ignore) -> Record:
    """Train once and say what came of it. ``on_progress`` is called after every epoch, and at each phase before."""
    start, data = time.perf_counter(), load(job.config, job.role, job.seed)
    training = _Training(job, data, _plan(job, data))
    training.epochs(on_progress)
    return _record(training, time.perf_counter() - training.begun, training.begun - start)


def rehearse(job: Job) -> None:
    """Take the first step of a run, which compiles it, and forget the run: the compiler keeps it on disk."""
    next(steps(replace(job, ledger=None)))  # nobody sees what it releases


def steps(job: Job) -> Iterator[Any]:
    """The steps of a run as they are taken, nothing measured between them: for those who time them."""
    data = load(job.config, job.role, job.seed)
    yield from _Training(job, data, _plan(job, data)).steps()


def trained(job: Job, plan: Plan, data: Data, on_progress: OnProgress = ignore) -> nn.Module:
    """The model of a private run under this plan, or the average of its weights where the configuration has one."""
    training = _Training(job, data, plan)
    for step, _ in enumerate(training.steps(), start=1):
        on_progress(Progress("training", step, plan.steps, "steps", partial(said, plan, job.config.delta, step)))
    return training.measured


class _Training:
    """A run under way: what is trained, and what came of it so far."""

    def __init__(self, job: Job, data: Data, plan: Plan | None) -> None:
        job.config.require_device()
        self.job, self.config, self.data, self.plan = job, job.config, data, plan
        self.model = untrained(job.config, data, job.seed)
        self.measured = copy.deepcopy(self.model) if job.config.average else self.model
        self.watch = diagnostics.Watch()
        self.curves: dict[str, list[float | None]] = {"epoch": [], "train_loss": [], "accuracy": []}
        self.loss, self.begun = math.nan, time.perf_counter()  # begun when the cold start is over

    def steps(self) -> Generator[Tensor]:
        """The loss of every step as it is taken, without TF32, which torch has on for convolutions: the bound is as
        strict as the plan says."""
        with _without_tf32():
            taken = _train_plain(self) if self.plan is None else _train_private(self)
            for number, loss in enumerate(taken, start=1):
                if self.config.average:
                    self._average(min(self.config.average, number / (number + 10)))  # the start is soon forgotten
                yield loss

    @torch.no_grad()
    def _average(self, keep: float) -> None:
        for average, weight in zip(self.measured.parameters(), self.model.parameters(), strict=True):
            average.lerp_(weight, 1 - keep)

    def epochs(self, on_progress: OnProgress) -> None:
        """All epochs, measured now and then and at the end."""
        config, role = self.config, self.job.role
        epochs, drawn = config.trained(role), sampling(config, self.data.size)
        ends = [0, *(drawn.steps(epoch) for epoch in range(1, epochs + 1))]
        points = _MEASURED // 2 if large(config.model) else _MEASURED
        every = epochs if role == "search" else math.ceil(epochs / points)  # of a try nobody sees the curve

        def tell(epoch: int, phase: str | None = None) -> None:
            if epoch == 0 and phase is None:
                self.begun = time.perf_counter()
            words = partial(said, self.plan, config.delta, ends[epoch], (self.curves["train_loss"] or [None])[-1])
            on_progress(Progress(phase or "training", ends[epoch], ends[-1], "steps", words if epoch else str))

        taken = self.steps()
        for epoch in range(1, epochs + 1):
            self.watch.on = config.diagnostics and epoch > config.epochs - config.last_epochs
            with listening(partial(tell, epoch - 1)):
                losses = [next(taken) for _ in range(ends[epoch - 1], ends[epoch])]
            self.watch.epoch(epoch)
            accuracy = None
            if epoch % every == 0 or epoch == epochs:
                accuracy, self.loss = evaluate(self.measured, self.data, config)
            told = {"epoch": epoch, "train_loss": diagnostics.mean(losses), "accuracy": accuracy}
            for name, value in told.items():
                self.curves[name].append(value)
            tell(epoch)
        taken.close()


def _record(training: _Training, seconds: float, cold_seconds: float) -> Record:
    job, config, data, plan = training.job, training.config, training.data, training.plan
    method, final, accuracy = METHODS[job.method], job.role == "final", training.curves["accuracy"][-1]
    assert accuracy is not None  # the last epoch is measured
    scaling, optimizer = method.scaling(config), {"sgd": "SGD", "nadam": "NAdam"}[config.optimizer]
    public = training.model.provenance if isinstance(training.model, FineTuned) else {}
    statement = f"Not private: plain {optimizer} without clipping and without noise. It is here for comparison only."
    if plan is not None:
        statement = "" if not final else (
            f"{plan.statement(delta=config.delta)}\nBatches and noise come from the seed {job.seed}, so that the run "
            "can be repeated. Whoever knows a seed can take the noise away: the guarantee is that of the same run "
            "without one."
        )  # fmt: skip
    return Record(
        config=config.to_dict(), method=method.name, about=method.about, role=job.role, seed=job.seed,
        title=method.title if method.rule else method.title.replace("SGD", optimizer), repeat=job.repeat,
        choice=job.choice.to_dict(), scaling=None if scaling is None else {"rule": method.rule, **vars(scaling)},
        # The search is not counted, so its runs state no epsilon: nobody should add theirs to a claim.
        epsilon=plan.epsilon(delta=config.delta) if plan and final else None, delta=config.delta if plan else None,
        noise_multiplier=plan.noise_multiplier if plan else None, plan=plan.to_dict() if plan else None,
        learning_rate=job.learning_rate, statement=statement, curves=training.curves, accuracy=accuracy,
        loss=training.loss if math.isfinite(training.loss) else None, seconds=round(seconds, 3),
        cold_seconds=round(cold_seconds, 3), numerics=NUMERICS, search=job.search, command=job.command,
        data={"train": data.size, "test": len(data.test_labels), **data.provenance, **public},
        diagnostics=training.watch.to_dict(), versions={**installed_versions(), **device.gpu_name()},
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )  # fmt: skip


@torch.no_grad()
def evaluate(model: nn.Module, data: Data, config: Config) -> tuple[float, float]:
    """Accuracy and mean loss on the data to measure on, a part at a time."""
    training = model.training
    model.eval()
    part = max(1, _EVALUATED // data.test_images[0].numel())
    right, loss = 0, 0.0
    for images, labels in zip(data.test_images.split(part), data.test_labels.split(part), strict=True):
        shown = images[:, 0] if config.precomputed else images  # of the image itself, not of its mirror image
        with _autocast(config.precision, labels.device):
            logits = model(prepared(shown, config)).float()
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
    model = _public(model)
    return (standardized(model) if config.standardize else model).to(data.train_labels.device)


def _public(model: nn.Module) -> nn.Module:
    """The model, with public weights where it has any."""
    if isinstance(model, FineTuned):
        model.load_public(data_folder())
    return model


def prepared(images: Tensor, config: Config) -> Tensor:
    """Pixels as the model takes them: from 0…255 to [0, 1], then shifted and divided by public constants."""
    shift, scale = config.normalize
    x = _pixels(images)
    return x if (shift, scale) == (0.0, 1.0) else (x - shift) / scale


def _pixels(images: Tensor) -> Tensor:
    return images.float() / 255 if images.dtype == torch.uint8 else images.float()


def _optimizer(run: _Training, steps: int, momentum: float = 0.0) -> tuple[Optimizer, LRScheduler]:
    """With the schedule of its learning rate."""
    left, sgd = SCHEDULES[run.config.schedule], partial(torch.optim.SGD, momentum=momentum)
    kind: Callable[..., Optimizer] = NAdam if run.config.optimizer == "nadam" else sgd
    optimizer = kind(run.model.parameters(), lr=run.job.learning_rate)
    return optimizer, LambdaLR(optimizer, lambda step: left(step / steps))


def _autocast(precision: str, place: torch.device) -> AbstractContextManager[Any]:
    return torch.autocast(place.type, torch.bfloat16, enabled=precision == "bf16")


@contextmanager
def _without_tf32() -> Iterator[None]:
    places: tuple[Any, ...] = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [place.allow_tf32 for place in places]
    try:
        for place in places:
            place.allow_tf32 = False
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.allow_tf32 = value


def _losses_of(config: Config) -> LossFn:
    def losses(model: Callable[[Tensor], Tensor], batch: tuple[Tensor, Tensor]) -> Tensor:
        images, labels = batch
        with _autocast(config.precision, images.device):
            logits = model(prepared(images, config))
        return nn.functional.cross_entropy(logits.float(), labels, reduction="none")

    return over_views(losses) if config.augment or config.precomputed else losses


def _viewed(job: Job, place: torch.device) -> Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """What makes the views of a batch; without augmentation the batch is its own."""
    random = torch.Generator(place).manual_seed(job.seed)  # of the views alone: no part of the mechanism
    if job.config.precomputed:
        share = job.config.augment.get("mirror", 0.0)
        return lambda batch: stored(batch, job.config.views, share, random)
    transform = partial(augmented, amounts=job.config.augment, random=random)
    return partial(views, count=job.config.views, transform=transform) if job.config.augment else lambda batch: batch


def _train_private(run: _Training) -> Iterator[Tensor]:
    job, config, data, plan, watch = run.job, run.config, run.data, run.plan, run.watch
    assert plan is not None and plan.steps is not None
    (optimizer, schedule), losses = _optimizer(run, plan.steps), _losses_of(config)
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
        if watch.on and released is not None:  # beside plain autograd, at the weights that the step saw
            each = losses(lambda x, at=before: torch.func.functional_call(run.model, at, (x,)), batch)
            mean = (each * out.mask).sum() / out.mask.sum().clamp(min=1)
            plain = dict(zip(before, torch.autograd.grad(mean, list(before.values())), strict=True))
            watch.cosines.append(diagnostics.cosine(released.gradient, plain))
        if config.diagnostics:  # else not: to pick the samples drawn would wait for the device at every step
            watch.saw(out.norms[out.mask], out.weights[out.mask])
        yield out.loss


def _train_plain(run: _Training) -> Iterator[Tensor]:
    """Plain PyTorch on the batches that a private run of the same seed draws, divided by the same constant."""
    job, config, data, place = run.job, run.config, run.data, run.data.train_labels.device
    heavy = 1 - config.constants(job.choice)["gamma1"] if config.momentum in OUTER else 0.0  # torch's heavy ball
    sampled = sampling(config, data.size)
    steps = sampled.steps(config.trained(job.role))
    (optimizer, schedule), losses, viewed = _optimizer(run, steps, heavy), _losses_of(config), _viewed(job, place)
    draws = sampled.draws(Key(job.seed).generator("sampling"))
    for _ in range(steps):
        chosen = torch.from_numpy(next(draws)).to(place)
        loss = torch.zeros((), device=place)
        optimizer.zero_grad(set_to_none=False)  # momentum goes on where nothing was drawn, as in a private step
        for rows in chosen.split(config.micro_batch or max(1, len(chosen))) if len(chosen) else ():
            part = losses(run.model, viewed((data.train_images[rows], data.train_labels[rows]))).sum()
            (part / sampled.batch).backward()
            loss += part.detach()
        optimizer.step()
        schedule.step()
        yield loss / len(chosen)
