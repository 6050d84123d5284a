"""What an attack from the public names alone got past an earlier engine, one test each; and what stays in memory."""

import contextlib
import gc
import random
import threading
import weakref
from contextvars import ContextVar
from decimal import Decimal
from enum import Enum
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset, default_collate

import dpscale
from dpscale.batches import Collated, mixing
from dpscale.engine import Engine
from dpscale.engine.reference import reference_sum
from dpscale.engine.tape.tape import Tape, UnknownOperation
from dpscale.engine.verify.state import Dice
from dpscale.noise import fast

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


# A third attack


class Tally:
    """A plain class, no module, that remembers in itself."""

    total = 0.0
    calls = 0


REGISTRY: dict = {}
WEAK = weakref.WeakKeyDictionary()
CURRENT: ContextVar = ContextVar("current", default=0.0)


def noted(x):
    noted.last = float(x.mean())
    return x


class Mode(Enum):
    TRAIN = 1


class Keeps(Net):
    """Leaves something of the samples behind, as ``how`` says."""

    def __init__(self):
        super().__init__()
        self.kept = {}

    def forward(self, x):
        self.how(x.detach())
        return super().forward(x)


def in_class(model, x):
    Tally.total += float(x.sum())


def in_function(model, x):
    noted(x)


def by_module(model, x):
    REGISTRY[model] = x.mean()


def by_weak_reference(model, x):
    WEAK[model] = x.mean()


def by_enum(model, x):
    model.kept[Mode.TRAIN] = float(x.mean())


def as_decimal(model, x):
    model.value = Decimal(float(x.sum()))


def as_numpy_number(model, x):
    model.value = np.float32(x.sum().item())


def as_numpy_text(model, x):
    model.value = np.array([str(float(x.sum()))])


def as_numpy_objects(model, x):
    model.value = np.array([float(x.sum()), None], dtype=object)


def as_sparse(model, x):
    model.value = x[:2].to_sparse()


def in_context(model, x):
    CURRENT.set(float(x.sum()))


@pytest.mark.parametrize(
    "how",
    [in_class, in_function, by_module, by_weak_reference, by_enum, as_decimal, as_numpy_number, as_numpy_text,
     as_numpy_objects, as_sparse, in_context],
)  # fmt: skip
def test_memories_in_unusual_places_are_compared_and_put_back(how):
    with pytest.raises(dpscale.UnsupportedModel, match="from what is in the samples"):
        go(type("Keeper", (Keeps,), {"how": how, "__module__": __name__})())
    assert Tally.total == CURRENT.get() == 0.0 and not REGISTRY and not WEAK and not hasattr(noted, "last")


def loss_with_a_total(model, batch):
    loss_with_a_total.total = getattr(loss_with_a_total, "total", 0.0) + float(batch[0].sum())
    return loss_fn(model, batch)


def test_what_the_loss_function_keeps_as_its_own_attribute_is_compared():
    with pytest.raises(dpscale.UnsupportedModel, match="total"):
        dpscale.scaled_sum(Net(), loss_with_a_total, data()[:24], dpscale.Clip(C=1.0))


class CountsInAClass(Net):
    def forward(self, x):
        Tally.calls += 1
        return super().forward(x)


def test_a_count_of_forwards_in_a_class_is_no_reason_to_refuse():
    before = Tally.calls
    assert go(CountsInAClass(), steps=4).steps_taken == 4
    assert before < Tally.calls <= before + 8  # and not those of the looks


class SometimesCentred(Net):
    def __init__(self, generator, draw):
        super().__init__()
        self.generator, self.draw = generator, draw

    def forward(self, x):
        return super().forward(x - x.mean(0) if self.draw(self.generator) < 0.2 else x)


GENERATORS = {
    "torch": (lambda: torch.Generator().manual_seed(6), lambda g: float(torch.rand((), generator=g))),
    "numpy": (lambda: np.random.default_rng(7), lambda g: g.random()),
    "python": (lambda: random.Random(3), lambda g: g.random()),
}


