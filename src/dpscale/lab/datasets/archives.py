"""Reads what is in an archive or a folder, without ever unpacking to a path that the archive chose."""

import gzip
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from dpscale.lab.datasets.folder import DataError

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, gzip.BadGzipFile)
_LIMIT = 1 << 28  # more than any file of any data set here: what claims to be larger is none of them


@dataclass(frozen=True)
class Member:
    """One file in an archive or folder. Read it before asking for the next one."""

    name: str
    where: Path
    stream: Callable[[], IO[bytes]]

    @property
    def base(self) -> str:
        """The name without folders."""
        return PurePosixPath(self.name).name

    def read(self) -> bytes:
        """The content; of a ``.gz`` member, what it decompresses to."""
        with _told(self.where, self.name), self.stream() as stream:
            if self.base.endswith(".gz"):
                with gzip.open(stream) as inner:
                    content = inner.read(_LIMIT + 1)
            else:
                content = stream.read(_LIMIT + 1)
        if len(content) > _LIMIT:
            raise DataError(f"{self.name} in {self.where} is larger than any file of this data set.")
        return content


def members(path: Path) -> Iterator[Member]:
    """Every file in a tar or zip archive, in a folder and below it, or beside a single file.

    What macOS puts beside files, under names that look like theirs, is none of them.
    """
    return (member for member in _members(path) if not member.base.startswith("._"))


def _members(path: Path) -> Iterator[Member]:
    if path.is_dir():
        yield from _in_folder(path, sorted(path.rglob("*")))
    elif not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    elif zipfile.is_zipfile(path):
        yield from _in_zip(path)
    elif is_tar(path):
        yield from _in_tar(path)
    elif is_archive(path):
        raise DataError(f"The archive {path} is damaged: it does not begin or end as such a file does. {_AGAIN}")
    else:
        yield from _in_folder(path.parent, sorted(path.parent.iterdir()))


def is_archive(path: Path) -> bool:
    """Whether a file is an archive, by its content or by its name."""
    named = path.suffix in (".zip", ".tgz", ".tar") or path.name.endswith(".tar.gz")
    return named or zipfile.is_zipfile(path) or is_tar(path)


def is_tar(path: Path) -> bool:
    """Whether a file begins like a tar archive, compressed or not."""
    try:
        return tarfile.is_tarfile(path)
    except _DAMAGED:
        return False


_AGAIN = "Download it again."


class _told:
    """Turns what a damaged archive raises into a `DataError` that names it."""

    def __init__(self, path: Path, name: str = ""):
        self.path, self.name = path, name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, _DAMAGED) or (isinstance(error, OSError) and error.errno is None):
            where = f"{self.name} in {self.path}" if self.name else f"The archive {self.path}"
            raise DataError(f"{where} cannot be read to its end ({error}): cut short or damaged. {_AGAIN}") from error


def _in_folder(folder: Path, paths: list[Path]) -> Iterator[Member]:
    for path in paths:
        if path.is_file():
            yield Member(path.relative_to(folder).as_posix(), folder, lambda path=path: path.open("rb"))  # type: ignore[misc]


def _in_zip(path: Path) -> Iterator[Member]:
    with _told(path), zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            if info.flag_bits & 1:
                raise DataError(f"The archive {path} is encrypted. Unpack it, and import the folder.")
            if not info.is_dir():
                _require_inside(path, info.filename)
                yield Member(info.filename, path, lambda info=info: archive.open(info))  # type: ignore[misc]


def _in_tar(path: Path) -> Iterator[Member]:
    with _told(path), tarfile.open(path, "r:*") as archive:
        for info in archive:
            _require_inside(path, info.name)
            if info.isfile():
                yield Member(info.name, path, lambda info=info: _opened(archive, info))  # type: ignore[misc]


def _opened(archive: tarfile.TarFile, info: tarfile.TarInfo) -> IO[bytes]:
    stream = archive.extractfile(info)
    assert stream is not None, "a regular file has content"
    return stream


def _require_inside(path: Path, name: str) -> None:
    pure = PurePosixPath(name.replace("\\", "/"))
    if pure.is_absolute() or ".." in pure.parts:
        raise DataError(f"The archive {path} holds {name!r}, a path that leads out of it. Nothing was taken from it.")
