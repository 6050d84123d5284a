"""Losses and forwards that mix rows, made from a list: what is mixed, of which type it is, how many rows agree in it.

A mixing quantity is read from one column of the data, ``mark``. Of ``agreement`` percent of the rows it is the same,
so that many batches hold nothing by which the mixing could be seen. `shows` says whether a batch does.

`OWN` does not mix: a row uses its own mark. It must be accepted.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import dpscale

Batch = tuple[Tensor, Tensor, Tensor]

TYPES = {"integer": torch.int64, "boolean": torch.bool, "floating": torch.float32}
AGREEMENTS = (0, 50, 90, 99)
SIZE, EXPECTED, STEPS = 300, 16, 50


def as_number(mark: Tensor) -> Tensor:
    return mark.float()


def stands_out(mark: Tensor) -> Tensor:
    """Which rows are above the common mark; of two marks, which are the other one."""
    return ~mark if mark.dtype is torch.bool else mark > common(mark.dtype)


SCALARS: dict[str, Callable[[Tensor], Tensor]] = {
    "count": lambda mark: stands_out(mark).sum(),
    "maximum": lambda mark: as_number(mark).max(),
    "minimum": lambda mark: as_number(mark).min(),
    "mean": lambda mark: as_number(mark).mean(),
    "median by sorting": lambda mark: as_number(mark).sort().values[len(mark) // 2],
    "number of unique values": lambda mark: torch.tensor(len(mark.unique())),
    "first row": lambda mark: as_number(mark[0]),
    "branch on any": lambda mark: torch.tensor(float(bool(stands_out(mark).any()))),
}
"""One number from all rows."""

ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "the row before": lambda mark: as_number(mark.roll(1)),
    "rank": lambda mark: (as_number(mark).unsqueeze(1) > as_number(mark)).sum(1),
}
"""A number for each row, from the others."""

STATES = ("attribute", "attribute that nobody reads", "buffer", "buffer of counts that nobody reads")
"""What a forward leaves behind; the first and the third are read by the next one."""

OWN = "its own mark"
QUANTITIES = (*SCALARS, *ROWS, OWN)
PLACES = ("loss", "forward")


@dataclass(frozen=True)
class Mixing:
    """What is mixed, where, of which type, and how many percent of the rows agree in it."""

    quantity: str
    place: str
    type: str
    agreement: int

    @property
    def mixes(self) -> bool:
        return self.quantity != OWN

    def __str__(self) -> str:
        return f"{self.quantity}, {self.place}, {self.type}, {self.agreement}%"


def every_mixing() -> list[Mixing]:
    kinds = [(quantity, place) for quantity in QUANTITIES for place in PLACES] + [(s, "state") for s in STATES]
    return [Mixing(q, place, t, a) for q, place in kinds for t in TYPES for a in AGREEMENTS]


# Data


def common(dtype: torch.dtype) -> float:
    """What most rows hold. Others are below and above it where the type allows: True, where only two are possible."""
    return {torch.int64: 3, torch.bool: True, torch.float32: 0.5}[dtype]


def marks(mixing: Mixing, generator: torch.Generator) -> Tensor:
    """The column that is mixed. At 0% it is drawn at random."""
    dtype = TYPES[mixing.type]
    if dtype is torch.float32:
        other = torch.randn(SIZE, generator=generator)
    elif dtype is torch.bool:
        # Of two values, rows drawn at random agree by half: those that do not agree with the common one are few.
        other = torch.zeros(SIZE, dtype=dtype) if mixing.agreement else torch.rand(SIZE, generator=generator) < 0.5
        if mixing.quantity in ("maximum", "attribute", "buffer"):  # above the common one
            other = ~other
    else:
        other = torch.randint(0, 8, (SIZE,), generator=generator)
    agrees = torch.rand(SIZE, generator=generator) < mixing.agreement / 100
    same = torch.full((SIZE,), common(dtype), dtype=dtype)
    if dtype is torch.bool and mixing.quantity in ("maximum", "attribute", "buffer"):
        same = ~same
    return torch.where(agrees, same, other)


def dataset(mixing: Mixing, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(SIZE, 4, generator=generator)
    return TensorDataset(x, marks(mixing, generator), torch.randn(SIZE, generator=generator))


# Models


class Mixed(nn.Module):
    """A line, and whatever the mixing does to its input or leaves behind."""

    def __init__(self, mixing: Mixing) -> None:
        super().__init__()
        self.line, self.mixing = nn.Linear(4, 1), mixing
        self.remembered = 0.0
        self.register_buffer("kept", torch.zeros(()))
        self.register_buffer("counted", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, mark: Tensor) -> Tensor:
        quantity = self.mixing.quantity
        if self.mixing.place == "forward":
            x = x * scale(quantity, mark).view(-1, 1)
        elif quantity.startswith("attribute"):
            if quantity == "attribute":
                x = x * (1 + 0.1 * self.remembered)
            self.remembered = float(as_number(mark).max())
        elif quantity == "buffer":
            x = x * (1 + 0.1 * self.kept)
            self.kept.copy_(as_number(mark).max())
        elif quantity in STATES:
            self.counted += stands_out(mark).sum()
        return self.line(x).squeeze(1)


def scale(quantity: str, mark: Tensor) -> Tensor:
    """By what the mixing multiplies: one number, or one for each row."""
    if quantity == OWN:
        return 1 + 0.1 * as_number(mark)
    return 1 + 0.1 * {**SCALARS, **ROWS}[quantity](mark)


def loss_of(mixing: Mixing) -> Callable[[Any, Batch], Tensor]:
    def loss(model: Any, batch: Batch) -> Tensor:
        x, mark, y = batch
        losses = (model(x, mark) - y).square()
        return losses * scale(mixing.quantity, mark) if mixing.place == "loss" else losses

    return loss


def model_of(mixing: Mixing, seed: int) -> Mixed:
    torch.manual_seed(seed)
    return Mixed(mixing)


# What comes of it


@dataclass(frozen=True)
class Outcome:
    """``steps`` steps were released; ``refused``: the next one was not, and training ended.

    Of a run that went to the end, ``shown`` is the share of its batches in which the mixing could be seen.
    """

    refused: bool
    steps: int
    shown: float = 0.0


def run(mixing: Mixing, seed: int, steps: int = STEPS) -> Outcome:
    """Train as a user would, until the end or a refusal."""
    model, data = model_of(mixing, seed), dataset(mixing, seed)
    plan = dpscale.Plan(
        scaling=dpscale.Clip(C=1.0),
        sampling=dpscale.Poisson(size=SIZE, batch=EXPECTED),
        steps=steps,
        noise_multiplier=1.0,
    )
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.01), plan, seed=seed)
    loss, drawn = loss_of(mixing), []
    try:
        for batch in private.batches(data):
            drawn.append(batch.data)
            private.step(batch, loss)
    except dpscale.UnsupportedModel:
        return Outcome(True, private.steps_taken)
    shown = sum(shows(mixing, batch) for batch in drawn) / len(drawn) if mixing.mixes else 0.0
    return Outcome(False, private.steps_taken, shown)


def draw(mixing: Mixing, seed: int) -> Batch:
    """A Poisson batch of one sample or more, without padding."""
    data, generator = dataset(mixing, seed), torch.Generator().manual_seed(seed + 10**6)
    while True:
        rows = (torch.rand(SIZE, generator=generator) < EXPECTED / SIZE).nonzero().squeeze(1)
        if len(rows):
            return tuple(t[rows] for t in data.tensors)


def left_behind(model: Mixed) -> tuple[float, ...]:
    return model.remembered, float(model.kept), int(model.counted)


def shows(mixing: Mixing, batch: Batch, seed: int = 0) -> bool:
    """Whether the mixing can be seen in this batch at all, by whoever has no other rows than these.

    For some row: its loss among copies of another row of the batch is not the same to the bit; or its loss alone is
    not the same to rounding; or what the forward leaves behind is not the same.
    """
    model, loss, samples = model_of(mixing, seed), loss_of(mixing), len(batch[0])

    def look(rows: Tensor) -> tuple[Tensor, tuple[float, ...]]:
        fresh = copy.copy(model)
        fresh._buffers = {name: b.clone() for name, b in model._buffers.items()}
        with torch.no_grad():
            return loss(fresh, tuple(t[rows] for t in batch)), left_behind(fresh)

    together, state = look(torch.arange(samples))
    for kept in range(samples):
        alone, state_alone = look(torch.tensor([kept]))
        if not torch.allclose(alone[0], together[kept], rtol=1e-5, atol=1e-7):
            return True
        if mixing.place == "state" and state_alone != state:
            return True
    for other in _different(batch[1]):
        for kept in range(samples):
            rows = torch.full((samples,), other)
            rows[kept] = kept
            replaced, state_replaced = look(rows)
            if not torch.equal(replaced[kept], together[kept]) or (mixing.place == "state" and state_replaced != state):
                return True
    return False


def _different(mark: Tensor) -> list[int]:
    """A row for each value of the mark."""
    return [int((mark == value).nonzero()[0]) for value in mark.unique()]
