"""What other libraries got wrong in the step and the loop, one test each; the sampler's are in their own files.

The numbers are those of the project's list of traps.
"""

import copy
import dataclasses
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import dpscale

from .engine.cases import SCALINGS, check_equal
from .engine.families import FAMILIES, gpt2, language_loss, lora, make, text
from .engine.test_models import Flattened, RawParameters, TiedLanguageModel, Twice
from .helpers import SIZE, data, loss_fn, mlp, plan, private, train, vector
from .seeding import seeded


def test_trap_01_noise_and_scaling_read_one_bound():
    """Scaling by one object and noise from another gave 100 times too little noise."""

    def noise(C):
        model = nn.Linear(4, 3)
        nn.init.zeros_(model.weight)
        run = private(model, scaling=dpscale.Clip(C=C), steps=1)
        grads = []
        run.optimizer.register_step_pre_hook(lambda *_: grads.append(model.weight.grad.clone()))
        masked = TensorDataset(
            torch.zeros(SIZE, 4), torch.zeros(SIZE, dtype=torch.long)
        )  # zero input, zero weight gradient
        train(run, masked)
        return grads[0]

    torch.testing.assert_close(noise(10.0), 100 * noise(0.1))
    rule = dpscale.Clip(C=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        rule.C = 0.01
    assert dataclasses.replace(plan(), scaling=dpscale.Clip(C=7.0)).noise_std == 7.0
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan().scaling = rule


class FunctionalBatchNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.b(F.batch_norm(self.a(x), None, None, training=True))


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(6),
        nn.BatchNorm1d(6, affine=False),
        nn.BatchNorm1d(6, affine=False, track_running_stats=False),
        nn.BatchNorm1d(6).requires_grad_(False),
        None,
    ],
    ids=["affine", "without-affine", "without-statistics", "frozen-in-train-mode", "functional"],
)
@pytest.mark.parametrize("how", ["step", "backward"])
def test_trap_02_batch_norm_in_any_disguise_is_refused(norm, how):
    torch.manual_seed(0)
    norm = copy.deepcopy(norm)
    model = FunctionalBatchNorm() if norm is None else nn.Sequential(nn.Linear(4, 6), norm, nn.Linear(6, 3))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    run = private(model, optimizer=optimizer)
    with pytest.raises(dpscale.UnsupportedModel, match=r"coupled at batch_norm.*GroupNorm"):
        for batch in run.batches(data()):
            run.step(batch, loss_fn) if how == "step" else run.backward(loss_fn(model, batch))
    assert run.steps_taken == 0
    for k, v in model.state_dict().items():
        assert torch.equal(v, before[k]), f"{k} changed although the model was refused"


@pytest.mark.parametrize("time_first", [False, True])
def test_trap_03_flattened_positions_are_not_samples(time_first):
    """Scaling tokens instead of samples let one sample add T times the bound."""
    torch.manual_seed(0)
    model, rule = Flattened(time_first).double(), dpscale.Clip(C=1e-3)
    x = torch.randn(5, 7, 4).double()

    def loss(m, b):
        return m(b[0]).square().sum(1)

    out = check_equal(model, (x,), rule, loss=loss)
    assert out.norms.shape == (5,)
    without = dpscale.scaled_sum(model, loss, (x[1:],), rule)
    moved = torch.cat([(out.grads[n] - without.grads[n]).flatten() for n in out.grads]).norm()
    assert moved.item() == pytest.approx(rule.bound)  # all are clipped, so the bound is reached, and not exceeded


def test_trap_09_a_mean_is_not_a_sum():
    """With a mean, norms shrink by the batch size. Here a mean is refused, and norms do not know the batch size."""
    model, (x, y) = mlp(), data().tensors
    with pytest.raises(ValueError, match="reduction='none'"):
        dpscale.scaled_sum(model, lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x, y), dpscale.Clip(C=1.0))
    few = dpscale.scaled_sum(model, loss_fn, (x[:2], y[:2]), dpscale.Clip(C=1.0)).norms
    many = dpscale.scaled_sum(model, loss_fn, (x, y), dpscale.Clip(C=1.0)).norms
    torch.testing.assert_close(few, many[:2])


@pytest.mark.parametrize(
    "loss",
    [
        lambda m, b: loss_fn(m, b) - loss_fn(m, b).mean(),
        lambda m, b: loss_fn(m, b) / loss_fn(m, b).detach().sum(),
        lambda m, b: loss_fn(m, b).mean().expand(len(b[0])),
        lambda m, b: F.cross_entropy(m(b[0] - b[0].mean(0)), b[1], reduction="none"),
        lambda m, b: loss_fn(m, b).cumsum(0),
    ],
    ids=["minus-mean", "detached-weights", "expanded-mean", "batch-mean-input", "cumulative"],
)
def test_trap_09_a_loss_that_couples_samples_is_refused(loss):
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        for batch in run.batches(data()):
            run.step(batch, loss)
    assert run.steps_taken == 0


