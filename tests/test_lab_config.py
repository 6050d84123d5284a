"""What an experiment is: presets, configurations, methods, and values on the command line."""

import json

import pytest

from dpscale import PSAC, PSASC
from dpscale.lab import compare, options, paper, presets
from dpscale.lab.presets import METHODS, Choice
from dpscale.momentum import InnerOuter

DIGITS = presets.PRESETS["digits"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"epsilon": 0.0}, "'epsilon' parameter of Config must be greater than 0. Got 0.0 instead"),
        ({"epsilon": float("inf")}, "'epsilon' parameter of Config must be a finite number. Got inf"),
        ({"epsilon": "three"}, "'epsilon' parameter of Config must be a valid number"),
        ({"delta": 1.0}, "'delta' parameter of Config must be less than 1"),
        ({"epochs": 0}, "'epochs' parameter of Config must be greater than or equal to 1"),
        ({"grid": ()}, "'grid' parameter of Config"),
        ({"grid": (1.0, 1e300)}, "'grid.1' parameter of Config must be less than or equal to 1000000000000"),
        ({"momentum": "fast"}, "'momentum' parameter of Config must be one of heavy-ball, inner-outer, disk"),
        ({"gamma1": 0.0}, "'gamma1' parameter of HeavyBall must be above 0 and at most 1"),
        ({"K0": -1}, "'K0' parameter of InnerOuter must be an integer"),
        ({"gamma1s": (0.1, 2.0)}, "'gamma1' parameter of HeavyBall must be above 0 and at most 1"),
        ({"inner": ((1, 0.0),)}, "'gamma0' parameter of InnerOuter must be"),
        ({"inner": ((1,),)}, "'inner.0.1' parameter of Config must be given"),
        ({"precision": "fp8"}, "'precision' parameter of Config must be 'float32' or 'bf16'"),
        ({"optimizer": "adam"}, "'optimizer' parameter of Config must be 'sgd' or 'nadam'"),
        ({"encoder": "clip"}, "'encoder' parameter of Config must be one of None, simclrv2"),
        ({"model": "vit"}, "'model' parameter of Config must be one of digits_cnn, paper_cnn"),
        ({"rates": {"dp-magic": 1}}, "'rates' parameter of Config must be given for methods: non-private, dp-sgd"),
        ({"normalize": (0, 0)}, "'normalize' parameter of Config must be .a, b. with b not 0"),
        ({"augment": {"blur": 1}}, "parameter of Config must be one of crop, shift, mirror, rotate"),
        ({"views": 4}, "'views' parameter of Config must be 1 without augment. Got 4 instead. A view is an image"),
        ({"colour": 1}, "'colour' parameter of Config must be left out: there is no such value"),
    ],
)
def test_a_bad_config_is_refused_by_name(change, text):
    with pytest.raises(ValueError, match=text):
        DIGITS.replace(**change)


def test_a_try_is_made_once():
    assert DIGITS.replace(grid=(1, 0.5, 1.0)).grid == (1.0, 0.5)


def test_controls_split_what_s_does():
    at = DIGITS.at_rate(0.25)
    rate = {name: method.learning_rate(at, at.given(method)) for name, method in METHODS.items()}
    psasc, lr, r = (METHODS[name] for name in ("dp-psasc", "psac-lr-over-s", "psac-r-over-s"))
    assert rate["dp-psasc"] == pytest.approx(0.25 * at.s / at.C * at.gamma1)
    assert rate[lr.name] == pytest.approx(rate["dp-psasc"] / at.s)
    assert rate[r.name] == pytest.approx(rate["dp-psasc"])
    assert psasc.scaling(at) == PSASC(C=at.C, s=at.s, r=at.r)
    assert lr.scaling(at) == PSAC(C=at.C, r=at.r)
    assert r.scaling(at) == PSAC(C=at.C, r=at.r / at.s)


def test_controls_are_left_out_where_s_cancels():
    nadam = DIGITS.replace(optimizer="nadam")
    assert [each.name for each in presets.methods(None, DIGITS)] == list(METHODS)
    assert not any(each.follows for each in presets.methods(None, nadam)) and len(presets.methods(None, nadam)) == 6
    with pytest.raises(ValueError, match=r"without the controls under NAdam. Got \['psac-lr-over-s'\] instead. NAdam"):
        presets.methods("dp-sgd,psac-lr-over-s", nadam)


@pytest.mark.parametrize("gamma1", [0.1, 0.3, 1.0])
@pytest.mark.parametrize("name", presets.searched(METHODS))
def test_rates_are_normalized_by_bound_and_outer_momentum(name, gamma1):
    method, choice = METHODS[name], Choice(rate=0.25, gamma1=gamma1, K0=1, gamma0=0.5)
    assert method.learning_rate(DIGITS, choice) * method.bound(DIGITS) / gamma1 == pytest.approx(0.25)
    assert method.learning_rate(DIGITS.replace(optimizer="nadam"), choice) == 0.25  # it divides by the gradient's size


