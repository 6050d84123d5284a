"""The options that change an experiment, and the configuration that they come to."""

import dataclasses
import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.checks import require

if TYPE_CHECKING:
    from dpscale.lab.presets import Config

log = logging.getLogger("dpscale")

Preset = Annotated[
    str,
    typer.Argument(
        help="Name of an experiment: digits, mnist, fashion-mnist, cifar10-simclr, celeba-male, imagenette.",
        show_default=False,
    ),
]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data; default: the preset's.")]
Encoder = Annotated[str | None, typer.Option(help="cifar10-simclr: name of a frozen encoder; default: the preset's.")]
Folder = Annotated[
    Path | None, typer.Option("--data", help="Data folder; default: $DPSCALE_DATA, else the user's cache folder.")
]
Values = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Any other value of the preset, as NAME=VALUE in JSON: --set held_out=0.2 --set grid=[1,2]."
    ),
]
Rate = Annotated[
    float | None, typer.Option("--rate", "--lr", help="Learning rate × bound / gamma1 for every method: no search.")
]

OPTIONS: dict[str, Any] = {
    "epsilon": Annotated[float | None, typer.Option(help="Privacy budget; default: the preset's.")],
    "delta": Annotated[float | None, typer.Option(help="Probability outside of it; default: the preset's.")],
    "epochs": Epochs,
    "batch": Annotated[int | None, typer.Option(help="Expected batch size; default: the preset's.")],
    "C": Annotated[float | None, typer.Option("--C", help="Constant C of the scaling rules.")],
    "r": Annotated[float | None, typer.Option("--r", help="Constant r of the scaling rules.")],
    "s": Annotated[float | None, typer.Option("--s", help="Constant s of DP-PSASC.")],
    "momentum": Annotated[
        str | None,
        typer.Option(
            help="heavy-ball, inner-outer, disk, per-sample-ema or none, for methods without one of their own."
        ),
    ],
    "K0": Annotated[int | None, typer.Option("--k0", help="Past points of inner momentum; default: the preset's.")],
    "gamma0": Annotated[
        float | None, typer.Option(help="Inner momentum: weight of a point per step of its age, in (0, 1].")
    ],
    "gamma1": Annotated[float | None, typer.Option(help="Outer momentum: the velocity keeps 1 - gamma1, in (0, 1].")],
    "kappa": Annotated[float | None, typer.Option(help="disk: share of the new in its average, in (0, 1].")],
    "lookahead": Annotated[float | None, typer.Option(help="disk: how far ahead its second point lies.")],
    "gamma": Annotated[
        float | None, typer.Option(help="per-sample-ema: share of the new in a sample's average, in (0, 1].")
    ],
    "sampling": Annotated[str | None, typer.Option("--sampler", help="poisson or full-batch; default: the preset's.")],
    "model": Annotated[str | None, typer.Option(help="Name of a model; default: the preset's.")],
    "optimizer": Annotated[str | None, typer.Option(help="sgd or nadam; default: the preset's.")],
    "schedule": Annotated[
        str | None, typer.Option(help="constant, linear or cosine: how the learning rate falls; default: the preset's.")
    ],
    "precision": Annotated[str | None, typer.Option(help="float32 or bf16 (on a GPU); default: the preset's.")],
    "encoder": Encoder,
    "train_size": Annotated[int | None, typer.Option(min=1, help="Take the first so many training samples.")],
    "diagnostics": Annotated[
        bool | None,
        typer.Option(
            "--diagnostics", help="Record norms, weights and gradient similarity. NOT PRIVATE: public data only."
        ),
    ],
}
"""Values of a `Config` that have an option of their own, by name."""

_OTHERS: dict[str, Any] = {"rate": Rate, "data": Folder, "values": Values}


