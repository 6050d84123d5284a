"""The data folder: locks, links, what a killed process left, what may only be read, and damaged manifests."""

import contextlib
import dataclasses
import errno
import hashlib
import io
import json
import logging
import os
import shutil
import threading

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from dpscale import cli
from dpscale.files import replacing
from dpscale.lab.data import load
from dpscale.lab.datasets import folder, obtaining, stored
from dpscale.lab.datasets.catalogue import CATALOGUE
from dpscale.lab.datasets.folder import DataError, NotReadable, NotWritable, locked, room, staged

fcntl = pytest.importorskip("fcntl")


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


IDX = {
    "train-images-idx3-ubyte": idx(np.arange(60, dtype=np.uint8).reshape(3, 4, 5)),
    "train-labels-idx1-ubyte": idx(np.array([0, 1, 2], dtype=np.uint8)),
    "t10k-images-idx3-ubyte": idx(np.arange(60, 120, dtype=np.uint8).reshape(3, 4, 5)),
    "t10k-labels-idx1-ubyte": idx(np.array([2, 1, 0], dtype=np.uint8)),
}


def shard(path, labels):
    images = []
    for label in labels:
        stream = io.BytesIO()
        Image.new("RGB", (16, 16), (80 * label, 20, 20)).save(stream, "PNG")
        images.append(stream.getvalue())
    np.savez(
        path, image=np.frombuffer(b"".join(images), dtype=np.uint8),
        offset=np.cumsum([0, *map(len, images)], dtype=np.int64), label=np.array(labels, dtype=np.uint8),
    )  # fmt: skip


@pytest.fixture
def root(tmp_path, monkeypatch):
    """A data folder with a small MNIST and a small Imagenette, of three classes each."""
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in IDX.items()}
    small = {
        "mnist": {"shape": (1, 4, 5), "counts": {"train": 3, "test": 3}, "md5": md5},
        "imagenette": {"shape": (3, 16, 16), "counts": {"train": 3, "val": 3}, "folders": ("n1", "n2", "n3")},
    }
    for name, changes in small.items():
        changed = dataclasses.replace(CATALOGUE[name], classes=("a", "b", "c"), **changes)
        monkeypatch.setitem(CATALOGUE, name, changed)
    for name in small:
        (tmp_path / "in" / name).mkdir(parents=True)
    for name, content in IDX.items():
        (tmp_path / "in/mnist" / name).write_bytes(content)
    for split in ("train", "val"):
        shard(tmp_path / f"in/imagenette/{split}-00.npz", [0, 1, 2])
    for name in small:
        obtaining.take(name, tmp_path / "in" / name, tmp_path / "data")
    return tmp_path / "data"


@pytest.fixture
def no_source(monkeypatch):
    """Whoever fetches something has failed."""
    monkeypatch.setattr(obtaining, "_get_from", lambda *_: pytest.fail("it was fetched"))


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["data", *map(str, arguments)], prog_name="dpscale")
    assert result.exit_code == code, result.output
    return result


@contextlib.contextmanager
def held(path):
    """A lock that somebody else has."""
    with path.open("ab") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


# -- what a killed process left --------------------------------------------------------------------------------


@pytest.fixture
def left(root):
    """Half-written images of both splits, as a process leaves them that is killed while it decodes."""
    home = root / "imagenette"
    manifest = json.loads((home / "manifest.json").read_text())
    paths = [stored.decoded_file(home, manifest, split) for split in ("train", "val")]
    writers = [replacing(path) for path in [*paths, paths[0].with_name("train-0123456789abcdef.npy")]]
    files = [writer.__enter__() for writer in writers]
    for file in files:
        file.write_bytes(b"half")
    yield files
    del writers


def test_what_was_left_half_decoded_goes_when_images_are_decoded(root, left):
    assert load("imagenette", root).size == 3
    assert not any(file.exists() for file in left) and not list((root / "imagenette").glob(".*"))


def test_what_was_left_half_decoded_goes_when_they_are_verified(root, left):
    run("verify", "imagenette", "--data", root)
    assert not any(file.exists() for file in left) and not list((root / "imagenette").glob("*.npy"))


def test_what_another_process_is_writing_stays_until_it_is_done(root, left, caplog):
    with held(root / ".imagenette.lock"):
        verifying = threading.Thread(target=stored.check_decoded, args=("imagenette", root))
        verifying.start()
        verifying.join(0.3)
        assert verifying.is_alive() and all(file.exists() for file in left)
    verifying.join(10)
    assert not verifying.is_alive() and not any(file.exists() for file in left)


