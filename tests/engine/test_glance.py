"""A glance lets pass what a look would, and leaves everything else to a look; each of its parts is needed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale
from dpscale.engine.engine import Engine
from dpscale.engine.verify.glance import Glance
from dpscale.engine.verify.look import Look, Subject
from tests.seeding import seeded

RULE = dpscale.Clip(C=1.0)


class Net(nn.Module):
    """Rows of any length; ``trick`` is done to what comes in once ``when`` says so."""

    def __init__(self, trick=lambda h, x: h, when=lambda x: False, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.dropout = nn.Linear(3, 8), nn.Linear(8, 2), nn.Dropout(dropout)
        self.trick, self.when = trick, when

    def forward(self, x):
        h = self.dropout(torch.tanh(self.first(x)))
        if self.when(x):
            h = self.trick(h, x)
        return self.last(h.mean(1))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def batch(seed, rows=12, length=5, strange=False):
    g = seeded(seed)
    x = torch.rand(rows, length, 3, generator=g)
    if strange:
        x[rows // 3, 0, 0] = -7.0
    return x, torch.randint(0, 2, (rows,), generator=g)


@pytest.fixture
def taken(monkeypatch):
    """How many looks were taken."""
    numbers = []
    whole = Look.__call__

    def noted(self):
        numbers.append(1)
        return whole(self)

    monkeypatch.setattr(Look, "__call__", noted)
    return numbers


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_other_lengths_sizes_and_rows_need_no_second_look(taken, dropout):
    engine = Engine(model := Net(dropout=dropout))
    kinds = [{}, {"length": 9}, {"length": 2}, {"rows": 40}, {"rows": 2}, {"strange": True}, {}, {}]
    for seed, kind in enumerate(kinds):
        engine.scaled_sum(loss_fn, batch(seed, **kind), RULE)
    assert len(taken) == 1 and engine.model is model


MIXING = {
    "a mean": lambda h, x: h - h.mean(0),
    "the count of rows": lambda h, x: h / len(x),
    "the largest": lambda h, x: h * x.amax(),
    "the first row": lambda h, x: h + h[:1],
}


@pytest.mark.parametrize("trick", MIXING)
@pytest.mark.parametrize("new", [{"length": 9}, {"rows": 40}, {"strange": True}], ids=lambda new: next(iter(new)))
def test_mixing_that_begins_with_something_new_is_refused_then(trick, new):
    begins = {
        "length": lambda x: x.shape[1] > 5, "rows": lambda x: len(x) > 20, "strange": lambda x: bool((x < -5).any())
    }  # fmt: skip
    engine = Engine(model := Net(MIXING[trick], begins[next(iter(new))]))
    engine.scaled_sum(loss_fn, batch(0), RULE)
    with pytest.raises(dpscale.UnsupportedModel, match=r"coupled|depends on how many rows"):
        engine.scaled_sum(loss_fn, batch(1, **new), RULE)
    assert model is engine.model


def test_credit_that_goes_astray_at_a_new_length_runs_by_sample(taken):
    """Rows trade places and trade back: no loss shows it, and nothing but the gradients' way does."""

    class Turned(Net):
        def forward(self, x):
            if x.shape[1] <= 5:
                return super().forward(x)
            return super().forward(x.flip(0)).flip(0)

    engine = Engine(model := Turned())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    new = batch(1, length=9)
    out = engine.scaled_sum(loss_fn, new, RULE)
    alone = [dpscale.scaled_sum(model, loss_fn, (new[0][i : i + 1], new[1][i : i + 1]), RULE) for i in range(12)]
    torch.testing.assert_close(out.norms, torch.cat([one.norms for one in alone]))
    assert len(taken) >= 2


def test_state_that_new_rows_feed_is_refused():
    class Keeps(Net):
        def forward(self, x):
            if x.shape[1] > 5:
                self.seen = float(x.sum())
            return super().forward(x)

    engine = Engine(model := Keeps())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    with pytest.raises(dpscale.UnsupportedModel, match="'seen'"):
        engine.scaled_sum(loss_fn, batch(1, length=9), RULE)
    assert not hasattr(model, "seen")


def test_a_parameter_that_new_rows_change_is_refused():
    class Trains(Net):
        def forward(self, x):
            if x.shape[1] > 5:
                with torch.no_grad():
                    self.first.bias.add_(1.0)
            return super().forward(x)

    engine = Engine(model := Trains())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    before = model.first.bias.detach().clone()
    with pytest.raises(dpscale.UnsupportedModel, match=r"'first\.bias' is changed by the forward itself"):
        engine.scaled_sum(loss_fn, batch(1, length=9), RULE)
    assert torch.equal(model.first.bias, before)


def test_a_glance_leaves_everything_as_it_was():
    engine = Engine(model := Net(dropout=0.3))
    engine.scaled_sum(loss_fn, batch(0), RULE)
    subject = Subject(model, dict(model.named_parameters()), lambda data: loss_fn(model, data), loss_fn)
    before = {n: (p.detach().clone(), p.grad) for n, p in model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    glance = Glance(subject, batch(1, length=9), [0, 1, 2], sites=engine.sites, draws=False, seed=0)
    assert glance(whole=True, singles={}, rest=())
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, before[n][0]) and p.grad is before[n][1] for n, p in model.named_parameters())
