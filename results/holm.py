"""Differences to DP-PSASC in the committed records: seed by seed, with 95% intervals and Holm's correction.

python results/holm.py
"""

from pathlib import Path

from scipy import stats

from dpscale.lab import paper, summary

LEVEL = 0.05


def compared() -> list[tuple[str, str, list[float]]]:
    """Experiment, private method, and its accuracy minus DP-PSASC's for every seed, in points."""
    pairs = []
    for one in paper.load(Path(__file__).parent):
        accuracy = {
            method: {record.seed: 100 * record.accuracy for record in records}
            for method, records in summary.by_method(one.records).items()
        }
        reference = accuracy.pop(summary.REFERENCE)
        accuracy.pop("non-private", None)
        for method, values in accuracy.items():
            pairs.append((one.preset, method, [values[seed] - reference[seed] for seed in sorted(reference)]))
    return pairs


def holm(p_values: list[float]) -> list[float]:
    """Holm's adjusted p-values: the k-th smallest times how many are left, never falling."""
    adjusted, highest = [0.0] * len(p_values), 0.0
    for place, i in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - place) * p_values[i]))
        adjusted[i] = highest
    return adjusted


def main() -> None:
    """Print every comparison, then how many are left."""
    pairs = compared()
    tests = [stats.ttest_1samp(differences, 0) for *_, differences in pairs]
    adjusted = holm([test.pvalue for test in tests])
    for (preset, method, differences), test, p in zip(pairs, tests, adjusted, strict=True):
        mean, ends = sum(differences) / len(differences), test.confidence_interval(1 - LEVEL)
        print(
            f"{preset:15} {method:15} {len(differences)} seeds {mean:+.2f} [{ends.low:+.2f}, {ends.high:+.2f}] "
            f"p {test.pvalue:.4f}, after Holm {p:.3f}"
        )
    print(f"{sum(p < LEVEL for p in adjusted)} of {len(pairs)} differences are left at {LEVEL:.0%}.")


if __name__ == "__main__":
    main()
