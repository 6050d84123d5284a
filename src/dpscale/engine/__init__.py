"""Per-sample gradient norms and their weighted sum, in one forward and one backward."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from dpscale.checks import is_number, require
from dpscale.engine.capture import Blueprint, BlueprintMismatch, Capture
from dpscale.engine.combine import Weighted, combine, edges, gradients
from dpscale.engine.compat import tree_leaves, tree_structure
from dpscale.engine.errors import UnsupportedModel as UnsupportedModel
from dpscale.engine.functions import identity
from dpscale.engine.inspection import inspect
from dpscale.engine.modules import Structure, structure
from dpscale.engine.phases import phase
from dpscale.engine.rules.forms import Dense
from dpscale.engine.taint import inconclusive
from dpscale.engine.taint import require_finite as require_finite
from dpscale.scaling import Scaling

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch) -> losses``, one per sample, shape (B,)."""

Points = Sequence[tuple[float | Tensor, Mapping[str, Tensor]]]
"""``[(coefficient, {parameter name: tensor}), ...]``: released weights over which gradients are combined."""

_inspected: WeakKeyDictionary[nn.Module, dict[Any, Blueprint]] = WeakKeyDictionary()
_REMEMBERED = 64  # inspections of one model


@dataclass(frozen=True)
class ScaledSum(Weighted):
    """What `scaled_sum` returns: the sum, and per sample the norm, the weight and the loss.

    Attributes:
        losses: per sample, (B,); with several points, at the last.
            Like ``norms`` and ``weights`` they are exact, without noise: not for release.
    """

    losses: Tensor


def scaled_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    rule: Scaling,
    mask: Tensor | None = None,
    points: Points | None = None,
) -> ScaledSum:
    """Σ_i w(‖g_i‖)·g_i over the samples of a batch, by one forward and one backward.

    Guarantee: for a model and loss that treat samples apart (checked on the first call), every sample adds at most
    ``rule.bound`` to the sum, in norm over all trainable parameters.

    | sample                  | adds                                        |
    |-------------------------|---------------------------------------------|
    | masked                  | exactly nothing                             |
    | gradient inf or NaN     | exactly nothing, and is counted in ignored  |
    | no sample at all (B=0)  | the sum is zero                             |

    Args:
        model: any module; parameters with ``requires_grad`` are trained, others are constants.
        loss_fn: ``loss_fn(model, batch)`` -> per-sample losses, shape (B,); no mean, no sum.
        batch: any pytree of tensors with the batch as their first dimension.
        rule: from norm to weight.
        mask: (B,) bool; False leaves the sample out.
        points: ``[(coefficient, {name: tensor}), ...]``; the gradient of a sample is then
            Σ coefficient · ∇loss at those weights, and the norm is that of the combination. None: the model as it is.

    Example:
        >>> import torch; from torch import nn; import torch.nn.functional as F; from dpscale import Clip, scaled_sum
        >>> model, x, y = nn.Linear(3, 2), torch.randn(8, 3), torch.zeros(8, dtype=torch.long)
        >>> out = scaled_sum(model, lambda m, b: F.cross_entropy(m(b[0]), b[1], reduction="none"), (x, y), Clip(C=0.1))
        >>> out.grads["weight"].shape, bool((out.norms * out.weights).max() <= 0.1 + 1e-6)
        (torch.Size([2, 3]), True)
    """
    return _summed(model, loss_fn, batch, rule, mask, points)


def per_sample_sum(
    model: nn.Module,
    loss_fn: LossFn,
    batch: Any,
    rule: Scaling,
    mask: Tensor,
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]],
) -> ScaledSum:
    """As `scaled_sum`, of what ``change`` makes of the per-sample gradients (B, *shape): B whole gradients are held."""
    return _summed(model, loss_fn, batch, rule, mask, None, change)


def _summed(
    model: nn.Module, loss_fn: LossFn, batch: Any, rule: Scaling, mask: Tensor | None, points: Points | None,
    change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> ScaledSum:  # fmt: skip
    parameters = trainable(model)
    samples, device = batch_size(batch)
    mask = check_mask("scaled_sum", mask, samples, device)
    points = check_points(points, parameters)
    if samples == 0:
        dtype = torch.promote_types(next(iter(parameters.values())).dtype, torch.float32)
        none = torch.zeros(0, dtype=dtype, device=device)
        return ScaledSum(losses=none, **vars(combine({}, rule, mask, parameters)))

    def run(data: Any) -> Tensor:
        return check_losses(loss_fn(model, data), batch_size(data)[0])

    known_by = identity(loss_fn, numbers=False), signature(structure(model), batch)
    for blueprint in blueprints(model, known_by, parameters, run, batch):
        try:
            captures, grads, losses = evaluate(parameters, run, batch, blueprint, mask, points)
            break
        except BlueprintMismatch:
            continue
    with exactly(device):
        forms = gradients(captures, grads)
        if change is not None:
            whole = {
                n: forms[n].per_sample() if n in forms else p.new_zeros(samples, *p.shape)
                for n, p in parameters.items()
            }
            forms = {n: Dense(g) for n, g in change(whole).items()}
        return ScaledSum(losses=losses, **vars(combine(forms, rule, mask, parameters)))


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast of the caller's: norms and sums are computed in the precision that they say."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def blueprints(
    model: nn.Module, signature: Any, parameters: Mapping[str, Tensor], run: Callable[[Any], Any], batch: Any
) -> Iterator[Blueprint]:
    """What is known of the model; then, if that did not fit, what a new inspection finds; then an error."""
    known = _inspected.setdefault(model, {})
    found = known.pop(signature, None)
    if found is not None and not (found.provisional and not inconclusive(batch)):
        known[signature] = found  # put last: the first is forgotten first
        yield found
        known.pop(signature)
    with phase("inspecting"):
        found = inspect(model, parameters, run, batch)
    while len(known) >= _REMEMBERED:
        known.pop(next(iter(known)))
    known[signature] = found
    yield found
    raise BlueprintMismatch


