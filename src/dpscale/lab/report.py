"""The report: one HTML file that stands by itself, and tables as Markdown, from records alone.

An experiment is a section. A page of one experiment is that section under its title; a page of several begins with
what can be said of each, and with one table of all accuracies, the paper's beside ours.
"""

import math
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jinja2
from markupsafe import Markup, escape

from dpscale.lab import figures, paper, records, stats
from dpscale.lab.figures import Picture
from dpscale.lab.paper import Experiment
from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.progress import OnProgress, Progress, ignore
from dpscale.lab.records import Record
from dpscale.lab.stats import Row, plural

NAME = "report.html"
GLOSSES = {"p": "of chance alone", "ε spent": "privacy", "σ": "noise", "rate, momentum": "of the optimizer"}
"""What a column of the table is, in a word; all terms are explained beside it."""
MARK = "<!-- tables -->"
"""What stands above this line in a Markdown page was written by hand, and stays."""


def write_all(folder: Path, found: Sequence[Experiment], on_progress: OnProgress = ignore) -> Path:
    """Make ``folder/report.html`` of several experiments, and one of each in its own folder, where it has one."""
    for one in found:
        if one.records and (folder / one.preset).is_dir():
            records.write(folder / one.preset / NAME, page(paper.corrected([one])))
    records.write(folder / NAME, page(found, on_progress))
    return folder / NAME


def page(found: Sequence[Experiment], on_progress: OnProgress = ignore) -> str:
    """The whole page as text."""
    parts: dict[str, dict[str, Any]] = {}
    for one in (one for one in found if one.rows):
        parts[one.preset] = _parts(one)
        on_progress(Progress("drawing", len(parts), len(found), "experiments"))
    alone = found[0] if len(found) == 1 and found[0].rows else None
    papers = "The paper's experiments, run anew" if all(one.paper for one in found) else "Private training, compared"
    overview = () if alone else (figures.forest(found), figures.beside_the_paper(found))
    return _template("report.html", autoescape=True).render(
        title=f"Private training on {alone.preset}" if alone else papers, alone=alone, found=found,
        tested_at=stats.LEVEL, style=Markup(_text("report.css")), titles=_titles(found),
        runs=sum(len(one.records) for one in found), overview=[*filter(None, overview)], svg=_svg, about=_about,
        parts=parts, glosses=GLOSSES, settings=settings, plural=plural,
        most=lambda one: max(len(row.seeds) for row in one.rows),
    )  # fmt: skip


def _template(name: str, **options: Any) -> jinja2.Template:
    loader = jinja2.FunctionLoader(_text)
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, keep_trailing_newline=True, **options)
    made.filters["plain"] = lambda text: text.replace("*", "\\*")  # the star of a method's name is no emphasis
    return made.get_template(name)


def _text(name: str) -> str:
    return resources.files("dpscale.lab").joinpath("templates", name).read_text(encoding="utf-8")


def _svg(picture: Picture, name: str) -> Markup:
    return Markup(figures.svg(picture.figure, f"{name}-{picture.name}", str(escape(picture.caption))))


# -- in words --------------------------------------------------------------------------------------------------


def settings(one: Experiment) -> str:
    """An experiment in one sentence."""
    config = one.records[0].config
    counts = sorted({len(row.seeds) for row in one.rows})
    span = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else f"{counts[0]}"
    what = f"{config['model']}" + (f" on frozen features of {one.encoder}" if one.encoder else "")
    how = [{"nadam": "NAdam"}[name] for name in [config.get("optimizer", "sgd")] if name != "sgd"]
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
        f"{plural(len(one.rows), 'method')}, {span} {'seed' if counts == [1] else 'seeds'} each, "
        f"ε = {config['epsilon']:g}, δ = {config['delta']:g}; {what}, {one.records[0].data['train']:,} training "
        f"samples, {plural(config['epochs'], 'epoch')}, expected batch {config['batch']}"
        f"{''.join(f', {each}' for each in how)}."
    )


def _titles(found: Sequence[Experiment]) -> dict[str, str]:
    titles = {row.method: row.title for one in found for row in one.rows}
    return {name: titles[name] for name in METHODS if name in titles}


def _about(one: Experiment) -> list[tuple[str, bool]]:
    """Lines about an experiment, and whether each is a warning."""
    told = []
    if one.records:
        config, most = one.records[0].config, max(len(row.seeds) for row in one.rows)
        told = [(f"ε {config['epsilon']:g}, δ {config['delta']:g}", False), (plural(most, "seed"), False)]
    if one.encoder:
        told.append((f"features of {one.encoder}", False))
    if one.left or not one.rows:
        told.append((f"{plural(one.left, 'run')} left" if one.left else "not finished", True))
    return told


