"""What a result was made with: the versions installed, and the commit of the source."""

import importlib.metadata
import platform
import subprocess
from functools import cache
from pathlib import Path


@cache
def installed_versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in ("dpscale", "torch", "dp-accounting", "numpy")}
    return {"python": platform.python_version(), **found}


@cache
def source_commit() -> str | None:
    """The commit of the source this runs from, with ``+changes`` if edited since; None outside a checkout."""
    here = Path(__file__).parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", *arguments], cwd=here, capture_output=True, text=True, timeout=10)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # Installed into an environment that lies in somebody's checkout, the commit would be that of their project.
    if git("ls-files", "--error-unmatch", Path(__file__).name) is None:
        return None
    head = git("rev-parse", "HEAD")
    return head if head is None or not git("status", "--porcelain", "--", ".") else f"{head}+changes"
