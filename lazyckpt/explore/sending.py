"""Files that are computed while they are sent: ranges of HTTP.

A file is read in blocks, and a block is sent in pieces (see `blocks`). A stream whose block was dropped, because others
wait and its client is slow, reads what is left of it again, in smaller blocks, when its turn comes. What lies in local
files as it is, the system sends from there.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, suppress
from functools import cache, partial
from typing import TYPE_CHECKING, Any, cast

from ..io.storage.base import Stored
from .blocks import HELD, Blocks, Lease, Shared
from .connections import STORED
from .threads import apart, in_threads

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response, StreamingResponse

    from .guard import Receive, Scope, Send

ROOM = 12 << 20  # bytes of the blocks of all streams
_BLOCK = 4 << 20  # bytes of the largest block; a power of 2, as all their sizes are
_PIECE = 64 << 10  # bytes that are handed to the connection at a time: it buffers one such piece for a slow client
_FEW = 16  # streams of which each may be handed several times as much
_LEAST = 1 << 20  # bytes of a run in a local file that the system sends
_AHEAD = 256 << 20  # bytes of a file in which such runs are looked for at a time
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)


class Room:
    """How many bytes of answers there should be that clients have not taken yet. One that is larger may be there alone;
    where no client has taken one to its end for ``patience`` seconds, the next ones do not wait for them.
    """

    def __init__(self, most: int, patience: float = 5.0) -> None:
        self._most, self._patience = most, patience
        self.used = 0
        """How many bytes clients have not taken yet."""
        self._freed = asyncio.Event()
        self._freed_at = 0.0  # by the clock of the loop

    async def take(self, nbytes: int) -> None:
        """Wait until there is room for so many bytes, or until that has taken too long, and take it."""
        clock = asyncio.get_running_loop().time
        if not self.used:
            self._freed_at = clock()
        while self.used and self.used + nbytes > self._most and clock() < self._freed_at + self._patience:
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout_at(self._freed_at + self._patience):
                    await self._freed.wait()
        self.used += nbytes

    def give(self, nbytes: int) -> None:
        """Give the room of so many bytes back."""
        self.used -= nbytes
        self._freed_at = asyncio.get_running_loop().time()
        self._freed.set()


class Bounded:
    """A response (as an application of ASGI) that is sent in pieces, so that the connection buffers none but the last.
    It takes room until its client has taken it."""

    def __init__(self, response: Response, room: Room) -> None:
        self._status, self._headers, self._room = response.status_code, response.raw_headers, room
        self._whole = memoryview(response.body)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        whole = self._whole
        try:
            await send({"type": "http.response.start", "status": self._status, "headers": self._headers})
            for at in range(0, len(whole), _PIECE):
                piece = bytes(whole[at : at + _PIECE])
                await send({"type": "http.response.body", "body": piece, "more_body": at + _PIECE < len(whole)})
                await asyncio.sleep(0)  # otherwise the loop would not learn that the client is gone
        finally:
            self._room.give(len(whole))


async def bounded(response: Response, room: Room) -> Response | Bounded:
    """Wait until there is room for a response, and return what sends it."""
    if len(response.body) <= _PIECE:
        return response
    await room.take(len(response.body))
    return Bounded(response, room)


@cache
def _response_type() -> type[StreamingResponse]:
    """Return the class of responses whose parts are bytes, or bytes of files that the system sends."""
    from starlette.responses import StreamingResponse  # which is loaded only with a server

    class Sent(StreamingResponse):
        async def stream_response(self, send: Any) -> None:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self.body_iterator:
                if isinstance(part, Stored):
                    await send({"type": STORED, "stored": part})
                    part.confirm()
                else:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    return Sent


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
        from starlette.responses import Response

        tag = f'"{file.tag}"'
        headers = {"ETag": tag, "Accept-Ranges": "bytes", "Cache-Control": "private, no-cache"}
        known = [one.strip().removeprefix("W/") for one in request.headers.get("if-none-match", "").split(",")]
        if tag in known or "*" in known:
            return Response(status_code=304, headers=headers)
        wanted = request.headers.get("range") if request.method == "GET" else None
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
        if STORED in request.scope.get("extensions", ()):
            parts = self._parts(file, begin, end)
        else:
            parts = self.pieces(file, begin, end)
        first = await anext(parts)  # errors of the first block get a status of their own

        async def body() -> AsyncIterator[bytes | Stored]:
            async with aclosing(parts):
                yield first
                async for part in parts:
                    await asyncio.sleep(0)  # otherwise the loop would not learn that the client is gone
                    yield part

        return _response_type()(cast(Any, body()), status, headers, file.type)

    async def _parts(self, file: Shared, begin: int, end: int) -> AsyncGenerator[bytes | Stored]:
        """Yield bytes ``begin`` to ``end`` of a file: where they lie in local files, if they do, and the others in
        pieces. The last ones are read in any case, after all files of the others were confirmed: nobody gets a whole
        answer with bytes of a file that has changed."""
        at = begin
        while at < end:
            stop, last = end, end - _PIECE
            runs: list[tuple[int, Stored]] = []
            if file.stored is not None:
                stop = min(at + _AHEAD, end)
                find = partial(file.stored, at, min(stop, last), _LEAST)
                runs = await apart(in_threads(self._blocks.threads, find))
            for first, run in [*runs, (stop, None)]:
                async with aclosing(self.pieces(file, at, first)) as pieces:
                    async for piece in pieces:
                        yield piece
                at = first
                if run is not None:
                    yield run
                    at += run.nbytes

    async def pieces(self, file: Shared, begin: int, end: int) -> AsyncGenerator[bytes]:
        """Yield bytes ``begin`` to ``end`` of a file in pieces. They are copies: no piece keeps its block in memory.
        What is in memory does not wait for files that are read."""
        if isinstance(file.content, bytes):
            for at in range(begin, end, _PIECE):
                yield file.content[at : min(at + _PIECE, end)]
            return
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
                            size = size if lease.age > HELD / 2 else min(size * 2, self._most)
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
