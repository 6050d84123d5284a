"""Each sample's gradient of a convolution's weight on the CPU, and what tells the rows of a batch apart, by kernels of
our own where there is a compiler.

torch has a weight gradient for a whole batch. With a group for each sample it gives each sample's, at a third of the
speed: its matrices are small, and it lays them out anew for each. `native.cpp` takes images as they lie, keeps one
sample's patches in the cache, and squares its gradient while that is still in registers.

What tells rows apart takes torch a dozen operations, and six passes over the batch.

They are compiled when one is first asked for on a machine, in half a second, into a folder of this user's that nobody
else may write to (``$XDG_CACHE_HOME/dpscale``). Where there is no compiler, or what it makes is wrong for a small
example, nothing is said, and torch's own operations are taken.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import stat
import subprocess
import threading
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dpscale.engine.compat import operation
from dpscale.files import replacing

log = logging.getLogger("dpscale")

SOURCE = Path(__file__).with_name("native.cpp")

FLAGS = (
    "-std=c++17", "-O3", "-march=native", "-ffp-contract=fast", "-fno-exceptions", "-fopenmp", "-shared", "-fPIC"
)  # fmt: skip

PATIENCE = 60.0
"""Seconds to wait for the compiler at most."""

ALONE = 1 << 20
"""Multiplications, or numbers looked at, that one thread has done before others have begun."""

_lock = threading.Lock()


def available() -> bool:
    """Whether the kernel can be had on this machine. The first time it is compiled for that."""
    with _lock:
        return _library() is not None


def rows(t_BN: Tensor) -> NDArray[np.float64] | None:
    """Of each row how many numbers are not zero and how many are negative, the least and the greatest, (4, B).

    None where that is left to torch: one is not finite, or they are no float32 or int64 in one stretch on the CPU.
    """
    takes = t_BN.dtype in (torch.float32, torch.int64) and t_BN.device.type == "cpu" and t_BN.is_contiguous()
    if not takes or not t_BN.numel() or not available():
        return None
    return _rows(_library(), t_BN.data_ptr(), t_BN.dtype == torch.int64, *t_BN.shape)


def _rows(library: Any, place: int, whole: bool, count: int, numbers: int) -> NDArray[np.float64] | None:
    found = np.empty((4, count))
    threads = torch.get_num_threads() if count * numbers > ALONE else 1
    return found if library.dpscale_rows(place, whole, count, numbers, found.ctypes.data, threads) else None


def patch_gradients(
    x: Tensor, g: Tensor, images: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Each sample's gradient of a weight, (B, *kernel, channels, outputs), and the square of its norm, (B,).

    Args:
        x: what goes in, float32, (B·images, channels, height, width), in any layout.
        g: the gradient of what comes out, (B·images, outputs, rows, columns), likewise.
        images: of each sample.
    """
    made: tuple[Tensor, Tensor] = torch.ops.dpscale.patch_gradients(x, g, images, kernel, stride, padding, dilation)
    return made


