"""Runs of a subject that can be compared, and the gradients of rows in them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dpscale.engine.combine import Forms, exactly, gradients
from dpscale.engine.tape.tape import Shared, Sites, Tape
from dpscale.engine.verify.credit import TapedRun, arrived, credited, insides, misplaced
from dpscale.engine.verify.probe import Draws, Numbered
from dpscale.engine.verify.randomness import host_states, own_randomness
from dpscale.engine.verify.rows import copied, count_of
from dpscale.engine.verify.sketch import Sketch
from dpscale.engine.verify.state import Surroundings
from dpscale.engine.verify.values import Gradient, gradient


@dataclass(frozen=True)
class Subject:
    """What is looked at: ``run`` goes from a batch to one loss per row."""

    model: nn.Module
    parameters: Mapping[str, Tensor]
    run: Callable[[Any], Tensor]
    loss_fn: Any = None


class Runs:
    """Runs of one subject with all randomness their own.

    Args:
        subject: the model and its losses.
        seed: that the runs draw from, and the directions in which gradients are compared.

    Attributes:
        surroundings: what runs may change.
        ahead: by how many steps the counters of the model are moved before a run.
        afresh: whether generators of the model's own start anew before a run.
        seeded: whether each operation that draws is seeded.
        drew: whether some run drew from Python's generator or numpy's.
        drew_own: whether some run drew from a generator of the model's own.
    """

    def __init__(self, subject: Subject, seed: int) -> None:
        self.subject, self.seed = subject, seed
        self.surroundings = Surroundings(subject.model, subject.loss_fn)
        self.ahead, self.afresh, self.seeded = 0, False, False
        self.drew, self.drew_own = False, False
        self._sketch = Sketch(seed)

    @property
    def each(self) -> int | None:
        """The seed of each operation, once it is known that some draw."""
        return self.seed if self.seeded else None

    def numbered(self, **options: Any) -> Numbered:
        """A mode in which operations are counted."""
        return Numbered(self.each, **options)

    def losses(self, mode: Any, data: Any, start: list[Any] | None = None) -> Tensor:
        """Of a batch; with the random numbers from a state on, or from the seed."""
        with own_randomness(self.seed if start is None else start), torch.enable_grad(), mode:
            if self.ahead:
                self.surroundings.count_ahead(self.ahead)
            if self.afresh:
                self.surroundings.draw_from(self.seed)
            before = None if isinstance(mode, Numbered) else host_states()  # that one looks for itself
            losses = self.subject.run(copied(data))
            self.drew |= before is not None and host_states() != before
            self.drew_own |= self.surroundings.drew()
        self.drew |= isinstance(mode, Numbered) and mode.drew_on_host
        return losses

    def taped(
        self, tape: Callable[..., Tape], sites: Sites, data: Any, start: list[Any] | None = None, *,
        weighted: bool = False, shared: list[Shared] | None = None,
    ) -> TapedRun:  # fmt: skip
        """A taped run, and what all losses together send to its operations; ``weighted``: whether it goes astray.

        What these rows have not met is looked at when it comes.
        """
        mode = tape(self.subject.parameters, None, sites, count_of(data), lenient=True, shared=shared)
        losses = self.losses(mode, data, start)
        places = insides(mode) if not mode.lost and losses.requires_grad else []
        grads = arrived(losses, places)
        astray = weighted and misplaced(losses, places, self.seed, grads, keep=False) is not None
        return TapedRun(mode, losses.detach(), grads, astray, self.surroundings.left_behind(), shared or [])

    def drawn_alike(self, rows: Any, draws: Draws, weights: Sequence[float]) -> tuple[Tensor, Gradient] | None:
        """The losses of few rows, and the gradient of a mixture, with what was drawn for them among many; None where
        that cannot be given to them."""
        mode = self.numbered(draws=draws)
        losses = self.losses(mode, rows)
        sent = self.gradient(losses, weights)
        drew = self.surroundings.drew()
        self.surroundings.restore()
        return None if drew or mode.unmatched else (losses.detach(), sent)

    def gradient(
        self, losses: Tensor, weights: Sequence[float], values: Mapping[Any, Tensor] | None = None
    ) -> Gradient:
        """Autograd's, of the parameters or of other values of theirs, as it is compared."""
        targets = self.subject.parameters if values is None else values
        return {name: self._sketch.of(g) for name, g in gradient(losses, weights, targets).items()}

    def sent_by(self, losses: Tensor, i: int) -> Gradient:
        """The gradient of the loss of one row."""
        return self.gradient(losses, [float(k == i) for k in range(len(losses))])

    def credited(self, run: TapedRun, *mixtures: Mapping[int, float]) -> list[Gradient]:
        """What a taped run credits to mixtures of rows, as it is compared."""
        return credited(run, mixtures, self.weighted)

    def without_gradient(self, run: TapedRun) -> set[int]:
        """The rows to which a taped run credits nothing finite. What they send is not nothing at a weight of 0."""
        if not run.grads:
            return set()
        with exactly(run.tape.device):
            forms = gradients([run.tape], [run.grads])
            squares = torch.stack([form.norm2() for form in forms.values()]).sum(0)
        return {int(i) for i in (~torch.isfinite(squares)).nonzero()}

    def weighted(self, forms: Forms, weights: Sequence[float]) -> Gradient:
        """Weighted sums of per-sample gradients, as they are compared."""
        parameters = self.subject.parameters
        device = next(iter(parameters.values())).device
        with exactly(device):
            weights_B = torch.tensor(weights, device=device)
            return {n: self._sketch.weighted(form, weights_B, parameters[n].shape) for n, form in forms.items()}
