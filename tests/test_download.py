"""The downloader against a real server on loopback, and the registries through clients that only copy files."""

import contextlib
import errno
import hashlib
import http.server
import json
import os
import re
import socket
import stat
import threading

import pytest

from dpscale.lab.datasets import download, registries
from dpscale.lab.datasets.download import Cut, DownloadError, Unreachable, fetch
from dpscale.lab.datasets.folder import DiskFull

BODY = bytes(range(256)) * 4000  # about a megabyte: several chunks
MD5 = hashlib.md5(BODY).hexdigest()


class Server:
    """Serves ``body``; ``cut`` bytes of it at a time, if set. Remembers what it was asked for and what it sent."""

    def __init__(self):
        self.body, self.etag, self.modified, self.cut = BODY, '"one"', None, None
        self.ranges, self.status, self.length = True, None, True
        self.asked, self.sent, self.conditions = [], [], []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                outer.answer(self)

            def log_message(self, *_):
                pass

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/data.bin"
        self.thread = threading.Thread(target=self.http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        self.thread.start()

    def answer(self, request):
        wanted = request.headers.get("Range")
        self.asked.append(wanted)
        self.conditions.append(request.headers.get("If-Range"))
        start = int(re.fullmatch(r"bytes=(\d+)-", wanted)[1]) if wanted else 0
        same = request.headers.get("If-Range") in (None, self.etag, self.modified)
        if self.status:
            request.send_error(self.status)
            return
        if wanted and self.ranges and same and start >= len(self.body):
            request.send_error(416)
            return
        start = start if self.ranges and same else 0
        body = self.body[start:]
        request.send_response(206 if start else 200)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(self.body) - 1}/{len(self.body)}")
        if self.etag:
            request.send_header("ETag", self.etag)
        if self.modified:
            request.send_header("Last-Modified", self.modified)
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        body = body[: self.cut]
        self.sent.append(len(body))
        with contextlib.suppress(ConnectionError):  # who ran out of disk hangs up
            request.wfile.write(body)

    def close(self):
        if not self.thread.is_alive():
            return
        self.http.shutdown()
        self.http.server_close()
        self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(download, "PAUSE", 0.0)
    server = Server()
    yield server
    server.close()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def cut_once(server, target, at=300_000, **kwargs):
    server.cut = at
    with pytest.raises(Cut, match=rf"cut after {at} of {len(server.body)} bytes .*The same command goes on"):
        fetch(server.url, target, attempts=1, **kwargs)
    server.cut = None
    assert names(target.parent) == ["data.bin.part", "data.bin.part.json"]


# -- the ordinary case -----------------------------------------------------------------------------------------


def test_a_good_file_arrives_under_its_name_alone(server, tmp_path):
    seen = []
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5, on_progress=seen.append) == tmp_path / "data.bin"
    assert (tmp_path / "data.bin").read_bytes() == BODY and names(tmp_path) == ["data.bin"]
    assert seen[-1].done == seen[-1].total == len(BODY) and seen[-1].what == "data.bin"
    assert [now.done for now in seen] == sorted({now.done for now in seen})


def test_a_file_of_unknown_length_arrives(server, tmp_path):
    server.length = False
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY


def test_a_wrong_checksum_is_told_and_nothing_is_left(server, tmp_path):
    with pytest.raises(DownloadError, match=rf"data.bin is not the right file: its MD5 is {MD5}, not 0000"):
        fetch(server.url, tmp_path / "data.bin", md5="0000")
    assert names(tmp_path) == [] and len(server.asked) == 1


@pytest.mark.parametrize("status", [404, 403, 500])
def test_a_refusal_is_told(server, tmp_path, status):
    server.status = status
    with pytest.raises(DownloadError, match=rf"{server.url} answers {status} "):
        fetch(server.url, tmp_path / "data.bin")
    assert names(tmp_path) == [] and len(server.asked) == 1


def test_nobody_there_is_told_at_once(server, tmp_path):
    server.close()
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:\d+ cannot be reached \(Connection refused\)"):
        fetch(server.url, tmp_path / "data.bin")
    assert names(tmp_path) == []


