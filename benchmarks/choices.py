"""Whether the engine chooses the fastest way to the norms and the weighted sum, layer by layer.

    python benchmarks/choices.py                                    # on the CPU, eagerly, batches divided by 16
    python benchmarks/choices.py --device cuda --precision tf32,bf16 --warm 8

For each shape, every way that the engine has is timed: squared norms, then the sum under given weights, from the same
operands. The engine's own choice is timed as it runs; it is compared with the fastest of the ways. On CUDA each is
compiled as the engine compiles it and replayed as a graph; on the CPU it runs eagerly (--compile: compiled).
"""

import argparse
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

import harness
from dpscale.engine import kernels
from dpscale.engine.compile.inductor import inductor
from dpscale.engine.rules.convolution import Patches
from dpscale.engine.rules.forms import Dense, Form, slack, wide
from dpscale.engine.rules.linear import CHUNK, Outer
from harness import Row, Step, Table, figure

Way = Callable[[Any, Tensor], tuple[Tensor, Tensor]]
"""(form, weights) -> (squared norms, weighted sum)."""

HOPELESS = 5
"""So many times as slow as the fastest, and a way is not timed again."""

LARGE = 1 << 28
"""A way that holds more numbers than this in one tensor is not tried."""


# The engine's ways, by name. Only this part knows its methods.


def through(settled: Form, weights: Tensor) -> tuple[Tensor, Tensor]:
    return settled.norm2(), settled.weighted(weights)


