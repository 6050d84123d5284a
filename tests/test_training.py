"""The private loop: limits, datasets, micro-batches, the budget, and your own loop through `backward`."""

import collections
import contextlib
import copy
import dataclasses
import gc
import logging
import pickle
import re
import time
import weakref
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

import dpscale
from dpscale.engine.phases import listening, waiting
from dpscale.engine.reference import reference_sum

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


@pytest.mark.parametrize("how", ["step", "backward"])
def test_trap_07_a_sum_is_divided_by_the_expected_batch_and_not_by_the_realised_one(how):
    sampling = dpscale.Poisson(size=SIZE, batch=12)
    run = private(
        mlp(dtype=torch.float64), scaling=dpscale.Clip(C=torch.inf), sampling=sampling, noise_multiplier=0.0,
        unsafe_no_noise=True,
    )  # fmt: skip
    plain, sizes = mlp(dtype=torch.float64), []
    for batch in run.batches(data(dtype=torch.float64)):
        sizes.append(len(batch.draw.indices))
        plain.load_state_dict(run.model.state_dict())
        whole = torch.autograd.grad(loss_fn(plain, batch).sum(), list(plain.parameters()))
        before = vector(run.model)
        if how == "step":
            run.step(batch, loss_fn)
        else:
            run.backward(loss_fn(run.model, batch))
            run.optimizer.step()
            run.optimizer.zero_grad()
        moved = (before - vector(run.model)) / run.optimizer.param_groups[0]["lr"]
        torch.testing.assert_close(moved, torch.cat([g.flatten() for g in whole]) / 12)
    assert set(sizes) != {12}


@pytest.mark.parametrize("micro_batch", [1, 5, 7, 100])
def test_micro_batches_do_not_change_the_result(micro_batch):
    whole = train(private(mlp(dtype=torch.float64)), data(dtype=torch.float64))
    parts = train(private(mlp(dtype=torch.float64), micro_batch=micro_batch), data(dtype=torch.float64))
    torch.testing.assert_close(whole, parts, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_the_log_says_once_how_long_the_inspection_took(how, caplog):
    run, heard = private(compile=False), []
    with caplog.at_level(logging.INFO, logger="dpscale"), listening(heard.append):
        for batch in run.batches(data()):
            run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(run.model, batch))
            run.optimizer.zero_grad()
    assert heard == ["checking", None]
    (line,) = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"dpscale: ready after \d+\.\d s \(checking \d+\.\d s\)", line)


@pytest.mark.parametrize("listened", [False, True])
def test_whoever_waits_long_is_told_what_for(caplog, monkeypatch, listened):
    monkeypatch.setattr("dpscale.engine.phases.SILENCE", 0.001)
    run, said = private(compile=False), []

    def slow(model, batch):
        time.sleep(0.01)
        return loss_fn(model, batch)

    with listening(said.append) if listened else nullcontext():
        batches = run.batches(data())
        run.step(next(batches), slow)
    told = [message for message in caplog.messages if message.startswith("dpscale: still checking (")]
    assert said == ["checking", None] and not told if listened else told


def test_whoever_waits_on_for_something_else_is_told_since_when(caplog, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("dpscale.engine.phases.SILENCE", 2.5)
    monkeypatch.setattr("dpscale.engine.phases.time", SimpleNamespace(perf_counter=lambda: now[0]))
    with waiting("checking"):
        now[0] = 9.0
    with waiting("computing", on=True):
        while "computing" not in caplog.text:
            time.sleep(0.001)
    assert "still computing (9 s so far)" in caplog.text


def test_a_refused_model_is_never_said_to_be_ready(caplog):
    model, heard = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), []
    log = caplog.at_level(logging.INFO, logger="dpscale")
    with log, listening(heard.append), pytest.raises(dpscale.UnsupportedModel):
        train(private(model, compile=False))
    assert heard == ["checking", None] and not caplog.records


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "NAdam", "RMSprop", "Adagrad"])
def test_any_optimizer(name):
    def run(how):
        model = mlp()
        optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01)
        run = private(model, optimizer=optimizer, compile=False)
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


