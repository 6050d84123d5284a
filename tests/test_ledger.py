"""The ledger: what runs cost together, on disk before it is released, whatever happens to them."""

import contextlib
import dataclasses
import datetime
import gc
import json
import logging
import os
import resource
import shutil
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from pathlib import Path

import dp_accounting
import pytest
import torch

import dpscale
from dpscale import accounting, booking, files, ledger, noise
from dpscale.booking import open_run
from dpscale.ledger import Ledger, LedgerError, Release

from .helpers import SIZE, data, loss_fn, mlp, plan, train, vector
from .processes import ROOT

DELTA = 1e-3
DATA = data()


def make(folder, epsilon=100.0):
    return Ledger(Path(folder) / "patients.ledger", epsilon=epsilon, delta=DELTA)


def private(books, run="first", *, seed=0, model=None, lr=0.1, **changes):
    model = model or mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return dpscale.privatize(model, optimizer, plan(delta=DELTA, **changes), seed=seed, ledger=books, run=run)


def some_steps(run, count):
    batches = run.batches(DATA)
    for _ in range(count):
        run.step(next(batches), loss_fn)


def row(books, name="first"):
    return next(run for run in books.runs() if run.name == name)


# What processes of their own do. They are given the folder, and say what happened by what they print.

HELD = []
"""What lives to the end of its process."""


def trains_and_ends(folder):
    HELD.append(run := private(make(folder), steps=400))
    some_steps(run, 30)


def trains_and_is_killed(folder):
    HELD.append(run := private(make(folder), steps=400))
    some_steps(run, 20)
    run.save(Path(folder) / "run")
    some_steps(run, 11)
    print(run._state.booking._held.last, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def trains_and_dies(folder, epsilon):
    HELD.append(run := private(make(folder, epsilon), steps=6))
    some_steps(run, 3)
    os._exit(9)


def goes_on(folder):
    HELD.append(private(make(folder), steps=40))
    print("up", flush=True)
    sys.stdin.read()


def trains_what_fits(folder, epsilon, name):
    books, admitted = make(folder, epsilon), 0
    print("up", flush=True)
    sys.stdin.readline()
    for number in range(6):
        try:
            part = open_run(books, f"{name}/{number}", plan(steps=5))
        except ValueError as error:
            assert "does not fit into the budget" in str(error)
            continue
        for step in range(1, 6):
            part.reserve(step)
        part.close()
        admitted += 1
    print(admitted)


def fills_the_disk(folder):
    saved = Path(folder) / "run"
    run = private(make(folder), steps=20)
    some_steps(run, 3)
    run.save(saved)
    whole = saved.read_bytes()
    batches = run.batches(DATA)
    batch, before = next(batches), vector(run.model)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
    for what in (lambda: run.step(batch, loss_fn), lambda: run.save(saved)):
        try:
            what()
        except OSError as error:
            print(error)
    assert torch.equal(vector(run.model), before) and run.steps_taken == 3
    assert saved.read_bytes() == whole
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert row(run._state.booking.ledger).charged == 3
    run.step(batch, loss_fn)
    assert run.steps_taken == 4 and row(run._state.booking.ledger).charged == 4


def works_where_it_may_only_read(folder):
    """As another user, whom rights bind; that one cannot import, so all is done once before."""

    def step(run):
        batches = run.batches(DATA)
        run.step(next(batches), loss_fn)

    def said(what):
        try:
            what()
        except (OSError, RuntimeError) as error:
            print(error)

    for rehearsal in (True, False):
        place = Path(folder) if rehearsal else Path(tempfile.mkdtemp())
        books = make(place)
        run = private(books, steps=20)
        step(run)
        run.save(place / "run")
        if rehearsal:
            run.close()
            rights = os.geteuid()
            os.seteuid(rights or 65534)
    whole = (place / "run").read_bytes()
    place.chmod(0o555)
    said(lambda: step(run))
    said(lambda: run.save(place / "run"))
    said(lambda: private(books, "second"))
    said(lambda: Ledger(place / "another", epsilon=1, delta=DELTA))
    assert run.steps_taken == 1 and (place / "run").read_bytes() == whole
    place.chmod(0o755)
    assert row(books).charged == 1
    step(run)
    assert run.steps_taken == row(books).charged == 2
    run.close()
    shutil.rmtree(place)
    os.seteuid(rights)


def is_killed_again_and_again(folder, sabotage):
    sys.path.append(str(ROOT / "benchmarks"))
    import faults

    print(json.dumps(faults.found(Path(folder), kills=200 if sabotage else 10, sabotage=sabotage)))


def test_every_step_is_on_disk_before_it_is_released(tmp_path, monkeypatch):
    books, seen, add = make(tmp_path), [], noise.Noise.add

    def looking(self, sums, std, step, shard=None):
        with contextlib.closing(sqlite3.connect(books.path)) as db:  # another connection sees what is committed
            seen.append((step, *db.execute("SELECT max(last) FROM stretches").fetchone()))
        add(self, sums, std, step, shard)

    monkeypatch.setattr(noise.Noise, "add", looking)
    train(private(books, steps=60), DATA)
    assert [step for step, _ in seen] == list(range(1, 61))
    assert all(step <= last <= step + 2 for step, last in seen)  # a stretch is 3 steps at most here


def test_runs_of_one_seed_in_one_ledger_share_no_noise(tmp_path):
    books = make(tmp_path)
    keys = [private(books, run=name, seed=3)._state.noise.key.derive("noise/1") for name in ("a", "b")]
    assert keys[0] != keys[1]


def test_what_interrupts_a_confirmation_leaves_no_step_unpaid(tmp_path, monkeypatch):
    """The stretch is used no more before anything is written: the next step reserves another."""
    books = make(tmp_path)
    run = private(books, steps=200)
    some_steps(run, 3)

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(books), "writing", interrupted)
        run.save(tmp_path / "run.ckpt")
    some_steps(run, 4)
    assert row(books).charged >= run.steps_taken == 7


