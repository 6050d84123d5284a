"""What a rule is: for one family of operations, from output gradients to per-sample gradients in their best form."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from dpscale.engine.layout import Layout
from dpscale.engine.rules.forms import Form


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
