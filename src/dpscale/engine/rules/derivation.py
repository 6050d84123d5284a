"""Finds the way back from a function of parameters to the parameter, along the operations that were recorded.

They are followed while each either copies, or keeps norms (`Pulled`), or can be taken into the form itself: an outer
product is transposed by exchanging its operands; a lookup of rows turns their gradients into `Rows`. Whatever else is
on the way (weight norm, a product) is for autograd itself: `resolve` then returns None.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.compat import tree_leaves, version
from dpscale.engine.layout import Layout
from dpscale.engine.rules.arithmetic import reduced
from dpscale.engine.rules.embedding import Embedding, Rows
from dpscale.engine.rules.forms import Dense, Form, wide
from dpscale.engine.rules.linear import Outer
from dpscale.engine.rules.pulled import TRANSPOSES, Pulled, Step, named

COPIES = named("clone", "contiguous", "to", "type", "type_as", "float", "double", "half", "bfloat16", "cpu", "cuda")
"""They give the same numbers, up to rounding."""

CONJUGATES = named("H", "mH", "adjoint")
PERMUTES = named("permute")
EXCHANGES = named("t", "T", "mT") | CONJUGATES
"""Transposes that exchange a matrix's dimensions without being told which."""

EXPANDS = named("expand", "expand_as", "broadcast_to")
REPEATS = named("repeat", "tile")
LOOKUPS = frozenset(Embedding.functions)


@dataclass(frozen=True)
class Derived:
    """A function of parameters alone, and the operation that made it.

    Attributes:
        tensor: the function's value, with its autograd graph.
        function, args, kwargs: the operation as it ran.
        sources: where the flattened arguments hold a parameter or another derived tensor -> its key.
        output: which of the operation's flattened outputs ``tensor`` is.
        version: of the tensor when it was made. Another one now: it was changed in place, perhaps through a view.
    """

    tensor: Tensor
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    sources: Mapping[int, str]
    output: int
    version: int

    @property
    def position(self) -> int | None:
        """The source that a copy, a view or a lookup is of: its first argument, by whatever name; None if unclear."""
        if 0 in self.sources:
            return 0
        return next(iter(self.sources)) if len(self.sources) == 1 else None

    @property
    def source(self) -> Tensor | None:
        """That argument; None where the way back from here is not the adjoint of the recorded operation alone."""
        if self.position is None or version(self.tensor) != self.version:
            return None
        source: Tensor = tree_leaves((self.args, self.kwargs))[self.position]
        comparable = source.device == self.tensor.device and source.is_complex() == self.tensor.is_complex()
        return source if comparable else None

    @property
    def exchanges(self) -> bool:
        """Whether a transposition of a matrix exchanges its dimensions."""
        if self.function in EXCHANGES:
            return True
        numbers = [k for k in tree_leaves((self.args, self.kwargs)) if isinstance(k, int)]
        if self.function in PERMUTES:
            return numbers[0] % 2 == 1
        return (numbers[0] - numbers[len(numbers) // 2]) % 2 == 1  # from, to


def resolve(form: Form, key: str, derived: Mapping[str, Derived]) -> tuple[str, Form] | None:
    """The parameter that a tensor is made of, by name, and the form of its gradients; None if autograd must find them.

    ``form`` are the gradients of the tensor ``key``: one of the ``derived``, or a parameter by its name.
    """
    path: list[Step] = []
    while key in derived:
        made = derived[key]
        source, position = made.source, made.position
        if source is None or position is None or (source.is_complex() and made.function in CONJUGATES):
            return None
        if made.function in LOOKUPS:
            lookup = _lookup(made)
            if lookup is None or not isinstance(form, Dense):
                return None
            rows = Pulled(form, tuple(path)).per_sample().flatten(1, -2)  # no larger than what was looked up
            form, path = Rows.of(lookup[0], lookup[1].flatten().expand(len(rows), -1), rows), []
        elif made.function in TRANSPOSES and not path and isinstance(form, Outer) and source.ndim == 2:
            form = Outer(form.g_BTO, form.a_BTI) if made.exchanges else form
        elif made.function not in COPIES:
            step = Step.of(made.function, made.args, made.kwargs, position, made.output, made.tensor)
            if step is None:
                return None
            path.append(step)
        key = made.sources[position]
    return key, Pulled(form, tuple(path)) if path else form


def expanded(made: Derived, g: Tensor, layout: Layout, samples: int) -> tuple[str, Form] | None:
    """What was repeated once per sample, by its key, and the form of its gradients; None where that is not clear.

    Sample i's gradient is g in i's rows and zero elsewhere, summed over the repetitions. `expand` and `repeat` repeat
    alike for every sample, so that is a sum within i's rows; a lookup of rows of a table is `Rows`.
    """
    source, position = made.source, made.position
    if source is None or position is None:
        return None
    rows = layout.per_sample(wide(g), samples)
    form: Form
    if made.function in LOOKUPS:
        lookup = _lookup(made)
        if lookup is None or layout.dim >= lookup[1].ndim:
            return None
        form = Rows.of(lookup[0], layout.per_sample(lookup[1], samples).flatten(1), rows.flatten(1, -2))
    elif made.function in EXPANDS | REPEATS:
        sizes = source.shape
        batch = layout.dim - (g.ndim - len(sizes))  # the batch's dimension, counted in the parameter's own
        if batch >= 0 and sizes[batch] != 1:
            return None
        form = Dense(reduced(untiled(rows, sizes) if made.function in REPEATS else rows, sizes))
    else:
        return None
    return made.sources[position], form


def _lookup(made: Derived) -> tuple[dict[str, Any], Tensor] | None:
    """The arguments of a call of `torch.embedding` whose gradient is a plain sum, and the indices among them."""
    arguments = Embedding().bind(made.args, made.kwargs)
    index: Any = arguments.get("input", arguments.get("indices"))
    plain = index is not None and not arguments.get("scale_grad_by_freq") and not arguments.get("sparse")
    return (arguments, index) if plain else None


def untiled(rows: Tensor, sizes: torch.Size) -> Tensor:
    """Sum over the tiles of `repeat` within each sample; dimensions of size 1 and new ones are left to `reduced`."""
    missing = rows.ndim - 1 - len(sizes)
    for d, n in enumerate(sizes):
        if n != 1:
            rows = rows.unflatten(1 + missing + d, (-1, n)).sum(1 + missing + d)
    return rows
