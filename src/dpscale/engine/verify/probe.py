"""Runs of a model on a few rows that can be compared: by their losses, or operation by operation.

Dropout is left out: what it does to rows is looked at in the whole batch. Where a model draws other random numbers, two
runs of it draw the same, however many rows each has: the generators are seeded anew for each operation that draws, and
a row alone is given its own part of what was drawn for the whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from dpscale.engine.compat import tree_leaves
from dpscale.engine.tape.tape import (
    LEAVES,
    OpName,
    ParameterOps,
    Role,
    Site,
    Sites,
    Tape,
    TapedOp,
    as_now,
    asks,
    flattened,
    result,
    tensors_in,
    tensors_of,
)
from dpscale.engine.verify.randomness import host_states, seed_torch, torch_seeds, torch_states

Shapes = tuple[torch.Size, ...]

Draws = tuple[Mapping[int, Tensor], Sequence[int], int]

_DROPOUT = {f"{name}dropout{end}" for name in ("", "alpha_", "feature_", "feature_alpha_") for end in ("", "_")}


class Undropped(ParameterOps):
    """A forward without dropout, and nothing else: the cheapest run whose losses can be compared."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs, _ = _without_hidden_dropout(self, func, args, kwargs or {})
        inside = self.enter(func, args)
        return _undropped(func, args, kwargs) if inside is None else inside(*args, **kwargs)


class UndroppedTape(Tape):
    """A tape of a forward without dropout."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs, _ = _without_hidden_dropout(self, func, args, kwargs or {})
        inside = self.enter(func, args)
        if inside is not None:
            return inside(*args, **kwargs)
        return super().__torch_function__(func, types, args, kwargs)

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tape it; dropout on a parameter drops nothing."""
        _drops(self, func, args, kwargs)
        return super().meet(func, *_dropping_nothing(func, args, kwargs))

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it; dropout is left out."""
        _drops(self, func, args, kwargs)
        return _undropped(func, args, kwargs)


class Mask(NamedTuple):
    """What a dropout multiplied by: how it was called, at which random state; and the state after."""

    call: Any
    before: Tensor
    mask: Tensor
    after: Tensor


class DroppingTape(Tape):
    """A tape with dropout, whose masks other runs can take that begin at the same random numbers: to draw them anew
    takes as long as all else of a small forward.

    On the CPU a dropout is a product with a mask. What it gives, and the random numbers after it, are the same to the
    bit either way.

    Args:
        masks: of another run, in their order. One is taken where the call, its shapes and the random state are the same
            too; otherwise it is drawn.
    """

    def __init__(self, *args: Any, masks: Sequence[Mask] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.masks: list[Mask] = []
        self._given = masks

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        inside = self.enter(func, args) if func in _WRITTEN_IN_PYTHON else None
        if inside is not None:
            return inside(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it; of a dropout keep the mask, or take the one that is given."""
        name = getattr(func, "__name__", "")
        _without_hidden_dropout(self, func, args, kwargs)  # which is noted
        drops = _drops(self, func, args, kwargs)
        if name not in _MASKING or not args or not drops or not _in_memory(x := args[0]):
            return super().pass_by(func, args, kwargs)
        call, before = (name, args[1:], kwargs, x.shape, x.stride(), x.dtype), torch.default_generator.get_state()
        known = self._given[len(self.masks)] if len(self.masks) < len(self._given) else None
        if known is not None and known.call == call and torch.equal(known.before, before):
            torch.default_generator.set_state(known.after)
        else:
            mask = func(torch.ones_like(x), *args[1:], **kwargs)
            known = Mask(call, before, mask, torch.default_generator.get_state())
        self.masks.append(known)
        return x.mul_(known.mask) if name.endswith("_") else x * known.mask

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tape it."""
        _drops(self, func, args, kwargs)
        return super().meet(func, args, kwargs)


_WRITTEN_IN_PYTHON = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
_MASKING = {"dropout", "dropout_", "feature_dropout", "feature_dropout_"}


def masks_of(tape: Tape | None) -> Sequence[Mask]:
    """What its dropouts multiplied by, as far as that was kept."""
    return tape.masks if isinstance(tape, DroppingTape) else ()


def _in_memory(t: Tensor) -> bool:
    """Whether it is a plain tensor in the memory of the host: none of torch.vmap's, nor one that stands for others."""
    if type(t) not in (Tensor, torch.nn.Parameter) or t.device.type != "cpu":
        return False
    try:
        return bool(t.data_ptr())
    except RuntimeError:
        return False


def _takes_tf32(func: Callable[..., Any]) -> bool:
    """Whether an operation on a GPU may be computed with fewer digits than its numbers have."""
    convolves = "conv" in getattr(func, "__name__", "")
    return torch.backends.cudnn.allow_tf32 if convolves else torch.get_float32_matmul_precision() != "highest"


