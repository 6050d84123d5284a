"""People instead of rows: the oracle is a plain loop over people, the bound is tried out on neighbouring people."""

import numpy as np
import pandas
import pytest
import torch
from torch import nn
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

import dpscale
from dpscale.batches import keeps_order

from .helpers import vector
from .ranks import interpreted
from .seeding import seeded

COUNTS = (1, 3, 2, 9, 1, 4, 3, 6)  # records of each person: one, fewer than K, K, and more
PEOPLE, K, EXPECTED = len(COUNTS), 3, 4
USERS = np.repeat(np.arange(PEOPLE), COUNTS)[np.random.default_rng(0).permutation(sum(COUNTS))]
RULE = dpscale.AutoS(C=0.1, r=1e-5)  # nearly every person adds all of the bound
POISSON = dpscale.Poisson(size=PEOPLE, batch=EXPECTED)


class Words(nn.Module):
    """Records that are sequences: flattened inside, and mixed over time."""

    def __init__(self):
        super().__init__()
        self.words, self.lstm, self.head = nn.Embedding(9, 5), nn.LSTM(5, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, ids):
        out, _ = self.lstm(self.words(ids))
        return self.head(out.flatten(0, 1)).unflatten(0, ids.shape).mean(1)


def mlp():
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))


def cnn():
    return nn.Sequential(nn.Conv2d(1, 3, 2), nn.GroupNorm(3, 3), nn.Flatten(), nn.Linear(12, 3))


MODELS = {
    "mlp": (mlp, lambda n, g: torch.randn(n, 4, generator=g, dtype=torch.float64)),
    "cnn": (cnn, lambda n, g: torch.randn(n, 1, 3, 3, generator=g, dtype=torch.float64)),
    "words": (Words, lambda n, g: torch.randint(0, 9, (n, 5), generator=g)),
}


def model_of(name):
    torch.manual_seed(0)
    return MODELS[name][0]().double()


def records_of(name="mlp", seed=0, size=None):
    """Inputs, labels, and which record it is."""
    g, size = seeded(seed), size or len(USERS)
    x = MODELS[name][1](size, g)
    return TensorDataset(x, torch.randint(0, 3, (size,), generator=g), torch.arange(size))


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def released(model, data, sampling, steps, how="step", seed=0, loss=loss_fn, **options):
    """(The sum that was released, the batch), step by step; the weights stay."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    momentum = options.pop("momentum", None)
    plan = dpscale.Plan(scaling=RULE, sampling=sampling, steps=steps, unsafe_no_noise=True, momentum=momentum)
    private = dpscale.privatize(model, optimizer, plan, seed=seed, **options)
    sums, batches = [], []

    def catch(*_):
        sums.append(torch.cat([p.grad.detach().flatten() * plan.expected_batch for p in model.parameters()]))

    optimizer.register_step_pre_hook(catch)
    for batch in private.batches(data):
        if how == "step":
            private.step(batch, loss)
        else:
            for part in [batch] if how == "backward" else private.parts(batch, 2):
                private.backward(loss(model, part), part)
            optimizer.step()
            optimizer.zero_grad()
        batches.append(batch)
    assert private.steps_taken == steps
    return sums, batches


def taken(batch):
    """{person: the records that count}, each with the same part in the mean."""
    shares, rows = batch.draw.shares, batch[2].reshape(batch.draw.shares.shape)
    assert np.array_equal(shares.sum(1).round(5), np.ones(len(shares)))
    return {int(p): row[torch.from_numpy(s > 0)].tolist() for p, row, s in zip(batch.draw.indices, rows, shares,
                                                                               strict=True)}  # fmt: skip


def gradient(model, loss):
    grads = torch.autograd.grad(loss, list(model.parameters()))
    return torch.cat([g.flatten() for g in grads])


def plain_sum(model, data, chosen):
    """A loop over people: the mean gradient of each one's records, scaled by its norm."""
    total = torch.zeros_like(vector(model))
    for records in chosen.values():
        g = gradient(model, loss_fn(model, data[records]).mean())
        total += RULE.weight(g.norm()) * g
    return total


