"""The commands that run experiments: train, compare, report, reproduce. `dpscale.cli` puts them on the command line."""

import json
import math
import shlex
import sys
import tempfile
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
Momentum = Annotated[
    str | None,
    typer.Option(help="heavy-ball, inner-outer, disk, per-sample-ema or none, for methods without one of their own."),
]
K0 = Annotated[int | None, typer.Option("--k0", help="Past points of inner momentum; default: the preset's.")]
Gamma0 = Annotated[float | None, typer.Option(help="Inner momentum: weight of a point per step of its age, in (0, 1].")]
Kappa = Annotated[float | None, typer.Option(help="disk: share of the new in its average, in (0, 1].")]
Lookahead = Annotated[float | None, typer.Option(help="disk: how far ahead its second point lies.")]
Gamma = Annotated[float | None, typer.Option(help="per-sample-ema: share of the new in a sample's average, in (0, 1].")]
Sampler = Annotated[str | None, typer.Option(help="poisson or full-batch; default: the preset's.")]
Gamma1 = Annotated[float | None, typer.Option(help="Outer momentum: the velocity keeps 1 - gamma1, in (0, 1].")]
Rate = Annotated[float | None, typer.Option("--lr", help="Learning rate × bound for every method: no search.")]


reproduce = typer.Typer(add_completion=False, rich_markup_mode=None)


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
    k0: K0 = None,
    gamma0: Gamma0 = None,
    gamma1: Gamma1 = None,
    kappa: Kappa = None,
    lookahead: Lookahead = None,
    gamma: Gamma = None,
    sampler: Sampler = None,
    lr: Rate = None,
    as_json: Json = False,
) -> None:
    """Train one model and write its record.

    \b
    Example:
      dpscale train digits --method dp-psasc --seed 0 --out runs/digits
      dpscale train digits --method dp-psasc --momentum inner-outer --k0 2 --gamma0 0.5 --gamma1 0.1
    """
    memory = {"K0": k0, "gamma0": gamma0, "gamma1": gamma1, "kappa": kappa, "lookahead": lookahead, "gamma": gamma}
    config = _config(
        preset, lr, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, momentum=momentum, sampling=sampler,
        **memory,
    )  # fmt: skip
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
    k0: K0 = None,
    gamma0: Gamma0 = None,
    gamma1: Gamma1 = None,
    kappa: Kappa = None,
    lookahead: Lookahead = None,
    gamma: Gamma = None,
    sampler: Sampler = None,
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
    memory = {"K0": k0, "gamma0": gamma0, "gamma1": gamma1, "kappa": kappa, "lookahead": lookahead, "gamma": gamma}
    config = _config(
        preset, lr, epsilon=epsilon, delta=delta, epochs=epochs, batch=batch, momentum=momentum, sampling=sampler,
        **memory,
    )  # fmt: skip
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


@reproduce.callback(invoke_without_command=True)
def _reproduce(context: typer.Context) -> None:
    """Make the paper's results anew, beside what they look like here.

    \b
    Example:
      dpscale reproduce theory --out runs/theory
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


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
    # Tried before minutes are spent, not after.
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"Cannot write to the folder {folder}: {error.strerror}. Choose another --out.") from error


def _config(name: str, rate: float | None, **changes: Any) -> Config:
    config = presets.preset(name).replace(**changes)
    return config if rate is None else config.at_rate(rate)


def _command() -> str:
    return shlex.join(["dpscale", *sys.argv[1:]])
