"""``dpscale train`` on tables, folders and functions of one's own; lists; errors as JSON."""

import json

import numpy as np
import pytest
import torch
from PIL import Image

from dpscale.lab import own

from .helpers import run

BUDGET = ["--epsilon", "3", "--delta", "1e-4", "--epochs", "2", "--batch", "40"]


@pytest.fixture
def table(tmp_path):
    generator = np.random.default_rng(0)
    x = generator.normal(size=(200, 3))
    path = tmp_path / "people.csv"
    rows = [f"{a:.4f},{b:.4f},{c:.4f},{'yes' if a > 0 else 'no'}" for a, b, c in x]
    path.write_text("\n".join(["a,b,c,outcome", *rows]) + "\n", encoding="utf-8")
    return path


def test_a_table_is_trained_on(table, tmp_path):
    out = tmp_path / "out"
    found = json.loads(
        run("train", "--data", table, "--target", "outcome", "--test", table, *BUDGET, "--out", out, "--json").stdout
    )
    assert found["classes"] == ["no", "yes"] and found["steps"] == 10
    assert 0 < found["epsilon"] <= 3 and found["statement"].startswith("Guarantee: (")
    assert found["test_accuracy"] > 0.7, "the sign of a column is easy to learn"
    assert json.loads((out / "run.json").read_text(encoding="utf-8")) == found
    state = torch.load(out / "model.pt", weights_only=True)
    assert {tuple(t.shape) for t in state.values()} == {(2, 3), (2,)}
    assert (out / "run.ckpt").exists()


def test_own_data_get_noise_that_nobody_can_guess(table, tmp_path):
    """Presets have a seed unless told; data of one's own never do."""
    weights = []
    for k in range(2):
        run("train", "--data", table, "--target", "outcome", *BUDGET, "--out", tmp_path / str(k))
        weights.append(torch.load(tmp_path / str(k) / "model.pt", weights_only=True)["1.weight"])
    assert not torch.equal(*weights)


def test_what_is_shown_in_training_is_private(table, tmp_path):
    """ε, and no loss of the samples."""
    words = ["train", "--data", table, "--target", "outcome", *BUDGET, "--out", tmp_path]
    shown = run(*words).stderr
    assert "epsilon" in shown and "loss" not in shown


def test_noise_and_device_are_heeded(table, tmp_path, monkeypatch):
    monkeypatch.setenv("DPSCALE_DEVICE", "cpu")  # which --device sets; put back after
    words = ["train", "--data", table, "--target", "outcome", *BUDGET, "--out", tmp_path, "--json"]
    found = [json.loads(run(*words, *more).stdout) for more in ([], ["--noise", "secure"], ["--device", "cpu"])]
    assert ["ChaCha20" in each["statement"] for each in found] == [False, True, False]
    assert "must be 'fast' or 'secure'. Got 'safe'" in run(*words, "--noise", "safe", code=2).stderr
    assert "'device' parameter of dpscale must be cpu, or cuda" in run(*words, "--device", "tpu", code=2).stderr


def test_a_folder_of_images_is_trained_on(tmp_path):
    for name, shade in (("dark", 20), ("light", 220)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for k in range(30):
            Image.new("RGB", (6, 6), (shade, shade + k % 5, shade)).save(tmp_path / "images" / name / f"{k}.png")
    out = tmp_path / "out"
    run("train", "--data", tmp_path / "images", *BUDGET, "--out", out)
    found = json.loads((out / "run.json").read_text(encoding="utf-8"))
    assert found["classes"] == ["dark", "light"]
    dataset, _ = own.samples(str(tmp_path / "images"), None)
    x, y = dataset[59]
    assert x.shape == (3, 6, 6) and y == 1 and x.max() == pytest.approx(224 / 255)


def test_model_and_data_come_from_functions(tmp_path, monkeypatch):
    (tmp_path / "mine_for_tests.py").write_text(
        "import numpy as np, torch\n"
        "def data():\n    return np.ones((80, 4), dtype=np.float32), np.zeros(80, dtype=np.int64)\n"
        "def network():\n    return torch.nn.Linear(4, 2)\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)
    run("train", "--data", "mine_for_tests:data", "--model", "mine_for_tests:network", *BUDGET)
    assert torch.load("runs/own/model.pt", weights_only=True)["weight"].shape == (2, 4)


@pytest.mark.parametrize("made", ["pandas.read_csv('people.csv')", "(numpy.ones((200, 3)), numpy.arange(200) % 2)"])
def test_functions_may_return_a_frame_or_wide_arrays(made, table, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"frames_{abs(hash(made))}"
    (tmp_path / f"{name}.py").write_text(f"import numpy, pandas\n\ndef data():\n    return {made}\n", encoding="utf-8")
    target = ["--target", "outcome"] if "csv" in made else []
    found = json.loads(run("train", "--data", f"{name}:data", *target, *BUDGET, "--json").stdout)
    assert found["steps"] == 10 and found["classes"] == (["no", "yes"] if target else None)


def test_gaps_in_the_target_are_told_in_one_line(table):
    table.write_text(table.read_text(encoding="utf-8") + "1,2,3,\n", encoding="utf-8")
    found = run("train", "--data", table, "--target", "outcome", *BUDGET, code=2)
    assert "has missing values. Fill them by a constant" in " ".join(found.output.split())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Name a preset (dpscale presets lists them), or give --data, --epsilon and --delta."),
        (["--data", "TABLE", *BUDGET], "--target must be a column of"),
        (["--data", "TABLE", "--target", "b", *BUDGET], "must be of numbers. Got"),
        (["--data", "nowhere", *BUDGET], "--data nowhere must be a file table.csv, a folder of images, or"),
        (["--data", "no_such_module:f", *BUDGET], "--data no_such_module:f cannot be imported"),
        (["--data", "TABLE", "--target", "outcome", "--model", "x", *BUDGET], "--model x must be module:function, or"),
        (["--data", "TABLE", "--target", "outcome", "--s", "0.5", *BUDGET], "--s is not known for data of your own."),
        (["--data", "TABLE", "--target", "outcome", "--rate", "fast", *BUDGET], "'rate' parameter of train must be"),
        (
            ["--data", "TABLE", "--target", "outcome", "--device", "abacus", *BUDGET],
            "'device' parameter of dpscale must be",
        ),
        (["digits", "--target", "b"], "--target and --test are for data of your own."),
    ],
)
def test_bad_words_are_one_line_and_json_says_them_too(words, said, table, tmp_path):
    words = [str(table) if word == "TABLE" else word for word in words]
    found = run("train", *words, "--out", tmp_path / "out", "--json", code=2)
    assert said in json.loads(found.stdout)["error"]
    assert found.stderr.count("\n") == 1 and said in found.stderr
    assert not (tmp_path / "out").exists()


def test_presets_and_methods_are_listed():
    assert json.loads(run("presets", "--json").stdout)["mnist"]["epsilon"] == 3
    assert "fashion-mnist" in run("presets").stdout
    assert json.loads(run("methods", "--json").stdout)["dp-sgd"] == "DP-SGD"
    assert "dp-psasc-star" in run("methods").stdout
