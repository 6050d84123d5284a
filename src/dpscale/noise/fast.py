"""Gaussian noise in float32, a fresh stream for every step.

The generators are fast, not cryptographic: they are statistically sound, and their states are unguessable from outside,
but they are not proven against somebody who sees many outputs. `secure` has one that is.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscale.chances import Chances, Fast
from dpscale.engine.compat import foreach_add_
from dpscale.noise.key import Key

CHUNK = 1 << 24
"""How many numbers of noise to hold at once."""


Draw = Callable[[Tensor], object]
"""Draws the next numbers of a stream into a tensor."""


class Noise:
    """The noise of a run: a fresh stream for every step. The room that it is drawn into is kept between steps."""

    source = "fast"

    def __init__(self, key: Key) -> None:
        self.key = key
        self._rooms: dict[torch.device, _Room] = {}
        self._ahead: dict[torch.device, tuple[Any, Draw]] = {}  # for what the first numbers are there, and the rest

    def sampling(self) -> np.random.Generator:
        """What the draws of the run come from."""
        return self.key.generator("sampling")

    def chances(self, label: str) -> Chances:
        """Choices of their own for a label."""
        return Fast(self.key.generator(label))

    def add(self, sums: Mapping[str, Tensor], std: float, step: int, shard: int | None = None) -> None:
        """Add N(0, std²) to every entry of the sums (both parts of complex ones), independently, in place.

        Guarantee: each call draws fresh noise for its (key, step, shard); it is the caller's part to call once per
        logical batch. It does not depend on which of several devices of one type holds the sums.

        | std | result                             |
        |-----|------------------------------------|
        | 0   | the sums: no noise, and no privacy |

        Args:
            sums: float32 (or wider) tensors by name.
            std: absolute, not relative to anything: a plan's ``noise_std``.
            step: number of the logical batch.
            shard: whose part of the sums this is, where every rank has its own; None where all have the same.
        """
        if std == 0:
            return
        label = f"noise/{step}" if shard is None else f"noise/{step}/shard {shard}"
        for device, place, there in _by_device(sums, label):
            known, draw = self._ahead.pop(device, (None, None))  # used once, or never
            if draw is None or known != self._what(place, there):
                known, draw = None, _standard_normal(self.key, place, device)
            # One draw and one fused addition for many tensors: hundreds of small ones cost more to launch than to do.
            for k, pieces in enumerate(_chunks(there)):
                numbers, noise = self._room(device).like(k, pieces)
                if k or known is None:
                    draw(numbers)
                foreach_add_(pieces, noise, alpha=std)

    def prepare(self, sums: Mapping[str, Tensor], std: float, step: int) -> None:
        """Draw ahead of time what `add` will add to such sums at this step: the same numbers, or the first of them.

        What is not added at that step to sums of those shapes is never added.
        """
        for device, place, there in _by_device(sums, f"noise/{step}") if std else ():
            what = self._what(place, there)
            if device not in self._ahead or self._ahead[device][0] != what:
                self._ahead.pop(device, None)  # where they are drawn, others lie from here on
                draw = _standard_normal(self.key, place, device)
                draw(self._room(device).like(0, next(_chunks(there)))[0])
                self._ahead[device] = what, draw

    def _what(self, place: str, tensors: Sequence[Tensor]) -> Any:
        """What numbers are for."""
        return self.key.derive(place), [t.shape for t in tensors]

    def _room(self, device: torch.device) -> "_Room":
        if device not in self._rooms:
            self._rooms[device] = _Room(device)
        return self._rooms[device]


def _by_device(sums: Mapping[str, Tensor], label: str) -> Iterator[tuple[torch.device, str, list[Tensor]]]:
    """(A device, the label of its noise, the tensors there.)"""
    tensors = real_parts(sums)
    devices = [t.device for t in tensors]
    met: Counter[str] = Counter()
    for device in (kinds := dict.fromkeys(devices)):
        # By its type and its turn: the same part of a model is on cuda:0 here and on cuda:1 in another process.
        place = f"{device.type}:{met[device.type]}" if met[device.type] else device.type
        met[device.type] += 1
        there = [t for t, its in zip(tensors, devices, strict=True) if its == device] if len(kinds) > 1 else tensors
        yield device, f"{label}/{place}", there


def real_parts(sums: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors, of complex ones both parts."""
    if not any([t.is_complex() for t in sums.values()]):
        return list(sums.values())
    return [part for t in sums.values() for part in ((t.real, t.imag) if t.is_complex() else (t,))]


class _Room:
    """Where noise is drawn: one stretch of numbers on a device, and views of it in the shapes of each chunk."""

    def __init__(self, device: torch.device) -> None:
        self._numbers = torch.empty(0, dtype=torch.float32, device=device)
        self._views: dict[int, tuple[list[torch.Size], Tensor, list[Tensor]]] = {}

    def like(self, chunk: int, pieces: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """(The numbers to draw, the same in the shapes of the pieces.)"""
        shapes = [t.shape for t in pieces]
        if chunk not in self._views or self._views[chunk][0] != shapes:
            sizes = [shape.numel() for shape in shapes]
            if sum(sizes) > len(self._numbers):
                self._numbers = self._numbers.new_empty(sum(sizes))
                self._views.clear()
            numbers = self._numbers[: sum(sizes)]
            views = [n.view(shape) for n, shape in zip(numbers.split(sizes), shapes, strict=True)]
            self._views[chunk] = shapes, numbers, views
        return self._views[chunk][1:]


def _chunks(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """The tensors, large ones in pieces, in lists of about `CHUNK` numbers at most."""
    if sum([t.numel() for t in tensors]) <= CHUNK:
        yield list(tensors)
        return
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


def _standard_normal(key: Key, label: str, device: torch.device) -> Draw:
    """A stream of float32 numbers, drawn into a tensor. On an accelerator its own generator draws them, keyed by 64
    bits and, on CUDA, started at one of 2⁶⁰ places of its counter."""
    if device.type == "cpu":
        stream = key.generator(label)
        return lambda numbers: stream.standard_normal(dtype=np.float32, out=numbers.numpy())
    bits = key.derive(label)
    generator = torch.Generator(device).manual_seed(bits & (2**64 - 1))
    if device.type == "cuda":
        generator.set_offset((bits >> 64 & (2**60 - 1)) * 4)
    return lambda numbers: numbers.normal_(generator=generator)
