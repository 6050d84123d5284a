"""A forward and a backward at each released point, taped."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.arguments import Points
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.tape.tape import Sites, Tape


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast of the caller's: norms and sums are computed in the precision that they say."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def evaluate(
    parameters: Mapping[str, Tensor], run: Callable[[Any], Tensor], batch: Any, sites: Sites, mask: Tensor,
    points: Points | None,
) -> tuple[list[Tape], list[Sequence[Tensor | None]], Tensor]:  # fmt: skip
    """A forward and a backward at each point; the coefficient and the mask ride in on the seed of the backward."""
    tapes: list[Tape] = []
    grads: list[Sequence[Tensor | None]] = []
    losses = None
    each: Sequence[tuple[float | Tensor, Mapping[str, Tensor] | None]] = points or [(1.0, None)]
    for coefficient, values in each:
        with torch.enable_grad(), Tape(parameters, values, sites, len(mask)) as tape:
            now = run(batch)
        tapes.append(tape)
        grads += backward([tape], parameters, now, coefficient * mask.to(now.dtype))
        losses = now.detach()
    assert losses is not None
    return tapes, grads, losses


def backward(
    tapes: Sequence[Tape], parameters: Mapping[str, Tensor], losses: Tensor, seed_B: Tensor
) -> list[Sequence[Tensor | None]]:
    """The gradient at every taped operation's output, by tape; no parameter gradients are computed.

    Taped operations see stand-ins, detached. Whatever reaches a parameter, or a stand-in, went by unseen, and is
    refused.
    """
    if not losses.requires_grad:
        return [[None for _ in tape.edges] for tape in tapes]
    wanted = [e for tape in tapes for e in tape.edges]
    whole = [parameters, *(tape.leaves for tape in tapes)]
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
    return [[next(rest) for _ in tape.edges] for tape in tapes]
