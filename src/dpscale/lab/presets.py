"""What an experiment is: a configuration, the methods that it compares, and those that have a name (presets.toml).

For every optimizer that is linear in the gradient, PSASC at (C, s, r) and learning rate η takes the same steps as
a rule of bound 1 at learning rate ηC/s, and a heavy ball that keeps 1 - γ1 of itself goes 1/γ1 times as far. So rates
here are *normalized*, learning rate × bound / γ1, and every method is searched over one and the same grid of them.
(Under an optimizer like NAdam, which divides by the gradient's own size, the rate is the learning rate.) Two controls
split what s does into its two parts, at PSASC's own learning rate η: PSAC at η/s changes the rate alone, PSAC with r/s
(nearly) the stabiliser alone. Under NAdam s cancels, so that there they say nothing and are left out.
"""

import dataclasses
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Annotated, Any, Literal

import torch
from pydantic import AfterValidator, Field, model_validator

from dpscale.checks import require
from dpscale.lab import device
from dpscale.lab.augment import AUGMENT
from dpscale.lab.datasets import catalogue
from dpscale.lab.features import ENCODERS
from dpscale.lab.models import FINE_TUNED, MODELS
from dpscale.lab.scattering import SCATTERING, SHAPE
from dpscale.lab.settings import Settings, named
from dpscale.momentum import DiSK, HeavyBall, InnerOuter, Momentum, PerSampleEMA
from dpscale.scaling import RULES, Scaling

SEARCH_SEED = 1000
"""The first seed of the search; final runs count theirs from 0 and never reach it."""

OUTER = ("heavy-ball", "inner-outer")
"""Momenta that keep a velocity, 1 - gamma1 of it at every step."""

SCHEDULES: dict[str, Callable[[float], float]] = {
    "constant": lambda over: 1.0,
    "linear": lambda over: 1 - over,
    "cosine": lambda over: (1 + math.cos(math.pi * over)) / 2,
}
"""Share of the learning rate that is left when so much of a run is over; a try of a search is a run of its own."""

_MOMENTA: dict[str, Callable[[Mapping[str, Any]], Momentum]] = {
    "heavy-ball": lambda c: HeavyBall(gamma1=c["gamma1"]),
    "inner-outer": lambda c: InnerOuter(K0=c["K0"], gamma0=c["gamma0"], gamma1=c["gamma1"]),
    "disk": lambda c: DiSK(kappa=c["kappa"], gamma=c["lookahead"]),
    "per-sample-ema": lambda c: PerSampleEMA(gamma=c["gamma"]),
}


def _one_of(*names: Iterable[Any]) -> AfterValidator:
    def check(value: Any) -> Any:
        known = [name for group in names for name in group]
        if value not in known:
            raise ValueError(f"one of {', '.join(map(str, known))}")
        return value

    return AfterValidator(check)


