"""Correct models are accepted, whatever they are made of, and what they give is the oracle's."""

import random
import warnings

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, default_collate

import dpscale
from dpscale.engine.reference import reference_sum

from .cases import without_tf32
from .correct import CORRECT, OWN, batch_of, make

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
RULE = dpscale.AutoS(C=0.1, r=1e-4)  # every norm counts: no sample is below a threshold
OTHER_DRAWS = ["t5", "longformer", "swin"]  # run sample by sample, or draw in another order
SAME_DRAWS = [name for name, case in CORRECT.items() if case.draws and name not in OTHER_DRAWS]


def chosen(batch, rows):
    return type(batch)({name: values[rows] for name, values in batch.items()})


class Rows(Dataset):
    """The samples of a batch, one by one."""

    def __init__(self, batch):
        self.batch = batch

    def __len__(self):
        return len(next(iter(self.batch.values())))

    def __getitem__(self, row):
        return {name: values[row] for name, values in self.batch.items()}

    @property
    def loader(self):
        """How to put rows together, if not into a dict."""
        kind = type(self.batch)
        return {} if kind is dict else {"collate_fn": lambda rows: kind(default_collate(rows))}


def prepared(name, samples=6):
    case = CORRECT[name]
    tolerance = 1e-4 if case.single else 1e-9
    return case, make(case), batch_of(case, samples), tolerance


