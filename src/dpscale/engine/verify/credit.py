"""Whether gradients arrive in the rows of the samples that they are of, in a taped forward of a whole batch.

Every loss is given a weight of its own, a power of two. A backward that treats samples apart is linear in each of them,
so what arrives in a sample's rows is its weight times what arrives without weights, to the bit. Rows that belong to
another sample, or to several, and a backward that computes with the whole batch (clips by its norm) are off.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpscale.engine.combine import Forms, exactly, gradients
from dpscale.engine.tape.tape import Shared, Tape
from dpscale.engine.verify.values import Gradient

Weigh = Callable[[Forms, Sequence[float]], Gradient]
"""The weighted sums of some forms, as they are compared."""

Place = tuple[GradientEdge, Callable[[Tensor], Tensor]]
"""Where a gradient arrives, and what puts its samples first."""

POWERS, OF_HALVES = 32, 6
"""Weights to choose from; of 16-bit floats with a short range, few: neither end may leave it."""

_OFF, _COARSE = 1e-3, 0.06

RANGE = 1e5
"""By so much may gradients differ in size of which each is to be seen in their sum."""


@dataclass(frozen=True)
class TapedRun:
    """What a taped run gave.

    Attributes:
        tape: what parameters met.
        losses: (B,).
        grads: what arrived at the operations; nothing if no backward was made.
        astray: whether it arrives in rows that it is not of.
        left: what the run left behind.
        shared: what parameters alone met.
    """

    tape: Tape
    losses: Tensor
    grads: Sequence[Tensor | None]
    astray: bool
    left: Any
    shared: list[Shared]


def insides(tape: Tape) -> list[Place]:
    """Of every operation that was taped."""
    return [
        (edge, partial(op.site.layouts[f"out{k}"].per_sample, samples=tape.samples))
        for op in tape.ops
        for k, edge in op.edges.items()
    ]


def arrived(losses: Tensor, places: Sequence[Place]) -> Sequence[Tensor | None]:
    """What all losses together send to each place."""
    return _grad(losses, [edge for edge, _ in places], torch.ones_like(losses)) if places else ()


def credited(run: TapedRun, mixtures: Sequence[Mapping[int, float]], weigh: Weigh) -> list[Gradient]:
    """The gradients that a taped run credits to some rows, added up, each with a weight of its own; for each mixture.

    What arrives at an operation may be the same where what it multiplies is not: a layer of zeros sends nothing back,
    and its own gradient is made of its input.
    """
    rows = sorted({row for mixture in mixtures for row in mixture})
    if not rows:
        return [{} for _ in mixtures]
    with exactly(run.tape.device):
        some = None if rows == [*range(run.tape.samples)] else torch.tensor(rows, device=run.tape.device)
        forms = gradients([run.tape], [run.grads], some)
    return [weigh(among(forms, rows, list(each)), list(each.values())) if each else {} for each in mixtures]


def among(forms: Forms, rows: Sequence[int], some: Sequence[int]) -> Forms:
    """The gradients of some of those rows that the forms are of. What is not finite in others is left out with them."""
    if list(some) == list(rows):
        return forms
    places = torch.tensor([rows.index(i) for i in some])
    with torch.no_grad():
        return {name: form.take(places) for name, form in forms.items()}


def levels(sizes: Sequence[float]) -> list[float]:
    """Weights for gradients of these norms, so that none is too small to be seen beside the others in their sum; 0 for
    one that is not finite."""
    least = max(filter(math.isfinite, sizes), default=0.0) / RANGE or 1.0
    return [1 / max(size, least) if math.isfinite(size) else 0.0 for size in sizes]


def by_row(rows: Sequence[int], weights: Sequence[float]) -> dict[int, float]:
    """Added up for a row that is there twice; without those that have none."""
    total: dict[int, float] = {}
    for row, weight in zip(rows, weights, strict=True):
        if weight:
            total[row] = total.get(row, 0.0) + weight
    return total


def coarseness(run: TapedRun) -> float:
    """By how much of itself what a run credits may be off in another run of the same shapes."""
    return max((_rounding(g) for g in run.grads if g is not None), default=_OFF) / 10


def _rounding(g: Tensor) -> float:
    """By how much of itself a gradient may be off. What is computed in 32 bits may come from 16, or from fewer."""
    coarse = torch.finfo(g.dtype).eps > 1e-4 or torch.is_autocast_enabled(g.device.type)
    return _COARSE if coarse or (g.is_cuda and g.dtype != torch.float64) else _OFF


def _grad(losses: Tensor, targets: Any, seed: Tensor, keep: bool = True) -> Sequence[Tensor | None]:
    grads: Sequence[Tensor | None]
    grads = torch.autograd.grad([losses], targets, [seed], retain_graph=keep, allow_unused=True)
    return grads


def misplaced(
    losses: Tensor, places: Sequence[Place], seed: int, plain: Sequence[Tensor | None] | None = None,
    mask: Tensor | None = None, keep: bool = True,
) -> int | None:  # fmt: skip
    """A sample in whose rows something else arrives than its own loss sends; None if there is none.

    To rounding: kernels of a GPU add up in another order each time. The weights are farther apart than that.

    Args:
        losses: (B,).
        places: where to look.
        seed: for the weights.
        plain: what arrives there without weights, if that is known.
        mask: (B,): losses that count there.
        keep: whether there are backwards to come.
    """
    if not places:
        return None
    plain = arrived(losses, places) if plain is None else plain
    halves = torch.float16 in {losses.dtype, *(g.dtype for g in plain if g is not None)}
    weights = _weights(len(losses), OF_HALVES if halves else POWERS, seed).to(losses)
    weighted = _grad(losses, [edge for edge, _ in places], weights if mask is None else weights * mask, keep)
    for one, other, (_, rows) in zip(plain, weighted, places, strict=True):
        if one is None or other is None:
            continue
        a, b = (rows(g).reshape(len(losses), -1) for g in (one, other))
        if not a.shape[1]:
            continue
        apart = _largest(torch.addcmul(b, a, weights.to(a.dtype).unsqueeze(1), value=-1))
        # Of numbers that underflow in either run little is left to compare: the weak ends of a softmax.
        own, least = weights.to(apart.dtype), torch.finfo(a.dtype).tiny
        size = torch.maximum(_largest(a) * own, least * own.clamp(min=1))
        # What is not finite is so whatever its weight: such a sample adds nothing.
        off = (apart > _rounding(a) * size) & torch.isfinite(apart)
        if bool(off.any()):
            return int(off.nonzero()[0])
    return None


def _weights(samples: int, powers: int, seed: int) -> Tensor:
    """Powers of two around 1, no two alike among as many samples as there are powers."""
    chance = torch.Generator("cpu").manual_seed(seed)  # whatever the default device is
    order = torch.randperm(samples, generator=chance, device="cpu")
    return torch.exp2((order % powers).double() - powers // 3)


def _largest(rows: Tensor) -> Tensor:
    """Of each row, in absolute value; not finite where one is not."""
    return rows.abs().amax(1)  # on the CPU 20 times as fast as vector_norm with inf
