"""Every method at every seed, several runs at once, from where the records left off.

The choices come first: each method has the same tries, over the same grid of rates and outer momenta, on training data
held out for that. The best of them are made with further seeds, each with a held-out part of its own, and the one with
the best mean is kept. Where the best rate of a method is at the end of the grid, the grid grows for all of them. The
search is not counted in ε, as in the paper; every record and report says so. Then each method runs at each seed. Its
accuracy is that after the last epoch, which is fixed beforehand; its curve is measured on the test data a few times on
the way, and chooses nothing.
"""

import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpscale.checks import require
from dpscale.lab import records, runner, workers
from dpscale.lab.config import METHODS, SEARCH_SEED, Choice, Config, Method, searched
from dpscale.lab.queue import Event, Queue, attempt, work
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate
from dpscale.ledger import Ledger

NOT_COUNTED = (
    "Rate and momentum were searched on held-out training data and that search is not counted in epsilon, "
    "as in the paper. It is harmless for public data such as these; on private data it would have to be paid for."
)

CONTENDERS = 3
"""So many tries of each method, the best by the first seed, are made with the other seeds too."""


@dataclass(frozen=True, kw_only=True)
class Compared:
    """The final records in the order of tables, how many runs a deadline left undone, and in what time they go.

    ``pace`` is in seconds per unit of ``work`` of one process, None if no run has told it yet.
    """

    records: list[Record]
    left: int
    work: float = 0.0
    pace: float | None = None


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
    require(bool(methods) and bool(seeds), "compare", "methods", "given, with seeds", (methods, seeds))
    _require_priced(ledger, methods)
    records.whole(out)  # before hours of training, not when the table is made
    asked = Job(config=config, method="", seed=0, choice=Choice(rate=1.0), command=command, ledger=ledger)
    sources = [METHODS[name] for name in searched(method.name for method in methods)]
    at_once = workers.fitting(config) if at_once is None else at_once
    queue = Queue(out, workers=at_once, deadline=deadline, on_event=on_event)
    runs = _runs(methods, seeds, repeats)
    queue.total = len(runs)
    with workers.pool(at_once) as pool:
        if config.tune:
            asked, chosen, found = _search(asked, sources, queue, pool)
        else:
            chosen, found = {source.name: config.given(source) for source in sources}, {}
        jobs = [
            replace(asked, method=method.name, seed=seed, repeat=repeat, choice=chosen[method.source.name],
                    search=found.get(method.source.name))
            for method, seed, repeat in runs if method.source.name in chosen
        ]  # fmt: skip
        jobs.sort(key=lambda job: (job.repeat, job.seed, -job.points))  # the end should not be one long run alone
        done = [record for record in queue.run(jobs, pool) if not record.repeat]
    order = {method.name: place for place, method in enumerate(methods)}
    done.sort(key=lambda record: (order[record.method], record.seed))
    later = [
        replace(asked, method=method.name, choice=config.tries(method)[0])
        for method, *_ in runs if method.source.name not in chosen
    ]  # fmt: skip
    unsure = [source for source in sources if config.tune and source.name not in chosen]
    for source in unsure:
        more = _planned(config, source) - len(config.tries(source))
        later += [replace(asked, method=source.name, role="search", choice=config.tries(source)[0])] * more
    left = sum(work(job) for job in (*queue.left, *later))
    return Compared(records=done, left=queue.total - queue.done, work=left, pace=queue.pace)


def _runs(methods: Sequence[Method], seeds: Sequence[int], repeats: int) -> list[tuple[Method, int, int]]:
    private = [method for method in methods if method.rule]
    more = [(private[0], seeds[0], 1 + repeat) for repeat in range(repeats)] if private else []
    return [*((method, seed, 0) for seed in seeds for method in methods), *more]


def minutes(config: Config, methods: Sequence[Method], found: Compared, at_once: int | None = None) -> float:
    """About how long the runs that are left take. Unless a run has told its pace, a few steps are timed."""
    if not found.left:
        return 0.0
    pace = found.pace if found.pace is not None else _timed(config, methods)
    return found.work * pace / (at_once or workers.fitting(config)) / 60


def _timed(config: Config, methods: Sequence[Method]) -> float:
    """Seconds per unit of work, from a few steps of the first method."""
    job = Job(config=config, method=methods[0].name, seed=SEARCH_SEED, choice=config.tries(methods[0])[0])
    job = replace(job, noise_multiplier=1.0)
    steps, ends = runner.steps(job), []
    for _ in itertools.islice(steps, 6):
        ends.append(time.perf_counter())
    step = statistics.median(after - before for before, after in itertools.pairwise(ends)) if len(ends) > 1 else 0.0
    return step * runner.total_steps(job) / work(job)


def _search(
    asked: Job, sources: Sequence[Method], queue: Queue, pool: Executor
) -> tuple[Job, dict[str, Choice], dict[str, dict[str, Any]]]:
    """What to run with the grid that it took, the best choice of every method whose tries are all done, and for the
    records how it was found."""
    done: dict[tuple[str, Choice], list[Record]] = {}
    planned, counted = sum(_planned(asked.config, source) for source in sources), 0
    queue.total += planned
    for round_ in range(asked.config.widen + 1):
        config = asked.config
        for seeds in sorted({1, config.search_seeds}):  # all tries once, then the best of them with the other seeds
            wanted = [(source, choice) for source in sources for choice in _contenders(config, source, done, seeds)]
            jobs = [
                replace(asked, config=config.replace(diagnostics=False), method=source.name, choice=choice,
                        role="search", seed=SEARCH_SEED + k)
                for source, choice in wanted for k in range(len(done.get((source.name, choice), [])), seeds)
            ]  # fmt: skip
            counted += len(jobs)
            queue.total, planned = queue.total + max(0, counted - planned), max(counted, planned)
            jobs.sort(key=lambda job: (-job.points, job.seed))
            for record in queue.run(jobs, pool):
                done.setdefault((record.method, Choice.of(record.choice)), []).append(record)
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


def _contenders(
    config: Config, source: Method, done: Mapping[tuple[str, Choice], list[Record]], seeds: int
) -> list[Choice]:
    """What to try with so many seeds: everything once; with more, the best by the first seed; nothing if one failed."""
    tries = config.tries(source)
    if seeds == 1:
        return tries
    if any((source.name, choice) not in done for choice in tries):
        return []
    return sorted(tries, key=lambda choice: _score(done[source.name, choice][:1]), reverse=True)[:CONTENDERS]


def _best(
    config: Config, sources: Sequence[Method], done: Mapping[tuple[str, Choice], list[Record]]
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


def train(
    config: Config, method: Method, seed: int, out: Path, *, ledger: Path | None = None, command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> Record:  # fmt: skip
    """One run at the preset's rates, its record saved in ``out``; repeated only if there is no record yet."""
    config = config.replace(tune=False)
    _require_priced(ledger, [method])
    job = Job(config=config, method=method.name, seed=seed, choice=config.given(method), command=command, ledger=ledger)
    known = Queue(out).known(job)
    if known is not None:
        return known
    record = attempt(replace(job, noise_multiplier=calibrate(config) if method.rule else 0.0), on_progress)
    record.save(out)
    return record


def _require_priced(ledger: Path | None, methods: Sequence[Method]) -> None:
    """Refuse a ledger that is not there, and methods whose price no ledger can pay."""
    if ledger is not None:
        Ledger(ledger)
        free = [method.name for method in methods if not method.rule]
        action = "Without noise their price is infinite. Name others: --methods dp-sgd,dp-psasc."
        require(not free, "--ledger", "methods", "private, all of them", ", ".join(free), action)
