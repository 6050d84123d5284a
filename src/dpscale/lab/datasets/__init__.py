"""Data sets on disk: where they can be had, how they are checked and kept. `lab.data` gives them as tensors."""

from dpscale.lab.datasets.disk import DataError, data_folder

__all__ = ["DataError", "data_folder"]
