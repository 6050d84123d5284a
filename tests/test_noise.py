"""The noise: its size through the whole private step, its sources, and that it comes once.

The statistical tests sum the squares of n = 200,000 noise entries divided by the claimed variance, a chi-square
variable of n degrees of freedom. The claimed scale is accepted unless that sum lies outside its central 1 - 1e-6
interval: one false failure in a million runs (and the seeds are fixed, so it is the same run every time). A scale 3%
off moves the sum by 6%, 18 standard deviations: it is rejected but for odds far below 1e-6.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.noise import Key, Noise, SecureNoise, fast

SOURCES = {"fast": Noise, "secure": SecureNoise}
every_source = pytest.mark.parametrize("source", SOURCES)
FALSE_FAILURE = 1e-6
WIDTH = 200_000


def accepts(noise, std):
    """Whether independent entries ``noise`` are N(0, std²), by their sum of squares, their mean and their shape."""
    noise = noise.double().flatten().numpy() / std
    n, level = len(noise), FALSE_FAILURE / 3
    low, high = stats.chi2.ppf([level / 2, 1 - level / 2], n)
    spread = low <= (noise**2).sum() <= high
    centre = abs(noise.mean()) <= stats.norm.ppf(1 - level / 2) / np.sqrt(n)
    shape = stats.kstest(noise[:20_000], "norm").pvalue > level
    return spread and centre and shape


class Wide(nn.Module):
    """A parameter of many entries whose gradient is known: 0, because the loss does not move with it."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x[:, 0] * 0 * self.w[0]


def released(micro_batch, sampling, how, steps=1, source="fast"):
    """The private gradients of a whole run, times the expected batch: the noisy sums."""
    torch.manual_seed(0)
    model = Wide()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    rule = dpscale.PSASC(C=0.3, s=0.5, r=0.01)
    plan = dpscale.Plan(scaling=rule, sampling=sampling, steps=steps, noise_multiplier=1.3)
    private = dpscale.privatize(model, optimizer, plan, seed=5, micro_batch=micro_batch, noise=source)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w.grad * sampling.batch))
    for (x,) in private.batches(TensorDataset(torch.ones(40, 1))):
        if how == "step":
            private.step((x,), lambda m, b: m(b[0]))
        else:
            private.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
    return seen, plan.noise_std


@every_source
@pytest.mark.parametrize("how", ["step", "backward"])
@pytest.mark.parametrize("micro_batch", [None, 3], ids=["one-batch", "micro-batches"])
@pytest.mark.parametrize(
    "sampling", [dpscale.Poisson(size=40, batch=10), dpscale.FullBatch(size=40)], ids=lambda s: type(s).__name__
)
def test_noise_on_the_sum_is_sigma_times_bound(how, micro_batch, sampling, source):
    (noise,), std = released(micro_batch, sampling, how, source=source)
    assert std == pytest.approx(1.3 * 0.3 / 0.5)
    assert accepts(noise, std)
    assert not accepts(noise, 0.97 * std)
    assert not accepts(noise, 1.03 * std)


@every_source
def test_noise_is_fresh_at_every_step(source):
    noises, std = released(None, dpscale.Poisson(size=40, batch=10), "step", steps=3, source=source)
    assert len(noises) == 3
    for a in range(3):
        assert accepts(noises[a], std)
        for b in range(a):
            correlation = torch.corrcoef(torch.stack([noises[a], noises[b]]))[0, 1]
            assert abs(correlation) < 6 / np.sqrt(WIDTH)


@every_source
def test_an_empty_batch_is_noise_alone(source):
    sums = {"w": torch.zeros(WIDTH)}
    SOURCES[source](Key(1)).add(sums, 2.0, 1)
    assert accepts(sums["w"], 2.0)


@every_source
def test_noise_is_independent_between_parameters(source):
    noisy = {"a": torch.zeros(WIDTH), "b": torch.zeros(WIDTH)}
    SOURCES[source](Key(1)).add(noisy, 1.0, 1)
    assert abs(torch.corrcoef(torch.stack([noisy["a"], noisy["b"]]))[0, 1]) < 6 / np.sqrt(WIDTH)


