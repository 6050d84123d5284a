"""The sum itself: a taped forward and a backward at each point, per-sample norms, weights, the weighted sum.

Gradients arrive per operation; norms are per sample over all parameters; a parameter used in several operations, or at
several points, has the *sum* of those gradients, so its uses are added before the square, never after.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.arguments import Points
from dpscale.engine.compat import version
from dpscale.engine.errors import PassedBy, UnsupportedModel
from dpscale.engine.result import ScaledSum
from dpscale.engine.rules import Call, Form
from dpscale.engine.rules.derivation import Derived, expanded, resolve
from dpscale.engine.rules.forms import Change, Dense, Packed, drop, total, widen
from dpscale.engine.rules.generic import generic_forms
from dpscale.engine.tape.tape import Sites, Tape, TapedOp, flattened, out_of_place
from dpscale.scaling import Scaling

Forms = dict[str, Form]
"""The per-sample gradients of each parameter."""

Evaluated = tuple[list[Tape], list[Sequence[Tensor | None]], Tensor]
"""The tape of each point, what arrived at its operations, and the losses."""


@contextmanager
def exactly(device: torch.device) -> Iterator[None]:
    """No graph, and no autocast of the caller's: norms and sums are computed in the precision that they say."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield


def evaluate(
    parameters: Mapping[str, Tensor], run: Callable[[Any], Tensor], batch: Any, sites: Sites, mask: Tensor,
    points: Points | None,
) -> Evaluated:  # fmt: skip
    """A forward and a backward at each point; the coefficient and the mask ride in on the seed of the backward."""
    tapes: list[Tape] = []
    grads: list[Sequence[Tensor | None]] = []
    each: Sequence[tuple[float | Tensor, Mapping[str, Tensor] | None]] = points or [(1.0, None)]
    for coefficient, values in each:
        with torch.enable_grad(), Tape(parameters, values, sites, len(mask)) as tape:
            losses = run(batch)
        tapes.append(tape)
        grads += backward([tape], parameters, losses, coefficient * mask.to(losses.dtype))
    return tapes, grads, losses.detach()


