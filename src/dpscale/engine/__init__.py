"""Per-sample gradient norms and their weighted sum, in one forward and one backward."""

from dpscale.engine.arguments import LossFn as LossFn
from dpscale.engine.arguments import batch_size as batch_size
from dpscale.engine.arguments import check_losses as check_losses
from dpscale.engine.arguments import require_finite as require_finite
from dpscale.engine.arguments import trainable as trainable
from dpscale.engine.engine import Engine as Engine
from dpscale.engine.engine import scaled_sum as scaled_sum
from dpscale.engine.errors import UnsupportedModel as UnsupportedModel
from dpscale.engine.result import ScaledSum as ScaledSum
