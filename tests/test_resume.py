"""Saving and resuming: what comes back, what is fresh, and what is refused."""

import json
import logging
import os
import struct

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale import checkpoint, files
from dpscale.momentum import MOMENTA
from dpscale.sampling import SAMPLERS
from dpscale.scaling import RULES

from .helpers import SIZE, data, loss_fn, mlp, plan, private, train, vector

MOMENTUM = {
    "none": None,
    "heavy-ball": dpscale.HeavyBall(gamma1=0.3),
    "inner-outer": dpscale.InnerOuter(K0=2, gamma0=0.5, gamma1=0.2),
    "per-sample-ema": dpscale.PerSampleEMA(gamma=0.4),
    "per-sample-ema-weights": dpscale.PerSampleEMA(gamma=0.4, keep="weights", tolerance=0.1),
    "disk": dpscale.DiSK(kappa=0.7, gamma=0.5),
}
SAMPLING = {
    "poisson": dpscale.Poisson(size=SIZE, batch=12),
    "fixed-size": dpscale.FixedSize(size=SIZE, batch=12),
    "full-batch": dpscale.FullBatch(size=SIZE),
    "shuffled": dpscale.Shuffled(size=SIZE, batch=12),
}
SCALING = {
    "clip": dpscale.Clip(C=0.5),
    "auto-s": dpscale.AutoS(C=0.5),
    "psac": dpscale.PSAC(C=0.5),
    "psasc": dpscale.PSASC(C=0.5, s=0.6),
}
DATA = data()
NO_NOISE = {"noise_multiplier": None, "unsafe_no_noise": True}


def test_all_of_them_are_tried():
    assert set(MOMENTA) <= set(MOMENTUM) and set(SAMPLERS) == set(SAMPLING) and set(RULES) == set(SCALING)


def combinations():
    for rule in SCALING:
        for momentum in MOMENTUM:
            for sampler in SAMPLING:
                if not momentum.startswith("per-sample") or sampler == "full-batch":
                    yield rule, momentum, sampler


def some_steps(run, count, dataset=None, indices=None):
    batches = run.batches(dataset or DATA)
    for _ in range(count):
        batch = next(batches)
        if indices is not None:
            indices.append(batch.draw.indices)
        run.step(batch, loss_fn)


def adam_run(**changes):
    model = mlp()
    return private(model, optimizer=torch.optim.Adam(model.parameters(), lr=0.05), **changes)


def same(one, other):
    """Whether two nested values are equal, tensors to the bit."""
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize(("rule", "momentum", "sampler"), [*combinations()])
def test_every_momentum_sampler_and_rule_is_saved_and_goes_on(rule, momentum, sampler, tmp_path):
    changes = {"scaling": SCALING[rule], "momentum": MOMENTUM[momentum], "sampling": SAMPLING[sampler], "delta": 1e-3}
    run = adam_run(**changes)
    some_steps(run, 3)
    run.save(tmp_path / "run", extra={"epoch": 1})
    state = run.state_dict()
    again = adam_run(**changes)
    assert again.load(tmp_path / "run") == {"epoch": 1}
    assert torch.equal(vector(again.model), vector(run.model))
    assert same(again.optimizer.state_dict(), run.optimizer.state_dict())
    assert again.epsilon() == run.epsilon() > 0
    expected = {**state, "resumed": 1}
    assert same(again.state_dict(), expected)
    train(again, DATA)
    assert again.steps_taken == 5 and again.epsilon() == again.plan.epsilon()
    assert "Resumed: once" in again.statement()


@pytest.mark.parametrize("momentum", MOMENTUM)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(momentum, tmp_path):
    """Without noise, on all samples, nothing is random."""
    changes = {"momentum": MOMENTUM[momentum], "sampling": dpscale.FullBatch(size=SIZE), "steps": 7, **NO_NOISE}
    whole = adam_run(**changes)
    train(whole)
    first = adam_run(**changes)
    some_steps(first, 3)
    first.save(tmp_path / "run")
    second = adam_run(**changes)
    second.load(tmp_path / "run")
    some_steps(second, 2)
    second.save(tmp_path / "run")
    third = adam_run(**changes)
    third.load(tmp_path / "run")
    assert torch.equal(train(third, DATA), vector(whole.model))
    ended = {**whole.state_dict(), "resumed": 2}
    assert same(third.state_dict(), ended)
    assert "Resumed: 2 times" in third.statement(1e-3) and "are not counted, as nobody" in third.statement(1e-3)
    assert "Resumed" not in whole.statement(1e-3)


