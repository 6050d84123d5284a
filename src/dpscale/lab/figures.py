"""Pictures from records, and from nothing else. One that looks past the noise says so on itself.

The SVG takes its ink, grid and series colours from CSS variables of the page, so one picture serves light, dark and
print.
"""

import hashlib
import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from dpscale.advice import Advice, Setting, short
from dpscale.lab import records as files
from dpscale.lab.paper import Experiment
from dpscale.lab.presets import METHODS
from dpscale.lab.records import Record
from dpscale.lab.stats import by_method, interval
from dpscale.scaling import RULES

BASELINES = ("dp-sgd", "auto-s", "dp-psac")
"""What the paper sets its method against, a panel each."""
OURS = ("dp-psasc", "dp-psasc-star")
_BARS = 24  # of a histogram, about
_TICKS = 5  # parts of an axis of cosines, at most: labels like −0.025 are wide, and a page's font may be wider still

# Stand-ins that `svg` replaces by CSS variables; they are also what `png` shows.
INK, GRID, WARN = "#1c2026", "#d9dde3", "#b3261e"
SERIES = ("#6b7280", "#d55e00", "#b8860b", "#0072b2", "#009e73", "#8a5fbf", "#c2578e", "#8c6d46")
_DASHES = ("-", (0, (7, 2)), (0, (1.5, 1.5)), (0, (5, 1.5, 1.5, 1.5)), "-", (0, (7, 2)), (0, (3, 2)), (0, (1.5, 1.5)))
_MARKS = ("o", "s", "^", "v", "D", "P", "X", "*")
NOT_PRIVATE = "NOT PRIVATE: looks past the noise"
STYLE: Any = {  # matplotlib types its keys one by one
    "svg.fonttype": "none", "font.size": 11.5, "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID,
    "xtick.color": INK, "ytick.color": INK, "grid.color": GRID, "grid.linewidth": 0.7, "axes.grid": True,
    "axes.axisbelow": True, "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False,
    "legend.fontsize": 10.5, "lines.linewidth": 1.8, "lines.markersize": 4.5, "figure.constrained_layout.use": True,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A figure with its name and caption; ``private`` is False if it shows data without noise."""

    name: str
    figure: Figure
    caption: str
    private: bool = True


# -- how pictures look -----------------------------------------------------------------------------------------


def _axes(x: str, y: str, *, private: bool = True, size: tuple[float, float] = (5.2, 4.2)) -> tuple[Figure, Axes]:
    """An empty picture, about as wide as a phone at the text size of a page; marked if it looks past the noise."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        made = figure.subplots()
        made.set_xlabel(x)
        made.set_ylabel(y)
        if not private:
            made.set_title(NOT_PRIVATE, loc="right", fontsize=10, color=WARN, fontweight="bold")
    return figure, made


def _panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """So many empty pictures one below the other."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 0.7 + height * count), layout="constrained")
        return figure, list(figure.subplots(count, squeeze=False)[:, 0])


def _legend(figure: Figure, from_: Axes) -> Figure:
    """Below the picture, if there is anything to name."""
    with matplotlib.rc_context(STYLE):
        if from_.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, handlelength=2.4, columnspacing=1.0, handletextpad=0.5)
    return figure


def look(method: str, *, marked: bool = False) -> Mapping[str, Any]:
    """Colour and dashes of a method, the same in every picture, whichever others are in it; and its mark."""
    place = list(METHODS).index(method)
    mark = {"marker": _MARKS[place]} if marked else {}
    return {"color": SERIES[place], "linestyle": _DASHES[place], **mark}


def svg(figure: Figure, name: str, description: str) -> str:
    """An ``<svg>`` element to put into a page, coloured by its CSS variables, with ids of its own.

    Args:
        name: of the picture in its page; any text, from which the ids are made.
        description: for those who do not see it, escaped for an attribute.
    """
    text, opening = _drawn(figure, "svg", name, transparent=True).decode(), f'role="img" aria-label="{description}"'
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{slug(name)}-", text)
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', lambda head: f"<svg {head[1]} {opening}>", text, count=1)
    series = ((colour, f"--series-{k}") for k, colour in enumerate(SERIES))
    for colour, variable in ((INK, "--ink"), (GRID, "--grid"), (WARN, "--warn"), *series):
        text = text.replace(colour, f"var({variable})")
    return text


def slug(name: str) -> str:
    """A name that can stand in an id, an address and a pattern; names that differ stay different."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return name if plain and plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def png(figure: Figure) -> bytes:
    """The figure on white, for slides and papers."""
    return _drawn(figure, "png", "", dpi=150, facecolor="white")


def _drawn(figure: Figure, kind: str, salt: str, **options: Any) -> bytes:
    stream, metadata = io.BytesIO(), {"Date": None} if kind == "svg" else None
    with matplotlib.rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        figure.savefig(stream, format=kind, metadata=metadata, **options)
    return stream.getvalue()


def write(folder: Path, found: Sequence[Picture]) -> None:
    """Each picture as ``NAME.png`` and ``NAME.svg`` in ``folder``, on white."""
    for picture in found:
        files.write(folder / f"{picture.name}.png", png(picture.figure))
        drawn = _drawn(picture.figure, "svg", picture.name, facecolor="white")
        files.write(folder / f"{picture.name}.svg", drawn)


# -- pictures of one experiment --------------------------------------------------------------------------------


def pictures(records: Sequence[Record]) -> list[Picture]:
    """Every picture that these records allow: those of the diagnostics only where they were recorded."""
    similar = (similarity(records, baseline) for baseline in BASELINES)
    drawn = (accuracy(records), weights(records), norms(records), *similar, mean_weights(records))
    return [picture for picture in drawn if picture]


def accuracy(records: Sequence[Record]) -> Picture:
    """Test accuracy at the epochs after which all seeds were measured: mean, and its 95% interval. Methods that agree
    would hide each other, so those of one epoch stand side by side."""
    figure, axes = _axes("epoch", "test accuracy (%)")
    groups, lows, highs, epochs = by_method(records), [], [], set[int]()
    for place, (method, group) in enumerate(groups.items()):
        found = zip(group[0].curves["epoch"], *(record.curves["accuracy"] for record in group), strict=True)
        measured = {int(epoch or 0): [100 * (x or 0.0) for x in each] for epoch, *each in found if None not in each}
        epochs |= measured.keys()
        apart = 0.7 * max(measured) / len(measured) * ((place + 0.5) / len(groups) - 0.5)
        mean, half = zip(*(interval(values) for values in measured.values()), strict=True)
        ends = np.array([value or 0.0 for value in half])
        axes.errorbar([epoch + apart for epoch in measured], mean, yerr=ends, elinewidth=0.8, linewidth=1.2,
                      label=group[0].title, **look(method, marked=True))  # fmt: skip
        lows.append(mean[-1])
        highs.append(max(mean + ends))
    # The first epochs start near chance; what is to be compared happens at the end.
    shown = float(np.clip(1.5 * (100 - min(lows)), 3, 25))
    axes.set_ylim(max(0.0, min(lows) - shown), min(100.0, max(highs) + shown / 8))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    told = f"{len(epochs)} of the {max(epochs)} epochs, the last among them"
    told = "every epoch" if len(epochs) == max(epochs) else "the last epoch" if len(epochs) == 1 else told
    caption = (
        f"Test accuracy after {told}, mean over seeds with its 95% interval. Methods measured after the same epoch "
        "stand side by side. No epoch or rate was chosen on it."
    )
    return Picture(name="accuracy", figure=_legend(figure, axes), caption=caption)


def weights(records: Sequence[Record]) -> Picture | None:
    """Weight against gradient norm for every rule in the records, both axes logarithmic."""
    figure, axes = _axes("gradient norm x", "weight w(x)")
    x = torch.logspace(-4, 2, 400, dtype=torch.float64)
    for method, group in by_method(records).items():
        if group[0].scaling is not None:
            constants = dict(group[0].scaling)
            rule = RULES[constants.pop("rule")](**constants)
            axes.loglog(x, rule.weight(x), label=group[0].title, **look(method))
    caption = "What each rule multiplies a sample's gradient by, against the norm of that gradient."
    return Picture(name="weights", figure=_legend(figure, axes), caption=caption) if axes.lines else None


def norms(records: Sequence[Record]) -> Picture | None:
    """Share of per-sample gradient norms per decade in the last epochs, all seeds together."""
    figure, axes = _axes("gradient norm x", "share of samples per decade", private=False)
    epochs: list[int] = []
    for method, group in by_method(records).items():
        centres, counts, width = _histogram(group, "norms", "log10_norm")
        if len(centres):
            epochs = epochs or next(d["norms"]["epochs"] for r in group if (d := r.diagnostics) and d["norms"])
            bins = ((centres - centres[0]) / width).round().astype(int)
            share = np.bincount(bins, counts / counts.sum() / width)  # 0 in bins that were not recorded
            grid = 10 ** (centres[0] + width * np.arange(len(share)))
            axes.plot(grid, share, linewidth=1.5, label=group[0].title, **look(method))
    if not epochs:
        return None
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    caption = f"Per-sample gradient norms in epochs {epochs[0]} to {epochs[-1]}, all seeds together."
    return Picture(name="norms", figure=_legend(figure, axes), caption=caption, private=False)


def similarity(records: Sequence[Record], baseline: str) -> Picture | None:
    """A panel of the paper's picture: cosines of a baseline against those of DP-PSASC and DP-PSASC*.

    All seeds together. The panels of one experiment share their axes, whichever baseline they show.
    """
    figure, axes = _axes("cosine similarity", "share of steps (%)", private=False)
    groups = by_method(records)
    found = {name: _histogram(groups[name], "similarity", "cosine") for name in (*BASELINES, *OURS) if name in groups}
    found = {name: each for name, each in found.items() if len(each[0])}
    if baseline not in found or not found.keys() & {*OURS}:
        return None
    width = next(iter(found.values()))[2]
    lowest, largest = (end([end(centres) for centres, *_ in found.values()]) for end in (min, max))
    bar = width * max(1, round((largest - lowest) / width / _BARS))  # a whole number of recorded bins: none is split
    low = np.floor((lowest - width / 2) / bar + 1e-9) * bar
    edges = low + bar * np.arange(int(np.ceil((largest + width / 2 - low) / bar - 1e-9)) + 1)
    highest = 0.0
    for method, (centres, counts, _) in found.items():
        share = 100 * np.histogram(centres, edges, weights=counts / counts.sum())[0]
        highest = max(highest, share.max())
        if method in (baseline, *OURS):
            axes.stairs(share, edges, color=look(method)["color"], fill=True, alpha=0.15)
            axes.stairs(share, edges, linewidth=1.5, label=groups[method][0].title, **look(method))
            axes.axvline(float(np.average(centres, weights=counts)), linewidth=1, **look(method))
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.set_ylim(0, 1.05 * highest)
    caption = (
        f"Gradient similarity against {METHODS[baseline].title}: cosine between the noisy gradient of a step and the "
        "plain mean gradient of its batch, in the last epochs. A line marks each mean; 1 is no difference in direction."
    )
    return Picture(name=f"similarity-{baseline}", figure=_legend(figure, axes), caption=caption, private=False)


def _histogram(group: Sequence[Record], name: str, centres: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Centres, counts and width of the bins of several records, added up."""
    found = [record.diagnostics[name] for record in group if record.diagnostics and record.diagnostics[name]]
    every = [value for each in found for value in each[centres]]
    kept, places = np.unique(every, return_inverse=True)
    counts = np.bincount(places, [count for each in found for count in each["counts"]], len(kept))
    return kept, counts, found[0]["bin_width"] if found else 1.0


def mean_weights(records: Sequence[Record]) -> Picture | None:
    """Mean scaling weight per epoch, over seeds. Auto-S is left out as in the paper: its weights are off the scale."""
    figure, axes = _axes("epoch", "mean scaling weight", private=False)
    for method, group in by_method(records).items():
        found = [r.diagnostics["mean_weight"] for r in group if r.diagnostics] if method in ("dp-psac", *OURS) else []
        columns = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
        points = [(epoch, *interval(values)) for epoch, values in enumerate(columns, start=1) if values]
        if points:
            x, mean, half = (np.array([point[k] or 0.0 for point in points]) for k in range(3))
            axes.plot(x, mean, label=group[0].title, **look(method, marked=len(x) == 1))
            axes.fill_between(x, mean - half, mean + half, color=look(method)["color"], alpha=0.1, linewidth=0)
    if not axes.lines:
        return None
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    caption = (
        "Mean scaling weight of the samples in each epoch. The rules' bounds differ, C and C/s, and the noise grows "
        "with the bound: a larger weight alone is no clearer signal."
    )
    return Picture(name="mean-weight", figure=_legend(figure, axes), caption=caption, private=False)


# -- pictures of several ---------------------------------------------------------------------------------------


def beside_the_paper(found: Sequence[Experiment]) -> Picture | None:
    """The paper's accuracies and those here with their intervals, a panel for each of its experiments that has any."""
    shown = [one for one in found if one.paper and one.rows]
    if not shown:
        return None
    diamond: Any = {"marker": "D", "linestyle": "", "color": INK, "markerfacecolor": "none", "markersize": 6}
    figure, panels = _panels(len(shown), 1.55)
    for one, axes in zip(shown, panels, strict=True):
        rows = {row.method: row for row in one.rows if row.method in one.paper}
        for place, (method, theirs) in enumerate(one.paper.items()):
            if row := rows.get(method):
                half = None if row.half_width is None else 100 * row.half_width
                axes.errorbar(100 * row.accuracy, place, xerr=half, fmt="o", color=look(method)["color"], capsize=3)
            axes.plot(theirs, place, **diamond)
        _rows_of(axes, [METHODS[method].title for method in one.paper], one.title)
    last = panels[-1]
    last.set_xlabel("test accuracy (%)")
    last.plot([], [], "o", color=INK, label="here, with 95% interval")
    last.plot([], [], **diamond, label="the paper")
    caption = (
        "Test accuracy of each method here, mean over seeds with its 95% interval, and in the paper, which gives none. "
        "Scales differ."
    )
    return Picture(name="paper", figure=_legend(figure, last), caption=caption)


def forest(found: Sequence[Experiment]) -> Picture | None:
    """Differences to the reference, seed by seed, with their 95% intervals, a panel per experiment."""
    shown = [(one, [row for row in one.rows if row.p is not None]) for one in found]
    shown = [(one, rows) for one, rows in shown if rows]
    if not shown:
        return None
    figure, panels = _panels(len(shown), 0.45 + 0.26 * max(len(rows) for _, rows in shown))
    for (one, rows), axes in zip(shown, panels, strict=True):
        for place, row in enumerate(rows):
            half, fill = 100 * (row.difference_half_width or 0.0), None if row.differs else "none"
            axes.errorbar(100 * (row.difference or 0.0), place, xerr=half, fmt="o", color=look(row.method)["color"],
                          markerfacecolor=fill, capsize=3)  # fmt: skip
        axes.axvline(0, color=INK, linewidth=1)
        widest = 110 * max(row.reach for row in rows)
        axes.set_xlim(-widest, widest)
        _rows_of(axes, [row.title for row in rows], one.title)
    last = panels[-1]
    last.set_xlabel(f"points of accuracy above or below {shown[0][1][0].reference}")
    last.plot([], [], "o", color=INK, label="left after Holm's correction")
    last.plot([], [], "o", color=INK, markerfacecolor="none", label="not told apart")
    caption = (
        "Difference of each private method to the reference, seed by seed, with its 95% interval. A filled point is "
        "left after Holm's correction; the others are not told apart from it. Scales differ."
    )
    return Picture(name="differences", figure=_legend(figure, last), caption=caption)


def _rows_of(axes: Axes, titles: Sequence[str], title: str) -> None:
    axes.set_yticks(range(len(titles)), titles)
    axes.set_ylim(len(titles) - 0.4, -0.6)
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS + 1))
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


