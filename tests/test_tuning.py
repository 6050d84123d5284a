"""Selection that is paid for: its cost, its number of tries, and that nothing but the best comes out."""

import copy
import dataclasses
import itertools
import json
import math
import os
import shutil
import signal
from pathlib import Path

import dp_accounting
import numpy as np
import pytest
import torch

import dpscale
from dpscale.card import checksum, verify
from dpscale.lab import presets, runner, selection
from dpscale.noise import Key
from dpscale.selection import Selection
from dpscale.tuning import Try

from .helpers import data, loss_fn, mlp, plan, run, vector

ORDERS = np.concatenate([np.linspace(1.1, 10.9, 99), np.arange(11, 512)])
LONG = plan(steps=40, noise_multiplier=2.0, delta=1e-5)


def rdp_of(plan, orders=ORDERS):
    accountant = dp_accounting.rdp.RdpAccountant(orders)
    accountant.compose(plan.event())
    return accountant._rdp


def by_theorem_2(plan, mean, shape, gamma, delta):
    """ε' (λ) = ε(λ) + (1 + η)(1 − 1/λ̂)ε(λ̂) + (1 + η)·log(1/γ)/λ̂ + log(mean)/(λ − 1), least over λ and λ̂."""
    rdp = rdp_of(plan)
    more = np.min((1 + shape) * ((1 - 1 / ORDERS) * rdp + np.log(1 / gamma) / ORDERS))
    whole = rdp + more + np.log(mean) / (ORDERS - 1)
    # From Rényi DP to (ε, δ): Canonne, Kamath and Steinke, 2020.
    return np.min(whole + np.log1p(-1 / ORDERS) - (np.log(delta) + np.log(ORDERS)) / (ORDERS - 1))


@pytest.mark.parametrize("tries", [2.0, 10.0])
def test_the_cost_is_that_of_the_theorem(tries):
    ours = Selection(tries=tries).epsilon(LONG, 1e-5)
    assert ours == pytest.approx(by_theorem_2(LONG, tries, 1.0, 1 / tries, 1e-5), rel=0.01)


def test_one_try_costs_what_a_run_costs_and_more_tries_cost_more_but_less_than_their_sum():
    alone = dataclasses.replace(LONG, accountant="rdp").epsilon(1e-5)
    # Theorem 2 pays for the randomness of the number even at a mean of one; a single run is never above it.
    costs = [Selection(tries=tries).epsilon(LONG, 1e-5) for tries in (1, 2, 10, 100)]
    assert alone <= costs[0] < costs[1] < costs[2] < costs[3]
    naive = dataclasses.replace(LONG, steps=100 * LONG.steps, accountant="rdp").epsilon(1e-5)
    assert costs[3] < naive


def test_whoever_is_held_out_is_counted_too():
    quiet, loud = (Selection(score_noise=noise).epsilon(LONG, 1e-5) for noise in (0.5, 500.0))
    assert loud == Selection().epsilon(LONG, 1e-5) < quiet
    event = dp_accounting.dp_event.RepeatAndSelectDpEvent(dp_accounting.GaussianDpEvent(0.5), 8.0, 1.0)
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(event)
    assert quiet == accountant.get_epsilon(1e-5)


def test_a_budget_is_met_by_the_least_noise():
    selection = Selection(tries=5)
    found = selection.calibrate(LONG, epsilon=4.0, delta=1e-5)
    assert 3.99 < selection.epsilon(found, 1e-5) <= 4.0
    less = dataclasses.replace(found, noise_multiplier=0.999 * found.noise_multiplier)
    assert selection.epsilon(less, 1e-5) > 4.0


