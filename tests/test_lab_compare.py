"""Records, comparisons, and what can be said of them."""

import contextlib
import dataclasses
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import time
import weakref
from concurrent.futures import Executor, Future
from concurrent.futures.process import BrokenProcessPool
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats as scipy_stats

from dpscale.engine.phases import listening
from dpscale.lab import compare, paper, records, report, runner, stats, workers
from dpscale.lab.presets import METHODS, SEARCH_SEED, Choice, methods

from .lab_runs import NAMED, TINY, experiment, job

# -- records ---------------------------------------------------------------------------------------------------


def test_records_round_trip_and_say_where_they_come_from(found, tmp_path):
    path = found[0].save(tmp_path)
    assert records.read(path) == found[0] and records.load(tmp_path) == [found[0]]
    assert list(tmp_path.iterdir()) == [path]
    for record in found:
        assert set(record.versions) >= {"python", "torch", "dpscale", "dp-accounting", "platform", "cpu"}
        assert record.command == "tiny" and (record.commit is None or re.match(r"[0-9a-f]{40}", record.commit))
        assert "not counted in epsilon" in record.search["note"]
        assert [t["choice"]["rate"] for t in record.search["tries"]] == list(TINY.grid)


def test_an_empty_or_missing_folder_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"has no records\. Run 'dpscale compare digits --out"):
        records.load(tmp_path)
    with pytest.raises(ValueError, match="There is no folder"):
        records.load(tmp_path / "none")


BROKEN = {
    "{": "Expecting property name", "[]": "list indices", '{"format": 0}': "its format is not 2",
    "accuracy": "'accuracy' parameter of Record must be less than or equal to 1", "\udcff": "can't decode byte",
}  # fmt: skip


@pytest.mark.parametrize("text", BROKEN)
def test_a_broken_record_is_named_with_the_next_action_before_anything_is_trained(tmp_path, found, text, monkeypatch):
    monkeypatch.setattr(runner, "run", lambda *_: pytest.fail("the work began"))
    whole = found[0].to_dict()
    content = (json.dumps({**whole, "accuracy": 200}) if text == "accuracy" else text).encode(
        "utf-8", "surrogateescape"
    )
    broken = tmp_path / "search" / "dp-sgd-seed0-broken.json"
    broken.parent.mkdir()
    broken.write_bytes(content)
    told = rf"broken\.json is no record.*{BROKEN[text]}.*Delete it and run the same command again"
    with pytest.raises(ValueError, match=told):
        compare.compare(TINY, methods("dp-sgd"), [0], tmp_path, at_once=1)
    broken.unlink()
    (tmp_path / "broken.jsonl").write_bytes(json.dumps(whole).encode() + b"\n" + content + b"\n")
    told = rf"Line 2 of .*broken\.jsonl is no record.*{BROKEN[text]}.*Delete it and pack the records again"
    with pytest.raises(ValueError, match=told):
        records.load(tmp_path)


def by_key(found):
    return sorted(found, key=lambda record: record.key)


def test_packed_records_are_the_records(folder, found, tmp_path):
    path = tmp_path / "results" / "digits.jsonl"
    count = records.pack(folder, path)
    packed = records.load(path)
    assert by_key(packed) == by_key(records.load(folder)) and count == len(packed) == 20
    places = [(r.role, r.method, r.seed, r.choice["rate"]) for r in packed]
    assert places == sorted(places) and {r.role for r in packed} == {"final", "search"}
    assert records.load(path.parent) == packed and len(path.read_text(encoding="utf-8").splitlines()) == 20
    assert stats.select(packed) == stats.select(records.load(folder))  # those of the search are no other settings
    at(found[0], 0.123).save(tmp_path / "other")
    assert records.pack(tmp_path / "other", path) == 21 == len(records.load(path))  # what is packed stays
    assert records.pack(folder, path) == 21


def test_a_search_is_packed_before_any_run_has_followed(folder, tmp_path):
    under_way, results = tmp_path / "runs" / "digits", tmp_path / "results"
    shutil.copytree(folder / "search", under_way / "search")
    records.pack(under_way, results / "digits.jsonl")
    (one,) = paper.load(results)
    assert one.preset == "digits" and not one.records and not one.rows
    for path in (results / "digits.jsonl", tmp_path / "digits.jsonl"):
        records.pack(folder, path)
    assert (tmp_path / "digits.jsonl").read_bytes() == (results / "digits.jsonl").read_bytes()  # whatever came first
    assert records.pack(tmp_path / "empty", tmp_path / "none.jsonl") == 0 and not (tmp_path / "none.jsonl").exists()


def test_records_without_a_commit_are_not_packed(folder, found, tmp_path):
    found[0].replace(commit=None).save(tmp_path / "runs")
    with pytest.raises(ValueError, match=r"1 records in .*runs name no commit.*Run them from a git checkout"):
        records.pack(tmp_path / "runs", tmp_path / "digits.jsonl")
    old = found[0].replace(commit=None).to_dict()
    (tmp_path / "digits.jsonl").write_text(json.dumps(old) + "\n", encoding="utf-8")
    assert records.pack(folder, tmp_path / "digits.jsonl") == 20  # the new one takes the place of the old one


