"""What records are shown as: pictures, the report, tables, bars."""

import dataclasses
import io
import itertools
import re
import shutil
from html import escape

import numpy as np
import pytest
from rich.console import Console

from dpscale.engine.phases import phase
from dpscale.lab import figures, paper, presets, records, report, stats, terminal
from dpscale.lab.compare import Event
from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.progress import Progress

from .helpers import run as run_command
from .lab_runs import TINY, experiment, job

# -- pictures --------------------------------------------------------------------------------------------------

PLAIN = ["accuracy", "weights"]


PAST_THE_NOISE = ["norms", "similarity-dp-sgd", "mean-weight"]


def without_diagnostics(found):
    return [record.replace(diagnostics=None) for record in found]


def test_pictures_come_as_png_and_as_svg_and_say_if_they_look_past_the_noise(found, tmp_path):
    drawn = figures.pictures(found)
    assert [one.name for one in drawn] == [*PLAIN, *PAST_THE_NOISE]
    figures.write(tmp_path, drawn)
    assert {path.name for path in tmp_path.iterdir()} == {f"{one.name}.{s}" for one in drawn for s in ("png", "svg")}
    for one in drawn:
        assert (tmp_path / f"{one.name}.png").read_bytes().startswith(b"\x89PNG")
        file, text = (tmp_path / f"{one.name}.svg").read_text(), figures.svg(one.figure, "name", "what it shows")
        assert text.startswith("<svg") and "var(--ink)" in text and 'aria-label="what it shows"' in text
        assert "DP-PSASC" in text and not re.search(r'id="(?!name-)', text) and "var(--" not in file
        assert (
            one.private == (one.name in PLAIN) == (figures.NOT_PRIVATE not in text) == (figures.NOT_PRIVATE not in file)
        )
    assert [one.name for one in figures.pictures(without_diagnostics(found))] == PLAIN


def test_each_baseline_has_a_panel_with_the_same_axes(found):
    psasc = [r for r in found if r.method == "dp-psasc"]
    others = [
        r.replace(method=name, title=METHODS[name].title)
        for name in ("dp-sgd", "auto-s", "dp-psac", "dp-psasc-star")
        for r in psasc
    ]
    narrow = {"steps": 9, "mean": -0.5, "bin_width": 0.01, "cosine": [-0.495], "counts": [9]}
    others = [
        r.replace(diagnostics={**r.diagnostics, "similarity": narrow}) if r.method == "auto-s" else r for r in others
    ]
    drawn = {one.name: one.figure for one in figures.pictures([*psasc, *others])}
    panels = {name: drawn[f"similarity-{name}"] for name in figures.BASELINES}
    assert len({(f.axes[0].get_xlim(), f.axes[0].get_ylim()) for f in panels.values()}) == 1
    for name, figure in panels.items():
        shown = {text.get_text() for legend in figure.legends for text in legend.get_texts()}
        assert shown == {METHODS[name].title, "DP-PSASC", "DP-PSASC*"}


def test_a_panel_loses_no_step(found):
    figure = figures.similarity(found, "dp-sgd").figure
    shares = [patch.get_data() for patch in figure.axes[0].patches]
    assert len(shares) == 4  # a filled and a plain one for either method
    for values, edges, _ in shares:
        assert values.sum() == pytest.approx(100) and len(values) + 1 == len(edges)


