"""What people hold their data in, as a dataset of samples by index: arrays, data frames, Hugging Face datasets.

None of these libraries is imported: a data frame is known by what it has.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from dpscale.checks import complaint, require

log = logging.getLogger("dpscale")

COLUMNS = 8
"""A list of more arrays than this is one of samples, not of inputs and labels."""

_LOADED_BY = ("collect", "compute", "to_pandas")
"""What a frame has that is not one of numbers in memory: a lazy one of Polars, one of Dask, a table of Arrow."""


def dataset_of(
    owner: str, data: Any, target: str | None = None, without: Sequence[str] = (), name: str = "data"
) -> Dataset[Any]:
    """A dataset with a length and samples by index; refuses what cannot be one.

    | data                              | a sample                                                         |
    |-----------------------------------|------------------------------------------------------------------|
    | a dataset                         | its own                                                          |
    | (X, y), or X: arrays or tensors   | a row of each; arrays as float32, int64, uint8 or bool           |
    | a data frame with ``target``      | (the other columns as float32, the target; False and True: 0, 1) |
    | a Hugging Face dataset            | its own; as tensors if it has no format                          |

    Args:
        owner: for complaints.
        data: one of these.
        target: the column of a frame that is to be learned.
        without: columns of a frame, or of a Hugging Face dataset, to leave out.
        name: of the parameter, for complaints.
    """
    if is_frame(data):
        return _of_frame(owner, data, target, without)
    elsewhere = hasattr(type(data), "columns") and any(hasattr(data, way) for way in _LOADED_BY)
    action = "Load it first, by its .collect(), .compute() or .to_pandas()."
    require(not elsewhere, owner, name, "a data frame in memory", type(data).__name__, action)
    action = "It names the column of a data frame."
    require(target is None, owner, "target", "left out unless the data are a data frame", target, action)
    if is_hugging_face(data):
        return _of_hugging_face(owner, data, without)  # type: ignore[no-any-return]
    if isinstance(data, np.ndarray):
        data = (data,)
    few = isinstance(data, (tuple, list)) and 0 < len(data) <= COLUMNS
    if few and any(map(_is_columns, data)) and not all(map(_is_array, data)):
        got = f"{type(data).__name__} of {', '.join(type(values).__name__ for values in data)}"
        raise complaint(owner, name, "of arrays, or samples by index", got, "Make each an array: numpy.asarray(...), "
                        "and of a sparse matrix .toarray(). Then pass (X, y).")  # fmt: skip
    if few and all(map(_is_array, data)):
        sizes = [len(values) for values in data]
        must = "arrays of the same length, a row for each sample"
        require(len({*sizes}) == 1, owner, name, must, f"lengths {sizes}", "Pass (X, y).")
        return TensorDataset(*(_tensor(owner, values) for values in data))
    require_indexed(owner, data, name)
    return data  # type: ignore[no-any-return]


def require_indexed(owner: str, data: Any, name: str) -> None:
    """Refuse what has no length, or no samples by index."""
    indexed = hasattr(data, "__len__") and hasattr(data, "__getitem__")
    ok = indexed and not isinstance(data, (IterableDataset, str, bytes, Mapping, type)) and not is_frame(data)
    must = "a dataset with a length and samples by index"
    action = "Sampling and accounting need to know how many: load them into a list, or into arrays (X, y)."
    require(ok, owner, name, must, type(data).__name__, action)


def is_frame(data: Any) -> bool:
    """Whether it is a data frame: of pandas, or of a library that is like it."""
    return not isinstance(data, Tensor) and hasattr(data, "columns") and hasattr(data, "to_numpy")


def column_of(owner: str, data: Any, name: str) -> Any:
    """A column of a frame or of a Hugging Face dataset."""
    names = list(data.columns) if is_frame(data) else data.column_names if is_hugging_face(data) else None
    action = "Pass one value for each record."
    require(names is not None, owner, "users", "the name of a column only for a data frame or a Hugging Face dataset",
            name, action)  # fmt: skip
    require(name in (names or ()), owner, "users", f"one of the columns {names}", name)
    return data[name].to_numpy() if is_frame(data) else data.with_format(None)[name][:]


def _of_frame(owner: str, frame: Any, target: str | None, without: Sequence[str]) -> TensorDataset:
    names = list(frame.columns)
    action = f"Its columns are {names}."
    require(target is not None and target in names, owner, "target", "the column of the frame that is to be learned",
            target, action)  # fmt: skip
    again = sorted({str(name) for name in names if names.count(name) > 1})
    require(not again, owner, "data", "a frame whose columns have names of their own", f"{again} more than once")
    inputs = [name for name in names if name != target and name not in without]
    require(bool(inputs), owner, "data", "a frame with columns beside the target", f"the columns {names}")
    columns = {name: _tensor(owner, frame[name].to_numpy(), name) for name in [*inputs, target]}
    unlabelled = int(columns[target].isnan().sum())
    action = "Leave out the rows that have none, or fill them by a constant."
    require(not unlabelled, owner, "target", "a column without missing values", f"{unlabelled} in {target!r}", action)
    if gaps := [name for name, values in columns.items() if bool(values.isnan().any())]:
        log.warning("dpscale: values are missing in the columns %s. A sample whose gradient is no number adds nothing. "
                    "Fill them by a constant, not by a mean of the data.", gaps)  # fmt: skip
    x = torch.stack([columns[name].to(torch.float32) for name in inputs], 1)
    y = columns[target]
    return TensorDataset(x, y.long() if y.dtype == torch.bool else y)  # cross_entropy takes no truth values


def _of_hugging_face(owner: str, data: Any, without: Sequence[str]) -> Any:
    splits = type(data).__name__ == "DatasetDict"
    require(not splits, owner, "data", "one split of a dataset", f"the splits {[*data] if splits else ()}",
            "Pass one of them, such as data['train'].")  # fmt: skip
    require(hasattr(data, "__len__"), owner, "data", "a dataset with a length and samples by index",
            type(data).__name__, "Load it without streaming=True.")  # fmt: skip
    data = data.remove_columns(list(without)) if without else data
    if data.format["type"] is not None:
        return data
    log.info("dpscale: the Hugging Face dataset is read as tensors, as with_format('torch') gives them.")
    return data.with_format("torch")


def is_hugging_face(data: Any) -> bool:
    """Whether it is a dataset of the library ``datasets``."""
    return any(made.__module__.split(".")[0] == "datasets" for made in type(data).__mro__)


def _is_array(values: Any) -> bool:
    """An array, a tensor, or a series or frame of another library."""
    return (isinstance(values, (np.ndarray, Tensor)) or hasattr(values, "to_numpy")) and len(values.shape) > 0


def _is_columns(values: Any) -> bool:
    """What holds a row for each sample, and is never a sample itself."""
    return isinstance(values, list) or hasattr(values, "to_numpy") or hasattr(values, "tocsr")


def require_once(owner: str, dataset: Any) -> None:
    """Refuse a dataset that names a sample twice: it would count twice, and a bound is for one.

    It is seen where torch's `Subset` and `ConcatDataset` tell it.
    """
    if isinstance(dataset, (Subset, ConcatDataset)):
        source, place = _places(dataset)
        _, named = np.unique(source, return_inverse=True)
        again = len(place) - len(np.unique(named * (place.max(initial=0) + 1) + place))
        require(not again, owner, "dataset", "one that has each sample once", f"{again} samples again",
                "One that is there twice would add twice the bound. Leave copies out; or give them one owner: "
                "dpscale.by_user(dataset, users, records=...).")  # fmt: skip


def _places(dataset: Any) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Of each sample, which dataset it is from, and its place there."""
    if isinstance(dataset, Subset):
        source, place = _places(dataset.dataset)
        chosen = np.asarray(dataset.indices, dtype=np.int64)
        return source[chosen], place[chosen]
    if isinstance(dataset, ConcatDataset):
        sources, places = zip(*map(_places, dataset.datasets), strict=True)
        return np.concatenate(sources), np.concatenate(places)
    return np.full(len(dataset), id(dataset)), np.arange(len(dataset))


def _tensor(owner: str, values: Any, column: str | None = None) -> Tensor:
    """Numbers as networks take them: float32, int64; bytes and truth values as they are. Tensors are left alone."""
    if isinstance(values, Tensor):
        return values
    array = np.asarray(values)
    if array.dtype.kind not in "fiub":
        got = f"{array.dtype} values" if column is None else f"{array.dtype} values in the column {column!r}"
        raise complaint(owner, "data", "of numbers", got, "Turn categories into numbers first, from a public list: "
                        ".map({'no': 0, 'yes': 1}). Numbers that are held as objects: .astype(float).")  # fmt: skip
    as_it_is = array.dtype in (np.uint8, np.bool_)
    wanted = array.dtype if as_it_is else np.dtype(np.float32 if array.dtype.kind == "f" else np.int64)
    return torch.from_numpy(np.ascontiguousarray(array.astype(wanted, copy=not array.flags.writeable)))
