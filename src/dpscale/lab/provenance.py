"""Where numbers come from: the versions installed, the machine."""

import os
import platform
from functools import cache
from pathlib import Path

from dpscale import provenance

NUMERICS = 1
"""Version of what a seeded run computes. Raise it with every change after which the same seed gives other numbers:
records of two versions never stand in one table, and runs of an older one are done again."""


@cache
def installed_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, and the machine."""
    return {**provenance.installed_versions(), "platform": platform.platform(), "cpu": _cpu()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return f"{next(named, platform.processor() or platform.machine())}, {os.cpu_count()} cores"
