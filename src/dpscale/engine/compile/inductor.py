"""torch's own compiler, for a traced step: what it must not leave out, and what it had better write down once."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from dpscale.engine.compat import compile_graph, graph_pass, merge_equal

aten = torch.ops.aten

PIECES = 8
"""Padding in so many pieces: of fewer, the compiler would make one computation of a padded tensor's entries, apart from
whatever else goes over the entries without padding; of these it writes each into its place."""


def inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """torch's own compiler."""
    with _parts_of_torch_to_themselves():
        return _inductor(graph, inputs)


@contextmanager
def _parts_of_torch_to_themselves() -> Iterator[None]:
    """What one part of torch warns another of is of no use to anybody else."""
    with warnings.catch_warnings():
        for kind in (FutureWarning, DeprecationWarning):
            warnings.filterwarnings("ignore", category=kind, module=r"torch\.")
        yield


def _inductor(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
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
    return compile_graph(graph, inputs, patches)


def _mish(x: Tensor) -> Tensor:
    """x·tanh(log(1 + eˣ)). The tanh of a logarithm is a quotient: one exponential, where the compiler takes three."""
    wide = _wide(x)
    _, n = _exponential(wide)
    return (wide * (n / (n + 2))).to(x.dtype)


def _mish_backward(gradient: Tensor, x: Tensor) -> Tensor:
    wide = _wide(x)
    e, n = _exponential(wide)
    inverse = 1 / (n + 2)
    slope = n * inverse + 4 * wide.clamp(max=_FLAT) * (e * inverse) * ((e + 1) * inverse)
    return (gradient.to(wide.dtype) * slope).to(x.dtype)


def _exponential(x: Tensor) -> tuple[Tensor, Tensor]:
    e = x.clamp(max=_FLAT).exp()
    return e, e * (e + 2)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


_FLAT = 40.0
"""From here on Mish is x to the last bit, also of float64, and the square of its exponential is still a float32."""

CHEAPER: dict[Any, Callable[..., Any]] = {aten.mish.default: _mish, aten.mish_backward.default: _mish_backward}
"""Operations in fewer steps than the compiler takes for them: an image's activation is computed anew by each reader."""


def _passes(images: bool) -> Any:
    """Changes of the compiler's graph: equal operations on equal inputs are merged, and `_shared` is written.

    Args:
        images: whether it is.
    """

    def run(graph: torch.fx.Graph) -> None:
        module = graph.owning_module
        assert module is not None
        # Rules compute some things again that the forward or backward had (a norm's statistics): once is enough.
        # But equal draws are not the same draw.
        merged = merge_equal(graph)
        if _draws(merged) == _draws(graph):
            module.graph = merged
        _pad_once(module.graph)
        _add_in_place(module.graph)
        for node in _shared(module.graph) if images else ():
            node.meta["inductor_realize_to_strides"] = True

    return graph_pass(run, f"dpscale-passes-5-{images}")


def _draws(graph: torch.fx.Graph) -> int:
    """How many operations may be random. Attention counts, though it draws nothing without dropout."""
    return sum(torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ()) for n in graph.nodes)


def _pad_once(graph: torch.fx.Graph) -> None:
    """What is padded for a kernel of ours is written padded at once, and others read the part without the padding.

    It is the gradient of the outputs for a vocabulary of odd size: often the largest tensor of a step.
    """
    pads: dict[Any, list[Any]] = {}
    for pad in graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default):
        source = _same_order(pad.args[0])
        if _added_columns(pad) and torch.Tag.pointwise in getattr(source.target, "tags", ()):
            pads.setdefault(source, []).append(pad)
    for source, padded in pads.items():
        value, added = source.meta["val"], max(map(_added_columns, padded))
        last, columns = value.ndim - 1, value.shape[-1]
        # Rows that are not of whole lines of memory the compiler would lay out longer, and copy for the kernel.
        whole_lines = (columns + added) * value.element_size() % 128 == 0
        if added < PIECES or not whole_lines or not any(_for_kernel(pad) for pad in padded):
            continue
        with value.fake_mode, graph.inserting_before(source.next):
            rows = [
                _call(graph, aten.sym_size.int, source, d) if isinstance(n, torch.SymInt) else n
                for d, n in enumerate(value.shape[:-1])
            ]
            pieces = [source]
            for width in (*[1] * (PIECES - 1), added - PIECES + 1):
                like = {"dtype": value.dtype, "device": value.device}
                pieces.append(_call(graph, aten.full.default, [*rows, width], 0, **like))
            whole = _call(graph, aten.cat.default, pieces, last)
            part = _call(graph, aten.slice.Tensor, whole, last, 0, columns)
        source.replace_all_uses_with(part, delete_user_cb=lambda user, own=(whole, *rows): user not in own)
        for pad in padded:
            with graph.inserting_before(pad):
                wanted = _call(graph, aten.slice.Tensor, whole, last, 0, columns + _added_columns(pad))
                # At most one of its dimensions holds the batch, whose size may be open.
                shape = [-1 if isinstance(n, torch.SymInt) else n for n in pad.meta["val"].shape]
                wanted = _call(graph, aten.reshape.default, wanted, shape)
            pad.replace_all_uses_with(wanted)
            graph.erase_node(pad)


def _add_in_place(graph: torch.fx.Graph) -> None:
    """x + (zeros with rows added to them) is x with the rows added: the gradient of a table that is tied to a head."""
    put = aten.index_put.default
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        first, second, *_ = node.args
        for rows, other in ((first, second), (second, first)):
            alone = getattr(rows, "target", None) is put and len(rows.users) == 1 and rows is not other
            if not alone or node.kwargs or not _zeros_like(rows.args[0], other) or rows.args[3:] != (True,):
                continue
            with graph.inserting_before(node):
                summed = _call(graph, put, other, *rows.args[1:])
            node.replace_all_uses_with(summed)
            graph.erase_node(node)
            graph.erase_node(rows)
            break


def _same_order(node: Any) -> Any:
    """What ``node`` is a view of, with the same rows of the same length in the same order."""
    while node.target in (aten.reshape.default, aten.view.default, aten.permute.default):
        value, given = node.meta["val"], node.args[0].meta["val"]
        if value.shape[-1] != given.shape[-1] or not value.is_contiguous() or not given.is_contiguous():
            break
        node = node.args[0]
    return node


def _added_columns(pad: Any) -> int:
    """How many columns of zeros a padding puts at the end; 0 if it does anything else."""
    _, (before, after, *others), *value = pad.args
    return max(0, after) if before == 0 and not any(others) and value in ([], [0]) else 0


def _for_kernel(node: torch.fx.Node) -> bool:
    """Whether an operation of ours reads it."""
    return any(
        _for_kernel(user)
        if user.target in (aten.unsqueeze.default, aten.reshape.default, aten.view.default)
        else getattr(user.target, "namespace", "") == "dpscale"
        for user in node.users
    )


def _zeros_like(node: Any, other: Any) -> bool:
    value = getattr(other, "meta", {}).get("val")
    zero = node.target is aten.full.default and node.args[1] == 0
    return zero and isinstance(value, Tensor) and _kind(value) == _kind(node.meta["val"])


def _kind(value: Tensor) -> tuple[Any, ...]:
    return value.shape, value.dtype, value.device


def _call(graph: torch.fx.Graph, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A new node, with its example value."""
    node = graph.call_function(target, args, kwargs)
    node.meta["val"] = target(*torch.fx.map_arg(args, lambda n: n.meta["val"]), **kwargs)
    return node


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
