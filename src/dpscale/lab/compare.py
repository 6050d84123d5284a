"""Every method at every seed, in two processes, from where the records left off.

The rates come first: each method is tried once at each rate of the same grid, on training data held out for that,
and keeps the rate with the best accuracy there. The search is not counted in ε, as in the paper; every record and
report says so. Then each method runs at each seed and is measured once, after the last epoch.
"""

import contextlib
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpscale.checks import require
from dpscale.lab import records
from dpscale.lab.presets import METHODS, Config, Method, bound, searched
from dpscale.lab.provenance import installed_versions
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate, run

SEARCH_SEED = 1000  # apart from the seeds of the final runs, which count from 0
NOT_COUNTED = (
    "The learning rate was searched on held-out training data and that search is not counted in epsilon, "
    "as in the paper. It is harmless for public data such as these; on private data it would have to be paid for."
)


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A run that is done, and how many are done and planned so far, those found on disk included."""

    record: Record
    done: int
    total: int


def compare(
    config: Config,
    methods: Sequence[Method],
    seeds: Sequence[int],
    out: Path,
    *,
    workers: int = 2,
    command: str = "",
    on_finished: Callable[[Finished], None] = lambda _: None,
) -> list[Record]:
    """Run what has no record yet, and return the final record of every method and seed.

    Args:
        out: folder of the records; those of the search lie in ``out/search``.
        workers: processes; 1 stays in this one.
    """
    require(bool(methods) and bool(seeds), "compare", "methods", "given, with seeds", (methods, seeds))
    sources = searched([method.name for method in methods])
    tries = len(sources) * len(config.grid) if config.tune else 0
    planned = _Batch(out=out, total=tries + len(methods) * len(seeds), on_finished=on_finished)
    with _pool(workers) as pool:
        rates = dict(config.rates)
        found: dict[str, dict[str, Any]] = {}
        if config.tune:
            rates, found = _search(config, sources, planned, pool, command)
        jobs = [
            Job(
                config=config,
                method=method.name,
                seed=seed,
                learning_rate=method.learning_rate(config, rates),
                noise_multiplier=0.0,
                search=found.get(method.follows or method.name),
                command=command,
            )
            for seed in seeds
            for method in methods
        ]
        done = planned.run(jobs, pool)
    order = {method.name: place for place, method in enumerate(methods)}
    return sorted(done, key=lambda record: (order[record.method], record.seed))


def _search(
    config: Config, sources: Sequence[str], planned: "_Batch", pool: Executor | None, command: str
) -> tuple[dict[str, float], dict[str, dict[str, Any]]]:
    """The best rate of every method, and for the records how it was found."""
    jobs = [
        Job(
            config=config,
            method=name,
            seed=SEARCH_SEED,
            learning_rate=rate / bound(METHODS[name], config),
            noise_multiplier=0.0,
            role="search",
            command=command,
        )
        for rate in config.grid
        for name in sources
    ]
    tried: dict[str, dict[float, Record]] = {name: {} for name in sources}
    for record in planned.run(jobs, pool):
        rate = min(config.grid, key=lambda rate: abs(rate - record.rate))  # the rate itself, before any rounding
        tried[record.method][rate] = record
    rates, found = {}, {}
    for name, runs in tried.items():
        # Of equal accuracies the one with less loss: accuracy on a few hundred images is coarse.
        rates[name] = max(runs, key=lambda rate: (runs[rate].accuracy, -_or_inf(runs[rate].loss)))
        found[name] = {
            "note": NOT_COUNTED,
            "held_out": config.held_out,
            "searched_for": name,
            "tries": [{"rate": rate, "accuracy": runs[rate].accuracy} for rate in config.grid],
            "chosen": rates[name],
        }
    return rates, found


class _Batch:
    """Runs jobs that have no record yet and saves each record as it comes."""

    def __init__(self, *, out: Path, total: int, on_finished: Callable[[Finished], None]) -> None:
        self.out, self.total, self.on_finished = out, total, on_finished
        self.done = 0
        self.noise_multiplier: float | None = None

    def run(self, jobs: Sequence[Job], pool: Executor | None) -> list[Record]:
        found, missing = [], []
        for job in jobs:
            path = _file(self.out, job)
            if path.exists():
                self.done += 1
                found.append(records.read(path))
            else:
                missing.append(job)
        for record in self._execute(missing, pool):
            record.save(_folder(self.out, record.role))
            self.done += 1
            found.append(record)
            self.on_finished(Finished(record=record, done=self.done, total=self.total))
        return found

    def _execute(self, jobs: Sequence[Job], pool: Executor | None) -> Iterator[Record]:
        if self.noise_multiplier is None and any(METHODS[job.method].rule for job in jobs):
            self.noise_multiplier = calibrate(jobs[0].config)
        ready = [_with_noise(job, self.noise_multiplier or 0.0) for job in jobs]
        if pool is None:
            yield from map(run, ready)
            return
        futures: list[Future[Record]] = [pool.submit(run, job) for job in ready]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()


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
    rate = method.learning_rate(config, config.rates)
    job = Job(config=config, method=method.name, seed=seed, learning_rate=rate, noise_multiplier=0.0, command=command)
    path = _file(out, job)
    if path.exists():
        return records.read(path)
    record = run(_with_noise(job, calibrate(config) if method.rule else 0.0), on_progress)
    record.save(out)
    return record


def _or_inf(loss: float | None) -> float:
    return math.inf if loss is None else loss


def _with_noise(job: Job, noise_multiplier: float) -> Job:
    return Job(**{**vars(job), "noise_multiplier": noise_multiplier})


def _folder(out: Path, role: str) -> Path:
    return out / "search" if role == "search" else out


def _file(out: Path, job: Job) -> Path:
    asked = (job.config.to_dict(), job.role, job.method, job.seed, job.learning_rate)
    key = records.key(*asked, installed_versions()["dpscale"])
    return records.file(_folder(out, job.role), job.method, job.seed, key)


def _start_worker() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is the parent's to handle, and to report once


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Executor | None]:
    """Processes with one thread each; None, to stay in this one (also with one thread), for one worker."""
    require(workers >= 1, "compare", "workers", "an integer >= 1", workers)
    if workers == 1:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            yield None
        finally:
            torch.set_num_threads(threads)
        return
    # Spawned, not forked: a fork of a process with threads may hang.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, initializer=_start_worker) as pool:
        yield pool
