"""The scaling rules: formulas, bounds, peaks, and what s really is."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import dpscale
from dpscale.scaling import RULES

positive = st.floats(1e-3, 10)
small = st.floats(1e-6, 0.09)
STRATEGIES = {
    "clip": st.builds(dpscale.Clip, C=positive),
    "auto-s": st.builds(dpscale.AutoS, C=positive, r=small),
    "psac": st.builds(dpscale.PSAC, C=positive, r=small),
    "psasc": st.builds(dpscale.PSASC, C=positive, s=positive, r=small),
}
any_rule = st.one_of(*STRATEGIES.values())
FORMULAS = {
    dpscale.Clip: lambda k, x: min(1, k.C / x),
    dpscale.AutoS: lambda k, x: k.C / (x + k.r),
    dpscale.PSAC: lambda k, x: k.C / (x + k.r / (x + k.r)),
    dpscale.PSASC: lambda k, x: k.C / (k.s * x + k.r / (x + k.r)),
}
EXTREMES = [0.0, 1e-45, 1e-38, 1e-30, 1e-10, 1.0, 1e10, 1e30, 3.4e38, math.inf, math.nan]


def test_every_rule_is_tested():
    assert set(STRATEGIES) == set(RULES)
    assert set(FORMULAS) == set(RULES.values())


@given(rule=any_rule, x=st.floats(1e-6, 1e6))
def test_weight_is_the_formula(rule, x):
    weight = rule.weight(torch.tensor([x], dtype=torch.float64))
    np.testing.assert_allclose(weight.item(), FORMULAS[type(rule)](rule, x), rtol=1e-12)


@given(rule=any_rule, x=st.one_of(st.sampled_from(EXTREMES), st.floats(0, 3e38)))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_contribution_exceeds_the_bound(dtype, rule, x):
    norm = torch.tensor([x], dtype=dtype)
    weight = rule.weight(norm)
    assert weight.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.isfinite(weight).all() and (weight >= 0).all()
    if torch.isfinite(norm).all():
        assert norm.double() * weight.double() <= rule.bound * (1 + 1e-6)
    else:
        assert weight.item() == 0


@given(rule=any_rule)
def test_bound_is_the_least_upper_bound(rule):
    """Some gradient comes within a thousandth: a looser bound would add noise for nothing."""
    x = torch.logspace(-6, 9, 2000, dtype=torch.float64)
    assert (x * rule.weight(x)).max() >= 0.999 * rule.bound


@given(rule=any_rule)
def test_peak_is_the_largest_weight_and_lies_where_it_says(rule):
    x = torch.cat([torch.zeros(1), torch.logspace(-9, 6, 4000)]).double()
    weights = rule.weight(x)
    assert weights.max() <= rule.peak_weight * (1 + 1e-9)
    at_peak = rule.weight(torch.tensor([rule.peak_norm], dtype=torch.float64)).item()
    assert at_peak == pytest.approx(rule.peak_weight, rel=1e-9)


@given(r=small, C=positive)
def test_psasc_at_s_1_is_psac(r, C):
    x = torch.logspace(-9, 9, 100, dtype=torch.float64)
    psasc, psac = dpscale.PSASC(C=C, s=1.0, r=r), dpscale.PSAC(C=C, r=r)
    assert torch.equal(psasc.weight(x), psac.weight(x))
    assert (psasc.bound, psasc.peak_norm, psasc.peak_weight) == (psac.bound, psac.peak_norm, psac.peak_weight)


@given(rule=STRATEGIES["psasc"])
def test_normalized_has_bound_one_and_the_same_shape(rule):
    normal, factor = rule.normalized()
    x = torch.logspace(-9, 9, 100, dtype=torch.float64)
    assert normal.bound == 1
    assert factor == pytest.approx(rule.C / rule.s)
    torch.testing.assert_close(normal.weight(x) * factor, rule.weight(x), rtol=1e-12, atol=0)
    torch.testing.assert_close(normal.weight(x), 1 / (x + (rule.r / rule.s) / (x + rule.r)), rtol=1e-12, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_s_is_a_learning_rate_factor(momentum):
    """Whole noisy runs coincide: (C, s, r, η, σ) against bound 1 at learning rate ηC/s. Only rounding differs."""
    rule = dpscale.PSASC(C=0.25, s=0.55, r=1e-3)
    normal, factor = rule.normalized()

    def train(scaling, lr):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        data = torch.utils.data.TensorDataset(torch.randn(60, 4).double(), torch.randint(0, 3, (60,)))
        optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
        sampling = dpscale.Poisson(size=60, batch=12)
        plan = dpscale.Plan(scaling=scaling, sampling=sampling, steps=15, noise_multiplier=0.8)
        private = dpscale.privatize(model, optimizer, plan, seed=1)
        for batch in private.batches(data):
            private.step(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    ours, other = train(rule, 0.5), train(normal, 0.5 * factor)
    torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)  # the noise is float32
    assert not torch.allclose(ours, train(normal, 0.5), rtol=1e-2)


@given(s=st.floats(0.05, 0.99), r=small, x=st.floats(1e-6, 1e6))
def test_signal_per_unit_noise_is_never_above_psacs(s, r, x):
    """The paper's 'amplifies noise' inequality: x·w(x)/bound for s < 1 is at most that of s = 1."""
    norm = torch.tensor([x], dtype=torch.float64)

    def signal(rule):
        return (norm * rule.weight(norm) / rule.bound).item()

    assert signal(dpscale.PSASC(C=1.0, s=s, r=r)) <= signal(dpscale.PSAC(C=1.0, r=r)) * (1 + 1e-12)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: dpscale.Clip(C=0), r"'C' parameter of Clip must be a number > 0. Got 0 instead"),
        (lambda: dpscale.Clip(C=-1.0), r"'C' parameter of Clip must be a number > 0. Got -1.0"),
        (lambda: dpscale.AutoS(C=math.inf), r"'C' parameter of AutoS must be a finite number > 0. Got inf"),
        (lambda: dpscale.AutoS(r=0), r"'r' parameter of AutoS must be a finite number > 0. Got 0"),
        (lambda: dpscale.PSAC(C=math.nan), r"'C' parameter of PSAC must be .* Got nan"),
        (lambda: dpscale.PSAC(C="1"), r"'C' parameter of PSAC must be .* Got '1'"),
        (lambda: dpscale.PSASC(s=-0.5), r"'s' parameter of PSASC must be .* Got -0.5"),
        (
            lambda: dpscale.PSASC(s=2.0, r=0.5),
            r"'r' parameter of PSASC must be such that s\*r < 1 .*Got 0.5 instead. Take a smaller r",
        ),
        (lambda: dpscale.AutoS(r=1e-40), r"'r' parameter of AutoS must be at least 1e-12. Got 1e-40"),
        (lambda: dpscale.PSAC(s=0.5), r"'s' parameter of PSAC must be 1. Got 0.5 instead. Use PSASC"),
    ],
)
def test_bad_input_is_named(make, text):
    with pytest.raises(ValueError, match=text):
        make()
