"""The commands that run experiments: train, compare, tune, report, reproduce. `dpscale.cli` puts them on the command
line.

Each imports what it needs when it is run: modules of commands are imported for every command, and for ``--help``.
"""

import json
import math
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.checks import require_positive
from dpscale.lab.options import SETTINGS, Device, Folder, Values, configured, experiment, read

if TYPE_CHECKING:
    from dpscale.lab.config import Config

MOST_SEEDS = 1000  # final runs are below it; the next one is `config.SEARCH_SEED`
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
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
Repeats = Annotated[int, typer.Option(min=0, help="Run one of them so many times more: the noise of the machine.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say how many runs are left and how long they take; run none.")]
PresetList = Annotated[str | None, typer.Option("--presets", help="Comma-separated names; default: the paper's five.")]
PaperOut = Annotated[Path, typer.Option(help="Folder of records, tables and report.")]

reproduce = typer.Typer(add_completion=False, rich_markup_mode=None)


def _train_own(
    data: Path | None = None, target: str | None = None, model: str | None = None, test: str | None = None,
    epsilon: float | None = None, delta: float | None = None, epochs: float | None = None, batch: int | None = None,
    rate: float = 1.0, seed: int | None = None, out: Path | None = None, ledger: Path | None = None,
    noise: str | None = None, device: str | None = None, as_json: bool = False, **presets: Any,
) -> None:  # fmt: skip
    """Train on data of one's own."""
    for name in (name for name, value in presets.items() if value is not None):
        raise ValueError(f"--{name} is not known for data of your own. Leave it out, or name a preset.")
    if data is None or epsilon is None or delta is None:
        raise ValueError("Name a preset (dpscale presets lists them), or give --data, --epsilon and --delta.")
    require_positive("train", "rate", rate, action="It is the learning rate of SGD under a bound of 1.")
    out = out or Path("runs/own")
    _require_writable(out)
    from dpscale.lab import device as place
    from dpscale.lab import display, own

    place.use(device)
    with display.run_bar("training", quiet=as_json) as bar:
        found = own.train(
            str(data), target, model, test, out, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, rate=rate,
            seed=seed, ledger=ledger, noise=noise, on_progress=bar,
        )  # fmt: skip
    if as_json:
        print_json(found)
        return
    right = found["test_accuracy"]
    typer.echo(f"epsilon {found['epsilon']:.3f} at delta {delta:g}" + (f", test accuracy {right:.1%}" if test else ""))
    typer.echo(found["statement"])
    typer.echo(f"Model, run and statement in {out}")


@experiment(_train_own)
def train(
    config: "Config",
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
    out: Out = None,
    ledger: LedgerFile = None,
    target: Annotated[str | None, typer.Option(help="Own data: the column of a table to learn.")] = None,
    test: Annotated[str | None, typer.Option(help="Own data: test data, as --data, for the accuracy.")] = None,
    as_json: Json = False,
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
    if target is not None or test is not None:
        raise ValueError("--target and --test are for data of your own. Leave them out, or the name of the preset.")
    from dpscale.lab import compare, display
    from dpscale.lab.config import method as named

    chosen, folder = named(method or "dp-psasc"), out or Path("runs") / config.preset
    _require_writable(folder)
    with display.run_bar(chosen.title, quiet=as_json) as bar:
        record = compare.train(config, chosen, seed or 0, folder, ledger=ledger, command=_command(), on_progress=bar)
    if as_json:
        print_json(record.to_dict())
        return
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.3f} at delta {record.delta:g}"
    typer.echo(f"{record.title}: test accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s")
    typer.echo(record.statement)
    typer.echo(f"Record in {folder}")


