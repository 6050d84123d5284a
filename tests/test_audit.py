"""The audit: what it finds of the product as it is, and that it finds what is broken.

Runs have seeds, so that a test that passes once passes always. Without one, a correct run would fail `consistent` once
in 10,000 times.
"""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import special, stats
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale import training
from dpscale.audit import FALSE_ALARM, audit, statistics
from dpscale.chances import Fast
from dpscale.engine import combine
from dpscale.noise import Noise, SecureNoise

from . import audit_ranks
from .helpers import refuse, run
from .ranks import interpreted

SHARP = dpscale.Plan(
    scaling=dpscale.Clip(C=0.7), sampling=dpscale.Poisson(size=1000, batch=250), steps=60, noise_multiplier=0.3,
    delta=1e-5,
)  # fmt: skip
"""So little noise that it shows who is in a batch."""
SHARPER = {
    "some_samples_twice": {"steps": 250},
    "fixed_size_draws": {"steps": 250, "noise_multiplier": 0.1},
    "draws_with_replacement": {"steps": 600, "noise_multiplier": 0.1},
}
"""What needs more steps, or less noise, to be seen."""


def full_batch(**changes):
    settings = {"scaling": dpscale.Clip(C=0.3), "sampling": dpscale.FullBatch(size=2000), "steps": 4}
    return dpscale.Plan(**(settings | changes)).calibrate(epsilon=4, delta=1e-5)


def failed(report):
    return {check.name for check in report.checks if check.p_value * len(report.checks) < FALSE_ALARM}


# -- Every breakage is seen ------------------------------------------------------------------------------------------


@pytest.fixture
def checked(monkeypatch):
    """An audit under `SHARP`, its tests alone: bounds take long to compute where ε is in the hundreds."""
    monkeypatch.setattr(statistics, "by_curve", lambda *_: 0.0)

    def audited(plan=SHARP, **options):
        return audit(plan, canaries=plan.sampling.size, seed=3, **options)

    return audited


def too_little_noise(patch):
    add = Noise.add
    patch.setattr(Noise, "add", lambda self, sums, std, *rest: add(self, sums, 0.9 * std, *rest))


def too_large_a_bound(patch):
    weight = dpscale.Clip._weight
    patch.setattr(dpscale.Clip, "_weight", lambda self, x: 1.1 * weight(self, x))


def twice_the_rate(patch):
    patch.setattr(dpscale.Poisson, "_draw", lambda self, chances: chances.coins(self.size, 2 * self.rate))


def some_samples_twice(patch):
    draw = dpscale.Poisson._draw
    patch.setattr(dpscale.Poisson, "_draw", lambda self, rng: np.repeat(d := draw(self, rng), np.where(d < 3, 2, 1)))


def noise_again(patch):
    """That of one step, in another."""
    add = Noise.add
    patch.setattr(Noise, "add", lambda self, sums, std, step, *rest: add(self, sums, std, step % 59, *rest))


def noise_alike(patch):
    """The same in all tensors."""
    add = Noise.add

    def each(self, sums, std, step, *rest):
        for name, tensor in sums.items():
            add(self, {name: tensor}, std, step, *rest)

    patch.setattr(Noise, "add", each)


def no_noise_once(patch):
    """As where a step on an empty batch is left out."""
    add = Noise.add
    patch.setattr(Noise, "add", lambda self, sums, std, step, *rest: add(self, sums, std * (step != 7), step, *rest))


def uniform_noise(patch):
    def add(self, sums, std, step, *rest):
        for k, tensor in enumerate(sums.values()):
            stream = torch.Generator().manual_seed(1000 * step + k)
            tensor += (torch.rand(tensor.shape, generator=stream) - 0.5) * 12**0.5 * std

    patch.setattr(Noise, "add", add)


def none_on(patch, chosen):
    """Noise that some entries of the sums do not get."""
    add = Noise.add

    def some(self, sums, std, *rest):
        before = {name: tensor.clone() for name, tensor in sums.items()}
        add(self, sums, std, *rest)
        for name, tensor in sums.items():
            tensor.copy_(torch.where(chosen(tensor), before[name], tensor))

    patch.setattr(Noise, "add", some)


def no_noise_on_vectors(patch):
    """As where biases have a group of their own."""
    none_on(patch, lambda tensor: torch.tensor(tensor.dim() == 1))


