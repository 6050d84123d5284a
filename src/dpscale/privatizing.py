"""What a private run begins with: arguments that are checked, ranks that agree, a key, a ledger."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from dpscale.booking import open_run
from dpscale.checks import plain_number, require, require_count
from dpscale.distributed import Ranks, model_terms, unwrapped
from dpscale.engine import require_finite
from dpscale.engine.compile.worth import Worth
from dpscale.guard import wrapped
from dpscale.ledger import Ledger
from dpscale.noise import Source, check_source, default_source
from dpscale.plan import Plan
from dpscale.training import Private


def privatize(
    model: nn.Module, optimizer: Optimizer, plan: Plan, *, seed: int | None = None, micro_batch: int | None = None,
    compile: bool | None = None, ledger: Ledger | None = None, run: str | None = None, group: Any = None,
    noise: Source | None = None,
) -> Private:  # fmt: skip
    """Train ``model`` with ``optimizer`` under ``plan``.

    Guarantee: the parameters after any number of steps are (ε, δ)-differentially private, ε =
    ``private.epsilon(delta)``, under the adjacency that ``plan.statement()`` names, if no randomness leaks and
    nothing else about the data is published.

    Args:
        model: any module that treats samples apart; checked at the first step, and again in the course of the run.
        optimizer: any torch optimizer over the model's parameters, or a wrapper of one; plan: calibrated.
        seed: None for the operating system's randomness; an integer makes the run reproducible until it is resumed, and
            its noise guessable. With a ledger it has no effect: runs that are added up must not share noise.
        micro_batch: samples per forward of `Private.step`; None for a whole batch. A matter of memory and speed: the
            result does not depend on it. In a loop of your own, `Private.parts` divides a batch.
        compile: trace and compile `Private.step` at its first batch, which takes from seconds to a minute and pays over
            a long run. None: on CUDA, and on the CPU once it is seen that minutes of steps are left (not with a seed: a
            run that is compiled midway cannot be reproduced). What cannot be compiled runs eagerly, and the log says
            why. Numbers that ``loss_fn`` reads from objects other than modules are then taken as they were at first.
        ledger: where all runs on these data are booked. A plan that does not fit into what is left of its total is
            refused, and so is the step that could not be written down.
        run: the name of this run in the ledger, under which it is resumed. None: a new one.
        group: the `torch.distributed` process group to train in; None for that of all processes, if there is one. Every
            rank calls this and all that follows alike, on the whole data set, and takes its rows of each draw.
        noise: "secure": ChaCha20 for the noise and SHAKE-256 for the draws, against an adversary who tries to predict
            them; needs the extra ``secure``, but not on CUDA. "fast" (None): generators of numpy and torch.

    Example:
        >>> import torch, dpscale; from torch import nn; from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(200, 5), torch.randint(0, 2, (200,)))
        >>> model = nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> plan = dpscale.Plan(scaling=dpscale.PSASC(C=1.0, s=0.5, r=0.01),
        ...                     sampling=dpscale.Poisson(size=200, batch=20), steps=3).calibrate(epsilon=3, delta=1e-4)
        >>> private = dpscale.privatize(model, optimizer, plan)
        >>> loss = nn.CrossEntropyLoss(reduction="none")
        >>> for batch in private.batches(data):
        ...     _ = private.step(batch, lambda model, data: loss(model(data[0]), data[1]))
        >>> private.steps_taken, private.epsilon(1e-4) <= 3
        (3, True)
    """
    seed, micro_batch = plain_number(seed), plain_number(micro_batch)
    require(run is None or ledger is not None, "privatize", "run", "left out without a ledger", run)
    _check_types(optimizer, plan, compile, ledger)
    model = unwrapped(model)
    ranks = Ranks(model, group)
    key = ranks.key(seed)
    source = default_source({p.device.type for p in model.parameters()}) if noise is None else noise
    terms = partial(_terms_of, model, optimizer, plan, ranks, (ledger is not None, run), source)
    with ranks.whole("privatize"), ranks.together("privatize", terms):
        _check_arguments(model, optimizer, plan, micro_batch, source)
        compiles = _compiles(model, plan, compile, seed, ranks)
        private = Private(model, optimizer, plan, key, micro_batch, compiles, ranks, source)
        if ledger is not None and ranks.rank == 0:  # one of them books for all
            private._state.booking = open_run(ledger, run, plan)
    if ledger is not None:
        private._saver.adopt()
    return private


def _check_types(optimizer: Any, plan: Any, compile: Any, ledger: Any) -> None:
    """Refuse what is something else than it should be, before anything is asked of it."""
    for ok, name, must, got, action in (
        (hasattr(optimizer, "param_groups") and not isinstance(optimizer, type), "optimizer", "a torch optimizer",
         optimizer, "Make one: torch.optim.SGD(model.parameters(), lr=0.1)."),
        (isinstance(plan, Plan), "plan", "a dpscale.Plan", plan,
         "Or call make_private(model, optimizer, data, epsilon=..., delta=...), which makes one."),
        (compile is None or isinstance(compile, bool) or callable(compile), "compile", "True, False or None", compile,
         "None lets the library decide."),
        (isinstance(ledger, Ledger | None), "ledger", "a dpscale.Ledger, or None", ledger,
         "Open one: dpscale.Ledger('my.ledger', epsilon=..., delta=...), the total of all runs."),
    ):  # fmt: skip
        require(ok, "privatize", name, must, got if isinstance(got, str | Path) else type(got).__name__, action)


def _terms_of(
    model: nn.Module, optimizer: Optimizer, plan: Plan, ranks: Ranks, booked: tuple[bool, str | None], source: str
) -> dict[str, Any]:
    """What every rank must say alike before a run begins."""
    settings = [{k: str(v) for k, v in each.items() if k != "params"} for each in optimizer.param_groups]
    return {
        "plan": repr(plan), **model_terms(model), "optimizer": (type(optimizer).__name__, *settings),
        "values": int(ranks.values((*model.parameters(), *model.buffers()))), "ledger": booked, "noise": source,
    }  # fmt: skip


def _compiles(model: nn.Module, plan: Plan, asked: bool | None, seed: int | None, ranks: Ranks) -> bool | Worth:
    """Whether to compile, or what decides it in the course of the run."""
    if asked is not None:
        return asked
    on_gpu = all(p.is_cuda for p in model.parameters())
    return on_gpu or (Worth(plan.steps or 0) if seed is None and ranks.size == 1 else False)


def _check_arguments(model: nn.Module, optimizer: Optimizer, plan: Plan, micro_batch: int | None, source: str) -> None:
    require(plan.noise_multiplier is not None, "privatize", "plan", "calibrated", "a plan without a noise multiplier",
            "Call plan.calibrate(epsilon=..., delta=...), or give noise_multiplier.")  # fmt: skip
    require(plan.steps is not None, "privatize", "plan", "one that says how many steps", "a plan without steps",
            "Give steps or epochs, or call plan.calibrate_steps(epsilon=..., delta=...).")  # fmt: skip
    if micro_batch is not None:
        require_count("privatize", "micro_batch", micro_batch)
    unloaded = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if t.is_meta and not is_lazy(t)]
    require(not unloaded, "privatize", "model", "one whose parameters are in memory", f"{unloaded[:1]} on 'meta'",
            "Load its weights first; model.to_empty(device='cpu') makes room for them.")  # fmt: skip
    lazy = [n for n, t in (*model.named_parameters(), *model.named_buffers()) if is_lazy(t)]
    require(not lazy, "privatize", "model", "one whose parameters have shapes", f"a lazy one ({lazy[:1]} has none yet)",
            "Run a batch of zeros through it, and then make the optimizer.")  # fmt: skip
    require_finite(model)
    lbfgs = any(isinstance(one, torch.optim.LBFGS) for one in wrapped(optimizer))
    require(not lbfgs, "privatize", "optimizer", "one that steps once per gradient", "LBFGS",
            "It evaluates the loss several times a step, which would be several releases.")  # fmt: skip
    check_source("privatize", source, {p.device.type for p in model.parameters()})
