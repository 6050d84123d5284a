"""Functions that do the same are the same; one that reads other numbers, or holds other objects, is another."""

import functools
import gc
import weakref
from dataclasses import dataclass
from types import FunctionType

import torch
from torch import nn

from dpscale.engine.functions import identity

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
    held = {"scale": 1.0}
    function = holding(held)
    assert same(function, function) and not same(function, holding(held))


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
