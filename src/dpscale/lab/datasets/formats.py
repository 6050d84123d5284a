"""What official files, archives of images and packed shards hold, as arrays. Nothing is unpacked to disk."""

import gzip
import hashlib
import io
import itertools
import json
import pickle
import tarfile
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from dpscale.lab.datasets.catalogue import Entry
from dpscale.lab.datasets.disk import DataError, checksum
from dpscale.lab.progress import OnProgress, Progress

Split = tuple[np.ndarray, np.ndarray]
_DAMAGED = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, zlib.error, EOFError)
_FORMATS = ("WEBP", "JPEG", "PNG")  # files of strangers meet no other decoder
_ORDER_SEED = 0  # the order of images within a split: one fixed choice


@dataclass(frozen=True)
class Held:
    """A data set as it was found: images ``(N, channels, height, width)`` and labels of each split, both uint8; the
    checksums that tell it apart; and what kind of files it came as."""

    splits: dict[str, Split]
    files: dict[str, dict[str, Any]]
    kind: str


@dataclass(frozen=True)
class Encoded:
    """One image: ``place`` is where it is in the data set, and decides on its place among the others."""

    split: str
    label: int
    image: bytes
    place: str


def found_in(path: Path, entry: Entry, on_progress: OnProgress) -> Held:
    """The data set in an archive or a folder; a `DataError` that says what is wrong with it."""
    if entry.md5:
        return _official(path, entry, on_progress)
    shards = path.parent if path.suffix == ".npz" else path  # one of them, beside the others
    if any(shards.glob("*.npz")):
        counts = {split: max(1, len(list(shards.glob(f"{split}-*.npz")))) for split in entry.splits}
        paths = [shards / f"{split}-{i:02d}.npz" for split, count in counts.items() for i in range(count)]
        return Held(_decoded(_packed(paths, entry), entry, on_progress, packed=True), _of(paths), "packed shards")
    splits = _decoded(_IMAGES[entry.layout](path, entry), entry, on_progress)
    files = {split: {"sha256": hashlib.sha256(held[0].data).hexdigest()} for split, held in splits.items()}
    return Held(splits, files, "official images")


def _of(shards: list[Path]) -> dict[str, dict[str, Any]]:
    files = {}
    for path in shards:
        with np.load(path) as held:
            files[path.name] = {"sha256": checksum(path, "sha256"), "samples": len(held["label"])}
    return files


def _contents(path: Path, wanted: Callable[[str], bool]) -> Iterator[tuple[PurePosixPath, bytes]]:
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
        found = path.rglob("*") if path.is_dir() else path.parent.glob("*")
        yield from ((str(each), each.read_bytes) for each in found if each.is_file())


# -- official files that have published checksums --------------------------------------------------------------


def _official(path: Path, entry: Entry, on_progress: OnProgress) -> Held:
    """Of several files of one name, as in a folder with MNIST and FashionMNIST, those with the right checksum."""
    held: dict[str, bytes] = {}
    kinds: set[str] = set()
    wrong: dict[str, str] = {}
    for file, content, kind in (_idx if entry.layout == "idx" else _cifar)(path, entry):
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != entry.md5[file]:
            wrong[file] = found
            continue
        held[file] = content
        kinds.add(kind)
        on_progress(Progress("reading", len(held), len(entry.md5), "files"))
    for file in (file for file in entry.md5 if file not in held):
        if file not in wrong:
            raise DataError(f"{path} lacks {file}. Needed: {entry.by_hand}.")
        told = f"its MD5, uncompressed, is {wrong[file]}, not {entry.md5[file]}. Download it again."
        raise DataError(f"{file} in {path} is not the official one: {told}")
    files = {file: {"md5": md5} for file, md5 in entry.md5.items()}
    return Held(_arrays([held[file] for file in entry.md5], entry), files, " and ".join(sorted(kinds)))


def _arrays(contents: list[bytes], entry: Entry) -> dict[str, Split]:
    if entry.layout == "idx":  # the fourth byte is the number of dimensions
        train, train_labels, test, test_labels = (
            np.frombuffer(content, np.uint8, offset=4 + 4 * content[3]).reshape(
                np.frombuffer(content, ">u4", content[3], 4)
            )
            for content in contents
        )
        return {"train": (train[:, None], train_labels), "test": (test[:, None], test_labels)}
    # Rows of one label byte and the image, channel by channel; the last file is the test batch.
    rows = [np.frombuffer(content, np.uint8).reshape(-1, 1 + int(np.prod(entry.shape))) for content in contents]
    splits = {"train": np.concatenate(rows[:-1]), "test": rows[-1]}
    return {split: (held[:, 1:].reshape(-1, *entry.shape), held[:, 0]) for split, held in splits.items()}


def _idx(path: Path, entry: Entry) -> Iterator[tuple[str, bytes, str]]:
    for place, content in _contents(path, lambda name: name.replace(".idx", "-idx") in entry.md5):
        yield place.name.replace(".idx", "-idx"), content, "official idx files"


