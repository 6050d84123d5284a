"""`embedding`: y_t = W[index_t]; `embedding_bag`: y_k = Σ_n s_n W[index_n] over the positions n of bag k, or their max.

Sample i's gradient of W adds g_t to row index_t for each position t: Σ_t e(index_t) g_tᵀ. Positions with the same index
share a row, so the squared norm is Σ_{t,t'} [index_t = index_t'] g_t·g_t'.

With bags it adds s_n g_{k(n)} to row index_n for every position n of its bags; under max, each entry of g_k goes to the
one entry of W that it came from. Bags may have any lengths, so positions stand in one long list, each with its sample;
entries that share a sample and a row are added before the square.

Shape suffixes: B samples, T positions of one sample, K bags of one sample, N positions of all bags, D entries of a row,
V rows of the table.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.rules.forms import Call, Change, Form, Rule, side_by_side, slack, wide
from dpscale.engine.rules.linear import Outer

SUM, MEAN, MAX = 0, 1, 2


@dataclass(frozen=True)
class Rows(Form):
    """Gradients that add vectors to chosen rows of a (V, D) table."""

    index_BT: Tensor
    g_BTD: Tensor
    table: int

    @classmethod
    def of(cls, arguments: Mapping[str, Any], index_BT: Tensor, g_BTD: Tensor) -> Self:
        """Of a lookup, by its arguments: none for the padding index."""
        padding = arguments.get("padding_idx")
        if padding is not None and padding >= 0:
            g_BTD = g_BTD.masked_fill((index_BT == padding).unsqueeze(2), 0)
        return cls(index_BT, g_BTD, len(arguments["weight"]))

    def norm2(self) -> Tensor:
        """Sum the positions that share a row, then square."""
        g = wide(self.g_BTD)
        slot_BT = slots(self.index_BT)
        summed = torch.zeros_like(g).scatter_add_(1, slot_BT.unsqueeze(2).expand_as(g), g)
        return summed.square().sum((1, 2)) + slack(torch.linalg.vector_norm(g, dim=2))

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One scatter-add over samples and positions together."""
        g = wide(self.g_BTD) * weights_B.to(wide(self.g_BTD).dtype).view(-1, 1, 1)
        return g.new_zeros(self.table, g.shape[2]).index_add_(0, self.index_BT.flatten(), g.flatten(0, 1))

    def per_sample(self) -> Tensor:
        """(B, V, D)."""
        g = wide(self.g_BTD)
        out = g.new_zeros(len(g), self.table, g.shape[2])
        return out.scatter_add_(1, self.index_BT.unsqueeze(2).expand_as(g), g)

    def onto(self, columns_IK: Tensor) -> "Rows":
        """The vectors times the columns."""
        g = wide(self.g_BTD)
        return replace(self, g_BTD=g @ columns_IK.to(g.dtype))

    def join(self, other: Form) -> "Rows | None":
        """Concatenate along the positions."""
        if not isinstance(other, Rows):
            return None
        index = torch.cat([self.index_BT, other.index_BT], 1)
        return Rows(index, side_by_side(self.g_BTD, other.g_BTD), self.table)

    def crosses(self, other: Form) -> bool:
        """With the outer products of a head that is tied to the table."""
        return isinstance(other, Outer)

    def cross(self, other: Form) -> Tensor:
        """2⟨Σ_t e(index_t) g_tᵀ, Σ_s h_s a_sᵀ⟩ = 2 Σ_{t,s} h_s[index_t] · (g_t·a_s): T·S numbers, not V·D."""
        assert isinstance(other, Outer)
        g_BTD, a_BSD, h_BSV = wide(self.g_BTD), wide(other.a_BTI), wide(other.g_BTO)
        index = self.index_BT.unsqueeze(1).expand(-1, a_BSD.shape[1], -1)
        product = (torch.bmm(a_BSD, g_BTD.mT) * h_BSV.gather(2, index)).sum((1, 2))
        # The two may cancel each other: the rounding of the larger terms is then as large as what is left.
        table = torch.linalg.vector_norm(g_BTD, dim=2).sum(1)
        return 2 * product + slack(torch.stack([table, other.terms().sum(1)], 1))


class Embedding(Rule):
    """The rule of `torch.embedding`, which `torch.nn.functional.embedding` and `torch.nn.Embedding` call."""

    functions = (torch.embedding,)
    names = ("weight", "input", "padding_idx", "scale_grad_by_freq", "sparse")
    trainable = ("weight",)

    def accepts(self, call: Call) -> bool:
        """The batch must be in the indices' own dimensions. Scaling by frequency counts over the batch: refused."""
        _refuse_scaling_by_frequency(call, "Embedding")
        return bool(call.layout.dim < call.arguments["input"].ndim)

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """Rows of the table, none for the padding index."""
        index_BT = call.rows(call.arguments["input"]).flatten(1)
        yield "weight", Rows.of(call.arguments, index_BT, call.rows(g).flatten(1, -2))