def test_a_shuffled_epoch_goes_on_where_it_was(tmp_path):
    """Every sample once per epoch, whatever interrupts it, and however often."""
    changes = {"sampling": dpscale.Shuffled(size=SIZE, batch=8), "steps": 24}
    seen, run = [], private(seed=None, **changes)
    for count in (3, 2, 6, 1, 8):  # within an epoch of 8 steps, across its end, up to it
        some_steps(run, count, indices=seen)
        run.save(tmp_path / "run")
        run = private(seed=None, **changes)
        run.load(tmp_path / "run")
    some_steps(run, 4, indices=seen)
    for epoch in range(3):
        drawn = np.concatenate(seen[8 * epoch : 8 * (epoch + 1)])
        assert sorted(drawn) == list(range(SIZE))
    assert not np.array_equal(np.concatenate(seen[:8]), np.concatenate(seen[8:16]))


def test_the_order_of_an_epoch_is_kept_only_while_it_lasts():
    run = private(sampling=dpscale.Shuffled(size=SIZE, batch=30), steps=4)
    assert run.state_dict()["order"] is None
    some_steps(run, 1)
    assert sorted(run.state_dict()["order"].tolist()) == list(range(SIZE))
    some_steps(run, 1)
    assert run.state_dict()["order"] is None


@pytest.mark.parametrize("sampler", ["poisson", "fixed-size", "full-batch"])
def test_nothing_of_independent_draws_is_kept(sampler):
    run = private(sampling=SAMPLING[sampler])
    some_steps(run, 2)
    assert run.state_dict()["order"] is None


@pytest.mark.parametrize("seed", [None, 0])
def test_trap_35_no_noise_and_no_draw_comes_again(seed, tmp_path):
    """One checkpoint, loaded three times: seeded or not, all draw differently, and not as the first run did."""
    changes = {"sampling": dpscale.FixedSize(size=SIZE, batch=12), "lr": 0.0, "steps": 9}
    released = []  # at one and the same weights: they differ by what is drawn alone

    def three_steps(run):
        hook = run.optimizer.register_step_pre_hook(
            lambda *_: released.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
        )
        drawn = []
        some_steps(run, 3, indices=drawn)
        hook.remove()
        return np.stack(drawn).tobytes()

    first = private(seed=seed, **changes)
    drawn = [three_steps(first)]
    first.save(tmp_path / "run")
    drawn.append(three_steps(first))
    for _ in range(3):
        again = private(seed=seed, **changes)
        again.load(tmp_path / "run")
        drawn.append(three_steps(again))
        assert again.epsilon(1e-3) == again.plan.epsilon(1e-3, steps=6) > again.plan.epsilon(1e-3, steps=3)
    assert len(set(drawn)) == 5
    assert len(torch.stack(released).unique(dim=0)) == len(released) == 15


def test_an_interrupted_load_keeps_no_key(tmp_path):
    """With a seed, going on from there would add the noise of the steps before to other gradients."""
    first = private(seed=3)
    first.step(next(batches := first.batches(DATA)), loss_fn)
    first.save(tmp_path / "run")
    second = private(seed=3)

    def interrupt(*_):
        raise KeyboardInterrupt

    second.model.register_load_state_dict_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        second.load(tmp_path / "run")
    assert second.steps_taken == 1 and len(batches) == first.steps - 1
    assert second._state.noise.key.derive("noise/2") != first._state.noise.key.derive("noise/2")


def test_trap_35_resuming_by_hand_is_seen_in_epsilon(tmp_path):
    run = private(delta=1e-3)
    some_steps(run, 3)
    state = run.state_dict()
    again = private(run.model, delta=1e-3)
    again.load_state_dict(state)
    assert again.steps_taken == 3 and again.epsilon() == run.epsilon()
    some_steps(again, 2)
    with pytest.raises(StopIteration):
        next(again.batches(DATA))
    assert "Steps: 5 of 5 planned" in again.statement()