def evaluate(
    parameters: Mapping[str, Tensor], run: Callable[[Any], Tensor], batch: Any, blueprint: Blueprint, mask: Tensor,
    points: Points | None,
) -> tuple[list[Capture], list[Sequence[Tensor | None]], Tensor]:  # fmt: skip
    """A forward and a backward at each point; the coefficient and the mask ride in on the seed of the backward."""
    captures: list[Capture] = []
    grads: list[Sequence[Tensor | None]] = []
    losses = None
    each: Sequence[tuple[float | Tensor, Mapping[str, Tensor] | None]] = points or [(1.0, None)]
    for coefficient, values in each:
        with torch.enable_grad(), Capture(parameters, values, blueprint, len(mask)) as capture:
            now = run(batch)
        capture.finish()
        captures.append(capture)
        grads += backward([capture], parameters, now, coefficient * mask.to(now.dtype))
        losses = now.detach()
    assert losses is not None
    return captures, grads, losses


def backward(
    captures: Sequence[Capture], parameters: Mapping[str, Tensor], losses: Tensor, seed_B: Tensor
) -> list[Sequence[Tensor | None]]:
    """The gradient at every taped operation's output, by capture; no parameter gradients are computed.

    Captured operations see stand-ins, detached. Whatever reaches a parameter, or a stand-in, went by unseen, and is
    refused.
    """
    if not losses.requires_grad:
        return [[None for _ in edges(capture)] for capture in captures]
    wanted = [e for capture in captures for e in edges(capture)]
    whole = [parameters, *(capture.leaves for capture in captures)]
    names = [n for tensors in whole for n in tensors]
    both: Any = [
        *wanted,
        *(t for tensors in whole for t in tensors.values()),
    ]  # torch takes both kinds, its types do not
    arrived = torch.autograd.grad([losses], both, [seed_B], allow_unused=True)
    unseen = [n for n, g in zip(names, arrived[len(wanted) :], strict=True) if g is not None]
    if unseen:
        raise UnsupportedModel(
            f"Parameter {unseen[0]!r} also reaches the losses where its operations cannot be seen (outside the model's "
            "own forward, or in a compiled part or custom autograd function), so its per-sample gradients are unknown. "
            "Write that part with plain operations inside the model's forward."
        )
    rest = iter(arrived)
    return [[next(rest) for _ in edges(capture)] for capture in captures]


def trainable(model: nn.Module) -> dict[str, Tensor]:
    """The parameters to train, by name; a tied parameter appears once."""
    parameters = structure(model).trainable
    if not parameters:
        raise ValueError("The model has no trainable parameter. Set requires_grad_(True) on what should be trained.")
    return dict(parameters)


def batch_size(batch: Any) -> tuple[int, torch.device]:
    """The common first dimension of a batch's tensors, and their device."""
    tensors = [t for t in tree_leaves(batch) if isinstance(t, Tensor)]
    require(bool(tensors), "scaled_sum", "batch", "a pytree that holds at least one tensor", type(batch).__name__)
    sizes = [t.shape[0] if t.ndim else None for t in tensors]
    require(
        len(set(sizes)) == 1 and sizes[0] is not None,
        "scaled_sum",
        "batch",
        "tensors that agree in their first dimension, the batch",
        [tuple(t.shape) for t in tensors],
        "Put what is not per sample into loss_fn's closure.",
    )
    return tensors[0].shape[0], tensors[0].device


def check_losses(losses: Any, samples: int) -> Tensor:
    """Losses must be one number per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"The losses must be per sample, of shape ({samples},). Got {got} instead. Compute the loss with "
            "reduction='none'; average over positions within a sample, never over the batch."
        )
    return losses


def check_mask(owner: str, mask: Tensor | None, samples: int, device: torch.device) -> Tensor:
    """A bool per sample; all True when none is given."""
    if mask is None:
        return torch.ones(samples, dtype=torch.bool, device=device)
    ok = isinstance(mask, Tensor) and mask.shape == (samples,) and mask.dtype == torch.bool
    got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else mask
    require(
        ok,
        owner,
        "mask",
        f"a bool tensor of shape ({samples},), one entry per sample",
        got,
        "True keeps a sample.",
    )
    return mask.to(device)


def check_points(points: Points | None, parameters: Mapping[str, Tensor]) -> Points | None:
    """Every point must give every trainable parameter a tensor of its shape."""
    require(points is None or len(points) > 0, "scaled_sum", "points", "None, or at least one point", points)
    for coefficient, values in points or ():
        ok = is_number(coefficient) and math.isfinite(float(coefficient))
        require(ok, "scaled_sum", "points", "with finite coefficients", coefficient)
        wrong = [n for n, p in parameters.items() if n not in values or values[n].shape != p.shape]
        require(
            not wrong, "scaled_sum", "points", "weights with the names and shapes of the trainable parameters",
            f"a point without a fitting {wrong[:3]}", "Take them from dict(model.named_parameters()).",
        )  # fmt: skip
    return points


def signature(found: Structure, batch: Any) -> Any:
    """When this changes, what the inspection of a model of that structure found may no longer hold.

    The shape of a sample is part of it, its length too: a forward may go another way for long sequences (time first)
    through the same operations, with sizes that happen to divide. The number of samples is not.
    """
    return (
        *found.switches(),
        str(tree_structure(batch)),
        tuple((t.dtype, t.shape[1:]) for t in tree_leaves(batch) if isinstance(t, Tensor)),
        *((torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")),
    )
