"""Data that the experiments train on, as tensors that stay on one device."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dpscale.checks import require, require_count, require_probability
from dpscale.lab.datasets import stored
from dpscale.lab.datasets.catalogue import NOTHING_NEEDED, find
from dpscale.lab.datasets.disk import Folder
from dpscale.lab.progress import OnProgress, ignore

_SPLIT_SEED = 0  # which images are test images: one fixed choice, the same in every experiment
_HOLD_OUT_SEED = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Data:
    """A training set and a set to measure on."""

    name: str
    train_images: Tensor  # (N, channels, height, width): uint8, 0 to 255; of the digits float32 in [0, 1]
    train_labels: Tensor  # int64, from 0 to classes - 1
    test_images: Tensor  # images may be mapped from a file
    test_labels: Tensor
    classes: int
    provenance: Mapping[str, Any] = field(default_factory=dict)  # name, source, checksums; train_size of a part

    @property
    def size(self) -> int:
        """Number of training samples."""
        return len(self.train_labels)

    def to(self, device: torch.device | str) -> "Data":
        """The same data on another device."""
        moved: dict[str, Any] = {name: part.to(device) for name, part in vars(self).items() if isinstance(part, Tensor)}
        return replace(self, **moved)


def load(name: str, folder: Folder = None, *, train_size: int | None = None, on_progress: OnProgress = ignore) -> Data:
    """A data set by name, checked against its checksums; or only its first ``train_size`` training samples.

    The data folder is ``folder``, else ``$DPSCALE_DATA``, else the user's cache folder. A `DataError` names the file,
    what is wrong with it, and the command that mends it.
    """
    if name == NOTHING_NEEDED:
        data = digits()
    else:
        train, test, provenance = stored.read(name, folder, on_progress)
        train_images, train_labels, test_images, test_labels = map(torch.from_numpy, (*train, *test))
        data = Data(
            name=name, train_images=train_images, train_labels=train_labels, test_images=test_images,
            test_labels=test_labels, classes=len(find(name).classes), provenance=provenance,
        )  # fmt: skip
    if train_size is None:
        return data
    require_count("load", "train_size", train_size)
    action = f"{data.name} has so many training samples."
    require(train_size <= data.size, "load", "train_size", f"an integer <= {data.size}", train_size, action)
    return replace(
        data, train_images=data.train_images[:train_size], train_labels=data.train_labels[:train_size],
        provenance={**data.provenance, "train_size": train_size},
    )  # fmt: skip


def digits() -> Data:
    """scikit-learn's handwritten digits: 1797 images of 8×8, in that package, so nothing is downloaded.

    The split is stratified and fixed: 1437 images to train on, 360 to test on. The preset's model and settings were
    chosen on 360 images of a first split; those are training images here, so the test images have chosen nothing.
    """
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images_NCHW = torch.from_numpy((images / 16.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))
    others, chosen_on = _stratified(labels, 360 / len(labels), _SPLIT_SEED)
    rest, test = _stratified(labels[others], 360 / len(others), _SPLIT_SEED)
    train, test = torch.cat([others[rest], chosen_on]).sort().values, others[test]
    return Data(
        name="digits", classes=10, train_images=images_NCHW[train].contiguous(), train_labels=targets[train],
        test_images=images_NCHW[test].contiguous(), test_labels=targets[test],
        provenance={"name": "digits", "source": {"how": "in scikit-learn"}, "checksums": {}},
    )  # fmt: skip


def hold_out(data: Data, fraction: float, split: int = 0) -> Data:
    """Split the *training* data once more: the part held out takes the place of the test data.

    Learning rates are searched on this, so that the test images choose nothing. They are not in what is returned.
    ``split`` numbers different splits.
    """
    require_probability("hold_out", "fraction", fraction, action="0.2 holds out a fifth.")
    labels = data.train_labels.cpu().numpy()
    size, counts = round(fraction * len(labels)), np.unique(labels, return_counts=True)[1]
    ok = len(counts) <= min(size, len(labels) - size) and counts.min() > 1
    action = "Take more samples (--train-size), or another part of them (held_out=0.3)."
    must = "such that both parts have samples of every class"
    require(ok, "hold_out", "fraction", must, f"{fraction:g} of {len(labels)}", action)
    train, held = _stratified(labels, fraction, _HOLD_OUT_SEED + split)
    return replace(
        data, name=f"{data.name}, {fraction:g} of the training data held out",
        train_images=data.train_images[train].contiguous(), train_labels=data.train_labels[train],
        test_images=data.train_images[held].contiguous(), test_labels=data.train_labels[held],
    )  # fmt: skip


def _stratified(labels: np.ndarray, fraction: float, seed: int) -> tuple[Tensor, Tensor]:
    # scikit-learn's own splitter, so that anybody can repeat the split with one familiar call.
    from sklearn.model_selection import train_test_split

    size = round(fraction * len(labels))
    parts = train_test_split(np.arange(len(labels)), test_size=size, random_state=seed, stratify=labels)
    train, rest = (torch.from_numpy(np.sort(part)) for part in parts)
    return train, rest
