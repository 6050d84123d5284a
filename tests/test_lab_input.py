"""What the lab is given: folders, files, values and names that are wrong are refused before any work, or do no harm."""

import dataclasses
import io
import json
import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from dpscale import Clip, FullBatch, Plan, Poisson
from dpscale.lab import (
    commands,
    compare,
    figures,
    markdown,
    models,
    options,
    paper,
    presets,
    queue,
    records,
    report,
    runner,
    summary,
)
from dpscale.lab.data import Data, digits, load
from dpscale.lab.datasets import DataError, catalogue, obtaining, packed, stored
from dpscale.lab.encoders import Encoder, weights
from dpscale.lab.encoders.features import extract
from dpscale.lab.presets import Choice

from .helpers import refuse, run

TINY = ["--epochs", "1", "--batch", "64", "--lr", "0.1", "--workers", "1"]
ONE = [*TINY, "--methods", "dp-sgd", "--seeds", "1"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    """A finished comparison of one method at one seed, and a folder with its records packed."""
    out = tmp_path_factory.mktemp("input") / "runs"
    run("compare", "digits", *ONE, "--out", out)
    run("report", out, "--pack", out.parent / "packed")
    return out, out.parent / "packed"


@pytest.fixture
def idle(monkeypatch):
    """Nothing is trained."""
    for place, name in ((queue, "run"), (compare, "attempt"), (runner, "_run")):
        monkeypatch.setattr(place, name, lambda *_, **__: pytest.fail("the work began"))


def test_no_preset_is_not_all_of_them(idle):
    assert "must be one of: digits, mnist" in refuse("reproduce", "table2", "--presets", "")


# -- before minutes are spent ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [("train", "digits"), ("compare", "digits", "--workers", "1"), ("reproduce", "all", "--presets", "mnist")],
)
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, idle):
    (tmp_path / "file").write_text("")
    line = refuse(*command, "--out", tmp_path / "file" / "x")
    assert f"Cannot write to the folder {tmp_path / 'file' / 'x'}: Not a directory. Choose another --out." in line


def test_what_is_refused_for_another_reason_leaves_no_folder(tmp_path, idle, monkeypatch):
    monkeypatch.setenv("DPSCALE_DATA", str(tmp_path / "none"))
    runner._whole.cache_clear()
    for command in (("train", "mnist"), ("reproduce", "table2", "--presets", "mnist")):
        refuse(*command, "--out", tmp_path / "a" / "b")
        assert not (tmp_path / "a").exists()
    (tmp_path / "a").mkdir()
    refuse("train", "mnist", "--out", tmp_path / "a")
    assert (tmp_path / "a").is_dir()  # it was there


def test_the_data_of_every_experiment_are_asked_for_before_the_first_is_trained(tmp_path, idle, monkeypatch):
    monkeypatch.setenv("DPSCALE_DATA", str(tmp_path))
    runner._whole.cache_clear()
    arguments = ("--methods", "non-private,dp-sgd", "--seeds", "1", "--workers", "1", "--out", tmp_path / "out")
    line = refuse("reproduce", "table2", "--presets", "digits,celeba-male", *arguments)
    assert f"Run 'dpscale data import celeba-male PATH --data {tmp_path}'" in line
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte").touch()
    line = refuse("reproduce", "figures", "--presets", "digits,mnist", *arguments)
    told = f"Run 'dpscale data get mnist --data {tmp_path}'"
    assert f"The file {tmp_path / 'mnist' / 'train-images-idx3-ubyte'} is missing. {told}" in line


def test_records_that_are_complete_do_without_their_data(compared, idle, monkeypatch):
    def missing(name):
        raise DataError(f"{name} is missing")

    monkeypatch.setattr(stored, "require_there", missing)
    arguments = ("table2", "--presets", "digits", "--methods", "dp-sgd", "--epochs", "1", "--workers", "1")
    values = ("--set", "batch=64", "--set", "tune=false", "--set", 'rates={"dp-sgd": 0.1}', "--out", compared[1])
    told = json.loads(run("reproduce", *arguments, *values, "--seeds", "1", "--json").stdout)
    assert told["left"] == 0 and len(told["experiments"][0]["rows"]) == 1
    assert "digits is missing" in refuse("reproduce", *arguments, *values, "--seeds", "2")


