"""The private step, and the loop around it: claim the draw, sum, add noise, hand over to the optimizer."""

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dpscale.batches import Batch, Batches, Padding, device_of, fetched, part_of, rows_of
from dpscale.checks import complaint, out_of_memory, require, require_count
from dpscale.engine import Engine, LossFn, ScaledSum, check_losses, require_finite, trainable
from dpscale.engine.compat import foreach_add_, foreach_div_
from dpscale.engine.modules import Structure, structure
from dpscale.guard import Guard, wrapped
from dpscale.momentum import MomentumState
from dpscale.noise import Key, Noise
from dpscale.plan import Plan
from dpscale.run import RunState
from dpscale.sampling import Draw
from dpscale.shapes import Sizes

log = logging.getLogger("dpscale")

Parameters = Mapping[str, Tensor]


class BudgetExhausted(RuntimeError):
    """Every planned step is used up; nothing was released."""


@dataclass(frozen=True, repr=False)
class StepReport:
    """What a step saw. All of it is exact, without noise: for research on public data, never for release.

    Attributes:
        samples: how many were drawn.
        losses, norms, weights: per row of the batch, (B,). An empty draw has one row, which is masked.
        ignored: how many samples had a gradient that is not finite, and so added nothing.
    """

    samples: int
    losses: Tensor
    norms: Tensor
    weights: Tensor
    ignored: Tensor

    @property
    def loss(self) -> Tensor:
        """Mean over the samples drawn; 0 for an empty draw."""
        return self.losses.sum() / max(1, self.samples)

    @property
    def mask(self) -> Tensor:
        """Which rows are samples, (B,)."""
        return torch.arange(len(self.losses), device=self.losses.device) < self.samples

    def __repr__(self) -> str:
        return f"StepReport(samples={self.samples}, ignored={int(self.ignored)})"


