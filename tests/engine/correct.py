"""Correct models that are easily taken for something else: each row's loss depends on that row alone.

In eval mode none of them draws a random number: there they are compared with the oracle. Some draw in train mode
(noise, dropout, dropped layers), and there they must be accepted and keep the bound.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributions as td
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ..seeding import seeded
from .families import VOCABULARY, Of, classes, classifier_loss, gpt2, language_loss, llama, text

D = torch.float64


@dataclass(frozen=True)
class Correct:
    """How to build the model, ``batch(B)``, and per-sample losses.

    ``draws``: it draws random numbers in train mode. ``single``: parts of it run in float32 whatever its type is.
    ``spread``: how far the parameters are moved from where they begin, at which some gradients vanish.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss: Callable[[Any, Any], Tensor]
    draws: bool = False
    single: bool = False
    spread: float = 0.3


def make(case: Correct, dtype: torch.dtype | None = None) -> nn.Module:
    """The model in eval mode, moved away from its initial values."""
    torch.manual_seed(0)
    model = case.build().to(dtype or (torch.float32 if case.single else D)).eval()
    for p in model.parameters():
        p.data += case.spread * torch.randn_like(p)
    return model


def batch_of(case: Correct, samples: int, dtype: torch.dtype | None = None) -> Any:
    """A batch in the type of the model's parameters."""
    batch = case.batch(samples)
    if (dtype or (torch.float32 if case.single else D)) is D:
        return batch
    single = {k: v.float() if v.is_floating_point() else v for k, v in batch.items()}
    return type(batch)(single)


def numbers(samples: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randn(samples, *shape, generator=seeded(seed), dtype=D)


def integers(high: int, samples: int, *shape: int, low: int = 0, seed: int = 2) -> Tensor:
    return torch.randint(low, high, (samples, *shape), generator=seeded(seed))


# Whatever raises on NaN


class VAE(nn.Module):
    def __init__(self, distributions: bool) -> None:
        super().__init__()
        self.encode, self.decode, self.distributions = nn.Linear(6, 8), nn.Linear(4, 6), distributions

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, log_variance = self.encode(x).chunk(2, 1)
        std = (log_variance / 2).exp()
        if self.distributions:
            posterior = td.Normal(mean, std)
            z = posterior.rsample() if self.training else posterior.mean
            prior = td.Normal(torch.zeros_like(mean), torch.ones_like(mean))
            return self.decode(z), td.kl_divergence(posterior, prior).sum(1)
        z = mean + std * torch.randn_like(std) if self.training else mean
        return self.decode(z), -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1)


def elbo(model: Any, batch: dict[str, Tensor]) -> Tensor:
    reconstruction, divergence = model(batch["x"])
    return (reconstruction - batch["x"]).square().sum(1) + divergence


def mixture_density(model: Any, batch: dict[str, Tensor]) -> Tensor:
    weights, means, spreads = model(batch["x"]).chunk(3, 1)
    parts = td.Normal(means, F.softplus(spreads) + 1e-3)
    return -td.MixtureSameFamily(td.Categorical(logits=weights), parts).log_prob(batch["y"])


def discrete_policy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    policy = td.Categorical(logits=model(batch["x"]))
    return -policy.log_prob(batch["action"]) * batch["y"] - 0.01 * policy.entropy()


def continuous_policy(model: Any, batch: dict[str, Tensor]) -> Tensor:
    mean, log_std = model(batch["x"]).chunk(2, 1)
    policy = td.Independent(td.Normal(mean, log_std.clamp(-3, 2).exp()), 1)
    return -policy.log_prob(batch["x"][:, :3]) * batch["y"]


def covariance(entries: Tensor) -> Tensor:
    root = entries.view(-1, 2, 2)
    return root @ root.mT + torch.eye(2, dtype=root.dtype)


def gaussian(model: Any, batch: dict[str, Tensor]) -> Tensor:
    out = model(batch["x"])
    return -td.MultivariateNormal(out[:, :2], covariance(out[:, 2:])).log_prob(batch["x"][:, :2])


