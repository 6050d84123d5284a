"""Changes of the compiler's graph: the same results, and less to move."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import dpscale.engine.kernels  # noqa: F401  (registers the operations)
from dpscale.engine.compat import trace_any_size
from dpscale.engine.compile import inductor

aten = torch.ops.aten


def changed(function, *inputs, change):
    """The traced function's graph after a change that leaves its results as they were; and how often it has each."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    change(graph.graph)
    graph.graph.lint()
    graph.recompile()
    for found, expected in zip(graph(*inputs), function(*inputs), strict=True):
        torch.testing.assert_close(found, expected)
    targets = [n.target for n in graph.graph.nodes if n.users]
    return {t: targets.count(t) for t in targets}


def passes(graph):
    inductor._passes(False)(graph)


def test_equal_operations_are_merged_beside_a_random_one():
    """Attention counts as random, even without dropout: merging must not stop for it."""
    x = torch.randn(4)
    graph = make_fx(lambda x: torch.randint_like(x, 9) + x.sin() * x.sin(), tracing_mode="fake")(x)
    passes(graph.graph)
    assert [n.target for n in graph.graph.nodes].count(aten.sin.default) == 1


def test_equal_draws_are_not_merged():
    """Of an operation that torch's own merging does not know to be random."""
    x = torch.randn(4)
    graph = make_fx(lambda x: torch.randint_like(x, 9) - torch.randint_like(x, 9), tracing_mode="fake")(x)
    passes(graph.graph)
    assert [n.target for n in graph.graph.nodes].count(aten.randint_like.default) == 2


def test_what_torch_tells_itself_is_not_passed_on():
    """Its compiler calls functions that its own authors gave up; here a warning is an error."""
    x = torch.randn(2, 3, 3)
    graph = make_fx(lambda x: [x.diagonal(dim1=1, dim2=2) * 2], tracing_mode="fake")(x)
    (found,) = inductor.inductor(graph, [x])(x)
    assert torch.equal(found, x.diagonal(dim1=1, dim2=2) * 2)


def padded_twice(x, a, m, w, permuted=False):
    """Like a head of odd size: its gradient goes on into the network, and padded into a kernel."""
    g = x * 2
    rows = g.view(4, 3, 19).permute(1, 0, 2) if permuted else g.view(3, 1, 4, 19).permute(1, 0, 2, 3).view(3, 4, 19)
    found = torch.ops.dpscale.weigh_wide(a, F.pad(rows, (0, 13)), w)
    return g @ m, found, F.pad(g, (0, 5)).cos(), rows.sum(2)


@pytest.mark.parametrize("permuted", [False, True])
def test_a_padded_gradient_is_written_once(permuted):
    """Every reader reads it there; rows in another order are left alone."""
    inputs = torch.randn(12, 19), torch.randn(3, 4, 5), torch.randn(19, 2), torch.rand(3)
    found = changed(lambda *t: padded_twice(*t, permuted=permuted), *inputs, change=inductor._pad_once)
    assert (aten.cat.default in found) is not permuted
    assert found.get(aten.constant_pad_nd.default, 0) == 2 * permuted


def test_a_padded_gradient_is_written_once_whatever_the_size_of_the_batch():
    def function(x, a, w, m):
        g = x * 2
        flat = g.view(-1, 19)
        found = torch.ops.dpscale.weigh_wide(a, F.pad(flat, (0, 13)).view(-1, 4, 32), w)
        return flat @ m, found, F.pad(g, (0, 5)).cos(), flat.sum(1)

    def inputs(rows):
        return torch.randn(rows, 4, 19), torch.randn(rows, 4, 5), torch.rand(rows), torch.randn(19, 2)

    graph = trace_any_size(function, inputs(3), batched=range(3), rows=3, decompositions={})
    inductor._pad_once(graph.graph)
    graph.graph.lint()
    graph.recompile()
    targets = [n.target for n in graph.graph.nodes]
    assert aten.cat.default in targets and aten.constant_pad_nd.default not in targets
    for rows in (2, 7):
        given = inputs(rows)
        for found, expected in zip(graph(*given), function(*given), strict=True):
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize(
    ("width", "pad", "value"),
    [(19, (0, 12), 0.0), (28, (0, 4), 0.0), (19, (1, 13), 0.0), (19, (0, 13, 0, 1), 0.0), (19, (0, 13), 1.0)],
    ids=["no whole lines of memory", "few columns", "before", "rows too", "not zeros"],
)
def test_other_paddings_are_left_alone(width, pad, value):
    """What does not pay, and what is something else."""

    def function(x, a, w):
        g = x * 2
        return g.sum(1), torch.ops.dpscale.weigh_wide(a, F.pad(g.view(3, 4, -1), pad, value=value), w)

    inputs = torch.randn(12, width), torch.randn(3, 4 + (len(pad) > 2), 5), torch.rand(3)
    assert aten.cat.default not in changed(function, *inputs, change=inductor._pad_once)


