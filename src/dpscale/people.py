"""People instead of rows: a person is drawn with several of their records, and what is bounded is the person.

A sample of a private run is then a person. Its gradient is the mean of its records' gradients, scaled once; so the sum
moves by no more than the bound if a person comes, goes, or changes all of their records, however many they have. What
is drawn, counted and accounted for is people.

In a batch every person has the same number of rows, which stand together: records that were taken, then copies of the
person's own first record up to that number, which have no part in the mean. So (people·rows, …) is (people, rows, …),
and the engine sees one sample in each group, as it sees the time steps of a sequence.
"""

import functools
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from dpscale.batches import Batch, Pick, grouped
from dpscale.chances import Chances
from dpscale.checks import complaint, plain_number, require, require_count
from dpscale.engine import LossFn, check_losses
from dpscale.engine.arguments import device_of, over_rows
from dpscale.sampling import Indices
from dpscale.sources import column_of, dataset_of, is_frame

_AS_LIST = ("tolist", "to_pylist", "to_list")
"""What gives plain values: of arrays, tensors and pandas; of Arrow; of Polars."""


class People(Dataset[list[Any]]):
    """A data set of people; made by `by_user`. Its length is how many they are.

    Attributes:
        dataset: of the records.
        size: how many records there are in all.
        users: the people, by their place.
        records: the most that are taken of one person.
        each: rows of a person in a batch: as many as the person with most records takes up.
    """

    def __init__(self, dataset: Dataset[Any], users: Sequence[Hashable], of: Sequence[Indices], records: int) -> None:
        self.dataset, self.users, self.records = dataset, list(users), records
        self.size = len(dataset)  # type: ignore[arg-type]
        self._of = list(of)
        self.each = min(records, max(map(len, self._of), default=1))

    def __len__(self) -> int:
        return len(self._of)

    def __getitem__(self, person: int) -> list[Any]:
        """All records of a person."""
        return [self.dataset[i] for i in self._of[person].tolist()]

    def __repr__(self) -> str:
        return f"People(people={len(self)}, records={sum(map(len, self._of))}, at most {self.records} of each)"

    def some(self, people: Sequence[int]) -> "People":
        """A part of them, with all of their records."""
        places = [int(i) for i in people]
        twice = len(places) - len({*places})
        require(not twice, "People", "people", "each named once", f"{twice} named again")
        return People(self.dataset, [self.users[i] for i in places], [self._of[i] for i in places], self.records)

    def picks(self, draws: Iterable[Indices], first: int, chances: Callable[[str], Chances]) -> Iterator[Pick]:
        """Which records are taken for each draw.

        Of a person with more than `records`, a random subset, afresh in each draw. It depends on the run's key, the
        number of the draw and the person alone: who else was drawn, and how many records others have, changes nothing.

        Args:
            draws: people, by their place.
            first: the number of the first draw.
            chances: of the run, by label.
        """
        for number, people in enumerate(draws, first):
            if not len(people):
                shown = np.full(self.each, self._of[0][0])
                yield Pick(people, shown, np.zeros((1, self.each), dtype=np.float32))
                continue
            taken = [self._taken(person, number, chances) for person in people.tolist()]
            shares = np.zeros((len(taken), self.each), dtype=np.float32)
            rows = np.empty(shares.shape, dtype=np.int64)
            for k, records in enumerate(taken):
                shares[k, : len(records)] = 1 / len(records)
                rows[k, : len(records)], rows[k, len(records) :] = records, records[0]
            yield Pick(people, rows.reshape(-1), shares)

    def _taken(self, person: int, number: int, chances: Callable[[str], Chances]) -> Indices:
        own = self._of[person]
        if len(own) <= self.records:
            return own
        return own[chances(f"records/{number}/{person}").subset(len(own), self.records)]


def by_user(dataset: Any, users: Any, *, records: int, target: str | None = None) -> People:
    """A data set of people, to be given to `make_private` or `Private.batches` in place of one of records.

    Guarantee: a run on it protects people, each with all of their records: ε and δ hold for two data sets of which one
    has one person more. At every step people are drawn by the plan, at most ``records`` of each one's records are
    taken, and the mean of their gradients is what the rule scales. ``size`` and ``batch`` of the plan count people.

    The records of a person who has more are chosen at random in each draw. That costs no privacy: whatever is chosen is
    the person's own, and their part in the sum is bounded all the same. A fixed choice would promise no more, and would
    never learn from the rest.

    Args:
        dataset: of records: whatever `make_private` takes, but no DataLoader.
        users: for each record, whose it is: numbers or names. For a data frame or a Hugging Face dataset, also the name
            of the column, which is then not among the inputs.
        records: the most that are taken of one person at a step. Every person takes up as many rows, so it costs time.
        target: the column of a data frame that is to be learned.

    Example:
        >>> import torch, dpscale; from torch.utils.data import TensorDataset
        >>> visits = TensorDataset(torch.randn(6, 3), torch.tensor([0, 1, 1, 0, 1, 0]))
        >>> people = dpscale.by_user(visits, ["ann", "bob", "ann", "ann", "eve", "bob"], records=2)
        >>> len(people), people.users, len(people[0])
        (3, ['ann', 'bob', 'eve'], 3)
    """
    records = plain_number(records)
    require_count("by_user", "records", records, action="It is the most that are taken of one person; 8 is a start.")
    named = isinstance(users, str)
    owners = column_of("by_user", dataset, users) if named else users
    rows = dataset_of("by_user", dataset, target, without=[users] if named else [], name="dataset")
    action = "For households, give each record its household in place of its person."
    require(people_of(rows) is None, "by_user", "dataset", "of records", "people", action)
    size = len(rows)  # type: ignore[arg-type]
    require(size > 0, "by_user", "dataset", "a dataset with at least one record", "an empty dataset")
    places: dict[Hashable, list[int]] = {}
    for place, user in enumerate(_plain(owners, size)):
        places.setdefault(user, []).append(place)
    return People(rows, list(places), [np.array(own, dtype=np.int64) for own in places.values()], records)


