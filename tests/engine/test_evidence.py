"""What an inspection may conclude from what it saw: nothing from no evidence, and no gradient is cut on the way."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from dpscale import Clip, UnsupportedModel, scaled_sum
from dpscale.engine import inspect
from dpscale.engine.reference import reference_sum
from dpscale.engine.rules import linear as linear_rules

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
    """The first samples' losses send no gradient, so whose rows are whose cannot be seen: it must not be guessed."""
    x = torch.zeros(6, 4, dtype=torch.float64)
    x[5] = 1e3
    live = torch.tensor([False] * 3 + [True] * 3)
    with pytest.raises(UnsupportedModel, match="cannot be told which rows of"):
        scaled_sum(TimeFirst(), live_only, (x, live), Clip(C=1.0))
    found = scaled_sum(TimeFirst(), live_only, (x.flip(0), live.flip(0)), Clip(C=1.0))
    assert found.norms[1:].eq(0).all() and found.norms[0] > 0


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


def test_a_model_under_vmap_is_refused_in_words():
    with pytest.raises(UnsupportedModel, match=r"torch\.vmap"):
        check(One(lambda layer, x: torch.vmap(lambda one: layer(one))(x)))


def test_a_loop_over_samples_is_refused_for_what_it_is():
    with pytest.raises(UnsupportedModel, match="how many samples there are"):
        check(One(lambda layer, x: torch.stack([layer(one) for one in x])))


def test_samples_written_into_a_tensor_are_data():
    """Taken for a repeated parameter, the layer's gradients would be right, and formed whole for every sample."""

    def padded(layer, x):
        wide = torch.zeros(len(x), 4, dtype=x.dtype)
        wide[:, :3] = x
        return layer(wide)

    check(model := One(padded, inputs=4))
    batch = (torch.randn(5, 3, dtype=torch.float64),)
    found = inspect(model, dict(model.named_parameters()), lambda batch: model(batch[0]).sum(1), batch)
    assert [site.kind for site in found.sites] == ["rows"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_gradients_that_do_not_add_up_are_refused(dtype, monkeypatch):
    """Whatever else may go wrong with an operation: on the probe, its sum is what plain autograd says."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)
    x = torch.randn(5, 3, dtype=dtype)

    def losses(m, batch):
        return m(batch[0]).square().sum(1)

    scaled_sum(model, losses, (x,), Clip(C=1.0))
    whole = linear_rules.Outer.weighted
    monkeypatch.setattr(linear_rules.Outer, "weighted", lambda form, weights: 0.5 * whole(form, weights))
    with pytest.raises(UnsupportedModel, match=r"Parameter '(0|2)\.weight' also reaches the losses"):
        scaled_sum(type(model)(*model), losses, (x,), Clip(C=1.0))
