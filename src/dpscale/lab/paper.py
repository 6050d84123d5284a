"""The paper's own figures, and its experiments made anew from records."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

from dpscale.checks import require
from dpscale.lab import compare, presets, records, stats
from dpscale.lab.compare import Event
from dpscale.lab.datasets import DataError, stored
from dpscale.lab.presets import Config, Method
from dpscale.lab.records import Record
from dpscale.lab.stats import Row
from dpscale.plan import Plan
from dpscale.sampling import Accountant, FullBatch, Poisson
from dpscale.scaling import Clip

_METHODS = ("dp-sgd", "auto-s", "dp-psac", "dp-psasc", "dp-psasc-star")
_TABLE = {
    "mnist": (60_000, 97.35, 97.95, 98.11, 98.37, 98.65),
    "fashion-mnist": (40_000, 85.59, 86.15, 86.36, 86.91, 87.22),
    "cifar10-simclr": (50_000, 92.24, 92.65, 92.85, 93.12, 93.36),
    "celeba-male": (162_079, 94.79, 95.12, 95.20, 95.36, 95.61),
    "imagenette": (9_464, 63.61, 63.87, 64.21, 65.26, 66.79),
}
ACCURACY = {name: dict(zip(_METHODS, row[1:], strict=True)) for name, row in _TABLE.items()}
"""Test accuracy in percent, as the paper gives it; it names no interval for any of them."""

SIZES = {name: int(row[0]) for name, row in _TABLE.items()}
"""Training samples, as the paper gives them. What is trained on here can differ by a little: see the records."""

PRESETS = tuple(_TABLE)
"""The paper's five experiments, in its order."""


NOT_FINISHED = "No final run is finished yet."

Asked = tuple[Config, Sequence[Method], Sequence[int], Path]
"""An experiment to run: its configuration, methods and seeds, and the folder of its records."""


def usual_seeds(preset: str) -> range:
    """Five, and three where a run takes minutes."""
    return range(3 if preset in ("celeba-male", "imagenette") else 5)


def settings(configs: Sequence[Config]) -> list[dict[str, Any]]:
    """Settings of the paper's experiments with σ as calibrated, by privacy-loss distributions and by Rényi DP.

    Nothing is trained, and no data are read: so many samples as the paper has, or ``train_size``.
    """
    found = []
    for config in configs:
        must = f"experiments of the paper, which are {', '.join(SIZES)}"
        require(config.preset in SIZES, "table1", "presets", must, config.preset, "Leave it out.")
        samples, whole = config.train_size or SIZES[config.preset], config.sampling == "full-batch"
        sampling = FullBatch(size=samples) if whole else Poisson(size=samples, batch=config.batch)
        plan = Plan(scaling=Clip(C=1.0), sampling=sampling, epochs=config.epochs)
        pld, rdp = (
            replace(plan, accountant=by).calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
            for by in get_args(Accountant)
        )
        same = ("preset", "epochs", "C", "r", "s", "epsilon", "delta", "encoder")
        found.append({
            **{name: getattr(config, name) for name in same}, "samples": samples,
            "batch": samples if whole else config.batch, "noise_multiplier": pld, "noise_multiplier_rdp": rdp,
        })  # fmt: skip
    return found


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One experiment as it came out here."""

    preset: str
    records: list[Record]
    rows: list[Row]
    left: int  # runs that were asked for and are not done; of loaded records, those that others have and a method lacks
    left_out: int = 0  # records of other settings that lie beside these
    repeat_noise: tuple[float, int] | None = None  # as `stats.repeat_noise` has it

    @property
    def encoder(self) -> str | None:
        """Whose features were trained on; None for pixels."""
        return next((row.encoder for row in self.rows), None)

    @property
    def paper(self) -> Mapping[str, float]:
        """The paper's accuracies of the same row."""
        return ACCURACY.get(self.preset, {})

    @property
    def reference(self) -> str | None:
        """The method that the others are compared with."""
        return next((row.reference for row in self.rows if row.reference), None)

    def row(self, method: str) -> Row | None:
        """That of a method, if it has one."""
        return next((row for row in self.rows if row.method == method), None)

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        return stats.headline(self.rows) if self.rows else NOT_FINISHED

    @property
    def details(self) -> str:
        """What to mind: all of the verdict but its first sentence."""
        told = stats.details(self.rows)
        if self.repeat_noise:
            noise, times = self.repeat_noise
            told.append(
                f"One and the same run, made {times} times, differs by {100 * noise:.2f} points (repeat noise)."
            )
        if not all(record.search for record in self.records):
            told.append("Rates were given, not searched.")
        return " ".join(told)

    @property
    def verdict(self) -> str:
        """What can be said of it: which methods differ, how close the others are, what to mind."""
        return f"{self.headline} {self.details}".strip()

    def cells(self, row: Row) -> dict[str, str]:
        """What a row of its table shows, by column."""
        theirs = self.paper.get(row.method)
        cells = {
            "test accuracy": row.shown, "paper": "—" if theirs is None else f"{theirs:.2f}%",
            f"against {self.reference}": row.shown_difference, "p": "—" if row.p_holm is None else f"{row.p_holm:.2g}",
            "ε spent": "—" if row.epsilon is None else f"{row.epsilon:.2f}",
            "σ": "—" if row.noise_multiplier is None else f"{row.noise_multiplier:.3f}",
            "rate, momentum": row.label, "seconds per run": f"{row.seconds:.1f}",
        }  # fmt: skip
        left_out = {*(() if self.paper else ("paper",)), *(() if self.reference else ("against None", "p"))}
        return {head: cell for head, cell in cells.items() if head not in left_out}

    @property
    def title(self) -> str:
        """Its name, with the encoder if it has one."""
        return self.preset + (f", features of {self.encoder}" if self.encoder else "")

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "preset": self.preset, "paper": dict(self.paper), "encoder": self.encoder,
            "verdict": self.verdict if self.rows else "", "rows": [asdict(row) for row in self.rows],
            "left": self.left, "repeat_noise": self.repeat_noise and self.repeat_noise[0],
        }  # fmt: skip