def _undropped(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an operation; a dropout gives what it was given, in memory of its own, which may be written to."""
    name = getattr(func, "__name__", "")
    if name in _DROPOUT:
        in_place = name.endswith("_") or kwargs.get("inplace", args[3] if len(args) > 3 else False)
        return args[0] if in_place else args[0].clone()
    if name in ("rrelu", "rrelu_"):  # draws for some entries only: its mean slope in its place
        return torch.nn.functional.leaky_relu(args[0], 11 / 48)
    return func(*args, **kwargs)


def _dropping_nothing(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A dropout that drops nothing, for one on a parameter: what it gives is still a function of that."""
    if getattr(func, "__name__", "") not in _DROPOUT:
        return args, kwargs
    return (args[0], 0.0, *args[2:]), {name: value for name, value in kwargs.items() if name != "p"}


def _drops(mode: ParameterOps, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a dropout would drop anything; what it was asked for is noted."""
    name = getattr(func, "__name__", "")
    if name not in _DROPOUT:
        return False
    p, train = (*args[1:3], *(kwargs.get(key, True) for key in ("p", "train")[len(args[1:3]) :]))
    mode.dropouts.append((name.rstrip("_"), float(p), bool(train)))
    return bool(train) and bool(p)


def _numbers(values: Iterable[Any]) -> list[float]:
    """What an operation is asked to draw by; whole numbers are sizes."""
    return [value for value in values if type(value) is float]


def drop_alike(ours: ParameterOps, theirs: ParameterOps) -> bool:
    """Whether two runs asked for the same dropouts, as far as both have seen the same ones."""
    return len(ours.dropouts) != len(theirs.dropouts) or ours.dropouts == theirs.dropouts


class DrewUnseen(Exception):
    """A run that was thought to draw nothing has drawn random numbers."""


@dataclass(frozen=True)
class RanOp:
    """Any operation that ran: the shapes that went in and came out."""

    function: Callable[..., Any]
    inputs: Shapes
    outputs: Shapes


class Numbered(ParameterOps):
    """Counts the operations of a forward, and seeds each that draws by its number.

    Args:
        seed: of the run; operations draw alike in runs of the same seed. None: nothing draws, which saves to look
            after every operation; `DrewUnseen` is raised at the end if something did.
        draws: random numbers of another run, by their number, which of its rows this run has, and how many it has.
        keep: hold what every operation gave, to find out where samples meet.
    """

    def __init__(self, seed: int | None, *, draws: Draws | None = None, keep: bool = False) -> None:
        super().__init__()
        self._number(seed, draws, keep)

    def _number(self, seed: int | None, draws: Any = None, keep: bool = False) -> None:
        self.ran: list[RanOp] = []
        self.draws: dict[int, Tensor] = {}
        self.draws_freely = False  # whether anything but dropout drew: a branch may ask for it
        self.drops = False  # whether a dropout was left out
        self.unmatched = False  # whether random numbers could not be given to the row that they were drawn for
        self.drew_on_host = False  # whether Python's generator or numpy's was drawn from, which knows nothing of rows
        self.seeds: list[list[int]] = []  # that the forward itself started torch's generators from
        self.outputs: list[list[Tensor]] = []
        self.eps = 2.0**-52  # of the coarsest numbers that it computes with
        self._drew = 0
        self._start: Any = None
        self._seeded: list[int] = []  # what torch's generators were last seen to have started from
        self._given: Draws | None = draws
        self._seed, self._keep = seed, keep

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if asks(func, args):
            return func(*args, **kwargs)
        inside = self.enter(func, args)
        if inside is not None:
            return inside(*args, **kwargs)
        index = len(self.ran)
        inputs = _shapes((*args, *kwargs.values()))
        args, kwargs, hidden = _without_hidden_dropout(self, func, args, kwargs)
        self.ran.append(RanOp(func, inputs, ()))
        before = None
        if self._seed is not None:
            self._note_seeds()
            seed_torch(self._seed + self._drew)
            self._seeded, before = torch_seeds(), torch_states()
        met = bool(self.keys) and self.consumes((*args, *kwargs.values()))
        out = (self.meet if met else self.pass_by)(func, args, kwargs)
        made = result(func, args, out)
        drew = before is not None and torch_states() != before
        self.drops |= hidden
        if met and (hidden or drew):
            self.drawn_inside()
        if drew:
            self.dropouts.append((getattr(func, "__name__", ""), *_numbers((*args, *kwargs.values()))))
            made = out = self._drawn(made, out)
            self._drew += 1
            self.draws_freely = True
        self.ran[index] = RanOp(func, inputs, _shapes((made,)))
        self._note_precision(func, made)
        if self._keep:
            self.outputs.append([t.detach().clone() for t in tree_leaves(made) if isinstance(t, Tensor)])
        return out

    def __enter__(self) -> Self:
        if not self._entered:
            self._start = host_states(), None if self._seed is not None else torch_states()
            self._seeded = torch_seeds()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        if not self._entered and error[0] is None:
            host, torchs = self._start
            self.drew_on_host |= host_states() != host
            self.unmatched |= self.drew_on_host
            if torchs is not None and torch_states() != torchs:
                raise DrewUnseen
            self._note_seeds()

    def _note_seeds(self) -> None:
        """Of the forward's own, since the operation before."""
        if (now := torch_seeds()) != self._seeded:
            self.seeds.append(now)

    def _note_precision(self, func: Callable[..., Any], made: Any) -> None:
        if isinstance(made, Tensor) and made.is_floating_point():
            tf32 = made.is_cuda and made.dtype == torch.float32 and _takes_tf32(func)
            self.eps = max(self.eps, 2.0**-10 if tf32 else torch.finfo(made.dtype).eps)

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """As any other."""
        return self.pass_by(func, args, kwargs)

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it; dropout is left out."""
        self.drops |= _drops(self, func, args, kwargs)
        return _undropped(func, args, kwargs)

    def drawn_inside(self) -> None:
        """An operation that consumes parameters draws: run again, it would draw something else."""

    def _drawn(self, made: Any, out: Any) -> Any:
        """What an operation drew, or that of the other run."""
        if not isinstance(made, Tensor):
            self.unmatched = True
            return out
        mine = self._own_part(made.detach())
        if mine is made or mine.data_ptr() == made.data_ptr():
            return out
        if made.requires_grad:
            made.data.copy_(mine)  # what it was drawn by keeps its part in the graph
            return out
        return made.copy_(mine)

    def _own_part(self, drawn: Tensor) -> Tensor:
        """Note what was drawn; where another run's is given, take the part of that which is this row's."""
        self.draws[self._drew] = drawn.clone()
        if self._given is None:
            return drawn
        draws, rows, count = self._given
        other: Tensor | None = draws.get(self._drew)
        if other is None or other.ndim != drawn.ndim:
            self.unmatched = True
            return drawn
        longer = [d for d in range(drawn.ndim) if other.shape[d] != drawn.shape[d]]
        if not longer:
            return other
        d = longer[0]
        each, rest = divmod(drawn.shape[d], len(rows))
        if len(longer) > 1 or rest or other.shape[d] != count * each:
            self.unmatched = True
            return drawn
        places = [row * each + k for row in rows for k in range(each)]
        return other.index_select(d, torch.tensor(places, device=other.device))


def _without_hidden_dropout(
    mode: ParameterOps, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], bool]:
    """A call without the dropout of attention, whose mask cannot be seen; and whether there was any, which is noted."""
    if getattr(func, "__name__", "") != "scaled_dot_product_attention":
        return args, kwargs, False
    p = args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)
    mode.dropouts.append(("attention", float(p), True))
    args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
    return args, {k: 0.0 if k == "dropout_p" else v for k, v in kwargs.items()}, p > 0


class Probe(Numbered, Tape):
    """A numbered forward that is taped, with plain autograd's gradients beside the tape's.

    Args:
        parameters: the trainable parameters, by name.
        samples: rows of the batch.
        growth: what has a row for each sample among the inputs and outputs of each operation, by its number.
        like: another probe, whose operations are known by name; in place of ``growth``.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], samples: int, seed: int | None, growth: "Growth | None" = None,
        like: "Probe | None" = None,
    ) -> None:  # fmt: skip
        Tape.__init__(self, parameters, None, Sites(), samples, attached=True)
        self._number(seed)
        self._growth = growth
        self._like = {call.name_of: call for call in like.calls} if like else {}
        self.calls: list[ProbedCall] = []

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Tape it; dropout on a parameter drops nothing."""
        self.drops |= _drops(self, func, args, kwargs)
        return Tape.meet(self, func, *_dropping_nothing(func, args, kwargs))

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        return Numbered.pass_by(self, func, args, kwargs)

    def place(self, calls: Sequence["ProbedCall"], sites: Sequence[Site]) -> None:
        """Say where the samples are in the operations, as for those calls: from now on it has gradients of samples."""
        site_of = {call.name_of: site for call, site in zip(calls, sites, strict=True)}
        placed = [(call, call.taped, site_of[call.name_of]) for call in self.calls if call.name_of in site_of]
        self.ops = [
            replace(taped, site=site, function=(site.rule is None and call.again) or call.op.function)
            for call, taped, site in placed
            if taped is not None and site.role in ("rows", "expanded")
        ]

    def drawn_inside(self) -> None:
        """Note it."""
        if self.calls:
            self.calls[-1].draws = True

    def find(self, op: OpName, standing: list[Any], keys: dict[int, str]) -> Site:
        """By what grows with the batch, or as another probe had it."""
        index = len(self.ran) - 1
        role: Role = "shared"
        growing: set[int] = set()
        if self._growth is None:
            known = self._like.get((op.exact, op.ordinal))
            self.lost |= known is None
            if known is not None:
                role, growing = known.role, known.growing
        elif not self._growth.knows(index, op.function):
            self.lost = True
        else:
            inputs = [k for k, t in enumerate(standing) if isinstance(t, Tensor)]
            grow = self._growth.inputs(index)
            growing = {k for k, grows in zip(inputs, grow, strict=False) if grows and k not in keys}
            if self._growth.output(index):
                role = "rows" if growing else "expanded"
        constants = [t.detach() for t in self.constants(standing, keys)] if role == "shared" else []
        self.calls.append(ProbedCall(op, index, role, growing, constants))
        return Site(role)

    def tape(
        self, func: Callable[..., Any], site: Site, args: tuple[Any, ...], kwargs: dict[str, Any],
        keys: dict[int, str], out: Any,
    ) -> None:  # fmt: skip
        """Note every differentiable output; where the samples are in it is found out later."""
        call = self.calls[-1]
        call.inputs = [t.detach() if isinstance(t, Tensor) else t for t in flattened(args, kwargs)[0]]
        call.outputs = tensors_of(out)
        call.edges = {k: get_gradient_edge(t) for k, t in enumerate(call.outputs) if t.requires_grad}
        call.outputs = [t.detach() for t in call.outputs]
        if not call.edges:
            call.role = "plain"
            return
        call.again = as_now(func, tensors_in(args, kwargs)) if site.role == "rows" else func
        call.taped = TapedOp(func, site, args, kwargs, keys, call.edges, [])


@dataclass
class ProbedCall:
    """One operation of a probe that consumes parameters."""

    op: OpName
    index: int
    role: Role
    growing: set[int]  # positions of inputs that have a row for each sample
    constants: Sequence[Tensor] = ()  # of a shared one, all other inputs
    inputs: Sequence[Any] = ()
    outputs: Sequence[Tensor] = ()
    edges: Mapping[int, GradientEdge] = field(default_factory=dict)
    again: Callable[..., Any] | None = None
    taped: TapedOp | None = None
    draws: bool = False

    @property
    def name(self) -> str:
        """For messages."""
        return f"{getattr(self.op.function, '__name__', '?')} (parameter {self.op.names[0]!r})"

    @property
    def name_of(self) -> tuple[Any, int]:
        """By which it is known in other runs."""
        return self.op.exact, self.op.ordinal

    @property
    def complex(self) -> bool:
        """Whether anything in it is."""
        return any(isinstance(t, Tensor) and t.is_complex() for t in (*self.inputs, *self.outputs))


class Growth:
    """What has a row for each sample: two runs of one forward on different numbers of rows, compared by shapes."""

    def __init__(self, few: Sequence[RanOp], more: Sequence[RanOp]) -> None:
        self._few, self._more = few, more

    @property
    def aligned(self) -> bool:
        """Whether both ran the same operations."""
        return [op.function for op in self._few] == [op.function for op in self._more] and all(
            len(a.outputs) == len(b.outputs) for a, b in zip(self._few, self._more, strict=True)
        )

    def knows(self, index: int, function: Callable[..., Any]) -> bool:
        """Whether this was the operation of that number."""
        return index < len(self._more) and self._more[index].function == function and index < len(self._few)

    def inputs(self, index: int) -> list[bool]:
        """By input tensor."""
        few, more = self._few[index].inputs, self._more[index].inputs
        return [a != b for a, b in zip(few, more, strict=False)]

    def output(self, index: int) -> bool:
        """Whether any grows."""
        return self._few[index].outputs != self._more[index].outputs

    def of_output(self, index: int, output: int) -> tuple[torch.Size, torch.Size]:
        """The shapes of an output on more and on fewer rows."""
        return self._more[index].outputs[output], self._few[index].outputs[output]

    def of_input(self, index: int, tensor: int) -> tuple[torch.Size, torch.Size]:
        """The shapes of an input on more and on fewer rows."""
        return self._more[index].inputs[tensor], self._few[index].inputs[tensor]


def _shapes(values: Iterable[Any]) -> Shapes:
    """Of the tensors among some values, containers included."""
    found: list[torch.Size] = []
    for value in values:
        if isinstance(value, Tensor):
            found.append(value.shape)
        elif type(value) not in LEAVES:
            found += [t.shape for t in flattened((value,), {})[0] if isinstance(t, Tensor)]
    return tuple(found)
