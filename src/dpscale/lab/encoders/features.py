"""Features of a data set under a frozen encoder: computed once, kept with their provenance, taken again if it agrees.

An encoder is public and sees one image at a time, so features cost no privacy: changing one image changes one row.
That ends where statistics of the private images enter, so nothing here standardizes over the data.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.checks import out_of_memory, require, require_count
from dpscale.files import clear
from dpscale.lab.data import Data
from dpscale.lab.datasets.folder import VARIABLE, OnProgress, Progress, checksum, data_folder, ignore, locked
from dpscale.lab.encoders import registry, weights
from dpscale.lab.encoders.registry import Encoder
from dpscale.lab.provenance import installed_versions, source_commit

FORMAT = 2
"""Version of how images are prepared and features are stored; older files are computed anew."""

Normalize = Literal["l2"]
_TYPES = {torch.float32: "float32", torch.float16: "float16"}


def features(
    data: Data,
    encoder: str | Encoder,
    *,
    folder: Path | None = None,
    checkpoint: Path | None = None,
    device: torch.device | str | None = None,
    batch: int = 128,
    size: int = 224,
    dtype: torch.dtype = torch.float32,
    normalize: Normalize | None = None,
    on_progress: OnProgress = ignore,
) -> Data:
    """``data`` with features ``(N, d)`` in float32 in place of its images.

    ``provenance["features"]`` of the result names the encoder, the checksums of weights and images, the size, and
    the file that holds them.

    Args:
        data: colour images ``(N, 3, height, width)``, uint8 or floating point in [0, 1].
        encoder: a name in `ENCODERS`.
        folder: the data folder; weights lie in its ``encoders``, features in its ``features``.
        checkpoint: a file of weights instead of the data folder's.
        device: where to compute; a GPU if there is one.
        batch: images at a time: changes speed and memory alone.
        size: images are resized to ``size`` × ``size``: bicubic, antialiased, cut off to [0, 1].
        dtype: of the stored features: float32, or float16 for half the bytes.
        normalize: ``"l2"`` divides each row by its own norm, which no other row enters. The file has the raw ones.
        on_progress: called after each batch, and when a phase begins.
    """
    require(normalize in (None, "l2"), "features", "normalize", "'l2' or None", normalize)
    found = extract(
        data, encoder, folder=folder, checkpoint=checkpoint, device=device, batch=batch, size=size, dtype=dtype,
        on_progress=on_progress,
    )  # fmt: skip
    train, test = found.train.float(), found.test.float()
    if normalize == "l2":
        train, test = F.normalize(train, dim=1), F.normalize(test, dim=1)
    made = {**found.provenance, "normalize": normalize, "file": str(found.path)}
    return dataclasses.replace(
        data,
        name=f"{data.name}, {found.provenance['encoder']} features",
        train_images=train,
        test_images=test,
        provenance={**data.provenance, "features": made},
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Extracted:
    """Features as stored, the file that holds them, where they come from, and whether they were there already."""

    train: Tensor
    test: Tensor
    path: Path
    provenance: Mapping[str, Any]
    reused: bool


def extract(
    data: Data,
    encoder: str | Encoder,
    *,
    folder: Path | None = None,
    checkpoint: Path | None = None,
    device: torch.device | str | None = None,
    batch: int = 128,
    size: int = 224,
    dtype: torch.dtype = torch.float32,
    on_progress: OnProgress = ignore,
) -> Extracted:
    """The features as stored; the arguments are those of `features`.

    Stored features are taken if encoder, weights, images, size and type are the same, and their own checksum is right;
    versions of software may differ. Where the weights are not at hand, features made elsewhere from the same images are
    taken as they are.
    """
    chosen = registry.encoder(encoder) if isinstance(encoder, str) else encoder
    require_count("features", "batch", batch)
    require_count("features", "size", size)
    require(dtype in _TYPES, "features", "dtype", "torch.float32 or torch.float16", dtype)
    for name, images in (("train", data.train_images), ("test", data.test_images)):
        _require_images(data.name, name, images)
    place = _device(device)
    folder = data_folder(folder)
    sha256 = images_sha256(data)
    rest = f"{chosen.name}-{size}-{_TYPES[dtype]}.safetensors"
    whole = folder / "features" / f"{_slug(data.name)}-{rest}"
    # A part of a data set has a file of its own: it must not take the place of the whole.
    part = whole.with_name(f"{_slug(data.name)}-{sha256[:8]}-{rest}")
    path = part if "train_size" in data.provenance else whole
    asked: dict[str, Any] = {
        "format": FORMAT,
        "encoder": chosen.name,
        "size": size,
        "dtype": _TYPES[dtype],
        "data": data.name,
        "data_sha256": sha256,
    }
    source = checkpoint or chosen.checkpoint(folder)
    if source is not None:
        asked["weights_sha256"] = _weights_sha256(source, own=checkpoint is None)
    if (kept := _read(path, asked) or _read(whole, asked)) is not None:
        return kept
    with locked(path.parent, path.stem) as alone:
        if (kept := _read(path, asked)) is not None:  # made by another process meanwhile
            return kept
        if alone:
            clear(path)
        total = len(data.train_images) + len(data.test_images)
        if source is None:
            on_progress(Progress("fetching the encoder", 0, total, "images"))
            source = registry.checkpoint(chosen, folder)
            asked["weights_sha256"] = _weights_sha256(source, own=True)
        _require_room(path, total * chosen.features * dtype.itemsize)
        on_progress(Progress("loading the encoder", 0, total, "images"))
        model = chosen.load(source)
        with _memory_advice(place, chosen.name, "another --device"):
            model = model.to(place).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        compute = _Compute(
            model=model, name=chosen.name, device=place, batch=batch, size=size, total=total, on_progress=on_progress
        )
        train = compute(data.train_images)
        test = compute(data.test_images, before=len(train))
        for rows in (train, test):
            _require_sound(rows, chosen, source)
        train, test = train.to(dtype), test.to(dtype)
        made = {
            **asked,
            "encoder_title": chosen.title,
            "origin": chosen.origin,
            "features": train.shape[1],
            "features_sha256": _sha256(train, test),
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
            "versions": installed_versions(),
            "commit": source_commit(),
        }
        weights.write(path, {"train": train, "test": test}, {"provenance": json.dumps(made, sort_keys=True)})
    return Extracted(train=train, test=test, path=path, provenance=made, reused=False)


@dataclass(frozen=True, kw_only=True)
class _Compute:
    model: nn.Module
    name: str
    device: torch.device
    batch: int
    size: int
    total: int
    on_progress: OnProgress

    @torch.no_grad()
    def __call__(self, images: Tensor, before: int = 0) -> Tensor:
        parts = []
        for some in images.split(self.batch):
            what = f"{len(some)} images of {self.size} × {self.size} under {self.name}"
            smaller = f"--batch, such as {len(some) // 2}," if len(some) > 1 else "--size"
            with _memory_advice(self.device, what, f"a smaller {smaller} or another --device"):
                parts.append(self.model(prepare(some.to(self.device), self.size)).cpu())
            before += len(some)
            self.on_progress(Progress("computing", before, self.total, "images"))
        return torch.cat(parts)


@contextmanager
def _memory_advice(device: torch.device, what: str, options: str) -> Iterator[None]:
    """Say what to do when an encoder does not fit: the ``options`` of one command, which may not be the one at work."""
    try:
        yield
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"{device} has no room for {what}. Choose {options} for 'dpscale features'; "
            "other commands take what it stores."
        ) from error


def prepare(images_NCHW: Tensor, size: int) -> Tensor:
    """Images as encoders take them: RGB in [0, 1], ``size`` × ``size``, bicubic with antialiasing."""
    x = images_NCHW.float() / 255.0 if images_NCHW.dtype == torch.uint8 else images_NCHW.float()
    x = F.interpolate(x, size=(size, size), mode="bicubic", antialias=True).clamp_(0.0, 1.0)
    return x.contiguous(memory_format=torch.channels_last)


def images_sha256(data: Data) -> str:
    """Checksum of the images, in order, with their shapes and type; labels do not enter the features."""
    return _sha256(data.train_images, data.test_images)


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        for some in tensor.split(4096):
            digest.update(some.cpu().contiguous().numpy().data)
    return digest.hexdigest()


def _device(asked: torch.device | str | None) -> torch.device:
    if asked is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=asked).device
    except (RuntimeError, AssertionError) as error:  # what torch raises where a kind of device is not built in
        raise ValueError(f"torch has no device {str(asked)!r} here: {str(error).splitlines()[0]}") from error


def _read(path: Path, asked: Mapping[str, Any]) -> Extracted | None:
    # Unreadable or damaged is as good as absent: it is computed again, and replaced.
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            made = json.loads((file.metadata() or {})["provenance"])
            if any(made.get(name) != value for name, value in asked.items()):
                return None
            train, test = file.get_tensor("train"), file.get_tensor("test")
        if _sha256(train, test) != made["features_sha256"]:
            return None
    except (FileNotFoundError, safetensors.SafetensorError, KeyError, json.JSONDecodeError):
        return None
    return Extracted(train=train, test=test, path=path, provenance=made, reused=True)


def _weights_sha256(path: Path, *, own: bool) -> str:
    if not path.is_file():
        raise ValueError(f"There is no checkpoint {path}.")
    found = checksum(path, "sha256")
    seal = path.with_name(f"{path.name}.sha256")
    if own and seal.is_file() and seal.read_text(encoding="utf-8").split()[:1] != [found]:
        raise ValueError(f"The file {path} has changed since it was made: delete it and {seal.name} to fetch it again.")
    return found


def _require_images(name: str, part: str, images: Tensor) -> None:
    wrong = f"{tuple(images.shape)} of {images.dtype}"
    right = images.ndim == 4 and images.shape[1] == 3 and min(images.shape) > 0
    if not right or not (images.dtype == torch.uint8 or images.is_floating_point()):
        raise ValueError(
            f"An encoder takes colour images (N, 3, height, width), uint8 or floating point in [0, 1]. "
            f"The {part} images of {name!r} are {wrong}."
        )


def _require_room(path: Path, wanted: int) -> None:
    # Told before hours of computing, not after.
    if (free := shutil.disk_usage(path.parent).free) < wanted:
        raise OSError(
            f"The features take {wanted / 1e6:,.1f} MB, and the disk that {path} is on has {free / 1e6:,.1f} MB left. "
            f"Free some room, or choose another folder with --data or ${VARIABLE}."
        )


def _require_sound(rows: Tensor, encoder: Encoder, source: Path) -> None:
    same = len(rows) > 1 and bool((rows == rows[0]).all())
    if same or not rows.isfinite().all():
        raise ValueError(
            f"The features of {encoder.name} with the weights in {source} are "
            f"{'the same for every image' if same else 'not finite'}: the weights are damaged or badly converted."
        )


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "data"
