"""Runs towards the best private accuracy at the paper's (ε, δ, N), by what the lab has no field for: scattering
features, views, averages over views of a test image.

    python benchmarks/record/record.py features --data DATA --work WORK [--test]
    python benchmarks/record/record.py work --data DATA --work WORK --list LIST.jsonl --out OUT.jsonl \
        --workers 6 --minutes 8

A list has a run a line (`Spec`); a record has it again, with what came of it. Runs with a split measure on training
images that they do not train on; only those with ``"split": null`` see the test images, and nothing is chosen on them.
"""

import argparse
import dataclasses
import fcntl
import gc
import json
import math
import multiprocessing
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parent))
from scattering import Scattering

from dpscale import Plan, Poisson, over_views, privatize
from dpscale.lab.data import load
from dpscale.lab.models import Times, gelu_cnn, normed_cnn, probe
from dpscale.lab.presets import METHODS, SCHEDULES, Choice, preset
from dpscale.lab.provenance import installed_versions
from dpscale.scaling import Clip

HELD = 40_000
"""FashionMNIST: the paper trains on 40,000 images; the last 20,000 training images are held out for every choice."""


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One run.

    Args:
        stage: what it is for.
        preset: of the lab: data, N, (ε, δ), C, r, s.
        inputs: "pixels" or "scatter".
        views: views of a sample whose gradients are averaged before they are scaled; 0: the sample as it is.
        augment: "none", "flip" (mirrored or not), "shift" (by up to 2 pixels), "affine" (also turned by up to 10° and
            resized by up to a tenth), "flip-shift".
        rate, gamma1, K0, gamma0: as in the lab; the rate is learning rate × bound / gamma1.
        split: None for a final run, measured on the test images; else a number of a split of the training images.
        average: also measure the moving average of the weights that keeps so much of itself at every step.
        steps_run: end after so many steps, at the noise and schedule of the whole run (for trials of speed).
    """

    stage: str
    preset: str
    model: str
    method: str
    batch: int
    epochs: float
    rate: float
    inputs: str = "pixels"
    views: int = 0
    augment: str = "none"
    gamma1: float = 0.1
    K0: int | None = None
    gamma0: float | None = None
    schedule: str = "cosine"
    precision: str = "bf16"
    split: int | None = 0
    seed: int = 0
    average: float = 0.0
    steps_run: int | None = None
    note: str = ""

    @property
    def key(self) -> str:
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


# Data -------------------------------------------------------------------------------------------------------------


def raw(name: str, test: bool) -> tuple[Tensor, Tensor]:
    data = load(preset(name).data)
    return (data.test_images, data.test_labels) if test else (data.train_images, data.train_labels)


def split_of(spec: Spec, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Places of the training images to train on, and of those to measure on."""
    every = torch.arange(len(labels))
    if spec.preset == "fashion-mnist":
        return every[:HELD], every[HELD:]
    from sklearn.model_selection import train_test_split

    assert spec.split is not None
    train, held = train_test_split(every.numpy(), test_size=0.1, random_state=100 + spec.split, stratify=labels.numpy())
    return torch.from_numpy(train).sort().values, torch.from_numpy(held).sort().values


def feature_file(work: Path, name: str, test: bool) -> Path:
    return work / f"{name}-{'test' if test else 'train'}.pt"


VARIANTS = {"mnist": [(0, 0, 0)], "fashion-mnist": [(0, 0, 0)]}
"""Of each image, whose features are kept: (mirrored, pixels down, pixels to the right)."""


