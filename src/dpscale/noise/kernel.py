"""The stream of `chacha` and the numbers of `gaussian` in one CUDA kernel, added to a tensor in place.

A lane works out one block: 16 words in registers, four numbers of them, and reads and writes the four entries that they
are added to. The integers are those of the library, and the numbers those of `gaussian`, to the bit: the kernel is
compiled without fused multiplications, and takes square roots that are correctly rounded.
"""

import struct
from typing import Any

import torch
from torch import Tensor

from dpscale.noise.gaussian import NUMBERS, cosine, log_of, sine

try:
    import triton
    import triton.language as tl
except ImportError:  # CPU builds of torch come without it
    triton = None

LANES, WARPS = 256, 4
"""Blocks of a program, and warps that share them."""


def available(device: torch.device) -> bool:
    """Whether the kernel can run there."""
    return device.type == "cuda" and triton is not None


def add_(flat: Tensor, key: bytes, first: int, std: float, lanes: int = LANES, warps: int = WARPS) -> None:
    """Add ``std`` times the numbers from ``first`` on of the stream of ``key``, in place.

    Args:
        flat: of one dimension, side by side in memory, float32 or float64.
        key: 32 bytes.
        first: number of the first entry's number in the stream.
        std: of what is added.
        lanes, warps: a matter of speed.
    """
    if len(flat):
        block, before = divmod(first, NUMBERS)
        blocks = -(-(before + len(flat)) // NUMBERS)
        launch: Any = _add_kernel[(-(-blocks // lanes),)]
        launch(flat, len(flat), before, *_scalars(key + block.to_bytes(8, "little") + struct.pack("<d", 0.5 * std)),
               EVEN=_even(flat, before), LANES=lanes, num_warps=warps, enable_fp_fusion=False)  # fmt: skip


def words_(out: Tensor, key: bytes, first: int) -> None:
    """Write blocks ``first`` and following of the stream of ``key`` into int32 ``out``, (blocks, 16)."""
    launch: Any = _words_kernel[(-(-len(out) // LANES),)]
    launch(out, len(out), *_scalars(key + first.to_bytes(8, "little")), LANES=LANES, num_warps=WARPS)


def _even(flat: Tensor, before: int) -> bool:
    """Whether every lane's entries begin at a multiple of their four: they are then read and written at once."""
    return before == 0 and len(flat) % NUMBERS == 0 and flat.data_ptr() % (NUMBERS * flat.element_size()) == 0


def _scalars(bits: bytes) -> tuple[int, ...]:
    """As signed 32-bit integers, the one kind that a launch takes whatever the value."""
    return struct.unpack(f"<{len(bits) // 4}i", bits)


if triton is not None:
    _SCALARS = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "low", "high"]

    @triton.jit
    def _quarter(a, b, c, d):  # type: ignore[no-untyped-def]
        """A quarter round (RFC 8439, 2.1)."""
        a += b
        d ^= a
        d = (d << 16) | (d >> 16)
        c += d
        b ^= c
        b = (b << 12) | (b >> 20)
        a += b
        d ^= a
        d = (d << 8) | (d >> 24)
        c += d
        b ^= c
        b = (b << 7) | (b >> 25)
        return a, b, c, d

    @triton.jit
    def _joined(low, high):  # type: ignore[no-untyped-def]
        """64 bits of two scalars."""
        return (high.to(tl.int64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.int64)

    @triton.jit
    def _word(scalar, like):  # type: ignore[no-untyped-def]
        """A scalar as an unsigned word in every lane."""
        return tl.zeros_like(like) + scalar.to(tl.uint32, bitcast=True)

    @triton.jit
    def _block(lanes, k0, k1, k2, k3, k4, k5, k6, k7, low, high):  # type: ignore[no-untyped-def]
        """The 16 words of each lane's block (RFC 8439, 2.3): ``lanes`` after block (low, high)."""
        number = _joined(low, high) + lanes
        counter, nonce = number.to(tl.uint32), (number >> 32).to(tl.uint32)
        zero = tl.zeros_like(counter)
        s0, s1, s2, s3 = zero + 0x61707865, zero + 0x3320646E, zero + 0x79622D32, zero + 0x6B206574
        s4, s5, s6, s7 = _word(k0, zero), _word(k1, zero), _word(k2, zero), _word(k3, zero)
        s8, s9, s10, s11 = _word(k4, zero), _word(k5, zero), _word(k6, zero), _word(k7, zero)
        s12, s13, s14, s15 = counter, nonce, zero, zero
        for _ in range(10):
            s0, s4, s8, s12 = _quarter(s0, s4, s8, s12)
            s1, s5, s9, s13 = _quarter(s1, s5, s9, s13)
            s2, s6, s10, s14 = _quarter(s2, s6, s10, s14)
            s3, s7, s11, s15 = _quarter(s3, s7, s11, s15)
            s0, s5, s10, s15 = _quarter(s0, s5, s10, s15)
            s1, s6, s11, s12 = _quarter(s1, s6, s11, s12)
            s2, s7, s8, s13 = _quarter(s2, s7, s8, s13)
            s3, s4, s9, s14 = _quarter(s3, s4, s9, s14)
        return (
            s0 + 0x61707865, s1 + 0x3320646E, s2 + 0x79622D32, s3 + 0x6B206574,
            s4 + _word(k0, zero), s5 + _word(k1, zero), s6 + _word(k2, zero), s7 + _word(k3, zero),
            s8 + _word(k4, zero), s9 + _word(k5, zero), s10 + _word(k6, zero), s11 + _word(k7, zero),
            s12 + counter, s13 + nonce, s14, s15,
        )  # fmt: skip

    @triton.jit
    def _pair(first, second):  # type: ignore[no-untyped-def]
        """Two draws from two words, as in `gaussian`."""
        upper = first >= 0xC0000000
        flip = tl.where(upper, tl.full((), 0xFFFFFFFF, tl.uint32), tl.full((), 0, tl.uint32))
        high, low = (first ^ flip).to(tl.float32), ((second ^ flip) & 0xFF).to(tl.float32)
        u = high * 2.3283064365386963e-10 + (low + 0.5) * 9.094947017729282e-13
        bits = u.to(tl.int32, bitcast=True)
        exponent = (bits - 0x3F400000) >> 23
        f = tl.where(upper, -u, (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0)
        k = tl.where(upper, 0, exponent).to(tl.float32)
        radius = tl.sqrt_rn(log_of(f, k) * -2.0)
        signed = (radius.to(tl.uint32, bitcast=True) ^ (second & 0x80000000)).to(tl.float32, bitcast=True)
        inside = ((second >> 7) & 0x7FFFFE).to(tl.int32) - 0x3FFFFF
        w = inside.to(tl.float32) * 1.1920928955078125e-07
        cosines, sines = cosine(w), sine(w)
        swapped = (second & 0x40000000) != 0
        wide = signed.to(tl.float64)
        return (
            wide * tl.where(swapped, sines, cosines).to(tl.float64),
            wide * tl.where(swapped, cosines, sines).to(tl.float64),
        )

    @triton.jit
    def _sums(a0, a1, b0, b1, c0, c1, d0, d1):  # type: ignore[no-untyped-def]
        """Two sums of four draws, from the words of four pairs."""
        ax, ay = _pair(a0, a1)
        bx, by = _pair(b0, b1)
        cx, cy = _pair(c0, c1)
        dx, dy = _pair(d0, d1)
        return (ax + bx) + (cx + dx), (ay + by) + (cy + dy)

    @triton.jit(do_not_specialize=["count", "before", *_SCALARS, "std0", "std1"])  # type: ignore[untyped-decorator]
    def _add_kernel(  # type: ignore[no-untyped-def]
        flat, count, before, k0, k1, k2, k3, k4, k5, k6, k7, low, high, std0, std1,
        EVEN: tl.constexpr, LANES: tl.constexpr,
    ):  # fmt: skip
        """flat[i] += std · (sum of four draws), rounded once."""
        start = tl.program_id(0).to(tl.int64) * LANES
        lanes = start + tl.arange(0, LANES)
        w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15 = _block(
            lanes, k0, k1, k2, k3, k4, k5, k6, k7, low, high
        )
        n0, n1 = _sums(w0, w1, w2, w3, w4, w5, w6, w7)
        n2, n3 = _sums(w8, w9, w10, w11, w12, w13, w14, w15)
        numbers = tl.interleave(tl.interleave(n0, n2), tl.interleave(n1, n3))
        places = 4 * start + tl.arange(0, 4 * LANES)
        if EVEN:
            inside = places < (count // 4).to(tl.int64) * 4
        else:
            places -= before
            inside = (places >= 0) & (places < count)
        sums = tl.load(flat + places, mask=inside, other=0.0)
        noise = numbers * _joined(std0, std1).to(tl.float64, bitcast=True)
        tl.store(flat + places, (sums.to(tl.float64) + noise).to(flat.dtype.element_ty), mask=inside)

    @triton.jit(do_not_specialize=["count", *_SCALARS])  # type: ignore[untyped-decorator]
    def _words_kernel(  # type: ignore[no-untyped-def]
        out, count, k0, k1, k2, k3, k4, k5, k6, k7, low, high, LANES: tl.constexpr,
    ):  # fmt: skip
        lanes = tl.program_id(0).to(tl.int64) * LANES + tl.arange(0, LANES)
        found = _block(lanes, k0, k1, k2, k3, k4, k5, k6, k7, low, high)
        for k in tl.static_range(16):
            tl.store(out + lanes * 16 + k, found[k].to(tl.int32, bitcast=True), mask=lanes < count)
