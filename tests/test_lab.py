"""The lab on tiny settings: data, presets, records, comparison, figures, report."""

import contextlib
import copy
import dataclasses
import io
import itertools
import json
import math
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats
from torch import nn
from torch.utils.data import TensorDataset

from dpscale import PSAC, PSASC, Plan, Poisson, files, privatize
from dpscale.engine.phases import listening, phase
from dpscale.lab import (
    commands,
    compare,
    diagnostics,
    display,
    figures,
    gpu,
    markdown,
    models,
    paper,
    presets,
    processes,
    queue,
    records,
    report,
    runner,
    summary,
    terminal,
)
from dpscale.lab.claims import Claims
from dpscale.lab.data import digits, hold_out, load
from dpscale.lab.datasets.folder import DataError
from dpscale.lab.presets import METHODS, Choice
from dpscale.momentum import HeavyBall, InnerOuter
from dpscale.noise import Key
from dpscale.shapes import Sizes
from dpscale.training import Private

from .helpers import run as run_command

TINY = presets.digits().replace(epochs=2, batch=64, grid=(0.05, 0.2), last_epochs=1, diagnostics=True)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A finished comparison: a baseline, two private methods and a control, two seeds, with a search."""
    out = tmp_path_factory.mktemp("runs")
    compare.compare(
        TINY, presets.methods("non-private,dp-sgd,dp-psasc,psac-lr-over-s"), [0, 1], out, workers=1, command="tiny"
    )
    return out


@pytest.fixture(scope="module")
def found(folder):
    return summary.select(records.load(folder))[0]


# -- data and models -------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    data, again = digits(), digits()
    assert (data.size, len(data.test_labels)) == (1437, 360)
    assert data.train_images.shape[1:] == (1, 8, 8)
    assert data.train_images.min() == 0 and data.train_images.max() == 1
    assert torch.equal(data.test_images, again.test_images)
    counts = torch.bincount(data.test_labels)
    assert len(counts) == 10 and counts.min() >= 34 and counts.max() <= 38


def test_hold_out_takes_from_the_training_data_only():
    data = digits()
    split = hold_out(data, 0.2)
    assert split.size + len(split.test_labels) == data.size and len(split.test_labels) == 287
    rows = {tuple(row) for row in data.train_images.flatten(1).tolist()}
    assert {tuple(row) for row in split.test_images.flatten(1).tolist()} <= rows


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_hold_out_refuses_a_fraction_outside_0_1(fraction):
    with pytest.raises(ValueError, match=r"'fraction' parameter of hold_out must be a number in \(0, 1\)"):
        hold_out(digits(), fraction)


SHAPES = {"digits_cnn": (1, 8, 8), "resnet9": (3, 32, 32), "resnet9_mish": (3, 16, 16), "resnet9_scaled": (3, 16, 16),
          "probe": (2048,), "scatter_deep": (81, 7, 7), "scatter_sum": (81, 7, 7), "resnet50_stage4": (3, 32, 32),
          "resnet50_stages34": (3, 32, 32)}  # fmt: skip
SIZES = {"digits_cnn": 5746, "paper_cnn": 30_650, "lineage_cnn": 26_010, "resnet9": 2_447_946, "probe": 20_490,
         "normed_cnn": 75_626, "gelu_cnn": 75_626, "scatter_deep": 94_154, "scatter_sum": 133_854}  # fmt: skip


@pytest.mark.parametrize("name", models.MODELS)
def test_models_give_logits_and_mix_no_samples(name):
    model = models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 7).train()
    if name == "probe":
        assert all(not p.any() for p in model.parameters())  # it starts where every class is equally likely
        nn.init.normal_(model.weight)
    if name.startswith("resnet50"):
        assert not model.head.weight.any()
        nn.init.normal_(model.head.weight)
    x = torch.randn(3, *SHAPES.get(name, (1, 28, 28)))
    assert model(x).shape == (3, 7)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def test_the_linear_layer_of_gelu_cnn_sees_twice_the_features():
    model, x = models.gelu_cnn(), torch.randn(2, 1, 28, 28)
    assert isinstance(model[2], nn.GELU)
    torch.testing.assert_close(model(x), model[-1](2 * model[:-2](x)))


@pytest.mark.parametrize("name", SIZES)
def test_model_sizes(name):
    model = models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 10)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def layers(name, kind):
    return sum(isinstance(m, kind) for m in models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 10).modules())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_papers_cnn_has_four_convolutions_and_one_linear_layer(name):
    model = presets.preset(name).model
    assert (layers(model, nn.Conv2d), layers(model, nn.Linear)) == (4, 1)


def test_the_lineages_models_are_as_published():
    assert (layers("lineage_cnn", nn.Conv2d), layers("lineage_cnn", nn.Linear), layers("lineage_cnn", nn.Tanh)) == (
        2,
        2,
        3,
    )
    assert (layers("resnet9", nn.Conv2d), layers("resnet9", nn.Linear), layers("resnet9", nn.GroupNorm)) == (8, 1, 8)
    assert (layers("resnet9", nn.ReLU), layers("resnet9_mish", nn.Mish), layers("resnet9_mish", nn.ReLU)) == (8, 8, 0)
    assert (layers("resnet9_scaled", nn.Mish), layers("resnet9_scaled", nn.GroupNorm)) == (8, 10)


def test_scaled_residual_sums_are_normalized():
    block = next(m for m in models.resnet9_scaled().modules() if isinstance(m, models.Residual))
    x = 9 * torch.randn(2, 128, 6, 6) + 4
    groups = block(x).reshape(2, 32, -1)
    torch.testing.assert_close(groups.mean(-1), torch.zeros(2, 32), atol=1e-4, rtol=0)
    torch.testing.assert_close(groups.std(-1, correction=0), torch.ones(2, 32), atol=1e-3, rtol=0)
    torch.testing.assert_close(block(x), block.norm(x + block.body(x)))


# -- presets ---------------------------------------------------------------------------------------------------


def test_every_value_of_a_preset_can_be_overridden():
    config = presets.digits()
    for field in dataclasses.fields(config):
        assert dataclasses.replace(config, **{field.name: getattr(config, field.name)}) == config
    assert config.replace(epsilon=1.0, delta=None).epsilon == 1.0
    assert config.replace(epsilon=1.0, delta=None).delta == config.delta


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"epsilon": 0.0}, "'epsilon' parameter of Config must be a finite number > 0"),
        ({"delta": 1.0}, r"'delta' parameter of Config must be a number in \(0, 1\)"),
        ({"epochs": 0}, "'epochs' parameter of Config must be an integer >= 1"),
        ({"grid": ()}, "'grid' parameter of Config must be at least one rate"),
        ({"momentum": "fast"}, "'momentum' parameter of Config must be one of heavy-ball, inner-outer, disk"),
        ({"gamma1": 0.0}, "'gamma1' parameter of HeavyBall must be above 0 and at most 1"),
        ({"K0": -1}, "'K0' parameter of InnerOuter must be an integer"),
        ({"gamma1s": (0.1, 2.0)}, "'gamma1' parameter of HeavyBall must be above 0 and at most 1"),
        ({"inner": ((1, 0.0),)}, "'gamma0' parameter of InnerOuter must be"),
        ({"precision": "fp8"}, "'precision' parameter of Config must be one of float32, bf16"),
        ({"optimizer": "adam"}, "'optimizer' parameter of Config must be one of sgd, nadam"),
        ({"encoder": "clip"}, "'encoder' parameter of Config must be one of None, simclrv2"),
        ({"epsilon": float("inf")}, "'epsilon' parameter of Config must be a finite number > 0"),
        ({"sampling": "weekly"}, "'sampling' parameter of Config must be one of poisson, full-batch"),
        ({"average": 1.0}, r"'average' parameter of Config must be a number in \[0, 1\)"),
        ({"schedule": "weekly"}, "'schedule' parameter of Config must be one of constant, linear, cosine"),
        ({"search_epochs": 0}, "'search_epochs' parameter of Config must be an integer >= 1"),
        ({"micro_batch": 0}, "'micro_batch' parameter of Config must be an integer >= 1"),
        ({"model": "vit"}, "'model' parameter of Config must be one of digits_cnn, paper_cnn"),
        ({"grid": (1, 0.5, 1.0)}, r"'grid' parameter of Config must be without repeats. Got \(1.0, 0.5, 1.0\) instead"),
        ({"gamma1s": (0.5, 0.5)}, "'gamma1s' parameter of Config must be without repeats.*leave the second out"),
        ({"inner": ((1, 0.5), (1.0, 0.5))}, "'inner' parameter of Config must be without repeats"),
        ({"C": 1e300}, r"'C' parameter of Config must be from 1e-12 to 1e12, or float32 overflows. Got 1e\+300"),
        ({"s": 1e-300}, "'s' parameter of Config must be from 1e-12 to 1e12, .* Give another --s"),
        ({"grid": (1.0, 1e300)}, "'rate' parameter of Config must be from 1e-12 to 1e12.*like --lr"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, text):
    with pytest.raises(ValueError, match=text):
        presets.digits().replace(**change)


def test_controls_split_what_s_does():
    config = presets.digits().at_rate(0.25)
    rate = {name: method.learning_rate(config, config.given(method)) for name, method in METHODS.items()}
    psasc, lr, r = (METHODS[name] for name in ("dp-psasc", "psac-lr-over-s", "psac-r-over-s"))
    assert rate["dp-psasc"] == pytest.approx(0.25 * config.s / config.C * config.gamma1)
    assert rate[lr.name] == pytest.approx(rate["dp-psasc"] / config.s)
    assert rate[r.name] == pytest.approx(rate["dp-psasc"])
    assert psasc.scaling(config) == PSASC(C=config.C, s=config.s, r=config.r)
    assert lr.scaling(config) == PSAC(C=config.C, r=config.r)
    assert r.scaling(config) == PSAC(C=config.C, r=config.r / config.s)


@pytest.mark.parametrize("gamma1", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", presets.searched(METHODS))
def test_rates_are_normalized_by_bound_and_outer_momentum(name, gamma1):
    config, method = presets.digits(), METHODS[name]
    choice = Choice(rate=0.25, gamma1=gamma1, K0=1, gamma0=0.5)
    assert method.learning_rate(config, choice) * presets.bound(method, config) / gamma1 == pytest.approx(0.25)
    assert method.learning_rate(config.replace(optimizer="nadam"), choice) == 0.25  # it divides by the gradient's size


def test_without_outer_momentum_gamma1_is_no_part_of_the_rate():
    config = presets.digits().replace(momentum="none")
    assert METHODS["dp-sgd"].learning_rate(config, Choice(rate=0.3, gamma1=0.1)) == pytest.approx(0.3 / config.C)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_method_has_the_same_tries(name):
    config = presets.preset(name)
    pairs = {(rate, gamma1) for rate in config.grid for gamma1 in config.gamma1s or (config.gamma1,)}
    for method in map(METHODS.get, presets.searched(METHODS)):
        tries = config.tries(method)
        assert len(tries) == len(pairs) and {(t.rate, t.gamma1) for t in tries} == pairs
        own = isinstance(method.momentum_of(config), InnerOuter)
        assert own == (method.name == "dp-psasc-star") == all(t.K0 is not None for t in tries)


def test_inner_momenta_take_turns_over_the_tries():
    """A Latin square: each pair (K0, γ0) meets each rate once and each outer momentum once."""
    inner = ((1, 0.5), (2, 0.5), (1, 0.9), (2, 0.9))
    config = presets.digits().replace(grid=(1.0, 2.0, 4.0, 8.0), gamma1s=(0.1, 0.2, 0.3, 0.4), inner=inner)
    tries = config.tries(METHODS["dp-psasc-star"])
    for pair in inner:
        met = [t for t in tries if (t.K0, t.gamma0) == pair]
        assert {t.rate for t in met} == set(config.grid) and {t.gamma1 for t in met} == set(config.gamma1s)
        assert len(met) == 4


@pytest.mark.parametrize("name", paper.PRESETS)
def test_every_inner_momentum_of_a_preset_is_tried(name):
    config = presets.preset(name)
    assert {(t.K0, t.gamma0) for t in config.tries(METHODS["dp-psasc-star"])} == set(config.inner)


def test_a_choice_tells_itself_and_comes_back():
    choice = Choice(rate=1.2, gamma1=0.1, K0=2, gamma0=0.5)
    assert choice.told() == "1.2, γ1 0.1, K0 2, γ0 0.5" and Choice(rate=16).told() == "16"
    assert Choice.of(json.loads(json.dumps(choice.to_dict()))) == choice
    assert Choice(rate=0.5).to_dict() == {"rate": 0.5}


# N, B, epochs, r, C, ε, δ, s and the accuracies of DP-SGD, Auto-S, PSAC, PSASC, PSASC*, as the paper prints them
TABLES = {
    "mnist": (60_000, 512, 20, 1e-4, 0.3, 3, 1e-5, 0.9, (97.35, 97.95, 98.11, 98.37, 98.65)),
    "fashion-mnist": (40_000, 512, 60, 1e-3, 0.25, 9, 1e-5, 0.55, (85.59, 86.15, 86.36, 86.91, 87.22)),
    "cifar10-simclr": (50_000, 1024, 40, 1e-4, 0.1, 2, 1e-5, 0.8, (92.24, 92.65, 92.85, 93.12, 93.36)),
    "celeba-male": (162_079, 512, 10, 1e-4, 0.2, 8, 5e-6, 0.45, (94.79, 95.12, 95.2, 95.36, 95.61)),
    "imagenette": (9_464, 256, 50, 0.01, 0.2, 8, 1e-4, 0.8, (63.61, 63.87, 64.21, 65.26, 66.79)),
}


def test_presets_have_the_papers_settings():
    assert tuple(TABLES) == paper.PRESETS
    for name, (size, *wanted, accuracies) in TABLES.items():
        c = presets.preset(name)
        assert [c.batch, c.epochs, c.r, c.C, c.epsilon, c.delta, c.s] == wanted and paper.SIZES[name] == size
        assert tuple(paper.ACCURACY[name].values()) == accuracies
        assert list(paper.ACCURACY[name]) == ["dp-sgd", "auto-s", "dp-psac", "dp-psasc", "dp-psasc-star"]
    assert presets.preset("fashion-mnist").train_size == 40_000


@pytest.mark.parametrize(("name", "tight", "by_rdp"), [("mnist", 0.8917, 0.9378), ("imagenette", 0.9114, 0.9577)])
def test_the_papers_settings_come_to_known_noise(name, tight, by_rdp):
    (one,) = paper.settings([presets.preset(name)])
    assert (one.noise_multiplier, one.noise_multiplier_rdp) == pytest.approx((tight, by_rdp), abs=2e-4)


def test_a_control_searches_for_the_method_it_follows():
    assert presets.searched(["psac-r-over-s", "dp-sgd", "dp-psasc"]) == ["dp-psasc", "dp-sgd"]


# -- runs ------------------------------------------------------------------------------------------------------


def job(method="dp-psasc", rate=0.1, **changes):
    settings = {"config": TINY, "method": method, "seed": 3, "choice": Choice(rate=rate), "noise_multiplier": 1.0}
    return runner.Job(**settings | changes)


def test_a_run_repeats_exactly_and_spends_what_it_says():
    asked = job(noise_multiplier=runner.calibrate(TINY))
    seen = []
    one, other = runner.run(asked, seen.append), runner.run(asked)
    assert one.curves == other.curves and one.accuracy == one.curves["accuracy"][-1]
    assert one.epsilon == pytest.approx(TINY.epsilon, rel=1e-3) and one.epsilon <= TINY.epsilon
    before, (first, last) = [p for p in seen if p.epoch == 0], [p for p in seen if p.epoch > 0]
    assert [p.phase for p in (before[0], before[-1])] == ["checking", None] and {p.step for p in before} == {0}
    assert (first.epoch, last.epoch) == (1, 2) and last.step == last.steps == one.plan["steps"]
    assert first.epsilon() < last.epsilon() == pytest.approx(one.epsilon)
    assert one.cold_seconds > 0 and one.seconds > 0
    assert (one.data["train"], one.data["test"], one.data["name"]) == (1437, 360, "digits")


def test_diagnostics_are_off_unless_asked_for_and_say_that_they_are_not_private():
    assert not any(presets.preset(name).diagnostics for name in presets.PRESETS)
    silent = runner.run(job(config=TINY.replace(diagnostics=False)))
    loud = runner.run(job())
    assert silent.diagnostics is None
    assert loud.diagnostics["not_private"] is True and "not private" in loud.diagnostics["note"]
    assert loud.diagnostics["norms"]["epochs"] == [2] and len(loud.diagnostics["mean_weight"]) == TINY.epochs
    assert silent.curves == loud.curves  # looking changes nothing


def test_the_search_takes_no_diagnostics(folder):
    assert all(r.diagnostics is None for r in records.load(folder / "search"))


def test_without_privacy_there_is_no_epsilon_and_no_diagnostics(found):
    plain = [r for r in found if r.method == "non-private"]
    assert plain and all(r.epsilon is None and r.plan is None and r.diagnostics is None for r in plain)
    assert all("Not private" in r.statement for r in plain)


def by_hand(config, choice, seed):
    """Cosines of a run's steps from what the weights did: g_k = M_k - (1 - γ1)·M_(k-1), M_k = (w_k - w_(k+1))/η."""
    data = runner.load(config, "final")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = models.MODELS[config.model]((1, 8, 8), 10)
    rate = choice.rate * config.s / config.C * choice.gamma1
    sampling = Poisson(size=data.size, batch=config.batch)
    plan = Plan(
        scaling=PSASC(C=config.C, s=config.s, r=config.r), sampling=sampling, epochs=config.epochs,
        noise_multiplier=1.0, momentum=HeavyBall(gamma1=choice.gamma1),
    )  # fmt: skip
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=rate), plan, seed=seed)
    draws, cosines, smoothed, velocity = sampling.draws(Key(seed).generator("sampling")), [], [], 0.0
    for batch in private.batches(TensorDataset(data.train_images, data.train_labels)):
        before = copy.deepcopy(model)
        private.step(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
        chosen = torch.from_numpy(next(draws))
        nn.functional.cross_entropy(before(data.train_images[chosen]), data.train_labels[chosen]).backward()
        mean = torch.cat([p.grad.flatten() for p in before.parameters()]).double()
        moved = [
            (p - q).detach().flatten().double() for p, q in zip(before.parameters(), model.parameters(), strict=True)
        ]
        last, velocity = velocity, torch.cat(moved) / rate
        cosines.append(torch.cosine_similarity(velocity - (1 - choice.gamma1) * last, mean, dim=0).item())
        smoothed.append(torch.cosine_similarity(velocity, mean, dim=0).item())
    return cosines, smoothed


def test_similarity_is_that_of_a_loop_by_hand():
    """The released gradient is recovered from the velocity: the velocity's own cosines are others."""
    config, choice = TINY.replace(epochs=1), Choice(rate=2.0, gamma1=0.3)
    told = runner.run(job(config=config, choice=choice)).diagnostics["similarity"]
    cosines, smoothed = by_hand(config, choice, 3)
    assert told["steps"] == len(cosines) == sum(told["counts"])
    assert told["mean"] == pytest.approx(np.mean(cosines), abs=1e-4)
    assert abs(np.mean(smoothed) - np.mean(cosines)) > 0.01
    drawn = np.average(told["cosine"], weights=told["counts"])
    assert drawn == pytest.approx(told["mean"], abs=told["bin_width"] / 2)


@pytest.mark.parametrize("gamma1", [0.2, 1.0])
def test_released_takes_the_outer_momentum_out(gamma1):
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    released = diagnostics.Released(optimizer, {"w": parameter}, gamma1)
    velocity = torch.zeros(3)
    for step in range(4):
        gradient = torch.tensor([1.0, -2.0, 3.0]) * (step + 1)
        velocity = (1 - gamma1) * velocity + gradient
        parameter.grad = velocity.clone()
        optimizer.step()
        torch.testing.assert_close(released.gradient["w"], gradient)


def test_cosine_is_over_all_parameters_together():
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    other = {"a": torch.tensor([1.0]), "b": torch.tensor([[5.0, 0.0]])}
    assert diagnostics.cosine(one, other).item() == pytest.approx(3 / (5 * 26**0.5))
    zero = {name: torch.zeros_like(value) for name, value in one.items()}
    assert torch.isnan(diagnostics.cosine(one, zero))
    kept = diagnostics.Similarity()
    assert kept.to_dict() is None
    kept.add(one, zero)  # a batch without samples
    assert kept.to_dict() is None
    kept.add(one, one)
    assert kept.to_dict()["mean"] == pytest.approx(1) and kept.to_dict()["steps"] == 1


def test_evaluation_in_parts_is_evaluation_at_once(monkeypatch):
    data, model = digits(), models.digits_cnn()
    whole = runner.evaluate(model, data, TINY)
    monkeypatch.setattr(runner, "_EVALUATED", 7 * 64)
    assert runner.evaluate(model, data, TINY) == pytest.approx(whole)
    assert model.training


def test_bf16_is_for_the_gpu_alone(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match="'precision' parameter of Config must be 'float32' where torch finds no GPU"):
        runner.run(job(config=TINY.replace(epochs=1, precision="bf16")))


def test_pixels_are_shifted_and_divided_by_public_constants():
    config = TINY.replace(normalize=(0.5, 0.25))
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(runner.prepared(pixels, config), torch.tensor([-2.0, -1.2, 2.0]))
    assert runner.prepared(torch.tensor([0.3]), TINY).item() == pytest.approx(0.3)


def test_the_bar_says_what_a_run_waits_for(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=shown, force_terminal=True, color_system=None))
    waiting = {"step": 0, "steps": 20, "epoch": 0, "epochs": 2, "loss": float("nan"), "plan": None, "delta": 1e-5}
    with display.run_bar("a run", quiet=False) as show:
        show(runner.Progress(**waiting, phase="compiling"))
        assert re.search(r"a run.* 0/20 compiling", shown.getvalue())
        show(runner.Progress(**waiting))
        assert re.search(r"a run.* 0/20 training", shown.getvalue())
        show(runner.Progress(**waiting | {"step": 10, "epoch": 1, "loss": 0.5}))
    assert re.search(r"a run.* 10/20 loss 0.500", shown.getvalue())


