"""Whole models against the oracle: tied, derived and raw parameters, batches reshaped inside, points."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale

from ..seeding import seeded
from .cases import SCALINGS, check_equal, check_sample_by_sample, loss_fn

D = torch.float64


class Flattened(nn.Module):
    """(B, T, d) -> (B·T, d) -> (B, T, d): rows are positions, not samples."""

    def __init__(self, time_first=False):
        super().__init__()
        self.a, self.norm, self.b, self.time_first = nn.Linear(4, 5), nn.LayerNorm(5), nn.Linear(5, 3), time_first

    def forward(self, x):
        b, t, d = x.shape
        h = (x.transpose(0, 1) if self.time_first else x).reshape(b * t, d)
        h = torch.tanh(self.norm(self.a(h)))
        h = self.b(h)
        return h.view(t, b, 3).mean(0) if self.time_first else h.view(b, t, 3).mean(1)


class ConvPerFrame(nn.Module):
    """A video: the convolution sees B·T images."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2), nn.Linear(2 * 2 * 2, 3)

    def forward(self, x):
        b, t = x.shape[:2]
        h = self.norm(self.conv(x.flatten(0, 1)))
        return self.head(h.flatten(1)).view(b, t, 3).mean(1)


class Twice(nn.Module):
    """One layer used twice, registered after the one that runs last, called with keyword arguments, on a 4-d input."""

    def __init__(self):
        super().__init__()
        self.last, self.layer = nn.Linear(4, 3), nn.Linear(4, 4)

    def forward(self, x):
        h = torch.tanh(self.layer(input=x))
        return self.last(F.linear(weight=self.layer.weight, input=h)).mean((1, 2))


class TiedLanguageModel(nn.Module):
    """Embedding and head share their table."""

    def __init__(self):
        super().__init__()
        self.table, self.mix, self.head = (
            nn.Embedding(9, 5, padding_idx=0),
            nn.Linear(5, 5),
            nn.Linear(5, 9, bias=False),
        )
        self.head.weight = self.table.weight

    def forward(self, x):
        return self.head(torch.tanh(self.mix(self.mix(self.table(x))))).mean(1)


class RawParameters(nn.Module):
    """A scale on the root, a class token expanded over the batch, positions broadcast over it."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(5))
        self.token = nn.Parameter(torch.zeros(1, 1, 5))
        self.positions = nn.Parameter(torch.zeros(8, 5))
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = torch.cat([self.token.expand(len(x), -1, -1), self.a(x) * self.scale], 1) + self.positions
        return self.b(torch.tanh(h)).mean(1)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale, self.b = nn.Linear(4, 5), nn.Parameter(torch.ones(5)), nn.Linear(5, 3)

    def forward(self, x):
        h = F.relu(self.a(x), inplace=True)
        h = h + 0.1
        h *= self.scale
        h.add_(self.scale)
        return self.b(h)


class Scattered(nn.Module):
    """Parameters written into other tensors: into zeros, which become a weight; and into the activations."""

    def __init__(self):
        super().__init__()
        self.a, self.entries, self.first = nn.Linear(4, 4), nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        skew = x.new_zeros(4, 4)
        skew[torch.triu_indices(4, 4, 1).unbind()] = self.entries
        skew = skew - skew.mT
        series = torch.eye(4, dtype=x.dtype)
        series.add_(skew)
        series.add_(skew @ skew, alpha=0.5)
        h = torch.tanh(self.a(x)) + 0
        h[:, 1] = self.first
        h[:, 2:].mul_(self.first)
        return F.linear(h, series)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.encoder(x)).mean(1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.lstm(x)[0][:, -1])


def tokens(*shape):
    return torch.randint(0, 9, shape, generator=seeded(1))


def randn(*shape):
    return torch.randn(*shape, dtype=D, generator=seeded(1))


MODELS = {
    "flattened": (Flattened, lambda b: randn(b, 7, 4)),
    "time-first": (lambda: Flattened(time_first=True), lambda b: randn(b, 7, 4)),
    "conv-per-frame": (ConvPerFrame, lambda b: randn(b, 3, 1, 4, 4)),
    "module-used-twice": (Twice, lambda b: randn(b, 2, 3, 4)),
    "tied-language-model": (TiedLanguageModel, lambda b: tokens(b, 7)),
    "raw-parameters": (RawParameters, lambda b: randn(b, 7, 4)),
    "in-place": (InPlace, lambda b: randn(b, 4)),
    "scattered": (Scattered, lambda b: randn(b, 4)),
    "attention": (Attention, lambda b: randn(b, 5, 4)),
    "lstm": (Recurrent, lambda b: randn(b, 5, 4)),
    "weight-norm": (
        lambda: nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), nn.PReLU(), nn.Linear(5, 3)),
        lambda b: randn(b, 4),
    ),
    "transposed-conv": (
        lambda: nn.Sequential(nn.ConvTranspose1d(2, 3, 3), nn.Flatten(), nn.Linear(21, 3)),
        lambda b: randn(b, 2, 5),
    ),
    "frozen-batch-norm": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5).eval(), nn.Linear(5, 3)),
        lambda b: randn(b, 4),
    ),
}
every_model = pytest.mark.parametrize("name", MODELS)


def build(name, samples=5):
    make, inputs = MODELS[name]
    torch.manual_seed(0)
    model = make().double()
    for p in model.parameters():
        p.data = torch.randn_like(p)
    return model, (inputs(samples),)


@every_model
@pytest.mark.parametrize("rule", SCALINGS, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("samples", [1, 5])
def test_equals_oracle(name, rule, samples):
    model, batch = build(name, samples)
    check_equal(model, batch, rule)


@every_model
def test_equals_oracle_over_points_and_mask(name):
    """The combination of gradients at several weights, a negative coefficient included, is measured as one."""
    model, batch = build(name)
    points = [(c, {n: torch.randn_like(p) for n, p in model.named_parameters()}) for c in (1.0, -0.6, 0.3)]
    check_equal(model, batch, SCALINGS[3], points=points, mask=torch.tensor([True, False, True, True, False]))


@every_model
def test_an_empty_batch_is_zero(name):
    model, batch = build(name)
    out = dpscale.scaled_sum(model, loss_fn, tuple(t[:0] for t in batch), SCALINGS[0])
    assert {n: g.shape for n, g in out.grads.items()} == {n: p.shape for n, p in model.named_parameters()}
    assert all(not g.any() for g in out.grads.values())
    assert out.norms.shape == out.weights.shape == out.losses.shape == (0,)


@every_model
def test_weight_one_hot_gives_that_samples_gradient(name):
    """With an infinite clip and one sample left in, the sum is that sample's gradient."""
    model, batch = build(name)
    for i in range(5):
        mask = torch.arange(5) == i
        out = dpscale.scaled_sum(model, loss_fn, batch, dpscale.Clip(C=torch.inf), mask=mask)
        expected = torch.autograd.grad(loss_fn(model, batch)[i], list(model.parameters()), allow_unused=True)
        for (n, p), g in zip(model.named_parameters(), expected, strict=True):
            torch.testing.assert_close(out.grads[n], torch.zeros_like(p) if g is None else g)