def test_a_run_that_ends_pays_for_its_steps_alone(tmp_path):
    books = make(tmp_path)
    run = private(books, steps=200)
    some_steps(run, 33)
    assert row(books).live and row(books).charged >= 33
    run.close()
    assert not row(books).live and row(books).charged == 33 and not row(books).crashed
    assert books.spent().epsilon == run.epsilon() == run.plan.epsilon(steps=33)
    with pytest.raises(RuntimeError, match=r"The run 'first' was closed.*Nothing was released"):
        some_steps(run, 1)
    assert run.steps_taken == 33
    run.close()


def test_a_run_ends_with_its_last_reference(tmp_path):
    books = make(tmp_path)
    some_steps(private(books, steps=200), 5)
    gc.collect()
    assert row(books).charged == 5 and not row(books).live


def test_the_end_of_a_process_gives_back_what_it_did_not_use(tmp_path, nursery):
    make(tmp_path)
    assert nursery.run(f"{__name__}:trains_and_ends", str(tmp_path)) == (0, "", "")
    assert row(make(tmp_path)).charged == 30


def test_a_killed_process_has_paid_for_what_it_reserved(tmp_path, caplog, nursery):
    books = make(tmp_path)
    code, out, errors = nursery.run(f"{__name__}:trains_and_is_killed", str(tmp_path))
    assert code == -signal.SIGKILL, errors
    reserved = int(out)
    assert 31 <= reserved <= 31 + 20 and row(books).charged == reserved and not row(books).live
    (crashed,) = row(books).crashed
    with caplog.at_level(logging.WARNING, "dpscale"):
        run = private(books, steps=400)
    assert f"ended without a word, after it had reserved {crashed.last - crashed.first} steps. They are" in caplog.text
    assert run.epsilon() == run.plan.epsilon(steps=reserved)  # before it is loaded, too
    run.load(tmp_path / "run")
    assert run.steps_taken == 20 and run.epsilon() == run.plan.epsilon(steps=reserved) == books.spent().epsilon
    some_steps(run, 1)
    assert run.epsilon() == run.plan.epsilon(steps=reserved + 1)
    told = run.statement()
    assert (
        f"{reserved - 20} steps count in vain; {crashed.last - crashed.first} were charged to it after a crash" in told
    )
    assert "Resumed: once" in told and "lost with their process, are counted too" in told
    train(run, DATA)
    run.close()
    assert run.epsilon() == run.plan.epsilon() and row(books).charged == 400  # the plan is its limit, whatever happened
    assert [s.state for s in row(books).crashed] == ["charged"]


def test_a_run_goes_back_to_its_checkpoint_and_pays_twice(tmp_path):
    books = make(tmp_path)
    run = private(books, steps=40)
    some_steps(run, 10)
    run.save(tmp_path / "run")
    assert row(books).charged == 10
    some_steps(run, 5)
    run.close()
    for used in (15, 17):
        run = private(books, steps=40)
        run.load(tmp_path / "run")
        assert run.epsilon() == run.plan.epsilon(steps=used)
        some_steps(run, 2)
        run.close()
        assert row(books).charged == used + 2
    assert [len(epoch) for epoch in run.epochs(DATA)] == [3, 5, 5, 5, 3]  # 12 steps are on its path, and 21 are left


def test_a_shuffled_run_that_goes_back_pays_by_the_epoch(tmp_path):
    books, sampling = make(tmp_path), dpscale.Shuffled(size=SIZE, batch=6)  # 10 steps an epoch
    run = private(books, sampling=sampling, steps=60)
    some_steps(run, 12)
    run.save(tmp_path / "run")
    some_steps(run, 4)
    run.close()
    assert books.spent().epsilon == run.plan.epsilon(steps=16) == run.plan.epsilon(steps=20)
    run = private(books, sampling=sampling, steps=60)
    run.load(tmp_path / "run")
    some_steps(run, 1)
    run.close()
    # Samples of steps 13 to 16 are in two releases of the second epoch.
    assert run.epsilon() == books.spent().epsilon == run.plan.epsilon(steps=30)


