"""Reads from files to an accelerator, in pieces through pinned memory, without a full copy on the host.

The next piece is read while the previous one is copied to the device. The buffers form a ring; a buffer is free again
when the device event recorded after its copy has completed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import TYPE_CHECKING, Any

from ...core.box import Box, Shape, tiles
from ...core.index import TensorSpec
from ...core.select import Reads
from ..pool import run
from ..storage.base import Store
from .gather import tasks

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

PIECE = 32 << 20  # bytes of one pinned buffer
_BUFFERS = 2


class Ring:
    """A ring of host buffers for copies to one device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        pin = device.type == "cuda" and torch.cuda.is_available()
        self._buffers = [torch.empty(PIECE, dtype=torch.uint8, pin_memory=pin, device="cpu") for _ in range(_BUFFERS)]
        self._passed: list[Callable[[], Any] | None] = [None] * _BUFFERS
        self._turn = 0

    def send(
        self, shape: Shape, dtype: torch.dtype, fill: Callable[[torch.Tensor], None], target: torch.Tensor
    ) -> None:
        """Fill a host buffer of this shape and start its copy to ``target``; convert the dtype on the device."""
        turn = self._turn
        self._turn = (turn + 1) % _BUFFERS
        passed = self._passed[turn]
        if passed is not None:
            passed()
        nbytes = prod(shape) * dtype.itemsize
        host = self._buffers[turn][:nbytes].view(dtype).view(shape)
        fill(host)
        if target.dtype == dtype:
            target.copy_(host, non_blocking=True)
        else:  # a conversion during the copy would use unpinned memory
            target.copy_(host.to(self.device, non_blocking=True))
        self._passed[turn] = self._event()

    def finish(self) -> None:
        """Wait until every piece has arrived."""
        for passed in self._passed:
            if passed is not None:
                passed()

    def _event(self) -> Callable[[], Any] | None:
        if self.device.type == "cuda":
            event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self.device))
            wait: Callable[[], Any] = event.synchronize
            return wait
        if self.device.type == "mps":
            return torch.mps.synchronize
        return None  # the copy is done when copy_ returns


def read_to(store: Store, spec: TensorSpec, reads: Reads, target: torch.Tensor, ring: Ring) -> None:
    """Read the elements that ``reads`` selects into ``target`` (any device and dtype, shape ``reads.shape``). `finish`
    still has to reorder and reshape them."""
    for part, box in pieces(reads, spec.dtype.itemsize):

        def fill(host: torch.Tensor, part: Reads = part) -> None:
            run(tasks(store, spec, part, host))

        ring.send(box.shape, spec.dtype.torch, fill, target[box.slices] if box.start else target)


def pieces(reads: Reads, itemsize: int) -> Iterator[tuple[Reads, Box]]:
    """Split the reads into pieces of at most PIECE bytes (at least one element); yield each with its box in the
    whole."""
    for box in tiles(reads.shape, PIECE // itemsize):
        part = tuple(r[a:b] for r, a, b in zip(reads.want, box.start, box.stop, strict=True))
        yield Reads(part, (), (), box.shape), box