def log_determinant(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return torch.linalg.cholesky(covariance(model(batch["x"]))).diagonal(dim1=1, dim2=2).log().sum(1)


def solved(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return torch.linalg.solve(covariance(model(batch["x"])), batch["x"][:, :2]).square().sum(1)


def table(samples: int) -> dict[str, Tensor]:
    """Numbers, and one column of category ids among them; rewards; actions; labels as floats."""
    ids = integers(9, samples, 1).to(D)
    actions, labels = integers(3, samples, seed=3), integers(2, samples, seed=4).to(D)
    x = numbers(samples, 6)
    return {"x": x, "ids": torch.cat([x, ids], 1), "y": numbers(samples, seed=5), "action": actions, "label": labels}


class Categories(nn.Module):
    """Ids that come as floats in a table of numbers, as tabular data do."""

    def __init__(self, one_hot: bool) -> None:
        super().__init__()
        self.table = None if one_hot else nn.Embedding(9, 4)
        self.out = nn.Linear(6 + (9 if one_hot else 4), 1)

    def forward(self, x: Tensor) -> Tensor:
        ids = x[:, 6].long()
        found = F.one_hot(ids, 9).to(x.dtype) if self.table is None else self.table(ids)
        return self.out(torch.cat([x[:, :6], found], 1)).squeeze(1)


def on_table(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["ids"]) - batch["y"]).square()


def one_hot_labels(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return -(F.one_hot(batch["label"].long(), 2) * model(batch["x"]).log_softmax(1)).sum(1)


def on_sigmoid(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.binary_cross_entropy(model(batch["x"]).sigmoid().squeeze(1), batch["label"], reduction="none")


class Checked(nn.Module):
    """Refuses what is not finite, before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1))

    def forward(self, x: Tensor) -> Tensor:
        if not torch.isfinite(x).all():
            raise ValueError("The input is not finite.")
        out = self.net(x).squeeze(1)
        if not torch.isfinite(out).all():
            raise ValueError("The output is not finite.")
        return out


def squared(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square()


def ctc(model: Any, batch: dict[str, Tensor]) -> Tensor:
    log_probabilities = model(batch["frames"]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(
        log_probabilities, batch["targets"], batch["frame_count"], batch["target_count"], reduction="none"
    )


def speech(samples: int) -> dict[str, Tensor]:
    rows = torch.arange(samples)
    return {
        "frames": numbers(samples, 9, 3),
        "targets": integers(5, samples, 3, low=1),
        "frame_count": 9 - rows % 3,
        "target_count": 3 - rows % 2,
    }


# Layers that are left out at random


class Residual(nn.Module):
    """Layers of which some are left out: for the whole batch (torch's or Python's dice), or for each sample."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)), how
        self.out = nn.Linear(6, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if not self.training:
                x = x + torch.tanh(layer(x))
            elif self.how == "sample":
                kept = torch.rand(len(x), 1, dtype=x.dtype) < 0.7
                x = x + torch.tanh(layer(x)) * kept / 0.7
            elif (random.random() if self.how == "python" else torch.rand(()).item()) < 0.6:
                x = x + torch.tanh(layer(x))
        return self.out(x).squeeze(1)


# Lengths


class Reader(nn.Module):
    """An LSTM over sequences of different lengths: packed, or by rows sorted by length and put back."""

    def __init__(self, packed: bool, enforce_sorted: bool = False) -> None:
        super().__init__()
        self.net, self.out, self.packed = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 1), packed
        self.enforce_sorted = enforce_sorted

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        order = lengths.argsort(descending=True, stable=True)
        if not self.packed:
            h = self.net(x[order])[0]
            h = h[torch.arange(len(x)), lengths[order] - 1]
            return self.out(torch.tanh(h))[order.argsort()].squeeze(1)
        if self.enforce_sorted:
            h = self.net(pack_padded_sequence(x[order], lengths[order].cpu(), batch_first=True))[1][0][0]
            return self.out(h[order.argsort()]).squeeze(1)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.net(packed)[0], batch_first=True)
        return self.out(h[torch.arange(len(x)), lengths - 1]).squeeze(1)


class SortedTokens(nn.Module):
    """Rows of tokens sorted by length, run, put back into their order; all layers but the last see them sorted."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.mix, self.out = nn.Embedding(VOCABULARY, 5, padding_idx=0), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, ids: Tensor) -> Tensor:
        lengths = (ids != 0).sum(1)
        order = lengths.argsort(descending=True, stable=True)
        mask = (ids != 0)[order].unsqueeze(2)
        h = (torch.tanh(self.mix(self.table(ids[order]))) * mask).sum(1) / lengths[order].unsqueeze(1)
        return self.out(h[order.argsort()])


def ragged(samples: int) -> dict[str, Tensor]:
    lengths = 1 + (torch.arange(samples) * 3) % 5
    x = numbers(samples, 5, 3)
    return {"x": x * (torch.arange(5) < lengths.unsqueeze(1)).unsqueeze(2), "lengths": lengths, "y": numbers(samples)}


def read(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return (model(batch["x"], batch["lengths"]) - batch["y"]).square()


def ragged_tokens(samples: int) -> dict[str, Tensor]:
    lengths = 2 + (torch.arange(samples) * 3) % 6
    ids = integers(VOCABULARY, samples, 7, low=1)
    return {"ids": ids * (torch.arange(7) < lengths.unsqueeze(1)), "label": integers(3, samples)}


def classify_tokens(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["ids"]), batch["label"], reduction="none")


# One sample after the other


def looped(self: Any, x: Tensor) -> Tensor:
    return torch.cat([self.net(x[i : i + 1]) for i in range(len(x))]).squeeze(1)


def unrolled(self: Any, x: Tensor) -> Tensor:
    """Rows without a batch dimension."""
    return torch.stack([self.net(row) for row in x]).squeeze(1)


def by_sign(self: Any, x: Tensor) -> Tensor:
    """Each sample takes its own way."""
    return torch.cat([(self.up if row.sum() > 0 else self.down)(row) for row in x])


def routed(self: Any, x: Tensor) -> Tensor:
    """Rows gathered by the way they take, and put back: the size of either group depends on the batch."""
    out = x.new_zeros(len(x))
    above = x.sum(1) > 0
    out[above] = self.up(x[above]).squeeze(1)
    out[~above] = self.down(x[~above]).squeeze(1)
    return out


def early_exit(self: Any, x: Tensor) -> Tensor:
    """As many rounds as a row's own size asks for."""
    out = []
    for row in x:
        while row.abs().sum() > 2:
            row = torch.tanh(self.step(row)) * 0.5
        out.append(self.out(row))
    return torch.cat(out)


def small(outputs: int = 1) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, outputs))


