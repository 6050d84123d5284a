"""The private step, and the loop around it."""

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dpscale.batches import Batches, Given, Padded, chosen_rows, part_of
from dpscale.checks import out_of_memory, require, require_count
from dpscale.engine import (
    LossFn,
    ScaledSum,
    batch_size,
    check_losses,
    per_sample_sum,
    require_finite,
    scaled_sum,
    trainable,
)
from dpscale.engine.compiled import Fast
from dpscale.engine.loop import Recorder
from dpscale.engine.modules import Structure, structure
from dpscale.guard import Guard
from dpscale.momentum import Course, Weights
from dpscale.noise import Key, Noise
from dpscale.plan import Plan
from dpscale.sampling import Draw, pad

log = logging.getLogger("dpscale")


class BudgetExhausted(RuntimeError):
    """Every planned step is used up; nothing was released."""


@dataclass(frozen=True)
class StepReport:
    """What a step saw. All of it is exact, without noise: for research on public data, never for release.

    Attributes:
        loss: mean over the samples drawn (0 for an empty batch).
        losses, norms, weights, mask: per sample of the padded batch, (B,).
        ignored: how many samples had a gradient that is not finite, and so added nothing.
    """

    loss: Tensor
    losses: Tensor
    norms: Tensor
    weights: Tensor
    mask: Tensor
    ignored: Tensor


