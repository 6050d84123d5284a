"""Where data lie on disk, and how files get there: whole or not at all."""

import hashlib
import logging
import os
import shlex
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VARIABLE = "DPSCALE_DATA"  # environment variable that names the data folder
Folder = str | os.PathLike[str] | None
log = logging.getLogger("dpscale")


class DataError(ValueError):
    """Data that are not there, or are not what they should be. The text names the file and what to do."""


def data_folder(folder: Folder = None) -> Path:
    """The folder that holds all data sets: ``folder``, else ``$DPSCALE_DATA``, else the user's cache folder."""
    return Path(folder or os.environ.get(VARIABLE) or _default()).expanduser()


def data_option(folder: Path | None) -> str:
    """The option that names a data folder, for a command that a message proposes; nothing for the default one."""
    return "" if folder in (None, _default()) else f" --data {shlex.quote(str(folder))}"


def _default() -> Path:
    import platformdirs  # here and below: `dpscale --help` reads this file, and needs neither

    return platformdirs.user_cache_path("dpscale", appauthor=False, opinion=False)


@contextmanager
def locked(folder: Path, name: str) -> Iterator[None]:
    """Only one process at a time writes what is called ``name`` in a folder; others wait for it, and say so."""
    from filelock import FileLock, Timeout

    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f".{name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        log.warning("dpscale: waiting for another process, which is at work on %s in %s.", name, folder)
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A folder that takes the place of ``target`` if the block ends well, and else vanishes. Call it under `locked`."""
    staging = target.with_name(f".{target.name}.tmp")
    shutil.rmtree(staging, ignore_errors=True)  # of a process that was killed
    staging.mkdir()
    try:
        yield staging
        if target.exists():
            shutil.rmtree(target)
        staging.rename(target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def checksum(path: Path, kind: str) -> str:
    """``"md5"`` or ``"sha256"`` of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def require_checksum(path: Path, kind: str, wanted: str, repair: str) -> None:
    """Raise `DataError` unless the file is there and has this checksum."""
    if not path.is_file():
        raise DataError(f"The file {path} is missing. {repair}")
    if (found := checksum(path, kind)) != wanted:
        raise DataError(f"The file {path} is not the right one: its {kind.upper()} is {found}, not {wanted}. {repair}")
