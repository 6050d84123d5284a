"""From records to a table: mean accuracy and its 95% interval, and which methods differ from the reference.

Differences are taken seed by seed and tested by Student's t; p-values are corrected by Holm's method over all
comparisons of a page. What does not differ is said as an interval: how far apart two methods can be at most.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import stats

from dpscale.lab.presets import METHODS, Choice
from dpscale.lab.records import Record

REFERENCE = "dp-psasc"
LEVEL = 0.05


@dataclass(frozen=True, kw_only=True)
class Row:
    """One method over its seeds.

    ``difference`` is to ``reference``, seed by seed: runs of one seed share initialisation, batches and noise, so
    what the seeds themselves add to the spread drops out.
    """

    method: str
    title: str
    about: str
    seeds: list[int]
    accuracy: float
    half_width: float | None  # None for a single seed, which has no interval
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
    spread: float | None = None  # standard deviation over seeds: how far one run of it is from another
    p: float | None = None  # of the difference
    p_holm: float | None = None  # the same, corrected over the comparisons of a page
    end: str | None = None  # "largest" or "smallest", if its own search chose that of the rates it tried
    searched: str | None = None  # what its own search tried, and how, in words; None if it had none

    @property
    def shown(self) -> str:
        """The accuracy as tables show it."""
        return f"{100 * self.accuracy:.{self.places}f}%" + self._margin(self.half_width)

    @property
    def shown_difference(self) -> str:
        """The difference as tables show it."""
        if self.difference is None:
            return "—"
        points = f"{round(100 * self.difference, self.places) + 0.0:+.{self.places}f}"  # never -0.0
        return points.replace("-", "−") + self._margin(self.difference_half_width)

    @property
    def label(self) -> str:
        """Rate and momentum in a few words."""
        return Choice.model_validate(self.choice).label()

    def _margin(self, half: float | None) -> str:
        return "" if half is None else f" ± {100 * half:.{self.places}f}"

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


def _p_value(differences: Sequence[float]) -> float | None:
    """Of a mean of 0, by Student's t. Differences that are all equal tell nothing of their spread: 1."""
    if len(differences) < 2:
        return None
    return 1.0 if len(set(differences)) == 1 else float(stats.ttest_1samp(differences, 0.0).pvalue)


def corrected(tables: Sequence[Sequence[Row]]) -> list[list[Row]]:
    """The tables of a page, with p-values corrected over all comparisons in them, by Holm's method: the k-th smallest
    times how many are left, never falling."""
    p = np.array([row.p for rows in tables for row in rows if row.p is not None])
    order = p.argsort()
    adjusted = np.maximum.accumulate(np.minimum(1.0, p[order] * np.arange(len(p), 0, -1)))
    each = iter(adjusted[order.argsort()].tolist())
    return [[row if row.p is None else replace(row, p_holm=next(each)) for row in rows] for rows in tables]


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
    chosen = sorted(runs.values(), key=lambda record: (order.index(record.method), record.seed))
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
    # The statement is that of a run, with the seeds of all: they differ in nothing else.
    seeds, own = [record.seed for record in group], f"come from the seed {first.seed},"
    told = own if len(group) == 1 else f"come from a seed, {', '.join(map(str, seeds))} in turn,"
    end, searched = _search(first)
    return Row(
        method=first.method, title=first.title, about=first.about, seeds=seeds, accuracy=mean, half_width=half_width,
        epsilon=first.epsilon, delta=first.delta, noise_multiplier=first.noise_multiplier, choice=first.choice,
        learning_rate=first.learning_rate, seconds=statistics.fmean(record.seconds for record in group),
        statement=first.statement.replace(own, told), encoder=first.data.get("features", {}).get("encoder"),
        test_size=first.data["test"], reference=reference[0].title if pairs else None, difference=difference,
        # Seeds may agree by chance, to the image.
        difference_half_width=None if margin is None else max(margin, 1 / first.data["test"]),
        spread=statistics.stdev(accuracies) if len(group) > 1 else None,
        p=_p_value(pairs) if first.epsilon is not None else None, end=end, searched=searched,
    )  # fmt: skip


