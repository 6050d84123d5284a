"""What an optimizer applies to the parameters of a private run must be private.

One pair of torch's global hooks looks at every optimizer that steps. So it does not matter how an optimizer is wrapped,
or whether it steps through another one inside.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from dpscale.engine.compat import step_hooks

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Run(Protocol):
    """A private run, as far as its guard knows it."""

    @property
    def waiting(self) -> bool:
        """Whether a draw is outstanding."""


def wrapped(optimizer: Any) -> Iterator[Any]:
    """An optimizer, and those inside it: Accelerate's wrapper has one, SAM another."""
    seen: list[Any] = []
    while optimizer is not None and not any(optimizer is one for one in seen):
        seen.append(optimizer)
        yield optimizer
        inner = (getattr(optimizer, name, None) for name in ("optimizer", "base_optimizer"))
        optimizer = next((found for found in inner if hasattr(found, "param_groups")), None)


class Guard:
    """Refuses steps that would apply anything but what private runs released to the parameters of a run.

    It lives as long as its run. All guards hear of every release, so several runs on one model do not disturb each
    other.

    Args:
        optimizer: of the run, or a wrapper of it.
        run: it.
        stepped: called after every step of an optimizer over its parameters, but for those on public data.
    """

    def __init__(self, optimizer: Any, run: Run, stepped: Callable[[], None] = lambda: None) -> None:
        self._stepped = stepped
        self._own = [weakref.ref(one) for one in wrapped(optimizer)]
        self._run = weakref.ref(run)
        self._plain: set[int] = set()  # parameters to whose gradients a plain backward() has added, by id
        self._watched: set[int] = set()
        self._releases = 0
        self.unapplied = False  # whether something was released that no step has applied yet
        self._public = False
        self._hooks: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._hooks)
        _guards.add(self)

    def watch(self, parameters: Iterable[Tensor]) -> None:
        """From now on, for gradients from elsewhere."""
        this = weakref.ref(self)

        def added(p: Tensor) -> None:
            if (guard := this()) is not None:
                guard._plain.add(id(p))

        _remove(self._hooks)
        parameters = list(parameters)
        self._hooks += [p.register_post_accumulate_grad_hook(added) for p in parameters]
        self._watched = set(map(id, parameters))

    @staticmethod
    def released(parameters: Sequence[Tensor]) -> None:
        """These have a private gradient now, in place of any other."""
        for guard in _guarding(parameters):
            guard._plain.difference_update(map(id, parameters))
            guard._releases += 1
            guard.unapplied = True

    @contextmanager
    def public(self) -> Iterator[None]:
        """Let optimizers apply plain gradients meanwhile."""
        before, self._public = self._public, True
        try:
            yield
        finally:
            self._public = before

    def check(self, parameters: Iterable[Tensor]) -> None:
        """No gradient of these may come from a plain backward()."""
        if self._plain and any(p.grad is not None and id(p) in self._plain for p in parameters):
            raise RuntimeError(
                "A plain backward() has added to the gradients, which are now neither bounded nor noisy. No step was "
                "made. Call private.backward(losses) or private.step(batch, loss_fn) with every term in the losses. An "
                "optimizer that needs a second backward() for each step, such as SAM, cannot be used. To train on "
                "public data in between, step inside `with private.public_data():`. To go on, call "
                "optimizer.zero_grad()."
            )

    def check_step(self, optimizer: Optimizer, steered: list[Tensor]) -> None:
        """Refuse a step of this optimizer over these parameters."""
        self.check(steered)
        strangers = () if self._watched.issuperset(map(id, steered)) else steered
        if any(p.grad is not None and p.requires_grad and id(p) not in self._watched for p in strangers):
            raise RuntimeError(
                "The optimizer holds a parameter that the model does not, with a gradient that is neither bounded nor "
                "noisy. No step was made. Put it into the model before privatize(), or give it an optimizer of its own."
            )
        run, own = self._run(), any(one() is optimizer for one in self._own)
        if own and not self.unapplied and run is not None and run.waiting:
            raise RuntimeError(
                "optimizer.step() was called while a drawn batch is outstanding: nothing private was computed from it. "
                "Call private.backward(losses) first, in place of losses.mean().backward(), or private.step(batch, "
                "loss_fn). Of a batch in parts, every part comes first."
            )

    def applied(self, parameters: Sequence[Tensor]) -> None:
        """A step over these was made. Gradients that came after the last look at them were made in it."""
        if not self._public:
            inside = any(p.grad is not None and id(p) in self._plain for p in parameters)
            self._plain.difference_update(map(id, parameters))
            self.unapplied = False
            self._stepped()
            if inside:
                raise RuntimeError(
                    "The optimizer called backward() inside its own step(): what it has just applied is neither "
                    "bounded nor noisy, and the weights are no longer private. Restore them from before this step, and "
                    "take an optimizer that applies the gradients that it is given."
                )


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_last_looks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def _guarding(parameters: Sequence[Tensor]) -> list[Guard]:
    return [guard for guard in list(_guards) if not guard._watched.isdisjoint(map(id, parameters))]


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()


