"""The official layouts of the small data sets: idx files, CIFAR-10's binary, Python and PNG batches."""

import codecs
import io
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.lab.datasets.folder import DataError


def read_idx(path: Path) -> np.ndarray:
    """The array in an uncompressed idx file of unsigned bytes, whose fourth byte is the number of dimensions."""
    content = np.fromfile(path, dtype=np.uint8)
    header = 4 + 4 * int(content[3])
    return content[header:].reshape(content[4:header].view(">u4"))


def read_batch(path: Path, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a CIFAR-10 binary batch: rows of one label byte and the image, channel by channel."""
    rows = np.fromfile(path, dtype=np.uint8).reshape(-1, 1 + int(np.prod(shape)))
    return rows[:, 1:].reshape(-1, *shape), rows[:, 0]


def batch_bytes(images: np.ndarray, labels_N: Sequence[int]) -> bytes:
    """A CIFAR-10 binary batch."""
    rows = np.asarray(images, dtype=np.uint8).reshape(len(labels_N), -1)
    return np.column_stack([np.asarray(labels_N, dtype=np.uint8), rows]).tobytes()


def batch_from_python(content: bytes, name: str) -> bytes:
    """A binary batch from one of the pickled batches. Nothing but arrays, lists and numbers is unpickled."""
    try:
        found = _ArraysOnly(io.BytesIO(content), encoding="latin1").load()
        return batch_bytes(found["data"], found["labels"])
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name} is not a CIFAR-10 batch for Python ({error!r}). Download it again.") from error


def batch_from_png(png: bytes, labels: Sequence[int]) -> bytes:
    """A binary batch from a picture whose every row is an image, its pixels one after the other."""
    from PIL import Image

    pixels_NPC = np.asarray(Image.open(io.BytesIO(png)).convert("RGB"))
    return batch_bytes(pixels_NPC.transpose(0, 2, 1), labels)


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {
            "_reconstruct": np.empty(0).__reduce__()[0],
            "ndarray": np.ndarray,
            "dtype": np.dtype,
            "encode": codecs.encode,
        }
        if module.split(".")[0] not in ("numpy", "_codecs") or name not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no such batch does")
        return known[name]
