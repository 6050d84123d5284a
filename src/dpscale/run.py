"""RunState: what a private run has done so far, and which of its draws are outstanding."""

import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from weakref import WeakSet

from dpscale.momentum import MomentumState
from dpscale.sampling import Draw, Indices


@dataclass(eq=False)
class RunState:
    """Everything that changes while a run goes on, apart from model and optimizer.

    Draws are numbered from 1. A draw is handed out, then released once or dropped. Any number may be outstanding.

    Attributes:
        steps_taken: draws that were released.
        handed_out: number of the draw that was handed out last.
        last_released: the highest number that was released. A new loop goes on after it.
        outstanding: draws that were handed out and neither released nor dropped, by number.
        momentum: what the momentum remembers; None before the first step.
        stream: number of the random stream that draws come from. A resumed run must take a new one.
        loop: number of the loop over batches that goes on.
    """

    steps_taken: int = 0
    handed_out: int = 0
    last_released: int = 0
    outstanding: dict[int, Draw] = field(default_factory=dict)
    momentum: MomentumState | None = None
    stream: int = 0
    loop: int = 0
    lock: threading.RLock = field(default_factory=threading.RLock, repr=False)  # batches may be drawn by a thread
    _made: WeakSet[Draw] = field(default_factory=WeakSet, repr=False)  # to say what became of a draw, for errors
    _released: WeakSet[Draw] = field(default_factory=WeakSet, repr=False)

    def start_loop(self) -> int:
        """Begin a new loop after the last draw that was released; what is outstanding is dropped."""
        self.loop += 1
        self.outstanding.clear()
        self.handed_out = self.last_released
        return self.loop

    def hand_out(self, indices: Indices) -> Draw:
        """The next draw, from now on outstanding."""
        self.handed_out += 1
        draw = Draw.of(self.handed_out, indices)
        self.outstanding[draw.number] = draw
        self._made.add(draw)
        return draw

    def release(self, draw: Draw) -> None:
        """Book a draw as a step."""
        del self.outstanding[draw.number]
        self._released.add(draw)
        self.steps_taken += 1
        self.last_released = max(self.last_released, draw.number)

    def charged(self, independent: bool, draw: Draw | None = None) -> int:
        """Steps to account for, if ``draw`` is released too. Where draws are not independent (a shuffled epoch), those
        that were left out count as well."""
        if independent:
            return self.steps_taken + (draw is not None)
        return self.last_released if draw is None else max(self.last_released, draw.number)

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
        fitting = [draw for draw in self.outstanding.values() if rows in (None, len(draw.mask))]
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
        sizes = ", ".join(f"draw {d.number} has {len(d.mask)}" for d in self.outstanding.values())
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
