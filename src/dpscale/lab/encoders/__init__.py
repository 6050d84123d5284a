"""Frozen public encoders, and the features that they give: data for a linear probe."""

from dpscale.lab.encoders.features import features
from dpscale.lab.encoders.registry import ENCODERS, Encoder, encoder

__all__ = ["ENCODERS", "Encoder", "encoder", "features"]
