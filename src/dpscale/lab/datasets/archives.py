"""Reads what is in an archive or a folder. Nothing is unpacked to disk."""

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

from dpscale.lab.datasets.folder import DataError

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)


def contents_of(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Place and content of each file that is wanted, in a tar or zip archive, in a folder, or beside a single file.

    A ``.gz`` is decompressed and loses that suffix.

    Args:
        wanted: by the name without folders.
    """
    try:
        for name, read in _files(path):
            place = PurePosixPath(name.removesuffix(".gz"))
            if wanted(place.name):
                yield place, gzip.decompress(read()) if name.endswith(".gz") else read()
    except _DAMAGED as error:
        raise DataError(f"{path} cannot be read to its end ({error}): cut or damaged. Download it again.") from error


def _files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, partial(archive.read, name)) for name in archive.namelist())
    elif path.is_file() and tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            for member in tar:
                if stream := tar.extractfile(member) if member.isfile() else None:
                    yield member.name, stream.read
    else:
        found = sorted(path.rglob("*")) if path.is_dir() else sorted(path.parent.iterdir())
        yield from ((each.as_posix(), each.read_bytes) for each in found if each.is_file())
