"""One call from a model, an optimizer, data and a budget to a private run; what is not said is decided, and logged."""

import logging
from collections.abc import Sized
from dataclasses import replace
from typing import Any, Literal

from torch import nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader, Dataset, default_collate

from dpscale.advice import advise, rates_for
from dpscale.checks import plain_number, require
from dpscale.ledger import Ledger
from dpscale.momentum import Momentum
from dpscale.noise import Source
from dpscale.people import people_of
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.sampling import Poisson, Sampling
from dpscale.scaling import PSASC, Scaling
from dpscale.sources import dataset_of
from dpscale.training import Private

log = logging.getLogger("dpscale")

DEFAULT_RULE = PSASC(C=0.5, s=0.5, r=1e-3)
"""Its bound is 1, so that the optimizer's learning rate is the normalized one; s and r are in the paper's range."""

_KEPT: dict[str, Any] = {  # options of a loader that do not sample, with what they are when nobody set them
    "num_workers": 0, "collate_fn": default_collate, "pin_memory": False, "timeout": 0, "worker_init_fn": None,
    "multiprocessing_context": None, "prefetch_factor": None, "persistent_workers": False, "generator": None,
}  # fmt: skip


def make_private(
    model: nn.Module, optimizer: Optimizer, data: Any, *, epsilon: float, delta: float, target: str | None = None,
    epochs: float | None = None, batch: int | Literal["auto"] = "auto", scaling: Scaling | None = None,
    momentum: Momentum | None = None, seed: int | None = None, micro_batch: int | None = None,
    compile: bool | None = None, ledger: Ledger | None = None, run: str | None = None, group: Any = None,
    noise: Source | None = None,
) -> Private:  # fmt: skip
    """Plan for ``data``, calibrate to the budget, and `privatize`: ``private.epochs()`` then needs no argument.

    Guarantee: as for `privatize`. The plan spends (``epsilon``, ``delta``) if all its steps are taken.

    Args:
        model, optimizer: as for `privatize`.
        data: a dataset that has a length; arrays, ``X`` or ``(X, y)``; a pandas frame, with ``target``; a Hugging Face
            dataset; people, from `by_user`; or a DataLoader, of which the dataset, ``collate_fn``, ``pin_memory`` and
            workers are kept, and the sampler is replaced by `Poisson`, which is logged. One that leaves samples out is
            refused.
        epsilon, delta: the budget.
        target: the column of a frame that is to be learned. A batch is then ``(inputs, target)``.
        epochs, batch: passes over the data and expected batch size, which counts people where data are people. `advise`
            decides what is left open: both by the cumulative noise and the cost; one of them where more of it gains
            little.
        scaling: None: ``PSASC(C=0.5, s=0.5, r=1e-3)``. Rules that are tuned alike come out alike, so the paper's is as
            good as any. Its bound is C/s = 1: under SGD, the learning rate is then the normalized one, of which
            `Advice.rates` says a range, which is logged in the terms of the optimizer.
        momentum, seed, micro_batch, compile, ledger, run, group, noise: as for `Plan` and `privatize`.

    Example:
        >>> import torch, dpscale; from torch import nn; from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(200, 5), torch.randint(0, 2, (200,)))
        >>> model = nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> loader = DataLoader(data, batch_size=50, shuffle=True)
        >>> private = dpscale.make_private(model, optimizer, loader, epsilon=3, delta=1e-4, epochs=2, batch=50)
        >>> for epoch in private.epochs():
        ...     for x, y in epoch:
        ...         _ = private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        ...         optimizer.step(); optimizer.zero_grad()
        >>> private.steps_taken, private.epsilon() <= 3
        (8, True)
    """
    dataset, loader = taken_apart(data, target)
    people = people_of(dataset)
    batch, epochs, epsilon, delta = map(plain_number, (batch, epochs, epsilon, delta))
    size = len(dataset)  # type: ignore[arg-type]
    require(size > 0, "make_private", "data", "a dataset with at least one sample", "an empty dataset")
    ok = batch == "auto" or (isinstance(batch, int) and not isinstance(batch, bool) and 1 <= batch <= size)
    require(ok, "make_private", "batch", f"'auto' or an integer from 1 to {size}", batch)
    plan = _planned(size, None if batch == "auto" else batch, epochs, scaling, momentum, epsilon, delta)
    plan = plan if people is None else replace(plan, records=people.records)
    log.info("dpscale: batch %d on average, %g epochs, %d steps, noise multiplier %.4g.", plan.expected_batch,
             plan.epochs, plan.steps, plan.noise_multiplier)  # fmt: skip
    private = privatize(model, optimizer, plan, seed=seed, micro_batch=micro_batch, compile=compile, ledger=ledger,
                        run=run, group=group, noise=noise)  # fmt: skip
    _log_rates(private.model, optimizer, plan)
    private.remember(data, dataset, loader)
    if isinstance(data, DataLoader):
        say_drawn(plan)
    return private


