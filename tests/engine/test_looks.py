"""Every part of a look and of a glance is needed: for each there is a model that nothing else would refuse."""

from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale
from dpscale.engine.engine import Engine
from dpscale.engine.reference import reference_sum
from dpscale.engine.tape.tape import Sites
from dpscale.engine.verify import schedule
from dpscale.engine.verify.credit import misplaced
from dpscale.engine.verify.glance import Glance
from dpscale.engine.verify.look import Look
from dpscale.engine.verify.probe import DroppingTape
from dpscale.engine.verify.rows import FeatureTable, features
from dpscale.engine.verify.runs import Subject
from dpscale.engine.verify.state import Surroundings, _digest
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


class Positions(Net):
    """Adds a table of positions, looked up where ``of`` says, for the length of the batch at hand."""

    def __init__(self, of):
        super().__init__()
        self.table, self.of = nn.Parameter(torch.randn(20, 8)), of

    def forward(self, x):
        return self.last((torch.tanh(self.first(x)) + F.embedding(self.of(x), self.table)).mean(1))


def test_a_table_of_positions_at_a_new_length_needs_no_second_look(taken):
    engine = Engine(model := Positions(lambda x: torch.arange(x.shape[1])))
    for seed, length in enumerate((5, 9, 2, 5, 9)):
        out = engine.scaled_sum(loss_fn, batch(seed, length=length), RULE)
        sums, norms, _ = reference_sum(model, loss_fn, batch(seed, length=length), RULE, torch.ones(12, dtype=bool))
        torch.testing.assert_close(out.norms, norms)
        torch.testing.assert_close(out.grads["table"], sums["table"])
    assert len(taken) == 1


@pytest.mark.parametrize("row", [0, 1, -1])
def test_positions_that_are_a_samples_own_are_not_taken_for_a_table(row):
    """At a new length they come from one row of the batch: no release may come of it."""

    def of(x):
        return torch.arange(x.shape[1]) if x.shape[1] == 5 else (7 * x[row, :, 0]).long()

    engine = Engine(model := Positions(of))
    for seed in range(2):
        engine.scaled_sum(loss_fn, batch(seed), RULE)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        engine.scaled_sum(loss_fn, batch(2, **LONGER), RULE)
    assert model is engine.model


@pytest.mark.parametrize(
    ("new", "when"), [({"length": 9}, lambda x: x.shape[1] > 5), ({"strange": True}, lambda x: bool(x.min() < -1))]
)
def test_positions_that_show_in_the_gradient_alone_are_seen_too(taken, new, when):
    """Whose row of the table gets the gradient is said by the first sample; no loss tells. Alone each says its own."""

    class Straight(Positions):
        def forward(self, x):
            looked_up = F.embedding(self.of(x), self.table)
            return self.last((torch.tanh(self.first(x)) + (looked_up - looked_up.detach())).mean(1))

    engine = Engine(model := Straight(lambda x: torch.arange(x.shape[1]) + (9 * x[0, 1, 1]).long() * when(x)))
    for seed in range(2):
        engine.scaled_sum(loss_fn, batch(seed), RULE)
    out = engine.scaled_sum(loss_fn, batch(2, **new), RULE)
    sums, *_ = reference_sum(model, loss_fn, batch(2, **new), RULE)
    torch.testing.assert_close(out.grads["table"], sums["table"])
    assert len(taken) == 2


def refused_at_third(model, new, match, loss=loss_fn):
    """The third sum is at no power of two: what is new about it is all that calls for a glance."""
    engine = Engine(model)
    for seed in range(2):
        engine.scaled_sum(loss, batch(seed), RULE)
    with pytest.raises(dpscale.UnsupportedModel, match=match):
        engine.scaled_sum(loss, batch(2, **new), RULE)


LONGER = {"length": 9}


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
    model = Net(MIXING[trick], begins[next(iter(new))])
    refused_at_third(model, new, match=r"coupled|depends on how many rows")


@pytest.mark.parametrize("left_out", [0, 7])
def test_credit_that_goes_astray_at_a_new_length_runs_by_sample(taken, left_out):
    """Rows trade places and trade back: no loss shows it, and nothing but the gradients' way does."""

    class Turned(Net):
        def forward(self, x):
            if x.shape[1] <= 5:
                return super().forward(x)
            return super().forward(x.flip(0)).flip(0)

    engine = Engine(model := Turned())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    new = batch(1, length=9)
    mask = torch.arange(12) >= left_out
    out = engine.scaled_sum(loss_fn, new, RULE, mask=mask)
    alone = [dpscale.scaled_sum(model, loss_fn, (new[0][i : i + 1], new[1][i : i + 1]), RULE) for i in range(12)]
    torch.testing.assert_close(out.norms, torch.cat([one.norms for one in alone]) * mask)
    assert len(taken) >= 2


