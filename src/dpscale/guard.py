"""What the optimizer of a private run applies must be private."""

import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle


class Run(Protocol):
    """A private run, as far as its guard knows it."""

    @property
    def waiting(self) -> bool:
        """Whether a drawn batch waits to be used."""


class Guard:
    """Refuses steps of an optimizer that would apply anything but what the private runs on it have released.

    Runs on one optimizer share their guard. It stands as long as one of them lives.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._runs: weakref.WeakSet[Run] = weakref.WeakSet()
        self._plain: set[int] = set()  # parameters to whose gradients a plain backward() has added, by id
        self._released = False  # since the last step
        self._watched: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._order: Any = optimizer._optimizer_step_pre_hooks
        self._last = optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    @staticmethod
    def of(optimizer: Optimizer, run: Run) -> "Guard":
        """The guard of an optimizer, with one more run."""
        guard = _guards.get(optimizer)
        if guard is None:
            guard = _guards[optimizer] = Guard(optimizer)
        guard._runs.add(run)
        return guard

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on, for gradients from elsewhere."""
        this = weakref.ref(self)

        def added(p: Tensor) -> None:
            if (guard := this()) is not None:
                guard._plain.add(id(p))

        for hook in self._hooks:
            hook.remove()
        parameters = list(parameters)
        self._hooks = [p.register_post_accumulate_grad_hook(added) for p in parameters]
        self._watched = set(map(id, parameters))

    def released(self, parameters: Iterable[Tensor]) -> None:
        """These have a private gradient now, in place of any other."""
        self._plain.difference_update(map(id, parameters))
        self._released = True
        self._order.move_to_end(self._last.id)  # whatever hooks were registered since come before the look at gradients

    @property
    def unapplied(self) -> bool:
        """Whether something was released that no step has applied yet."""
        return self._released

    def check(self, parameters: Iterable[Tensor]) -> None:
        """No gradient of these may come from a plain backward()."""
        if self._plain and any(p.grad is not None and id(p) in self._plain for p in parameters):
            raise RuntimeError(
                "A plain backward() has added to the gradients, which are now neither bounded nor noisy. No step was "
                "made. Call private.backward(losses) or private.step(batch, loss_fn) with every term in the losses; to "
                "train on public data, take an optimizer of its own. To go on, call optimizer.zero_grad()."
            )

    def _before(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._runs:
            return
        if kwargs.get("closure") is not None or any(callable(given) for given in args[1:]):
            raise RuntimeError(
                "optimizer.step() was given a closure, which may change the gradients after they were looked at. Call "
                "private.backward(losses), and then optimizer.step() without one."
            )
        steered = [p for group in optimizer.param_groups for p in group["params"]]
        self.check(steered)
        if any(p.grad is not None and p.requires_grad and id(p) not in self._watched for p in steered):
            raise RuntimeError(
                "The optimizer has come to hold a parameter that the model does not, with a gradient that is neither "
                "bounded nor noisy. No step was made. Put it into the model before privatize(), or give it an "
                "optimizer of its own."
            )
        if not self._released and any(run.waiting for run in self._runs):
            raise RuntimeError(
                "optimizer.step() was called while a drawn batch waits: nothing private was computed from it. Call "
                "private.backward(losses) first, in place of losses.mean().backward(), or private.step(batch, loss_fn)."
            )

    def _after(self, *_: Any) -> None:
        self._plain.clear()
        self._released = False


_guards: weakref.WeakKeyDictionary[Optimizer, Guard] = weakref.WeakKeyDictionary()
