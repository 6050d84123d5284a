"""Gaussian noise from a 256-bit key, by one of two sources."""

from dpscale.noise.fast import Noise as Noise
from dpscale.noise.key import Key as Key
from dpscale.noise.secure import AnyNoise as AnyNoise
from dpscale.noise.secure import SecureNoise as SecureNoise
from dpscale.noise.secure import Source as Source
from dpscale.noise.secure import check_source as check_source
from dpscale.noise.secure import default_source as default_source
from dpscale.noise.secure import noise_from as noise_from
