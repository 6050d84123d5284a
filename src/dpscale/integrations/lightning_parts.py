"""What `PrivateCallback` puts in the place of parts of Lightning: the loader, the training step, the trainer."""

import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from dpscale.batches import Batch
from dpscale.checks import complaint, require
from dpscale.integrations.lightning_settings import OWNER
from dpscale.one_call import say_drawn, taken_apart
from dpscale.plan import Plan
from dpscale.training import Private

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

log = logging.getLogger("dpscale")


class Draws:
    """In place of a loader: the draws of a plan, of which each epoch takes the next ones.

    Args:
        trainer: whose precision the rows get, and which stops when no draw is left.
        loader: of which the dataset is drawn from, and all options are kept that do not sample.
        plan_for: gives the plan for ``(trainer, size, batch size of the loader)``.
        private: gives the run, once there is one.
    """

    def __init__(
        self, trainer: "Trainer", loader: Any, plan_for: Callable[..., Plan], private: Callable[[], Private]
    ) -> None:
        given = type(loader).__name__
        require(isinstance(loader, DataLoader), OWNER, "train_dataloader", "one torch DataLoader", given)
        self._dataset, self._options = taken_apart(loader, None, OWNER, "train_dataloader")
        self.batch_size = loader.batch_size
        self.plan = plan_for(trainer, len(self._dataset), loader.batch_size)  # type: ignore[arg-type]
        self._trainer, self._private = trainer, private
        say_drawn(self.plan)
        log.info("dpscale: %d steps in all.", self.plan.steps)

    def __len__(self) -> int:
        return self.plan.sampling.steps(1)

    def __iter__(self) -> Iterator[Batch]:
        private = self._private()
        private.remember(self, self._dataset, self._options)  # samples are collated as the loader would
        batches = private.batches()  # the trainer ends an epoch, by `__len__`
        if not len(batches):
            self._trainer.should_stop = True
        for batch in batches:
            yield batch.map(self._trainer.precision_plugin.convert_input)

    def state_dict(self) -> dict[str, Any]:
        """Nothing, as the run knows where it is; but Lightning takes a loader with these methods for resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to do."""


class TrainingStep(nn.Module):
    """A whole ``training_step`` as a forward, so that all of it is looked at, not only the network."""

    def __init__(self, module: "LightningModule") -> None:
        super().__init__()
        self.module, self._step = module, module.training_step

    def forward(self, *args: Any) -> Tensor:
        """The losses."""
        found = self._step(*args)
        return per_sample(found.get("loss") if isinstance(found, Mapping) else found)


def per_sample(losses: Any) -> Tensor:
    """The losses, if there is one for each sample."""
    if isinstance(losses, Tensor) and losses.ndim == 1:
        return losses
    got = f"a tensor of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
    raise complaint(OWNER, "training_step", "a method whose losses are one per sample, shape (B,)", got,
                    "Pass reduction='none', and take no mean over the batch.")  # fmt: skip


def network(module: "LightningModule") -> nn.Module:
    """What a forward is watched on with manual optimization: the module, or its one trained part if it has none."""
    if type(module).forward.__qualname__ != "LightningModule.forward":
        return module
    parts = [child for child in module.children() if any(p.requires_grad for p in child.parameters())]
    action = "With manual optimization the forward is watched."
    require(len(parts) == 1, OWNER, "forward", "a method of the module that training_step calls", None, action)
    return parts[0]


class Unseen:
    """A trainer as its module sees it, without what a look at the module would walk through: all of the trainer.

    What a ``training_step`` writes into its trainer is therefore neither noticed nor put back.
    """

    __slots__ = ("_of",)

    def __init__(self, of: Any) -> None:
        object.__setattr__(self, "_of", of)

    def __getattr__(self, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._of, name, value)


def say_dropped(*args: Any, **kwargs: Any) -> None:
    """In place of ``log`` in a training step."""
    _warn_once("dpscale: what training_step logs is exact, and no noise hides it: it is dropped. Log in validation.")


_warn_once = cache(log.warning)  # a look runs the step too, and would put back a flag of ours
