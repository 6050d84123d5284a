"""A form's norm and weighted sum are those of the gradients it stands for, whichever way it computes them."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dpscale.engine import kernels
from dpscale.engine.rules import convolution, linear
from dpscale.engine.rules.convolution import Patches
from dpscale.engine.rules.embedding import Rows, Scattered
from dpscale.engine.rules.forms import Dense, Packed, Stack, Sum, drop, total, widen
from dpscale.engine.rules.linear import Outer


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


KINDS = ["outer", "rows", "patches", "rows-of-kernels", "mixed", "tied", "scattered"]
every_kind = pytest.mark.parametrize("kind", KINDS)


@st.composite
def forms(draw, kind, samples=3):
    """Two forms of the same tensor, perhaps of different kinds."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    t, i, o = (draw(st.integers(1, 9)) for _ in range(3))
    if kind == "outer":
        return [Outer(randn(samples, t, i), randn(samples, t, o)) for _ in range(2)]
    if kind == "patches":
        shape, rest = torch.Size((2 * o, i, 3, 2)), ((1, 2), (1, 0), (1, 1), 2)
        return [Patches(randn(samples, 2, 2 * i, 4, 5), randn(samples, 2, 2 * o, 4, 2), shape, *rest) for _ in range(2)]
    if kind == "rows-of-kernels":  # wide enough for its own way of unfolding
        height, width, down, across = (draw(st.integers(1, 3)) for _ in range(4))
        shape, rest = torch.Size((o, 48, height, width)), ((down, across), (1, 2), (1, 1), 1)
        out = [(7 + 2 - height) // down + 1, (6 + 4 - width) // across + 1]
        return [Patches(randn(samples, 1, 48, 7, 6), randn(samples, 1, o, *out), shape, *rest) for _ in range(2)]
    if kind == "scattered":
        positions = draw(st.integers(0, 12))
        return [
            Scattered(
                randn(samples, t, i), torch.randint(0, samples * t, (positions,)), randn(positions),
                torch.randint(0, o, (positions,)), o, torch.Size((o, i)),
            )
            for _ in range(2)
        ]  # fmt: skip
    rows = [Rows(torch.randint(0, o, (samples, t)), randn(samples, t, i), o) for _ in range(2)]
    if kind == "tied":
        s = draw(st.integers(1, 9))
        outers = [Outer(randn(samples, s, i), randn(samples, s, o)) for _ in range(2)]
        return draw(st.permutations([*rows, *outers]))
    return (
        rows
        if kind == "rows"
        else [rows[0], Outer(randn(samples, t, i), randn(samples, t, o)), Dense(randn(samples, o, i))]
    )


@every_kind
@pytest.mark.parametrize("chunk", [1, 1 << 26], ids=["chunked", "whole"])
def test_forms_agree_with_their_gradients(chunk, kind, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", chunk)
    monkeypatch.setattr(convolution, "CHUNK", chunk)

    @settings(max_examples=20)
    @given(several=forms(kind))
    def check(several):
        weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
        for form in [*several, total(several), *(f.settle() for f in several), total(several).settle()]:
            gradients = form.per_sample()
            torch.testing.assert_close(form.norm2(), gradients.flatten(1).square().sum(1))
            torch.testing.assert_close(form.weighted(weights), torch.einsum("b,b...->...", weights, gradients))
        torch.testing.assert_close(total(several).per_sample(), sum(f.per_sample() for f in several))

    check()


@every_kind
def test_dropped_samples_are_exact_zeros(kind):
    @settings(max_examples=20)
    @given(several=forms(kind))
    def check(several):
        keep = torch.tensor([True, False, True])
        for form in [*several, total(several)]:
            poisoned = form.map(poison).map(drop(keep))
            assert poisoned.norm2()[1] == 0
            torch.testing.assert_close(poisoned.norm2()[keep], form.norm2()[keep])
            torch.testing.assert_close(poisoned.weighted(torch.ones(3).double()), form.weighted(keep.double()))

    check()


@every_kind
def test_some_samples_are_taken_out_of_a_form(kind):
    @settings(max_examples=20)
    @given(several=forms(kind))
    def check(several):
        rows = torch.tensor([2, 0])
        for form in [*several, total(several), Stack(tuple(several), 0)]:
            poisoned = form.map(poison).take(rows)  # of the one left out nothing stays
            torch.testing.assert_close(poisoned.per_sample(), form.per_sample()[rows])
            weights = torch.tensor([0.5, 2.0], dtype=torch.float64)
            whole = torch.tensor([2.0, 0.0, 0.5], dtype=torch.float64)
            torch.testing.assert_close(poisoned.weighted(weights), form.weighted(whole))

    check()


def test_an_infinite_weight_in_a_bag_is_dropped_with_its_sample():
    scale = torch.tensor([1.0, torch.inf])
    form = Scattered(torch.ones(2, 1, 3), torch.tensor([0, 1]), scale, torch.tensor([0, 0]), 4, torch.Size((4, 3)))
    assert torch.equal(form.norm2().isfinite(), torch.tensor([True, False]))
    dropped = form.map(drop(torch.tensor([True, False])))
    assert torch.equal(dropped.weighted(torch.tensor([1.0, 0.0])), torch.tensor([[1.0] * 3] + [[0.0] * 3] * 3))


def poison(operand):
    """Sample 1 becomes infinite."""
    operand = operand.clone()
    operand[1] = torch.inf
    return operand


def test_gram_is_taken_where_it_is_cheaper():
    assert Outer(randn(1, 2, 50), randn(1, 2, 50)).gram
    assert not Outer(randn(1, 50, 2), randn(1, 50, 2)).gram
    assert isinstance(Outer(randn(1, 50, 2), randn(1, 50, 2)).settle(), Dense)
    assert isinstance(Outer(randn(1, 2, 50), randn(1, 2, 50)).settle(), Outer)


@given(data=st.data())
def test_norms_by_pixels_are_those_of_the_gradients(data):
    torch.manual_seed(data.draw(st.integers(0, 2**16)))
    i, o, *kernel = (data.draw(st.integers(1, 3)) for _ in range(4))
    stride, dilation, padding = (tuple(data.draw(st.integers(low, 2)) for _ in range(2)) for low in (1, 1, 0))
    space = [8, 7]
    out = [(space[d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in range(2)]
    x, g = randn(3, 1, i, *space), randn(3, 1, o, *out)
    form = Patches(x, g, torch.Size((o, i, *kernel)), stride, padding, dilation, 1)
    torch.testing.assert_close(form._norm2_by_pixels(), form.per_sample().flatten(1).square().sum(1))


def test_kernel_rows_are_taken_where_they_pay():
    rest = (torch.Size((4, 48, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    settled = Patches(randn(2, 1, 48, 32, 32), randn(2, 1, 4, 32, 32), *rest).settle()
    assert isinstance(settled, Stack) and len(settled.slices) == 3


def test_trap_04_a_tied_table_and_head_make_no_gradients_of_the_table_s_size():
    rows = Rows(torch.randint(0, 50, (2, 3)), randn(2, 3, 40), 50)
    tied = total([rows, Outer(randn(2, 3, 40), randn(2, 3, 50)), rows])
    assert isinstance(tied, Sum) and len(tied.parts) == 2
    with Largest() as largest:
        tied.settle().norm2()
    assert largest.numbers < 2 * 50 * 40


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
def test_a_table_and_head_that_cancel_cannot_hide_from_the_norm(size):
    for seed in range(20):
        torch.manual_seed(seed)
        a, rest, head = size * torch.randn(1, 1, 50), torch.randn(1, 1, 50), torch.zeros(1, 1, 9)
        head[..., 4] = 1.0
        tied = total([Rows(torch.tensor([[4]]), rest - a, 9), Outer(a, head)])
        assert isinstance(tied, Sum)
        assert tied.weighted(torch.ones(1)).norm() <= tied.norm2().sqrt() * (1 + 1e-3)


def test_images_of_one_size_join_without_gradients():
    rest = (torch.Size((4, 3, 2)), (1,), (0,), (1,), 1)
    one = Patches(randn(2, 1, 3, 5), randn(2, 1, 4, 4), *rest)
    assert isinstance(total([one, one]), Patches)
    assert isinstance(total([one, Patches(randn(2, 1, 3, 7), randn(2, 1, 4, 6), *rest)]), Dense)


@pytest.fixture
def on_the_cpu():
    """Whatever device the tests are run on: what is tested is done there alone."""
    with torch.device("cpu"):
        yield


@pytest.mark.usefixtures("on_the_cpu")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch has no CPU library for it here")
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("space", [(17,), (9, 12), (5, 6, 7)])
def test_samples_that_stand_beside_groups_keep_their_own_gradients(monkeypatch, space, images, groups):
    """A few samples at a time, and one that is not finite among them."""
    monkeypatch.setattr(convolution, "CACHED", 0)
    monkeypatch.setattr(convolution, "LEAST", 2)
    dims = len(space)
    rest = (torch.Size((6, 4 // groups, *[3] * dims)), (2,) * dims, (1,) * dims, (1,) * dims, groups)
    x, g = randn(5, images, 4, *space), randn(5, images, 6, *((n - 1) // 2 + 1 for n in space))
    exact, form = Patches(x, g, *rest).per_sample().float(), Patches(x.float(), g.float(), *rest)
    monkeypatch.setattr(Patches, "_outer", None)  # no other way is taken
    settled = form.settle()
    assert isinstance(settled, Dense)
    torch.testing.assert_close(settled.per_sample(), exact, rtol=1e-4, atol=1e-4)
    form.g[2] = torch.inf
    others = [0, 1, 3, 4]
    torch.testing.assert_close(form.settle().per_sample()[others], exact[others], rtol=1e-4, atol=1e-4)
    assert not form.settle().norm2()[2].isfinite()


class Largest(TorchDispatchMode):
    """The size of the largest tensor that was made."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor):
                self.numbers = max(self.numbers, t.numel())
        return out


def fast_forms():
    """Forms that CUDA's kernels would take, in the shapes that lead to each of them, with what they stand for."""
    torch.manual_seed(0)

    def patches(channels, outputs, space, kernel, stride, padding, dilation):
        x = torch.randn(3, 1, channels, *space).bfloat16()
        weight = torch.zeros(outputs, channels, *kernel, requires_grad=True)
        conv = torch.conv1d if len(space) == 1 else torch.conv2d
        out = conv(x[:, 0].float(), weight, None, stride, padding, dilation)
        g = torch.randn(out.shape).bfloat16().unsqueeze(1)
        return Patches(x, g, weight.shape, stride, padding, dilation, 1)

    def outer(t, i, o):
        return Outer(torch.randn(3, t, i).bfloat16(), torch.randn(3, t, o).bfloat16())

    return {
        "gram": outer(20, 40, 50),
        "products": outer(40, 7, 5),
        "products-not-kept": outer(40, 7, 5),
        "conv-narrow": patches(3, 4, (6, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
        "conv-kept": patches(20, 4, (9, 8), (3, 2), (2, 1), (1, 0), (1, 2)),
        "conv-not-kept": patches(20, 24, (6, 6), (3, 3), (1, 1), (2, 0), (1, 1)),
        "conv-small": patches(300, 280, (5, 4), (3, 3), (1, 1), (1, 1), (1, 1)),
        "conv-line": patches(30, 4, (40,), (3,), (2,), (1,), (1,)),
    }


@pytest.mark.parametrize("name", fast_forms())
def test_the_ways_of_cuda_are_the_same_gradients(monkeypatch, name):
    """Here the kernels' twins stand in for them; the kernels themselves are held to the twins where there is a GPU."""
    form = fast_forms()[name]
    exact = form.map(widen).per_sample()
    monkeypatch.setattr(kernels, "available", lambda *_: True)
    monkeypatch.setattr(convolution, "SMALL", 0)
    if name == "products-not-kept":
        monkeypatch.setattr(linear, "CHUNK", 0)
    called = []
    for way in ("gram_norm2", "gram", "square", "keep", "weigh"):
        plain = getattr(kernels, way)
        monkeypatch.setattr(kernels, way, lambda *a, way=way, plain=plain: called.append(way) or plain(*a))
    settled = form.settle()
    w = torch.tensor([0.5, 0.0, 2.0])
    rounding = 2**-8 if "keep" in called else 1e-6  # kept gradients are bfloat16, as autograd's are
    slack = 2e-5  # the Gram identity's own
    norms = exact.square().flatten(1).sum(1)
    torch.testing.assert_close(settled.norm2().double(), norms, rtol=2 * rounding + slack, atol=0)
    summed = torch.einsum("b,b...->...", w.double(), exact)
    assert (settled.weighted(w).double() - summed).norm() <= rounding * summed.norm()
    ways = {"gram": {"gram_norm2", "weigh"}, "not-kept": {"square", "weigh"}, "small": {"gram", "weigh"}}
    assert set(called) == next((w for end, w in ways.items() if name.endswith(end)), {"keep"})
    if "keep" in called:  # what is bounded is what is summed: the norm is that of the rounded gradients
        norms = settled.per_sample().double().square().flatten(1).sum(1)
        torch.testing.assert_close(settled.norm2().double(), norms, rtol=1e-6, atol=0)


def test_small_gradients_are_packed_without_a_trace():
    """One norm and one sum for many small tensors are what each would have given."""
    torch.manual_seed(0)
    grads = {"a": randn(3, 4), "b": randn(3), "c": randn(3, 2, 5)}
    w = randn(3)
    packed = Packed.of({name: Dense(g) for name, g in grads.items()})
    torch.testing.assert_close(packed.all.norm2(), sum(Dense(g).norm2() for g in grads.values()))
    sums = packed.weighted(w)
    assert list(sums) == list(grads)
    for name, g in grads.items():
        torch.testing.assert_close(sums[name], Dense(g).weighted(w))


@pytest.mark.parametrize(
    ("channels", "size", "stride", "chosen"), [(256, 8, 1, True), (256, 16, 1, True), (256, 40, 1, False),
                                               (128, 32, 1, False), (256, 16, 2, False), (64, 4, 1, True)],
)  # fmt: skip
def test_pixels_are_taken_on_small_maps_of_many_channels(channels, size, stride, chosen):
    out = (size - 1) // stride + 1
    x, g = (torch.empty(2, 1, channels, n, n, dtype=torch.bfloat16, device="meta") for n in (size, out))
    assert Patches(x, g, torch.Size((channels, channels, 3, 3)), (stride,) * 2, (1, 1), (1, 1), 1)._small_maps == chosen


@pytest.mark.parametrize("name", ["products-not-kept", "conv-not-kept"])
def test_terms_that_cancel_are_not_taken_for_nothing(monkeypatch, name):
    """A sum in float32 cannot forget what it was added to: the norm counts in what rounding the terms leave."""
    form = fast_forms()[name]
    monkeypatch.setattr(kernels, "available", lambda *_: True)
    monkeypatch.setattr(convolution, "SMALL", 0)
    monkeypatch.setattr(linear, "CHUNK", 0)
    if isinstance(form, Outer):
        halves = Outer(torch.cat([form.a_BTI] * 2, 1), torch.cat([form.g_BTO, -form.g_BTO], 1))
        sizes = (halves.a_BTI.float().norm(dim=2) * halves.g_BTO.float().norm(dim=2)).sum(1)
        assert (halves.norm2() >= 4 * torch.finfo(torch.float32).eps * sizes.square() * 0.999).all()
        return
    sizes = form._terms().sum(1)
    patches = form._outer()
    torch.testing.assert_close(form._terms(), patches.terms(), rtol=1e-3, atol=1e-3)
    assert (
        form.norm2() >= kernels.square(*form._channels_last()) + 3.9 * torch.finfo(torch.float32).eps * sizes**2
    ).all()


def one_input(kind, dtype=torch.float64):
    """Two forms over one and the same input, as a first layer has at two points; each has a view of its own."""
    if kind == "outer":
        x = torch.randn(3, 2, 5).to(dtype)
        return [Outer(x.view(3, 2, 5), torch.randn(3, 2, 4).to(dtype)) for _ in range(2)]
    x, shape = torch.randn(3, 1, 2, 5, 5).to(dtype), torch.Size((4, 2, 3, 3))
    rest = ((1, 1), (1, 1), (1, 1), 1)
    return [Patches(x.view(x.shape), torch.randn(3, 1, 4, 5, 5).to(dtype), shape, *rest) for _ in range(2)]


@pytest.mark.parametrize("kind", ["outer", "patches"])
def test_of_one_input_output_gradients_are_added_and_nothing_is_concatenated(kind):
    torch.manual_seed(0)
    a, b = one_input(kind)
    joined = a.join(b)
    operands = [(f.a_BTI, f.g_BTO) if kind == "outer" else (f.x, f.g) for f in (joined, a)]
    assert [t.shape for t in operands[0]] == [t.shape for t in operands[1]]
    whole = a.per_sample() + b.per_sample()
    torch.testing.assert_close(joined.per_sample(), whole)
    torch.testing.assert_close(joined.norm2(), whole.flatten(1).square().sum(1))
    weights = torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(joined.weighted(weights), torch.einsum("b,b...->...", weights, whole))


@pytest.mark.parametrize("kind", ["outer", "patches"])
def test_other_inputs_of_the_same_size_are_not_taken_for_one(kind):
    """Neither a copy that was changed since, nor another part of the same storage, nor 16-bit operands."""
    torch.manual_seed(0)
    field = "a_BTI" if kind == "outer" else "x"
    a, b = one_input(kind)
    both = torch.stack([getattr(a, field), getattr(b, field) + 1])
    parts = [dataclasses.replace(form, **{field: both[k]}) for k, form in enumerate((a, b))]
    joined = parts[0].join(parts[1])
    assert getattr(joined, field).shape[1] == 2 * both.shape[2]
    torch.testing.assert_close(joined.per_sample(), parts[0].per_sample() + parts[1].per_sample())
    short = one_input(kind, torch.bfloat16)
    assert getattr(short[0].join(short[1]), field).shape[1] == 2 * getattr(short[0], field).shape[1]


@pytest.mark.parametrize("kind", ["outer", "patches"])
def test_the_same_numbers_with_another_sign_are_not_taken_for_one_input(kind):
    """`z.imag` and `z.conj().imag` share storage, offset, shape and strides; one of them is read negated."""
    torch.manual_seed(0)
    field = "a_BTI" if kind == "outer" else "x"
    a, b = one_input(kind)
    z = torch.complex(getattr(a, field), getattr(a, field).cos())
    a, b = (dataclasses.replace(form, **{field: t.imag}) for form, t in ((a, z), (b, z.conj())))
    torch.testing.assert_close(a.join(b).per_sample(), a.per_sample() + b.per_sample())


VANISHING = [(1.0, 1e-4), (1e16, 1e-20), (1e17, 1e-23), (3e17, 1e-24)]
"""Inputs and output gradients whose product is ordinary, while squares of the second have no place in float32."""


@pytest.mark.parametrize(("large", "small"), VANISHING)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("kind", ["one-position", "gram", "products", "pixels", "pixels-16-bit"])
def test_squares_that_vanish_hide_nothing_of_a_norm(monkeypatch, kind, swapped, large, small):
    """As where a normalization follows a layer: the output gradient goes down as the input goes up."""
    torch.manual_seed(0)
    large, small = (small, large) if swapped else (large, small)
    if kind.startswith("pixels"):
        x, g = large * torch.randn(2, 1, 300, 5, 4), small * torch.randn(2, 1, 280, 5, 4)
        if kind == "pixels-16-bit":
            x, g = x.bfloat16(), g.bfloat16()
            monkeypatch.setattr(kernels, "available", lambda *_: True)
        form = Patches(x, g, torch.Size((280, 300, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
        ways = [form._norm2_by_pixels(), form.norm2()]
    else:
        t, i, o = {"one-position": (1, 30, 20), "gram": (6, 30, 40), "products": (50, 7, 5)}[kind]
        form = Outer(large * torch.randn(2, t, i), small * torch.randn(2, t, o))
        ways = [form.norm2()]
        assert (form.terms() >= form.map(widen).terms() * (1 - 1e-6)).all()
    exact = form.map(widen).per_sample().flatten(1).norm(dim=1)
    for found in ways:
        assert (found.double().sqrt() >= exact * (1 - 1e-6)).all()
    if large == 1.0:
        torch.testing.assert_close(ways[0].double().sqrt(), exact, rtol=1e-4, atol=0)


def test_the_padding_of_pixels_counts():
    """A window that reaches far, as in segmentation, is padded to many times the image."""
    x, g = (torch.empty(256, 1, 256, 16, 16, dtype=torch.bfloat16, device="meta") for _ in range(2))
    shape = torch.Size((256, 256, 3, 3))
    assert Patches(x, g, shape, (1, 1), (1, 1), (1, 1), 1)._small_maps
    assert not Patches(x, g, shape, (1, 1), (18, 18), (18, 18), 1)._small_maps
