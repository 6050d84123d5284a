"""What is kept of gradients to compare them by: of each large matrix, what a few random directions see of it.

A look compares gradients a dozen times, each as large as the model. To hold and to subtract them whole takes longer
than to compute them. What is between two matrices shows in their products with a random one, of few columns, and with
its size: give or take a third for a difference of rank one, closer for any other.
"""

import numpy as np
import torch
from torch import Tensor

from dpscale.engine.rules import Form

COLUMNS = 16
"""Directions. They show less than a tenth of the square of a difference once in a million times."""

LEAST = 1 << 14
"""Matrices of no more numbers are kept whole."""


class Sketch:
    """The same directions for all gradients that are to be compared.

    Args:
        seed: that they are drawn from.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._drawn: dict[tuple[int, torch.device], Tensor] = {}

    def _columns(self, shape: torch.Size, device: torch.device) -> Tensor | None:
        """Of a tensor of this shape; None if it is kept whole."""
        if len(shape) != 2 or shape.numel() <= LEAST or shape[1] <= 2 * COLUMNS:
            return None
        place = shape[1], device
        if place not in self._drawn:
            drawn = np.random.default_rng((self._seed, shape[1])).standard_normal((shape[1], COLUMNS), np.float32)
            self._drawn[place] = torch.from_numpy(drawn).to(device) / COLUMNS**0.5
        return self._drawn[place]

    def of(self, gradient: Tensor) -> Tensor:
        """Of a gradient that is there."""
        columns = None if gradient.is_complex() else self._columns(gradient.shape, gradient.device)
        return gradient if columns is None else gradient.to(wider := _wide(gradient)) @ columns.to(wider)

    def weighted(self, form: Form, weights_B: Tensor, shape: torch.Size) -> Tensor:
        """Of a weighted sum of per-sample gradients, which is not formed where the form can do without."""
        columns = self._columns(shape, weights_B.device)
        onto = None if columns is None else form.onto(columns)
        return self.of(form.weighted(weights_B)) if onto is None else onto.weighted(weights_B)


def _wide(t: Tensor) -> torch.dtype:
    return torch.promote_types(t.dtype, torch.float32)
