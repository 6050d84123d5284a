"""``dpscale train --data …``: one's own model on one's own data, without a script.

Data are a table, a folder of images with a folder for each class, or what a function of one's own returns. Classes are
taken for public: which values the target column has, or which folders there are, is known without looking at a person.
"""

import importlib
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from dpscale.lab import device
from dpscale.lab.models import MODELS
from dpscale.lab.progress import OnProgress, Progress, ignore
from dpscale.lab.runner import said
from dpscale.ledger import Ledger
from dpscale.one_call import make_private
from dpscale.sources import dataset_of, is_frame

_IMAGES = {".png", ".jpg", ".jpeg", ".bmp", ".webp"}
Classes = Sequence[str] | None


def samples(data: str, target: str | None, classes: Classes = None) -> tuple[Dataset[Any], Classes]:
    """A dataset of (input, class) from a table.csv, a folder of class folders, or module:function; and the names of the
    classes, where they are known. For a test set, ``classes`` are those of the training data."""
    path = Path(data)
    if path.is_dir():
        files = sorted(file for file in path.glob("*/*") if file.suffix.lower() in _IMAGES)
        if not files:
            raise ValueError(f"{path} has no images: it must have a folder for each class, with images in it.")
        names, y = _classes([file.parent.name for file in files], classes)
        return Images(files, torch.from_numpy(y)), names
    if path.suffix != ".csv" and ":" not in data:
        raise ValueError(f"--data {data} must be a file table.csv, a folder of images, or module:function.")
    made = pandas.read_csv(path) if path.suffix == ".csv" else _imported(data, "--data")()
    if not is_frame(made):
        return dataset_of("train", made), classes
    if target is None or target not in made:
        columns = ", ".join(map(str, made.columns))
        raise ValueError(f"--target must be a column of {data}: one of {columns}. Got {target} instead.")
    if made.isna().to_numpy().any():
        raise ValueError(f"{data} has missing values. Fill them by a constant, not by a mean of the data.")
    names, y = _classes(made[target].astype(str), classes)
    return dataset_of("train", made.assign(**{target: y}), target), names


def _classes(values: Sequence[str], classes: Classes) -> tuple[Sequence[str], np.ndarray]:
    found = pandas.Categorical(values, categories=classes)
    if unknown := sorted({value for value, code in zip(values, found.codes, strict=True) if code < 0}):
        raise ValueError(f"The test data have classes that the training data have not: {', '.join(unknown)}.")
    return list(found.categories), found.codes.astype(np.int64)


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


def build(name: str | None, dataset: Dataset[Any], names: Classes) -> nn.Module:
    """``module:function`` is called without arguments; one of the lab's by name; a linear layer if none is named."""
    if name is not None and ":" in name:
        model = _imported(name, "--model")()
        if not isinstance(model, nn.Module):
            raise ValueError(f"--model {name} must return a torch.nn.Module. Got {type(model).__name__} instead.")
        return model
    if name is not None and name not in MODELS:
        raise ValueError(f"--model {name} must be module:function, or one of {', '.join(MODELS)}.")
    classes = len(names) if names is not None else 1 + max(int(y) for _, y in dataset)  # type: ignore[attr-defined]
    shape = torch.as_tensor(dataset[0][0]).shape
    return (
        nn.Sequential(nn.Flatten(), nn.Linear(shape.numel(), classes)) if name is None else MODELS[name](shape, classes)
    )


def losses(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of each sample."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


def train(
    out: Path, *, data: Path, epsilon: float, delta: float, rate: float, model: str | None = None,
    target: str | None = None, test: str | None = None, epochs: float | None = None, batch: Any = "auto",
    seed: int | None = None, ledger: Path | None = None, noise: Any = None,
    on_progress: OnProgress = ignore,
) -> dict[str, Any]:  # fmt: skip
    """Train, and write model.pt, run.ckpt and run.json into ``out``; what run.json holds.

    Epochs and batch that are not given are as `advise` has them; ``rate`` is of SGD with a bound of 1; without a seed
    randomness is the operating system's. The accuracy on ``test`` is published exactly.
    """
    dataset, classes = samples(str(data), target)
    torch.manual_seed(0 if seed is None else seed)
    network = build(model, dataset, classes).to(device.name())
    private = make_private(
        network, torch.optim.SGD(network.parameters(), lr=rate), dataset, epsilon=epsilon, delta=delta, epochs=epochs,
        batch=batch, seed=seed, noise=noise, ledger=None if ledger is None else Ledger(ledger),
    )  # fmt: skip
    plan = private.plan
    for each in private.batches():
        private.step(each.to(device.name()), losses)
        step = private.steps_taken
        on_progress(Progress("training", step, plan.steps, "steps", partial(said, plan, delta, step)))
    out.mkdir(parents=True, exist_ok=True)
    torch.save(network.state_dict(), out / "model.pt")
    private.save(out / "run.ckpt")
    written = {
        "data": str(data), "target": target, "model": model, "epsilon": private.epsilon(), "delta": delta,
        "steps": private.steps_taken, "classes": None if classes is None else list(classes),
        "test_accuracy": None if test is None else accuracy(network, samples(test, target, classes)[0]),
        "statement": private.statement(), "plan": plan.to_dict(),
    }  # fmt: skip
    private.close()
    (out / "run.json").write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")
    return written


@torch.no_grad()
def accuracy(model: nn.Module, test: Dataset[Any]) -> float:
    """Share of a test set that is classified as it should be."""
    model.eval()
    right = [int((model(x.to(device.name())).argmax(1).cpu() == y).sum()) for x, y in DataLoader(test, batch_size=512)]
    return sum(right) / len(test)  # type: ignore[arg-type]
