"""The command line: plan, train, tune, compare, calibrate, epsilon, audit, card, verify, ledger, report, data …

Results go to stdout and everything else to stderr; ``--json`` makes stdout one JSON document. Bad input is one line
and exit code 2; with ``--json`` also ``{"error": …}`` on stdout. A command imports what it needs when it is run:
``--help``, `calibrate` and `epsilon` load no torch.
"""

import dataclasses
import json
import logging
import sys
import warnings
from collections.abc import Callable
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from dpscale.lab import commands
from dpscale.lab.datasets.commands import data, features
from dpscale.lab.ledgers import ledger
from dpscale.lab.options import SETTINGS, Json, print_json

if TYPE_CHECKING:
    from dpscale.plan import Plan

INTERRUPTED = 130

_AFTER_INTERRUPT = {
    **dict.fromkeys(
        ("train", "compare", "reproduce"),
        "What is finished is recorded; the same command goes on.",
    ),
    "data": "No half-done data set was left behind; the same command begins again, a download where it stopped.",
}
_BEGINS_AGAIN = "Nothing half-done was left behind; the same command begins again."


class Commands(TyperGroup):
    """Turns every complaint about input, ours or the parser's, into one line on stderr and exit code 2."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run a command and exit."""
        words = kwargs.get("args", args[0] if args else None)
        asked: dict[str, str | None] = {}  # the context's object: which command it is
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("always", UserWarning)
                warnings.showwarning = _warn_once()
                code = super().main(*args, **{**kwargs, "standalone_mode": False, "obj": asked})
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except Exception as error:
            # The parser's own exceptions have format_message, whichever parser the installed typer brings.
            told = getattr(error, "format_message", None)
            if told is None and not isinstance(error, ValueError | OSError | NotImplementedError):
                raise
            message = " ".join(str(told() if told else error).split())
            typer.echo(f"dpscale: {message}", err=True)
            if "--json" in (sys.argv if words is None else words):
                print_json({"error": message})
            code = 2
        if code == INTERRUPTED:
            after = _AFTER_INTERRUPT.get(asked.get("command") or "", _BEGINS_AGAIN)
            typer.echo(f"dpscale: interrupted. {after}", err=True)
        sys.exit(code if isinstance(code, int) else 0)


class Sampler(StrEnum):
    """Names of `sampling.SAMPLERS`, written out so that ``--help`` need not import it."""

    poisson = "poisson"
    fixed_size = "fixed-size"
    full_batch = "full-batch"
    shuffled = "shuffled"


class Rule(StrEnum):
    """Names of `scaling.RULES`."""

    clip = "clip"
    auto_s = "auto-s"
    psac = "psac"
    psasc = "psasc"


class Noise(StrEnum):
    """Names of sources of noise."""

    fast = "fast"
    secure = "secure"


class Accountant(StrEnum):
    """Names of accountants."""

    pld = "pld"
    rdp = "rdp"


app = typer.Typer(cls=Commands, add_completion=True, rich_markup_mode=None, pretty_exceptions_enable=False)

Size = Annotated[int, typer.Option(help="Number of samples in the data, a public constant.")]
PlanBatch = Annotated[int | None, typer.Option(help="Expected batch size (not for full-batch).")]
PlanEpochs = Annotated[float | None, typer.Option(help="Passes over the data.")]
Steps = Annotated[int | None, typer.Option(help="Number of steps, instead of epochs.")]
SamplerOption = Annotated[Sampler, typer.Option(help="How batches are drawn.")]
AccountantOption = Annotated[Accountant, typer.Option(help="pld is the tighter; rdp is shown beside it anyway.")]


