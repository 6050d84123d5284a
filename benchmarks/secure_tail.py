"""How far secure noise is from a Gaussian: what 40 bits of U change in the density of a number, and what that costs.

    python benchmarks/secure_tail.py

A draw takes U from the middles of 2⁴⁰ cells. Beside U from anywhere in its cell, that moves little mass, most of it in
the cells next to 0. A number is half the sum of four draws, so its density changes by four times that difference,
smoothed by the other three draws; terms of second order are below 1e-20. Printed is, at each z: the relative change of
the density, and that of the slope of its logarithm, which is what a privacy loss changes by. The last line is the
slope's mean square under a Gaussian: the privacy loss of a step changes by a random amount of that standard deviation,
times sensitivity over noise, whatever the number of parameters.
"""

import numpy as np
from scipy import stats

CELLS = 256  # beyond these, what is left out falls as their number squared
ANGLES = 96
ORDER = 16


def kernel(radius: np.ndarray, z: np.ndarray) -> np.ndarray:
    """Density at z of r·cos θ / 2 plus three Gaussian draws, each halved, and its slope: (2, radii, z)."""
    steps = (np.arange(ANGLES) + 0.5) * np.pi / ANGLES
    density, slope = np.zeros((2, len(radius), len(z)))
    for cosine in np.cos(steps):
        away = z[None] - radius[:, None] * cosine / 2
        part = np.exp(away**2 / -1.5) / (np.sqrt(1.5 * np.pi) * ANGLES)
        density += part
        slope -= part * away / 0.75
    return np.stack([density, slope])


def change(z: np.ndarray) -> np.ndarray:
    """Change of the density of a number at z, and of its slope."""
    nodes, weights = np.polynomial.legendre.leggauss(ORDER)
    total = np.zeros((2, len(z)))
    for first in range(0, CELLS, 64):
        cells = np.arange(first, first + 64)
        middle = kernel(np.sqrt(-2 * np.log((cells + 0.5) * 2.0**-40)), z).sum(1)
        # u = x + v⁴ with v in (0, 1), so that the end at 0 is smooth
        v = (nodes + 1) / 2
        inside = (cells[:, None] + v[None] ** 4) * 2.0**-40
        weight = np.tile(4 * v**3 * weights / 2, len(cells))
        spread = kernel(np.sqrt(-2 * np.log(inside)).reshape(-1), z)
        total += middle - (spread * weight[:, None]).sum(1)
    return 4 * 2.0**-40 * total


def main() -> None:
    z = np.linspace(0, 12, 49)
    density, slope = change(z)
    exact = stats.norm.pdf(z)
    relative = density / exact
    tilt = slope / exact + z * relative  # (log(1 + Δp/p))′
    print(f"{'z':>5} {'density':>10} {'slope of log':>13} {'beyond, of each number':>24}")
    for at in (0, 2, 4, 5, 6, 7, 8, 9, 10, 11):
        k = at * 4
        print(f"{at:5} {relative[k]:10.1e} {tilt[k]:13.1e} {2 * stats.norm.sf(at):24.1e}")
    inside = z <= 10
    square = 2 * np.trapezoid(tilt[inside] ** 2 * exact[inside], z[inside])
    print(f"root mean square of the slope's change, |z| < 10: {np.sqrt(square):.1e}")


if __name__ == "__main__":
    main()