def test_a_report_is_written_where_all_records_are_packed_beside(compared, idle):
    out = compared[1] / "digits"
    assert not out.exists()
    told = json.loads(run("compare", "digits", *ONE, "--out", out, "--json").stdout)
    assert told["report"] == str(out / "report.html") and (out / "report.html").is_file()
    (out / "report.html").unlink()
    out.rmdir()


# -- names in pages --------------------------------------------------------------------------------------------

EVIL = 'p"><script>alert(1)</script>&\\1'


def test_a_name_from_a_record_is_no_markup_in_a_picture(compared):
    (record,) = records.load(compared[0])
    record = dataclasses.replace(record, config={**record.config, "preset": EVIL})
    for one in figures.pictures([record]):
        text = figures.svg(one.figure, f"{EVIL}-{one.name}", r"a \1 description")
        assert "script>" not in text and 'aria-label="a \\1 description"' in text
        found = re.findall(r'\bid="([^"]*)"', text)
        assert found and all(re.match(rf"p-script-alert-1-script-1-{one.name}-[0-9a-f]{{8}}-", name) for name in found)
        assert {*re.findall(r'href="#([^"]*)"', text), *re.findall(r"url\(#([^)]*)\)", text)} <= set(found)
    experiment = paper.Experiment(preset=EVIL, records=[record], rows=summary.summarize([record]), left=0)
    assert "<script" not in report.page([experiment])


def test_ids_of_pictures_stay_different_and_plain():
    names = ["mnist-accuracy", "MNIST-accuracy", "mnist accuracy", "mnist-accuracy-", "é", "?", ""]
    found = [figures._slug(name) for name in names]
    assert found[0] == names[0] and len(set(found)) == len(names)
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", slug) for slug in found)


# -- tables as Markdown ----------------------------------------------------------------------------------------


def test_a_page_without_the_line_of_the_tables_is_not_overwritten(compared, tmp_path):
    page = tmp_path / "page.md"
    for text in ("# Mine\n\nBy hand.\n", f"# Mine\n\nThe line {markdown.MARK} is named here.\n"):
        page.write_text(text)
        line = refuse("report", compared[0], "--markdown", page)
        assert f"The file {page} is there and has no line <!-- tables -->" in line and "Add that line" in line
        assert page.read_text() == text
    page.write_bytes(b"\xff\xfe")
    assert "is no text in UTF-8" in refuse("report", compared[0], "--markdown", page)


@pytest.mark.parametrize("text", [None, "", " \n"])
def test_a_new_page_can_be_made_again(compared, tmp_path, text):
    page = tmp_path / "page.md"
    if text is not None:
        page.write_text(text)
    run("report", compared[0], "--markdown", page)
    first = page.read_text()
    assert first.startswith(f"# Results\n\n{markdown.MARK}\n\nTest accuracy")
    run("report", compared[0], "--markdown", page)
    assert page.read_text() == first


def test_what_names_the_line_above_it_stays(compared, tmp_path):
    page = tmp_path / "page.md"
    head = f"The line {markdown.MARK} is named here.\n\n{markdown.MARK}"
    page.write_text(f"{head}\nold\n")
    run("report", compared[0], "--markdown", page)
    assert page.read_text().startswith(f"{head}\n\nTest accuracy") and "old" not in page.read_text()


# -- values ----------------------------------------------------------------------------------------------------


