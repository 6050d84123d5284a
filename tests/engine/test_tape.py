"""A taped call is taken apart and put together as torch's own trees would do it."""

from collections import OrderedDict, namedtuple

import pytest
import torch
from torch.utils import _pytree as pytree

from dpscale.engine.tape.tape import flattened, rebuilt

Pair = namedtuple("Pair", "first second")
x, w = torch.zeros(2, 3), torch.nn.Parameter(torch.zeros(4, 3))


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((x, w), {}),
        ((x, w, None, (1, 1), [0, 0], 1.5, "same", torch.float32), {}),
        (([x, w],), {"dim": 0}),
        ((x,), {"size": (2, 3), "mode": None}),
        ((), {}),
        (((),), {"empty": []}),
        ((x, (slice(None), ..., None)), {}),
        ((x.shape, x), {}),
        ((Pair(x, w), x), {}),
        (((x, [w, (x,)]),), {}),
        (({"b": x, "a": w},), {"c": OrderedDict(k=x)}),
        ((torch.max(x, 0), object), {}),
        ((x, [Pair(1, 2)]), {}),
    ],
)
def test_a_call_is_taken_apart_as_trees_are(args, kwargs):
    leaves, spec = flattened(args, kwargs)
    wanted, tree = pytree.tree_flatten((args, kwargs))
    assert [id(leaf) for leaf in leaves] == [id(leaf) for leaf in wanted]
    others = [object() for _ in leaves]
    given = rebuilt(others, spec)
    assert type(given[0]) is tuple and type(given[1]) is dict
    if not any(isinstance(each, tuple) and hasattr(each, "n_fields") for each in args):  # which takes no other objects
        assert given == pytree.tree_unflatten(others, tree)