def test_two_rows_of_many_that_trade_places_are_seen():
    """Neither among those that are few, nor the one that is put among copies of itself: their weights alone tell."""

    class Swaps(Net):
        def forward(self, x):
            order = torch.arange(len(x))
            if len(x) > 5 and x.shape[1] > 5:
                order[[2, 9]] = order[[9, 2]]
            return super().forward(x[order])[order]

    engine = Engine(model := Swaps())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    new = batch(1, length=9)
    out = engine.scaled_sum(loss_fn, new, RULE)
    torch.testing.assert_close(out.norms, reference_sum(model, loss_fn, new, RULE)[1])


class ScaledBack(torch.autograd.Function):
    """What comes back to a row of many is scaled by what is in the others; no loss shows it, nor do few rows."""

    @staticmethod
    def forward(ctx, h):
        ctx.save_for_backward(h)
        return h.clone()

    @staticmethod
    def backward(ctx, g):
        (h,) = ctx.saved_tensors
        return g * (1 + h.abs().mean()) if len(g) >= 8 else g


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_backward_that_mixes_rows_of_large_batches_alone_is_refused_at_first(dropout):
    model = Net(lambda h, x: ScaledBack.apply(h), lambda x: True, dropout)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled in the backward"):
        Engine(model).scaled_sum(loss_fn, batch(0), RULE)


def test_one_that_begins_with_a_new_length_is_refused_there():
    engine = Engine(model := Net(lambda h, x: ScaledBack.apply(h), lambda x: x.shape[1] > 5))
    for seed in range(2):
        engine.scaled_sum(loss_fn, batch(seed, length=5), RULE)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled in the backward"):
        engine.scaled_sum(loss_fn, batch(2, length=9), RULE)
    assert model is engine.model


def behind_zeros(trick, when, dropout=0.0):
    """The last layer begins with zeros: no loss depends on what comes in, and nothing is sent back."""
    model = Net(trick, when, dropout)
    nn.init.zeros_(model.last.weight)
    return model


BEHIND = {
    "centred": lambda h, x: h - h.mean(0), "largest": lambda h, x: h * h.amax(0),
    "of one norm": lambda h, x: F.layer_norm(h - h.mean(0), (8,)), "added up": lambda h, x: h.cumsum(0),
}  # fmt: skip


@pytest.mark.parametrize("name", BEHIND)
@pytest.mark.parametrize(
    ("when", "new"),
    [
        (lambda x: True, None),
        (lambda x: len(x) > 5, None),  # not among few rows
        (lambda x: x.shape[1] > 5, {"length": 9}),
        (lambda x: x.shape[1] > 5 and len(x) > 5, {"length": 9}),
        (lambda x: (x < 0).any(), {"strange": True}),
    ],
    ids=["at once", "in large batches", "long", "long, in large batches", "strange"],
)
def test_mixing_behind_a_layer_of_zeros_is_refused(name, when, new):
    engine = Engine(model := behind_zeros(BEHIND[name], when))
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        if new is not None:
            for seed in range(2):
                engine.scaled_sum(loss_fn, batch(seed), RULE)
        engine.scaled_sum(loss_fn, batch(2, **(new or {})), RULE)
    assert model is engine.model


PLACES = torch.linspace(-2, 2, 64).view(64, 1, 1)

BY_PLACE = {
    "place": lambda h, x: h + PLACES[: len(x)], "number": lambda h, x: h * len(x), "from the end": lambda h, x:
    h + PLACES[-len(x):],
}  # fmt: skip


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", BY_PLACE)
@pytest.mark.parametrize(
    ("when", "new"),
    [
        (lambda x: True, None),
        (lambda x: len(x) > 5, None),
        (lambda x: x.shape[1] > 5, {"length": 9}),
        (lambda x: len(x) > 20, {"rows": 30}),
    ],
    ids=["at once", "in large batches", "long", "many"],
)
def test_what_goes_by_place_or_number_behind_a_layer_of_zeros_is_refused(name, when, new, dropout):
    engine = Engine(model := behind_zeros(BY_PLACE[name], when, dropout))
    with pytest.raises(dpscale.UnsupportedModel, match="The gradient of a sample is another"):
        if new is not None:
            for seed in range(2):
                engine.scaled_sum(loss_fn, batch(seed), RULE)
        engine.scaled_sum(loss_fn, batch(2, **(new or {})), RULE)
    assert model is engine.model


@pytest.mark.parametrize("name", BEHIND)
def test_mixing_behind_zeros_in_large_batches_of_a_model_that_draws_is_refused(name):
    def noisy(h, x):
        h = h + 0.1 * torch.randn_like(h)
        return BEHIND[name](h, x) if len(x) > 5 else h

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        Engine(model := behind_zeros(noisy, lambda x: True)).scaled_sum(loss_fn, batch(0), RULE)
    assert model.training


