"""What the lab is given: folders, files, values and names that are wrong are refused before any work, or do no harm."""

import dataclasses
import json
import re

import numpy as np
import pytest
import torch
from torch import nn

from dpscale import Clip, FullBatch, Plan, Poisson
from dpscale.lab import compare, paper, queue, report, runner
from dpscale.lab.data import Data
from dpscale.lab.datasets import DataError, stored
from dpscale.lab.encoders import Encoder, weights
from dpscale.lab.encoders.features import extract

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
    for place, name in ((queue, "run"), (compare, "attempt"), (runner, "_train")):
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
    assert f"Cannot write to the folder {tmp_path / 'file' / 'x'}. Choose another --out." in line


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
    values = ("--set", "batch=64", "tune=false", 'rates={"dp-sgd": 0.1}', "--out", compared[1])
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


# -- tables as Markdown ----------------------------------------------------------------------------------------


def test_a_page_without_the_line_of_the_tables_is_not_overwritten(compared, tmp_path):
    page = tmp_path / "page.md"
    for text in ("# Mine\n\nBy hand.\n", f"# Mine\n\nThe line {report.MARK} is named here.\n"):
        page.write_text(text)
        line = refuse("report", compared[0], "--markdown", page)
        assert f"The file {page} is there and has no line <!-- tables -->" in line and "Add that line" in line
        assert page.read_text() == text


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
        (("epsilon=1",), Poisson(size=60_000, batch=512), "60,000 512, 3 1e-4, 0.3, 0.9 1, 1e-5"),
        (("--train-size", "900"), Poisson(size=900, batch=512), "900 512, 3 1e-4, 0.3, 0.9 3, 1e-5"),
        (("sampling=full-batch",), FullBatch(size=60_000), "60,000 60000, 3 1e-4, 0.3, 0.9 3, 1e-5"),
    ],
)  # fmt: skip
def test_the_settings_shown_are_those_that_are_run(arguments, sampling, shown, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(paper, "experiments", lambda configs, *_, **__: ran.extend(configs) or [])
    told = run("reproduce", "all", "--presets", "mnist", "--epochs", "3", *arguments, "--out", tmp_path).stdout
    plan = Plan(scaling=Clip(C=1.0), sampling=sampling, epochs=3)
    noise = plan.calibrate(epsilon=ran[0].epsilon, delta=1e-5).noise_multiplier
    assert f"mnist {shown} {noise:.4f}" in re.sub(" +", " ", told)
    assert ran[0].diagnostics and paper.settings(ran)[0]["epsilon"] == ran[0].epsilon


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--lr", "0.5", "grid=[1]"), "Beside rate, grid would do nothing. Leave out one of the two."),
        (("--epochs", "3", "epochs=5"), "epochs is given twice, as 3 and as 5. Give it once."),
        (("--C", "1e300"), "'C' parameter of Config must be less than or equal to 1000000000000. Got 1e+300"),
        (("--train-size", "30", "--batch", "1"), "every class. Got '0.2 of 30' instead. Take more samples (--tr"),
        (("--train-size", "2"), "'train_size' parameter of Config must be such that every class has a sample. Got 2"),
        (("--seeds", "2000"), "--seeds must be how many, as 5, or which, as 0,3,7, all below 1000. Got '2000'."),
        (("--seeds", "many"), "--seeds must be how many"),
        (("--device", "cuda"), "'device' parameter of dpscale must be cpu, or cuda"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_one_line(arguments, text, tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(runner, "_model", lambda *_: pytest.fail("the work began"))
    assert text in refuse("compare", "digits", "--workers", "1", *arguments, "--out", tmp_path)


def test_a_model_that_cannot_take_the_samples_is_refused_before_they_are_read(tmp_path, idle, monkeypatch):
    monkeypatch.setattr(runner, "load_data", lambda *_, **__: pytest.fail("data were read"))
    runner._whole.cache_clear()
    for command in ("train", "compare"):
        line = refuse(command, "cifar10-simclr", "--model", "resnet9", "--out", tmp_path)
        assert "features of resnet50-imagenet, of shape (2048,). Got 'resnet9'" in line


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
