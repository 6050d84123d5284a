"""A small private run, for the tests of everything around the engine, and commands."""

import torch
from torch import nn
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import dpscale
from dpscale import cli

from .seeding import seeded

SIZE = 60


def data(size=SIZE, dtype=torch.float32):
    g = seeded(0)
    return TensorDataset(torch.randn(size, 4, generator=g, dtype=dtype), torch.randint(0, 3, (size,), generator=g))


def mlp(width=6, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 3)).to(dtype)


def loss_fn(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plan(**changes):
    settings = {
        "scaling": dpscale.Clip(C=0.5),
        "sampling": dpscale.Poisson(size=SIZE, batch=12),
        "steps": 5,
        "noise_multiplier": 1.0,
    }
    return dpscale.Plan(**(settings | changes))


def private(model=None, *, lr=0.1, seed=0, micro_batch=None, optimizer=None, compile=None, **changes):
    model = model or mlp()
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    return dpscale.privatize(model, optimizer, plan(**changes), seed=seed, micro_batch=micro_batch, compile=compile)


def vector(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def train(private, dataset=None, loss=loss_fn):
    for batch in private.batches(dataset or data()):
        private.step(batch, loss)
    return vector(private.model)


def run(*arguments, code=0):
    """A command as it would be typed, and what came of it."""
    result = CliRunner().invoke(cli.app, list(map(str, arguments)), prog_name="dpscale")
    assert result.exit_code == code, (result.output, result.exception)
    return result


def refuse(*arguments):
    """The one line on stderr of a command that is refused."""
    result = run(*arguments, code=2)
    assert result.stdout == "" and "Traceback" not in result.stderr
    (line,) = result.stderr.splitlines()
    assert line.startswith("dpscale: ")
    return line
