"""Noise that stands up to an adversary: ChaCha20 from the run's key, and Gaussians that betray nothing by rounding.

What is added is the same to the bit on the CPU and on CUDA. The method, its tail and its rounding are in `gaussian`.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from dpscale.chances import Chances, Secret, Secure
from dpscale.checks import require
from dpscale.engine.compat import foreach_copy_
from dpscale.noise import chacha, kernel
from dpscale.noise.fast import CHUNK, Noise, real_parts
from dpscale.noise.gaussian import NUMBERS, standard_normal
from dpscale.noise.key import Key

Source = Literal["fast", "secure"]
"""Names of the sources of noise."""

DEFAULT: dict[str, Source] = {"cpu": "fast", "cuda": "fast"}
"""What is taken where nothing is said, by the type of device; elsewhere the fast one."""

LARGE = 1 << 16
"""Tensors of so many numbers have a launch of their own; smaller ones share one, after them."""

TILE = 1 << 16
"""Numbers that the CPU works out at once: what they need stays in its cache."""


class SecureNoise:
    """The noise of a run from ChaCha20: a fresh key, hashed from the run's, for every step, shard and device."""

    source = "secure"

    def __init__(self, key: Key) -> None:
        self.key = key

    def sampling(self) -> Secret:
        """What the draws of the run come from."""
        return Secret(self._secret("sampling"))

    def chances(self, label: str) -> Chances:
        """Choices of their own for a label."""
        return Secure(self._secret(label))

    def add(self, sums: Mapping[str, Tensor], std: float, step: int, shard: int | None = None) -> None:
        """Add N(0, std²) to every entry of the sums (both parts of complex ones), independently, in place.

        Guarantee: as of `Noise.add`. Noise and sum are added in float64 and rounded once, to the precision of the sum.
        No block of the cipher is used twice: each (step, shard, device) has a key of its own, and each entry its place
        in that key's stream. It does not depend on the kind of device.

        Args:
            sums: float32 or float64 tensors by name.
            std: absolute.
            step: number of the logical batch.
            shard: whose part of the sums this is; None where all ranks have the same.
        """
        if std == 0:
            return
        tensors = real_parts(sums)
        whose = f"noise/{step}" if shard is None else f"noise/{step}/shard {shard}"
        for turn, device in enumerate(dict.fromkeys(t.device for t in tensors)):
            key, position = self._secret(f"{whose}/device {turn}"), 0
            for group in _groups([t for t in tensors if t.device == device]):
                _add_to_all(group, key, position, std)
                position += sum(t.numel() for t in group)

    def prepare(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """As `Noise.prepare`: nothing, for its numbers are made as they are added."""

    def _secret(self, label: str) -> bytes:
        return self.key.derive(f"secure/{label}").to_bytes(32, "big")


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Large tensors one by one; then small ones, as many together as fit into a chunk."""
    held: list[Tensor] = []
    for t in sorted(tensors, key=lambda t: t.numel() < LARGE):
        if held and (t.numel() >= LARGE or sum(each.numel() for each in held) + t.numel() > CHUNK):
            yield held
            held = []
        held.append(t)
    if held:
        yield held


def _add_to_all(tensors: Sequence[Tensor], key: bytes, first: int, std: float) -> None:
    """Noise for tensors that follow each other in a stream."""
    if len(tensors) == 1 and tensors[0].is_contiguous():
        return _add_(tensors[0].view(-1), key, first, std)
    flat = torch.cat([t.reshape(-1) for t in tensors])
    _add_(flat, key, first, std)
    parts = flat.split([t.numel() for t in tensors])
    foreach_copy_(list(tensors), [part.view(t.shape) for part, t in zip(parts, tensors, strict=True)])


def _add_(flat: Tensor, key: bytes, first: int, std: float) -> None:
    """flat[i] += std · (number first + i of the stream), by what the device has."""
    if kernel.available(flat.device):
        with torch.cuda.device(flat.device):
            return kernel.add_(flat, key, first, std)
    if flat.device.type == "cpu":
        return _add_on_cpu(flat, key, first, std)
    copy = flat.cpu()
    _add_on_cpu(copy, key, first, std)
    flat.copy_(copy)


def _add_on_cpu(flat: Tensor, key: bytes, first: int, std: float) -> None:
    """In tiles, by as many threads as torch has."""
    sums = flat.numpy()

    def add(begin: int) -> None:
        part = sums[begin : begin + TILE]
        block, before = divmod(first + begin, NUMBERS)
        words = chacha.words(key, block, -(-(before + len(part)) // NUMBERS))
        noise = standard_normal(words).reshape(-1)[before : before + len(part)]
        np.add(part, noise * std, out=part, casting="same_kind")  # in float64, rounded once

    tiles = range(0, len(sums), TILE)
    if len(tiles) < 2 or torch.get_num_threads() < 2:
        for begin in tiles:
            add(begin)
    else:
        with ThreadPoolExecutor(min(torch.get_num_threads(), len(tiles))) as pool:
            list(pool.map(add, tiles))


def default_source(devices: set[str]) -> Source:
    """What a run draws its noise from where nothing is said."""
    wanted = all(DEFAULT.get(each) == "secure" for each in devices)
    return "secure" if wanted and _at_hand(devices) else "fast"


def check_source(owner: str, source: str, devices: set[str]) -> None:
    """Refuse a source that does not exist, or one that cannot be had."""
    require(source in get_args(Source), owner, "noise", "'fast' or 'secure'", source)
    if source == "secure" and not _at_hand(devices):
        chacha.library()


def _at_hand(devices: set[str]) -> bool:
    """Whether the kernel serves all of them, so that no library is needed."""
    return all(kernel.available(torch.device(each)) for each in devices)


AnyNoise = Noise | SecureNoise


def noise_from(source: str, key: Key) -> AnyNoise:
    """The noise of a run."""
    return SecureNoise(key) if source == "secure" else Noise(key)
