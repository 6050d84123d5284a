"""Kill a private run again and again, and see that its books are right.

    python benchmarks/faults.py --kills 1000
    python benchmarks/faults.py --kills 20 --sabotage booking      # what it looks like when they are not

A small run with a ledger saves, is killed by SIGKILL, and is resumed from its checkpoint, over and over. Half of the
kills come at a random moment, the others while it saves, or while it writes to the ledger. After each it is checked
that
- no stream of noise was used twice, and no stream of draws in two lives of a run (runs are seeded, the harder case),
- the ledger charges every release, and besides at most one stretch of steps for each kill,
- the checkpoint is whole, and not older than the last one that was seen.

Each life is a fork of this process, so that torch is imported once. What is looked at is noted from outside: the child
wraps the functions that derive keys and add noise, and notes each call in a file before it is made.
"""

import argparse
import collections
import contextlib
import hashlib
import json
import logging
import mmap
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale import booking, checkpoint, distributed, files, ledger, noise

STEPS, SIZE, SAVE_EVERY = 400, 64, 7
STRETCH = STEPS // 20  # the longest
PLACES = ("beginning", "stepping", "saving", "booking")
SABOTAGE = ("noise", "booking", "saving")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100, help="default: 100")
    parser.add_argument("--seed", type=int, default=None, help="of the moments; default: another each time")
    parser.add_argument("--folder", type=Path, default=None, help="where the files lie; default: one that is removed")
    parser.add_argument("--sabotage", choices=SABOTAGE, default=None, help="break the product, to see it noticed")
    args = parser.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="dpscale-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        seen = found(folder, args.kills, args.sabotage, args.seed)
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(seen, indent=2))
    sys.exit(1 if seen["faults"] else 0)


def found(folder: Path, kills: int, sabotage: str | None = None, seed: int | None = None) -> dict[str, object]:
    """What so many kills show."""
    torch.set_num_threads(1)  # threads do not survive a fork
    logging.getLogger("dpscale").setLevel(logging.ERROR)  # each resumption warns, as it should
    return Torture(folder, random.Random(seed), sabotage).kill(kills)


def plan() -> dpscale.Plan:
    sampling = dpscale.Poisson(size=SIZE, batch=8)
    momentum = dpscale.InnerOuter(K0=1, gamma0=0.5, gamma1=0.5)
    return dpscale.Plan(
        scaling=dpscale.Clip(C=1.0), sampling=sampling, steps=STEPS, noise_multiplier=2.0, delta=1e-3, momentum=momentum
    )


