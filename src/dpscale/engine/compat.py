"""Every private or experimental name of torch that the library uses, each with what to do if it goes.

Other modules import these from here and touch no private name themselves, so that a new release of torch has to be
checked in one place. What is slow to import is imported inside a function.
"""

import builtins
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, distributed, nn

# Tells tensors that stand for no values. If it goes: a dispatch mode that notes what it makes.
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# What all batch norms have in common, lazy ones too. If it goes: a tuple of nn.BatchNorm1d, nn.LazyBatchNorm1d, ….
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm

# The same of instance norms.
from torch.nn.modules.instancenorm import _InstanceNorm as InstanceNorm

# Other tensors in the place of a model's parameters. If it goes: torch.func.functional_call, for one call.
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils import _pytree as pytree

__all__ = ["BatchNorm", "FakeTensor", "InstanceNorm"]  # passed on as they are

# Nested containers to lists and back, as all of torch does it. If they go: the package optree has all of them.
TreeSpec = pytree.TreeSpec
tree_flatten, tree_unflatten, tree_leaves = pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves
tree_map, tree_structure, keystr = pytree.tree_map, pytree.tree_structure, pytree.keystr
tree_flatten_with_path, register_tree_node = pytree.tree_flatten_with_path, pytree.register_pytree_node

# One launch for many tensors. If they go: a loop over Tensor.add_ and the like.
foreach_add_: Callable[..., Any] = torch._foreach_add_
foreach_copy_: Callable[..., Any] = torch._foreach_copy_
foreach_div_: Callable[..., Any] = torch._foreach_div_
foreach_mul_: Callable[..., Any] = torch._foreach_mul_
foreach_zero_: Callable[..., Any] = torch._foreach_zero_


_operations = torch.library.Library("dpscale", "FRAGMENT")


def operation(schema: str, run: Callable[..., Any], fake: Callable[..., Any], *tags: torch.Tag) -> None:
    """An operation of our own, ``torch.ops.dpscale.…``, without a gradient: what runs it, and what gives its shapes.

    `torch.library.custom_op` makes the same, which takes 30 microseconds to call where this one takes four.
    """
    _operations.define(schema, tags=tags)
    name = schema.partition("(")[0]
    _operations.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dpscale::{name}", fake, lib=_operations)


# Where torch prepares to run a checkpointed region again. If it goes: whatever `checkpoint` then calls in its place.
CHECKPOINT_GENERATOR = "_checkpoint_without_reentrant_generator"

# How often a tensor, or what shares its memory, was written. If it goes: compare copies.
version: Callable[[Tensor], int] = attrgetter("_version")

# A module's own parameters, buffers and children by name: with None, and with duplicates. If they go:
# `named_parameters(recurse=False, remove_duplicate=False)` and its kin, which are slower and skip None.
# A module's hooks, by their numbers. If they go: nothing sees that one was added in the midst of a run.
hooks: Callable[[nn.Module], tuple[Mapping[int, Any], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"
)

registered: Callable[[nn.Module], tuple[Mapping[str, Any], ...]] = attrgetter("_parameters", "_buffers", "_modules")

# The same, to put other parameters or hooks in their place. If they go: `reparametrized`, and no model under FSDP.
own_parameters: Callable[[nn.Module], MutableMapping[str, Any]] = attrgetter("_parameters")
forward_hooks: Callable[[nn.Module], tuple[MutableMapping[int, Any], ...]] = attrgetter(
    "_forward_hooks", "_forward_pre_hooks"
)


# An optimizer's hooks before its step, by their numbers. If they go: `guard` registers its own anew before every step.
step_hooks: Callable[[torch.optim.Optimizer], dict[int, Any]] = attrgetter("_optimizer_step_pre_hooks")


def has_hooks(t: Tensor) -> bool:
    """Whether something was registered to be called with its gradient. If it goes: nothing says so."""
    return bool(t._backward_hooks)


def storage(t: Tensor) -> int:
    """A number that tells a tensor's memory from any other's, fake ones included. If it goes: `StorageWeakRef`."""
    number: int = t.untyped_storage()._cdata
    return number


# One tensor from all ranks, or to all; torch 2.13 gave them new names. Once that is the oldest: by these names.
all_gather: Callable[..., Any] = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor
reduce_scatter: Callable[..., Any] = (
    getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
)


def is_sharded(t: Any) -> bool:
    """Whether it is a distributed tensor. The package that defines them is slow to import, and may never be needed."""
    return hasattr(t, "device_mesh")


def group_timeout(group: Any, device: torch.device) -> timedelta:
    """How long a collective of a process group waits. If it goes: let the caller be told, beside ``group``."""
    timeout: timedelta = group._get_backend(device).options._timeout
    return timeout


def sharding_policies(module: Any) -> tuple[Any, list[Any]]:
    """The mixed precision of a module under `fully_shard`, and where each group of its parameters is offloaded to.

    If it goes: compare the dtype and the device of its parameters with those that a forward sees.
    """
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)  # torch before 2.12 has one, or none
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return state._mp_policy, [group.offload_policy for group in groups]


def reparametrized(model: nn.Module, values: Mapping[str, Tensor] | None) -> AbstractContextManager[None]:
    """The model with other tensors for its parameters, tied ones too; None leaves it."""
    return nullcontext() if values is None else _reparametrize_module(model, dict(values), tie_weights=True)


