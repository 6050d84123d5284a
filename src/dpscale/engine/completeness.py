"""Refuse, never drop: every way in which a parameter reaches the losses must lead through operations that were met."""

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dpscale.engine.capture import Blueprint, Capture
from dpscale.engine.combine import edges, gradients
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.rules.forms import Form
from dpscale.engine.taint import SAMPLES, torch_states


def reached(parameters: Mapping[str, Tensor], outputs: Sequence[Tensor]) -> dict[str, Tensor]:
    """The parameters that plain autograd would give a gradient, and that of the sum of the outputs."""
    roots = [t for t in outputs if t.requires_grad]
    if not roots:
        raise UnsupportedModel(
            "The losses depend on no trainable parameter. Check requires_grad of the parameters, and that the loss "
            "is computed from the model's output without detach() or no_grad()."
        )
    seeds = [torch.ones_like(t) for t in roots]
    grads = torch.autograd.grad(roots, list(parameters.values()), seeds, retain_graph=True, allow_unused=True)
    return {n: g for n, g in zip(parameters, grads, strict=True) if g is not None}


def check_met(names: Iterable[str], met: Container[str]) -> None:
    """Every parameter that plain autograd would train must have been met somewhere."""
    for name in names:
        if name not in met:
            raise UnsupportedModel(
                f"Parameter {name!r} is used where its operations cannot be seen (a compiled or scripted part?), so "
                "its per-sample gradients are unknown. Pass the plain module, or freeze it with "
                "requires_grad_(False)."
            )


def check_nothing_lost(
    parameters: Mapping[str, Tensor], plain: Mapping[str, Tensor], blueprint: Blueprint, run: Callable[[Any], Any],
    probe: Any,
) -> None:  # fmt: skip
    """Whatever way a parameter of ``plain`` takes to the losses, it must lead through operations that were met.

    A parameter can be met in one place and slip by in another, as when it is written into a view of a tensor which is
    then used. Its stand-in is then reached by the backward, which must end at the operations that were met; or nothing
    is left of it where plain autograd finds a gradient, or something else.

    Args:
        plain: what `reached` gives for the probe.
    """
    before = torch_states()
    with Capture(parameters, None, blueprint, SAMPLES) as capture:
        out = run(probe)
    random = torch_states() != before
    capture.finish()
    roots = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    wanted: Any = [*edges(capture), *capture.leaves.values()]
    seeds = [torch.ones_like(t) for t in roots]
    arrived = torch.autograd.grad(roots, wanted, seeds, allow_unused=True) if roots else (None,) * len(wanted)
    split = len(wanted) - len(capture.leaves)
    lost = [n for n, g in zip(capture.leaves, arrived[split:], strict=True) if g is not None]
    with torch.no_grad():
        found = gradients([capture], [arrived[:split]])
        lost += [n for n in plain if n not in found]
        if not lost and not random:  # the same operations may draw in another order
            bits = min(torch.finfo(g.dtype).bits for g in arrived if g is not None)
            lost += _other(found, plain, bits)
    if lost:
        raise UnsupportedModel(
            f"Parameter {lost[0]!r} also reaches the losses where its operations cannot be seen (written into another "
            "tensor in place, or in a compiled part or custom autograd function), so its per-sample gradients are "
            "unknown. Write that part with plain operations inside the model's forward, or freeze the parameter with "
            "requires_grad_(False)."
        )


_APART = {64: (1e-4, 1e-9), 32: (0.1, 1e-3), 16: (0.25, 1e-2)}
"""By bits, how far the two may be apart, relative to that parameter's gradients and to all: rounding turns rectifiers
over, and some gradients are nothing but rounding. What is lost is seldom so little."""


def _other(forms: Mapping[str, Form], plain: Mapping[str, Tensor], bits: int) -> list[str]:
    """Parameters whose per-sample gradients do not add up to what plain autograd says."""
    each = {n: form.norm2().double().sqrt().sum() for n, form in forms.items() if n in plain}
    whole = sum(each.values())
    if not bool(torch.as_tensor(whole).isfinite()):
        return []
    relative, floor = _APART[bits]
    found = []
    for name, scale in each.items():
        ours = forms[name].weighted(torch.ones(SAMPLES, dtype=scale.dtype, device=scale.device))
        apart = torch.linalg.vector_norm(ours.double() - plain[name].to(ours.device).double())
        if bool(apart > relative * scale + floor * whole):
            found.append(name)
    return found
