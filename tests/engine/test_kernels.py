"""CUDA's kernels against their plain twins, and the twins against autograd. Without a GPU the first are skipped."""

import pytest
import torch

import dpscale
from dpscale.engine import kernels
from dpscale.engine.kernels import Window
from dpscale.engine.rules.linear import Outer

on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are CUDA's")

WINDOWS = {
    "linear": (1, 70, 1, 70, Window()),
    "same": (9, 8, 9, 8, Window((3, 3), padding=(1, 1))),
    "strided": (9, 8, 5, 8, Window((3, 1), (2, 1), (1, 0))),
    "dilated": (12, 20, 8, 18, Window((3, 2), (1, 1), (0, 0), (2, 2))),
    "point": (6, 7, 6, 7, Window((1, 1))),
}


def operands(name, channels=21, outputs=18, samples=9, dtype=torch.float64, device="cpu"):
    height, width, rows, columns, window = WINDOWS[name]
    x = torch.randn(samples, height, width, channels, device=device).to(dtype)
    return x, torch.randn(samples, rows, columns, outputs, device=device).to(dtype), window


@pytest.mark.parametrize("name", WINDOWS)
def test_products_are_the_weight_gradients_of_a_convolution(name):
    x, g, window = operands(name)
    weight = torch.zeros(18, 21, *window.kernel, dtype=x.dtype, device=x.device, requires_grad=True)
    found = kernels.products_plain(x, g, window).unflatten(1, window.kernel).permute(0, 3, 4, 1, 2)
    for k in range(len(x)):
        image = x[k].permute(2, 0, 1).unsqueeze(0)
        out = torch.conv2d(image, weight, None, window.stride, window.padding, window.dilation)
        (expected,) = torch.autograd.grad(out, weight, g[k].permute(2, 0, 1).unsqueeze(0))
        torch.testing.assert_close(found[k], expected)


def test_twin_is_the_gram_identity():
    a, g = torch.randn(3, 5, 4).double(), torch.randn(3, 5, 6).double()
    squares, sizes = kernels.gram_norm2_plain(a, g)
    torch.testing.assert_close(squares, torch.einsum("bto,bti->boi", g, a).flatten(1).square().sum(1))
    torch.testing.assert_close(sizes, a.norm(dim=2) * g.norm(dim=2))


@on_cuda
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("shape", [(3, 40, 33, 17), (2, 130, 64, 50), (1, 2, 5, 300), (3, 300, 96, 1030)])
def test_gram_agrees_with_its_twin(monkeypatch, shape, long):
    samples, t, i, o = shape
    if long:
        monkeypatch.setattr(kernels, "LONG", 0)
    a = torch.randn(samples, t, i, device="cuda").bfloat16()
    g = torch.randn(samples, o, t, device="cuda").bfloat16().mT
    ours, twin = kernels.gram_norm2(a, g), kernels.gram_norm2_plain(a.double(), g.double())
    for x, y in zip(ours, twin, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_inner_products_of_short_numbers_are_not_rounded_to_them(device, dtype):
    torch.manual_seed(0)
    t = torch.randn(3, 64, 20, device=device).to(dtype).mT  # (B, T, C), as a channels-first image comes
    found = kernels.gram(t)
    assert found.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(found.double(), torch.bmm(t.double(), t.double().mT), rtol=1e-6, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_cuda)])
def test_weights_of_any_sign_count(device):
    """A look at where gradients arrive weighs them by some that are negative."""
    x, g, window = operands("same", samples=3, dtype=torch.bfloat16, device=device)
    weights = torch.tensor([1.0, -0.75, 0.5], device=device)
    expected = torch.einsum("b,btoc->toc", weights.double(), kernels.products_plain(x.double(), g.double(), window))
    assert (kernels.weigh(x, g, weights, window).double() - expected).norm() <= 1e-5 * expected.norm()


