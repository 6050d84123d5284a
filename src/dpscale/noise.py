"""Gaussian noise in float32 from a 256-bit key, a fresh stream for every step.

Who can guess the key can subtract the noise, so by default it is 32 bytes from the operating system; 64-bit seeds (all
that `torch.Generator` takes, of which its CPU engine uses 32 bits) are never the root of anything here. A step's
stream is derived from the key by a keyed hash of its label, so a step's noise depends neither on how the batch was
split nor on what ran before.

The generators are fast, not cryptographic: they are statistically sound, and their states are unguessable from outside,
but they are not proven against somebody who sees many outputs.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from dpscale.checks import require


class Key:
    """256 secret bits from which every random choice of a private run is derived.

    Args:
        seed: None for the operating system's randomness (use this for anything private), or an integer to make a run
            reproducible. Whoever knows the seed can remove the noise.
    """

    def __init__(self, seed: int | None = None) -> None:
        ok = seed is None or (isinstance(seed, int) and not isinstance(seed, bool))
        require(ok, "Key", "seed", "an integer, or None for the operating system's randomness", seed)
        self._bytes = os.urandom(32) if seed is None else hashlib.blake2b(str(seed).encode(), digest_size=32).digest()

    def derive(self, label: str) -> int:
        """256 bits that only this key and this label give."""
        return int.from_bytes(hashlib.blake2b(label.encode(), key=self._bytes, digest_size=32).digest())

    def generator(self, label: str) -> np.random.Generator:
        """A generator whose whole 256-bit state comes from the key."""
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(self.derive(label), pool_size=8)))


CHUNK = 1 << 24
"""How many numbers of noise to hold at once."""


def add_noise(sums: Mapping[str, Tensor], std: float, key: Key, step: int) -> None:
    """Add N(0, std²) to every entry of the sums, independently, in place.

    Guarantee: each call draws fresh noise for its (key, step); it is the caller's part to call once per logical batch.

    | std | result                             |
    |-----|------------------------------------|
    | 0   | the sums: no noise, and no privacy |

    Args:
        sums: float32 (or wider) tensors by name.
        std: absolute, not relative to anything: a plan's ``noise_std``.
        key: the run's.
        step: number of the logical batch.
    """
    if std == 0:
        return
    for device in dict.fromkeys(t.device for t in sums.values()):
        draw = _standard_normal(key, f"noise/{step}/{device}", device)
        # One draw and one fused addition for many tensors: hundreds of small ones cost more to launch than to do.
        for pieces in _chunks([t for t in sums.values() if t.device == device]):
            noise = draw(sum(t.numel() for t in pieces)).split([t.numel() for t in pieces])
            torch._foreach_add_(
                pieces, [n.view(t.shape).to(t.dtype) for n, t in zip(noise, pieces, strict=True)], alpha=std
            )


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, large ones in pieces, in lists of about `CHUNK` numbers at most."""
    held: list[Tensor] = []
    room = CHUNK
    for t in tensors:
        for piece in t.view(-1).split(CHUNK) if t.numel() > CHUNK and t.is_contiguous() else (t,):
            if held and piece.numel() > room:
                yield held
                held, room = [], CHUNK
            held.append(piece)
            room -= piece.numel()
    if held:
        yield held


def _standard_normal(key: Key, label: str, device: torch.device) -> Callable[[int], Tensor]:
    """A stream of float32 numbers. On an accelerator its own generator draws them, keyed by 64 bits and, on CUDA,
    started at one of 2⁶⁰ places of its counter."""
    if device.type == "cpu":
        numbers = key.generator(label)
        return lambda count: torch.from_numpy(numbers.standard_normal(count, dtype=np.float32))
    bits = key.derive(label)
    generator = torch.Generator(device).manual_seed(bits & (2**64 - 1))
    if device.type == "cuda":
        generator.set_offset((bits >> 64 & (2**60 - 1)) * 4)
    return lambda count: torch.randn(count, dtype=torch.float32, device=device, generator=generator)
