"""Activation checkpointing (`torch.utils.checkpoint`) inside a captured forward.

A checkpointed region runs again during the backward, where no mode watches it: its operations would consume the
parameters themselves, and nothing that was taped would belong to the graph. While a forward is watched, such regions
therefore run plainly. The numbers are the same, random ones included; the memory is not saved.

`checkpoint` may have been imported anywhere by name, so it stays, and the two things it calls are exchanged.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch.utils.checkpoint as torch_checkpoint

from dpscale.engine.compat import CHECKPOINT_GENERATOR

_watched = 0
_originals: dict[str, Any] = {}


def _region(
    fn: Callable[..., Any], preserve_rng_state: bool = True, context_fn: Any = None, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Stands where torch prepares a recomputation (use_reentrant=False): before and after the region's forward."""
    if context_fn is None:
        yield
        return
    with context_fn()[0]:
        yield


class _Reentrant:
    """Stands where torch runs a region that it will run again (use_reentrant=True)."""

    @staticmethod
    def apply(run: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)


_PLAIN = {CHECKPOINT_GENERATOR: _region, "CheckpointFunction": _Reentrant}


def suspend() -> None:
    """Run checkpointed regions plainly until `resume` has been called as often."""
    global _watched
    _watched += 1
    if _watched == 1:
        for name, plain in _PLAIN.items():
            _originals[name] = getattr(torch_checkpoint, name)
            setattr(torch_checkpoint, name, plain)


def resume() -> None:
    """Checkpoint again as torch does."""
    global _watched
    _watched -= 1
    if _watched == 0:
        for name, original in _originals.items():
            setattr(torch_checkpoint, name, original)
