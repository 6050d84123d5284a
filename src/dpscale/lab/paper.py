"""The paper's own figures, and its experiments made anew from records."""

import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from dpscale.checks import require
from dpscale.lab import compare, presets, records, summary
from dpscale.lab.datasets import DataError, stored
from dpscale.lab.presets import METHODS, Config, Method
from dpscale.lab.queue import Begun, Finished
from dpscale.lab.records import Record
from dpscale.lab.summary import Row
from dpscale.plan import Plan
from dpscale.sampling import Accountant, FullBatch, Poisson
from dpscale.scaling import Clip

ACCURACY: dict[str, dict[str, float]] = {
    "mnist": {"dp-sgd": 97.35, "auto-s": 97.95, "dp-psac": 98.11, "dp-psasc": 98.37, "dp-psasc-star": 98.65},
    "fashion-mnist": {"dp-sgd": 85.59, "auto-s": 86.15, "dp-psac": 86.36, "dp-psasc": 86.91, "dp-psasc-star": 87.22},
    "cifar10-simclr": {"dp-sgd": 92.24, "auto-s": 92.65, "dp-psac": 92.85, "dp-psasc": 93.12, "dp-psasc-star": 93.36},
    "celeba-male": {"dp-sgd": 94.79, "auto-s": 95.12, "dp-psac": 95.20, "dp-psasc": 95.36, "dp-psasc-star": 95.61},
    "imagenette": {"dp-sgd": 63.61, "auto-s": 63.87, "dp-psac": 64.21, "dp-psasc": 65.26, "dp-psasc-star": 66.79},
}
"""Test accuracy in percent, as the paper gives it; it names no interval for any of them."""

SIZES = {
    "mnist": 60_000,
    "fashion-mnist": 40_000,
    "cifar10-simclr": 50_000,
    "celeba-male": 162_079,
    "imagenette": 9_464,
}
"""Training samples, as the paper gives them. What is trained on here can differ by a little: see the records."""

PRESETS = tuple(ACCURACY)
"""The paper's five experiments, in its order."""

SEEDS = {"celeba-male": 3, "imagenette": 3}
"""Seeds per method where it is not five: these two take minutes a run."""


def _usual_seeds(preset: str) -> int:
    return SEEDS.get(preset, 5)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A line of the paper's table of settings, or of what is run in their place, and the noise that they come to."""

    preset: str
    samples: int
    batch: int
    epochs: int
    C: float
    r: float
    s: float
    epsilon: float
    delta: float
    noise_multiplier: float
    noise_multiplier_rdp: float
    encoder: str | None


def settings(configs: Sequence[Config]) -> list[Setting]:
    """Settings of the paper's experiments with σ as calibrated, by privacy-loss distributions and by Rényi DP.

    Nothing is trained, and no data are read: so many samples as the paper has, or ``train_size``.
    """
    for name in (config.preset for config in configs):
        must = f"experiments of the paper, which are {', '.join(SIZES)}"
        require(name in SIZES, "table1", "presets", must, name, "Leave it out.")
    return [_setting(config, config.train_size or SIZES[config.preset]) for config in configs]