def test_a_run_that_begins_anew_under_its_name_pays_on_and_draws_afresh(tmp_path, caplog):
    books, released = make(tmp_path), []
    for _ in range(2):
        run = private(books, steps=40, sampling=dpscale.FullBatch(size=SIZE))
        some_steps(run, 10)
        released.append(vector(run.model))
        run.close()
    assert row(books).charged == 20 and run.epsilon() == run.plan.epsilon(steps=20)
    assert "10 steps of the run 'first' are in its ledger already, and it begins anew: they count" in caplog.text
    assert not torch.equal(*released)  # the seed is the same


def test_a_run_begun_without_a_ledger_brings_its_steps_along(tmp_path):
    books = make(tmp_path)
    model = mlp()
    run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(delta=DELTA, steps=40))
    some_steps(run, 7)
    run.save(tmp_path / "run")
    again = private(books, steps=40)
    again.load(tmp_path / "run")
    assert row(books).charged == 7
    some_steps(again, 1)
    again.close()
    assert row(books).charged == 8


def test_a_booked_run_is_resumed_under_its_name_alone(tmp_path):
    books = make(tmp_path)
    run = private(books)
    some_steps(run, 2)
    run.save(tmp_path / "run")
    run.close()
    for other in (private(books, "second"), private(None, None)):
        with pytest.raises(ValueError, match=r"booked in a ledger as run 'first': pass that ledger, and run='first'"):
            other.load(tmp_path / "run")


def test_a_plan_that_does_not_fit_is_refused_before_training(tmp_path):
    books = make(tmp_path, epsilon=plan().epsilon(DELTA, steps=8))
    run = private(books, "first", steps=5)
    with pytest.raises(
        ValueError, match=r"The plan of the run 'second' does not fit into the budget: with the 1 other"
    ):
        private(books, "second", steps=5)
    with pytest.raises(ValueError, match=r"1 of them going on and counted with their whole plans"):
        private(books, "second", steps=4)
    assert [run.name for run in books.runs()] == ["first"]
    some_steps(run, 4)
    run.close()
    second = private(books, "second", steps=4)  # what the first left
    train(second, DATA)
    second.close()
    assert books.spent().epsilon == plan().epsilon(DELTA, steps=8) == books.epsilon
    with pytest.raises(ValueError, match=r"Without it, it is .*Nothing was released"):
        private(books, "third", steps=1)
    with pytest.raises(ValueError, match=r"epsilon would be inf"):
        private(books, "fourth", steps=1, noise_multiplier=None, unsafe_no_noise=True)


def test_a_dead_run_holds_only_what_it_used(tmp_path, nursery):
    books = make(tmp_path, epsilon=plan().epsilon(DELTA, steps=8))
    assert nursery.run(f"{__name__}:trains_and_dies", str(tmp_path), books.epsilon)[0] == 9
    second = private(books, "second", steps=5)
    with pytest.raises(ValueError, match=r"with the 1 other runs, 1 of them going on"):
        private(books, "first", steps=6)  # its place was taken
    train(second, DATA)
    second.close()
    assert books.spent().epsilon == books.epsilon


def test_looking_whether_a_run_is_live_takes_it_from_nobody(tmp_path, monkeypatch):
    books = make(tmp_path)
    part = open_run(books, "first", plan())
    path = books.lock_file("first")
    assert files.is_locked(path) and not files.is_locked(path.with_name("none"))
    part.close()
    with files.locked(path), open(path) as other:  # somebody has it, and somebody looks
        assert files.is_locked(path)
    with open(path) as other:
        files.fcntl.flock(other, files.fcntl.LOCK_SH)
        assert not files.is_locked(path)

    def denied(*_):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(files.os, "open", denied)
        assert files.is_locked(path)  # as far as can be known


def test_a_stretch_beyond_the_plan_is_refused(tmp_path):
    books = make(tmp_path)
    part = open_run(books, "first", plan(steps=3))
    for step in (1, 2, 3):
        part.reserve(step)
    with pytest.raises(
        dpscale.BudgetExhausted, match=r"has used up its 3 planned steps, 0 of them before.*Nothing was"
    ):
        part.reserve(4)
    assert row(books).charged == 3
    part.close()


