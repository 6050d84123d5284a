"""What is applied to the parameters of a private run is private, whatever optimizer applies it, and however."""

import copy
import gc

import pytest
import torch

from dpscale import guard

from .helpers import data, loss_fn, mlp, private, train, vector

PLAIN = r"A plain backward\(\) has added to the gradients.*No step was made"


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimization as it is usually written: it steps through an inner optimizer."""

    def __init__(self, parameters, base=torch.optim.SGD, rho=0.05, **options):
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["before"] = p.data.clone()
                p.add_(p.grad, alpha=float(group["rho"] / norm))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["before"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure=None):
        self.first_step()
        torch.enable_grad()(closure)()
        self.second_step()


class Inside:
    """A wrapper that is no torch optimizer."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    def step(self, closure=None):
        self.optimizer.step(closure)

    def zero_grad(self):
        self.optimizer.zero_grad()


def plain_backward(model):
    loss = loss_fn(model, data().tensors).mean()
    loss.backward()
    return loss


def with_optimizer(make, **changes):
    model = mlp()
    return private(model, optimizer=make(model.parameters()), **changes)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def test_sam_in_two_steps_applies_nothing_of_its_second_backward():
    run = with_optimizer(lambda parameters: SAM(parameters, lr=0.1))
    for batch in run.batches(data()):
        before = vector(run.model)
        run.backward(loss_fn(run.model, batch))
        run.optimizer.first_step()
        plain_backward(run.model)
        with pytest.raises(RuntimeError, match=PLAIN + r".*second backward\(\) for each step, such as SAM"):
            run.optimizer.second_step()
        assert torch.equal(vector(run.model), before)
        break


def test_sam_by_a_closure_applies_nothing_of_its_second_backward():
    run = with_optimizer(lambda parameters: SAM(parameters, lr=0.1))
    for batch in run.batches(data()):
        before = vector(run.model)
        run.backward(loss_fn(run.model, batch))
        with pytest.raises(RuntimeError, match=PLAIN):
            run.optimizer.step(lambda: plain_backward(run.model))
        assert torch.equal(vector(run.model), before)
        break


@pytest.mark.parametrize("how", ["another optimizer", "inner", "wrapped", "wrapped twice", "part of the model"])
def test_no_optimizer_applies_a_plain_gradient(how):
    run = private()
    before = vector(run.model)
    optimizer = {
        "another optimizer": lambda: torch.optim.Adam(run.model.parameters()),
        "inner": lambda: SAM(run.model.parameters(), lr=0.1).base_optimizer,
        "wrapped": lambda: Inside(run.optimizer),
        "wrapped twice": lambda: Inside(Inside(sgd(run.model.parameters()))),
        "part of the model": lambda: sgd(run.model[0].parameters()),
    }[how]()
    plain_backward(run.model)
    with pytest.raises(RuntimeError, match=PLAIN):
        optimizer.step()
    assert torch.equal(vector(run.model), before)


def test_optimizers_of_other_models_are_none_of_its_business():
    run, other = private(), mlp()
    optimizer = sgd(other.parameters())
    batch = next(batches := run.batches(data()))
    before = vector(other)
    plain_backward(other)
    optimizer.step()
    optimizer.step(lambda: plain_backward(other))
    assert not torch.equal(vector(other), before)
    run.step(batch, loss_fn)
    del batches


@pytest.mark.parametrize("wrap", [Inside, lambda optimizer: Inside(Inside(optimizer))], ids=["once", "twice"])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_wrapped_optimizer_trains(wrap, how):
    run = with_optimizer(lambda parameters: wrap(sgd(parameters)))
    for batch in run.batches(data()):
        if how == "step":
            run.step(batch, loss_fn)
            continue
        with pytest.raises(RuntimeError, match="while a drawn batch is outstanding"):
            run.optimizer.step()
        run.backward(loss_fn(run.model, batch))
        run.optimizer.step()
        run.optimizer.zero_grad()
    assert torch.equal(vector(run.model), train(private()))


@pytest.mark.parametrize("first", [True, False], ids=["handed over", "made later"])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_accelerate(first, how):
    """`accelerator.prepare` before privatize, as its documentation says, or an optimizer that is wrapped later."""
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), mlp()
    plain = sgd(model.parameters())
    if first:
        model, optimizer = accelerator.prepare(model, plain)
        run = private(model, optimizer=optimizer)
    else:
        run = private(model, optimizer=plain)
        optimizer = accelerator.prepare(plain)
    for batch in run.batches(data()):
        before = vector(model)
        plain_backward(model)
        with pytest.raises(RuntimeError, match=PLAIN):
            optimizer.step()
        assert torch.equal(vector(model), before)
        optimizer.zero_grad()
        if how == "step":
            run.step(batch.to(accelerator.device), loss_fn)
        else:
            run.backward(loss_fn(model, batch))
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(vector(model), train(private()))


