"""The command line: what it prints, what it refuses, what it leaves on disk."""

import json
import re
import subprocess
import sys

import pytest

from dpscale import Clip, FullBatch, Plan, Poisson
from dpscale.lab import paper, records, report, runner
from dpscale.lab.datasets import DataError, stored
from dpscale.lab.stats import two_digits

from .helpers import refuse, run

TINY = ["--epochs", "1", "--batch", "64", "--rate", "0.1", "--workers", "1"]
MNIST = ["--delta", "1e-5", "--size", "60000", "--batch", "512"]
ONE = ["--noise-multiplier", "1", "--steps", "1"]
COMPARED = ("compare", "digits", *TINY, "--methods", "dp-sgd,dp-psasc")


def told_by(*arguments):
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "runs"
    return out, told_by(*COMPARED, "--seeds", "2", "--out", out)


@pytest.fixture
def idle(monkeypatch):
    """Nothing is trained."""
    monkeypatch.setattr(runner, "run", lambda *_, **__: pytest.fail("the work began"))


# -- help, version, interrupts ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "", *("train", "tune", "compare", "report", "presets", "methods", "calibrate", "epsilon", "plan", "features"),
        *("reproduce", *(f"reproduce {name}" for name in ("table1", "table2", "figures", "all"))),
        *("ledger", *(f"ledger {name}" for name in ("create", "show", "export"))),
        *("data", *(f"data {name}" for name in ("list", "get", "import", "verify"))),
    ],
)  # fmt: skip
def test_every_help_shows_an_example(command):
    text = run(*command.split(), "--help").stdout
    assert "Example" in text and f"dpscale {command}".strip() in text


def test_version_and_bare_command():
    assert run("--version").stdout.startswith("dpscale ")
    assert "Commands:" in run().stdout


GOES_ON = "What is finished is recorded; the same command goes on."


@pytest.mark.parametrize(
    ("command", "place", "told"),
    [
        ("train digits", "compare.train", GOES_ON),
        ("compare digits", "compare.compare", GOES_ON),
        ("reproduce table2", "paper.experiments", GOES_ON),
        ("features cifar10 --encoder resnet50-imagenet", "data.load", "Nothing half-done was left behind; the same"),
        ("data get mnist", "datasets.stored.get", "the same command begins again, a download where it stopped."),
        ("data import mnist .", "datasets.stored.take", "No half-done data set was left behind; the same command"),
    ],
)
def test_an_interrupt_promises_what_there_is(monkeypatch, tmp_path, command, place, told):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(f"dpscale.lab.{place}", interrupted)
    (line,) = run(*command.split(), code=130).stderr.splitlines()
    assert line.startswith("dpscale: interrupted. ") and told in line


# -- calibrate and epsilon -------------------------------------------------------------------------------------


def test_calibrate_finds_the_papers_noise():
    told = told_by("calibrate", "--epsilon", "3", *MNIST, "--epochs", "20")
    assert told["noise_multiplier"] == pytest.approx(0.892, abs=0.002)
    assert told["epsilon"] <= 3 < told["epsilon_rdp"] and told["steps"] == 2344
    assert (told["sampler"], told["adjacency"], told["accountant"]) == ("poisson", "add-remove", "pld")
    assert told["delta"] == 1e-5 and "Guarantee" in told["statement"]


def test_calibrate_finds_steps_for_a_noise():
    steps = told_by("calibrate", "--epsilon", "3", *MNIST, "--noise-multiplier", "0.9")["steps"]
    spent, more = (
        told_by("epsilon", "--noise-multiplier", "0.9", *MNIST, "--steps", str(n))["epsilon"]
        for n in (steps, steps + 20)
    )
    assert spent <= 3 < more


def test_epsilon_of_fixed_size_batches_is_the_tight_one():
    base = ("epsilon", "--noise-multiplier", "0.9", *MNIST, "--epochs", "20", "--sampler")
    poisson, fixed = (told_by(*base, sampler) for sampler in ("poisson", "fixed-size"))
    assert poisson["epsilon"] == pytest.approx(2.94, abs=0.01)
    assert fixed["epsilon"] == pytest.approx(27.8, abs=0.1) and fixed["adjacency"] == "replace-one"


@pytest.mark.parametrize("sampler", ["full-batch", "shuffled"])
def test_other_samplers_have_an_epsilon_too(sampler):
    batch = [] if sampler == "full-batch" else ["--batch", "100"]
    base = ("--noise-multiplier", "5", "--delta", "1e-5", "--size", "1000", *batch, "--epochs", "2")
    told = told_by("epsilon", *base, "--sampler", sampler)
    assert 0 < told["epsilon"] <= told["epsilon_rdp"] and told["sampler"] == sampler


