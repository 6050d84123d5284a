"""The compiled step: the same answer, one compilation for a whole run, and a way back where it cannot be had."""

import functools
import logging
import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpscale
from dpscale.engine import Engine, kernels, phases
from dpscale.engine.compile import step as module
from dpscale.engine.compile.inductor import inductor

from ..helpers import SIZE, data, mlp, plan, train, vector
from ..helpers import loss_fn as cross_entropy
from .cases import SCALINGS, loss_fn
from .test_models import Flattened, build


@pytest.mark.parametrize("name", ["tied-language-model", pytest.param("conv-per-frame", marks=pytest.mark.compiled)])
def test_equals_eager(name):
    model, batch = build(name)
    engine, mask = Engine(model, compile=True), torch.tensor([True, False, True, True, True])
    for _ in range(2):
        for p in model.parameters():
            p.data.mul_(0.9)  # weights are read where they are, at every call
        ours = engine.scaled_sum(loss_fn, batch, SCALINGS[3], mask)
        eager = dpscale.scaled_sum(model, loss_fn, batch, SCALINGS[3], mask)
        assert [c is not None for c in engine._compiled._known.values()] == [True], "it ran eagerly"
        torch.testing.assert_close(ours.norms, eager.norms, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(ours.losses, eager.losses, rtol=1e-9, atol=1e-9)
        for n, g in eager.grads.items():
            torch.testing.assert_close(ours.grads[n], g, rtol=1e-9, atol=1e-9)


def run(**options):
    model = mlp()
    return dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(), seed=0, **options)


