"""The official layouts of the small data sets: idx files, CIFAR-10's binary, Python and PNG batches."""

import io
import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dpscale.lab.datasets.folder import DataError

_IDX_UBYTE = 0x08


def read_idx(path: Path) -> np.ndarray:
    """The array in an uncompressed idx file of unsigned bytes."""
    content = np.fromfile(path, dtype=np.uint8)
    rank = int(content[3]) if len(content) >= 4 else 0
    if len(content) < 4 + 4 * rank or rank == 0 or tuple(content[:3]) != (0, 0, _IDX_UBYTE):
        raise DataError(
            f"The file {path} is not an idx file of unsigned bytes: it begins {content[:4].tobytes().hex()}."
        )
    shape = tuple(int(n) for n in content[4 : 4 + 4 * rank].view(">u4"))
    body = content[4 + 4 * rank :]
    if len(body) != np.prod(shape, dtype=np.int64):
        raise DataError(f"The file {path} has {len(body)} bytes of data; its header promises {shape}.")
    return body.reshape(shape)


def read_batch(path: Path, shape: tuple[int, int, int]) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of a CIFAR-10 binary batch: rows of one label byte and the image, channel by channel."""
    content, row = np.fromfile(path, dtype=np.uint8), 1 + int(np.prod(shape))
    if len(content) == 0 or len(content) % row:
        raise DataError(f"The file {path} has {len(content)} bytes, not a multiple of {row}.")
    rows = content.reshape(-1, row)
    return rows[:, 1:].reshape(-1, *shape), rows[:, 0]


def batch_bytes(images_NCHW: np.ndarray, labels_N: Sequence[int] | np.ndarray) -> bytes:
    """A CIFAR-10 binary batch."""
    flat = np.ascontiguousarray(images_NCHW, dtype=np.uint8).reshape(len(images_NCHW), -1)
    return np.concatenate([np.asarray(labels_N, dtype=np.uint8)[:, None], flat], axis=1).tobytes()


def batch_from_python(content: bytes, name: str) -> bytes:
    """A binary batch from one of the pickled batches. Nothing but arrays, lists and numbers is unpickled."""
    try:
        found = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
        return batch_bytes(np.asarray(found[b"data"]), found[b"labels"])
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise anything
        raise DataError(f"{name} is not a CIFAR-10 batch for Python ({error!r}). Download it again.") from error


def batch_from_png(png: bytes, labels: Sequence[int], name: str) -> bytes:
    """A binary batch from a picture whose every row is an image, its pixels one after the other."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(png)) as picture:
            pixels_NPC = np.asarray(picture.convert("RGB"))
    except OSError as error:
        raise DataError(f"{name} is not a readable PNG ({error}).") from error
    if len(labels) != len(pixels_NPC):
        raise DataError(f"{name} has {len(pixels_NPC)} images, but there are {len(labels)} labels.")
    return batch_bytes(pixels_NPC.transpose(0, 2, 1), labels)


def labels_from_json(content: bytes, name: str) -> list[int]:
    """A list of labels."""
    try:
        return [int(label) for label in json.loads(content)]
    except (ValueError, TypeError) as error:
        raise DataError(f"{name} is not a list of labels ({error}).") from error


class _ArraysOnly(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module in ("numpy.core.multiarray", "numpy._core.multiarray") and name == "_reconstruct":
            return np.empty(0).__reduce__()[0]
        known: dict[tuple[str, str], Callable[..., Any] | type] = {
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _dtype,
            ("_codecs", "encode"): _encode,
        }
        if (module, name) not in known:
            raise DataError(f"The batch asks for {module}.{name}, which no CIFAR-10 batch does. It was not loaded.")
        return known[module, name]


def _dtype(kind: str | bytes, align: int = 0, copy: int = 0) -> np.dtype:
    return np.dtype(kind.decode() if isinstance(kind, bytes) else kind, bool(align), bool(copy))


def _encode(text: str | bytes, encoding: str | bytes = "latin1") -> bytes:
    return text if isinstance(text, bytes) else text.encode("latin1")