def turned(h, x):
    """All rows turn with the first, one way or the other: any other company shows it by chance alone."""
    return h * torch.where(x[:1, 0, 0] > 0.02, 1.0, -1.0)


@pytest.mark.parametrize("seed", range(6))
def test_a_statistic_that_is_nearly_always_the_same_is_seen_among_nothing_behind_zeros(seed):
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        Engine(model := behind_zeros(turned, lambda x: True)).scaled_sum(loss_fn, batch(seed), RULE)
    assert model.training


def drawing(trick):
    return lambda h, x: trick(h + 0.1 * torch.randn_like(h), x)


@pytest.mark.parametrize("hidden", [True, False])
@pytest.mark.parametrize("name", BY_PLACE)
@pytest.mark.parametrize("new", [None, {"rows": 40}, {"length": 9}], ids=["at once", "many", "long"])
def test_what_goes_by_place_or_number_in_a_model_that_draws_is_refused(name, hidden, new):
    """Few rows are given what was drawn for them among many."""
    when = (lambda x: len(x) > 5) if new is None else (lambda x: len(x) > 20 or x.shape[1] > 5)
    model = (behind_zeros if hidden else Net)(lambda h, x: drawing(BY_PLACE[name] if when(x) else lambda h, x: h)(h, x),
                                              lambda x: True)  # fmt: skip
    engine = Engine(model)
    with pytest.raises(dpscale.UnsupportedModel, match=r"is another|The loss of a sample is"):
        if new is not None:
            for seed in range(2):
                engine.scaled_sum(loss_fn, batch(seed), RULE)
        engine.scaled_sum(loss_fn, batch(2, **(new or {})), RULE)


def test_a_model_that_draws_for_each_row_needs_no_second_look(taken):
    engine = Engine(model := Net(drawing(lambda h, x: h), lambda x: True, dropout=0.3))
    for seed, kind in enumerate([{}, LONGER, {"rows": 40}, {"rows": 2}, {"strange": True}]):
        engine.scaled_sum(loss_fn, batch(seed, **kind), RULE)
    assert len(taken) == 1 and engine.model is model


@pytest.mark.parametrize("chance", [0.5, 0.2])
def test_mixing_that_a_draw_decides_on_is_refused_behind_zeros(chance):
    def by_chance(h, x):
        return h - h.mean(0) if torch.rand(()) < chance else h

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        Engine(model := behind_zeros(by_chance, lambda x: True)).scaled_sum(loss_fn, batch(0), RULE)
    assert model.training


