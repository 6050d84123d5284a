"""What an audit found: numbers, plain words, a picture."""

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from dpscale.audit.statistics import Check, Point
from dpscale.card.recompute import FALSE_ALARM as FALSE_ALARM
from dpscale.checks import require


@dataclass(frozen=True, kw_only=True)
class AuditReport:
    """A lower bound on ε beside the claimed one, and whether the releases are distributed as claimed.

    Attributes:
        mode: "white-box": canary gradients, seen by somebody who reads every release; "input-space": canary samples,
            seen by somebody who has the trained model.
        epsilon_claimed: the accountant's, at ``delta``.
        epsilon_lower: at ``confidence``. White-box, it is ``bounds["curve"]``; else ``bounds["guesses"]``.
        bounds: by method. "threshold" assumes nothing of the mechanism, "curve" that its trade-off curve is the plan's
            at some noise; both take canaries as independent. "guesses" allows them to influence each other.
        canaries: of each run. observations: of all runs.
        points: measured error rates of membership guesses, each with its own intervals.
        claimed: (FPR, FNR) along the curve below which no adversary should get.
        checks: tests of what is claimed; of input-space canaries, of the number of right guesses alone.
        plan: the audited plan, in words.
        adjacency: what is the difference between "in" and "out".
        seconds: how long it took.
    """

    mode: Literal["white-box", "input-space"]
    epsilon_claimed: float
    epsilon_lower: float
    bounds: dict[str, float]
    delta: float
    confidence: float
    canaries: int
    runs: int
    observations: int
    points: tuple[Point, ...]
    claimed: tuple[tuple[float, float], ...]
    checks: tuple[Check, ...]
    plan: str
    adjacency: str
    seconds: float

    @property
    def p_value(self) -> float:
        """The least of the checks' p-values, times their number."""
        return min(1.0, len(self.checks) * min(check.p_value for check in self.checks))

    @property
    def consistent(self) -> bool:
        """Whether nothing speaks against the claim, at a false-alarm rate of `FALSE_ALARM` over all checks."""
        return self.p_value >= FALSE_ALARM

    def to_dict(self) -> dict[str, Any]:
        """All of it, for JSON."""
        return {**asdict(self), "p_value": self.p_value, "false_alarm_rate": FALSE_ALARM, "consistent": self.consistent}

    def __str__(self) -> str:
        told = "consistent with what is claimed" if self.consistent else "NOT CONSISTENT with what is claimed"
        share = self.epsilon_lower / self.epsilon_claimed if self.epsilon_claimed else math.nan
        lines = [
            f"The releases are {told}.",
            f"  claimed    epsilon = {self.epsilon_claimed:.4g} at delta = {self.delta:g} ({self.adjacency})",
            f"  measured   epsilon >= {self.epsilon_lower:.4g} at {self.confidence:.0%} confidence: {share:.0%} of it",
            *(f"    {_WORDS[name]:<66} {bound:.4g}" for name, bound in self.bounds.items()),
            f"  {self.mode}, {self.canaries:,} canaries × {self.runs} runs = {self.observations:,} observations, "
            f"{self.seconds:.0f} s",
            f"  {self.plan}",
        ]
        told = f"Tests, with p-values. Of correct runs, one in {1 / FALSE_ALARM:,.0f} fails one or more of them."
        return "\n".join([*lines, told, *map(self._line, self.checks)])

    def _line(self, check: Check) -> str:
        mark = "FAILS" if check.p_value * len(self.checks) < FALSE_ALARM else "ok"
        return f"  {mark:<6} {check.p_value:<9.2g} {check.name} ({check.measured})"

    def picture(self, path: str | Path) -> None:
        """Draw claimed curve and measured points into a PNG, SVG or PDF file. Needs matplotlib."""
        path = Path(path)
        require(path.suffix in (".png", ".svg", ".pdf"), "AuditReport.picture", "path", "a .png, .svg or .pdf", path)
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.6, 4.6), layout="constrained")
        axes = figure.add_subplot()
        axes.plot([0, 1], [1, 0], color="#9aa0a6", linestyle=":", label="guessing")
        axes.plot(*zip(*self.claimed, strict=True), color="#0072b2", label=f"claimed: ε = {self.epsilon_claimed:.3g}")
        x, y = [p.fpr for p in self.points], [p.fnr for p in self.points]
        bars = [_bars(x, [p.fpr_interval for p in self.points]), _bars(y, [p.fnr_interval for p in self.points])]
        told = f"measured: ε ≥ {self.epsilon_lower:.3g} at {self.confidence:.0%}"
        axes.errorbar(x, y, xerr=bars[0], yerr=bars[1], fmt="o", markersize=3.5, color="#d55e00", label=told)
        axes.set(xlabel="outside, taken for inside (FPR)", ylabel="inside, taken for outside (FNR)", xlim=(0, 1),
                 ylim=(0, 1))  # fmt: skip
        axes.set_title(f"{self.mode}, {self.observations:,} observations, δ = {self.delta:g}", loc="left", fontsize=10)
        axes.legend(frameon=False)
        figure.savefig(path, dpi=150)


_WORDS = {
    "curve": "if the trade-off curve has the plan's shape",
    "threshold": "from one threshold, whatever the shape",
    "guesses": "from the surest guesses, even if canaries influence each other",
}


def _bars(values: list[float], intervals: list[tuple[float, float]]) -> list[list[float]]:
    """Lengths of error bars, below and above."""
    below = [max(0.0, v - low) for v, (low, _) in zip(values, intervals, strict=True)]
    return [below, [max(0.0, high - v) for v, (_, high) in zip(values, intervals, strict=True)]]
