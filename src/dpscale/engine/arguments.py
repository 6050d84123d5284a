"""What the engine is given: checked once, at its boundary."""

import copy
import math
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dpscale.checks import complaint
from dpscale.engine.compat import is_tree_node, register_tree_node, tree_leaves, tree_structure
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.modules import PLAIN, Structure

LossFn = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch) -> losses``, one per sample, shape (B,)."""

Points = Sequence[tuple[float | Tensor, Mapping[str, Tensor]]]
"""``[(coefficient, {parameter name: tensor}), ...]``: released weights over which gradients are combined."""


def trainable(found: Structure) -> dict[str, Tensor]:
    """The parameters to train, by name; a tied parameter appears once."""
    parameters = found.trainable
    if not parameters:
        raise ValueError("The model has no trainable parameter. Set requires_grad_(True) on what should be trained.")
    return dict(parameters)


def check_loss_fn(owner: str, loss_fn: Any) -> None:
    """It is called with a model and a batch. What is usually given by mistake takes outputs and labels."""
    made = loss_fn if isinstance(getattr(loss_fn, "__module__", None), str) else type(loss_fn)
    of_outputs = made.__module__ in ("torch.nn.modules.loss", "torch.nn.functional")
    if of_outputs or not callable(loss_fn):
        got = getattr(loss_fn, "__name__", type(loss_fn).__name__)
        action = "Write def loss_fn(model, batch): x, y = batch; return cross_entropy(model(x), y, reduction='none')."
        raise complaint(owner, "loss_fn", "a function of the model and a batch", got, action)


def require_finite(model: nn.Module) -> None:
    """Refuse a model with NaN or infinite parameters: no gradient of it means anything."""
    for name, p in model.named_parameters():
        if not bool(torch.isfinite(p.sum())) and not bool(torch.isfinite(p).all()):  # the sum takes one pass
            raise ValueError(
                f"Parameter {name!r} holds NaN or infinity, so every sample's gradient does. Nothing was released. "
                "Load or initialize the model again; if it diverged, lower the learning rate."
            )


def require_real(parameters: Mapping[str, Tensor]) -> None:
    """Refuse complex parameters."""
    for name, p in parameters.items():
        if p.is_complex():
            raise UnsupportedModel(
                f"Parameter {name!r} is complex, and the norms of complex gradients are not known here. Keep its real "
                "and imaginary part as a parameter of real numbers, and use torch.view_as_complex in the forward."
            )


def see_into(data: Any) -> None:
    """Let torch's trees see into mappings of any type, such as ``BatchEncoding``: they see dictionaries only."""
    if isinstance(data, MutableMapping) and not is_tree_node(type(data)):
        made_of: Any = type(data)
        register_tree_node(made_of, lambda mapping: (list(mapping.values()), tuple(mapping)),
                           lambda values, names: made_of(dict(zip(names, values, strict=True))))  # fmt: skip
    for value in data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ():
        if isinstance(value, (Mapping, list, tuple)):
            see_into(value)


def plain_tensors(batch: Any) -> list[Tensor] | None:
    """Those of a batch that consists of tensors alone, with nothing inside of anything, as most do; else None."""
    values = list(batch) if type(batch) in (tuple, list) else list(batch.values()) if type(batch) is dict else [batch]
    return values if all([isinstance(value, Tensor) for value in values]) else None


def leaves_of(batch: Any) -> list[Any]:
    """What a batch consists of; of the most usual ones without a walk."""
    if (tensors := plain_tensors(batch)) is not None:
        return list(tensors)
    see_into(batch)
    return tree_leaves(batch)


def tensors_in(batch: Any) -> list[Tensor]:
    """The tensors of a batch."""
    tensors = plain_tensors(batch)
    return [t for t in leaves_of(batch) if isinstance(t, Tensor)] if tensors is None else tensors


def batch_size(batch: Any) -> tuple[int, torch.device]:
    """The common first dimension of a batch's tensors, and their device."""
    tensors = tensors_in(batch)
    if not tensors:
        action = "Pass tensors: of a DataLoader next(iter(loader)), of arrays torch.as_tensor(...)."
        raise complaint("scaled_sum", "batch", "a pytree that holds at least one tensor", type(batch).__name__, action)
    sizes = [t.shape[0] if t.ndim else None for t in tensors]  # compared, not hashed: a symbol cannot be
    if sizes[0] is None or any(size != sizes[0] for size in sizes):
        must, shapes = "tensors that agree in their first dimension, the batch", [tuple(t.shape) for t in tensors]
        raise complaint("scaled_sum", "batch", must, shapes, "Put what is not per sample into loss_fn's closure.")
    return tensors[0].shape[0], tensors[0].device


