"""Looks at a model once, on three samples, before it is trusted with a batch.

Whether samples are kept apart cannot be told from class names: a batch norm has many disguises, and a loss can mix
samples too. So each sample is tainted in turn, and whatever changes in the forward, or receives a gradient from that
sample's loss in the backward, belongs to it. If it reaches another sample's loss, or a buffer, or rows that cannot
all be one sample's, the model is refused. The same evidence says which rows of each operation belong to which sample,
however the model reshapes its batch.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from dpscale.engine.capture import Blueprint, Meeting, Site
from dpscale.engine.completeness import check_met, check_nothing_lost, reached
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.layout import Layout, candidates, fit
from dpscale.engine.observation import Observer, Record, Seen, check_same_operations
from dpscale.engine.rules import RULE_OF, Call
from dpscale.engine.rules.generic import by_name, replay
from dpscale.engine.taint import (
    FEWER,
    LATER,
    SAMPLES,
    Undisturbed,
    departs,
    differs,
    inconclusive,
    require_finite,
    some,
    spoiled,
    taints,
    where_samples_meet,
)


def inspect(model: nn.Module, parameters: Mapping[str, Tensor], run: Callable[[Any], Any], batch: Any) -> Blueprint:
    """Find out where the samples are in everything that the parameters meet, or refuse the model.

    Args:
        model: the module; it and the random states are left as they were.
        parameters: the trainable parameters, by name.
        run: the computation, from a batch to tensors whose first dimension is the batch (the losses).
        batch: any batch; up to three of its samples are used.

    Raises:
        UnsupportedModel: samples are coupled, the forward changes a parameter, or a parameter is complex or used where
            the engine cannot follow.
    """
    require_finite(model)
    _require_real(parameters)
    undisturbed = Undisturbed(model)
    observer = Observer(undisturbed, parameters, run)
    few, base = observer.compare(batch)
    probe = some(batch, SAMPLES)
    with undisturbed():
        trained = reached(parameters, base.outputs)
    check_met(trained, {name for s in base.seen for names in s.met.values() for name in names.split("/")})
    touched = _Touched(base)
    try:
        with undisturbed():
            touched.by_losses()
        for i, data in taints(probe, batch):
            touched.by_sample(i, observer.record(data))
        _check_whole(undisturbed, run, batch)
        evidence = zip(base.seen, few.seen, touched.inputs, touched.outputs, touched.grads, strict=True)
        sites = [_site(*args) for args in evidence]
        blueprint = Blueprint(tuple(sites), inconclusive(batch))
    except _Coupled:
        raise _refusal(undisturbed, run, batch) from None
    with undisturbed():
        check_nothing_lost(parameters, trained, blueprint, run, probe)
    return blueprint


def _refusal(undisturbed: Undisturbed, run: Callable[[Any], Any], batch: Any, seed: int = 0) -> UnsupportedModel:
    """Why: samples are coupled, or it only looks so."""
    if _changes_by_itself(undisturbed, run, batch, seed):
        return UnsupportedModel(
            "The forward gives something else each time, on the very same batch: it computes with what it changes "
            "itself (a counter, a cache?), so that nothing can be told about its samples. Change that outside of "
            "the forward, as a buffer, or hand it over with the batch."
        )
    culprit = where_samples_meet(undisturbed, run, batch, seed)
    return UnsupportedModel(
        f"Samples are coupled at {culprit}: what one sample holds reaches another. A per-sample gradient, and so "
        "a bound on one sample's influence, does not exist then. The usual causes are BatchNorm "
        "(dpscale.fix(model) puts GroupNorm in its place), statistics taken over the batch, and a loss that mixes "
        "samples or averages over them (use reduction='none')."
    )


def _require_real(parameters: Mapping[str, Tensor]) -> None:
    for name, p in parameters.items():
        if p.is_complex():
            raise UnsupportedModel(
                f"Parameter {name!r} is complex, and the norms of complex gradients are not known here. Keep its real "
                "and imaginary part as a parameter of real numbers, and use torch.view_as_complex in the forward."
            )


class _Coupled(Exception):
    """Evidence that one sample reaches another."""


Masks = list[Tensor]
"""For each sample, the elements it touched."""


class _Touched:
    """Evidence, for each met call's inputs and outputs, of which elements belong to which sample."""

    def __init__(self, base: Record) -> None:
        self.base = base
        self.inputs: list[dict[int, Masks]] = [
            {k: _nothing(t) for k, t in enumerate(s.inputs) if isinstance(t, Tensor) and k not in s.met}
            for s in base.seen
        ]
        self.outputs: list[list[Masks]] = [[_nothing(t) for t in s.outputs] for s in base.seen]
        self.grads: list[dict[int, Masks]] = [{j: _nothing(s.outputs[j]) for j in s.edges} for s in base.seen]
        self._rounding = _rounding([s.outputs[j] for s in base.seen for j in s.edges])

    def by_losses(self) -> None:
        """What each sample's loss sends a gradient to. The seed is NaN, so that no zero factor hides a path."""
        edges = [(k, j, e) for k, s in enumerate(self.base.seen) for j, e in s.edges.items()]
        roots = [t for t in self.base.outputs if t.requires_grad]
        if not edges or not roots:
            return
        for i in range(SAMPLES):
            seeds = [torch.zeros_like(t) for t in roots]
            for seed in seeds:
                seed[i] = torch.nan
            grads = torch.autograd.grad(roots, [e for _, _, e in edges], seeds, retain_graph=True, allow_unused=True)
            for (k, j, _), g in zip(edges, grads, strict=True):
                if g is not None:
                    self.outputs[k][j][i] |= g.ne(0)

    def by_sample(self, i: int, run: Record) -> None:
        """What changed when sample ``i`` did; refuse if that is another sample's output, or a buffer."""
        check_same_operations(run, self.base)
        for k, (s, t) in enumerate(zip(self.base.seen, run.seen, strict=True)):
            for j, masks in enumerate(self.outputs[k]):
                masks[i] |= differs(s.outputs[j], t.outputs[j])
            for j, masks in self.inputs[k].items():
                masks[i] |= differs(s.inputs[j], t.inputs[j])
        for a, b in zip(self.base.outputs, run.outputs, strict=True):
            changed = differs(a, b).flatten(1).any(1) if a.ndim > 1 else differs(a, b)
            others = [j for j in range(len(a)) if j != i] if a.ndim else ...
            if bool(changed[others].any()):
                raise _Coupled
        _check_buffers(self.base.buffers, run.buffers)
        for (k, j), g in self.base.grads.items():
            nothing = torch.zeros_like(self.base.seen[k].outputs[j])
            ours, theirs = (nothing if t is None else t for t in (g, run.grads.get((k, j))))
            self.grads[k][j][i] |= departs(ours, theirs, self._rounding)


