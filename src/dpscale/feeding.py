"""Feed: hands out the planned batches of a run, one draw each, and refuses data that the plan is not for."""

import logging
import operator
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, Dataset

from dpscale.batches import Ahead, Batch, Batches, Pick, fetched, on_device
from dpscale.checks import require
from dpscale.distributed import Ranks, data_terms
from dpscale.engine.arguments import tensors_in
from dpscale.engine.recorder import Recorder
from dpscale.people import People, people_of
from dpscale.run import RunState
from dpscale.sources import dataset_of, is_frame, is_hugging_face, require_once

log = logging.getLogger("dpscale")

_OF_THE_SAMPLER = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"}
"""Options of a loader that would change who is drawn."""


class Feed:
    """The batches of a run.

    Args:
        state: of the run.
        ranks: each gets its rows of a draw.
        recorder: follows forwards of somebody's own loop on the rows that are handed out.
    """

    def __init__(self, state: RunState, ranks: Ranks, recorder: Recorder) -> None:
        self._state, self._ranks, self._recorder = state, ranks, recorder
        self._remembered: tuple[Any, Dataset[Any], Mapping[str, Any]] | None = None
        self._made_of: tuple[Any, Dataset[Any]] | None = None  # what was given, and what it became

    def remember(self, source: Any, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """What is drawn from when nothing is given, or ``source``."""
        self._check(dataset, loader)
        self._remembered = source, dataset, loader

    def batches(self, run: Any, given: Dataset[Any] | None, loader: dict[str, Any]) -> Batches:
        """All that are left. They keep ``run`` alive, whose they are."""
        dataset, loader = self._recalled(given, loader)
        with self._ranks.together("batches", lambda: {"data": self._ranks.size > 1 and data_terms(dataset)}):
            left = self._check(dataset, loader)
        return Batches(self._drawn(run, dataset, loader, left), left)

    def epochs(self, run: Any, given: Dataset[Any] | None, loader: dict[str, Any]) -> Iterator[Batches]:
        """The same by epoch."""
        dataset, loader = self._recalled(given, loader)
        with self._ranks.together("epochs", lambda: {"data": self._ranks.size > 1 and data_terms(dataset)}):
            left, each = self._check(dataset, loader), self._state.plan.sampling.steps(1)
        first = min(left, each - self._state.position() % each)
        sizes = [first, *(min(each, left - k) for k in range(first, left, each))]
        return (Batches(self._drawn(run, dataset, loader, size), size) for size in sizes if size)

    def _recalled(self, given: Dataset[Any] | None, loader: dict[str, Any]) -> tuple[Dataset[Any], dict[str, Any]]:
        """The data to draw from: those that were given, or remembered."""
        if self._remembered is not None and (given is None or given is self._remembered[0]):
            return self._remembered[1], {**self._remembered[2], **loader}
        action = "Pass what the plan is for. Only a run of make_private() knows its data."
        require(given is not None, "batches", "dataset", "given", None, action)
        return self._as_dataset(given, "collate_fn" in loader), loader

    def _as_dataset(self, given: Any, collated: bool) -> Dataset[Any]:
        """What was given, as `make_private` would take it. The same thing given again is the same dataset.

        Args:
            given: a dataset, or what can be made one.
            collated: whether a function of one's own makes batches of its samples, as they are.
        """
        if self._made_of is not None and _same(given, self._made_of[0]):
            return self._made_of[1]
        must, got = "a dataset", "a DataLoader"
        action = "Pass its dataset: the plan draws the batches. Options such as num_workers go to batches()."
        require(not isinstance(given, DataLoader), "batches", "dataset", must, got, action)
        action = "Pass arrays (X, y); or make the run by make_private(..., target=...)."
        require(not is_frame(given), "batches", "dataset", "a dataset, or arrays", type(given).__name__, action)
        size = self._state.plan.sampling.size
        several = isinstance(given, list | tuple)
        columns = several and all(hasattr(each, "shape") and len(each) == size for each in given)
        samples = several and len(given) == size and not columns
        if samples or (collated and is_hugging_face(given)):
            return given  # type: ignore[no-any-return]
        dataset = dataset_of("batches", given, name="dataset")
        if dataset is not given:
            self._made_of = given, dataset
        return dataset

    def _check(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> int:
        """Refuse data that the plan is not for; otherwise say how many steps are left."""
        state, planned = self._state, self._state.plan.sampling
        size = len(dataset)  # type: ignore[arg-type]
        require(size > 0, "batches", "dataset", "a dataset with at least one sample", "an empty dataset")
        action = f"Plan with {type(planned).__name__}(size={size}, ...), so that sampler and accountant agree."
        require(size == planned.size, "batches", "dataset", f"of {planned.size} samples, as planned", size, action)
        taken = sorted(_OF_THE_SAMPLER & set(loader))
        require(not taken, "batches", "loader", "without options that change the sampling", taken,
                "Choose the sampler in the plan.")  # fmt: skip
        self._require_places(dataset, loader)
        people = people_of(dataset)
        self._settle_unit(people)
        if people is None:
            require_once("batches", dataset)
        left = max(0, state.steps - state.charged())
        if state.lost and not state.resumed:
            log.warning(
                "dpscale: %d steps of the run %r are in its ledger already, and it begins anew: they count, and %d are "
                "left. private.load(path) goes on from a checkpoint.", state.charged(), state.name, left,
            )  # fmt: skip
        if not left:
            log.warning("dpscale: all %d planned steps are taken, so there are no more batches.", state.steps)
        return left

    def _settle_unit(self, people: People | None) -> None:
        """The plan says whether its samples are people. One that does not learns it from its data, unless it has a
        price already."""
        state, plan, records = self._state, self._state.plan, None if people is None else people.records
        if records == plan.records:
            return
        must, got = (
            "of single records" if most is None else f"of people with {most} records at most"
            for most in (plan.records, records)
        )
        settled = plan.records is not None or state.charged() > 0 or state.name is not None
        action = f"Plan with Plan(..., records={records}), so that its statement says what is protected."
        require(not settled, "batches", "dataset", f"{must}, as planned", got, action)
        state.plan = replace(plan, records=records)

    def _require_places(self, dataset: Dataset[Any], loader: Mapping[str, Any]) -> None:
        """Where something is remembered of each sample by its place, the places must stay."""
        state, plan = self._state, self._state.plan
        midway = state.steps_taken > 0 if state.per_sample else state.last_released % plan.sampling.steps(1) != 0
        if state.per_sample:
            require(loader.get("collate_fn") is None, "batches", "collate_fn", "left out", "one of yours",
                    f"{type(plan.momentum).__name__} knows samples by their place, which it could change.")  # fmt: skip
        elif plan.sampling.independent:
            return
        require(
            not midway or state.dataset is None or dataset is state.dataset, "batches", "dataset",
            "the very dataset that this run began with", "another one",
            "Samples are known by their place in it: another order would be another sample's part.",
        )  # fmt: skip
        state.dataset = dataset

    def _drawn(self, run: Any, dataset: Dataset[Any], loader: Mapping[str, Any], count: int) -> Iterator[Batch]:
        """Draw so many batches, fetch their samples, and hand them out."""
        state, noise = self._state, self._state.noise
        with state.lock:
            this = state.start_loop()
            self._recorder.stop()
        start = state.handed_out
        drawn = state.plan.sampling.draws(noise.sampling(), start=start, order=state.order_of(start))
        shares = map(self._ranks.share, islice(drawn, count))
        people, each, state.ahead = people_of(dataset), None, None
        picks: Iterator[Pick] = map(Pick.of, shares)
        if people is not None:
            dataset, each, picks = people.dataset, people.each, people.picks(shares, start + 1, noise.chances)
        size = state.plan.sampling.size if people is None else people.size
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
                        self._recorder.start(len(batch.draw.mask), batch.rows, each or 1, tensors_in(data))
                yield batch
        except GeneratorExit:  # the loop was left: what it has handed out will not come back
            with state.lock:
                if this == state.loop:
                    state.drop()
                    self._recorder.stop()
                    self._ranks.give_back()
            raise
        finally:
            if this == state.loop:
                state.ahead = None


def _same(given: Any, before: Any) -> bool:
    """Whether it is what was given before, or a tuple or list of the very same."""
    if isinstance(given, tuple | list) and type(given) is type(before):
        return len(given) == len(before) and all(map(operator.is_, given, before))
    return given is before
