"""Every rule of the engine equals the oracle, over drawn shapes, strides, masks, batch sizes and frozen parameters."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dpscale
from dpscale.engine.reference import per_sample_gradients
from dpscale.engine.rules import RULES

from ..seeding import seeded
from .cases import ARITHMETIC, CASES, SCALINGS, Raw, check_equal, loss_fn, traced, without_tf32

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")
every_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)


def test_every_rule_has_cases():
    assert {type(rule) for rule in RULES} == set(CASES), "a rule of the engine was added without cases to test it"


@every_rule
def test_equals_oracle_in_float64(rule, monkeypatch):
    """And it is the rule itself that ran, not the generic one behind it."""
    ran = []
    forms = type(rule).forms
    monkeypatch.setattr(type(rule), "forms", lambda self, call, g: ran.append(1) or forms(self, call, g))

    @given(case=CASES[type(rule)], scaling=st.sampled_from(SCALINGS), data=st.data())
    def check(case, scaling, data):
        samples = len(case.batch[0])
        mask = torch.tensor(data.draw(st.lists(st.booleans(), min_size=samples, max_size=samples)), dtype=torch.bool)
        out = check_equal(case.model, case.batch, scaling, mask=mask)
        assert out.losses.shape == out.norms.shape == out.weights.shape == (samples,)

    check()
    assert len(ran) > 10


@every_rule
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)], ids=["float32", "bfloat16"])
def test_equals_oracle_in_low_precision(rule, dtype, rtol):
    """The oracle runs in the same type, so activations agree; what is compared is what the engine makes of them."""

    @settings(max_examples=20)
    @given(case=CASES[type(rule)], scaling=st.sampled_from(SCALINGS))
    @without_tf32()
    def check(case, scaling):
        if not len(case.batch[0]):
            return
        model = copy.deepcopy(case.model).to(dtype)
        batch = tuple(t.to(dtype) if t.is_floating_point() else t for t in case.batch)
        out = dpscale.scaled_sum(model, loss_fn, batch, scaling)
        gradients = per_sample_gradients(model, loss_fn, batch)
        norms = torch.stack([g.double().flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
        assert out.norms.dtype == torch.float32
        assert all(g.dtype == torch.float32 for g in out.grads.values())
        torch.testing.assert_close(out.norms.double(), norms, rtol=rtol, atol=rtol * norms.max().item())

    check()


@every_rule
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_one_sample_stays_within_the_bound(rule, dtype):
    """Trap 11: the norm must bound the very gradient that is released, whatever the precision of the model."""

    @settings(max_examples=20)
    @given(case=CASES[type(rule)], scaling=st.sampled_from(SCALINGS))
    def check(case, scaling):
        model = copy.deepcopy(case.model).to(dtype)
        for i in range(len(case.batch[0])):
            one = tuple(t[i : i + 1].to(dtype) if t.is_floating_point() else t[i : i + 1] for t in case.batch)
            out = dpscale.scaled_sum(model, loss_fn, one, scaling)
            released = torch.cat([g.double().flatten() for g in out.grads.values()]).norm().item()
            assert released <= scaling.bound * (1 + 1e-5)

    check()


@pytest.mark.parametrize("name", ARITHMETIC)
@pytest.mark.parametrize("shape", [(1,), (3, 1), (1, 1, 4), (1, 3, 4)], ids=str)
def test_every_operator_equals_oracle(name, shape):
    raw = Raw(ARITHMETIC[name], (2, 1, 4) if name == "wider" else shape)
    raw.p[0].data = torch.linspace(0.5, 2.0, raw.p[0].numel(), dtype=torch.float64).view_as(raw.p[0])
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float64), raw)
    x = torch.randn(5, 3, 4, dtype=torch.float64, generator=seeded(1))
    check_equal(model, (x,), SCALINGS[3])


@pytest.mark.parametrize("operation", [torch.mul, torch.add, lambda x, p: torch.addmm(p, x, x.new_ones(4, 4))])
def test_a_parameter_may_be_a_single_number(operation):
    model, x = Raw(operation, ()), torch.randn(5, 4, dtype=torch.float64)
    out = dpscale.scaled_sum(model, loss_fn, (x,), SCALINGS[3])
    gradients = per_sample_gradients(model, loss_fn, (x,))["p.0"]
    torch.testing.assert_close(out.norms, gradients.abs())
    torch.testing.assert_close(out.grads["p.0"], (out.weights * gradients).sum())


@every_rule
def test_the_rule_can_be_traced(rule):
    """No branch on values: a graph traced on one batch is right for another."""

    @settings(max_examples=8)
    @given(case=CASES[type(rule)])
    def check(case):
        if len(case.batch[0]) < 2:
            return
        names = [n for n, p in case.model.named_parameters() if p.requires_grad]
        run = traced(case.model, loss_fn, case.batch, SCALINGS[3])
        other = tuple(t.flip(0) for t in case.batch)
        expected = dpscale.scaled_sum(case.model, loss_fn, other, SCALINGS[3])
        *grads, norms = run(*other)
        torch.testing.assert_close(norms, expected.norms)
        for n, g in zip(names, grads, strict=True):
            torch.testing.assert_close(g, expected.grads[n])

    check()
