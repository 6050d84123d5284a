"""Plan: scaling × sampling × steps × noise, the one place from which σ, the bound and ε are read.

The training step takes the bound and the noise from the plan, the accountant takes the events from it, and the privacy
statement is written by it. None of them keeps a number of its own, so none can disagree.
"""

import dataclasses
import math
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from dpscale.checks import (
    complaint,
    plain_number,
    require,
    require_choice,
    require_count,
    require_positive,
    require_probability,
    settle_numbers,
)
from dpscale.sampling import SAMPLERS, Accountant, Adjacency, Sampling
from dpscale.scaling import RULES, Scaling

if TYPE_CHECKING:  # slow to import: training does without dp_accounting, and a plan without torch
    import dp_accounting

    from dpscale.momentum import Momentum

_ADJACENCY_WORDS: dict[Adjacency, str] = {
    "add-remove": "two datasets are neighbours if one has one sample more than the other",
    "replace-one": "two datasets are neighbours if they differ in one sample, exchanged for any other",
    "zero-out": "two datasets are neighbours if one sample of the one contributes nothing in the other",
}

_RECORD = "one sample (one record of the dataset); a person with several records is protected less"
_PERSON = "a person with at most {} records in a step; all of their records are protected together"

SEARCH = "the search for hyperparameters, unless it used other data or was itself private"
NOT_COUNTED = (
    SEARCH,
    "preprocessing fitted on the data, and statistics computed from it",
    "diagnostics of single samples that were looked at: losses, gradient norms, scaling weights",
    "floating-point effects in drawing the Gaussian noise",
    "other models or results released from the same data: their costs add up",
)
"""What no ε of a plan includes."""


MOST_STEPS = 10**8
"""No plan has more: the grid of a privacy loss distribution grows with the steps, and its FFT takes minutes then."""


