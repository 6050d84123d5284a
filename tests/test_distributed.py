"""Training on several ranks: real `torchrun` processes against one process."""

import os
import socket
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from . import ranks
from .ranks import CASES, FAULTS, LOST, ON, SHARDED

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


# -- Noise -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """What every case that ranks are to survive gives on two of them; one launch."""
    return torchrun(2, tmp_path_factory.mktemp("faults"), [name for name in FAULTS if name not in LOST])


def fits(noise, scale=1.0):
    """Whether noise has this standard deviation. False in 1 of 150,000 right ones (4.5 standard errors)."""
    return abs(float((noise.double() / scale).square().mean()) - 1) < 4.5 * (2 / len(noise)) ** 0.5


def test_every_shard_has_noise_of_its_own(two):
    """60,000 numbers per shard and step: the error of their variance is 0.6%, that of 0.97σ and 1.03σ is 6%."""
    stretches = [noise for rank in two["noise"] for noise in rank]
    for noise in stretches:
        assert fits(noise) and not fits(noise, 0.97) and not fits(noise, 1.03)
    for a, first in enumerate(stretches):
        for second in stretches[:a]:
            n = min(len(first), len(second))
            assert abs(float((first[:n] * second[:n]).mean())) < 4.5 / n**0.5
            assert not (set(first.tolist()) & set(second.tolist())) or len(set(first[:n].tolist())) < n


def test_the_key_is_rank_0s(two):
    """From the operating system: the ranks have parts of the same draws, and the same noise."""
    (first, key, parameters), (second, other_key, other_parameters) = two["key"]
    assert key == other_key and torch.equal(parameters, other_parameters)
    for a, b in zip(first, second, strict=True):
        merged = sorted(a + b)
        assert (a, b) == (merged[::2], merged[1::2])


# -- Failing together ------------------------------------------------------------------------------------------------

BOTH = {
    "seed": "disagree in privatize() about 'seed'. Pass the same seed",
    "plan": "disagree in privatize() about 'plan': Plan(scaling=Clip(C=0.5), sampling=Poisson(size=60, batch=12",
    "values": "disagree in privatize() about 'values'. Call torch.manual_seed(0)",
    "shape": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (7, 4)",
    "dtype": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (6, 4), 'torch.float64'",
    "frozen": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (6, 4),",
    "optimizer": "disagree in privatize() about 'optimizer': {'lr': '0.05'",
    "rows": "disagree in batches() about 'data'. Give every rank the whole data set",
    "skipping": "disagree in step() about 'draw': 2 and 3. Take and release",
    "drifting": "disagree in step() about 'values'.",
    "drifting between": "disagree in step() about 'values'.",
    "freezing": "disagree in step() about 'parameters': ('0.bias', (6,), 'torch.float32', True) and ('0.bias'",
    "call": "about 'call': step and batches. Run the same script on every rank",
    "fsdp1": "The model is in FullyShardedDataParallel. FSDP1 is not known here. Use torch.distributed.fsdp.",
    "tensor parallel": "Parameter '0.weight' is distributed over DeviceMesh((2,)",
    "replicas": "tensor parallelism, or replicas of shards",
    "dimension": "as (Shard(dim=1),): tensor parallelism",
    "precision": "A MixedPrecisionPolicy of fully_shard is not known here",
    "offloaded": "CPUOffloadPolicy of fully_shard is not known here",
    "teacher": "'loss_fn: teacher.0' has parameters in shards, so its forward waits for the other ranks",
    "other group": "is divided over the ranks [0, 1], and the run has",
}


@pytest.mark.parametrize("name", BOTH)
def test_what_ranks_do_not_share_is_refused_on_all_of_them(name, two):
    for text in two[name]:
        assert BOTH[name] in text


@pytest.mark.parametrize(("name", "steps"), [("drifting", 4), ("drifting between", 6), ("freezing", 2)])
def test_nothing_is_released_after_ranks_part(name, steps, two):
    """A weight that differs is seen at steps 2, 4, 8, … wherever it is, and in its turn between these."""
    assert all(text.endswith(f"[after {steps} steps]") for text in two[name])


ONE = {
    "optimizer refused": (1, "privatize", "The 'optimizer' parameter of privatize must be over every trainable"),
    "size": (1, "batches", "The 'dataset' parameter of batches must be of 60 samples, as planned. Got 59"),
    "raising": (1, "step", "'a broken record'"),
    "coupled": (1, "step", "Samples are coupled"),
    "empty share": (0, "step", "division by zero"),
}


@pytest.mark.parametrize("name", ONE)
def test_an_error_on_one_rank_is_one_on_all(name, two):
    rank, call, error = ONE[name]
    own, other = two[name][rank], two[name][1 - rank]
    assert error in own and "no rank goes on" not in own
    assert f"Nothing was released: rank {rank} failed in {call}(), so no rank goes on. Its error: " in other
    assert error in other


def test_what_failed_on_one_rank_was_released_on_none(two):
    assert all(text.rstrip('"').endswith("[after 2 steps]") for text in two["raising"])
    assert two["empty share"][1].endswith("[0 rows]")


def test_a_draw_that_failed_can_be_tried_again(two):
    first, second = two["going on"]
    assert (first[0], second[0]) == (["RuntimeError"], ["ZeroDivisionError"])
    assert torch.equal(first[1], second[1])
    torch.testing.assert_close(first[1], ranks.train(CASES["adam"].__class__())["parameters"], rtol=0, atol=1e-5)


def test_a_group_of_ones_own(two):
    assert two["stranger"][1].startswith("ValueError: This process is not in the group of privatize().")
    alone, other = two["group of one"]
    assert alone != other and min(alone + other) > 3  # whole draws, each its own


def test_public_data_are_averaged_over_ranks(two):
    expected = ranks.public(0, ranks=1)[0]
    for rank in two["public"]:
        for parameters in rank:
            torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("made", "source", "text"),
    [
        ("DeepSpeedEngine", "deepspeed.runtime.engine", "DeepSpeed is not known here. Pass the plain model"),
        ("PipelineModule", "deepspeed.runtime.pipe.module", "Pipeline parallelism is not known here. Give every rank"),
        ("_PipelineStageBase", "torch.distributed.pipelining.stage", "Pipeline parallelism is not known here"),
        ("DataParallel", "torch.nn.parallel.data_parallel", "DataParallel is not known here. Pass its .module"),
    ],
)
def test_other_wrappers_are_refused_by_name(made, source, text):
    wrapper = type(made, (torch.nn.Sequential,), {"__module__": source})(ranks.mlp())
    with pytest.raises(ValueError, match=f"The model is in {made}. {text}"):
        ranks.private(wrapper)


# -- Ranks that are lost ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("how", "patience"), [("killed", 600), ("stalled", 5), ("killed in shards", 600)])
def test_a_rank_that_is_lost_is_noticed(how, patience, tmp_path):
    """Launched without torchrun, which would end the others itself. A death is noticed long before the timeout."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, ranks.__file__, str(tmp_path), how], cwd=ROOT, stderr=subprocess.PIPE, text=True,
            env=environment(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port),
                            PATIENCE=str(patience)),
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        processes[0].wait(SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    text = torch.load(tmp_path / f"{how}-0.pt")
    assert text.startswith("RuntimeError: step() could not be agreed on: another rank has ended, or did not come")
    assert f"within {timedelta(seconds=patience)}, the timeout of the process group. Nothing was released." in text
    assert text.endswith("[after 2 steps]")