Count = Annotated[int, Field(ge=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Factor = Annotated[float, Field(ge=1e-12, le=1e12)]  # of a step: products of them stay within float32
Amount = Annotated[float, Field(gt=0)]
Distinct = AfterValidator(lambda values: tuple(dict.fromkeys(values)))


class Choice(Settings):
    """What a search chooses for a method: its normalized rate and its momentum, where None is the configuration's."""

    rate: float
    gamma1: float | None = None
    K0: int | None = None
    gamma0: float | None = None

    def to_dict(self) -> dict[str, float]:
        """What was chosen, as plain values."""
        return self.model_dump(exclude_none=True)

    def label(self) -> str:
        """In a few words, for tables."""
        names = {"gamma1": "γ1", "K0": "K0", "gamma0": "γ0"}
        rest = [f"{names[k]} {v:g}" for k, v in self.to_dict().items() if k != "rate"]
        return ", ".join([f"{self.rate:g}", *rest])


class Config(Settings):
    """Everything about an experiment but the method and the seed."""

    preset: str
    data: Annotated[str, _one_of([catalogue.NOTHING_NEEDED], catalogue.CATALOGUE)]
    model: Annotated[str, _one_of(MODELS)]
    epsilon: Amount  # what every private method spends, no more and no less
    delta: Share
    batch: Count  # expected: batches are Poisson samples
    epochs: Count
    C: Factor  # constants of the scaling rules
    r: Factor
    s: Factor
    tune: bool  # search rate and momentum on held-out training data; otherwise take the rate from `rates`
    grid: Annotated[tuple[Factor, ...], Field(min_length=1), Distinct]  # normalized rates to try
    held_out: Share  # fraction of the training data that the search measures on
    search_epochs: Count | None = None  # a try ends after so many epochs, with the noise of the whole run
    widen: Annotated[int, Field(ge=0)] = 8  # so often the grid grows, at most, until no best rate is at its end
    search_seeds: Count = 3  # of the best tries of a method, each with a held-out part of its own
    train_size: Count | None = None  # take only the first so many training samples
    normalize: tuple[float, float] = (0.0, 1.0)  # (a, b): a pixel x in [0, 1] becomes (x - a)/b. Published constants
    encoder: Annotated[str | None, _one_of([None], ENCODERS, [SCATTERING])] = None  # train on its frozen features
    optimizer: Literal["sgd", "nadam"] = "sgd"
    schedule: Annotated[str, _one_of(SCHEDULES)] = "constant"  # how the learning rate falls
    average: Annotated[float, Field(ge=0, lt=1)] = 0.0  # measure a moving average of the weights that keeps so much
    augment: dict[Annotated[str, _one_of(AUGMENT)], Amount] = Field(default_factory=dict)  # random views of images
    views: Count = 1  # so many of each sample, whose gradients are averaged before they are scaled
    precomputed: bool = False  # train on what the frozen layers make of images and mirror images, computed once
    standardize: bool = False  # weight standardization of every convolution
    precision: Literal["float32", "bf16"] = "float32"  # float32 without TF32; bf16 is autocast, on CUDA alone
    momentum: Annotated[str, _one_of(_MOMENTA, ["none"])] = "heavy-ball"  # of methods that have none of their own
    gamma1: float = 0.1  # outer momentum of every method
    K0: int = 2  # inner momentum of the methods that have it
    gamma0: float = 0.5
    gamma1s: Annotated[tuple[float, ...], Distinct] = ()  # what the search tries in their place
    inner: Annotated[tuple[tuple[int, float], ...], Distinct] = ()
    kappa: float = 0.7  # of DiSK
    lookahead: float = 0.5
    gamma: float = 0.5  # of PerSampleEMA
    micro_batch: Count | None = None  # rows of a part, in which a private step goes through its batch
    sampling: Literal["poisson", "full-batch"] = "poisson"  # with full batches one epoch is one step
    rates: dict[str, Factor] = Field(default_factory=dict)  # normalized rate per method, for runs without a search
    diagnostics: bool = False  # record norms, weights and cosines: not private, for public data alone
    last_epochs: Count = 10  # diagnostics are taken in so many epochs at the end
    note: str = ""  # what a reader of the report must be told about how these values were chosen

    @model_validator(mode="after")
    def _agree(self) -> "Config":
        action = 'A view is an image changed at random: set augment={"mirror": 0.5} too, or leave views out.'
        require(self.views == 1 or bool(self.augment), "Config", "views", "1 without augment", self.views, action)
        require(self.normalize[1] != 0, "Config", "normalize", "(a, b) with b not 0", self.normalize)
        if self.precomputed:
            images = self.encoder is None and self.normalize == (0, 1) and not self.standardize
            ok = self.model in FINE_TUNED and images and set(self.augment) <= {"mirror"} and self.views <= 2
            must = f"false, but for {', '.join(FINE_TUNED)} on images that are at most mirrored, in two views at most"
            require(ok, "Config", "precomputed", must, True, "Views that are made anew at each step need the images.")
        unknown = sorted(set(self.rates) - set(METHODS))
        require(not unknown, "Config", "rates", f"given for methods: {', '.join(METHODS)}", unknown)
        for tried in ({}, *({"gamma1": each} for each in self.gamma1s),
                      *({"K0": K0, "gamma0": gamma0} for K0, gamma0 in self.inner)):  # fmt: skip
            for make in _MOMENTA.values():
                make({**dict(self), **tried})  # refuses bad constants, in its own words
        return self

    def require_fitting(self) -> None:
        """Refuse a model that cannot take the samples. It is tried without data and without weights, at no cost."""
        shape, classes = catalogue.sample(self.data)
        what = f"the samples of {self.data}"
        if self.encoder == SCATTERING:
            ok = shape == (1, 28, 28)
            require(ok, "Config", "encoder", f"another for {what}, of shape {shape}", self.encoder, "It takes 28×28.")
        if self.encoder is not None:
            shape = SHAPE if self.encoder == SCATTERING else (ENCODERS[self.encoder].features,)
            what = f"the features of {self.encoder}"
        if not _takes(self.model, shape, classes):
            able = ", ".join(name for name in MODELS if _takes(name, shape, classes))
            must = f"one that takes {what}, of shape {shape}"
            require(False, "Config", "model", must, self.model, f"Choose one of {able}.")

    def require_device(self) -> None:
        """Refuse a precision that this machine has no device for: a record would name what was not computed."""
        ok = self.precision != "bf16" or device.on_gpu()
        must = "'float32' where torch finds no GPU"
        require(ok, "Config", "precision", must, self.precision, "Set precision=float32, or run it on a GPU.")

    def constants(self, choice: Choice | None = None) -> dict[str, Any]:
        """All values by name, with the momentum of ``choice`` in place of the configuration's."""
        return {**dict(self), **({} if choice is None else choice.to_dict())}

    def at_rate(self, rate: float) -> "Config":
        """The same experiment without a search: every method at this normalized rate."""
        return self.replace(tune=False, rates=dict.fromkeys(searched(METHODS), rate))

    def tries(self, method: "Method") -> list[Choice]:
        """What the search tries: each rate with each outer momentum, so many for every method.

        A method with inner momentum has two more constants and no more tries: the pairs (K0, gamma0) take turns, one
        further from rate to rate and from momentum to momentum.
        """
        gamma1s, inner = self.gamma1s or (self.gamma1,), self.inner or ((self.K0, self.gamma0),)
        own = isinstance(method.momentum_of(self), InnerOuter)
        made = []
        for i, rate in enumerate(self.grid):
            for j, gamma1 in enumerate(gamma1s):
                K0, gamma0 = inner[(i + j) % len(inner)] if own else (None, None)
                made.append(Choice(rate=rate, gamma1=gamma1, K0=K0, gamma0=gamma0))
        return made

    def trained(self, role: str) -> int:
        """Epochs of a run; a try may end early, and never goes on for longer."""
        return min(self.search_epochs or self.epochs, self.epochs) if role == "search" else self.epochs

    def given(self, method: "Method") -> Choice:
        """What a run without a search takes."""
        name = method.source.name
        action = "Search the rate (tune=true) or give one (--rate)."
        require(name in self.rates, "Config", "rates", f"a mapping that has {name!r}", sorted(self.rates), action)
        own = isinstance(method.source.momentum_of(self), InnerOuter)
        K0, gamma0 = (self.K0, self.gamma0) if own else (None, None)
        return Choice(rate=self.rates[name], gamma1=self.gamma1, K0=K0, gamma0=gamma0)


def _takes(model: str, shape: tuple[int, ...], classes: int) -> bool:
    """Whether a model makes a logit per class of a sample of this shape."""
    try:
        with torch.device("meta"):  # where nothing is allocated and nothing is computed
            logits = MODELS[model](shape, classes)(torch.empty(1, *shape))
    except (RuntimeError, ValueError, IndexError):
        return False
    return tuple(logits.shape) == (1, classes)


# -- methods ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Method:
    """A way to train: a scaling rule (or none), a momentum, and where its learning rate comes from."""

    name: str
    title: str  # for tables
    about: str  # for the report
    rule: str | None  # name in `scaling.RULES`; None for training without privacy
    follows: str | None = None  # a control takes the learning rate of this method instead of a search of its own
    over_s: str | None = None  # what a control divides by s: its learning rate ("lr") or its stabiliser ("r")
    momentum: str | None = None  # a momentum of its own, in place of the configuration's

    @property
    def source(self) -> "Method":
        """The method whose choice it takes: itself, unless it is a control."""
        return METHODS[self.follows or self.name]

    def momentum_of(self, config: Config, choice: Choice | None = None) -> Momentum | None:
        """Its own momentum or the configuration's, with the constants of ``choice`` and ``config``."""
        kind = self.momentum or config.momentum
        return None if kind == "none" else _MOMENTA[kind](config.constants(choice))

    def scaling(self, config: Config) -> Scaling | None:
        """The rule with the constants of ``config``."""
        if self.rule is None:
            return None
        wanted = {f.name for f in dataclasses.fields(RULES[self.rule])} - ({"s"} if self.rule == "psac" else set())
        constants = {"C": config.C, "s": config.s, "r": config.r / config.s if self.over_s == "r" else config.r}
        return RULES[self.rule](**{name: constants[name] for name in constants if name in wanted})

    def bound(self, config: Config) -> float:
        """sup x·w(x) of its rule; 1 without privacy, where the mean gradient is not scaled."""
        rule = self.scaling(config)
        return 1.0 if rule is None else rule.bound

    def learning_rate(self, config: Config, choice: Choice) -> float:
        """What the optimizer gets, from the normalized rate that was chosen for this method or the one it follows."""
        rate, own = choice.rate, self.source
        if config.optimizer == "sgd":  # bound/γ1: how far a step of learning rate 1 goes in the end, if all agree
            gamma1 = config.constants(choice)["gamma1"] if (own.momentum or config.momentum) in OUTER else 1.0
            rate = choice.rate / float(own.bound(config) / gamma1)
        return rate / config.s if self.over_s == "lr" else rate


_METHODS = (
    Method("non-private", "Non-private SGD", "The same batches without clipping and without noise.", None),
    Method("dp-sgd", "DP-SGD", "Clipping: weight min(1, C/x).", "clip"),
    Method("auto-s", "Auto-S", "Normalizing: weight C/(x + r).", "auto-s"),
    Method("dp-psac", "DP-PSAC", "Adaptive: weight C/(x + r/(x+r)).", "psac"),
    Method("dp-psasc", "DP-PSASC", "Adaptive, scaled: weight C/(s·x + r/(x+r)).", "psasc"),
    Method("dp-psasc-star", "DP-PSASC*", "DP-PSASC on each sample's gradients at K0 + 1 released points, combined "
           "before they are scaled.", "psasc", momentum="inner-outer"),
    Method("psac-lr-over-s", "PSAC at lr/s", "Control: DP-PSAC at DP-PSASC's learning rate divided by s.", "psac",
           follows="dp-psasc", over_s="lr"),
    Method("psac-r-over-s", "PSAC with r/s", "Control: DP-PSAC at DP-PSASC's learning rate, with r divided by s.",
           "psac", follows="dp-psasc", over_s="r"),
)  # fmt: skip
METHODS: dict[str, Method] = {method.name: method for method in _METHODS}
"""Every method by name, in the order of tables."""


def searched(names: Iterable[str]) -> list[str]:
    """The methods whose rates have to be known to run ``names``: controls need that of the one they follow."""
    return list(dict.fromkeys(METHODS[name].source.name for name in names))


def methods(names: str | None, config: Config | None = None) -> list[Method]:
    """Methods from a comma-separated list, in the order of tables; for None all that say something of ``config``."""
    linear = config is None or config.optimizer == "sgd"
    if names is None:
        return [each for each in METHODS.values() if linear or not each.follows]
    wanted = [named(METHODS, "method", name.strip()) for name in names.split(",")]
    controls = [each.name for each in wanted if each.follows and not linear]
    action = "NAdam divides by the gradient's own size, in which s cancels."
    require(not controls, "dpscale", "methods", "without the controls under NAdam", controls, action)
    return [one for one in METHODS.values() if one in wanted]


# -- presets ---------------------------------------------------------------------------------------------------


def _values(name: str, tables: Mapping[str, Any]) -> dict[str, Any]:
    """A table with what it takes over from others."""
    own = dict(tables["shared"].get(name) or tables[name])
    found: dict[str, Any] = {}
    for other in own.pop("like", ()):
        found |= _values(other, tables)
    return found | own


def _load() -> dict[str, Config]:
    tables = tomllib.loads(resources.files("dpscale.lab").joinpath("presets.toml").read_text(encoding="utf-8"))
    made = {}
    for name in (name for name in tables if name != "shared"):
        values = _values(name, tables)
        rates = dict.fromkeys(searched(METHODS), values.pop("rate")) | values.pop("rates", {})
        made[name] = Config(preset=name, rates=rates, **values)
    return made


PRESETS: dict[str, Config] = _load()
"""Every preset by name."""