@pytest.mark.parametrize("couple", [lambda v: v - v.mean(), lambda v: v.mean().expand(len(v)), lambda v: v.cumsum(0)])
def test_trap_09_a_coupled_loss_in_your_own_loop_is_refused(couple):
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled in the loss"):
        for batch in run.batches(data()):
            run.backward(couple(loss_fn(run.model, batch)))
    assert run.steps_taken == 0


def test_trap_11_norms_are_as_precise_as_what_they_bound():
    """In bfloat16 a sum of 2,000 terms stalls; the norm must be that of the float32 sum which is released."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1, bias=False).bfloat16()
    x = torch.rand(3, 2000, 8).bfloat16()  # the gradient of the weight is the sum over positions, exactly
    out = dpscale.scaled_sum(model, lambda m, b: m(b[0]).float().sum((1, 2)), (x,), dpscale.Clip(C=1.0))
    exact = x.double().sum(1).norm(dim=1)
    torch.testing.assert_close(out.norms.double(), exact, rtol=1e-5, atol=0)
    stalled = x.sum(1).double().norm(dim=1)
    assert not torch.allclose(stalled, exact, rtol=1e-5), "the example would not tell the two apart"
    for i in range(3):
        one = dpscale.scaled_sum(model, lambda m, b: m(b[0]).float().sum((1, 2)), (x[i : i + 1],), dpscale.Clip(C=1.0))
        assert one.grads["weight"].double().norm() == pytest.approx(1.0, rel=1e-5)


def test_trap_12_a_second_backward_neither_wipes_nor_doubles():
    run = private()
    batches = iter(run.batches(data()))
    run.backward(loss_fn(run.model, next(batches)))
    first = [p.grad.clone() for p in run.model.parameters()]
    batch = next(batches)
    losses = loss_fn(run.model, batch)
    with pytest.raises(RuntimeError, match=r"backward\(\) was called again before optimizer.step\(\)"):
        run.backward(losses)
    assert all(torch.equal(p.grad, g) for p, g in zip(run.model.parameters(), first, strict=True))
    assert run.steps_taken == 1
    run.optimizer.step()
    run.optimizer.zero_grad()
    run.backward(loss_fn(run.model, batch))
    assert run.steps_taken == 2


def test_trap_15_used_twice_registered_in_another_order_keywords_and_4d():
    torch.manual_seed(0)
    model = Twice().double()
    assert next(iter(dict(model.named_parameters()))).startswith("last")
    for rule in (dpscale.Clip(C=0.1), dpscale.PSASC(C=0.1, s=0.5, r=0.01)):
        check_equal(model, (torch.randn(4, 2, 3, 4).double(),), rule)


def test_trap_19_an_empty_batch_is_a_step_of_noise():
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    run = private(model, optimizer=optimizer, sampling=dpscale.Poisson(size=SIZE, batch=1), steps=30)
    empty = []
    for batch in run.batches(data()):
        before = vector(model)
        report = run.step(batch, loss_fn)
        if not report.mask.any():
            empty.append(run.steps_taken)
            assert report.loss == 0 and not report.weights.any()
        assert not torch.equal(vector(model), before)  # noise alone moves the weights
    assert run.steps_taken == 30
    assert 3 <= len(empty) <= 22  # expected 30/e = 11
    assert len(optimizer.param_groups[0]["params"]) == 4


def test_trap_20_a_forward_without_a_backward_does_no_harm():
    """Evaluations in train mode and in eval mode, on other and on equal batch sizes, with and without gradients."""

    def run(disturbed):
        model = mlp()
        one = private(model)
        for x, y in one.batches(data()):
            losses = loss_fn(model, (x, y))
            if disturbed:
                model(torch.randn(7, 4, generator=seeded(0)))
                model(x * 2).sum()
                with torch.no_grad():
                    model(x)
                model.eval()(x)
                model.train()
            one.backward(losses)
            one.optimizer.step()
            one.optimizer.zero_grad()
            if disturbed:
                model(x)
        return vector(model)

    assert torch.equal(run(False), run(True))


def test_trap_24_schedulers_and_hooks_work():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.1)
    run = private(model, optimizer=optimizer)
    hooked, moves = [], []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for batch in run.batches(data()):
        before = vector(model)
        run.step(batch, loss_fn)
        moves.append((vector(model) - before).norm().item())
        scheduler.step()
    assert len(hooked) == 5
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-5)
    assert all(b < 0.5 * a for a, b in itertools.pairwise(moves))


@pytest.mark.parametrize("labels", [[0, 0, 0, 0, 1, 2], [2, 2, 2, 2, 2, 2], [0, 1, 2, 0, 1, 2]])
def test_trap_09_coupling_through_labels_alone_is_found(labels):
    """Weights by class frequency: only integers couple the samples, and the first ones may all be alike."""
    y = torch.tensor(labels)

    def balanced(m, b):
        counts = torch.bincount(b[1], minlength=3)
        return loss_fn(m, b) / counts[b[1]]

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(mlp(), balanced, (torch.randn(6, 4), y), dpscale.Clip(C=1.0))


def test_trap_09_coupling_through_labels_is_looked_for_again():
    """A batch without class 2 cannot show it; the next batch can, and must."""

    def balanced(m, b):
        return loss_fn(m, b) / torch.where(b[1] == 2, (b[1] == 2).sum(), 1)

    model, x = mlp(), torch.randn(6, 4)
    dpscale.scaled_sum(model, balanced, (x, torch.tensor([0, 1, 0, 1, 0, 0])), dpscale.Clip(C=1.0))
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(model, balanced, (x, torch.tensor([0, 1, 2, 0, 1, 1])), dpscale.Clip(C=1.0))


def test_trap_09_a_loss_that_couples_only_later_is_refused():
    run = private()
    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled in the loss"):
        for batch in run.batches(data()):
            losses = loss_fn(run.model, batch)
            run.backward(losses if run.steps_taken < 2 else losses - losses.mean())
            run.optimizer.step()
            run.optimizer.zero_grad()
    assert run.steps_taken == 2


def released(out):
    return torch.cat([g.double().flatten() for g in out.grads.values()]).norm().item()


@pytest.mark.parametrize("rule", SCALINGS, ids=lambda r: type(r).__name__)
def test_trap_04_tied_weights_are_measured_as_one(rule):
    """A norm per use misses the cross terms: one sample's released norm reached 1.19 C."""
    torch.manual_seed(0)
    model, x = TiedLanguageModel().double(), torch.randint(0, 9, (4, 7))
    nn.init.normal_(model.table.weight)
    check_equal(model, (x,), rule)
    tied = gpt2().double()
    assert tied.lm_head.weight is tied.transformer.wte.weight
    check_equal(tied, text(4), rule, loss=language_loss)
    for i in range(4):
        one = {k: v[i : i + 1] for k, v in text(4).items()}
        assert released(dpscale.scaled_sum(tied, language_loss, one, rule)) <= rule.bound * (1 + 1e-9)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    "options",
    [
        {"groups": 2},
        {"groups": 4},
        {"padding": "same"},
        {"padding": "same", "dilation": 2},
        {"padding": 1, "padding_mode": "reflect"},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": 1, "padding_mode": "replicate", "groups": 4, "stride": 2},
        {"padding": "same", "padding_mode": "circular", "kernel_size": 2},
    ],
    ids=str,
)
def test_trap_13_convolutions_of_every_kind(options):
    torch.manual_seed(0)
    conv = nn.Conv2d(4, 8, **({"kernel_size": 3} | options))
    model = nn.Sequential(conv, nn.Tanh(), nn.Flatten(), nn.LazyLinear(2)).double()
    x = torch.randn(4, 4, 6, 6).double()
    model(x)
    check_equal(model, (x,), SCALINGS[3])


