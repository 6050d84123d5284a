"""What the best presets are made of: views, averages, standardized weights, scattering, a public network trained on."""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy import ndimage
from torch import nn

import dpscale
from dpscale.engine.reference import per_sample_gradients
from dpscale.lab import compare, models, options, paper, presets, records, report, runner
from dpscale.lab.augment import AUGMENT, augmented
from dpscale.lab.data import Data
from dpscale.lab.encoders import ResNet50
from dpscale.lab.features import ENCODERS, write
from dpscale.lab.models import FineTuned
from dpscale.lab.presets import METHODS, Choice, methods
from dpscale.lab.scattering import SHAPE, Scattering, scattered

from .engine.cases import check_equal
from .helpers import loss_fn
from .seeding import seeded


def images(n=40, shape=(3, 9, 12)):
    return torch.randint(0, 256, (n, *shape), generator=seeded(0), dtype=torch.uint8)


# -- views -----------------------------------------------------------------------------------------------------


def moves(n, reach):
    """The moves that `crop` and `shift` draw, and that they go all the way to either side."""
    by = torch.randint(-reach, reach + 1, (2, n, 1), generator=seeded(5))[..., 0].T.tolist()
    assert {k for move in by for k in move} == set(range(-reach, reach + 1))
    return by


def cropped(image, move, reach, mode):
    padded = np.pad(image, ((0, 0), (reach, reach), (reach, reach)), mode=mode)
    (down, right), (height, width) = move, image.shape[1:]
    return padded[:, reach + down : reach + down + height, reach + right : reach + right + width]


@pytest.mark.parametrize(("name", "mode"), [("crop", "reflect"), ("shift", "constant")])
def test_crops_and_shifts_are_those_of_a_loop_over_images(name, mode):
    x = images()
    expected = [cropped(one, move, 2, mode) for one, move in zip(x.numpy(), moves(40, 2), strict=True)]
    assert (AUGMENT[name](x, 2.0, seeded(5)).numpy() == np.stack(expected)).all()


def test_mirrors_are_those_of_a_loop_over_images():
    x, chosen = images(), torch.rand(40, generator=seeded(5)) < 0.5
    expected = [one[:, :, ::-1] if turned else one for one, turned in zip(x.numpy(), chosen, strict=True)]
    assert 10 < chosen.sum() < 30
    assert (AUGMENT["mirror"](x, 0.5, seeded(5)).numpy() == np.stack(expected)).all()


def test_rotations_are_those_of_a_loop_over_images():
    """SciPy's interpolation at the coordinates that a turn by hand gives."""
    x, share = images(12), torch.rand(12, generator=seeded(5)).double()
    got = AUGMENT["rotate"](x, 15.0, seeded(5))
    rows, columns = np.mgrid[:9, :12]
    for one, angle, view in zip(x.numpy(), np.radians(15) * (2 * share.numpy() - 1), got, strict=True):
        down, right = rows - 4.0, columns - 5.5
        at = (
            4 + math.sin(angle) * right + math.cos(angle) * down,
            5.5 + math.cos(angle) * right - math.sin(angle) * down,
        )
        expected = [ndimage.map_coordinates(band / 255, at, order=1, mode="nearest") for band in one.astype(float)]
        np.testing.assert_allclose(view.numpy(), np.stack(expected), atol=1e-5)


def test_transforms_follow_each_other_and_none_changes_the_images():
    x = images()
    before, amounts = x.clone(), {"mirror": 0.5, "crop": 2.0}
    random = seeded(5)
    expected = AUGMENT["mirror"](AUGMENT["crop"](x, 2.0, random), 0.5, random)
    assert torch.equal(augmented(x, amounts, seeded(5)), expected) and torch.equal(x, before)


def job(config, method="dp-psac"):
    choice = Choice(rate=1.0, gamma1=0.1)
    return runner.Job(config=config, method=method, seed=0, choice=choice, noise_multiplier=1.0)


VIEWED = presets.PRESETS["digits"].replace(views=3, augment={"shift": 1.0, "rotate": 10.0}, batch=480, epochs=1)


