"""Bad input gets an error that names the argument, the value and the next action, and changes nothing."""

import warnings

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import dpscale
from dpscale.batches import Padding
from dpscale.engine.engine import engine_of
from dpscale.shapes import Sizes

from .engine.cases import check_sample_by_sample
from .helpers import SIZE, data, loss_fn, mlp, plan, private, train, vector

RULE = dpscale.Clip(C=1.0)


def batch(size=4):
    return tuple(t[:size] for t in data().tensors)


def unchanged(run):
    """The run is as if nothing had happened: same weights, no gradient, no step charged."""
    assert torch.equal(vector(run.model), vector(mlp()))
    assert all(p.grad is None for p in run.model.parameters())
    assert run.steps_taken == 0


@pytest.mark.parametrize(
    "loss, got",
    [
        (lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), r"shape \(\)"),
        (lambda m, b: loss_fn(m, b)[:, None], r"shape \(\d+, 1\)"),
        (lambda m, b: loss_fn(m, b)[1:], r"shape \(\d+,\)"),
        (lambda m, b: loss_fn(m, b).tolist(), "list"),
    ],
    ids=["mean", "column", "short", "list"],
)
def test_loss_that_is_not_per_sample(loss, got):
    run = private()
    with pytest.raises(ValueError, match=rf"losses must be per sample, of shape \(\d+,\). Got {got}.*reduction='none'"):
        for drawn in run.batches(data()):
            run.step(drawn, loss)
    unchanged(run)


def test_loss_that_is_not_per_sample_in_your_own_loop():
    run = private()
    with pytest.raises(ValueError, match=r"losses must be per sample, of shape \(\d+,\). Got shape \(\).*reduction"):
        for x, y in run.batches(data()):
            run.backward(nn.functional.cross_entropy(run.model(x), y))
    unchanged(run)


def test_leading_dimensions_that_disagree():
    x, y = batch()
    with pytest.raises(ValueError, match=r"'batch' parameter of scaled_sum must be tensors that agree in their first "
        r"dim.*"
                                         r"Got \[\(4, 4\), \(3,\)\] instead. Put what is not per sample"):  # fmt: skip
        dpscale.scaled_sum(mlp(), loss_fn, (x, y[:3]), RULE)


def test_batch_without_tensors():
    with pytest.raises(
        ValueError, match=r"'batch' parameter of scaled_sum must be a pytree that holds at least one tensor"
    ):
        dpscale.scaled_sum(mlp(), loss_fn, [], RULE)


def test_batch_with_rows_dropped():
    run = private()
    with pytest.raises(
        ValueError,
        match=r"'batch' parameter of step must be of as many rows as its draw. Got 11 instead; draw 1 has 12.*Pass on",
    ):
        for x, y in run.batches(data()):
            run.step((x[1:], y[1:]), loss_fn)
    unchanged(run)


@pytest.mark.parametrize("mask", [torch.ones(3, dtype=torch.bool), torch.ones(4), [True] * 4, torch.ones(4, 1).bool()])
def test_mask_of_the_wrong_shape(mask):
    with pytest.raises(ValueError, match=r"'mask' parameter of scaled_sum must be a bool tensor of shape \(4,\).*Got"):
        dpscale.scaled_sum(mlp(), loss_fn, batch(), RULE, mask=mask)


def test_points_that_do_not_fit():
    model = mlp()
    with pytest.raises(
        ValueError,
        match=r"'points' parameter of scaled_sum must be weights with the names and "
        r"shapes.*0.weight",
    ):
        dpscale.scaled_sum(model, loss_fn, batch(), RULE, points=[(1.0, {"0.bias": torch.zeros(6)})])


def test_a_batch_of_ones_own_making():
    run = private()
    with pytest.raises(RuntimeError, match=r"No draw is outstanding: .*private.batches\(dataset\)"):
        run.step(batch(), loss_fn)
    unchanged(run)


def test_one_batch_used_twice():
    run = private()
    with pytest.raises(RuntimeError, match=r"This batch is draw 1, which was released already"):
        for drawn in run.batches(data()):
            run.step(drawn, loss_fn)
            run.step(drawn, loss_fn)
    assert run.steps_taken == 1


def test_losses_from_elsewhere():
    run = private()
    with pytest.raises(RuntimeError, match=r"do not come from a forward of the model on a batch that was drawn"):
        for x, _ in run.batches(data()):
            run.backward(torch.ones(len(x), requires_grad=True))
    unchanged(run)


