"""Digits and breast cancer with scikit-learn, privately: accuracy beside plain logistic regression, and ε of each fit.

It needs ``pip install 'dpscale[sklearn]'``, and no download.
"""

import logging
import re

import numpy as np
from sklearn.datasets import load_breast_cancer, load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from dpscale.integrations.sklearn import PrivateClassifier

SEEDS = 5


def published_bounds(description):
    """The table of minima and maxima in a data set's documentation. Bounds from the private rows would leak."""
    found = re.findall(r"\((?:mean|standard error|worst)\):\s+([\d.]+)\s+([\d.]+)", description)
    return np.array(found, dtype=float).T


def scores(model, X, y):
    """Test accuracy in percent, for several splits."""
    for seed in range(SEEDS):
        parts = train_test_split(X, y, test_size=0.2, random_state=seed, stratify=y)
        yield 100 * model.fit(parts[0], parts[2]).score(parts[1], parts[3])


def main():
    """Each row of the table: the model, its mean accuracy and its standard deviation, ε of one fit."""
    logging.getLogger("dpscale").setLevel(logging.ERROR)  # each fit says what it spent; here the table does
    plain = make_pipeline(StandardScaler(), LogisticRegression(max_iter=2000))
    tables = {
        "digits": (*load_digits(return_X_y=True), (0, 16)),
        "breast cancer": (*load_breast_cancer(return_X_y=True), published_bounds(load_breast_cancer().DESCR)),
    }
    for name, (X, y, bounds) in tables.items():
        for words, model in {
            "plain logistic regression": plain,
            "private, features in public bounds": PrivateClassifier(epsilon=3, bounds=tuple(bounds), classes=set(y)),
            "private, rows of norm 1": PrivateClassifier(epsilon=3, classes=set(y)),
            "private, 64 hidden units": PrivateClassifier(
                epsilon=3, bounds=tuple(bounds), classes=set(y), hidden_layer_sizes=(64,)
            ),
        }.items():
            found = list(scores(model, X, y))
            spent = f"epsilon = {model.epsilon_:.2f}" if isinstance(model, PrivateClassifier) else ""
            print(f"{name:14} {words:35} {np.mean(found):5.1f} ± {np.std(found, ddof=1):3.1f}  {spent}", flush=True)
    print(model.statement_)


if __name__ == "__main__":
    main()