# -- the picture of dpscale plan -------------------------------------------------------------------------------


def noise_budget(advice: Advice) -> Figure:
    """Cumulative noise over cost, a line per batch size; the advised setting and the knee are marked.

    Where epochs were given, every batch costs the same, and the noise is drawn over the batch.
    """
    label, scale = _noise_scale(advice)
    figure, axes = _axes(label, "cumulative noise ÷ full-batch floor", size=(6.6, 4.4))
    lines: dict[int, list[Setting]] = {}
    for row in sorted(advice.table, key=lambda row: row.batch):
        lines.setdefault(0 if advice.effort == "batch" else row.batch, []).append(row)
    with matplotlib.rc_context(STYLE):
        for place, (batch, rows) in enumerate(lines.items()):
            axes.plot([scale(row) for row in rows], [row.over_floor for row in rows], "o-", markersize=4,
                      color=matplotlib.colormaps["viridis"](0.9 * place / max(1, len(lines) - 1)),
                      label=f"{batch:,}" if batch else "_")  # fmt: skip
        named = len(axes.get_legend_handles_labels()[0])
        axes.axhspan(1, 1 + advice.within, color=GRID, alpha=0.6, linewidth=0, zorder=0,
                     label=f"within {advice.within:.0%} of the floor")  # fmt: skip
        for name, one, mark, size, ink in (
            ("knee", advice.knee, "D", 110, SERIES[1]),
            ("advised", advice, "*", 240, WARN),
        ):
            axes.scatter([scale(one)], [one.over_floor], marker=mark, s=size, edgecolor=ink, linewidth=2, zorder=3,
                         facecolor=ink if mark == "*" else "none",
                         label=f"{name}: batch {one.batch:,}, {one.epochs:g} epochs")  # fmt: skip
        axes.set(xscale="log", yscale="log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.1, 1.5, 2.0, 3.0, 5.0)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        handles, labels = axes.get_legend_handles_labels()
        axes.add_artist(axes.legend(handles[named:], labels[named:], loc="upper right"))
        if named:  # batch sizes, beside the picture
            axes.legend(handles[:named], labels[:named], title="batch", loc="upper left", bbox_to_anchor=(1.0, 1.0))
        told = f"{advice.size:,} samples, ε = {advice.epsilon:g}, δ = {advice.delta:g}"
        axes.set_title(told, loc="left", fontsize=11)
    return figure


def _noise_scale(advice: Advice) -> tuple[str, Callable[[Setting], float]]:
    """What noise is drawn over: in words, and of a setting."""
    if advice.effort == "batch":
        return f"batch, at {advice.epochs:g} epochs", lambda row: row.batch
    if advice.seconds is None:
        return "cost: samples computed", lambda row: row.samples
    longest = max(row.seconds or 0.0 for row in advice.table)
    name, unit = ("hours", 3600) if longest > 7200 else ("minutes", 60) if longest > 120 else ("seconds", 1)
    return f"cost: {name}", lambda row: (row.seconds or 0.0) / unit
