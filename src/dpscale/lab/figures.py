"""Pictures from records, and from nothing else.

Each function returns a matplotlib figure; `svg` and `png` turn it into text or bytes. The SVG takes its ink, grid
and series colours from CSS variables of the page, so one picture serves light, dark and print.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dpscale.lab.presets import METHODS
from dpscale.lab.records import Record
from dpscale.lab.summary import by_method, interval
from dpscale.scaling import RULES

# Stand-ins that `svg` replaces by CSS variables; they are also what `png` shows.
INK, GRID = "#1c2026", "#d9dde3"
SERIES = ("#6b7280", "#d55e00", "#b8860b", "#0072b2", "#009e73", "#8a5fbf", "#c2578e")
_DASHES = ("-", "-", "-", "-", "-", (0, (5, 2)), (0, (1.5, 1.5)))
_STYLE: Any = {  # matplotlib types its keys one by one
    "svg.fonttype": "none",
    "font.size": 11.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 10.5,
    "lines.linewidth": 1.8,
    "figure.constrained_layout.use": True,
}


def accuracy_curves(records: Sequence[Record]) -> Figure:
    """Test accuracy after every epoch: mean over seeds, and the band of its 95% interval."""
    figure, axes = _axes("epoch", "test accuracy (%)")
    lowest_end = 100.0
    for method, group in by_method(records).items():
        epochs = group[0].curves["epoch"]
        points = [
            interval([100 * float(record.curves["accuracy"][k] or 0.0) for record in group]) for k in range(len(epochs))
        ]
        mean = np.array([point[0] for point in points])
        half = np.array([point[1] or 0.0 for point in points])
        x = np.array(epochs, dtype=float)
        colour, dashes = _look(method)
        axes.plot(x, mean, color=colour, linestyle=dashes, label=group[0].title, marker="." if len(x) == 1 else "")
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.1, linewidth=0)
        lowest_end = min(lowest_end, mean[-1])
    # The first epochs start near chance; what is to be compared happens at the end.
    axes.set_ylim(max(0.0, lowest_end - 25), 100)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def scaling_weights(records: Sequence[Record]) -> Figure:
    """Weight against gradient norm for every rule in the records, both axes logarithmic."""
    figure, axes = _axes("gradient norm x", "weight w(x)")
    norms = torch.logspace(-4, 2, 400, dtype=torch.float64)
    for method, group in by_method(records).items():
        if group[0].scaling is None:
            continue
        constants = dict(group[0].scaling)
        rule = RULES[constants.pop("rule")](**constants)
        colour, dashes = _look(method)
        axes.loglog(norms, rule.weight(norms), color=colour, linestyle=dashes, label=group[0].title)
    _legend(figure, axes)
    return figure


def norm_distribution(records: Sequence[Record]) -> Figure:
    """Share of per-sample gradient norms per decade in the last epochs, all seeds together."""
    figure, axes = _axes("gradient norm x", "share of samples per decade")
    for method, group in by_method(records).items():
        counts: dict[float, int] = {}
        width = 1.0
        for record in group:
            if record.diagnostics is None:
                continue
            width = record.diagnostics["bin_width"]
            for centre, count in zip(record.diagnostics["log10_norm"], record.diagnostics["counts"], strict=True):
                counts[centre] = counts.get(centre, 0) + count
        if not counts:
            continue
        first, last = min(counts), max(counts)
        grid = np.arange(round((last - first) / width) + 1) * width + first
        share = np.zeros(len(grid))
        for centre, count in counts.items():
            share[round((centre - first) / width)] = count / sum(counts.values()) / width
        colour, dashes = _look(method)
        axes.plot(10**grid, share, color=colour, linestyle=dashes, linewidth=1.5, label=group[0].title)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def svg(figure: Figure, name: str, description: str) -> str:
    """An ``<svg>`` element to put into a page, coloured by its CSS variables, with ids of its own."""
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{name}-", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>',
        rf'<svg viewBox="\1" role="img" aria-label="{description}">',
        text,
        count=1,
    )
    for colour, variable in ((INK, "--ink"), (GRID, "--grid"), *((c, f"--series-{k}") for k, c in enumerate(SERIES))):
        text = text.replace(colour, f"var({variable})")
    return text


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure on white, for slides and papers."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white")
    return stream.getvalue()


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 4.2), layout="constrained")  # about a phone's width at the text size of a page
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    with matplotlib.rc_context(_STYLE):
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, handlelength=1.8, columnspacing=1.0, handletextpad=0.5)


def _look(method: str) -> tuple[str, Any]:
    # A method looks the same in every picture, whichever others are in it.
    place = list(METHODS).index(method) if method in METHODS else 0
    return SERIES[place % len(SERIES)], _DASHES[place % len(_DASHES)]
