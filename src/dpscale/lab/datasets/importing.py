"""Takes official archives, folders of their files, or folders of shards, into the form in which data are kept."""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpscale.lab.datasets import formats, packed
from dpscale.lab.datasets.archives import contents_of
from dpscale.lab.datasets.catalogue import Entry
from dpscale.lab.datasets.folder import DataError, OnProgress, Progress, ignore, require_checksum
from dpscale.lab.datasets.packed import Encoded
from dpscale.lab.datasets.stored import MANIFEST, contents, read_manifest


def take(entry: Entry, path: Path, into: Path, on_progress: OnProgress = ignore) -> tuple[str, dict[str, Any]]:
    """Write the files of a data set into the folder ``into``, from ``path``; what that was, and what it held."""
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    shards = path.parent if path.suffix == ".npz" else path  # one of them, beside the others
    if entry.md5:
        how = _take_files(entry, path, into, on_progress)
    elif any(shards.glob("*.npz")):
        return "packed shards", _take_shards(entry, shards, into, on_progress)
    else:
        how = _pack(entry, path, into, on_progress)
    return how, contents(entry, into, None, on_progress)


def _take_shards(entry: Entry, path: Path, into: Path, on_progress: OnProgress) -> dict[str, Any]:
    # The manifest beside them, if there is one, shows whether any is missing: a copy may have ended early.
    manifest = read_manifest(entry, path) if (path / MANIFEST).is_file() else None
    held = contents(entry, path, manifest, on_progress)  # refused before it is copied, under names that the user knows
    for file, known in held["files"].items():
        shutil.copyfile(path / file, into / file)
        require_checksum(into / file, "sha256", known["sha256"], entry.repair)
    return held


def _take_files(entry: Entry, path: Path, into: Path, on_progress: OnProgress) -> str:
    """Of several files of one name, as in a folder with MNIST and FashionMNIST, those with the right checksum."""
    kinds, wrong, right = set(), {}, set()
    for file, content, kind in {"idx": _idx, "cifar": _cifar}[entry.layout](entry, path):
        found = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if found != entry.md5[file]:
            wrong[file] = found
            continue
        (into / file).write_bytes(content)
        right.add(file)
        kinds.add(kind)
        on_progress(Progress("reading", len(right), len(entry.md5), "files"))
    for file, md5 in entry.md5.items():
        if file in right:
            continue
        if file not in wrong:
            raise DataError(f"{path} lacks {file}. Needed: {entry.by_hand}.")
        raise DataError(
            f"{file} in {path} is not the official one: its MD5, uncompressed, is {wrong[file]}, not {md5}. "
            "Download it again."
        )
    return " and ".join(sorted(kinds))


def _idx(entry: Entry, path: Path) -> Iterator[tuple[str, bytes, str]]:
    for place, content in contents_of(path, lambda name: name.replace(".idx", "-idx") in entry.md5):
        yield place.name.replace(".idx", "-idx"), content, "official idx files"


def _cifar(entry: Entry, path: Path) -> Iterator[tuple[str, bytes, str]]:
    """Binary batches as they are, or pickled ones for Python, or pictures and labels (``lables``, in the package)."""
    labels = {"train_lables.json": "train", "test_lables.json": "test"}
    wanted = {name for file in entry.md5 for name in (file, file[:-4], f"{file[:-4]}.png")} | set(labels)
    pictures: dict[str, bytes] = {}
    held: dict[str, list[int]] = {}
    for place, content in contents_of(path, wanted.__contains__):
        if place.suffix == ".bin":
            yield place.name, content, "official binary batches"
        elif place.suffix == ".png":
            pictures[place.stem] = content
        elif place.name in labels:
            held[labels[place.name]] = json.loads(content)
        else:
            yield f"{place.name}.bin", formats.batch_from_python(content, place.name), "official Python batches"
    if pictures:
        train = sorted(name for name in pictures if name.startswith("data_"))
        each = len(held["train"]) // len(train)
        own = {name: held["train"][i * each : (i + 1) * each] for i, name in enumerate(train)}
        for name, png in pictures.items():
            yield f"{name}.bin", formats.batch_from_png(png, own.get(name, held["test"])), "lossless PNG batches"


def _pack(entry: Entry, path: Path, into: Path, on_progress: OnProgress) -> str:
    samples = _faces(entry, path) if entry.layout == "celeba" else _class_folders(entry, path)
    counts = packed.pack(samples, entry, into, on_progress)
    if counts != dict(entry.counts):
        found, official = (", ".join(f"{n} {split}" for split, n in each.items()) for each in (counts, entry.counts))
        raise DataError(
            f"{path} has {found or 'no'} images; the official archive has {official}. Needed: {entry.by_hand}."
        )
    return "official images, packed here"


def _class_folders(entry: Entry, path: Path) -> Iterator[Encoded]:
    """Images at ``SPLIT/CLASS/NAME.JPEG``, under whatever folder."""
    for place, content in contents_of(path, lambda name: name.endswith(".JPEG") and not name.startswith(".")):
        split, name = place.parent.parent.name, place.parent.name
        if split in entry.counts:
            if name not in entry.folders:
                raise DataError(f"{path} has the class {name!r}, which {entry.name} does not. Needed: {entry.by_hand}.")
            yield Encoded(split, entry.folders.index(name), content, f"{split}/{name}/{place.name}")


def _faces(entry: Entry, path: Path) -> Iterator[Encoded]:
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
    for place, content in contents_of(images, lambda name: name.endswith(".jpg") and not name.startswith(".")):
        if place.name not in male.index:
            raise DataError(f"{place.name} in {images} is not in {attributes.name}. Needed: {entry.by_hand}.")
        number = int(place.stem)
        split = next(split for split, (first, last) in entry.numbers.items() if first <= number <= last)
        yield Encoded(split, int(male[place.name] == 1), content, place.name, number)
