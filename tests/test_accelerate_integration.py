"""Private runs in Accelerate's loop: prepared before and after, in both precisions, saved, and on two ranks."""

import signal

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState

import dpscale
from dpscale.integrations.accelerate import prepare

from . import trainers
from .trainers import accelerated, losses, mlp, plan, table, vector


@pytest.fixture(autouse=True)
def state_of_its_own():
    """Accelerate has one state in a process."""
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


def plain():
    model, optimizer = mlp()
    private = dpscale.privatize(model, optimizer, plan(), seed=0)
    for batch in private.batches(table()):
        private.step(batch, losses)
    return private


@pytest.mark.parametrize("order", ["prepare first", "privatize first", "both at once"])
def test_it_is_the_plain_loop(order):
    private = accelerated(order)
    assert private.steps_taken == 4 and private.epsilon() == plan().epsilon()
    torch.testing.assert_close(vector(private.model), vector(plain().model), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("order", ["prepare first", "privatize first"])
def test_bfloat16_is_used_and_weights_stay_wide(order):
    private = accelerated(order, "bf16")
    difference = (vector(private.model) - vector(plain().model)).abs().max()
    assert 1e-7 < difference < 1e-2 and vector(private.model).dtype == torch.float32
    assert private.steps_taken == 4


def test_a_killed_run_goes_on_from_its_saved_state(tmp_path, nursery):
    code, _, errors = nursery.run("tests.trainers:train", str(tmp_path), "accelerated_and_killed")
    assert code == -signal.SIGKILL, errors[-2000:]
    weights = []
    for _ in range(2):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True)
        *_, private = prepare(accelerator, *mlp(seed=1), plan(), seed=0)
        accelerator.load_state(str(tmp_path / "state"))
        assert private.steps_taken == 2 and private.epsilon() == plan().epsilon(steps=2)
        for batch in private.batches(table()):
            private.step(batch, losses)
        assert private.steps_taken == 4 and private.epsilon() == plan().epsilon()
        weights.append(vector(private.model))
    assert not torch.equal(*weights)  # noise that was used once does not come again


def test_a_plain_backward_is_refused():
    accelerator = Accelerator(cpu=True)
    model, optimizer, private = prepare(accelerator, *mlp(), plan())
    before = vector(model)
    batch = next(private.batches(table()))
    accelerator.backward(losses(model, batch).mean())
    with pytest.raises(RuntimeError, match=r"private\.backward\(losses\)"):
        optimizer.step()
    assert torch.equal(vector(model), before) and private.steps_taken == 0


def test_accumulation_is_refused():
    with pytest.raises(ValueError, match=r"must be without gradient accumulation\. Got 2 instead\. .*micro_batch"):
        prepare(Accelerator(cpu=True, gradient_accumulation_steps=2), *mlp(), plan())


def test_two_ranks_are_one(tmp_path, nursery):
    nursery.ranks(2, "tests.trainers:train", str(tmp_path), "both_orders")
    first, second = (torch.load(tmp_path / f"both_orders-2-{rank}.pt") for rank in range(2))
    private = trainers.both_orders(tmp_path)
    assert torch.equal(first["weights"], second["weights"])
    torch.testing.assert_close(first["weights"], vector(private.model), rtol=1e-5, atol=1e-6)
    assert first["epsilon"] == private.epsilon() and first["steps"] == second["steps"] == 4
