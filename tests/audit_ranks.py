"""An audit on several ranks: `torchrun tests/audit_ranks.py FILE` writes what the first one found."""

import json
import sys
from pathlib import Path

from torch import distributed

import dpscale


def audited():
    plan = dpscale.Plan(
        scaling=dpscale.Clip(C=0.7), sampling=dpscale.Poisson(size=300, batch=75), steps=10, noise_multiplier=1.0,
        delta=1e-5,
    )  # fmt: skip
    return dpscale.audit.audit(plan, seed=3)


if __name__ == "__main__":
    distributed.init_process_group("gloo")
    report = audited()
    if distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps({**report.to_dict(), "ranks": distributed.get_world_size()}))
    distributed.destroy_process_group()
