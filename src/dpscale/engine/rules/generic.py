"""Any other operation: one sample's gradient by the operation's own vector-Jacobian product, mapped over samples.

Exact for every operation that treats samples apart and draws no random numbers, at the cost of holding B gradients of
the parameters it consumes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.compat import tree_flatten, tree_leaves, tree_unflatten
from dpscale.engine.layout import Layout
from dpscale.engine.rules.forms import Dense, Form, wide

Numbered = Mapping[int, Tensor]


def generic_forms(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], wanted: Iterable[int],
    layouts: Mapping[str, Layout], samples: int, grads: Numbered,
) -> Iterator[tuple[int, Form]]:  # fmt: skip
    """Dense gradients of the ``wanted`` arguments of a call, by their place among all of them flattened.

    Args:
        layouts: of the arguments that carry the batch ("0", …) and of the outputs ("out0", …).
        grads: by number of the output; only those that a gradient reached.
    """
    flat, spec = tree_flatten((args, dict(kwargs)))
    leaves = {k: flat[k] for k in wanted}
    batched = {k: layouts[str(k)].per_sample(t, samples) for k, t in enumerate(flat) if str(k) in layouts}
    arrived = [layouts[f"out{k}"].per_sample(g, samples) for k, g in grads.items()]

    def outputs(values: Numbered, sample: Numbered) -> list[Tensor]:
        put = {**sample, **values}
        args, kwargs = tree_unflatten([put.get(k, leaf) for k, leaf in enumerate(flat)], spec)
        tensors = [t for t in tree_leaves(function(*args, **kwargs)) if isinstance(t, Tensor)]
        return [tensors[k] for k in grads]

    def gradient(sample: Numbered, g: list[Tensor]) -> Numbered:
        out, pullback = torch.func.vjp(lambda v: outputs(v, sample), leaves)[:2]
        return pullback([gi.to(o.dtype) for gi, o in zip(g, out, strict=True)])[0]  # type: ignore[no-any-return]

    if len(arrived[0]) and arrived[0].is_cuda and type(arrived[0]) is Tensor:
        _try_indices(function, flat, spec, batched)
    try:
        result = torch.func.vmap(gradient)(batched, arrived)
    except RuntimeError:  # an operation without a batching rule: the same, a sample at a time
        parts = [gradient({k: t[i] for k, t in batched.items()}, [g[i] for g in arrived]) for i in range(samples)]
        result = {k: torch.stack([part[k] for part in parts]) for k in leaves}
    for k, grad in result.items():
        yield k, Dense(wide(grad))


def _try_indices(function: Callable[..., Any], flat: list[Any], spec: Any, batched: Numbered) -> None:
    """Run the first sample on the CPU, if there are indices that are not its own: those of a whole batch are out of
    range for one sample, which is an error there. On a GPU it would end the process."""
    whole = [t for k, t in enumerate(flat) if isinstance(t, Tensor) and k not in batched]
    if any(t.dtype in (torch.int32, torch.int64) for t in whole):
        one = [batched[k][0] if k in batched else t for k, t in enumerate(flat)]
        args, kwargs = tree_unflatten([t.detach().cpu() if isinstance(t, Tensor) else t for t in one], spec)
        function(*args, **kwargs)