def test_trap_14_padding_gets_no_gradient():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4, padding_idx=2), nn.Linear(4, 3)).double()
    nn.init.normal_(model[0].weight)
    x = torch.randint(0, 9, (4, 7))
    x[:, 3:] = 2
    out = check_equal(model, (x,), SCALINGS[0])
    assert not out.grads["0.weight"][2].any() and out.grads["0.weight"].any()


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_trap_14_bags_with_the_same_index_twice(mode):
    torch.manual_seed(0)
    model = nn.Sequential(nn.EmbeddingBag(9, 4, mode=mode, padding_idx=1), nn.Tanh(), nn.Linear(4, 3)).double()
    x = torch.tensor([[3, 3, 3, 5], [1, 4, 4, 1], [8, 0, 8, 0]])
    check_equal(model, (x,), SCALINGS[0])


@pytest.mark.parametrize("family", ["raw", "rms-norm", "attention", "lstm", "encoder", "llama", "vit"])
def test_trap_16_every_parameter_moves(family):
    """Unsupported layers were printed and then not trained. Without noise, a step must move what SGD moves."""
    torch.manual_seed(0)
    if family in FAMILIES:
        model, batch, loss = make(FAMILIES[family]), FAMILIES[family].batch(6), FAMILIES[family].loss
    else:
        model = RawParameters() if family == "raw" else nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 3))
        model, batch = model.double(), (torch.randn(6, 7, 4).double(),)

        def loss(m, b):
            return m(b[0]).square().flatten(1).sum(1)

    plain = torch.autograd.grad(loss(model, batch).sum(), list(model.parameters()), allow_unused=True)
    out = dpscale.scaled_sum(model, loss, batch, dpscale.Clip(C=torch.inf))
    for (name, p), g in zip(model.named_parameters(), plain, strict=True):
        torch.testing.assert_close(out.grads[name], torch.zeros_like(p) if g is None else g, msg=name)
    assert sum(g is None or not g.any() for g in plain) == 0


