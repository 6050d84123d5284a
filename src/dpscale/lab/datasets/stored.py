"""A data set in the data folder: its manifest, what it holds, whether it is sound, and its arrays."""

import hashlib
import io
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.lab.datasets import formats, packed
from dpscale.lab.datasets.catalogue import NOTHING_NEEDED, Files, Shards, find
from dpscale.lab.datasets.folder import (
    DataError,
    OnProgress,
    Progress,
    checksum,
    data_folder,
    ignore,
    locked,
    require_checksum,
    whole,
)
from dpscale.lab.datasets.packed import Shard

MANIFEST = "manifest.json"
FORMAT = 1
_DESCRIBED: tuple[str, ...] = ("source", "image", "splits", "files")
_UNKNOWN = {"how": "unknown: there is no manifest"}


@dataclass(frozen=True, eq=False)
class Arrays:
    """Images uint8 ``(N, channels, height, width)`` and labels int64 of both splits, and where they came from."""

    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    provenance: Mapping[str, Any]


def read(name: str, folder: str | os.PathLike[str] | None = None, on_progress: OnProgress = ignore) -> Arrays:
    """The arrays of a data set. Shards are decoded once and then kept decoded.

    Official files and shards are checked against their checksums; decoded images by size and time of the file, unless
    these have changed. `check_decoded` compares all of them.
    """
    entry, home = _home(name, folder)
    manifest = read_manifest(entry, home)
    if isinstance(entry, Files):
        splits = _files(entry, home)
    else:
        shards = _shards(entry, home, manifest)
        splits = {
            split: (_decoded(entry, home, manifest, split, shards[split], on_progress), _labels(shards[split]))
            for split in entry.splits
        }
    for split, (_, labels) in splits.items():
        packed.check_labels(labels, entry.classes, f"The {split} split in {home}", entry.repair)
    checksums = (
        {file: {"md5": md5} for file, md5 in entry.md5.items()} if isinstance(entry, Files) else manifest["files"]
    )
    provenance = {"name": name, "source": manifest.get("source", _UNKNOWN), "checksums": checksums}
    return Arrays(_typed(splits["train"]), _typed(splits[entry.test]), provenance)


def is_there(name: str, folder: str | os.PathLike[str] | None = None) -> bool:
    """Whether the data folder has something of this data set; `inspect` says whether it is sound."""
    home = data_folder(folder) / name
    try:
        return home.is_dir() and any(not path.name.startswith(".") for path in home.iterdir())
    except PermissionError:  # there, but not for everyone
        return True


def require_there(name: str, folder: str | os.PathLike[str] | None = None) -> None:
    """Raise `DataError` unless the data folder has every file of this data set, or none is needed. None is read."""
    if name == NOTHING_NEEDED:
        return
    entry, home = _home(name, folder)
    for file in entry.md5 if isinstance(entry, Files) else read_manifest(entry, home)["files"]:
        if not (home / file).is_file():
            raise DataError(f"The file {home / file} is missing. Run '{entry.repair}'.")


def inspect(
    name: str, folder: str | os.PathLike[str] | None = None, on_progress: OnProgress = ignore
) -> dict[str, Any]:
    """Check every file of a data set; samples per split and class, files and source. A `DataError` if it is broken.

    What was decoded from them is `check_decoded`'s.
    """
    entry, home = _home(name, folder)
    manifest = read_manifest(entry, home)
    content = contents(entry, home, manifest, on_progress)
    return {"name": name, "folder": str(home), "source": manifest.get("source", _UNKNOWN), **content}


def described(name: str, folder: str | os.PathLike[str] | None = None) -> dict[str, Any]:
    """What the manifest says, in the form of `inspect`; nothing is checked."""
    entry, home = _home(name, folder)
    manifest = read_manifest(entry, home)
    return {"name": name, "folder": str(home), **{key: manifest[key] for key in _DESCRIBED}}


