"""Where data lie on disk, and how files get there: whole or not at all."""

import errno
import hashlib
import logging
import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpscale.files import replacing

VARIABLE = "DPSCALE_DATA"
"""Environment variable that names the data folder."""

log = logging.getLogger("dpscale")

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
def locked(root: Path, name: str) -> Iterator[bool]:
    """Only one process at a time fetches, imports or decodes a data set; others wait for it, and say so.

    Yields whether that is certain. Of a data set that is a link, the folder that it leads to is locked as well, as
    other data folders may have links to it.
    """
    home = root / name
    with ExitStack() as stack:
        alone = stack.enter_context(_lock(root, name))
        if home.is_symlink() and home.is_dir():
            real = home.resolve()
            try:
                alone &= stack.enter_context(_lock(real.parent, real.name))
            except PermissionError:  # it may be decoded into all the same
                alone = False
        yield alone


@contextmanager
def _lock(root: Path, name: str) -> Iterator[bool]:
    path = root / f".{name}.lock"
    with room(root):
        try:
            root.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            wrong = next((place for place in (root, *root.parents) if place.exists() and not place.is_dir()), root)
            raise DataError(f"{_no_folder(wrong)} Choose another folder with --data or ${VARIABLE}.") from error
        stream = path.open("ab")
    with stream:
        try:
            import fcntl
        except ImportError:  # Windows has no such lock: there two at a time only repeat each other's work
            yield False
            return
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            log.warning("dpscale: waiting for another process, which is at work on %s and holds %s.", name, path)
            fcntl.flock(stream, fcntl.LOCK_EX)
        yield True


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """A temporary folder that takes the place of ``target`` if the block ends well, and else vanishes.

    Call it under `locked`: what an earlier process left behind is removed first. If ``target`` is a link, it stays, and
    the folder that it leads to is replaced.
    """
    target = target.resolve() if target.is_symlink() else target
    with room(target, reads=True):
        target.parent.mkdir(parents=True, exist_ok=True)
        for stale in target.parent.glob(f".{target.name}.*.tmp"):
            _remove(stale)
        staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
        replaced = staging.with_suffix(".old.tmp")
        try:
            yield staging
            staging.chmod(0o755)
            if target.exists():
                os.replace(target, replaced)
            os.replace(staging, target)
        finally:
            _remove(staging)
            _remove(replaced)


def require_replaceable(target: Path) -> None:
    """Raise `DataError` unless there is a folder at ``target``, a link to one, or nothing."""
    if os.path.lexists(target) and not target.is_dir():
        raise DataError(f"{_no_folder(target)} Move it away, and run the command again.")


def _no_folder(path: Path) -> str:
    return f"{path} is {'a file' if path.exists() else 'a link to nothing'} and not a folder."


def _remove(path: Path) -> None:
    if path.is_symlink():  # one that was put aside, by a version that did not follow links; rmtree refuses it
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def whole(path: Path) -> Iterator[Any]:
    """A binary stream whose bytes become the file ``path`` if the block ends well, and else nothing."""
    with room(path), replacing(path) as temporary, temporary.open("wb") as stream:
        yield stream
        stream.flush()
        os.fsync(stream.fileno())


@contextmanager
def room(path: Path, *, reads: bool = False) -> Iterator[None]:
    """Says in words that a disk is full or a folder cannot be written to; ``reads``: or a file cannot be read."""
    try:
        yield
    except (DiskFull, NotReadable, NotWritable):
        raise
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFull(path) from error
        named = Path(error.filename or path)
        if error.errno in _FORBIDDEN:
            if reads and os.access(named, os.F_OK) and not os.access(named, os.R_OK):
                raise NotReadable(named, error.strerror) from error
            if named.is_relative_to(path.parent):
                raise NotWritable(named, error.strerror) from error
        raise


class DiskFull(OSError):
    """No room left where data are written; ``other`` names something else that may have had none."""

    def __init__(self, path: Path, other: str | None = None):
        maybe = f", or that of {other}" if other else ""
        super().__init__(
            f"The disk that {path} is on is full{maybe}. No incomplete file was left that looks whole. "
            f"Free some room, or choose another folder with --data or ${VARIABLE}."
        )


class NotReadable(PermissionError):
    """A folder or file that may not be read."""

    def __init__(self, path: Path, reason: str | None):
        super().__init__(f"Cannot read {path}: {reason}. Change its permissions, and run the command again.")


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
