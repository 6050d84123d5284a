"""The same computation traced whole, compiled, and on CUDA replayed as one graph, at a fixed physical shape.

Forward, backward, norms, weights and sums are traced together into one graph of tensor operations, which the compiler
can fuse across all of them. Poisson sampling never changes the shape (batches are padded and masked), so one trace
serves a whole run.

What a graph cannot have is a branch on values. The second look at samples whose gradients are not finite is left to
the eager path: the graph says whether it was needed, and the caller then asks there.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from dpscale.engine import (
    LossFn,
    ScaledSum,
    UnsupportedModel,
    batch_size,
    blueprints,
    check_losses,
    evaluate,
    exactly,
    identity,
    scaled_sum,
    signature,
    trainable,
)
from dpscale.engine.capture import Blueprint, BlueprintMismatch
from dpscale.engine.combine import gradients, weigh
from dpscale.scaling import Scaling

log = logging.getLogger("dpscale")

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""All but the memory-efficient one: in a graph that holds its forward and backward together it fails to launch."""

Evaluate = Callable[[Mapping[str, Tensor], Any, Tensor], Any]
"""(parameter values, batch, mask) -> (captures, gradients at their edges, losses)."""


@dataclass(frozen=True)
class Answer:
    """What a replay gives. On CUDA these are the graph's own buffers: the next replay overwrites them."""

    grads: dict[str, Tensor]
    norms: Tensor
    weights: Tensor
    ignored: Tensor
    losses: Tensor
    finite: Tensor


Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""From a traced graph and example inputs to something that runs it."""


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """torch's own compiler."""
    from torch._inductor.compile_fx import compile_fx  # slow to import, and eager users never need it

    compiled: Any = compile_fx(graph, inputs)
    return compiled  # type: ignore[no-any-return]


class Compiled:
    """One traced and compiled step, for batches of one shape.

    Args:
        parameters: the trainable parameters; their storage must stay where it is (optimizers update in place).
        evaluate: forward and backward.
        rule: from norm to weight.
        batch, mask: an example; the shapes of all that follow.
        backend: what compiles the traced graph.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        evaluate: Evaluate,
        rule: Scaling,
        batch: Any,
        mask: Tensor,
        backend: Backend,
    ) -> None:
        self._parameters = parameters
        self._names = list(parameters)
        leaves, self._spec = tree_flatten(batch)
        self._tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        constants = list(leaves)

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            values, (*data, mask) = inputs[: len(self._names)], inputs[len(self._names) :]
            put = dict(zip(self._tensors, data, strict=True))
            whole = tree_unflatten([put.get(k, leaf) for k, leaf in enumerate(constants)], self._spec)
            captures, grads, losses = evaluate(dict(zip(self._names, values, strict=True)), whole, mask)
            with exactly(mask.device):
                out, finite = weigh(gradients(captures, grads), rule, mask, parameters)
            return *out.grads.values(), out.norms, out.weights, out.ignored, losses, finite

        data = [leaves[k] for k in self._tensors]
        with sdpa_kernel(_ATTENTION):
            # On fake tensors: nothing is computed, and a model's own looks at values (a mask of ones?) do not branch.
            trace = make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)
            graph = trace(*self._values(), *data, mask)
        # Tensors that are no inputs (buffers, frozen parameters) are held by reference: as buffers of the graph they
        # follow whoever updates them in place.
        for name, t in [(n, t) for n, t in vars(graph).items() if isinstance(t, Tensor)]:
            delattr(graph, name)
            graph.register_buffer(name, t)
        with torch.no_grad():
            self._run = backend(graph, [*self._values(), *data, mask])
        self._replay: Callable[[], Any] | None = None
        self._static: list[Tensor] = []
        with torch.no_grad():
            if mask.is_cuda:
                self._capture_graph(data, mask)
            else:
                self._run(*self._values(), *data, mask)

    def __call__(self, batch: Any, mask: Tensor) -> Answer:
        """One step on a batch of the example's shape."""
        leaves = tree_flatten(batch)[0]
        data = [leaves[k] for k in self._tensors]
        with torch.no_grad():
            if self._replay is None:
                outputs = self._run(*self._values(), *data, mask)
            else:
                for buffer, t in zip(self._static, [*data, mask], strict=True):
                    buffer.copy_(t, non_blocking=True)
                outputs = self._replay()
        grads = dict(zip(self._names, outputs, strict=False))
        return Answer(grads, *outputs[len(grads) :])

    def _values(self) -> list[Tensor]:
        return [p.detach() for p in self._parameters.values()]

    def _capture_graph(self, data: list[Tensor], mask: Tensor) -> None:
        """Record the compiled step once as a CUDA graph over buffers of its own; parameters are read where they are."""
        self._static = [t.clone() for t in (*data, mask)]
        inputs = [*self._values(), *self._static]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, then lets libraries choose their kernels, outside of the recording
                self._run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                outputs = self._run(*inputs)
        except RuntimeError as error:  # an operation that cannot be recorded: compiled, but launched one by one
            log.info("dpscale: not replayed as a CUDA graph (%s)", str(error).splitlines()[0])
            return

        def replay() -> Any:
            graph.replay()
            return outputs

        self._replay = replay


