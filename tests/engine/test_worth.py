"""Whether compiling pays is decided from the plan's steps and from the time that they take."""

import logging

import pytest
import torch

import dpscale
from dpscale.batches import Padding
from dpscale.engine import Engine
from dpscale.engine.compile import worth
from dpscale.engine.compile.worth import COLD, SAVING, TIMED, Worth
from dpscale.shapes import Sizes

from ..helpers import data, loss_fn, mlp, plan


def decided(steps, eager, compiled=(), first=9.0):
    found = Worth(steps)
    for seconds in [first, *eager]:
        found.took(seconds)
    for seconds in compiled:
        found.took(seconds)
    return found.compile


@pytest.mark.parametrize(("factor", "pays"), [(0.9, False), (1.1, True)])
def test_a_long_rest_is_compiled(factor, pays):
    steps = 1000 + 2 * TIMED
    step = factor * COLD / SAVING / 1000
    assert decided(steps, [step] * (2 * TIMED - 1)) == pays
    assert decided(steps, [step, *[100 * step] * (2 * TIMED - 2)]) == pays, "disturbed steps do not count"


def test_what_is_no_faster_is_given_up(caplog):
    eager = [1.0] * (2 * TIMED - 1)
    with caplog.at_level(logging.INFO, logger="dpscale"):
        assert decided(10_000, eager, [70.0, *[0.6] * TIMED])
        assert not decided(10_000, eager, [70.0, *[1.2] * TIMED])
    assert [r.getMessage().split(":")[1].strip().split()[0] for r in caplog.records] == ["9990", "9990", "runs"]


def test_a_run_goes_over_to_compiled_steps_and_stays_the_same(monkeypatch):
    """Here with a compiler that does nothing, and a limit that every run exceeds."""
    monkeypatch.setattr(worth, "COLD", -1.0)
    made, models = [], []
    for decides in (Worth(30), False):
        model = mlp()
        private = dpscale.privatize(
            model, torch.optim.SGD(model.parameters(), lr=0.1), plan(steps=30), seed=0, compile=False
        )
        if decides:
            monkeypatch.setattr("dpscale.engine.engine.inductor", lambda graph, inputs: made.append(graph) or graph)
            private._padding = Padding(Sizes.of(private.plan.sampling))
            private._engine = Engine(model, compile=decides, any_size=private._padding.usual)
        for batch in private.batches(data()):
            private.step(batch, loss_fn)
        models.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert len(made) >= 1
    torch.testing.assert_close(*models, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("asked", "decides"), [({}, True), ({"seed": 1}, False), ({"compile": False}, False), ({"compile": True}, False)]
)
def test_only_what_is_left_open_is_decided(asked, decides):
    model = mlp()
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(), **asked)
    on_gpu = next(model.parameters()).is_cuda  # where steps are compiled unless told otherwise
    assert (private._engine._worth is not None) == (decides and not on_gpu)
    assert private._engine.compiles == asked.get("compile", on_gpu)
