"""PrivateTrainer: Hugging Face's Trainer, with private steps."""

import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from dpscale import checkpoint
from dpscale.batches import Batch
from dpscale.checks import require
from dpscale.integrations.model_losses import PerSampleLoss
from dpscale.integrations.trainer_arguments import COMPLETE, STATE, check, found, planned, settled
from dpscale.ledger import Ledger
from dpscale.noise import Source
from dpscale.one_call import kept_options
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.scaling import Scaling
from dpscale.training import Private


class PrivateTrainer(Trainer):  # type: ignore[misc]
    """A `transformers.Trainer` whose steps are private. `TrainingArguments`, evaluation and callbacks are as ever.

    Guarantee: as for `dpscale.privatize`. What is logged of the training is private too: ε, and the norm of the private
    gradient. What `evaluate` and `predict` say of their own data is exact, and not covered.

    The expected batch is ``per_device_train_batch_size * gradient_accumulation_steps * world_size``. Where gradients
    accumulate, at most ``per_device_train_batch_size`` rows go through the model at once. ``trainer.private`` is the
    run, ``trainer.plan`` its plan.

    Args:
        model, args, data_collator, train_dataset, trainer: as for `transformers.Trainer`. A ``compute_loss_func`` gives
            one loss per sample.
        epsilon, delta: the budget of the whole training.
        scaling: None: as in `dpscale.make_private`.
        plan: in place of ``epsilon`` and ``scaling``; batch and steps are the plan's.
        seed, compile, ledger, run, noise: as for `dpscale.privatize`. The ``seed`` of ``args`` has no part in it.
        log_exact_loss: log the training loss, which is exact and not covered by ε: for public data only.
    """

    def __init__(
        self, model: Any = None, args: TrainingArguments | None = None, data_collator: Any = None,
        train_dataset: Any = None, *, epsilon: float | None = None, delta: float | None = None,
        scaling: Scaling | None = None, plan: Plan | None = None, seed: int | None = None, compile: bool | None = None,
        ledger: Ledger | None = None, run: str | None = None, noise: Source | None = None, log_exact_loss: bool = False,
        **trainer: Any,
    ) -> None:  # fmt: skip
        args = args or TrainingArguments(output_dir="tmp_trainer")  # as Trainer does
        check(args, type(self), train_dataset, trainer.get("eval_dataset"))
        self.plan, self.delta = planned(args, train_dataset, epsilon, delta, scaling, plan), delta
        rows = args.per_device_train_batch_size if args.gradient_accumulation_steps > 1 else None
        self._privatized = partial(
            privatize, plan=self.plan, seed=seed, micro_batch=rows, compile=compile, ledger=ledger, run=run, noise=noise
        )
        self.log_exact_loss = log_exact_loss
        self.private: Private | None = None
        self._resumed: Path | None = None
        self._loss_is_known = False
        super().__init__(model, settled(args, self.plan), data_collator, train_dataset, **trainer)
        self.add_callback(_AsPlanned(self))

    def train(self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **kwargs: Any) -> Any:
        """Train; ``True`` resumes from the last whole checkpoint. A trainer trains once: what it released is paid."""
        if self.private is not None or trial is not None:
            raise RuntimeError(
                "A PrivateTrainer trains once, and searches for no hyperparameters: every further run releases more. "
                "Make another trainer, with an ε of its own; their costs add up, and a dpscale.Ledger adds them."
            )
        self._resumed = found(resume_from_checkpoint, Path(self.args.output_dir))
        done = super().train(None if self._resumed is None else str(self._resumed), **kwargs)
        return done if self.log_exact_loss else done._replace(training_loss=math.nan)

    def start(self) -> None:
        """Begin the private run; called once the Trainer has prepared the model, and loaded what it resumes from."""
        self._loss = PerSampleLoss.of(self.model, self.args.label_smoothing_factor, self.compute_loss_func)
        private = self._privatized(self.model, self.optimizer)
        if self._resumed is not None:
            private.load_state_dict(checkpoint.read(self._resumed / STATE))
        self.private = private

    def get_train_dataloader(self) -> "Draws":
        """The draws of the plan, read as the Trainer's own loader would read them."""
        return Draws(self, super().get_train_dataloader())

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """The private gradient of a draw. The optimizer's step is the Trainer's."""
        assert self.private is not None
        require(isinstance(inputs, Batch), "training_step", "inputs", "a draw of the plan", type(inputs).__name__,
                "Leave get_train_dataloader as it is.")  # fmt: skip
        batch = inputs.map(self._prepare_inputs)
        if not self._loss_is_known and batch.draw.mask.any():
            self._loss_is_known = self._loss.agrees(self.model, batch.data, super().compute_loss)
        model.train()
        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()
        report = self.private.forward_backward(batch, self._loss)
        return (report.loss if self.log_exact_loss else torch.zeros(())).detach().to(self.args.device)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As ever, with ε, and without exact losses of training data."""
        if not self.log_exact_loss:
            logs.pop("loss", None)
            logs.pop("train_loss", None)
        if self.private is not None:
            logs["epsilon"] = self.private.epsilon(self.delta)
        super().log(logs, *args, **kwargs)

    def floating_point_ops(self, inputs: Any) -> int:
        """0: how many there were would tell how many samples were drawn, and how long they are."""
        return 0

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """What the private run needs goes first: a checkpoint is whole when the Trainer has written its last file."""
        if self.args.should_save and self.private is not None:
            folder = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            (folder / COMPLETE).unlink(missing_ok=True)  # of an earlier run into the same folder
            checkpoint.write(folder / STATE, self.private.state_dict())
        super()._save_checkpoint(*args, **kwargs)


class _AsPlanned(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: PrivateTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        state.epoch = state.global_step / self.trainer.plan.sampling.steps(1)  # one may be resumed midway


class Draws:
    """What the Trainer iterates over: each time the draws of an epoch, or what is left of it."""

    def __init__(self, trainer: PrivateTrainer, loader: Any) -> None:
        self.trainer, self.dataset = trainer, loader.dataset
        self.options = kept_options(loader)

    def __len__(self) -> int:
        return self.trainer.plan.sampling.steps(1)

    def __iter__(self) -> Iterator[Batch]:
        if (private := self.trainer.private) is None:
            raise RuntimeError("Batches are drawn, and charged, by train(). To look at samples, take the dataset.")
        return iter(next(private.epochs(self.dataset, **self.options), ()))
