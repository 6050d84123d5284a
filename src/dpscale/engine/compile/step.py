"""The same computation traced whole, compiled, and on CUDA replayed as one graph.

Forward, backward, norms, weights and sums are traced together into one graph of tensor operations, which the compiler
can fuse across all of them. Poisson sampling draws batches of any size, so the trace leaves the size open, and one
compiled step serves a whole run; a CUDA graph is recorded for each of the few sizes that batches are padded to. A model
that needs to know the size (it loops over its samples) is compiled for each of them.

What a graph cannot have is a branch on values. The second look at samples whose gradients are not finite is left to
the eager path: the graph says whether it was needed, and the caller then asks there.
"""

import copy
import logging
import operator
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dpscale.engine import native
from dpscale.engine.arguments import Points, leaves_of
from dpscale.engine.combine import Evaluated, evaluate, exactly, gradients, weigh
from dpscale.engine.compat import (
    foreach_copy_,
    foreach_zero_,
    holds_for,
    trace_any_size,
    trace_on_fakes,
    tree_flatten,
    tree_unflatten,
    weak_view,
)
from dpscale.engine.compile.finite_flag import FiniteFlag, publish
from dpscale.engine.compile.inductor import CHEAPER
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.identity import Setting
from dpscale.engine.modules import Structure, structure, untouched
from dpscale.engine.phases import cold_start, phase
from dpscale.engine.result import ScaledSum
from dpscale.engine.tape.channels import channels_last
from dpscale.engine.tape.tape import Sites, UnknownOperation
from dpscale.scaling import RULES, Scaling

log = logging.getLogger("dpscale")

_ATTENTION = [SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION, SDPBackend.MATH]
"""All but the memory-efficient one: in a graph that holds its forward and backward together it fails to launch."""

MOST = 12
"""Steps that are compiled for one run; each takes up to a minute, and on CUDA the memory of a step."""

Evaluate = Callable[[Points, Any, Tensor], Evaluated]
"""From points, a batch and its mask to what a forward and a backward give."""


Run = Callable[[Any], Tensor]
"""From a batch to its losses."""

Meanwhile = Callable[[Mapping[str, Tensor]], None]
"""Something to do while a GPU is at work on gradients, by name: their shapes are known, and no more."""

Backend = Callable[[torch.fx.GraphModule, list[Tensor]], Callable[..., Any]]
"""From a traced graph and example inputs to something that runs it."""


def traced(
    step: Callable[..., Any], inputs: list[Tensor], last: bool | None, batched: range, rows: int
) -> torch.fx.GraphModule:
    """On fake tensors: nothing is computed, and a model's own looks at values (a mask of ones?) do not branch.

    Args:
        last: with images channels last, if the model bears it; None: unless something in it would be slower.
        batched: which inputs may have any number of rows.
        rows: about how many they have as a rule.
    """

    def trace(last: bool | None) -> torch.fx.GraphModule:
        with channels_last(last is not False, careful=last is None):
            if batched:
                return trace_any_size(step, inputs, batched, rows, CHEAPER)
            return trace_on_fakes(step, inputs, CHEAPER)

    try:
        graph = trace(last)
    except UnsupportedModel:
        raise
    except (RuntimeError, ValueError):  # a model that counts on contiguous images, with `view` as a rule
        graph = trace(False)
    # Tensors that are no inputs (buffers, frozen parameters) are held by reference: as buffers of the graph they
    # follow whoever updates them in place.
    for name, t in [(n, t) for n, t in vars(graph).items() if isinstance(t, Tensor)]:
        delattr(graph, name)
        graph.register_buffer(name, t)
    return graph