def test_settings_are_the_papers(tmp_path, monkeypatch):
    line = refuse("reproduce", "table1", "--presets", "mnist,digits")
    assert "must be experiments of the paper, which are mnist, fashion-mnist" in line and "Got 'digits'" in line
    shown = []
    monkeypatch.setattr(paper, "settings", lambda configs: shown.extend(each.preset for each in configs) or [])
    monkeypatch.setattr(paper, "experiments", lambda *_, **__: [])
    for names in ("digits", "digits,mnist"):
        run("reproduce", "all", "--presets", names, "--out", tmp_path)
    assert shown == ["mnist"]


@pytest.mark.parametrize(
    ("arguments", "sampling", "shown"),
    [
        (("--set", "epsilon=1"), Poisson(size=60_000, batch=512), "60,000 512, 3 1e-4, 0.3, 0.9 1, 1e-5"),
        (("--set", "train_size=900"), Poisson(size=900, batch=512), "900 512, 3 1e-4, 0.3, 0.9 3, 1e-5"),
        (("--set", "sampling=full-batch"), FullBatch(size=60_000), "60,000 60000, 3 1e-4, 0.3, 0.9 3, 1e-5"),
    ],
)  # fmt: skip
def test_the_settings_shown_are_those_that_are_run(arguments, sampling, shown, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(paper, "experiments", lambda configs, *_, **__: ran.extend(configs) or [])
    told = run("reproduce", "all", "--presets", "mnist", "--epochs", "3", *arguments, "--out", tmp_path).stdout
    plan = Plan(scaling=Clip(C=1.0), sampling=sampling, epochs=3)
    noise = plan.calibrate(epsilon=ran[0].epsilon, delta=1e-5).noise_multiplier
    assert f"mnist {shown} {noise:.4f}" in re.sub(" +", " ", told)
    assert ran[0].diagnostics and paper.settings(ran)[0].epsilon == ran[0].epsilon


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("rates=5",), "'rates' parameter of Config must be a mapping from names of methods to rates"),
        (("rates=null",), "'rates' parameter of Config must be a mapping"),
        (('rates={"dp-magic": 1}',), "the names are non-private, dp-sgd"),
        (('rates={"dp-sgd": "x"}',), "'rate' parameter of Config must be a finite number > 0. Got 'x'"),
        *(
            ((f"normalize={value}",), "'normalize' parameter of Config must be two finite numbers (a, b), with b not 0")
            for value in ("1", "null", '["a","b"]', "[0,0]", "[0,1,2]", "[0,NaN]", "[Infinity,1]", "[0,true]", "ab")
        ),
        (("note=5",), "'note' parameter of Config must be a string. Got 5 instead."),
        (("diagnostics=no",), "'diagnostics' parameter of Config must be a boolean. Got 'no' instead. In --set, write"),
        (('tune="no"',), "'tune' parameter of Config must be a boolean. Got 'no'"),
        (("tune=0",), "'tune' parameter of Config must be a boolean. Got 0"),
        (("average=false",), "'average' parameter of Config must be a number in [0, 1). Got False"),
        (("inner=[[1]]",), "'inner' parameter of Config must be pairs (K0, gamma0)"),
        (("inner=[1, 2]",), "'inner' parameter of Config must be pairs (K0, gamma0)"),
        (("inner=[[1.5, 0.5]]",), "'K0' parameter of InnerOuter must be an integer"),
        (("grid=null",), "wrong kind in --set grid=null"),
    ],
)
def test_a_value_of_the_wrong_kind_is_one_line(arguments, text, tmp_path, idle):
    assert text in refuse("train", "digits", "--set", *arguments, "--out", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--epochs", "3", "--set", "epochs=5"), "epochs is given twice, as 3 and by --set as 5. Give it once."),
        (("--k0", "1", "--set", "K0=2"), "K0 is given twice, as 1 and by --set as 2"),
        (("--diagnostics", "--set", "diagnostics=false"), "diagnostics is given twice, as True and by --set as False"),
        (("--no-tune", "--set", "tune=true"), "tune is given twice, as False and by --set as True"),
        (("--set", "epochs=3", "--set", "epochs=5"), "'epochs' parameter of --set must be given once. Got 'epochs=5'"),
        (("--lr", "0.5", "--set", 'rates={"dp-sgd": 1}'), "--lr is the rate of every method, without a search"),
        (("--lr", "0.5", "--set", "grid=[1]"), "so that grid would do nothing. Leave out one of the two."),
        (("--lr", "0.5", "--tune"), "so that tune would do nothing"),
        (("--gamma1", "0.5", "--set", "gamma1s=[0.1]"), "gamma1 is the one outer momentum that is tried"),
        (("--set", "K0=1", "--set", "inner=[[1,0.5]]"), "so that inner would do nothing"),
        (("--batch", "64", "--sampler", "full-batch"), "--sampler full-batch takes all samples, so that batch would"),
        (("--C", "1e300"), "'C' parameter of Config must be from 1e-12 to 1e12, or float32 overflows. Got 1e+300"),
        (("--lr", "1e300"), "'rate' parameter of Config must be from 1e-12 to 1e12, or float32 overflows"),
        (("--train-size", "30", "--batch", "1"), "every class. Got '0.2 of 30' instead. Take more samples (--tr"),
        (("--train-size", "2"), "'train_size' parameter of Config must be such that every class has a sample. Got 2"),
    ],
)  # fmt: skip
def test_options_that_contradict_each_other_or_go_too_far_are_one_line(arguments, text, tmp_path, monkeypatch):
    monkeypatch.setattr(runner, "_model", lambda *_: pytest.fail("the work began"))
    assert text in refuse("compare", "digits", "--workers", "1", *arguments, "--out", tmp_path)


