"""Who is in the batch: Poisson, FixedSize, FullBatch, Shuffled, each with the accounting event it earns.

What a sampler draws and what an accountant is told about it must be one fact. So a sampler emits both: the
indices of a step (`Sampling.draws`) and the event those draws amount to (`Sampling.event`). The adjacency under
which the event holds belongs to the sampler too, and with it the sensitivity of the sum:

| sampler     | a sample is in a batch      | adjacency                 | sensitivity/bound | event            |
|-------------|-----------------------------|---------------------------|-------------------|------------------|
| `Poisson`   | with probability batch/size | add-remove                | 1                 | Poisson-sampled  |
| `FixedSize` | if among ``batch`` drawn    | replace-one               | 2                 | w/o replacement  |
| `FullBatch` | always                      | add-remove or replace-one | 1 or 2            | Gaussian × steps |
| `Shuffled`  | once per epoch              | zero-out or replace-one   | 1 or 2            | Gaussian × epochs|

``size`` and ``batch`` are public constants, stated by the user and never counted from the data. Sums are divided
by ``batch``, the *expected* size: the realised one is private.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import count
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from dpscale.chances import Chances, Source, streams
from dpscale.chances import Indices as Indices
from dpscale.checks import is_number, require, require_count, require_positive, settle_numbers

if TYPE_CHECKING:  # it takes as long to import as torch, and sampling does without it
    import dp_accounting

Adjacency = Literal["add-remove", "replace-one", "zero-out"]
"""Which two datasets are neighbours: one sample more or less, one exchanged, or one made to contribute nothing."""

Streams = Callable[[int], Chances]
"""The choices of each step, or epoch."""

Accountant = Literal["pld", "rdp"]
"""Privacy loss distributions (tight), or Rényi DP (looser, older, shown for comparison)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Draw:
    """One draw of a run. It stands for itself: a copy of it is the same draw.

    Attributes:
        number: 1 for the first draw of a run.
        indices: of the samples drawn; there may be none.
        mask: per row of the batch, True for a sample. An empty draw has one row, which is masked.
        shares: of a draw of people, (people, rows of each): the part of every row in the mean over its person's
            records. A person's rows stand together, and ``mask`` has one entry for each person. None: of samples.
        rows: of the batch.
    """

    number: int
    indices: Indices
    mask: NDArray[np.bool_]
    shares: NDArray[np.float32] | None = None
    rows: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", len(self.mask) if self.shares is None else self.shares.size)

    @staticmethod
    def of(number: int, indices: Indices, shares: NDArray[np.float32] | None = None) -> "Draw":
        """The draw of these samples.

        Example:
            >>> Draw.of(1, np.array([7, 9])).mask, Draw.of(2, np.array([], dtype=np.int64)).mask
            (array([ True,  True]), array([False]))
        """
        mask = np.arange(max(1, len(indices))) < len(indices)
        return Draw(number=number, indices=indices, mask=mask, shares=shares)

    def __copy__(self) -> "Draw":
        return self

    def __deepcopy__(self, memo: object) -> "Draw":
        return self


