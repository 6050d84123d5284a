"""Differences to DP-PSASC in the committed records: seed by seed, with 95% intervals and Holm's correction.

python results/holm.py
"""

from pathlib import Path

from dpscale.lab import paper, stats


def main() -> None:
    """Print every comparison, then how many are left."""
    rows = [(one.preset, row) for one in paper.load(Path(__file__).parent) for row in one.rows if row.p is not None]
    for preset, row in rows:
        low, high = (100 * end for end in row.interval)
        print(
            f"{preset:15} {row.method:15} {len(row.seeds)} seeds {100 * row.difference:+.2f} [{low:+.2f}, {high:+.2f}] "
            f"p {row.p:.4f}, after Holm {row.p_holm:.3f}"
        )
    print(f"{sum(row.differs for _, row in rows)} of {len(rows)} differences are left at {stats.LEVEL:.0%}.")


if __name__ == "__main__":
    main()
