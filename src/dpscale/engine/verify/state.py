"""What a forward changes around itself: buffers, parameters, attributes, and what a loss function holds.

A look at a model runs it many times on rows of its own choice. All that those runs change is put back, and what they
change differently for different rows is told: it would carry the data out of training without noise.
"""

import functools
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from itertools import chain
from numbers import Number
from operator import is_
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from dpscale.engine.compat import is_sharded, registered, version
from dpscale.engine.errors import UnsupportedModel
from dpscale.engine.identity import Variable, variables_of
from dpscale.engine.modules import CHANGED, COUNTED, COUNTERS, PLAIN, is_integer_scalar
from dpscale.engine.verify.randomness import host_states, random_states, set_random_states, torch_states

_ENTRIES = 1024  # of one container that are looked into
_MOST = 1 << 17  # of one that are compared at all
_DEPTH = 5
_LARGE = 1 << 16  # numbers of a parameter that is compared by value at the end of a look alone
_NUMBERS = 1 << 20  # of a tensor that is compared entry by entry; of larger ones, so many entries and the sum
_OPAQUE = (type, ModuleType, torch.dtype, torch.device)
_NAMED = ".[parameters]", ".[buffers]", ".[modules]", ".[attributes]", "_hooks"
_KNOWN = {"torch", "transformers", "peft", "numpy", "builtins", "typing", "abc", "collections", "dpscale"}
_KNOWN |= {"lightning", "pytorch_lightning"}
_GENERATORS = (torch.Generator, np.random.Generator, random.Random)
_SPARSE = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}


