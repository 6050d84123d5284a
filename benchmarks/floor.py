"""Where a private step stands against the least that it could cost, per type of layer.

    python benchmarks/floor.py                                      # on the CPU, batches divided by 16
    python benchmarks/floor.py --device cuda --precision tf32,bf16 --warm 8

One layer at a time, compiled: forward, and backward for weight and input. So that the gradient of the input is asked
for, a trainable shift is added to the input first (an embedding has no such gradient, and no shift); the losses are
half the squares of the output. Beside it the same by dpscale: norms, weights and weighted sum too, but neither noise
nor update. On CUDA the time is that of the device's own work, by the profiler; on the CPU the shortest of all rounds.

The floor of a layer with T positions, p inputs and d outputs (a convolution: p = channels × window): the products take
6·B·T·p·d operations, and the cheapest norm more:

    Gram        B·T²·(p + d)      half of two symmetric T×T matrices, at two operations each
    pixels      B·(A²·c + T²·d)   the same for a convolution, from the A pixels of c channels
    norm only   2·B·T·p·d         each sample's gradient, forgotten
    kept        2·B·p·d           the same, kept: the weighted sum then needs no product over positions; where the
                                  gradients are no larger than input and output, or 32 MiB

at the rate of a large matrix product as measured here, or, where that takes longer, the bytes of every operand once
(batch, input, weight, output, the gradients of the three, and kept gradients twice) at the bandwidth of a large copy as
measured here. The plain layer's floor is that without norms.
"""

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dpscale
import harness
from dpscale.engine import Engine
from harness import Row, Table, figure

WORDS = 50257
KEPT = 1 << 23
"""So many numbers may be kept whatever the size of the operands."""


class Shifted(nn.Module):
    """A layer whose input is trainable: a shift along the features or channels is added to it."""

    def __init__(self, layer: nn.Module, features: int, trailing: int) -> None:
        super().__init__()
        self.shift, self.layer = nn.Parameter(torch.zeros(features, *[1] * trailing)), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x + self.shift)