def test_trap_21_a_state_needs_no_unpickling_and_holds_no_key(tmp_path):
    run = adam_run(momentum=MOMENTUM["inner-outer"], sampling=SAMPLING["shuffled"])
    some_steps(run, 3)
    torch.save(run.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    assert same(state, run.state_dict())
    run.save(tmp_path / "run")
    content = (tmp_path / "run").read_bytes() + (tmp_path / "state.pt").read_bytes()
    key = run._state.noise.key._bytes
    draws = np.array(run._state.noise.key.generator("sampling").integers(0, 2**32, size=8, dtype=np.uint32))
    for secret in (key, key.hex().encode(), draws.tobytes(), str(draws[0]).encode()):
        assert secret not in content
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    assert json.loads(header["__metadata__"]["values"])  # JSON, and tensors as safetensors has them


def test_trap_21_breaking_off_leaves_nothing_stale(tmp_path):
    run, dataset = private(), data()
    batches = run.batches(dataset)
    early = [next(batches) for _ in range(3)]
    run.step(early[0], loss_fn)
    run.save(tmp_path / "run")
    again = private()
    left = again.batches(dataset)
    dropped = next(left)
    assert again.waiting and again.model._forward_hooks  # its forwards are recorded
    again.load(tmp_path / "run")
    assert not again.waiting and not again.model._forward_hooks
    with pytest.raises(RuntimeError, match=r"Another loop over private.batches\(\) has begun"):
        next(left)
    with pytest.raises(RuntimeError, match=r"draw 1 of a loop that was left"):
        again.step(dropped, loss_fn)
    with pytest.raises(RuntimeError, match=r"of another run"):
        again.step(early[1], loss_fn)
    assert again.steps_taken == 1
    train(again)
    assert again.steps_taken == 5


def test_a_state_is_a_copy():
    run = private(momentum=MOMENTUM["inner-outer"])
    some_steps(run, 2)
    state = run.state_dict()
    before = {n: t.clone() for n, t in state["momentum"]["average"].items()}
    some_steps(run, 2)
    assert same(state["momentum"]["average"], before)


def test_a_run_that_has_released_steps_forgets_none(tmp_path):
    run = private()
    some_steps(run, 2)
    state = run.state_dict()
    some_steps(run, 1)
    weights = vector(run.model)
    run.save(tmp_path / "run")
    for load in (lambda: run.load_state_dict(state), lambda: run.load(tmp_path / "run")):
        with pytest.raises(RuntimeError, match=r"has released 3 steps since it was made.*the steps stay paid for"):
            load()
    assert run.steps_taken == 3 and torch.equal(vector(run.model), weights)


def other_plan(run, tmp_path):
    return private(steps=6, noise_multiplier=1.5), r"steps was 5 and is 6; noise_multiplier was 1.0 and is 1.5"


def other_rule(run, tmp_path):
    return private(scaling=dpscale.Clip(C=0.25)), r"its plan is another: scaling.C was 0.5 and is 0.25\. Plan.from_dict"


def other_sampler(run, tmp_path):
    return private(sampling=SAMPLING["fixed-size"]), "sampling.name was 'poisson' and is 'fixed-size'"


def other_momentum(run, tmp_path):
    return private(momentum=MOMENTUM["heavy-ball"]), r"momentum was None and is \{'name': 'heavy-ball'"


def other_shape(run, tmp_path):
    return private(mlp(width=7)), r"0.weight was float32 \[6, 4\] and is float32 \[7, 4\]"


def other_type(run, tmp_path):
    return private(mlp(dtype=torch.float64)), r"0.weight was float32 \[6, 4\] and is float64 \[6, 4\].*and 1 more"


def frozen(run, tmp_path):
    model = mlp()
    model[0].requires_grad_(False)
    return private(model), r"0.weight was float32 \[6, 4\] and is absent"


REFUSED = (other_plan, other_rule, other_sampler, other_momentum, other_shape, other_type, frozen)


@pytest.mark.parametrize("other", REFUSED)
@pytest.mark.parametrize("way", ["state", "file"])
def test_a_state_of_another_plan_or_model_is_refused(other, way, tmp_path):
    run = private()
    some_steps(run, 2)
    run.save(tmp_path / "run")
    changed, words = other(run, tmp_path)
    before, key = vector(changed.model).clone(), changed._state.noise.key
    with pytest.raises(ValueError, match=f"does not fit this run: .*{words}.*Nothing was changed"):
        changed.load_state_dict(run.state_dict()) if way == "state" else changed.load(tmp_path / "run")
    assert changed.steps_taken == 0 and changed._state.noise.key is key and torch.equal(vector(changed.model), before)


def test_a_buffer_or_an_optimizer_of_another_kind_is_refused(tmp_path):
    class Shifted(nn.Module):
        def __init__(self, size):
            super().__init__()
            self.inner = mlp()
            self.register_buffer("shift", torch.zeros(size))

        def forward(self, x):
            return self.inner(x) + self.shift[0]

    run = private(Shifted(3))
    some_steps(run, 2)
    run.save(tmp_path / "run")
    other, adam = private(Shifted(4)), Shifted(3)
    with pytest.raises(ValueError, match=r"shift of its model is another, or is missing. Nothing was changed"):
        other.load(tmp_path / "run")
    other = private(adam, optimizer=torch.optim.Adam(adam.parameters()))
    with pytest.raises(ValueError, match=r"its optimizer is SGD, and this one is Adam. Nothing was changed"):
        other.load(tmp_path / "run")
    assert other.steps_taken == 0 and not torch.equal(vector(adam), vector(run.model))
    two = Shifted(3)
    groups = [{"params": two.inner[0].parameters()}, {"params": two.inner[2].parameters()}]
    other = private(two, optimizer=torch.optim.SGD(groups, lr=0.1))
    with pytest.raises(ValueError, match=r"parameter group"):
        other.load(tmp_path / "run")
    assert other.steps_taken == 0 and not torch.equal(vector(two), vector(run.model))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 1}, "its format has version 1, and this release reads version 2"),
        ({"version": torch.ones(2)}, "its format has version"),
        ({"steps_taken": -1}, r"not those of a private run \(counts\)"),
        ({"steps_taken": True}, r"not those of a private run \(counts\)"),
        ({"last_released": 1}, r"not those of a private run \(more steps than draws, or than planned\)"),
        ({"last_released": 6}, r"not those of a private run \(more steps than draws, or than planned\)"),
        ({"more": 1}, r"not those of a private run \(more\)"),
        ({"plan": None}, r"not those of a private run \(plan\)"),
        ({"plan": {"a": 1}}, "its plan is another: a was 1 and is None"),
        ({"parameters": [1]}, r"not those of a private run \(parameters\)"),
        ({"parameters": {"a": 1}}, r"not those of a private run \(parameters\)"),
        ({"order": [1, 2]}, r"not those of a private run \(order\)"),
        ({"momentum": 5}, r"not those of a private run \(momentum\)"),
        ({"momentum": None}, "what its momentum remembers is missing or damaged"),
        ({"momentum": {"average": {"0.weight": torch.zeros(2)}}}, "what its momentum remembers is missing or damaged"),
        ({"order": None}, "the order of its shuffled epoch is missing or damaged"),
        ({"order": torch.zeros(SIZE, dtype=torch.int64)}, "the order of its shuffled epoch is missing or damaged"),
        ({"order": torch.arange(SIZE).double()}, "the order of its shuffled epoch is missing or damaged"),
        ({"last_released": 5}, "the order of its shuffled epoch is missing or damaged"),
    ],
)
def test_a_damaged_state_is_refused(change, words):
    run = private(sampling=SAMPLING["shuffled"], momentum=MOMENTUM["heavy-ball"])
    some_steps(run, 2)
    again = private(sampling=SAMPLING["shuffled"], momentum=MOMENTUM["heavy-ball"])
    with pytest.raises(ValueError, match=words):
        again.load_state_dict({**run.state_dict(), **change})
    with pytest.raises(ValueError, match=r"it is no state of a private run"):
        again.load_state_dict({})
    again.load_state_dict(run.state_dict())


