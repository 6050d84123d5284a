"""Every Python block of README and of the pages runs: the blocks of a page one after the other, as a reader would.

What a page leaves to its reader (a model, data) stands before the block in a comment that is not shown:

    <!-- python
    model = ...
    -->
"""

import logging
import re
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(
    r"(?:^```python\n(?P<shown>.*?)^```$)|(?:^<!-- python\n(?P<hidden>.*?)^-->$)", re.DOTALL | re.MULTILINE
)


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        (text[: found.start()].count("\n") + 2, found["shown"] or found["hidden"]) for found in BLOCK.finditer(text)
    ]


@pytest.mark.filterwarnings("default")  # other libraries warn of themselves
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page)], ids=lambda page: page.name)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logging.getLogger("dpscale"), "propagate", False)  # what it says of a run is no part of a page
    torch.manual_seed(0)
    names = {"__name__": "__main__"}
    for line, code in blocks(page):
        exec(compile("\n" * (line - 1) + code, str(page), "exec"), names)


EXAMPLES = {
    "quickstart": "quickstart.md",
    "images": "images.md",
    "sequences": "sequences.md",
    "own_loop": "own-loop.md",
    "people": "people.md",
    "tuned": "tuning.md",
}


def script(page):
    """The blocks of a page as one script."""
    shown = [found["shown"] for found in BLOCK.finditer(page.read_text(encoding="utf-8")) if found["shown"]]
    return f'"""The code of docs/{page.name}, which explains it."""\n\n' + "\n".join(shown)


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_is_the_code_of_its_page(name):
    """Write them anew with: python tests/test_docs.py"""
    assert (ROOT / "examples" / f"{name}.py").read_text(encoding="utf-8") == script(ROOT / "docs" / EXAMPLES[name])


def test_a_page_that_does_not_run_is_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("text\n\n```python\nx = 1\n```\n\n<!-- python\nassert x == 2\n-->\n", encoding="utf-8")
    assert blocks(page) == [(4, "x = 1\n"), (8, "assert x == 2\n")]


if __name__ == "__main__":
    for name, page in EXAMPLES.items():
        (ROOT / "examples" / f"{name}.py").write_text(script(ROOT / "docs" / page), encoding="utf-8")