class Surroundings:
    """The state that a forward can reach: of the model, and of what the loss function holds.

    Args:
        model: with all its modules.
        loss_fn: what it holds in its closure, defaults and globals is state too.
    """

    def __init__(self, model: nn.Module, loss_fn: Any = None) -> None:
        self._model = model
        self._variables = [*_own_attributes("itself", loss_fn), *_read_by(loss_fn), *_read_by_modules(model)]
        self._values = [get() for _, get, _ in self._variables]
        self._counts = [
            (module, name, value)
            for module in model.modules()
            for name, value in {**vars(type(module)), **vars(module)}.items()  # of the class: where a count begins
            if type(value) is int
        ]
        self._parameters = {id(p): p for p in model.parameters()}
        self._containers: list[tuple[Any, Any]] = []
        self._generators: list[tuple[Any, Any]] = []
        self._starts: set[int] = set()  # of torch's, as they were and as the runs of a look set them
        self._arrays: list[tuple[NDArray[Any], NDArray[Any]]] = []
        self._tensors: list[tuple[str, Tensor, Tensor, int]] = []
        self._sizes: list[int] = []  # of the containers
        self._too_large = False  # to copy: whether it was changed is looked up by walking through everything
        self._bytes: list[tuple[Any, Any]] = []
        for path, value in self._walk():
            if isinstance(value, Tensor):
                if _has_values(value) and (path.startswith("model") or value.numel() <= _NUMBERS):
                    self._tensors.append((path, value, value.detach().clone(), version(value)))
                self._too_large |= value.numel() > _NUMBERS and not path.startswith("model")
            elif isinstance(value, nn.Module):
                _require_whole(path, value)
            elif isinstance(value, dict | list | set | deque):
                self._containers.append((value, value.copy()))
                self._sizes.append(len(value))
            elif isinstance(value, _GENERATORS) and not isinstance(value, random.SystemRandom):
                self._generators.append((value, _state_of(value)))
                self._starts |= {value.initial_seed()} if isinstance(value, torch.Generator) else set()
            elif isinstance(value, bytearray | array):
                self._bytes.append((value, value[:]))
            elif isinstance(value, np.ndarray):
                if value.size <= _NUMBERS:
                    self._arrays.append((value, value.copy()))
                self._too_large |= value.size > _NUMBERS
        self._held = list(_entries(content for _, content in self._containers))
        self._written = [(then, value.shape) for _, _, value, then in self._tensors]
        self._compared = [(t, value) for _, t, value, _ in self._tensors if _quick(t)]

    @cached_property
    def _before(self) -> dict[str, Any]:
        """Of the first call, at which everything must be as it was."""
        return self.now()

    def left_behind(self) -> dict[str, Any] | None:
        """What a run has left, as `now` has it, or None if it changed nothing. All is put back."""
        if not self.touched():
            return None
        left = self.now()
        self.require_parameters_kept(self._put_back(thorough=False))
        return left

    def touched(self) -> bool:
        """Whether anything may be another than it was; without a walk, which takes longer than a small forward."""
        return (
            self._too_large
            or any(get() is not value for (_, get, _), value in zip(self._variables, self._values, strict=True))
            or not self._same_objects()
            or [(version(t), t.shape) for _, t, _, _ in self._tensors] != self._written
            or not all([_equal(t, value) for t, value in self._compared])
            or any(own.tobytes() != content.tobytes() for own, content in self._arrays)
            or any(own != content for own, content in self._bytes)
            or self.drew()
        )

    def _same_objects(self) -> bool:
        """Whether all containers hold what they held; in one go, for there are a dozen to a module."""
        if [len(container) for container, _ in self._containers] != self._sizes:
            return False
        return all(map(is_, _entries(own for own, _ in self._containers if own), self._held))

    def now(self) -> dict[str, Any]:
        """Everything that is no parameter, by its path, as it is now: plain values, and copies of tensors."""
        found: dict[str, Any] = {}
        for path, value in self._walk():
            if isinstance(value, nn.Parameter):
                continue
            if isinstance(value, Tensor):
                found[path] = _digest(value)
            elif isinstance(value, (*PLAIN, torch.dtype, Number)):
                found[path] = value
            elif isinstance(value, np.ndarray):
                found[path] = _digest_of_array(value)
            elif isinstance(value, bytearray | array):
                found[path] = bytes(value)
            elif isinstance(value, torch.Generator):  # how far it has come may depend on the rows, its start may not
                start = value.initial_seed()
                found[path] = None if start in self._starts else start
            elif isinstance(value, list | tuple | deque | dict) and len(value) > _ENTRIES:  # too long to look into
                last = (*(value.values() if isinstance(value, dict) else value),)[-_MOST:]
                found[path] = len(value), *(v if isinstance(v, PLAIN) else type(v) for v in last)
        return found

    def restore(self, *, thorough: bool = False) -> list[str]:
        """Put everything back; the names of parameters that had been changed, or exchanged for others.

        Args:
            thorough: compare large parameters by value too, not only by how often they were written.
        """
        return self._put_back(thorough) if thorough or self.touched() else []

    def _put_back(self, thorough: bool) -> list[str]:
        for module, name, count in self._counts:
            if type(vars(module).get(name)) is int and vars(module)[name] != count:
                COUNTED.setdefault(module, set()).add(name)
        changed = [name for name, p in self._model.named_parameters() if id(p) not in self._parameters]
        for (_, get, put), value in zip(self._variables, self._values, strict=True):
            if get() is not value:
                put(value)
        for generator, state in self._generators:
            _put_state(generator, state)
        for own, content in self._arrays:
            if own.flags.writeable:
                own[...] = content
        for own, content in self._bytes:
            own[:] = content
        for container, content in self._containers:
            if not _unchanged(container, content):
                container.clear()
                (container.update if isinstance(container, dict | set) else container.extend)(content)
        for path, t, value, then in self._tensors:
            large = t.numel() > _LARGE and isinstance(t, nn.Parameter)
            if version(t) == then and large and t.shape == value.shape and not thorough:
                continue
            if t.shape != value.shape or t.dtype != value.dtype:
                t.data = value.clone()
            elif version(t) == then and not isinstance(t, nn.Parameter) and t.requires_grad:
                continue
            elif not _equal(t.detach(), value):
                t.data.copy_(value)  # by .data: a graph that saved it may still be walked
            elif version(t) == then or not isinstance(t, nn.Parameter):
                continue
            if isinstance(t, nn.Parameter):
                changed.append(path.removeprefix("model."))
        return changed

    def drew(self) -> bool:
        """Whether numbers were drawn from a generator of one's own, which knows nothing of rows."""
        return any(str(_state_of(generator)) != str(state) for generator, state in self._generators)

    def draw_from(self, seed: int) -> None:
        """Start the generators of one's own from a number; they are put back with all else."""
        self._starts.add(seed)
        for generator, _ in self._generators:
            if isinstance(generator, torch.Generator):
                generator.manual_seed(seed)
            elif isinstance(generator, random.Random):
                generator.seed(seed)
            else:
                generator.bit_generator.state = type(generator.bit_generator)(seed).state

    def require_parameters_kept(self, changed: Sequence[str]) -> None:
        """A forward must not train by itself."""
        if changed:
            raise UnsupportedModel(
                f"Parameter {changed[0]!r} is changed by the forward itself (an Embedding with max_norm does that, and "
                "a layer that starts from statistics of its first batch): what it takes from the samples would get no "
                "noise. Build the layer without it, or change the parameter outside of the forward, from public data "
                "or from parameters alone."
            )

    def count_ahead(self, steps: int, buffers: bool = True) -> bool:
        """Move the counters of the forward by so many steps, those that are buffers too; whether there are any."""
        counters = [b for b in self._model.buffers() if b in COUNTERS] if buffers else []
        for b in counters:
            b.data.copy_(b + steps)
        counted = [(vars(m), name, count) for m, name, count in self._counts if name in COUNTED.get(m, ())]
        for attributes, name, count in counted:
            attributes[name] = count + steps
        return bool(counters or counted)

    def compare(self, ours: dict[str, Any] | None, theirs: dict[str, Any] | None) -> None:
        """Refuse what two runs on different rows left behind differently; note what counts by itself."""
        if ours is None and theirs is None:
            return
        ours, theirs = (self._before if left is None else left for left in (ours, theirs))
        for path in [*ours, *(theirs.keys() - ours.keys())]:
            if path in ours and path in theirs and _equal(ours[path], theirs[path]):
                continue
            name = path.removeprefix("model.")
            buffer = name in dict(self._model.named_buffers())
            what = f"A buffer of the model is updated from the samples: {name!r}" if buffer else (
                f"The forward sets {name!r} from what is in the samples"
            )  # fmt: skip
            raise UnsupportedModel(
                f"{what}. It would carry them out of training without noise. Replace the layer (BatchNorm by "
                "GroupNorm: dpscale.fix(model)), stop the update, or return the value from the forward instead."
            )
        for path, t, _, _ in self._tensors:
            if is_integer_scalar(t) and not _equal(self._before.get(path), ours.get(path)):
                COUNTERS[t] = True
        for module_name, module in self._model.named_modules():
            for name, _ in module.named_buffers(recurse=False):
                path = ".".join(filter(None, ("model", module_name, name)))
                if path in ours and not _equal(self._before.get(path), ours[path]):
                    CHANGED.setdefault(module, set()).add(name)

    def _walk(self) -> Iterator[tuple[str, Any]]:
        """Every value that is reached, each object once, with a path to it."""
        seen: set[int] = set()
        held = [(f"loss_fn: {name}", get(), 1) for name, get, _ in self._variables]
        waiting = deque([("model", self._model, 0), *((n, v, d) for n, v, d in held if v is not self._model)])
        while waiting:
            path, value, depth = waiting.popleft()
            if id(value) in seen and not isinstance(value, PLAIN):
                continue
            seen.add(id(value))
            yield path, value
            below = depth if isinstance(value, nn.Module) else depth + 1
            if below <= _DEPTH and not path.endswith(_NAMED):  # what hooks keep for themselves is theirs
                waiting.extend((f"{path}{name}", each, below) for name, each in _children(value))


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, nn.Module):
        for group, held in zip(("parameters", "buffers", "modules"), registered(value), strict=True):
            yield f".[{group}]", held
            yield from ((f".{name}", each) for name, each in list(held.items()))
        yield ".[attributes]", vars(value)
        yield from ((f".{name}", each) for name, each in list(vars(value).items()) if name != "training")
    elif isinstance(value, dict):
        if len(value) <= _ENTRIES and not any(isinstance(each, nn.Module) for each in value.values()):
            for k, (name, each) in enumerate(list(value.items())):  # a module, an enum, a weak reference: by its place
                yield f"[{name!r}]" if isinstance(name, (*PLAIN, tuple)) else f"[{type(name).__name__} {k}]", each
    elif isinstance(value, list | tuple | deque | set | frozenset):
        if len(value) <= _ENTRIES:
            yield from ((f"[{k}]", each) for k, each in enumerate(list(value)))
    elif isinstance(value, MethodType):
        yield ".self", value.__self__
    elif isinstance(value, functools.partial):
        yield from ((f"({k})", each) for k, each in enumerate((*value.args, *value.keywords.values())))
    elif _inside(value) and _own_function(value) and isinstance(getattr(value, "__dict__", None), dict):
        yield ".[attributes]", vars(value)
        yield from ((f".{name}", each) for name, each in list(vars(value).items()))