def test_files_that_are_no_checkpoints_are_refused(tmp_path):
    run = private()
    some_steps(run, 1)
    run.save(tmp_path / "run")
    again = private()
    with pytest.raises(FileNotFoundError, match=r"There is no checkpoint .*none"):
        again.load(tmp_path / "none")
    whole = (tmp_path / "run").read_bytes()
    for content in (b"", b"text", whole[:-1], whole[: len(whole) // 2]):
        (tmp_path / "half").write_bytes(content)
        with pytest.raises(ValueError, match=r"half is damaged, or no checkpoint"):
            again.load(tmp_path / "half")
    (tmp_path / "next").write_bytes(whole.replace(b"dpscale-checkpoint-1", b"dpscale-checkpoint-2"))
    with pytest.raises(ValueError, match=r"is of the format 'dpscale-checkpoint-2'. This release reads"):
        again.load(tmp_path / "next")
    assert again.steps_taken == 0


def entries(values):
    return [name for name, _ in values["map"]]


def without_an_entry(values):
    values["map"].pop(entries(values).index("optimizer"))


def without_a_tensor(values):
    values["map"][entries(values).index("extra")][1] = {"tensor": "none"}


def no_map(values):
    values.clear()


def other_lr(values):
    """Nothing else would tell."""
    text = json.dumps(values)
    assert text.count('["lr", 0.1]') == 1
    values["map"] = json.loads(text.replace('["lr", 0.1]', '["lr", 0.9]'))["map"]


@pytest.mark.parametrize("change", [without_an_entry, without_a_tensor, no_map, other_lr])
def test_a_checkpoint_that_was_edited_is_refused(change, tmp_path):
    run = private()
    some_steps(run, 2)
    run.save(tmp_path / "run")
    content = (tmp_path / "run").read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    values = json.loads(header["__metadata__"]["values"])
    change(values)
    header["__metadata__"]["values"] = json.dumps(values)
    if change is not other_lr:
        header["__metadata__"]["sum"] = files.checksum(json.dumps(values))
    edited = json.dumps(header).encode()
    (tmp_path / "run").write_bytes(struct.pack("<Q", len(edited)) + edited + content[8 + length :])
    again = private()
    before = vector(again.model)
    with pytest.raises(ValueError, match=r"run is damaged, or no checkpoint"):
        again.load(tmp_path / "run")
    assert again.steps_taken == 0 and torch.equal(vector(again.model), before)


def test_a_checkpoint_is_replaced_whole_and_read_by_its_owner_alone(tmp_path, monkeypatch):
    run = private()
    some_steps(run, 1)
    run.save(tmp_path / "run")
    assert os.stat(tmp_path / "run").st_mode & 0o777 == 0o600
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(os.readlink(f"/proc/self/fd/{handle}")))
    run.save(tmp_path / "run")
    assert [os.path.basename(name)[:5] for name in synced] == [".run.", tmp_path.name[:5]]
    before = (tmp_path / "run").read_bytes()
    some_steps(run, 1)

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"run could not be written: .*No space left.* was there before is unchanged"):
        run.save(tmp_path / "run")
    assert (tmp_path / "run").read_bytes() == before and os.listdir(tmp_path) == ["run"]
    with pytest.raises(OSError, match=r"No file was left behind"):
        run.save(tmp_path / "other")
    assert os.listdir(tmp_path) == ["run"]
    monkeypatch.undo()
    (tmp_path / ".run.killed.tmp").write_bytes(b"half")
    run.save(tmp_path / "run")
    assert os.listdir(tmp_path) == ["run"]


