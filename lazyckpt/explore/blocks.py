"""Blocks of files that are computed while they are sent: the memory that all streams of a server have together.

The blocks of all streams share the memory of `Blocks`: a stream waits in line until there is room for its next block.
Streams that ask for the same block share it. When others wait, the block of a client that is slow to take it is
dropped.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np

from ..io.reading.keeping import once_always
from ..io.storage.base import Stored
from .threads import in_threads

HELD = 0.1  # seconds after which a block may be dropped if others wait
_UNIT = 64 << 10  # bytes; the room of a block is a number of them
_AT_ONCE = 2  # blocks that are computed at the same time: each takes memory of its own while it is computed


class Shared(NamedTuple):
    """A file to send.

    Attributes
    ----------
    size, tag, type
        Its size in bytes, what identifies its content, and its media type.
    content
        Its bytes, or what fills memory with its bytes from one on: ``content(begin, target)``, in any thread.
    stored
        Returns which of its bytes lie as they are in local files, in order, in runs of a least length:
        ``stored(begin, end, least)``, in any thread. Each run has the offset at which it begins. None if there are
        none.
    """

    size: int
    tag: str
    type: str
    content: bytes | Callable[[int, memoryview], None]
    stored: Callable[[int, int, int], list[tuple[int, Stored]]] | None = None


class Lease:
    """A stream's share of a block: from when it gets in line until it is released."""

    __slots__ = ("_block", "_blocks", "awaited", "begin", "dropped", "end", "since")

    def __init__(self, blocks: Blocks, block: _Block, begin: int, end: int) -> None:
        self._blocks, self._block = blocks, block
        self.begin, self.end = begin, end
        self.since = 0.0
        """When the stream got the block, in seconds of the loop's clock."""
        self.awaited = False
        """Whether the stream waits for the block, and has not had a piece of it."""
        self.dropped = False
        """Whether the block was dropped because others wait."""

    async def ready(self) -> None:
        """Wait until the block is read. Raises what reading raises."""
        self.awaited = True
        await asyncio.shield(self._block.done)  # other streams wait for it, too
        self.since = asyncio.get_running_loop().time()

    def copy(self, begin: int, end: int) -> bytes | None:
        """Return bytes ``begin`` to ``end`` of the file; None if the block was dropped."""
        self.awaited = False
        if self.dropped:
            return None
        return bytes(self._block.memory[begin - self.begin : end - self.begin])

    @property
    def age(self) -> float:
        """For how many seconds the stream has had the block."""
        return asyncio.get_running_loop().time() - self.since

    def release(self) -> None:
        """Give the share back."""
        self._blocks.release(self._block, self)


class _Block:
    __slots__ = ("at", "done", "file", "key", "leases", "memory", "nbytes")

    def __init__(self, file: Shared, key: tuple[str, int, int]) -> None:
        self.file, self.key = file, key
        self.nbytes = key[2] - key[1]
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.at = -1  # its first unit of the room; -1 while it is in line
        self.memory = memoryview(b"")
        self.leases: set[Lease] = set()


class Blocks:
    """The memory of the blocks of all streams of an event loop: ``room`` bytes. Streams get theirs in the order in
    which they ask."""

    def __init__(self, room: int) -> None:
        self._memory = np.empty(room, np.uint8).data  # not touched before it is used
        self._units = bytearray(room // _UNIT)  # 1: in use
        self._known: dict[tuple[str, int, int], _Block] = {}
        self._line: deque[_Block] = deque()
        self._reading: set[asyncio.Task[None]] = set()
        self._watch: asyncio.TimerHandle | None = None
        self.threads = ThreadPoolExecutor(
            _AT_ONCE, "lazyckpt send", once_always
        )  # threads keep memory that they have used

    @property
    def used(self) -> int:
        """How many bytes are in use."""
        return sum(self._units) * _UNIT

    def idle(self, nbytes: int) -> bool:
        """Return whether there is room for this many bytes, and nobody waits."""
        return not self._line and self._place(nbytes) >= 0

    def _place(self, nbytes: int) -> int:
        return self._units.find(bytes(-(-nbytes // _UNIT)))

    def lease(self, file: Shared, begin: int, end: int) -> Lease:
        """Get in line for a block of a file, or share it with those who have it or wait for it."""
        key = (file.tag, begin, end)
        block = self._known.get(key)
        if block is None:
            block = self._known[key] = _Block(file, key)
            self._line.append(block)
        lease = Lease(self, block, begin, end)
        block.leases.add(lease)
        self._serve()
        return lease

    def release(self, block: _Block, lease: Lease) -> None:
        """Take a share back. What nobody has or waits for any more makes room."""
        if lease not in block.leases:
            return
        block.leases.discard(lease)
        if block.leases:
            return
        if block.at < 0:
            self._line.remove(block)
            self._forget(block)
        elif block.done.done():
            self._free(block)
        # else a thread reads it, which nothing can end: `_read` makes room

    def _serve(self) -> None:
        while self._line and (at := self._place(self._line[0].nbytes)) >= 0:
            block = self._line.popleft()
            block.at = at
            block.memory = self._memory[at * _UNIT : at * _UNIT + block.nbytes]
            self._mark(block, 1)
            task = asyncio.create_task(self._read(block))
            self._reading.add(task)
            task.add_done_callback(self._reading.discard)
        if self._line and self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(HELD, self._drop_some)

    def _mark(self, block: _Block, used: int) -> None:
        count = -(-block.nbytes // _UNIT)
        self._units[block.at : block.at + count] = bytes([used]) * count

    async def _read(self, block: _Block) -> None:
        fill = block.file.content
        assert not isinstance(fill, bytes)  # what is in memory has no blocks
        try:
            await in_threads(self.threads, partial(fill, block.key[1], block.memory))
        except BaseException as e:
            self._forget(block)  # who asks from now on reads anew
            block.done.set_exception(e if isinstance(e, Exception) else asyncio.CancelledError())
            block.done.exception()  # there may be nobody who waits for it
            if not isinstance(e, Exception):
                raise
        else:
            now = asyncio.get_running_loop().time()
            for lease in block.leases:
                lease.since = now
            block.done.set_result(None)
        if not block.leases:
            self._free(block)

    def _drop_some(self) -> None:
        """Take blocks from streams that have had them for long, the longest first, until the first in line has room."""
        self._watch = None
        now = asyncio.get_running_loop().time()
        held = [
            (lease.since, n, block, lease)
            for n, block in enumerate(self._known.values())
            if block.done.done()
            for lease in block.leases
            if not lease.awaited and now - lease.since > HELD
        ]
        for _, _, block, lease in sorted(held, key=lambda one: one[:2]):
            if not self._line:
                break
            lease.dropped = True
            self.release(block, lease)
        self._serve()

    def _forget(self, block: _Block) -> None:
        if self._known.get(block.key) is block:
            del self._known[block.key]

    def _free(self, block: _Block) -> None:
        self._forget(block)
        self._mark(block, 0)
        self._serve()