@pytest.mark.compiled
@pytest.mark.parametrize("micro_batch", [None, 7])
def test_training_equals_eager(micro_batch):
    compiled = train(run(compile=True, micro_batch=micro_batch))
    torch.testing.assert_close(compiled, train(run(compile=False)), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("micro_batch", [None, 7])
def test_sums_outlast_the_buffers_that_they_come_in(micro_batch):
    """As CUDA graphs do it: every run, of whatever size, writes its sums to the same place."""

    def backend(graph, inputs):
        buffers = [t.clone() for t in graph(*inputs)[:4]]

        def replay(*inputs):
            *sums, told = graph(*inputs)
            torch._foreach_copy_(buffers, sums)
            return [*buffers, told]

        return replay

    private = run(compile=True, micro_batch=micro_batch)
    private._engine = Engine(private.model, compile=backend, any_size=9)
    torch.testing.assert_close(train(private), train(run(compile=False)), rtol=1e-5, atol=1e-6)
    assert all(known.step for known in private._engine._compiled._known.values()), "it ran eagerly"


@pytest.mark.parametrize("compile", [lambda graph, inputs: graph, pytest.param(True, marks=pytest.mark.compiled)],
                         ids=["traced", "compiled"])  # fmt: skip
def test_a_sample_that_is_not_finite_takes_the_way_back(compile):
    x, y = (t.clone() for t in data().tensors)
    x[3] = torch.nan
    model, mask = mlp(), torch.ones(SIZE, dtype=torch.bool)
    ours = Engine(model, compile=compile).scaled_sum(cross_entropy, (x, y), dpscale.Clip(C=0.5), mask)
    eager = dpscale.scaled_sum(model, cross_entropy, (x, y), dpscale.Clip(C=0.5), mask)
    assert ours.ignored == 1 and ours.weights[3] == 0
    for n, g in eager.grads.items():
        torch.testing.assert_close(ours.grads[n], g)


def test_another_length_is_compiled_anew():
    """A layout found on one position does not fit seven: the model is looked at again, not refused."""
    model = Flattened(time_first=True).double()
    engine, mask = Engine(model, compile=lambda graph, inputs: graph), torch.ones(5, dtype=torch.bool)
    for length in (1, 7):
        batch = (torch.randn(5, length, 4).double(),)
        ours = engine.scaled_sum(loss_fn, batch, SCALINGS[0], mask)
        eager = dpscale.scaled_sum(model, loss_fn, batch, SCALINGS[0])
        torch.testing.assert_close(ours.norms, eager.norms)
    assert [c is not None for c in engine._compiled._known.values()] == [True, True]


def test_the_cold_start_is_told_and_logged(caplog):
    model, batch = build("flattened")
    engine, mask, heard = Engine(model, compile=lambda graph, inputs: graph), torch.ones(5, dtype=torch.bool), []
    with caplog.at_level(logging.INFO, logger="dpscale"), phases.listening(heard.append):
        engine.scaled_sum(loss_fn, batch, SCALINGS[0], mask)
    expected = ["checking", "tracing", "compiling", *["recording"] * mask.is_cuda]
    assert heard == [*expected, None]
    (line,) = [r.getMessage() for r in caplog.records]
    s = r"\d+\.\d s"
    each = ", ".join(f"{name} {s}" for name in expected)
    assert re.fullmatch(rf"dpscale: ready after {s} \({each}\)", line)


def test_what_cannot_be_compiled_runs_eagerly_and_says_why(monkeypatch, caplog):
    def refuse(*_, **__):
        raise RuntimeError("no compiler on this machine\nand more")

    monkeypatch.setattr(module, "traced", refuse)
    with caplog.at_level(logging.WARNING, logger="dpscale"):
        compiled = train(run(compile=True))
    assert [r.getMessage() for r in caplog.records] == [
        "dpscale: runs eagerly, not compiled: no compiler on this machine"
    ]
    torch.testing.assert_close(compiled, train(run(compile=False)))


def test_a_coupled_model_is_refused_here_too():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    before = vector(model)
    private = dpscale.privatize(model, torch.optim.SGD(model.parameters(), lr=0.1), plan(), seed=0, compile=True)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled at batch_norm"):
        train(private)
    assert torch.equal(vector(model), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernels are CUDA's")
@pytest.mark.parametrize("shape", [(3, 40, 33, 17), (2, 130, 64, 50), (1, 2, 5, 300)])
def test_kernels_agree_with_their_twins(shape):
    samples, t, i, o = shape
    a = torch.randn(samples, t, i, device="cuda").bfloat16()
    g = torch.randn(samples, o, t, device="cuda").bfloat16().mT
    ours, twin = kernels.gram_norm2(a, g), kernels.gram_norm2_plain(a.double(), g.double())
    for x, y in zip(ours, twin, strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


def test_twin_is_the_gram_identity():
    a, g = torch.randn(3, 5, 4).double(), torch.randn(3, 5, 6).double()
    squares, sizes = kernels.gram_norm2_plain(a, g)
    torch.testing.assert_close(squares, torch.einsum("bto,bti->boi", g, a).flatten(1).square().sum(1))
    torch.testing.assert_close(sizes, a.norm(dim=2) * g.norm(dim=2))


def through_graph(model, batch, loss_fn, fast=None):
    fast = fast or Engine(model, compile=lambda graph, _: graph).scaled_sum
    mask = torch.ones(len(batch[0]), dtype=torch.bool)
    return fast, fast(loss_fn, batch, dpscale.Clip(C=1e6), mask)


def test_what_is_no_tensor_in_a_batch_is_not_taken_for_constant():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)

    def loss_fn(model, batch):
        return batch[1] * model(batch[0])[:, 0]

    fast, once = through_graph(model, (x, 1.0), loss_fn)
    _, thrice = through_graph(model, (x, 3.0), loss_fn, fast)
    torch.testing.assert_close(thrice.norms, 3 * once.norms)


def test_a_batch_of_another_layout_is_the_same_batch():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)

    def loss_fn(model, batch):
        return model(batch[0])[:, 0] ** 2

    fast, once = through_graph(model, (x,), loss_fn)
    _, again = through_graph(model, (x.t().contiguous().t(),), loss_fn, fast)
    torch.testing.assert_close(again.norms, once.norms)


def test_parameters_that_moved_are_found_again():
    model, x = nn.Linear(3, 1), torch.randn(4, 3)

    def loss_fn(model, batch):
        return model(batch[0])[:, 0] ** 2

    fast, once = through_graph(model, (x,), loss_fn)
    model.load_state_dict({n: 2 * p.detach() for n, p in model.named_parameters()}, assign=True)
    _, twice = through_graph(model, (x,), loss_fn, fast)
    torch.testing.assert_close(twice.norms, 2 * once.norms)


def counted(model):
    """A fast path, and a list that grows with every compilation."""
    made = []

    def backend(graph, inputs):
        made.append(graph)
        return graph

    return Engine(model, compile=backend).scaled_sum, made


def squares(model, batch):
    return model(batch[0])[:, 0] ** 2


def test_a_new_lambda_at_every_step_is_compiled_once():
    model, x, mask = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, made = counted(model)
    norms = [fast(lambda m, b: squares(m, b), (x,), dpscale.Clip(C=1.0), mask).norms for _ in range(20)]
    assert len(made) == 1
    torch.testing.assert_close(norms[-1], norms[0])


def test_a_number_that_changed_is_not_the_one_that_was_compiled():
    model, x, mask = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, made = counted(model)
    factor = 1.0

    def loss_fn(model, batch):
        return factor * squares(model, batch)

    once = fast(loss_fn, (x,), dpscale.Clip(C=1.0), mask)
    factor = 3.0
    thrice = fast(loss_fn, (x,), dpscale.Clip(C=1.0), mask)
    torch.testing.assert_close(thrice.norms, 3 * once.norms)
    assert len(made) == 2


def test_a_helper_that_has_changed_is_looked_at_again():
    """A notebook's cells, run again after the helper was edited: the function that calls it has the same code."""
    model, x, mask, cells = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, dtype=torch.bool), {}
    fast, made = counted(model)
    before = "def helper(losses): return losses"
    for helper in (before, before, "def helper(losses): return 3 * losses"):
        exec(f"{helper}\nloss_fn = lambda model, batch: helper(model(batch[0])[:, 0] ** 2)", cells)
        found = fast(cells["loss_fn"], (x,), dpscale.Clip(C=1.0), mask)
        eager = dpscale.scaled_sum(model, cells["loss_fn"], (x,), dpscale.Clip(C=1.0), mask)
        torch.testing.assert_close(found.norms, eager.norms)
    assert len(made) == 2
    exec("def helper(losses): return losses + losses.mean()", cells)
    for compute in (fast, functools.partial(dpscale.scaled_sum, model)):
        with pytest.raises(dpscale.UnsupportedModel, match="coupled at mean"):
            compute(cells["loss_fn"], (x,), dpscale.Clip(C=1.0), mask)


