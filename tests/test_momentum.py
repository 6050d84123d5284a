"""Algorithms 2 and 3, DiSK and views of a sample against loops that say literally what they are."""

import logging
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.engine import Engine
from dpscale.momentum import MOMENTA

N, BATCH = 12, 6


class Transformer(nn.Module):
    """One block, with the head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x):
        return F.linear(self.block(self.table(x)), self.table.weight)


class Raw(nn.Module):
    """Parameters used in plain arithmetic."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.rand(5)), nn.Parameter(torch.rand(3, 5))

    def forward(self, x):
        return ((x.unsqueeze(1) * self.scale + self.shift).tanh() * self.scale).sum(2)


def cnn():
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Tanh(), nn.Conv2d(4, 3, 3, stride=2), nn.Flatten(),
        nn.Linear(12, 3),
    )  # fmt: skip


MODELS = {
    "cnn": (cnn, lambda: (torch.randn(N, 2, 5, 5).double(), torch.randint(0, 3, (N,)))),
    "tied-transformer": (Transformer, lambda: (torch.randint(0, 7, (N, 4)), torch.randint(0, 7, (N, 4)))),
    "raw": (Raw, lambda: (torch.randn(N, 5).double(), torch.randint(0, 3, (N,)))),
}
every_model = pytest.mark.parametrize("name", MODELS)
RULES = [
    dpscale.PSASC(C=0.7, s=0.6, r=0.05),
    dpscale.Clip(C=0.3),
    dpscale.AutoS(C=1.0, r=0.1),
    dpscale.PSAC(C=0.5, r=0.1),
]


def losses(model, batch):
    out = model(batch[0])
    each = F.cross_entropy(out.flatten(0, -2), batch[1].flatten(), reduction="none")
    return each.view(len(out), -1).mean(1)


def made(name):
    torch.manual_seed(0)
    make, data = MODELS[name]
    return make().double(), TensorDataset(*data())


def gradient(model, values, sample):
    """One sample's gradient at given weights, as one vector."""

    def loss(values):
        return losses(lambda x: torch.func.functional_call(model, values, (x,)), [t.unsqueeze(0) for t in sample])[0]

    grads = torch.func.grad(loss)(values)
    return torch.cat([grads[n].flatten() for n in values])


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def unflatten(model, flat):
    parts = flat.split([p.numel() for p in model.parameters()])
    return {n: part.view(p.shape) for (n, p), part in zip(model.named_parameters(), parts, strict=True)}


def run(name, momentum, *, rule=RULES[0], sampling=None, steps=6, sigma=None, micro_batch=None, rate=0.3, **options):
    """Train; return the weights after every step, the indices of every batch and the released noise-free model."""
    model, data = made(name)
    drawn = []
    data = TensorDataset(*data.tensors, torch.arange(N))
    noise = {"unsafe_no_noise": True} if sigma is None else {"noise_multiplier": sigma}
    plan = dpscale.Plan(
        scaling=rule, sampling=sampling or dpscale.Poisson(size=N, batch=BATCH), steps=steps, momentum=momentum, **noise
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    private = dpscale.privatize(model, optimizer, plan, seed=3, micro_batch=micro_batch, **options)
    weights = [vector(model)]
    for *batch, index in private.batches(data):
        report = private.step(tuple(batch), losses)
        drawn.append(index[report.mask].tolist())
        weights.append(vector(model))
    return weights, drawn, plan


def literally(name, momentum, drawn, plan, rate=0.3):
    """Algorithm 3 as SPEC has it: every sample, every point, one by one."""
    model, data = made(name)
    trajectory, outer = [vector(model)], 0.0
    for k, batch in enumerate(drawn):
        total = torch.zeros_like(trajectory[0])
        for i in batch:
            ages = range(min(k, momentum.K0) + 1)
            whole = sum(momentum.gamma0**a for a in ages) if momentum.normalize else 1
            m = sum(
                momentum.gamma0**a / whole * gradient(model, unflatten(model, trajectory[k - a]), data[i]) for a in ages
            )
            total += plan.scaling.weight(m.norm()) * m
        outer = (1 - momentum.gamma1) * outer + total
        trajectory.append(trajectory[-1] - rate / plan.expected_batch * outer)
    return trajectory


def assert_same(a, b, rtol=1e-9):
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=rtol, atol=1e-12)


