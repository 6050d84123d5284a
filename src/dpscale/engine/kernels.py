"""Kernels for CUDA where they pay, each with a plain-PyTorch twin that it is tested against; the CPU needs none.

Two families, both over operands as they are (16-bit ones are multiplied exactly) with sums in float32:

`gram_norm2`: Σ_{t,u} (a_t·a_u)(g_t·g_u) of each sample, without ever writing the two T×T matrices, and half of them
only: they are symmetric, so a tile above the diagonal counts twice.

`square`, `keep`, `weigh`: the per-sample products G_b = Σ_l g_l x_{l+tap}ᵀ themselves, a tile at a time, from channels-
last operands. A linear layer has one tap; a convolution has one per entry of its window, and is never unfolded. What
becomes of a tile is the difference: its squares are added up and it is forgotten; it is written; it is weighted and
added over the samples. The weight is applied to the float32 tile and not to a 16-bit operand, where its rounding would
let a sample exceed its bound. A second tile for the sum of samples would not fit into the registers: instead the tile
that adds up is rescaled, from one sample's weight to the next one's, and multiplied by the last at the end.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.layout import example_size

try:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # CPU builds of torch come without it
    triton = None

SHORT = 16
"""Fewer positions than this per sample, and a tensor core's tile is mostly empty."""

FAINT = 2.0**-86
"""`weigh` leaves a sample out whose weight is smaller (its norm some 10²⁶ bounds): rescaling to it could overflow."""

LONG = 8192
"""More inputs or outputs than this, and a Gram matrix is worth several programs."""


def available(*operands: Tensor) -> bool:
    """Whether all kernels take these operands: 16-bit ones on CUDA. At 32 bits, products by cuBLAS are faster."""
    return triton is not None and all(t.is_cuda and t.element_size() == 2 for t in operands)


def gram_available(*operands: Tensor) -> bool:
    """Whether `gram_norm2` takes them: also float32, where it may be multiplied as TF32."""
    rounded = torch.backends.cuda.matmul.allow_tf32
    single = triton is not None and rounded and all(t.is_cuda and t.dtype == torch.float32 for t in operands)
    return single or available(*operands)


# -- Gram ------------------------------------------------------------------------------------------------------------


