"""`conv1d`, `conv2d`, `conv3d` and their transposes: any stride, padding, dilation and number of groups.

Unfolded into patches, a convolution is a linear layer over positions: sample i's gradient of W is Σ_l g_l patch_lᵀ,
so its squared norm is that of `Outer`, group by group. The weighted sum needs no patches: it is the ordinary weight
gradient of the convolution for the output gradient w·g.

The transpose of a convolution sends y's gradient g to x by that convolution, so ⟨g, y⟩ = ⟨conv(g, W), x⟩: the gradient
of W is that of an ordinary convolution whose input is g and whose output gradient is x.

Shape suffixes: B samples, K images of one sample, L output positions, C input channels, O output channels, P =
C/groups · ∏kernel.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dpscale.engine import kernels, native
from dpscale.engine.compat import FakeTensor
from dpscale.engine.layout import example_size
from dpscale.engine.rules.forms import (
    Call,
    Dense,
    Form,
    Rule,
    Stack,
    as_multiplied,
    chunks,
    same,
    scaled,
    side_by_side,
    size,
    slack,
    wide,
)
from dpscale.engine.rules.linear import CHUNK, PASS, Outer

SMALL = 1 << 23
"""Per-sample gradients of no more numbers than this are always worth holding."""

FEW = 8
"""So many images of one sample (points, views) are worth going through one by one."""

TOUCH = 50
"""Multiplications by a kernel in the time in which a number is read from the cache; to write one takes four times as
long."""

CACHED, LEAST = 1 << 19, 8
"""Of samples that stand beside groups: how many numbers a CPU should have at hand at once (memory that is fetched from
the system for every step costs more than what is computed in it), and how many samples at least."""

NARROW = 64
"""Few inputs per patch: the channels alone would leave a kernel's tiles half empty."""