@every_model
def test_an_infinite_clip_is_the_plain_gradient(name):
    model, batch = build(name)
    out = dpscale.scaled_sum(model, loss_fn, batch, dpscale.Clip(C=torch.inf))
    expected = torch.autograd.grad(loss_fn(model, batch).sum(), list(model.parameters()))
    for (n, _), g in zip(model.named_parameters(), expected, strict=True):
        torch.testing.assert_close(out.grads[n], g)


@every_model
def test_nothing_is_left_on_the_model(name):
    """No gradient, no hook, no attribute, no changed buffer or random state."""
    model, batch = build(name)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    before, random = set(vars(model)), torch.get_rng_state()
    dpscale.scaled_sum(model, loss_fn, batch, SCALINGS[0])
    assert torch.equal(random, torch.get_rng_state())
    assert set(vars(model)) == before
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    for k, v in model.state_dict().items():
        assert torch.equal(v, state[k])


def test_psasc_at_s_1_is_psac():
    model, batch = build("flattened")
    a = dpscale.scaled_sum(model, loss_fn, batch, dpscale.PSASC(C=0.3, s=1.0, r=0.01))
    b = dpscale.scaled_sum(model, loss_fn, batch, dpscale.PSAC(C=0.3, r=0.01))
    assert all(torch.equal(a.grads[n], b.grads[n]) for n in a.grads)


def test_a_longer_sequence_needs_no_new_loss_function():
    model, _ = build("flattened")
    for length in (7, 3, 11):
        check_equal(model, (randn(5, length, 4),), SCALINGS[0])


def test_batches_may_be_dicts_and_nested():
    model = nn.Linear(4, 3).double()
    batch = {"x": randn(5, 4), "more": [randn(5, 3), "a constant"]}

    def loss(m, b):
        return (m(b["x"]) * b["more"][0]).sum(1)

    check_equal(model, batch, SCALINGS[1], loss=loss)


def test_gradients_through_no_grad_and_detach_do_not_count():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            with torch.no_grad():
                target = self.a(x)
            return self.b(x) * target + self.a(x).detach()

    check_equal(Half().double(), (randn(5, 4),), SCALINGS[0])


def test_dropout_is_drawn_once():
    """The sum belongs to the losses that are returned: the same mask in forward and gradient."""
    model = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1)).double()
    x = randn(3, 4)
    torch.manual_seed(7)
    out = dpscale.scaled_sum(model, loss_fn, (x,), dpscale.Clip(C=torch.inf))
    torch.manual_seed(7)
    losses = loss_fn(model, (x,))
    torch.testing.assert_close(out.losses, losses.detach())
    for n, g in zip(out.grads, torch.autograd.grad(losses.sum(), list(model.parameters())), strict=True):
        torch.testing.assert_close(out.grads[n], g)


