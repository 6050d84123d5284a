"""A data set in the data folder: its manifest, what it holds, whether it is sound, and its arrays."""

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.files import replacing
from dpscale.lab.datasets import formats, packed
from dpscale.lab.datasets.catalogue import NOTHING_NEEDED, Entry, find
from dpscale.lab.datasets.folder import (
    DataError,
    OnProgress,
    checksum,
    data_folder,
    explained,
    ignore,
    locked,
    require_checksum,
)

MANIFEST = "manifest.json"
FORMAT = 1

Folder = str | os.PathLike[str] | None
Split = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images uint8 ``(N, channels, height, width)`` and labels int64 of both splits, and where they came from."""

    train: Split
    test: Split
    provenance: Mapping[str, Any]


def read(name: str, folder: Folder = None, on_progress: OnProgress = ignore) -> Arrays:
    """The arrays of a data set. Shards are decoded once and then kept decoded.

    Official files and shards are checked against their checksums, decoded images by their size alone; `check_decoded`
    looks at their checksum.
    """
    entry, home, manifest = _opened(name, folder)
    splits = _official(entry, home) if entry.md5 else {}
    for split, shards in ({} if entry.md5 else _shards(entry, home, manifest)).items():
        if split in entry.splits:
            images = _decoded(entry, _decoded_file(home, manifest, split), split, shards, on_progress)
            splits[split] = images, packed.labels_of(shards)
    train, test = ((splits[split][0], splits[split][1].astype(np.int64)) for split in entry.splits)
    return Arrays(train, test, {"name": name, "source": manifest["source"], "checksums": manifest["files"]})


def is_there(name: str, folder: Folder = None) -> bool:
    """Whether the data folder has something of this data set; `inspect` says whether it is sound."""
    return any((data_folder(folder) / name).glob("[!.]*"))


def require_there(name: str, folder: Folder = None) -> None:
    """Raise `DataError` unless the data folder has every file of this data set, or none is needed. None is read."""
    if name != NOTHING_NEEDED:
        entry, home, manifest = _opened(name, folder)
        for file in manifest["files"]:
            if not (home / file).is_file():
                raise DataError(f"The file {home / file} is missing. {entry.repair}")


def inspect(name: str, folder: Folder = None, on_progress: OnProgress = ignore) -> dict[str, Any]:
    """Check every file of a data set; samples per split and class, files and source. A `DataError` if it is broken.

    What was decoded from them is `check_decoded`'s.
    """
    entry, home, manifest = _opened(name, folder)
    found = contents(entry, home, manifest, on_progress)
    return {"name": name, "folder": str(home), "source": manifest["source"], **found}


def described(name: str, folder: Folder = None) -> dict[str, Any]:
    """What the manifest says, in the form of `inspect`; nothing is checked."""
    _, home, manifest = _opened(name, folder)
    return {"name": name, "folder": str(home), **{key: manifest[key] for key in ("source", "image", "splits", "files")}}


def contents(
    entry: Entry, home: Path, manifest: Mapping[str, Any] | None, on_progress: OnProgress = ignore
) -> dict[str, Any]:
    """What a folder holds, after every file was checked: against ``manifest`` if there is one, and for structure."""
    if entry.md5:
        labels, files = {split: held[1] for split, held in _official(entry, home).items()}, _official_files(entry)
    else:
        shards, labels, files = _shards(entry, home, manifest), {}, {}
        for split, held in shards.items():
            packed.check_split(held, split, entry, on_progress)
            labels[split] = packed.labels_of(held)
            for shard in held:
                files[shard.path.name] = {"sha256": checksum(shard.path, "sha256"), "samples": len(shard)}
    splits = {}
    for split, found in labels.items():
        counts = np.bincount(found, minlength=len(entry.classes)).tolist()
        splits[split] = {"samples": len(found), "per_class": dict(zip(entry.classes, counts, strict=True))}
    return {"image": list(entry.shape), "splits": splits, "files": files}


def write_manifest(entry: Entry, home: Path, source: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Write down what a folder holds, as `contents` found it, and where that came from."""
    manifest = {"format": FORMAT, "name": entry.name, "source": dict(source), **held}
    (home / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(entry: Entry, home: Path) -> dict[str, Any]:
    """The manifest; source and files alone if there is none and none is needed, as the checksums are known."""
    path = home / MANIFEST
    if entry.md5 and not path.exists():
        return {"source": {"how": "unknown: there is no manifest"}, "files": _official_files(entry)}
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if (found["format"], found["name"]) == (FORMAT, entry.name):
            return found
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        pass
    raise DataError(f"The file {path} is missing, or no manifest of {entry.name}, format {FORMAT}. {entry.repair}")


def _opened(name: str, folder: Folder) -> tuple[Entry, Path, dict[str, Any]]:
    root = data_folder(folder)
    entry = find(name, root)
    if not is_there(name, root):
        more = "" if entry.sources else f" PATH has {entry.by_hand}."
        raise DataError(f"The data set {name} is not in the data folder {root}. {entry.repair}{more}")
    return entry, root / name, read_manifest(entry, root / name)


def _official_files(entry: Entry) -> dict[str, Any]:
    return {file: {"md5": md5} for file, md5 in entry.md5.items()}


def _official(entry: Entry, home: Path) -> dict[str, Split]:
    """Images and labels of each split; sizes and labels are right if the checksums are."""
    for file, md5 in entry.md5.items():
        require_checksum(home / file, "md5", md5, entry.repair)
    files = [home / file for file in entry.md5]
    if entry.layout == "idx":
        train, train_labels, test, test_labels = map(formats.read_idx, files)
        return {"train": (train[:, None], train_labels), "test": (test[:, None], test_labels)}
    *trained, tested = (formats.read_batch(file, entry.shape) for file in files)
    images, labels = (np.concatenate(part) for part in zip(*trained, strict=True))
    return {"train": (images, labels), "test": tested}


def _shards(entry: Entry, home: Path, manifest: Mapping[str, Any] | None) -> dict[str, list[packed.Shard]]:
    for file, held in (manifest or {"files": {}})["files"].items():
        require_checksum(home / file, "sha256", held["sha256"], entry.repair)
    found = packed.read_shards(home, entry)
    for shard in (shard for held in found.values() for shard in held):
        if manifest and shard.path.name not in manifest["files"]:
            raise DataError(f"The shard {shard.path} is not in {home / MANIFEST}. Remove it. {entry.repair}")
    return found


# -- decoded images --------------------------------------------------------------------------------------------


def check_decoded(
    name: str, folder: Folder = None, on_progress: OnProgress = ignore, on_note: Callable[[str], None] = ignore
) -> None:
    """Compare decoded images with the checksum taken when they were written; others are decoded anew.

    ``on_note`` is told of each file that is. Images that were not decoded yet are left so.
    """
    entry, home, manifest = _opened(name, folder)
    for split in () if entry.md5 else entry.splits:
        path = _decoded_file(home, manifest, split)
        if path.is_file() and _seal_of(path).get("sha256") != checksum(path, "sha256"):
            on_note(f"The decoded images in {path} are not those that were written. Decoding them anew.")
            path.unlink()
            _decoded(entry, path, split, _shards(entry, home, manifest)[split], on_progress)


def _decoded_file(home: Path, manifest: Mapping[str, Any], split: str) -> Path:
    """Where the decoded images of a split lie. The name changes with the shards, so that old ones are not taken."""
    key = hashlib.sha256(json.dumps([manifest["files"], manifest["image"]], sort_keys=True).encode()).hexdigest()
    return home / f"{split}-{key[:16]}.npy"


def _decoded(entry: Entry, path: Path, split: str, shards: list[packed.Shard], on_progress: OnProgress) -> np.ndarray:
    chunks = packed.decode(shards, entry, f"decoding {split}", on_progress)
    try:
        if not _as_written(path):
            with locked(path.parent.parent, entry.name):
                if not _as_written(path):  # by another process, meanwhile
                    _write(path, split, (sum(map(len, shards)), *entry.shape), chunks)
    except PermissionError:  # a folder that others may only read
        return np.concatenate(list(chunks))
    mapped: np.ndarray = np.load(path, mmap_mode="c")  # copy on write: the file stays as it is
    return mapped


def _write(path: Path, split: str, shape: tuple[int, ...], chunks: Iterable[np.ndarray]) -> None:
    for pattern in (f"{split}-*.npy*", f".{split}-*.npy*"):  # of other shards, or left half-written
        for old in path.parent.glob(pattern):
            old.unlink()
    with explained(path), replacing(path, durable=True) as temporary, temporary.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for chunk in chunks:
            stream.write(chunk.data)
    seal = {"sha256": checksum(path, "sha256"), "bytes": path.stat().st_size}
    path.with_name(f"{path.name}.json").write_text(json.dumps(seal), encoding="utf-8")


def _as_written(path: Path) -> bool:
    """Whether decoded images are there and no file that was cut; `check_decoded` looks at their checksum."""
    return path.is_file() and path.stat().st_size == _seal_of(path).get("bytes")


def _seal_of(path: Path) -> dict[str, Any]:
    """Checksum and size of decoded images when they were written."""
    try:
        return dict(json.loads(path.with_name(f"{path.name}.json").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}
