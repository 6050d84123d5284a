"""Meets every operation that consumes a trainable parameter, whatever module (or none) called it.

`Meeting` is a torch-function mode: it sees each call of a torch operation before it runs. A composite written in Python
(`layer_norm`, `multi_head_attention_forward`) is entered, so that what is met are the few operations underneath.

`Capture` runs the forward with every parameter detached, so that the backward computes no parameter gradients, and
notes for each met operation its inputs and the edge of the autograd graph at its output. The gradient that later
arrives at that edge is all a rule needs. Nothing is hung on parameters, and no hook depends on the order of anything.
"""

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from dpscale.engine import channels
from dpscale.engine.calls import as_now, in_place, result, tensors_in
from dpscale.engine.calls import out_of_place as out_of_place
from dpscale.engine.checkpoints import resume, suspend
from dpscale.engine.compat import tree_flatten, tree_unflatten, version
from dpscale.engine.composites import COMPOSITES
from dpscale.engine.errors import SECOND, UnsupportedModel
from dpscale.engine.layout import Layout
from dpscale.engine.rules import Rule
from dpscale.engine.rules.derivation import Derived
from dpscale.engine.taint import Watch

_BACKWARDS = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)

Kind = Literal["rows", "expanded", "shared", "plain"]


@dataclass(frozen=True)
class Site:
    """What the inspection found out about one operation that consumes parameters.

    Attributes:
        function: the operation.
        kind: ``rows``: its output carries the batch, and parameters meet data here;
            ``expanded``: no data is in it, but it repeats a parameter once per sample;
            ``shared``: a function of parameters alone, which later operations consume as if it were one;
            ``plain``: nothing to differentiate (a shape, a comparison).
        rule: how to form per-sample gradients; None for the generic rule.
        layouts: where the samples are, of differentiable outputs ("out0", …) and of arguments (by the rule's names,
        or "0", "1", …).
    """

    function: Callable[..., Any]
    kind: Kind
    rule: Rule | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)


@dataclass
class Met:
    """One operation as it ran: what a rule needs once the output gradients are known."""

    site: Site
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keys: dict[int, str]
    edges: dict[int, GradientEdge]
    versions: list[tuple[Tensor, int]]


@dataclass(frozen=True)
class Blueprint:
    """The sites of a model in the order in which its forward meets them.

    ``provisional``: the batch that was inspected could not show everything; inspect again on one that can.
    """

    sites: tuple[Site, ...]
    provisional: bool


class BlueprintMismatch(UnsupportedModel):
    """The forward met other operations than the inspection did; inspect again."""

    def __init__(self) -> None:
        super().__init__(
            "The operations that this model runs change from call to call, so rows cannot be attributed to samples. "
            "Make the forward run the same operations for every batch."
        )


class Meeting(TorchFunctionMode):
    """Finds the calls that consume a tensor of ``keys`` (id -> name) and hands them to ``meet``."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[int, str] = {}

    def __enter__(self) -> Self:
        Watch.count += 1
        suspend()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: object) -> None:
        Watch.count -= 1
        resume()
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("create_graph") and func in _BACKWARDS:
            raise UnsupportedModel(SECOND)
        if not any(id(t) in self.keys for t in tensors_in(args, kwargs)):
            return self.pass_by(func, args, kwargs)
        inside = enter(func)
        if inside is not None:
            with self:
                return inside(*args, **kwargs)
        return self.meet(func, args, kwargs)

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that consumes no parameter."""
        return func(*args, **kwargs)

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """An operation that does."""
        raise NotImplementedError


