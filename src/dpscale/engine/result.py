"""The one result of a sum: what was added up, of what, and under which bound."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class ScaledSum:
    """Σ_i weight_i · gradient_i over the samples of a batch, and what it was made of.

    Guarantee: no sample adds more than ``bound`` to the sum, in norm over all trainable parameters.

    Attributes:
        grads: the sum, by parameter name, in float32 or wider.
        norms, weights: per sample, (B,); both 0 where masked.
        losses: per sample, (B,); with several points, at the last.
        ignored: how many samples had a gradient that is not finite; they add exactly nothing.
        bound: of the rule that gave the weights.

    All but ``bound`` are exact, without noise: not for release.
    """

    grads: dict[str, Tensor]
    norms: Tensor
    weights: Tensor
    losses: Tensor
    ignored: Tensor
    bound: float

    def __repr__(self) -> str:
        return f"ScaledSum({len(self.grads)} parameters, {len(self.norms)} samples, bound={self.bound:g})"


def nothing(parameters: Mapping[str, Tensor], device: torch.device, bound: float) -> ScaledSum:
    """The sum over no sample, in one row."""
    sums = {n: torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32)) for n, p in parameters.items()}
    return ScaledSum(
        grads=sums, norms=torch.zeros(1, device=device), weights=torch.zeros(1, device=device),
        losses=torch.zeros(1, device=device), ignored=torch.zeros((), dtype=torch.int64), bound=bound,
    )  # fmt: skip


def joined(parts: Sequence[ScaledSum]) -> ScaledSum:
    """One result; the gradients of all parts are already in those of the first."""
    losses, norms, weights = (
        torch.cat([getattr(part, name) for part in parts]) for name in ("losses", "norms", "weights")
    )
    ignored = torch.stack([part.ignored for part in parts]).sum()
    return replace(parts[0], losses=losses, norms=norms, weights=weights, ignored=ignored)
