"""A data set in the data folder: its arrays, and a manifest with their checksums, what they hold and their origin."""

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.lab.datasets import disk, fetching, formats
from dpscale.lab.datasets.catalogue import NOTHING_NEEDED, Entry, find
from dpscale.lab.datasets.disk import DataError, Folder
from dpscale.lab.datasets.formats import Split
from dpscale.lab.progress import OnProgress, Progress, ignore

MANIFEST = "manifest.json"
FORMAT = 2


def is_there(name: str, folder: Folder = None) -> bool:
    """Whether the data folder has something of this data set; `inspect` says whether it is sound."""
    return any((disk.data_folder(folder) / name).glob("[!.]*"))


def require_there(name: str, folder: Folder = None) -> None:
    """Raise `DataError` unless the data folder has every file of this data set, or none is needed. None is read."""
    if name != NOTHING_NEEDED:
        entry, home, manifest = _opened(name, folder)
        for file in (file for file in manifest["arrays"] if not (home / file).is_file()):
            raise DataError(f"The file {home / file} is missing. {entry.repair}")


def checksums(name: str, folder: Folder = None) -> dict[str, Any] | None:
    """Of the files that a data set came as; None if there is none here, or it needs none."""
    try:
        return dict(_opened(name, folder)[2]["files"])
    except DataError:  # whoever reads the data says what is wrong with them
        return None


def inspect(name: str, folder: Folder = None, on_progress: OnProgress = ignore) -> dict[str, Any]:
    """Check every file of a data set; its manifest, and where it is. A `DataError` if it is broken."""
    entry, home, manifest = _opened(name, folder)
    for number, (file, sha256) in enumerate(manifest["arrays"].items(), start=1):
        disk.require_checksum(home / file, "sha256", sha256, entry.repair)
        on_progress(Progress("checking", number, len(manifest["arrays"]), "files"))
    return {**manifest, "folder": str(home)}


def read(name: str, folder: Folder = None, on_progress: OnProgress = ignore) -> tuple[Split, Split, dict[str, Any]]:
    """Images, uint8 ``(N, channels, height, width)``, and int64 labels, to train and to measure on; and their origin.

    Files are checked, and images mapped into memory, copy on write.
    """
    found = inspect(name, folder, on_progress)
    home, splits = Path(found["folder"]), []
    for split in find(name).splits:
        images = np.load(home / f"{split}-images.npy", mmap_mode="c")
        splits.append((images, np.load(home / f"{split}-labels.npy").astype(np.int64)))
    train, test = splits
    return train, test, {"name": name, "source": found["source"], "checksums": found["files"]}


def _opened(name: str, folder: Folder) -> tuple[Entry, Path, dict[str, Any]]:
    root = disk.data_folder(folder)
    entry, home = find(name, root), root / name
    if not is_there(name, root):
        more = "" if entry.sources else f" PATH has {entry.by_hand}."
        raise DataError(f"The data set {name} is not in the data folder {root}. {entry.repair}{more}")
    with suppress(FileNotFoundError, ValueError, KeyError):
        found: dict[str, Any] = json.loads((home / MANIFEST).read_text(encoding="utf-8"))
        if (found["format"], found["name"]) == (FORMAT, name):
            return entry, home, found
    raise DataError(f"The file {home / MANIFEST} is missing, or not of {name}, format {FORMAT}. {entry.repair}")


# -- how it gets there -----------------------------------------------------------------------------------------


def get(
    name: str, folder: Folder = None, *, on_progress: OnProgress = ignore, on_note: Callable[[str], None] = ignore
) -> dict[str, Any]:
    """Fetch a data set, unless it is there and sound; what `inspect` says of it.

    Its sources are tried in turn; ``on_note`` is told why one did not do and which comes next.
    """
    root = disk.data_folder(folder)
    entry, by_hand = find(name, root), f"dpscale data import {name} PATH{disk.data_option(root)}"
    if not entry.sources:
        raise DataError(f"{name} cannot be fetched without a login. Download {entry.by_hand}; then run '{by_hand}'.")
    try:  # before the lock, which a folder that may only be read does not have
        if is_there(name, root):
            return {**inspect(name, root), "fetched": False}
    except DataError as error:
        on_note(f"{error} Fetching it anew.")
    with disk.locked(root, name):
        with suppress(DataError):  # another process has fetched it meanwhile
            return {**inspect(name, root), "fetched": False}
        for source, following in zip(entry.sources, (*entry.sources[1:], None), strict=True):
            try:
                with fetching.fetched(entry, source, root / "downloads" / name, on_progress) as path:
                    _keep(entry, path, root, {"how": "fetched", "from": str(source)}, on_progress)
                return {**inspect(name, root), "fetched": True}
            except (fetching.DownloadError, DataError) as error:
                on_note(f"{error} Trying {following}." if following else str(error))
    raise DataError(f"No source gave {name}. Try again later; or download {entry.by_hand}, and run '{by_hand}'.")


def take(name: str, path: Path, folder: Folder = None, *, on_progress: OnProgress = ignore) -> dict[str, Any]:
    """Import a data set from an archive or a folder; what `inspect` says of it. Replaces one that is there."""
    root, path = disk.data_folder(folder), path.expanduser()
    entry = find(name, root)
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    with disk.locked(root, name):
        _keep(entry, path, root, {"how": "imported", "from": path.resolve().name}, on_progress)
    return inspect(name, root)


def _keep(entry: Entry, path: Path, root: Path, source: Mapping[str, str], on_progress: OnProgress) -> None:
    """Write what an archive or a folder holds as arrays, with their manifest: all of it, or nothing."""
    held = formats.found_in(path, entry, on_progress)
    splits, arrays = {}, {}
    with disk.staged(root / entry.name) as staging:
        for split, (images, labels) in held.splits.items():
            counts = np.bincount(labels, minlength=len(entry.classes)).tolist()
            splits[split] = {"samples": len(labels), "per_class": dict(zip(entry.classes, counts, strict=True))}
            for name, array in (("images", images), ("labels", labels)):
                file = f"{split}-{name}.npy"
                np.save(staging / file, array)
                arrays[file] = disk.checksum(staging / file, "sha256")
        manifest = {
            "format": FORMAT, "name": entry.name, "source": {**source, "how": f"{source['how']}: {held.kind}"},
            "image": list(entry.shape), "splits": splits, "files": held.files, "arrays": arrays,
        }  # fmt: skip
        (staging / MANIFEST).write_text(json.dumps(manifest, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
