"""Train PyTorch models with differential privacy by scaling per-sample gradients."""

from typing import TYPE_CHECKING

from dpscale.lazy import on_demand

if TYPE_CHECKING:
    from dpscale.advice import Advice as Advice
    from dpscale.advice import advise as advise
    from dpscale.audit import AuditReport as AuditReport
    from dpscale.batches import Batch as Batch
    from dpscale.card import Card as Card
    from dpscale.engine import ScaledSum as ScaledSum
    from dpscale.engine import UnsupportedModel as UnsupportedModel
    from dpscale.engine import scaled_sum as scaled_sum
    from dpscale.ledger import BudgetExhausted as BudgetExhausted
    from dpscale.ledger import Ledger as Ledger
    from dpscale.ledger import LedgerError as LedgerError
    from dpscale.model_check import CheckReport as CheckReport
    from dpscale.model_check import check as check
    from dpscale.model_fix import fix as fix
    from dpscale.momentum import DiSK as DiSK
    from dpscale.momentum import HeavyBall as HeavyBall
    from dpscale.momentum import InnerOuter as InnerOuter
    from dpscale.momentum import PerSampleEMA as PerSampleEMA
    from dpscale.momentum import over_views as over_views
    from dpscale.momentum import views as views
    from dpscale.one_call import make_private as make_private
    from dpscale.people import People as People
    from dpscale.people import by_user as by_user
    from dpscale.plan import Plan as Plan
    from dpscale.privatizing import privatize as privatize
    from dpscale.sampling import FixedSize as FixedSize
    from dpscale.sampling import FullBatch as FullBatch
    from dpscale.sampling import Poisson as Poisson
    from dpscale.sampling import Shuffled as Shuffled
    from dpscale.scaling import PSAC as PSAC
    from dpscale.scaling import PSASC as PSASC
    from dpscale.scaling import AutoS as AutoS
    from dpscale.scaling import Clip as Clip
    from dpscale.selection import Selection as Selection
    from dpscale.training import Private as Private
    from dpscale.training import StepReport as StepReport
    from dpscale.tuning import Tuned as Tuned
    from dpscale.tuning import tune as tune
else:
    __getattr__, __dir__, __all__ = on_demand(
        __name__,
        {
            "advice": "Advice advise",
            "audit": "AuditReport",
            "batches": "Batch",
            "card": "Card",
            "engine": "ScaledSum UnsupportedModel scaled_sum",
            "ledger": "BudgetExhausted Ledger LedgerError",
            "model_check": "CheckReport check",
            "model_fix": "fix",
            "momentum": "DiSK HeavyBall InnerOuter PerSampleEMA over_views views",
            "one_call": "make_private",
            "people": "People by_user",
            "plan": "Plan",
            "privatizing": "privatize",
            "sampling": "FixedSize FullBatch Poisson Shuffled",
            "scaling": "PSAC PSASC AutoS Clip",
            "selection": "Selection",
            "training": "Private StepReport",
            "tuning": "Tuned tune",
        },
    )

__version__ = "0.1.0"