SAMPLERS = {
    "poisson": dpscale.Poisson(size=SIZE, batch=12),
    "poisson-smaller": dpscale.Poisson(size=SIZE // 2, batch=4),
    "full-batch": dpscale.FullBatch(size=SIZE),
    "shuffled": dpscale.Shuffled(size=SIZE, batch=12),
    "fixed-size": dpscale.FixedSize(size=SIZE, batch=12),
    "replaced": dpscale.FullBatch(size=SIZE, adjacency="replace-one"),
}


def spent_on(tmp_path, *names):
    books = make(tmp_path, epsilon=1e6)
    for number, name in enumerate(names):
        part = open_run(books, f"{number}", plan(sampling=SAMPLERS[name], steps=20, noise_multiplier=3.0))
        for step in range(1, 21):
            part.reserve(step)
        part.close()
    return books.spent()


def price(*names, delta=DELTA, adjacency="zero-out"):
    events = [SAMPLERS[name].event(3.0, 20) for name in names]
    return accounting.epsilon(dp_accounting.ComposedDpEvent(events), delta=delta, adjacency=adjacency)


@pytest.mark.parametrize(
    ("names", "adjacency"),
    [
        (["poisson"], "add-remove"),
        (["poisson", "poisson"], "add-remove"),
        (["poisson", "poisson-smaller", "full-batch"], "add-remove"),
        (["poisson", "shuffled"], "zero-out"),
        (["fixed-size", "replaced"], "replace-one"),
    ],
)
def test_runs_of_one_kind_compose_tightly(names, adjacency, tmp_path):
    spent = spent_on(tmp_path, *names)
    inner = "replace-one" if adjacency == "replace-one" else "zero-out"
    assert spent == (price(*names, adjacency=inner), adjacency, "composed tightly, all runs together")
    if len(names) > 1:
        assert spent.epsilon < 0.95 * sum(price(name, adjacency=inner) for name in names)


def test_runs_of_two_kinds_add_up(tmp_path):
    spent = spent_on(tmp_path, "poisson", "full-batch", "fixed-size")
    added = price("poisson", "full-batch", delta=DELTA / 2)
    added += price("fixed-size", delta=DELTA / 2, adjacency="replace-one")
    assert spent.epsilon == pytest.approx(added, rel=1e-12) and spent.adjacency == "zero-out"
    assert spent.how.startswith("added up at an equal share of delta each: runs that leave a sample out")


SEARCHES = {
    "search": dpscale.Selection(tries=6),
    "held-out": dpscale.Selection(tries=3, score_noise=1.0),
    "poisson-tries": dpscale.Selection(tries=4, shape=float("inf")),
    "once": dpscale.Selection(tries=1),
}


def released(*names, noise=3.0):
    """Of each sampler a run, of each search its tries by Poisson sampling."""
    runs = {name: Release(sampler, noise, 20) for name, sampler in SAMPLERS.items()}
    runs |= {name: runs["poisson"]._replace(selection=search.to_dict()) for name, search in SEARCHES.items()}
    return [runs[name] for name in names]


COMPOSED = [
    ["search"], ["search", "search"], ["search", "poisson"], ["held-out", "poisson"], ["held-out", "search", "poisson"],
    ["search", "shuffled", "full-batch"], ["search", "fixed-size"], ["poisson-tries", "fixed-size", "poisson"],
    ["poisson", "fixed-size"], ["once", "once", "poisson"],
]  # fmt: skip


@pytest.mark.parametrize("noise", [0.7, 3.0, 30.0])
@pytest.mark.parametrize("names", COMPOSED, ids="+".join)
def test_what_is_composed_costs_no_less_than_a_part_of_it(names, noise):
    """And no more than all parts, each at its share of δ: the searches one by one, as well."""
    whole = ledger.compose(released(*names, noise=noise), DELTA).epsilon
    for left_out in range(len(names)):
        rest = names[:left_out] + names[left_out + 1 :]
        assert whole >= ledger.compose(released(*rest, noise=noise), DELTA).epsilon
        assert whole >= ledger.compose(released(names[left_out], noise=noise), DELTA).epsilon
    shares = DELTA / len(names)
    assert whole <= sum(ledger.compose(released(name, noise=noise), shares).epsilon for name in names) * (1 + 1e-9)


def test_searches_and_runs_compose_by_renyi_dp_in_one_accountant():
    """dp-accounting's own, which is given everything. It is less than the sum of ε at shares of δ."""
    names = ["search", "search", "poisson", "full-batch"]
    accountant = dp_accounting.rdp.RdpAccountant()
    for release in released(*names):
        event = release.event
        if release.selection is not None:
            event = dp_accounting.dp_event.RepeatAndSelectDpEvent(event, 6.0, 1.0)
        accountant.compose(event)
    spent = ledger.compose(released(*names), DELTA)
    assert spent.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)
    assert spent.how == "composed by Rényi DP, everything together" and spent.adjacency == "add-remove"
    one_by_one = sum(ledger.compose(released(name), DELTA / 3).epsilon for name in ("search", "search"))
    assert spent.epsilon < 0.9 * (one_by_one + price("poisson", "full-batch", delta=DELTA / 3))


def test_a_search_of_one_try_costs_no_less_than_the_try():
    """With the run beside it: as the two runs that they are, composed tightly."""
    assert ledger.compose(released("once", "poisson"), DELTA).epsilon >= price("poisson", "poisson")


def test_who_was_held_out_may_be_trained_on_in_a_run_beside_the_search():
    """With little noise on the scores, being held out costs most: that, and the run, is paid for."""
    loud, event = dataclasses.replace(SEARCHES["held-out"], score_noise=0.4), SAMPLERS["poisson"].event(3.0, 20)
    accountant = dp_accounting.rdp.RdpAccountant()
    score = dp_accounting.GaussianDpEvent(0.4)
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(score, 3.0, 1.0)).compose(event)
    run = Release(SAMPLERS["poisson"], 3.0, 20)
    spent = ledger.compose([run._replace(selection=loud.to_dict()), run], DELTA)
    assert spent.epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-9)