def key(config=TINY, role="final", method="dp-sgd", seed=0, version="1", **choice):
    return records.key(config.to_dict(), role, method, seed, {"rate": 0.1, **choice}, version)


def test_other_settings_are_run_anew():
    others = (
        key(TINY.replace(epochs=3)), key(TINY.replace(epsilon=2.0)), key(TINY.replace(encoder="resnet50-imagenet")),
        key(TINY.replace(model="paper_cnn")), key(TINY.replace(diagnostics=False)), key(TINY.replace(average=0.9)),
        key(TINY.replace(schedule="cosine")), key(rate=0.2), key(gamma1=0.3), key(seed=1), key(method="auto-s"),
        key(version="2"), key(role="search"), key(TINY.replace(held_out=0.3), role="search"),  # on other samples
        key(TINY.replace(search_epochs=1), role="search"),
    )  # fmt: skip
    assert len({key(), *others}) == len(others) + 1


def test_how_a_choice_was_searched_is_no_part_of_a_run():
    changes = ({"grid": (9.0,)}, {"gamma1s": (0.5,)}, {"inner": ((1, 0.5),)}, {"note": "x"}, {"held_out": 0.3},
               {"search_epochs": 1}, {"micro_batch": 16})  # fmt: skip
    assert {key(TINY.at_rate(0.1)), *(key(TINY.replace(**change)) for change in changes)} == {key()}
    later = ("average", "schedule", "views", "augment", "standardize")  # older records have none of these
    before = {n: v for n, v in TINY.to_dict().items() if n not in later}
    assert records.key(before, "final", "dp-sgd", 0, {"rate": 0.1}, "1") == key()


def test_numerics_of_another_version_are_other_runs(found):
    newer = [r.replace(numerics=2, created="2999") for r in found]
    assert not {r.key for r in newer} & {r.key for r in found}
    assert stats.select([*found, *newer])[0] == newer and stats.select(found)[0] == found


# -- comparison ------------------------------------------------------------------------------------------------


def record_of(job, like):
    """The record of a run that was not done."""
    asked = {"config": job.config.to_dict(), "method": job.method, "role": job.role, "seed": job.seed}
    return like.replace(**asked, repeat=job.repeat, choice=job.choice.to_dict(), search=job.search)


@pytest.fixture
def pretend(monkeypatch, found):
    """Runs are not done: their accuracy is a function of the job. What was asked for."""

    def begin(accuracy=lambda job: 0.5, **values):
        ran = []

        def run(job, *_):
            ran.append(job)
            return record_of(job, found[2]).replace(accuracy=accuracy(job), **values)

        monkeypatch.setattr(runner, "calibrate", lambda config: 1.0)
        monkeypatch.setattr(runner, "run", run)
        return ran

    return begin


def test_a_second_comparison_repeats_nothing(folder, pretend, tmp_path):
    ran, named = pretend(), methods("dp-sgd,dp-psasc")
    records.pack(folder, tmp_path / "digits.jsonl")
    for out in (folder, tmp_path / "digits"):  # or what is packed beside it
        again = compare.compare(TINY, named, [0, 1], out, at_once=1, deadline=-1.0)
        assert [(r.method, r.seed) for r in again.records] == [(m.name, k) for m in named for k in (0, 1)]
        assert again.left == 0 and not ran


def test_a_single_run_that_is_packed_beside_its_folder_is_not_repeated(tmp_path, pretend):
    ran, config = pretend(), TINY.replace(epochs=1, diagnostics=False)
    done = compare.train(config, METHODS["dp-sgd"], 0, tmp_path / "digits")
    records.pack(tmp_path / "digits", tmp_path / "digits.jsonl")
    shutil.rmtree(tmp_path / "digits")
    assert compare.train(config, METHODS["dp-sgd"], 0, tmp_path / "digits") == done and len(ran) == 1


def test_a_try_may_end_early_with_the_noise_of_the_whole_run(tmp_path):
    config = TINY.replace(epochs=3, search_epochs=1, grid=(0.5,), search_seeds=1, diagnostics=False)
    done = compare.compare(config, methods("dp-sgd"), [0], tmp_path, at_once=1).records[0]
    (tried,) = records.load(tmp_path / "search")
    assert (tried.curves["epoch"], done.curves["epoch"]) == ([1], [1, 2, 3]) and done.search["epochs"] == 1
    assert tried.noise_multiplier == done.noise_multiplier == pytest.approx(runner.calibrate(config))
    assert config.replace(search_epochs=9).trained("search") == 3  # never longer than the run itself


