"""Per-sample gradients of one parameter, kept in the cheapest shape that is still exact.

An operation never hands over B full gradients. It hands over a *form*: what is needed to say the squared norm of each
sample's gradient, and to sum those gradients under any weights. Forms add up: a parameter that is used twice has the
sum of its forms, cross terms included.

Shape suffixes: B samples, T positions of one sample, I inputs, O outputs.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dpscale.engine.compat import example_size, storage

PACK = 1 << 14
"""Gradients of no more numbers than this per sample are put side by side with others."""


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

    @abstractmethod
    def map(self, change: "Change") -> "Form":
        """The same form with ``change`` applied to its batched operands."""

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
        raise NotImplementedError


class Change(ABC):
    """A change of a batched operand (its leading dimension is B): see `Widen` and `Drop`."""

    @abstractmethod
    def __call__(self, operand: Tensor) -> Tensor:
        """The operand, changed."""


class Widen(Change):
    """To float64, where float32 squares overflow."""

    def __call__(self, operand: Tensor) -> Tensor:
        """Convert floating operands; leave indices."""
        return operand.double() if operand.is_floating_point() else operand


@dataclass(frozen=True)
class Drop(Change):
    """Exact zeros for the samples that are not kept: 0 · inf is NaN, so a zero weight alone would not do."""

    keep_B: Tensor

    def __call__(self, operand: Tensor) -> Tensor:
        """Zero the rows of the samples that are not kept."""
        keep = self.keep_B.view(-1, *[1] * (operand.ndim - 1))
        return operand.where(keep, 0)


@dataclass(frozen=True)
class Dense(Form):
    """The gradients themselves: right for small tensors (biases, norms' scales) and for whatever has no better form.

    ``order``: the tensor's dimensions among those of ``grad_B`` without the batch, if they lie there in another order.
    """

    grad_B: Tensor
    order: tuple[int, ...] | None = None

    def norm2(self) -> Tensor:
        """Sum of squares."""
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

    def map(self, change: Change) -> "Dense":
        """Change the gradients."""
        return replace(self, grad_B=change(self.grad_B))

    def join(self, other: Form) -> "Dense | None":
        """Add the gradients."""
        return Dense(self.per_sample() + other.per_sample()) if isinstance(other, Dense) else None

    @property
    def small(self) -> bool:
        """Whether it costs more to start work on it than to do it."""
        return self.order is None and self.grad_B[:1].numel() <= PACK

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

    def map(self, change: Change) -> "Stack":
        """Change every slice."""
        return Stack(tuple(form.map(change) for form in self.slices), self.dim)


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
