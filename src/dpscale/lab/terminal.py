"""What a person at a terminal sees: bars while work goes on, tables after it. Bars go to stderr, tables to stdout.

Where there is no terminal, plain lines take the place of bars.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import rich.progress
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from dpscale.lab.progress import OnProgress, Progress

if TYPE_CHECKING:
    from dpscale.lab import compare, paper


# -- bars ------------------------------------------------------------------------------------------------------


def tenths() -> Callable[[int, int], bool]:
    """A function of how much is done and of how much: whether another tenth is, so at most ten times in all."""
    told = 0

    def due(done: int, total: int) -> bool:
        nonlocal told
        now = 10 * done // total
        further, told = now > told, now
        return further

    return due


@contextmanager
def _bar(title: str, quiet: bool) -> Iterator[Callable[..., None] | None]:
    """Changes a bar that has a state and the time left; None where nobody would see it."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    ends = TextColumn("{task.description}"), BarColumn(bar_width=24)
    shown = (*ends, TextColumn("{task.fields[state]}"), TimeRemainingColumn())
    with rich.progress.Progress(*shown, console=console, transient=True) as bar:
        task = bar.add_task(title, total=None, state="calibrating")

        def update(**changes: Any) -> None:
            if changes["description"] != bar.tasks[0].description:  # the time left is that of this one
                bar.reset(task)
            bar.update(task, refresh=True, **changes)

        yield update


@contextmanager
def progress(title: str, *, quiet: bool, each: bool = False) -> Iterator[OnProgress]:
    """A bar for what takes a while; without a terminal a line as each part of it begins, and at each tenth of that, or
    for ``each`` that is done."""
    what, percent, done, due, words = "", -1, 0, tenths(), ""
    with _bar(title, quiet) as update:

        def show(now: Progress) -> None:
            nonlocal what, percent, done, due, words
            new, total, further = now.what != what, now.total or 0, now.done > done
            what, done, due = now.what, now.done, tenths() if new else due
            tenth = bool(total and due(now.done, total))
            if quiet or (update is None and not new and not (further if each else tenth)):
                return
            if update is None or each or new or not total or 100 * now.done // total > percent:
                percent, words = 100 * now.done // (total or 1), now.words()  # which may take a moment
            named = ": ".join(filter(None, (title, what)))
            if update is not None:
                state = f"{_count(now)}, {words}" if words else _count(now)
                update(description=named, completed=now.done, total=now.total, state=state)
            elif now.done or not total:
                told = ": ".join(filter(None, (title, words))) if words else named
                typer.echo(f"[{_count(now)}] {told}", err=True)
            else:
                typer.echo(f"{what} …", err=True)

        yield show


def _count(now: Progress) -> str:
    scale, unit = (1e6, "MB") if now.unit == "bytes" else (1, now.unit)
    total = "" if now.total is None else f"/{now.total / scale:,.0f}"
    return f"{now.done / scale:,.0f}{total} {unit}"


@contextmanager
def runs_bar(*, quiet: bool) -> "Iterator[Callable[[str, compare.Event], None]]":
    """A bar over the runs of one experiment after the other, or a plain line per run."""
    from dpscale.engine.phases import listening

    with progress("", quiet=quiet, each=True) as bar:
        last = Progress("", 0, None, "runs")

        def show(name: str, now: "compare.Event") -> None:
            nonlocal last
            last = Progress(name, now.done, now.total, "runs", partial(_result, now))
            bar(last)

        def wait(phase: str | None) -> None:
            if phase:
                bar(replace(last, what=phase, words=str))

        with listening(wait):
            yield show


def _result(now: "compare.Event") -> str:
    what = f"{now.job.method}: {'search' if now.job.role == 'search' else f'seed {now.job.seed}'}"
    if (record := now.record) is None:
        return what
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.2f}"
    rate = now.job.choice.label()
    return f"{what}, rate {rate}, accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s"


# -- tables ----------------------------------------------------------------------------------------------------


def table(title: str, rows: Sequence[Mapping[str, str]], caption: Sequence[str] = ()) -> None:
    """Print rows under the names of their cells, so that they fit into 80 columns."""
    shown = Table(
        title=title, title_justify="left", caption="\n".join(caption), caption_justify="left", box=box.SIMPLE_HEAD,
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in rows[0]:
        shown.add_column(name, justify="left" if name in ("preset", "method", "run") else "right", no_wrap=True)
    for row in rows:
        shown.add_row(*row.values())
    Console(highlight=False).print(shown)


def results(title: str, found: "Sequence[paper.Experiment]", *columns: str) -> None:
    """What came of experiments, a line for each method, with these columns too; under names where there are several."""
    from dpscale.lab.stats import plural

    names = {"preset"} if len(found) > 1 else set()
    rows = [
        {
            **dict.fromkeys(names, one.preset if place == 0 else ""), "method": row.title, "test accuracy": row.shown,
            "to DP-PSASC": row.shown_difference, **{name: one.cells(row).get(name, "—") for name in columns},
        }
        for one in found for place, row in enumerate(one.rows)
    ]  # fmt: skip
    notes = [_frozen(one.preset, one.encoder) for one in found if one.encoder]
    notes += [f"{one.preset}: unfinished, {plural(one.left, 'run')} left" for one in found if one.left]
    if rows:
        table(title, rows, notes)


def settings(found: Sequence[Mapping[str, Any]]) -> None:
    """The paper's settings."""

    def short(value: float) -> str:  # 1e-4 where Python writes 0.0001 or 1e-04
        return f"{value:.0e}".replace("e-0", "e-") if value < 1e-2 else f"{value:g}"

    rows = [
        {
            "preset": one["preset"], "N": f"{one['samples']:,}", "B, epochs": f"{one['batch']}, {one['epochs']}",
            "r, C, s": f"{short(one['r'])}, {one['C']:g}, {one['s']:g}",
            "ε, δ": f"{one['epsilon']:g}, {short(one['delta'])}", "σ PLD": f"{one['noise_multiplier']:.4f}",
            "σ RDP": f"{one['noise_multiplier_rdp']:.4f}",
        }
        for one in found
    ]  # fmt: skip
    title = "Settings, and the noise multiplier σ (noise std / bound) that they come to"
    table(title, rows, [_frozen(one["preset"], one["encoder"]) for one in found if one["encoder"]])


def _frozen(preset: str, encoder: str) -> str:
    return f"{preset}: a linear layer on frozen features of {encoder}"
