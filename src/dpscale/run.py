"""RunState: what a private run has done so far, which draws are outstanding, and what a checkpoint holds of it."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpscale.booking import Booking
from dpscale.engine import ScaledSum
from dpscale.momentum import MomentumState
from dpscale.noise import AnyNoise
from dpscale.plan import Plan, differences
from dpscale.sampling import Draw, Indices

VERSION = 2
"""Of the states that `RunState.saved` gives."""


class Released(threading.local):
    """How many draws a thread has released, of all runs."""

    number = 0


released = Released()


@dataclass(eq=False)
class RunState:
    """Everything that changes while a run goes on, apart from model and optimizer.

    Draws are numbered from 1. A draw is handed out, then released once or dropped. Any number may be outstanding.

    Attributes:
        plan: what the run is under. That its samples are people it may learn from the data, before the first release.
        noise: where draws and noise come from; another one after each resumption.
        steps_taken: draws that were released.
        handed_out: number of the draw that was handed out last.
        last_released: the highest number that was released. A new loop goes on after it.
        outstanding: draws that were handed out and neither released nor dropped, by number.
        parts: of outstanding draws that come in parts, by number: which samples were summed, and their sum.
        momentum: what the momentum remembers; None before the first step.
        sources: of the noise of all steps that were released.
        loop: number of the loop over batches that goes on.
        resumed: how often the run was resumed from a checkpoint.
        lost: steps that a ledger has charged to this run beyond those of the checkpoint that it goes on from.
        released_here: draws that were released since the run was made or resumed.
        order: of the shuffled epoch that was under way when the run was resumed, and the number of that epoch.
        held: what a checkpoint holds of the momentum, until the first step after it.
        booking: the run's part in a ledger, on the rank that books.
        name: of the run in that ledger.
        dataset: whose samples have a place that must stay.
        ahead: what fetches the next batch ahead of time, where that is a matter of a moment.
    """

    plan: Plan
    noise: AnyNoise = field(repr=False)
    steps_taken: int = 0
    handed_out: int = 0
    last_released: int = 0
    outstanding: dict[int, Draw] = field(default_factory=dict)
    parts: dict[int, tuple[list[slice], ScaledSum]] = field(default_factory=dict)
    momentum: MomentumState | None = None
    sources: frozenset[str] = frozenset()
    loop: int = 0
    resumed: int = 0
    lost: int = 0
    released_here: int = 0
    order: tuple[int, Indices] | None = None
    held: Mapping[str, Any] | None = None
    booking: Booking | None = None
    name: str | None = None
    dataset: Any = None
    ahead: Callable[[], None] | None = field(default=None, repr=False)
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # batches may be drawn by a thread
    turn: threading.RLock = field(default_factory=threading.RLock, repr=False)  # one step at a time, or one save
    _made: WeakSet[Draw] = field(default_factory=WeakSet, repr=False)  # to say what became of a draw, for errors
    _released: WeakSet[Draw] = field(default_factory=WeakSet, repr=False)

    @property
    def steps(self) -> int:
        """How many draws may be released in all."""
        assert self.plan.steps is not None
        return self.plan.steps

    @property
    def per_sample(self) -> bool:
        """Whether the momentum has a memory of every sample."""
        return self.plan.momentum is not None and self.plan.momentum.per_sample

    def start_loop(self) -> int:
        """Begin a new loop after the last draw that was released; what is outstanding is dropped."""
        self.loop += 1
        self.drop()
        self.handed_out = self.last_released
        return self.loop

    def drop(self) -> None:
        """What is outstanding will not come back, nor what was summed of it."""
        self.outstanding.clear()
        self.parts.clear()

    def missing(self, draw: Draw, part: slice | None) -> int:
        """How many samples of a draw are left to sum after this part; refuses what was summed already."""
        known = self.parts[draw.number][0] if draw.number in self.parts else []
        if known and part is None:
            raise RuntimeError(
                f"Parts of draw {draw.number} were summed already. Go on with its other parts, from the same "
                "private.parts(batch, size), or begin a new loop."
            )
        if part is None:
            return 0
        if any(part.start < other.stop and other.start < part.stop for other in known):
            raise RuntimeError(
                f"Samples {part.start} to {part.stop - 1} of draw {draw.number} were summed already: each sample adds "
                "to a release once. Use each part of private.parts(batch, size) once."
            )
        summed: int = sum(each.stop - each.start for each in (part, *known))
        return len(draw.mask) - summed

    def hand_out(self, indices: Indices, shares: NDArray[np.float32] | None = None) -> Draw:
        """The next draw, from now on outstanding."""
        self.handed_out += 1
        draw = Draw.of(self.handed_out, indices, shares)
        self.outstanding[draw.number] = draw
        self._made.add(draw)
        return draw

    def release(self, draw: Draw) -> int:
        """Count a draw as a step; its number."""
        del self.outstanding[draw.number]
        self.parts.pop(draw.number, None)
        self._released.add(draw)
        self.sources |= {self.noise.source}
        self.steps_taken += 1
        self.released_here += 1
        released.number += 1
        self.last_released = max(self.last_released, draw.number)
        return self.steps_taken

    def charged(self, draw: Draw | None = None) -> int:
        """Steps to account for, if ``draw`` is released too, lost ones included."""
        return self.lost + self.position(draw)

    def position(self, draw: Draw | None = None) -> int:
        """The step that the run is at, after ``draw`` if that is released too. Where draws are not independent (a
        shuffled epoch), those that were left out count as well."""
        if self.plan.sampling.independent:
            return self.steps_taken + (draw is not None)
        return self.last_released if draw is None else max(self.last_released, draw.number)

    def order_of(self, step: int) -> Indices | None:
        """Of the shuffled epoch that ``step`` lies in, if it has begun before."""
        sampling = self.plan.sampling
        if self.order is not None and step // sampling.steps(1) == self.order[0]:
            return self.order[1]
        return sampling.order(self.noise.sampling(), step)

    def saved(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """What a run on these parameters needs to go on: plain values and tensors, which are not copied. No key of any
        random stream."""
        momentum = self.held if self.momentum is None else self.momentum.saved()
        order = self.order_of(self.last_released)
        return {
            "version": VERSION, "plan": self.plan.to_dict(), "parameters": _described(parameters),
            "steps_taken": self.steps_taken, "last_released": self.last_released, "lost": self.lost,
            "resumed": self.resumed, "order": None if order is None else torch.from_numpy(order),
            "momentum": momentum, "noise": sorted(self.sources), "run": self.name,
        }  # fmt: skip

    def restore(self, saved: Mapping[str, Any], plan: Plan, noise: AnyNoise) -> None:
        """Go on from a state that `refusals` has nothing against, under its plan and with fresh noise. Draws that are
        outstanding are dropped."""
        self.plan, self.noise = plan, noise  # first: whatever interrupts this, no noise comes again
        position, lost = saved["steps_taken" if plan.sampling.independent else "last_released"], saved["lost"]
        self.lost = lost if self.booking is None else self.booking.resume(position, lost)
        self.steps_taken, self.last_released = saved["steps_taken"], saved["last_released"]
        self.resumed, self.released_here = saved["resumed"] + 1, 0
        self.momentum, self.held, self.sources = None, saved["momentum"], frozenset(saved["noise"])
        order, epoch = saved["order"], self.last_released // plan.sampling.steps(1)
        self.order = None if order is None else (epoch, order.cpu().numpy().copy())
        self.start_loop()

    def check_outstanding(self, draw: Draw) -> Draw:
        """Refuse a draw that was released or dropped, or that this run did not make."""
        if self.outstanding.get(draw.number) is draw:
            return draw
        if draw in self._released:
            raise RuntimeError(
                f"This batch is draw {draw.number}, which was released already. {self._summary()} Use each batch of "
                "private.batches(dataset) once."
            )
        if draw in self._made:
            raise RuntimeError(
                f"This batch is draw {draw.number} of a loop that was left, so it was dropped. {self._summary()} "
                "Use batches of the loop that goes on."
            )
        raise RuntimeError(
            f"This batch is draw {draw.number} of another run. {self._summary()} Use batches of this run's own "
            "private.batches(dataset)."
        )

    def only_outstanding(self, rows: int | None = None) -> Draw:
        """The one outstanding draw, or the one of so many rows; refuses to choose among several."""
        fitting = [draw for draw in self.outstanding.values() if rows in (None, draw.rows)]
        if len(fitting) == 1:
            return fitting[0]
        if not self.outstanding:
            raise RuntimeError(
                "No draw is outstanding: step() and backward() take each batch that private.batches(dataset) yields, "
                "once. A batch of your own making would not be sampled as the accountant assumes."
            )
        if rows is None:
            raise RuntimeError(f"{self._summary()} Pass batch= so that the right one is released.")
        if fitting:
            raise RuntimeError(
                f"This batch was rebuilt, and {_names(draw.number for draw in fitting)} are outstanding with {rows} "
                "rows each. Pass on the batch as drawn, or change it with batch.map(...), so that the right one is "
                "released."
            )
        sizes = ", ".join(f"draw {d.number} has {d.rows}" for d in self.outstanding.values())
        raise ValueError(
            f"The 'batch' parameter of step must be of as many rows as its draw. Got {rows} instead; {sizes}. Pass on "
            "every row."
        )

    def _summary(self) -> str:
        """Which draws are outstanding, in a sentence."""
        if not self.outstanding:
            return "No draw is outstanding."
        return f"{_names(self.outstanding)} {'is' if len(self.outstanding) == 1 else 'are'} outstanding.".capitalize()


def _names(numbers: Iterable[int]) -> str:
    """draw 3; draws 3 and 4; draws 3, 4 and 5."""
    *most, last = map(str, numbers)
    if len(most) > 8:
        most = [*most[:3], "…"]
    return f"draws {', '.join(most)} and {last}" if most else f"draw {last}"


_COUNTS = ("steps_taken", "last_released", "lost", "resumed")


def refusals(saved: Mapping[str, Any], plan: Plan, parameters: Mapping[str, Tensor], run: str | None) -> Iterator[str]:
    """What is against going on from a saved state under this plan, on these parameters, booked as ``run``."""
    if not isinstance(saved, Mapping) or "version" not in saved:
        yield "it is no state of a private run"
        return
    if type(saved["version"]) is not int or saved["version"] != VERSION:
        yield f"its format has version {saved['version']!r}, and this release reads version {VERSION}"
        return
    names = {"version", "plan", "parameters", *_COUNTS, "order", "momentum", "noise", "run"}
    if set(saved) != names or (wrong := _wrong_entry(saved, plan)):
        yield f"its entries are not those of a private run ({', '.join(sorted(set(saved) ^ names)) or wrong})"
        return
    if saved["run"] not in (None, run):
        name = saved["run"]
        yield f"it is booked in a ledger as run {name!r}: pass that ledger, and run={name!r}, to privatize()"
    other = [*differences(saved["plan"], plan.to_dict())]
    if other:
        yield f"its plan is another: {'; '.join(other)}. Plan.from_dict(state['plan']) is the one that it has"
    before, now = saved["parameters"], _described(parameters)
    changed = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    if changed:
        words = [f"{n} was {_words(before.get(n))} and is {_words(now.get(n))}" for n in changed[:3]]
        more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
        yield f"its model is another: {'; '.join(words)}{more}"
    if not other and not changed:
        yield from _damaged(saved, plan, parameters)


def _wrong_entry(saved: Mapping[str, Any], plan: Plan) -> str | None:
    """Which entry of a state is none that a run gives, if one is."""
    if any(type(saved[n]) is not int or saved[n] < 0 for n in _COUNTS):
        return "counts"
    position = saved["steps_taken" if plan.sampling.independent else "last_released"]
    if saved["steps_taken"] > saved["last_released"] or position > (plan.steps or 0):
        return "more steps than draws, or than planned"
    described = saved["parameters"]
    kinds = {"plan": Mapping, "parameters": Mapping, "order": Tensor | None, "momentum": Mapping | None,
             "noise": list | tuple}  # fmt: skip
    wrong = [n for n, kind in kinds.items() if not isinstance(saved[n], kind)]
    if not wrong and not all(isinstance(each, list | tuple) and len(each) == 2 for each in described.values()):
        wrong = ["parameters"]
    noise = saved["noise"]
    if not wrong and ([n for n in noise if n not in ("fast", "secure")] or bool(noise) != (saved["steps_taken"] > 0)):
        wrong = ["noise"]
    return wrong[0] if wrong else None


def _damaged(saved: Mapping[str, Any], plan: Plan, parameters: Mapping[str, Tensor]) -> Iterator[str]:
    """Whether the tensors of a state are those that its plan and its model need."""
    steps, order, momentum = saved["steps_taken"], saved["order"], saved["momentum"]
    underway = not plan.sampling.independent and saved["last_released"] % plan.sampling.steps(1)
    if bool(underway) != (order is not None) or (
        underway and (order.dtype != torch.int64 or sorted(order.tolist()) != list(range(plan.sampling.size)))
    ):
        yield "the order of its shuffled epoch is missing or damaged"
    fresh = MomentumState(parameters) if plan.momentum is None else plan.momentum.start(parameters)
    if (momentum is None) != (steps == 0) or (momentum is not None and not fresh.fits(momentum, plan.sampling.size)):
        yield "what its momentum remembers is missing or damaged"


def _described(parameters: Mapping[str, Tensor]) -> dict[str, list[Any]]:
    return {n: [list(p.shape), str(p.dtype).removeprefix("torch.")] for n, p in parameters.items()}


def _words(described: list[Any] | None) -> str:
    return "absent" if described is None else f"{described[1]} {described[0]}"
