"""Checking a privacy card: its numbers computed anew by dp-accounting, and nothing of ours.

So a mistake in our accounting, or a number that somebody has changed, does not confirm itself.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

SCHEMA = "dpscale-card-2"
GRID = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0)
"""Every ε at which the attacker's gain is bounded; the least of these bounds is stated."""

_ADJACENCIES = {
    "poisson": ("add-remove",), "fixed-size": ("replace-one",), "full-batch": ("add-remove", "replace-one"),
    "shuffled": ("zero-out", "replace-one"),
}  # fmt: skip


def checksum(values: Mapping[str, Any]) -> str:
    """Over everything else on a card. It shows a slip of the pen, and is no signature."""
    plain = {name: value for name, value in values.items() if name != "checksum"}
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def verify(card: Mapping[str, Any]) -> list[str]:
    """What is wrong with a card, as read from its JSON: nothing if the list is empty.

    ε is computed anew from sampler, noise, steps and selection by dp-accounting alone, at every δ of the card; so is
    what an attacker can gain. A number that is lower by more than 1% is understated; one that is higher by more than a
    tenth does not belong to this card.
    """
    if not isinstance(card, Mapping) or card.get("schema") != SCHEMA:
        found = card.get("schema") if isinstance(card, Mapping) else type(card).__name__
        return [f"It is no card of this kind: its schema is {found!r}, and not {SCHEMA!r}."]
    try:
        return [*_problems(card)]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        return [f"It is damaged: {type(error).__name__}: {error}."]


def _problems(card: Mapping[str, Any]) -> Iterator[str]:
    if card["checksum"] != checksum(card):
        yield "It was changed since it was made: its checksum is another."
    yield from _inconsistent(card)
    mechanism, stated = card["mechanism"], card["guarantee"]
    costs, renyi = (_Costs(mechanism, card["selection"], way) for way in ("pld", "rdp"))
    by = renyi if mechanism["accountant"] == "rdp" else costs
    rows = [(by, stated["delta"], stated["epsilon"])]
    rows += [(costs, row["delta"], row["pld"]) for row in card["curve"] if row["pld"] is not None]
    rows += [(renyi, row["delta"], row["rdp"]) for row in card["curve"]]
    for way, delta, epsilon in rows:
        yield from _compared(f"At delta {delta:g} it states epsilon", epsilon, way.epsilon(delta), way.tight)
    gains = [("its attacker's advantage", costs.advantage(), card["attacker"]["advantage"])]
    for row in card["attacker"]["trade_off"]:
        name = f"what an attacker finds at {row['false_alarms']:g} false alarms"
        gains.append((name, costs.found_at_most(row["false_alarms"]), row["found_at_most"]))
    for name, found, said in gains:
        yield from _compared(f"It states {name}", said, found, costs.tight)


def _compared(what: str, stated: float, found: float, tight: bool) -> Iterator[str]:
    if stated < 0.99 * found if tight else stated > 1.01 * found:
        yield f"{what} = {stated:.4g}; by dp-accounting it is {'at least' if tight else 'at most'} {found:.4g}."
    elif tight and stated > 1.1 * found + 1e-3:
        yield f"{what} = {stated:.4g}, which is not of these numbers: {found:.4g}."


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

    Attributes:
        tight: whether a card should have these numbers. Of draws of a fixed size dp-accounting knows an upper bound
            alone.
    """

    def __init__(self, mechanism: Mapping[str, Any], selection: Mapping[str, Any] | None, way: str) -> None:
        self.tight = way == "rdp" or mechanism["sampling"]["name"] != "fixed-size"
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

    event = _event(mechanism)
    if selection is not None:
        noise, shape = selection["score_noise"], float(selection["shape"])
        for each in (event, *([] if noise is None else [dp_accounting.GaussianDpEvent(noise)])):
            yield RdpAccountant().compose(RepeatAndSelectDpEvent(each, selection["tries"], shape))
    elif way == "pld" and mechanism["sampling"]["name"] != "fixed-size":
        yield PLDAccountant().compose(event)
    else:
        relations = dp_accounting.NeighboringRelation
        replaced = mechanism["sampling"]["name"] == "fixed-size"  # elsewhere the noise is halved, and that is all
        relation = relations.REPLACE_ONE if replaced else relations.ADD_OR_REMOVE_ONE
        yield RdpAccountant(neighboring_relation=relation).compose(event)


def _event(mechanism: Mapping[str, Any]) -> Any:
    import dp_accounting

    sampling, steps = mechanism["sampling"], mechanism["steps_released"]
    name, size, batch = sampling["name"], sampling["size"], sampling.get("batch", sampling["size"])
    halved = name == "fixed-size" or sampling.get("adjacency") == "replace-one"  # one sample takes another's place
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