def test_a_name_that_is_not_resolved_in_time_counts_as_gone(tmp_path, monkeypatch):
    wait = threading.Event()
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: wait.wait(10))
    with pytest.raises(Unreachable, match=r"nowhere\.invalid cannot be reached \(its name was not resolved in time\)"):
        fetch("http://nowhere.invalid/data.bin", tmp_path / "data.bin", timeout=0.05)
    wait.set()


def test_a_name_that_does_not_resolve_is_told(tmp_path, monkeypatch):
    def unknown(*_, **__):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr("socket.getaddrinfo", unknown)
    with pytest.raises(Unreachable, match=r"nowhere\.invalid cannot be reached \(Name or service not known\)"):
        fetch("http://nowhere.invalid/data.bin", tmp_path / "data.bin")


def test_a_server_that_says_nothing_counts_as_gone(server, tmp_path, monkeypatch):
    wait = threading.Event()
    monkeypatch.setattr(server, "answer", lambda request: wait.wait(10))
    with pytest.raises(Unreachable, match="cannot be reached"):
        fetch(server.url, tmp_path / "data.bin", timeout=0.1)
    wait.set()


# -- what was cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("validator", ["etag", "modified", "none"])
def test_a_cut_download_goes_on_where_it_ended(server, tmp_path, validator):
    server.etag = '"one"' if validator == "etag" else None
    server.modified = "Mon, 01 Jan 2024 00:00:00 GMT" if validator == "modified" else None
    cut_once(server, tmp_path / "data.bin")
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-"] and server.sent == [300_000, len(BODY) - 300_000]
    assert server.conditions == [None, server.etag or server.modified]
    assert names(tmp_path) == ["data.bin"]


def test_one_call_goes_on_by_itself(server, tmp_path):
    server.cut = 400_000
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY
    assert server.asked == [None, "bytes=400000-", "bytes=800000-"]


def test_it_gives_up_after_so_many_attempts_and_keeps_the_part(server, tmp_path):
    server.cut = 1000
    with pytest.raises(Cut, match=f"cut after 3000 of {len(BODY)} bytes"):
        fetch(server.url, tmp_path / "data.bin", md5=MD5, attempts=3)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.json"]
    assert (tmp_path / "data.bin.part").read_bytes() == BODY[:3000]


def test_a_server_that_ignores_ranges_sends_all_of_it_again(server, tmp_path):
    cut_once(server, tmp_path / "data.bin")
    server.ranges = False
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY
    assert server.asked == [None, "bytes=300000-"] and server.sent == [300_000, len(BODY)]


@pytest.mark.parametrize("told", ["by its ETag", "by its length", "by its checksum alone", "by being shorter"])
def test_a_file_that_changed_meanwhile_is_begun_anew(server, tmp_path, told):
    server.etag = '"one"' if told == "by its ETag" else None
    cut_once(server, tmp_path / "data.bin")
    server.etag = '"two"' if told == "by its ETag" else None
    server.body = {"by its length": BODY[::-1] + b"more", "by being shorter": b"short"}.get(told, BODY[::-1])
    md5 = hashlib.md5(server.body).hexdigest()
    assert fetch(server.url, tmp_path / "data.bin", md5=md5).read_bytes() == server.body
    assert server.asked[1] == "bytes=300000-" and names(tmp_path) == ["data.bin"]


def test_a_rest_of_a_longer_file_is_not_put_after_the_part_even_without_a_checksum(server, tmp_path):
    server.etag = None
    cut_once(server, tmp_path / "data.bin")
    server.body = BODY[::-1] + b"more"
    assert fetch(server.url, tmp_path / "data.bin").read_bytes() == server.body
    assert server.asked == [None, "bytes=300000-", None]


