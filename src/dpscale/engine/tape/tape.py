"""Meets every operation that consumes a trainable parameter, whatever module (or none) called it.

`ParameterOps` is a torch-function mode: it sees each call of a torch operation before it runs. A composite written in
Python (`layer_norm`, `multi_head_attention_forward`) is entered, so that what is met are the few operations underneath.

`Tape` runs the forward with every parameter detached, so that the backward computes no parameter gradients, and notes
for each met operation its inputs and the edge of the autograd graph at its output. The gradient that later arrives at
that edge is all a rule needs. Nothing is hung on parameters, and no hook depends on the order of anything.
"""

import hashlib
import re
import sys
import types
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, NamedTuple, Self

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from dpscale.engine.compat import CHECKPOINT_GENERATOR, tree_flatten, tree_unflatten, version
from dpscale.engine.errors import SECOND, UnsupportedModel
from dpscale.engine.layout import Layout
from dpscale.engine.rules import Rule
from dpscale.engine.rules.derivation import Derived
from dpscale.engine.tape import channels
from dpscale.engine.tape.composites import COMPOSITES, packed

_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)
_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__init__"}

Function = Callable[..., Any]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]
Role = Literal["rows", "expanded", "shared", "plain"]


class UnknownOperation(Exception):
    """The forward met an operation that no look has seen; look again."""


@dataclass(frozen=True)
class Site:
    """What a look found out about one operation that consumes parameters.

    Attributes:
        role: ``rows``: its output carries the batch, and parameters meet data here;
            ``expanded``: no data is in it, but it repeats a parameter once per sample;
            ``shared``: a function of parameters alone, which later operations consume as if it were one;
            ``plain``: nothing to differentiate (a shape, a comparison).
        rule: how to form per-sample gradients; None for the generic rule.
        layouts: where the samples are, of differentiable outputs ("out0", …) and of arguments (by the rule's names,
            or "0", "1", …).
        constants: of a shared one, the shapes that its other arguments were seen to have. With other shapes they may be
            data that were not there before: rows that are routed to a layer which got none.
    """

    role: Role
    rule: Rule | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    constants: frozenset[Any] = field(default=frozenset(), compare=False)

    def joined(self, known: "Site | None") -> "Site":
        """With the constants that another look has seen."""
        return replace(self, constants=self.constants | known.constants) if known == self and known else self


class OpName(NamedTuple):
    """One operation that consumes parameters: the function, the parameters, and the how-manieth such call it is.

    Layers that are built alike (``blocks.3.fc`` and ``blocks.4.fc``) have the same ``family``: one that was dropped at
    random when a model was looked at is known by the others.
    """

    function: Function
    names: tuple[str, ...]
    shape: Any
    ordinal: int

    @property
    def exact(self) -> tuple[Any, ...]:
        """By the names of the parameters, and by how many dimensions the arguments have."""
        return self.function, self.names, self.shape

    @property
    def family(self) -> tuple[Any, ...]:
        """The same by those names without their numbers."""
        return self.function, tuple(_without_numbers(name) for name in self.names), self.shape


@cache
def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "#", name)


_LONGEST = 500
_LETTERS = str.maketrans("0123456789", "ghijklmnop")  # so that nothing of it is taken for the number of a layer


def _short(name: str) -> str:
    """The same name, or one that stands for it: names of functions of functions grow beyond all bounds."""
    if len(name) <= _LONGEST:
        return name
    return f"{name[:80]}…{hashlib.sha256(name.encode()).hexdigest().translate(_LETTERS)}"


Shared = tuple[OpName, list[Tensor]]
"""A function of parameters alone, and the other tensors in it."""


class Sites:
    """What is known of the operations of a model, each by its `OpName`."""

    def __init__(self) -> None:
        self._exact: dict[tuple[Any, ...], dict[int, Site]] = {}
        self._family: dict[tuple[Any, ...], dict[int, Site | None]] = {}

    def add(self, op: OpName, site: Site) -> None:
        """A family whose members differ is not known by its other members."""
        exact = self._exact.setdefault(op.exact, {})
        exact[op.ordinal] = site.joined(exact.get(op.ordinal))
        family = self._family.setdefault(op.family, {})
        known = family.get(op.ordinal, site)
        family[op.ordinal] = site.joined(known) if known == site else None

    def find(self, op: OpName) -> Site:
        """Of this operation, or of others that are built alike; a loop may go on for longer than it was seen to."""
        exact = self._exact.get(op.exact)
        if exact is not None and op.ordinal in exact:
            return exact[op.ordinal]
        calls: Mapping[int, Site | None] = exact or self._family.get(op.family, {})
        first, *others = [calls[op.ordinal]] if op.ordinal in calls else calls.values() or [None]
        if first is None or any(other != first for other in others):
            raise UnknownOperation
        return first


