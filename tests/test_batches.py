"""A batch behaves as its data do, keeps its draw, and is padded where a compiled step needs one shape."""

import collections
import copy
import functools
import pickle
import types

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset, default_collate

import dpscale
from dpscale.batches import Batch, Padding, padded
from dpscale.engine.arguments import part_of, rows_of
from dpscale.engine.compile.step import Compiled
from dpscale.engine.verify.rows import neutral
from dpscale.sampling import Draw
from dpscale.shapes import Sizes

from .helpers import SIZE, data, loss_fn, mlp, private, train, vector

DRAW = Draw.of(3, np.array([1, 4]))
Pair = collections.namedtuple("Pair", "x y")


def encoding(fields):
    return pytest.importorskip("transformers").BatchEncoding(fields)


CONTAINERS = {
    "tuple": lambda x, y: (x, y),
    "list": lambda x, y: [x, y],
    "named tuple": Pair,
    "dict": lambda x, y: {"x": x, "y": y},
    "ordered": lambda x, y: collections.OrderedDict(x=x, y=y),
    "user dict": lambda x, y: collections.UserDict(x=x, y=y),
    "encoding": lambda x, y: encoding({"x": x, "y": y}),
    "nested": lambda x, y: {"x": x, "rest": [(y,)]},
}
every_container = pytest.mark.parametrize("make", CONTAINERS.values(), ids=CONTAINERS.keys())


def fields(batch):
    """(x, y), whatever they are in."""
    if hasattr(batch, "keys"):
        return batch["x"], batch["rest"][0][0] if "rest" in batch else batch["y"]
    return tuple(batch)


class Listed(Dataset):
    def __init__(self):
        self.x, self.y = data().tensors

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return self.x[i], self.y[i]


class Collate:
    def __init__(self, make):
        self.make = make

    def __call__(self, samples):
        return self.make(*default_collate(samples))


@every_container
@pytest.mark.parametrize("how", ["step", "backward", "moved", "mapped"])
def test_every_container_trains(make, how):
    run = private()
    seen = []

    def losses(model, batch):
        seen.append(type(batch))
        return loss_fn(model, fields(batch))

    for batch in run.batches(Listed(), collate_fn=Collate(make)):
        batch = batch.to("cpu", non_blocking=True) if how == "moved" else batch
        batch = batch.map(lambda d: tree_map(lambda t: t + 0, d)) if how == "mapped" else batch
        if how == "backward":
            run.backward(losses(run.model, batch))
            run.optimizer.step()
            run.optimizer.zero_grad()
        else:
            run.step(batch, losses)
    assert set(seen) == {Batch if how == "backward" else type(make(*data()[:2]))}
    assert torch.equal(vector(run.model), train(private()))


def masking(samples):
    """What a collator for masked language models does: it hides some of the inputs at random."""
    x, y = default_collate(samples)
    return x * (torch.rand(x.shape) > 0.3), y


def test_a_collate_function_that_draws_random_numbers_trains():
    run = private()
    for batch in run.batches(Listed(), collate_fn=masking):
        assert batch.singles == {}
        run.step(batch, loss_fn)
    assert run.steps_taken == 5
    assert next(private().batches(Listed(), collate_fn=Collate(lambda x, y: (x, y)))).singles


@every_container
def test_a_batch_behaves_as_its_data(make):
    plain = make(torch.arange(6).view(2, 3), torch.arange(2))
    batch = Batch(plain, DRAW)
    assert len(batch) == len(plain) and list(map(str, batch)) == list(map(str, plain))
    assert repr(batch) == f"Batch(draw=3, samples=2, data={type(plain).__name__})"
    if hasattr(plain, "keys"):
        assert batch["x"] is plain["x"] and "x" in batch and list(batch.keys()) == list(plain.keys())
        assert (lambda **given: given)(**batch).keys() == dict(plain).keys()
        assert [name for name, _ in batch.items()] == list(plain) and batch.get("none") is None
        batch["x"] = 5
        assert plain["x"] == 5
    else:
        x, y = batch
        assert x is plain[0] and y is batch[1] and batch[-1] is plain[1]
    with pytest.raises(AttributeError):
        _ = batch.no_such_thing


@every_container
def test_moving_a_batch_keeps_its_draw(make):
    plain = make(torch.arange(6.0).view(2, 3), torch.arange(2))
    batch = Batch(plain, DRAW)
    for moved in (batch.to(torch.float64), batch.to(dtype=torch.float64), tree_map(lambda t: t.double(), batch)):
        assert isinstance(moved, Batch) and moved.draw is DRAW and type(moved.data) is type(plain)
        assert all(t.dtype == torch.float64 for t in fields(moved))
    assert fields(batch)[0].dtype == torch.float32
    for same in (copy.copy(batch), copy.deepcopy(batch)):
        assert same.draw is DRAW and torch.equal(fields(same)[0], fields(batch)[0])
    assert len(tree_leaves(batch)) == 2 and rows_of(plain) == 2
    pinned = []
    moved = batch.map(lambda d: tree_map(lambda t: Pinned(t, pinned), d)).pin_memory()
    assert isinstance(moved, Batch) and moved.draw is DRAW and len(pinned) == 2


