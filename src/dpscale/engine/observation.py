"""Runs a model on a few samples, and notes each operation that its parameters meet and what in it depends on the data.

Two runs on different numbers of samples also show what has rows for the samples without being made from them: a
parameter that is repeated once per sample, a constant made in the likeness of the data.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from dpscale.engine.calls import as_now, result, tensors_in
from dpscale.engine.capture import BlueprintMismatch, Meeting
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.taint import FEWER, SAMPLES, Undisturbed, some, torch_states


@dataclass
class Seen:
    """One met call in one run: copies of what went in and out."""

    function: Callable[..., Any]
    inputs: list[Any]
    spec: TreeSpec
    met: dict[int, str]  # position among the inputs -> the parameter, or the parameters that it is made of
    sources: list[int]  # for each met input, the met call that made it; -1 for a parameter itself
    outputs: list[Tensor]
    edges: dict[int, GradientEdge]  # by output; only of those that are differentiable
    on_data: bool
    random: bool
    again: Callable[..., Any]  # the function as it ran: not in place, and under the same autocast

    @property
    def name(self) -> str:
        """For messages."""
        return f"{getattr(self.function, '__name__', '?')} (parameter {next(iter(self.met.values()))!r})"

    @property
    def complex(self) -> bool:
        """Whether anything in it is."""
        return any(t.is_complex() for t in _tensors([self.inputs, self.outputs]))

    def expands(self, small: "Seen") -> bool:
        """Whether the output, a function of parameters alone, is larger than that of the same call on fewer samples."""
        larger = any(a.shape != b.shape for a, b in zip(self.outputs, small.outputs, strict=True))
        return bool(self.edges) and not self.on_data and larger


@dataclass
class Record:
    """One run: the met calls, the constants made in the likeness of the data, the outputs, the buffers as it left them.

    Those constants are noted by their shapes. ``grads`` are what a backward from the outputs brings to each output of
    the met calls, by the numbers of the call and of the output.
    """

    seen: list[Seen]
    created: list[torch.Size]
    outputs: list[Tensor]
    buffers: list[Tensor]
    grads: dict[tuple[int, int], Tensor | None]


class Observer:
    """Records runs of a model.

    Args:
        undisturbed: of the model, which is left as it was.
        parameters: the trainable parameters, by name.
        run: the computation, from a batch to tensors whose first dimension is the batch.
    """

    def __init__(self, undisturbed: Undisturbed, parameters: Mapping[str, Tensor], run: Callable[[Any], Any]) -> None:
        self._undisturbed, self._parameters, self._run = undisturbed, parameters, run
        self._expanded: set[int] = set()  # met calls that repeat a parameter once per sample
        self._sized: set[int] = set()  # created constants that have a row for each sample

    def record(self, data: Any) -> Record:
        """One run, forward and backward."""
        with self._undisturbed():
            with _Notes(self._parameters, data, self._expanded, self._sized) as notes:
                out = self._run(data)
            outputs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            grads = _arriving(notes.seen, outputs)
            buffers = [b.clone() for b in self._undisturbed.model.buffers()]
        return Record(notes.seen, notes.created, outputs, buffers, grads)

    def compare(self, batch: Any) -> tuple[Record, Record]:
        """Runs on fewer and on all samples of a probe, once it is known what is repeated for each sample."""
        probe = some(batch, SAMPLES)
        self.record(probe)  # a first run may do more than later ones: LSTMs look over their weights, caches are filled
        while True:
            few, base = self.record(some(batch, FEWER)), self.record(probe)
            check_same_operations(few, base)
            rows = {k for k, (b, f) in enumerate(zip(base.created, few.created, strict=False)) if b != f}
            expanded = _expansions(base, few, self._expanded)
            if not rows <= self._sized:
                self._sized |= rows
                self._expanded = set()  # to know them is to see differently what follows
            elif expanded == self._expanded:
                return few, base
            elif len(expanded) > len(self._expanded):
                self._expanded = expanded
            else:
                raise BlueprintMismatch


def check_same_operations(a: Record, b: Record) -> None:
    """Refuse a model whose operations depend on the samples."""
    if [s.function for s in a.seen] != [s.function for s in b.seen]:
        raise UnsupportedModel(
            "Which operations this model runs depends on the values in the batch (data-dependent control flow) or on "
            "how many samples there are (a loop over them), so rows cannot be attributed to samples. Make the forward "
            "run the same operations for every batch."
        )


def _arriving(seen: list[Seen], outputs: list[Tensor]) -> dict[tuple[int, int], Tensor | None]:
    """The gradients at the met calls' outputs. The seed is not the same everywhere: a softmax would bring nothing."""
    edges = {(k, j): edge for k, s in enumerate(seen) for j, edge in s.edges.items()}
    roots = [t for t in outputs if t.requires_grad]
    if not edges or not roots:
        return dict.fromkeys(edges)
    seeds = [1 + (torch.arange(t.numel(), device=t.device) % 7).view(t.shape).to(t.dtype) / 7 for t in roots]
    grads = torch.autograd.grad(roots, list(edges.values()), seeds, retain_graph=True, allow_unused=True)
    return dict(zip(edges, grads, strict=True))


