"""Lightning: `PrivateCallback` makes `Trainer.fit` train privately."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dpscale.checks import plain_number, require
from dpscale.integrations.lightning_parts import Draws, TrainingStep, network
from dpscale.integrations.lightning_settings import OWNER, begun, check_new, check_saved, check_trainer, planned
from dpscale.integrations.lightning_turn import Turn
from dpscale.ledger import Ledger
from dpscale.noise import Source
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.scaling import Scaling
from dpscale.training import Private

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:  # the same library under its older name
        from pytorch_lightning import Callback


class PrivateCallback(Callback):
    """Trains the module of a `Trainer` privately: ``Trainer(callbacks=[PrivateCallback(epsilon=3, delta=1e-5)])``.

    ``training_step`` returns a loss for each sample, shape (B,), or a dict with them as ``"loss"``. With manual
    optimization, ``self.manual_backward(losses)`` takes them. Batches are Poisson draws from the loader's dataset.

    Guarantee: as for `privatize`; ``callback.private.epsilon()`` is what was spent, over every resumption by
    ``fit(ckpt_path=...)``. What ``training_step`` logs is exact, so it is dropped.

    Args:
        plan: calibrated; or give a budget, and the trainer's ``max_epochs`` and ``max_steps`` say for how many steps.
        epsilon, delta: the budget.
        batch: the expected batch, over all ranks. None: the loader's ``batch_size`` times the ranks.
        scaling: None for the rule of `make_private`.
        seed, ledger, run, noise: as for `privatize`.
        micro_batch: rows of a forward, at most. None: the loader's ``batch_size`` where the trainer accumulates
            gradients, which is then one draw of that many times its size; otherwise a whole draw. With manual
            optimization it counts for ``callback.private.step`` alone.

    Attributes:
        private: the run, from the start of training on.
    """

    def __init__(
        self, plan: Plan | None = None, *, epsilon: float | None = None, delta: float | None = None,
        batch: int | None = None, scaling: Scaling | None = None, seed: int | None = None,
        micro_batch: int | None = None, ledger: Ledger | None = None, run: str | None = None,
        noise: Source | None = None,
    ) -> None:  # fmt: skip
        given = [plan is not None, epsilon is not None, delta is not None]
        require(given in ([True, False, False], [False, True, True]), OWNER, "plan",
                "given, or epsilon and delta in its place", plan)  # fmt: skip
        require(plan is None or plan.delta is not None, OWNER, "plan", "one with a delta, to show epsilon", plan)
        self.private: Private | None = None
        self._planned = partial(planned, plan, batch=plain_number(batch), scaling=scaling, epsilon=epsilon, delta=delta)
        self._rows, self._accumulated = plain_number(micro_batch), 1
        self._options: dict[str, Any] = {"seed": seed, "ledger": ledger, "run": run, "noise": noise}
        self._saved: Mapping[str, Any] | None = None
        self._draws: Draws | None = None
        self._turn: Turn | None = None

    def setup(self, trainer: "Trainer", pl_module: "LightningModule", stage: str) -> None:
        """Refuse settings that are not understood, and put draws in the place of the loader's batches."""
        if stage == "fit":
            check_trainer(trainer)
            self._accumulated, trainer.accumulate_grad_batches = trainer.accumulate_grad_batches, 1
            source = trainer.fit_loop._data_source
            vars(source)["dataloader"] = lambda: self._drawing(trainer, type(source).dataloader(source))

    def _drawing(self, trainer: "Trainer", loader: Any) -> Draws:
        self._draws = Draws(trainer, loader, partial(self._planned, accumulated=self._accumulated), self._run)
        return self._draws

    def _run(self) -> Private:
        return begun(self.private)

    def on_fit_start(self, trainer: "Trainer", pl_module: "LightningModule") -> None:
        """Make the run, or go on with that of the checkpoint."""
        trainer.fit_loop.setup_data()
        if self._draws is None:  # nothing is trained: limit_train_batches=0
            return
        optimizers = trainer.optimizers
        require(len(optimizers) == 1, OWNER, "configure_optimizers", "for one optimizer", f"{len(optimizers)} of them")
        if self._saved is None:
            check_new(self.private)
        if isinstance(trainer.strategy.model, DistributedDataParallel):  # the run reduces by itself
            trainer.strategy.model = pl_module
        step, optimizer = pl_module.training_step, optimizers[0]
        model: nn.Module = TrainingStep(pl_module)
        if not pl_module.automatic_optimization:
            model, optimizer = network(pl_module), pl_module.optimizers()  # type: ignore[assignment]
        rows = self._rows or (self._draws.batch_size if self._accumulated > 1 else None)
        in_parts = rows is not None and isinstance(model, TrainingStep)
        compile = False if in_parts else None  # a whole training step is too much to trace
        options = {**self._options, "micro_batch": rows, "compile": compile}
        self.private = privatize(model, optimizer, self._draws.plan, **options)
        if self._saved is not None:
            self.private.load_state_dict(self._saved)
            self._saved = None
        self._turn = Turn(self._run, model if isinstance(model, TrainingStep) else step, in_parts)
        self._turn.take(trainer, pl_module)

    def on_train_batch_end(self, trainer: "Trainer", pl_module: "LightningModule", *args: Any) -> None:
        """Log ε as often as the trainer logs, and stop when the plan is carried out."""
        private = self._run()
        over, often = private.steps_taken >= private.steps, trainer.log_every_n_steps  # type: ignore[attr-defined]
        if often and (over or trainer.is_last_batch or private.steps_taken % often == 0):
            pl_module.log("epsilon", private.epsilon(), prog_bar=True)
        trainer.should_stop |= over

    def state_dict(self) -> dict[str, Any]:
        """That of the run, for a checkpoint."""
        state = self._saved if self.private is None else self.private.state_dict()
        return {} if state is None else {"private": state}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """What the run goes on from, once it is made."""
        self._saved = state_dict["private"]

    def on_load_checkpoint(self, trainer: "Trainer", pl_module: "LightningModule", checkpoint: dict[str, Any]) -> None:
        """Refuse to go on from weights of which nobody knows the cost."""
        if trainer.state.fn == "fit":
            check_saved(checkpoint.get("callbacks", {}).get(self.state_key))

    def teardown(self, trainer: "Trainer", pl_module: "LightningModule", stage: Any) -> None:
        """Leave module and trainer as they were."""
        for name in ("training_step", "backward", "log"):
            vars(pl_module).pop(name, None)
        vars(trainer.fit_loop._data_source).pop("dataloader", None)
        if self._accumulated > 1:
            trainer.accumulate_grad_batches, self._accumulated = self._accumulated, 1
        pl_module.trainer = trainer
        if self.private is not None:
            self.private.close()

    on_exception = teardown  # type: ignore[assignment]
