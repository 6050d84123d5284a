"""What is kept of a model's structure follows every change that a user can make to it."""

import gc
import weakref

import pytest
import torch
from torch import nn

from dpscale.engine.modules import COUNTERS, structure


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 3)
        self.norm = nn.LayerNorm(2)
        self.again = self.a  # a module under two names
        self.tied = nn.Parameter(torch.zeros(3))
        self.b.bias = self.tied  # a parameter under two names
        self.nothing = None
        self.activation = nn.ReLU()
        self.register_parameter("none", None)
        self.last = nn.Linear(1, 1)


def truth(model):
    found = [(n, id(p)) for n, p in model.named_parameters() if p.requires_grad]
    return found, [(type(m), m.training) for m in model.modules()]


def told(model):
    found = structure(model)
    modules = zip(found.kinds, found.training, strict=True)
    return [(n, id(p)) for n, p in found.trainable.items()], list(modules)


def freeze(model):
    model.a.weight.requires_grad_(False)


def evaluate(model):
    model.norm.eval()


def replace(model):
    model.b.weight = nn.Parameter(torch.ones(3, 2))


def replace_module(model):
    model.activation = nn.Tanh()


def untie(model):
    model.b.bias = nn.Parameter(torch.zeros(3))


def grow(model):
    model.more = nn.Linear(2, 2)


def grow_deep(model):
    model.norm.more = nn.Sequential(nn.Linear(1, 1))


def shrink(model):
    model.norm = None


def rename(model):
    model.other = model.b
    del model.b


def rename_last(model):
    model.final = model.last
    del model.last


def rename_parameter(model):
    model.norm.shift = model.norm.bias
    del model.norm.bias


def swap(model):
    model.a, model.b = model.b, model.a


def share(model):
    model.again = nn.Linear(2, 2)


def fill(model):
    model.none = nn.Parameter(torch.zeros(1))


def assign(model):
    model.load_state_dict({n: t.clone() for n, t in model.state_dict().items()}, assign=True)


@pytest.mark.parametrize(
    "change",
    [
        freeze,
        evaluate,
        replace,
        replace_module,
        untie,
        grow,
        grow_deep,
        shrink,
        rename,
        rename_last,
        rename_parameter,
        swap,
        share,
        fill,
        assign,
    ],
    ids=lambda f: f.__name__,
)
def test_every_change_is_seen(change):
    model = Shared()
    assert told(model) == truth(model)
    before = truth(model)
    change(model)
    assert truth(model) != before and told(model) == truth(model)


def test_another_module_under_two_names_is_seen():
    model = nn.ModuleDict({"first": nn.Linear(1, 1), "second": nn.Linear(1, 1)})
    model["third"] = model["first"]
    assert told(model) == truth(model)
    model["first"] = model["second"]
    assert told(model) == truth(model)


def test_a_module_under_two_names_is_not_taken_for_one_of_its_own():
    model = nn.ModuleList([nn.ReLU()])
    model.append(model[0])
    assert told(model) == truth(model)
    model[0] = nn.ReLU()
    assert told(model) == truth(model)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_part_is_walked_through():
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2))), nn.Linear(2, 1))
    assert [n for n, _ in told(model)[0]] == [n for n, _ in truth(model)[0]]


def test_a_replaced_parameter_is_not_taken_for_the_one_whose_place_in_memory_it_got():
    model = nn.Linear(2, 2, bias=False)
    for _ in range(50):
        structure(model)
        model.weight = None
        model.weight = nn.Parameter(torch.zeros(2, 2))  # may well lie where the last one lay
        assert structure(model).trainable["weight"] is model.weight


def test_what_did_not_change_is_not_walked_through_again(monkeypatch):
    model = Shared()
    structure(model)
    monkeypatch.setattr(nn.Module, "named_parameters", lambda *_: pytest.fail("walked"))
    assert list(structure(model).trainable) == [
        "tied", "a.weight", "a.bias", "b.weight", "norm.weight", "norm.bias", "last.weight", "last.bias",
    ]  # fmt: skip


def test_a_cycle_of_modules_ends():
    outer, inner = nn.Sequential(), nn.Sequential(nn.Linear(1, 1))
    outer.add_module("inner", inner)
    inner.add_module("outer", outer)
    assert told(outer) == truth(outer)


def test_a_model_is_not_kept_alive():
    model = nn.Linear(2, 2)
    structure(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


class OnGPU(torch.Tensor):
    """Says that it is on a GPU, where to read is to wait."""

    is_cuda, reads = True, 0

    def item(self):
        OnGPU.reads += 1
        return super().item()


def test_flags_on_a_gpu_are_read_when_they_were_written(monkeypatch):
    monkeypatch.setattr(OnGPU, "reads", 0)
    model = nn.Linear(2, 2)
    model.register_buffer("mode", torch.tensor(0).as_subclass(OnGPU))
    told = [structure(model).switches() for _ in range(3)]
    assert OnGPU.reads == 1 and told[0] == told[2]
    model.mode.fill_(1)
    assert structure(model).switches() != told[0] and structure(model).switches() != told[0]
    assert OnGPU.reads == 2
    COUNTERS[model.mode] = True  # the forward changes it by itself
    model.mode.fill_(2)
    structure(model).switches()
    assert OnGPU.reads == 2


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ({"on": False}, lambda value: value.update(on=True)),
        ({"on": torch.zeros(2), "off": 1}, lambda value: value.update(off=0)),
        ({"a": {"b": [1, {"c": None}]}}, lambda value: value["a"]["b"][1].update(c="d")),
        ([1, 2], lambda value: value.append(3)),
        ([{"a": 1}], lambda value: value[0].clear()),
        ({"a"}, lambda value: value.add("b")),
    ],
    ids=["dict", "dict with a tensor", "nested", "list", "list of dicts", "set"],
)
def test_containers_are_looked_through(value, change):
    model = nn.Linear(2, 2)
    model.options = value
    told = structure(model).switches()
    assert structure(model).switches() == told
    change(value)
    assert structure(model).switches() != told


def test_a_tensor_that_comes_into_a_container_is_not_compared():
    model = nn.Linear(2, 2)
    model.options, model.cache = {"a": 1}, None
    told = structure(model).switches()
    model.options["a"] = model.cache = torch.zeros(2)
    changed = structure(model).switches()
    model.options["a"] = model.cache = torch.ones(2)
    assert structure(model).switches() == changed != told