def test_empty_dataset():
    run = private()
    with pytest.raises(ValueError, match=r"'dataset' parameter of batches must be a dataset with at least one sample"):
        run.batches(TensorDataset(torch.zeros(0, 4)))
    with pytest.raises(ValueError, match=r"'size' parameter of Poisson must be .*Got 0 instead.*empty"):
        dpscale.Poisson(size=0, batch=1)


def test_dataset_of_another_size_than_planned():
    with pytest.raises(ValueError, match=r"'dataset' parameter of batches must be of 60 samples, as planned. Got 59"):
        private().batches(data(59))


@pytest.mark.parametrize("option", ["batch_size", "shuffle", "drop_last", "in_order", "sampler"])
def test_loader_options_that_change_the_sampling(option):
    with pytest.raises(
        ValueError, match=f"'loader' parameter of batches must be without .*{option}.*sampler in the plan"
    ):
        private().batches(data(), **{option: 1})


def test_delta_that_protects_nobody_warns():
    with pytest.warns(UserWarning, match=r"delta"):
        plan(noise_multiplier=None).calibrate(epsilon=3, delta=1 / SIZE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(noise_multiplier=None).calibrate(epsilon=3, delta=0.9 / SIZE)


@pytest.mark.parametrize(
    "make, text",
    [
        (lambda: plan(noise_multiplier=None).calibrate(epsilon=0, delta=1e-3), "'epsilon' parameter of .* Got 0"),
        (lambda: plan(noise_multiplier=None).calibrate(epsilon=-1, delta=1e-3), "'epsilon' parameter of .* Got -1"),
        (lambda: plan(noise_multiplier=0.0), "'noise_multiplier' parameter of Plan .* Got 0.0"),
        (lambda: plan(noise_multiplier=-1.0), "'noise_multiplier' parameter of Plan .* Got -1.0"),
        (lambda: plan(scaling=dpscale.Clip(C=0)), "'C' parameter of Clip .* Got 0"),
        (lambda: dpscale.PSASC(s=1.0, r=1.0), r"'r' parameter of PSASC must be such that s\*r < 1"),
        (lambda: plan(scaling=dpscale.Clip(C=torch.inf)), "inf"),
        (lambda: private(noise_multiplier=None), "'plan' parameter of privatize must be calibrated.*plan.calibrate"),
        (lambda: private(micro_batch=0), "'micro_batch' parameter of privatize must be an integer >= 1. Got 0"),
        (lambda: private(seed="x"), "'seed' parameter of Key must be an integer.*Got 'x'"),
    ],
)
def test_numbers_that_make_no_sense(make, text):
    with pytest.raises(ValueError, match=text):
        make()


# -- Other things than were asked for --------------------------------------------------------------------------------


def given(model=None, optimizer=None, planned=None, **options):
    model = mlp() if model is None else model
    optimizer = torch.optim.SGD(mlp().parameters()) if optimizer is None else optimizer
    return dpscale.privatize(model, optimizer, plan() if planned is None else planned, **options)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: given(nn.Linear), "'model' parameter of privatize must be a torch.nn.Module. Got 'type'"),
        (lambda: given(lambda x: x), "'model' .* Got 'function' instead. Pass the module itself"),
        (lambda: given(mlp().to("meta")), r"'model' .* in memory. Got .*0.weight.* on 'meta'.*Load its weights"),
        (lambda: given(optimizer=torch.optim.SGD), r"'optimizer' .* a torch optimizer. Got 'type'.*lr=0.1\)"),
        (lambda: given(optimizer=mlp().parameters()), "'optimizer' .* Got 'generator'"),
        (lambda: given(optimizer=torch.optim.SGD(mlp().parameters())), "'optimizer' .* parameters of the model alone"),
        (lambda: given(planned={"epsilon": 3}), r"'plan' .* a dpscale.Plan. Got 'dict'.*make_private\("),
        (lambda: given(planned=3.0), "'plan' .* Got 'float'"),
        (lambda: given(compile="max"), "'compile' .* True, False or None. Got 'max'"),
        (lambda: given(ledger="my.ledger"), r"'ledger' .* Got 'my.ledger'.*dpscale.Ledger\('my.ledger'"),
        (lambda: given(group="nccl"), "'group' .* None where there are no processes. Got 'nccl'.*init_process_group"),
        (lambda: plan(scaling=1.0), r"'scaling' parameter of Plan must be a scaling rule. Got 1.0.*Clip\(C=1.0\)"),
        (lambda: plan(scaling=dpscale.Clip), "'scaling' .* Got <class"),
        (lambda: plan(sampling=512), r"'sampling' parameter of Plan must be a sampler. Got 512.*Poisson\("),
        (lambda: dpscale.Ledger(".", epsilon=3, delta=1e-5), "'path' parameter of Ledger must be of a file.*folder"),
        (lambda: dpscale.audit.audit(mlp()), "'subject' parameter of audit .* Got 'Sequential'.*make_private"),
        (lambda: dpscale.audit.audit(given), "'data' parameter of audit must be given where a function is audited"),
        (lambda: dpscale.audit.audit(given, data(), noise="secure"), r"'options' .* left out .* Got \['noise'\]"),
        (lambda: dpscale.check(mlp(), loss_fn, batch), r"'batch' .* Got 'function'.*next\(iter\(loader\)\)"),
    ],
)
def test_what_is_something_else_gets_one_line(make, text):
    with pytest.raises(ValueError, match=text) as error:
        make()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="none"), nn.functional.cross_entropy, None])
