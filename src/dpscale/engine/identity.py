"""What tells one loss function from another: what it does, as far as that can be seen, and not where it lies.

``lambda model, batch: ...`` in a training loop is another function at every step and does the same at every step; to
check, or compile, the model anew for each would take longer than to train. A function that reads a number which has
changed since does something else, though it is the same function: a compiled step has that number in it.
"""

import dis
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from dpscale.engine.arguments import LossFn, kind_of, shapes_of
from dpscale.engine.modules import PLAIN, Structure, holdings, kind, structure

_MOST = 256  # functions, and entries of containers, to look at


class _Unclear(Exception):
    """It holds something that may change unseen, and that cannot be referred to weakly."""


class _Same:
    """An object, told from others by where it lies."""

    def __init__(self, value: Any, keep: bool) -> None:
        self._place = id(value)
        try:
            self._get: Callable[[], Any] = (lambda: value) if keep else weakref.ref(value)
        except TypeError as error:
            raise _Unclear from error

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return other is self or (isinstance(other, _Same) and mine is not None and mine is other._get())

    def __hash__(self) -> int:
        return self._place


def identity(function: Callable[..., Any], *, numbers: bool) -> Any:
    """Equal for functions of the same code that hold the same objects and read the same globals.

    Functions that it calls are looked into where it holds them, or where its own module has them; those of other
    modules count as the objects that they are. A network that it holds (a criterion), or that an object which it holds
    has as an attribute, counts with its modes and switches. Nothing but what modules hold is kept alive. Where that is
    not possible, a function is equal to itself alone.

    Args:
        numbers: whether the values of numbers that it holds or reads count. If not, what a branch is most likely to ask
            of them still does: their sign, and which small whole number it is.
    """
    try:
        return _Look(numbers).function(function)
    except _Unclear:
        held = [get() for _, get, _ in variables_of(function)]  # without a further look
        return _itself(function), *[each for value in held for each in _switches(value)]


