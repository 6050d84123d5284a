"""Kernels for CUDA where they pay, each with a plain-PyTorch twin that it is tested against; the CPU needs none.

`gram_norm2`: Σ_{t,u} (a_t·a_u)(g_t·g_u) of each sample, without ever writing the two T×T matrices, and half of them
only: they are symmetric, so a tile above the diagonal counts twice.
"""

from typing import Any

import torch
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None


def available(*operands: Tensor) -> bool:
    """Whether the kernels pay on these operands: 16-bit ones on CUDA. At 32 bits cuBLAS was faster on an H200."""
    return triton is not None and all(t.is_cuda and t.element_size() == 2 for t in operands)


def gram_norm2_plain(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """The twin: (squared norms, norms of the terms (B, T))."""
    return from_grams(torch.bmm(a_BTI, a_BTI.mT), torch.bmm(g_BTO, g_BTO.mT))


def from_grams(gram_a: Tensor, gram_g: Tensor) -> tuple[Tensor, Tensor]:
    """(Squared norms, norms of the terms (B, T)) from the two Gram matrices of each sample."""
    diagonals = gram_a.diagonal(dim1=1, dim2=2).clamp(min=0) * gram_g.diagonal(dim1=1, dim2=2).clamp(min=0)
    return (gram_a * gram_g).sum((1, 2)), diagonals.sqrt()


if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _gram_kernel(  # type: ignore[no-untyped-def]
        a, g, out, sizes, length, inputs, outputs, pairs, tiles,
        a_b, a_t, a_i, g_b, g_t, g_o,
        BLOCK: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    ):  # fmt: skip
        """One pair (row, column) of tiles with row <= column, of one sample."""
        b = tl.program_id(1).to(tl.int64)
        pair = tl.program_id(0)
        # The pair's place in the triangle, counted column by column.
        column = ((tl.sqrt(8.0 * pair.to(tl.float32) + 1.0) - 1.0) / 2.0).to(tl.int32)
        column = tl.where(column * (column + 1) // 2 > pair, column - 1, column)
        column = tl.where((column + 1) * (column + 2) // 2 <= pair, column + 1, column)
        row = pair - column * (column + 1) // 2
        rows = row * BLOCK + tl.arange(0, BLOCK)
        columns = column * BLOCK + tl.arange(0, BLOCK)
        ks = tl.arange(0, BK)

        acc_a = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(0, inputs, BK):
            inside = (k + ks) < inputs
            left = tl.load(a + b * a_b + rows[:, None] * a_t + (k + ks)[None, :] * a_i,
                           mask=(rows < length)[:, None] & inside[None, :], other=0.0)  # fmt: skip
            right = tl.load(a + b * a_b + columns[None, :] * a_t + (k + ks)[:, None] * a_i,
                            mask=(columns < length)[None, :] & inside[:, None], other=0.0)  # fmt: skip
            acc_a = tl.dot(left, right, acc_a, input_precision=PRECISION)
        acc_g = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
        for k in range(0, outputs, BK):
            inside = (k + ks) < outputs
            left = tl.load(g + b * g_b + rows[:, None] * g_t + (k + ks)[None, :] * g_o,
                           mask=(rows < length)[:, None] & inside[None, :], other=0.0)  # fmt: skip
            right = tl.load(g + b * g_b + columns[None, :] * g_t + (k + ks)[:, None] * g_o,
                            mask=(columns < length)[None, :] & inside[:, None], other=0.0)  # fmt: skip
            acc_g = tl.dot(left, right, acc_g, input_precision=PRECISION)

        product = acc_a * acc_g
        total = tl.sum(tl.sum(product, 1), 0)
        # Partial sums are written, not added atomically: the same batch gives the same norm every time.
        tl.store(out + b * pairs + pair, tl.where(row == column, total, 2.0 * total))
        if row == column:
            same = rows[:, None] == columns[None, :]
            term = tl.sqrt(tl.maximum(tl.sum(tl.where(same, product, 0.0), 1), 0.0))
            tl.store(sizes + b * tiles * BLOCK + rows, term)


@torch.library.custom_op("dpscale::gram_norm2", mutates_args=())
def _gram_norm2(a: Tensor, g: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    samples, t, i = a.shape
    block = 128 if t >= 128 else 64 if t >= 64 else 32
    tiles = -(-t // block)
    pairs = tiles * (tiles + 1) // 2
    out = torch.empty(samples, pairs, dtype=torch.float32, device=a.device)
    sizes = torch.empty(samples, tiles * block, dtype=torch.float32, device=a.device)
    bk = 64 if a.element_size() == 2 else 32
    launch: Any = _gram_kernel[(pairs, samples)]
    launch(
        a, g, out, sizes, t, i, g.shape[2], pairs, tiles, *a.stride(), *g.stride(),
        BLOCK=block, BK=bk, PRECISION=precision, num_warps=8 if block == 128 else 4, num_stages=3,
    )  # fmt: skip
    return out.sum(1), sizes[:, :t].clone()


@_gram_norm2.register_fake
def _(a: Tensor, g: Tensor, precision: str) -> tuple[Tensor, Tensor]:
    return a.new_empty(a.shape[0], dtype=torch.float32), a.new_empty(a.shape[:2], dtype=torch.float32)


def gram_norm2(a_BTI: Tensor, g_BTO: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norms of Σ_t g_t a_tᵀ, and the norms of the terms, by the kernel.

    Operands of 16 bits are multiplied as they are, exactly, and added in float32.
    """
    precision = "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"
    out, sizes = torch.ops.dpscale.gram_norm2(a_BTI, g_BTO, precision)
    return out, sizes