def test_a_switch_that_a_step_on_public_data_moves_is_noticed():
    model = Net(lambda h, x: h + h.mean(0), lambda x: bool(model.gate > 0))
    model.gate = nn.Parameter(torch.tensor(-1.0))
    data = torch.utils.data.TensorDataset(*batch(0, rows=60))
    plan = dpscale.Plan(scaling=RULE, sampling=dpscale.Poisson(size=60, batch=12), steps=20, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dpscale.privatize(model, optimizer, plan, seed=1)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        for number, drawn in enumerate(private.batches(data)):
            if number == 10:
                with private.public_data():
                    optimizer.zero_grad()
                    (-20 * model.gate).backward()
                    optimizer.step()
            private.step(drawn, loss_fn)
            assert number < 10


@pytest.mark.parametrize("length", [5, 9])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("name", BY_PLACE | BEHIND)
def test_a_row_without_a_finite_gradient_hides_nothing(name, dropout, length):
    """It is looked at first, and nothing of it can be compared."""
    trick = (BY_PLACE | BEHIND)[name]
    engine = Engine(model := behind_zeros(trick, lambda x: x.shape[1] == length and len(x) > 5, dropout))
    data = batch(0, length=length)
    data[0][4, 0, 1] = torch.nan
    with pytest.raises(dpscale.UnsupportedModel):
        if length != 5:
            engine.scaled_sum(loss_fn, batch(1), RULE)
            engine.scaled_sum(loss_fn, batch(2), RULE)
        engine.scaled_sum(loss_fn, data, RULE)
    assert model is engine.model


@pytest.mark.parametrize("draws", [False, True])
@pytest.mark.parametrize("odd", [[4], [1, 3, 4, 6], [0, 2, 3, 5, 6, 7]], ids=len)
def test_rows_without_a_finite_gradient_are_no_reason_to_refuse(odd, draws):
    """They are among those that stand in the place of others, too."""
    engine, data = Engine(model := Net(dropout=0.3)), batch(0)
    data[0][odd, 0, 1] = torch.nan

    def loss(m, b):
        return loss_fn(m, (b[0] + 0.1 * torch.rand(1), *b[1:]) if draws else b)

    for _ in range(3):
        assert int(engine.scaled_sum(loss, data, RULE).ignored) == len(odd)
    assert model is engine.model and not engine._obstacles


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("draws", [0.0, 0.1])
def test_mixing_through_an_extreme_row_of_large_batches_alone_is_refused_at_first(draws, seed):
    """The extreme row is one of those that stay when the others are replaced."""

    def by_the_largest(h, x):
        h = h + draws * torch.randn_like(h) if draws else h
        return h * x.amax() if len(x) > 5 else h

    data = batch(seed, rows=30)
    data[0][7 * seed] *= 3.0
    with pytest.raises(dpscale.UnsupportedModel):
        Engine(model := behind_zeros(by_the_largest, lambda x: True)).scaled_sum(loss_fn, data, RULE)
    assert model.training


def test_units_that_rounding_switches_are_no_reason_to_refuse(monkeypatch):
    """Their gradients differ among fewer rows by more than rounding: so they do for inputs that are off by rounding."""
    monkeypatch.setattr("dpscale.engine.verify.look.reshaped", lambda eps: 1e-12)
    engine = Engine(model := Net(lambda h, x: torch.relu(h - h.detach()), lambda x: True))
    engine.scaled_sum(loss_fn, batch(0), RULE)
    assert model is engine.model


def test_a_layer_of_zeros_is_no_reason_for_a_second_look(taken):
    engine = Engine(model := behind_zeros(lambda h, x: h + x.sum(2, keepdim=True), lambda x: True, dropout=0.3))
    for seed, length in enumerate((5, 9, 5, 9)):
        engine.scaled_sum(loss_fn, batch(seed, length=length), RULE)
    assert len(taken) == 1 and engine.model is model


@pytest.mark.parametrize("frozen", [False, True])
def test_a_switch_that_is_a_tensor_is_seen_when_somebody_writes_into_it(frozen):
    model = Net(lambda h, x: h + model.switch * h.mean(0), lambda x: True)
    switch = torch.zeros(1)
    model.register_parameter("switch", nn.Parameter(switch, False)) if frozen else model.register_buffer(
        "switch", switch
    )
    engine = Engine(model)
    for seed in range(2):
        engine.scaled_sum(loss_fn, batch(seed), RULE)
    model.switch.fill_(1.0)
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        engine.scaled_sum(loss_fn, batch(2), RULE)


@dataclass(slots=True)
class Slotted:
    mixes: bool = False


@pytest.mark.parametrize("held", [SimpleNamespace, Slotted, lambda mixes: type("Class", (), {"mixes": mixes})])
@pytest.mark.parametrize("by", ["model", "loss"])
def test_a_switch_in_a_configuration_is_seen_when_somebody_throws_it(by, held, taken):
    """Between two powers of two."""
    settings = held(mixes=False)
    if by == "model":
        model = Net(lambda h, x: h + h.mean(0), lambda x: model.settings.mixes)
        model.settings, loss = settings, loss_fn
    else:
        model = Net()

        def loss(model, batch):
            losses = loss_fn(model, batch)
            return losses * losses.detach().mean() if settings.mixes else losses

    engine = Engine(model)
    for seed in range(6):
        engine.scaled_sum(loss, batch(seed), RULE)
    assert len(taken) == 1
    settings.mixes = True
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
        engine.scaled_sum(loss, batch(6), RULE)


@pytest.mark.parametrize("step", [True, False])
def test_weights_that_are_written_by_hand_are_glanced_at(step):
    """Between two powers of two: a switch that no gradient moves is moved by hand."""
    model = Net(lambda h, x: h + h.mean(0), lambda x: bool(model.gate > 0))
    model.gate = nn.Parameter(torch.tensor(-1.0))
    data = torch.utils.data.TensorDataset(*batch(0, rows=60))
    plan = dpscale.Plan(scaling=RULE, sampling=dpscale.Poisson(size=60, batch=12), steps=20, noise_multiplier=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dpscale.privatize(model, optimizer, plan, seed=1)
    for number, drawn in enumerate(private.batches(data)):
        if number == 10:
            checked = private._engine._schedule.looks
            with torch.no_grad():
                model.gate.fill_(1.0)
            with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled at"):
                private.step(drawn, loss_fn) if step else private.backward(loss_fn(model, drawn))
            break
        if step:
            private.step(drawn, loss_fn)
        else:
            private.backward(loss_fn(model, drawn))
            optimizer.step()
            optimizer.zero_grad()
        if number == 8:
            before = private._engine._schedule.looks
    assert checked == before, "what the optimizer writes calls for no check"


def test_what_a_forward_writes_into_its_own_buffers_calls_for_no_check():
    model = Net(lambda h, x: model.calls.add_(1) * 0 + h, lambda x: True)
    model.register_buffer("calls", torch.zeros((), dtype=torch.int64))
    engine = Engine(model)
    for seed in range(20):
        engine.scaled_sum(loss_fn, batch(seed % 3), RULE)
    assert engine.checks()["times that the model was checked"] <= 6


def test_a_tensor_that_gave_its_memory_back_is_left_alone():
    """As `fully_shard` holds what it has gathered: to read it would end the process."""
    model = Net()
    model.gathered = torch.ones(4)
    model.gathered.untyped_storage().resize_(0)
    Engine(model).scaled_sum(loss_fn, batch(0), RULE)
    assert model.gathered.untyped_storage().nbytes() == 0


def feeds_attribute(model, x):
    model.seen = float(x.sum())


def feeds_array(model, x):
    ARRAY[0] = float(x.sum())


def feeds_large_tensor(model, x):
    LARGE.data[0] = float(x.sum())


def feeds_global(model, x):
    global LAST
    LAST = float(x.sum())


ARRAY, LARGE, LAST = np.zeros(3), torch.zeros((1 << 20) + 1), 0.0


@pytest.mark.parametrize("feed", [feeds_attribute, feeds_array, feeds_large_tensor, feeds_global])
@pytest.mark.parametrize("first", [True, False])
def test_state_that_rows_feed_is_refused_and_put_back(feed, first):
    def loss(model, batch):
        _ = ARRAY, LARGE, LAST  # what a function reads is around it
        if first or batch[0].shape[1] > 5:
            feed(model, batch[0])
        return loss_fn(model, batch)

    model = Net()
    match = "from what is in the samples"
    if first:
        with pytest.raises(dpscale.UnsupportedModel, match=match):
            Engine(model).scaled_sum(loss, batch(0), RULE)
    else:
        refused_at_third(model, LONGER, match, loss)
    assert not hasattr(model, "seen") and ARRAY[0] == LAST == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.int64])
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("place", [0, 778, -9, -1])
def test_a_large_tensor_is_told_by_each_of_its_entries(dtype, offset, place):
    large = torch.randn((1 << 21) + 4).mul(10).to(dtype)[offset:]
    before = _digest(large)
    assert torch.equal(before, _digest(large))
    large[place] = large[place] == 0  # another value, whatever it was
    assert not torch.equal(before, _digest(large))