def experiments(
    asked: Sequence[Asked], *, deadline: float | None = None,
    on_event: Callable[[str, Event], None] = lambda _, __: None, **how: Any,
) -> list[Experiment]:  # fmt: skip
    """Run what has no record yet of each experiment, in turn, and return what there is, with what its folder has of the
    same settings. The same call goes on where a ``deadline``, by `time.monotonic`, ended it; ``how`` is as `compare`
    takes it."""
    for each in asked:
        _require_data(*each)
    done = []
    for config, methods, seeds, out in asked:
        told = partial(on_event, config.preset)
        found = compare.compare(config, methods, seeds, out, deadline=deadline, on_event=told, **how)
        nothing = Experiment(preset=config.preset, records=[], rows=[], left=found.left)
        done.append(replace(_loaded(out, found.records), left=found.left) if found.records else nothing)
    return corrected(done)


def left(asked: Sequence[Asked], repeats: int, at_once: int | None) -> list[dict[str, Any]]:
    """How many runs each experiment has left, and about how many minutes they take."""
    rows = []
    for config, methods, seeds, out in asked:
        found = compare.compare(config, methods, seeds, out, repeats=repeats, at_once=1, deadline=-math.inf)
        about = stats.two_digits(compare.minutes(config, methods, found, at_once))
        rows.append({"preset": config.preset, "runs": found.left, "minutes": about})
    return rows


def _require_data(config: Config, *asked: Any) -> None:
    """Refuse an experiment that has runs left and no data, before another one is trained for hours."""
    try:
        stored.require_there(config.data)
    except DataError:
        # Records that are complete do without their data. A deadline that is over begins no run.
        if compare.compare(config, *asked, at_once=1, deadline=-math.inf).left:
            raise


def corrected(found: Sequence[Experiment]) -> list[Experiment]:
    """With p-values corrected over all comparisons of the page."""
    tables = stats.corrected([one.rows for one in found])
    return [replace(one, rows=rows) for one, rows in zip(found, tables, strict=True)]


def load(out: Path, like: Sequence[Record] = ()) -> list[Experiment]:
    """The experiments whose records lie in ``out``, as `sources` finds them; of several settings the newest."""
    return corrected([_loaded(source, like) for source in sources(out)])


def with_others(found: Sequence[Experiment], out: Path) -> list[Experiment]:
    """These, and what else ``out`` has, in the paper's order and corrected together."""
    names = [one.preset for one in found]
    others = [_loaded(source) for source in sources(out) if source != out and source.stem not in names]
    return corrected(sorted([*found, *others], key=lambda one: _place(one.preset)))


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
    found = records.load(source)
    final = [record for record in found if record.role == "final"]
    if not final:
        return Experiment(preset=found[0].config["preset"], records=[], rows=[], left=0)
    chosen, left_out = stats.select(final, like)
    done = Counter(record.method for record in chosen)
    return Experiment(
        preset=chosen[0].config["preset"], records=chosen, rows=stats.summarize(chosen), left_out=left_out,
        left=sum(max(done.values()) - count for count in done.values()),
        repeat_noise=stats.repeat_noise(final, chosen),
    )  # fmt: skip