@pytest.mark.parametrize("how", ["step", "backward", "parts"])
@pytest.mark.parametrize("name", MODELS)
def test_people_are_summed_as_a_loop_over_them_would(name, how):
    model, data = model_of(name), records_of(name)
    people = dpscale.by_user(data, USERS, records=K)
    sums, batches = released(model, people, POISSON, 4, how)
    met = set()
    for total, batch in zip(sums, batches, strict=True):
        chosen = taken(batch) if len(batch.draw.indices) else {}
        for person, records in chosen.items():
            own = set(np.flatnonzero(people.users[person] == USERS).tolist())
            assert {*records} <= own and len(records) == len({*records}) == min(K, len(own))
        torch.testing.assert_close(total, plain_sum(model, data, chosen), rtol=1e-9, atol=1e-12)
        met |= {len(records) for records in chosen.values()}
    assert met == {1, 2, 3}


IN_PARTS = {"parts": {"micro_batch": 2}, "traced": {"compile": interpreted},
            "both": {"compile": interpreted, "micro_batch": 3}}  # fmt: skip


@pytest.mark.parametrize("options", [*IN_PARTS.values(), pytest.param({"compile": True}, marks=pytest.mark.compiled)],
                         ids=[*IN_PARTS, "compiled"])  # fmt: skip
def test_people_in_micro_batches_and_compiled(options):
    model, data = model_of("mlp"), records_of()
    sums, batches = released(model, dpscale.by_user(data, USERS, records=K), POISSON, 2, **options)
    for total, batch in zip(sums, batches, strict=True):
        torch.testing.assert_close(total, plain_sum(model, data, taken(batch)), rtol=1e-6, atol=1e-9)


def test_one_record_of_each():
    model, data = model_of("mlp"), records_of()
    people = dpscale.by_user(data, USERS, records=1)
    for how in ("step", "backward"):
        sums, batches = released(model, people, POISSON, 2, how)
        for total, batch in zip(sums, batches, strict=True):
            assert batch.draw.shares.shape == (len(batch.draw.indices), 1)
            torch.testing.assert_close(total, plain_sum(model, data, taken(batch)), rtol=1e-9, atol=1e-12)


def neighbours(data, person, more):
    """All records of a person exchanged for others, and for another number of them."""
    mine = np.flatnonzero(person == USERS)
    others = records_of(seed=5, size=len(mine) + more)
    keep = np.flatnonzero(person != USERS)
    joined = [torch.cat([a[keep], b]) for a, b in zip(data.tensors, others.tensors, strict=True)]
    return TensorDataset(*joined), np.concatenate([USERS[keep], np.full(len(mine) + more, person)])


def in_order(data, users, records=K):
    """People by their numbers, so that those of two data sets have the same places."""
    people = dpscale.by_user(data, users, records=records)
    return people.some(np.argsort(people.users).tolist())


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("person, more", [(3, 0), (3, -7), (0, 11)], ids=["same", "fewer", "more"])
def test_a_person_who_changes_all_records_moves_a_step_by_two_bounds_at_most(how, person, more):
    data = records_of()
    there = in_order(*neighbours(data, person, more))
    plain, batches = released(model_of("mlp"), in_order(data, USERS), POISSON, 6, how, seed=1)
    other, _ = released(model_of("mlp"), there, POISSON, 6, how, seed=1)
    moves = []
    for a, b, batch in zip(plain, other, batches, strict=True):
        moves.append(float((a - b).norm()) / RULE.bound)
        if person not in batch.draw.indices:  # nothing else is drawn or chosen differently
            assert moves[-1] < 1e-9
    assert 0.1 < max(moves) <= 2 + 1e-9 and min(moves) < 1e-9


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_person_fewer_moves_a_step_by_one_bound_at_most(how):
    people = in_order(records_of(), USERS, records=max(COUNTS))  # no choice, which would be another at another place
    full = released(model_of("mlp"), people, dpscale.FullBatch(size=PEOPLE), 1, how)[0][0]
    for person in (3, 0, PEOPLE - 1):  # with nine records, with one, and the last
        others = people.some([p for p in range(PEOPLE) if p != person])
        less = released(model_of("mlp"), others, dpscale.FullBatch(size=PEOPLE - 1), 1, how)[0][0]
        assert 0.9 < float((full - less).norm()) / RULE.bound <= 1 + 1e-9


