"""Checking the numbers of a privacy card: computed anew by dp-accounting, and nothing of ours.

So a mistake in our accounting, or a number that somebody has changed, does not confirm itself. Whether the rest of the
card says the same is for `card.verify`.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA = "dpscale-card-2"
GRID = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Every ε at which the attacker's gain is bounded; the least of these bounds is stated."""

FALSE_ALARM = 1e-4
"""How often an audit of a run that is as claimed says "not consistent"."""

_MOST_STEPS = 10**8
"""Beyond it accounting would not come to an end."""

_ADJACENCIES = {
    "poisson": ("add-remove",), "fixed-size": ("replace-one",), "full-batch": ("add-remove", "replace-one"),
    "shuffled": ("zero-out", "replace-one"),
}  # fmt: skip


def checksum(values: Mapping[str, Any]) -> str:
    """Over everything else on a card. It shows a slip of the pen, and is no signature."""
    plain = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def recomputed(card: Mapping[str, Any]) -> list[str]:
    """What is wrong with the numbers of a card, as read from its JSON: nothing if the list is empty.

    ε is computed anew from sampler, noise, steps and selection by dp-accounting alone, at every δ of the card; so is
    what an attacker can gain. A number that is lower by more than 1% is understated; one that is higher by more than a
    tenth does not belong to this card.
    """
    if not isinstance(card, Mapping) or card.get("schema") != SCHEMA:
        found = card.get("schema") if isinstance(card, Mapping) else type(card).__name__
        return [f"It is no card of this kind: its schema is {found!r}, and not {SCHEMA!r}."]
    try:
        return [*_problems(card)]
    except Exception as error:  # whatever a value that is none of a card's makes of the accounting
        return [f"It is damaged: {type(error).__name__}: {error}."]


def _problems(card: Mapping[str, Any]) -> Iterator[str]:
    if card["checksum"] != checksum(card):
        yield "It was changed since it was made: its checksum is another."
    mechanism, stated, chosen = card["mechanism"], card["guarantee"], card["selection"]
    json.dumps(card, allow_nan=False)  # refuses what is no number: nothing is below or above that
    if type(steps := mechanism["steps_released"]) is not int or not 0 <= steps <= _MOST_STEPS:
        raise ValueError(f"it has released {steps!r} steps")
    yield from _inconsistent(card)
    renyi, most = (_Costs(mechanism, chosen, way) for way in ("rdp", "pld"))
    least = _Costs(mechanism, chosen, "least") if mechanism["sampling"]["name"] == "fixed-size" else most
    by = (renyi, renyi) if mechanism["accountant"] == "rdp" else (least, most)
    rows = [(by, stated["delta"], stated["epsilon"])]
    rows += [((least, most), row["delta"], row["pld"]) for row in card["curve"] if row["pld"] is not None]
    rows += [((renyi, renyi), row["delta"], row["rdp"]) for row in card["curve"]]
    for ways, delta, epsilon in rows:
        yield from _compared(f"At delta {delta:g} it states epsilon", epsilon, *(way.epsilon(delta) for way in ways))
    yield from _compared("It states its attacker's advantage", card["attacker"]["advantage"],
                         *(way.advantage() for way in (least, most)))  # fmt: skip
    for row in card["attacker"]["trade_off"]:
        name = f"It states what an attacker finds at {row['false_alarms']:g} false alarms"
        found = (way.found_at_most(row["false_alarms"]) for way in (least, most))
        yield from _compared(name, row["found_at_most"], *found)


def _compared(what: str, stated: float, least: float, most: float) -> Iterator[str]:
    if stated < 0.99 * least:
        yield f"{what} = {stated:.4g}; by dp-accounting it is at least {least:.4g}."
    elif stated > 1.1 * most + 1e-3:
        yield f"{what} = {stated:.4g}, which is not of these numbers: {most:.4g}."


def _inconsistent(card: Mapping[str, Any]) -> Iterator[str]:
    """Numbers that do not go together, whatever they cost."""
    mechanism, sampling, rule = card["mechanism"], card["mechanism"]["sampling"], card["mechanism"]["scaling"]
    adjacency = card["guarantee"]["adjacency"]
    bound = rule["C"] / rule.get("s", 1.0)
    if not math.isclose(mechanism["bound"], bound, rel_tol=1e-6):
        yield f"Its bound is {mechanism['bound']:g}, and that of its rule is {bound:g}."
    if not math.isclose(mechanism["noise_std"], mechanism["noise_multiplier"] * mechanism["bound"], rel_tol=1e-6):
        yield "Its noise is not its multiplier times its bound."
    if adjacency not in _ADJACENCIES[sampling["name"]] or adjacency != sampling.get("adjacency", adjacency):
        yield f"Its guarantee is for {adjacency} neighbours, which its sampler is not."
    if mechanism["expected_batch"] != sampling.get("batch", sampling["size"]):
        yield "What its sums are divided by is not the batch of its sampler."
    if mechanism["steps_released"] > mechanism["steps"] and not card["history"]:
        yield "It has released more steps than were planned."
    if card["selection"] is not None and mechanism["steps_released"] != mechanism["steps"]:
        yield "Its tries are not all of the steps that were planned."


