"""Where the gradient of one sample's loss arrives in a taped forward: in that sample's rows, and nowhere else."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from dpscale.engine.tape.tape import Tape

Place = tuple[GradientEdge, Callable[[Tensor], Tensor]]
"""Where a gradient arrives, and what puts its samples first."""


def insides(tape: Tape) -> list[Place]:
    """Of every operation that was taped."""
    return [
        (edge, partial(op.site.layouts[f"out{k}"].per_sample, samples=tape.samples))
        for op in tape.ops
        for k, edge in op.edges.items()
    ]


def reaches_others(losses: Tensor, i: int, places: Sequence[Place]) -> bool:
    """Whether anything of loss ``i`` arrives in rows of other samples."""
    targets: Any = [edge for edge, _ in places]

    def others(seed: float) -> Iterator[Tensor]:
        seeds = torch.zeros_like(losses)
        seeds[i] = seed
        grads = torch.autograd.grad([losses], targets, [seeds], retain_graph=True, allow_unused=True)
        for g, (_, rows) in zip(grads, places, strict=True):
            if g is not None:
                each = rows(g)
                yield torch.cat([each[:i], each[i + 1 :]]).ne(0)

    if not places or not any(bool(rows.any()) for rows in others(1.0)):
        return False
    # What is not finite is so without any seed: it is looked at apart, and adds nothing.
    return any(bool((now & ~at_rest).any()) for now, at_rest in zip(others(1.0), others(0.0), strict=True))
