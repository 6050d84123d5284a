"""Models under `fully_shard`: whole while a step is computed, in shards before and after.

A step needs every parameter in the forward and the backward, and looks at a model run it more often on one rank than on
another. So a step gathers the whole model once, in a few collectives, and runs it as a plain module: nothing that FSDP
has hung on it takes part. The sums go back in shards; parameters, gradients and the optimizer's state are never whole.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn

from dpscale.engine.compat import (
    all_gather,
    forward_hooks,
    is_sharded,
    own_parameters,
    reduce_scatter,
    sharding_policies,
)

BUCKET = 1 << 25
"""How many numbers to reduce or gather at once."""


def buckets(tensors: Mapping[str, Tensor], size: int = BUCKET) -> Iterator[list[str]]:
    """Names of tensors of one type and device, in lists of about ``size`` numbers at most; a larger one is alone.

    In the order in which they come, which is the same on every rank; its devices may have other names. Ranks must
    give tensors of the same sizes, or their buckets would not be the same.
    """
    kinds: dict[Any, list[str]] = {}
    for name, t in tensors.items():
        kinds.setdefault((t.dtype, t.device), []).append(name)
    for names in kinds.values():
        held: list[str] = []
        room = size
        for name in names:
            if held and tensors[name].numel() > room:
                yield held
                held, room = [], size
            held.append(name)
            room -= tensors[name].numel()
        yield held


class Shards:
    """The sharded parameters of a model, and whole ones that take their place for a while.

    Args:
        model: with `fully_shard` on it or on modules of it.
        group: the ranks that have the shards.
    """

    def __init__(self, model: nn.Module, group: Any) -> None:
        from torch.distributed.fsdp import FSDPModule

        self._model, self._group = model, group
        self._ranks, self._rank = distributed.get_world_size(group), distributed.get_rank(group)
        self._modules: list[Any] = [m for m in model.modules() if isinstance(m, FSDPModule)]
        self._check()
        self._whole: dict[int, nn.Parameter] = {}  # by the id of the sharded one
        self._stored: dict[int, Any] = {}  # the sharded one, by the id of the whole one
        self._places: list[tuple[nn.Module, str, Any]] = []
        self.taken = False  # whether the whole parameters are in the model
        self.keep = False  # whether they stay in memory and in their place: for a compiled step
        self.wanted: Callable[[], bool] = lambda: False  # whether a forward in somebody's own loop is to be recorded
        self.before_forward: Callable[[], None] = self.take  # what then makes the parameters whole
        self._hook()

    def _check(self) -> None:
        """Refuse what is not `fully_shard` over all ranks."""
        from torch.distributed.fsdp import CPUOffloadPolicy
        from torch.distributed.tensor import Shard

        sharded: list[tuple[str, Any]] = [(n, p) for n, p in self._model.named_parameters() if is_sharded(p)]
        for name, p in sharded:
            mesh, ranks = p.device_mesh, distributed.get_process_group_ranks(self._group)
            if not self._modules or mesh.ndim != 1 or tuple(p.placements) != (Shard(0),):
                raise ValueError(
                    f"Parameter {name!r} is distributed over {mesh} as {tuple(p.placements)}: tensor parallelism, or "
                    "replicas of shards. A step knows parameters that fully_shard(model) has divided by their first "
                    "dimension over one row of ranks. Use fully_shard with a mesh of one dimension, and nothing else."
                )
            if mesh.mesh.flatten().tolist() != ranks:
                raise ValueError(
                    f"Parameter {name!r} is divided over the ranks {mesh.mesh.tolist()}, and the run has {ranks}. Pass "
                    "the group of that mesh: privatize(..., group=mesh.get_group())."
                )
        for module in self._modules:
            precision, offloads = sharding_policies(module)
            if precision.param_dtype is not None or precision.output_dtype is not None:
                raise ValueError(
                    "A MixedPrecisionPolicy of fully_shard is not known here: its parameters are others than those "
                    "that the forward sees. Leave it out, and call the model inside torch.autocast."
                )
            if any(isinstance(offload, CPUOffloadPolicy) for offload in offloads):
                raise ValueError("CPUOffloadPolicy of fully_shard is not known here. Leave it out.")

    def _hook(self) -> None:
        """FSDP's own hooks rest while the parameters are whole; a forward that is to be recorded makes them so."""
        for module in self._modules:
            for hooks in forward_hooks(module):
                for number, hook in hooks.items():
                    made_by = getattr(hook, "__module__", "")
                    if made_by.startswith("torch.distributed.fsdp") or isinstance(hook, _Resting):
                        hooks[number] = _Resting(self, hook)

        def before(*_: Any) -> None:
            if torch.is_grad_enabled() and self.wanted():
                self.before_forward()

        self._model.register_forward_pre_hook(before, prepend=True)

    def stored(self, p: Any) -> Any:
        """The parameter that an optimizer has, for one of the model."""
        return self._stored.get(id(p), p)

    def take(self) -> None:
        """Gather every parameter, and put it into the model. All ranks must."""
        if self.taken:
            return
        for module in self._modules:
            module.reshard()  # FSDP leaves some as they were in the last forward
        found = ((m, n, p) for m in self._model.modules() for n, p in own_parameters(m).items())
        self._places = [(m, n, p) for m, n, p in found if p is not None and is_sharded(p)]
        shards = {str(k): p for k, p in enumerate({id(p): p for *_, p in self._places}.values())}
        with torch.no_grad():
            for names in buckets(shards):  # by their whole size: shards are not equal
                self._gather([shards[n] for n in names])
        for module, name, p in self._places:
            own_parameters(module)[name] = self._whole[id(p)]
        self.taken = True

    def give_back(self) -> None:
        """Put the shards into the model again."""
        if not self.taken:
            return
        for module, name, p in self._places:
            own_parameters(module)[name] = p
            if not self.keep:  # whoever still has the graph of a forward keeps what it needs
                self._whole[id(p)].data = p.to_local().new_empty(0)
        self.taken = False

    def _gather(self, shards: Sequence[Any]) -> None:
        sizes = [self._room(p) for p in shards]
        own = torch.cat([_padded(p.to_local().reshape(-1), size) for p, size in zip(shards, sizes, strict=True)])
        all_RN = own.view(1, -1)
        if self._ranks > 1:
            all_RN = own.new_empty(self._ranks, len(own))
            all_gather(all_RN.view(-1), own, group=self._group)
        for p, part in zip(shards, all_RN.split(sizes, 1), strict=True):
            values = part.reshape(-1)[: p.numel()].view(p.shape)
            if id(p) not in self._whole:
                whole = self._whole[id(p)] = nn.Parameter(values.clone(), requires_grad=p.requires_grad)
                self._stored[id(whole)] = p
            elif self.keep and self._whole[id(p)].shape == values.shape:
                self._whole[id(p)].copy_(values)
            else:
                self._whole[id(p)].data = values.clone()
            self._whole[id(p)].requires_grad_(p.requires_grad)

    def scattered(self, sums: Mapping[str, Tensor], shards: Mapping[str, Any]) -> dict[str, Tensor]:
        """The sum over the ranks of what each has, and of that this rank's shard."""
        own: dict[str, Tensor] = {}
        for names in buckets(sums):
            sizes = [self._room(shards[n]) for n in names]
            parts = [
                _padded(sums[n].reshape(-1), self._ranks * size).view(self._ranks, size)
                for n, size in zip(names, sizes, strict=True)
            ]
            all_RN = torch.cat(parts, 1)
            mine = all_RN[0]
            if self._ranks > 1:
                mine = torch.empty_like(mine)
                reduce_scatter(mine, all_RN.view(-1), group=self._group)
            for n, part in zip(names, mine.split(sizes), strict=True):
                shape = shards[n].to_local().shape
                own[n] = part[: shape.numel()].view(shape)
        return {n: own[n] for n in sums}

    def set_gradient(self, p: Tensor, mean: Tensor) -> None:
        """Hand it to the optimizer; of a parameter that is divided, this rank's part of it."""
        kept = self.stored(p)
        kept.grad = as_shard(mean, kept) if is_sharded(kept) else mean

    def joined(self, shard: Tensor, p: Tensor) -> Tensor:
        """The whole tensor, of what is divided as a parameter is. All ranks must."""
        kept = self.stored(p)
        whole: Tensor = as_shard(shard, kept).full_tensor() if is_sharded(kept) else shard
        return whole

    def parted(self, whole: Tensor, p: Any) -> Tensor:
        """This rank's part of it: whole rows, as many as the other ranks have, or less in the last ones."""
        kept = self.stored(p)
        if not is_sharded(kept):
            return whole
        rows = -(-kept.shape[0] // self._ranks)
        return whole[self._rank * rows : (self._rank + 1) * rows]

    def _room(self, p: Any) -> int:
        """How many numbers of a parameter the first rank has: it is divided by whole rows, the last shards are less."""
        shape: torch.Size = p.shape
        return -(-shape[0] // self._ranks) * shape[1:].numel()


class _Resting:
    """A hook of FSDP that does nothing while the parameters are whole."""

    ours = True

    def __init__(self, shards: Shards, hook: Callable[..., Any]) -> None:
        self._shards, self._hook = shards, hook

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._shards.taken else self._hook(*args, **kwargs)


def _padded(flat: Tensor, size: int) -> Tensor:
    return flat if len(flat) == size else torch.cat([flat, flat.new_zeros(size - len(flat))])


def as_shard(own: Tensor, p: Any) -> Any:
    """This rank's part of a tensor that is divided as the parameter is."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(own, p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride())
