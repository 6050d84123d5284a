"""Functions of parameters alone, and parameters repeated once per sample, against the oracle; and what they cost."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale
from dpscale.engine.engine import engine_of
from dpscale.engine.rules.pulled import Pulled
from dpscale.engine.tape import tape

from ..seeding import seeded
from .cases import SCALINGS, Raw, check_equal, traced
from .test_forms import Largest


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=seeded(1))


def tied(x, table):
    """A head by the transposed table, an embedding by the table itself."""
    h = F.embedding((x[..., 0].abs() * 3).long() % 6, table) + x.mean(-1, keepdim=True)
    return torch.tanh(h) @ table.t()


def changed_through_a_view(x, w):
    """What is used was made by a clone, and then written by way of its transpose."""
    copy = w.clone()
    copy.t().mul_(w.detach().t() + 2)
    return F.linear(x, copy)


VIEWS = {  # a function of x (B, 3, 4) and of parameters
    "t": (lambda x, w: x @ w.t(), (5, 4)),
    "transpose": (lambda x, w: x @ w.transpose(-1, 0), (5, 4)),
    "permute": (lambda x, w: x @ w.permute(1, 0), (5, 4)),
    "no-permutation": (lambda x, w: x @ w.permute(0, 1), (4, 5)),
    "mT": (lambda x, w: F.linear(x, w.mT), (4, 5)),
    "contiguous": (lambda x, w: F.linear(x, w.T.contiguous()), (4, 5)),
    "same": (lambda x, w: F.linear(x, w.contiguous()), (5, 4)),
    "view": (lambda x, w: F.linear(x, w.view(5, 4)), (20,)),
    "reshape-of-transposed": (lambda x, w: F.linear(x, w.t().reshape(5, 4)), (10, 2)),
    "flatten": (lambda x, w: x.flatten(1) + w.flatten(), (3, 4)),
    "convolution": (lambda x, w: F.conv1d(x, w.unsqueeze(-1)), (2, 3)),
    "slice": (lambda x, w: x + w[:3], (7, 4)),
    "two-slices": (lambda x, w: x * w[:3] + x * w[3:6], (7, 4)),
    "select": (lambda x, w: x * w[1], (2, 3, 4)),
    "flip": (lambda x, w: F.linear(x, w.flip(0)), (5, 4)),
    "squeeze": (lambda x, w: F.linear(x, w.squeeze(0)), (1, 5, 4)),
    "chunks": (lambda x, w: sum(k * F.linear(x, part) for k, part in enumerate(w.chunk(3))), (6, 4)),
    "unbind": (lambda x, w: sum(F.linear(x, part).sin() for part in w.unbind(1)), (5, 3, 4)),
    "split-and-t": (lambda x, w: torch.cat([x @ part.t() for part in w.split([1, 4])], -1), (5, 4)),
    "piece-two-ways": (lambda x, w: F.linear(x, w.chunk(2)[0]) + x * w.chunk(2)[0].view(16)[:4], (8, 4)),
    "view-and-itself": (lambda x, w: (x @ w.t()) @ w, (4, 4)),
    "two-ways": (lambda x, w: F.linear(x, w.view(5, 4)) + F.linear(x, w.view(4, 5).t()), (20,)),
    "twice": (lambda x, w: x @ w.t() + torch.tanh(x) @ w.t(), (5, 4)),
    "tied": (tied, (6, 4)),
    "movedim": (lambda x, w: x @ w.movedim(-1, -2), (5, 4)),
    "swapaxes": (lambda x, w: x @ torch.swapaxes(w, 1, 1), (4, 4)),
    "square-permute": (lambda x, w: x @ w.permute(dims=(-1, 0)), (4, 4)),
    "square-movedim": (lambda x, w: x @ torch.movedim(w, (0, 1), (1, 0)), (4, 4)),
    "adjoint": (lambda x, w: x @ w.mH @ w.H, (4, 4)),
    "view-as": (lambda x, w: x * w.view_as(torch.empty(3, 4)), (12,)),
    "unflatten": (lambda x, w: F.linear(x, w.unflatten(0, (-1, 4))), (20,)),
    "keywords": (lambda x, w: x @ torch.transpose(dim0=0, dim1=1, input=w), (5, 4)),
    "diagonal": (lambda x, w: x * w.diagonal(), (4, 5)),
    "roll": (lambda x, w: F.linear(x, w.roll(1, 0)), (5, 4)),
    "narrow": (lambda x, w: x * w.narrow(0, 1, 3), (5, 4)),
    "overlapping-slices": (lambda x, w: F.linear(x, w[:5]) + F.linear(x.sin(), w[1:6]), (7, 4)),
    "three-slices": (lambda x, w: F.linear(x, w[:2]) + F.linear(x.sin(), w[2:4]) * F.linear(x, w[-2:]), (6, 4)),
    "interleaved": (lambda x, w: F.linear(x, w[::2]) + F.linear(x.sin(), w[1::2]), (6, 4)),
    "numbered": (
        lambda x, w: F.linear(x, w[0]) + F.linear(x.sin(), w[-1]) + F.linear(x.cos(), w[..., 1, :, :]),
        (3, 5, 4),
    ),
    "one-name": (
        lambda x, w: x @ w.transpose(0, 1) @ torch.transpose(w.sin(), 1, 0) @ torch.transpose(w, 0, 1),
        (4, 4),
    ),
    "pieces-of-a-transpose": (lambda x, w: sum(F.linear(x, part).sin() for part in w.t().split(2)), (4, 6)),
    "tensor-split": (lambda x, w: sum(F.linear(x, part).sum(-1) for part in w.tensor_split((1, 3))), (6, 4)),
    "changed-through-a-view": (changed_through_a_view, (5, 4)),
    "taken-twice": (lambda x, w: x * w[[0, 2, 0]], (5, 4)),
    "masked": (lambda x, w: x * w[torch.tensor([True, False, True, True])], (4, 4)),
    "not-an-isometry": (lambda x, w: F.linear(x, w * w), (5, 4)),
    "both": (lambda x, w: F.linear(x, (w * w).t()) + F.linear(x, w.t()), (4, 5)),
    "positions": (lambda x, w: x + F.embedding(torch.arange(3), w), (7, 4)),
    "positions-twice": (lambda x, w: x * F.embedding(torch.tensor([2, 0, 2]), w, padding_idx=0), (7, 4)),
    "positions-of-a-view": (lambda x, w: x + F.embedding(torch.arange(3), w.t()), (4, 7)),
    "positions-from-the-end": (lambda x, w: x + F.embedding(torch.arange(3), w, padding_idx=-5), (7, 4)),
    "positions-unsqueezed": (lambda x, w: x + F.embedding(torch.arange(3), w).unsqueeze(0), (7, 4)),
    "positions-cut": (lambda x, w: x * F.embedding(torch.tensor([1, 2, 1, 4]), w)[None, :3], (7, 4)),
    "expand": (lambda x, w: torch.cat([x, w.expand(len(x), -1, -1)], 1), (1, 2, 4)),
    "expand-new": (lambda x, w: torch.cat([x, w.expand(len(x), 2, -1)], 1), (1, 4)),
    "expand-view": (lambda x, w: torch.cat([x, w[None, None].expand(len(x), 2, -1)], 1), (4,)),
    "expand-as": (lambda x, w: x * w.expand_as(x), (3, 1)),
    "repeat": (lambda x, w: torch.cat([x, w.repeat(len(x), 1, 1)], 1), (1, 2, 4)),
    "repeat-tiles": (lambda x, w: torch.cat([x, w.repeat(len(x), 2, 2)], 1), (1, 3, 2)),
    "tile": (lambda x, w: torch.cat([x, torch.tile(w, (len(x), 1, 2))], 1), (2, 2)),
    "broadcast-to": (lambda x, w: x * torch.broadcast_to(w, x.shape), (3, 1)),
    "repeat-new": (lambda x, w: torch.cat([x, w.repeat(len(x), 1, 1)], 1), (2, 4)),
    "repeat-rows": (lambda x, w: torch.cat([x, w.repeat(len(x), 1).view(len(x), 2, 4)], 1), (2, 4)),
    "expand-product": (lambda x, w: torch.cat([x, (w * w).expand(len(x), -1, -1)], 1), (1, 2, 4)),
    "stacked": (lambda x, w: torch.cat([x, torch.stack([w] * len(x))], 1), (2, 4)),
    "expanded-positions": (lambda x, w: x + F.embedding(torch.arange(3).expand(len(x), 3), w), (7, 4)),
    "expanded-positions-twice": (
        lambda x, w: x * F.embedding(torch.tensor([2, 0, 2]).repeat(len(x), 1), w, padding_idx=0),
        (7, 4),
    ),
    "time-first": (lambda x, w: x + F.embedding(torch.arange(3)[:, None].expand(3, len(x)), w).transpose(0, 1), (7, 4)),
}
FORMED = {
    "not-an-isometry", "both", "expand-product", "one-name", "stacked", "repeat-rows", "changed-through-a-view",
    "taken-twice", "masked",
}  # fmt: skip
"""Those for which B gradients must go through autograd."""


def build(name):
    operation, shape = VIEWS[name]
    model = Raw(operation, shape)
    model.p[0].data = randn(*shape)
    return model


def loss_fn(model, batch):
    return torch.sin(model(batch[0]) + 0.3).flatten(1).sum(1)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("samples", [1, 5])
def test_equals_oracle(name, samples):
    model = build(name)
    points = [(c, {"p.0": c * model.p[0].detach()}) for c in (1.0, -0.6)]
    for rule in SCALINGS:
        check_equal(model, (randn(samples, 3, 4),), rule, loss=loss_fn)
    check_equal(model, (randn(samples, 3, 4),), rule, loss=loss_fn, points=points)


@pytest.mark.parametrize("name", VIEWS)
def test_no_gradients_go_through_autograd_where_norms_are_kept(name, monkeypatch):
    """The cases above test the short way, not the long one behind it."""
    formed = []
    combine = sys.modules["dpscale.engine.combine"]  # the package has a function of that name
    chained = combine._chained
    monkeypatch.setattr(combine, "_chained", lambda c, through: formed.extend(through) or chained(c, through))
    model = build(name)
    dpscale.scaled_sum(model, loss_fn, (randn(5, 3, 4),), SCALINGS[0])
    assert not engine_of(model)._obstacles
    assert bool(formed) == (name in FORMED)


@pytest.mark.parametrize("name", ["chunks", "unbind", "three-slices", "numbered", "pieces-of-a-transpose"])
def test_pieces_without_common_entries_are_not_formed(name, monkeypatch):
    """Their inner product is 0, so that their squared norms add up."""
    monkeypatch.setattr(Pulled, "per_sample", lambda self: pytest.fail("B gradients were formed"))
    dpscale.scaled_sum(build(name), loss_fn, (randn(5, 3, 4),), SCALINGS[0])


@pytest.mark.parametrize("name", VIEWS)
def test_the_way_back_can_be_traced(name):
    model = build(name)
    *grads, norms = traced(model, loss_fn, (randn(3, 3, 4),), SCALINGS[0])(randn(3, 3, 4) + 1)
    expected = dpscale.scaled_sum(model, loss_fn, (randn(3, 3, 4) + 1,), SCALINGS[0])
    torch.testing.assert_close(norms, expected.norms)
    torch.testing.assert_close(grads[0], expected.grads["p.0"])


def test_a_cast_does_not_round_the_sum():
    """A parameter in float32 used in bfloat16: what is released is the float32 sum."""
    model = nn.Linear(4, 3).float()
    x = randn(5, 4).bfloat16()

    def loss(m, batch):
        return F.linear(batch[0], m.weight.bfloat16().flip(0), m.bias.bfloat16()).float().square().sum(1)

    out = dpscale.scaled_sum(model, loss, (x,), SCALINGS[0])
    assert out.grads["weight"].dtype == torch.float32
    assert not torch.equal(out.grads["weight"], out.grads["weight"].bfloat16().float())


@pytest.mark.parametrize("name", ["t", "view", "expand", "repeat", "expanded-positions", "positions", "tied"])
def test_no_batch_of_parameters_is_made(name):
    """B copies of the parameter, or B of a tensor that has B rows, would be far larger than anything here."""
    model = build(name)
    wide = {"expand": (1, 1, 64), "repeat": (1, 1, 64), "view": (64 * 64,)}.get(name, (64, 64))
    model.p[0] = nn.Parameter(torch.randn(wide, dtype=torch.float64))
    if name == "view":
        model.operation = lambda x, w: F.linear(x, w.view(64, 64))
    if name == "tied":
        model.operation = lambda x, w: F.embedding((x[..., 0] * 9).long() % 64, w) @ w.t()
    x = randn(16, 3, 64)
    dpscale.scaled_sum(model, loss_fn, (x,), SCALINGS[0])  # a look may make what it likes
    with Largest() as largest:
        dpscale.scaled_sum(model, loss_fn, (x,), SCALINGS[0])
    assert largest.numbers <= max(2 * x.numel(), model.p[0].numel())


def test_trap_22_cost_is_linear_in_the_number_of_parameters(monkeypatch):
    """Twice the parameters, twice the operations and the looks at arguments."""

    class Many(nn.Module):
        def __init__(self, count):
            super().__init__()
            self.scales = nn.ParameterList(torch.ones(1, dtype=torch.float64) for _ in range(count))

        def forward(self, x):
            for scale in self.scales:
                x = x * scale
            return x

    class Count(Largest):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.numbers += 1
            return func(*args, **(kwargs or {}))

    looks = []
    tensors_in = tape.tensors_in
    monkeypatch.setattr(tape, "tensors_in", lambda a, k: looks.append(1) or tensors_in(a, k))
    costs = []
    for count in (100, 200, 400):
        model = Many(count)
        dpscale.scaled_sum(model, loss_fn, (randn(2, 1),), SCALINGS[0])
        looks.clear()
        with Count() as operations:
            dpscale.scaled_sum(model, loss_fn, (randn(2, 1),), SCALINGS[0])
        costs.append((operations.numbers, len(looks)))
    (a, la), (b, lb), (c, lc) = costs
    assert abs((c - b) / (b - a) - 2) < 0.01 and abs((lc - lb) / (lb - la) - 2) < 0.01
