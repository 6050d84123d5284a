"""The key of a run, from which all of its randomness comes.

Who can guess the key can subtract the noise, so by default it is 32 bytes from the operating system; 64-bit seeds (all
that `torch.Generator` takes, of which its CPU engine uses 32 bits) are never the root of anything here. A stream is
derived from the key by a keyed hash of its label, so a step's noise depends neither on how the batch was split nor on
what ran before.
"""

import hashlib
import os
from collections.abc import Callable

import numpy as np

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
        self._process = os.getpid()
        self.seeded = seed is not None

    @classmethod
    def shared(cls, seed: int | None, hand_out: Callable[[bytes], bytes]) -> "Key":
        """The one key of several processes: ``hand_out`` is given this process's secret, and returns everybody's."""
        key = cls(seed)
        key._bytes = hand_out(key._bytes)
        return key

    def derive(self, label: str) -> int:
        """256 bits that only this key and this label give."""
        if os.getpid() != self._process:
            raise RuntimeError(
                "This process was forked from the one in which the private run was made, and would add the same noise "
                "to other gradients. Call privatize() in the process that trains."
            )
        return int.from_bytes(hashlib.blake2b(label.encode(), key=self._bytes, digest_size=32).digest())

    def generator(self, label: str) -> np.random.Generator:
        """A generator whose whole 256-bit state comes from the key."""
        words = np.frombuffer(self.derive(label).to_bytes(32, "little"), dtype="<u4")  # read faster than one number
        return np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(words, pool_size=8)))