@pytest.mark.parametrize(
    ("selection", "variance"),
    [
        (Selection(tries=6, shape=1.0), 6 * 5.0),  # geometric
        (Selection(tries=6, shape=math.inf), 6.0),  # Poisson
        (Selection(tries=6, shape=0.0), None),
        (Selection(tries=6, shape=0.5), None),
        (Selection(tries=6, shape=3.0), None),
    ],
)
def test_the_number_of_tries_is_drawn_as_the_theorem_has_it(selection, variance):
    generator = np.random.default_rng(0)
    drawn = np.array([selection.draw(generator) for _ in range(20_000)])
    assert abs(drawn.mean() - 6) < 5 * drawn.std() / math.sqrt(len(drawn))
    assert drawn.min() == (0 if math.isinf(selection.shape) else 1)
    if variance is not None:
        assert drawn.var() == pytest.approx(variance, rel=0.1)
        return
    gamma = dp_accounting.rdp.rdp_privacy_accountant._gamma_truncated_negative_binomial(selection.shape, 6)
    eta = selection.shape  # P(K = 1) = η(1 − γ)/(γ^−η − 1), and (1 − γ)/log(1/γ) at η = 0
    once = (1 - gamma) / math.log(1 / gamma) if eta == 0 else eta * (1 - gamma) / (gamma**-eta - 1)
    assert np.mean(drawn == 1) == pytest.approx(once, abs=0.02)


def trained(choice, plan):
    model = mlp()
    rule = dpscale.PSASC(C=1.0, s=choice["s"])
    run = dpscale.privatize(
        model, torch.optim.SGD(model.parameters(), lr=choice["rate"]), dataclasses.replace(plan, scaling=rule)
    )
    for batch in run.batches(data()):
        run.step(batch, loss_fn)
    return run


SPACE = {"rate": [0.1, 1.0], "s": [0.5, 0.9]}
PLAN = plan(steps=2, delta=1e-4)


def test_the_best_try_comes_out_and_nothing_else(caplog):
    models, scores = [], []

    def score(model):
        models.append({n: t.clone() for n, t in model.state_dict().items()})
        scores.append(float(len(models) % 4))
        return scores[-1]

    found = dpscale.tune(trained, SPACE, score, plan=PLAN, selection=Selection(tries=6), seed=4)
    best = models[int(np.argmax(scores))]
    assert found.score == max(scores) and len(scores) > 1
    assert all(torch.equal(found.state[n], best[n]) for n in best)
    assert found.choice["rate"] in SPACE["rate"] and found.epsilon == Selection(tries=6).epsilon(PLAN, 1e-4)
    assert "Tries: a random number" in found.statement and "6 on average" in found.statement
    assert str(len(scores)) not in repr(found).replace(f"{found.epsilon:.4g}", "").replace(f"{found.score:.4g}", "")


def test_scores_of_held_out_people_get_noise():
    selection = Selection(tries=1, score_noise=10.0)
    found = [dpscale.tune(trained, SPACE, lambda _: 5.0, plan=PLAN, selection=selection).score for _ in range(2)]
    assert found[0] != found[1] != 5.0
    public = dpscale.tune(trained, SPACE, lambda _: 5.0, plan=PLAN, selection=Selection(tries=1))
    assert public.score == 5.0


def test_a_try_under_another_plan_is_refused():
    def cheaper(choice, plan):
        return trained(choice, dataclasses.replace(plan, noise_multiplier=0.5))

    with pytest.raises(ValueError, match="such that its run has the noise_multiplier of the plan"):
        dpscale.tune(cheaper, SPACE, lambda _: 0.0, plan=PLAN)


def test_a_try_has_nothing_of_another(tmp_path):
    """It would have more steps on the data than it pays for."""
    kept, model, selection = [], mlp(), Selection(tries=6)

    def of_one_model(choice, plan):
        run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=choice["rate"]), plan)
        for batch in run.batches(data()):
            run.step(batch, loss_fn)
        return run

    def of_one_run(choice, plan):
        kept[:] = kept or [trained(choice, plan)]
        return kept[0]

    def resumed(choice, plan):
        own = mlp()
        run = dpscale.privatize(own, torch.optim.SGD(own.parameters(), lr=choice["rate"]), plan)
        if (tmp_path / "run").exists():
            run.load(tmp_path / "run")
        for batch in itertools.islice(run.batches(data()), 1):
            run.step(batch, loss_fn)
        run.save(tmp_path / "run")
        return run

    for train, got in (
        (of_one_model, "the model of another"),
        (of_one_run, "the model of another"),
        (resumed, "a run"),
    ):
        with pytest.raises(ValueError, match=rf"such that each try begins anew\. Got '{got}.*Make the model inside"):
            dpscale.tune(train, SPACE, lambda _: 0.0, plan=PLAN, selection=selection, seed=4)


