"""What a rule is, and what it hands over: per-sample gradients of one parameter, in the cheapest shape that is exact.

An operation never hands over B full gradients. It hands over a *form*: what is needed to say the squared norm of each
sample's gradient, and to sum those gradients under any weights. Forms add up: a parameter that is used twice has the
sum of its forms. Forms of one kind are joined, of different kinds kept side by side (`Sum`):

    ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩

The squares of two uses alone would miss the cross term, and with it up to half of the norm. Where a pair of forms does
not know its inner product, the gradients themselves are added.

Shape suffixes: B samples, T positions of one sample, I inputs, O outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, reduce
from itertools import combinations
from typing import Any, Self

import torch
from torch import Tensor

from dpscale.engine.compat import storage
from dpscale.engine.layout import Layout, example_size

PACK = 1 << 14
"""Gradients of no more numbers than this per sample are put side by side with others; on the CPU, of no more in all."""

Change = Callable[[Tensor], Tensor]
"""A change of a batched operand (its leading dimension is B): see `widen` and `drop`."""


@dataclass(frozen=True)
class Form(ABC):
    """The gradients of B samples with respect to one tensor.

    Guarantee: ``norm2()`` and ``weighted(w)`` are exactly what ``per_sample()`` gives, up to rounding, and are computed
    in float32 or wider whatever the operands are.
    """

    @abstractmethod
    def norm2(self) -> Tensor:
        """Squared norm of each sample's gradient, (B,)."""

    @abstractmethod
    def weighted(self, weights_B: Tensor) -> Tensor:
        """Sum over samples of weight times gradient, in the shape of the tensor."""

    @abstractmethod
    def per_sample(self) -> Tensor:
        """The gradients themselves, (B, *shape). Large: the last resort."""

    def map(self, change: Change) -> Self:
        """The same form with ``change`` applied to its batched operands: the tensors of numbers that it holds."""

        def changed(t: Tensor) -> Tensor:
            return change(t) if t.is_floating_point() or t.is_complex() else t

        return self._over_operands(changed, lambda form: form.map(change))

    def take(self, rows: Tensor) -> Self:
        """The gradients of these samples alone."""
        return self._over_operands(lambda t: t[rows], lambda form: form.take(rows))

    def _over_operands(self, change: Change, inside: "Callable[[Form], Form]") -> Self:
        def changed(value: Any) -> Any:
            if isinstance(value, Tensor):
                return change(value)
            if type(value) is tuple:
                return tuple(map(changed, value))
            return inside(value) if isinstance(value, Form) else value

        return type(self)(**{name: changed(getattr(self, name)) for name in _names(type(self))})

    def onto(self, columns_IK: Tensor) -> "Form | None":
        """The gradients times a matrix of few columns, where they are matrices and that costs less than they do."""
        return None

    def settle(self) -> "Form":
        """The form with the cheapest norm and weighted sum together: itself, or the gradients where they are small."""
        return self

    def join(self, other: "Form") -> "Form | None":
        """One form for the sum of the two, or None where there is none."""
        return None

    def crosses(self, other: "Form") -> bool:
        """Whether `cross` is known for forms that cannot be joined."""
        return False

    def cross(self, other: "Form") -> Tensor | None:
        """Twice the inner product with the other's gradients, rounding counted in, (B,); None for 0."""
        return None


@cache
def _names(made: type[Form]) -> list[str]:
    """What forms of a kind hold."""
    return [field.name for field in fields(made)]


def widen(operand: Tensor) -> Tensor:
    """To float64, where float32 squares overflow."""
    return operand.double() if operand.is_floating_point() else operand


def drop(keep_B: Tensor) -> Change:
    """Exact zeros for the samples that are not kept: 0 · inf is NaN, so a zero weight alone would not do."""
    return lambda operand: operand.where(keep_B.view(-1, *[1] * (operand.ndim - 1)), 0)