def test_options_that_say_the_same_twice_are_taken(tmp_path):
    config = options.configured("digits", 0.5, None, ["epochs=3", "epochs=3", "C=1"], epochs=3, C=1.0, tune=False)
    assert (config.epochs, config.C, config.tune, config.rates["dp-sgd"]) == (3, 1.0, False, 0.5)
    given = options.configured("digits", None, None, ["tune=true"], {"tune": False, "diagnostics": True})
    assert given.tune and given.diagnostics  # what a command takes for granted is no option


@pytest.mark.parametrize("seed", [2**63, 10**25])
def test_seeds_beyond_what_generators_take_are_one_line(seed, tmp_path, idle):
    line = refuse("train", "digits", "--seed", seed, "--out", tmp_path)
    assert "--seed" in line and str(2**63 - 1) in line
    assert commands.MOST_SEEDS == compare.SEARCH_SEED  # so that no final run has the seed of the search
    for command in (("compare", "digits"), ("reproduce", "table2"), ("reproduce", "figures")):
        line = refuse(*command, "--seeds", seed, "--out", tmp_path)
        assert "--seeds" in line and str(commands.MOST_SEEDS) in line


def test_a_class_without_samples_is_told_to_a_single_run_too(tmp_path):
    line = refuse("train", "digits", "--train-size", "5", "--out", tmp_path)
    assert "every class has a sample. Got 5 instead. Take more (--train-size)." in line


@pytest.mark.parametrize("value", ["grid=[1,1.0]", "gamma1s=[0.5,0.5]", "inner=[[1,0.5],[1,0.5]]"])
def test_two_equal_tries_are_refused(value, tmp_path, idle):
    assert "must be without repeats" in refuse("compare", "digits", "--set", value, "--out", tmp_path)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("digits", "--model", "paper_cnn"), "takes the samples of digits, of shape (1, 8, 8). Got 'paper_cnn'"),
        (("digits", "--model", "probe"), "Choose one of digits_cnn, resnet9, resnet9_mish, resnet9_scaled."),
        (("mnist", "--model", "digits_cnn"), "one that takes the samples of mnist, of shape (1, 28, 28)"),
        (("cifar10-simclr", "--model", "resnet9"), "features of resnet50-imagenet, of shape (2048,). Got 'resnet9'"),
    ],
)  # fmt: skip
def test_a_model_that_cannot_take_the_samples_is_refused_before_they_are_read(
    arguments, text, tmp_path, idle, monkeypatch
):
    monkeypatch.setattr(runner, "load_data", lambda *_, **__: pytest.fail("data were read"))
    runner._whole.cache_clear()
    assert text in refuse("train", *arguments, "--out", tmp_path)
    assert text in refuse("compare", *arguments, "--out", tmp_path)


