"""Tuning that is paid for: try settings at random, release only the best; its cost is that of a `Selection`.

The score that decides must be private as well: a noisy count of people who were held out, or anything on public data.

How many tries there are is drawn once, and kept where the search is kept: a search that was killed goes on with the
number that it has. A try that was begun and not finished counts as one of them, and is not made again: whoever saw a
part of it would otherwise have had a try for nothing.
"""

import logging
import math
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from dpscale import booking, checkpoint
from dpscale.booking import Booking
from dpscale.card import Booked, Card
from dpscale.card import make as make_card
from dpscale.checks import require
from dpscale.distributed import Ranks
from dpscale.files import HAS_LOCKS, try_lock
from dpscale.ledger import Ledger, now
from dpscale.noise import Key
from dpscale.plan import Plan
from dpscale.run import released
from dpscale.selection import Selection as Selection
from dpscale.training import Private

log = logging.getLogger("dpscale")

Choice = dict[str, Any]

FILE = "tuning.ckpt"
"""In the folder of a search: how far it is."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Try:
    """What a try came to, for a ``train`` that does more than return its `Private`.

    Args:
        model: made from the private run's by any means that look at no data, such as an average of its weights.
        plan: that it was trained under.
        about: `Private.about` of the run.
    """

    model: nn.Module
    plan: Plan
    about: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The best of the tries, which may be released: nothing else of them may.

    Attributes:
        choice: its setting.
        state: its model's state_dict.
        score: its noisy score.
        epsilon, delta: what the whole selection costs.
        statement: for a reviewer.
        plan: that it was trained under.
        selection: what it is the best of.
        about: what its card says besides.
    """

    choice: Choice
    state: dict[str, Tensor]
    score: float
    epsilon: float
    delta: float
    statement: str
    plan: Plan
    selection: Selection
    about: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"Tuned(choice={self.choice}, score={self.score:.4g}, epsilon={self.epsilon:.4g}, delta={self.delta:g})"

    def card(self, *, search: str | None = None, audit: Mapping[str, Any] | None = None) -> Card:
        """A page for a reviewer about the best try and what it was chosen from, as `Private.card`."""
        return make_card(
            self.plan, self.plan.steps or 0, self.delta, selection=self.selection, search=search, audit=audit,
            **self.about,
        )  # fmt: skip


def tune(
    train: Callable[[Choice, Plan], Private | Try], space: Mapping[str, Sequence[Any]],
    score: Callable[[nn.Module], float], *, plan: Plan, selection: Selection | None = None, delta: float | None = None,
    folder: str | Path | None = None, ledger: Ledger | None = None, run: str | None = None, seed: int | None = None,
    on_try: Callable[[int], None] = lambda done: None,
) -> Tuned | None:  # fmt: skip
    """Train with settings drawn at random, and return the best; the number of tries is random too.

    Guarantee: what is returned is (ε, δ)-differentially private, ε = ``selection.epsilon(plan, delta)``, for those who
    were trained on and those who were held out alike, if nothing else of the tries is published.

    Args:
        train: ``train(choice, plan)`` trains a new model once under that plan, with any scaling and momentum of its own
            (``dataclasses.replace(plan, scaling=..., momentum=...)``), and returns its `Private`, or a `Try`. What it
            logs or writes is not paid for, nor what it takes over from another try. It books in no ledger.
        space: values to choose from, by name, each equally likely.
        score: how good a model is. With ``selection.score_noise``, a count of held-out people, none of whom is trained
            on; noise is added here. Otherwise any number, of public data. What it changes in the model is not kept.
        plan: calibrated, of one try: `Selection.calibrate` does that for a budget of all of them.
        selection: None: `Selection()`.
        delta: None: the plan's.
        folder: where to keep how far it is, for this user's eyes alone; the same call goes on there, with the number
            of tries that was drawn first. An older copy of it must not be put back. None: nowhere.
        ledger: that the search is booked in, as a whole, before the first try; needs a ``folder``.
        run: its name there. None: a new one, which the folder remembers.
        seed: as for `privatize`.
        on_try: called with how many tries are done.

    Returns:
        the best try; None if none was made, which a Poisson number (``shape=inf``) allows, or none was finished.
    """
    selection = selection or Selection()
    require(isinstance(plan, Plan), "tune", "plan", "a dpscale.Plan", type(plan).__name__)
    delta = plan.delta if delta is None else delta
    require(delta is not None, "tune", "delta", "given, or that of the plan", delta)
    assert delta is not None
    action = "Selection.calibrate finds it for a budget of all tries."
    require(bool(plan.noise_multiplier and plan.steps), "tune", "plan", "one with noise and steps", plan, action)
    for name, call in (("train", train), ("score", score)):
        require(callable(call), "tune", name, "a function", type(call).__name__)
    lists = [*space.values()] if isinstance(space, Mapping) else []
    ok = bool(lists) and all(hasattr(each, "__len__") and not isinstance(each, str) and len(each) for each in lists)
    require(ok, "tune", "space", "lists of values by name", space, 'Such as {"rate": [0.5, 1.0, 2.0]}.')
    require(isinstance(ledger, Ledger | None), "tune", "ledger", "a dpscale.Ledger, or None", ledger)
    action = "A search that is booked must be able to go on: name a folder of its own."
    require(ledger is None or folder is not None, "tune", "folder", "given with a ledger", folder, action)
    log.info("dpscale: the selection costs epsilon = %.4g at delta %g, %.3g tries on average.",
             selection.epsilon(plan, delta), delta, selection.tries)  # fmt: skip
    search = _Search(selection, plan, space, None if folder is None else Path(folder) / FILE, seed)
    try:
        search.begin(ledger, run)
        while search.next_try():
            search.take(train, score)
            on_try(search.state["begun"])
        return search.result(delta)
    finally:
        search.close()


