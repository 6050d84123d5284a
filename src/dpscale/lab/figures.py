"""Pictures from records, and from nothing else.

Each function returns a matplotlib figure; `svg` and `png` turn it into text or bytes. The SVG takes its ink, grid
and series colours from CSS variables of the page, so one picture serves light, dark and print. A picture that looks
past the noise says so on itself, wherever it is shown.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from dpscale.lab.summary import by_method, interval
from dpscale.scaling import RULES

# Stand-ins that `svg` replaces by CSS variables; they are also what `png` shows.
INK, GRID, WARN = "#1c2026", "#d9dde3", "#b3261e"
SERIES = ("#6b7280", "#d55e00", "#b8860b", "#0072b2", "#009e73", "#8a5fbf", "#c2578e", "#8c6d46")
_DASHES = ("-", "-", "-", "-", "-", (0, (6, 1.5)), (0, (3, 2)), (0, (1.2, 1.2)))
NOT_PRIVATE = "NOT PRIVATE: looks past the noise"
BASELINES = ("dp-sgd", "auto-s", "dp-psac")
"""What the paper sets its method against, a panel each."""
OURS = ("dp-psasc", "dp-psasc-star")
WEIGHED = ("dp-psac", *OURS)
"""Methods whose mean weight is drawn; Auto-S is left out as in the paper: its weights are off the scale."""
_BARS = 24  # of a histogram, about
_TICKS = 5  # parts of an axis of cosines, at most: labels like −0.025 are wide, and a page's font may be wider still
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Picture:
    """A figure with its name and caption; ``private`` is False if it shows data without noise."""

    name: str
    figure: Figure
    caption: str
    private: bool = True


def pictures(records: Sequence[Record]) -> list[Picture]:
    """Every picture that these records allow: those of the diagnostics only where they were recorded."""
    return [*_plain(records), *_looking_past_the_noise(records)]


def _plain(records: Sequence[Record]) -> Iterator[Picture]:
    yield Picture(
        name="accuracy",
        figure=accuracy_curves(records),
        caption=f"Test accuracy after {_told_epochs(records)}; the band is the 95% interval over seeds. "
        "No epoch or rate was chosen on it.",
    )
    if any(record.scaling for record in records):
        yield Picture(
            name="weights",
            figure=scaling_weights(records),
            caption="What each rule multiplies a sample's gradient by, against the norm of that gradient.",
        )


def _looking_past_the_noise(records: Sequence[Record]) -> Iterator[Picture]:
    measured = {method: [r.diagnostics for r in group if r.diagnostics] for method, group in by_method(records).items()}
    having = {
        name: [method for method, found in measured.items() if any(d[name] for d in found)]
        for name in ("norms", "similarity", "mean_weight")
    }
    if having["norms"]:
        epochs = next(d["norms"]["epochs"] for d in measured[having["norms"][0]] if d["norms"])
        yield Picture(
            name="norms",
            figure=norm_distribution(records),
            caption=f"Per-sample gradient norms in epochs {epochs[0]} to {epochs[-1]}, all seeds together.",
            private=False,
        )
    if any(name in having["similarity"] for name in OURS):
        for baseline in (name for name in BASELINES if name in having["similarity"]):
            yield Picture(
                name=f"similarity-{baseline}",
                figure=gradient_similarity(records, baseline),
                caption=f"Gradient similarity against {METHODS[baseline].title}: cosine between the noisy gradient of "
                "a step and the plain mean gradient of its batch, in the last epochs. A line marks each mean; 1 is no "
                "difference in direction.",
                private=False,
            )
    if any(name in having["mean_weight"] for name in WEIGHED):
        yield Picture(
            name="mean-weight",
            figure=mean_weights(records),
            caption="Mean scaling weight of the samples in each epoch. The rules' bounds differ, C and C/s, and the "
            "noise grows with the bound: a larger weight alone is no clearer signal.",
            private=False,
        )


def write(folder: Path, found: Sequence[Picture]) -> list[Path]:
    """Each picture as ``NAME.png`` and ``NAME.svg`` in ``folder``."""
    paths = []
    for picture in found:
        for suffix, content in (("png", png(picture.figure)), ("svg", svg_file(picture.figure, picture.name))):
            paths.append(folder / f"{picture.name}.{suffix}")
            files.write(paths[-1], content)
    return paths


def accuracy_curves(records: Sequence[Record]) -> Figure:
    """Test accuracy at the epochs after which all seeds were measured: mean, and the band of its 95% interval."""
    figure, axes = _axes("epoch", "test accuracy (%)")
    lowest_end, highest = 100.0, 0.0
    for method, group in by_method(records).items():
        measured = _measured(group)
        points = [interval([100 * value for value in each]) for each in measured.values()]
        mean = np.array([point[0] for point in points])
        half = np.array([point[1] or 0.0 for point in points])
        x = np.array(list(measured), dtype=float)
        colour, dashes = _look(method)
        axes.plot(x, mean, color=colour, linestyle=dashes, label=group[0].title, marker="." if len(x) == 1 else "")
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.1, linewidth=0)
        lowest_end, highest = min(lowest_end, mean[-1]), max(highest, (mean + half).max())
    # The first epochs start near chance; what is to be compared happens at the end.
    shown = float(np.clip(1.5 * (100 - lowest_end), 3, 25))
    axes.set_ylim(max(0.0, lowest_end - shown), min(100.0, highest + shown / 8))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def _measured(group: Sequence[Record]) -> dict[int, list[float]]:
    """The accuracies of all seeds by epoch, where each was measured."""
    found = zip(group[0].curves["epoch"], *(record.curves["accuracy"] for record in group), strict=True)
    return {int(epoch or 0): [float(value or 0.0) for value in each] for epoch, *each in found if None not in each}


def _told_epochs(records: Sequence[Record]) -> str:
    """Which epochs the points of the accuracy curves are of, in words."""
    epochs = {epoch for group in by_method(records).values() for epoch in _measured(group)}
    last = max(epochs)
    if len(epochs) == last:
        return "every epoch"
    return "the last epoch" if len(epochs) == 1 else f"{len(epochs)} of the {last} epochs, the last among them"


def beside_the_paper(found: Sequence[Experiment]) -> Picture | None:
    """The paper's accuracies and those here with their intervals, a panel for each of its experiments that has any."""
    shown = [one for one in found if one.paper and one.rows]
    if not shown:
        return None
    diamond: Any = {"marker": "D", "linestyle": "", "color": INK, "markerfacecolor": "none", "markersize": 6}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 0.7 + 1.55 * len(shown)), layout="constrained")
        panels = figure.subplots(len(shown), squeeze=False)[:, 0]
    for one, axes in zip(shown, panels, strict=True):
        rows = {row.method: row for row in one.rows if row.method in one.paper}
        for place, (method, theirs) in enumerate(one.paper.items()):
            if row := rows.get(method):
                half = None if row.half_width is None else 100 * row.half_width
                axes.errorbar(100 * row.accuracy, place, xerr=half, fmt="o", color=_look(method)[0], capsize=3)
            axes.plot(theirs, place, **diamond)
        axes.set_yticks(range(len(one.paper)), [METHODS[method].title for method in one.paper])
        axes.set_ylim(len(one.paper) - 0.4, -0.6)
        axes.xaxis.set_major_locator(MaxNLocator(_TICKS + 1))
        title = one.preset + (f", features of {one.encoder}" if one.encoder else "")
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
    last = panels[-1]
    last.set_xlabel("test accuracy (%)")
    last.plot([], [], "o", color=INK, label="here, with 95% interval")
    last.plot([], [], **diamond, label="the paper")
    _legend(figure, last)
    return Picture(
        name="paper",
        figure=figure,
        caption="Test accuracy of each method here, mean over seeds with its 95% interval, and in the paper, which "
        "gives none. Scales differ.",
    )


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
    figure, axes = _axes("gradient norm x", "share of samples per decade", private=False)
    for method, group in by_method(records).items():
        counts, width = _counts(group, "norms", "log10_norm")
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
    _decades(axes)
    axes.set_ylim(bottom=0)
    _legend(figure, axes)
    return figure


