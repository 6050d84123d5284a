"""`PrivateClassifier`: scikit-learn's own checks, what a fit spends, and what it takes from the data."""

import logging
import os
import pickle
import signal

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, make_blobs
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import check_estimator
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

import dpscale
from dpscale.integrations.sklearn import PrivateClassifier

X, y = make_blobs(120, centers=3, n_features=2, random_state=0)
QUICK = {"epochs": 10, "random_state": 0}


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.module_.parameters()])


def test_the_checks_of_scikit_learn_pass():
    """None is excused. It is skipped only what scikit-learn itself skips without SCIPY_ARRAY_API."""
    found = check_estimator(PrivateClassifier(epochs=20), on_skip=None)
    assert {check["check_name"] for check in found if check["status"] != "passed"} <= {"check_array_api_input"}
    assert len(found) > 50


def test_a_fit_is_the_plain_loop_at_the_same_seed():
    model = PrivateClassifier(epsilon=3, bounds=(-15, 15), **QUICK).fit(X, y)
    seed = int(np.random.RandomState(0).randint(2**31))
    plain = nn.Sequential(nn.Linear(2, 3))
    for p in plain.parameters():
        nn.init.zeros_(p)
    optimizer = torch.optim.SGD(plain.parameters(), lr=4.0, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    plan = dpscale.Plan(scaling=dpscale.PSASC(C=0.5, s=0.5, r=1e-3), sampling=dpscale.FullBatch(size=120), steps=10)
    run = dpscale.privatize(plain, optimizer, plan.calibrate(epsilon=3, delta=1e-5), seed=seed)
    data = TensorDataset(torch.tensor(X / 15 / np.sqrt(2), dtype=torch.float32), torch.tensor(y))
    for batch in run.batches(data):
        run.step(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
        schedule.step()
    torch.testing.assert_close(weights(model), torch.cat([p.detach().flatten() for p in plain.parameters()]))
    assert model.epsilon_ == run.epsilon() <= 3


def test_it_learns_digits():
    digits, labels = load_digits(return_X_y=True)
    model = PrivateClassifier(epsilon=3, bounds=(0, 16), classes=range(10)).fit(digits, labels)
    assert model.score(digits, labels) > 0.85  # 10% by chance; without noise about 97
    chances = model.predict_proba(digits[:5])
    assert chances.shape == (5, 10) and np.allclose(chances.sum(1), 1)
    assert model.statement_.startswith("Guarantee: (3, 1e-05)-differential privacy.")


def test_fits_differ_unless_a_random_state_is_set(caplog):
    with caplog.at_level(logging.WARNING, "dpscale"):
        one, two = (weights(PrivateClassifier(epochs=5).fit(X, y)) for _ in range(2))
        assert not torch.equal(one, two) and "guessed" not in caplog.text
        same = [weights(PrivateClassifier(epochs=5, hidden_layer_sizes=(4,), random_state=3).fit(X, y)) for _ in (1, 2)]
    assert torch.equal(*same) and "the noise can be guessed" in caplog.text


# -- What is taken from the data -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [None, (-15, 15), (np.array([-15.0, -15.0]), np.array([15.0, 15.0]))])
def test_a_row_is_scaled_without_the_others(bounds):
    model = PrivateClassifier(bounds=bounds, **QUICK).fit(X, y)
    assert np.array_equal(model._scaled(X)[:1], model._scaled(X[:1]))
    assert model._scaled(X * 100).norm(dim=1).max() <= 1 + 1e-6
    one, all_ = model.predict_proba(X[:1]), model.predict_proba(X)
    assert np.allclose(one, all_[:1])


def test_classes_may_be_given_and_the_statement_says_which(caplog):
    model = PrivateClassifier(classes=["a", "b", "c"], **QUICK).fit(X, np.array(["a", "b"])[y % 2])
    assert list(model.classes_) == ["a", "b", "c"] and model.predict_proba(X).shape == (120, 3)
    assert "Classes: given." in model.statement_
    assert "it is not hidden which occur" in PrivateClassifier(**QUICK).fit(X, y).statement_
    with pytest.raises(ValueError, match=r"'y' parameter of PrivateClassifier must be of labels in classes"):
        PrivateClassifier(classes=[0, 1], **QUICK).fit(X, y)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"bounds": (1, 1)}, r"'bounds' .*low < high"),
        ({"bounds": (0, np.inf)}, r"'bounds' .*finite"),
        ({"bounds": ([0, 0, 0], [1, 1, 1])}, r"'bounds' .*each a number or 2 of them"),
        ({"bounds": (0, 1, 2)}, r"'bounds' .*\(low, high\)"),
        ({"module": nn.Linear(2, 2)}, r"'module' .*score for each of 3 classes\. Got 'shape \(2, 2\) of 2 rows'"),
        ({"epsilon": 0}, r"'epsilon' parameter of Plan\.calibrate must be a finite number > 0"),
        ({"delta": 1}, r"'delta'"),
        ({"learning_rate": -1}, r"'learning_rate' parameter of PrivateClassifier"),
        ({"classes": [1]}, r"'classes' .*two classes or more\. Got '1 class'"),
        ({"batch": 500}, r"'batch'"),
    ],
)
def test_bad_parameters_are_refused_at_fit(given, words):
    model = PrivateClassifier(**(QUICK | given))
    with pytest.raises(ValueError, match=words):
        model.fit(X, y)


