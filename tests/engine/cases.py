"""Small models, one family per rule of the engine, drawn by hypothesis; and the two ways to compute a scaled sum."""

import operator
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpscale
from dpscale.engine import trainable
from dpscale.engine.combine import evaluate, gradients, weigh
from dpscale.engine.engine import engine_of
from dpscale.engine.modules import structure
from dpscale.engine.reference import reference_sum
from dpscale.engine.rules.arithmetic import Arithmetic, PReLU
from dpscale.engine.rules.convolution import Convolution, TransposedConvolution
from dpscale.engine.rules.embedding import Embedding, EmbeddingBag
from dpscale.engine.rules.linear import AddMM, Linear, MatMul
from dpscale.engine.rules.normalization import GroupNorm, InstanceNorm, LayerNorm, RMSNorm

from ..seeding import seeded

SCALINGS = [
    dpscale.Clip(C=0.3),
    dpscale.AutoS(C=0.5, r=0.01),
    dpscale.PSAC(C=0.3, r=0.01),
    dpscale.PSASC(C=0.3, s=0.5, r=0.01),
]
BATCHES = st.sampled_from([0, 1, 2, 3, 5])


@dataclass
class Case:
    model: nn.Module
    batch: Any

    def __repr__(self) -> str:
        return f"{self.model}\non {[tuple(t.shape) for t in self.batch]}"


def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
    """Any smooth function of each sample's output that is linear in nothing."""
    out = model(batch[0])
    return torch.sin(out + 0.3).flatten(1).sum(1) if out.ndim > 1 else torch.sin(out + 0.3)


class Strided(nn.Module):
    """Hands its inner module a non-contiguous view of the input."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(torch.stack([x, x + 1], dim=-1)[..., 0])


class Doubled(nn.Module):
    """Uses its inner module twice, so that every parameter of it is tied to itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) + 2 * self.inner(x.flip(-1))


def wrap(draw: Any, model: nn.Module) -> nn.Module:
    """Randomize, freeze some parameters, perhaps use the model twice, perhaps make its input strided."""
    generator = seeded(draw(st.integers(0, 2**16)))
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=p.dtype)
    parameters = list(model.parameters())
    if len(parameters) > 1 and draw(st.booleans()):
        parameters[draw(st.integers(0, len(parameters) - 1))].requires_grad_(False)
    if draw(st.booleans()):
        model = Doubled(model)
    return Strided(model) if draw(st.booleans()) else model


def randn(draw: Any, *shape: int) -> Tensor:
    generator = seeded(draw(st.integers(0, 2**16)))
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


@st.composite
def linears(draw: Any) -> Case:
    leading = draw(st.lists(st.integers(1, 4), max_size=2))
    i, o = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    model = nn.Sequential(nn.Linear(i, o, bias=draw(st.booleans())), nn.Tanh(), nn.Linear(o, 2)).double()
    return Case(wrap(draw, model), (randn(draw, draw(BATCHES), *leading, i),))