def _decades(axes: Axes) -> None:
    """Labels of a logarithmic axis that keep apart: powers of ten, and plain numbers between where there are few."""
    low, high = axes.get_xlim()
    axes.xaxis.set_minor_formatter(NullFormatter())
    if high < 100 * low:
        steps = (1, 2, 5) if high > 3 * low else range(1, 10)
        axes.xaxis.set_major_locator(LogLocator(subs=tuple(steps), numticks=9))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def gradient_similarity(records: Sequence[Record], baseline: str) -> Figure:
    """A panel of the paper's picture: cosines of a baseline against those of DP-PSASC and DP-PSASC*.

    All seeds together. The panels of one experiment share their axes, whichever baseline they show.
    """
    figure, axes = _axes("cosine similarity", "share of steps (%)", private=False)
    groups = by_method(records)
    counts = {
        method: found
        for method in (*BASELINES, *OURS)
        if (found := _counts(groups.get(method, []), "similarity", "cosine")[0])
    }
    width = next(_counts(groups[method], "similarity", "cosine")[1] for method in counts)
    centres = [centre for found in counts.values() for centre in found]
    # A bar is a whole number of the recorded bins: nothing is split.
    bar = width * max(1, round((max(centres) - min(centres)) / width / _BARS))
    low = np.floor((min(centres) - width / 2) / bar + 1e-9) * bar
    edges = low + bar * np.arange(int(np.ceil((max(centres) + width / 2 - low) / bar - 1e-9)) + 1)
    highest = 0.0
    for method, found in counts.items():
        weights = np.array(list(found.values()), dtype=float)
        share = 100 * np.histogram(list(found), edges, weights=weights)[0] / weights.sum()
        highest = max(highest, share.max())
        if method not in (baseline, *OURS):
            continue
        colour, dashes = _look(method)
        label = groups[method][0].title
        axes.stairs(share, edges, color=colour, fill=True, alpha=0.15)
        axes.stairs(share, edges, color=colour, linestyle=dashes, linewidth=1.5, label=label)
        axes.axvline(float(np.average(list(found), weights=weights)), color=colour, linestyle=dashes, linewidth=1)
    axes.set_xlim(edges[0], edges[-1])
    axes.xaxis.set_major_locator(MaxNLocator(_TICKS))
    axes.set_ylim(0, 1.05 * highest)
    _legend(figure, axes)
    return figure