class TiedHead(nn.Module):
    """An embedding and the head that shares its weight."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, width)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.table(x) + self.shift, self.table.weight)


@dataclass(frozen=True)
class Layer:
    """What is measured, and what its floor is computed from.

    Attributes:
        make: the model.
        batch: B, before it is divided.
        shape: of one sample's input.
        positions, inputs, outputs: T, p and d; p = 0 where there is no product.
        weights: numbers in the weight.
        pixels, channels: A and c of a convolution; 0: none.
        words: the batch holds indices below this.
        read: numbers in one sample's input that have a gradient, where they are not the batch's.
        autocast: whether bf16 autocast applies (norms stay in float32).
    """

    make: Callable[[], nn.Module]
    batch: int
    shape: tuple[int, ...]
    positions: int
    inputs: int
    outputs: int
    weights: int
    pixels: int = 0
    channels: int = 0
    words: int = 0
    read: int | None = None
    autocast: bool = True

    def data(self, batch: int, device: str) -> Tensor:
        if self.words:
            return torch.randint(0, self.words, (batch, *self.shape), device=device)
        return torch.randn(batch, *self.shape, device=device)


def linear(batch: int, t: int, i: int, o: int) -> Layer:
    shape = (t, i) if t > 1 else (i,)
    return Layer(lambda: Shifted(nn.Linear(i, o), i, 0), batch, shape, t, i, o, i * o)


def conv(batch: int, size: int, i: int, o: int, kernel: int = 3, stride: int = 1, padding: int = 1) -> Layer:
    def make() -> nn.Module:
        return Shifted(nn.Conv2d(i, o, kernel, stride, padding, bias=False), i, 2)

    positions = ((size + 2 * padding - kernel) // stride + 1) ** 2
    inputs = i * kernel**2
    return Layer(make, batch, (i, size, size), positions, inputs, o, inputs * o, size**2, i)


LAYERS: dict[str, Layer] = {
    "Linear, GPT-2 qkv 768→2304": linear(16, 256, 768, 2304),
    "Linear, GPT-2 out 768→768": linear(16, 256, 768, 768),
    "Linear, GPT-2 up 768→3072": linear(16, 256, 768, 3072),
    "Linear, GPT-2 down 3072→768": linear(16, 256, 3072, 768),
    "Linear, GPT-2 head 768→50257": linear(16, 256, 768, WORDS),
    "tied head, GPT-2 768→50257": Layer(lambda: TiedHead(768), 16, (256,), 256, 768, WORDS, 768 * WORDS, words=WORDS),
    "Linear, ViT-S qkv 384→1152": linear(64, 196, 384, 1152),
    "Linear, ViT-S up 384→1536": linear(64, 196, 384, 1536),
    "Linear, ViT-S down 1536→384": linear(64, 196, 1536, 384),
    "Linear, probe 2048→10": linear(1024, 1, 2048, 10),
    "Conv2d, ViT-S 16×16/16 3→384, 224²": conv(64, 224, 3, 384, 16, 16, 0),
    "Conv2d, ResNet9 3×3 3→64, 64²": conv(256, 64, 3, 64),
    "Conv2d, ResNet9 3×3 64→128, 64²": conv(256, 64, 64, 128),
    "Conv2d, ResNet9 3×3 128→128, 32²": conv(256, 32, 128, 128),
    "Conv2d, ResNet9 3×3 128→256, 32²": conv(256, 32, 128, 256),
    "Conv2d, ResNet9 3×3 256→256, 16²": conv(256, 16, 256, 256),
    "Conv2d, ResNet9 3×3 256→256, 8²": conv(256, 8, 256, 256),
    "Conv2d, CNN 8×8/2 1→16, 28²": conv(512, 28, 1, 16, 8, 2, 3),
    "Conv2d, CNN 4×4/2 16→32, 14²": conv(512, 14, 16, 32, 4, 2, 0),
    "Conv2d, CNN 3×3 32→32, 6²": conv(512, 6, 32, 32),
    "Embedding, GPT-2 50257×768": Layer(
        lambda: nn.Embedding(WORDS, 768), 16, (256,), 256, 0, 768, 768 * WORDS, words=WORDS, read=0, autocast=False
    ),
    "LayerNorm, GPT-2 768": Layer(
        lambda: Shifted(nn.LayerNorm(768), 768, 0), 16, (256, 768), 256, 0, 768, 2 * 768, autocast=False
    ),
    "LayerNorm, ViT-S 384": Layer(
        lambda: Shifted(nn.LayerNorm(384), 384, 0), 64, (196, 384), 196, 0, 384, 2 * 384, autocast=False
    ),
    "GroupNorm, ResNet9 64, 64²": Layer(
        lambda: Shifted(nn.GroupNorm(16, 64), 64, 2), 256, (64, 64, 64), 4096, 0, 64, 2 * 64, autocast=False
    ),
    "GroupNorm, ResNet9 256, 16²": Layer(
        lambda: Shifted(nn.GroupNorm(32, 256), 256, 2), 256, (256, 16, 16), 256, 0, 256, 2 * 256, autocast=False
    ),
}


def matmul_rate(device: str, precision: str) -> float:
    """Operations per second of a large matrix product."""
    n = 8192 if device == "cuda" else 2048
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    (taken,) = harness.turns([lambda: torch.mm(a, b)], device, 10)
    return 2 * n**3 / min(taken)


def copy_bandwidth(device: str) -> float:
    """Bytes per second, read and written, of a large copy."""
    source = torch.zeros(2**28 if device == "cuda" else 2**25, device=device)
    target = torch.empty_like(source)
    (taken,) = harness.turns([lambda: target.copy_(source)], device, 10)
    return 2 * 4 * source.numel() / min(taken)


def floors(layer: Layer, batch: int, precision: str, rate: float, bandwidth: float) -> Row:
    """The least time of the plain layer and of the private one, in milliseconds, and by which way to the norm."""
    t, p, d = layer.positions, layer.inputs, layer.outputs
    size = 2 if precision == "bf16" and layer.autocast else 4
    given = math.prod(layer.shape)
    read = given if layer.read is None else layer.read
    looked_up = min(layer.weights, batch * t * d) if layer.words and not p else layer.weights
    moved = batch * (4 * given + 2 * size * (read + t * d)) + 4 * (looked_up + layer.weights)
    products = 6 * batch * t * p * d
    routes = {"-": (0, 0)}
    if p:
        routes = {
            "Gram": (batch * t**2 * (p + d), 0),
            "norm only": (2 * batch * t * p * d, 0),
        }
        if layer.pixels:
            routes["pixels"] = (batch * (layer.pixels**2 * layer.channels + t**2 * d), 0)
        if batch * p * d <= max(batch * (read + t * d), KEPT):
            routes["kept"] = (2 * batch * p * d, 2 * 4 * batch * p * d)

    def milliseconds(operations: float, extra: float) -> tuple[float, float]:
        return 1e3 * (products + operations) / rate, 1e3 * (moved + extra) / bandwidth

    best = min(routes, key=lambda name: max(milliseconds(*routes[name])))
    flops, bytes_ = milliseconds(*routes[best])
    return {
        "route": best,
        "flops_ms": flops,
        "bytes_ms": bytes_,
        "floor_ms": max(flops, bytes_),
        "plain_floor_ms": max(milliseconds(0, 0)),
    }


def steps(layer: Layer, batch: int, args: argparse.Namespace, precision: str) -> tuple[Callable[[], Any], ...]:
    """The plain layer's forward and backward, and the private one's."""
    cast = harness.casting(args.device, precision)
    models = [layer.make().to(args.device) for _ in range(2)]
    x = layer.data(batch, args.device)
    mask = torch.ones(batch, dtype=torch.bool, device=args.device)
    fast, rule = Engine(models[1], compile=True).scaled_sum, dpscale.Clip(C=1.0)

    def losses(model: nn.Module, x: Tensor) -> Tensor:
        with cast():
            return model(x).float().square().flatten(1).sum(1) / 2

    def total(x: Tensor) -> Tensor:
        return losses(models[0], x).sum()

    def loss_fn(model: nn.Module, x: Tensor) -> Tensor:
        return losses(model, x)

    cuda_graphs = {"mode": "reduce-overhead"} if args.device == "cuda" else {}
    run = torch.compile(total, dynamic=False, **cuda_graphs)

    def plain() -> None:
        run(x).backward()
        models[0].zero_grad()

    return plain, lambda: fast(loss_fn, x, rule, mask)


def measure(item: str, args: argparse.Namespace) -> Iterator[Row]:
    precision, name = item.split("/", 1)
    harness.use(precision)
    if precision not in args.rates and not args.ahead:
        args.rates[precision] = matmul_rate(args.device, precision), copy_bandwidth(args.device)
        harness.release(args.device)
    layer = LAYERS[name]
    batch = max(2, layer.batch // args.shrink)
    row: Row = {"batch": batch}
    for who, step in zip(("plain", "dpscale"), steps(layer, batch, args, precision), strict=True):
        for _ in range(3):  # compiles, records, replays
            step()
        harness.insist_compiled()
        if not args.ahead:
            device, wall = harness.device_seconds(step, args.device, args.rounds)
            row |= {f"{who}_ms": 1e3 * device, f"{who}_wall_ms": 1e3 * wall}
    if not args.ahead:
        rate, bandwidth = args.rates[precision]
        row |= floors(layer, batch, precision, rate, bandwidth)
        row |= {"rate": rate, "bandwidth": bandwidth, "ratio": row["dpscale_ms"] / row["plain_ms"]}
        row |= {f"{who}_over": row[f"{who}_ms"] / row[key] for who, key in FLOORS.items()}
    yield row


FLOORS = {"plain": "plain_floor_ms", "dpscale": "floor_ms"}
COLUMNS = {
    "layer": (35, lambda row: row["item"].split("/", 1)[1]),
    "precision": (9, lambda row: row["item"].split("/")[0]),
    "B": (5, figure("batch", "d")),
    "plain ms": (9, figure("plain_ms", ".3f")),
    "dpscale ms": (10, figure("dpscale_ms", ".3f")),
    "ratio": (6, figure("ratio", ".2f")),
    "flops ms": (9, figure("flops_ms", ".3f")),
    "bytes ms": (9, figure("bytes_ms", ".3f")),
    "floor ms": (9, figure("floor_ms", ".3f")),
    "norm by": (9, figure("route", "")),
    "plain/floor": (11, figure("plain_over", ".2f")),
    "dpscale/floor": (13, figure("dpscale_over", ".2f")),
    "note": (4, lambda row: row.get("note") or " "),
}


def main() -> None:
    parser = harness.arguments(__doc__, rounds=10)
    parser.add_argument("--shrink", type=int, help="divide every batch by this; 16 on the CPU, 1 on CUDA")
    args = parser.parse_args()
    args.shrink = args.shrink or (16 if args.device == "cpu" else 1)
    if args.items:
        args.rates = {}
        harness.serve(args, lambda item: measure(item, args))
        return
    print(f"{harness.machine(args)}, batches divided by {args.shrink}")
    table = Table(args, COLUMNS, 2)
    rates: dict[str, str] = {}
    for row in harness.measured(args, harness.wanted(args, LAYERS)):
        table.add(row)
        if "rate" in row:
            precision = row["item"].split("/")[0]
            rates[precision] = f"{row['rate'] / 1e12:.3g} TFLOP/s, copies {row['bandwidth'] / 1e9:.3g} GB/s"
    for precision, text in rates.items():
        print(f"{precision}: matrix products {text}")


if __name__ == "__main__":
    main()
