"""Files of tensors: read without executing anything in them, written whole or not at all."""

from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from torch import Tensor

from dpscale.files import replacing
from dpscale.lab.datasets.folder import explained


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor in a ``.safetensors`` or torch file. Of a torch file with several networks, the one ``"resnet"``."""
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        held = torch.load(path, map_location="cpu", weights_only=True)
        return dict(held.get("resnet", held))
    except Exception as error:  # a damaged file can raise anything
        reason = str(error).partition("\n")[0]
        raise ValueError(f"The file {path} cannot be read as tensors alone (cut short, perhaps): {reason}") from error


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all."""
    with explained(path), replacing(path) as temporary:
        temporary.write_bytes(safetensors.torch.save(dict(tensors), dict(metadata)))