@pytest.mark.parametrize("runs", ["one_after_the_other", "a_search_of_its_own"])
def test_a_try_of_several_runs_is_refused(runs):
    """Whoever throws away a run that looked bad has seen it."""

    def one_after_the_other(choice, plan):
        trained(choice, plan)
        return trained(choice, plan)

    def a_search_of_its_own(choice, plan):
        found = dpscale.tune(trained, SPACE, lambda _: 0.0, plan=plan, selection=Selection(tries=6), seed=4)
        return Try(model=mlp(), plan=found.plan)

    train = {each.__name__: each for each in (one_after_the_other, a_search_of_its_own)}[runs]
    with pytest.raises(ValueError, match=r"such that it releases 2 steps, those of one run\. Got \d+ instead\. Runs"):
        dpscale.tune(train, SPACE, lambda _: 0.0, plan=PLAN, selection=Selection(tries=1))


@pytest.mark.parametrize("score", [math.inf, -math.inf, math.nan])
def test_no_score_of_people_escapes_its_noise(score):
    selection = Selection(tries=1, score_noise=10.0)
    with pytest.raises(ValueError, match=r"such that it counts people\. Got .* instead\. Noise hides one person"):
        dpscale.tune(trained, SPACE, lambda _: score, plan=PLAN, selection=selection)
    assert dpscale.tune(trained, SPACE, lambda _: score, plan=PLAN, selection=Selection(tries=1)) is not None


def test_a_score_leaves_nothing_in_the_model():
    """What it has from those who are held out would have no noise."""

    def leaving(model):
        with torch.no_grad():
            model[0].weight.fill_(7.0)
        return 0.0

    found = dpscale.tune(trained, SPACE, leaving, plan=PLAN, selection=Selection(tries=1))
    assert not (found.state["0.weight"] == 7.0).any()


@pytest.mark.parametrize("changes", [{"noise_multiplier": None}, {"noise_multiplier": None, "unsafe_no_noise": True}])
def test_a_plan_without_noise_is_refused(changes):
    with pytest.raises(ValueError, match=r"^The 'plan' parameter of tune must be one with noise and steps\. Got Plan"):
        dpscale.tune(trained, SPACE, lambda _: 0.0, plan=dataclasses.replace(PLAN, **changes))
    with pytest.raises(ValueError, match=r"^The 'plan' parameter of tune must be a dpscale\.Plan\. Got 'str' instead"):
        dpscale.tune(trained, SPACE, lambda _: 0.0, plan="plan")


def test_a_try_that_is_no_run_or_of_people_unsaid_is_refused(capfd):
    with pytest.raises(ValueError, match=r"a function that returns its Private\. Got 'NoneType' instead"):
        dpscale.tune(lambda choice, plan: None, SPACE, lambda _: 0.0, plan=PLAN)

    def of_people(choice, plan):
        model = mlp()
        run = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=choice["rate"]), plan)
        for batch in run.batches(dpscale.by_user(data(), range(60), records=2)):
            run.step(batch, loss_fn)
        return run

    with pytest.raises(ValueError, match=r"its run has the records of the plan, None\. Got 2"):
        dpscale.tune(of_people, SPACE, lambda _: 0.0, plan=PLAN)
    assert Selection(tries=np.int64(3)).epsilon(PLAN, 1e-4) == Selection(tries=3).epsilon(PLAN, 1e-4)
    assert "failed to converge" not in capfd.readouterr().err  # of orders that the accountant leaves out


def test_a_search_goes_on_where_it_was_interrupted(tmp_path):
    """With the number of tries that it has; the try that was under way is spent."""
    begun, whole = [], []

    def searched(train, **changes):
        return dpscale.tune(train, SPACE, lambda _: 0.0, plan=PLAN, selection=Selection(tries=6), seed=4, **changes)

    def interrupted(choice, plan):
        begun.append(choice)
        if len(begun) == 3:
            raise KeyboardInterrupt
        return trained(choice, plan)

    with pytest.raises(KeyboardInterrupt):
        searched(interrupted, folder=tmp_path)
    found = searched(interrupted, folder=tmp_path)
    searched(lambda choice, plan: whole.append(choice) or trained(choice, plan))
    assert begun == whole and len(whole) > 3
    assert "Resumed: once" in found.card().values["history"][0]
    assert searched(interrupted, folder=tmp_path).score == found.score and begun == whole  # all is done: nothing more
    with pytest.raises(ValueError, match="It holds another one"):
        dpscale.tune(trained, {"rate": [1.0], "s": [1.0]}, lambda _: 0.0, plan=PLAN, folder=tmp_path)