class _Costs:
    """ε, δ and what they allow an attacker, by dp-accounting's accountants.

    Of draws of a fixed size dp-accounting knows no tight cost. They cost at most what Rényi DP says ("pld"), and at
    "least" what Poisson draws do in which one sample adds as much as an exchange moves: that is one of the two sides
    from which an exchange can be seen.
    """

    def __init__(self, mechanism: Mapping[str, Any], selection: Mapping[str, Any] | None, way: str) -> None:
        self._accountants = [*_accountants(mechanism, selection, way)] if mechanism["steps_released"] else []

    def epsilon(self, delta: float) -> float:
        """Of whoever loses most."""
        return max((float(each.get_epsilon(delta)) for each in self._accountants), default=0.0)

    def delta(self, epsilon: float) -> float:
        """Of whoever loses most."""
        return max((min(1.0, float(each.get_delta(epsilon))) for each in self._accountants), default=0.0)

    def advantage(self) -> float:
        """True alarms less false ones, at most: (e^ε − 1 + 2δ)/(e^ε + 1) for every (ε, δ)."""
        return min((math.expm1(e) + 2 * self.delta(e)) / (math.exp(e) + 1) for e in GRID)

    def found_at_most(self, fpr: float) -> float:
        """True alarms at so many false ones: TPR ≤ e^ε·FPR + δ, and 1 − FPR ≤ e^ε·(1 − TPR) + δ."""
        deltas = [(e, self.delta(e)) for e in GRID]
        return min(1.0, *(math.exp(e) * fpr + d for e, d in deltas),
                   *(1 - math.exp(-e) * (1 - d - fpr) for e, d in deltas if 1 - d - fpr > 0))  # fmt: skip


def _accountants(mechanism: Mapping[str, Any], selection: Mapping[str, Any] | None, way: str) -> Iterator[Any]:
    """One for each kind of person: trained on, and, where tries are scored on them, held out."""
    import dp_accounting
    from dp_accounting.dp_event import RepeatAndSelectDpEvent
    from dp_accounting.pld import PLDAccountant
    from dp_accounting.rdp import RdpAccountant

    event = _event(mechanism, "poisson" if way == "least" else mechanism["sampling"]["name"])
    if selection is not None:
        noise, shape = selection["score_noise"], float(selection["shape"])
        for each in (event, *([] if noise is None else [dp_accounting.GaussianDpEvent(noise)])):
            yield RdpAccountant().compose(RepeatAndSelectDpEvent(each, selection["tries"], shape))
    elif way == "least" or (way == "pld" and mechanism["sampling"]["name"] != "fixed-size"):
        yield PLDAccountant().compose(event)
    else:
        relations = dp_accounting.NeighboringRelation
        replaced = mechanism["sampling"]["name"] == "fixed-size"  # elsewhere the noise is halved, and that is all
        relation = relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
        yield RdpAccountant(neighboring_relation=relation).compose(event)


def _event(mechanism: Mapping[str, Any], name: str) -> Any:
    """What so many steps release if their batches are drawn as ``name`` says."""
    import dp_accounting

    sampling, steps = mechanism["sampling"], mechanism["steps_released"]
    size, batch = sampling["size"], sampling.get("batch", sampling["size"])
    halved = (
        sampling["name"] == "fixed-size" or sampling.get("adjacency") == "replace-one"
    )  # one sample takes another's place
    gaussian = dp_accounting.GaussianDpEvent(mechanism["noise_multiplier"] / (2 if halved else 1))
    if name == "poisson":
        return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(batch / size, gaussian), steps)
    if name == "fixed-size":
        sampled = dp_accounting.SampledWithoutReplacementDpEvent(size, batch, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, steps)
    if name not in _ADJACENCIES:
        raise ValueError(f"its sampler is {name!r}")
    times = math.ceil(steps / math.ceil(size / batch)) if name == "shuffled" else steps
    return dp_accounting.SelfComposedDpEvent(gaussian, times)