def contents(
    entry: Files | Shards, home: Path, manifest: Mapping[str, Any] | None, on_progress: OnProgress = ignore
) -> dict[str, Any]:
    """What a folder holds, after every file was checked: against ``manifest`` if there is one, and for structure."""
    if isinstance(entry, Files):
        labels = {split: labels for split, (_, labels) in _files(entry, home).items()}
        files: dict[str, Any] = {file: {"md5": md5} for file, md5 in entry.md5.items()}
    else:
        shards, labels, files = _shards(entry, home, manifest), {}, {}
        total, done = sum(len(shard) for held in shards.values() for shard in held), 0
        for split, held in shards.items():
            packed.check_numbers(held, split, entry)
            labels[split] = _labels(held)
            for shard in held:
                packed.check_sizes(shard, entry)
                files[shard.path.name] = {"sha256": checksum(shard.path, "sha256"), "samples": len(shard)}
                done += len(shard)
                on_progress(Progress("checking", done, total, "images"))
    splits = {}
    for split, found in labels.items():
        counts = packed.check_labels(found, entry.classes, f"The {split} split in {home}", entry.repair)
        splits[split] = {"samples": len(found), "per_class": dict(zip(entry.classes, counts, strict=True))}
    return {"image": list(entry.shape), "splits": splits, "files": files}


