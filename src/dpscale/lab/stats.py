"""From records to a table: mean accuracy and its 95% interval, and which methods differ from the reference.

Differences are taken seed by seed and tested by Student's t; p-values are corrected by Holm's method over all
comparisons of a page. What does not differ is said as an interval: how far apart two methods can be at most.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from scipy import stats

from dpscale.lab.config import METHODS
from dpscale.lab.records import Record

REFERENCE = "dp-psasc"
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method over its seeds. ``half_width`` is None for a single seed, which has no interval.

    ``difference`` is to ``reference``, seed by seed: runs of one seed share initialisation, batches and noise, so
    what the seeds themselves add to the spread drops out.

    Args:
        spread: standard deviation over seeds: how far one run of this configuration is from another.
        p, p_holm: of the difference, alone and corrected over the comparisons of a page.
        end: "largest" or "smallest", if its own search chose that of the rates it tried.
        searched: what its own search tried, and how, in words; None if it had none.
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
    reference: str | None = None
    difference: float | None = None
    difference_half_width: float | None = None
    spread: float | None = None
    p: float | None = None
    p_holm: float | None = None
    end: str | None = None
    searched: str | None = None

    @property
    def shown(self) -> str:
        """The accuracy as tables show it."""
        half = "" if self.half_width is None else f" ± {100 * self.half_width:.{self.places}f}"
        return f"{100 * self.accuracy:.{self.places}f}%{half}"

    @property
    def shown_difference(self) -> str:
        """The difference as tables show it."""
        if self.difference is None:
            return "—"
        half = self.difference_half_width
        return signed(self.difference, self.places) + ("" if half is None else f" ± {100 * half:.{self.places}f}")

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the difference's 95% interval."""
        mean, half = self.difference or 0.0, self.difference_half_width or 0.0
        return mean - half, mean + half

    @property
    def reach(self) -> float:
        """How far from the reference it can be: the farther end of the difference's interval."""
        return max(map(abs, self.interval))

    @property
    def differs(self) -> bool:
        """Whether its difference is left after the correction."""
        return self.p_holm is not None and self.p_holm < LEVEL

    @property
    def places(self) -> int:
        """Of percentages: one image of a few hundred moves accuracy by tenths of a point; one of 10,000 by 0.01."""
        return 2 if self.test_size >= 5_000 else 1

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return asdict(self)


def interval(values: Sequence[float], confidence: float = 1 - LEVEL) -> tuple[float, float | None]:
    """Mean, and half the width of Student's interval: t·s/√n with n - 1 degrees of freedom; None for n = 1.

    Example:
        >>> mean, half = interval([0.90, 0.92, 0.94])
        >>> round(mean, 3), round(half, 4)
        (0.92, 0.0497)
    """
    n, mean = len(values), statistics.fmean(values)
    if n == 1:
        return mean, None
    return mean, float(stats.t.ppf((1 + confidence) / 2, n - 1)) * statistics.stdev(values) / math.sqrt(n)


