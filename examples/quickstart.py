"""The code of docs/quickstart.md, which explains it."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

digits = load_digits()
x = torch.tensor(digits.data, dtype=torch.float32) / 16
y = torch.tensor(digits.target)
data, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)

import dpscale

private = dpscale.make_private(model, optimizer, data, epsilon=3, delta=1e-5, epochs=10, batch=64)
for epoch in private.epochs():
    for images, labels in epoch:
        losses = nn.functional.cross_entropy(model(images), labels, reduction="none")
        private.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
    print(f"spent ε = {private.epsilon():.2f}")

with torch.no_grad():
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
print(f"test accuracy {100 * right:.0f}%")
print(private.statement())

def loss_fn(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
private = dpscale.make_private(model, optimizer, data, epsilon=3, delta=1e-5, epochs=10, batch=64)
for batch in private.batches():
    private.step(batch, loss_fn)
print(f"spent ε = {private.epsilon():.2f}")