@pytest.mark.parametrize("told", ["by its length", "by being shorter"])
def test_what_is_begun_anew_and_then_cut_goes_on(server, tmp_path, told):
    server.etag = None
    cut_once(server, tmp_path / "data.bin")
    server.body = BODY[::-1] + b"more" if told == "by its length" else BODY[:200_000]
    server.cut = 150_000 if told == "by being shorter" else 600_000
    md5 = hashlib.md5(server.body).hexdigest()
    assert fetch(server.url, tmp_path / "data.bin", md5=md5).read_bytes() == server.body
    assert server.asked == [None, "bytes=300000-", None, f"bytes={server.cut}-"]


def test_a_part_that_nobody_asked_for_is_refused(server, tmp_path, monkeypatch):
    def answer(request):
        server.asked.append(request.headers.get("Range"))
        request.send_response(206)
        request.send_header("Content-Range", f"bytes 5-9/{len(BODY)}")
        request.send_header("Content-Length", "5")
        request.end_headers()
        request.wfile.write(BODY[5:10])

    cut_once(server, tmp_path / "data.bin")
    monkeypatch.setattr(server, "answer", answer)
    with pytest.raises(DownloadError, match="answers with a part of the file, where all of it was asked for"):
        fetch(server.url, tmp_path / "data.bin")
    assert server.asked == [None, "bytes=300000-", None] and names(tmp_path) == []


def test_a_part_of_another_address_is_not_continued(server, tmp_path):
    cut_once(server, tmp_path / "data.bin")
    fetch(f"{server.url}?other", tmp_path / "data.bin", md5=MD5)
    assert server.asked == [None, None]


@pytest.mark.parametrize(
    "note",
    [
        None, "", "{", "[]", '{"url": 1}', '{"url": "URL", "total": 9}',
        '{"url": "URL", "total": 9, "etag": ["x"], "modified": null}',
        '{"url": "URL", "total": "9", "etag": null, "modified": null}',
    ],
)  # fmt: skip
def test_a_part_without_a_sound_note_is_begun_anew(server, tmp_path, note):
    (tmp_path / "data.bin.part").write_bytes(b"junk")
    if note is not None:
        (tmp_path / "data.bin.part.json").write_text(note.replace("URL", server.url))
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY
    assert server.asked == [None]


def test_a_part_that_is_whole_needs_no_server(server, tmp_path):
    (tmp_path / "data.bin.part").write_bytes(BODY)
    note = {"url": server.url, "etag": None, "modified": None, "total": len(BODY)}
    (tmp_path / "data.bin.part.json").write_text(json.dumps(note))
    assert fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY and server.asked == []


# -- a full disk -----------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_told_and_leaves_nothing_that_looks_whole(server, tmp_path):
    (tmp_path / "data.bin.part").symlink_to("/dev/full")
    with pytest.raises(DiskFull, match=r"The disk that .*data\.bin is on is full\. .*--data or \$DPSCALE_DATA"):
        fetch(server.url, tmp_path / "data.bin", md5=MD5)
    assert not (tmp_path / "data.bin").exists() and len(server.asked) == 1


def test_a_disk_that_fills_up_midway_keeps_a_part_that_goes_on(server, tmp_path, monkeypatch):
    receive, room = download._receive, 500_000

    class Quota:
        def __init__(self, stream):
            self.stream = stream

        def write(self, chunk):
            if self.stream.tell() + len(chunk) > room:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self.stream.write(chunk)

        def __getattr__(self, name):
            return getattr(self.stream, name)

    monkeypatch.setattr(download, "_receive", lambda response, stream, *rest: receive(response, Quota(stream), *rest))
    with pytest.raises(DiskFull, match="is full"):
        fetch(server.url, tmp_path / "data.bin", md5=MD5)
    assert names(tmp_path) == ["data.bin.part", "data.bin.part.json"]
    monkeypatch.undo()
    monkeypatch.setenv("no_proxy", "*")
    held = (tmp_path / "data.bin.part").stat().st_size
    assert 0 < held <= room and fetch(server.url, tmp_path / "data.bin", md5=MD5).read_bytes() == BODY
    assert server.asked == [None, f"bytes={held}-"]


# -- registries ------------------------------------------------------------------------------------------------


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a script of some name on PATH, alone but for the system's tools."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")

    def put(name, script):
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return put