@pytest.mark.parametrize("share", [1, 0.5])
def test_a_number_that_switches_a_coupling_on_is_looked_at_again(share):
    model, batch, rule = nn.Linear(3, 1), (torch.randn(4, 3),), dpscale.Clip(C=1.0)

    def made(share):
        def loss_fn(model, batch):
            losses = squares(model, batch)
            return losses + share * losses.mean() if share else losses

        return loss_fn

    dpscale.scaled_sum(model, made(type(share)(0)), batch, rule)
    with pytest.raises(dpscale.UnsupportedModel, match="coupled at mean"):
        dpscale.scaled_sum(model, made(share), batch, rule)


def test_a_module_that_was_put_in_is_looked_at():
    """It has no parameters, so nothing that is met tells of it."""

    class Centered(nn.Module):
        def forward(self, x):
            return x - x.mean(0)

    model, batch = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)), (torch.randn(4, 3),)
    fast, rule = counted(model)[0], dpscale.Clip(C=1.0)
    for put in (nn.ReLU(), nn.Tanh()):
        model[1] = put
        _, found = through_graph(model, batch, squares, fast)
        torch.testing.assert_close(found.losses, squares(model, batch).detach())
    model[1] = Centered()
    for compute in (fast, functools.partial(dpscale.scaled_sum, model)):
        with pytest.raises(dpscale.UnsupportedModel, match="coupled at mean"):
            compute(squares, batch, rule, torch.ones(4, dtype=torch.bool))


