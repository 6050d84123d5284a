"""Shards: ``.npz`` files of encoded images, and the arrays that they decode to.

A shard holds ``image`` (uint8, encoded images end to end), ``offset`` (int64, n + 1), ``label`` (uint8) and, where
images are numbered, ``id`` (int32).
"""

import io
import itertools
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from dpscale.lab.datasets.catalogue import Entry
from dpscale.lab.datasets.disk import DataError, OnProgress, Progress, ignore

_ORDER_SEED = 0  # the order of packed images within a split: one fixed choice
_FORMATS = ("WEBP", "JPEG", "PNG")  # files of strangers meet no other decoder
_CHUNK = 4096


@dataclass(frozen=True, eq=False)
class Shard:
    """The content of a shard."""

    path: Path
    image: np.ndarray
    offset: np.ndarray
    label: np.ndarray

    def __len__(self) -> int:
        return len(self.label)


@dataclass(frozen=True)
class Encoded:
    """One image to be packed: ``place`` is where it is in the official data set, ``id`` its official number."""

    split: str
    label: int
    image: bytes
    place: str
    id: int | None = None


def read_shards(folder: Path, entry: Entry) -> dict[str, list[Shard]]:
    """The shards of each split, in order; a `DataError` if a split that is needed has none or one is skipped."""
    found = {}
    for split in dict.fromkeys((*entry.splits, *entry.counts)):
        count = max(len(list(folder.glob(f"{split}-*.npz"))), split in entry.splits)
        if count:
            found[split] = [_read_shard(folder / f"{split}-{i:02d}.npz", entry) for i in range(count)]
    return found


def labels_of(shards: Sequence[Shard]) -> np.ndarray:
    """The labels of several shards, one after the other."""
    return np.concatenate([shard.label for shard in shards])


def _read_shard(path: Path, entry: Entry) -> Shard:
    if not path.exists():
        raise DataError(f"The shard {path} is missing. {entry.repair}")
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            shard = Shard(path, held["image"], held["offset"], held["label"])
    except (KeyError, OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"The shard {path} cannot be read ({error}): cut short or damaged. {entry.repair}") from error
    whole = len(shard.offset) == len(shard) + 1 and shard.offset[-1] == len(shard.image)
    if not whole or shard.label.max() >= len(entry.classes):
        raise DataError(f"The shard {path} is not one of {entry.name}, or not sound. {entry.repair}")
    return shard


def decode(
    shards: Sequence[Shard], entry: Entry, what: str, on_progress: OnProgress = ignore
) -> Iterator[tuple[int, np.ndarray]]:
    """The images of shards, in order, a few thousand at a time: how many so far, and the last of them, uint8
    ``(n, channels, height, width)``."""
    total, done = sum(map(len, shards)), 0
    with ThreadPoolExecutor() as pool:
        for shard in shards:
            for start in range(0, len(shard), _CHUNK):
                some = range(start, min(start + _CHUNK, len(shard)))
                images_NHWC = np.stack(list(pool.map(partial(_pixels, shard, entry=entry), some)))
                done += len(some)
                on_progress(Progress(what, done, total, "images"))
                yield done, np.ascontiguousarray(images_NHWC.transpose(0, 3, 1, 2))


def _pixels(shard: Shard, i: int, entry: Entry) -> np.ndarray:
    encoded = shard.image[shard.offset[i] : shard.offset[i + 1]].tobytes()
    try:
        with Image.open(io.BytesIO(encoded), formats=_FORMATS) as picture:
            pixels = np.asarray(picture)
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"Image {i} of the shard {shard.path} is damaged ({error}). {entry.repair}") from error
    if pixels.shape != (*entry.shape[1:], entry.shape[0]):
        raise DataError(f"Image {i} of the shard {shard.path} is {pixels.shape}, not {entry.shape}. {entry.repair}")
    return pixels


def pack(samples: Iterable[Encoded], entry: Entry, folder: Path, on_progress: OnProgress = ignore) -> dict[str, int]:
    """Resize and encode images and write them as shards, shuffled within each split in an order that depends on their
    places alone. Returns how many images each split has.
    """
    packed: dict[str, list[tuple[str, int, int | None, bytes]]] = {}
    total, done, samples = sum(entry.counts.values()), 0, iter(samples)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(samples, 512)):
            for sample, webp in zip(group, pool.map(partial(_webp, entry), group), strict=True):
                packed.setdefault(sample.split, []).append((sample.place, sample.label, sample.id, webp))
            done += len(group)
            on_progress(Progress("packing", done, total, "images"))
    for split, placed in packed.items():
        placed.sort(key=lambda each: each[0])
        order = np.random.default_rng(_ORDER_SEED).permutation(len(placed))
        for i, start in enumerate(range(0, len(order), entry.per_shard)):
            _, labels, numbers, images = zip(*(placed[j] for j in order[start : start + entry.per_shard]), strict=True)
            np.savez(
                folder / f"{split}-{i:02d}.npz", image=np.frombuffer(b"".join(images), dtype=np.uint8),
                offset=np.cumsum([0, *map(len, images)], dtype=np.int64), label=np.array(labels, dtype=np.uint8),
                **({} if numbers[0] is None else {"id": np.array(numbers, dtype=np.int32)}),  # type: ignore[arg-type]
            )  # fmt: skip
    return {split: len(placed) for split, placed in packed.items()}


def _webp(entry: Entry, sample: Encoded) -> bytes:
    try:
        with Image.open(io.BytesIO(sample.image), formats=_FORMATS) as opened:
            picture = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise DataError(f"{sample.place} is no image, or a damaged one ({error}). Download it again.") from error
    if entry.original and picture.size != entry.original:
        wanted, found = ("×".join(map(str, size)) for size in (entry.original, picture.size))
        raise DataError(f"{sample.place} is {found}, not {wanted}. Take the official archive.")
    if entry.crop:
        left, top = (picture.width - entry.crop) // 2, (picture.height - entry.crop) // 2
        picture = picture.crop((left, top, left + entry.crop, top + entry.crop))
    stream = io.BytesIO()
    small = picture.resize((entry.shape[2], entry.shape[1]), Image.Resampling.BICUBIC)
    small.save(stream, "WEBP", quality=entry.quality)
    return stream.getvalue()