def code_of(function: Any) -> Any:
    """What is the same for all functions of one code, whatever they hold; of a function around another
    (``functools.wraps``), both codes."""
    while isinstance(function, (functools.partial, MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    if not isinstance(function, FunctionType):
        return type(function)
    inner = function.__dict__.get("__wrapped__")
    return function.__code__ if inner is None else (function.__code__, code_of(inner))


class Setting(NamedTuple):
    """What a model, a loss function and a batch are like: a check, or a compiled step, is good for one setting."""

    loss_fn: LossFn | None
    holding: Any  # what the loss function is, holds and reads
    found: Structure
    kind: Any
    shapes: Any

    @classmethod
    def of(cls, found: Structure, loss_fn: LossFn | None, batch: Any) -> "Setting":
        """As they are now; without a loss function, in a loop that is not ours."""
        holding = None if loss_fn is None else identity(loss_fn, numbers=True)
        return cls(loss_fn, holding, found, kind_of(found, batch), shapes_of(batch))


class _Look:
    """One look at a function, and at those that it leads to."""

    def __init__(self, numbers: bool) -> None:
        self._numbers = numbers
        self._seen: dict[int, int] = {}
        self._size = 0

    def function(self, function: Any) -> Any:
        if isinstance(function, MethodType):  # new at every access
            owner = _itself(function.__self__), *_switches(function.__self__)
            try:
                return *owner, self.function(function.__func__)
            except _Unclear:
                return *owner, function.__func__
        if isinstance(function, functools.partial):
            given = (*function.args, *function.keywords.values())
            return self.function(function.func), tuple(function.keywords), *map(self._value, given)
        if not isinstance(function, FunctionType):
            return _itself(function), *_switches(function)
        if id(function) in self._seen:
            return self._seen[id(function)]
        self._meet(function, 1)
        code, globals_ = function.__code__, function.__globals__
        try:
            held = [cell.cell_contents for cell in function.__closure__ or ()]
        except ValueError as error:  # a variable that has no value yet
            raise _Unclear from error
        held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        return code, _Same(globals_, keep=True), *map(self._value, held), *self._read(code, globals_)

    def _meet(self, value: Any, size: int) -> None:
        self._seen[id(value)] = len(self._seen)
        self._size += size
        if self._size > _MOST:
            raise _Unclear

    def _read(self, code: CodeType, globals_: dict[str, Any]) -> Iterator[Any]:
        """What the code reads from its module, and from other modules by way of it."""
        for name, values in _places(code, globals_):
            value = values[name]
            own = values is globals_ and not (isinstance(value, FunctionType) and value.__globals__ is not globals_)
            if isinstance(value, ModuleType):
                yield name, _itself(value)
            else:
                yield name, self._value(value) if own or isinstance(value, (*PLAIN, nn.Module)) else _elsewhere(value)

    def _value(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, PLAIN):
            return type(value), value if self._numbers else kind(value)
        if isinstance(value, tuple):
            return tuple(map(self._value, value))
        if isinstance(value, (FunctionType, MethodType, functools.partial)):
            return self.function(value)
        if isinstance(value, (list, dict)):
            if id(value) in self._seen:
                return self._seen[id(value)]
            self._meet(value, len(value))
            entries = (*value, *value.values()) if isinstance(value, dict) else value
            return type(value), *map(self._value, entries)
        return _Same(value, keep=False), *_switches(value)


def _switches(value: Any) -> Iterator[Any]:
    """Of a network, or of those that an object has as its attributes; and what else that holds."""
    if isinstance(value, nn.Module):
        yield structure(value).switches()
        return
    yield holdings(value)
    if not isinstance(value, (type, ModuleType)):
        for each in list(getattr(value, "__dict__", {}).values()):
            if isinstance(each, nn.Module):
                yield structure(each).switches()


Variable = tuple[str, Callable[[], Any], Callable[[Any], None]]
"""A name, what reads it and what writes it."""


def variables_of(function: Any) -> list[Variable]:
    """What a function holds in its closure and defaults, reads from its module and others, or is bound to."""
    if isinstance(function, functools.partial):
        given = {**{str(k): v for k, v in enumerate(function.args)}, **function.keywords}
        return [*(_constant(n, v) for n, v in given.items()), *variables_of(function.func)]
    if isinstance(function, MethodType):
        return [_constant("self", function.__self__), *variables_of(function.__func__)]
    if not isinstance(function, FunctionType):
        return [] if function is None or isinstance(function, BuiltinFunctionType) else [_constant("self", function)]
    found: list[Variable] = []
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        with suppress(ValueError):  # a variable that has no value yet
            _ = cell.cell_contents
            found.append((name, partial(getattr, cell, "cell_contents"), partial(setattr, cell, "cell_contents")))
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    found += [_constant(f"default {k}", value) for k, value in enumerate(defaults)]
    for name, values in _places(function.__code__, function.__globals__):
        if not isinstance(values[name], ModuleType):
            found.append((name, partial(values.__getitem__, name), partial(values.__setitem__, name)))
    inner = function.__dict__.get("__wrapped__")
    return found if inner is None or isinstance(inner, FunctionType) else [*found, *variables_of(inner)]


def _constant(name: str, value: Any) -> Variable:
    return name, lambda: value, lambda _: None


def _places(code: CodeType, globals_: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each name that code reads from its module, or from other modules by way of it, and whose variables have it."""
    names, attributes = _names(code)
    places = [globals_]
    for values in places:  # grows by the modules that it reads from: torch, torch.nn, torch.nn.functional
        for name in names if values is globals_ else attributes:
            if name in values:
                yield name, values
                value = values[name]
                if isinstance(value, ModuleType) and all(vars(value) is not known for known in places):
                    places.append(vars(value))


@functools.lru_cache(256)
def _names(code: CodeType) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Of the globals that code reads, and of attributes; that of functions and generators inside it too."""
    names = {i.argval: None for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    attributes = dict.fromkeys(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            more, further = map(dict.fromkeys, _names(inner))
            names, attributes = names | more, attributes | further
    return tuple(names), tuple(attributes)


def _elsewhere(value: Any) -> Any:
    """Something of another module, which may be reloaded, its functions also in place."""
    return _itself(value), getattr(value, "__code__", None)


def _itself(function: Any) -> _Same:
    """A function that nothing more is known of; kept alive only if there is no other way to know it again."""
    try:
        return _Same(function, keep=False)
    except _Unclear:
        return _Same(function, keep=True)
