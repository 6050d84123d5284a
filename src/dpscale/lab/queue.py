"""Runs that are asked for: those that have a record are read, the others are done, several at once, and saved.

Another process that is asked for the same runs, on the same folder, shares the work.
"""

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpscale.checks import out_of_memory
from dpscale.lab import records
from dpscale.lab.claims import Claims
from dpscale.lab.data import checksums
from dpscale.lab.gpu import compile_ahead, kinds, step_of
from dpscale.lab.presets import METHODS
from dpscale.lab.provenance import installed_versions
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate, run

log = logging.getLogger("dpscale")


@dataclass(frozen=True, kw_only=True)
class Begun:
    """A run that begins now, and how many are done and planned so far, those found on disk included."""

    job: Job
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that is done, and how many are done and planned so far, those found on disk included."""

    record: Record
    done: int
    total: int


class NoMemory(ValueError):
    """A run for which there is not enough memory, on a GPU or on this machine."""


def attempt(job: Job, on_progress: Callable[[Progress], None] | None = None) -> Record:
    """The run, after which its memory is free for others, also if there was not enough of it."""
    try:
        return run(job, on_progress)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    # Not from the error, which holds on to what was computed.
    action = "End other processes that take it, or go through batches in smaller parts: --set micro_batch=16"
    raise NoMemory(f"There is not enough memory for this run. {action}")


def _at_once(workers: int) -> str:
    return "one run at a time" if workers == 1 else f"{workers} runs at once"


_PATIENCE = 1.0
"""Seconds between two looks at runs that another process has under way."""


class Queue:
    """Runs jobs that have no record yet and saves each record as it comes."""

    def __init__(
        self, *, out: Path, total: int, on_finished: Callable[[Finished], None], workers: int, deadline: float | None,
        on_begun: Callable[[Begun], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.out, self.total, self.on_finished, self.on_begun = out, total, on_finished, on_begun
        self.workers, self.deadline = workers, deadline
        self.done = 0
        self.noise_multiplier: float | None = None
        self.compiled: set[Any] = set()
        self.here: dict[str, Any] = {}  # checksums of the data
        packed = records.beside(out)
        self.packed = {record.key: record for record in records.load(packed)} if packed.is_file() else {}

    def run(self, jobs: Sequence[Job], pool: Executor) -> list[Record]:
        """The records of these runs, but for those that a deadline left undone."""
        found, missing = [], []
        for job in jobs:
            if (known := self.known(job)) is None:
                missing.append(job)
            else:
                self.done += 1
                found.append(known)
        for record in self._execute(missing, pool):
            self.done += 1
            found.append(record)
            self.on_finished(Finished(record=record, done=self.done, total=self.total))
        return found

    def known(self, job: Job) -> Record | None:
        """The record that there is of a run; None if there is none, or one of other data."""
        if job.config.data not in self.here:
            self.here[job.config.data] = checksums(job.config.data)
        path = file_of(self.out, job)
        known = records.read(path) if path.exists() else self.packed.get(key_of(job))
        if known is None or self.here[job.config.data] not in (None, known.data.get("checksums")):
            return None
        return self._searched(known, job)

    def _searched(self, record: Record, job: Job) -> Record:
        """The record of a run that a wider search has chosen again: that search is told from now on."""
        if job.search is None or json.dumps(record.search) == json.dumps(job.search):
            return record
        record = replace(record, search=_together(record.search, job.search))
        record.save(_folder(self.out, record.role))
        return record

    def _execute(self, jobs: Sequence[Job], pool: Executor) -> Iterator[Record]:
        """Run and save. What another process has under way comes last, and its record is taken when it is there.

        After an error no run is begun any more, and those under way are finished.
        """
        if self.noise_multiplier is None and any(METHODS[job.method].rule for job in jobs):
            self.noise_multiplier = calibrate(jobs[0].config)
        jobs = [replace(job, noise_multiplier=self.noise_multiplier or 0.0) for job in jobs]
        if self.workers > 1 and torch.cuda.is_available() and self._in_time():
            compile_ahead([job for job in kinds(jobs) if step_of(job) not in self.compiled])
            self.compiled |= {step_of(job) for job in jobs}
        waiting, under_way = deque(jobs), dict[Future[Record], Job]()
        claims, failure = Claims(self.out), None
        try:
            while True:
                elsewhere = 0
                while len(under_way) < self.workers and elsewhere < len(waiting) and not failure and self._in_time():
                    job = waiting.popleft()
                    if not claims.take(key_of(job)):
                        waiting.append(job)
                        elsewhere += 1
                    elif (known := self.known(job)) is not None:
                        claims.leave(key_of(job))
                        yield known
                    else:
                        self.on_begun(Begun(job=job, done=self.done, total=self.total))
                        under_way[pool.submit(attempt, job)] = job
                if not under_way:
                    if not waiting or failure or not self._in_time():
                        break
                    time.sleep(_PATIENCE)
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job, error = under_way.pop(future), future.exception()
                    if error is None:
                        yield self._saved(future.result())
                    elif isinstance(error, NoMemory) and self.workers > 1:
                        self.workers -= 1
                        log.warning("dpscale: %s ran out of memory; from now on %s", job.method, _at_once(self.workers))
                        waiting.appendleft(job)
                    else:
                        failure = failure or error
                    claims.leave(key_of(job))
        finally:
            claims.close()
            for future in under_way:
                future.cancel()
        if isinstance(failure, BrokenExecutor):
            action = "Run the same command again, with fewer --workers if memory was short: what is finished is kept."
            raise ValueError(f"A process that runs were done in was ended from outside. {action}") from failure
        if failure:
            raise failure

    def _saved(self, record: Record) -> Record:
        record.save(_folder(self.out, record.role))
        return record

    def _in_time(self) -> bool:
        return self.deadline is None or time.monotonic() < self.deadline


def _together(before: Mapping[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """The later of two searches that chose the same, with the tries of both: none that was made is forgotten."""
    tries = [*(before["tries"] if before else []), *now["tries"]]
    return {**now, "tries": list({json.dumps(each["choice"], sort_keys=True): each for each in tries}.values())}


def _folder(out: Path, role: str) -> Path:
    return out / "search" if role == "search" else out


def file_of(out: Path, job: Job) -> Path:
    """Where the record of a run lies, or will lie."""
    return records.file(_folder(out, job.role), job.method, job.seed, key_of(job))


def key_of(job: Job) -> str:
    """All that a run is asked to do, in a word."""
    asked = (job.config.to_dict(), job.role, job.method, job.seed, job.choice.to_dict())
    return records.key(*asked, installed_versions()["dpscale"])
