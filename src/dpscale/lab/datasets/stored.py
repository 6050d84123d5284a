"""A data set in the data folder: its manifest, what it holds, whether it is sound, and its arrays."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.files import replacing
from dpscale.lab.datasets import disk, official, packed
from dpscale.lab.datasets.catalogue import NOTHING_NEEDED, Entry, find
from dpscale.lab.datasets.disk import DataError, Folder, OnProgress, ignore
from dpscale.lab.datasets.official import Split

MANIFEST = "manifest.json"
FORMAT = 1
Manifest = Mapping[str, Any]


def is_there(name: str, folder: Folder = None) -> bool:
    """Whether the data folder has something of this data set; `inspect` says whether it is sound."""
    return any((disk.data_folder(folder) / name).glob("[!.]*"))


def require_there(name: str, folder: Folder = None) -> None:
    """Raise `DataError` unless the data folder has every file of this data set, or none is needed. None is read."""
    if name != NOTHING_NEEDED:
        entry, home, manifest = _opened(name, folder)
        for file in (file for file in manifest["files"] if not (home / file).is_file()):
            raise DataError(f"The file {home / file} is missing. {entry.repair}")


def checksums(name: str, folder: Folder = None) -> dict[str, Any] | None:
    """Of the files of a data set, as its manifest has them; None if there are none here, or no such files."""
    try:
        return dict(_opened(name, folder)[2]["files"])
    except DataError:  # whoever reads the data says what is wrong with them
        return None


def inspect(name: str, folder: Folder = None) -> dict[str, Any]:
    """Check every file of a data set; samples per split and class, files and source. A `DataError` if it is broken."""
    entry, home, manifest = _opened(name, folder)
    return {"name": name, "folder": str(home), "source": manifest["source"], **contents(entry, home, manifest)}


def contents(entry: Entry, home: Path, manifest: Manifest | None = None) -> dict[str, Any]:
    """What a folder holds, after every file was checked: against ``manifest`` if there is one, and for structure."""
    if entry.md5:
        found = {split: held[1] for split, held in _official(entry, home).items()}
        files = _official_files(entry)
    else:
        shards = _shards(entry, home, manifest)
        found = {split: packed.labels_of(held) for split, held in shards.items()}
        each = (shard for held in shards.values() for shard in held)
        files = {s.path.name: {"sha256": disk.checksum(s.path, "sha256"), "samples": len(s)} for s in each}
    splits = {}
    for split, labels in found.items():
        counts = np.bincount(labels, minlength=len(entry.classes)).tolist()
        splits[split] = {"samples": len(labels), "per_class": dict(zip(entry.classes, counts, strict=True))}
    return {"image": list(entry.shape), "splits": splits, "files": files}


def write_manifest(entry: Entry, home: Path, source: Mapping[str, Any]) -> None:
    """Check what a folder holds, and write it down with where that came from."""
    manifest = {"format": FORMAT, "name": entry.name, "source": dict(source), **contents(entry, home)}
    (home / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def read_manifest(entry: Entry, home: Path) -> Manifest:
    """The manifest; source and files alone if there is none and none is needed, as the checksums are known."""
    path = home / MANIFEST
    if entry.md5 and not path.exists():
        return {"source": {"how": "unknown: there is no manifest"}, "files": _official_files(entry)}
    try:
        found: Manifest = json.loads(path.read_text(encoding="utf-8"))
        if (found["format"], found["name"]) == (FORMAT, entry.name):
            return found
    except (FileNotFoundError, ValueError, KeyError):
        pass
    raise DataError(f"The file {path} is missing, or no manifest of {entry.name}, format {FORMAT}. {entry.repair}")


def _opened(name: str, folder: Folder) -> tuple[Entry, Path, Manifest]:
    root = disk.data_folder(folder)
    entry = find(name, root)
    if not is_there(name, root):
        more = "" if entry.sources else f" PATH has {entry.by_hand}."
        raise DataError(f"The data set {name} is not in the data folder {root}. {entry.repair}{more}")
    return entry, root / name, read_manifest(entry, root / name)


def _official_files(entry: Entry) -> dict[str, Any]:
    return {file: {"md5": md5} for file, md5 in entry.md5.items()}


def _official(entry: Entry, home: Path) -> dict[str, Split]:
    for file, md5 in entry.md5.items():
        disk.require_checksum(home / file, "md5", md5, entry.repair)
    return official.arrays(entry, home)


def _shards(entry: Entry, home: Path, manifest: Manifest | None) -> dict[str, list[packed.Shard]]:
    if manifest:
        for file, held in manifest["files"].items():
            disk.require_checksum(home / file, "sha256", held["sha256"], entry.repair)
        for path in (path for path in home.glob("*.npz") if path.name not in manifest["files"]):
            raise DataError(f"The shard {path} is not in {home / MANIFEST}. Remove it. {entry.repair}")
    return packed.read_shards(home, entry)


# -- arrays ----------------------------------------------------------------------------------------------------


def read(name: str, folder: Folder = None, on_progress: OnProgress = ignore) -> tuple[Split, Split, dict[str, Any]]:
    """Images, uint8 ``(N, channels, height, width)``, and int64 labels, to train and to measure on; and their origin.

    Official files and shards are checked against their checksums. Shards are decoded once and then kept decoded.
    """
    entry, home, manifest = _opened(name, folder)
    splits = _official(entry, home) if entry.md5 else {}
    for split, shards in ({} if entry.md5 else _shards(entry, home, manifest)).items():
        if split in entry.splits:
            images = _decoded(entry, _decoded_file(home, manifest, split), shards, on_progress)
            splits[split] = images, packed.labels_of(shards)
    train, test = ((splits[split][0], splits[split][1].astype(np.int64)) for split in entry.splits)
    return train, test, {"name": name, "source": manifest["source"], "checksums": manifest["files"]}


def check_decoded(
    name: str, folder: Folder = None, on_progress: OnProgress = ignore, on_note: Callable[[str], None] = ignore
) -> None:
    """Decode images that are kept decoded once more, and replace those that differ; ``on_note`` is told of them."""
    entry, home, manifest = _opened(name, folder)
    for split, shards in ({} if entry.md5 else _shards(entry, home, manifest)).items():
        if (path := _decoded_file(home, manifest, split)).exists():
            kept, chunks = _mapped(path), packed.decode(shards, entry, f"checking {split}", on_progress)
            if kept is None or not all(np.array_equal(chunk, kept[end - len(chunk) : end]) for end, chunk in chunks):
                on_note(f"The decoded images in {path} are not those of the shards. Decoding them anew.")
                _write(path, shards, entry, on_progress)


def _decoded_file(home: Path, manifest: Manifest, split: str) -> Path:
    """Where the decoded images of a split lie. The name changes with the shards, so that old ones are not taken."""
    key = hashlib.sha256(json.dumps([manifest["files"], manifest["image"]], sort_keys=True).encode()).hexdigest()
    return home / f"{split}-{key[:16]}.npy"


def _mapped(path: Path) -> Any:
    """The array in a file, copy on write: the file stays as it is. None if there is none, or it was cut."""
    try:
        return np.load(path, mmap_mode="c")
    except (FileNotFoundError, ValueError, EOFError):
        return None


def _decoded(entry: Entry, path: Path, shards: Sequence[packed.Shard], on_progress: OnProgress) -> np.ndarray:
    if (kept := _mapped(path)) is None and not all(os.access(each, os.W_OK) for each in path.parents[:2]):
        return np.concatenate([chunk for _, chunk in packed.decode(shards, entry, "decoding", on_progress)])
    if kept is None:
        with disk.locked(path.parents[1], entry.name):
            if _mapped(path) is None:  # and was not written by another process meanwhile
                _write(path, shards, entry, on_progress)
    return np.load(path, mmap_mode="c")  # type: ignore[no-any-return]


def _write(path: Path, shards: Sequence[packed.Shard], entry: Entry, on_progress: OnProgress) -> None:
    split, shape = path.name.partition("-")[0], (sum(map(len, shards)), *entry.shape)
    for pattern in (f"{split}-*.npy*", f".{split}-*.npy*"):  # of other shards, or left half-written
        for old in path.parent.glob(pattern):
            old.unlink()
    with replacing(path, durable=True) as temporary, temporary.open("wb") as stream:
        np.lib.format.write_array_header_1_0(stream, {"descr": "|u1", "fortran_order": False, "shape": shape})
        for _, chunk in packed.decode(shards, entry, f"decoding {split}", on_progress):
            stream.write(chunk.data)
