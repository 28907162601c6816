"""Reads from files to an accelerator: through a ring of page-locked buffers, without a full copy on the host.

Tensors are cut into pieces of at most `PIECE` bytes, and small tensors share a buffer. A buffer is read into by the
threads of the pool, then copied to the device, then read into again. While the device copies one buffer, the threads
fill the next ones. At most `_BUFFERS` buffers exist at a time, whatever is read.

A `Device` makes the buffers and copies them. `device_of` chooses one; a test passes its own to `Ring`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from ...core.box import Box, Shape, tiles
from ...core.select import Reads
from ...core.specs import TensorSpec
from ...errors import DataError
from ..checks import Batch, checked
from ..pool import Work
from ..storage.access import read_pieces
from ..storage.base import Store
from ..storage.remote import Remote
from ..tasks import Fetch, Task
from ..tensors import as_bytes
from .arenas import SMALL
from .compute import tasks
from .gather import run_tasks, step_of

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

PIECE = 32 << 20  # bytes of one buffer
_BUFFERS = 3  # one on its way to the device, one being filled, and one that waits for threads that are done with it
_FILLED = 2  # buffers that are filled at a time
_ALIGNED = 64  # bytes; every dtype can be viewed at a multiple of it
_JOINED = 1 << 20  # bytes of small tensors that one task reads


class Piece(NamedTuple):
    """Elements in a buffer, from byte ``at`` on, and the part of a tensor that they are copied to."""

    at: int
    shape: Shape
    dtype: torch.dtype
    target: torch.Tensor

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def within(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the elements as a view of a buffer of bytes, on any device."""
        return buffer[self.at : self.at + self.nbytes].view(self.dtype).view(self.shape)


# -- devices


class Device(ABC):
    """What the ring asks of a device: memory, and copies to it."""

    def __init__(self, place: torch.device) -> None:
        self.place = place

    def empty(self, shape: Shape, dtype: torch.dtype) -> torch.Tensor:
        """Allocate a tensor on the device."""
        return torch.empty(shape, dtype=dtype, device=self.place)

    @abstractmethod
    def buffer(self, nbytes: int) -> torch.Tensor:
        """Allocate bytes on the host to copy from."""

    @abstractmethod
    def copy(self, host: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], object]:
        """Start to copy the pieces of ``host``, which nobody changes meanwhile, to their targets; convert their dtypes.

        Return a function that waits until the pieces have arrived."""


class PlainDevice(Device):
    """A device whose copies are complete when torch returns: MPS, and the CPU."""

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def copy(self, host: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], object]:
        for piece in pieces:
            piece.target.copy_(piece.within(host))
        return _nothing


class StreamDevice(Device):
    """A CUDA device (NVIDIA or ROCm): copies from page-locked memory on a stream of their own."""

    _streams: dict[torch.device, torch.cuda.Stream] = {}  # noqa: RUF012 - shared: a new stream would have memory of its own

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        if place not in self._streams:
            try:
                self._streams[place] = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
            except (RuntimeError, AssertionError) as e:
                why = " ".join(str(e).split())
                raise DataError(
                    f"torch cannot use the device {place} here ({why:.120}): read to the CPU (leave out the device), "
                    "or install a build of torch for it"
                ) from e
        self._stream = self._streams[place]

    def buffer(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)

    def copy(self, host: torch.Tensor, pieces: Sequence[Piece]) -> Callable[[], object]:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self.place))  # kernels there may still use the targets' memory
        with torch.cuda.stream(stream):
            first = pieces[0]
            if len(pieces) == 1 and first.target.dtype == first.dtype:
                first.target.copy_(first.within(host), non_blocking=True)
            else:  # one transfer; a conversion during a transfer would use memory that is not page-locked
                arrived = host.to(self.place, non_blocking=True)
                for piece in pieces:
                    piece.target.copy_(piece.within(arrived))
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            event.record(stream)
        wait: Callable[[], object] = event.synchronize
        return wait


def device_of(place: torch.device) -> Device:
    """Return the way to copy to a device of torch."""
    return StreamDevice(place) if place.type == "cuda" else PlainDevice(place)


def _nothing() -> None:
    """Wait for a copy that is complete."""


# -- the ring


class _Item(NamedTuple):
    """A piece that waits for a buffer. ``source`` yields the tasks that fill it, or is the store, file and offset of a
    run of bytes, which is read together with others."""

    piece: Piece
    nbytes: int
    source: Callable[[torch.Tensor], Iterable[Task]] | tuple[Store, str, int]


class _Filled(NamedTuple):
    """A buffer that threads fill."""

    host: torch.Tensor
    pieces: list[Piece]
    work: Work


class _Sent(NamedTuple):
    """A buffer on its way; ``pieces`` keep the memory of the targets."""

    host: torch.Tensor
    pieces: list[Piece]
    wait: Callable[[], object]