@experiment()
def tune(
    config: "Config",
    tries: Annotated[float, typer.Option(min=1, help="How many on average; the number is random.")] = 8,
    shape: Annotated[float, typer.Option(min=0, help="Of its distribution: 1 is geometric, inf Poisson.")] = 1,
    score_noise: Annotated[float, typer.Option(min=0, help="Standard deviation on the count of held-out samples.")] = 5,
    seed: Annotated[int | None, typer.Option(help="For public data: whoever knows it can remove the noise.")] = None,
    out: Out = None,
    ledger: Annotated[Path | None, typer.Option(help="Book the whole search there, once. It must have room.")] = None,
    as_json: Json = False,
) -> None:
    """Search rate, C, s and momentum of DP-PSASC within the budget: only the best try is released. Resumes.

    \b
    Example:
      dpscale tune digits --tries 8 --epsilon 3 --out runs/tuned
    """
    folder = out or Path("runs") / f"{config.preset}-tuned"
    _require_writable(folder)
    import torch

    from dpscale.lab import selection, terminal
    from dpscale.tuning import Selection

    chosen = Selection(tries=tries, shape=shape, score_noise=score_noise)
    start = time.perf_counter()

    def told(done: int) -> None:
        if not as_json:
            terminal.line(f"{done} tries done, {time.perf_counter() - start:.0f} s")

    found = selection.select(config, chosen, folder, seed, told, ledger)
    state = found.pop("state", None)
    if state is not None:
        torch.save(state, folder / "model.pt")
    if as_json:
        print_json(found)
        return
    if found["choice"] is None:
        typer.echo("No try was drawn, which a Poisson number allows. Nothing is released.")
        return
    typer.echo(f"Best: {', '.join(f'{name} {value:g}' for name, value in found['choice'].items())}")
    typer.echo(f"Test accuracy {found['test_accuracy']:.1%}")
    whole, one, every = (
        f"{found[name]:.3f}" for name in ("epsilon", "epsilon_of_one_try", "epsilon_if_all_were_released")
    )
    typer.echo(f"epsilon {whole} at delta {config.delta:g} for the whole search")
    typer.echo(f"One try by itself would cost {one}, and {tries:g} that are all released {every}.")
    typer.echo(found["statement"])
    typer.echo(f"Model and card in {folder}")