def test_two_live_processes_cannot_share_a_name(tmp_path, nursery):
    books = make(tmp_path)
    other = nursery.start(f"{__name__}:goes_on", str(tmp_path))
    assert other.hear() == "up"
    with pytest.raises(
        RuntimeError, match=r"The run 'first' of .*patients.ledger is going on, in this or another proce"
    ):
        private(books, steps=40)
    private(books, "second", steps=40).close()
    other.kill()
    other.end()
    run = private(books, steps=40)
    with pytest.raises(RuntimeError, match=r"is going on, in this"):
        private(books, steps=40)
    run.close()
    private(books, steps=40).close()


def test_trap_34_processes_that_train_alone_are_all_charged(tmp_path, nursery):
    """Several at once, on one ledger: none is lost, and none gets in beyond the total."""
    books = make(tmp_path, epsilon=plan().epsilon(DELTA, steps=30))
    others = [nursery.start(f"{__name__}:trains_what_fits", str(tmp_path), books.epsilon, name) for name in range(3)]
    assert [other.hear() for other in others] == ["up"] * 3
    for other in others:
        other.say("go")
    codes, admitted, errors = zip(*[other.end() for other in others], strict=True)
    assert codes == (0, 0, 0), errors
    admitted = sum(map(int, admitted))
    assert admitted == 6 and sum(run.charged for run in books.runs()) == 30
    assert books.spent().epsilon == books.epsilon


def test_a_forked_process_neither_holds_nor_books(tmp_path):
    books = make(tmp_path)
    run = private(books, steps=40)
    some_steps(run, 3)
    reading, writing = os.pipe()
    if (forked := os.fork()) == 0:
        with contextlib.suppress(RuntimeError):
            run._state.booking.reserve(4)
            os._exit(1)
        run.close()
        os.read(reading, 1)
        os._exit(0)
    try:
        run.close()
        assert row(books).charged == 3
        private(books, steps=40).close()  # though the child lives
    finally:
        os.write(writing, b"x")
        ended = os.waitpid(forked, 0)
    assert ended[1] == 0


@pytest.mark.parametrize("jump", [-(10**9), 10**9])
def test_a_clock_that_jumps_changes_nothing(tmp_path, monkeypatch, jump):
    books = make(tmp_path)
    run = private(books, steps=40)
    some_steps(run, 3)

    class Jumped(datetime.datetime):
        @classmethod
        def now(cls, tz=None):
            return super().now(tz) + datetime.timedelta(seconds=jump)

    now = time.time()
    monkeypatch.setattr(ledger.datetime, "datetime", Jumped)
    monkeypatch.setattr(time, "time", lambda: now + jump)
    monkeypatch.setattr(time, "monotonic", lambda: 0.0)
    with pytest.raises(RuntimeError, match="is going on"):
        private(books, steps=40)
    some_steps(run, 3)
    run.save(tmp_path / "run")
    run.close()
    assert row(books).charged == 6
    run = private(books, steps=40)
    run.load(tmp_path / "run")
    train(run, DATA)
    run.close()
    assert row(books).charged == 40


def test_a_disk_that_is_full_stops_the_step_before_its_release(tmp_path, nursery):
    """By a limit on the size of files, in a process of its own. With room again the run goes on; nothing is lost."""
    make(tmp_path)
    code, out, errors = nursery.run(f"{__name__}:fills_the_disk", str(tmp_path))
    assert code == 0, errors
    first, second = out.splitlines()
    assert first.startswith("The ledger ") and "is the disk full? Make room, and go on. Nothing was booked" in first
    assert second.startswith("The checkpoint ") and second.endswith("The one that was there before is unchanged.")


def test_a_folder_that_cannot_be_written_is_said(tmp_path, nursery):
    """Nothing is released, and when it may be written again the run goes on."""
    with pytest.raises(LedgerError, match=r"The ledger /proc/none.ledger cannot be opened for writing"):
        Ledger("/proc/none.ledger", epsilon=1, delta=DELTA)
    code, out, errors = nursery.run(f"{__name__}:works_where_it_may_only_read", str(tmp_path))
    assert code == 0, errors
    stepped, saved, admitted, made = out.splitlines()
    for told in (stepped, admitted, made):
        assert "cannot be opened for writing (" in told and "Check the rights of the file and its folder" in told
    assert "Permission denied" in saved and saved.endswith("The one that was there before is unchanged.")


def test_a_ledger_that_may_only_be_read_books_nothing(tmp_path, monkeypatch):
    books, connect = make(tmp_path), sqlite3.connect
    run = private(books)
    monkeypatch.setattr(
        ledger.sqlite3, "connect", lambda path, **options: connect(path.replace("mode=rw", "mode=ro"), **options)
    )
    with pytest.raises(LedgerError, match=r"cannot be opened for writing \(attempt to write a readonly database\)"):
        some_steps(run, 1)
    assert run.steps_taken == 0
    monkeypatch.undo()
    some_steps(run, 1)
    assert run.steps_taken == 1


