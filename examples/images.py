"""The code of docs/images.md, which explains it."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

digits = load_digits()
x = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
y = torch.tensor(digits.target)
data, test = TensorDataset(x[:1500], y[:1500]), (x[1500:], y[1500:])

model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1),
    nn.GroupNorm(4, 16),
    nn.ReLU(),
    nn.Conv2d(16, 32, 3, stride=2, padding=1),
    nn.GroupNorm(4, 32),
    nn.ReLU(),
    nn.Flatten(),
    nn.Linear(32 * 4 * 4, 10),
)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)


def loss_fn(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels, reduction="none")


private = dpscale.make_private(model, optimizer, data, epsilon=3, delta=1e-5, epochs=20, batch=128)
for epoch in private.epochs():
    for batch in epoch:
        private.step(batch, loss_fn)

model.eval()
with torch.no_grad():
    right = (model(test[0]).argmax(1) == test[1]).float().mean()
print(f"test accuracy {100 * right:.1f}%, ε = {private.epsilon():.2f}")

class Folder(torch.utils.data.Dataset):
    """Stands for yours: it reads and decodes one image."""

    def __len__(self):
        return 300

    def __getitem__(self, i):
        return x[i], y[i]


budget = {"epsilon": 3, "delta": 1e-4}
private = dpscale.make_private(model, optimizer, Folder(), epochs=1, batch=100, **budget)
for batch in private.batches(num_workers=2):
    batch = batch.to("cuda" if torch.cuda.is_available() else "cpu")
    private.step(batch, loss_fn)