def _patch_gradients(
    x: Tensor, g: Tensor, images: int, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    library = _library()
    assert library is not None, "the kernel is asked for where it is not available"
    samples = len(x) // images
    out, squares = x.new_empty(samples, *kernel, x.shape[1], g.shape[1]), x.new_empty(samples)
    sizes = samples, images, *x.shape[1:], *g.shape[1:], *kernel, *stride, *padding, *dilation, *x.stride(), *g.stride()
    work = out.numel() * images * g.shape[2] * g.shape[3]
    library.dpscale_patch_gradients(
        x.data_ptr(), g.data_ptr(), out.data_ptr(), squares.data_ptr(), (ctypes.c_int64 * len(sizes))(*sizes),
        torch.get_num_threads() if work > ALONE else 1,
    )  # fmt: skip
    return out, squares


def _shaped(x: Tensor, g: Tensor, images: int, kernel: Sequence[int], *_: Any) -> tuple[Tensor, Tensor]:
    samples = x.shape[0] // images
    return x.new_empty(samples, *kernel, x.shape[1], g.shape[1]), x.new_empty(samples)


# It takes its arguments as they lie: the compiler need not lay them out anew.
operation(
    "patch_gradients(Tensor x, Tensor g, SymInt images, SymInt[] kernel, SymInt[] stride, SymInt[] padding, "
    "SymInt[] dilation) -> (Tensor, Tensor)", _patch_gradients, _shaped, torch.Tag.flexible_layout,
)  # fmt: skip


@cache
def _library() -> ctypes.CDLL | None:
    """The kernel, compiled; None where that cannot be done."""
    compiler = shutil.which(os.environ.get("CXX", "g++")) or shutil.which("clang++")
    if compiler is None or not torch.backends.mkldnn.is_available():
        return None
    try:
        library = ctypes.CDLL(str(_compiled(compiler)))
        function = library.dpscale_patch_gradients
        function.argtypes, function.restype = [ctypes.c_void_p] * 4 + [ctypes.c_void_p, ctypes.c_int], None
        each = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int
        library.dpscale_rows.argtypes = each
        if not (_right(library) and _right_of_rows(library)):
            raise RuntimeError("what it makes of an example is wrong")
        return library
    except (OSError, RuntimeError, subprocess.SubprocessError, AttributeError) as error:
        log.debug("dpscale: no kernel of our own for convolutions on the CPU: %s", error)
        return None


def _compiled(compiler: str) -> Path:
    """The file, which is there already if it was compiled from this source for this machine before."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "dpscale")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    source, made_for = SOURCE.read_bytes(), repr((compiler, FLAGS, _processor()))
    made = folder / f"native-{hashlib.blake2b(source + made_for.encode(), digest_size=12).hexdigest()}.so"
    if not _of_this_user_alone(folder):
        raise PermissionError(f"others may write to {folder}")
    if not made.exists() or not _of_this_user_alone(made):
        with replacing(made, mode=0o600) as temporary:
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(temporary)]
            subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
    return made


def _of_this_user_alone(path: Path) -> bool:
    """Whether nobody else can have put it there."""
    found = path.stat()
    return found.st_uid == os.getuid() and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def _processor() -> str:
    """What the compiler makes its code for: homes are shared between machines."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _right(library: ctypes.CDLL) -> bool:
    """Whether it makes of an example what numpy does; no tensors, as this may be asked while others are traced. The
    example has a part of each tile that there is, and pixels beyond the last position."""
    x = np.sin(np.arange(2 * 5 * 6 * 7, dtype=np.float32)).reshape(2, 5, 6, 7)
    g = np.cos(np.arange(2 * 37 * 3 * 5, dtype=np.float32)).reshape(2, 37, 3, 5)
    made, squares = np.empty((2, 3, 3, 5, 37), np.float32), np.empty(2, np.float32)
    strides = [bytes_ // 4 for t in (x, g) for bytes_ in t.strides]
    sizes = 2, 1, 5, 6, 7, 37, 3, 5, 3, 3, 2, 1, 1, 0, 1, 1, *strides
    pointers = [t.ctypes.data for t in (x, g, made, squares)]
    library.dpscale_patch_gradients(*pointers, (ctypes.c_int64 * len(sizes))(*sizes), 1)
    padded = np.pad(x, ((0, 0), (0, 0), (1, 1), (0, 0)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))[:, :, ::2]
    right = np.einsum("bcrsij,bors->bijco", windows, g)
    norms = np.square(right).sum((1, 2, 3, 4))
    return np.allclose(made, right, rtol=1e-4, atol=1e-4) and np.allclose(squares, norms, rtol=1e-4)


def _right_of_rows(library: ctypes.CDLL) -> bool:
    """The same of what tells rows apart, also where one of the last numbers is not finite."""
    x = np.sin(np.arange(3 * 37)).reshape(3, 37).round(1)
    expected = [(x != 0).sum(1), (x < 0).sum(1), x.min(1), x.max(1)]
    for each in (x.astype(np.float32), (10 * x).round().astype(np.int64)):
        scale = [1, 1, 1, 1] if each.dtype == np.float32 else [1, 1, 10, 10]
        found = _rows(library, each.ctypes.data, each.dtype == np.int64, *each.shape)
        if found is None or not np.allclose(found, [a * k for a, k in zip(expected, scale, strict=True)]):
            return False
    bad = [np.full((1, 37), 1, np.float32) for _ in range(4)]
    for each, (place, value) in zip(bad, [(0, np.nan), (20, np.inf), (36, -np.inf), (36, np.nan)], strict=True):
        each[0, place] = value
    return all(_rows(library, each.ctypes.data, False, *each.shape) is None for each in bad)
