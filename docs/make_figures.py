"""Draws figures of docs: what-s-does, record and performance. python docs/make_figures.py (needs dpscale[lab])."""

import json
import math
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from dpscale import PSAC, PSASC, AutoS, Clip
from dpscale.lab.stats import interval

HERE = Path(__file__).parent / "figures"
RESULTS = HERE.parents[1] / "results"
C, S, R = 0.25, 0.55, 1e-3  # the paper's FashionMNIST setting
RULES = {
    "Clip": (Clip(C=C), "#7f7f7f", "-"),
    "AutoS": (AutoS(C=C, r=R), "#e69f00", "-"),
    "PSAC": (PSAC(C=C, r=R), "#0072b2", "-"),
    f"PSASC, s = {S:g}": (PSASC(C=C, s=S, r=R), "#d55e00", "--"),
}


LEVERS = {
    "the paper's settings": ("normed_cnn", 512),
    "larger batch and more epochs, another CNN": ("gelu_cnn", 4096),
    "scattering and two convolutions, the paper's batch and epochs": ("scatter", 512),
    "both": ("scatter", 4096),
}
"""What each row of record.md's table changes: the network (the beginning of its name), and the batch."""


def lever_accuracies() -> dict[str, dict[str, list[float]]]:
    """Test accuracies of DP-PSAC, one per seed, by data set and lever, from the records."""
    found: dict[str, dict[str, list[float]]] = {}
    for data in ("mnist", "fashion-mnist"):
        tried = [RESULTS / "tried" / "record" / f"{name}.jsonl" for name in ("levers", "final")]
        records = [json.loads(line) for path in tried for line in path.read_text().splitlines()]
        runs = [(r["model"], r["batch"], r["accuracy"]) for r in records
                if r["role"] == "final" and r["preset"] == data and r["method"] == "dp-psac"]  # fmt: skip
        paper = [json.loads(line) for line in (RESULTS / f"{data}.jsonl").read_text().splitlines()]
        runs += [(r["config"]["model"], r["config"]["batch"], r["accuracy"]) for r in paper
                 if r["role"] == "final" and r["method"] == "dp-psac"]  # fmt: skip
        found[data] = {
            lever: [accuracy for model, size, accuracy in runs if model.startswith(name) and size == batch]
            for lever, (name, batch) in LEVERS.items()
        }
    return found


def draw_levers() -> None:
    """What each lever gave, with 95% intervals."""
    fig, each = plt.subplots(1, 2, figsize=(10, 2.6), layout="constrained", sharey=True)
    for axes, (data, levers) in zip(each, lever_accuracies().items(), strict=True):
        for place, (lever, accuracies) in enumerate(levers.items()):
            mean, half = interval(accuracies)
            assert half is not None
            colour = "#d55e00" if lever == "both" else "#0072b2"
            axes.errorbar(100 * mean, -place, xerr=100 * half, fmt="o", color=colour, capsize=4)
        axes.set(title=data, xlabel="test accuracy, %")
        axes.set_yticks([-k for k in range(len(levers))], list(levers))
        axes.margins(y=0.2)
        axes.grid(alpha=0.25, axis="x")
        axes.spines[["top", "right"]].set_visible(False)
    fig.savefig(HERE / "levers.png", dpi=120)


PANELS = {"B": "expected batch B", "T": "length T", "width": "width", "layers": "layers", "N": "samples N"}
"""What grows, as benchmarks/growth.py names it."""
BLUE, GREY, RED = "#0072b2", "#7f7f7f", "#d55e00"