def seed_everything(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@pytest.mark.parametrize("name", CORRECT)
@without_tf32()
def test_a_row_depends_on_itself_alone(name):
    """Without the engine: a row in a batch, among copies of another, and alone has one loss and one gradient."""
    case, model, batch, tolerance = prepared(name)
    trained = [p for p in model.parameters() if p.requires_grad]
    kept = 4
    found = []
    for rows in ([0, 1, 2, 3, 4, 5], [3, 3, 3, 3, 4, 3], [5, 0, 5, 2, 4, 1], [4]):
        loss = case.loss(model, chosen(batch, rows))[rows.index(kept)]
        grads = torch.autograd.grad(loss, trained, allow_unused=True)
        found.append((loss, torch.cat([torch.zeros_like(p).flatten() if g is None else g.flatten()
                                       for p, g in zip(trained, grads, strict=True)])))  # fmt: skip
    assert found[0][1].norm() > 1e-5
    for loss, gradient in found[1:]:
        torch.testing.assert_close(loss, found[0][0], rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(gradient, found[0][1], rtol=tolerance, atol=tolerance * float(found[0][1].norm()))


@pytest.mark.parametrize("name", CORRECT)
@without_tf32()
def test_what_private_steps_release_is_the_oracles(name):
    """At each step, looked at or not, the sum over the rows that were drawn. So a sample moves it by no more than its
    bound, and by nothing if it was not drawn, as a row depends on itself alone."""
    case, model, batch, tolerance = prepared(name, samples=8)
    model.train(not case.draws)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer, released = torch.optim.SGD(trained.values(), lr=0.0), []
    optimizer.register_step_pre_hook(lambda *_: released.append({n: p.grad.clone() for n, p in trained.items()}))
    plan = dpscale.Plan(scaling=RULE, sampling=dpscale.Poisson(size=8, batch=4), steps=3, unsafe_no_noise=True)
    run, data = dpscale.privatize(model, optimizer, plan, seed=2), Rows(batch)
    counts = set()
    for drawn in run.batches(data, **data.loader):
        report, rows = run.step(drawn, case.loss), drawn.draw.indices
        counts.add(len(rows))
        sums = {n: g * plan.expected_batch for n, g in released[-1].items()}
        check_equal(case, model, chosen(batch, rows), tolerance, report, sums)
    assert run.steps_taken == 3 and min(counts) > 1 and len(counts) > 1


def check_equal(case, model, batch, tolerance, out, sums):
    """Losses, norms and weights, and the sums, are the oracle's."""
    expected, norms, weights = reference_sum(model, case.loss, dict(batch), RULE)
    with torch.no_grad():
        losses = case.loss(model, batch)
    torch.testing.assert_close(out.losses.to(losses), losses, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(out.norms.to(norms), norms, rtol=tolerance, atol=tolerance * float(norms.max()))
    torch.testing.assert_close(out.weights.to(weights), weights, rtol=10 * tolerance, atol=tolerance)
    assert set(sums) == set(expected)
    for parameter, value in expected.items():
        torch.testing.assert_close(
            sums[parameter].to(value), value, rtol=tolerance, atol=tolerance * RULE.bound, msg=parameter
        )


@pytest.mark.parametrize("name", [*OWN, "mixtral-wide"])
@without_tf32()
def test_rounding_is_no_reason_to_refuse(name):
    """In single precision a row's loss need not be the same to the bit in other company: rows that are gathered or
    packed run in products of another size."""
    case = CORRECT[name]
    model, batch = make(case, torch.float32), batch_of(case, 16, torch.float32)
    out = dpscale.scaled_sum(model, case.loss, batch, RULE)
    check_equal(case, model, batch, 1e-4, out, out.grads)


def test_some_correct_models_round_by_their_company():
    """Without the engine: the test above has something to say."""
    case = CORRECT["routed-by-sample"]
    model, batch = make(case, torch.float32), batch_of(case, 16, torch.float32)
    with torch.no_grad():
        together = case.loss(model, batch)
        moved = [
            float((case.loss(model, chosen(batch, [other] * 8 + [8] + [other] * 7))[8] - together[8]).abs())
            for other in range(16)
        ]
    assert 0 < max(moved) < 1e-5 * float(together[8].abs().clamp(min=1))


@pytest.mark.parametrize("name", SAME_DRAWS)
@without_tf32()
def test_random_numbers_of_its_own_are_those_of_a_plain_forward(name):
    """In train mode: norms and sums are autograd's on each loss of one forward that draws the same."""
    case, model, batch, tolerance = prepared(name)
    model.train()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    for seed in range(3 if name in OWN else 1):
        seed_everything(seed)
        losses = case.loss(model, batch)
        rows = [
            torch.autograd.grad(v, list(trained.values()), retain_graph=True, materialize_grads=True) for v in losses
        ]
        norms = torch.stack([torch.cat([g.flatten() for g in row]).norm() for row in rows])
        weights = RULE.weight(norms)
        seed_everything(seed)
        out = dpscale.scaled_sum(model, case.loss, batch, RULE)
        torch.testing.assert_close(out.losses.to(losses), losses.detach(), rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(out.norms.to(norms), norms, rtol=tolerance, atol=tolerance * float(norms.max()))
        for k, parameter in enumerate(trained):
            value = sum(w * row[k] for w, row in zip(weights, rows, strict=True))
            torch.testing.assert_close(
                out.grads[parameter].to(value), value, rtol=tolerance, atol=tolerance * RULE.bound, msg=parameter
            )


@pytest.mark.parametrize("name", OTHER_DRAWS)
def test_random_numbers_of_its_own_keep_the_bound(name):
    """In train mode, one sample left in: whatever is drawn, the sum holds no more of it than the bound."""
    case, model, batch, _ = prepared(name)
    model.train()
    for seed in range(3):
        seed_everything(seed)
        mask = torch.arange(6) == seed + 1
        out = dpscale.scaled_sum(model, case.loss, batch, RULE, mask=mask)
        released = torch.cat([g.flatten() for g in out.grads.values()]).norm()
        assert 0.2 * RULE.bound < released <= RULE.bound * (1 + 1e-5)


@pytest.mark.parametrize("name", OWN)
@without_tf32()
def test_anomaly_detection_may_be_on(name):
    """It raises on any NaN in a backward."""
    case, model, batch, tolerance = prepared(name)
    _, norms, _ = reference_sum(model, case.loss, batch, RULE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            out = dpscale.scaled_sum(model, case.loss, batch, RULE)
    torch.testing.assert_close(out.norms.to(norms), norms, rtol=tolerance, atol=tolerance * float(norms.max()))
