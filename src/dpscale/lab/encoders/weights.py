"""Files of weights: read, compared with what a model needs, written whole or not at all."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dpscale.files import replacing
from dpscale.lab.datasets.folder import room

_SHOWN = 5


def read(path: Path) -> dict[str, Tensor]:
    """Every tensor in a ``.safetensors``, ``.pth`` or ``.pt`` file; tensors in nested dicts get dotted names.

    A torch file is read as tensors alone: nothing in it is executed.
    """
    if not path.is_file():
        raise ValueError(f"There is no file {path}.")
    if path.suffix == ".safetensors":
        try:
            return safetensors.torch.load_file(path)
        except safetensors.SafetensorError as error:
            raise ValueError(f"The file {path} is not safetensors (cut short, perhaps): {error}.") from error
    if path.suffix not in {".pth", ".pt"}:
        raise ValueError(f"The file {path} must be .safetensors, .pth or .pt.")
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise ValueError(f"The file {path} cannot be read as tensors alone (cut short, perhaps).") from error
    found: dict[str, Tensor] = {}
    _flatten(held, "", found)
    return found


def _flatten(held: object, name: str, found: dict[str, Tensor]) -> None:
    if isinstance(held, Tensor):
        found[name] = held
    elif isinstance(held, Mapping):
        for key, inner in held.items():
            _flatten(inner, f"{name}.{key}" if name else str(key), found)


def check(found: Mapping[str, Tensor], expected: Mapping[str, Sequence[int]], what: str) -> None:
    """Raise a ``ValueError`` that names the tensors which are missing, unexpected or of another shape."""
    problems = []
    if missing := [name for name in expected if name not in found]:
        problems.append(f"lacks {_some(missing)}")
    if unexpected := [name for name in found if name not in expected]:
        problems.append(f"has {_some(unexpected)}, which the encoder does not have")
    for name in [name for name in expected if name in found and tuple(found[name].shape) != tuple(expected[name])]:
        problems.append(f"has {name} of shape {tuple(found[name].shape)} instead of {tuple(expected[name])}")
    if problems:
        raise ValueError(f"{what} does not fit the encoder: it {_some(problems, '; it ')}.")


def _some(names: Sequence[str], between: str = ", ") -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return between.join(names[:_SHOWN]) + more


def write(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file whole or not at all."""
    with room(path), replacing(path) as temporary:
        try:
            safetensors.torch.save_file(dict(tensors), temporary, metadata=dict(metadata))
        except safetensors.SafetensorError as error:
            # safetensors tells of a full disk in its own exception, by the system's number alone.
            if (number := re.search(r"\(os error (\d+)\)", str(error))) is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def halved(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Kernels and matrices in float16, for transport; vectors stay as they are (variances would overflow)."""
    return {name: tensor.half() if tensor.ndim > 1 else tensor for name, tensor in state.items()}
