"""Files that are written whole or not at all."""

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Another name in the same folder; what is written there becomes ``path`` if the block ends well, and else goes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        temporary.chmod(0o644)
        os.replace(temporary, path)
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
