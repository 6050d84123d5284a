"""Pictures and the table of slopes of `theory.py`, made from the numbers of `theorems.py` alone."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from theorems import Fit

INK = "#1c2026"
# Okabe and Ito's palette, which the colour-blind can tell apart; shapes and dashes say the same once more.
GREY, ORANGE, BLUE, RED, GREEN, PURPLE = "#7f7f7f", "#e69f00", "#0072b2", "#d55e00", "#009e73", "#cc79a7"
_STYLE: Any = {
    "font.size": 11,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlesize": 11.5,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.7,
    "legend.frameon": False,
    "legend.fontsize": 9.5,
    "lines.linewidth": 1.8,
}
_TAU = {0.5: (GREEN, "s"), 1.0: (BLUE, "o"), 2.0: (RED, "^")}
_S = {"0.9": (GREEN, "-"), "0.55": (BLUE, "--"), "0.3": (RED, "-.")}


def write(folder: Path, found: dict[str, Any]) -> list[Path]:
    """Write theory.json and one PNG per figure; returns what was written."""
    paths = [folder / "theory.json"]
    paths[0].write_text(json.dumps(rounded(found), ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")
    with matplotlib.rc_context(_STYLE):
        for name, draw in FIGURES.items():
            paths.append(folder / f"theory-{name}.png")
            draw(found).savefig(paths[-1], dpi=150, facecolor="white")
    return paths


def weights(found: dict[str, Any]) -> Figure:
    """Weight against norm, with the peaks, and signal per unit of noise."""
    figure, (left, right) = _panels(2)
    data, x = found["curves"], found["curves"]["norm"]
    looks = ((GREY, "-"), (ORANGE, "-"), (BLUE, "-"), (RED, "--"))
    for (name, rule), (colour, line) in zip(data["rules"].items(), looks, strict=True):
        left.loglog(x, rule["weight"], line, color=colour, label=name)
        right.semilogx(x, rule["signal"], line, color=colour, label=name)
        inside = rule["peak_norm"] > 0
        place = rule["peak_norm"] if inside else x[0]
        left.plot(place, rule["peak_weight"], "o", color=colour, ms=7, mfc=colour if inside else "white", clip_on=False)
    left.set(xlabel="gradient norm x", ylabel="weight w(x)", title="Weights; dots: peaks by formula (hollow: at x = 0)")
    right.set(xlabel="gradient norm x", ylabel="x·w(x) / bound", title="Signal per unit of noise")
    left.legend()
    return figure


def signal(found: dict[str, Any]) -> Figure:
    """PSASC's signal per unit of noise over PSAC's, for several s."""
    figure, (axes,) = _panels(1)
    for s, ratio in found["curves"]["signal_over_psac"].items():
        colour, line = _S[s]
        axes.semilogx(found["curves"]["norm"], ratio, line, color=colour, label=f"s = {s}")
    axes.axhline(1, color=INK, lw=1)
    axes.set(
        xlabel="gradient norm x", ylabel="PSASC / PSAC", title="Signal per unit of noise, relative", ylim=(0, 1.08)
    )
    axes.legend(loc="lower right")
    return figure


def s_identity(found: dict[str, Any]) -> Figure:
    """Distance of other runs from a PSASC run, step by step."""
    figure, (axes,) = _panels(1, width=7.2)
    looks = {"twin: SGD, float64": (BLUE, "-"), "twin: heavy ball 0.9, float64": (GREEN, "-")}
    looks |= {"twin: SGD, float32": (ORANGE, "-"), "PSAC at η/s: SGD, float64": (PURPLE, "--")}
    looks |= {"PSAC at η: SGD, float64": (RED, "-.")}
    for name, (colour, line) in looks.items():
        gap = np.maximum(found["s_identity"]["distance"][name], 1e-17)
        axes.semilogy(np.arange(1, len(gap) + 1), gap, line, color=colour, label=name, lw=1.5)
    axes.set(xlabel="step", ylabel="‖w − w′‖ / ‖w‖", title="Distance from the PSASC run", ylim=(1e-17, 1e2))
    figure.legend(loc="outside lower center", ncols=2)
    return figure


def convergence(found: dict[str, Any]) -> Figure:
    """min_k ‖∇F‖ against T, without and with momentum, and where the scaled sum vanishes."""
    figure, panels = _panels(2, height=4.9, sharey=True)
    lengths = np.array(found["settings"]["lengths"], dtype=float)
    for axes, algorithm, power in zip(panels, ("one-point", "momentum"), (-0.5, -0.25), strict=True):
        for row in found["convergence"]:
            if row["algorithm"] != algorithm or isinstance(row["sigma"], str):
                continue
            colour, marker = _TAU[row["tau"]] if row["skewed"] else (PURPLE, "D")
            noisy = row["sigma"] > 0
            name = f"τ = {row['tau']:g}, {'skewed' if row['skewed'] else 'symmetric'}"
            _seeds(axes, lengths, row["least"], colour, marker, f"{name}, σ = {row['sigma']:g}", filled=noisy)
            if noisy and row["skewed"]:
                rest = np.mean(row["resting"], axis=1)
                axes.plot(lengths, rest, ":", color=colour, lw=1.4)
        guide = 1.2 * (lengths / lengths[0]) ** power
        axes.plot(lengths, guide, color=INK, lw=1, alpha=0.6)
        place = 1
        axes.annotate(
            f"slope −1/{round(-1 / power)}", (lengths[place], guide[place]), xytext=(4, 5), textcoords="offset points"
        )
        axes.set(xscale="log", yscale="log", xlabel="T")
    panels[0].set(ylabel="min over k of ‖∇F(w_k)‖", title="Algorithm 1, schedule of Theorem 2")
    panels[1].set(title="Algorithm 2 (momentum), schedule of Theorem 3")
    panels[0].plot([], [], ":", color=INK, lw=1.4, label="where the scaled sum vanishes")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


def controls(found: dict[str, Any]) -> Figure:
    """What makes the floor: τ = 1 under several algorithms; and measured against computed resting places."""
    figure, (left, right) = _panels(2, height=4.9)
    lengths = np.array(found["settings"]["lengths"], dtype=float)
    wanted = (
        ("one-point", True, 0.0, BLUE, "o"),
        ("full-batch", True, 0.0, ORANGE, "s"),
        ("momentum", True, 0.0, RED, "^"),
        ("momentum", True, "budget", GREY, "v"),
        ("momentum", False, 1.0, PURPLE, "D"),
        ("unscaled", True, 0.0, GREEN, "P"),
    )
    for algorithm, skewed, sigma, colour, marker in wanted:
        for row in found["convergence"]:
            if (row["algorithm"], row["tau"], row["skewed"], row["sigma"]) == (algorithm, 1.0, skewed, sigma):
                title = row["title"].replace(", τ = 1", "")
                _seeds(left, lengths, row["least"], colour, marker, title, filled=True)
    left.set(xscale="log", yscale="log", xlabel="T", ylabel="min over k of ‖∇F(w_k)‖", title="τ = 1")
    figure.legend(loc="outside lower center", ncols=2)
    for row in found["convergence"]:
        if row["skewed"] and row["sigma"] == 0 and row["algorithm"] in ("one-point", "momentum"):
            colour, marker = _TAU[row["tau"]]
            filled = row["algorithm"] == "momentum"
            rest, late = np.mean(row["resting"], axis=1), np.mean(row["late"], axis=1)
            right.loglog(rest, late, marker, color=colour, mfc=colour if filled else "white", ms=6)
    ends = np.array([0.01, 0.5])
    right.plot(ends, ends, color=INK, lw=1, alpha=0.6)
    right.set(xlabel="‖∇F‖ where the scaled sum vanishes, computed", ylabel="mean ‖∇F‖ over the last tenth")
    right.set(title="σ = 0; filled: Algorithm 2, hollow: Algorithm 1")
    for tau, (colour, marker) in _TAU.items():
        right.plot([], [], marker, color=colour, label=f"τ = {tau:g}")
    right.legend(loc="upper left")
    return figure


def counterexample(found: dict[str, Any]) -> Figure:
    """The three-sample problem: the path of the longest runs, and min and last gradient against T."""
    figure, (left, right) = _panels(2)
    data = found["counterexample"]
    looks = {"full-batch": (BLUE, "o", "Algorithm 1, B = N"), "momentum": (RED, "^", "Algorithm 2")}
    for algorithm, (colour, marker, title) in looks.items():
        runs = [run for run in data["runs"] if run["algorithm"] == algorithm]
        lengths = [run["steps"] for run in runs]
        path = runs[-1]["path"]
        left.plot(np.linspace(0, 1, len(path)), path, color=colour, ls="-" if marker == "o" else "--", label=title)
        right.semilogx(
            lengths, [run["least"] for run in runs], marker, ls="-", color=colour, label=f"{title}, min over k"
        )
        right.semilogx(
            lengths, [run["last"] for run in runs], marker, ls=":", color=colour, mfc="white", label=f"{title}, last"
        )
    left.axhline(data["c"] / 2, color=INK, lw=1)
    left.annotate("minimum of F", (0.98, data["c"] / 2), xytext=(0, -14), textcoords="offset points", ha="right")
    left.set(xlabel="k / T", ylabel="w_k", title=f"Path at T = {data['runs'][-1]['steps']:,}", ylim=(0, 4.4))
    left.legend(loc="center right")
    right.set(xlabel="T", ylabel="‖∇F‖", title="The gradient does not fall", ylim=(0, 4.6))
    right.legend(loc="upper left")
    return figure


def noise_to_signal(found: dict[str, Any]) -> Figure:
    """Eq. 7 in expectation: PSASC's noise-to-signal ratio over PSAC's by the median norm, three readings."""
    figure, panels = _panels(3, width=13.0)
    data = found["noise_to_signal"]
    titles = {
        "as printed": "as printed",
        "sum": "noise over expected signal",
        "noisy gradient": "noisy gradient in the denominator",
    }
    for axes, (name, title) in zip(panels, titles.items(), strict=True):
        for s, ratios in data["over_psac"].items():
            colour, line = _S[s]
            axes.semilogx(data["median"], ratios[name], line, color=colour, label=f"s = {s}")
        axes.axhline(1, color=INK, lw=1)
        axes.set(xlabel="median gradient norm", title=title)
        axes.ticklabel_format(axis="y", useOffset=False)
    panels[0].set(ylabel="PSASC's ratio / PSAC's")
    panels[0].legend()
    return figure


FIGURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "weights": weights,
    "signal": signal,
    "s-identity": s_identity,
    "convergence": convergence,
    "controls": controls,
    "counterexample": counterexample,
    "noise-to-signal": noise_to_signal,
}


def table(found: dict[str, Any]) -> Table:
    """Slopes with intervals, and the smallest gradient at the largest T; narrow enough for 80 columns."""
    settings = found["settings"]
    first, last, seeds = settings["lengths"][0], settings["lengths"][-1], len(settings["seeds"])
    shown = Table(title=f"Slope of log min ‖∇F‖ against log T = {first:,}..{last:,}; {seeds} seeds, 95% intervals")
    shown.add_column("run")
    for name in ("all T", "last decade", "min"):
        shown.add_column(name, justify="right", no_wrap=True)
    names = {"one-point": "Alg 1", "full-batch": "Alg 1 B=N", "momentum": "Alg 2", "unscaled": "SGD"}
    for row in found["convergence"]:
        noise = f"ε={settings['epsilon']:g}" if isinstance(row["sigma"], str) else f"σ={row['sigma']:g}"
        run = f"{names[row['algorithm']]} τ={row['tau']:g} {'skew' if row['skewed'] else 'sym'} {noise}"
        slopes = (Fit(**row["slope"]).text, Fit(**row["slope_last_decade"]).text)
        shown.add_row(run, *slopes, f"{np.mean(row['least'][-1]):.4f}")
    return shown


def rounded(value: Any) -> Any:
    """The same with every number to seven digits, as theory.json has it."""
    if isinstance(value, dict):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.7g}") if isinstance(value, float) else value


def _panels(
    count: int, *, width: float | None = None, height: float = 4.2, **options: Any
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width or (10.5 if count > 1 else 5.6), height), layout="constrained")
    return figure, list(figure.subplots(1, count, squeeze=False, **options)[0])


def _seeds(
    axes: Axes, lengths: Any, values: list[list[float]], colour: str, marker: str, label: str, *, filled: bool
) -> None:
    mean, spread = np.mean(values, axis=1), np.quantile(values, (0.1, 0.9), axis=1)
    style = "-" if filled else "--"
    axes.plot(lengths, mean, style, color=colour, marker=marker, ms=5, mfc=colour if filled else "white", label=label)
    axes.fill_between(lengths, spread[0], spread[1], color=colour, alpha=0.08, lw=0)