def test_lines_say_what_a_run_waits_for_where_there_is_no_terminal(capsys):
    waiting = {"step": 0, "steps": 20, "epoch": 0, "epochs": 2, "loss": float("nan"), "plan": None, "delta": 1e-5}
    with display.run_bar("a run", quiet=False) as show:
        for phase in ("tracing", "compiling", None):
            show(runner.Progress(**waiting, phase=phase))
        assert capsys.readouterr() == ("", "tracing …\ncompiling …\n")
        show(runner.Progress(**waiting | {"step": 10, "epoch": 1, "loss": 0.5}))
        assert capsys.readouterr() == ("", "[epoch 1/2] a run: training loss 0.500\n")
    with display.run_bar("a run", quiet=True) as show:
        show(runner.Progress(**waiting, phase="compiling"))
        show(runner.Progress(**waiting | {"step": 10, "epoch": 1, "loss": 0.5}))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [1, 3, 9, 10, 11, 24, 60_000])
def test_a_line_is_due_at_each_tenth_and_at_the_end(total):
    due = terminal.tenths()
    told = [done for done in range(total + 1) if due(done, total)]
    assert len(told) == min(total, 10) and told[-1] == total
    assert all(after - before <= total / 10 + 1 for before, after in itertools.pairwise([0, *told]))


def test_plain_runs_see_the_batches_of_private_ones():
    """Both train on the very same draws: at learning rate ~0 their losses agree epoch by epoch."""
    private, plain = (runner.run(job(name, rate=1e-30, seed=1)) for name in ("dp-sgd", "non-private"))
    means = [np.average(r.curves["train_loss"]) for r in (private, plain)]
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_norms_are_counted_in_their_decades():
    kept = diagnostics.Norms()
    kept.add(
        7, [torch.tensor([0.0, 1e-30, 1.0, 1.0, 1e9, float("inf")])], [torch.tensor([2.0, 2.0, 0.5, 0.7, 0.1, 0.0])]
    )
    told = kept.to_dict()
    assert sum(told["counts"]) == 5 and told["not_finite"] == 1 and told["epochs"] == [7]
    place = int(np.argmin(np.abs(np.array(told["log10_norm"]))))
    assert told["counts"][place] == 2 and told["mean_weight"][place] == pytest.approx(0.6)
    assert diagnostics.Norms().to_dict() is None


# -- records ---------------------------------------------------------------------------------------------------


def test_records_round_trip(found, tmp_path):
    path = found[0].save(tmp_path)
    assert records.read(path) == json_of(found[0]) and records.load(tmp_path) == [found[0]]
    assert not list(tmp_path.glob("*.tmp")) and not list(tmp_path.glob(".*"))


def json_of(record):
    return records.Record(**json.loads(json.dumps(record.to_dict())))


