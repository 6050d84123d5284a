"""Finds the way back from a function of parameters to the parameter, along autograd's graph.

A graph is followed while each node either copies, or keeps norms (`Pulled`), or can be taken into the form itself: an
outer product is transposed by exchanging its operands; a lookup of rows turns their gradients into `Rows`. Whatever
else is on the way (weight norm, a product) is for autograd itself: `resolve` then says None.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dpscale.engine.layout import Layout
from dpscale.engine.rules.arithmetic import reduced
from dpscale.engine.rules.embedding import Rows
from dpscale.engine.rules.forms import Dense, Form, wide
from dpscale.engine.rules.linear import Outer
from dpscale.engine.rules.pulled import COPIES, ISOMETRIES, TRANSPOSES, Pulled, Step

LEAF = "torch::autograd::AccumulateGrad"
UNSIGNED = 1 << 63
"""Autograd shows a saved -1 as 2⁶⁴ - 1."""


def resolve(
    form: Form, derived: Tensor, names: Mapping[int, str], start: Step | None = None
) -> tuple[str, Form] | None:
    """The parameter that ``derived`` is made of, by name, and the form of its gradients; None if autograd must say it.

    Args:
        form: per-sample gradients of ``derived``, or of what ``start`` leads to.
        derived: a function of parameters, with its graph.
        names: of the parameters, by id.
        start: where in the graph to begin, if not at ``derived``.
    """
    if derived.grad_fn is None:
        return names[id(derived)], form
    step = start or Step(derived.grad_fn, derived.output_nr)
    path: list[Step] = []
    while step.name != LEAF:
        if step.name == "EmbeddingBackward0" and not path and isinstance(form, Dense) and _plain_lookup(step.node):
            rows = form.grad_B.flatten(1, -2)
            form = looked_up(step.node, step.node._saved_indices.flatten().expand(len(rows), -1), rows)
        elif step.name in TRANSPOSES and not path and isinstance(form, Outer):
            form = Outer(form.g_BTO, form.a_BTI) if _exchanges(step) else form
        elif step.name in ISOMETRIES:
            path.append(step)
        elif step.name not in COPIES:
            return None
        step = Step(*step.node.next_functions[0])
    leaf = step.node.variable
    if leaf.device != derived.device or leaf.is_complex() != derived.is_complex():
        return None
    return names[id(leaf)], Pulled(form, tuple(path)) if path else form


def expanded(whole: Tensor, g: Tensor, layout: Layout, samples: int) -> tuple[Form, Step] | None:
    """Per-sample gradients of what was repeated once per sample to make ``whole``, and where the way back goes on.

    Sample i's gradient is g in i's rows and zero elsewhere, summed over the repetitions. `expand` and `repeat` repeat
    alike for every sample, so that is a sum within i's rows; a lookup of rows of a table is `Rows`. None for others.
    """
    node: Any = whole.grad_fn
    if node is None or node.name() not in ("ExpandBackward0", "RepeatBackward0", "EmbeddingBackward0"):
        return None
    rows = layout.per_sample(wide(g), samples)
    form: Form
    if node.name() == "EmbeddingBackward0":
        index = node._saved_indices
        if not _plain_lookup(node) or layout.dim >= index.ndim:
            return None
        form = looked_up(node, layout.per_sample(index, samples).flatten(1), rows.flatten(1, -2))
    else:
        sizes = node._saved_self_sym_sizes
        batch = layout.dim - (g.ndim - len(sizes))  # the batch's dimension, counted in the parameter's own
        if batch >= 0 and sizes[batch] != 1:
            return None
        form = Dense(reduced(untiled(rows, sizes) if node.name() == "RepeatBackward0" else rows, sizes))
    return form, Step(*node.next_functions[0])


def looked_up(node: Any, index_BT: Tensor, g_BTD: Tensor) -> Rows:
    """The gradients of a table, from those of the rows that were looked up."""
    padding = node._saved_padding_idx
    if padding < UNSIGNED:
        g_BTD = g_BTD.masked_fill((index_BT == padding).unsqueeze(2), 0)
    return Rows(index_BT, g_BTD, node._saved_weight_sym_argsize_0)


def untiled(rows: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """Sum over the tiles of `repeat` within each sample; dimensions of size 1 and new ones are left to `reduced`."""
    missing = rows.ndim - 1 - len(sizes)
    for d, n in enumerate(sizes):
        if n != 1:
            rows = rows.unflatten(1 + missing + d, (-1, n)).sum(1 + missing + d)
    return rows


def _plain_lookup(node: Any) -> bool:
    return not (node._saved_scale_grad_by_freq or node._saved_sparse)


def _exchanges(step: Step) -> bool:
    """Whether a transposition of a matrix exchanges its dimensions."""
    if step.name == "TBackward0":
        return True
    if step.name == "PermuteBackward0":
        return bool(step.node._saved_dims[0] % 2 == 1)
    return bool((step.node._saved_dim0 - step.node._saved_dim1) % 2 == 1)
