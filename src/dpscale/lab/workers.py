"""Processes that runs are done in, which end with the one that began them; and what runs that share a GPU need."""

import contextlib
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from typing import Any

import torch

from dpscale.engine.compile.step import formula_of
from dpscale.engine.phases import phase
from dpscale.lab import device, models, runner
from dpscale.lab.presets import METHODS, Config
from dpscale.lab.runner import Job

log = logging.getLogger("dpscale")


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
def pool(workers: int, compiling: int = 1, *, here: bool = True) -> Iterator[Executor]:
    """Processes with one thread each, and ``compiling`` of their own at most where they compile.

    One worker stays in this process, with one thread too, unless ``here`` is False.
    """
    if workers == 1 and here:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield Here()
        finally:
            torch.set_num_threads(threads)
        return
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads may hang
    with ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(compiling,)) as several:
        try:
            yield several
        except BaseException:  # an interrupt: what is under way is lost in any case, so nobody waits for it
            for process in list((several._processes or {}).values()):
                process.terminate()
            several.shutdown(wait=False, cancel_futures=True)
            raise


def fitting(config: Config) -> int:
    """How many runs go side by side: two on the CPU; on a GPU, where small models leave it idle, what memory holds."""
    if not device.on_gpu():
        return 2
    most = 2 if models.large(config.model) else 14
    return max(1, min(_room(config), most, (os.cpu_count() or 2) - 1))


def _room(config: Config) -> int:
    """How many runs a GPU's memory holds."""
    each = models.memory(
        config.model, tuple(runner.whole(config).train_images.shape[1:]), config.batch
    )  # not all go through it in parts
    return int(torch.cuda.mem_get_info()[0] / 2**30 / each)


def step_of(job: Job) -> Any:
    """What a private run's compiled step depends on: its rule's formula and the number of points."""
    rule = METHODS[job.method].scaling(job.config)
    assert rule is not None
    return formula_of(rule), job.points


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Compile each kind of step of these runs once, several at a time, so that the runs find them on disk.

    Runs that start together would each compile the same step, with a dozen others at it. One that fails here is told,
    and compiles in its turn.
    """
    kinds = sorted({step_of(job): job for job in jobs}.values(), key=lambda job: -job.points)  # they take longest
    if not kinds:
        return
    cores = os.cpu_count() or 2
    places = max(1, min(len(kinds), cores // 2, _room(kinds[0].config)))
    with phase("compiling"), pool(places, cores // places, here=False) as several:
        tried = {several.submit(runner.rehearse, job): job for job in kinds}
        for done in as_completed(tried):
            if (error := done.exception()) is not None:
                log.warning("dpscale: %s was not compiled ahead: %s", tried[done].method, error)
