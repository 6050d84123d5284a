"""The pages as a site: it opens from a folder, loads nothing from elsewhere, and can be searched there."""

import html
import os
import re
import shutil
import subprocess
import sys
from urllib.parse import unquote

import pytest

import dpscale

from .processes import HANGS, ROOT

pytest.importorskip("mkdocs")
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
_LOADED = re.compile(r"<(?:script|img|iframe|link)\b[^>]*?\b(?:src|href)=\"([^\"]+)\"")
_LINK = re.compile(r"<a\b[^>]*?\bhref=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, as `make docs` builds it: without a warning."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def pages(site):
    """By path; that for addresses which a server does not know is left out."""
    return {path: path.read_text(encoding="utf-8") for path in sorted(site.glob("*.html")) if path.name != "404.html"}


def test_nothing_is_loaded_from_elsewhere(site):
    found = {html.unescape(address) for text in pages(site).values() for address in _LOADED.findall(text)}
    assert "assets/iframe-worker.js" in found
    assert [address for address in found if not address.startswith("data:") and not (site / address).is_file()] == []


def test_links_lead_somewhere(site):
    there = {path: set(re.findall(r"\bid=\"([^\"]+)\"", text)) for path, text in pages(site).items()}
    wrong = []
    for page, text in pages(site).items():
        for link in map(html.unescape, _LINK.findall(text)):
            path, _, anchor = unquote(link).partition("#")
            target = (site / path).resolve() if path else page
            known = target.is_file() and (not anchor or target not in there or anchor in there[target])
            if not re.match(r"[a-z]+:", link) and not known:
                wrong.append((page.name, link))
    assert wrong == []


def test_every_public_name_is_in_the_reference(site):
    text = (site / "api.html").read_text(encoding="utf-8")
    assert [name for name in dpscale.__all__ if f'id="dpscale.{name}"' not in text] == []


@pytest.mark.skipif(BROWSER is None, reason="no Chromium")
@pytest.mark.parametrize(("word", "found"), [("ledger", True), ("zzzzqqqq", False)])
def test_the_search_finds_words_in_a_folder(site, word, found, tmp_path):
    """The browser opens a file, and has no network; results are in the page when it has come to rest."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync", "--virtual-time-budget=20000",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path}"]  # fmt: skip
    address = f"{(site / 'index.html').as_uri()}?q={word}"
    assert BROWSER is not None
    done = subprocess.run([BROWSER, *flags, "--dump-dom", address], capture_output=True, text=True, timeout=HANGS)
    assert ('class="md-search-result__item"' in done.stdout) == found, done.stderr[-2000:]