@pytest.mark.parametrize("half", [0.02, 0.06, 0.085, 0.1, 0.12, 0.5])
def test_cosines_below_a_panel_stay_apart(found, half):
    counts = {"steps": 3, "mean": 0.0, "bin_width": 0.001, "cosine": [-half, 0.0, half], "counts": [1, 1, 1]}
    chosen = [r for r in found if r.diagnostics and r.diagnostics["similarity"]]
    chosen = [r.replace(diagnostics={**r.diagnostics, "similarity": counts}) for r in chosen]
    figure = figures.similarity(chosen, "dp-sgd").figure
    figures.png(figure)  # which places the labels
    places = [label.get_window_extent() for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert len(places) > 2
    assert all(right.x0 - left.x1 > 0.3 * left.width for left, right in itertools.pairwise(places))


def test_mean_weights_are_those_of_the_records(found):
    axes = figures.mean_weights(found).figure.axes[0]
    (line,) = axes.lines  # DP-SGD is no part of it
    wanted = np.mean([r.diagnostics["mean_weight"] for r in found if r.method == "dp-psasc"], axis=0)
    assert line.get_label() == "DP-PSASC" and line.get_ydata() == pytest.approx(wanted)
    assert line.get_xdata().tolist() == [1, 2]


def test_no_two_methods_look_alike():
    assert len({str(figures.look(name, marked=True)) for name in METHODS}) == len(METHODS)


def test_one_picture_sets_every_experiment_beside_the_paper(several):
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


def test_the_forest_shows_every_difference_with_its_interval(several):
    found = paper.load(several)
    picture = figures.forest(found)
    for one, axes in zip(found[:2], picture.figure.axes, strict=True):
        rows = [row for row in one.rows if row.p is not None]
        assert [label.get_text() for label in axes.get_yticklabels()] == [row.title for row in rows]
        ends = [bars.get_segments()[0][:, 0] for bars in axes.collections]
        assert np.array(ends) == pytest.approx(100 * np.array([row.interval for row in rows]))
    assert [one.title for one in found[:2]] == [axes.get_title("left") for axes in picture.figure.axes]
    assert figures.forest(found[2:]) is None


def test_what_the_paper_has_not_is_not_set_beside_it(found):
    assert figures.beside_the_paper([experiment(*found)]) is None


# -- report ----------------------------------------------------------------------------------------------------


def alone(text):
    """Whether a page stands by itself: it names no other file and no address."""
    links = re.search(r"""(?:src|href)\s*=\s*["'](?!#)""", text)
    return not links and "@import" not in text and "url(http" not in text and not re.search(r"https?://", text)


def written(folder):
    (one,) = paper.load(folder)
    return report.write_all(folder, [one]), one


def test_the_report_stands_by_itself(found, tmp_path):
    for record in found:
        record.save(tmp_path)  # nothing but records: no data, no model, no search folder
    path, one = written(tmp_path)
    rows = one.rows
    text = path.read_text(encoding="utf-8")
    assert alone(text) and "prefers-color-scheme: dark" in text and "@media print" in text
    assert text.count("<svg") == text.count("</svg>") == 6 and "--diagnostics" not in text
    assert text.count("Not private: measured without noise") == len(PAST_THE_NOISE)
    for r in rows:
        assert r.title in text and r.shown in text
        sigma = "—" if r.noise_multiplier is None else f"{r.noise_multiplier:.3f}"
        assert f'<td data-label="σ, noise">{sigma}</td>' in text
        assert Choice(**r.choice).label() in text
    assert escape(TINY.note) in text and escape(stats.headline(rows)) in text
    assert "not counted in epsilon" in text and "tiny" in text and found[0].versions["torch"] in text
    said = [line for dd in re.findall(r"<dd>(.*?)</dd>", text, re.DOTALL) for line in dd.splitlines()]
    for line in {line for r in rows for line in r.statement.splitlines()}:
        assert said.count(str(escape(line))) == 1  # however many methods it is of
    assert text.index("<svg") < text.index("<table")  # pictures before the cards of a phone
    terms = dict(re.findall(r"<dt>([^<]+)</dt><dd>([^<]+)</dd>", text[text.index('class="terms"') :]))
    assert {"ε spent", "σ", "rate", "γ1", "p"} <= set(terms) and "K0" not in terms  # no run here has it


def test_a_report_without_diagnostics_says_how_to_get_them(found, tmp_path):
    found[0].replace(diagnostics=None).save(tmp_path)
    path, one = written(tmp_path)  # of a single record
    assert len(one.rows) == 1 and path.read_text(encoding="utf-8").count("<svg") == 1
    for record in without_diagnostics(found):
        record.save(tmp_path)
    text = written(tmp_path)[0].read_text(encoding="utf-8")
    assert text.count("<svg") == 3 and "they are not private; on public data, --diagnostics records them" in text


@pytest.fixture
def several(found, tmp_path):
    """A folder of three experiments: one whole, one on features with a run missing, one whose search goes on."""
    out = tmp_path / "paper"
    for record in found:
        record.replace(config={**record.config, "preset": "mnist"}).save(out / "mnist")
        if (record.method, record.seed) != ("dp-sgd", 1):
            data = {**record.data, "features": {"encoder": "resnet50-imagenet"}}
            config = {**record.config, "preset": "cifar10-simclr"}
            record.replace(config=config, data=data).save(out / "cifar10-simclr")
    tried = found[0].replace(role="search", config={**found[0].config, "preset": "imagenette"})
    tried.save(out / "imagenette")
    return out


@pytest.fixture
def undrawn(monkeypatch):
    """Pictures of an experiment take seconds, and have tests of their own."""
    monkeypatch.setattr(figures, "pictures", lambda _: [])


def test_the_page_of_all_experiments_keeps_those_that_were_not_asked_for(several, tmp_path, monkeypatch, undrawn):
    out = shutil.copytree(several, tmp_path / "out")
    mnist = next(one for one in paper.load(out) if one.preset == "mnist")
    asked = []
    monkeypatch.setattr(paper, "experiments", lambda all_, *_, **__: asked.extend(one for one, *_ in all_) or [mnist])
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


def test_the_report_of_several_sets_the_papers_figures_beside_ours(several, monkeypatch):
    monkeypatch.setattr(figures, "norms", lambda _: None)
    found = paper.load(several)
    text = report.write_all(several, found).read_text(encoding="utf-8")
    assert alone(text) and text.count("<h1>") == 1 and text.count("<section") == 2
    assert text.count('aria-label="Test accuracy of each method here') == 1
    overview = text[text.index('class="cards overview"') : text.index("</table>")]
    for name in ("dp-sgd", "dp-psasc"):
        for one in found:
            assert f"paper {paper.ACCURACY[one.preset][name]:.2f}" in overview
    for row in found[0].rows:
        assert f"<b>{100 * row.accuracy:.1f}</b> <span>± {100 * row.half_width:.1f}</span>" in overview
    assert "features of resnet50-imagenet" in overview and "1 run left" in overview and "not finished" in overview
    assert "2 seeds" in overview and "1 seed<" in overview  # the latter of the method that misses one
    verdicts = text[text.index('class="verdicts"') : text.index("<svg")]
    for one in found[:2]:
        assert escape(stats.headline(one.rows)) in verdicts and (several / one.preset / "report.html").is_file()
    assert paper.NOT_FINISHED in verdicts
    ids = re.findall(r'\bid="([^"]*)"', text)
    assert len(ids) == len(set(ids))


def test_untuned_rates_are_said_with_the_verdict(several, undrawn):
    (one, *_) = paper.load(several)
    given = dataclasses.replace(one, records=[r.replace(search=None) for r in one.records])
    assert one.verdict == stats.verdict(one.rows)
    assert given.verdict == f"{stats.verdict(one.rows)} Rates were given, not searched."
    assert "The rates were given, not searched in this run" in report.page([given])


def test_packed_experiments_make_the_same_page(several, tmp_path, undrawn):
    packed = tmp_path / "packed"
    for name in ("mnist", "cifar10-simclr"):
        records.pack(several / name, packed / f"{name}.jsonl")
    loose = [one for one in paper.load(several) if one.records]
    assert report.page(paper.load(packed)) == report.page(loose)
    assert report.write_all(packed, loose) == packed / "report.html"
    assert {path.name for path in packed.iterdir()} == {"report.html", "mnist.jsonl", "cifar10-simclr.jsonl"}


def test_a_report_says_what_is_out_of_the_ordinary(folder, found):
    said = report.settings(experiment(*found))
    assert said.endswith(f"expected batch {TINY.batch}.")
    others = {"optimizer": "nadam", "schedule": "cosine", "average": 0.9}
    changed = [r.replace(config=r.config | others) for r in found]
    told = "NAdam, a learning rate that falls to 0 (cosine), measured at the moving average of the weights"
    assert told in report.settings(experiment(*changed))


def test_the_results_page_has_every_table(several, tmp_path):
    found, page = paper.load(several), tmp_path / "it is told.md"
    page.write_text(f"# Mine\n\nThe line {report.MARK} is named here.\n\n{report.MARK}\nold tables")
    for _ in range(2):  # what it wrote can be written again
        report.write_markdown(page, found, report.before_tables(page))
    text = page.read_text(encoding="utf-8")
    assert text.startswith(f"# Mine\n\nThe line {report.MARK} is named here.\n\n{report.MARK}\n\nTest accuracy")
    assert "old tables" not in text and "figures/it%20is%20told.png" in text
    assert {path.name for path in (tmp_path / "figures").iterdir()} == {"it is told.png", "it is told-differences.png"}
    for one in found[:2]:
        part = text[text.index(f"\n## {one.preset}\n") :]
        for row in one.rows:
            line = next(line for line in part.splitlines() if line.startswith(f"| {row.title} |"))
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            theirs = one.paper.get(row.method)
            assert cells[1:4] == [
                "—" if theirs is None else f"{theirs:.2f}", row.shown.replace("%", ""), row.shown_difference,
            ]  # fmt: skip
            assert cells[4] == ("—" if row.p_holm is None else f"{row.p_holm:.3f}")
            assert cells[7] == Choice(**row.choice).label() and cells[5] == (
                f"{row.noise_multiplier:.4f}" if row.epsilon else "—"
            )
        assert stats.verdict(one.rows) in part and one.records[0].versions["torch"] in part and "\ntiny\n" in part
    assert "features of resnet50-imagenet, 1 run left" in text and paper.NOT_FINISHED in text
    widths = {line.count("|") for line in text.splitlines() if line.startswith("| ")}
    assert widths == {6, 10}  # the table of all, and those of each
    starred = [dataclasses.replace(row, title="DP-PSASC*") for row in found[0].rows]
    report.write_markdown(page, [dataclasses.replace(found[0], rows=starred)], "# Results")
    assert "| DP-PSASC\\* |" in page.read_text(encoding="utf-8")


def test_a_name_from_a_record_is_no_markup(found, undrawn):
    evil = 'p"><script>alert(1)</script>&\\1'
    renamed = [r.replace(config={**r.config, "preset": evil, "note": evil}, title=evil, command=evil) for r in found]
    text = report.page([experiment(*renamed, preset=evil)])
    assert "<script" not in text
    names = ["mnist-accuracy", "MNIST-accuracy", "mnist accuracy", "mnist-accuracy-", "é", "?", ""]
    slugs = [figures.slug(name) for name in names]
    assert slugs[0] == names[0] and len(set(slugs)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) for slug in slugs)


