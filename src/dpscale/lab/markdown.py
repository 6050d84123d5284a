"""Records as a page of Markdown tables, so that a results page can be made anew from them."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from urllib.parse import quote

from dpscale.lab import figures, records
from dpscale.lab.paper import Experiment
from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.report import NOT_FINISHED, settings, verdict
from dpscale.lab.summary import plural

_NOTE = """\
Test accuracy in percent after the last epoch, which is fixed beforehand: mean over seeds and its 95% interval
(Student's t). Where rate and momentum were searched, every method had the same number of tries on held-out training
data; that search is not counted in ε. The paper gives no intervals."""


MARK = "<!-- tables -->"
"""What stands above this line in a page was written by hand, and stays."""

_MARKED = re.compile(rf"^{re.escape(MARK)}[ \t]*$", re.MULTILINE)


def before(path: Path) -> str:
    """What a file has before its tables are made anew, to be given to `page`; the start of a page if it has nothing.

    A file without `MARK` was not meant to be overwritten: a ``ValueError``.
    """
    if path.is_dir():
        raise ValueError(f"{path} is a folder. Give --markdown a file, such as {path / 'results.md'}.")
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError:
        raise ValueError(f"The file {path} is no text in UTF-8. Write the tables to another one.") from None
    if text.strip() and not _MARKED.search(text):
        raise ValueError(
            f"The file {path} is there and has no line {MARK}, so that all of it would be overwritten. Add that line "
            "where the tables are to begin, or write them to another file."
        )
    return text if text.strip() else f"# Results\n\n{MARK}\n"


def write(path: Path, found: Sequence[Experiment], before: str = "") -> None:
    """The page, and its picture in a folder ``figures`` beside it; ``before`` is as in `page`."""
    picture, place = figures.beside_the_paper(found), Path("figures") / f"{path.stem}.png"
    shown = "" if picture is None else f"![{picture.caption}]({quote(place.as_posix())})"
    if picture is not None:
        records.write(path.parent / place, figures.png(picture.figure))
    records.write(path, page(found, before, shown))


def page(found: Sequence[Experiment], before: str = "", picture: str = "") -> str:
    """The whole page: one table of all accuracies, then each experiment in full.

    Args:
        before: the page as it was; what it has above `MARK` is kept in place of a title.
        picture: a line that shows one, below the first table.
    """
    mark = _MARKED.search(before)
    title = f"{before[: mark.start()]}{MARK}" if mark else "# Results"
    shown = (picture, "") if picture else ()
    each = (line for one in found for line in _one(one))
    return "\n".join((title, "", _NOTE, "", *_overview(found), *shown, *each))


def _overview(found: Sequence[Experiment]) -> Iterable[str]:
    titles = {row.method: row.title for one in found for row in one.rows}
    order = [name for name in METHODS if name in titles]
    yield from _head("experiment", *(_plain(titles[name]) for name in order))
    for one in found:
        rows = {row.method: row for row in one.rows}
        cells = []
        for name in order:
            ours = rows[name].shown.replace("%", "") if name in rows else "—"
            theirs = one.paper.get(name)
            cells.append(ours if theirs is None else f"{ours} (paper {theirs:.2f})")
        notes = [f"features of {one.encoder}"] if one.encoder else []
        notes += [f"{plural(one.left, 'run')} left"] if one.left else []
        yield _row(", ".join((one.preset, *notes)), *cells)
    yield ""


def _one(one: Experiment) -> Iterable[str]:
    yield from (f"## {one.preset}", "")
    if not one.rows:
        yield from (NOT_FINISHED, "")
        return
    yield from (settings(one), "", _plain(verdict(one)), "")
    if one.left:
        yield from (f"Unfinished: {plural(one.left, 'run')} left.", "")
    yield from _head(
        "method", "paper", "ours", "against DP-PSASC, seed by seed", "σ", "ε", "rate, momentum", "s per run"
    )
    for row in one.rows:
        theirs = one.paper.get(row.method)
        yield _row(
            _plain(row.title),
            "—" if theirs is None else f"{theirs:.2f}",
            row.shown.replace("%", ""),
            row.shown_difference,
            "—" if row.noise_multiplier is None else f"{row.noise_multiplier:.4f}",
            "—" if row.epsilon is None else f"{row.epsilon:.2f}",
            Choice.of(row.choice).told(),
            f"{row.seconds:.1f}",
        )
    last = one.records[-1]
    versions = ", ".join(f"{name} {value}" for name, value in last.versions.items())
    yield from ("", f"{versions}; commit {last.commit or 'unknown'}.", "")
    commands = dict.fromkeys(record.command for record in one.records if record.command)
    if commands:
        yield from ("```sh", *commands, "```", "")


def _head(*names: str) -> Iterable[str]:
    yield _row(*names)
    yield _row(*("---" for _ in names))


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _plain(text: str) -> str:
    """A text as Markdown shows it: the star of a method's name is no emphasis."""
    return text.replace("*", "\\*")
