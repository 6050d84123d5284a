"""Momentum: over which released points a sample's gradient is combined, and what becomes of the noisy sum.

A private query is a fixed linear combination of one sample's gradients at weights that are already released, scaled by
the norm of the combination. Past weights are known to everybody, so a combination over them costs no more privacy than
one gradient; what is done with the noisy sum afterwards is post-processing and costs none. The scaling comes after the
inner average: scaled gradients that are averaged over steps would each be a release of their own.

| momentum       | points of a step k                    | coefficients              | of the noisy sum           |
|----------------|---------------------------------------|---------------------------|----------------------------|
| (none)         | w_k                                   | 1                         | g                          |
| `HeavyBall`    | w_k                                   | 1                         | M = (1-γ1)·M + g           |
| `InnerOuter`   | w_{k-K0} … w_k                        | γ0^(k-l) (÷ their sum)    | M = (1-γ1)·M + g           |
| `PerSampleEMA` | all of w_0 … w_k, or a window of them | γ(1-γ)^(k-l); (1-γ)^k     | g                          |
| `DiSK`         | w_k + γ(w_k - w_{k-1}), w_k           | a, 1-a; a = (1-κ)/(κγ)    | M = (1-κ)·M + κ·g          |
"""

import logging
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from dpscale.checks import is_number, require, require_choice, require_count, require_positive
from dpscale.engine.compat import foreach_add_, foreach_copy_, foreach_mul_, tree_leaves, tree_map
from dpscale.sampling import FullBatch, Sampling

log = logging.getLogger("dpscale")

Weights = Mapping[str, Tensor]

Keep = Literal["gradients", "weights"]


class MomentumState:
    """What a run remembers from step to step.

    The tensors of its points keep their storage, so that one compiled step serves the whole run.

    Args:
        parameters: the trainable parameters, which an optimizer updates in place.
        outer: (a, b) of the average of the noisy sums, M = a·M + b·g.
    """

    entries: ClassVar[tuple[str, ...]] = ("average",)  # of what `saved` gives

    def __init__(self, parameters: Weights, outer: tuple[float, float] = (0.0, 1.0)) -> None:
        self._now, self._then = parameters, _described(parameters)
        self._carried, self._fresh = outer
        self._average: dict[str, Tensor] = {}

    def changed(self, parameters: Weights) -> str | None:
        """A parameter that was frozen, unfrozen, moved, converted or replaced since the first step, if there is one."""
        now, then = _described(parameters), self._then
        if now == then:
            return None
        (names, *each), (others, *known) = now, then
        differ = set(zip(names, *each, strict=True)) ^ set(zip(others, *known, strict=True))
        return min((name for name, *_ in differ), default=None)

    def points(self) -> list[tuple[float, Weights]]:
        """Coefficients and weights for the step that comes, w_k last; a coefficient of 0 stands for no point yet."""
        return [(1.0, self._now)]

    def release(self, sums: dict[str, Tensor]) -> None:
        """Take note of w_k, and turn the noisy sum into what the optimizer gets, in place. Once per step."""
        fresh = list(sums.values())
        if self._fresh != 1:
            foreach_mul_(fresh, self._fresh)
        if self._carried == 0:
            return
        if not self._average:
            self._average = {n: t.clone() for n, t in sums.items()}
            return
        average = [self._average[n] for n in sums]
        foreach_add_(fresh, average, alpha=self._carried)
        foreach_copy_(average, fresh)

    def allocate(self, samples: int) -> None:
        """Make room for what is kept for each sample, where anything is."""

    def saved(self) -> dict[str, Any]:
        """What a checkpoint holds: numbers, and tensors by the names of the parameters. Not copied."""
        return {"average": dict(self._average)}

    def fits(self, saved: Mapping[str, Any], samples: int) -> bool:
        """Whether `restore` can go on from it: the same names, and tensors of the parameters' shapes."""
        shapes = {n: p.shape for n, p in self._now.items()}
        tables = [saved.get("average"), saved.get("last", {}), *saved.get("places", ())]
        memory, room = saved.get("memory"), (samples, sum(p.numel() for p in self._now.values()))
        return (
            set(saved) == set(self.entries)
            and all(isinstance(t, Mapping) and {n: v.shape for n, v in t.items()} in (shapes, {}) for t in tables)
            and (memory is None or tuple(memory.shape) == room)
        )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Go on from what `saved` gave, once there is room for it."""
        self._average = {n: t.to(self._now[n].device, copy=True) for n, t in saved["average"].items()}

    def remember(self, grads: Mapping[str, Tensor], rows: slice, keep_B: Tensor) -> dict[str, Tensor]:
        """Per-sample vectors in place of the gradients of the samples ``rows``, for a momentum with ``per_sample``."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Momentum(ABC):
    """A choice of points and of what follows the noise."""

    words: ClassVar[str]  # in plain words, for a privacy statement; its numbers to be filled in

    @property
    def evaluations(self) -> int:
        """Gradients per sample and step: the factor on the cost."""
        return 1

    @property
    def alone(self) -> bool:
        """Whether a sample's gradient at the present weights is all that is asked of it."""
        return self.evaluations == 1 and not self.per_sample

    @property
    def per_sample(self) -> bool:
        """Whether every sample has a memory of its own, by its place in the dataset."""
        return False

    @abstractmethod
    def start(self, parameters: Weights) -> MomentumState:
        """The memory of a new run."""

    def describe(self) -> str:
        """In plain words, for a privacy statement."""
        return self.words.format(self=self)

    def check(self, sampling: Sampling) -> None:
        """Refuse a sampler under which the accountant's argument would not hold."""
        return


