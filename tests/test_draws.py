"""A batch belongs to its draw: batches taken ahead, samples that go missing, places that change, shared keys."""

import copy
import os
import queue
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, Subset, default_collate

import dpscale
from dpscale.noise import Key

from .helpers import SIZE, data, loss_fn, mlp, private, train, vector


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
    return batch.map(lambda data: tuple(t.clone() for t in data))  # as to another device


def use(run, batch, how):
    """One step, by the run or in a loop of one's own."""
    if how == "step":
        return run.step(batch, loss_fn)
    report = run.backward(loss_fn(run.model, batch), batch)
    run.optimizer.step()
    run.optimizer.zero_grad()
    return report


@pytest.mark.parametrize("change", [lambda batch: batch, moved], ids=["as given", "moved"])
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("dataset", [data, Listed])
@pytest.mark.parametrize("prefetch", [ahead, queued])
def test_batches_may_be_taken_ahead(prefetch, dataset, how, change):
    """The same steps, on the same samples, with the same noise, as without loading ahead."""
    compile = False if how == "backward" else None  # a loop of one's own is never compiled
    run, seen = private(compile=compile), []
    for batch in prefetch(run.batches(dataset())):
        seen.append(batch.draw.number)
        use(run, change(batch), how)
        if run.steps_taken == run.steps:
            break
    assert seen == [1, 2, 3, 4, 5] and not run.waiting
    assert torch.equal(vector(run.model), train(private(compile=compile)))
    assert not run.model._forward_hooks and not run.model._forward_pre_hooks


def test_a_batch_that_is_fetched_while_the_device_works_is_the_one_that_would_have_come(monkeypatch):
    monkeypatch.setattr("dpscale.feeding.on_device", lambda dataset, loader: True)

    def trained(fetches):
        run = private(steps=6)
        for epoch in (2, 4):  # a loop that is left drops what was fetched ahead of it
            for k, batch in enumerate(run.batches(data())):
                for _ in range(fetches):
                    run._state.ahead()
                run.step(batch, loss_fn)
                if k + 1 == epoch:
                    break
        assert run._state.ahead is None
        return run

    plain, fetched = trained(0), trained(2)
    assert plain.steps_taken == fetched.steps_taken == 6
    assert vector(plain.model).equal(vector(fetched.model))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_draws_are_released_in_any_order_and_each_once(how):
    run = private()
    batches = run.batches(data())
    first, second, third = (next(batches) for _ in range(3))
    use(run, third, how)
    use(run, first, how)
    with pytest.raises(
        RuntimeError, match=r"This batch is draw 1, which was released already\. Draw 2 is outstanding\."
    ):
        run.step(first, loss_fn)
    with pytest.raises(RuntimeError, match="This batch is draw 3, which was released already"):
        run.step(third.to(torch.float32), loss_fn)
    assert run.steps_taken == 2
    use(run, moved(second), how)
    with pytest.raises(RuntimeError, match=r"draw 2, which was released already\. No draw is outstanding\."):
        run.step(copy.deepcopy(second), loss_fn)
    assert run.steps_taken == 3
    assert next(run.batches(data())).draw.number == 4


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
@pytest.mark.parametrize("sampling", [dpscale.Poisson(size=SIZE, batch=12), dpscale.FixedSize(size=SIZE, batch=12)])
def test_forwards_of_several_draws_before_their_backwards(sampling, order):
    """A loop of one's own may run the forwards of several batches, of as many rows or of others, before it releases."""

    def trained(interleaved):
        run = private(sampling=sampling)
        batches = run.batches(data())
        two, reports = [next(batches), next(batches)], {}
        losses = [loss_fn(run.model, batch) for batch in two] if interleaved else None
        for k in order:
            found = losses[k] if interleaved else loss_fn(run.model, two[k])
            reports[k] = run.backward(found, two[k])
            run.optimizer.zero_grad()  # a step would change the weights under the other forward
        return reports

    together, apart = trained(True), trained(False)
    for k in order:
        assert torch.equal(together[k].norms, apart[k].norms) and together[k].norms.any()


def test_forwards_that_were_used_are_forgotten():
    """Though a draw is always outstanding."""
    run = private(sampling=dpscale.FixedSize(size=SIZE, batch=12), steps=20)
    for batch in ahead(run.batches(data())):
        use(run, batch, "backward")
        assert not run.waiting or len(run._engine.recorder._forwards) == 0


def test_several_outstanding_draws_must_be_told_apart():
    run = private()
    batches = run.batches(data())
    first, second = next(batches), next(batches)
    losses = loss_fn(run.model, first)
    with pytest.raises(RuntimeError, match=r"Draws 1 and 2 are outstanding\. Pass batch= so that the right one"):
        run.backward(losses)
    third = next(batches)
    with pytest.raises(RuntimeError, match=r"Draws 1, 2 and 3 are outstanding\."):
        run.backward(losses)
    assert run.steps_taken == 0
    run.backward(losses, first)
    assert run.steps_taken == 1 and third.draw.number == 3
    with pytest.raises(ValueError, match=rf"losses must be per sample, of shape \({len(second.draw.mask)},\)"):
        run.optimizer.zero_grad()
        run.backward(loss_fn(run.model, second)[1:], second)


