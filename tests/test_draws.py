"""A batch belongs to its draw: batches taken ahead, samples that go missing, places that change, shared keys."""

import os
import queue
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, TensorDataset, default_collate

import dpscale
from dpscale.noise import Key

from .helpers import SIZE, data, loss_fn, mlp, private, train, vector

NOT_THE_LAST = "not, or not surely, the batch that was drawn last"


class Listed(Dataset):
    """Samples one by one, so that a DataLoader fetches them."""

    def __init__(self):
        self.x, self.y = data().tensors

    def __len__(self):
        return SIZE

    def __getitem__(self, i):
        return self.x[i], self.y[i]


def ahead(batches):
    """One batch is always taken before the last one is used."""
    batches = iter(batches)
    last = next(batches)
    for batch in batches:
        yield last
        last = batch
    yield last


def queued(batches):
    """From another thread, some batches before they are used."""
    waiting = queue.Queue(maxsize=3)

    def fill():
        for batch in batches:
            waiting.put(batch)

    threading.Thread(target=fill, daemon=True).start()
    while not waiting.full():
        time.sleep(0.01)
    while True:
        yield waiting.get()


def moved(batch):
    return tuple(t.clone() for t in batch)  # as to another device


@pytest.mark.parametrize("change", [lambda batch: batch, moved], ids=["as given", "moved"])
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("dataset", [data, Listed])
@pytest.mark.parametrize("prefetch", [ahead, queued])
def test_batches_taken_ahead_are_refused_at_the_first(prefetch, dataset, how, change):
    run = private()
    for batch in prefetch(run.batches(dataset())):
        with pytest.raises(RuntimeError, match=NOT_THE_LAST):
            if how == "step":
                run.step(change(batch), loss_fn)
            else:
                run.backward(loss_fn(run.model, change(batch)))
        break
    assert run.steps_taken == 0


def test_an_earlier_batch_is_refused_and_the_last_goes_on():
    run = private()
    batches = run.batches(data())
    first, second = next(batches), next(batches)
    with pytest.raises(RuntimeError, match=NOT_THE_LAST):
        run.step(first, loss_fn)
    with pytest.raises(RuntimeError, match=NOT_THE_LAST):
        run.step((first[0], second[1]), loss_fn)
    run.step(second, loss_fn)
    run.step(moved(next(batches)), loss_fn)  # nothing is open any more
    assert run.steps_taken == 2


def test_a_batch_may_be_left_out():
    """By whoever passes on what was given; and where another was merely tried, it need not even be that."""
    run = private()
    for k, batch in enumerate(run.batches(data())):
        if k != 1:
            run.step(batch, loss_fn)
    assert run.steps_taken == 4

    def fails(model, batch):
        raise KeyError("no such label")

    for how in ("step", "backward"):
        run = private()
        for k, batch in enumerate(run.batches(data())):
            if k == 1 and how == "step":
                with pytest.raises(KeyError):
                    run.step(moved(batch), fails)
            elif k == 1:
                with pytest.raises(RuntimeError, match="shapes"):
                    run.model(batch[0][:, :2])
            else:
                run.step(moved(batch), loss_fn)
        assert run.steps_taken == 4


class Corrupt(Listed):
    """Some of its samples cannot be read, and are left out without a word."""

    def __getitems__(self, indices):
        return [self[i] for i in indices if i % 2]


class Missing(Listed):
    def __getitem__(self, i):
        return super().__getitem__(i) if i % 2 else None


def read_only(samples):
    samples[:] = [sample for sample in samples if sample is not None]
    return default_collate(samples)


@pytest.mark.parametrize("workers", [0, 1])
def test_samples_that_the_dataset_leaves_out_are_missed(workers):
    run = private()
    with pytest.raises(ValueError, match=r"gave \d+ samples where \d+ were drawn.*Give a sample for each index"):
        train(run, Subset(Corrupt(), range(SIZE)) if workers else Corrupt())
    assert run.steps_taken == 0


def test_samples_that_a_collate_fn_takes_out_of_its_list_are_missed():
    run = private()
    with pytest.raises(ValueError, match="rows, as drawn"):
        for batch in run.batches(Missing(), collate_fn=read_only):
            run.step(batch, loss_fn)
    assert run.steps_taken == 0


@pytest.mark.parametrize("kind", [list, tuple, lambda values: {"of": values}], ids=["list", "tuple", "mapping"])
def test_lists_of_plain_values_are_split_with_their_rows(kind):
    def collate(samples):
        x, y = default_collate(samples)
        return x, y, kind([float(v) for v in x[:, 0]])

    def weighted(model, batch):
        x, y, weights = batch
        weights = weights["of"] if isinstance(weights, dict) else weights
        return loss_fn(model, (x, y)) * torch.tensor(weights[: len(x)])  # an inspection takes fewer rows

    found = []
    for micro_batch in (None, 4):
        run = private(micro_batch=micro_batch)
        for batch in run.batches(Listed(), collate_fn=collate):
            run.step(batch, weighted)
        found.append(vector(run.model))
    torch.testing.assert_close(*found)


def averaging(**changes):
    rule = {"sampling": dpscale.FullBatch(size=SIZE), "momentum": dpscale.PerSampleEMA(gamma=0.5)}
    return private(**(rule | changes))


