"""Plan: one source of truth for steps, noise, bound and ε; what it refuses, and what it tells."""

import copy
import dataclasses
import json
import math
import pickle
import warnings

import dp_accounting
import pytest

from dpscale.plan import Plan
from dpscale.sampling import FixedSize, FullBatch, Poisson, Shuffled
from dpscale.scaling import PSASC, Clip

MNIST = Poisson(size=60_000, batch=512)
FULL = FullBatch(size=1000)  # exact and cheap: used where the sampler does not matter


def plan(**changes):
    arguments = {"scaling": Clip(C=2.0), "sampling": FULL, "steps": 10} | changes
    return Plan(**arguments)


@pytest.fixture(scope="module")
def mnist():
    return Plan(scaling=PSASC(C=0.25, s=0.5), sampling=MNIST, epochs=20).calibrate(epsilon=3, delta=1e-5)


def test_the_contract_s_example(mnist):
    assert mnist.steps == 2344 and isinstance(mnist.steps, int)
    assert mnist.noise_multiplier == pytest.approx(0.8917, abs=0.002)
    assert mnist.delta == 1e-5
    assert 2.99 < mnist.epsilon() <= 3
    assert mnist.epsilon() == mnist.epsilon(delta=1e-5) == mnist.epsilon(steps=2344)


def test_one_source_of_truth(mnist):
    assert mnist.bound == mnist.scaling.bound == 0.5
    assert mnist.noise_std == mnist.noise_multiplier * 0.5
    assert mnist.expected_batch == 512
    assert mnist.adjacency == "add-remove"
    assert mnist.event(7) == MNIST.event(mnist.noise_multiplier, 7)
    assert mnist.event() == MNIST.event(mnist.noise_multiplier, 2344)


def test_trap_23_epsilon_before_the_first_step(mnist):
    assert mnist.epsilon(steps=0) == 0.0
    assert mnist.event(0) == dp_accounting.NoOpDpEvent()
    assert 0 < mnist.epsilon(steps=1) < mnist.epsilon(steps=1000) < mnist.epsilon()


def test_trap_26_epochs_become_whole_steps():
    assert plan(sampling=MNIST, steps=None, epochs=20).steps == 2344
    assert plan(sampling=Poisson(size=49, batch=1), steps=None, epochs=1).steps == 49


def test_trap_07_the_divisor_is_the_expected_batch_size():
    for sampling in (Poisson(size=1001, batch=10), FixedSize(size=1001, batch=10), Shuffled(size=1001, batch=10)):
        assert plan(sampling=sampling).expected_batch == 10


def test_trap_06_the_plan_accounts_for_the_sampler_it_has():
    costs = {
        kind: plan(sampling=kind(size=60_000, batch=512), steps=2344, noise_multiplier=0.9).epsilon(delta=1e-5)
        for kind in (Poisson, FixedSize, Shuffled)
    }
    assert costs[Poisson] == pytest.approx(2.94, abs=0.01)
    assert costs[FixedSize] == pytest.approx(27.8, abs=0.2)
    assert costs[Shuffled] == pytest.approx(dp_accounting.get_epsilon_gaussian(0.9 / math.sqrt(20), 1e-5))


def test_replace_computes_steps_anew_from_epochs():
    first = plan(sampling=MNIST, steps=None, epochs=20, noise_multiplier=1.0)
    assert dataclasses.replace(first, epochs=10).steps == 1172
    assert dataclasses.replace(first, sampling=Poisson(size=60_000, batch=256)).steps == 4688
    assert dataclasses.replace(first, noise_multiplier=2.0).steps == 2344
    assert dataclasses.replace(first, steps=5, epochs=None).steps == 5
    assert dataclasses.replace(first, epochs=None).steps == 2344
    assert copy.deepcopy(first) == pickle.loads(pickle.dumps(first)) == first
    assert dataclasses.replace(pickle.loads(pickle.dumps(first)), epochs=10).steps == 1172


def test_calibrate_steps():
    open_plan = plan(steps=None, noise_multiplier=20.0)
    assert open_plan.steps is None
    closed = open_plan.calibrate_steps(epsilon=2, delta=1e-5)
    assert closed.epsilon() <= 2 < closed.epsilon(steps=closed.steps + 1)
    assert closed.delta == 1e-5 and closed.noise_multiplier == 20.0
    from_epochs = plan(steps=None, epochs=3, noise_multiplier=20.0).calibrate_steps(epsilon=2, delta=1e-5)
    assert from_epochs.steps == closed.steps