@dataclass(frozen=True, kw_only=True)
class HeavyBall(Momentum):
    """M_k = (1-γ1)·M_{k-1} + noisy sum: outer momentum alone, for baselines.

    Without damping it multiplies the effective learning rate by 1/γ1 in the long run.

    Args:
        gamma1: in (0, 1]; 1 forgets at once.
    """

    words = "heavy ball on the noisy sums (gamma1 = {self.gamma1:g}), which is post-processing"
    gamma1: float

    def __post_init__(self) -> None:
        _require_share(self, "gamma1", self.gamma1)

    def start(self, parameters: Weights) -> MomentumState:
        """Remembers M."""
        return MomentumState(parameters, outer=(1 - self.gamma1, 1.0))


@dataclass(frozen=True, kw_only=True)
class InnerOuter(Momentum):
    """DP-PSASC's own (Algorithm 3, as corrected): inner momentum over K0 past points, outer momentum on the noisy sums.

    m_{k,i} = Σ_{l=max(0,k-K0)}^{k} γ0^{k-l} ∇f(w_l; d_i), scaled by its norm; M_k = (1-γ1)·M_{k-1} + noisy sum.

    Args:
        K0: past points, 0 or more. A step costs K0 + 1 gradients.
        gamma0: in (0, 1]: the coefficient of a point falls by this with every step of its age.
        gamma1: in (0, 1]: as in `HeavyBall`.
        normalize: divide the coefficients by their sum, so that m is an average.

    Example:
        >>> import torch
        >>> state = InnerOuter(K0=2, gamma0=0.5, gamma1=0.1).start({"w": torch.zeros(3)})
        >>> [coefficient for coefficient, _ in state.points()]  # nothing is past yet
        [0.0, 0.0, 1.0]
    """

    K0: int
    gamma0: float
    gamma1: float
    normalize: bool = False

    def __post_init__(self) -> None:
        ok = isinstance(self.K0, int) and not isinstance(self.K0, bool) and self.K0 >= 0
        require(ok, "InnerOuter", "K0", "an integer, 0 or more", self.K0, "It counts the past points: 2 is a start.")
        _require_share(self, "gamma0", self.gamma0, "1 weighs all K0 + 1 points alike; K0 = 0 stands for no memory.")
        _require_share(self, "gamma1", self.gamma1)

    @property
    def evaluations(self) -> int:
        """K0 past ones and the present one."""
        return self.K0 + 1

    def start(self, parameters: Weights) -> MomentumState:
        """Remembers K0 weights, and M."""
        outer = 1 - self.gamma1, 1.0
        return _Ring(parameters, self.K0, lambda age, _: self.gamma0**age, normalize=self.normalize, outer=outer)

    def describe(self) -> str:
        """In plain words."""
        return (
            f"each sample's gradients at the {self.K0} last released weights are combined with the present one "
            f"(gamma0 = {self.gamma0:g}{', normalized' if self.normalize else ''}) before they are scaled; heavy ball "
            f"on the noisy sums (gamma1 = {self.gamma1:g})"
        )


