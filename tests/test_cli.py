"""The command line: what it prints, what it refuses, what it leaves on disk."""

import json
import re
import subprocess
import sys

import pytest

from dpscale.lab import paper, queue, records, runner

from .helpers import refuse, run

TINY = ["--epochs", "1", "--batch", "64", "--lr", "0.1"]
MNIST = ["--delta", "1e-5", "--size", "60000", "--batch", "512"]
ONE = ["--noise-multiplier", "1", "--steps", "1"]


@pytest.fixture(scope="module")
def compared(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "runs"
    arguments = ("--methods", "dp-sgd,dp-psasc", "--seeds", "2", "--workers", "1", "--out", str(out), "--json")
    return out, json.loads(run("compare", "digits", *TINY, *arguments).stdout)


# -- help and version ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        "",
        *("train", "compare", "report", "calibrate", "epsilon", "plan", "features", "reproduce"),
        *(f"reproduce {name}" for name in ("table1", "table2", "figures", "all")),
        *("ledger", *(f"ledger {name}" for name in ("create", "show", "export"))),
    ],
)
def test_every_help_shows_an_example(command):
    text = run(*command.split(), "--help").stdout
    assert "Example" in text and f"dpscale {command}".strip() in text


def test_version_and_bare_command():
    assert run("--version").stdout.startswith("dpscale ")
    assert "Commands:" in run().stdout