@pytest.mark.parametrize("kind", GENERATORS)
def test_mixing_by_the_draws_of_a_generator_of_ones_own_is_refused_at_once(kind):
    make, draw = GENERATORS[kind]
    assert draw(make()) >= 0.2  # not in the first forward
    with pytest.raises(dpscale.UnsupportedModel, match="coupled"):
        dpscale.scaled_sum(SometimesCentred(make(), draw), loss_fn, data()[:24], dpscale.Clip(C=1.0))


class Secretive(Net):
    def forward(self, x):
        return super().forward(x + 0.0 * SECRET.random())


SECRET = random.SystemRandom()


def test_randomness_of_the_operating_system_has_no_state_to_put_back():
    assert go(Secretive(), steps=3).steps_taken == 3


class CentresSomeSizes(Net):
    def forward(self, x):
        return super().forward(x - x.mean(0) if len(x) % 8 == 0 else x)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_mixing_in_batches_of_certain_sizes_is_refused_when_the_first_comes(how):
    model = CentresSomeSizes()
    sizes, optimizer = [], torch.optim.SGD(model.parameters(), lr=0.01)
    run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=20), steps=200), seed=2)
    with pytest.raises(dpscale.UnsupportedModel):
        for drawn in run.batches(data()):
            sizes.append(len(drawn.draw.indices))
            if how == "step":
                run.step(drawn, loss_fn)
            else:
                run.backward(loss_fn(model, drawn))
                optimizer.step()
                optimizer.zero_grad()
    assert [size % 8 for size in sizes].index(0) == len(sizes) - 1 > 4


def test_hooks_on_parameters_are_called_sample_by_sample():
    """They were left out: what a mask keeps frozen was trained."""
    model, batch = Net(), data()[:24]
    mask = (torch.arange(8) < 4).unsqueeze(1)
    model.first.weight.register_hook(lambda g: g * mask)
    out = dpscale.scaled_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))
    assert out.grads["first.weight"][:4].any() and not out.grads["first.weight"][4:].any()
    parameters = list(model.parameters())
    for x, y, norm in zip(*batch, out.norms, strict=True):
        own = torch.autograd.grad(F.cross_entropy(model(x.unsqueeze(0)), y.unsqueeze(0)), parameters)
        torch.testing.assert_close(norm, torch.cat([g.flatten() for g in own]).norm())


def test_two_threads_never_add_the_same_noise(monkeypatch):
    """Noise is drawn into one place: another thread that drew before it was added would have it added twice."""
    model = Net()
    sampling = dpscale.Poisson(size=SIZE, batch=12)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = dpscale.privatize(model, optimizer, plan(sampling=sampling, steps=8), seed=1)
    batches = run.batches(data())
    run.step(next(batches), loss_fn)
    both, drawn, made = threading.Barrier(2), [], fast._standard_normal

    def slow(*args):
        draw = made(*args)

        def drawing(numbers):
            draw(numbers)
            with contextlib.suppress(threading.BrokenBarrierError):
                both.wait(0.5)
            drawn.append(numbers.clone())

        return drawing

    monkeypatch.setattr(fast, "_standard_normal", slow)
    threads = [threading.Thread(target=run.step, args=(batch, loss_fn)) for batch in (next(batches), next(batches))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert run.steps_taken == 3 and len(drawn) == 2 and not torch.equal(*drawn)


@pytest.mark.parametrize("part", ["model", "first"])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_compiled_parts_run_as_they_are_written(how, part):
    trained = []
    for compiled in (False, True):
        model = Net()
        if compiled and part == "first":
            model.first = torch.compile(model.first, backend="eager")
        elif compiled:
            model = torch.compile(model, backend="eager")
        go(model, how, steps=3)
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*trained)


