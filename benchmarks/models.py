"""The models that are timed: written out, so that every library is given the same operations."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dpscale.lab.models import digits_cnn, paper_cnn, resnet9

VOCABULARY = 5000
"""Of the small transformer."""


class Block(nn.Module):
    def __init__(self, width: int, heads: int, causal: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, nn.Dropout(dropout)
        self.norm1, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm2, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        x = x + self.dropout(self.out(h.transpose(1, 2).reshape(b, t, d)))
        return x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))


class ViT(nn.Module):
    """ViT-S/16 with a mean over patches in place of a class token."""

    def __init__(self, width: int = 384, depth: int = 12, heads: int = 6, image: int = 224, patch: int = 16) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((image // patch) ** 2, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(1))


class GPT2(nn.Module):
    """GPT-2 small: learned positions, tied head.

    Args:
        tied: False gives the head weights of its own and looks the positions up for every sample. That is another
            model, with 38.6 M parameters more, which Opacus can train.
    """

    def __init__(
        self, vocabulary: int = 50257, width: int = 768, depth: int = 12, heads: int = 12, length: int = 1024,
        tied: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        self.tied = tied
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, True) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        h = self.tokens(x) + self.places(places if self.tied else places.repeat(len(x), 1))
        return self.head(self.norm(self.blocks(h)))


class Transformer(nn.Module):
    """A small encoder with dropout, that classifies sequences of tokens."""

    def __init__(
        self, width: int = 128, depth: int = 4, heads: int = 4, length: int = 64, dropout: float = 0.1
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * torch.randn(length, width))
        self.blocks = nn.Sequential(*(Block(width, heads, False, dropout) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(x) + self.places)).mean(1))


class LowRank(nn.Module):
    """A frozen linear layer with a trainable update of low rank (LoRA)."""

    def __init__(self, layer: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank, False), nn.Linear(rank, layer.out_features, False)
        nn.init.normal_(self.up.weight, std=0.02)  # at its usual 0, half of the gradients would be 0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.up(self.down(x))


def gpt2_lora() -> nn.Module:
    """GPT-2 small, frozen but for updates of its queries, keys and values."""
    model = GPT2().requires_grad_(False)
    for block in model.blocks:
        block.qkv = LowRank(block.qkv)
    return model


@dataclass(frozen=True)
class Task:
    """A model, the shape of its input without the batch, the batch, and the number of classes (0: a language model).

    ``tokens``: the input is numbers of tokens.
    """

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    classes: int
    tokens: bool = False

    def data(self, device: str) -> tuple[Tensor, Tensor]:
        if self.classes == 0:
            tokens = torch.randint(0, 50257, (self.batch, self.shape[0] + 1), device=device)
            return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        x = torch.randn(self.batch, *self.shape, device=device)
        x = x.mul(1000).long().remainder(VOCABULARY) if self.tokens else x
        return x, torch.randint(0, self.classes, (self.batch,), device=device)

    def losses(self, out: Tensor, y: Tensor) -> Tensor:
        if self.classes == 0:
            return F.cross_entropy(out.flatten(0, 1), y.flatten(), reduction="none").view(y.shape).mean(1)
        return F.cross_entropy(out, y, reduction="none")


TASKS: dict[str, Task] = {
    "digits-cnn": Task(digits_cnn, (1, 8, 8), 256, 10),
    "4-conv-cnn": Task(paper_cnn, (1, 28, 28), 512, 10),
    "resnet9-64": Task(resnet9, (3, 64, 64), 256, 10),
    "resnet9-160": Task(resnet9, (3, 160, 160), 256, 10),
    "vit-s16": Task(ViT, (3, 224, 224), 64, 1000),
    "gpt2": Task(GPT2, (256,), 16, 0),
    "gpt2-lora": Task(gpt2_lora, (256,), 16, 0),
    "transformer": Task(Transformer, (64,), 32, 10, tokens=True),
    "gpt2-untied": Task(lambda: GPT2(tied=False), (256,), 16, 0),
    "probe": Task(lambda: nn.Linear(2048, 10), (2048,), 1024, 10),
}
