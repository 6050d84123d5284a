"""Which batch and how many epochs a privacy budget is best spent on. It reads public numbers alone, never data.

What reaches the weights is the sum of the noise over the run. Per unit of bound and learning rate its size is the
*cumulative noise* ν = σ/(B·√T), for noise multiplier σ, expected batch B and T steps. At a given (size, ε, δ) it falls
with the batch and the epochs, towards the *floor*: what a run on full batches has, however long it is,

    floor = σ₁/size,   σ₁: the noise of a single Gaussian release at (ε, δ).

In between, ν/floor is 1 + 1/(4σ²) or more: noise below about 1 is overpaid. A run costs B·T samples. Since full batches
are at the floor with a single step, a planner must be told how many steps an optimizer needs: ``least_steps``.

The same reasoning is in Sander et al., "TAN without a burn" (2023).
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from dpscale.checks import require, require_choice, require_count, require_positive, require_probability
from dpscale.momentum import Momentum
from dpscale.plan import MOST_STEPS, Plan
from dpscale.sampling import Accountant, Poisson
from dpscale.scaling import Clip, Scaling

KNEE = 0.2
"""From the knee on, twice the effort lowers the noise by less than this part of it."""
NEAR = 0.02  # this far above the floor there is nothing left to gain, and a line of the grid ends
SLACK = 0.005  # an estimate this close to the limit is calibrated before it is judged
LINES, DOUBLINGS, LONGEST = 7, 4, 8  # batches of the grid, epochs of each; epochs or batches where one is given
RATE_STEPS = (1600, 8000)
"""Normalized rate × steps of the runs that did best, which had 1,000 to 4,700 steps: see `Advice.rates`."""


RATE_NOISE = (0.06, 0.3)
"""Normalized rate × steps × cumulative noise, which is the noise that a weight has gathered in the end: beyond these,
rates that are right for the steps are too much. See `Advice.rates`."""


GATHERED = 16.0
"""Normalized rate × steps × cumulative noise × √parameters of the runs that did best: the norm of the noise that all
weights together have gathered in the end. Fitted by ``experiments/rate_rule.py``, which judges it too."""


def rates_for(steps: int, cumulative_noise: float, parameters: int | None = None) -> tuple[float, float]:
    """Normalized learning rates to try in a run of so many steps and so much noise: see `Advice.rates`."""
    measured, gathered = min(max(steps, 1000), 4700), max(steps * cumulative_noise, 1e-9)
    of_one = GATHERED / math.sqrt(parameters) if parameters else None
    noise = RATE_NOISE if of_one is None else (of_one / 2, of_one * 2)
    lowest, highest = (
        min(by_steps / measured, by_noise / gathered) for by_steps, by_noise in zip(RATE_STEPS, noise, strict=True)
    )
    return lowest, highest


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A batch and a number of epochs, what noise they need for the budget, and what they cost.

    Attributes:
        batch, epochs, steps: expected batch size, passes over the data, optimizer steps.
        noise_multiplier: σ, noise std / bound.
        cumulative_noise: ν = σ/(batch·√steps).
        over_floor: ν/floor; 1 is the least that any setting has.
        samples: batch·steps, how many per-sample gradients are computed, on average.
        seconds: samples/throughput; None if no throughput was given.
        exact: whether σ was calibrated by the plan. Otherwise it is an estimate, close enough to compare.
    """

    batch: int
    epochs: float
    steps: int
    noise_multiplier: float
    cumulative_noise: float
    over_floor: float
    samples: int
    seconds: float | None
    exact: bool

    def to_dict(self) -> dict[str, Any]:
        """The setting as plain values, ready for JSON."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(Setting)}


@dataclass(frozen=True, kw_only=True, repr=False)
class Advice(Setting):
    """The setting that `advise` found, and what it was chosen from.

    Attributes:
        size, epsilon, delta, accountant: what it is for.
        within: how far above the floor it may be.
        floor: ν of a run on full batches; no setting has less.
        knee: the cheapest setting from which twice the effort gains less than a fifth. Effort is samples; where epochs
            are given, all settings cost the same and it is the batch.
        parameters: of the model, if they were given.
        table: every setting that was looked at, cheapest first.
    """

    size: int
    epsilon: float
    delta: float
    accountant: Accountant
    within: float
    floor: float
    knee: Setting
    parameters: int | None
    table: tuple[Setting, ...]

    @property
    def reached(self) -> bool:
        """Whether it is within reach of the floor, as it is unless batch or epochs were given."""
        return self.over_floor <= 1 + self.within

    @property
    def effort(self) -> Literal["samples", "batch"]:
        """What less noise takes more of on the table."""
        return _effort(self.table)

    @property
    def rates(self) -> tuple[float, float]:
        """Normalized learning rates to try: learning rate × bound / (1 - momentum), under SGD.

        The form is derived, the constants are measured. A weight has gathered noise of size rate × steps × ν in the
        end, all d of them a vector of norm rate × steps × ν × √d, and that norm was about 16 in the runs that did best:
        networks of 6,000 to 130,000 parameters on MNIST, FashionMNIST and digits, whose rates differ by a factor of
        100. The range is half and twice of that. With a cosine the best rate is 1.6 times as large. Without
        ``parameters`` the range ends where rate × steps × ν is 0.06 and 0.3. Rates beyond 8,000/steps were not
        measured, and are not given.

        Inputs should have about 1 in every coordinate: features of norm 1 need far more (16 and above at 2,000 steps,
        where this says 1). Adam-like optimizers divide by the gradient's own size, so their learning rate is what
        counts: 2e-3 and 3e-3 (NAdam) did best. Trying on private data costs privacy.
        """
        return rates_for(self.steps, self.cumulative_noise, self.parameters)

    def plan(self, *, scaling: Scaling, momentum: Momentum | None = None) -> Plan:
        """The calibrated plan of this setting. Its σ does not depend on the rule.

        Example:
            >>> advice = advise(size=60_000, epsilon=3, delta=1e-5)
            >>> plan = advice.plan(scaling=Clip(C=0.5))
            >>> plan.noise_multiplier == advice.noise_multiplier, plan.epsilon() <= 3
            (True, True)
        """
        return Plan(
            scaling=scaling, momentum=momentum, sampling=Poisson(size=self.size, batch=self.batch), epochs=self.epochs,
            noise_multiplier=self.noise_multiplier, delta=self.delta, accountant=self.accountant,
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """Advice and table as plain values, ready for JSON."""
        asked = ("size", "epsilon", "delta", "accountant", "within", "floor", "reached", "parameters", "rates")
        advice = {**super().to_dict(), **{name: getattr(self, name) for name in asked}, "knee": self.knee.to_dict()}
        return {"advice": advice, "table": [row.to_dict() for row in self.table]}

    def __repr__(self) -> str:
        names = ("batch", "epochs", "steps", "noise_multiplier", "cumulative_noise", "floor")
        return f"Advice({', '.join(f'{name}={getattr(self, name):.6g}' for name in names)})"

    def __str__(self) -> str:
        timed = self.seconds is not None
        lines = [f"{'batch':>9} {'epochs':>8} {'steps':>9} {'sigma':>8} {'nu':>10} {'nu/floor':>9} {'samples':>9}"]
        lines[0] += f" {'time':>8}" if timed else ""
        for row in _front(self.table):
            sigma, over = f"{_about(row)}{row.noise_multiplier:.4g}", f"{_about(row)}{row.over_floor:.3f}"
            line = (
                f"{row.batch:>9,} {row.epochs:>8g} {row.steps:>9,} {sigma:>8} {row.cumulative_noise:>10.3g} {over:>9} "
            )
            line += f"{short(row.samples):>9}" + (f" {_duration(row.seconds):>8}" if row.seconds is not None else "")
            here = (row.batch, row.epochs)
            marks = {"advised": (self.batch, self.epochs), "knee": (self.knee.batch, self.knee.epochs)}
            lines.append(f"{line}  {' and '.join(name for name, place in marks.items() if place == here)}".rstrip())
        return "\n".join([*lines, "", *self._words()])

    def _words(self) -> Iterator[str]:
        low, high = self.rates
        what = f"within {self.within:.0%} of" if self.reached else f"{self.over_floor:.2f} times"
        yield (
            f"Advised: batch {self.batch:,}, {self.epochs:g} epochs, {self.steps:,} steps, noise multiplier "
            f"{self.noise_multiplier:.4g}. Its cumulative noise is {what} the floor, {self.floor:.3g}."
        )
        yield (
            f"Knee: batch {self.knee.batch:,}, {self.knee.epochs:g} epochs. Beyond it, twice the {self.effort} "
            f"gains less than {KNEE:.0%}."
        )
        yield f"Learning rates to try under SGD, × bound / (1 - momentum): {low:.2g} to {high:.2g}."
        if not all(row.exact for row in _front(self.table)):
            yield "~ is an estimate, for comparing; what is advised was calibrated."


def advise(
    *, size: int, epsilon: float, delta: float, batch: int | None = None, epochs: float | None = None,
    least_steps: int = 1000, within: float = 0.10, throughput: float | None = None, accountant: Accountant = "pld",
    parameters: int | None = None,
) -> Advice:  # fmt: skip
    """The cheapest batch and epochs whose cumulative noise is within a tenth of the least that the budget allows.

    Batches are drawn by `Poisson`. The grid goes in factors of 2: batches up to where nothing is left to gain, and from
    ``least_steps`` steps on; then three quarters of the batch that was found are tried. σ is estimated on the grid (by
    a coarse privacy loss distribution, within half a percent where ε >= 0.2, a tenth of a second each). It is
    calibrated by `Plan.calibrate` for the answer, and wherever the answer depends on it: about two seconds each.

    Args:
        size: number of samples, a public constant.
        epsilon, delta: the budget, all of which is spent.
        batch: look for the epochs at this batch. Then the knee is advised: the floor may be out of reach.
        epochs: look for the batch at this number of epochs. Larger ones cost no more and leave fewer steps. What is
            advised is the largest with ``least_steps`` steps, or the knee where that is larger.
        least_steps: fewer would not train the model. Runs that did well had 500 (a linear layer) to 1,400 steps
            (networks from scratch).
        within: how far above the floor the noise may be.
        throughput: samples per second that your private step takes, measured or guessed; then costs are in time too.
        accountant: of the plan.
        parameters: how many the model trains, which narrows the rates to try.

    Example:
        >>> advice = advise(size=60_000, epsilon=3, delta=1e-5)
        >>> advice.batch, advice.epochs, advice.steps, round(advice.noise_multiplier, 2)
        (3072, 52, 1016, 2.42)
        >>> round(advice.cumulative_noise / advice.floor, 2)
        1.07
    """
    _check(size, epsilon, delta, batch, epochs, least_steps, within, throughput, accountant)
    if parameters is not None:
        require_count("advise", "parameters", parameters, action="sum(p.numel() for p in model.parameters()).")
    calibrated = _Calibration(size, float(epsilon), float(delta), accountant, throughput)
    grid = _grid(size, batch, epochs, least_steps, calibrated.sigma_once)
    table = sorted((row for line in grid for row in _scanned(line, calibrated)), key=_cost)
    limit = 1 + within if batch is None and epochs is None else None
    if limit is not None and (between := _chosen(table, limit, least_steps).batch * 3 // 4) > 0:
        table += _scanned(_longer(size, between, least_steps, 1), calibrated)
        table.sort(key=_cost)
    while not (chosen := _chosen(table, limit, least_steps)).exact:
        table[table.index(chosen)] = calibrated.exact(chosen.batch, chosen.epochs)
        table.sort(key=_cost)
    return Advice(
        **chosen.to_dict(), size=size, epsilon=float(epsilon), delta=float(delta), accountant=accountant,
        within=float(within), floor=calibrated.floor, knee=_knee(table), parameters=parameters, table=tuple(table),
    )  # fmt: skip


def _check(
    size: int, epsilon: float, delta: float, batch: int | None, epochs: float | None, least_steps: int, within: float,
    throughput: float | None, accountant: Accountant,
) -> None:  # fmt: skip
    require_count("advise", "size", size, action="Pass len(dataset).")
    require_positive("advise", "epsilon", epsilon, action="It is the privacy budget; 1 to 10 is usual.")
    from dpscale.privacy_curves import LEAST_DELTA  # not above: it imports the accountant

    require_probability("advise", "delta", delta, action="Take it well below 1/size, such as 1e-5.")
    require(delta >= LEAST_DELTA or accountant == "rdp", "advise", "delta", f">= {LEAST_DELTA:g}", delta,
            "Below, RDP alone answers: pass accountant='rdp'.")  # fmt: skip
    require(batch is None or epochs is None, "advise", "epochs", "left out when batch is given", epochs,
            "With both there is nothing to advise: give them to Plan.")  # fmt: skip
    if batch is not None:
        require_count("advise", "batch", batch, action="It is the expected number of samples per step.")
        require(batch <= size, "advise", "batch", f"at most size = {size}", batch, "Take a smaller batch.")
    if epochs is not None:
        require_positive("advise", "epochs", epochs, action="It is the number of passes over the data.")
    require_count("advise", "least_steps", least_steps, action="Fewer would not train the model; 500 to 2000 is usual.")
    require(least_steps <= MOST_STEPS // 2**LONGEST, "advise", "least_steps", f"<= {MOST_STEPS // 2**LONGEST}",
            least_steps, "500 to 2000 is usual.")  # fmt: skip
    require_positive("advise", "within", within, action="0.1 is a tenth above the floor.")
    if throughput is not None:
        require_positive("advise", "throughput", throughput, action="It is the samples per second of a private step.")
    require_choice("advise", "accountant", accountant, Accountant, action="'pld' is the tighter one.")


@dataclass(frozen=True)
class _Calibration:
    """σ and ν of settings for one budget."""

    size: int
    epsilon: float
    delta: float
    accountant: Accountant
    throughput: float | None

    @property
    def sigma_once(self) -> float:
        """σ₁, of one release on all the data."""
        return _calibrated(self.size, self.size, 1, self.epsilon, self.delta, self.accountant)[1]

    @property
    def floor(self) -> float:
        """σ₁/size."""
        return self.sigma_once / self.size

    def exact(self, batch: int, epochs: float) -> Setting:
        """With the plan's σ."""
        steps, sigma = _calibrated(self.size, batch, epochs, self.epsilon, self.delta, self.accountant)
        return self._setting(batch, epochs, steps, sigma, True)

    def estimate(self, batch: int, epochs: float) -> Setting:
        """With a σ that is good enough to compare; never below the floor's. RDP is quick, and needs no estimate."""
        if self.accountant == "rdp":
            return self.exact(batch, epochs)
        rate, steps = batch / self.size, Poisson(size=self.size, batch=batch).steps(epochs)
        least = self.sigma_once * rate * math.sqrt(steps)
        sigma = _estimated(rate, steps, self.epsilon, self.delta, least) if rate < 1 else least
        return self._setting(batch, epochs, steps, sigma, False)

    def _setting(self, batch: int, epochs: float, steps: int, sigma: float, exact: bool) -> Setting:
        noise = sigma / (batch * math.sqrt(steps))
        samples = batch * steps
        return Setting(
            batch=batch, epochs=epochs, steps=steps, noise_multiplier=sigma, cumulative_noise=noise,
            over_floor=noise / self.floor, samples=samples, exact=exact,
            seconds=None if self.throughput is None else samples / self.throughput,
        )  # fmt: skip


