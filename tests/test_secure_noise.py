"""Cryptographic noise: the cipher against published vectors, the Gaussian against what is claimed of it, and that no
number of a stream is used twice. What it has in common with the fast source is in `test_noise`.

Tails: of n = 4·10⁶ numbers, those beyond t are binomial; the counts are accepted within the central 1 - 1e-6 interval,
and a scale 3% off is rejected.
"""

import importlib.util
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.chances import Fast, Secret, Secure
from dpscale.integrations.accelerate import prepare
from dpscale.integrations.sklearn import PrivateClassifier
from dpscale.noise import Key, Noise, SecureNoise, chacha, gaussian, secure
from tests import lightning_runs, secure_kernel, trainers
from tests.ranks import interpreted
from tests.test_resume import MOMENTUM

# -- The cipher ------------------------------------------------------------------------------------------------------

VECTORS = {  # RFC 8439, A.1, numbers 1 to 4: (key, block, keystream)
    1: (bytes(32), 0,
        "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
        "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"),
    2: (bytes(32), 1,
        "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
        "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"),
    3: (bytes(31) + b"\x01", 1,
        "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
        "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"),
    4: (b"\x00\xff" + bytes(30), 2,
        "72d54dfbf12ec44b362692df94137f328fea8da73990265ec1bbbea1ae9af0ca"
        "13b25aa26cb4a648cb9b9d1be65b2c0924a66c54d545ec1b7374f4872e99f096"),
}  # fmt: skip


@pytest.mark.parametrize("number", VECTORS)
def test_the_stream_is_that_of_the_published_vectors(number):
    key, block, keystream = VECTORS[number]
    assert chacha.words(key, block, 1).astype("<u4").tobytes().hex() == keystream


def test_the_definition_is_that_of_the_published_vector_with_a_nonce():
    """RFC 8439, 2.3.2; what the kernel is compared with."""
    found = secure_kernel.block_function(bytes(range(32)), [1], bytes.fromhex("000000090000004a00000000"))
    expected = """e4e7f110 15593bd1 1fdd0f50 c47120a3 c7f4d1c7 0368c033 9aaa2204 4e6cd4c3
                  466482d2 09aa9f07 05d7c214 a2028bd9 d19c12b5 b94e16de e883d0cb 4e3c50a2"""
    assert [f"{word:08x}" for word in found[0]] == expected.split()


@pytest.mark.parametrize("first", [0, 3, 2**32 - 2, 2**32, 5 * 2**32 - 1, 2**63])
def test_the_stream_counts_on_where_the_cipher_s_counter_ends(first):
    key = bytes(range(32))
    assert np.array_equal(chacha.words(key, first, 5), secure_kernel.stream(key, first, 5))


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")


