"""What commands share: their options, values of a preset as NAME=VALUE or --name VALUE, and JSON on stdout."""

import json
import logging
import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.checks import require

if TYPE_CHECKING:
    from dpscale.lab.presets import Config

log = logging.getLogger("dpscale")

PRESET: Any = typer.Argument(
    help="Name of an experiment, such as digits; dpscale presets lists them.", show_default=False
)
Preset = Annotated[str, PRESET]
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
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Folder = Annotated[
    Path | None, typer.Option("--data", help="Data folder; default: $DPSCALE_DATA, else the user's cache folder.")
]
Device = Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ...; default: a GPU if there is one.")]
SETTINGS: dict[str, Any] = {"ignore_unknown_options": True}
"""Of commands that take values as options: what they do not know is a value."""


def read(words: Iterable[str]) -> dict[str, Any]:
    """What NAME=VALUE, --name VALUE, --name=VALUE and --set NAME=VALUE say: JSON, or else plain text."""
    found: dict[str, Any] = {}
    rest = iter(words)
    for word in rest:
        given = next(rest, "") if word == "--set" else "diagnostics=true" if word == "--diagnostics" else word
        name, equals, value = given.removeprefix("--").partition("=")
        if not equals and given.startswith("--"):
            value, equals = next(rest, ""), "="
        require(bool(equals), "dpscale", name, f"given as {name}=VALUE", given, "=VALUE is missing.")
        name = name.replace("-", "_")
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
    from dpscale.lab.settings import named

    if data is not None:
        os.environ["DPSCALE_DATA"] = str(data)  # for the processes of a comparison too
    place.use(device)
    changes, preset = dict(values or {}), named(presets.PRESETS, "preset", name)
    rate = changes.pop("rate", None)
    names = sorted(set(presets.Config.model_fields) - {"preset"})
    for each in (each for each in changes if each not in names):
        require(False, "dpscale", each, f"left out: the values of a preset are {', '.join(names)}, rate", changes)
    _require_agreement(changes, rate)
    if "gamma1" in changes:
        changes["gamma1s"] = [changes["gamma1"]]
    if "K0" in changes or "gamma0" in changes:
        changes["inner"] = [[changes.get("K0", preset.K0), changes.get("gamma0", preset.gamma0)]]
    config = preset.replace(**changes)
    config = config if rate is None else config.at_rate(rate)
    config.require_fitting()
    if config.precision == "bf16" and not place.on_gpu():
        if "precision" in changes:
            config.require_device()  # refuses it
        log.warning("dpscale: %s runs in float32: its bf16 needs a GPU, and torch finds none here.", config.preset)
        config = config.replace(precision="float32")
    return config


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


def group(text: str) -> typer.Typer:
    """An empty group of commands, which shows its help when none is named."""
    made = typer.Typer(add_completion=False, rich_markup_mode=None)

    def start(context: typer.Context) -> None:
        if context.invoked_subcommand is None:
            typer.echo(context.get_help())

    made.callback(invoke_without_command=True, help=text)(start)
    return made


def show(as_json: bool, found: Any, *lines: str) -> None:
    """What came of a command: as JSON, or in these lines."""
    if as_json:
        print_json(found)
    else:
        for line in lines:
            typer.echo(line)


def print_json(value: Any) -> None:
    """One JSON document on stdout; a number that JSON does not have (inf, NaN) becomes null."""
    from pydantic_core import to_json

    typer.echo(to_json(value, indent=2, inf_nan_mode="null"))


def require_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written, before minutes are spent; nothing is made yet."""
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"Cannot write to the folder {folder}. Choose another --out.")
