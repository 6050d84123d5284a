"""The report: one HTML file that stands by itself, from records alone. It reads on a phone, in the dark, in print."""

import math
from collections.abc import Iterable, Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from dpscale.lab import figures, records, summary
from dpscale.lab.records import Record
from dpscale.lab.summary import Row

NAME = "report.html"


def write(folder: Path, like: Record | None = None) -> tuple[Path, list[Row]]:
    """Make ``folder/report.html`` from the records in ``folder``; return its path and the rows of its table.

    Of several settings in one folder, those of ``like`` are shown, or else the newest.
    """
    chosen, left_out = summary.select(records.load(folder), like)
    rows = summary.summarize(chosen)
    path = folder / NAME
    records.write(path, page(chosen, rows, left_out))
    return path, rows


def page(chosen: Sequence[Record], rows: Sequence[Row], left_out: int = 0) -> str:
    """The whole page as text."""
    first = chosen[0]
    config = first.config
    title = f"Private training on {config['preset']}"
    budget = f"ε = {config['epsilon']:g}, δ = {config['delta']:g}"
    style = resources.files("dpscale.lab").joinpath("report.css").read_text(encoding="utf-8")
    return "\n".join(
        (
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title>",
            f"<style>{style}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            f'<p class="soft">{len(rows)} methods, {_seeds(rows)}, {escape(budget)}, '
            f"{config['epochs']} epochs, expected batch {config['batch']}.</p>",
            f'<p class="verdict">{escape(summary.verdict(rows))}</p>',
            *_table(rows, config.get("note", "")),
            *_pictures(chosen),
            *_privacy(rows),
            *_search(chosen),
            *_facts(chosen, left_out),
            "</body></html>\n",
        )
    )


def _seeds(rows: Sequence[Row]) -> str:
    counts = sorted({len(row.seeds) for row in rows})
    return f"{'–'.join(map(str, counts))} {'seed' if counts == [1] else 'seeds'} each"


def _table(rows: Sequence[Row], note: str) -> Iterable[str]:
    yield "<h2>Accuracy</h2>"
    yield '<div class="scroll"><table><thead><tr><th scope="col">method</th><th scope="col">test accuracy</th>'
    yield '<th scope="col">ε spent</th><th scope="col" class="wide">σ</th>'
    yield '<th scope="col" class="wide">rate × bound</th>'
    yield '<th scope="col" class="wide">against DP-PSASC,<br>seed by seed</th>'
    yield '<th scope="col">seconds<br>per run</th></tr></thead><tbody>'
    for row in rows:
        spent = "—" if row.epsilon is None else f"{row.epsilon:.2f}"
        sigma = "—" if row.noise_multiplier is None else f"{row.noise_multiplier:.3f}"
        yield f'<tr><th scope="row">{escape(row.title)}</th><td>{summary.percent(row.accuracy, row.half_width)}</td>'
        yield f'<td>{spent}</td><td class="wide">{sigma}</td><td class="wide">{row.rate:g}</td>'
        yield f'<td class="wide">{summary.signed(row.difference, row.difference_half_width)}</td>'
        yield f"<td>{row.seconds:.1f}</td></tr>"
    yield "</tbody></table></div>"
    yield (
        '<p class="note">Mean over seeds and 95% interval (Student\'s t), measured once, after the last epoch. '
        "The interval covers initialisation, batches and noise; it does not cover the choice of test images. "
        "Methods share their outer momentum and the number of rates tried. Runs of one seed share initialisation, "
        "batches and noise, so a difference seed by seed has a narrower interval than either mean.</p>"
    )
    if note:
        yield f'<p class="note">{escape(note)}</p>'
    controls = [row for row in rows if row.about.startswith("Control")]
    if controls:
        told = " ".join(f"<b>{escape(row.title)}</b>: {escape(row.about)}" for row in controls)
        yield (
            f'<p class="note">Under SGD, s divides the learning rate and makes the stabiliser a little larger, nothing '
            f"else. The controls tell the two apart. {told}</p>"
        )


