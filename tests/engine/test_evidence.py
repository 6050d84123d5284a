"""What a look may conclude from what it saw: nothing from no evidence, and no gradient is cut on the way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscale import Clip, scaled_sum
from dpscale.engine.compat import tree_flatten
from dpscale.engine.engine import engine_of
from dpscale.engine.reference import reference_sum
from dpscale.engine.rules import generic
from dpscale.engine.rules import linear as linear_rules

from .cases import check_equal, check_sample_by_sample

torch.manual_seed(0)


class TimeFirst(nn.Module):
    """Positions repeated for a batch that was laid out time first, and flattened."""

    def __init__(self):
        super().__init__()
        self.positions = nn.Parameter(torch.randn(4, 1, dtype=torch.float64))

    def forward(self, x):
        samples, steps = x.shape
        flat = x.T.reshape(-1, 1) * self.positions.repeat_interleave(samples, 0)
        return flat.view(steps, samples).T


def live_only(model, batch):
    return torch.where(batch[1], model(batch[0]).sum(1), 0.0)


def test_rows_are_not_attributed_without_evidence():
    """No loss sends a gradient, so whose rows are whose cannot be seen: it must not be guessed, nor remembered."""
    x = torch.zeros(6, 4, dtype=torch.float64)
    x[5] = 1e3
    model, nobody = TimeFirst(), torch.zeros(6, dtype=torch.bool)
    check_sample_by_sample(model, (x, nobody), Clip(C=1.0), loss=live_only, why="cannot be told which rows of")
    live = torch.tensor([False] * 3 + [True] * 3)
    found = scaled_sum(model, live_only, (x, live), Clip(C=1.0))
    assert found.norms[:5].eq(0).all() and found.norms[5] > 0


def linear(inputs, outputs):
    return nn.Linear(inputs, outputs, dtype=torch.float64)


class Written(nn.Module):
    """Writes an activation into a tensor of its own, reads it from there, and uses it directly too."""

    def __init__(self, write):
        super().__init__()
        self.first, self.second, self.write = linear(3, 3), linear(3, 3), write

    def forward(self, x):
        h = self.first(x)
        return h + self.second(self.write(h))


def by_item(h):
    into = torch.zeros(h.shape, dtype=h.dtype)
    into[:, 0] = h[:, 1]
    into[:, 1:] = h[:, :2].tanh()
    return into


def by_view(h):
    into = torch.zeros(h.shape, dtype=h.dtype)
    into[:, :2].copy_(h[:, 1:])
    return into


def minus_infinity(h):
    into = torch.full((len(h), 5), -torch.inf, dtype=h.dtype)
    into[:, :3] = h
    return into.softmax(1)[:, :3]


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


class Cells(nn.Module):
    """A recurrent cell whose states are collected in a tensor; the last one is used directly too."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 3, dtype=torch.float64), linear(3, 2)

    def forward(self, x):
        states, h = torch.zeros(len(x), 3, 3, dtype=x.dtype), torch.zeros(len(x), 3, dtype=x.dtype)
        for t in range(3):
            h = self.cell(x[:, None, t].expand(-1, 2), h)
            states[:, t] = h
        return self.head(states).sum(1) + h[:, :2]


class Put(nn.Module):
    """Writes a parameter into a tensor with a row for each sample."""

    def __init__(self):
        super().__init__()
        self.first, self.column = linear(3, 3), nn.Parameter(torch.randn((), dtype=torch.float64))

    def forward(self, x):
        h = torch.zeros(len(x), 3, dtype=x.dtype)
        h[:, 0] = self.column
        return self.first(x) * (1 + h)


class Complex(nn.Module):
    """Real parameters in complex products."""

    def __init__(self, way):
        super().__init__()
        self.real, self.imaginary = (nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(2))
        self.way = way

    def forward(self, x):
        z, w = torch.complex(x, 2 * x), torch.complex(self.real, self.imaginary)
        if self.way == "linear":
            return F.linear(z, w).imag
        if self.way == "product":
            return (torch.fft.fft(x, dim=1) @ self.real.to(torch.complex128)).real + self.imaginary.sum()
        return F.conv1d(z[:, None], w[:, None]).imag.flatten(1)


