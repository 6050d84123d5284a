"""The commands that run experiments: train, compare, tune, report, reproduce. `dpscale.cli` puts them on the command
line.

Each imports what it needs when it is run: modules of commands are imported for every command, and for ``--help``.
"""

import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.checks import require_positive
from dpscale.lab import options
from dpscale.lab.options import PRESET, SETTINGS, Device, Folder, Json, Preset, Values, configured, read, show

if TYPE_CHECKING:
    from dpscale.lab.paper import Experiment
    from dpscale.lab.presets import Config

MOST_SEEDS = 1000  # final runs are below it; the next one is `presets.SEARCH_SEED`
Out = Annotated[Path | None, typer.Option(help="Folder of records and report; default: runs/PRESET.")]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="Book every run there; see dpscale ledger create. It must have room.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Runs at once; default: 2 on the CPU, on a GPU as many as fit.")
]
Methods = Annotated[str | None, typer.Option(help="Comma-separated names; unless told all, controls under SGD alone.")]
Seeds = Annotated[
    str | None, typer.Option(help="How many, as 5, or which, as 0,3,7; unless told 5, and 3 where runs take long.")
]
Budget = Annotated[
    float | None, typer.Option(min=0, help="Begin no run that would not end within so many minutes. Resumes later.")
]
Repeats = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Run one of them so many times more, for the noise of the machine; default: once, and "
        "with a ledger, or where nothing is compared, never.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many runs are left and how long they take; run none.")]
PresetList = Annotated[str | None, typer.Option("--presets", help="Comma-separated names; default: the paper's five.")]
PaperOut = Annotated[Path, typer.Option(help="Folder of records, tables and report.")]

_LEFT = "{} runs are left: the budget is spent. The same command goes on with them."
reproduce = options.group("""Make the paper's results anew, beside what they look like here.

    \b
    Example:
      dpscale reproduce table1
      dpscale reproduce table2 --presets mnist,fashion-mnist --budget-minutes 30 --out runs/paper
      dpscale reproduce figures --presets mnist
      dpscale reproduce all --out runs/paper
    """)


def train(
    preset: Annotated[str | None, PRESET] = None, values: Values = None,
    method: Annotated[
        str | None, typer.Option(help="Name of a method; default: dp-psasc. dpscale methods lists them.")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, max=2**63 - 1, help="Of initialisation, batches and noise; presets: 0. Whoever knows it can remove "
            "the noise: leave it out for data of your own.",
        ),
    ] = None,
    out: Out = None, ledger: LedgerFile = None,
    target: Annotated[str | None, typer.Option(help="Own data: the column of a table to learn.")] = None,
    test: Annotated[str | None, typer.Option(help="Own data: test data, as --data, for the accuracy.")] = None,
    as_json: Json = False, data: Folder = None, device: Device = None,
) -> None:  # fmt: skip
    """Train one model: of a preset, or your own on data of your own.

    Without a preset, --data is table.csv, a folder with a folder of images for each class, or module:function, which
    returns a dataset or arrays; --model is module:function, or the name of one of the lab's models. --rate is that of
    SGD under a bound of 1, and --noise secure takes noise from a cryptographic generator.

    \b
    Example:
      dpscale train --data patients.csv --target outcome --epsilon 3 --delta 1e-6 --out runs/patients
      dpscale train --data images --model mycode:network --epsilon 8 --delta 1e-6 --epochs 20 --batch 1024
      dpscale train digits --method dp-psasc --seed 0 --out runs/digits
      dpscale train digits --method dp-psasc momentum=inner-outer K0=2 gamma0=0.5 gamma1=0.1
    """
    words = [*([preset] if preset else []), *(values or [])]
    if not words or words[0].startswith("-") or "=" in words[0]:
        given = read(words) | ({"method": method} if method else {})
        _train_own(given, out or Path("runs/own"), device, as_json, data=data, target=target, test=test, seed=seed,
                   ledger=ledger)  # fmt: skip
        return
    config = configured(words[0], read(words[1:]), data, device)
    if target is not None or test is not None:
        raise ValueError("--target and --test are for data of your own. Leave them out, or the name of the preset.")
    from dpscale.lab import compare, presets, terminal
    from dpscale.lab.settings import named

    chosen, folder = named(presets.METHODS, "method", method or "dp-psasc"), out or Path("runs") / config.preset
    options.require_writable(folder)
    with terminal.progress(chosen.title, quiet=as_json) as bar:
        record = compare.train(config, chosen, seed or 0, folder, ledger=ledger, command=_command(), on_progress=bar)
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.3f} at delta {record.delta:g}"
    told = f"{record.title}: test accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s"
    show(as_json, record.to_dict(), told, record.statement, f"Record in {folder}")


