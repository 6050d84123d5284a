"""The commands that run experiments: train, compare, report, reproduce. `dpscale.cli` puts them on the command line.

Each imports what it needs when it is run: modules of commands are imported for every command, and for ``--help``.
"""

import dataclasses
import json
import math
import shlex
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.lab.options import Encoder, Epochs, Folder, Values, configured, experiment

if TYPE_CHECKING:
    from dpscale.lab.presets import Config

MOST_SEEDS = 1000  # final runs count theirs from 0; the next one is `presets.SEARCH_SEED`
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Out = Annotated[Path | None, typer.Option(help="Folder of records and report; default: runs/PRESET.")]
Tune = Annotated[
    bool | None,
    typer.Option(
        "--tune/--no-tune", help="Search the rate of each method on held-out training data; default: the preset's."
    ),
]
LedgerFile = Annotated[
    Path | None, typer.Option("--ledger", help="Book every run there; see dpscale ledger create. It must have room.")
]
Workers = Annotated[
    int | None, typer.Option(min=1, help="Runs at once; default: 2 on the CPU, on a GPU as many as fit.")
]


reproduce = typer.Typer(add_completion=False, rich_markup_mode=None)


def _train_own(
    data: Path | None = None, target: str | None = None, model: str | None = None, test: str | None = None,
    epsilon: float | None = None, delta: float | None = None, epochs: float | None = None, batch: int | None = None,
    rate: float = 1.0, seed: int | None = None, out: Path = Path("runs/own"), ledger: Path | None = None,
    as_json: bool = False, **presets: Any,
) -> None:  # fmt: skip
    """Train on data of one's own."""
    if presets:
        raise ValueError(
            f"{', '.join(f'--{name}' for name in presets)} is for presets. Leave it out, or name a preset."
        )
    if data is None or epsilon is None or delta is None:
        raise ValueError("Name a preset (dpscale presets lists them), or give --data, --epsilon and --delta.")
    _require_writable(out)
    from dpscale.lab import display, own

    with display.steps_bar("training", quiet=as_json) as bar:
        found = own.train(
            str(data), target, model, test, out, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, rate=rate,
            seed=seed, ledger=ledger, on_step=bar,
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
    returns a dataset or arrays; --model is module:function, or the name of one of the lab's models.

    \b
    Example:
      dpscale train --data patients.csv --target outcome --epsilon 3 --delta 1e-6 --out runs/patients
      dpscale train --data images --model mycode:network --epsilon 8 --delta 1e-6 --epochs 20 --batch 1024
      dpscale train digits --method dp-psasc --seed 0 --out runs/digits
      dpscale train digits --method dp-psasc --momentum inner-outer --k0 2 --gamma0 0.5 --gamma1 0.1
    """
    if target is not None or test is not None:
        raise ValueError("--target and --test are for data of your own. Leave them out, or the name of the preset.")
    from dpscale.lab import display, presets
    from dpscale.lab.compare import train

    chosen, seed = presets.method(method or "dp-psasc"), seed or 0
    folder = out or Path("runs") / config.preset
    _require_writable(folder)
    with display.run_bar(chosen.title, quiet=as_json) as bar:
        record = train(config, chosen, seed, folder, ledger=ledger, command=_command(), on_progress=bar)
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

    found = selection.select(config, chosen, folder, seed, told)
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
    typer.echo(f"Model in {folder}")


@experiment(tune=Tune)
def compare(
    config: "Config",
    methods: Annotated[str | None, typer.Option(help="Comma-separated names; default: all, with controls.")] = None,
    seeds: Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Number of seeds per method.")] = 5,
    out: Out = None,
    ledger: LedgerFile = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds, print a table, and write records and report.html. Resumes where it left off.

    \b
    Example:
      dpscale compare digits --methods dp-sgd,dp-psac,dp-psasc --seeds 5 --out runs/digits
    """
    from rich.console import Console

    from dpscale.lab import compare, display, presets, report, summary

    chosen, folder, start = presets.methods(methods), out or Path("runs") / config.preset, time.perf_counter()
    _require_writable(folder)
    with display.comparison_bar(f"compare {config.preset}", quiet=as_json) as bar:
        found = compare.compare(
            config, chosen, range(seeds), folder, ledger=ledger, workers=workers, command=_command(),
            on_begun=bar.begun, on_finished=bar.finished,
        ).records  # fmt: skip
    rows = summary.summarize(found)
    folder.mkdir(parents=True, exist_ok=True)  # there is none yet if all records were packed beside it
    path, _ = report.write(folder, like=found)
    seconds = time.perf_counter() - start
    if as_json:
        shown = [row.to_dict() for row in rows]
        print_json({"rows": shown, "verdict": summary.verdict(rows), "report": str(path), "seconds": round(seconds, 1)})
        return
    title = f"{config.preset}: ε = {config.epsilon:g}, δ = {config.delta:g}, {seeds} seeds, 95% intervals"
    Console(highlight=False).print(display.table(title, rows))
    typer.echo(summary.verdict(rows))
    typer.echo(f"Report: {path}  ({seconds:.0f} s)")


def report(
    folder: Annotated[
        Path,
        typer.Argument(help="Folder of records, or of a folder or PRESET.jsonl per experiment.", show_default=False),
    ],
    markdown: Annotated[
        Path | None,
        typer.Option(
            help="Write the tables as Markdown into this file too, a picture into figures/ beside it; what is above "
            "its line <!-- tables --> stays, and a file without that line is refused."
        ),
    ] = None,
    pack: Annotated[
        Path | None, typer.Option(help="Write the records into this folder too, a PRESET.jsonl each.")
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
    from dpscale.lab import markdown as tables
    from dpscale.lab import paper, records, report

    if folder.is_file():
        raise ValueError(f"{folder} is a file. Give the folder that it lies in: dpscale report {folder.parent}")
    before = tables.before(markdown) if markdown else ""
    found = paper.load(folder)
    files = {"report": report.write_all(folder, found)}
    if markdown:
        tables.write(markdown, found, before)
        files["markdown"] = markdown
    if pack:
        for source, one in zip(paper.sources(folder), found, strict=True):
            records.pack(source, pack / f"{one.preset}.jsonl")  # a search too that no run has followed yet
        files["records"] = pack
    if as_json:
        alone = paper.to_dict(found)[0] if len(found) == 1 else {"experiments": paper.to_dict(found)}
        print_json({**alone, **{name: str(path) for name, path in files.items()}})
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

    found = {name: make().to_dict() for name, make in PRESETS.items()}
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
    from dpscale.lab.presets import METHODS

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
      dpscale reproduce theory --out runs/theory
    """
    # Which of them it is: not all have records to go on from after an interrupt.
    context.ensure_object(dict)["command"] = f"reproduce {context.invoked_subcommand}"
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


PresetList = Annotated[str | None, typer.Option("--presets", help="Comma-separated names; default: the paper's five.")]
Methods = Annotated[str | None, typer.Option(help="Comma-separated names; default: all, with controls.")]
Seeds = Annotated[
    int | None, typer.Option(min=1, max=MOST_SEEDS, help="Seeds per method; default: 5, and 3 for the two large ones.")
]
PictureMethods = Annotated[str, typer.Option(help="Comma-separated names, such as psac-r-over-s.")]
PictureSeeds = Annotated[int, typer.Option(min=1, max=MOST_SEEDS, help="Seeds per method.")]
Budget = Annotated[
    float | None, typer.Option(min=0, help="Begin no run after so many minutes. The same command goes on later.")
]
PaperOut = Annotated[Path, typer.Option(help="Folder of records, tables and report.")]


@reproduce.command()
def table1(presets_: PresetList = None, as_json: Json = False) -> None:
    """The paper's settings, and the noise multiplier that they come to. Trains nothing.

    \b
    Example:
      dpscale reproduce table1
    """
    from rich.console import Console

    from dpscale.lab import display, paper, presets

    found = paper.settings([presets.preset(name) for name in _names(presets_)])
    if as_json:
        print_json([dataclasses.asdict(one) for one in found])
    else:
        Console(highlight=False).print(display.settings(found))


@reproduce.command()
def table2(
    presets_: PresetList = None,
    methods: Methods = None,
    seeds: Seeds = None,
    out: PaperOut = Path("runs/paper"),
    budget_minutes: Budget = None,
    epochs: Epochs = None,
    data: Folder = None,
    encoder: Encoder = None,
    values: Values = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """The paper's table of accuracies: every method on every data set, beside what the paper has. Resumes.

    \b
    Example:
      dpscale reproduce table2 --presets mnist --seeds 5 --out runs/paper
      dpscale reproduce table2 --budget-minutes 60
    """
    _experiments(
        presets_, methods, seeds, out, budget_minutes, data, values, workers, as_json, epochs=epochs, encoder=encoder
    )


@reproduce.command()
def figures(
    presets_: PresetList = None,
    methods: PictureMethods = "dp-sgd,auto-s,dp-psac,dp-psasc,dp-psasc-star",
    seeds: PictureSeeds = 1,
    out: PaperOut = Path("runs/figures"),
    budget_minutes: Budget = None,
    epochs: Epochs = None,
    data: Folder = None,
    encoder: Encoder = None,
    values: Values = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """The paper's pictures: gradient similarity, norms, mean weights. NOT PRIVATE: they look past the noise.

    \b
    Example:
      dpscale reproduce figures --presets mnist --out runs/figures
    """
    _experiments(
        presets_, methods, seeds, out, budget_minutes, data, values, workers, as_json,
        own={"diagnostics": True, "tune": False}, epochs=epochs, encoder=encoder,
    )  # fmt: skip


@reproduce.command(name="all")
def all_(
    presets_: PresetList = None,
    methods: Methods = None,
    seeds: Seeds = None,
    out: PaperOut = Path("runs/paper"),
    budget_minutes: Budget = None,
    epochs: Epochs = None,
    data: Folder = None,
    encoder: Encoder = None,
    values: Values = None,
    workers: Workers = None,
    as_json: Json = False,
) -> None:
    """Settings, accuracies and pictures in one go: table2 with diagnostics on. Resumes where it left off.

    The settings are those that are run. Presets that the paper does not have are left out of them.

    \b
    Example:
      dpscale reproduce all --budget-minutes 120 --out runs/paper
    """
    _experiments(
        presets_, methods, seeds, out, budget_minutes, data, values, workers, as_json,
        own={"diagnostics": True}, settings=True, epochs=epochs, encoder=encoder,
    )  # fmt: skip


def _experiments(
    names: str | None, methods: str | None, seeds: int | None, out: Path, minutes: float | None, data: Path | None,
    values: list[str] | None, workers: int | None, as_json: bool, own: dict[str, bool] | None = None,
    settings: bool = False, **changes: Any,
) -> None:  # fmt: skip
    _require_writable(out)
    from rich.console import Console

    from dpscale.lab import display, paper, presets, report
    from dpscale.lab import figures as pictures

    configs = [configured(name, None, data, values, own, **changes) for name in _names(names)]
    shown = [config for config in configs if settings and config.preset in paper.SIZES]
    if shown and not as_json:
        Console(highlight=False).print(display.settings(paper.settings(shown)))
    others = paper.others(out, [config.preset for config in configs])
    with display.experiments_bar(quiet=as_json) as bar:
        found = paper.experiments(
            configs, presets.methods(methods), out, seeds=seeds, workers=workers,
            budget=None if minutes is None else 60 * minutes, command=_command(),
            on_begun=lambda name, now: bar(name).begun(now), on_finished=lambda name, now: bar(name).finished(now),
        )  # fmt: skip
    path = report.write_all(out, paper.ordered([*found, *others])) if any(one.records for one in found) else None
    if own:  # it records diagnostics, for pictures
        for one in (one for one in found if one.records):
            pictures.write(out / one.preset / "figures", pictures.pictures(one.records))
    left = sum(one.left for one in found)
    if as_json:
        print_json({"experiments": paper.to_dict(found), "left": left, "report": path and str(path)})
        return
    Console(highlight=False).print(display.accuracies(found))
    if left:
        typer.echo(f"{left} runs are left: the budget is spent. The same command goes on with them.")
    if path:
        typer.echo(f"Report: {path}")


def _names(names: str | None) -> list[str]:
    from dpscale.lab import paper, presets

    given = paper.PRESETS if names is None else (name.strip() for name in names.split(","))
    wanted = list(dict.fromkeys(given))
    for name in wanted:
        presets.preset(name)  # refuses unknown ones
    return wanted


@reproduce.command()
def theory(
    out: Annotated[Path, typer.Option(help="Folder of figures and theory.json.")] = Path("runs/theory"),
    seeds: Annotated[
        int | None, typer.Option(min=2, help="Problems and starts per setting.", show_default="12")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Short runs on 3 seeds: tries the chain, shows nothing.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure the paper's theorems and inequalities on small problems; write figures and their numbers.

    \b
    Example:
      dpscale reproduce theory --out runs/theory
      dpscale reproduce theory --quick --out runs/quick
    """
    start = time.perf_counter()
    _require_writable(out)
    from rich.console import Console

    from dpscale.lab import provenance, theory, theory_view

    with theory_view.bar(quiet=as_json) as bar:
        found = theory.compute(seeds or (theory.QUICK_SEEDS if quick else theory.SEEDS), quick=quick, on_steps=bar)
    found["command"], found["commit"] = _command(), provenance.source_commit()
    found["versions"] = provenance.installed_versions()
    found["seconds"], found["cpu_seconds"] = round(time.perf_counter() - start, 1), round(time.process_time(), 1)
    out.mkdir(parents=True, exist_ok=True)
    paths = theory_view.write(out, found)
    if as_json:
        print_json({**found, "files": [str(path) for path in paths]})
        return
    Console(highlight=False).print(theory_view.table(found))
    typer.echo(
        f"{len(paths)} files in {out}  ({found['seconds']:.0f} s, {found['cpu_seconds']:.0f} s of processor time)"
    )


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
    # Tried before minutes are spent, not after; what is refused for another reason leaves no folder behind.
    try:
        made = [path for path in (folder, *folder.parents) if not path.exists()]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=folder):
                pass
        finally:
            for path in made:
                with suppress(OSError):  # not there, or somebody's by now
                    path.rmdir()
    except OSError as error:
        raise ValueError(f"Cannot write to the folder {folder}: {error.strerror}. Choose another --out.") from error


def _command() -> str:
    return shlex.join(["dpscale", *sys.argv[1:]])
