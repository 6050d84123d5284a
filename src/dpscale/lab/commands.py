"""The commands that run experiments: train, compare, report. `dpscale.cli` puts them on the command line."""

import json
import math
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dpscale.lab import presets
from dpscale.lab.presets import Config

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout and nothing else.")]
Preset = Annotated[str, typer.Argument(help="Name of an experiment: digits.", show_default=False)]
Out = Annotated[Path | None, typer.Option(help="Folder of records and report; default: runs/PRESET.")]
Epsilon = Annotated[float | None, typer.Option(help="Privacy budget; default: the preset's.")]
Delta = Annotated[float | None, typer.Option(help="Probability outside of it; default: the preset's.")]
Epochs = Annotated[int | None, typer.Option(help="Passes over the data; default: the preset's.")]
Batch = Annotated[int | None, typer.Option(help="Expected batch size; default: the preset's.")]
Momentum = Annotated[float | None, typer.Option(help="SGD's momentum, for every method; default: the preset's.")]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate × bound for every method: no search.")]


def train(
    preset: Preset,
    method: Annotated[str, typer.Option(help="Name of a method, such as dp-psasc, dp-sgd, non-private.")] = "dp-psasc",
    seed: Annotated[int, typer.Option(min=0, help="Of initialisation, batches and noise.")] = 0,
    out: Out = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    epochs: Epochs = None,
    batch: Batch = None,
    momentum: Momentum = None,
    lr: Rate = None,
    as_json: Json = False,
) -> None:
    """Train one model and write its record.

    \b
    Example:
      dpscale train digits --method dp-psasc --seed 0 --out runs/digits
    """
    config = _config(preset, lr, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, momentum=momentum)
    from dpscale.lab import display, presets
    from dpscale.lab.compare import train

    chosen = presets.method(method)
    folder = out or Path("runs") / preset
    with display.run_bar(chosen.title, quiet=as_json) as bar:
        record = train(config, chosen, seed, folder, command=_command(), on_progress=bar)
    if as_json:
        print_json(record.to_dict())
        return
    spent = "" if record.epsilon is None else f", epsilon {record.epsilon:.3f} at delta {record.delta:g}"
    typer.echo(f"{record.title}: test accuracy {100 * record.accuracy:.1f}%{spent}, {record.seconds:.1f} s")
    typer.echo(record.statement)
    typer.echo(f"Record in {folder}")


def compare(
    preset: Preset,
    methods: Annotated[str | None, typer.Option(help="Comma-separated names; default: all, with controls.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds per method.")] = 5,
    out: Out = None,
    epsilon: Epsilon = None,
    delta: Delta = None,
    epochs: Epochs = None,
    batch: Batch = None,
    momentum: Momentum = None,
    lr: Rate = None,
    tune: Annotated[bool, typer.Option(help="Search the rate of each method on held-out training data.")] = True,
    workers: Annotated[int, typer.Option(min=1, help="Processes, with one thread each.")] = 2,
    as_json: Json = False,
) -> None:
    """Compare methods over seeds, print a table, and write records and report.html. Resumes where it left off.

    \b
    Example:
      dpscale compare digits --methods dp-sgd,dp-psac,dp-psasc --seeds 5 --out runs/digits
    """
    config = _config(preset, lr, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, momentum=momentum)
    from rich.console import Console

    from dpscale.lab import compare, display, presets, report, summary

    config = config if tune else config.replace(tune=False)
    chosen, folder, start = presets.methods(methods), out or Path("runs") / preset, time.perf_counter()
    with display.comparison_bar(f"compare {preset}", quiet=as_json) as bar:
        found = compare.compare(
            config, chosen, range(seeds), folder, workers=workers, command=_command(), on_finished=bar
        )
    rows = summary.summarize(found)
    path, _ = report.write(folder, like=found[0])
    seconds = time.perf_counter() - start
    if as_json:
        shown = [row.to_dict() for row in rows]
        print_json({"rows": shown, "verdict": summary.verdict(rows), "report": str(path), "seconds": round(seconds, 1)})
        return
    title = f"{preset}: ε = {config.epsilon:g}, δ = {config.delta:g}, {seeds} seeds, 95% intervals"
    Console(highlight=False).print(display.table(title, rows))
    typer.echo(summary.verdict(rows))
    typer.echo(f"Report: {path}  ({seconds:.0f} s)")


def report(
    folder: Annotated[Path, typer.Argument(help="Folder of records.", show_default=False)], as_json: Json = False
) -> None:
    """Make report.html anew from the records in a folder.

    \b
    Example:
      dpscale report runs/digits
    """
    from dpscale.lab import report, summary

    path, rows = report.write(folder)
    if as_json:
        shown = [row.to_dict() for row in rows]
        print_json({"rows": shown, "verdict": summary.verdict(rows), "report": str(path)})
    else:
        typer.echo(f"Report: {path}")


def print_json(value: Any) -> None:
    """One JSON document on stdout; a number that JSON does not have (inf, NaN) becomes null."""
    typer.echo(json.dumps(_plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _config(name: str, rate: float | None, **changes: Any) -> Config:
    config = presets.preset(name).replace(**changes)
    return config if rate is None else config.at_rate(rate)


def _command() -> str:
    return shlex.join(["dpscale", *sys.argv[1:]])
