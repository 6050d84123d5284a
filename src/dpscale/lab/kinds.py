"""Whether what a file holds is of the kind that an annotation says: values from JSON against types."""

import dataclasses
import functools
import math
import re
import reprlib
import sys
import typing
from collections.abc import Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, NotRequired

_PLAIN = {str: "a string", int: "an integer", float: "a finite number", bool: "true or false"}


def fault(value: Any, kind: Any, name: str = "") -> str:
    """The first part of ``value`` that is none of its kind, in words; nothing if all are. ``name`` is the whole's.

    ``kind`` is a type as annotations have it: plain ones, ``list``, ``Mapping``, something ``| None``; or a dataclass
    or a typed mapping, whose keys may have company. ``Annotated`` adds to a type the least and the most of a number or
    of a list's length, a pattern of a string, or the keys of a mapping.
    """
    return next(_faults(value, kind, name), "")


def _faults(value: Any, kind: Any, name: str) -> Iterator[str]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, UnionType):
        if value is not None:
            yield from _faults(value, next(part for part in parts if part is not NoneType), name)
    elif origin is NotRequired:
        yield from _faults(value, parts[0], name)
    elif origin is Annotated:
        yield from _faults(value, parts[0], name)
        for limit in parts[1:]:
            yield from _beyond(value, limit, name)
    elif kind in _PLAIN:
        if not _is_plain(value, kind):
            yield _told(name, value, _PLAIN[kind])
    elif origin is list:
        if not isinstance(value, list):
            yield _told(name, value, "a list")
        for place, each in enumerate(value):
            yield from _faults(each, parts[0], f"{name}[{place}]")
    elif kind is not Any:
        yield from _keys(value, kind, parts, name)


def _keys(value: Any, kind: Any, parts: tuple[Any, ...], name: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield _told(name, value, "an object")
    for key in value if parts else ():
        yield from _faults(key, parts[0], f"a key of {name}")
    for key in () if parts else _required(kind):
        if key not in value:
            yield f"{_of(name, key)} is missing"
    kinds = dict.fromkeys(value, parts[1]) if parts else _annotations(kind)
    for key in (key for key in kinds if key in value):
        yield from _faults(value[key], kinds[key], _of(name, key))


def _beyond(value: Any, limit: Any, name: str) -> Iterator[str]:
    if isinstance(limit, str):
        if not re.fullmatch(limit, value):
            yield _told(name, value, f"of the form {limit}")
    elif isinstance(limit, tuple):
        (least, most), long = limit, isinstance(value, list)
        if not least <= (len(value) if long else value) <= most:
            must = f">= {least}" if most == math.inf else f"in [{least}, {most}]"
            yield _told(name, value, f"of a length {must}" if long else must)
    else:
        yield from _faults(value, limit, name)


def _is_plain(value: Any, kind: type) -> bool:
    if kind is float:  # a whole number is one too, if it is not beyond all floats
        return type(value) in (int, float) and abs(value) <= sys.float_info.max
    return type(value) is kind


def _of(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _told(name: str, value: Any, must: str) -> str:
    return f"{name} is {reprlib.repr(value)}, not {must}"


@functools.cache
def _annotations(kind: Any) -> Mapping[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _required(kind: Any) -> list[str]:
    if not dataclasses.is_dataclass(kind):
        return sorted(kind.__required_keys__)
    missing = dataclasses.MISSING
    return [f.name for f in dataclasses.fields(kind) if f.default is missing and f.default_factory is missing]
