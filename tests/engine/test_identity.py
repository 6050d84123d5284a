"""Functions that do the same are the same; one that reads other numbers, or holds other objects, is another."""

import functools
import gc
import weakref
from dataclasses import dataclass
from types import FunctionType, ModuleType

import pytest
import torch
from torch import nn

from dpscale.engine.identity import identity

scale = 1.0


def same(a, b, numbers=True):
    a, b = identity(a, numbers=numbers), identity(b, numbers=numbers)
    assert (a == b) == (a in {b: None})  # as keys, too
    return a == b


def holding(value, more=None):
    return lambda model, batch: (model, batch, value, more)


def reading():
    return lambda: scale


def test_the_same_code_with_the_same_objects_is_the_same_function():
    model = nn.Linear(2, 2)
    assert same(holding(model), holding(model))
    assert same(holding(model, holding(model)), holding(model, holding(model)))
    assert same(functools.partial(holding(model), batch=2.0), functools.partial(holding(model), batch=2.0))
    assert same(model.forward, model.forward)
    assert same(holding(model.forward), holding(model.forward))


def test_other_objects_and_other_code_make_another_function():
    a, b = torch.zeros(2), torch.zeros(2)
    assert not same(holding(a), holding(b))
    assert not same(holding(a), reading())
    assert not same(holding(holding(a)), holding(holding(b)))
    assert not same(functools.partial(holding(a), batch=2.0), functools.partial(holding(a), batch=3.0))
    assert not same(functools.partial(holding(a), batch=2.0), functools.partial(holding(a), model=2.0))
    assert not same(nn.Linear(2, 2).forward, nn.Linear(2, 2).forward)
    assert not same(holding("mean"), holding("sum"), numbers=False)
    assert not same(holding(True), holding(False), numbers=False)


def test_defaults_count():
    def made(first, second):
        def loss(model, batch, scale=first, *, shift=second):
            return scale, shift

        return loss

    assert same(made(1.0, 2.0), made(1.0, 2.0))
    assert not same(made(1.0, 2.0), made(1.5, 2.0)) and not same(made(1.0, 2.0), made(1.0, 2.5))


def test_numbers_count_where_they_are_asked_for(monkeypatch):
    assert not same(holding(1.0), holding(2.0)) and not same(holding((1, 2)), holding((1, 3)))
    assert same(holding(1.0), holding(2.0), numbers=False)
    assert not same(holding(1), holding(1.0))  # another type is another computation
    function = reading()
    before = identity(function, numbers=True)
    monkeypatch.setitem(globals(), "scale", 3.0)
    assert before != identity(function, numbers=True)
    assert identity(function, numbers=False) == identity(reading(), numbers=False)


def test_a_variable_that_is_set_anew_makes_it_another_function():
    weight = 1.0

    def loss():
        return weight

    before = identity(loss, numbers=True)
    weight = 2.0
    assert before != identity(loss, numbers=True)


def test_what_can_change_unseen_leaves_a_function_equal_to_itself_alone():
    class Slots:
        __slots__ = ("scale",)

    for held in (Slots(), list(range(1000))):
        function = holding(held)
        assert same(function, function) and not same(function, holding(held))


@pytest.mark.parametrize("held", [{"scale": 1.0, "name": "a"}, [1.0, (2.0, [3.0])]], ids=["dict", "list"])
def test_containers_count_by_what_they_hold(held):
    function = holding(held)
    before = identity(function, numbers=True)
    assert same(function, holding(held)) and same(function, holding(type(held)(held)))
    for key in list(held) if isinstance(held, dict) else range(len(held)):
        held[key], old = 7.0, held[key]
        assert identity(function, numbers=True) != before
        held[key] = old
    assert identity(function, numbers=True) == before


def test_a_container_that_holds_itself_has_an_identity():
    held = [1.0]
    held.append(held)
    assert same(holding(held), holding(held))


def test_unhashable_objects_and_tensors_are_told_apart_by_where_they_lie():
    @dataclass
    class Options:
        scale: float

    a, b = Options(1.0), Options(1.0)  # equal, and not hashable
    assert same(holding(a), holding(a)) and not same(holding(a), holding(b))