def test_a_module_of_ones_own_is_copied_and_poisson_draws_can_be_taken():
    module = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 3))
    before = module[0].weight.detach().clone()
    model = PrivateClassifier(module=module, batch=30, **QUICK).fit(X, y)
    assert torch.equal(module[0].weight, before) and not torch.equal(model.module_[0].weight, before)
    assert "Poisson" in model.statement_ and clone(model).module is not None


def test_a_coupled_module_is_refused():
    module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 3))
    with pytest.raises(dpscale.UnsupportedModel):
        PrivateClassifier(module=module, **QUICK).fit(X, y)


# -- What several fits cost ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("bounds", [None, (-15, 15)])
def test_rows_that_were_divided_by_their_norm_are_said_with_every_fit(caplog, bounds):
    """A table of several units is learned badly so, and its scores alone do not say why."""
    PrivateClassifier(bounds=bounds, **QUICK).fit(X, y)
    assert ("bounds=(low, high)" in caplog.text) == (bounds is None)


def test_every_fit_of_a_cross_validation_is_booked_and_said(tmp_path, caplog):
    ledger = dpscale.Ledger(tmp_path / "ledger", epsilon=20, delta=1e-4)
    pipeline = make_pipeline(FunctionTransformer(np.tanh), PrivateClassifier(epsilon=1, ledger=ledger, epochs=5))
    with caplog.at_level(logging.WARNING, "dpscale"):
        scores = cross_val_score(pipeline, X, y, cv=3)
    assert len(scores) == 3 and len(ledger.runs()) == 3
    assert caplog.text.count("this fit spent epsilon = 1 at delta 1e-05. Other fits on the same rows add to it") == 3
    assert 1 < ledger.spent().epsilon < 3
    assert f"with all that are in the ledger it is {ledger.spent().epsilon:.4g}" in caplog.text


def test_a_ledger_ends_a_search_that_would_spend_too_much(tmp_path):
    dpscale.Ledger(tmp_path / "ledger", epsilon=2, delta=1e-4)
    model = PrivateClassifier(epsilon=1, ledger=str(tmp_path / "ledger"), epochs=5)
    search = GridSearchCV(model, {"learning_rate": [1.0, 4.0]}, cv=3, error_score="raise")
    with pytest.raises(ValueError, match=r"does not fit into the budget.*Nothing was released"):
        search.fit(X, y)  # six fits, and one more for the best
    ledger = dpscale.Ledger(tmp_path / "ledger")
    assert 1 < len(ledger.runs()) < 6 and 1 < ledger.spent().epsilon <= 2


def dies_at_its_third_step(ledger):
    steps = []

    def end(*_):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    register_optimizer_step_post_hook(end)
    PrivateClassifier(epsilon=1, ledger=ledger, epochs=10).fit(X, y)


def test_a_killed_fit_is_charged_and_the_next_adds_to_it(tmp_path, nursery):
    ledger = dpscale.Ledger(tmp_path / "ledger", epsilon=20, delta=1e-4)
    code, _, errors = nursery.run(f"{__name__}:dies_at_its_third_step", str(tmp_path / "ledger"))
    assert code == -signal.SIGKILL, errors
    (lost,) = ledger.runs()
    assert 3 <= lost.charged <= 10
    before = ledger.spent().epsilon
    PrivateClassifier(epsilon=1, ledger=ledger, epochs=10).fit(X, y)
    assert len(ledger.runs()) == 2 and ledger.spent().epsilon > before > 0.1


def test_a_grid_search_and_pickle():
    space = {"learning_rate": np.float32([1, 4]), "batch": np.array([20]), "epsilon": np.float32([3])}
    search = GridSearchCV(PrivateClassifier(epochs=5), space, cv=2, error_score="raise").fit(X, y)
    again = pickle.loads(pickle.dumps(search.best_estimator_))
    assert np.array_equal(again.predict(X), search.predict(X)) and again.epsilon_ <= 3