def test_records_say_where_they_come_from(found):
    for record in found:
        assert set(record.versions) >= {"python", "torch", "dpscale", "dp-accounting", "platform", "cpu"}
        assert (record.command == "tiny" and record.commit is None) or re.match(r"[0-9a-f]{40}", record.commit)
        assert "not counted in epsilon" in record.search["note"]
        assert [t["choice"]["rate"] for t in record.search["tries"]] == list(TINY.grid)


def test_an_empty_or_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\. Run 'dpscale compare digits --out"):
        records.load(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        records.load(tmp_path / "none")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', "\udcff"])
def test_a_corrupt_record_is_named_with_the_next_action(tmp_path, found, text):
    content = text.encode("utf-8", "surrogateescape")
    broken = tmp_path / "dp-sgd-seed0-broken.json"
    broken.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.json is not .* Delete it and run the same command again"):
        records.load(tmp_path)
    broken.unlink()
    (tmp_path / "broken.jsonl").write_bytes(json.dumps(found[0].to_dict()).encode() + b"\n" + content + b"\n")
    with pytest.raises(ValueError, match=r"Line 2 of .*broken\.jsonl is not .* Delete it and pack the records again"):
        records.load(tmp_path)


@pytest.mark.parametrize("place", [".", "search"])
def test_a_broken_record_is_found_before_anything_is_trained(tmp_path, monkeypatch, place):
    monkeypatch.setattr(queue, "run", lambda job, *_: pytest.fail("the work began"))
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "auto-s-seed0-broken.json").write_text("{")
    with pytest.raises(ValueError, match=r"broken\.json is not"):
        compare.compare(TINY, presets.methods("dp-sgd"), [0], tmp_path, workers=1)


def test_files_that_are_no_records_are_left_alone(folder, found, tmp_path):
    shutil.copytree(folder, tmp_path / "digits")
    (tmp_path / "digits" / "notes.json").write_text('{"a": 1}')
    assert len(records.load(tmp_path / "digits")) == len(found)


def key_of(record):
    return record.key


def test_packed_records_are_the_records(folder, tmp_path):
    path = tmp_path / "results" / "digits.jsonl"
    count = records.pack(folder, path)
    packed = records.load(path)
    both = [*records.load(folder), *records.load(folder / "search")]
    assert sorted(packed, key=key_of) == sorted(both, key=key_of) and count == len(both) == 14
    places = [(r.role, r.method, r.seed, r.rate) for r in packed]
    assert places == sorted(places)  # whatever their keys are
    assert records.load(path.parent) == packed and len(path.read_text(encoding="utf-8").splitlines()) == 14
    assert records.pack(path, tmp_path / "again.jsonl") == 14
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()
    assert summary.select(packed) == summary.select(records.load(folder))  # those of the search are no other settings


def test_a_search_is_packed_before_any_run_has_followed(folder, tmp_path):
    under_way, results = tmp_path / "runs" / "digits", tmp_path / "results"
    shutil.copytree(folder / "search", under_way / "search")
    commands.report(under_way.parent, pack=results)
    packed = records.load(results / "digits.jsonl")
    assert sorted(packed, key=key_of) == sorted(records.load(folder / "search"), key=key_of)
    (one,) = paper.load(results)
    assert one.preset == "digits" and not one.records and not one.rows
    records.pack(folder, results / "digits.jsonl")
    again = tmp_path / "digits.jsonl"
    records.pack(folder, again)
    assert again.read_bytes() == (results / "digits.jsonl").read_bytes()  # whatever came first
    (tmp_path / "empty" / "search").mkdir(parents=True)
    assert records.pack(tmp_path / "empty", tmp_path / "none.jsonl") == 0 and not (tmp_path / "none.jsonl").exists()


