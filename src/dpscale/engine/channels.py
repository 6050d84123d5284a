"""Convolutions with channels last, while a step is traced for CUDA.

cuDNN converts every image to channels last and back, and so would our kernels. A compiler that sees forward and
backward in one graph takes each tensor as the trace laid it out, so the trace must lay it out that way.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

_last: ContextVar[bool] = ContextVar("channels_last", default=False)


@contextmanager
def channels_last(on: bool) -> Iterator[None]:
    """Within, operations that meet parameters take and give images channels last."""
    token = _last.set(on)
    try:
        yield
    finally:
        _last.reset(token)


def before(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """A convolution's arguments, its input channels last."""
    if not _last.get() or func is not torch.conv2d or not args or args[0].ndim != 4:
        return args
    return (_channels_last(args[0]), *args[1:])


def after(func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> Any:
    """What the operation gave, channels last as its input was, and so the gradient that will come back to it."""
    if not _last.get() or not isinstance(out, Tensor) or out.ndim != 4 or not isinstance(args[0], Tensor):
        return out
    if func is torch.conv2d:
        if out.requires_grad:
            out.register_hook(_channels_last)
        return out
    same = args[0].shape == out.shape and args[0].is_contiguous(memory_format=torch.channels_last)
    return _channels_last(out) if same else out


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)
