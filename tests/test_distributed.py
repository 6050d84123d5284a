"""Training on several ranks: real `torchrun` processes against one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from . import ranks
from .ranks import CASES, ON, SHARDED

ROOT = Path(__file__).parents[1]
SECONDS = 240
"""After which a launch that hangs is ended."""


def environment(**more):
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", **more}


def torchrun(world, folder, names, **more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, ranks.__file__, str(folder), *names], env=environment(**more), cwd=ROOT, timeout=SECONDS,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return {
        name: [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(world)] for name in names
    }


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """What each case gives on so many ranks; launched once for all of them."""
    found = {}

    def of(world):
        if world not in found:
            found[world] = torchrun(world, tmp_path_factory.mktemp(f"ranks{world}"), ON[world])
        return found[world]

    return of


@pytest.fixture(scope="module")
def alone():
    """What each case gives in one process."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = ranks.train(CASES[name])
        return found[name]

    return of


@pytest.mark.parametrize(("name", "world"), [(n, w) for w in ON for n in ON[w] if n != "fsdp-noise"])
def test_several_ranks_are_one_process(name, world, several, alone):
    """Noise included, but for shards, which have noise of their own. Also trap 5: ranks with no row take part."""
    one, found = alone(name), several(world)[name]
    for rank in found:
        assert rank["steps"] == one["steps"] == CASES[name].steps
        assert rank["epsilon"] == one["epsilon"]
        assert torch.equal(rank["parameters"], found[0]["parameters"])
        torch.testing.assert_close(rank["parameters"], one["parameters"], rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["outputs"], one["outputs"], rtol=0, atol=1e-4)
    for step, whole in enumerate(one["drawn"]):
        assert [rank["drawn"][step] for rank in found] == [whole[r::world] for r in range(world)]


def test_the_cases_have_shares_without_a_row(several):
    """Of whole draws without a row, and of draws that some ranks have rows of."""
    drawn = [rank["drawn"] for rank in several(4)["empty"]]
    shares = [[len(share) for share in step] for step in zip(*drawn, strict=True)]
    assert any(min(step) == 0 < max(step) for step in shares)
    drawn = [rank["drawn"] for rank in several(4)["empty-backward"]]
    assert any(not any(step) for step in zip(*drawn, strict=True))


@pytest.mark.parametrize("name", SHARDED)
def test_parameters_and_state_stay_in_shards(name, several):
    for rank in several(2)[name]:
        if CASES[name].wrapper == "fsdp":
            assert set(rank["shards"].values()) == {"DTensor"}
        else:
            assert "DTensor" in rank["shards"].values()
    assert several(2)["fsdp-adam"][0]["state"] == {"DTensor"}
