"""The code of docs/own-loop.md, which explains it."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

data = TensorDataset(torch.randn(1200, 20), torch.randint(0, 3, (1200,)))
valid = torch.randn(200, 20), torch.randint(0, 3, (200,))  # public, or somebody's to protect
model = nn.Sequential(nn.Linear(20, 32), nn.GELU(), nn.Linear(32, 3))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=60)

plan = dpscale.Plan(
    scaling=dpscale.Clip(C=1.0),
    sampling=dpscale.Poisson(size=len(data), batch=100),
    epochs=5,
).calibrate(epsilon=3, delta=1e-5)
private = dpscale.privatize(model, optimizer, plan)

best = float("inf")
for number, epoch in enumerate(private.epochs(data)):
    model.train()
    for x, y in epoch:
        with torch.autocast("cpu", torch.bfloat16):
            losses = nn.functional.cross_entropy(model(x), y, reduction="none")
        private.backward(losses.float())
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        loss = nn.functional.cross_entropy(model(valid[0]), valid[1]).item()
    print(f"epoch {number}: validation {loss:.3f}, ε = {private.epsilon():.2f}")
    if loss > 1.5 * best:  # early stopping costs nothing: what was not released is not paid for
        break
    best = min(best, loss)
print(private.statement())
