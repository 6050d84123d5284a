"""Training on several ranks: real `torchrun` processes against one process."""

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from functools import cache

import pytest
import torch
from filelock import FileLock
from torch.distributed.fsdp import fully_shard

import dpscale
from dpscale.distributed import Digest
from dpscale.sharding import buckets

from . import ranks
from .processes import HANGS, ROOT, environment
from .ranks import CASES, COMPILED, LOST, ON, SHARDED


def torchrun(world, folder, names):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
    done = subprocess.run(
        [*command, ranks.__file__, str(folder), *names], env=environment(), cwd=ROOT, timeout=HANGS,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    """The folder in which a launch has left what came of it. Two processes that run the tests share a launch."""
    base = tmp_path_factory.getbasetemp()
    base = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def of(name, launch):
        with FileLock(base / f"{name}.lock"):
            if not (base / name).exists():
                (part := base / f"{name}.part").mkdir()
                try:
                    launch(part)
                except (AssertionError, subprocess.SubprocessError) as error:  # not again for every test
                    (part / "failed").write_text(str(error))
                part.rename(base / name)
        failed = base / name / "failed"
        assert not failed.exists(), failed.read_text()
        return base / name

    return of


def read(folder, names, world):
    return {n: [torch.load(folder / f"{n}-{rank}.pt", weights_only=False) for rank in range(world)] for n in names}


@pytest.fixture(scope="module")
def several(launched, nursery):
    """What each case gives on so many ranks; one launch for all of them. On two ranks torchrun launches them.

    Beside the two, others lose a rank: they mostly wait.
    """

    def on_two(folder):
        losing = nursery.start("tests.ranks:lose", str(folder))
        torchrun(2, folder, ON[2])
        code, _, errors = losing.end()
        assert code == 0, errors

    def on_four(folder):
        for momentum in ranks.REMEMBERED:  # for what is resumed there
            ranks.halves(momentum, save=folder / f"{momentum}.ckpt")
        nursery.ranks(4, "tests.ranks:main", str(folder), *ON[4])

    @cache
    def of(world):
        launch = {2: on_two, 4: on_four}[world]
        return read(launched(f"{world} ranks", launch), ON[world], world)

    return of


@pytest.fixture(scope="module")
def alone():
    """What each case gives in one process."""
    found = {}

    def of(name):
        if name not in found:
            found[name] = ranks.train((CASES | COMPILED)[name])
        return found[name]

    return of


def same(one, found, steps):
    """Whether several ranks did what one process did."""
    for rank in found:
        assert rank["steps"] == one["steps"] == steps
        assert rank["epsilon"] == one["epsilon"]
        assert torch.equal(rank["parameters"], found[0]["parameters"])
        torch.testing.assert_close(rank["parameters"], one["parameters"], rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["outputs"], one["outputs"], rtol=0, atol=1e-4)
    for step, whole in enumerate(one["drawn"]):
        assert [rank["drawn"][step] for rank in found] == [whole[r :: len(found)] for r in range(len(found))]


@pytest.mark.parametrize(("name", "world"), [(n, w) for w in ON for n in ON[w] if n in CASES])
def test_several_ranks_are_one_process(name, world, several, alone):
    """Noise included, but for shards, which have noise of their own."""
    same(alone(name), several(world)[name], CASES[name].steps)


@pytest.mark.parametrize("name", ["empty", "empty-backward", "fsdp-empty-backward"])
def test_trap_05_ranks_without_a_row_take_part(name, several, alone):
    """Steps, noise and accounting are those of one process, wherever the rows of a draw are."""
    found = several(4)[name]
    shares = [[len(rank["drawn"][step]) for rank in found] for step in range(CASES[name].steps)]
    assert any(min(step) == 0 < max(step) for step in shares)
    assert name == "empty" or any(max(step) == 0 for step in shares)
    same(alone(name), found, CASES[name].steps)


@pytest.mark.parametrize("wrapper", ["plain", "ddp"])
def test_trap_34_ranks_train_one_model(wrapper, several, alone):
    """Not each its own: their weights are equal to the bit, their draws are parts of one, and ε is that of the run."""
    name = {"plain": "long", "ddp": "long-ddp"}[wrapper]
    same(alone(name), several(2)[name], CASES[name].steps)
    assert alone(name)["epsilon"] > 0


@pytest.mark.compiled
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_steps_on_two_ranks(name, launched, alone):
    folder = launched("compiled", lambda folder: torchrun(2, folder, COMPILED))
    same(alone(name), read(folder, [name], 2)[name], COMPILED[name].steps)


@pytest.fixture
def group_of_one(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["long-ddp", "adam", "fsdp-long", "fsdp-shuffled"])
def test_a_group_of_one_rank_is_one_process(name, alone, group_of_one, monkeypatch):
    """It has nobody to disagree with: nothing is exchanged, nothing reduced."""
    for module in (torch.distributed, dpscale.distributed, dpscale.sharding):
        for talk in ("all_reduce", "all_gather", "reduce_scatter", "all_gather_object", "broadcast",
                     "broadcast_object_list", "barrier", "new_group"):  # fmt: skip
            monkeypatch.setattr(module, talk, lambda *_, **__: pytest.fail("one rank talks"), raising=False)
    same(alone(name), [ranks.train(CASES[name])], CASES[name].steps)


def test_an_error_in_a_group_of_one_is_itself(group_of_one):
    with pytest.raises(KeyError, match=r"^\"'a broken record' \[after 2 steps\]\"$"):
        ranks.raising(1)


def test_a_run_does_not_keep_the_group_of_all_processes(group_of_one):
    """It would outlive destroy_process_group(), and abort the process at its end."""
    models = [ranks.mlp(), fully_shard(ranks.mlp())]
    held = sys.getrefcount(torch.distributed.group.WORLD)
    runs = [ranks.private(model) for model in models]
    now = sys.getrefcount(torch.distributed.group.WORLD)
    assert now == held and len(runs) == 2


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
def two(several):
    return several(2)


def fits(noise, scale=1.0):
    """Whether noise has this standard deviation. False in 1 of 150,000 right ones (4.5 standard errors)."""
    return abs(float((noise.double() / scale).square().mean()) - 1) < 4.5 * (2 / len(noise)) ** 0.5


@pytest.mark.parametrize("source", ["noise", "secure noise"])
def test_every_shard_has_noise_of_its_own(source, two):
    """60,000 numbers per shard and step: the error of their variance is 0.6%, that of 0.97σ and 1.03σ is 6%."""
    stretches = [noise for rank in two[source] for noise in rank]
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


def test_a_run_on_two_ranks_is_saved_resumed_and_booked_once(two, launched):
    """On both of them, or on one: the file is the same for any number."""
    (first, charged), (second, _) = two["resumed"]
    for (steps, epsilon, key, values, _), (*others, theirs, _) in zip(first, second, strict=True):
        assert [steps, epsilon, key] == others and torch.equal(values, theirs)
    assert [part[0] for part in first] == [3, 8] and charged == 8
    assert first[0][2] != first[1][2], "after a resumption no noise comes again, with a seed too"
    assert "Resumed: once" in first[1][4] and "run 'both'" in first[1][4]
    model, case = ranks.mlp(seed=5), replace(ranks.Case(), momentum=dpscale.HeavyBall(gamma1=0.3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    folder = launched("2 ranks", lambda _: None)
    copied = dpscale.Ledger(folder / "copied.db", epsilon=100, delta=1e-3)
    alone = dpscale.privatize(model, optimizer, case.plan(), ledger=copied, run="both")
    assert alone.load(folder / "run.ckpt") == {"epoch": 1}
    assert torch.equal(torch.cat([p.detach().flatten() for p in model.parameters()]), first[0][3])
    assert alone.steps_taken == 3 and alone.epsilon(1e-3) == first[0][1]


@pytest.fixture(scope="module")
def uninterrupted():
    return {momentum: ranks.halves(momentum) for momentum in ranks.REMEMBERED}


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("momentum", ranks.REMEMBERED)
def test_what_two_ranks_saved_goes_on_anywhere(momentum, wrapper, two, launched, uninterrupted):
    """Whole or in shards, on two ranks or on one: nothing is random here, and the end is the same."""
    for rank in two["saved"]:
        close(rank[momentum, wrapper], uninterrupted[momentum])
    folder = launched("2 ranks", lambda _: None)
    close(ranks.halves(momentum, load=folder / f"{momentum}-{wrapper}.ckpt"), uninterrupted[momentum])


@pytest.mark.parametrize("momentum", ranks.REMEMBERED)
def test_what_one_process_saved_goes_on_on_four(momentum, several, uninterrupted):
    for rank in several(4)["resumed on more"]:
        close(rank[momentum], uninterrupted[momentum])


def test_a_shuffled_epoch_goes_on_on_another_number_of_ranks(two, launched):
    run = ranks.private(sampling=dpscale.Shuffled(size=ranks.SIZE, batch=9), steps=7, seed=None)
    run.load(launched("2 ranks", lambda _: None) / "shuffled.ckpt")
    rest = [batch.draw.indices.tolist() for batch in run.batches(ranks.data()) if run.step(batch, ranks.loss_fn)]
    assert len(rest) == 4
    assert sorted(sum(rest, two["shuffled part"][0] + two["shuffled part"][1])) == list(range(ranks.SIZE))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninit")
def test_torchs_own_checkpoints_take_model_and_optimizer(two, launched, uninterrupted):
    """In shards, and the state of the run beside them; resumed on two ranks, and on one."""
    for parameters in two["dcp"]:
        close(parameters, uninterrupted["inner-outer"])
    model = ranks.mlp(seed=5)
    case = ranks.Case(
        sampling=dpscale.FullBatch(size=ranks.SIZE), momentum=ranks.REMEMBERED["inner-outer"], steps=4, noise=False
    )
    run = dpscale.privatize(model, torch.optim.Adam(model.parameters(), lr=0.05), case.plan())
    ranks.load_dcp(run, launched("2 ranks", lambda _: None) / "dcp")
    for batch in run.batches(ranks.data()):
        run.step(batch, ranks.loss_fn)
    assert run.steps_taken == 4
    close(torch.cat([p.detach().flatten() for p in model.parameters()]), uninterrupted["inner-outer"])


# -- Failing together ------------------------------------------------------------------------------------------------

BOTH = {
    "seed": "disagree in privatize() about 'seed'. Pass the same seed",
    "saving alone": "about 'call': save and batches. Run the same script on every rank, without calls that only some "
    "of them make: save() too, which writes on the first rank alone.",
    "sharded call": "about 'call': step and batches. Run the same",
    "sharded forward": "about 'call': forward and save. Run the same script",
    "sharded part": "disagree in privatize() about 'values'. Call torch.manual_seed(0)",
    "sharded drifting": "disagree in step() about 'values'.",
    "sharded buffer": "disagree in privatize() about 'values'.",
    "ledger on one": "disagree in privatize() about 'ledger': False and True. Pass the ledger, and the name of the run",
    "plan": "disagree in privatize() about 'plan': Plan(scaling=Clip(C=0.5), sampling=Poisson(size=60, batch=12",
    "source": "disagree in privatize() about 'noise': fast and secure. Draw it from the same source on every rank",
    "values": "disagree in privatize() about 'values'. Call torch.manual_seed(0)",
    "shape": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (7, 4)",
    "dtype": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (6, 4), 'torch.float64'",
    "frozen": "about 'parameters': ('0.weight', (6, 4), 'torch.float32', True) and ('0.weight', (6, 4),",
    "optimizer": "disagree in privatize() about 'optimizer': {'lr': '0.05'",
    "rows": "Give every rank the whole data set, in the same order",
    "order": "disagree in batches() about 'data'",
    "skipping": "disagree in step() about 'draw': 2 and 3. Take and release",
    "drifting": "disagree in step() about 'values'.",
    "drifting between": "disagree in step() about 'values'.",
    "drifting with a buffer": "disagree in step() about 'values'.",
    "freezing": "disagree in step() about 'parameters': ('0.bias', (6,), 'torch.float32', True) and ('0.bias'",
    "modes": "disagree in step() about 'modes': ('the model', 'train') and ('the model', 'eval'). Call model.train()",
    "drifting frozen": "disagree in step() about 'values'.",
    "state": "disagree in load_state_dict() about 'state'. Load the same one on every rank",
    "load cut short": "disagree in step() about 'key'. Start all ranks again",
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


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        ("drifting", 4),
        ("drifting between", 6),
        ("drifting with a buffer", 4),
        ("freezing", 2),
        ("sharded drifting", 4),
        ("modes", 2),
        ("drifting frozen", 4),
        ("state", 0),
        ("load cut short", 1),
    ],
)
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
    torch.testing.assert_close(first[1], ranks.train(ranks.Case())["parameters"], rtol=0, atol=1e-5)


def test_a_group_of_ones_own(two):
    assert two["stranger"][1].startswith("ValueError: This process is not in the group of privatize().")
    alone, other = two["group of one"]
    assert alone != other and min(alone + other) > 3  # whole draws, each its own


def test_a_forward_in_a_wrapper_needs_no_other_rank(two):
    for parameters in two["buffers"]:
        torch.testing.assert_close(parameters, ranks.buffers(0), rtol=0, atol=1e-5)


def test_buffers_that_differ_are_warned_of_once(two):
    """After steps 1, 2, 4, 8, …: it was changed before the fourth."""
    for steps, said in two["other buffer"]:
        ((text, after),) = said
        assert text.startswith("dpscale: ranks 0 and 1 disagree in step() about 'buffers'. The run goes on: a forward")
        assert steps == 8 and after == 4


@pytest.mark.parametrize("name", ["another way", "ahead"])
def test_a_rank_may_come_to_its_sum_another_way(name, two):
    """In another precision and order, or from batches that a thread has taken ahead."""
    for parameters in two[name]:
        torch.testing.assert_close(parameters, ranks.train(ranks.Case())["parameters"], rtol=0, atol=1e-5)


def test_shards_of_several_types(two):
    expected = ranks.mixed_types(0)
    for parameters in two["mixed types"]:
        assert torch.equal(parameters, two["mixed types"][0])
        torch.testing.assert_close(parameters, expected, rtol=2**-7, atol=1e-3)  # a bit of bfloat16


def test_a_large_sum_is_reduced_in_parts(two):
    expected = ranks.train(ranks.Case(noise=False))["parameters"]
    for rank in two["buckets"]:
        for parameters in rank:
            torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", [1, 10, 30, 1000])
def test_buckets_hold_every_tensor_once_and_in_order(size):
    tensors = {str(k): torch.zeros(n, dtype=d) for k, (n, d) in enumerate(zip(
        [3, 40, 0, 7, 9, 12, 1], [torch.float32, torch.float64] * 3 + [torch.float32], strict=True))}  # fmt: skip
    found = list(buckets(tensors, size))
    for dtype in (torch.float32, torch.float64):
        of_one = [n for names in found for n in names if tensors[n].dtype == dtype]
        assert of_one == [n for n, t in tensors.items() if t.dtype == dtype]
    for names in found:
        assert len({tensors[n].dtype for n in names}) == 1
        assert len(names) == 1 or sum(tensors[n].numel() for n in names) <= size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.complex64, torch.bool])
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_digest_tells_every_bit(which, dtype):
    """The sign alone, the last bit alone, or the places of two numbers."""
    tensors = [torch.arange(1, 7).remainder(2).to(dtype) for _ in range(3)]
    expected = int(Digest(tensors))
    assert int(Digest([t.clone() for t in tensors])) == expected
    bits = torch.view_as_real(tensors[which]) if dtype.is_complex else tensors[which]
    words = bits.view(-1).view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[bits.element_size()])
    for change in (torch.iinfo(words.dtype).min, 1) if dtype != torch.bool else (1,):
        words[2] ^= change
        assert int(Digest(tensors)) != expected
        words[2] ^= change
    words[:2] = words[:2].flip(0).clone()
    assert int(Digest(tensors)) != expected


