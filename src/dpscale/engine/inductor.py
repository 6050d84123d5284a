"""torch's own compiler, for a traced step: what it must not leave out, and what it had better write down once."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """torch's own compiler."""
    from torch._inductor.compile_fx import compile_fx  # slow to import, and eager users never need it

    # Without an environment of shapes the compiler's cache on disk is passed by: every run would compile anew.
    fake = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    fakes = [fake.from_tensor(t, static_shapes=True) for t in inputs]
    patches = {
        # What is rounded to 16 bits stays rounded: a norm must be that of the very numbers that are summed.
        "emulate_precision_casts": True,
        # The compiler gives up on channels-last convolutions in a graph of many other operations. Ours all serve them.
        "force_layout_optimization": _plain_convolutions(graph),
        "post_grad_custom_pre_pass": _passes(images := _mostly_convolutions(graph)),
    }
    if images:
        # Images are large: to compute a norm and its activation again costs less than to write and read them.
        patches |= {"realize_reads_threshold": 8, "realize_acc_reads_threshold": 16, "realize_opcount_threshold": 200}
    compiled: Any = compile_fx(graph, fakes, config_patches=patches)
    return compiled  # type: ignore[no-any-return]


def _passes(images: bool) -> Any:
    """Changes of the compiler's graph: equal operations on equal inputs are merged, and `_shared` is written.

    Args:
        images: whether it is.
    """
    from torch._functorch.compile_utils import fx_graph_cse
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class Passes(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            module = graph.owning_module
            assert module is not None
            # Rules compute some things again that the forward or backward had (a norm's statistics): once is enough.
            # But equal draws are not the same draw.
            if not any(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes):
                module.graph = fx_graph_cse(graph)
            for node in _shared(module.graph) if images else ():
                node.meta["inductor_realize_to_strides"] = True

        def uuid(self) -> str:
            return f"dpscale-passes-1-{images}"  # goes into the key of the compiler's cache

    return Passes()


def _shared(graph: torch.fx.Graph) -> Iterator[torch.fx.Node]:
    """What would be computed anew for each reader: a pooling and its places; the coefficients of an image."""
    for node in graph.nodes:
        name = getattr(node.target, "_opname", "")
        if name in ("max_pool2d_with_indices", "_low_memory_max_pool_with_offsets"):
            yield from node.users
        elif name == "max_pool2d_with_indices_backward":
            last = node
            while len(last.users) == 1 and torch.Tag.pointwise in getattr(next(iter(last.users)).target, "tags", ()):
                last = next(iter(last.users))
            yield last
        elif _is(node, _places) or _is(node, _of_channels):
            same = _places if _is(node, _places) else _of_channels
            if not all(_is(user, same) for user in node.users):
                yield node


def _is(node: torch.fx.Node, kind: Callable[[Tensor], bool]) -> bool:
    value = node.meta.get("val")
    return node.op == "call_function" and isinstance(value, Tensor) and kind(value)


def _places(value: Tensor) -> bool:
    """In the windows of a pooling."""
    return value.ndim == 4 and value.dtype == torch.int8


def _of_channels(value: Tensor) -> bool:
    """A number for each channel of an image: (N, C, 1, 1)."""
    return value.ndim == 4 and value.shape[2:] == (1, 1)


def _plain_convolutions(graph: torch.fx.GraphModule) -> bool:
    """Whether there are convolutions on CUDA, all in one group."""
    found = [n for n in graph.graph.nodes if n.target is torch.ops.aten.convolution.default]
    return bool(found) and all(n.meta["val"].is_cuda and n.args[-1] == 1 for n in found)


def _mostly_convolutions(graph: torch.fx.GraphModule) -> bool:
    """Whether, on CUDA, they outnumber the linear layers: not in a transformer that begins with one."""
    targets = [n.target for n in graph.graph.nodes]
    linear = targets.count(torch.ops.aten.mm.default) + targets.count(torch.ops.aten.addmm.default)
    return _plain_convolutions(graph) and targets.count(torch.ops.aten.convolution.default) > linear
