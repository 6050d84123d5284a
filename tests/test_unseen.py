"""What a look at one forward would not show: gates that open at random, switches, counters, memory, the backward."""

import functools
import random
from types import ModuleType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale
from dpscale.engine import Engine
from dpscale.engine.engine import engine_of
from dpscale.engine.verify import look as looking

from .engine.cases import check_sample_by_sample
from .helpers import data, loss_fn, mlp, private
from .seeding import seeded

RULE = dpscale.Clip(C=1.0)
X, Y = data().tensors
BATCH = X[:12], Y[:12]
MASK = torch.ones(12, dtype=torch.bool)


class Of(nn.Module):
    """``run(self, x)`` before two layers."""

    def __init__(self, run, **attributes):
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        for name, value in attributes.items():
            if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self._run = run

    def forward(self, x):
        return self.second(self.first(self._run(self, x)).tanh())


def centred(x):
    return x - x.mean(0)


def looks(model):
    """How often it was looked at."""
    return engine_of(model)._schedule.looks


def go_through(model, how, loss=loss_fn, steps=5):
    """A private run, by its own step or in a loop of one's own."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = private(model, optimizer=optimizer, steps=steps)
    for batch in run.batches(data()):
        run.step(batch, loss) if how == "step" else run.backward(loss(model, batch))
        if how == "backward":
            optimizer.step()
            optimizer.zero_grad()
    return run


both_ways = pytest.mark.parametrize("how", ["step", "backward"])


# Random numbers

DRAWS = {
    "torch": lambda: torch.rand(()).item(),
    "torch, not the first": lambda: torch.rand(7)[6].item(),
    "random": random.random,
    "numpy": np.random.random,
}
every_draw = pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS.keys())


@both_ways
@every_draw
@pytest.mark.parametrize("gate", [lambda u: u < 0.3, lambda u: u > 0.7], ids=["below", "above"])
def test_a_gate_that_opens_at_random_is_seen(draw, gate, how):
    model = Of(lambda self, x: centred(x) if gate(draw()) else x)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at mean"):
        go_through(model, how)


@pytest.mark.parametrize("draw", [DRAWS["torch"], random.random, np.random.random], ids=["torch", "random", "numpy"])
@pytest.mark.parametrize("low", [0.0, 0.12, 0.24, 0.36, 0.48, 0.6, 0.72, 0.84])
def test_what_the_first_draw_may_open_is_seen_for_certain(draw, low):
    """Whatever was drawn before."""
    for seed in range(3):
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        model = Of(lambda self, x: centred(x) if low < draw() < low + 0.16 else x)
        with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
            dpscale.scaled_sum(model, loss_fn, BATCH, RULE)


@every_draw
def test_a_loss_that_mixes_at_random_is_seen(draw):
    """Also where the labels alone are mixed."""

    def mixed(model, batch):
        order = torch.randperm(len(batch[1])) if draw() < 0.3 else torch.arange(len(batch[1]))
        return loss_fn(model, batch) + 0.1 * loss_fn(model, (batch[0], batch[1][order]))

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(mlp(), mixed, BATCH, RULE)


def test_a_buffer_that_remembers_the_samples_at_random():
    def remember(self, x):
        if torch.rand(()) < 0.3:
            self.mean.copy_(x.detach().mean(0))
        return x

    model = Of(remember, mean=torch.zeros(4))
    with pytest.raises(dpscale.UnsupportedModel, match="A buffer of the model is updated from the samples"):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert not model.mean.any()


@every_draw
def test_random_numbers_that_mix_nothing_are_no_reason_to_refuse(draw):
    model = Of(lambda self, x: x * (1 + draw()) if draw() < 0.5 else x)
    dpscale.scaled_sum(model, loss_fn, BATCH, RULE)


def test_a_look_uses_up_no_random_numbers():
    def drawn():
        return torch.rand(3).tolist(), [random.gauss(0, 1) for _ in range(3)], np.random.normal(size=3).tolist()

    def seeded():
        torch.manual_seed(5)
        random.seed(5)
        np.random.seed(5)
        drawn()

    model = Of(lambda self, x: x * drawn()[1][0])
    seeded()
    loss_fn(model, BATCH)
    expected = drawn()
    seeded()
    dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert drawn() == expected


def test_a_forward_that_draws_nothing_but_dropout_is_not_run_more_often():
    def runs(model):
        ran = []
        model.register_forward_pre_hook(lambda *_: ran.append(1))
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
        return len(ran)

    drops, draws = nn.Sequential(*mlp(), nn.Dropout(0.5)), Of(lambda self, x: x * random.random())
    other_draws, other_companies = 2 * len(looking.SEEDS), 2
    assert runs(mlp()) == runs(drops) - 1 < 16 and runs(draws) == runs(mlp()) + other_draws + other_companies


# Parameters that the forward changes


def averaged(self, x):
    with torch.no_grad():
        self.q.mul_(0.9).add_(0.1 * x.mean(0))
    return x


def averaged_unseen(self, x):
    self.q.data.mul_(0.9).add_(0.1 * x.detach().mean(0))
    return x


def first_batch(self, x):
    if not self.done:
        self.q.data.copy_(-x.detach().mean(0))
        self.done = True
    return x + self.q


def another_tensor(self, x):
    self.q.data = x.detach().mean(0)
    return x


def another_shape(self, x):
    self.q.data = x.detach().mean(0, keepdim=True)
    return x


def another_parameter(self, x):
    self.q = nn.Parameter(x.detach().mean(0), requires_grad=False)
    return x


def at_random(self, x):
    return averaged_unseen(self, x) if torch.rand(()) < 0.3 else x


def with_many(self, x):
    return averaged_unseen(self, x) if len(x) > 3 else x


def not_a_number(self, x):
    self.q.data.fill_(torch.nan)
    return x


@both_ways
@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
@pytest.mark.parametrize(
    "change",
    [
        averaged, averaged_unseen, first_batch, another_tensor, another_shape, another_parameter, at_random, with_many,
        not_a_number,
    ],
    ids=lambda f: f.__name__,
)  # fmt: skip
def test_a_parameter_that_the_forward_changes_is_refused(change, frozen, how):
    q = nn.Parameter(torch.zeros(4), requires_grad=not frozen)
    model = Of(lambda self, x: change(self, x) + 0 * self.q, q=q, done=False)
    with pytest.raises(dpscale.UnsupportedModel, match=r"Parameter 'q' is changed by the forward itself.*outside"):
        go_through(model, how)
    assert model.q is q and q.shape == (4,) and not q.any()


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "trained"])
def test_a_table_that_renormalizes_rows_is_refused_before_it_does(frozen):
    """The rows that are looked up here are short enough: it is the writing that is noticed."""
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=100.0), nn.Flatten(), nn.Linear(12, 3))
    model[0].requires_grad_(not frozen)
    with pytest.raises(dpscale.UnsupportedModel, match=r"'0.weight' is changed by the forward itself"):
        dpscale.scaled_sum(model, loss_fn, (torch.arange(12).view(4, 3) % 9, torch.zeros(4).long()), RULE)


def test_a_parameter_that_the_forward_makes_is_refused():
    def make(self, x):
        if self.q is None:
            self.q = nn.Parameter(x.detach().mean(0), requires_grad=False)
        return x

    model = Of(make)
    model.register_parameter("q", None)
    for _ in range(2):
        with pytest.raises(dpscale.UnsupportedModel, match="Parameter 'q' is changed by the forward itself"):
            dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
        assert model.q is None


@pytest.mark.parametrize("registered", [True, False])
def test_a_buffer_that_the_forward_makes_of_the_samples_is_refused(registered):
    def make(self, x):
        if getattr(self, "q", None) is None:
            self.register_buffer("q", x.detach().mean(0))
        return x

    model = Of(make)
    if registered:
        model.register_buffer("q", None)
    with pytest.raises(dpscale.UnsupportedModel, match="The forward sets 'q' from what is in the samples"):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert dict(model._buffers) == ({"q": None} if registered else {})


def test_a_buffer_that_the_forward_makes_of_a_shape_is_not():
    def make(self, x):
        if self.mask is None:
            self.mask = torch.ones(x.shape[1])
        return x * self.mask

    model = Of(make)
    model.register_buffer("mask", None)
    out = dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    torch.testing.assert_close(out.losses, loss_fn(model, BATCH).detach())


# The backward


class Scaled(torch.autograd.Function):
    """Leaves what goes forward alone; what comes back is multiplied by ``of`` that."""

    @staticmethod
    def forward(ctx, x, of):
        ctx.factor = of(x)
        return x.clone()

    @staticmethod
    def backward(ctx, g):
        return g * ctx.factor, None


class Back(nn.Module):
    """``of`` tells by what the gradient is multiplied on its way back, and ``how`` where."""

    def __init__(self, how, of):
        super().__init__()
        self.first, self.second, self.how, self.of = nn.Linear(4, 5), nn.Linear(5, 3), how, of
        held = {}
        self.remember = lambda h: held.update(factor=of(h))
        if how == "module":
            self.second.register_full_backward_hook(lambda _, grad_input, __: (grad_input[0] * held["factor"],))

    def forward(self, x):
        h = self.first(x)
        if self.how == "module":
            self.remember(h.detach())
        if self.how == "function":
            h = Scaled.apply(h, self.of)
        if self.how == "tensor" and h.requires_grad:
            factor = self.of(h.detach())
            h.register_hook(lambda g: g * factor)
        return self.second(h)


WHERE = ["tensor", "module", "function"]


@both_ways
@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("tokens", [False, True])
def test_coupling_in_the_backward_alone_is_refused(where, tokens, how):
    model = Back(where, lambda h: 1 / h.abs().mean())
    if tokens:
        model.first = nn.Sequential(nn.Embedding(9, 4), nn.Flatten(), nn.Linear(12, 5))
        x = torch.randint(0, 9, (60, 3), generator=seeded(0))
    dataset = torch.utils.data.TensorDataset(x, Y) if tokens else data()
    run = private(model)
    with pytest.raises(dpscale.UnsupportedModel, match=r"coupled (in the backward|at mean).*hook"):
        for batch in run.batches(dataset):
            run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(model, batch))
    assert run.steps_taken == 0


def test_a_hook_that_computes_with_all_gradients_gets_one_at_a_time():
    """The gradient of one loss alone does not show it: there is no other in it."""

    def normed(self, x):
        h = x * self.ones
        if h.requires_grad:
            h.register_hook(lambda g: g / g.norm())
        return h

    model = Of(normed, ones=nn.Parameter(torch.ones(4)))
    check_sample_by_sample(model, BATCH, RULE, loss=loss_fn, rtol=1e-5, why="is not its gradient at parameter 'ones'")
    with pytest.raises(dpscale.UnsupportedModel, match=r"cannot be followed in a loop of your own.*private\.step"):
        go_through(model, "backward")


@pytest.mark.parametrize("where", WHERE)
def test_what_each_sample_does_to_its_own_gradient_is_its_own_business(where):
    torch.manual_seed(0)
    model = Back(where, lambda h: 1 / h.abs().mean(1, keepdim=True))
    out = dpscale.scaled_sum(model, loss_fn, BATCH, dpscale.Clip(C=torch.inf))
    parameters = dict(model.named_parameters())
    expected = torch.autograd.grad(loss_fn(model, BATCH).sum(), list(parameters.values()))
    for name, g in zip(parameters, expected, strict=True):
        torch.testing.assert_close(out.grads[name], g)


def test_a_buffer_that_the_backward_fills_with_the_samples():
    def watch(self, x):
        def remember(g):
            self.mean.copy_(g.mean(0))

        h = x * self.ones
        if h.requires_grad:
            h.register_hook(remember)
        return h

    model = Of(watch, ones=nn.Parameter(torch.ones(4)), mean=torch.zeros(4))
    with pytest.raises(dpscale.UnsupportedModel, match="A buffer of the model is updated from the samples"):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert not model.mean.any()


# Switches


def fill(model):
    model.mode.fill_(1)


def fill_unseen(model):
    model.mode.data.fill_(1)


def load(model):
    model.load_state_dict(model.state_dict() | {"mode": torch.ones_like(model.mode)})


def by_mode(self, x):
    return centred(x) if self.mode else x


SWITCHES = {
    "bool": (lambda: Of(by_mode, mode=torch.tensor(False)), fill),
    "int": (lambda: Of(by_mode, mode=torch.zeros(1, dtype=torch.int32)), fill),
    "by .data": (lambda: Of(by_mode, mode=torch.tensor(0)), fill_unseen),
    "loaded": (lambda: Of(by_mode, mode=torch.tensor(0)), load),
    "dict": (
        lambda: Of(lambda self, x: centred(x) if self.cfg["centre"] else x, cfg={"centre": False}),
        lambda model: model.cfg.update(centre=True),
    ),
    "dict, with a tensor in it": (
        lambda: Of(lambda self, x: centred(x) if self.cfg["on"] else x, cfg={"scale": [X[0]], "on": False}),
        lambda model: model.cfg.update(on=True),
    ),
    "dict, deep": (
        lambda: Of(lambda self, x: centred(x) if self.cfg["a"][0]["b"] else x, cfg={"a": [{"b": 0}]}),
        lambda model: model.cfg["a"][0].update(b=1),
    ),
    "set": (
        lambda: Of(lambda self, x: centred(x) if "centre" in self.options else x, options={"bias"}),
        lambda model: model.options.add("centre"),
    ),
    "frozen parameter": (
        lambda: Of(lambda self, x: centred(x) if self.q is None else x, q=nn.Parameter(X[0], requires_grad=False)),
        lambda model: setattr(model, "q", None),
    ),
    "statistics": (
        lambda: nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).eval(),
        lambda model: (setattr(model[1], "running_mean", None), setattr(model[1], "running_var", None)),
    ),
}
every_switch = pytest.mark.parametrize(("make", "switch"), SWITCHES.values(), ids=SWITCHES.keys())


def counted(model):
    """The engine's sum for a training loop, not compiled but traced, and what was traced."""
    made = []
    return Engine(model, compile=lambda graph, inputs: made.append(graph) or graph).scaled_sum, made


