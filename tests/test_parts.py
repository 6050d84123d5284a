"""Loops of one's own: a batch in parts is one release; two models on private data are two runs; packed sequences."""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.utils.data import Dataset, TensorDataset

import dpscale

from .helpers import SIZE, data, loss_fn, mlp, private, vector


def in_parts(run, batch, size):
    for part in run.parts(batch, size):
        yield part, loss_fn(run.model, part)


@pytest.mark.parametrize("size", [1, 5, 100])
def test_a_batch_in_parts_is_the_batch(size):
    whole, divided = private(), private()
    for batch in whole.batches(data()):
        whole.backward(loss_fn(whole.model, batch))
        whole.optimizer.step()
    for batch in divided.batches(data()):
        for part, losses in in_parts(divided, batch, size):
            report = divided.backward(losses, part)
        divided.optimizer.step()
        divided.optimizer.zero_grad()
        assert report.samples == len(batch.draw.indices) and len(report.losses) == len(batch.draw.mask)
    torch.testing.assert_close(vector(divided.model), vector(whole.model))
    assert divided.steps_taken == whole.steps_taken == 5 and divided.epsilon(1e-3) == whole.epsilon(1e-3)


def test_nothing_is_released_before_the_last_part(tmp_path):
    ledger = dpscale.Ledger(tmp_path / "ledger", epsilon=100, delta=1e-3)
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    everyone = dpscale.FullBatch(size=SIZE)  # with a ledger draws are never seeded: some are too small for two parts
    run = dpscale.privatize(model, optimizer, private(delta=1e-3, sampling=everyone).plan, ledger=ledger)
    batches = run.batches(data())
    batch = next(batches)
    *first, last = in_parts(run, batch, 16)
    assert len(first) > 1
    for part, losses in first:
        run.backward(losses, part)
        with pytest.raises(RuntimeError, match=r"while a drawn batch is outstanding.*every part comes first"):
            optimizer.step()
        assert all(p.grad is None for p in model.parameters()) and run.steps_taken == 0 == run.epsilon()
        assert ledger.runs()[0].charged == 0
    assert torch.equal(vector(model), vector(mlp()))
    run.backward(last[1], last[0])
    assert run.steps_taken == 1 and ledger.runs()[0].charged >= 1
    assert all(p.grad is not None for p in model.parameters())
    run.close()


def test_each_sample_is_summed_once():
    run = private()
    batches = run.batches(data())
    batch = next(batches)
    (one, losses), (other, more), *_ = in_parts(run, batch, 4)
    run.backward(losses, one)
    with pytest.raises(RuntimeError, match=r"Samples 0 to 3 of draw 1 were summed already.*each part"):
        run.backward(loss_fn(run.model, one), one)
    with pytest.raises(RuntimeError, match="Samples 0 to 5 of draw 1 were summed already"):
        wider = next(iter(run.parts(batch, 6)))
        run.backward(loss_fn(run.model, wider), wider)
    with pytest.raises(RuntimeError, match=r"Parts of draw 1 were summed already. Go on with its other parts"):
        run.backward(loss_fn(run.model, batch), batch)
    with pytest.raises(RuntimeError, match="Parts of draw 1 were summed already"):
        run.step(batch, loss_fn)
    with pytest.raises(ValueError, match=r"must be of \d+ rows, as drawn. Got 4"):
        run.step(other, loss_fn)
    with pytest.raises(ValueError, match=r"must be per sample, of shape \(4,\). Got shape \(3,\)"):
        run.backward(more[1:], other)
    assert run.steps_taken == 0
    run.backward(loss_fn(run.model, other), other)  # what was refused can be done right


def test_a_loop_that_is_left_forgets_its_parts():
    """Else what was summed would be added to a draw that is drawn anew."""
    fresh, run = private(), private()
    for batch in run.batches(data()):
        part, losses = next(in_parts(run, batch, 4))
        run.backward(losses, part)
        break
    for each in (fresh, run):
        for batch in each.batches(data()):
            each.step(batch, loss_fn)
            break
    assert torch.equal(vector(fresh.model), vector(run.model))
    with pytest.raises(RuntimeError, match="draw 1 of a loop that was left"):
        run.backward(loss_fn(run.model, part), part)