def no_noise_here_and_there(patch):
    """As where a kernel leaves out the last of every 64 entries."""
    none_on(patch, lambda tensor: (torch.arange(tensor.numel()) % 64 == 63).view(tensor.shape))


def the_norm_of_one_tensor(patch):
    """The largest, in the place of that of all tensors together."""
    largest = lambda forms, mask: torch.stack([form.norm2() for form in forms]).amax(0).sqrt()  # noqa: E731
    patch.setattr(combine, "_norms", largest)


def realised_divisor(patch):
    book, divide, drawn = training.Private._book, training.foreach_div_, []

    def remember(self, draw, out):
        drawn.append(len(draw.indices))
        return book(self, draw, out)

    patch.setattr(training.Private, "_book", remember)
    patch.setattr(training, "foreach_div_", lambda sums, expected: divide(sums, drawn[-1]))


def draws_with_replacement(patch):
    """A sample may be in a batch twice."""
    patch.setattr(dpscale.Poisson, "_draw", lambda self, chances: np.sort(chances._rng.integers(0, 1000, self.batch)))


def fixed_size_draws(patch):
    """Another sampler than the one that is accounted for, and with it another adjacency."""
    patch.setattr(dpscale.Poisson, "_draw", lambda self, chances: chances.subset(self.size, self.batch))


BREAKAGES = {
    too_little_noise: "size of the noise",
    uniform_noise: "shape of the noise",
    no_noise_once: "noise the same size in every step",
    no_noise_on_vectors: "noise the same size in every coordinate",
    no_noise_here_and_there: "noise the same size in every coordinate",
    the_norm_of_one_tensor: "what canaries add, all together",
    realised_divisor: "noise the same size in every step",
    noise_again: "fresh noise in every step",
    noise_alike: "fresh noise in every coordinate",
    too_large_a_bound: "what canaries add, all together",
    twice_the_rate: "what canaries add, all together",
    some_samples_twice: "what each canary adds",
    draws_with_replacement: "sizes of the batches",
    fixed_size_draws: "sizes of the batches",
}


def test_nothing_is_found_where_nothing_is_broken(checked):
    report = checked()
    assert report.consistent and report.p_value > 0.01 and not failed(report)


@pytest.mark.parametrize("broken", BREAKAGES, ids=lambda broken: broken.__name__)
def test_a_breakage_is_found(broken, checked, monkeypatch):
    broken(monkeypatch)
    report = checked(replace(SHARP, **SHARPER.get(broken.__name__, {})))
    assert not report.consistent and BREAKAGES[broken] in failed(report), str(report)
    assert "NOT CONSISTENT" in str(report) and "FAILS" in str(report)


def test_every_test_finds_a_breakage(checked):
    names = {check.name for check in checked().checks}
    assert names - set(BREAKAGES.values()) == {
        "spread of what canaries add", "errors of the adversary, against the claimed curve"
    }  # fmt: skip


# -- The product as it is --------------------------------------------------------------------------------------------


SAMPLERS = {
    "poisson": dpscale.Poisson(size=600, batch=150),
    "fixed-size": dpscale.FixedSize(size=600, batch=150),
    "full-batch": dpscale.FullBatch(size=600),
    "full-batch-exchanged": dpscale.FullBatch(size=600, adjacency="replace-one"),
    "shuffled": dpscale.Shuffled(size=600, batch=150),
    "shuffled-exchanged": dpscale.Shuffled(size=600, batch=150, adjacency="replace-one"),
}
WAYS = {
    **{name: {"sampling": each} for name, each in SAMPLERS.items()},
    "auto-s": {"scaling": dpscale.AutoS(C=0.5, r=0.01)},
    "psac": {"scaling": dpscale.PSAC(C=0.5, r=0.01)},
    "psasc": {"scaling": dpscale.PSASC(C=0.5, s=0.4, r=0.01)},
    "heavy-ball": {"momentum": dpscale.HeavyBall(gamma1=0.3)},
    "inner-outer": {"momentum": dpscale.InnerOuter(K0=2, gamma0=0.5, gamma1=0.3)},
    "disk": {"momentum": dpscale.DiSK(kappa=0.6, gamma=0.5)},
    "per-sample-ema": {"momentum": dpscale.PerSampleEMA(gamma=0.5), "sampling": dpscale.FullBatch(size=600)},
    "micro-batched": {"micro_batch": 64},
    "traced": {"compile": interpreted},
}