def test_a_batch_that_was_rebuilt_is_known_by_its_rows():
    run = private()
    batches = run.batches(data())
    x, y = next(batches)
    run.step((x + 0, y), loss_fn)
    run.step(list(next(batches)), loss_fn)
    same = private(sampling=dpscale.FixedSize(size=SIZE, batch=12))
    batches = same.batches(data())
    x, y = next(batches)
    next(batches)
    with pytest.raises(RuntimeError, match=r"was rebuilt, and draws 1 and 2 are outstanding with 12 rows each.*map"):
        same.step((x + 0, y), loss_fn)
    with pytest.raises(ValueError, match=r"Got 11 instead; draw 1 has 12, draw 2 has 12\. Pass on every row"):
        same.step((x[1:], y[1:]), loss_fn)
    assert (run.steps_taken, same.steps_taken) == (2, 0)


def test_a_batch_of_another_run_is_refused():
    one, other = private(), private()
    batch, own = next(batches := one.batches(data())), next(others := other.batches(data()))
    with pytest.raises(RuntimeError, match=r"draw 1 of another run\. Draw 1 is outstanding\."):
        other.step(batch, loss_fn)
    with pytest.raises(RuntimeError, match="draw 1 of another run"):
        other.backward(loss_fn(other.model, own), batch)
    other.step(own, loss_fn)
    assert (one.steps_taken, other.steps_taken) == (0, 1)
    del batches, others


@pytest.mark.parametrize("how", ["break", "new loop"])
def test_draws_of_a_loop_that_was_left_are_dropped(how):
    run = private()
    batches = run.batches(data())
    old = next(batches)
    if how == "break":
        del batches
        assert not run.waiting and not run.model._forward_hooks
        with pytest.raises(RuntimeError, match=r"draw 1 of a loop that was left, so it was dropped\. No draw is"):
            run.step(old, loss_fn)
    new = next(going := run.batches(data()))
    assert (new.draw.indices == old.draw.indices).all()
    with pytest.raises(RuntimeError, match=r"draw 1 of a loop that was left, so it was dropped\. Draw 1 is"):
        run.step(old, loss_fn)
    run.step(new, loss_fn)
    run.backward(loss_fn(run.model, next(going)))  # the one outstanding draw
    assert run.steps_taken == 2


def test_draws_out_of_order_in_a_shuffled_epoch_are_paid_once():
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=20), steps=6)
    batches = list(run.batches(data()))
    run.step(batches[5], loss_fn)
    spent = run.epsilon(delta=1e-4)
    assert spent == run.plan.epsilon(delta=1e-4)  # both epochs are begun
    for batch in batches[:5]:
        run.step(batch, loss_fn)
    assert run.steps_taken == 6 and run.epsilon(delta=1e-4) == spent


def test_a_batch_may_be_left_out():
    run = private()
    for k, batch in enumerate(run.batches(data())):
        if k != 1:
            run.step(batch, loss_fn)
    assert run.steps_taken == 4
    for batch in run.batches(data()):
        run.backward(loss_fn(run.model, batch))
    assert run.steps_taken == 5


def test_a_step_that_failed_may_be_tried_again():
    def fails(model, batch):
        raise KeyError("no such label")

    run = private()
    for batch in run.batches(data()):
        with pytest.raises(KeyError):
            run.step(batch, fails)
        run.step(batch, loss_fn)
    assert torch.equal(vector(run.model), train(private()))


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("dataset", [data, Listed])
def test_an_empty_draw_is_a_row_of_zeros_and_a_step_of_noise(dataset, how):
    """No forward is made of it by the run, and what the model says of zeros changes nothing."""
    run = private(sampling=dpscale.Poisson(size=SIZE, batch=1), steps=12)
    calls, empty = [], 0
    run.model.register_forward_hook(lambda *_: calls.append(1))
    for batch in run.batches(dataset()):
        before, made = vector(run.model), len(calls)
        report = use(run, batch, how)
        assert not torch.equal(vector(run.model), before)
        if len(batch.draw.indices):
            continue
        empty += 1
        assert batch.draw.mask.tolist() == report.mask.tolist() == [False]
        assert [tuple(t.shape) for t in batch] == [(1, 4), (1,)] and not any(t.any() for t in batch)
        assert (report.loss, report.norms.item(), report.weights.item(), report.ignored) == (0, 0, 0, 0)
        assert len(calls) - made == (how == "backward")
        assert str(report) == "StepReport(samples=0, ignored=0)"
    assert run.steps_taken == 12 and 1 <= empty <= 11


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_noise_of_an_empty_draw_is_that_of_any_other(dtype):
    """In float32 at least, before it is rounded."""
    run = private(mlp(dtype=dtype), sampling=dpscale.Poisson(size=SIZE, batch=1), steps=12)
    added = []
    run._state.noise.add = lambda sums, std, step, shard: added.append({t.dtype for t in sums.values()})
    for batch in run.batches(data(dtype=dtype)):
        run.step(batch, loss_fn)
    assert all(found == {torch.promote_types(dtype, torch.float32)} for found in added)


def test_rows_are_those_drawn_and_nothing_else():
    rows = data().tensors[0]
    for micro_batch in (None, 5):
        run, seen = private(micro_batch=micro_batch, compile=False), []

        def noted(model, batch):
            seen.append(len(batch[0]))  # noqa: B023
            return loss_fn(model, batch)

        for batch in run.batches(data()):
            assert torch.equal(batch[0], rows[batch.draw.indices]) and batch.draw.mask.all()
            seen.clear()
            report = run.step(batch, noted)
            assert len(report.losses) == len(report.norms) == len(report.weights) == len(batch.draw.indices)
            whole = len(batch[0])
            assert max(seen) == (micro_batch or whole) and (whole % (micro_batch or whole) or whole) in (*seen, whole)


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
    with pytest.raises(ValueError, match="of 12 rows, as drawn"):
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
        run = private(micro_batch=micro_batch, sampling=dpscale.FixedSize(size=SIZE, batch=12))
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
    one_step(run, data())
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
