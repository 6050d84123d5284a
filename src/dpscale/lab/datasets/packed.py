"""Shards: ``.npz`` files of encoded images, and the arrays that they decode to.

A shard holds ``image`` (uint8, encoded images end to end), ``offset`` (int64, n + 1), ``label`` (uint8) and, where
images are numbered, ``id`` (int32).
"""

import io
import os
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.lab.datasets.catalogue import Shards
from dpscale.lab.datasets.folder import DataError, OnProgress, Progress, ignore

_ORDER_SEED = 0  # the order of packed images within a split: one fixed choice
_FORMATS = ("WEBP", "JPEG", "PNG")  # files of strangers meet no other decoder
_BLOCK = 64  # images that a thread takes at once
_CHUNK = 64 * _BLOCK


@dataclass(frozen=True, eq=False)
class Shard:
    """The content of a shard; image ``i`` is ``image[offset[i]:offset[i + 1]]``."""

    path: Path
    image: np.ndarray
    offset: np.ndarray
    label: np.ndarray
    id: np.ndarray | None

    def __len__(self) -> int:
        return len(self.label)

    def encoded(self, i: int) -> bytes:
        """The bytes of one encoded image."""
        return self.image[self.offset[i] : self.offset[i + 1]].tobytes()


@dataclass(frozen=True)
class Encoded:
    """One image to be packed: ``name`` is what errors call it, ``id`` its official number, ``place`` where it is in the
    data set, wherever that lies."""

    split: str
    label: int
    image: bytes
    name: str
    id: int | None = None
    place: str = ""


def threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def shard_files(folder: Path, entry: Shards) -> dict[str, list[Path]]:
    """The shards of each split, in order; a `DataError` if a split that is needed has none or one is skipped."""
    found: dict[str, list[Path]] = {}
    for split in dict.fromkeys((*entry.splits, *entry.counts)):
        paths = sorted(folder.glob(f"{split}-*.npz"))
        for i, path in enumerate(paths):
            if path.name != shard_name(split, i):
                raise DataError(f"The shard {folder / shard_name(split, i)} is missing: after it comes {path.name}.")
        if paths:
            found[split] = paths
        elif split in entry.splits:
            raise DataError(
                f"The shard {folder / shard_name(split, 0)} is missing: {entry.name} needs a {split} split."
            )
    return found


def shard_name(split: str, i: int) -> str:
    """File name of the i-th shard of a split."""
    return f"{split}-{i:02d}.npz"