@on_cuda
def test_the_kernel_has_the_integers_and_the_numbers_of_the_definition():
    secure_kernel.compare("cuda")


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="no Triton")
def test_the_kernel_interpreted_has_them_too():
    source = Path(secure.__file__).parents[2]
    path = os.pathsep.join([str(source), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path}
    subprocess.run([sys.executable, secure_kernel.__file__, "cpu"], check=True, env=environment)


@on_cuda
def test_noise_is_the_same_on_every_device():
    pytest.importorskip("cryptography")
    shapes = [(70_000,), (3, 5), (7,), (300, 301)]
    sums = [{str(k): torch.ones(shape, device=d) for k, shape in enumerate(shapes)} for d in ("cpu", "cuda")]
    for each in sums:
        SecureNoise(Key(3)).add(each, 0.7, 4)
    assert all(torch.equal(sums[0][name], t.cpu()) for name, t in sums[1].items())


# -- The Gaussian ----------------------------------------------------------------------------------------------------


def numbers(count, seed=0):
    return gaussian.standard_normal(chacha.words(seed.to_bytes(32), 0, count // 4)).reshape(-1)


def test_radius_and_direction_are_those_of_box_and_muller():
    """Against float64 (and where that cancels, its logarithm of 1 - x), at both ends and in between."""
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 2**32, (2, 200_000), dtype=np.uint32)
    first[:2000], first[2000:4000] = 0, 0xFFFFFFFF
    first[4000:100_000] >>= rng.integers(0, 32, 96_000, dtype=np.uint32)
    radius = gaussian._radii(first, second)
    cosines, sines = gaussian._directions(second)
    u = (first.astype(np.float64) * 256 + (second & 0xFF) + 0.5) / 2**40
    exact = np.sqrt(-2 * np.where(u > 0.75, np.log1p(-(1 - u)), np.log(u)))
    assert np.abs(np.abs(radius) / exact - 1).max() < 2e-7
    assert np.abs(radius).max() == pytest.approx(np.sqrt(82 * np.log(2)), rel=1e-6)
    angle = np.pi * (((second >> 8) & 0x3FFFFF) + 0.5) / 2**23 - np.pi / 4
    turned = (second >> 30) & 1 == 1
    assert np.abs(cosines - np.where(turned, np.sin(angle), np.cos(angle))).max() < 2e-7
    assert np.abs(sines - np.where(turned, np.cos(angle), np.sin(angle))).max() < 2e-7
    assert np.array_equal(np.signbit(radius), second >= 2**31)


def test_tails_are_gaussian():
    drawn = np.concatenate([numbers(1 << 20, seed) for seed in range(4)])

    def accepts(scale):
        counts = [(np.abs(drawn) > scale * t).sum() for t in (1.0, 2.0, 3.0, 4.0)]
        chances = [2 * stats.norm.sf(t) for t in (1.0, 2.0, 3.0, 4.0)]
        level = 1e-6 / 4
        return all(
            stats.binom.ppf(level / 2, len(drawn), p) <= n <= stats.binom.ppf(1 - level / 2, len(drawn), p)
            for n, p in zip(counts, chances, strict=True)
        )

    assert accepts(1.0)
    assert not accepts(0.97)
    assert not accepts(1.03)


def test_the_numbers_of_a_block_are_independent():
    """Of one cipher block come four numbers, two of each four pairs: neither they nor their squares are correlated."""
    drawn = numbers(1 << 20).reshape(-1, 4).T
    for each in (drawn, drawn**2, np.abs(drawn)):
        assert np.abs(np.corrcoef(each) - np.eye(4)).max() < 6 / np.sqrt(drawn.shape[1])


def test_a_number_is_half_the_sum_of_four_draws():
    """Words that fix the pairs: U = 1/2, angle 0 but for half a cell, where every cosine's draw is √(2 ln 2)."""
    words = np.tile(np.array([1 << 31, 1 << 29], dtype=np.uint32), 8)[None]
    found = gaussian.standard_normal(words)[0]
    assert found[[0, 2]] == pytest.approx([2 * np.sqrt(2 * np.log(2))] * 2, rel=1e-6)
    assert found[[1, 3]] == pytest.approx([0, 0], abs=1e-6)
    for pair, (one, other) in enumerate([(0, 1)] * 4 + [(2, 3)] * 4):
        changed = words.copy()
        changed[0, 2 * pair + 1] ^= 1 << 31
        moved = gaussian.standard_normal(changed)[0] != found
        assert moved.nonzero()[0].tolist() == [one, other]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_added_in_float64_and_rounded_once(dtype):
    """Rounded to float32 before it is added, some sums could not come from every noise, and would betray the others."""
    drawn = torch.from_numpy(numbers(4096).copy())
    sums = torch.linspace(-3, 3, 4096, dtype=dtype)
    found = sums.clone()
    secure._add_(found, bytes(32), 0, 0.7)
    assert torch.equal(found, (sums.double() + 0.7 * drawn).to(dtype))
    assert not torch.equal(found, sums + (0.7 * drawn.float()).to(dtype))


# -- No number twice -------------------------------------------------------------------------------------------------

SHAPES = st.lists(st.lists(st.integers(0, 90), min_size=0, max_size=2), min_size=1, max_size=6)


@given(SHAPES, SHAPES, st.sampled_from([1, 5, 64, 10_000]), st.sampled_from([1, 7, 1000, 1 << 24]), st.integers(1, 3))
def test_no_number_of_a_stream_is_used_twice(shapes, others, large, chunk, threads):
    """Over steps, shards, and sums of any shape: (key, number) comes once, and all are those of the stream."""
    used = []

    def noted(flat, key, first, std):
        used.extend((key, first + k) for k in range(len(flat)))
        flat.add_(1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure, "LARGE", large)
        patch.setattr(secure, "CHUNK", chunk)
        patch.setattr(secure, "_add_", noted)
        noise, count = SecureNoise(Key(1)), 0
        for step in range(1, 3):
            for shard in (None, 0, 1):
                sums = {str(k): torch.zeros(shape) for k, shape in enumerate(shapes if step == 1 else others)}
                noise.add(sums, 1.0, step, shard)
                count += sum(t.numel() for t in sums.values())
                assert all((t == 1).all() for t in sums.values())
    assert len(used) == len(set(used)) == count


@given(st.integers(0, 2**35), st.integers(0, 400), st.sampled_from([4, 8, 100]))
def test_tiles_are_parts_of_one_stream(first, count, tile):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(secure, "TILE", tile)
        found = torch.zeros(count, dtype=torch.float64)
        secure._add_on_cpu(found, bytes(32), first, 1.0)
    expected = gaussian.standard_normal(chacha.words(bytes(32), first // 4, count // 4 + 2)).reshape(-1)
    assert np.array_equal(found.numpy(), expected[first % 4 :][:count])


def test_threads_add_the_same(monkeypatch):
    found = []
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        SecureNoise(Key(1)).add(sums := {"a": torch.zeros(100_000)}, 1.0, 1)
        found.append(sums["a"])
    assert torch.equal(*found)


def test_what_has_no_kernel_is_served_by_the_cpu(monkeypatch):
    """Other devices have neither the kernel nor, often, float64: their sums are noised here, and put back."""
    there = torch.zeros(64, 2)
    SecureNoise(Key(1)).add({"a": (here := there.clone())}, 1.0, 1)

    class Elsewhere(torch.Tensor):
        device = torch.device("meta")

        def cpu(self):
            return self.as_subclass(torch.Tensor).clone()

    secure._add_(there.view(-1).as_subclass(Elsewhere), SecureNoise(Key(1))._secret("noise/1/device 0"), 0, 1.0)
    assert torch.equal(there, here)


def test_steps_shards_and_purposes_have_keys_of_their_own():
    noise = SecureNoise(Key(1))
    labels = [*(f"noise/{k}/device 0" for k in range(9)), "noise/1/shard 0/device 0", "noise/1/device 1", "sampling"]
    secrets = {noise._secret(label) for label in labels}
    assert len(secrets) == len(labels) and {len(s) for s in secrets} == {32}
    assert noise._secret("sampling") != Noise(Key(1)).key.derive("sampling").to_bytes(32)


# -- Draws -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["fast", "secure"])
@pytest.mark.parametrize("rate", [0.004, 0.3, 0.97])
def test_coins_are_independent_at_their_rate(source, rate):
    """Each coin, each pair of neighbours, and the count: means within 6 standard deviations."""
    size, rounds = 50, 20_000
    chances = Secure(bytes(32)) if source == "secure" else Fast(np.random.default_rng(0))
    shown = np.zeros((rounds, size), dtype=bool)
    for k in range(rounds):
        found = chances.coins(size, rate)
        assert (np.diff(found) > 0).all()
        shown[k, found] = True
    for each, p in ((shown, rate), (shown[:, 1:] & shown[:, :-1], rate**2), (shown[:, 7:] & shown[:, :-7], rate**2)):
        assert np.abs(each.mean(0) - p).max() < 6 * np.sqrt(p * (1 - p) / rounds)
    counts = shown.sum(1)
    assert abs(counts.var() / (size * rate * (1 - rate)) - 1) < 6 * np.sqrt((2 + 1 / (size * rate)) / rounds)
    assert not np.abs(shown.mean() - 1.03 * rate) < 6 * np.sqrt(rate * (1 - rate) / rounds / size) or rate < 0.01


@pytest.mark.parametrize("samples", [0, 1, 3, 5, 6])
def test_every_subset_is_as_likely(samples):
    from itertools import combinations

    chances, rounds = Secure(bytes(32)), 6000
    found = [tuple(chances.subset(6, samples).tolist()) for _ in range(rounds)]
    possible = list(combinations(range(6), samples))
    counts = [found.count(each) for each in possible]
    assert sum(counts) == rounds
    if len(possible) > 1:
        assert stats.chisquare(counts).pvalue > 1e-6


def test_every_order_is_as_likely():
    chances, rounds = Secure(bytes(32)), 6000
    orders, counts = np.unique([chances.order(4) for _ in range(rounds)], axis=0, return_counts=True)
    assert len(orders) == 24 and stats.chisquare(counts).pvalue > 1e-6


def test_all_or_nothing_is_drawn_at_the_ends_of_the_rate():
    assert Secure(bytes(32)).coins(5, 1.0).tolist() == [0, 1, 2, 3, 4]
    assert len(Secure(bytes(32)).coins(10, 1e-12)) == 0


@pytest.mark.parametrize(
    "sampling",
    [dpscale.Poisson(size=97, batch=10), dpscale.FixedSize(size=97, batch=10), dpscale.Shuffled(size=97, batch=10),
     dpscale.FullBatch(size=97)],
    ids=lambda s: type(s).__name__,
)  # fmt: skip
def test_draws_go_on_from_any_step(sampling):
    def drawn(start, count, order=None):
        draws = sampling.draws(Secret(b"s" * 32), start=start, order=order)
        return [next(draws).tolist() for _ in range(count)]

    whole = drawn(0, 25)
    assert whole[13:] == drawn(13, 12)
    assert sampling.order(Secret(b"s" * 32), 13) is None or isinstance(sampling, dpscale.Shuffled)
    if not isinstance(sampling, dpscale.FullBatch):
        assert len({tuple(each) for each in whole}) == 25


# -- The run ---------------------------------------------------------------------------------------------------------

DATA = TensorDataset(torch.randn(60, 4, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 3)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def run(steps=4, seed=1, noise="secure", data=DATA, taken=None, **options):
    """A run, and the weights after each step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    changes = {name: options.pop(name) for name in ("momentum", "sampling") if name in options}
    settings = {"sampling": dpscale.Poisson(size=len(data), batch=len(data) // 3), **changes}
    plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), steps=steps, noise_multiplier=1.0, delta=1e-3, **settings)
    private = dpscale.privatize(model, optimizer, plan, seed=seed, noise=noise, **options)
    weights = []
    for k, batch in enumerate(private.batches(data)):
        if k == taken:
            break
        private.step(batch, loss_fn)
        weights.append(model[0].weight.detach().clone())
    return private, weights


@pytest.mark.parametrize("momentum", MOMENTUM)
def test_every_momentum_gets_secure_noise_once_a_step(momentum, monkeypatch):
    steps = []
    add = SecureNoise.add
    monkeypatch.setattr(SecureNoise, "add", lambda self, *given: steps.append(given[2]) or add(self, *given))
    changes = {"momentum": MOMENTUM[momentum], "sampling": dpscale.FullBatch(size=60)}
    _, once = run(**changes)
    _, again = run(**changes)
    assert steps == [1, 2, 3, 4] * 2
    assert all(torch.equal(one, other) for one, other in zip(once, again, strict=True))


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_a_seed_reproduces_a_secure_run_and_micro_batches_do_not_matter(micro_batch):
    _, once = run(micro_batch=micro_batch)
    _, again = run()
    for one, other in zip(once, again, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not torch.equal(once[0], run(seed=2)[1][0])
    assert not torch.equal(once[0], run(noise="fast")[1][0])


def test_no_noise_and_no_draw_comes_again_after_a_resumption(tmp_path):
    first, _ = run(taken=2)
    first.save(tmp_path / "run")
    secrets = [first._state.noise._secret(label) for label in ("noise/3/device 0", "sampling")]
    second, _ = run(taken=0)
    second.load(tmp_path / "run")
    third, _ = run(taken=0)
    third.load(tmp_path / "run")
    for each in (second, third):
        assert isinstance(each._state.noise, SecureNoise)
        secrets += [each._state.noise._secret(label) for label in ("noise/3/device 0", "sampling")]
    assert len(set(secrets)) == 6
    assert len(list(second.batches(DATA))) == 2


def test_statement_and_card_say_what_the_noise_came_from(tmp_path):
    secure, _ = run(taken=2)
    assert "Randomness: A seed" in secure.statement() and "ChaCha20 and draws from SHAKE-256" in secure.statement()
    assert "ChaCha20" in secure.card().values["randomness"]
    fast, _ = run(noise="fast", seed=None)
    assert "operating system" in fast.statement() and "fast, not cryptographic." in fast.statement()
    secure.save(tmp_path / "run")
    resumed, _ = run(noise="fast", taken=0)
    resumed.load(tmp_path / "run")
    for batch in resumed.batches(DATA):
        resumed.step(batch, loss_fn)
    assert "fast, not cryptographic, in some steps" in resumed.card().values["randomness"]


def test_people_are_chosen_by_the_secure_source_too(monkeypatch):
    asked = []
    chances = SecureNoise.chances
    monkeypatch.setattr(SecureNoise, "chances", lambda self, label: asked.append(label) or chances(self, label))
    people = dpscale.by_user(DATA, [k % 12 for k in range(60)], records=2)
    private, weights = run(data=people, steps=3)
    assert len(weights) == 3 and asked and all(label.startswith("records/") for label in asked)
    assert private.plan.records == 2


def test_the_audit_finds_secure_noise_as_claimed():
    plan = dpscale.Plan(
        scaling=dpscale.Clip(C=0.5), sampling=dpscale.FullBatch(size=400), steps=3, noise_multiplier=1.0, delta=1e-5
    )
    report = dpscale.audit.audit(plan, seed=0, noise="secure")
    assert report.consistent and report.epsilon_lower > 0.5


def test_make_private_takes_it_too():
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = dpscale.make_private(model, optimizer, DATA, epsilon=3, delta=1e-3, epochs=1, batch=20, noise="secure")
    assert isinstance(private._state.noise, SecureNoise)


@pytest.mark.parametrize(
    "compile", [interpreted, pytest.param(True, marks=pytest.mark.compiled)], ids=["traced", "compiled"]
)
@pytest.mark.parametrize("micro_batch", [None, 7])
def test_a_compiled_step_gets_the_same_secure_noise(compile, micro_batch):
    """The numbers are those of the eager step with the same seed; so no padded row and no part has noise of its own."""
    private, weights = run(compile=compile, micro_batch=micro_batch)
    _, eager = run(compile=False)
    for one, other in zip(weights, eager, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert private._engine._compiled is not None and private._engine.compiles
    assert not torch.equal(weights[0], run(compile=compile, micro_batch=micro_batch, noise="fast")[1][0])


def test_a_compiled_step_adds_secure_noise_once(monkeypatch):
    steps, add = [], SecureNoise.add
    monkeypatch.setattr(SecureNoise, "add", lambda self, *given: steps.append(given[2]) or add(self, *given))
    run(compile=interpreted)
    assert steps == [1, 2, 3, 4]


@pytest.mark.parametrize("loop", ["transformers", "lightning", "sklearn", "accelerate"])
def test_other_loops_take_it_too(loop, tmp_path):
    assert "ChaCha20" in LOOPS[loop](tmp_path, "secure") and "ChaCha20" not in LOOPS[loop](tmp_path, None)


def _by_trainer(folder, noise):
    trained = trainers.trainer(folder, changes={"max_steps": 1}, noise=noise)
    trained.train()
    return trained.private.statement()


def _by_lightning(folder, noise):
    callback = lightning_runs.PrivateCallback(lightning_runs.plan(steps=2), noise=noise)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's, of workers and of steps without a logger
        lightning_runs.fit(callback=callback, max_epochs=1)
    return callback.private.statement()


def _by_sklearn(folder, noise):
    x, y = (t.numpy() for t in DATA.tensors)
    return PrivateClassifier(delta=1e-3, epochs=2, noise=noise).fit(x, y).statement_


def _by_accelerate(folder, noise):
    model = nn.Linear(4, 3)
    optimizer, plan = torch.optim.SGD(model.parameters(), lr=0.1), lightning_runs.plan(steps=2)
    *_, private = prepare(Accelerator(cpu=True), model, optimizer, plan, noise=noise)
    return private.statement()


LOOPS = {"transformers": _by_trainer, "lightning": _by_lightning, "sklearn": _by_sklearn, "accelerate": _by_accelerate}


@pytest.mark.parametrize("make", [dpscale.privatize, dpscale.make_private], ids=["privatize", "make_private"])
def test_an_unknown_source_is_refused(make):
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FullBatch(size=60), steps=1, noise_multiplier=1.0)
    arguments = (plan,) if make is dpscale.privatize else (DATA,)
    options = {} if make is dpscale.privatize else {"epsilon": 3, "delta": 1e-3, "epochs": 1, "batch": 20}
    with pytest.raises(ValueError, match=r"'noise' parameter of privatize must be 'fast' or 'secure'. Got 'safe' inst"):
        make(model, optimizer, *arguments, noise="safe", **options)


def test_a_missing_library_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(ImportError, match=r"by the library cryptography.*pip install \"dpscale\[secure\]\""):
        run(taken=0)


@pytest.mark.parametrize("device, expected", [("cuda", "secure"), ("cpu", "fast"), ("mps", "fast")])
def test_the_default_is_one_line(monkeypatch, device, expected):
    monkeypatch.setitem(secure.DEFAULT, "cuda", "secure")
    monkeypatch.setattr(secure.kernel, "triton", object())
    assert secure.default_source({device}) == expected
    monkeypatch.setattr(secure.kernel, "triton", None)
    assert secure.default_source({device}) == "fast"