class Raw(nn.Module):
    """An operation on the input and raw parameters."""

    def __init__(self, operation: Callable[..., Tensor], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        self.operation = operation
        self.p = nn.ParameterList(torch.zeros(s, dtype=torch.float64) for s in shapes)

    def forward(self, x: Tensor) -> Tensor:
        return self.operation(x, *self.p)

    def extra_repr(self) -> str:
        return str(self.operation)


MATRIX_PRODUCTS = {
    "operator": lambda x, w: x @ w,
    "matmul": lambda x, w: torch.matmul(input=x, other=w),
    "mm": lambda x, w: torch.mm(x.flatten(0, -2), mat2=w).unflatten(0, x.shape[:-1]),
    "method": lambda x, w: x.flatten(0, -2).mm(w).unflatten(0, x.shape[:-1]),
    "transposed": lambda x, w: (x.transpose(0, -2) @ w).transpose(0, -2),
}


@st.composite
def matrix_products(draw: Any) -> Case:
    leading = draw(st.lists(st.integers(1, 4), max_size=2))
    i, o = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    operation = MATRIX_PRODUCTS[draw(st.sampled_from(sorted(MATRIX_PRODUCTS)))]
    model = nn.Sequential(Raw(operation, (i, o)), nn.Tanh(), nn.Linear(o, 2, dtype=torch.float64))
    return Case(wrap(draw, model), (randn(draw, draw(BATCHES), *leading, i),))


@st.composite
def added_products(draw: Any) -> Case:
    """Hugging Face's Conv1D, and what else addmm can do."""
    leading = draw(st.lists(st.integers(1, 4), max_size=2))
    i, o = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    factors = draw(st.sampled_from([{}, {"alpha": -2}, {"beta": 0.5}, {"alpha": 3, "beta": 2}]))

    def conv1d(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
        return torch.addmm(b, x.view(-1, x.shape[-1]), w, **factors).view(*x.shape[:-1], o)

    bias = draw(st.sampled_from([(o,), (1, o), (1, 1), (1,)]))
    model = nn.Sequential(nn.Linear(i, i, dtype=torch.float64), Raw(conv1d, (i, o), bias))
    return Case(wrap(draw, model), (randn(draw, draw(BATCHES), *leading, i),))


ARITHMETIC = {
    "x + p": lambda x, p: x + p,
    "p + x": lambda x, p: p + x,
    "add": lambda x, p: torch.add(x, p, alpha=-3),
    "add to p": lambda x, p: torch.add(input=p, other=x, alpha=2),
    "x - p": lambda x, p: x - p,
    "p - x": lambda x, p: p - x,
    "subtract": lambda x, p: torch.subtract(x, p, alpha=2),
    "x * p": lambda x, p: x * p,
    "p * x": lambda x, p: p * x,
    "x / p": lambda x, p: x / p,
    "p / x": lambda x, p: p / (x.square() + 1),
    "integers": lambda x, p: p * (x > 0).long() + x,
    "wider": lambda x, p: x.unsqueeze(1) * p,  # x itself is repeated along the parameter's first dimension
    "time first": lambda x, p: (x.transpose(0, 1) * p.flatten()[:1]).transpose(0, 1),
    "add_": lambda x, p: (x * 2).add_(p, alpha=2),
    "mul_": lambda x, p: (x * 2).mul_(p),
    "-=": lambda x, p: operator.isub(x * 2, p),
    "*=": lambda x, p: operator.imul(x * 2, p),
    "/=": lambda x, p: operator.itruediv(x * 2, p),
}


@st.composite
def arithmetic(draw: Any) -> Case:
    length, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    name = draw(st.sampled_from(sorted(ARITHMETIC)))
    shapes = [(1,), (width,), (length, 1), (length, width), (1, 1, width), (1, length, width)]
    shape = (2, 1, width) if name == "wider" else draw(st.sampled_from(shapes))
    raw = Raw(ARITHMETIC[name], shape)
    model = wrap(draw, nn.Sequential(nn.Linear(width, width, dtype=torch.float64), raw))
    raw.p[0].data = raw.p[0].data.sign() * (raw.p[0].data.abs() + 0.5)  # nothing is divided by almost 0
    return Case(model, (randn(draw, draw(BATCHES), length, width),))


@st.composite
def convolutions(draw: Any) -> Case:
    dims = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 2]))
    kernel = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(dims))
    stride = tuple(draw(st.integers(1, 3)) for _ in range(dims))
    padding: Any = tuple(draw(st.integers(0, 2)) for _ in range(dims))
    if draw(st.booleans()):
        padding, stride = draw(st.sampled_from(["same", "valid"])), (1,) * dims
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "circular", "replicate"])) if dims == 2 else "zeros"
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](
        groups * draw(st.integers(1, 2)), groups * draw(st.integers(1, 3)), kernel, stride, padding, dilation, groups,
        bias=draw(st.booleans()), padding_mode=mode,
    )  # fmt: skip
    space = [draw(st.integers(5, 7)) for _ in range(dims)]
    x = randn(draw, draw(BATCHES), conv.in_channels, *space)
    return Case(wrap(draw, conv.double()), (x,))


