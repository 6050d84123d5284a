"""Time and memory of one training step beside plain PyTorch and Opacus, all in one run.

    python benchmarks/step.py                                          # digits and 4-conv CNN on the CPU
    python benchmarks/step.py --device cuda --tasks all --precision tf32,bf16 --warm 8
    python benchmarks/step.py --device cuda --tasks gpt2,vit-s16 --precision bf16 --json results.json --markdown

Every row is a whole step (forward, backward, scaling, noise, SGD update) on the same batch. Each contender takes turns,
round by round, with the compiled (or, without it, the eager) plain step, so that a busy machine slows both alike; a
ratio is the median over rounds of the time relative to the plain step's in the same round. On CUDA a turn is five steps
without a wait between them, as in training. Only these two are alive then; where they do not fit together, the
contender is timed alone. vmap(grad) is written as users write it, without chunks: out of memory is an answer too.

Memory is that of a step at its peak, model and batch included: on CUDA what the allocator has reserved, on the CPU the
growth of the process. Cold start is the time of the first two steps, with an empty compiler cache (with --cache and
something in it, none is given). With --warm N it was measured in a process of its own with N of them at once, which is
slower than alone; the timed process then reads the cache.
"""

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

import harness
from contenders import BASES, COMPILED, CONTENDERS
from harness import Memory, Row, Step, Table, figure
from models import ON_REQUEST, TASKS, Task


@dataclass
class Base:
    """The plain step, while it fits, and what is known of it."""

    step: Step | None
    row: Row


def start(task: Task, contender: str, precision: str, args: argparse.Namespace) -> tuple[Row, Step | None]:
    """A contender's first steps: how long they take, and what memory one needs. An error is an answer."""
    row: Row = {"contender": contender}
    harness.NOTES.said.clear()
    try:
        torch.manual_seed(0)
        memory = Memory(args.device)
        x, y = task.data(args.device)
        model = task.make().to(args.device)
        resident = [*model.parameters(), *model.buffers(), x, y]
        step = CONTENDERS[contender](task, model, x, y, harness.casting(args.device, precision))

        def twice() -> None:
            step()
            step()

        row["cold_seconds"] = harness.seconds(twice, args.device)
        harness.insist_compiled()
        if not args.ahead:
            row["peak_mib"] = memory.peak(step, resident)
        return row, step
    except Exception as error:
        row |= {"error": harness.complaint(error), "starved": harness.out_of_memory(error)}
        return row, None


def measure(item: str, args: argparse.Namespace) -> Iterator[Row]:
    """The rows of one task at one precision."""
    name, precision = item.split("/")
    harness.use(precision)
    torch._dynamo.reset()  # lets go of the graphs of the item before, whose memory would count as this one's
    task = replace(TASKS[name], batch=args.batch or TASKS[name].batch)
    base: Base | None = None
    for contender in args.contenders:
        row, step = start(task, contender, precision, args)
        if row.get("starved") and base is not None and base.step is not None:  # perhaps it fits alone
            base.step = None
            torch._dynamo.reset()
            row, step = start(task, contender, precision, args)
        if step is not None and not args.ahead:
            try:
                compare(row, step, base, args)
            except Exception as error:
                row["error"] = harness.complaint(error)
        if base is None and contender in BASES and "error" not in row:
            base = Base(step, row)
        step = None
        yield row
        harness.release(args.device)


def compare(row: Row, step: Step, base: Base | None, args: argparse.Namespace) -> None:
    """Time the step, in turns with the base where that is alive."""
    together = [step] if base is None or base.step is None else [step, base.step]
    seconds, *other = harness.turns(together, args.device, args.rounds)
    row["milliseconds"], row["rounds"] = 1e3 * statistics.median(seconds), len(seconds)
    if base is None and row["contender"] not in BASES:
        return
    against = other[0] if other else [(base.row if base else row)["milliseconds"] / 1e3] * len(seconds)
    row["ratio"], *row["quartiles"] = harness.median_ratio(seconds, against)
    peak = (base.row if base else row)["peak_mib"]
    if peak and row["peak_mib"] is not None:
        row["peak_ratio"] = row["peak_mib"] / peak


COLUMNS = {
    "task": (12, lambda row: row["item"].split("/")[0]),
    "precision": (9, lambda row: row["item"].split("/")[1]),
    "contender": (17, lambda row: row.get("contender")),
    "ms/step": (9, figure("milliseconds", ".2f")),
    "ratio": (6, figure("ratio", ".2f")),
    "quartiles": (11, lambda row: "{:.2f}-{:.2f}".format(*row["quartiles"]) if "quartiles" in row else None),
    "peak MiB": (9, figure("peak_mib", ",.0f")),
    "peak ratio": (10, figure("peak_ratio", ".2f")),
    "cold s": (7, figure("cold_seconds", ".1f")),
    "note": (4, lambda row: row.get("note") or " "),
}


def main() -> None:
    parser = harness.arguments(__doc__)
    parser.add_argument("--tasks", default="digits-cnn,4-conv-cnn", help=f"of {', '.join(TASKS)}, or all")
    parser.add_argument("--contenders", help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--batch", type=int, help="another batch size than the task's")
    args = parser.parse_args()
    chosen = args.contenders.split(",") if args.contenders else list(CONTENDERS)
    args.contenders = [c for c in CONTENDERS if c in chosen]  # in this order: the base comes first
    every = [t for t in TASKS if args.device == "cuda" or t not in ON_REQUEST]
    tasks = every if args.tasks == "all" else args.tasks.split(",")
    unknown = sorted({*tasks, *chosen} - {*TASKS, *CONTENDERS})
    if unknown:
        raise SystemExit(f"Unknown: {', '.join(unknown)}. Tasks are {', '.join(TASKS)}, or all.")
    if args.items:
        harness.serve(args, lambda item: measure(item, args))
        return
    items = {t: [f"{t}/{p}" for p in harness.precisions(args)] for t in tasks}
    reused = args.cache is not None and args.cache.exists() and any(args.cache.iterdir())
    print(f"{harness.machine(args)}, at most {args.rounds} rounds")
    with harness.compiler_cache(args) as environment:
        cold: dict[str, list[Row]] = {}
        if args.warm:
            jobs = {
                f"{item}/{c}": ([item], ["--contenders", c])
                for c in reversed(COMPILED)  # the longest first, and no task beside itself
                for p in harness.precisions(args)
                for item in (f"{t}/{p}" for t in tasks)
                if c in args.contenders
            }
            cold = harness.ahead(jobs, environment, args.warm)
        table = Table(args, COLUMNS, 3)
        for of_task in items.values():  # a process for each task: none inherits another's memory
            for row in harness.rows(of_task, environment):
                compiled_ahead = cold.get(f"{row['item']}/{row.get('contender')}", [])
                known = [r["cold_seconds"] for r in compiled_ahead if "cold_seconds" in r]
                if (known or reused) and "cold_seconds" in row:
                    row |= {"cached_seconds": row["cold_seconds"], "cold_seconds": None if reused else known[0]}
                table.add(row)


if __name__ == "__main__":
    main()
