"""What an experiment is: a full configuration as a Python function, and the methods it compares.

For every optimizer that is linear in the gradient, PSASC at (C, s, r) and learning rate η takes the same steps as
a rule of bound 1 at learning rate ηC/s. So rates here are *normalized*, learning rate × bound, and every method is
searched over one and the same grid of them. Two controls split what s does into its two parts, at PSASC's own
learning rate η: PSAC at η/s changes the rate alone, PSAC with r/s (nearly) the stabiliser alone.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dpscale.checks import require, require_count, require_positive, require_probability
from dpscale.lab.data import DATA
from dpscale.lab.models import MODELS
from dpscale.momentum import DiSK, HeavyBall, InnerOuter, Momentum, PerSampleEMA
from dpscale.scaling import RULES, Scaling


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything about an experiment but the method and the seed. `replace` overrides any value.

    Args:
        preset: name under which it is known.
        data, model: names in `data.DATA` and `models.MODELS`.
        epsilon, delta: the privacy that every private method spends, no more and no less.
        batch, epochs: expected batch size and passes over the data (Poisson sampling).
        momentum: name in `momentum.MOMENTA`, or "none"; of every method that has none of its own.
        gamma1: outer momentum of every method, as in `HeavyBall`: the velocity keeps 1 - gamma1 of itself.
        K0, gamma0: inner momentum of the methods that have it, as in `InnerOuter`.
        kappa, lookahead: of `DiSK`.
        gamma: of `PerSampleEMA`.
        sampling: "poisson", or "full-batch", with which one epoch is one step.
        C, r, s: constants of the scaling rules.
        tune: search the rate on held-out training data; otherwise take it from ``rates``.
        grid: normalized rates that the search tries, the same for every method, one run each.
        held_out: fraction of the training data that the search measures on.
        rates: normalized rate per method, for runs without a search.
        last_epochs: gradient norms are recorded in so many epochs at the end.
        note: what a reader of the report must be told about how these values were chosen.
    """

    preset: str
    data: str
    model: str
    epsilon: float
    delta: float
    batch: int
    epochs: int
    C: float
    r: float
    s: float
    tune: bool
    grid: tuple[float, ...]
    held_out: float
    momentum: str = "heavy-ball"
    gamma1: float = 0.1
    K0: int = 2
    gamma0: float = 0.5
    kappa: float = 0.7
    lookahead: float = 0.5
    gamma: float = 0.5
    sampling: str = "poisson"
    rates: Mapping[str, float] = field(default_factory=dict)
    last_epochs: int = 10
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("epsilon", "C", "r", "s"):
            require_positive("Config", name, getattr(self, name))
        for name in ("batch", "epochs", "last_epochs"):
            require_count("Config", name, getattr(self, name))
        for name in ("delta", "held_out"):
            require_probability("Config", name, getattr(self, name))
        samplers = ("poisson", "full-batch")
        require(self.sampling in samplers, "Config", "sampling", f"one of {', '.join(samplers)}", self.sampling)
        kinds = [*_MOMENTA, "none"]
        require(self.momentum in kinds, "Config", "momentum", f"one of {', '.join(kinds)}", self.momentum)
        for make in _MOMENTA.values():
            make(self)  # refuses bad constants, in its own words
        require(bool(self.grid), "Config", "grid", "at least one rate", self.grid)
        for rate in (*self.grid, *self.rates.values()):
            require_positive("Config", "rate", rate, action="It is learning rate × bound.")
        require(self.data in DATA, "Config", "data", f"one of {', '.join(DATA)}", self.data)
        require(self.model in MODELS, "Config", "model", f"one of {', '.join(MODELS)}", self.model)

    def replace(self, **changes: Any) -> "Config":
        """The same experiment with other values; a change that is None leaves the value as it is."""
        return dataclasses.replace(self, **{k: v for k, v in changes.items() if v is not None})

    def at_rate(self, rate: float) -> "Config":
        """The same experiment without a search: every method at this normalized rate."""
        return self.replace(tune=False, rates={name: rate for name in searched(METHODS)})

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as they stand in a record."""
        return {**dataclasses.asdict(self), "grid": list(self.grid), "rates": dict(self.rates)}


_MOMENTA: dict[str, Callable[[Config], Momentum]] = {
    "heavy-ball": lambda c: HeavyBall(gamma1=c.gamma1),
    "inner-outer": lambda c: InnerOuter(K0=c.K0, gamma0=c.gamma0, gamma1=c.gamma1),
    "disk": lambda c: DiSK(kappa=c.kappa, gamma=c.lookahead),
    "per-sample-ema": lambda c: PerSampleEMA(gamma=c.gamma),
}


@dataclass(frozen=True, kw_only=True)
class Method:
    """A way to train: a scaling rule (or none), a momentum, and where its learning rate comes from.

    Args:
        name, title, about: for the command line, for tables, for the report.
        rule: name in `scaling.RULES`; None for training without privacy.
        follows: a control takes the learning rate of this method instead of a search of its own.
        over_s: what a control divides by s: its learning rate (``"lr"``) or its stabiliser (``"r"``).
        momentum: a momentum of its own, in place of the configuration's.
    """

    name: str
    title: str
    about: str
    rule: str | None
    follows: str | None = None
    over_s: str | None = None
    momentum: str | None = None

    def momentum_of(self, config: Config) -> Momentum | None:
        """Its own momentum or the configuration's, with the constants of ``config``."""
        kind = self.momentum or config.momentum
        return None if kind == "none" else _MOMENTA[kind](config)

    def scaling(self, config: Config) -> Scaling | None:
        """The rule with the constants of ``config``."""
        if self.rule is None:
            return None
        wanted = {f.name for f in dataclasses.fields(RULES[self.rule])} - ({"s"} if self.rule == "psac" else set())
        r = config.r / config.s if self.over_s == "r" else config.r
        constants = {"C": config.C, "s": config.s, "r": r}
        return RULES[self.rule](**{name: constants[name] for name in constants if name in wanted})

    def learning_rate(self, config: Config, rates: Mapping[str, float]) -> float:
        """What SGD gets, from the normalized rates of the methods that were searched."""
        source = METHODS[self.follows or self.name]
        require(
            source.name in rates,
            "Method.learning_rate",
            "rates",
            f"a mapping that has {source.name!r}",
            sorted(rates),
            "Search the rate (tune=True) or pass one.",
        )
        rate = rates[source.name] / bound(source, config)
        return rate / config.s if self.over_s == "lr" else rate