@pytest.mark.parametrize("changes", [{}, {"momentum": dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.2)}])
def test_forward_backward_is_a_step_without_the_optimizer(changes):
    run = private(micro_batch=4, **changes)
    for batch in run.batches(data()):
        before = vector(run.model)
        run.forward_backward(batch, loss_fn)
        assert torch.equal(vector(run.model), before)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.steps_taken == 5 and torch.equal(vector(run.model), train(private(micro_batch=4, **changes)))


def test_a_second_forward_backward_neither_wipes_nor_doubles():
    run = private()
    batches = run.batches(data())
    first, second = next(batches), next(batches)
    run.forward_backward(first, loss_fn)
    with pytest.raises(RuntimeError, match=r"forward_backward\(\) was called again before optimizer\.step\(\)"):
        run.forward_backward(second, loss_fn)
    assert run.steps_taken == 1


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
        assert not any(t.requires_grad for t in vars(report).values() if isinstance(t, torch.Tensor))


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


class Numbered(Dataset):
    """Samples that know their place in the data."""

    def __len__(self):
        return SIZE

    def __getitem__(self, k):
        x, y = data()[k]
        return x, y, k


def in_order(samples, by):
    """A collate function that sorts, as is usual for sequences of several lengths."""
    return default_collate(sorted(samples, key=lambda sample: by * sample[2]))


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_collate_function_may_sort(by, micro_batch):
    """The padding is no part of what it is given: the samples drawn are counted, each once, and nothing else is."""
    plain, sorting = (private(micro_batch=micro_batch, steps=20) for _ in range(2))
    unsorted = plain.batches(Numbered())
    for batch in sorting.batches(Numbered(), collate_fn=lambda samples: in_order(samples, by)):
        expected = next(unsorted)
        drawn = plain.step(expected, loss_fn).mask
        counted = batch[2][sorting.step(batch, loss_fn).mask].tolist()
        assert counted == sorted(expected[2][drawn].tolist(), reverse=by < 0) and len(set(counted)) == len(counted)
    torch.testing.assert_close(vector(sorting.model), vector(plain.model), rtol=1e-4, atol=1e-6)


Pair = collections.namedtuple("Pair", "x y")


def collated(kind, samples):
    x, y, k = default_collate(samples)
    return {
        "mapping": collections.UserDict(x=x, y=y),
        "named": Pair(x, y),
        "nested": [{"x": x}, (y, torch.tensor(3.0), "all of them")],
        "words": (x, y, [f"sample {int(i)}" for i in k]),
    }[kind]


@pytest.mark.parametrize("kind", ["mapping", "named", "nested", "words"])
def test_batches_of_any_usual_kind_have_the_rows_drawn(kind):
    for batch in private(steps=3).batches(Numbered(), collate_fn=lambda samples: collated(kind, samples)):
        if kind == "nested":
            x, (y, rest, text) = batch[0]["x"], batch[1]
            assert (rest.ndim, text) == (0, "all of them")
        else:
            x, y = (batch["x"], batch["y"]) if kind == "mapping" else batch[:2]
        assert type(batch.data) is type(collated(kind, [Numbered()[0]]))
        assert len(x) == len(y) == len(batch.draw.indices)
        assert kind != "words" or batch[2] == [f"sample {i}" for i in batch.draw.indices]


def test_what_a_dataset_or_a_collate_function_does_is_done():
    class Doubled(TensorDataset):
        def __getitem__(self, k):
            x, y = super().__getitem__(k)
            return 2 * x, y

    def tripled(samples):
        x, y = default_collate(samples)
        return 3 * x, y

    (plain,) = private(steps=1).batches(data())
    for factor, found in (
        (2, private(steps=1).batches(Doubled(*data().tensors))),
        (3, private(steps=1).batches(data(), collate_fn=tripled)),
    ):
        (batch,) = found
        assert torch.equal(batch[0], factor * plain[0])


def test_a_look_at_a_batch_uses_none_up():
    """What was handed out and not used is handed out again in the next loop."""
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=20), steps=3)
    first = next(run.batches(data()))
    seen = []
    for batch in run.batches(data()):
        seen += [batch[0][:, 0]]
        run.step(batch, loss_fn)
    assert torch.equal(seen[0], first[0][:, 0]) and len(torch.cat(seen).unique()) == SIZE
    assert run.epsilon(delta=1e-4) == pytest.approx(run.plan.epsilon(delta=1e-4))