@pytest.mark.parametrize(
    ("command", "place", "told"),
    [
        ("train digits", "compare.train", "What is finished is recorded; the same command goes on."),
        ("compare digits", "compare.compare", "What is finished is recorded; the same command goes on."),
        ("reproduce table2", "paper.experiments", "What is finished is recorded; the same command goes on."),
        ("features cifar10 --encoder resnet50-imagenet", "data.load", "Nothing half-done was left behind; the same"),
        ("data get mnist", "datasets.obtaining.get", "the same command begins again, a download where it stopped."),
        ("data import mnist .", "datasets.obtaining.take", "No half-done data set was left behind; the same command"),
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
    told = json.loads(run("calibrate", "--epsilon", "3", *MNIST, "--epochs", "20", "--json").stdout)
    assert told["noise_multiplier"] == pytest.approx(0.892, abs=0.002)
    assert told["epsilon"] <= 3 < told["epsilon_rdp"] and told["steps"] == 2344
    assert (told["sampler"], told["adjacency"], told["accountant"]) == ("poisson", "add-remove", "pld")
    assert told["delta"] == 1e-5 and "Guarantee" in told["statement"]


def test_calibrate_finds_steps_for_a_noise():
    arguments = ("--epsilon", "3", *MNIST, "--noise-multiplier", "0.9", "--json")
    steps = json.loads(run("calibrate", *arguments).stdout)["steps"]
    base = ("--noise-multiplier", "0.9", *MNIST, "--json")
    spent, more = (json.loads(run("epsilon", *base, "--steps", str(n)).stdout)["epsilon"] for n in (steps, steps + 20))
    assert spent <= 3 < more


def test_epsilon_of_fixed_size_batches_is_the_tight_one():
    base = ("--noise-multiplier", "0.9", *MNIST, "--epochs", "20", "--json")
    poisson, fixed = (json.loads(run("epsilon", *base, "--sampler", s).stdout) for s in ("poisson", "fixed-size"))
    assert poisson["epsilon"] == pytest.approx(2.94, abs=0.01)
    assert fixed["epsilon"] == pytest.approx(27.8, abs=0.1) and fixed["adjacency"] == "replace-one"


@pytest.mark.parametrize("sampler", ["full-batch", "shuffled"])
def test_other_samplers_have_an_epsilon_too(sampler):
    batch = [] if sampler == "full-batch" else ["--batch", "100"]
    base = ("--noise-multiplier", "5", "--delta", "1e-5", "--size", "1000", *batch, "--epochs", "2", "--json")
    told = json.loads(run("epsilon", *base, "--sampler", sampler).stdout)
    assert 0 < told["epsilon"] <= told["epsilon_rdp"] and told["sampler"] == sampler


def test_rdp_is_what_it_says():
    base = ("--noise-multiplier", "0.9", *MNIST, "--epochs", "20", "--accountant", "rdp", "--json")
    told = json.loads(run("epsilon", *base).stdout)
    assert told["accountant"] == "rdp" and told["epsilon"] == told["epsilon_rdp"]


def test_without_json_people_can_read_it():
    text = run("epsilon", "--noise-multiplier", "0.9", *MNIST, "--epochs", "20").stdout
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
        (("compare", "digits", "--set", "colour=1"), "'colour' parameter of dpscale must be left out: the values of"),
        (("compare", "digits", "held_out"), "=VALUE is missing"),
        (("compare", "digits", "grid=abc"), "'grid' parameter of Config must be a valid tuple. Got 'abc'"),
        (("train", "digits", "--gamma0", "2"), "1 weighs all K0 + 1 points alike; K0 = 0 stands for no memory"),
        (("train", "digits", "gamma1=2"), "'gamma1' parameter of HeavyBall must be above 0 and at most 1."),
        (("compare", "digits", "held_out=2"), "'held_out' parameter of Config must be less than 1"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(arguments, text):
    assert text in refuse(*arguments)


def test_a_large_delta_is_warned_of_on_stderr_alone():
    base = ("--noise-multiplier", "1", "--delta", "0.01", "--size", "1000", "--batch", "10", "--steps", "5")
    result = run("epsilon", *base, "--json")
    assert json.loads(result.stdout)["delta"] == 0.01 and "dpscale: warning: delta" in result.stderr


def test_a_large_delta_is_warned_of_once_in_a_command():
    base = ("--epsilon", "3", "--delta", "0.01", "--size", "1000", "--epochs", "20", "--sampler", "full-batch")
    for _ in range(2):
        (line,) = run("calibrate", *base).stderr.splitlines()
        assert line.startswith("dpscale: warning: delta = 0.01 is not below")


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


def test_figures_say_their_own_defaults_and_all_takes_what_they_take():
    texts = {name: " ".join(run("reproduce", name, "--help").stdout.split()) for name in ("table2", "figures", "all")}
    assert "sgd,auto-s,dp-psac,dp-psasc,dp-psasc-star]" in texts["figures"] and "[default: 1]" in texts["figures"]
    options = {name: set(re.findall(r" (--[a-z-]+) <", text)) for name, text in texts.items()}
    assert options["all"] == options["figures"] == options["table2"] and {"--seeds", "--device"} <= options["all"]


# -- train, compare, report ------------------------------------------------------------------------------------


def test_compare_prints_json_alone_and_writes_records_and_report(compared):
    out, told = compared
    assert [row["method"] for row in told["rows"]] == ["dp-sgd", "dp-psasc"]
    assert all(len(row["seeds"]) == 2 and row["half_width"] >= 0 for row in told["rows"])
    assert all(row["epsilon"] == pytest.approx(3, rel=1e-3) for row in told["rows"])
    assert told["verdict"] and told["seconds"] > 0
    assert len(records.load(out)) == 4 and (out / "report.html").is_file()
    assert {p.suffix or p.name for p in out.iterdir()} == {".json", ".html"}


def test_compare_resumes_and_shows_a_table(compared, monkeypatch):
    out, _ = compared
    monkeypatch.setattr(queue, "run", lambda job, *_: pytest.fail("was run again"))
    result = run(
        "compare", "digits", *TINY, "--methods", "dp-sgd,dp-psasc", "--seeds", "2", "--workers", "1", "--out", str(out)
    )
    assert "DP-PSASC" in result.stdout and "±" in result.stdout and "Report:" in result.stdout
    assert result.stderr == ""


def test_compare_says_one_plain_line_per_run_without_a_terminal(tmp_path):
    arguments = ("compare", "digits", *TINY, "--methods", "non-private", "--seeds", "2", "--workers", "1")
    result = run(*arguments, "--out", str(tmp_path))
    lines = result.stderr.splitlines()
    assert len(lines) == 2 and lines[0].startswith("[1/2] non-private: seed 0") and "\x1b" not in result.stderr


def test_train_says_in_plain_lines_how_far_it_is_without_a_terminal(tmp_path):
    arguments = ("train", "digits", "--epochs", "24", "--batch", "512", "--lr", "0.1")
    result = run(*arguments, "--method", "dp-psasc", "--out", str(tmp_path))
    assert result.stderr.startswith("checking …\n") and not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", result.stderr)
    assert "training loss" not in result.stdout
    form = re.compile(r"\[epoch (\d+)/24\] DP-PSASC: training loss \d+\.\d{3}, epsilon (\d\.\d\d)")
    told = [form.fullmatch(line) for line in result.stderr.splitlines() if not line.endswith(" …")]
    assert [int(found[1]) for found in told] == [3, 5, 8, 10, 12, 15, 17, 20, 22, 24]
    spent = [float(found[2]) for found in told]
    assert spent == sorted(set(spent)) and spent[-1] == 3
    assert run(*arguments, "--method", "dp-psasc", "--out", str(tmp_path)).stderr == ""  # found on disk
    plain = run(*arguments, "--method", "non-private", "--out", str(tmp_path)).stderr.splitlines()
    assert re.fullmatch(r"\[epoch 24/24\] Non-private SGD: training loss \d\.\d{3}", plain[-1])


def test_train_writes_one_record(tmp_path):
    arguments = ("train", "digits", "--method", "dp-psac", "--seed", "7", *TINY, "--out", str(tmp_path))
    result = run(*arguments, "--json")
    told = json.loads(result.stdout)
    assert (told["method"], told["seed"]) == ("dp-psac", 7) and told["epsilon"] <= 3 and result.stderr == ""
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text(encoding="utf-8")) == told
    again = run(*arguments)  # found on disk
    assert "DP-PSAC: test accuracy" in again.stdout and "Guarantee" in again.stdout


def test_report_is_made_anew_from_records(compared):
    out, told = compared
    (out / "report.html").unlink()
    again = json.loads(run("report", str(out), "--json").stdout)
    assert again["rows"] == told["rows"] and (out / "report.html").is_file()
    assert (again["preset"], again["verdict"], again["left"]) == ("digits", told["verdict"], 0)
    assert run("report", str(out)).stdout == f"Report: {out / 'report.html'}\n"


def test_report_packs_records_and_writes_tables(compared, tmp_path):
    out, told = compared
    results, page = tmp_path / "results", tmp_path / "docs" / "results.md"
    shown = run("report", str(out), "--pack", str(results), "--markdown", str(page)).stdout
    assert f"Markdown: {page}" in shown and f"Records: {results}" in shown
    assert [path.name for path in results.iterdir()] == ["digits.jsonl"]
    text = page.read_text(encoding="utf-8")
    assert "| DP-PSASC |" in text and told["verdict"] in text
    again = json.loads(run("report", str(results), "--markdown", str(page), "--json").stdout)
    assert again["rows"] == told["rows"] and page.read_text(encoding="utf-8") == text
    assert {path.name for path in results.iterdir()} == {"digits.jsonl", "report.html"}


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory):
    out = tmp_path_factory.mktemp("cli") / "paper"
    arguments = (
        "--presets",
        "digits",
        "--methods",
        "dp-sgd,dp-psasc",
        "--seeds",
        "1",
        "--epochs",
        "1",
        "--workers",
        "1",
        "search_seeds=1",
        "widen=0",
    )
    return out, ("--out", str(out), *arguments)


def test_a_spent_budget_is_told_and_the_same_command_goes_on(reproduced):
    out, arguments = reproduced
    result = run("reproduce", "table2", *arguments, "--budget-minutes", "0")
    assert "12 runs are left: the budget is spent" in result.stdout and "Report:" not in result.stdout
    assert not list(out.rglob("*.json"))
    told = json.loads(run("reproduce", "table2", *arguments, "--json").stdout)
    assert told["left"] == 0 and [row["method"] for row in told["experiments"][0]["rows"]] == ["dp-sgd", "dp-psasc"]
    assert (out / "report.html").is_file() and (out / "digits" / "report.html").is_file()
    assert len(list((out / "digits" / "search").glob("*.json"))) == 10 and not (out / "digits" / "figures").exists()
    again = run("report", str(out)).stdout  # one folder per preset
    assert again == f"Report: {out / 'report.html'}\n"


def test_figures_are_written_beside_the_records(reproduced):
    out, arguments = reproduced
    result = run("reproduce", "figures", *arguments)
    assert "DP-PSASC" in result.stdout and "Report:" in result.stdout
    names = {"accuracy", "weights", "norms", "similarity-dp-sgd", "mean-weight"}
    assert {path.name for path in (out / "digits" / "figures").iterdir()} == {
        f"{n}.{s}" for n in names for s in ("png", "svg")
    }


def test_the_papers_settings_as_a_table_and_as_json(monkeypatch):
    monkeypatch.setattr(paper, "PRESETS", ("mnist",))
    (told,) = json.loads(run("reproduce", "table1", "--json").stdout)
    assert told["noise_multiplier"] == pytest.approx(0.8917, abs=2e-4) and told["samples"] == 60_000
    assert "0.8917" in run("reproduce", "table1", "--presets", "mnist").stdout


def test_options_reach_the_record(tmp_path):
    arguments = (
        "--gamma1",
        "0.3",
        "optimizer=nadam",
        "--train-size",
        "500",
        "--diagnostics",
    )
    told = json.loads(run("train", "digits", *TINY, *arguments, "--out", str(tmp_path), "--json").stdout)
    config = told["config"]
    assert (config["optimizer"], config["precision"], config["train_size"]) == ("nadam", "float32", 500)
    assert told["data"]["train"] == 500 and told["choice"] == {"rate": 0.1, "gamma1": 0.3}
    assert told["diagnostics"]["not_private"] is True and told["learning_rate"] == 0.1


def test_a_missing_data_set_names_the_command_that_gets_it(tmp_path, monkeypatch):
    monkeypatch.setenv("DPSCALE_DATA", "elsewhere")  # set by --data for the processes of a comparison; put back after
    runner._whole.cache_clear()
    out = ("--out", str(tmp_path / "out"))
    for arguments in (
        ("compare", "mnist", *out),
        ("train", "mnist", *out),
        ("reproduce", "table2", "--presets", "mnist", *out),
        ("features", "cifar10", "--encoder", "resnet50-imagenet"),
    ):
        line = refuse(*arguments, "--data", str(tmp_path / "none"))
        name = "cifar10" if arguments[0] == "features" else "mnist"
        assert f"Run 'dpscale data get {name} --data {tmp_path / 'none'}'" in line
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("compare", "mnits"), "'preset' parameter of dpscale must be one of: digits, mnist"),
        (("compare", "digits", "--methods", "dp-sgd,dp-magic"), "'method' parameter of dpscale must be one of: non-p"),
        (("compare", "digits", "--epsilon", "0"), "'epsilon' parameter of Config must be greater than 0. Got 0"),
        (("compare", "digits", "--seeds", "0"), "--seeds"),
        (("compare", "digits", "--lr", "-1"), "'rates.non-private' parameter of Config must be greater than"),
        (("compare", "digits", "--batch", "5000", "--workers", "1"), "'batch' parameter of Poisson must be at most"),
        (("train", "digits", "--method", "dp-sgd,dp-psac"), "'method' parameter of dpscale must be one of"),
        (("train", "nothing"), "Got 'nothing'"),
        (("train", "digits", "--epsilon", "inf"), "'epsilon' parameter of Config must be a finite number. Got"),
        (("train", "digits", "--optimizer", "adam"), "'optimizer' parameter of Config must be 'sgd' or 'nadam'"),
        (("train", "digits", "--train-size", "5000"), "'train_size' parameter of load must be an integer <= 1437"),
        (("train", "digits", "--model", "vit"), "'model' parameter of Config must be one of digits_cnn"),
    ],
)
def test_refused_experiments_leave_nothing_behind(arguments, text, tmp_path):
    out = tmp_path / "runs"
    assert text in refuse(*arguments, "--out", str(out))
    assert not out.exists()