def test_a_report_has_what_is_packed_and_what_was_run_since(folder, tmp_path, pretend):
    """Records packed beside a folder and loose ones in it are one experiment, and none is counted twice."""
    pretend()
    records.pack(folder, tmp_path / "digits.jsonl")
    out = tmp_path / "digits"
    since = compare.compare(TINY, methods("dp-sgd"), [0, 1, 2], out, at_once=1).records
    assert [path.name.split("-seed")[1][0] for path in out.glob("*.json")] == ["2"]
    since[0].save(out)  # now in both places
    (one,) = paper.load(tmp_path)
    assert sorted(r.seed for r in one.records if r.method == "dp-sgd") == [0, 1, 2] and len(one.records) == 9
    assert records.pack(out, tmp_path / "again.jsonl") == 21


@pytest.mark.parametrize(("runs", "final"), [(1, 0), (5, 1)])
def test_after_a_deadline_the_same_call_runs_the_rest_and_nothing_twice(tmp_path, monkeypatch, pretend, runs, final):
    config, named = TINY.replace(epochs=1, diagnostics=False, search_seeds=1), methods("dp-sgd,psac-r-over-s")
    ran = pretend()
    monkeypatch.setattr(compare.Queue, "pace", 0.0)  # how long a run takes is not known
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: len(ran)))  # a run takes a second
    cut = compare.compare(config, named, [0], tmp_path, at_once=1, deadline=runs)
    assert len(ran) == runs and (len(cut.records), cut.left) == (final, 6 - runs)
    whole = compare.compare(config, named, [0], tmp_path, at_once=1)
    assert len(ran) == 6 and len({(j.method, j.role, j.choice) for j in ran}) == 6
    assert whole.left == 0 and [r.method for r in whole.records] == ["dp-sgd", "psac-r-over-s"]


def test_long_runs_are_begun_first_seed_by_seed(tmp_path, pretend):
    """Else the last of many runs would be one of several gradients a step, with nothing left beside it."""
    ran, named = pretend(), methods("dp-sgd,dp-psasc,dp-psasc-star")
    config = TINY.replace(inner=((2, 0.5), (1, 0.5)), search_seeds=1)
    done = compare.compare(config, named, [0, 1], tmp_path, at_once=1).records
    tries = [(job.points, job.method) for job in ran if job.role == "search"]
    final = [(job.seed, job.method) for job in ran if job.role == "final"]
    assert tries == [(3, "dp-psasc-star"), (2, "dp-psasc-star"), *[(1, "dp-sgd")] * 2, *[(1, "dp-psasc")] * 2]
    assert final == [(seed, name) for seed in (0, 1) for name in ("dp-psasc-star", "dp-sgd", "dp-psasc")]
    assert [record.method for record in done][::2] == ["dp-sgd", "dp-psasc", "dp-psasc-star"]


def test_the_search_treats_methods_alike_and_picks_the_best(folder, found):
    tried = records.load(folder / "search")
    assert all(r.role == "search" and r.epsilon is None and r.diagnostics is None for r in tried)
    for method in ("non-private", "dp-sgd", "dp-psasc"):
        runs = {rate: [r for r in tried if (r.method, r.choice["rate"]) == (method, rate)] for rate in TINY.grid}
        assert all({r.seed for r in each} == {SEARCH_SEED, SEARCH_SEED + 1} for each in runs.values())
        mean = {rate: np.mean([r.accuracy for r in each]) for rate, each in runs.items()}
        for record in (r for r in found if r.method == method):
            assert record.choice["rate"] == max(mean, key=mean.get)
            assert {t["choice"]["rate"]: t["accuracy"] for t in record.search["tries"]} == pytest.approx(mean)
    assert not [r for r in tried if r.method.startswith("psac-")]


def test_the_grid_grows_for_all_methods_until_the_best_is_inside(tmp_path, pretend):
    best = {"dp-sgd": 3.2, "dp-psasc": 0.1, "auto-s": 0.1}
    ran = pretend(lambda job: 1 / (1 + abs(np.log(job.choice.rate / best[job.method]))))
    config = TINY.replace(grid=(0.1, 0.4), widen=4, diagnostics=False)
    done = compare.compare(config, methods("dp-sgd,auto-s,dp-psasc"), [0], tmp_path, at_once=1)
    rates = {r.method: r.choice["rate"] for r in done.records}
    assert done.left == 0 and rates == {"dp-sgd": 1.6, "dp-psasc": 0.1, "auto-s": 0.1}
    tried = {(job.method, job.choice.rate) for job in ran if job.role == "search"}
    assert tried == {(name, rate) for name in best for rate in (0.1, 0.4, 0.025, 1.6, 6.4)}
    rows = stats.summarize(done.records)
    assert stats.alike(rows) and all(row.end is None for row in rows)
    capped = compare.compare(config.replace(widen=1), methods("dp-sgd"), [0], tmp_path / "capped", at_once=1)
    told = stats.verdict(stats.summarize(capped.records))
    assert capped.records[0].choice["rate"] == 1.6 and "a larger one might be better" in told