def experiment(
    otherwise: Callable[..., None] | None = None, **more: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first argument is a configuration the name of a preset and every option that changes it.

    ``more`` are options of this command alone, by the values of a `Config` that they change. Where no preset is named,
    ``otherwise`` is given all that was said.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(preset: str | None = None, **given: Any) -> None:
            if preset is None and otherwise is not None:
                otherwise(**{name: value for name, value in given.items() if value not in (None, False)})
                return
            assert preset is not None
            others, changes = ({name: given.pop(name) for name in names} for names in (_OTHERS, {**OPTIONS, **more}))
            command(configured(preset, **others, **changes), **given)

        kind = inspect.Parameter.KEYWORD_ONLY
        own = [own.replace(kind=kind) for own in list(inspect.signature(command).parameters.values())[1:]]
        options = {**more, **OPTIONS, **_OTHERS}
        added = [inspect.Parameter(n, kind, default=None, annotation=a) for n, a in options.items()]
        way = inspect.Parameter.POSITIONAL_OR_KEYWORD
        missing = inspect.Parameter.empty if otherwise is None else None
        name = inspect.Parameter("preset", way, default=missing, annotation=Preset)
        parameters = [name, *own, *added]
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return run

    return decorated


def configured(
    name: str,
    rate: float | None,
    data: Path | None,
    values: list[str] | None,
    own: Mapping[str, Any] | None = None,
    **changes: Any,
) -> "Config":
    """The preset with what the command line changes; a momentum that is given is not searched.

    ``own`` is what the command itself changes, unless ``--set`` says otherwise.
    """
    from dpscale.lab import presets

    if data is not None:
        os.environ["DPSCALE_DATA"] = str(data)  # for the processes of a comparison too
    given = _values(values or [])
    changes = {name: value for name, value in changes.items() if value is not None}
    _require_agreement(rate, changes, given)
    changes |= given
    try:
        config = dataclasses.replace(presets.preset(name), **{**(own or {}), **changes})
    except TypeError as error:
        told = f"--set {' --set '.join(values or [])}"
        raise ValueError(f"A value is of the wrong kind in {told}: {error}. A list is written as [1, 2].") from error
    if changes.get("gamma1") is not None:
        config = config.replace(gamma1s=(config.gamma1,))
    if changes.get("K0") is not None or changes.get("gamma0") is not None:
        config = config.replace(inner=((config.K0, config.gamma0),))
    config = config if rate is None else config.at_rate(rate)
    config.require_fitting()
    return _on_this_device(config, asked=changes.get("precision") is not None)


def _require_agreement(rate: float | None, changes: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Refuse options of which one would undo another."""
    for name in (name for name in given if changes.get(name, given[name]) != given[name]):
        told = f"{name} is given twice, as {changes[name]!r} and by --set as {given[name]!r}. Give it once."
        raise ValueError(told)
    asked = {name: value for name, value in {**changes, **given}.items() if (name, value) != ("tune", False)}
    searched = ("rates", "grid", "gamma1s", "inner", "tune")
    clashes = (
        ("--lr", rate is not None, "is the rate of every method, without a search", searched),
        ("gamma1", "gamma1" in asked, "is the one outer momentum that is tried", ("gamma1s",)),
        ("K0", "K0" in asked, "is of the one inner momentum that is tried", ("inner",)),
        ("gamma0", "gamma0" in asked, "is of the one inner momentum that is tried", ("inner",)),
        ("--sampler full-batch", asked.get("sampling") == "full-batch", "takes all samples", ("batch",)),
    )
    for what, there, told, names in clashes:
        for name in (name for name in names if there and name in asked):
            raise ValueError(f"{what} {told}, so that {name} would do nothing. Leave out one of the two.")


def _on_this_device(config: "Config", *, asked: bool) -> "Config":
    """The configuration as it can run here: without a GPU a preset's bf16 is float32, and one that was asked for is
    refused."""
    import torch

    if config.precision != "bf16" or torch.cuda.is_available():
        return config
    if asked:
        config.require_device()
    log.warning("dpscale: %s runs in float32: its bf16 needs a GPU, and torch finds none here.", config.preset)
    return config.replace(precision="float32")


def _values(given: list[str]) -> dict[str, Any]:
    """What ``--set NAME=VALUE`` says: JSON, or else plain text."""
    from dpscale.lab.presets import Config

    known = {field.name for field in dataclasses.fields(Config)} - {"preset"}
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        require(name in known, "--set", "NAME=VALUE", f"one of {', '.join(sorted(known))}", text)
        require(bool(equals), "--set", name, f"given as {name}=VALUE", text, "=VALUE is missing.")
        try:
            read = _tuples(json.loads(value))
        except json.JSONDecodeError:
            read = value
        require(found.setdefault(name, read) == read, "--set", name, "given once", text, "It was another before.")
    return found


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