def test_report_of_nothing_and_of_a_broken_record(tmp_path):
    assert "has no records. Run 'dpscale compare" in refuse("report", str(tmp_path))
    assert "There is no folder" in refuse("report", str(tmp_path / "none"))
    (tmp_path / "dp-sgd-seed0-abc.json").write_text("{", encoding="utf-8")
    line = refuse("report", str(tmp_path))
    assert "dp-sgd-seed0-abc.json" in line and "Delete it and run the same command again" in line
    assert not (tmp_path / "report.html").exists()
    file = tmp_path / "some.jsonl"
    file.write_text("")
    assert f"{file} is a file. Give the folder that it lies in: dpscale report {tmp_path}" in refuse("report", file)
    line = refuse("report", tmp_path, "--markdown", tmp_path)
    assert f"{tmp_path} is a folder. Give --markdown a file, such as {tmp_path / 'results.md'}" in line


# -- as a process ----------------------------------------------------------------------------------------------


def process(*arguments):
    return subprocess.run(
        [sys.executable, "-c", "from dpscale.cli import main; main()", *arguments], capture_output=True, text=True
    )


def test_the_entry_point_prints_json_and_nothing_else():
    done = process("calibrate", "--epsilon", "3", *MNIST, "--epochs", "20", "--json")
    assert done.returncode == 0 and done.stderr == ""
    assert json.loads(done.stdout)["noise_multiplier"] == pytest.approx(0.892, abs=0.002)


