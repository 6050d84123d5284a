"""The code of docs/people.md, which explains it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

visits = TensorDataset(torch.randn(3_000, 20), torch.randint(0, 3, (3_000,)))
patients = torch.randint(0, 800, (3_000,))  # whose visit each one is: numbers or names

people = dpscale.by_user(visits, patients, records=4)
model = nn.Linear(20, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
private = dpscale.make_private(model, optimizer, people, epsilon=3, delta=1e-4, epochs=3, batch=100)
for epoch in private.epochs():
    for x, y in epoch:
        losses = nn.functional.cross_entropy(model(x), y, reduction="none")  # one per record
        private.backward(losses)
        optimizer.step()
        optimizer.zero_grad()
print(private.statement())

private = dpscale.make_private(model, optimizer, people, epsilon=3, delta=1e-4, epochs=1, batch=100)
for batch in private.batches():
    for part in private.parts(batch, 32):  # 32 people
        x, y = part
        private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"), part)
    optimizer.step()
    optimizer.zero_grad()