@every_switch
def test_a_switch_is_looked_at(make, switch):
    model = make()
    for _ in range(4):  # the next sum is none before which a look is due anyway
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    switch(model)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)


@every_switch
def test_a_switch_is_looked_at_in_traced_steps(make, switch):
    model = make()
    fast, _ = counted(model)
    for _ in range(4):
        fast(loss_fn, BATCH, RULE, MASK)
    switch(model)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        fast(loss_fn, BATCH, RULE, MASK)


def test_a_switch_is_looked_at_in_a_loop_of_ones_own():
    model = SWITCHES["int"][0]()
    run = private(model)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        for batch in run.batches(data()):
            run.backward(loss_fn(model, batch))
            run.optimizer.step()
            run.optimizer.zero_grad()
            fill(model)
    assert run.steps_taken == 1


def test_a_traced_step_has_no_old_switch_in_it():
    model = Of(lambda self, x: 2 * x if self.mode else x, mode=torch.tensor(0))
    fast, made = counted(model)
    for value in (0, 1, 0, 1):
        model.mode.fill_(value)
        found = fast(loss_fn, BATCH, RULE, MASK)
        torch.testing.assert_close(found.losses, loss_fn(model, BATCH).detach())
    assert len(made) == 2


class Criterion(nn.Module):
    """A loss outside of the model, with a layer in it that couples samples in one of its modes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3, affine=False)
        self.eval()

    def forward(self, logits, y):
        return F.cross_entropy(self.norm(logits), y, reduction="none")

    def loss(self, model, batch):
        return self(model(batch[0]), batch[1])


class Called(Criterion):
    def forward(self, *args):
        if isinstance(args[0], nn.Module):
            return self.loss(*args)
        return super().forward(*args)


class Trainer:
    def __init__(self, criterion):
        self.criterion = criterion

    def loss(self, model, batch):
        return self.criterion(model(batch[0]), batch[1])

    def made(self):
        return lambda model, batch: self.loss(model, batch)


criterion = Criterion()
elsewhere = ModuleType("elsewhere")


def by_default(held):
    def loss(model, batch, held=held):
        return held.loss(model, batch)

    return loss


def by_closure(held, more=None):
    return lambda model, batch: (more, held.loss(model, batch))[1]


HOLDERS = {
    "closure": lambda c: by_closure(c),
    "closure of much": lambda c: by_closure(c, list(range(1000))),
    "default": by_default,
    "list": lambda c: (lambda held: lambda model, batch: held[0].loss(model, batch))([c]),
    "partial": lambda c: functools.partial(lambda held, model, batch: held.loss(model, batch), c),
    "method of a module": lambda c: c.loss,
    "module": lambda c: c,
    "method": lambda c: Trainer(c).loss,
    "object": lambda c: Trainer(c).made(),
    "global": lambda c: lambda model, batch: criterion.loss(model, batch),
    "global of another module": lambda c: lambda model, batch: elsewhere.criterion.loss(model, batch),
}


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS.keys())
@pytest.mark.parametrize("traced", [False, True])
def test_a_module_that_the_loss_function_holds_is_looked_at(hold, traced, monkeypatch):
    model, held = mlp(), Called()
    monkeypatch.setitem(globals(), "criterion", held)
    monkeypatch.setattr(elsewhere, "criterion", held, raising=False)
    loss = hold(held)
    compute = counted(model)[0] if traced else functools.partial(dpscale.scaled_sum, model)
    for _ in range(4):
        compute(loss, BATCH, RULE, MASK)
    held.train()
    with pytest.raises(dpscale.UnsupportedModel, match="coupled at batch_norm"):
        compute(loss, BATCH, RULE, MASK)


# Counters


def counts(self, x):
    self.n += 1
    return centred(x) if self.n > 2 else x


@pytest.mark.parametrize("how", ["eager", "traced", "backward"])
def test_a_counter_that_couples_samples_later_is_refused_at_once(how):
    model = Of(counts, n=torch.tensor(0))
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at mean"):
        if how == "backward":
            go_through(model, how)
        elif how == "traced":
            counted(model)[0](loss_fn, BATCH, RULE, MASK)
        else:
            dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert model.n == 0


def steps(self, x):
    self.n += 1
    return x


def steps_anew(self, x):
    self.n = self.n + 1
    return x


def once(self, x):
    self.n.fill_(1)
    return x


@pytest.mark.parametrize("count", [steps, once], ids=lambda f: f.__name__)
@pytest.mark.parametrize("how", ["eager", "traced", "backward"])
def test_a_counter_is_no_reason_for_more_looks(count, how):
    model, plain = Of(count, n=torch.tensor(0)), Of(lambda self, x: x)

    def looked(model):
        if how == "backward":
            return go_through(model, how, steps=20)._engine._schedule.looks
        made = []
        engine = Engine(model, compile=how == "traced" and (lambda graph, _: made.append(graph) or graph))
        for _ in range(20):
            engine.scaled_sum(loss_fn, BATCH, RULE, MASK)
        assert len(made) == (how == "traced")
        return engine._schedule.looks

    assert looked(model) == looked(plain) < 16  # of which eight at most for sizes
    assert model.n == (1 if count is once else model.n) and model.n >= 1


def test_counters_of_any_kind_need_only_so_many_looks():
    def count(self, x):
        self.calls += 1
        return steps_anew(self, x)

    model = Of(count, n=torch.tensor(0), calls=0)
    for _ in range(30):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    few = looks(model)
    for _ in range(30):
        dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
    assert looks(model) <= few + 1 < 20  # at the power of two


def test_a_dict_that_holds_itself_is_no_trouble():
    model = Of(lambda self, x: x, cfg={})
    model.cfg["self"] = model.cfg
    dpscale.scaled_sum(model, loss_fn, BATCH, RULE)