@dataclass(frozen=True, kw_only=True)
class Sampling(ABC):
    """How samples are chosen for each step, and what that choice is worth.

    Guarantee: the indices from `draws` are distributed as `event` says, under ``adjacency``.

    Args:
        size: number of samples in the dataset, a public constant.
        batch: expected number of samples per step, the public constant by which sums are divided.
    """

    words: ClassVar[str]  # the sampler in plain words, its numbers to be filled in
    accounted: ClassVar[str]  # how the event is accounted, in plain words
    note: ClassVar[str] = ""  # what a reader of the privacy statement must be told about this sampler
    independent: ClassVar[bool] = True  # draws know nothing of each other: one that is not used costs nothing

    size: int
    batch: int
    adjacency: Adjacency

    def __post_init__(self) -> None:
        settle_numbers(self)
        owner = type(self).__name__
        action = "The dataset is empty: give it samples." if self.size == 0 else "Pass len(dataset)."
        require_count(owner, "size", self.size, action=action)
        require_count(owner, "batch", self.batch, action="It is the expected number of samples per step.")
        action = "Take a smaller batch, or FullBatch for every sample in every step."
        require(self.batch <= self.size, owner, "batch", f"at most size = {self.size}", self.batch, action)

    @property
    def rate(self) -> float:
        """batch/size: the probability that a given sample is in a given batch."""
        return self.batch / self.size

    @property
    def sensitivity_factor(self) -> int:
        """Sensitivity of the sum over the bound of one sample: 2 where one sample takes another's place, else 1."""
        return 2 if self.adjacency == "replace-one" else 1

    @property
    def spread(self) -> float:
        """The standard deviation of a batch's size."""
        return 0.0

    def steps(self, epochs: float) -> int:
        """ceil(epochs · size / batch), in exact arithmetic: the number of steps in so many epochs.

        Example:
            >>> Poisson(size=60_000, batch=512).steps(20)
            2344
        """
        return math.ceil(_fraction(type(self).__name__, epochs) * Fraction(self.size, self.batch))

    def event(self, noise_multiplier: float, steps: int) -> "dp_accounting.DpEvent":
        """What ``steps`` steps release, for an accountant; nothing (`NoOpDpEvent`) after 0 steps.

        ``noise_multiplier`` is noise std / bound, whatever the adjacency. The Gaussian inside the event has noise
        std / *sensitivity*, so that no accountant has to know about the factor 2 of replace-one.
        """
        owner = f"{type(self).__name__}.event"
        ok = is_number(noise_multiplier) and 0 <= noise_multiplier < math.inf
        require(ok, owner, "noise_multiplier", "a finite number >= 0", noise_multiplier)
        require_count(owner, "steps", steps, least=0, action="Count the steps taken so far.")
        import dp_accounting

        if steps == 0:
            return dp_accounting.NoOpDpEvent()
        return self._compose(dp_accounting.GaussianDpEvent(noise_multiplier / self.sensitivity_factor), steps)

    def draws(self, rng: Source, *, start: int = 0, order: Indices | None = None) -> Iterator[Indices]:
        """The indices of step ``start``, ``start + 1``, … without end.

        One key is taken from ``rng``; every step (every epoch, for `Shuffled`) has its own generator under that
        key. So draws go on at step k by the same ``rng`` and ``start=k``. The amplification claimed for a sampler needs
        the draws to be secret: seed ``rng`` from the system (``numpy.random.default_rng()``) unless the run is only an
        experiment.

        Args:
            rng: the source of the key, or a `Secret`, which draws by a cryptographic generator.
            start: number of the first step.
            order: what `order` gave for the epoch of step ``start``, to go on in an epoch that another key began.
        """
        require_count(f"{type(self).__name__}.draws", "start", start, least=0)
        return self._draws(streams(rng), start, order)

    def order(self, rng: Source, step: int) -> Indices | None:
        """What a step that comes has in common with the one before it: the order of a shuffled epoch.

        None where nothing is: for independent draws, and between epochs. It is no secret, as no amplification is
        claimed where there is one.
        """
        return None

    def _draws(self, of_step: Streams, start: int, order: Indices | None) -> Iterator[Indices]:
        return (self._draw(of_step(step)) for step in count(start))

    def _draw(self, chances: Chances) -> Indices:
        raise NotImplementedError

    @abstractmethod
    def _compose(self, gaussian: "dp_accounting.GaussianDpEvent", steps: int) -> "dp_accounting.DpEvent": ...

    def describe(self) -> str:
        """The sampler in plain words."""
        return self.words.format(self=self)


@dataclass(frozen=True, kw_only=True)
class Poisson(Sampling):
    """Each sample is in the batch with probability batch/size, independently of every other. The default.

    A logical batch has a random size, possibly 0; ``batch`` is its expectation.
    """

    words = (
        "Poisson sampling: at every step each of {self.size:,} samples is in the batch with probability "
        "{self.batch}/{self.size} = {self.rate:.6g}, independently"
    )
    accounted = "privacy loss of a Poisson-sampled Gaussian, both ways, composed over the steps"
    adjacency: Adjacency = field(init=False, default="add-remove")

    @property
    def spread(self) -> float:
        """√(size · rate · (1 - rate)), as of a binomial count."""
        return math.sqrt(self.batch * (1 - self.rate))

    def _draw(self, chances: Chances) -> Indices:
        return chances.coins(self.size, self.rate)

    def _compose(self, gaussian: "dp_accounting.GaussianDpEvent", steps: int) -> "dp_accounting.DpEvent":
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(dp_accounting.PoissonSampledDpEvent(self.rate, gaussian), steps)


@dataclass(frozen=True, kw_only=True)
class FixedSize(Sampling):
    """Exactly ``batch`` samples, uniformly without replacement, afresh at every step.

    Neighbours replace one sample, so the sum can move by 2·bound: the same noise buys far less than under
    `Poisson` (MNIST preset at σ = 0.9: ε = 27.8 against 2.94).
    """

    words = (
        "fixed-size sampling: at every step {self.batch} of {self.size:,} samples, uniformly without replacement, "
        "drawn afresh"
    )
    accounted = "tight privacy loss of a Gaussian sampled without replacement, composed over the steps"
    adjacency: Adjacency = field(init=False, default="replace-one")

    def _draw(self, chances: Chances) -> Indices:
        return chances.subset(self.size, self.batch)

    def _compose(self, gaussian: "dp_accounting.GaussianDpEvent", steps: int) -> "dp_accounting.DpEvent":
        import dp_accounting

        sampled = dp_accounting.SampledWithoutReplacementDpEvent(self.size, self.batch, gaussian)
        return dp_accounting.SelfComposedDpEvent(sampled, steps)


