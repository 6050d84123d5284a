"""Small models of every family that people train, with a batch and a loss each; the matrix runs over all of them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from dpscale.model_fix import fix

from ..seeding import seeded
from .cases import loss_fn

VOCABULARY = 11


@dataclass(frozen=True)
class Family:
    """How to build the model, ``batch(B)``, and per-sample losses.

    ``evaluation``: to be run in eval mode. ``single``: some of it runs in float32 whatever its own type is.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor] = loss_fn
    evaluation: bool = False
    single: bool = False


class Of(nn.Module):
    """A module made of others and a function of it and the input."""

    def __init__(self, run: Callable[..., Tensor], **modules: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, module in modules.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def floats(*shape: int) -> Callable[[int], tuple[Tensor]]:
    def batch(samples: int) -> tuple[Tensor]:
        return (torch.randn(samples, *shape, generator=seeded(1), dtype=torch.float64),)

    return batch


# Recurrent networks


def recurrent(kind: type, time_first: bool = False, last: bool = False, **options: Any) -> nn.Module:
    """All outputs, or only the last states, of a recurrent network, as (B, ...)."""

    def run(self: Any, x: Tensor) -> Tensor:
        out, state = self.net(x.transpose(0, 1) if time_first else x)
        if last:
            states = state if isinstance(state, tuple) else (state,)
            return torch.cat([s.transpose(0, 1).flatten(1) for s in states], 1)
        return out.transpose(0, 1) if time_first else out

    return Of(run, net=kind(3, 4, batch_first=not time_first, **options))


def cells(self: Any, x: Tensor) -> Tensor:
    h, state = None, None
    for x_t in x.unbind(1):
        h = self.gru(x_t, h)
        state = self.lstm(h, state)
    return torch.cat([h, *state], 1)


# Attention


def attention(self: Any, x: Tensor) -> Tensor:
    return self.net(x, x, x, need_weights=False)[0]


def cross_attention(self: Any, x: Tensor) -> Tensor:
    x = x.transpose(0, 1)
    return self.net(x, x.flip(0)[..., :3], x[..., :2])[0].transpose(0, 1)


def masked_encoder(self: Any, x: Tensor) -> Tensor:
    return self.net(x, src_key_padding_mask=x[..., 0] > 1)


def decoder(self: Any, x: Tensor) -> Tensor:
    mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
    return self.net(x, self.memory(x), tgt_mask=mask, tgt_is_causal=True)


def encoder_layer(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, 6, **({"dropout": 0.0, "batch_first": True} | options))


# Convolutions


class ResNet9(nn.Module):
    """As in the literature on private CIFAR, with GroupNorm and Mish, only thinner, and with one residual block."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        w = width

        def block(i: int, o: int, pool: bool = False) -> nn.Module:
            layers = [nn.Conv2d(i, o, 3, padding=1, bias=False), nn.GroupNorm(2, o), nn.Mish(inplace=True)]
            return nn.Sequential(*layers, *([nn.MaxPool2d(2)] if pool else []))

        self.prep, self.layer1 = block(3, w), block(w, 2 * w, True)
        self.res1 = nn.Sequential(block(2 * w, 2 * w), block(2 * w, 2 * w))
        self.layer2 = nn.Sequential(nn.Conv2d(2 * w, 2 * w, 3, padding=1), nn.ReLU(inplace=True))
        self.pool, self.head = nn.AdaptiveMaxPool2d(1), nn.Linear(2 * w, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer1(self.prep(x))
        x = self.layer2(x + self.res1(x))
        return self.head(self.pool(x).flatten(1))


def fixed_batch_norm() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6)
    )
    assert len(fix(model)) == 2
    return model


# Hugging Face: from configurations, with random weights, never from the net


def gpt2(**options: Any) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    zero = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    size = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**(size | zero | options)))


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16}
    return LlamaForCausalLM(LlamaConfig(**(size | heads | options)))


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    size = {"vocab_size": VOCABULARY, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    rest = {"num_attention_heads": 2, "max_position_embeddings": 16}
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForSequenceClassification(BertConfig(**(size | rest | zero | options)))


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    size = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    image = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 3}
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ViTForImageClassification(ViTConfig(**size, **image, **zero))


def lora(model: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    """Adapters with random weights on both sides: at the usual zeros, half of the gradients vanish."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, init_lora_weights=False, **options))


def text(samples: int) -> dict[str, Tensor]:
    """Tokens with padding, whose labels are ignored; the first sample's prompt is ignored too."""
    tokens = torch.randint(1, VOCABULARY, (samples, 7), generator=seeded(1))
    attend = torch.ones_like(tokens)
    attend[1::2, 5:] = 0
    labels = tokens.masked_fill(attend == 0, -100)
    labels[0, :3] = -100
    return {"input_ids": tokens, "attention_mask": attend, "labels": labels}


def language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Each sample's mean over its own counted tokens."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


def classes(inputs: Callable[[int], dict[str, Tensor]]) -> Callable[[int], dict[str, Tensor]]:
    return lambda samples: inputs(samples) | {"labels": torch.arange(samples) % 2}


def classifier_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    inputs = {k: v for k, v in batch.items() if k != "labels"}
    return F.cross_entropy(model(**inputs).logits, batch["labels"], reduction="none")


def checkpointed(reentrant: bool | None) -> nn.Module:
    """None: the same model without checkpoints."""

    def run(self: Any, x: Tensor) -> Tensor:
        h = torch.tanh(self.a(x))
        return self.c(self.b(h) if reentrant is None else checkpoint(self.b, h, use_reentrant=reentrant))

    inner = nn.Sequential(nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 4))
    return Of(run, a=nn.Linear(3, 4), b=inner, c=nn.Linear(4, 2))


