"""The private loop: limits, datasets, micro-batches, the budget, and your own loop through `backward`."""

import gc
import logging
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset, TensorDataset

import dpscale
from dpscale.engine.phases import listening

from .helpers import SIZE, data, loss_fn, mlp, plan, private, train, vector


def test_no_noise_and_an_infinite_clip_is_sgd():
    """The limit of private training is training, to rounding: same batches, same optimizer, same weights."""
    sampling = dpscale.FixedSize(size=SIZE, batch=12)
    limit = private(
        mlp(dtype=torch.float64),
        scaling=dpscale.Clip(C=torch.inf),
        sampling=sampling,
        noise_multiplier=0.0,
        unsafe_no_noise=True,
    )
    plain = mlp(dtype=torch.float64)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for batch in limit.batches(data(dtype=torch.float64)):
        limit.step(batch, loss_fn)
        optimizer.zero_grad()
        loss_fn(plain, batch).mean().backward()
        optimizer.step()
    torch.testing.assert_close(vector(limit.model), vector(plain), rtol=1e-10, atol=1e-12)
    assert limit.steps_taken == 5


@pytest.mark.parametrize("micro_batch", [1, 5, 7, 100])
def test_micro_batches_do_not_change_the_result(micro_batch):
    whole = train(private(mlp(dtype=torch.float64)), data(dtype=torch.float64))
    parts = train(private(mlp(dtype=torch.float64), micro_batch=micro_batch), data(dtype=torch.float64))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_the_log_says_once_how_long_the_inspection_took(how, caplog):
    run, heard = private(), []
    with caplog.at_level(logging.INFO, logger="dpscale"), listening(heard.append):
        for batch in run.batches(data()):
            run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(run.model, batch))
            run.optimizer.zero_grad()
    assert heard == ["inspecting", None]
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"dpscale: ready after \d+\.\d s \(inspecting \d+\.\d s\)", line)


def test_a_refused_model_is_never_said_to_be_ready(caplog):
    model, heard = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), []
    log = caplog.at_level(logging.INFO, logger="dpscale")
    with log, listening(heard.append), pytest.raises(dpscale.UnsupportedModel):
        train(private(model))
    assert heard == ["inspecting", None] and not caplog.records


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_any_optimizer(name):
    def run(how):
        model = mlp()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        run = private(model, optimizer=optimizer)
        for batch in run.batches(data()):
            if how == "step":
                run.step(batch, loss_fn)
            else:
                run.backward(loss_fn(model, batch))
                optimizer.step()
                optimizer.zero_grad()
        return vector(model)

    start = vector(mlp())
    assert not torch.equal(run("step"), start)
    assert torch.equal(run("step"), run("backward"))


class MapStyle(Dataset):
    """Dict samples, as Hugging Face datasets give them."""

    def __init__(self):
        self.x, self.y = data().tensors

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return {"x": self.x[i], "label": int(self.y[i])}


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}], ids=["in-process", "worker"])
def test_map_style_and_dict_samples(options):
    run = private()
    for batch in run.batches(MapStyle(), **options):
        run.step(batch, lambda m, b: nn.functional.cross_entropy(m(b["x"]), b["label"], reduction="none"))
    torch.testing.assert_close(vector(run.model), train(private()))


def test_a_seed_reproduces_and_none_does_not():
    assert torch.equal(train(private(seed=3)), train(private(seed=3)))
    assert not torch.equal(train(private(seed=3)), train(private(seed=4)))
    assert not torch.equal(train(private(seed=None)), train(private(seed=None)))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_step_beyond_the_plan_raises_and_releases_nothing(how):
    run = private()
    batch = next(iter(run.batches(data())))
    train(run)
    before = vector(run.model)
    with pytest.raises(dpscale.BudgetExhausted, match=r"All 5 planned steps are taken.*Nothing was released"):
        run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(run.model, batch))
    assert torch.equal(vector(run.model), before)
    assert all(p.grad is None for p in run.model.parameters())
    assert run.steps_taken == 5
    assert list(run.batches(data())) == []


def test_epsilon_so_far():
    run = private()
    assert run.epsilon(delta=1e-4) == 0
    spent = []
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        spent.append(run.epsilon(delta=1e-4))
    assert spent == sorted(spent) and spent[0] > 0
    assert spent[-1] == pytest.approx(run.plan.epsilon(delta=1e-4))


def test_breaking_off_and_going_on():
    """The loop may be left and entered again: the planned steps are taken once each."""
    run = private()
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        if run.steps_taken == 2:
            break
    assert torch.equal(train(run), train(private()))
    assert run.steps_taken == 5


