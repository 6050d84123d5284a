"""Our own kernel for each sample's weight gradient on the CPU, and what is done where it cannot be had."""

import shutil
import subprocess

import numpy as np
import pytest
import torch

import dpscale
from dpscale.engine import native
from dpscale.engine.engine import Engine
from dpscale.engine.rules import convolution
from dpscale.engine.rules.convolution import Patches
from dpscale.engine.rules.forms import Dense, widen
from dpscale.engine.verify.rows import _columns, _told

needed = pytest.mark.skipif(not native.available(), reason="there is no compiler for it")

SHAPES = {
    "one channel": (1, 16, (28, 28), (8, 8), (2, 2), (3, 3), (1, 1)),
    "no padding": (16, 32, (14, 14), (4, 4), (2, 2), (0, 0), (1, 1)),
    "same": (32, 32, (6, 6), (3, 3), (1, 1), (1, 1), (1, 1)),
    "odd": (3, 37, (9, 7), (3, 2), (2, 1), (1, 0), (1, 1)),
    "dilated": (5, 10, (11, 13), (2, 3), (1, 2), (0, 2), (3, 2)),
    "point": (7, 3, (4, 5), (1, 1), (1, 1), (0, 0), (1, 1)),
    "wide": (2, 70, (5, 5), (3, 3), (1, 1), (1, 1), (1, 1)),
}


def form(name, samples=5, images=1):
    inputs, outputs, size, kernel, stride, padding, dilation = SHAPES[name]
    x = torch.randn(samples, images, inputs, *size)
    weight = torch.randn(outputs, inputs, *kernel)
    y = torch.conv2d(x.flatten(0, 1), weight, None, stride, padding, dilation)
    return Patches(x, torch.randn(samples, images, *y.shape[1:]), weight.shape, stride, padding, dilation, 1)


def oracle(made):
    weight = torch.zeros(made.weight_shape, dtype=torch.float64, requires_grad=True)
    setting = made.stride, made.padding, made.dilation
    with torch.enable_grad():
        outs = [torch.conv2d(x.double(), weight, None, *setting) for x in made.x]
        return torch.stack(
            [torch.autograd.grad(y, weight, g.double())[0] for y, g in zip(outs, made.g, strict=True)]
        )  # fmt: skip


@needed
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=["channels first", "last"])
@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize("name", SHAPES)
def test_gradients_and_their_squares_are_the_oracles(name, images, layout):
    torch.manual_seed(0)
    made = form(name, images=images)
    x, g = (t.flatten(0, 1).contiguous(memory_format=layout) for t in (made.x, made.g))
    setting = made.weight_shape[2:], made.stride, made.padding, made.dilation
    products, squares = native.patch_gradients(x, g, images, *setting)
    expected = oracle(made)
    torch.testing.assert_close(products.permute(0, 4, 3, 1, 2).double(), expected, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(squares.double(), expected.flatten(1).square().sum(1), rtol=1e-5, atol=0)


@needed
def test_operands_may_be_views_that_repeat_or_skip():
    torch.manual_seed(0)
    made = form("odd")
    x = made.x[:1, 0].expand(5, -1, -1, -1)
    g = torch.stack([made.g[:, 0], made.g[:, 0]], -1)[..., 0]
    products, _ = native.patch_gradients(x, g, 1, (3, 2), (2, 1), (1, 0), (1, 1))
    expected = oracle(Patches(x.unsqueeze(1), made.g, *list(vars(made).values())[2:]))
    torch.testing.assert_close(products.permute(0, 4, 3, 1, 2).double(), expected, rtol=1e-5, atol=1e-4)


@needed
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 16), (9, 33), (4, 300)])
def test_what_tells_rows_apart_is_what_torch_says(monkeypatch, shape):
    torch.manual_seed(0)
    floats, whole = torch.randn(shape), torch.randint(-5, 5, shape)
    zeros = torch.zeros(shape)
    for given in (floats, floats.round(), floats.relu(), zeros, -zeros, zeros - 3, whole, whole + 2**60, -whole):
        expected = [column[None].numpy() for column in _columns(given)]
        for alone in (0, 1 << 20):
            monkeypatch.setattr(native, "ALONE", alone)
            assert native.rows(given) is not None
            np.testing.assert_array_equal(np.concatenate([*_told(given)]), np.concatenate(expected))