@dataclass(frozen=True)
class Patches(Form):
    """Gradients of a convolution's weight, from its input and output gradient, (B, K, channels, *space)."""

    x: Tensor
    g: Tensor
    weight_shape: torch.Size
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def _samples(self) -> int:
        """About how many there are: each way is right for any number, and a compiled step takes one for all."""
        return example_size(len(self.x))

    @property
    def _worth_holding(self) -> bool:
        """Whether the gradients are no larger than what they are made of, or small."""
        operands = math.prod(self.x.shape[1:]) + math.prod(self.g.shape[1:])
        return self._samples * math.prod(self.weight_shape) <= max(self._samples * operands, SMALL)

    @property
    def _patch_numbers(self) -> int:
        """Numbers in one sample's patches: what unfolding costs."""
        positions = self.x.shape[1] * math.prod(self.g.shape[3:])
        return positions * self.x.shape[2] * math.prod(self.weight_shape[2:])

    @property
    def _costs(self) -> tuple[float, float, float]:
        """Multiplications per sample: to keep the gradients, beyond those of the weighted sum that this saves; the norm
        by patches; that by pixels. Copies count eightfold, or as they were measured where samples are groups."""
        positions = self.x.shape[1] * math.prod(self.g.shape[3:])
        inputs, outputs = math.prod(self.weight_shape[1:]), self.weight_shape[0] // self.groups
        copied = (TOUCH if self._grouped else 8) * self._patch_numbers
        kept = PASS * math.prod(self.weight_shape) if self._grouped else copied
        product = positions * inputs * outputs * self.groups
        patches = min(product, positions**2 * (inputs + outputs) * self.groups) + copied
        pixels = math.inf
        if self.groups == self.x.shape[1] == 1 and len(self.stride) == 2:
            area, kernel = math.prod(self.x.shape[3:]), math.prod(self.weight_shape[2:])
            pixels = area**2 * self.x.shape[2] + positions**2 * (outputs + 4 * kernel)
            pixels = self._pixel_cost if self._grouped else pixels
        return kept, patches, pixels

    @cached_property
    def _fast(self) -> bool:
        """Whether CUDA kernels take the operands as they are: one image per sample, one group, at most two dims."""
        whole = self.x.shape[1] == self.groups == 1 and len(self.stride) <= 2
        long = math.prod(self.g.shape[3:]) >= kernels.SHORT
        return type(self) is Patches and whole and long and kernels.available(self.x, self.g)

    @cached_property
    def _grouped(self) -> bool:
        """Whether the CPU has convolutions of many groups that are worth it, and they take the operands as they are."""
        sizes = zip(self.x.shape[3:], self.padding, self.dilation, self.weight_shape[2:], self.stride, strict=True)
        positions = [(n + 2 * p - d * (k - 1) - 1) // s + 1 for n, p, d, k, s in sizes]
        single = {wide(t[:0]).dtype for t in (self.x, self.g)} == {torch.float32}
        takes = single and self.x.device.type == "cpu" and torch.backends.mkldnn.is_available()
        return takes and not self._fast and positions == list(self.g.shape[3:])

    @property
    def _unfolds(self) -> bool:
        """Whether unfolding costs little: few inputs per patch (tiles would be half empty), or no overlap."""
        return self._apart or math.prod(self.weight_shape[1:]) <= NARROW

    @property
    def _apart(self) -> bool:
        """Whether patches (nearly) do not overlap: unfolding is then one copy."""
        return self._patch_numbers <= 2 * math.prod(self.x.shape[1:])

    @property
    def _by_pixels(self) -> bool:
        """Whether the norm is taken by inner products of pixels: they are the least work, and fit."""
        if self._fast:
            least = not self._unfolds and self._small_maps
        else:
            _, patches, pixels = self._costs
            least = pixels <= patches
        return least and self._samples * max(self._padded_area, math.prod(self.g.shape[3:])) ** 2 <= CHUNK

    @property
    def _small_maps(self) -> bool:
        """Whether, where kernels could take the products, inner products of pixels are less work than these."""
        return len(self.stride) == 2 and self._pixel_cost <= math.prod(self.g.shape[3:]) * math.prod(self.weight_shape)

    @property
    def _pixel_cost(self) -> int:
        """Multiplications per sample by inner products of pixels, numbers that are read and written counted in."""
        outputs, taps = self.weight_shape[0], math.prod(self.weight_shape[2:])
        area, positions = self._padded_area, math.prod(self.g.shape[3:])
        return area**2 * (self.x.shape[2] + 4 * TOUCH) + positions**2 * (outputs + TOUCH * taps)

    @property
    def _padded_area(self) -> int:
        """Pixels of an image with its padding: their Gram matrix is padded to that."""
        return math.prod(n + 2 * p for n, p in zip(self.x.shape[3:], self.padding, strict=True))

    def _channels_last(self) -> tuple[Tensor, Tensor, kernels.Window]:
        """(B, H, W, C), (B, R, S, O) and the window, for the kernels; one dimension counts as a single row."""
        line = len(self.stride) == 1
        x, g = (t.squeeze(1).unsqueeze(2) if line else t.squeeze(1) for t in (self.x, self.g))

        def pair(values: Sequence[int], fill: int) -> tuple[int, int]:
            return (fill, values[0]) if line else (values[0], values[1])

        window = kernels.Window(
            pair(self.weight_shape[2:], 1), pair(self.stride, 1), pair(self.padding, 0), pair(self.dilation, 1)
        )
        return x.permute(0, 2, 3, 1), g.permute(0, 2, 3, 1), window

    def settle(self) -> Form:
        """The gradients themselves where they are cheap and no larger than what is held: the sum is then free."""
        images = self.x.shape[1]
        kept, patches, pixels = self._costs
        if self._grouped:
            if not self._worth_holding or kept > min(patches, pixels):
                return self
            return self._by_kernel() if self._native else self._by_groups()
        if 1 < images <= FEW and (added := self._image_by_image(images)) is not None:
            return added
        if self._fast:
            if self._unfolds:
                return self._kept() if isinstance(self._outer().settle(), Dense) else self
            if not self._worth_holding:
                return self
            x, g, window = self._channels_last()
            products = kernels.keep(x, g, window).unflatten(1, self.weight_shape[2:])
            dims = len(self.stride)
            return Dense(products, (dims, dims + 1, *range(dims)))
        if not self._worth_holding or kept > min(patches, pixels):
            return self
        plane = len(self.stride) == 2 and self.groups == self.x.shape[1] == self.dilation[0] == self.dilation[1] == 1
        wide_rows = self.weight_shape[1] * self.weight_shape[-1] >= 48  # below, the products are too small to pay
        if plane and wide_rows and not self._apart:
            return self._by_kernel_rows()
        return self._kept() if self._samples * self._patch_numbers <= CHUNK else self

    def _image_by_image(self, images: int) -> Form | None:
        """The gradients of each image, added: one image has faster ways than several. None where they are not kept."""
        total: list[Dense] = []
        dim = None
        for k in range(images):
            settled = replace(self, x=self.x[:, k : k + 1], g=self.g[:, k : k + 1]).settle()
            if isinstance(settled, Stack):
                dim, parts = settled.dim, settled.slices
            else:
                parts = (settled,)
            kept = [part for part in parts if isinstance(part, Dense)]
            if len(kept) < len(parts):
                return None
            added = [replace(a, grad_B=wide(a.grad_B) + wide(b.grad_B)) for a, b in zip(total, kept, strict=False)]
            total = added or kept
        return total[0] if dim is None else Stack(tuple(total), dim)

    def _kept(self) -> Dense:
        """The gradients from patches."""
        if self.groups > 1:
            return Dense(self.per_sample())
        made, inner = self._outer().kept(), self.weight_shape[1:]
        if made.order is None:
            return Dense(made.grad_B.unflatten(2, inner))
        return Dense(made.grad_B.unflatten(1, inner), (len(inner), *range(len(inner))))

    @property
    def _native(self) -> bool:
        """Whether there is a kernel for what `_grouped` takes."""
        return self.groups == 1 and len(self.stride) <= 2 and native.available()

    def _by_kernel(self) -> Dense:
        """The gradients by a kernel of our own, with their squares; one dimension counts as a single row."""
        x, g = (wide(t).flatten(0, 1) for t in (self.x, self.g))
        setting: list[tuple[int, ...]] = [self.weight_shape[2:], self.stride, self.padding, self.dilation]
        if len(self.stride) == 1:
            x, g = x.unsqueeze(2), g.unsqueeze(2)
            setting = [(fill, *sizes) for fill, sizes in zip((1, 1, 0, 1), setting, strict=True)]
        made, squares = native.patch_gradients(x, g, self.x.shape[1], *setting)
        dims = len(self.stride)
        held = made.squeeze(1) if dims == 1 else made
        return Dense(held, (dims + 1, dims, *range(dims)), squares)

    def _by_groups(self) -> Dense:
        """The gradients as ordinary weight gradients, whose groups are the samples."""
        x, g = wide(self.x).contiguous(), wide(self.g).contiguous()
        setting = self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        traced = isinstance(x, FakeTensor)
        return Dense(torch.ops.dpscale.weight_gradients(x, g, *setting) if traced else _in_groups(x, g, *setting))

    def _by_kernel_rows(self) -> Form:
        """The gradients in 2d, a kernel row at a time: only columns are unfolded, so a kernel-height-th is copied.

        Input rows of one residue modulo the stride lie together in the copy, so that the rows which kernel row i meets
        are one block. Channels come last, as CUDA's convolutions have them: (B, stride, height/stride, L2, kernel
        width, C).
        """
        (down, across), (_, channels, height, width) = self.stride, self.weight_shape
        uneven = -(self.x.shape[3] + 2 * self.padding[0]) % down
        step = max(1, CHUNK // 2 // (channels * width * self.x.shape[3] * self.g.shape[4]))
        rows: list[list[Tensor]] = [[] for _ in range(height)]
        for chunk in chunks(len(self.x), step):
            x = wide(self.x[chunk]).squeeze(1)
            x = F.pad(x, (self.padding[1], self.padding[1], self.padding[0], self.padding[0] + uneven))
            x = x.unflatten(2, (-1, down)).unfold(4, width, across)  # (B, C, height/stride, stride, L2, kernel width)
            x = x.permute(0, 3, 2, 4, 5, 1).contiguous()
            g = wide(self.g[chunk]).squeeze(1).flatten(2)
            for i in range(height):
                met = slice(i // down, i // down + self.g.shape[3])
                made = torch.bmm(g, x[:, i % down, met].flatten(1, 2).flatten(2))
                rows[i].append(made.unflatten(2, (width, -1)))
        return Stack(tuple(Dense(torch.cat(parts), (0, 2, 1)) for parts in rows), 2)

    def norm2(self) -> Tensor:
        """By pixels on small maps; else, per group, by the outer products over patches, in chunks of samples."""
        if self._by_pixels:
            return self._norm2_by_pixels()
        if self._fast:
            if self._unfolds:
                return self._outer().norm2()
            return kernels.square(*self._channels_last()) + slack(self._terms())
        step = max(1, CHUNK // self._patch_numbers)
        parts = [self._slice(chunk)._outer().norm2() for chunk in chunks(len(self.x), step)]
        return torch.cat(parts).view(-1, self.groups).sum(1)

    def _terms(self) -> Tensor:
        """The norms of the terms g_l patch_lᵀ, (B, L): a patch's from the squares in its window."""
        x, g, window = self._channels_last()
        squares = wide(x).square().sum(3).unsqueeze(1)
        ones = squares.new_ones(1, 1, *window.kernel)
        patches = torch.conv2d(squares, ones, None, window.stride, window.padding, window.dilation).squeeze(1)
        tiny = torch.finfo(patches.dtype).tiny
        patches = patches[:, : g.shape[1], : g.shape[2]].clamp(min=0) + math.prod(self.weight_shape[1:]) * tiny
        return (patches.sqrt() * size(g, 3)).flatten(1)

    def _norm2_by_pixels(self) -> Tensor:
        """The Gram identity without patches: a_l·a_m = Σ_k x[l+k]·x[m+k], shifted windows of the pixels' Gram."""
        x, g = self.x.squeeze(1), self.g.squeeze(1)
        (height, width), (rows, columns) = x.shape[2:], g.shape[2:]
        pixels = kernels.gram(x.flatten(2).mT).view(-1, height, width, height, width)
        down, across = self.padding
        pixels = F.pad(pixels, (across, across, down, down) * 2)

        def windows(offset: int, dim: int, count: int) -> slice:
            start = offset * self.dilation[dim]
            return slice(start, start + self.stride[dim] * (count - 1) + 1, self.stride[dim])

        gram = torch.zeros((), dtype=pixels.dtype, device=x.device)
        for i in range(self.weight_shape[2]):
            for j in range(self.weight_shape[3]):
                r, c = windows(i, 0, rows), windows(j, 1, columns)
                gram = gram + pixels[:, r, c, r, c]
        gram_a = gram.reshape(len(x), rows * columns, rows * columns)
        inputs, outputs = math.prod(self.weight_shape[1:]), self.weight_shape[0]
        squares, sizes = kernels.from_grams(gram_a, kernels.gram(g.flatten(2).mT), inputs, outputs)
        return squares.clamp(min=0) + slack(sizes)

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One ordinary weight gradient, of operands of which one is weighted per sample."""
        if self._fast and self._unfolds:
            return self._outer().weighted(weights_B).view(self.weight_shape)
        if self._fast:
            x, g, window = self._channels_last()
            return kernels.weigh(x, g, weights_B, window).permute(1, 2, 0).reshape(self.weight_shape)
        x, g = self._weigh(weights_B)
        return _weight_gradient(x, g, self.weight_shape, self.stride, self.padding, self.dilation, self.groups)

    def _weigh(self, weights_B: Tensor) -> tuple[Tensor, Tensor]:
        """Both operands, all images in one dimension; the smaller one takes the weights."""
        x, g, less = self.x, self.g, self.x.numel() < self.g.numel()
        x, g = (scaled(x, weights_B), wide(g)) if less else (wide(x), scaled(g, weights_B))
        return x.flatten(0, 1), g.flatten(0, 1)

    def per_sample(self) -> Tensor:
        """(B, O, C/groups, *kernel)."""
        return self._outer().per_sample().view(-1, *self.weight_shape)

    def join(self, other: Form) -> "Patches | None":
        """More images of the same sample, if of one size; of one and the same image, the output gradients are added."""
        if not isinstance(other, Patches) or self._setting() != other._setting():
            return None
        if same(self.x, other.x):
            return replace(self, g=wide(self.g) + wide(other.g))
        return replace(self, x=side_by_side(self.x, other.x), g=side_by_side(self.g, other.g))

    def _setting(self) -> tuple[Any, ...]:
        """All but the operands, and of them the sizes."""
        rest = [getattr(self, f.name) for f in fields(self) if f.name not in ("x", "g")]
        return (type(self), self.x.shape[2:], self.g.shape[2:], *rest)

    def _slice(self, chunk: slice) -> "Patches":
        return replace(self, x=self.x[chunk], g=self.g[chunk])

    def _outer(self) -> Outer:
        """The same gradients as outer products, groups beside the samples: (B·groups, K·L, P) and O/groups."""
        samples, images = self.x.shape[:2]
        space = len(self.stride)
        x = F.pad(self.x.flatten(0, 1), [p for pad in reversed(self.padding) for p in (pad, pad)])
        for d in range(space):  # a view (B·K, C, *L, *kernel): nothing is copied until the reshape
            reach = self.dilation[d] * (self.weight_shape[2 + d] - 1) + 1
            x = x.unfold(2 + d, reach, self.stride[d])[..., :: self.dilation[d]]
            x = x.narrow(2 + d, 0, self.g.shape[3 + d])  # a transposed convolution's padding may make room for more
        x = x.unflatten(0, (samples, images)).unflatten(2, (self.groups, -1))  # (B, K, G, C/G, *L, *kernel)
        positions, kernel = range(4, 4 + space), range(4 + space, 4 + 2 * space)
        # Positions last: they lie side by side in memory, so the copy runs along them.
        a = x.permute(0, 2, 3, *kernel, 1, *positions).flatten(-1 - space).flatten(2, -2).flatten(0, 1)
        g = self.g.unflatten(2, (self.groups, -1))  # (B, K, G, O/G, *L)
        g = g.permute(0, 2, 3, 1, *positions).flatten(3).flatten(0, 1)
        return Outer(a.mT, g.mT)


@dataclass(frozen=True)
class TransposedPatches(Patches):
    """`Patches` with the roles exchanged: ``x`` holds the output gradient and ``g`` the input."""

    output_padding: tuple[int, ...]

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One ordinary weight gradient of the transposed convolution."""
        x, g = self._weigh(weights_B)
        setting = self.weight_shape, self.stride, self.padding, self.dilation, self.groups
        return _weight_gradient(g, x, *setting, self.output_padding)


def _weight_gradient(
    x: Tensor, g: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int, output_padding: Sequence[int] | None = None,
) -> Tensor:  # fmt: skip
    """torch's own gradient of a weight, from its input and output gradient.

    Args:
        output_padding: of a transposed convolution.
    """
    grad: Tensor = torch.ops.aten.convolution_backward(
        g, x, g.new_empty(shape), None, stride, padding, dilation, output_padding is not None,
        output_padding or [0] * len(stride), groups, [False, True, False],
    )[1]  # fmt: skip
    return grad


def _in_groups(
    x: Tensor, g: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int,
) -> Tensor:  # fmt: skip
    """Each sample's gradient of a weight, (B, *shape), from (B, K, channels, *space): samples stand beside groups."""
    out, (outputs, *inner) = x.new_empty(len(x), *shape), shape
    for chunk in chunks(len(x), max(LEAST, CACHED // math.prod(shape))):
        samples = len(out[chunk])
        images, given = (t[chunk].transpose(0, 1).flatten(1, 2) for t in (x, g))  # (K, samples·channels, *space)
        many = samples * outputs, *inner
        made = _weight_gradient(images, given, many, stride, padding, dilation, samples * groups)
        out[chunk] = made.unflatten(0, (samples, outputs))
    return out


# An operation of our own: the compiler would lay out the many groups of one image with their channels last. Eager steps
# do without: to call it takes longer than a small convolution.
@torch.library.custom_op("dpscale::weight_gradients", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _weight_gradients(
    x: Tensor, g: Tensor, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int,
) -> Tensor:  # fmt: skip
    return _in_groups(x, g, shape, stride, padding, dilation, groups)


@_weight_gradients.register_fake
def _(x: Tensor, g: Tensor, shape: Sequence[int], *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], *shape)


class Convolution(Rule):
    """The rule of `torch.conv1d`, `conv2d` and `conv3d`."""

    functions: tuple[Callable[..., Any], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
    names: tuple[str, ...] = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    trainable = ("weight", "bias")

    def accepts(self, call: Call) -> bool:
        """The batch must be in dimension 0."""
        return call.layout.dim == 0 and call.arguments["input"].ndim == call.arguments["weight"].ndim

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Patches for the weight, sums over positions for the bias."""
        g_rows = call.rows(g)
        if "weight" in call.wanted:
            yield "weight", self.patches(call, call.rows(as_multiplied(call.arguments["input"], g)), g_rows)
        if "bias" in call.wanted:
            yield "bias", Dense(wide(g_rows).transpose(1, 2).flatten(2).sum(2))

    def patches(self, call: Call, x: Tensor, g: Tensor) -> Patches:
        """The gradients of the weight, from the rows of the input and of the output's gradient."""
        shape: torch.Size = call.arguments["weight"].shape
        stride, dilation = (per_dim(call.get(name, 1), len(shape) - 2) for name in ("stride", "dilation"))
        x, padding = _padded(x, call.get("padding", 0), dilation, shape[2:])
        return Patches(x, g, shape, stride, padding, dilation, call.get("groups", 1))


class TransposedConvolution(Convolution):
    """The rule of `torch.conv_transpose1d`, `conv_transpose2d` and `conv_transpose3d`."""

    functions = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
    names = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

    def patches(self, call: Call, x: Tensor, g: Tensor) -> Patches:
        """Those of the convolution that takes the output's gradient to the input's."""
        plain = super().patches(call, g, x)
        output_padding = per_dim(call.get("output_padding", 0), len(plain.stride))
        return TransposedPatches(**vars(plain), output_padding=output_padding)


def per_dim(value: Any, dims: int) -> tuple[int, ...]:
    """One number per dimension, from a number or a sequence of one or of all."""
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * dims if len(values) == 1 else values


def _padded(x: Tensor, padding: Any, dilation: Sequence[int], kernel: Sequence[int]) -> tuple[Tensor, tuple[int, ...]]:
    """Resolve 'same' and 'valid'. An even reach makes 'same' uneven: then the input is padded by the odd cell."""
    if not isinstance(padding, str):
        return x, per_dim(padding, len(kernel))
    if padding == "valid":
        return x, (0,) * len(kernel)
    totals = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
    if any(t % 2 for t in totals):
        x = F.pad(x, [p for t in reversed(totals) for p in (0, t % 2)])
    return x, tuple(t // 2 for t in totals)