@pytest.mark.parametrize(("best", "left_out"), [(0.1, {"psac-lr-over-s"}), (0.4, set())])
def test_a_control_that_is_another_method_is_not_run(tmp_path, pretend, found, best, left_out):
    """PSAC at lr/s takes the steps of DP-PSAC where both chose one rate: to compare both would count it twice."""
    rates = {"dp-psac": best, "dp-psasc": 0.1}
    ran = pretend(lambda job: float(job.choice.rate == rates.get(job.method, 0.1)))
    config = TINY.replace(grid=(0.1, 0.4), search_seeds=1, diagnostics=False)
    named = methods("dp-psac,dp-psasc,psac-lr-over-s,psac-r-over-s")
    done = compare.compare(config, named, [0, 1], tmp_path, at_once=1)
    assert done.left == 0 and {one.name for one in named} - {r.method for r in done.records} == left_out
    same = {(str(METHODS[j.method].scaling(config)), j.learning_rate) for j in ran if j.role == "final"}
    assert len(same) == len({r.method for r in done.records})
    records_ = [r.replace(title=METHODS[r.method].title, scaling=None) for r in done.records]
    assert ("DP-PSAC stands for PSAC at lr/s" in report.page([experiment(*records_)])) == bool(left_out)


def test_the_best_tries_get_the_other_seeds(tmp_path, pretend):
    """The first seed favours 0.8; on average 0.4 is better. 3.2 is out after the first seed."""
    first, others = {0.1: 0.3, 0.2: 0.5, 0.4: 0.6, 0.8: 0.7, 3.2: 0.1}, {0.2: 0.5, 0.4: 0.9, 0.8: 0.5}
    ran = pretend(lambda job: 0.5 if job.role == "final" else
                  (first if job.seed == SEARCH_SEED else others)[job.choice.rate])  # fmt: skip
    config = TINY.replace(grid=tuple(first), search_seeds=3, diagnostics=False)
    (record,) = compare.compare(config, methods("dp-sgd"), [0], tmp_path, at_once=1).records
    tried = [(job.choice.rate, job.seed - SEARCH_SEED) for job in ran if job.role == "search"]
    assert sorted(tried[:5]) == [(rate, 0) for rate in first]
    assert sorted(tried[5:]) == [(rate, k) for rate in others for k in (1, 2)]
    seeds = {t["choice"]["rate"]: t["seeds"] for t in record.search["tries"]}
    assert record.choice["rate"] == 0.4 and seeds == {0.1: 1, 0.2: 3, 0.4: 3, 0.8: 3, 3.2: 1}


def test_what_a_budget_cannot_end_is_not_begun(tmp_path, monkeypatch, pretend):
    """The first run tells how long one takes: with 100 s left, runs of 40 s are begun twice, and one of 120 s never."""
    ran = pretend(seconds=40.0, cold_seconds=0.0)
    monkeypatch.setattr(compare, "time", SimpleNamespace(monotonic=lambda: 40.0 * len(ran)))
    config = TINY.replace(tune=False, diagnostics=False, epochs=1, K0=2)
    names = ("dp-sgd", "dp-psasc-star")  # which takes three gradients a step
    monkeypatch.setattr(compare, "timed", lambda job: 40.0)
    queue = compare.Queue(tmp_path, deadline=140.0)
    jobs = [job(n, config=config, seed=k, choice=config.given(METHODS[n])) for n in names for k in range(4)]
    assert [r.seed for r in queue.run(jobs, workers.Here())] == [0, 1, 2] and len(queue.left) == 5
    planned = compare.compare(config, methods(",".join(names)), range(4), tmp_path, at_once=1, deadline=-1.0)
    assert planned.left == 8 - 3 and planned.pace == pytest.approx(40.0)
    assert compare.minutes(config, [], planned, 2) == pytest.approx((1 + 4 * 3) * 40 / 2 / 60)


@pytest.mark.parametrize(("seconds", "begun"), [(70.0, 1), (130.0, 0)])
def test_before_any_run_has_told_how_long_it_takes_steps_are_timed(tmp_path, monkeypatch, pretend, seconds, begun):
    """Two minutes are left, and a run by itself would take longer, or not."""
    ran, config = pretend(seconds=seconds, cold_seconds=0.0), TINY.replace(tune=False, diagnostics=False, epochs=1)
    clock = itertools.count(0.0, seconds / runner.planned(config).steps)
    now = SimpleNamespace(monotonic=lambda: seconds * len(ran), perf_counter=lambda: next(clock))
    monkeypatch.setattr(compare, "time", now)
    queue = compare.Queue(tmp_path, deadline=120.0)
    queue.run([job("dp-sgd", config=config, seed=k, choice=config.given(METHODS["dp-sgd"])) for k in (0, 1)],
              workers.Here())  # fmt: skip
    assert len(ran) == begun and len(queue.left) == 2 - begun


