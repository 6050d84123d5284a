"""What has to be done before a step can train: told to whoever listens, and to the log in one line.

A model is looked at before its first sum, and for each new shape of its samples; a compiled step is also
traced, compiled, and on CUDA recorded.
That takes from a moment to minutes.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Literal, TypeVar

T = TypeVar("T")
log = logging.getLogger("dpscale")

Phase = Literal["checking", "tracing", "compiling", "recording"]

Listener = Callable[[Phase | None], None]
"""Called with each phase as it begins, and with None once all are done."""

_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)
_seconds: ContextVar[dict[str, float] | None] = ContextVar("seconds", default=None)

SILENCE = 2.0
"""Seconds after which somebody who waits is told what for, again and again. Three would be long, and a step goes on for
most of one after the last word: noise and optimizer."""


@contextmanager
def _set(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def listening(listener: Listener) -> AbstractContextManager[None]:
    """Tell ``listener`` of every phase that begins in here."""
    return _set(_listener, listener)


@contextmanager
def phase(name: Phase) -> Iterator[None]:
    """Tell that ``name`` begins, and time it."""
    with cold_start() as seconds:
        seconds.setdefault(name, 0.0)
        _tell(name)
        start = time.perf_counter()
        with waiting(name):
            yield
        seconds[name] += time.perf_counter() - start


@contextmanager
def cold_start() -> Iterator[dict[str, float]]:
    """The phases in here belong together: one line in the log when all are done. A phase alone has a line of its own.

    Yields:
        the seconds of each phase so far.
    """
    outer = _seconds.get()
    if outer is not None:
        yield outer
        return
    seconds: dict[str, float] = {}
    try:
        with _set(_seconds, seconds):
            yield seconds
    finally:
        if seconds:
            _tell(None)
    if seconds:
        each = ", ".join(f"{name} {spent:.1f} s" for name, spent in seconds.items())
        log.info("dpscale: ready after %.1f s (%s)", sum(seconds.values()), each)


def _tell(name: Phase | None) -> None:
    listener = _listener.get()
    if listener is not None:
        listener(name)


class _Heard:
    """When a wait began, and when something was said of it last."""

    begin = last = 0.0


@contextmanager
def waiting(what: str, *, on: bool = False) -> Iterator[None]:
    """Whoever waits in here for long is told so, unless somebody listens who shows it. A warning: it is seen without
    any setting.

    Args:
        what: is going on.
        on: somebody has waited for something else just before, and waits on.
    """
    if _listener.get() is not None:
        yield
        return
    done = threading.Event()
    if not on:
        _Heard.begin = _Heard.last = time.perf_counter()

    def say() -> None:
        while not done.wait(max(0.0, _Heard.last + SILENCE - time.perf_counter())):
            _Heard.last = time.perf_counter()
            log.warning("dpscale: still %s (%.0f s so far)", what, _Heard.last - _Heard.begin)

    teller = threading.Thread(target=say, daemon=True)
    teller.start()
    try:
        yield
    finally:
        done.set()
        teller.join()  # nothing is said of what is over