class Tempered(nn.Module):
    """Reads a number, a flag and a word of its own; counts its calls, and keeps what it saw last."""

    def __init__(self):
        super().__init__()
        self.layer, self.other = nn.Linear(3, 1), nn.Linear(3, 1)
        self.temperature, self.other_one, self.mode, self.calls, self.cache = 1.0, False, "plain", 0, None

    def forward(self, x):
        self.calls += 1
        x = x - x.mean(0) if self.mode == "centred" else x
        return (self.other if self.other_one else self.layer)(x) / self.temperature


@pytest.mark.parametrize("change", [{"temperature": 5.0}, {"other_one": True}, {"mode": "sharp"}, {"cache": 3}])
def test_an_attribute_that_changed_is_not_the_one_that_was_compiled(change):
    model, batch, mask = Tempered(), (torch.randn(4, 3),), torch.ones(4, dtype=torch.bool)
    fast, made = counted(model)
    for changes in ({}, {}, change, {}):
        for name, value in changes.items():
            setattr(model, name, value)
        found = fast(squares, batch, dpscale.Clip(C=1.0), mask)
        expected = dpscale.scaled_sum(model, squares, batch, dpscale.Clip(C=1.0), mask)
        torch.testing.assert_close(found.losses, expected.losses)
        assert all(torch.equal(found.grads[n], g) for n, g in expected.grads.items())
    assert len(made) == 2  # its own counter is none of them
    model.cache = torch.ones(2)  # no number any more, and not compared
    fast(squares, batch, dpscale.Clip(C=1.0), mask)


def test_numbers_in_tuples_and_lists_are_noticed_too():
    model = nn.Sequential(nn.Conv1d(1, 2, 3, padding=1), nn.Flatten(), nn.Linear(10, 1))
    batch, mask = (torch.randn(4, 1, 5),), torch.ones(4, dtype=torch.bool)
    fast, _ = counted(model)
    for dilation in (1, 2, 1):
        model[0].dilation, model[0].padding = (dilation,), (dilation,)
        found = fast(squares, batch, dpscale.Clip(C=1.0), mask)
        expected = dpscale.scaled_sum(model, squares, batch, dpscale.Clip(C=1.0), mask)
        torch.testing.assert_close(found.norms, expected.norms)
        torch.testing.assert_close(found.losses, squares(model, batch).detach())


@pytest.mark.parametrize("centred", ["centred", np.str_("centred")])
def test_an_attribute_that_couples_samples_is_looked_at_again(centred):
    model, batch, mask = Tempered(), (torch.randn(4, 3),), torch.ones(4, dtype=torch.bool)
    fast, _ = counted(model)
    for compute in (fast, functools.partial(dpscale.scaled_sum, model)):
        model.mode = "plain"
        compute(squares, batch, dpscale.Clip(C=1.0), mask)
        model.mode = centred
        with pytest.raises(dpscale.UnsupportedModel, match="coupled at mean"):
            compute(squares, batch, dpscale.Clip(C=1.0), mask)


RULED = [
    (dpscale.Clip(C=0.3), dpscale.Clip(C=2.0)),
    (dpscale.Clip(C=0.3), dpscale.Clip(C=float("inf"))),
    (dpscale.AutoS(C=1.0, r=0.1), dpscale.AutoS(C=0.2, r=1e-3)),
    (dpscale.PSASC(C=1.0, s=0.4, r=0.1), dpscale.PSAC(C=0.2, r=1e-3)),
]


