"""The same sum, one sample at a time: for models that are right but whose rows cannot be followed.

Each sample is a batch of one and plain autograd gives its gradient, whatever the model does inside: rows that are
sorted, packed or routed to experts, other operations for other values, custom autograd functions. Exact, and as slow
as the batch is large.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dpscale.engine.compat import reparametrized
from dpscale.engine.result import ScaledSum
from dpscale.engine.rules.forms import wide
from dpscale.engine.tape.tape import unrecorded
from dpscale.engine.verify.rows import take
from dpscale.scaling import Scaling

Gradient = dict[str, Tensor]


def sum_by_sample(
    model: nn.Module, parameters: Mapping[str, Tensor], run: Callable[[Any], Tensor], batch: Any, rule: Scaling,
    mask_B: Tensor, points: Any, change: Callable[[Gradient, slice], Mapping[str, Tensor]] | None,
) -> ScaledSum:  # fmt: skip
    """Σ_i w(‖g_i‖)·g_i by a loop over samples; a masked one is not run at all."""
    sums: Gradient = {n: torch.zeros_like(wide(p.detach())) for n, p in parameters.items()}
    device = mask_B.device
    dtype = torch.promote_types(next(iter(parameters.values())).dtype, torch.float32)
    norms, weights, losses = (torch.zeros(len(mask_B), dtype=dtype, device=device) for _ in range(3))
    ignored = 0
    for i in torch.nonzero(mask_B).flatten().tolist():
        gradient, losses[i] = _gradient(model, parameters, run, take(batch, [i]), points)
        if change is not None:
            changed = change({n: g.unsqueeze(0) for n, g in gradient.items()}, slice(i, i + 1))
            gradient = {n: g.squeeze(0) for n, g in changed.items()}
        norm = torch.stack([g.double().norm() for g in gradient.values()]).norm()
        norms[i] = norm
        weight = rule.weight(norm.to(dtype).unsqueeze(0))[0]
        if not bool(torch.isfinite(norm)) or not bool(weight >= torch.finfo(torch.float32).tiny):
            ignored += 1
            continue
        weights[i] = weight
        for n, g in gradient.items():
            sums[n] += weight.to(g.dtype) * g
    return ScaledSum(sums, norms, weights, losses, torch.tensor(ignored), rule.bound)


def _gradient(
    model: nn.Module, parameters: Mapping[str, Tensor], run: Callable[[Any], Tensor], one: Any, points: Any
) -> tuple[Gradient, Tensor]:
    """Of one sample, combined over the points; and its loss at the last."""
    total: Gradient = {n: torch.zeros_like(wide(p.detach())) for n, p in parameters.items()}
    loss = torch.zeros(())
    for coefficient, values in points or [(1.0, None)]:
        at = parameters if values is None else {n: values[n].detach().clone().requires_grad_() for n in parameters}
        with torch.enable_grad(), unrecorded(), reparametrized(model, None if values is None else at):
            loss = run(one).sum()
            grads = torch.autograd.grad(loss, list(at.values()), allow_unused=True) if loss.requires_grad else ()
        for n, g in zip(at, grads, strict=False):
            if g is not None:
                total[n] += float(coefficient) * wide(g.detach())
    return total, loss.detach()
