"""Images channels last in a traced step: the same numbers, in another order in memory."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import dpscale
from dpscale.engine import Engine
from dpscale.engine.compile import inductor, step
from dpscale.engine.reference import reference_sum
from dpscale.engine.rules import normalization
from dpscale.engine.tape.channels import between, channels_last


class Images(nn.Module):
    def __init__(self, flatten, relu=F.relu):
        super().__init__()
        self.relu = relu
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last, self.head = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(16, 3)
        self.flatten = flatten

    def forward(self, x):
        x = self.relu(self.norm(self.first(x)))
        return self.head(self.flatten(F.max_pool2d(self.last(self.second(x)), 2)))


def losses(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def traced_last(monkeypatch):
    """The graphs of steps that are traced from now on, as for CUDA, where torch's group norm takes rows in order."""
    graphs = []
    trace = step.traced
    monkeypatch.setattr(
        step, "traced", lambda whole, inputs, _, *rows: graphs.append(trace(whole, inputs, True, *rows)) or graphs[-1]
    )
    monkeypatch.setattr(normalization, "_native", torch.Tensor.is_contiguous)
    return graphs


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
    graphs = traced_last(monkeypatch)
    ours = Engine(model, compile=lambda graph, _: graph).scaled_sum(losses, batch, rule, mask)
    plain = dpscale.scaled_sum(model, losses, batch, rule, mask)
    for name, g in plain.grads.items():
        torch.testing.assert_close(ours.grads[name], g)
    torch.testing.assert_close(ours.norms, plain.norms)
    convolutions = torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default
    operands = [n.args[k].meta["val"] for n in graphs[0].graph.nodes if n.target in convolutions for k in (0, 1)]
    images = [t for t in operands if t.shape[0] == 3 and t.shape[2] == 4]
    assert len(images) >= 4
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images) == last


@pytest.mark.parametrize("any_size", [0, 9], ids=["", "any size"])
@pytest.mark.parametrize("relu", [F.relu, F.relu_], ids=["", "in place"])
def test_no_image_is_laid_out_anew(monkeypatch, relu, any_size):
    """But for the first, the batch's own; and norms and sums are the oracle's."""
    torch.manual_seed(0)
    model = Images(lambda x: x.flatten(1), relu)
    model.head = nn.Linear(24, 3)
    model.double()
    batch = torch.randn(3, 2, 4, 6).double(), torch.tensor([0, 2, 1])
    rule, mask = dpscale.PSASC(C=1.0, s=0.5, r=0.1), torch.ones(3, dtype=torch.bool)
    graphs = traced_last(monkeypatch)
    ours = Engine(model, compile=lambda graph, _: graph, any_size=any_size).scaled_sum(losses, batch, rule, mask)
    sums, norms, _ = reference_sum(model, losses, batch, rule, mask)
    for name, g in sums.items():
        torch.testing.assert_close(ours.grads[name], g)
    torch.testing.assert_close(ours.norms, norms)
    assert len(graphs) == 1
    values = {n: n.meta.get("val") for n in graphs[0].graph.nodes if n.op == "call_function"}
    images = {n: t for n, t in values.items() if isinstance(t, torch.Tensor) and t.shape[1:] == (4, 4, 6)}
    assert len(images) > 12
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in images.values())
    copied = [n for n, t in images.items() if n.target is torch.ops.aten.clone.default]
    assert all(n.args[0].meta["val"].stride() == n.meta["val"].stride() for n in copied)
    others = torch.ops.aten.native_group_norm.default, torch.ops.aten.max_pool2d_with_indices.default
    assert not [n for n in values if n.target in others]


def test_the_gradient_that_a_rule_sees_is_channels_last(monkeypatch):
    """Also where what comes next laid it out otherwise."""
    seen = []
    monkeypatch.setattr(normalization, "_dense", lambda t: seen.append(t.stride()) or t)
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(64, 3))
    batch = torch.randn(3, 2, 4, 4), torch.tensor([0, 2, 1])
    traced_last(monkeypatch)
    Engine(model, compile=lambda graph, _: graph).scaled_sum(
        losses, batch, dpscale.Clip(C=1.0), torch.ones(3, dtype=torch.bool)
    )
    assert seen[-2:] == [(64, 1, 16, 4)] * 2  # the first ones are the look's


def test_arguments_by_keyword_alone_are_left_as_they_are(monkeypatch):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm, self.head = nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Linear(16, 3)

        def forward(self, x):
            x = torch.conv2d(input=x, weight=self.conv.weight, bias=self.conv.bias)
            x = torch.group_norm(input=x, num_groups=2, weight=self.norm.weight, bias=self.norm.bias)
            return self.head(x.flatten(1))

    torch.manual_seed(0)
    model, rule, mask = Net().double(), dpscale.Clip(C=1.0), torch.ones(3, dtype=torch.bool)
    batch = torch.randn(3, 2, 4, 4).double(), torch.tensor([0, 2, 1])
    graphs = traced_last(monkeypatch)
    ours = Engine(model, compile=lambda graph, _: graph).scaled_sum(losses, batch, rule, mask)
    sums, norms, _ = reference_sum(model, losses, batch, rule, mask)
    for name, g in sums.items():
        torch.testing.assert_close(ours.grads[name], g)
    torch.testing.assert_close(ours.norms, norms)
    assert len(graphs) == 1  # traced, and not left to the eager path