def _setting(config: Config, samples: int) -> Setting:
    whole = config.sampling == "full-batch"
    sampling = FullBatch(size=samples) if whole else Poisson(size=samples, batch=config.batch)
    plan = Plan(scaling=Clip(C=1.0), sampling=sampling, epochs=config.epochs)
    tight, by_rdp = (
        replace(plan, accountant=by).calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
        for by in get_args(Accountant)
    )
    assert tight is not None and by_rdp is not None
    return Setting(
        preset=config.preset, encoder=config.encoder, samples=samples, batch=samples if whole else config.batch,
        epochs=config.epochs, C=config.C, r=config.r, s=config.s, epsilon=config.epsilon, delta=config.delta,
        noise_multiplier=tight, noise_multiplier_rdp=by_rdp,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One of the paper's rows as it came out here.

    Args:
        left: runs that were asked for and are not done; of loaded records, as far as they tell, final ones alone.
        left_out: records of other settings that lie beside these.
    """

    preset: str
    records: list[Record]
    rows: list[Row]
    left: int
    left_out: int = 0

    @property
    def encoder(self) -> str | None:
        """Whose features were trained on; None for pixels."""
        return next((row.encoder for row in self.rows), None)

    @property
    def paper(self) -> Mapping[str, float]:
        """The paper's accuracies of the same row."""
        return ACCURACY.get(self.preset, {})


def experiments(
    configs: Sequence[Config],
    methods: Sequence[Method],
    out: Path,
    *,
    seeds: int | None = None,
    workers: int | None = None,
    budget: float | None = None,
    command: str = "",
    on_begun: Callable[[str, Begun], None] = lambda _, __: None,
    on_finished: Callable[[str, Finished], None] = lambda _, __: None,
) -> list[Experiment]:
    """Run what has no record yet of each experiment, in turn, and return what there is.

    Args:
        out: each experiment has a folder of its own in it.
        seeds: per method; unless told 5, and 3 where a run takes minutes.
        budget: seconds after which no run is begun any more. The same call goes on where it left off.
    """
    deadline = None if budget is None else time.monotonic() + budget
    counted = [range(seeds or _usual_seeds(config.preset)) for config in configs]
    for config, each in zip(configs, counted, strict=True):
        _require_data(config, methods, each, out / config.preset)
    done = []
    for config, each in zip(configs, counted, strict=True):
        found = compare.compare(
            config, methods, each, out / config.preset, workers=workers,
            deadline=deadline, command=command,
            on_begun=partial(on_begun, config.preset), on_finished=partial(on_finished, config.preset),
        )  # fmt: skip
        rows = summary.summarize(found.records)
        done.append(Experiment(preset=config.preset, records=found.records, rows=rows, left=found.left))
    return done


def _require_data(config: Config, methods: Sequence[Method], seeds: Sequence[int], out: Path) -> None:
    """Refuse an experiment that has runs left and no data, before another one is trained for hours."""
    try:
        stored.require_there(config.data)
    except DataError:
        # Records that are complete do without their data. A deadline that is over begins no run.
        if compare.compare(config, methods, seeds, out, workers=1, deadline=-math.inf).left:
            raise


def load(out: Path, like: Sequence[Record] = ()) -> list[Experiment]:
    """The experiments whose records lie in ``out``, as `sources` finds them; of several settings the newest."""
    return [_loaded(source, like) for source in sources(out)]


def others(out: Path, names: Sequence[str]) -> list[Experiment]:
    """What ``out`` has of experiments that are none of these."""
    return [_loaded(source) for source in sources(out) if source != out and source.stem not in names]


def ordered(found: Sequence[Experiment]) -> list[Experiment]:
    """In the paper's order, others after its own."""
    return sorted(found, key=lambda one: _place(one.preset))


def _place(name: str) -> tuple[int, str]:
    return PRESETS.index(name) if name in PRESETS else len(PRESETS), name


def sources(out: Path) -> list[Path]:
    """Where the records of each experiment lie, in the paper's order.

    Folders in ``out`` that are named like presets, and files ``*.jsonl``; or ``out`` itself.
    """
    kept = {path.stem: path for path in sorted(out.glob("*.jsonl"))}
    kept |= {name: out / name for name in presets.PRESETS if records.are_in(out / name)}
    if not kept or any(out.glob(records.NAMES)):
        return [out]
    return sorted(kept.values(), key=lambda path: _place(path.stem))


def _loaded(source: Path, like: Sequence[Record] = ()) -> Experiment:
    searching = source.is_dir() and (source / "search").is_dir() and not any(source.glob("*.json*"))
    if searching and not records.beside(source).is_file():
        return Experiment(preset=source.name, records=[], rows=[], left=0)
    found = records.load(source)
    if all(record.role == "search" for record in found):
        return Experiment(preset=found[0].config["preset"], records=[], rows=[], left=0)
    chosen, left_out = summary.select(found, like)
    rows = summary.summarize(chosen)
    left = _left(chosen, [*found, *records.searched(source)])
    name = chosen[0].config["preset"]
    return Experiment(preset=name, records=chosen, rows=rows, left=left, left_out=left_out)


def _left(chosen: Sequence[Record], found: Sequence[Record]) -> int:
    """How many final runs are missing until all methods that were asked for have all seeds that were.

    Both are known from the commands of the records, those of the search too, and from the records themselves: a method
    that was searched for was asked for, unless it was for the sake of one that follows it.
    """
    first, done = chosen[0], Counter(record.method for record in chosen)

    def settings(record: Record) -> tuple[Any, ...]:
        config = {**record.config, "diagnostics": first.config.get("diagnostics")}  # which a search never has
        return records.asked(config, "final"), record.versions["dpscale"], record.data.get("checksums")

    tried = [r for r in found if r.role == "search" and settings(r) == settings(first)]
    follow = {METHODS[name].follows for name in done if name in METHODS}
    methods, most = set(done), max(done.values())
    for record in (*chosen, *tried):
        named, seeds = _asked(record)
        methods |= named or {record.method} - follow
        most = max(most, seeds)
    return sum(most - done[name] for name in methods)


def _asked(record: Record) -> tuple[set[str], int]:
    """The methods that the command of a record asked for, and the number of seeds; none and 0 if it does not tell."""
    methods = re.search(r"--methods[ =]'?([\w-]+(?: *, *[\w-]+)*)", record.command)
    seeds = re.search(r"--seeds[ =](\d{1,4})\b", record.command)
    all_of = re.match(r"dpscale (compare|reproduce (?:table2|all)) ", record.command)
    named = set(re.split(" *, *", methods[1])) if methods else set(METHODS) if all_of else set()
    usual = 0 if not all_of else 5 if all_of[1] == "compare" else _usual_seeds(record.config["preset"])
    return named & set(METHODS), int(seeds[1]) if seeds else usual


def to_dict(found: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Plain values for JSON."""
    return [
        {
            "preset": one.preset,
            "paper": dict(one.paper),
            "encoder": one.encoder,
            "rows": [row.to_dict() for row in one.rows],
            "verdict": summary.verdict(one.rows) if one.rows else "",
            "left": one.left,
        }
        for one in found
    ]
