"""Whether gradients arrive in the rows of the samples that they are of, in a taped forward of a whole batch.

Every loss is given a weight of its own, a power of two. A backward that treats samples apart is linear in each of them,
so what arrives in a sample's rows is its weight times what arrives without weights, to the bit. Rows that belong to
another sample, or to several, and a backward that computes with the whole batch (clips by its norm) are off.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpscale.engine.tape.tape import Tape

Place = tuple[GradientEdge, Callable[[Tensor], Tensor]]
"""Where a gradient arrives, and what puts its samples first."""

POWERS = 6
_OFF, _COARSE = 1e-3, 0.06


def insides(tape: Tape) -> list[Place]:
    """Of every operation that was taped."""
    return [
        (edge, partial(op.site.layouts[f"out{k}"].per_sample, samples=tape.samples))
        for op in tape.ops
        for k, edge in op.edges.items()
    ]


def arrived(losses: Tensor, places: Sequence[Place], i: int) -> list[Tensor | None]:
    """What the loss of sample i sends to its own rows, place by place."""
    targets: Any = [edge for edge, _ in places]
    seed = torch.zeros_like(losses)
    seed[i] = 1.0
    grads = _grad(losses, targets, seed) if targets else ()
    return [None if g is None else rows(g)[i] for g, (_, rows) in zip(grads, places, strict=True)]


def _grad(losses: Tensor, targets: Any, seed: Tensor) -> Sequence[Tensor | None]:
    grads: Sequence[Tensor | None]
    grads = torch.autograd.grad([losses], targets, [seed], retain_graph=True, allow_unused=True)
    return grads


def misplaced(losses: Tensor, places: Sequence[Place], seed: int) -> int | None:
    """A sample in whose rows something else arrives than its own loss sends; None if there is none.

    To rounding: kernels of a GPU add up in another order each time. The weights are farther apart than that.
    """
    if not places:
        return None
    targets: Any = [edge for edge, _ in places]
    chance = torch.Generator("cpu").manual_seed(seed)  # whatever the default device is
    power = torch.randint(POWERS, losses.shape, generator=chance, device="cpu").to(losses.device)
    weights = torch.exp2(power.double() - 2).to(losses.dtype)
    plain, weighted = (_grad(losses, targets, w) for w in (torch.ones_like(losses), weights))
    for one, other, (_, rows) in zip(plain, weighted, places, strict=True):
        if one is None or other is None:
            continue
        a, b = (rows(g).reshape(len(losses), -1) for g in (one, other))
        if not a.shape[1]:
            continue
        # What is computed in 32 bits may come from 16, or from fewer.
        limit = _OFF if a.dtype == torch.float64 or not a.is_cuda else _COARSE
        limit = _COARSE if torch.finfo(a.dtype).eps > 1e-4 or torch.is_autocast_enabled(a.device.type) else limit
        apart = _largest(torch.addcmul(b, a, weights.to(a.dtype).unsqueeze(1), value=-1))
        size = _largest(a) * weights.to(apart.dtype)
        # What is not finite is so whatever its weight: such a sample adds nothing.
        off = (apart > limit * size.clamp(min=torch.finfo(a.dtype).tiny)) & torch.isfinite(apart)
        if bool(off.any()):
            return int(off.nonzero()[0])
    return None


def _largest(rows: Tensor) -> Tensor:
    """Of each row, in absolute value; not finite where one is not."""
    largest: Tensor = torch.linalg.vector_norm(rows, float("inf"), dim=1)
    return largest