def test_rdp_is_what_it_says_and_people_can_read_it():
    base = ("epsilon", "--noise-multiplier", "0.9", *MNIST, "--epochs", "20", "--accountant", "rdp")
    told, text = told_by(*base), run(*base).stdout
    assert told["accountant"] == "rdp" and told["epsilon"] == told["epsilon_rdp"]
    assert "noise_multiplier  0.9" in text and "Guarantee:" in text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("calibrate", "--epsilon", "0", *MNIST, "--epochs", "20"), "'epsilon' parameter"),
        (("calibrate", "--epsilon", "-1", *MNIST, "--epochs", "20"), "must be a finite number > 0. Got -1.0"),
        (("calibrate", "--epsilon", "three", *MNIST, "--epochs", "20"), "--epsilon"),
        (("calibrate", "--epsilon", "3", *MNIST), "Give either --epochs or --steps"),
        (("calibrate", "--epsilon", "3", *MNIST, "--steps", "9", "--epochs", "2"), "Give either"),
        (("calibrate", "--epsilon", "3", *MNIST, "--steps", "9", "--noise-multiplier", "1"), "leave out --epochs"),
        (("calibrate", "--epsilon", "3", *MNIST, "--epochs", "2", "--sampler", "full-batch"), "leave out --batch 512"),
        (("calibrate", "--epsilon", "3", "--delta", "1e-5", "--size", "9", "--epochs", "2"), "--batch is needed for"),
        (("calibrate", "--delta", "1e-5", "--size", "100"), "--epsilon"),
        (("epsilon", "--noise-multiplier", "0", *MNIST, "--epochs", "20"), "'noise_multiplier' parameter"),
        (("epsilon", *ONE, "--delta", "2", "--size", "9", "--batch", "3"), "'delta' parameter"),
        (("epsilon", *ONE, "--delta", "1e-5", "--size", "9", "--batch", "10"), "'batch' parameter of Poisson"),
        (("epsilon", *ONE, *MNIST, "--sampler", "lottery"), "lottery"),
        (("nonsense",), "nonsense"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, text):
    assert text in refuse(*arguments)


def test_a_large_delta_is_warned_of_once_in_a_command_and_on_stderr_alone():
    base = ("--epsilon", "3", "--delta", "0.01", "--size", "1000", "--epochs", "20", "--sampler", "full-batch")
    for _ in range(2):
        result = run("calibrate", *base, "--json")
        (line,) = result.stderr.splitlines()
        assert line.startswith("dpscale: warning: delta = 0.01 is not below") and json.loads(result.stdout)


def test_absurd_numbers_of_steps_are_refused(monkeypatch):
    monkeypatch.setattr("dpscale.plan.MOST_STEPS", 1000)
    base = ("--delta", "1e-5", "--size", "1000", "--sampler", "full-batch")
    for arguments, got in (
        (("calibrate", "--epsilon", "3", "--steps", "1001"), "Got 1001 instead"),
        (("epsilon", "--noise-multiplier", "50", "--epochs", "1e9"), "Got '1000000000 for 1e+09 epochs' instead"),
    ):
        line = refuse(*arguments, *base)
        assert f"'steps' parameter of Plan must be an integer <= 1000. {got}. Accounting for more takes minutes" in line
    line = refuse("calibrate", "--epsilon", "3", "--noise-multiplier", "1e4", *base)
    assert "'epsilon' parameter of Plan.calibrate_steps must be small enough to limit the steps. Got 3.0" in line
    assert "More than 1,000 steps fit: lower noise_multiplier" in line
    assert "steps             1000\n" in run("epsilon", "--noise-multiplier", "50", "--steps", "1000", *base).stdout


# -- train -----------------------------------------------------------------------------------------------------