def test_a_repeated_run_is_no_other_seed(folder, found, tmp_path, pretend):
    out, ran = shutil.copytree(folder, tmp_path / "digits"), pretend(lambda job: 0.7)
    done = compare.compare(TINY, methods(NAMED), [0, 1], out, at_once=1, repeats=2)
    assert [(one.method, one.seed, one.repeat) for one in ran] == [("dp-sgd", 0, 1), ("dp-sgd", 0, 2)]
    (one,) = paper.load(out)
    first = next(r.accuracy for r in found if (r.method, r.seed) == ("dp-sgd", 0))
    assert len(done.records) == 8 and one.rows == stats.summarize(found)
    assert one.repeat_noise == (pytest.approx(np.std([first, 0.7, 0.7], ddof=1)), 3)


def test_a_run_on_other_data_is_another_run(tmp_path, monkeypatch, pretend):
    config, ran = TINY.at_rate(0.1), pretend()
    for times in (1, 1, 2):
        if times == 2:
            monkeypatch.setattr(compare, "checksums", lambda name: {"train": "other"})
        compare.compare(config, methods("dp-sgd"), [0], tmp_path, at_once=1)
        assert len(ran) == times


def test_the_tries_of_two_searches_count_together(tmp_path, pretend):
    pretend(lambda job: 0.9 if job.choice.rate == 0.8 else 0.1)
    for grid in ((0.1, 0.8), (0.8, 400.0)):
        config = TINY.replace(grid=grid, search_seeds=1)
        (done,) = compare.compare(config, methods("dp-sgd"), [0], tmp_path, at_once=1).records
    assert done.choice["rate"] == 0.8 and [each["choice"]["rate"] for each in done.search["tries"]] == [0.1, 0.8, 400.0]
    assert "might be better" not in stats.verdict(stats.summarize([done]))


# -- several runs at once --------------------------------------------------------------------------------------


@pytest.fixture
def jobs(found):
    """The jobs of the records."""
    return [job(one.method, seed=one.seed, choice=Choice(**one.choice)) for one in found]


class Later:
    """A pool whose runs are done when somebody waits for them, in the order that they were submitted in."""

    def __init__(self, monkeypatch):
        self.under_way, self.most = [], 0
        monkeypatch.setattr(compare, "wait", self.wait)

    def submit(self, function, *args):
        self.under_way.append((Future(), function, args))
        self.most = max(self.most, len(self.under_way))
        return self.under_way[-1][0]

    def wait(self, futures, return_when):
        future, function, args = self.under_way.pop(0)
        try:
            future.set_result(function(*args))
        except Exception as error:
            future.set_exception(error)
        return SimpleNamespace(done={future})


def test_two_processes_give_what_one_gives(tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "calibrate", lambda config: 1.0)
    config = TINY.at_rate(0.1).replace(epochs=1)
    one, two = (compare.compare(config, methods("dp-sgd"), [0, 1], tmp_path / str(n), at_once=n) for n in (1, 2))
    assert [r.curves for r in one.records] == [r.curves for r in two.records]


def test_what_another_process_has_recorded_meanwhile_is_not_run_again(jobs, folder, found, tmp_path, monkeypatch):
    begun, told = [], []

    def run(job, *_):
        begun.append(job)
        for record in found:  # as if another process had gone through all of them by now
            record.save(tmp_path)
        return found[0]

    monkeypatch.setattr(runner, "run", run)
    queue = compare.Queue(tmp_path, workers=2, on_event=told.append)
    assert len(queue.run(jobs, workers.Here())) == len(jobs) > 2 and len(begun) == 1
    assert queue.done == sum(now.record is not None for now in told) == len(jobs)