@dataclass(frozen=True, kw_only=True)
class DiSK(Momentum):
    """The simplified Kalman filter of Zhang et al. (DiSK, 2024), with any scaling rule in place of its clipping.

    A sample's gradient is a·∇f(w_k + γ(w_k - w_{k-1})) + (1-a)·∇f(w_k) with a = (1-κ)/(κγ), one coefficient negative
    for a > 1; the noisy sums are averaged, M_k = (1-κ)·M_{k-1} + κ·noisy sum, from M_{-1} = 0.

    Args:
        kappa: in (0, 1]; 1 is no filter at all.
        gamma: how far to look ahead, above 0. At γ = (1-κ)/κ the present point drops out.
    """

    words = (
        "each sample's gradients at the released weights and at a point ahead of them (gamma = {self.gamma:g}) are "
        "combined before they are scaled; the noisy sums are averaged (kappa = {self.kappa:g})"
    )
    kappa: float
    gamma: float

    def __post_init__(self) -> None:
        _require_share(self, "kappa", self.kappa)
        require_positive("DiSK", "gamma", self.gamma, action="It says how far to look ahead; 0.5 is a start.")

    @property
    def evaluations(self) -> int:
        """Ahead and here."""
        return 2

    def start(self, parameters: Weights) -> MomentumState:
        """Remembers the last weights, and M."""
        ahead = (1 - self.kappa) / (self.kappa * self.gamma)
        return _Ahead(parameters, self.gamma, ahead, (1 - self.kappa, self.kappa))


@dataclass(frozen=True, kw_only=True)
class PerSampleEMA(Momentum):
    """Algorithm 2, as corrected: each sample's gradients averaged over all steps, m_k = γ·g_k + (1-γ)·m_{k-1}.

    Every sample needs its gradient at every step, so the plan must take the full batch. What a sample remembers is
    never released: only its scaled average enters the noisy sum.

    Args:
        gamma: in (0, 1]; 1 remembers nothing.
        keep: "gradients": exactly, as many numbers as parameters for every sample; "weights": the same average over a
            window of released weights, with as many gradients per step as it is long.
        tolerance: for "weights": coefficients that sum to no more than this are left out.
        directory: for "gradients": keep them in a nameless file there instead of in memory, gone with the run.
    """

    words = "each sample's gradients are averaged over the steps (gamma = {self.gamma:g}) before they are scaled"
    gamma: float
    keep: Keep = "gradients"
    tolerance: float = 1e-3
    directory: str | None = None

    def __post_init__(self) -> None:
        _require_share(self, "gamma", self.gamma)
        require_choice("PerSampleEMA", "keep", self.keep, Keep)
        ok = is_number(self.tolerance) and 0 < self.tolerance < 1
        require(ok, "PerSampleEMA", "tolerance", "between 0 and 1", self.tolerance)
        require(self.directory is None or Path(self.directory).is_dir(), "PerSampleEMA", "directory",
                "a folder that exists", self.directory, "Make it first.")  # fmt: skip

    @property
    def evaluations(self) -> int:
        """One, or the window's length: the tail (1-γ)^length is within the tolerance."""
        if self.keep == "gradients" or self.gamma == 1:
            return 1
        return math.ceil(math.log(self.tolerance) / math.log(1 - self.gamma))

    @property
    def per_sample(self) -> bool:
        """Unless weights are kept in its stead."""
        return self.keep == "gradients"

    def check(self, sampling: Sampling) -> None:
        """Only the full batch."""
        require(
            isinstance(sampling, FullBatch), "PerSampleEMA", "sampling", "FullBatch", type(sampling).__name__,
            "A sample that is not drawn has no gradient to average, and what it remembers from the last time would "
            "tell when that was, which amplification by sampling counts on being secret. Use InnerOuter, whose memory "
            "is made of released weights alone.",
        )  # fmt: skip

    def start(self, parameters: Weights) -> MomentumState:
        """Remembers m of every sample, or weights."""
        if self.keep == "gradients":
            return _Averages(parameters, self.gamma, self.directory)
        share, places = self.gamma, self.evaluations - 1
        return _Ring(parameters, places, lambda age, step: (1 if age == step else share) * (1 - share) ** age)


