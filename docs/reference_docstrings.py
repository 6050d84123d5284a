"""Docstrings as the reference shows them: examples as code, and each argument with a line of its own.

Loaded by mkdocstrings (mkdocs.yml). Docstrings here have an `Example:` section and may name several arguments at once,
`epsilon, delta: the budget.`; its parser knows neither.
"""

import re
from collections.abc import Iterator
from typing import Any

import griffe

_SEVERAL = re.compile(r"(\s+)(\w+(?:, \w+)+): (.*)")


class AsWritten(griffe.Extension):  # type: ignore[misc]
    """Rewrites every docstring once it is collected."""

    def on_instance(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called for each object of the package."""
        if obj.docstring is not None:
            obj.docstring.value = "\n".join(_lines(obj.docstring.value.splitlines()))


def _lines(lines: list[str]) -> Iterator[str]:
    """The lines of a docstring, with what is known to the parser in place of what is not."""
    listing, k = False, 0
    while k < len(lines):
        line, k = lines[k], k + 1
        if line and not line[0].isspace():
            listing = line in ("Args:", "Attributes:")
        found = _SEVERAL.fullmatch(line) if listing else None
        if found is None:
            yield "Examples:" if line == "Example:" else line
            continue
        more = []
        while k < len(lines) and lines[k].startswith(found[1] + " "):
            more.append(lines[k])
            k += 1
        for name in found[2].split(", "):
            yield from (f"{found[1]}{name}: {found[3]}", *more)