class _Search:
    """A search that goes on: its state is on the disk before each try, and its cost in the ledger before the first.

    Of several ranks the first one decides, writes and books; what it has decided is told to the others.
    """

    def __init__(
        self, selection: Selection, plan: Plan, space: Mapping[str, Sequence[Any]], file: Path | None, seed: int | None
    ) -> None:
        self.selection, self.plan, self.space, self.file, self.seed = selection, plan, space, file, seed
        self.ranks = Ranks(nn.Module())
        self.booking: Booking | None = None
        self.state: dict[str, Any] = {}
        self._models: WeakSet[nn.Module] = WeakSet()
        self._lock: int | None = None

    @property
    def _terms(self) -> str:
        return repr((self.selection, self.plan, {name: list(values) for name, values in self.space.items()}))

    def begin(self, ledger: Ledger | None, run: str | None) -> None:
        """Draw the number of tries, or find the one that was drawn; reserve the cost."""
        key = self.ranks.key(self.seed)
        with self.ranks.together("tune", lambda: {"terms": self._terms, "ledger": ledger is not None}):
            if self.ranks.rank == 0:
                self._take_folder()
                known = self._read()
                self.state = known or self._drawn(key)
                if ledger is not None:
                    self._book(ledger, run, known is None)
                elif (name := self.state["run"]) is not None:
                    raise ValueError(f"This search is booked in a ledger as run {name!r}. Pass that ledger to tune().")
                self._write()
        self.state = self.ranks.told(self.state)

    def _take_folder(self) -> None:
        """Two that go on in one folder would make more tries than were drawn."""
        if self.file is None or not HAS_LOCKS:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self._lock = try_lock(self.file.with_name(".lock"))
        if self._lock is None:
            raise RuntimeError(f"Another search goes on in {self.file.parent}. Wait for it, or take another folder.")

    def _drawn(self, key: Key) -> dict[str, Any]:
        number = self.selection.draw(key.generator("tuning/number"))
        return {"terms": self._terms, "run": None, "number": number, "begun": 0, "resumed": 0, "best": None}

    def _read(self) -> dict[str, Any] | None:
        if self.file is None or not self.file.exists():
            return None
        found: dict[str, Any] = checkpoint.read(self.file)
        require(found.get("terms") == self._terms, "tune", "folder", "of this very search", str(self.file.parent),
                "It holds another one: another plan, selection or space. Take another folder.")  # fmt: skip
        return found | {"resumed": found["resumed"] + (found["begun"] < found["number"])}

    def _write(self) -> None:
        if self.file is not None and self.ranks.rank == 0:
            checkpoint.write(self.file, self.state)

    def _book(self, ledger: Ledger, run: str | None, new: bool) -> None:
        known = self.state["run"]
        name = run or known or f"tune-{now()[:10]}-{secrets.token_hex(4)}"
        require(known in (None, name), "tune", "run", f"{known!r}, as in its folder", run)
        self.booking = booking.open_run(ledger, name, self.plan, self.selection)
        if new and self.booking.begun:
            raise ValueError(
                f"The search {name!r} was begun before, and its folder has nothing of it. How many tries it has was "
                "drawn once, and must not be drawn again. Bring back its folder, or give a new search another name."
            )
        self.state["run"] = name
        self._write()  # the number that was drawn is on the disk before its price is
        self.booking.reserve_whole()

    def next_try(self) -> bool:
        """Whether there is another try; it counts from now on."""
        if self.state["begun"] >= self.state["number"]:
            return False
        self.state["begun"] += 1
        self._write()
        return True

    def take(
        self, train: Callable[[Choice, Plan], Private | Try], score: Callable[[nn.Module], float]
    ) -> None:  # fmt: skip
        """Make a try, and keep it if it is the best so far."""
        key = self.ranks.key(None if self.seed is None else self.seed + self.state["begun"] - 1)
        drawn = key.generator("tuning/choice")
        index = {name: int(drawn.integers(len(values))) for name, values in self.space.items()}
        before = released.number
        ran = train(self._chosen(index), self.plan)
        made = Try(model=ran.model, plan=ran.plan, about=ran.about()) if isinstance(ran, Private) else ran
        action = "Return what privatize() or make_private() gave, or a Try."
        must = "a function that returns its Private"
        require(isinstance(made, Try), "tune", "train", must, type(made).__name__, action)
        _require_as_planned(made.plan, self.plan)
        self._require_its_own(ran, made.model, released.number - before)
        state = {name: t.detach().cpu().clone() for name, t in made.model.state_dict().items()}
        noisy = self.ranks.told(self._scored(score, made.model, key))
        best = self.state["best"]
        if best is None or (not math.isnan(noisy) and noisy > best["score"]):
            noisy = noisy if not math.isnan(noisy) else -math.inf
            self.state["best"] = {"index": index, "score": noisy, "state": state, "plan": made.plan.to_dict(),
                                  "about": dict(made.about)}  # fmt: skip
        if isinstance(ran, Private):
            ran.close()
        self._write()

    def _require_its_own(self, ran: Private | Try, model: nn.Module, steps: int) -> None:
        """What a try has, it must have from steps of its own, and no more of them than are paid for."""
        planned = self.plan.steps or 0
        require(steps <= planned, "tune", "train", f"such that it releases {planned} steps, those of one run", steps,
                "Runs that are thrown away cost as much as others: add their settings to the space.")  # fmt: skip
        resumed = isinstance(ran, Private) and ran.resumed > 0
        require(not resumed and model not in self._models, "tune", "train", "such that each try begins anew",
                "a run that was resumed" if resumed else "the model of another try",
                "Make the model inside of it. What one try takes over from another is not paid for.")  # fmt: skip
        self._models.add(model)

    def _scored(self, score: Callable[[nn.Module], float], model: nn.Module, key: Key) -> float:
        """The score, with noise if it is of people."""
        found, std = float(score(model)), self.selection.score_noise
        if std is None:
            return found
        action = "Noise hides one person in a count of people; nothing is hidden by noise on infinity, or on NaN."
        require(math.isfinite(found), "tune", "score", "such that it counts people", found, action)
        return found + std * float(key.generator("tuning/score").normal())

    def _chosen(self, index: Mapping[str, int]) -> Choice:
        return {name: self.space[name][k] for name, k in index.items()}

    def result(self, delta: float) -> Tuned | None:
        """The best try, when all are made."""
        if self.booking is not None:
            self.booking.confirm_whole()
        best = self.state["best"]
        if best is None:
            return None
        seeded = self.seed is not None or best["about"].get("seeded")
        about = {"resumed": self.state["resumed"], **best["about"], "seeded": seeded, "booked": Booked.of(self.booking)}
        return Tuned(
            choice=self._chosen(best["index"]), state=best["state"], score=best["score"], delta=delta,
            epsilon=self.selection.epsilon(self.plan, delta), statement=self.selection.statement(self.plan, delta),
            plan=Plan.from_dict(best["plan"]), selection=self.selection, about=about,
        )  # fmt: skip

    def close(self) -> None:
        """Give back folder, and run in the ledger; what is reserved stays charged."""
        if self.booking is not None:
            self.booking.close()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _require_as_planned(ran: Plan, plan: Plan) -> None:
    """Tries that cost something else than was counted, or protect something else, are refused."""
    for name in ("sampling", "noise_multiplier", "steps", "records"):
        ours, theirs = getattr(plan, name), getattr(ran, name)
        require(ours == theirs, "tune", "train", f"such that its run has the {name} of the plan, {ours}", theirs,
                "Only scaling and momentum may differ: dataclasses.replace(plan, scaling=...).")  # fmt: skip