class Private:
    """A model and its optimizer under a privacy plan; made by `privatize`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, seed: int | None, micro_batch: int | None,
        compile: bool,
    ) -> None:  # fmt: skip
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._state = RunState()
        self._key = Key(seed)
        self._noise = Noise(self._key)
        self._padding = Padding(Sizes.of(plan.sampling, micro_batch)) if compile else None
        self._engine = Engine(model, compile=compile, any_size=self._padding is not None and self._padding.varies)
        self._guard = Guard(optimizer, self)
        self._micro_batch = micro_batch
        self._dataset: Any = None  # whose samples have a place that must stay
        self._remembered: tuple[Any, Dataset[Any], Mapping[str, Any]] | None = None
        self._structure: Structure | None = None
        self._parameters()

    @property
    def model(self) -> nn.Module:
        """Yours, unchanged; hooks on it work as ever."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """Yours, unchanged; schedulers and hooks on it work as ever. A plain ``backward()`` is allowed (an evaluation),
        but no optimizer may apply what it added."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The source of σ, bound and ε. Another one would put a new price on what is already released, so it stays."""
        return self._plan

    @property
    def steps(self) -> int:
        """How many draws may be released in all."""
        assert self._plan.steps is not None
        return self._plan.steps

    @property
    def steps_taken(self) -> int:
        """How many draws have been released."""
        return self._state.steps_taken

    @property
    def waiting(self) -> bool:
        """Whether a draw is outstanding: handed out, and not yet released."""
        return bool(self._state.outstanding)

    @property
    def _charged(self) -> int:
        """Steps to account for. A shuffled epoch goes on even if a batch of it is not used."""
        return self._state.charged(self._plan.sampling.independent)

    @property
    def _per_sample(self) -> bool:
        """Whether every sample has a memory of its own."""
        return self.plan.momentum is not None and self.plan.momentum.per_sample

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A private run cannot be copied or pickled: two of them would add the same noise to different gradients, "
            "and each would account for its own steps alone. Copy or save the model, as model.state_dict()."
        )

    def __repr__(self) -> str:
        names = f"model={type(self.model).__name__}, optimizer={type(self.optimizer).__name__}"
        return f"Private({names}, steps_taken={self.steps_taken}, steps={self.steps})"

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far; 0 before the first step."""
        return self._plan.epsilon(delta=delta, steps=self._charged)

    def statement(self, delta: float | None = None) -> str:
        """What to tell a reviewer about what was released so far, whether or not the plan was carried out."""
        return self._plan.statement(delta=delta, steps=self._charged)

    def public_data(self) -> AbstractContextManager[None]:
        """Inside ``with private.public_data():`` optimizers may apply plain gradients, which the run refuses elsewhere.

        They cost no privacy if the data are public and were not chosen by looking at the private ones.
        """
        return self._guard.public()

    def remember(self, source: Any, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """What `batches` and `epochs` draw from when they are given nothing, or ``source``: see `make_private`."""
        self._check_data(dataset, loader)
        self._remembered = source, dataset, loader

    def batches(self, dataset: Dataset[Any] | None = None, **loader: Any) -> Batches:
        """Draw the planned batches, those already taken left out; ``len`` says how many.

        Each is a `Batch`: the rows of the samples drawn, without padding. It knows its draw, so batches may be taken
        ahead of their use, moved with ``batch.to(device)`` and changed with ``batch.map(fn)``. Each is released once;
        one that is not released costs nothing (under `Shuffled` it does). An empty draw is a batch of one row of zeros,
        which is masked: a step of noise.

        Args:
            dataset: a `TensorDataset` (indexed on the device where its tensors are), or any map-style dataset. May be
                left out after `make_private`.
            loader: passed on to `torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``, …). Sampling belongs
                to the plan: ``batch_size``, ``shuffle`` and the like are refused. ``collate_fn`` is given the samples
                drawn, and returns a row for each, in tensors, or tuples, lists, mappings of them.
        """
        dataset, loader = self._recalled(dataset, loader)
        left = self._check_data(dataset, loader)
        return Batches(self._batches(dataset, loader, left), left)

    def epochs(self, dataset: Dataset[Any] | None = None, **loader: Any) -> Iterator[Batches]:
        """The planned batches by epoch: each is an iterator over its batches, and ``len`` says how many they are.

        An epoch has ceil(size/batch) steps, the last one what is left. One may be broken off, and so may the whole
        loop: what was not released is not paid for, and a new loop goes on from there.

        Args:
            dataset: as for `batches`.
            loader: as for `batches`.
        """
        dataset, loader = self._recalled(dataset, loader)
        left, each = self._check_data(dataset, loader), self.plan.sampling.steps(1)
        first = min(left, each - self._charged % each)
        sizes = [first, *(min(each, left - k) for k in range(first, left, each))]
        return (Batches(self._batches(dataset, loader, size), size) for size in sizes if size)

    def _recalled(self, given: Dataset[Any] | None, loader: dict[str, Any]) -> tuple[Dataset[Any], dict[str, Any]]:
        """The data to draw from: those that were given, or remembered."""
        if self._remembered is not None and (given is None or given is self._remembered[0]):
            return self._remembered[1], {**self._remembered[2], **loader}
        action = "Pass what the plan is for. Only a run of make_private() knows its data."
        require(given is not None, "batches", "dataset", "given", None, action)
        assert given is not None
        return given, loader

    def _check_data(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> int:
        """Refuse data that the plan is not for; otherwise say how many steps are left."""
        require(not isinstance(dataset, DataLoader), "batches", "dataset", "a dataset", "a DataLoader", "Pass its "
                "dataset: the plan draws the batches. Options such as num_workers go to batches().")  # fmt: skip
        size = len(dataset)  # type: ignore[arg-type]
        require(size > 0, "batches", "dataset", "a dataset with at least one sample", "an empty dataset")
        require(
            size == self.plan.sampling.size, "batches", "dataset", f"of {self.plan.sampling.size} samples, as planned",
            size, f"Plan with {type(self.plan.sampling).__name__}(size={size}, ...), so that sampler and accountant "
                "agree.",
        )  # fmt: skip
        taken = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & set(loader)
        require(not taken, "batches", "loader", "without options that change the sampling", sorted(taken),
                "Choose the sampler in the plan.")  # fmt: skip
        self._require_places(dataset, loader)
        left = self.steps - self._charged
        if not left:
            log.warning("dpscale: all %d planned steps are taken, so there are no more batches.", self.steps)
        return left

    def _require_places(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """Where something is remembered of each sample by its place, the places must stay."""
        sampling = self.plan.sampling
        midway = self.steps_taken > 0 if self._per_sample else self._state.last_released % sampling.steps(1) != 0
        if self._per_sample:
            who = type(self.plan.momentum).__name__
            require(loader.get("collate_fn") is None, "batches", "collate_fn", "left out", "one of yours",
                    f"{who} knows samples by their place, which it could change.")  # fmt: skip
        elif sampling.independent:
            return
        require(
            not midway or dataset is self._dataset, "batches", "dataset", "the very dataset that this run began with",
            "another one", "Samples are known by their place in it: another order would be another sample's part."
        )  # fmt: skip
        self._dataset = dataset

    def _batches(self, dataset: Dataset[Any], loader: Mapping[str, Any], count: int) -> Iterator[Batch]:
        state = self._state
        with state.lock:
            this = state.start_loop()
            self._engine.recorder.stop()
        drawn = self.plan.sampling.draws(self._key.generator(_stream(state.stream)), start=state.handed_out)
        try:
            for indices, data, singles, rows in fetched(dataset, loader, islice(drawn, count)):
                with state.lock:
                    if this != state.loop:
                        raise RuntimeError("Another loop over private.batches() has begun; go on with that one.")
                    batch = Batch(data, state.hand_out(indices), singles, rows)
                    if batch.draw.mask.any():
                        self._engine.recorder.start(len(batch.draw.mask), batch.rows)
                yield batch
        except GeneratorExit:  # the loop was left: what it has handed out will not come back
            with state.lock:
                if this == state.loop:
                    state.outstanding.clear()
                    self._engine.recorder.stop()
            raise

    def step(self, batch: Any, loss_fn: LossFn) -> StepReport:
        """One private step (Algorithm 1) on a batch from `batches`.

        Args:
            batch: as drawn; it may have been moved to a device or transformed sample by sample.
            loss_fn: ``loss_fn(model, data)`` -> per-sample losses, shape (B,); ``data`` is ``batch.data``.
        """
        data = batch.data if isinstance(batch, Batch) else batch
        parameters = self._parameters()
        draw = self._claim_draw(batch, rows_of(data), parameters)
        momentum = self._momentum_state(parameters, len(draw.mask))
        batch = batch if isinstance(batch, Batch) else Batch(data, draw)
        out = self._summed(batch, loss_fn, parameters, momentum)  # Σ w(‖g‖)·g
        report = self._release(draw, out, parameters, momentum)
        self.optimizer.step()
        self._require_applied()
        self.optimizer.zero_grad()
        return report

    def backward(self, losses: Tensor, batch: Batch | None = None) -> StepReport:
        """In place of ``losses.mean().backward()`` in a loop of your own: afterwards every ``.grad`` is private.

        Call it once per batch of `batches`, on the per-sample losses of that whole batch, then ``optimizer.step()``.

        Args:
            losses: shape (B,), from a forward of the model on the drawn batch.
            batch: the one that they are the losses of. None: the one outstanding draw.
        """
        self._check_backward()
        parameters = self._parameters()
        draw = self._claim_draw(batch, None, parameters)
        check_losses(losses, len(draw.mask))
        momentum = self._momentum_state(parameters, len(draw.mask))
        if draw.mask.any():
            mask = torch.ones(len(draw.mask), dtype=torch.bool, device=losses.device)
            with _memory_advice(len(draw.mask)):
                out = self._engine.recorder.scaled_sum(losses, self.plan.scaling, mask)
        else:
            out = _nothing(parameters, losses.device, self.plan.bound)
        return self._release(draw, out, parameters, momentum)

    def _claim_draw(self, batch: Any, rows: int | None, parameters: Parameters) -> Draw:
        """The draw that is about to be released, after every check that could refuse it. Nothing is changed."""
        state, independent = self._state, self.plan.sampling.independent
        if self._charged >= self.steps and not state.outstanding:
            raise self._exhausted()
        if isinstance(batch, Batch):
            draw = state.check_outstanding(batch.draw)
            if rows not in (None, len(draw.mask)):
                raise complaint("step", "batch", f"of {len(draw.mask)} rows, as drawn", rows, "Pass on every row.")
        else:
            draw = state.only_outstanding(rows)
        if state.charged(independent, draw) > self.steps:
            raise self._exhausted()
        overwritten = set(map(id, parameters.values()))
        steered = (p for group in self.optimizer.param_groups for p in group["params"])
        self._guard.check(p for p in steered if id(p) not in overwritten)
        return draw

    def _summed(self, batch: Batch, loss_fn: LossFn, parameters: Parameters, momentum: MomentumState) -> ScaledSum:
        """The sum over the samples drawn, micro-batch by micro-batch."""
        data, count = batch.data, len(batch.draw.mask)
        if not batch.draw.mask.any():
            return _nothing(parameters, device_of(data), self.plan.bound)
        points = momentum.points()
        padding = None if self._per_sample else self._padding
        split = (padding.sizes if padding else Sizes((self._micro_batch or count,))).parts(count)
        parts: list[ScaledSum] = []
        rest = [part_of(data, rows, count) for rows, _ in split[1:]] if batch.singles else []
        for rows, size in split:
            part, length = part_of(data, rows, count), rows.stop - rows.start

            def summed(data: Any, mask: Tensor, rows: slice = rows) -> ScaledSum:
                def remember(grads: dict[str, Tensor], own: slice) -> Mapping[str, Tensor]:
                    places = slice(rows.start + own.start, rows.start + own.stop)
                    return momentum.remember(grads, places, mask[own])

                return self._engine.scaled_sum(
                    loss_fn, data, self.plan.scaling, mask, points if len(points) > 1 else None,
                    keep=len(split) > 1 and not parts, change=remember if self._per_sample else None,
                    singles=None if parts else batch.singles, rest=rest, rows=batch.rows_in(rows),
                )  # fmt: skip

            with _memory_advice(size):
                if padding:
                    out = padding(part, length, size, summed)
                else:
                    out = summed(part, torch.ones(length, dtype=torch.bool, device=device_of(part)))
            if parts:  # added at once: a compiled step overwrites its own answer
                foreach_add_(list(parts[0].grads.values()), [out.grads[n] for n in parts[0].grads])
            parts.append(out)
        return _joined(parts)

    def _release(self, draw: Draw, out: ScaledSum, parameters: Parameters, momentum: MomentumState) -> StepReport:
        """Book the step, add the noise once, divide by the expected batch size, and hand over to the optimizer."""
        if (ignored := int(out.ignored)) and ignored == len(draw.indices):
            require_finite(self.model)
        with self._state.lock:
            self._state.release(draw)
            if not self._state.outstanding:
                self._engine.recorder.stop()
        sums = out.grads
        self._noise.add(sums, self.plan.noise_std, self.steps_taken)
        momentum.release(sums)
        foreach_div_(list(sums.values()), self.plan.expected_batch)
        for name, mean in sums.items():
            p = parameters[name]
            p.grad = mean if mean.dtype == p.dtype else mean.to(p.dtype)
        self._guard.released(parameters[name] for name in sums)
        return StepReport(len(draw.indices), out.losses, out.norms, out.weights, out.ignored)

    def _momentum_state(self, parameters: Parameters, samples: int) -> MomentumState:
        """What the momentum remembers, made at the first step: only then is the model where it stays."""
        momentum, state = self.plan.momentum, self._state.momentum
        if state is None:
            state = MomentumState(parameters) if momentum is None else momentum.start(parameters)
            state.allocate(samples)
            self._state.momentum = state
        elif momentum is not None and (other := state.changed(parameters)) is not None:
            raise RuntimeError(
                f"{type(momentum).__name__} remembers every trainable parameter since the first step, and {other!r} "
                "was frozen, unfrozen, moved, converted or replaced since. Nothing was released. Do that before "
                "training, or plan the next part of it apart."
            )
        return state

    def _parameters(self) -> dict[str, Tensor]:
        """Those to train, by name. Where the model is another than before, the optimizer must be over them still, and
        they are watched for gradients that come from elsewhere."""
        found = structure(self.model)
        if found is not self._structure:
            trainable(found)  # refuses a model that has none
            check_optimizer(self.model, self.optimizer)
            self._guard.watch(found.trainable.values())
            self._structure = found
        return dict(found.trainable)

    def _check_backward(self) -> None:
        """Refuse a release that would overwrite another, or for which one forward is not enough."""
        if self._guard.unapplied and any(p.grad is not None for p in self.model.parameters()):
            raise RuntimeError(
                "backward() was called again before optimizer.step(). A second release would overwrite the first, "
                "and both would be charged. Call optimizer.step() and optimizer.zero_grad() first; for larger "
                "batches, raise the plan's batch."
            )
        momentum = self.plan.momentum
        if momentum is not None and not momentum.alone:
            raise RuntimeError(
                f"{type(momentum).__name__} needs each sample's gradient at other weights than the model's, or a "
                "memory of it, and backward() sees one forward at the present ones. Call private.step(batch, loss_fn)."
            )

    def _require_applied(self) -> None:
        if self._guard.unapplied:
            raise RuntimeError(
                f"{type(self.optimizer).__name__}.step() applied nothing, though the step is paid for: it holds "
                "gradients back, to accumulate them. Turn that off, and raise the plan's batch instead."
            )

    def _exhausted(self) -> BudgetExhausted:
        return BudgetExhausted(
            f"All {self.steps} planned steps are taken, and with them the privacy budget. Nothing was released. "
            "To train longer, plan more steps and calibrate again, before training."
        )


def privatize(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    *,
    seed: int | None = None,
    micro_batch: int | None = None,
    compile: bool | None = None,
) -> Private:
    """Train ``model`` with ``optimizer`` under ``plan``.

    Guarantee: the parameters after any number of steps are (ε, δ)-differentially private, ε =
    ``private.epsilon(delta)``, under the adjacency that ``plan.statement()`` names, if no randomness leaks and
    nothing else about the data is published.

    Args:
        model: any module that treats samples apart; checked at the first step.
        optimizer: any torch optimizer over the model's parameters, or a wrapper of one (Accelerate's). It sees ordinary
            ``.grad``.
        plan: calibrated.
        seed: None for the operating system's randomness; an integer makes the run reproducible, and its noise
            guessable.
        micro_batch: rows per forward of `Private.step`; None for a whole batch. A matter of memory and speed: results
            do not depend on it. For a compiled step, Poisson draws are padded to a few sizes: 512 rows on average to
            524. In a loop of your own the forward is yours, on the rows drawn.
        compile: trace and compile `Private.step` at its first batch, which takes from seconds to a minute and pays over
            a long run. None: on CUDA only. What cannot be compiled runs eagerly, with one line that says why. Numbers
            that ``loss_fn`` reads from attributes of objects that are no modules of the model are taken as they are at
            that first batch.

    What comes before the first step (checks, compilation) is logged by the logger ``dpscale`` at level INFO, with
    its seconds.

    Example:
        >>> import torch, dpscale; from torch import nn; from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(200, 5), torch.randint(0, 2, (200,)))
        >>> model = nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = dpscale.Plan(scaling=dpscale.PSASC(C=1.0, s=0.5, r=0.01),
        ...                     sampling=dpscale.Poisson(size=200, batch=20), steps=3).calibrate(epsilon=3, delta=1e-4)
        >>> private = dpscale.privatize(model, optimizer, plan)
        >>> def loss_fn(model, batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> for batch in private.batches(data):
        ...     _ = private.step(batch, loss_fn)
        >>> private.steps_taken, private.epsilon(1e-4) <= 3
        (3, True)
    """
    _check_arguments(model, optimizer, plan, micro_batch)
    if compile is None:
        compile = all(p.is_cuda for p in model.parameters())
    return Private(model, optimizer, plan, seed, micro_batch, compile)


def _check_arguments(model: nn.Module, optimizer: Optimizer, plan: Plan, micro_batch: int | None) -> None:
    require(plan.noise_multiplier is not None, "privatize", "plan", "calibrated", "a plan without a noise multiplier",
            "Call plan.calibrate(epsilon=..., delta=...), or give noise_multiplier.")  # fmt: skip
    require(plan.steps is not None, "privatize", "plan", "one that says how many steps", "a plan without steps",
            "Give steps or epochs, or call plan.calibrate_steps(epsilon=..., delta=...).")  # fmt: skip
    if micro_batch is not None:
        require_count("privatize", "micro_batch", micro_batch)
    _require_one_process()
    require_finite(model)
    lbfgs = any(isinstance(one, torch.optim.LBFGS) for one in wrapped(optimizer))
    require(not lbfgs, "privatize", "optimizer", "one that steps once per gradient", "LBFGS",
            "It evaluates the loss several times a step, which would be several releases.")  # fmt: skip


def _require_one_process() -> None:
    """Refuse to be one of several ranks: they are not told of each other."""
    if distributed.is_available() and distributed.is_initialized():
        ranks = distributed.get_world_size()
    else:  # under torchrun, before the process group is made
        told = os.environ.get("WORLD_SIZE", "1")
        ranks = int(told) if told.isdecimal() and "RANK" in os.environ else 1
    if ranks > 1:
        raise RuntimeError(
            f"privatize() was called in one of {ranks} processes, and distributed training is not there yet. Each rank "
            "would train alone, on its own weights, and print the full epsilon. Run one process."
        )


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """It must be over the model's trainable parameters, all of them and nothing else."""
    names = {id(p): n for n, p in trainable(structure(model)).items()}
    steered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = len(steered - {id(p) for p in model.parameters()})
    require(not strangers, "privatize", "optimizer", "over parameters of the model alone", f"{strangers} other tensors",
            "They would be trained without privacy, or not at all. Put them into the model.")  # fmt: skip
    idle = [n for i, n in names.items() if i not in steered]
    require(not idle, "privatize", "optimizer", "over every trainable parameter", f"one without {idle[:3]}",
            "Add them, or freeze them with requires_grad_(False): they count in every norm.")  # fmt: skip


@contextmanager
def _memory_advice(rows: int) -> Iterator[None]:
    """Say what to do when a micro-batch does not fit."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise MemoryError(
            f"A micro-batch of {rows} rows does not fit into memory. Nothing was released. Call privatize(..., "
            f"micro_batch={max(1, rows // 2)}) and private.step(batch, loss_fn): the result does not depend on it."
        ) from error


def _stream(number: int) -> str:
    """The label of a stream of draws. A resumed run has another than the one before it."""
    return f"sampling/{number}" if number else "sampling"


def _nothing(parameters: Parameters, device: torch.device, bound: float) -> ScaledSum:
    """The sum over no sample, in one row."""
    sums = {n: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for n, p in parameters.items()}
    return ScaledSum(
        grads=sums, norms=torch.zeros(1, device=device), weights=torch.zeros(1, device=device),
        losses=torch.zeros(1, device=device), ignored=torch.zeros((), dtype=torch.int64), bound=bound,
    )  # fmt: skip


def _joined(parts: list[ScaledSum]) -> ScaledSum:
    """One result; the gradients of all parts are already in those of the first."""
    if len(parts) == 1:
        return parts[0]
    losses, norms, weights = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("losses", "norms", "weights")
    )
    ignored = torch.stack([part.ignored for part in parts]).sum()
    return replace(parts[0], losses=losses, norms=norms, weights=weights, ignored=ignored)