def test_an_empty_file_of_records_is_told(tmp_path):
    (tmp_path / "digits.jsonl").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match=r"The file .*digits\.jsonl has no records"):
        paper.load(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write(tmp_path / "r.json", "text")
    assert list(tmp_path.iterdir()) == []


# -- comparison ------------------------------------------------------------------------------------------------


def test_a_second_comparison_repeats_nothing(folder, monkeypatch):
    monkeypatch.setattr(queue, "run", lambda job, *_: pytest.fail(f"{job.method} was run again"))
    monkeypatch.setattr(queue, "calibrate", lambda config: pytest.fail("calibrated again"))
    chosen = presets.methods("dp-sgd,dp-psasc")
    again = compare.compare(TINY, chosen, [0, 1], folder, workers=1, deadline=-1.0)
    found = [(r.method, r.seed) for r in again.records]
    assert found == [("dp-sgd", 0), ("dp-sgd", 1), ("dp-psasc", 0), ("dp-psasc", 1)] and again.left == 0


def test_what_is_packed_beside_the_folder_is_not_repeated(folder, tmp_path, monkeypatch):
    records.pack(folder, tmp_path / "digits.jsonl")
    monkeypatch.setattr(queue, "run", lambda job, *_: pytest.fail(f"{job.method} was run again"))
    again = compare.compare(TINY, presets.methods("dp-sgd,dp-psasc"), [0, 1], tmp_path / "digits", workers=1)
    assert again.left == 0 and [r.seed for r in again.records] == [0, 1, 0, 1]


def test_a_try_may_end_early_with_the_noise_of_the_whole_run(tmp_path):
    config = TINY.replace(epochs=3, search_epochs=1, grid=(0.5,), diagnostics=False)
    done = compare.compare(config, presets.methods("dp-sgd"), [0], tmp_path, workers=1).records[0]
    tried = records.load(tmp_path / "search")[0]
    assert (tried.curves["epoch"], done.curves["epoch"]) == ([1], [1, 2, 3])
    assert tried.noise_multiplier == done.noise_multiplier == pytest.approx(runner.calibrate(config))
    assert done.search["epochs"] == 1 and "one run per try of 1 epoch," in report.page([_experiment(done)])
    assert config.replace(search_epochs=9).trained("search") == 3  # never longer than the run itself


def _experiment(*found):
    return paper.Experiment(preset="digits", records=list(found), rows=summary.summarize(found), left=0)


def test_the_average_of_the_weights_is_what_is_measured(monkeypatch):
    """A moving average of what every step released, by hand, gives the recorded accuracy and loss.

    It warms up: after step t it keeps t/(t + 10) of itself, as long as that is less than it may.
    """
    config = TINY.replace(epochs=1, diagnostics=False, average=0.6)
    job = runner.Job(
        config=config, method="dp-sgd", seed=0, choice=presets.Choice(rate=1.0, gamma1=0.1), noise_multiplier=1.0
    )
    average, kept, trained = [], [], runner._train_private

    def by_hand(model, *rest):
        average[:] = [p.detach().clone() for p in model.parameters()]
        for number, step in enumerate(trained(model, *rest), start=1):
            kept.append(min(0.6, number / (number + 10)))
            for a, p in zip(average, model.parameters(), strict=True):
                a.copy_(kept[-1] * a + (1 - kept[-1]) * p.detach())
            yield step

    monkeypatch.setattr(runner, "_train_private", by_hand)
    found = runner.run(job)
    data = runner.load(config, "final")
    model = models.MODELS[config.model](tuple(data.train_images.shape[1:]), data.classes)
    for p, a in zip(model.parameters(), average, strict=True):
        p.data = a
    accuracy, loss = runner.evaluate(model, data, config)
    assert found.accuracy == accuracy and found.loss == pytest.approx(loss, rel=1e-5)
    assert kept[0] == 1 / 11 and kept[-1] == 0.6  # both of its ways were taken
    plain = runner.run(dataclasses.replace(job, config=config.replace(average=0.0)))
    assert plain.loss != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("method", ["dp-sgd", "non-private"])
@pytest.mark.parametrize(
    ("schedule", "left"),
    [
        ("constant", lambda over: 1.0),
        ("linear", lambda over: 1 - over),
        ("cosine", lambda over: math.cos(math.pi * over / 2) ** 2),
    ],
)
def test_the_learning_rate_falls_over_a_whole_run(schedule, left, method, monkeypatch):
    """Full at the first step, next to nothing at the last; a try, which is shorter, goes all the way too."""
    config = TINY.replace(epochs=3, search_epochs=2, diagnostics=False, schedule=schedule)
    rates, make = [], runner._optimizer

    def watched(*args):
        optimizer = make(*args)
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer

    monkeypatch.setattr(runner, "_optimizer", watched)
    for role, epochs in (("final", 3), ("search", 2)):
        rates.clear()
        asked = dataclasses.replace(job(method, role=role), config=config)
        runner.run(asked)
        steps = runner._sampling(config, runner.load(config, role).size).steps(epochs)
        assert rates == pytest.approx([asked.learning_rate * left(k / steps) for k in range(steps)])


def test_a_long_run_is_measured_now_and_then_and_at_its_end(monkeypatch):
    monkeypatch.setattr(runner, "_MEASURED", 2)
    config = TINY.replace(epochs=5, diagnostics=False)
    runs = ((0, "final"), (1, "final"), (0, "search"))
    final, other, tried = (runner.run(job(config=config, seed=seed, role=role)) for seed, role in runs)
    measured = [
        epoch for epoch, a in zip(final.curves["epoch"], final.curves["accuracy"], strict=True) if a is not None
    ]
    assert measured == [3, 5] and final.accuracy == final.curves["accuracy"][-1]
    with monkeypatch.context() as larger:
        larger.setattr(runner, "large", lambda name: name == config.model)
        seldom = runner.run(job(config=config, seed=0, role="final")).curves["accuracy"]
    assert seldom == [None] * 4 + [final.accuracy]
    assert [a is None for a in tried.curves["accuracy"]] == [True] * 4 + [False] and tried.accuracy > 0
    whole = dataclasses.replace(other, curves=other.curves | {"accuracy": [0.1, 0.2, 0.3, 0.4, 0.5]})  # of an older run
    for shown, told in (([final, whole], "2 of the 5 epochs, the last among them"), ([whole], "every epoch")):
        assert figures.pictures(shown)[0].caption.startswith(f"Test accuracy after {told}; the band")
    once = dataclasses.replace(other, curves=other.curves | {"accuracy": [None] * 4 + [0.5]})
    assert figures.pictures([once])[0].caption.startswith("Test accuracy after the last epoch; the band")
    told = report._measured([final, once])
    assert told == "Curves are measured up to 2 times a run on the test data and choose nothing."
    assert "measured once a run" in report._measured([once])
    (line,) = figures.accuracy_curves([final, whole]).axes[0].lines
    assert line.get_xdata().tolist() == [3, 5]
    assert line.get_ydata() == pytest.approx([50 * (final.curves["accuracy"][2] + 0.3), 50 * (final.accuracy + 0.5)])


@pytest.mark.parametrize(("epochs", "compiled"), [(2, False), (250, True)])
def test_long_runs_are_compiled_on_the_cpu_too(epochs, compiled, monkeypatch):
    asked = []
    monkeypatch.setattr(runner, "privatize", lambda *_, **options: asked.append(options["compile"]))
    with pytest.raises(AttributeError):  # nothing to train with
        runner.run(job("dp-sgd", config=TINY.replace(epochs=epochs)))
    assert asked == [compiled]


def test_a_report_says_what_is_out_of_the_ordinary(folder, found):
    said = report.settings(_experiment(*found))
    assert said.endswith(f"expected batch {TINY.batch}.")
    others = {"optimizer": "nadam", "schedule": "cosine", "average": 0.9}
    changed = [dataclasses.replace(r, config=r.config | others) for r in found]
    told = "NAdam, a learning rate that falls to 0 (cosine), measured at the moving average of the weights"
    assert told in report.settings(_experiment(*changed))


def test_a_report_has_what_is_packed_and_what_was_run_since(folder, tmp_path):
    """Records packed beside a folder and loose ones in it are one experiment, and none is counted twice."""
    records.pack(folder, tmp_path / "digits.jsonl")
    out = tmp_path / "digits"
    since = compare.compare(TINY, presets.methods("dp-sgd"), [0, 1, 2], out, workers=1).records
    assert [path.name.split("-seed")[1][0] for path in out.glob("*.json")] == ["2"]
    since[0].save(out)  # now in both places
    (one,) = paper.load(tmp_path)
    assert sorted((r.method, r.seed) for r in one.records if r.method == "dp-sgd") == [("dp-sgd", k) for k in range(3)]
    assert len(one.records) == 9
    assert records.pack(out, tmp_path / "again.jsonl") == 15
    keys = [record.key for record in records.load(tmp_path / "again.jsonl")]
    assert len(set(keys)) == len(keys) == 15


def test_a_deadline_in_the_past_begins_nothing(tmp_path):
    found = compare.compare(TINY, presets.methods("dp-sgd,dp-psasc"), [0, 1], tmp_path, workers=1, deadline=-1.0)
    assert found == compare.Compared(records=[], left=8) and not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(("runs", "final"), [(1, 0), (5, 1)])
def test_after_a_deadline_the_same_call_runs_the_rest_and_nothing_twice(tmp_path, monkeypatch, runs, final):
    config, methods = TINY.replace(epochs=1, diagnostics=False), presets.methods("dp-sgd,psac-r-over-s")
    ran = []
    monkeypatch.setattr(queue, "run", lambda job, *_: ran.append(job) or runner.run(job))
    monkeypatch.setattr(queue, "time", SimpleNamespace(monotonic=lambda: len(ran)))  # a run takes a second
    cut = compare.compare(config, methods, [0], tmp_path, workers=1, deadline=runs)
    assert len(ran) == runs and (len(cut.records), cut.left) == (final, 6 - runs)
    whole = compare.compare(config, methods, [0], tmp_path, workers=1)
    assert len(ran) == 6 and len({(j.method, j.role, j.choice) for j in ran}) == 6
    assert whole.left == 0 and [r.method for r in whole.records] == ["dp-sgd", "psac-r-over-s"]


def test_long_runs_are_begun_first_seed_by_seed(found, tmp_path, monkeypatch):
    """Else the last of many runs would be one of several gradients a step, with nothing left beside it."""
    methods, ran = presets.methods("dp-sgd,dp-psasc,dp-psasc-star"), []
    monkeypatch.setattr(queue, "calibrate", lambda config: 1.0)
    monkeypatch.setattr(queue, "run", lambda job, *_: ran.append(job) or record_of(job, found[0]))
    done = compare.compare(TINY.replace(inner=((2, 0.5), (1, 0.5))), methods, [0, 1], tmp_path, workers=1).records
    tries = [(gpu.points(job), job.method) for job in ran if job.role == "search"]
    final = [(job.seed, job.method) for job in ran if job.role == "final"]
    assert tries == [(3, "dp-psasc-star"), (2, "dp-psasc-star"), *[(1, "dp-sgd")] * 2, *[(1, "dp-psasc")] * 2]
    assert final == [(seed, name) for seed in (0, 1) for name in ("dp-psasc-star", "dp-sgd", "dp-psasc")]
    assert [record.method for record in done][::2] == ["dp-sgd", "dp-psasc", "dp-psasc-star"]


def record_of(job, like):
    """The record of a run that was not done."""
    asked = {"config": job.config.to_dict(), "method": job.method, "role": job.role, "seed": job.seed}
    return dataclasses.replace(like, **asked, choice=job.choice.to_dict())


def key(config=TINY, role="final", method="dp-sgd", seed=0, version="1", **choice):
    return records.key(config.to_dict(), role, method, seed, {"rate": 0.1, **choice}, version)


def test_other_settings_are_run_anew():
    others = (
        key(TINY.replace(epochs=3)), key(TINY.replace(epsilon=2.0)), key(TINY.replace(encoder="resnet50-imagenet")),
        key(TINY.replace(model="paper_cnn")), key(TINY.replace(diagnostics=False)), key(rate=0.2), key(gamma1=0.3),
        key(seed=1), key(method="auto-s"), key(version="2"), key(role="search"),
    )  # fmt: skip
    assert len({key(), *others}) == len(others) + 1


def test_how_a_choice_was_searched_is_no_part_of_a_run():
    assert {key(TINY.at_rate(0.1)), key(TINY.replace(grid=(9.0,))), key(TINY.replace(gamma1s=(0.5,)))} == {key()}
    assert {key(TINY.replace(inner=((1, 0.5),))), key(TINY.replace(note="x")), key(TINY.replace(held_out=0.3))} == {
        key()
    }
    assert key(TINY.replace(held_out=0.3), role="search") != key(role="search")  # it trains on other samples
    assert key(TINY.replace(search_epochs=1)) == key() != key(TINY.replace(average=0.9))
    assert key(TINY.replace(micro_batch=16)) == key() != key(TINY.replace(schedule="cosine"))
    before = {n: v for n, v in TINY.to_dict().items() if n not in ("average", "schedule")}  # as older records have it
    assert records.key(before, "final", "dp-sgd", 0, {"rate": 0.1}, "1") == key()
    assert key(TINY.replace(search_epochs=1), role="search") != key(role="search")


def test_the_search_treats_methods_alike_and_picks_the_best(folder, found):
    tried = records.load(folder / "search")
    assert all(r.role == "search" and r.epsilon is None and r.seed == compare.SEARCH_SEED for r in tried)
    for method in ("non-private", "dp-sgd", "dp-psasc"):
        runs = [r for r in tried if r.method == method]
        assert sorted(r.rate for r in runs) == pytest.approx(list(TINY.grid))
        best = max(runs, key=lambda r: (r.accuracy, -r.loss))
        assert {r.rate for r in found if r.method == method} == {best.rate}
    assert not [r for r in tried if r.method.startswith("psac-")]


def test_two_processes_give_what_one_gives(tmp_path):
    config = TINY.at_rate(0.1).replace(epochs=1)
    one = compare.compare(config, presets.methods("dp-sgd"), [0, 1], tmp_path / "one", workers=1)
    two = compare.compare(config, presets.methods("dp-sgd"), [0, 1], tmp_path / "two", workers=2)
    assert [r.curves for r in one.records] == [r.curves for r in two.records]


def test_a_step_is_compiled_once_for_all_runs_that_take_it():
    jobs = [
        job("non-private"),
        job("dp-sgd"),
        job("dp-sgd", role="search", choice=Choice(rate=0.3, gamma1=0.3)),  # another rate and momentum, the same step
        job("dp-psasc"),
        job("psac-lr-over-s"),
        job("dp-psac"),  # the same formula, with s = 1
        job("psac-r-over-s"),  # another constant
        job("auto-s"),
        job("dp-psasc-star", choice=Choice(rate=0.1, K0=1, gamma0=0.5)),
        job("dp-psasc-star", choice=Choice(rate=0.1, K0=1, gamma0=0.9)),  # coefficients are no part of it
        job("dp-psasc-star", choice=Choice(rate=0.1, K0=2, gamma0=0.9)),
    ]
    chosen = gpu.kinds(jobs)
    assert [gpu.step_of(one)[1] for one in chosen] == [3, 2, 1, 1, 1, 1]
    assert len({gpu.step_of(one)[0] for one in chosen}) == 4  # plain steps are compiled too
    assert len({gpu.step_of(one) for one in jobs}) == len(chosen)


def test_nobody_listens_once_the_bars_of_all_experiments_are_gone(found, capsys):
    with display.experiments_bar(quiet=False) as show:
        with phase("compiling"):
            pass
        show("digits").begun(compare.Begun(job=job(), done=0, total=2))
        show("digits").finished(compare.Finished(record=found[0], done=1, total=2))
    assert "compiling" in capsys.readouterr().err
    with phase("compiling"):
        pass
    assert "compiling" not in capsys.readouterr().err


def test_a_bar_says_what_has_begun_and_of_how_many(monkeypatch):
    """Of runs that take minutes, the first should be seen before it is done."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=120)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    with display.comparison_bar("compare digits", quiet=False) as shown:
        shown.begun(compare.Begun(job=job("dp-psasc-star", role="search"), done=3, total=40))
        assert "3/40 DP-PSASC*, search of rates" in screen.getvalue()
        shown.begun(compare.Begun(job=job("auto-s", seed=2), done=4, total=40))
        assert "4/40 Auto-S, seed 2" in screen.getvalue()


def test_every_run_that_begins_is_told_and_none_that_is_there(tmp_path):
    config, methods, begun = TINY.replace(epochs=1, diagnostics=False), presets.methods("dp-sgd"), []
    for seeds in ([0], [0, 1]):
        compare.compare(config, methods, seeds, tmp_path, workers=1, on_begun=begun.append)
    told = [(now.job.role, now.job.seed, now.done, now.total) for now in begun]
    assert told == [
        ("search", 1000, 0, 3), ("search", 1000, 1, 3), ("final", 0, 2, 3), ("final", 1, 3, 4),
    ]  # fmt: skip


def test_compilations_go_side_by_side_and_a_failure_is_told(monkeypatch, caplog):
    asked = []

    class Pool:
        def __init__(self, places, *_, initializer, initargs):
            asked.append((places, initargs))

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

        def submit(self, function, one):
            assert function is runner.rehearse
            asked.append(one.method)
            done = Future()
            done.set_exception(RuntimeError("no memory"))
            return done

    monkeypatch.setattr(processes, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(gpu, "_room", lambda config: 100)
    monkeypatch.setattr(gpu.os, "cpu_count", lambda: 16)
    told = []
    with listening(told.append):
        gpu.compile_ahead([job("dp-sgd"), job("dp-psac")])
    assert asked == [(2, (8,)), "dp-sgd", "dp-psac"] and told == ["compiling", None]
    assert caplog.text.count("not compiled ahead: no memory") == 2
    gpu.compile_ahead([])
    assert len(asked) == 3


def test_on_a_gpu_steps_are_compiled_before_runs_that_share_them(tmp_path, monkeypatch):
    ahead = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(queue, "compile_ahead", ahead.append)
    config = TINY.replace(epochs=1, grid=(0.1,))
    done = compare.compare(config, presets.methods("dp-sgd,psac-r-over-s"), [0], tmp_path, workers=2)
    assert [[one.method for one in jobs] for jobs in ahead] == [["dp-sgd", "dp-psasc"], []] and done.left == 0
    monkeypatch.undo()
    for one in ahead[0]:
        runner.rehearse(one)  # as they were asked for, they can be


def test_a_rehearsal_takes_one_step_and_leaves_nothing(monkeypatch):
    steps = []
    taken = Private.step
    monkeypatch.setattr(Private, "step", lambda self, *rest: steps.append(taken(self, *rest)) or steps[-1])
    runner.rehearse(job("dp-psasc-star", role="search", choice=Choice(rate=0.1, K0=1, gamma0=0.5)))
    assert len(steps) == 1


def test_plain_tries_on_a_gpu_have_the_shape_of_final_runs():
    whole, part = (SimpleNamespace(train_labels=SimpleNamespace(is_cuda=True), size=n) for n in (1437, 1150))
    final = Sizes.of(Poisson(size=1437, batch=64)).rows[-1]
    assert runner._plain_rows(TINY, whole) == runner._plain_rows(TINY, part) == final
    assert final > Sizes.of(Poisson(size=1150, batch=51)).rows[-1]
    assert runner._plain_rows(TINY.replace(micro_batch=16), whole) == 16
    part.train_labels.is_cuda = False
    assert runner._plain_rows(TINY, part) is None


# -- summary ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_interval_is_students(n):
    values = np.random.default_rng(n).normal(0.9, 0.02, n)
    mean, half = summary.interval(values.tolist())
    low, high = stats.t.interval(0.95, n - 1, loc=values.mean(), scale=stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-9)
    assert half != pytest.approx(1.96 * stats.sem(values), rel=1e-2)  # the normal quantile would be too narrow


def test_one_seed_has_no_interval():
    assert summary.interval([0.9]) == (0.9, None)


def row(title, accuracy, half_width, epsilon=3.0):
    blank = dict.fromkeys((f.name for f in dataclasses.fields(summary.Row)), None) | {"test_size": 360}
    return summary.Row(**{**blank, "title": title, "accuracy": accuracy, "half_width": half_width, "epsilon": epsilon})


def test_the_verdict_calls_nobody_better_within_intervals():
    rows = [row("N", 0.99, 0.001, None), row("A", 0.90, 0.02), row("B", 0.93, 0.015)]
    assert summary.verdict(rows).startswith("No two of the 2 private methods differ")
    rows.append(row("C", 0.80, 0.01))
    assert "A and B are above C." in summary.verdict(rows)
    rows.append(row("D", 0.83, 0.005))
    assert "A and B are above C and D; D is above C." in summary.verdict(rows)
    assert "no interval" in summary.verdict([row("A", 0.9, None), row("B", 0.5, 0.1)])
    rows.append(row("E", 0.99, None))  # which has begun only
    assert "A and B are above C and D; D is above C." in summary.verdict(rows)
    assert summary.verdict(rows).endswith("With a single seed E has no interval yet.")


def test_the_verdict_looks_seed_by_seed_too(found):
    pair = [r for r in found if r.method in ("dp-sgd", "dp-psasc")]
    moved = [dataclasses.replace(r, accuracy=0.9 + 0.05 * r.seed - 0.01 * (r.method == "dp-sgd")) for r in pair]
    rows = summary.summarize(moved)
    assert rows[0].difference == pytest.approx(-0.01) and rows[1].difference is None
    told = summary.verdict(rows)
    assert told.startswith("No two of the 2 private methods differ") and "DP-SGD (−1.0 ± 0.3 points)" in told


def test_a_wider_search_is_told_of_runs_that_it_chose_again(tmp_path):
    config, methods = TINY.replace(tune=True, epochs=1), presets.methods("dp-sgd")
    for grid in ((0.1, 0.8), (0.1, 0.8, 400.0)):
        done = compare.compare(config.replace(grid=grid), methods, [0], tmp_path, workers=1).records
        kept = [r for r in records.load(tmp_path) if r.role == "final"]
        for (record,) in (done, kept):
            assert [each["choice"]["rate"] for each in record.search["tries"]] == list(grid)
            assert record.choice["rate"] == 0.8
    assert "might be better" not in summary.verdict(summary.summarize(done))


def test_the_tries_of_two_searches_count_together(tmp_path):
    config, methods = TINY.replace(tune=True, epochs=1), presets.methods("dp-sgd")
    for grid in ((0.1, 0.8), (0.8, 400.0)):
        (done,) = compare.compare(config.replace(grid=grid), methods, [0], tmp_path, workers=1).records
    assert done.choice["rate"] == 0.8 and [each["choice"]["rate"] for each in done.search["tries"]] == [0.1, 0.8, 400.0]
    assert "might be better" not in summary.verdict(summary.summarize([done]))


def test_the_verdict_says_where_a_search_stopped_at_the_end_of_its_grid(found):
    def searched(record, rate, of=None, rates=(0.1, 0.2, 0.4)):
        tries = [{"choice": {"rate": tried}, "accuracy": 0.9} for tried in rates]
        search = {"searched_for": of or record.method, "tries": tries, "chosen": {"rate": rate}}
        return dataclasses.replace(record, choice={**record.choice, "rate": rate}, search=search)

    a, b = (next(r for r in found if r.method == name) for name in ("dp-sgd", "dp-psasc"))
    told = summary.verdict(summary.summarize([searched(a, 0.4), searched(b, 0.4)]))
    assert told.endswith("and DP-PSASC both chose the largest rate that was tried: a larger one might be better.")
    told = summary.verdict(summary.summarize([searched(a, 0.1), searched(b, 0.2)]))
    assert told.endswith("DP-SGD chose the smallest rate that was tried: a smaller one might be better.")
    unsearched = dataclasses.replace(a, search=None)
    for fine in (searched(a, 0.2), searched(a, 0.4, of="dp-psasc"), searched(a, 0.4, rates=(0.4,)), unsearched):
        assert "might be better" not in summary.verdict(summary.summarize([fine, searched(b, 0.2)]))


def test_as_many_places_as_the_test_set_allows():
    few, many = (dataclasses.replace(row("A", 0.98765, 0.00123), test_size=size) for size in (360, 10_000))
    assert (few.shown, many.shown) == ("98.8% ± 0.1", "98.77% ± 0.12")
    moved = dataclasses.replace(many, difference=-0.00004, difference_half_width=0.001)
    assert moved.shown_difference == "+0.00 ± 0.10"  # never -0.00


def test_settings_are_never_mixed_in_a_table(found):
    other = dataclasses.replace(found[0], config={**found[0].config, "epochs": 9}, created="1999")
    chosen, left_out = summary.select([*found, other, dataclasses.replace(found[0], role="search")])
    assert chosen == found and left_out == 1
    chosen, left_out = summary.select([*found, other], like=[other])
    assert chosen == [other] and left_out == len(found)


def test_the_rates_that_are_asked_for_are_shown_and_not_those_of_a_later_run(found):
    later = [dataclasses.replace(at(record, 9.0), created="2999") for record in found]
    assert summary.select([*found, *later])[0] == later
    assert summary.select([*found, *later], like=found)[0] == found


# -- figures and report ----------------------------------------------------------------------------------------


PLAIN = ["accuracy", "weights"]
PAST_THE_NOISE = ["norms", "similarity-dp-sgd", "mean-weight"]


def without_diagnostics(found):
    return [dataclasses.replace(record, diagnostics=None) for record in found]


def test_pictures_come_as_png_and_as_svg_in_the_pages_colours(found):
    drawn = figures.pictures(found)
    assert [one.name for one in drawn] == [*PLAIN, *PAST_THE_NOISE]
    for one in drawn:
        assert figures.png(one.figure, dpi=40).startswith(b"\x89PNG")
        text = figures.svg(one.figure, "name", "what it shows")
        assert text.startswith("<svg") and "var(--ink)" in text and 'aria-label="what it shows"' in text
        assert "DP-PSASC" in text and not re.search(r'id="(?!name-)', text)


@pytest.mark.parametrize("decades", [0.2, 0.6, 1, 1.7, 2.4, 6])
def test_the_norms_axis_has_labels_that_keep_apart(found, decades):
    kept = diagnostics.Norms()
    kept.add(1, [3e-3 * 10 ** torch.linspace(0, decades, 500)], [torch.ones(500)])
    record = dataclasses.replace(found[-1], diagnostics={"norms": kept.to_dict()})
    figure = figures.norm_distribution([record])
    figure.draw_without_rendering()
    axis = figure.axes[0].xaxis
    low, high = figure.axes[0].get_xlim()
    labels = [
        label.get_window_extent()
        for ticks in (axis.get_major_ticks(), axis.get_minor_ticks())
        for label in (tick.label1 for tick in ticks if low <= tick.get_loc() <= high)
        if label.get_text()
    ]
    assert len(labels) >= 2
    labels.sort(key=lambda box: box.x0)
    assert all(left.x1 + 2 < right.x0 for left, right in itertools.pairwise(labels))


def test_what_looks_past_the_noise_says_so_on_the_picture(found):
    for one in figures.pictures(found):
        marked = [
            figures.NOT_PRIVATE in text
            for text in (figures.svg(one.figure, "n", "d"), figures.svg_file(one.figure, "n"))
        ]
        assert marked == [not one.private] * 2
        assert one.private == (one.name in PLAIN)
    assert [one.name for one in figures.pictures(without_diagnostics(found))] == PLAIN


def test_each_baseline_has_a_panel_with_the_same_axes(found):
    psasc = [r for r in found if r.method == "dp-psasc"]
    others = [
        dataclasses.replace(r, method=name, title=METHODS[name].title)
        for name in ("dp-sgd", "auto-s", "dp-psac", "dp-psasc-star")
        for r in psasc
    ]
    narrow = {"steps": 9, "mean": -0.5, "bin_width": 0.01, "cosine": [-0.495], "counts": [9]}
    others = [
        dataclasses.replace(r, diagnostics={**r.diagnostics, "similarity": narrow}) if r.method == "auto-s" else r
        for r in others
    ]
    drawn = {one.name: one.figure for one in figures.pictures([*psasc, *others])}
    panels = {name: drawn[f"similarity-{name}"] for name in figures.BASELINES}
    assert len({(f.axes[0].get_xlim(), f.axes[0].get_ylim()) for f in panels.values()}) == 1
    for name, figure in panels.items():
        shown = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
        assert shown == {METHODS[name].title, "DP-PSASC", "DP-PSASC*"}


def test_a_panel_loses_no_step(found):
    figure = figures.gradient_similarity(found, "dp-sgd")
    shares = [patch.get_data() for patch in figure.axes[0].patches]
    assert len(shares) == 4  # a filled and a plain one for either method
    for values, edges, _ in shares:
        assert values.sum() == pytest.approx(100) and len(values) + 1 == len(edges)


@pytest.mark.parametrize("half", [0.02, 0.06, 0.085, 0.1, 0.12, 0.5])
def test_cosines_below_a_panel_stay_apart(found, half):
    counts = {"steps": 3, "mean": 0.0, "bin_width": 0.001, "cosine": [-half, 0.0, half], "counts": [1, 1, 1]}
    chosen = [r for r in found if r.diagnostics and r.diagnostics["similarity"]]
    chosen = [dataclasses.replace(r, diagnostics={**r.diagnostics, "similarity": counts}) for r in chosen]
    figure = figures.gradient_similarity(chosen, "dp-sgd")
    figures.png(figure)  # which places the labels
    places = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert len(places) > 2
    assert all(right.x0 - left.x1 > 0.3 * left.width for left, right in itertools.pairwise(places))


def test_mean_weights_are_those_of_the_records(found):
    axes = figures.mean_weights(found).axes[0]
    (line,) = axes.lines  # DP-SGD is no part of it
    wanted = np.mean([r.diagnostics["mean_weight"] for r in found if r.method == "dp-psasc"], axis=0)
    assert line.get_label() == "DP-PSASC" and line.get_ydata() == pytest.approx(wanted)
    assert line.get_xdata().tolist() == [1, 2]


def test_no_two_methods_look_alike():
    assert len({str(figures._look(name)) for name in METHODS}) == len(METHODS)


def test_pictures_are_written_as_files(found, tmp_path):
    paths = figures.write(tmp_path / "figures", figures.pictures(found))
    assert {path.name for path in paths} == {f"{n}.{s}" for n in (*PLAIN, *PAST_THE_NOISE) for s in ("png", "svg")}
    for path in paths:
        content = path.read_bytes()
        assert (
            content.startswith(b"\x89PNG") if path.suffix == ".png" else b"<svg" in content and b"var(--" not in content
        )


# -- report ----------------------------------------------------------------------------------------------------


def alone(text):
    """Whether a page stands by itself: it names no other file and no address."""
    links = re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text)
    return not links and "@import" not in text and "url(http" not in text and not re.search(r"https?://", text)


def test_the_report_stands_by_itself(found, tmp_path):
    for record in found:
        record.save(tmp_path)  # nothing but records: no data, no model, no search folder
    path, rows = report.write(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert alone(text) and "prefers-color-scheme: dark" in text and "@media print" in text
    assert (
        text.count("<svg") == 5
        and text.count("</svg>") == 5
        and "--diagnostics" not in re.sub(r"<pre>.*?</pre>", "", text)
    )
    assert text.count("Not private: measured without noise") == len(PAST_THE_NOISE)
    for r in rows:
        assert r.title in text and r.shown in text
        sigma = "—" if r.noise_multiplier is None else f"{r.noise_multiplier:.3f}"
        assert f'<td data-label="σ">{sigma}</td>' in text
        assert Choice.of(r.choice).told() in text
    assert report.escape(TINY.note) in text and summary.verdict(rows) in text
    assert "not counted in epsilon" in text and "tiny" in text and found[0].versions["torch"] in text
    for line in {line for r in rows for line in r.statement.splitlines()}:
        assert report.escape(line) in text


def test_a_report_without_diagnostics_says_how_to_get_them(found, tmp_path):
    for record in without_diagnostics(found):
        record.save(tmp_path)
    text = report.write(tmp_path)[0].read_text(encoding="utf-8")
    assert text.count("<svg") == 2 and report.HOW_TO_DIAGNOSE in text and "not private" in report.HOW_TO_DIAGNOSE


def test_a_single_record_makes_a_report(found, tmp_path):
    found[0].save(tmp_path)
    path, rows = report.write(tmp_path)
    assert len(rows) == 1 and path.read_text(encoding="utf-8").count("<svg") == 1


@pytest.fixture(scope="module")
def several(found, tmp_path_factory):
    """A folder of three experiments: one whole, one on features with a run missing, one whose search goes on."""
    out = tmp_path_factory.mktemp("paper")
    for record in found:
        dataclasses.replace(record, config={**record.config, "preset": "mnist"}).save(out / "mnist")
        if (record.method, record.seed) != ("dp-sgd", 1):
            data = {**record.data, "features": {"encoder": "resnet50-imagenet"}}
            config = {**record.config, "preset": "cifar10-simclr"}
            dataclasses.replace(record, config=config, data=data).save(out / "cifar10-simclr")
    dataclasses.replace(found[0], role="search").save(out / "imagenette" / "search")
    return out


def test_the_statement_names_the_seeds_of_all_runs(found):
    (row,) = (row for row in summary.summarize(found) if row.method == "dp-sgd")
    assert "Batches and noise come from a seed, 0, 1 in turn, so that" in row.statement
    (alone,) = summary.summarize([record for record in found if record.method == "dp-sgd"][:1])
    assert "come from the seed 0, so that" in alone.statement


def test_an_experiment_that_was_stopped_before_its_first_record_is_none(several, tmp_path):
    out = shutil.copytree(several, tmp_path / "out")
    (out / "celeba-male").mkdir()
    (out / "celeba-male" / ".claims").touch()
    assert [one.preset for one in paper.load(out)] == ["mnist", "cifar10-simclr", "imagenette"]


def test_the_page_of_all_experiments_keeps_those_that_were_not_asked_for(several, tmp_path, monkeypatch):
    out = shutil.copytree(several, tmp_path / "out")
    mnist = next(one for one in paper.load(out) if one.preset == "mnist")
    asked = []
    monkeypatch.setattr(paper, "experiments", lambda configs, *_, **__: asked.extend(configs) or [mnist])
    run_command("reproduce", "table2", "--presets", "mnist,mnist", "--out", out)
    assert [config.preset for config in asked] == ["mnist"]  # once
    page = (out / "report.html").read_text(encoding="utf-8")
    assert page.index('<section id="mnist">') < page.index('<section id="cifar10-simclr">')
    assert "3 experiments" in page


def test_experiments_are_found_in_the_papers_order(several, folder, found):
    loaded = paper.load(several)
    assert [(one.preset, len(one.records), one.left) for one in loaded] == [
        ("mnist", 8, 0), ("cifar10-simclr", 7, 1), ("imagenette", 0, 0),
    ]  # fmt: skip
    assert [one.encoder for one in loaded] == [None, "resnet50-imagenet", None]
    (one,) = paper.load(folder)  # a folder of one experiment
    assert one.preset == "digits" and one.records == found and one.paper == {}


def test_runs_of_a_method_that_was_searched_and_has_none_are_left(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "pictures", lambda _: [])

    def without(name, *patterns):
        out = shutil.copytree(folder, tmp_path / name / "digits")
        for path in (path for pattern in patterns for path in out.glob(pattern)):
            path.unlink()
        return out

    def left(out):
        (one,) = paper.load(out)
        return one.left

    searched = without("searched", "dp-psasc-seed*", "psac-*")
    assert left(searched) == 2
    assert "Unfinished: 2 runs left." in report.page(paper.load(searched))
    records.pack(searched, tmp_path / "packed" / "digits.jsonl")
    assert left(tmp_path / "packed") == 2
    for path in (searched / "search").glob("dp-psasc-*"):  # a search at other settings is none of these runs
        record = records.read(path)
        dataclasses.replace(record, config=record.config | {"epsilon": 1.0}).save(path.parent)
        path.unlink()
    assert left(searched) == 0
    # The control needed that search: DP-PSASC itself was perhaps never asked for.
    others = ("non-private-*", "dp-sgd-*", "search/non-private-*", "search/dp-sgd-*")
    assert left(without("control", "dp-psasc-seed*", *others)) == 0


@pytest.mark.parametrize(
    ("command", "left"),
    [
        ("tiny", 0),
        ("dpscale train digits --method dp-sgd --seed 1", 0),
        ("dpscale compare digits --methods dp-sgd,auto-s --no-tune --seeds 2", 2),
        ("dpscale compare digits '--methods=dp-sgd, auto-s' --no-tune --seeds=3", 1 + 3),
        ("dpscale reproduce figures --methods dp-sgd,auto-s,of-another-release", 2),
        ("dpscale compare digits --no-tune", 3 + 7 * 5),
        ("dpscale reproduce table2 --presets imagenette", 1 + 7 * 3),
        ("dpscale it's", 0),
    ],
)
def test_runs_that_the_command_of_the_records_asks_for_are_left(found, tmp_path, command, left):
    for record in (record for record in found if record.method == "dp-sgd"):
        preset = "imagenette" if "imagenette" in command else "digits"
        dataclasses.replace(record, config=record.config | {"preset": preset}, command=command).save(tmp_path)
    (one,) = paper.load(tmp_path)
    assert one.left == left


def test_the_report_of_several_sets_the_papers_figures_beside_ours(several):
    found = paper.load(several)
    text = report.write_all(several, found).read_text(encoding="utf-8")
    assert alone(text) and text.count("<h1>") == 1 and text.count("<section") == 2
    overview = text[text.index('class="cards overview"') : text.index("</table>")]
    for name in ("dp-sgd", "dp-psasc"):
        for one in found:
            assert f"paper {paper.ACCURACY[one.preset][name]:.2f}" in overview
    for row in found[0].rows:
        assert f"<b>{100 * row.accuracy:.1f}</b> <span>± {100 * row.half_width:.1f}</span>" in overview
    assert "features of resnet50-imagenet" in overview and "1 run left" in overview and "not finished" in overview
    assert "2 seeds" in overview and "1 seed<" in overview  # the latter of the method that misses one
    for one in found[:2]:
        assert f"<dt>{one.preset}</dt><dd>{summary.verdict(one.rows)}</dd>" in text
        assert (several / one.preset / "report.html").is_file()
    assert f"<dt>imagenette</dt><dd>{report.NOT_FINISHED}</dd>" in text
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_untuned_rates_are_said_with_the_verdict(several):
    (one, *_) = paper.load(several)
    given = dataclasses.replace(one, records=[dataclasses.replace(r, search=None) for r in one.records])
    assert report.verdict(one) == summary.verdict(one.rows)
    assert report.verdict(given) == f"Rates were given, not searched. {summary.verdict(one.rows)}"
    assert "The rates were given, not searched in this run" in report.page([given])


def test_packed_experiments_make_the_same_page(several, tmp_path, monkeypatch):
    monkeypatch.setattr(figures, "pictures", lambda _: [])  # they take seconds, and have tests of their own
    for name in ("mnist", "cifar10-simclr"):
        records.pack(several / name, tmp_path / f"{name}.jsonl")
    loose = [one for one in paper.load(several) if one.records]
    assert report.page(paper.load(tmp_path)) == report.page(loose)
    assert report.write_all(tmp_path, loose) == tmp_path / "report.html"
    assert {path.name for path in tmp_path.iterdir()} == {"report.html", "mnist.jsonl", "cifar10-simclr.jsonl"}


def test_the_results_page_has_every_table(several):
    found = paper.load(several)
    text = markdown.page(found)
    for one in found[:2]:
        part = text[text.index(f"\n## {one.preset}\n") :]
        for row in one.rows:
            line = next(line for line in part.splitlines() if line.startswith(f"| {row.title} |"))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            theirs = one.paper.get(row.method)
            assert cells[1:4] == [
                "—" if theirs is None else f"{theirs:.2f}",
                row.shown.replace("%", ""),
                row.shown_difference,
            ]
            assert cells[6] == Choice.of(row.choice).told() and cells[4] == (
                f"{row.noise_multiplier:.4f}" if row.epsilon else "—"
            )
        assert summary.verdict(one.rows) in part and one.records[0].versions["torch"] in part and "\ntiny\n" in part
    assert "features of resnet50-imagenet, 1 run left" in text and report.NOT_FINISHED in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {6, 9}  # the table of all, and those of each


def test_one_picture_sets_every_experiment_beside_the_paper(several, tmp_path):
    found = paper.load(several)
    shown = [one for one in found if one.rows]
    picture = figures.beside_the_paper(found)
    panels = picture.figure.axes
    assert len(shown) == len(panels) == 2 and len(found) > 2  # one of them has no run yet
    for one, axes in zip(shown, panels, strict=True):
        titles = {METHODS[name].title: name for name in one.paper}
        names = [titles[label.get_text()] for label in axes.get_yticklabels()]
        assert names == list(one.paper) and axes.get_title("left").startswith(one.preset)
        points = [line for line in axes.lines if len(line.get_xdata()) and line.get_marker() in ("o", "D")]
        theirs = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in points if line.get_marker() == "D"}
        ours = {names[line.get_ydata()[0]]: line.get_xdata()[0] for line in points if line.get_marker() == "o"}
        assert theirs == one.paper
        assert ours == pytest.approx({r.method: 100 * r.accuracy for r in one.rows if r.method in one.paper})
        halves = [(bars.get_segments()[0][1][0] - bars.get_segments()[0][0][0]) / 2 for bars in axes.collections]
        assert halves == pytest.approx(
            [100 * row.half_width for row in one.rows if row.method in one.paper and row.half_width is not None]
        )
    assert panels[1].get_title("left").endswith(", features of resnet50-imagenet")
    page = report.page(found)
    assert page.count('aria-label="Test accuracy of each method here') == 1
    markdown.write(tmp_path / "it is told.md", found)
    text = (tmp_path / "it is told.md").read_text(encoding="utf-8")
    assert f"![{picture.caption}](figures/it%20is%20told.png)" in text
    assert (tmp_path / "figures" / "it is told.png").read_bytes().startswith(b"\x89PNG")


def test_what_the_paper_has_not_is_not_set_beside_it(found, tmp_path):
    ours = [paper.Experiment(preset="digits", records=found, rows=summary.summarize(found), left=0)]
    assert figures.beside_the_paper(ours) is None
    markdown.write(tmp_path / "told.md", ours)
    assert [path.name for path in tmp_path.iterdir()] == ["told.md"] and "![" not in (tmp_path / "told.md").read_text(
        encoding="utf-8"
    )


def test_what_was_written_by_hand_above_the_mark_stays(found):
    one = [paper.Experiment(preset="digits", records=found, rows=summary.summarize(found), left=0)]
    fresh = markdown.page(one)
    again = markdown.page(one, f"# Mine\n\nBy hand.\n\n{markdown.MARK}\nold tables")
    assert again == fresh.replace("# Results", f"# Mine\n\nBy hand.\n\n{markdown.MARK}", 1)
    assert markdown.page(one, "# Something without the mark") == fresh


def test_a_star_is_no_emphasis_in_markdown(found):
    rows = [dataclasses.replace(summary.summarize(found)[2], title="DP-PSASC*")]
    text = markdown.page([paper.Experiment(preset="digits", records=found, rows=rows, left=0)])
    assert "| DP-PSASC\\* |" in text and "DP-PSASC*" not in text


# -- terminal --------------------------------------------------------------------------------------------------


def printed(table):
    stream = io.StringIO()
    Console(file=stream, width=80, highlight=False).print(table)
    return stream.getvalue()


def test_tables_are_whole_at_80_columns(several):
    found = paper.load(several)
    wide = [dataclasses.replace(r, title="Non-private SGD", test_size=10_000, half_width=0.1234) for r in found[0].rows]
    long = {"rate": 0.25, "gamma1": 0.1, "K0": 2, "gamma0": 0.5}
    cases = {
        "accuracies": display.accuracies([dataclasses.replace(found[1], rows=wide), *found]),
        "comparison": display.table("title", [dataclasses.replace(r, choice=long, seconds=1234.5) for r in wide]),
        "settings": display.settings(
            [
                paper.Setting(preset=name, samples=162_079, batch=1024, epochs=60, C=0.25, r=1e-3, s=0.55, epsilon=9.0,
                              delta=5e-6, noise_multiplier=1.96912, noise_multiplier_rdp=2.10819,
                              encoder=presets.preset(name).encoder)
                for name in paper.PRESETS
            ]
        ),
    }  # fmt: skip
    for name, table in cases.items():
        text = printed(table)
        assert "…" not in text and max(map(len, text.splitlines())) <= 80, f"{name}:\n{text}"
    told = printed(cases["settings"])
    assert "1.9691" in told and "5e-6" in told and "features of resnet50-imagenet" in told
    told = printed(display.accuracies(found))
    assert "97.35%" in told and "features of resnet50-imagenet" in told and "unfinished, 1 run left" in told


# -- the whole chain -------------------------------------------------------------------------------------------


def test_the_chain_on_a_part_of_mnist(tmp_path):
    try:
        load("mnist")
    except DataError:
        pytest.skip("MNIST is not in the data folder")
    config = presets.mnist().replace(
        train_size=400,
        batch=64,
        epochs=1,
        model="paper_cnn",
        grid=(1.0,),
        gamma1s=(0.1,),
        inner=((1, 0.5),),
        delta=1e-4,
    )
    found = paper.experiments([config], presets.methods("dp-psasc,dp-psasc-star"), tmp_path, seeds=1, workers=1)
    (one,) = found
    assert one.left == 0 and [r.method for r in one.records] == ["dp-psasc", "dp-psasc-star"]
    assert [r.plan["steps"] for r in one.records] == [7, 7] and all(r.epsilon <= 3 for r in one.records)
    assert all(r.data["train"] == 400 and r.data["test"] == 10_000 and r.data["checksums"] for r in one.records)
    assert all(0.02 < r.accuracy < 0.9 for r in one.records)
    assert paper.load(tmp_path)[0].rows == one.rows
    assert "98.65" in report.write_all(tmp_path, found).read_text(encoding="utf-8")


def test_a_budget_of_nothing_leaves_all_experiments(tmp_path):
    configs = [TINY, TINY.replace(preset="mnist")]
    found = paper.experiments(configs, presets.methods("dp-sgd"), tmp_path, seeds=3, workers=1, budget=0.0)
    assert [(one.preset, one.left, one.records) for one in found] == [("digits", 5, []), ("mnist", 5, [])]
    told = paper.to_dict(found)
    assert told[1]["left"] == 5 and told[1]["paper"]["dp-sgd"] == 97.35 and told[1]["rows"] == []
    assert "unfinished, 5 runs left" in printed(display.accuracies(found))


def test_seeds_are_five_and_three_where_a_run_takes_minutes(tmp_path, monkeypatch):
    asked = {}
    monkeypatch.setattr(
        compare, "compare", lambda config, _, seeds, *__, **___: asked.update({config.preset: len(seeds)})
        or compare.Compared(records=[], left=0),
    )  # fmt: skip
    paper.experiments([TINY.replace(preset=name) for name in paper.PRESETS], [], tmp_path)
    assert asked == {"mnist": 5, "fashion-mnist": 5, "cifar10-simclr": 5, "celeba-male": 3, "imagenette": 3}


def at(record, rate, seed=None, minute=0, **data):
    """The record as if it had been run at another rate, at another time, on other data."""
    return dataclasses.replace(
        record,
        choice=record.choice | {"rate": rate},
        seed=record.seed if seed is None else seed,
        created=f"2030-01-01T00:{minute:02}:00+00:00",
        data=record.data | data,
    )


def test_a_row_is_of_one_rate_one_data_set_and_one_run_per_seed(found):
    one = next(r for r in found if r.method == "dp-sgd")
    other = next(r for r in found if r.method == "dp-psasc")
    runs = [
        at(one, 0.3, seed=0, minute=1),
        at(one, 0.3, seed=1, minute=1),
        at(one, 0.3, seed=3, minute=1),
        at(one, 5.0, seed=0, minute=2),
        at(one, 5.0, seed=1, minute=3),
        at(one, 5.0, seed=1, minute=4),  # the same run once more
        at(other, 0.3, seed=0, minute=2),  # each method has its own rate
        at(one, 5.0, seed=2, minute=3, checksums={"a": "of other data"}),
    ]
    chosen, left_out = summary.select(runs)
    kept = [(r.method, r.choice["rate"], r.seed, r.created[14:16]) for r in chosen]
    assert kept == [("dp-sgd", 5.0, 0, "02"), ("dp-sgd", 5.0, 1, "04"), ("dp-psasc", 0.3, 0, "02")]
    assert left_out == 5


def test_a_run_on_other_data_is_another_run(tmp_path, monkeypatch):
    config, methods = TINY.at_rate(0.1).replace(epochs=1), presets.methods("dp-sgd")
    ran = []
    compare.compare(config, methods, [0], tmp_path, workers=1, on_finished=ran.append)
    compare.compare(config, methods, [0], tmp_path, workers=1, on_finished=ran.append)
    assert len(ran) == 1
    monkeypatch.setattr(queue, "checksums", lambda name: {"train": "other"})
    compare.compare(config, methods, [0], tmp_path, workers=1, on_finished=ran.append)
    assert len(ran) == 2


def test_tries_that_were_made_are_not_forgotten(tmp_path):
    methods = presets.methods("dp-sgd")
    for grid, tries in (((0.05, 0.2), 2), ((0.2,), 2), ((0.05, 0.2, 0.4), 3)):
        config = TINY.replace(epochs=1, grid=grid, diagnostics=False)
        (record,) = compare.compare(config, methods, [0], tmp_path, workers=1).records
        if record.choice["rate"] == 0.2:
            assert len(record.search["tries"]) == tries


def test_what_is_packed_already_stays(folder, found, tmp_path):
    packed = tmp_path / "digits.jsonl"
    count = records.pack(folder, packed)
    other = tmp_path / "other"
    at(found[0], 0.123).save(other)
    assert records.pack(other, packed) == count + 1 == len(records.load(packed))
    assert records.pack(folder, packed) == count + 1


def test_methods_that_were_not_searched_alike_are_told(found):
    def searched(record, rates, held_out):
        tries = [{"choice": {"rate": rate, "gamma1": 0.1}, "accuracy": 0.5} for rate in rates]
        told = {
            "searched_for": record.method,
            "tries": tries,
            "held_out": held_out,
            "epochs": 2,
            "note": "",
            "chosen": {},
        }
        return dataclasses.replace(record, search=told)

    one, other = (next(r for r in found if r.method == name) for name in ("dp-sgd", "dp-psasc"))
    alike = [searched(one, (0.3, 1.2), 0.2), searched(other, (0.3, 1.2), 0.2)]
    assert "NOT SEARCHED ALIKE" not in summary.verdict(summary.summarize(alike))
    for rates, held_out in (((0.3,), 0.2), ((0.3, 1.2), 0.4)):
        records_ = [alike[0], searched(other, rates, held_out)]
        rows = summary.summarize(records_)
        assert "NOT SEARCHED ALIKE" in summary.verdict(rows) and not summary.alike(rows)
        page = "".join(report._search(records_, summary.alike(rows)))
        assert "not searched alike" in page and "same number of tries" not in page
    given = [alike[0], dataclasses.replace(other, search=None)]
    assert "DP-PSASC had no search" in summary.verdict(summary.summarize(given))
    control = dataclasses.replace(alike[1], method="psac-lr-over-s")  # it follows DP-PSASC
    assert summary.alike(summary.summarize([*alike, control]))
    assert summary.alike(summary.summarize([dataclasses.replace(each, search=None) for each in alike]))


CURVES = {"epoch": [1, 2], "train_loss": [1.0, None], "accuracy": [None, 0.5]}


@pytest.mark.parametrize(
    ("poison", "told"),
    [
        ({"accuracy": math.nan}, "accuracy is nan, not a finite number"),
        ({"accuracy": 200}, r"accuracy is 200, not in \[0, 1\]"),
        ({"accuracy": None}, "accuracy is None, not a finite number"),
        ({"accuracy": "0.9"}, "accuracy is '0.9', not a finite number"),
        ({"accuracy": True}, "accuracy is True, not a finite number"),
        ({"seconds": 10**400}, r"seconds is 1000.*, not a finite number"),
        ({"epsilon": -5}, "epsilon is -5, not >= 0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier is inf, not a finite number"),
        ({"delta": "1e-5"}, "delta is '1e-5', not a finite number"),
        ({"seconds": -1.0}, r"seconds is -1\.0, not"),
        ({"created": None}, "created is None, not a string"),
        ({"title": 5}, "title is 5, not a string"),
        ({"title": ["a"]}, r"title is \['a'\], not a string"),
        ({"role": "test"}, "role is 'test', not of the form"),
        ({"versions": {}}, "versions.dpscale is missing"),
        ({"versions": {"dpscale": 1}}, "versions.dpscale is 1, not a string"),
        ({"config": {"preset": "../away"}}, r"config.preset is '\.\./away', not of the form"),
        ({"config": {"epsilon": -5}}, "config.epsilon is -5, not >= 0"),
        ({"config": {"note": 5}}, "config.note is 5, not a string"),
        ({"config": []}, r"config is \[\], not an object"),
        ({"choice": {"rate": "x"}}, "choice.rate is 'x', not a finite number"),
        ({"choice": {"pace": 1}}, "a key of choice is 'pace', not of the form"),
        ({"data": {"test": 0}}, r"data.test is 0, not in \[1, "),
        ({"search": 5}, "search is 5, not an object"),
        ({"search": {"tries": [1]}}, r"search.tries\[0\] is 1, not an object"),
        ({"search": {"tries": [{"choice": {}, "accuracy": 0.5}]}}, r"search.tries\[0\].choice.rate is missing"),
        ({"curves": {"accuracy": [7, 7]}}, r"curves.accuracy\[0\] is 7, not in \[0, 1\]"),
        ({"curves": {"accuracy": [0.5]}}, "curves.accuracy has 1 values, not 2"),
        ({"curves": {"accuracy": [0.5, None]}}, "the last of curves.accuracy is None"),
        ({"curves": {"accuracy": None}}, "curves.accuracy is None, not a list"),
        ({"scaling": {"rule": "magic"}}, "scaling is {.*'magic'.*}, not a rule and its constants"),
        ({"diagnostics": {"norms": None}}, "diagnostics.mean_weight is missing"),
    ],
)
def test_values_that_no_run_can_give_are_refused(found, tmp_path, poison, told):
    whole = found[0].to_dict() | {"curves": CURVES}
    inside = {n: (whole[n] or {}) | v if isinstance(v, dict) and n != "versions" else v for n, v in poison.items()}
    text = json.dumps(whole | inside)
    (tmp_path / "dp-sgd-seed0-abc.json").write_text(text)
    with pytest.raises(ValueError, match=f"dp-sgd-seed0-abc.json is damaged: {told}.*Delete it and run the same"):
        records.load(tmp_path)
    (tmp_path / "digits.jsonl").write_text(f"{json.dumps(found[0].to_dict())}\n{text}\n")
    with pytest.raises(ValueError, match=f"Line 2 of .*digits.jsonl is damaged: {told}.*Delete it and pack"):
        records.load(tmp_path / "digits.jsonl")
    (tmp_path / "digits.jsonl").write_text(f"{json.dumps(whole)}\n")
    assert len(records.load(tmp_path / "digits.jsonl")) == 1


def places(value, path=()):
    """Where values lie in a record, of lists the first and the last."""
    if path:
        yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        if isinstance(value, dict) or key in (0, len(value) - 1):
            yield from places(each, (*path, key))


@pytest.mark.parametrize("wrong", [1e308, "x", []], ids=str)
def test_a_wrong_value_is_refused_by_name_or_does_no_harm(found, tmp_path, wrong, monkeypatch):
    """Wherever it stands: a page is made of what is not refused."""
    monkeypatch.setattr(report.figures, "svg", lambda *_: "")  # nothing is drawn, which takes long
    record = next(r for r in found if r.method == "dp-psasc" and r.seed == 0).to_dict()
    refused = 0
    for path in places(record):
        text = copy.deepcopy(record)
        inner = text
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1]] = wrong
        (tmp_path / "digits.jsonl").write_text(json.dumps(text))
        try:
            one = paper.load(tmp_path)
        except ValueError as error:
            refused += 1
            assert f"Line 1 of {tmp_path / 'digits.jsonl'} is " in str(error), (path, error)
        else:
            if path[0] in ("config", "choice", "search", "data", "curves", "scaling", "diagnostics", "title"):
                report.page(one)
                markdown.page(one)
    assert refused > 50


def jobs_of(done):
    """The jobs that these records are of, and a run that gives them."""
    jobs = [job(one.method, config=TINY, seed=one.seed, choice=Choice.of(one.choice)) for one in done]
    return jobs, {(one.method, one.seed): one for one in done}


def queue_in(out, workers, finished=None):
    told = (lambda _: None) if finished is None else finished.append
    return queue.Queue(out=out, total=4, on_finished=told, workers=workers, deadline=None)


class Later:
    """A pool whose runs are done when somebody waits for them, in the order that they were submitted in."""

    def __init__(self, monkeypatch):
        self.under_way, self.most = [], 0
        monkeypatch.setattr(queue, "wait", self.wait)

    def submit(self, function, one):
        self.under_way.append((Future(), function, one))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1][0]

    def wait(self, futures, return_when):
        if not futures:
            return SimpleNamespace(done=set())
        future, function, one = self.under_way.pop(0)
        try:
            future.set_result(function(one))
        except Exception as error:
            future.set_exception(error)
        return SimpleNamespace(done={future})


@pytest.mark.parametrize("workers", [1, 2])
def test_what_another_process_has_recorded_meanwhile_is_not_run_again(workers, folder, tmp_path, monkeypatch):
    jobs, done = jobs_of(records.load(folder))
    begun, finished = [], []

    def run(job, *_):
        begun.append((job.method, job.seed))
        for record in done.values():  # as if another process had gone through all of them by now
            record.save(tmp_path)
        return done[begun[-1]]

    monkeypatch.setattr(queue, "run", run)
    planned = queue_in(tmp_path, workers, finished)
    assert len(jobs) > 2 and len(planned.run(jobs, processes.Here())) == len(jobs)
    assert begun == [(jobs[0].method, jobs[0].seed)] and planned.done == len(finished) == len(jobs)


CLAIM = """
import sys, time
from pathlib import Path
from dpscale.lab.claims import Claims
claims = Claims(Path(sys.argv[1]))
print(claims.take(sys.argv[2]), flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def claimed_elsewhere(out, key):
    """Another process has the run, until it is told to end."""
    command = [sys.executable, "-c", CLAIM, str(out), key]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        yield other
        other.stdin.close()


def claimable_elsewhere(out, key):
    """Whether another process could have the run now."""
    command = [sys.executable, "-c", CLAIM, str(out), key]
    return subprocess.run(command, input="", capture_output=True, text=True, check=True).stdout == "True\n"


def test_a_claim_is_one_process_s_until_it_ends(tmp_path):
    claims = Claims(tmp_path / "new")
    with claimed_elsewhere(tmp_path / "new", "0123456789ab"):
        assert not claims.take("0123456789ab")
        assert claims.take("0123456789ac") and claims.take("ffffffffffff")
    assert claims.take("0123456789ab")
    assert not claimable_elsewhere(tmp_path / "new", "0123456789ac")
    claims.leave("0123456789ac")
    assert claimable_elsewhere(tmp_path / "new", "0123456789ac")
    assert not claimable_elsewhere(tmp_path / "new", "0123456789ab")
    claims.close()
    assert claimable_elsewhere(tmp_path / "new", "0123456789ab")
    assert Claims(tmp_path / "nowhere").close() is None and not (tmp_path / "nowhere").exists()  # nothing was taken


def test_a_claim_is_left_with_its_run(folder, tmp_path, monkeypatch):
    """A record that was there, one that is there now, a run that is under way, one that nobody has begun."""
    jobs, done = jobs_of(records.load(folder))
    ran = []

    def run(job, *_):
        ran.append(job)
        done[jobs[0].method, jobs[0].seed].save(tmp_path)
        if len(ran) == 3:
            free = [claimable_elsewhere(tmp_path, queue.key_of(one)) for one in jobs[:5]]
            assert free == [True, True, True, False, True]
        return done[job.method, job.seed]

    monkeypatch.setattr(queue, "run", run)
    planned = queue_in(tmp_path, 1)
    found = list(planned._execute([jobs[1], jobs[0], jobs[2], *jobs[3:]], processes.Here()))
    assert len(found) == len(jobs) and ran[2].seed == jobs[3].seed and jobs[0] not in ran


def test_a_run_that_another_process_has_under_way_is_waited_for(folder, tmp_path, monkeypatch):
    jobs, done = jobs_of(records.load(folder))
    ran, looks = [], []
    monkeypatch.setattr(queue, "run", lambda job, *_: ran.append(job) or done[job.method, job.seed])
    with claimed_elsewhere(tmp_path, queue.key_of(jobs[0])) as other:

        def sleep(seconds):
            assert len(ran) == len(jobs) - 1  # all others come first
            looks.append(seconds)
            if len(looks) == 2:
                done[jobs[0].method, jobs[0].seed].save(tmp_path)
                other.stdin.close()
                other.wait()

        monkeypatch.setattr(queue.time, "sleep", sleep)
        found = queue_in(tmp_path, 1).run(jobs, processes.Here())
    assert len(looks) == 2 and len(ran) == len(jobs) - 1 and len(found) == len(jobs)


def test_the_run_of_a_process_that_died_is_done_here(folder, tmp_path, monkeypatch):
    jobs, done = jobs_of(records.load(folder))
    ran = []
    monkeypatch.setattr(queue, "run", lambda job, *_: ran.append(job) or done[job.method, job.seed])
    with claimed_elsewhere(tmp_path, queue.key_of(jobs[0])) as other:
        monkeypatch.setattr(queue.time, "sleep", lambda _: other.kill() or other.wait())
        queue_in(tmp_path, 1).run(jobs, processes.Here())
    assert [(one.method, one.seed) for one in ran][-1] == (jobs[0].method, jobs[0].seed) and len(ran) == len(jobs)


def test_nobody_waits_for_another_process_beyond_the_deadline(folder, tmp_path, monkeypatch):
    jobs, _ = jobs_of(records.load(folder)[:1])
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], sleep=lambda seconds: now.append(now.pop() + seconds))
    monkeypatch.setattr(queue, "time", clock)
    planned = queue.Queue(out=tmp_path, total=1, on_finished=lambda _: None, workers=1, deadline=5.0)
    with claimed_elsewhere(tmp_path, queue.key_of(jobs[0])):
        assert planned.run(jobs, processes.Here()) == [] and planned.done == 0
    assert now[0] >= 5.0