class Fast:
    """`scaled_sum` for a training loop: compiled where it can be, eager where it cannot, with one line saying why.

    Args:
        model: its parameters must keep their storage, as they do under any torch optimizer.
        backend: what compiles the traced graph.
    """

    def __init__(self, model: nn.Module, backend: Backend = inductor) -> None:
        self._model, self._backend = model, backend
        self._known: dict[Any, Compiled | None] = {}

    def __call__(self, loss_fn: LossFn, batch: Any, rule: Scaling, mask: Tensor, *, keep: bool = False) -> ScaledSum:
        """As `dpscale.scaled_sum`.

        Args:
            keep: copy the gradients. Without it they may be buffers that the next call overwrites.
        """
        compiled = self._compiled(loss_fn, batch, rule, mask)
        if compiled is None:
            return scaled_sum(self._model, loss_fn, batch, rule, mask)
        answer = compiled(batch, mask)
        if not bool(answer.finite):  # a rare sample that needs the second look
            return scaled_sum(self._model, loss_fn, batch, rule, mask)
        grads = {n: g.clone() for n, g in answer.grads.items()} if keep else answer.grads
        rest = {n: getattr(answer, n).clone() for n in ("norms", "weights", "ignored", "losses")}
        return ScaledSum(grads=grads, **rest)

    def _compiled(self, loss_fn: LossFn, batch: Any, rule: Scaling, mask: Tensor) -> Compiled | None:
        shapes = tuple(t.shape for t in tree_leaves(batch) if isinstance(t, Tensor))
        key = (identity(loss_fn), signature(self._model, batch), shapes, rule)
        if key not in self._known:
            parameters = trainable(self._model)

            def run(data: Any) -> Tensor:
                return check_losses(loss_fn(self._model, data), batch_size(data)[0])

            for blueprint in blueprints(self._model, key[:2], parameters, run, batch):
                if blueprint.provisional:
                    return None  # not yet: this batch could not show whether samples are kept apart

                def at(values: Mapping[str, Tensor], data: Any, mask: Tensor, found: Blueprint = blueprint) -> Any:
                    return evaluate(parameters, run, data, found, mask, [(1.0, values)])

                try:
                    self._known[key] = Compiled(parameters, at, rule, batch, mask, self._backend)
                except BlueprintMismatch:
                    continue
                except UnsupportedModel:
                    raise
                except Exception as error:
                    reason = str(error).strip().splitlines()
                    log.warning(
                        "dpscale: runs eagerly, not compiled: %s", reason[0] if reason else type(error).__name__
                    )
                    self._known[key] = None
                break
        return self._known[key]