@app.callback(invoke_without_command=True)
def _start(
    context: typer.Context, show_version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False
) -> None:
    """Train PyTorch models with differential privacy by scaling per-sample gradients.

    \b
    Example:
      dpscale compare digits
    """
    context.ensure_object(dict)["command"] = context.invoked_subcommand
    if show_version:
        typer.echo(f"dpscale {version('dpscale')}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())
    # dp-accounting warns of every Rényi order that it leaves out, which only makes its answer larger.
    logging.getLogger("absl").setLevel(logging.ERROR)


@app.command()
def calibrate(
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")],
    delta: Annotated[float, typer.Option(help="Probability outside of it; well below 1/size.")],
    size: Size, batch: PlanBatch = None, epochs: PlanEpochs = None, steps: Steps = None,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="Noise std / bound; then the number of steps is what is found.")
    ] = None,
    sampler: SamplerOption = Sampler.poisson, accountant: AccountantOption = Accountant.pld, as_json: Json = False,
) -> None:  # fmt: skip
    """Find the noise that a budget needs; or, for a given noise, the steps that it allows.

    \b
    Example:
      dpscale calibrate --epsilon 3 --delta 1e-5 --size 60000 --batch 512 --epochs 20
      dpscale calibrate --epsilon 3 --delta 1e-5 --size 60000 --batch 512 --noise-multiplier 0.9
    """
    if noise_multiplier is None:
        plan = _plan(sampler, size, batch, epochs=epochs, steps=steps, accountant=accountant)
        plan = plan.calibrate(epsilon=epsilon, delta=delta)
    else:
        if epochs is not None or steps is not None:
            raise ValueError("--noise-multiplier finds the steps: leave out --epochs and --steps.")
        plan = _plan(sampler, size, batch, accountant=accountant, noise_multiplier=noise_multiplier)
        plan = plan.calibrate_steps(epsilon=epsilon, delta=delta)
    _print_plan(plan, sampler, delta, as_json)


@app.command(name="epsilon")
def epsilon_(
    noise_multiplier: Annotated[float, typer.Option(help="Noise std / bound.")],
    delta: Annotated[float, typer.Option(help="Probability outside of the budget; well below 1/size.")],
    size: Size, batch: PlanBatch = None, epochs: PlanEpochs = None, steps: Steps = None,
    sampler: SamplerOption = Sampler.poisson, accountant: AccountantOption = Accountant.pld, as_json: Json = False,
) -> None:  # fmt: skip
    """Say what a training run costs.

    \b
    Example:
      dpscale epsilon --noise-multiplier 0.9 --delta 1e-5 --size 60000 --batch 512 --epochs 20
    """
    plan = _plan(
        sampler, size, batch, epochs=epochs, steps=steps, accountant=accountant, noise_multiplier=noise_multiplier
    )
    _print_plan(plan, sampler, delta, as_json)


@app.command()
def plan(
    size: Size,
    epsilon: Annotated[float, typer.Option(help="Privacy budget.")],
    delta: Annotated[float, typer.Option(help="Probability outside of it; well below 1/size.")],
    batch: Annotated[int | None, typer.Option(help="Find the epochs for this expected batch size.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Find the batch for so many passes over the data.")] = None,
    least_steps: Annotated[int, typer.Option(help="Fewer optimizer steps would not train the model.")] = 1000,
    within: Annotated[float, typer.Option(help="How far above the floor the noise may be.")] = 0.1,
    throughput: Annotated[float | None, typer.Option(help="Samples a second of a private step: costs in time.")] = None,
    parameters: Annotated[int | None, typer.Option(help="Of the model: narrows the learning rates to try.")] = None,
    accountant: AccountantOption = Accountant.pld,
    picture: Annotated[Path | None, typer.Option(help="Draw noise over cost into this PNG file.")] = None,
    as_json: Json = False,
) -> None:
    """Say which batch and how many epochs a budget is best spent on. It looks at no data.

    \b
    Example:
      dpscale plan --size 60000 --epsilon 3 --delta 1e-5
      dpscale plan --size 60000 --epsilon 3 --delta 1e-5 --throughput 20000 --picture noise.png
    """
    from dpscale.advice import advise

    if picture is not None and picture.suffix != ".png":
        raise ValueError(f"--picture {picture} must end in .png.")
    advice = advise(
        size=size, epsilon=epsilon, delta=delta, batch=batch, epochs=epochs, least_steps=least_steps, within=within,
        throughput=throughput, accountant=accountant.value, parameters=parameters,
    )  # fmt: skip
    if picture is not None:
        from dpscale.lab import figures

        picture.write_bytes(figures.png(figures.noise_budget(advice)))
    if as_json:
        print_json(advice.to_dict())
    else:
        typer.echo(str(advice))


