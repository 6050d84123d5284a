"""The paper's measurements: gradient norms, scaling weights, and how close a noisy gradient is to the true one.

All of them look at the data without noise. They are for research on public data: nothing here is private, and whatever
holds such numbers says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

LOW, HIGH, BINS = -8.0, 4.0, 120  # decades that the histogram of norms spans; what lies outside counts in the end bins
COSINES = 200  # bins of the cosines, from -1 to 1
NOTE = "Taken from the data without noise, so not private: for research on public data only."


class Norms:
    """Counts of per-sample gradient norms over logarithmic bins, and the mean weight in each bin."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self.weights = torch.zeros(BINS, dtype=torch.float64)
        self.not_finite = 0

    def add(self, epoch: int, norms: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Count the samples of an epoch's steps; a norm of 0 goes to the lowest bin."""
        if not norms:
            return
        norm_N = torch.cat(list(norms)).detach().cpu().double()
        weight_N = torch.cat(list(weights)).detach().cpu().double()
        finite = torch.isfinite(norm_N)
        self.not_finite += int((~finite).sum())
        decade = norm_N[finite].log10().clamp(LOW, HIGH)
        bins = ((decade - LOW) / (HIGH - LOW) * BINS).long().clamp(max=BINS - 1)
        self.counts.index_add_(0, bins, torch.ones_like(decade))
        self.weights.index_add_(0, bins, weight_N[finite])
        self.epochs.append(epoch)

    def to_dict(self) -> dict[str, Any] | None:
        """Plain values for a record: only bins that have samples; None if no norm was seen."""
        if not self.epochs:
            return None
        kept = self.counts.nonzero().flatten()
        width = (HIGH - LOW) / BINS
        return {
            "epochs": self.epochs, "log10_norm": [round(LOW + (k + 0.5) * width, 6) for k in kept.tolist()],
            "bin_width": width, "counts": [int(c) for c in self.counts[kept].tolist()],
            "mean_weight": (self.weights[kept] / self.counts[kept]).tolist(), "not_finite": self.not_finite,
        }  # fmt: skip


class Similarity:
    """Cosines between the noisy gradient of each step and the plain mean gradient of its batch, as a histogram."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def add(self, released: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> None:
        """One step. A batch without samples has no mean gradient and is left out."""
        self.values.append(cosine(released, mean))

    def to_dict(self) -> dict[str, Any] | None:
        """Plain values for a record; None if no step was seen."""
        values = torch.stack(self.values).cpu() if self.values else torch.empty(0)
        values = values[torch.isfinite(values)].double().clamp(-1, 1)
        if not len(values):
            return None
        counts = torch.histc(values, COSINES, -1, 1)
        kept = counts.nonzero().flatten()
        return {
            "steps": len(values), "mean": values.mean().item(), "bin_width": 2 / COSINES,
            "cosine": [round(-1 + (k + 0.5) * 2 / COSINES, 6) for k in kept.tolist()],
            "counts": [int(c) for c in counts[kept].tolist()],
        }  # fmt: skip


def cosine(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Tensor:
    """Of two gradients, each a mapping from names to tensors; not a number if one of them is zero."""
    inner, left, right = (
        torch.stack([(a[n].double() * b[n].double()).sum() for n in one]).sum()
        for a, b in ((one, other), (one, one), (other, other))
    )
    return inner / (left * right).sqrt()


class Released:
    """The noisy gradient of the step that an optimizer is about to make, without what outer momentum adds to it.

    A velocity is M_k = (1 - γ1)·M_(k-1) + g_k; what was released at step k is g_k.

    Args:
        optimizer: the one that the private steps are handed to.
        names: its parameters by name.
        gamma1: of the outer momentum; 1 where there is none.
    """

    def __init__(self, optimizer: Optimizer, names: Mapping[str, Tensor], gamma1: float) -> None:
        self.gradient: dict[str, Tensor] = {}
        self._parameters, self._keeps = dict(names), 1 - gamma1
        self._velocity: dict[str, Tensor] = {}
        optimizer.register_step_pre_hook(self._look)

    def _look(self, *_: Any) -> None:
        velocity = {n: p.grad.detach().clone() for n, p in self._parameters.items() if p.grad is not None}
        before = self._velocity
        self.gradient = {n: v - self._keeps * before[n] if n in before else v for n, v in velocity.items()}
        self._velocity = velocity if self._keeps else {}