def test_train_says_in_plain_lines_how_far_it_is_without_a_terminal(tmp_path):
    arguments = ("train", "digits", "--epochs", "24", "--batch", "512", "--rate", "0.1", "--out", tmp_path, "--method")
    result = run(*arguments, "dp-psasc")
    assert result.stderr.startswith("checking …\n") and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stderr)
    assert "training loss" not in result.stdout
    form = re.compile(r"\[(\d+)/68 steps\] DP-PSASC: training loss \d+\.\d{3}, epsilon (\d\.\d\d)")
    told = [form.fullmatch(line) for line in result.stderr.splitlines() if not line.endswith(" …")]
    assert [int(found[1]) for found in told] == [9, 15, 23, 29, 34, 43, 48, 57, 62, 68]
    spent = [float(found[2]) for found in told]
    assert spent == sorted(set(spent)) and spent[-1] == 3
    assert run(*arguments, "dp-psasc").stderr == ""  # found on disk
    plain = run(*arguments, "non-private").stderr.splitlines()
    assert re.fullmatch(r"\[68/68 steps\] Non-private SGD: training loss \d\.\d{3}", plain[-1])


def test_train_writes_one_record_with_what_was_asked(tmp_path):
    arguments = ("train", "digits", "--method", "dp-psac", "--seed", "7", *TINY[:-2], "--gamma1", "0.3",
                 "optimizer=nadam", "--train-size", "500", "--diagnostics", "--out", tmp_path)  # fmt: skip
    result = run(*arguments, "--json")
    told = json.loads(result.stdout)
    assert (told["method"], told["seed"]) == ("dp-psac", 7) and told["epsilon"] <= 3 and result.stderr == ""
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text(encoding="utf-8")) == told
    config = told["config"]
    assert (config["optimizer"], config["precision"], config["train_size"]) == ("nadam", "float32", 500)
    assert told["data"]["train"] == 500 and told["choice"] == {"rate": 0.1, "gamma1": 0.3}
    assert told["diagnostics"]["not_private"] is True and told["learning_rate"] == 0.1
    again = run(*arguments)  # found on disk
    assert "DP-PSAC: test accuracy" in again.stdout and "Guarantee" in again.stdout


# -- compare and report ----------------------------------------------------------------------------------------


def test_compare_prints_json_alone_and_writes_records_and_report(compared):
    out, told = compared
    assert [row["method"] for row in told["rows"]] == ["dp-sgd", "dp-psasc"]
    assert all(len(row["seeds"]) == 2 and row["half_width"] >= 0 for row in told["rows"])
    assert all(row["epsilon"] == pytest.approx(3, rel=1e-3) for row in told["rows"])
    assert told["verdict"] and told["seconds"] > 0
    assert len(records.load(out)) == 5 and (out / "report.html").is_file()
    assert [r.method for r in records.load(out) if r.repeat] == ["dp-sgd"]  # one of them once more
    assert "One and the same run, made 2 times, differs by" in told["verdict"]
    assert {p.suffix or p.name for p in out.iterdir()} == {".json", ".html"}


def test_compare_resumes_and_shows_a_table(compared, idle):
    result = run(*COMPARED, "--seeds", "2", "--out", compared[0])
    assert "DP-PSASC" in result.stdout and "±" in result.stdout and "Report:" in result.stdout
    assert result.stderr == ""


def test_compare_says_one_plain_line_per_run_without_a_terminal(tmp_path):
    result = run("compare", "digits", *TINY, "--methods", "non-private", "--seeds", "2", "--out", tmp_path)
    lines = result.stderr.splitlines()
    assert lines[0] == "digits …" and lines[1].startswith("[1/2 runs] non-private: seed 0") and len(lines) == 3
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize(("value", "shown"), [(0.01234, "0.012"), (1.49, "1.5"), (48.2, "48"), (131.0, "130")])
def test_minutes_have_two_digits(value, shown):
    assert f"{two_digits(value):g}" == shown


def test_a_dry_run_says_what_is_left_and_runs_nothing(compared, tmp_path, idle):
    told = told_by(*COMPARED, "--dry-run", "--seeds", "5", "--out", compared[0])
    assert told["runs"] == 6 and told["minutes"] > 0  # two seeds of each are there, and tell how long one takes
    fresh = run(*COMPARED, "--dry-run", "--seeds", "0,7", "--out", tmp_path / "new").stdout  # a few steps are timed
    (minutes,) = re.fullmatch(r"digits +5 runs left, about ([\d.e-]+) minutes\n", fresh).groups()
    assert float(minutes) > 0 and not (tmp_path / "new").exists()
    whole = told_by("reproduce", "table2", "--presets", "digits", "--dry-run", "--out", tmp_path)
    assert whole["runs"] == 8 * 5 + 6 * (5 + 3 * 2) + 1 and whole["plan"][0]["preset"] == "digits"


