"""What the tests of the Lightning integration train; `killed` and `ranks` in processes of their own."""

import os
import signal
import warnings
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import dpscale

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that Lightning imports
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

from dpscale.integrations.lightning import PrivateCallback

from . import helpers
from .helpers import data, loss_fn, mlp, vector

LOADER = {"batch_size": 12, "shuffle": True}


def plan(**changes):
    return helpers.plan(**({"delta": 1e-3} | changes))


BUDGETS = {"automatic": {"epsilon": 4, "delta": 1e-3}, "manual": {"plan": plan(steps=10)}}
BUDGETS["accumulated"] = BUDGETS["automatic"]


class Module(pl.LightningModule):
    """A usual module; its losses are one per sample."""

    def __init__(self, lr=0.1):
        super().__init__()
        self.net, self.lr, self.validated = mlp(), lr, 0

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        return loss_fn(self, batch)

    def validation_step(self, batch, batch_idx):
        self.validated += 1
        self.log("val_loss", loss_fn(self, batch).mean())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.5)


class Manual(Module):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(loss_fn(self, batch))
        optimizer.step()
        optimizer.zero_grad()


RANKED = {"automatic": (Module, 6, 1), "manual": (Manual, 6, 1), "accumulated": (Module, 3, 2)}
"""What is trained on two ranks: a module, the batch of each rank's loader, and how many of them make up a draw."""


class Kill(pl.Callback):
    """SIGKILL in the midst of a step, after the draw."""

    def __init__(self, step):
        self.step = step

    def on_before_zero_grad(self, trainer, *args):
        if trainer.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(*callbacks, package=pl, **settings):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": any(isinstance(c, ModelCheckpoint) for c in callbacks), "accelerator": "cpu"}
    return package.Trainer(callbacks=list(callbacks), **(quiet | {"max_epochs": 2} | settings))


def fit(module=None, callback=None, *callbacks, ckpt_path=None, loader=LOADER, **settings):
    module = Module() if module is None else module
    callback = callback or PrivateCallback(plan(steps=10), seed=0)
    running = trainer(callback, *callbacks, **settings)
    running.fit(module, DataLoader(data(), **loader), ckpt_path=ckpt_path)
    return module, callback, running


def killed(folder):
    saving = ModelCheckpoint(dirpath=folder, every_n_train_steps=1, save_top_k=-1, filename="{step}")
    ledger = dpscale.Ledger(Path(folder) / "ledger", epsilon=50, delta=1e-3)
    callback = PrivateCallback(plan(steps=10), ledger=ledger, run="run")
    fit(Module(), callback, saving, Kill(7))


def ranks(folder):
    for name, (kind, rows, batches) in RANKED.items():
        module, callback, running = fit(
            kind(), PrivateCallback(**BUDGETS[name], seed=0), ModelCheckpoint(dirpath=folder, filename=name),
            devices=2, strategy="ddp", loader={"batch_size": rows}, accumulate_grad_batches=batches,
        )  # fmt: skip
        found = vector(module), callback.private.epsilon(), running.global_step, callback.private.plan.expected_batch
        torch.save(found, Path(folder) / f"{name}-{running.global_rank}.pt")
