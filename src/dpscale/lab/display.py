"""What a person at a terminal sees: bars while runs go on, a table after. Bars go to stderr, tables to stdout."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import progress
from rich.console import Console
from rich.table import Table

from dpscale.lab.compare import Finished
from dpscale.lab.runner import Progress
from dpscale.lab.summary import Row, percent


def table(title: str, rows: Sequence[Row]) -> Table:
    """The comparison as a table."""
    shown = Table(title=title, title_justify="left")
    for name in ("method", "test accuracy", "ε spent", "rate × bound", "s per run"):
        shown.add_column(name, justify="left" if name == "method" else "right", no_wrap=True)
    for row in rows:
        spent = "—" if row.epsilon is None else f"{row.epsilon:.2f}"
        accuracy = percent(row.accuracy, row.half_width)
        shown.add_row(row.title, accuracy, spent, f"{row.rate:g}", f"{row.seconds:.1f}")
    return shown


@contextmanager
def run_bar(title: str, *, quiet: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar over the steps of one run: ε so far, loss, speed and time left, or what it waits for.

    Nothing without a terminal.
    """
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with _bar(console) as bar:
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
def comparison_bar(title: str, *, quiet: bool) -> Iterator[Callable[[Finished], None]]:
    """A bar over the runs of a comparison; without a terminal one plain line per final run; silent if ``quiet``."""
    console = Console(stderr=True)
    if quiet:
        yield lambda _: None
        return
    if not console.is_terminal:
        yield lambda now: console.print(_line(now), highlight=False, soft_wrap=True)
        return
    with _bar(console) as bar:
        task = bar.add_task(title, total=None, state="calibrating", speed="")
        start, before = time.perf_counter(), -1

        def show(now: Finished) -> None:
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

        yield show


def _line(now: Finished) -> str:
    record = now.record
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.2f}"
    what = "search of rates, " if record.role == "search" else f"seed {record.seed}, "
    return (
        f"[{now.done}/{now.total}] {record.method}: {what}rate {record.rate:g}, "
        f"accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s"
    ).replace("[", "\\[")


def _bar(console: Console) -> progress.Progress:
    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(bar_width=24),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[state]}"),
        progress.TextColumn("{task.fields[speed]}"),
        progress.TimeRemainingColumn(),
        console=console,
        transient=True,
    )
