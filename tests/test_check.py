"""`dpscale.check`: what would be refused, said before training."""

import torch
import torch.nn.functional as F
from torch import nn

import dpscale

from .helpers import data, loss_fn, mlp


def rows(count=16):
    return data()[:count]


def test_a_model_that_can_be_trained():
    report = dpscale.check(mlp(), loss_fn, rows())
    assert report and not report.notes
    assert str(report) == "Samples are kept apart: this model can be trained."


def test_a_model_that_would_be_refused_says_why_and_what_to_do():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3))
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = dpscale.check(model, loss_fn, rows())
    assert not report
    assert "coupled at batch_norm" in str(report) and "dpscale.fix(model)" in str(report)
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())
    dpscale.fix(model)
    assert dpscale.check(model, loss_fn, rows())


def test_a_loss_that_is_no_loss_per_sample():
    report = dpscale.check(mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), rows())
    assert not report and "reduction='none'" in report.refusal


def test_sample_by_sample_is_said():
    class Loops(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x):
            return torch.stack([self.net(row) for row in x])

    report = dpscale.check(Loops(), loss_fn, rows())
    assert report and "sample by sample" in str(report) and "loop of your own" in str(report)


def test_few_rows_and_frozen_parameters_are_noted():
    model = mlp()
    model[0].requires_grad_(False)
    report = dpscale.check(model, loss_fn, rows(3))
    assert "2 parameters are frozen" in str(report) and "The batch has 3 rows" in str(report)


def test_random_states_and_modes_are_left_alone():
    model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(), nn.Linear(5, 3)).train()
    before = torch.get_rng_state()
    assert dpscale.check(model, loss_fn, rows())
    assert torch.equal(before, torch.get_rng_state()) and model.training
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
