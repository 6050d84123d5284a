"""What runs that share a GPU need: room beside each other, and steps that are compiled once for all of them."""

import logging
import os
from collections.abc import Sequence
from concurrent.futures import as_completed
from typing import Any

import torch

from dpscale.engine.compile.step import formula_of
from dpscale.engine.phases import phase
from dpscale.lab import models, runner
from dpscale.lab.presets import METHODS, Config
from dpscale.lab.processes import processes
from dpscale.lab.runner import Job

log = logging.getLogger("dpscale")


def fitting(config: Config) -> int:
    """How many runs go side by side: two on the CPU; on a GPU, where small models leave it idle, what memory holds."""
    if not torch.cuda.is_available():
        return 2
    most = 2 if models.large(config.model) else 14
    return max(1, min(_room(config), most, (os.cpu_count() or 2) - 1))


def _room(config: Config) -> int:
    """How many runs a GPU's memory holds."""
    each = models.memory(config.model, runner.shape(config), config.batch)  # not all go through it in parts
    return int(torch.cuda.mem_get_info()[0] / 2**30 / each)


def step_of(job: Job) -> Any:
    """What a run's compiled step depends on: its rule's formula, None without one, and the number of points."""
    rule = METHODS[job.method].scaling(job.config)
    return (None, 1) if rule is None else (formula_of(rule), points(job))


def points(job: Job) -> int:
    """At how many points a run takes gradients at each step: so many times as long it takes."""
    momentum = METHODS[job.method].momentum_of(job.config, job.choice)
    return 1 if momentum is None else momentum.evaluations


def kinds(jobs: Sequence[Job]) -> list[Job]:
    """One run of each kind of step, those of most points first: they take longest to compile."""
    found = {step_of(job): job for job in jobs}
    return [found[step] for step in sorted(found, key=lambda step: -step[1])]


def compile_ahead(jobs: Sequence[Job]) -> None:
    """Compile the steps of these runs, several at once, so that those which follow find them on disk.

    Runs that start together would each compile the same step, with a dozen others at it. One that fails here is told,
    and compiles in its turn.
    """
    if not jobs:
        return
    cores = os.cpu_count() or 2
    places = max(1, min(len(jobs), cores // 2, _room(jobs[0].config)))
    with phase("compiling"), processes(places, cores // places) as pool:
        tried = {pool.submit(runner.rehearse, job): job for job in jobs}
        for done in as_completed(tried):
            if (error := done.exception()) is not None:
                log.warning("dpscale: %s was not compiled ahead: %s", tried[done].method, error)