@dataclass(frozen=True)
class Scattered(Form):
    """Gradients that add vectors to chosen rows, where samples may have different numbers of them.

    Attributes:
        g_BKD: the vectors; a position takes one of them.
        source_N: which, among the B·K.
        scale_N: what it is multiplied by. Not an operand of one sample, so a dropped one is masked by its zero vector.
        index_N: the row that it goes to.
        table: V.
        shape: of the tensor; the table's rows may be single entries of it (max).
    """

    g_BKD: Tensor
    source_N: Tensor
    scale_N: Tensor
    index_N: Tensor
    table: int
    shape: torch.Size

    def norm2(self) -> Tensor:
        """Sum what shares a sample and a row, then square. No buffer of the table's size."""
        g_ND, sample_N = self._vectors(), self._samples()
        slot_N = slots((sample_N * self.table + self.index_N).unsqueeze(0)).squeeze(0)
        summed_ND = torch.zeros_like(g_ND).index_add_(0, slot_N, g_ND)
        sample_of_slot = torch.zeros_like(sample_N).scatter_(0, slot_N, sample_N)
        zero_B = g_ND.new_zeros(len(self.g_BKD))
        sizes_B = zero_B.index_add(0, sample_N, torch.linalg.vector_norm(g_ND, dim=1))
        return zero_B.index_add(0, sample_of_slot, summed_ND.square().sum(1)) + slack(sizes_B.unsqueeze(1))

    def weighted(self, weights_B: Tensor) -> Tensor:
        """One scatter-add over all positions."""
        g_ND = self._vectors()
        g_ND = g_ND * weights_B.to(g_ND.dtype)[self._samples()].unsqueeze(1)
        return g_ND.new_zeros(self.table, g_ND.shape[1]).index_add_(0, self.index_N, g_ND).view(self.shape)

    def per_sample(self) -> Tensor:
        """(B, *shape)."""
        g_ND = self._vectors()
        out = g_ND.new_zeros(len(self.g_BKD) * self.table, g_ND.shape[1])
        return out.index_add_(0, self._samples() * self.table + self.index_N, g_ND).view(-1, *self.shape)

    def map(self, change: Change) -> "Scattered":
        """Change the vectors; scales change only their type."""
        g = change(self.g_BKD)
        return replace(self, g_BKD=g, scale_N=self.scale_N.to(g.dtype))

    def take(self, rows: Tensor) -> "Scattered":
        """Of these samples, and of the positions that are theirs."""
        place_B = torch.full((len(self.g_BKD),), -1, device=self.g_BKD.device)
        place_B[rows] = torch.arange(len(rows), device=place_B.device)
        bags, place_N = max(1, self.g_BKD.shape[1]), place_B[self._samples()]
        source_N, own = place_N * bags + self.source_N % bags, place_N >= 0
        return replace(self, g_BKD=self.g_BKD[rows], source_N=source_N[own], scale_N=self.scale_N[own],
                       index_N=self.index_N[own])  # fmt: skip

    def join(self, other: Form) -> "Scattered | None":
        """One list of positions after the other."""
        if not isinstance(other, Scattered) or (self.table, self.shape) != (other.table, other.shape):
            return None
        bags, more = self.g_BKD.shape[1], other.g_BKD.shape[1]
        sources = [_shifted(self.source_N, bags, bags + more, 0), _shifted(other.source_N, more, bags + more, bags)]
        vectors = torch.cat([wide(self.g_BKD), wide(other.g_BKD)], 1)
        scales, index = torch.cat([wide(self.scale_N), wide(other.scale_N)]), torch.cat([self.index_N, other.index_N])
        return replace(self, g_BKD=vectors, source_N=torch.cat(sources), scale_N=scales, index_N=index)

    def _vectors(self) -> Tensor:
        """(N, D). Zero times an infinite scale must stay zero: that is how a sample is dropped."""
        g_ND = wide(self.g_BKD).flatten(0, 1)[self.source_N]
        return (g_ND * self.scale_N.to(g_ND.dtype).unsqueeze(1)).where(g_ND != 0, 0)

    def _samples(self) -> Tensor:
        return self.source_N // max(1, self.g_BKD.shape[1])


