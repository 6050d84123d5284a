"""Features of a data set under a frozen encoder: computed once, kept with their provenance, taken again if it agrees.

An encoder is public and sees one image at a time, so features cost no privacy: changing one image changes one row.
That ends where statistics of the private images enter, so nothing here standardizes over the data.
"""

import dataclasses
import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import safetensors
import torch
import torch.nn.functional as F
from torch import Tensor

from dpscale.checks import out_of_memory, require, require_count
from dpscale.files import clear
from dpscale.lab.data import Data
from dpscale.lab.datasets.folder import DiskFull, OnProgress, Progress, checksum, data_folder, ignore, locked
from dpscale.lab.encoders import registry, weights
from dpscale.lab.encoders.registry import Encoder
from dpscale.lab.provenance import installed_versions
from dpscale.provenance import source_commit

FORMAT = 2
"""Version of how images are prepared and features are stored; older files are computed anew."""

_TYPES = {torch.float32: "float32", torch.float16: "float16"}


def features(data: Data, encoder: str | Encoder, *, normalize: Literal["l2"] | None = None, **how: Any) -> Data:
    """``data`` with features ``(N, d)`` in float32 in place of its images.

    ``provenance["features"]`` of the result names the encoder, the checksums of weights and images, the size, and
    the file that holds them.

    Args:
        data, encoder, how: as `extract` takes them.
        normalize: ``"l2"`` divides each row by its own norm, which no other row enters. The file has the raw ones.
    """
    require(normalize in (None, "l2"), "features", "normalize", "'l2' or None", normalize)
    found = extract(data, encoder, **how)
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
    """The features as stored.

    Stored features are taken if encoder, weights, images, size and type are the same, and their own checksum is right;
    versions of software may differ. Where the weights are not at hand, features made elsewhere from the same images are
    taken as they are.

    Args:
        data: colour images ``(N, 3, height, width)``, uint8 or floating point in [0, 1].
        encoder: a name in `ENCODERS`.
        folder: the data folder; weights lie in its ``encoders``, features in its ``features``.
        checkpoint: a file of weights instead of the data folder's.
        device: where to compute; a GPU if there is one.
        batch: images at a time: changes speed and memory alone.
        size: images are resized to ``size`` × ``size``: bicubic, antialiased, cut off to [0, 1].
        dtype: of the stored features: float32, or float16 for half the bytes.
        on_progress: called after each batch, and when a phase begins.
    """
    chosen = registry.encoder(encoder) if isinstance(encoder, str) else encoder
    place = _checked(data, device, batch, size, dtype)
    folder, sha256 = data_folder(folder), _sha256(data.train_images, data.test_images)
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
    slug, rest = _slug(data.name), f"{chosen.name}-{size}-{_TYPES[dtype]}.safetensors"
    whole = path = folder / "features" / f"{slug}-{rest}"
    if "train_size" in data.provenance:  # a part of a data set must not take the place of the whole
        path = whole.with_name(f"{slug}-{sha256[:8]}-{rest}")
    if (kept := _read(path, asked) or _read(whole, asked)) is not None:
        return kept
    with locked(path.parent, path.stem):
        if (kept := _read(path, asked)) is not None:  # made by another process meanwhile
            return kept
        clear(path)
        total = len(data.train_images) + len(data.test_images)
        if source is None:
            on_progress(Progress("fetching the encoder", 0, total, "images"))
            source = registry.checkpoint(chosen, folder)
            asked["weights_sha256"] = _weights_sha256(source, own=True)
        if shutil.disk_usage(path.parent).free < total * chosen.features * dtype.itemsize:
            raise DiskFull(path)  # before hours of computing, not after
        on_progress(Progress("loading the encoder", 0, total, "images"))
        train, test = _computed(data, chosen, source, place, batch, size, on_progress)
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


@torch.no_grad()
def _computed(
    data: Data, encoder: Encoder, source: Path, device: torch.device, batch: int, size: int, on_progress: OnProgress
) -> tuple[Tensor, Tensor]:
    parts, done, total = [], 0, len(data.train_images) + len(data.test_images)
    try:
        model = encoder.load(source).to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        for some in (*data.train_images.split(batch), *data.test_images.split(batch)):
            parts.append(model(prepare(some.to(device), size)).cpu())
            done += len(some)
            on_progress(Progress("computing", done, total, "images"))
    except RuntimeError as error:
        if not out_of_memory(error):
            raise
        raise ValueError(
            f"{device} has no room for {encoder.name} on {batch} images of {size} × {size}. Choose a smaller --batch "
            "or --size or another --device for 'dpscale features'; other commands take what it stores."
        ) from error
    rows = torch.cat(parts)
    if not rows.isfinite().all() or (len(rows) > 1 and bool((rows == rows[0]).all())):
        raise ValueError(
            f"The features of {encoder.name} with the weights in {source} are not finite or the same for every image: "
            "the weights are damaged or badly converted."
        )
    return rows[: len(data.train_images)], rows[len(data.train_images) :]


def prepare(images_NCHW: Tensor, size: int) -> Tensor:
    """Images as encoders take them: RGB in [0, 1], ``size`` × ``size``, bicubic with antialiasing."""
    x = images_NCHW.float() / 255.0 if images_NCHW.dtype == torch.uint8 else images_NCHW.float()
    x = F.interpolate(x, size=(size, size), mode="bicubic", antialias=True).clamp_(0.0, 1.0)
    return x.contiguous(memory_format=torch.channels_last)


def _sha256(*tensors: Tensor) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)} {tensor.dtype};".encode())
        for some in tensor.split(4096):
            digest.update(some.cpu().contiguous().numpy().data)
    return digest.hexdigest()


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
    found, seal = checksum(path, "sha256"), path.with_name(f"{path.name}.sha256")
    if own and seal.is_file() and seal.read_text(encoding="utf-8").split()[:1] != [found]:
        raise ValueError(f"The file {path} has changed since it was made: delete it and {seal.name} to fetch it again.")
    return found


def _checked(data: Data, device: torch.device | str | None, batch: int, size: int, dtype: torch.dtype) -> torch.device:
    """The device to compute on; whatever cannot be computed is refused."""
    require_count("features", "batch", batch)
    require_count("features", "size", size)
    require(dtype in _TYPES, "features", "dtype", "torch.float32 or torch.float16", dtype)
    for images in (data.train_images, data.test_images):
        kind = images.dtype == torch.uint8 or images.is_floating_point()
        if images.ndim != 4 or images.shape[1] != 3 or not kind:
            raise ValueError(
                "An encoder takes colour images (N, 3, height, width), uint8 or floating point in [0, 1]. "
                f"{data.name!r} has {tuple(images.shape)} of {images.dtype}."
            )
    try:
        return torch.empty(0, device=device or ("cuda" if torch.cuda.is_available() else "cpu")).device
    except (RuntimeError, AssertionError) as error:  # what torch raises where a kind of device is not built in
        raise ValueError(f"torch has no device {str(device)!r} here: {str(error).splitlines()[0]}") from error


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name.lower()).strip("-.") or "data"
