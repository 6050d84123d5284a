"""Reads the weights of a TensorFlow.js layers model: ``model.json`` and the binary shards that it names."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

_TYPES = {"float32": np.dtype("<f4"), "int32": np.dtype("<i4")}


def read(path: Path) -> dict[str, Tensor]:
    """The weights by name, in the file's own layout: kernels are (height, width, in, out).

    A group's shards are one stream of bytes, cut anywhere; its weights follow each other in it without gaps.

    Args:
        path: ``model.json``; the shards lie beside it.
    """
    found: dict[str, Tensor] = {}
    for group in _manifest(path):
        stream = b"".join(_shard(path, name) for name in group["paths"])
        at = 0
        for weight in group["weights"]:
            name, shape = weight["name"], tuple(weight["shape"])
            if weight["dtype"] not in _TYPES or "quantization" in weight:
                kind = f"quantized {weight['dtype']}" if "quantization" in weight else weight["dtype"]
                raise ValueError(f"The weight {name!r} in {path} is {kind}; only {' and '.join(_TYPES)} can be read.")
            if name in found:
                raise ValueError(f"The file {path} has two weights named {name!r}.")
            dtype = _TYPES[weight["dtype"]]
            end = at + dtype.itemsize * int(np.prod(shape, dtype=np.int64))
            if end > len(stream):
                raise ValueError(f"The shards of {path} end at byte {len(stream)}, before {name!r} does ({end}).")
            values = np.frombuffer(stream[at:end], dtype).reshape(shape)
            found[name] = torch.from_numpy(values.astype(dtype.newbyteorder("=")))
            at = end
        if at != len(stream):
            raise ValueError(f"The shards of {path} have {len(stream) - at} bytes that belong to no weight.")
    return found


def _manifest(path: Path) -> list[Any]:
    try:
        manifest: list[Any] = json.loads(path.read_text(encoding="utf-8"))["weightsManifest"]
    except FileNotFoundError:
        raise ValueError(f"There is no file {path}.") from None
    except (UnicodeDecodeError, json.JSONDecodeError, KeyError, TypeError):
        raise ValueError(f"The file {path} is no TensorFlow.js model: it has no 'weightsManifest'.") from None
    return manifest


def _shard(path: Path, name: str) -> bytes:
    if Path(name).name != name:
        raise ValueError(f"The file {path} names the shard {name!r}, which does not lie beside it.")
    try:
        return (path.parent / name).read_bytes()
    except FileNotFoundError:
        raise ValueError(f"The shard {name} is missing beside {path}.") from None
