"""The lab on tiny settings: data, presets, records, comparison, figures, report."""

import dataclasses
import io
import json
import re

import numpy as np
import pytest
import torch
from rich.console import Console
from scipy import stats

from dpscale import PSAC, PSASC
from dpscale.lab import compare, display, figures, models, norms, presets, records, report, runner, summary
from dpscale.lab.data import digits, hold_out
from dpscale.lab.presets import METHODS

TINY = presets.digits().replace(epochs=2, batch=64, grid=(0.05, 0.2), last_epochs=1)


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


@pytest.mark.parametrize(("name", "side"), [("digits_cnn", 8), ("paper_cnn", 28)])
def test_models_give_ten_logits_and_mix_no_samples(name, side):
    model = models.MODELS[name]().train()
    x = torch.randn(3, 1, side, side)
    assert model(x).shape == (3, 10)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))


def test_model_sizes():
    assert sum(p.numel() for p in models.digits_cnn().parameters()) == 5746
    convolutions = [m for m in models.paper_cnn() if isinstance(m, torch.nn.Conv2d)]
    assert len(convolutions) == 4


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
        ({"sampling": "weekly"}, "'sampling' parameter of Config must be one of poisson, full-batch"),
        ({"model": "vit"}, "'model' parameter of Config must be one of digits_cnn, paper_cnn"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, text):
    with pytest.raises(ValueError, match=text):
        presets.digits().replace(**change)


def test_controls_split_what_s_does():
    config = presets.digits().at_rate(0.25)
    rate = {name: METHODS[name].learning_rate(config, config.rates) for name in METHODS}
    psasc, lr, r = (METHODS[name] for name in ("dp-psasc", "psac-lr-over-s", "psac-r-over-s"))
    assert rate["dp-psasc"] == pytest.approx(0.25 * config.s / config.C)
    assert rate[lr.name] == pytest.approx(rate["dp-psasc"] / config.s)
    assert rate[r.name] == pytest.approx(rate["dp-psasc"])
    assert psasc.scaling(config) == PSASC(C=config.C, s=config.s, r=config.r)
    assert lr.scaling(config) == PSAC(C=config.C, r=config.r)
    assert r.scaling(config) == PSAC(C=config.C, r=config.r / config.s)


def test_rates_are_normalized_by_the_bound():
    config = presets.digits().at_rate(0.25)
    for name in presets.searched(METHODS):
        method = METHODS[name]
        assert method.learning_rate(config, config.rates) * presets.bound(method, config) == pytest.approx(0.25)


def test_a_control_searches_for_the_method_it_follows():
    assert presets.searched(["psac-r-over-s", "dp-sgd", "dp-psasc"]) == ["dp-psasc", "dp-sgd"]


# -- runs ------------------------------------------------------------------------------------------------------


def test_a_run_repeats_exactly_and_spends_what_it_says():
    sigma = runner.calibrate(TINY)
    job = runner.Job(config=TINY, method="dp-psasc", seed=3, learning_rate=0.1, noise_multiplier=sigma)
    seen = []
    one, other = runner.run(job, seen.append), runner.run(job)
    assert one.curves == other.curves and one.accuracy == one.curves["accuracy"][-1]
    assert one.epsilon == pytest.approx(TINY.epsilon, rel=1e-3) and one.epsilon <= TINY.epsilon
    before, (first, last) = [p for p in seen if p.epoch == 0], [p for p in seen if p.epoch > 0]
    assert [p.phase for p in (before[0], before[-1])] == ["inspecting", None] and {p.step for p in before} == {0}
    assert (first.epoch, last.epoch) == (1, 2) and last.step == last.steps == one.plan["steps"]
    assert first.epsilon() < last.epsilon() == pytest.approx(one.epsilon)
    assert one.diagnostics["not_private"] is True and one.diagnostics["epochs"] == [2]


def test_without_privacy_there_is_no_epsilon_and_no_diagnostics(found):
    plain = [r for r in found if r.method == "non-private"]
    assert plain and all(r.epsilon is None and r.plan is None and r.diagnostics is None for r in plain)
    assert all("Not private" in r.statement for r in plain)


def test_the_bar_says_what_a_run_waits_for(monkeypatch):
    shown = io.StringIO()
    monkeypatch.setattr(display, "Console", lambda **_: Console(file=shown, force_terminal=True, color_system=None))
    waiting = {"step": 0, "steps": 20, "epoch": 0, "loss": float("nan"), "plan": None, "delta": 1e-5}
    with display.run_bar("a run", quiet=False) as show:
        show(runner.Progress(**waiting, phase="compiling"))
        assert re.search(r"a run.* 0/20 compiling", shown.getvalue())
        show(runner.Progress(**waiting))
        assert re.search(r"a run.* 0/20 training", shown.getvalue())
        show(runner.Progress(**waiting | {"step": 10, "epoch": 1, "loss": 0.5}))
    assert re.search(r"a run.* 10/20 loss 0.500", shown.getvalue())


def test_plain_runs_see_the_batches_of_private_ones():
    """Both train on the very same draws: at learning rate ~0 their losses agree epoch by epoch."""
    job = runner.Job(config=TINY, method="dp-sgd", seed=1, learning_rate=1e-30, noise_multiplier=1.0)
    private, plain = runner.run(job), runner.run(dataclasses.replace(job, method="non-private"))
    means = [np.average(r.curves["train_loss"]) for r in (private, plain)]
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_norms_are_counted_in_their_decades():
    kept = norms.Norms()
    kept.add(
        7, [torch.tensor([0.0, 1e-30, 1.0, 1.0, 1e9, float("inf")])], [torch.tensor([2.0, 2.0, 0.5, 0.7, 0.1, 0.0])]
    )
    told = kept.to_dict()
    assert sum(told["counts"]) == 5 and told["not_finite"] == 1 and told["epochs"] == [7]
    place = int(np.argmin(np.abs(np.array(told["log10_norm"]))))
    assert told["counts"][place] == 2 and told["mean_weight"][place] == pytest.approx(0.6)
    assert norms.Norms().to_dict() is None


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
        assert [t["rate"] for t in record.search["tries"]] == list(TINY.grid)


