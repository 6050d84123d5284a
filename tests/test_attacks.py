"""What an attack from the public names alone got past an earlier engine, one test each; and what stays in memory."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import dpscale
from dpscale.engine.reference import reference_sum
from dpscale.engine.tape.tape import Tape

from .helpers import plan
from .seeding import seeded

SIZE = 120


def data():
    g = seeded(0)
    return TensorDataset(torch.randn(SIZE, 6, generator=g), torch.randint(0, 2, (SIZE,), generator=g))


def loss_fn(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def go(model, how="step", steps=20, batch=24, loader=None, **options):
    sampling = dpscale.Poisson(size=SIZE, batch=batch)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = dpscale.privatize(model, optimizer, plan(sampling=sampling, steps=steps), seed=1, **options)
    for drawn in run.batches(data(), **(loader or {})):
        if how == "step":
            run.step(drawn, loss_fn)
        else:
            run.backward(loss_fn(model, drawn))
            optimizer.step()
            optimizer.zero_grad()
    return run


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, x):
        return self.last(F.gelu(self.first(x)))


class ClipsTheBatch(Net):
    """A hook that scales what comes back by its norm over the whole batch: nothing of it shows row by row."""

    def forward(self, x):
        out = super().forward(x) * 1.0
        if out.requires_grad:
            out.register_hook(lambda g: g * torch.clamp(0.1 / (g.norm() + 1e-12), max=1))
        return out


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_backward_that_clips_by_the_norm_of_the_batch_never_enters_a_sum(how):
    """It runs sample by sample, or is refused: what one sample sends does not depend on what others send."""
    model = ClipsTheBatch()
    if how == "backward":
        with pytest.raises(dpscale.UnsupportedModel):
            go(model, how)
        return
    batch = data()[:24]
    out = dpscale.scaled_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))
    torch.testing.assert_close(out.norms, reference_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))[1])


class CentresLargeBatches(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0) if len(x) >= 30 else x)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_batch_larger_than_any_before_is_looked_at(how):
    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        go(CentresLargeBatches(), how, steps=60)


class Queue(Net):
    """A memory bank that is too large to be compared entry by entry, and replaced at each forward."""

    def __init__(self):
        super().__init__()
        self.register_buffer("queue", torch.zeros(6, 1 << 18))

    def forward(self, x):
        out = super().forward(x) + self.queue[:, :2].sum(0)
        self.queue = torch.cat([x.detach().T, self.queue], 1)[:, : 1 << 18]
        return out


class History(Net):
    def __init__(self):
        super().__init__()
        self.seen = [1.0] * 1000

    def forward(self, x):
        self.seen.extend(x.abs().amax(1).tolist())
        return super().forward(x / max(self.seen[-60:]))


@pytest.mark.parametrize("model", [Queue, History])
def test_large_memories_are_compared(model):
    with pytest.raises(dpscale.UnsupportedModel):
        go(model())


def centred(samples):
    x, y = default_collate(samples)
    return x - x.mean(0) * (len(x) > 1), y


def test_a_collate_function_that_mixes_is_refused_in_micro_batches_too():
    with pytest.raises(dpscale.UnsupportedModel, match="collate"):
        go(Net(), loader={"collate_fn": centred}, micro_batch=8)


class SwapsTheLast(Net):
    """Two rows change places inside, in larger batches only, and are put back at the end."""

    def forward(self, x):
        order = torch.arange(len(x))
        if len(x) > 5:
            order[-2:] = order[-2:].flip(0)
        return self.last(F.gelu(self.first(x))[order])[order] if len(x) <= 5 else self._swapped(x, order)

    def _swapped(self, x, order):
        return self.last(F.gelu(self.first(x[order])))[order]


def test_rows_that_change_places_anywhere_in_the_batch_are_credited_to_their_samples():
    model, batch = SwapsTheLast(), data()[:24]
    out = dpscale.scaled_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))
    torch.testing.assert_close(out.norms, reference_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))[1])


SCALE = {"largest": 1.0}


class ReadsItsFile(Net):
    def forward(self, x):
        out = super().forward(x / max(3.0, SCALE["largest"]))
        SCALE["largest"] = float(x.abs().max())
        return out


def test_what_a_forward_keeps_in_its_own_file_is_compared_and_put_back():
    before = dict(SCALE)
    with pytest.raises(dpscale.UnsupportedModel, match="largest"):
        go(ReadsItsFile())
    assert before == SCALE


class Draws(Net):
    """Noise from a generator of its own, which a look puts back."""

    def __init__(self):
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x):
        return super().forward(x + 0.01 * torch.randn(x.shape, generator=self.generator))


def test_a_generator_of_ones_own_is_put_back_and_no_reason_to_refuse():
    assert go(Draws(), steps=3).steps_taken == 3


@pytest.mark.parametrize("how", ["step", "backward"])
def test_taped_forwards_are_freed(how, monkeypatch):
    tapes = []
    made = Tape.__init__

    def noted(self, *args, **kwargs):
        made(self, *args, **kwargs)
        tapes.append(weakref.ref(self))

    monkeypatch.setattr(Tape, "__init__", noted)
    run = go(Net(), how, steps=12)
    gc.collect()
    assert run.steps_taken == 12 and len(tapes) >= 12
    assert sum(tape() is not None for tape in tapes) == 0


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_a_scripted_model_runs_sample_by_sample_and_is_refused_in_a_loop_of_ones_own():
    assert go(torch.jit.script(Net()), steps=2).steps_taken == 2
    with pytest.raises(dpscale.UnsupportedModel, match="it is scripted"):
        go(torch.jit.script(Net()), "backward")


class Sorts(Net):
    def forward(self, x):
        order = x.sum(1).argsort()
        return super().forward(x[order])[order.argsort()]


def test_a_sample_that_is_drawn_alone_is_summed_too():
    """A batch of one row, run sample by sample, was taken for a forward of somebody else's loop, and gave nothing."""
    model = Sorts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampling = dpscale.Poisson(size=SIZE, batch=2)
    run = dpscale.privatize(model, optimizer, plan(sampling=sampling, steps=20), seed=1)
    alone = 0
    for drawn in run.batches(data()):
        report = run.step(drawn, loss_fn)
        if drawn.draw.mask.any():
            expected = reference_sum(model, loss_fn, drawn.data, run.plan.scaling)[1]
            torch.testing.assert_close(report.norms, expected)
            alone += len(expected) == 1
    assert alone > 2