def engine(form: Form, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Whatever the engine does."""
    return through(form.settle(), weights)


def ways(form: Form) -> dict[str, Way]:
    """Every way that could be taken with this form."""
    if isinstance(form, Outer):
        return outer_ways(form)
    assert isinstance(form, Patches)
    return patches_ways(form)


def chosen(form: Form) -> str:
    """The name, among `ways`, of the engine's choice."""
    settled = form.settle()
    if isinstance(form, Outer):
        if settled is not form:
            return "kept by kernel" if form._fast else "kept"
        if form.gram:
            return "Gram by kernel" if form._fast_gram else "Gram"
        return "norm only by kernel" if form._fast else "norm only"
    assert isinstance(form, Patches)
    direct = form._fast and not form._unfolds
    if settled is not form:
        unfolded = isinstance(settled, Dense)
        return "kept by kernel" if direct else "kept, unfolded" if unfolded else "kept, kernel rows"
    if form._by_pixels:
        return "pixels"
    return "norm only by kernel" if direct else "patches"


def outer_ways(form: Outer) -> dict[str, Way]:
    def gram(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        squares, sizes = kernels.gram_norm2_plain(wide(form.a_BTI), wide(form.g_BTO))
        return squares.clamp(min=0) + slack(sizes), form.weighted(weights)

    def gram_kernel(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        squares, sizes = kernels.gram_norm2(kernels.aligned(form.a_BTI), kernels.aligned(form.g_BTO))
        return squares.clamp(min=0) + slack(sizes), form.weighted(weights)

    def norm_only(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        a, g = wide(form.a_BTI), wide(form.g_BTO)
        each = max(1, CHUNK // (a.shape[2] * g.shape[2]))
        parts = [Dense(Outer(a[k : k + each], g[k : k + each]).per_sample()) for k in range(0, len(a), each)]
        return torch.cat([part.norm2() for part in parts]), form.weighted(weights)

    def norm_only_kernel(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        a, g = kernels.aligned(form.a_BTI), kernels.aligned(form.g_BTO)
        return kernels.square(a.unsqueeze(1), g.unsqueeze(1)), form.weighted(weights)

    def plainly_kept(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        return through(Dense(form.per_sample()), weights)

    def kept(form: Outer, weights: Tensor) -> tuple[Tensor, Tensor]:
        return through(form.kept(), weights)

    found: dict[str, Way] = {"Gram": gram, "norm only": norm_only, "kept": plainly_kept if form._fast else kept}
    if form._fast_gram:
        found["Gram by kernel"] = gram_kernel
    if form._fast:
        found |= {"norm only by kernel": norm_only_kernel, "kept by kernel": kept}
    return found


def patches_ways(form: Patches) -> dict[str, Way]:
    def patches(form: Patches, weights: Tensor) -> tuple[Tensor, Tensor]:
        each = max(1, CHUNK // form._patch_numbers)
        chunks = zip(form.x.split(each), form.g.split(each), strict=True)
        parts = [replace(form, x=x, g=g)._outer().norm2() for x, g in chunks]
        return torch.cat(parts).view(-1, form.groups).sum(1), form.weighted(weights)

    def norm_only_kernel(form: Patches, weights: Tensor) -> tuple[Tensor, Tensor]:
        return kernels.square(*form._channels_last()), form.weighted(weights)

    def kept_kernel(form: Patches, weights: Tensor) -> tuple[Tensor, Tensor]:
        products = kernels.keep(*form._channels_last()).unflatten(1, form.weight_shape[2:])
        dims = len(form.stride)
        return through(Dense(products, (dims, dims + 1, *range(dims))), weights)

    found: dict[str, Way] = {
        "patches": patches,
        "kept, unfolded": lambda form, weights: through(form._kept(), weights),
        "kept, kernel rows": lambda form, weights: through(form._by_kernel_rows(), weights),
    }
    if len(form.x) * math.prod(form.x.shape[3:]) ** 2 <= LARGE:
        found["pixels"] = lambda form, weights: (form._norm2_by_pixels(), form.weighted(weights))
    if form._fast:
        found |= {"norm only by kernel": norm_only_kernel, "kept by kernel": kept_kernel}
    return found


# The shapes.

Operands = tuple[Tensor, Tensor]
Make = Callable[[Tensor, Tensor], Form]


def linear(batch: int, t: int, i: int, o: int) -> Callable[..., tuple[Operands, Make]]:
    def make(shrink: int, **kind: Any) -> tuple[Operands, Make]:
        samples = max(2, batch // shrink)
        return (torch.randn(samples, t, i, **kind), torch.randn(samples, t, o, **kind)), Outer

    return make


def conv(
    batch: int, size: int, i: int, o: int, kernel: int = 3, stride: int = 1, padding: int = 1
) -> Callable[..., tuple[Operands, Make]]:
    def make(shrink: int, **kind: Any) -> tuple[Operands, Make]:
        samples, out = max(2, batch // shrink), (size + 2 * padding - kernel) // stride + 1
        x, g = torch.randn(samples, i, size, size, **kind), torch.randn(samples, o, out, out, **kind)
        if x.is_cuda:  # as its convolutions have them
            x, g = (t.contiguous(memory_format=torch.channels_last) for t in (x, g))
        shape = torch.Size((o, i, kernel, kernel))

        def form(x: Tensor, g: Tensor) -> Patches:
            return Patches(x.unsqueeze(1), g.unsqueeze(1), shape, (stride,) * 2, (padding,) * 2, (1, 1), 1)

        return (x, g), form

    return make


SHAPES: dict[str, Callable[..., tuple[Operands, Make]]] = {
    "GPT-2 qkv 768→2304, T=256": linear(16, 256, 768, 2304),
    "GPT-2 out 768→768, T=256": linear(16, 256, 768, 768),
    "GPT-2 up 768→3072, T=256": linear(16, 256, 768, 3072),
    "GPT-2 head 768→50257, T=256": linear(16, 256, 768, 50257),
    "ViT-S qkv 384→1152, T=196": linear(64, 196, 384, 1152),
    "ViT-S out 384→384, T=196": linear(64, 196, 384, 384),
    "ViT-S up 384→1536, T=196": linear(64, 196, 384, 1536),
    **{f"linear 512→512, T={t}": linear(32, t, 512, 512) for t in (4, 16, 64, 256, 1024)},
    **{f"linear {w}→{w}, T=256": linear(32, 256, w, w) for w in (64, 128, 256, 1024)},
    "ViT-S conv 16×16/16 3→384, 224²": conv(64, 224, 3, 384, 16, 16, 0),
    "ResNet9 3×3 3→64, 64²": conv(256, 64, 3, 64),
    "ResNet9 3×3 64→128, 64²": conv(256, 64, 64, 128),
    "ResNet9 3×3 128→128, 32²": conv(256, 32, 128, 128),
    "ResNet9 3×3 128→256, 32²": conv(256, 32, 128, 256),
    "ResNet9 3×3 256→256, 16²": conv(256, 16, 256, 256),
    "ResNet9 3×3 256→256, 8²": conv(256, 8, 256, 256),
    "ResNet9 3×3 256→256, 20²": conv(256, 20, 256, 256),
    "CNN 8×8/2 1→16, 28²": conv(512, 28, 1, 16, 8, 2, 3),
    "CNN 4×4/2 16→32, 14²": conv(512, 14, 16, 32, 4, 2, 0),
    "CNN 3×3 32→32, 6²": conv(512, 6, 32, 32),
    "digits 3×3/2 8→24, 8²": conv(256, 8, 8, 24, 3, 2, 1),
    **{f"conv 3×3 64→64, {size}²": conv(128, size, 64, 64) for size in (4, 8, 16, 32)},
    **{f"conv 3×3 {w}→{w}, 16²": conv(128, 16, w, w) for w in (16, 32, 256)},
}


# The measurement.


def prepared(way: Way, make: Make, operands: Operands, weights: Tensor, compiled: bool) -> Step:
    """The way as it would run: compiled and, on CUDA, recorded as a graph."""

    def run(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return way(make(*inputs[:2]), inputs[2])

    inputs = (*operands, weights)
    if compiled:
        run = inductor(make_fx(run, tracing_mode="fake")(*inputs), list(inputs))
    run(*inputs)
    return harness.recorded(lambda: run(*inputs), weights.is_cuda)


def measure(item: str, args: argparse.Namespace) -> Iterator[Row]:
    precision, name = item.split("/", 1)
    harness.use(precision)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    operands, make = SHAPES[name](args.shrink, device=args.device, dtype=dtype)
    weights = torch.rand(len(operands[0]), device=args.device)
    row: Row = {"batch": len(weights), "failed": {}}
    steps: dict[str, Step] = {}
    with torch.no_grad():
        form = make(*operands)
        row["chosen"] = chosen(form)
        for way, run in {"engine": engine, **ways(form)}.items():
            try:
                steps[way] = prepared(run, make, operands, weights, args.compile)
                if not args.ahead and way != "engine":
                    row.setdefault("deviation", {})[way] = deviation(steps[way](), steps["engine"]())
            except Exception as error:
                row["failed"][way] = harness.complaint(error)
            harness.release(args.device)
        if "engine" not in steps:
            raise RuntimeError(row["failed"]["engine"])
        if not args.ahead:
            row |= compare(steps, row["chosen"], args)
    yield row


def compare(steps: dict[str, Step], chosen: str, args: argparse.Namespace) -> Row:
    """The ways in turns, short ones several times a turn; of each the shortest turn. Hopeless ones are timed once."""
    ms = {way: 1e3 * harness.seconds(step, args.device) for way, step in steps.items()}
    for way in [way for way, t in ms.items() if t < 100]:
        ms[way] = min(ms[way], *(1e3 * harness.seconds(steps[way], args.device) for _ in range(3)))
    close = {way: max(1, min(100, int(2 / t))) for way, t in ms.items() if t <= HOPELESS * min(ms.values())}

    def several(step: Step, count: int) -> Step:
        return lambda: [step() for _ in range(count)]

    taken = harness.turns([several(steps[way], count) for way, count in close.items()], args.device, args.rounds)
    ms |= {way: 1e3 * min(each) / count for (way, count), each in zip(close.items(), taken, strict=True)}
    if chosen in ms:  # the engine's choice is among the ways: it was timed twice
        ms[chosen] = ms["engine"] = min(ms[chosen], ms["engine"])
    others = {way: t for way, t in ms.items() if way != "engine"}
    fastest = min(others, key=lambda way: others[way])
    loss = 0.0 if fastest == chosen else max(0.0, 100 * (ms["engine"] / others[fastest] - 1))
    return {"ms": ms, "engine_ms": ms["engine"], "fastest": fastest, "fastest_ms": others[fastest], "loss": loss}


def deviation(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Largest relative difference of the norms and of the sum."""
    norms = (found[0] / expected[0] - 1).abs().max().item()
    return max(norms, ((found[1] - expected[1]).norm() / expected[1].norm()).item())


def others(row: Row) -> str:
    """Every way with its time; those that failed or do not agree are marked."""
    cells = [
        f"{way} {t:.3g}{'!' if row['deviation'].get(way, 0) > 0.02 else ''}"
        for way, t in sorted(row["ms"].items(), key=lambda pair: pair[1])
        if way != "engine"
    ]
    return ", ".join([*cells, *(f"{way} failed" for way in row["failed"])])


COLUMNS = {
    "shape": (32, lambda row: row["item"].split("/", 1)[1]),
    "precision": (9, lambda row: row["item"].split("/")[0]),
    "B": (5, figure("batch", "d")),
    "engine ms": (10, figure("engine_ms", ".3f")),
    "chosen": (20, figure("chosen", "")),
    "fastest": (20, figure("fastest", "")),
    "fastest ms": (10, figure("fastest_ms", ".3f")),
    "loss %": (7, figure("loss", ".0f")),
    "all ways, ms": (12, others),
}


def main() -> None:
    parser = harness.arguments(__doc__, rounds=9)
    parser.add_argument("--shrink", type=int, help="divide every batch by this; 16 on the CPU, 1 on CUDA")
    parser.add_argument("--compile", action="store_true", help="compile on the CPU too")
    args = parser.parse_args()
    args.shrink = args.shrink or (16 if args.device == "cpu" else 1)
    args.compile = args.compile or args.device == "cuda"
    if args.items:
        harness.serve(args, lambda item: measure(item, args))
        return
    print(f"{harness.machine(args)}, batches divided by {args.shrink}, {'compiled' if args.compile else 'eager'}")
    table, losses = Table(args, COLUMNS, 2), []
    for row in harness.measured(args, harness.wanted(args, SHAPES)):
        table.add(row)
        losses += [row["loss"]] if "loss" in row else []
    if losses:
        worst = f"mean loss {statistics.mean(losses):.0f} %, largest {max(losses):.0f} %"
        print(f"The fastest way was chosen for {sum(loss == 0 for loss in losses)} of {len(losses)} shapes; {worst}")


if __name__ == "__main__":
    main()
