"""The privacy card: one page about a run for whoever must believe its ε.

A card holds public quantities alone, taken from the plan and from what the run recorded. `verify` has its numbers
recomputed with dp-accounting and nothing of ours, and holds its words against them.
"""

import itertools
import json
import math
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscale import accounting
from dpscale.booking import Booking
from dpscale.card.page import page
from dpscale.card.recompute import FALSE_ALARM, GRID, SCHEMA, checksum, recomputed
from dpscale.checks import require
from dpscale.files import replacing
from dpscale.ledger import Ledger
from dpscale.plan import Plan
from dpscale.provenance import installed_versions, source_commit
from dpscale.sampling import Accountant
from dpscale.selection import Selection

_POINTS = 0.001, 0.01, 0.05, 0.1, 0.25, 0.5

_ROOTS = {
    True: "A seed: whoever knows it can remove the noise. For public data only.",
    False: "256 bits from the operating system; a fresh stream for every step.",
    None: "Where the key came from was not recorded.",
}


@dataclass(frozen=True)
class Card:
    """What is known about the privacy of a run; `to_dict` is its JSON, which has a checksum."""

    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with a checksum over all others. It shows a slip of the pen, and is no signature."""
        return {**self.values, "checksum": checksum(self.values)}

    def to_html(self) -> str:
        """One page, without scripts and without anything from elsewhere."""
        return page(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write JSON or HTML, as the name ends."""
        path = Path(path)
        action = "Name it card.html, for people, or card.json, for machines."
        require(path.suffix in (".html", ".json"), "Card.save", "path", "a .html or .json file", str(path), action)
        text = self.to_html() if path.suffix == ".html" else json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        with replacing(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        guarantee = self.values["guarantee"]
        return f"Card(epsilon={guarantee['epsilon']:.4g}, delta={guarantee['delta']:g})"


@dataclass(frozen=True, kw_only=True)
class Booked:
    """What a ledger says of a run.

    Args:
        ledger: that it is booked in.
        run: its name there.
        lost: steps of it that count in vain.
        crashed: steps that were charged to it after a crash.
    """

    ledger: Ledger
    run: str
    lost: int = 0
    crashed: int = 0

    @staticmethod
    def of(booking: Booking | None, lost: int = 0) -> "Booked | None":
        """What is booked by this process, if anything is."""
        if booking is None:
            return None
        return Booked(ledger=booking.ledger, run=booking.name, lost=lost, crashed=booking.crashed)

    def to_dict(self) -> dict[str, Any]:
        """What all runs on the data have spent together."""
        spent = self.ledger.spent()
        return {
            "ledger": self.ledger.path.name, "run": self.run, "epsilon": spent.epsilon, "total": self.ledger.epsilon,
            "delta": self.ledger.delta, "adjacency": spent.adjacency, "how": spent.how,
        }  # fmt: skip

    def __str__(self) -> str:
        spent = self.ledger.spent()
        return (
            f"All runs of {self.ledger.path} together have spent epsilon = {spent.epsilon:.4g} of "
            f"{self.ledger.epsilon:g} at delta {self.ledger.delta:g} ({spent.adjacency}; {spent.how})."
        )


def history(resumed: int, booked: Booked | None, *, counted: bool, selection: bool = False) -> Iterator[str]:
    """What is to be said of resumptions, and of the ledger.

    Args:
        resumed: how often.
        booked: the part in a ledger.
        counted: whether a ledger has every step that was taken.
        selection: whether it is of a search, which is paid for as a whole.
    """
    if resumed:
        lost = "are counted too" if counted else "are not counted, as nobody may have seen their weights"
        times = "once" if resumed == 1 else f"{resumed} times"
        yield f"Resumed: {times}, with fresh randomness. " + (
            "The number of tries was drawn once, before the first; a try that was interrupted counts as one of them."
            if selection
            else f"Steps that were taken after a save, and lost with their process, {lost}."
        )
    if booked:
        part = (
            "The search was charged as a whole, before its first try."
            if selection
            else f"{booked.lost} steps count in vain; {booked.crashed} were charged to it after a crash."
        )
        yield f"Ledger: run {booked.run!r} of {booked.ledger.path.name}. {part}"


def make(
    plan: Plan, steps: int, delta: float, *, resumed: int = 0, ranks: int = 1, booked: Booked | None = None,
    seeded: bool | None = False, sources: Collection[str] = ("fast",),
    checks: Mapping[str, Any] | None = None, search: str | None = None, audit: Mapping[str, Any] | None = None,
    selection: Selection | None = None, software: Mapping[str, str] | None = None,
) -> Card:  # fmt: skip
    """The card of ``steps`` steps under a plan, or of the best of a selection of such runs.

    Args:
        plan: calibrated; of a selection, that of one try.
        steps: that were released; of a selection, by each try.
        delta: of the guarantee.
        resumed: how often the run was resumed.
        ranks: processes that it ran on together.
        booked: its part in a ledger.
        seeded: whether the noise comes from a seed that somebody knows. None: nobody has recorded it.
        sources: of the noise: "fast", "secure", or one after the other.
        checks: what was looked at in the course of the run.
        search: how settings were chosen on the private data, if they were.
        audit: a report of `dpscale.audit`.
        selection: that the run is the best try of.
        software: versions that it ran with. None: the installed ones.
    """
    action = "Without noise there is no guarantee, and so nothing to put on a card."
    require(bool(plan.noise_multiplier), "card", "plan", "one with noise", plan, action)
    costs = _Costs(plan, steps, selection)
    deltas = [delta * 10.0**k for k in (2, 1, 0, -1, -2) if delta * 10.0**k < 1]
    together = [f"Processes: {ranks}, as one run: one draw, one reduction and one noise in each step."]
    told = history(resumed, booked, counted=booked is not None, selection=selection is not None)
    values = {
        "schema": SCHEMA,
        "guarantee": {"epsilon": costs.epsilon(delta), "delta": delta, "adjacency": plan.adjacency},
        "words": plan.facts(delta, steps) if selection is None else selection.facts(plan, delta),
        "mechanism": {**plan.to_dict(), "steps_released": steps, "noise_std": plan.noise_std, "bound": plan.bound,
                      "expected_batch": plan.expected_batch},
        "selection": None if selection is None else selection.to_dict(),
        "curve": [{"delta": d, "pld": costs.tight(d), "rdp": costs.epsilon(d, "rdp")} for d in deltas],
        "attacker": _attacker(costs, "record" if plan.records is None else "person's data"),
        "history": [*(together if ranks > 1 else []), *told],
        "composed": None if booked is None else booked.to_dict(),
        "search": _search(search, selection),
        "not_counted": list(plan.not_counted if selection is None else selection.not_counted(plan)),
        "randomness": randomness(seeded, sources),
        "checks": None if checks is None else dict(checks),
        "audit": None if audit is None else dict(audit),
        "software": {**installed_versions(), "commit": source_commit() or "unknown"} if software is None
                    else dict(software),
    }  # fmt: skip
    return Card(json.loads(json.dumps(values, allow_nan=False)))  # as it is read back: lists for tuples


def _search(told: str | None, selection: Selection | None) -> str:
    if selection is not None:
        return f"Paid for: the best of {selection.tries:g} tries on average. " + (told or "").strip()
    return told or "Not stated. If settings were chosen on the private data, that is not counted."


def randomness(seeded: bool | None, sources: Collection[str]) -> str:
    """Where the noise and the draws of a run come from, in words."""
    generators = (
        "Noise from ChaCha20 and draws from SHAKE-256, which are cryptographic." if {*sources} == {"secure"} else
        "Generators that are fast, not cryptographic." if "secure" not in sources else
        "Generators that are fast, not cryptographic, in some steps; ChaCha20 and SHAKE-256 in the others."
    )  # fmt: skip
    return f"{_ROOTS[seeded]} {generators}"


class _Costs:
    """ε and δ of so many steps of a plan, or of a selection among such runs."""

    def __init__(self, plan: Plan, steps: int, selection: Selection | None) -> None:
        self._plan, self._steps, self._selection = plan, steps, selection
        if selection is not None:
            must = f"{plan.steps}, all that were planned, in every try"
            require(steps == plan.steps, "card", "steps", must, steps)

    def epsilon(self, delta: float, accountant: Accountant | None = None) -> float:
        """By the plan's accountant if none is named; of a selection, by Rényi DP."""
        if self._selection is not None:
            return self._selection.epsilon(self._plan, delta)
        way = self._plan.accountant if accountant is None else accountant
        event, adjacency = self._plan.event(self._steps), self._plan.adjacency
        return accounting.epsilon(event, delta=delta, adjacency=adjacency, accountant=way)

    def tight(self, delta: float) -> float | None:
        """By privacy loss distributions, which nobody knows of a selection."""
        return None if self._selection is not None else self.epsilon(delta, "pld")

    def delta(self, epsilon: float) -> float:
        """At an ε."""
        if self._selection is not None:
            return self._selection.delta(self._plan, epsilon)
        return accounting.delta(self._plan.event(self._steps), epsilon=epsilon, adjacency=self._plan.adjacency)


def _attacker(costs: _Costs, who: str) -> dict[str, Any]:
    """What somebody who sees every step can gain at most: TPR ≤ e^ε·FPR + δ(ε) for every ε, both ways."""
    grid = [(epsilon, costs.delta(epsilon)) for epsilon in GRID]

    def most(fpr: float) -> float:
        straight = (math.exp(e) * fpr + d for e, d in grid)
        mirrored = (1 - math.exp(-e) * (1 - d - fpr) for e, d in grid if 1 - d - fpr > 0)
        return min(1.0, *straight, *mirrored)

    advantage = min((math.expm1(e) + 2 * d) / (math.exp(e) + 1) for e, d in grid)  # δ(0), where the curve is tight
    return {
        "advantage": advantage,
        "trade_off": [{"false_alarms": fpr, "found_at_most": most(fpr)} for fpr in _POINTS],
        "words": (
            f"Whoever guesses from the model whether one {who} was used, with even odds, is right in at most "
            f"{100 * (1 + advantage) / 2:.1f} of 100 cases, whatever they know and however long they compute. If they "
            f"may be wrong about 1 in 100 who were not used, they find at most {100 * most(0.01):.1f} of 100."
        ),
    }


# -- Whether a card says what it should ------------------------------------------------------------------------------

_OF_THE_RUN = {"search", "randomness", "history", "composed", "checks", "audit", "software"}
"""Parts that only the run itself knows; all others follow from its plan."""

_NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?")


def verify(card: Mapping[str, Any]) -> list[str]:
    """What is wrong with a card, as read from its JSON: nothing if the list is empty.

    Its numbers are recomputed by dp-accounting alone. Then every part that follows from its plan must be what `make`
    says of that plan, with numbers to 1%; and what only the run knows must be possible, and not contradict the rest.
    """
    problems = recomputed(card)
    if problems:
        return problems
    try:
        return [*_told_otherwise(card)]
    except Exception as error:  # as above: a value that is none of a card's
        return [f"It is damaged: {type(error).__name__}: {error}."]


def _told_otherwise(card: Mapping[str, Any]) -> Iterator[str]:
    mechanism, delta = card["mechanism"], card["guarantee"]["delta"]
    derived = {"steps_released", "noise_std", "bound", "expected_batch"}
    plan = Plan.from_dict({name: value for name, value in mechanism.items() if name not in derived})
    chosen = None if card["selection"] is None else Selection.from_dict(card["selection"])
    anew = make(plan, mechanism["steps_released"], delta, selection=chosen).to_dict()
    if missing := sorted(set(anew) ^ set(card)):
        yield f"It has other parts than a card: {', '.join(missing)}."
        return
    for name in anew.keys() - _OF_THE_RUN - {"checksum"}:
        if not _alike(card[name], anew[name]):
            yield f"Its part {name!r} is not what follows from its plan."
    prefix = anew["search"] if chosen else ""
    if not isinstance(card["search"], str) or not card["search"].startswith(prefix) or not card["search"]:
        yield f"Its search is not told as {prefix!r}."
    sources = ("fast",), ("secure",), ("fast", "secure")
    if card["randomness"] not in [randomness(*each) for each in itertools.product(_ROOTS, sources)]:
        yield "Its source of randomness is none that a run has."
    yield from _ledger_problems(card, plan, chosen)
    yield from _audit_problems(card["audit"])
    for name, may in (("checks", dict | None), ("software", dict), ("history", list)):
        if not isinstance(card[name], may) or not all(isinstance(told, str) for told in card[name] or ()):
            yield f"Its part {name!r} is none of a card."


def _alike(told: Any, expected: Any) -> bool:
    """Whether two values are the same, but for 1% of each number: other versions of SciPy round otherwise."""
    if isinstance(expected, Mapping):
        same = isinstance(told, Mapping) and told.keys() == expected.keys()
        return same and all(_alike(told[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        same = isinstance(told, list) and len(told) == len(expected)
        return same and all(map(_alike, told, expected))
    if isinstance(expected, str) and isinstance(told, str):
        numbers = ([float(each.replace(",", "")) for each in _NUMBER.findall(text)] for text in (told, expected))
        return _NUMBER.sub("#", told) == _NUMBER.sub("#", expected) and all(map(_alike, *numbers))
    if isinstance(expected, float | int) and not isinstance(expected, bool) and type(told) in (float, int):
        return math.isclose(told, expected, rel_tol=0.01)
    return type(told) is type(expected) and bool(told == expected)


def _ledger_problems(card: Mapping[str, Any], plan: Plan, selection: Selection | None) -> Iterator[str]:
    """All runs together cost what this one does, at least; and what is said of a ledger is of one that is named."""
    composed = card["composed"]
    named = [line for line in card["history"] if line.startswith("Ledger: ")]
    if composed is None:
        if named:
            yield "It speaks of a ledger, and has nothing of what that says."
        return
    if len(named) != 1 or not named[0].startswith(f"Ledger: run {composed['run']!r} of {composed['ledger']}. "):
        yield "What was composed is of a ledger that its history does not name."
    least = _Costs(plan, card["mechanism"]["steps_released"], selection).epsilon(composed["delta"], "pld")
    if not 0.99 * least <= composed["epsilon"] <= 1.01 * composed["total"]:
        yield f"All runs together must cost this one's {least:.4g} at least, and their total at most."
    if set(composed) != {"ledger", "run", "epsilon", "total", "delta", "adjacency", "how"}:
        yield "What was composed is told otherwise than by a ledger."


def _audit_problems(report: Mapping[str, Any] | None) -> Iterator[str]:
    """What an audit concludes must follow from its own numbers."""
    if report is None:
        return
    least = min(1.0, len(report["checks"]) * min(check["p_value"] for check in report["checks"]))
    bound = report["bounds"]["curve" if report["mode"] == "white-box" else "guesses"]
    found = (report["p_value"], report["false_alarm_rate"], report["epsilon_lower"])
    follows = _alike([*found], [least, FALSE_ALARM, bound]) and report["consistent"] is (least >= FALSE_ALARM)
    if not follows:
        yield "What its audit concludes does not follow from what it found."