@every_model
@pytest.mark.parametrize("K0", [0, 1, 3])
def test_algorithm_3_is_its_literal_loop(name, K0):
    momentum = dpscale.InnerOuter(K0=K0, gamma0=0.6, gamma1=0.3)
    weights, drawn, plan = run(name, momentum)
    assert_same(weights, literally(name, momentum, drawn, plan))


@pytest.mark.parametrize("rule", RULES, ids=lambda r: type(r).__name__)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_algorithm_3_with_every_rule_normalized_and_in_micro_batches(rule, micro_batch):
    momentum = dpscale.InnerOuter(K0=2, gamma0=0.8, gamma1=0.5, normalize=True)
    weights, drawn, plan = run("cnn", momentum, rule=rule, micro_batch=micro_batch, steps=5)
    assert_same(weights, literally("cnn", momentum, drawn, plan))


@pytest.mark.parametrize(
    "sampling",
    [dpscale.FixedSize(size=N, batch=BATCH), dpscale.FullBatch(size=N), dpscale.Shuffled(size=N, batch=BATCH)],
    ids=lambda s: type(s).__name__,
)
def test_algorithm_3_with_every_sampler(sampling):
    momentum = dpscale.InnerOuter(K0=1, gamma0=0.8, gamma1=0.5)
    weights, drawn, plan = run("raw", momentum, sampling=sampling, steps=4)
    assert_same(weights, literally("raw", momentum, drawn, plan))


def test_without_past_points_it_is_the_heavy_ball():
    inner, *_ = run("cnn", dpscale.InnerOuter(K0=0, gamma0=0.7, gamma1=0.2))
    ball, *_ = run("cnn", dpscale.HeavyBall(gamma1=0.2))
    plain, *_ = run("cnn", None)
    forgetful, *_ = run("cnn", dpscale.HeavyBall(gamma1=1.0))
    assert_same(inner, ball)
    assert_same(plain, forgetful)
    assert not torch.allclose(ball[-1], plain[-1])


@every_model
def test_compiled_points_are_the_eager_ones(monkeypatch, name):
    """One graph for all points, from the first step on, when most of them do not count yet."""
    made = []

    def trace(graph, inputs):
        made.append(graph)
        return graph

    momentum = dpscale.InnerOuter(K0=2, gamma0=0.6, gamma1=0.3)
    eager, *_ = run(name, momentum)
    monkeypatch.setattr("dpscale.training.Engine", lambda model, compile, **rest: Engine(model, compile=trace, **rest))
    traced, *_ = run(name, momentum, compile=True)
    assert len(made) == 1
    assert_same(eager, traced)


def ema_literally(name, gamma, plan, steps, rate=0.3):
    """Algorithm 2 as SPEC has it."""
    model, data = made(name)
    trajectory, m = [vector(model)], {}
    for _ in range(steps):
        total = torch.zeros_like(trajectory[0])
        for i in range(N):
            g = gradient(model, unflatten(model, trajectory[-1]), data[i])
            m[i] = gamma * g + (1 - gamma) * m[i] if i in m else g
            total += plan.scaling.weight(m[i].norm()) * m[i]
        trajectory.append(trajectory[-1] - rate / N * total)
    return trajectory


@pytest.mark.parametrize("micro_batch", [None, 5])
@pytest.mark.parametrize("where", ["memory", "file", "weights"])
def test_algorithm_2_is_its_literal_loop(tmp_path, caplog, where, micro_batch):
    options = {"directory": str(tmp_path)} if where == "file" else {}
    if where == "weights":
        options = {"keep": "weights", "tolerance": 1e-12}
    momentum = dpscale.PerSampleEMA(gamma=0.7, **options)
    steps = 20 if where != "weights" else 8
    with caplog.at_level(logging.WARNING, "dpscale"):
        weights, _, plan = run(
            "raw", momentum, sampling=dpscale.FullBatch(size=N), steps=steps, micro_batch=micro_batch
        )
    assert_same(weights, ema_literally("raw", 0.7, plan, steps))
    said = [r.getMessage() for r in caplog.records]
    assert any("PerSampleEMA keeps" in text and "20 parameters" in text for text in said) == (where != "weights")
    assert any(str(tmp_path) in text for text in said) == (where == "file")
    assert not list(tmp_path.iterdir())  # the file has no name: it goes with the run, and no other run finds it