@app.command()
def card(
    run: Annotated[Path, typer.Argument(help="A record, a checkpoint, or the folder of a run.", show_default=False)],
    out: Annotated[
        list[Path] | None, typer.Option(help="Where to write it: a .html or a .json file; may be given twice.")
    ] = None,
    method: Annotated[str | None, typer.Option(help="Which of several records in a folder.")] = None,
    seed: Annotated[int | None, typer.Option(help="Which of several records in a folder.")] = None,
    delta: Annotated[float | None, typer.Option(help="Of the guarantee; default: the run's.")] = None,
    search: Annotated[str | None, typer.Option(help="How settings were chosen on the private data.")] = None,
    ledger: Annotated[Path | None, typer.Option(help="The ledger that the run is booked in.")] = None,
    as_json: Json = False,
) -> None:
    """Write the privacy card of a run: one page for a reviewer, and its numbers for dpscale verify.

    \b
    Example:
      dpscale card runs/digits --method dp-psasc --seed 0 --out card.html --out card.json
      dpscale card run.ckpt --ledger patients.ledger --out card.html
    """
    from dpscale.lab import cards

    made = cards.card(run, method=method, seed=seed, delta=delta, search=search, ledger=ledger)
    for path in out or ():
        made.save(path)
    if as_json:
        print_json(made.to_dict())
        return
    found = made.values["guarantee"]
    typer.echo(f"epsilon {found['epsilon']:.4g} at delta {found['delta']:g} ({found['adjacency']})")
    typer.echo(made.values["attacker"]["words"])
    typer.echo(f"Card: {', '.join(map(str, out))}" if out else "Add --out card.html to write the page.")


@app.command()
def verify(
    card: Annotated[Path, typer.Argument(help="A card.json.", show_default=False)], as_json: Json = False
) -> None:
    """Compute the epsilon of a privacy card anew, by dp-accounting alone; exit code 1 if it does not hold.

    \b
    Example:
      dpscale verify card.json
    """
    from dpscale.card import verify

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Of two values of one name JSON keeps the last, and people may read the first."""
        if len(dict(pairs)) < len(pairs):
            raise ValueError(f"{card} is no card: it has two values of one name.")
        return dict(pairs)

    try:
        read = json.loads(card.read_text(encoding="utf-8"), object_pairs_hook=once)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{card} is no card: it is not JSON. Save one by card.save('card.json').") from error
    problems = verify(read)
    if as_json:
        print_json({"confirmed": not problems, "problems": problems})
    else:
        typer.echo("\n".join(problems) or f"{card}: epsilon is confirmed.")
    if problems:
        raise typer.Exit(1)


@app.command()
def audit(
    size: Size,
    delta: Annotated[float, typer.Option(help="Probability outside of the budget; well below 1/size.")],
    batch: PlanBatch = None, epochs: PlanEpochs = None, steps: Steps = None, sampler: SamplerOption = Sampler.poisson,
    epsilon: Annotated[float | None, typer.Option(help="Audit the noise that this budget needs.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Audit this noise std / bound.")] = None,
    rule: Annotated[Rule, typer.Option(help="How gradients are scaled.")] = Rule.clip,
    canaries: Annotated[int | None, typer.Option(help="Of each run; default: 9 of 10 samples, at most 60,000.")] = None,
    runs: Annotated[int, typer.Option(help="More runs, more observations.")] = 1,
    confidence: Annotated[float, typer.Option(help="Of the lower bounds.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="For the same audit again; default: fresh randomness.")] = None,
    device: Annotated[str, typer.Option(help="Where to train: cpu, or cuda.")] = "cpu",
    noise: Annotated[Noise | None, typer.Option(help="Where the noise comes from; default: as in training.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw claimed curve and measured points here.")] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Train on canaries with the library's own step, and measure how much of the claimed epsilon shows.

    Exits with 1 where the releases are not consistent with what is claimed.

    \b
    Example:
      dpscale audit --size 60000 --batch 512 --epochs 20 --epsilon 3 --delta 1e-5 --picture audit.png
    """
    if picture is not None and picture.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--picture {picture} must end in .png, .svg or .pdf.")
    if (epsilon is None) == (noise_multiplier is None):
        raise ValueError("Give either --epsilon or --noise-multiplier.")
    from dpscale.audit import audit as measure
    from dpscale.lab import device as place
    from dpscale.lab.progress import Progress
    from dpscale.lab.terminal import progress
    from dpscale.scaling import RULES

    place.require_there(device)
    length: dict[str, Any] = {"epochs": epochs, "steps": steps, "noise_multiplier": noise_multiplier}
    planned = _plan(sampler, size, batch, accountant=Accountant.pld, **length)
    planned = dataclasses.replace(planned, scaling=RULES[rule.value]())
    if epsilon is not None:
        planned = planned.calibrate(epsilon=epsilon, delta=delta)
    with progress("audit", quiet=as_json) as bar:
        report = measure(
            planned, canaries=canaries, runs=runs, delta=delta, confidence=confidence, seed=seed, device=device,
            noise=None if noise is None else noise.value,
            on_step=lambda done: bar(Progress("training on canaries", done, runs * (planned.steps or 0), "steps")),
        )  # fmt: skip
    if picture is not None:
        report.picture(picture)
    if as_json:
        print_json(report.to_dict())
    else:
        typer.echo(str(report))
    if not report.consistent:
        raise typer.Exit(1)


