"""Bars for people who wait at a terminal. Everything of that kind goes to stderr."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn


@contextmanager
def bar(*columns: ProgressColumn, quiet: bool) -> Iterator[Progress | None]:
    """A bar between a description and the time left, with ``columns`` after it; None where nobody would see it."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield None
        return
    ends = TextColumn("{task.description}"), BarColumn(bar_width=24), TimeRemainingColumn()
    with Progress(*ends[:2], *columns, ends[2], console=console, transient=True) as shown:
        yield shown
