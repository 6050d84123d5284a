"""The private step, and the loop around it: claim the draw, sum, add noise, hand over to the optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from dpscale.batches import Batch, Batches, Padding
from dpscale.card import Booked, Card, history, randomness
from dpscale.card import make as make_card
from dpscale.checks import complaint, plain_number, require, require_count
from dpscale.distributed import Digest, Ranks, model_terms
from dpscale.engine import Engine, LossFn, ScaledSum, check_losses, require_finite, trainable
from dpscale.engine.arguments import check_loss_fn, device_of, part_of, plain_tensors, rows_of, tensors_in
from dpscale.engine.compat import foreach_add_, foreach_div_
from dpscale.engine.compile.worth import Worth
from dpscale.engine.modules import Counts, Structure, structure
from dpscale.engine.result import joined, nothing
from dpscale.feeding import Feed
from dpscale.guard import Guard
from dpscale.ledger import BudgetExhausted
from dpscale.memory import MICRO_BATCH, TooLarge, explain_devices, explain_memory
from dpscale.momentum import MomentumState
from dpscale.noise import Key, Source, noise_from
from dpscale.packing import Padded, holds, over_packed
from dpscale.people import by_person, mean_of
from dpscale.plan import Plan
from dpscale.resuming import Saver
from dpscale.run import RunState
from dpscale.sampling import Draw
from dpscale.shapes import Sizes

log = logging.getLogger("dpscale")

Parameters = Mapping[str, Tensor]


@dataclass(frozen=True, repr=False)
class StepReport:
    """What a step saw, on this rank. All of it is exact, without noise: for research on public data, never for release.

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
        self, model: nn.Module, optimizer: Optimizer, plan: Plan, key: Key, micro_batch: int | None,
        compile: bool | Worth, ranks: Ranks, noise: Source,
    ) -> None:  # fmt: skip
        self._model, self._optimizer = model, optimizer
        self._state = RunState(plan, noise_from(noise, key))
        self._ranks = ranks
        self._padding = Padding(Sizes.of(plan.sampling, micro_batch, ranks.size)) if compile else None
        usual, most = (self._padding.usual, self._padding.sizes.rows[-1]) if self._padding else (0, 0)
        self._engine = Engine(model, compile=compile, any_size=usual, most=most)
        self._guard = Guard(optimizer, self, self._engine.writes.stepped)
        self._feed = Feed(self._state, ranks, self._engine.recorder)
        self._micro_batch = micro_batch
        self._structure: Structure | None = None
        self._described: dict[str, Any] = {}
        this = ref(self)
        ranks.record_when(lambda: (run := this()) is not None and run.waiting, bool(compile))
        self._parameters()

    @property
    def model(self) -> nn.Module:
        """Yours, unchanged, out of its `DistributedDataParallel`; hooks on it work as ever."""
        return self._model

    @property
    def optimizer(self) -> Optimizer:
        """Yours, unchanged; schedulers and hooks on it work as ever. A plain ``backward()`` is allowed (an evaluation),
        but no optimizer may apply what it added."""
        return self._optimizer

    @property
    def plan(self) -> Plan:
        """The source of σ, bound and ε. Another one would put a new price on what is already released, so it stays.
        That its samples are people it may learn from the data, before the first release."""
        return self._state.plan

    @property
    def steps(self) -> int:
        """How many draws may be released in all."""
        return self._state.steps

    @property
    def steps_taken(self) -> int:
        """How many draws have been released."""
        return self._state.steps_taken

    @property
    def resumed(self) -> int:
        """How often the run was resumed from a checkpoint."""
        return self._state.resumed

    @property
    def waiting(self) -> bool:
        """Whether a draw is outstanding: handed out, and not yet released."""
        return bool(self._state.outstanding)

    @property
    def _saver(self) -> Saver:
        return Saver(
            self._model, self._optimizer, self._state, self._ranks, self._engine.recorder, self._parameters
        )  # fmt: skip

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "A private run cannot be copied or pickled: two of them would add the same noise to different gradients, "
            "and each would account for its own steps alone. To go on later, private.save(path); to copy the model, "
            "model.state_dict()."
        )

    def __repr__(self) -> str:
        names = f"model={type(self.model).__name__}, optimizer={type(self.optimizer).__name__}"
        return f"Private({names}, steps_taken={self.steps_taken}, steps={self.steps})"

    def epsilon(self, delta: float | None = None) -> float:
        """ε spent so far; 0 before the first step."""
        return self.plan.epsilon(delta=delta, steps=self._state.charged())

    def statement(self, delta: float | None = None) -> str:
        """What to tell a reviewer about what was released so far, whether or not the plan was carried out."""
        source = f"Randomness: {randomness(self._state.noise.key.seeded, self._sources())}"
        return "\n".join([self.plan.statement(delta=delta, steps=self._state.charged()), source, *self._history()])

    def card(
        self, delta: float | None = None, *, search: str | None = None, audit: Mapping[str, Any] | None = None
    ) -> Card:
        """A page for a reviewer about what was released so far: ``card().save("card.html")``, or as JSON.

        Args:
            delta: None: the plan's.
            search: how settings were chosen on the private data, and whether that was paid for.
            audit: a report of `dpscale.audit`, as its ``to_dict()`` gives it.
        """
        return make_card(
            self.plan, self._state.charged(), self.plan.delta_of("card", delta), resumed=self._state.resumed,
            booked=self._booked(), search=search, audit=audit, **self.about(),
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What a card says of a run besides its numbers: how many ranks, what the noise came from, what was checked."""
        return {"ranks": self._ranks.size, "seeded": self._state.noise.key.seeded, "sources": sorted(self._sources()),
                "checks": self._engine.checks()}  # fmt: skip

    def _sources(self) -> frozenset[str]:
        """Of the noise of all steps that were released, those before a resumption included."""
        return self._state.sources or frozenset([self._state.noise.source])

    def _booked(self) -> Booked | None:
        return Booked.of(self._state.booking, self._state.lost)

    def _history(self) -> Iterator[str]:
        """What a statement says of resumptions, and of the ledger."""
        booked = self._booked()
        yield from history(self._state.resumed, booked, counted=self._state.name is not None)
        if booked is not None:
            yield str(booked)

    def state_dict(self) -> dict[str, Any]:
        """What a run needs to go on, apart from model and optimizer: plain values and copies of tensors.

        ``torch.save`` it, and ``torch.load(..., weights_only=True)``. It holds the plan, the steps to account for, what
        the momentum remembers and the rest of a shuffled epoch; never a key of noise or draws. With a momentum that
        remembers every sample (`PerSampleEMA`) it holds exact gradients of single samples: never publish it then.
        Of several ranks each may call it alone, but for a momentum whose memory they share: then all must.
        """
        return self._saver.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, in a run that has released nothing yet.

        Load model and optimizer as well, or use `load`, which does. All randomness is fresh from here on, with a seed
        too: one state may be loaded twice, and noise that was used once must not come again. Draws that are outstanding
        are dropped. Of the data only their number is checked: with `PerSampleEMA` and in the midst of a shuffled epoch,
        samples are known by their places, which must be the same as before.
        """
        self._saver.load_state_dict(state)

    def save(self, path: str | Path, extra: Any = None) -> None:
        """Write a checkpoint of all that is needed to go on: run, model and optimizer, in one file.

        The file is written whole or not at all, without pickle, for this user's eyes alone. Of several ranks the first
        one writes it; it may be loaded on any number of them.

        Args:
            path: of the file; one that is there is replaced when the new one is whole.
            extra: what else belongs to it, such as ``scheduler.state_dict()``: numbers, text, tensors, and lists and
                dicts of them. `load` returns it.
        """
        if self._state.per_sample:
            log.warning("dpscale: %s will hold exact gradients of single samples. Never publish it.", path)
        self._saver.save(Path(path), extra, self.about())

    def load(self, path: str | Path) -> Any:
        """Go on from a checkpoint that `save` wrote, as `load_state_dict` does, with model and optimizer.

        A checkpoint of another plan, model or optimizer is refused, and then nothing is changed.

        Returns:
            what `save` was given as ``extra``.
        """
        return self._saver.load(Path(path))

    def close(self) -> None:
        """End the run: what it has reserved in a ledger and not used is given back, and another process may resume it.

        Without a ledger this does nothing. It happens by itself when the process ends.
        """
        if self._state.booking is not None:
            self._state.booking.close()

    @contextmanager
    def public_data(self) -> Iterator[None]:
        """Inside ``with private.public_data():`` optimizers may apply plain gradients, which the run refuses elsewhere.

        They cost no privacy if the data are public and were not chosen by looking at the private ones.
        """
        with self._guard.public(), self._ranks.on_public_data():
            yield

    def remember(self, source: Any, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """What `batches` and `epochs` draw from when they are given nothing, or ``source``: see `make_private`."""
        self._feed.remember(source, dataset, loader)

    def batches(self, dataset: Dataset[Any] | None = None, **loader: Any) -> Batches:
        """Draw the planned batches, those already taken left out; ``len`` says how many.

        Each is a `Batch`: the rows of the samples drawn, without padding. It knows its draw, so batches may be taken
        ahead of their use, moved with ``batch.to(device)`` and changed with ``batch.map(fn)``. Each is released once;
        one that is not released costs nothing (under `Shuffled` it does). An empty draw is a batch of one row of zeros,
        which is masked: a step of noise. On several ranks each gets its rows of the draw, and those are its batch.

        Args:
            dataset: a `TensorDataset` (indexed on the device where its tensors are), any map-style dataset, or people
                (`by_user`). May be left out after `make_private`.
            loader: passed on to `torch.utils.data.DataLoader` (``num_workers``, ``collate_fn``, …). Sampling belongs
                to the plan: ``batch_size``, ``shuffle`` and the like are refused. ``collate_fn`` is given the samples
                drawn, and returns a row for each, in tensors, or tuples, lists, mappings of them.
        """
        return self._feed.batches(self, dataset, loader)

    def epochs(self, dataset: Dataset[Any] | None = None, **loader: Any) -> Iterator[Batches]:
        """The planned batches by epoch: each is an iterator over its batches, and ``len`` says how many they are.

        An epoch has ceil(size/batch) steps, the last one what is left. One may be broken off, and so may the whole
        loop: what was not released is not paid for, and a new loop goes on from there.

        Args:
            dataset: as for `batches`.
            loader: as for `batches`.
        """
        return self._feed.epochs(self, dataset, loader)

    def step(self, batch: Any, loss_fn: LossFn) -> StepReport:
        """One private step (Algorithm 1) on a batch from `batches`.

        Args:
            batch: as drawn; it may have been moved to a device or transformed sample by sample.
            loss_fn: ``loss_fn(model, data)`` -> per-sample losses, shape (B,); ``data`` is ``batch.data``. Of people, a
                loss for each record.
        """
        with self._state.turn:
            report = self._computed(batch, loss_fn, "step")
            self.optimizer.step()
            self._require_applied()
            self.optimizer.zero_grad()
        return report

    def forward_backward(self, batch: Any, loss_fn: LossFn) -> StepReport:
        """`step` without the optimizer, for a loop that steps by itself: afterwards every ``.grad`` is private.

        It goes by micro-batches, as `step` does. Call ``optimizer.step()`` and ``optimizer.zero_grad()`` then.
        """
        with self._state.turn:
            return self._computed(batch, loss_fn, "forward_backward")

    def _computed(self, batch: Any, loss_fn: LossFn, call: str) -> StepReport:
        """Sum over the draw of a batch, and release it."""
        check_loss_fn(call, loss_fn)
        with self._ranks.whole(call):
            with self._ranks.together(call, lambda: self._terms(draw, values)):
                if call != "step":
                    self._check_applied(call)
                data = batch.data if isinstance(batch, Batch) else batch
                parameters = self._parameters()
                values = self._ranks.values(self.model.parameters(), self.steps_taken)
                draw = self._claim_draw(batch, rows_of(data), parameters)
                momentum = self._momentum_state(parameters, len(draw.mask))
                batch = batch if isinstance(batch, Batch) else Batch(data, draw)
                if plain_tensors(data) is None and holds(data, Padded):
                    loss_fn = over_packed(loss_fn)
                if draw.shares is not None:
                    self._engine.recorder.require_order(tensors_in(data))
                    batch, loss_fn = by_person(batch, loss_fn)
                try:
                    with self._engine.timed():
                        out = self._summed(batch, loss_fn, parameters, momentum)  # Σ w(‖g‖)·g
                except RuntimeError as error:
                    explain_devices(error, batch.data, self.model)
                    raise
                report = self._book(draw, out)
            self._release(draw, out, parameters, momentum)
        return report

    def backward(self, losses: Tensor, batch: Batch | None = None) -> StepReport:
        """In place of ``losses.mean().backward()`` in a loop of your own: afterwards every ``.grad`` is private.

        Call it once per batch of `batches`, on the per-sample losses of that whole batch, then ``optimizer.step()``.
        For a batch in parts, see `parts`.

        Args:
            losses: shape (B,), from a forward of the model on the drawn batch; of people, one for each row.
            batch: the one that they are the losses of. None: the one outstanding draw.
        """
        part = batch.part if isinstance(batch, Batch) else None
        with self._state.turn:
            if part is not None and self._state.missing(batch.draw, part):  # type: ignore[union-attr]
                return self._keep(losses, batch, part)
            return self._backward(losses, batch, part)

    def _backward(self, losses: Tensor, batch: Batch | None, part: slice | None) -> StepReport:
        """Sum what a draw still lacks, and release it."""
        with self._ranks.whole("backward"):
            with self._ranks.together("backward", lambda: self._terms(draw, values)):
                self._check_backward()
                parameters = self._parameters()
                values = self._ranks.values(self.model.parameters(), self.steps_taken)
                draw = self._claim_draw(batch, None, parameters)
                momentum = self._momentum_state(parameters, len(draw.mask))
                out = self._with_parts(draw, self._recorded(losses, draw, part, parameters))
                report = self._book(draw, out)
            self._release(draw, out, parameters, momentum)
        return report

    def parts(self, batch: Batch, size: int) -> Iterator[Batch]:
        """A batch in parts, for a loop of your own in which a whole one does not fit into memory.

        Call `backward` with each of them, and ``optimizer.step()`` after the last. What the parts add up to is kept
        until then: noise is added once, the draw is released once, and there is no gradient before. Each sample counts
        once, if the losses that are given with a part are those of its rows; a person is never divided.

        Args:
            batch: as drawn.
            size: samples (people) in each part.

        Example:
            >>> import torch, dpscale; from torch import nn; from torch.utils.data import TensorDataset
            >>> data = TensorDataset(torch.randn(200, 5), torch.randint(0, 2, (200,)))
            >>> model = nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> private = dpscale.make_private(model, optimizer, data, epsilon=3, delta=1e-4, epochs=1, batch=50)
            >>> for batch in private.batches():
            ...     for part in private.parts(batch, 20):
            ...         x, y = part
            ...         _ = private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"), part)
            ...     optimizer.step(); optimizer.zero_grad()
            >>> private.steps_taken
            4
        """
        size = plain_number(size)
        require_count("parts", "size", size, action="It is how many samples go through a forward at once.")
        require(isinstance(batch, Batch) and batch.part is None, "parts", "batch", "a whole one of private.batches()",
                type(batch).__name__)  # fmt: skip
        require(not self._ranks.sharded, "parts", "batch", "of a model that is not sharded", "one under fully_shard",
                "Call privatize(..., micro_batch=...) and private.step(batch, loss_fn).")  # fmt: skip
        draw = self._state.check_outstanding(batch.draw)
        got = rows_of(batch.data)
        require(got == draw.rows, "parts", "batch", f"of {draw.rows} rows, as drawn", got, "Pass on every row.")
        count, each = len(draw.mask), draw.rows // len(draw.mask)
        counts = Counts(self.model, unseen=True)
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            own = part_of(batch.data, slice(part.start * each, part.stop * each), draw.rows)
            rows = batch.rows_in(part)
            if draw.mask.any():
                self._engine.recorder.start(part.stop - part.start, rows, each, tensors_in(own))
            if start:
                counts.restore()
            yield Batch(own, draw, {}, rows, part)

    def _keep(self, losses: Tensor, batch: Any, part: slice) -> StepReport:
        """Sum a part of a draw that is not its last, and keep it. An error is one on all ranks, which may wait."""
        try:
            self._check_backward()
            parameters = self._parameters()
            draw = self._claim_draw(batch, None, parameters)
            out = self._recorded(losses, draw, part, parameters)
            known = self._state.parts[draw.number][0] if draw.number in self._state.parts else []
            self._state.parts[draw.number] = [*known, part], self._with_parts(draw, out)
        except Exception:
            with self._ranks.together("backward", dict):
                raise
        return StepReport(part.stop - part.start, out.losses, out.norms, out.weights, out.ignored)

    def _with_parts(self, draw: Draw, out: ScaledSum) -> ScaledSum:
        """The sum over a part, and over those of its draw before it. What was kept stays as it is: should this come to
        nothing, another try needs it."""
        if draw.number not in self._state.parts:
            return out
        kept = self._state.parts[draw.number][1]
        if set(kept.grads) != set(out.grads):
            raise RuntimeError(
                "Parameters were frozen, unfrozen or replaced between the parts of a batch. Nothing was released. Do "
                "that between batches."
            )
        foreach_add_(list(out.grads.values()), [kept.grads[n] for n in out.grads])
        return replace(joined([kept, out]), grads=out.grads)

    def _recorded(self, losses: Tensor, draw: Draw, part: slice | None, parameters: Parameters) -> ScaledSum:
        """The sum over the samples of a part, from the losses of its rows, whose forward was recorded."""
        count, each = len(draw.mask[part or slice(None)]), draw.rows // len(draw.mask)
        check_losses(losses, count * each)
        if not draw.mask.any():
            return nothing(parameters, losses.device, self.plan.bound)
        if draw.shares is not None:
            losses = mean_of(losses, torch.from_numpy(draw.shares[part or slice(None)]).to(losses.device))
        mask = torch.ones(count, dtype=torch.bool, device=losses.device)
        try:
            return self._engine.recorder.scaled_sum(losses, self.plan.scaling, mask)
        except RuntimeError as error:
            explain_memory(error, count, f"{MICRO_BATCH}, or private.backward on each of private.parts(batch, {{}})")
            raise

    def _claim_draw(self, batch: Any, rows: int | None, parameters: Parameters) -> Draw:
        """The draw that is about to be released, after every check that could refuse it. Nothing is changed."""
        state = self._state
        if state.charged() >= self.steps and not state.outstanding:
            raise self._exhausted()
        if isinstance(batch, Batch):
            draw = state.check_outstanding(batch.draw)
            if rows not in (None, draw.rows):
                raise complaint("step", "batch", f"of {draw.rows} rows, as drawn", rows, "Pass on every row.")
        else:
            draw = state.only_outstanding(rows)
        state.missing(draw, batch.part if isinstance(batch, Batch) else None)
        if state.charged(draw) > self.steps:
            raise self._exhausted()
        self._guard.check(self._not_released(parameters))
        return draw

    def _not_released(self, parameters: Parameters) -> Iterator[Tensor]:
        """What the optimizer steers whose gradient a release leaves as it is."""
        released = {id(self._ranks.stored(p)) for p in parameters.values()}
        yield from (p for group in self.optimizer.param_groups for p in group["params"] if id(p) not in released)

    def _summed(self, batch: Batch, loss_fn: LossFn, parameters: Parameters, momentum: MomentumState) -> ScaledSum:
        """The sum over the samples drawn; in smaller parts, from now on, where it does not fit into memory."""
        while True:
            try:
                return self._in_parts(batch, loss_fn, parameters, momentum)
            except TooLarge as error:
                tried, rows = error.rows, error.rows // 2
                if rows == 0 or self._state.per_sample:  # whose memory holds a part of the batch already
                    raise
            self._micro_batch = rows
            if self._padding is not None:
                self._padding = Padding(Sizes.of(self.plan.sampling, rows, self._ranks.size))
            log.warning(
                "dpscale: %d rows do not fit into memory, so batches go in parts of %d from here on, with the same "
                "result. privatize(..., micro_batch=%d) begins with that.", tried, rows, rows,
            )  # fmt: skip

    def _in_parts(self, batch: Batch, loss_fn: LossFn, parameters: Parameters, momentum: MomentumState) -> ScaledSum:
        """The same, micro-batch by micro-batch."""
        data, count = batch.data, len(batch.draw.mask)
        if not batch.draw.mask.any():
            return nothing(parameters, device_of(data), self.plan.bound)
        points = momentum.points()
        padding = self._padding if self._engine.compiles and not self._state.per_sample else None
        split = [(slice(0, count), count)]
        if padding or (self._micro_batch or count) < count:
            split = (padding.sizes if padding else Sizes((self._micro_batch or count,))).parts(count)
        parts: list[ScaledSum] = []
        rest = [part_of(data, rows, count) for rows, _ in split[1:]] if batch.singles else []
        found = [self._structure]  # as it is until the first forward
        for rows, size in split:
            part, length = part_of(data, rows, count), rows.stop - rows.start

            def summed(data: Any, mask: Tensor, rows: slice = rows) -> ScaledSum:
                def remember(grads: dict[str, Tensor], own: slice) -> Mapping[str, Tensor]:
                    places = slice(rows.start + own.start, rows.start + own.stop)
                    return momentum.remember(grads, places, mask[own])

                return self._engine.scaled_sum(
                    loss_fn, data, self.plan.scaling, mask, points if len(points) > 1 else None,
                    keep=len(split) > 1 and not parts, change=remember if self._state.per_sample else None,
                    singles=None if parts else batch.singles, rest=rest, meanwhile=self._meanwhile,
                    counts=None if found else self._engine.counts, found=found.pop() if found else None,
                    rows=batch.rows_in(rows),
                )  # fmt: skip

            try:
                if padding:
                    out = padding(part, length, size, summed, self._engine.put)
                else:
                    out = summed(part, torch.ones(length, dtype=torch.bool, device=device_of(part)))
            except RuntimeError as error:
                explain_memory(error, size)
                raise
            if parts:  # added at once: a compiled step overwrites its own answer
                foreach_add_(list(parts[0].grads.values()), [out.grads[n] for n in parts[0].grads])
            parts.append(out)
        return joined(parts) if len(parts) > 1 else parts[0]

    def _meanwhile(self, sums: Parameters) -> None:
        """While a GPU is at work on sums: draw the noise of the step that they are for, and fetch the next batch."""
        if not self._ranks.sharded:
            self._state.noise.prepare(sums, self.plan.noise_std, self.steps_taken + 1)
        if self._state.ahead is not None:
            self._state.ahead()

    def _terms(self, draw: Draw, values: Digest) -> dict[str, Any]:
        """What every rank must say alike before a draw is released; ``values`` of the parameters, begun before the sum,
        so that on a GPU ranks exchange it while the sum is still being computed."""
        key = self._state.noise.key.derive("agreed")
        told = {"draw": draw.number, "steps taken": self.steps_taken, "key": key, "values": int(values)}
        return {**self._described, **told, **self._ranks.buffers(self.model, self.steps_taken)}

    def _book(self, draw: Draw, out: ScaledSum) -> StepReport:
        """In the ledger, on disk, before the draw is released. Where no sample has a gradient, the parameters may be
        the cause: refuse those."""
        if (ignored := int(out.ignored)) and ignored == len(draw.indices):
            require_finite(self.model)
        if self._state.booking is not None:
            self._state.booking.reserve(self._state.position(draw))
        return StepReport(len(draw.indices), out.losses, out.norms, out.weights, out.ignored)

    def _release(self, draw: Draw, out: ScaledSum, parameters: Parameters, momentum: MomentumState) -> None:
        """Count the step, sum over the ranks, add the noise once, divide by the expected batch size, and hand over to
        the optimizer. It is counted first: every rank has done so before any of them can have the sum."""
        with self._state.lock:
            step = self._state.release(draw)
            if not self._state.outstanding:
                self._engine.recorder.stop()
        sums = self._ranks.total(out.grads, parameters)
        for shard, part in self._ranks.by_noise(sums, parameters):
            self._state.noise.add(part, self.plan.noise_std, step, shard)
        momentum.release(sums)
        _divide_(list(sums.values()), self.plan.expected_batch)
        self._guard.released(self._ranks.set_gradients(sums, parameters))

    def _momentum_state(self, parameters: Parameters, samples: int) -> MomentumState:
        """What the momentum remembers, made at the first step: only then is the model where it stays."""
        momentum, state = self.plan.momentum, self._state.momentum
        if state is None:
            state = MomentumState(parameters) if momentum is None else momentum.start(parameters)
            state.allocate(samples)
            if self._state.held is not None:
                state.restore(self._ranks.parted(self._state.held, parameters))
            self._state.momentum, self._state.held = state, None
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
            check_optimizer(self.model, self.optimizer, self._ranks.stored)
            self._guard.watch(map(self._ranks.stored, found.trainable.values()))
            self._structure, self._described = found, model_terms(self.model)
        return dict(found.trainable)

    def _check_applied(self, call: str) -> None:
        """Refuse a release that would overwrite another."""
        if self._guard.unapplied and any(self._ranks.stored(p).grad is not None for p in self.model.parameters()):
            raise RuntimeError(
                f"{call}() was called again before optimizer.step(). A second release would overwrite the first, "
                "and both would be charged. Call optimizer.step() and optimizer.zero_grad() first. For larger "
                "batches, raise the plan's batch; to divide one, use private.parts(batch, size); for several losses, "
                "add them up sample by sample, or give each model a run of its own."
            )

    def _check_backward(self) -> None:
        """Refuse a release that would overwrite another, or for which one forward is not enough."""
        self._check_applied("backward")
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


def _divide_(sums: list[Tensor], by: int) -> None:
    """Divide all by one number. On a CPU torch makes a tensor of a number for each tensor that it divides."""
    alike = {(t.dtype, t.device.type) for t in sums} in ({(torch.float32, "cpu")}, {(torch.float64, "cpu")})
    foreach_div_(sums, torch.full((), by, dtype=sums[0].dtype, device="cpu") if alike else by)


def check_optimizer(model: nn.Module, optimizer: Optimizer, stored: Callable[[Tensor], Tensor]) -> None:
    """It must be over the model's trainable parameters, all of them and nothing else; ``stored`` says where they are
    kept between steps."""
    names = {id(stored(p)): n for n, p in trainable(structure(model)).items()}
    steered = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strangers = len(steered - {id(stored(p)) for p in model.parameters()})
    require(not strangers, "privatize", "optimizer", "over parameters of the model alone", f"{strangers} other tensors",
            "They would be trained without privacy, or not at all. Put them into the model.")  # fmt: skip
    idle = [n for i, n in names.items() if i not in steered]
    require(not idle, "privatize", "optimizer", "over every trainable parameter", f"one without {idle[:3]}",
            "Add them, or freeze them with requires_grad_(False): they count in every norm.")  # fmt: skip
