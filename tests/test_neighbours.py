"""Brute force: neighbouring data sets through the whole path, noise off; what is released may move by the bound.

Draws do not depend on the data, so under one seed both data sets have the same. The learning rate is 0: every step is
at the same weights.
"""

from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset

import dpscale

from .engine import correct, families

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")
RULE = dpscale.AutoS(C=0.1, r=1e-5)  # nearly every sample adds all of the bound
ROUNDING = 1 + 1e-5
SIZE, EXPECTED, STEPS = 8, 4, 3
POISSON = dpscale.Poisson(size=SIZE, batch=EXPECTED)
EXCHANGED, LEFT_OUT = 0, 5  # padding, where there is any, is made of the first


@dataclass(frozen=True)
class Case:
    """A model, samples for it (a few more than a data set has), and its losses."""

    model: nn.Module
    samples: Any
    loss: Any


def case_of(name):
    kind, name = name.split(": ")
    if kind == "family":
        family = families.FAMILIES[name]
        return Case(families.make(family), family.batch(SIZE + 2), family.loss)
    case = correct.CORRECT[name]
    return Case(correct.make(case), dict(correct.batch_of(case, SIZE + 2)), case.loss)


NAMES = [f"family: {name}" for name in families.FAMILIES] + [f"correct: {name}" for name in correct.OWN]
"""Not other libraries' models in `correct`: what is released of them is compared with the oracle step by step."""


# Rows that change their order or run one by one. A step can run such a model sample by sample; a loop of one's own has
# run its forward already, so there they may be refused: what matters is that they are not released wrongly.
REORDERED = [
    "packed-lstm", "packed-lstm-sorted", "lstm-sorted-by-length", "tokens-sorted-by-length", "loop-over-samples",
    "loop-over-rows", "branch-by-sample", "routed-by-sample", "rounds-by-sample",
]  # fmt: skip


@contextmanager
def refusable(name, how):
    try:
        yield
    except dpscale.UnsupportedModel:
        if how == "step" or name.split(": ")[1] not in REORDERED:
            raise


class Rows(Dataset):
    """Samples by number, which row they are of the data set, and whether they count."""

    def __init__(self, samples, numbers, without=None):
        self.samples, self.numbers, self.without = samples, numbers, without

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, row):
        sample = tree_map(lambda t: t[self.numbers[row]], self.samples)
        return {"row": row, "counts": float(row != self.without), "sample": sample}


def released(case, loss, data, sampling, steps, how="step", seed=0):
    """For each step, the sum that was released and the rows that were drawn."""
    trained = [p for p in case.model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.0)
    plan = dpscale.Plan(scaling=RULE, sampling=sampling, steps=steps, unsafe_no_noise=True)
    torch.manual_seed(0)
    private = dpscale.privatize(case.model, optimizer, plan, seed=seed)
    sums, drawn = [], []

    def catch(*_):
        sums.append(torch.cat([p.grad.detach().flatten() * plan.expected_batch for p in trained]))

    optimizer.register_step_pre_hook(catch)
    for batch in private.batches(data):
        if how == "step":
            report = private.step(batch, loss)
        else:
            report = private.backward(loss(case.model, batch))
            optimizer.step()
            optimizer.zero_grad()
        drawn.append(set(batch["row"][: len(report.mask)][report.mask].tolist()))
    assert len(sums) == steps
    return sums, drawn


def loss_of(case):
    def loss(model, batch):
        losses = case.loss(model, batch["sample"])
        return losses * batch["counts"].to(losses.dtype)

    return loss


@cache
def telling_seed():
    """One under which each sample of interest is drawn, and once not: that depends on the seed alone."""
    plain = Case(nn.Linear(4, 1).double(), families.floats(4)(SIZE), lambda model, x: model(x[0]).squeeze(1))
    for seed in range(100):
        _, drawn = released(plain, loss_of(plain), Rows(plain.samples, range(SIZE)), POISSON, STEPS, seed=seed)
        if all(0 < sum(row in rows for rows in drawn) < STEPS for row in (EXCHANGED, LEFT_OUT)):
            return seed
    raise AssertionError("No seed draws as it should.")


def compare(case, how, others):
    """Each of the other data sets, (row, limit, data), beside the plain one."""
    loss = loss_of(case)
    seed = telling_seed()
    plain, drawn = released(case, loss, Rows(case.samples, range(SIZE)), POISSON, STEPS, how, seed)
    for row, limit, data in others:
        other, drawn_there = released(case, loss, data, POISSON, STEPS, how, seed)
        assert drawn == drawn_there
        moves = [float((a - b).norm()) / RULE.bound for a, b in zip(plain, other, strict=True)]
        for move, rows in zip(moves, drawn, strict=True):
            if row in rows:
                assert move <= limit * ROUNDING
            else:
                assert move == 0
        assert max(moves) > 0
    return plain


def neighbours(case):
    """(row, how many bounds a release may move by, data): a sample exchanged, a sample left out."""
    exchanged = Rows(case.samples, [SIZE if row == EXCHANGED else row for row in range(SIZE)])
    return [(EXCHANGED, 2, exchanged), (LEFT_OUT, 1, Rows(case.samples, range(SIZE), without=LEFT_OUT))]


@pytest.mark.parametrize("name", NAMES)
def test_one_sample_moves_a_step_by_no_more_than_its_bound(name):
    case = case_of(name)
    plain = compare(case, "step", neighbours(case))
    assert max(float(s.norm()) for s in plain) > RULE.bound  # several samples count, each as much as it may


@pytest.mark.parametrize("name", NAMES[::2])
def test_one_sample_moves_a_loop_of_ones_own_by_no_more_than_its_bound(name):
    case = case_of(name)
    with refusable(name, "backward"):
        compare(case, "backward", neighbours(case))


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("name", NAMES[1::6])
def test_a_sample_fewer(name, how):
    """The data set itself is shorter by one: the shapes inside change too."""
    case = case_of(name)
    with refusable(name, how):
        check_a_sample_fewer(case, how)


def check_a_sample_fewer(case, how):
    loss = loss_of(case)
    full = released(case, loss, Rows(case.samples, range(SIZE)), dpscale.FullBatch(size=SIZE), 1, how)[0][0]
    for row in (0, 3, SIZE - 1):
        numbers = [i for i in range(SIZE) if i != row]
        less = released(case, loss, Rows(case.samples, numbers), dpscale.FullBatch(size=SIZE - 1), 1, how)[0][0]
        assert 0 < float((full - less).norm()) <= RULE.bound * ROUNDING


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("name", NAMES[1::6])
def test_an_empty_draw_releases_nothing(name, how):
    case = case_of(name)
    with refusable(name, how):
        check_an_empty_draw(case, how)


def check_an_empty_draw(case, how):
    data, sampling = Rows(case.samples, range(SIZE)), dpscale.Poisson(size=SIZE, batch=1)
    sums, drawn = released(case, loss_of(case), data, sampling, 6, how, seed=1)
    for total, rows in zip(sums, drawn, strict=True):
        assert bool(total.any()) == bool(rows)
        assert float(total.norm()) <= len(rows) * RULE.bound * ROUNDING
    assert sum(not rows for rows in drawn) >= 2