def growth_panel(times: Any, ratios: Any, what: str, rows: list[dict[str, Any]]) -> None:
    """Milliseconds of a step above, and their ratio below, where one quantity grows."""
    of_panel = (f"{what}=", "none" if what == "N" else "base/")
    points = [row for row in rows if row["contender"] == "step compiled" and row["item"].startswith(of_panel)]
    if not points:  # there was no time for them
        return
    points.sort(key=lambda row: row["size"][what])
    x = [row["size"][what] for row in points]
    times.loglog(x, [row["base_milliseconds"] for row in points], "--o", color=GREY, label="plain, compiled", ms=4)
    times.loglog(x, [row["milliseconds"] for row in points], "-o", color=BLUE, label="dpscale", ms=4)
    if what == "N":
        times.loglog(x, [row["draw_milliseconds"] for row in points], ":o", color=RED, label="its drawing", ms=4)
    ratios.semilogx(x, [row["ratio"] for row in points], "-o", color=BLUE, ms=4)
    ratios.fill_between(x, *zip(*(row["quartiles"] for row in points), strict=True), color=BLUE, alpha=0.2, lw=0)
    ratios.axhline(1, color=GREY, ls="--", lw=1)
    ratios.minorticks_off()
    ratios.set_xticks(x, [f"$10^{round(math.log10(v))}$" if what == "N" else str(v) for v in x])
    ratios.set(xlabel=PANELS[what])
    if what == "N":
        others = ", ".join(f"{name} = {value}" for name, value in points[0]["size"].items() if name != what)
        ratios.set_title(others, fontsize=8, loc="left")


def draw_growth() -> None:
    """How the cost of a loop grows, from growth.json of benchmarks/growth.py."""
    found = json.loads((HERE / "growth.json").read_text())
    rows = [row for row in found["rows"] if "ratio" in row]
    fig, (times, ratios) = plt.subplots(2, 5, figsize=(13, 5), layout="constrained", sharex="col", sharey="row")
    for above, below, what in zip(times, ratios, PANELS, strict=True):
        growth_panel(above, below, what, rows)
    times[0].set(ylabel="ms per step")
    times[0].yaxis.set_major_formatter("{x:g}")
    ratios[0].set(ylabel="dpscale / plain, compiled", ylim=(0, 1.1 * max(row["quartiles"][1] for row in rows)))
    for axes in (*times, *ratios):
        axes.grid(alpha=0.25, which="major")
        axes.spines[["top", "right"]].set_visible(False)
    base = next(row["size"] for row in rows if row["item"].startswith("base/"))
    others = ", ".join(f"{name} = {value}" for name, value in base.items() if name != "N")
    fig.suptitle(f"{found['machine']}; but for what grows: {others}", fontsize=9)
    handles = max((axes.get_legend_handles_labels() for axes in times), key=lambda found: len(found[0]))
    fig.legend(*handles, frameon=False, ncols=3, loc="outside lower center")
    fig.savefig(HERE / "growth.png", dpi=120)


def draw() -> None:
    """Left: weight against norm. Right: x·w(x)/bound, what a sample adds per unit of noise."""
    x = torch.logspace(-4, 1.5, 600, dtype=torch.float64)
    fig, (weights, signal) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, (rule, colour, line) in RULES.items():
        w = rule.weight(x)
        weights.loglog(x, w, line, color=colour, label=name, lw=2)
        signal.semilogx(x, x * w / rule.bound, line, color=colour, label=name, lw=2)
        if isinstance(rule, PSASC):
            weights.plot(rule.peak_norm, rule.peak_weight, "o", color=colour)
    weights.set(xlabel="gradient norm x", ylabel="weight w(x)", title=f"Weights (C = {C:g}, r = {R:g})")
    signal.set(xlabel="gradient norm x", ylabel="x·w(x) / bound", title="Signal per unit of noise")
    weights.legend(frameon=False)
    for axes in (weights, signal):
        axes.grid(alpha=0.25, which="major")
        axes.spines[["top", "right"]].set_visible(False)
    HERE.mkdir(exist_ok=True)
    fig.savefig(HERE / "weights.png", dpi=120)


if __name__ == "__main__":
    draw()
    draw_levers()
    if (HERE / "growth.json").exists():
        draw_growth()
