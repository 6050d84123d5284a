"""The forward and backward of a step, taken as one of the runs that a check compares: the check then costs one less."""

import time
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.combine import Evaluated, backward
from dpscale.engine.errors import PassedBy
from dpscale.engine.tape.tape import Shared, Sites
from dpscale.engine.verify.credit import TapedRun, insides, misplaced
from dpscale.engine.verify.probe import DroppingTape
from dpscale.engine.verify.randomness import random_states, set_random_states
from dpscale.engine.verify.rows import copied
from dpscale.engine.verify.state import Surroundings


class OwnRun:
    """The run of a step on its batch, at the random numbers that it would draw anyway.

    It is kept if it leaves nothing behind: one that does must come last, after all that is put back.

    Args:
        subject: the model and its losses.
        batch: of the step.
        mask: (B,): the samples that count.

    Attributes:
        evaluated: the forward and backward, if they may be used.
        seconds: what those took.
    """

    def __init__(self, subject: Any, batch: Any, mask: Tensor) -> None:
        self._subject, self._batch, self._mask = subject, batch, mask
        self.before = random_states()
        self.evaluated: Evaluated | None = None
        self.seconds = 0.0

    def __call__(
        self, sites: Sites, surroundings: Surroundings, seed: int, shared: list[Shared] | None = None
    ) -> TapedRun | None:
        """Run it; None if something is met that no look has seen.

        Args:
            sites: where the samples are in the operations.
            surroundings: what it must leave as it was.
            seed: for the weights of the losses.
            shared: as of `Tape`.
        """
        begin, parameters = time.perf_counter(), self._subject.parameters
        tape = DroppingTape(parameters, None, sites, len(self._mask), lenient=True, shared=shared)
        with torch.enable_grad(), tape:
            losses = self._subject.run(copied(self._batch))
        places = insides(tape) if not tape.lost and losses.requires_grad else []
        try:
            grads = backward([tape], parameters, losses, self._mask.to(losses.dtype), retain=True) if places else []
        except PassedBy:
            grads = []
        if not grads:
            self.drop()
            surroundings.restore()
            return None
        self.seconds = time.perf_counter() - begin
        drawn = random_states()
        astray = misplaced(losses, places, seed, grads[0], self._mask, keep=False)
        set_random_states(drawn)
        losses = losses.detach()
        if surroundings.touched():
            self.drop()
        else:
            self.evaluated = [tape], grads, losses
        return TapedRun(tape, losses, grads[0], astray is not None, surroundings.left_behind(), shared or [])

    def drop(self) -> None:
        """It will not be used: another comes in its place."""
        set_random_states(self.before)
        self.evaluated, self.seconds = None, 0.0
