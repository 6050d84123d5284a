"""A model's trainable parameters and modes, at every step and at little cost.

To walk through a model by `named_parameters` takes longer than to start all of a small step's work on a GPU, and a step
needs to know several times that nothing was frozen, replaced or switched since. So what was found is kept together with
what it depends on, and only that is looked over again.
"""

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn


@dataclass(frozen=True, eq=False)
class Structure:
    """What `trainable` and `signature` say of a model.

    Attributes:
        trainable: parameters to train, by name; a tied parameter appears once.
        training: the mode of every module, in the order of ``modules()``.
        state: what both depend on. A parameter stands there by its place in memory, which no other can take while
            ``trainable`` holds it.
    """

    trainable: dict[str, Tensor]
    training: tuple[bool, ...]
    state: list[Any]


_known: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure(model: nn.Module) -> Structure:
    """Of the model as it is now."""
    state = _state(model)
    known = _known.get(model)
    if known is None or known.state != state:
        parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        known = _known[model] = Structure(parameters, tuple(m.training for m in model.modules()), state)
    return known


def _state(model: nn.Module) -> list[Any]:
    """All names, modes and parameters below a model, as they come."""
    state: list[Any] = []
    seen: set[int] = set()
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            state.append(None if module is None else len(seen))
            continue
        seen.add(id(module))
        state.append(module.training)
        for name, p in module._parameters.items():
            state += (name, id(p), p is not None and p.requires_grad)
        state += module._modules
        waiting += module._modules.values()
    return state
