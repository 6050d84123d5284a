"""Batch: data and the draw that they came from. Padding to the sizes that a compiled step meets again."""

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset, default_collate

from dpscale.checks import complaint, out_of_memory
from dpscale.engine import ScaledSum, UnsupportedModel
from dpscale.engine.arguments import device_of, has_rows, over_rows, plain_tensors, rows_of, tensors_in
from dpscale.engine.compat import register_tree_node
from dpscale.engine.verify.rows import Features, FeatureTable, blank_of, features, neutral
from dpscale.engine.verify.state import Dice
from dpscale.engine.verify.values import same
from dpscale.packing import packed, unpacked
from dpscale.sampling import Draw, Indices
from dpscale.shapes import Sizes

T = TypeVar("T")


class Batch:
    """A batch of a private run. It behaves as its data do, and knows the draw that they came from.

    It iterates, indexes and has the length of its data: ``x, y = batch``, ``batch["ids"]``, ``model(**batch)``. The
    attributes of the data are attributes of the batch. A batch that is a bare tensor can be given to a model as it is.

    Attributes:
        data: what the dataset and its ``collate_fn`` gave, a row for every sample drawn. Where people are drawn
            (`by_user`), a row for every record, as many for each person, which stand together. A `PackedSequence` is
            held as padded rows and lengths, and is packed again for ``loss_fn``, and for whoever takes it out.
        draw: its number, the indices of its samples, and a mask of its rows.
        singles: some of its samples as ``collate_fn`` gives them alone, by their place.
        rows: numbers that tell its samples apart, from before they were moved.
        part: which samples of the draw these are, where the batch is a part of one (`Private.parts`); None: all.

    Example:
        >>> import numpy as np, torch
        >>> draw = Draw(number=1, indices=np.array([4, 7]), mask=np.array([True, True]))
        >>> batch = Batch((torch.zeros(2, 3), torch.ones(2)), draw)
        >>> x, y = batch.map(lambda data: (data[0] + 1, data[1]))
        >>> x.shape, batch.to(torch.float64)[1].dtype
        (torch.Size([2, 3]), torch.float64)
    """

    def __init__(
        self, data: Any, draw: Draw, singles: Mapping[int, Any] | None = None, rows: Features | None = None,
        part: slice | None = None,
    ) -> None:  # fmt: skip
        self.data, self.draw, self.singles, self.part = data, draw, singles or {}, part
        self.rows = _features(data, draw) if rows is None else rows

    def map(self, change: Callable[[Any], Any]) -> "Batch":
        """The batch with ``change(data)`` for its data. Every row must stay, in its place."""
        batch = self._changed(change)
        if (rows := _features(batch.data, self.draw)) is not None:  # what the model is given is another thing now
            batch.rows = rows
        return batch

    def _changed(self, change: Callable[[Any], Any]) -> "Batch":
        singles = {place: change(single) for place, single in self.singles.items()}
        return Batch(change(self.data), self.draw, singles, self.rows, self.part)

    def to(self, *args: Any, **kwargs: Any) -> "Batch":
        """The batch with every tensor moved or converted, as `torch.Tensor.to` does it."""
        return self._changed(lambda data: over_rows(data, lambda t: t.to(*args, **kwargs)))

    def pin_memory(self) -> "Batch":
        """The batch in pinned memory."""
        return self._changed(lambda data: over_rows(data, lambda t: t.pin_memory() if hasattr(t, "pin_memory") else t))

    def rows_in(self, part: slice) -> Features | None:
        """Of some of its rows."""
        return None if self.rows is None else self.rows[part]

    def __len__(self) -> int:
        return len(self.data)

    def __iter__(self) -> Iterator[Any]:
        return iter(packed(self.data))

    def __contains__(self, item: Any) -> bool:
        return item in self.data

    def __getitem__(self, key: Any) -> Any:
        return packed(self.data[key])

    def __setitem__(self, key: Any, value: Any) -> None:
        self.data[key] = value

    def __getattr__(self, name: str) -> Any:
        own = ("data", "draw", "singles", "rows", "part")
        if name in own or name.startswith("__"):  # not there yet, or looked for by copy and pickle
            raise AttributeError(name)
        return getattr(self.data, name)

    def __repr__(self) -> str:
        drawn = len(self.draw.indices)
        return f"Batch(draw={self.draw.number}, samples={drawn}, data={type(self.data).__name__})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Torch's functions see the tensor, where the data are one."""

        def bare(value: Any) -> Any:
            return value.data if isinstance(value, Batch) else value

        return func(*map(bare, args), **{name: bare(value) for name, value in (kwargs or {}).items()})


def _features(data: Any, draw: Draw) -> Features | None:
    """Of the samples of a whole batch on the CPU."""
    if rows_of(data) != draw.rows:
        return None
    return features([t.reshape(len(draw.mask), -1) for t in tensors_in(data)])


