"""The lab's data, models and single runs, on tiny settings."""

import copy
import dataclasses
import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from dpscale import PSASC, Plan, Poisson, privatize
from dpscale.lab import device, diagnostics, models, presets, provenance, runner
from dpscale.lab.data import digits, hold_out, load
from dpscale.lab.presets import SEARCH_SEED, Choice
from dpscale.momentum import HeavyBall
from dpscale.noise import Key
from dpscale.training import Private

from .helpers import vector
from .lab_runs import TINY, job

# -- data and models -------------------------------------------------------------------------------------------


def test_digits_are_split_once_and_for_all():
    data, again = digits(), digits()
    assert (data.size, len(data.test_labels)) == (1437, 360)
    assert data.train_images.shape[1:] == (1, 8, 8)
    assert data.train_images.min() == 0 and data.train_images.max() == 1
    assert torch.equal(data.test_images, again.test_images)
    counts = torch.bincount(data.test_labels)
    assert len(counts) == 10 and counts.min() >= 34 and counts.max() <= 38


def test_hold_out_takes_from_the_training_data_only():
    data = digits()
    split = hold_out(data, 0.2)
    assert split.size + len(split.test_labels) == data.size and len(split.test_labels) == 287
    rows = {tuple(row) for row in data.train_images.flatten(1).tolist()}
    assert {tuple(row) for row in split.test_images.flatten(1).tolist()} <= rows


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5])
def test_hold_out_refuses_a_fraction_outside_0_1(fraction):
    with pytest.raises(ValueError, match=r"'fraction' parameter of hold_out must be a number in \(0, 1\)"):
        hold_out(digits(), fraction)
    with pytest.raises(ValueError, match=r"samples of every class\. Got '0.2 of 30' instead\. Take more"):
        hold_out(load("digits", train_size=30), 0.2)


SHAPES = {"digits_cnn": (1, 8, 8), "resnet9": (3, 32, 32), "resnet9_mish": (3, 16, 16), "resnet9_scaled": (3, 16, 16),
          "probe": (2048,), "scatter_deep": (81, 7, 7), "scatter_sum": (81, 7, 7), "resnet50_stage4": (3, 32, 32),
          "resnet50_stages34": (3, 32, 32)}  # fmt: skip


SIZES = {"digits_cnn": 5746, "paper_cnn": 30_650, "lineage_cnn": 26_010, "resnet9": 2_447_946, "probe": 20_490,
         "normed_cnn": 75_626, "gelu_cnn": 75_626, "scatter_deep": 94_154, "scatter_sum": 133_854}  # fmt: skip


@pytest.mark.parametrize("name", models.MODELS)
def test_models_give_logits_and_mix_no_samples(name):
    model = models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 7).train()
    if name == "probe":
        assert all(not p.any() for p in model.parameters())  # it starts where every class is equally likely
        nn.init.normal_(model.weight)
    if name.startswith("resnet50"):
        assert not model.head.weight.any()
        nn.init.normal_(model.head.weight)
    x = torch.randn(3, *SHAPES.get(name, (1, 28, 28)))
    assert model(x).shape == (3, 7)
    torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-4, atol=1e-5)
    assert not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in model.modules())


def test_the_linear_layer_of_gelu_cnn_sees_twice_the_features():
    model, x = models.MODELS["gelu_cnn"](), torch.randn(2, 1, 28, 28)
    assert isinstance(model[2], nn.GELU)
    torch.testing.assert_close(model(x), model[-1](2 * model[:-2](x)))


@pytest.mark.parametrize("name", SIZES)
def test_model_sizes(name):
    model = models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 10)
    assert sum(p.numel() for p in model.parameters()) == SIZES[name]


def layers(name, kind):
    return sum(isinstance(m, kind) for m in models.MODELS[name](SHAPES.get(name, (1, 28, 28)), 10).modules())


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist"])
def test_the_papers_cnn_has_four_convolutions_and_one_linear_layer(name):
    model = presets.PRESETS[name].model
    assert (layers(model, nn.Conv2d), layers(model, nn.Linear)) == (4, 1)


