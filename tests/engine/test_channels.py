"""Images channels last in a traced step: the same numbers, in another order in memory."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import dpscale
from dpscale.engine import compiled
from dpscale.engine.compiled import Fast


class Images(nn.Module):
    def __init__(self, flatten):
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(16, 3)
        self.flatten = flatten

    def forward(self, x):
        x = F.relu(self.norm(self.first(x)))
        return self.head(self.flatten(F.max_pool2d(self.last(self.second(x)), 2)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


@pytest.mark.parametrize(
    ("flatten", "last"),
    [(lambda x: x.flatten(1), True), (lambda x: x.view(len(x), -1), False)],
    ids=["any layout", "counts on rows in order"],
)
def test_channels_last_changes_the_layout_alone(monkeypatch, flatten, last):
    """A model that cannot bear it (`view` on what is no longer in order) is traced again without."""
    torch.manual_seed(0)
    model = Images(flatten).double()
    batch = torch.randn(3, 2, 4, 4).double(), torch.tensor([0, 2, 1])
    rule, mask = dpscale.PSASC(C=1.0, s=0.5, r=0.1), torch.ones(3, dtype=torch.bool)
    graphs = []
    trace = compiled.traced
    monkeypatch.setattr(
        compiled, "traced", lambda step, inputs, _: graphs.append(trace(step, inputs, True)) or graphs[0]
    )
    ours = Fast(model, lambda graph, _: graph)(losses, batch, rule, mask)
    plain = dpscale.scaled_sum(model, losses, batch, rule, mask)
    for name, g in plain.grads.items():
        torch.testing.assert_close(ours.grads[name], g)
    torch.testing.assert_close(ours.norms, plain.norms)
    convolutions = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    operands = [n.args[k].meta["val"] for n in graphs[0].graph.nodes if n.target in convolutions for k in (0, 1)]
    images = [t for t in operands if t.shape[0] == 3 and t.shape[2] == 4]
    assert len(images) >= 4
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images) == last