@lru_cache(maxsize=256)
def _calibrated(
    size: int, batch: int, epochs: float, epsilon: float, delta: float, accountant: Accountant
) -> tuple[int, float]:
    """Steps and σ, by the plan: the one source of both. They do not depend on the rule."""
    plan = Plan(scaling=Clip(C=1.0), sampling=Poisson(size=size, batch=batch), epochs=epochs, accountant=accountant)
    plan = plan.calibrate(epsilon=epsilon, delta=delta)
    assert plan.steps is not None and plan.noise_multiplier is not None
    return int(plan.steps), plan.noise_multiplier


def _grid(
    size: int, batch: int | None, epochs: float | None, least_steps: int, sigma_once: float
) -> list[list[tuple[int, float]]]:
    """Lines of settings, each from much noise to little."""
    if batch is not None:
        return [_longer(size, batch, least_steps, LONGEST)]
    # ν/floor is nearly 1 + 1/(4σ²), and σ at least σ₁·rate·√T: with 3.5 for it, next to nothing is left to gain.
    root = 3.5 / sigma_once / math.sqrt(least_steps if epochs is None else epochs)
    rate = root if epochs is None else root**2  # T is epochs/rate
    batches = sorted({size, *(2**k for k in range(size.bit_length()))})
    enough = next((place for place, b in enumerate(batches) if b >= rate * size), len(batches) - 1)
    if epochs is not None:
        return [[(b, epochs) for b in batches[max(0, enough - LONGEST) : enough + 1]]]
    return [_longer(size, b, least_steps, DOUBLINGS) for b in batches[max(0, enough - LINES + 1) : enough + 1]]