def test_the_lineages_models_are_as_published():
    assert [layers("lineage_cnn", kind) for kind in (nn.Conv2d, nn.Linear, nn.Tanh)] == [2, 2, 3]
    assert (layers("resnet9", nn.Conv2d), layers("resnet9", nn.Linear), layers("resnet9", nn.GroupNorm)) == (8, 1, 8)
    assert (layers("resnet9", nn.ReLU), layers("resnet9_mish", nn.Mish), layers("resnet9_mish", nn.ReLU)) == (8, 8, 0)
    assert (layers("resnet9_scaled", nn.Mish), layers("resnet9_scaled", nn.GroupNorm)) == (8, 10)


def test_scaled_residual_sums_are_normalized():
    block = next(m for m in models.MODELS["resnet9_scaled"]().modules() if isinstance(m, models.Residual))
    x = 9 * torch.randn(2, 128, 6, 6) + 4
    groups = block(x).reshape(2, 32, -1)
    torch.testing.assert_close(groups.mean(-1), torch.zeros(2, 32), atol=1e-4, rtol=0)
    torch.testing.assert_close(groups.std(-1, correction=0), torch.ones(2, 32), atol=1e-3, rtol=0)
    torch.testing.assert_close(block(x), block.norm(x + block.body(x)))


# -- runs ------------------------------------------------------------------------------------------------------


def test_a_run_repeats_exactly_and_spends_what_it_says():
    asked = job(noise_multiplier=runner.calibrate(TINY))
    seen = []
    one, other = runner.run(asked, seen.append), runner.run(asked)
    assert one.curves == other.curves and one.accuracy == one.curves["accuracy"][-1]
    assert one.epsilon == pytest.approx(TINY.epsilon, rel=1e-3) and one.epsilon <= TINY.epsilon
    before, (first, last) = [now for now in seen if not now.done], [now for now in seen if now.done]
    assert [before[0].what, before[-1].what] == ["checking", "training"]
    assert first.done < last.done == last.total == one.plan["steps"] and last.unit == "steps"
    losses = [f"training loss {loss:.3f}, epsilon" for loss in one.curves["train_loss"]]
    assert [now.words().rpartition(" ")[0] for now in (first, last)] == losses
    assert last.words().endswith(f" {one.epsilon:.2f}") and float(first.words().split()[-1]) < one.epsilon
    assert one.cold_seconds > 0 and one.seconds > 0
    assert "come from the seed 3" in one.statement and "Whoever knows a seed can take the noise away" in one.statement
    assert (one.data["train"], one.data["test"], one.data["name"]) == (1437, 360, "digits")


NUMBERS = {  # training loss and loss on the test data after two epochs, as they were when the version began
    1: {"dp-psasc": (1.751604, 1.370214), "dp-psasc-star": (1.770210, 1.392925), "non-private": (0.286163, 0.214578)},
}


@pytest.mark.parametrize("method", NUMBERS[1])
def test_the_same_seed_gives_the_same_numbers_in_one_version_of_the_numerics(method, monkeypatch):
    """If this fails because a run now draws, adds or steps otherwise, raise `provenance.NUMERICS` and add a line above:
    records of both versions would else stand in one table. The tolerance is rounding, of any machine."""
    monkeypatch.setattr(device, "name", lambda: "cpu")  # a GPU draws other noise
    done = runner.run(job(method, rate=1.2, config=TINY.replace(diagnostics=False)))
    assert done.numerics == provenance.NUMERICS
    found = (done.curves["train_loss"][1], done.loss)
    assert found == pytest.approx(NUMBERS[provenance.NUMERICS][method], rel=1e-4)


def test_diagnostics_are_off_unless_asked_for_and_say_that_they_are_not_private():
    assert not any(presets.PRESETS[name].diagnostics for name in presets.PRESETS)
    silent = runner.run(job(config=TINY.replace(diagnostics=False)))
    loud = runner.run(job())
    assert silent.diagnostics is None
    assert loud.diagnostics["not_private"] is True and "not private" in loud.diagnostics["note"]
    assert loud.diagnostics["norms"]["epochs"] == [2] and len(loud.diagnostics["mean_weight"]) == TINY.epochs
    assert silent.curves == loud.curves  # looking changes nothing


def test_evaluation_in_parts_is_evaluation_at_once(monkeypatch):
    data, model = digits(), models.digits_cnn()
    whole = runner.evaluate(model, data, TINY)
    monkeypatch.setattr(runner, "_EVALUATED", 7 * 64)
    assert runner.evaluate(model, data, TINY) == pytest.approx(whole)
    assert model.training