@st.composite
def transposed_convolutions(draw: Any) -> Case:
    dims, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 2]))
    kernel, dilation, stride = ([draw(st.integers(1, 3)) for _ in range(dims)] for _ in range(3))
    padding = [draw(st.integers(0, d * (k - 1) // 2 + 1)) for d, k in zip(dilation, kernel, strict=True)]
    # Torch allows more output padding than a stride where the dilation is larger.
    more = [draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)]
    conv = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1](
        groups * draw(st.sampled_from([1, 2, 24])), groups * draw(st.integers(1, 3)), kernel, stride, padding, more,
        groups, draw(st.booleans()), dilation,
    )  # fmt: skip
    space = [draw(st.integers(3, 4)) for _ in range(dims)]
    return Case(wrap(draw, conv.double()), (randn(draw, draw(BATCHES), conv.in_channels, *space),))


@st.composite
def prelus(draw: Any) -> Case:
    channels, rest = draw(st.integers(1, 4)), draw(st.lists(st.integers(1, 3), max_size=2))
    model = nn.Sequential(Raw(torch.add, (channels, *[1] * len(rest))), nn.PReLU(draw(st.sampled_from([1, channels]))))
    return Case(wrap(draw, model.double()), (randn(draw, draw(BATCHES), channels, *rest),))


@st.composite
def embeddings(draw: Any) -> Case:
    table, width, length = draw(st.integers(2, 6)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    padding = draw(st.one_of(st.none(), st.integers(-table, table - 1)))
    model = nn.Sequential(nn.Embedding(table, width, padding_idx=padding), nn.Linear(width, 2)).double()
    model = wrap(draw, model)
    seed = seeded(draw(st.integers(0, 2**16)))
    index = torch.randint(0, table, (draw(BATCHES), length), generator=seed)
    return Case(model.inner if isinstance(model, Strided) else model, (index,))


class Bags(nn.Module):
    """Several bags a sample: as rows of a matrix, or of lengths that follow from the indices; perhaps weighted."""

    def __init__(self, bag: nn.EmbeddingBag, ragged: bool, weighted: bool) -> None:
        super().__init__()
        self.bag, self.ragged = bag, ragged
        self.score = nn.Linear(1, 1, dtype=torch.float64) if weighted else None

    def forward(self, x: Tensor) -> Tensor:
        samples, bags, length = x.shape
        flat = x.flatten(0, 1)
        scores = self.score(flat.unsqueeze(-1).to(self.bag.weight.dtype)).squeeze(-1) if self.score else None
        if not self.ragged:
            return self.bag(flat, per_sample_weights=scores).unflatten(0, (samples, bags))
        # The first bag of a sample takes from 0 to all of its positions, the second the rest.
        first = torch.arange(samples) * bags * length
        cut = first + (x.flatten(1).sum(1) % (length + 1))
        offsets = torch.stack([first, cut], 1).flatten()
        if self.bag.include_last_offset:
            offsets = torch.cat([offsets, torch.tensor([x.numel()])])
        scores = None if scores is None else scores.flatten()
        return self.bag(flat.flatten(), offsets, scores).unflatten(0, (samples, 2))


@st.composite
def bags(draw: Any) -> Case:
    table, width, length = draw(st.integers(2, 5)), draw(st.integers(1, 4)), draw(st.integers(1, 5))
    mode, ragged = draw(st.sampled_from(["sum", "mean", "max"])), draw(st.booleans())
    padding = draw(st.one_of(st.none(), st.integers(-table, table - 1)))
    last = ragged and draw(st.booleans())
    bag = nn.EmbeddingBag(table, width, mode=mode, padding_idx=padding, include_last_offset=last).double()
    inner = Bags(bag, ragged, mode == "sum" and draw(st.booleans()))
    model = wrap(draw, nn.Sequential(inner, nn.Linear(width, 2, dtype=torch.float64)))
    seed = seeded(draw(st.integers(0, 2**16)))
    index = torch.randint(0, table, (draw(BATCHES), draw(st.integers(1, 3)), length), generator=seed)
    return Case(model.inner if isinstance(model, Strided) else model, (index,))


def normalizations(make: Callable[[Any, int], nn.Module], channels_first: bool) -> st.SearchStrategy[Case]:
    @st.composite
    def strategy(draw: Any) -> Case:
        width, length = 2 * draw(st.integers(1, 2)), draw(st.integers(2, 4))
        shape = (width, length) if channels_first else (length, width)
        model = nn.Sequential(nn.Linear(shape[1], shape[1]), make(draw, width)).double()
        return Case(wrap(draw, model), (randn(draw, draw(BATCHES), *shape),))

    return strategy()


CASES: dict[type, st.SearchStrategy[Case]] = {
    Linear: linears(),
    MatMul: matrix_products(),
    AddMM: added_products(),
    Arithmetic: arithmetic(),
    Convolution: convolutions(),
    TransposedConvolution: transposed_convolutions(),
    PReLU: prelus(),
    Embedding: embeddings(),
    EmbeddingBag: bags(),
    LayerNorm: normalizations(lambda draw, w: nn.LayerNorm(w, bias=draw(st.booleans())), False),
    RMSNorm: normalizations(lambda draw, w: nn.RMSNorm(w, eps=draw(st.sampled_from([None, 1e-3]))), False),
    GroupNorm: normalizations(lambda draw, w: nn.GroupNorm(draw(st.sampled_from([1, 2])), w), True),
    InstanceNorm: normalizations(lambda draw, w: nn.InstanceNorm1d(w, affine=True), True),
}
"""For every rule of the engine, models that use it."""


@contextmanager
def without_tf32() -> Iterator[None]:
    """Where a GPU computes float32 as float32, as matrix products do unless told otherwise: by default convolutions and
    recurrent layers round to TF32 there, and no oracle does it in the same places. Bounds must hold either way."""
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cudnn.allow_tf32 = before


@without_tf32()
def check_equal(model, batch, rule, *, mask=None, points=None, loss=loss_fn, rtol=1e-9, followed=True):
    """The engine's sum, norms and weights are the oracle's; returns the engine's answer.

    Args:
        followed: False where the engine may run sample by sample, which is what the oracle does.
    """
    out = dpscale.scaled_sum(model, loss, batch, rule, mask=mask, points=points)
    assert not (followed and engine_of(model)._obstacles), engine_of(model)._obstacles
    sums, norms, weights = reference_sum(model, loss, batch, rule, mask=mask, points=points)
    assert set(out.grads) == set(sums)
    # Norms may differ by rounding of what was cancelled, so the scale is that of the largest.
    size = norms.max().item() if len(norms) else 1.0
    torch.testing.assert_close(out.norms.to(norms), norms, rtol=rtol, atol=rtol * size)
    torch.testing.assert_close(out.weights.to(weights), weights, rtol=rtol * 100, atol=rtol)
    for name, expected in sums.items():
        torch.testing.assert_close(
            out.grads[name].to(expected), expected, rtol=rtol, atol=rtol * max(rule.bound, 1), msg=name
        )
    return out


def check_sample_by_sample(model, batch, rule, *, why, **options):
    """A model that is right, but whose rows cannot be attributed: the oracle's sum, and the reason is noted."""
    out = check_equal(model, batch, rule, followed=False, **options)
    (found,) = engine_of(model)._obstacles.values()
    assert why in found.obstacle, found.obstacle
    return out


def traced(model, loss, batch, rule):
    """The engine's sums and norms as one graph of tensor operations; a branch on values cannot be in it."""
    dpscale.scaled_sum(model, loss, batch, rule)  # looks outside of the trace
    parameters = trainable(structure(model))

    def run(data):
        return loss(model, data)

    sites = engine_of(model).sites
    mask = torch.ones(len(batch[0]), dtype=torch.bool)

    def step(*data):
        tapes, grads, losses = evaluate(parameters, run, data, sites, mask, None)
        with torch.no_grad():
            out, _ = weigh(gradients(tapes, grads), rule, mask, parameters, losses)
        return *out.grads.values(), out.norms

    return make_fx(step, tracing_mode="fake", _allow_non_fake_inputs=True)(*batch)