def gram_norm2_plain(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """The twin: (squared norms, norms of the terms (B, T))."""
    return from_grams(torch.bmm(a_BTI, a_BTI.mT), torch.bmm(g_BTO, g_BTO.mT), a_BTI.shape[2], g_BTO.shape[2])


def from_grams(gram_a: Tensor, gram_g: Tensor, inputs: int, outputs: int) -> tuple[Tensor, Tensor]:
    """(Squared norms, norms of the terms (B, T)) from the two Gram matrices of each sample, of so many features."""
    product = upper_product(gram_a, gram_g, inputs, outputs)
    return product.sum((1, 2)), product.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt()


def upper_product(gram_a: Tensor, gram_g: Tensor, inputs: int, outputs: int) -> Tensor:
    """Inner products of ``inputs`` numbers times others of ``outputs``, and what underflow can have taken from them.

    Squares of small numbers vanish: (g·g) may be 0 where (a·a)(g·g) is not. Each of the numbers that were added up may
    have lost `tiny`, the smallest that is held to full precision.
    """
    tiny = torch.finfo(gram_a.dtype).tiny
    return gram_a * gram_g + (outputs * tiny) * gram_a.abs() + (inputs * tiny) * gram_g.abs()


def gram_norm2(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of Σ_t g_t a_tᵀ, and the norms of the terms, by the kernel.

    The kernels leave sums of a few parts to whoever compiles around them: they go along with what follows.
    """
    if not a_BTI.is_cuda:
        return gram_norm2_plain(a_BTI.float(), g_BTO.float())
    length, long = a_BTI.shape[1], max(a_BTI.shape[2], g_BTO.shape[2]) > LONG
    if not long:
        a, g = (_rows_side_by_side(aligned(t)) for t in (a_BTI, g_BTO))
        parts, sizes = torch.ops.dpscale.gram_norm2(a, g, _block(a), _precision())
        return parts.sum(1), sizes
    # One operand is so long that a sample's few tiles would keep few processors busy for long: its tiles are made in
    # parts, and are small enough to be written.
    tiles_a, tiles_g = (
        torch.ops.dpscale.gram_tiles(_rows_side_by_side(aligned(t)), _block(t), _precision()) for t in (a_BTI, g_BTO)
    )
    product = upper_product(tiles_a, tiles_g, a_BTI.shape[2], g_BTO.shape[2])  # (B, pairs, block, block)
    block = product.shape[2]
    column = torch.arange(-(-length // block), device=product.device)
    on_diagonal = column * (column + 3) // 2  # pairs are counted column by column
    terms = product[:, on_diagonal].diagonal(dim1=2, dim2=3).clamp(min=0).sqrt().flatten(1)[:, :length]
    twice = torch.full((product.shape[1],), 2.0, device=product.device).index_fill(0, on_diagonal, 1.0)
    return (product.sum((2, 3)) * twice).sum(1), terms


def gram(t_BTC: Tensor) -> Tensor:
    """The inner products of every two positions, (B, T, T), in float32 or wider: 16-bit numbers multiply exactly."""
    if t_BTC.is_cuda and t_BTC.element_size() == 2:
        return torch.bmm(t_BTC, t_BTC.mT, out_dtype=torch.float32)
    wide = t_BTC.to(torch.promote_types(t_BTC.dtype, torch.float32))
    return torch.bmm(wide, wide.mT)


def aligned(t: Tensor) -> Tensor:
    """On CUDA, rows of a multiple of 16 numbers, as fast loads need: a vocabulary of odd size gets columns of zeros.

    Long rows are of whole lines of memory (128 bytes), as a compiler lays rows out: it can write them padded at once.
    """
    odd = -t.shape[-1] % (128 // t.element_size() if t.shape[-1] > LONG else 16)
    pays = t.is_cuda and (t.element_size() == 2 or t.shape[-1] > 256)
    return torch.nn.functional.pad(t, (0, odd)) if odd and pays else t


def _precision() -> str:
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


# -- products --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Which input position a tap of output position (r, s) sees: (r·stride - padding + tap·dilation, …)."""

    kernel: tuple[int, int] = (1, 1)
    stride: tuple[int, int] = (1, 1)
    padding: tuple[int, int] = (0, 0)
    dilation: tuple[int, int] = (1, 1)

    def numbers(self) -> list[int]:
        """As an operation's argument."""
        return [*self.kernel, *self.stride, *self.padding, *self.dilation]


POINT = Window()
"""A linear layer's: position t sees position t."""


def products_plain(x_BHWC: Tensor, g_BRSO: Tensor, window: Window = POINT) -> Tensor:
    """The twin of `keep`: (B, taps, O, C), in float32 or wider."""
    wide = torch.promote_types(x_BHWC.dtype, torch.float32)
    (down, across), (top, left), (dil_h, dil_w) = window.stride, window.padding, window.dilation
    x = torch.nn.functional.pad(x_BHWC.to(wide), (0, 0, left, left, top, top))
    rows, columns = g_BRSO.shape[1:3]
    g = g_BRSO.to(wide).flatten(1, 2)
    taps = []
    for i in range(window.kernel[0]):
        for j in range(window.kernel[1]):
            h, w = i * dil_h, j * dil_w
            seen = x[:, h : h + down * (rows - 1) + 1 : down, w : w + across * (columns - 1) + 1 : across]
            taps.append(torch.bmm(g.mT, seen.flatten(1, 2)))
    return torch.stack(taps, 1)


def square(x_BHWC: Tensor, g_BRSO: Tensor, window: Window = POINT) -> Tensor:
    """Squared norms (B,) of the products, which are forgotten."""
    if not x_BHWC.is_cuda:
        return products_plain(x_BHWC, g_BRSO, window).square().sum((1, 2, 3))
    x, g = _rows_side_by_side(x_BHWC), _rows_side_by_side(g_BRSO)
    found: Tensor = torch.ops.dpscale.square_products(x, g, window.numbers(), _precision())
    return found


def keep(x_BHWC: Tensor, g_BRSO: Tensor, window: Window = POINT) -> Tensor:
    """The products (B, taps, O, C), rounded to the operands' precision as autograd rounds them."""
    if not x_BHWC.is_cuda:
        return products_plain(x_BHWC, g_BRSO, window).to(x_BHWC.dtype)
    x, g = _rows_side_by_side(x_BHWC), _rows_side_by_side(g_BRSO)
    found: Tensor = torch.ops.dpscale.keep_products(x, g, window.numbers(), _precision())
    return found


def weigh(x_BHWC: Tensor, g_BRSO: Tensor, weights_B: Tensor, window: Window = POINT) -> Tensor:
    """Σ_b w_b·(products of b), (taps, O, C), in float32."""
    weights = weights_B.float()
    weights = weights.where(weights.abs() >= FAINT, 0.0)
    if not x_BHWC.is_cuda:
        return torch.einsum("b,btoc->toc", weights, products_plain(x_BHWC, g_BRSO, window))
    x, g = _rows_side_by_side(x_BHWC), _rows_side_by_side(g_BRSO)
    runs = _weighted_parts(x, g, window.numbers())
    parts: Tensor = torch.ops.dpscale.weigh_products(x, g, weights, window.numbers(), runs, _precision())
    return parts.sum(0) if runs > 1 else parts[0]


def weigh_wide(a_BTI: Tensor, g_BTO: Tensor, weights_B: Tensor) -> Tensor:
    """Σ_b w_b Σ_t g_t a_tᵀ, (O, I), of wide operands: one matrix product. The smaller operand takes the weights.

    On CUDA a compiler must not look inside: it would scale the operands of all layers at once, and hold them.
    """
    if a_BTI.is_cuda:
        found: Tensor = torch.ops.dpscale.weigh_wide(a_BTI, g_BTO, weights_B)
        return found
    return _scaled_product(a_BTI, g_BTO, weights_B)


def _scaled_product(a_BTI: Tensor, g_BTO: Tensor, weights_B: Tensor) -> Tensor:
    w = weights_B.to(g_BTO.dtype).view(-1, 1, 1)
    a, g = (a_BTI * w, g_BTO) if a_BTI.shape[2] < g_BTO.shape[2] else (a_BTI, g_BTO * w)
    return torch.mm(g.flatten(0, 1).t(), a.flatten(0, 1))


if triton is not None:
    TINY = tl.constexpr(2.0**-126)

    @triton.jit
    def _place(pair):  # type: ignore[no-untyped-def]
        """(row, column) of a pair of tiles with row <= column, counted column by column."""
        column = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
        column = tl.where(column * (column + 1) // 2 > pair, column - 1, column)
        column = tl.where((column + 1) * (column + 2) // 2 <= pair, column + 1, column)
        return pair - column * (column + 1) // 2, column

    @triton.jit  # type: ignore[untyped-decorator]
    def _tile(  # type: ignore[no-untyped-def]
        t, rows, columns, length, t_t, first, last,
        BLOCK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """Inner products of the positions ``rows`` with ``columns`` over the features first..last."""
        ks = tl.arange(0, BK)
        acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(first, last, BK):
            inside = (k + ks) < last
            left = tl.load(t + rows[:, None] * t_t + (k + ks)[None, :],
                           mask=(rows < length)[:, None] & inside[None, :], other=0.0)  # fmt: skip
            right = tl.load(t + columns[:, None] * t_t + (k + ks)[None, :],
                            mask=(columns < length)[:, None] & inside[None, :], other=0.0)  # fmt: skip
            acc = tl.dot(left, tl.trans(right), acc, input_precision=PRECISION)
        return acc

    @triton.jit  # type: ignore[untyped-decorator]
    def _gram_kernel(  # type: ignore[no-untyped-def]
        a, g, out, sizes, length, inputs, outputs, pairs, a_b, a_t, g_b, g_t,
        BLOCK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One pair of tiles of one sample: both Gram tiles, multiplied and added up."""
        b = tl.program_id(1).to(tl.int64)
        pair = tl.program_id(0)
        row, column = _place(pair)
        rows = row * BLOCK + tl.arange(0, BLOCK)
        columns = column * BLOCK + tl.arange(0, BLOCK)
        gram_a = _tile(a + b * a_b, rows, columns, length, a_t, 0, inputs, BLOCK, BK, PRECISION)
        gram_g = _tile(g + b * g_b, rows, columns, length, g_t, 0, outputs, BLOCK, BK, PRECISION)
        product = gram_a * gram_g + (outputs * TINY) * tl.abs(gram_a) + (inputs * TINY) * tl.abs(gram_g)
        total = tl.sum(tl.sum(product, 1), 0)
        # Partial sums are written, not added atomically: the same batch gives the same norm every time.
        tl.store(out + b * pairs + pair, tl.where(row == column, total, 2.0 * total))
        if row == column:
            same = rows[:, None] == columns[None, :]
            term = tl.sqrt(tl.maximum(tl.sum(tl.where(same, product, 0.0), 1), 0.0))
            tl.store(sizes + b * length + rows, term, mask=rows < length)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gram_tiles_kernel(  # type: ignore[no-untyped-def]
        t, out, length, features, pairs, each, t_b, t_t,
        BLOCK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One pair of tiles of one sample, over one part of the features: (parts, B, pairs, BLOCK, BLOCK)."""
        b, part, pair = tl.program_id(1).to(tl.int64), tl.program_id(2), tl.program_id(0)
        row, column = _place(pair)
        rows = row * BLOCK + tl.arange(0, BLOCK)
        columns = column * BLOCK + tl.arange(0, BLOCK)
        last = tl.minimum((part + 1) * each, features)
        acc = _tile(t + b * t_b, rows, columns, length, t_t, part * each, last, BLOCK, BK, PRECISION)
        inside = tl.arange(0, BLOCK)
        place = ((part * tl.num_programs(1) + b) * pairs + pair) * BLOCK * BLOCK
        tl.store(out + place + inside[:, None] * BLOCK + inside[None, :], acc)

    @triton.jit  # type: ignore[untyped-decorator]
    def _products_kernel(  # type: ignore[no-untyped-def]
        x, g, weights, out, squares,
        samples, each, height, width, channels, columns, positions, outputs, tiles_o, tiles_c,
        kernel_w, down, across, top, left, dilation_h, dilation_w,
        x_b, x_h, x_w, g_b, g_r, g_s,
        DIRECT: tl.constexpr, MODE: tl.constexpr,
        BO: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One tile (tap, outputs, channels), over ``each`` samples in turn: see the head of the file for the modes."""
        tile = tl.program_id(0)
        part = tl.program_id(1)
        cs = (tile % tiles_c) * BC + tl.arange(0, BC)
        os = (tile // tiles_c % tiles_o) * BO + tl.arange(0, BO)
        tap = tile // (tiles_c * tiles_o)
        h0 = tap // kernel_w * dilation_h - top
        w0 = tap % kernel_w * dilation_w - left
        ls = tl.arange(0, BK)
        place = os[:, None] * channels + cs[None, :]
        fits = (os < outputs)[:, None] & (cs < channels)[None, :]
        chunks = tl.cdiv(positions, BK)
        first = part * each
        acc = tl.zeros((BO, BC), dtype=tl.float32)
        weight = tl.full((), 1.0, tl.float32)  # acc holds the weighted sum of the samples so far, divided by this
        for turn in range(0, (tl.minimum(first + each, samples) - first) * chunks):
            b = (first + turn // chunks).to(tl.int64)
            chunk = turn % chunks
            at = chunk * BK + ls
            there = at < positions
            if MODE == "weigh":
                given = tl.load(weights + b)
                there = at < tl.where(given != 0.0, positions, 0)  # nothing of a sample that does not count
                if chunk == 0:
                    now = tl.where(given != 0.0, given, weight)
                    acc *= weight / now
                    weight = now
            if DIRECT:
                from_x = at * x_w
                from_g = at * g_s
                seen = there
            else:
                r = at // columns
                s = at - r * columns
                h = r * down + h0
                w = s * across + w0
                seen = there & (h >= 0) & (h < height) & (w >= 0) & (w < width)
                from_x = h * x_h + w * x_w
                from_g = r * g_r + s * g_s
            g_tile = tl.load(g + b * g_b + from_g[:, None] + os[None, :],
                             mask=there[:, None] & (os < outputs)[None, :], other=0.0)  # fmt: skip
            x_tile = tl.load(x + b * x_b + from_x[:, None] + cs[None, :],
                             mask=seen[:, None] & (cs < channels)[None, :], other=0.0)  # fmt: skip
            acc = tl.dot(tl.trans(g_tile), x_tile, acc, input_precision=PRECISION)
        numbers = tl.num_programs(0) // (tiles_c * tiles_o) * outputs * channels
        where = (part.to(tl.int64) * numbers + tap * outputs * channels) + place
        if MODE == "weigh":
            tl.store(out + where, acc * weight, mask=fits)
        elif MODE == "keep":
            tl.store(out + where, acc.to(out.dtype.element_ty), mask=fits)
        else:
            tl.store(squares + part * tl.num_programs(0) + tile, tl.sum(tl.sum(acc * acc, 1), 0))

    @triton.jit  # type: ignore[untyped-decorator]
    def _weigh_rows_kernel(  # type: ignore[no-untyped-def]
        x, g, weights, out, samples, each, chunks, tiles_c, outputs, channels,
        BO: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    ):  # fmt: skip
        """`_products_kernel` for one tap and mode "weigh", with blocks that the memory's own engine fetches.

        Samples of weight 0 are as a rule those at the end of a batch. Then the loop over all others is one: blocks of
        the next sample are on their way while the last one's are multiplied. Past the last position and column a block
        is zero.
        """
        tile = tl.program_id(0)
        part = tl.program_id(1)
        o0 = tile // tiles_c * BO
        c0 = tile % tiles_c * BC
        count = tl.full((), 0, tl.int32)  # of samples that have a weight, and where the last of them ends
        last = tl.full((), 0, tl.int32)
        for start in range(0, samples, 128):
            places = start + tl.arange(0, 128)
            there = tl.load(weights + places, mask=places < samples, other=0.0) != 0.0
            count += tl.sum(there.to(tl.int32), 0)
            last = tl.maximum(last, tl.max(tl.where(there, places + 1, 0), 0))
        first = part * each
        end = tl.minimum(first + each, last)
        acc = tl.zeros((BO, BC), dtype=tl.float32)
        weight = tl.full((), 1.0, tl.float32)  # acc holds the weighted sum of the samples so far, divided by this
        if count == last:
            for turn in tl.range(0, tl.maximum(end - first, 0) * chunks, num_stages=STAGES):
                b = first + turn // chunks
                chunk = turn % chunks
                if chunk == 0:
                    now = tl.load(weights + b)
                    acc *= weight / now
                    weight = now
                g_tile = g.load([b, chunk * BK, o0]).reshape(BK, BO)
                x_tile = x.load([b, chunk * BK, c0]).reshape(BK, BC)
                acc = tl.dot(tl.trans(g_tile), x_tile, acc)
        else:
            for b in range(first, end):
                given = tl.load(weights + b)
                now = tl.where(given != 0.0, given, weight)
                acc *= weight / now
                weight = now
                for chunk in tl.range(0, tl.where(given != 0.0, chunks, 0), num_stages=STAGES):
                    g_tile = g.load([b, chunk * BK, o0]).reshape(BK, BO)
                    x_tile = x.load([b, chunk * BK, c0]).reshape(BK, BC)
                    acc = tl.dot(tl.trans(g_tile), x_tile, acc)
        os = o0 + tl.arange(0, BO)
        cs = c0 + tl.arange(0, BC)
        where = out + part.to(tl.int64) * outputs * channels + os.to(tl.int64)[:, None] * channels + cs[None, :]
        tl.store(where, acc * weight, mask=(os < outputs)[:, None] & (cs < channels)[None, :])


def _block(t_BTC: Tensor) -> int:
    """Positions in a tile: large tiles where there are programs enough."""
    samples, length, _ = t_BTC.shape
    return 128 if length >= 128 and example_size(samples) >= 44 else 64 if length >= 64 else 32


def _pairs(length: int, block: int) -> int:
    """Pairs of tiles on or above the diagonal."""
    tiles = -(-length // block)
    return tiles * (tiles + 1) // 2


def _rows_side_by_side(t: Tensor) -> Tensor:
    """As the kernels take it. Outside of an operation a compiler makes the copy along with whatever made ``t``."""
    return t if t.stride(-1) == 1 else t.contiguous()


@torch.library.custom_op("dpscale::gram_norm2", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _gram_norm2(a: Tensor, g: Tensor, block: int, precision: str) -> tuple[Tensor, Tensor]:
    a, g = _rows_side_by_side(a), _rows_side_by_side(g)
    samples, t, i = a.shape
    pairs = _pairs(t, block)
    out = torch.empty(samples, pairs, dtype=torch.float32, device=a.device)
    sizes = torch.empty(samples, t, dtype=torch.float32, device=a.device)
    launch: Any = _gram_kernel[(pairs, samples)]
    launch(
        a, g, out, sizes, t, i, g.shape[2], pairs, *a.stride()[:2], *g.stride()[:2],
        BLOCK=block, BK=128 // a.element_size(), PRECISION=precision, num_warps=8 if block == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out, sizes


@_gram_norm2.register_fake
def _(a: Tensor, g: Tensor, block: int, precision: str) -> tuple[Tensor, Tensor]:
    shape = a.shape[0], _pairs(a.shape[1], block)
    return a.new_empty(shape, dtype=torch.float32), a.new_empty(a.shape[:2], dtype=torch.float32)


@torch.library.custom_op("dpscale::gram_tiles", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _gram_tiles(t: Tensor, block: int, precision: str) -> Tensor:
    t = _rows_side_by_side(t)
    samples, length, features = t.shape
    pairs = _pairs(length, block)
    step = 128 // t.element_size()
    parts = max(1, min(features // (8 * step), 264 // (pairs * samples)))
    each = -(-features // (parts * step)) * step
    parts = -(-features // each)
    out = torch.empty(parts, samples, pairs, block, block, dtype=torch.float32, device=t.device)
    launch: Any = _gram_tiles_kernel[(pairs, samples, parts)]
    launch(
        t, out, length, features, pairs, each, *t.stride()[:2],
        BLOCK=block, BK=step, PRECISION=precision, num_warps=8 if block == 128 else 4, num_stages=4,
    )  # fmt: skip
    return out.sum(0)


@_gram_tiles.register_fake
def _(t: Tensor, block: int, precision: str) -> Tensor:
    return t.new_empty(t.shape[0], _pairs(t.shape[1], block), block, block, dtype=torch.float32)


def _launch(
    mode: str, x: Tensor, g: Tensor, weights: Tensor | None, out: Tensor | None, window: Sequence[int], precision: str,
    parts: int,
) -> Tensor:  # fmt: skip
    """Run the kernel over ``parts`` runs of samples; the partial squares, (parts, tiles)."""
    x, g = _rows_side_by_side(x), _rows_side_by_side(g)
    (samples, height, width, channels), (rows, columns, outputs) = x.shape, g.shape[1:]
    bo, bc, bk, warps = _shape(channels, outputs, x.element_size())
    stages = 5 if mode == "weigh" else 3  # tiles under way: so that two programs fit; the load of a weight counts twice
    tiles_o, tiles_c = -(-outputs // bo), -(-channels // bc)
    tiles = window[0] * window[1] * tiles_o * tiles_c
    squares = torch.empty(parts if mode == "square" else 1, tiles, dtype=torch.float32, device=x.device)
    launch: Any = _products_kernel[(tiles, parts)]
    direct = list(window) == POINT.numbers() and height == rows == 1
    launch(
        x, g, squares if weights is None else weights, squares if out is None else out, squares,
        samples, -(-samples // parts), height, width, channels, columns, rows * columns, outputs, tiles_o, tiles_c,
        *window[1:], *x.stride()[:3], *g.stride()[:3],
        DIRECT=direct, MODE=mode, BO=bo, BC=bc, BK=bk, PRECISION=precision, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return squares


def _fetched(t: Tensor) -> bool:
    """Whether the memory's engine (from Hopper on) fetches blocks of its rows: they must begin at multiples of 16 bytes
    and be worth a block."""
    starts = [t.data_ptr(), *(step * t.element_size() for step in t.stride()[:-1])]
    able = torch.cuda.get_device_capability(t.device)[0] >= 9 and t.stride(-1) == 1
    return able and t.shape[-1] > 32 and all(start % 16 == 0 for start in starts)


def _launch_rows(x: Tensor, g: Tensor, weights: Tensor, out: Tensor, parts: int) -> None:
    """Run `_weigh_rows_kernel` over ``parts`` runs of samples."""
    samples, _, positions, channels = x.shape
    outputs = g.shape[-1]
    bo, bc, bk, warps = _shape(channels, outputs, x.element_size())
    blocks = [
        TensorDescriptor(t, [samples, positions, t.shape[-1]], [t.stride(0), t.stride(2), 1], [1, bk, width])
        for t, width in ((x, bc), (g, bo))
    ]
    tiles_c = -(-channels // bc)
    launch: Any = _weigh_rows_kernel[(-(-outputs // bo) * tiles_c, parts)]
    launch(
        *blocks, weights, out, samples, -(-samples // parts), -(-positions // bk), tiles_c, outputs, channels,
        BO=bo, BC=bc, BK=bk, STAGES=3, num_warps=4 if x.element_size() == 2 else warps,
    )  # fmt: skip


def _shape(channels: int, outputs: int, size: int) -> tuple[int, int, int, int]:
    """(Outputs, channels and positions in a tile, warps): of the operands alone, so that all modes agree."""
    bo, bc = (128 if n > 64 else 64 if n > 32 else 32 if n > 16 else 16 for n in (outputs, channels))
    return bo, bc, 128 // size, 8 if bo * bc == 128 * 128 else 4


def _weighted_parts(x: Tensor, g: Tensor, window: Sequence[int]) -> int:
    """Runs of samples that keep all processors busy: as few as possible of those that leave no long tail.

    They serve any number of samples: there may be runs of none.
    """
    samples = example_size(x.shape[0])
    bo, bc, bk, _ = _shape(x.shape[-1], g.shape[-1], x.element_size())
    tiles = window[0] * window[1] * -(-g.shape[-1] // bo) * -(-x.shape[-1] // bc)
    places = 2 * torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 8
    choices = sorted({-(-samples // each) for each in range(1, samples + 1)})
    in_rows = list(window) == POINT.numbers() and x.shape[1] == 1
    chunks, numbers = -(-x.shape[2] // bk), g.shape[-1] * x.shape[-1]

    def cost(parts: int) -> float:  # rounds of programs, the samples that each goes through, and the sums to add up
        rounds, each = -(-tiles * parts // places), -(-samples // parts)
        if not in_rows:
            return rounds * (each + 1) + 0.05 * parts * tiles / places
        pace = 0.5 if tiles * parts <= places // 2 else 0.72  # microseconds on an H200; two programs share a processor
        return rounds * (each * chunks * pace + 4) + (0 if parts == 1 else 3 + (parts + 1) * numbers / 9e5)

    return min(choices, key=cost)


@torch.library.custom_op("dpscale::weigh_wide", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _weigh_wide(a_BTI: Tensor, g_BTO: Tensor, weights_B: Tensor) -> Tensor:
    return _scaled_product(a_BTI, g_BTO, weights_B)


@_weigh_wide.register_fake
def _(a_BTI: Tensor, g_BTO: Tensor, weights_B: Tensor) -> Tensor:
    return g_BTO.new_empty(g_BTO.shape[2], a_BTI.shape[2])


@torch.library.custom_op("dpscale::square_products", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _square_products(x: Tensor, g: Tensor, window: Sequence[int], precision: str) -> Tensor:
    return _launch("square", x, g, None, None, window, precision, len(x)).sum(1)


@_square_products.register_fake
def _(x: Tensor, g: Tensor, window: Sequence[int], precision: str) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("dpscale::keep_products", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _keep_products(x: Tensor, g: Tensor, window: Sequence[int], precision: str) -> Tensor:
    out = x.new_empty(len(x), window[0] * window[1], g.shape[-1], x.shape[-1])
    _launch("keep", x, g, None, out, window, precision, len(x))
    return out


@_keep_products.register_fake
def _(x: Tensor, g: Tensor, window: Sequence[int], precision: str) -> Tensor:
    return x.new_empty(x.shape[0], window[0] * window[1], g.shape[-1], x.shape[-1])


@torch.library.custom_op("dpscale::weigh_products", mutates_args=(), tags=(torch.Tag.needs_exact_strides,))
def _weigh_products(x: Tensor, g: Tensor, weights: Tensor, window: Sequence[int], parts: int, precision: str) -> Tensor:
    shape = parts, window[0] * window[1], g.shape[-1], x.shape[-1]
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    if list(window) == POINT.numbers() and x.shape[1] == 1 and _fetched(x) and _fetched(g):
        _launch_rows(x, g, weights, out, parts)
    else:
        _launch("weigh", x, g, weights, out, window, precision, parts)
    return out


@_weigh_products.register_fake
def _(x: Tensor, g: Tensor, weights: Tensor, window: Sequence[int], parts: int, precision: str) -> Tensor:
    shape = parts, window[0] * window[1], g.shape[-1], x.shape[-1]
    return x.new_empty(shape, dtype=torch.float32)
