"""Selection that is paid for: its cost, its number of tries, and that nothing but the best comes out."""

import dataclasses
import json
import math

import dp_accounting
import numpy as np
import pytest
import torch

import dpscale
from dpscale.tuning import Selection

from .helpers import data, loss_fn, mlp, plan, run

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


def test_a_search_goes_on_where_it_was_killed(tmp_path):
    done = []

    def counted(choice, plan):
        if len(done) == 2:
            raise KeyboardInterrupt
        done.append(choice)
        return trained(choice, plan)

    def search(train):
        scores = iter(range(100))
        return dpscale.tune(
            train, SPACE, lambda _: float(next(scores)), plan=PLAN, selection=Selection(tries=6), seed=4,
            folder=tmp_path,
        )  # fmt: skip

    with pytest.raises(KeyboardInterrupt):
        search(counted)
    seen = []
    search(lambda choice, plan: seen.append(choice) or trained(choice, plan))
    whole = []
    dpscale.tune(
        lambda choice, plan: whole.append(choice) or trained(choice, plan), SPACE, lambda _: 0.0, plan=PLAN,
        selection=Selection(tries=6), seed=4,
    )  # fmt: skip
    assert done + seen == whole and len(seen) >= 1
    with pytest.raises(ValueError, match="It holds another one"):
        dpscale.tune(trained, {"rate": [1.0], "s": [1.0]}, lambda _: 0.0, plan=PLAN, folder=tmp_path)


def test_what_is_wrong_is_said():
    fixed = plan(sampling=dpscale.FixedSize(size=60, batch=12), delta=1e-4)
    with pytest.raises(ValueError, match="one whose neighbours have a sample more"):
        Selection().epsilon(fixed, 1e-4)
    for wrong in ({"tries": 0.5}, {"shape": -1.0}, {"score_noise": 0.0}):
        with pytest.raises(ValueError, match=f"The '{next(iter(wrong))}' parameter of Selection must be"):
            Selection(**wrong)
    with pytest.raises(ValueError, match="The 'space' parameter of tune must be"):
        dpscale.tune(trained, {}, lambda _: 0.0, plan=PLAN)


def test_a_search_within_the_budget_of_a_preset(tmp_path):
    """Tiny: one epoch, few samples. What is printed is what was paid for, and no accuracy is out of range."""
    words = ["tune", "digits", "--tries", "2", "--epochs", "1", "--train-size", "300", "--seed", "2", "--json"]
    found = json.loads(run(*words, "--out", tmp_path).stdout)
    assert 2.9 < found["epsilon"] <= 3 and found["epsilon_of_one_try"] < 3
    assert 0 <= found["test_accuracy"] <= 1 and set(found["choice"]) == {"rate", "C", "s", "gamma1"}
    assert "2 on average" in found["statement"]
    assert torch.load(tmp_path / "model.pt", weights_only=True)