def test_a_folder_that_cannot_be_written_is_said():
    run = private()
    with pytest.raises(OSError, match=r"/proc/run could not be written.*No file was left behind"):
        run.save("/proc/run")


def test_a_name_that_could_not_be_read_again_is_refused(tmp_path):
    """One of bytes that are no UTF-8, as file systems allow it."""
    run = private()
    some_steps(run, 1)
    with pytest.raises(ValueError, match=r"'path' parameter of save must be a name in UTF-8.*Nothing was written"):
        run.save(tmp_path / os.fsdecode(b"run\xff"))
    assert not os.listdir(tmp_path)
    run.save(tmp_path / "lauf-ü", extra="\ud800")
    assert private().load(tmp_path / "lauf-ü") == "\ud800"


def test_values_of_every_kind_come_back(tmp_path):
    tied = torch.randn(4, 3)
    value = {
        "a": [1, 2.5, None, True, "ü"], "b": (float("inf"), -float("inf")), 3: {"t": tied, "u": tied, "v": tied.T},
        "e": torch.empty(0), "half": torch.randn(3).bfloat16(), "number": torch.tensor(7), "slice": tied[1:],
    }  # fmt: skip
    checkpoint.write(tmp_path / "values", value)
    found = checkpoint.read(tmp_path / "values")
    assert same(found, value) and isinstance(found["b"], tuple)
    with pytest.raises(ValueError, match=r"checkpoint\['extra'\]\[0\] is of type object.*Nothing was written"):
        checkpoint.write(tmp_path / "other", {"extra": [object()]})
    assert os.listdir(tmp_path) == ["values"]