class Constant(nn.Module):
    """A gradient by the input, used as a constant."""

    def __init__(self):
        super().__init__()
        self.first, self.second = linear(3, 3), linear(3, 2)

    def forward(self, x):
        x = x.detach().requires_grad_()
        h = self.first(x).tanh()
        (slope,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
        return self.second(h * slope.detach())


MODELS = {
    **{f.__name__: lambda f=f: Written(f) for f in (by_item, by_view, minus_infinity)},
    "cells": Cells,
    "put": Put,
    **{f"complex {way}": lambda way=way: Complex(way) for way in ("linear", "product", "convolution")},
    "constant gradient": Constant,
}


def check(model, samples=5):
    x = torch.randn(samples, 3, dtype=torch.float64)

    def losses(m, batch):
        return m(batch[0]).square().sum(1)

    rule = Clip(C=0.7)
    found = scaled_sum(model, losses, (x,), rule)
    grads, norms, _ = reference_sum(model, losses, (x,), rule)
    torch.testing.assert_close(found.norms, norms)
    assert {n: g.dtype for n, g in found.grads.items()} == {n: p.dtype for n, p in model.named_parameters()}
    torch.testing.assert_close(dict(found.grads), grads)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("samples", [1, 5])
def test_nothing_is_cut_on_the_way(name, samples):
    check(MODELS[name](), samples)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_nothing_is_cut_by_a_scripted_function():
    silu = torch.jit.script(_silu)
    check(Written(silu))


class One(nn.Module):
    """One layer, and what a function makes of it and the inputs."""

    def __init__(self, forward, inputs=3):
        super().__init__()
        self.first, self._forward = linear(inputs, 3), forward

    def forward(self, x):
        return self._forward(self.first, x)


def twice(layer, x):
    """A gradient of a gradient."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(layer(x).tanh().sum(), x, create_graph=True)
    return slope


class Square(torch.autograd.Function):
    """A product with a weight that no operation outside of it sees."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        return g @ weight.T, x.T @ g


def routed(layer, x):
    """To one of two experts, of which one does nothing."""
    out, chosen = x.clone(), x[:, 0] > 0
    out[chosen] = layer(x[chosen])
    return out


BY_SAMPLE = {
    "vmap": (lambda layer, x: torch.vmap(lambda one: layer(one))(x), "inside of torch.vmap"),
    "a loop over samples": (lambda layer, x: torch.stack([layer(one) for one in x]), "how many rows it has"),
    "sorted rows": (lambda layer, x: layer(x[x[:, 0].argsort()])[x[:, 0].argsort().argsort()], "rows"),
    "gradients of gradients": (twice, ""),
    "a custom function": (lambda layer, x: Square.apply(x, layer.weight), ""),
    "routed rows": (routed, ""),
}


@pytest.mark.parametrize("name", BY_SAMPLE)
def test_what_is_right_but_cannot_be_followed_runs_sample_by_sample(name, caplog):
    forward, why = BY_SAMPLE[name]
    torch.manual_seed(0)  # rows that go both ways where they are routed
    model, x = One(forward), torch.randn(7, 3, dtype=torch.float64)

    def losses(m, batch):
        return m(batch[0]).square().sum(1)

    for _ in range(2):
        check_sample_by_sample(model, (x,), Clip(C=0.7), loss=losses, why=why)
    (said,) = caplog.messages
    assert said.startswith("dpscale: runs sample by sample, which is exact and slow: ")


def test_rows_that_reach_a_layer_for_the_first_time_are_data():
    """Looked at when it got no row, the layer is a function of parameters alone; what it gives is not, later."""

    def routed(layer, x):
        chosen = (x[:, 0] > 0).nonzero().flatten()
        return x.index_copy(0, chosen, layer(x[chosen])) + layer.bias

    model, x = One(routed), -torch.rand(6, 3, dtype=torch.float64)

    def losses(m, batch):
        return m(batch[0]).square().sum(1)

    for _ in range(4):  # the next sum is none before which a look is due anyway
        check_equal(model, (x,), Clip(C=0.7), loss=losses)
    x[0] *= -1
    check_equal(model, (x,), Clip(C=0.7), loss=losses, followed=False)


def test_samples_written_into_a_tensor_are_data():
    """Taken for a repeated parameter, the layer's gradients would be right, and formed whole for every sample."""

    def padded(layer, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        wide[:, :3] = x
        return layer(wide)

    check(model := One(padded, inputs=4))
    sites = [site for calls in engine_of(model).sites._exact.values() for site in calls.values()]
    assert [(site.role, type(site.rule).__name__) for site in sites] == [("rows", "Linear")]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_that_are_not_autograds_are_not_used(dtype, monkeypatch):
    """Whatever else may go wrong with an operation: on the rows that are looked at, it must be what autograd says."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(5, 3, dtype=dtype)

    def losses(m, batch):
        return m(batch[0]).square().sum(1)

    expected = scaled_sum(model, losses, (x,), Clip(C=1.0))
    whole = linear_rules.Outer.weighted
    monkeypatch.setattr(linear_rules.Outer, "weighted", lambda form, weights: 0.5 * whole(form, weights))
    other = type(model)(*model)
    found = scaled_sum(other, losses, (x,), Clip(C=1.0))
    (finding,) = engine_of(other)._obstacles.values()
    assert "what is credited to a row is not its gradient at parameter" in finding.obstacle
    torch.testing.assert_close(found.grads, expected.grads, rtol=0.02, atol=0.02)


def test_indices_of_a_whole_batch_are_tried_on_one_sample_first():
    """On a GPU one that is out of range would end the process."""
    x, layer, chosen = torch.randn(6, 3), torch.randn(2, 3), torch.tensor([1, 4])
    flat, spec = tree_flatten(((x, 0, chosen, layer), {}))
    with pytest.raises(IndexError):
        generic._try_indices(torch.index_copy, flat, spec, {0: x.unsqueeze(1)})
    generic._try_indices(torch.add, *tree_flatten(((x, layer[0]), {})), {0: x})