MOMENTA: dict[str, type[Momentum]] = {
    "heavy-ball": HeavyBall, "inner-outer": InnerOuter, "per-sample-ema": PerSampleEMA, "disk": DiSK,
}  # fmt: skip
"""Every momentum by its name on the command line."""


class _Ring(MomentumState):
    """The last K weights, each in a place of its own: with every step the oldest is overwritten.

    ``coefficient(age, step)`` is that of the weights of ``age`` steps ago.
    """

    entries = ("average", "step", "places")

    def __init__(
        self, parameters: Weights, places: int, coefficient: Callable[[int, int], float], *, normalize: bool = False,
        outer: tuple[float, float] = (0.0, 1.0),
    ) -> None:  # fmt: skip
        super().__init__(parameters, outer)
        self._places = [{n: p.detach().clone() for n, p in parameters.items()} for _ in range(places)]
        self._coefficient, self._normalize = coefficient, normalize
        self._step = 0

    def points(self) -> list[tuple[float, Weights]]:
        """As many as there are places, and the present one."""
        k = self._step
        ages = [(k - 1 - place) % len(self._places) + 1 for place in range(len(self._places))]
        coefficients = [self._coefficient(age, k) if age <= k else 0.0 for age in (*ages, 0)]
        whole = sum(coefficients) if self._normalize else 1.0
        return [(c / whole, w) for c, w in zip(coefficients, (*self._places, self._now), strict=True)]

    def release(self, sums: dict[str, Tensor]) -> None:
        """The present weights take the oldest ones' place."""
        if self._places:
            _copy(self._now, self._places[self._step % len(self._places)])
        self._step += 1
        super().release(sums)

    def saved(self) -> dict[str, Any]:
        """The past weights too, and whose turn it is."""
        return {**super().saved(), "step": self._step, "places": [dict(place) for place in self._places]}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """In the places that are there."""
        super().restore(saved)
        self._step = saved["step"]
        for source, target in zip(saved["places"], self._places, strict=True):
            _copy(source, target)


class _Ahead(MomentumState):
    """The present weights, and where they would be some way on along their last move."""

    entries = ("average", "last")

    def __init__(self, parameters: Weights, way: float, coefficient: float, outer: tuple[float, float]) -> None:
        super().__init__(parameters, outer)
        self._way, self._coefficient = way, coefficient
        self._last, self._ahead = ({n: p.detach().clone() for n, p in parameters.items()} for _ in range(2))

    def points(self) -> list[tuple[float, Weights]]:
        """Ahead, and here."""
        with torch.no_grad():
            for name, now in self._now.items():
                torch.add(now, now - self._last[name], alpha=self._way, out=self._ahead[name])
        return [(self._coefficient, self._ahead), (1 - self._coefficient, self._now)]

    def release(self, sums: dict[str, Tensor]) -> None:
        """The present weights become the last ones."""
        _copy(self._now, self._last)
        super().release(sums)

    def saved(self) -> dict[str, Any]:
        """The last weights too."""
        return {**super().saved(), "last": dict(self._last)}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """In the place that is there."""
        super().restore(saved)
        _copy(saved["last"], self._last)