def test_tied_weights_are_saved(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(torch.tanh(self.a(x)))[:, :3]

    run = private(Tied())
    some_steps(run, 2)
    run.save(tmp_path / "run")
    again = private(Tied())
    again.load(tmp_path / "run")
    assert torch.equal(vector(again.model), vector(run.model)) and again.model.a.weight is again.model.b.weight


def test_exact_averages_of_samples_are_warned_of(tmp_path, caplog):
    run = private(momentum=MOMENTUM["per-sample-ema"], sampling=SAMPLING["full-batch"])
    some_steps(run, 1)
    with caplog.at_level(logging.WARNING, "dpscale"):
        run.save(tmp_path / "run")
    assert "exact gradients of single samples. Never publish it" in caplog.text


def test_per_sample_averages_may_be_kept_elsewhere_after_a_resumption(tmp_path):
    sampling = SAMPLING["full-batch"]
    run = private(momentum=MOMENTUM["per-sample-ema"], sampling=sampling)
    some_steps(run, 2)
    momentum = dpscale.PerSampleEMA(gamma=0.4, directory=str(tmp_path))
    again = private(momentum=momentum, sampling=sampling)
    again.load_state_dict(run.state_dict())
    some_steps(again, 1)
    assert again.steps_taken == 3


def test_data_of_another_size_are_refused_after_a_resumption():
    run = private(sampling=SAMPLING["shuffled"])
    dataset = data()
    some_steps(run, 2, dataset)
    again = private(sampling=SAMPLING["shuffled"])
    again.load_state_dict(run.state_dict())
    with pytest.raises(ValueError, match=r"of 60 samples, as planned"):
        again.batches(TensorDataset(*(t[:-1] for t in dataset.tensors)))
    some_steps(again, 1, dataset)
    with pytest.raises(ValueError, match=r"the very dataset that this run began with"):
        again.batches(data())


def test_epochs_go_on_within_an_epoch(tmp_path):
    run = private(steps=12)  # 5 steps an epoch
    some_steps(run, 7)
    again = private(steps=12)
    again.load_state_dict(run.state_dict())
    assert [len(epoch) for epoch in again.epochs(data())] == [3, 2]


@pytest.mark.parametrize("sampler", SAMPLING)
@pytest.mark.parametrize("rule", SCALING)
@pytest.mark.parametrize("momentum", MOMENTUM)
def test_a_plan_comes_back_from_plain_values(sampler, rule, momentum):
    if momentum.startswith("per-sample") and sampler != "full-batch":
        return
    for length in ({"steps": 5}, {"steps": None, "epochs": 1.5}):
        parts = {"sampling": SAMPLING[sampler], "scaling": SCALING[rule], "momentum": MOMENTUM[momentum]}
        made = plan(**parts, delta=1e-3, accountant="rdp", **length)
        assert dpscale.Plan.from_dict(json.loads(json.dumps(made.to_dict()))) == made
    endless = plan(scaling=dpscale.Clip(C=float("inf")), **NO_NOISE)
    assert dpscale.Plan.from_dict(endless.to_dict()) == endless
    with pytest.raises(ValueError, match=r"'name' parameter of Plan.from_dict must be one of poisson.*Got 'own'"):
        dpscale.Plan.from_dict({**made.to_dict(), "sampling": {"name": "own"}})
