"""scikit-learn: `PrivateClassifier`, an estimator whose `fit` is differentially private."""

import copy
import logging
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import nn
from torch.utils.data import TensorDataset

from dpscale.checks import plain_number, require, require_positive
from dpscale.ledger import Ledger
from dpscale.noise import Source
from dpscale.one_call import plan_for
from dpscale.privatizing import privatize
from dpscale.sampling import FullBatch, Poisson
from dpscale.scaling import Scaling

log = logging.getLogger("dpscale")
OWNER = "PrivateClassifier"
ROWS = 4096  # that are computed at a time


class PrivateClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier, or a small network, that is trained with differential privacy.

    Guarantee: what one `fit` learns is (``epsilon_``, ``delta``)-differentially private, as ``statement_`` says, if
    ``bounds`` and ``classes`` do not come from the data. **Each fit pays**: k fits on the same rows, as in
    ``cross_val_score`` or a grid search, add up to up to k·ε. A ledger adds them up and refuses what is too much.

    Args:
        epsilon, delta: the budget of one fit.
        bounds: (low, high), numbers or one for each feature, known without looking at the data: features are clipped to
            them and brought to [-1, 1]. None: each row is divided by its own norm, which needs no knowledge.
        classes: all that may occur. None: those of ``y``, and then it is not hidden which classes occur.
        hidden_layer_sizes: of a network; none for a linear model.
        module: a network of your own, from the features to a score for each class; it is copied.
        epochs: passes over the data.
        batch: the expected size of a Poisson draw. None: all rows at each step, which needs the least noise.
        learning_rate: at the first step, for SGD with a momentum of 0.9; it falls to 0 as a cosine.
        scaling: None for the rule of `make_private`.
        ledger: a `Ledger`, or the path of one that exists. Every fit is booked in it.
        noise: "secure" for noise from a cryptographic generator; None: as for `privatize`.
        random_state: None for the operating system's randomness. Another one makes the noise guessable: for tests.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> X, y = load_digits(return_X_y=True)
        >>> model = PrivateClassifier(epsilon=3, bounds=(0, 16), classes=range(10), random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.8), model.epsilon_ <= 3
        (True, True)
    """

    def __init__(
        self, epsilon: float = 3.0, delta: float = 1e-5, *, bounds: tuple[Any, Any] | None = None,
        classes: Sequence[Any] | None = None, hidden_layer_sizes: Sequence[int] = (), module: nn.Module | None = None,
        epochs: float = 50, batch: int | None = None, learning_rate: float = 4.0, scaling: Scaling | None = None,
        ledger: Ledger | str | Path | None = None, noise: Source | None = None, random_state: Any = None,
    ) -> None:  # fmt: skip
        self.epsilon, self.delta, self.bounds, self.classes = epsilon, delta, bounds, classes
        self.hidden_layer_sizes, self.module, self.epochs, self.batch = hidden_layer_sizes, module, epochs, batch
        self.learning_rate, self.scaling = learning_rate, scaling
        self.ledger, self.noise, self.random_state = ledger, noise, random_state

    def fit(self, X: Any, y: Any) -> "PrivateClassifier":
        """Train on the rows of ``X`` with the labels ``y``."""
        X, y = validate_data(self, X, y, dtype=np.float64)
        check_classification_targets(y)
        require_positive(OWNER, "learning_rate", plain_number(self.learning_rate))
        self.classes_ = np.unique(y if self.classes is None else np.asarray(list(self.classes)))
        require(len(self.classes_) > 1, OWNER, "classes", "two classes or more", f"{len(self.classes_)} class")
        known = bool(np.isin(y, self.classes_).all())
        require(known, OWNER, "y", "of labels in classes", "another label", "Add it to classes, or drop its rows.")
        seed = None if self.random_state is None else int(check_random_state(self.random_state).randint(2**31))
        data = TensorDataset(self._scaled(X), torch.from_numpy(np.searchsorted(self.classes_, y)))
        with torch.random.fork_rng(devices=[], enabled=seed is not None):
            if seed is not None:
                torch.manual_seed(seed)
                log.warning("dpscale: with random_state set the noise can be guessed. Leave it out for real data.")
            self.module_ = self._made(X.shape[1], len(self.classes_))
            self._train(data, seed)
        return self

    def _made(self, features: int, classes: int) -> nn.Module:
        if self.module is not None:
            own = copy.deepcopy(self.module)
            with torch.no_grad():
                given = tuple(copy.deepcopy(own).eval()(torch.zeros(2, features)).shape)
            must = f"one that gives each row a score for each of {classes} classes"
            require(given == (2, classes), OWNER, "module", must, f"shape {given} of 2 rows")
            return own
        sizes = [features, *self.hidden_layer_sizes, classes]
        linear = [nn.Linear(*pair) for pair in pairwise(sizes)]
        for last in linear[-1].parameters():
            nn.init.zeros_(last)
        return nn.Sequential(*(each for layer in linear for each in (layer, nn.Tanh())))[:-1]

    def _train(self, data: TensorDataset, seed: int | None) -> None:
        size = len(data)
        sampling = FullBatch(size=size) if self.batch is None else Poisson(size=size, batch=plain_number(self.batch))
        budget = {"epsilon": self.epsilon, "delta": self.delta, "epochs": self.epochs}
        plan = plan_for(sampling, scaling=self.scaling, **budget)
        optimizer = torch.optim.SGD(self.module_.parameters(), lr=plain_number(self.learning_rate), momentum=0.9)
        decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, plan.steps or 1)
        ledger = Ledger(self.ledger) if isinstance(self.ledger, str | Path) else self.ledger
        run = privatize(
            self.module_, optimizer, plan, seed=seed, micro_batch=ROWS, compile=False, ledger=ledger, noise=self.noise
        )
        for batch in run.batches(data):
            run.step(batch, _losses)
            decay.step()
        self.module_.eval()
        self.epsilon_, self.statement_ = run.epsilon(), "\n".join([run.statement(), *self._told()])
        run.close()
        told = "" if ledger is None else f"; with all that are in the ledger it is {ledger.spent().epsilon:.4g}"
        unit = "" if self.bounds is not None else (
            " Each row was divided by its own norm: where features differ in unit, bounds=(low, high) learn far more."
        )  # fmt: skip
        log.warning("dpscale: this fit spent epsilon = %.4g at delta %g. Other fits on the same rows add to it%s.%s",
                    self.epsilon_, self.delta, told, unit)  # fmt: skip

    def _told(self) -> Iterator[str]:
        yield f"Classes: {'those of the labels; it is not hidden which occur' if self.classes is None else 'given'}."
        yield f"Features: {'rows divided by their own norm' if self.bounds is None else 'clipped to given bounds'}."

    def _scaled(self, X: NDArray[Any]) -> torch.Tensor:
        if self.bounds is None:
            scaled = X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), np.finfo(np.float64).tiny)
        else:
            ends = [np.asarray(each, dtype=np.float64) for each in self.bounds]
            must = f"(low, high), finite, low < high, each a number or {X.shape[1]} of them"
            fits = len(ends) == 2 and all(each.shape in ((), (X.shape[1],)) for each in ends)
            require(fits and bool((ends[0] < ends[1]).all() and np.isfinite(ends[1] - ends[0]).all()), OWNER, "bounds",
                    must, self.bounds)  # fmt: skip
            low, high = ends
            scaled = (2 * (np.clip(X, low, high) - low) / (high - low) - 1) / np.sqrt(X.shape[1])
        return torch.from_numpy(scaled.astype(np.float32))

    def predict_proba(self, X: Any) -> NDArray[Any]:
        """The probability of each class of ``classes_``, for each row."""
        check_is_fitted(self)
        X = validate_data(self, X, dtype=np.float64, reset=False)
        with torch.no_grad():
            return np.asarray(self.module_(self._scaled(X)).double().softmax(1))

    def predict(self, X: Any) -> NDArray[Any]:
        """The most probable class for each row."""
        places = self.predict_proba(X).argmax(1)
        return np.asarray(self.classes_[places])


def _losses(module: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(module(batch[0]), batch[1], reduction="none")