CLAIM = """
import sys
from filelock import FileLock
with FileLock(sys.argv[1]):
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("dies", [False, True])
def test_a_run_that_another_process_has_under_way_is_waited_for(dies, jobs, found, tmp_path, monkeypatch, pretend):
    """It comes last. Its record is taken when it is there; if the other process dies without one, it is done here."""
    ran, looks = pretend(), []
    place = tmp_path / ".claims" / f"{compare.key_of(jobs[0])}.lock"
    place.parent.mkdir()
    command = [sys.executable, "-c", CLAIM, str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "there\n"

        def sleep(seconds):
            looks.append(len(ran))
            if len(looks) == 3:
                if not dies:
                    found[0].save(tmp_path)
                other.kill()
                other.wait()

        monkeypatch.setattr(compare.time, "sleep", sleep)
        done = compare.Queue(tmp_path).run(jobs, workers.Here())
    assert looks == [0, *[len(jobs) - 1] * 2]  # all others come first
    assert len(ran) == len(jobs) - (not dies) and len(done) == len(jobs) and not (tmp_path / ".claims").exists()


def test_runs_that_do_not_fit_together_go_one_by_one(jobs, tmp_path, monkeypatch, caplog, found):
    pool = Later(monkeypatch)

    def run(job, *_):
        if len(pool.under_way) >= 1:  # another one is there
            raise torch.OutOfMemoryError("no memory")
        return record_of(job, found[0])

    monkeypatch.setattr(runner, "run", run)
    assert len(compare.Queue(tmp_path, workers=3).run(jobs, pool)) == len(jobs) > 3 and pool.most == 3
    assert [m.rpartition(": ")[2] for m in caplog.messages] == ["2", "1"]
    assert len(list(tmp_path.glob("*.json"))) == len(jobs)


def test_an_error_loses_nothing_that_is_under_way(jobs, tmp_path, monkeypatch, found):
    ran = []

    def run(job, *_):
        ran.append(job)
        if len(ran) == 1:
            raise RuntimeError("broken")
        return record_of(job, found[0])

    monkeypatch.setattr(runner, "run", run)
    with pytest.raises(RuntimeError, match="broken"):
        compare.Queue(tmp_path, workers=3).run(jobs, Later(monkeypatch))
    assert len(ran) == 3 < len(jobs)  # the two beside it, and none after it
    assert len(list(tmp_path.glob("*.json"))) == 2


@pytest.mark.parametrize("method", ["dp-sgd", "non-private"])
def test_a_run_that_does_not_fit_alone_is_told(method, tmp_path, monkeypatch):
    """As torch raises it, and as a private step does, which says what its own caller can do."""

    def hungry(config):
        return lambda model, batch: model(batch[0]).sum() + torch.empty(2**60)  # more than any machine has

    monkeypatch.setattr(runner, "_losses_of", hungry)
    with pytest.raises(compare.NoMemory, match=r"not enough memory for this run\. .*micro_batch=16"):
        compare.Queue(tmp_path).run([job(method)], workers.Here())
    assert not list(tmp_path.rglob("*.json"))


def test_memory_is_free_again_after_a_run_that_had_not_enough(monkeypatch, tmp_path):
    freed, alive = [], []

    class Large:
        pass

    def run(job, *_):
        large = Large()
        alive.append(weakref.ref(large))
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(runner, "run", run)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: freed.append(alive[0]() is None))
    with pytest.raises(compare.NoMemory):
        compare.attempt(job("dp-sgd"), tmp_path)
    assert freed == [True]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_ends_the_processes_at_once(error):
    with pytest.raises(error), workers.pool(1, here=False) as pool:
        process = pool.submit(os.getpid).result()
        pool.submit(time.sleep, 600)
        raise error
    assert_ends(process)


PARENT = """
import os, time
from dpscale.lab import workers

if __name__ == "__main__":
    with workers.pool(1, here=False) as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        pool.submit(time.sleep, 600).result()
