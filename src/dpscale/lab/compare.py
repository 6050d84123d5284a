"""Every method at every seed, several runs at once, from where the records left off.

The choices come first: each method has the same tries, over the same grid of rates and outer momenta, on training data
held out for that. The best of them are made with further seeds, each with a held-out part of its own, and the one with
the best mean is kept. Where the best rate of a method is at the end of the grid, the grid grows for all of them. The
search is not counted in ε, as in the paper; every record and report says so. Then each method runs at each seed. Its
accuracy is that after the last epoch, which is fixed beforehand; its curve is measured on the test data a few times on
the way, and chooses nothing.

Runs that have a record are read, the others are done and saved. Another process that is asked for the same runs, on the
same folder, shares the work.
"""

import itertools
import json
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from dpscale.checks import out_of_memory, require
from dpscale.lab import device, records, runner, workers
from dpscale.lab.datasets.stored import checksums
from dpscale.lab.presets import METHODS, SEARCH_SEED, Choice, Config, Method, searched
from dpscale.lab.progress import OnProgress, ignore
from dpscale.lab.provenance import installed_versions
from dpscale.lab.records import Record
from dpscale.lab.runner import Job
from dpscale.ledger import Ledger

log = logging.getLogger("dpscale")

NOT_COUNTED = (
    "Rate and momentum were searched on held-out training data and that search is not counted in epsilon, "
    "as in the paper. It is harmless for public data such as these; on private data it would have to be paid for."
)

CONTENDERS = 3
"""So many tries of each method, the best by the first seed, are made with the other seeds too."""

PATIENCE = 1.0
"""Seconds between two looks at runs that another process has under way."""


# -- runs that are asked for -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Event:
    """A run that begins, or that is done (``record``), and how many are done and planned, those on disk included."""

    job: Job
    done: int
    total: int
    record: Record | None = None


class NoMemory(ValueError):
    """A run for which there is not enough memory, on a GPU or on this machine."""


def key_of(job: Job) -> str:
    """All that a run is asked to do, in a word."""
    asked = (job.config.to_dict(), job.role, job.method, job.seed, job.choice.to_dict())
    return records.key(*asked, installed_versions()["dpscale"], repeat=job.repeat)


def known(out: Path, job: Job, packed: Mapping[str, Record] | None = None) -> Record | None:
    """The record that there is of a run; None if there is none, or one of other data."""
    path = records.file(out, job.role, job.method, job.seed, key_of(job))
    found = records.read(path) if path.exists() else (packed or {}).get(key_of(job))
    if found is None or checksums(job.config.data) not in (None, found.data.get("checksums")):
        return None
    if job.search is not None and json.dumps(found.search) != json.dumps(job.search):
        # A wider search has chosen it again: that search is told from now on, with the tries of both.
        tries = [*(found.search["tries"] if found.search else []), *job.search["tries"]]
        together = {json.dumps(each["choice"], sort_keys=True): each for each in tries}
        found = found.replace(search={**job.search, "tries": list(together.values())})
        found.save(out)
    return found


def attempt(job: Job, out: Path, on_progress: OnProgress = ignore) -> Record | None:
    """Do a run and save its record in ``out``; None if another process has it under way.

    A claim is a lock that ends with this process, however it ends. What another process has recorded by now is taken.
    """
    claim = out / ".claims" / f"{key_of(job)}.lock"
    claim.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(claim)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return None
    try:
        record = known(out, job)
        if record is None:
            record = _run(job, on_progress)
            record.save(out)
        return record
    finally:
        with suppress(OSError):
            claim.unlink()
        lock.release()
        with suppress(OSError):
            claim.parent.rmdir()


def _run(job: Job, on_progress: OnProgress) -> Record:
    """The run, after which its memory is free for others, also if there was not enough of it."""
    try:
        return runner.run(job, on_progress)
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
    finally:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    # Not from the error, which holds on to what was computed.
    action = "End other processes that take it, or go through batches in smaller parts: micro_batch=16"
    raise NoMemory(f"There is not enough memory for this run. {action}")


def work(job: Job) -> float:
    """How long a run is, in gradients of all samples."""
    return job.config.trained(job.role) * job.points * (1 - job.config.held_out if job.role == "search" else 1.0)