def test_pixels_are_shifted_and_divided_by_public_constants():
    config = TINY.replace(normalize=(0.5, 0.25))
    pixels = torch.tensor([0, 51, 255], dtype=torch.uint8)
    torch.testing.assert_close(runner.prepared(pixels, config), torch.tensor([-2.0, -1.2, 2.0]))
    assert runner.prepared(torch.tensor([0.3]), TINY).item() == pytest.approx(0.3)


def test_the_average_of_the_weights_is_what_is_measured(monkeypatch):
    """A moving average of what every step released, by hand, gives the recorded accuracy and loss.

    It warms up: after step t it keeps t/(t + 10) of itself, as long as that is less than it may.
    """
    config = TINY.replace(epochs=1, diagnostics=False, average=0.3)
    job = runner.Job(config=config, method="dp-sgd", seed=0, choice=Choice(rate=1.0, gamma1=0.1), noise_multiplier=1.0)
    average, kept, trained = [], [], runner._train_private

    def by_hand(run):
        average[:] = [p.detach().clone() for p in run.model.parameters()]
        for number, step in enumerate(trained(run), start=1):
            kept.append(min(0.3, number / (number + 10)))
            for a, p in zip(average, run.model.parameters(), strict=True):
                a.copy_(kept[-1] * a + (1 - kept[-1]) * p.detach())
            yield step

    monkeypatch.setattr(runner, "_train_private", by_hand)
    found = runner.run(job)
    data = runner.load(config, "final")
    model = models.MODELS[config.model](tuple(data.train_images.shape[1:]), data.classes)
    for p, a in zip(model.parameters(), average, strict=True):
        p.data = a
    accuracy, loss = runner.evaluate(model, data, config)
    assert found.accuracy == accuracy and found.loss == pytest.approx(loss, rel=1e-5)
    assert kept[0] == 1 / 11 and kept[-1] == 0.3  # both of its ways were taken
    plain = runner.run(dataclasses.replace(job, config=config.replace(average=0.0)))
    assert plain.loss != pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize("method", ["dp-sgd", "non-private"])
@pytest.mark.parametrize(
    ("schedule", "left"),
    [
        ("constant", lambda over: 1.0),
        ("linear", lambda over: 1 - over),
        ("cosine", lambda over: math.cos(math.pi * over / 2) ** 2),
    ],
)
def test_the_learning_rate_falls_over_a_whole_run(schedule, left, method, monkeypatch):
    """Full at the first step, next to nothing at the last; a try, which is shorter, goes all the way too."""
    config = TINY.replace(epochs=3, search_epochs=2, diagnostics=False, schedule=schedule)
    rates, make = [], runner._optimizer

    def watched(*args):
        optimizer, falling = make(*args)
        optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
        return optimizer, falling

    monkeypatch.setattr(runner, "_optimizer", watched)
    for role, epochs in (("final", 3), ("search", 2)):
        rates.clear()
        asked = dataclasses.replace(job(method, role=role), config=config)
        runner.run(asked)
        steps = runner.sampling(config, runner.load(config, role).size).steps(epochs)
        assert rates == pytest.approx([asked.learning_rate * left(k / steps) for k in range(steps)])


@pytest.mark.parametrize(("epochs", "compiled"), [(2, False), (250, True)])
def test_long_runs_are_compiled_on_the_cpu_too(epochs, compiled, monkeypatch):
    asked = []
    monkeypatch.setattr(runner, "privatize", lambda *_, **options: asked.append(options["compile"]))
    with pytest.raises(AttributeError):  # nothing to train with
        runner.run(job("dp-sgd", config=TINY.replace(epochs=epochs)))
    assert asked == [compiled]


def test_a_rehearsal_takes_one_step_and_leaves_nothing(monkeypatch):
    steps = []
    taken = Private.step
    monkeypatch.setattr(Private, "step", lambda self, *rest: steps.append(taken(self, *rest)) or steps[-1])
    runner.rehearse(job("dp-psasc-star", role="search", choice=Choice(rate=0.1, K0=1, gamma0=0.5)))
    assert len(steps) == 1


# -- diagnostics -----------------------------------------------------------------------------------------------


