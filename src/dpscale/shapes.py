"""How many rows are computed for a draw: a few sizes, so that a compiled step meets the same ones again and again.

The size of a Poisson draw is random. Padding every draw to one size that fits nearly all of them would compute 40 rows
for 16 on average; five sizes around the expected draw compute 17.4, and the rare draw beyond them goes in two parts.
"""

import math
from dataclasses import dataclass

from dpscale.sampling import Sampling

DEVIATIONS = (-1.2, -0.4, 0.4, 1.2, 2.6)
"""Where the sizes stand, in standard deviations of a draw's size from its mean. One draw in 200 is beyond the last."""

EIGHTHS = (1, 2, 4, 6, 8)
"""Where they stand in a micro-batch: full ones come first, and what is left of a draw may be of any size."""

ROWS = 2
"""The fewest, where there is a choice: one row alone is a case of its own for a compiler."""

ALIGNED = 8
"""Of sizes that are further apart than this, each is a multiple of it: devices work in such tiles."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a draw is padded to, ascending.

    Example:
        >>> from dpscale.sampling import Poisson
        >>> sizes = Sizes.of(Poisson(size=60_000, batch=512))
        >>> sizes.rows
        (488, 504, 528, 544, 576)
        >>> sizes.parts(520), sizes.parts(600)
        ([(slice(0, 520, None), 528)], [(slice(0, 576, None), 576), (slice(576, 600, None), 488)])
    """

    rows: tuple[int, ...]

    @classmethod
    def of(cls, sampling: Sampling, micro_batch: int | None = None, shares: int = 1) -> "Sizes":
        """For the draws of a sampler, in parts of no more than ``micro_batch`` rows. Draws of one size need one.

        Args:
            shares: in how many each draw is divided before, row by row.
        """
        spread, batch = sampling.spread / shares, -(-sampling.batch // shares)
        if spread == 0:
            chosen = [batch]
        else:
            multiple = ALIGNED if spread >= ALIGNED - 0.5 else 1
            wanted = (math.ceil((sampling.batch / shares + d * spread) / multiple) * multiple for d in DEVIATIONS)
            chosen = [min(rows, -(-sampling.size // shares)) for rows in wanted]
        if micro_batch is not None and micro_batch < max(chosen):
            whole = spread == 0 and batch % micro_batch == 0
            chosen = [micro_batch] if whole else [-(-micro_batch * eighths // 8) for eighths in EIGHTHS]
        return cls(tuple(sorted({min(max(ROWS, rows), max(chosen)) for rows in chosen})))

    def parts(self, count: int) -> list[tuple[slice, int]]:
        """(Its rows, the size that they are padded to) of each part of a draw of ``count`` samples.

        As few parts as the sizes allow.
        """
        largest = self.rows[-1]
        parts = [slice(begin, min(begin + largest, count)) for begin in range(0, count, largest)]
        return [(part, next(rows for rows in self.rows if rows >= part.stop - part.start)) for part in parts]
