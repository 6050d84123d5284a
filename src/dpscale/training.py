"""The private step, and the loop around it: claim the draw, sum, add noise, hand over to the optimizer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset

from dpscale import checkpoint
from dpscale.batches import Ahead, Batch, Batches, Padding, Pick, device_of, fetched, on_device, part_of, rows_of
from dpscale.booking import open_run
from dpscale.card import Booked, Card, history, randomness
from dpscale.card import make as make_card
from dpscale.checks import complaint, out_of_memory, plain_number, require, require_count
from dpscale.distributed import Description, Ranks, data_terms, unwrapped
from dpscale.engine import Engine, LossFn, ScaledSum, check_losses, require_finite, trainable
from dpscale.engine.arguments import check_loss_fn, tensors_in
from dpscale.engine.compat import foreach_add_, foreach_div_, tree_map
from dpscale.engine.compile.worth import Worth
from dpscale.engine.modules import Structure, structure
from dpscale.guard import Guard, wrapped
from dpscale.ledger import BudgetExhausted, Ledger
from dpscale.momentum import MomentumState
from dpscale.noise import Key
from dpscale.packing import Padded, holds, over_packed
from dpscale.people import People, by_person, mean_of, people_of
from dpscale.plan import Plan
from dpscale.run import RunState, refusals
from dpscale.sampling import Draw, Indices
from dpscale.secure_noise import Source, check_source, default_source, noise_from
from dpscale.shapes import Sizes
from dpscale.sources import dataset_of, is_frame, is_hugging_face, require_once

log = logging.getLogger("dpscale")

Parameters = Mapping[str, Tensor]

_SAVED = {"run", "model", "optimizer", "optimizer_type", "extra", "about"}
"""What a checkpoint has."""


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
        self._model, self._optimizer, self._plan = model, optimizer, plan
        self._state = RunState()
        self._ranks = ranks
        self._source, self._noise = noise, noise_from(noise, key)
        self._padding = Padding(Sizes.of(plan.sampling, micro_batch, ranks.size)) if compile else None
        usual, most = (self._padding.usual, self._padding.sizes.rows[-1]) if self._padding else (0, 0)
        self._engine = Engine(model, compile=compile, any_size=usual, most=most)
        self._guard = Guard(optimizer, self)
        self._micro_batch = micro_batch
        self._structure: Structure | None = None
        self._description = Description()
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
    def _sources(self) -> frozenset[str]:
        """Of the noise of all steps that were released, those before a resumption included."""
        return self._state.sources or frozenset([self._source])

    @property
    def _per_sample(self) -> bool:
        """Whether every sample has a memory of its own."""
        return self.plan.momentum is not None and self.plan.momentum.per_sample

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
        return self._plan.epsilon(delta=delta, steps=self._charged)

    def statement(self, delta: float | None = None) -> str:
        """What to tell a reviewer about what was released so far, whether or not the plan was carried out."""
        source = f"Randomness: {randomness(self._noise.key.seeded, self._sources)}"
        return "\n".join([self._plan.statement(delta=delta, steps=self._charged), source, *self._history()])

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
            self._plan, self._charged, self._plan.delta_of("card", delta), resumed=self._state.resumed,
            booked=self._booked(), search=search, audit=audit, **self.about(),
        )  # fmt: skip

    def about(self) -> dict[str, Any]:
        """What a card says of a run besides its numbers: how many ranks, what the noise came from, what was checked."""
        return {"ranks": self._ranks.size, "seeded": self._noise.key.seeded, "sources": sorted(self._sources),
                "checks": self._engine.checks()}  # fmt: skip

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
        with self._state.turn:
            if self._state.momentum is not None and (self._ranks.sharded or self._per_sample):
                self._ranks.meet("state_dict")
            return {n: tree_map(_copied, value) for n, value in self._saved().items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` gave, in a run that has released nothing yet.

        Load model and optimizer as well, or use `load`, which does. All randomness is fresh from here on, with a seed
        too: one state may be loaded twice, and noise that was used once must not come again. Draws that are outstanding
        are dropped. Of the data only their number is checked: with `PerSampleEMA` and in the midst of a shuffled epoch,
        samples are known by their places, which must be the same as before.
        """
        with self._ranks.together("load_state_dict", lambda: {"steps taken": self.steps_taken}):
            self._check_saved(state, "The state")
            self._resume(state)
        self._adopt()

    def save(self, path: str | Path, extra: Any = None) -> None:
        """Write a checkpoint of all that is needed to go on: run, model and optimizer, in one file.

        The file is written whole or not at all, without pickle, for this user's eyes alone. Of several ranks the first
        one writes it; it may be loaded on any number of them.

        Args:
            path: of the file; one that is there is replaced when the new one is whole.
            extra: what else belongs to it, such as ``scheduler.state_dict()``: numbers, text, tensors, and lists and
                dicts of them. `load` returns it.
        """
        if self._per_sample:
            log.warning("dpscale: %s will hold exact gradients of single samples. Never publish it.", path)
        self._ranks.meet("save")
        with self._state.turn, self._ranks.together("save", lambda: {"steps taken": self.steps_taken}):
            found = {
                "run": self._saved(), "model": self._ranks.gathered(self.model.state_dict()),
                "optimizer": self._ranks.gathered(self.optimizer.state_dict()),
                "optimizer_type": type(self.optimizer).__name__, "extra": extra, "about": self.about(),
            }  # fmt: skip
            if self._ranks.rank == 0:
                checkpoint.write(Path(path), found)
            if self._state.booking is not None:
                self._state.booking.confirm()

    def load(self, path: str | Path) -> Any:
        """Go on from a checkpoint that `save` wrote, as `load_state_dict` does, with model and optimizer.

        A checkpoint of another plan, model or optimizer is refused, and then nothing is changed.

        Returns:
            what `save` was given as ``extra``.
        """
        with self._ranks.together("load", lambda: {"steps taken": self.steps_taken}):
            found = checkpoint.read(Path(path))
            if not isinstance(found, dict) or found.keys() != _SAVED:
                raise ValueError(f"{path} is damaged, or no checkpoint of a private run. Nothing was changed.")
            self._check_saved(found["run"], f"The checkpoint {path}", found["model"])
            kind = type(self.optimizer).__name__
            if found["optimizer_type"] != kind:
                raise ValueError(
                    f"The checkpoint {path} does not fit this run: its optimizer is {found['optimizer_type']}, and "
                    f"this one is {kind}. Nothing was changed."
                )
            before = self.optimizer.state_dict()
            self.optimizer.load_state_dict(self._steered(found["optimizer"]))  # refuses other groups of parameters
            try:
                self._resume(found["run"])
            except BaseException:
                self.optimizer.load_state_dict(before)
                raise
            now = self.model.state_dict()
            self.model.load_state_dict({n: self._ranks.divided(t, now[n]) for n, t in found["model"].items()})
        self._adopt()
        return found["extra"]

    def _saved(self) -> dict[str, Any]:
        order, parameters = self._order(self._state.last_released), self._parameters()
        found = {**self._state.saved(self._plan, parameters, order), "run": self._state.name}
        if self._state.momentum is not None:
            found["momentum"] = self._ranks.joined(found["momentum"], parameters, self.plan.sampling.size)
        return found

    def _steered(self, saved: dict[str, Any]) -> dict[str, Any]:
        """The state of an optimizer, in shards where its parameters are."""
        if not self._ranks.sharded:
            return saved
        steered = [p for group in self.optimizer.param_groups for p in group["params"]]
        state = {
            k: {n: self._ranks.divided(v, steered[k]) for n, v in each.items()} if k < len(steered) else each
            for k, each in saved["state"].items()
        }
        return {**saved, "state": state}

    def _check_saved(self, state: Mapping[str, Any], what: str, model: Mapping[str, Any] | None = None) -> None:
        """Refuse a state that is not of this run, or a run that it would undo."""
        if self._state.released_here:
            raise RuntimeError(
                f"This run has released {self._state.released_here} steps since it was made, which it would forget. "
                "Nothing was changed. Load into a new one, from privatize(). To go back to earlier weights, load them "
                "into the model: the steps stay paid for."
            )
        against = [*refusals(state, self._plan_for(state), self._parameters(), self._state.name)]
        if model is not None and not against:
            against = [*_differences(model, self.model.state_dict())]
        if against:
            raise ValueError(f"{what} does not fit this run: {'; '.join(against)}. Nothing was changed.")

    def _resume(self, state: Mapping[str, Any]) -> None:
        """Go on from a state that was checked; `_adopt` must follow. Whatever interrupts it, no noise comes again."""
        run, self._noise, self._plan = self._state, noise_from(self._source, Key()), self._plan_for(state)
        with run.lock:
            position, lost = state["steps_taken" if self.plan.sampling.independent else "last_released"], state["lost"]
            run.restore(state, self._plan, lost if run.booking is None else run.booking.resume(position, lost))
            self._engine.recorder.stop()

    def _plan_for(self, state: Any) -> Plan:
        """This run's plan; where it does not say that samples are people, as a state has it."""
        plan = state.get("plan") if isinstance(state, Mapping) else None
        records = plan.get("records") if isinstance(plan, Mapping) else None
        silent = self._plan.records is None and self._state.name is None
        return replace(self._plan, records=records) if silent and isinstance(records, int) else self._plan

    def _adopt(self) -> None:
        """Take over what rank 0 knows of the ledger, and a fresh key: runs that are resumed, or composed in a ledger,
        must not share noise, whatever their seeds."""
        state = self._state
        if state.booking is not None:
            state.name, state.lost = state.booking.name, state.booking.lost
        state.name, state.lost = self._ranks.told((state.name, state.lost))
        self._noise = noise_from(self._source, self._ranks.key(None))

    def close(self) -> None:
        """End the run: what it has reserved in a ledger and not used is given back, and another process may resume it.

        Without a ledger this does nothing. It happens by itself when the process ends.
        """
        if self._state.booking is not None:
            self._state.booking.close()

    def _order(self, step: int) -> Indices | None:
        """Of the shuffled epoch that ``step`` lies in, if it has begun before."""
        carried, sampling = self._state.order, self.plan.sampling
        if carried is not None and step // sampling.steps(1) == carried[0]:
            return carried[1]
        return sampling.order(self._noise.sampling(), step)

    @contextmanager
    def public_data(self) -> Iterator[None]:
        """Inside ``with private.public_data():`` optimizers may apply plain gradients, which the run refuses elsewhere.

        They cost no privacy if the data are public and were not chosen by looking at the private ones.
        """
        with self._guard.public(), self._ranks.on_public_data():
            yield

    def remember(self, source: Any, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """What `batches` and `epochs` draw from when they are given nothing, or ``source``: see `make_private`."""
        self._check_data(dataset, loader)
        self._state.remembered = source, dataset, loader

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
        dataset, loader = self._recalled(dataset, loader)
        with self._ranks.together("batches", lambda: {"data": self._ranks.size > 1 and data_terms(dataset)}):
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
        with self._ranks.together("epochs", lambda: {"data": self._ranks.size > 1 and data_terms(dataset)}):
            left, each = self._check_data(dataset, loader), self.plan.sampling.steps(1)
        first = min(left, each - self._state.position(self.plan.sampling.independent) % each)
        sizes = [first, *(min(each, left - k) for k in range(first, left, each))]
        return (Batches(self._batches(dataset, loader, size), size) for size in sizes if size)

    def _recalled(self, given: Dataset[Any] | None, loader: dict[str, Any]) -> tuple[Dataset[Any], dict[str, Any]]:
        """The data to draw from: those that were given, or remembered."""
        if self._state.remembered is not None and (given is None or given is self._state.remembered[0]):
            return self._state.remembered[1], {**self._state.remembered[2], **loader}
        action = "Pass what the plan is for. Only a run of make_private() knows its data."
        require(given is not None, "batches", "dataset", "given", None, action)
        return self._as_dataset(given, "collate_fn" in loader), loader

    def _as_dataset(self, given: Any, collated: bool) -> Dataset[Any]:
        """What was given, as `make_private` would take it. The same thing given again is the same dataset.

        Args:
            given: a dataset, or what can be made one.
            collated: whether a function of one's own makes batches of its samples, as they are.
        """
        state = self._state
        if state.made_of is not None and given is state.made_of[0]:
            return state.made_of[1]  # type: ignore[no-any-return]
        must, got = "a dataset", "a DataLoader"
        action = "Pass its dataset: the plan draws the batches. Options such as num_workers go to batches()."
        require(not isinstance(given, DataLoader), "batches", "dataset", must, got, action)
        action = "Pass arrays (X, y); or make the run by make_private(..., target=...)."
        require(not is_frame(given), "batches", "dataset", "a dataset, or arrays", type(given).__name__, action)
        samples = isinstance(given, list | tuple) and len(given) == self.plan.sampling.size
        if samples or (collated and is_hugging_face(given)):
            return given  # type: ignore[no-any-return]
        dataset = dataset_of("batches", given, name="dataset")
        if dataset is not given:
            state.made_of = given, dataset
        return dataset

    def _check_data(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> int:
        """Refuse data that the plan is not for; otherwise say how many steps are left."""
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
        people = people_of(dataset)
        self._settle_unit(people)
        if people is None:
            require_once("batches", dataset)
        left = max(0, self.steps - self._charged)
        if self._state.lost and not self._state.resumed:
            told = (
                "dpscale: %d steps of the run %r are in its ledger already, and it begins anew: they count, and %d are "
            )
            log.warning(
                told + "left. private.load(path) goes on from a checkpoint.", self._charged, self._state.name, left
            )
        if not left:
            log.warning("dpscale: all %d planned steps are taken, so there are no more batches.", self.steps)
        return left

    def _settle_unit(self, people: People | None) -> None:
        """The plan says whether its samples are people. One that does not learns it from its data, unless it has a
        price already."""
        records = None if people is None else people.records
        if records == self.plan.records:
            return
        must, got = (
            "of single records" if most is None else f"of people with {most} records at most"
            for most in (self.plan.records, records)
        )
        settled = self.plan.records is not None or self._charged > 0 or self._state.name is not None
        action = f"Plan with Plan(..., records={records}), so that its statement says what is protected."
        require(not settled, "batches", "dataset", f"{must}, as planned", got, action)
        self._plan = replace(self._plan, records=records)

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
            not midway or self._state.dataset is None or dataset is self._state.dataset, "batches", "dataset",
            "the very dataset that this run began with", "another one",
            "Samples are known by their place in it: another order would be another sample's part.",
        )  # fmt: skip
        self._state.dataset = dataset

    def _batches(self, dataset: Dataset[Any], loader: Mapping[str, Any], count: int) -> Iterator[Batch]:
        state = self._state
        with state.lock:
            this = state.start_loop()
            self._engine.recorder.stop()
        start = state.handed_out
        drawn = self.plan.sampling.draws(self._noise.sampling(), start=start, order=self._order(start))
        shares = map(self._ranks.share, islice(drawn, count))
        people, each, state.ahead = people_of(dataset), None, None
        picks: Iterator[Pick] = map(Pick.of, shares)
        if people is not None:
            dataset, each, picks = people.dataset, people.each, people.picks(shares, start + 1, self._noise.chances)
        size = self.plan.sampling.size if people is None else people.size
        fetching = Ahead(fetched(dataset, loader, picks, size, each))
        if people is None and self._ranks.size == 1 and on_device(dataset, loader):
            state.ahead = fetching.fetch
        try:
            for pick, data, singles, rows in fetching:
                with state.lock:
                    if this != state.loop:
                        raise RuntimeError("Another loop over private.batches() has begun; go on with that one.")
                    batch = Batch(data, state.hand_out(pick.indices, pick.shares), singles, rows)
                    if batch.draw.mask.any():
                        self._engine.recorder.start(len(batch.draw.mask), batch.rows, each or 1, tensors_in(data))
                yield batch
        except GeneratorExit:  # the loop was left: what it has handed out will not come back
            with state.lock:
                if this == state.loop:
                    state.drop()
                    self._engine.recorder.stop()
                    self._ranks.give_back()
            raise
        finally:
            if this == state.loop:
                state.ahead = None

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
            with self._ranks.together(call, lambda: self._terms(draw)):
                if call != "step":
                    self._check_applied(call)
                data = batch.data if isinstance(batch, Batch) else batch
                parameters = self._parameters()
                draw = self._claim_draw(batch, rows_of(data), parameters)
                momentum = self._momentum_state(parameters, len(draw.mask))
                batch = batch if isinstance(batch, Batch) else Batch(data, draw)
                loss_fn = over_packed(loss_fn) if holds(data, Padded) else loss_fn
                if draw.shares is not None:
                    self._engine.recorder.require_order(tensors_in(data))
                    batch, loss_fn = by_person(batch, loss_fn)
                with self._engine.timed(), _device_advice(batch.data, self.model):
                    out = self._summed(batch, loss_fn, parameters, momentum)  # Σ w(‖g‖)·g
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
            with self._ranks.together("backward", lambda: self._terms(draw)):
                self._check_backward()
                parameters = self._parameters()
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
        rows = rows_of(batch.data)
        require(rows == draw.rows, "parts", "batch", f"of {draw.rows} rows, as drawn", rows, "Pass on every row.")
        count, each = len(draw.mask), draw.rows // len(draw.mask)
        for start in range(0, count, size):
            part = slice(start, min(start + size, count))
            own = part_of(batch.data, slice(part.start * each, part.stop * each), draw.rows)
            if draw.mask.any():
                self._engine.recorder.start(part.stop - part.start, batch.rows_in(part), each, tensors_in(own))
            yield Batch(own, draw, {}, batch.rows_in(part), part)

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
        return replace(_joined([kept, out]), grads=out.grads)

    def _recorded(self, losses: Tensor, draw: Draw, part: slice | None, parameters: Parameters) -> ScaledSum:
        """The sum over the samples of a part, from the losses of its rows, whose forward was recorded."""
        count, each = len(draw.mask[part or slice(None)]), draw.rows // len(draw.mask)
        check_losses(losses, count * each)
        if not draw.mask.any():
            return _nothing(parameters, losses.device, self.plan.bound)
        if draw.shares is not None:
            losses = mean_of(losses, torch.from_numpy(draw.shares[part or slice(None)]).to(losses.device))
        with _memory_advice(count, f"{_MICRO_BATCH}, or private.backward on each of private.parts(batch, {{}})"):
            mask = torch.ones(count, dtype=torch.bool, device=losses.device)
            return self._engine.recorder.scaled_sum(losses, self.plan.scaling, mask)

    def _claim_draw(self, batch: Any, rows: int | None, parameters: Parameters) -> Draw:
        """The draw that is about to be released, after every check that could refuse it. Nothing is changed."""
        state, independent = self._state, self.plan.sampling.independent
        if self._charged >= self.steps and not state.outstanding:
            raise self._exhausted()
        if isinstance(batch, Batch):
            draw = state.check_outstanding(batch.draw)
            if rows not in (None, draw.rows):
                raise complaint("step", "batch", f"of {draw.rows} rows, as drawn", rows, "Pass on every row.")
        else:
            draw = state.only_outstanding(rows)
        state.missing(draw, batch.part if isinstance(batch, Batch) else None)
        if state.charged(independent, draw) > self.steps:
            raise self._exhausted()
        overwritten = {id(self._ranks.stored(p)) for p in parameters.values()}
        steered = (p for group in self.optimizer.param_groups for p in group["params"])
        self._guard.check(p for p in steered if id(p) not in overwritten)
        return draw

    def _summed(self, batch: Batch, loss_fn: LossFn, parameters: Parameters, momentum: MomentumState) -> ScaledSum:
        """The sum over the samples drawn; in smaller parts, from now on, where it does not fit into memory."""
        while True:
            try:
                return self._in_parts(batch, loss_fn, parameters, momentum)
            except TooLarge as error:
                tried, rows = error.rows, error.rows // 2
                if rows == 0 or self._per_sample:  # whose memory holds a part of the batch already
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
            return _nothing(parameters, device_of(data), self.plan.bound)
        points = momentum.points()
        padding = self._padding if self._engine.compiles and not self._per_sample else None
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
                    keep=len(split) > 1 and not parts, change=remember if self._per_sample else None,
                    singles=None if parts else batch.singles, rest=rest, rows=batch.rows_in(rows),
                    found=found.pop() if found else None, meanwhile=self._state.ahead,
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

    def _terms(self, draw: Draw) -> dict[str, Any]:
        """What every rank must say alike before a draw is released."""
        taken, found = self.steps_taken, self._structure
        assert found is not None
        values = self._ranks.values(tuple(found.trainable.values()), taken)
        return {"draw": draw.number, "steps taken": taken, "parameters": self._description, "values": values}

    def _book(self, draw: Draw, out: ScaledSum) -> StepReport:
        """In the ledger, on disk, before the draw is released. Where no sample has a gradient, the parameters may be
        the cause: refuse those."""
        if (ignored := int(out.ignored)) and ignored == len(draw.indices):
            require_finite(self.model)
        if self._state.booking is not None:
            self._state.booking.reserve(self._state.position(self.plan.sampling.independent, draw))
        return StepReport(len(draw.indices), out.losses, out.norms, out.weights, out.ignored)

    def _release(self, draw: Draw, out: ScaledSum, parameters: Parameters, momentum: MomentumState) -> None:
        """Count the step, sum over the ranks, add the noise once, divide by the expected batch size, and hand over to
        the optimizer. It is counted first: every rank has done so before any of them can have the sum."""
        with self._state.lock:
            step = self._state.release(draw, self._source)
            if not self._state.outstanding:
                self._engine.recorder.stop()
        sums = self._ranks.total(out.grads, parameters)
        for shard, part in self._ranks.by_noise(sums, parameters):
            self._noise.add(part, self.plan.noise_std, step, shard)
        momentum.release(sums)
        foreach_div_(list(sums.values()), self.plan.expected_batch)
        for name, mean in sums.items():
            self._ranks.set_gradient(parameters[name], mean)
        self._guard.released(self._ranks.stored(parameters[name]) for name in sums)

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
            self._structure, self._description = found, Description.of(self.model)
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


def privatize(
    model: nn.Module,
    optimizer: Optimizer,
    plan: Plan,
    *,
    seed: int | None = None,
    micro_batch: int | None = None,
    compile: bool | None = None,
    ledger: Ledger | None = None,
    run: str | None = None,
    group: Any = None,
    noise: Source | None = None,
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
        seed: None for the operating system's randomness; an integer makes the run reproducible until it is resumed, and
            its noise guessable. With a ledger it has no effect: runs that are added up must not share noise.
        micro_batch: samples per forward of `Private.step`; None for a whole batch. A matter of memory and speed: the
            result does not depend on it. For a compiled step, Poisson draws are padded to a few sizes: 512 rows on
            average to 524. In a loop of your own the forward is yours, on the rows drawn; `Private.parts` divides it.
        compile: trace and compile `Private.step` at its first batch, which takes from seconds to a minute and pays over
            a long run. None: on CUDA, and on the CPU once it is seen that minutes of steps are left (not with a seed: a
            run that is compiled midway, at a moment that the clock decides, cannot be reproduced). What cannot be
            compiled runs eagerly, with one line that says why. Numbers that ``loss_fn`` reads from attributes of
            objects that are no modules of the model are taken as they are when it is compiled.
        ledger: where all runs on these data are booked. A plan that does not fit into what is left of its total is
            refused, and so is the step that could not be written down.
        run: the name of this run in the ledger, under which it is resumed. None: a new one.
        group: the `torch.distributed` process group to train in; None for that of all processes, if there is one. Every
            rank calls this and all that follows alike, on the whole data set, and takes its rows of each draw.
        noise: "secure" for noise and draws by cryptographic generators, against an adversary who tries to break them:
            ChaCha20 for the noise, SHAKE-256 for the draws. Needs the extra ``secure``, but not on CUDA. "fast" for
            those of numpy and torch, which are statistically sound and not cryptographic. None: "fast".

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
    seed, micro_batch = plain_number(seed), plain_number(micro_batch)
    require(run is None or ledger is not None, "privatize", "run", "left out without a ledger", run)
    _check_types(optimizer, plan, compile, ledger)
    model = unwrapped(model)
    ranks = Ranks(model, group)
    key = ranks.key(seed)
    devices = {p.device.type for p in model.parameters()}
    source = default_source(devices) if noise is None else noise

    def terms() -> dict[str, Any]:
        kept = [{k: str(v) for k, v in each.items() if k != "params"} for each in optimizer.param_groups]
        steered = type(optimizer).__name__, *kept
        return {"plan": repr(plan), "parameters": Description.of(model), "optimizer": steered,
                "values": ranks.values((*model.parameters(), *model.buffers())),
                "ledger": (ledger is not None, run), "noise": source}  # fmt: skip

    with ranks.whole("privatize"), ranks.together("privatize", terms):
        _check_arguments(model, optimizer, plan, micro_batch)
        check_source("privatize", source, devices)
        asked = compile
        if compile is None:
            compile = all(p.is_cuda for p in model.parameters())
        decides = None if compile or asked is not None or seed is not None or ranks.size > 1 else Worth(plan.steps or 0)
        private = Private(model, optimizer, plan, key, micro_batch, decides or compile, ranks, source)
        if ledger is not None and ranks.rank == 0:  # one of them books for all
            private._state.booking = open_run(ledger, run, plan)
    if ledger is not None:
        private._adopt()
    return private


def _check_types(optimizer: Any, plan: Any, compile: Any, ledger: Any) -> None:
    """Refuse what is something else than it should be, before anything is asked of it."""
    for ok, name, must, got, action in (
        (hasattr(optimizer, "param_groups") and not isinstance(optimizer, type), "optimizer", "a torch optimizer",
         optimizer, "Make one: torch.optim.SGD(model.parameters(), lr=0.1)."),
        (isinstance(plan, Plan), "plan", "a dpscale.Plan", plan,
         "Or call make_private(model, optimizer, data, epsilon=..., delta=...), which makes one."),
        (compile is None or isinstance(compile, bool) or callable(compile), "compile", "True, False or None", compile,
         "None lets the library decide."),
        (isinstance(ledger, Ledger | None), "ledger", "a dpscale.Ledger, or None", ledger,
         "Open one: dpscale.Ledger('my.ledger', epsilon=..., delta=...), the total of all runs."),
    ):  # fmt: skip
        require(ok, "privatize", name, must, got if isinstance(got, str | Path) else type(got).__name__, action)


def _check_arguments(model: nn.Module, optimizer: Optimizer, plan: Plan, micro_batch: int | None) -> None:
    require(plan.noise_multiplier is not None, "privatize", "plan", "calibrated", "a plan without a noise multiplier",
            "Call plan.calibrate(epsilon=..., delta=...), or give noise_multiplier.")  # fmt: skip
    require(plan.steps is not None, "privatize", "plan", "one that says how many steps", "a plan without steps",
            "Give steps or epochs, or call plan.calibrate_steps(epsilon=..., delta=...).")  # fmt: skip
    if micro_batch is not None:
        require_count("privatize", "micro_batch", micro_batch)
    unloaded = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta and not is_lazy(t)]
    require(not unloaded, "privatize", "model", "one whose parameters are in memory", f"{unloaded[:1]} on 'meta'",
            "Load its weights first; model.to_empty(device='cpu') makes room for them.")  # fmt: skip
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    require(not lazy, "privatize", "model", "one whose parameters have shapes", f"a lazy one ({lazy[:1]} has none yet)",
            "Run a batch of zeros through it, and then make the optimizer.")  # fmt: skip
    require_finite(model)
    lbfgs = any(isinstance(one, torch.optim.LBFGS) for one in wrapped(optimizer))
    require(not lbfgs, "privatize", "optimizer", "one that steps once per gradient", "LBFGS",
            "It evaluates the loss several times a step, which would be several releases.")  # fmt: skip


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


class TooLarge(MemoryError):
    """So many samples do not fit into memory."""

    def __init__(self, rows: int, action: str) -> None:
        super().__init__(
            f"A micro-batch of {rows} rows does not fit into memory. Nothing was released. "
            f"{action.replace('{}', str(max(1, rows // 2)))}: the result does not depend on it."
        )
        self.rows = rows


_MICRO_BATCH = "Call privatize(..., micro_batch={}) and private.step(batch, loss_fn)"


@contextmanager
def _memory_advice(rows: int, action: str = _MICRO_BATCH) -> Iterator[None]:
    """Say what to do when a micro-batch does not fit."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise TooLarge(rows, action) from error


@contextmanager
def _device_advice(data: Any, model: nn.Module) -> Iterator[None]:
    """Say what to do when batch and model are on different devices: ``loss_fn`` may move them, so it is tried."""
    try:
        yield
    except RuntimeError as error:
        if "same device" not in str(error):
            raise
        model_on = next((p.device for p in model.parameters()), "cpu")
        raise ValueError(
            f"Tensors are on different devices: the batch on {device_of(data)}, the model on {model_on}. Nothing was "
            f"released. Call private.step(batch.to({str(model_on)!r}), loss_fn)."
        ) from error


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """What differs between two state dicts of a model: names, shapes and types of tensors."""
    for name in dict.fromkeys([*before, *now]):
        one, other = ((state[name].shape, state[name].dtype) if isinstance(state.get(name), Tensor) else name in state
                      for state in (before, now))  # fmt: skip
        if one != other:
            yield f"{name} of its model is another, or is missing"


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
