"""Experiments on top of the library: data, models, presets, runs, records, figures, reports."""

from dpscale.lab.presets import METHODS as METHODS
from dpscale.lab.presets import PRESETS as PRESETS
from dpscale.lab.presets import Config as Config
from dpscale.lab.presets import Method as Method
from dpscale.lab.records import Record as Record
from dpscale.lab.summary import interval as interval
from dpscale.lab.summary import summarize as summarize