def _own_function(value: Any) -> bool:
    """Whether it is one, or no function at all: those of libraries keep nothing of a batch."""
    return not isinstance(value, FunctionType) or _own(value)


def _read_by_modules(model: nn.Module) -> Iterator[Variable]:
    """What the methods of one's own modules read from around them, and what their classes and those of the objects in
    them hold. What hooks and stored functions keep for themselves is theirs."""
    known: set[int] = set()
    classes = {base: None for module in model.modules() for base in type(module).__mro__}
    for made in (each for each in classes if _own(each)):
        yield from _held_by_class(made, known)
    for module in model.modules():
        for value in vars(module).values():
            if not isinstance(value, FunctionType):
                yield from _led_to(value, known)


def _held_by_class(made: type, known: set[int]) -> Iterator[Variable]:
    """What a class holds, and what its methods read."""
    yield from _attributes_of(made, known)
    for name, value in list(vars(made).items()):
        function = getattr(value, "__func__", value)  # of a class method
        if isinstance(function, FunctionType):
            yield from _own_attributes(f"{made.__name__}.{name}", function)
            yield from (each for each in _read_by(function, known) if _inside(each[1]()) or _plain(each[1]()))


def _attributes_of(made: type, known: set[int]) -> Iterator[Variable]:
    """What a class holds."""
    known.add(id(made))
    for name, value in list(vars(made).items()):
        if not name.startswith("__") and not hasattr(type(value), "__get__") and (_plain(value) or _inside(value)):
            yield f"{made.__name__}.{name}", partial(getattr, made, name), partial(setattr, made, name)