def test_runs_that_do_not_fit_together_go_one_by_one(folder, tmp_path, monkeypatch, caplog):
    jobs, done = jobs_of(records.load(folder))
    pool, tried = Later(monkeypatch), []

    def run(job, *_):
        tried.append((job.method, job.seed))
        if len(pool.under_way) >= 1:  # another one is there
            raise torch.OutOfMemoryError("no memory")
        return done[tried[-1]]

    monkeypatch.setattr(queue, "run", run)
    found = queue_in(tmp_path, 3).run(jobs, pool)
    assert len(found) == len(jobs) > 3 and pool.most == 3
    assert "2 runs at once" in caplog.text and caplog.text.count("one run at a time") == 1
    assert {path.name for path in tmp_path.glob("*.json")} == {path.name for path in folder.glob("*.json")}


def test_a_run_that_does_not_fit_alone_is_told(folder, tmp_path, monkeypatch):
    jobs, _ = jobs_of(records.load(folder))

    def run(job, *_):
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(queue, "run", run)
    with pytest.raises(ValueError, match=r"There is not enough memory for this run.*micro_batch"):
        queue_in(tmp_path, 2).run(jobs, Later(monkeypatch))


def test_an_error_loses_nothing_that_is_under_way(folder, tmp_path, monkeypatch):
    jobs, done = jobs_of(records.load(folder))
    ran = []

    def run(job, *_):
        ran.append(job)
        if len(ran) == 1:
            raise RuntimeError("broken")
        return done[job.method, job.seed]

    monkeypatch.setattr(queue, "run", run)
    with pytest.raises(RuntimeError, match="broken"):
        queue_in(tmp_path, 3).run(jobs, Later(monkeypatch))
    assert len(ran) == 3 < len(jobs)  # the two beside it, and none after it
    assert len(list(tmp_path.glob("*.json"))) == 2