def test_backward_in_your_own_loop_equals_step():
    run, model = None, mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run = private(model, optimizer=optimizer)
    for x, y in run.batches(data()):
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        run.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
    other = mlp()
    stepped = private(other, optimizer=torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    torch.testing.assert_close(vector(model), train(stepped))


def test_non_finite_samples_are_ignored_and_counted():
    x, y = data().tensors
    x = x.clone()
    x[3], x[17] = torch.nan, torch.inf
    run = private(mlp(), sampling=dpscale.FullBatch(size=SIZE), steps=2)
    clean = torch.ones(SIZE, dtype=torch.bool)
    clean[[3, 17]] = False
    for batch in run.batches(TensorDataset(x, y)):
        out = dpscale.scaled_sum(run.model, loss_fn, (x[clean], y[clean]), run.plan.scaling)
        with_them = dpscale.scaled_sum(run.model, loss_fn, (x, y), run.plan.scaling)
        for n in out.grads:
            torch.testing.assert_close(with_them.grads[n], out.grads[n], rtol=1e-5, atol=1e-6)
        report = run.step(batch, loss_fn)
        assert report.ignored == 2
        assert (report.weights[[3, 17]] == 0).all()
    assert torch.isfinite(vector(run.model)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scale", [0.0, 1e-45, 1e-30, 1.0, 1e15, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize("rule", [dpscale.Clip(C=0.5), dpscale.AutoS(C=0.5, r=1e-4), dpscale.PSAC(C=0.5, r=1e-4),
                                  dpscale.PSASC(C=0.5, s=0.4, r=1e-4)], ids=lambda r: type(r).__name__)  # fmt: skip
def test_one_sample_with_any_gradient_stays_within_the_bound(rule, scale, dtype):
    """A linear model's gradient is its input, so the sample has just this gradient, beside an ordinary one."""
    model = nn.Linear(3, 1, bias=False).to(dtype)
    x = torch.tensor([[1.0, 1.0, 1.0], [scale, -scale, scale]]).to(dtype)

    def total(mask):
        return dpscale.scaled_sum(model, lambda m, b: m(b[0])[:, 0], (x,), rule, mask=torch.tensor(mask))

    alone = total([False, True])
    released = alone.grads["weight"].double().norm().item()
    assert released <= rule.bound * (1 + 1e-5)
    finite = torch.isfinite(x[1]).all()
    assert int(alone.ignored) == int(not finite)
    if not finite:
        assert released == 0
    elif scale >= 1:
        assert released >= 0.9 * rule.bound  # a huge gradient is scaled, not dropped
    both, other = total([True, True]), total([True, False])
    difference = (both.grads["weight"] - other.grads["weight"]).double().norm().item()
    assert difference <= rule.bound * (1 + 1e-5)


def test_plan_and_model_are_left_alone():
    model = mlp()
    names = [n for n, _ in model.named_parameters()]
    run = private(model)
    train(run)
    assert isinstance(run.model, nn.Module) and run.model is model
    assert [n for n, _ in model.named_parameters()] == names
    assert set(model.state_dict()) == set(mlp().state_dict())
    assert run.plan == plan()
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_no_batch_is_drawn_twice():
    """A skipped batch is gone; a second loop ends the first: no draw serves two steps."""
    run, seen = private(), []

    def used(batch):
        seen.append(tuple(batch[0][:, 0].tolist()))
        run.step(batch, loss_fn)

    first = run.batches(data())
    used(next(first))
    next(first)  # taken and not used
    used(next(first))
    second = run.batches(data())
    used(next(second))
    with pytest.raises(RuntimeError, match=r"Another loop over private.batches\(\) has begun"):
        next(first)
    for batch in second:
        used(batch)
    assert len(set(seen)) == len(seen) == run.steps_taken == 5


def test_reports_hold_no_graph():
    run = private()
    for batch in run.batches(data()):
        report = run.step(batch, loss_fn)
        assert not any(t.requires_grad for t in vars(report).values())


def test_a_thousand_steps_hold_no_more_than_a_hundred():
    """Nothing of a step is kept: not its graph, its batch, nor its report."""
    run = private(steps=1000, lr=1e-4)
    alive = {}
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        if run.steps_taken in (100, 1000):
            gc.collect()
            alive[run.steps_taken] = sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())
    assert alive[1000] <= alive[100] + 2


class Normalized(nn.Module):
    """A layer, a normalization that takes its scale out again, and a head that is sure of itself."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.layer = nn.Conv2d(64, 64, 3, padding=1, bias=False) if kind == "conv" else nn.Linear(64, 64, bias=False)
        self.head = nn.Linear({"conv": 64 * 16, "sequence": 64 * 32, "linear": 64}[kind], 2)
        with torch.no_grad():
            self.head.weight.mul_(100)

    def forward(self, x):
        y = self.layer(x)
        y = F.group_norm(y, 1) if self.kind == "conv" else F.layer_norm(y, (64,))
        return self.head(y.flatten(1))


@pytest.mark.parametrize("scale", [1.0, 3e17, 1e18])
@pytest.mark.parametrize("kind", ["linear", "sequence", "conv"])
def test_one_sample_of_any_scale_stays_within_the_bound(kind, scale):
    """Squares of its output gradients have no place in float32; its gradient does."""
    torch.manual_seed(1)
    model, rule = Normalized(kind), dpscale.AutoS(C=1.0, r=1e-4)
    x = scale * torch.randn(4, *{"conv": (64, 4, 4), "sequence": (32, 64), "linear": (64,)}[kind])
    with torch.no_grad():
        z = model(x)[0]
        y = z.argmax().expand(4)
        surplus = z[y[0]] - z[1 - y[0]]
    mask = torch.tensor([True, False, False, False])
    for margin in (13.0, 14.0, 15.0, 16.0):
        with torch.no_grad():
            model.head.bias.zero_()
            model.head.bias[y[0]] += margin - surplus
        out = dpscale.scaled_sum(model, loss_fn, (x, y), rule, mask)
        total = sum(g.double().square().sum() for g in out.grads.values()).sqrt()
        assert 0 < total <= rule.bound * (1 + 1e-6), (margin, float(total))