class Tokens(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.out = nn.Embedding(20, 5, sparse=sparse), nn.Linear(5, 2)

    def forward(self, ids):
        return self.out(self.table(ids).mean(1))


@pytest.mark.parametrize("how", ["step", "backward"])
def test_sparse_gradients_of_an_embedding_are_summed_as_dense_ones(how):
    ids = TensorDataset(torch.randint(0, 20, (SIZE, 7), generator=seeded(1)), data().tensors[1])
    trained = []
    for sparse in (False, True):
        model = Tokens(sparse)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=12)), seed=1)
        for drawn in run.batches(ids):
            if how == "step":
                run.step(drawn, loss_fn)
            else:
                run.backward(loss_fn(model, drawn))
                optimizer.step()
                optimizer.zero_grad()
        trained.append(model.table.weight.detach())
    torch.testing.assert_close(*trained)


class WritesItsInput(Net):
    def forward(self, x):
        x.div_(2.0)
        return super().forward(x)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_forward_that_writes_into_its_batch_gets_it_as_it_was_drawn(how):
    def halved(model, batch):
        return F.cross_entropy(model(batch[0] / 2), batch[1], reduction="none")

    trained = []
    for model, loss in ((WritesItsInput(), loss_fn), (Net(), halved)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=24)), seed=1)
        for drawn in run.batches(data()):
            if how == "step":
                run.step(drawn, loss)
            else:
                run.backward(loss(model, drawn))
                optimizer.step()
                optimizer.zero_grad()
        trained.append(model.first.weight.detach())
    torch.testing.assert_close(*trained)


class Held:
    __slots__ = ("logits",)

    def __init__(self, logits):
        self.logits = logits


HIDDEN_OUTPUTS = {
    "masked": (lambda o: F.pad(o, (0, 1), value=-torch.inf), lambda r: r),
    "beside a huge one": (lambda o: (o, o[:, 0] * 0 + 1e9), lambda r: r[0] + 0 * r[1].unsqueeze(1)),
    "in slots": (Held, lambda r: r.logits),
    "five deep": (lambda o: [[[[[o]]]]], lambda r: r[0][0][0][0][0]),
    "time first": (lambda o: (torch.stack([o, o]), o[:, 0] * 0), lambda r: r[0].sum(0)),
    "flat": (lambda o: (o.flatten(), o[:, 0] * 0), lambda r: r[0].view(-1, 2)),
}


@pytest.mark.parametrize("couples", [True, False])
@pytest.mark.parametrize("name", HIDDEN_OUTPUTS)
def test_outputs_in_a_loop_of_ones_own_hide_nothing(name, couples):
    hide, found = HIDDEN_OUTPUTS[name]

    class Hides(Net):
        def forward(self, x):
            o = super().forward(x)
            return hide(o * (2 + x.mean()) if couples else o)

    def losses(model, batch):
        return F.cross_entropy(found(model(batch[0])), batch[1], reduction="none")

    model = Hides()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=24), steps=5), seed=1)
    refused = couples or name in ("time first", "flat")
    with pytest.raises(dpscale.UnsupportedModel) if refused else contextlib.nullcontext():
        for drawn in run.batches(data()):
            run.backward(losses(model, drawn))
            optimizer.step()
            optimizer.zero_grad()
    assert run.steps_taken == (0 if refused else 5)


def test_a_point_where_samples_meet_is_looked_at():
    """At the model as it is, zeros hide it, and they do at no other point."""

    class Gated(Net):
        def __init__(self):
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))
            nn.init.zeros_(self.last.weight)

        def forward(self, x):
            h = F.gelu(self.first(x))
            return self.last(h * (1 + self.gate * h.mean()))

    model, (x, y) = Gated(), data().tensors
    here = dpscale.scaled_sum(model, lambda m, b: loss_fn(m, b) * 1.0, (x[:1], y[:1]), dpscale.Clip(C=1.0))
    assert here.norms.isfinite().all()
    there = {n: p.detach() + 0.3 * torch.rand_like(p) for n, p in model.named_parameters()}
    with pytest.raises(dpscale.UnsupportedModel):
        dpscale.scaled_sum(model, loss_fn, (x, y), dpscale.Clip(C=1.0), points=[(1.0, there)])


