"""The loss of each sample from a Hugging Face model, whose own loss is one number for the whole batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

IGNORED = -100
"""The label of a token that has none."""


@dataclass(frozen=True)
class PerSampleLoss:
    """``loss_fn(model, data)`` for `dpscale.Private.step`: for each sample the loss that its model has for it alone.

    Where labels belong to tokens it is the mean over the sample's *own* tokens, those labelled -100 left out: a mean
    over the tokens of a batch would make one sample's part depend on how long the others are.

    Args:
        shift: whether the label of a token is the next one, as in causal language models.
        regression: whether labels that are not whole numbers are targets, not probabilities of several classes.
        keep_labels: whether the model needs them in its forward: decoders are fed with them.
        smoothing: of labels.
        own: ``own(outputs, labels, num_items_in_batch=None)`` -> losses, in place of all this.
    """

    shift: bool
    regression: bool
    keep_labels: bool
    smoothing: float = 0.0
    own: Callable[..., Tensor] | None = None

    @staticmethod
    def of(model: nn.Module, smoothing: float = 0.0, own: Callable[..., Tensor] | None = None) -> "PerSampleLoss":
        """The one that fits a model, by its class and its configuration."""
        inside: Any = getattr(model, "get_base_model", None)  # of PEFT's wrapper
        base: Any = model if inside is None else inside()
        config = getattr(base, "config", None)
        decodes = bool(getattr(config, "is_encoder_decoder", False))
        causal = getattr(base, "loss_type", None) in ("ForCausalLM", "ForConditionalGeneration")
        named = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        regression = getattr(config, "problem_type", None) == "regression" or getattr(config, "num_labels", 0) == 1
        return PerSampleLoss((causal or named) and not decodes, regression, decodes, smoothing, own)

    def __call__(self, model: nn.Module, data: Any) -> Tensor:
        """The losses, shape (B,)."""
        inputs = dict(data)
        labels = inputs.get("labels")
        if not self.keep_labels:
            inputs.pop("labels", None)
        ends = inputs.pop("start_positions", None), inputs.pop("end_positions", None)
        outputs = model(**inputs)
        if self.own is not None:
            return self.own(outputs, labels, num_items_in_batch=None)
        logits = outputs.get("logits") if isinstance(outputs, Mapping) else None
        if ends[0] is not None and ends[1] is not None:
            logits, labels = _of_an_answer(outputs["start_logits"], outputs["end_logits"], *ends)
        if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
            raise unknown_loss(model, "it gives no logits, or its inputs have no labels")
        return self._of(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels, model)

    def agrees(self, model: nn.Module, data: Any, theirs: Callable[[nn.Module, dict[str, Any]], Tensor]) -> bool:
        """Whether the loss of the first sample is the one that the model has for it alone; refuses another.

        False where that cannot be said, since no token has a label.
        """
        if self.own is not None:
            return True
        row = {name: value[:1] if isinstance(value, Tensor) else value for name, value in data.items()}
        model.eval()
        with torch.no_grad():
            ours, its = self(model, row)[0], theirs(model, dict(row))
        rounding = 1e-3 if its.dtype == torch.float32 else 2e-2
        if its.isfinite() and not torch.allclose(ours.float(), its.float(), rtol=rounding, atol=rounding):
            raise unknown_loss(model, f"{its:.4g} is its loss of a sample where {ours:.4g} is expected")
        return bool(its.isfinite())

    def _of(self, logits: Tensor, labels: Tensor, model: nn.Module) -> Tensor:
        samples = len(labels)
        if labels.is_floating_point() and logits.numel() == labels.numel():
            loss = F.mse_loss if self.regression else F.binary_cross_entropy_with_logits
            return loss(logits.reshape(labels.shape), labels, reduction="none").reshape(samples, -1).mean(1)
        if labels.is_floating_point() or logits.shape[:-1] != labels.shape:
            raise unknown_loss(model, f"logits {list(logits.shape)} do not fit labels {list(labels.shape)}")
        if self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        tokens, kept = labels.reshape(-1), (labels != IGNORED).reshape(samples, -1)
        flat = logits.reshape(len(tokens), -1)
        losses = F.cross_entropy(flat, tokens, ignore_index=IGNORED, reduction="none", label_smoothing=self.smoothing)
        return losses.reshape(samples, -1).sum(1) / kept.sum(1).clamp(min=1)


def _of_an_answer(start: Tensor, end: Tensor, *places: Tensor) -> tuple[Tensor, Tensor]:
    """Where an answer begins and ends, as two labels; one that lies outside the text is none."""
    logits, labels = torch.stack([start, end], 1), torch.stack([place.reshape(-1) for place in places], 1)
    return logits, torch.where((labels < 0) | (labels >= logits.shape[-1]), IGNORED, labels)


def unknown_loss(model: nn.Module, why: str) -> ValueError:
    """To be raised where the loss of a sample cannot be computed, or is another than the model's."""
    return ValueError(
        f"The loss of a single sample is not known for {type(model).__name__}: {why}. Nothing was released. Pass "
        "compute_loss_func=f, where f(outputs, labels, num_items_in_batch) gives one loss per sample, shape (B,)."
    )