class Queue:
    """Runs jobs that have no record yet.

    Args:
        deadline: by `time.monotonic`; no run is begun that would not end before it, as far as earlier runs tell; before
            the first of them, a few steps that are timed.
    """

    def __init__(
        self, out: Path, *, workers: int = 1, deadline: float | None = None,
        on_event: Callable[[Event], None] = lambda _: None, on_progress: OnProgress | None = None,
    ) -> None:  # fmt: skip
        self.out, self.workers, self.deadline, self.on_event = out, workers, deadline, on_event
        self.listeners = () if on_progress is None else (on_progress,)  # to the steps of runs in this process
        self.done = self.total = 0
        self.left: list[Job] = []
        self.noise_multiplier: float | None = None
        self.compiled: set[Any] = set()
        self.paces: list[float] = []  # seconds of earlier runs here, per unit of `work`
        self.guess: float | None = None
        self.packed = {record.key: record for record in records.found_in(records.beside(out))}

    @property
    def pace(self) -> float | None:
        """Seconds per unit of `work`, the median of the runs seen so far; before them as timed, or None."""
        return statistics.median(self.paces) if self.paces else self.guess

    def run(self, jobs: Sequence[Job], pool: Executor) -> list[Record]:
        """The records of these runs, but for those that a deadline left undone.

        After an error no run is begun any more, and those under way are finished.
        """
        found = [(job, known(self.out, job, self.packed)) for job in jobs]
        done = [self._count(job, record) for job, record in found if record is not None]
        waiting = deque(self._prepared([job for job, record in found if record is None]))
        under_way, failure = dict[Future[Record | None], Job](), None
        while waiting or under_way:
            while waiting and len(under_way) < self.workers and failure is None:
                job = waiting.popleft()
                if self._fits(job):
                    self.on_event(Event(job=job, done=self.done, total=self.total))
                    under_way[pool.submit(attempt, job, self.out, *self.listeners)] = job
                else:
                    self.left.append(job)
            if not under_way:
                break
            for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                job, error = under_way.pop(future), future.exception()
                if isinstance(error, NoMemory) and self.workers > 1:
                    self.workers -= 1
                    log.warning("dpscale: %s ran out of memory; runs at once from now on: %d", job.method, self.workers)
                    waiting.appendleft(job)
                elif error is not None:
                    failure = failure or error
                elif (record := future.result()) is None:  # it comes last
                    waiting.append(job)
                    time.sleep(PATIENCE)
                else:
                    done.append(self._count(job, record))
                    self.on_event(Event(job=job, record=record, done=self.done, total=self.total))
        if isinstance(failure, BrokenExecutor):
            action = "Run the same command again, with fewer --workers if memory was short: what is finished is kept."
            raise ValueError(f"A process that runs were done in was ended from outside. {action}") from failure
        if failure:
            raise failure
        return done

    def _count(self, job: Job, record: Record) -> Record:
        self.done += 1
        self.paces.append((record.seconds + record.cold_seconds) / work(job))
        return record

    def _prepared(self, jobs: list[Job]) -> list[Job]:
        """With the noise calibrated, and on a GPU with every kind of step compiled."""
        if not any(self._fits(job) for job in jobs):
            return jobs
        if self.noise_multiplier is None and any(METHODS[job.method].rule for job in jobs):
            self.noise_multiplier = runner.calibrate(jobs[0].config)
        jobs = [replace(job, noise_multiplier=self.noise_multiplier or 0.0) for job in jobs]
        if self.deadline is not None and self.pace is None:
            self.guess = timed(jobs[0])
        if self.workers > 1 and device.on_gpu():
            private = [job for job in jobs if METHODS[job.method].rule]
            workers.compile_ahead([job for job in private if workers.step_of(job) not in self.compiled])
            self.compiled |= {workers.step_of(job) for job in private}
        return jobs

    def _fits(self, job: Job) -> bool:
        return self.deadline is None or time.monotonic() + (self.pace or 0.0) * work(job) < self.deadline


# -- a comparison ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """What came of a comparison."""

    records: list[Record]  # final ones, in the order of tables
    left: int  # runs that a deadline left undone
    work: float = 0.0  # of those
    pace: float | None = None  # seconds per unit of work of one process; None if no run has told it yet


