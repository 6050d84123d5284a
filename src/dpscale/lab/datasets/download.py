"""Fetches one file over HTTP: goes on where it was cut, checks what it got, and names it only when it is whole.

While it comes in, ``FILE`` is called ``FILE.part``; ``FILE.part.json`` says what it is a part of. The part is
continued only if the server says that the rest belongs to the same file, and is begun anew otherwise.
"""

import http.client
import json
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from dpscale.lab.datasets.folder import OnProgress, Progress, checksum, ignore, room

TIMEOUT = 6.0
"""Seconds without a word from the server after which it counts as gone."""

ATTEMPTS = 5
"""Connections in all, if the first brings something and is then cut."""

PAUSE = 1.0
"""Seconds between them."""

_CHUNK = 1 << 18
_RANGE_NOT_SATISFIABLE = 416


class DownloadError(OSError):
    """A file that could not be had from an address."""


class Unreachable(DownloadError):
    """Nobody answers at an address."""


class Cut(DownloadError):
    """The connection ended before the file did; what came is kept."""


class _Stale(Exception):
    """What is there is no part of what the server has."""


def fetch(
    url: str,
    target: Path,
    *,
    md5: str | None = None,
    timeout: float = TIMEOUT,
    attempts: int = ATTEMPTS,
    on_progress: OnProgress = ignore,
) -> Path:
    """Fetch ``url`` into the file ``target``; a part that an earlier call left is continued.

    Raises:
        Unreachable: nobody answers.
        Cut: the connection broke ``attempts`` times; the next call goes on from there.
        DownloadError: the server refuses, or what it sends has another MD5; then nothing is left.
        DiskFull: what came so far stays a ``.part``.
    """
    part, note = target.with_name(f"{target.name}.part"), target.with_name(f"{target.name}.part.json")
    with room(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        resumed = got_some = False
        for attempt in range(1, attempts + 1):
            resumed = resumed or part.exists()
            try:
                _pull(url, part, note, timeout, on_progress)
            except (Cut, Unreachable) as error:
                got_some = got_some or isinstance(error, Cut)
                if attempt == attempts or not got_some:
                    raise
                time.sleep(PAUSE)
                continue
            found = checksum(part, "md5") if md5 else None
            if found == md5:
                os.replace(part, target)
                _forget(part, note)
                return target
            _forget(part, note)
            if not resumed:
                break
            resumed = False  # its parts may have come from two files: once more, from the first byte
    raise DownloadError(f"{url} is not the right file: its MD5 is {found}, not {md5}. Nothing was kept.")


def _pull(url: str, part: Path, note: Path, timeout: float, on_progress: OnProgress) -> None:
    try:
        _continue(url, part, note, timeout, on_progress)
    except _Stale:
        _forget(part, note)
        _continue(url, part, note, timeout, on_progress)


def _continue(url: str, part: Path, note: Path, timeout: float, on_progress: OnProgress) -> None:
    known = _known(url, note)
    have = part.stat().st_size if known and part.is_file() else 0
    if have and known["total"] == have:
        return
    headers = {"Accept-Encoding": "identity", "User-Agent": "dpscale"}
    if have:
        headers["Range"] = f"bytes={have}-"
        if validator := known["etag"] or known["modified"]:
            headers["If-Range"] = validator
    with _opened(urllib.request.Request(url, headers=headers), timeout, have) as response:
        now = _describe(url, response)
        if response.status == http.client.PARTIAL_CONTENT:
            start = _start(response)
            if not have and start != 0:
                raise DownloadError(f"{url} answers with a part of the file, where all of it was asked for.")
            if have and (start != have or any(now[key] and known[key] and now[key] != known[key] for key in now)):
                raise _Stale
        else:
            have = 0
            note.write_text(json.dumps(now), encoding="utf-8")
        with part.open("ab" if have else "wb") as stream:
            _receive(response, stream, have, now["total"], url, on_progress)


def _receive(response: Any, stream: Any, have: int, total: int | None, url: str, on_progress: OnProgress) -> None:
    what, problem = _file_of(url), "the server closed the connection"
    while True:
        try:
            chunk = response.read(_CHUNK)
        except (OSError, http.client.HTTPException) as error:
            chunk, problem, total = b"", str(error) or type(error).__name__, total or -1
        if not chunk:
            break
        stream.write(chunk)
        have += len(chunk)
        on_progress(Progress(what, have, total))
    stream.flush()
    os.fsync(stream.fileno())
    if total is not None and have != total:
        raise Cut(
            f"{url} was cut after {have} of {total if total > 0 else 'unknown'} bytes ({problem}). "
            "The same command goes on from there."
        )


def _opened(request: urllib.request.Request, timeout: float, have: int) -> Any:
    url = request.full_url
    try:
        _resolve(url, timeout)
        return urllib.request.urlopen(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if have and error.code == _RANGE_NOT_SATISFIABLE:
            raise _Stale from error
        raise DownloadError(f"{url} answers {error.code} {error.reason}.") from error
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        text = getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
        raise Unreachable(f"{urllib.parse.urlsplit(url).netloc} cannot be reached ({text}).") from error


def _resolve(url: str, timeout: float) -> None:
    # urlopen's timeout does not hold for looking up a name, which can take a minute where there is no network.
    parts = urllib.parse.urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme in urllib.request.getproxies() and not urllib.request.proxy_bypass(host):
        return
    failed: list[OSError | None] = []

    def look() -> None:
        try:
            socket.getaddrinfo(host, parts.port or parts.scheme, type=socket.SOCK_STREAM)
            failed.append(None)
        except OSError as error:
            failed.append(error)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(timeout)
    error = failed[0] if failed else TimeoutError("its name was not resolved in time")
    if error is not None:
        raise error


def _describe(url: str, response: Any) -> dict[str, Any]:
    # A weak ETag does not promise equal bytes, so it is no validator of a range.
    etag = response.headers.get("ETag")
    return {
        "url": url,
        "etag": etag if etag and not etag.startswith("W/") else None,
        "modified": response.headers.get("Last-Modified"),
        "total": _total(response),
    }


def _total(response: Any) -> int | None:
    if response.status == http.client.PARTIAL_CONTENT:
        found = re.fullmatch(r"bytes \d+-\d+/(\d+)", response.headers.get("Content-Range", ""))
        return int(found[1]) if found else None
    length = response.headers.get("Content-Length", "")
    return int(length) if length.isdigit() else None


def _start(response: Any) -> int | None:
    found = re.match(r"bytes (\d+)-", response.headers.get("Content-Range", ""))
    return int(found[1]) if found else None


def _known(url: str, note: Path) -> dict[str, Any]:
    try:
        found = json.loads(note.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    forms: dict[str, Any] = {"url": str, "etag": str | None, "modified": str | None, "total": int | None}
    sound = isinstance(found, dict) and all(key in found and isinstance(found[key], forms[key]) for key in forms)
    return found if sound and found["url"] == url else {}


def _forget(part: Path, note: Path) -> None:
    part.unlink(missing_ok=True)
    note.unlink(missing_ok=True)


def _file_of(url: str) -> str:
    return urllib.parse.urlsplit(url).path.rsplit("/", 1)[-1]
