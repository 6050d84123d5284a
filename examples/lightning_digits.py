"""Handwritten digits with Lightning, privately: a small network, checkpoints, ε on the progress bar.

It needs ``pip install 'dpscale[lightning]' scikit-learn``, and no download.
"""

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

from dpscale.integrations.lightning import PrivateCallback


class Digits(pl.LightningModule):
    """The losses stay one per sample: that is the whole change."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(),
            nn.Flatten(), nn.Linear(512, 10),
        )  # fmt: skip

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, reduction="none")

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("accuracy", (self.net(x).argmax(1) == y).float().mean(), prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, self.trainer.max_epochs)]


def main():
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8), torch.tensor(labels))
    train, test = random_split(data, [1437, 360], torch.Generator().manual_seed(0))

    private = PrivateCallback(epsilon=3, delta=1e-4)
    trainer = pl.Trainer(
        max_epochs=20, callbacks=[private, ModelCheckpoint()], accelerator="cpu", check_val_every_n_epoch=5,
        logger=False, default_root_dir="runs/lightning",
    )  # fmt: skip
    trainer.fit(Digits(), DataLoader(train, batch_size=128, shuffle=True), DataLoader(test, batch_size=360))
    print(f"test accuracy {trainer.callback_metrics['accuracy']:.3f}, epsilon = {private.private.epsilon():.2f}")
    print(private.private.statement())


if __name__ == "__main__":
    main()
