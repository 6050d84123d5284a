"""What tells one loss function from another: what it does, as far as that can be seen, and not where it lies.

``lambda model, batch: ...`` in a training loop is another function at every step and does the same at every step; to
inspect, or compile, the model anew for each would take longer than to train. A function that reads a number which has
changed since does something else, though it is the same function: a compiled step has that number in it.
"""

import functools
import weakref
from collections.abc import Callable
from types import FunctionType, MethodType
from typing import Any

_NUMBERS = (int, float, complex)
_PLAIN = (*_NUMBERS, str, bytes, type(None))
_DEPTH = 8
_MISSING = object()


class _Unclear(Exception):
    """It holds something that may change unseen, and that cannot be referred to weakly."""


class _Same:
    """An object, told from others by where it lies."""

    def __init__(self, value: Any, keep: bool) -> None:
        self._place = id(value)
        try:
            self._get: Callable[[], Any] = (lambda: value) if keep else weakref.ref(value)
        except TypeError as error:  # lists and dictionaries, as a rule
            raise _Unclear from error

    def __eq__(self, other: object) -> bool:
        mine = self._get()
        return other is self or (isinstance(other, _Same) and mine is not None and mine is other._get())

    def __hash__(self) -> int:
        return self._place


def identity(function: Callable[..., Any], *, numbers: bool) -> Any:
    """Equal for functions of the same code that hold the same objects and read the same globals.

    Nothing but modules' globals is kept alive. Where that is not possible, a function is equal to itself alone.

    Args:
        numbers: whether the values of numbers that it holds or reads count.
    """
    try:
        return _of(function, numbers, _DEPTH)
    except _Unclear:
        return _itself(function)


def _of(function: Any, numbers: bool, depth: int) -> Any:
    if depth == 0:
        raise _Unclear
    value = functools.partial(_value, numbers=numbers, depth=depth - 1)
    if isinstance(function, MethodType):  # new at every access
        return _itself(function.__self__), function.__func__
    if isinstance(function, functools.partial):
        given = (*function.args, *function.keywords.values())
        return _of(function.func, numbers, depth - 1), tuple(function.keywords), *map(value, given)
    if not isinstance(function, FunctionType):
        return _itself(function)
    code, globals_ = function.__code__, function.__globals__
    try:
        held = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError as error:  # a variable that has no value yet
        raise _Unclear from error
    held += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    read = [globals_[name] for name in code.co_names if isinstance(globals_.get(name, _MISSING), _PLAIN)]
    return code, _Same(globals_, keep=True), *map(value, (*held, *read))


def _value(value: Any, numbers: bool, depth: int) -> Any:
    if isinstance(value, _PLAIN):
        counts = numbers or isinstance(value, bool) or not isinstance(value, _NUMBERS)
        return type(value), value if counts else None
    if isinstance(value, tuple):
        return tuple(_value(v, numbers, depth) for v in value)
    if isinstance(value, (FunctionType, MethodType, functools.partial)):
        return _of(value, numbers, depth)
    return _Same(value, keep=False)


def _itself(function: Any) -> _Same:
    """A function that nothing more is known of; kept alive only if there is no other way to know it again."""
    try:
        return _Same(function, keep=False)
    except _Unclear:
        return _Same(function, keep=True)
