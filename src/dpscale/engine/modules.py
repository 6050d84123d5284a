"""A model's trainable parameters, classes and modes, at every step and at little cost.

To walk through a model by `named_parameters` takes longer than to start all of a small step's work on a GPU, and a step
needs to know several times that nothing was frozen, replaced or switched since. So what was found is kept together with
what it depends on, and only that is looked over again.
"""

import copy
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from itertools import chain, count
from operator import attrgetter
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dpscale.engine.compat import FakeTensor, hooks, keystr, registered, tree_flatten_with_path, version

_NUMBERS = (int, float, complex)
PLAIN = (*_NUMBERS, str, bytes, type(None))
_SMALL = 8
_MOST = 64  # entries of a dictionary or set to look at
_DEEP = 6  # containers within containers
_SETTINGS = (*PLAIN, np.generic, Enum, dict)  # lists grow
_OWN = frozenset(vars(nn.Module()))  # attributes that every module has

COUNTERS: Any = WeakTensorKeyDictionary()
"""Buffers of one whole number or truth that a forward was seen to change by itself, of any model."""

CHANGED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Buffers that a forward was seen to change by itself, or to exchange for others, by their module."""

COUNTED: WeakKeyDictionary[nn.Module, set[str]] = WeakKeyDictionary()
"""Attributes, whole numbers, that a forward was seen to change by itself, by their module."""


class Counts:
    """What the forwards of a model change by themselves, as it was before the first one of a draw.

    How many forwards a draw takes may depend on its samples: in how many parts it goes, whether one is not finite.
    Each begins with the same counts, so the model counts draws. It keeps no module alive.

    Args:
        unseen: remember what no look has seen to change yet, too.
    """

    def __init__(self, model: nn.Module, *, unseen: bool = False) -> None:
        known = bool(unseen or CHANGED or COUNTED)
        self._buffers = [
            (weakref.ref(m), name, b, b.detach().clone()) for m in (model.modules() if known else ())
            for name, b in m.named_buffers(recurse=False) if unseen or name in CHANGED.get(m, ())
        ]  # fmt: skip
        self._attributes = [
            (weakref.ref(m), name, value) for m in (model.modules() if known else ())
            for name, value in vars(m).items() if type(value) is int and (unseen or name in COUNTED.get(m, ()))
        ]  # fmt: skip

    def restore(self) -> None:
        """Before a forward."""
        for held, name, b, value in self._buffers:
            if (module := held()) is not None and name in CHANGED.get(module, ()):
                b.data.copy_(value)
                setattr(module, name, b)
        for held, name, number in self._attributes:
            if (module := held()) is not None and name in COUNTED.get(module, ()):
                setattr(module, name, number)


class Held(tuple[Any, ...]):
    """What an object holds, as `holdings` tells it."""


class Hashed(tuple[Any, ...]):
    """A long tuple that every step looks up in a table: its hash is worked out once."""

    def __hash__(self) -> int:
        if (known := self.__dict__.get("known")) is None:
            known = self.__dict__["known"] = super().__hash__()
        return known


@dataclass(frozen=True, eq=False)
class Structure:
    """What `trainable` and `signature` say of a model.

    Attributes:
        trainable: parameters to train, by name; a tied parameter appears once.
        kinds: the class of every module, in the order of ``modules()``.
        training: the mode of every module, in the same order.
        constants: buffers, and parameters that are not trained.
        made: of what: the classes, the names of what is trained, and those of the constants.
        attributes: what else the modules hold that a forward may read or ask: numbers, flags and words.
        flags: what the buffers hold that a forward may ask.
        number: of this structure, among all that were ever found.
        state: what these depend on.
    """

    trainable: dict[str, Tensor]
    kinds: tuple[type[nn.Module], ...]
    training: Hashed
    constants: tuple[Tensor, ...]
    made: Hashed
    attributes: "Attributes"
    flags: "Flags"
    number: int
    state: "_State"

    def switches(self) -> tuple[Any, ...]:
        """When this changes, a forward may go another way."""
        return self.made, self.training, self.attributes.kinds(), self.flags.kinds()


_known: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()
_numbers = count()


def structure(model: nn.Module) -> Structure:
    """Of the model as it is now."""
    known = _known.get(model)
    if known is None or not known.state.holds():
        constants: dict[str, Tensor] = dict(model.named_buffers())
        parameters: dict[str, Tensor] = {}
        for name, p in model.named_parameters():
            (parameters if p.requires_grad else constants)[name] = p
        kinds, training = zip(*((type(m), m.training) for m in model.modules()), strict=True)
        made = Hashed((kinds, tuple(parameters), tuple(constants)))
        known = _known[model] = Structure(
            parameters, kinds, Hashed(training), tuple(constants.values()), made, Attributes(model), Flags(model),
            next(_numbers), _State(model),
        )  # fmt: skip
    return known


class Writes:
    """How often somebody wrote into the tensors of a model between its sums: a switch may be a tensor.

    Into the constants at any time; into the parameters between an optimizer's step and the next sum; and by anybody
    into a parameter that was all zeros: it may have hidden what comes before it.
    """

    def __init__(self) -> None:
        self.times = 0
        self._found: Structure | None = None  # at the last sum
        self._constants: list[int] = []  # versions then
        self._stepped: list[int] | None = None  # of the parameters after the optimizer's last step
        self._zeros: list[Tensor] = []

    def count(self, found: Structure) -> int:
        """Before a sum."""
        if self._found is not None and self._found.number == found.number:
            written = self._stepped is not None and self._stepped != self._trained(found)
            self.times += written or self._constants != self._held(found)
        self._stepped = None
        if self._zeros and any(bool(t.any()) for t in self._zeros):
            self.times, self._zeros = self.times + 1, []
        return self.times

    def note_zeros(self, parameters: Mapping[str, Tensor]) -> None:
        """At a check: which parameters hide something."""
        self._zeros = [p for p in parameters.values() if not bool(p.detach().any())]

    @contextmanager
    def own(self, found: Structure) -> Iterator[None]:
        """A sum: what its forward writes is its own."""
        try:
            yield
        finally:
            self.settle(found)

    def settle(self, found: Structure) -> None:
        """After a sum."""
        self._found, self._constants = found, self._held(found)

    def stepped(self) -> None:
        """After an optimizer's step: what it writes is its own."""
        self._stepped = None if self._found is None else self._trained(self._found)

    @staticmethod
    def _held(found: Structure) -> list[int]:
        return [version(t) for t in found.constants]

    @staticmethod
    def _trained(found: Structure) -> list[int]:
        return [version(t) for t in found.trainable.values()]


