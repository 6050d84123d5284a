"""Values that come from outside (options, files), checked by pydantic and refused in the library's own words."""

import reprlib
from collections.abc import Mapping
from typing import Any, Self, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from dpscale.checks import complaint, require

T = TypeVar("T")

_WORDS = {"missing": "given", "extra_forbidden": "left out: there is no such value"}


class Settings(BaseModel):
    """A frozen mapping of names to checked values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise refused(error) from None

    def replace(self, **changes: Any) -> Self:
        """The same with other values, which are checked too."""
        return type(self)(**{**dict(self), **changes})

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return self.model_dump(mode="json")


def named(table: Mapping[str, T], kind: str, name: str) -> T:
    """What a table has under a name, or an error that lists its names."""
    require(name in table, "dpscale", kind, f"one of: {', '.join(table)}", name)
    return table[name]


def refused(error: ValidationError) -> ValueError:
    """The first of pydantic's complaints as one of ours."""
    first = error.errors(include_url=False)[0]
    inner = first.get("ctx", {}).get("error")
    if str(inner).startswith("The '"):  # one of ours already
        return ValueError(str(inner))
    must = _WORDS.get(first["type"]) or str(inner or first["msg"]).removeprefix("Input should be ")
    name = ".".join(map(str, first["loc"])) or "values"
    return complaint(error.title, name, must, first["input"] if inner is None else reprlib.repr(first["input"]))