for taking_values in (commands.train, commands.compare, commands.tune):
    app.command(context_settings=SETTINGS)(taking_values)
app.command()(commands.report)
app.command()(commands.presets)
app.command()(commands.methods)
app.add_typer(commands.reproduce, name="reproduce")
app.add_typer(data, name="data")
app.add_typer(ledger, name="ledger")
app.command()(features)


def main() -> None:
    """Entry point of the ``dpscale`` command."""
    app(prog_name="dpscale")


def _warn_once() -> Callable[..., None]:
    """Shows each warning once in a command, wherever it is raised again."""
    shown: set[str] = set()

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in shown:
            shown.add(str(message))
            typer.echo(f"dpscale: warning: {message}", err=True)

    return show


def _plan(sampler: Sampler, size: int, batch: int | None, *, accountant: Accountant, **length: Any) -> "Plan":
    from dpscale.plan import Plan
    from dpscale.sampling import SAMPLERS
    from dpscale.scaling import Clip

    if "epochs" in length and (length["epochs"] is None) == (length["steps"] is None):
        raise ValueError("Give either --epochs or --steps.")
    if sampler is Sampler.full_batch and batch is not None:
        raise ValueError(f"--sampler full-batch takes all of --size: leave out --batch {batch}.")
    if batch is None and sampler is not Sampler.full_batch:
        raise ValueError("--batch is needed for every sampler but full-batch, which takes all of --size.")
    kind: Any = SAMPLERS[sampler.value]
    sampling = kind(size=size) if batch is None else kind(size=size, batch=batch)
    # Neither noise multiplier nor ε depends on the rule; with a bound of 1 the multiplier is the deviation itself.
    return Plan(scaling=Clip(C=1.0), sampling=sampling, accountant=accountant.value, **length)


def _print_plan(plan: "Plan", sampler: Sampler, delta: float, as_json: bool) -> None:
    found = {
        "epsilon": plan.epsilon(delta), "delta": delta, "noise_multiplier": plan.noise_multiplier,
        "steps": plan.steps, "epochs": (plan.steps or 0) * plan.expected_batch / plan.sampling.size,
        "accountant": plan.accountant, "epsilon_rdp": dataclasses.replace(plan, accountant="rdp").epsilon(delta),
        "sampler": sampler.value, "adjacency": plan.adjacency, "size": plan.sampling.size,
        "batch": plan.expected_batch,
    }  # fmt: skip
    if as_json:
        print_json({**found, "statement": plan.statement(delta)})
        return
    for name, value in found.items():
        typer.echo(f"{name:<17} {f'{value:.6g}' if isinstance(value, float) else value}")
    typer.echo(f"\n{plan.statement(delta)}")
