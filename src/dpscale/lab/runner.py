"""One run: a method, a seed, a record. A run chooses nothing on the test data: accuracy is that of the last epoch."""

import datetime
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dpscale.engine.phases import listening
from dpscale.lab.data import DATA, Data, hold_out
from dpscale.lab.models import MODELS
from dpscale.lab.norms import Norms
from dpscale.lab.presets import METHODS, Config, Method, bound
from dpscale.lab.records import Record
from dpscale.noise import Key
from dpscale.plan import Plan
from dpscale.sampling import FullBatch, Poisson, Sampling
from dpscale.scaling import Clip
from dpscale.training import privatize

NOT_PRIVATE = "Not private: plain SGD without clipping and without noise. It is here for comparison only."


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `run` needs besides a place to report to: plain values, so that it travels to another process.

    Args:
        learning_rate: what SGD gets.
        noise_multiplier: of every private method, since all share sampling, steps and budget.
        role: ``"final"`` or ``"search"``, as in `Record`.
        search: how the rate was found, for the record.
        command: the command line, for the record.
    """

    config: Config
    method: str
    seed: int
    learning_rate: float
    noise_multiplier: float
    role: str = "final"
    search: dict[str, Any] | None = None
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Where a run stands. ``epsilon()`` takes a moment, so it is computed for those who ask.

    ``phase`` is what keeps the next step waiting, as in `dpscale.engine.phases`; None while the run trains.
    """

    step: int
    steps: int
    epoch: int
    loss: float
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


def calibrate(config: Config) -> float:
    """The noise multiplier of every private method: it depends on sampling, steps and budget, not on the rule."""
    plan = Plan(scaling=Clip(C=1.0), sampling=_sampling(config, load(config, "final")), epochs=config.epochs)
    noise_multiplier = plan.calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
    assert noise_multiplier is not None
    return noise_multiplier


