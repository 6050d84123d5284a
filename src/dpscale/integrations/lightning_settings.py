"""What the settings of a Lightning trainer amount to: the plan for its limits, and what is refused."""

from typing import TYPE_CHECKING, Any

from dpscale.checks import require
from dpscale.one_call import plan_for
from dpscale.plan import Plan
from dpscale.sampling import Poisson
from dpscale.scaling import Scaling
from dpscale.training import Private

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

OWNER = "PrivateCallback"


def planned(
    plan: Plan | None, trainer: "Trainer", size: int, batch_size: int | None, *, batch: int | None,
    scaling: Scaling | None, epsilon: Any, delta: Any, accumulated: int = 1,
) -> Plan:  # fmt: skip
    """The plan given, or one for the budget and for as many steps as the trainer may take.

    Args:
        accumulated: batches of the loader that make up one draw.
    """
    if plan is not None:
        return plan
    if batch is None and batch_size is not None:
        batch = min(size, batch_size * trainer.world_size * accumulated)
    ok = isinstance(batch, int) and 1 <= batch <= size
    require(ok, OWNER, "batch", f"an integer from 1 to {size}", batch, "It is the expected batch over all ranks.")
    action = "The noise depends on the number of steps."
    require(trainer.max_epochs != -1 or trainer.max_steps != -1, "Trainer", "max_epochs", "given", -1, action)
    sampling = Poisson(size=size, batch=batch)  # type: ignore[arg-type]
    limits = [trainer.max_steps] if trainer.max_steps != -1 else []
    if trainer.max_epochs not in (None, -1):
        each, limit = sampling.steps(1), trainer.limit_train_batches  # a number of batches, or a part of them
        each = min(each, limit) if isinstance(limit, int) else int(each * limit)
        limits.append(trainer.max_epochs * max(1, each))  # as Lightning counts: whole epochs
    return plan_for(sampling, epsilon=epsilon, delta=delta, scaling=scaling, steps=min(limits))


def begun(private: Private | None) -> Private:
    """The run of a fit."""
    if private is None:
        raise RuntimeError(
            "Batches are drawn by fit(), with its PrivateCallback. A tuner (lr_find, scale_batch_size) leaves that "
            "out, and would train without privacy. Nothing was trained. Choose settings with dpscale.tune, or on "
            "public data."
        )
    return private


def check_new(private: Private | None) -> None:
    """Refuse to train a second time with one callback: it would forget what the first cost."""
    if private is not None and private.steps_taken:
        raise RuntimeError(
            "This PrivateCallback has trained already, and to train again costs again. Go on with "
            "fit(ckpt_path=...), or make a new one; a ledger adds them up."
        )


def check_saved(state: Any) -> None:
    """Refuse to go on from weights of which nobody knows the cost."""
    if not state:
        raise RuntimeError(
            "This checkpoint holds no private run, so nobody knows what its weights cost. If they are public, load "
            "them into the module, and call fit() without ckpt_path."
        )


def check_trainer(trainer: "Trainer") -> None:
    """Refuse settings that would change a private gradient, or that are not understood."""
    strategy, clip = type(trainer.strategy), trainer.gradient_clip_val
    changing = [type(each).__name__ for each in trainer.callbacks if hasattr(each, "going_to_accumulate_grad_batches")]  # type: ignore[attr-defined]
    known = {"SingleDeviceStrategy", "DDPStrategy"} & {each.__name__ for each in strategy.__mro__}
    for ok, name, must, got, action in (
        (known, "strategy", "one device, or 'ddp'", strategy.__name__, "No other is known here."),
        (not changing, "callbacks", "without one that changes accumulate_grad_batches", changing,
         "The batch of a plan stays: Trainer(accumulate_grad_batches=...) sets one for all of it."),
        (not clip, "gradient_clip_val", "None", clip,
         "Each sample is bounded already: PrivateCallback(scaling=dpscale.Clip(C=...)) says how."),
        (trainer.precision != "16-mixed", "precision", "one without loss scaling", trainer.precision,
         "Take 'bf16-mixed'."),
    ):  # fmt: skip
        require(bool(ok), "Trainer", name, must, got, action)
