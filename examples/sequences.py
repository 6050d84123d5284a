"""The code of docs/sequences.md, which explains it."""

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import dpscale

generator = torch.Generator().manual_seed(0)
samples = []
for _ in range(600):
    length = int(torch.randint(4, 20, (1,), generator=generator))
    tokens = torch.randint(1, 50, (length,), generator=generator)
    samples.append((tokens, int(tokens.float().mean() > 25)))


def collate(batch):
    tokens = pad_sequence([tokens for tokens, _ in batch], batch_first=True)  # 0 is padding
    lengths = torch.tensor([len(tokens) for tokens, _ in batch])
    return tokens, lengths, torch.tensor([label for _, label in batch])


class Classifier(nn.Module):
    """An LSTM whose state after the last real token decides."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(50, 16, padding_idx=0)
        self.lstm = nn.LSTM(16, 32, batch_first=True)
        self.out = nn.Linear(32, 2)

    def forward(self, tokens, lengths):
        states, _ = self.lstm(self.table(tokens))
        last = states[torch.arange(len(tokens)), lengths - 1]
        return self.out(last)


def loss_fn(model, batch):
    tokens, lengths, labels = batch
    return nn.functional.cross_entropy(model(tokens, lengths), labels, reduction="none")


model = Classifier()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
private = dpscale.make_private(model, optimizer, samples, epsilon=5, delta=1e-4, epochs=2, batch=60)
for batch in private.batches(collate_fn=collate):
    private.step(batch, loss_fn)
print(f"ε = {private.epsilon():.2f}")

from torch.nn.utils.rnn import pack_sequence


class Packed(Classifier):
    def forward(self, packed):
        vectors = packed._replace(data=self.table(packed.data))
        return self.out(self.lstm(vectors)[1][0][-1])


def packing(batch):
    tokens = pack_sequence([tokens for tokens, _ in batch], enforce_sorted=False)
    return tokens, torch.tensor([label for _, label in batch])


def packed_loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")


model = Packed()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
private = dpscale.make_private(model, optimizer, samples, epsilon=5, delta=1e-4, epochs=1, batch=60)
for batch in private.batches(collate_fn=packing):
    private.step(batch, packed_loss)

def language_loss(logits, labels):
    """(B, T, V) and (B, T), where -100 marks what does not count -> (B,)."""
    losses = nn.functional.cross_entropy(
        logits[:, :-1].transpose(1, 2), labels[:, 1:], ignore_index=-100, reduction="none"
    )
    counts = (labels[:, 1:] != -100).sum(1).clamp(min=1)
    return losses.sum(1) / counts


logits, labels = torch.randn(3, 6, 10), torch.randint(0, 10, (3, 6))
labels[1, 3:] = -100
print(language_loss(logits, labels).shape)