def test_a_loss_of_outputs_and_labels_is_no_loss_fn(loss):
    run, text = private(), "must be a function of the model and a batch. Got .* instead. Write def loss_fn"
    batches = run.batches(data())
    for call in (run.step, run.forward_backward):
        with pytest.raises(ValueError, match=f"'loss_fn' parameter of {call.__name__} {text}"):
            call(next(batches), loss)
    with pytest.raises(ValueError, match=f"'loss_fn' parameter of check {text}"):
        dpscale.check(mlp(), loss, batch())
    with pytest.raises(ValueError, match=f"'loss_fn' parameter of scaled_sum {text}"):
        dpscale.scaled_sum(mlp(), loss, batch(), RULE)
    unchanged(run)


def test_a_batch_on_another_device_than_the_model_is_told_to_move():
    """In the words of torch, which a machine without a GPU has no other way to say."""
    run = private()

    def elsewhere(model, batch):
        raise RuntimeError("Expected all tensors to be on the same device, but got mat1 is on cpu and mat2 on cuda:0")

    batches = run.batches(data())
    with pytest.raises(ValueError, match=r"the batch on cpu, the model on cpu\. Nothing.*step\(batch\.to\('cpu'\)"):
        run.step(next(batches), elsewhere)
    unchanged(run)


def test_nan_parameters():
    model = mlp()
    model[2].weight.data[0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"Parameter '2.weight' holds NaN or infinity.*Nothing was released"):
        private(model)


def test_parameters_that_become_nan():
    run = private()
    with pytest.raises(ValueError, match=r"Parameter '0.weight' holds NaN or infinity.*lower the learning rate"):
        for drawn in run.batches(data()):
            run.model[0].weight.data[:] = torch.nan
            run.step(drawn, loss_fn)
    assert run.steps_taken == 0


def test_optimizer_over_other_parameters():
    model = mlp()
    with pytest.raises(
        ValueError,
        match=r"'optimizer' parameter of privatize must be over every trainable "
        r"parameter.*2.weight",
    ):
        private(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1))
    stranger = nn.Parameter(torch.zeros(1))
    with pytest.raises(ValueError, match=r"over parameters of the model alone. Got '1 other tensors'"):
        private(model, optimizer=torch.optim.SGD([*model.parameters(), stranger], lr=0.1))


def test_model_without_trainable_parameters():
    with pytest.raises(ValueError, match=r"no trainable parameter. Set requires_grad_"):
        dpscale.scaled_sum(mlp().requires_grad_(False), loss_fn, batch(), RULE)


def test_losses_that_depend_on_no_parameter():
    with pytest.raises(dpscale.UnsupportedModel, match=r"losses depend on no trainable parameter.*detach"):
        dpscale.scaled_sum(mlp(), lambda m, b: m(b[0]).detach().sum(1), batch(), RULE)