def by_hand(config, choice, seed):
    """Cosines of a run's steps from what the weights did: g_k = M_k - (1 - γ1)·M_(k-1), M_k = (w_k - w_(k+1))/η."""
    data = runner.load(config, "final")
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = models.MODELS[config.model]((1, 8, 8), 10)
    rate = choice.rate * config.s / config.C * choice.gamma1
    sampling = Poisson(size=data.size, batch=config.batch)
    plan = Plan(
        scaling=PSASC(C=config.C, s=config.s, r=config.r), sampling=sampling, epochs=config.epochs,
        noise_multiplier=1.0, momentum=HeavyBall(gamma1=choice.gamma1),
    )  # fmt: skip
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=rate), plan, seed=seed)
    draws, cosines, smoothed, velocity = sampling.draws(Key(seed).generator("sampling")), [], [], 0.0
    for batch in private.batches(TensorDataset(data.train_images, data.train_labels)):
        before = copy.deepcopy(model)
        private.step(batch, lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1], reduction="none"))
        chosen = torch.from_numpy(next(draws))
        nn.functional.cross_entropy(before(data.train_images[chosen]), data.train_labels[chosen]).backward()
        mean = torch.cat([p.grad.flatten() for p in before.parameters()]).double()
        moved = [
            (p - q).detach().flatten().double() for p, q in zip(before.parameters(), model.parameters(), strict=True)
        ]
        last, velocity = velocity, torch.cat(moved) / rate
        cosines.append(torch.cosine_similarity(velocity - (1 - choice.gamma1) * last, mean, dim=0).item())
        smoothed.append(torch.cosine_similarity(velocity, mean, dim=0).item())
    return cosines, smoothed


def test_similarity_is_that_of_a_loop_by_hand():
    """The released gradient is recovered from the velocity: the velocity's own cosines are others."""
    config, choice = TINY.replace(epochs=1), Choice(rate=2.0, gamma1=0.3)
    told = runner.run(job(config=config, choice=choice)).diagnostics["similarity"]
    cosines, smoothed = by_hand(config, choice, 3)
    assert told["steps"] == len(cosines) == sum(told["counts"])
    assert told["mean"] == pytest.approx(np.mean(cosines), abs=1e-4)
    assert abs(np.mean(smoothed) - np.mean(cosines)) > 0.01
    drawn = np.average(told["cosine"], weights=told["counts"])
    assert drawn == pytest.approx(told["mean"], abs=told["bin_width"] / 2)


@pytest.mark.parametrize("gamma1", [0.2, 1.0])
def test_released_takes_the_outer_momentum_out(gamma1):
    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter], lr=0.0)
    released = diagnostics.Released(optimizer, {"w": parameter}, gamma1)
    velocity = torch.zeros(3)
    for step in range(4):
        gradient = torch.tensor([1.0, -2.0, 3.0]) * (step + 1)
        velocity = (1 - gamma1) * velocity + gradient
        parameter.grad = velocity.clone()
        optimizer.step()
        torch.testing.assert_close(released.gradient["w"], gradient)


def test_cosine_is_over_all_parameters_together():
    one = {"a": torch.tensor([3.0]), "b": torch.tensor([[0.0, 4.0]])}
    other = {"a": torch.tensor([1.0]), "b": torch.tensor([[5.0, 0.0]])}
    assert diagnostics.cosine(one, other).item() == pytest.approx(3 / (5 * 26**0.5))
    zero = {name: torch.zeros_like(value) for name, value in one.items()}
    assert torch.isnan(diagnostics.cosine(one, zero))
    kept = diagnostics.Watch()
    assert kept.to_dict() is None
    kept.cosines.append(diagnostics.cosine(one, zero))  # a batch without samples
    assert kept.to_dict() is None
    kept.cosines.append(diagnostics.cosine(one, one))
    told = kept.to_dict()["similarity"]
    assert told["mean"] == pytest.approx(1) and told["steps"] == 1


def test_norms_are_counted_in_their_decades():
    kept = diagnostics.Watch()
    kept.on = True
    kept.saw(torch.tensor([0.0, 1e-30, 1.0, 1.0, 1e9, float("inf")]), torch.tensor([2.0, 2.0, 0.5, 0.7, 0.1, 0.0]))
    kept.epoch(7)
    told = kept.to_dict()["norms"]
    assert sum(told["counts"]) == 5 and told["not_finite"] == 1 and told["epochs"] == [7]
    place = int(np.argmin(np.abs(np.array(told["log10_norm"]))))
    assert told["counts"][place] == 2 and told["mean_weight"][place] == pytest.approx(0.6)


# -- without privacy -------------------------------------------------------------------------------------------