# -- terminal --------------------------------------------------------------------------------------------------


def printed(monkeypatch, show, *arguments):
    stream = io.StringIO()
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=stream, width=80, highlight=False))
    show(*arguments)
    text = stream.getvalue()
    assert "…" not in text and max(map(len, text.splitlines())) <= 80, text
    return text


def test_tables_are_whole_at_80_columns(several, monkeypatch):
    found = paper.load(several)
    long = {"rate": 0.25, "gamma1": 0.1, "K0": 2, "gamma0": 0.5}
    wide = {"title": "Non-private SGD", "test_size": 10_000, "half_width": 0.1234, "choice": long}
    one = dataclasses.replace(found[1], rows=[dataclasses.replace(row, **wide) for row in found[0].rows])
    told = printed(monkeypatch, terminal.results, "title", [one, *found], "paper")
    assert "97.35%" in told and "features of resnet50-imagenet" in told and "unfinished, 1 run left" in told
    told = printed(monkeypatch, terminal.results, "title", [one], "rate, momentum")
    assert "0.25, γ1 0.1, K0 2, γ0 0.5" in told and "preset" not in told
    settings = [
        dict(preset=name, samples=162_079, batch=1024, epochs=60, C=0.25, r=1e-3, s=0.55, epsilon=9.0,
             delta=5e-6, noise_multiplier=1.96912, noise_multiplier_rdp=2.10819,
             encoder=presets.PRESETS[name].encoder)
        for name in paper.PRESETS
    ]  # fmt: skip
    told = printed(monkeypatch, terminal.settings, settings)
    assert "1.9691" in told and "5e-6" in told and "features of resnet50-imagenet" in told