def test_parts_of_what_is_no_batch():
    run = private()
    batches = run.batches(data())
    batch = next(batches)
    with pytest.raises(ValueError, match=r"'size' parameter of parts must be an integer >= 1. Got 0"):
        next(run.parts(batch, 0))
    with pytest.raises(ValueError, match=r"'batch' parameter of parts must be a whole one of private.batches\(\)"):
        next(run.parts(tuple(batch), 4))
    with pytest.raises(ValueError, match=r"'batch' parameter of parts must be of \d+ rows, as drawn. Got 2"):
        next(run.parts(batch.map(lambda rows: tuple(t[:2] for t in rows)), 4))


def test_a_second_backward_says_what_to_do():
    run = private()
    batches = run.batches(data())
    batch, other = next(batches), next(batches)
    run.backward(loss_fn(run.model, batch), batch)
    with pytest.raises(RuntimeError, match=r"called again before optimizer.step\(\).*private.parts.*run of its own"):
        run.backward(loss_fn(run.model, other), other)


def test_a_gan_is_one_private_run_of_its_discriminator():
    """The generator sees the discriminator alone, which is released: a plain optimizer trains it at no cost."""
    torch.manual_seed(0)
    judge, maker = mlp(), nn.Linear(2, 4)
    head = nn.Sequential(judge, nn.Linear(3, 1))
    plain = torch.optim.SGD(maker.parameters(), lr=0.1)
    run = private(head, optimizer=torch.optim.SGD(head.parameters(), lr=0.1))
    before = vector(maker)
    for x, _ in run.batches(data()):
        fake = maker(torch.randn(len(x), 2)).detach()
        losses = nn.functional.softplus(-head(x)) + nn.functional.softplus(head(fake))
        run.backward(losses.squeeze(1))
        run.optimizer.step()
        run.optimizer.zero_grad()
        nn.functional.softplus(-head(maker(torch.randn(8, 2)))).mean().backward()
        plain.step()
        plain.zero_grad()
        run.optimizer.zero_grad()  # the generator's backward went through the discriminator
    assert run.steps_taken == 5 and not torch.equal(vector(maker), before)


def test_what_the_generator_leaves_in_the_discriminator_is_not_applied():
    torch.manual_seed(0)
    head, maker = nn.Linear(4, 1), nn.Linear(2, 4)
    run = private(head, optimizer=torch.optim.SGD(head.parameters(), lr=0.1))
    for x, _ in run.batches(data()):
        run.backward(nn.functional.softplus(-head(x)).squeeze(1))
        run.optimizer.step()
        run.optimizer.zero_grad()
        head(maker(torch.randn(8, 2))).mean().backward()
        with pytest.raises(RuntimeError, match="private"):
            run.optimizer.step()
        break


class Sequences(Dataset):
    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return torch.randn(1 + i % 5, 4, generator=torch.Generator().manual_seed(i))


