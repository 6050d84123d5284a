"""Records the forwards of a model in somebody else's training loop, so that only the backward has to be ours.

Between the draw of a batch and its backward, every forward of the model on that many rows is captured. One that never
meets a backward (an evaluation) costs nothing but the memory of its graph, and is forgotten at the next draw.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils.hooks import RemovableHandle

from dpscale.engine import ScaledSum, backward, blueprints, check_losses, exactly, signature, trainable
from dpscale.engine.tape.tape import Capture
from dpscale.engine.combine import combine, edges, gradients
from dpscale.engine.compat import tree_flatten, tree_leaves, tree_unflatten
from dpscale.engine.errors import SECOND, UnsupportedModel
from dpscale.engine.modules import structure
from dpscale.engine.taint import Watch
from dpscale.scaling import Scaling

Rows = Callable[[Tensor], Tensor]
"""From a gradient to the same with the samples first."""


class Recorder:
    """Captures forwards of ``model`` while a drawn batch waits; see `start` and `stop`."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._samples: int | None = None
        self._captures: list[Capture] = []
        self._outputs: list[GradientEdge] = []
        self._running: Capture | None = None
        self._begun = False
        self._twice = False  # whether gradients of gradients were taken through a captured forward
        self._checked = 0  # samples whose losses were seen to depend on no other sample
        self._hooks: list[RemovableHandle] = []  # on the model only while a batch waits, so that none is saved with it

    def start(self, samples: int) -> None:
        """A batch of so many rows was drawn."""
        self.stop()
        self._samples = samples
        self._hooks = [
            self._model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
            self._model.register_forward_hook(_Hook(self._after), always_call=True),
        ]

    @property
    def begun(self) -> bool:
        """Whether a forward was begun since the last draw."""
        return self._begun

    def stop(self) -> None:
        """No batch is waiting."""
        if self._running is not None:  # an interrupt came in the midst of a forward
            self._running.__exit__(None, None, None)
            self._running = None
        self._samples, self._captures, self._outputs = None, [], []
        self._begun = self._twice = False
        for hook in self._hooks:
            hook.remove()

    def scaled_sum(self, losses: Tensor, rule: Scaling, mask: Tensor) -> ScaledSum:
        """As `dpscale.engine.scaled_sum`, from losses whose forward was captured."""
        check_losses(losses, len(mask))
        parameters = trainable(self._model)
        if not self._captures or not losses.requires_grad:
            raise _astray()
        if self._twice:
            raise UnsupportedModel(SECOND)
        self._check_apart(losses)
        grads = backward(self._captures, parameters, losses, mask.to(losses.dtype))
        if all(g is None for each in grads for g in each):
            raise _astray()
        with exactly(losses.device):
            forms = gradients(self._captures, grads)
            return ScaledSum(losses=losses.detach(), **vars(combine(forms, rule, mask, parameters)))

    def _check_apart(self, losses: Tensor) -> None:
        """Each loss must depend on its own row of the model's outputs alone: three samples first, then one a step.

        At first also by every operation that met parameters: a loss may depend on what the model keeps to itself.
        """
        several = [self._checked % len(losses)] if self._checked else range(min(3, len(losses)))
        for i in several:
            self._check_one(losses, i, torch.nan, [(edge, lambda g: g) for edge in self._outputs])
            if not self._checked:
                for capture in self._captures:
                    self._check_one(losses, i, 1.0, list(_insides(capture)))
        self._checked += len(several)

    def _check_one(self, losses: Tensor, i: int, seed: float, places: list[tuple[GradientEdge, Rows]]) -> None:
        """What reaches ``places`` from loss ``i`` must be in its own row there."""
        targets: Any = [edge for edge, _ in places]

        def reached(value: float) -> Iterator[Tensor]:
            seeds = torch.zeros_like(losses)
            seeds[i] = value
            grads = torch.autograd.grad([losses], targets, [seeds], retain_graph=True, allow_unused=True)
            for g, (_, rows) in zip(grads, places, strict=True):
                if g is not None:
                    each = rows(g)
                    yield torch.cat([each[:i], each[i + 1 :]]).ne(0)

        if any(bool(others.any()) for others in reached(seed)):
            # What is not finite is so without any seed: it is looked at apart, and adds nothing.
            pairs = zip(reached(seed), reached(0.0), strict=True)
            if any(bool((others & ~at_rest).any()) for others, at_rest in pairs):
                raise UnsupportedModel(
                    f"Samples are coupled in the loss: the loss of sample {i} depends on another sample's output. "
                    "Compute each loss from its own sample (reduction='none')."
                )

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        samples = self._samples
        if samples is None or not torch.is_grad_enabled() or Watch.count:
            return
        flat, spec = tree_flatten((args, kwargs))
        rows = [k for k, t in enumerate(flat) if isinstance(t, Tensor) and t.ndim and len(t) == samples]
        if not rows:
            return
        self._begun = True

        def run(batch: list[Tensor]) -> list[Tensor]:
            put = dict(zip(rows, batch, strict=True))
            a, k = tree_unflatten([put.get(n, t) for n, t in enumerate(flat)], spec)
            return [t for t in tree_leaves(model(*a, **k)) if isinstance(t, Tensor)]

        batch = [flat[k].detach() for k in rows]
        key = ("forward", signature(structure(model), batch), tuple(t.shape[1:] for t in batch))
        parameters = trainable(model)
        blueprint = next(blueprints(model, key, parameters, run, batch))
        self._running = Capture(parameters, None, blueprint, samples)
        self._running.__enter__()

    def _after(self, model: nn.Module, args: Any, output: Any) -> None:
        capture, self._running = self._running, None
        if capture is None:
            return
        capture.__exit__(None, None, None)
        if output is None:  # the forward raised: its error is already on the way
            return
        capture.finish()
        self._captures.append(capture)
        outputs = [t for t in tree_leaves(output) if isinstance(t, Tensor) and t.requires_grad]
        self._outputs += [get_gradient_edge(t) for t in outputs]
        for edge in edges(capture):
            edge.node.register_prehook(self._passed)

    def _passed(self, _: Any) -> None:
        """A backward came through a captured forward. One that records itself, for a gradient of the gradient, would
        lose what that owes to the parameters: they were not there."""
        self._twice |= torch.is_grad_enabled()


class _Hook:
    """A recorder's hook on its own model. Copied or saved with the model, it does nothing."""

    def __init__(self, call: Callable[..., None] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        if self._call is not None:
            self._call(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def _insides(capture: Capture) -> Iterator[tuple[GradientEdge, Rows]]:
    """Where gradients arrive in a forward, and how to find the samples there."""
    for met in capture.met:
        for k, edge in met.edges.items():
            yield edge, partial(met.site.layouts[f"out{k}"].per_sample, samples=capture.samples)


def _astray() -> RuntimeError:
    return RuntimeError(
        "These losses do not come from a forward of the model on the batch that was drawn last. Compute them as "
        "loss(model(batch), ...) on all rows of the batch, with gradients enabled, then call "
        "private.backward(losses)."
    )
