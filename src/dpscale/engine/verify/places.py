"""Where the samples are in each operation that parameters meet, from what a look has seen of it.

A row keeps its own values when the others change, and its loss sends gradients to its own rows alone. Of the layouts
that the shapes allow, one agrees with that, or the model cannot be followed.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dpscale.engine.compat import tree_leaves
from dpscale.engine.layout import Layout, candidates
from dpscale.engine.rules import RULE_OF, Call
from dpscale.engine.tape.tape import Site, shapes_of
from dpscale.engine.verify.probe import Growth, Probe, ProbedCall
from dpscale.engine.verify.values import Gradient, changed, same

ROWS, MORE = 3, 4
"""Rows that are looked at; one of them once more shows which dimensions grow with the batch."""


class Obstacle(Exception):
    """Rows cannot be attributed to samples.

    Args:
        reason: for the user.
        lasting: whether another look at other rows would find the same.
    """

    def __init__(self, reason: str, lasting: bool = True) -> None:
        super().__init__(reason)
        self.lasting = lasting


def places(base: Probe, others: Sequence[Probe], arrived: Sequence[Gradient], growth: Growth) -> list[Site]:
    """Of every operation of ``base``.

    Args:
        base: a probe of `ROWS` rows.
        others: for each row, a probe in which that row has other company.
        arrived: for each row, what its loss sends to the operations of ``base``.
        growth: what grows with the batch.
    """
    known = [{c.name_of: c for c in other.calls} for other in others]
    if any(len(calls) != len(base.calls) for calls in known):
        raise Obstacle("which operations run depends on the values in the batch")
    sites = []
    for call in base.calls:
        alike = [calls[call.name_of] for calls in known]
        grads = [[row.get((*call.name_of, k)) for k in call.edges] for row in arrived]
        sites.append(_site(call, alike, grads, growth, base.eps))
    return sites


def _site(
    call: ProbedCall, others: Sequence[ProbedCall], grads: Sequence[Sequence[Tensor | None]], growth: Growth, eps: float
) -> Site:
    """What the evidence says about one operation."""
    if call.role == "shared":
        try:
            constant = all(all(map(same, _read(call), _read(other))) for other in others)
        except RuntimeError as error:  # tensors of torch.vmap, which are gone with it
            raise Obstacle(f"{call.name} runs inside of torch.vmap") from error
        if not constant:
            raise Obstacle(f"what meets the parameter in {call.name} depends on the values in the batch")
        return Site("shared", constants=frozenset({shapes_of(call.constants)}))
    if call.role not in ("rows", "expanded"):
        return Site(call.role)
    if not call.edges:
        return Site("plain")
    layouts = {}
    for place, j in enumerate(call.edges):
        touched = [g[place] for g in grads]
        moved = [_moved(call, call.outputs[j], other.outputs[j], eps) for other in others]
        layouts[f"out{j}"] = _layout(call, *growth.of_output(call.index, j), moved, touched, True)
    if call.role == "expanded":
        return Site("expanded", layouts=layouts)
    rule = RULE_OF.get(call.op.function)
    if rule is not None and call.taped is not None and not call.complex:  # rules are written for real numbers
        arguments = rule.bind(call.taped.args, call.taped.kwargs)
        flat = tree_leaves((call.taped.args, call.taped.kwargs))
        parameters = [flat[k] for k in call.taped.keys]
        wanted = frozenset(n for n, a in arguments.items() if any(a is p for p in parameters))
        trial = Call(call.op.function, arguments, ROWS, next(iter(layouts.values())), {}, wanted)
        if wanted <= set(rule.trainable) and rule.accepts(trial):
            return Site("rows", rule, layouts)
    if call.draws:
        raise Obstacle(f"{call.name} draws random numbers inside")
    tensors = [k for k, t in enumerate(call.inputs) if isinstance(t, Tensor)]
    for k in sorted(call.growing):
        moved = [_moved(call, call.inputs[k], other.inputs[k], eps) for other in others]
        shapes = growth.of_input(call.index, tensors.index(k))
        layouts[str(k)] = _layout(call, *shapes, moved, [None] * ROWS, False)
    return Site("rows", None, layouts)


_LIKE = {"view_as", "reshape_as", "expand_as", "type_as"}
_OVERWRITE = {"__setitem__", "copy_"}


def _read(call: ProbedCall) -> Sequence[Tensor]:
    """The constants whose values an operation reads: others may be memory that was never written."""
    name = getattr(call.op.function, "__name__", "")
    return call.constants[len(call.constants) if name in _LIKE else name in _OVERWRITE :]


def _layout(
    call: ProbedCall, more: torch.Size, shape: torch.Size, moved: Sequence[Tensor], touched: Sequence[Tensor | None],
    strict: bool,
) -> Layout:  # fmt: skip
    """The one layout that the evidence allows."""
    options = candidates(more, shape, MORE, ROWS)

    def agrees(layout: Layout) -> bool:
        owner = layout.spread(torch.arange(ROWS, device=moved[0].device), moved[0])
        kept = all(not bool((mask & (owner == i)).any()) for i, mask in enumerate(moved))
        return kept and all(
            g is None or not bool(((g != 0) & torch.isfinite(g) & (owner != i)).any()) for i, g in enumerate(touched)
        )

    agree = [layout for layout in options if agrees(layout)]
    if not agree:
        raise Obstacle(
            f"the rows of {call.name} are no sample's own in a way that repeats (sorted, packed or gathered?)"
        )
    if strict and len(agree) > 1:
        raise Obstacle(
            f"it cannot be told which rows of {call.name}, of shape {tuple(shape)}, belong to which sample", False
        )
    return agree[0]


def _moved(call: ProbedCall, ours: Tensor, theirs: Tensor, eps: float) -> Tensor:
    """Where an operation has something else, computed with numbers as coarse as ``eps``."""
    if ours.shape != theirs.shape:
        raise Obstacle(f"the shape of {call.name} depends on the values in the batch")
    moved = changed(ours, theirs)
    if ours.is_cuda and ours.is_floating_point():  # some kernels of attention add up in another order each time
        least = 4 * max(eps, 2.0**-13) * torch.maximum(ours.abs(), theirs.abs()).amax()
        moved &= ~((ours - theirs).abs() <= least)
    return moved


def keeps(moved: Tensor, more: torch.Size, samples: int, i: int) -> bool:
    """Whether there is a layout under which nothing of sample i changed."""
    for layout in candidates(more, moved.shape, samples + 1, samples):
        owner = layout.spread(torch.arange(samples, device=moved.device), moved)
        if not bool((moved & (owner == i)).any()):
            return True
    return False