class _FromEpochs(int):
    """A number of steps computed from ``epochs``: `dataclasses.replace` may compute it anew."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a private run will do, decided before it starts.

    Guarantee: a run of ``steps`` steps that scales by ``scaling``, draws by ``sampling`` and adds noise of std
    ``noise_std`` to each sum is (``epsilon(delta)``, delta)-differentially private under ``adjacency``.

    Args:
        scaling: the rule that bounds one sample's contribution.
        sampling: who is in each batch.
        steps: number of steps, `MOST_STEPS` at most; give this or ``epochs``, or neither and then `calibrate_steps`.
        epochs: passes over the data; ``steps`` is computed from it by the sampler.
        noise_multiplier: noise std / bound; None until `calibrate`.
        delta: the δ that `epsilon` and `statement` use when not told another.
        momentum: over which released points gradients are combined, and what follows the noise; None: one gradient.
        accountant: "pld" (tight) or "rdp".
        records: where a sample is a person (`by_user`), the most of their records that are taken. None: a sample is a
            record. It says what the numbers are about, and changes none of them.
        unsafe_no_noise: train without noise and without privacy, as a baseline.

    Example:
        >>> from dpscale.sampling import Poisson
        >>> from dpscale.scaling import PSASC
        >>> plan = Plan(scaling=PSASC(C=0.25, s=0.5), sampling=Poisson(size=60_000, batch=512), epochs=20)
        >>> plan = plan.calibrate(epsilon=3, delta=1e-5)
        >>> plan.steps, round(plan.noise_multiplier, 3), round(plan.noise_std, 3)
        (2344, 0.892, 0.446)
    """

    scaling: Scaling
    sampling: Sampling
    steps: int | None = None
    epochs: float | None = None
    noise_multiplier: float | None = None
    delta: float | None = None
    momentum: "Momentum | None" = None
    accountant: Accountant = "pld"
    records: int | None = None
    unsafe_no_noise: bool = False

    def __post_init__(self) -> None:
        settle_numbers(self)
        action = "Clip(C=1.0) is the rule of DP-SGD."
        require(isinstance(self.scaling, Scaling), "Plan", "scaling", "a scaling rule", self.scaling, action)
        action = "Poisson(size=len(dataset), batch=256) is usual."
        require(isinstance(self.sampling, Sampling), "Plan", "sampling", "a sampler", self.sampling, action)
        self._settle_noise()
        self._settle_steps()
        if self.delta is not None:
            self._check_delta("Plan", self.delta)
        require_choice("Plan", "accountant", self.accountant, Accountant, action="'pld' is the tighter one.")
        if self.records is not None:
            require_count("Plan", "records", self.records, action="It is the most that are taken of one person.")
        if self.momentum is not None:
            from dpscale.momentum import MOMENTA, Momentum

            must = f"one of {', '.join(momentum.__name__ for momentum in MOMENTA.values())}, or None"
            require(isinstance(self.momentum, Momentum), "Plan", "momentum", must, self.momentum)
            self.momentum.check(self.sampling)

    def _settle_noise(self) -> None:
        sigma, bound = self.noise_multiplier, self.scaling.bound
        if self.unsafe_no_noise:
            action = "Drop unsafe_no_noise to train with noise."
            require(sigma in (None, 0), "Plan", "noise_multiplier", "0 with unsafe_no_noise=True", sigma, action)
            object.__setattr__(self, "noise_multiplier", 0.0)
            return
        if sigma is not None:
            action = "Let plan.calibrate(epsilon=..., delta=...) find it; unsafe_no_noise=True allows 0."
            require_positive("Plan", "noise_multiplier", sigma, action=action)
        action = "No finite noise hides a sample without a bound: give C, or unsafe_no_noise=True for a baseline."
        require(math.isfinite(bound), "Plan", "scaling", "a rule with a finite bound", self.scaling, action)

    def _settle_steps(self) -> None:
        if isinstance(self.steps, _FromEpochs):  # a copy of a settled plan: epochs, if kept, say how many
            object.__setattr__(self, "steps", int(self.steps) if self.epochs is None else None)
        if self.steps is None and self.epochs is None:
            action = "Or give noise_multiplier alone and then call plan.calibrate_steps(epsilon=..., delta=...)."
            require(bool(self.noise_multiplier), "Plan", "steps", "given, or epochs in its place", None, action)
        elif self.epochs is not None:
            action = "Pass one of the two; in dataclasses.replace set the other to None."
            require(self.steps is None, "Plan", "steps", "left out when epochs is given", self.steps, action)
            object.__setattr__(self, "steps", _FromEpochs(self.sampling.steps(self.epochs)))
        else:
            require_count("Plan", "steps", self.steps, action="It is the number of optimizer steps.")
        if self.steps is not None:
            got = self.steps if self.epochs is None else f"{self.steps} for {self.epochs:g} epochs"
            action = "Accounting for more takes minutes: take fewer steps or epochs."
            require(self.steps <= MOST_STEPS, "Plan", "steps", f"an integer <= {MOST_STEPS}", got, action)

    def _check_delta(self, owner: str, delta: float) -> None:
        require_probability(owner, "delta", delta, action="Take it well below 1/size, such as 1e-5.")
        if delta >= 1 / self.sampling.size:
            warnings.warn(
                f"delta = {delta:g} is not below 1/size = {1 / self.sampling.size:.3g}: releasing one whole sample "
                f"at random would already satisfy it. Take delta < 1/{self.sampling.size}, better far smaller.",
                UserWarning, stacklevel=4,
            )  # fmt: skip

    @property
    def bound(self) -> float:
        """The most that one sample adds to a sum, from the scaling rule."""
        return self.scaling.bound

    @property
    def expected_batch(self) -> int:
        """The public constant by which noisy sums are divided."""
        return self.sampling.batch

    @property
    def adjacency(self) -> Adjacency:
        """Which datasets are neighbours, from the sampler."""
        return self.sampling.adjacency

    @property
    def noise_std(self) -> float:
        """σ·bound: standard deviation of the noise on each coordinate of a sum; 0 without noise."""
        sigma = self._sigma("noise_std")
        return sigma * self.bound if sigma > 0 else 0.0  # not 0·inf where the clip is off

    def event(self, steps: int | None = None) -> "dp_accounting.DpEvent":
        """What ``steps`` steps release (all planned ones if not given), for an accountant."""
        sigma = self._sigma("event")
        return self.sampling.event(sigma, self._steps("event") if steps is None else steps)

    def epsilon(self, delta: float | None = None, steps: int | None = None) -> float:
        """ε at ``delta`` after ``steps`` steps (all planned ones if not given).

        | case                    | ε   |
        |-------------------------|-----|
        | steps = 0               | 0   |
        | noise multiplier 0      | inf |
        """
        self._sigma("epsilon")
        return self._epsilon(self.delta_of("Plan.epsilon", delta), steps, self.accountant)

    def calibrate(self, *, epsilon: float, delta: float) -> "Plan":
        """This plan with the least noise for which the planned steps cost at most ``epsilon`` at ``delta``."""
        from dpscale import accounting

        epsilon, delta = plain_number(epsilon), plain_number(delta)
        target = self._target("Plan.calibrate", epsilon, delta)
        steps = self._steps("calibrate")
        sigma = accounting.calibrate_noise_multiplier(lambda sigma: self.sampling.event(sigma, steps), **target)
        return dataclasses.replace(self, noise_multiplier=sigma, delta=delta)

    def calibrate_steps(self, *, epsilon: float, delta: float) -> "Plan":
        """This plan with the most steps that cost at most ``epsilon`` at ``delta`` under its noise."""
        from dpscale import accounting

        epsilon, delta = plain_number(epsilon), plain_number(delta)
        target = self._target("Plan.calibrate_steps", epsilon, delta)
        sigma = self._sigma("calibrate_steps")
        spent = self._epsilon(delta, MOST_STEPS, "rdp")  # never below "pld", and quick at any number of steps
        action = f"More than {MOST_STEPS:,} steps fit: lower noise_multiplier, or choose the steps yourself."
        must = "small enough to limit the steps"
        require(spent > epsilon, "Plan.calibrate_steps", "epsilon", must, epsilon, action)
        steps = accounting.calibrate_steps(lambda steps: self.sampling.event(sigma, steps), **target)
        return dataclasses.replace(self, steps=steps, epochs=None, delta=delta)

    def statement(self, delta: float | None = None, steps: int | None = None) -> str:
        """What to tell a reviewer: the guarantee, what it rests on, and what it leaves out.

        Args:
            delta: the plan's if not given.
            steps: those that were taken so far; all planned ones if not given.
        """
        return written(self.facts(delta, steps), self.not_counted)

    def facts(self, delta: float | None = None, steps: int | None = None) -> dict[str, str]:
        """What a statement says, each in a sentence, by the name of what it is about."""
        self._sigma("statement")
        planned = self._steps("statement")
        taken = f"{planned:,}" if steps is None else f"{steps:,} of {planned:,} planned"
        found = {
            "Guarantee": self._guarantee(delta, steps),
            "Unit of privacy": f"{_RECORD if self.records is None else _PERSON.format(self.records)}.",
            "Adjacency": f"{self.adjacency}; {_ADJACENCY_WORDS[self.adjacency]}.",
            "Sampling": f"{self.sampling.describe()}.",
            "Accounting": f"{self.sampling.accounted}; sensitivity {self.sampling.sensitivity_factor} × bound.",
            "Steps": f"{taken}, each one sum divided by the expected batch size {self.expected_batch}.",
            "Noise": f"multiplier {self.noise_multiplier:.6g}, standard deviation {self.noise_std:.6g} on each sum.",
            "Scaling": f"{self.scaling}, so that no sample adds more than {self.bound:.6g}.",
        }
        if self.momentum:
            found["Momentum"] = f"{self.momentum.describe()}. It costs no privacy."
        if self.sampling.note:
            found["NOTE"] = self.sampling.note
        return found if self.records is None else {name: _of_people(words) for name, words in found.items()}

    @property
    def not_counted(self) -> tuple[str, ...]:
        """What its ε leaves out, and a reviewer has to judge."""
        return NOT_COUNTED if self.records is None else tuple(map(_of_people, NOT_COUNTED))

    def _guarantee(self, delta: float | None, steps: int | None) -> str:
        if steps == 0:
            return "nothing was released yet, so epsilon is 0."
        delta = self.delta_of("Plan.statement", delta)
        pld, rdp = (self._epsilon(delta, steps, accountant) for accountant in get_args(Accountant))
        if math.isinf(pld):
            return "NO PRIVACY: no noise is added; epsilon is infinite."
        if pld < rdp:
            return (
                f"({rounded_up(pld)}, {delta:g})-differential privacy. "
                f"Tight accounting (PLD): epsilon = {rounded_up(pld)}; Rényi DP (RDP): epsilon = {rounded_up(rdp)}."
            )
        return (  # "pld" gives the smaller of the two
            f"({rounded_up(rdp)}, {delta:g})-differential privacy. "
            f"Rényi DP (RDP): epsilon = {rounded_up(rdp)}; privacy loss distributions (PLD) give nothing smaller here."
        )

    def __repr__(self) -> str:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default}
        return f"Plan({', '.join(f'{name}={value!r}' for name, value in values.items())})"

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, ready for JSON."""
        from dpscale.momentum import MOMENTA

        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain |= {"scaling": _named(self.scaling, RULES), "sampling": _named(self.sampling, SAMPLERS)}
        plain["momentum"] = None if self.momentum is None else _named(self.momentum, MOMENTA)
        plain["steps"] = None if self.steps is None else int(self.steps)
        return plain

    @staticmethod
    def from_dict(plain: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` has made plain.

        Example:
            >>> from dpscale.sampling import Poisson
            >>> from dpscale.scaling import Clip
            >>> plan = Plan(scaling=Clip(C=1.0), sampling=Poisson(size=100, batch=10), steps=3, noise_multiplier=1.0)
            >>> Plan.from_dict(plan.to_dict()) == plan
            True
        """
        from dpscale.momentum import MOMENTA

        known = {**plain, "scaling": built(plain["scaling"], RULES), "sampling": built(plain["sampling"], SAMPLERS)}
        known["momentum"] = None if plain["momentum"] is None else built(plain["momentum"], MOMENTA)
        return Plan(**(known | ({} if known["epochs"] is None else {"steps": None})))

    def _epsilon(self, delta: float, steps: int | None, accountant: Accountant) -> float:
        from dpscale import accounting

        return accounting.epsilon(self.event(steps), delta=delta, adjacency=self.adjacency, accountant=accountant)

    def _target(self, owner: str, epsilon: float, delta: float) -> dict[str, Any]:
        """What a calibration is asked for, checked."""
        require_positive(owner, "epsilon", epsilon, action="It is the privacy budget; 1 to 10 is usual.")
        require_probability(owner, "delta", delta, action="Try 1e-5.")
        if self.unsafe_no_noise:
            raise ValueError(f"{owner} has no noise to calibrate: the plan has unsafe_no_noise=True. Drop it.")
        return {"epsilon": epsilon, "delta": delta, "adjacency": self.adjacency, "accountant": self.accountant}

    def delta_of(self, owner: str, delta: float | None) -> float:
        """The δ that is meant: the given one, or the plan's."""
        if delta is not None:
            self._check_delta(owner, delta)
            return delta
        if self.delta is None:
            action = "Pass delta=..., or calibrate the plan, which records one."
            raise complaint(owner, "delta", "given for a plan that has none", None, action)
        return self.delta

    def _sigma(self, what: str) -> float:
        if self.noise_multiplier is None:
            raise ValueError(
                f"Plan.{what} needs a noise multiplier, and this plan is not calibrated. "
                "Call plan = plan.calibrate(epsilon=..., delta=...), or pass noise_multiplier=... to Plan."
            )
        return self.noise_multiplier

    def _steps(self, what: str) -> int:
        if self.steps is None:
            raise ValueError(
                f"Plan.{what} needs the number of steps, and this plan has none. "
                "Call plan = plan.calibrate_steps(epsilon=..., delta=...), or give Plan steps=... or epochs=...."
            )
        return self.steps