def test_a_budget_that_is_over_leaves_all_runs(tmp_path):
    told = run(*COMPARED, "--out", tmp_path, "--budget-minutes", "0", code=1)
    assert "11 runs are left: the budget is spent. The same command goes on with them." in told.stderr


def test_report_is_made_anew_packs_records_and_writes_tables(compared, tmp_path):
    out, told = compared
    (out / "report.html").unlink()
    again = told_by("report", out)
    assert again["rows"] == told["rows"] and (out / "report.html").is_file()
    assert (again["preset"], again["verdict"], again["left"]) == ("digits", told["verdict"], 0)
    assert run("report", out).stdout == f"Report: {out / 'report.html'}\n"
    results, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    shown = run("report", out, "--pack", results, "--markdown", page).stdout
    assert f"Markdown: {page}" in shown and f"Records: {results}" in shown
    assert [path.name for path in results.iterdir()] == ["digits.jsonl"]
    text = page.read_text(encoding="utf-8")
    assert "| DP-PSASC |" in text and told["verdict"] in text
    again = told_by("report", results, "--markdown", page)
    assert again["rows"] == told["rows"] and page.read_text(encoding="utf-8") == text
    assert {path.name for path in results.iterdir()} == {"digits.jsonl", "report.html"}


def test_what_is_packed_does_without_runs_and_data(compared, tmp_path, idle, monkeypatch):
    def missing(name):
        raise DataError(f"{name} is missing")

    run("report", compared[0], "--pack", tmp_path)
    monkeypatch.setattr(stored, "require_there", missing)
    values = ("epochs=1", "batch=64", "tune=false", 'rates={"dp-sgd": 0.1, "dp-psasc": 0.1}', "--out", tmp_path)
    asked = ("reproduce", "table2", "--presets", "digits", "--methods", "dp-sgd,dp-psasc", *TINY[-2:], *values)
    told = told_by(*asked, "--seeds", "2")
    assert told["left"] == 0 and len(told["experiments"][0]["rows"]) == 2
    assert "digits is missing" in refuse(*asked, "--seeds", "3")
    told = told_by(*COMPARED, "--seeds", "2", "--out", tmp_path / "digits")
    assert told["report"] == str(tmp_path / "digits" / "report.html") and (tmp_path / "digits/report.html").is_file()


def test_a_page_without_the_line_of_the_tables_is_not_overwritten(compared, tmp_path):
    page = tmp_path / "page.md"
    for text in ("# Mine\n\nBy hand.\n", f"# Mine\n\nThe line {report.MARK} is named here.\n"):
        page.write_text(text)
        line = refuse("report", compared[0], "--markdown", page)
        assert f"The file {page} is there and has no line <!-- tables -->" in line and "Add that line" in line
        assert page.read_text() == text


def test_report_of_nothing_and_of_a_broken_record(tmp_path):
    assert "has no records. Run 'dpscale compare" in refuse("report", tmp_path)
    assert "There is no folder" in refuse("report", tmp_path / "none")
    (tmp_path / "dp-sgd-seed0-abc.json").write_text("{", encoding="utf-8")
    line = refuse("report", tmp_path)
    assert "dp-sgd-seed0-abc.json" in line and "Delete it and run the same command again" in line
    assert not (tmp_path / "report.html").exists()
    (tmp_path / "some.jsonl").touch()
    line = refuse("report", tmp_path / "some.jsonl")
    assert f"some.jsonl is a file. Give the folder that it lies in: dpscale report {tmp_path}" in line
    line = refuse("report", tmp_path, "--markdown", tmp_path)
    assert f"{tmp_path} is a folder. Give --markdown a file, such as {tmp_path / 'results.md'}" in line


# -- reproduce -------------------------------------------------------------------------------------------------


def test_a_spent_budget_is_told_and_the_same_command_goes_on_and_draws(tmp_path):
    out, words = tmp_path / "paper", ("--presets", "digits", "--methods", "dp-sgd,dp-psasc", "--seeds", "1")
    words = (*words, "--epochs", "1", *TINY[-2:], "search_seeds=1", "widen=0", "grid=[1.2,2.5]", "--out", out)
    result = run("reproduce", "table2", *words, "--budget-minutes", "0")
    assert "7 runs are left: the budget is spent" in result.stdout and "Report:" not in result.stdout
    assert not list(out.rglob("*.json"))
    told = told_by("reproduce", "table2", *words)
    assert told["left"] == 0 and [row["method"] for row in told["experiments"][0]["rows"]] == ["dp-sgd", "dp-psasc"]
    assert (out / "report.html").is_file() and (out / "digits" / "report.html").is_file()
    assert len(list((out / "digits" / "search").glob("*.json"))) == 4 and not (out / "digits" / "figures").exists()
    assert run("report", out).stdout == f"Report: {out / 'report.html'}\n"  # one folder per preset
    result = run("reproduce", "figures", *words)
    assert "DP-PSASC" in result.stdout and "Report:" in result.stdout
    names = {"accuracy", "weights", "norms", "similarity-dp-sgd", "mean-weight"}
    drawn = {path.name for path in (out / "digits" / "figures").iterdir()}
    assert drawn == {f"{n}.{s}" for n in names for s in ("png", "svg")}


