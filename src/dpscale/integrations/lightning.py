"""Lightning: `PrivateCallback` makes `Trainer.fit` train privately."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from dpscale import Batch, Ledger, Plan, Poisson, Private, advise, privatize
from dpscale.checks import complaint, require
from dpscale.one_call import DEFAULT_RULE, taken_apart
from dpscale.scaling import Scaling

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback

log = logging.getLogger("dpscale")


class PrivateCallback(Callback):
    """Trains the module of a `Trainer` privately: ``Trainer(callbacks=[PrivateCallback(epsilon=3, delta=1e-5)])``.

    `training_step` returns a loss for each sample, shape (B,), or a dict with them as ``"loss"``. With manual
    optimization, ``self.manual_backward(losses)`` takes them. Batches are Poisson draws from the loader's dataset.

    Guarantee: as for `privatize`; ``callback.private.epsilon()`` is what was spent, over every resumption by
    ``fit(ckpt_path=…)``. A checkpoint without the state of a private run is refused.

    Args:
        plan: calibrated; or give ``epsilon`` and ``delta``, and the trainer's ``max_epochs`` and ``max_steps`` plan.
        epsilon, delta: the budget.
        batch: expected batch over all ranks. None: the loader's ``batch_size`` times the ranks. "auto": as `advise` has
            it for the epochs.
        scaling: the rule; None for that of `make_private`.
        seed, micro_batch, ledger, run: as for `privatize`; a micro-batch counts for ``callback.private.step`` alone.

    Attributes:
        private: the run, from the start of training on.
    """

    def __init__(
        self, plan: Plan | None = None, *, epsilon: float | None = None, delta: float | None = None,
        batch: int | Literal["auto"] | None = None, scaling: Scaling | None = None, seed: int | None = None,
        micro_batch: int | None = None, ledger: Ledger | None = None, run: str | None = None,
    ) -> None:  # fmt: skip
        budget = epsilon is not None and delta is not None
        require((plan is None) == budget, "PrivateCallback", "plan", "given, or epsilon and delta in its place", plan)
        self.private: Private | None = None
        self._plan, self._budget, self._batch_size = plan, {"epsilon": epsilon, "delta": delta}, batch
        self._scaling = DEFAULT_RULE if scaling is None else scaling
        self._options: dict[str, Any] = {"seed": seed, "micro_batch": micro_batch, "ledger": ledger, "run": run}
        self._saved: Mapping[str, Any] | None = None
        self._draws: _Draws | None = None
        self._batch: Batch | None = None
        self._stepping = self._told = False

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Refuse settings that would not be private, and put draws in the place of the loader's batches."""
        if stage == "fit":
            _check_trainer(trainer)
            source = trainer.fit_loop._data_source
            given = partial(type(source).dataloader, source)
            vars(source)["dataloader"] = lambda: self._drawing(trainer, given())

    def _drawing(self, trainer: "Trainer", loader: Any) -> "_Draws":
        ok, got = isinstance(loader, DataLoader), type(loader).__name__
        require(ok, "PrivateCallback", "train_dataloader", "one torch.utils.data.DataLoader", got)
        dataset, options = taken_apart(loader)
        plan = self._planned(trainer, len(dataset), loader.batch_size)  # type: ignore[arg-type]
        log.warning(
            "dpscale: Poisson draws of %d samples on average, from all %d, take the place of the DataLoader's sampler "
            "and batch size; %d steps in all.", plan.expected_batch, plan.sampling.size, plan.steps,
        )  # fmt: skip
        self._draws = _Draws(self, trainer, plan, dataset, options)
        return self._draws

    def _planned(self, trainer: "Trainer", size: int, batch_size: int | None) -> Plan:
        if self._plan is not None:
            return self._plan
        epochs, steps = trainer.max_epochs, trainer.max_steps
        some = epochs not in (None, -1) or steps != -1
        require(some, "Trainer", "max_epochs", "given: the noise depends on the number of steps", epochs)
        batch = self._batch_size
        if batch is None and batch_size is not None:
            batch = batch_size * trainer.world_size
        elif not isinstance(batch, int):
            batch = advise(size=size, epochs=None if epochs == -1 else epochs, **self._budget).batch  # type: ignore[arg-type]
        sampling = Poisson(size=size, batch=min(batch, size))
        limits = [sampling.steps(epochs)] if epochs not in (None, -1) else []  # type: ignore[arg-type]
        planned = min([*limits, *([steps] if steps != -1 else [])])
        plan = Plan(scaling=self._scaling, sampling=sampling, steps=planned)
        return plan.calibrate(**self._budget)  # type: ignore[arg-type]

    def on_train_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Make the run, or go on with that of the checkpoint."""
        count = len(trainer.optimizers)
        require(count == 1, "PrivateCallback", "configure_optimizers", "a method that returns one optimizer", count)
        if self.private is not None and self.private.steps_taken and self._saved is None:
            raise RuntimeError("This PrivateCallback has trained already, and a second run would cost as much again. Go "
                               "on with fit(ckpt_path=…), or make a new one for a new plan; a ledger adds them up.")  # fmt: skip
        if isinstance(trainer.strategy.model, DistributedDataParallel):  # the run reduces by itself
            trainer.strategy.model = pl_module
        step, optimizer = pl_module.training_step, trainer.optimizers[0]
        model: nn.Module = _Step(pl_module, step)
        if not pl_module.automatic_optimization:
            model, optimizer = _own_forward(pl_module), pl_module.optimizers()  # type: ignore[assignment]
        assert self._draws is not None
        self.private = privatize(model, optimizer, self._draws.plan, **self._options)
        if self._saved is not None:
            self.private.load_state_dict(self._saved)
            self._saved = None
        logged = pl_module.log
        vars(pl_module).update(
            training_step=wraps(step)(partial(self._training_step, model if isinstance(model, _Step) else step)),
            backward=self._backward,
            log=lambda *args, **kwargs: self._drop_log() if self._stepping else logged(*args, **kwargs),
        )

    def _training_step(self, step: Callable[..., Any], batch: Any, *rest: Any) -> Any:
        self._batch, self._stepping = batch if isinstance(batch, Batch) else None, True
        try:
            return step(batch if self._batch is None else self._batch.data, *rest)
        finally:
            self._stepping = False

    def _backward(self, losses: Tensor, *args: Any, **kwargs: Any) -> None:
        assert self.private is not None
        self.private.backward(_per_sample(losses), self._batch)

    def _drop_log(self) -> None:
        if not self._told:
            log.warning("dpscale: what training_step logs is exact and would leak, so it is dropped. Log in validation.")
            self._told = True

    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *args: Any) -> None:
        """Log ε as often as the trainer logs, and stop when the plan is carried out."""
        assert self.private is not None
        over = self.private.steps_taken >= self.private.steps
        if over or trainer.is_last_batch or self.private.steps_taken % trainer.log_every_n_steps == 0:
            self.log("epsilon", self.private.epsilon(), prog_bar=True)
        trainer.should_stop |= over

    def state_dict(self) -> dict[str, Any]:
        """The run's state: see `Private.state_dict`."""
        state = self._saved if self.private is None else self.private.state_dict()
        return {} if state is None else {"private": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What the run goes on from, once it is made."""
        self._saved = state_dict["private"]

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Refuse to go on from weights of which nobody knows what they cost."""
        if trainer.state.fn == "fit" and self.state_key not in checkpoint.get("callbacks", {}):
            raise RuntimeError("This checkpoint holds no private run, so what its weights cost is unknown. If they are "
                               "public, load them into the module, and call fit() without ckpt_path.")  # fmt: skip

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Give the module and the trainer back as they were."""
        for name in ("training_step", "backward", "log"):
            vars(pl_module).pop(name, None)
        vars(trainer.fit_loop._data_source).pop("dataloader", None)
        if self.private is not None:
            self.private.close()

    def on_exception(self, trainer: "Trainer", pl_module: "LightningModule", exception: BaseException) -> None:
        """The same after an error."""
        self.teardown(trainer, pl_module, "fit")


class _Draws:
    """In place of a loader: the draws of a plan, epoch by epoch. Resumable, as Lightning understands it."""

    def __init__(self, callback: PrivateCallback, trainer: "Trainer", plan: Plan, dataset: Any, options: Any) -> None:
        self.plan, self._callback, self._trainer, self._data = plan, callback, trainer, (dataset, options)

    def __len__(self) -> int:
        return self.plan.sampling.steps(1)

    def __iter__(self) -> Iterator[Batch]:
        private, (dataset, options) = self._callback.private, self._data
        assert private is not None
        epoch = next(private.epochs(dataset, **options), None)
        self._trainer.should_stop |= epoch is None
        for batch in epoch or ():
            yield batch.map(self._trainer.precision_plugin.convert_input)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The run knows where it is."""


class _Step(nn.Module):
    """A whole training_step as a forward: all of it is looked at, not only the network."""

    def __init__(self, module: nn.Module, step: Callable[..., Any]) -> None:
        super().__init__()
        self.module, self._step = module, step

    def forward(self, *args: Any) -> Tensor:
        found = self._step(*args)
        return _per_sample(found["loss"] if isinstance(found, Mapping) else found)


def _per_sample(losses: Any) -> Tensor:
    if isinstance(losses, Tensor) and losses.ndim == 1:
        return losses
    got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise complaint("PrivateCallback", "training_step", "a method whose losses are one per sample, shape (B,)", got,
                    "Pass reduction='none', and take no mean over the batch.")  # fmt: skip


def _own_forward(module: Any) -> nn.Module:
    """The module, if it has a forward; else the one child that is trained."""
    if type(module).forward.__qualname__ != "LightningModule.forward":
        return module  # type: ignore[no-any-return]
    parts = [child for child in module.children() if any(p.requires_grad for p in child.parameters())]
    require(len(parts) == 1, "PrivateCallback", "forward", "defined, and called as self(...) in training_step", None)
    return parts[0]


def _check_trainer(trainer: Any) -> None:
    """Refuse what would change a private gradient, or not be understood."""
    known = {"SingleDeviceStrategy", "DDPStrategy"} & {c.__name__ for c in type(trainer.strategy).__mro__}
    for ok, name, must, got, action in (
        (known, "strategy", "one device or 'ddp'", type(trainer.strategy).__name__, "Others are not known here."),
        (trainer.accumulate_grad_batches == 1, "accumulate_grad_batches", "1", trainer.accumulate_grad_batches,
         "PrivateCallback(batch=…) says how many samples a step has."),
        (not trainer.gradient_clip_val, "gradient_clip_val", "None", trainer.gradient_clip_val,
         "Each sample is bounded already: PrivateCallback(scaling=dpscale.Clip(C=…)) says how."),
        (trainer.precision != "16-mixed", "precision", "one without loss scaling", trainer.precision, "Take 'bf16-mixed'."),
    ):  # fmt: skip
        require(bool(ok), "Trainer", name, must, got, action)
