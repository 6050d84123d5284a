"""Empirical lower bounds on ε, from the product's own step.

`audit` of a plan puts *canaries* into a data set: samples whose gradients are as large as the scaling rule lets them
be, each in a direction of its own. It trains on them with `privatize`, `batches` and `step`, reads every release from
the parameters before and after a plain SGD step, and guesses from it which canaries were in the data. No mechanism with
the claimed ε lets anybody guess better than its trade-off curve.

`audit` of somebody's own training (``make_private``, data) takes whole samples as canaries, and sees the trained model
alone. It is weaker: a bound far below the claimed ε says little.
"""

import math
import time
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, distributed, nn
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, default_collate

from dpscale.audit import statistics
from dpscale.audit.report import FALSE_ALARM as FALSE_ALARM
from dpscale.audit.report import AuditReport as AuditReport
from dpscale.audit.statistics import Bools, Curve, Floats, Trace
from dpscale.checks import require, require_count, require_probability
from dpscale.engine import LossFn
from dpscale.engine.compat import tree_map
from dpscale.momentum import DiSK, HeavyBall, InnerOuter, Momentum
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.sampling import Shuffled
from dpscale.training import Private

BLANKS = 256
"""Coordinates that no sample moves, at the beginning of each table of canaries; there are more in other tensors."""

STRENGTH = 1e6
"""Norm of a canary's gradient, over the bound: beyond what any rule lets through, so that it adds the bound itself."""

LEAST = 50
"""Canaries below which nothing can be told."""

MakePrivate = Callable[[Dataset[Any]], tuple[Private, LossFn]]


