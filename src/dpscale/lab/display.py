"""What a person at a terminal sees: bars while runs go on, a table after. Bars go to stderr, tables to stdout.

Where there is no terminal, plain lines take the place of bars.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from rich import box
from rich.progress import MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar
from rich.table import Table

from dpscale.engine.phases import listening
from dpscale.lab import terminal
from dpscale.lab.config import METHODS, Choice
from dpscale.lab.paper import Experiment
from dpscale.lab.queue import Event
from dpscale.lab.runner import Progress
from dpscale.lab.stats import Row, plural


def table(title: str, rows: Sequence[Row]) -> Table:
    """The comparison as a table."""
    shown = _table(title, "method", "test accuracy", "ε spent", "rate, momentum", "s/run")
    for row in rows:
        spent = "—" if row.epsilon is None else f"{row.epsilon:.2f}"
        shown.add_row(row.title, row.shown, spent, Choice.of(row.choice).label(), f"{row.seconds:.1f}")
    return shown


def settings(found: Sequence[Mapping[str, Any]]) -> Table:
    """The paper's settings as a table."""
    title = "Settings, and the noise multiplier σ (noise std / bound) that they come to"
    shown = _table(title, "preset", "N", "B, epochs", "r, C, s", "ε, δ", "σ PLD", "σ RDP")
    for one in found:
        shown.add_row(
            one["preset"], f"{one['samples']:,}", f"{one['batch']}, {one['epochs']}",
            f"{_short(one['r'])}, {one['C']:g}, {one['s']:g}", f"{one['epsilon']:g}, {_short(one['delta'])}",
            f"{one['noise_multiplier']:.4f}", f"{one['noise_multiplier_rdp']:.4f}",
        )  # fmt: skip
    frozen = (
        f"{one['preset']}: a linear layer on frozen features of {one['encoder']}" for one in found if one["encoder"]
    )
    shown.caption = "\n".join(frozen)
    return shown


def accuracies(found: Sequence[Experiment]) -> Table:
    """The accuracies of all experiments, a line per method, the paper's beside ours."""
    title = "Test accuracy, 95% intervals over seeds"
    shown = _table(title, "preset", "method", "ours", "paper", "to DP-PSASC", "seeds")
    for one in found:
        for place, row in enumerate(one.rows):
            theirs = one.paper.get(row.method)
            paper, name = "—" if theirs is None else f"{theirs:.2f}%", "" if place else one.preset
            shown.add_row(name, row.title, row.shown, paper, row.shown_difference, str(len(row.seeds)))
        if not one.rows:
            shown.add_row(one.preset, "—", "—", "—", "—", "0")
        shown.add_section()
    notes = [f"{one.preset}: a linear layer on frozen features of {one.encoder}" for one in found if one.encoder]
    notes += [f"{one.preset}: unfinished, {plural(one.left, 'run')} left" for one in found if one.left]
    shown.caption = "\n".join(notes)
    return shown


def _table(title: str, *names: str) -> Table:
    """An empty table that fits into 80 columns: no lines but the one below its head."""
    shown = Table(
        title=title, title_justify="left", caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
        padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in names:
        shown.add_column(name, justify="left" if name in ("preset", "method") else "right", no_wrap=True)
    return shown


def _short(value: float) -> str:
    """1e-4 where Python writes 0.0001 or 1e-04."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 1e-2 else f"{value:g}"


@contextmanager
def run_bar(title: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar over the steps of one run: ε so far, loss (not of private data), speed and time left, or what it waits for.

    Without a terminal plain lines, one for each tenth of the run; silent if ``quiet``.
    """
    with _bar(title, quiet) as bar:
        if bar is None:
            yield (lambda _: None) if quiet else _run_lines(title)
            return
        before, start = 0, time.perf_counter()

        def show(now: Progress) -> None:
            nonlocal before, start
            speed = "" if now.step == before else f"{(now.step - before) / (time.perf_counter() - start):.0f} steps/s"
            state = _state(now) if speed else now.phase or "training"  # nothing trained since: a phase begins, or ended
            bar.update(bar.task_ids[0], completed=now.step, total=now.steps, state=state, speed=speed, refresh=True)
            before, start = now.step, time.perf_counter()

        yield show


def _state(now: Progress) -> str:
    spent = now.epsilon()
    told = [] if now.loss is None else [f"training loss {now.loss:.3f}"]
    return ", ".join(told if spent is None else [*told, f"epsilon {spent:.2f}"])


def _run_lines(title: str) -> Callable[[Progress], None]:
    """Says in lines where a run stands, and what it waits for."""
    due = terminal.tenths()

    def show(now: Progress) -> None:
        if now.phase:
            terminal.line(f"{now.phase} …")
        elif due(now.step, now.steps):
            terminal.line(f"[epoch {now.epoch}/{now.epochs}] {title}: {_state(now)}")

    return show


@contextmanager
def experiments_bar(*, quiet: bool) -> Iterator[Callable[[str, Event], None]]:
    """`comparison_bar` over several experiments, each named as its turn comes."""
    with ExitStack() as stack:
        bars: dict[str, Callable[[Event], None]] = {}

        def show(name: str, now: Event) -> None:
            if name not in bars:
                stack.close()
                bars[name] = stack.enter_context(comparison_bar(name, quiet=quiet))
            bars[name](now)

        yield show


@contextmanager
def comparison_bar(title: str, *, quiet: bool) -> Iterator[Callable[[Event], None]]:
    """A bar over the runs of a comparison; without a terminal one plain line per run; silent if ``quiet``."""
    with _bar(title, quiet) as bar:
        if bar is None:
            say: Callable[[str], None] = (lambda _: None) if quiet else terminal.line
            with listening(lambda phase: say(f"{phase} …") if phase else None):
                yield lambda now: say(f"[{now.done}/{now.total}] {_result(now)}") if now.record else None
            return
        start, before = time.perf_counter(), -1

        def show(now: Event) -> None:
            nonlocal before
            counts: dict[str, Any] = {"completed": now.done, "total": now.total, "state": _result(now)}
            if now.record is not None:
                before = now.done - 1 if before < 0 else before  # found on disk, so no measure of speed
                counts["speed"] = f"{60 * (now.done - before) / (time.perf_counter() - start):.0f} runs/min"
            bar.update(bar.task_ids[0], refresh=True, **counts)

        with listening(lambda phase: bar.update(bar.task_ids[0], state=phase or "training")):
            yield show


def _result(now: Event) -> str:
    what = f"{METHODS[now.job.method].name}: {'search' if now.job.role == 'search' else f'seed {now.job.seed}'}"
    if (record := now.record) is None:
        return what
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.2f}"
    rate = Choice.of(record.choice).label()
    return f"{what}, rate {rate}, accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s"


@contextmanager
def _bar(title: str, quiet: bool) -> Iterator[Bar | None]:
    columns = MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TextColumn("{task.fields[speed]}")
    with terminal.bar(*columns, quiet=quiet) as bar:
        if bar is not None:
            bar.add_task(title, total=None, state="calibrating", speed="")
        yield bar