def test_a_damaged_ledger_is_refused_and_left_as_it_is(tmp_path):
    books = make(tmp_path)
    run = private(books)
    some_steps(run, 2)
    run.close()
    whole = books.path.read_bytes()
    torn = bytearray(whole)
    torn[4096:8192] = os.urandom(4096)
    for content in (b"no ledger at all" * 100, bytes(torn), whole[:5000]):
        books.path.write_bytes(content)
        with pytest.raises(LedgerError, match=r"is damaged, or no ledger .* what it has charged must not be forgotten"):
            make(tmp_path).runs()
        assert books.path.read_bytes() == content
    books.path.write_bytes(whole)
    assert row(make(tmp_path)).charged == 2


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("DELETE FROM total", "its total, or how many runs"),
        ("UPDATE runs SET plan = '{}'", "the plan of the run 'first': KeyError"),
        ("UPDATE runs SET plan = 'torn'", "the plan of the run 'first': JSONDecodeError"),
        ("UPDATE runs SET name = 'first'", "two runs 'first'"),
        ("DROP TABLE stretches", "no such table: stretches"),
    ],
)
def test_a_ledger_whose_rows_are_wrong_is_refused(tmp_path, change, words):
    """With checksums that are right: as another release might write it."""
    books = make(tmp_path)
    for name in ("first", "second"):
        private(books, name).close()
    with contextlib.closing(sqlite3.connect(books.path, isolation_level=None)) as db:
        db.execute(change)
        if "UPDATE" in change:
            ledger.seal(db, 1)
            ledger.seal(db, 2)
    with pytest.raises(LedgerError, match=rf"is damaged, or no ledger \({words}.*must not be forgotten"):
        make(tmp_path).runs()


def test_no_row_of_a_ledger_can_go_backwards(tmp_path):
    books = make(tmp_path)
    some_steps(private(books), 2)
    for change in ("last = first - 1", "first = -1", "lost = -1"):
        with pytest.raises(LedgerError, match="CHECK constraint failed"), books.writing() as db:
            db.execute(f"UPDATE stretches SET {change}")
    assert row(books).charged == 2


def test_a_ledger_that_is_gone_is_not_begun_anew(tmp_path):
    books = make(tmp_path)
    run = private(books)
    some_steps(run, 2)
    moved = {path: path.rename(path.with_name("aside" + path.name[len(books.path.name) :]))
             for path in [*tmp_path.glob("patients.ledger*")]}  # fmt: skip
    for use in (lambda: some_steps(run, 1), books.runs):
        with pytest.raises(LedgerError, match=r"patients.ledger is gone. Bring it back: what it has charged must not"):
            use()
    assert run.steps_taken == 2 and not books.path.exists()
    for path, aside in moved.items():
        aside.rename(path)
    some_steps(run, 1)
    assert row(books).charged == run.steps_taken == 3


def test_an_older_copy_of_a_ledger_forgets_nothing_that_a_run_knows(tmp_path):
    """Put back under a run that goes on, or before one is resumed: the steps of the run itself are in it again."""
    books, aside = make(tmp_path), tmp_path / "aside"

    def copied(source, target):
        with contextlib.closing(sqlite3.connect(source)) as one, contextlib.closing(sqlite3.connect(target)) as other:
            one.backup(other)

    run = private(books, steps=40)
    some_steps(run, 3)
    copied(books.path, aside)
    some_steps(run, 6)
    copied(aside, books.path)
    some_steps(run, 2)  # a stretch is two steps at most
    run.save(tmp_path / "run")
    assert row(books).charged >= run.steps_taken == 11
    run.close()
    copied(aside, books.path)
    again = private(books, steps=40)
    again.load(tmp_path / "run")
    assert row(books).charged == 11 and again.epsilon() == again.plan.epsilon(steps=11)


def test_one_ledger_by_two_names_is_one(tmp_path):
    books = make(tmp_path)
    (tmp_path / "other").symlink_to(books.path)
    run = private(books)
    with pytest.raises(RuntimeError, match=r"The run 'first' of .*patients.ledger is going on"):
        private(Ledger(tmp_path / "other"))
    run.close()


def test_an_interrupted_reservation_forgets_no_step(tmp_path):
    """It is on the disk, and the position is not set yet."""
    books = make(tmp_path)
    part = open_run(books, "first", plan(steps=40))
    part.resume(5, 0)
    part.reserve(6)
    part._held.position = 0
    part.close()
    assert row(books).charged >= 5


def test_threads_release_one_step_at_a_time(tmp_path):
    """Every release is booked, and no two of them share noise."""
    books, released, failed = make(tmp_path, 1000), [], []
    run = private(books, steps=90, sampling=dpscale.FullBatch(size=SIZE), lr=0.0)
    run.optimizer.register_step_pre_hook(
        lambda *_: released.append(torch.cat([p.grad.flatten() for p in run.model.parameters()]))
    )
    batches, turn = run.batches(DATA), threading.Lock()

    def work():
        try:
            for _ in range(30):
                with turn:
                    batch = next(batches)
                run.step(batch, loss_fn)
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed and row(books).charged == run.steps_taken == 90
    assert len(torch.stack(released).unique(dim=0)) == 90