@every_source
def test_shards_have_noise_of_their_own(source):
    noises = []
    for shard in (None, 0, 1, 10):
        SOURCES[source](Key(1)).add(sums := {"w": torch.zeros(WIDTH)}, 1.0, 1, shard)
        noises.append(sums["w"])
    correlations = torch.corrcoef(torch.stack(noises)) - torch.eye(4)
    assert correlations.abs().max() < 6 / np.sqrt(WIDTH)


def test_noise_does_not_depend_on_the_number_of_a_device(monkeypatch):
    """Ranks hold the same model on devices of other numbers; two devices of one rank have noise of their own."""
    labels = []
    monkeypatch.setattr("dpscale.noise.fast._standard_normal", lambda key, label, device: labels.append(label))
    monkeypatch.setattr("dpscale.noise.fast._chunks", lambda tensors: [])
    monkeypatch.setattr("dpscale.noise.fast._Room", lambda device: None)
    on = [SimpleNamespace(device=torch.device("cuda", k), is_complex=lambda: False, shape=()) for k in (3, 5, 3)]
    Noise(Key(1)).add(dict(enumerate(on)), 1.0, 4)
    assert labels == ["noise/4/cuda", "noise/4/cuda:1"]


@every_source
@pytest.mark.parametrize("chunk", [10, 1 << 24])
def test_what_is_left_of_the_last_step_does_not_change_the_next(monkeypatch, chunk, source):
    """The room for noise is kept between steps, and so are its views; sums of other shapes may come."""
    monkeypatch.setattr(f"{SOURCES[source].__module__}.CHUNK", chunk)
    small, shaped, large = {"a": (8,), "b": (4, 2)}, {"a": (2, 4), "b": (4, 2)}, {"a": (30, 2), "b": (4, 2)}
    kept = SOURCES[source](Key(1))
    for step, sizes in enumerate([small, small, shaped, large, small, {"a": (7,)}], start=1):
        # Transposed, a tensor is not cut into pieces, and the room must grow.
        sums, fresh = ({n: torch.zeros(shape[::-1]).t() for n, shape in sizes.items()} for _ in range(2))
        kept.add(sums, 2.0, step)
        SOURCES[source](Key(1)).add(fresh, 2.0, step)
        assert all(torch.equal(sums[n], t) and t.abs().min() > 0 for n, t in fresh.items())


