"""The sum of several uses of one parameter: forms of one kind are joined, of different kinds kept side by side.

    ‖A + B‖² = ‖A‖² + ‖B‖² + 2⟨A, B⟩

The squares of two uses alone would miss the cross term, and with it up to half of the norm. Where a pair of forms does
not know its inner product, the gradients themselves are added.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import combinations

import torch
from torch import Tensor

from dpscale.engine.rules.forms import Change, Dense, Form


@dataclass(frozen=True)
class Sum(Form):
    """Forms of different kinds, each pair of which knows its inner product. A tied embedding and head, as a rule."""

    parts: tuple[Form, ...]

    def norm2(self) -> Tensor:
        """Squares and cross terms."""
        terms = [form.norm2() for form in self.parts]
        terms += [c for a, b in combinations(self.parts, 2) if (c := _cross(a, b)) is not None]
        return torch.stack(terms).sum(0).clamp(min=0)

    def weighted(self, weights_B: Tensor) -> Tensor:
        """The sum of the sums."""
        return reduce(torch.add, [form.weighted(weights_B) for form in self.parts])

    def per_sample(self) -> Tensor:
        """The gradients added."""
        return _added(self.parts)

    def map(self, change: Change) -> "Sum":
        """Change every part."""
        return Sum(tuple(form.map(change) for form in self.parts))

    def settle(self) -> Form:
        """Settle the parts, if their inner products are still known; if not, the gradients are small."""
        settled = tuple(form.settle() for form in self.parts)
        return Sum(settled) if _all_cross(settled) else Dense(_added(settled))

    def join(self, other: Form) -> Form:
        """One sum of all parts."""
        return total([*self.parts, *(other.parts if isinstance(other, Sum) else [other])])


def total(forms: Sequence[Form]) -> Form:
    """One form for the sum of several uses of the same tensor, cross terms included."""
    parts = _joined(forms)
    if len(parts) == 1:
        return parts[0]
    return Sum(tuple(parts)) if _all_cross(parts) else Dense(_added(parts))


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


def _all_cross(forms: Sequence[Form]) -> bool:
    return all(a.crosses(b) or b.crosses(a) for a, b in combinations(forms, 2))


def _cross(a: Form, b: Form) -> Tensor | None:
    return a.cross(b) if a.crosses(b) else b.cross(a)


def _added(forms: Sequence[Form]) -> Tensor:
    return reduce(torch.add, [form.per_sample() for form in forms])
