"""How often a model that mixes rows is trained to the end, by what it mixes and by how many rows agree in that.

    python benchmarks/mixing.py                                 # 100 runs of every kind; an hour on two cores
    python benchmarks/mixing.py --quick                         # 5 runs
    python benchmarks/mixing.py --only maximum --runs 20

A run: `privatize` and up to 50 steps, on Poisson batches of 16 out of 300 samples. For each kind:

    shows       share of batches in which the mixing can be seen at all: some row's loss is another among copies of
                another row of the batch, or alone, or the forward leaves something else behind
    first       runs refused before anything was released
    later       runs refused after that
    accepted    runs that went to the end
    missed      of those, runs in which the mixing showed in a tenth of the batches or more: there must be none
    overlooked  of those, runs in which it showed in any batch

"its own mark" mixes nothing: its runs must all be accepted. Where 99% agree most batches show nothing, and in some runs
none does.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests import mixing as family
from tests.mixing import Mixing

RUNS, BATCHES = 100, 200
SHOWN = 0.1
"""Share of a run's batches in which the mixing shows; from there on the run must be refused."""

QUICK_RUNS, QUICK_BATCHES = 5, 30


@dataclass(frozen=True)
class Row:
    """What came of one kind."""

    mixing: Mixing
    shows: float
    first: int
    later: int
    accepted: int
    missed: int
    overlooked: int
    steps: float  # released before a refusal, on average over the runs refused later


def measure(task: tuple[Mixing, int, int]) -> Row:
    kind, runs, batches = task
    torch.set_num_threads(1)
    seen = sum(family.shows(kind, family.draw(kind, seed)) for seed in range(batches)) / batches
    outcomes = [family.run(kind, seed) for seed in range(runs)]
    later = [o.steps for o in outcomes if o.refused and o.steps]
    first = sum(o.refused and not o.steps for o in outcomes)
    shown = [o.shown for o in outcomes if not o.refused]
    missed, overlooked = sum(share >= SHOWN for share in shown), sum(share > 0 for share in shown)
    return Row(kind, seen, first, len(later), len(shown), missed, overlooked, sum(later) / max(1, len(later)))


def line(row: Row) -> str:
    kind = row.mixing
    after = f" (step {row.steps:.0f})" if row.later else ""
    return (
        f"| {kind.quantity} | {kind.place} | {kind.type} | {kind.agreement}% | {row.shows:.0%} | {row.first} "
        f"| {row.later}{after} | {row.accepted} | {row.missed} | {row.overlooked} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=None, help=f"runs of every kind; {RUNS}, or {QUICK_RUNS} if quick")
    parser.add_argument("--quick", action="store_true", help="few runs and few batches")
    parser.add_argument("--only", default="", help="kinds whose description holds this, such as 'maximum, loss'")
    parser.add_argument("--processes", type=int, default=2)
    args = parser.parse_args()
    runs = args.runs or (QUICK_RUNS if args.quick else RUNS)
    batches = QUICK_BATCHES if args.quick else BATCHES
    kinds = [kind for kind in family.every_mixing() if args.only in str(kind)]
    if not kinds:
        parser.error(f"no kind is described by {args.only!r}; one is {str(family.every_mixing()[0])!r}")
    print(f"{runs} runs of {family.STEPS} steps each; batches of {family.EXPECTED} of {family.SIZE} samples\n")
    print("| mixed | where | type | agree | shows | refused first | later | accepted | missed | overlooked |")
    print("|---|---|---|---:|---:|---:|---:|---:|---:|---:|", flush=True)
    rows = []
    with ProcessPoolExecutor(args.processes) as pool:
        for row in pool.map(measure, [(kind, runs, batches) for kind in kinds]):
            rows.append(row)
            print(line(row), flush=True)
    print()
    for agreement in family.AGREEMENTS:
        mixing = [r for r in rows if r.mixing.mixes and r.mixing.agreement == agreement]
        if mixing:
            first, later, accepted, missed, overlooked = (
                sum(getattr(r, name) for r in mixing) for name in ("first", "later", "accepted", "missed", "overlooked")
            )
            print(
                f"{agreement}% agree: {runs * len(mixing)} mixing runs, {first} refused before anything was released, "
                f"{later} later, {accepted} accepted to the end, {missed} of them missed, {overlooked} overlooked"
            )
    own = [r for r in rows if not r.mixing.mixes]
    if own:
        print(f"mixing nothing: {sum(r.accepted for r in own)} of {runs * len(own)} runs accepted to the end")


if __name__ == "__main__":
    main()
