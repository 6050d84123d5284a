"""``dpscale ledger``, and ``--ledger`` of the commands that train."""

import json

import pytest

from dpscale.booking import open_run
from dpscale.lab.ledgers import spent_over_time
from dpscale.ledger import Ledger, seal

from .helpers import plan, refuse, run


@pytest.fixture
def path(tmp_path):
    return tmp_path / "patients.ledger"


PLAN = plan(steps=20)  # a stretch is one step then


def book(path, **runs):
    """A ledger, and its runs, which took so many steps and go on."""
    books = Ledger(path, epsilon=30, delta=1e-3)
    parts = [open_run(books, name, PLAN) for name in runs]
    for part, steps in zip(parts, runs.values(), strict=True):
        for step in range(1, steps + 1):
            part.reserve(step)
    return books, parts


def test_a_ledger_is_created_once(path):
    assert run("ledger", "create", path, "--epsilon", 3, "--delta", 1e-5).stdout.endswith("epsilon 3 at delta 1e-05\n")
    assert (Ledger(path).epsilon, Ledger(path).delta) == (3, 1e-5)
    assert refuse("ledger", "create", path, "--epsilon", 4, "--delta", 1e-5).endswith(f"dpscale ledger show {path}")
    assert "must be a finite number > 0. Got -1.0" in refuse(
        "ledger", "create", f"{path}2", "--epsilon=-1", "--delta=0.1"
    )
    made = json.loads(run("ledger", "create", f"{path}3", "--epsilon", 3, "--delta", 1e-5, "--json").stdout)
    assert made == {"path": f"{path}3", "epsilon": 3, "delta": 1e-5}


def test_show_says_what_was_spent_and_by_whom(path):
    books, (first, second) = book(path, first=7, second=3)
    first.close()
    first = open_run(books, "first", PLAN)
    first.resume(5, 0)
    first.reserve(6)
    first.close()
    text = " ".join(run("ledger", "show", path).stdout.split())
    found = json.loads(run("ledger", "show", path, "--json").stdout)
    assert "first poisson, 1 8 of 20 in 8 2 0" in text and "second (going on) poisson, 1 3 of 20 in 3 0 0" in text
    assert f"Spent: epsilon {found['spent']:.4g} of 30 at delta 0.001 (add-remove; composed tightly" in text
    assert found["spent"] == books.spent().epsilon == PLAN.epsilon(1e-3, steps=11)
    assert [(r["run"], r["charged"], r["taken_again"], r["live"]) for r in found["runs"]] == [
        ("first", 8, 2, False), ("second", 3, 0, True),
    ]  # fmt: skip
    assert found["runs"][0]["epsilon"] == PLAN.epsilon(1e-3, steps=8)
    second.close()


def test_a_crash_is_shown(path):
    books, (part,) = book(path, first=3)
    part.close()
    with books.writing() as db:  # as a process that was killed leaves it
        db.execute("UPDATE stretches SET state = 'reserved', last = 9 WHERE last = 3")
        seal(db, 1)
    text = run("ledger", "show", path).stdout
    assert "7 steps were charged after crashes: they were reserved, and perhaps not all released." in text
    (row,) = json.loads(run("ledger", "show", path, "--json").stdout)["runs"]
    assert (row["charged"], row["charged_after_crash"], row["live"]) == (9, 7, False)


@pytest.mark.parametrize("runs", [{}, {"first": 3}])
def test_a_picture_is_drawn(path, tmp_path, runs):
    book(path, **runs)
    picture = tmp_path / "spent.png"
    assert f"Picture: {picture}" in run("ledger", "show", path, "--picture", picture).stdout
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_picture_shows_what_was_spent_at_each_moment(path):
    books, _ = book(path, first=3, second=2)
    with books.writing() as db:
        for number in range(1, 6):
            db.execute("UPDATE stretches SET begun = ? WHERE id = ?", (f"2026-01-0{number}T00:00:00+00:00", number))
        seal(db, 1)
        seal(db, 2)
    moments, spent = spent_over_time(books, books.runs())
    assert [moment.day for moment in moments] == [1, 2, 3, 4, 5]
    assert spent == [PLAN.epsilon(1e-3, steps=steps) for steps in range(1, 6)]


def test_export_has_every_stretch(path):
    _, parts = book(path, first=3, second=2)
    for part in parts:
        part.close()
    found = json.loads(run("ledger", "export", path).stdout)
    assert found["epsilon"] == 30 and found["spent"]["adjacency"] == "add-remove"
    assert [(r["name"], r["charged"], r["plan"]["steps"]) for r in found["runs"]] == [
        ("first", 3, 20),
        ("second", 2, 20),
    ]
    stretches = found["runs"][1]["stretches"]
    assert stretches[-1]["last"] == 2 and {s["state"] for s in stretches} == {"confirmed"}


@pytest.mark.parametrize("command", ["show", "export"])
def test_what_is_no_ledger_is_one_line(command, path):
    assert f"There is no ledger {path}. dpscale ledger create" in refuse("ledger", command, path)
    assert not path.exists()
    path.write_bytes(b"no ledger" * 1000)
    assert "is damaged, or no ledger" in refuse("ledger", command, path)


SMALL = ("--epochs", 1, "--train-size", 200, "--batch", 100)


def test_train_books_its_run_once(path, tmp_path):
    Ledger(path, epsilon=5, delta=1e-4)
    for _ in range(2):  # the second time it has a record
        run("train", "digits", *SMALL, "--method", "dp-sgd", "--ledger", path, "--out", tmp_path / "runs")
    (booked,) = Ledger(path).runs()
    assert booked.name.startswith("digits, dp-sgd, seed 0, final, ") and booked.charged == booked.plan["steps"] == 2
    more = ("--method", "dp-psasc", "--epsilon", 5, "--ledger", path, "--out", tmp_path / "runs")
    assert "does not fit into the budget: with the 1 other runs" in refuse("train", "digits", *SMALL, *more)


def test_compare_books_every_try_and_every_run(path, tmp_path):
    Ledger(path, epsilon=100, delta=1e-4)
    told = ("compare", "digits", *SMALL, "--ledger", path, "--out", tmp_path / "runs", "--seeds", 2, "--workers", 1)
    run(*told, "--methods", "dp-sgd", "grid=[1, 2]", "gamma1s=[1]", "search_seeds=1", "widen=0")
    roles = [booked.name.split(", ")[3] for booked in Ledger(path).runs()]
    assert sorted(roles) == ["final", "final", "search", "search"]
    assert all(booked.charged == booked.plan["steps"] and not booked.live for booked in Ledger(path).runs())


def test_a_method_without_noise_has_no_price(path, tmp_path):
    Ledger(path, epsilon=5, delta=1e-4)
    told = refuse("compare", "digits", *SMALL, "--ledger", path, "--out", tmp_path / "runs")
    assert "Got 'non-private' instead. Without noise their price is infinite." in told
    assert "given: there is no ledger" in refuse("train", "digits", "--ledger", f"{path}2", "--out", tmp_path / "runs")
