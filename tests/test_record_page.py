"""The levers of docs/record.md are those of the committed records, to the digit."""

import re
import sys
from pathlib import Path

from dpscale.lab.stats import interval

DOCS = Path(__file__).parents[1] / "docs"


def test_levers(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS))
    found = __import__("make_figures").lever_accuracies()
    monkeypatch.delitem(sys.modules, "make_figures")
    text = (DOCS / "record.md").read_text(encoding="utf-8")
    rows = [line.strip("|").split("|") for line in re.findall(r"^\|.*±.*\|$", text, re.MULTILINE)]
    assert [row[0].strip() for row in rows] == list(found["mnist"])
    for lever, mnist, fashion in ([cell.strip() for cell in row] for row in rows):
        for data, cell in (("mnist", mnist), ("fashion-mnist", fashion)):
            mean, half = interval(found[data][lever])
            assert len(found[data][lever]) == 5
            assert cell == f"{100 * mean:.2f} ± {100 * half:.2f}"