def test_figures_say_their_own_defaults_and_all_takes_what_they_take():
    texts = {name: " ".join(run("reproduce", name, "--help").stdout.split()) for name in ("table2", "figures", "all")}
    assert "sgd,auto-s,dp-psac,dp-psasc,dp-psasc-star]" in texts["figures"] and "[default: 1]" in texts["figures"]
    options = {name: set(re.findall(r" (--[a-z-]+) <", text)) for name, text in texts.items()}
    assert options["all"] == options["figures"] == options["table2"] and {"--seeds", "--device"} <= options["all"]


@pytest.mark.parametrize(
    ("arguments", "sampling", "shown"),
    [
        (("epsilon=1",), Poisson(size=60_000, batch=512), "60,000 512, 3 1e-4, 0.3, 0.9 1, 1e-5"),
        (("sampling=full-batch", "train_size=900"), FullBatch(size=900), "900 900, 3 1e-4, 0.3, 0.9 3, 1e-5"),
    ],
)
def test_the_settings_shown_are_those_that_are_run_and_the_papers(arguments, sampling, shown, tmp_path, monkeypatch):
    ran = []
    monkeypatch.setattr(paper, "experiments", lambda asked, *_, **__: ran.extend(config for config, *_ in asked) or [])
    told = run("reproduce", "all", "--presets", "digits,mnist", "epochs=3", *arguments, "--out", tmp_path).stdout
    plan = Plan(scaling=Clip(C=1.0), sampling=sampling, epochs=3)
    noise = plan.calibrate(epsilon=ran[1].epsilon, delta=1e-5).noise_multiplier
    told = re.sub(" +", " ", told)
    assert f"mnist {shown} {noise:.4f}" in told and "digits" not in told and ran[1].diagnostics


def test_table1_is_of_the_papers_presets(monkeypatch):
    monkeypatch.setattr(paper, "PRESETS", ("mnist",))
    (told,) = told_by("reproduce", "table1")
    assert told["noise_multiplier"] == pytest.approx(0.8917, abs=2e-4) and told["samples"] == 60_000
    line = refuse("reproduce", "table1", "--presets", "digits")
    assert "must be experiments of the paper, which are mnist, fashion-mnist" in line and "Got 'digits'" in line


def test_commands_that_take_long_say_how_far_they_are_without_a_terminal(compared):
    audit = ("audit", "--size", "300", "--delta", "1e-5", "--sampler", "full-batch", "--steps", "4", "--epsilon", "4")
    assert "[1/4 steps] audit: training on canaries\n" in run(*audit, "--canaries", "200", "--seed", "0").stderr
    told = run("reproduce", "table1", "--presets", "mnist").stderr
    assert told == "[1/1 experiments] settings: noise multipliers\n"
    assert run("report", compared[0]).stderr == "[1/1 experiments] report: drawing\n"
    assert run("report", compared[0], "--json").stderr == ""