class Pinned:
    """Stands for a tensor on a machine with an accelerator."""

    def __init__(self, tensor, pinned):
        self.tensor, self.pinned = tensor, pinned

    def to(self, *args):
        return self

    def pin_memory(self):
        self.pinned.append(self)
        return self


def test_torch_and_accelerate_move_batches():
    from accelerate.utils import send_to_device
    from torch.utils.data._utils.pin_memory import pin_memory

    batch = Batch({"x": torch.ones(2)}, DRAW)
    moved = send_to_device(batch, "meta")
    assert isinstance(moved, Batch) and moved.draw is DRAW and moved["x"].is_meta
    batch.pin_memory = lambda: "pinned"
    assert pin_memory(batch) == "pinned"


def test_a_bare_tensor_is_a_batch():
    """A model takes it as it is."""

    class Inputs(Listed):
        def __getitem__(self, i):
            return self.x[i]

    def losses(model, batch):
        return model(batch).square().sum(1)

    runs = [private(), private()]
    for batch in runs[0].batches(Inputs()):
        assert isinstance(batch.data, torch.Tensor) and batch.shape[1:] == (4,)
        runs[0].step(batch, losses)
    for batch in runs[1].batches(Inputs()):
        runs[1].backward(losses(runs[1].model, batch))
        runs[1].optimizer.step()
        runs[1].optimizer.zero_grad()
    assert torch.equal(vector(runs[0].model), vector(runs[1].model))


def test_a_model_takes_a_mapping_apart():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x, y):
            return nn.functional.cross_entropy(self.inner(x), y, reduction="none")

    run = private(Named())
    for batch in run.batches(Listed(), collate_fn=Collate(CONTAINERS["encoding"])):
        run.backward(run.model(**batch))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert torch.equal(vector(run.model), train(private()))


def test_batches_are_pickled_whole():
    batch = pickle.loads(pickle.dumps(Batch((torch.ones(2), ["a", "b"]), DRAW)))
    assert batch.draw.number == 3 and batch[1] == ["a", "b"]


# Padding


@every_container
def test_padding_is_neutral(make):
    plain = make(torch.randn(2, 3), torch.tensor([True, True]))
    x, y = fields(padded(plain, 2, 5))
    assert torch.equal(x[:2], fields(plain)[0]) and x.shape == (5, 3) and not x[2:].any()
    assert y.tolist() == [True, True, False, False, False] and y.dtype == torch.bool
    x, _ = fields(padded(plain, 2, 5, copies=True))
    assert torch.equal(x[2:], x[:1].expand(3, 3))
    assert padded(plain, 2, 2) is plain
    x, y = fields(neutral(plain))
    assert x.shape == (2, 3) and not x.any() and not y.any()
    x, y = fields(part_of(plain, slice(1, 2), 2))
    assert torch.equal(x, fields(plain)[0][1:]) and len(y) == 1


def test_padding_of_lists_and_of_what_is_not_by_row():
    plain = (torch.ones(2), ["a", "b"], [1, 2], (0.5, 1.5), [b"x", b"y"], torch.tensor(3.0), torch.ones(7), "all", None)
    found = padded(plain, 2, 3)
    assert found[1:5] == (["a", "b", ""], [1, 2, 0], (0.5, 1.5, 0.0), [b"x", b"y", b""])
    assert [len(found[0]), found[5].item(), len(found[6]), *found[7:]] == [3, 3.0, 7, "all", None]
    assert neutral(plain)[1:5] == (["", ""], [0, 0], (0.0, 0.0), [b"", b""])
    assert isinstance(padded(types.SimpleNamespace(x=1), 2, 3), types.SimpleNamespace)


def padding(model=None, **changes):
    """A run that pads as for a compiled step, and compiles nothing."""
    run = private(model, **changes)
    run._padding = Padding(Sizes.of(run.plan.sampling, changes.get("micro_batch")))
    run._engine._compiled = lambda *args, **kwargs: None
    run._engine.put = lambda tensors, count, rows: None
    return run