@pytest.mark.parametrize("rules", RULED, ids=lambda pair: type(pair[1]).__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_constants_of_a_rule_are_no_part_of_what_is_compiled(rules, dtype):
    """So a search over C, s and r compiles once: the compiler's cache knows the graph."""
    model, x = nn.Linear(3, 1, dtype=dtype), 3 * torch.randn(6, 3, dtype=dtype)
    mask = torch.ones(6, dtype=torch.bool)
    fast, made = counted(model)
    for rule in rules:
        ours, eager = fast(squares, (x,), rule, mask), dpscale.scaled_sum(model, squares, (x,), rule, mask)
        torch.testing.assert_close(ours.weights, eager.weights, rtol=4 * torch.finfo(ours.weights.dtype).eps, atol=0)
        torch.testing.assert_close(ours.grads, eager.grads)
    assert len(made) == 2 and made[0].code == made[1].code
    assert module.formula_of(rules[0]) == module.formula_of(rules[1])


def test_a_rule_that_is_not_known_may_branch_on_its_constants():
    @dataclass(frozen=True, kw_only=True)
    class Either(dpscale.Clip):
        def _weight(self, x):
            return super()._weight(x) if self.C > 1 else torch.zeros_like(x)

    model, x, mask = nn.Linear(3, 1), torch.randn(6, 3), torch.ones(6, dtype=torch.bool)
    fast, made = counted(model)
    large, small = (fast(squares, (x,), Either(C=C), mask) for C in (2.0, 0.5))
    assert len(made) == 2 and (large.weights > 0).all() and (small.weights == 0).all()
    assert module.formula_of(Either(C=2.0)) != module.formula_of(Either(C=0.5))


def test_a_tensor_that_changes_in_place_is_followed():
    model, x, mask = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, made = counted(model)
    factor = torch.ones(())

    def loss_fn(model, batch):
        return factor * squares(model, batch)

    once = fast(loss_fn, (x,), dpscale.Clip(C=1.0), mask)
    factor.fill_(3.0)
    thrice = fast(loss_fn, (x,), dpscale.Clip(C=1.0), mask)
    torch.testing.assert_close(thrice.norms, 3 * once.norms)
    assert len(made) == 1


@pytest.mark.parametrize("what", ["loss_fn", "samples", "batches", "attributes"])
def test_after_so_many_compilations_it_runs_eagerly_and_says_why(caplog, what):
    model, rule = nn.Sequential(nn.AdaptiveAvgPool1d(3), Tempered()), dpscale.Clip(C=1.0)
    fast, made = counted(model)
    caplog.set_level(logging.WARNING, logger="dpscale")
    for k in range(module.MOST + 3):
        x = torch.randn(4 + k * (what == "batches"), 3 + k * (what == "samples"))
        factor, model[1].temperature = 1.0 + k * (what == "loss_fn"), 1.0 + k * (what == "attributes")

        def loss_fn(model, batch, factor=factor):
            return factor * squares(model, batch)

        mask = torch.ones(len(x), dtype=torch.bool)
        out = fast(loss_fn, (x,), rule, mask)
        expected = dpscale.scaled_sum(model, loss_fn, (x,), rule, mask)
        torch.testing.assert_close(out.norms, expected.norms)
    assert len(made) == module.MOST
    (said,) = caplog.messages
    reasons = {"loss_fn": "reads numbers that change", "samples": "Pad samples", "batches": "ever new sizes"}
    assert "eagerly" in said and (reasons | {"attributes": "Make it a buffer"})[what] in said


def test_two_draws_are_two_draws():
    """Merging equal operations must leave random ones apart: torch.normal of one mean, drawn twice."""

    def difference(x):
        return torch.normal(x, 1.0) - torch.normal(x, 1.0)

    x = torch.zeros(50)
    graph = make_fx(difference, tracing_mode="fake")(x)
    with torch._inductor.config.patch(force_disable_caches=True):
        assert inductor(graph, [x])(x)[0].abs().max() > 0.1


class Leaves(nn.Module):
    """A linear layer that leaves something behind in every forward."""

    def __init__(self, what):
        super().__init__()
        self.linear, self.what, self.heard, self.named = nn.Linear(3, 1), what, [], {}
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        out = self.linear(x)
        if self.what == "buffer":
            self.steps = self.steps + 1
        elif self.what == "attribute":
            self.last = out
        elif self.what == "list":
            self.heard.append(out)
        elif self.what == "dictionary":
            self.named["last"] = out
        return out


def test_a_forward_that_leaves_tensors_in_the_model_runs_eagerly(caplog):
    """Traced, they would be tensors without values, and a compiled step would leave none."""
    model, x, mask = Leaves("buffer"), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, _ = counted(model)
    caplog.set_level(logging.WARNING, logger="dpscale")
    for _ in range(3):
        fast(squares, (x,), dpscale.Clip(C=1.0), mask)
    (said,) = caplog.messages
    assert "runs eagerly" in said and "puts a tensor into the model" in said
    assert type(model.steps) is torch.Tensor and model.steps == 3


@pytest.mark.parametrize(("what", "name"), [("attribute", "last"), ("list", "heard"), ("dictionary", "named")])
def test_a_forward_that_leaves_its_samples_in_the_model_is_refused(what, name):
    model = Leaves(what)
    with pytest.raises(dpscale.UnsupportedModel, match=rf"The forward sets ['\"]{name}.*from what is in the samples"):
        counted(model)[0](squares, (torch.randn(4, 3),), dpscale.Clip(C=1.0))
    assert not hasattr(model, "last") and not model.heard and not model.named


def test_what_an_interrupted_trace_left_is_taken_out_too(caplog):
    class Fails(Leaves):
        def forward(self, x):
            out = super().forward(x)
            if torch._guards.detect_fake_mode((out,)) is not None:
                self.unheard_of = out
                raise ValueError("not on fake tensors")
            return out

    model, x, mask = Fails("buffer"), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, _ = counted(model)
    caplog.set_level(logging.WARNING, logger="dpscale")
    fast(squares, (x,), dpscale.Clip(C=1.0), mask)
    assert "not on fake tensors" in caplog.text and type(model.steps) is torch.Tensor and model.steps == 1
    assert not hasattr(model, "unheard_of")


def test_buffers_and_frozen_parameters_that_were_replaced_are_found_again():
    model, x, mask = nn.Linear(3, 1, bias=False), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    model.register_buffer("scale", torch.ones(()))
    model.shift = nn.Parameter(torch.zeros(()), requires_grad=False)

    def loss_fn(model, batch):
        return (model(batch[0])[:, 0] * model.scale + model.shift) ** 2

    fast, made = counted(model)

    def norms():
        found = fast(loss_fn, (x,), dpscale.Clip(C=1.0), mask).norms
        torch.testing.assert_close(found, dpscale.scaled_sum(model, loss_fn, (x,), dpscale.Clip(C=1.0), mask).norms)

    norms()
    model.scale = torch.tensor(3.0)
    norms()
    model.shift = nn.Parameter(torch.tensor(1.0), requires_grad=False)
    norms()
    model.shift.data = torch.tensor(2.0)
    norms()
    model.scale.fill_(0.5)  # in place: nothing to do
    norms()
    assert len(made) == 4


def test_a_model_whose_buffers_are_replaced_at_every_step_is_not_compiled_for_ever(caplog):
    model, x, mask = nn.Linear(3, 1), torch.randn(4, 3), torch.ones(4, dtype=torch.bool)
    fast, made = counted(model)
    caplog.set_level(logging.WARNING, logger="dpscale")
    for k in range(module.MOST + 3):
        model.register_buffer("scale", torch.tensor(float(k)))
        fast(squares, (x,), dpscale.Clip(C=1.0), mask)
    assert len(made) == module.MOST and "eagerly" in caplog.text