def test_a_window_of_weights_is_exact_to_its_tolerance():
    exact = ema_literally("raw", 0.5, run("raw", None, steps=1)[2], 12)
    for tolerance in (1e-1, 1e-2):
        momentum = dpscale.PerSampleEMA(gamma=0.5, keep="weights", tolerance=tolerance)
        assert momentum.evaluations == math.ceil(math.log2(1 / tolerance))
        weights, *_ = run("raw", momentum, sampling=dpscale.FullBatch(size=N), steps=12)
        error = (weights[-1] - exact[-1]).norm() / (exact[-1] - exact[0]).norm()
        assert tolerance / 1e4 < error < 3 * tolerance


def test_disk_is_its_literal_loop():
    kappa, gamma, rate = 0.6, 0.4, 0.3
    weights, drawn, plan = run("raw", dpscale.DiSK(kappa=kappa, gamma=gamma))
    model, data = made("raw")
    a = (1 - kappa) / (kappa * gamma)
    assert 1 - a < 0
    now, last, outer = vector(model), vector(model), 0.0
    for k, batch in enumerate(drawn):
        total = torch.zeros_like(now)
        for i in batch:
            ahead = unflatten(model, now + gamma * (now - last))
            m = a * gradient(model, ahead, data[i]) + (1 - a) * gradient(model, unflatten(model, now), data[i])
            total += plan.scaling.weight(m.norm()) * m
        outer = (1 - kappa) * outer + kappa * total
        now, last = now - rate / plan.expected_batch * outer, now
        torch.testing.assert_close(weights[k + 1], now, rtol=1e-9, atol=1e-12)


def test_noise_enters_once_and_outer_momentum_carries_it():
    """With a gradient of zero everything is noise: M_k = Σ (1-γ1)^(k-l) n_l, each n_l drawn once."""

    def trained(momentum, sigma):
        model = nn.Linear(40, 40, bias=False)
        nn.init.zeros_(model.weight)
        rule = dpscale.Clip(C=0.5)
        plan = dpscale.Plan(
            scaling=rule, sampling=dpscale.Poisson(size=N, batch=BATCH), steps=3, momentum=momentum,
            noise_multiplier=sigma,
        )  # fmt: skip
        private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=1.0), plan, seed=1)
        seen = [model.weight.detach().clone()]
        for (x,) in private.batches(TensorDataset(torch.zeros(N, 40))):
            private.step((x,), lambda m, b: m(b[0]).sum(1))
            seen.append(model.weight.detach().clone())
        return torch.stack(seen).diff(dim=0) * -BATCH

    noise = trained(None, 2.0)
    assert abs(noise.std() - 1.0) < 0.05
    for momentum in (dpscale.HeavyBall(gamma1=0.25), dpscale.InnerOuter(K0=2, gamma0=0.5, gamma1=0.25)):
        carried = trained(momentum, 2.0)
        expected = [noise[0], 0.75 * noise[0] + noise[1], 0.5625 * noise[0] + 0.75 * noise[1] + noise[2]]
        torch.testing.assert_close(carried, torch.stack(expected), rtol=1e-4, atol=1e-5)


@every_model
@pytest.mark.parametrize("coefficients", [(1.0, -3.0), (2.5, 0.5, -1.0), (-4.0, 4.0), (1e-3, 1e3)])
def test_one_sample_stays_within_the_bound_for_any_coefficients(name, coefficients):
    model, data = made(name)
    sample = [t[:1] for t in data.tensors]
    points = [(c, {n: p.detach() + 0.1 * k for n, p in model.named_parameters()}) for k, c in enumerate(coefficients)]
    for rule in RULES:
        out = dpscale.scaled_sum(model, losses, sample, rule, points=points)
        released = torch.cat([g.flatten() for g in out.grads.values()]).norm()
        assert released <= rule.bound * (1 + 1e-12)
        combined = sum(c * gradient(model, w, [t[0] for t in data.tensors]) for c, w in points)
        torch.testing.assert_close(out.norms[0], combined.norm(), rtol=1e-6, atol=0)


