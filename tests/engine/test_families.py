"""Every family of models × precision × scaling rule × way of running, against the oracle."""

import contextlib
import copy
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils._pytree import tree_leaves, tree_map

import dpscale
import dpscale.engine.engine as engine_module
from dpscale.engine import Engine
from dpscale.engine.compile.inductor import inductor
from dpscale.engine.engine import engine_of
from dpscale.engine.reference import per_sample_gradients
from dpscale.scaling import Scaling

from ..seeding import seeded
from .cases import SCALINGS, check_sample_by_sample, loss_fn, without_tf32
from .families import (
    FAMILIES,
    Family,
    Of,
    attention,
    bert,
    checkpointed,
    classes,
    classifier_loss,
    encoder_layer,
    floats,
    gpt2,
    language_loss,
    lora,
    make,
    recurrent,
    text,
)


class Whole:
    """The compiled path: the whole step as one graph, run on other data than it was traced on, or twice as many."""

    def __init__(self, model, backend, any_size=0):
        self.engine, self.any_size = Engine(model, compile=backend, any_size=any_size), any_size

    def __call__(self, loss_fn, batch, rule, mask=None):
        def other(t):
            return torch.cat([t.flip(0), t]) if self.any_size else t.flip(0)

        with pytest.MonkeyPatch.context() as patch:
            patch.delattr(Engine, "_weighed")  # the eager way back
            if mask is None:
                self.engine.scaled_sum(loss_fn, tree_map(other, batch), rule)
            return self.engine.scaled_sum(loss_fn, batch, rule, mask, keep=True)

    @property
    def once(self):
        """Whether there is one graph for all batches but those of a sample or two, which may be cases of their own."""
        return all(key.rows in (None, 1, 2) for key in self.engine._compiled._known)


PRECISIONS = {
    "float64": (torch.float64, 1e-9),
    "float32": (torch.float32, 1e-4),
    "bf16-autocast": (torch.float32, 5e-2),
}

every_family = pytest.mark.parametrize("family", FAMILIES)
every_precision = pytest.mark.parametrize("precision", PRECISIONS)
compiler = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
"""What torch's compiler warns of in its own code."""

BY_SIZE = {"encoder-in-eval-mode", "lora-llama", "weight-norm", "orthogonal", "spectral-norm"}
"""Families that have an operation which needs to know the size of a batch: they are traced for each size."""

LIKE_OTHERS = {"vit", "lora-llama"}
"""Families whose graphs are made of those of others. They are traced by make test-compiled."""

TRACED = [
    pytest.param(family, "float32", marks=[pytest.mark.compiled] if family in LIKE_OTHERS else [])
    for family in FAMILIES
]
TRACED += [(family, "bf16-autocast") for family in ("rnn", "attention", "fixed-batch-norm")]
"""What is traced in every run of the suite; at other precisions the graph is the same but for its types, and
`test_compiled_matrix` traces and compiles all of it. With one rule: it is the last few operations of every graph."""

COMPILED = [("fixed-batch-norm", "float32"), ("attention", "bf16-autocast")]
"""What every run of the suite compiles, beside one family with every rule: convolutions, and products in 16 bits."""


@cache
@without_tf32()
def prepared(family, precision):
    """(model, loss, batch of four, its per-sample gradients by the oracle), made once for all rules and ways."""
    dtype, _ = PRECISIONS[precision]
    what = FAMILIES[family]

    def loss(model, batch):
        auto = (
            torch.autocast(torch.get_default_device().type, torch.bfloat16)
            if "autocast" in precision
            else contextlib.nullcontext()
        )
        with auto:
            return what.loss(model, batch).to(dtype)

    model = make(what, dtype)
    batch = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, what.batch(4))
    return model, loss, batch, per_sample_gradients(model, loss, batch)


def released(out):
    return torch.cat([g.double().flatten() for g in out.grads.values()]).norm().item()