@pytest.mark.parametrize("turned", [False, True])
def test_rows_are_added_to_the_sum_they_are_added_to(turned):
    """Without zeros in between, whichever of the two comes first."""

    def function(x, index, values):
        table = torch.ops.aten.full([5, 3], 0, dtype=torch.float32, device=x.device)
        rows = aten.index_put(table, [index], values, True)
        return (2 * x + rows,) if turned else (rows + 2 * x,)

    inputs = torch.randn(5, 3), torch.tensor([1, 4, 1]), torch.randn(3, 3)
    found = changed(function, *inputs, change=inductor._add_in_place)
    assert found[aten.index_put.default] == 1
    assert aten.add.Tensor not in found


@pytest.mark.parametrize("case", ["shape", "not zero", "written over", "used again", "itself"])
def test_rows_elsewhere_are_left_alone(case):
    """Where it would be another result."""

    def function(x, index, values):
        table = torch.ops.aten.full([5, 3], int(case == "not zero"), dtype=torch.float32, device=x.device)
        rows = aten.index_put(table, [index], values, case != "written over")
        both = rows + (rows if case == "itself" else x[:1] if case == "shape" else x)
        return (both, rows.cos()) if case == "used again" else (both,)

    inputs = torch.randn(5, 3), torch.tensor([1, 4, 2]), torch.randn(3, 3)
    assert aten.add.Tensor in changed(function, *inputs, change=inductor._add_in_place)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_mish_by_one_exponential_is_mish(dtype):
    far = torch.tensor([-1e4, -100.0, -50.0, 39.0, 41.0, 88.0, 100.0, 1e30, math.inf, math.nan])
    x = torch.cat([torch.linspace(-30, 30, 4001), far]).to(dtype)
    upstream = torch.linspace(-2, 2, len(x)).to(dtype)
    exact = x.double().requires_grad_()
    value = F.mish(exact)
    slope = torch.autograd.grad(value, exact, torch.ones_like(exact))[0]
    close = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4 * torch.finfo(dtype).tiny, "equal_nan": True}
    torch.testing.assert_close(inductor._mish(x), value.detach().to(dtype), **close)
    # Where the slope goes through zero it is a difference of numbers below one.
    close = {**close, "rtol": 16 * torch.finfo(dtype).eps, "atol": 16 * torch.finfo(dtype).eps}
    found = inductor._mish_backward(upstream, x)
    finite = slope.isfinite()  # torch has no slope at infinity
    torch.testing.assert_close(found[finite], (upstream.double() * slope).to(dtype)[finite], **close)
    assert found[-1].isnan()


def test_the_compiler_takes_mish_by_one_exponential():
    def slope(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(F.mish(x).sum(), x)

    x, seen = torch.randn(8), []

    def whole(graph: torch.fx.Graph) -> None:
        seen.extend(node.target for node in graph.nodes)

    graph = make_fx(slope, inductor.CHEAPER)(x)
    with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch(force_disable_caches=True):
        patch.setattr(inductor, "_pad_once", whole)
        compiled = inductor.inductor(graph, [x])
    torch.testing.assert_close(compiled(x)[0], slope(x)[0])
    assert seen.count(aten.exp.default) == 1
    assert not {aten.tanh.default, aten.log1p.default, aten.sigmoid.default} & set(seen)
