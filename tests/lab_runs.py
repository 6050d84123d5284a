"""A small comparison that is really run, once for all tests of a process, and what is asked of a run."""

import functools
import tempfile
from pathlib import Path

from dpscale.lab import compare, paper, presets, records, runner, stats
from dpscale.lab.presets import Choice, methods

TINY = presets.PRESETS["digits"].replace(
    epochs=2, batch=256, grid=(0.05, 0.2), last_epochs=1, diagnostics=True, widen=0, search_seeds=2
)

NAMED = "non-private,dp-sgd,dp-psasc,psac-lr-over-s"


def job(method="dp-psasc", rate=0.1, **changes):
    settings = {"config": TINY, "method": method, "seed": 3, "choice": Choice(rate=rate), "noise_multiplier": 1.0}
    return runner.Job(**settings | changes)


@functools.cache
def finished():
    """A baseline, two private methods and a control, two seeds, with a search: the folder of records."""
    out = Path(tempfile.mkdtemp(prefix="dpscale-tests-")) / "digits"
    compare.compare(TINY, methods(NAMED), [0, 1], out, at_once=1, command="tiny")
    return out


def chosen():
    """Its final records."""
    return stats.select(records.load(finished()))[0]


def experiment(*found, **changes):
    """Records as an experiment."""
    values = {"preset": "digits", "records": list(found), "rows": stats.summarize(found), "left": 0}
    return paper.Experiment(**values | changes)