def test_an_optimizer_that_holds_back_is_reported():
    class Accumulating(Inside):
        def step(self, closure=None):
            return

    run = with_optimizer(lambda parameters: Accumulating(sgd(parameters)))
    with pytest.raises(RuntimeError, match=r"Accumulating.step\(\) applied nothing.*raise the plan's batch"):
        train(run)


class Foreign(torch.optim.SGD):
    """Not torch's own: it could do anything before it calls the closure."""


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, Foreign])
@pytest.mark.parametrize("keyword", [False, True])
def test_a_closure_that_releases_is_accepted(make, keyword):
    """As Lightning does it: forward, zero_grad and backward are in the closure."""

    def trained(by_closure):
        model = mlp()
        run = private(model, optimizer=make(model.parameters(), lr=0.1))
        for batch in run.batches(data()):

            def closure(batch=batch):
                run.optimizer.zero_grad()
                losses = loss_fn(model, batch)
                run.backward(losses, batch)
                return losses.mean().detach()

            if not by_closure:
                closure()
                run.optimizer.step()
            elif keyword:
                assert run.optimizer.step(closure=closure) > 0
            else:
                assert run.optimizer.step(closure) > 0
        assert run.steps_taken == 5
        return vector(model)

    assert torch.equal(trained(True), trained(False))


@pytest.mark.parametrize("make", [torch.optim.SGD, Foreign])
@pytest.mark.parametrize("how", ["alone", "after a release", "keyword", "nothing"])
def test_a_closure_with_a_plain_backward_is_refused(how, make):
    model = mlp()
    run = private(model, optimizer=make(model.parameters(), lr=0.1))
    batch, before = next(batches := run.batches(data())), vector(model)

    def closure():
        run.optimizer.zero_grad()
        return None if how == "nothing" else plain_backward(model)

    if how == "after a release":
        run.backward(loss_fn(model, batch))
    text = "while a drawn batch is outstanding" if how == "nothing" else PLAIN
    with pytest.raises(RuntimeError, match=text):
        run.optimizer.step(closure=closure) if how == "keyword" else run.optimizer.step(closure)
    assert torch.equal(vector(model), before)
    del batches


def test_a_closure_that_is_called_twice_needs_two_releases():
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            with torch.no_grad():
                for p in self.param_groups[0]["params"]:
                    p.add_(p.grad)
            closure()
            super().step()

    model = mlp()
    run = private(model, optimizer=Twice(model.parameters(), lr=0.1))
    batch, before = next(batches := run.batches(data())), vector(model)
    run.backward(loss_fn(model, batch))
    with pytest.raises(RuntimeError, match="called its closure twice, and nothing was released in between"):
        run.optimizer.step(lambda: None)
    assert torch.equal(vector(model), before)
    del batches


def test_lbfgs_is_refused_in_any_wrapper():
    model = mlp()
    for wrap in (lambda optimizer: optimizer, Inside):
        with pytest.raises(ValueError, match=r"must be one that steps once per gradient. Got 'LBFGS'"):
            private(model, optimizer=wrap(torch.optim.LBFGS(model.parameters())))


def test_two_runs_on_one_model_with_optimizers_of_their_own():
    """What the first one saw is no concern of the second, and both hear of what the other released."""
    model = mlp()
    first, unused = private(model), private(model)
    train(first)
    plain_backward(model)
    waiting = private(model)
    next(held := waiting.batches(data()))
    second = private(model, optimizer=torch.optim.Adam(model.parameters()))
    train(second)
    assert (second.steps_taken, unused.steps_taken) == (5, 0)
    del held


def test_a_guard_goes_with_its_run():
    model = mlp()
    run = private(model)
    train(run)
    count = len(guard._guards)
    hooked = sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())
    assert hooked == len(list(model.parameters()))
    del run
    gc.collect()
    assert len(guard._guards) < count
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


def test_a_copied_optimizer_is_free():
    run = private()
    train(run)
    other = copy.deepcopy(run.model)
    optimizer = copy.deepcopy(run.optimizer)
    optimizer.param_groups[0]["params"] = list(other.parameters())
    plain_backward(other)
    optimizer.step()


# One process


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch):
    """Each rank would train alone."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 processes that do not know.*full epsilon.*init_process_group"):
        private()


def test_one_process_is_one_process(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")  # somebody's own variable: there is no rank
    train(private())
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    train(private())