def loss_fn(model: nn.Module, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Torture:
    """Lives and deaths of one run after another."""

    def __init__(self, folder: Path, moments: random.Random, sabotage: str | None) -> None:
        self.folder, self.moments, self.sabotage = folder, moments, sabotage
        self.place = mmap.mmap(-1, 1)  # where in `PLACES` the child is, shared with it
        self.notes = folder / "notes"
        self.notes.touch()
        self.run = self.life = self.saved = self.in_excess = self.most = 0
        self.killed = False
        self.faults: list[str] = []
        self.places: collections.Counter[str] = collections.Counter()
        # Once, before the first fork: what is slow to import, and the price of the plan.
        torch.optim.Adam(nn.Linear(1, 1).parameters())
        ledger.compose([ledger.Release.of(plan().to_dict(), STEPS)], 1e-3)

    def kill(self, kills: int) -> dict[str, object]:
        """So many of them; what was seen."""
        begin = time.perf_counter()
        while sum(self.places.values()) < kills and not self.faults:
            self.live()
            self.check()
        streams, _, releases = self.read()
        return {
            "kills": sum(self.places.values()), "killed_while": dict(self.places), "lives": self.life,
            "runs": self.run + 1, "releases": sum(releases.values()), "noise_streams": len(streams),
            "most_steps_charged_in_excess_by_a_kill": self.most, "longest_stretch": STRETCH, "faults": self.faults,
            "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip

    def live(self) -> None:
        """One child, from its birth to its death, or to the end of its run."""
        self.life += 1
        self.place[0] = 0
        child = os.fork()
        if child == 0:
            Life(self).lead()  # does not return
        wanted = self.moments.choice((None, None, 2, 3))  # a moment, or a place
        deadline = time.monotonic() + self.moments.uniform(0, 0.6)
        ended, turns = (0, 0), self.moments.randrange(1, 12)
        while ended[0] == 0 and time.monotonic() < deadline + 60:
            if wanted is None and time.monotonic() > deadline:
                break
            if wanted is not None and self.place[0] == wanted:
                turns -= 1
                if turns <= 0:
                    time.sleep(self.moments.uniform(0, 0.002))
                    break
            time.sleep(0.0002)
            ended = os.waitpid(child, os.WNOHANG)
        if ended[0] == 0:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        self.killed = os.WIFSIGNALED(ended[1])
        if self.killed:
            self.places[PLACES[self.place[0]]] += 1
        elif os.WEXITSTATUS(ended[1]) == 0:  # the run is at its end
            self.check()
            self.run, self.saved, self.in_excess = self.run + 1, 0, 0
        else:
            self.faults.append(f"life {self.life} of run {self.run} failed: its traceback is above")

    @property
    def files(self) -> tuple[Path, Path]:
        """(The ledger, the checkpoint) of the present run. Each run has its own, so that prices are known."""
        return self.folder / f"{self.run}.ledger", self.folder / f"{self.run}.checkpoint"

    def read(self) -> tuple[list[str], dict[str, set[str]], collections.Counter[str]]:
        """Of the notes: streams of noise; the lives in which draws came from a stream; releases of each run."""
        noises, draws, releases = [], collections.defaultdict(set), collections.Counter()
        released = set()
        lines = [line.split() for line in self.notes.read_text().splitlines()]
        for run, life, what, _ in lines:
            if what == "release":
                releases[run] += 1
                released.add(life)
        for _, life, what, which in lines:
            if what == "noise":
                noises.append(which)
            elif what == "draws" and life in released:
                draws[which].add(life)
        return noises, draws, releases

    def check(self) -> None:
        """Ledger, checkpoint and streams, after a death."""
        books, saved = self.files
        noises, draws, releases = self.read()
        if len(set(noises)) < len(noises):
            self.faults.append("a stream of noise was used twice")
        if any(len(lives) > 1 for lives in draws.values()):
            self.faults.append("a stream of draws was used in two lives")
        released = releases[str(self.run)]
        charged = 0
        if books.exists() and books.stat().st_size:
            charged = sum(run.charged for run in dpscale.Ledger(books, epsilon=1000, delta=1e-3).runs())
        in_excess = charged - released
        by_this = in_excess - self.in_excess
        self.in_excess, self.most = in_excess, max(self.most, by_this)
        if in_excess < 0 or by_this > (STRETCH if self.killed else 0):
            self.faults.append(f"run {self.run} released {released} steps, and its ledger has {charged}")
        if saved.exists():
            try:
                steps = checkpoint.read(saved)["run"]["steps_taken"]
            except ValueError as error:
                self.faults.append(str(error))
                return
            if not self.saved <= steps <= released:
                self.faults.append(f"a checkpoint of step {self.saved} was followed by one of step {steps}")
            self.saved = steps
        elif self.saved:
            self.faults.append("a checkpoint is gone")


class Life:
    """A child: trains, saves, and notes what it is about to do."""

    def __init__(self, torture: Torture) -> None:
        self.of = torture
        self.notes = os.open(torture.notes, os.O_WRONLY | os.O_APPEND)

    def note(self, what: str, which: str) -> None:
        os.write(self.notes, f"{self.of.run} {self.of.life} {what} {which}\n".encode())

    def lead(self) -> None:
        try:
            if self.of.sabotage:
                sabotage(self.of.sabotage)
            self.watch()  # over the sabotage: where the child is must be seen
            self.train()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)

    def watch(self) -> None:
        """Note streams and releases, and where the child is."""
        derive, add = noise.Key.derive, noise.Noise.add

        def noted(key: noise.Key, label: str) -> int:
            stream = hashlib.blake2b(key._bytes + label.encode(), digest_size=16).hexdigest()
            self.note("noise" if label.startswith("noise") else "draws", stream)
            return derive(key, label)

        def released(
            self_: noise.Noise, sums: dict[str, torch.Tensor], std: float, step: int, shard: int | None = None
        ) -> None:
            self.note("release", str(step))
            add(self_, sums, std, step, shard)

        noise.Key.derive, noise.Noise.add = noted, released
        for owner, name, place in ((checkpoint, "replacing", 2), (ledger.Ledger, "writing", 3)):
            setattr(owner, name, self.at(place, getattr(owner, name)))

    def at(self, place: int, block):  # type: ignore[no-untyped-def]
        """The same block, in which the child says where it is."""

        @contextlib.contextmanager
        def marked(*args, **options):  # type: ignore[no-untyped-def]
            before, self.of.place[0] = self.of.place[0], place
            with block(*args, **options) as value:
                yield value
            self.of.place[0] = before

        return marked

    def train(self) -> None:
        torch.manual_seed(self.of.run)
        books, saved = self.of.files
        data = TensorDataset(torch.randn(SIZE, 4), torch.randint(0, 3, (SIZE,)))
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        total = dpscale.Ledger(books, epsilon=1000, delta=1e-3)
        private = dpscale.privatize(model, optimizer, plan(), seed=self.of.run, ledger=total, run="run")
        if saved.exists():
            private.load(saved)
        self.of.place[0] = 1
        for batch in private.batches(data):
            private.step(batch, loss_fn)
            if private.steps_taken % SAVE_EVERY == 0:
                private.save(saved)
        private.close()


def sabotage(what: str) -> None:
    """Break the product as a bug might."""
    if what == "noise":  # a resumed run takes up the streams of the first
        key = noise.Key
        distributed.Key = lambda seed=None: key(seed or 0)  # type: ignore[misc, assignment]
    elif what == "booking":  # steps are booked when they were released
        booking.Booking.reserve = lambda self, step: None  # type: ignore[method-assign]
    else:  # a checkpoint is written in its place
        checkpoint.replacing = in_place  # type: ignore[assignment]


@contextlib.contextmanager
def in_place(path: Path, **_):  # type: ignore[no-untyped-def]
    path.write_bytes(b"")
    time.sleep(0.05)  # a slow disk
    with files.replacing(path.with_suffix(".whole")) as whole:
        yield whole
    path.write_bytes(path.with_suffix(".whole").read_bytes())


if __name__ == "__main__":
    main()