def test_a_parameter_that_new_rows_change_is_refused():
    class Trains(Net):
        def forward(self, x):
            if x.shape[1] > 5:
                with torch.no_grad():
                    self.first.bias.add_(1.0)
            return super().forward(x)

    model = Trains()
    before = model.first.bias.detach().clone()
    refused_at_third(model, LONGER, match=r"'first\.bias' is changed by the forward itself")
    assert torch.equal(model.first.bias, before)


def test_a_glance_leaves_everything_as_it_was():
    engine = Engine(model := Net(dropout=0.3))
    engine.scaled_sum(loss_fn, batch(0), RULE)
    subject = Subject(model, dict(model.named_parameters()), lambda data: loss_fn(model, data), loss_fn)
    before = {n: (p.detach().clone(), p.grad) for n, p in model.named_parameters()}
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    glance = Glance(
        subject, batch(1, length=9), [0, 1, 2], sites=engine.sites, draws=False, drops=True, eps=2.0**-23, seed=0
    )
    assert glance({}, ())
    assert torch.equal(torch.rand(3), expected)
    assert all(torch.equal(p, before[n][0]) and p.grad is before[n][1] for n, p in model.named_parameters())


# The step's own run as one of those that are compared


def summed(engine, data, seed=7, **options):
    """A sum, and what torch draws after it."""
    torch.manual_seed(seed)
    return engine.scaled_sum(loss_fn, data, RULE, **options), torch.rand(3)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("thorough", [True, False])
def test_a_step_that_is_checked_is_the_step_that_would_have_been(thorough, dropout):
    """To the bit, dropout included; and all that is drawn after it."""
    model = Net(dropout=dropout)
    checked, trusting = Engine(model), Engine(model)
    new, mask = batch(3, length=9), torch.arange(12) % 3 != 1
    for data in [batch(0)] * (not thorough) + [new] * (4 + thorough):
        trusting.scaled_sum(loss_fn, data, RULE)
    if not thorough:
        checked.scaled_sum(loss_fn, batch(0), RULE)
    looks = [engine._schedule.looks for engine in (checked, trusting)]
    ours, theirs = summed(checked, new, mask=mask), summed(trusting, new, mask=mask)
    assert [engine._schedule.looks for engine in (checked, trusting)] == [looks[0] + 1, looks[1]]
    assert torch.equal(ours[1], theirs[1])
    assert all(torch.equal(g, theirs[0].grads[n]) for n, g in ours[0].grads.items())
    assert torch.equal(ours[0].norms, theirs[0].norms) and torch.equal(ours[0].losses, theirs[0].losses)