def test_out_of_memory_suggests_a_micro_batch():
    run = private(micro_batch=16)

    def hungry(model, drawn):
        torch.empty(2**60)  # more than any machine has
        return loss_fn(model, drawn)

    with pytest.raises(MemoryError, match=r"micro-batch of 1 rows does not fit.*Nothing was released.*micro_batch=1"):
        for drawn in run.batches(data()):
            run.step(drawn, hungry)
    unchanged(run)
    with pytest.raises(
        MemoryError,
        match=r"micro-batch of \d\d rows.*Call privatize.*micro_batch=\d.*private.parts\(batch, \d",
    ):
        drawn = next(batches := run.batches(data()))
        run.backward(Hungry.apply(loss_fn(run.model, drawn)))
    assert len(batches) == run.steps - 1 and run.steps_taken == 0


class Hungry(torch.autograd.Function):
    """Has no room for a backward."""

    @staticmethod
    def forward(ctx, losses):
        return losses.clone()

    @staticmethod
    def backward(ctx, g):
        torch.empty(2**60)


class CompilesNothing:
    """In place of a compiled step that cannot be had: every sum is eager."""

    def __call__(self, *args, **kwargs):
        return None

    def put(self, tensors, count, rows):
        return None


@pytest.mark.parametrize("compile", [False, True])
def test_a_batch_that_does_not_fit_is_split_by_itself(caplog, compile):
    def hungry(model, drawn):
        if len(drawn[0]) > 6:
            torch.empty(2**60)
        return loss_fn(model, drawn)

    run, other = private(compile=False), private(compile=False)
    if compile:  # pads as for a compiled step, and compiles nothing
        run._padding = Padding(Sizes.of(run.plan.sampling))
        run._engine._compiled = CompilesNothing()
    with caplog.at_level("WARNING", logger="dpscale"):
        found = train(run, loss=hungry)
    torch.testing.assert_close(found, train(other), rtol=1e-5, atol=1e-6)
    told = [record.getMessage() for record in caplog.records]
    assert 1 <= len(told) <= 3 and "do not fit into memory, so batches go in parts of" in told[-1]
    assert run._micro_batch <= 6


@torch.library.custom_op("dpscale_test::by_batch_size", mutates_args=())
def by_batch_size(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Treats samples apart, but not alike in batches of another size: run on one sample it gives something else."""
    return x * w * len(x)


by_batch_size.register_autograd(
    lambda ctx, g: (g * ctx.w * ctx.size, (g * ctx.x * ctx.size).sum(0)),
    setup_context=lambda ctx, inputs, output: vars(ctx).update(x=inputs[0], w=inputs[1], size=len(inputs[0])),
)


class Unknown(nn.Module):
    """An operation that no rule covers, and whose result for one sample is not a part of its result for many."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x):
        return torch.ops.dpscale_test.by_batch_size(x, self.scale)


def test_an_operation_that_depends_on_the_batch_size():
    with pytest.raises(dpscale.UnsupportedModel, match=r"among 3 rows and .* alone.*counts of the sample itself"):
        dpscale.scaled_sum(Unknown(), lambda m, b: m(b[0]).sum(1), (torch.randn(4, 3),), RULE)


class Memory(nn.Module):
    """Attends to learned keys; the dropout is drawn inside of the attention."""

    def __init__(self):
        super().__init__()
        self.first, self.keys = nn.Linear(4, 4), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return nn.functional.scaled_dot_product_attention(self.first(x), self.keys, self.keys, dropout_p=0.5)


def test_operation_with_randomness_inside():
    """Formed anew for each sample it would draw other numbers than those that the losses come from."""
    model, x = Memory(), torch.randn(4, 5, 4)
    dpscale.scaled_sum(model, lambda m, b: m(b[0]).sum((1, 2)), (x,), RULE)
    (found,) = engine_of(model)._obstacles.values()
    assert "scaled_dot_product_attention" in found.obstacle and "draws random numbers inside" in found.obstacle


def test_rows_that_depend_on_the_data():
    def loss(m, b):
        kept = b[0][b[0][:, 0] > 0]
        return m(b[0]).sum(1) + m(kept).sum()

    with pytest.raises(dpscale.UnsupportedModel):
        dpscale.scaled_sum(nn.Linear(4, 3), loss, (torch.randn(6, 4),), RULE)


def test_control_flow_that_depends_on_the_data():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x) if x[0, 0] > x[1, 0] else self.a(x).tanh() + self.a(x)

    x = torch.randn(6, 4)
    x[:3, 0] = torch.tensor([2.0, 1.0, 3.0])
    with pytest.raises(dpscale.UnsupportedModel, match=r"Samples are coupled|depends on how many rows"):
        dpscale.scaled_sum(Sometimes(), lambda m, b: m(b[0]).sum(1), (x,), RULE)


