"""What a user waits for: the first private step, a usual one, the first at a new length, and the checks later on.

    python benchmarks/first_step.py                             # on two CPU threads; minutes, most of them for BERT
    python benchmarks/first_step.py --models tiny,cnn,transformer --steps 30
    python benchmarks/first_step.py --models bert --steps 6
    python benchmarks/first_step.py --models cnn --sums 7       # on a machine that others use, too

The loop is timed as a user writes it: ``for batch in private.batches(data): private.step(batch, loss_fn)``, on Poisson
draws, with all defaults. Ratios are to a plain forward and backward of the expected batch, eager, by the median.

    first       the first private step, with everything that comes before it
    usual       the median of later steps in which the model ran no more rows than were drawn and padded
    length      the first step at a new sequence length, over a plain one at that length
    rows        rows run through the model in the first step, over those of the batch
    checks      later checks: share of the rows, and of the seconds, of all steps after the first
    silence     the longest time without a step done or a record of the logger "dpscale"; more than three seconds are
                marked, unless a usual step itself takes as long

With ``--sums`` the sum of a step alone is timed, by the seconds that the processor spent on it in one thread, so many
times with a new engine, plain ones in between; medians. ``checked`` is how much more than a usual one a sum takes
before which a glance is due: at a new length or, where there is none, at a new size and rows far from all before.
"""

import argparse
import logging
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import TensorDataset

import dpscale
from dpscale.engine.engine import Engine
from dpscale.lab.models import paper_cnn

SILENCE = 3.0


@dataclass(frozen=True)
class Setting:
    """A model, its samples (of a length, if they have one), and how they are drawn."""

    build: Callable[[], nn.Module]
    samples: Callable[[int, int], TensorDataset]
    batch: int
    size: int
    lengths: tuple[int, int] | None  # usual, and new
    rounds: int  # of the plain step

    def data(self, new: bool = False) -> TensorDataset:
        return self.samples(self.size, self.lengths[new] if self.lengths else 0)


def tiny() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, 2, 2), nn.GroupNorm(4, 16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, 2, 1), nn.GroupNorm(4, 32), nn.ReLU(),
        nn.Flatten(), nn.Linear(32 * 7 * 7, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Six layers with dropout."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(1000, width), nn.Linear(width, 10)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.out(self.layers(self.table(ids)).mean(1))


class Bert(nn.Module):
    """BERT-base from its configuration, with random weights; logits alone."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForSequenceClassification

        self.net = BertForSequenceClassification(BertConfig(num_labels=10))

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(input_ids=ids, attention_mask=(ids != 0).long()).logits


def images(size: int, _: int) -> TensorDataset:
    return TensorDataset(torch.randn(size, 1, 28, 28), torch.randint(0, 10, (size,)))


def tokens(size: int, length: int) -> TensorDataset:
    return TensorDataset(torch.randint(1, 1000, (size, length)), torch.randint(0, 10, (size,)))


SETTINGS = {
    "tiny": Setting(tiny, images, batch=64, size=2000, lengths=None, rounds=20),
    "cnn": Setting(paper_cnn, images, batch=256, size=8000, lengths=None, rounds=10),
    "transformer": Setting(Transformer, tokens, batch=32, size=1000, lengths=(32, 40), rounds=10),
    "bert": Setting(Bert, tokens, batch=8, size=400, lengths=(64, 72), rounds=3),
}


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@dataclass
class Watch(logging.Handler):
    """Notes when something was heard, be it a log record or the end of a step."""

    heard: list[float] = field(default_factory=lambda: [time.perf_counter()])

    def __post_init__(self) -> None:
        super().__init__(logging.INFO)

    __hash__ = logging.Handler.__hash__

    def emit(self, record: logging.LogRecord) -> None:
        self.note()

    def note(self) -> None:
        self.heard.append(time.perf_counter())

    def longest(self) -> float:
        return max((b - a for a, b in zip(self.heard, self.heard[1:], strict=False)), default=0.0)


@dataclass(frozen=True)
class Step:
    """Seconds; rows of the batch; rows that the model ran."""

    seconds: float
    drawn: int
    run: int


def plain_seconds(setting: Setting, data: TensorDataset) -> float:
    """The median of plain steps without an update, after one to warm up."""
    model = setting.build()
    batch = data[: setting.batch]
    times = []
    for _ in range(setting.rounds + 1):
        model.zero_grad()
        begin = time.perf_counter()
        loss_fn(model, batch).mean().backward()
        times.append(time.perf_counter() - begin)
    return statistics.median(times[1:])


def timed(private: dpscale.Private, data: TensorDataset, run: list[int], watch: Watch) -> Iterator[Step]:
    """The user's loop; drawing a batch is part of its step."""
    begin = time.perf_counter()
    for batch in private.batches(data):
        run.clear()
        private.step(batch, loss_fn)
        watch.note()
        yield Step(time.perf_counter() - begin, len(batch[0]), sum(run))
        begin = time.perf_counter()


def measure(name: str, steps: int) -> list[str]:
    """A line of the table."""
    torch.manual_seed(0)
    setting = SETTINGS[name]
    data, other = setting.data(), setting.data(new=True)
    plain = plain_seconds(setting, data)
    plain_other = plain_seconds(setting, other) if setting.lengths else 0.0
    model, run = setting.build(), []

    def count(module: nn.Module, args: Any, kwargs: Any) -> None:
        run.append(next(len(t) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)))

    model.register_forward_pre_hook(count, with_kwargs=True)
    plan = dpscale.Plan(
        scaling=dpscale.Clip(C=1.0), sampling=dpscale.Poisson(size=setting.size, batch=setting.batch), steps=steps + 4,
        noise_multiplier=1.0,
    )  # fmt: skip
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=1e-3), plan)
    watch, log = Watch(), logging.getLogger("dpscale")
    level = log.level
    log.addHandler(watch)
    log.setLevel(logging.INFO)
    try:
        taken = list(islice(timed(private, data, run, watch), steps))
        new = next(timed(private, other, run, watch)) if setting.lengths else None
    finally:
        log.removeHandler(watch)
        log.setLevel(level)
    first, later = taken[0], taken[1:]
    usual = statistics.median([s.seconds for s in later if s.run <= s.drawn] or [s.seconds for s in later])
    looks = [s for s in later if s.run > s.drawn]
    extra_rows = sum(s.run - s.drawn for s in looks) / max(1, sum(s.run for s in later))
    extra_seconds = sum(max(0.0, s.seconds - usual) for s in looks) / sum(s.seconds for s in later)
    silence = watch.longest()
    mark = " **silent**" if silence > max(SILENCE, 1.5 * usual) else ""
    return [
        name,
        f"{plain:.3f} s",
        f"{first.seconds:.2f} s = {first.seconds / plain:.1f}",
        f"{usual:.3f} s = {usual / plain:.2f}",
        f"{new.seconds:.2f} s = {new.seconds / plain_other:.1f}" if new else "",
        f"{first.run / first.drawn:.1f}",
        f"{len(looks)} of {len(later)}: {extra_rows:.1%} rows, {extra_seconds:.1%} s",
        f"{silence:.1f} s{mark}",
    ]