def test_zeros_that_open_between_two_powers_of_two_are_looked_behind():
    """A rate of zero at first, as in a warm-up: nothing moves until the third step."""

    class Twice(Net):
        def __init__(self):
            super().__init__()
            self.mid = nn.Linear(8, 8)
            for layer in (self.mid, self.last):
                nn.init.zeros_(layer.weight)
                nn.init.zeros_(layer.bias)

        def forward(self, x):
            h = F.gelu(self.first(x))
            return self.last(h.detach() * 0.01 + self.mid(h - h.mean(0)))

    model = Twice()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=24), steps=12), seed=1)
    released = []
    with pytest.raises(dpscale.UnsupportedModel):
        for number, drawn in enumerate(run.batches(data())):
            optimizer.param_groups[0]["lr"] = 0.5 if number >= 8 else 0.0
            run.step(drawn, loss_fn)
            released.append(number)
    assert max(released) <= 8


# A sixth attack


class SeedsItself(Net):
    """Starts torch's generator from all rows: before it draws, or for whoever draws next."""

    def __init__(self, first, drops, constant=False):
        super().__init__()
        self.before, self.drops, self.constant = first, drops, constant

    def forward(self, x):
        if self.before:
            self.seed(x)
        x = F.dropout(x, 0.5) if self.drops else x + 3 * torch.randn_like(x)
        if not self.before:
            self.seed(x)
        return super().forward(x)

    def seed(self, x):
        torch.manual_seed(5 if self.constant else int(1000 * x.abs().sum()))


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize(("first", "drops"), [(True, False), (False, False), (False, True)])
def test_a_generator_that_is_started_from_the_samples_is_refused(how, first, drops):
    """One sample that was exchanged moved a release by 7 bounds, also of draws that it was not in."""
    with pytest.raises(dpscale.UnsupportedModel, match="seeds torch's generator"):
        go(SeedsItself(first, drops), how)
    assert go(SeedsItself(first, drops, constant=True), how, steps=2).steps_taken == 2


def mixed(samples):
    x, y = default_collate(samples)
    share = np.random.beta(1, 1)
    return share * x + (1 - share) * x.roll(1, 0), y


def permuted(samples):
    x, y = default_collate(samples)
    return x + torch.rand(()) * x[torch.randperm(len(x))], y


def centred_noisily(samples):
    x, y = default_collate(samples)
    return x - x.mean(0) + 0.01 * torch.randn_like(x), y


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("collate", [mixed, permuted, centred_noisily])
def test_a_collate_function_that_draws_and_mixes_is_refused(collate, how):
    with pytest.raises(dpscale.UnsupportedModel, match="collate_fn draws random numbers and mixes"):
        go(Net(), how, loader={"collate_fn": collate})


def words_masked(samples):
    x, y = default_collate(samples)
    return x * (torch.rand(x.shape) > 0.2), y


def masked_in_another_order(samples):
    return words_masked(sorted(samples, key=lambda sample: float(sample[0].sum())))


def one_by_one(samples):
    x, y = default_collate([(x + random.random(), y) for x, y in samples])
    return x, y


@pytest.mark.parametrize("collate", [words_masked, masked_in_another_order, one_by_one])
def test_a_collate_function_that_draws_for_each_sample_is_taken(collate):
    assert go(Net(), steps=4, loader={"collate_fn": collate}).steps_taken == 4


def test_words_masked_in_rows_padded_to_the_longest_are_kept_apart():
    def masked(rows):
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return ids * (torch.rand(ids.shape) > 0.2)

    for seed in range(20):
        g = seeded(seed)
        rows = [[torch.randint(1, 50, (length,), generator=g)] for length in (9, 3, 8, 5, 2)]
        assert mixing(masked, Dice(masked), rows[0], rows[1:]) is None


