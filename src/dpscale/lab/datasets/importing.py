"""Takes official archives, folders of their files, or folders of shards, into the form in which data are kept."""

import hashlib
import re
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from dpscale.lab.datasets import formats, packed
from dpscale.lab.datasets.archives import Member, is_archive, members
from dpscale.lab.datasets.catalogue import Files, Shards
from dpscale.lab.datasets.folder import DataError, OnProgress, Progress, ignore, require_checksum
from dpscale.lab.datasets.packed import Encoded
from dpscale.lab.datasets.stored import MANIFEST, contents, read_manifest

_ATTRIBUTES, _PARTITION = "list_attr_celeba.txt", "list_eval_partition.txt"
_ATTRIBUTE = "Male"
_NUMBER = re.compile(r"[0-9]{6}")  # isdigit() takes superscripts for digits
_PICTURES = (".jpeg", ".jpg", ".png")


def take(entry: Files | Shards, path: Path, into: Path, on_progress: OnProgress = ignore) -> tuple[str, dict[str, Any]]:
    """Write the files of a data set into the folder ``into``, from ``path``; what that was, and what it held."""
    if not path.exists():
        raise DataError(f"There is no file or folder {path}.")
    shards = path.parent if path.suffix == ".npz" else path  # one of them, beside the others
    if isinstance(entry, Shards) and shards.is_dir() and any(shards.glob("*.npz")):
        return "packed shards", _take_shards(entry, shards, into, on_progress)
    how = (
        _take_files(entry, path, into, on_progress)
        if isinstance(entry, Files)
        else _pack(entry, path, into, on_progress)
    )
    return how, contents(entry, into, None, on_progress)


def _take_shards(entry: Shards, path: Path, into: Path, on_progress: OnProgress) -> dict[str, Any]:
    # The manifest beside them, if there is one, tells whether any is missing: a copy may have ended early.
    manifest = read_manifest(entry, path) if (path / MANIFEST).is_file() else None
    held = contents(entry, path, manifest, on_progress)  # refused before it is copied, under names that the user knows
    for file, known in held["files"].items():
        shutil.copyfile(path / file, into / file)
        require_checksum(into / file, "sha256", known["sha256"], entry.repair)
    return held


def _pack(entry: Shards, path: Path, into: Path, on_progress: OnProgress) -> str:
    samples = _celeba(entry, path) if entry.layout == "celeba" else _class_folders(entry, path)
    labels = packed.pack(samples, entry, into, on_progress)
    counts = {split: len(held) for split, held in labels.items()}
    if counts != dict(entry.counts):
        raise DataError(
            f"{path} has {_told(counts)} images; the official archive has {_told(dict(entry.counts))}. "
            f"Needed: {entry.by_hand}."
        )
    for split, official in entry.per_class.items():
        for label, (name, wanted) in enumerate(zip(entry.classes, official, strict=True)):
            if (found := labels[split].count(label)) != wanted:
                raise DataError(
                    f"{path} has {found} {split} images of the class {name}; the official archive has {wanted}. "
                    f"Needed: {entry.by_hand}."
                )
    return "official images, packed here"


# -- idx and CIFAR-10 ------------------------------------------------------------------------------------------


def _take_files(entry: Files, path: Path, into: Path, on_progress: OnProgress) -> str:
    if entry.layout == "idx" and path.is_file() and not is_archive(path) and _idx_name(path.name) not in entry.md5:
        raise DataError(f"{path} is none of {', '.join(entry.md5)}. Needed: {entry.by_hand}.")
    read = {"idx": _idx, "cifar": _cifar}[entry.layout]
    kinds = set()
    found: dict[str, str] = {}
    for file, content, kind in read(entry, path):
        if found.get(file) == entry.md5[file]:
            continue  # of several of one name, as in a folder with MNIST and FashionMNIST, the right one
        found[file] = hashlib.md5(content, usedforsecurity=False).hexdigest()
        (into / file).write_bytes(content)
        kinds.add(kind)
        on_progress(Progress("reading", len(found), len(entry.md5), "files"))
    missing = [file for file in entry.md5 if file not in found]
    if missing:
        raise DataError(f"{path} lacks {', '.join(missing)}. Needed: {entry.by_hand}.")
    for file, md5 in entry.md5.items():
        if found[file] != md5:
            raise DataError(
                f"{file} in {path} is not the official one: its MD5, uncompressed, is {found[file]}, not {md5}. "
                "Download it again."
            )
    return " and ".join(sorted(kinds))


def _idx(entry: Files, path: Path) -> Iterator[tuple[str, bytes, str]]:
    for member in members(path):
        if (file := _idx_name(member.base)) in entry.md5:
            yield file, member.read(), "official idx files"


def _idx_name(name: str) -> str:
    return name.removesuffix(".gz").replace(".idx", "-idx")