def features(work: Path, names: list[str], test: bool, limit: int | None) -> None:
    """Scattering features of all images and their variants, float16, once."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    scatter = Scattering(device=device)
    for name in names:
        images = raw(name, test)[0][:limit]
        out = torch.empty(len(images), len(VARIANTS[name]), scatter.maps, 7, 7, dtype=torch.float16)
        for v, (mirror, down, right) in enumerate(VARIANTS[name]):
            for k in range(0, len(images), 2000):
                x = images[k : k + 2000].to(device).float().reshape(-1, 28, 28) / 255
                x = torch.roll(x.flip(-1) if mirror else x, (down, right), (-2, -1))
                out[k : k + 2000, v] = scatter(x).half().cpu()
        torch.save(out, feature_file(work, name, test))


class Images:
    """Samples on the device, and views of them."""

    def __init__(self, spec: Spec, work: Path, device: str) -> None:
        final = spec.split is None
        config = preset(spec.preset)
        labels = raw(spec.preset, False)[1]
        if final:
            train, held = torch.arange(len(labels))[: config.train_size], None
        else:
            train, held = split_of(spec, labels)
        self.normalize = config.normalize
        self.low = -self.normalize[0] / self.normalize[1]
        self.scatter = spec.inputs == "scatter"
        pool = self._samples(spec, work, False)
        other = self._samples(spec, work, True) if final else pool[held]
        self.x, self.y = pool[train].to(device), labels[train].to(device)
        self.test_x = other.to(device)
        self.test_y = (raw(spec.preset, True)[1] if final else labels[held]).to(device)
        if spec.steps_run:  # a trial of the code
            self.test_x, self.test_y = self.test_x[:200], self.test_y[:200]

    def _samples(self, spec: Spec, work: Path, test: bool) -> Tensor:
        if self.scatter:
            return torch.load(feature_file(work, spec.preset, test), mmap=True)
        return raw(spec.preset, test)[0].reshape(-1, 1, 1, 28, 28)

    def prepared(self, x: Tensor) -> Tensor:
        if self.scatter:
            return x.float()
        return (x.float() / 255 - self.normalize[0]) / self.normalize[1]

    def viewed(self, x: Tensor, spec: Spec, random: torch.Generator) -> Tensor:
        """(B, V, …) kept variants to (B, K, …) views at random, or to (B, …) without views."""
        B, V = x.shape[:2]
        if not spec.views:
            return self.prepared(x[:, 0])
        if self.scatter:
            order = torch.rand(B, V, generator=random, device=x.device).argsort(1)[:, : spec.views]
            return self.prepared(x[torch.arange(B, device=x.device)[:, None], order])
        x = self.prepared(x.expand(B, spec.views, *x.shape[2:]).flatten(0, 1))
        return augmented(x, spec.augment, self.low, random).unflatten(0, (B, spec.views))

    def test_views(self, k: slice, spec: Spec) -> list[Tensor]:
        """Fixed views of the images to measure on: first the image itself."""
        x = self.test_x[k]
        if self.scatter:
            return [self.prepared(x[:, v]) for v in range(x.shape[1])]
        x = self.prepared(x[:, 0])
        views = [x]
        if "flip" in spec.augment:
            views.append(x.flip(-1))
        if spec.augment != "flip":
            padded = nn.functional.pad(x, (1,) * 4, value=self.low)
            moved = [(0, 1), (2, 1), (1, 0), (1, 2)]
            views += [padded[..., a : a + 28, b : b + 28] for a, b in moved]
            if "flip" in spec.augment:
                views += [padded[..., a : a + 28, b : b + 28].flip(-1) for a, b in moved]
        return views


def augmented(x: Tensor, kind: str, low: float, random: torch.Generator) -> Tensor:
    """A random view of each image, each for itself; ``low`` is what a black pixel is."""
    n = len(x)

    def draw() -> Tensor:
        return torch.rand(n, generator=random, device=x.device)

    if kind in ("flip", "flip-shift"):
        x = torch.where((draw() < 0.5)[:, None, None, None], x.flip(-1), x)
    if kind in ("shift", "flip-shift"):
        padded = nn.functional.pad(x - low, (2,) * 4)
        at = torch.arange(28, device=x.device)
        rows = (draw() * 5).long()[:, None] + at
        columns = (draw() * 5).long()[:, None] + at
        whole = torch.arange(n, device=x.device)[:, None, None]
        return padded[whole, 0, rows[:, :, None], columns[:, None, :]][:, None] + low
    if kind == "affine":
        angle, size = (draw() * 2 - 1) * math.pi / 18, 1 + (draw() * 2 - 1) * 0.1
        down, right = (draw() * 2 - 1) * 2 / 14, (draw() * 2 - 1) * 2 / 14
        cos, sin = torch.cos(angle) / size, torch.sin(angle) / size
        theta = torch.stack([torch.stack([cos, -sin, right], 1), torch.stack([sin, cos, down], 1)], 1)
        grid = nn.functional.affine_grid(theta, [n, 1, 28, 28], align_corners=False)
        return nn.functional.grid_sample(x - low, grid, align_corners=False) + low
    return x


# Models -----------------------------------------------------------------------------------------------------------


class Sum(nn.Module):
    """The sum of two branches on one input."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.first(x) + self.second(x)
        return out


def _linear() -> nn.Sequential:
    return nn.Sequential(nn.Flatten(), probe((81 * 49,)))


def _conv(inputs: int, outputs: int, kernel: int = 3) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2), nn.GroupNorm(8, outputs), nn.GELU()]


def _head(width: int = 64, *, convs: int = 2, zero: bool = False) -> nn.Sequential:
    """Convolutions of the 7×7 maps, pooled to 4×4 if there are several, and a linear layer."""
    layers = _conv(81, width)
    for _ in range(convs - 1):
        layers += _conv(width, width)
    pooled = [nn.MaxPool2d(2, ceil_mode=True)] if convs > 1 else []
    inputs = width * (16 if convs > 1 else 49)
    last = probe((inputs,)) if zero else nn.Linear(inputs, 10)
    return nn.Sequential(*layers, *pooled, nn.Flatten(), Times(2.0 if convs > 1 else 1.0), last)


