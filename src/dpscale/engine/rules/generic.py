"""Any other operation: one sample's gradient by the operation's own vector-Jacobian product, mapped over samples.

Exact for every operation that treats samples apart and draws no random numbers, at the cost of holding B gradients of
the parameters it consumes.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.compat import tree_flatten, tree_leaves, tree_unflatten
from dpscale.engine.rules.base import Call
from dpscale.engine.rules.forms import Dense, Form, wide


def generic_forms(call: Call, leaves: Mapping[str, Tensor], grads: Mapping[int, Tensor]) -> Iterator[tuple[str, Form]]:
    """Dense gradients of ``leaves`` from the gradients of the outputs.

    Args:
        call: the operation as `replay` gives it; its arguments are the leaves of `by_name`, with layouts for those that
            carry the batch and for the outputs ("out0", …).
        leaves: the arguments to differentiate.
        grads: by number of the output; only those that a gradient reached.
    """
    batched = {n: call.rows(t, call.layouts[n]) for n, t in call.arguments.items() if n in call.layouts}
    wanted = [call.rows(g, call.layouts[f"out{k}"]) for k, g in grads.items()]

    def outputs(values: Mapping[str, Tensor], sample: Mapping[str, Tensor]) -> list[Tensor]:
        tensors = [
            t for t in tree_leaves(call.function({**call.arguments, **sample, **values})) if isinstance(t, Tensor)
        ]
        return [tensors[k] for k in grads]

    def gradient(sample: Mapping[str, Tensor], g: list[Tensor]) -> Mapping[str, Tensor]:
        out, pullback = torch.func.vjp(lambda v: outputs(v, sample), dict(leaves))[:2]
        return pullback([gi.to(o.dtype) for gi, o in zip(g, out, strict=True)])[0]  # type: ignore[no-any-return]

    try:
        result = torch.func.vmap(gradient)(batched, wanted)
    except RuntimeError:  # an operation without a batching rule: the same, a sample at a time
        parts = [gradient({n: t[i] for n, t in batched.items()}, [g[i] for g in wanted]) for i in range(call.samples)]
        result = {n: torch.stack([p[n] for p in parts]) for n in leaves}
    for name, grad in result.items():
        yield name, Dense(wide(grad))


def by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], Any]:
    """Every leaf of a call's arguments under a name, and the structure that puts them back."""
    flat, spec = tree_flatten((args, dict(kwargs)))
    return {str(k): leaf for k, leaf in enumerate(flat)}, spec


def replay(function: Any, spec: Any) -> Any:
    """The operation as a function of the named leaves of `by_name`."""

    def run(arguments: Mapping[str, Any]) -> Any:
        args, kwargs = tree_unflatten([arguments[str(k)] for k in range(len(arguments))], spec)
        return function(*args, **kwargs)

    return run