def compare(
    config: Config, methods: Sequence[Method], seeds: Sequence[int], out: Path, *, repeats: int = 0,
    ledger: Path | None = None, at_once: int | None = None, deadline: float | None = None, command: str = "",
    on_event: Callable[[Event], None] = lambda _: None,
) -> Compared:  # fmt: skip
    """Run what has no record yet, and return the final record of every method and seed.

    Args:
        out: folder of the records; those of the search lie in ``out/search``. What is packed `records.beside` it
            counts as done too.
        repeats: the first private method at the first seed is run so many times more, for the noise of the machine.
        ledger: where every run that is begun is booked, those of the search too.
        at_once: processes; 1 stays in this one. None: two on the CPU, on a GPU as many as fit.
        deadline: by `time.monotonic`; no run is begun that would not end before it.
    """
    _require_priced(ledger, methods)
    records.found_in(out)  # complaints about them come before hours of training, not when the table is made
    asked = Job(config=config, method="", seed=0, choice=Choice(rate=1.0), command=command, ledger=ledger)
    sources = [METHODS[name] for name in searched(method.name for method in methods)]
    at_once = workers.fitting(config) if at_once is None else at_once
    queue = Queue(out, workers=at_once, deadline=deadline, on_event=on_event)
    runs = [(method, seed, 0) for seed in seeds for method in methods]
    runs += [(method, seeds[0], 1 + k) for method in [m for m in methods if m.rule][:1] for k in range(repeats)]
    queue.total = len(runs)
    with workers.pool(at_once) as pool:
        if config.tune:
            asked, chosen, found = _search(asked, sources, queue, pool)
        else:
            chosen, found = {source.name: config.given(source) for source in sources}, {}
        ready = [method for method in methods if method.source.name in chosen]
        twice = {method.name for method in ready if _is_another(method, ready, config, chosen)}
        queue.total -= sum(method.name in twice for method, *_ in runs)
        jobs = [
            replace(asked, method=method.name, seed=seed, repeat=repeat, choice=chosen[method.source.name],
                    search=found.get(method.source.name))
            for method, seed, repeat in runs if method in ready and method.name not in twice
        ]  # fmt: skip
        jobs.sort(key=lambda job: (job.repeat, job.seed, -job.points))  # the end should not be one long run alone
        done = [record for record in queue.run(jobs, pool) if not record.repeat]
    order = [method.name for method in methods]
    done.sort(key=lambda record: (order.index(record.method), record.seed))
    # Final runs whose choice is open, and tries that follow the first ones, are not in the queue yet.
    left = queue.total - queue.done
    usual = statistics.fmean(work(replace(asked, method=each.name, choice=config.tries(each)[0])) for each in methods)
    open_ = (left - len(queue.left)) * usual
    return Compared(records=done, left=left, work=sum(map(work, queue.left)) + open_, pace=queue.pace)


def _is_another(method: Method, methods: Sequence[Method], config: Config, chosen: Mapping[str, Choice]) -> bool:
    """Whether a control would take the very steps of another method, as PSAC at lr/s those of DP-PSAC where both chose
    one rate. The same runs under two names are no comparison, and would count as one in Holm's correction."""

    def steps(one: Method) -> tuple[str, str, str]:
        choice = chosen[one.source.name]
        rate = f"{one.learning_rate(config, choice):.9g}"
        return str(one.scaling(config)), str(one.momentum_of(config, choice)), rate

    return bool(method.follows) and any(steps(one) == steps(method) for one in methods if not one.follows)


def minutes(config: Config, methods: Sequence[Method], found: Compared, at_once: int | None = None) -> float:
    """About how long the runs that are left take. Unless a run has told its pace, a few steps are timed."""
    pace = found.pace
    if pace is None and found.left:
        choice = config.tries(methods[0])[0]
        pace = timed(Job(config=config, method=methods[0].name, seed=SEARCH_SEED, choice=choice, noise_multiplier=1.0))
    return found.work * (pace or 0.0) / (at_once or workers.fitting(config)) / 60


def timed(job: Job) -> float:
    """Seconds per unit of `work`, from a few steps of a run that is then forgotten."""
    ends = [time.perf_counter() for _ in itertools.islice(runner.steps(replace(job, ledger=None)), 6)]
    took = [after - before for before, after in itertools.pairwise(ends)] or [0.0]
    return statistics.median(took) * (runner.planned(job.config).steps or 0) / job.config.epochs / job.points


def train(
    config: Config, method: Method, seed: int, out: Path, *, ledger: Path | None = None, command: str = "",
    on_progress: OnProgress = ignore,
) -> Record:  # fmt: skip
    """One run at the preset's rates, its record saved in ``out``; repeated only if there is no record yet."""
    _require_priced(ledger, [method])
    job = Job(config=config.replace(tune=False), method=method.name, seed=seed, choice=config.given(method),
              command=command, ledger=ledger)  # fmt: skip
    (record,) = Queue(out, on_progress=on_progress).run([job], workers.Here())
    return record


