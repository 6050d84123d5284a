"""Random choices among samples, from a fast generator or from a cryptographic one.

| choice      | `Fast` (numpy's PCG64DXSM)         | `Secure` (SHAKE-256 of a secret)                                 |
|-------------|------------------------------------|------------------------------------------------------------------|
| `coins`     | a binomial count, then a subset    | gaps between heads, geometric, from 53 bits each                 |
| `subset`    | numpy's `choice`                   | places from 53 bits each, those met before left out              |
| `order`     | numpy's `permutation`              | the order of 64-bit numbers                                      |

The probabilities of `Secure` are exact but for rounding: rates of coins to 1e-14, those of places to size/2⁵³, and two
equal numbers among n that are put in order come with odds below n²/2⁶⁵.
"""

import hashlib
import math
from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]


class Chances(Protocol):
    """A source of choices; each is fresh."""

    def coins(self, size: int, rate: float) -> Indices:
        """Which of ``size`` coins show heads, each with probability ``rate``; ascending."""

    def subset(self, size: int, samples: int) -> Indices:
        """So many of ``size``, each set of them alike; ascending."""

    def order(self, size: int) -> Indices:
        """``size`` in any order, all alike."""


class Fast:
    """Choices by a generator of numpy's."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def coins(self, size: int, rate: float) -> Indices:
        """As in `Chances`: independent coins are a binomial count, then a subset of that size; cheaper than coins."""
        return self.subset(size, int(self._rng.binomial(size, rate)))

    def subset(self, size: int, samples: int) -> Indices:
        """As in `Chances`. Sorted: the order within a batch means nothing, and sorted reads are kinder to storage."""
        found = self._rng.choice(size, samples, replace=False, shuffle=False)
        return np.sort(found).astype(np.int64, copy=False)

    def order(self, size: int) -> Indices:
        """As in `Chances`."""
        return self._rng.permutation(size)


class Secure:
    """Choices by SHAKE-256 of a secret and a count: who sees some of them learns nothing of the others.

    Example:
        >>> Secure(bytes(32)).subset(10, 3), len(Secure(bytes(32)).order(5))
        (array([0, 1, 9]), 5)
    """

    def __init__(self, secret: bytes) -> None:
        self._secret, self._calls = secret, 0

    def coins(self, size: int, rate: float) -> Indices:
        """As in `Chances`."""
        if rate >= 1:
            return np.arange(size, dtype=np.int64)
        mean, last = size * rate, -1
        found: list[Indices] = []
        while last < size:
            gaps = np.log(self._uniform(int(mean + 6 * math.sqrt(mean)) + 8)) / math.log1p(-rate)
            places = last + np.cumsum(gaps.astype(np.int64) + 1)
            found.append(places)
            last = int(places[-1])
        places = np.concatenate(found)
        return places[places < size]

    def subset(self, size: int, samples: int) -> Indices:
        """As in `Chances`."""
        if 2 * samples > size:
            inside = np.ones(size, dtype=np.bool_)
            inside[self.subset(size, size - samples)] = False
            return np.flatnonzero(inside)
        met = np.empty(0, dtype=np.int64)
        while True:
            met = np.concatenate([met, (self._uniform(samples + samples // 2 + 8) * size).astype(np.int64)])
            places, first = np.unique(met, return_index=True)
            if len(places) >= samples:
                return np.sort(places[np.argsort(first)[:samples]])

    def order(self, size: int) -> Indices:
        """As in `Chances`."""
        return np.argsort(self._words(size), kind="stable")

    def _uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers between 0 and 1, never either, in the middle of 2⁵³ cells."""
        found: NDArray[np.float64] = ((self._words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
        return found

    def _words(self, count: int) -> NDArray[np.uint64]:
        self._calls += 1
        stream = hashlib.shake_256(self._secret + self._calls.to_bytes(8, "little"))
        return np.frombuffer(stream.digest(8 * count), dtype="<u8")


class Secret:
    """256 bits for the draws of a run, in the place of a generator: each step, or epoch, has choices of its own."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def numbered(self, index: int) -> Secure:
        """The choices of a step."""
        return Secure(hashlib.blake2b(str(index).encode(), key=self._secret, digest_size=32).digest())


Source = np.random.Generator | Secret
"""What draws come from."""


def streams(source: Source) -> Callable[[int], Chances]:
    """The choices of each step. One key is taken from a generator, of which all 256 bits reach the state of each step's
    own: numpy's defaults would keep 128 of them."""
    if isinstance(source, Secret):
        return source.numbered
    key = source.integers(0, 2**32, size=8, dtype=np.uint32)

    def numbered(index: int) -> Fast:
        label = np.append(key, np.uint32(index))  # an array: it is read five times as fast as a list of numbers
        return Fast(np.random.Generator(np.random.PCG64DXSM(np.random.SeedSequence(label, pool_size=8))))

    return numbered