def test_what_another_process_writes_through_another_link_stays_until_it_is_done(root, left, tmp_path, caplog):
    other = tmp_path / "other"
    other.mkdir()
    (other / "imagenette").symlink_to(root / "imagenette")
    with held(root / ".imagenette.lock"):
        loading = threading.Thread(target=load, args=("imagenette", other))
        loading.start()
        loading.join(0.3)
        assert loading.is_alive() and all(file.exists() for file in left)
    loading.join(10)
    assert not loading.is_alive() and not any(file.exists() for file in left)


def test_without_the_lock_of_where_a_link_leads_images_are_decoded_but_nothing_is_removed(
    root, left, tmp_path, monkeypatch
):
    other = tmp_path / "other"
    other.mkdir()
    (other / "imagenette").symlink_to(root / "imagenette")
    lock = folder._lock

    def refused(place, name):
        if place == root:
            raise NotWritable(place, "Permission denied")
        return lock(place, name)

    monkeypatch.setattr(folder, "_lock", refused)
    assert load("imagenette", other).size == 3
    assert all(file.exists() for file in left) and len(list((root / "imagenette").glob("*.npy"))) == 2


# -- folders that may only be read, and files that may not be --------------------------------------------------


def unusable(lock):
    lock.unlink()
    lock.mkdir()


def test_what_is_there_and_sound_needs_no_lock(root, no_source):
    unusable(root / ".mnist.lock")
    assert run("get", "mnist", "--data", root).stdout.endswith("It was there already.\n")


def test_what_is_broken_is_told_before_the_lock_is_taken(root, no_source):
    unusable(root / ".mnist.lock")
    (root / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"x")
    notes = []
    with pytest.raises(IsADirectoryError):
        obtaining.get("mnist", root, on_note=notes.append)
    assert len(notes) == 1 and "t10k-labels-idx1-ubyte is not the right one" in notes[0]


def test_what_another_process_fetched_meanwhile_is_not_fetched_again(root, no_source, monkeypatch):
    (root / "mnist").rename(root / "kept")

    @contextlib.contextmanager
    def waited(*_):
        (root / "kept").rename(root / "mnist")
        yield True

    monkeypatch.setattr(obtaining, "locked", waited)
    assert obtaining.get("mnist", root, on_note=pytest.fail)["fetched"] is False


def forbidden(path):
    return PermissionError(errno.EACCES, "Permission denied", str(path))


def test_a_source_that_may_not_be_read_is_told_as_that(root, tmp_path, monkeypatch):
    source, access = tmp_path / "in/imagenette/val-00.npz", os.access

    def copyfile(path, _):
        raise forbidden(path)

    monkeypatch.setattr(shutil, "copyfile", copyfile)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK and access(path, mode))
    with pytest.raises(NotReadable, match=r"^Cannot read .*/in/imagenette/\w+-00\.npz: Permission denied\. Change its"):
        obtaining.take("imagenette", source.parent, root)


def test_what_may_not_be_written_is_told_as_that(tmp_path):
    (tmp_path / "there").touch()
    for name in ("there", "new"):
        with pytest.raises(NotWritable, match=rf"^Cannot write {tmp_path / name}: Permission"), room(tmp_path / "set"):
            raise forbidden(tmp_path / name)
        with pytest.raises(NotWritable), room(tmp_path / "set", reads=True):
            raise forbidden(tmp_path / name)


# -- manifests -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes",
    [
        {"files": {"train-00.npz": {}}},
        {"files": {"train-00.npz": "x"}},
        {"files": {"train-00.npz": {"sha256": 1}}},
        {"files": []},
        {"image": None},
        {"image": "x"},
        {"splits": None},
        {"splits": {"train": {}}},
        {"source": []},
    ],
)
def test_a_damaged_manifest_is_told_and_the_others_are_verified(root, changes):
    path = root / "imagenette" / "manifest.json"
    kept = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in kept.items() if value is not None}))
    for broken in (stored.inspect, stored.described, stored.require_there, stored.check_decoded, load):
        with pytest.raises(
            DataError, match=rf"The file {path} is not .*Run 'dpscale data get imagenette --data {root}"
        ):
            broken("imagenette", root)
    found = json.loads(run("verify", "--data", root, "--json", code=1).stdout)["data"]
    assert [(each["name"], each["ok"]) for each in found] == [("mnist", True), ("imagenette", False)]


