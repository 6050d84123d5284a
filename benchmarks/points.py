"""What a step costs over several released points, beside one point and beside holding every sample's gradient.

    python benchmarks/points.py                                       # on the CPU
    python benchmarks/points.py --device cuda --precision tf32 --warm 8

K0 + 1 points a step (InnerOuter), against the one-point step of the same kind in turns; a ratio is the median over
rounds, and the last column divides it by the number of points: at most 1 is the aim. The alternative, vmap(grad) at
each point with every sample's combination held (B × d numbers), stands beside it. Steps are scaled sums: no noise, no
update.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn

import dpscale
import harness
from dpscale.engine import Engine
from harness import Memory, Row, Step, Table, figure
from models import TASKS, Task

POINTS = (1, 2, 3, 4)
BATCHES = {"cpu": {"digits-cnn": 256, "4-conv-cnn": 128, "probe": 1024}, "cuda": {}}
ON = {"cpu": ("digits-cnn", "4-conv-cnn", "probe"), "cuda": ("4-conv-cnn", "resnet9-64", "gpt2", "probe")}
WAYS = ("eager", "compiled", "vmap(grad)")


def make(way: str, points: int, task: Task, precision: str, device: str) -> tuple[Step, list[Tensor]]:
    torch.manual_seed(0)
    model, (x, y) = task.make().to(device), task.data(device)
    cast, rule = harness.casting(device, precision), dpscale.PSASC(C=1.0, s=0.5, r=1e-3)
    mask = torch.ones(len(x), dtype=torch.bool, device=device)
    course = dpscale.InnerOuter(K0=points - 1, gamma0=0.5, gamma1=0.1).start(dict(model.named_parameters()))
    for _ in range(points):  # as after the first steps: every point counts
        course.release({})
    chosen = course.points()

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        with cast():
            return task.losses(model(batch[0]), batch[1])

    fast = Engine(model, compile=True).scaled_sum
    several = chosen if points > 1 else None

    def held() -> None:
        def loss(values: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            with cast():
                return task.losses(torch.func.functional_call(model, values, (x[None],)), y[None])[0]

        gradient = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))
        total: dict[str, Tensor] = {}
        for coefficient, weights in chosen:
            grads = gradient({n: w.detach() for n, w in weights.items()}, x, y)
            total = {n: coefficient * g + total[n] if n in total else coefficient * g for n, g in grads.items()}
        norms = torch.stack([g.flatten(1).square().sum(1) for g in total.values()]).sum(0).sqrt()
        for g in total.values():
            torch.einsum("b,b...->...", rule.weight(norms), g)

    steps: dict[str, Step] = {
        "eager": lambda: dpscale.scaled_sum(model, loss_fn, (x, y), rule, mask, several),
        "compiled": lambda: fast(loss_fn, (x, y), rule, mask, several),
        "vmap(grad)": held,
    }
    weights = [t for _, mapping in chosen for t in mapping.values()]
    return steps[way], [*weights, x, y]


def measure(item: str, args: argparse.Namespace) -> Iterator[Row]:
    precision, name, way = item.split("/")
    harness.use(precision)
    task = TASKS[name]
    task = Task(task.make, task.shape, BATCHES[args.device].get(name, task.batch), task.classes)
    first, _ = make(way, 1, task, precision, args.device)
    first()
    for points in POINTS:
        row: Row = {"points": points}
        try:
            memory = Memory(args.device)
            step, resident = make(way, points, task, precision, args.device)
            step()
            harness.insist_compiled()
            if args.ahead:
                continue
            row["peak_mib"] = memory.peak(step, resident)
            taken, base = harness.turns([step, first], args.device, args.rounds)
            row["milliseconds"] = 1e3 * sorted(taken)[len(taken) // 2]
            row["ratio"], *_ = harness.median_ratio(taken, base)
            row["per_point"] = row["ratio"] / points
        except Exception as error:
            row["error"] = harness.complaint(error)
        yield row
        harness.release(args.device)


COLUMNS = {
    "task": (12, lambda row: row["item"].split("/")[1]),
    "precision": (9, lambda row: row["item"].split("/")[0]),
    "way": (12, lambda row: row["item"].split("/")[2]),
    "points": (6, figure("points", "d")),
    "ms": (9, figure("milliseconds", ".2f")),
    "to 1 point": (10, figure("ratio", ".2f")),
    "per point": (9, figure("per_point", ".2f")),
    "peak MiB": (9, figure("peak_mib", ",.0f")),
}


def main() -> None:
    parser = harness.arguments(__doc__, rounds=9)
    parser.add_argument("--ways", default=",".join(WAYS), help=f"of {', '.join(WAYS)}")
    args = parser.parse_args()
    if args.items:
        harness.serve(args, lambda item: measure(item, args))
        return
    print(f"{harness.machine(args)}, at most {args.rounds} rounds")
    table = Table(args, COLUMNS, 3)
    names = [f"{task}/{way}" for task in ON[args.device] for way in args.ways.split(",")]
    for row in harness.measured(args, harness.wanted(args, names)):
        table.add(row)


if __name__ == "__main__":
    main()