def bound(method: Method, config: Config) -> float:
    """sup x·w(x) of the method's rule; 1 without privacy, where the mean gradient is not scaled."""
    rule = method.scaling(config)
    return 1.0 if rule is None else rule.bound


def searched(names: Mapping[str, Method] | list[str]) -> list[str]:
    """The methods whose rates have to be known to run ``names``: controls need that of the one they follow."""
    return list(dict.fromkeys(METHODS[name].follows or name for name in names))


_METHODS = (
    Method(name="non-private", title="Non-private SGD", about="Plain SGD on the same batches.", rule=None),
    Method(name="dp-sgd", title="DP-SGD", about="Clipping: weight min(1, C/x).", rule="clip"),
    Method(name="auto-s", title="Auto-S", about="Normalizing: weight C/(x + r).", rule="auto-s"),
    Method(name="dp-psac", title="DP-PSAC", about="Adaptive: weight C/(x + r/(x+r)).", rule="psac"),
    Method(name="dp-psasc", title="DP-PSASC", about="Adaptive, scaled: weight C/(s·x + r/(x+r)).", rule="psasc"),
    Method(
        name="dp-psasc-star",
        title="DP-PSASC*",
        about="DP-PSASC on each sample's gradients at K0 + 1 released points, combined before they are scaled.",
        rule="psasc",
        momentum="inner-outer",
    ),
    Method(
        name="psac-lr-over-s",
        title="PSAC at lr/s",
        about="Control: DP-PSAC at DP-PSASC's learning rate divided by s.",
        rule="psac",
        follows="dp-psasc",
        over_s="lr",
    ),
    Method(
        name="psac-r-over-s",
        title="PSAC with r/s",
        about="Control: DP-PSAC at DP-PSASC's learning rate, with r divided by s.",
        rule="psac",
        follows="dp-psasc",
        over_s="r",
    ),
)
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}
"""Every method by name, in the order of tables."""


def digits() -> Config:
    """Handwritten digits, 8×8: the whole comparison in under two minutes on two cores of a laptop.

    C, r and s are typical of the paper's and were not searched. The rates are those that
    ``dpscale compare digits`` found by its search; ``dpscale train digits`` uses them.
    """
    return Config(
        preset="digits",
        data="digits",
        model="digits_cnn",
        epsilon=3.0,
        delta=1e-4,
        batch=256,
        epochs=15,
        C=0.3,
        r=1e-2,
        s=0.7,
        tune=True,
        grid=(0.03, 0.06, 0.12, 0.25, 0.5),
        held_out=0.2,
        rates={
            "non-private": 0.12,
            "dp-sgd": 0.12,
            "auto-s": 0.12,
            "dp-psac": 0.12,
            "dp-psasc": 0.12,
            "dp-psasc-star": 0.12,
        },
        note=(
            "The model, ε, the batch size, the number of epochs and the range of rates of this preset were settled "
            "beforehand, mostly with DP-PSAC, by accuracy on 360 images that are training images here. The test images "
            "chose nothing."
        ),
    )


PRESETS: dict[str, Callable[[], Config]] = {"digits": digits}
"""Every preset by name."""


def preset(name: str) -> Config:
    """The preset of that name, or an error that lists them."""
    require(name in PRESETS, "dpscale", "preset", f"one of: {', '.join(PRESETS)}", name)
    return PRESETS[name]()


def method(name: str) -> Method:
    """The method of that name, or an error that lists them."""
    require(name in METHODS, "dpscale", "method", f"one of: {', '.join(METHODS)}", name)
    return METHODS[name]


def methods(names: str | None) -> list[Method]:
    """Methods from a comma-separated list, in the order of tables; all of them for None."""
    if names is None:
        return list(METHODS.values())
    wanted = [method(name.strip()) for name in names.split(",")]
    return [one for one in METHODS.values() if one in wanted]
