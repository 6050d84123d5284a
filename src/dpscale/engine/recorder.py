"""Records the forwards of a model in somebody else's training loop, so that only the backward has to be ours.

Between the draw of a batch and its backward, every forward of the model on that many rows is taped. One that never
meets a backward (an evaluation) costs nothing but the memory of its graph, and is forgotten when no draw waits.

A sample may have several rows that stand together (the records of a person): (samples·each, …) is then looked at as
(samples, each, …), and a sample's loss is made from its rows' losses.
"""

import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils.rnn import PackedSequence
from torch.utils.hooks import RemovableHandle

from dpscale.engine.arguments import check_losses, trainable
from dpscale.engine.combine import backward, combine, exactly, gradients
from dpscale.engine.compat import tree_flatten, tree_unflatten
from dpscale.engine.errors import SECOND, UnsupportedModel
from dpscale.engine.modules import structure
from dpscale.engine.result import ScaledSum
from dpscale.engine.tape.tape import Tape, Watched
from dpscale.engine.verify.credit import insides, misplaced
from dpscale.engine.verify.randomness import random_states, set_random_states
from dpscale.engine.verify.rows import Features, features
from dpscale.engine.verify.runs import Subject
from dpscale.scaling import Scaling

if TYPE_CHECKING:
    from dpscale.engine.engine import Engine

MOST = 32
"""Forwards that are kept, for draws that are outstanding."""


@dataclasses.dataclass(eq=False)
class Forward:
    """One forward that was taped."""

    tape: Tape
    outputs: list[GradientEdge]
    others: list[GradientEdge]  # of outputs that have no row for each sample
    used: bool = False  # whether a backward came through it