@needed
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_not_finite_or_not_in_one_stretch_are_left_to_torch(value):
    for place in (0, 17, 33 * 4 - 1):
        given = torch.randn(4, 33)
        given.view(-1)[place] = value
        assert native.rows(given) is None
        np.testing.assert_array_equal(np.concatenate([*_told(given)])[0], [k != place // 33 for k in range(4)])
    others = torch.randn(4, 6).t(), torch.randn(4, 6).double(), torch.randn(4, 0), torch.ones(2, 3, dtype=bool)
    for given in others:
        assert native.rows(given) is None


@needed
def test_threads_change_nothing(monkeypatch):
    torch.manual_seed(0)
    made, threads = form("same", samples=67), torch.get_num_threads()
    x, g = made.x.flatten(0, 1), made.g.flatten(0, 1)
    monkeypatch.setattr(native, "ALONE", 0)
    found = []
    for count in (1, 3):
        torch.set_num_threads(count)
        found.append(native.patch_gradients(x, g, 1, (3, 3), (1, 1), (1, 1), (1, 1)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needed
def test_a_settled_form_knows_the_squares_and_forgets_them_of_other_numbers(monkeypatch):
    torch.manual_seed(0)
    settled = form("no padding").settle()
    assert isinstance(settled, Dense)
    assert settled.squares is not None
    monkeypatch.setattr(native, "available", lambda: False)
    plain = form("no padding").settle()
    assert isinstance(plain, Dense)
    assert plain.squares is None
    torch.testing.assert_close(settled.norm2(), settled.per_sample().flatten(1).square().sum(1))
    huge = Dense(torch.full((2, 3), 1e30), squares=torch.full((2,), torch.inf))
    torch.testing.assert_close(huge.map(widen).norm2(), torch.full((2,), 3e60, dtype=torch.float64))
    twice = settled.map(lambda t: 2 * t)
    torch.testing.assert_close(twice.norm2(), 4 * settled.norm2())
    torch.testing.assert_close(settled.take(torch.tensor([3, 1])).norm2(), settled.norm2()[[3, 1]])


@pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler for it")
def test_where_there_is_a_compiler_there_is_a_kernel():
    assert native.available() == torch.backends.mkldnn.is_available()


@needed
def test_it_is_compiled_once_for_a_machine(monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG", logger="dpscale")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library.__wrapped__() is not None, caplog.text
    (made,) = (tmp_path / "dpscale").iterdir()
    assert made.stat().st_mode & 0o777 == 0o600
    monkeypatch.setattr(native.subprocess, "run", None)  # another process does without the compiler
    assert native._library.__wrapped__() is not None


@pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no such compiler")
def test_a_c_compiler_will_do(monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG", logger="dpscale")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "gcc")  # as some libraries set it
    assert native._library.__wrapped__() is not None, caplog.text


@needed
def test_nothing_is_loaded_that_others_may_have_written(monkeypatch, tmp_path, caplog):
    caplog.set_level("DEBUG", logger="dpscale")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native._library.__wrapped__() is not None, caplog.text
    (made,) = (tmp_path / "dpscale").iterdir()
    made.unlink()  # it is loaded here: its memory is that of the file
    made.write_bytes(b"somebody else's")
    made.chmod(0o666)
    assert native._library.__wrapped__() is not None  # compiled anew
    assert made.read_bytes() != b"somebody else's"
    made.parent.chmod(0o777)
    assert native._library.__wrapped__() is None


def test_without_a_compiler_torch_does_it(monkeypatch):
    torch.manual_seed(0)
    monkeypatch.setattr(native.shutil, "which", lambda name: None)
    assert native._library.__wrapped__() is None
    monkeypatch.setattr(native, "_library", lambda: None)
    made = form("same")
    called = []
    groups = Patches._by_groups
    monkeypatch.setattr(convolution.Patches, "_by_groups", lambda self: called.append(1) or groups(self))
    torch.testing.assert_close(made.settle().per_sample().double(), oracle(made), rtol=1e-5, atol=1e-4)
    assert called


@needed
@pytest.mark.parametrize("was, now", [
    ("sum[t][v] +=", "sum[t][v] -="), ("squares += sum", "squares += 2 * sum"), ("odd |= v - v != 0", "odd |= v != v"),
    ("negative -= v < 0", "negative -= v <= 0"), ("greatest = v > greatest", "greatest = v < greatest"),
    ("least = x[k] < least", "least = x[k] > least"), ("x[k] - x[k] == 0", "x[k] == x[k]"),
])  # fmt: skip
def test_a_kernel_that_is_wrong_for_the_example_is_not_taken(monkeypatch, tmp_path, was, now):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    broken = tmp_path / "native.cpp"
    broken.write_text(text := native.SOURCE.read_text().replace(was, now))
    assert text != native.SOURCE.read_text()
    monkeypatch.setattr(native, "SOURCE", broken)
    assert native._library.__wrapped__() is None


def test_a_compiler_that_fails_is_none(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(native, "SOURCE", tmp_path / "absent.cpp")
    assert native._library.__wrapped__() is None

    def slow(*_, **__):
        raise subprocess.TimeoutExpired("g++", 1)

    monkeypatch.setattr(native.subprocess, "run", slow)
    assert native._library.__wrapped__() is None


@needed
@pytest.mark.parametrize("norm", [False, True], ids=["convolutions alone", "with group norm"])
def test_images_have_channels_last_on_the_cpu_unless_that_is_slower(norm):
    layers = [torch.nn.Conv2d(2, 4, 3, padding=1), *([torch.nn.GroupNorm(2, 4)] if norm else []), torch.nn.Tanh()]
    model = torch.nn.Sequential(
        *layers, torch.nn.Conv2d(4, 4, 3, padding=1), torch.nn.Flatten(), torch.nn.Linear(64, 3)
    )
    graphs = []
    batch, mask = (torch.randn(5, 2, 4, 4), torch.tensor([0, 2, 1, 1, 0])), torch.ones(5, dtype=torch.bool)

    def losses(model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    ours = Engine(model, compile=lambda graph, _: graphs.append(graph) or graph)
    out = ours.scaled_sum(losses, batch, dpscale.Clip(C=1.0), mask)
    plain = dpscale.scaled_sum(model, losses, batch, dpscale.Clip(C=1.0), mask)
    torch.testing.assert_close(out.norms, plain.norms)
    convolutions = [n for n in graphs[0].graph.nodes if n.target is torch.ops.aten.convolution.default]
    last = [n.args[0].meta["val"].is_contiguous(memory_format=torch.channels_last) for n in convolutions]
    assert last == [not norm] * 2