@pytest.mark.parametrize(("shape", "native"), [((0, 4, 3, 2), True), ((2, 4, 1, 1), False)])
def test_group_norm_of_no_image_and_of_one_pixel(monkeypatch, shape, native):
    monkeypatch.setattr(normalization, "_native", lambda _: native)
    x = torch.randn(shape).double().contiguous(memory_format=torch.channels_last).requires_grad_()
    scale = [torch.randn(4).double().requires_grad_() for _ in range(2)]
    ours, plain = normalization.group_norm(x, 2, *scale), torch.group_norm(x, 2, *scale)
    torch.testing.assert_close(ours, plain)
    g = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, [x, *scale], g) for out in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_is_torchs(monkeypatch, native, affine):
    """Values, gradients and second derivatives; the layout is the input's."""
    if native and torch.get_default_device().type != "cpu":
        pytest.skip("torch's own kernel takes no other layout there")
    monkeypatch.setattr(normalization, "_native", lambda _: native)
    torch.manual_seed(0)
    x = (3 + torch.randn(2, 6, 3, 2, dtype=torch.double)).contiguous(memory_format=torch.channels_last)
    scale = [torch.randn(6, dtype=torch.double, requires_grad=True) for _ in range(2 * affine)]
    x.requires_grad_()
    ours, plain = normalization.group_norm(x, 3, *scale), torch.group_norm(x, 3, *scale)
    torch.testing.assert_close(ours, plain)
    g = torch.randn_like(ours)
    for a, b in zip(*(torch.autograd.grad(out, [x, *scale], g) for out in (ours, plain)), strict=True):
        torch.testing.assert_close(a, b)
    assert ours.stride() == x.stride() == torch.autograd.grad(normalization.group_norm(x, 3), x, g)[0].stride()
    assert torch.autograd.gradgradcheck(lambda *a: normalization.group_norm(a[0], 3, *a[1:]), (x, *scale))


@pytest.mark.parametrize(("kernel", "size"), [(2, (4, 6)), ((3, 2), (6, 4)), (2, (2, 2))])
@pytest.mark.parametrize("other", [0.0, float("inf"), -float("inf"), float("nan")])
def test_a_pooling_is_torchs(kernel, size, other):
    """Also where several are equal, or are not numbers."""
    torch.manual_seed(0)
    x = torch.randint(0, 3, (5, 3, *size)).double()
    x = x.where(torch.rand_like(x) < 0.8, other).contiguous(memory_format=torch.channels_last).requires_grad_()
    with channels_last(True):
        ours = between(F.max_pool2d, (x, kernel), {"stride": None, "ceil_mode": True})
    plain = F.max_pool2d(x, kernel)
    torch.testing.assert_close(ours, plain, equal_nan=True, rtol=0, atol=0)
    g = torch.randn_like(plain)
    back = [torch.autograd.grad(out, x, g)[0] for out in (ours, plain)]
    assert torch.equal(*back)
    assert all(t.is_contiguous(memory_format=torch.channels_last) for t in (ours, back[0]))
    assert type(ours.grad_fn).__name__ == "_MaxPoolBackward"


@pytest.mark.parametrize(
    "given",
    [{"stride": 1}, {"padding": 1}, {"dilation": 2}, {"kernel_size": 5}, {"kernel_size": 4}, {"return_indices": True}],
)
def test_another_pooling_is_torchs_own(given):
    x = torch.randn(1, 1, 8, 8).contiguous(memory_format=torch.channels_last).requires_grad_()
    with channels_last(True):
        ours = between(F.max_pool2d, (x,), {"kernel_size": 2} | given)
    plain = F.max_pool2d(x, **({"kernel_size": 2} | given))
    torch.testing.assert_close(ours, plain)
    first = ours[0] if isinstance(ours, tuple) else ours
    assert type(first.grad_fn).__name__ != "_MaxPoolBackward"


def test_group_norm_of_16_bits_is_computed_in_32():
    x = torch.randn(2, 4, 3, 3).bfloat16().contiguous(memory_format=torch.channels_last)
    ours = normalization.group_norm(x, 2)
    assert ours.dtype == torch.bfloat16
    torch.testing.assert_close(ours, torch.group_norm(x.float(), 2).bfloat16())


def test_what_several_read_is_written_once():
    """A channel's coefficients; a pooling, with the operations that alone read it, as an activation's backward does."""

    def step(x):
        x = x.detach().requires_grad_()
        out = F.max_pool2d(F.relu(x * (1 + x.mean((2, 3), keepdim=True).detach())), 2)
        (g,) = torch.autograd.grad(out.sum(), x)
        return g * 2, g.sum()

    graph = make_fx(step)(torch.randn(2, 3, 4, 4)).graph
    coefficients, *forward, backward = inductor._shared(graph)
    assert coefficients.target is torch.ops.aten.add.Tensor
    assert [n.args[1] for n in forward] == [0, 1]
    assert backward.target is torch.ops.aten.mul.Tensor  # by the coefficients, after the activation

    def ours(x):
        with channels_last(True):
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            return torch.autograd.grad(between(F.max_pool2d, (x, 2), {}).sum(), x)

    places = list(inductor._shared(make_fx(ours)(torch.randn(2, 3, 4, 4)).graph))
    assert places
    assert all(n.meta["val"].dtype == torch.int8 for n in places)


@pytest.mark.parametrize(
    ("convolutions", "linear", "groups", "mostly"), [(3, 2, 1, True), (1, 2, 1, False), (3, 0, 3, False)]
)
def test_a_graph_of_images_is_one_of_convolutions(convolutions, linear, groups, mostly):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    for _ in range(convolutions):
        node = graph.call_function(torch.ops.aten.convolution.default, (x, x, None, 1, 1, 1, False, 0, groups))
        node.meta["val"] = SimpleNamespace(is_cuda=True)
    for _ in range(linear):
        graph.call_function(torch.ops.aten.mm.default, (x, x))
    graph.output(x)
    assert inductor._mostly_convolutions(torch.fx.GraphModule(nn.Module(), graph)) is mostly