def test_a_look_at_a_collate_function_that_draws_draws_nothing_itself():
    rows = [data()[i] for i in range(6)]
    torch.manual_seed(0)
    expected = words_masked(rows)[0]
    torch.manual_seed(0)
    assert mixing(words_masked, Dice(words_masked), [rows[0]], [[row] for row in rows[1:]]) is None
    torch.testing.assert_close(words_masked(rows)[0], expected)


@pytest.mark.parametrize("couples", [True, False])
@pytest.mark.parametrize("dtype", [torch.int64, torch.bool])
def test_counts_and_flags_among_the_outputs_in_a_loop_of_ones_own_are_looked_at(dtype, couples):
    class Counts(Net):
        def forward(self, x):
            level = x[:, 0].mean() if couples else 0.0
            return super().forward(x), (x[:, 0] > level).to(dtype)

    def losses(model, batch):
        logits, counts = model(batch[0])
        return F.cross_entropy(logits, batch[1], reduction="none") * (1 + counts)

    model = Counts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run = dpscale.privatize(model, optimizer, plan(sampling=dpscale.Poisson(size=SIZE, batch=24), steps=2), seed=1)
    with pytest.raises(dpscale.UnsupportedModel) if couples else contextlib.nullcontext():
        for drawn in run.batches(data()):
            run.backward(losses(model, drawn))
            optimizer.step()
            optimizer.zero_grad()


# A seventh attack


def half_mixed(samples):
    x, y = default_collate(samples)
    half = len(x) // 2
    return torch.cat([x[:half], x[half:] + np.random.beta(1, 1) * x[:half].sum(0)]), y


def in_pairs(samples):
    """Draws nothing for one sample."""
    x, y = default_collate(samples)
    return 0.5 * x + 0.5 * x[torch.randperm(len(x))], y


class Mixup:
    """Draws from a generator of its own, beside torch's."""

    def __init__(self, mixes=True, noise=True):
        self.random, self.mixes, self.noise = np.random.default_rng(0), mixes, noise

    def __call__(self, samples):
        x, y = default_collate(samples)
        if self.noise:
            x = x + 0.01 * torch.randn_like(x)
        share = torch.tensor(self.random.beta(1, 1, (len(x), 1)), dtype=x.dtype)
        return (x + share * x.sum(0) if self.mixes else x * share), y

    def method(self, samples):
        return self(samples)


def in_a_closure(mixes, own=Mixup):
    made = own(mixes)
    return lambda samples: made(samples)


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize(
    "collate", [half_mixed, in_pairs, Mixup(), Mixup().method, in_a_closure(True), partial(Mixup().__call__)]
)
def test_whatever_a_collate_function_draws_it_may_not_mix(collate, how):
    """One exchanged sample moved releases by 3 to 48 bounds."""
    with pytest.raises(dpscale.UnsupportedModel, match="collate_fn draws random numbers and mixes"):
        go(Net(), how, loader={"collate_fn": collate})


def lengths_of_words(samples):
    """Takes as many numbers as a sample has positive entries."""
    return default_collate([(x + (torch.rand(int((x > 0).sum())).sum() > 2), y) for x, y in samples])


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize(
    "collate", [Mixup(False), Mixup(False, noise=False), Mixup(False).method, in_a_closure(False), lengths_of_words]
)
def test_a_collate_function_may_draw_from_a_generator_of_its_own(collate, how):
    assert go(Net(), how, steps=4, loader={"collate_fn": collate}).steps_taken == 4


