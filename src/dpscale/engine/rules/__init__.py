"""One rule per family of operations; what has none goes to the generic rule."""

from dpscale.engine.rules.arithmetic import Arithmetic, PReLU
from dpscale.engine.rules.convolution import Convolution, TransposedConvolution
from dpscale.engine.rules.embedding import Embedding, EmbeddingBag
from dpscale.engine.rules.forms import Call as Call
from dpscale.engine.rules.forms import Form as Form
from dpscale.engine.rules.forms import Rule as Rule
from dpscale.engine.rules.linear import AddMM, Linear, MatMul
from dpscale.engine.rules.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm

RULES: tuple[Rule, ...] = (
    Linear(), MatMul(), AddMM(), Convolution(), TransposedConvolution(), Embedding(), EmbeddingBag(), LayerNorm(),
    RMSNorm(), GroupNorm(), InstanceNorm(), Arithmetic(), PReLU(),
)  # fmt: skip
"""Every rule. Adding one here makes the conformance tests demand cases for it."""

RULE_OF = {function: rule for rule in RULES for function in rule.functions}