def read_shard(path: Path, entry: Shards) -> Shard:
    """A shard whose structure is sound: offsets, lengths, types. Images are not decoded."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in ("image", "offset", "label")}
            number = arrays["id"] if "id" in arrays.files else None
    except FileNotFoundError:
        raise DataError(f"The shard {path} is missing. Run '{entry.repair}'.") from None
    except KeyError as error:
        raise DataError(f"The shard {path} lacks the array {error.args[0].split()[0]!r}. {_again(entry)}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, AttributeError) as error:
        raise DataError(f"The shard {path} cannot be read ({error}): cut short or damaged. {_again(entry)}") from error
    image, offset, label = held["image"], held["offset"], held["label"]
    n = len(label) if label.ndim == 1 else -1
    wrong = ""
    if image.dtype != np.uint8 or image.ndim != 1:
        wrong = f"'image' is {image.dtype} {image.shape}, not a row of uint8"
    elif label.dtype != np.uint8 or n < 0:
        wrong = f"'label' is {label.dtype} {label.shape}, not a row of uint8"
    elif n == 0:
        wrong = "it holds no image"
    elif offset.dtype != np.int64 or offset.shape != (n + 1,):
        wrong = f"'offset' is {offset.dtype} {offset.shape}, not int64 ({n + 1},)"
    elif offset[0] != 0 or offset[-1] != len(image) or (np.diff(offset) <= 0).any():
        wrong = f"'offset' does not lead from 0 to {len(image)} step by step"
    elif entry.numbers and (number is None or number.dtype != np.int32 or number.shape != (n,)):
        wrong = f"'id' is {'missing' if number is None else f'{number.dtype} {number.shape}'}, not int32 ({n},)"
    if wrong:
        raise DataError(f"The shard {path} is not sound: {wrong}. {_again(entry)}")
    return Shard(path, image, offset, label, number)


def check_sizes(shard: Shard, entry: Shards) -> None:
    """Raise unless the header of every image promises the right size."""
    for i in range(len(shard)):
        _open(shard, i, entry).close()


def check_numbers(shards: Sequence[Shard], split: str, entry: Shards) -> None:
    """Raise if an image is there twice, or is not one of its split in the official partition."""
    if not entry.numbers:
        return
    (first, last), where = entry.numbers[split], shards[0].path.parent
    numbers = np.concatenate([shard.id for shard in shards if shard.id is not None])
    outside = numbers[(numbers < first) | (numbers > last)]
    if len(outside):
        raise DataError(
            f"Image {outside[0]} is in the {split} split of {where}; that split has the images {first} to {last}. "
            f"{_again(entry)}"
        )
    values, counts = np.unique(numbers, return_counts=True)
    if (counts > 1).any():
        raise DataError(f"Image {values[counts > 1][0]} is twice in the {split} split of {where}. {_again(entry)}")


def check_labels(labels: np.ndarray, classes: Sequence[str], where: object, repair: str) -> list[int]:
    """Samples per class; a `DataError` if a label has no class or a class no sample."""
    if len(labels) and (largest := int(labels.max())) >= len(classes):
        raise DataError(
            f"{where} has the label {largest}; the {len(classes)} classes are 0 to {len(classes) - 1}. Run '{repair}'."
        )
    counts = np.bincount(labels, minlength=len(classes))
    missing = [name for name, count in zip(classes, counts, strict=True) if not count]
    if missing:
        held = len(classes) - len(missing)
        raise DataError(
            f"{where} has {held} classes, not {len(classes)}: no sample of {', '.join(missing)}. Run '{repair}'."
        )
    return [int(count) for count in counts]


def decode(shards: Sequence[Shard], entry: Shards, what: str, on_progress: OnProgress = ignore) -> Iterator[np.ndarray]:
    """The images of shards, in order, a few thousand at a time: uint8 ``(n, channels, height, width)``."""
    total, done = sum(map(len, shards)), 0
    with ThreadPoolExecutor(threads()) as pool:
        for shard in shards:
            for start in range(0, len(shard), _CHUNK):
                chunk = np.empty((min(_CHUNK, len(shard) - start), *entry.shape), dtype=np.uint8)

                def block(first: int, shard: Shard = shard, start: int = start, chunk: np.ndarray = chunk) -> None:
                    for i in range(first, min(first + _BLOCK, len(chunk))):
                        chunk[i] = _pixels(shard, start + i, entry)

                list(pool.map(block, range(0, len(chunk), _BLOCK)))
                done += len(chunk)
                on_progress(Progress(what, done, total, "images"))
                yield chunk


def _pixels(shard: Shard, i: int, entry: Shards) -> np.ndarray:
    with _open(shard, i, entry) as picture:
        try:
            pixels_HWC = np.asarray(picture)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"Image {i} of the shard {shard.path} is damaged ({error}). {_again(entry)}") from error
    return pixels_HWC.transpose(2, 0, 1)


def _open(shard: Shard, i: int, entry: Shards) -> Any:
    from PIL import Image

    try:
        picture = Image.open(io.BytesIO(shard.encoded(i)), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"Image {i} of the shard {shard.path} is no image ({_said(error)}). {_again(entry)}") from error
    _, height, width = entry.shape
    if picture.size != (width, height) or picture.mode != "RGB":
        raise DataError(
            f"Image {i} of the shard {shard.path} is {picture.width}×{picture.height} {picture.mode}, "
            f"not {width}×{height} RGB. {_again(entry)}"
        )
    return picture


def pack(
    samples: Iterable[Encoded], entry: Shards, folder: Path, on_progress: OnProgress = ignore
) -> dict[str, list[int]]:
    """Resize and encode images and write them as shards, shuffled within each split in an order that depends on their
    places alone. Returns the labels of each split.
    """
    packed: dict[str, list[tuple[str, tuple[int, int | None, bytes]]]] = {}
    total, done = sum(entry.counts.values()), 0
    with ThreadPoolExecutor(threads()) as pool:
        for group in _groups(samples, 8 * _BLOCK):
            for sample, webp in zip(group, pool.map(_webp(entry), group), strict=True):
                packed.setdefault(sample.split, []).append((sample.place, (sample.label, sample.id, webp)))
            done += len(group)
            on_progress(Progress("packing", done, total, "images"))
    labels = {}
    for split, placed in packed.items():
        rows = [row for _, row in sorted(placed, key=lambda each: each[0])]
        labels[split] = [label for label, _, _ in rows]
        order = np.random.default_rng(_ORDER_SEED).permutation(len(rows))
        for i, start in enumerate(range(0, len(rows), entry.per_shard)):
            _write_shard(folder / shard_name(split, i), [rows[j] for j in order[start : start + entry.per_shard]])
    return labels


def _write_shard(path: Path, rows: Sequence[tuple[int, int | None, bytes]]) -> None:
    arrays = {
        "image": np.frombuffer(b"".join(webp for _, _, webp in rows), dtype=np.uint8),
        "offset": np.cumsum([0, *(len(webp) for _, _, webp in rows)], dtype=np.int64),
        "label": np.array([label for label, _, _ in rows], dtype=np.uint8),
    }
    if rows[0][1] is not None:
        arrays["id"] = np.array([number for _, number, _ in rows], dtype=np.int32)
    with path.open("wb") as stream:
        np.savez(stream, **arrays)  # type: ignore[arg-type]


def _webp(entry: Shards) -> Callable[[Encoded], bytes]:
    from PIL import Image

    def encode(sample: Encoded) -> bytes:
        try:
            with Image.open(io.BytesIO(sample.image), formats=_FORMATS) as opened:
                picture = opened.convert("RGB")
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(
                f"{sample.name} is no image, or a damaged one ({_said(error)}). Download it again."
            ) from error
        if entry.original and picture.size != entry.original:
            wanted = "×".join(map(str, entry.original))
            raise DataError(
                f"{sample.name} is {picture.width}×{picture.height}, not {wanted}. Take the official archive."
            )
        if entry.crop:
            left, top = (picture.width - entry.crop) // 2, (picture.height - entry.crop) // 2
            picture = picture.crop((left, top, left + entry.crop, top + entry.crop))
        stream = io.BytesIO()
        resized = picture.resize((entry.shape[2], entry.shape[1]), Image.Resampling.BICUBIC)
        resized.save(stream, "WEBP", quality=entry.quality)
        return stream.getvalue()

    return encode


def _groups(samples: Iterable[Encoded], size: int) -> Iterator[list[Encoded]]:
    group: list[Encoded] = []
    for sample in samples:
        group.append(sample)
        if len(group) == size:
            yield group
            group = []
    if group:
        yield group


def _said(error: Exception) -> str:
    from PIL import UnidentifiedImageError

    return f"not {', '.join(_FORMATS)}" if isinstance(error, UnidentifiedImageError) else str(error)


def _again(entry: Shards) -> str:
    return f"Run '{entry.repair}'."
