"""Shows on stderr how far a command is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpscale.lab.datasets.folder import OnProgress, Progress


@contextmanager
def progress(title: str, *, quiet: bool) -> "Iterator[OnProgress]":
    """A bar for each thing that takes a while; without a terminal a line at its start and at each tenth of it."""
    from rich.progress import TextColumn

    from dpscale.lab import terminal

    dues: dict[str, Callable[[int, int], bool]] = {}
    with terminal.bar(TextColumn("{task.fields[state]}"), quiet=quiet) as bar:

        def show(now: "Progress") -> None:
            scale, unit = (1e6, "MB") if now.unit == "bytes" else (1, now.unit)
            total = "" if now.total is None else f"/{now.total / scale:,.0f}"
            state = f"{now.done / scale:,.0f}{total} {unit}" if now.done or now.total else ""
            first = now.what not in dues
            due = dues.setdefault(now.what, terminal.tenths())
            if bar is not None:
                task = bar.add_task(now.what, state="") if first else bar.task_ids[list(dues).index(now.what)]
                bar.update(task, completed=now.done, total=now.total, state=state)
            elif not quiet and now.done and now.total and (due(now.done, now.total) or first):
                terminal.line(f"[{state}] {title}: {now.what}")

        yield show