def test_embedding_that_renormalizes_itself():
    model = nn.Sequential(nn.Embedding(9, 4, max_norm=0.1), nn.Flatten(), nn.Linear(12, 3))
    before = vector(model)
    with pytest.raises(dpscale.UnsupportedModel, match=r"'0.weight' is changed by the forward itself"):
        dpscale.scaled_sum(model, loss_fn, (torch.arange(12).view(4, 3) % 9, torch.zeros(4).long()), RULE)
    assert torch.equal(vector(model), before)


def test_embedding_scaled_by_frequency():
    model = nn.Sequential(nn.Embedding(9, 4, scale_grad_by_freq=True), nn.Flatten(), nn.Linear(12, 3))
    with pytest.raises(dpscale.UnsupportedModel, match="scale_grad_by_freq"):
        dpscale.scaled_sum(model, loss_fn, (torch.arange(12).view(4, 3) % 9, torch.zeros(4).long()), RULE)


def test_a_parameter_used_outside_the_models_forward():
    run = private()
    with pytest.raises(
        dpscale.UnsupportedModel, match=r"'0.weight' also reaches the losses where its operations cannot be seen"
    ):
        for x, y in run.batches(data()):
            run.backward(loss_fn(run.model, (x, y)) + run.model[0].weight.square().sum())
    unchanged(run)


def test_a_compiled_part_is_not_silently_untrained():
    class Scripted(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)
            self.apply_hidden = _Hidden.apply

        def forward(self, x):
            return self.apply_hidden(x, self.a.weight)

    check_sample_by_sample(Scripted(), (torch.randn(4, 4),), RULE, rtol=1e-5, why="")


class _Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        return None, g.t() @ ctx.saved_tensors[0]


def test_a_buffer_that_remembers_the_samples():
    class Remembers(nn.Module):
        """Used by nobody, so no loss is coupled; but the mean of the batch leaves training without noise."""

        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)
            self.register_buffer("mean", torch.zeros(4))

        def forward(self, x):
            self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
            return self.a(x)

    model = Remembers()
    with pytest.raises(
        dpscale.UnsupportedModel, match=r"A buffer of the model is updated from the samples.*stop the update"
    ):
        dpscale.scaled_sum(model, loss_fn, batch(), RULE)
    assert not model.mean.any()


def test_a_parameter_that_is_seen_once_and_hidden_once():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3, bias=False)

        def forward(self, x):
            return self.a(x) + _Hidden.apply(x, self.a.weight)

    check_sample_by_sample(Half(), (torch.randn(4, 4),), RULE, rtol=1e-5, why="")


def test_lbfgs():
    model = mlp()
    with pytest.raises(ValueError, match=r"'optimizer' parameter of privatize must be one that steps once.*LBFGS"):
        private(model, optimizer=torch.optim.LBFGS(model.parameters()))


@pytest.mark.parametrize("points", [[], [(float("nan"), {})]])
def test_points_without_sense(points):
    with pytest.raises(ValueError, match=r"'points' parameter of scaled_sum must be"):
        dpscale.scaled_sum(mlp(), loss_fn, batch(), RULE, points=points)


def test_coupling_that_begins_with_larger_batches():
    class Sometimes(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Linear(4, 3)

        def forward(self, x):
            return self.a(x - x.mean(0)) if len(x) > 3 else self.a(x - x)

    with pytest.raises(dpscale.UnsupportedModel, match="Samples are coupled"):
        dpscale.scaled_sum(Sometimes(), lambda m, b: m(b[0]).sum(1), (torch.randn(8, 4),), RULE)


@pytest.mark.parametrize("how", ["step", "backward"])
def test_a_forward_that_changes_by_itself(how):
    """It is not the samples that are coupled: the same batch gives other results."""

    class Counting(nn.Sequential):
        calls = 0

        def forward(self, x):
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    run = private(Counting(*mlp()))
    with pytest.raises(dpscale.UnsupportedModel, match=r"gives something else each time.*a counter.*as a buffer"):
        for drawn in run.batches(data()):
            run.step(drawn, loss_fn) if how == "step" else run.backward(loss_fn(run.model, drawn))
    assert run.steps_taken == 0
