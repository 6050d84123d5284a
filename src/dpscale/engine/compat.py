"""Every private name of torch that the library touches, each with what replaces it if it goes."""

from torch import Tensor
from torch.utils._pytree import TreeSpec as TreeSpec
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_unflatten as tree_unflatten


def version(t: Tensor) -> int:
    """How often a tensor, or anything that shares its numbers, was written."""
    return t._version