class Ring:
    """The buffers on the way to one device. Use `ring` to make one. Not thread-safe: each call has its own."""

    def __init__(self, device: Device, reads: Batch) -> None:
        self.device = device
        self._reads = reads
        self._items: list[_Item] = []
        self._size = 0
        self._filled: deque[_Filled] = deque()
        self._sent: deque[_Sent] = deque()
        self._free: list[torch.Tensor] = []

    def send(self, store: Store, spec: TensorSpec, reads: Reads, target: torch.Tensor) -> None:
        """Read the elements that ``reads`` selects into ``target`` (any dtype and strides, shape ``reads.shape``).
        `gather.finish` still has to reorder and reshape them, after `finish`."""
        dtype = spec.dtype.torch
        for part, box in pieces(reads, dtype.itemsize):
            self._add(box.shape, dtype, _part(target, box), partial(tasks, store, spec, part))

    def send_run(self, store: Store, path: str, offset: int, dtype: torch.dtype, target: torch.Tensor) -> None:
        """Read a run of a file, from byte ``offset`` on, into all of ``target`` in C order."""
        shape = tuple(target.shape)
        if 0 < prod(shape) * dtype.itemsize <= PIECE:
            self._add(shape, dtype, target, (store, path, offset))
            return
        for box in tiles(shape, PIECE // dtype.itemsize):
            offset += self._add(box.shape, dtype, _part(target, box), (store, path, offset))

    def finish(self) -> None:
        """Wait until everything that was sent has arrived. Raises what reading raises."""
        if self._items:
            self._fill()
        while self._filled:
            self._pass_on()
        while self._sent:
            self._arrive()

    def abandon(self) -> None:
        """Stop reading, and wait for the copies that are under way, so that the buffers can be released."""
        with ExitStack() as every:
            for sent in self._sent:
                every.callback(sent.wait)
            for filled in self._filled:
                every.callback(filled.work.cancel)

    def _add(
        self,
        shape: Shape,
        dtype: torch.dtype,
        target: torch.Tensor,
        source: Callable[[torch.Tensor], Iterable[Task]] | tuple[Store, str, int],
    ) -> int:
        """Add a piece; return its bytes."""
        nbytes = prod(shape) * dtype.itemsize
        at = -(-self._size // _ALIGNED) * _ALIGNED
        if self._items and at + nbytes > PIECE:
            self._fill()
            at = 0
        self._items.append(_Item(Piece(at, shape, dtype, target), nbytes, source))
        self._size = at + nbytes
        return nbytes

    def _fill(self) -> None:
        """Let the threads fill a buffer with the pieces that wait."""
        while len(self._filled) >= _FILLED:
            self._pass_on()
        host = self._buffer(self._size)[: self._size]
        items, self._items, self._size = self._items, [], 0
        work = Work(_tasks(items, host), self._reads)
        self._filled.append(_Filled(host, [item.piece for item in items], work))

    def _buffer(self, nbytes: int) -> torch.Tensor:
        if len(self._filled) + len(self._sent) >= _BUFFERS:
            self._arrive()
        if self._free:
            buffer = self._free.pop()
            if buffer.numel() >= nbytes:
                return buffer
            del buffer  # before a larger one is made
        return self.device.buffer(max(nbytes, min(PIECE, 1 << (nbytes - 1).bit_length())))

    def _pass_on(self) -> None:
        """Wait until the oldest buffer is filled, and start its copy."""
        self._filled[0].work.wait()
        host, parts, _ = self._filled.popleft()
        self._sent.append(_Sent(host, parts, self.device.copy(host, parts)))

    def _arrive(self) -> None:
        """Wait for the oldest copy; its buffer is free."""
        self._sent[0].wait()
        host = self._sent.popleft().host
        self._free.append(host if host._base is None else host._base)


@contextmanager
def ring(place: torch.device | Device) -> Iterator[Ring]:
    """Make a ring to a device. When the block ends, everything that was sent has arrived, or no read and no copy is
    under way any more. The files read are verified together at the end (see `checks.checked`)."""
    with checked() as reads:
        made = Ring(place if isinstance(place, Device) else device_of(place), reads)
        try:
            yield made
            made.finish()
        except BaseException:
            made.abandon()
            raise


def pieces(reads: Reads, itemsize: int) -> Iterator[tuple[Reads, Box]]:
    """Split the reads into pieces of at most PIECE bytes (at least one element); yield each with its box in the
    whole."""
    for box in tiles(reads.shape, PIECE // itemsize):
        part = tuple(r[a:b] for r, a, b in zip(reads.want, box.start, box.stop, strict=True))
        yield Reads(part, (), (), box.shape), box


def _part(target: torch.Tensor, box: Box) -> torch.Tensor:
    return target if box.shape == tuple(target.shape) else target[box.slices]


def _tasks(items: Sequence[_Item], host: torch.Tensor) -> Iterator[Task]:
    """Yield the tasks that fill a buffer. Runs that follow each other both in the file and in the buffer are one run,
    and small runs that are near each other in a file are one task."""
    runs: dict[tuple[int, str], tuple[Store, list[tuple[int, int, int]]]] = {}  # (offset, place in the buffer, bytes)
    for piece, nbytes, source in items:
        if isinstance(source, tuple):
            store, path, offset = source
            runs.setdefault((id(store), path), (store, []))[1].append((offset, piece.at, nbytes))
        else:
            yield from source(piece.within(host))
    memory = as_bytes(host)
    for (_, path), (store, found) in runs.items():
        found.sort()
        if isinstance(store, Remote):
            for offset, at, nbytes in found:
                yield nbytes, Fetch.of_run(store, path, offset, memory[at : at + nbytes])
            continue
        group: list[tuple[int, memoryview]] = []
        size = 0
        alone, most = (step_of(store),) * 2 if store.gap else (SMALL, _JOINED)
        for offset, at, nbytes in _merged(found):
            if nbytes >= alone:
                yield from run_tasks(store, path, offset, host[at : at + nbytes])
                continue
            if group and size + nbytes > most:
                yield size, partial(read_pieces, store, path, group)
                group, size = [], 0
            group.append((offset, memory[at : at + nbytes]))
            size += nbytes
        if group:
            yield size, partial(read_pieces, store, path, group)


def _merged(runs: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, int, int]]:
    """Join sorted runs (offset, place in memory, bytes) that follow each other in both."""
    start, at, size = runs[0]
    for offset, place, nbytes in runs[1:]:
        if (offset, place) == (start + size, at + size):
            size += nbytes
        else:
            yield start, at, size
            start, at, size = offset, place, nbytes
    yield start, at, size