def test_nobody_counts_more_for_having_more():
    """What a person adds is a mean: it says nothing of how many records they have."""
    x, y, _ = records_of().tensors
    once = TensorDataset(x[:PEOPLE], y[:PEOPLE], torch.arange(PEOPLE))
    again = torch.arange(PEOPLE).repeat_interleave(torch.tensor(COUNTS))
    sums = [
        released(model_of("mlp"), dpscale.by_user(data, users, records=K), dpscale.FullBatch(size=PEOPLE), 1)[0][0]
        for data, users in ((once, range(PEOPLE)), (TensorDataset(*(t[again] for t in once.tensors)), again))
    ]
    torch.testing.assert_close(*sums, rtol=1e-9, atol=1e-12)


def test_records_are_chosen_afresh_from_the_runs_own_key():
    people = dpscale.by_user(records_of(), USERS, records=K)
    model_of("mlp")  # starts torch's numbers from its own seed
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    draws = [
        [{p: tuple(sorted(r)) for p, r in taken(b).items()} for b in
         released(model_of("mlp"), people, dpscale.FullBatch(size=PEOPLE), 12, seed=seed)[1]]
        for seed in (0, 0, 1)
    ]  # fmt: skip
    assert torch.equal(states[0], torch.get_rng_state()) and (states[1] == np.random.get_state()[1]).all()
    assert draws[0] == draws[1] != draws[2]
    largest = people.users.index(3)
    assert len({step[largest] for step in draws[0]}) > 6  # of 84 subsets
    assert {i for step in draws[0] for i in step[largest]} == set(np.flatnonzero(USERS == 3).tolist())


@pytest.mark.parametrize("how", ["step", "backward"])
def test_an_empty_draw_of_people_releases_nothing(how):
    people = dpscale.by_user(records_of(), USERS, records=K)
    sums, batches = released(model_of("mlp"), people, dpscale.Poisson(size=PEOPLE, batch=1), 8, how, seed=1)
    empty = [not len(batch.draw.indices) for batch in batches]
    assert sum(empty) >= 2
    assert [not total.any() for total in sums] == empty


@pytest.mark.parametrize("momentum", [dpscale.PerSampleEMA(gamma=0.5), dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=1)])
def test_momenta_take_people_for_samples(momentum):
    """The weights stay, so every point and every memory has the same gradient where all records are taken."""
    data, most = records_of(), max(COUNTS)
    people = dpscale.by_user(data, USERS, records=most)
    sums, _ = released(model_of("mlp"), people, dpscale.FullBatch(size=PEOPLE), 3, momentum=momentum)
    own = {p: np.flatnonzero(user == USERS).tolist() for p, user in enumerate(people.users)}
    for total in sums:  # the rule is nearly indifferent to the length of a combination
        torch.testing.assert_close(total, plain_sum(model_of("mlp"), data, own), rtol=1e-4, atol=1e-6)


# -- What is said ----------------------------------------------------------------------------------------------------


def private(model=None, ledger=None, **changes):
    model = model or model_of("mlp")
    settings = {"scaling": RULE, "sampling": POISSON, "steps": 4, "noise_multiplier": 1.0, "delta": 1e-3}
    plan = dpscale.Plan(**settings | changes)
    return dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0, ledger=ledger)


