"""An audit on several ranks: `main` runs on each, and the first one writes what it found.

Twice more something is broken that only several ranks have: what they add up is averaged, or their noise is.
"""

import json
import math
from pathlib import Path

from torch import distributed

import dpscale
from dpscale.audit import FALSE_ALARM, statistics
from dpscale.distributed import Ranks
from dpscale.noise import Noise


def audited(noise=1.0):
    plan = dpscale.Plan(
        scaling=dpscale.Clip(C=0.7), sampling=dpscale.Poisson(size=300, batch=75), steps=10, noise_multiplier=noise,
        delta=1e-5,
    )  # fmt: skip
    return dpscale.audit.audit(plan, seed=3)


def averaged_sums():
    reduced = Ranks._reduced
    Ranks._reduced = lambda self, *of: {name: t / self.size for name, t in reduced(self, *of).items()}
    return lambda: setattr(Ranks, "_reduced", reduced)


def averaged_noise():
    add = Noise.add
    Noise.add = lambda self, sums, std, *rest: add(self, sums, std / math.sqrt(2), *rest)
    return lambda: setattr(Noise, "add", add)


def failed(broken):
    """Under so little noise that it shows who is in a batch; bounds take long there, and are not asked for."""
    mend, bound = broken(), statistics.by_curve
    statistics.by_curve = lambda *_: 0.0
    report = audited(noise=0.3)
    mend()
    statistics.by_curve = bound
    return [check.name for check in report.checks if check.p_value * len(report.checks) < FALSE_ALARM]


def main(path):
    distributed.init_process_group("gloo")
    found = {**audited().to_dict(), "ranks": distributed.get_world_size()}
    found["failed"] = {broken.__name__: failed(broken) for broken in (averaged_sums, averaged_noise)}
    if distributed.get_rank() == 0:
        Path(path).write_text(json.dumps(found))
    distributed.destroy_process_group()