def test_a_samples_gradient_is_the_mean_over_its_views():
    """By brute force, for every sample; and no sample moves the sum by more than the bound."""
    model = models.digits_cnn()
    x, y = torch.rand(8, 1, 8, 8, generator=seeded(1)), torch.arange(8)
    batch = runner._viewed(job(VIEWED), torch.device("cpu"))((x, y))
    assert batch[0].shape == (8, 3, 1, 8, 8) and not torch.equal(batch[0][:, 0], batch[0][:, 1])
    rule = METHODS["dp-psac"].scaling(VIEWED)
    out = dpscale.scaled_sum(model, runner._losses_of(VIEWED), batch, rule)
    each = [per_sample_gradients(model, loss_fn, (batch[0][:, k], y)) for k in range(3)]
    mean = torch.cat([torch.stack([g[n] for g in each]).mean(0).flatten(1) for n in each[0]], 1)
    torch.testing.assert_close(out.norms, mean.norm(dim=1), rtol=1e-4, atol=1e-6)
    scaled = mean * rule.weight(mean.norm(dim=1))[:, None]
    assert scaled.norm(dim=1).max() <= rule.bound
    got = torch.cat([out.grads[n].flatten() for n in each[0]])
    torch.testing.assert_close(got, scaled.sum(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("method", ["dp-psac", "non-private"])
def test_a_run_trains_on_views(method, monkeypatch):
    seen, losses_of = [], runner._losses_of

    def watched(config):
        losses = losses_of(config)
        return lambda model, batch: seen.append(batch[0].shape[1:]) or losses(model, batch)

    monkeypatch.setattr(runner, "_losses_of", watched)
    next(runner.steps(job(VIEWED, method)))
    assert set(seen) == {(3, 1, 8, 8)}


def test_records_from_before_there_were_recipes_are_those_without():
    config = presets.PRESETS["digits"].to_dict()
    before = {name: value for name, value in config.items() if name not in ("views", "augment", "standardize")}
    assert records.asked(config, "final") == records.asked(before, "final")
    viewed = VIEWED.replace(standardize=True).to_dict()
    assert {"views", "augment", "standardize"} < set(records.asked(viewed, "final"))


def test_levers_are_set_one_at_a_time():
    values = ["views=4", 'augment={"mirror": 0.5, "crop": 16}', "average=0.99", "standardize=true", "batch=512"]
    config = options.configured("imagenette-best", options.read(values))
    assert config.to_dict()["augment"] == {"mirror": 0.5, "crop": 16.0}
    assert (config.views, config.average, config.standardize, config.batch) == (4, 0.99, True, 512)


# -- standardized weights --------------------------------------------------------------------------------------


def test_standardized_weights_are_the_engines_too():
    """The oracle's sum, and in the forward each filter has mean 0 and norm 1, as computed filter by filter."""
    torch.manual_seed(0)
    plain = models.digits_cnn()
    given = plain[0].weight.detach().double().clone()
    model = models.standardized(plain).double()
    for before, after in zip(given, model[0].weight, strict=True):
        centred = before - before.sum() / before.numel()
        torch.testing.assert_close(after, centred / (centred.square().sum() + 1e-5).sqrt())
    batch = torch.rand(9, 1, 8, 8, dtype=torch.float64, generator=seeded(1)), torch.arange(9)
    assert dpscale.check(model, loss_fn, batch)
    out = check_equal(model, batch, dpscale.PSAC(C=0.3, r=1e-2))
    assert out.grads["0.parametrizations.weight.original"].abs().max() > 0


def test_a_run_standardizes_every_convolution():
    made = runner.untrained(VIEWED.replace(standardize=True), runner.load(VIEWED, "final"))
    assert sum(isinstance(m, models.Standardized) for m in made.modules()) == 2


# -- scattering ------------------------------------------------------------------------------------------------

KYMATIO = [
    290, 31.6, 35.4, 28.5, 16.2, 13.2, 19.2, 23.6, 24.3, 57.6, 81.6, 49.9, 15.1, 16.9, 39.1, 56.9, 46, 4.24, 3.91,
    2.85, 4.26, 2.88, 0.96, 0.813, 2.9, 2.63, 5.19, 1.59, 1.94, 1.33, 0.439, 0.327, 1.58, 1.38, 4.72, 1.05, 0.121,
    0.134, 0.0579, 0.0477, 0.133, 2.25, 2.39, 0.993, 1.39, 0.807, 0.297, 0.304, 1.57, 2.57, 0.718, 1.1, 1.6, 0.983,
    1.13, 2.66, 1.98, 0.287, 0.101, 0.114, 0.104, 0.124, 1.59, 4.42, 2.05, 2.35, 0.639, 1.4, 2.19, 1.46, 1.7, 4.54,
    2.58, 3.64, 1.28, 3.01, 4.75, 3.09, 1.27, 2.18, 2.73,
]  # fmt: skip
"""ScatteringTorch2D(J=2, shape=(28, 28), L=8) of kymatio 0.3.0 on the image below, × 1000, at row 3 and column 2."""


def test_scattering_is_kymatios():
    """Within what comes of kymatio's dropping pixels between layers, each of the three orders by itself."""
    u = torch.arange(28.0)
    image = (torch.sin(u[:, None] / 3) * torch.cos(u / 2 + u[:, None] / 7) + 1) / 2
    got, expected = 1000 * Scattering()(image[None])[0, :, 3, 2], torch.tensor(KYMATIO)
    for order in (slice(0, 1), slice(1, 17), slice(17, 81)):
        assert (got[order] - expected[order]).norm() < 5e-3 * expected[order].norm()


def synthetic(shape, n=20, classes=10):
    """Images of noise whose brightness tells the class, so that there is something to learn."""

    def some(count, seed):
        labels = torch.arange(count) % classes
        noise = torch.randint(0, 100, (count, *shape), generator=seeded(seed))
        return (noise + 15 * labels[:, None, None, None]).to(torch.uint8), labels

    (train, labels), (test, test_labels) = some(n, 0), some(20, 1)
    return Data(name="synthetic", train_images=train, train_labels=labels, test_images=test, test_labels=test_labels,
                classes=classes)  # fmt: skip


def test_scattering_features_are_of_each_image_alone():
    data = synthetic((1, 28, 28), n=6)
    found = scattered(data)
    alone = scattered(dataclasses.replace(data, train_images=data.train_images[3:4]))
    assert found.train_images.shape == (6, *SHAPE) and found.train_images.dtype == torch.float16
    torch.testing.assert_close(alone.train_images[0], found.train_images[3], rtol=1e-2, atol=1e-3)
    assert found.provenance["features"]["encoder"] == "scattering"


# -- a public network trained on -------------------------------------------------------------------------------

TINY = dataclasses.replace(
    ENCODERS["resnet50-imagenet"], features=64, build=partial(ResNet50, blocks=(1, 1, 1, 2), width=2, classes=5)
)


def public(folder):
    """A tiny network in the data folder, with statistics of its own, in place of the public one."""
    torch.manual_seed(1)
    state = {
        name: torch.rand_like(value) + 0.5 if ".norm." in name else value
        for name, value in TINY.build().state_dict().items()
    }
    write(folder / "encoders" / TINY.files[0], state, {})
    return state


def test_frozen_batch_norm_couples_nothing(tmp_path):
    """Accepted, the oracle's sum, and only convolutions of the last stages and the head have gradients."""
    state = public(tmp_path)
    batch = torch.rand(9, 3, 16, 16, generator=seeded(1)), torch.arange(9) % 5
    for stages in (1, 2):
        model = FineTuned(TINY, 5, stages=stages, size=32)
        model.load_public(tmp_path)
        assert torch.equal(model.body.state_dict()["stem.conv.weight"], state["stem.conv.weight"])
        nn.init.normal_(model.head.weight)  # at zero the layers before it have no gradient
        assert dpscale.check(model, loss_fn, batch)
        out = check_equal(model, batch, dpscale.PSAC(C=0.3, r=1e-2), loss=loss_fn, rtol=1e-5)
        assert all(g.abs().max() > 0 for g in out.grads.values())
        stage = {name.split(".")[2] for name in out.grads if name.startswith("body")}
        assert stage == ({"3"} if stages == 1 else {"2", "3"})
        assert all(".conv." in name or name.startswith("head.") for name in out.grads)


# -- presets ---------------------------------------------------------------------------------------------------

SHAPES = {
    "mnist-best": (1, 28, 28), "fashion-mnist-best": (1, 28, 28), "cifar10-best": (3, 16, 16),
    "celeba-male-best": (3, 16, 16), "imagenette-best": (3, 20, 16),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_the_best_presets_run_from_end_to_end(name, tmp_path, monkeypatch):
    """On a few synthetic images: the preset's budget is spent, and records, statement and report are those of any."""
    assert set(SHAPES) == {name for name in presets.PRESETS if name.endswith("-best")}
    monkeypatch.setenv("DPSCALE_DATA", str(tmp_path))
    monkeypatch.setattr(runner, "load_data", lambda *_, **__: synthetic(SHAPES[name]))
    for loaded in (runner._whole, runner._on_device):
        loaded.cache_clear()
    monkeypatch.setitem(ENCODERS, TINY.name, TINY)
    public(tmp_path)
    config = options.configured(name, {"epochs": 1, "batch": 10, "tune": False})
    found = compare.compare(config, methods("dp-psac"), [0], tmp_path / name, at_once=1).records
    (record,) = found
    assert record.epsilon == pytest.approx(config.epsilon, rel=1e-2) and record.epsilon <= config.epsilon
    assert "seed 0" in record.statement and record.config["preset"] == name
    assert record.choice["rate"] == config.rates["dp-psac"] and math.isfinite(record.loss)
    assert ("weights_sha256" in record.data) == (name == "cifar10-best")
    path = report.write_all(tmp_path / name, paper.load(tmp_path / name))
    assert ("2 views of each sample" in path.read_text()) == bool(config.augment)
    for loaded in (runner._whole, runner._on_device):
        loaded.cache_clear()
