"""Reads the weights of a TensorFlow.js layers model: ``model.json`` and the binary shards that it names."""

import json
import math
from pathlib import Path

import torch
from torch import Tensor


def read(path: Path) -> dict[str, Tensor]:
    """The weights by name, float32, in the file's own layout: kernels are (height, width, in, out).

    A group's shards are one stream of bytes, cut anywhere; its weights follow each other in it without gaps.

    Args:
        path: ``model.json``; the shards lie beside it.
    """
    found: dict[str, Tensor] = {}
    for group in json.loads(path.read_text(encoding="utf-8"))["weightsManifest"]:
        stream = bytearray(b"".join((path.parent / name).read_bytes() for name in group["paths"]))
        shapes = {weight["name"]: weight["shape"] for weight in group["weights"]}
        parts = torch.frombuffer(stream, dtype=torch.float32).split([math.prod(shape) for shape in shapes.values()])
        found |= {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}
    return found
