"""Every method at every seed, several runs at once, from where the records left off.

The choices come first: each method has the same number of tries, over the same grid of rates and outer momenta, on
training data held out for that, and keeps the try with the best accuracy there. The search is not counted in ε, as in
the paper; every record and report says so. Then each method runs at each seed. Its accuracy is that after the last
epoch, which is fixed beforehand; its curve is measured on the test data a few times on the way, and chooses nothing.
"""

import contextlib
import json
import logging
import math
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, as_completed, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dpscale.checks import require
from dpscale.engine.compiled import formula_of
from dpscale.engine.phases import phase
from dpscale.lab import models, records, runner
from dpscale.lab.claims import Claims
from dpscale.lab.data import checksums
from dpscale.lab.presets import METHODS, Choice, Config, Method, searched
from dpscale.lab.provenance import installed_versions
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate, run

log = logging.getLogger("dpscale")

SEARCH_SEED = 1000  # apart from the seeds of the final runs, which count from 0
NOT_COUNTED = (
    "Rate and momentum were searched on held-out training data and that search is not counted in epsilon, "
    "as in the paper. It is harmless for public data such as these; on private data it would have to be paid for."
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that is done, and how many are done and planned so far, those found on disk included."""

    record: Record
    done: int
    total: int


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The final records in the order of tables, and how many runs a deadline left undone."""

    records: list[Record]
    left: int


def compare(
    config: Config,
    methods: Sequence[Method],
    seeds: Sequence[int],
    out: Path,
    *,
    workers: int | None = None,
    deadline: float | None = None,
    command: str = "",
    on_finished: Callable[[Finished], None] = lambda _: None,
) -> Compared:
    """Run what has no record yet, and return the final record of every method and seed.

    Args:
        out: folder of the records; those of the search lie in ``out/search``. What is packed `records.beside` it
            counts as done too.
        workers: processes; 1 stays in this one. None: two on the CPU, on a GPU as many as fit.
        deadline: by `time.monotonic`; no run is begun after it, and those under way are finished.
    """
    require(bool(methods) and bool(seeds), "compare", "methods", "given, with seeds", (methods, seeds))
    sources = [METHODS[name] for name in searched([method.name for method in methods])]
    tries = sum(len(config.tries(source)) for source in sources) if config.tune else 0
    total = tries + len(methods) * len(seeds)
    workers = fitting(config) if workers is None else workers
    planned = _Batch(out=out, total=total, on_finished=on_finished, workers=workers, deadline=deadline)
    with _pool(workers) as pool:
        found: dict[str, dict[str, Any]] = {}
        if config.tune:
            chosen, found = _search(config, sources, planned, pool, command)
        else:
            chosen = {source.name: config.given(source) for source in sources}
        jobs = [
            Job(
                config=config,
                method=method.name,
                seed=seed,
                choice=chosen[method.follows or method.name],
                noise_multiplier=0.0,
                search=found.get(method.follows or method.name),
                command=command,
            )
            for seed in seeds
            for method in methods
            if (method.follows or method.name) in chosen
        ]
        done = planned.run(jobs, pool)
    order = {method.name: place for place, method in enumerate(methods)}
    done.sort(key=lambda record: (order[record.method], record.seed))
    return Compared(records=done, left=total - planned.done)


def fitting(config: Config) -> int:
    """How many runs go side by side: two on the CPU; on a GPU, where small models leave it idle, what memory holds."""
    if not torch.cuda.is_available():
        return 2
    most = 2 if models.large(config.model) else 14
    return max(1, min(_room(config), most, (os.cpu_count() or 2) - 1))


def _room(config: Config) -> int:
    """How many runs a GPU's memory holds."""
    each = models.memory(config.model, runner.shape(config), config.batch)  # not all go through it in parts
    return int(torch.cuda.mem_get_info()[0] / 2**30 / each)


def _search(
    config: Config, sources: Sequence[Method], planned: "_Batch", pool: Executor, command: str
) -> tuple[dict[str, Choice], dict[str, dict[str, Any]]]:
    """The best choice of every method whose tries are all done, and for the records how it was found."""
    jobs = [
        Job(
            config=config.replace(diagnostics=False),  # which are of the final runs
            method=source.name,
            seed=SEARCH_SEED,
            choice=choice,
            noise_multiplier=0.0,
            role="search",
            command=command,
        )
        for source in sources
        for choice in config.tries(source)
    ]
    done = {(record.method, Choice.of(record.choice)): record for record in planned.run(jobs, pool)}
    chosen, found = {}, {}
    for source in sources:
        tries = config.tries(source)
        if any((source.name, choice) not in done for choice in tries):
            continue
        runs = {choice: done[source.name, choice] for choice in tries}
        # Of equal accuracies the one with less loss: accuracy on a few hundred images is coarse.
        best = max(tries, key=lambda choice: (runs[choice].accuracy, -_or_inf(runs[choice].loss)))
        chosen[source.name] = best
        found[source.name] = {
            "note": NOT_COUNTED,
            "held_out": config.held_out,
            "epochs": config.trained("search"),
            "searched_for": source.name,
            "tries": [{"choice": choice.to_dict(), "accuracy": runs[choice].accuracy} for choice in tries],
            "chosen": best.to_dict(),
        }
    return chosen, found


def _attempt(job: Job) -> Record:
    """The run, after which its memory is free for others, also if there was not enough of it."""
    try:
        return run(job)
    except torch.OutOfMemoryError as error:
        told = str(error)  # the error itself holds on to what was computed
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    raise torch.OutOfMemoryError(told)


def _at_once(workers: int) -> str:
    return "one run at a time" if workers == 1 else f"{workers} runs at once"


_PATIENCE = 1.0
"""Seconds between two looks at runs that another process has under way."""


class _Batch:
    """Runs jobs that have no record yet and saves each record as it comes."""

    def __init__(
        self, *, out: Path, total: int, on_finished: Callable[[Finished], None], workers: int, deadline: float | None
    ) -> None:
        self.out, self.total, self.on_finished = out, total, on_finished
        self.workers, self.deadline = workers, deadline
        self.done = 0
        self.noise_multiplier: float | None = None
        self.compiled: set[Any] = set()
        self.here: dict[str, Any] | None = None  # checksums of the data
        packed = records.beside(out)
        self.packed = {record.key: record for record in records.load(packed)} if packed.is_file() else {}

    def run(self, jobs: Sequence[Job], pool: Executor) -> list[Record]:
        found, missing = [], []
        self.here = checksums(jobs[0].config.data) if jobs else None  # all are of one experiment
        for job in jobs:
            if (known := self._known(job)) is None:
                missing.append(job)
            else:
                self.done += 1
                found.append(known)
        for record in self._execute(missing, pool):
            self.done += 1
            found.append(record)
            self.on_finished(Finished(record=record, done=self.done, total=self.total))
        return found

    def _known(self, job: Job) -> Record | None:
        """The record that there is of a run; None if there is none, or one of other data."""
        path = _file(self.out, job)
        known = records.read(path) if path.exists() else self.packed.get(_key(job))
        if known is None or self.here not in (None, known.data.get("checksums")):
            return None
        return self._searched(known, job)

    def _searched(self, record: Record, job: Job) -> Record:
        """The record of a run that a wider search has chosen again: that search is told from now on."""
        if job.search is None or json.dumps(record.search) == json.dumps(job.search):
            return record
        if record.search is not None and not _tried(record.search) <= _tried(job.search):
            return record  # tries that were made are not forgotten
        record = replace(record, search=job.search)
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
                    if not claims.take(_key(job)):
                        waiting.append(job)
                        elsewhere += 1
                    elif (known := self._known(job)) is not None:
                        claims.leave(_key(job))
                        yield known
                    else:
                        under_way[pool.submit(_attempt, job)] = job
                if not under_way:
                    if not waiting or failure or not self._in_time():
                        break
                    time.sleep(_PATIENCE)
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    job, error = under_way.pop(future), future.exception()
                    if error is None:
                        yield self._saved(future.result())
                    elif isinstance(error, torch.OutOfMemoryError) and self.workers > 1:
                        self.workers -= 1
                        log.warning("dpscale: %s ran out of memory; from now on %s", job.method, _at_once(self.workers))
                        waiting.appendleft(job)
                    else:
                        failure = failure or error
                    claims.leave(_key(job))
        finally:
            claims.close()
            for future in under_way:
                future.cancel()
        if isinstance(failure, torch.OutOfMemoryError):
            action = "Free it of other processes, or go through batches in smaller parts: --set micro_batch=16"
            raise ValueError(f"The GPU has no memory for this run. {action}") from failure
        if failure:
            raise failure

    def _saved(self, record: Record) -> Record:
        record.save(_folder(self.out, record.role))
        return record

    def _in_time(self) -> bool:
        return self.deadline is None or time.monotonic() < self.deadline


def step_of(job: Job) -> Any:
    """What a run's compiled step depends on: its rule's formula, None without one, and the number of points."""
    method = METHODS[job.method]
    rule, momentum = method.scaling(job.config), method.momentum_of(job.config, job.choice)
    return (None, 1) if rule is None else (formula_of(rule), 1 if momentum is None else momentum.evaluations)


def kinds(jobs: Sequence[Job]) -> list[Job]:
    """One run of each kind of step, those of most points first: they take longest to compile."""
    found = {step_of(job): job for job in jobs}
    return [found[step] for step in sorted(found, key=lambda step: -step[1])]


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Compile the steps of these runs, several at once, so that those which follow find them on disk.

    Runs that start together would each compile the same step, with a dozen others at it. One that fails here is told,
    and compiles in its turn.
    """
    if not jobs:
        return
    cores = os.cpu_count() or 2
    places = max(1, min(len(jobs), cores // 2, _room(jobs[0].config)))
    with phase("compiling"), _processes(places, cores // places) as pool:
        tried = {pool.submit(runner.rehearse, job): job for job in jobs}
        for done in as_completed(tried):
            if (error := done.exception()) is not None:
                log.warning("dpscale: %s was not compiled ahead: %s", tried[done].method, error)


def train(
    config: Config,
    method: Method,
    seed: int,
    out: Path,
    *,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> Record:
    """One run at the preset's rates, its record saved in ``out``; repeated only if there is no record yet."""
    config = config.replace(tune=False)
    job = Job(
        config=config, method=method.name, seed=seed, choice=config.given(method), noise_multiplier=0.0, command=command
    )
    path = _file(out, job)
    if path.exists():
        return records.read(path)
    record = run(replace(job, noise_multiplier=calibrate(config) if method.rule else 0.0), on_progress)
    record.save(out)
    return record


def _tried(search: Mapping[str, Any]) -> set[str]:
    return {json.dumps(each["choice"], sort_keys=True) for each in search["tries"]}


def _or_inf(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _folder(out: Path, role: str) -> Path:
    return out / "search" if role == "search" else out


def _file(out: Path, job: Job) -> Path:
    return records.file(_folder(out, job.role), job.method, job.seed, _key(job))


def _key(job: Job) -> str:
    asked = (job.config.to_dict(), job.role, job.method, job.seed, job.choice.to_dict())
    return records.key(*asked, installed_versions()["dpscale"])


def _start_worker(compiling: int) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(compiling))  # each would start as many as cores
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle, and to report once


class _Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        try:
            done.set_result(function(*args, **options))
        except Exception as error:
            done.set_exception(error)
        return done


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Executor]:
    """Processes with one thread each; one worker stays in this process, with one thread too."""
    require(workers >= 1, "compare", "workers", "an integer >= 1", workers)
    if workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield _Here()
        finally:
            torch.set_num_threads(threads)
        return
    with _processes(workers) as pool:
        yield pool


@contextlib.contextmanager
def _processes(count: int, compiling: int = 1) -> Iterator[ProcessPoolExecutor]:
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