class Packing(nn.Module):
    """Takes what its loss function is given: a packed sequence, or padded rows with lengths."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.lstm, self.head = nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 1)

    def forward(self, packed):
        return self.head(self.lstm(packed)[1][0][-1]).squeeze(1)


def packing(rows):
    return pack_sequence(rows, enforce_sorted=False), torch.tensor([float(len(row)) for row in rows])


def sorting(rows):
    """As many scripts do: the longest first, and labels with them."""
    rows = sorted(rows, key=len, reverse=True)
    return pack_sequence(rows), torch.tensor([float(len(row)) for row in rows])


def padding(rows):
    return pad_sequence(rows, batch_first=True), torch.tensor([len(row) for row in rows])


def packed_loss(model, batch):
    assert isinstance(batch[0], PackedSequence)
    return (model(batch[0]) - batch[1]) ** 2


def padded_loss(model, batch):
    x, lengths = batch
    out = model.lstm(x)[0]
    return (model.head(out[torch.arange(len(x)), lengths - 1]).squeeze(1) - lengths) ** 2


def trained_on(collate, loss, people=None, **options):
    size = SIZE if people is None else len(people)
    run = private(Packing(), sampling=dpscale.Poisson(size=size, batch=6), **options)
    for batch in run.batches(people or Sequences(), collate_fn=collate):
        run.step(batch, loss)
    assert run.steps_taken == 5
    return vector(run.model)


@pytest.mark.parametrize(
    ("collate", "loss", "options"),
    [
        (packing, packed_loss, {}),
        (sorting, packed_loss, {}),
        (packing, packed_loss, {"micro_batch": 4}),
        (lambda rows: {"x": packing(rows)[0], "y": packing(rows)[1]}, lambda m, b: packed_loss(m, [*b.values()]), {}),
        (lambda rows: packing(rows)[0], lambda m, b: (m(b) - pad_packed_sequence(b)[1]) ** 2, {}),
    ],
    ids=["packed", "sorted", "micro", "mapping", "alone"],
)
def test_packed_sequences_train_as_padded_ones_do(collate, loss, options):
    torch.testing.assert_close(trained_on(collate, loss, **options), trained_on(padding, padded_loss))


def test_packed_sequences_of_people():
    people = dpscale.by_user(Sequences(), [i // 3 for i in range(SIZE)], records=2)
    found = trained_on(packing, packed_loss, people)
    torch.testing.assert_close(found, trained_on(padding, padded_loss, people))
    with pytest.raises(ValueError, match="collate_fn changes the order of its rows"):
        trained_on(sorting, packed_loss, people)


def test_a_sample_of_a_packed_batch_moves_the_sum_by_one_bound_at_most():
    """Also the longest, which decides how many time steps the others are packed into."""
    rows = [Sequences()[i] * 100 for i in range(9)]
    rule = dpscale.AutoS(C=0.1, r=1e-6)

    def summed(rows):
        everyone, no_noise = dpscale.FullBatch(size=len(rows)), {"noise_multiplier": None, "unsafe_no_noise": True}
        run = private(Packing(), sampling=everyone, steps=1, scaling=rule, **no_noise)
        grads = []
        run.optimizer.register_step_pre_hook(
            lambda *_: grads.append(torch.cat([p.grad.flatten() * len(rows) for p in run.model.parameters()]))
        )
        for batch in run.batches(rows, collate_fn=packing):
            run.step(batch, packed_loss)
        return grads[0]

    whole = summed(rows)
    for gone in (0, 4, 8):
        move = float((whole - summed(rows[:gone] + rows[gone + 1 :])).norm()) / rule.bound
        assert 0.9 < move <= 1 + 1e-5


def test_a_packed_batch_in_a_loop_of_ones_own_is_told_what_to_do():
    run = private(Packing())
    batches = run.batches(Sequences(), collate_fn=packing)
    x, y = batch = next(batches)
    assert isinstance(x, PackedSequence) and isinstance(batch[0], PackedSequence) and batch.data[0].rows.ndim == 3
    with pytest.raises(dpscale.UnsupportedModel, match=r"it is given a PackedSequence, .*Call private\.step"):
        run.backward((run.model(x) - y) ** 2)
    run.step(batch, packed_loss)
    assert run.steps_taken == 1


def test_a_packed_batch_can_be_checked():
    batch = packing([Sequences()[i] for i in range(12)])
    report = dpscale.check(Packing(), packed_loss, batch)
    assert report and "sample by sample" in str(report)


def test_a_tensor_dataset_of_people_in_parts_is_never_divided_within_a_person():
    people = dpscale.by_user(TensorDataset(*data().tensors), [i // 3 for i in range(SIZE)], records=2)
    run = private(sampling=dpscale.Poisson(size=len(people), batch=6))
    for batch in run.batches(people):
        for part, losses in in_parts(run, batch, 4):
            assert len(losses) == 2 * (part.part.stop - part.part.start)
            run.backward(losses, part)
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert run.steps_taken == 5