def test_two_searches_do_not_share_a_folder(tmp_path):
    """Both would read how many tries are left, and make them."""

    def searched(train):
        return dpscale.tune(train, SPACE, lambda _: 0.0, plan=PLAN, selection=Selection(tries=1), folder=tmp_path)

    def another_begins(choice, plan):
        with pytest.raises(RuntimeError, match="Another search goes on in"):
            searched(trained)
        return trained(choice, plan)

    assert searched(another_begins).score == 0.0
    assert searched(trained).score == 0.0  # the folder is free again


SEARCH = Selection(tries=4, score_noise=20.0)
COST = SEARCH.epsilon(PLAN, 1e-4)


def booked(folder, train=trained, run=None, place="search", **changes):
    books = dpscale.Ledger(folder / "books", epsilon=1.5 * COST, delta=1e-4)
    return books, lambda: dpscale.tune(
        train, SPACE, lambda _: 1.0, plan=PLAN, selection=SEARCH, folder=folder / place, ledger=books, run=run,
        **changes,
    )  # fmt: skip


def test_a_search_is_paid_for_as_a_whole_before_its_first_try(tmp_path):
    spent = []
    books, search = booked(tmp_path, lambda choice, plan: spent.append(books.spent().epsilon) or trained(choice, plan))
    found = search()
    assert set(spent) == {books.spent().epsilon} == {found.epsilon} == {COST}
    (row,) = books.runs()
    assert [stretch.state for stretch in row.stretches] == ["confirmed"] and not row.live
    assert run("ledger", "show", books.path).stdout.count(f"{COST:.4g}") == 2
    with pytest.raises(ValueError, match="does not fit into the budget"):
        booked(tmp_path, place="another")[1]()
    assert search().state.keys() == found.state.keys() and books.spent().epsilon == COST  # it is over: nothing is tried
    card = found.card().to_dict()
    assert verify(card) == [] and card["guarantee"]["epsilon"] == COST and card["composed"]["run"] == row.name


def dies_in_its_second_try(folder, seed):
    begun = []

    def killed(choice, plan):
        begun.append(choice)
        if len(begun) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return trained(choice, plan)

    booked(Path(folder), killed, seed=seed)[1]()


def test_a_search_that_was_killed_neither_gains_tries_nor_loses_its_cost(tmp_path, monkeypatch, nursery):
    seed = next(k for k in range(99) if SEARCH.draw(Key(k).generator("tuning/number")) == 5)
    code, _, errors = nursery.run(f"{__name__}:dies_in_its_second_try", str(tmp_path), seed)
    assert code == -signal.SIGKILL, errors
    tries = []
    books, search = booked(tmp_path, lambda choice, plan: tries.append(choice) or trained(choice, plan), seed=seed)
    assert books.spent().epsilon == COST and books.runs()[0].stretches[0].state == "reserved"
    monkeypatch.setattr(Selection, "draw", None)  # the number is not drawn again
    found = search()
    assert len(tries) == 5 - 2 and books.spent().epsilon == COST == found.epsilon
    assert [stretch.state for stretch in books.runs()[0].stretches] == ["charged", "confirmed"]
    told = " ".join(found.card().values["history"])
    assert "number of tries was drawn once" in told and "charged as a whole" in told


def test_the_number_of_a_booked_search_cannot_be_drawn_again(tmp_path):
    _, search = booked(tmp_path, run="the search")
    search()
    shutil.rmtree(tmp_path / "search")
    with pytest.raises(ValueError, match="must not be drawn again"):
        search()
    assert [path.name for path in (tmp_path / "search").iterdir()] == [".lock"]
    with pytest.raises(ValueError, match="The 'folder' parameter of tune must be given with a ledger"):
        dpscale.tune(trained, SPACE, lambda _: 0.0, plan=PLAN, ledger=dpscale.Ledger(tmp_path / "books"))


