"""Train PyTorch models with differential privacy by scaling per-sample gradients."""

from dpscale.scaling import PSAC as PSAC
from dpscale.scaling import PSASC as PSASC
from dpscale.scaling import AutoS as AutoS
from dpscale.scaling import Clip as Clip
