"""Before training: what would be refused, why, and what to change."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dpscale.batches import Batch
from dpscale.checks import quiet
from dpscale.engine import Engine, LossFn, UnsupportedModel, batch_size, check_losses, require_finite, trainable
from dpscale.engine.arguments import check_loss_fn
from dpscale.engine.modules import structure
from dpscale.engine.verify.runs import Subject
from dpscale.model_fix import fixable
from dpscale.packing import Padded, holds, over_packed, unpacked


@dataclass(frozen=True)
class CheckReport:
    """What `check` found. It prints as plain sentences, and is true if the model can be trained.

    Attributes:
        refusal: why it would be refused, and what to do; empty if it would not.
        notes: what is worth knowing all the same, such as that it runs sample by sample.
    """

    refusal: str = ""
    notes: list[str] = field(default_factory=list)

    def __bool__(self) -> bool:
        return not self.refusal

    def __str__(self) -> str:
        first = f"Refused. {self.refusal}" if self.refusal else "Samples are kept apart: this model can be trained."
        return "\n".join([first, *(f"- {note}" for note in self.notes)])


def check(model: nn.Module, loss_fn: LossFn, batch: Any) -> CheckReport:
    """Look at a model and its loss as the first private step would. Nothing is changed, trained or released.

    Args:
        model: the module to be trained, in the mode in which it will be.
        loss_fn: ``loss_fn(model, batch)`` -> one loss per sample, shape (B,).
        batch: a batch of real data, of 8 rows or more that differ. What the rows do not show cannot be seen; in
            training the same look is taken again at other rows.

    Example:
        >>> import torch, dpscale; from torch import nn
        >>> def loss_fn(model, batch):
        ...     return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
        >>> batch = torch.randn(16, 4), torch.randint(0, 2, (16,))
        >>> print(dpscale.check(nn.Linear(4, 2), loss_fn, batch))
        Samples are kept apart: this model can be trained.
        >>> bool(dpscale.check(nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)), loss_fn, batch))
        False
    """
    check_loss_fn("check", loss_fn)
    data = unpacked(batch.data if isinstance(batch, Batch) else batch)
    loss_fn = over_packed(loss_fn) if holds(data, Padded) else loss_fn
    samples, device = batch_size(data)

    def run(rows: Any) -> Tensor:
        return check_losses(loss_fn(model, rows), batch_size(rows)[0])

    notes = [f"{len(layers)} layers couple samples: dpscale.fix(model) replaces them."] if (
        layers := fixable(model)) else []  # fmt: skip
    engine = Engine(model)
    try:
        with quiet("dpscale"):  # what would be logged is in the report
            require_finite(model)
            found = structure(model)
            subject = Subject(model, trainable(found), run, loss_fn)
            kind = engine.trust(subject, found, data, torch.ones(samples, dtype=torch.bool, device=device)).kind
    except (UnsupportedModel, ValueError) as error:
        return CheckReport(str(error), notes)
    obstacle = engine.obstacle(kind)
    if obstacle is not None:
        notes.append(f"private.step runs it sample by sample, which is exact and slow: {obstacle}.")
        notes.append("In a loop of your own (private.backward) it would be refused.")
    frozen = sum(not p.requires_grad for p in model.parameters())
    if frozen:
        notes.append(f"{frozen} parameters are frozen and stay as they are.")
    if samples < 8:
        notes.append(f"The batch has {samples} rows: coupling that they do not show is looked for again in training.")
    return CheckReport("", notes)