def test_a_booked_search_goes_on_in_its_ledger_alone(tmp_path):
    _, search = booked(tmp_path, run="one")
    search()
    with pytest.raises(ValueError, match="booked in a ledger as run 'one'"):
        dpscale.tune(trained, SPACE, lambda _: 0.0, plan=PLAN, selection=SEARCH, folder=tmp_path / "search")
    with pytest.raises(ValueError, match="must be 'one', as in its folder"):
        booked(tmp_path, run="two")[1]()


def test_a_search_and_a_run_add_up_in_a_ledger(tmp_path):
    books, search = booked(tmp_path)
    search()
    model = mlp()
    later = dpscale.privatize(
        model, torch.optim.SGD(model.parameters()), plan(steps=1, noise_multiplier=9.0), ledger=books
    )
    for batch in later.batches(data()):
        later.step(batch, loss_fn)
    later.close()
    accountant = dp_accounting.rdp.RdpAccountant()
    accountant.compose(dp_accounting.dp_event.RepeatAndSelectDpEvent(PLAN.event(), SEARCH.tries, SEARCH.shape))
    accountant.compose(later.plan.event())
    assert COST < books.spent().epsilon == pytest.approx(accountant.get_epsilon(1e-4), rel=1e-9)
    assert books.spent().how == "composed by Rényi DP, everything together"


def test_a_model_made_from_a_run_may_be_the_try():
    def averaged(choice, plan):
        ran = trained(choice, plan)
        model = mlp()
        ran.close()
        return Try(model=model, plan=ran.plan, about=ran.about())

    found = dpscale.tune(averaged, SPACE, lambda _: 0.0, plan=PLAN, selection=Selection(tries=1))
    assert all(torch.equal(found.state[n], t) for n, t in mlp().state_dict().items())
    assert found.card().values["checks"]["times that the model was checked"] >= 1


@pytest.fixture(scope="module")
def card_of_a_search():
    found = dpscale.tune(trained, SPACE, lambda _: 0.0, plan=PLAN, selection=Selection(tries=3, score_noise=2.0))
    card = found.card().to_dict()
    assert verify(card) == [] and card["search"].startswith("Paid for")
    return card


@pytest.mark.parametrize("change", ["tries", "shape", "score_noise", "epsilon", "noise"])
def test_a_changed_card_of_a_search_fails(change, card_of_a_search):
    card = copy.deepcopy(card_of_a_search)
    where = {"epsilon": card["guarantee"], "noise": card["mechanism"]}.get(change, card["selection"])
    half = 0.5 * card["guarantee"]["epsilon"]
    values = {"tries": 30.0, "shape": "inf", "score_noise": 0.5, "epsilon": half, "noise": 0.5}
    where["noise_multiplier" if change == "noise" else change] = values[change]
    card["checksum"] = checksum(card)
    assert any("by dp-accounting" in problem or "not of these numbers" in problem for problem in verify(card))


def test_what_is_wrong_is_said():
    fixed = plan(sampling=dpscale.FixedSize(size=60, batch=12), delta=1e-4)
    with pytest.raises(ValueError, match="one whose neighbours have a sample more"):
        Selection().epsilon(fixed, 1e-4)
    for wrong in ({"tries": 0.5}, {"shape": -1.0}, {"score_noise": 0.0}):
        with pytest.raises(ValueError, match=f"The '{next(iter(wrong))}' parameter of Selection must be"):
            Selection(**wrong)
    for space in ({}, [0.1, 1.0], {"rate": 0.1}, {"rate": []}, {"rate": "fast"}):
        with pytest.raises(ValueError, match="The 'space' parameter of tune must be lists of values by name"):
            dpscale.tune(trained, space, lambda _: 0.0, plan=PLAN)
    with pytest.raises(ValueError, match=r"The 'train' parameter of tune must be a function. Got 'NoneType'"):
        dpscale.tune(None, SPACE, lambda _: 0.0, plan=PLAN)
    with pytest.raises(ValueError, match=r"The 'score' parameter of tune must be a function. Got 'int'"):
        dpscale.tune(trained, SPACE, 5, plan=PLAN)
    with pytest.raises(ValueError, match=r"The 'ledger' parameter of tune must be a dpscale.Ledger, or None"):
        dpscale.tune(trained, SPACE, lambda _: 0.0, plan=PLAN, folder="x", ledger="books")


