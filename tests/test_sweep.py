"""experiments/sweep.py: every cell searches its rate, the advised one is among them, and none is run twice."""

import json

import pytest

import sweep
from dpscale.lab.data import load


@pytest.fixture
def rates(monkeypatch):
    """Training is left out: the accuracy of a rate is known, and each that is tried is noted."""
    tried = []

    def accuracy(name, split, count, plan, rate, device):
        tried.append(rate)
        return 0.9 - abs(rate - 8.0) / 100

    monkeypatch.setattr(sweep, "accuracy", accuracy)
    monkeypatch.setitem(sweep.TASKS, "digits", sweep.TASKS["digits"].__class__(
        lambda: load("digits"), sweep.digits_cnn, 3.0, (64, 256), (2,)
    ))  # fmt: skip
    return tried


def test_cells_are_run_once_and_the_best_rate_is_inside(rates, tmp_path):
    out = tmp_path / "sweep.json"
    sweep.sweep(["digits"], out, 1)
    rows = json.loads(out.read_text())["digits"]
    assert [row["advised"] for row in rows] == [True, False, False]
    for row in rows:
        tried = [float(rate) for rate in row["tries"]]
        assert tried[0] < row["rate"] * 0.999 and row["rate"] * 1.001 < tried[-1] and row["accuracy"] > 0.85
    rates.clear()
    sweep.sweep(["digits"], out, 1)
    assert not rates
    sweep.picture(out, tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000


def test_a_run_is_private_and_learns():
    (data,) = sweep.splits_of("digits", 1, "cpu")
    assert sweep.accuracy("digits", 0, 1, sweep.planned(data.size, 8.0, 256, 12), 1.5, "cpu") > 0.5


def test_processes_share_the_runs_of_a_cell_with_the_same_result(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep, "grid", lambda task, size: iter([(512, 2, True)]))
    for processes, name in ((1, "one.json"), (2, "two.json")):
        sweep.sweep(["digits"], tmp_path / name, 2, processes=processes)
    one, two = (json.loads((tmp_path / name).read_text())["digits"][0] for name in ("one.json", "two.json"))
    assert one["tries"] == two["tries"] and len(one["each"]) == 2
