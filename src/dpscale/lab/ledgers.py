"""The commands about ledgers: create, show, export. `dpscale.cli` puts them on the command line."""

import dataclasses
import datetime
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dpscale.lab import options
from dpscale.lab.options import Json, print_json

if TYPE_CHECKING:
    from dpscale.ledger import Ledger, Run

Book = Annotated[Path, typer.Argument(help="File of the ledger.", show_default=False)]

ledger = options.group("""Keep the privacy budget of a data set, over all runs on it.

    \b
    Example:
      dpscale ledger create patients.ledger --epsilon 3 --delta 1e-5
      dpscale train digits --ledger patients.ledger
      dpscale ledger show patients.ledger
    """)

_MOMENTS = 40
"""In a picture, at most: the price of all runs is computed at each."""


@ledger.command()
def create(
    path: Book,
    epsilon: Annotated[float, typer.Option(help="The total of all runs. It cannot be changed later.")],
    delta: Annotated[float, typer.Option(help="Probability outside of it; well below 1/size.")],
    as_json: Json = False,
) -> None:
    """Begin a ledger.

    \b
    Example:
      dpscale ledger create patients.ledger --epsilon 3 --delta 1e-5
    """
    from dpscale.ledger import Ledger

    if path.exists():
        raise ValueError(f"{path} is there already. dpscale ledger show {path}")
    made = Ledger(path, epsilon=epsilon, delta=delta)
    told = f"{made.path}: epsilon {made.epsilon:g} at delta {made.delta:g}"
    options.show(as_json, {"path": str(made.path), "epsilon": made.epsilon, "delta": made.delta}, told)


@ledger.command()
def show(
    path: Book,
    picture: Annotated[Path | None, typer.Option(help="Write a picture of epsilon over time, too (PNG).")] = None,
    as_json: Json = False,
) -> None:
    """Show what was spent, by which runs, and what is left.

    \b
    Example:
      dpscale ledger show patients.ledger
      dpscale ledger show patients.ledger --picture spent.png
    """
    from dpscale.lab.terminal import table

    book, runs = _opened(path)
    spent = book.spent(runs)
    if picture is not None:
        _draw(picture, book, runs)
    rows = [_row(book, run) for run in runs]
    if as_json:
        found = {"path": str(book.path), "epsilon": book.epsilon, "delta": book.delta, "spent": spent.epsilon}
        print_json({**found, "adjacency": spent.adjacency, "how": spent.how, "runs": rows})
        return
    shown = [
        {
            "run": row["run"] + (" (going on)" if row["live"] else ""),
            "sampler, σ": f"{row['sampler']}, {row['noise_multiplier']:.4g}",
            "steps": f"{row['charged']:,} of {row['planned']:,} in {row['stretches']:,}",
            "again": f"{row['taken_again']:,}", "crash": f"{row['charged_after_crash']:,}",
            "ε alone": f"{row['epsilon']:.4g}",
        }
        for row in rows
    ]  # fmt: skip
    if rows:
        told = "steps: charged of planned, in so many stretches; again: of them, taken again after a checkpoint was"
        table("", shown, [f"{told} loaded; crash: reserved by a process that was killed"])
    at = f"{book.epsilon:g} at delta {book.delta:g} ({spent.adjacency}; {spent.how})"
    typer.echo(f"Spent: epsilon {spent.epsilon:.4g} of {at}.")
    if crashed := sum(row["charged_after_crash"] for row in rows):
        typer.echo(f"{crashed} steps were charged after crashes: they were reserved, and perhaps not all released.")
    if picture is not None:
        typer.echo(f"Picture: {picture}")


@ledger.command()
def export(path: Book) -> None:
    """Print all that is booked, as JSON: plans, runs and stretches of steps.

    \b
    Example:
      dpscale ledger export patients.ledger > patients.json
    """
    book, runs = _opened(path)
    total = {"path": str(book.path), "epsilon": book.epsilon, "delta": book.delta}
    booked = [{**dataclasses.asdict(run), "charged": run.charged} for run in runs]
    print_json({**total, "spent": book.spent(runs)._asdict(), "runs": booked})


def _opened(path: Path) -> tuple["Ledger", list["Run"]]:
    from dpscale.ledger import Ledger

    if not path.exists():
        raise ValueError(f"There is no ledger {path}. dpscale ledger create {path} --epsilon ... --delta ...")
    book = Ledger(path)
    return book, book.runs()


def _row(book: "Ledger", run: "Run") -> dict[str, Any]:
    return {
        "run": run.name, "begun": run.begun, "live": run.live, "sampler": run.plan["sampling"]["name"],
        "noise_multiplier": run.plan["noise_multiplier"], "planned": run.plan["steps"], "charged": run.charged,
        "taken_again": run.charged - run.position, "charged_after_crash": sum(s.last - s.first for s in run.crashed),
        "stretches": len(run.stretches), "epsilon": book.spent([run]).epsilon,
    }  # fmt: skip


def spent_over_time(book: "Ledger", runs: Sequence["Run"]) -> tuple[list[Any], list[float]]:
    """ε after the stretches that were begun by a moment, at some moments."""
    moments = sorted({stretch.begun for run in runs for stretch in run.stretches})
    every = max(1, -(-len(moments) // _MOMENTS))
    moments = sorted({*moments[::every], *moments[-1:]})
    spent = []
    for moment in moments:
        until = [tuple(s for s in run.stretches if s.begun <= moment) for run in runs]
        before = [dataclasses.replace(run, stretches=some) for run, some in zip(runs, until, strict=True)]
        spent.append(book.spent(before).epsilon)
    return [datetime.datetime.fromisoformat(moment) for moment in moments], spent


def _draw(path: Path, book: "Ledger", runs: Sequence["Run"]) -> None:
    from matplotlib.figure import Figure

    from dpscale.files import replacing

    moments, spent = spent_over_time(book, runs)
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.step(moments, spent, where="post", marker="o", ms=3, color="#0072b2", label="spent")
    axes.axhline(book.epsilon, color="#b3261e", ls="--", label=f"total: {book.epsilon:g}")
    axes.set(ylabel=f"ε at δ = {book.delta:g}", ylim=(0, None), title=book.path.name)
    axes.tick_params(axis="x", rotation=30)
    axes.legend()
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=150, format="png")
