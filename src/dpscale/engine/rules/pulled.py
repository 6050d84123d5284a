"""Per-sample gradients of a function of a parameter, carried back to the parameter without forming them.

A transposed, reshaped or sliced parameter is met as if it were a parameter itself. Its gradient goes back through the
adjoint of that function, which for views moves entries without adding any (and fills the rest with zeros): it keeps
norms. So the norm is that of the form at hand, and the weighted sum is carried back once, after it is taken.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.rules.forms import Change, Form

COPIES = {"CloneBackward0", "ToCopyBackward0", "AliasBackward0"}
TRANSPOSES = {"TBackward0", "TransposeBackward0", "PermuteBackward0"}
SPLITS = {"SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"}
ISOMETRIES = TRANSPOSES | SPLITS | {
    "ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0", "SqueezeBackward0",
    "SqueezeBackward1", "SqueezeBackward2", "SliceBackward0", "SelectBackward0", "FlipBackward0",
}  # fmt: skip
"""Nodes of autograd's graph whose backward keeps norms."""


@dataclass(frozen=True)
class Step:
    """One node of autograd's graph, and which of its outputs the gradient is for."""

    node: Any
    slot: int

    def __call__(self, g: Tensor) -> Tensor:
        """The node's own backward. Called by hand, it does not round to the type of the forward."""
        slots = [g if k == self.slot else None for k in range(len(self.node._input_metadata))]
        out: Tensor = self.node(*slots)
        return out

    @property
    def name(self) -> str:
        """The node's, such as TransposeBackward0."""
        return str(self.node.name())

    @property
    def signature(self) -> tuple[Any, ...]:
        """With the shape of its output, all that there is to know of a step: these nodes hold numbers only."""
        saved = [getattr(self.node, a) for a in sorted(dir(self.node)) if a.startswith("_saved")]
        return self.name, self.slot, *saved

    def apart(self, other: "Step") -> bool:
        """Whether the two are different pieces of one split, so that their entries have none in common."""
        (name, slot, *cut), (other_name, other_slot, *other_cut) = self.signature, other.signature
        return name == other_name and name in SPLITS and cut == other_cut and slot != other_slot


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

    def map(self, change: Change) -> "Pulled":
        """Change the form."""
        return Pulled(self.form.map(change), self.path)

    def settle(self) -> "Pulled":
        """Settle the form."""
        return Pulled(self.form.settle(), self.path)

    def join(self, other: Form) -> "Pulled | None":
        """Join the forms where the way back is the same."""
        if not isinstance(other, Pulled) or self._signature() != other._signature():
            return None
        joined = self.form.join(other.form)
        return None if joined is None else Pulled(joined, self.path)

    def crosses(self, other: Form) -> bool:
        """Pieces of one split have nothing in common."""
        return isinstance(other, Pulled) and self.path[-1].apart(other.path[-1])

    def cross(self, other: Form) -> None:
        """0."""

    def _back(self, g: Tensor) -> Tensor:
        for step in self.path:
            g = step(g)
        return g

    def _signature(self) -> list[tuple[Any, ...]]:
        return [(*step.signature, step.node._input_metadata[step.slot].shape) for step in self.path]