def test_files_that_are_no_ledgers_of_this_release_are_refused(tmp_path):
    path = tmp_path / "other.db"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE mine (x)")
    with pytest.raises(LedgerError, match=r"other.db is no ledger of dpscale. Nothing was changed"):
        Ledger(path, epsilon=1, delta=DELTA)
    books = make(tmp_path)
    with contextlib.closing(sqlite3.connect(books.path)) as db:
        db.execute("PRAGMA user_version = 3")
    with pytest.raises(LedgerError, match=r"is a ledger of version 3, and this release of dpscale reads version 2"):
        make(tmp_path)


TOTAL = "its total, or how many runs it has, is not as it was written"
SECOND = "the run 'second' or a stretch of it is not as it was written"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("UPDATE runs SET id = id + 8", "is damaged, or no ledger .steps of a run that is not there"),
        ("UPDATE runs SET name = CAST(x'ff' AS TEXT) WHERE id = 2", r"the run '\\\\xff' or a stretch of it is not as"),
        ("UPDATE runs SET plan = replace(plan, '1.0', '9.0') WHERE id = 2", SECOND),
        ("UPDATE runs SET begun = begun || '0' WHERE id = 2", SECOND),
        ("UPDATE stretches SET first = 1 WHERE run = 2", SECOND),
        ("UPDATE stretches SET last = 5 WHERE run = 2", SECOND),
        ("UPDATE stretches SET lost = 1 WHERE run = 2", SECOND),
        ("UPDATE stretches SET state = 'reserved' WHERE run = 2", SECOND),
        ("UPDATE stretches SET run = 2", SECOND.replace("second", "first")),
        ("DELETE FROM stretches WHERE run = 2", SECOND),
        (
            "INSERT INTO stretches SELECT id + 8, 2, first, last, lost, state, begun FROM stretches WHERE run = 2",
            SECOND,
        ),
        ("UPDATE total SET epsilon = 1000", TOTAL),
        ("UPDATE total SET delta = 0.1", TOTAL),
        ("INSERT INTO total SELECT * FROM total", TOTAL),
        ("DELETE FROM stretches WHERE run = 2; DELETE FROM runs WHERE id = 2", TOTAL),
        ("UPDATE sqlite_master SET name = CAST(x'ff' AS TEXT), sql = 'no'", "is damaged, or no ledger .'utf-8' codec"),
    ],
)
def test_flipped_bits_that_the_database_does_not_see_are_said(change, told, tmp_path):
    books = make(tmp_path)
    for name in ("first", "second"):
        part = open_run(books, name, plan())
        for step in (1, 2):
            part.reserve(step)
        part.close()
    whole = books.path.read_bytes()
    with contextlib.closing(sqlite3.connect(books.path)) as db:
        db.execute("PRAGMA writable_schema = ON")
        db.executescript(change)
        db.commit()
    damaged = books.path.read_bytes()
    for use in (lambda: make(tmp_path).runs(), lambda: open_run(make(tmp_path), "third", plan())):
        with pytest.raises(LedgerError, match=told):
            use()
    assert books.path.read_bytes() == damaged
    books.path.write_bytes(whole)
    assert make(tmp_path).spent().epsilon == plan().epsilon(DELTA, steps=4)


def test_a_run_that_is_damaged_while_it_goes_on_books_no_more(tmp_path):
    """What others have changed is not sealed by the next stretch, nor at the end; and the others go on."""
    books = make(tmp_path)
    run, other = private(books, steps=20), private(books, "second", steps=20)
    some_steps(run, 3)
    with contextlib.closing(sqlite3.connect(books.path, isolation_level=None)) as db:
        db.execute("UPDATE stretches SET last = last - 1 WHERE last = 3 AND run = 1")
    with pytest.raises(LedgerError, match=r"the run 'first' or a stretch of it is not as it was written.*or released"):
        some_steps(run, 1)
    assert run.steps_taken == 3
    some_steps(other, 2)
    run.close()
    with pytest.raises(LedgerError, match=r"the run 'first' or a stretch of it is not as it was written"):
        books.runs()


def test_no_flipped_bit_changes_what_a_ledger_says(tmp_path):
    """One of every byte that is used: it is refused in words, or nothing that is said changes."""
    books = make(tmp_path)
    for name in ("first", "second"):
        part = open_run(books, name, plan(steps=3))
        part.reserve(1)
        part.close()

    def told():
        found = make(tmp_path)
        return found.epsilon, found.delta, found.runs()

    whole, right, refused = books.path.read_bytes(), told(), 0
    used = [place for place, byte in enumerate(whole) if byte]
    for number, place in enumerate(used):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << number % 8
        books.path.write_bytes(flipped)
        try:
            assert told() == right, (place, number % 8)
        except LedgerError as error:
            assert "othing was changed" in str(error) or "nothing was released" in str(error)
            refused += 1
        for beside in tmp_path.glob("patients.ledger-*"):
            beside.unlink()
    assert refused > 0.5 * len(used)


