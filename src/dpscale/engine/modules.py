"""A model's trainable parameters, classes and modes, at every step and at little cost.

To walk through a model by `named_parameters` takes longer than to start all of a small step's work on a GPU, and a step
needs to know several times that nothing was frozen, replaced or switched since. So what was found is kept together with
what it depends on, and only that is looked over again.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import keystr, tree_flatten_with_path

from dpscale.engine.functions import PLAIN, kind


@dataclass(frozen=True, eq=False)
class Structure:
    """What `trainable` and `signature` say of a model.

    Attributes:
        trainable: parameters to train, by name; a tied parameter appears once.
        kinds: the class of every module, in the order of ``modules()``.
        training: the mode of every module, in the same order.
        constants: buffers, and parameters that are not trained.
        attributes: what else the modules hold that a forward may read or ask: numbers, flags and words.
        state: what these depend on. A parameter stands there by its place in memory, which no other can take while
            ``trainable`` or ``constants`` holds it; a buffer likewise.
    """

    trainable: dict[str, Tensor]
    kinds: tuple[type[nn.Module], ...]
    training: tuple[bool, ...]
    constants: tuple[Tensor, ...]
    attributes: "Attributes"
    state: list[Any]


_known: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure(model: nn.Module) -> Structure:
    """Of the model as it is now."""
    state = _state(model)
    known = _known.get(model)
    if known is None or known.state != state:
        parameters: dict[str, Tensor] = {n: p for n, p in model.named_parameters() if p.requires_grad}
        kinds, training = zip(*((type(m), m.training) for m in model.modules()), strict=True)
        frozen = [p for p in model.parameters() if not p.requires_grad]
        constants = (*model.buffers(), *frozen)
        known = _known[model] = Structure(parameters, kinds, training, constants, Attributes(model), state)
    return known


class Attributes:
    """Numbers, flags and words in the attributes of a model's modules, also in tuples and lists; those that were there
    when it was looked at."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [
            (vars(module), name)
            for module in model.modules()
            for name, value in vars(module).items()
            if _told(value) is not type(value) and name not in ("training", "_is_full_backward_hook")
        ]
        self.values = self.now()
        self._kinds = tuple(map(kind, self.values))

    def now(self) -> tuple[Any, ...]:
        """Their values. Of what has become something else, its type: tensors are not compared."""
        found = [attributes.get(name) for attributes, name in self._places]
        return tuple([value if isinstance(value, PLAIN) else _told(value) for value in found])

    def kinds(self) -> tuple[Any, ...]:
        """What a branch is most likely to ask of them; ``values`` are those that were seen then."""
        values = self.now()
        if values != self.values:
            self.values, self._kinds = values, tuple(map(kind, values))
        return self._kinds


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
        state += (type(module), module.training, len(vars(module)))
        for name, p in module._parameters.items():
            state += (name, id(p), p is not None and p.requires_grad)
        for name, buffer in module._buffers.items():
            state += (name, id(buffer))
        state += module._modules.keys()  # a scripted module's are no dictionary
        waiting += module._modules.values()
    return state


def _told(value: Any) -> Any:
    """A value that can be compared: what is none is its type."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (tuple, list)):
        return tuple(map(_told, value)) if all(_told(each) is not type(each) for each in value) else type(value)
    return value if isinstance(value, (*PLAIN, torch.dtype, Enum)) else type(value)


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Whatever tensors a traced forward leaves in a model are taken out again, and told by an error.

    They stand for values that are not there, and a compiled step would not leave any: a counter would stand still.
    """
    before = [(m, {name: (value, _content(value)) for name, value in vars(m).items()}) for m in model.modules()]
    left: list[str] = []
    try:
        yield
    finally:
        for module, attributes in before:
            for name, value in list(vars(module).items()):
                fakes = [path for path, leaf in tree_flatten_with_path(value)[0] if isinstance(leaf, FakeTensor)]
                if not fakes:
                    continue
                left.append(f"{name}{keystr(fakes[0])}")
                if name not in attributes:
                    del vars(module)[name]
                    continue
                vars(module)[name], content = attributes[name]
                if isinstance(content, list):
                    vars(module)[name][:] = content
                elif isinstance(content, dict):
                    vars(module)[name].clear()
                    vars(module)[name].update(content)
    if left:
        raise RuntimeError(f"the forward puts a tensor into the model itself, as {left[0]}")


def _content(value: Any) -> list[Any] | dict[Any, Any] | None:
    return copy.copy(value) if isinstance(value, (list, dict)) else None