def test_the_entry_point_exits_with_2_and_one_line():
    done = process("calibrate", "--epsilon", "-3", *MNIST, "--epochs", "20")
    assert done.returncode == 2 and done.stdout == "" and len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        (("--help",), ("torch", "numpy", "scipy", "dp_accounting", "pydantic", "jinja2", "filelock", "platformdirs")),
        (("train", "--help"), ("torch", "numpy", "scipy", "dp_accounting")),
        (("calibrate", "--epsilon", "3", *MNIST, "--epochs", "20"), ("torch",)),
        (("epsilon", *ONE, *MNIST), ("torch",)),
    ],
)
def test_a_command_loads_nothing_that_it_does_not_need(arguments, absent):
    code = "import sys\nfrom dpscale.cli import main\ntry: main()\nfinally: print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout
    loaded = done.stderr.split()
    assert "dpscale.cli" in loaded and not {*absent} & {*loaded}


def test_a_dry_run_says_what_is_left_and_runs_nothing(compared, tmp_path, monkeypatch):
    monkeypatch.setattr(queue, "run", lambda job, *_: pytest.fail("the work began"))
    arguments = ("compare", "digits", *TINY, "--methods", "dp-sgd,dp-psasc", "--workers", "1", "--dry-run")
    told = json.loads(run(*arguments, "--seeds", "5", "--out", compared[0], "--json").stdout)
    assert told["runs"] == 6 and 0 < told["minutes"] < 5  # two seeds of each are there, and tell how long one takes
    fresh = run(*arguments, "--seeds", "0,7", "--out", tmp_path / "new").stdout  # a few steps are timed
    assert re.fullmatch(r"digits +4 runs left, about [\d.]+ minutes\n", fresh) and not (tmp_path / "new").exists()
    whole = json.loads(
        run("reproduce", "table2", "--presets", "digits", "--dry-run", "--out", tmp_path, "--json").stdout
    )
    assert whole["runs"] == 8 * 5 + 6 * (5 + 3 * 2) and whole["plan"][0]["preset"] == "digits"


def test_a_budget_that_is_over_leaves_all_runs(tmp_path):
    arguments = ("compare", "digits", *TINY, "--methods", "dp-sgd", "--workers", "1", "--out", tmp_path)
    told = run(*arguments, "--budget-minutes", "0", code=1)
    assert "5 runs are left: the budget is spent. The same command goes on with them." in told.stderr
