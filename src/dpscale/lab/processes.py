"""Processes that runs are done in, which end with the one that began them."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

import torch

from dpscale.checks import require


def _start_worker(compiling: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiling))  # each would start as many as cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle, and to report once
    if (parent := multiprocessing.parent_process()) is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when the other is gone, however it ended: nobody would take what comes of it."""
    multiprocessing.connection.wait([parent])
    os._exit(1)


class Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        """Call it; the future is done already."""
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def pool(workers: int) -> Iterator[Executor]:
    """Processes with one thread each; one worker stays in this process, with one thread too."""
    require(workers >= 1, "compare", "workers", "an integer >= 1", workers)
    if workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield Here()
        finally:
            torch.set_num_threads(threads)
        return
    with processes(workers) as several:
        yield several


@contextlib.contextmanager
def processes(count: int, compiling: int = 1) -> Iterator[ProcessPoolExecutor]:
    """So many of them, each with ``compiling`` of its own at most where it compiles."""
    # Spawned, not forked: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with (
        _ended_by_signal(),
        ProcessPoolExecutor(count, context, initializer=_start_worker, initargs=(compiling,)) as pool,
    ):
        try:
            yield pool
        except BaseException:  # an interrupt: what is under way is lost in any case, so nobody waits for it
            for process in list((pool._processes or {}).values()):
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


@contextlib.contextmanager
def _ended_by_signal() -> Iterator[None]:
    """A request to end is an exit like any other: processes that were started are ended too."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, _: Any) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
