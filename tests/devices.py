"""A simulated accelerator: its tensors lie on the CPU and say that they are on ``cuda:0``. A thread makes its copies
later, in order, as a CUDA stream does."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from lazyckpt.core.select import Reads
from lazyckpt.io.reading import device as transfer
from lazyckpt.io.reading.device import Device, Piece
from lazyckpt.io.reading.gather import finish

GPU = torch.device("cuda", 0)


class Far(torch.Tensor):
    """A tensor that says that it is on the simulated device."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return GPU


def near(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor of the simulated device, as a plain tensor."""
    return tensor.detach().as_subclass(torch.Tensor)


class QueueDevice(Device):
    """A device that copies on a thread of its own.

    Parameters
    ----------
    before
        Called by that thread before each copy, with the copy's number.

    Attributes
    ----------
    sent
        The number of copies that were started.
    copied
        The pieces of each finished copy, as (dtype, shape).
    pending
        Copies that are started and not finished.
    pinned, peak
        Bytes of the buffers that exist now, and of those that existed at most.
    """

    def __init__(self, before: Callable[[int], object] = lambda number: None) -> None:
        super().__init__(GPU)
        self.before = before
        self.sent = 0
        self.copied: list[list[tuple[torch.dtype, tuple[int, ...]]]] = []
        self.pinned = self.peak = 0
        self._queue: deque[tuple[int, torch.Tensor, Sequence[Piece], Future[None]]] = deque()
        self._change = threading.Condition(threading.RLock())  # a finalizer may run while the thread holds it
        self._closed = False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def empty(self, shape: Any, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype).as_subclass(Far)

    def buffer(self, nbytes: int) -> torch.Tensor:
        memory = np.full(nbytes, 0xA5, np.uint8)
        with self._change:
            self.pinned += nbytes
            self.peak = max(self.peak, self.pinned)
        weakref.finalize(memory, self._release, nbytes)
        return torch.from_numpy(memory)

    def _release(self, nbytes: int) -> None:
        with self._change:
            self.pinned -= nbytes

    @property
    def pending(self) -> int:
        return self.sent - len(self.copied)

    def copy(self, host: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], object]:
        done: Future[None] = Future()
        with self._change:
            self._queue.append((self.sent, host, pieces, done))
            self.sent += 1
            self._change.notify_all()
        return done.result

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(lambda: self._queue or self._closed)
                if not self._queue:
                    return
                number, host, pieces, done = self._queue.popleft()
            error: BaseException | None = None
            try:
                self.before(number)
                for piece in pieces:
                    near(piece.target).copy_(piece.within(host))
            except BaseException as e:
                error = e
            self.copied.append([(piece.dtype, piece.shape) for piece in pieces])
            del host, pieces  # only the ring keeps them
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)
            del done, error


def _finish(reads: Reads, array: torch.Tensor) -> torch.Tensor:
    """`gather.finish`, as the device's own kernels."""
    if not isinstance(array, Far):
        return finish(reads, array)
    return finish(reads, near(array)).as_subclass(Far)


@contextmanager
def simulated(before: Callable[[int], object] = lambda number: None) -> Iterator[QueueDevice]:
    """Let everything that is read to ``cuda`` within the block go to a simulated device."""
    made = QueueDevice(before)
    try:
        with (
            mock.patch.object(transfer, "device_of", lambda place: made),
            mock.patch("lazyckpt.lazy.finish", _finish),
        ):
            yield made
    finally:
        made.close()
