"""The privacy card: one page about a run for whoever must believe its ε, and a check of it by other code.

A card holds public quantities alone. `verify` recomputes its ε with dp-accounting and nothing of ours.
"""

import hashlib
import html
import json
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from dpscale import accounting
from dpscale.files import replacing
from dpscale.plan import Plan
from dpscale.sampling import Accountant

SCHEMA = "dpscale-card-1"
NOT_COUNTED = "Not counted in these numbers"
_WAYS: tuple[Accountant, ...] = ("pld", "rdp")
_POINTS = 0.001, 0.01, 0.05, 0.1, 0.25, 0.5


@dataclass(frozen=True)
class Card:
    """What is known about the privacy of a run; `to_dict` is its JSON, which has a checksum."""

    values: Mapping[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, with a checksum over all others. It shows a slip of the pen, and is no signature."""
        return {**self.values, "checksum": _checksum(self.values)}

    def to_html(self) -> str:
        """One page, without scripts and without anything from elsewhere."""
        return _page(self.to_dict())

    def save(self, path: str | Path) -> None:
        """Write JSON or HTML, as the name ends."""
        path = Path(path)
        text = self.to_html() if path.suffix == ".html" else json.dumps(self.to_dict(), indent=2, ensure_ascii=False)
        with replacing(path) as temporary:
            Path(temporary).write_text(text, encoding="utf-8")

    def __repr__(self) -> str:
        guarantee = self.values["guarantee"]
        return f"Card(epsilon={guarantee['epsilon']:.4g}, delta={guarantee['delta']:g})"


def make(
    plan: Plan, steps: int, delta: float, *, history: Sequence[str] = (), seeded: bool = False,
    checks: Mapping[str, Any] | None = None, search: str | None = None, audit: Mapping[str, Any] | None = None,
    composed: Mapping[str, Any] | None = None,
) -> Card:  # fmt: skip
    """The card of ``steps`` steps under a plan.

    Args:
        plan: calibrated.
        steps: that were released.
        delta: of the guarantee.
        history: lines about resumptions and ledger.
        seeded: whether the noise comes from a seed that somebody knows.
        checks: what was looked at in the course of the run.
        search: how settings were chosen on the private data, if they were.
        audit: a report of `dpscale.audit`.
        composed: what all runs on the data have spent together.
    """
    words = dict(_lines(plan.statement(delta=delta, steps=steps)))
    deltas = [delta * 10.0**k for k in (2, 1, 0, -1, -2) if delta * 10.0**k < 1]
    event = plan.event(steps)
    curve = [
        {"delta": d, **{a: accounting.epsilon(event, delta=d, adjacency=plan.adjacency, accountant=a) for a in _WAYS}}
        for d in deltas
    ]
    values = {
        "schema": SCHEMA,
        "guarantee": {"epsilon": plan.epsilon(delta, steps), "delta": delta, "adjacency": plan.adjacency},
        "words": words,
        "mechanism": {**plan.to_dict(), "steps_released": steps, "noise_std": plan.noise_std, "bound": plan.bound,
                      "expected_batch": plan.expected_batch},
        "curve": curve,
        "attacker": _attacker(plan, steps),
        "history": list(history),
        "composed": None if composed is None else dict(composed),
        "search": search or "Not stated. If settings were chosen on the private data, that is not counted.",
        "not_counted": _not_counted(plan.statement(delta=delta, steps=steps)),
        "randomness": "A seed: whoever knows it can remove the noise. For public data only." if seeded else
                      "256 bits from the operating system; a fresh stream for every step.",
        "checks": None if checks is None else dict(checks),
        "audit": None if audit is None else dict(audit),
        "software": _software(),
    }  # fmt: skip
    return Card(json.loads(json.dumps(values)))  # as it is read back: lists for tuples


def _lines(statement: str) -> Iterator[tuple[str, str]]:
    for line in statement.split(NOT_COUNTED)[0].splitlines():
        name, found, said = line.partition(": ")
        if found:
            yield name, said


def _not_counted(statement: str) -> list[str]:
    return [line.strip(" -") for line in statement.splitlines() if line.startswith("  - ")]


def _attacker(plan: Plan, steps: int) -> dict[str, Any]:
    """What somebody who sees every step can gain at most: TPR ≤ e^ε·FPR + δ(ε) for every ε, both ways."""
    event = plan.event(steps)

    def failing(epsilon: float) -> float:
        return accounting.delta(event, epsilon=epsilon, adjacency=plan.adjacency)

    grid = [(epsilon, failing(epsilon)) for epsilon in (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)]

    def most(fpr: float) -> float:
        straight = (math.exp(e) * fpr + d for e, d in grid)
        mirrored = (1 - math.exp(-e) * (1 - d - fpr) for e, d in grid if 1 - d - fpr > 0)
        return min(1.0, *straight, *mirrored)

    advantage, who = grid[0][1], "record" if plan.records is None else "person's data"
    return {
        "advantage": advantage,
        "trade_off": [{"false_alarms": fpr, "found_at_most": most(fpr)} for fpr in _POINTS],
        "words": (
            f"Whoever guesses from the model whether one {who} was used, with even odds, is right in at most "
            f"{100 * (1 + advantage) / 2:.1f} of 100 cases, whatever they know and however long they compute. If they "
            f"may be wrong about 1 in 100 who were not used, they find at most {100 * most(0.01):.1f} of 100."
        ),
    }


def _software() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("dpscale", "torch", "dp-accounting", "numpy"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def _checksum(values: Mapping[str, Any]) -> str:
    plain = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


# -- Checking a card -------------------------------------------------------------------------------------------------


def verify(card: Mapping[str, Any]) -> list[str]:
    """What is wrong with a card, as read from its JSON: nothing if the list is empty.

    ε is computed anew from sampler, noise and steps by dp-accounting alone, at every δ of the card. One that is stated
    lower by more than 1% is understated; one that is higher by more than a tenth does not belong to these numbers.
    """
    if card.get("schema") != SCHEMA:
        return [f"It is no card of this kind: its schema is {card.get('schema')!r}, and not {SCHEMA!r}."]
    try:
        return [*_problems(card)]
    except (KeyError, TypeError, ValueError) as error:
        return [f"It is damaged: {type(error).__name__}: {error}."]


def _problems(card: Mapping[str, Any]) -> Iterator[str]:
    if card["checksum"] != _checksum(card):
        yield "It was changed since it was made: its checksum is another."
    mechanism, stated = card["mechanism"], card["guarantee"]
    rows = [(stated["delta"], stated["epsilon"]), *((row["delta"], row["pld"]) for row in card["curve"])]
    for delta, epsilon in rows:
        found, tight = _independent(mechanism, delta)
        if epsilon < 0.99 * found if tight else epsilon > 1.01 * found:
            how = "at least" if tight else "at most"
            yield f"At delta {delta:g} it states epsilon = {epsilon:.4g}; by dp-accounting it is {how} {found:.4g}."
        elif tight and epsilon > 1.1 * found + 1e-3:
            yield f"At delta {delta:g} it states epsilon = {epsilon:.4g}, which is not of these numbers: {found:.4g}."
    if not math.isclose(mechanism["noise_std"], mechanism["noise_multiplier"] * mechanism["bound"], rel_tol=1e-6):
        yield "Its noise is not its multiplier times its bound."


def _independent(mechanism: Mapping[str, Any], delta: float) -> tuple[float, bool]:
    """(ε by dp-accounting alone, whether it is tight.) Of draws of a fixed size it knows an upper bound alone."""
    import dp_accounting
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    sampling, sigma, steps = mechanism["sampling"], mechanism["noise_multiplier"], mechanism["steps_released"]
    name, size, batch = sampling["name"], sampling["size"], sampling.get("batch", sampling["size"])
    if steps == 0:
        return 0.0, True
    if name == "poisson":
        event = dp_accounting.PoissonSampledDpEvent(batch / size, dp_accounting.GaussianDpEvent(sigma))
        accountant: Any = PLDAccountant()
        accountant.compose(event, steps)
        return float(accountant.get_epsilon(delta)), True
    if name == "fixed-size":
        gaussian = dp_accounting.GaussianDpEvent(sigma / 2)  # one sample takes another's place
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
        accountant = RdpAccountant(neighboring_relation=relation)
        accountant.compose(dp_accounting.SampledWithoutReplacementDpEvent(size, batch, gaussian), steps)
        return float(accountant.get_epsilon(delta)), False
    times = math.ceil(steps / math.ceil(size / batch)) if name == "shuffled" else steps
    factor = 2 if sampling.get("adjacency") == "replace-one" else 1
    return float(dp_accounting.get_epsilon_gaussian(sigma / factor / math.sqrt(times), delta)), True


# -- The page --------------------------------------------------------------------------------------------------------

_STYLE = """
:root{color-scheme:light dark}
body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.6rem;margin:0 0 .3rem}h2{font-size:1.1rem;margin:2rem 0 .5rem}
.big{font-size:2.2rem;font-weight:600;margin:.5rem 0}
table{border-collapse:collapse;width:100%;overflow-wrap:anywhere}
td:first-child,th:first-child{min-width:8rem;overflow-wrap:normal}
td,th{border-top:1px solid #8884;padding:.35rem .6rem .35rem 0;text-align:left;vertical-align:top}
"""


def _page(card: Mapping[str, Any]) -> str:
    guarantee, attacker = card["guarantee"], card["attacker"]
    up = math.ceil(guarantee["epsilon"] * 1e3) / 1e3
    parts = [
        "<h1>Privacy card</h1>",
        f"<p class=big>ε = {up:g} at δ = {guarantee['delta']:g}</p>",
        f"<p>{_text(attacker['words'])}</p>",
        "<h2>What is promised</h2>", _table(card["words"].items()),
        "<h2>What an attacker can find</h2>",
        _table(((f"{row['false_alarms']:.1%}", f"{row['found_at_most']:.1%}") for row in attacker["trade_off"]),
               ("wrongly said to be in", "found, at most")),
        "<h2>ε at other δ</h2>",
        _table(((f"{row['delta']:g}", f"{row['pld']:.4g}", f"{row['rdp']:.4g}") for row in card["curve"]),
               ("δ", "ε, tight (PLD)", "ε, Rényi (RDP)")),
        "<h2>What was composed</h2>",
        _items(card["history"] or ["One run, begun once. No ledger was kept."]),
        "<h2>What is not counted</h2>", _items([f"Search: {card['search']}", *card["not_counted"]]),
        "<h2>Randomness</h2>", f"<p>{_text(card['randomness'])}</p>",
        "<h2>Checks during training</h2>",
        _table(card["checks"].items()) if card["checks"] else "<p>None were recorded.</p>",
        "<h2>Audit</h2>", _table(card["audit"].items()) if card["audit"] else "<p>None was made.</p>",
        "<h2>Software</h2>", _table(card["software"].items()),
        f"<p><small>Schema {SCHEMA}. Checksum {card['checksum']}. <code>dpscale verify card.json</code> computes ε "
        "anew.</small></p>",
    ]  # fmt: skip
    head = "<meta charset=utf-8><meta name=viewport content='width=device-width'><title>Privacy card</title>"
    head += f"<style>{_STYLE}</style>"
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(parts)}</body></html>"


def _table(rows: Any, head: Sequence[str] = ()) -> str:
    top = f"<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>" if head else ""
    body = "".join(f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{top}{body}</table>"


def _items(lines: Sequence[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line)}</li>' for line in lines)}</ul>"


def _text(value: Any) -> str:
    return html.escape(str(value))
