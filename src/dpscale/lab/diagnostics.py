"""The paper's measurements: gradient norms, scaling weights, and how close a noisy gradient is to the true one.

All of them look at the data without noise. They are for research on public data: nothing here is private, and whatever
holds such numbers says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer

LOW, HIGH, BINS = -8.0, 4.0, 120  # decades that the histogram of norms spans; what lies outside counts in the end bins
COSINES = 200  # bins of the cosines, from -1 to 1
NOTE = "Taken from the data without noise, so not private: for research on public data only."


class Watch:
    """Of a run: norms and weights per logarithmic bin of the norm, cosines, and mean weights. ``on`` while norms and
    cosines are taken."""

    def __init__(self) -> None:
        self.on = False
        self.epochs: list[int] = []
        self.counts, self.weights = np.zeros((2, BINS))
        self.not_finite = 0
        self.cosines: list[Tensor] = []
        self.mean_weight: list[float | None] = []
        self.seen: list[tuple[Tensor, Tensor]] = []

    def saw(self, norms: Tensor, weights: Tensor) -> None:
        """Keep those of a step until its epoch is over."""
        self.seen.append((norms, weights))

    def epoch(self, epoch: int) -> None:
        """Count the samples of an epoch's steps; a norm of 0 goes to the lowest bin."""
        norms, weights = zip(*self.seen, strict=True) if self.seen else ((), ())
        self.seen = []
        self.mean_weight.append(mean(weights))
        if not self.on or not norms:
            return
        norm_N, weight_N = (torch.cat(parts).detach().cpu().double() for parts in (norms, weights))
        finite = torch.isfinite(norm_N)
        self.not_finite += int((~finite).sum())
        decade = norm_N[finite].log10().clamp(LOW, HIGH).numpy()
        self.counts += np.histogram(decade, BINS, (LOW, HIGH))[0]
        self.weights += np.histogram(decade, BINS, (LOW, HIGH), weights=weight_N[finite].numpy())[0]
        self.epochs.append(epoch)

    def to_dict(self) -> dict[str, Any] | None:
        """Plain values for a record, only bins that have samples; None if nothing was seen. A batch without samples has
        no mean gradient, and so no cosine."""
        found: dict[str, Any] = {"norms": None, "similarity": None}
        if self.epochs:
            kept = self.counts.nonzero()[0]
            found["norms"] = {
                "epochs": self.epochs, "log10_norm": _centres(kept, LOW, (HIGH - LOW) / BINS),
                "bin_width": (HIGH - LOW) / BINS, "counts": self.counts[kept].astype(int).tolist(),
                "mean_weight": (self.weights[kept] / self.counts[kept]).tolist(), "not_finite": self.not_finite,
            }  # fmt: skip
        values = torch.stack(self.cosines).cpu().double().numpy() if self.cosines else np.empty(0)
        values = values[np.isfinite(values)].clip(-1, 1)
        if len(values):
            counts = np.histogram(values, COSINES, (-1, 1))[0]
            kept = counts.nonzero()[0]
            found["similarity"] = {
                "steps": len(values), "mean": float(values.mean()), "bin_width": 2 / COSINES,
                "cosine": _centres(kept, -1, 2 / COSINES), "counts": counts[kept].tolist(),
            }  # fmt: skip
        if not any(found.values()):
            return None
        return {"not_private": True, "note": NOTE, **found, "mean_weight": self.mean_weight}


def _centres(bins: np.ndarray, low: float, width: float) -> list[float]:
    return [round(low + (k + 0.5) * width, 6) for k in bins.tolist()]


def mean(values: Sequence[Tensor]) -> float | None:
    """Of all finite numbers; None if there are none: the loss of an empty batch is none at all."""
    finite = torch.cat([v.detach().float().reshape(-1) for v in values]) if values else torch.empty(0)
    finite = finite[torch.isfinite(finite)]
    return finite.mean().item() if len(finite) else None


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
