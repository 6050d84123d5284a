"""Several processes as one run: who has which rows, one reduction, and failing together.

Every rank draws the same batches from one key, and takes its rows of each. Norms and weights are local; sums are
reduced once a step; then all ranks add the same noise, so their parameters stay equal to the bit. Before anything is
booked or reduced the ranks exchange three numbers: whether one of them failed, and whether they are at the same step of
the same run. So an error on one rank is an error on all of them, and nothing is released.

These three numbers travel by a group of their own, over the CPU: nothing that a script sends can be taken for them, a
rank that dies is noticed at once, and no GPU is waited for.
"""

import gc
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from dpscale.checks import out_of_memory, require
from dpscale.engine.compat import all_gather, group_timeout, is_sharded, tree_leaves, tree_map
from dpscale.engine.verify.randomness import own_randomness
from dpscale.files import checksum
from dpscale.noise import Key
from dpscale.sampling import Indices
from dpscale.sharding import Shards, as_shard, buckets

T = TypeVar("T")

log = logging.getLogger("dpscale")

FETCHED = 32
"""Samples that are compared between ranks."""

GLANCED_AT = 1 << 16
"""How many numbers of a parameter are compared between two thorough comparisons."""

_REFUSED = {
    "FullyShardedDataParallel": ("torch.distributed", "FSDP1", "Use torch.distributed.fsdp.fully_shard(model)."),
    "DeepSpeedEngine": ("deepspeed", "DeepSpeed", "Pass the plain model, or use fully_shard(model) for its shards."),
    "PipelineModule": ("deepspeed", "Pipeline parallelism", "Give every rank the whole model, or use fully_shard."),
    "_PipelineStageBase": ("torch.distributed", "Pipeline parallelism",
                           "Give every rank the whole model, or use fully_shard(model)."),
    "DataParallel": ("torch.nn", "DataParallel", "Pass its .module, and start a process per GPU with torchrun."),
}  # fmt: skip
"""Wrappers that are not known, by the name of their class: (where it is from, what it is called, what to do)."""

_ADVICE = {
    "seed": "Pass the same seed on every rank, or none.",
    "plan": "Make it from the same numbers everywhere; calibrate it with the same versions.",
    "optimizer": "Make it alike on every rank.",
    "parameters": "Every rank must hold the whole model: build it alike, freeze it alike. A stage of a pipeline, or a "
    "part of a tensor-parallel model, is not known here.",
    "values": "Call torch.manual_seed(0) before the model is built, load one checkpoint on every rank, or wrap it in "
    "DistributedDataParallel, which copies rank 0's. Change weights and learning rates alike on every rank.",
    "buffers": "The run goes on: a forward may count itself, and a rank without rows runs none. But each computes with "
    "its own, and the first one's are saved. Change buffers alike on every rank.",
    "data": "Give every rank the whole data set, in the same order: a rank takes its rows of each draw by itself.",
    "call": "Run the same script on every rank, without calls that only some of them make: save() too, which writes on "
    "the first rank alone.",
    "draw": "Take and release batches in the same order on every rank.",
    "modes": "Call model.train() on every rank, also where one of them has evaluated the model alone.",
    "steps taken": "Load the same state on every rank.",
    "state": "Load the same one on every rank: of the same run, saved at the same step.",
    "key": "Start all ranks again, from what was saved last: they draw from keys of their own since a load failed.",
    "noise": "Draw it from the same source on every rank.",
    "ledger": "Pass the ledger, and the name of the run, on every rank: the first one books for all.",
}
"""What to do where ranks disagree."""


def unwrapped(model: Any) -> nn.Module:
    """The model out of its DistributedDataParallel; refuses other wrappers by name."""
    for module in (model, *(model.modules() if isinstance(model, nn.Module) else ())):
        for made in type(module).__mro__:
            source, name, action = _REFUSED.get(made.__name__, ("?", "", ""))
            if made.__module__.startswith(source):
                raise ValueError(f"The model is in {made.__name__}. {name} is not known here. {action}")
    while isinstance(model, DistributedDataParallel):
        model = model.module
    require(isinstance(model, nn.Module), "privatize", "model", "a torch.nn.Module", type(model).__name__,
            "Pass the module itself: not its class, nor a function.")  # fmt: skip
    return model  # type: ignore[no-any-return]