def test_shuffled_batches_that_are_left_out_are_paid_for():
    """Leaving one out brings the next epoch closer: the cost is that of the epochs begun, whatever was used of them."""
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=20), steps=6)
    drawn = []
    for k, batch in enumerate(run.batches(data())):
        if k in (1, 2):
            continue
        drawn += batch[0][:, 0].tolist()
        run.step(batch, loss_fn)
        if k == 3:
            twice = max(collections.Counter(drawn).values())
            assert (run.steps_taken, twice) == (2, 2)  # two releases of one sample after two steps of three per epoch
            assert run.epsilon(delta=1e-4) == run.plan.epsilon(delta=1e-4, steps=4)
    assert run.steps_taken == 4 and run.epsilon(delta=1e-4) == run.plan.epsilon(delta=1e-4)
    assert not list(run.batches(data()))
    with pytest.raises(dpscale.BudgetExhausted):
        run.step(batch, loss_fn)


def test_a_run_keeps_its_plan_and_its_count():
    run = private()
    for name, value in (
        ("plan", dataclasses.replace(run.plan, noise_multiplier=9.0)),
        ("steps", 9),
        ("steps_taken", 0),
    ):
        with pytest.raises(AttributeError):
            setattr(run, name, value)


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_run_is_not_copied(how):
    with pytest.raises(TypeError, match=r"cannot be copied or pickled.*same noise.*state_dict"):
        how(private())


@pytest.mark.parametrize("how", ["parts", "modules", "added", "other"])
def test_gradients_of_a_plain_backward_are_not_applied(how):
    run = private()
    (x, y), before = next(batches := run.batches(data())), vector(run.model)
    if how == "parts":
        for a, b in zip(x.split(4), y.split(4), strict=True):
            F.cross_entropy(run.model(a), b).backward()
    elif how == "modules":
        F.cross_entropy(run.model[2](run.model[1](run.model[0](x))), y).backward()
    else:
        run.backward(loss_fn(run.model, (x, y)))
        (run.model(x).square().mean() if how == "added" else sum(p.sum() for p in run.model.parameters())).backward()
    with pytest.raises(RuntimeError, match=r"A plain backward\(\) has added to the gradients.*No step was made"):
        run.optimizer.step()
    assert torch.equal(vector(run.model), before)
    run.optimizer.zero_grad()
    run.step(next(batches), loss_fn)
    assert not torch.equal(vector(run.model), before)


def test_an_evaluation_may_use_gradients():
    """Those of a plain backward do no harm if they are wiped, or overwritten by what is released."""
    run = private()
    for batch in run.batches(data()):
        F.cross_entropy(run.model(torch.ones(3, 4)), torch.zeros(3, dtype=torch.long)).backward()
        if run.steps_taken % 2:
            run.optimizer.zero_grad()
        run.step(batch, loss_fn)
    assert torch.equal(vector(run.model), train(private()))


def test_training_on_public_data_is_said_to_be_so():
    run = private()
    public = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for optimizer in (public, run.optimizer):
        before = vector(run.model)
        loss_fn(run.model, data()[:8]).mean().backward()
        with pytest.raises(RuntimeError, match=r"A plain backward.*inside `with private.public_data\(\):`"):
            optimizer.step()
        assert torch.equal(vector(run.model), before)
        with run.public_data():
            optimizer.step()
        assert not torch.equal(vector(run.model), before)
        with pytest.raises(RuntimeError, match="A plain backward"):
            optimizer.step()
        optimizer.zero_grad()
    train(run)


def test_a_step_without_a_private_backward_is_refused():
    run = private()
    for x, y in run.batches(data()):
        F.cross_entropy(run.model(x), y).backward()  # reaches no parameter: the forward was recorded
        with pytest.raises(RuntimeError, match=r"optimizer.step\(\) was called while a drawn batch is outst.*backward"):
            run.optimizer.step()
        break
    assert run.steps_taken == 0


def test_a_layer_that_the_optimizer_does_not_know_is_refused():
    run = private()
    batches = run.batches(data())
    run.step(next(batches), loss_fn)
    run.model[2] = nn.Linear(6, 3)
    with pytest.raises(ValueError, match="over parameters of the model alone"):
        run.step(next(batches), loss_fn)
    assert run.steps_taken == 1


