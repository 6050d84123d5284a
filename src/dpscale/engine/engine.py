"""One interface to the engine for training: eager or compiled, and inside a loop that is not ours."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_leaves

from dpscale.engine import LossFn, Points, ScaledSum, per_sample_sum, scaled_sum
from dpscale.engine.combine import edges
from dpscale.engine.compiled import Fast
from dpscale.engine.loop import Recorder, _Hook
from dpscale.scaling import Scaling

_MOST_CAPTURES = 32
"""Forwards that are kept after a release, for other outstanding draws."""


class Engine:
    """Per-sample norms and the weighted sum of one model's gradients."""

    def __init__(self, model: nn.Module, compile: bool = False, steps: int | None = None) -> None:
        self._model = model
        self._fast = Fast(model) if compile else None
        self.recorder = _Recorder(model)

    def scaled_sum(
        self, loss_fn: LossFn, batch: Any, rule: Scaling, mask: Tensor, points: Points | None = None, *,
        keep: bool = False, change: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
    ) -> ScaledSum:  # fmt: skip
        """As `dpscale.scaled_sum`.

        Args:
            points: those that do not count yet have the coefficient 0.
            keep: the gradients must outlast the next call.
            change: what becomes of the per-sample gradients before they are scaled.
        """
        if change is not None:
            return per_sample_sum(self._model, loss_fn, batch, rule, mask, change)
        if self._fast is not None:
            return self._fast(loss_fn, batch, rule, mask, points, keep=keep)
        return scaled_sum(self._model, loss_fn, batch, rule, mask, points and [(c, w) for c, w in points if c])


class _Recorder(Recorder):
    """Records forwards for several outstanding draws."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._rows: set[int] = set()
        self._ends: dict[int, list[GradientEdge]] = {}  # the outputs of each capture, by its id
        self._passed_through: set[int] = set()

    def start(self, samples: int) -> None:
        """From now on, forwards on so many rows are recorded as well."""
        if not self._rows:
            self._hooks = [
                self._model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
                self._model.register_forward_hook(_Hook(self._after), always_call=True),
            ]
        self._rows.add(samples)

    def stop(self) -> None:
        """Nothing is recorded any more, and what was recorded is forgotten."""
        super().stop()
        self._rows = set()
        self._ends.clear()
        self._passed_through.clear()

    def scaled_sum(self, losses: Tensor, rule: Scaling, mask: Tensor) -> ScaledSum:
        """As `dpscale.scaled_sum`, from losses whose forward was recorded. What they came from is then forgotten."""
        every = self._captures
        self._captures = [capture for capture in every if capture.samples == len(mask)]
        try:
            out = super().scaled_sum(losses, rule, mask)
        finally:
            self._captures = every
        kept = [capture for capture in every if id(capture) not in self._passed_through][-_MOST_CAPTURES:]
        self._captures, self._ends = kept, {id(c): self._ends[id(c)] for c in kept}
        self._outputs = [edge for ends in self._ends.values() for edge in ends]
        self._passed_through.clear()
        return out

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sizes = {len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.ndim}
        self._samples = next(iter(self._rows & sizes), None)
        super()._before(model, args, kwargs)

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        captures, outputs = len(self._captures), len(self._outputs)
        super()._after(model, args, output)
        if len(self._captures) > captures:
            capture = self._captures[-1]
            number = id(capture)
            self._ends[number] = self._outputs[outputs:]
            for edge in edges(capture):
                edge.node.register_prehook(lambda _: self._passed_through.add(number))