def mean_weights(records: Sequence[Record]) -> Figure:
    """Mean scaling weight per epoch of DP-PSAC, DP-PSASC and DP-PSASC*, over seeds."""
    figure, axes = _axes("epoch", "mean scaling weight", private=False)
    for method, group in by_method(records).items():
        found = [r.diagnostics["mean_weight"] for r in group if r.diagnostics] if method in WEIGHED else []
        columns = [[value for value in column if value is not None] for column in zip(*found, strict=True)]
        points = [(epoch, *interval(values)) for epoch, values in enumerate(columns, start=1) if values]
        if not points:
            continue
        x, mean, half = (np.array([point[k] or 0.0 for point in points]) for k in range(3))
        colour, dashes = _look(method)
        axes.plot(x, mean, color=colour, linestyle=dashes, label=group[0].title, marker="." if len(x) == 1 else "")
        axes.fill_between(x, mean - half, mean + half, color=colour, alpha=0.1, linewidth=0)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    _legend(figure, axes)
    return figure


def _counts(group: Sequence[Record], name: str, centres: str) -> tuple[dict[float, int], float]:
    """The histograms of several records added up, and the width of a bin."""
    counts: dict[float, int] = {}
    width = 1.0
    for record in group:
        found: Mapping[str, Any] | None = record.diagnostics and record.diagnostics[name]
        if not found:
            continue
        width = found["bin_width"]
        for centre, count in zip(found[centres], found["counts"], strict=True):
            counts[centre] = counts.get(centre, 0) + count
    return counts, width