def _pictures(chosen: Sequence[Record]) -> Iterable[str]:
    last: list[int] = next((r.diagnostics["epochs"] for r in chosen if r.diagnostics), [])
    span = f"epochs {last[0]} to {last[-1]}" if last else "no epoch"
    pictures = (
        (
            "accuracy",
            figures.accuracy_curves(chosen),
            "Test accuracy after every epoch; the band is the 95% interval over seeds. "
            "No epoch or rate was chosen on it.",
        ),
        (
            "weights",
            figures.scaling_weights(chosen),
            "What each rule multiplies a sample's gradient by, against the norm of that gradient.",
        ),
        (
            "norms",
            figures.norm_distribution(chosen),
            f"Per-sample gradient norms in {span}. Measured without noise, so not private: public data only.",
        ),
    )
    yield '<h2>Pictures</h2><div class="pictures">'
    for name, figure, caption in pictures:
        picture = figures.svg(figure, name, escape(caption, quote=True))
        yield f"<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>"
    yield "</div>"


def _privacy(rows: Sequence[Row]) -> Iterable[str]:
    lines = {row.method: row.statement.splitlines() for row in rows}
    private = [lines[row.method] for row in rows if row.epsilon is not None]
    # What all private methods have in common is said once; each method keeps the lines that are its own.
    common = [line for line in private[0] if all(line in other for other in private)] if len(private) > 1 else []
    yield '<h2>What is private, and how far</h2><dl class="privacy">'
    if common:
        yield f"<dt>All {len(private)} private methods</dt><dd>{escape(chr(10).join(common))}</dd>"
    for row in rows:
        own = [line for line in lines[row.method] if line not in common]
        yield f"<dt>{escape(row.title)}</dt><dd>{escape(chr(10).join(own))}</dd>"
    yield "</dl>"


def _search(chosen: Sequence[Record]) -> Iterable[str]:
    found = {r.search["searched_for"]: (r.title, r.search) for r in reversed(chosen) if r.search}
    yield "<h2>Learning rates</h2>"
    if not found:
        yield "<p>The rates were given, not searched in this run. A search on private data is not counted in ε.</p>"
        return
    first = next(iter(found.values()))[1]
    yield f"<p>{escape(first['note'])}</p>"
    yield (
        f"<p>Accuracy on {100 * first['held_out']:g}% of the training data, one run per rate. "
        "Rates are learning rate × bound, so that rules of different bounds are treated alike; "
        "the rate chosen is marked.</p>"
    )
    head = "".join(f'<th scope="col">{t["rate"]:g}</th>' for t in first["tries"])
    yield f'<div class="scroll"><table><thead><tr><th scope="col">method</th>{head}</tr></thead><tbody>'
    for title, search in reversed(found.values()):
        cells = "".join(
            f"<td>{'<b>' if t['rate'] == search['chosen'] else ''}{100 * t['accuracy']:.1f}"
            f"{' ✓</b>' if t['rate'] == search['chosen'] else ''}</td>"
            for t in search["tries"]
        )
        yield f'<tr><th scope="row">{escape(title)}</th>{cells}</tr>'
    yield "</tbody></table></div>"


def _facts(chosen: Sequence[Record], left_out: int) -> Iterable[str]:
    first = chosen[-1]
    seconds = math.fsum(record.seconds for record in chosen)
    facts: dict[str, Any] = {
        "runs": f"{len(chosen)}, {seconds:.0f} s of computing in all, the search not included",
        **dict(first.versions),
        "commit": first.commit or "not from a checkout",
        "finished": max(record.created for record in chosen),
        "settings": ", ".join(f"{k} = {v}" for k, v in first.config.items() if k not in ("rates", "preset", "note")),
    }
    if left_out:
        facts["left out"] = f"{left_out} records of other settings in the same folder"
    yield "<h2>To repeat this</h2>"
    for command in dict.fromkeys(record.command for record in chosen if record.command):
        yield f"<pre><code>{escape(command)}</code></pre>"
    yield '<dl class="facts">'
    yield from (f"<dt>{escape(name)}</dt><dd>{escape(str(value))}</dd>" for name, value in facts.items())
    yield "</dl>"