def backward(
    tapes: Sequence[Tape], parameters: Mapping[str, Tensor], losses: Tensor, seed_B: Tensor, retain: bool = False
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
    both: Any = [*wanted, *(t for tensors in whole for t in tensors.values())]  # torch takes both, its types do not
    arrived = torch.autograd.grad([losses], both, [seed_B], allow_unused=True, retain_graph=retain)
    unseen = [n for n, g in zip(names, arrived[len(wanted) :], strict=True) if g is not None]
    if unseen:
        raise PassedBy(
            f"Parameter {unseen[0]!r} also reaches the losses where its operations cannot be seen (outside the model's "
            "own forward, or in a compiled part or custom autograd function), so its per-sample gradients are unknown. "
            "Write that part with plain operations inside the model's forward."
        )
    rest = iter(arrived)
    return [[next(rest) for _ in tape.edges] for tape in tapes]


def gradients(tapes: Sequence[Tape], grads: Sequence[Sequence[Tensor | None]], rows: Tensor | None = None) -> Forms:
    """The per-sample gradients of each parameter, over all operations and all tapes (points), from the gradients at the
    edges of each tape; of some rows alone, if they are given."""
    uses: dict[str, list[Form]] = {}
    for tape, arrived in zip(tapes, grads, strict=True):
        through: dict[str, list[Form]] = {}
        gradient = iter(arrived)
        for op in tape.ops:
            outputs = {k: g for k, g in zip(op.edges, gradient, strict=False) if g is not None}
            if outputs:
                for key, form in _forms(op, outputs, tape.samples, tape.derived):
                    form = form if rows is None else form.take(rows)
                    (through if key in tape.derived else uses).setdefault(key, []).append(form)
        for name, form in _carried_back(tape, through):
            uses.setdefault(name, []).append(form)
    return {name: total(forms).settle() for name, forms in uses.items()}


def combine(forms: Forms, rule: Scaling, mask_B: Tensor, shapes: Mapping[str, Tensor], losses_B: Tensor) -> ScaledSum:
    """Norms, then weights, then the sum; zero for those parameters of ``shapes`` that got no gradient.

    Guarantee: each sample adds at most ``rule.bound`` to the sum, in norm; one whose gradient is not finite, or that is
    masked, adds exactly nothing.
    """
    out, finite = weigh(forms, rule, mask_B, shapes, losses_B)
    if bool(finite):
        return out
    # A float32 square overflows from 1.8e19 on. Look again in float64, where no float32 gradient does.
    norms = _norms(_map(forms, widen).values(), mask_B)
    return weigh(_map(forms, drop(torch.isfinite(norms))), rule, mask_B, shapes, losses_B, norms)[0]


def weigh(
    forms: Forms, rule: Scaling, mask_B: Tensor, shapes: Mapping[str, Tensor], losses_B: Tensor,
    norms: Tensor | None = None, publish: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> tuple[ScaledSum, Tensor]:  # fmt: skip
    """`combine` without its second look, and so without a branch.

    Args:
        norms: if they are known.
        publish: called with the weights and the second return value before anything is summed; from it come the
            weights.

    Returns:
        the answer, and whether it is one: all norms were finite, the masked ones too (0 · inf is NaN in a sum), or were
        given by somebody who has dropped the others.
    """
    small = {name: form for name, form in forms.items() if isinstance(form, Dense) and form.small}
    packed = Packed.of(small) if len(small) > 1 else None
    large = {name: form for name, form in forms.items() if packed is None or name not in small}
    if norms is None:
        norms = _norms([*large.values(), *([packed.all] if packed else [])], mask_B)
    weights = rule.weight(norms)
    # A weight that float32 cannot hold to full precision (a norm near its end) would not bound what it multiplies.
    finite = torch.isfinite(norms) & (weights >= torch.finfo(torch.float32).tiny)
    weights, all_finite = weights.where(finite & mask_B, 0.0), finite.all()
    if publish is not None:
        weights = publish(weights, all_finite)
    sums = {name: form.weighted(weights) for name, form in large.items()} | (packed.weighted(weights) if packed else {})
    grads = {
        name: sums[name] if name in sums else torch.zeros_like(p, dtype=torch.promote_types(p.dtype, torch.float32))
        for name, p in shapes.items()
    }
    ignored = (~finite & mask_B).sum()
    return ScaledSum(grads, norms.where(mask_B, 0.0), weights, losses_B, ignored, rule.bound), all_finite


def _norms(forms: Iterable[Form], mask_B: Tensor) -> Tensor:
    squares = [form.norm2() for form in forms]
    if not squares:
        return torch.zeros(len(mask_B), device=mask_B.device)
    return torch.stack(squares).sum(0).sqrt()


def _map(forms: Forms, change: Change) -> Forms:
    return {name: form.map(change) for name, form in forms.items()}


def _forms(
    op: TapedOp, grads: dict[int, Tensor], samples: int, derived: Mapping[str, Derived]
) -> Iterator[tuple[str, Form]]:
    """One operation's per-sample gradients, by the key of the tensor that they are for."""
    for t, then in op.versions:
        if version(t) != then:
            raise UnsupportedModel(
                f"A tensor that {getattr(op.function, '__name__', '?')} needs for the gradient of "
                f"{next(iter(op.keys.values()))!r} was changed in place afterwards. Use the operation that is not "
                "in place."
            )
    site = op.site
    if site.role == "expanded":
        layout = site.layouts["out0"]
        repeated = expanded(derived[op.keys[0]], grads[0], layout, samples)
        found = repeated and resolve(repeated[1], repeated[0], derived)
        if not found:  # for each sample, the gradient in its own rows and zero in the others'
            own, g = torch.eye(samples, dtype=torch.bool, device=grads[0].device), grads[0]
            found = op.keys[0], Dense(torch.stack([g.where(layout.spread(one, g), 0) for one in own]))
        yield found
        return
    if site.rule is None:
        run = out_of_place(op.function)
        for k, form in generic_forms(run, op.args, op.kwargs, op.keys, site.layouts, samples, grads):
            yield op.keys[k], form
        return
    arguments, given = site.rule.bind(op.args, op.kwargs), flattened(op.args, op.kwargs)[0]
    key_of = {id(given[k]): key for k, key in op.keys.items()}
    slots = {n: key_of[id(a)] for n, a in arguments.items() if id(a) in key_of}
    call = Call(op.function, arguments, samples, site.layouts["out0"], site.layouts, frozenset(slots))
    for slot, form in site.rule.forms(call, grads[0]):
        yield slots[slot], form


def _carried_back(tape: Tape, through: Mapping[str, Sequence[Form]]) -> Iterator[tuple[str, Form]]:
    """Per-sample gradients of functions of parameters, carried back to the parameters themselves."""
    others: dict[str, Form] = {}
    for key, forms in through.items():
        form = total(forms)
        if (found := resolve(form, key, tape.derived)) is not None:
            yield found
        else:
            others[key] = form
    if others:
        yield from _chained(tape, others)


def _chained(tape: Tape, through: Mapping[str, Form]) -> Iterator[tuple[str, Form]]:
    """The same by autograd, for functions that do not keep norms (weight norm): B gradients of each."""
    outputs, leaves = [tape.derived[key].tensor for key in through], list(tape.leaves.values())
    grads = [form.per_sample().to(t.dtype) for form, t in zip(through.values(), outputs, strict=True)]
    back = torch.autograd.grad(outputs, leaves, grads, is_grads_batched=True, allow_unused=True, retain_graph=True)
    for name, g in zip(tape.leaves, back, strict=True):
        if g is not None:
            yield name, Dense(g)