def test_values_may_be_arrays():
    found = dpscale.tune(trained, {"rate": np.array([0.1]), "s": (0.5,)}, lambda _: 0.0, plan=PLAN, seed=1)
    assert found.choice == {"rate": 0.1, "s": 0.5}


TINY = presets.PRESETS["digits"].replace(epochs=1, train_size=300)
CHOICE = {"rate": 1.2, "C": 0.3, "s": 0.7, "gamma1": 1.0}


def test_tries_of_the_lab_train_as_its_runs_do():
    """Schedule, averages and views of the configuration are heeded; without a seed no two tries are alike."""
    held = runner.load(TINY, "search")
    planned = dataclasses.replace(runner.planned(TINY, held), noise_multiplier=1.0, delta=1e-4)

    def weights(seed=5, **changes):
        made, own = selection.job(TINY.replace(**changes), CHOICE, planned, seed)
        return vector(runner.trained(made, own, held))

    plain = weights()
    assert torch.equal(plain, weights())
    for changes in ({"schedule": "cosine"}, {"average": 0.9}, {"augment": {"shift": 1}, "views": 2}):
        assert not torch.equal(plain, weights(**changes)), changes
    assert not torch.equal(weights(None), weights(None))


def test_a_search_within_the_budget_of_a_preset(tmp_path):
    """Tiny: one epoch, few samples. What is printed is what was paid for, and no accuracy is out of range."""
    words = ["tune", "digits", "--tries", "2", "--epochs", "1", "--train-size", "300", "--seed", "2", "--json"]
    books = dpscale.Ledger(tmp_path / "books", epsilon=3, delta=1e-4)
    words += ["--ledger", books.path, "--out", tmp_path / "search"]
    found = json.loads(run(*words).stdout)
    assert 2.9 < found["epsilon"] <= 3 and found["epsilon_of_one_try"] < 3
    assert books.spent().epsilon == found["epsilon"]
    assert 0 <= found["test_accuracy"] <= 1 and set(found["choice"]) == {"rate", "C", "s", "gamma1"}
    assert "2 on average" in found["statement"]
    assert torch.load(tmp_path / "search/model.pt", weights_only=True)
    card = json.loads(run("card", tmp_path / "search", "--json").stdout)
    assert verify(card) == [] and card["guarantee"]["epsilon"] == found["epsilon"]
    assert card["mechanism"]["scaling"]["s"] == found["choice"]["s"]
    assert json.loads(run(*words).stdout) == found and books.spent().epsilon == found["epsilon"]  # it is over


def test_a_search_that_was_killed_and_resumed_on_two_ranks_has_a_card(tmp_path, nursery):
    """One number of tries, one choice and one winner on both; booked once; and verify knows a changed card."""
    assert nursery.run("tests.tuned_ranks:dies", str(tmp_path))[0] == -signal.SIGKILL
    nursery.ranks(2, "tests.tuned_ranks:resume", str(tmp_path))
    assert int((tmp_path / "tries").read_text()) == 5 - 2  # one was finished, one was spent
    card = json.loads((tmp_path / "card.json").read_text(encoding="utf-8"))
    assert verify(card) == [] and card["guarantee"]["epsilon"] == pytest.approx(4.0, rel=1e-3)
    told = " ".join(card["history"])
    assert "Processes: 2" in told and "Resumed: once" in told and "charged as a whole" in told
    books = dpscale.Ledger(tmp_path / "books")
    assert books.spent().epsilon == card["guarantee"]["epsilon"] and len(books.runs()) == 1
    for change in ({"tries": 50.0}, {"score_noise": 2.0}):
        changed = {**card, "selection": {**card["selection"], **change}}
        changed["checksum"] = checksum(changed)
        assert any("by dp-accounting it is at least" in problem for problem in verify(changed))
    page = (tmp_path / "card.html").read_text(encoding="utf-8")
    assert "Paid for: the best of 5 tries on average." in page and "Processes: 2" in page