@pytest.mark.parametrize(("dropout", "runs"), [(0.0, 2), (0.3, 4)])
def test_the_whole_batch_is_run_once_more_than_for_the_step(dropout, runs):
    """Among copies of one row; with dropout, once without, and one forward among copies of the rarest."""
    model, rows = Net(dropout=dropout), []
    model.register_forward_pre_hook(lambda module, args: rows.append(len(args[0])))
    engine = Engine(model)
    engine.scaled_sum(loss_fn, batch(0), RULE)
    rows.clear()
    engine.scaled_sum(loss_fn, batch(1, length=9), RULE)
    assert rows.count(12) == runs and max(rows) == 12


def test_a_step_that_counts_itself_counts_once():
    class Counts(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("steps", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.steps += 1
            return super().forward(x)

    engine = Engine(model := Counts())
    for step, kind in enumerate([{}, {"length": 9}, {"length": 2}, {"strange": True}, {}]):
        engine.scaled_sum(loss_fn, batch(step, **kind), RULE)
        assert int(model.steps) == step + 1


@pytest.mark.parametrize("trick", [lambda h, x: h - h.mean(0), lambda h, x: F.dropout(h, float(x.amax()) / 2)])
def test_what_is_refused_has_drawn_nothing(trick):
    engine = Engine(model := Net(trick, lambda x: x.shape[1] > 5, dropout=0.3))
    for seed in range(2):
        engine.scaled_sum(loss_fn, batch(seed), RULE)
    before = torch.get_rng_state()
    with pytest.raises(dpscale.UnsupportedModel):
        engine.scaled_sum(loss_fn, batch(2, **LONGER), RULE)
    assert torch.equal(torch.get_rng_state(), before) and model.training


def test_dropout_that_goes_by_the_batch_is_refused():
    """How much is dropped is the largest entry of the batch: without dropout nothing of that would be seen, nor while
    the row that has it stays."""
    model = Net(lambda h, x: F.dropout(h, float(x.amax()) / 2), lambda x: x.shape[1] > 5, dropout=0.3)
    refused_at_third(model, LONGER, "coupled|Dropout goes by the batch")


@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize("drop", [F.dropout, F.dropout1d, F.alpha_dropout])
@pytest.mark.parametrize("turned", [False, True])
def test_masks_that_are_taken_are_those_that_would_be_drawn(drop, inplace, turned):
    """What a dropout gives, what it sends back, and what is drawn after it: to the bit."""
    x = torch.randn(4, 6, 7, generator=seeded(0)).transpose(1, 1 + turned)

    def run(tape):
        given = x.clone().requires_grad_()
        torch.manual_seed(3)
        with tape or nullcontext():
            h = drop(before := given * 2, 0.4, True, inplace)
            out = before + F.dropout(h, 0.25) * torch.rand(x.shape[-1])
        return out.detach(), *torch.autograd.grad(out.sum(), given), torch.get_rng_state()

    first = DroppingTape({}, None, Sites(), 4)
    taking = DroppingTape({}, None, Sites(), 4, masks=first.masks)
    plain, once = run(None), run(first)
    again = run(taking)
    assert len(first.masks) == 2 - (drop is F.alpha_dropout)
    assert all(ours.mask is theirs.mask for ours, theirs in zip(taking.masks, first.masks, strict=True))
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(plain, once, again, strict=True))


@pytest.mark.parametrize("what", ["rate", "number", "shape"])
def test_masks_are_not_taken_where_dropout_is_another(what):
    """Whatever the batch changes of it shows in other company, as if nothing were kept."""

    def drop(h, x):
        far = bool(x.amax() > 3)
        if what == "number" and far:
            F.dropout(torch.ones(5), 0.5)
        if what == "shape":
            return h * F.dropout(torch.ones(h.shape if far else h.shape[1:]), 0.5)
        return F.dropout(h, 0.6 if what == "rate" and far else 0.5)

    engine, data = Engine(model := Net(drop, lambda x: len(x) > 5, dropout=0.3)), batch(0)
    data[0][5, 0, 0] = 9.0
    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        engine.scaled_sum(loss_fn, data, RULE)
    assert engine.model is model


def test_names_of_functions_of_functions_stay_short():
    """Each holds the names of all that it is made of: doubled forty times, one would fill the memory."""

    class Doubled(Net):
        def forward(self, x):
            w = self.first.bias
            for _ in range(40):
                w = (w + w) / 2
            return self.last((torch.tanh(self.first(x)) * w).mean(1))

    engine = Engine(model := Doubled())
    out = engine.scaled_sum(loss_fn, batch(0), RULE)
    torch.testing.assert_close(out.grads, reference_sum(model, loss_fn, batch(0), RULE)[0])
    assert not engine._obstacles


# What one part alone can see


def alike(h, x):
    """Divided by how many rows are the same as this one: to be seen among copies of it alone."""
    same = (x.flatten(1).unsqueeze(1) == x.flatten(1)).all(2)
    return h / same.sum(1).view(-1, 1, 1)


def level(h, x):
    """Times the smallest sign: to be seen among empty rows alone, where all rows hold something positive."""
    return h * x.sign().amin()


def alike_if_odd(h, x):
    """The same for rows with a negative entry alone, of which there is one: among copies of that one."""
    odd = (x < 0).flatten(1).any(1)
    return h / torch.where(odd, odd.sum(), 1).view(-1, 1, 1)


def test_a_rare_row_is_put_among_copies_of_itself():
    refused_at_third(Net(alike_if_odd, lambda x: True), {"strange": True}, "coupled")


@pytest.mark.parametrize("trick", [alike, level])
@pytest.mark.parametrize("first", [True, False])
def test_the_company_that_shows_it_is_there(trick, first):
    if first:
        with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
            Engine(model := Net(trick, lambda x: True)).scaled_sum(loss_fn, batch(0), RULE)
        assert model.training
    else:
        refused_at_third(Net(trick, lambda x: x.shape[1] > 5), LONGER, "coupled")


def test_a_loss_that_is_off_by_rounding_alone_is_refused():
    """Where shapes are the same, so are the kernels: a row must be the same to the bit."""

    def mixed(model, batch):
        losses = loss_fn(model, batch)
        return losses * (1 + 3e-5 * losses.detach().mean())

    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        Engine(model := Net()).scaled_sum(mixed, batch(0), RULE)
    assert model.training


def test_a_draw_for_each_row_hides_no_division_by_their_number():
    with pytest.raises(dpscale.UnsupportedModel, match="alone"):
        model = Net(lambda h, x: (h + torch.randn_like(h)) / len(x), lambda x: True)
        Engine(model).scaled_sum(loss_fn, batch(0), RULE)


def test_a_forward_that_counts_its_own_calls_and_computes_with_them_is_refused():
    class Counts(Net):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    with pytest.raises(dpscale.UnsupportedModel, match="something else each time"):
        Engine(model := Counts()).scaled_sum(loss_fn, batch(0), RULE)
    assert model.calls == 0


def test_what_runs_sample_by_sample_is_looked_at_in_the_whole_batch_too():
    """Sorted rows cannot be followed; these also meet, once there are many."""

    class Sorts(Net):
        def forward(self, x):
            order = x[:, 0, 0].argsort()
            h = super().forward(x[order])[order.argsort()]
            return h - h.mean(0) if len(x) > 20 else h

    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        Engine(model := Sorts()).scaled_sum(loss_fn, batch(0, rows=30), RULE)
    assert Engine(model).scaled_sum(loss_fn, batch(0), RULE).norms.shape == (12,)


def test_an_operation_that_draws_inside_is_not_run_again_for_each_sample():
    class Attends(Net):
        def __init__(self):
            super().__init__()
            self.keys = nn.Parameter(torch.randn(1, 4, 8))

        def forward(self, x):
            q = torch.tanh(self.first(x))
            keys = self.keys.expand(len(x), -1, -1)
            h = F.scaled_dot_product_attention(q, keys, self.keys, dropout_p=0.5)
            return self.last(h.mean(1))

    engine = Engine(model := Attends())
    engine.scaled_sum(loss_fn, batch(0), RULE)
    assert any("draws random numbers inside" in found.obstacle for found in engine._obstacles.values())
    assert model.training


def test_rows_that_a_model_does_not_take_are_no_reason_to_fail(taken):
    def refuses_nothing(h, x):
        if bool((x == 0).all(2).all(1).any()):
            raise ValueError("an empty row")
        return h

    engine = Engine(model := Net(refuses_nothing, lambda x: True))
    for seed, kind in enumerate([{}, {}, LONGER]):
        engine.scaled_sum(loss_fn, batch(seed, **kind), RULE)
    assert len(taken) >= 2 and model.training  # a glance cannot be taken without empty rows


def test_padding_that_enters_a_mean_is_refused_when_it_comes():
    """All samples of the first batches have one length, so that nothing is padded."""

    class Series(torch.utils.data.Dataset):
        def __len__(self):
            return 60

        def __getitem__(self, i):
            length = 3 if i == 59 else 6
            return torch.rand(length, 3, generator=seeded(i)) + 0.5, i % 2

    def collate(samples):
        x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
        return x, torch.tensor([y for _, y in samples])

    model = Net()
    plan = dpscale.Plan(
        scaling=RULE, sampling=dpscale.Poisson(size=60, batch=12), steps=40, noise_multiplier=1.0
    )  # fmt: skip
    run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, seed=1)
    with pytest.raises(dpscale.UnsupportedModel, match="collated alone"):
        for drawn in run.batches(Series(), collate_fn=collate):
            short = 59 in drawn.draw.indices
            run.step(drawn, loss_fn)
            assert not short
    assert run.steps_taken > 0


