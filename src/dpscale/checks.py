"""One shape for every complaint about an argument: who, which argument, what it must be, what it was, what to do."""

import dataclasses
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, get_args

_NO_MEMORY = ("DefaultCPUAllocator", "Storage size calculation overflowed", "CUDA error: out of memory")
"""What plain errors of torch say: on the CPU, and on a GPU that others fill."""


def complaint(owner: str, name: str, must: str, got: Any, action: str = "") -> ValueError:
    """To be raised: it names the argument, its value and the next action."""
    return ValueError(f"The '{name}' parameter of {owner} must be {must}. Got {got!r} instead. {action}".rstrip())


def require(ok: bool, owner: str, name: str, must: str, got: Any, action: str = "") -> None:
    """Raise a `complaint` unless ``ok``."""
    if not ok:
        raise complaint(owner, name, must, got, action)


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that a device, or this machine, has no room for a tensor."""
    import torch

    return isinstance(error, MemoryError | torch.OutOfMemoryError) or any(told in str(error) for told in _NO_MEMORY)


@contextmanager
def quiet(name: str) -> Iterator[None]:
    """Within, the logger of that name says nothing below an error."""
    logger = logging.getLogger(name)
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def is_number(value: Any) -> bool:
    """Whether ``value`` is a real number that is not a bool and not NaN."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and not math.isnan(value)


def plain_number(value: Any) -> Any:
    """A number of numpy as one of Python; anything else as it is."""
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "shape", None) == () else value


def settle_numbers(settings: Any) -> None:
    """Numbers of numpy among the fields of a frozen dataclass become Python's, which can be written as JSON."""
    for field in dataclasses.fields(settings):
        if hasattr(settings, field.name) and (now := getattr(settings, field.name)) is not (to := plain_number(now)):
            object.__setattr__(settings, field.name, to)


def require_positive(owner: str, name: str, value: Any, *, finite: bool = True, action: str = "") -> None:
    """Raise unless ``value`` is a number > 0 (and finite, unless ``finite=False``)."""
    ok = is_number(value) and value > 0 and (not finite or math.isfinite(value))
    require(ok, owner, name, "a finite number > 0" if finite else "a number > 0", value, action)


def require_count(owner: str, name: str, value: Any, *, least: int = 1, action: str = "") -> None:
    """Raise unless ``value`` is an int, and not less than ``least``."""
    ok = isinstance(value, int) and not isinstance(value, bool) and value >= least
    require(ok, owner, name, f"an integer >= {least}", value, action)


def require_choice(owner: str, name: str, value: Any, choices: Any, *, action: str = "") -> None:
    """Raise unless ``value`` is one of the words of a ``Literal``."""
    words = get_args(choices)
    require(value in words, owner, name, " or ".join(map(repr, words)), value, action)


def require_probability(owner: str, name: str, value: Any, *, action: str = "") -> None:
    """Raise unless ``0 < value < 1``."""
    require(is_number(value) and 0 < value < 1, owner, name, "a number in (0, 1)", value, action)