def write_manifest(entry: Files | Shards, home: Path, source: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Write down what a folder holds, as `contents` found it, and where that came from."""
    told = {"format": FORMAT, "name": entry.name, "source": dict(source), **held}
    with whole(home / MANIFEST) as stream:
        stream.write((json.dumps(told, indent=1, ensure_ascii=False) + "\n").encode())


def read_manifest(entry: Files | Shards, home: Path) -> dict[str, Any]:
    """The manifest; empty if there is none and none is needed, as the checksums are known."""
    path = home / MANIFEST
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if _is_manifest(found, entry):
            return dict(found)
        problem = f"is not a manifest of {entry.name}, format {FORMAT}"
    except FileNotFoundError:
        if isinstance(entry, Files):
            return {}
        problem = "is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        problem = "is not JSON, or lacks something that a manifest has"
    raise DataError(f"The file {path} {problem}. Run '{entry.repair}'.")


def _is_manifest(found: Any, entry: Files | Shards) -> bool:
    kind = "md5" if isinstance(entry, Files) else "sha256"
    return (
        found["format"] == FORMAT
        and found["name"] == entry.name
        and found["image"] == list(entry.shape)
        and isinstance(found["source"], dict)
        and all(isinstance(held["samples"], int) for held in found["splits"].values())
        and all(isinstance(held[kind], str) for held in found["files"].values())
    )


def _home(name: str, folder: str | os.PathLike[str] | None) -> tuple[Files | Shards, Path]:
    root = data_folder(folder)
    entry, home = find(name, root), root / name
    if not is_there(name, root):
        more = "" if entry.sources else f", where PATH has {entry.by_hand}"
        raise DataError(f"The data set {name} is not in the data folder {root}. Run '{entry.repair}'{more}.")
    return entry, home


def _files(entry: Files, home: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    for file, md5 in entry.md5.items():
        require_checksum(home / file, "md5", md5, entry.repair)
    files = [home / file for file in entry.md5]
    if entry.layout == "idx":
        read = [formats.read_idx(file) for file in files]
        splits = {"train": (read[0], read[1]), "test": (read[2], read[3])}
    else:
        batches = [formats.read_batch(file, entry.shape) for file in files]
        images, labels = (np.concatenate(part) for part in zip(*batches[:-1], strict=True))
        splits = {"train": (images, labels), "test": batches[-1]}
    for split, (images, labels) in splits.items():
        wanted = (entry.counts[split], *entry.shape)
        if images.size != np.prod(wanted) or len(images) != wanted[0] or labels.shape != (len(images),):
            raise DataError(
                f"The {split} split in {home} has images {images.shape} and labels {labels.shape}, not {wanted}. "
                f"Run '{entry.repair}'."
            )
        splits[split] = images.reshape(wanted), labels
    return splits


def _shards(entry: Shards, home: Path, manifest: Mapping[str, Any] | None) -> dict[str, list[Shard]]:
    if manifest:
        for file, held in manifest["files"].items():
            require_checksum(home / file, "sha256", held["sha256"], entry.repair)
    found = packed.shard_files(home, entry)
    for file in (file for files in found.values() for file in files):
        if manifest and file.name not in manifest["files"]:
            raise DataError(f"The shard {file} is not in {home / MANIFEST}. Remove it, or run '{entry.repair}'.")
    return {split: [packed.read_shard(file, entry) for file in files] for split, files in found.items()}


def _labels(shards: Sequence[Shard]) -> np.ndarray:
    return np.concatenate([shard.label for shard in shards])


def _typed(split: tuple[np.ndarray, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    return split[0], split[1].astype(np.int64)


# -- decoded images --------------------------------------------------------------------------------------------


def decoded_file(home: Path, manifest: Mapping[str, Any], split: str) -> Path:
    """Where the decoded images of a split lie. The name changes with the shards, so that old ones are not taken."""
    key = hashlib.sha256(json.dumps([manifest["files"], manifest["image"]], sort_keys=True).encode()).hexdigest()
    return home / f"{split}-{key[:16]}.npy"


def check_decoded(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    on_progress: OnProgress = ignore,
    on_note: Callable[[str], None] = ignore,
) -> None:
    """Compare decoded images with the checksum taken when they were written; others are decoded anew.

    ``on_note`` is told of each file that is. Images that were not decoded yet are left so. What a process left that was
    killed while it decoded is removed.
    """
    entry, home = _home(name, folder)
    if isinstance(entry, Files):
        return
    manifest = read_manifest(entry, home)
    if _leftovers(home):
        with suppress(PermissionError), locked(home.parent, name) as alone:
            _clear(home, alone)
    for split in entry.splits:
        path = decoded_file(home, manifest, split)
        known = _sealed(path).get("sha256")
        if not path.is_file() or known == checksum(path, "sha256"):
            continue
        wrong = "have no checksum" if known is None else "are not those that were written: their checksum is another"
        on_note(f"The decoded images in {path} {wrong}. Decoding them anew.")
        try:
            _seal(path).unlink(missing_ok=True)  # without it they are not taken
        except PermissionError:
            raise DataError(f"The decoded images in {path} {wrong}, and may not be replaced. Delete it.") from None
        _decoded(entry, home, manifest, split, _shards(entry, home, manifest)[split], on_progress)


def _decoded(
    entry: Shards, home: Path, manifest: Mapping[str, Any], split: str, shards: Sequence[Shard], on_progress: OnProgress
) -> np.ndarray:
    path, shape = decoded_file(home, manifest, split), (sum(map(len, shards)), *entry.shape)
    if (found := _mapped(path, shape)) is not None:
        return found
    try:
        with locked(home.parent, entry.name) as alone:
            if (found := _mapped(path, shape)) is not None:  # another process has decoded it meanwhile
                return found
            _clear(home, alone)
            for old in home.glob(f"{split}-*.npy*"):  # with what is known of it
                old.unlink()
            header, digest = io.BytesIO(), hashlib.sha256()
            np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": shape})
            with whole(path) as stream:
                chunks = packed.decode(shards, entry, f"decoding {split}", on_progress)
                for part in itertools.chain([header.getbuffer()], (chunk.data for chunk in chunks)):
                    digest.update(part)
                    stream.write(part)
            _write_seal(path, digest.hexdigest())
    except PermissionError:  # a folder that others may only read
        return np.concatenate(list(packed.decode(shards, entry, f"decoding {split}", on_progress)))
    found = _mapped(path, shape)
    assert found is not None, "it was just written"
    return found


def _leftovers(home: Path) -> list[Path]:
    """Decoded images that were never finished, or are being written now."""
    # What is beside them, .npy.json, is written without the lock too, and small.
    return [path for path in home.glob(".*.npy.*.tmp") if ".npy.json." not in path.name]


def _clear(home: Path, alone: bool) -> None:
    """Remove `_leftovers`, if `locked` says that nobody else can be writing them."""
    for path in _leftovers(home) if alone else ():
        with suppress(OSError):
            path.unlink()


def _mapped(path: Path, shape: tuple[int, ...]) -> np.ndarray | None:
    # Copy on write: the array may be written to, the file stays as it is.
    if not _as_written(path):
        return None
    try:
        found: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None
    return found if found.shape == shape and found.dtype == np.uint8 else None


def _as_written(path: Path) -> bool:
    """Whether decoded images are those that were written: by size and time, or, if another time, by checksum."""
    seal = _sealed(path)
    try:
        held = path.stat()
    except OSError:
        return False
    if seal.get("bytes") != held.st_size:
        return False
    if seal.get("mtime_ns") == held.st_mtime_ns:
        return True
    if seal.get("sha256") != checksum(path, "sha256"):
        return False
    with suppress(OSError):  # a copy, perhaps in a folder that may only be read
        _write_seal(path, seal["sha256"])
    return True


def _seal(path: Path) -> Path:
    """The file beside decoded images that says what was written: checksum, size and time."""
    return path.with_name(f"{path.name}.json")


def _sealed(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_seal(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_seal(path: Path, sha256: str) -> None:
    held = path.stat()
    seal = {"sha256": sha256, "bytes": held.st_size, "mtime_ns": held.st_mtime_ns}
    with whole(_seal(path)) as stream:
        stream.write(f"{json.dumps(seal)}\n".encode())