def _parts(one: Experiment) -> dict[str, Any]:
    """All that the section of an experiment shows besides its rows."""
    drawn = [*filter(None, [figures.forest([one])]), *figures.pictures(one.records)]
    searches = {r.search["searched_for"]: r.search for r in one.records if r.search}
    heads = list(one.cells(one.rows[0]))
    psac, psasc = one.row("dp-psac"), one.row("dp-psasc")
    most = max(sum(value is not None for value in record.curves["accuracy"]) for record in one.records)
    return {
        "first": [each for each in drawn if each.name in ("differences", "accuracy")],
        "more": [each for each in drawn if each.name not in ("differences", "accuracy")],
        "diagnosed": not all(each.private for each in drawn), "heads": heads, "reference": one.reference,
        "shown": " ".join([*heads, *(row.label for row in one.rows)]),
        "measured": f"up to {most} times a run" if most > 1 else "once a run",
        "controls": [row for row in one.rows if METHODS[row.method].follows],
        "stands_in": psac is not None and psasc is not None and psac.choice == psasc.choice
        and one.row("psac-lr-over-s") is None,
        "statements": _statements(one.rows),
        "searches": {METHODS[name].title: _tries(search) for name, search in searches.items()},
        "search": next(iter(searches.values()), None), "alike": stats.alike(one.rows),
        "commands": _commands(one.records), "facts": _facts(one.records, one.left_out),
    }  # fmt: skip


def _tries(search: Mapping[str, Any]) -> list[tuple[str, str, bool]]:
    return [
        (
            f"{100 * each['accuracy']:.1f}",
            Choice.model_validate(each["choice"]).label(),
            each["choice"] == search["chosen"],
        )
        for each in sorted(search["tries"], key=lambda each: tuple(each["choice"].values()))
    ]


def _statements(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The lines of the privacy statements under the methods that they are of, each line once."""
    owners: dict[str, list[str]] = {}
    for row in rows:
        for line in row.statement.splitlines():
            owners.setdefault(line, []).append(row.title)
    lines: dict[tuple[str, ...], list[str]] = {}
    for line, titles in owners.items():
        lines.setdefault(tuple(titles), []).append(line)
    private = tuple(row.title for row in rows if row.epsilon is not None)
    words = {private: f"All {len(private)} private methods"} if len(private) > 1 else {}
    return [(words.get(titles) or ", ".join(titles), "\n".join(told)) for titles, told in lines.items()]


def _commands(chosen: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.command for record in chosen if record.command))


def _facts(chosen: Sequence[Record], left_out: int) -> dict[str, str]:
    last, data = chosen[-1], chosen[-1].data
    seconds, cold = math.fsum(r.seconds for r in chosen), math.fsum(r.cold_seconds for r in chosen)
    source = [f"{data['train']:,} training and {data['test']:,} test samples", *data.get("source", {}).values()]
    source += [f"features of {data['features']['encoder']}"] if "features" in data else []
    values = ", ".join(f"{k} = {v}" for k, v in last.config.items() if k not in ("rates", "preset", "note"))
    facts = {
        "runs": f"{len(chosen)}, {seconds:.0f} s of training, {cold:.0f} s of cold starts, the search not included",
        "data": ", ".join(map(str, source)), **last.versions, "commit": last.commit or "not from a checkout",
        "finished": max(record.created for record in chosen), "settings": values,
    }  # fmt: skip
    return facts | ({"left out": f"{left_out} records of other settings in the same folder"} if left_out else {})


# -- Markdown --------------------------------------------------------------------------------------------------


def before_tables(path: Path) -> str:
    """What a Markdown file has above its tables; the start of a page if it has nothing.

    A file without `MARK` was not meant to be overwritten: a ``ValueError``.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Give --markdown a file, such as {path / 'results.md'}.")
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    mark = re.search(rf"^{re.escape(MARK)}[ \t]*$", text, re.MULTILINE)
    if text.strip() and not mark:
        raise ValueError(
            f"The file {path} is there and has no line {MARK}, so that all of it would be overwritten. Add that line "
            "where the tables are to begin, or write them to another file."
        )
    return f"{text[: mark.start()] if mark else '# Results' + chr(10) * 2}{MARK}"


def write_markdown(path: Path, found: Sequence[Experiment], before: str) -> None:
    """The tables as Markdown below ``before``, and their pictures in a folder ``figures`` beside the file."""
    drawn = {f"{path.stem}.png": figures.beside_the_paper(found), f"{path.stem}-differences.png": figures.forest(found)}
    for name, picture in drawn.items():
        if picture:
            records.write(path.parent / "figures" / name, figures.png(picture.figure))
    shown = [{"caption": picture.caption, "file": quote(name)} for name, picture in drawn.items() if picture]
    text = _template("results.md").render(
        title=before, found=found, pictures=shown, titles=_titles(found), plural=plural, settings=settings,
        commands=_commands,
    )  # fmt: skip
    records.write(path, text.rstrip("\n") + "\n")