class Private:
    """A model and its optimizer under a privacy plan; made by `privatize`."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, seed: int | None, micro_batch: int, compile: bool
    ) -> None:
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._steps_taken = 0
        self._draws = 0  # batches handed out
        self._used = 0  # of these, all up to the last that was released; what came after it is drawn again
        self._loops = 0
        self._key = Key(seed)
        self._noise = Noise(self._key)
        self._micro_batch = micro_batch
        self._drawn: Tensor | None = None  # mask of the batch that was drawn and not yet used
        self._given = Given()
        self._tried = True  # whether the last batch drawn was put to use
        self._passed_over = False  # whether an earlier one of this loop was not, and may still come
        self._dataset: Any = None  # whose samples have a place that must stay
        self._watched: Structure | None = None
        self._guard = Guard.of(optimizer, self)
        self._recorder = Recorder(model)
        self._fast = Fast(model) if compile else None
        self._course: Course | None = None
        self._remembered: dict[str, tuple[torch.Size, torch.dtype, torch.device, int]] = {}
        self._parameters()

    @property
    def model(self) -> nn.Module:
        """Yours, unchanged; hooks on it work as ever."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """Yours, unchanged; schedulers and hooks on it work as ever. A plain ``backward()`` is allowed (an evaluation),
        but the optimizer refuses to apply what it added."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The source of σ, bound and ε. Another one would put a new price on what is already released, so it stays."""
        return self._plan

    @property
    def steps(self) -> int:
        """How many logical batches may be released in all."""
        assert self._plan.steps is not None
        return self._plan.steps

    @property
    def steps_taken(self) -> int:
        """How many logical batches have been released."""
        return self._steps_taken

    @property
    def _charged(self) -> int:
        """Steps to account for. A shuffled epoch goes on even if a batch of it is not used."""
        return self._steps_taken if self._plan.sampling.independent else self._used

    @property
    def _per_sample(self) -> bool:
        """Whether every sample has a memory of its own."""
        return self.plan.momentum is not None and self.plan.momentum.per_sample

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A private run cannot be copied or pickled: two of them would add the same noise to different gradients, "
            "and each would account for its own steps alone. Copy or save the model, as model.state_dict()."
        )

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far; 0 before the first step."""
        return self._plan.epsilon(delta=delta, steps=self._charged)

    def batches(self, dataset: Dataset[Any], **loader: Any) -> Batches:
        """Draw the planned batches, those already taken left out; ``len`` says how many.

        Each is drawn by the plan's sampler and padded to a fixed shape. The padding comes last and is masked out of
        every sum by its place, so leave the rows in their order. Use each batch with `step` or `backward` before taking
        the next: to load ahead, give ``num_workers``. An empty draw is a batch like any other: a step of noise.

        Args:
            dataset: a `TensorDataset` (indexed on the device where its tensors are), or any map-style dataset.
            loader: passed on to `torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``, …). Sampling belongs
                to the plan: ``batch_size``, ``shuffle`` and the like are refused. ``collate_fn`` is given the samples
                drawn, without padding, and returns tensors with a row for each, or tuples, lists, mappings of them.
        """
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
        return Batches(self._batches(dataset, loader), left)

    def _require_places(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """Where something is remembered of each sample by its place, the places must stay."""
        sampling = self.plan.sampling
        begun = self.steps_taken > 0 if self._per_sample else self._used % sampling.steps(1) != 0
        if self._per_sample:
            who = type(self.plan.momentum).__name__
            require(loader.get("collate_fn") is None, "batches", "collate_fn", "left out", "one of yours",
                    f"{who} knows samples by their place, which it could change.")  # fmt: skip
        elif sampling.independent:
            return
        require(
            not begun or dataset is self._dataset, "batches", "dataset", "the very dataset that this run began with",
            "another one", "Samples are known by their place in it: another order would be another sample's part."
        )  # fmt: skip
        self._dataset = dataset

    def _batches(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> Iterator[Any]:
        masks: deque[Tensor] = deque()
        self._loops += 1
        this = self._loops
        self._draws = self._used
        self._tried, self._passed_over = True, False

        def draws() -> Iterator[Draw]:
            drawn = self.plan.sampling.draws(self._key.generator("sampling"), start=self._draws)
            for indices in islice(drawn, self.steps - self._charged):
                draw = pad(indices, self._micro_batch)
                masks.append(torch.from_numpy(draw.mask))
                yield draw

        fetched: Iterable[tuple[int | None, Any]]
        if type(dataset) is TensorDataset and not loader:
            rows = chosen_rows(dataset.tensors, (torch.from_numpy(draw.indices) for draw in draws()))
            fetched = ((None, batch) for batch in rows)
        else:
            # Of an empty draw one sample shows the shape; like all padding it is masked.
            chosen = (draw.indices[: max(1, int(draw.mask.sum()))].tolist() for draw in draws())
            collate = Padded(loader.get("collate_fn") or default_collate, self._micro_batch)
            fetched = DataLoader(dataset, batch_sampler=chosen, **{**loader, "collate_fn": collate})
        try:
            for count, batch in fetched:
                if this != self._loops:
                    raise RuntimeError("Another loop over private.batches() has begun; go on with that one.")
                drawn = masks.popleft()
                if count not in (None, wanted := max(1, int(drawn.sum()))):
                    raise ValueError(
                        f"The dataset gave {count} samples where {wanted} were drawn. Which of them are missing cannot "
                        "be told, and padding would be counted in their place. Give a sample for each index: one that "
                        "cannot be read may be a constant, such as zeros."
                    )
                self._passed_over |= not (self._tried or self._recorder.begun)
                self._draws += 1
                self._drawn, self._tried = drawn, False
                self._given.add(batch, self._draws)
                self._recorder.start(len(self._drawn))
                yield batch
        finally:
            if this == self._loops:
                self._drawn = None
                self._recorder.stop()

    def step(self, batch: Any, loss_fn: LossFn) -> StepReport:
        """One private step (Algorithm 1) on a batch from `batches`.

        Args:
            batch: as drawn; it may have been moved to a device or transformed sample by sample.
            loss_fn: ``loss_fn(model, batch)`` -> per-sample losses, shape (B,).
        """
        mask, parameters = self._take(batch)
        points = self._begun(parameters, len(mask)).points()
        sums: dict[str, Tensor] = {}
        reports = []
        for rows, part, part_mask in _split(batch, mask, self._micro_batch):
            with _memory_advice(self._micro_batch):
                keep = len(part_mask) < len(mask) and not sums  # the others are added to it at once
                out = self._scaled_sum(loss_fn, part, part_mask, points, rows, keep)  # Σ w(‖g‖)·g
            if sums:
                torch._foreach_add_(list(sums.values()), [out.grads[n] for n in sums])
            else:
                sums = out.grads
            reports.append(out)
        report = _report(reports, mask)
        self._release(parameters, sums, report)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return report

    def _scaled_sum(
        self, loss_fn: LossFn, batch: Any, mask: Tensor, points: list[tuple[float, Weights]], rows: slice, keep: bool
    ) -> ScaledSum:
        course, rule = self._course, self.plan.scaling
        if course is not None and self._per_sample:
            return per_sample_sum(
                self.model, loss_fn, batch, rule, mask, lambda grads: course.remember(grads, rows, mask)
            )
        several = points if len(points) > 1 else None
        if self._fast is not None:
            return self._fast(loss_fn, batch, rule, mask, several, keep=keep)
        return scaled_sum(self.model, loss_fn, batch, rule, mask, several and [(c, w) for c, w in several if c])

    def _begun(self, parameters: Mapping[str, Tensor], samples: int) -> Course:
        """The momentum's memory, made at the first step: only then is the model where it stays."""
        momentum = self.plan.momentum
        if self._course is not None and momentum is None:
            return self._course
        found = {n: (p.shape, p.dtype, p.device, id(p)) for n, p in parameters.items()}
        if self._course is not None and found != self._remembered:
            other = sorted(set(found.items()) ^ set(self._remembered.items()), key=str)[0][0]
            raise RuntimeError(
                f"{type(momentum).__name__} remembers every trainable parameter since the first step, and {other!r} "
                "was frozen, unfrozen, moved, converted or replaced since. Nothing was released. Do that before "
                "training, or plan the next part of it apart."
            )
        if self._course is None:
            self._remembered = found
            self._course = Course(parameters) if momentum is None else momentum.start(parameters)
            self._course.allocate(samples)
        return self._course

    def backward(self, losses: Tensor) -> StepReport:
        """In place of ``losses.mean().backward()`` in a loop of your own: afterwards every ``.grad`` is private.

        Call it once per batch of `batches`, on the per-sample losses of that whole batch, then ``optimizer.step()``.

        Args:
            losses: shape (B,), from a forward of the model on the drawn batch.
        """
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
        if self._drawn is not None:
            check_losses(losses, len(self._drawn))
        mask, parameters = self._take(losses)
        self._begun(parameters, len(mask))
        with _memory_advice(len(mask)):
            out = self._recorder.scaled_sum(losses, self.plan.scaling, mask)
        report = _report([out], mask)
        self._release(parameters, out.grads, report)
        return report

    def _take(self, batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
        """The mask of the drawn batch and what to train, after every check that could refuse it. Nothing is changed."""
        if self._charged >= self.steps:
            raise BudgetExhausted(
                f"All {self.steps} planned steps are taken, and with them the privacy budget. Nothing was released. "
                "To train longer, plan more steps and calibrate again, before training."
            )
        if self._drawn is None:
            raise RuntimeError(
                "No drawn batch is waiting: step() and backward() take each batch that private.batches(dataset) "
                "yields, once. A batch of your own making would not be sampled as the accountant assumes."
            )
        known = self._given.draws(batch)
        if known - {self._draws} or (self._passed_over and not known):
            raise RuntimeError(
                "This is not, or not surely, the batch that was drawn last: another was taken before it was used. "
                "Samples are told from padding by the draw that a batch came from. Use each batch before you take the "
                "next; to load ahead, call batches(dataset, num_workers=2)."
            )
        self._passed_over &= not known
        samples, device = batch_size(batch)
        require(
            samples == len(self._drawn), "step", "batch", f"of {len(self._drawn)} rows, as drawn (padding included)",
            samples, "Pass on every row; the padding is masked inside.",
        )  # fmt: skip
        parameters = self._parameters()
        overwritten = set(map(id, parameters.values()))
        steered = (p for group in self.optimizer.param_groups for p in group["params"])
        self._guard.check(p for p in steered if id(p) not in overwritten)
        self._tried = True
        return self._drawn.to(device, non_blocking=True), parameters

    def _release(self, parameters: Mapping[str, Tensor], sums: dict[str, Tensor], report: StepReport) -> None:
        """Book the step, add the noise once, divide by the expected batch size, and hand over to the optimizer."""
        if bool(report.ignored) and int(report.ignored) == int(report.mask.sum()):
            require_finite(self.model)
        self._drawn = None
        self._recorder.stop()
        self._steps_taken += 1
        self._used = self._draws
        self._noise.add(sums, self.plan.noise_std, self.steps_taken)
        assert self._course is not None
        self._course.release(sums)
        torch._foreach_div_(list(sums.values()), self.plan.expected_batch)
        for name, mean in sums.items():
            p = parameters[name]
            p.grad = mean if mean.dtype == p.dtype else mean.to(p.dtype)
        self._guard.released(parameters[name] for name in sums)

    def _parameters(self) -> dict[str, Tensor]:
        """Those to train, by name. Where the model is another than before, the optimizer must be over them still, and
        they are watched for gradients that come from elsewhere."""
        found = structure(self.model)
        if found is not self._watched:
            trainable(self.model)  # refuses a model that has none
            check_optimizer(self.model, self.optimizer)
            self._guard.watch(found.trainable.values())
            self._watched = found
        return dict(found.trainable)

    @property
    def waiting(self) -> bool:
        """Whether a batch was drawn and not yet used."""
        return self._drawn is not None


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
        optimizer: any torch optimizer over the model's parameters. It sees ordinary ``.grad``.
        plan: calibrated.
        seed: None for the operating system's randomness; an integer makes the run reproducible, and its noise
        guessable.
        micro_batch: rows per forward of `Private.step`; None for a whole logical batch. A matter of memory and speed:
            results do not depend on it. A Poisson draw of 512 on average is padded to 632 rows, so that (nearly) all
            fit; in parts of 64, to 544 on average. In a loop of your own the forward is yours, on all rows.
        compile: trace and compile `Private.step` at its first batch, which takes from seconds to a minute and pays over
            a long run. None: on CUDA only. What cannot be compiled runs eagerly, with one line that says why. Numbers
            that ``loss_fn`` reads from attributes of objects that are no modules of the model are taken as they are at
            that first batch.

    What comes before the first step (inspection, compilation) is logged by the logger ``dpscale`` at level INFO, with
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
    require(plan.noise_multiplier is not None, "privatize", "plan", "calibrated", "a plan without a noise multiplier",
            "Call plan.calibrate(epsilon=..., delta=...), or give noise_multiplier.")  # fmt: skip
    require(plan.steps is not None, "privatize", "plan", "one that says how many steps", "a plan without steps",
            "Give steps or epochs, or call plan.calibrate_steps(epsilon=..., delta=...).")  # fmt: skip
    if micro_batch is not None:
        require_count("privatize", "micro_batch", micro_batch)
    require_finite(model)
    require(not isinstance(optimizer, torch.optim.LBFGS), "privatize", "optimizer", "one that steps once per gradient",
            "LBFGS", "It evaluates the loss several times a step, which would be several releases.")  # fmt: skip
    if compile is None:
        compile = all(p.is_cuda for p in model.parameters())
    return Private(model, optimizer, plan, seed, micro_batch or plan.sampling.physical_batch, compile)


def check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """It must be over the model's trainable parameters, all of them and nothing else."""
    names = {id(p): n for n, p in trainable(model).items()}
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


def _split(batch: Any, mask: Tensor, rows: int) -> Iterator[tuple[slice, Any, Tensor]]:
    """Micro-batches of one shape; a draw is always padded to a whole number of them."""
    for k in range(0, len(mask), rows):
        part = slice(k, k + rows)
        yield part, part_of(batch, part, len(mask)), mask[part]


def _report(parts: list[Any], mask: Tensor) -> StepReport:
    losses, norms, weights = (_together([getattr(p, f) for p in parts]) for f in ("losses", "norms", "weights"))
    loss = losses.where(mask, 0).sum() / mask.sum().clamp(min=1)
    return StepReport(loss, losses, norms, weights, mask, sum(p.ignored for p in parts))


def _together(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