def spent(run: Callable[[], Any]) -> float:
    """Seconds of the processor."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def ratios(name: str, rounds: int) -> list[str]:
    """A line of the other table."""
    setting, rule = SETTINGS[name], dpscale.Clip(C=1.0)
    model = setting.build()

    def plain(batch: Any) -> float:
        model.zero_grad()
        return spent(lambda: loss_fn(model, batch).mean().backward())

    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        engine = Engine(model)
        batch = setting.data()[: setting.batch]
        new = setting.data(new=True)[: setting.batch - (0 if setting.lengths else 5)]
        if not setting.lengths:
            new[0][0] -= 50
        before = [min(plain(each) for _ in range(3)) for each in (batch, new)]
        first, *usual, checked = [
            spent(partial(engine.scaled_sum, loss_fn, data, rule)) for data in (batch,) * 5 + (new,)
        ]
        one, other = [min(then, plain(each)) for then, each in zip(before, (batch, new), strict=True)]
        found.append((first / one, min(usual) / one, checked / other - min(usual) / one))
    first, usual, checked = (statistics.median(column) for column in zip(*found, strict=True))
    return [name, f"{one:.4f} s", f"{first:.1f}", f"{usual:.2f}", f"+{checked:.1f}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SETTINGS), help="some of %(default)s")
    parser.add_argument("--steps", type=int, default=60, help="steps of each run, at least 4 (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sums", type=int, default=0, help="time sums alone, in one thread, so many times")
    args = parser.parse_args()
    chosen = args.models.split(",")
    unknown = set(chosen) - set(SETTINGS)
    if unknown or args.steps < 4:
        parser.error(f"no model {sorted(unknown)}" if unknown else "--steps must be at least 4")
    torch.set_num_threads(1 if args.sums else args.threads)
    if args.sums:
        print("| model | plain | first | usual | checked |\n|---|---:|---:|---:|---:|", flush=True)
        for name in chosen:
            print("| " + " | ".join(ratios(name, args.sums)) + " |", flush=True)
        return
    print(f"{args.threads} threads, {args.steps} steps; ratios to a plain forward and backward\n")
    print("| model | plain | first | usual | length | rows | checks | silence |")
    print("|---|---:|---:|---:|---:|---:|---|---|", flush=True)
    for name in chosen:
        print("| " + " | ".join(measure(name, args.steps)) + " |", flush=True)


if __name__ == "__main__":
    main()