# What a forward returns


@dataclass
class Answer:
    """Not a pytree that torch knows."""

    prediction: Tensor
    hidden: Tensor
    loss: Tensor


class Answering(nn.Module):
    """Returns an object that also holds the mean over the batch, as Hugging Face's models do; nobody uses it."""

    def __init__(self, answer: Callable[..., Any]) -> None:
        super().__init__()
        self.first, self.out, self.answer = nn.Linear(6, 5), nn.Linear(5, 1), answer

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        prediction = self.out(hidden).squeeze(1)
        return self.answer(prediction=prediction, hidden=hidden, loss=prediction.square().mean())


def answered(model: Any, batch: dict[str, Tensor]) -> Tensor:
    answer = model(batch["x"])
    return (answer.prediction - batch["y"]).square() + 0.1 * answer.hidden.square().sum(1)


# Hugging Face: from configurations, never from the net

SIZE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
    "num_labels": 3,
}
SPEECH = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 12,
    "conv_dim": (4, 4),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
    "num_labels": 3,
}
ENCODER_DECODER = {
    "vocab_size": VOCABULARY,
    "d_model": 8,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 12,
    "decoder_ffn_dim": 12,
    "decoder_start_token_id": 1,
    **TOKENS,
}


def hugging_face(model: str, config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**options))

    return build