def test_the_statement_speaks_of_people_and_epsilon_is_that_of_the_plan_over_them():
    people, run = dpscale.by_user(records_of(), USERS, records=K), private()
    planned = run.plan.epsilon()
    assert "Unit of privacy: one sample" in run.statement()
    for batch in run.batches(people):
        run.step(batch, loss_fn)
    assert run.epsilon() == planned == private(records=K).plan.epsilon()
    said = run.statement()
    assert "Unit of privacy: a person with at most 3 records in a step; all of their records are protected" in said
    assert "neighbours if one has one person more than the other" in said and "each of 8 people is in the batch" in said
    assert "sample" not in said.replace("Poisson-sampled", "")


def test_make_private_plans_for_people():
    model = model_of("mlp")
    people = dpscale.by_user(records_of(), USERS, records=K)
    loader = DataLoader(people, batch_size=2, collate_fn=lambda rows: torch.utils.data.default_collate(rows))
    run = dpscale.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), loader, epsilon=3, delta=1e-3, epochs=2, batch=EXPECTED
    )
    assert (run.plan.sampling.size, run.plan.expected_batch, run.plan.records) == (PEOPLE, EXPECTED, K)
    for epoch in run.epochs():
        for batch in epoch:
            run.step(batch, loss_fn)
    assert run.epsilon() <= 3 and "a person with at most 3 records" in run.statement()


def test_a_run_does_not_change_its_unit():
    people, rows = (
        dpscale.by_user(records_of(), USERS, records=K),
        TensorDataset(*(t[:PEOPLE] for t in records_of().tensors)),
    )
    for first, then, planned in ((rows, people, {}), (people, rows, {}), (people, people, {"records": 5})):
        run = private(**planned)
        with pytest.raises(ValueError, match=r"'dataset' parameter of batches must be of .*, as planned. Got 'of "):
            for data in (first, then):
                for batch in run.batches(data):
                    run.step(batch, loss_fn)
                    break


def test_a_run_on_people_is_resumed_as_one(tmp_path):
    people, run = dpscale.by_user(records_of(), USERS, records=K), private()
    for batch in run.batches(people):
        run.step(batch, loss_fn)
        run.save(tmp_path / "run")
        break
    again = private()
    again.load(tmp_path / "run")
    assert "a person with at most 3 records" in again.statement()
    with pytest.raises(ValueError, match="does not fit this run: its plan is another: records was 3 and is 5"):
        private(records=5).load(tmp_path / "run")


def test_a_ledger_keeps_people_and_records_apart(tmp_path):
    ledger = dpscale.Ledger(tmp_path / "ledger", epsilon=100, delta=1e-3)
    private(records=K, ledger=ledger).close()
    with pytest.raises(ValueError, match=r"protects single records, and .* has runs that protect people"):
        private(ledger=ledger)
    run = private(records=5, ledger=ledger)
    with pytest.raises(ValueError, match="must be of people with 5 records at most, as planned"):
        run.batches(dpscale.by_user(records_of(), USERS, records=K))
    run.close()


# -- Data ------------------------------------------------------------------------------------------------------------


class Sequences(Dataset):
    """Records of unequal length, and which they are."""

    def __len__(self):
        return len(USERS)

    def __getitem__(self, i):
        return torch.full((1 + i % 5,), float(i + 1)), i % 3, i


def padded(rows):
    x, y, i = zip(*rows, strict=True)
    return nn.utils.rnn.pad_sequence(x, batch_first=True), torch.tensor(y), torch.tensor(i)


def by_length(rows):
    return padded(sorted(rows, key=lambda row: -len(row[0])))


def masking(rows):
    x, y, i = padded(rows)
    return x * (torch.rand(x.shape) > 0.15), y, i


def lengths_loss(model, batch):
    mean = batch[0].sum(1, keepdim=True) / (batch[0] != 0).sum(1, keepdim=True).clamp(min=1)
    return nn.functional.cross_entropy(model(mean.double() / 30 * torch.ones(1, 4)), batch[1], reduction="none")


