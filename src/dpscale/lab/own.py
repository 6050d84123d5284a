"""``dpscale train --data …``: one's own model on one's own data, without a script.

Data are a table, a folder of images with a folder for each class, or what a function of one's own returns. Classes are
taken for public: which values the target column has, or which folders there are, is known without looking at a person.
"""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from dpscale.lab import device
from dpscale.lab.runner import Progress
from dpscale.ledger import Ledger
from dpscale.one_call import make_private
from dpscale.sources import dataset_of, is_frame

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}


@dataclass(frozen=True)
class Samples:
    """What to train on: a dataset of (input, class) and the names of the classes, where they are known."""

    dataset: Dataset[Any]
    classes: Sequence[str] | None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one input."""
        return tuple(torch.as_tensor(self.dataset[0][0]).shape)


def samples(data: str, target: str | None, classes: Sequence[str] | None = None) -> Samples:
    """Read ``data``: a table.csv, a folder of class folders, or module:function.

    Args:
        data: where they are.
        target: the column to learn, of a table or a data frame.
        classes: those of the training data, for a test set; None: all that are there.
    """
    path = Path(data)
    if path.suffix == ".csv":
        import pandas

        return _table(pandas.read_csv(path), data, target, classes)
    if path.is_dir():
        files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in _IMAGES)
        if not files:
            raise ValueError(f"{path} has no images: it must have a folder for each class, with images in it.")
        names, y = _classes([file.parent.name for file in files], classes)
        return Samples(Images(files, y), names)
    if ":" not in data:
        raise ValueError(f"--data {data} must be a file table.csv, a folder of images, or module:function.")
    made = _imported(data, "--data")()
    return _table(made, data, target, classes) if is_frame(made) else Samples(dataset_of("train", made), classes)


def _imported(name: str, option: str) -> Callable[..., Any]:
    """module:function, looked for in the present folder first."""
    module, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), function)
        return found
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{option} {name} cannot be imported: {error}.") from error
    finally:
        sys.path.remove("")


def _table(frame: Any, name: str, target: str | None, classes: Sequence[str] | None) -> Samples:
    if target is None or target not in frame:
        columns = ", ".join(map(str, frame.columns))
        raise ValueError(f"--target must be a column of {name}: one of {columns}. Got {target} instead.")
    if frame.isna().to_numpy().any():
        raise ValueError(f"{name} has missing values. Fill them by a constant, not by a mean of the data.")
    names, y = _classes(frame[target].astype(str).tolist(), classes)
    return Samples(dataset_of("train", frame.assign(**{target: y.numpy()}), target), names)


def _classes(values: list[str], classes: Sequence[str] | None) -> tuple[Sequence[str], Tensor]:
    names = sorted(set(values)) if classes is None else classes
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"The test data have classes that the training data have not: {', '.join(unknown)}.")
    number = {name: k for k, name in enumerate(names)}
    return names, torch.tensor([number[value] for value in values])


class Images(Dataset[tuple[Tensor, Tensor]]):
    """Image files, read when they are asked for; pixels from 0 to 1."""

    def __init__(self, files: Sequence[Path], labels: Tensor) -> None:
        self.files, self.labels = files, labels

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        from PIL import Image

        with Image.open(self.files[i]) as image:
            pixels = np.asarray(image.convert("RGB"), dtype=np.float32) / 255
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), self.labels[i]


def build(name: str | None, found: Samples) -> nn.Module:
    """``module:function`` is called without arguments; one of the lab's by name; a linear layer if none is named."""
    if name is not None and ":" in name:
        model = _imported(name, "--model")()
        if not isinstance(model, nn.Module):
            raise ValueError(f"--model {name} must return a torch.nn.Module. Got {type(model).__name__} instead.")
        return model
    classes = len(found.classes) if found.classes is not None else 1 + max(int(y) for _, y in found.dataset)  # type: ignore[attr-defined]
    if name is None:
        return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(found.shape)), classes))
    from dpscale.lab.models import MODELS

    if name not in MODELS:
        raise ValueError(f"--model {name} must be module:function, or one of {', '.join(MODELS)}.")
    return MODELS[name](found.shape, classes)


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each sample."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(
    data: str, target: str | None, model: str | None, test: str | None, out: Path, *, epsilon: float, delta: float,
    epochs: float | None, batch: int | None, rate: float, seed: int | None, ledger: Path | None,
    noise: Any = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> dict[str, Any]:  # fmt: skip
    """Train, and write model.pt, run.ckpt and run.json into ``out``; what run.json holds.

    Args:
        data, target, model: as `samples` and `build` take them.
        test: data to measure the accuracy on, which are published exactly.
        out: folder.
        epsilon, delta: the budget.
        epochs, batch: None: as `advise` has it.
        rate: of SGD with a bound of 1.
        seed: None for the operating system's randomness.
        ledger: file to book the run in.
        noise: "fast" or "secure". None: as for `privatize`.
        on_progress: told at each hundredth of the steps.
    """
    found = samples(data, target)
    torch.manual_seed(0 if seed is None else seed)
    network, books = build(model, found).to(device.name()), None if ledger is None else Ledger(ledger)
    private = make_private(
        network, torch.optim.SGD(network.parameters(), lr=rate), found.dataset, epsilon=epsilon, delta=delta,
        epochs=epochs, batch="auto" if batch is None else batch, seed=seed, ledger=books,
        noise=noise,
    )  # fmt: skip
    steps, size, per_step = private.steps, private.plan.sampling.size, private.plan.expected_batch
    for each in private.batches():
        private.step(each.to(device.name()), losses)
        taken = private.steps_taken
        if 100 * taken // steps > 100 * (taken - 1) // steps:
            on_progress(Progress(
                step=taken, steps=steps, epoch=-(-taken * per_step // size), epochs=-(-steps * per_step // size),
                loss=None, plan=private.plan, delta=delta,
            ))  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), out / "model.pt")
    private.save(out / "run.ckpt")
    written = {
        "data": data, "target": target, "model": model, "epsilon": private.epsilon(), "delta": delta,
        "steps": private.steps_taken, "classes": None if found.classes is None else list(found.classes),
        "test_accuracy": None if test is None else accuracy(network, samples(test, target, found.classes)),
        "statement": private.statement(), "plan": private.plan.to_dict(),
    }  # fmt: skip
    private.close()
    (out / "run.json").write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")
    return written


@torch.no_grad()
def accuracy(model: nn.Module, test: Samples) -> float:
    """Share of a test set that is classified as it should be."""
    model.eval()
    loader = torch.utils.data.DataLoader(test.dataset, batch_size=512)
    right = [int((model(x.to(device.name())).argmax(1).cpu() == y).sum()) for x, y in loader]
    return sum(right) / len(test.dataset)  # type: ignore[arg-type]