@experiment()
def compare(
    config: "Config",
    methods: Methods = None,
    seeds: Seeds = None,
    out: Out = None,
    ledger: LedgerFile = None,
    budget_minutes: Budget = None,
    repeats: Repeats = 0,
    workers: Workers = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds, print a table, and write records and report.html. Resumes where it left off.

    \b
    Example:
      dpscale compare digits --methods dp-sgd,dp-psac,dp-psasc --seeds 5 --out runs/digits
      dpscale compare mnist epochs=10 model=gelu_cnn --dry-run
    """
    from rich.console import Console

    from dpscale.lab import compare, display, report
    from dpscale.lab.config import methods as named

    chosen, folder, start = named(methods, config), out or Path("runs") / config.preset, time.perf_counter()
    numbers = _seeds(seeds) or range(5)
    _require_writable(folder)
    if dry_run:
        _print_plan([(config, chosen, numbers, folder)], repeats, workers, as_json)
        return
    with display.comparison_bar(f"compare {config.preset}", quiet=as_json) as bar:
        done = compare.compare(
            config, chosen, numbers, folder, ledger=ledger, at_once=workers, command=_command(), on_event=bar,
            repeats=repeats, deadline=None if budget_minutes is None else time.monotonic() + 60 * budget_minutes,
        )  # fmt: skip
    if not done.records:
        typer.echo(f"{done.left} runs are left: the budget is spent. The same command goes on with them.", err=True)
        raise typer.Exit(1)
    folder.mkdir(parents=True, exist_ok=True)  # there is none yet if all records were packed beside it
    path, one = report.write(folder, like=done.records)
    seconds = round(time.perf_counter() - start, 1)
    if as_json:
        told = {name: one.to_dict()[name] for name in ("rows", "verdict")}
        print_json({**told, "report": str(path), "left": done.left, "seconds": seconds})
        return
    title = f"{config.preset}: ε = {config.epsilon:g}, δ = {config.delta:g}, {len(numbers)} seeds, 95% intervals"
    Console(highlight=False).print(display.table(title, one.rows))
    typer.echo(report.verdict(one))
    if done.left:
        typer.echo(f"{done.left} runs are left: the budget is spent. The same command goes on with them.")
    typer.echo(f"Report: {path}  ({seconds:.0f} s)")


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of records, or of a folder or PRESET.jsonl per experiment.", show_default=False),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Write the tables as Markdown into this file too, pictures into figures/ beside it; what is above "
            "its line <!-- tables --> stays, and a file without that line is refused."
        ),
    ] = None,
    pack: Annotated[
        Path | None,
        typer.Option(help="Write the records into this folder too, a PRESET.jsonl each; each must name a commit."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Make report.html anew from the records in a folder.

    \b
    Example:
      dpscale report runs/digits
      dpscale report runs/paper --pack results
      dpscale report results --markdown results/README.md
    """
    from dpscale.lab import paper, records, report

    if folder.is_file():
        raise ValueError(f"{folder} is a file. Give the folder that it lies in: dpscale report {folder.parent}")
    before = report.before_tables(markdown) if markdown else ""
    found = paper.load(folder)
    files = {"report": report.write_all(folder, found)}
    if markdown:
        report.write_markdown(markdown, found, before)
        files["markdown"] = markdown
    if pack:
        for source, one in zip(paper.sources(folder), found, strict=True):
            records.pack(source, pack / f"{one.preset}.jsonl")  # a search too that no run has followed yet
        files["records"] = pack
    if as_json:
        told = [one.to_dict() for one in found]
        print_json({**(told[0] if len(told) == 1 else {"experiments": told}), **{k: str(v) for k, v in files.items()}})
    else:
        for name, path in files.items():
            typer.echo(f"{name.capitalize()}: {path}")


def presets(as_json: Json = False) -> None:
    """List the experiments that can be named, with their settings.

    \b
    Example:
      dpscale presets
    """
    from dpscale.lab.presets import PRESETS

    found = {name: config.to_dict() for name, config in PRESETS.items()}
    if as_json:
        print_json(found)
        return
    for name, config in found.items():
        shown = ("epsilon", "delta", "batch", "epochs", "model", "optimizer")
        typer.echo(f"{name:<20} {', '.join(f'{key} {config[key]}' for key in shown)}")


def methods(as_json: Json = False) -> None:
    """List the methods that can be compared.

    \b
    Example:
      dpscale methods
    """
    from dpscale.lab.config import METHODS

    if as_json:
        print_json({name: method.title for name, method in METHODS.items()})
        return
    for name, method in METHODS.items():
        typer.echo(f"{name:<20} {method.title}")


@reproduce.callback(invoke_without_command=True)
def _reproduce(context: typer.Context) -> None:
    """Make the paper's results anew, beside what they look like here.

    \b
    Example:
      dpscale reproduce table1
      dpscale reproduce table2 --presets mnist,fashion-mnist --budget-minutes 30 --out runs/paper
      dpscale reproduce figures --presets mnist
      dpscale reproduce all --out runs/paper
    """
    # Which of them it is: not all have records to go on from after an interrupt.
    context.ensure_object(dict)["command"] = f"reproduce {context.invoked_subcommand}"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@reproduce.command()
def table1(presets_: PresetList = None, as_json: Json = False) -> None:
    """The paper's settings, and the noise multiplier that they come to. Trains nothing.

    \b
    Example:
      dpscale reproduce table1
    """
    from rich.console import Console

    from dpscale.lab import display, paper

    found = paper.settings([configured(name) for name in _names(presets_)])
    if as_json:
        print_json(found)
    else:
        Console(highlight=False).print(display.settings(found))


def _reproducing(name: str, text: str, methods_: str | None, seeds_: str | None, folder: str, **own: bool) -> None:
    """Add a command that runs the paper's experiments; ``own`` is what it changes, unless a value says otherwise."""

    def run(
        values: Values = None, presets_: PresetList = None, methods: Methods = methods_, seeds: Seeds = seeds_,
        out: PaperOut = Path(folder), budget_minutes: Budget = None, repeats: Repeats = 0, data: Folder = None,
        device: Device = None, workers: Workers = None, dry_run: DryRun = False, as_json: Json = False,
    ) -> None:  # fmt: skip
        _require_writable(out)
        changes, settings = {**own, **read(values or [])}, name == "all"
        configs = [configured(each, changes, data, device) for each in _names(presets_)]
        chosen: dict[str, Any] = {"seeds": _seeds(seeds), "at_once": workers, "repeats": repeats}
        if dry_run:
            from dpscale.lab import paper
            from dpscale.lab.config import methods as named

            asked = [(one, named(methods, one), chosen["seeds"] or paper.usual_seeds(one.preset), out / one.preset)
                     for one in configs]  # fmt: skip
            _print_plan(asked, repeats, workers, as_json)
            return
        budget = None if budget_minutes is None else 60 * budget_minutes
        _experiments(configs, methods, out, settings, as_json, drawn=bool(own), budget=budget, **chosen)

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


def _experiments(
    configs: "list[Config]", methods: str | None, out: Path, settings: bool, as_json: bool, drawn: bool, **how: Any
) -> None:
    from rich.console import Console

    from dpscale.lab import display, figures, paper, report

    console = Console(highlight=False)
    shown = [config for config in configs if settings and config.preset in paper.SIZES]
    if shown and not as_json:
        console.print(display.settings(paper.settings(shown)))
    others = paper.others(out, [config.preset for config in configs])
    with display.experiments_bar(quiet=as_json) as bar:
        found = paper.experiments(configs, methods, out, command=_command(), on_event=bar, **how)
    path = report.write_all(out, paper.ordered([*found, *others])) if any(one.records for one in found) else None
    for one in (one for one in found if one.records and drawn):  # diagnostics are recorded, for pictures
        figures.write(out / one.preset / "figures", figures.pictures(one.records))
    left = sum(one.left for one in found)
    if as_json:
        print_json({"experiments": [one.to_dict() for one in found], "left": left, "report": path and str(path)})
        return
    console.print(display.accuracies(found))
    if left:
        typer.echo(f"{left} runs are left: the budget is spent. The same command goes on with them.")
    if path:
        typer.echo(f"Report: {path}")


def _print_plan(asked: Sequence[tuple[Any, ...]], repeats: int, workers: int | None, as_json: bool) -> None:
    """How many runs each experiment has left, and about how long they take."""
    from dpscale.lab import compare

    rows = []
    for config, methods, seeds, out in asked:
        found = compare.compare(config, methods, seeds, out, repeats=repeats, at_once=1, deadline=-math.inf)
        about = compare.minutes(config, methods, found, workers)
        rows.append({"preset": config.preset, "runs": found.left, "minutes": round(about, 1)})
    if as_json:
        print_json({"plan": rows, **{name: sum(row[name] for row in rows) for name in ("runs", "minutes")}})
        return
    for row in rows:
        typer.echo(f"{row['preset']:<20} {row['runs']} runs left, about {row['minutes']:g} minutes")


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

    wanted = list(dict.fromkeys(paper.PRESETS if names is None else (name.strip() for name in names.split(","))))
    for name in wanted:
        presets.preset(name)  # refuses unknown ones
    return wanted


def print_json(value: Any) -> None:
    """One JSON document on stdout; a number that JSON does not have (inf, NaN) becomes null."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _require_writable(folder: Path) -> None:
    # Looked at before minutes are spent, not after; nothing is made yet.
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not (there.is_dir() and os.access(there, os.W_OK)):
        raise ValueError(f"Cannot write to the folder {folder}. Choose another --out.")


def _command() -> str:
    return shlex.join(["dpscale", *sys.argv[1:]])