def _answer(evaluated: Evaluated, rule: Scaling, mask: Tensor, parameters: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """What a step computes from a forward and a backward: the sums by name; (3, B) norms, weights and losses."""
    tapes, grads, losses = evaluated
    with exactly(mask.device):
        out, _ = weigh(gradients(tapes, grads), rule, mask, parameters, losses, publish=publish)
    of_samples = torch.promote_types(out.norms.dtype, losses.dtype)
    return *out.grads.values(), torch.stack([t.to(of_samples) for t in (out.norms, out.weights, losses)])


class Compiled:
    """One traced and compiled step, for batches of one shape, or of any size.

    Args:
        parameters: the trainable parameters.
        points: the weights of each point; their storage must stay where it is (optimizers update in place).
        constants: buffers and frozen parameters, which it holds where they are.
        evaluate: forward and backward.
        rule: from norm to weight.
        batch, mask: an example; the shapes of all that follow.
        backend: what compiles the traced graph.
        any_size: leave the number of rows open; about how many they are as a rule. 0: as many as in the example.
        most: about how many they are at most.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        points: Sequence[Mapping[str, Tensor]],
        constants: Sequence[Tensor],
        evaluate: Evaluate,
        rule: Scaling,
        batch: Any,
        mask: Tensor,
        backend: Backend,
        any_size: int = 0,
        most: int = 0,
    ) -> None:
        self._points, self._most = list(points), most if any_size else 0
        self._held = list(constants)
        self.names = list(parameters)
        self._coefficients = torch.ones(len(points), dtype=torch.float64, device=mask.device)
        self._last = [1.0] * len(points)
        lifted = constants_of(rule)
        self._constants = torch.tensor(list(lifted.values()), dtype=torch.float64, device=mask.device)
        leaves, spec = tree_flatten(batch)
        self._tensors = [k for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def step(*inputs: Tensor) -> tuple[Tensor, ...]:
            count = len(self.names)
            values = [dict(zip(self.names, inputs[k * count :], strict=False)) for k in range(len(self._points))]
            coefficients, constants, *data, mask = inputs[len(self._points) * count :]
            formula = _with(rule, dict(zip(lifted, constants.unbind(), strict=True)))
            put = dict(zip(self._tensors, data, strict=True))
            whole = tree_unflatten([put.get(k, leaf) for k, leaf in enumerate(leaves)], spec)
            evaluated = evaluate(list(zip(coefficients.unbind(), values, strict=True)), whole, mask)
            return _answer(evaluated, formula, mask, parameters)

        self._flag = FiniteFlag(mask.device)
        data = [leaves[k] for k in self._tensors]
        self._strides = [t.new_empty(t.shape).stride() if any_size else t.stride() for t in data]
        self._storage, self._seen = self._places(), -1  # number of the structure that was last found to hold them
        values = [*[w.detach() for w in self._weights()], self._coefficients, self._constants]
        inputs = [*values, *data, mask]
        batched = range(len(inputs) - len(data) - 1, len(inputs) if any_size else 0)
        with phase("tracing"), sdpa_kernel(_ATTENTION):
            # As CUDA's kernels want images, and our own on the CPU.
            ours = any(p.ndim == 4 for p in parameters.values()) and native.available()
            last = mask.is_cuda or (None if ours else False)
            graph = traced(step, inputs, last, batched, any_size)
        data = self._laid_out(data)
        with phase("compiling"), torch.no_grad():
            self._run = backend(graph, [*values, *data, mask])
            self._run(*values, *data, mask)
        self._open = graph if any_size else None
        self._in_place = any(_writes(node) for node in graph.graph.nodes)
        self._takes = {len(mask): not any_size or holds_for(graph, len(mask))}
        self._replays: dict[int, Callable[[list[Tensor]], Any]] = {}
        self._buffers: list[Tensor] = []  # of the graphs' inputs, for the largest batch
        self._filled = 0  # rows of them that are not zero, but for the mask
        self._pool = torch.cuda.graph_pool_handle() if mask.is_cuda else None

    def takes(self, rows: int) -> bool:
        """Whether it is for batches of so many rows."""
        if rows not in self._takes:
            self._takes[rows] = self._open is not None and holds_for(self._open, rows)
        return self._takes[rows]

    def __call__(
        self, batch: Any, mask: Tensor, coefficients: Sequence[float], begin: Callable[[], None] = lambda: None
    ) -> list[Tensor]:
        """The gradients by name, and (3, B) norms, weights and losses of a batch of the example's shape.

        On CUDA these are the graph's own buffers: the next replay overwrites them.
        """
        leaves = leaves_of(batch)
        if self._last != list(coefficients):
            self._last = list(coefficients)
            self._coefficients.copy_(torch.tensor(self._last, dtype=torch.float64))
        data = [leaves[k] for k in self._tensors]
        run = self._replayed([*data, mask]) if mask.is_cuda else self._launched
        begin()
        self._flag.expect()
        with torch.no_grad():
            return list(run([*data, mask]))

    def put(self, tensors: Sequence[Tensor], count: int, rows: int) -> list[Tensor] | None:
        """Put ``count`` rows where ``rows`` are read on CUDA, with zeros after them: there. None if they do not fit.

        Not of a forward that writes: what it reads must be there still if the eager path is asked for the same batch.
        """
        places = self._buffers[:-1]
        alike = [t.dtype == p.dtype and t.device == p.device and t.shape == (count, *p.shape[1:]) and rows <= len(p)
                 for t, p in zip(tensors, places, strict=False)]  # fmt: skip
        if self._in_place or not len(places) == len(tensors) == len(self._tensors) or not all(alike):
            return None
        with torch.no_grad():
            foreach_copy_([place[:count] for place in places], list(tensors), non_blocking=True)
            if count < self._filled:  # what a larger draw has left there
                foreach_zero_([place[count : self._filled] for place in places])
        self._filled = count
        return [place[:rows] for place in places]

    def all_finite(self) -> bool:
        """Whether all norms of the last batch are finite, the masked ones too: if not, its answer is none. Waits."""
        return self._flag.read()

    def moved(self, found: Structure) -> bool:
        """Whether a parameter or buffer is no longer where it was, or another one (`load_state_dict(assign=True)`)."""
        if found.number != self._seen:
            same = all(self._points[-1][n] is found.trainable.get(n) for n in self.names)
            held = len(self._held) == len(found.constants) and all(map(operator.is_, self._held, found.constants))
            if not (same and held):
                return True
            self._seen = found.number
        return self._places() != self._storage

    def _places(self) -> list[int]:
        return [*map(Tensor.data_ptr, (*self._weights(), *self._held))]

    def _weights(self) -> list[Tensor]:
        return [w[n] for w in self._points for n in self.names]

    def _laid_out(self, data: list[Tensor]) -> list[Tensor]:
        """The batch as the compiled step takes it."""
        return [t if t.stride() == s else _strided(t, s) for t, s in zip(data, self._strides, strict=True)]

    def _launched(self, batch: list[Tensor]) -> Any:
        inputs = *self._weights(), self._coefficients, self._constants, *self._laid_out(batch[:-1]), batch[-1]
        with self._flag.listening():
            return self._run(*inputs)

    def _replayed(self, batch: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """What replays the step at the size of this batch; recorded when the size is met first."""
        rows = len(batch[-1])
        if rows not in self._replays:
            with phase("recording"), torch.no_grad(), torch.cuda.device(batch[-1].device):
                if rows < self._most and not self._replays and self.takes(self._most):
                    # The largest first: all others find room in its memory.
                    places = torch.arange(self._most, device=batch[-1].device) % rows
                    with suppress(torch.OutOfMemoryError):  # it may never come
                        self._replays[self._most] = self._recorded([t[places] for t in batch])
                self._replays[rows] = self._recorded(batch)
        return self._replays[rows]

    def _recorded(self, batch: list[Tensor]) -> Callable[[list[Tensor]], Any]:
        """The compiled step at one size as a CUDA graph over buffers of its own; parameters are read where they are.

        The graphs of all sizes share their memory, that of inputs and answers too: one of them runs at a time.
        """
        rows = len(batch[-1])
        if not self._buffers or rows > len(self._buffers[-1]):
            self._buffers, self._filled = [t.clone() for t in (*self._laid_out(batch[:-1]), batch[-1])], rows
        static = [buffer[:rows] for buffer in self._buffers]
        inputs = [*self._weights(), self._coefficients, self._constants, *static]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # compiles, then lets libraries choose their kernels, outside of the recording
                self._run(*inputs)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads may go on meanwhile, such as one that pins the memory of the next batches.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"), self._flag.listening():
                outputs = self._run(*inputs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operation that cannot be recorded: compiled, but launched one by one
            log.info("dpscale: not replayed as a CUDA graph (%s)", str(error).splitlines()[0])
            return self._launched
        answers = [weak_view(t) for t in outputs]

        def replay(batch: list[Tensor]) -> Any:
            away = [k for k, t in enumerate(batch) if t.data_ptr() != static[k].data_ptr()]  # others were put there
            for k in away:
                static[k].copy_(batch[k], non_blocking=True)
            if len(away) > 1:  # data, not the mask alone
                self._filled = max(self._filled, rows)
            graph.replay()  # on its own device
            return answers

        return replay


def _writes(node: torch.fx.Node) -> bool:
    """Whether it may change a tensor: such operations have names like ``aten.relu_.default``."""
    return node.op == "call_function" and any(part.endswith("_") for part in str(node.target).split("."))


def constants_of(rule: Scaling) -> dict[str, float]:
    """What a compiled step is given of a rule, and does not have in it: another C is no other step.

    Of the rules here, which are formulas of their constants. Of a rule that is not known nothing: it may branch.
    """
    return {f.name: getattr(rule, f.name) for f in fields(rule)} if type(rule) in RULES.values() else {}


def formula_of(rule: Scaling) -> Any:
    """What a compiled step does have in it of a rule: its formula, or all of it."""
    return type(rule)._weight if constants_of(rule) else rule


def _with(rule: Scaling, constants: Mapping[str, Tensor]) -> Scaling:
    """The rule with tensors for its constants, which were checked when it was made."""
    given = copy.copy(rule)
    for name, value in constants.items():
        object.__setattr__(given, name, value)
    return given


def _strided(t: Tensor, stride: tuple[int, ...]) -> Tensor:
    return torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)


class _Key(NamedTuple):
    """What a compiled step is for."""

    loss_fn: Any
    batch: Any
    rows: int | None  # None: any size; 0: every one of them, where it is impossible
    rule: Scaling
    points: Any


def _key(rows: int | None, setting: Setting, batch: Any, rule: Scaling, points: Points | None) -> _Key:
    constants = tuple([(type(t), repr(t)) for t in leaves_of(batch) if not isinstance(t, Tensor)])
    places = tuple([id(weights) for _, weights in points or ()])  # a compiled step keeps them alive
    return _Key(setting.holding, (setting.kind, setting.shapes, constants), rows, rule, places)


class _Known(NamedTuple):
    """A compiled step, or None where that was found to be impossible; attributes of the modules before and after."""

    step: Compiled | None
    before: tuple[Any, ...]
    after: tuple[Any, ...]

    def reads_other(self, values: tuple[Any, ...]) -> bool:
        """Whether an attribute of a module is not what the step has in it. One that the forward itself changes (a
        counter) does not count: a forward that computes with it was refused."""
        return values != self.after and any(
            now != then for first, then, now in zip(self.before, self.after, values, strict=True) if first == then
        )


_ADVICE = {
    "loss_fn": "loss_fn is another one time and again, or reads numbers that change. Define it once, and give it what "
    "changes as part of the batch or as a tensor that is changed in place",
    "batch": "samples come in ever new shapes, or the model is switched time and again. Pad samples to one length",
    "rows": "batches come in ever new sizes",
    "attributes": "an attribute of a module changes time and again. Make it a buffer, and change that in place",
}


class CompiledSum:
    """`scaled_sum` for a training loop, compiled where it can be, with one line in the log where it cannot.

    Args:
        model: its parameters must keep their storage, as they do under any torch optimizer.
        backend: what compiles the traced graph.
        any_size: try to compile once for batches of any size, by the example of so many rows.
        most: about the most that come.
    """

    def __init__(self, model: nn.Module, backend: Backend, any_size: int = 0, most: int = 0) -> None:
        self._model, self._backend, self._any_size, self._most = weakref.ref(model), backend, any_size, most
        self._known: dict[_Key, _Known] = {}
        self._last: Compiled | None = None
        self._made, self._explained, self._switched = 0, False, 0

    def __call__(
        self, setting: Setting, run: Run, batch: Any, rule: Scaling, mask: Tensor, points: Points | None, sites: Sites,
        *, keep: bool = False, meanwhile: Meanwhile | None = None, begin: Callable[[], None] = lambda: None,
    ) -> ScaledSum | None:  # fmt: skip
        """As `dpscale.scaled_sum`; None where the eager path must be asked.

        Args:
            setting: what the step is for.
            run: from a batch to the losses.
            points: the same mappings at every call, with new values in them: one compiled step is for them alone.
                Points that do not count yet have the coefficient 0.
            sites: where the samples are.
            keep: copy the gradients. Without it they may be buffers that the next call overwrites.
            meanwhile: called while a GPU is at work, with the gradients that it works on.
            begin: called before the forward that counts: to compile and to record takes some of its own.
        """
        compiled = self._last = self._compiled(setting, run, batch, rule, mask, points, sites)
        if compiled is None:
            return None
        outputs = compiled(batch, mask, [float(c) for c, _ in points or [(1.0, {})]], begin)
        *sums, told = outputs
        grads = {n: g.clone() if keep else g for n, g in zip(compiled.names, sums, strict=True)}
        norms, weights, losses = (told.clone() if told.is_cuda else told).unbind()
        if meanwhile is not None and mask.is_cuda:
            meanwhile(grads)
        if not compiled.all_finite():  # a rare sample needs the second look
            return None
        # All are finite, so none was ignored: said on the CPU, where it can be read without waiting.
        none = torch.zeros((), dtype=torch.int64, device="cpu")
        return ScaledSum(grads, norms, weights, losses, none, rule.bound)

    def put(self, tensors: Sequence[Tensor], count: int, rows: int) -> list[Tensor] | None:
        """Put ``count`` rows where the step that was taken last reads ``rows``, with zeros after them, if they fit."""
        return None if self._last is None else self._last.put(tensors, count, rows)

    def _compiled(
        self, setting: Setting, run: Run, batch: Any, rule: Scaling, mask: Tensor, points: Points | None, sites: Sites
    ) -> Compiled | None:
        for rows in (None, len(mask)) if self._any_size else (len(mask),):
            made = self._for_rows(rows, setting, run, batch, rule, mask, points, sites)
            if made is not None and made.takes(len(mask)):
                return made
        return None

    def _for_rows(
        self, rows: int | None, setting: Setting, run: Run, batch: Any, rule: Scaling, mask: Tensor,
        points: Points | None, sites: Sites,
    ) -> Compiled | None:  # fmt: skip
        """The compiled step for so many rows, or for any number; None where there is none."""
        found = setting.found
        key = _key(rows, setting, batch, rule, points)
        values = found.attributes.values  # as the key has just seen them
        if (known := self._known.get(key)) is not None:
            other = known.reads_other(values)
            if known.step is None or not (other or known.step.moved(found)):
                return known.step
            self._switched += other
            del self._known[key]
        if key._replace(rows=0) in self._known:
            return None
        if self._made >= MOST:
            self._explain(key)
            return None
        model = self._model()
        assert model is not None
        made = self._compile(0 if rows else self._any_size, model, run, batch, rule, mask, points, sites)
        self._made += made is not None or rows is not None
        impossible = made is None and rows is not None
        # The key anew, as the forwards meanwhile have left the model.
        now = Setting.of(structure(model), setting.loss_fn, batch)
        key = _key(0 if impossible else rows, now, batch, rule, points)
        self._known[key] = _Known(made, values, now.found.attributes.values)
        return made

    def _compile(
        self, any_size: int, model: nn.Module, run: Run, batch: Any, rule: Scaling, mask: Tensor,
        points: Points | None, sites: Sites,
    ) -> Compiled | None:  # fmt: skip
        found = structure(model)
        parameters = found.trainable

        def at(points: Points, data: Any, mask: Tensor) -> Any:
            return evaluate(parameters, run, data, sites, mask, points)

        weights = [w for _, w in points] if points else [parameters]
        try:
            with untouched(model), cold_start():
                return Compiled(
                    parameters, weights, found.constants, at, rule, batch, mask, self._backend, any_size, self._most
                )
        except Exception as error:
            if not any_size and isinstance(error, (UnknownOperation, UnsupportedModel)):
                raise
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            if any_size:  # what is wrong with the model itself shows when it is compiled for one size
                log.info("dpscale: compiled for each size of batch, not once for all: %s", reason)
            else:
                log.warning("dpscale: runs eagerly, not compiled: %s", reason)
            return None

    def _explain(self, key: _Key) -> None:
        """Say once why nothing more is compiled: by what most of the steps so far differ from this one."""
        if self._explained:
            return
        self._explained = True
        differ = {
            part: sum(getattr(k, part) != getattr(key, part) for k in self._known)
            for part in _Key._fields
            if part in _ADVICE
        }
        differ["attributes"] = self._switched
        reason = _ADVICE[max(differ, key=lambda part: differ[part])]
        log.warning("dpscale: runs eagerly from here on, not compiled: %d steps are compiled, and %s.", MOST, reason)
