"""Settings on the command line: every value of a configuration can be given as NAME=VALUE, or as --name VALUE."""

import functools
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.checks import require

if TYPE_CHECKING:
    from dpscale.lab.config import Config

log = logging.getLogger("dpscale")

Preset = Annotated[
    str, typer.Argument(help="Name of an experiment, such as digits; dpscale presets lists them.", show_default=False)
]
Folder = Annotated[
    Path | None, typer.Option("--data", help="Data folder; default: $DPSCALE_DATA, else the user's cache folder.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")]
Values = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="NAME=VALUE", show_default=False,
        help="Any value of the preset: epochs=3 grid=[0.5,1,2]; dpscale presets --json shows all. --epochs 3 is the "
        "same. Often changed: epsilon, delta, epochs, batch, C, r, s, model, optimizer, schedule, precision, momentum, "
        "gamma1, K0, gamma0, sampling, encoder, train_size, search_seeds, diagnostics (NOT PRIVATE). rate=R is "
        "learning rate × bound / gamma1 of every method, without a search; tune=false takes the preset's rates.",
    ),
]  # fmt: skip

_OTHER_NAMES = {"k0": "K0", "c": "C", "lr": "rate", "sampler": "sampling"}
_FLAGS = {"--diagnostics": "diagnostics=true", "--tune": "tune=true", "--no-tune": "tune=false"}
SETTINGS: dict[str, Any] = {"ignore_unknown_options": True}
"""Of commands that take values as options: what they do not know is a value."""


def experiment(otherwise: Callable[..., None] | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command whose first argument is a configuration the name of a preset and values that change it.

    Where no preset is named, ``otherwise`` is given all that was said.
    """

    def decorated(command: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(preset: str | None = None, values: list[str] | None = None, data: Path | None = None,
                device: str | None = None, **given: Any) -> None:  # fmt: skip
            words = [*([preset] if preset else []), *(values or [])]
            if otherwise is not None and (not words or words[0].startswith("-") or "=" in words[0]):
                otherwise(data=data, device=device, **read(words), **given)
                return
            command(configured(words[0], read(words[1:]), data, device), **given)

        keyword = inspect.Parameter.KEYWORD_ONLY
        own = [each.replace(kind=keyword) for each in list(inspect.signature(command).parameters.values())[1:]]
        first = [
            inspect.Parameter("preset", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Preset,
                              default=None if otherwise else inspect.Parameter.empty),
            inspect.Parameter("values", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Values, default=None),
        ]  # fmt: skip
        more = [inspect.Parameter(name, keyword, default=None, annotation=kind)
                for name, kind in (("data", Folder), ("device", Device))]  # fmt: skip
        run.__signature__ = inspect.Signature([*first, *own, *more])  # type: ignore[attr-defined]
        run.__annotations__ = {each.name: each.annotation for each in (*first, *own, *more)}
        return run

    return decorated


def read(words: Iterable[str]) -> dict[str, Any]:
    """What NAME=VALUE, --name VALUE, --name=VALUE and --set NAME=VALUE say: JSON, or else plain text."""
    found: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        given = next(rest, "") if word == "--set" else _FLAGS.get(word, word)
        name, equals, value = given.removeprefix("--").partition("=")
        if not equals and given.startswith("--"):
            value, equals = next(rest, ""), "="
        require(bool(equals), "dpscale", name, f"given as {name}=VALUE", given, "=VALUE is missing.")
        name = name.replace("-", "_")
        name = _OTHER_NAMES.get(name, name)
        with suppress(json.JSONDecodeError):
            value = json.loads(value)
        if found.setdefault(name, value) != value:
            raise ValueError(f"{name} is given twice, as {found[name]!r} and as {value!r}. Give it once.")
    return found


def configured(
    name: str, values: Mapping[str, Any] | None = None, data: Path | None = None, device: str | None = None
) -> "Config":
    """The preset with what the command line changes; a momentum that is given is not searched."""
    from dpscale.lab import device as place
    from dpscale.lab import presets

    if data is not None:
        os.environ["DPSCALE_DATA"] = str(data)  # for the processes of a comparison too
    place.use(device)
    changes = dict(values or {})
    rate = changes.pop("rate", None)
    preset = presets.preset(name)
    unknown = [each for each in changes if each not in type(preset).model_fields or each == "preset"]
    known = ", ".join(sorted(set(type(preset).model_fields) - {"preset"}))
    require(
        not unknown, "dpscale", (unknown or [""])[0], f"left out: the values of a preset are {known}, rate", changes
    )
    _require_agreement(changes, rate)
    if "gamma1" in changes:
        changes["gamma1s"] = [changes["gamma1"]]
    if "K0" in changes or "gamma0" in changes:
        changes["inner"] = [[changes.get("K0", preset.K0), changes.get("gamma0", preset.gamma0)]]
    config = preset.replace(**changes)
    config = config if rate is None else config.at_rate(rate)
    config.require_fitting()
    return _on_this_device(config, asked="precision" in changes)


def _require_agreement(changes: Mapping[str, Any], rate: Any) -> None:
    """Refuse values of which one would undo another."""
    asked = {name: value for name, value in changes.items() if (name, value) != ("tune", False)}
    clashes = (
        ("rate", rate is not None, ("rates", "grid", "gamma1s", "inner", "tune")),
        ("gamma1", "gamma1" in asked, ("gamma1s",)),
        ("K0 or gamma0", "K0" in asked or "gamma0" in asked, ("inner",)),
        ("sampling=full-batch", asked.get("sampling") == "full-batch", ("batch",)),
    )
    for what, there, names in clashes:
        for name in (name for name in names if there and name in asked):
            raise ValueError(f"Beside {what}, {name} would do nothing. Leave out one of the two.")


def _on_this_device(config: "Config", *, asked: bool) -> "Config":
    """The configuration as it can run here: without a GPU a preset's bf16 is float32, and one that was asked for is
    refused."""
    from dpscale.lab import device

    if config.precision != "bf16" or device.on_gpu():
        return config
    if asked:
        config.require_device()
    log.warning("dpscale: %s runs in float32: its bf16 needs a GPU, and torch finds none here.", config.preset)
    return config.replace(precision="float32")