def test_plain_runs_see_the_batches_of_private_ones():
    """Both train on the very same draws: at learning rate ~0 their losses agree epoch by epoch."""
    private, plain = (runner.run(job(name, rate=1e-30, seed=1)) for name in ("dp-sgd", "non-private"))
    means = [np.average(r.curves["train_loss"]) for r in (private, plain)]
    assert means[0] == pytest.approx(means[1], rel=1e-5)


def test_plain_training_does_not_depend_on_its_parts():
    whole, parts = (
        runner.run(job("non-private", config=TINY.replace(epochs=1, micro_batch=rows), rate=0.5)) for rows in (None, 7)
    )
    assert parts.loss == pytest.approx(whole.loss, rel=1e-4)
    assert parts.curves["train_loss"] == pytest.approx(whole.curves["train_loss"], rel=1e-4)


def test_an_empty_plain_batch_moves_nothing(monkeypatch):
    """Momentum goes on, as in a private step, and the loss of no sample is none."""
    config = TINY.replace(epochs=1)
    data = runner.load(config, "final")
    monkeypatch.setattr(Poisson, "draws", lambda self, _: iter([np.arange(8), np.arange(0)]))
    monkeypatch.setattr(Poisson, "steps", lambda self, _: 2)
    training = runner._Training(job("non-private", config=config.replace(micro_batch=4)), data, None)
    weights, losses = [vector(training.model)], []
    for loss in training.steps():
        weights.append(vector(training.model))
        losses.append(loss.item())
    first, second = weights[1] - weights[0], weights[2] - weights[1]
    assert first.norm() > 0 and torch.allclose(second, 0.9 * first, rtol=1e-3, atol=1e-7)
    assert math.isfinite(losses[0]) and math.isnan(losses[1])


@pytest.mark.parametrize(("momentum", "kept"), [("heavy-ball", 0.9), ("inner-outer", 0.9), ("disk", 0), ("none", 0)])
def test_plain_sgd_goes_as_far_as_its_rate_says(momentum, kept, monkeypatch):
    """Rate × 1 where a private method has no outer momentum, rate × γ1 with a heavy ball, which goes 1/γ1 as far."""
    made, make = [], runner._optimizer
    monkeypatch.setattr(runner, "_optimizer", lambda *args: made.append(make(*args)) or made[-1])
    next(runner.steps(job("non-private", config=TINY.replace(epochs=1, momentum=momentum), rate=1.2)))
    (group,) = made[0][0].param_groups
    assert group["momentum"] == pytest.approx(kept) and group["lr"] / (1 - kept) == pytest.approx(1.2)


def test_each_seed_of_the_search_has_a_part_of_its_own():
    parts = [runner.load(TINY, "search", SEARCH_SEED + k).test_images for k in range(3)]
    assert {len(part) for part in parts} == {287}
    assert not any(torch.equal(parts[0], other) for other in parts[1:])
    assert torch.equal(parts[0], hold_out(digits(), TINY.held_out).test_images)  # the first is that of older records


# Loss and accuracy after the epoch below, by the version of the numerics. 1: torch 2.13 on a CPU, the code of the
# records in results/ as it was before the version was noted.
NUMERICS = {1: (2.0969, 0.3139)}


def test_a_seeded_run_gives_the_numbers_of_its_version():
    """If it does not, and is right: raise `provenance.NUMERICS`, so that old records are not taken for new ones."""
    config = TINY.replace(epochs=1, batch=60, train_size=300, diagnostics=False)
    record = runner.run(job(config=config, seed=0, choice=Choice(rate=1.0)))
    assert record.numerics == provenance.NUMERICS
    assert (record.loss, record.accuracy) == pytest.approx(NUMERICS[provenance.NUMERICS], abs=6e-3)


@pytest.mark.parametrize(("optimizer", "name"), [("sgd", "SGD"), ("nadam", "NAdam")])
def test_a_plain_run_names_its_optimizer(optimizer, name):
    record = runner.run(job("non-private", config=TINY.replace(epochs=1, optimizer=optimizer), rate=0.01))
    assert f"plain {name} without" in record.statement and record.title == f"Non-private {name}"


def test_the_device_is_the_one_that_is_asked_for(monkeypatch):
    monkeypatch.setenv("DPSCALE_DEVICE", "")
    device.use("cpu")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert device.name() == "cpu" and not device.on_gpu()
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(ValueError, match=r"'device' parameter of dpscale must be cpu, or cuda .* Got 'cuda:1' instead"):
        device.use("cuda:1")
