"""Private training with Hugging Face's Accelerate.

`dpscale.privatize` takes what ``accelerator.prepare`` gave, or is followed by it: either order works. `prepare` does
both, refuses settings under which steps would be lost, and adds the run to the checkpoints.
"""

from typing import Any

from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from dpscale.checks import require
from dpscale.plan import Plan
from dpscale.privatizing import privatize
from dpscale.training import Private


def prepare(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, plan: Plan, **options: Any
) -> tuple[nn.Module, Optimizer, Private]:
    """``accelerator.prepare`` and `privatize`; ``accelerator.save_state`` and ``load_state`` then know the run.

    Guarantee: as for `dpscale.privatize`.

    Batches come from ``private.batches(dataset)``, not from a loader that was prepared: draws are over all processes.
    A scheduler stays out of ``prepare`` too, where it would step once per process.

    Args:
        accelerator: one without gradient accumulation, whose share of a batch is a matter of ``micro_batch``.
        model, optimizer, plan, options: as for `dpscale.privatize`.

    Example:
        >>> import torch, dpscale; from torch.utils.data import TensorDataset
        >>> data = TensorDataset(torch.randn(200, 5), torch.randint(0, 2, (200,)))
        >>> plan = dpscale.Plan(scaling=dpscale.Clip(C=1.0), sampling=dpscale.Poisson(size=200, batch=20), steps=3)
        >>> model = nn.Linear(5, 2); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> accelerator = Accelerator(cpu=True)
        >>> plan = plan.calibrate(epsilon=3, delta=1e-4)
        >>> model, optimizer, private = prepare(accelerator, model, optimizer, plan)
        >>> for x, y in (batch.to(accelerator.device) for batch in private.batches(data)):
        ...     _ = private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        ...     optimizer.step(); optimizer.zero_grad()
        >>> private.steps_taken, private.epsilon() <= 3
        (3, True)
    """
    require(accelerator.gradient_accumulation_steps == 1, "prepare", "accelerator", "without gradient accumulation",
            accelerator.gradient_accumulation_steps, "Each draw is a step: raise the plan's batch, and pass "
            "micro_batch to bound the rows of a forward.")  # fmt: skip
    require(accelerator.mixed_precision != "fp16", "prepare", "accelerator", "without scaled losses", "fp16",
            "Use mixed_precision='bf16'.")  # fmt: skip
    model, optimizer = accelerator.prepare(model, optimizer)
    private = privatize(model, optimizer, plan, **options)
    accelerator.register_for_checkpointing(private)
    return model, optimizer, private
