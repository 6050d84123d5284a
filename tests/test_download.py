"""The downloader against a real server on loopback."""

import contextlib
import errno
import hashlib
import http.server
import os
import threading

import pytest

from dpscale.lab.datasets import fetching
from dpscale.lab.datasets.fetching import DownloadError, Interrupted, fetch

BODY = bytes(range(256)) * 4000  # about a megabyte: several chunks


class Server:
    """Serves ``body``; ``cut`` bytes of it at a time, if set. Remembers the ranges that it was asked for."""

    def __init__(self):
        self.body, self.cut, self.ranges, self.status, self.length, self.asked = BODY, None, True, None, True, []
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
        start = int(wanted[6:-1]) if wanted and self.ranges else 0
        if self.status or (start and start >= len(self.body)):
            request.send_error(self.status or 416)
            return
        request.send_response(206 if start else 200)
        if self.length:
            request.send_header("Content-Length", str(len(self.body) - start))
        request.end_headers()
        with contextlib.suppress(ConnectionError):  # who ran out of disk hangs up
            request.wfile.write(self.body[start:][: self.cut])

    def close(self):
        if self.thread.is_alive():
            self.http.shutdown()
            self.http.server_close()
            self.thread.join()


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setattr(fetching, "PAUSE", 0.0)
    server = Server()
    yield server
    server.close()


def names(folder):
    return [path.name.replace(path.name[9:17], "X") if "part" in path.name else path.name for path in folder.iterdir()]


def get(server, tmp_path, **changes):
    """Fetch what the server has, checked, and leave nothing else."""
    md5 = hashlib.md5(server.body).hexdigest()
    assert fetch(server.url, tmp_path / "data.bin", **{"md5": md5, **changes}).read_bytes() == server.body
    assert names(tmp_path) == ["data.bin"]


@pytest.fixture
def begun(server, tmp_path, monkeypatch):
    """A download that was cut after 300,000 bytes."""
    server.cut = 300_000
    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"cut after 300000 of 1024000 bytes\. The s"):
        patch.setattr(fetching, "ATTEMPTS", 1)
        fetch(server.url, tmp_path / "data.bin")
    assert names(tmp_path) == ["data.bin.X.part"] and server.asked == [None]
    server.cut = None
    return server


# -- the ordinary case -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [True, False])
def test_a_good_file_arrives_under_its_name_alone(server, tmp_path, length):
    server.length, seen = length, []
    get(server, tmp_path, on_progress=seen.append)
    assert seen[-1].done == len(BODY) and seen[-1].total == (len(BODY) if length else None)
    assert seen[-1].what == "data.bin" and [now.done for now in seen] == sorted({now.done for now in seen})


def test_a_wrong_checksum_is_told_and_nothing_is_left(server, tmp_path):
    found = hashlib.md5(BODY).hexdigest()
    with pytest.raises(DownloadError, match=rf"data.bin is not the right file: its MD5 is {found}, not 0000"):
        fetch(server.url, tmp_path / "data.bin", md5="0000")
    assert names(tmp_path) == [] and len(server.asked) == 1


@pytest.mark.parametrize("status", [404, 500])
def test_a_refusal_is_told(server, tmp_path, status):
    server.status = status
    with pytest.raises(DownloadError, match=rf"{server.url} answers {status} "):
        fetch(server.url, tmp_path / "data.bin")
    assert names(tmp_path) == [] and len(server.asked) == 1


def test_nobody_there_is_told_at_once(server, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching.time, "sleep", pytest.fail)
    server.close()
    with pytest.raises(Interrupted, match=r"cannot be reached, or was cut \(Connection refused\)"):
        fetch(server.url, tmp_path / "data.bin")
    assert names(tmp_path) == []


def test_a_server_that_says_nothing_counts_as_gone(server, tmp_path, monkeypatch):
    wait = threading.Event()
    monkeypatch.setattr(server, "answer", lambda request: wait.wait(10))
    monkeypatch.setattr(fetching, "TIMEOUT", 0.1)
    with pytest.raises(Interrupted, match="cannot be reached"):
        fetch(server.url, tmp_path / "data.bin")
    wait.set()


# -- what was cut ----------------------------------------------------------------------------------------------


def test_a_cut_download_goes_on_where_it_ended(begun, tmp_path):
    get(begun, tmp_path)
    assert begun.asked == [None, "bytes=300000-"]


def test_one_call_goes_on_by_itself_so_many_times(server, tmp_path, monkeypatch):
    server.cut = 400_000
    get(server, tmp_path)
    assert server.asked == [None, "bytes=400000-", "bytes=800000-"]
    (tmp_path / "data.bin").unlink()
    monkeypatch.setattr(fetching, "ATTEMPTS", 2)
    with pytest.raises(Interrupted, match="cut after 800000 of"):
        fetch(server.url, tmp_path / "data.bin")


def test_a_server_that_ignores_ranges_sends_all_of_it_again(begun, tmp_path):
    begun.ranges = False
    get(begun, tmp_path)


def test_a_part_of_a_file_that_changed_is_noticed_and_then_begun_anew(begun, tmp_path):
    begun.body = BODY[::-1]
    with pytest.raises(DownloadError, match="is not the right file"):
        get(begun, tmp_path)
    get(begun, tmp_path)
    assert begun.asked == [None, "bytes=300000-", None]


@pytest.mark.parametrize("size", [300_000, 5])
def test_a_part_that_has_all_or_more_is_begun_anew(begun, tmp_path, size):
    begun.body = BODY[:size]
    get(begun, tmp_path)
    assert begun.asked == [None, "bytes=300000-", "bytes=0-"]


def test_a_part_of_another_address_is_not_continued(begun, tmp_path):
    fetch(f"{begun.url}?other", tmp_path / "data.bin")
    assert begun.asked == [None, None]


# -- a full disk -----------------------------------------------------------------------------------------------


def test_a_disk_that_fills_up_midway_keeps_a_part_that_goes_on(server, tmp_path):
    def full(now):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match="No space left"):
        fetch(server.url, tmp_path / "data.bin", on_progress=full)
    assert names(tmp_path) == ["data.bin.X.part"]
    get(server, tmp_path)
    assert len(server.asked) == 2 and server.asked[1].startswith("bytes=")
