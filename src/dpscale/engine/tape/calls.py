"""What one call of a torch operation reads, writes and gives, and how to repeat it."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__init__"}


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among a call's arguments, one level of lists deep (cat, lstm, einsum)."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            for item in value:
                if isinstance(item, Tensor):
                    yield item


def in_place(func: Callable[..., Any]) -> bool:
    """Whether an operation writes its first argument: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    return (
        name == "__setitem__"
        or (name.endswith("_") and not name.endswith("__"))
        or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    )


def out_of_place(func: Callable[..., Any]) -> Callable[..., Any]:
    """The twin of an in-place operation that leaves its first argument alone; any other operation is its own."""
    if not in_place(func):
        return func
    name = func.__name__
    twin = getattr(torch.Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1], None)
    if twin is not None:
        return twin  # type: ignore[no-any-return]

    def on_a_copy(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # copy_, __setitem__
        t = t.clone()
        func(t, *args, **kwargs)
        return t

    return on_a_copy


def result(func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> Any:
    """What an operation made: what it returned, or what it wrote where it returns nothing (``x[i] = w``)."""
    return args[0] if out is None and in_place(func) else out


def as_now(func: Callable[..., Any], tensors: Iterable[Tensor]) -> Callable[..., Any]:
    """The operation, not in place, as a function that runs under the autocast that is in force now."""
    twin = out_of_place(func)
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in {t.device.type for t in tensors}]

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device, enabled, dtype in states:  # without the cache, which would outlive tensors of vmap
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            return twin(*args, **kwargs)

    run.__name__ = getattr(twin, "__name__", "?")
    return run