def _normed() -> nn.Module:
    return nn.GroupNorm(27, 81, affine=False)


def wide_cnn() -> nn.Sequential:
    """`gelu_cnn` with half as many channels again."""

    def conv(inputs: int, outputs: int, *, pool: bool = True) -> list[nn.Module]:
        layers = [nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(8, outputs), nn.GELU()]
        return [*layers, nn.MaxPool2d(2, ceil_mode=True)] if pool else layers

    layers = [*conv(1, 32), *conv(32, 64), *conv(64, 96, pool=False), *conv(96, 96)]
    return nn.Sequential(*layers, nn.Flatten(), Times(2.0), nn.Linear(96 * 16, 10))


MODELS: dict[str, Any] = {
    "gelu_cnn": gelu_cnn,
    "normed_cnn": normed_cnn,
    "wide_cnn": wide_cnn,
    "scatter_linear": lambda: nn.Sequential(_normed(), _linear()),
    "scatter_cnn": lambda: nn.Sequential(_normed(), _head(convs=1)),
    "scatter_deep": lambda: nn.Sequential(_normed(), _head()),
    "scatter_deep_zero": lambda: nn.Sequential(_normed(), _head(zero=True)),
    "scatter_deep_wide": lambda: nn.Sequential(_normed(), _head(96)),
    "scatter_deeper": lambda: nn.Sequential(_normed(), _head(convs=3)),
    "scatter_sum": lambda: nn.Sequential(_normed(), Sum(_linear(), _head())),
    "scatter_sum_wide": lambda: nn.Sequential(_normed(), Sum(_linear(), _head(96))),
}


# A run ------------------------------------------------------------------------------------------------------------

_SIGMA: dict[Any, float] = {}


def sigma_of(spec: Spec) -> float:
    """The noise multiplier of the whole run at the paper's (ε, δ, N), the same for every method and for every try."""
    config = preset(spec.preset)
    size = config.train_size or 60_000
    at = (size, spec.batch, spec.epochs, config.epsilon, config.delta)
    if at not in _SIGMA:
        plan = Plan(scaling=Clip(C=1.0), sampling=Poisson(size=size, batch=spec.batch), epochs=spec.epochs)
        found = plan.calibrate(epsilon=config.epsilon, delta=config.delta).noise_multiplier
        assert found is not None
        _SIGMA[at] = found
    return _SIGMA[at]


@torch.no_grad()
def measured(model: nn.Module, images: Images, spec: Spec, device: str) -> dict[str, float]:
    model.eval()
    right, several, loss = 0, 0, 0.0
    for k in range(0, len(images.test_y), 2000):
        part = slice(k, k + 2000)
        y = images.test_y[part]
        with torch.autocast(device, torch.bfloat16, enabled=spec.precision == "bf16" and device == "cuda"):
            logits = [model(x).float() for x in images.test_views(part, spec)]
        right += int((logits[0].argmax(1) == y).sum())
        several += int((sum(z.softmax(1) for z in logits).argmax(1) == y).sum())
        loss += nn.functional.cross_entropy(logits[0], y, reduction="sum").item()
    model.train()
    n = len(images.test_y)
    return {"accuracy": right / n, "accuracy_over_views": several / n, "loss": loss / n}