def _train_own(given: dict[str, Any], out: Path, device: str | None, as_json: bool, **asked: Any) -> None:
    for name in sorted(given.keys() - {"epsilon", "delta", "model", "epochs", "batch", "rate", "noise"}):
        raise ValueError(f"--{name} is not known for data of your own. Leave it out, or name a preset.")
    if asked["data"] is None or not given.keys() >= {"epsilon", "delta"}:
        raise ValueError("Name a preset (dpscale presets lists them), or give --data, --epsilon and --delta.")
    rate = given.setdefault("rate", 1.0)
    require_positive("train", "rate", rate, action="It is the learning rate of SGD under a bound of 1.")
    options.require_writable(out)
    from dpscale.lab import device as place
    from dpscale.lab import own, terminal

    place.use(device)
    with terminal.progress("train", quiet=as_json) as bar:
        found = own.train(out, **given, **asked, on_progress=bar)
    told = f"epsilon {found['epsilon']:.3f} at delta {found['delta']:g}"
    told += f", test accuracy {found['test_accuracy']:.1%}" if asked["test"] else ""
    show(as_json, found, told, found["statement"], f"Model, run and statement in {out}")


def tune(
    preset: Preset, values: Values = None,
    tries: Annotated[float, typer.Option(min=1, help="How many on average; the number is random.")] = 8,
    shape: Annotated[float, typer.Option(min=0, help="Of its distribution: 1 is geometric, inf Poisson.")] = 1,
    score_noise: Annotated[float, typer.Option(min=0, help="Standard deviation on the count of held-out samples.")] = 5,
    seed: Annotated[int | None, typer.Option(help="For public data: whoever knows it can remove the noise.")] = None,
    out: Out = None,
    ledger: Annotated[Path | None, typer.Option(help="Book the whole search there, once. It must have room.")] = None,
    as_json: Json = False, data: Folder = None, device: Device = None,
) -> None:  # fmt: skip
    """Search rate, C, s and momentum of DP-PSASC within the budget: only the best try is released. Resumes.

    \b
    Example:
      dpscale tune digits --tries 8 --epsilon 3 --out runs/tuned
    """
    config = configured(preset, read(values or []), data, device)
    folder = out or Path("runs") / f"{config.preset}-tuned"
    options.require_writable(folder)
    import torch

    from dpscale.lab import selection, terminal
    from dpscale.tuning import Selection

    start = time.perf_counter()

    def told(done: int) -> None:
        if not as_json:
            typer.echo(f"{done} tries done, {time.perf_counter() - start:.0f} s", err=True)

    chosen = Selection(tries=tries, shape=shape, score_noise=score_noise)
    with terminal.progress("this try", quiet=as_json) as bar:
        found = selection.select(config, chosen, folder, seed, told, ledger, bar)
    if (state := found.pop("state", None)) is not None:
        torch.save(state, folder / "model.pt")
    if found["choice"] is None:
        show(as_json, found, "No try was drawn, which a Poisson number allows. Nothing is released.")
        return
    one, every = (found[name] for name in ("epsilon_of_one_try", "epsilon_if_all_were_released"))
    show(
        as_json, found, f"Best: {', '.join(f'{name} {value:g}' for name, value in found['choice'].items())}",
        f"Test accuracy {found['test_accuracy']:.1%}",
        f"epsilon {found['epsilon']:.3f} at delta {config.delta:g} for the whole search",
        f"One try by itself would cost {one:.3f}, and {tries:g} that are all released {every:.3f}.",
        found["statement"], f"Model and card in {folder}",
    )  # fmt: skip