def steps(what, done, words=str):
    return Progress(what, done, 20, "steps", words)


def test_the_bar_says_what_a_run_waits_for(monkeypatch):
    shown, asked = io.StringIO(), []
    monkeypatch.setattr(terminal, "Console", lambda **_: Console(file=shown, force_terminal=True, color_system=None))
    with terminal.progress("a run", quiet=False) as show:
        for what in ("compiling", "training"):
            show(steps(what, 0))
            assert re.search(rf"a run: {what}.* 0/20 steps", shown.getvalue())
        for _ in range(3):  # once a percent: words may take a moment
            show(steps("training", 10, lambda: asked.append("loss") or "training loss 0.500"))
    assert re.search(r"a run: training.* 10/20 steps, training loss 0.500", shown.getvalue()) and asked == ["loss"]


def test_lines_say_what_a_run_waits_for_where_there_is_no_terminal(capsys):
    with terminal.progress("a run", quiet=False) as show:
        for what in ("tracing", "compiling", "training"):
            show(steps(what, 0))
        assert capsys.readouterr() == ("", "tracing …\ncompiling …\ntraining …\n")
        for done in (10, 11):
            show(steps("training", done, lambda: "training loss 0.500"))
        assert capsys.readouterr() == ("", "[10/20 steps] a run: training loss 0.500\n")
    with terminal.progress("a run", quiet=True) as show:
        show(steps("compiling", 0))
        show(steps("training", 10, lambda: pytest.fail("nobody sees it")))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("total", [1, 3, 9, 10, 11, 24, 60_000])