def _rebuilt(draw: Draw, rows: Features | None, part: slice | None, data: Any, singles: Mapping[int, Any]) -> Batch:
    return Batch(data, draw, singles, rows, part)


register_tree_node(
    Batch,
    lambda batch: ([batch.data, batch.singles], (batch.draw, batch.rows, batch.part)),
    lambda parts, context: _rebuilt(*context, *parts),
    serialized_type_name="dpscale.Batch",
)


class Batches(Iterator[Batch]):
    """The batches of a loop or of an epoch; ``len`` is how many are left."""

    def __init__(self, batches: Iterator[Batch], left: int) -> None:
        self._batches, self._left = batches, left

    def __len__(self) -> int:
        return self._left

    def __next__(self) -> Batch:
        batch = next(self._batches)
        self._left -= 1
        return batch


class Padding:
    """Gives batches the sizes that a compiled step is for.

    The first padded batch decides between neutral rows and copies of the batch's first row: a forward may raise on
    zeros, or its losses may not be finite there.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self._copies = self._decided = False

    @property
    def usual(self) -> int:
        """The size in the middle, where there is more than one; otherwise 0."""
        sizes = self.sizes.rows
        return sizes[len(sizes) // 2] if len(sizes) > 1 else 0

    def __call__(
        self, data: Any, count: int, rows: int, summed: Callable[[Any, Tensor], ScaledSum],
        put: Callable[[Sequence[Tensor], int, int], Sequence[Tensor] | None] = lambda tensors, count, rows: None,
    ) -> ScaledSum:  # fmt: skip
        """What ``summed(data, mask)`` gives for ``count`` rows padded to ``rows``, without what it says of padding.

        Args:
            put: puts tensors where they will be read, with zeros after them, if that can be done: there.
        """
        mask = _first(count, rows, device_of(data))
        if count == rows:
            return summed(data, mask)
        if not self._decided:
            self._copies = not self._takes_zeros(padded(data, count, rows), mask, count, summed)
            self._decided = True
        out = summed(self._padded(data, count, rows, put), mask)
        return replace(out, losses=out.losses[:count], norms=out.norms[:count], weights=out.weights[:count])

    def _padded(self, data: Any, count: int, rows: int, put: Callable[..., Sequence[Tensor] | None]) -> Any:
        tensors = plain_tensors(data) if type(data) is tuple and not self._copies else None
        if tensors is None or (places := put(tensors, count, rows)) is None:
            return padded(data, count, rows, copies=self._copies)
        return tuple(places)

    @staticmethod
    def _takes_zeros(data: Any, mask: Tensor, count: int, summed: Callable[[Any, Tensor], ScaledSum]) -> bool:
        try:
            return bool(torch.isfinite(summed(data, mask).losses[count:]).all())
        except Exception as error:
            if out_of_memory(error):
                raise
            return False  # if it was not for the zeros, the copies will show it


@lru_cache(256)
def _first(count: int, rows: int, device: torch.device) -> Tensor:
    """A mask of so many rows, True for the first: the same tensor every time, which nobody writes to."""
    return torch.arange(rows, device=device) < count


class Collated:
    """A ``collate_fn`` that also says how many rows it was given, and what it makes of two samples alone.

    What it makes of a sample may depend on the others: it pads to the longest. Whoever checks that can compare, unless
    it draws random numbers (masks of tokens): then what it makes of a sample is another thing each time, and is looked
    at here, at the same random numbers. Where a sample is a person of several rows, these must stay where they are.

    Args:
        collate: from a list of rows to a batch.
        each: rows of a person; None where samples are no people.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], each: int | None = None) -> None:
        self.given, self.each = collate, each
        self._dice: Dice | None = None

    def collate(self, rows: list[Any]) -> Any:
        """As it was given, but nothing is packed: rows must be rows of samples."""
        return unpacked(self.given(rows))

    def __call__(self, rows: list[Any]) -> tuple[int, Any, dict[int, Any]]:
        """(How many rows came, the batch, the shortest and the longest sample as batches of their own.)"""
        count, each = len(rows), self.each or 1  # before `collate`, which may change the list
        if self.given is default_collate:
            return count, self.collate(rows), {}
        if self.each and not keeps_order(self.collate, rows):
            raise ValueError(
                "collate_fn changes the order of its rows, or makes something else of each row every time. Rows "
                "are told to be a person's by their place. Return them in the order in which they came; sort "
                "inside the model, and draw random numbers in the dataset."
            )
        self._dice = self._dice or Dice(self.given)
        samples = [rows[k : k + each] for k in range(0, count, each)]
        sizes = [sum(t.numel() for t in tensors_in(sample)) for sample in samples]
        ends = {sizes.index(min(sizes)), sizes.index(max(sizes))} if sizes else set()
        before, singles = self._dice.told(), {}
        for place in ends:
            with suppress(Exception):  # it may need several
                singles[place] = self.collate(copy.deepcopy(samples[place]))
        batch = self.collate(rows)
        if self._dice.told() == before:
            return count, batch, singles
        most = sizes.index(max(sizes))
        trouble = mixing(self.collate, self._dice, samples[most], samples[:most] + samples[most + 1 :])
        if trouble is not None:
            raise UnsupportedModel(trouble)
        return count, batch, {}


