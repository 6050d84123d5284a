"""A model's trainable parameters, classes and modes, at every step and at little cost.

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
        kinds: the class of every module, in the order of ``modules()``.
        training: the mode of every module, in the same order.
        state: what these depend on. A parameter stands there by its place in memory, which no other can take while
            ``trainable`` holds it.
    """

    trainable: dict[str, Tensor]
    kinds: tuple[type[nn.Module], ...]
    training: tuple[bool, ...]
    state: list[Any]


_known: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure(model: nn.Module) -> Structure:
    """Of the model as it is now."""
    state = _state(model)
    known = _known.get(model)
    if known is None or known.state != state:
        parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        kinds, training = zip(*((type(m), m.training) for m in model.modules()), strict=True)
        known = _known[model] = Structure(parameters, kinds, training, state)
    return known


def _state(model: nn.Module) -> list[Any]:
    """All names, classes, modes and parameters below a model, as they come."""
    state: list[Any] = []
    seen: dict[int, int] = {}
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is None or id(module) in seen:
            state.append(None if module is None else (seen[id(module)],))
            continue
        seen[id(module)] = len(seen)
        state += (type(module), module.training)
        for name, p in module._parameters.items():
            state += (name, id(p), p is not None and p.requires_grad)
        state += module._modules.keys()  # a scripted module's are no dictionary
        waiting += module._modules.values()
    return state