def _search(record: Record) -> tuple[str | None, str | None]:
    """At which end of its own search the choice is, if at one, and what was searched in words."""
    search = record.search
    if not search or search["searched_for"] != record.method:
        return None, None
    tries, epochs = search["tries"], search.get("epochs") or record.config["epochs"]
    rates, momenta = (sorted({each["choice"].get(name) or 1.0 for each in tries}) for name in ("rate", "gamma1"))
    ends = {rates[0]: "smallest", rates[-1]: "largest"} if len(rates) > 1 else {}
    told_rates, told_momenta = (", ".join(f"{value:g}" for value in values) for values in (rates, momenta))
    return ends.get(record.choice["rate"]), (
        f"{plural(len(tries), 'try', 'tries')} of {plural(epochs, 'epoch')}, the best with "
        f"{plural(search.get('seeds', 1), 'seed')}, measured on {search.get('held_out', 0):.3g} of the training data, "
        f"at rates {told_rates}, γ1 {told_momenta}"
    )


def _searching(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if METHODS[row.method].follows is None]  # a control follows a method


def alike(rows: Sequence[Row]) -> bool:
    """Whether all had the same search, or none."""
    return len({row.searched for row in _searching(rows)}) <= 1


def repeat_noise(records: Sequence[Record], like: Sequence[Record]) -> tuple[float, int] | None:
    """Standard deviation of one and the same run, made several times, and how often; None if none was repeated."""
    asked = {(r.settings, r.method, r.seed, str(r.choice)) for r in like}
    groups = defaultdict(list)
    for r in (r for r in records if r.role == "final" and (r.settings, r.method, r.seed, str(r.choice)) in asked):
        groups[r.method, r.seed].append(r.accuracy)
    most = max(groups.values(), key=len, default=[])
    return (statistics.stdev(most), len(most)) if len(most) > 1 else None


def verdict(rows: Sequence[Row]) -> str:
    """Plain sentences: which private methods differ from the reference, how close the others are, and what to mind."""
    return " ".join([headline(rows), *details(rows)])


def headline(rows: Sequence[Row]) -> str:
    """The answer in one sentence, behind a warning if the methods were not searched alike."""
    searches = "; ".join(f"{row.title} had {row.searched or 'no search'}" for row in _searching(rows))
    unlike = "" if alike(rows) else f"NOT SEARCHED ALIKE, so that methods do not compare: {searches}. "
    private = [row for row in rows if row.epsilon is not None]
    if len(private) < 2:
        return "There are not two private methods here to tell apart."
    tested = [row for row in private if row.p_holm is not None]
    if not tested:
        return f"{unlike}With a single seed there is no interval, so nothing can be said about which method is better."
    near, reference = [row for row in tested if not row.differs], tested[0].reference
    told = [
        f"{row.title} is {abs(100 * (row.difference or 0.0)):.{row.places}f} points "
        f"{'above' if (row.difference or 0.0) > 0 else 'below'} {reference}"
        for row in tested if row.differs
    ]  # fmt: skip
    if near:
        who = near[0].title if len(near) == 1 else f"the {len(near)} other private methods"
        it, most = "it lies" if len(near) == 1 else "all lie", max(near, key=lambda row: row.reach)
        reach = f"{100 * most.reach:.{most.places}f}"
        told.append(f"{who} cannot be told apart from {reference}: {it} within {reach} points of it")
    text = "; ".join(told)
    return f"{unlike}{text[0].upper()}{text[1:]}."


def details(rows: Sequence[Row]) -> list[str]:
    """What to mind: what privacy costs, the noise of one run, searches that stopped at the end of their grid."""
    told = []
    private, plain = ([row for row in rows if (row.epsilon is not None) == kind] for kind in (True, False))
    if plain and private:
        best = max(private, key=lambda row: row.accuracy)
        without, at_most = (f"{100 * row.accuracy:.{row.places}f}%" for row in (plain[0], best))
        told.append(f"Without privacy accuracy is {without}, with it at most {at_most}.")
    if spreads := [row.spread for row in private if row.spread is not None]:
        noise = 100 * math.sqrt(statistics.fmean(spread**2 for spread in spreads))
        points = f"{noise:.{max(row.places for row in rows)}f} points (over seeds)"
        told.append(f"One run differs from another of the same configuration by {points}.")
    for end, other in (("largest", "larger"), ("smallest", "smaller")):
        if there := [row.title for row in rows if row.end == end]:
            names = there[0] if len(there) == 1 else f"{', '.join(there[:-1])} and {there[-1]}"
            verb = {1: "chose", 2: "both chose"}.get(len(there), "all chose")
            told.append(f"{names} {verb} the {end} rate that was tried: a {other} one might be better.")
    return told


def plural(count: int, what: str, many: str | None = None) -> str:
    """A number of things in words."""
    return f"{count} {what if count == 1 else many or what + 's'}"


def two_digits(value: float) -> float:
    """Rounded to two significant digits: 0.012, 1.5, 48, 130."""
    return float(f"{value:.2g}")
