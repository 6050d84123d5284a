"""When two values of a look are the same: to the bit, or to rounding."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Gradient = dict[Any, Tensor]
"""By parameter, or by operation and output."""


def changed(a: Tensor, b: Tensor) -> Tensor:
    """Where they differ; NaN is NaN."""
    return a.ne(b) & ~(a.ne(a) & b.ne(b))


def same(a: Tensor, b: Tensor) -> bool:
    """To the bit; NaN is NaN."""
    return a.shape == b.shape and not bool(changed(a.detach(), b.detach()).any())


def near(a: Tensor, b: Tensor, scale: Tensor, eps: float, limit: float | None = None) -> bool:
    """To rounding, relative to the scale; what is not finite is the same, wherever it is."""
    a, b, scale = (t.detach().double() for t in (a, b, scale))
    if not bool(torch.isfinite(a)) or not bool(torch.isfinite(b)):
        return bool(torch.isfinite(a) == torch.isfinite(b))
    finite = scale[torch.isfinite(scale)].abs()
    limit = reshaped(eps) if limit is None else limit
    return bool((a - b).abs() <= limit * torch.cat([finite.flatten(), b.abs().view(1)]).max())


def reshaped(eps: float) -> float:
    """By how much of itself a value may be off where there were fewer rows or more."""
    return float(max(eps, 2.0**-36) ** 0.5)


def rounding(eps: float) -> float:
    """By how much of itself a loss may be off where operations had other shapes."""
    return max(8 * eps, 64 * 2.0**-23)


def close(a: Tensor, b: Tensor, scale: Tensor, eps: float) -> bool:
    """To rounding, and closer than `near`: where one of many is looked for, another may be near by chance."""
    return near(a, b, scale, eps, min(256 * eps, eps**0.5))


def gradient(losses: Tensor, seed: Sequence[float], targets: Mapping[Any, Any]) -> Gradient:
    """What arrives at each target from so much of each loss, if anything does."""
    if not targets or not losses.requires_grad:
        return {}
    weights = torch.tensor(seed, dtype=losses.dtype, device=losses.device)
    grads = torch.autograd.grad([losses], list(targets.values()), [weights], retain_graph=True, allow_unused=True)
    return {key: g.to_dense() if g.is_sparse else g for key, g in zip(targets, grads, strict=True) if g is not None}


def size(gradient: Gradient) -> float:
    """The norm."""
    return float(torch.stack([torch.linalg.vector_norm(g) for g in gradient.values()]).norm()) if gradient else 0.0


def apart(ours: Gradient, theirs: Gradient, rounding: float) -> Any:
    """The first name at which two gradients differ by more than rounding, relative to it and to the whole; those that
    are not finite do not differ."""
    whole = size(theirs)
    if not np.isfinite(whole):
        return next(iter(theirs)) if np.isfinite(size(ours)) else None
    for name in [*theirs, *(ours.keys() - theirs.keys())]:
        a, b = ours.get(name), theirs.get(name)
        off = torch.linalg.vector_norm(a - b if a is not None and b is not None else a if b is None else b)
        if float(off) > relative(rounding) * (size({name: b}) if b is not None else 0.0) + rounding * whole:
            return name
    return None


def relative(rounding: float) -> float:
    """By how much of itself a gradient may be off: in 16 bits, too, half of it is not rounding."""
    return min(10 * rounding, 0.25)


def added(gradients: Sequence[Gradient], weights: Sequence[float] | None = None) -> Gradient:
    """Their sum, each with its weight; one of weight 0 may be infinite."""
    total: Gradient = {}
    for each, weight in zip(gradients, weights or [1.0] * len(gradients), strict=True):
        for key, g in each.items() if weight else ():
            g = g if weight == 1 else weight * g
            total[key] = total[key] + g if key in total else g
    return total


def distance(a: Gradient, b: Gradient) -> float:
    """The norm of what is between two gradients."""
    return size(added([a, b], [1.0, -1.0]))
