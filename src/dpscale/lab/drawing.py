"""How pictures look, and how a figure becomes text or bytes.

The SVG takes its ink, grid and series colours from CSS variables of the page, so one picture serves light, dark and
print.
"""

import hashlib
import io
import re
from collections.abc import Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpscale.lab.config import METHODS

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


def axes(x: str, y: str, *, private: bool = True, size: tuple[float, float] = (5.2, 4.2)) -> tuple[Figure, Axes]:
    """An empty picture, about as wide as a phone at the text size of a page; marked if it looks past the noise."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=size, layout="constrained")
        made = figure.subplots()
        made.set_xlabel(x)
        made.set_ylabel(y)
        if not private:
            made.set_title(NOT_PRIVATE, loc="right", fontsize=10, color=WARN, fontweight="bold")
    return figure, made


def panels(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """So many empty pictures one below the other."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(5.2, 0.7 + height * count), layout="constrained")
        return figure, list(figure.subplots(count, squeeze=False)[:, 0])


def legend(figure: Figure, from_: Axes) -> None:
    """Below the picture, if there is anything to name."""
    with matplotlib.rc_context(STYLE):
        if from_.get_legend_handles_labels()[0]:
            figure.legend(loc="outside lower center", ncols=3, handlelength=2.4, columnspacing=1.0, handletextpad=0.5)


def look(method: str, *, marked: bool = False) -> Mapping[str, Any]:
    """Colour and dashes of a method, the same in every picture, whichever others are in it; and its mark."""
    place = list(METHODS).index(method) % len(SERIES) if method in METHODS else 0
    mark = {"marker": _MARKS[place]} if marked else {}
    return {"color": SERIES[place], "linestyle": _DASHES[place], **mark}


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
    text = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{slug(name)}-", text)
    text = re.sub(
        r'<svg [^>]*?viewBox="([^"]*)"[^>]*>', lambda found: f'<svg viewBox="{found[1]}{opening}', text, count=1
    )
    series = ((colour, f"--series-{k}") for k, colour in enumerate(SERIES))
    for colour, variable in ((INK, "--ink"), (GRID, "--grid"), (WARN, "--warn"), *series):
        text = text.replace(colour, f"var({variable})")
    return text


def slug(name: str) -> str:
    """A name that can stand in an id, an address and a pattern; names that differ stay different."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return name if plain and plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}".strip("-")


def svg_file(figure: Figure, name: str) -> str:
    """A whole SVG file on white, for papers."""
    return _svg(figure, name, facecolor="white")


def _svg(figure: Figure, name: str, **options: Any) -> str:
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure.savefig(stream, format="svg", metadata={"Date": None}, **options)
    return stream.getvalue()


def png(figure: Figure, dpi: int = 150) -> bytes:
    """The figure on white, for slides and papers."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor="white")
    return stream.getvalue()