def _expansions(base: Record, few: Record, known: set[int]) -> set[int]:
    """The met calls that repeat a parameter once per sample, numbered as they will be once all of them are known.

    What such a call gives is then data. Calls that met it, and nothing else, are no longer met, and those after them
    move up.
    """
    found: set[int] = set()
    below: set[int] = set()  # expansions that were not known, and what was made from them
    gone = 0
    for k, (b, f) in enumerate(zip(base.seen, few.seen, strict=True)):
        from_below = [source in below for source in b.sources]
        if any(from_below):
            below.add(k)
            gone += all(from_below)
        elif b.expands(f):
            found.add(k - gone)
            if k not in known:
                below.add(k)
    return found


class _Notes(Meeting):
    """A plain run that notes each met call, and which tensors depend on the data."""

    def __init__(self, parameters: Mapping[str, Tensor], batch: Any, expanded: set[int], sized: set[int]) -> None:
        super().__init__()
        self.keys = {id(p): n for n, p in parameters.items()}
        self.seen: list[Seen] = []
        self.created: list[torch.Size] = []
        self._expanded, self._sized = expanded, sized
        self._data = {id(t) for t in tree_leaves(batch) if isinstance(t, Tensor)}
        self._made: dict[int, int] = {}  # functions of parameters -> the met call that made them
        self._held: list[Any] = []  # so that no id is given to another tensor during the run

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Pass on the mark of the data. What only has its type and device from the data does not depend on them."""
        out = func(*args, **kwargs)
        if any(id(t) in self._data for t in _tensors((args, kwargs))):
            creates = getattr(func, "__name__", "") in _CREATE
            if creates:
                self.created.append(out.shape)
            if not creates or len(self.created) - 1 in self._sized:
                self._mark(result(func, args, out))
        return out

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Note the call."""
        if not torch.is_grad_enabled():
            return self.pass_by(func, args, kwargs)
        flat, spec = tree_flatten((args, kwargs))
        met = {k: self.keys[id(t)] for k, t in enumerate(flat) if id(t) in self.keys}
        sources = [self._made.get(id(flat[k]), -1) for k in met]
        # What has a gradient and is no function of parameters alone is of the data, by whatever way it came: written
        # into a view, or from a scripted function.
        tensors = [(k, t) for k, t in enumerate(flat) if isinstance(t, Tensor)]
        on_data = any(id(t) in self._data or (t.requires_grad and k not in met) for k, t in tensors)
        if any(torch._C._functorch.is_functorch_wrapped_tensor(t) for _, t in tensors):
            raise UnsupportedModel(
                f"Parameter {next(iter(met.values()))!r} is used inside torch.vmap or another transformation of "
                "torch.func, where its operations cannot be told apart by sample. Write that part for a whole batch."
            )
        copies = [t.detach().clone() if isinstance(t, Tensor) and k not in met else t for k, t in enumerate(flat)]
        before = torch_states()
        out = func(*args, **kwargs)
        random = torch_states() != before
        made = result(func, args, out)
        outputs = list(_tensors(made))
        edges = {k: get_gradient_edge(t) for k, t in enumerate(outputs) if t.requires_grad}
        values, again = [t.detach().clone() for t in outputs], as_now(func, tensors_in(args, kwargs))
        self.seen.append(Seen(func, copies, spec, met, sources, values, edges, on_data, random, again))
        if on_data or len(self.seen) - 1 in self._expanded:
            self._mark(made)
        else:  # a function of parameters alone: from here on it is met as one
            for t in outputs:
                if t.requires_grad:
                    self.keys[id(t)] = "/".join(met.values())
                    self._made[id(t)] = len(self.seen) - 1
            self._held.append(made)
        return out

    def _mark(self, out: Any) -> None:
        self._data.update(id(t) for t in _tensors(out))
        self._held.append(out)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors that an operation of torch takes or gives, however nested; several times as fast as a pytree."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


_CREATE = {f"{what}_like" for what in ("zeros", "ones", "empty", "full", "rand", "randn")} | {
    f"new_{what}" for what in ("zeros", "ones", "empty", "full", "tensor")
}