def test_without_outer_momentum_gamma1_is_no_part_of_the_rate():
    plain = DIGITS.replace(momentum="none")
    assert METHODS["dp-sgd"].learning_rate(plain, Choice(rate=0.3, gamma1=0.1)) == pytest.approx(0.3 / plain.C)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_every_method_has_the_same_tries(name):
    one = presets.PRESETS[name]
    pairs = {(rate, gamma1) for rate in one.grid for gamma1 in one.gamma1s or (one.gamma1,)}
    for method in map(METHODS.get, presets.searched(METHODS)):
        tries = one.tries(method)
        assert len(tries) == len(pairs) and {(t.rate, t.gamma1) for t in tries} == pairs
        own = isinstance(method.momentum_of(one), InnerOuter)
        assert own == (method.name == "dp-psasc-star") == all(t.K0 is not None for t in tries)
    assert not one.inner or {(t.K0, t.gamma0) for t in one.tries(METHODS["dp-psasc-star"])} == set(one.inner)


def test_inner_momenta_take_turns_over_the_tries_also_when_the_grid_grows():
    """A Latin square: each pair (K0, γ0) meets each rate once and each outer momentum once."""
    inner = ((1, 0.5), (2, 0.5), (1, 0.9), (2, 0.9))
    one = DIGITS.replace(grid=(1.0, 2.0, 4.0, 8.0), gamma1s=(0.1, 0.2, 0.3, 0.4), inner=inner)
    tries = one.tries(METHODS["dp-psasc-star"])
    for pair in inner:
        met = [t for t in tries if (t.K0, t.gamma0) == pair]
        assert {t.rate for t in met} == set(one.grid) and {t.gamma1 for t in met} == set(one.gamma1s)
    wider = one.replace(grid=compare._wider(one.grid, [1.0, 8.0])).tries(METHODS["dp-psasc-star"])
    assert wider[: len(tries)] == tries and {t.rate for t in wider[len(tries) :]} == {0.5, 16.0}


@pytest.mark.parametrize(
    ("grid", "best", "wider"),
    [
        ((0.3, 0.6, 1.2), [0.6], ()),
        ((0.3, 0.6, 1.2), [1.2, 0.6], (2.4,)),
        ((1.2, 0.3, 0.6), [0.3], (0.15,)),
        ((1.0, 3.0), [1.0, 3.0], (0.333333, 9.0)),
        ((1.0,), [1.0], ()),
    ],
)
def test_a_grid_grows_where_the_best_is_at_its_end(grid, best, wider):
    assert compare._wider(grid, best) == pytest.approx(grid + wider)


def test_a_choice_tells_itself_and_comes_back():
    choice = Choice(rate=1.2, gamma1=0.1, K0=2, gamma0=0.5)
    assert choice.label() == "1.2, γ1 0.1, K0 2, γ0 0.5" and Choice(rate=16).label() == "16"
    assert Choice(**json.loads(json.dumps(choice.to_dict()))) == choice
    assert Choice(rate=0.5).to_dict() == {"rate": 0.5}


def test_one_experiment_has_one_record_however_its_numbers_are_written():
    assert json.dumps(Choice(rate=1, gamma1=1, K0=2.0, gamma0=1).to_dict()) == (
        '{"rate": 1.0, "gamma1": 1.0, "K0": 2, "gamma0": 1.0}'
    )
    words = ["grid=[1]", "gamma1s=[1]", "inner=[[1.0, 1]]", "normalize=[0, 1]", "--epsilon", "3", "average=0", "K0=2.0"]
    whole = options.configured("digits", options.read([*words[:2], *words[3:7]]))
    broken = DIGITS.replace(grid=(1.0,), gamma1s=(1.0,), normalize=(0.0, 1.0), epsilon=3.0, average=0.0)
    assert json.dumps(whole.to_dict()) == json.dumps(broken.to_dict())
    assert options.configured("digits", options.read(words[-1:])).K0 == 2


# N, B, epochs, r, C, ε, δ, s and the accuracies of DP-SGD, Auto-S, PSAC, PSASC, PSASC*, as the paper prints them
TABLES = {
    "mnist": (60_000, 512, 20, 1e-4, 0.3, 3, 1e-5, 0.9, (97.35, 97.95, 98.11, 98.37, 98.65)),
    "fashion-mnist": (40_000, 512, 60, 1e-3, 0.25, 9, 1e-5, 0.55, (85.59, 86.15, 86.36, 86.91, 87.22)),
    "cifar10-simclr": (50_000, 1024, 40, 1e-4, 0.1, 2, 1e-5, 0.8, (92.24, 92.65, 92.85, 93.12, 93.36)),
    "celeba-male": (162_079, 512, 10, 1e-4, 0.2, 8, 5e-6, 0.45, (94.79, 95.12, 95.2, 95.36, 95.61)),
    "imagenette": (9_464, 256, 50, 0.01, 0.2, 8, 1e-4, 0.8, (63.61, 63.87, 64.21, 65.26, 66.79)),
}