def test_a_total_stays_as_it_was(tmp_path):
    path = tmp_path / "patients.ledger"
    with pytest.raises(ValueError, match=r"'epsilon' parameter of Ledger must be given: there is no ledger"):
        Ledger(path)
    assert not path.exists()
    books = make(tmp_path, epsilon=3)
    assert (Ledger(path).epsilon, Ledger(path).delta) == (3, DELTA) and "epsilon=3, delta=0.001" in repr(books)
    with pytest.raises(
        ValueError, match=r"'epsilon' parameter of Ledger must be 3.0, as in .*Got 4 instead. A total can"
    ):
        Ledger(path, epsilon=4, delta=DELTA)
    with pytest.raises(ValueError, match=r"'delta' parameter of Ledger must be 0.001, as in"):
        Ledger(path, delta=1e-5)
    for wrong in ({"epsilon": 0}, {"epsilon": float("inf")}, {"delta": 1}, {"delta": 0}):
        with pytest.raises(ValueError, match=r"parameter of Ledger must be"):
            Ledger(path, **wrong)


def test_a_ledger_whose_making_was_cut_short_is_made(tmp_path):
    path = tmp_path / "patients.ledger"
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    assert path.exists()
    assert make(tmp_path).spent().epsilon == 0


def test_every_connection_waits_for_the_disk(tmp_path):
    with make(tmp_path).writing() as db:
        found = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("journal_mode", "synchronous", "busy_timeout")]
    assert found == ["wal", 2, 60_000]


def test_what_is_known_of_a_run_must_stay(tmp_path):
    books = make(tmp_path)
    private(books, steps=5).close()
    with pytest.raises(
        ValueError, match=r"The run 'first' in .* has another plan: steps was 5 and is 6. Resume it with"
    ):
        private(books, steps=6)
    with pytest.raises(ValueError, match=r"'run' parameter of privatize must be left out without a ledger. Got 'a'"):
        private(None, "a")
    with pytest.raises(ValueError, match=r"'ledger' parameter of privatize must be a dpscale.Ledger, or None. Got 'a'"):
        private("a", "a")
    for name in ("", "x" * 201, 5):
        with pytest.raises(ValueError, match=r"'run' parameter of privatize must be a name of 1 to 200 characters"):
            private(books, name)
    with pytest.raises(ValueError, match=r"must be a name of whole characters. Got 'a\\ud83d' instead. Half of"):
        private(books, "a\ud83d")
    private(books, "a\N{GRINNING FACE}").close()
    assert [run.name for run in books.runs()] == ["first", "a\N{GRINNING FACE}"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(dpscale.Poisson):
    pass


def test_a_sampler_of_ones_own_has_no_known_price(tmp_path):
    with pytest.raises(
        ValueError, match=r"'plan' parameter of privatize must be with a sampler of dpscale, to be booked"
    ):
        private(make(tmp_path), sampling=Own(size=SIZE, batch=12))


def test_runs_without_a_name_get_one_each(tmp_path):
    books = make(tmp_path)
    runs = [private(books, None) for _ in range(2)]
    assert len({run.name for run in books.runs()}) == 2
    assert all(run.name.startswith("run-") for run in books.runs())
    del runs


def test_what_the_garbage_collector_ends_within_a_transaction_is_ended_after_it(tmp_path):
    books = make(tmp_path)
    part, other = (open_run(books, name, plan()) for name in ("first", "second"))
    part.reserve(1)
    with books.writing() as db:
        db.execute("UPDATE total SET admissions = admissions + 1")
        part.close()
        assert part._held in booking._later
    assert row(books).live
    other.reserve(1)
    assert not row(books).live and row(books).charged == 1
    other.close()


def test_a_run_that_another_process_took_books_no_more(tmp_path):
    """Where locks do not work: the ledger says whose the run is."""
    books = make(tmp_path)
    run = private(books, steps=40)
    with books.writing() as db:
        db.execute("UPDATE runs SET owner = 'another'")
    with pytest.raises(
        LedgerError, match=r"Another process has taken the run 'first', or took it for ended.*Nothing was"
    ):
        some_steps(run, 1)
    assert run.steps_taken == 0


def test_a_run_that_was_taken_for_ended_must_be_admitted_anew(tmp_path):
    """Somebody removes the folder of locks: the room of the run may be another's by now."""
    books = make(tmp_path, epsilon=plan().epsilon(DELTA, steps=8))
    run = private(books, steps=6)
    some_steps(run, 1)
    shutil.rmtree(books.lock_file("first").parent)
    second = private(books, "second", steps=7)
    with pytest.raises(LedgerError, match=r"took it for ended, as its lock was gone. Nothing was released"):
        some_steps(run, 1)
    assert run.steps_taken == 1
    train(second, DATA)
    second.close()
    assert books.spent().epsilon == books.epsilon


@pytest.mark.parametrize("sabotage", [None, "noise", "booking", "saving"])
def test_kills_leave_the_books_right(tmp_path, sabotage, nursery):
    code, out, errors = nursery.run(f"{__name__}:is_killed_again_and_again", str(tmp_path), sabotage)
    assert code == 0, errors
    told = json.loads(out)
    assert bool(told["faults"]) == (sabotage is not None), told
    if sabotage is None:
        assert told["kills"] == 10 and 0 <= told["releases"] - told["noise_streams"] <= 10  # killed in between