def test_rows_that_are_padded_to_the_longest_stay_with_their_person():
    people = dpscale.by_user(Sequences(), USERS, records=K)
    run = private()
    for batch in run.batches(people, collate_fn=padded):
        assert all({*USERS[records]} == {people.users[p]} for p, records in taken(batch).items())
        run.step(batch, lengths_loss)


def test_a_collate_fn_that_sorts_would_mix_people_and_is_refused():
    with pytest.raises(ValueError, match=r"collate_fn changes the order of its rows.*Return them in the order"):
        for _ in private().batches(dpscale.by_user(Sequences(), USERS, records=K), collate_fn=by_length):
            pass


def test_order_is_seen_behind_random_numbers():
    rows = [Sequences()[i] for i in range(12)]
    torch.manual_seed(0)
    assert keeps_order(padded, rows) and keeps_order(masking, rows) and not keeps_order(by_length, rows)
    assert keeps_order(by_length, rows[:1])


def test_workers_fetch_the_records_of_people():
    data = records_of()
    sums = [
        released(model_of("mlp"), source, POISSON, 2)[0]
        for source in (dpscale.by_user(Rows(data), USERS, records=K), dpscale.by_user(data, USERS, records=K))
    ]
    torch.testing.assert_close(sums[0], sums[1])
    run = private(steps=1)
    for batch in run.batches(dpscale.by_user(Rows(data), USERS, records=K), num_workers=1):
        assert all({*USERS[records]} == {USERS[records[0]]} for records in taken(batch).values())
        run.step(batch, loss_fn)