def _rounding(tensors: list[Tensor]) -> float:
    """How far, in parts of the largest, rounding may take gradients of the same sample apart: a backward may sum in
    another order each time, or by another kernel where some sample has a mask."""
    steps = [torch.finfo(t.dtype).eps for t in tensors]
    tf32 = any(t.is_cuda and t.dtype in (torch.float32, torch.complex64) for t in tensors)
    return float(max([0.0, *steps, 2.0**-10 * tf32]) ** 0.5)


def _check_buffers(base: list[Tensor], run: list[Tensor]) -> None:
    """A buffer must not depend on the samples."""
    if len(base) != len(run) or any(bool(differs(a, b).any()) for a, b in zip(base, run, strict=True)):
        raise UnsupportedModel(
            "A buffer of the model is updated from the samples (the running statistics of a BatchNorm?): it "
            "would carry them out of training without noise. Replace the layer (BatchNorm by GroupNorm), or "
            "stop the update."
        )


def _changes_by_itself(undisturbed: Undisturbed, run: Callable[[Any], Any], batch: Any, seed: int) -> bool:
    """Whether two runs on the same batch, with the same random numbers, give different results."""
    ours, theirs = (_Plain(undisturbed, run, batch, seed).outputs for _ in range(2))
    pairs = zip(ours, theirs, strict=True)
    return not all(torch.allclose(a, b, rtol=1e-3, equal_nan=True) for a, b in pairs)


def _check_whole(undisturbed: Undisturbed, run: Callable[[Any], Any], batch: Any) -> None:
    """What three samples do not show, a coupling that begins with larger batches: the whole batch, one tainted.

    What one forward does not show is looked for in later ones, where it draws random numbers or counts in a buffer.
    """
    tainted = spoiled(batch)

    def check(seed: int) -> bool:
        ours, theirs = (_Plain(undisturbed, run, data, seed) for data in (batch, tainted))
        if any(bool(differs(a[1:], b[1:]).any()) for a, b in zip(ours.outputs, theirs.outputs, strict=True)):
            raise _Coupled
        _check_buffers(ours.buffers, theirs.buffers)
        return ours.random or theirs.random

    if not check(0) and not undisturbed.counts:
        return
    with undisturbed():
        for seed in LATER:
            with Meeting():
                run(some(batch, SAMPLES))  # for what it counts
            try:
                check(seed)
            except _Coupled:
                raise _refusal(undisturbed, run, batch, seed) from None


