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
from collections.abc import Mapping

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


def add_noise(sums: Mapping[str, Tensor], std: float, key: Key, step: int) -> dict[str, Tensor]:
    """The sums with N(0, std²) added to every entry, independently.

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
        return dict(sums)
    label = f"noise/{step}"
    noisy: dict[str, Tensor] = {}
    for device in dict.fromkeys(t.device for t in sums.values()):
        here = {name: t for name, t in sums.items() if t.device == device}
        flat = _standard_normal(sum(t.numel() for t in here.values()), key, f"{label}/{device}", device)
        # One draw and one fused addition for all tensors: hundreds of small ones would cost more to launch than to do.
        parts = [
            part.view(t.shape)
            for part, t in zip(flat.split([t.numel() for t in here.values()]), here.values(), strict=True)
        ]
        parts = [part.to(t.dtype) for part, t in zip(parts, here.values(), strict=True)]
        noisy |= dict(zip(here, torch._foreach_add(list(here.values()), parts, alpha=std), strict=True))
    return {name: noisy[name] for name in sums}


def _standard_normal(count: int, key: Key, label: str, device: torch.device) -> Tensor:
    """``count`` float32 numbers. On an accelerator its own generator draws them, keyed by 64 bits and, on CUDA, started
    at one of 2⁶⁰ places of its counter."""
    if device.type == "cpu":
        return torch.from_numpy(key.generator(label).standard_normal(count, dtype=np.float32))
    bits = key.derive(label)
    generator = torch.Generator(device).manual_seed(bits & (2**64 - 1))
    if device.type == "cuda":
        generator.set_offset((bits >> 64 & (2**60 - 1)) * 4)
    return torch.randn(count, dtype=torch.float32, device=device, generator=generator)
