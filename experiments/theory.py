"""Measures the paper's theorems and inequalities on small problems; writes figures and theory.json.

Example:
    python experiments/theory.py --out runs/theory     # about 4 minutes on one core
    python experiments/theory.py --quick --out runs/quick
"""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

import theorems
import theory_figures
from dpscale.lab import provenance
from dpscale.provenance import source_commit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the whole chain: simulate, write, print the table of slopes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("runs/theory"), help="folder of figures and theory.json")
    parser.add_argument("--seeds", type=_seeds, help=f"problems and starts per setting; default: {theorems.SEEDS}")
    parser.add_argument("--quick", action="store_true", help="short runs on 3 seeds: tries the chain, shows nothing")
    given = parser.parse_args(arguments)
    start = time.perf_counter()
    try:
        given.out.mkdir(parents=True, exist_ok=True)  # before minutes are spent, not after
    except OSError as error:
        parser.error(f"cannot write to {given.out}: {error.strerror}. Choose another --out.")
    found = _measured(given.seeds or (theorems.QUICK_SEEDS if given.quick else theorems.SEEDS), given.quick)
    command = shlex.join(["python", "experiments/theory.py", *(sys.argv[1:] if arguments is None else arguments)])
    found |= {"command": command, "commit": source_commit(), "versions": provenance.installed_versions()}
    found["seconds"], found["cpu_seconds"] = round(time.perf_counter() - start, 1), round(time.process_time(), 1)
    paths = theory_figures.write(given.out, found)
    console = Console(highlight=False)
    console.print(theory_figures.table(found))
    spent = f"{found['seconds']:.0f} s, {found['cpu_seconds']:.0f} s of processor time"
    console.print(f"{len(paths)} files in {given.out}  ({spent})", soft_wrap=True)


def _measured(seeds: int, quick: bool) -> dict[str, Any]:
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("theory", total=None)

        def show(done: int, total: int, state: str) -> None:
            if done % 100 == 0 or done == total:
                bar.update(task, completed=done, total=total, description=f"theory: {state}")

        return theorems.compute(seeds, quick=quick, on_steps=show)


def _seeds(text: str) -> int:
    if (seeds := int(text)) < 2:
        raise argparse.ArgumentTypeError(f"an interval needs at least 2 seeds, not {seeds}")
    return seeds


if __name__ == "__main__":
    main()
