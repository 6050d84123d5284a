"""Whether it pays to compile a step on the CPU: decided in the course of a run, from the time that its steps take.

Compiling takes a good part of a minute, and saves between a fifth and half of an eager step. So the first steps run
eagerly and are timed; if what is left of the run is long enough, the rest is compiled. If compiled steps turn out to be
no faster, the run goes back.
"""

import logging

log = logging.getLogger("dpscale")

TIMED = 5
"""Steps to time: the fastest of them counts, as others may have been disturbed, or checked the model."""

COLD, SAVING = 30.0, 0.3
"""Seconds that compiling takes, more or less, and the part of an eager step that it saves."""


class Worth:
    """Watches the steps of one run.

    Args:
        steps: how many sums the run will ask for.
    """

    def __init__(self, steps: int) -> None:
        self.compile = False
        self._left, self._settled = steps, False
        self._eager: list[float] = []
        self._compiled: list[float] = []

    def took(self, seconds: float) -> None:
        """A sum was made, eagerly or compiled as ``compile`` says."""
        self._left -= 1
        if self._settled:
            return
        times = self._compiled if self.compile else self._eager
        times.append(seconds)
        if len(times) == (TIMED + 1 if self.compile else 2 * TIMED):  # of compiled ones the first compiles
            self._settled = self.compile
            self._decide()

    def _decide(self) -> None:
        eager = min(self._eager)
        if not self.compile:
            rest = eager * self._left
            self.compile = SAVING * rest > COLD
            self._settled = not self.compile
            if self.compile:
                log.info("dpscale: %.0f s of steps are left, so they are compiled; compile=False prevents it", rest)
        elif (compiled := min(self._compiled[1:])) > eager:
            self.compile = False
            told = "dpscale: runs eagerly again: a compiled step takes %.3g s, and an eager one %.3g s"
            log.info(told, compiled, eager)