def test_a_collate_function_goes_on_drawing_where_it_was():
    collate, by_hand, rows = (
        Collated(Mixup(False, noise=False)),
        Mixup(False, noise=False),
        [data()[i] for i in range(6)],
    )
    for _ in range(3):
        by_hand(rows[:1])  # as it is looked at alone
        torch.testing.assert_close(collate(rows)[1][0], by_hand(rows)[0], rtol=0, atol=0)


def test_a_collate_function_that_draws_from_what_nobody_sees_is_refused():
    def fresh(samples):
        x, y = default_collate(samples)
        return x * torch.rand(x.shape) * torch.tensor(np.random.default_rng().random(x.shape), dtype=x.dtype), y

    with pytest.raises(dpscale.UnsupportedModel, match="from a generator that cannot be put back"):
        go(Net(), loader={"collate_fn": fresh})


class HasAGenerator(Net):
    """Draws from a generator of its own, which it may then start anew."""

    def __init__(self, start=None):
        super().__init__()
        self.random, self.start = torch.Generator().manual_seed(3), start

    def forward(self, x):
        out = super().forward(x + 3 * torch.randn(x.shape, generator=self.random))
        if self.start is not None:
            self.random.manual_seed(self.start(x))
        return out


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_generator_of_ones_own_that_is_started_from_the_samples_is_refused(how):
    """One sample that was exchanged moved releases by 12 bounds."""
    with pytest.raises(dpscale.UnsupportedModel, match="sets 'random' from what is in the samples"):
        go(HasAGenerator(lambda x: int(1000 * x.abs().sum())), how)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_generator_of_ones_own_may_be_drawn_from(how):
    assert go(HasAGenerator(), how, steps=4).steps_taken == 4


class Biased(nn.Module):
    """Attention with a learned bias, as T5 has it."""

    def __init__(self, **options):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.last, self.options = nn.Linear(1, 24), nn.Linear(8, 2), options
        self.bias = nn.Parameter(torch.zeros(1, 2, 6, 6))

    def forward(self, x):
        q, k, v = self.into(x[..., None]).view(len(x), 6, 3, 2, 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=self.bias, **self.options)
        return self.last(out.transpose(1, 2).flatten(2).mean(1))


@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 0.0}])
def test_attention_without_dropout_is_followed_however_that_is_said(how, options):
    found = go(Biased(**options), how, steps=6)._engine.checks()
    assert found["runs sample by sample"] == "no" and found["times that the model was checked"] <= 5


def test_operations_that_change_from_run_to_run_are_said(caplog, monkeypatch):
    def unknown(*_):
        raise UnknownOperation

    monkeypatch.setattr(Engine, "_weighed", unknown)
    model = Net()
    engine, batch = Engine(model), data()[:24]
    for _ in range(2):
        out = engine.scaled_sum(loss_fn, batch, dpscale.Clip(C=1.0))
    torch.testing.assert_close(out.norms, reference_sum(model, loss_fn, batch, dpscale.Clip(C=1.0))[1])
    assert engine.checks()["runs sample by sample"] == "yes"
    assert caplog.text.count("a batch runs sample by sample") == 1


class CentredByLarge(Net):
    def forward(self, x):
        return super().forward(x - 10 * x[:, :1].mean(0) * (x.abs().max() > 50))


@pytest.mark.parametrize("seed", [2, 6, 8, 9])
@pytest.mark.parametrize("how", ["map", "own loop"])
def test_rows_unlike_any_before_are_told_by_what_the_model_is_given(how, seed):
    """Draws of numbers, by which the samples are looked up: an odd one moved releases by 15 bounds."""
    x, y = torch.randn(200, 6, generator=seeded(seed)), torch.zeros(200, dtype=torch.long)
    x[5, 0] = 300.0
    model = CentredByLarge()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sampling = dpscale.Poisson(size=200, batch=16)
    run = dpscale.privatize(model, optimizer, plan(sampling=sampling, steps=60), seed=seed)
    drawn = []
    with pytest.raises(dpscale.UnsupportedModel):
        for batch in run.batches(TensorDataset(torch.arange(200))):
            drawn.append(5 in batch.draw.indices)
            if how == "map":
                run.step(batch.map(lambda data: (x[data[0]], y[data[0]])), loss_fn)
            else:
                (chosen,) = batch
                run.backward(loss_fn(model, (x[chosen], y[chosen])))
                optimizer.step()
                optimizer.zero_grad()
    assert drawn.index(True) == len(drawn) - 1  # at its first draw, before that is released