def _cifar(path: Path, entry: Entry) -> Iterator[tuple[str, bytes, str]]:
    """Binary batches as they are, or pickled ones for Python, or pictures and labels (``lables``, in the package)."""
    batches = [file.removesuffix(".bin") for file in entry.md5]
    labels = {"train_lables": "train", "test_lables": "test"}
    held: dict[str, bytes] = {}
    for place, content in _contents(path, lambda name: name.partition(".")[0] in (*batches, *labels)):
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
            with Image.open(io.BytesIO(held[name])) as picture:  # its every row is an image, pixel after pixel
                rows = np.asarray(picture.convert("RGB")).transpose(0, 2, 1)
            yield f"{name}.bin", _batch(rows, own), "lossless PNG batches"


def _batch(images: Any, labels: Any) -> bytes:
    rows = np.asarray(images, dtype=np.uint8).reshape(len(labels), -1)
    return np.column_stack([np.asarray(labels, dtype=np.uint8), rows]).tobytes()


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


# -- images ----------------------------------------------------------------------------------------------------


def _class_folders(path: Path, entry: Entry) -> Iterator[Encoded]:
    """Images at ``SPLIT/CLASS/NAME.JPEG``, under whatever folder."""
    for place, content in _contents(path, lambda name: name.endswith(".JPEG") and not name.startswith(".")):
        split, name = place.parent.parent.name, place.parent.name
        if split in entry.counts:
            if name not in entry.folders:
                raise DataError(f"{path} has the class {name!r}, which {entry.name} does not. Needed: {entry.by_hand}.")
            yield Encoded(split, entry.folders.index(name), content, f"{split}/{name}/{place.name}")


def _faces(path: Path, entry: Entry) -> Iterator[Encoded]:
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
    for place, content in _contents(images, lambda name: name in male.index):
        number = int(place.stem)
        split = next(split for split, (first, last) in entry.numbers.items() if first <= number <= last)
        yield Encoded(split, int(male[place.name] == 1), content, place.name)


_IMAGES = {"folders": _class_folders, "celeba": _faces}


def _packed(paths: list[Path], entry: Entry) -> Iterator[Encoded]:
    """Images in shards: ``image`` (encoded images end to end), ``offset`` (n + 1 of them) and ``label``."""
    for path in paths:
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
                image, offset, labels = held["image"], held["offset"], held["label"]
        except (KeyError, OSError, ValueError, *_DAMAGED) as error:
            raise DataError(f"The shard {path} cannot be read ({error}): cut short or damaged.") from error
        if len(offset) != len(labels) + 1 or offset[-1] != len(image) or labels.max() >= len(entry.classes):
            raise DataError(f"The shard {path} is not one of {entry.name}, or not sound.")
        for i, label in enumerate(labels.tolist()):
            encoded = image[offset[i] : offset[i + 1]].tobytes()
            yield Encoded(path.name.partition("-")[0], label, encoded, f"Image {i} of the shard {path}")


def _decoded(
    samples: Iterator[Encoded], entry: Entry, on_progress: OnProgress, *, packed: bool = False
) -> dict[str, Split]:
    """Images as arrays. Packed ones are in their order; others are shuffled, in an order that depends on their places
    alone, so that the first so many are a fair sample and the same for everybody."""
    counts: Counter[str] = Counter()
    held: dict[str, list[tuple[Encoded, np.ndarray]]] = {split: [] for split in entry.splits}
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(samples, 512)):
            counts.update(each.split for each in group)
            wanted = [each for each in group if each.split in held]
            for sample, pixels in zip(wanted, pool.map(partial(_pixels, entry, packed), wanted), strict=True):
                held[sample.split].append((replace(sample, image=b""), pixels))
            on_progress(Progress("decoding", counts.total(), sum(entry.counts.values()), "images"))
    if not all(held.values()) or (not packed and counts != entry.counts):
        found, full = (", ".join(f"{n} {split}" for split, n in each.items()) for each in (counts, entry.counts))
        raise DataError(f"There are {found or 'no'} images; the official archive has {full}. Needed: {entry.by_hand}.")
    for split, each in () if packed else held.items():
        each.sort(key=lambda one: one[0].place)
        held[split] = [each[i] for i in np.random.default_rng(_ORDER_SEED).permutation(len(each))]
    return {
        split: (np.stack([pixels for _, pixels in each]), np.array([one.label for one, _ in each], np.uint8))
        for split, each in held.items()
    }


def _pixels(entry: Entry, packed: bool, sample: Encoded) -> np.ndarray:
    """An image, cropped and resized; a packed one is so already."""
    try:
        with Image.open(io.BytesIO(sample.image), formats=_FORMATS) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{sample.place} is no image, or a damaged one ({error}). Download it again.") from error
    size = (entry.shape[2], entry.shape[1])
    original = size if packed else entry.original
    if original and picture.size != original:
        wanted, found = ("×".join(map(str, each)) for each in (original, picture.size))
        raise DataError(f"{sample.place} is {found}, not {wanted}. Take the official archive.")
    if entry.crop and not packed:
        left, top = (picture.width - entry.crop) // 2, (picture.height - entry.crop) // 2
        picture = picture.crop((left, top, left + entry.crop, top + entry.crop))
    resized = picture.resize(size, Image.Resampling.BICUBIC)
    return np.ascontiguousarray(np.asarray(resized).transpose(2, 0, 1))