class _Plain:
    """What a plain run gives, from the same random numbers each time, and whether it drew any."""

    def __init__(self, undisturbed: Undisturbed, run: Callable[[Any], Any], batch: Any, seed: int) -> None:
        with undisturbed(seed) as drew, Meeting():  # watched, though nothing is met: no path for evaluation
            self.outputs = [t.detach() for t in tree_leaves(run(batch)) if isinstance(t, Tensor)]
            self.buffers = [b.clone() for b in undisturbed.model.buffers()]
            self.random = drew()


def _site(seen: Seen, small: Seen, inputs: dict[int, Masks], outputs: list[Masks], grads: dict[int, Masks]) -> Site:
    """What the evidence says about one met call."""
    if not seen.edges:
        return Site(seen.function, "plain")
    if not seen.on_data and not seen.expands(small):
        return Site(seen.function, "shared")
    layouts = {f"out{j}": _layout(seen, seen.outputs[j], small.outputs[j], outputs[j]) for j in seen.edges}
    for j, masks in grads.items():
        if not fit([layouts[f"out{j}"]], masks):
            raise UnsupportedModel(
                f"Samples are coupled in the backward: the gradient of one sample at {seen.name} depends on another, "
                "though no loss does. A hook on a tensor or a module, or the backward of a custom autograd function, "
                "computes with the whole batch. Let it treat each sample apart, or leave it out."
            )
    if not seen.on_data:
        return Site(seen.function, "expanded", layouts=layouts)
    rule = RULE_OF.get(seen.function)
    if rule is not None and not seen.complex:  # rules are written for real numbers
        args, kwargs = tree_unflatten(seen.inputs, seen.spec)
        arguments = rule.bind(args, kwargs)
        parameters = [seen.inputs[k] for k in seen.met]
        wanted = frozenset(n for n, a in arguments.items() if any(a is p for p in parameters))
        call = Call(seen.function, arguments, SAMPLES, next(iter(layouts.values())), {}, wanted)
        if wanted <= set(rule.trainable) and rule.accepts(call):
            return Site(seen.function, "rows", rule, layouts)
    if seen.random:
        raise UnsupportedModel(
            f"{seen.name} draws random numbers inside; replaying it per sample would draw others. Set its dropout to "
            "0, or make the dropout an operation of its own."
        )
    for k, masks in inputs.items():
        if seen.inputs[k].shape != small.inputs[k].shape:
            layouts[str(k)] = _layout(seen, seen.inputs[k], small.inputs[k], masks)
        elif any(bool(m.any()) for m in masks):
            raise _Coupled
    _check_replay(seen, layouts)
    return Site(seen.function, "rows", None, layouts)


def _check_replay(seen: Seen, layouts: Mapping[str, Layout]) -> None:
    """The generic rule runs the operation on one sample's rows: that must give its rows of the whole result."""
    arguments, spec = by_name(*tree_unflatten(seen.inputs, seen.spec))
    run = replay(seen.again, spec)
    for i in range(SAMPLES):
        own = {n: layouts[n].per_sample(t, SAMPLES)[i] for n, t in arguments.items() if n in layouts}
        try:
            with torch.no_grad():
                tensors = [t for t in tree_leaves(run({**arguments, **own})) if isinstance(t, Tensor)]
            pairs = [(tensors[j], layouts[f"out{j}"].per_sample(seen.outputs[j], SAMPLES)[i]) for j in seen.edges]
            same = all(a.shape == b.shape and torch.allclose(a, b, rtol=1e-2, equal_nan=True) for a, b in pairs)
        except (RuntimeError, IndexError, ValueError):
            same = False
        if not same:
            raise UnsupportedModel(
                f"{seen.name} has no rule of its own, and run on one sample it does not give that sample's rows of "
                "the batch, so its per-sample gradients are unknown. Write it with other operations, or freeze the "
                "parameter with requires_grad_(False)."
            )


def _layout(seen: Seen, t: Tensor, small: Tensor, masks: Masks) -> Layout:
    agree = fit(candidates(t.shape, small.shape, SAMPLES, FEWER), masks)
    if not agree:
        raise _Coupled
    # Of data, some evidence always shows. A repeated parameter has none where no probed loss depends on it.
    if len(agree) > 1 and (not seen.on_data or any(bool(m.any()) for m in masks)):
        raise UnsupportedModel(
            f"It cannot be told which rows of {seen.name}, of shape {tuple(t.shape)} on {SAMPLES} samples, belong to "
            "which sample. Keep the batch in a dimension of its own."
        )
    return agree[0]


def _nothing(t: Tensor) -> Masks:
    return [torch.zeros(t.shape, dtype=torch.bool, device=t.device) for _ in range(SAMPLES)]
