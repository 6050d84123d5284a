"""Bars for people who wait at a terminal, and plain lines where there is none. All of that goes to stderr."""

from collections.abc import Callable, Iterator
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


def line(text: str) -> None:
    """A plain line, for logs."""
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def tenths() -> Callable[[int, int], bool]:
    """A function of how much is done and of how much: whether another tenth is, so at most ten times in all."""
    told = 0

    def due(done: int, total: int) -> bool:
        nonlocal told
        now = 10 * done // total
        further, told = now > told, now
        return further

    return due
