"""Batches of any size: one compiled step, the same answer on every way that a draw can take through it."""

import logging

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import dpscale
from dpscale.engine import Engine
from dpscale.engine.reference import per_sample_gradients
from dpscale.engine.rules import convolution, linear
from dpscale.noise import Key, Noise
from dpscale.shapes import Sizes

from ..helpers import data, loss_fn, mlp, vector
from ..seeding import seeded
from .cases import without_tf32

N, BATCH = 400, 16
RULE = dpscale.Clip(C=0.5)
ROWS = Sizes.of(dpscale.Poisson(size=N, batch=BATCH)).rows
PATHS = {"empty": 0, "one": 1, "smallest": ROWS[0], "between": ROWS[1] + 1, "largest": ROWS[-1],
         "two parts": ROWS[-1] + 1, "three parts": 2 * ROWS[-1] + 5}  # fmt: skip


class Counts(nn.Module):
    """Makes a plain number of the size of its batch, so its graph is for that size."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()

    def forward(self, x):
        return self.inner(x.reshape(int(x.shape[0]), 4))


def scripted(counts):
    """A sampler whose draws have these sizes, in samples 0, 1, 2, …."""

    class Scripted(dpscale.Poisson):
        def _draws(self, key, start, order):
            yield from (np.arange(n) for n in counts[start:])

    return Scripted(size=N, batch=BATCH)


def released(counts, *, model=None, compile=False, made=None, sigma=1.0, **options):
    """What each step took from the parameters, times the expected batch: the sum, and its noise."""

    def backend(graph, inputs):
        made.append(graph)
        return graph

    model = model or mlp()
    plan = dpscale.Plan(scaling=RULE, sampling=scripted(counts), steps=len(counts), noise_multiplier=sigma)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    private = dpscale.privatize(model, optimizer, plan, seed=0, compile=compile, **options)
    if compile:
        private._engine = Engine(model, compile=backend, any_size=private._padding.usual)
    start, steps = vector(model), []
    for batch in private.batches(data(N)):
        private.step(batch, loss_fn)
        steps.append(BATCH * (start - vector(model)))
        with torch.no_grad():  # every step from the same weights
            for p, q in zip(model.parameters(), mlp().parameters(), strict=True):
                p.copy_(q)
    return steps


@pytest.mark.parametrize("micro_batch", [None, 5])
@pytest.mark.parametrize("model", [mlp, Counts])
def test_every_path_releases_the_sum_and_its_noise_once(model, micro_batch):
    """Against the oracle without noise, and then against the noise of the same key, of standard deviation σ·bound."""
    counts, made = [*PATHS.values()], []
    quiet = released(counts, model=model(), compile=True, made=made, sigma=1e-9, micro_batch=micro_batch)
    x, y = data(N).tensors
    grads = per_sample_gradients(mlp(), loss_fn, (x, y))
    flat = torch.cat([g.flatten(1) for g in grads.values()], 1)
    for count, found in zip(counts, quiet, strict=True):
        expected = (RULE.weight(flat.norm(dim=1))[:count, None] * flat[:count]).sum(0)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    sizes = Sizes.of(scripted([]), micro_batch).rows
    assert len(made) == 1 if model is mlp else len(made) <= len(sizes)
    noisy = released(counts, model=model(), compile=True, made=[], micro_batch=micro_batch)
    for step, (found, expected) in enumerate(zip(noisy, quiet, strict=True), 1):
        noise = {n: torch.zeros_like(p) for n, p in model().named_parameters()}
        Noise(Key(0)).add(noise, RULE.bound, step)
        torch.testing.assert_close(found - expected, torch.cat([t.flatten() for t in noise.values()]))


@pytest.mark.parametrize("micro_batch", [None, 5])
def test_a_sample_more_moves_the_sum_by_its_bound_at_most(micro_batch):
    """Also where it makes the draw another size, or another part."""
    counts = sorted({n + more for n in (*PATHS.values(), *ROWS) for more in (0, 1)})
    sums = dict(zip(counts, released(counts, compile=True, made=[], sigma=1e-9, micro_batch=micro_batch), strict=True))
    moved = [float((sums[n + 1] - sums[n]).norm()) for n in counts if n + 1 in sums]
    assert max(moved) <= RULE.bound * (1 + 1e-4) and min(moved) > 0.1 * RULE.bound


def test_a_thousand_draws_are_compiled_once_and_compute_little_in_vain():
    made, rows, sampling = [], [], dpscale.Poisson(size=N, batch=BATCH)
    model = mlp()
    plan = dpscale.Plan(scaling=RULE, sampling=sampling, steps=1000, noise_multiplier=1.0)
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.0), plan, seed=0, compile=True)

    def backend(graph, inputs):
        made.append(graph)
        return lambda *inputs: rows.append(len(inputs[-1])) or graph(*inputs)

    private._engine = Engine(model, compile=backend, any_size=BATCH)
    drawn = [len(private.step(batch, loss_fn).losses) for batch in private.batches(data(N))]
    assert len(made) == 1 and len(set(drawn)) > 15 and len(set(rows)) == len(ROWS)
    assert sum(rows[2:]) / sum(drawn) <= 1.12  # the first runs are those of the compilation, and of the try with zeros
    assert max(drawn) > ROWS[-1], "no draw went in two parts"


def test_padding_does_not_count_towards_anything():
    """The rows of a draw have the losses, norms and weights that they have alone."""
    private = dpscale.privatize(
        model := mlp(), torch.optim.SGD(model.parameters(), lr=0.0),
        dpscale.Plan(scaling=RULE, sampling=scripted([13, 40]), steps=2, noise_multiplier=1.0), seed=0, compile=True,
    )  # fmt: skip
    private._engine = Engine(model, compile=lambda graph, inputs: graph, any_size=BATCH)
    for batch in private.batches(data(N)):
        report = private.step(batch, loss_fn)
        alone = dpscale.scaled_sum(model, loss_fn, tuple(batch.data), RULE)
        for name in ("losses", "norms", "weights"):
            torch.testing.assert_close(getattr(report, name), getattr(alone, name))
        assert report.mask.all() and len(report.mask) == len(batch.draw.indices)


def test_a_model_that_needs_the_size_is_compiled_for_each_and_says_so(caplog):
    made, model = [], Counts()
    engine = Engine(model, compile=lambda graph, inputs: made.append(graph) or graph, any_size=BATCH)
    caplog.set_level(logging.INFO, logger="dpscale")
    for size in (6, 8, 6, 8):
        x, y = (t[:size] for t in data(N).tensors)
        out = engine.scaled_sum(loss_fn, (x, y), RULE, keep=True)
        torch.testing.assert_close(out.grads, dpscale.scaled_sum(model, loss_fn, (x, y), RULE).grads)
    assert len(made) == 2
    said = [text for text in caplog.messages if "each size" in text]
    assert said == [
        "dpscale: compiled for each size of batch, not once for all: an operation needs to know the size of the batch"
    ]


def test_what_was_decided_by_the_size_of_the_example_holds_for_such_sizes_alone():
    """A forward that branches on the number of rows runs its own operations for each size."""

    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) * 1.0 if x.shape[0] > 20 else super().forward(x)

    made, model = [], Branches(4, 3)
    engine = Engine(model, compile=lambda graph, inputs: made.append(graph) or graph, any_size=BATCH)
    for size in (8, 12, 40, 9, 30):
        batch = tuple(t[:size] for t in data(N).tensors)
        out = engine.scaled_sum(loss_fn, batch, RULE, keep=True)
        torch.testing.assert_close(out.losses, loss_fn(model, batch).detach())
    assert len(made) == 3  # for any size up to 20, for 40, for 30


@pytest.mark.parametrize(("where", "limit", "numbers", "layer", "shape"), [
    (convolution, "SMALL", 16 * 49, nn.Conv2d(4, 12, 3, padding=1), (4, 7, 7)),  # input and output gradient of a sample
    (convolution, "CHUNK", 4 * 9 * 49, nn.Conv2d(4, 12, 3, padding=1), (4, 7, 7)),  # its patches
    (convolution, "CHUNK", 36**2, nn.Conv2d(16, 16, 3, padding=1), (16, 4, 4)),  # inner products of its pixels
    (linear, "CHUNK", 4 * 3, nn.Linear(4, 3), (8, 4)),  # its gradient
])  # fmt: skip
@without_tf32()
def test_what_is_chosen_by_the_memory_that_it_takes_is_chosen_for_all_sizes(
    monkeypatch, where, limit, numbers, layer, shape
):
    """Where a limit lies between two sizes of a run, one step computes them all."""
    rows = Sizes.of(dpscale.Poisson(size=N, batch=64)).rows
    monkeypatch.setattr(convolution, "SMALL", 0)
    monkeypatch.setattr(where, limit, numbers * (rows[0] + 1))
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(1, *shape))
    made, engine = [], Engine(model, compile=lambda graph, inputs: made.append(graph) or graph, any_size=64)
    for count in rows:
        batch = torch.randn(count, *shape, generator=seeded()), torch.arange(count) % 3
        ours = engine.scaled_sum(loss_fn, batch, RULE, keep=True)
        torch.testing.assert_close(ours.grads, dpscale.scaled_sum(model, loss_fn, batch, RULE).grads)
    assert len(made) == 1


def test_len_is_pythons_own_again():
    plain = len
    model = mlp()
    Engine(model, compile=lambda graph, inputs: graph, any_size=BATCH).scaled_sum(
        loss_fn, tuple(t[:9] for t in data(N).tensors), RULE
    )
    assert len is plain and len(torch.zeros(3)) == 3


def test_a_compiled_step_of_torchs_compiler_serves_every_path():
    """And it is found in the compiler's cache by the next run, which passes by what it cannot name."""
    counts = [*PATHS.values()]
    counters["inductor"].clear()
    model = mlp()
    plan = dpscale.Plan(scaling=RULE, sampling=scripted(counts), steps=len(counts), noise_multiplier=1.0)
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan, seed=0, compile=True)
    for batch in private.batches(data(N)):
        private.step(batch, loss_fn)
    (key,) = private._engine._compiled._known
    assert key.rows is None
    found = counters["inductor"]
    assert found["fxgraph_cache_miss"] + found["fxgraph_cache_hit"] == 1 and not found["fxgraph_cache_bypass"]
    other = mlp()
    eager = dpscale.privatize(other, torch.optim.SGD(other.parameters(), lr=0.1), plan, seed=0, compile=False)
    for batch in eager.batches(data(N)):
        eager.step(batch, loss_fn)
    torch.testing.assert_close(vector(model), vector(other), rtol=1e-4, atol=1e-5)
