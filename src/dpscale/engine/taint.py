"""Taints one sample of a small batch, and finds out what it reaches.

A sample is made NaN (which survives nearly every operation), and also exchanged for another sample (which reaches
through integers and comparisons, where NaN cannot go). What differs from the untainted run has been touched by that
sample.
"""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.layout import candidates, fit

SAMPLES, FEWER = 3, 2
"""Samples in a probe, and in the second probe that shows which dimensions grow with the batch."""

LATER = range(288, 304)
"""Seeds of the forwards that are looked at where one is not like the next. With 0, their first draws in torch, numpy
and random leave no gap above 0.16: one of them is in any such part of [0, 1]."""

COUNTERS: Any = WeakTensorKeyDictionary()
"""Buffers of one whole number or truth that a forward was seen to change by itself, of any model."""


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


def spoiled(batch: Any) -> Any:
    """A batch whose first sample is tainted in either way: its numbers are NaN, what cannot be is another sample's."""

    def first(t: Any) -> Any:
        number = isinstance(t, Tensor) and t.is_floating_point()
        return _with_nan(t, 0) if number else _exchanged(t, t, 0)

    return tree_map(first, batch)


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


def departs(a: Tensor, b: Tensor, part: float) -> Tensor:
    """As `differs`, by more than that part of the largest number in ``a``."""
    if a.numel() == 0:
        return differs(a, b)
    limit = part * a.abs().nan_to_num(0.0, 0.0, 0.0).amax()
    return differs(a, b) & ~(a - b).abs().le(limit)


class Undisturbed:
    """Runs that leave a model's parameters and buffers, and the random states, as they were.

    It holds a copy of every parameter, and is not to be kept for longer than an inspection.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.counts = False
        """Whether a run changed a whole number or truth among the buffers."""
        self._kept = {n: (p, p._version, p.detach().clone()) for n, p in model.named_parameters()}

    @contextmanager
    def __call__(self, seed: int = 0) -> Iterator[Callable[[], bool]]:
        """Seeded, so that all runs draw the same dropout; yields what tells whether any random number was drawn.

        Raises:
            UnsupportedModel: the run changed a parameter.
        """
        devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
        tables = [m._buffers for m in self.model.modules()]
        buffers = [{n: (b, None if b is None else b.detach().clone()) for n, b in t.items()} for t in tables]
        python, numpy = random.getstate(), np.random.get_state()
        changed: list[str] = []
        Watch.count += 1
        try:
            with torch.random.fork_rng(devices=devices), torch.enable_grad():
                torch.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed)
                before = random_states()
                yield lambda: random_states() != before
        finally:
            Watch.count -= 1
            random.setstate(python)
            np.random.set_state(numpy)
            torch.clear_autocast_cache()  # or weights cast here, without a graph, would be taken for the caller's own
            for table, old in zip(tables, buffers, strict=True):
                self._put_back(table, old)
            changed = self._changed()
        if changed:
            raise UnsupportedModel(
                f"Parameter {changed[0]!r} is changed by the forward itself (an Embedding with max_norm does that, and "
                "a layer that starts from statistics of its first batch): what it takes from the samples would get no "
                "noise. Build the layer without it, or change the parameter outside of the forward, from public data "
                "or from parameters alone."
            )

    def _put_back(self, table: dict[str, Tensor | None], old: dict[str, tuple[Tensor | None, Tensor | None]]) -> None:
        """One module's buffers; note which of them count."""
        now = dict(table.items())  # a scripted module's are no dictionary
        for name in now.keys() - old.keys():
            del table[name]
        for name, (b, value) in old.items():
            left = now.get(name)
            if left is not b:
                table[name] = b
            if b is None or value is None:
                continue
            if left is not None and whole(left) and not torch.equal(left, value):
                self.counts = COUNTERS[b] = True
            b.data.copy_(value)  # by .data: a graph that saved the buffer may still be walked, the values are its own

    def _changed(self) -> list[str]:
        """Names of the parameters that are not what they were, which they are again."""
        now = dict(self.model.named_parameters())
        changed = []
        for name in [*self._kept, *(now.keys() - self._kept.keys())]:
            p, version, value = self._kept.get(name, (None, 0, None))
            if now.get(name) is not p:
                owner, _, own = name.rpartition(".")
                self.model.get_submodule(owner)._parameters[own] = p
            elif p is not None and value is not None:
                if p.shape != value.shape or p.dtype != value.dtype:
                    p.data = value.clone()
                elif not torch.equal(p, value):  # NaN is a change: all were finite
                    p.data.copy_(value)
                elif p._version == version:
                    continue
            changed.append(name)
        return changed


def whole(b: Tensor) -> bool:
    """Whether a buffer is one whole number or truth: a flag, or a counter."""
    return b.numel() == 1 and not (b.is_floating_point() or b.is_complex() or b.is_meta)


def torch_states() -> list[bytes]:
    """Of torch's own generators."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [state.numpy().tobytes() for state in (torch.get_rng_state(), *cuda)]


def random_states() -> tuple[Any, ...]:
    """Of all generators that are nobody's own."""
    numpy: Any = np.random.get_state()
    return *torch_states(), random.getstate(), numpy[1].tobytes(), *numpy[2:]


def require_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite parameters: no gradient of it means anything."""
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(p).all()):
            raise ValueError(
                f"Parameter {name!r} holds NaN or infinity, so every sample's gradient does. Nothing was released. "
                "Load or initialize the model again; if it diverged, lower the learning rate."
            )


def where_samples_meet(undisturbed: Undisturbed, run: Callable[[Any], Any], batch: Any, seed: int) -> str:
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
        with undisturbed(seed), trace:
            run(data)
        return trace.calls

    probe = some(batch, SAMPLES)
    few, base, again = traced(some(batch, FEWER)), traced(probe), traced(probe)
    runs = [(i, traced(data)) for i, data in taints(probe, batch)]
    names = [[name for name, _ in calls] for calls in (base, few, again, *(calls for _, calls in runs))]
    if any(each != names[0] for each in names):
        return "the loss"
    for k, (name, outputs) in enumerate(base):
        for j, t in enumerate(outputs):
            if bool(differs(t, again[k][1][j]).any()):
                continue  # it changes by itself: a counter
            touched = [torch.zeros_like(t, dtype=torch.bool) for _ in range(SAMPLES)]
            for i, calls in runs:
                touched[i] |= differs(t, calls[k][1][j])
            options = candidates(t.shape, few[k][1][j].shape, SAMPLES, FEWER)
            if any(bool(m.any()) for m in touched) and not fit(options, touched):
                return name
    return "the loss"