@every_source
@pytest.mark.parametrize("chunk", [10, 1 << 24])
def test_noise_that_is_drawn_ahead_is_that_of_its_step_and_is_added_once(monkeypatch, chunk, source):
    monkeypatch.setattr(f"{SOURCES[source].__module__}.CHUNK", chunk)

    def sums(width=30):
        return {"a": torch.zeros(width, 2), "b": torch.zeros(4, 2)}

    kept = SOURCES[source](Key(1))

    def added(step, shard=None, width=30):
        kept.add(found := sums(width), 2.0, step, shard)
        SOURCES[source](Key(1)).add(fresh := sums(width), 2.0, step, shard)
        assert all(torch.equal(found[n], t) and t.abs().min() > 0 for n, t in fresh.items())

    for prepared, step, *others in [(1, 1), (2, 3), (4, 4, 0), (5, 5, None, 7), (6, 6), (6, 6)]:
        kept.prepare(sums(), 2.0, prepared)
        kept.prepare(sums(), 2.0, prepared)  # for another part of the batch
        added(step, *others)
    added(6)  # nothing is there any more
    kept.prepare(sums(), 2.0, 7)
    monkeypatch.setattr("dpscale.noise.key.os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="was forked"):
        kept.add(sums(), 2.0, 7)


def test_noise_drawn_ahead_is_not_drawn_again(monkeypatch):
    kept, drawn, made = Noise(Key(1)), [], fast._standard_normal

    def counted(*args):
        draw = made(*args)
        return lambda numbers: (draw(numbers), drawn.append(args[1]))

    monkeypatch.setattr(fast, "_standard_normal", counted)
    for step in (1, 2):
        kept.prepare({"w": torch.zeros(9)}, 1.0, step)
        assert len(drawn) == step
        kept.add({"w": torch.zeros(9)}, 1.0, step)
    assert drawn == ["noise/1/cpu", "noise/2/cpu"]


@every_source
@pytest.mark.parametrize("chunk", [1, 7, 50, 64, 1000])
def test_noise_does_not_depend_on_the_chunks_it_is_drawn_in(monkeypatch, chunk, source):
    """Every entry gets its own number of the stream, once, whether tensors are cut into pieces or share a chunk."""

    def noise():
        tensors = {"a": torch.zeros(60), "b": torch.zeros(5, 3).t(), "c": torch.zeros(()), "d": torch.zeros(8, 9)}
        SOURCES[source](Key(1)).add(tensors, 2.0, 1)
        return tensors

    whole = noise()
    monkeypatch.setattr(f"{SOURCES[source].__module__}.CHUNK", chunk)
    parts = noise()
    assert all(torch.equal(parts[name], t) for name, t in whole.items())
    assert len(torch.cat([t.flatten() for t in whole.values()]).unique()) == 60 + 15 + 1 + 72


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_drawn_in_float32(dtype):
    """Trap 8: noise in bfloat16 has 8 bits; these entries need more than 16 to write down."""
    noise = torch.zeros(1000, dtype=dtype)
    Noise(Key(1)).add({"w": noise}, 1.0, 1)
    assert (noise != noise.bfloat16().to(dtype)).float().mean() > 0.9
    assert torch.equal(noise, noise.float().to(dtype))


def test_a_bfloat16_model_gets_float32_noise_before_rounding():
    (noise,), _ = released(None, dpscale.Poisson(size=40, batch=10), "step")
    assert noise.dtype == torch.float32
    torch.manual_seed(0)
    model = Wide().bfloat16()
    plan = dpscale.Plan(
        scaling=dpscale.PSASC(C=0.3, s=0.5, r=0.01),
        sampling=dpscale.Poisson(size=40, batch=10),
        steps=1,
        noise_multiplier=1.3,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    private = dpscale.privatize(model, optimizer, plan, seed=5)
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(model.w.grad))
    for batch in private.batches(TensorDataset(torch.ones(40, 1).bfloat16())):
        private.step(batch, lambda m, b: m(b[0]))
    assert seen[0].dtype == torch.bfloat16
    assert torch.equal(seen[0], (noise / 10).bfloat16())  # rounding is after the noise, so it is post-processing


def test_default_key_is_256_bits_of_the_operating_system(monkeypatch):
    asked = []
    urandom = __import__("os").urandom
    monkeypatch.setattr("dpscale.noise.key.os.urandom", lambda n: asked.append(n) or urandom(n))
    a, b = Key(), Key()
    assert asked == [32, 32]
    assert a.derive("x") != b.derive("x")
    assert max(Key().derive("x") for _ in range(50)).bit_length() > 250


def test_a_seed_reproduces_and_separates():
    def draw(seed, label):
        return Key(seed).generator(label).standard_normal(4).tolist()

    assert draw(1, "noise/1") == draw(1, "noise/1")
    assert len({tuple(draw(s, label)) for s in (1, 2) for label in ("noise/1", "noise/2", "sampling")}) == 6


def test_a_forked_process_draws_no_noise(monkeypatch):
    """It would be the noise of its parent, on other gradients."""
    key = Key()
    assert key.derive("a") == key.derive("a") != key.derive("b")
    monkeypatch.setattr("dpscale.noise.key.os.getpid", lambda: -1)
    with pytest.raises(RuntimeError, match="was forked from the one in which the private run was made"):
        key.derive("a")


def test_seeds_that_agree_in_32_bits_differ():
    """A 32-bit generator state would make these the same run."""
    assert Key(5).generator("a").standard_normal() != Key(5 + 2**32).generator("a").standard_normal()


def test_bad_seed_is_named():
    with pytest.raises(ValueError, match=r"'seed' parameter of Key must be an integer.*Got 1.5"):
        Key(1.5)


@every_source
def test_both_parts_of_complex_sums_get_noise_of_their_own(source):
    sums = {"a": torch.zeros(WIDTH, dtype=torch.complex64), "b": torch.zeros(WIDTH, dtype=torch.complex128)}
    SOURCES[source](Key(0)).add(sums, 2.0, 1)
    parts = [part for t in sums.values() for part in (t.real, t.imag)]
    assert all(accepts(part, 2.0) for part in parts)
    assert torch.corrcoef(torch.stack([p.double() for p in parts])).fill_diagonal_(0).abs().max() < 0.02
