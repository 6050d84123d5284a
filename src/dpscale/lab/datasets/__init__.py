"""Data sets on disk: where they can be had, how they are checked, how they are kept. `load` gives one as tensors."""

import os
from typing import TYPE_CHECKING

from dpscale.lab.datasets.folder import DataError, OnProgress, data_folder, ignore

if TYPE_CHECKING:
    from dpscale.lab.data import Data

__all__ = ["DataError", "data_folder", "load"]


def load(
    name: str,
    folder: str | os.PathLike[str] | None = None,
    *,
    train_size: int | None = None,
    on_progress: OnProgress = ignore,
) -> "Data":
    """`dpscale.lab.data.load`, which imports this package."""
    from dpscale.lab import data

    return data.load(name, folder, train_size=train_size, on_progress=on_progress)
