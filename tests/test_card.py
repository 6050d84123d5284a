"""The privacy card: what it says, and that a changed one is found out by dp-accounting alone."""

import copy
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from scipy import stats

import dpscale
from dpscale.card import card as cards
from dpscale.lab import records

from .helpers import data, loss_fn, mlp, plan, refuse, run

SAMPLERS = {
    "poisson": dpscale.Poisson(size=2000, batch=50),
    "fixed-size": dpscale.FixedSize(size=2000, batch=50),
    "full-batch": dpscale.FullBatch(size=2000),
    "shuffled": dpscale.Shuffled(size=2000, batch=50),
}


def made(sampler="poisson", steps=60, **changes):
    planned = plan(sampling=SAMPLERS[sampler], steps=80, noise_multiplier=4.0, delta=1e-5)
    return cards.make(planned, steps, 1e-5, **changes)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("steps", [0, 60])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_a_card_is_confirmed_by_other_code(sampler, steps, accountant):
    planned = plan(sampling=SAMPLERS[sampler], steps=80, noise_multiplier=4.0, delta=1e-5, accountant=accountant)
    card = cards.make(planned, steps, 1e-5)
    assert cards.verify(json.loads(json.dumps(card.to_dict()))) == []


CHANGES = {
    "epsilon": lambda c: c["guarantee"].update(epsilon=0.9 * c["guarantee"]["epsilon"]),
    "delta": lambda c: c["guarantee"].update(delta=c["guarantee"]["delta"] / 10),
    "noise": lambda c: c["mechanism"].update(noise_multiplier=3.5, noise_std=3.5 * c["mechanism"]["bound"]),
    "steps": lambda c: c["mechanism"].update(steps_released=90),
    "rate": lambda c: c["mechanism"]["sampling"].update(batch=70),
    "sampler": lambda c: c["mechanism"]["sampling"].update(name="full-batch"),
    "curve": lambda c: c["curve"][-1].update(pld=0.5 * c["curve"][-1]["pld"]),
    "std": lambda c: c["mechanism"].update(noise_std=1.0),
    "bound": lambda c: c["mechanism"].update(bound=1.0, noise_std=4.0),
    "rule": lambda c: c["mechanism"]["scaling"].update(C=0.1),
    "adjacency": lambda c: c["guarantee"].update(adjacency="replace-one"),
    "divisor": lambda c: c["mechanism"].update(expected_batch=49),
    "rdp": lambda c: c["curve"][0].update(rdp=0.5 * c["curve"][0]["rdp"]),
    "advantage": lambda c: c["attacker"].update(advantage=0.5 * c["attacker"]["advantage"]),
    "found": lambda c: c["attacker"]["trade_off"][2].update(found_at_most=0.051),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("again", [False, True])
def test_a_changed_card_fails(name, again):
    """Even if its checksum is made anew: the numbers no longer belong together."""
    changed = copy.deepcopy(made().to_dict())
    CHANGES[name](changed)
    if again:
        changed["checksum"] = cards.checksum(changed)
    problems = cards.verify(changed)
    assert len(problems) >= 1 and ("checksum" in problems[0]) == (not again)


def test_words_that_were_changed_fail_too():
    changed = made().to_dict()
    changed["words"]["Unit of privacy"] = "everybody"
    assert cards.verify(changed) == ["It was changed since it was made: its checksum is another."]
    assert cards.verify({"schema": "x"})[0].startswith("It is no card of this kind")
    assert cards.verify({"schema": cards.SCHEMA, "checksum": ""})[-1].startswith("It is damaged")


LIES = {
    "not a number": lambda c: c["guarantee"].update(epsilon=math.nan),
    "guarantee in words": lambda c: c["words"].update(Guarantee=c["words"]["Guarantee"].replace("0.", "0.0")),
    "unit": lambda c: c["words"].update({"Unit of privacy": "one person, whatever they gave."}),
    "people": lambda c: c["mechanism"].update(records=5),
    "momentum": lambda c: c["mechanism"].update(momentum="none to speak of"),
    "planned steps": lambda c: c["mechanism"].update(steps=800),
    "endless steps": lambda c: c["mechanism"].update(steps_released=10**12),
    "no data": lambda c: c["mechanism"]["sampling"].update(size=0),
    "attacker in words": lambda c: c["attacker"].update(words="Nobody can find anything."),
    "no trade-off": lambda c: c["attacker"].update(trade_off=[]),
    "no curve": lambda c: c.update(curve=[]),
    "no tight curve": lambda c: c["curve"][2].update(pld=None),
    "nothing left out": lambda c: c.update(not_counted=[]),
    "randomness": lambda c: c.update(randomness="The noise is perfect."),
    "search": lambda c: c.update(search=""),
    "ledger": lambda c: c["history"].append("Ledger: run 'one' of books. Nothing was spent."),
    "a part more": lambda c: c.update(certified="by everybody"),
    "a part less": lambda c: c.pop("software"),
    "software": lambda c: c.update(software="the best"),
}  # fmt: skip


def refuted(card, lie):
    """A lie that is well kept: with a checksum."""
    told = copy.deepcopy(card)
    lie(told)
    told["checksum"] = cards.checksum(told)
    return cards.verify(told)


@pytest.mark.parametrize("name", LIES)
def test_a_lie_in_any_part_fails(name):
    assert refuted(made().to_dict(), LIES[name])


@pytest.mark.parametrize("factor", [0.0, 0.5, 1.7])
def test_draws_of_a_fixed_size_cost_at_least_what_poisson_draws_do(factor):
    """dp-accounting has no tight cost of them, but one that they cannot have."""
    card = made("fixed-size").to_dict()
    epsilon, advantage = card["guarantee"]["epsilon"], card["attacker"]["advantage"]
    assert refuted(card, lambda c: c["guarantee"].update(epsilon=factor * epsilon))
    if factor < 1:
        lower = factor * card["curve"][1]["pld"]
        assert any("at least" in problem for problem in refuted(card, lambda c: c["curve"][1].update(pld=lower)))
        assert refuted(card, lambda c: c["attacker"].update(advantage=factor * advantage))


def leaves(value, path=()):
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not parts:
        yield path
    for name, part in parts:
        yield from leaves(part, (*path, name))


def test_no_value_that_follows_from_the_plan_can_be_another(monkeypatch):
    """Each by itself; what they should be is not computed again for each."""
    card = made()
    monkeypatch.setattr(cards, "recomputed", lambda _: [])
    monkeypatch.setattr(cards, "make", lambda *_, **__: card)
    paths = [path for path in leaves(card.to_dict()) if path[0] in ("guarantee", "words", "curve", "attacker")]
    assert len(paths) >= 40 and cards.verify(card.to_dict()) == []
    for path in paths:
        for lie in ("a lie", None, True, 0.97):
            told = card.to_dict() | copy.deepcopy(dict(card.values))
            part = told
            for name in path[:-1]:
                part = part[name]
            part[path[-1]] = lie * part[path[-1]] if lie == 0.97 and type(part[path[-1]]) is float else lie
            assert cards.verify(told), (path, lie)


def test_numbers_in_words_may_be_rounded_otherwise():
    assert cards._alike("epsilon = 0.434, of 2,000", "epsilon = 0.435, of 2,000")
    assert not cards._alike("epsilon = 0.42", "epsilon = 0.435") and not cards._alike("epsilon = ", "epsilon = 0.4")


def test_an_audit_that_concludes_otherwise_fails():
    audited = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FullBatch(size=100), steps=2)
    report = dpscale.audit.audit(audited.calibrate(epsilon=4, delta=1e-5), seed=0)
    card = made(audit=report.to_dict()).to_dict()
    assert refuted(card, lambda c: None) == [] and "FullBatch" not in cards.Card(card).to_html()
    assert report.plan.split(";")[0] in cards.Card(card).to_html()  # which plan it is of
    for change in ({"consistent": False}, {"epsilon_lower": 0.01}, {"p_value": 0.9}, {"false_alarm_rate": 0.5}):
        changed = refuted(card, lambda c, change=change: c["audit"].update(change))
        assert changed == ["What its audit concludes does not follow from what it found."]
    broken = [{**report.to_dict()["checks"][0], "p_value": 1e-12}]
    assert refuted(card, lambda c: c["audit"].update(checks=broken))
    assert refuted(card, lambda c: c.update(audit={"consistent": True}))