def test_an_empty_or_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\. Run 'dpscale compare digits --out"):
        records.load(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        records.load(tmp_path / "none")


@pytest.mark.parametrize("text", ["{", "[]", '{"format": 0}', "\udcff"])
def test_a_corrupt_record_is_named_with_the_next_action(tmp_path, text):
    (tmp_path / "broken.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(ValueError, match=r"broken\.json is not .* Delete it and run the same command again"):
        records.load(tmp_path)


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(records.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        records.write(tmp_path / "r.json", "text")
    assert list(tmp_path.iterdir()) == []


# -- comparison ------------------------------------------------------------------------------------------------


def test_a_second_comparison_repeats_nothing(folder, monkeypatch):
    monkeypatch.setattr(compare, "run", lambda job: pytest.fail(f"{job.method} was run again"))
    monkeypatch.setattr(compare, "calibrate", lambda config: pytest.fail("calibrated again"))
    chosen = presets.methods("dp-sgd,dp-psasc")
    again = compare.compare(TINY, chosen, [0, 1], folder, workers=1)
    assert [(r.method, r.seed) for r in again] == [("dp-sgd", 0), ("dp-sgd", 1), ("dp-psasc", 0), ("dp-psasc", 1)]


def test_other_settings_are_run_anew(folder):
    kept = [
        records.key(config.to_dict(), "final", "dp-sgd", 0, 0.1, "1")
        for config in (TINY, TINY.replace(epochs=3), TINY.replace(epsilon=2.0), TINY.at_rate(0.1))
    ]
    assert len(set(kept)) == 4


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
    assert [r.curves for r in one] == [r.curves for r in two]


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
    blank = dict.fromkeys((f.name for f in dataclasses.fields(summary.Row)), None)
    return summary.Row(**{**blank, "title": title, "accuracy": accuracy, "half_width": half_width, "epsilon": epsilon})


def test_the_verdict_calls_nobody_better_within_intervals():
    rows = [row("N", 0.99, 0.001, None), row("A", 0.90, 0.02), row("B", 0.93, 0.015)]
    assert summary.verdict(rows).startswith("No two of the 2 private methods differ")
    rows.append(row("C", 0.80, 0.01))
    assert "A is above C; B is above C." in summary.verdict(rows)
    assert "no interval" in summary.verdict([row("A", 0.9, None), row("B", 0.5, 0.1)])


def test_the_verdict_looks_seed_by_seed_too(found):
    pair = [r for r in found if r.method in ("dp-sgd", "dp-psasc")]
    moved = [dataclasses.replace(r, accuracy=0.9 + 0.05 * r.seed - 0.01 * (r.method == "dp-sgd")) for r in pair]
    rows = summary.summarize(moved)
    assert rows[0].difference == pytest.approx(-0.01) and rows[1].difference is None
    told = summary.verdict(rows)
    assert told.startswith("No two of the 2 private methods differ") and "DP-SGD (−1.0 ± 0.0 points)" in told


def test_settings_are_never_mixed_in_a_table(found):
    other = dataclasses.replace(found[0], config={**found[0].config, "epochs": 9}, created="1999")
    chosen, left_out = summary.select([*found, other])
    assert chosen == found and left_out == 1
    chosen, left_out = summary.select([*found, other], like=other)
    assert chosen == [other] and left_out == len(found)


# -- figures and report ----------------------------------------------------------------------------------------


def test_pictures_come_as_png_and_as_svg_in_the_pages_colours(found):
    for draw in (figures.accuracy_curves, figures.scaling_weights, figures.norm_distribution):
        figure = draw(found)
        assert figures.png(figure, dpi=40).startswith(b"\x89PNG")
        text = figures.svg(figure, "name", "what it shows")
        assert text.startswith("<svg") and "var(--ink)" in text and 'aria-label="what it shows"' in text
        assert "DP-PSASC" in text and not re.search(r'id="(?!name-)', text)


def test_the_report_stands_by_itself(folder, found, tmp_path):
    for record in found:
        record.save(tmp_path)  # nothing but records: no data, no model, no search folder
    path, rows = report.write(tmp_path)
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text) and "@import" not in text and "url(http" not in text
    assert not re.search(r"https?://", text)
    assert text.count("<svg") == 3 and text.count("</svg>") == 3
    for r in rows:
        assert r.title in text and summary.percent(r.accuracy, r.half_width) in text
    assert (
        report.escape(TINY.note) in text
        and summary.verdict(rows) in text
        and "not counted in epsilon" in text
        and "tiny" in text
    )
    assert found[0].versions["torch"] in text and "Guarantee:" in text and "prefers-color-scheme: dark" in text
    for line in {line for r in rows for line in r.statement.splitlines()}:
        assert report.escape(line) in text


def test_a_single_record_makes_a_report(found, tmp_path):
    found[0].save(tmp_path)
    path, rows = report.write(tmp_path)
    assert len(rows) == 1 and path.read_text(encoding="utf-8").count("<svg") == 3