@pytest.mark.parametrize("family", ["gpt2", "lstm", "resnet9", "bert"])
def test_trap_17_autocast_neither_fails_nor_lowers_the_precision_of_norms(family):
    what = FAMILIES[family]
    model = make(what, torch.float32)
    batch = {k: v.float() if v.is_floating_point() else v for k, v in _named(what.batch(3)).items()}
    batch = batch if isinstance(what.batch(1), dict) else tuple(batch.values())

    def loss(m, b):
        with torch.autocast(torch.get_default_device().type, torch.bfloat16):
            return what.loss(m, b).float()

    out = dpscale.scaled_sum(model, loss, batch, dpscale.Clip(C=torch.inf))
    assert {t.dtype for t in (out.norms, *out.grads.values())} == {torch.float32}
    for i in range(3):  # the norm is that of the very gradient that is released, to float32's precision
        mask = torch.arange(3) == i
        one = dpscale.scaled_sum(model, loss, batch, dpscale.Clip(C=torch.inf), mask=mask)
        assert released(one) == pytest.approx(out.norms[i].item(), rel=1e-4)


def _named(batch):
    return batch if isinstance(batch, dict) else {str(k): t for k, t in enumerate(batch)}


def test_trap_18_ignored_tokens_count_for_nothing():
    """Neither in a sample's mean, nor in its gradient; a sample without any counted token adds exactly nothing."""
    model, batch = make(FAMILIES["gpt2"]), text(4)
    batch["labels"][2] = -100
    out = check_equal(model, batch, SCALINGS[0], loss=language_loss)
    assert out.norms[2] == 0 and out.losses[2] == 0 and out.norms[[0, 1, 3]].min() > 0

    def flattened(m, b):  # as language-model code writes it: tokens of all samples in one row, then back
        logits = m(input_ids=b["input_ids"], attention_mask=b["attention_mask"]).logits[:, :-1]
        labels = b["labels"][:, 1:]
        each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="none")
        return each.view(labels.shape).sum(1) / (labels != -100).sum(1).clamp(min=1)

    torch.testing.assert_close(check_equal(model, batch, SCALINGS[0], loss=flattened).norms, out.norms)


def test_trap_18_a_mean_over_the_tokens_of_the_batch_is_refused():
    """Its denominator counts the other samples' tokens."""

    def mean_over_all(m, b):
        labels = b["labels"][:, 1:]
        return language_loss(m, b) * (labels != -100).sum(1) / (labels != -100).sum()

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(gpt2(), mean_over_all, text(4), SCALINGS[0])
    with pytest.raises(ValueError, match="reduction='none'"):
        dpscale.scaled_sum(gpt2(), lambda m, b: m(**b).loss, text(4), SCALINGS[0])


@pytest.mark.parametrize("how", ["step", "backward"])
def test_trap_25_lora_trains_the_adapters_alone_and_leaves_a_usable_model(how):
    torch.manual_seed(0)
    model = lora(gpt2(), ["c_attn"], fan_in_fan_out=True)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trained = {n for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all("lora_" in n for n in trained)
    run = private(model, optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1))
    for columns in run.batches(TensorDataset(*text(SIZE).values())):
        batch = dict(zip(text(1), columns, strict=True))
        run.step(batch, language_loss) if how == "step" else run.backward(language_loss(model, batch))
        if how == "backward":
            run.optimizer.step()
            run.optimizer.zero_grad()
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == trained
    model.eval()
    inputs = {k: v for k, v in text(2).items() if k != "labels"}
    with torch.no_grad():
        logits = model(**inputs).logits
        merged = copy.deepcopy(model).merge_and_unload()(**inputs).logits
    torch.testing.assert_close(merged, logits)
    with model.disable_adapter(), torch.no_grad():
        assert not torch.allclose(model(**inputs).logits, logits)
    fresh = lora(gpt2(), ["c_attn"], fan_in_fan_out=True).eval()
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(fresh(**inputs).logits, logits)
