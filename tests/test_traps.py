"""What other libraries got wrong in the step and the loop, one test each; the sampler's are in their own files.

The numbers are those of the project's list of traps.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

from .engine.cases import check_equal
from .engine.test_models import Flattened, Twice
from .helpers import SIZE, data, loss_fn, mlp, plan, private, train, vector


def test_trap_01_noise_and_scaling_read_one_bound():
    """Scaling by one object and noise from another gave 100 times too little noise."""

    def noise(C):
        model = nn.Linear(4, 3)
        nn.init.zeros_(model.weight)
        run = private(model, scaling=dpscale.Clip(C=C), steps=1)
        grads = []
        run.optimizer.register_step_pre_hook(lambda *_: grads.append(model.weight.grad.clone()))
        masked = TensorDataset(
            torch.zeros(SIZE, 4), torch.zeros(SIZE, dtype=torch.long)
        )  # zero input, zero weight gradient
        train(run, masked)
        return grads[0]

    torch.testing.assert_close(noise(10.0), 100 * noise(0.1))
    rule = dpscale.Clip(C=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.C = 0.01
    assert dataclasses.replace(plan(), scaling=dpscale.Clip(C=7.0)).noise_std == 7.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().scaling = rule


class FunctionalBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(F.batch_norm(self.a(x), None, None, training=True))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        nn.BatchNorm1d(6).requires_grad_(False),
        None,
    ],
    ids=["affine", "without-affine", "without-statistics", "frozen-in-train-mode", "functional"],
)
@pytest.mark.parametrize("how", ["step", "backward"])
def test_trap_02_batch_norm_in_any_disguise_is_refused(norm, how):
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    model = FunctionalBatchNorm() if norm is None else nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = private(model, optimizer=optimizer)
    with pytest.raises(dpscale.UnsupportedModel, match=r"coupled at batch_norm.*GroupNorm"):
        for batch in run.batches(data()):
            run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(model, batch))
    assert run.steps_taken == 0
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]), f"{k} changed although the model was refused"


@pytest.mark.parametrize("time_first", [False, True])
def test_trap_03_flattened_positions_are_not_samples(time_first):
    """Scaling tokens instead of samples let one sample add T times the bound."""
    torch.manual_seed(0)
    model, rule = Flattened(time_first).double(), dpscale.Clip(C=1e-3)
    x = torch.randn(5, 7, 4).double()

    def loss(m, b):
        return m(b[0]).square().sum(1)

    out = check_equal(model, (x,), rule, loss=loss)
    assert out.norms.shape == (5,)
    without = dpscale.scaled_sum(model, loss, (x[1:],), rule)
    moved = torch.cat([(out.grads[n] - without.grads[n]).flatten() for n in out.grads]).norm()
    assert moved.item() == pytest.approx(rule.bound)  # all are clipped, so the bound is reached, and not exceeded


def test_trap_09_a_mean_is_not_a_sum():
    """With a mean, norms shrink by the batch size. Here a mean is refused, and norms do not know the batch size."""
    model, (x, y) = mlp(), data().tensors
    with pytest.raises(ValueError, match="reduction='none'"):
        dpscale.scaled_sum(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y), dpscale.Clip(C=1.0))
    few = dpscale.scaled_sum(model, loss_fn, (x[:2], y[:2]), dpscale.Clip(C=1.0)).norms
    many = dpscale.scaled_sum(model, loss_fn, (x, y), dpscale.Clip(C=1.0)).norms
    torch.testing.assert_close(few, many[:2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: loss_fn(m, b) - loss_fn(m, b).mean(),
        lambda m, b: loss_fn(m, b) / loss_fn(m, b).detach().sum(),
        lambda m, b: loss_fn(m, b).mean().expand(len(b[0])),
        lambda m, b: F.cross_entropy(m(b[0] - b[0].mean(0)), b[1], reduction="none"),
        lambda m, b: loss_fn(m, b).cumsum(0),
    ],
    ids=["minus-mean", "detached-weights", "expanded-mean", "batch-mean-input", "cumulative"],
)
def test_trap_09_a_loss_that_couples_samples_is_refused(loss):
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        for batch in run.batches(data()):
            run.step(batch, loss)
    assert run.steps_taken == 0


@pytest.mark.parametrize("couple", [lambda v: v - v.mean(), lambda v: v.mean().expand(len(v)), lambda v: v.cumsum(0)])
def test_trap_09_a_coupled_loss_in_your_own_loop_is_refused(couple):
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled in the loss"):
        for batch in run.batches(data()):
            run.backward(couple(loss_fn(run.model, batch)))
    assert run.steps_taken == 0


def test_trap_11_norms_are_as_precise_as_what_they_bound():
    """In bfloat16 a sum of 2,000 terms stalls; the norm must be that of the float32 sum which is released."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False).bfloat16()
    x = torch.rand(3, 2000, 8).bfloat16()  # the gradient of the weight is the sum over positions, exactly
    out = dpscale.scaled_sum(model, lambda m, b: m(b[0]).float().sum((1, 2)), (x,), dpscale.Clip(C=1.0))
    exact = x.double().sum(1).norm(dim=1)
    torch.testing.assert_close(out.norms.double(), exact, rtol=1e-5, atol=0)
    stalled = x.sum(1).double().norm(dim=1)
    assert not torch.allclose(stalled, exact, rtol=1e-5), "the example would not tell the two apart"
    for i in range(3):
        one = dpscale.scaled_sum(model, lambda m, b: m(b[0]).float().sum((1, 2)), (x[i : i + 1],), dpscale.Clip(C=1.0))
        assert one.grads["weight"].double().norm() == pytest.approx(1.0, rel=1e-5)