def causal(name: str, **options: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{name}ForCausalLM", f"{name}Config", **(SIZE | TOKENS | options))


def classifying(name: str, **options: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{name}ForSequenceClassification", f"{name}Config", **(SIZE | {"pad_token_id": 0} | options))


def seeing(name: str, **options: Any) -> Callable[[], nn.Module]:
    return hugging_face(f"{name}ForImageClassification", f"{name}Config", **(IMAGE | options))


def images(samples: int) -> dict[str, Tensor]:
    return {"pixel_values": numbers(samples, 3, 16, 16), "labels": integers(3, samples)}


def waves(samples: int) -> dict[str, Tensor]:
    return {"input_values": numbers(samples, 400), "labels": integers(3, samples)}


def pairs(samples: int) -> dict[str, Tensor]:
    """A text with padding, and what is to be said of it."""
    given = text(samples)
    return {
        "input_ids": given["input_ids"],
        "attention_mask": given["attention_mask"],
        "decoder_input_ids": integers(VOCABULARY, samples, 4, low=1),
    }


def spectra(samples: int) -> dict[str, Tensor]:
    return {"input_features": numbers(samples, 4, 24), "decoder_input_ids": integers(VOCABULARY, samples, 4, low=1)}


def says(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, said = model(**batch).logits, batch["decoder_input_ids"]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), said[:, 1:], reduction="none").mean(1)


def unmasked_language_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits, ids = model(input_ids=batch["input_ids"]).logits, batch["input_ids"]
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def encoded(samples: int) -> Any:
    """As a tokenizer returns it."""
    from transformers import BatchEncoding

    return BatchEncoding(classes(text)(samples))


def opt(**options: Any) -> nn.Module:
    small = {"ffn_dim": 12, "word_embed_proj_dim": 8, "dropout": 0.0} | options
    return causal("OPT", **small)()


# PEFT


def adapted(base: Callable[[], nn.Module], config: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import peft

        return peft.get_peft_model(base(), getattr(peft, config)(**options))

    return build


def prompted_loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """Virtual tokens come first: only the positions of real ones count."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    logits, labels = logits[:, -batch["input_ids"].shape[1] : -1], batch["labels"][:, 1:]
    losses = F.cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100, reduction="none")
    return losses.sum(1) / (labels != -100).sum(1).clamp(min=1)


PROMPT = {"num_virtual_tokens": 3, "task_type": "CAUSAL_LM"}
QUERY = {"target_modules": ["q_proj"]}

OWN: dict[str, Correct] = {
    "vae": Correct(lambda: VAE(distributions=False), table, elbo, draws=True),
    "vae-distributions": Correct(lambda: VAE(distributions=True), table, elbo, draws=True),
    "mixture-density": Correct(lambda: small(9), table, mixture_density),
    "discrete-policy": Correct(lambda: small(3), table, discrete_policy),
    "continuous-policy": Correct(lambda: small(6), table, continuous_policy),
    "multivariate-normal": Correct(lambda: small(6), table, gaussian),
    "cholesky": Correct(lambda: small(4), table, log_determinant),
    "solve": Correct(lambda: small(4), table, solved),
    "ctc": Correct(lambda: small_on_frames(), speech, ctc),
    "bce-on-sigmoid": Correct(lambda: small(), table, on_sigmoid),
    "category-table": Correct(lambda: Categories(one_hot=False), table, on_table),
    "category-one-hot": Correct(lambda: Categories(one_hot=True), table, on_table),
    "one-hot-labels": Correct(lambda: small(2), table, one_hot_labels),
    "own-finite-check": Correct(Checked, table, squared),
    "layerdrop-torch": Correct(lambda: Residual("torch"), table, squared, draws=True),
    "layerdrop-python": Correct(lambda: Residual("python"), table, squared, draws=True),
    "drop-path": Correct(lambda: Residual("sample"), table, squared, draws=True),
    "packed-lstm": Correct(lambda: Reader(packed=True), ragged, read),
    "packed-lstm-sorted": Correct(lambda: Reader(packed=True, enforce_sorted=True), ragged, read),
    "lstm-sorted-by-length": Correct(lambda: Reader(packed=False), ragged, read),
    "tokens-sorted-by-length": Correct(SortedTokens, ragged_tokens, classify_tokens),
    "loop-over-samples": Correct(lambda: Of(looped, net=small()), table, squared),
    "loop-over-rows": Correct(lambda: Of(unrolled, net=small()), table, squared),
    "branch-by-sample": Correct(lambda: Of(by_sign, up=small(), down=small()), table, squared),
    "routed-by-sample": Correct(lambda: Of(routed, up=small(), down=small()), table, squared),
    "rounds-by-sample": Correct(lambda: Of(early_exit, step=nn.Linear(6, 6), out=nn.Linear(6, 1)), table, squared),
    "output-dataclass": Correct(lambda: Answering(Answer), table, answered),
    "output-namespace": Correct(lambda: Answering(SimpleNamespace), table, answered),
}
"""Written here."""


def small_on_frames() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 5))


def of_config(build: Callable[[], nn.Module], batch: Any, loss: Any, **options: Any) -> Correct:
    """Most have dropout, so all are run in train mode too."""
    return Correct(build, batch, loss, draws=True, **({"spread": 0.1} | options))


TRANSFORMERS: dict[str, Correct] = {
    "t5": of_config(
        hugging_face(
            "T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=8, d_kv=4, d_ff=12, num_layers=2,
            num_heads=2, decoder_start_token_id=0, dropout_rate=0.1,
        ), pairs, says, single=True,
    ),
    "mixtral": of_config(
        causal("Mixtral", num_key_value_heads=1, num_local_experts=3, num_experts_per_tok=2), text, language_loss,
        single=True,
    ),
    "mixtral-wide": of_config(  # how many tokens an expert gets decides how it rounds
        causal(
            "Mixtral", hidden_size=64, intermediate_size=128, num_key_value_heads=1, num_local_experts=8,
            num_experts_per_tok=2,
        ), text, language_loss, single=True, spread=0.0,
    ),
    "wav2vec2": of_config(
        hugging_face(
            "Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", **SPEECH, layerdrop=0.3, mask_time_length=2,
        ), waves, classifier_loss,
    ),
    "hubert": of_config(
        hugging_face("HubertForSequenceClassification", "HubertConfig", **SPEECH, layerdrop=0.3, mask_time_length=2),
        waves, classifier_loss,
    ),
    "longformer": of_config(classifying("Longformer", attention_window=4), classes(text), classifier_loss),
    "batch-encoding": of_config(classifying("Bert"), encoded, classifier_loss),
    "mistral": of_config(causal("Mistral", num_key_value_heads=1, sliding_window=4), text, language_loss, single=True),
    "qwen2": of_config(causal("Qwen2", num_key_value_heads=1), text, language_loss, single=True),
    "gemma": of_config(causal("Gemma", num_key_value_heads=1, head_dim=4), text, language_loss, single=True),
    "opt": of_config(causal("OPT", ffn_dim=12, word_embed_proj_dim=8), text, language_loss),
    "neox": of_config(causal("GPTNeoX"), text, language_loss, single=True),
    "phi": of_config(causal("Phi"), text, language_loss, single=True),
    "bloom": of_config(
        hugging_face("BloomForCausalLM", "BloomConfig", vocab_size=VOCABULARY, hidden_size=8, n_layer=2, n_head=2),
        text, language_loss, single=True,
    ),
    "roberta": of_config(classifying("Roberta"), classes(text), classifier_loss),
    "distilbert": of_config(
        hugging_face(
            "DistilBertForSequenceClassification", "DistilBertConfig", vocab_size=VOCABULARY, dim=8, n_layers=2,
            n_heads=2, hidden_dim=12, max_position_embeddings=32,
        ), classes(text), classifier_loss,
    ),
    "albert": of_config(classifying("Albert", embedding_size=6), classes(text), classifier_loss),
    "deberta": of_config(
        classifying("Deberta", relative_attention=True, pos_att_type=["c2p", "p2c"]), classes(text), classifier_loss,
    ),
    "deberta-v2": of_config(
        classifying("DebertaV2", relative_attention=True, pos_att_type=["c2p", "p2c"]), classes(text), classifier_loss,
    ),
    "electra": of_config(classifying("Electra", embedding_size=6), classes(text), classifier_loss),
    "xlnet": of_config(
        hugging_face(
            "XLNetForSequenceClassification", "XLNetConfig", vocab_size=VOCABULARY, d_model=8, n_layer=2, n_head=2,
            d_inner=12,
        ), classes(text), classifier_loss,
    ),
    "bart": of_config(
        hugging_face(
            "BartForConditionalGeneration", "BartConfig", **ENCODER_DECODER, max_position_embeddings=32,
            encoder_layerdrop=0.3, decoder_layerdrop=0.3,
        ), pairs, says,
    ),
    "deit": of_config(seeing("DeiT"), images, classifier_loss),
    "beit": of_config(seeing("Beit", drop_path_rate=0.2), images, classifier_loss),
    "dinov2": of_config(seeing("Dinov2", drop_path_rate=0.2, mlp_ratio=2), images, classifier_loss),
    "swin": of_config(
        hugging_face(
            "SwinForImageClassification", "SwinConfig", image_size=16, patch_size=4, embed_dim=8, depths=[2, 1],
            num_heads=[1, 2], window_size=2, num_labels=3, drop_path_rate=0.2,
        ), images, classifier_loss,
    ),
    "convnext": of_config(
        hugging_face(
            "ConvNextForImageClassification", "ConvNextConfig", depths=[1, 1], hidden_sizes=[4, 6], num_stages=2,
            num_labels=3, image_size=16, drop_path_rate=0.2,
        ), images, classifier_loss,
    ),
    "whisper": of_config(
        hugging_face(
            "WhisperForConditionalGeneration", "WhisperConfig", **ENCODER_DECODER, num_mel_bins=4,
            max_source_positions=12, max_target_positions=8, encoder_layerdrop=0.3,
        ), spectra, says,
    ),
    "mamba": of_config(
        hugging_face(
            "MambaForCausalLM", "MambaConfig", vocab_size=VOCABULARY, hidden_size=8, num_hidden_layers=2, state_size=4,
        ), text, unmasked_language_loss, single=True,
    ),
}  # fmt: skip
"""Families that people train, beside those of `families`."""

ADAPTERS: dict[str, Correct] = {
    name: of_config(build, text, prompted_loss, **({"single": True} if base is llama else {}))
    for name, base, build in [
        ("lora", gpt2, adapted(gpt2, "LoraConfig", r=2, target_modules=["c_attn"], lora_dropout=0.1,
                               fan_in_fan_out=True, task_type="CAUSAL_LM")),
        ("dora", opt, adapted(opt, "LoraConfig", r=2, use_dora=True, **QUERY)),
        ("ia3", gpt2, adapted(gpt2, "IA3Config", target_modules=["c_attn", "mlp.c_proj"], task_type="CAUSAL_LM",
                              feedforward_modules=["mlp.c_proj"], fan_in_fan_out=True)),
        ("prompt", gpt2, adapted(gpt2, "PromptTuningConfig", **PROMPT)),
        ("p-tuning", gpt2, adapted(gpt2, "PromptEncoderConfig", encoder_hidden_size=6, **PROMPT)),
        ("prefix", gpt2, adapted(gpt2, "PrefixTuningConfig", **PROMPT)),
        ("oft", opt, adapted(opt, "OFTConfig", oft_block_size=4, **QUERY)),
        ("vera", opt, adapted(opt, "VeraConfig", r=2, **QUERY)),
        ("adalora", opt, adapted(opt, "AdaLoraConfig", init_r=3, target_r=2, total_step=10, **QUERY)),
        ("boft", opt, adapted(opt, "BOFTConfig", boft_block_size=4, **QUERY)),
        ("loha", opt, adapted(opt, "LoHaConfig", r=2, **QUERY)),
    ]
}  # fmt: skip

CORRECT: dict[str, Correct] = OWN | TRANSFORMERS | {f"peft-{name}": case for name, case in ADAPTERS.items()}
