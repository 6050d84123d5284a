"""From records to a table: mean accuracy and its 95% interval, and which methods differ by more than that."""

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scipy import special

from dpscale.lab.presets import METHODS
from dpscale.lab.records import Record, asked

REFERENCE = "dp-psasc"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method over its seeds. ``half_width`` is None for a single seed, which has no interval.

    ``difference`` is to `REFERENCE`, seed by seed: runs of one seed share initialisation, batches and noise, so
    what the seeds themselves add to the spread drops out.
    """

    method: str
    title: str
    about: str
    seeds: list[int]
    accuracy: float
    half_width: float | None
    epsilon: float | None
    delta: float | None
    noise_multiplier: float | None
    choice: Mapping[str, float]
    learning_rate: float
    seconds: float
    statement: str
    encoder: str | None = None
    test_size: int = 0
    difference: float | None = None
    difference_half_width: float | None = None
    end: str | None = None
    """"largest" or "smallest", if its own search chose that of the rates it tried."""
    searched: str | None = None
    """What its own search tried, and how, in words; None if it had none."""

    @property
    def shown(self) -> str:
        """The accuracy as tables show it."""
        return percent(self.accuracy, self.half_width, self._places)

    @property
    def shown_difference(self) -> str:
        """The difference to `REFERENCE` as tables show it."""
        return signed(self.difference, self.difference_half_width, self._places)

    @property
    def _places(self) -> int:
        # One image of a few hundred moves accuracy by tenths of a point; one of ten thousand by a hundredth.
        return 2 if self.test_size >= 5_000 else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float | None]:
    """Mean, and half the width of Student's interval: t·s/√n with n - 1 degrees of freedom; None for n = 1.

    Example:
        >>> mean, half = interval([0.90, 0.92, 0.94])
        >>> round(mean, 3), round(half, 4)
        (0.92, 0.0497)
    """
    n = len(values)
    mean = math.fsum(values) / n
    if n == 1:
        return mean, None
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    return mean, float(special.stdtrit(n - 1, (1 + confidence) / 2)) * math.sqrt(variance / n)


def select(records: Sequence[Record], like: Sequence[Record] = ()) -> tuple[list[Record], int]:
    """The final runs of one experiment, and how many final runs of other settings were left out.

    A folder may hold runs with several settings, on other data, or at several rates; those of ``like``, or else of the
    newest record, are taken, and of each method those at the rate and momentum that it has there, or else of its
    newest, so that no table mixes two. Of one seed there is one run.
    """
    final = [record for record in records if record.role == "final"]
    if not final:
        raise ValueError("These records are of a search for learning rates only. Run the comparison to its end.")

    def settings(record: Record) -> str:
        about = [asked(record.config, record.role), record.versions["dpscale"], record.data.get("checksums")]
        return json.dumps(about, sort_keys=True)

    wanted = settings(like[0] if like else max(final, key=lambda record: record.created))
    newest = {record.method: record.choice for record in like}
    runs: dict[tuple[str, int], Record] = {}
    for record in sorted(final, key=lambda record: record.created, reverse=True):
        alike = settings(record) == wanted and newest.setdefault(record.method, record.choice) == record.choice
        if alike and (record.method, record.seed) not in runs:
            runs[record.method, record.seed] = record
    chosen = list(runs.values())
    order = {name: place for place, name in enumerate(METHODS)}
    chosen.sort(key=lambda record: (order.get(record.method, len(order)), record.method, record.seed))
    return chosen, len(final) - len(chosen)


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each method, in the order in which methods first appear."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.method].append(record)
    return dict(groups)


def summarize(records: Sequence[Record]) -> list[Row]:
    """A row per method."""
    rows = []
    groups = by_method(records)
    reference = {record.seed: record.accuracy for record in groups.get(REFERENCE, [])}
    for method, group in groups.items():
        mean, half_width = interval([record.accuracy for record in group])
        pairs = [r.accuracy - reference[r.seed] for r in group if r.seed in reference and method != REFERENCE]
        difference, difference_half_width = interval(pairs) if pairs else (None, None)
        first = group[0]
        if difference_half_width is not None:  # seeds may agree by chance, to the image
            difference_half_width = max(difference_half_width, 1 / first.data["test"])
        rows.append(
            Row(
                method=method,
                title=first.title,
                about=first.about,
                seeds=[record.seed for record in group],
                accuracy=mean,
                half_width=half_width,
                epsilon=first.epsilon,
                delta=first.delta,
                noise_multiplier=first.noise_multiplier,
                choice=first.choice,
                learning_rate=first.learning_rate,
                seconds=math.fsum(record.seconds for record in group) / len(group),
                statement=_statement(group),
                encoder=first.data.get("features", {}).get("encoder"),
                test_size=first.data["test"],
                difference=difference,
                difference_half_width=difference_half_width,
                end=_end(first),
                searched=_searched(first),
            )
        )
    return rows


def _statement(group: Sequence[Record]) -> str:
    """That of a run, with the seeds of all: they differ in nothing else."""
    first = group[0]
    seeds = ", ".join(str(record.seed) for record in group)
    own = f"come from the seed {first.seed},"
    return first.statement.replace(own, f"come from a seed, {seeds} in turn," if len(group) > 1 else own)


def _own_search(record: Record) -> Mapping[str, Any] | None:
    return record.search if record.search and record.search["searched_for"] == record.method else None


def _end(record: Record) -> str | None:
    if (search := _own_search(record)) is None:
        return None
    tried = sorted({each["choice"]["rate"] for each in search["tries"]})
    ends = {tried[0]: "smallest", tried[-1]: "largest"} if len(tried) > 1 else {}
    return ends.get(record.choice["rate"])


def _searched(record: Record) -> str | None:
    if (search := _own_search(record)) is None:
        return None
    tries, epochs = search["tries"], search.get("epochs") or record.config["epochs"]
    rates, momenta = (sorted({each["choice"].get(name) or 1.0 for each in tries}) for name in ("rate", "gamma1"))
    return (
        f"{len(tries)} {'try' if len(tries) == 1 else 'tries'} of {plural(epochs, 'epoch')}, measured on "
        f"{search.get('held_out', 0):.3g} of the training data, at rates {_numbers(rates)}, γ1 {_numbers(momenta)}"
    )


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def alike(rows: Sequence[Row]) -> bool:
    """Whether all had the same search, or none. A control has none of its own: it follows a method."""
    return len({row.searched for row in rows if not _follows(row)}) <= 1


def _follows(row: Row) -> bool:
    return row.method in METHODS and METHODS[row.method].follows is not None


def differ(one: Row, other: Row) -> bool:
    """Whether two intervals have no point in common. Single seeds show nothing."""
    if one.half_width is None or other.half_width is None:
        return False
    return abs(one.accuracy - other.accuracy) > one.half_width + other.half_width


def verdict(rows: Sequence[Row]) -> str:
    """Plain sentences: which private methods differ by more than their intervals, which do not, and whether a search
    stopped at the end of its grid."""
    return " ".join(filter(None, (_unequal(rows), _differences(rows), _ends(rows))))


def _unequal(rows: Sequence[Row]) -> str:
    if alike(rows):
        return ""
    told = "; ".join(f"{row.title} had {row.searched or 'no search'}" for row in rows if not _follows(row))
    return f"NOT SEARCHED ALIKE, so that methods do not compare: {told}."


def _differences(rows: Sequence[Row]) -> str:
    private = [row for row in rows if row.epsilon is not None]
    if len(private) < 2:
        return "There are not two private methods here to tell apart."
    single = [row.title for row in private if row.half_width is None]
    private = [row for row in private if row.half_width is not None]
    if len(private) < 2:
        return "With a single seed there is no interval, so nothing can be said about which method is better."
    told = _told_apart(private)
    if not single:
        return told
    return f"{told} With a single seed {_list(single)} {'has' if len(single) == 1 else 'have'} no interval yet."


def _told_apart(private: Sequence[Row]) -> str:
    above: dict[str, list[str]] = defaultdict(list)
    for row in private:
        worse = [other.title for other in private if differ(row, other) and row.accuracy > other.accuracy]
        if worse:
            above[_list(worse)].append(row.title)
    if above:
        found = [f"{_list(better)} {'is' if len(better) == 1 else 'are'} above {w}" for w, better in above.items()]
        told = f"Beyond their 95% intervals, {'; '.join(found)}. Every other pair of private methods overlaps."
    else:
        told = f"No two of the {len(private)} private methods differ beyond their 95% intervals."
    pairs = [row for row in private if row.difference is not None and row.difference_half_width is not None]
    apart = [row for row in pairs if abs(row.difference or 0.0) > (row.difference_half_width or 0.0)]
    if not pairs:
        return told
    if not apart:
        return (
            f"{told} Seed by seed, none differs from {REFERENCE.upper()} beyond the interval of the difference either."
        )
    shown = _list([f"{row.title} ({row.shown_difference} points)" for row in apart])
    return (
        f"{told} Seed by seed, of {len(pairs)} private methods set against {REFERENCE.upper()}, those beyond the 95% "
        f"interval of the difference: {shown}. One in twenty such intervals misses by chance."
    )


def _ends(rows: Sequence[Row]) -> str:
    told = []
    for end, other in (("largest", "larger"), ("smallest", "smaller")):
        there = [row.title for row in rows if row.end == end]
        if there:
            verb = {1: "chose", 2: "both chose"}.get(len(there), "all chose")
            told.append(f"{_list(there)} {verb} the {end} rate that was tried: a {other} one might be better.")
    return " ".join(told)


def signed(difference: float | None, half_width: float | None, places: int = 1) -> str:
    """A difference in points as tables show it."""
    if difference is None:
        return "—"
    points = round(100 * difference, places) + 0.0  # never -0.0
    interval = "" if half_width is None else f" ± {100 * half_width:.{places}f}"
    return f"{points:+.{places}f}".replace("-", "−") + interval


def percent(accuracy: float, half_width: float | None, places: int = 1) -> str:
    """An accuracy as tables show it."""
    interval = "" if half_width is None else f" ± {100 * half_width:.{places}f}"
    return f"{100 * accuracy:.{places}f}%{interval}"


def plural(count: int, what: str) -> str:
    """A number of things in words."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