def test_a_loop_says_how_long_it_is_and_that_there_is_nothing_left(caplog):
    run = private()
    assert len(run.batches(data())) == 5
    batches = run.batches(data())
    run.step(next(batches), loss_fn)
    assert len(batches) == 4 == len(run.batches(data()))
    train(run)
    with caplog.at_level(logging.WARNING, logger="dpscale"):
        assert len(run.batches(data())) == 0
    assert "all 5 planned steps are taken" in caplog.text


def test_a_loader_is_not_a_dataset():
    with pytest.raises(ValueError, match=r"'dataset' parameter of batches must be a dataset.*Pass its dataset"):
        private().batches(DataLoader(data(), batch_size=6))


def penalized(model, batch, record=True):
    """A loss with the gradient by the input in it: recorded for a gradient of its own, or as a constant."""
    with torch.enable_grad():
        x = batch[0].clone().requires_grad_()
        losses = loss_fn(model, (x, batch[1]))
        (slope,) = torch.autograd.grad(losses.sum(), x, create_graph=record, retain_graph=True)
    return losses + 5 * slope.square().sum(1)


def test_a_gradient_of_a_gradient_is_refused_in_a_loop_of_your_own():
    """What it owes to the parameters would be lost, for they are detached in the forward."""
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match=r"takes a gradient of a gradient.*Leave that term out"):
        for batch in run.batches(data()):
            run.backward(penalized(run.model, batch))
    assert run.steps_taken == 0


def test_a_gradient_of_a_gradient_is_taken_sample_by_sample_in_a_step():
    run = private(steps=1)
    for batch in run.batches(data()):
        _, norms, _ = reference_sum(run.model, penalized, batch.data, run.plan.scaling)
        torch.testing.assert_close(run.step(batch, penalized).norms, norms)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_gradient_may_be_used_as_a_constant(how):
    def attacked(model, batch):
        with torch.enable_grad():
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(loss_fn(model, (x, batch[1])).sum(), x)
        return loss_fn(model, (batch[0] + 0.1 * slope.sign(), batch[1]))

    run = private()
    for batch in run.batches(data()):
        expected = []
        for i in range(len(batch[0])):
            model = copy.deepcopy(run.model)
            loss = attacked(model, tuple(t[i : i + 1] for t in batch)).sum()
            expected.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, [*model.parameters()])]).norm())
        out = run.step(batch, attacked) if how == "step" else run.backward(attacked(run.model, batch))
        torch.testing.assert_close(out.norms[out.mask], torch.stack(expected)[out.mask])
        break


def test_copies_of_a_model_are_none_of_the_run_s_business(tmp_path):
    """Made while a batch waits, and after a forward, they carry nothing of the run with them."""
    run = private()
    for batch in run.batches(data()):
        run.model(batch[0])
        torch.save(run.model, tmp_path / "model")
        for other in (copy.deepcopy(run.model), torch.load(tmp_path / "model", weights_only=False)):
            recorded = len(run._engine.recorder._forwards)
            loss_fn(other, batch).mean().backward()
            assert (
                all(p.grad is not None for p in other.parameters()) and len(run._engine.recorder._forwards) == recorded
            )
        run.step(batch, loss_fn)
    assert torch.equal(vector(run.model), train(private()))


def test_samples_that_are_not_finite_do_not_stop_a_loop_of_your_own():
    x, y = data().tensors
    x = x.clone()
    x[0], x[7] = torch.nan, torch.inf
    step, own = private(steps=20, compile=False), private(steps=20)
    ignored = 0
    for batch in step.batches(TensorDataset(x, y)):
        ignored += int(step.step(batch, loss_fn).ignored)
    for batch in own.batches(TensorDataset(x, y)):
        ignored -= int(own.backward(loss_fn(own.model, batch)).ignored)
        own.optimizer.step()
        own.optimizer.zero_grad()
    assert torch.equal(vector(step.model), vector(own.model)) and ignored == 0
    own = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled in the loss"):
        for batch in own.batches(TensorDataset(x, y)):
            losses = loss_fn(own.model, batch)
            own.backward(losses + losses.roll(1))