@pytest.fixture
def trained(checked):
    """An audit of a way to train."""

    def audited(changes):
        options = {option: changes[option] for option in ("micro_batch", "compile") if option in changes}
        changes = {option: value for option, value in changes.items() if option not in options}
        return checked(replace(SHARP, **({"sampling": SAMPLERS["poisson"], "steps": 22} | changes)), **options)

    return audited


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_train_is_consistent(name, trained):
    report = trained(WAYS[name])
    assert report.consistent, str(report)
    # Most of the canaries are recognised with so little noise: what is read is what was released.
    assert report.bounds["threshold"] > 1.5


@pytest.mark.compiled
def test_a_compiled_step_is_consistent(trained):
    assert trained({"compile": True}).consistent


@pytest.mark.parametrize("name", WAYS)
def test_every_way_to_train_is_looked_at(name, trained, monkeypatch):
    too_little_noise(monkeypatch)
    assert "size of the noise" in failed(trained(WAYS[name]))


def test_on_two_ranks_the_audit_is_that_of_one_process(tmp_path, nursery):
    nursery.ranks(2, "tests.audit_ranks:main", str(tmp_path / "report.json"))
    there, here = json.loads((tmp_path / "report.json").read_text()), audit_ranks.audited()
    assert there["ranks"] == 2 and there["consistent"] and here.consistent
    assert "what canaries add, all together" in there["failed"]["averaged_sums"]
    assert "size of the noise" in there["failed"]["averaged_noise"]
    assert there["bounds"] == pytest.approx(here.bounds)
    assert [c["p_value"] for c in there["checks"]] == pytest.approx([c.p_value for c in here.checks], rel=1e-3)


def test_a_bound_of_another_rule_is_found(trained, monkeypatch):
    """C in the place of C/s, in the noise."""
    monkeypatch.setattr(dpscale.PSASC, "bound", property(lambda rule: rule.C))
    assert "what canaries add, all together" in failed(trained(WAYS["psasc"]))


def test_a_sample_that_comes_again_within_a_shuffled_epoch_is_found(trained, monkeypatch):
    order = Fast.order
    monkeypatch.setattr(Fast, "order", lambda *of: np.where((o := order(*of)) % 50 == 1, o - 1, o))
    assert "what each canary adds" in failed(trained(WAYS["shuffled"] | {"steps": 120}))


# -- Bounds ----------------------------------------------------------------------------------------------------------


def gaussian_scores(mu, count, seed=0):
    """Of canaries whose coordinate has mean 0 or μ, and noise 1."""
    rng = np.random.default_rng(seed)
    inside = rng.random(count) < 0.5
    return rng.normal(mu * inside), inside


def test_bounds_are_below_the_claim_and_near_it():
    report = audit(full_batch(), runs=2, seed=1)
    assert report.observations == 3600 and report.epsilon_claimed == pytest.approx(4, rel=1e-3)
    assert 0.7 * 4 < report.epsilon_lower < 4 and report.epsilon_lower == report.bounds["curve"]
    assert 0.8 < report.bounds["threshold"] < report.epsilon_lower


def test_half_the_noise_exceeds_the_claim(monkeypatch):
    add = Noise.add
    monkeypatch.setattr(Noise, "add", lambda self, sums, std, *rest: add(self, sums, std / 2, *rest))
    report = audit(full_batch(), seed=1)
    assert report.epsilon_lower > 1.4 * report.epsilon_claimed
    assert "errors of the adversary, against the claimed curve" in failed(report)


def test_draws_of_another_adjacency_exceed_the_claim():
    """Fixed-size batches cost far more than Poisson ones at the same noise, and the audit shows a part of it."""
    settings = {"scaling": dpscale.Clip(C=1.0), "steps": 60, "noise_multiplier": 0.9, "delta": 1e-5}
    poisson = dpscale.Plan(sampling=dpscale.Poisson(size=3000, batch=150), **settings).epsilon()
    report = audit(dpscale.Plan(sampling=dpscale.FixedSize(size=3000, batch=150), **settings), runs=2, seed=1)
    assert poisson < report.epsilon_lower < report.epsilon_claimed and report.consistent