class _Averages(MomentumState):
    """Every sample's average, (N, d): made at the first step, when N is known."""

    entries = ("average", "started", "memory")

    def __init__(self, parameters: Weights, gamma: float, directory: str | None) -> None:
        super().__init__(parameters)
        self._gamma, self._directory = gamma, directory
        self._numbers = sum(p.numel() for p in parameters.values())
        self._memory: Tensor | None = None
        self._waiting: list[tuple[slice, Tensor]] = []
        self._started = False

    def points(self) -> list[tuple[float, Weights]]:
        """The present one; what a step that failed has left is forgotten."""
        self._waiting.clear()
        return super().points()

    def allocate(self, samples: int) -> None:
        """Room for the averages; says how much before it is taken."""
        first = next(iter(self._now.values()))
        dtype = torch.promote_types(first.dtype, torch.float32)
        gib = dtype.itemsize * samples * self._numbers / 2**30
        size = f"{samples:,} samples × {self._numbers:,} parameters, {gib:.2f} GiB"
        if self._directory is None:
            log.warning("dpscale: PerSampleEMA keeps an average for every sample in memory: %s", size)
            self._memory = torch.zeros(samples, self._numbers, dtype=dtype, device=first.device)
            return
        log.warning("dpscale: PerSampleEMA keeps an average for every sample in %s: %s", self._directory, size)
        number = np.float64 if dtype == torch.float64 else np.float32
        # They are exact: no other run may share the file, nobody else may read it, and it must not outlive this one.
        with tempfile.TemporaryFile(dir=self._directory) as file:
            self._memory = torch.from_numpy(np.memmap(file, number, "w+", shape=(samples, self._numbers)))

    def remember(self, grads: Mapping[str, Tensor], rows: slice, keep_B: Tensor) -> dict[str, Tensor]:
        """m = γ·g + (1-γ)·m; the memory itself changes only with `release`. A gradient that is not finite is passed on
        as it is, to be counted, and not remembered."""
        assert self._memory is not None
        g = torch.cat([t.unsqueeze(-1).flatten(1) for t in grads.values()], 1)
        held = self._memory[rows].to(g.device)
        m = torch.lerp(held, g.to(held.dtype), self._gamma) if self._started else g.to(held.dtype)
        finite = torch.isfinite(m).all(1) & keep_B
        self._waiting.append((rows, held.where(~finite.unsqueeze(1), m).to(self._memory.device)))
        parts = m.split([t[:1].numel() for t in grads.values()], 1)
        return {name: part.view(t.shape) for (name, t), part in zip(grads.items(), parts, strict=True)}

    def release(self, sums: dict[str, Tensor]) -> None:
        """What was computed for this step is the memory for the next."""
        assert self._memory is not None
        for rows, m in self._waiting:
            self._memory[rows] = m
        self._waiting.clear()
        self._started = True

    def saved(self) -> dict[str, Any]:
        """Every sample's average, as it is: not private."""
        assert self._memory is not None
        return {**super().saved(), "started": self._started, "memory": self._memory}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Into the room that was made for it."""
        assert self._memory is not None
        super().restore(saved)
        self._started = saved["started"]
        self._memory.copy_(saved["memory"])


def _described(parameters: Weights) -> tuple[list[Any], ...]:
    """The names, and for each what it is and where."""
    ps = list(parameters.values())
    return list(parameters), [*map(id, ps)], [p.shape for p in ps], [p.dtype for p in ps], [p.device for p in ps]


def _copy(source: Weights, target: Weights) -> None:
    with torch.no_grad():
        foreach_copy_([target[n] for n in source], [p.detach().to(target[n].device) for n, p in source.items()])


def _require_share(owner: Any, name: str, value: float, action: str = "1 stands for no memory.") -> None:
    ok = is_number(value) and 0 < value <= 1
    require(ok, type(owner).__name__, name, "above 0 and at most 1", value, action)


def views(batch: tuple[Tensor, ...], count: int, transform: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
    """Augmentation multiplicity: ``count`` views of every sample, to be averaged before they are scaled.

    Args:
        batch: the inputs first; what follows (labels) is repeated.
        count: views of each sample.
        transform: from (B·count, *shape) inputs to as many, at random, each row for itself.

    Returns:
        tensors of shape (B, count, *shape), for a loss function wrapped in `over_views`.

    Example:
        >>> import torch
        >>> x, y = views((torch.zeros(4, 3), torch.arange(4)), 2, lambda x: x + torch.randn_like(x))
        >>> x.shape, y[1]
        (torch.Size([4, 2, 3]), tensor([1, 1]))
    """
    require_count("views", "count", count)
    x, *rest = (t.repeat_interleave(count, 0) for t in batch)
    return tuple(t.unflatten(0, (len(batch[0]), count)) for t in (transform(x), *rest))


def over_views(loss_fn: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A loss function for batches of `views`: the mean over each sample's views, so that a sample has one gradient."""

    def losses(model: Any, batch: Any) -> Tensor:
        shape = tree_leaves(batch)[0].shape[:2]
        flat = tree_map(lambda t: t.flatten(0, 1), batch)
        return loss_fn(model, flat).view(shape).mean(1)

    return losses