class Attributes:
    """Numbers, flags and words in the attributes of a model's modules, also in tuples, lists, dictionaries and sets;
    those that were there when it was looked at."""

    def __init__(self, model: nn.Module) -> None:
        held = ((module, name, value) for module in model.modules() for name, value in vars(module).items())
        places = [place for place in held if place[1] not in _OWN and _comparable(place[2]) is not type(place[2])]
        places.sort(key=lambda place: not _plain(place[2]))
        self._places = [(vars(module), name) for module, name, _ in places]
        self._modules = [weakref.ref(module) for module, *_ in places]
        found = [value for *_, value in places]
        self._copies = [copy.deepcopy(value) for value in found if _plain(value)]  # of the first of these places
        self._comparables = [_comparable(value) for value in found]
        self.values = self.now()
        self._kinds = Hashed(map(kind, self.values))
        self.settings = self.values  # without those that the forward counts by itself

    def now(self) -> tuple[Any, ...]:
        """Their values. Of what has become something else, its type: tensors are not compared."""
        found = [attributes.get(name) for attributes, name in self._places]
        plain, told = len(self._copies), dict[int, Any]()
        if not _equal(found[:plain], self._copies):  # all at once, for they hardly ever change
            for k, value in enumerate(found[:plain]):
                if not _equal(value, self._copies[k]):
                    self._comparables[k] = _comparable(value)
                    self._copies[k] = copy.deepcopy(value) if _plain(value) else object()
        for value in found[plain:]:  # one configuration is often held by every module
            if id(value) not in told:
                told[id(value)] = _comparable(value)
        self._comparables[plain:] = [told[id(value)] for value in found[plain:]]
        return tuple(self._comparables)

    def kinds(self) -> tuple[Any, ...]:
        """What a branch is most likely to ask of them; ``values`` are those that were seen then.

        Of one that the forward counts by itself, what it was at first: a look goes ahead of it.
        """
        values = self.now()
        if values != self.values:
            now = zip(self._modules, self._places, values, self._kinds, strict=True)
            self._kinds = Hashed([old if _counted(module(), name) else kind(v) for module, (_, name), v, old in now])
            self.values = values
            own = zip(self._modules, self._places, values, strict=True)
            self.settings = tuple([v for module, (_, name), v in own if not _counted(module(), name)])
        return self._kinds


def _counted(module: nn.Module | None, name: str) -> bool:
    return module is not None and name in COUNTED.get(module, ())


def is_integer_scalar(b: Tensor) -> bool:
    """Whether a buffer is one whole number or truth: a flag, or a counter."""
    return b.numel() == 1 and not (b.is_floating_point() or b.is_complex() or b.is_meta)


