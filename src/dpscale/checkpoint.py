"""Checkpoints: nested values in one file, JSON and tensors, without pickle; written whole or not at all.

The file is one of safetensors. The values lie in its header as JSON; where a value is a tensor, the JSON has its name.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from dpscale.checks import require
from dpscale.files import checksum, clear, is_unicode, locked, replacing

FORMAT = "dpscale-checkpoint-1"


def write(path: Path, value: Any) -> None:
    """Make ``value`` the content of a file. Until it is whole and on the disk, the file that was there before stays.

    Only this user may read it.
    """
    action = "Under another it could be written, and not be read again. Nothing was written."
    require(is_unicode(str(path)), "save", "path", "a name in UTF-8", str(path), action)
    tensors: dict[str, Tensor] = {}
    plain = json.dumps(_plain(value, tensors, "checkpoint"), allow_nan=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.parent):
            clear(path)
            with replacing(path, mode=0o600, durable=True) as temporary:
                header = {"format": FORMAT, "values": plain, "sum": checksum(plain)}
                safetensors.torch.save_file(tensors, temporary, header)
    except (OSError, safetensors.SafetensorError) as error:
        kept = "The one that was there before is unchanged." if path.exists() else "No file was left behind."
        raise OSError(f"The checkpoint {path} could not be written: {error}. {kept}") from error


def read(path: Path) -> Any:
    """The value that `write` made the content of a file. Tensors are on the CPU."""
    if not path.is_file():
        raise FileNotFoundError(f"There is no checkpoint {path}.")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            header = file.metadata() or {}
            found = header.get("format")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"{path} is damaged, or no checkpoint: {error}.") from error
    if found != FORMAT:
        told = "no checkpoint of a private run" if found is None else f"of the format {found!r}"
        raise ValueError(f"{path} is {told}. This release reads {FORMAT!r}. Nothing was changed.")
    try:
        if checksum(header["values"]) != header["sum"]:
            raise ValueError("its values are others than were written")
        return _nested(json.loads(header["values"]), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is damaged, or no checkpoint: {error!r}.") from error


def _plain(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """The value as JSON can hold it; tensors are put aside. Lists and mappings are marked, as JSON has one of each."""
    match value:
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"float": str(value)}
        case Tensor():
            name = str(len(tensors))
            tensors[name] = _apart(value, tensors)
            return {"tensor": name}
        case list() | tuple():
            kind = "list" if isinstance(value, list) else "tuple"
            return {kind: [_plain(one, tensors, f"{path}[{k}]") for k, one in enumerate(value)]}
        case Mapping() if all(isinstance(key, str | int) for key in value):
            return {"map": [[key, _plain(one, tensors, f"{path}[{key!r}]")] for key, one in value.items()]}
    raise ValueError(
        f"{path} is of type {type(value).__name__}, which a checkpoint cannot hold: it holds numbers, text, tensors, "
        "and lists, tuples and dicts of them. Nothing was written. Save it apart."
    )


def _apart(value: Tensor, others: Mapping[str, Tensor]) -> Tensor:
    """The tensor with memory of its own, as safetensors asks; copied only where it has to be."""
    value = value.detach()
    own = value.device.type == "cpu" and value.is_contiguous()
    own = own and value.untyped_storage().nbytes() == value.numel() * value.element_size() > 0
    own = own and all(other.data_ptr() != value.data_ptr() for other in others.values())
    return value if own else torch.empty(value.shape, dtype=value.dtype, device="cpu").copy_(value)


def _nested(plain: Any, tensors: Mapping[str, Tensor]) -> Any:
    match plain:
        case {"float": text}:
            return float(text)
        case {"tensor": name}:
            return tensors[name]
        case {"list": values}:
            return [_nested(one, tensors) for one in values]
        case {"tuple": values}:
            return tuple(_nested(one, tensors) for one in values)
        case {"map": pairs}:
            return {key: _nested(one, tensors) for key, one in pairs}
    return plain