# -- what is refused before the work ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compare", "mnits"), "'preset' parameter of dpscale must be one of: digits, mnist"),
        (("compare", "digits", "--methods", "dp-sgd,dp-magic"), "'method' parameter of dpscale must be one of: non-p"),
        (("compare", "digits", "--epsilon", "0"), "'epsilon' parameter of Config must be greater than 0. Got 0"),
        (("compare", "digits", "--set", "colour=1"), "'colour' parameter of dpscale must be left out: the values of"),
        (("compare", "digits", "held_out"), "=VALUE is missing"),
        (("compare", "digits", "grid=abc"), "'grid' parameter of Config must be a valid tuple. Got 'abc'"),
        (("compare", "digits", "--rate", "0.5", "grid=[1]"), "Beside rate, grid would do nothing. Leave out one"),
        (("compare", "digits", "--seeds", "0"), "--seeds"),
        (("compare", "digits", "--seeds", "many"), "--seeds must be how many"),
        (("compare", "digits", "--seeds", "2000"), "which, as 0,3,7, all below 1000. Got '2000'."),
        (("compare", "digits", "--rate", "-1"), "'rates.non-private' parameter of Config must be greater than"),
        (("compare", "digits", "--batch", "5000", "--workers", "1"), "'batch' parameter of Poisson must be at most"),
        (("compare", "digits", "train_size=2", "--workers", "1"), "must be such that every class has a sample. Got 2"),
        (("compare", "digits", "--device", "cuda"), "'device' parameter of dpscale must be cpu, or cuda"),
        (("compare", "cifar10-simclr", "model=resnet9"), "of resnet50-imagenet, of shape (2048,). Got 'resnet9'"),
        (("train", "digits", "--method", "dp-sgd,dp-psac"), "'method' parameter of dpscale must be one of"),
        (("train", "digits", "--gamma0", "2"), "1 weighs all K0 + 1 points alike; K0 = 0 stands for no memory"),
        (("train", "digits", "--train-size", "5000"), "'train_size' parameter of load must be an integer <= 1437"),
        (("reproduce", "table2", "--presets", ""), "must be one of: digits, mnist"),
    ],
)  # fmt: skip
def test_refused_experiments_leave_nothing_behind(arguments, text, tmp_path, idle, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(runner, "calibrate", lambda config: runner.planned(config) and 1.0)
    out = tmp_path / "runs"
    assert text in refuse(*arguments, "--out", out)
    assert not out.exists()


@pytest.mark.parametrize("command", [("train", "digits"), ("compare", "digits"), ("reproduce", "all")])
def test_a_folder_that_cannot_be_written_is_refused_before_the_work(command, tmp_path, idle):
    (tmp_path / "file").touch()
    line = refuse(*command, "--out", tmp_path / "file" / "x")
    assert f"Cannot write to the folder {tmp_path / 'file' / 'x'}. Choose another --out." in line


def test_a_missing_data_set_names_the_command_that_gets_it(tmp_path, idle, monkeypatch):
    """And is asked for before another experiment is trained for hours."""
    monkeypatch.setenv("DPSCALE_DATA", "elsewhere")  # set by --data for the processes of a comparison; put back after
    runner._whole.cache_clear()
    for name, arguments in (
        ("get mnist", ("compare", "mnist")),
        ("get mnist", ("train", "mnist")),
        ("get mnist", ("reproduce", "table2", "--presets", "digits,mnist")),
        ("import celeba-male PATH", ("reproduce", "figures", "--presets", "digits,celeba-male")),
    ):
        line = refuse(*arguments, "--data", tmp_path / "none", "--out", tmp_path / "out")
        assert f"Run 'dpscale data {name} --data {tmp_path / 'none'}'" in line
    line = refuse("features", "cifar10", "--encoder", "resnet50-imagenet", "--data", tmp_path / "none")
    assert f"Run 'dpscale data get cifar10 --data {tmp_path / 'none'}'" in line and not list(tmp_path.iterdir())
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "train-images.npy").touch()
    line = refuse("reproduce", "table2", "--presets", "digits,mnist", "--data", tmp_path, "--out", tmp_path / "out")
    assert f"The file {tmp_path / 'mnist' / 'manifest.json'} is missing, or not of mnist" in line


# -- as a process ----------------------------------------------------------------------------------------------


def process(*arguments, code="from dpscale.cli import main; main()"):
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)


def test_the_entry_point_exits_with_2_and_one_line():
    done = process("calibrate", "--epsilon", "-3", *MNIST, "--epochs", "20")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--help",), ("torch", "numpy", "scipy", "dp_accounting", "pydantic", "jinja2", "filelock", "platformdirs")),
        (("train", "--help"), ("torch", "numpy", "scipy", "dp_accounting")),
        (("calibrate", "--epsilon", "3", *MNIST, "--epochs", "20", "--json"), ("torch",)),
        (("epsilon", *ONE, *MNIST, "--json"), ("torch",)),
    ],
)
def test_a_command_loads_nothing_that_it_does_not_need_and_prints_json_alone(arguments, absent):
    code = "import sys\nfrom dpscale.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = process(*arguments, code=code)
    assert done.returncode == 0 and done.stdout
    loaded = done.stderr.split()
    assert "dpscale.cli" in loaded and not {*absent} & {*loaded}
    assert "--json" not in arguments or json.loads(done.stdout)["epsilon"] > 0
