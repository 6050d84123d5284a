"""Names of a package that import their modules when first used: what needs no torch starts without waiting for it."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_demand(
    package: str, places: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of a package (PEP 562).

    No name may be that of a module of the package: importing the module would put it in the name's place.

    Args:
        package: its name.
        places: for each of its modules, the names that the package takes from it, with spaces between.
    """
    homes = {name: module for module, names in places.items() for name in names.split()}

    def get(name: str) -> Any:
        if name not in homes and name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f"{package}.{homes.get(name, name)}")
        value = getattr(module, name) if name in homes else module
        setattr(sys.modules[package], name, value)  # asked for once
        return value

    return get, lambda: sorted({*vars(sys.modules[package]), *homes}), sorted(homes)
