"""The answer of a compiled step is taken if and only if that very step has said that its norms are finite."""

import pytest
import torch
from torch import nn

import dpscale
from dpscale.engine import Engine
from dpscale.engine.compile.finite_flag import FiniteFlag, publish

from ..helpers import SIZE, data, mlp
from ..helpers import loss_fn as cross_entropy

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA"))]


def run(flag, device, finite):
    with flag.listening():
        return publish(torch.ones(3, device=device), torch.tensor(finite, device=device))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("finite", [True, False])
def test_says_what_it_was_told(device, finite):
    flag = FiniteFlag(torch.device(device))
    for told in (finite, not finite, finite):
        flag.expect()
        assert run(flag, device, told).tolist() == [1.0, 1.0, 1.0]
        assert flag.read() is told


@pytest.mark.parametrize("device", DEVICES)
def test_a_run_that_tells_nobody_is_an_error(device):
    """An old answer never stands for a new run, and nobody waits for ever."""
    flag = FiniteFlag(torch.device(device))
    flag.expect()
    run(flag, device, True)
    assert flag.read()
    flag.expect()
    publish(torch.ones(3, device=device), torch.tensor(True, device=device))  # outside of listening()
    with pytest.raises(RuntimeError, match="without telling"):
        flag.read()


def test_each_hears_its_own():
    ours, other = FiniteFlag(torch.device("cpu")), FiniteFlag(torch.device("cpu"))
    for flag in (ours, other):
        flag.expect()
    run(ours, "cpu", False)
    run(other, "cpu", True)
    assert (ours.read(), other.read()) == (False, True)


def test_every_sum_waits_for_it():
    """What is summed is computed from the weights that `publish` passes on: it runs before, and is never left out."""
    seen = []

    def backend(graph, inputs):
        seen.append(graph)
        return graph

    model, mask = mlp(), torch.ones(SIZE, dtype=torch.bool)
    Engine(model, compile=backend).scaled_sum(cross_entropy, data().tensors, dpscale.Clip(C=0.5), mask)
    graph = seen[0].graph
    (told,) = graph.find_nodes(op="call_function", target=torch.ops.dpscale.publish.default)
    (output,) = graph.find_nodes(op="output")
    below = {told}
    for node in graph.nodes:  # in order of dependence
        if below & set(node.all_input_nodes):
            below.add(node)
    sums = output.args[0][: len(list(model.parameters()))]
    assert len(sums) == 4 and set(sums) <= below


@pytest.mark.parametrize("device", DEVICES)
def test_an_interrupted_reader_does_not_hear_the_last_run(device):
    model, mask = mlp().to(device), torch.ones(SIZE, dtype=torch.bool, device=device)
    engine = Engine(model, compile=lambda graph, inputs: graph)
    x, y = (t.clone().to(device) for t in data().tensors)
    engine.scaled_sum(cross_entropy, (x, y), dpscale.Clip(C=0.5), mask)
    ((compiled, *_),) = engine._compiled._known.values()
    compiled((x, y), mask, [1.0])  # started, never read: all was finite
    x[3] = torch.nan
    assert engine.scaled_sum(cross_entropy, (x, y), dpscale.Clip(C=0.5), mask).ignored == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_lies_where_the_step_reads_it_unless_the_forward_writes_there(in_place):
    model = nn.Sequential(nn.ReLU(inplace=in_place), mlp())
    engine, (x, y) = Engine(model, compile=lambda graph, inputs: graph), (t.clone() for t in data().tensors)
    mask = torch.ones(SIZE, dtype=torch.bool)
    engine.scaled_sum(cross_entropy, (x.abs(), y), dpscale.Clip(C=0.5), mask)
    ((compiled, *_),) = engine._compiled._known.values()
    given = [torch.ones_like(x[:2]), torch.ones_like(y[:2])]
    assert x.is_cuda or engine.put(given, 2, 3) is None  # nothing is recorded on a CPU
    compiled._buffers, compiled._filled = [x, y, mask], SIZE
    found = engine.put(given, 2, 3)
    if in_place:
        assert found is None
    else:
        assert [(r.data_ptr(), len(r)) for r in found] == [(x.data_ptr(), 3), (y.data_ptr(), 3)]
        assert all(bool((t[:2] == 1).all()) and not t[2:].any() for t in (x, y))  # nothing of what was there is left
    a, b = given
    for others in ([b, a], [a], [a.double(), b], [a[:, :2], b], [a[:1], b], [a, b.sum()]):
        assert engine.put(others, 2, 3) is None
    assert engine.put(given, 2, SIZE + 1) is None


def test_what_a_larger_draw_has_left_is_blanked():
    """Padding where the step reads is zeros, after draws of any sizes in any order."""
    model, mask = mlp(), torch.ones(SIZE, dtype=torch.bool)
    engine, (x, y) = Engine(model, compile=lambda graph, inputs: graph), (t.clone() for t in data().tensors)
    engine.scaled_sum(cross_entropy, (x, y), dpscale.Clip(C=0.5), mask)
    ((compiled, *_),) = engine._compiled._known.values()
    compiled._buffers, compiled._filled = [x, y, mask], SIZE
    for count in (3, 5, 2, SIZE, 1, 4):
        places = engine.put([torch.ones_like(x[:count]), torch.ones_like(y[:count])], count, SIZE)
        assert all(bool((t[:count] == 1).all()) and not t[count:].any() for t in places)