class Ranks:
    """The processes of a run, as one of them sees it. A process alone is one rank, and exchanges nothing.

    Args:
        model: out of its wrapper.
        group: the process group; None for that of all processes, where there is one.
    """

    def __init__(self, model: nn.Module, group: Any = None) -> None:
        self.rank, self.size, self.public = 0, 1, False
        self._lost: str | None = None
        self._warned = False
        self._shards: Shards | None = None
        if not (distributed.is_available() and distributed.is_initialized()):
            _require_no_launcher()
            action = "Call torch.distributed.init_process_group() first, or leave it out."
            require(group is None, "privatize", "group", "None where there are no processes", group, action)
            return
        self._group = group  # not that of all processes itself: what outlives it may abort the process at its end
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        if self.rank < 0:
            raise ValueError("This process is not in the group of privatize(). Call it on the ranks of the group only.")
        if any(map(is_sharded, model.parameters())):
            self._shards = Shards(model, group)
        _bypass(model, self)
        if self.size == 1:
            return
        device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self.timeout = _timeout(group or distributed.group.WORLD, device)
        members = None if group is None else distributed.get_process_group_ranks(group)
        self._control = distributed.new_group(  # of a part of the ranks, only these make it
            members, timeout=self.timeout, backend="gloo", use_local_synchronization=group is not None
        )

    # -- Who has which rows --------------------------------------------------------------------------------------------

    def share(self, indices: Indices) -> Indices:
        """This rank's rows of a draw."""
        return indices[self.rank :: self.size]

    def key(self, seed: int | None) -> Key:
        """The run's key: rank 0's, on every rank."""
        if self.size == 1:
            return Key(seed)
        with self.together("privatize", lambda: {"seed": seed if seed is None else Key(seed).derive("seed")}):
            Key(seed)
        return Key.shared(seed, self._handed_out)

    def told(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if self.size == 1:
            return value
        values = [value]
        with self._talking("What rank 0 has to say", "Nothing was released."):
            distributed.broadcast_object_list(values, group=self._control, group_src=0)
        return values[0]

    @property
    def sharded(self) -> bool:
        """Whether the model is under `fully_shard`."""
        return self._shards is not None

    def _handed_out(self, secret: bytes) -> bytes:
        numbers = torch.tensor(list(secret), dtype=torch.uint8, device="cpu")
        with self._talking("The key of the run", "Nothing was released."):
            distributed.broadcast(numbers, group=self._control, group_src=0)
        return bytes(numbers.tolist())

    # -- Failing together ----------------------------------------------------------------------------------------------

    @contextmanager
    def together(self, call: str, terms: Callable[[], Mapping[str, Any]]) -> Iterator[None]:
        """What is done within succeeds on all ranks or on none.

        An error on one rank is raised on all; so is a difference in what they say of themselves at the end. No rank
        leaves before all have come, or one is lost.

        Args:
            call: what the rank is doing.
            terms: what all ranks must agree on, by name.
        """
        if self.size == 1:
            yield
            return
        if self._lost is not None:
            raise RuntimeError(self._lost)
        try:
            yield
            said = {"call": call, **terms()}
        except Exception as error:
            if self._lost is None:
                with suppress(RuntimeError):
                    self._exchange(call, True, {"call": call}, f"{type(error).__name__}: {error}")
            raise
        answers = self._exchange(call, False, said, None)
        if answers is None:
            return
        name, told = _difference(call, answers)
        if name != "buffers":
            raise RuntimeError(f"Nothing was released: {told}")
        if not self._warned:
            self._warned = True
            log.warning("dpscale: %s", told)

    def meet(self, call: str) -> None:
        """All ranks must have come to this call. Never within `together`, where some of them would leave before."""
        with self.together(call, dict):
            pass

    def _exchange(
        self, call: str, failed: bool, said: Mapping[str, Any], error: str | None
    ) -> list[tuple[Mapping[str, Any], str | None]] | None:
        """What every rank has to say if one has failed or they disagree; else None."""
        number = _number(said)
        told = torch.tensor([failed, number, -number], device="cpu")
        answers: list[Any] = [None] * self.size
        with self._talking(f"{call}()", "Nothing was released."):
            distributed.all_reduce(told, distributed.ReduceOp.MAX, group=self._control)
            highest_failed, highest, lowest = told.tolist()
            if not highest_failed and highest == -lowest:
                return None
            distributed.all_gather_object(answers, (said, error), group=self._control)
        return answers

    @contextmanager
    def _talking(self, what: str, outcome: str) -> Iterator[None]:
        """Say it in words if a rank is lost; nothing can be exchanged afterwards."""
        try:
            yield
        except RuntimeError as error:
            if self.size == 1 or out_of_memory(error):
                raise
            self._lost = (
                f"{what} could not be agreed on: another rank has ended, or did not come within {self.timeout}, the "
                f"timeout of the process group. {outcome} The first error is in the output of another rank. Start all "
                "ranks again, from what was saved last."
            )
            raise RuntimeError(self._lost) from error

    # -- One reduction -------------------------------------------------------------------------------------------------

    @contextmanager
    def whole(self, call: str) -> Iterator[None]:
        """Within ``call``, a sharded model is whole. All ranks must enter."""
        if self._shards is None:
            yield
            return
        try:
            self._gather(call)
            yield
        finally:
            self._shards.give_back()

    def _gather(self, call: str) -> None:
        """Make a sharded model whole. First all ranks must have come: one that is in another call would wait for the
        others' word, and they for its shards."""
        assert self._shards is not None
        if self._shards.taken:
            return
        self.meet(call)
        with self._talking("The parameters", "Nothing was released."):
            self._shards.take()

    def total(self, sums: dict[str, Tensor], parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The sums over all ranks: on each of them, or of a sharded parameter this rank's shard."""
        if self.size == 1 and self._shards is None:
            return sums
        stored = {n: self.stored(p) for n, p in parameters.items()}
        # In one order and one precision: a rank may have come to its sum another way than the others.
        wide = {n: sums[n].to(torch.promote_types(p.dtype, torch.float32)) for n, p in parameters.items()}
        sharded = {n: t for n, t in wide.items() if is_sharded(stored[n])}
        plain = {n: t for n, t in wide.items() if n not in sharded}
        with self._talking("The sum of a step", "The step is charged, and nothing of it was applied."):
            if self.size > 1:
                for names in buckets(plain):
                    plain.update(self._reduced([plain[n] for n in names], names))
            if self._shards is not None:
                plain.update(self._shards.scattered(sharded, stored))
        return {n: plain[n] for n in parameters}

    def _reduced(self, tensors: list[Tensor], names: list[str]) -> dict[str, Tensor]:
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        flat = tensors[0].view(-1) if alone else torch.cat([t.reshape(-1) for t in tensors])
        distributed.all_reduce(flat, group=self._group)
        parts = flat.split([t.numel() for t in tensors])
        return {n: part.view(t.shape) for n, part, t in zip(names, parts, tensors, strict=True)}

    def by_noise(
        self, sums: Mapping[str, Tensor], parameters: Mapping[str, Tensor]
    ) -> Iterator[tuple[int | None, dict[str, Tensor]]]:
        """(Whose noise, the sums that get it): the same on every rank, or for this rank's shards its own."""
        if self._shards is None:
            yield None, dict(sums)
            return
        own = {n: t for n, t in sums.items() if is_sharded(self.stored(parameters[n]))}
        yield None, {n: t for n, t in sums.items() if n not in own}
        if own:
            yield self.rank, own

    def stored(self, p: Tensor) -> Any:
        """The parameter as the optimizer has it."""
        return p if self._shards is None else self._shards.stored(p)

    def set_gradients(self, means: Mapping[str, Tensor], parameters: Mapping[str, Tensor]) -> list[Any]:
        """Hand them to the optimizer; the parameters as it has them."""
        given = [parameters[n] for n in means]
        for p, mean in zip(given, means.values(), strict=True):
            mean = mean if mean.dtype == p.dtype else mean.to(p.dtype)
            if self._shards is None:
                p.grad = mean
            else:
                self._shards.set_gradient(p, mean)
        return given if self._shards is None else [*map(self._shards.stored, given)]

    def give_back(self) -> None:
        """Leave a sharded model in shards, where a forward was not followed by its step."""
        if self._shards is not None:
            self._shards.give_back()

    def record_when(self, wanted: Callable[[], bool], compiled: bool) -> None:
        """When a forward in somebody's own loop belongs to a private step; and whether parameters must keep their place
        for a compiled one."""
        if self._shards is not None:
            self._shards.wanted, self._shards.keep = lambda: wanted() and not self.public, compiled
            self._shards.before_forward = lambda: self._gather("forward")

    # -- What a checkpoint holds ---------------------------------------------------------------------------------------

    def joined(self, memory: Mapping[str, Any], parameters: Mapping[str, Tensor], samples: int) -> Mapping[str, Any]:
        """What a momentum remembers of all shards and all ``samples``, from each rank's part. All ranks must."""
        rows = memory.get("memory") if self.size > 1 else None
        if self._shards is None and rows is None:
            return memory
        with self._talking("What the momentum remembers", "Nothing was released."):
            found = dict(memory)
            if self._shards is not None:
                found["average"] = {n: self._shards.joined(t, parameters[n]) for n, t in memory["average"].items()}
            if rows is not None:
                device = next(iter(parameters.values())).device
                found["memory"] = self._rows_of_all(rows.to(device), samples).to(rows.device)
        return found

    def _rows_of_all(self, own: Tensor, count: int) -> Tensor:
        """The rows of which rank r has r, r + W, …"""
        each = -(-count // self.size)
        padded = torch.cat([own, own.new_zeros(each - len(own), own.shape[1])])
        all_RKN = own.new_empty(self.size, each, own.shape[1])
        all_gather(all_RKN.view(-1), padded.view(-1), group=self._group)
        return all_RKN.transpose(0, 1).reshape(-1, own.shape[1])[:count]

    def parted(self, memory: Mapping[str, Any], parameters: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """This rank's part of what `joined` gave, on whatever number of ranks."""
        found = dict(memory)
        if self._shards is not None:
            found["average"] = {n: self._shards.parted(t, parameters[n]) for n, t in memory["average"].items()}
        if "memory" in memory:
            found["memory"] = memory["memory"][self.rank :: self.size]
        return found

    def gathered(self, value: Any) -> Any:
        """A nested value with whole tensors for shards, on the first rank, which saves it. All ranks must."""
        if self._shards is None:
            return value

        def whole(t: Any) -> Any:
            if not is_sharded(t):
                return t
            found = t.full_tensor()
            return found.cpu() if self.rank == 0 else None  # one at a time

        with self._talking("The shards", "Nothing was released."):
            return tree_map(whole, value)

    def divided(self, value: Any, like: Any) -> Any:
        """A whole tensor as the shard that ``like`` is, if it is one of the same shape; anything else as it is."""
        if self._shards is None or not is_sharded(like) or getattr(value, "shape", None) != like.shape:
            return value
        return as_shard(self._shards.parted(value, like).to(like.device), like)

    # -- What ranks must agree on --------------------------------------------------------------------------------------

    def values(self, tensors: Iterable[Tensor], step: int = 0) -> "Digest":
        """What tells the values of tensors apart, to the bit: of all of them at steps 0, 1, 2, 4, …, of some numbers of
        a trained one in turn at others. Shards are no two ranks' own."""
        if self.size == 1:
            return Digest([])
        shared = [t for t in tensors if not is_sharded(self.stored(t))]
        if step & (step - 1) and (trained := [t for t in shared if t.requires_grad]):
            shared = [trained[step % len(trained)].flatten()[:GLANCED_AT]]
        return Digest(shared)

    def buffers(self, model: nn.Module, step: int) -> dict[str, int]:
        """What tells the values of buffers apart, at steps 0, 1, 2, 4, …"""
        return {} if self.size == 1 or step & (step - 1) else {"buffers": int(Digest(model.buffers()))}

    @contextmanager
    def on_public_data(self) -> Iterator[None]:
        """Wrappers do within what they do without a private run."""
        before, self.public = self.public, True
        self.give_back()
        try:
            yield
        finally:
            self.public = before


def _timeout(group: Any, device: torch.device) -> timedelta:
    try:
        return group_timeout(group, device)
    except RuntimeError as error:
        raise ValueError(
            f"The process group has no backend for tensors on {device.type!r}, where the model is. Call "
            "init_process_group() without a backend, or move the model before privatize()."
        ) from error


def _require_no_launcher() -> None:
    told = os.environ.get("WORLD_SIZE", "1")
    if "RANK" in os.environ and told.isdecimal() and int(told) > 1:
        raise RuntimeError(
            f"privatize() was called in one of {told} processes that do not know of each other yet: each would train "
            "alone, and print the full epsilon. Call torch.distributed.init_process_group() before it."
        )


def _bypass(model: nn.Module, ranks: Ranks) -> None:
    """Let whatever wraps the model in DistributedDataParallel run it, and no more.

    Its reducer would wait for gradients that never come, and a forward would broadcast buffers: also one that only this
    rank runs, to look at the model.
    """
    own, wrappers = set(model.modules()), {DistributedDataParallel, *DistributedDataParallel.__subclasses__()}
    for found in gc.get_objects():  # the model does not know of its wrapper
        if type(found) in wrappers and getattr(found, "module", None) in own:
            before = found.forward
            found.forward = _Bypass(found, before.forward if isinstance(before, _Bypass) else before, ranks)


class _Bypass:
    """The forward of a wrapper: that of its model, as long as the private run is there."""

    def __init__(self, wrapper: DistributedDataParallel, forward: Callable[..., Any], ranks: Ranks) -> None:
        self._wrapper, self.forward, self._ranks = wrapper, forward, weakref.ref(ranks)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        ranks = self._ranks()
        return (self.forward if ranks is None or ranks.public else self._wrapper.module)(*args, **kwargs)


def _difference(call: str, answers: list[tuple[Mapping[str, Any], str | None]]) -> tuple[str, str]:
    """In what ranks differ, and the same in words; or who failed. Buffers only if in nothing else."""
    failed = [(rank, said["call"], error) for rank, (said, error) in enumerate(answers) if error is not None]
    if failed:
        rank, where, error = failed[0]
        more = f" {len(failed) - 1} more failed." if failed[1:] else ""
        return "error", f"rank {rank} failed in {where}(), so no rank goes on.{more} Its error: {error}"
    said = [terms for terms, _ in answers]
    names = dict.fromkeys(n for terms in said for n in terms)
    differing = [n for n in names if any(terms.get(n) != said[0].get(n) for terms in said)]
    name = min(differing, key=lambda n: n == "buffers")
    rank = next(r for r, terms in enumerate(said) if terms.get(name) != said[0].get(name))
    pair = _first_difference(said[0].get(name), said[rank].get(name))
    shown = "" if any(isinstance(each, int) and abs(each) > 2**32 for each in pair) else ": {} and {}".format(*pair)
    return name, f"ranks 0 and {rank} disagree in {call}() about {name!r}{shown}. {_ADVICE[name]}"


def _first_difference(a: Any, b: Any) -> tuple[Any, Any]:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return next(((x, y) for x, y in zip(a, b, strict=False) if x != y), (f"{len(a)} long", f"{len(b)} long"))
    return a, b


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Digest:
    """A number that tells the values of tensors apart, to the bit. Computed where they are, in whole numbers: in no
    order. Whoever asks for it waits for that alone, not for what the device was given to do since."""

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        sums: dict[torch.device, Tensor] = {}
        with torch.no_grad():
            for k, t in enumerate(tensors):
                flat = torch.view_as_real(t) if t.is_complex() else t
                words = flat.detach().reshape(-1).view(_WORDS[flat.element_size()])
                for start in range(0, len(words), 1 << 24):
                    part = words[start : start + (1 << 24)].to(torch.int64, copy=True)
                    first = 2 * (start + 0x85EBCA6B * k) + 1  # odd, as all that follow: no bit is lost
                    factors = torch.arange(first, first + 2 * len(part), 2, device=t.device)
                    mixed = part.add_(0x9E3779B9).mul_(factors).sum()
                    sums[t.device] = sums.get(t.device, torch.zeros_like(mixed)) * 31 + mixed
        self._sums = [each.to("cpu", non_blocking=True) for each in sums.values()]
        self._copied = [torch.cuda.current_stream(d).record_event() for d in sums if d.type == "cuda"]

    def __int__(self) -> int:
        for copied in self._copied:
            copied.synchronize()
        return hash(tuple(int(each) for each in self._sums))


class Description(tuple[Any, ...]):
    """Of each part of a model what ranks compare. Put into words once."""

    def __repr__(self) -> str:
        if not hasattr(self, "_text"):
            self._text = super().__repr__()
        return self._text


def model_terms(model: nn.Module) -> dict[str, Any]:
    """What a model's parameters are, whether they are trained, and in which mode its modules are."""
    held = Description((n, tuple(p.shape), str(p.dtype), p.requires_grad) for n, p in model.named_parameters())
    modes = Description((n or "the model", "train" if m.training else "eval") for n, m in model.named_modules())
    return {"parameters": held, "modes": modes}


def data_terms(dataset: Dataset[Any]) -> tuple[Any, ...]:
    """What tells a data set from another, or from itself in another order: its size, and some samples by their places.

    A sample that two ranks know by two places would count twice. They are fetched twice, with the same random numbers:
    samples that are another each time cannot be compared.
    """
    size: int = len(dataset)  # type: ignore[arg-type]
    places = np.unique(np.linspace(0, size - 1, FETCHED, dtype=np.int64)).tolist() if size else []
    with own_randomness(0):
        one = [leaves_told(dataset[k]) for k in places]
    with own_randomness(0):
        other = [leaves_told(dataset[k]) for k in places]
    return size, _number(one) if one == other else None


def _number(told: Any) -> int:
    """One that tells plain values apart, of 60 bits."""
    return int(checksum(repr(told))[:15], 16)


def leaves_told(value: Any) -> tuple[Any, ...]:
    """A number, or the text, of each thing in a nested value."""
    return tuple(int(Digest([t])) if isinstance(t, Tensor) else repr(t) for t in tree_leaves(value))