def compare(
    preset: Preset, values: Values = None, methods: Methods = None, seeds: Seeds = None, out: Out = None,
    ledger: LedgerFile = None, budget_minutes: Budget = None, repeats: Repeats = None, workers: Workers = None,
    dry_run: DryRun = False, as_json: Json = False, data: Folder = None, device: Device = None,
) -> None:  # fmt: skip
    """Compare methods over seeds, print a table, and write records and report.html. Resumes where it left off.

    \b
    Example:
      dpscale compare digits --methods dp-sgd,dp-psac,dp-psasc --seeds 5 --out runs/digits
      dpscale compare mnist epochs=10 model=gelu_cnn --dry-run
    """
    start, config = time.perf_counter(), configured(preset, read(values or []), data, device)
    from dpscale.lab import report, terminal

    folder, again = out or Path("runs") / config.preset, (ledger is None) if repeats is None else repeats
    how = {"ledger": ledger, "repeats": again, "at_once": workers}
    (one,) = _run([(config, folder)], methods, seeds, budget_minutes, dry_run, as_json, how)
    if not one.records:
        typer.echo(_LEFT.format(one.left), err=True)
        raise typer.Exit(1)
    path, seconds = report.write_all(folder, [one]), round(time.perf_counter() - start, 1)
    if not as_json:
        title = f"{config.preset}: ε = {config.epsilon:g}, δ = {config.delta:g}, 95% intervals over seeds"
        terminal.results(title, [one], "rate, momentum")
    told = [one.verdict, *[_LEFT.format(one.left)] * bool(one.left), f"Report: {path}  ({seconds:.0f} s)"]
    kept = {name: one.to_dict()[name] for name in ("rows", "verdict", "left")}
    show(as_json, {**kept, "report": str(path), "seconds": seconds}, *told)


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of records, or of a folder or PRESET.jsonl per experiment.", show_default=False),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(help="Write the tables as Markdown into this file too, pictures into figures/ beside it; what is "
                     "above its line <!-- tables --> stays, and a file without that line is refused."),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Write the records into this folder too, a PRESET.jsonl each; each must name a commit."),
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Make report.html anew from the records in a folder.

    \b
    Example:
      dpscale report runs/digits
      dpscale report runs/paper --pack results
      dpscale report results --markdown results/README.md
    """
    from dpscale.lab import paper, records, report, terminal

    if folder.is_file():
        raise ValueError(f"{folder} is a file. Give the folder that it lies in: dpscale report {folder.parent}")
    before = report.before_tables(markdown) if markdown else ""
    found = paper.load(folder)
    with terminal.progress("report", quiet=as_json) as bar:
        files = {"report": report.write_all(folder, found, bar)}
    if markdown:
        report.write_markdown(markdown, found, before)
        files["markdown"] = markdown
    if pack:
        for source, one in zip(paper.sources(folder), found, strict=True):
            records.pack(source, pack / f"{one.preset}.jsonl")  # a search too that no run has followed yet
        files["records"] = pack
    each = [one.to_dict() for one in found]
    made = (each[0] if len(each) == 1 else {"experiments": each}) | {name: str(path) for name, path in files.items()}
    show(as_json, made, *(f"{name.capitalize()}: {path}" for name, path in files.items()))


def presets(as_json: Json = False) -> None:
    """List the experiments that can be named, with their settings.

    \b
    Example:
      dpscale presets
    """
    from dpscale.lab.presets import PRESETS

    names, told = ("epsilon", "delta", "batch", "epochs", "model", "optimizer"), []
    for name, config in PRESETS.items():
        told.append(f"{name:<20} {', '.join(f'{key} {getattr(config, key)}' for key in names)}")
    show(as_json, {name: config.to_dict() for name, config in PRESETS.items()}, *told)


def methods(as_json: Json = False) -> None:
    """List the methods that can be compared.

    \b
    Example:
      dpscale methods
    """
    from dpscale.lab.presets import METHODS

    found = {name: method.title for name, method in METHODS.items()}
    show(as_json, found, *(f"{name:<20} {title}" for name, title in found.items()))


@reproduce.command()
def table1(presets_: PresetList = None, as_json: Json = False) -> None:
    """The paper's settings, and the noise multiplier that they come to. Trains nothing.

    \b
    Example:
      dpscale reproduce table1
    """
    from dpscale.lab import terminal

    found = _settings([configured(name) for name in _names(presets_)], as_json)
    options.print_json(found) if as_json else terminal.settings(found)


def _settings(configs: "Sequence[Config]", quiet: bool) -> list[dict[str, Any]]:
    from dpscale.lab import paper
    from dpscale.lab.progress import Progress
    from dpscale.lab.terminal import progress

    found = []
    with progress("settings", quiet=quiet) as bar:
        for config in configs:
            found += paper.settings([config])
            bar(Progress("noise multipliers", len(found), len(configs), "experiments"))
    return found


def _reproducing(name: str, text: str, methods_: str | None, seeds_: str | None, folder: str, **own: bool) -> None:
    """Add a command that runs the paper's experiments; ``own`` is what it changes, unless a value says otherwise."""

    def run(
        values: Values = None, presets_: PresetList = None, methods: Methods = methods_, seeds: Seeds = seeds_,
        out: PaperOut = Path(folder), budget_minutes: Budget = None, repeats: Repeats = None, data: Folder = None,
        device: Device = None, workers: Workers = None, dry_run: DryRun = False, as_json: Json = False,
    ) -> None:  # fmt: skip
        configs = [configured(each, {**own, **read(values or [])}, data, device) for each in _names(presets_)]
        from dpscale.lab import figures, paper, report, terminal

        shown = [one for one in configs if name == "all" and one.preset in paper.SIZES]
        if shown and not as_json and not dry_run:
            options.require_writable(out)
            terminal.settings(_settings(shown, as_json))
        again = (name != "figures") if repeats is None else repeats
        places = [(one, out / one.preset) for one in configs]
        how = {"repeats": again, "at_once": workers}
        found = _run(places, methods, seeds, budget_minutes, dry_run, as_json, how)
        path = report.write_all(out, paper.with_others(found, out)) if any(one.records for one in found) else None
        for one in (one for one in found if one.records and own):  # diagnostics are recorded, for pictures
            figures.write(out / one.preset / "figures", figures.pictures(one.records))
        left, each = sum(one.left for one in found), [one.to_dict() for one in found]
        if not as_json:
            terminal.results("Test accuracy, 95% intervals over seeds", found, "paper")
        told = [_LEFT.format(left)] * bool(left) + [f"Report: {path}"] * bool(path)
        show(as_json, {"experiments": each, "left": left, "report": path and str(path)}, *told)

    run.__doc__ = f"{text}\n\n    \b\n    Example:\n      dpscale reproduce {name} --presets mnist --out {folder}\n"
    reproduce.command(name=name, context_settings=SETTINGS)(run)