def _plain(users: Any, size: int) -> list[Hashable]:
    """Whose each record is, in values that can be compared."""
    must = "numbers or names, one for each record"
    action = "Give a person for each record, in the order of the dataset."
    listed = isinstance(users, Iterable) and not isinstance(users, Mapping | Set | bytes) and not is_frame(users)
    require(listed, "by_user", "users", must, type(users).__name__, action)
    as_list = next((getattr(users, name) for name in _AS_LIST if hasattr(users, name)), None)
    owners = list(users) if as_list is None else as_list()
    require(len(owners) == size, "by_user", "users", f"of {size} entries, one for each record", len(owners), action)
    kinds: dict[type, Any] = {}
    for place, user in enumerate(owners):
        if not _names_somebody(user):
            action = "Leave out records of nobody, or give each a person of its own."
            raise complaint("by_user", "users", must, f"{user} for record {place}", action)
        kinds.setdefault(next((kind for kind in (Number, str, bytes) if isinstance(user, kind)), type(user)), user)
    told = " and ".join(f"{user!r} ({type(user).__name__})" for user in [*kinds.values()][:2])
    require(len(kinds) <= 1, "by_user", "users", "of one type", told,
            "One person written in two ways would be two people: convert them all, such as by str().")  # fmt: skip
    return owners


def _names_somebody(user: Any) -> bool:
    """Whether a value names a person: it is not missing (None, NaN, NaT, NA), and equals what is written alike."""
    if isinstance(user, tuple):
        return all(map(_names_somebody, user))
    by_value = any("__eq__" in vars(made) for made in type(user).__mro__ if made is not object)
    return by_value and isinstance(user, Hashable) and not isinstance(user, Tensor) and _is_true(user == user)


def _is_true(answer: Any) -> bool:
    """Whether a comparison says yes; that of a missing value may say neither."""
    try:
        return bool(answer)
    except (TypeError, ValueError):
        return False


def people_of(dataset: Any) -> People | None:
    """The people that a dataset is of: itself, or a part of them; None where it is of samples."""
    if isinstance(dataset, Subset) and (whole := people_of(dataset.dataset)) is not None:
        return whole.some(dataset.indices)
    joined = isinstance(dataset, ConcatDataset) and any(people_of(part) is not None for part in dataset.datasets)
    require(not joined, "batches", "dataset", "people in one data set", "several joined together",
            "One person may be in two of them: join the records, then call by_user.")  # fmt: skip
    return dataset if isinstance(dataset, People) else None


def by_person(batch: Batch, loss_fn: LossFn) -> tuple[Batch, LossFn]:
    """A batch of people's records, and a loss per record, as a batch of people and a loss per person."""
    shares = batch.draw.shares
    assert shares is not None
    share_PR = torch.from_numpy(shares).to(device_of(batch.data), non_blocking=True)
    each = shares.shape[1]
    singles = {place: (grouped(data, each), share_PR[place : place + 1]) for place, data in batch.singles.items()}
    return Batch((grouped(batch.data, each), share_PR), batch.draw, singles, batch.rows), over_records(loss_fn)


def over_records(loss_fn: Callable[[Any, Any], Tensor]) -> LossFn:
    """From (people, rows, …) and shares to the mean of each person's losses."""

    @functools.wraps(loss_fn, assigned=(), updated=())
    def losses(model: Any, batch: Any) -> Tensor:
        data, share_PR = batch
        flat = over_rows(data, lambda t: t.flatten(0, 1) if isinstance(t, Tensor) and t.ndim > 1 else t)
        return mean_of(loss_fn(model, flat), share_PR)

    return losses


def mean_of(losses: Tensor, share_PR: Tensor) -> Tensor:
    """The mean of each person's losses, from one loss per row."""
    rows: Tensor = check_losses(losses, share_PR.shape[0] * share_PR.shape[1]).unflatten(0, share_PR.shape)
    return (rows * share_PR).sum(1)