def svg(figure: Figure, name: str, description: str) -> str:
    """An ``<svg>`` element to put into a page, coloured by its CSS variables, with ids of its own.

    Args:
        name: of the picture in its page; any text, from which the ids are made.
        description: for those who do not see it, escaped for an attribute.
    """
    text, opening = _svg(figure, name, transparent=True), f'" role="img" aria-label="{description}">'
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{_slug(name)}-", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', lambda found: f'<svg viewBox="{found[1]}{opening}', text, count=1
    )
    series = ((colour, f"--series-{k}") for k, colour in enumerate(SERIES))
    for colour, variable in ((INK, "--ink"), (GRID, "--grid"), (WARN, "--warn"), *series):
        text = text.replace(colour, f"var({variable})")
    return text


def _slug(name: str) -> str:
    """A name that can stand in an id, an address and a pattern; names that differ stay different."""
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return name if slug and slug == name else f"{slug}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def svg_file(figure: Figure, name: str) -> str:
    """A whole SVG file on white, for papers."""
    return _svg(figure, name, facecolor="white")


def _svg(figure: Figure, name: str, **options: Any) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None}, **options)
    return stream.getvalue()


def noise_budget(advice: Advice) -> Figure:
    """Cumulative noise over cost, a line per batch size; the advised setting and the knee are marked.

    Where epochs were given, every batch costs the same, and the noise is drawn over the batch.
    """
    label, scale = _noise_scale(advice)
    figure, axes = _axes(label, "cumulative noise ÷ full-batch floor")
    figure.set_size_inches(6.6, 4.4)
    with matplotlib.rc_context(_STYLE):
        lines = _noise_lines(axes, advice, scale)
        told = f"within {advice.within:.0%} of the floor"
        axes.axhspan(1, 1 + advice.within, color=GRID, alpha=0.6, linewidth=0, zorder=0, label=told)
        for name, row, mark, size, ink in (
            ("knee", advice.knee, "D", 110, SERIES[1]),
            ("advised", advice, "*", 240, WARN),
        ):
            told = f"{name}: batch {row.batch:,}, {row.epochs:g} epochs"
            axes.scatter([scale(row)], [row.over_floor], marker=mark, s=size, edgecolor=ink, linewidth=2, zorder=3,
                         facecolor=ink if mark == "*" else "none", label=told)  # fmt: skip
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0), numticks=12))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.1, 1.5, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(NullFormatter())
        handles, labels = axes.get_legend_handles_labels()
        axes.add_artist(axes.legend(handles[lines:], labels[lines:], loc="upper right"))
        if lines:  # batch sizes, beside the picture
            axes.legend(handles[:lines], labels[:lines], title="batch", loc="upper left", bbox_to_anchor=(1.0, 1.0))
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


def _noise_lines(axes: Axes, advice: Advice, scale: Callable[[Setting], float]) -> int:
    """A line per batch size, from few epochs to many; or one line over the batch. Returns how many have a label."""
    if advice.effort == "batch":
        rows = sorted(advice.table, key=lambda row: row.batch)
        axes.plot([scale(row) for row in rows], [row.over_floor for row in rows], "o-", color=SERIES[3], markersize=4)
        return 0
    batches = sorted({row.batch for row in advice.table})
    for place, batch in enumerate(batches):
        rows = [row for row in advice.table if row.batch == batch]
        colour = matplotlib.colormaps["viridis"](0.9 * place / max(1, len(batches) - 1))
        axes.plot([scale(row) for row in rows], [row.over_floor for row in rows], "o-", color=colour, markersize=4,
                  label=f"{batch:,}")  # fmt: skip
    return len(batches)


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure on white, for slides and papers."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white")
    return stream.getvalue()


def _axes(x: str, y: str, *, private: bool = True) -> tuple[Figure, Axes]:
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 4.2), layout="constrained")  # about a phone's width at the text size of a page
        axes = figure.subplots()
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        if not private:
            axes.set_title(NOT_PRIVATE, loc="right", fontsize=10, color=WARN, fontweight="bold")
    return figure, axes


def _legend(figure: Figure, axes: Axes) -> None:
    with matplotlib.rc_context(_STYLE):
        if axes.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, handlelength=1.8, columnspacing=1.0, handletextpad=0.5)


def _look(method: str) -> tuple[str, Any]:
    # A method looks the same in every picture, whichever others are in it.
    place = list(METHODS).index(method) if method in METHODS else 0
    return SERIES[place % len(SERIES)], _DASHES[place % len(_DASHES)]