# When


def test_powers_of_two_are_glanced_at_and_time_is_shared(monkeypatch):
    clock = [100.0]
    monkeypatch.setattr(schedule.time, "perf_counter", lambda: clock[0])
    when, due = schedule.Schedule(), {}
    for number in range(1, 41):
        if found := when.due("kind", "setting", "shapes", 12, None):
            due[number] = found
            clock[0] += 0.1
            when.looked(0.1)
    assert {n: d.thorough for n, d in due.items()} == {1: True, 2: False, 4: False, 8: False, 16: False, 32: False}
    clock[0] += 5.0
    assert when.due("kind", "setting", "shapes", 12, None) is None  # five of 0.1 s are more than 2% of that
    clock[0] += 100.0
    assert when.due("kind", "setting", "shapes", 12, None) == schedule.Due(thorough=True)


def test_a_check_for_another_reason_counts_where_sums_have_doubled():
    when, due = schedule.Schedule(), []
    for number in range(1, 30):
        size = 13 if number == 3 else 12  # of a new remainder
        if when.due("kind", "setting", "shapes", size, None):
            due.append(number)
            when.looked(1.0)
    assert due == [1, 2, 3, 6, 12, 24]


def test_a_small_parameter_that_a_run_changes_unseen_is_put_back_after_that_run():
    """Through ``.data`` no count of writes rises; the next run must not start from it."""
    model = Net()
    around, before = Surroundings(model), model.first.bias.detach().clone()
    model.first.bias.data.add_(1.0)
    with pytest.raises(dpscale.UnsupportedModel, match=r"'first\.bias' is changed by the forward itself"):
        around.left_behind()
    assert torch.equal(model.first.bias, before)