class Flags:
    """Whole numbers and truths that are buffers, each of one element: flags, and counters of steps."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [b for b in model.buffers() if is_integer_scalar(b)]
        self._marks: list[Any] = [None] * len(self._buffers)
        self._kinds: tuple[Any, ...] = (None,) * len(self._buffers)

    def kinds(self) -> tuple[Any, ...]:
        """What a branch is most likely to ask of them; of one that the forward counts by itself, what it was at first,
        for a look goes ahead of it."""
        for k, b in enumerate(self._buffers):
            mark = version(b) if b.is_cuda else b.item()  # to read from a GPU is to wait for it
            if mark != self._marks[k]:
                if self._marks[k] is None or b not in COUNTERS:
                    self._kinds = (*self._kinds[:k], kind(b.item()), *self._kinds[k + 1 :])
                self._marks[k] = mark
        return self._kinds


_training = attrgetter("training")


class _State:
    """All names, classes, modes, hooks, parameters, buffers and children below a model, as they were.

    Modules stand there by their place in memory, which no other can take while they live; so do parameters and buffers,
    which a `Structure` holds. A model is looked over at every step, so this hardly loops in Python.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules = [weakref.ref(m) for m in model.modules()]
        self._seen = self._now(list(model.modules()))

    @staticmethod
    def _now(modules: Sequence[nn.Module]) -> list[Any]:
        held = [*chain.from_iterable(map(registered, modules))]
        full = [*filter(None, held)]  # most are empty
        things = [each for some in full for each in some.values()]
        called = filter(None, chain.from_iterable(map(hooks, modules)))
        return [
            [*map(type, modules)],
            [*map(_training, modules)],
            [*map(len, map(vars, modules))],
            [number for each in called for number, hook in each.items() if not hasattr(hook, "ours")],
            [*map(len, held)],
            [name for some in full for name in some.keys()],  # noqa: SIM118 (a scripted one's is no dictionary)
            [*map(id, things)],
            [p is not None and p.requires_grad for some in filter(None, held[::3]) for p in some.values()],
        ]

    def holds(self) -> bool:
        """Whether all is as it was."""
        modules = [module for each in self._modules if (module := each()) is not None]
        return len(modules) == len(self._modules) and self._now(modules) == self._seen


def _comparable(value: Any, deep: int = _DEEP) -> Any:
    """A value that can be compared: what is none is its type. A dictionary is told whatever else is in it."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (*PLAIN, torch.dtype, Enum)):
        return value
    if deep and isinstance(value, (tuple, list)):
        told = tuple([_comparable(each, deep - 1) for each in value])
        return told if all(each is not type(own) for each, own in zip(told, value, strict=True)) else type(value)
    if deep and isinstance(value, dict) and len(value) <= _MOST:
        return tuple([(_comparable(name, deep - 1), _comparable(each, deep - 1)) for name, each in value.items()])
    if deep and isinstance(value, (set, frozenset)) and len(value) <= _MOST:
        return frozenset([_comparable(each, deep - 1) for each in value])
    if deep == _DEEP and isinstance(held := holdings(value), Held):
        return held
    return type(value)


def holdings(value: Any) -> Any:
    """The kinds of the numbers, flags and words in the attributes of an object or a class, as in a configuration; of
    what has none, its type."""
    if isinstance(value, (nn.Module, Tensor, ModuleType, FunctionType)):
        return type(value)
    held = {name: getattr(value, name, None) for name in getattr(type(value), "__slots__", ())}
    held |= getattr(value, "__dict__", {})
    own = [(name, each) for name, each in held.items() if isinstance(each, _SETTINGS)]
    return Held([(n, kind(_comparable(each, 2))) for n, each in own]) if 0 < len(own) <= _MOST else type(value)


def _plain(value: Any, deep: int = _DEEP) -> bool:
    """Whether it is plain, or a container of plain values, so that copies of it can be compared."""
    if type(value) is dict:
        value = (*value, *value.values())
    if type(value) in (tuple, list, set, frozenset):
        return deep > 0 and all(_plain(each, deep - 1) for each in value)
    return isinstance(value, PLAIN)


def _equal(a: Any, b: Any) -> bool:
    """A tensor, or what has one in it, is equal to nothing."""
    try:
        return bool(a == b)
    except (RuntimeError, TypeError, ValueError):
        return False


def kind(value: Any) -> Any:
    """What a branch is most likely to ask of a number: its sign, which small whole one it is. Others are themselves."""
    if isinstance(value, Held):  # tells when to look, and not what to compile
        return Held
    if isinstance(value, complex):
        return value != 0
    if isinstance(value, int):
        return max(-_SMALL, min(value, _SMALL))
    if isinstance(value, (tuple, frozenset)):
        return type(value)(map(kind, value))
    return (value > 0, value < 0, value == value) if isinstance(value, float) else value


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
