"""The slow, obviously right oracle: a loop over samples and plain autograd. Tests compare the engine with it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpscale.engine.compat import reparametrized, tree_leaves, tree_map
from dpscale.scaling import Scaling

Points = Sequence[tuple[float, Mapping[str, Tensor]]]


def per_sample_gradients(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, points: Points | None = None
) -> dict[str, Tensor]:
    """Each sample's gradient, combined over ``points``, by parameter name: (B, *shape)."""
    names = [n for n, p in model.named_parameters() if p.requires_grad]
    samples = len(next(t for t in tree_leaves(batch) if isinstance(t, Tensor)))
    out: dict[str, list[Tensor]] = {n: [] for n in names}
    for i in range(samples):
        one = tree_map(lambda t, i=i: t[i : i + 1] if isinstance(t, Tensor) else t, batch)
        combined: dict[str, Tensor] = {}
        for coefficient, weights in points or [(1.0, dict(model.named_parameters()))]:
            at = {n: weights[n].detach().clone().requires_grad_() for n in names}
            with reparametrized(model, at):
                loss = loss_fn(model, one).sum()
            grads = torch.autograd.grad(loss, list(at.values()), allow_unused=True)
            for n, g in zip(names, grads, strict=True):
                g = torch.zeros_like(at[n]) if g is None else g
                combined[n] = combined.get(n, 0) + coefficient * g
        for n in names:
            out[n].append(combined[n])
    shapes = dict(model.named_parameters())
    return {n: torch.stack(g) if g else torch.zeros(0, *shapes[n].shape) for n, g in out.items()}


def reference_sum(
    model: nn.Module, loss_fn: Callable[[Any, Any], Tensor], batch: Any, rule: Scaling, mask: Tensor | None = None,
    points: Points | None = None,
) -> tuple[dict[str, Tensor], Tensor, Tensor]:  # fmt: skip
    """(sums by name, norms, weights): what `dpscale.scaled_sum` must equal."""
    per_sample = per_sample_gradients(model, loss_fn, batch, points)
    norms = torch.stack([g.unsqueeze(-1).flatten(1).square().sum(1) for g in per_sample.values()]).sum(0).sqrt()
    weights = rule.weight(norms)
    if mask is not None:
        norms, weights = norms * mask, weights * mask
    sums = {n: torch.einsum("b,b...->...", weights.to(g.dtype), g) for n, g in per_sample.items()}
    return sums, norms, weights