def test_memory_is_free_again_after_a_run_that_had_not_enough(monkeypatch):
    freed, alive = [], []

    class Large:
        pass

    def run(job, *_):
        large = Large()
        alive.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(queue, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(alive[0]() is None))
    with pytest.raises(queue.NoMemory, match="not enough memory"):
        queue.attempt(job("dp-sgd"))
    assert freed == [True]


@pytest.mark.parametrize("method", ["dp-sgd", "non-private"])
@pytest.mark.parametrize("many", [True, False], ids=["compare", "train"])
def test_memory_that_runs_out_in_a_step_is_told(method, many, tmp_path, monkeypatch):
    """As torch raises it, and as a private step does, which says what its own caller can do."""

    def hungry(config):
        return lambda model, batch: model(batch[0]).sum() + torch.empty(2**60)  # more than any machine has

    monkeypatch.setattr(runner, "_losses_of", hungry)
    with pytest.raises(queue.NoMemory, match=r"not enough memory for this run\. .*--set micro_batch"):
        if many:
            queue_in(tmp_path, 1).run([job(method)], processes.Here())
        else:
            compare.train(TINY.at_rate(0.1), METHODS[method], 0, tmp_path)
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_processes_at_once(error):
    with pytest.raises(error), processes.processes(1) as pool:
        process = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 600)
        raise error
    assert_ends(process)