class Rows(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return self.data[i]


def test_people_may_be_split_but_not_joined():
    people = dpscale.by_user(records_of(), USERS, records=K)
    part = Subset(people, [6, 2, 4])
    run = private(sampling=dpscale.FullBatch(size=3))
    for batch in run.batches(part):
        assert {int(USERS[i[0]]) for i in taken(batch).values()} == {people.users[p] for p in (6, 2, 4)}
        break
    with pytest.raises(ValueError, match=r"people in one data set.*One person may be in two of them"):
        private(sampling=dpscale.FullBatch(size=2 * PEOPLE)).batches(ConcatDataset([people, people]))
    with pytest.raises(ValueError, match=r"each named once\. Got '1 named again'"):
        private(sampling=dpscale.FullBatch(size=2)).batches(Subset(people, [1, 1]))


@pytest.mark.parametrize(
    "change, message",
    [
        ({"users": USERS[1:]}, f"of {len(USERS)} entries, one for each record. Got {len(USERS) - 1}"),
        ({"users": [None, *USERS[1:]]}, "numbers or names, one for each record. Got 'None for record 0'"),
        ({"users": [float("nan"), *USERS[1:]]}, "Got 'nan for record 0'.*a person of its own"),
        ({"users": [np.float32("nan"), *USERS[1:]]}, "Got 'nan for record 0'"),  # which is no float of Python
        ({"users": [pandas.NA, *USERS[1:]]}, "Got '<NA> for record 0'"),
        ({"users": pandas.Series(USERS).astype("Int64").where(USERS > 0)}, r"Got '<NA> for record \d"),
        ({"users": [pandas.NaT, *USERS[1:]]}, "Got 'NaT for record 0'"),
        ({"users": [(1, float("nan")), *USERS[1:]]}, r"Got '\(1, nan\) for record 0'"),
        ({"users": [object(), *USERS[1:]]}, "Got '<object object at .* for record 0'"),  # equal to itself alone
        ({"users": ["3", *USERS[1:].tolist()]}, r"must be of one type. Got \"'3' \(str\) and \d \(int\)\".*two ways"),
        ({"users": [b"3", *map(str, USERS[1:])]}, r"Got \"b'3' \(bytes\) and '\d' \(str\)\""),
        ({"users": dict(enumerate(USERS))}, "numbers or names, one for each record. Got 'dict'"),
        ({"users": set(range(len(USERS)))}, "Got 'set'"),
        ({"users": pandas.DataFrame({"who": USERS})}, "Got 'DataFrame'"),
        ({"users": 5}, "Got 'int'"),
        (
            {"dataset": dpscale.by_user(records_of(), USERS, records=K), "users": range(PEOPLE)},
            "of records. Got 'people'",
        ),
        ({"users": np.stack([USERS, USERS], 1)}, "numbers or names"),
        ({"users": "name"}, "the name of a column only for a data frame"),
        ({"records": 0}, "'records' parameter of by_user must be an integer >= 1. Got 0"),
        ({"dataset": TensorDataset(torch.zeros(0, 4)), "users": []}, "at least one record"),
        ({"target": "y"}, "'target' parameter of by_user must be left out unless the data are a data frame"),
    ],
)
def test_what_cannot_be_people_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dpscale.by_user(**{"dataset": records_of(), "users": USERS, "records": K} | change)


def test_names_that_are_equal_are_one_person():
    """However a number is held, and whatever holds the names."""
    rows = records_of(size=6)
    plain = ["ann", "bob", "ann", "ann", "eve", "bob"]
    as_text, numbers = np.array(plain), [1, 1.0, np.int64(1), True, np.float32(1), 2]
    series = pandas.Series(plain, index=[5, 4, 3, 2, 1, 0])  # by place, not by label
    for users in (plain, as_text, [*as_text], series, series.astype("category"), series.astype("string"), iter(plain)):
        people = dpscale.by_user(rows, users, records=2)
        assert people.users == ["ann", "bob", "eve"] and [int(r[2]) for r in people[0]] == [0, 2, 3]
    assert dpscale.by_user(rows, numbers, records=2).users == [1, 2]


def test_people_who_are_mixed_by_the_model_are_refused():
    """Records of one person may meet; those of two may not."""

    def coupled(model, batch):
        return loss_fn(model, (batch[0] - batch[0].mean(0), batch[1]))

    people = dpscale.by_user(records_of(), USERS, records=K)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        released(model_of("mlp"), people, POISSON, 2, loss=coupled)
    norm = nn.BatchNorm1d(4, track_running_stats=False)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        released(nn.Sequential(norm, nn.Linear(4, 3)).double(), people, POISSON, 2, "backward")


@pytest.mark.parametrize("when", ["before", "after", "step", "map"])
def test_rows_that_change_places_in_a_loop_of_ones_own_would_mix_people_and_are_refused(when):
    people, run = dpscale.by_user(records_of(), USERS, records=K), private()
    for batch in run.batches(people):
        x, y, _ = batch
        order = torch.arange(len(x)).flip(0)
        with pytest.raises(dpscale.UnsupportedModel, match=r"in another order|what arrives at sample"):
            if when == "before":
                run.backward(loss_fn(run.model, (x[order], y[order])))
            elif when == "after":
                run.backward(loss_fn(run.model, (x, y))[order])
            elif when == "step":
                run.step((x[order], y[order]), loss_fn)
            else:
                run.step(batch.map(lambda data, order=order: tuple(t[order] for t in data)), loss_fn)
        break
    assert run.steps_taken == 0


def test_losses_are_per_record():
    people, run = dpscale.by_user(records_of(), USERS, records=K), private()
    batches = run.batches(people)
    batch = next(batches)
    with pytest.raises(ValueError, match=rf"per sample, of shape \({batch.draw.rows},\). Got shape \(\)"):
        run.step(batch, lambda model, batch: loss_fn(model, batch).mean())
    with pytest.raises(ValueError, match=r"of tensors where its rows are the records of people. Got 'a list of"):
        run.step(batch.map(lambda data: (*data, ["name"] * len(data[0]))), loss_fn)
    assert run.steps_taken == 0
