"""Whether the answer of a compiled step stands, told to the host while the device still works on it.

Once all norms are known it is known whether they are finite; what follows, the weighted sums, takes the device a good
part of the step. If the host heard of it at the end alone, the device would stand idle for as long as the host takes
to start the noise, the update and the next step. So an operation in the midst of the step, which all sums wait for,
sends one number to memory that the host watches.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor

from dpscale.engine.compat import operation

_PENDING = 2
_PATIENCE = 1000
"""After so many looks in vain, see whether the device is at work at all."""

_listener: ContextVar[Tensor | None] = ContextVar("_listener", default=None)


def publish(weights: Tensor, all_finite: Tensor) -> Tensor:
    """The weights, once ``all_finite`` (a bool on the device) is on its way to whoever listens."""
    published: Tensor = torch.ops.dpscale.publish(weights, all_finite)
    return published


class FiniteFlag:
    """The host's end: `expect` before a run, `read` after its start.

    Args:
        device: where the runs are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._host = torch.zeros(1, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
        self._seen = self._host.numpy()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """What is run, or recorded as a graph, in here tells this flag."""
        token = _listener.set(self._host)
        try:
            yield
        finally:
            _listener.reset(token)

    def expect(self) -> None:
        """Forget the last run's."""
        if self._seen[0] == _PENDING:  # its reader was interrupted: it must not be taken for the next one's
            self._finish()
        self._seen[0] = _PENDING

    def read(self) -> bool:
        """Wait for it."""
        looks = 0
        while self._seen[0] == _PENDING:
            looks += 1
            if self._device.type != "cuda" or (looks % _PATIENCE == 0 and self._idle()):
                self._finish()
                if self._seen[0] == _PENDING:
                    self._seen[0] = 0
                    raise RuntimeError("A compiled step ended without telling whether its norms are finite.")
            time.sleep(0)  # lets other threads run
        return bool(self._seen[0])

    def _idle(self) -> bool:
        """Raises what the device has to say, if it has failed."""
        done: bool = torch.cuda.current_stream(self._device).query()
        return done

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _publish(weights: Tensor, all_finite: Tensor) -> Tensor:
    host = _listener.get()
    if host is not None:
        host.copy_(all_finite.view(torch.uint8).view(1), non_blocking=all_finite.is_cuda)
    return weights.clone()


operation(
    "publish(Tensor weights, Tensor all_finite) -> Tensor",
    _publish,
    lambda weights, all_finite: weights.new_empty(weights.shape),
)