@pytest.mark.parametrize("mu", [0.3, 1.0, 2.5])
def test_bounds_hold_as_often_as_they_say(mu):
    """A bound at 80% confidence fails one time in five at most: of 200 times, above 65 with probability 1e-5."""
    plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FullBatch(size=9), steps=1,
                        noise_multiplier=1 / mu, delta=1e-5)  # fmt: skip
    true, claimed = plan.epsilon(), statistics.Curve.of(plan, 1e-5)
    above = {"threshold": 0, "curve": 0, "guesses": 0}
    for seed in range(200):
        scores, inside = gaussian_scores(mu, 400, seed)
        above["threshold"] += statistics.by_threshold(scores, inside, 1e-5, 0.8) > true
        above["curve"] += claimed.above(*statistics.central(scores, inside).at_most(0.8)) > 0
        above["guesses"] += statistics.lucky(scores, inside, 1e-5, true).p_value < 0.2
    assert max(above.values()) <= 65
    assert statistics.by_curve(statistics.central(*gaussian_scores(mu, 20_000)), plan, 1e-5, 0.95) > 0.7 * true


def test_p_values_are_uniform_where_nothing_is_broken():
    """Each test's, over 300 simulated runs: none is far from uniform (false-failure rate 1e-4 for all of them)."""
    plan, rng, found = replace(SHARP, steps=12), np.random.default_rng(0), []
    for _ in range(300):
        drawn = rng.random((12, 60)) < 0.25
        adds = (rng.random(60) < 0.5).astype(float)
        y = drawn * adds + 0.3 * rng.normal(size=(12, 60))
        blanks = 0.3 * rng.normal(size=(12, 16))
        trace = statistics.Trace(y.sum(0), adds == 1, adds, y.sum(0), y @ adds, blanks)
        found.append([check.p_value for check in statistics.checks(plan, [trace])])
    names = [check.name for check in statistics.checks(plan, [trace])]
    for name, p in zip(names, np.array(found).T, strict=True):
        few = stats.binom.sf((p < 0.05).sum() - 1, 300, 0.05)  # Bonferroni's are above uniform, never below
        assert few > 1e-4 / 9, (name, (p < 0.05).mean())
        if not name.startswith(("fresh", "what each")):
            assert stats.kstest(p, "uniform").pvalue > 1e-4 / 9, name


def test_the_statistic_is_the_likelihood_ratio():
    y, q, sigma = np.linspace(-3, 4, 29), 0.2, 0.7
    normal = lambda mean: stats.norm(mean, sigma).pdf(y)  # noqa: E731
    ratio = ((1 - q) * normal(0) + q * normal(1)) / normal(0)
    assert np.allclose(statistics.log_ratio(y, sigma, q, exchanged=False), np.log(ratio))
    other = ratio * normal(0) / ((1 - q) * normal(0) + q * normal(-1))
    assert np.allclose(statistics.log_ratio(y, sigma, q, exchanged=True), np.log(other))


def test_the_claimed_curve_is_that_of_the_gaussian():
    plan, fpr = full_batch(), np.array([0.001, 0.05, 0.4, 0.9])
    mu = np.sqrt(plan.steps) / plan.noise_multiplier
    exact = special.ndtr(special.ndtri(1 - fpr) - mu)
    curve = statistics.Curve.of(plan, 1e-5).least_fnr(fpr)
    assert np.all(curve <= exact + 1e-12) and np.allclose(curve, exact, atol=2e-3)


def test_clopper_and_pearson_cover():
    assert statistics.highest(np.array([0.0, 7.0]), 7, 0.975) == pytest.approx([1 - 0.025 ** (1 / 7), 1.0])


# -- Canary samples --------------------------------------------------------------------------------------------------


def memorising(size=120, noise=0.05):
    """(A function that makes a run that learns its samples by heart; its data.)"""
    data = TensorDataset(torch.eye(size), torch.arange(size) % 2)

    def make_private(data):
        model = nn.Linear(size, 2, bias=False)
        plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FullBatch(size=len(data)), steps=3,
                            noise_multiplier=noise, delta=1e-6)  # fmt: skip
        private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=len(data)), plan, seed=5)
        return private, lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    return make_private, data


def test_canary_samples_give_a_bound():
    report = audit(*memorising(), canaries=100, runs=3, seed=0)
    assert report.mode == "input-space" and report.observations == 300
    assert report.epsilon_lower == report.bounds["guesses"] > 2 and report.consistent


def test_canary_samples_find_noise_that_was_left_out(monkeypatch):
    monkeypatch.setattr(Noise, "add", lambda *_: None)
    report = audit(*memorising(noise=8.0), canaries=100, runs=3, seed=0)
    assert report.epsilon_claimed < 1 and report.epsilon_lower > 3 and not report.consistent