def test_calibrate_by_rdp_needs_more_noise():
    by = {a: plan(accountant=a).calibrate(epsilon=1, delta=1e-5) for a in ("pld", "rdp")}
    assert by["rdp"].noise_multiplier > by["pld"].noise_multiplier
    assert by["rdp"].epsilon() <= 1
    assert by["pld"].noise_multiplier == pytest.approx(
        dp_accounting.get_sigma_gaussian(1, 1e-5) * math.sqrt(10), rel=1e-4
    )


def test_without_noise_there_is_no_privacy():
    for scaling in (Clip(C=2.0), Clip(C=math.inf)):
        bare = plan(scaling=scaling, unsafe_no_noise=True)
        assert bare.noise_multiplier == bare.noise_std == 0.0
        assert bare.epsilon(delta=1e-5) == math.inf
        assert bare.epsilon(delta=1e-5, steps=0) == 0.0
        assert "NO PRIVACY" in bare.statement(delta=1e-5)
        json.dumps(bare.to_dict(), allow_nan=False)
    assert plan(noise_multiplier=0.0, unsafe_no_noise=True).noise_multiplier == 0.0


@pytest.mark.parametrize("delta", [1e-3, 0.1])
def test_a_delta_not_below_one_over_size_is_warned_of(delta):
    calibrated = plan(noise_multiplier=20.0)
    with pytest.warns(UserWarning, match=r"not below 1/size = 0.001.*one whole sample.*Take delta < 1/1000"):
        calibrated.epsilon(delta=delta)
    with pytest.warns(UserWarning, match="not below 1/size"):
        plan().calibrate(epsilon=1, delta=delta)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert calibrated.epsilon(delta=9.9e-4) > 0


def test_statement_tells_a_reviewer_everything(mnist):
    text = mnist.statement()
    for part in (
        "(3, 1e-05)-differential privacy",
        "(PLD): epsilon = 3;",
        "(RDP): epsilon = 3.37",
        "one sample",
        "add-remove",
        "one sample more than the other",
        "Poisson sampling",
        "512/60000",
        "Poisson-sampled Gaussian",
        "sensitivity 1 × bound",
        "Steps: 2,344",
        "multiplier 0.8917",
        "standard deviation 0.4458",
        "PSASC(C=0.25, s=0.5, r=0.001)",
        "more than 0.5",
        "search for hyperparameters",
        "preprocessing",
        "gradient norms",
        "floating-point",
        "other models",
    ):
        assert part in text
    assert "NOTE" not in text


def test_statement_rounds_epsilon_up():
    calibrated = plan(noise_multiplier=20.0)
    shown = float(calibrated.statement(delta=1e-5).split("(PLD): epsilon = ")[1].split(";")[0])
    assert calibrated.epsilon(delta=1e-5) <= shown <= calibrated.epsilon(delta=1e-5) + 1.01e-3


def test_statement_names_the_accountant_that_gave_the_number(mnist):
    assert "Tight accounting (PLD): epsilon = 3;" in mnist.statement()
    text = mnist.statement(delta=1e-300)
    shown = math.ceil(1000 * mnist.epsilon(delta=1e-300)) / 1000
    assert (
        "Tight" not in text and f"Guarantee: ({shown:g}, 1e-300)-differential privacy. Rényi DP (RDP): epsilon" in text
    )
    assert "privacy loss distributions (PLD) give nothing smaller here" in text


def test_statement_is_loud_about_shuffling_and_names_the_doubled_sensitivity():
    shuffled = plan(sampling=Shuffled(size=1000, batch=10, adjacency="replace-one"), noise_multiplier=9.0)
    text = shuffled.statement(delta=1e-5)
    assert "NOTE: shuffled epochs get NO amplification" in text
    assert "sensitivity 2 × bound" in text and "exchanged for any other" in text


