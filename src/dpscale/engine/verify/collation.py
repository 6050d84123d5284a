"""Whether a sample that is collated alone is some row of the batch that it was drawn in."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpscale.engine.verify.values import Gradient, apart, close, distance, reshaped


@dataclass(frozen=True)
class Alone:
    """A sample as ``collate_fn`` gives it alone: its data, its loss, its gradient, and how finely that was computed."""

    data: Any
    loss: Tensor
    gradient: Gradient
    eps: float


def farness(alone: Alone, losses: Tensor, place: int, eps: float, gradient_of: Callable[[int], Gradient]) -> float:
    """How far the gradients of rows that have its loss are from its own, at the least: 0 if one is the same, infinite
    if none has its loss. A layer of zeros gives many rows the same loss, whatever their padding.

    Args:
        losses: of a batch.
        place: where the sample was, unless ``collate_fn`` has put the rows into another order.
        gradient_of: what a row sends to the parameters.
    """
    least = math.inf
    for i in sorted(range(len(losses)), key=lambda i: i != place):
        if close(losses[i], alone.loss, losses, eps):
            theirs = gradient_of(i)
            if apart(theirs, alone.gradient, reshaped(eps)) is None:
                return 0.0
            least = min(least, distance(theirs, alone.gradient))
    return least