class Capture(Meeting):
    """Runs a forward at ``values`` and tapes what the parameters met.

    Args:
        parameters: the trainable parameters, by name.
        values: what to take in their place (a released point), or None for what they hold.
        blueprint: from the inspection of this model.
        samples: B.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        values: Mapping[str, Tensor] | None,
        blueprint: Blueprint,
        samples: int,
    ) -> None:
        super().__init__()
        # Leaves stand in for the parameters. Gradients reach them only through functions of parameters alone.
        self.leaves = {n: (values or parameters)[n].detach().requires_grad_() for n in parameters}
        self.keys = {id(p): n for n, p in parameters.items()}
        self.stand_in: dict[int, Tensor] = {id(p): self.leaves[n] for n, p in parameters.items()}
        self.derived: dict[str, Derived] = {}
        self.met: list[Met] = []
        self.samples = samples
        self._anchor = torch.zeros((), requires_grad=True)
        self._sites = blueprint.sites
        self._position = 0

    def meet(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Follow the blueprint: run on detached parameters and tape, or build a function of parameters alone."""
        flat, spec = tree_flatten((args, kwargs))
        standing = [self.stand_in.get(id(t), t) if isinstance(t, Tensor) else t for t in flat]
        if not torch.is_grad_enabled():
            args, kwargs = tree_unflatten(standing, spec)
            return func(*args, **kwargs)
        site = self._next(func)
        keys = {k: self.keys[id(t)] for k, t in enumerate(flat) if isinstance(t, Tensor) and id(t) in self.keys}
        if site.kind in ("plain", "shared"):
            args, kwargs = tree_unflatten(standing, spec)
            out = func(*args, **kwargs)
            if site.kind == "shared":
                self._derive(result(func, args, out), func, args, kwargs, keys)
            return out
        if site.kind == "expanded":
            args, kwargs = tree_unflatten(standing, spec)
            run = out_of_place(func)
            whole = run(*args, **kwargs)
            key = self._derive(whole, run, args, kwargs, keys, met=False)
            out = self._sourced(lambda: whole.detach())
            self._tape(site, (whole,), {}, {0: key}, out)
            return args[0].copy_(out) if in_place(func) else out
        standing = [t.detach() if k in keys else t for k, t in enumerate(standing)]
        args, kwargs = tree_unflatten(standing, spec)
        into = args[0] if in_place(func) else None
        if into is not None:
            # Run on a copy and write the result back: what is taped is then neither changed later, nor a view, whose
            # own edge no gradient reaches once the tensor that it is a view of is used.
            func, args = out_of_place(func), (into.clone(), *args[1:])
        run, args = channels.before(func, args)
        if any(isinstance(t, Tensor) and t.requires_grad for t in standing):
            out = run(*args, **kwargs)
        else:
            out = self._sourced(lambda: run(*args, **kwargs))
        self._tape(site, args, kwargs, keys, out)
        return channels.after(func, args, out) if into is None else into.copy_(out)

    def pass_by(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it as it is."""
        return channels.between(func, args, kwargs)

    def finish(self) -> None:
        """Say so if the forward met fewer operations than the blueprint has."""
        if self._position != len(self._sites):
            raise BlueprintMismatch

    def _next(self, func: Callable[..., Any]) -> Site:
        if self._position >= len(self._sites) or self._sites[self._position].function != func:
            raise BlueprintMismatch
        self._position += 1
        return self._sites[self._position - 1]

    def _derive(
        self, out: Any, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any],
        sources: Mapping[int, str], met: bool = True,
    ) -> str:  # fmt: skip
        """Record a function of parameters; with ``met``, later operations on it are met as on a parameter."""
        key = ""
        for k, t in enumerate(tree_flatten(out)[0]):
            if isinstance(t, Tensor) and t.requires_grad:
                key = f"~{len(self.derived)}"
                self.derived[key] = Derived(t, func, args, kwargs, sources, k, version(t))
                if met:
                    self.keys[id(t)] = key
                    self.stand_in[id(t)] = t
        return key

    def _sourced(self, run: Callable[[], Any]) -> Any:
        """Run an operation none of whose inputs is differentiable, so that its output still has an edge to grade."""
        spec: list[Any] = []

        def tensors() -> tuple[Tensor, ...]:
            flat, structure = tree_flatten(run())
            spec.append(structure)
            return tuple(flat)

        return tree_unflatten(list(_Source.apply(self._anchor, tensors)), spec[0])  # type: ignore[no-untyped-call]

    def _tape(self, site: Site, args: tuple[Any, ...], kwargs: dict[str, Any], keys: dict[int, str], out: Any) -> None:
        outputs = dict(enumerate(t for t in tree_flatten(out)[0] if isinstance(t, Tensor)))
        outputs = {k: t for k, t in outputs.items() if f"out{k}" in site.layouts}
        for k, t in outputs.items():
            layout = site.layouts[f"out{k}"]
            if t.ndim <= layout.dim or layout.split(t.shape[layout.dim], self.samples) is None:
                raise BlueprintMismatch
        versions = [(t, version(t)) for t in tensors_in(args, kwargs)]
        if site.rule is None and site.kind == "rows":  # to be replayed, and at the precision at which it runs now
            site = replace(site, function=as_now(site.function, tensors_in(args, kwargs)))
        edges = {k: get_gradient_edge(t) for k, t in outputs.items()}
        self.met.append(Met(site, args, kwargs, keys, edges, versions))


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
def enter(func: Callable[..., Any]) -> Callable[..., Any] | None:
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
    twin = types.FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(asks, no)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    twin.__kwdefaults__ = func.__kwdefaults__
    return twin