def test_a_line_is_due_at_each_tenth_and_at_the_end(total):
    due = terminal.tenths()
    told = [done for done in range(total + 1) if due(done, total)]
    assert len(told) == min(total, 10) and told[-1] == total
    assert all(after - before <= total / 10 + 1 for before, after in itertools.pairwise([0, *told]))


def test_lines_say_how_far_several_experiments_are_and_nobody_listens_after(found, capsys):
    with terminal.runs_bar(quiet=False) as show:
        show("digits", Event(job=job(), done=0, total=2))
        with phase("compiling"):
            pass
        show("digits", Event(job=job(), record=found[0], done=1, total=2))
    told = capsys.readouterr().err.splitlines()
    assert told[:2] == ["digits …", "compiling …"] and told[2].startswith("[1/2 runs] dp-psasc: seed 3, rate 0.1, acc")
    with phase("compiling"):
        pass
    assert "compiling" not in capsys.readouterr().err


def test_a_bar_says_what_has_begun_and_of_how_many(monkeypatch):
    """Of runs that take minutes, the first should be seen before it is done."""
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, color_system=None, width=120)
    monkeypatch.setattr(terminal, "Console", lambda **_: console)
    with terminal.runs_bar(quiet=False) as show:
        show("digits", Event(job=job("dp-psasc-star", role="search"), done=3, total=40))
        assert "3/40 runs, dp-psasc-star: search" in screen.getvalue()
        show("digits", Event(job=job("auto-s", seed=2), done=4, total=40))
        assert "4/40 runs, auto-s: seed 2" in screen.getvalue()