def test_optimizers_get_the_momentum_as_their_gradient():
    model, data = made("raw")
    plan = dpscale.Plan(
        scaling=RULES[0], sampling=dpscale.Poisson(size=N, batch=BATCH), steps=3, unsafe_no_noise=True,
        momentum=dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.5),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    private = dpscale.privatize(model, optimizer, plan, seed=0)
    before = vector(model)
    for batch in private.batches(data):
        private.step(batch, losses)
    assert torch.isfinite(vector(model)).all()
    assert (vector(model) - before).abs().max() > 0.1


def test_views_of_a_sample_are_averaged_before_they_are_scaled():
    model, data = made("cnn")
    x, y = (t[:4] for t in data.tensors)
    torch.manual_seed(1)
    views = dpscale.views((x, y), 3, lambda x: x + 0.3 * torch.randn_like(x))
    assert views[0].shape == (4, 3, 2, 5, 5)
    assert views[1].shape == (4, 3)
    out = dpscale.scaled_sum(model, dpscale.over_views(losses), views, RULES[0])
    values = {n: p.detach() for n, p in model.named_parameters()}
    total = 0.0
    for i in range(4):
        m = sum(gradient(model, values, [t[i, k] for t in views]) for k in range(3)) / 3
        torch.testing.assert_close(out.norms[i], m.norm())
        total = total + RULES[0].weight(m.norm()) * m
    torch.testing.assert_close(torch.cat([g.flatten() for g in out.grads.values()]), total)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: dpscale.InnerOuter(K0=-1, gamma0=0.5, gamma1=0.5), "'K0' parameter of InnerOuter must be an integer"),
        (lambda: dpscale.InnerOuter(K0=1.5, gamma0=0.5, gamma1=0.5), "Got 1.5"),
        (lambda: dpscale.InnerOuter(K0=1, gamma0=0.0, gamma1=0.5), "'gamma0' .* above 0 and at most 1. Got 0.0"),
        (lambda: dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=1.5), "'gamma1' .* Got 1.5"),
        (lambda: dpscale.HeavyBall(gamma1=-0.1), "'gamma1' parameter of HeavyBall"),
        (lambda: dpscale.PerSampleEMA(gamma=2), "'gamma' parameter of PerSampleEMA"),
        (lambda: dpscale.PerSampleEMA(gamma=0.5, keep="all"), "'gradients' or 'weights'. Got 'all'"),
        (lambda: dpscale.PerSampleEMA(gamma=0.5, directory="/no/such/folder"), "a folder that exists"),
        (lambda: dpscale.DiSK(kappa=0.5, gamma=0.0), "'gamma' parameter of DiSK"),
    ],
)
def test_bad_settings_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_memory_per_sample_needs_the_full_batch():
    with pytest.raises(ValueError, match=r"must be FullBatch\. Got 'Poisson' instead\. A sample that is not drawn"):
        dpscale.Plan(
            scaling=RULES[0], sampling=dpscale.Poisson(size=N, batch=BATCH), steps=3,
            momentum=dpscale.PerSampleEMA(gamma=0.5),
        )  # fmt: skip
    with pytest.raises(ValueError, match="must be one of HeavyBall, InnerOuter"):
        dpscale.Plan(scaling=RULES[0], sampling=dpscale.FullBatch(size=N), steps=3, momentum=0.9)


def test_points_must_fit_the_model():
    model, data = made("raw")
    good = {n: p.detach() for n, p in model.named_parameters()}
    for bad in ({"scale": good["scale"]}, good | {"scale": torch.zeros(4)}):
        with pytest.raises(ValueError, match="a point without a fitting"):
            dpscale.scaled_sum(model, losses, data.tensors, RULES[0], points=[(1.0, good), (0.5, bad)])
    with pytest.raises(ValueError, match="finite coefficients"):
        dpscale.scaled_sum(model, losses, data.tensors, RULES[0], points=[(math.nan, good)])


def test_a_loop_of_ones_own_cannot_have_past_points():
    model, data = made("raw")
    plan = dpscale.Plan(
        scaling=RULES[0], sampling=dpscale.Poisson(size=N, batch=BATCH), steps=3, unsafe_no_noise=True,
        momentum=dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.5),
    )  # fmt: skip
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0)
    for batch in private.batches(data):
        with pytest.raises(RuntimeError, match="InnerOuter needs each sample's gradient at other weights"):
            private.backward(losses(model, batch))
        break
    assert private.steps_taken == 0