def _require_priced(ledger: Path | None, methods: Sequence[Method]) -> None:
    """Refuse a ledger that is not there, and methods whose price no ledger can pay."""
    if ledger is not None:
        Ledger(ledger)
        free = [method.name for method in methods if not method.rule]
        action = "Without noise their price is infinite. Name others: --methods dp-sgd,dp-psasc."
        require(not free, "--ledger", "methods", "private, all of them", ", ".join(free), action)


# -- the search ------------------------------------------------------------------------------------------------

Tries = Mapping[tuple[str, Choice], list[Record]]


def _search(
    asked: Job, sources: Sequence[Method], queue: Queue, pool: Executor
) -> tuple[Job, dict[str, Choice], dict[str, dict[str, Any]]]:
    """What to run with the grid that it took, the best choice of every method whose tries are all done, and for the
    records how it was found."""
    done: dict[tuple[str, Choice], list[Record]] = {}
    queue.total += sum(_planned(asked.config, source) for source in sources)
    for round_ in range(asked.config.widen + 1):
        config = asked.config
        for seeds in sorted({1, config.search_seeds}):  # all tries once, then the best of them with the other seeds
            wanted = [(source, choice) for source in sources for choice in _contenders(config, source, done, seeds)]
            jobs = [
                replace(asked, config=config.replace(diagnostics=False), method=source.name, choice=choice,
                        role="search", seed=SEARCH_SEED + k)
                for source, choice in wanted for k in range(len(done.get((source.name, choice), [])), seeds)
            ]  # fmt: skip
            queue.total += len(jobs) if round_ else 0
            jobs.sort(key=lambda job: (-job.points, job.seed))
            for record in queue.run(jobs, pool):
                done.setdefault((record.method, Choice.model_validate(record.choice)), []).append(record)
        chosen, found = _best(config, sources, done)
        grid = _wider(config.grid, [choice.rate for choice in chosen.values()])
        if len(chosen) < len(sources) or grid == config.grid or round_ == config.widen:
            break
        asked = replace(asked, config=config.replace(grid=grid))
    return asked, chosen, found


def _planned(config: Config, source: Method) -> int:
    """Runs of a method's search, if its grid does not grow."""
    tries = len(config.tries(source))
    return tries + min(CONTENDERS, tries) * (config.search_seeds - 1)


def _contenders(config: Config, source: Method, done: Tries, seeds: int) -> list[Choice]:
    """What to try with so many seeds: everything once; with more, the best by the first seed; nothing if one failed."""
    tries = config.tries(source)
    if seeds == 1:
        return tries
    if any((source.name, choice) not in done for choice in tries):
        return []
    return sorted(tries, key=lambda choice: _score(done[source.name, choice][:1]), reverse=True)[:CONTENDERS]


def _best(
    config: Config, sources: Sequence[Method], done: Tries
) -> tuple[dict[str, Choice], dict[str, dict[str, Any]]]:
    chosen, found = {}, {}
    for source in sources:
        tries = {choice: done.get((source.name, choice), []) for choice in config.tries(source)}
        final = [choice for choice, runs in tries.items() if len(runs) == config.search_seeds]
        if not all(tries.values()) or len(final) < min(CONTENDERS, len(tries)):
            continue
        chosen[source.name] = max(final, key=lambda choice: _score(tries[choice]))
        found[source.name] = {
            "note": NOT_COUNTED, "held_out": config.held_out, "epochs": config.trained("search"),
            "seeds": config.search_seeds, "searched_for": source.name, "chosen": chosen[source.name].to_dict(),
            "tries": [
                {"choice": choice.to_dict(), "accuracy": _score(runs)[0], "seeds": len(runs)}
                for choice, runs in tries.items()
            ],
        }  # fmt: skip
    return chosen, found


def _wider(grid: tuple[float, ...], best: Sequence[float]) -> tuple[float, ...]:
    """With one more rate at each end that a method chose, as far from the last as that from the one before."""
    ends = sorted(grid)
    if len(ends) < 2:
        return grid
    more = [ends[0] ** 2 / ends[1]] if ends[0] in best else []
    more += [ends[-1] ** 2 / ends[-2]] if ends[-1] in best else []
    return grid + tuple(float(f"{rate:.6g}") for rate in more)  # at the end: the others keep their places


def _score(runs: Sequence[Record]) -> tuple[float, float]:
    """Mean accuracy; of equal ones less loss is better: accuracy on a few hundred images is coarse."""
    losses = (math.inf if run.loss is None else run.loss for run in runs)
    return statistics.fmean(run.accuracy for run in runs), -statistics.fmean(losses)