def test_what_a_reduction_was_tried_for_is_charged(monkeypatch):
    """Another rank may have the sum, though this one has not."""
    run = ranks.private()
    before = [p.detach().clone() for p in run.model.parameters()]
    monkeypatch.setattr(run._ranks, "total", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.step(next(batches := run.batches(ranks.data())), ranks.loss_fn)
    assert run.steps_taken == 1 and run.epsilon(1e-3) > 0 and len(batches) == 7
    assert all(torch.equal(p, was) and p.grad is None for p, was in zip(run.model.parameters(), before, strict=True))


def test_a_second_run_on_one_model(two):
    expected = ranks.twice(0)[0]
    for rank in two["twice"]:
        for parameters in rank:
            torch.testing.assert_close(parameters, expected, rtol=0, atol=1e-5)


def test_a_loop_that_is_left_leaves_shards(two):
    assert two["left"] == [({"Parameter"}, {"DTensor"})] * 2


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


@pytest.mark.parametrize("how", LOST)
def test_a_rank_that_is_lost_is_noticed(how, two, launched):
    """A death long before the timeout of an hour, a rank that stalls when it is over."""
    text = torch.load(launched("2 ranks", lambda _: None) / f"{how}-0.pt")
    what, outcome, steps = "step()", "Nothing was released.", 2
    if "sum" in how:  # another rank might have it
        what, outcome, steps = "The sum of a step", "The step is charged, and nothing of it was applied.", 3
    assert text.startswith(f"RuntimeError: {what} could not be agreed on: another rank has ended, or did not come")
    assert f"within {timedelta(seconds=LOST[how])}, the timeout of the process group. {outcome} The first" in text
    assert text.endswith(f"[after {steps} steps]")
