"""The code of docs/tuning.md, which explains it."""

import dataclasses

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

digits = load_digits()
x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
data, held_x, held_y = TensorDataset(x[:1300], y[:1300]), x[1300:], y[1300:]

selection = dpscale.Selection(tries=3, score_noise=10)
sampling = dpscale.Poisson(size=1300, batch=130)
plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=sampling, epochs=2)
plan = selection.calibrate(plan, epsilon=3, delta=1e-5)  # of all tries together


def train(choice, plan):
    model = nn.Linear(64, 10)
    rule = dpscale.PSASC(C=0.5, s=choice["s"])
    private = dpscale.privatize(
        model,
        torch.optim.SGD(model.parameters(), lr=choice["rate"]),
        dataclasses.replace(plan, scaling=rule),
    )
    for images, labels in private.batches(data):
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        private.backward(losses)
        private.optimizer.step()
        private.optimizer.zero_grad()
    return private


def correct(model):  # held-out people; noise is added by tune
    with torch.no_grad():
        return (model(held_x).argmax(1) == held_y).sum()


space = {"rate": [0.5, 1, 2, 4], "s": [0.5, 0.8]}
found = dpscale.tune(train, space, correct, plan=plan, selection=selection)
print(found)
