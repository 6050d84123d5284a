"""What a person at a terminal sees: bars while runs go on, a table after. Bars go to stderr, tables to stdout.

Where there is no terminal, plain lines take the place of bars.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.progress import MofNCompleteColumn, ProgressColumn, TextColumn
from rich.table import Table

from dpscale.engine.phases import listening
from dpscale.lab import terminal
from dpscale.lab.paper import Experiment, Setting
from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.queue import Begun, Finished
from dpscale.lab.runner import Progress
from dpscale.lab.summary import Row, plural


def table(title: str, rows: Sequence[Row]) -> Table:
    """The comparison as a table."""
    shown = _table(title, "method", "test accuracy", "ε spent", "rate, momentum", "s/run")
    for row in rows:
        spent = "—" if row.epsilon is None else f"{row.epsilon:.2f}"
        shown.add_row(row.title, row.shown, spent, Choice.of(row.choice).told(), f"{row.seconds:.1f}")
    return shown


def settings(found: Sequence[Setting]) -> Table:
    """The paper's settings as a table."""
    title = "Settings, and the noise multiplier σ (noise std / bound) that they come to"
    shown = _table(title, "preset", "N", "B, epochs", "r, C, s", "ε, δ", "σ PLD", "σ RDP")
    for one in found:
        shown.add_row(
            one.preset, f"{one.samples:,}", f"{one.batch}, {one.epochs}",
            f"{_short(one.r)}, {one.C:g}, {one.s:g}", f"{one.epsilon:g}, {_short(one.delta)}",
            f"{one.noise_multiplier:.4f}", f"{one.noise_multiplier_rdp:.4f}",
        )  # fmt: skip
    shown.caption = "\n".join(
        f"{one.preset}: a linear layer on frozen features of {one.encoder}" for one in found if one.encoder
    )
    return shown


def accuracies(found: Sequence[Experiment]) -> Table:
    """The accuracies of all experiments, a line per method, the paper's beside ours."""
    title = "Test accuracy, 95% intervals over seeds"
    shown = _table(title, "preset", "method", "ours", "paper", "to DP-PSASC", "seeds")
    for one in found:
        for place, row in enumerate(one.rows):
            theirs = one.paper.get(row.method)
            paper = "—" if theirs is None else f"{theirs:.2f}%"
            name = "" if place else one.preset
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
        title=title,
        title_justify="left",
        caption_justify="left",
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for name in names:
        shown.add_column(name, justify="left" if name in ("preset", "method") else "right", no_wrap=True)
    return shown


def _short(value: float) -> str:
    """1e-4 where Python writes 0.0001 or 1e-04."""
    return f"{value:.0e}".replace("e-0", "e-") if value < 1e-2 else f"{value:g}"


@dataclass(frozen=True)
class Bar:
    """Who is told of the runs of a comparison."""

    begun: Callable[[Begun], None]
    finished: Callable[[Finished], None]


@contextmanager
def experiments_bar(*, quiet: bool) -> Iterator[Callable[[str], Bar]]:
    """`comparison_bar` over several experiments, each named as its turn comes."""
    with listening(_told(Console(stderr=True, quiet=quiet))), ExitStack() as stack:
        bars: dict[str, Bar] = {}

        def of(name: str) -> Bar:
            if name not in bars:
                stack.close()
                bars[name] = stack.enter_context(comparison_bar(name, quiet=quiet))
            return bars[name]

        yield of


