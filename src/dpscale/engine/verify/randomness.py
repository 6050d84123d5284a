"""The random state around a run: of Python, numpy and torch, on every device."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def own_randomness(start: int | list[Any]) -> Iterator[None]:
    """Runs in here leave all generators, and autocast's cache, as they were.

    Args:
        start: a seed that they draw from, or `random_states` that they begin at.
    """
    states = random_states()
    try:
        if isinstance(start, list):
            set_random_states(start)
        else:
            random.seed(start)
            np.random.seed(start)
            seed_torch(start)
        yield
    finally:
        set_random_states(states)
        torch.clear_autocast_cache()  # weights that were cast here must not be taken for the caller's own


def random_states() -> list[Any]:
    """Of all generators that are nobody's own."""
    return [random.getstate(), np.random.get_state(), *(generator.get_state() for generator in _generators())]


def set_random_states(states: list[Any]) -> None:
    """Put them back."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    for generator, state in zip(_generators(), states[2:], strict=False):  # CUDA may have come to life since
        generator.set_state(state)


def host_states() -> tuple[Any, ...]:
    """Of Python's generator and numpy's, such that two can be compared."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), kind, np.asarray(keys).tobytes(), *rest


def torch_states() -> list[bytes]:
    """Of torch's generators, such that two can be compared."""
    return [generator.get_state().numpy().tobytes() for generator in _generators()]


def torch_seeds() -> list[int]:
    """What torch's generators were last started from."""
    return [generator.initial_seed() for generator in _generators()]


def seed_torch(number: int) -> None:
    """Start all of torch's generators from a number."""
    for generator in _generators():
        generator.manual_seed(number + 1)


def _generators() -> list[torch.Generator]:
    cuda = torch.cuda.default_generators if torch.cuda.is_initialized() else ()
    return [torch.default_generator, *cuda]