def test_callables_of_any_kind_have_an_identity():
    class Slots:
        __slots__ = ()

        def __call__(self):
            return 1

    one = Slots()
    assert same(one, one) and not same(one, Slots())
    assert same(len, len) and same(one.__call__, one.__call__)


def test_a_function_that_holds_itself_has_one():
    def loss(depth):
        return loss(depth - 1) if depth else 0

    assert same(loss, loss)


def test_a_variable_without_a_value_is_no_error():
    def function():
        return later

    assert same(function, function)
    if torch.ones(1).item() == 0:
        later = 1


def test_the_same_code_in_another_module_is_another_function():
    function = reading()
    assert not same(function, FunctionType(function.__code__, {}), numbers=False)


def test_what_is_gone_is_equal_to_nothing_else():
    first, second = (identity(holding(torch.zeros(2)), numbers=True) for _ in range(2))
    gc.collect()
    assert first == first and first != second


def test_nothing_is_kept_alive():
    model = nn.Linear(2, 2)
    known = identity(holding(model), numbers=True)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None
    assert known == known and known != identity(holding(nn.Linear(2, 2)), numbers=True)


def cell(text, **globals_):
    """A cell of a notebook; run again, it makes its functions anew."""

    def run(text, **changes):
        globals_.update(changes)
        exec(compile(text, "cell", "exec"), globals_)
        return identity(globals_["loss"], numbers=True)

    return run(text), run


LOSS = "loss = lambda model, batch: helper(model)"


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("def helper(model): return 1\n" + LOSS, "def helper(model): return 2\n" + LOSS),
        ("def inner(): return 1\ndef helper(model): return inner()\n" + LOSS, "def inner(): return 2"),
        ("scale = 1.0\ndef helper(model): return scale\n" + LOSS, "scale = 2.0"),
        ("scale = 1.0\ndef loss(parts): return sum(scale * part for part in parts)", "scale = 2.0"),
        ("def helper(model): return helper(model)\n" + LOSS, "def helper(model): return 1"),
        ("class helper: pass\n" + LOSS, "class helper: pass"),
        ("scale = 1.0\nclass A:\n  def loss(self): return scale\na = A()\nloss = a.loss", "scale = 2.0"),
    ],
    ids=["helper", "helper of a helper", "number of a helper", "number in a generator", "recursion", "class", "method"],
)
def test_what_a_function_leads_to_counts(text, change):
    before, run = cell(text)
    if "class" not in text:  # the same text is the same function
        assert run(text) == before
    assert run(change) != before


def test_a_method_is_known_again_whatever_it_reads():
    before, run = cell("class A:\n  def loss(self): return options\na = A()\nloss = a.loss", options={})
    assert run("loss = a.loss") == before and run("loss = A().loss") != before


def test_objects_that_are_globals_count():
    a, b = torch.zeros(2), torch.zeros(2)
    before, run = cell("loss = lambda model, batch: model(labels)", labels=a)
    assert run("", labels=a) == before and run("", labels=b) != before


def test_other_modules_count_where_they_are_read():
    package, module = ModuleType("package"), ModuleType("package.module")
    package.module, module.scale, module.other = module, 1.0, 1.0
    module.helper = FunctionType(compile("1", "", "eval"), vars(module))
    before, run = cell("loss = lambda: package.module.helper(package.module.scale)", package=package)
    module.other = 2.0
    assert run("") == before
    module.scale = 2.0
    assert run("") != before
    module.scale = 1.0
    assert run("") == before
    module.helper.__code__ = compile("2", "", "eval")  # as a notebook reloads it
    assert run("") != before


def test_what_a_branch_may_ask_of_a_number_counts_always():
    assert not same(holding(0), holding(1), numbers=False) and not same(holding(0.0), holding(0.1), numbers=False)
    assert not same(holding(-0.1), holding(0.1), numbers=False) and not same(holding(1), holding(1.0), numbers=False)
    assert same(holding(100), holding(101), numbers=False) and same(holding(0.1), holding(0.2), numbers=False)