class EmbeddingBag(Rule):
    """The rule of `torch.embedding_bag`, which `torch.nn.EmbeddingBag` calls; bags of one or of several lengths."""

    functions = (torch.embedding_bag,)
    names = (
        "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
        "include_last_offset", "padding_idx",
    )  # fmt: skip
    trainable = ("weight",)

    def accepts(self, call: Call) -> bool:
        """Scaling by frequency counts over the batch: refused."""
        _refuse_scaling_by_frequency(call, "EmbeddingBag")
        return call.layout.dim == 0

    def forms(self, call: Call, g: Tensor) -> Iterator[tuple[str, Form]]:
        """A row of the table for each position, none for the padding index."""
        weight, index_N = call.arguments["weight"], call.arguments["indices"]
        g_BKD = call.rows(g)
        # Bag k of the call is bag source_k among (B, K): the layout may have put samples side by side.
        numbers = torch.arange(len(g), device=g.device)
        source_k = torch.empty_like(numbers).scatter_(0, call.rows(numbers).flatten(), numbers)
        if call.get("mode", SUM) == MAX:
            yield "weight", _largest(call, g_BKD, source_k)
            return
        bag_N, in_bag_N = _bags(call, index_N)
        scale_N = wide(in_bag_N.to(g.dtype))
        if call.get("per_sample_weights") is not None:
            scale_N = wide(call.arguments["per_sample_weights"].detach()).where(in_bag_N, 0)
        if call.get("mode", SUM) == MEAN:
            lengths_k = scale_N.new_zeros(len(g)).index_add(0, bag_N, scale_N)
            scale_N = scale_N / lengths_k.clamp(min=1)[bag_N]
        yield "weight", Scattered(g_BKD, source_k[bag_N], scale_N, index_N.long(), len(weight), weight.shape)


def _bags(call: Call, index_N: Tensor) -> tuple[Tensor, Tensor]:
    """The bag of each position, and whether it counts: it does not at the padding index and after the last bag."""
    offsets = call.arguments["offsets"]
    positions = torch.arange(len(index_N), device=index_N.device, dtype=offsets.dtype)
    counts = torch.ones_like(index_N, dtype=torch.bool)
    if call.get("include_last_offset", False):
        counts, offsets = positions < offsets[-1], offsets[:-1]
    padding = call.get("padding_idx")
    if padding is not None:
        counts = counts & (index_N != padding % len(call.arguments["weight"]))  # it may count from the end
    return torch.searchsorted(offsets.contiguous(), positions, right=True) - 1, counts


def _largest(call: Call, g_BKD: Tensor, source_k: Tensor) -> Scattered:
    """Under max, entry d of bag k came from row[k, d]: a table of single entries. Run again, it says which."""
    arguments: dict[str, Any] = {n: a.detach() if isinstance(a, Tensor) else a for n, a in call.arguments.items()}
    _, _, length_k, row_kD = torch.embedding_bag(**arguments)
    weight, width = arguments["weight"], row_kD.shape[1]
    entry_D = torch.arange(width, device=row_kD.device)
    index = (row_kD.long().clamp(min=0) * width + entry_D).flatten()
    source = (source_k.unsqueeze(1) * width + entry_D).flatten()
    g = g_BKD.flatten(1).unsqueeze(2)
    scale = wide((length_k > 0).to(g.dtype)).unsqueeze(1).expand(row_kD.shape).flatten()  # an empty bag has no row
    return Scattered(g, source, scale, index, weight.numel(), weight.shape)


def _shifted(source_N: Tensor, each: int, together: int, start: int) -> Tensor:
    """Sources among B·each vectors, as sources among B·together of which theirs begin at ``start``."""
    return source_N // each * together + start + source_N % each


def slots(index_BT: Tensor) -> Tensor:
    """(B, T): positions of a row get the same number below T exactly if they have the same index.

    The number is the rank of the index among the row's: no buffer of the table's size, and no T² comparisons.
    """
    ordered, position = index_BT.sort(1)
    rank = ordered.diff(dim=1, prepend=ordered[:, :1]).ne(0).cumsum(1)
    return torch.empty_like(position).scatter_(1, position, rank)


def _refuse_scaling_by_frequency(call: Call, module: str) -> None:
    """Counting over the batch couples the samples."""
    if call.get("scale_grad_by_freq", False):
        raise UnsupportedModel(
            f"{call.function.__name__} with scale_grad_by_freq=True divides one sample's gradient by how often its "
            f"tokens occur in the whole batch, so samples are coupled. Build the {module} without scale_grad_by_freq."
        )