PARENT = """
import os, time
from dpscale.lab import processes

if __name__ == "__main__":
    with processes.processes(1) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


def test_processes_end_with_the_one_that_began_them_however_it_ends(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        process = int(parent.stdout.readline())
        parent.kill()
    assert_ends(process)


def test_a_process_that_was_ended_from_outside_is_told_in_a_line(folder, tmp_path):
    class Broken(Executor):
        def submit(self, *_):
            failed = Future()
            failed.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
            return failed

    jobs, _ = jobs_of(records.load(folder)[:1])
    with pytest.raises(ValueError, match=r"ended from outside\. Run the same command again, with fewer --workers"):
        queue_in(tmp_path, 2).run(jobs, Broken())


def test_a_single_run_that_is_packed_beside_its_folder_is_not_repeated(tmp_path, monkeypatch):
    config = TINY.replace(epochs=1, diagnostics=False)
    done = compare.train(config, METHODS["dp-sgd"], 0, tmp_path / "digits")
    records.pack(tmp_path / "digits", tmp_path / "digits.jsonl")
    shutil.rmtree(tmp_path / "digits")
    monkeypatch.setattr(compare, "attempt", lambda *_: pytest.fail("was run again"))
    assert compare.train(config, METHODS["dp-sgd"], 0, tmp_path / "digits") == done


def assert_ends(process):
    for _ in range(200):
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_a_seeded_run_says_what_its_seed_means():
    statement = runner.run(job("dp-sgd", seed=3)).statement
    assert "come from the seed 3" in statement and "Whoever knows a seed can take the noise away" in statement


@pytest.mark.parametrize(("drawn", "rows"), [(0, 4), (3, 4), (4, 4), (9, 4), (9, 1), (9, None)])
def test_a_plain_batch_goes_through_in_parts_of_one_size(drawn, rows):
    chosen = torch.arange(100, 100 + drawn)
    parts = list(runner._parts(chosen, rows))
    assert {len(part) for part, _ in parts} == {rows or drawn} and len(parts) == (
        math.ceil(drawn / rows) or 1 if rows else 1
    )
    kept = torch.cat([part[there == 1] for part, there in parts])
    assert torch.equal(kept, chosen) and sum(there.sum().item() for _, there in parts) == drawn


def test_plain_training_does_not_depend_on_its_parts():
    whole, parts = (
        runner.run(job("non-private", config=TINY.replace(epochs=1, micro_batch=rows), rate=0.5)) for rows in (None, 7)
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
    assert parts.curves["train_loss"] == pytest.approx(whole.curves["train_loss"], rel=1e-4)


def test_a_plain_run_on_a_gpu_is_compiled_and_tells_its_cold_start(monkeypatch):
    class Cuda:
        """Labels that say that they are on a GPU."""

        is_cuda = True

        def __init__(self, labels):
            self.labels, self.device = labels, labels.device

        def __getitem__(self, rows):
            return self.labels[rows]

        def __len__(self):
            return len(self.labels)

    config = TINY.replace(epochs=1, micro_batch=64)
    data = runner.load(config, "final")
    data = dataclasses.replace(data, train_labels=Cuda(data.train_labels))
    asked, told, seen = [], [], []
    monkeypatch.setattr(torch, "compile", lambda losses, **options: asked.append(options) or losses)
    with listening(told.append):
        for step in runner._train_plain(runner._model(config, 0, data), job("non-private", config=config), data):
            seen.append((step.loss.item(), list(told)))
    assert asked == [{"dynamic": False}] and told == ["compiling", None]
    assert len(seen) > 2 and all(math.isfinite(loss) and phases == told for loss, phases in seen)


def test_an_empty_plain_batch_moves_nothing(monkeypatch):
    """Momentum goes on, as in a private step, and the loss of no sample is none."""
    config = TINY.replace(epochs=1)
    data = runner.load(config, "final")
    monkeypatch.setattr(Poisson, "draws", lambda self, _: iter([np.arange(8), np.arange(0)]))
    monkeypatch.setattr(Poisson, "steps", lambda self, _: 2)
    model = runner._model(config, 0, data)
    weights, losses = [nn.utils.parameters_to_vector(model.parameters()).detach().clone()], []
    for step in runner._train_plain(model, job("non-private", config=config.replace(micro_batch=4)), data):
        weights.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        losses.append(step.loss.item())
    first, second = weights[1] - weights[0], weights[2] - weights[1]
    assert first.norm() > 0 and torch.allclose(second, 0.9 * first, rtol=1e-3, atol=1e-7)
    assert math.isfinite(losses[0]) and math.isnan(losses[1])


@pytest.mark.parametrize(("momentum", "kept"), [("heavy-ball", 0.9), ("inner-outer", 0.9), ("disk", 0), ("none", 0)])
def test_plain_sgd_goes_as_far_as_its_rate_says(momentum, kept, monkeypatch):
    """Rate × 1 where a private method has no outer momentum, rate × γ1 with a heavy ball, which goes 1/γ1 as far."""
    made, make = [], runner._optimizer
    monkeypatch.setattr(runner, "_optimizer", lambda *args: made.append(make(*args)) or made[-1])
    runner.run(job("non-private", config=TINY.replace(epochs=1, momentum=momentum), rate=1.2))
    (group,) = made[0].param_groups
    assert group["momentum"] == pytest.approx(kept) and group["lr"] / (1 - kept) == pytest.approx(1.2)