def test_models_are_tried_on_what_a_run_gives_them():
    for name in presets.PRESETS:
        presets.preset(name).require_fitting()
    data = digits()
    assert catalogue.sample("digits") == (tuple(data.train_images.shape[1:]), data.classes)
    for name in models.MODELS:
        try:
            model = models.MODELS[name]((1, 8, 8), 10)
            fits = tuple(model(data.train_images[:1]).shape) == (1, 10)
        except (RuntimeError, ValueError):
            fits = False
        assert presets._takes(name, (1, 8, 8), 10) == fits
    # What is changed together is looked at together.
    config = options.configured("cifar10-simclr", None, None, ["encoder=null"], model="resnet9")
    assert (config.encoder, config.model) == (None, "resnet9")


def test_one_experiment_has_one_record_however_its_numbers_are_written():
    def text(choice):
        return json.dumps(choice.to_dict())

    assert text(Choice(rate=1)) == text(Choice(rate=1.0)) == '{"rate": 1.0}'
    assert text(Choice(rate=1, gamma1=1, K0=2.0, gamma0=1)) == '{"rate": 1.0, "gamma1": 1.0, "K0": 2, "gamma0": 1.0}'
    values = ["grid=[1]", "gamma1s=[1]", "inner=[[1.0, 1]]", "normalize=[0, 1]", "epsilon=3", "average=0"]
    whole = options.configured("digits", None, None, [*values, 'rates={"dp-sgd": 1, "dp-psasc-star": 1}'])
    broken = presets.digits().replace(
        grid=(1.0,), gamma1s=(1.0,), inner=((1, 1.0),), normalize=(0.0, 1.0), epsilon=3.0, average=0.0,
        rates={"dp-sgd": 1.0, "dp-psasc-star": 1.0},
    )  # fmt: skip
    assert json.dumps(whole.to_dict()) == json.dumps(broken.to_dict())
    K0 = options.configured("digits", None, None, ["K0=2.0"]).K0
    assert K0 == 2 and isinstance(K0, int)
    (tried,) = whole.tries(presets.METHODS["dp-sgd"])
    given = options.configured("digits", 1, None, None, gamma1=1.0).given(presets.METHODS["dp-sgd"])
    assert text(tried) == text(given)


# -- features of a part ----------------------------------------------------------------------------------------


def test_features_of_a_part_leave_those_of_the_whole(tmp_path):
    encoder = Encoder(
        name="mean", title="Mean", features=4, files=("mean.safetensors",), origin="made here",
        build=lambda: nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 4)),
    )  # fmt: skip
    weights.write(tmp_path / "encoders" / "mean.safetensors", encoder.build().state_dict(), {})
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (8, 3, 6, 6), dtype=np.uint8))
    labels = torch.zeros(8, dtype=torch.int64)
    whole = Data(
        name="faces", train_images=images[:6], train_labels=labels[:6], test_images=images[6:], test_labels=labels[6:],
        classes=1, provenance={"name": "faces"},
    )  # fmt: skip

    def part(size):
        provenance = {**whole.provenance, "train_size": size}
        return dataclasses.replace(whole, train_images=images[:size], train_labels=labels[:size], provenance=provenance)

    def found(data):
        return extract(data, encoder, folder=tmp_path, size=6, device="cpu")

    first = found(whole)
    assert first.path.name == "faces-mean-6-float32.safetensors"
    for size in (2, 3):
        made = found(part(size))
        assert not made.reused and made.path.name != first.path.name and len(made.train) == size
        assert f"-{made.provenance['data_sha256'][:8]}-" in made.path.name
    assert all(found(data).reused for data in (whole, part(2), part(3)))
    assert found(part(6)).path == first.path  # all of it, by another name


