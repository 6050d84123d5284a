"""Train PyTorch models with differential privacy by scaling per-sample gradients."""

from dpscale.advise import Advice as Advice
from dpscale.advise import advise as advise
from dpscale.batches import Batch as Batch
from dpscale.check import CheckReport as CheckReport
from dpscale.check import check as check
from dpscale.engine import ScaledSum as ScaledSum
from dpscale.engine import UnsupportedModel as UnsupportedModel
from dpscale.engine import scaled_sum as scaled_sum
from dpscale.fix import fix as fix
from dpscale.momentum import DiSK as DiSK
from dpscale.momentum import HeavyBall as HeavyBall
from dpscale.momentum import InnerOuter as InnerOuter
from dpscale.momentum import PerSampleEMA as PerSampleEMA
from dpscale.momentum import over_views as over_views
from dpscale.momentum import views as views
from dpscale.one_call import make_private as make_private
from dpscale.plan import Plan as Plan
from dpscale.sampling import FixedSize as FixedSize
from dpscale.sampling import FullBatch as FullBatch
from dpscale.sampling import Poisson as Poisson
from dpscale.sampling import Shuffled as Shuffled
from dpscale.scaling import PSAC as PSAC
from dpscale.scaling import PSASC as PSASC
from dpscale.scaling import AutoS as AutoS
from dpscale.scaling import Clip as Clip
from dpscale.training import BudgetExhausted as BudgetExhausted
from dpscale.training import Private as Private
from dpscale.training import StepReport as StepReport
from dpscale.training import privatize as privatize

__version__ = "0.1.0"
