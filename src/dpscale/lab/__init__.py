"""Experiments on top of the library: data, models, presets, runs, records, figures, reports."""

from typing import TYPE_CHECKING

from dpscale.lazy import on_demand

if TYPE_CHECKING:
    from dpscale.lab.presets import METHODS as METHODS
    from dpscale.lab.presets import PRESETS as PRESETS
    from dpscale.lab.presets import Config as Config
    from dpscale.lab.presets import Method as Method
    from dpscale.lab.records import Record as Record
    from dpscale.lab.stats import interval as interval
    from dpscale.lab.stats import summarize as summarize
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__, {"presets": "METHODS PRESETS Config Method", "records": "Record", "stats": "interval summarize"}
    )
