"""Every method at every seed, several runs at once, from where the records left off.

The choices come first: each method has the same number of tries, over the same grid of rates and outer momenta, on
training data held out for that, and keeps the try with the best accuracy there. The search is not counted in ε, as in
the paper; every record and report says so. Then each method runs at each seed. Its accuracy is that after the last
epoch, which is fixed beforehand; its curve is measured on the test data a few times on the way, and chooses nothing.
"""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpscale.checks import require
from dpscale.lab import processes, records
from dpscale.lab.gpu import fitting, points
from dpscale.lab.presets import METHODS, SEARCH_SEED, Choice, Config, Method, searched
from dpscale.lab.queue import Begun, Finished, Queue, attempt
from dpscale.lab.records import Record
from dpscale.lab.runner import Job, Progress, calibrate
from dpscale.ledger import Ledger

NOT_COUNTED = (
    "Rate and momentum were searched on held-out training data and that search is not counted in epsilon, "
    "as in the paper. It is harmless for public data such as these; on private data it would have to be paid for."
)


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
    ledger: Path | None = None,
    workers: int | None = None,
    deadline: float | None = None,
    command: str = "",
    on_begun: Callable[[Begun], None] = lambda _: None,
    on_finished: Callable[[Finished], None] = lambda _: None,
) -> Compared:
    """Run what has no record yet, and return the final record of every method and seed.

    Args:
        out: folder of the records; those of the search lie in ``out/search``. What is packed `records.beside` it
            counts as done too.
        ledger: where every run that is begun is booked, those of the search too.
        workers: processes; 1 stays in this one. None: two on the CPU, on a GPU as many as fit.
        deadline: by `time.monotonic`; no run is begun after it, and those under way are finished.
    """
    require(bool(methods) and bool(seeds), "compare", "methods", "given, with seeds", (methods, seeds))
    _require_priced(ledger, methods)
    records.whole(out)  # before hours of training, not when the table is made
    sources = [METHODS[name] for name in searched([method.name for method in methods])]
    tries = sum(len(config.tries(source)) for source in sources) if config.tune else 0
    total = tries + len(methods) * len(seeds)
    workers = fitting(config) if workers is None else workers
    queue = Queue(out=out, total=total, on_begun=on_begun, on_finished=on_finished, workers=workers, deadline=deadline)
    with processes.pool(workers) as pool:
        found: dict[str, dict[str, Any]] = {}
        if config.tune:
            chosen, found = _search(config, sources, queue, pool, command, ledger)
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
                ledger=ledger,
            )
            for seed in seeds
            for method in methods
            if (method.follows or method.name) in chosen
        ]
        jobs.sort(key=lambda job: (job.seed, -points(job)))  # the end should not be one long run alone
        done = queue.run(jobs, pool)
    order = {method.name: place for place, method in enumerate(methods)}
    done.sort(key=lambda record: (order[record.method], record.seed))
    return Compared(records=done, left=total - queue.done)


def _search(
    config: Config, sources: Sequence[Method], queue: Queue, pool: Executor, command: str, ledger: Path | None
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
            ledger=ledger,
        )
        for source in sources
        for choice in config.tries(source)
    ]
    jobs.sort(key=lambda job: -points(job))
    done = {(record.method, Choice.of(record.choice)): record for record in queue.run(jobs, pool)}
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


def train(
    config: Config,
    method: Method,
    seed: int,
    out: Path,
    *,
    ledger: Path | None = None,
    command: str = "",
    on_progress: Callable[[Progress], None] | None = None,
) -> Record:
    """One run at the preset's rates, its record saved in ``out``; repeated only if there is no record yet."""
    config = config.replace(tune=False)
    _require_priced(ledger, [method])
    job = Job(
        config=config, method=method.name, seed=seed, choice=config.given(method), noise_multiplier=0.0,
        command=command, ledger=ledger,
    )  # fmt: skip
    known = Queue(out=out, total=1, on_finished=lambda _: None, workers=1, deadline=None).known(job)
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


def _or_inf(loss: float | None) -> float:
    return math.inf if loss is None else loss
