"""Gradient norms and weights of the last epochs, kept as a histogram. Taken without noise: not private."""

from typing import Any

import torch
from torch import Tensor

LOW, HIGH, BINS = -8.0, 4.0, 120  # decades that the histogram spans; what lies outside counts in the end bins
NOTE = "Taken from the data without noise, so not private: for research on public data only."


class Norms:
    """Counts of per-sample gradient norms over logarithmic bins, and the mean weight in each bin."""

    def __init__(self) -> None:
        self.epochs: list[int] = []
        self.counts = torch.zeros(BINS, dtype=torch.float64)
        self.weights = torch.zeros(BINS, dtype=torch.float64)
        self.not_finite = 0

    def add(self, epoch: int, norms: list[Tensor], weights: list[Tensor]) -> None:
        """Count the samples of an epoch's steps; a norm of 0 goes to the lowest bin."""
        if not norms:
            return
        norm_N = torch.cat(norms).detach().cpu().double()
        weight_N = torch.cat(weights).detach().cpu().double()
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
            "not_private": True,
            "note": NOTE,
            "epochs": self.epochs,
            "log10_norm": [round(LOW + (k + 0.5) * width, 6) for k in kept.tolist()],
            "bin_width": width,
            "counts": [int(c) for c in self.counts[kept].tolist()],
            "mean_weight": (self.weights[kept] / self.counts[kept]).tolist(),
            "not_finite": self.not_finite,
        }
