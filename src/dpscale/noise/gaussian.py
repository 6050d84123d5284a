"""Standard normal numbers from uniform 32-bit words, the same to the bit wherever they are computed.

A number is half the sum of four independent draws. A *pair* of draws comes from two words by Box and Muller: with
40 bits for U and 24 bits for the angle θ, both in the middle of their cells, it is R·(cos θ, sin θ), R = √(-2 ln U).
Four pairs give two numbers, half the sum of the cosines' and half the sum of the sines' draws; a block of 16 words
gives four.

*Rounding.* R, cos θ and sin θ are float32, their products and sums float64, and nothing is rounded to the precision
of the sums before it is added to them. Only additions, multiplications and square roots are used, one at a time and
correctly rounded, so that a CUDA kernel finds the same bits: a multiplication fused with an addition would not.

*Tail.* U ends at 2⁻⁴¹, so a draw ends at 7.54 and a number at 15.08. What this changes is on the page about noise.

*Why four.* A floating-point number betrays what was added to it if few noises could have led to it. Holohan & Braghin
(2021, Secure Random Sampling in Differential Privacy) therefore add up several draws. Here 256 random bits become two
numbers of 24 bits, after rounding: each is reached in some 2²⁰⁸ ways.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpscale.noise.chacha import Words

try:
    import triton
    import triton.language as tl  # noqa: F401  Triton wants to find it where a function is written
except ImportError:  # CPU builds of torch come without it
    triton = None

NUMBERS = 4
"""In a block of 16 words."""

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]


def _shared(function: Any) -> Any:
    """For kernels too; `plain` gives what takes arrays."""
    return function if triton is None else triton.jit(function)


def plain(function: Any) -> Any:
    """A shared function as it is written: over whatever adds and multiplies."""
    return getattr(function, "fn", function)


@_shared
def log_of(f, k):  # type: ignore[no-untyped-def]
    """ln(2ᵏ·(1 + f)) for f in [-1/4, 1/2]: relative error 3e-8, but for rounding."""
    p = 0.05411169305443764 * f - 0.12076715379953384
    p = p * f + 0.1499449610710144
    p = p * f - 0.16824312508106232
    p = p * f + 0.1997591257095337
    p = p * f - 0.2499321848154068
    p = p * f + 0.3333359360694885
    p = p * f - 0.5000006556510925
    p = p * f + 1.0
    return k * 0.6931471805599453 + p * f


@_shared
def cosine(w):  # type: ignore[no-untyped-def]
    """cos(πw/2) for w in [-1/2, 1/2]."""
    v = w * w
    p = 0.0009033629903569818 * v - 0.020859936252236366
    p = p * v + 0.2536691725254059
    p = p * v - 1.2337005138397217
    return p * v + 1.0


@_shared
def sine(w):  # type: ignore[no-untyped-def]
    """sin(πw/2) for w in [-1/2, 1/2]."""
    v = w * w
    p = 0.07968003302812576 - 0.00460165785625577 * v
    p = p * v - 0.6459634900093079
    p = p * v + 1.5707963705062866
    return p * w


def standard_normal(words: Words) -> Floats:
    """Four numbers for each row of 16 words, (blocks, 4), in float64.

    Example:
        >>> numbers = standard_normal(np.arange(32, dtype=np.uint32).reshape(2, 16) * np.uint32(0x9E3779B9))
        >>> numbers.shape, bool((abs(numbers) < 15.1).all())
        ((2, 4), True)
    """
    first, second = np.ascontiguousarray(words.T).reshape(8, 2, -1).swapaxes(0, 1)  # of each pair: (8, blocks)
    radius, (cosines, sines) = _radii(first, second).astype(np.float64), _directions(second)
    out = np.empty((len(words), NUMBERS))
    for place, side in enumerate((cosines, sines)):
        draws = radius * side.astype(np.float64)
        for half in (0, 4):
            total = (draws[half] + draws[half + 1]) + (draws[half + 2] + draws[half + 3])
            out[:, half // 2 + place] = 0.5 * total
    return out


def _radii(first: Words, second: Words) -> Singles:
    """±√(-2 ln U). The 40 bits of U are ``first`` and the lowest 8 of ``second``; its highest bit is the sign.

    A U above 3/4 is taken from its other end, 1 - U, so that it is as precise near 1 as near 0.
    """
    upper = _mask(first >= np.uint32(0xC0000000))
    high, low = (first ^ upper).astype(np.float32), ((second ^ upper) & np.uint32(0xFF)).astype(np.float32)
    u = high * np.float32(2.0**-32) + (low + np.float32(0.5)) * np.float32(2.0**-40)
    bits = u.view(np.int32)
    exponent = (bits - np.int32(0x3F400000)) >> 23  # u = 2^exponent · (1 + f), with 1 + f in [3/4, 3/2)
    f = (bits - (exponent << 23)).view(np.float32) - np.float32(1.0)
    f = _either(upper, -u, f)
    k = (exponent & ~upper.view(np.int32)).astype(np.float32)
    radius = np.sqrt(plain(log_of)(f, k) * np.float32(-2.0))
    signed: Singles = (radius.view(np.uint32) ^ (second & np.uint32(0x80000000))).view(np.float32)
    return signed


def _directions(second: Words) -> tuple[Singles, Singles]:
    """(cos θ, sin θ) up to their common sign, from bits 8 to 30: one says which of two quadrants, 22 where in it."""
    inside = ((second >> 7) & np.uint32(0x7FFFFE)).astype(np.int32) - np.int32(0x3FFFFF)
    w = inside.astype(np.float32) * np.float32(2.0**-23)
    cosines, sines = plain(cosine)(w), plain(sine)(w)
    swapped = _mask((second >> 30) & np.uint32(1))
    return _either(swapped, sines, cosines), _either(swapped, cosines, sines)


def _mask(chosen: NDArray[Any]) -> Words:
    """All bits where something is true."""
    return np.negative(chosen.astype(np.uint32))


def _either(mask: Words, one: Singles, other: Singles) -> Singles:
    """``one`` where the mask is, else ``other``: ten times as fast as numpy's `where`."""
    bits = other.view(np.uint32)
    found: Singles = (bits ^ ((bits ^ one.view(np.uint32)) & mask)).view(np.float32)
    return found