def _cifar(entry: Files, path: Path) -> Iterator[tuple[str, bytes, str]]:
    labels: dict[str, list[int]] = {}
    pictures: dict[str, bytes] = {}
    for member in members(path):
        if member.base in entry.md5:
            yield member.base, member.read(), "official binary batches"
        elif f"{member.base}.bin" in entry.md5:
            content = formats.batch_from_python(member.read(), f"{member.name} in {path}")
            yield f"{member.base}.bin", content, "official Python batches"
        elif member.base.endswith(".png") and f"{member.base[:-4]}.bin" in entry.md5:
            pictures[member.base[:-4]] = member.read()
        elif found := re.fullmatch(r"(train|test)_lab[el]+s\.json", member.base):
            labels[found[1]] = formats.labels_from_json(member.read(), f"{member.name} in {path}")
    if pictures:
        yield from _from_pngs(path, pictures, labels)


def _from_pngs(
    path: Path, pictures: dict[str, bytes], labels: dict[str, list[int]]
) -> Iterator[tuple[str, bytes, str]]:
    if set(labels) != {"train", "test"}:
        raise DataError(f"{path} has PNG batches but lacks the labels of both splits as JSON.")
    trained = sorted(name for name in pictures if name.startswith("data_"))
    each = len(labels["train"]) // max(len(trained), 1)
    for name in sorted(pictures):
        i = trained.index(name) if name in trained else 0
        mine = labels["train"][i * each : (i + 1) * each] if name in trained else labels["test"]
        yield (
            f"{name}.bin",
            formats.batch_from_png(pictures[name], mine, f"{name}.png in {path}"),
            "lossless PNG batches",
        )


# -- pictures --------------------------------------------------------------------------------------------------


def _class_folders(entry: Shards, path: Path) -> Iterator[Encoded]:
    """Images at ``SPLIT/CLASS/NAME``, under whatever folder."""
    for member in members(path):
        parts = PurePosixPath(member.name).parts
        if len(parts) < 3 or parts[-3] not in entry.counts or not member.base.lower().endswith(_PICTURES):
            continue
        if parts[-2] not in entry.folders:
            raise DataError(
                f"{path} has the class {parts[-2]!r}, which {entry.name} does not. Needed: {entry.by_hand}."
            )
        label, name = entry.folders.index(parts[-2]), f"{member.name} in {path}"
        yield Encoded(parts[-3], label, member.read(), name, place="/".join(parts[-3:]))


def _celeba(entry: Shards, path: Path) -> Iterator[Encoded]:
    folder = path if path.is_dir() else path.parent
    places = (folder / "img_align_celeba.zip", folder / "img_align_celeba")
    images = next((place for place in places if place.exists()), None)
    images = path if path.is_file() and path.suffix == ".zip" else images
    if images is None or not (folder / _ATTRIBUTES).is_file():
        lacking = "img_align_celeba.zip" if images is None else _ATTRIBUTES
        raise DataError(f"{folder} lacks {lacking}. Needed: {entry.by_hand}.")
    labels = _attributes(folder / _ATTRIBUTES)
    splits = _partition(folder / _PARTITION) if (folder / _PARTITION).is_file() else None
    for member in members(images):
        found = re.fullmatch(r"(\d{6})\.jpg", member.base)
        if found:
            yield _face(entry, int(found[1]), member, labels, splits)


def _face(entry: Shards, number: int, member: Member, labels: dict[int, int], splits: dict[int, str] | None) -> Encoded:
    by_number = (name for name, (first, last) in entry.numbers.items() if first <= number <= last)
    split = splits.get(number) if splits is not None else next(by_number, None)
    if number not in labels or split is None:
        lacking = _ATTRIBUTES if number not in labels else _PARTITION
        raise DataError(f"{member.name} in {member.where} has no place in {lacking}. Needed: {entry.by_hand}.")
    return Encoded(split, labels[number], member.read(), f"{member.name} in {member.where}", number, member.base)


def _attributes(path: Path) -> dict[int, int]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    names = lines[1].split() if len(lines) > 1 else []
    if _ATTRIBUTE not in names:
        raise DataError(f"The second line of {path} does not name the attribute {_ATTRIBUTE}. Download it again.")
    column, labels = names.index(_ATTRIBUTE), {}
    for i, line in enumerate(lines[2:], 3):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != len(names) + 1 or cells[column + 1] not in ("1", "-1") or not _NUMBER.match(cells[0]):
            raise DataError(
                f"Line {i} of {path} is not a file name and {len(names)} values 1 or -1. Download it again."
            )
        labels[int(cells[0][:6])] = int(cells[column + 1] == "1")
    if lines[0].strip() != str(len(labels)):
        raise DataError(f"{path} promises {lines[0].strip()!r} images and lists {len(labels)}. Download it again.")
    return labels


def _partition(path: Path) -> dict[int, str]:
    names, splits = {"0": "train", "1": "val", "2": "test"}, {}
    for i, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
        cells = line.split()
        if not cells:
            continue
        if len(cells) != 2 or cells[1] not in names or not _NUMBER.match(cells[0]):
            raise DataError(f"Line {i} of {path} is not a file name and 0, 1 or 2. Download it again.")
        splits[int(cells[0][:6])] = names[cells[1]]
    return splits


def _told(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {split}" for split, count in counts.items()) or "no"
