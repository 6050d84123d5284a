"""A paid search that one process begins and is killed in (`dies`), and several ranks resume (`resume`).

It is booked in a ledger. The first rank writes the card of the best try into the folder.
"""

import dataclasses
import os
import signal
from pathlib import Path

import torch
from torch import distributed

import dpscale

from .ranks import data, loss_fn, mlp

SELECTION = dpscale.Selection(tries=5, score_noise=10.0)
SPACE = {"rate": [0.1, 1.0], "s": [0.5, 0.9]}
SEED = 4
"""With which five tries are drawn."""


def plan():
    planned = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.Poisson(size=60, batch=12), steps=3)
    return SELECTION.calibrate(planned, epsilon=4.0, delta=1e-3)


def search(folder, seed, dies=False):
    tries = []

    def train(choice, plan):
        tries.append(choice)
        if dies and len(tries) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        model = mlp()
        own = dataclasses.replace(plan, scaling=dpscale.PSASC(C=1.0, s=choice["s"]))
        private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=choice["rate"]), own)
        for batch in private.batches(data()):
            private.step(batch, loss_fn)
        return private

    books = dpscale.Ledger(folder / "books", epsilon=8.0, delta=1e-3)
    found = dpscale.tune(
        train, SPACE, lambda _: 300.0 if distributed.is_initialized() else 0.0, plan=plan(), selection=SELECTION,
        folder=folder / "search", ledger=books, seed=seed,
    )  # fmt: skip
    return found, tries


def dies(folder):
    search(Path(folder), SEED, dies=True)


def resume(folder):
    where = Path(folder)
    distributed.init_process_group("gloo")
    best, made = search(where, SEED)
    told = [None] * distributed.get_world_size()
    distributed.all_gather_object(told, (made, best.choice, best.score, {n: t.tolist() for n, t in best.state.items()}))
    assert all(each == told[0] for each in told), told
    if distributed.get_rank() == 0:
        (where / "tries").write_text(str(len(made)))
        card = best.card(search="Rates from 0.1 to 1, s from 0.5 to 0.9.")
        card.save(where / "card.json")
        card.save(where / "card.html")
    distributed.destroy_process_group()