@pytest.mark.parametrize("text", ["[]", "1", "null", '"x"'])
def test_what_is_no_manifest_at_all_is_told(root, text):
    (root / "mnist/manifest.json").write_text(text)
    with pytest.raises(
        DataError, match=r"mnist/manifest\.json is not JSON, or lacks something.* Run 'dpscale data get"
    ):
        load("mnist", root)


# -- waiting ---------------------------------------------------------------------------------------------------


def test_who_waits_for_another_process_says_so_once(tmp_path, caplog):
    with locked(tmp_path, "set") as alone:
        assert alone and not caplog.records
    entered = threading.Event()

    def wait():
        with locked(tmp_path, "set"):
            entered.set()

    with caplog.at_level(logging.WARNING, "dpscale"):
        with held(tmp_path / ".set.lock"):
            waiting = threading.Thread(target=wait)
            waiting.start()
            assert not entered.wait(0.3)
        waiting.join(10)
    assert entered.is_set()
    (record,) = caplog.records
    assert record.getMessage() == (
        f"dpscale: waiting for another process, which is at work on set and holds {tmp_path / '.set.lock'}."
    )


# -- what is in the place of a folder --------------------------------------------------------------------------


@pytest.mark.parametrize("inside", ["", "deep/er"])
def test_a_file_in_the_place_of_the_data_folder_is_told(tmp_path, inside):
    (tmp_path / "file").touch()
    result = run("get", "mnist", "--data", tmp_path / "file" / inside, code=2)
    told = (
        f"dpscale: {tmp_path / 'file'} is a file and not a folder. Choose another folder with --data or $DPSCALE_DATA."
    )
    assert result.stderr.splitlines() == [told]


def test_a_file_in_the_place_of_a_data_set_is_told_and_stays(root, no_source):
    shutil.rmtree(root / "mnist")
    (root / "mnist").write_text("mine")
    with pytest.raises(DataError, match=r"data/mnist is a file and not a folder\. Move it away"):
        obtaining.take("mnist", root.parent / "in/mnist", root)
    with pytest.raises(DataError, match=r"data/mnist is a file and not a folder\. Move it away"):
        obtaining.get("mnist", root, on_note=pytest.fail)
    assert (root / "mnist").read_text() == "mine"


@pytest.mark.parametrize("hidden", [False, True])
def test_an_empty_folder_is_no_data_set(root, hidden):
    for path in (root / "mnist").iterdir():
        path.unlink()
    if hidden:
        (root / "mnist" / ".DS_Store").touch()
    rows = json.loads(run("list", "--data", root, "--json").stdout)["data"]
    assert {row["name"]: row["there"] for row in rows}["mnist"] is False
    with pytest.raises(DataError, match="The data set mnist is not in the data folder"):
        load("mnist", root)


# -- links -----------------------------------------------------------------------------------------------------


def test_a_data_set_that_is_a_link_is_replaced_where_it_leads(root, tmp_path):
    big = tmp_path / "big"
    big.mkdir()
    (root / "mnist").rename(big / "digits")
    (root / "mnist").symlink_to(big / "digits")
    (big / "digits" / "old").touch()
    obtaining.take("mnist", tmp_path / "in/mnist", root)
    assert (root / "mnist").is_symlink() and (root / "mnist").resolve() == big / "digits"
    assert not (big / "digits" / "old").exists() and load("mnist", root).size == 3
    assert sorted(path.name for path in big.iterdir()) == [".digits.lock", "digits"]
    assert not list(root.glob(".mnist*.tmp"))


def test_a_link_that_an_earlier_version_left_goes_and_what_it_leads_to_stays(tmp_path):
    (tmp_path / "big").mkdir()
    (tmp_path / ".set.abcd.old.tmp").symlink_to(tmp_path / "big")
    with staged(tmp_path / "set"):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["big", "set"]


def test_a_link_to_nothing_is_told_and_stays(root):
    shutil.rmtree(root / "mnist")
    (root / "mnist").symlink_to(root / "unmounted" / "mnist")
    with pytest.raises(DataError, match=r"data/mnist is a link to nothing and not a folder"):
        obtaining.take("mnist", root.parent / "in/mnist", root)
    assert (root / "mnist").is_symlink()
