"""Images with channels last, while a step is traced.

cuDNN converts every image to channels last and back, and so would our kernels, on the CPU too. A compiler that sees
forward and backward in one graph takes each tensor as the trace laid it out, so the trace must lay it out that way:
once converted, no image is laid out anew, neither by a norm between two convolutions nor on the way back.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscale.engine.rules.normalization import group_norm

WINDOW = 9
"""A pooling's windows of no more pixels than this are looked at pixel by pixel."""

_POOLING = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")

LAST: ContextVar[bool] = ContextVar("channels_last", default=False)
"""Whether tapes that begin now take and give images channels last."""


_CAREFUL: ContextVar[bool] = ContextVar("careful", default=False)


@contextmanager
def channels_last(on: bool, careful: bool = False) -> Iterator[None]:
    """Within, operations that meet parameters take and give images channels last.

    Args:
        careful: raise `Slower` at an operation that is slower so on the CPU.
    """
    tokens = LAST.set(on), _CAREFUL.set(careful)
    try:
        yield
    finally:
        LAST.reset(tokens[0])
        _CAREFUL.reset(tokens[1])


class Slower(RuntimeError):
    """The compiler makes something so slow of this operation where images have their channels last, on the CPU, that
    convolutions do not make up for it: a CNN with group norm and pooling took nearly twice as long."""


def before(func: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """An operation and its arguments: a convolution's channels last; a group norm that leaves them so."""
    if not args or not isinstance(args[0], Tensor) or args[0].ndim != 4:
        return func, args
    if func is torch.conv2d:
        return func, (*(_channels_last(t) for t in args[:2]), *args[2:])  # image and weight
    if func is not torch.group_norm or not _is_last(args[0]):
        return func, args
    if _CAREFUL.get():
        raise Slower("group_norm")
    return group_norm, args


def after(func: Callable[..., Any], args: tuple[Any, ...], out: Any) -> Any:
    """What the operation gave, channels last as its input was, and so the gradient that will come back to it."""
    if not isinstance(out, Tensor) or out.ndim != 4 or not args or not isinstance(args[0], Tensor):
        return out
    if func is torch.conv2d or (args[0].shape == out.shape and _is_last(args[0])):
        return _ChannelsLast.apply(out)  # type: ignore[no-untyped-call]
    return out


class _ChannelsLast(torch.autograd.Function):
    """Nothing but the layout, of an image and of its gradient."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        """The image; a copy, which a compiler leaves out, since what comes next may work in place."""
        return t.clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        """The gradient."""
        return _channels_last(g)


def between(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operation that meets no parameter: as it is, but for a pooling, which would be written before it is read."""
    if func in (torch.max_pool2d, F.max_pool2d):
        given = dict(zip(_POOLING, args, strict=False)) | kwargs
        x, kernel = given["input"], _pair(given["kernel_size"])
        apart = _pair(given.get("stride") or kernel) == kernel and _pair(given.get("dilation", 1)) == (1, 1)
        within = x.ndim == 4 and x.shape[2] % kernel[0] == x.shape[3] % kernel[1] == 0
        within = within and _pair(given.get("padding", 0)) == (0, 0) and not given.get("return_indices", False)
        if _CAREFUL.get() and x.ndim == 4 and _is_last(x):
            raise Slower("max_pool2d")
        if apart and within and math.prod(kernel) <= WINDOW and _is_last(x):
            return _MaxPool.apply(x, kernel)  # type: ignore[no-untyped-call]
    return func(*args, **kwargs)


class _MaxPool(torch.autograd.Function):
    """`torch.max_pool2d` of windows that do not overlap, by comparisons, which a compiler makes on the way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernel: tuple[int, int]) -> Tensor:
        """The first of the largest; the last that is NaN."""
        down, across = ctx.kernel = kernel
        pixels = [x[:, :, i::down, j::across] for i in range(down) for j in range(across)]
        largest, place = pixels[0], torch.zeros_like(pixels[0], dtype=torch.int8)
        for k, pixel in enumerate(pixels[1:], 1):
            larger = (pixel > largest) | pixel.isnan()
            largest, place = pixel.where(larger, largest), torch.where(larger, k, place)
        ctx.save_for_backward(place)
        return largest.clone(memory_format=torch.channels_last)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        """To where the largest was."""
        (place,) = ctx.saved_tensors
        (down, across), (images, channels, height, width) = ctx.kernel, g.shape
        place, g = (t.permute(0, 2, 3, 1).unsqueeze(2).unsqueeze(4) for t in (place, g))  # (N, H, 1, W, 1, C)
        here = torch.arange(down * across, dtype=torch.int8, device=g.device).view(down, 1, across, 1)
        back = g.where(place == here, 0).contiguous().view(images, height * down, width * across, channels)
        return back.permute(0, 3, 1, 2), None


def _pair(value: Any) -> tuple[int, int]:
    first, *rest = value if isinstance(value, Sequence) else (value,)
    return first, rest[0] if rest else first


def _channels_last(t: Tensor) -> Tensor:
    return t.contiguous(memory_format=torch.channels_last)


def _is_last(t: Tensor) -> bool:
    return t.is_contiguous(memory_format=torch.channels_last)