@contextmanager
def run_bar(title: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar over the steps of one run: ε so far, loss, speed and time left, or what it waits for.

    Without a terminal plain lines, one for each tenth of the run; silent if ``quiet``.
    """
    with terminal.bar(*_columns(), quiet=quiet) as bar:
        if bar is None:
            yield (lambda _: None) if quiet else _run_lines(title)
            return
        task = bar.add_task(title, total=None, state="calibrating", speed="")
        before, start = 0, time.perf_counter()

        def show(now: Progress) -> None:
            nonlocal before, start
            if now.step == before:  # nothing trained since: a phase of the cold start begins, or the last one ended
                bar.update(task, total=now.steps, state=now.phase or "training", refresh=True)
                start = time.perf_counter()
                return
            speed = f"{(now.step - before) / (time.perf_counter() - start):.0f} steps/s"
            spent = now.epsilon()
            state = f"loss {now.loss:.3f}" + ("" if spent is None else f"  ε {spent:.2f}")
            bar.update(task, completed=now.step, total=now.steps, state=state, speed=speed)
            before, start = now.step, time.perf_counter()

        yield show


@contextmanager
def steps_bar(title: str, *, quiet: bool) -> Iterator[Callable[[int, int], None]]:
    """A bar over the steps of a run, called with the step and how many there are; plain lines without a terminal."""
    with terminal.bar(*_columns(), quiet=quiet) as bar:
        if bar is None:
            due = terminal.tenths()
            yield (
                lambda step, steps: (
                    terminal.line(f"{title}: step {step} of {steps}") if due(step, steps) and not quiet else None
                )
            )
            return
        task = bar.add_task(title, total=None, state="", speed="")
        yield lambda step, steps: bar.update(task, completed=step, total=steps)


def _run_lines(title: str) -> Callable[[Progress], None]:
    """Says in lines where a run stands, and what it waits for."""
    due = terminal.tenths()

    def show(now: Progress) -> None:
        if now.phase:
            terminal.line(f"{now.phase} …")
        elif due(now.step, now.steps):
            spent = now.epsilon()
            told = "" if spent is None else f", epsilon {spent:.2f}"
            terminal.line(f"[epoch {now.epoch}/{now.epochs}] {title}: training loss {now.loss:.3f}{told}")

    return show


@contextmanager
def comparison_bar(title: str, *, quiet: bool) -> Iterator[Bar]:
    """A bar over the runs of a comparison; without a terminal one plain line per final run; silent if ``quiet``."""
    with terminal.bar(*_columns(), quiet=quiet) as bar:
        if bar is None:
            console = Console(stderr=True, quiet=quiet)
            with listening(_told(console)):
                yield Bar(lambda _: None, lambda now: console.print(_line(now), highlight=False, soft_wrap=True))
            return
        task = bar.add_task(title, total=None, state="calibrating", speed="")
        start, before = time.perf_counter(), -1

        def begun(now: Begun) -> None:
            of = "search of rates" if now.job.role == "search" else f"seed {now.job.seed}"
            state = f"{METHODS[now.job.method].title}, {of}"
            bar.update(task, completed=now.done, total=now.total, state=state, refresh=True)

        def finished(now: Finished) -> None:
            nonlocal before
            before = now.done - 1 if before < 0 else before  # found on disk, so no measure of speed
            record = now.record
            loss = record.curves["train_loss"][-1]
            state = f"{record.title} {100 * record.accuracy:.1f}%"
            state += "" if loss is None else f"  loss {loss:.3f}"
            state += "" if record.epsilon is None else f"  ε {record.epsilon:.2f}"
            if record.role == "search":
                state = f"search of rates: {state}"
            speed = f"{60 * (now.done - before) / (time.perf_counter() - start):.0f} runs/min"
            bar.update(task, completed=now.done, total=now.total, state=state, speed=speed)

        with listening(lambda phase: bar.update(task, state=phase or "training")):
            yield Bar(begun, finished)


def _told(console: Console) -> Callable[[str | None], None]:
    """Says what runs are waiting for, where no bar does."""
    return lambda phase: console.print(f"{phase} …", highlight=False) if phase else None


def _line(now: Finished) -> str:
    record = now.record
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.2f}"
    what = "search of rates, " if record.role == "search" else f"seed {record.seed}, "
    return (
        f"[{now.done}/{now.total}] {record.method}: {what}rate {Choice.of(record.choice).told()}, "
        f"accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s"
    ).replace("[", "\\[")


def _columns() -> tuple[ProgressColumn, ...]:
    return MofNCompleteColumn(), TextColumn("{task.fields[state]}"), TextColumn("{task.fields[speed]}")