def test_more_rows_than_samples_are_refused():
    """Two views of each sample would be two samples, if their number happens to fit."""

    def twice(samples):
        x, y, _ = default_collate(samples)
        return x.repeat_interleave(2, 0), y.repeat_interleave(2, 0)

    run = private(sampling=dpscale.FixedSize(size=SIZE, batch=6), micro_batch=12)
    with pytest.raises(ValueError, match=r"'batch' parameter of step must be of 6 rows, as drawn. Got 12"):
        run.step(next(batches := run.batches(Numbered(), collate_fn=twice)), loss_fn)
    with pytest.raises(ValueError, match=r"losses must be per sample, of shape \(6,\)"):
        run.backward(loss_fn(run.model, batch := next(batches)), batch)


def test_one_run_after_another_on_the_same_optimizer():
    """What the first one saw is no concern of the second; and both may take turns."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = private(model, optimizer=optimizer)
    train(first)
    loss_fn(model, data()[:8]).mean().backward()
    second, waiting = private(model, optimizer=optimizer), private(model, optimizer=optimizer).batches(data())
    next(waiting)  # of a third, whose batch is not used
    train(second)
    assert second.steps_taken == 5


def test_a_run_that_nobody_holds_is_gone():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = private(model, optimizer=optimizer)
    train(run)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None
    loss_fn(model, data()[:8]).mean().backward()
    optimizer.step()  # and with it its guard


def test_a_refused_step_is_not_charged():
    """A gradient that would not be overwritten, of a layer frozen since, is found before anything is released."""
    run = private()
    loss_fn(run.model, data()[:8]).mean().backward()
    run.model[0].requires_grad_(False)
    batches = run.batches(data())
    batch = next(batches)
    with pytest.raises(RuntimeError, match=r"A plain backward\(\) has added"):
        run.step(batch, loss_fn)
    assert run.steps_taken == 0
    run.optimizer.zero_grad()
    run.step(batch, loss_fn)
    assert run.steps_taken == 1


class Keeping(nn.Module):
    """Keeps to itself what a loop may add to the loss."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        self.hidden = self.first(x)
        self.balance = self.hidden.softmax(1).mean(0).square().sum()
        return self.second(self.hidden.tanh())


@pytest.mark.parametrize("what", ["balance", "penalty"])
def test_what_a_model_keeps_to_itself_is_looked_at_too(what):
    run = private(Keeping())
    with pytest.raises(dpscale.UnsupportedModel, match=r"sets .hidden. from what is in the samples"):
        for x, y in run.batches(data()):
            x.requires_grad_()
            losses = loss_fn(run.model, (x, y))
            if what == "balance":
                run.backward(losses + run.model.balance)
            else:
                (slope,) = torch.autograd.grad(run.model.hidden.sum(), x, create_graph=True)
                run.backward(losses + slope.square().sum(1))
    assert run.steps_taken == 0


def test_an_interrupt_in_the_midst_of_a_forward():
    class Interrupted(nn.Sequential):
        def forward(self, x):
            if interrupting:
                raise KeyboardInterrupt
            return super().forward(x)

    run, plain, interrupting = private(Interrupted(*mlp()), compile=False), private(compile=False), False
    with pytest.raises(KeyboardInterrupt):
        for batch in run.batches(data()):
            losses = loss_fn(run.model, batch)  # the second time, when the model is known and the forward is recorded
            run.backward(losses)
            run.optimizer.step()
            run.optimizer.zero_grad()
            interrupting = True
    interrupting = False
    gc.collect()
    assert run.steps_taken == 1 and run.model(data()[:3][0]).requires_grad
    assert torch.equal(train(run), train(plain))


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_noise_that_is_drawn_while_a_device_works_is_that_of_its_step(micro_batch):
    """Also of a step whose first try came to nothing."""

    def trained(early):
        run = private(micro_batch=micro_batch)
        summed, failed = run._engine.scaled_sum, []

        def working(*args, meanwhile, **options):
            out = summed(*args, **options)
            if early:
                meanwhile(out.grads)
            if early and run.steps_taken == 2 and not failed:
                failed.append(True)
                raise ValueError("too late")
            return out

        run._engine.scaled_sum = working
        for batch in run.batches(data()):
            with contextlib.suppress(ValueError):
                run.step(batch, loss_fn)
            if failed == [True]:
                failed.append(run.steps_taken)
                run.step(batch, loss_fn)
        assert failed == ([True, 2] if early else [])
        return vector(run.model)

    assert torch.equal(trained(early=False), trained(early=True))
