"""Where data lie on disk, and how files get there: whole or not at all."""

import errno
import hashlib
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscale.lab.files import replacing

VARIABLE = "DPSCALE_DATA"
"""Environment variable that names the data folder."""

_FULL = (errno.ENOSPC, errno.EDQUOT)
_FORBIDDEN = (errno.EACCES, errno.EROFS, errno.EPERM)


class DataError(ValueError):
    """Data that are not there, or are not what they should be. The text names the file and what to do."""


@dataclass(frozen=True)
class Progress:
    """How far something is that takes a while; ``total`` is None if nobody knows."""

    what: str
    done: int
    total: int | None
    unit: str = "bytes"


OnProgress = Callable[[Progress], None]


def ignore(_: object) -> None:
    """What is told of progress when nobody listens."""


def data_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder that holds all data sets: ``folder``, else ``$DPSCALE_DATA``, else the user's cache folder."""
    if folder is not None:
        return Path(folder).expanduser()
    if named := os.environ.get(VARIABLE):
        return Path(named).expanduser()
    return _cache() / "dpscale"


def told_folder(folder: Path | None) -> str:
    """The option that names a data folder, for a command that a message proposes; nothing for the default one.

    A folder from the environment is named too: ``--data`` of an experiment puts it there.
    """
    return "" if folder in (None, _cache() / "dpscale") else f" --data {shlex.quote(str(folder))}"


def _cache() -> Path:
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache")


@contextmanager
def locked(root: Path, name: str) -> Iterator[None]:
    """Only one process at a time fetches, imports or decodes a data set; others wait for it."""
    with room(root):
        root.mkdir(parents=True, exist_ok=True)
        stream = (root / f".{name}.lock").open("ab")
    with stream:
        with suppress(ImportError):  # Windows has no such lock: there two at a time only repeat each other's work
            import fcntl

            fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``target`` if the block ends well, and else vanishes.

    Call it under `locked`: what an earlier process left behind is removed first.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    for stale in target.parent.glob(f".{target.name}.*.tmp"):
        shutil.rmtree(stale, ignore_errors=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    replaced = staging.with_suffix(".old.tmp")
    try:
        yield staging
        staging.chmod(0o755)
        if target.exists():
            os.replace(target, replaced)
        os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def whole(path: Path) -> Iterator[Any]:
    """A binary stream whose bytes become the file ``path`` if the block ends well, and else nothing."""
    with room(path), replacing(path) as temporary, temporary.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def room(path: Path) -> Iterator[None]:
    """Says in words that a disk is full or a folder cannot be written to."""
    try:
        yield
    except (DiskFull, NotWritable):
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(path) from error
        if error.errno in _FORBIDDEN and Path(error.filename or path).is_relative_to(path.parent):
            raise NotWritable(Path(error.filename or path), error.strerror) from error
        raise


class DiskFull(OSError):
    """No room left where data are written."""

    def __init__(self, path: Path):
        super().__init__(
            f"The disk that {path} is on is full. No incomplete file was left that looks whole. "
            f"Free some room, or choose another folder with --data or ${VARIABLE}."
        )


class NotWritable(PermissionError):
    """A folder or file that may not be written."""

    def __init__(self, path: Path, reason: str | None):
        super().__init__(f"Cannot write {path}: {reason}. Choose another folder with --data or ${VARIABLE}.")


def checksum(path: Path, kind: str) -> str:
    """``"md5"`` or ``"sha256"`` of a file, in hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(kind, usedforsecurity=False)).hexdigest()


def require_checksum(path: Path, kind: str, wanted: str, repair: str) -> None:
    """Raise `DataError` unless the file is there and has this checksum."""
    if not path.is_file():
        raise DataError(f"The file {path} is missing. Run '{repair}'.")
    if (found := checksum(path, kind)) != wanted:
        raise DataError(
            f"The file {path} is not the right one: its {kind.upper()} is {found}, not {wanted}. Run '{repair}'."
        )


def size_of(folder: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
