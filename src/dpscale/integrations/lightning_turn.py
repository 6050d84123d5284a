"""A training step of Lightning and its backward, whole or by micro-batches."""

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from dpscale.batches import Batch
from dpscale.engine.arguments import device_of
from dpscale.integrations.lightning_parts import Unseen, per_sample, say_dropped
from dpscale.packing import packed
from dpscale.training import Private

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


class Turn:
    """A training step and its backward, of one draw after another.

    Args:
        private: gives the run.
        step: the losses of a batch, or whatever a manual step returns.
        in_parts: whether a draw goes by micro-batches. Its losses are then computed when their backward is due, so that
            what the trainer is given in their place are zeros.
    """

    def __init__(self, private: Callable[[], Private], step: Callable[..., Any], in_parts: bool) -> None:
        self._private, self._step, self._in_parts = private, step, in_parts
        self._batch: Batch | None = None
        self._rest: tuple[Any, ...] = ()
        self._stepping = False

    def take(self, trainer: "Trainer", module: "LightningModule") -> None:
        """Take the place of the module's own. Plain functions: a look at it must not walk through all that is here."""
        logged = module.log
        vars(module).update(
            training_step=wraps(module.training_step)(lambda *args: self.losses(*args)),
            backward=lambda losses, *args, **kwargs: self.backward(losses),
            log=lambda *args, **kwargs: (say_dropped if self._stepping else logged)(*args, **kwargs),
            _trainer=Unseen(trainer),
        )

    def losses(self, batch: Any, *rest: Any) -> Any:
        """What the step returns for a batch."""
        self._batch, self._rest = batch if isinstance(batch, Batch) else None, rest
        if self._in_parts and self._batch is not None:
            return torch.zeros(self._batch.draw.rows, device=device_of(self._batch.data))
        return self._logging_nothing(self._step, batch if self._batch is None else packed(self._batch.data), *rest)

    def backward(self, losses: Any) -> None:
        """The private gradient of the draw."""
        if self._in_parts and self._batch is not None:
            rest = self._rest
            self._logging_nothing(self._private().forward_backward, self._batch, lambda step, data: step(data, *rest))
        else:
            self._private().backward(per_sample(losses), self._batch)

    def _logging_nothing(self, call: Callable[..., Any], *args: Any) -> Any:
        self._stepping = True
        try:
            return call(*args)
        finally:
            self._stepping = False