def one_step(run, dataset, **loader):
    for batch in run.batches(dataset, **loader):
        run.step(batch, loss_fn)
        break


def test_a_memory_of_each_sample_keeps_to_one_dataset_and_order():
    run, dataset = averaging(), data()
    with pytest.raises(ValueError, match="'collate_fn' parameter of batches must be left out"):
        one_step(run, dataset, collate_fn=default_collate)
    one_step(run, data())  # nothing is remembered yet
    run = averaging()
    one_step(run, dataset)
    one_step(run, dataset)
    with pytest.raises(ValueError, match="must be the very dataset that this run began with"):
        one_step(run, Subset(dataset, torch.randperm(SIZE).tolist()))
    assert run.steps_taken == 2
    run = averaging(momentum=dpscale.PerSampleEMA(gamma=0.5, keep="weights"))  # of weights there is one memory for all
    one_step(run, dataset, collate_fn=default_collate)
    one_step(run, Subset(dataset, torch.randperm(SIZE).tolist()))


def test_a_shuffled_epoch_keeps_to_one_dataset():
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=20), steps=6)
    for k, batch in enumerate(run.batches(dataset := data())):
        run.step(batch, loss_fn)
        if k == 1:
            break
    with pytest.raises(ValueError, match="must be the very dataset that this run began with"):
        run.batches(Subset(dataset, torch.randperm(SIZE).tolist()))
    one_step(run, dataset)
    one_step(run, Subset(dataset, torch.randperm(SIZE).tolist()))  # a new epoch
    assert run.steps_taken == 4


def test_poisson_draws_know_nothing_of_an_order():
    run = private()
    for _ in range(3):
        one_step(run, Subset(data(), torch.randperm(SIZE).tolist()))


def test_two_runs_do_not_share_a_file(tmp_path):
    def losses(model, batch):
        return 1e3 * loss_fn(model, batch)

    runs = [averaging(momentum=dpscale.PerSampleEMA(gamma=0.1, directory=str(tmp_path))) for _ in range(2)]
    loops = [iter(run.batches(data())) for run in runs]
    for _ in range(3):
        runs[0].step(next(loops[0]), loss_fn)
        runs[1].step(next(loops[1]), losses)
    torch.testing.assert_close(vector(runs[0].model), steps_of(3))


def steps_of(count):
    run = averaging(momentum=dpscale.PerSampleEMA(gamma=0.1))
    for batch, _ in zip(run.batches(data()), range(count), strict=False):
        run.step(batch, loss_fn)
    return vector(run.model)


def test_a_forked_process_has_no_key(monkeypatch):
    key, run = Key(), private(seed=None)
    key.derive("noise")
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(RuntimeError, match=r"forked.*would add the same noise"):
        key.derive("noise")
    with pytest.raises(RuntimeError, match="Call privatize"):
        train(run)
    assert run.steps_taken == 0


def test_model_and_optimizer_cannot_be_exchanged():
    run = private()
    with pytest.raises(AttributeError):
        run.optimizer = torch.optim.Adam(run.model.parameters())
    with pytest.raises(AttributeError):
        run.model = mlp()


def test_a_parameter_that_the_optimizer_was_given_later_is_not_trained():
    run, temperature = private(), nn.Parameter(torch.ones(()))
    run.optimizer.add_param_group({"params": [temperature]})
    for batch in run.batches(data()):
        losses = loss_fn(run.model, batch) * temperature
        losses.mean().backward(retain_graph=True)
        run.backward(losses)
        with pytest.raises(RuntimeError, match="a parameter that the model does not"):
            run.optimizer.step()
        break
    assert temperature == 1


def test_a_hook_that_was_registered_later_comes_before_the_look_at_gradients():
    run = private()
    before = vector(run.model)

    def plain(optimizer, args, kwargs):
        loss_fn(run.model, data().tensors).mean().backward()

    run.optimizer.register_step_pre_hook(plain)
    for batch in run.batches(data()):
        with pytest.raises(RuntimeError, match=r"A plain backward\(\) has added"):
            run.step(batch, loss_fn)
        break
    assert torch.equal(vector(run.model), before)


@pytest.mark.parametrize("momentum", [dpscale.HeavyBall(gamma1=0.5), dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.5)])
def test_a_parameter_that_was_replaced_is_refused(momentum):
    run = private(momentum=momentum)
    one_step(run, data())
    run.model[0].weight = nn.Parameter(run.model[0].weight.detach().clone())
    run.optimizer.param_groups[0]["params"] = list(run.model.parameters())
    with pytest.raises(RuntimeError, match=r"'0\.weight' was frozen, unfrozen, moved, converted or replaced since"):
        one_step(run, data())
    assert run.steps_taken == 1


def test_a_tensor_dataset_is_known_by_its_batches():
    """Both ways of fetching hand out tensors that are known again, in dictionaries too."""
    run = private()
    whole = TensorDataset(*data().tensors)
    for k, batch in enumerate(run.batches(whole)):
        if k % 2:
            run.step({"x": batch[0], "y": batch[1]}, lambda m, b: loss_fn(m, (b["x"], b["y"])))
    assert run.steps_taken == 2
