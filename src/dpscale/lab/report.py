"""The report: one HTML file that stands by itself, from records alone. It reads on a phone, in the dark, in print.

An experiment is a section. A page of one experiment is that section under its title; a page of several begins with one
table of all accuracies, the paper's beside ours, and with what can be said of each experiment.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dpscale.lab import figures, paper, records, summary
from dpscale.lab.figures import Picture
from dpscale.lab.paper import Experiment
from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.records import Record
from dpscale.lab.summary import Row, plural

NAME = "report.html"
NOT_FINISHED = "No final run is finished yet."
HOW_TO_DIAGNOSE = (
    "Gradient norms, mean weights and gradient similarity were not recorded. They look past the noise, so they are not "
    "private; on public data, --diagnostics records them."
)


def write(folder: Path, like: Sequence[Record] = ()) -> tuple[Path, list[Row]]:
    """Make ``folder/report.html`` from one experiment's records in ``folder``; return its path and its table's rows.

    Of several settings in one folder, those of ``like`` are shown, and its rates, or else the newest.
    """
    (one,) = paper.load(folder, like)
    path = folder / NAME
    records.write(path, page([one]))
    return path, one.rows


def write_all(folder: Path, found: Sequence[Experiment]) -> Path:
    """Make ``folder/report.html`` of several experiments, and one of each in its own folder, where it has one."""
    for one in found:
        if one.records and (folder / one.preset).is_dir():
            records.write(folder / one.preset / NAME, page([one]))
    path = folder / NAME
    records.write(path, page(found))
    return path


def page(found: Sequence[Experiment]) -> str:
    """The whole page as text."""
    style = resources.files("dpscale.lab").joinpath("report.css").read_text(encoding="utf-8")
    alone = len(found) == 1 and bool(found[0].rows)
    title = f"Private training on {found[0].preset}" if alone else _title(found)
    body = _alone(found[0]) if alone else _several(found)
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            "</body></html>\n",
        )
    )


def _title(found: Sequence[Experiment]) -> str:
    return "The paper's experiments, run anew" if all(one.paper for one in found) else "Private training, compared"


def _alone(one: Experiment) -> Iterable[str]:
    yield f'<p class="soft">{escape(settings(one))}</p>'
    yield from _unfinished(one)
    yield f'<p class="verdict">{escape(verdict(one))}</p>'
    yield from _section(one, one.preset, 2)


def _several(found: Sequence[Experiment]) -> Iterable[str]:
    runs = sum(len(one.records) for one in found)
    yield f'<p class="soft">{len(found)} experiments, {runs} runs. Test accuracy in percent, after the last epoch.</p>'
    yield from _overview(found)
    if (picture := figures.beside_the_paper(found)) is not None:
        yield from ('<div class="pictures alone">', _figure(picture, "overview"), "</div>")
    yield '<h2>Which methods differ</h2><dl class="verdicts">'
    for one in found:
        yield f"<dt>{escape(one.preset)}</dt><dd>{escape(verdict(one))}</dd>"
    yield "</dl>"
    for one in (one for one in found if one.rows):
        yield f'<section id="{escape(one.preset)}"><h2 class="experiment">{escape(one.preset)}</h2>'
        yield f'<p class="soft">{escape(settings(one))}</p>'
        yield from _unfinished(one)
        yield from _section(one, one.preset, 3)
        yield "</section>"


def verdict(one: Experiment) -> str:
    """What can be said of an experiment: which methods differ, and whether they were tuned alike."""
    if not one.rows:
        return NOT_FINISHED
    tuned = all(record.search for record in one.records)
    return ("" if tuned else "Rates were given, not searched. ") + summary.verdict(one.rows)


def _overview(found: Sequence[Experiment]) -> Iterable[str]:
    titles = {row.method: row.title for one in found for row in one.rows}
    order = list(dict.fromkeys(name for name in (*METHODS, *titles) if name in titles))
    yield '<div class="scroll"><table class="cards overview"><thead><tr><th scope="col">experiment</th>'
    yield "".join(f'<th scope="col">{escape(titles[name])}</th>' for name in order) + "</tr></thead><tbody>"
    for one in found:
        rows = {row.method: row for row in one.rows}
        most = max((len(row.seeds) for row in one.rows), default=0)
        yield f'<tr><th scope="row">{_about(one, most)}</th>'
        for name in order:
            yield _accuracy_cell(titles[name], rows.get(name), one.paper.get(name), most)
        yield "</tr>"
    yield "</tbody></table></div>"
    yield (
        "<p class=\"note\">Mean over seeds and its 95% interval (Student's t); below it the paper's figure, where it "
        "has one. The paper gives no intervals, no learning rates, no momenta. Where they were searched "
        "here, every method had the same number of tries, unless the experiment says otherwise. The number of seeds "
        "stands with the experiment, or with a "
        "method that has fewer.</p>"
    )


def _about(one: Experiment, seeds: int) -> str:
    name = escape(one.preset)
    told = [f'<a href="#{name}">{name}</a>' if one.rows else name]
    if one.records:
        config = one.records[0].config
        told.append(f"<small>ε {config['epsilon']:g}, δ {config['delta']:g}</small>")
        told.append(f"<small>{plural(seeds, 'seed')}</small>")
    if one.encoder:
        told.append(f"<small>features of {escape(one.encoder)}</small>")
    if one.left:
        told.append(f'<small class="warn">{plural(one.left, "run")} left</small>')
    elif not one.rows:
        told.append('<small class="warn">not finished</small>')
    return "<br>".join(told)


def _accuracy_cell(title: str, row: Row | None, theirs: float | None, most: int) -> str:
    label = f'<td data-label="{escape(title)}">'
    below = [] if theirs is None else [f"paper {theirs:.2f}"]
    if row is None:
        ours = '<span class="soft">—</span>'
    else:
        mean, _, half = row.shown.replace("%", "").partition(" ± ")
        ours = f"<b>{mean}</b>" + (f" <span>± {half}</span>" if half else "")
        if len(row.seeds) < most:
            below.append(plural(len(row.seeds), "seed"))
    return label + f"<div>{ours}" + "".join(f"<br><small>{line}</small>" for line in below) + "</div></td>"


def settings(one: Experiment) -> str:
    """An experiment in one sentence."""
    config = one.records[0].config
    counts = sorted({len(row.seeds) for row in one.rows})
    span = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    seeds = f"{span} {'seed' if counts == [1] else 'seeds'} each"
    what = f"{config['model']}" + (f" on frozen features of {one.encoder}" if one.encoder else "")
    samples = one.records[0].data["train"]
    optimizer = config.get("optimizer", "sgd")
    how = [] if optimizer == "sgd" else [{"nadam": "NAdam"}.get(optimizer, optimizer)]
    if config.get("schedule", "constant") != "constant":
        how.append(f"a learning rate that falls to 0 ({config['schedule']})")
    if augment := config.get("augment"):
        views = ", ".join(f"{name} {amount:g}" for name, amount in augment.items())
        how.append(f"{plural(config['views'], 'view')} of each sample ({views})")
    if config.get("standardize"):
        how.append("standardized weights of convolutions")
    if config.get("average"):
        how.append(f"measured at the moving average of the weights that keeps {config['average']:g} of itself")
    return (
        f"{plural(len(one.rows), 'method')}, {seeds}, ε = {config['epsilon']:g}, δ = {config['delta']:g}; {what}, "
        f"{samples:,} training samples, {plural(config['epochs'], 'epoch')}, expected batch {config['batch']}"
        f"{''.join(f', {each}' for each in how)}."
    )


def _unfinished(one: Experiment) -> Iterable[str]:
    if one.left:
        yield f'<p class="warn">Unfinished: {plural(one.left, "run")} left. The same command goes on with them.</p>'


def _section(one: Experiment, name: str, level: int) -> Iterable[str]:
    """All that there is about an experiment, under headings of ``level``; ids in it begin with ``name``."""
    parts = {
        "Accuracy": _table(one),
        "Pictures": _pictures(one.records, name),
        "What is private, and how far": _privacy(one.rows),
        "Rates and momenta": _search(one.records, summary.alike(one.rows)),
        "To repeat this": _facts(one.records, one.left_out),
    }
    for title, lines in parts.items():
        yield f"<h{level}>{title}</h{level}>"
        yield from lines


def _table(one: Experiment) -> Iterable[str]:
    against = "against DP-PSASC"
    heads = ["test accuracy", "paper", against, "ε spent", "σ", "rate, momentum", "seconds per run"]
    if not one.paper:
        heads.remove("paper")
    yield '<div class="scroll"><table class="cards"><thead><tr>'
    yield "".join(f'<th scope="col">{head}</th>' for head in ("method", *heads)) + "</tr></thead><tbody>"
    for row in one.rows:
        theirs = one.paper.get(row.method)
        cells = {
            "test accuracy": row.shown,
            "paper": "—" if theirs is None else f"{theirs:.2f}%",
            against: row.shown_difference,
            "ε spent": "—" if row.epsilon is None else f"{row.epsilon:.2f}",
            "σ": "—" if row.noise_multiplier is None else f"{row.noise_multiplier:.3f}",
            "rate, momentum": escape(Choice.of(row.choice).told()),
            "seconds per run": f"{row.seconds:.1f}",
        }
        yield f'<tr><th scope="row">{escape(row.title)}</th>'
        yield "".join(f'<td data-label="{head}">{cells[head]}</td>' for head in heads) + "</tr>"
    yield "</tbody></table></div>"
    yield (
        '<p class="note">Mean over seeds and 95% interval (Student\'s t) of the accuracy after the last epoch, which '
        f"is fixed beforehand. {_measured(one.records)} "
        "The interval covers initialisation, batches and noise; it does not cover the choice of test images. "
        "Runs of one seed share initialisation, batches and noise: the difference to DP-PSASC is taken seed by seed, "
        "and its interval is often narrower than that of either mean, where runs of one seed move together. "
        "Seconds are those of training and of all measurements, without the cold start.</p>"
    )
    note = one.records[0].config.get("note", "")
    if note:
        yield f'<p class="note">{escape(note)}</p>'
    controls = [row for row in one.rows if row.about.startswith("Control")]
    if controls:
        told = " ".join(f"<b>{escape(row.title)}</b>: {escape(row.about)}" for row in controls)
        yield (
            f'<p class="note">Under SGD, s divides the learning rate and makes the stabiliser a little larger, nothing '
            f"else. The controls tell the two apart. {told}</p>"
        )


def _measured(chosen: Sequence[Record]) -> str:
    """How often the test data were looked at."""
    most = max(sum(value is not None for value in record.curves["accuracy"]) for record in chosen)
    times = f"up to {most} times a run" if most > 1 else "once a run"
    return f"Curves are measured {times} on the test data and choose nothing."


def _pictures(chosen: Sequence[Record], name: str) -> Iterable[str]:
    found = figures.pictures(chosen)
    yield '<div class="pictures">'
    yield from (_figure(one, name) for one in found)
    yield "</div>"
    if all(one.private for one in found):
        yield f'<p class="note">{HOW_TO_DIAGNOSE}</p>'


def _figure(one: Picture, name: str) -> str:
    picture = figures.svg(one.figure, f"{name}-{one.name}", escape(one.caption, quote=True))
    mark = "" if one.private else ' <b class="warn">Not private: measured without noise, on public data.</b>'
    return f"<figure>{picture}<figcaption>{escape(one.caption)}{mark}</figcaption></figure>"


def _privacy(rows: Sequence[Row]) -> Iterable[str]:
    lines = {row.method: row.statement.splitlines() for row in rows}
    private = [lines[row.method] for row in rows if row.epsilon is not None]
    # What all private methods have in common is said once; each method keeps the lines that are its own.
    common = [line for line in private[0] if all(line in other for other in private)] if len(private) > 1 else []
    yield '<dl class="privacy">'
    if common:
        yield f"<dt>All {len(private)} private methods</dt><dd>{escape(chr(10).join(common))}</dd>"
    for row in rows:
        own = [line for line in lines[row.method] if line not in common]
        yield f"<dt>{escape(row.title)}</dt><dd>{escape(chr(10).join(own))}</dd>"
    yield "</dl>"


def _search(chosen: Sequence[Record], alike: bool) -> Iterable[str]:
    found = {r.search["searched_for"]: r.search for r in chosen if r.search}
    if not found:
        yield "<p>The rates were given, not searched in this run. A search on private data is not counted in ε.</p>"
        return
    first = next(iter(found.values()))
    yield f"<p>{escape(first['note'])}</p>"
    epochs, whole = first.get("epochs"), chosen[0].config["epochs"]
    early = f" of {plural(epochs, 'epoch')}" if epochs and epochs < whole else ""
    if not alike:
        yield '<p class="warn">The methods were not searched alike.</p>'
    part = f"{100 * first['held_out']:g}% of" if alike else "a part of"
    yield (
        f"<p>Accuracy on {part} the training data, one run per try{early}"
        f"{', the same number of tries for every method' if alike else ''}. Rates are learning rate × bound / γ1, so "
        "that rules of different bounds and momenta of different length are treated alike; the choice made is "
        "marked.</p>"
    )
    yield '<dl class="tries">'
    for method, search in found.items():
        title = METHODS[method].title if method in METHODS else method
        tries = "".join(_try(t, t["choice"] == search["chosen"]) for t in search["tries"])
        yield f"<dt>{escape(title)}</dt><dd>{tries}</dd>"
    yield "</dl>"


def _try(tried: Mapping[str, Any], chosen: bool) -> str:
    shown = f"{100 * tried['accuracy']:.1f}"
    shown = f"<b>{shown} ✓</b>" if chosen else shown
    mark = ' class="chosen"' if chosen else ""
    return f"<span{mark}>{shown}<small>{escape(Choice.of(tried['choice']).told())}</small></span>"


def _facts(chosen: Sequence[Record], left_out: int) -> Iterable[str]:
    first = chosen[-1]
    seconds, cold = (math.fsum(values) for values in zip(*((r.seconds, r.cold_seconds) for r in chosen), strict=True))
    facts: dict[str, Any] = {
        "runs": f"{len(chosen)}, {seconds:.0f} s of training, {cold:.0f} s of cold starts, the search not included",
        "data": _data(first.data),
        **dict(first.versions),
        "commit": first.commit or "not from a checkout",
        "finished": max(record.created for record in chosen),
        "settings": ", ".join(f"{k} = {v}" for k, v in first.config.items() if k not in ("rates", "preset", "note")),
    }
    if left_out:
        facts["left out"] = f"{left_out} records of other settings in the same folder"
    for command in dict.fromkeys(record.command for record in chosen if record.command):
        yield f"<pre><code>{escape(command)}</code></pre>"
    yield '<dl class="facts">'
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    yield "</dl>"


def _data(data: Mapping[str, Any]) -> str:
    """How many samples, and where they are from; their checksums are in the records."""
    parts = [f"{data['train']:,} training and {data['test']:,} test samples", *data.get("source", {}).values()]
    if "features" in data:
        parts.append(f"features of {data['features']['encoder']}")
    return ", ".join(map(str, parts))