def plan_for(
    sampling: Sampling, *, epsilon: float, delta: float, scaling: Scaling | None = None, **settings: Any
) -> Plan:
    """A plan that spends the budget, with the rule of `make_private` if none is given. ``settings``: of `Plan`."""
    plan = Plan(scaling=DEFAULT_RULE if scaling is None else scaling, sampling=sampling, **settings)
    return plan.calibrate(epsilon=epsilon, delta=delta)


def say_drawn(plan: Plan) -> None:
    """That a loader's own sampling is not used."""
    log.warning(
        "dpscale: Poisson draws of %d samples on average, from all %d, take the place of the DataLoader's sampler and "
        "batch size.", plan.expected_batch, plan.sampling.size,
    )  # fmt: skip


def _planned(
    size: int, batch: int | None, epochs: float | None, rule: Scaling | None, momentum: Momentum | None, epsilon: float,
    delta: float,
) -> Plan:  # fmt: skip
    """A calibrated plan; what is None is advised."""
    if batch is None or epochs is None:
        advice = advise(size=size, epsilon=epsilon, delta=delta, batch=batch, epochs=epochs)
        return advice.plan(scaling=rule or DEFAULT_RULE, momentum=momentum)
    budget = {"epsilon": epsilon, "delta": delta, "epochs": epochs}
    return plan_for(Poisson(size=size, batch=batch), scaling=rule, momentum=momentum, **budget)


def _log_rates(model: nn.Module, optimizer: Optimizer, plan: Plan) -> None:
    """Learning rates to try, in the terms of this optimizer."""
    assert plan.steps and plan.noise_multiplier is not None
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    noise = plan.noise_multiplier / (plan.expected_batch * plan.steps**0.5)
    lowest, highest = rates_for(plan.steps, noise, parameters)
    carried = optimizer.param_groups[0].get("momentum", 0)
    factor = (1 - carried) / plan.bound
    if isinstance(optimizer, SGD) and factor > 0 and plan.momentum is None:
        log.info("dpscale: learning rates to try with this SGD and rule: %.2g to %.2g. It has %g.", lowest * factor,
                 highest * factor, optimizer.param_groups[0]["lr"])  # fmt: skip


def taken_apart(
    data: Any, target: str | None = None, owner: str = "make_private", name: str = "data"
) -> tuple[Dataset[Any], dict[str, Any]]:
    """The dataset, and options of the loader around it that were set and do not sample.

    Args:
        data: a DataLoader, or what `dataset_of` takes.
        target: the column of a frame that is to be learned.
        owner, name: of the parameter, for complaints.
    """
    if not isinstance(data, DataLoader):
        return dataset_of(owner, data, target, name=name), {}
    size = len(dataset_of(owner, data.dataset, target, name=name))  # type: ignore[arg-type]
    require(data.batch_sampler is not None, owner, name, "a DataLoader that makes batches of samples",
            "one with batch_size=None", "Pass a dataset of single samples.")  # fmt: skip
    drawn = _drawn_by(data)
    require(drawn == size, owner, name, f"a DataLoader over all {size} samples of its dataset",
            f"one whose sampler has {'no length' if drawn is None else drawn}", "The plan draws from all of it: pass "
            "torch.utils.data.Subset(dataset, indices), or the dataset itself.")  # fmt: skip
    return data.dataset, kept_options(data)


def kept_options(loader: Any) -> dict[str, Any]:
    """Of a loader, what was set and does not sample."""
    found = {name: getattr(loader, name, default) for name, default in _KEPT.items()}
    return {name: value for name, value in found.items() if value is not _KEPT[name] and value != _KEPT[name]}


def _drawn_by(loader: DataLoader[Any]) -> int | None:
    """How many samples a loader goes through in an epoch; None where it does not say.

    Batches that are chosen by code of one's own are gone through, if there is an end to them.
    """
    batches = loader.batch_sampler
    sampler = getattr(batches, "sampler", None)
    if sampler is not None:
        return len(sampler) if isinstance(sampler, Sized) else None
    return len({place for batch in batches for place in batch}) if isinstance(batches, Sized) else None
