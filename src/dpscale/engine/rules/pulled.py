"""Per-sample gradients of a function of a parameter, carried back to the parameter without forming them.

A transposed, reshaped or sliced parameter is used as if it were a parameter itself. Its gradient goes back through the
adjoint of that function. A function that takes entries of its argument, each at most once, has an adjoint that puts
them back (and fills the rest with zeros): it keeps norms. So the norm is that of the form at hand, and the weighted sum
is carried back once, after it is taken.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import GetSetDescriptorType
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.compat import TreeSpec, tree_flatten, tree_leaves, tree_unflatten
from dpscale.engine.rules.forms import Form

Function = Callable[..., Any]


def named(*names: str) -> frozenset[Function]:
    """Operations under all their names, as a torch-function mode sees them: functions, methods and properties."""
    found = [getattr(owner, name, None) for name in names for owner in (torch, torch.Tensor)]
    properties = {p.__get__ for p in found if isinstance(p, GetSetDescriptorType)}
    return frozenset(properties | {f for f in found if callable(f)})


RESHAPES = named("view", "view_as", "reshape", "reshape_as", "flatten", "ravel", "unflatten", "squeeze", "unsqueeze")
"""They keep all entries in their order."""

TRANSPOSES = named(
    "t", "T", "mT", "H", "mH", "adjoint", "transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"
)
"""They keep all entries, with the dimensions in another order; some conjugate complex ones."""

SPLITS = named("split", "split_with_sizes", "chunk", "unbind", "tensor_split", "hsplit", "vsplit", "dsplit")
"""Each entry goes to one of several outputs."""

GETITEM = torch.Tensor.__getitem__
SELECTIONS = named("select", "narrow", "diagonal", "flip", "fliplr", "flipud", "rot90", "roll") | {GETITEM}
"""They take entries, each at most once: `__getitem__` as long as its index is basic."""

ISOMETRIES = RESHAPES | TRANSPOSES | SPLITS | SELECTIONS


@dataclass(frozen=True)
class Step:
    """The adjoint of one operation that takes entries of its argument, each at most once.

    Two steps are equal if they do the same.

    Attributes:
        function: the operation.
        arguments: all of its arguments, flattened; None in the place of the tensor that it takes entries of.
        spec: how they are put together again.
        position: that tensor's place among them.
        output: which of the operation's outputs, flattened, the gradient is for.
        shape: of that tensor.
    """

    function: Function
    arguments: tuple[Any, ...]
    spec: TreeSpec
    position: int
    output: int
    shape: torch.Size

    @classmethod
    def of(
        cls, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], position: int, output: int,
        result: Tensor,
    ) -> "Step | None":  # fmt: skip
        """The step back from ``result``, an output of a call; None if it may use an entry twice, or drop norms."""
        flat, spec = tree_flatten((args, kwargs))
        source = flat[position]
        if function not in ISOMETRIES or (function == GETITEM and not _basic(args[1])):
            return None
        if source.dtype != result.dtype:  # `view` with a dtype reads the bits as other numbers
            return None
        if function in RESHAPES:  # whatever it was called: to the shape that came out
            flat, spec = tree_flatten(((source, tuple(result.shape)), {}))
            function, position = torch.reshape, 0
        arguments = tuple(None if k == position else a for k, a in enumerate(flat))
        if any(isinstance(a, Tensor) for a in arguments):
            return None
        return cls(function, arguments, spec, position, output, source.shape)

    def __call__(self, g: Tensor) -> Tensor:
        """Put the entries back where they came from. At the precision of ``g``, whatever the forward's was."""
        if self.function is torch.reshape:
            return g.reshape(self.shape)
        # Only its shape counts. Not `g.new_empty`: under vmap that would be one for each sample.
        stand_in = torch.empty(self.shape, dtype=g.dtype, device=g.device)
        back: Tensor = torch.func.vjp(self._forward, stand_in)[1](g)[0]
        return back

    def apart(self, other: "Step") -> bool:
        """Whether the two surely share no entry: pieces of one split, slices that do not overlap."""
        if self.shape != other.shape or self.function != other.function:
            return False
        if self.function in SPLITS:
            same_cut = (self.arguments, self.spec) == (other.arguments, other.spec)
            return same_cut and self.output != other.output
        if self.function == GETITEM:
            boxes = zip(_box(self._index, self.shape), _box(other._index, other.shape), strict=True)
            return any(not a or not b or a[-1] < b[0] or b[-1] < a[0] for a, b in boxes)
        return False

    def _forward(self, source: Tensor) -> Tensor:
        flat = [source if k == self.position else a for k, a in enumerate(self.arguments)]
        args, kwargs = tree_unflatten(flat, self.spec)
        out: Tensor = tree_leaves(self.function(*args, **kwargs))[self.output]
        return out

    @property
    def _index(self) -> Any:
        args, _ = tree_unflatten(list(self.arguments), self.spec)
        return args[1]


def _basic(index: Any) -> bool:
    """Whether an index makes a view: no lists, tensors or truths, which may take an entry twice."""
    if isinstance(index, tuple):
        return all(map(_basic, index))
    if isinstance(index, slice):
        return all(k is None or type(k) is int for k in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or type(index) is int


def _box(index: Any, shape: torch.Size) -> list[range]:
    """The places that a basic index takes along each dimension."""
    parts = [k for k in (index if isinstance(index, tuple) else (index,)) if k is not None]
    if Ellipsis not in parts:
        parts.append(Ellipsis)
    at = parts.index(Ellipsis)
    parts[at : at + 1] = [slice(None)] * (len(shape) - len(parts) + 1)
    return [range(n)[k] if isinstance(k, slice) else range(k % n, k % n + 1) for k, n in zip(parts, shape, strict=True)]


@dataclass(frozen=True)
class Pulled(Form):
    """A form of a function of the tensor; ``path`` leads back to the tensor, keeping norms."""

    form: Form
    path: tuple[Step, ...]

    def norm2(self) -> Tensor:
        """That of the form."""
        return self.form.norm2()

    def weighted(self, weights_B: Tensor) -> Tensor:
        """The form's sum, carried back once."""
        return self._back(self.form.weighted(weights_B))

    def per_sample(self) -> Tensor:
        """Each sample's gradient, carried back."""
        grads: Tensor = torch.func.vmap(self._back)(self.form.per_sample())
        return grads

    def settle(self) -> "Pulled":
        """Settle the form."""
        return Pulled(self.form.settle(), self.path)

    def join(self, other: Form) -> "Pulled | None":
        """Join the forms where the way back is the same."""
        if not isinstance(other, Pulled) or self.path != other.path:
            return None
        joined = self.form.join(other.form)
        return None if joined is None else Pulled(joined, self.path)

    def crosses(self, other: Form) -> bool:
        """Where the ways back part, seen from the tensor, they take entries that have nothing in common."""
        if not isinstance(other, Pulled):
            return False
        pairs = zip(reversed(self.path), reversed(other.path), strict=False)
        return next((a.apart(b) for a, b in pairs if a != b), False)

    def _back(self, g: Tensor) -> Tensor:
        for step in self.path:
            g = step(g)
        return g
