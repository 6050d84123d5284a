"""The pages under docs/: short, narrow, and with links that lead somewhere."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
LONG = {"pitfalls.md", "reference.md", "api.md"}
"""Pages to look things up in: they may have more than `WORDS` words."""
WORDS, WIDTH, README = 900, 100, 700

PAGES = sorted(DOCS.rglob("*.md"))
LINKED = [*PAGES, *sorted(ROOT.glob("*.md")), *sorted((ROOT / "results").rglob("*.md"))]

_HIDDEN = re.compile(r"<!--.*?-->", re.DOTALL)
_FENCE = re.compile(r"^ *(```|~~~)")
_LINK = re.compile(r"\]\(([^()\s]+)(?: \"[^\"]*\")?\)|(?:src|href)=\"([^\"]+)\"")


def shown(page):
    """The text of a page without its comments, whose lines are left empty."""
    return _HIDDEN.sub(lambda found: "\n" * found[0].count("\n"), page.read_text(encoding="utf-8"))


def words(text):
    """How many there are; the bars of a table and signs on their own are none."""
    return sum(any(map(str.isalnum, word)) for word in text.split())


def prose(text):
    """Numbered lines outside of code: without fenced blocks and without indented ones."""
    fenced, blank, indented = False, True, False
    for number, line in enumerate(text.splitlines(), 1):
        if _FENCE.match(line):
            fenced = not fenced
            continue
        indented = line.startswith("    ") and (blank or indented)
        blank = not line.strip()
        if not fenced and not indented:
            yield number, line


def too_wide(text):
    """Lines that are longer than a page is wide, of tables and of code too: those would scroll sideways. A link without
    a space in it cannot be wrapped."""
    lines = enumerate(text.splitlines(), 1)
    return [number for number, line in lines if len(line) > WIDTH and " " in line.strip()]


def anchors(text):
    """The places in a page that GitHub lets a link point to."""
    titles = (line.lstrip("#") for _, line in prose(text) if re.match(r"#{1,6} ", line))
    return {re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-") for title in titles}


def links(text):
    """What a page links to, addresses on the web left out."""
    plain = "\n".join(re.sub(r"`[^`]*`", "", line) for _, line in prose(text))
    found = (one or other for one, other in _LINK.findall(plain))
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def broken(page, text):
    """Links of a page that lead nowhere."""
    wrong = []
    for link in links(text):
        path, _, anchor = unquote(link).partition("#")
        place = (page.parent / path).resolve()
        there = place.exists()
        if there and anchor:
            there = anchor in anchors(place.read_text(encoding="utf-8") if path else text)
        if not there:
            wrong.append(link)
    return wrong


def name(page):
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", LINKED, ids=name)
def test_links_lead_somewhere(page):
    assert broken(page, page.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in LONG], ids=name)
def test_a_page_is_short(page):
    assert words(shown(page)) <= WORDS


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=name)
def test_lines_are_narrow(page):
    assert too_wide(shown(page)) == []


def test_the_readme_is_short():
    assert words(shown(ROOT / "README.md")) <= README


def test_what_is_wrong_with_a_page_is_found():
    wide = "x " * WIDTH
    text = f"# A title\n{wide}\n| {wide} |\n```\n{wide}\n```\n\n    {wide}\n\n- {wide}\n    {wide}\n"
    assert too_wide(text) == [2, 3, 5, 8, 10, 11]
    assert too_wide("# A title\n" + "x" * 2 * WIDTH) == []
    assert words("| a | 1 ± 2 |\n|---|---|\n| it's | `b` |") == 5
    text = (
        "# What `s` does\n[a](#what-s-does) [b](#no) [c](no.md) [d](https://no.org) `[e](no)` ![f](../pyproject.toml)"
    )
    assert broken(DOCS / "a.md", f'{text}\n```\n[g](no.md)\n```\n<img src="no.png">') == ["#no", "no.md", "no.png"]


def test_tests_that_pages_name_are_there():
    code = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "tests").rglob("*.py")))
    there = set(re.findall(r"def (test_\w+)", code))
    named = {test for page in PAGES for test in re.findall(r"`(test_\w+)`", page.read_text(encoding="utf-8"))}
    assert named and named <= there, named - there