def test_what_an_attacker_can_find_is_the_gaussian_curve():
    """Full batches: T releases are one Gaussian of noise σ/√T, whose trade-off is Φ(Φ⁻¹(FPR) + √T/σ)."""
    found = made("full-batch", 16).values["attacker"]
    mu = math.sqrt(16) / 4.0
    assert found["advantage"] == pytest.approx(2 * stats.norm.cdf(mu / 2) - 1, rel=1e-3)
    for row in found["trade_off"]:
        exact = stats.norm.cdf(stats.norm.ppf(row["false_alarms"]) + mu)
        assert exact - 1e-9 <= row["found_at_most"] <= exact + 0.05  # a bound, on a grid


def test_a_run_has_a_card_of_what_it_released(tmp_path):
    books = dpscale.Ledger(tmp_path / "books", epsilon=50, delta=1e-3)
    model = mlp()
    private = dpscale.privatize(
        model, torch.optim.SGD(model.parameters(), lr=0.1), plan(delta=1e-3, noise_multiplier=3.0), ledger=books
    )
    for batch in itertools.islice(private.batches(data()), 3):
        private.step(batch, loss_fn)
    card = private.card(search="none")
    found = card.to_dict()
    assert found["guarantee"]["epsilon"] == private.epsilon() and found["mechanism"]["steps_released"] == 3
    assert found["checks"]["times that the model was checked"] >= 1 and found["search"] == "none"
    assert found["composed"]["epsilon"] > 0 and any("Ledger: run" in line for line in found["history"])
    assert "operating system" in found["randomness"] and "SGD" not in found["randomness"]
    card.save(tmp_path / "card.json")
    assert cards.verify(json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))) == []
    for change in ({"epsilon": 0.1}, {"total": 0.1}, {"run": "another"}, {"ledger": "others"}, {"note": "certified"}):
        assert refuted(found, lambda c, change=change: c["composed"].update(change)), change
    assert refuted(found, lambda c: c.update(composed=None))
    seeded = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(delta=1e-3), seed=1)
    assert "whoever knows it" in seeded.card().values["randomness"]


def test_the_page_says_it_and_escapes_what_it_is_given():
    page = made(search="none <b>at all</b>", checks={"looks": 3}).to_html()
    assert "<b>at all</b>" not in page and "none &lt;b&gt;at all" in page
    assert "Privacy card" in page and "looks" in page and "http" not in page


def test_the_command_line_makes_and_verifies_cards(tmp_path):
    made().save(tmp_path / "card.json")
    assert "confirmed" in run("verify", tmp_path / "card.json").stdout
    changed = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    CHANGES["noise"](changed)
    (tmp_path / "card.json").write_text(json.dumps(changed), encoding="utf-8")
    assert "by dp-accounting it is at least" in run("verify", tmp_path / "card.json", code=1).stdout
    assert "was changed since it was made" in refuse("card", tmp_path / "card.json")
    twice = (tmp_path / "card.json").read_text(encoding="utf-8").replace('"epsilon":', '"epsilon": 0.1, "epsilon":', 1)
    (tmp_path / "twice.json").write_text(twice, encoding="utf-8")
    assert "it has two values of one name" in refuse("verify", tmp_path / "twice.json")
    (tmp_path / "card.html").write_bytes(b"<p>\xff</p>")
    assert "card.html is no card: it is not JSON" in refuse("verify", tmp_path / "card.html")


# -- Runs that are over ----------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[1] / "results"


def test_a_record_of_the_lab_has_a_card(tmp_path):
    words = ["card", RESULTS / "mnist.jsonl", "--method", "dp-psasc", "--seed", "0"]
    told = run(*words, "--out", tmp_path / "card.html", "--out", tmp_path / "card.json").stdout
    found = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    (record,) = [
        r for r in records.load(RESULTS / "mnist.jsonl") if (r.method, r.seed, r.role) == ("dp-psasc", 0, "final")
    ]
    assert found["guarantee"]["epsilon"] == pytest.approx(record.epsilon, rel=1e-6) and "epsilon 3" in told
    assert found["mechanism"]["noise_multiplier"] == record.noise_multiplier
    assert "whoever knows it" in found["randomness"] and "not counted" in found["search"]
    assert found["software"]["torch"] == record.versions["torch"] and found["software"]["commit"] == "unknown"
    assert run("verify", tmp_path / "card.json").stdout.endswith("epsilon is confirmed.\n")
    assert "<h1>Privacy card</h1>" in (tmp_path / "card.html").read_text(encoding="utf-8")


def test_a_card_is_of_one_private_run(tmp_path):
    assert "such runs: --method" in refuse("card", RESULTS / "mnist.jsonl")
    assert "0 such runs: none that is private" in refuse("card", RESULTS / "mnist.jsonl", "--method", "non-private")
    assert "There is no" in refuse("card", tmp_path / "nothing")
    (tmp_path / "model.pt").write_bytes(b"x" * 100)
    assert "damaged, or no checkpoint" in refuse("card", tmp_path / "model.pt")
    assert "a .html or .json file" in refuse("card", RESULTS / "mnist.jsonl", "--method", "dp-sgd", "--seed", "0",
                                             "--out", tmp_path / "card.pdf")  # fmt: skip
    model = mlp()
    free = dpscale.privatize(
        model, torch.optim.SGD(model.parameters()), plan(noise_multiplier=None, unsafe_no_noise=True)
    )
    with pytest.raises(ValueError, match="must be one with noise"):
        free.card(1e-5)


def begun(path, **changes):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dpscale.privatize(model, optimizer, plan(delta=1e-3, noise_multiplier=3.0), **changes)


def test_the_card_of_a_checkpoint_is_that_of_its_run(tmp_path):
    first = begun(tmp_path)
    for batch in itertools.islice(first.batches(data()), 2):
        first.step(batch, loss_fn)
    first.save(tmp_path / "run.ckpt")
    again = begun(tmp_path)
    again.load(tmp_path / "run.ckpt")
    for batch in itertools.islice(again.batches(data()), 1):
        again.step(batch, loss_fn)
    again.save(tmp_path / "run.ckpt")
    found = json.loads(run("card", tmp_path, "--search", "none", "--json").stdout)
    assert found == again.card(search="none").to_dict() and found["mechanism"]["steps_released"] == 3
    assert "Resumed: once" in found["history"][0] and cards.verify(found) == []


def test_a_booked_checkpoint_is_charged_as_its_ledger_says(tmp_path):
    books = dpscale.Ledger(tmp_path / "books", epsilon=50, delta=1e-3)
    private = begun(tmp_path, ledger=books, run="one")
    for number, batch in enumerate(private.batches(data())):
        private.step(batch, loss_fn)
        if number == 1:
            private.save(tmp_path / "run.ckpt")  # which knows of two steps
    private.close()
    assert "booked in a ledger as run 'one'. Pass it: --ledger" in refuse("card", tmp_path / "run.ckpt")
    words = ["card", tmp_path / "run.ckpt", "--ledger", tmp_path / "books", "--json"]
    found = json.loads(run(*words).stdout)
    assert found["mechanism"]["steps_released"] == 5 and found["composed"]["run"] == "one"
    assert found["composed"]["epsilon"] == books.spent().epsilon
    dpscale.Ledger(tmp_path / "others", epsilon=50, delta=1e-3)
    assert "has no run 'one'" in refuse("card", tmp_path / "run.ckpt", "--ledger", tmp_path / "others")
