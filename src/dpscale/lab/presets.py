"""The experiments that can be named, from presets.toml."""

import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from dpscale.checks import require
from dpscale.lab.config import METHODS, Config, searched


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
    for name in tables.keys() - {"shared"}:
        values = _values(name, tables)
        rates = dict.fromkeys(searched(METHODS), values.pop("rate")) | values.pop("rates", {})
        made[name] = Config(preset=name, rates=rates, **values)
    return {name: made[name] for name in tables if name in made}


PRESETS: dict[str, Config] = _load()
"""Every preset by name."""


def preset(name: str) -> Config:
    """The preset of that name, or an error that lists them."""
    require(name in PRESETS, "dpscale", "preset", f"one of: {', '.join(PRESETS)}", name)
    return PRESETS[name]