def test_npm_is_asked_for_one_version_and_leaves_one_archive(client, tmp_path):
    client("npm", 'echo "$@" > asked; echo content > some-data-1.2.3.tgz; echo a warning >&2')
    into = tmp_path / "into"
    into.mkdir()
    assert registries.npm_package("some-data", "1.2.3", into) == into / "some-data-1.2.3.tgz"
    assert (into / "asked").read_text().startswith("pack some-data@1.2.3 --ignore-scripts")


def test_a_debian_package_is_downloaded_and_unpacked_but_not_installed(client, tmp_path):
    client("apt-get", 'echo "$@" > asked; echo content > some-data_1_all.deb')
    client("dpkg-deb", 'mkdir -p "$3/usr/share" && cp "$2" "$3/usr/share/file" && test "$1" = -x')
    into = tmp_path / "into"
    into.mkdir()
    unpacked = registries.debian_package("some-data", into)
    assert (unpacked / "usr/share/file").read_text() == "content\n"
    assert (into / "asked").read_text() == "download some-data\n"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo no such package >&2; exit 3", r"'npm pack some-data@1' failed with code 3: no such package"),
        ("exit 1", r"failed with code 1: no message"),
        ("exit 0", r"'npm pack some-data@1' left 0 files \*\.tgz, not one"),
        ("touch a.tgz b.tgz", r"left 2 files"),
    ],
)
def test_what_a_client_gets_wrong_is_told(client, tmp_path, script, text):
    client("npm", script)
    into = tmp_path / "into"
    into.mkdir()
    with pytest.raises(DownloadError, match=text):
        registries.npm_package("some-data", "1", into)


def npm_error(*lines):
    return "; ".join(f"echo 'npm error {line}' >&2" for line in lines) + "; exit 1"


def test_what_npm_explains_is_told_without_codes_and_stack(client, tmp_path):
    client("npm", npm_error(
        "code ECONNREFUSED", "syscall connect", "errno ECONNREFUSED", "FetchError: request to x failed, reason: y",
        "    at ClientRequest.emit (node:events:524:28) {", "  errno: 1", "}", "", "If you are behind a proxy, do z.",
        "A complete log of this run can be found in: w",
    ))  # fmt: skip
    with pytest.raises(DownloadError) as told:
        registries.npm_package("some-data", "1", tmp_path)
    assert str(told.value) == (
        "'npm pack some-data@1' failed with code 1: code ECONNREFUSED; FetchError: request to x failed, reason: y; "
        "If you are behind a proxy, do z."
    )


def test_a_full_disk_is_told_where_npm_meets_it(client, tmp_path):
    client("npm", npm_error("code ENOSPC", "syscall write", "errno -28", "nospc no space left on device, write"))
    with pytest.raises(DiskFull, match=rf"The disk that {tmp_path} is on is full, or that of npm.s cache\. "):
        registries.npm_package("some-data", "1", tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "tar: ./usr/share/file: Wrote only 3072 of 10240 bytes",
        "tar: ./usr: Cannot mkdir: No space left on device",
        "tar: ./usr: Cannot write: Disk quota exceeded",
    ],
)
def test_a_full_disk_is_told_where_dpkg_meets_it(client, tmp_path, line):
    client("apt-get", "echo content > some-data_1_all.deb")
    client("dpkg-deb", f"echo '{line}' >&2; echo 'dpkg-deb: error: tar subprocess returned error' >&2; exit 2")
    with pytest.raises(DiskFull, match=rf"The disk that {tmp_path} is on is full\. "):
        registries.debian_package("some-data", tmp_path)


def test_a_full_disk_is_told_where_apt_meets_it(client, tmp_path):
    client("apt-get", "echo 'E: Write error - write (28: No space left on device)' >&2; exit 100")
    with pytest.raises(DiskFull):
        registries.debian_package("some-data", tmp_path)


def test_a_client_that_is_not_installed_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match=r"^npm is not installed\.$"):
        registries.npm_package("some-data", "1", tmp_path)