def _longer(size: int, batch: int, least_steps: int, times: int) -> list[tuple[int, float]]:
    """One batch, at the fewest whole epochs that have enough steps, and at twice as many, again and again."""
    first = -(-least_steps * batch // size)
    return [(batch, first * 2**k) for k in range(times) if first * 2**k * size // batch < MOST_STEPS]


def _scanned(line: list[tuple[int, float]], calibrated: _Calibration) -> Iterator[Setting]:
    """The settings of a line, up to the first with nothing left to gain."""
    for batch, epochs in line:
        row = calibrated.estimate(batch, epochs)
        yield row
        if row.over_floor <= 1 + NEAR:
            return


def _cost(row: Setting) -> tuple[int, float]:
    """Order of settings: what is cheaper, then what has less noise."""
    return row.samples, row.cumulative_noise


def _chosen(table: Sequence[Setting], limit: float | None, least_steps: int) -> Setting:
    """The cheapest within the limit. Close calls count as within until they are calibrated.

    Without a limit it is the knee. Where all cost the same, whatever has enough steps and less noise is better still.
    """
    if limit is not None:
        for row in table:
            if row.over_floor <= (limit if row.exact else limit * (1 + SLACK)):
                return row
    longer = [row for row in table if row.steps >= least_steps] if _effort(table) == "batch" else []
    return min([_knee(table), *longer], key=lambda row: row.cumulative_noise)


def _effort(table: Sequence[Setting]) -> Literal["samples", "batch"]:
    """What less noise takes more of: samples; where epochs are given, and with them the samples, the batch."""
    return "batch" if len({row.epochs for row in table}) == 1 else "samples"


def _front(table: Sequence[Setting]) -> list[Setting]:
    """The settings than which none of less effort has as little noise, by effort."""
    effort, front = _effort(table), list[Setting]()
    for row in sorted(table, key=lambda row: (getattr(row, effort), row.cumulative_noise)):
        if not front or row.cumulative_noise < front[-1].cumulative_noise:
            front.append(row)
    return front


def _knee(table: Sequence[Setting]) -> Setting:
    """The first on the front from which twice the effort gains less than `KNEE`."""
    effort, front = _effort(table), _front(table)

    def gain(row: Setting) -> float:
        twice = 2.1 * getattr(row, effort)  # epochs are whole, so doubling is not exact
        return 1 - min(o.cumulative_noise for o in front if getattr(o, effort) <= twice) / row.cumulative_noise

    return next(row for row in front if gain(row) < KNEE)


@lru_cache(maxsize=1024)
def _estimated(rate: float, steps: int, epsilon: float, delta: float, least: float) -> float:
    """σ for a budget, about: where the coarse δ is what is allowed. It is for comparing settings, not for training."""
    from scipy import optimize

    def excess(log_sigma: float) -> float:
        return math.log(max(_coarse_delta(math.exp(log_sigma), rate, steps, epsilon), 1e-300) / delta)

    lower = upper = math.log(max(least, 0.15))
    while excess(upper) > 0:
        upper += 0.3
    while excess(lower) < 0 and lower > math.log(least):
        lower = max(lower - 0.3, math.log(least))
    if excess(lower) <= 0:
        return math.exp(lower)
    return math.exp(float(optimize.brentq(excess, lower, upper, xtol=1e-4)))


def _coarse_delta(sigma: float, rate: float, steps: int, epsilon: float) -> float:
    """δ(ε) of a Poisson-sampled Gaussian, composed by one Fourier transform on a coarse grid; neither bound is meant.

    The privacy loss L of one step is ln(1 - q + q·exp((2x - 1)/2σ²)), x from (1-q)·N(0, σ²) + q·N(1, σ²).
    """
    cells, z = 2**15, np.linspace(-7.5, 7.5, 2001)
    x = np.concatenate([sigma * z, 1 + sigma * z])
    normal = np.exp(-(z**2) / 2)
    mass = np.concatenate([(1 - rate) * normal, rate * normal]) / normal.sum()
    loss = np.logaddexp(math.log1p(-rate), math.log(rate) + (x - 0.5) / sigma**2)
    mean = float(mass @ loss)
    spread = math.sqrt(steps * float(mass @ (loss - mean) ** 2))
    width = 2 * (10 * spread + float(loss.max()))
    cell = width / cells
    place = (loss - mean) / cell
    below = np.floor(place).astype(np.int64)
    share = place - below  # split between two cells so that the mean stays
    once = np.bincount(below % cells, mass * (1 - share), cells) + np.bincount((below + 1) % cells, mass * share, cells)
    composed = np.fft.irfft(np.fft.rfft(once) ** steps, cells)
    losses = steps * mean + cell * ((np.arange(cells) + cells // 2) % cells - cells // 2)
    return float(composed @ np.maximum(-np.expm1(np.minimum(epsilon - losses, 0)), 0))


def _about(row: Setting) -> str:
    return "" if row.exact else "~"


def short(count: float) -> str:
    """1234 -> 1.23k."""
    for unit, name in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if count >= unit:
            return f"{count / unit:.3g}{name}"
    return f"{count:g}"


def _duration(seconds: float) -> str:
    """75 -> 1.25 min."""
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds:.2g} s"