@dataclass(frozen=True)
class TapedOp:
    """One operation as it ran: what a rule needs once the output gradients are known."""

    function: Function
    site: Site
    args: Args
    kwargs: Kwargs
    keys: dict[int, str]
    edges: dict[int, GradientEdge]
    versions: list[tuple[Tensor, int]]


# -- Calls ----------------------------------------------------------------------------------------------------------


def tensors_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """The tensors among a call's arguments, one level of lists deep (cat, lstm, einsum)."""
    for value in (*args, *kwargs.values()):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, Tensor):
                yield item


LEAVES = {Tensor, torch.nn.Parameter, int, float, bool, complex, str, type(None), torch.dtype, torch.device}


def flattened(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], Any]:
    """As `tree_flatten((args, kwargs))`, faster where plain values stand in it, and tuples and lists of those."""
    leaves: list[Any] = []
    held: list[tuple[type, int] | None] = []
    for value in (*args, *kwargs.values()):
        made = type(value)
        if made in LEAVES:
            leaves.append(value)
            held.append(None)
        elif made in (tuple, list) and LEAVES.issuperset(map(type, value)):
            leaves += value
            held.append((made, len(value)))
        else:
            return tree_flatten((args, kwargs))
    return leaves, (held, tuple(kwargs))


def rebuilt(leaves: Sequence[Any], spec: Any) -> tuple[Args, Kwargs]:
    """The call again, with these in place of the leaves that `flattened` gave with ``spec``."""
    if not isinstance(spec, tuple):
        args, kwargs = tree_unflatten(list(leaves), spec)
        return args, kwargs
    (held, names), values, k = spec, [], 0
    for each in held:
        made, size = each or (None, 1)
        values.append(leaves[k] if made is None else made(leaves[k : k + size]))
        k += size
    count = len(values) - len(names)
    return tuple(values[:count]), dict(zip(names, values[count:], strict=True))


def tensors_of(out: Any) -> list[Tensor]:
    """The tensors that an operation returned."""
    return [out] if isinstance(out, Tensor) else [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]


def in_place(func: Function) -> bool:
    """Whether an operation writes its first argument: `add_`, `__iadd__`, `__setitem__`."""
    name = getattr(func, "__name__", "")
    if name.endswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


def out_of_place(func: Function) -> Function:
    """The twin of an in-place operation that leaves its first argument alone; any other operation is its own."""
    if not in_place(func):
        return func
    name = func.__name__
    twin = getattr(torch.Tensor, f"__{name[3:]}" if name.startswith("__i") else name[:-1], None)
    if twin is not None:
        return twin  # type: ignore[no-any-return]

    def on_a_copy(t: Tensor, *args: Any, **kwargs: Any) -> Tensor:  # copy_, __setitem__
        t = t.clone()
        func(t, *args, **kwargs)
        return t

    return on_a_copy


def result(func: Function, args: Args, out: Any) -> Any:
    """What an operation made: what it returned, or what it wrote where it returns nothing (``x[i] = w``)."""
    return args[0] if out is None and in_place(func) else out


