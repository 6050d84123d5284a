"""Draws the figure of what-s-does.md: python docs/make_figures.py (needs matplotlib, from dpscale[lab])."""

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from dpscale import PSAC, PSASC, AutoS, Clip

HERE = Path(__file__).parent / "figures"
C, S, R = 0.25, 0.55, 1e-3  # the paper's FashionMNIST setting
RULES = {
    "Clip": (Clip(C=C), "#7f7f7f", "-"),
    "AutoS": (AutoS(C=C, r=R), "#e69f00", "-"),
    "PSAC": (PSAC(C=C, r=R), "#0072b2", "-"),
    f"PSASC, s = {S:g}": (PSASC(C=C, s=S, r=R), "#d55e00", "--"),
}


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
