"""How far something is that takes a while: told to whoever listens, and shown by `terminal`."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """So much is done; ``total`` is None if nobody knows of how much. ``words`` says more, and may take a moment."""

    what: str
    done: int
    total: int | None
    unit: str = "bytes"
    words: Callable[[], str] = lambda: ""


OnProgress = Callable[[Progress], None]


def ignore(_: object) -> None:
    """What is told of progress when nobody listens."""