# -- decoded images --------------------------------------------------------------------------------------------


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """A data folder with a few images in shards, decoded; and the splits that are decoded from then on."""
    entry = catalogue.CATALOGUE["imagenette"]
    monkeypatch.setitem(
        catalogue.CATALOGUE, "imagenette", dataclasses.replace(entry, classes=("a", "b"), shape=(3, 16, 16))
    )
    source, random = tmp_path / "in", np.random.default_rng(0)
    source.mkdir()
    for split in ("train", "val"):
        encoded = []
        for _ in range(2):
            stream = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).save(stream, "PNG")
            encoded.append(stream.getvalue())
        packed._write_shard(source / f"{split}-00.npz", [(i, None, image) for i, image in enumerate(encoded)])
    obtaining.take("imagenette", source, tmp_path / "data")
    load("imagenette", tmp_path / "data")
    seen, decode = [], packed.decode
    monkeypatch.setattr(packed, "decode", lambda s, e, what, p: seen.append(what) or decode(s, e, what, p))
    return tmp_path / "data", seen


def decoded(folder, split="train"):
    (path,) = (folder / "imagenette").glob(f"{split}-*.npy")
    return path


def blacken(path, *, same_time):
    held = path.stat()
    with path.open("r+b") as stream:
        stream.seek(-100, os.SEEK_END)
        stream.write(bytes(100))
    os.utime(path, ns=(held.st_atime_ns, held.st_mtime_ns + (not same_time)))


def test_verify_notices_decoded_images_that_changed_and_decodes_them_anew(kept):
    folder, seen = kept
    whole = load("imagenette", folder).train_images.clone()
    blacken(decoded(folder), same_time=True)
    assert not torch.equal(load("imagenette", folder).train_images, whole)  # size and time alone are looked at
    result = run("data", "verify", "imagenette", "--data", folder, "--json")
    assert json.loads(result.stdout)["data"][0]["ok"] is True
    (line,) = result.stderr.splitlines()
    assert f"{decoded(folder)} are not those that were written: their checksum is another. Decoding them anew." in line
    assert seen == ["decoding train"] and torch.equal(load("imagenette", folder).train_images, whole)
    assert run("data", "verify", "--data", folder).stderr == "" and seen == ["decoding train"]


def test_decoded_images_of_another_time_are_compared_at_load(kept):
    folder, seen = kept
    whole = load("imagenette", folder).train_images.clone()
    blacken(decoded(folder), same_time=False)
    assert torch.equal(load("imagenette", folder).train_images, whole) and seen == ["decoding train"]
    os.utime(decoded(folder), ns=(1, 1))  # a copy
    load("imagenette", folder)
    assert seen == ["decoding train"] and json.loads(_beside(decoded(folder)).read_text())["mtime_ns"] == 1


@pytest.mark.parametrize("content", [None, "", "[]", "{}"])
def test_decoded_images_without_a_checksum_are_not_taken(kept, content):
    folder, seen = kept
    for path in (_beside(decoded(folder)), _beside(decoded(folder, "val"))):
        path.unlink()
        if content is not None:
            path.write_text(content)
    load("imagenette", folder)
    assert seen == ["decoding train", "decoding val"]
    _beside(decoded(folder)).unlink()
    assert "have no checksum. Decoding them anew." in run("data", "verify", "--data", folder).stderr
    assert seen[2:] == ["decoding train"] and _beside(decoded(folder)).is_file()


def test_decoded_images_that_may_not_be_replaced_are_told(kept, monkeypatch):
    folder, _ = kept
    blacken(decoded(folder), same_time=True)

    def forbidden(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", forbidden)
    result = run("data", "verify", "--data", folder, code=1)
    assert "imagenette: broken. The decoded images in" in result.stdout
    assert "may not be replaced. Delete it." in result.stdout


def _beside(path):
    return path.with_name(f"{path.name}.json")