def written(facts: Mapping[str, str], not_counted: Iterable[str]) -> str:
    """A statement, line by line."""
    said = [f"{name}: {words}" for name, words in facts.items()]
    left_out = [f"  - {line}" for line in not_counted]
    return "\n".join([*said, "Not counted in these numbers, and to be judged separately:", *left_out])


def _of_people(line: str) -> str:
    """A line about samples, for a plan whose samples are people."""
    return re.sub(r"\bsample\b", "person", re.sub(r"\bsamples\b", "people", line))


def rounded_up(epsilon: float) -> str:
    """For people to read: a statement must not promise more than was computed."""
    return f"{math.ceil(epsilon * 1000) / 1000:g}" if epsilon < 1000 else f"{math.ceil(epsilon)}"


def _named(value: "Scaling | Sampling | Momentum", registry: dict[str, Any]) -> dict[str, Any]:
    names = {registered: name for name, registered in registry.items()}
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    # Strict JSON has no infinity; Clip(C=inf) is the only one that can occur.
    fields = {name: "inf" if field == math.inf else field for name, field in fields.items()}
    return {"name": names.get(type(value), type(value).__name__), **fields}


def built(plain: Mapping[str, Any], registry: Mapping[str, Any]) -> Any:
    """The rule, sampler or momentum that `Plan.to_dict` has made plain; refuses one that is not registered."""
    fields = {field: math.inf if value == "inf" else value for field, value in plain.items() if field != "name"}
    name = plain["name"]
    require(name in registry, "Plan.from_dict", "name", f"one of {', '.join(registry)}", name)
    return registry[name](**fields)


_NOT_COMPARED = {"epochs", "momentum.directory"}
"""What two plans may differ in: ``steps`` says what ``epochs`` came to, and where a memory is kept changes nothing."""


def differences(before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """What differs between two plans, as `Plan.to_dict` gave them, in words."""
    for name in dict.fromkeys([*before, *now]):
        path, one, other = f"{prefix}{name}", before.get(name), now.get(name)
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            yield from differences(one, other, f"{path}.")
        elif one != other and path not in _NOT_COMPARED:
            yield f"{path} was {one!r} and is {other!r}"