@dataclass(frozen=True)
class Dense(Form):
    """The gradients themselves: right for small tensors (biases, norms' scales) and for whatever has no better form.

    ``order``: the tensor's dimensions among those of ``grad_B`` without the batch, if they lie there in another order.
    ``squares``: of their norms, if who made them knows.
    """

    grad_B: Tensor
    order: tuple[int, ...] | None = None
    squares: Tensor | None = None

    def map(self, change: Change) -> "Dense":
        """What was known of the norms holds no more: squares that overflow are to be taken anew of wider numbers."""
        return Dense(super().map(change).grad_B, self.order)

    def norm2(self) -> Tensor:
        """Sum of squares."""
        if self.squares is not None:
            return self.squares
        norms: Tensor = torch.linalg.vector_norm(self._flat(), dim=1)
        return norms.square()

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One matrix-vector product."""
        grad = self._flat()
        summed = torch.mv(grad.t(), weights_B.to(grad.dtype)).view(self.grad_B.shape[1:])
        return summed if self.order is None else summed.permute(self.order).contiguous()

    def per_sample(self) -> Tensor:
        """As held, in the tensor's order."""
        grad = wide(self.grad_B)
        return grad if self.order is None else grad.permute(0, *(1 + d for d in self.order))

    def join(self, other: Form) -> "Dense | None":
        """Add the gradients."""
        return Dense(self.per_sample() + other.per_sample()) if isinstance(other, Dense) else None

    @property
    def small(self) -> bool:
        """Whether it costs more to start work on it than to do it."""
        samples = example_size(len(self.grad_B)) if self.grad_B.device.type == "cpu" else 1
        return self.order is None and samples * self.grad_B[:1].numel() <= PACK

    def _flat(self) -> Tensor:
        return wide(self.grad_B).unsqueeze(-1).flatten(1)  # a single number has no dimension of its own


@dataclass(frozen=True)
class Packed:
    """Small gradients of many tensors, side by side: one norm and one weighted sum instead of one of each for each."""

    all: Dense
    shapes: dict[str, torch.Size]

    @classmethod
    def of(cls, forms: Mapping[str, Dense]) -> "Packed":
        """Put them together, in the widest of their precisions."""
        flat = torch.cat([form._flat() for form in forms.values()], 1)
        return cls(Dense(flat), {name: form.grad_B.shape[1:] for name, form in forms.items()})

    def weighted(self, weights_B: Tensor) -> dict[str, Tensor]:
        """The weighted sum of each tensor."""
        parts = self.all.weighted(weights_B).split([shape.numel() for shape in self.shapes.values()])
        return {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}


@dataclass(frozen=True)
class Stack(Form):
    """A tensor in slices along one of its dimensions, each slice with a form of its own."""

    slices: tuple[Form, ...]
    dim: int

    def norm2(self) -> Tensor:
        """Slices have no entry in common: their squares add up."""
        return torch.stack([form.norm2() for form in self.slices]).sum(0)

    def weighted(self, weights_B: Tensor) -> Tensor:
        """Each slice's sum, put together."""
        return torch.stack([form.weighted(weights_B) for form in self.slices], self.dim)

    def per_sample(self) -> Tensor:
        """Each slice's gradients, put together."""
        return torch.stack([form.per_sample() for form in self.slices], self.dim + 1)


@dataclass(frozen=True)
class Sum(Form):
    """Forms of different kinds, each pair of which knows its inner product. A tied embedding and head, as a rule."""

    parts: tuple[Form, ...]

    def norm2(self) -> Tensor:
        """Squares and cross terms."""
        terms = [form.norm2() for form in self.parts]
        pairs = ((a, b) if a.crosses(b) else (b, a) for a, b in combinations(self.parts, 2))
        terms += [cross for a, b in pairs if (cross := a.cross(b)) is not None]
        return torch.stack(terms).sum(0).clamp(min=0)

    def weighted(self, weights_B: Tensor) -> Tensor:
        """The sum of the sums."""
        return reduce(torch.add, [form.weighted(weights_B) for form in self.parts])

    def per_sample(self) -> Tensor:
        """The gradients added."""
        return reduce(torch.add, [form.per_sample() for form in self.parts])

    def onto(self, columns_IK: Tensor) -> Form | None:
        """Each part, if all can."""
        parts = [form.onto(columns_IK) for form in self.parts]
        return None if None in parts else Sum(tuple(form for form in parts if form is not None))

    def settle(self) -> Form:
        """Settle the parts, if their inner products are still known; if not, the gradients are small."""
        return _side_by_side([form.settle() for form in self.parts])

    def join(self, other: Form) -> Form:
        """One sum of all parts."""
        return total([*self.parts, *(other.parts if isinstance(other, Sum) else [other])])


def total(forms: Sequence[Form]) -> Form:
    """One form for the sum of several uses of the same tensor, cross terms included."""
    parts = _joined(forms)
    return parts[0] if len(parts) == 1 else _side_by_side(parts)


def _side_by_side(forms: Sequence[Form]) -> Form:
    """The sum of forms that do not join: the gradients added, unless every pair knows its inner product."""
    both = Sum(tuple(forms))
    known = all(a.crosses(b) or b.crosses(a) for a, b in combinations(forms, 2))
    return both if known else Dense(both.per_sample())