def p_value(differences: Sequence[float]) -> float | None:
    """Of a mean of 0, by Student's t. Differences that are all equal tell nothing of their spread: 1."""
    if len(differences) < 2:
        return None
    return 1.0 if len(set(differences)) == 1 else float(stats.ttest_1samp(differences, 0.0).pvalue)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the k-th smallest times how many are left, never falling.

    Example:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def corrected(tables: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The tables of a page, with p-values corrected over all comparisons in them."""
    tested = [row.p for rows in tables for row in rows if row.p is not None]
    adjusted = iter(holm(tested))
    return [[row if row.p is None else replace(row, p_holm=next(adjusted)) for row in rows] for rows in tables]


def select(records: Sequence[Record], like: Sequence[Record] = ()) -> tuple[list[Record], int]:
    """The final runs of one experiment, and how many final runs of other settings were left out.

    A folder may hold runs with several settings, on other data, or at several rates; those of ``like``, or else of the
    newest record, are taken, and of each method those at the rate and momentum that it has there, or else of its
    newest, so that no table mixes two. Of one seed there is one run.
    """
    final = [record for record in records if record.role == "final" and not record.repeat]
    if not final:
        raise ValueError("These records are of a search for learning rates only. Run the comparison to its end.")
    wanted = (like[0] if like else max(final, key=lambda record: record.created)).settings
    newest = {record.method: record.choice for record in like}
    runs: dict[tuple[str, int], Record] = {}
    for record in sorted(final, key=lambda record: record.created, reverse=True):
        if record.settings == wanted and newest.setdefault(record.method, record.choice) == record.choice:
            runs.setdefault((record.method, record.seed), record)
    order = list(METHODS)
    place = {name: order.index(name) if name in order else len(order) for name, _ in runs}
    chosen = sorted(runs.values(), key=lambda record: (place[record.method], record.method, record.seed))
    return chosen, len(final) - len(chosen)


def by_method(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of each method, in the order in which methods first appear."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.method].append(record)
    return dict(groups)


def summarize(records: Sequence[Record]) -> list[Row]:
    """A row per method, differences corrected over these rows."""
    groups = by_method(records)
    private = [name for name, group in groups.items() if group[0].epsilon is not None]
    reference = REFERENCE if REFERENCE in groups else next(iter(private), None)
    rows = [_row(group, groups[reference] if reference else []) for group in groups.values()]
    return corrected([rows])[0]


def _row(group: Sequence[Record], reference: Sequence[Record]) -> Row:
    first, theirs = group[0], {record.seed: record.accuracy for record in reference}
    accuracies = [record.accuracy for record in group]
    mean, half_width = interval(accuracies)
    compared = bool(reference) and first.method != reference[0].method
    pairs = [record.accuracy - theirs[record.seed] for record in group if record.seed in theirs] if compared else []
    difference, margin = interval(pairs) if pairs else (None, None)
    return Row(
        method=first.method, title=first.title, about=first.about, seeds=[record.seed for record in group],
        accuracy=mean, half_width=half_width, epsilon=first.epsilon, delta=first.delta,
        noise_multiplier=first.noise_multiplier, choice=first.choice, learning_rate=first.learning_rate,
        seconds=statistics.fmean(record.seconds for record in group), statement=_statement(group),
        encoder=first.data.get("features", {}).get("encoder"), test_size=first.data["test"],
        reference=reference[0].title if pairs else None, difference=difference,
        # Seeds may agree by chance, to the image.
        difference_half_width=None if margin is None else max(margin, 1 / first.data["test"]),
        spread=statistics.stdev(accuracies) if len(group) > 1 else None,
        p=p_value(pairs) if first.epsilon is not None else None, end=_end(first), searched=_searched(first),
    )  # fmt: skip


def _statement(group: Sequence[Record]) -> str:
    """That of a run, with the seeds of all: they differ in nothing else."""
    seeds, own = ", ".join(str(record.seed) for record in group), f"come from the seed {group[0].seed},"
    return group[0].statement.replace(own, f"come from a seed, {seeds} in turn," if len(group) > 1 else own)


def _own_search(record: Record) -> Mapping[str, Any] | None:
    return record.search if record.search and record.search["searched_for"] == record.method else None


def _end(record: Record) -> str | None:
    if (search := _own_search(record)) is None:
        return None
    tried = sorted({each["choice"]["rate"] for each in search["tries"]})
    ends = {tried[0]: "smallest", tried[-1]: "largest"} if len(tried) > 1 else {}
    return ends.get(record.rate)


def _searched(record: Record) -> str | None:
    if (search := _own_search(record)) is None:
        return None
    tries, epochs = search["tries"], search.get("epochs") or record.config["epochs"]
    rates, momenta = (sorted({each["choice"].get(name) or 1.0 for each in tries}) for name in ("rate", "gamma1"))
    return (
        f"{plural(len(tries), 'try', 'tries')} of {plural(epochs, 'epoch')}, the best with "
        f"{plural(search.get('seeds', 1), 'seed')}, measured on {search.get('held_out', 0):.3g} of the training data, "
        f"at rates {_numbers(rates)}, γ1 {_numbers(momenta)}"
    )


def alike(rows: Sequence[Row]) -> bool:
    """Whether all had the same search, or none. A control has none of its own: it follows a method."""
    return len({row.searched for row in rows if not _follows(row)}) <= 1


def _follows(row: Row) -> bool:
    return row.method in METHODS and METHODS[row.method].follows is not None


def seed_noise(rows: Sequence[Row]) -> float | None:
    """How far one run is from another of the same configuration: the standard deviation over seeds, of all private
    methods together."""
    spreads = [row.spread for row in rows if row.spread is not None and row.epsilon is not None]
    return math.sqrt(statistics.fmean(spread**2 for spread in spreads)) if spreads else None


def repeat_noise(records: Sequence[Record], like: Sequence[Record]) -> tuple[float, int] | None:
    """Standard deviation of one and the same run, made several times, and how often; None if none was repeated."""
    asked = {(r.settings, r.method, r.seed, str(r.choice)) for r in like}
    groups = defaultdict(list)
    for r in (r for r in records if r.role == "final" and (r.settings, r.method, r.seed, str(r.choice)) in asked):
        groups[r.method, r.seed].append(r.accuracy)
    most = max(groups.values(), key=len, default=[])
    return (statistics.stdev(most), len(most)) if len(most) > 1 else None


def verdict(rows: Sequence[Row]) -> str:
    """Plain sentences: which private methods differ from the reference, how close the others are, what the noise of
    one run is, and whether a search stopped at the end of its grid."""
    return " ".join(filter(None, (_unequal(rows), headline(rows), _ceiling(rows), _noise(rows), _ends(rows))))


def headline(rows: Sequence[Row]) -> str:
    """The answer in one sentence."""
    private = [row for row in rows if row.epsilon is not None]
    if len(private) < 2:
        return "There are not two private methods here to tell apart."
    tested = [row for row in private if row.p_holm is not None]
    if not tested:
        return "With a single seed there is no interval, so nothing can be said about which method is better."
    apart, near = [row for row in tested if row.differs], [row for row in tested if not row.differs]
    reference = tested[0].reference
    told = [
        f"{row.title} is {abs(100 * (row.difference or 0.0)):.{row.places}f} points "
        f"{'above' if (row.difference or 0.0) > 0 else 'below'} {reference}"
        for row in apart
    ]
    if near:
        most = max(near, key=lambda row: row.reach)
        who = f"the other {len(near)}" if apart else f"the {len(near)} other private methods"
        who = (near[0].title if len(near) == 1 else who) + (" lies" if len(near) == 1 else " lie")
        told.append(f"{who} within {100 * most.reach:.{most.places}f} points of {'it' if apart else reference}")
    text = "; ".join(told)
    return f"{text[0].upper()}{text[1:]}."


def _ceiling(rows: Sequence[Row]) -> str:
    plain = next((row for row in rows if row.epsilon is None), None)
    private = [row for row in rows if row.epsilon is not None]
    if plain is None or not private:
        return ""
    best = max(private, key=lambda row: row.accuracy)
    shown = [f"{100 * row.accuracy:.{row.places}f}%" for row in (plain, best)]
    return f"Without privacy accuracy is {shown[0]}, with it at most {shown[1]}."


def _noise(rows: Sequence[Row]) -> str:
    noise = seed_noise(rows)
    if noise is None:
        return ""
    places = max(row.places for row in rows)
    return f"One run differs from another of the same configuration by {100 * noise:.{places}f} points (over seeds)."


def _unequal(rows: Sequence[Row]) -> str:
    if alike(rows):
        return ""
    told = "; ".join(f"{row.title} had {row.searched or 'no search'}" for row in rows if not _follows(row))
    return f"NOT SEARCHED ALIKE, so that methods do not compare: {told}."


def _ends(rows: Sequence[Row]) -> str:
    told = []
    for end, other in (("largest", "larger"), ("smallest", "smaller")):
        there = [row.title for row in rows if row.end == end]
        if there:
            verb = {1: "chose", 2: "both chose"}.get(len(there), "all chose")
            told.append(f"{_list(there)} {verb} the {end} rate that was tried: a {other} one might be better.")
    return " ".join(told)


def signed(difference: float, places: int = 1) -> str:
    """A difference in points as tables show it."""
    return f"{round(100 * difference, places) + 0.0:+.{places}f}".replace("-", "−")  # never -0.0


def plural(count: int, what: str, many: str | None = None) -> str:
    """A number of things in words."""
    return f"{count} {what if count == 1 else many or what + 's'}"


def _numbers(values: Sequence[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _list(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