@on_cuda
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", [(21, 18), (64, 48), (130, 144)])
@pytest.mark.parametrize("name", WINDOWS)
def test_products_agree_with_their_twin(name, sizes, dtype):
    x, g, window = operands(name, *sizes, samples=40, dtype=dtype, device="cuda")
    exact = kernels.products_plain(x.double(), g.double(), window)
    weights = torch.rand(40, device="cuda")
    weights[3] = 0
    torch.testing.assert_close(
        kernels.square(x, g, window).double(), exact.square().sum((1, 2, 3)), rtol=1e-5, atol=1e-4
    )
    kept = kernels.keep(x, g, window)
    assert kept.dtype == dtype
    assert (kept.double() - exact).norm() <= 2**-8 * exact.norm()
    summed = torch.einsum("b,btoc->toc", weights.double(), exact)
    assert (kernels.weigh(x, g, weights, window).double() - summed).norm() <= 1e-6 * summed.norm()


@on_cuda
@pytest.mark.parametrize("shifted", [False, True], ids=["in-place", "shifted"])
@pytest.mark.parametrize(
    "shape", [(5, 256, 384, 1168), (64, 197, 400, 136), (1, 40, 64, 72), (3, 64, 768, 48), (2, 1, 64, 64)]
)
def test_weighted_sums_of_rows_leave_out_what_has_no_weight(shape, shifted):
    """Rows that begin at odd places are read another way than those that blocks can be fetched of."""
    samples, positions, channels, outputs = shape
    x, g = (torch.randn(samples, positions, n + shifted, device="cuda").bfloat16() for n in (channels, outputs))
    x, g = (t[..., int(shifted) :].unsqueeze(1) for t in (x, g))
    assert kernels._fetched(x) == kernels._fetched(g) == (not shifted)
    weights = torch.rand(samples, device="cuda")
    expected = torch.einsum("b,bto,btc->oc", weights.double(), g[:, 0].double(), x[:, 0].double())
    found = kernels.weigh(x, g, weights)[0]
    assert (found.double() - expected).norm() <= 1e-6 * expected.norm()
    assert torch.equal(found, kernels.weigh(x, g, weights)[0])
    weights[-1] = 0
    x[-1, :, -1], g[-1, :, 0] = torch.inf, torch.nan
    expected = torch.einsum("b,bto,btc->oc", weights[:-1].double(), g[:-1, 0].double(), x[:-1, 0].double())
    assert (kernels.weigh(x, g, weights)[0].double() - expected).norm() <= 1e-6 * expected.norm()


@on_cuda
def test_weighted_products_are_bounded_by_the_squares():
    """The released part of one sample is exactly weight times product: no rounding of w·g to 16 bits comes between."""
    x, g, window = operands("same", 64, 64, samples=1, dtype=torch.bfloat16, device="cuda")
    norm = kernels.square(x, g, window).sqrt()
    for scale in (1.0, 0.37, 1e-3, 7.7):
        released = kernels.weigh(x, g, scale / norm, window).norm()
        assert released <= scale * (1 + 1e-6)
        assert released >= scale * (1 - 1e-6)


@on_cuda
def test_a_sample_whose_terms_cancel_does_not_disturb_the_others():
    """Rounding at the size of its terms, times its weight, stays far below the bound."""
    torch.manual_seed(0)
    a = torch.randn(33, 128, 32, device="cuda").bfloat16()
    g = torch.randn(33, 128, 32, device="cuda").bfloat16()
    a[-1, 64:], g[-1, 64:] = a[-1, :64], -g[-1, :64]
    a[-1] *= 100
    form, rule = Outer(a, g), dpscale.Clip(C=1.0)
    weights = rule.weight(form.norm2().sqrt())
    without = weights.clone()
    without[-1] = 0
    both = [kernels.weigh(a.unsqueeze(1), g.unsqueeze(1), w) for w in (weights, without)]
    assert (both[0] - both[1]).norm() <= 1e-2


@on_cuda
def test_extreme_weights_leave_the_sum_finite():
    x, g, window = operands("linear", 32, 32, samples=3, dtype=torch.bfloat16, device="cuda")
    for weights in ([1.0, 1e-38, 1.0], [1e-38, 1.0, 1e6], [1e10, 1e-25, 1e10]):
        w = torch.tensor(weights, device="cuda")
        expected = torch.einsum("b,btoc->toc", w.double(), kernels.products_plain(x.double(), g.double(), window))
        assert (kernels.weigh(x, g, w, window).double() - expected).norm() <= 1e-5 * expected.norm()