@without_tf32()
def check_sums(family, precision, rule, run, rounding=0.0):
    """Norms and sums of ``run(loss_fn, batch)`` are the oracle's.

    Trap 16: parameters that a library does not understand must not silently stay as they are.
    """
    (dtype, rtol), (model, loss, batch, gradients) = PRECISIONS[precision], prepared(family, precision)
    rtol = max(rtol, rounding)
    norms = torch.stack([g.double().flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    assert norms.min() > 1e-3, "the example has no gradient to speak of"
    out = run(loss, batch)
    assert set(out.grads) == {n for n, p in model.named_parameters() if p.requires_grad}
    assert {t.dtype for t in (out.norms, *out.grads.values())} == {dtype}
    torch.testing.assert_close(out.norms.double(), norms, rtol=rtol, atol=rtol * norms.max().item())
    weights = rule.weight(norms)
    for name, g in gradients.items():
        expected, told = torch.einsum("b,b...->...", weights, g.double()), f"{name}, {rule}"
        torch.testing.assert_close(out.grads[name].double(), expected, rtol=rtol, atol=rtol * rule.bound, msg=told)
        assert bool(out.grads[name].any()) == bool(g.any()), told


def check_bound(family, precision, rule, run, row=0):
    """A sample that is alone in its batch releases the bound at most."""
    _, loss, batch, _ = prepared(family, precision)
    assert released(run(loss, tree_map(lambda t: t[row : row + 1], batch))) <= rule.bound * (1 + 1e-5), rule


def check_bound_by_mask(family, precision, rule, run):
    """A sample that counts alone does, in the same compiled step."""
    _, loss, batch, _ = prepared(family, precision)
    alone = run(loss, batch, mask=torch.arange(4) == 1)
    assert 0 < released(alone) <= rule.bound * (1 + 1e-5), rule


@every_family
@every_precision
def test_equals_oracle_and_stays_within_the_bound(family, precision):
    run = partial(dpscale.scaled_sum, prepared(family, precision)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(engine_module, "sum_by_sample")  # the way for models that cannot be followed
        for row, rule in enumerate(SCALINGS):
            check_sums(family, precision, rule, partial(run, rule=rule))
            check_bound(family, precision, rule, partial(run, rule=rule), row)


@pytest.mark.parametrize("family, precision", TRACED)
def test_traced_equals_oracle_and_stays_within_the_bound(family, precision):
    """Up to the compiler: the graph as it is traced."""
    whole = Whole(prepared(family, precision)[0], lambda graph, inputs: graph, any_size=9)
    run, rule = partial(whole, rule=SCALINGS[3]), SCALINGS[3]
    check_sums(family, precision, rule, run)
    check_bound_by_mask(family, precision, rule, run)
    assert whole.once == (family not in BY_SIZE)
    if family in ("rnn", "attention", "fixed-batch-norm"):  # the others are traced anew for a single sample, too
        check_bound(family, precision, rule, run)


@compiler
@pytest.mark.parametrize("family, precision", COMPILED)
def test_compiled_equals_oracle_and_stays_within_the_bound(family, precision):
    run, rule = Whole(prepared(family, precision)[0], inductor), SCALINGS[3]
    check_sums(family, precision, rule, partial(run, rule=rule))
    check_bound_by_mask(family, precision, rule, partial(run, rule=rule))


@compiler
def test_every_rule_compiled_equals_oracle_and_stays_within_the_bound():
    check_every_rule_compiled("spectral-norm", "float32")


def check_every_rule_compiled(family, precision):
    """One compilation for four samples and one for a single sample; both hold all four rules, which are then chosen in
    turn. That a rule alone compiles to the same is tested above."""
    rules, whole = OneOf(), Whole(prepared(family, precision)[0], inductor)
    rounding = 1e-5 if FAMILIES[family].single else 0.0  # the compiler rounds float32 otherwise than the oracle does
    for rule in SCALINGS:
        rules.choose(rule)
        check_sums(family, precision, rule, partial(whole, rule=rules), rounding)
        for row in range(2):
            check_bound(family, precision, rule, partial(whole, rule=rules), row)
    assert len(whole.engine._compiled._known) == 2


class OneOf(Scaling):
    """All four rules in one graph. Which of them counts is a tensor that the graph reads."""

    def __init__(self):
        object.__setattr__(self, "chosen", torch.zeros(len(SCALINGS), 1, dtype=torch.bool))

    def choose(self, rule):
        self.chosen.copy_(torch.tensor([[r is rule] for r in SCALINGS]))

    def weight(self, norms):
        return torch.stack([rule.weight(norms) for rule in SCALINGS]).where(self.chosen, 0.0).sum(0)

    _weight = peak_norm = peak_weight = None


@pytest.mark.compiled
@compiler
@every_family
@every_precision
def test_compiled_matrix(family, precision):
    """Every family and precision through the compiler, with every rule."""
    check_every_rule_compiled(family, precision)


# Recurrent networks


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_layers": 3, "bidirectional": True},
        {"num_layers": 2, "bias": False, "time_first": True, "last": True},
        {"bidirectional": True, "last": True},
    ],
    ids=str,
)
def test_recurrent_networks_equal_the_oracle(kind, options):
    check(Family(lambda: recurrent(kind, **options), floats(5, 3)))


@pytest.mark.filterwarnings("ignore:LSTM with projections")
def test_lstm_with_a_projection():
    check(Family(lambda: recurrent(nn.LSTM, proj_size=2, num_layers=2, bidirectional=True), floats(5, 3)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_given_first_state_may_depend_on_data_and_on_parameters(kind):
    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.first = kind(3, 4, batch_first=True), nn.Parameter(torch.zeros(1, 1, 4))
            self.start = nn.Linear(3, 4)

        def forward(self, x):
            h, c = self.start(x[:, 0]).unsqueeze(0), self.first.expand(-1, len(x), -1)
            return self.net(x, (h, c) if kind is nn.LSTM else h + c)[0]

    check(Family(Started, floats(5, 3)))


@pytest.mark.parametrize("family", ["lstm", "gru", "rnn", "cells"])
def test_recurrent_weights_go_by_the_rule_of_linear(family):
    """Neither the generic rule, nor copies of the default state for each sample."""
    model, loss, batch, _ = prepared(family, "float64")
    dpscale.scaled_sum(model, loss, batch, SCALINGS[0])
    sites = [site for calls in engine_of(model).sites._exact.values() for site in calls.values()]
    assert {(s.role, type(s.rule).__name__) for s in sites if s.role != "plain"} == {("rows", "Linear")}


def test_packed_sequences_run_sample_by_sample():
    def run(self, x):
        lengths = 3 + (x[:, 0, 0] > 0).long()
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return nn.utils.rnn.pad_packed_sequence(self.net(packed)[0], batch_first=True, total_length=5)[0]

    model = Of(run, net=nn.LSTM(3, 4, batch_first=True)).double()
    check_sample_by_sample(model, floats(5, 3)(4), SCALINGS[0], why="")


def test_the_fast_path_of_attention_in_eval_mode_is_never_taken(monkeypatch):
    """It hides the weights in one operation of C++. Neither the tape nor any run of a look may go there."""

    def fast(*args):
        raise AssertionError("the fast path was taken")

    for name in ("_transformer_encoder_layer_fwd", "_native_multi_head_attention"):
        monkeypatch.setattr(torch, name, fast)
    for frozen in (False, True):  # with frozen weights nothing but the mode keeps torch from it
        model = make(Family(lambda: nn.Sequential(encoder_layer(), nn.Linear(4, 2)), floats(5, 4), evaluation=True))
        model[0].requires_grad_(not frozen)
        dpscale.scaled_sum(model, loss_fn, floats(5, 4)(4), SCALINGS[0])
    with pytest.raises(AssertionError), torch.no_grad():
        model(floats(5, 4)(4)[0])


# What a look is remembered for


def check_norms(model, batch, loss=loss_fn):
    gradients = per_sample_gradients(copy.deepcopy(model), loss, batch)  # it exchanges weights, and LSTMs notice
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    out = dpscale.scaled_sum(model, loss, batch, SCALINGS[0])
    torch.testing.assert_close(out.norms, norms, rtol=1e-9, atol=1e-9 * norms.max().item())
    assert not engine_of(model)._obstacles


@pytest.mark.parametrize("family, shape", [("lstm", 3), ("encoder", 4)])
def test_other_lengths_and_batch_sizes_are_followed(family, shape):
    """The operations of a recurrent network depend on the length. Of batch sizes, only record ones are looked at."""
    model = make(FAMILIES[family])
    schedule = engine_of(model)._schedule
    for length in (5, 7, 5, 3):
        check_norms(model, floats(length, shape)(4))
    looks, sums = schedule.looks, schedule._sums
    for samples in (1, 9, 2, 7):
        check_norms(model, floats(5, shape)(samples))
    # Three lengths; then 1 and 9 rows and the eighth sum, and at most one new extreme of the values.
    assert sums == 4 and looks == 3 and looks + 3 <= schedule.looks <= looks + 4


@pytest.mark.parametrize("lengths", [(4, 8), (8, 4), (1, 8)])
def test_a_forward_that_puts_long_sequences_time_first(lengths):
    """The same operations on the same number of rows, which are samples' at one length and positions' at another."""

    def run(self, x):
        if x.shape[1] < 8:
            return self.b(torch.tanh(self.a(x)))
        return self.b(torch.tanh(self.a(x.transpose(0, 1)))).transpose(0, 1)

    model = make(Family(lambda: Of(run, a=nn.Linear(4, 5), b=nn.Linear(5, 3)), floats(4)))
    for length in lengths:
        check_norms(model, floats(length, 4)(8))


def test_coupling_of_tokens_that_begins_with_larger_batches():
    """Three rows do not show it: the whole batch is looked at too."""

    def run(self, x):
        h = self.table(x)
        return self.head(h - h.mean(0) if len(x) > 3 else h - h.mean(1, keepdim=True))

    model = make(Family(lambda: Of(run, table=nn.Embedding(9, 4), head=nn.Linear(4, 2)), text))
    tokens = torch.randint(0, 9, (8, 5), generator=seeded())
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(model, loss_fn, (tokens,), SCALINGS[0])


class Prompts(nn.Module):
    """Before each layer a prompt, made from parameters alone, is repeated for each sample; two are used twice."""

    def __init__(self, depth):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(depth))
        self.prompts = nn.ParameterList(torch.randn(2, 4) for _ in range(depth))
        self.shift, self.ran = nn.Parameter(torch.randn(4)), 0

    def forward(self, x):
        self.ran += 1
        for layer, prompt in zip(self.layers, self.prompts, strict=True):
            own = torch.tanh(prompt * 2).expand(len(x), -1, -1)
            own = torch.softmax(own + 0.1, -1).add(self.shift)  # of parameters alone, unless the expansion is known
            late = self.shift.expand(len(x), 1, -1).mul(0.5)
            x = torch.tanh(layer(torch.cat([own, late, x], 1)))
        return x


def test_parameters_repeated_for_each_sample_are_found_at_once():
    runs = {}
    for depth in (1, 4):
        model = make(Family(lambda depth=depth: Prompts(depth), floats(3, 4)))
        dpscale.scaled_sum(model, loss_fn, floats(3, 4)(4), SCALINGS[0])
        runs[depth] = model.ran
        check_norms(model, floats(3, 4)(4))
    assert runs[1] == runs[4]


# What draws random numbers, or keeps state, cannot be compared sample by sample: compare with the whole batch's losses


def check(family, seed=7):
    """The engine against autograd on each loss of one batched forward: the same random numbers and buffers."""
    model, batch, rule = make(family), family.batch(4), SCALINGS[3]
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    state = [b.clone() for b in model.buffers()]

    def again():
        torch.manual_seed(seed)
        for b, old in zip(model.buffers(), state, strict=True):
            b.data.copy_(old)

    again()
    losses = family.loss(model, batch)
    each = [torch.autograd.grad(v, list(parameters.values()), retain_graph=True, allow_unused=True) for v in losses]
    rows = [
        [torch.zeros_like(p) if g is None else g for p, g in zip(parameters.values(), gs, strict=True)] for gs in each
    ]
    gradients = {n: torch.stack([r[k] for r in rows]) for k, n in enumerate(parameters)}
    norms = torch.stack([g.flatten(1).square().sum(1) for g in gradients.values()]).sum(0).sqrt()
    again()
    out = dpscale.scaled_sum(model, family.loss, batch, rule)
    torch.testing.assert_close(out.losses, losses.detach(), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(out.norms, norms, rtol=1e-9, atol=1e-9 * norms.max().item())
    for name, g in gradients.items():
        expected = torch.einsum("b,b...->...", rule.weight(norms), g)
        torch.testing.assert_close(out.grads[name], expected, rtol=1e-9, atol=1e-9, msg=name)


DROPPING = {
    "lstm": Family(lambda: recurrent(nn.LSTM, num_layers=3, dropout=0.5, bidirectional=True), floats(5, 3)),
    "gru": Family(lambda: recurrent(nn.GRU, num_layers=2, dropout=0.5, time_first=True), floats(5, 3)),
    "attention": Family(
        lambda: Of(attention, net=nn.MultiheadAttention(4, 2, dropout=0.3, batch_first=True)), floats(5, 4)
    ),
    "encoder": Family(lambda: nn.TransformerEncoder(encoder_layer(dropout=0.3), 2), floats(5, 4)),
    "encoder, time first": Family(
        lambda: Of(
            lambda s, x: s.net(x.transpose(0, 1)).transpose(0, 1), net=encoder_layer(dropout=0.3, batch_first=False)
        ),
        floats(5, 4),
    ),
    "gpt2": Family(lambda: gpt2(resid_pdrop=0.2, embd_pdrop=0.2, attn_pdrop=0.2), text, language_loss),
    "bert": Family(lambda: bert(hidden_dropout_prob=0.2), classes(text), classifier_loss),
    "lora": Family(lambda: lora(gpt2(), ["c_attn"], fan_in_fan_out=True, lora_dropout=0.3), text, language_loss),
}


@pytest.mark.parametrize("name", DROPPING)
def test_dropout_is_drawn_as_torch_draws_it(name, monkeypatch):
    """Not as cuDNN does, which draws between recurrent layers by a generator of its own."""
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    check(DROPPING[name])


def test_spectral_norm_updates_its_buffers_from_parameters_alone():
    """Power iteration in the forward changes buffers in train mode; no sample is in them, so it is no leak."""

    def build():
        return nn.Sequential(parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))

    check(Family(build, floats(4)))


# Activation checkpointing


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_equal_plain_ones(reentrant):
    family = Family(lambda: checkpointed(None), floats(5, 3))
    plain = make(family)
    model = checkpointed(reentrant).double()
    model.load_state_dict(plain.state_dict())
    batch = family.batch(4)
    expected = dpscale.scaled_sum(plain, loss_fn, batch, SCALINGS[3])
    out = dpscale.scaled_sum(model, loss_fn, batch, SCALINGS[3])
    assert all(torch.equal(out.grads[n], g) for n, g in expected.grads.items()) and torch.equal(
        out.norms, expected.norms
    )


def test_checkpointing_works_as_before_outside_of_the_engine():
    """Regions run twice again once the engine is done, also after a forward that raised."""
    model, ran = checkpointed(False).double(), []
    model.b.register_forward_pre_hook(lambda *_: ran.append(1))
    x = floats(5, 3)(4)
    dpscale.scaled_sum(model, loss_fn, x, SCALINGS[0])
    with pytest.raises(ZeroDivisionError):
        dpscale.scaled_sum(model, lambda m, b: m(b[0]) / (1 // 0), x, SCALINGS[0])
    ran.clear()
    loss_fn(model, x).sum().backward()
    assert len(ran) == 2


def test_gradient_checkpointing_of_hugging_face_models():
    def build():
        model = gpt2(use_cache=False)
        model.gradient_checkpointing_enable()
        return model

    check(Family(build, text, language_loss))


# Precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["lstm", "encoder", "gpt2", "resnet9"])
def test_models_in_low_precision_stay_within_the_bound(family, dtype):
    what = FAMILIES[family]
    model = make(what, dtype)
    batch = tree_map(lambda t: t.to(dtype) if t.is_floating_point() else t, what.batch(2))

    def loss(m, b):
        return what.loss(m, b).float()

    for rule in SCALINGS:
        out = dpscale.scaled_sum(model, loss, batch, rule)
        assert {t.dtype for t in tree_leaves((out.norms, out.grads))} == {torch.float32} and out.norms.min() > 0
        one = dpscale.scaled_sum(model, loss, tree_map(lambda t: t[:1], batch), rule)
        assert 0 < released(one) <= rule.bound * (1 + 1e-5)


def autocast(loss):
    def run(model, batch):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return loss(model, batch).float()

    return run


def test_operations_without_a_rule_are_replayed_under_the_autocast_they_ran_under():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.mix = nn.Linear(4, 4), nn.Parameter(torch.randn(4, 4, 4))

        def forward(self, x):
            h = self.first(x)
            return torch.einsum("bi,ijk,bk->bj", h, self.mix, h)

    torch.manual_seed(0)
    model, (x,) = Mixed(), floats(4)(4)
    loss = autocast(loss_fn)
    out = dpscale.scaled_sum(model, loss, (x.float(),), dpscale.Clip(C=torch.inf))
    gradients = per_sample_gradients(model, loss, (x.float(),))
    for name, g in gradients.items():
        torch.testing.assert_close(out.grads[name], g.sum(0), rtol=2e-2, atol=2e-2)


def test_autocast_around_the_call_finds_no_casts_of_a_look():
    """Autocast remembers the weights it has cast; those of a look must not be there after an update."""
    model, (x,) = nn.Linear(4, 2, bias=False), floats(4)(4)
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        dpscale.scaled_sum(model, loss_fn, (x.float(),), SCALINGS[0])
        model.weight.data.zero_()
        assert not model(x.float()).any()


@pytest.mark.parametrize("family", ["gpt2", "resnet9", "lstm"])
def test_autocast_around_the_call_does_not_reach_the_norms(family):
    what = FAMILIES[family]
    model = make(what, torch.float32)
    batch = tree_map(lambda t: t.float() if t.is_floating_point() else t, what.batch(3))

    def loss(m, b):
        return what.loss(m, b).float()

    inside = dpscale.scaled_sum(model, autocast(what.loss), batch, SCALINGS[0])
    with torch.autocast(torch.get_default_device().type, torch.bfloat16):
        around = dpscale.scaled_sum(model, loss, batch, SCALINGS[0])
        ones = [(rule, dpscale.scaled_sum(model, loss, tree_map(lambda t: t[:1], batch), rule)) for rule in SCALINGS]
    torch.testing.assert_close(around.norms, inside.norms, rtol=1e-5, atol=0)
    for rule, one in ones:
        assert released(one) <= rule.bound * (1 + 1e-5)