def parametrized(change: Callable[..., nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(change(nn.Linear(4, 4)), nn.Tanh(), nn.Linear(4, 2))


FAMILIES: dict[str, Family] = {
    "lstm": Family(lambda: recurrent(nn.LSTM, num_layers=2, bidirectional=True), floats(3, 3)),
    "gru": Family(lambda: recurrent(nn.GRU, time_first=True, last=True, bidirectional=True), floats(5, 3)),
    "rnn": Family(lambda: recurrent(nn.RNN, bias=False, nonlinearity="relu"), floats(5, 3)),
    "cells": Family(lambda: Of(cells, gru=nn.GRUCell(3, 4), lstm=nn.LSTMCell(4, 2)), floats(4, 3)),
    "attention": Family(lambda: Of(attention, net=nn.MultiheadAttention(4, 2, batch_first=True)), floats(5, 4)),
    "cross-attention": Family(
        lambda: Of(cross_attention, net=nn.MultiheadAttention(4, 2, kdim=3, vdim=2, add_bias_kv=True)), floats(5, 4)
    ),
    "encoder": Family(lambda: nn.TransformerEncoder(encoder_layer(), 2), floats(5, 4)),
    "encoder-in-eval-mode": Family(
        lambda: Of(masked_encoder, net=nn.TransformerEncoder(encoder_layer(dropout=0.3), 1)),
        floats(5, 4),
        loss_fn,
        True,
    ),
    "decoder": Family(
        lambda: Of(
            decoder,
            net=nn.TransformerDecoder(nn.TransformerDecoderLayer(4, 2, 6, dropout=0.0, batch_first=True), 1),
            memory=nn.Linear(4, 4),
        ),
        floats(5, 4),
    ),
    "checkpointed": Family(lambda: checkpointed(reentrant=False), floats(5, 3)),
    "gpt2": Family(gpt2, text, language_loss),
    "llama": Family(llama, text, language_loss, single=True),
    "bert": Family(bert, classes(text), classifier_loss),
    "vit": Family(vit, classes(lambda b: {"pixel_values": floats(1, 8, 8)(b)[0]}), classifier_loss),
    "lora-gpt2": Family(lambda: lora(gpt2(), ["c_attn"], fan_in_fan_out=True), text, language_loss),
    "lora-llama": Family(lambda: lora(llama(), ["q_proj", "v_proj"], use_dora=True), text, language_loss, single=True),
    "lora-linear": Family(
        lambda: lora(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), ["0", "2"]), floats(4)
    ),
    "weight-norm": Family(parametrized(parametrizations.weight_norm), floats(4)),
    "orthogonal": Family(parametrized(parametrizations.orthogonal), floats(4)),
    "spectral-norm": Family(parametrized(parametrizations.spectral_norm), floats(4), loss_fn, True),
    "resnet9": Family(ResNet9, floats(3, 8, 8)),
    "fixed-batch-norm": Family(fixed_batch_norm, floats(2, 4, 4)),
}


def make(family: Family, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The model, moved away from its initial values, where some gradients vanish."""
    torch.manual_seed(0)
    model = family.build().to(dtype).train(not family.evaluation)
    for p in model.parameters():
        p.data += 0.3 * torch.randn_like(p)
    return model