def _joined(forms: Sequence[Form]) -> list[Form]:
    """Join what joins, by halves: k uses (a recurrent cell's steps) cost k·log k copies and not k²."""
    if len(forms) < 2:
        return list(forms)
    parts = _joined(forms[: len(forms) // 2])
    for form in _joined(forms[len(forms) // 2 :]):
        for k, part in enumerate(parts):
            if (both := part.join(form)) is not None:
                parts[k] = both
                break
        else:
            parts.append(form)
    return parts


def slack(sizes_BT: Tensor) -> Tensor:
    """What rounding can hide of a squared norm, from the norms of the terms that were added up: (B,).

    Terms may cancel: then the true sum is small, what is left of it is rounding, and a norm computed by another route
    than the sum (the Gram identity, another order) may miss it. Counting the rounding of the terms in keeps the norm
    an upper bound of what is released; where nothing cancels it is a few units in the last place.
    """
    return 4 * torch.finfo(sizes_BT.dtype).eps * sizes_BT.sum(1).square()


def size(t: Tensor, dim: int) -> Tensor:
    """The norm along a dimension, never less than it is: squares of small numbers vanish."""
    numbers = wide(t)
    return (numbers.square().sum(dim) + t.shape[dim] * torch.finfo(numbers.dtype).tiny).sqrt()


def chunks(samples: int, most: int) -> list[slice]:
    """Runs of about ``most`` samples. Their number is that of the example where the number of samples is a symbol."""
    count = max(1, -(-example_size(samples) // most))
    ends = [*(samples * k // count for k in range(1, count)), None]
    return [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]


def wide(t: Tensor) -> Tensor:
    """At least float32: a norm must never be computed at less precision than what it bounds."""
    return t.to(torch.promote_types(t.dtype, torch.float32))


def as_multiplied(x: Tensor, g: Tensor) -> Tensor:
    """An operation's input as it was multiplied: autocast rounds it to the precision of the output before."""
    return x.to(g.dtype) if x.is_floating_point() and g.element_size() <= x.element_size() else x


def scaled(t_B: Tensor, weights_B: Tensor) -> Tensor:
    """Each sample's part times its weight, in float32 or wider."""
    t = wide(t_B)
    return t * weights_B.to(t.dtype).view(-1, *[1] * (t.ndim - 1))


def same(a: Tensor, b: Tensor) -> bool:
    """Whether both are one and the same view of one tensor, as a batch is at every point; at 32 bits or more.

    16-bit operands are left apart: gradients of them that are added up are wider, and would leave the fast kernels.
    """
    views = [
        # A view may also be read with another sign: `z.imag` and `z.conj().imag` lie at one place.
        (storage(t), t.storage_offset(), t.shape, t.stride(), t.dtype, t.is_neg(), t.is_conj())
        for t in (a, b)
    ]
    return views[0] == views[1] and a.element_size() > 2


def side_by_side(a: Tensor, b: Tensor) -> Tensor:
    """Both along dimension 1, in the wider of their precisions."""
    return torch.cat([a, b], 1) if a.dtype == b.dtype else torch.cat([wide(a), wide(b)], 1)


@dataclass(frozen=True)
class Call:
    """One operation as it ran: its arguments by name, and where the samples are in them.

    Attributes:
        function: the operation.
        arguments: every argument given, by name; parameters as plain tensors.
        samples: B.
        layout: of the output (the first, if there are several).
        layouts: of each argument that carries the batch.
        wanted: the arguments whose gradients are asked for.
    """

    function: Callable[..., Any]
    arguments: Mapping[str, Any]
    samples: int
    layout: Layout
    layouts: Mapping[str, Layout]
    wanted: frozenset[str]

    def get(self, name: str, default: Any = None) -> Any:
        """The argument, or ``default`` where it was not given."""
        return self.arguments.get(name, default)

    def rows(self, t: Tensor, layout: Layout | None = None) -> Tensor:
        """``t`` as (B, *one sample's shape), by the output's layout unless told otherwise."""
        return (layout or self.layout).per_sample(t, self.samples)


class Rule(ABC):
    """Per-sample gradients of one family of operations.

    Attributes:
        functions: the operations it is for.
        names: their positional arguments, in order.
        trainable: the arguments whose gradients it can give. A parameter anywhere else goes to the generic rule.
    """

    functions: tuple[Callable[..., Any], ...]
    names: tuple[str, ...]
    trainable: tuple[str, ...]

    def accepts(self, call: Call) -> bool:
        """Whether this call, with the batch where it is, is one that the rule understands."""
        return True

    @abstractmethod
    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """For each wanted argument, its gradients, from ``g``, the gradient of the output."""

    def bind(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments by name, whether given by position or by keyword.

        A positional argument beyond ``names`` (an overload of old) gets a name that no rule can train, so that a
        parameter there goes to the generic rule.
        """
        surplus = {f"argument {k}": a for k, a in enumerate(args) if k >= len(self.names)}
        return dict(zip(self.names, args, strict=False)) | surplus | dict(kwargs)
