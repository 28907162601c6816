"""Files that are computed while they are sent: ranges of HTTP, and the memory that all answers take together.

A file is read in blocks, and a block is sent in pieces. The blocks of all streams share the memory of `Blocks`: a
stream waits in line until there is room for its next block. Streams that ask for the same block share it. A client
that is slow to take what it asked for does not hold the room: when others wait, its block is dropped, and the stream
reads what is left of it again, in smaller blocks, when its turn comes.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

T = TypeVar("T")
ROOM = 12 << 20  # bytes of the blocks of all streams
_BLOCK = 4 << 20  # bytes of the largest block; a power of 2, as all their sizes are
_PIECE = 64 << 10  # bytes that are handed to the connection at a time: it buffers one such piece for a slow client
_FEW = 16  # streams of which each may be handed several times as much
_UNIT = 64 << 10  # bytes; the room of a block is a number of them
_AT_ONCE = 2  # blocks that are computed at the same time: each takes memory of its own while it is computed
_HELD = 0.1  # seconds after which a block may be dropped if others wait
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)


class Shared(NamedTuple):
    """A file to send: its size in bytes, what identifies its content, its media type, and a function that fills memory
    with its bytes from one on: ``fill(begin, target)``, in any thread."""

    size: int
    tag: str
    type: str
    fill: Callable[[int, memoryview], None]


async def in_threads(threads: Executor, work: Callable[[], T]) -> T:
    """Return what ``work`` returns in one of the threads. Nothing ends a thread: if the loop ends, it waits for it."""
    found = asyncio.get_running_loop().run_in_executor(threads, work)
    try:
        return await asyncio.shield(found)
    except asyncio.CancelledError:
        while not found.done():
            with suppress(asyncio.CancelledError):  # the end of the loop cancels what was cancelled before, too
                await asyncio.wait({found})
        raise


class Streams:
    """Sends files and ranges of them.

    Parameters
    ----------
    room
        How many bytes the blocks of all streams may have together: a power of 2, or several of the largest block.
    """

    def __init__(self, room: int = ROOM) -> None:
        self._blocks = Blocks(room)
        self._most = min(_BLOCK, room)
        self._open = 0  # streams

    @property
    def used(self) -> int:
        """How many bytes the blocks have together now."""
        return self._blocks.used

    async def send(self, request: Request, file: Shared) -> Response:
        """Return the response to a GET or HEAD of a file: whole, a range, or nothing if the asker has it."""
        from starlette.responses import Response, StreamingResponse

        tag = f'"{file.tag}"'
        headers = {"ETag": tag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        wanted = request.headers.get("range")
        if wanted is not None and request.headers.get("if-range", tag) != tag:
            wanted = None
        span = None if wanted is None else span_of(wanted, file.size)
        if span == (0, -1):
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{file.size}"})
        begin, end = span or (0, file.size)
        headers["Content-Length"] = str(end - begin)
        if span is not None:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size}"
        status = 200 if span is None else 206
        if request.method == "HEAD" or begin == end:
            return Response(status_code=status, headers=headers, media_type=file.type)
        pieces = self.pieces(file, begin, end)
        first = await anext(pieces)  # errors of the first block get a status of their own

        async def body() -> AsyncIterator[bytes]:
            try:
                yield first
                async for piece in pieces:
                    yield piece
            finally:
                await pieces.aclose()

        return StreamingResponse(body(), status, headers, file.type)

    async def pieces(self, file: Shared, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield bytes ``begin`` to ``end`` of a file in pieces. They are copies: no piece keeps its block in memory."""
        self._open += 1
        size, at = self._most, begin
        lease: Lease | None = None
        ahead: Lease | None = None
        try:
            while at < end:
                lease, ahead = ahead, None
                if lease is None or lease.begin != at or lease.dropped:
                    if lease is not None:
                        lease.release()
                    lease = self._blocks.lease(file, at, min((at // size + 1) * size, end))
                stop = lease.end
                await lease.ready()
                start = at
                while at < stop:
                    most = _PIECE * max(1, _FEW // self._open)
                    piece = lease.copy(at, min(at + most, stop))
                    if piece is None:
                        break
                    at += len(piece)
                    if at == stop:
                        lease.release()  # before the client takes the last piece
                        if at < end:
                            size = size if lease.age > _HELD / 2 else min(size * 2, self._most)
                    elif at < end and ahead is None and self._blocks.idle(self._most):
                        ahead = self._blocks.lease(file, stop, min((stop // size + 1) * size, end))
                    yield piece
                if at < stop:
                    size = min(self._most, _size(at - start))
        finally:
            self._open -= 1
            for one in (lease, ahead):
                if one is not None:
                    one.release()


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
        self._threads = ThreadPoolExecutor(_AT_ONCE, "lazyckpt send")  # threads keep memory that they have used

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
            self._watch = asyncio.get_running_loop().call_later(_HELD, self._drop_some)

    def _mark(self, block: _Block, used: int) -> None:
        count = -(-block.nbytes // _UNIT)
        self._units[block.at : block.at + count] = bytes([used]) * count

    async def _read(self, block: _Block) -> None:
        try:
            await in_threads(self._threads, lambda: block.file.fill(block.key[1], block.memory))
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
            if not lease.awaited and now - lease.since > _HELD
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


def _size(taken: int) -> int:
    """Return the size of the next block of a client that took so many bytes before its block was dropped."""
    return max(_PIECE, 1 << max(0, taken.bit_length() - 1))


def span_of(text: str, size: int) -> tuple[int, int] | None:
    """Return the interval of a Range header; None if it is to be ignored, (0, -1) if it has nothing of the file."""
    match = _RANGE.fullmatch(text.replace(" ", ""))
    if match is None or text.count("=") != 1 or not (match[1] or match[2]) or max(map(len, match.groups())) > 18:
        return None
    if not match[1]:
        begin, end = max(0, size - int(match[2])), size
    else:
        begin = int(match[1])
        end = min(int(match[2]) + 1, size) if match[2] else size
        if match[2] and int(match[2]) < begin:
            return None
    return (begin, end) if begin < end else (0, -1)
