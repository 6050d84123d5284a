"""Taints one sample of a small batch, and finds out what it reaches.

A sample is made NaN (which survives nearly every operation), and also exchanged for another sample (which reaches
through integers and comparisons, where NaN cannot go). What differs from the untainted run has been touched by that
sample.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.layout import candidates, fit

SAMPLES, FEWER = 3, 2
"""Samples in a probe, and in the second probe that shows which dimensions grow with the batch."""


class Watch:
    """How many captures and probes watch the forwards that run now; a recorder then keeps out of the way."""

    count = 0


def some(batch: Any, count: int) -> Any:
    """``count`` samples of a batch, repeated where it has fewer, with what is not finite made so.

    A sample that is NaN to begin with would look as if it touched everything.
    """

    def rows(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        t = t[torch.arange(count, device=t.device) % len(t)]
        return _tame(t)

    return tree_map(rows, batch)


def taints(probe: Any, batch: Any) -> Iterator[tuple[int, Any]]:
    """Every tainted version of a probe of ``batch``, with the number of the sample that was tainted."""
    numbers = any(isinstance(t, Tensor) and t.is_floating_point() for t in tree_leaves(probe))
    for i in range(SAMPLES):
        if numbers:  # integers alone cannot be NaN: that version would be the probe itself
            yield i, tree_map(lambda t, i=i: _with_nan(t, i), probe)
        yield i, tree_map(lambda t, whole, i=i: _exchanged(t, whole, i), probe, batch)


def inconclusive(batch: Any) -> bool:
    """Whether some integers of the batch are all 0, so that no other value is known to be allowed in their place."""
    return any(isinstance(t, Tensor) and _integer(t) and t.numel() > 0 and not t.any() for t in tree_leaves(batch))


def _integer(t: Tensor) -> bool:
    return not (t.is_floating_point() or t.is_complex() or t.dtype == torch.bool)


def _tame(t: Tensor) -> Tensor:
    """Finite numbers, of a size that a model can do something with."""
    if not t.is_floating_point():
        return t
    limit = min(1e6, torch.finfo(t.dtype).max)
    return t.nan_to_num(0.0, 0.0, 0.0).clamp(-limit, limit)


def _with_nan(t: Any, i: int) -> Any:
    if not (isinstance(t, Tensor) and t.is_floating_point()):
        return t
    t = t.clone()
    t[i] = torch.nan
    return t


def _exchanged(t: Any, whole: Any, i: int) -> Any:
    """Sample i replaced by one that differs from it; where there is none, integers lose one and truths are reversed."""
    if not isinstance(t, Tensor):
        return t
    t, own = t.clone(), t[i].clone()
    different = (
        differs(own.expand_as(whole), whole).flatten(1).any(1) if t.ndim > 1 else differs(own.expand_as(whole), whole)
    )
    if bool(different.any()):
        t[i] = _tame(whole[int(different.int().argmax())])
    elif t.dtype == torch.bool:
        t[i] = ~own
    elif _integer(t):
        t[i] = own - (own > 0).to(own.dtype)
    return t


def differs(a: Tensor, b: Tensor) -> Tensor:
    """Where two runs disagree; two NaNs agree."""
    if a.shape != b.shape:
        raise UnsupportedModel(
            "Shapes inside this model depend on the values in the batch, so rows cannot be attributed to samples. "
            "Keep every sample's shape the same (pad and mask)."
        )
    a, b = a.detach(), b.detach()
    return a.ne(b) & ~(a.isnan() & b.isnan()) if a.is_floating_point() else a.ne(b)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Leave buffers and random states as they were; seed the run, so that all draw the same dropout."""
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    saved = [b.clone() for b in model.buffers()]
    Watch.count += 1
    try:
        with torch.random.fork_rng(devices=devices), torch.enable_grad():
            torch.manual_seed(0)
            yield
    finally:
        Watch.count -= 1
        torch.clear_autocast_cache()  # or weights cast here, without a graph, would be taken for the caller's own
        for b, old in zip(model.buffers(), saved, strict=True):
            b.data.copy_(old)  # by .data: a graph that saved the buffer may still be walked, and the values are its own


def require_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite parameters: no gradient of it means anything."""
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(p).all()):
            raise ValueError(
                f"Parameter {name!r} holds NaN or infinity, so every sample's gradient does. Nothing was released. "
                "Load or initialize the model again; if it diverged, lower the learning rate."
            )


def where_samples_meet(model: nn.Module, run: Callable[[Any], Any], batch: Any) -> str:
    """The first operation of any kind at which one sample reaches another's rows, for the error message."""

    class Trace(TorchFunctionMode):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[tuple[str, list[Tensor]]] = []

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            tensors = [t.detach().clone() for t in tree_leaves(out) if isinstance(t, Tensor)]
            self.calls.append((getattr(func, "__name__", "?"), tensors))
            return out

    def traced(data: Any) -> list[tuple[str, list[Tensor]]]:
        trace = Trace()
        with undisturbed(model), trace:
            run(data)
        return trace.calls

    probe = some(batch, SAMPLES)
    few, base = traced(some(batch, FEWER)), traced(probe)
    runs = [(i, traced(data)) for i, data in taints(probe, batch)]
    for k, (name, outputs) in enumerate(base):
        for j, t in enumerate(outputs):
            touched = [torch.zeros_like(t, dtype=torch.bool) for _ in range(SAMPLES)]
            for i, calls in runs:
                touched[i] |= differs(t, calls[k][1][j])
            options = candidates(t.shape, few[k][1][j].shape, SAMPLES, FEWER)
            if any(bool(m.any()) for m in touched) and not fit(options, touched):
                return name
    return "the loss"