def test_trap_12_a_second_backward_neither_wipes_nor_doubles():
    run = private()
    batches = iter(run.batches(data()))
    run.backward(loss_fn(run.model, next(batches)))
    first = [p.grad.clone() for p in run.model.parameters()]
    batch = next(batches)
    losses = loss_fn(run.model, batch)
    with pytest.raises(RuntimeError, match=r"backward\(\) was called again before optimizer.step\(\)"):
        run.backward(losses)
    assert all(torch.equal(p.grad, g) for p, g in zip(run.model.parameters(), first, strict=True))
    assert run.steps_taken == 1
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.backward(loss_fn(run.model, batch))
    assert run.steps_taken == 2


def test_trap_15_used_twice_registered_in_another_order_keywords_and_4d():
    torch.manual_seed(0)
    model = Twice().double()
    assert next(iter(dict(model.named_parameters()))).startswith("last")
    for rule in (dpscale.Clip(C=0.1), dpscale.PSASC(C=0.1, s=0.5, r=0.01)):
        check_equal(model, (torch.randn(4, 2, 3, 4).double(),), rule)


def test_trap_19_an_empty_batch_is_a_step_of_noise():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = private(model, optimizer=optimizer, sampling=dpscale.Poisson(size=SIZE, batch=1), steps=30)
    empty = []
    for batch in run.batches(data()):
        before = vector(model)
        report = run.step(batch, loss_fn)
        if not report.mask.any():
            empty.append(run.steps_taken)
            assert report.loss == 0 and not report.weights.any()
        assert not torch.equal(vector(model), before)  # noise alone moves the weights
    assert run.steps_taken == 30
    assert 3 <= len(empty) <= 22  # expected 30/e = 11
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_trap_20_a_forward_without_a_backward_does_no_harm():
    """Evaluations in train mode and in eval mode, on other and on equal batch sizes, with and without gradients."""

    def run(disturbed):
        model = mlp()
        one = private(model)
        for x, y in one.batches(data()):
            losses = loss_fn(model, (x, y))
            if disturbed:
                model(torch.randn(7, 4, generator=torch.Generator().manual_seed(0)))
                model(x * 2).sum()
                with torch.no_grad():
                    model(x)
                model.eval()(x)
                model.train()
            one.backward(losses)
            one.optimizer.step()
            one.optimizer.zero_grad()
            if disturbed:
                model(x)
        return vector(model)

    assert torch.equal(run(False), run(True))


def test_trap_24_schedulers_and_hooks_work():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    run = private(model, optimizer=optimizer)
    hooked, moves = [], []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for batch in run.batches(data()):
        before = vector(model)
        run.step(batch, loss_fn)
        moves.append((vector(model) - before).norm().item())
        scheduler.step()
    assert len(hooked) == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    assert all(b < 0.5 * a for a, b in itertools.pairwise(moves))


@pytest.mark.parametrize("labels", [[0, 0, 0, 0, 1, 2], [2, 2, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2]])
def test_trap_09_coupling_through_labels_alone_is_found(labels):
    """Weights by class frequency: only integers couple the samples, and the first ones may all be alike."""
    y = torch.tensor(labels)

    def balanced(m, b):
        counts = torch.bincount(b[1], minlength=3)
        return loss_fn(m, b) / counts[b[1]]

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(mlp(), balanced, (torch.randn(6, 4), y), dpscale.Clip(C=1.0))


def test_trap_09_coupling_through_labels_is_looked_for_again():
    """A batch of class 0 alone cannot show it; the next batch can, and must."""

    def balanced(m, b):
        return loss_fn(m, b) / torch.bincount(b[1], minlength=3)[b[1]]

    model, x = mlp(), torch.randn(6, 4)
    dpscale.scaled_sum(model, balanced, (x, torch.zeros(6, dtype=torch.long)), dpscale.Clip(C=1.0))
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(model, balanced, (x, torch.tensor([0, 1, 2, 0, 1, 1])), dpscale.Clip(C=1.0))


def test_trap_09_a_loss_that_couples_only_later_is_refused():
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled in the loss"):
        for batch in run.batches(data()):
            losses = loss_fn(run.model, batch)
            run.backward(losses if run.steps_taken < 2 else losses - losses.mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.steps_taken == 2
