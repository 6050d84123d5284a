"""Runs that are asked for: those that have a record are read, the others are done, several at once, and saved.

Another process that is asked for the same runs, on the same folder, shares the work.
"""

import json
import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dpscale.checks import out_of_memory
from dpscale.lab import device, records
from dpscale.lab.config import METHODS
from dpscale.lab.data import checksums
from dpscale.lab.provenance import installed_versions
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate, run
from dpscale.lab.workers import compile_ahead, step_of

log = logging.getLogger("dpscale")

_PATIENCE = 1.0
"""Seconds between two looks at runs that another process has under way."""


@dataclass(frozen=True, kw_only=True)
class Event:
    """A run that begins, or that is done (``record``), and how many are done and planned, those on disk included."""

    job: Job
    done: int
    total: int
    record: Record | None = None


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
    action = "End other processes that take it, or go through batches in smaller parts: micro_batch=16"
    raise NoMemory(f"There is not enough memory for this run. {action}")


class Queue:
    """Runs jobs that have no record yet and saves each record as it comes.

    Args:
        deadline: by `time.monotonic`; no run is begun that would not end before it, as far as earlier runs tell.
    """

    def __init__(
        self, out: Path, *, workers: int = 1, deadline: float | None = None,
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self.out, self.workers, self.deadline, self.on_event = out, workers, deadline, on_event
        self.done = self.total = 0
        self.left: list[Job] = []
        self.noise_multiplier: float | None = None
        self.compiled: set[Any] = set()
        self.here: dict[str, Any] = {}  # checksums of the data
        self.paces: list[float] = []  # seconds of earlier runs here, per unit of `work`
        packed = records.beside(out)
        self.packed = {record.key: record for record in records.load(packed)} if packed.is_file() else {}

    def run(self, jobs: Sequence[Job], pool: Executor) -> list[Record]:
        """The records of these runs, but for those that a deadline left undone."""
        found: list[Record] = []
        missing = []
        for job in jobs:
            if (known := self.known(job)) is None:
                missing.append(job)
            else:
                self._count(job, known)
                found.append(known)
        for job, record in self._execute(missing, pool):
            self._count(job, record)
            found.append(record)
            self.on_event(Event(job=job, record=record, done=self.done, total=self.total))
        return found

    def _count(self, job: Job, record: Record) -> None:
        self.done += 1
        self.paces.append((record.seconds + record.cold_seconds) / work(job))

    def known(self, job: Job) -> Record | None:
        """The record that there is of a run; None if there is none, or one of other data."""
        if job.config.data not in self.here:
            self.here[job.config.data] = checksums(job.config.data)
        path = file_of(self.out, job)
        known = records.read(path) if path.exists() else self.packed.get(key_of(job))
        if known is None or self.here[job.config.data] not in (None, known.data.get("checksums")):
            return None
        if job.search is not None and json.dumps(known.search) != json.dumps(job.search):
            # A wider search has chosen it again: that search is told from now on.
            known = self._saved(known.replace(search=_together(known.search, job.search)))
        return known

    def _execute(self, jobs: Sequence[Job], pool: Executor) -> Iterator[tuple[Job, Record]]:
        """Run and save. What another process has under way comes last, and its record is taken when it is there.

        After an error no run is begun any more, and those under way are finished.
        """
        jobs = self._prepared(jobs)
        waiting, under_way, failure = deque(jobs), dict[Future[Record], tuple[Job, FileLock]](), None
        try:
            while waiting or under_way:
                known, elsewhere = ([], False) if failure else self._begin(waiting, under_way, pool)
                yield from known
                if not under_way:
                    if not elsewhere:
                        break
                    time.sleep(_PATIENCE)
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job, claim = under_way.pop(future)
                    error = future.exception()
                    if error is None:
                        yield job, self._saved(future.result())
                    elif isinstance(error, NoMemory) and self.workers > 1:
                        self.workers -= 1
                        log.warning(
                            "dpscale: %s ran out of memory; runs at once from now on: %d", job.method, self.workers
                        )
                        waiting.appendleft(job)
                    else:
                        failure = failure or error
                    _leave(claim)
        finally:
            for future, (_, claim) in under_way.items():
                future.cancel()
                _leave(claim)
            with suppress(OSError):
                (self.out / ".claims").rmdir()
        if isinstance(failure, BrokenExecutor):
            action = "Run the same command again, with fewer --workers if memory was short: what is finished is kept."
            raise ValueError(f"A process that runs were done in was ended from outside. {action}") from failure
        if failure:
            raise failure

    def _prepared(self, jobs: Sequence[Job]) -> list[Job]:
        """With the noise calibrated, and on a GPU with every kind of step compiled."""
        if not any(self._fits(job) for job in jobs):
            return list(jobs)
        if self.noise_multiplier is None and any(METHODS[job.method].rule for job in jobs):
            self.noise_multiplier = calibrate(jobs[0].config)
        jobs = [replace(job, noise_multiplier=self.noise_multiplier or 0.0) for job in jobs]
        if self.workers > 1 and device.on_gpu():
            compile_ahead([job for job in jobs if step_of(job) not in self.compiled])
            self.compiled |= {step_of(job) for job in jobs}
        return jobs

    def _begin(
        self, waiting: deque[Job], under_way: dict[Future[Record], tuple[Job, FileLock]], pool: Executor
    ) -> tuple[list[tuple[Job, Record]], bool]:
        """Begin what there is room and time for.

        Returns the records that others have saved meanwhile, and whether others have a run under way.
        """
        found, elsewhere = [], False
        for _ in range(len(waiting)):
            if len(under_way) >= self.workers:
                break
            job = waiting.popleft()
            if not self._fits(job):
                self.left.append(job)
                continue
            claim = self._claim(job)
            if claim is None:
                waiting.append(job)
                elsewhere = True
            elif (known := self.known(job)) is not None:
                _leave(claim)
                found.append((job, known))
            else:
                self.on_event(Event(job=job, done=self.done, total=self.total))
                under_way[pool.submit(attempt, job)] = job, claim
        return found, elsewhere

    def _claim(self, job: Job) -> FileLock | None:
        """A lock that is this process's until it ends, however that ends; None: another one has it."""
        claim = FileLock(self.out / ".claims" / f"{key_of(job)}.lock")
        Path(claim.lock_file).parent.mkdir(parents=True, exist_ok=True)
        try:
            claim.acquire(timeout=0)
        except Timeout:
            return None
        return claim

    def _saved(self, record: Record) -> Record:
        record.save(_folder(self.out, record.role))
        return record

    def _fits(self, job: Job) -> bool:
        if self.deadline is None:
            return True
        return time.monotonic() + (self.pace or 0.0) * work(job) < self.deadline

    @property
    def pace(self) -> float | None:
        """Seconds per unit of `work`, the median of the runs seen so far; None if there is none."""
        return statistics.median(self.paces) if self.paces else None


def work(job: Job) -> float:
    """How long a run is, in gradients of all samples."""
    return job.config.trained(job.role) * job.points * (1 - job.config.held_out if job.role == "search" else 1.0)


def _leave(claim: FileLock) -> None:
    with suppress(OSError):
        Path(claim.lock_file).unlink()
    claim.release()


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
    return records.key(*asked, installed_versions()["dpscale"], repeat=job.repeat)