@pytest.mark.parametrize("room", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_compiled_step_has_few_shapes_and_no_row_of_another_sample(micro_batch, room):
    run, seen = padding(micro_batch=micro_batch, steps=15), []
    original = run._engine.scaled_sum
    if room:  # as on CUDA, where a recorded step reads its batch from the same place every time
        x, y = data().tensors
        places = [torch.full((99, *x.shape[1:]), 7.0), torch.full((99,), 1, dtype=y.dtype), torch.ones(99)]
        recorded = types.SimpleNamespace(_buffers=places, _filled=99, _tensors=[0, 1], _in_place=False)
        run._engine.put = functools.partial(Compiled.put, recorded)

    def noted(loss_fn, batch, rule, mask, *args, **kwargs):
        seen.append(len(mask))
        assert mask.sum() and not batch[0][~mask].any() and not batch[1][~mask].any()
        return original(loss_fn, batch, rule, mask, *args, **kwargs)

    run._engine.scaled_sum = noted
    for batch in run.batches(data()):
        report = run.step(batch, loss_fn)
        assert len(report.losses) == len(report.norms) == len(batch.draw.indices) and report.mask.all()
    assert len(set(seen)) > 1 and set(seen) <= set(Sizes.of(run.plan.sampling, micro_batch).rows)
    torch.testing.assert_close(vector(run.model), train(private(steps=15)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("how", ["raises", "not finite"])
def test_a_model_that_cannot_take_zeros_gets_copies_of_the_first_row(how):
    class Picky(nn.Sequential):
        def forward(self, x):
            if how == "raises" and bool((x == 0).all(1).any()):
                raise ValueError("an empty sample")
            return super().forward(x / x.abs().sum(1, keepdim=True))

    run = padding(Picky(*mlp()))
    seen, original = [], run._engine.scaled_sum

    def noted(loss_fn, batch, rule, mask, *args, **kwargs):
        seen.append((batch[0], mask))
        return original(loss_fn, batch, rule, mask, *args, **kwargs)

    run._engine.scaled_sum = noted
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
    assert len(seen) == 6  # the first step is tried with zeros
    assert not seen[0][0][~seen[0][1]].any()
    for x, mask in seen[1:]:
        assert torch.equal(x[~mask], x[:1].expand(int((~mask).sum()), 4))
    torch.testing.assert_close(vector(run.model), train(private(Picky(*mlp()))), rtol=1e-5, atol=1e-6)


# Epochs


def test_epochs_split_the_planned_steps():
    run = private(steps=12)  # 5 steps an epoch
    lengths, seen = [], []
    for epoch in run.epochs(data()):
        lengths.append(len(epoch))
        for batch in epoch:
            seen.append(batch.draw.number)
            run.step(batch, loss_fn)
        assert len(epoch) == 0
    assert lengths == [5, 5, 2] and seen == list(range(1, 13))
    assert torch.equal(vector(run.model), train(private(steps=12)))
    assert list(run.epochs(data())) == []


@pytest.mark.parametrize("sampling", [dpscale.Poisson(size=SIZE, batch=25), dpscale.Shuffled(size=SIZE, batch=25)])
def test_an_epoch_may_be_broken_off(sampling):
    run, dataset = private(sampling=sampling, steps=9), data()  # 3 steps an epoch
    for number, epoch in enumerate(run.epochs(dataset)):
        for k, batch in enumerate(epoch):
            if k == 2 and number == 0:
                break  # drawn and not used
            run.step(batch, loss_fn)
        assert number > 0 or run.waiting  # the epoch is still held
    assert run.steps_taken == 8 and not run.waiting
    assert [len(epoch) for epoch in run.epochs(dataset)] == [1]
    train(run, dataset)
    assert run.steps_taken == 9


def test_a_run_goes_on_in_the_midst_of_an_epoch():
    run = private(steps=12)
    for epoch in run.epochs(data()):
        run.step(next(epoch), loss_fn)
        run.step(next(epoch), loss_fn)
        break
    del epoch
    assert not run.waiting
    assert [len(epoch) for epoch in run.epochs(data())] == [3, 5, 2]
    for epoch in run.epochs(data(), num_workers=0):
        for batch in epoch:
            run.step(batch, loss_fn)
    assert torch.equal(vector(run.model), train(private(steps=12)))


def test_epochs_are_checked_at_once():
    with pytest.raises(ValueError, match="must be of 60 samples, as planned"):
        private().epochs(data(59))
    with pytest.raises(ValueError, match="without options that change the sampling"):
        private().epochs(data(), shuffle=True)


# What is said


def test_the_statement_is_about_what_was_released():
    run = private(steps=5, delta=1e-4)
    text = run.statement()
    assert "Guarantee: nothing was released yet, so epsilon is 0." in text and "Steps: 0 of 5 planned" in text
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
        if run.steps_taken == 2:
            break
    text = run.statement()
    assert "Steps: 2 of 5 planned, each one sum divided by the expected batch size 12." in text
    stated = float(text.split("(")[1].split(",")[0])
    assert run.epsilon() <= stated < run.epsilon() + 1e-3 < run.plan.epsilon()
    train(run)
    text = run.statement(delta=1e-5)
    assert "Steps: 5 of 5 planned" in text and "1e-05)-differential privacy" in text
    planned, _, source = text.replace("5 of 5 planned", "5").rpartition("\n")
    assert planned == run.plan.statement(delta=1e-5) and source.startswith("Randomness: A seed")
    with pytest.raises(ValueError, match=r"'delta' parameter of Plan.statement must be given"):
        other = private()
        train(other)
        other.statement()


def test_what_a_notebook_shows():
    run = private(steps=5, delta=1e-4)
    assert repr(run) == "Private(model=Sequential, optimizer=SGD, steps_taken=0, steps=5)"
    assert repr(run.plan) == (
        "Plan(scaling=Clip(C=0.5), sampling=Poisson(size=60, batch=12, adjacency='add-remove'), steps=5, "
        "noise_multiplier=1.0, delta=0.0001)"
    )
    for batch in run.batches(data()):
        drawn = len(batch.draw.indices)
        assert repr(run.step(batch, loss_fn)) == f"StepReport(samples={drawn}, ignored=0)"
