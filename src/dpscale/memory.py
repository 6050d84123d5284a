"""What is said when a batch does not fit into memory, or is on another device than the model."""

from typing import Any

from torch import nn

from dpscale.checks import out_of_memory
from dpscale.engine.arguments import device_of


class TooLarge(MemoryError):
    """So many samples do not fit into memory."""

    def __init__(self, rows: int, action: str) -> None:
        super().__init__(
            f"A micro-batch of {rows} rows does not fit into memory. Nothing was released. "
            f"{action.replace('{}', str(max(1, rows // 2)))}: the result does not depend on it."
        )
        self.rows = rows


MICRO_BATCH = "Call privatize(..., micro_batch={}) and private.step(batch, loss_fn)"


def explain_memory(error: RuntimeError, rows: int, action: str = MICRO_BATCH) -> None:
    """Say what to do, if the error is that a micro-batch does not fit."""
    if out_of_memory(error):
        raise TooLarge(rows, action) from error


def explain_devices(error: RuntimeError, data: Any, model: nn.Module) -> None:
    """Say what to do, if the error is that batch and model are on different devices: ``loss_fn`` may move them, so it
    is tried."""
    if "same device" in str(error):
        model_on = next((p.device for p in model.parameters()), "cpu")
        raise ValueError(
            f"Tensors are on different devices: the batch on {device_of(data)}, the model on {model_on}. Nothing was "
            f"released. Call private.step(batch.to({str(model_on)!r}), loss_fn)."
        ) from error
