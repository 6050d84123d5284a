"""Norm -> weight: the four scaling rules of the DP-PSASC line, each with its own bound.

Every private method here multiplies a per-sample gradient g by a weight w(x) that depends on its norm x = ‖g‖
alone. What privacy needs of a rule is one number, ``bound`` = sup x·w(x): no sample can move the released sum by
more. The rule is the only place where that number is defined; the noise and the accountant read it from here.

Equation numbers are those of the DP-PSASC paper.

| rule    | w(x)                      | bound | largest weight, and where              |
|---------|---------------------------|-------|----------------------------------------|
| `Clip`  | min(1, C/x)               | C     | 1, for x <= C                          |
| `AutoS` | C/(x + r)                 | C     | C/r, at 0                              |
| `PSAC`  | C/(x + r/(x+r))           | C     | C/(1-(1-√r)²), at √r - r               |
| `PSASC` | C/(s·x + r/(x+r))         | C/s   | C/(1-(1-√(sr))²), at √(r/s) - r        |
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dpscale.checks import require, require_positive, settle_numbers

if TYPE_CHECKING:  # a plan is made, and its cost computed, without torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Scaling(ABC):
    """A rule that turns per-sample gradient norms into weights.

    Guarantee: for every norm x in [0, inf], ``x * weight(x) <= bound`` (up to rounding of the float type).

    | norm            | weight                                               |
    |-----------------|------------------------------------------------------|
    | 0, subnormal    | the limit of w at 0 (the product is then 0 or tiny)  |
    | huge, finite    | ~ bound/x                                            |
    | inf, NaN        | exactly 0: such a sample contributes nothing         |

    Subclasses give the formula in ``_weight`` for finite norms, and ``bound``, ``peak_norm`` and ``peak_weight``.
    """

    C: float = 1.0

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_positive(type(self).__name__, "C", self.C)

    def weight(self, norms: "Tensor") -> "Tensor":
        """Weights of samples whose gradients have the given norms, in float32 or wider."""
        import torch

        norms = norms.to(torch.promote_types(norms.dtype, torch.float32))
        finite = torch.isfinite(norms)
        weights = self._weight(torch.where(finite, norms, 0.0))
        return torch.where(finite, weights, 0.0)

    @abstractmethod
    def _weight(self, x: "Tensor") -> "Tensor": ...

    @property
    def bound(self) -> float:
        """sup x·w(x): the most that one sample can add to the sum."""
        return self.C

    @property
    def peak_norm(self) -> float:
        """A norm at which the weight is largest: 0, unless the rule has a peak further on."""
        return 0.0

    @property
    @abstractmethod
    def peak_weight(self) -> float:
        """The largest weight of any norm."""


@dataclass(frozen=True, kw_only=True)
class Clip(Scaling):
    """Clipping, as in DP-SGD (Abadi et al., 2016): w(x) = min(1, C/x), eq. 1.

    ``C=math.inf`` switches the clip off; only a plan without noise accepts it, since its bound is infinite.

    Example:
        >>> import torch
        >>> Clip(C=1.0).weight(torch.tensor([0.5, 2.0]))
        tensor([1.0000, 0.5000])
    """

    def __post_init__(self) -> None:
        settle_numbers(self)
        require_positive("Clip", "C", self.C, finite=False)

    def _weight(self, x: "Tensor") -> "Tensor":
        # 1/max(1, x/C) rather than min(1, C/x): right at x = 0 and at C = inf without a special case.
        return (x / self.C).clamp(min=1.0).reciprocal()

    @property
    def peak_weight(self) -> float:
        """1: clipping never enlarges a gradient."""
        return 1.0


@dataclass(frozen=True, kw_only=True)
class AutoS(Scaling):
    """Automatic clipping (Auto-S, NSGD): w(x) = C/(x + r), eq. 2 (the paper has C = 1).

    Example:
        >>> import torch
        >>> AutoS(C=1.0, r=0.5).weight(torch.tensor([0.0, 0.5]))
        tensor([2., 1.])
    """

    r: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_stabiliser("AutoS", self.r)

    def _weight(self, x: "Tensor") -> "Tensor":
        return self.C / (x + self.r)

    @property
    def peak_weight(self) -> float:
        """C/r."""
        return self.C / self.r


@dataclass(frozen=True, kw_only=True)
class PSASC(Scaling):
    """Per-sample adaptive scaling (DP-PSASC, the paper's): w(x) = C/(s·x + r/(x+r)), eq. 6.

    The bound is C/s, a supremum that no finite gradient reaches. For any optimizer that is linear in the gradient,
    ``s`` is a learning-rate factor 1/s and a small change of the stabiliser, nothing else: see `normalized`.

    Args:
        C: scale of the weight; folds into the learning rate.
        s: scaling coefficient; the paper uses 0.45 to 0.9.
        r: stabiliser. s·r must be < 1, or the weight has no interior peak and falls from C on.

    Example:
        >>> import torch
        >>> rule = PSASC(C=0.25, s=0.5, r=0.01)
        >>> rule.bound
        0.5
        >>> bool(rule.weight(torch.tensor(rule.peak_norm)) <= rule.peak_weight + 1e-6)
        True
    """

    s: float = 1.0
    r: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        owner = type(self).__name__
        require_positive(owner, "s", self.s)
        _require_stabiliser(owner, self.r)
        must = f"such that s*r < 1 (here s = {self.s:g}, so r < {1 / self.s:g})"
        require(self.s * self.r < 1, owner, "r", must, self.r, "Take a smaller r; the paper uses 1e-4 to 1e-2.")

    def _weight(self, x: "Tensor") -> "Tensor":
        return self.C / (self.s * x + self.r / (x + self.r))

    @property
    def bound(self) -> float:
        """C/s."""
        return self.C / self.s

    @property
    def peak_norm(self) -> float:
        """√(r/s) - r, which is > 0 because s·r < 1."""
        return math.sqrt(self.r / self.s) - self.r

    @property
    def peak_weight(self) -> float:
        """C/(1-(1-√(sr))²)."""
        return self.C / (1 - (1 - math.sqrt(self.s * self.r)) ** 2)

    def normalized(self) -> tuple["PSASC", float]:
        """The same method at bound 1, and the factor its learning rate takes.

        Dividing sum and noise by C/s leaves the rule 1/(x + (r/s)/(x+r)), whose bound is 1, and multiplies the
        learning rate by C/s. A step of ``self`` at learning rate η equals a step of the returned rule at η·factor
        under the same noise draw, for every optimizer that is linear in the gradient (SGD, momentum). Under
        Adam-like optimizers the factor drops out as well.

        Returns:
            ``(rule, factor)`` with ``rule.bound == 1`` and ``rule.weight(x) * factor == self.weight(x)``.
        """
        return PSASC(C=self.s, s=self.s, r=self.r), self.C / self.s


@dataclass(frozen=True, kw_only=True)
class PSAC(PSASC):
    """Per-sample adaptive clipping (DP-PSAC): w(x) = C/(x + r/(x+r)), eq. 4: `PSASC` at s = 1.

    Example:
        >>> PSAC(C=0.25, r=0.01).bound
        0.25
    """

    s: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.s == 1, "PSAC", "s", "1", self.s, "Use PSASC for another s.")


def _require_stabiliser(owner: str, r: float) -> None:
    require_positive(owner, "r", r)
    action = "Below, float32 cannot tell it from 0; the paper uses 1e-4 to 1e-2."
    require(r >= 1e-12, owner, "r", "at least 1e-12", r, action)


RULES: dict[str, type[Scaling]] = {"clip": Clip, "auto-s": AutoS, "psac": PSAC, "psasc": PSASC}
"""Every scaling rule by its short name: the command line and the conformance tests read this."""
