"""`fix` replaces what couples samples, says so by name, and leaves a model that the engine takes."""

import pytest
import torch
from torch import nn

import dpscale
from dpscale.model_fix import fix

from .engine.cases import check_equal
from .seeding import seeded


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(2, 6, 3), nn.BatchNorm2d(6, eps=1e-3), nn.ReLU(inplace=True))
        self.inst = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(24, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))

    def forward(self, x):
        return self.head(self.inst(self.body(x)))


def images(samples=4):
    return (torch.randn(samples, 2, 4, 4, generator=seeded(0), dtype=torch.float64),)


def test_it_says_what_it_changed_and_the_engine_takes_the_model():
    model = Net().double()
    with pytest.raises(dpscale.UnsupportedModel):
        check_equal(model, images(), dpscale.Clip(C=0.1))
    assert fix(model) == [
        "body.1: BatchNorm2d(6) -> GroupNorm(3, 6)",
        "inst: InstanceNorm2d(6) -> without running statistics",
        "head.2: BatchNorm1d(4) -> GroupNorm(1, 4)",
    ]
    assert model.body[1].eps == 1e-3 and not model.head[2].affine
    check_equal(model, images(), dpscale.Clip(C=0.1))
    assert fix(model) == []
    model.load_state_dict(model.state_dict())


def test_parameters_stay_the_same_objects():
    """An optimizer made before, frozen parameters, types and the training flag survive."""
    model = nn.Sequential(nn.BatchNorm3d(4), nn.SyncBatchNorm(4)).to(torch.bfloat16).eval()
    model[0].weight.requires_grad_(False)
    nn.init.normal_(model[1].weight)
    before = list(model.parameters())
    fix(model)
    assert [type(m) for m in model] == [nn.GroupNorm, nn.GroupNorm] and not model[0].training
    assert [id(p) for p in before] == [id(p) for p in model.parameters()]
    assert not model[0].weight.requires_grad and model[1].weight.dtype == torch.bfloat16


def test_a_layer_registered_twice_stays_one_layer():
    norm = nn.BatchNorm2d(4)
    model = nn.Sequential(norm, nn.ReLU(), norm)
    assert len(fix(model)) == 2
    assert model[0] is model[2] and isinstance(model[0], nn.GroupNorm)


@pytest.mark.parametrize("channels, most, expected", [(48, 32, 24), (64, 32, 32), (7, 32, 1), (1, 32, 1), (64, 4, 4)])
def test_groups_divide_the_channels_and_keep_two_each(channels, most, expected):
    model = nn.Sequential(nn.BatchNorm2d(channels))
    fix(model, groups=most)
    assert model[0].num_groups == expected


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda: fix(nn.BatchNorm2d(3)), "a module that contains its batch norms.*wrap it in a Sequential"),
        (lambda: fix("model"), "must be a torch.nn.Module. Got 'str'"),
        (lambda: fix(Net(), groups=0), "'groups' parameter of fix must be an integer >= 1. Got 0"),
        (lambda: fix(nn.Sequential(nn.LazyBatchNorm2d())), r"Got \['0'\] instead. Run it on a batch first"),
    ],
)
def test_what_cannot_be_fixed_is_refused(call, text):
    with pytest.raises(ValueError, match=text):
        call()
