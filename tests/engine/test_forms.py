"""A form's norm and weighted sum are those of the gradients it stands for, whichever way it computes them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dpscale.engine.rules import convolution, linear
from dpscale.engine.rules.convolution import Patches
from dpscale.engine.rules.embedding import Rows
from dpscale.engine.rules.forms import Dense, Drop, Stack, Widen, total
from dpscale.engine.rules.linear import Outer


def randn(*shape):
    return torch.randn(*shape, dtype=torch.float64)


@st.composite
def forms(draw, samples=3):
    """Two forms of the same tensor, perhaps of different kinds."""
    torch.manual_seed(draw(st.integers(0, 2**16)))
    kind = draw(st.sampled_from(["outer", "rows", "patches", "rows-of-kernels", "mixed"]))
    t, i, o = (draw(st.integers(1, 9)) for _ in range(3))
    if kind == "outer":
        return [Outer(randn(samples, t, i), randn(samples, t, o)) for _ in range(2)]
    if kind == "patches":
        shape, rest = torch.Size((2 * o, i, 3, 2)), ((1, 2), (1, 0), (1, 1), 2)
        return [Patches(randn(samples, 2, 2 * i, 4, 5), randn(samples, 2, 2 * o, 4, 2), shape, *rest) for _ in range(2)]
    if kind == "rows-of-kernels":  # wide enough for its own way of unfolding
        height, width, down, across = (draw(st.integers(1, 3)) for _ in range(4))
        shape, rest = torch.Size((o, 48, height, width)), ((down, across), (1, 2), (1, 1), 1)
        out = [(7 + 2 - height) // down + 1, (6 + 4 - width) // across + 1]
        return [Patches(randn(samples, 1, 48, 7, 6), randn(samples, 1, o, *out), shape, *rest) for _ in range(2)]
    rows = [Rows(torch.randint(0, o, (samples, t)), randn(samples, t, i), o) for _ in range(2)]
    return (
        rows
        if kind == "rows"
        else [rows[0], Outer(randn(samples, t, i), randn(samples, t, o)), Dense(randn(samples, o, i))]
    )


@pytest.mark.parametrize("chunk", [1, 1 << 26], ids=["chunked", "whole"])
def test_forms_agree_with_their_gradients(chunk, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", chunk)
    monkeypatch.setattr(convolution, "CHUNK", chunk)

    @given(several=forms())
    def check(several):
        weights = torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
        for form in [*several, total(several), *(f.settle() for f in several), total(several).settle()]:
            gradients = form.per_sample()
            torch.testing.assert_close(form.norm2(), gradients.flatten(1).square().sum(1))
            torch.testing.assert_close(form.weighted(weights), torch.einsum("b,b...->...", weights, gradients))
        torch.testing.assert_close(total(several).per_sample(), sum(f.per_sample() for f in several))

    check()


@given(several=forms())
def test_dropped_samples_are_exact_zeros(several):
    keep = torch.tensor([True, False, True])
    for form in several:
        poisoned = form.map(_Poison()).map(Drop(keep))
        assert poisoned.norm2()[1] == 0
        torch.testing.assert_close(poisoned.norm2()[keep], form.norm2()[keep])
        torch.testing.assert_close(poisoned.weighted(torch.ones(3).double()), form.weighted(keep.double()))


class _Poison(Widen):
    """Sample 1 becomes infinite."""

    def __call__(self, operand):
        operand = operand.clone()
        operand[1] = torch.inf
        return operand


def test_gram_is_taken_where_it_is_cheaper():
    assert Outer(randn(1, 2, 50), randn(1, 2, 50)).gram
    assert not Outer(randn(1, 50, 2), randn(1, 50, 2)).gram
    assert isinstance(Outer(randn(1, 50, 2), randn(1, 50, 2)).settle(), Dense)
    assert isinstance(Outer(randn(1, 2, 50), randn(1, 2, 50)).settle(), Outer)


def test_kernel_rows_are_taken_where_they_pay():
    rest = (torch.Size((4, 48, 3, 3)), (1, 1), (1, 1), (1, 1), 1)
    settled = Patches(randn(2, 1, 48, 32, 32), randn(2, 1, 4, 32, 32), *rest).settle()
    assert isinstance(settled, Stack) and len(settled.slices) == 3