@pytest.mark.parametrize("size", [1.0, 1e4, 1e6])
@pytest.mark.parametrize("how", ["gram", "embedding", "convolution"])
def test_terms_that_cancel_cannot_hide_from_the_norm(how, size):
    """Two positions whose large gradients cancel: a norm that misses what is left would let it out unscaled."""
    for seed in range(20):
        torch.manual_seed(seed)
        a, rest = size * torch.randn(1, 1, 50), torch.randn(1, 1, 50)
        if how == "gram":
            model, x, sign = nn.Linear(50, 50), torch.cat([a, rest - a], 1), torch.ones(())
        elif how == "convolution":
            model, x, sign = nn.Conv1d(50, 50, 1), torch.cat([a, rest - a], 1).mT.contiguous(), torch.ones(())
        else:  # the same row of the table, twice with opposite gradients
            model, x = nn.Embedding(3, 50), torch.zeros(1, 3, dtype=torch.long)
            sign = torch.cat([a, rest - a, rest], 1)

        def loss(m, b, sign=sign):
            return (m(b[0]) * sign).sum((1, 2))

        for rule in SCALINGS:
            out = dpscale.scaled_sum(model, loss, (x,), rule)
            released = torch.cat([g.double().flatten() for g in out.grads.values()]).norm().item()
            assert released <= rule.bound * (1 + 1e-3)


def test_layout_found_on_one_position_is_not_taken_for_more():
    """At T = 1 batch-first and time-first look alike; at T = 7 they are not."""
    model = Flattened(time_first=True).double()
    for length in (1, 7, 1, 3):
        check_equal(model, (randn(5, length, 4),), SCALINGS[0])


def test_nothing_returned_holds_a_graph():
    model, batch = build("flattened")
    out = dpscale.scaled_sum(model, loss_fn, batch, SCALINGS[0])
    for t in (out.norms, out.weights, out.losses, out.ignored, *out.grads.values()):
        assert not t.requires_grad and t.grad_fn is None


def test_a_parameter_that_slips_by_through_a_view_is_not_lost():
    """Written into a view of a tensor, which is then used as a whole; another use of it is met as it should be."""

    class Slips(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.row = nn.Linear(4, 4), nn.Parameter(torch.ones(4))

        def forward(self, x):
            weight = torch.eye(4, dtype=x.dtype)
            weight[0].copy_(self.row)
            return F.linear(torch.tanh(self.a(x)), weight) + self.row

    check_sample_by_sample(Slips().double(), (randn(5, 4),), SCALINGS[0], why="not its gradient at parameter 'row'")


@pytest.mark.parametrize(
    "change", [lambda x: x.transpose(1, 2), lambda x: x[:, ::2], lambda x: x.permute(0, 2, 1)[:, :, 1:]]
)
def test_group_norm_of_an_input_with_gaps(change):
    torch.manual_seed(0)
    x = torch.randn(3, 4, 6).double()
    channels = change(x).shape[1]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.GroupNorm(2, channels).double()

        def forward(self, x):
            return self.norm(change(x)).square().flatten(1).sum(1)

    model = Model()
    out = dpscale.scaled_sum(model, lambda m, b: m(b[0]), (x,), dpscale.Clip(C=1e9))
    for k in range(3):
        grads = torch.autograd.grad(model(x[k : k + 1])[0], list(model.parameters()))
        torch.testing.assert_close(out.norms[k], torch.cat(grads).norm())


@pytest.mark.parametrize("C", [1.0, 1e-3, 1e-6])
def test_a_norm_whose_weight_float32_cannot_hold_adds_nothing(C):
    """A subnormal weight has few bits: rounded up it would exceed the bound. Such a sample is left out, and counted."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.tensor([[1.0, 0.0], [2.6e38, 0.0]])
    out = dpscale.scaled_sum(model, lambda m, b: m(b[0])[:, 0], (x,), dpscale.Clip(C=C))
    left_out = torch.finfo(torch.float32).tiny > C / 2.6e38
    assert int(out.ignored) == left_out
    assert out.grads["weight"].norm() <= C * (2 - left_out) * (1 + 1e-6)
    assert out.weights[0] > 0


def test_complex_parameters_are_refused_and_real_ones_in_their_place_are_not():
    class Rotates(nn.Module):
        def __init__(self, whole):
            super().__init__()
            parts = torch.randn(3, 2, dtype=torch.float64)
            self.turn = nn.Parameter(torch.view_as_complex(parts) if whole else parts)

        def forward(self, x):
            turn = self.turn if self.turn.is_complex() else torch.view_as_complex(self.turn)
            return (turn * x).abs()

    x = torch.randn(4, 3, dtype=torch.float64)
    with pytest.raises(dpscale.UnsupportedModel, match=r"'turn' is complex.*view_as_complex"):
        dpscale.scaled_sum(Rotates(True), loss_fn, (x,), SCALINGS[0])
    check_equal(Rotates(False), (x,), SCALINGS[0])
