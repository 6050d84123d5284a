"""Files that are written whole or not at all, checksums of what is in them, and locks that end with their process."""

import hashlib
import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

HAS_LOCKS = fcntl is not None


@contextmanager
def replacing(path: Path, *, mode: int = 0o644, durable: bool = False) -> Iterator[Path]:
    """Another name in the same folder; what is written there becomes ``path`` if the block ends well, and else goes.

    Args:
        mode: who may read the file.
        durable: wait until it is on the disk, so that it is whole even after a power failure.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(mode)
        if durable:
            _sync(temporary)
        os.replace(temporary, path)
        if durable:
            _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def clear(path: Path) -> None:
    """Remove what processes that were killed while `replacing` ``path`` left.

    A file that is being written looks the same: call it under a lock that every writer of ``path`` holds.
    """
    ours = re.compile(rf"\.{re.escape(path.name)}\.[a-z0-9_]+\.tmp")  # not those of path.name.sha256
    for left in path.parent.glob(".*.tmp"):
        if ours.fullmatch(left.name):
            with suppress(OSError):
                left.unlink()


def is_unicode(text: str) -> bool:
    """Whether it can be written as UTF-8: Python reads a byte that is none as half of a character."""
    return not any("\ud800" <= c <= "\udfff" for c in text)


def checksum(text: str) -> str:
    """What tells that a text is not as it was written. It stops no one who means to change it."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Within, no other process is `locked` on the same file or folder: it waits. Ends with the process."""
    handle = os.open(path, os.O_RDONLY)
    try:
        if fcntl is not None:
            with suppress(OSError):  # some file systems have no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def try_lock(path: Path) -> int | None:
    """An open file that holds a lock on ``path``, until it is closed or the process ends; None: another holds it."""
    assert fcntl is not None
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    except BaseException:
        os.close(handle)
        raise
    return handle


def is_locked(path: Path) -> bool:
    """Whether a process holds what `try_lock` gave it. Looking disturbs nobody else who looks; what cannot be looked at
    counts as locked."""
    assert fcntl is not None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(handle)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return False


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