def _read_by(function: Any, known: set[int] | None = None) -> Iterator[Variable]:
    """What a function holds and reads, and what the functions and classes of one's own do which it leads to."""
    known = set() if known is None else known
    for name, get, put in variables_of(function):
        yield name, get, put
        value = get()
        if isinstance(value, ContextVar):
            yield f"{name}.get()", partial(_current, value), partial(_put_current, value)
        yield from _led_to(value, known)


def _led_to(value: Any, known: set[int]) -> Iterator[Variable]:
    """What a function of one's own reads, or the class of an object holds; once, and of so many at most."""
    if isinstance(value, FunctionType):
        if id(value) not in known and _own(value) and len(known) < _ENTRIES:
            known.add(id(value))
            yield from _read_by(value, known)
    elif not _plain(value) and not isinstance(value, ModuleType):
        made = value if isinstance(value, type) else type(value)
        for base in made.__mro__:
            if id(base) not in known and _own(base) and not _of_python(base) and len(known) < _ENTRIES:
                yield from _attributes_of(base, known)


def _current(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:  # it was never set
        return None


def _put_current(variable: ContextVar[Any], value: Any) -> None:
    variable.set(value)


def _own_attributes(name: str, function: Any) -> Iterator[Variable]:
    """A function as something that has attributes."""
    if isinstance(function, FunctionType):
        yield name, lambda: function, lambda _: None


def _plain(value: Any) -> bool:
    return isinstance(value, PLAIN)


def _of_python(made: type) -> bool:
    """Whether a class came with Python."""
    return made.__module__.split(".")[0] in sys.stdlib_module_names


def _own(defined: Any) -> bool:
    """Whether it was not written by those whose code we know to keep nothing of a batch."""
    return str(getattr(defined, "__module__", "torch")).split(".")[0] not in _KNOWN


def _has_values(t: Tensor) -> bool:
    """Whether they can be compared, and written back. To compare distributed ones would need the other ranks; what
    `fully_shard` has gathered and given back has no memory."""
    if t.layout is not torch.strided or t.is_meta or t.is_inference() or is_sharded(t):
        return False
    return not t.numel() or t.untyped_storage().nbytes() > 0


def _require_whole(path: str, module: nn.Module) -> None:
    """A forward that needs the other ranks cannot be looked at: they do not look at the same time."""
    if any(map(is_sharded, registered(module)[0].values())):
        raise UnsupportedModel(
            f"{path!r} has parameters in shards, so its forward waits for the other ranks, which may not run it now. "
            "Give loss_fn a plain copy of it, or put what it computes into the data."
        )


def _digest(t: Tensor) -> Any:
    """A copy, or of a large tensor what hardly any change leaves as it is."""
    if not _has_values(t):
        sparse = t.layout in _SPARSE and not t.is_meta and t.numel() <= _NUMBERS
        return t.detach().to_dense() if sparse else t.shape
    if t.numel() <= _NUMBERS:
        return t.detach().clone()
    flat = t.detach().resolve_conj().resolve_neg().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()
    words = flat[: flat.numel() // 8 * 8].view(torch.int64)  # whose sum needs no conversion: 30 times as fast
    parts = flat[:: -(-flat.numel() // _NUMBERS)], flat[-8:], words.sum().view(1)
    return torch.cat([part.contiguous().view(torch.uint8) for part in parts])


def _digest_of_array(array: NDArray[Any]) -> Any:
    """The same of an array of numpy's; of objects, those that are plain."""
    if array.dtype.kind in "biufc":
        return _digest(torch.from_numpy(np.ascontiguousarray(array)))
    if array.dtype.kind == "O":
        return array.shape, *(v if _plain(v) else type(v) for v in array.flat[:_MOST])
    return array.shape, array[:_MOST].tobytes()


class Dice:
    """What a function draws random numbers from: the generators that are nobody's own, and those that it holds."""

    def __init__(self, function: Any) -> None:
        self._own = [generator for generator, _ in Surroundings(nn.Module(), function)._generators]

    def states(self) -> tuple[list[Any], list[Any]]:
        """As they are now."""
        return random_states(), [_state_of(generator) for generator in self._own]

    def put(self, states: tuple[list[Any], list[Any]]) -> None:
        """Put them back."""
        set_random_states(states[0])
        for generator, state in zip(self._own, states[1], strict=True):
            _put_state(generator, state)

    def told(self) -> tuple[Any, ...]:
        """As they are now, such that two can be compared."""
        return host_states(), torch_states(), [str(_state_of(generator)) for generator in self._own]


def _state_of(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate() if isinstance(generator, random.Random) else generator.bit_generator.state


def _put_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.bit_generator.state = state


def _unchanged(container: Any, content: Any) -> bool:
    """Whether it holds the very same objects."""
    return len(container) == len(content) and all(map(is_, _entries([container]), _entries([content])))


def _entries(containers: Iterable[Any]) -> Iterator[Any]:
    """What they hold, one after the other; of a dictionary, its keys and then its values."""
    return chain.from_iterable(chain(c, c.values()) if isinstance(c, dict) else c for c in containers)


def _inside(value: Any) -> bool:
    """Whether it can hold state of ours to look at."""
    return not isinstance(value, (*PLAIN, *_OPAQUE))


def _quick(t: Tensor) -> bool:
    """Whether it is compared by value after each run; of large parameters it is seen that they were written."""
    return t.numel() <= _LARGE or not isinstance(t, nn.Parameter)


def _equal(a: Any, b: Any) -> bool:
    """To the bit; NaN is NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return False
        if torch.equal(a, b):
            return True
        a, b = a.detach(), b.detach()
        return bool(((a == b) | ((a != a) & (b != b))).all())
    if type(a) is not type(b):
        return False
    return bool(a == b) or (a != a and b != b)