def _steered(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _before_any(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    """Before any step of any optimizer: where a run is concerned, have the last look, after all other hooks."""
    if not _guards or not _guarding(_steered(optimizer)):
        return
    if next(reversed(step_hooks(optimizer).values()), None) is _last_look:
        return
    if (hook := _last_looks.get(optimizer)) is not None:
        hook.remove()
    _last_looks[optimizer] = optimizer.register_step_pre_hook(_last_look)


def _last_look(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
    steered = _steered(optimizer)
    guards = [guard for guard in _guarding(steered) if not guard._public]
    if not guards:
        return None
    place, closure = _closure(args, kwargs)
    if closure is None:
        for guard in guards:
            guard.check_step(optimizer, steered)
        return None
    if not type(optimizer).__module__.startswith("torch.optim"):  # it may apply something before it calls the closure
        for guard in guards:
            guard.check(steered)
    looked_at = _looked_at(closure, optimizer, guards)
    if isinstance(place, str):
        return args, {**kwargs, place: looked_at}
    return (*args[:place], looked_at, *args[place + 1 :]), kwargs


def _after_any(optimizer: Optimizer, args: Args, kwargs: Kwargs) -> None:
    steered = _steered(optimizer)
    for guard in _guarding(steered):
        guard.applied(steered)


def _closure(args: Args, kwargs: Kwargs) -> tuple[int | str, Callable[[], Any] | None]:
    """Where a closure was given, and the closure."""
    if kwargs.get("closure") is not None:
        return "closure", kwargs["closure"]
    return next(((k, given) for k, given in enumerate(args) if k and callable(given)), (0, None))


def _looked_at(closure: Callable[[], Any], optimizer: Optimizer, guards: list[Guard]) -> Callable[[], Any]:
    """The closure, followed by a look at the gradients. Each call needs a release of its own.

    Torch's own optimizers call it before they change anything. Others may not: their weights are put back.
    """
    steered = _steered(optimizer)
    foreign = not type(optimizer).__module__.startswith("torch.optim")
    before = [p.detach().clone() for p in steered] if foreign else []
    seen: dict[int, int] = {}

    def looked_at() -> Any:
        result = closure()
        try:
            for guard in guards:
                guard.check_step(optimizer, steered)
                if seen.get(id(guard)) == guard._releases:
                    raise RuntimeError(
                        "The optimizer called its closure twice, and nothing was released in between. No step was "
                        "made. Take an optimizer that steps once per gradient."
                    )
                seen[id(guard)] = guard._releases
        except RuntimeError:
            with torch.no_grad():
                for p, value in zip(steered, before, strict=False):
                    p.copy_(value)
            raise
        return result

    return looked_at


register_optimizer_step_pre_hook(_before_any)
register_optimizer_step_post_hook(_after_any)