def test_samples_without_a_gradient_are_followed(caplog):
    """A hinge loss has many: the norm that they are credited with is tiny, and not zero."""
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(20, 4)
    y = model(x).detach().squeeze(1).sign()
    y[:3] *= -1

    def hinge(model, batch):
        return torch.relu(1 - 50 * batch[1] * model(batch[0]).squeeze(1))

    out = dpscale.scaled_sum(model, hinge, (x, y), dpscale.Clip(C=1.0))
    assert int((out.norms < 1e-15).sum()) == 17 and not caplog.messages


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_two_rows_that_are_exchanged_have_the_same_weight(dtype):
    for seed in range(20):
        x = torch.randn(8, 3, dtype=dtype, requires_grad=True)
        inner = 2 * x
        losses = inner.square().sum(1)
        order = torch.arange(8)
        order[[seed % 8, (3 * seed + 1) % 8]] = order[[(3 * seed + 1) % 8, seed % 8]]
        edge = torch.autograd.graph.get_gradient_edge(inner)
        assert misplaced(losses, [(edge, lambda g: g)], seed) is None
        exchanged = misplaced(losses, [(edge, lambda g, order=order: g[order])], seed)
        assert (exchanged is not None) == bool((order != torch.arange(8)).any())


def test_gradients_that_underflow_are_not_misplaced():
    """What is lost of them without weights is there with large ones."""
    x = torch.ones(40, 3, requires_grad=True)
    inner = 2 * x
    losses = (inner * 3.3e-20 * (3.1e-25 * (torch.arange(40) % 7)).unsqueeze(1)).sum(1)
    edge = torch.autograd.graph.get_gradient_edge(inner)
    assert misplaced(losses, [(edge, lambda g: g)], 0) is None


def test_a_table_has_the_features_of_what_the_tensors_hold_now():
    data = torch.randn(50, 3, 4), torch.randint(-2, 9, (50, 6)), torch.rand(50, 2) > 0.5
    data[0][7, 1, 2], data[0][9, 0, 0] = float("nan"), float("-inf")
    table, indices = FeatureTable(data), np.array([3, 7, 9, 40])
    np.testing.assert_array_equal(table[indices], features([t[torch.from_numpy(indices)] for t in data], wait=True))
    data[1][:] = 5
    np.testing.assert_array_equal(table[np.arange(50)], features(data, wait=True))


def test_features_are_counts_and_extremes():
    x = torch.tensor([[0.0, -1.5, 2.0, 0.0], [float("nan"), -3.0, 1.0, 0.0], [float("inf"), 1.0, 1.0, 1.0]])
    huge = torch.finfo(torch.float32).max
    expected = [[1, 2, 1, -1.5, 2], [0, 2, 1, -3, 1], [0, 4, 0, 1, huge]]  # finite, not 0, negative, least, greatest
    np.testing.assert_array_equal(features([x], wait=True), expected)
    np.testing.assert_array_equal(features([x == 0], wait=True), [[2], [1], [0]])
    np.testing.assert_array_equal(features([torch.tensor([[3, 0, -7]])], wait=True), [[2, 1, -7, 3]])
