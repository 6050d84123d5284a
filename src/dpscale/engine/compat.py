"""Every private name of torch that the library touches, each with what replaces it if it goes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn
from torch.nn.utils.stateless import _reparametrize_module


@contextmanager
def reparametrized(model: nn.Module, values: Mapping[str, Tensor] | None) -> Iterator[None]:
    """The model with other tensors for its parameters. torch.func.functional_call does it for one call."""
    if values is None:
        yield
        return
    with _reparametrize_module(model, dict(values), tie_weights=True):
        yield
