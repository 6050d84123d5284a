"""The official files of each data set: found in an archive or a folder, and read. Nothing is unpacked to disk."""

import gzip
import io
import json
import pickle
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from dpscale.lab.datasets.catalogue import Entry
from dpscale.lab.datasets.disk import DataError
from dpscale.lab.datasets.packed import Encoded

_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)
Split = tuple[np.ndarray, np.ndarray]


def contents_of(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Place and content of each file whose name is wanted, in a tar or zip archive, in a folder, or beside a single
    file. A ``.gz`` is decompressed and loses that suffix."""
    try:
        for name, read in _files(path):
            place = PurePosixPath(name.removesuffix(".gz"))
            if wanted(place.name):
                yield place, gzip.decompress(read()) if name.endswith(".gz") else read()
    except _DAMAGED as error:
        raise DataError(f"{path} cannot be read to its end ({error}): cut or damaged. Download it again.") from error


def _files(path: Path) -> Iterator[tuple[str, Callable[[], bytes]]]:
    if path.is_file() and zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            yield from ((name, partial(archive.read, name)) for name in archive.namelist())
    elif path.is_file() and tarfile.is_tarfile(path):
        with tarfile.open(path) as tar:
            for member in tar:
                if stream := tar.extractfile(member) if member.isfile() else None:
                    yield member.name, stream.read
    else:
        found = sorted(path.rglob("*")) if path.is_dir() else sorted(path.parent.iterdir())
        yield from ((each.as_posix(), each.read_bytes) for each in found if each.is_file())


def arrays(entry: Entry, home: Path) -> dict[str, Split]:
    """Images and labels of each split, from official files that have the right checksums."""
    if entry.layout == "idx":
        train, train_labels, test, test_labels = (_idx_array(home / file) for file in entry.md5)
        return {"train": (train[:, None], train_labels), "test": (test[:, None], test_labels)}
    # Rows of one label byte and the image, channel by channel; the last file is the test batch.
    rows = [np.fromfile(home / file, np.uint8).reshape(-1, 1 + int(np.prod(entry.shape))) for file in entry.md5]
    splits = {"train": np.concatenate(rows[:-1]), "test": rows[-1]}
    return {split: (held[:, 1:].reshape(-1, *entry.shape), held[:, 0]) for split, held in splits.items()}


def _idx_array(path: Path) -> np.ndarray:
    """The array in an uncompressed idx file of unsigned bytes, whose fourth byte is the number of dimensions."""
    content = np.fromfile(path, dtype=np.uint8)
    header = 4 + 4 * int(content[3])
    return content[header:].reshape(content[4:header].view(">u4"))


# -- files as they are kept: name, content, and what kind they came as -----------------------------------------


def idx(entry: Entry, path: Path) -> Iterator[tuple[str, bytes, str]]:
    """The idx files that an archive or a folder has."""
    for place, content in contents_of(path, lambda name: name.replace(".idx", "-idx") in entry.md5):
        yield place.name.replace(".idx", "-idx"), content, "official idx files"


def cifar(entry: Entry, path: Path) -> Iterator[tuple[str, bytes, str]]:
    """Binary batches as they are, or pickled ones for Python, or pictures and labels (``lables``, in the package)."""
    batches = [file.removesuffix(".bin") for file in entry.md5]
    labels = {"train_lables": "train", "test_lables": "test"}
    held: dict[str, bytes] = {}
    for place, content in contents_of(path, lambda name: name.partition(".")[0] in (*batches, *labels)):
        if place.suffix == ".bin":
            yield place.name, content, "official binary batches"
        elif place.suffix in (".png", ".json"):
            held[place.stem] = content
        elif not place.suffix:
            yield f"{place.name}.bin", _from_pickle(content, place.name), "official Python batches"
    if held:
        train, test = (json.loads(held[name]) for name in labels)
        each = len(train) // (len(batches) - 1)
        for i, name in enumerate(batches):
            own = test if name == batches[-1] else train[i * each : (i + 1) * each]
            yield f"{name}.bin", _from_png(held[name], own), "lossless PNG batches"


def _batch(images: Any, labels: Any) -> bytes:
    rows = np.asarray(images, dtype=np.uint8).reshape(len(labels), -1)
    return np.column_stack([np.asarray(labels, dtype=np.uint8), rows]).tobytes()


def _from_png(png: bytes, labels: list[int]) -> bytes:
    """A binary batch from a picture whose every row is an image, its pixels one after the other."""
    from PIL import Image

    return _batch(np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).transpose(0, 2, 1), labels)


def _from_pickle(content: bytes, name: str) -> bytes:
    try:
        found = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        return _batch(found["data"], found["labels"])
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name} is not a CIFAR-10 batch for Python ({error!r}). Download it again.") from error


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module.split(".")[0] in ("numpy", "_codecs") and name in ("_reconstruct", "ndarray", "dtype", "encode"):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such batch does")


# -- images to be packed ---------------------------------------------------------------------------------------


def class_folders(entry: Entry, path: Path) -> Iterator[Encoded]:
    """Images at ``SPLIT/CLASS/NAME.JPEG``, under whatever folder."""
    for place, content in contents_of(path, lambda name: name.endswith(".JPEG") and not name.startswith(".")):
        split, name = place.parent.parent.name, place.parent.name
        if split in entry.counts:
            if name not in entry.folders:
                raise DataError(f"{path} has the class {name!r}, which {entry.name} does not. Needed: {entry.by_hand}.")
            yield Encoded(split, entry.folders.index(name), content, f"{split}/{name}/{place.name}")


def faces(entry: Entry, path: Path) -> Iterator[Encoded]:
    """CelebA's images, with the attribute Male, by the official partition."""
    import pandas

    folder = path if path.is_dir() else path.parent
    places = [folder / "img_align_celeba.zip", folder / "img_align_celeba"]
    images = path if path.suffix == ".zip" else next((place for place in places if place.exists()), places[0])
    attributes = folder / "list_attr_celeba.txt"
    for needed in (images, attributes):
        if not needed.exists():
            raise DataError(f"{folder} lacks {needed.name}. Needed: {entry.by_hand}.")
    try:  # a number, names of columns, then a file name and 1 or -1 for each
        male = pandas.read_csv(attributes, sep=r"\s+", skiprows=1)["Male"]
    except (KeyError, ValueError) as error:
        raise DataError(f"{attributes} is not CelebA's list of attributes ({error}). Download it again.") from error
    for place, content in contents_of(images, lambda name: name in male.index):
        number = int(place.stem)
        split = next(split for split, (first, last) in entry.numbers.items() if first <= number <= last)
        yield Encoded(split, int(male[place.name] == 1), content, place.name, number)


FILES = {"idx": idx, "cifar": cifar}
IMAGES = {"folders": class_folders, "celeba": faces}
