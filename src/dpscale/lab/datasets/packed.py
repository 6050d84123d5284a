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
from dpscale.lab.datasets.folder import DataError, OnProgress, Progress, ignore

_ORDER_SEED = 0  # the order of packed images within a split: one fixed choice
_FORMATS = ("WEBP", "JPEG", "PNG")  # files of strangers meet no other decoder
_CHUNK = 4096


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
        paths = sorted(folder.glob(f"{split}-*.npz"))
        for i in range(max(len(paths), split in entry.splits)):
            if (path := folder / shard_name(split, i)) not in paths:
                raise DataError(f"The shard {path} is missing. {entry.repair}")
        if paths:
            found[split] = [_read_shard(path, entry) for path in paths]
    return found


def labels_of(shards: Sequence[Shard]) -> np.ndarray:
    """The labels of several shards, one after the other."""
    return np.concatenate([shard.label for shard in shards])


def shard_name(split: str, i: int) -> str:
    """File name of the i-th shard of a split."""
    return f"{split}-{i:02d}.npz"


def _read_shard(path: Path, entry: Entry) -> Shard:
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
            shard = Shard(path, held["image"], held["offset"], held["label"], held.get("id"))
    except (KeyError, OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"The shard {path} cannot be read ({error}): cut short or damaged. {entry.repair}") from error
    image, offset, label, n = shard.image, shard.offset, shard.label, len(shard)
    rules = {
        "'image' must be a row of uint8": image.dtype == np.uint8 and image.ndim == 1,
        "'label' must be a row of uint8": label.dtype == np.uint8 and label.shape == (n,) != (0,),
        f"labels must be below {len(entry.classes)}": label.max(initial=0) < len(entry.classes),
        f"'offset' must be int64 ({n + 1},)": offset.dtype == np.int64 and offset.shape == (n + 1,),
        "'offset' must begin at 0 and end with 'image'": offset[0] == 0 and offset[-1] == len(image),
        "'offset' must rise": (np.diff(offset) > 0).all(),
        f"'id' must be int32 ({n},)": not entry.numbers or (shard.id is not None and shard.id.shape == (n,)),
    }
    if broken := [rule for rule, holds in rules.items() if not holds]:
        raise DataError(f"The shard {path} is not sound: {broken[0]}. {entry.repair}")
    return shard


def check_split(shards: Sequence[Shard], split: str, entry: Entry, on_progress: OnProgress) -> None:
    """Raise unless every image's header promises the right size, every class is there, and numbers are the split's."""
    labels, done = labels_of(shards), 0
    for shard in shards:
        for i in range(len(shard)):
            _opened(shard, i, entry).close()
        done += len(shard)
        on_progress(Progress(f"checking {split}", done, len(labels), "images"))
    if missing := [name for i, name in enumerate(entry.classes) if i not in labels]:
        raise DataError(f"The {split} split has no sample of {', '.join(missing)}. {entry.repair}")
    if entry.numbers:
        first, last = entry.numbers[split]
        numbers = np.concatenate([shard.id for shard in shards if shard.id is not None])
        if numbers.min() < first or numbers.max() > last or len(np.unique(numbers)) < len(numbers):
            raise DataError(f"The {split} split must have images {first} to {last}, each once. {entry.repair}")


def decode(shards: Sequence[Shard], entry: Entry, what: str, on_progress: OnProgress = ignore) -> Iterator[np.ndarray]:
    """The images of shards, in order, a few thousand at a time: uint8 ``(n, channels, height, width)``."""
    total, done = sum(map(len, shards)), 0
    with ThreadPoolExecutor() as pool:
        for shard in shards:
            for start in range(0, len(shard), _CHUNK):
                some = range(start, min(start + _CHUNK, len(shard)))
                images_NHWC = np.stack(list(pool.map(partial(_pixels, shard, entry=entry), some)))
                chunk = np.ascontiguousarray(images_NHWC.transpose(0, 3, 1, 2))
                done += len(chunk)
                on_progress(Progress(what, done, total, "images"))
                yield chunk


def _pixels(shard: Shard, i: int, entry: Entry) -> np.ndarray:
    with _opened(shard, i, entry) as picture:
        try:
            return np.asarray(picture)
        except (OSError, ValueError, SyntaxError) as error:
            raise DataError(f"Image {i} of the shard {shard.path} is damaged ({error}). {entry.repair}") from error


def _opened(shard: Shard, i: int, entry: Entry) -> Image.Image:
    try:
        encoded = shard.image[shard.offset[i] : shard.offset[i + 1]].tobytes()
        picture = Image.open(io.BytesIO(encoded), formats=_FORMATS)
    except (OSError, ValueError, SyntaxError) as error:
        kinds = ", ".join(_FORMATS)
        raise DataError(f"Image {i} of the shard {shard.path} is none of {kinds}. {entry.repair}") from error
    wanted = f"{entry.shape[2]}×{entry.shape[1]} RGB"
    if (found := f"{picture.width}×{picture.height} {picture.mode}") != wanted:
        raise DataError(f"Image {i} of the shard {shard.path} is {found}, not {wanted}. {entry.repair}")
    return picture


def pack(samples: Iterable[Encoded], entry: Entry, folder: Path, on_progress: OnProgress = ignore) -> dict[str, int]:
    """Resize and encode images and write them as shards, shuffled within each split in an order that depends on their
    places alone. Returns how many images each split has.
    """
    packed: dict[str, list[tuple[str, tuple[int, int | None, bytes]]]] = {}
    total, done, samples = sum(entry.counts.values()), 0, iter(samples)
    with ThreadPoolExecutor() as pool:
        while group := list(itertools.islice(samples, 512)):
            for sample, webp in zip(group, pool.map(partial(_webp, entry), group), strict=True):
                packed.setdefault(sample.split, []).append((sample.place, (sample.label, sample.id, webp)))
            done += len(group)
            on_progress(Progress("packing", done, total, "images"))
    for split, placed in packed.items():
        placed.sort(key=lambda each: each[0])
        order = np.random.default_rng(_ORDER_SEED).permutation(len(placed))
        for i, start in enumerate(range(0, len(order), entry.per_shard)):
            _write_shard(folder / shard_name(split, i), [placed[j][1] for j in order[start : start + entry.per_shard]])
    return {split: len(placed) for split, placed in packed.items()}


def _write_shard(path: Path, rows: Sequence[tuple[int, int | None, bytes]]) -> None:
    labels, numbers, images = zip(*rows, strict=True)
    arrays = {
        "image": np.frombuffer(b"".join(images), dtype=np.uint8),
        "offset": np.cumsum([0, *map(len, images)], dtype=np.int64),
        "label": np.array(labels, dtype=np.uint8),
    }
    if numbers[0] is not None:
        arrays["id"] = np.array(numbers, dtype=np.int32)
    np.savez(path, **arrays)  # type: ignore[arg-type]


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
    picture.resize((entry.shape[2], entry.shape[1]), Image.Resampling.BICUBIC).save(
        stream, "WEBP", quality=entry.quality
    )
    return stream.getvalue()