def test_a_loop_of_ones_own_has_the_heavy_ball():
    def trained(how):
        model, data = made("raw")
        plan = dpscale.Plan(
            scaling=RULES[0], sampling=dpscale.Poisson(size=N, batch=BATCH), steps=4, unsafe_no_noise=True,
            momentum=dpscale.HeavyBall(gamma1=0.3),
        )  # fmt: skip
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        private = dpscale.privatize(model, optimizer, plan, seed=0)
        for batch in private.batches(data):
            if how == "step":
                private.step(batch, losses)
            else:
                private.backward(losses(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        return vector(model)

    torch.testing.assert_close(trained("step"), trained("backward"))


def test_a_plan_tells_of_its_momentum():
    for name, momentum in {
        "heavy-ball": dpscale.HeavyBall(gamma1=0.3),
        "inner-outer": dpscale.InnerOuter(K0=2, gamma0=0.5, gamma1=0.3),
        "disk": dpscale.DiSK(kappa=0.7, gamma=0.5),
        "per-sample-ema": dpscale.PerSampleEMA(gamma=0.5),
    }.items():
        assert type(momentum) is MOMENTA[name]
        plan = dpscale.Plan(
            scaling=RULES[0], sampling=dpscale.FullBatch(size=N), steps=3, noise_multiplier=1.0, delta=1e-5,
            momentum=momentum,
        )  # fmt: skip
        assert plan.to_dict()["momentum"]["name"] == name
        assert f"Momentum: {momentum.describe()}. It costs no privacy." in plan.statement()
        bare = dpscale.Plan(
            scaling=RULES[0], sampling=dpscale.FullBatch(size=N), steps=3, noise_multiplier=1.0, delta=1e-5
        )
        assert plan.epsilon() == bare.epsilon()


def test_a_failed_step_leaves_the_memory_as_it_was():
    """A loss that fails half-way through the micro-batches: nothing is released, and nothing is remembered twice."""

    def trained(fail):
        model, data = made("raw")
        plan = dpscale.Plan(
            scaling=RULES[0], sampling=dpscale.FullBatch(size=N), steps=3, unsafe_no_noise=True,
            momentum=dpscale.PerSampleEMA(gamma=0.5),
        )  # fmt: skip
        private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.3), plan, seed=0, micro_batch=4)
        broken = [fail]

        def flaky(model, batch):
            if broken[0] and private.steps_taken == 1 and torch.equal(batch[1], data.tensors[1][4:8]):
                broken[0] = False
                raise KeyError("lost")
            return losses(model, batch)

        for batch in private.batches(data):
            try:
                private.step(batch, flaky)
            except KeyError:
                private.step(batch, flaky)
        return vector(model)

    torch.testing.assert_close(trained(True), trained(False))


class Single(nn.Module):
    """A parameter without dimensions beside one with."""

    def __init__(self):
        super().__init__()
        self.gain, self.layer, self.other = nn.Parameter(torch.tensor(1.0)), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.gain * self.other(self.layer(x).tanh())


def private_single(momentum):
    torch.manual_seed(0)
    model = Single()
    plan = dpscale.Plan(
        scaling=RULES[0], sampling=dpscale.FullBatch(size=N), steps=4, unsafe_no_noise=True, momentum=momentum
    )
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0)
    return model, private, TensorDataset(torch.randn(N, 3), torch.randint(0, 3, (N,)))


@pytest.mark.parametrize(
    "momentum",
    [
        dpscale.HeavyBall(gamma1=0.5),
        dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.5),
        dpscale.PerSampleEMA(gamma=0.5),
        dpscale.DiSK(kappa=0.6, gamma=0.5),
    ],
    ids=lambda m: type(m).__name__,
)
def test_parameters_frozen_midway_are_refused_before_anything_is_charged(momentum):
    model, private, data = private_single(momentum)
    for k, batch in enumerate(private.batches(data)):
        if k == 2:
            model.layer.requires_grad_(False)
            with pytest.raises(RuntimeError, match=r"'layer\.bias' was frozen, unfrozen, moved, converted or replaced"):
                private.step(batch, losses)
            assert private.steps_taken == 2
            break
        private.step(batch, losses)