def rows_of(data: Any) -> int | None:
    """How many rows the tensors of a batch have; None if they do not agree, or if there are none."""
    sizes = {len(t) if t.ndim else None for t in tensors_in(data)}
    return sizes.pop() if len(sizes) == 1 else None


def device_of(data: Any) -> torch.device:
    """Where the first tensor of a batch is; the CPU if there is none."""
    return next((t.device for t in tensors_in(data)), torch.device("cpu"))


def check_losses(losses: Any, samples: int) -> Tensor:
    """Losses must be one number per sample."""
    if not isinstance(losses, Tensor) or losses.shape != (samples,):
        got = f"shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        raise ValueError(
            f"The losses must be per sample, of shape ({samples},). Got {got} instead. Compute the loss with "
            "reduction='none'; average over positions within a sample, never over the batch."
        )
    return losses


def check_mask(owner: str, mask: Tensor | None, samples: int, device: torch.device) -> Tensor:
    """A bool per sample; all True when none is given."""
    if mask is None:
        return torch.ones(samples, dtype=torch.bool, device=device)
    if not isinstance(mask, Tensor) or mask.shape != (samples,) or mask.dtype != torch.bool:
        got = f"{mask.dtype} of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else mask
        must = f"a bool tensor of shape ({samples},), one entry per sample"
        raise complaint(owner, "mask", must, got, "True keeps a sample.")
    return mask.to(device)


def check_points(points: Points | None, parameters: Mapping[str, Tensor]) -> Points | None:
    """Every point must give every trainable parameter a tensor of its shape."""
    if points is not None and not len(points):
        raise complaint("scaled_sum", "points", "None, or at least one point", points)
    for coefficient, values in points or ():
        if isinstance(coefficient, bool) or not isinstance(coefficient, (int, float)) or not math.isfinite(coefficient):
            raise complaint("scaled_sum", "points", "with finite coefficients", coefficient)
        wrong = [n for n, p in parameters.items() if n not in values or values[n].shape != p.shape]
        if wrong:
            must = "weights with the names and shapes of the trainable parameters"
            got, action = f"a point without a fitting {wrong[:3]}", "Take them from dict(model.named_parameters())."
            raise complaint("scaled_sum", "points", must, got, action)
    return points


def has_rows(rows: Any, count: int) -> bool:
    """Whether a tensor or a list of plain values has so many rows."""
    return (not isinstance(rows, Tensor) or rows.ndim > 0) and len(rows) == count


def over_rows(data: Any, change: Callable[[Any], Any], count: int | None = None, leaf: type = Tensor) -> Any:
    """A batch with a change of its tensors and, where ``count`` is given, of its lists of so many plain values.

    Args:
        leaf: what is changed in place of tensors; then nothing else is.
    """
    if isinstance(data, leaf) or (count is not None and _plain_rows(data, count)):
        return change(data)
    if isinstance(data, MutableMapping):
        changed = copy.copy(data)
        for name, value in data.items():
            changed[name] = over_rows(value, change, count, leaf)
        return changed
    if isinstance(data, Mapping):
        return {name: over_rows(value, change, count, leaf) for name, value in data.items()}
    if isinstance(data, (list, tuple)):
        values = [over_rows(value, change, count, leaf) for value in data]
        return type(data)(*values) if hasattr(data, "_fields") else type(data)(values)
    return change(data) if count is None and leaf is Tensor and hasattr(data, "to") else data


def part_of(data: Any, part: slice, count: int) -> Any:
    """The rows ``part`` of whatever in a batch has ``count`` of them, lists of plain values included."""
    if part == slice(0, count) and type(data) is tuple and plain_tensors(data) is not None:
        return data  # which nobody can take anything out of
    return over_rows(data, lambda rows: rows[part] if has_rows(rows, count) else rows, count)


def _plain_rows(data: Any, count: int) -> bool:
    """Whether it is a list of a plain value for each sample: names, say."""
    listed = isinstance(data, (list, tuple)) and not hasattr(data, "_fields")
    return listed and len(data) == count and all(isinstance(value, PLAIN) for value in data)


def shapes_of(batch: Any) -> Any:
    """The shape of one sample. The number of samples is no part of it."""
    return tuple([t.shape[1:] for t in tensors_in(batch)])


def kind_of(found: Structure, batch: Any) -> Any:
    """When this changes, what was found out about a model of that structure may no longer hold."""
    return (
        *found.switches(),
        _tree_of(batch),
        tuple([t.dtype for t in tensors_in(batch)]),
        *[(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")],
    )


def _tree_of(batch: Any) -> Any:
    """How a batch is put together, whatever the number of its rows."""
    if type(batch) in (tuple, list) and all([isinstance(value, Tensor) for value in batch]):
        return type(batch), len(batch)
    return str(tree_structure(over_rows(batch, lambda rows: 0, batch_size(batch)[0])))