def is_tree_node(made: type) -> bool:
    """Whether torch's trees see into a container of this type. If it goes: a set of those that we registered."""
    return made in pytree.SUPPORTED_NODES


Decompositions = Mapping[Any, Callable[..., Any]]
"""What to take for an operation: a function of others."""


def trace_on_fakes(
    function: Callable[..., Any], inputs: Sequence[Any], decompositions: Decompositions
) -> torch.fx.GraphModule:
    """A function as one graph of tensor operations, traced on fake tensors. If it goes: `torch.export`."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, dict(decompositions), tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def trace_any_size(
    function: Callable[..., Any], inputs: Sequence[Tensor], batched: Collection[int], rows: int,
    decompositions: Decompositions,
) -> torch.fx.GraphModule:  # fmt: skip
    """As `trace_on_fakes`, with a symbol for the rows of the inputs ``batched``. If it goes: a trace for each size.

    What was decided on the way by the size of an example, about ``rows``, is kept as a condition: see `holds_for`. With
    another example the compiler's cache would not know the graph again.
    """
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=(shapes := ShapeEnv()))
    rows = _unlike_any(rows, {n for k, t in enumerate(inputs) for n in t.shape[k in batched :]})

    def any_size(t: Tensor) -> Tensor:
        dims = [DimDynamic.DUCK, *[DimDynamic.STATIC] * (t.ndim - 1)]  # sizes that are equal are one symbol
        context: StatelessSymbolicContext[Any, Any] = StatelessSymbolicContext(dynamic_sizes=dims)
        example = t.new_empty(rows, *t.shape[1:])
        return fake.from_tensor(example, symbolic_context=context, source=ConstantSource("rows"))

    fakes = [any_size(t) if k in batched else fake.from_tensor(t, static_shapes=True) for k, t in enumerate(inputs)]
    with _len_of_any_size():
        trace = make_fx(function, dict(decompositions), tracing_mode="symbolic", _allow_non_fake_inputs=True)
        graph = trace(*fakes)
    del graph.shape_env  # the compiler's cache on disk takes no graph that has it
    if shapes.replacements:
        raise RuntimeError("an operation needs to know the size of the batch")
    return graph


def _unlike_any(size: int, sizes: Collection[int]) -> int:
    """A prime above ``size`` that is none of these: nothing else is taken for the number of rows by mistake."""
    primes = (n for n in itertools.count(max(size, 2) + 1) if all(n % d for d in range(2, n) if d * d <= n))
    return next(n for n in primes if n not in sizes)


@contextmanager
def _len_of_any_size() -> Iterator[None]:
    """``len(t)`` is the symbol where a tensor has one. Python's own makes a plain number of it: the example's."""
    plain = builtins.len

    def length(value: Any) -> Any:
        symbolic = isinstance(value, FakeTensor) and value.ndim and isinstance(value.shape[0], torch.SymInt)
        return value.shape[0] if symbolic else plain(value)

    builtins.len = length
    try:
        yield
    finally:
        builtins.len = plain


def holds_for(graph: torch.fx.GraphModule, rows: int) -> bool:
    """Whether what was decided while a graph was traced and compiled for any size holds for batches of this one."""
    values = (node.meta["val"] for node in graph.graph.find_nodes(op="placeholder"))
    size = next(t.shape[0] for t in values if t.ndim and isinstance(t.shape[0], torch.SymInt))
    symbol = size.node._expr  # by its name, whatever it was found to equal
    return rows > 1 and all(bool(guard.expr.xreplace({symbol: rows})) for guard in size.node.shape_env.guards)


def weak_view(t: Tensor) -> Tensor:
    """A tensor over the same memory that does not keep it: a CUDA graph's answer, where the next graph may write.

    If it goes: the tensor itself, and each graph keeps memory of its own.
    """
    data = t.untyped_storage()
    weak = torch._C._construct_storage_from_data_pointer(data.data_ptr(), t.device, data.nbytes())
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(weak, t.storage_offset(), t.shape, t.stride())


def compile_graph(graph: torch.fx.GraphModule, inputs: Sequence[Tensor], patches: dict[str, Any]) -> Callable[..., Any]:
    """Compile a traced graph for inputs of these shapes. If it goes: `torch.compile`, which traces by itself.

    Args:
        patches: settings of the compiler, for this graph alone.
    """
    from torch._inductor.compile_fx import compile_fx
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    fakes = [node.meta["val"] for node in graph.graph.find_nodes(op="placeholder")]
    if not any(isinstance(size, torch.SymInt) for t in fakes for size in t.shape):
        # Without an environment of shapes the compiler's cache on disk is passed by: every run would compile anew.
        fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
        fakes = [fake.from_tensor(t, static_shapes=True) for t in inputs]
    compiled: Any = compile_fx(graph, fakes, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def graph_pass(run: Callable[[torch.fx.Graph], None], identity: str) -> Any:
    """A change of the compiler's graph, and its key in the compiler's cache. If it goes: a plain function, uncached."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Pass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            run(graph)

        def uuid(self) -> str:
            return identity

    return Pass()


def merge_equal(graph: torch.fx.Graph) -> torch.fx.Graph:
    """The graph with equal operations on equal inputs merged. If it goes: leave it out, it only saves time."""
    from torch._functorch.compile_utils import fx_graph_cse

    merged: torch.fx.Graph = fx_graph_cse(graph)
    return merged