def as_now(func: Function, tensors: Iterable[Tensor]) -> Function:
    """The operation, not in place, as a function that runs under the autocast that is in force now."""
    twin = out_of_place(func)
    states = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in {t.device.type for t in tensors}]

    def run(*args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for device, enabled, dtype in states:  # without the cache, which would outlive tensors of vmap
                stack.enter_context(torch.autocast(device, dtype, enabled, cache_enabled=False))
            return twin(*args, **kwargs)

    run.__name__ = getattr(twin, "__name__", "?")
    return run


def shapes_of(tensors: Sequence[Tensor]) -> tuple[torch.Size, ...]:
    """Of each."""
    return tuple([t.shape for t in tensors])


# -- Activation checkpointing ----------------------------------------------------------------------------------------
#
# A checkpointed region runs again during the backward, where no mode watches it: its operations would consume the
# parameters themselves, and nothing that was taped would belong to the graph. While a forward is watched, such regions
# therefore run plainly. The numbers are the same, random ones included; the memory is not saved. `checkpoint` may have
# been imported anywhere by name, so it stays, and the two things it calls are exchanged.


def _region(
    fn: Function, preserve_rng_state: bool = True, context_fn: Any = None, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Stands where torch prepares a recomputation (use_reentrant=False): before and after the region's forward."""
    with nullcontext() if context_fn is None else context_fn()[0]:
        yield


class _Reentrant:
    """Stands where torch runs a region that it will run again (use_reentrant=True)."""

    @staticmethod
    def apply(run: Function, preserve_rng_state: bool, *args: Any) -> Any:
        return run(*args)


_exchanged: dict[str, Any] = {CHECKPOINT_GENERATOR: _region, "CheckpointFunction": _Reentrant}


class Watched:
    """How many modes of ours watch the forwards that run now; a recorder then keeps out of the way."""

    count = 0
    _stance: Any = None

    @classmethod
    def add(cls, more: int) -> None:
        """With the first one, checkpointed regions and compiled parts begin to run plainly; with the last one they end
        to."""
        if cls.count == 0 or cls.count + more == 0:
            for name, other in _exchanged.items():
                _exchanged[name] = getattr(torch_checkpoint, name)
                setattr(torch_checkpoint, name, other)
            if cls._stance is not None:
                cls._stance.__exit__(None, None, None)
            begins = cls.count == 0 and "torch._dynamo" in sys.modules  # which is slow to import: nothing is compiled
            cls._stance = torch.compiler.set_stance("force_eager") if begins else None
        cls.count += more


@contextmanager
def unrecorded() -> Iterator[None]:
    """Forwards in here are nobody's own: a recorder keeps out of the way."""
    Watched.add(1)
    try:
        yield
    finally:
        Watched.add(-1)


# -- Modes -----------------------------------------------------------------------------------------------------------


_QUESTIONS = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.stride, Tensor.__len__, Tensor.is_floating_point}


def asks(func: Function, args: Args) -> bool:
    """Whether a call only asks for a property of a tensor, such as ``x.shape``; ``x.T`` is an operation."""
    if func in _QUESTIONS:
        return True
    return getattr(func, "__name__", "") == "__get__" and not isinstance(func(*args), Tensor)


class ParameterOps(TorchFunctionMode):
    """Finds the calls that consume a tensor of ``keys`` (id -> name) and hands them to ``meet``."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, str] = {}
        self.dropouts: list[tuple[Any, ...]] = []  # and other draws, as they were asked for, where a mode notes them
        self._entered: list[Function] = []

    def __enter__(self) -> Self:
        Watched.add(1)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        Watched.add(-1)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Function, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("create_graph") and func in _BACKWARDS:
            raise UnsupportedModel(SECOND)
        if not self.consumes((*args, *kwargs.values()) if kwargs else args) or asks(func, args):
            return self.pass_by(func, args, kwargs)
        inside = self.enter(func, args)
        return self.meet(func, args, kwargs) if inside is None else inside(*args, **kwargs)

    def consumes(self, values: Args) -> bool:
        """Whether a tensor of ``keys`` is among them, one level of lists deep. All of those are alive, and so are their
        ids."""
        for value in values:
            if id(value) in self.keys:
                return True
            if isinstance(value, (list, tuple)) and not self.keys.keys().isdisjoint(map(id, value)):
                return True
        return False

    def enter(self, func: Function, args: Args) -> Function | None:
        """As `enter`, watched; but not one that hands itself over a second time."""
        inside = enter(func)
        if inside is None or func in self._entered or (func in COMPOSITES and packed(func, args)):
            return None

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._entered.append(func)
            try:
                with self:
                    return inside(*args, **kwargs)
            finally:
                self._entered.pop()

        return watched

    def pass_by(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """An operation that consumes no parameter."""
        return func(*args, **kwargs)

    def meet(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """An operation that does."""
        raise NotImplementedError


class Tape(ParameterOps):
    """Runs a forward at ``values`` and tapes what the parameters met.

    Args:
        parameters: the trainable parameters, by name.
        values: what to take in their place (a released point), or None for what they hold.
        sites: what is known of the model's operations.
        samples: B.
        attached: let gradients pass on to the leaves that stand in for the parameters, so that plain autograd can be
            asked too. Slower: for a look.
        lenient: run through what is not known, and say afterwards that this tape is ``lost``.
        shared: where to put what is in functions of parameters alone beside them, whatever its shape: whoever gives it
            decides whether it is the same for all batches.
    """

    def __init__(
        self, parameters: Mapping[str, Tensor], values: Mapping[str, Tensor] | None, sites: Sites, samples: int,
        attached: bool = False, lenient: bool = False, shared: "list[Shared] | None" = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.lost = False
        self._shared = shared
        # Leaves stand in for the parameters. Gradients reach them only through functions of parameters alone.
        self.leaves = {n: (values or parameters)[n].detach().requires_grad_() for n in parameters}
        self.keys = {id(p): n for n, p in parameters.items()}
        self.stand_in: dict[int, Tensor] = {id(p): self.leaves[n] for n, p in parameters.items()}
        self.derived: dict[str, Derived] = {}
        self.ops: list[TapedOp] = []
        self.samples = samples
        self._sites, self._attached, self._lenient = sites, attached, lenient
        self._anchor = torch.zeros((), requires_grad=True)
        self._channels_last = channels.LAST.get()
        self._calls: Counter[Any] = Counter()
        self._made: Counter[str] = Counter()

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return next(iter(self.leaves.values())).device

    @property
    def edges(self) -> list[GradientEdge]:
        """Where a backward must deliver gradients."""
        return [edge for op in self.ops for edge in op.edges.values()]

    def meet(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run on stand-ins and tape, or build a function of parameters alone, as the site of the operation says."""
        flat, spec = flattened(args, kwargs)
        standing = [self.stand_in.get(id(t), t) if isinstance(t, Tensor) else t for t in flat]
        if not torch.is_grad_enabled():
            args, kwargs = rebuilt(standing, spec)
            return func(*args, **kwargs)
        keys = {k: self.keys[id(t)] for k, t in enumerate(flat) if isinstance(t, Tensor) and id(t) in self.keys}
        name = func, tuple(keys.values()), tuple([t.ndim if isinstance(t, Tensor) else None for t in flat])
        op = OpName(*name, self._calls[name])
        self._calls[name] += 1
        site = self.find(op, standing, keys)
        if site.role == "rows":
            return self.combine(op, site, standing, spec, keys)
        args, kwargs = rebuilt(standing, spec)
        if site.role == "expanded":
            return self.expand(op, site, args, kwargs, keys)
        out = func(*args, **kwargs)
        if site.role == "shared":
            self.derive(op, func, args, kwargs, keys, result(func, args, out))
        return out

    def find(self, op: OpName, standing: list[Any], keys: dict[int, str]) -> Site:
        """What is known of the operation."""
        try:
            site = self._sites.find(op)
        except UnknownOperation:
            self._lose()
            return Site("plain")
        if site.role == "shared":
            constants = self.constants(standing, keys)
            if self._shared is not None:
                self._shared.append((op, constants))
            elif shapes_of(constants) not in site.constants:
                self._lose()
        return site

    @staticmethod
    def constants(leaves: Sequence[Any], keys: Mapping[int, str]) -> list[Tensor]:
        """The tensors among a call's arguments that are no function of parameters."""
        return [t for k, t in enumerate(leaves) if k not in keys and isinstance(t, Tensor)]

    def _lose(self) -> None:
        if not self._lenient:
            raise UnknownOperation
        self.lost = True

    def expand(self, op: OpName, site: Site, args: Args, kwargs: Kwargs, keys: dict[int, str]) -> Any:
        """Repeat a parameter once per sample; what comes of it is data."""
        run = out_of_place(op.function)
        whole = run(*args, **kwargs)
        key = self.derive(op, run, args, kwargs, keys, whole, met=False)
        out = whole.view_as(whole) if self._attached else self._sourced(lambda: whole.detach())
        self.tape(op.function, site, (whole,), {}, {0: key}, out)
        return args[0].copy_(out) if in_place(op.function) else out

    def combine(self, op: OpName, site: Site, standing: list[Any], spec: Any, keys: dict[int, str]) -> Any:
        """Run an operation of parameters and data, and tape it."""
        if not self._attached:
            standing = [t.detach() if k in keys else t for k, t in enumerate(standing)]
        args, kwargs = rebuilt(standing, spec)
        func, into = op.function, args[0] if in_place(op.function) else None
        if into is not None:
            # Run on a copy and write the result back: what is taped is then neither changed later, nor a view, whose
            # own edge no gradient reaches once the tensor that it is a view of is used.
            func, args = out_of_place(func), (into.clone(), *args[1:])
        run = func
        if self._channels_last:
            run, args = channels.before(func, args)
        if any(isinstance(t, Tensor) and t.requires_grad for t in standing):
            out = run(*args, **kwargs)
        else:
            out = self._sourced(lambda: run(*args, **kwargs))
        self.tape(op.function, site, args, kwargs, keys, out)
        if into is not None:
            return into.copy_(out)
        return channels.after(func, args, out) if self._channels_last else out

    def pass_by(self, func: Function, args: Args, kwargs: Kwargs) -> Any:
        """Run it as it is."""
        return channels.between(func, args, kwargs) if self._channels_last else func(*args, **kwargs)

    def derive(
        self, op: OpName, func: Function, args: Args, kwargs: Kwargs, keys: dict[int, str], out: Any, met: bool = True
    ) -> str:
        """Record a function of parameters; with ``met``, later operations on it are met as on a parameter."""
        key = ""
        name = _short(f"{getattr(op.function, '__name__', '?')}({', '.join(op.names)})")
        self._made[name] += 1  # not the ordinal: ``w[0]`` and ``w[..., 1]``, ``w.t()`` and ``torch.t(w)`` share a name
        for k, t in enumerate(tree_flatten(out)[0]):
            if isinstance(t, Tensor) and t.requires_grad:
                key = f"{name}#{self._made[name] - 1}.{k}"
                self.derived[key] = Derived(t, func, args, kwargs, keys, k, version(t))
                if met:
                    self.keys[id(t)] = key
                    self.stand_in[id(t)] = t
        return key

    def tape(self, func: Function, site: Site, args: Args, kwargs: Kwargs, keys: dict[int, str], out: Any) -> None:
        """Note an operation that ran."""
        outputs = {k: t for k, t in enumerate(tensors_of(out)) if f"out{k}" in site.layouts}
        for k, t in outputs.items():
            layout = site.layouts[f"out{k}"]
            if t.ndim <= layout.dim or layout.split(t.shape[layout.dim], self.samples) is None:
                self._lose()
                return
        versions = [(t, version(t)) for t in tensors_in(args, kwargs)]
        if site.rule is None and site.role == "rows":  # to be replayed, and at the precision at which it runs now
            func = as_now(func, tensors_in(args, kwargs))
        edges = {k: get_gradient_edge(t) for k, t in outputs.items()}
        self.ops.append(TapedOp(func, site, args, kwargs, keys, edges, versions))

    def _sourced(self, run: Callable[[], Any]) -> Any:
        """Run an operation none of whose inputs is differentiable, so that its output still has an edge to grade."""
        spec: list[Any] = []

        def tensors() -> tuple[Tensor, ...]:
            leaves, structure = flattened((run(),), {})
            spec.append(structure)
            return tuple(leaves)

        return rebuilt(_Source.apply(self._anchor, tensors), spec[0])[0][0]  # type: ignore[no-untyped-call]


class _Source(torch.autograd.Function):
    """A differentiable output with no differentiable input: its edge is where the output gradient is read."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, run: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Run the operation."""
        return run()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Nothing flows further."""
        return None, None


_PYTHON = ("torch.nn.functional", "torch.functional")


@cache
def enter(func: Function) -> Function | None:
    """A composite of torch's own, as a function whose inner operations the mode sees; None for anything else.

    One in C++ is written anew in `composites`. One in Python starts by handing itself to the mode: its twin shares its
    code but answers that question with no.
    """
    if func in COMPOSITES:
        return COMPOSITES[func]
    if not isinstance(func, types.FunctionType) or func.__module__ not in _PYTHON:
        return None

    def no(*_: Any) -> bool:
        return False

    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    globals_ = {**func.__globals__, **dict.fromkeys(asks, no)}
    twin = types.FunctionType(func.__code__, globals_, func.__name__, func.__defaults__, func.__closure__)
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin
