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
from dpscale import card as cards
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