def test_presets_have_the_papers_settings():
    assert tuple(TABLES) == paper.PRESETS
    for name, (size, *wanted, accuracies) in TABLES.items():
        c = presets.PRESETS[name]
        assert [c.batch, c.epochs, c.r, c.C, c.epsilon, c.delta, c.s] == wanted and paper.SIZES[name] == size
        assert tuple(paper.ACCURACY[name].values()) == accuracies
        assert list(paper.ACCURACY[name]) == ["dp-sgd", "auto-s", "dp-psac", "dp-psasc", "dp-psasc-star"]
    assert presets.PRESETS["fashion-mnist"].train_size == 40_000


@pytest.mark.parametrize(("name", "tight", "by_rdp"), [("mnist", 0.8917, 0.9378), ("imagenette", 0.9114, 0.9577)])
def test_the_papers_settings_come_to_known_noise(name, tight, by_rdp):
    (one,) = paper.settings([presets.PRESETS[name]])
    assert (one["noise_multiplier"], one["noise_multiplier_rdp"]) == pytest.approx((tight, by_rdp), abs=2e-4)


def test_every_preset_is_searched_with_several_seeds_and_takes_no_diagnostics():
    for one in presets.PRESETS.values():
        assert one.search_seeds >= 3 and one.widen >= 8 and not one.diagnostics
        one.require_fitting()


# -- values on the command line --------------------------------------------------------------------------------


def test_values_are_read_in_every_form():
    words = ["epochs=3", "--batch", "64", "--train-size=5", "--set", "held_out=0.2", "tune=false", "--K0", "1",
             "grid=[0.5, 1]", "note=mine", "encoder=null", "--rate", "0.5", 'augment={"mirror": 0.5}']  # fmt: skip
    assert options.read(words) == {
        "epochs": 3, "batch": 64, "train_size": 5, "held_out": 0.2, "tune": False, "K0": 1, "grid": [0.5, 1],
        "note": "mine", "encoder": None, "rate": 0.5, "augment": {"mirror": 0.5},
    }  # fmt: skip
    assert options.read(["epochs=3", "--epochs", "3"]) == {"epochs": 3}
    with pytest.raises(ValueError, match=r"epochs is given twice, as 3 and as 5. Give it once"):
        options.read(["--epochs", "3", "epochs=5"])
    with pytest.raises(ValueError, match=r"=VALUE is missing"):
        options.read(["held_out"])


def test_values_change_a_preset_and_a_momentum_that_is_given_is_not_searched():
    one = options.configured("mnist", {"gamma1": 0.2, "K0": 3, "epochs": 2})
    assert one.gamma1s == (0.2,) and one.inner == ((3, one.gamma0),) and one.epochs == 2
    assert options.configured("mnist").gamma1s == presets.PRESETS["mnist"].gamma1s
    given = options.configured("digits", {"rate": 0.5, "tune": False})
    assert not given.tune and set(given.rates.values()) == {0.5}
    assert options.configured("celeba-male", {"micro_batch": None}).micro_batch is None
    both = options.configured("cifar10-simclr", {"encoder": None, "model": "resnet9"})  # looked at together
    assert (both.encoder, both.model) == (None, "resnet9")


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"rate": 0.5, "grid": [1]}, "Beside rate, grid would do nothing. Leave out one of the two."),
        ({"rate": 0.5, "tune": True}, "Beside rate, tune would do nothing"),
        ({"gamma1": 0.5, "gamma1s": [0.1]}, "Beside gamma1, gamma1s would do nothing"),
        ({"K0": 1, "inner": [[1, 0.5]]}, "Beside K0 or gamma0, inner would do nothing"),
        ({"sampling": "full-batch", "batch": 64}, "Beside sampling=full-batch, batch would do nothing"),
        ({"colour": 1}, "'colour' parameter of dpscale must be left out: the values of a preset are C, K0, augment"),
        ({"model": "paper_cnn"}, r"takes the samples of digits, of shape \(1, 8, 8\). Got 'paper_cnn'"),
        ({"model": "probe"}, "Choose one of digits_cnn, resnet9, resnet9_mish, resnet9_scaled."),
    ],
)
def test_values_that_contradict_each_other_or_do_not_fit_are_refused(values, text):
    with pytest.raises(ValueError, match=text):
        options.configured("digits", values)


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize("name", ["digits", "fashion-mnist", "celeba-male-best"])
def test_without_a_gpu_a_presets_bf16_is_float32_and_told(name, gpu, monkeypatch, caplog):
    monkeypatch.setattr("torch.cuda.is_available", lambda: gpu)
    one, own = options.configured(name), presets.PRESETS[name].precision
    assert one.precision == (own if gpu else "float32")
    told = [f"dpscale: {name} runs in float32: its bf16 needs a GPU, and torch finds none here."]
    assert caplog.messages == (told if own == "bf16" and not gpu else [])
    if not gpu:
        with pytest.raises(ValueError, match="'precision' parameter of Config must be 'float32' where torch finds no"):
            options.configured(name, {"precision": "bf16"})