def audit(
    subject: Plan | MakePrivate, data: Dataset[Any] | None = None, *, canaries: int | None = None, runs: int = 1,
    delta: float | None = None, confidence: float = 0.95, seed: int | None = None, inserted: Dataset[Any] | None = None,
    device: str = "cpu", on_step: Callable[[int], None] = lambda done: None, **options: Any,
) -> AuditReport:  # fmt: skip
    """Measure how much of the claimed ε can be shown to be spent, and whether anything speaks against the claim.

    Guarantee: for a run that is as its plan says, ``report.epsilon_lower`` is above the true ε with probability at most
    1 - ``confidence``, and ``report.consistent`` is False with probability at most `FALSE_ALARM`.

    Args:
        subject: a calibrated plan, to audit the step under it with canary gradients; or a function that makes a private
            run of a data set, ``make_private(data) -> (private, loss_fn)``, to audit that with canary samples.
        data: for a function: the data set; each canary is left out of it by a coin, so that its size varies. The plan
            must be for add-remove, and ``default_collate`` must do for the data.
        canaries: of each run. None: nine in ten samples of the plan, at most 60,000; or half of the data, at most 1000.
        runs: more of them give more observations. Each has fresh coins, noise and draws.
        delta: the plan's if not given.
        confidence: of each lower bound.
        seed: makes it reproducible; None for the operating system's randomness. On several ranks one must be given.
        inserted: for a function: canaries to add to the data (mislabelled samples, say) instead of some of its own.
        device: for a plan: where to train; noise, kernels and compiled steps are other ones on a GPU.
        on_step: for a plan: called after each step with how many are done, over all runs.
        options: for a plan: what `privatize` takes besides (``micro_batch``, ``compile``).

    Example:
        >>> import dpscale
        >>> plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.FullBatch(size=400), steps=2)
        >>> report = dpscale.audit.audit(plan.calibrate(epsilon=4, delta=1e-5), seed=0)
        >>> report.consistent, 1 < report.epsilon_lower < 4
        (True, True)
    """
    started = time.monotonic()
    require_count("audit", "runs", runs)
    require_probability("audit", "confidence", confidence, action="0.95 is usual.")
    if isinstance(subject, Plan):
        require(data is None and inserted is None, "audit", "data", "left out for a plan", data)
        delta, size = _delta(subject, delta), subject.sampling.size
        require(
            bool(subject.noise_multiplier and subject.steps), "audit", "subject", "a plan with noise and steps", subject
        )
        count = min(60_000, size * 9 // 10) if canaries is None else canaries
        _require_canaries(count, size)
        _require_ranks(subject, seed)
        traces = [_white_box(subject, count, seed, run, device, on_step, options) for run in range(runs)]
        return _report_white_box(subject, traces, delta, confidence, started)
    makes = callable(subject) and not isinstance(subject, nn.Module)
    action = "It is called with data: make_private(data) -> (private, loss_fn)."
    require(makes, "audit", "subject", "a Plan, or a function that makes a private run", type(subject).__name__, action)
    require(data is not None, "audit", "data", "given where a function is audited", data, "Canaries are taken from it.")
    require(not options, "audit", "options", "left out where a function is audited", sorted(options))
    assert data is not None
    guesses = [_input_space(subject, data, inserted, canaries, delta, seed, run) for run in range(runs)]
    return _report_input_space(guesses, delta, confidence, started)


def _require_canaries(count: int, most: int) -> None:
    action = f"There are {most} samples to take them from, and fewer than {LEAST} tell nothing."
    require_count("audit", "canaries", count, least=LEAST, action=action)
    require(count <= most, "audit", "canaries", f"at most {most}", count, action)


def _require_ranks(plan: Plan, seed: int | None) -> None:
    """Every rank must toss the same coins, and see what the adversary sees."""
    if distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1:
        require(seed is not None, "audit", "seed", "given on several ranks, the same on each", seed)
        action = "Audit it in one process: a rank knows its own rows of the order alone."
        drawn = "of independent draws on several ranks"
        require(plan.sampling.independent, "audit", "subject", drawn, type(plan.sampling).__name__, action)


def _delta(plan: Plan, delta: float | None) -> float:
    found = plan.delta if delta is None else delta
    require(found is not None, "audit", "delta", "given for a plan that has none", None)
    assert found is not None
    require_probability("audit", "delta", found)
    return found


# -- White-box: canary gradients -------------------------------------------------------------------------------------


class _CanaryModel(nn.Module):
    """A number for each canary in two tables, whose gradient is the canary's alone, and ordinary layers beside them.

    A canary's gradient is spread over both tables, as a norm is over all tensors. Blank numbers are at the beginning of
    both: noise that begins anew with every tensor is the same there. The silent layer, a matrix and a vector, is blank.
    """

    def __init__(self, canaries: int) -> None:
        super().__init__()
        self.canaries, self.twins = (nn.Embedding(canaries + BLANKS, 1) for _ in range(2))
        self.silent = nn.Linear(4, 32)
        self.ordinary = nn.Linear(4, 3)
        for parameter in self.parameters():  # alike on every rank
            nn.init.zeros_(parameter)

    def forward(self, ids_B: Tensor, x_BI: Tensor) -> tuple[Tensor, Tensor]:
        """(A sample's own number, or one that it does not move; ordinary logits.)"""
        own_B = (self.canaries(ids_B) + self.twins(ids_B))[:, 0] / math.sqrt(2)
        return own_B + 0 * self.silent(x_BI).sum(-1), self.ordinary(x_BI)

    def released(self) -> Floats:
        """What an adversary looks at: the canaries' numbers, then the blank ones."""
        read = self.canaries.weight[:, 0], self.twins.weight[:, 0], self.silent.weight.flatten(), self.silent.bias
        first, second, *blanks = (t.detach().double().cpu().numpy() for t in read)
        own = (first[BLANKS:] + second[BLANKS:]) / math.sqrt(2)
        return np.concatenate([own, first[:BLANKS], second[:BLANKS], *blanks])


def _canary_loss(model: nn.Module, batch: Any) -> Tensor:
    """strength·(own number) for a canary, an ordinary loss for all others."""
    ids, strength, x, y = batch
    own, logits = model(ids, x)
    losses: Tensor = strength * own + (strength == 0) * nn.functional.cross_entropy(logits, y, reduction="none")
    return losses


def _canary_data(plan: Plan, canaries: int, rng: np.random.Generator) -> tuple[TensorDataset, Bools, Floats]:
    """(The data, which canaries are in them, what each adds to a sum.) Canaries are at random places of the data.

    One that is out is an ordinary sample, or, where neighbours exchange samples, the opposite canary.
    """
    size, exchanged = plan.sampling.size, plan.adjacency == "replace-one"
    inside = rng.random(canaries) < 0.5
    adds = np.where(inside, 1.0, -1.0 if exchanged else 0.0)
    places, torch_rng = rng.permutation(size)[:canaries], torch.Generator().manual_seed(int(rng.integers(2**62)))
    ids, strength = np.zeros(size, dtype=np.int64), np.zeros(size, dtype=np.float32)
    ids[places], strength[places] = BLANKS + np.arange(canaries), adds * STRENGTH * plan.bound
    x = torch.randn(size, 4, generator=torch_rng)
    y = torch.randint(0, 3, (size,), generator=torch_rng)
    return TensorDataset(torch.from_numpy(ids), torch.from_numpy(strength), x, y), inside, adds


class _Adversary:
    """Reads releases, one by one, and weighs for each canary whether it is in the data."""

    def __init__(self, plan: Plan, canaries: int) -> None:
        self._plan, self._canaries = plan, canaries
        self._momentum: Floats = np.zeros(())
        self.scores, self.totals = np.zeros(canaries), np.zeros(canaries)
        self._carried, self._fresh = _outer(plan.momentum)

    def see(self, change: Floats, drawn: NDArray[np.int64]) -> Floats:
        """Take note of a change of the parameters, and return the noisy sum that it came from.

        ``drawn`` are the canaries of the batch (below 0: other samples). It is used only where that is no secret.
        """
        release = (change - self._carried * self._momentum) / self._fresh
        self._momentum = change
        y, sampling, sigma = release[: self._canaries], self._plan.sampling, self._plan.noise_multiplier
        assert sigma is not None
        # Shuffled claims no amplification: the order is known.
        told = drawn[drawn >= 0] if isinstance(sampling, Shuffled) else slice(None)
        rate = 1.0 if isinstance(sampling, Shuffled) else sampling.rate
        self.scores[told] += statistics.log_ratio(y[told], sigma, rate, self._plan.adjacency == "replace-one")
        self.totals += y
        return release


def _outer(momentum: Momentum | None) -> tuple[float, float]:
    """(a, b) of M = a·M + b·(noisy sum), which anybody can undo who sees M."""
    match momentum:
        case HeavyBall() | InnerOuter():
            return 1 - momentum.gamma1, 1.0
        case DiSK():
            return 1 - momentum.kappa, momentum.kappa
    return 0.0, 1.0


def _white_box(
    plan: Plan, canaries: int, seed: int | None, run: int, device: str, on_step: Callable[[int], None],
    options: dict[str, Any],
) -> Trace:  # fmt: skip
    """One run on canaries, through the public path, as somebody sees it who reads every release."""
    data, inside, adds = _canary_data(plan, canaries, np.random.default_rng(None if seed is None else [seed, run]))
    data = TensorDataset(*(tensor.to(device) for tensor in data.tensors))
    model, adversary = _CanaryModel(canaries).to(device), _Adversary(plan, canaries)
    lr = plan.expected_batch / plan.bound  # so that parameters change by the noisy sum, in units of the bound
    own = None if seed is None else seed * 1000 + run
    private = privatize(model, torch.optim.SGD(model.parameters(), lr=lr), plan, seed=own, **options)
    signals, blanks = [], []
    before = model.released()
    for batch in private.batches(data):
        drawn = batch.data[0].cpu().numpy() - BLANKS
        private.step(batch, _canary_loss)
        after = model.released()
        release, before = adversary.see(before - after, drawn), after
        signals.append(float(adds @ release[:canaries]))
        blanks.append(release[canaries:])
        on_step(run * (plan.steps or 0) + private.steps_taken)
    return Trace(adversary.scores, inside, adds, adversary.totals, np.array(signals), np.array(blanks))


def _report_white_box(plan: Plan, traces: list[Trace], delta: float, confidence: float, started: float) -> AuditReport:
    scores = np.concatenate([trace.scores for trace in traces])
    inside = np.concatenate([trace.inside for trace in traces])
    claimed, judged = Curve.of(plan, delta), statistics.central(scores, inside)
    bounds = {
        "curve": statistics.by_curve(judged, plan, delta, confidence),
        "threshold": statistics.by_threshold(scores, inside, delta, confidence),
    }
    checks = (*statistics.checks(plan, traces), statistics.refutes(judged, claimed))
    return _report("white-box", plan, scores, inside, bounds, checks, delta, confidence, len(traces), started)


# -- Input-space: canary samples -------------------------------------------------------------------------------------


def _input_space(
    make_private: MakePrivate, data: Dataset[Any], inserted: Dataset[Any] | None, canaries: int | None,
    delta: float | None, seed: int | None, run: int,
) -> tuple[Plan, Floats, Bools]:  # fmt: skip
    """Train on data with each canary in or out by a coin; a canary's score is by how much its loss has fallen."""
    rng = np.random.default_rng(None if seed is None else [seed, run])
    size = len(data)  # type: ignore[arg-type]
    if inserted is None:
        count = min(1000, size // 2) if canaries is None else canaries
        _require_canaries(count, size)
        everything, places = data, rng.permutation(size)[:count]
    else:
        everything, places = ConcatDataset([data, inserted]), size + np.arange(len(inserted))  # type: ignore[arg-type]
    inside = rng.random(len(places)) < 0.5
    kept = np.setdiff1d(np.arange(len(everything)), places[~inside])  # type: ignore[arg-type]
    taken = Subset(everything, kept.tolist())
    private, loss_fn = make_private(taken)
    _delta(private.plan, delta)
    action = "Audit the plan itself: its canaries are exchanged, or add nothing."
    require(private.plan.adjacency == "add-remove", "audit", "subject", "a function whose plan is for add-remove",
            private.plan.adjacency, action)  # fmt: skip
    samples = [everything[int(place)] for place in places]
    before = _losses(private, loss_fn, samples)
    for batch in private.batches(taken):
        private.step(batch, loss_fn)
    return private.plan, before - _losses(private, loss_fn, samples), inside


def _losses(private: Private, loss_fn: LossFn, samples: list[Any]) -> Floats:
    """Of single samples, as the model stands."""
    mode, device = private.model.training, next(private.model.parameters()).device
    private.model.eval()
    parts = []
    with torch.no_grad():
        for first in range(0, len(samples), 256):
            batch = tree_map(lambda t: t.to(device), default_collate(samples[first : first + 256]))
            parts.append(loss_fn(private.model, batch).double().cpu().numpy())
    private.model.train(mode)
    return np.concatenate(parts)


def _report_input_space(
    found: list[tuple[Plan, Floats, Bools]], delta: float | None, confidence: float, started: float
) -> AuditReport:
    delta = _delta(found[0][0], delta)
    claims = {each[0].epsilon(delta): each[0] for each in found}  # sizes differ, and with them the claims a little
    plan = claims[max(claims)]
    scores = np.concatenate([each[1] for each in found])
    inside = np.concatenate([each[2] for each in found])
    bounds = {
        "guesses": statistics.by_guesses(scores, inside, delta, confidence),
        "threshold": statistics.by_threshold(scores, inside, delta, confidence),
    }
    checks = (statistics.lucky(scores, inside, delta, plan.epsilon(delta)),)
    return _report("input-space", plan, scores, inside, bounds, checks, delta, confidence, len(found), started)


def _report(
    mode: Literal["white-box", "input-space"], plan: Plan, scores: Floats, inside: Bools, bounds: dict[str, float],
    checks: tuple[statistics.Check, ...], delta: float, confidence: float, runs: int, started: float,
) -> AuditReport:  # fmt: skip
    fpr = np.linspace(0, 1, 101)
    claimed = zip(fpr.tolist(), Curve.of(plan, delta).least_fnr(fpr).tolist(), strict=True)
    return AuditReport(
        mode=mode, epsilon_claimed=plan.epsilon(delta), epsilon_lower=next(iter(bounds.values())), bounds=bounds,
        delta=delta, confidence=confidence, canaries=len(scores) // runs, runs=runs, observations=len(scores),
        points=statistics.points(scores, inside, confidence), claimed=tuple(claimed), checks=checks,
        plan=f"{plan.sampling.describe()}; {plan.steps:,} steps, noise multiplier {plan.noise_multiplier:.4g}, "
        f"{plan.scaling}" + (f", {plan.momentum.describe()}" if plan.momentum else ""),
        adjacency=plan.adjacency, seconds=time.monotonic() - started,
    )  # fmt: skip