def test_to_dict_is_plain_json(mnist):
    assert json.loads(json.dumps(mnist.to_dict(), allow_nan=False)) == {
        "scaling": {"name": "psasc", "C": 0.25, "s": 0.5, "r": 0.001},
        "sampling": {"name": "poisson", "size": 60_000, "batch": 512},
        "steps": 2344,
        "epochs": 20,
        "noise_multiplier": mnist.noise_multiplier,
        "delta": 1e-5,
        "momentum": None,
        "accountant": "pld",
        "records": None,
        "unsafe_no_noise": False,
    }
    shuffled = plan(sampling=Shuffled(size=10, batch=3)).to_dict()["sampling"]
    assert shuffled == {"name": "shuffled", "size": 10, "batch": 3, "adjacency": "zero-out"}
    assert plan().to_dict()["sampling"] == {"name": "full-batch", "size": 1000, "adjacency": "add-remove"}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: plan(epochs=1), r"'steps' parameter of Plan.*left out when epochs is given. Got 10.*one of the two"),
        (lambda: plan(steps=None), r"'steps'.*given, or epochs in its place.*calibrate_steps"),
        (lambda: plan(steps=None, unsafe_no_noise=True), r"'steps'.*given, or epochs"),
        (lambda: plan(steps=0), r"'steps' parameter of Plan.*>= 1. Got 0"),
        (lambda: plan(steps=None, epochs=-1), r"'epochs'.*Got -1"),
        (lambda: dataclasses.replace(plan(steps=None, epochs=2), steps=5), r"Got 5.*set the other to None"),
        (lambda: plan(noise_multiplier=0.0), r"'noise_multiplier'.*> 0. Got 0.0.*unsafe_no_noise=True allows 0"),
        (lambda: plan(noise_multiplier=-1.0), r"'noise_multiplier'.*Got -1.0.*plan.calibrate"),
        (lambda: plan(noise_multiplier=math.nan), r"'noise_multiplier'.*Got nan"),
        (lambda: plan(noise_multiplier=1.0, unsafe_no_noise=True), r"0 with unsafe_no_noise=True. Got 1.0.*Drop"),
        (lambda: plan(scaling=Clip(C=math.inf)), r"'scaling'.*finite bound. Got Clip\(C=inf\).*give C, or unsafe"),
        (lambda: plan(scaling=Clip(C=math.inf), noise_multiplier=1.0), r"finite bound"),
        (lambda: plan(accountant="clt"), r"'accountant'.*'pld' or 'rdp'. Got 'clt'"),
        (lambda: plan(delta=0.0), r"'delta' parameter of Plan .*Got 0.0"),
        (lambda: plan().calibrate(epsilon=0, delta=1e-5), r"'epsilon' parameter of Plan.calibrate .*Got 0.*budget"),
        (lambda: plan().calibrate(epsilon=-2.0, delta=1e-5), r"Got -2.0"),
        (lambda: plan().calibrate(epsilon=1, delta=0), r"'delta' parameter of Plan.calibrate .*Got 0.*1e-5"),
        (lambda: plan().calibrate(epsilon=1, delta=1), r"'delta'.*Got 1"),
        (lambda: plan(unsafe_no_noise=True).calibrate(epsilon=1, delta=1e-5), r"no noise to calibrate.*Drop it"),
        (lambda: plan(steps=None, noise_multiplier=1.0).calibrate(epsilon=1, delta=1e-5), r"needs the number of"),
        (lambda: plan().calibrate_steps(epsilon=1, delta=1e-5), r"calibrate_steps needs a noise multiplier"),
        (lambda: plan().epsilon(), r"Plan.epsilon needs a noise multiplier.*not calibrated.*plan.calibrate\("),
        (lambda: plan().noise_std, r"Plan.noise_std needs a noise multiplier"),
        (lambda: plan().statement(), r"Plan.statement needs a noise multiplier"),
        (lambda: plan(noise_multiplier=1.0).epsilon(), r"'delta' parameter of Plan.epsilon.*Pass delta=\.\.\."),
        (lambda: plan(noise_multiplier=1.0).epsilon(delta=2), r"'delta' parameter of Plan.epsilon.*Got 2"),
        (
            lambda: plan(steps=None, noise_multiplier=1.0).epsilon(delta=1e-5),
            r"needs the number of steps.*plan.calibrate_steps\(",
        ),
    ],
)
def test_errors_name_the_argument_and_the_next_action(call, text):
    with pytest.raises(ValueError, match=text):
        call()