class Pooled(nn.Module):
    """The mean over words, the padding too or not, before a head of zeros: every loss is log 2."""

    def __init__(self, masks):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.masks = nn.Linear(6, 16), nn.Linear(16, 2, bias=False), masks
        nn.init.zeros_(self.last.weight)

    def forward(self, x):
        h = torch.tanh(self.first(x))
        mask = (x != 0).any(2, keepdim=True) if self.masks else torch.ones_like(x[..., :1])
        return self.last((h * mask).sum(1) / mask.sum(1))


def words():
    g = seeded(1)
    lengths = [400 if i == 7 else 2 + i % 4 for i in range(SIZE)]
    return [(torch.randn(length, 6, generator=g) + 2, torch.tensor(0)) for length in lengths]


def as_long_as_the_longest(samples):
    x = nn.utils.rnn.pad_sequence([x for x, _ in samples], batch_first=True)
    return x, torch.stack([y for _, y in samples])


def longest_first(samples):
    return as_long_as_the_longest(sorted(samples, key=lambda sample: -len(sample[0])))


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("micro_batch", [None, 7])
@pytest.mark.parametrize("collate", [as_long_as_the_longest, longest_first])
def test_padding_that_a_head_of_zeros_hides_is_refused(collate, micro_batch, masks):
    """One long sample moved releases by 27 bounds through the padding of others."""
    model = Pooled(masks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    planned = plan(sampling=dpscale.Poisson(size=SIZE, batch=24), steps=5)
    run = dpscale.privatize(model, optimizer, planned, seed=1, micro_batch=micro_batch)
    with contextlib.nullcontext() if masks else pytest.raises(dpscale.UnsupportedModel, match="alone has a gr"):
        for batch in run.batches(words(), collate_fn=collate):
            run.step(batch, loss_fn)
    assert run.steps_taken == 5 * masks and run._engine._obstacles == {}


class NormedWithin(nn.Module):
    """Rows of zeros have a finite loss, and a gradient that is not. Among more than four, others enter a gradient."""

    def __init__(self, mixes):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.mixes = nn.Linear(6, 8, bias=False), nn.Linear(8, 2), mixes

    def forward(self, x):
        h = self.first(x)
        h = h / (h.var(1, keepdim=True).sqrt() + 0.1)
        out = self.last(h)
        if self.mixes and len(x) > 4:
            through = self.last((h + 3 * x[:, :1].mean(0)).detach())
            out = out + (through - through.detach())
        return out + 0.1 * torch.randn_like(out)


@pytest.mark.parametrize("seed", [2, 4, 5])
@pytest.mark.parametrize("mixes", [True, False])
def test_rows_without_a_gradient_hide_none_of_others_where_a_model_draws(mixes, seed):
    """One exchanged sample moved releases by 25 bounds."""
    g = seeded(seed)
    x = torch.randn(SIZE, 6, generator=g)
    x[torch.rand(SIZE, generator=g) < 0.6] = 0
    model = NormedWithin(mixes)
    run = dpscale.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.0),
        plan(sampling=dpscale.Poisson(size=SIZE, batch=40), steps=9), seed=seed,
    )  # fmt: skip
    with pytest.raises(dpscale.UnsupportedModel) if mixes else contextlib.nullcontext():
        for batch in run.batches(TensorDataset(x, torch.zeros(SIZE, dtype=torch.long))):
            run.step(batch, loss_fn)
    assert run.steps_taken == (0 if mixes else 9)