def test_canaries_of_ones_own_are_inserted():
    make_private, data = memorising(size=40)
    odd = TensorDataset(2 * torch.eye(60)[:30, :40], (torch.arange(30) + 1) % 2)
    sizes = []

    def noticed(data):
        sizes.append(len(data))
        return make_private(data)

    report = audit(noticed, data, inserted=odd, seed=0)
    assert report.canaries == 30 and 40 < sizes[0] < 70


def test_canary_samples_are_for_add_remove_alone():
    def make_private(data):
        model = nn.Linear(120, 2)
        plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FixedSize(size=len(data), batch=9), steps=3,
                            noise_multiplier=1.0, delta=1e-5)  # fmt: skip
        return dpscale.privatize(model, torch.optim.SGD(model.parameters()), plan), None

    with pytest.raises(ValueError, match=r"whose plan is for add-remove\. Got 'replace-one' instead\. Audit the plan"):
        audit(make_private, memorising()[1], canaries=60)


def test_a_plan_without_noise_is_refused():
    plan = replace(SHARP, noise_multiplier=None, unsafe_no_noise=True)
    with pytest.raises(ValueError, match=r"^The 'subject' parameter of audit must be a plan with noise and steps"):
        audit(plan)


# -- Report and command ----------------------------------------------------------------------------------------------


def test_a_report_is_plain_values_and_a_picture(tmp_path):
    report = audit(full_batch(sampling=dpscale.FullBatch(size=200)), seed=0)
    told = json.loads(json.dumps(report.to_dict()))
    assert told["consistent"] is True and told["false_alarm_rate"] == FALSE_ALARM
    assert told["epsilon_lower"] == told["bounds"]["curve"] and len(told["checks"]) == len(report.checks)
    for point in report.points:
        assert point.fpr_interval[0] <= point.fpr <= point.fpr_interval[1]
        assert point.fnr_interval[0] <= point.fnr <= point.fnr_interval[1]
    report.picture(tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match=r"^The 'path' parameter of AuditReport\.picture must be a \.png"):
        report.picture("curve.txt")


def test_the_same_seed_gives_the_same_report_and_none_another_each_time():
    plan = full_batch(sampling=dpscale.FullBatch(size=100))
    one, same, other, another = (audit(plan, seed=seed).checks for seed in (0, 0, None, None))
    assert one == same and len({one, other, another}) == 3


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"canaries": 9}, "The 'canaries' parameter of audit must be an integer >= 50. Got 9 instead."),
        ({"canaries": 5000}, "The 'canaries' parameter of audit must be at most 2000. Got 5000 instead."),
        ({"runs": 0}, "The 'runs' parameter of audit must be an integer >= 1. Got 0 instead."),
        ({"confidence": 95}, "The 'confidence' parameter of audit must be a number in (0, 1). Got 95 instead."),
    ],
)
def test_bad_arguments_are_named(arguments, text):
    with pytest.raises(ValueError) as error:
        audit(full_batch(), **arguments)
    assert str(error.value).startswith(text)


COMMAND = ["audit", "--size", 300, "--sampler", "full-batch", "--steps", 3, "--epsilon", 4, "--delta", 1e-5]


def test_the_command_prints_json_and_draws(tmp_path):
    path = tmp_path / "audit.png"
    told = json.loads(run(*COMMAND, "--seed", 1, "--picture", path, "--json").stdout)
    assert told["consistent"] and told["canaries"] == 270 and path.stat().st_size > 5000


def test_the_command_audits_secure_noise(monkeypatch):
    told, add = [], SecureNoise.add
    monkeypatch.setattr(SecureNoise, "add", lambda self, *given: told.append(given[2]) or add(self, *given))
    assert json.loads(run(*COMMAND, "--seed", 1, "--noise", "secure", "--json").stdout)["consistent"]
    assert told == [1, 2, 3]


def test_the_command_exits_with_1_where_something_is_broken(monkeypatch):
    too_little_noise(monkeypatch)
    result = run(*COMMAND, "--rule", "psasc", "--seed", 1, code=1)
    assert result.stdout.startswith("The releases are NOT CONSISTENT with what is claimed.")


def test_the_command_refuses_what_it_cannot_draw_or_plan():
    assert "must end in .png, .svg or .pdf" in refuse(*COMMAND, "--picture", "a.txt")
    assert "Give either --epsilon or --noise-multiplier" in refuse(*COMMAND, "--noise-multiplier", 1)
    assert "must be cpu, or cuda" in refuse(*COMMAND, "--device", "tpu")