"""


@pytest.mark.parametrize("end", ["kill", "terminate"])
def test_processes_end_with_the_one_that_began_them_however_it_ends(tmp_path, end):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        process = int(parent.stdout.readline())
        getattr(parent, end)()
    assert_ends(process)


def assert_ends(process):
    for _ in range(2400):  # two minutes: less than it sleeps
        try:
            os.kill(process, 0)
        except ProcessLookupError:
            return
        time.sleep(0.05)
    raise AssertionError("it is still there")


def test_a_process_that_was_ended_from_outside_is_told_in_a_line(jobs, tmp_path):
    class Broken(Executor):
        def submit(self, *_):
            failed = Future()
            failed.set_exception(BrokenProcessPool("A process in the process pool was terminated abruptly"))
            return failed

    with pytest.raises(ValueError, match=r"ended from outside\. Run the same command again, with fewer --workers"):
        compare.Queue(tmp_path, workers=2).run(jobs, Broken())


def test_a_step_is_compiled_once_for_all_runs_that_take_it():
    star = [job("dp-psasc-star", choice=Choice(rate=0.1, K0=K0, gamma0=g)) for K0, g in ((1, 0.5), (1, 0.9), (2, 0.9))]
    jobs = [
        *star,  # coefficients are no part of a step
        *(job(name) for name in METHODS if name not in ("non-private", "dp-psasc-star")),
        job("dp-sgd", role="search", choice=Choice(rate=0.3, gamma1=0.3)),  # another rate and momentum, the same step
    ]  # fmt: skip
    kinds = {workers.step_of(one) for one in jobs}
    assert sorted(points for _, points in kinds) == [1, 1, 1, 2, 3]
    assert len({formula for formula, _ in kinds}) == 3  # all of PSAC and PSASC share one


def test_compilations_go_side_by_side_and_a_failure_is_told(monkeypatch, caplog):
    asked = []

    @contextlib.contextmanager
    def pool(*places, here):
        asked.append(places)
        yield SimpleNamespace(submit=submit)

    def submit(function, one):
        assert function is runner.rehearse
        asked.append(one.method)
        done = Future()
        done.set_exception(RuntimeError("no memory"))
        return done

    monkeypatch.setattr(workers, "pool", pool)
    monkeypatch.setattr(workers, "_room", lambda config: 100)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 16)
    told = []
    with listening(told.append):
        workers.compile_ahead([job("dp-sgd"), job("dp-psac"), job("dp-psac", seed=7)])
        workers.compile_ahead([])
    assert asked == [(2, 8), "dp-sgd", "dp-psac"] and told == ["compiling", None]
    assert caplog.text.count("not compiled ahead: no memory") == 2


def test_on_a_gpu_steps_are_compiled_before_runs_that_share_them(tmp_path, monkeypatch, pretend):
    ahead = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(workers, "compile_ahead", ahead.append)
    monkeypatch.setattr(workers, "pool", lambda _: contextlib.nullcontext(workers.Here()))
    pretend()
    config = TINY.replace(epochs=1, grid=(0.1,), search_seeds=1)
    done = compare.compare(config, methods("dp-sgd,psac-r-over-s"), [0], tmp_path, at_once=2)
    assert [[one.method for one in jobs] for jobs in ahead] == [["dp-sgd", "dp-psasc"], []] and done.left == 0


# -- statistics ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3, 5, 30])
def test_interval_is_students(n):
    values = np.random.default_rng(n).normal(0.9, 0.02, n)
    mean, half = stats.interval(values.tolist())
    low, high = scipy_stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy_stats.sem(values))
    assert (mean - half, mean + half) == pytest.approx((low, high), rel=1e-9)
    assert half != pytest.approx(1.96 * scipy_stats.sem(values), rel=1e-2)  # the normal quantile would be too narrow
    assert stats.interval([0.9]) == (0.9, None)


def searched(record, rate, rates=(0.1, 0.2, 0.4), of=None, held_out=0.2):
    """The record as if this search had chosen its rate."""
    tries = [{"choice": {"rate": tried, "gamma1": 0.1}, "accuracy": 0.9} for tried in rates]
    search = {"searched_for": of or record.method, "tries": tries, "chosen": {"rate": rate}, "held_out": held_out}
    return record.replace(choice={**record.choice, "rate": rate}, search=search)


@pytest.fixture
def pair(found):
    return [next(r for r in found if r.method == name) for name in ("dp-sgd", "dp-psasc")]


def said(*records_):
    return stats.verdict(stats.summarize(records_))


def test_the_verdict_says_where_a_search_stopped_at_the_end_of_its_grid(pair):
    a, b = pair
    told = said(searched(a, 0.4), searched(b, 0.4))
    assert told.endswith("and DP-PSASC both chose the largest rate that was tried: a larger one might be better.")
    told = said(searched(a, 0.1), searched(b, 0.2))
    assert told.endswith("DP-SGD chose the smallest rate that was tried: a smaller one might be better.")
    for fine in (searched(a, 0.2), searched(a, 0.4, of="dp-psasc"), searched(a, 0.4, (0.4,)), a.replace(search=None)):
        assert "might be better" not in said(fine, searched(b, 0.2))


def test_methods_that_were_not_searched_alike_are_told(pair):
    a, b = pair
    alike = [searched(a, 0.2), searched(b, 0.2)]
    assert "NOT SEARCHED ALIKE" not in said(*alike)
    assert "NOT SEARCHED ALIKE" in said(alike[0], searched(b, 0.2, (0.2,)))
    assert "NOT SEARCHED ALIKE" in said(alike[0], searched(b, 0.2, held_out=0.4))
    assert "DP-PSASC had no search" in said(alike[0], b.replace(search=None))
    control = alike[1].replace(method="psac-lr-over-s")  # it follows DP-PSASC
    assert stats.alike(stats.summarize([*alike, control]))
    assert stats.alike(stats.summarize([each.replace(search=None) for each in alike]))


def test_as_many_places_as_the_test_set_allows():
    blank = dict.fromkeys((f.name for f in dataclasses.fields(stats.Row)), None)
    few, many = (
        stats.Row(**blank | {"accuracy": 0.98765, "half_width": 0.00123, "test_size": n}) for n in (360, 10**4)
    )
    assert (few.shown, many.shown) == ("98.8% ± 0.1", "98.77% ± 0.12")
    moved = dataclasses.replace(many, difference=-0.00004, difference_half_width=0.001)
    assert moved.shown_difference == "+0.00 ± 0.10"  # never -0.00


def at(record, rate, seed=None, minute=0, **data):
    """The record as if it had been run at another rate, at another time, on other data."""
    return record.replace(
        choice=record.choice | {"rate": rate}, seed=record.seed if seed is None else seed, data=record.data | data,
        created=f"2030-01-01T00:{minute:02}:00+00:00",
    )  # fmt: skip


def test_settings_and_rates_are_never_mixed_in_a_table(found):
    other = found[0].replace(config={**found[0].config, "epochs": 9}, created="1999")
    assert stats.select([*found, other, found[0].replace(role="search")]) == (found, 1)
    assert stats.select([*found, other], like=[other]) == ([other], len(found))
    later = [at(record, 9.0).replace(created="2999") for record in found]
    assert stats.select([*found, *later])[0] == later
    assert stats.select([*found, *later], like=found)[0] == found


def test_a_row_is_of_one_rate_one_data_set_and_one_run_per_seed(pair):
    one, other = pair
    runs = [
        *(at(one, 0.3, seed=k, minute=1) for k in (0, 1, 3)),
        at(one, 5.0, seed=0, minute=2),
        at(one, 5.0, seed=1, minute=3),
        at(one, 5.0, seed=1, minute=4),  # the same run once more
        at(other, 0.3, seed=0, minute=2),  # each method has its own rate
        at(one, 5.0, seed=2, minute=3, checksums={"a": "of other data"}),
    ]
    chosen, left_out = stats.select(runs)
    kept = [(r.method, r.choice["rate"], r.seed, r.created[14:16]) for r in chosen]
    assert kept == [("dp-sgd", 5.0, 0, "02"), ("dp-sgd", 5.0, 1, "04"), ("dp-psasc", 0.3, 0, "02")]
    assert left_out == 5


def measured(found, **accuracies):
    """Rows of methods with these accuracies seed by seed."""
    like = next(r for r in found if r.method == "dp-psasc")
    return stats.summarize([
        like.replace(method=name, title=METHODS[name].title, seed=seed, accuracy=accuracy, search=None,
                     epsilon=None if name == "non-private" else 3.0)
        for name, values in ((name.replace("_", "-"), values) for name, values in accuracies.items())
        for seed, accuracy in enumerate(values)
    ])  # fmt: skip


def test_differences_are_taken_seed_by_seed_and_tested(found):
    base = np.array([0.90, 0.95, 0.92, 0.97])
    moved = base - 0.01 + np.array([0.001, -0.001, 0.0005, 0.0])
    row, reference = measured(found, dp_sgd=moved, dp_psasc=base)
    assert row.p == pytest.approx(scipy_stats.ttest_rel(moved, base).pvalue) and row.p_holm == row.p
    assert row.difference == pytest.approx((moved - base).mean()) and row.reference == "DP-PSASC"
    assert reference.difference is None and reference.p is None
    assert stats.headline([row, reference]) == "DP-SGD is 1.0 points below DP-PSASC."
    assert scipy_stats.ttest_ind(moved, base).pvalue > 0.5 > 0.001 > row.p  # seeds move more than methods


def test_holm_corrects_over_all_comparisons_of_a_page(found):
    rng, base = np.random.default_rng(0), np.full(5, 0.9)
    noisy = [(base + rng.normal(0.01 * k, 0.01, 5), base + rng.normal(0, 0.01, 5)) for k in range(3)]
    tables = [measured(found, dp_sgd=one, auto_s=other, dp_psasc=base) for one, other in noisy]
    alone = [row.p for rows in tables for row in rows if row.p is not None]
    together = [row.p_holm for rows in stats.corrected(tables) for row in rows if row.p is not None]
    left, highest, expected = len(alone), 0.0, {}
    for p in sorted(alone):
        highest, left = max(highest, min(1.0, left * p)), left - 1
        expected[p] = highest
    assert together == pytest.approx([expected[p] for p in alone]) and len(alone) == 6


def test_equal_methods_are_said_to_be_close_and_by_how_much(found):
    base = [0.90, 0.95, 0.92]
    rows = measured(found, dp_sgd=[0.91, 0.94, 0.92], dp_psac=base, dp_psasc=base)
    assert rows[1].p == 1.0 and rows[1].reach == pytest.approx(1 / 360)  # never closer than a test image
    told, reach = stats.verdict(rows), 100 * rows[0].reach
    assert told.startswith("The 2 other private methods cannot be told apart from DP-PSASC: ")
    assert f"all lie within {reach:.1f} points of it." in told
    spread = np.sqrt(np.mean([np.var(v, ddof=1) for v in ([0.91, 0.94, 0.92], base, base)]))
    assert f"One run differs from another of the same configuration by {100 * spread:.1f} points (over seeds)" in told


def test_single_seeds_and_single_methods_tell_nothing(found):
    one = measured(found, dp_sgd=[0.9], dp_psasc=[0.8])
    assert stats.headline(one).startswith("With a single seed there is no interval")
    assert "not two private methods" in stats.headline(measured(found, dp_sgd=[0.9, 0.8]))
    told = stats.verdict(measured(found, non_private=[0.97, 0.99], dp_sgd=[0.9, 0.8], dp_psasc=[0.9, 0.7]))
    assert "Without privacy accuracy is 98.0%, with it at most 85.0%." in told
    others = measured(found, dp_sgd=[0.9, 0.8], auto_s=[0.9, 0.7])  # without DP-PSASC, the first one
    assert others[1].reference == "DP-SGD"


def test_the_statement_names_the_seeds_of_all_runs(found):
    runs = [record for record in found if record.method == "dp-sgd"]
    assert "Batches and noise come from a seed, 0, 1 in turn, so that" in stats.summarize(runs)[0].statement
    assert "come from the seed 0, so that" in stats.summarize(runs[:1])[0].statement
