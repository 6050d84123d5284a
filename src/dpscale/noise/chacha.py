"""ChaCha20 in counter mode (RFC 8439), as a stream of 32-bit words, by the library `cryptography`.

A stream has a key of its own. Its block number n, of 64 bits, is the cipher's counter (the lower 32) and the first word
of its nonce (the upper 32); the other two words are 0. So no block of a stream comes twice: it has 2⁶⁸ words.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint32]

WORDS = 16
"""In a block."""

_COUNTED = 2**32
"""Blocks before the cipher's own counter would begin anew."""


def words(key: bytes, first: int, blocks: int) -> Words:
    """``blocks`` blocks of the stream of ``key`` from number ``first`` on, (blocks, 16).

    Example:
        >>> [hex(word) for word in words(bytes(32), 0, 1)[0, :2]]  # RFC 8439, A.1, test vector 1
        ['0xade0b876', '0x903df1a0']
    """
    assert len(key) == 32 and first >= 0 and first + blocks <= 2**64
    out = np.empty(4 * WORDS * blocks, dtype=np.uint8)
    zeros = bytes(len(out))
    done = 0
    for start, count in _runs(first, blocks):
        size = 4 * WORDS * count
        _encryptor(key, start).update_into(zeros[:size], out[done : done + size])
        done += size
    return out.view("<u4").reshape(blocks, WORDS)


def _runs(first: int, blocks: int) -> Iterator[tuple[int, int]]:
    """(First block, number of blocks) of each part under one nonce."""
    while blocks:
        count = min(blocks, _COUNTED - first % _COUNTED)
        yield first, count
        first, blocks = first + count, blocks - count


def _encryptor(key: bytes, block: int) -> Any:
    library()
    from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

    return Cipher(algorithms.ChaCha20(key, block.to_bytes(8, "little") + bytes(8)), mode=None).encryptor()


def library() -> None:
    """Refuse to go on where the library is missing."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise ImportError(
            "noise='secure' draws on the CPU by the library cryptography, which is not installed. "
            'Run pip install "dpscale[secure]".'
        ) from None