_reproducing(
    "table2", "The paper's table of accuracies: every method on every data set, beside what the paper has. Resumes.",
    None, None, "runs/paper",
)  # fmt: skip
_reproducing(
    "figures", "The paper's pictures: gradient similarity, norms, mean weights. NOT PRIVATE: they look past the noise.",
    "dp-sgd,auto-s,dp-psac,dp-psasc,dp-psasc-star", "1", "runs/figures", diagnostics=True, tune=False,
)  # fmt: skip
_reproducing(
    "all", "Settings, accuracies and pictures in one go: table2 with diagnostics on. Resumes where it left off.",
    None, None, "runs/paper", diagnostics=True,
)  # fmt: skip


def _run(
    places: "Sequence[tuple[Config, Path]]", methods: str | None, seeds: str | None, budget: float | None,
    dry_run: bool, as_json: bool, how: dict[str, Any],
) -> "list[Experiment]":  # fmt: skip
    """What came of these experiments in these folders, as far as the budget allows; a dry run says what is left, and
    ends here."""
    from dpscale.lab import paper, presets, stats, terminal

    numbers, asked = _seeds(seeds), []
    for config, out in places:
        options.require_writable(out)
        asked.append((config, presets.methods(methods, config), numbers or paper.usual_seeds(config.preset), out))
    if dry_run:
        rows = paper.left(asked, how["repeats"], how["at_once"])
        runs, minutes = (sum(row[name] for row in rows) for name in ("runs", "minutes"))
        total = {"preset": "all", "runs": runs, "minutes": stats.two_digits(minutes)}
        each = [*rows, total] if len(rows) > 1 else rows
        told = (f"{row['preset']:<20} {row['runs']} runs left, about {row['minutes']:g} minutes" for row in each)
        show(as_json, {"plan": rows, "runs": runs, "minutes": total["minutes"]}, *told)
        raise typer.Exit
    deadline = None if budget is None else time.monotonic() + 60 * budget
    with terminal.runs_bar(quiet=as_json) as bar:
        return paper.experiments(asked, deadline=deadline, command=_command(), on_event=bar, **how)


def _seeds(text: str | None) -> list[int]:
    """5 is 0 to 4; 0,3,7 are these. None if it is not said."""
    if text is None:
        return []
    try:
        given = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        given = [-1]
    found = given if "," in text else list(range(given[0]))
    if not found or min(found) < 0 or max(found) >= MOST_SEEDS:
        raise ValueError(f"--seeds must be how many, as 5, or which, as 0,3,7, all below {MOST_SEEDS}. Got {text!r}.")
    return sorted(set(found))


def _names(names: str | None) -> list[str]:
    from dpscale.lab import paper, presets
    from dpscale.lab.settings import named

    wanted = dict.fromkeys(paper.PRESETS if names is None else (name.strip() for name in names.split(",")))
    return [named(presets.PRESETS, "preset", name).preset for name in wanted]  # refuses unknown ones


def _command() -> str:
    return shlex.join(["dpscale", *sys.argv[1:]])
