"""Which runs of a folder are under way, and in which process, so that two processes on one folder share its work."""

import errno
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # Windows has no such lock: two processes may do the same run there, and one record of it stays
    fcntl = None  # type: ignore[assignment]


class Claims:
    """The runs that this process has taken, by the keys of their records.

    A claim is a lock on one byte of a file, so that it ends with its process, however that ends. Another of the same
    process, on the same folder, would end it too.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / ".claims"
        self._file: IO[bytes] | None = None

    def take(self, key: str) -> bool:
        """Whether the run is this process's now; False: another one has it."""
        if fcntl is None:
            return True
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key, 16))
        except OSError as error:  # some file systems have no locks: it is as on Windows then
            return error.errno not in (errno.EACCES, errno.EAGAIN)
        return True

    def leave(self, key: str) -> None:
        """The run is done, or another process may have it."""
        if self._file is not None:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, int(key, 16))

    def close(self) -> None:
        """Leave all of them."""
        if self._file is not None:
            self._file.close()
            self._file = None
