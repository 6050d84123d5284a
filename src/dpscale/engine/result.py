"""The one result of the engine: a weighted sum of per-sample gradients, which carries its bound."""

from dataclasses import dataclass

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