def run(spec: Spec, work: Path) -> dict[str, Any]:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begun = time.perf_counter()
    config = preset(spec.preset).replace(gamma1=spec.gamma1)
    method = METHODS[spec.method]
    choice = Choice(rate=spec.rate, gamma1=spec.gamma1, K0=spec.K0, gamma0=spec.gamma0)
    scaling = method.scaling(config)
    images = Images(spec, work, device)
    total, here = config.train_size or 60_000, len(images.y)
    plan = Plan(
        scaling=scaling,
        sampling=Poisson(size=here, batch=round(spec.batch * here / total)),
        epochs=spec.epochs,
        noise_multiplier=sigma_of(spec),
        delta=config.delta,
        momentum=method.momentum_of(config, choice),
    )
    torch.manual_seed(spec.seed)
    model = MODELS[spec.model]().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=method.learning_rate(config, choice))
    final = Poisson(size=total, batch=spec.batch)
    rows = max(final.physical_batch, plan.sampling.physical_batch) if device == "cuda" else None
    compiled = True if os.environ.get("RECORD_COMPILE") else None
    private = privatize(model, optimizer, plan, seed=spec.seed, micro_batch=rows, compile=compiled)
    left = SCHEDULES[spec.schedule]
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: left(step / plan.steps))
    random = torch.Generator(device).manual_seed(spec.seed)
    autocast = spec.precision == "bf16" and device == "cuda"

    def losses(model: Any, batch: Any) -> Tensor:
        x, y = batch
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            logits = model(x)
        return nn.functional.cross_entropy(logits.float(), y, reduction="none")

    loss_fn = over_views(losses) if spec.views else losses
    K = spec.views
    average = [p.detach().clone() for p in model.parameters()] if spec.average else None
    start = time.perf_counter()
    first, seen = start, []
    for number, (places, y) in enumerate(
        private.batches(TensorDataset(torch.arange(here, device=device), images.y)), start=1
    ):
        x = images.viewed(images.x[places], spec, random)
        out = private.step((x, y[:, None].expand(-1, K).contiguous() if K else y), loss_fn)
        schedule.step()
        if average is not None:
            torch._foreach_lerp_(average, list(model.parameters()), 1 - min(spec.average, number / (number + 10)))
        if number == 1:
            out.loss.item()
            first = time.perf_counter()
        if number > plan.steps - 20:
            seen.append(out.loss)
        if number == spec.steps_run:
            break
    result = measured(model, images, spec, device)
    end = time.perf_counter()
    more = {}
    if average is not None:
        with torch.no_grad():
            for p, a in zip(model.parameters(), average, strict=True):
                p.copy_(a)
        more = {f"averaged_{name}": value for name, value in measured(model, images, spec, device).items()}
    return {
        **dataclasses.asdict(spec),
        **result,
        **more,
        "role": "final" if spec.split is None else "search",
        "measured_on": len(images.test_y),
        "train": here,
        "train_loss": torch.stack(seen).mean().item() if seen else None,
        "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps,
        "epsilon": plan.epsilon(delta=config.delta) if spec.split is None and not spec.steps_run else None,
        "delta": config.delta,
        "scaling": {"rule": method.rule, **vars(scaling)},
        "learning_rate": method.learning_rate(config, choice),
        "parameters": sum(p.numel() for p in model.parameters()),
        "load_seconds": round(start - begun, 2),
        "cold_seconds": round(first - start, 2),
        "seconds": round(end - first, 2),
    }


# Many runs --------------------------------------------------------------------------------------------------------


def worker(number: int, specs: list[Spec], args: argparse.Namespace, deadline: float) -> None:
    """Take the next run that nobody has taken, until there is none or time is up."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False  # as the lab has it
    torch.set_num_threads(1)
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    versions = installed_versions()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    for place, spec in enumerate(specs):
        if time.time() > deadline:
            return
        try:
            os.close(os.open(args.work / f"claim-{args.list.stem}-{place}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        at = time.time()
        try:
            record = run(spec, args.work)
        except Exception:
            record = {**dataclasses.asdict(spec), "error": traceback.format_exc()[-3000:]}
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        record |= {"command": args.command, "commit": args.commit, "gpu": gpu, "versions": versions}
        record |= {"begun": round(at - args.start, 1), "ended": round(time.time() - args.start, 1), "worker": number}
        with args.out.open("a") as out:
            fcntl.flock(out, fcntl.LOCK_EX)
            out.write(json.dumps(record) + "\n")
        told = {k: record.get(k) for k in ("accuracy", "accuracy_over_views", "loss", "seconds", "cold_seconds")}
        what = (spec.stage, spec.preset, spec.model, spec.method, spec.rate, spec.views, spec.split, spec.seed)
        print(f"{time.time() - args.start:6.1f}", number, *what, told, record.get("error", "")[-300:], flush=True)
        if device_full(record):
            return


def device_full(record: dict[str, Any]) -> bool:
    return "CUDA error" in record.get("error", "")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["features", "work"])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--list", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--presets", default="mnist,fashion-mnist")
    parser.add_argument("--test", action="store_true")
    parser.add_argument("--limit", type=int)
    args = parser.parse_args()
    os.environ["DPSCALE_DATA"] = str(args.data)
    args.command = "python " + " ".join(sys.argv)
    args.commit = os.environ.get("RECORD_COMMIT")
    args.start = time.time()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "features":
        features(args.work, args.presets.split(","), args.test, args.limit)
        return
    specs = [Spec(**json.loads(line)) for line in args.list.read_text().splitlines() if line.strip()]
    deadline = args.start + 60 * args.minutes
    spawn = multiprocessing.get_context("spawn")
    workers = [spawn.Process(target=worker, args=(n, specs, args, deadline)) for n in range(args.workers)]
    for each in workers:
        each.start()
    for each in workers:
        each.join()


if __name__ == "__main__":
    main()