class Recorder:
    """Tapes forwards of an engine's model while drawn batches wait; see `start` and `stop`."""

    def __init__(self, engine: "Engine") -> None:
        self._engine = engine
        self._waiting: dict[
            int, Features | None
        ] = {}  # by how many rows a part of a draw has: what its samples are like
        self._each = 1  # rows of a sample
        self._drawn: dict[int, Sequence[Tensor]] = {}  # by how many rows, where their order counts: the tensors drawn
        self._known: dict[int, weakref.ref[Tensor]] = {}  # tensors of which the features are known, by their id
        self._forwards: list[Forward] = []
        self._running: tuple[Tape, Subject, Any, Any] | None = None
        self._obstacle: str | None = None
        self._twice = False  # whether gradients of gradients were taken through a taped forward
        self._checked = 0  # batches whose losses were looked at
        self._hooks: list[RemovableHandle] = []  # on the model only while a batch waits, so that none is saved with it

    def start(self, samples: int, rows: Features | None = None, each: int = 1, drawn: Sequence[Tensor] = ()) -> None:
        """A batch of so many samples was drawn, with these features, so many rows of each, and these tensors."""
        model = self._engine.model
        if not self._hooks and not isinstance(model, torch.jit.ScriptModule):  # which takes none, and shows nothing
            self._hooks = [
                model.register_forward_pre_hook(_Hook(self._before), with_kwargs=True),
                model.register_forward_hook(_Hook(self._after), with_kwargs=True, always_call=True),
            ]
        self._each, count = each, samples * each
        if each > 1:
            self._drawn[count] = () if count in self._waiting else drawn
        if rows is not None:
            self._known |= {id(t): weakref.ref(t) for t in drawn}
        self._waiting[count] = None if count in self._waiting else rows  # of several, whose they are is not known

    def stop(self) -> None:
        """No batch is waiting."""
        if self._running is not None:  # an interrupt came in the midst of a forward
            self._running[0].__exit__(None, None, None)
            self._running = None
        self._waiting, self._forwards, self._obstacle, self._twice = {}, [], None, False
        self._drawn, self._known = {}, {}
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def require_order(self, given: Sequence[Tensor]) -> None:
        """Where a person's rows must stand together, refuse rows in another order than they were drawn in.

        It is seen where a tensor of the batch itself is given; not where it was computed with before.
        """
        for t, other in ((one, other) for one in given for other in self._drawn.get(len(one), ())):
            if t.shape == other.shape and t.dtype == other.dtype and not torch.equal(t.to(other.device), other):
                now, then = (rows.detach().cpu().reshape(len(t), -1).unique(dim=0) for rows in (t, other))
                if now.shape == then.shape and torch.equal(now, then):
                    raise UnsupportedModel(
                        "The model was given the rows of the batch in another order. Rows are told to be a person's by "
                        "their place. Give them in the order in which they were drawn, and sort inside the model."
                    )

    def scaled_sum(self, losses: Tensor, rule: Scaling, mask: Tensor) -> ScaledSum:
        """As `dpscale.scaled_sum`, from losses whose forward was taped."""
        check_losses(losses, len(mask))
        if isinstance(self._engine.model, torch.jit.ScriptModule):
            self._obstacle = "it is scripted, so that its operations cannot be seen"
        if self._obstacle is not None:
            raise UnsupportedModel(
                f"This model cannot be followed in a loop of your own: {self._obstacle}. Call private.step(batch, "
                "loss_fn), which runs such a model sample by sample."
            )
        forwards = [each for each in self._forwards if each.tape.samples == len(mask)]
        if not forwards or not losses.requires_grad:
            raise _astray()
        if self._twice:
            raise UnsupportedModel(SECOND)
        self._check_apart(losses, forwards)
        parameters = trainable(structure(self._engine.model))
        tapes = [each.tape for each in forwards]
        grads = backward(tapes, parameters, losses, mask.to(losses.dtype))
        if all(g is None for each in grads for g in each):
            raise _astray()
        with exactly(losses.device):
            out = combine(gradients(tapes, grads), rule, mask, parameters, losses.detach())
        self._forwards = [each for each in self._forwards if not each.used]
        return out

    def _check_apart(self, losses: Tensor, forwards: list[Forward]) -> None:
        """Each loss must depend on its own row of the model's outputs alone.

        At first, and every so often, also by every operation that met parameters: a loss may depend on what the model
        keeps to itself, and a hook may change what comes back.
        """
        if others := [edge for each in forwards for edge in each.others]:
            sent = torch.autograd.grad([losses.sum()], others, allow_unused=True, retain_graph=True)
            if any(g is not None and bool(g.any()) for g in sent):
                raise UnsupportedModel(
                    "The losses come from an output of the model whose first dimension is not the batch's samples. "
                    "In a loop of your own only the others can be looked at. Return it with the samples first, or call "
                    "private.step(batch, loss_fn)."
                )
        places = [(edge, lambda g: g) for each in forwards for edge in each.outputs]
        if self._checked & (self._checked - 1) == 0:
            places += [place for each in forwards for place in insides(each.tape)]
        self._checked += 1
        sample = misplaced(losses, places, self._checked)
        if sample is not None:
            raise UnsupportedModel(
                f"Samples are coupled in the loss, or in its backward: what arrives at sample {sample} is not of its "
                "own loss alone. Compute each loss from its own sample (reduction='none'), and let no hook compute "
                "with the whole batch."
            )

    def _before(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._waiting or not torch.is_grad_enabled() or Watched.count:
            return
        if any(isinstance(value, PackedSequence) for value in (*args, *kwargs.values())):
            self._obstacle = "it is given a PackedSequence, whose rows are time steps and not samples"
            return
        flat, spec = tree_flatten((args, kwargs))
        sizes = {len(t) for t in flat if isinstance(t, Tensor) and t.ndim}
        count = next(iter(self._waiting.keys() & sizes), None)
        if count is None:
            return
        rows, each, samples = [k for k, t in enumerate(flat) if _has(t, count)], self._each, count // self._each
        self.require_order([flat[k] for k in rows])
        batch = [flat[k].detach() if each == 1 else flat[k].detach().unflatten(0, (-1, each)) for k in rows]

        def run(batch: list[Tensor]) -> Tensor:
            put = dict(zip(rows, batch if each == 1 else [t.flatten(0, 1) for t in batch], strict=True))
            a, k = tree_unflatten([put.get(n, t) for n, t in enumerate(flat)], spec)
            return _projected(model(*a, **k), len(batch[0]), each)

        found = structure(model)
        subject = Subject(model, trainable(found), run)
        mask = torch.ones(samples, dtype=torch.bool)
        told = self._features([flat[k] for k in rows], batch, self._waiting[count])
        kind = self._engine.trust(subject, found, batch, mask, told).kind
        self._obstacle = self._engine.obstacle(kind)
        if self._obstacle is None:
            tape = Tape(subject.parameters, None, self._engine.sites, samples, lenient=True)
            self._running = tape, subject, batch, (kind, mask, random_states())
            tape.__enter__()

    def _features(self, given: Sequence[Tensor], batch: Sequence[Tensor], drawn: Features | None) -> Features | None:
        """Of what was drawn, and of what a model is given where that is something else: looked up, tokenized."""
        if all(id(t) in self._known and self._known[id(t)]() is t for t in given):
            return drawn
        found = features(batch)
        return drawn if found is None else found if drawn is None else np.concatenate([drawn, found], 1)

    def _after(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self._running is None:
            return None
        tape, subject, batch, (kind, mask, states) = self._running
        self._running = None
        tape.__exit__(None, None, None)
        self._engine.writes.settle(structure(model))
        if output is None:  # the forward raised: its error is already on the way
            return None
        if tape.lost:  # it met what no look has seen: look, and run it once more as it was
            now = random_states()
            self._engine.look(subject, batch, mask, kind)
            tape = Tape(subject.parameters, None, self._engine.sites, tape.samples, lenient=True)
            set_random_states(states)
            with tape:
                output = model(*args, **kwargs)
            set_random_states(now)
            if tape.lost:
                self._obstacle = "which operations it runs changes from call to call"
        count = tape.samples * self._each
        given = [(get_gradient_edge(t), _has(t, count)) for t in tensors_of(output) if t.requires_grad and t.ndim]
        forward = Forward(tape, [edge for edge, rows in given if rows], [edge for edge, rows in given if not rows])
        self._forwards = [*self._forwards[-MOST + 1 :], forward]
        passed = partial(_passed, weakref.ref(self), weakref.ref(forward))  # weakly: the graph holds its hooks
        for edge in tape.edges:
            edge.node.register_prehook(passed)
        return output

    def passed(self, forward: Forward) -> None:
        """A backward came through a taped forward. One that records itself, for a gradient of the gradient, would lose
        what that owes to the parameters: they were not there."""
        forward.used = True
        self._twice |= torch.is_grad_enabled()


def _passed(recorder: "weakref.ref[Recorder]", forward: "weakref.ref[Forward]", _: Any) -> None:
    mine, its = recorder(), forward()
    if mine is not None and its is not None:
        mine.passed(its)


class _Hook:
    """A recorder's hook on its own model. Copied or saved with the model, it does nothing."""

    ours = True

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return None if self._call is None else self._call(*args)

    def __reduce__(self) -> tuple[type["_Hook"], tuple[()]]:
        return _Hook, ()


def tensors_of(output: Any, depth: int = 8) -> Iterator[Tensor]:
    """The tensors in what a model returned: containers, dataclasses and namespaces are looked into."""
    if isinstance(output, Tensor):
        yield output
    elif depth and isinstance(output, Mapping):
        for value in output.values():
            yield from tensors_of(value, depth - 1)
    elif depth and isinstance(output, list | tuple):
        for value in output:
            yield from tensors_of(value, depth - 1)
    elif depth and not isinstance(output, type | nn.Module):
        slots = [name for made in type(output).__mro__ for name in getattr(made, "__slots__", ())]
        held = {name: getattr(output, name) for name in slots if hasattr(output, name)}
        yield from tensors_of({**held, **getattr(output, "__dict__", {})}, depth - 1)


def _has(t: Any, count: int) -> bool:
    """Whether it is a tensor of so many rows."""
    return isinstance(t, Tensor) and t.ndim > 0 and len(t) == count


def _projected(output: Any, samples: int, each: int = 1) -> Tensor:
    """One number per sample of a model's outputs, in which every entry that is finite counts, the larger the less; what
    has no rows does not. Counts and flags do: a loss may be divided by them."""
    rows = [t for t in tensors_of(output) if _has(t, samples * each) and not t.is_complex()]
    total = torch.zeros(samples, dtype=torch.float32, device=rows[0].device if rows else None)
    for t in rows:
        flat = t.reshape(samples, -1)
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))
        wide = torch.asinh(wide.where(torch.isfinite(wide), 0.0))  # masked logits hide nothing, nor do huge values
        weights = torch.cos(torch.arange(flat.shape[1], device=flat.device, dtype=wide.dtype))
        total = total + (wide * weights).sum(1)
    return total


def _astray() -> RuntimeError:
    return RuntimeError(
        "These losses do not come from a forward of the model on a batch that was drawn. Compute them as "
        "loss(model(batch), ...) on all rows of the batch, with gradients enabled, then call "
        "private.backward(losses)."
    )