@dataclass(frozen=True, kw_only=True)
class FullBatch(Sampling):
    """Every sample at every step: nothing is hidden by sampling, and the Gaussian releases compose exactly."""

    words = "full batch: all {self.size:,} samples at every step, so no amplification by sampling"
    accounted = "exact, one Gaussian release per step"
    batch: int = field(init=False, repr=False)
    adjacency: Adjacency = "add-remove"

    def __post_init__(self) -> None:
        object.__setattr__(self, "batch", self.size)
        super().__post_init__()
        _require_adjacency(self, "add-remove", "replace-one")

    def _draw(self, chances: Chances) -> Indices:
        return np.arange(self.size, dtype=np.int64)

    def _compose(self, gaussian: "dp_accounting.GaussianDpEvent", steps: int) -> "dp_accounting.DpEvent":
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(gaussian, steps)


@dataclass(frozen=True, kw_only=True)
class Shuffled(Sampling):
    """Shuffled epochs, as ordinary loaders do: each sample exactly once per epoch, the last batch maybe short.

    No amplification is claimed. A sample is in one release per epoch, so the cost is that of one Gaussian release
    per epoch begun, and the noise that gives a useful ε is far larger than under `Poisson`.
    """

    words = (
        "shuffled epochs: {self.size:,} samples in random order, {self.batch} at a time, {self.steps_per_epoch} steps "
        "per epoch"
    )
    accounted = "exact, one Gaussian release per epoch begun, no amplification by sampling"
    independent = False  # a batch that is left out brings the next epoch closer, and with it each sample's next release
    note = (
        "shuffled epochs get NO amplification by sampling here. The cost counts one full Gaussian release per "
        "epoch begun; use Poisson for a far smaller epsilon at the same noise."
    )
    adjacency: Adjacency = "zero-out"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_adjacency(self, "zero-out", "replace-one")

    @property
    def steps_per_epoch(self) -> int:
        """ceil(size/batch): a short last batch is a step like any other."""
        return -(-self.size // self.batch)

    def steps(self, epochs: float) -> int:
        """ceil(epochs · steps_per_epoch), in exact arithmetic."""
        return math.ceil(_fraction("Shuffled", epochs) * self.steps_per_epoch)

    def order(self, rng: Source, step: int) -> Indices | None:
        """The whole order of the epoch of ``step``, if that epoch has begun before it."""
        epoch, first = divmod(step, self.steps_per_epoch)
        return streams(rng)(epoch).order(self.size) if first else None

    def _draws(self, of_epoch: Streams, start: int, order: Indices | None) -> Iterator[Indices]:
        epoch, first = divmod(start, self.steps_per_epoch)
        while True:
            order = of_epoch(epoch).order(self.size) if order is None else order
            for step in range(first, self.steps_per_epoch):
                yield order[step * self.batch : (step + 1) * self.batch]
            epoch, first, order = epoch + 1, 0, None

    def _compose(self, gaussian: "dp_accounting.GaussianDpEvent", steps: int) -> "dp_accounting.DpEvent":
        import dp_accounting

        return dp_accounting.SelfComposedDpEvent(gaussian, -(-steps // self.steps_per_epoch))


def _fraction(owner: str, epochs: float) -> Fraction:
    # Through the decimal text, so that 0.1 epochs means 1/10 and not the binary float a little above it.
    require_positive(f"{owner}.steps", "epochs", epochs, action="Pass the number of passes over the data.")
    return Fraction(epochs) if isinstance(epochs, int) else Fraction(repr(float(epochs)))


def _require_adjacency(sampling: Sampling, *allowed: Adjacency) -> None:
    must, action = " or ".join(map(repr, allowed)), "Say which two datasets are to be indistinguishable."
    require(sampling.adjacency in allowed, type(sampling).__name__, "adjacency", must, sampling.adjacency, action)


SAMPLERS: dict[str, type[Sampling]] = {
    "poisson": Poisson, "fixed-size": FixedSize, "full-batch": FullBatch, "shuffled": Shuffled,
}  # fmt: skip
"""Every sampler by its short name: the command line and the conformance tests read this."""