def run(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Record:
    """Train once and say what came of it. ``on_progress`` is called after every epoch, and at each phase before."""
    config, method = job.config, METHODS[job.method]
    data = load(config, job.role)
    model = _model(config, job.seed)
    plan = _plan(config, method, data, job.noise_multiplier)
    start = time.perf_counter()
    sampling = _sampling(config, data)
    ends = [sampling.steps(epoch) for epoch in range(1, config.epochs + 1)]
    steps = _train_plain(model, job, data, ends[-1]) if plan is None else _train_private(model, plan, job, data)
    curves: dict[str, list[float | None]] = {"epoch": [], "train_loss": [], "accuracy": [], "mean_weight": []}
    norms, loss = Norms(), float("nan")

    def tell(epoch: int, phase: str | None = None) -> None:
        if on_progress:
            step, trained = (ends[epoch - 1], curves["train_loss"][-1]) if epoch else (0, None)
            shown = float("nan") if trained is None else trained
            on_progress(
                Progress(step=step, steps=ends[-1], epoch=epoch, loss=shown, plan=plan, delta=config.delta, phase=phase)
            )

    for epoch, end in enumerate(ends, start=1):
        begun = ends[epoch - 2] if epoch > 1 else 0
        with listening(partial(tell, epoch - 1)):
            seen = [next(steps) for _ in range(begun, end)]
        weights = [step.weights for step in seen if step.weights is not None]
        if epoch > config.epochs - config.last_epochs:
            norms.add(epoch, [step.norms for step in seen if step.norms is not None], weights)
        train_loss = _mean([step.loss for step in seen])
        accuracy, loss = evaluate(model, data)
        curves["epoch"].append(epoch)
        curves["train_loss"].append(train_loss)
        curves["accuracy"].append(accuracy)
        curves["mean_weight"].append(_mean(weights))
        tell(epoch)
    seconds = time.perf_counter() - start
    final = job.role == "final"
    scaling = method.scaling(config)
    return Record(
        config=config.to_dict(),
        method=method.name,
        title=method.title,
        about=method.about,
        role=job.role,
        seed=job.seed,
        scaling=None if scaling is None else {"rule": method.rule, **vars(scaling)},
        rate=job.learning_rate * bound(method, config),
        learning_rate=job.learning_rate,
        # The search is not counted, so its runs state no epsilon: nobody should add theirs to a claim.
        epsilon=plan.epsilon(delta=config.delta) if plan and final else None,
        delta=config.delta if plan else None,
        noise_multiplier=plan.noise_multiplier if plan else None,
        plan=plan.to_dict() if plan else None,
        statement=NOT_PRIVATE if plan is None else plan.statement(delta=config.delta) if final else "",
        curves=curves,
        accuracy=accuracy,
        loss=loss if math.isfinite(loss) else None,
        seconds=round(seconds, 3),
        diagnostics=norms.to_dict(),
        search=job.search,
        command=job.command,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> tuple[float, float]:
    """Accuracy and mean loss on the data to measure on."""
    training = model.training
    model.eval()
    logits = model(data.test_images)
    model.train(training)
    right = (logits.argmax(1) == data.test_labels).float().mean()
    return right.item(), nn.functional.cross_entropy(logits, data.test_labels).item()


@cache
def _load(name: str, held_out: float | None) -> Data:
    data = DATA[name]()
    data = data if held_out is None else hold_out(data, held_out)
    return data.to("cuda" if torch.cuda.is_available() else "cpu")


def load(config: Config, role: str) -> Data:
    """The data of a run; a search sees the training part only, split once more."""
    return _load(config.data, config.held_out if role == "search" else None)


def _sampling(config: Config, data: Data) -> Sampling:
    if config.sampling == "full-batch":
        return FullBatch(size=data.size)
    # A search trains on fewer samples; the same share of them per step leaves steps and noise as they will be.
    whole = load(config, "final").size
    return Poisson(size=data.size, batch=max(1, round(config.batch * data.size / whole)))


def _plan(config: Config, method: Method, data: Data, noise_multiplier: float) -> Plan | None:
    scaling = method.scaling(config)
    if scaling is None:
        return None
    return Plan(
        scaling=scaling,
        sampling=_sampling(config, data),
        epochs=config.epochs,
        noise_multiplier=noise_multiplier,
        delta=config.delta,
        momentum=method.momentum_of(config),
    )


def _model(config: Config, seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS[config.model]()
    return model.to(load(config, "final").train_images.device)


def _optimizer(model: nn.Module, job: Job, momentum: float = 0.0) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=job.learning_rate, momentum=momentum)


def _losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


def _train_private(model: nn.Module, plan: Plan, job: Job, data: Data) -> Iterator[_Step]:
    private = privatize(model, _optimizer(model, job), plan, seed=job.seed)
    for batch in private.batches(TensorDataset(data.train_images, data.train_labels)):
        out = private.step(batch, _losses)
        yield _Step(loss=out.loss, norms=out.norms[out.mask], weights=out.weights[out.mask])


def _train_plain(model: nn.Module, job: Job, data: Data, steps: int) -> Iterator[_Step]:
    """Plain PyTorch on the batches that a private run of the same seed draws, divided by the same constant."""
    heavy = 0.0 if job.config.momentum == "none" else 1 - job.config.gamma1  # torch's momentum is the same heavy ball
    optimizer, sampling = _optimizer(model, job, heavy), _sampling(job.config, data)
    draws = sampling.draws(Key(job.seed).generator("sampling"))
    for _ in range(steps):
        chosen = torch.from_numpy(next(draws)).to(data.train_labels.device)
        losses = _losses(model, (data.train_images[chosen], data.train_labels[chosen]))
        optimizer.zero_grad()
        (losses.sum() / sampling.batch).backward()
        optimizer.step()
        yield _Step(loss=losses.detach().mean())


def _mean(values: list[Tensor]) -> float | None:
    finite = torch.cat([v.detach().float().reshape(-1) for v in values]) if values else torch.empty(0)
    finite = finite[torch.isfinite(finite)]  # the loss of an empty batch is none at all
    return finite.mean().item() if len(finite) else None