_MIXES = (
    "collate_fn draws random numbers and mixes samples (mixup, cutmix?): what it makes of a sample is another thing "
    "among others, at the same random numbers. A sample would then count in the gradients of several. Let it treat "
    "each sample apart."
)
_HIDDEN = (
    "collate_fn draws random numbers from a generator that cannot be put back, so that it cannot be seen whether it "
    "mixes samples. Let it draw from torch's, numpy's or Python's own, or from one that it holds."
)


def mixing(collate: Callable[[list[Any]], Any], dice: Dice, one: list[Any], others: Sequence[list[Any]]) -> str | None:
    """What is wrong with a ``collate`` that draws: some rows must come out as they do among copies of themselves, at
    the same random numbers, wherever they stand. Where it takes other numbers for other rows, or gives other shapes,
    that cannot be told.

    Args:
        collate: it may sort.
        dice: what it draws from; all is put back.
        one: the rows of the longest sample.
        others: those of other samples.
    """
    states = dice.states()
    company = others[:: -(-len(others) // 3) or 1]

    def made(samples: Sequence[list[Any]]) -> tuple[list[Tensor], tuple[Any, ...]] | None:
        dice.put(states)
        rows = [row for sample in samples for row in sample]
        try:
            tensors = tensors_in(collate(copy.deepcopy(rows)))
        except Exception:  # it may need more
            return None
        own = [t.detach().cpu() for t in tensors if t.ndim and len(t) == len(rows)]
        return [t.unflatten(0, (-1, len(one))) for t in own], dice.told()

    try:
        copies = made([one] * (1 + len(company)))
        for place in sorted({0, len(company) // 2, len(company)}):
            samples = [*company[:place], one, *company[place:]]
            found = made(samples)
            if found is None or copies is None:
                return None
            if place == 0 and not _same(found, made(samples)):
                return _HIDDEN
            if [t.shape for t in found[0]] != [t.shape for t in copies[0]] or (place and found[1] != copies[1]):
                continue
            everywhere = range(len(samples))
            if not any(_same_row(found[0], i, copies[0], k) for i in everywhere for k in everywhere):
                return _MIXES
        return None
    finally:
        dice.put(states)


def _same(ours: tuple[list[Tensor], Any], theirs: tuple[list[Tensor], Any] | None) -> bool:
    return theirs is not None and len(ours[0]) == len(theirs[0]) and all(map(same, ours[0], theirs[0]))


def _same_row(ours: Sequence[Tensor], i: int, theirs: Sequence[Tensor], k: int) -> bool:
    return all(same(a[i], b[k]) for a, b in zip(ours, theirs, strict=True))


def keeps_order(collate: Callable[[list[Any]], Any], rows: Sequence[Any], most: int = 6) -> bool:
    """Whether rows come out of ``collate`` in the order in which they went in: some of them there and back.

    A row that comes out must be most like the one that it is said to be; where ``collate`` draws (it masks words), they
    need not be the same.
    """
    places = sorted({round(k * (len(rows) - 1) / (most - 1)) for k in range(most)})
    some = [rows[k] for k in places]
    there, back = (collate(copy.deepcopy(each)) for each in (some, some[::-1]))
    alike = torch.zeros(len(some), len(some))
    for one, other in zip(tensors_in(there), tensors_in(back), strict=False):
        if one.shape == other.shape and one.ndim and len(one) == len(some):
            a, b = (t.detach().cpu().reshape(len(some), -1) for t in (one, other))
            same = (b[:, None] == a) | ((b[:, None] != b[:, None]) & (a != a))
            alike += same.double().mean(2).nan_to_num(0)
    return bool((alike.flip(1).diagonal() >= alike.amax(1) - 1e-9).all())


class Pick(NamedTuple):
    """What is fetched for a draw.

    Attributes:
        indices: of the samples drawn.
        rows: which rows of the dataset make them up; for an empty draw, any, to show the shape.
        shares: as in `Draw`.
    """

    indices: Indices
    rows: Indices
    shares: NDArray[np.float32] | None = None

    @staticmethod
    def of(indices: Indices) -> "Pick":
        """Samples that are rows of the dataset."""
        return Pick(indices, indices if len(indices) else np.zeros(1, dtype=np.int64))


def on_device(dataset: Dataset[Any], loader: Mapping[str, Any]) -> bool:
    """Whether a batch of it is chosen from tensors, all of them on an accelerator."""
    return type(dataset) is TensorDataset and not loader and all(t.device.type != "cpu" for t in dataset.tensors)


class Ahead(Iterator[T]):
    """The same, of which one may be fetched ahead of time: while there is nothing else to do."""

    def __init__(self, source: Iterator[T]) -> None:
        self._source, self._fetched, self._one = source, list[T](), threading.Lock()

    def fetch(self) -> None:
        """One, unless there is one already, or somebody else is at it."""
        if self._one.acquire(blocking=False):
            try:
                self._fetched += [] if self._fetched else islice(self._source, 1)
            finally:
                self._one.release()

    def __next__(self) -> T:
        with self._one:
            return self._fetched.pop() if self._fetched else next(self._source)


def chosen_rows(tensors: Sequence[Tensor], draws: Iterable[Indices]) -> Iterator[tuple[Tensor, ...]]:
    """The chosen rows of each tensor, on the device where it is."""
    for indices in draws:
        chosen = torch.from_numpy(indices)
        there = {device: chosen.to(device, non_blocking=True) for device in {t.device for t in tensors}}
        yield tuple(t.index_select(0, there[t.device]) for t in tensors)  # three times as fast as t[...]


def fetched(
    dataset: Dataset[Any], loader: Mapping[str, Any], picks: Iterable[Pick], size: int, each: int | None = None
) -> Iterator[tuple[Pick, Any, Mapping[int, Any], Features | None]]:
    """(What was drawn, the data of it, some samples collated alone, what tells its samples apart if not seen there.)

    For an empty draw sample 0 shows the shape, and its values are blanked.

    Args:
        dataset: of rows.
        loader: options.
        picks: of each draw.
        size: of the dataset, as it was and must stay.
        each: rows of a person; None where samples are no people.
    """
    waiting: list[Pick] = []
    table: FeatureTable | None = None

    def rows() -> Iterator[Indices]:
        for pick in picks:
            if (now := len(dataset)) != size:  # type: ignore[arg-type]
                raise ValueError(
                    f"The dataset had {size} samples when the run was planned, and has {now} now. Sampling and "
                    "accounting rely on its size: add or remove samples between runs."
                )
            waiting.append(pick)
            yield pick.rows

    counted: Iterable[tuple[int, Any, Mapping[int, Any]]]
    if type(dataset) is TensorDataset and not loader:
        if any(t.device.type != "cpu" for t in dataset.tensors):
            table = FeatureTable(dataset.tensors)
        counted = ((len(data[0]), data, {}) for data in chosen_rows(dataset.tensors, rows()))
    else:
        collate = Collated(loader.get("collate_fn") or default_collate, each)
        chosen = (indices.tolist() for indices in rows())
        counted = DataLoader(dataset, batch_sampler=chosen, **{**loader, "collate_fn": collate})
    for count, data, singles in counted:
        pick = waiting.pop(0)
        if count != (wanted := len(pick.rows)):
            raise ValueError(
                f"The dataset gave {count} samples where {wanted} were drawn. Which of them are missing cannot be "
                "told. Give a sample for each index: one that cannot be read may be a constant, such as zeros."
            )
        if len(pick.indices):
            found = None if table is None else table[pick.rows]
            yield pick, data, singles, None if found is None else found.reshape(len(pick.indices), -1)
        else:
            yield pick, neutral(data), {}, None


def grouped(data: Any, each: int) -> Any:
    """A batch of people's records, (people·each, …), as (people, each, …)."""
    count = rows_of(data)
    if count is None:  # the engine will say so
        return data

    def apart(rows: Any) -> Any:
        if isinstance(rows, Tensor):
            return rows.unflatten(0, (-1, each)) if rows.ndim and len(rows) == count else rows
        got, action = f"a list of {len(rows)} values", "Leave it out, or make it a tensor."
        raise complaint("step", "batch", "of tensors where its rows are the records of people", got, action)

    return over_rows(data, apart, count)


def padded(data: Any, count: int, rows: int, *, copies: bool = False) -> Any:
    """Whatever in a batch has ``count`` rows, with neutral rows after them up to ``rows``.

    A neutral row is zeros, False or an empty string: never another sample's row.

    Args:
        copies: of the first row, in place of neutral rows, for a model that cannot take those.
    """
    more = rows - count

    def longer(values: Any) -> Any:
        if not has_rows(values, count):
            return values
        if isinstance(values, Tensor):
            extra = values[:1].expand(more, *values.shape[1:]) if copies else values.new_zeros(more, *values.shape[1:])
            return torch.cat([values, extra])
        return type(values)([*values, *(values[:1] if copies else [blank_of(values)]) * more])

    return over_rows(data, longer, count) if more else data
