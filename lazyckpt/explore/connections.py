"""Connections to the server: how many there may be, and how long each may keep the server waiting.

uvicorn limits none of this: clients that open connections and send nothing, a header letter by letter, or read nothing
of the answer would use up the server's connections.
"""

from __future__ import annotations

import asyncio
import errno
import os
import select
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from ..io.system import SENDS_FILES, File
from .threads import apart, in_threads

if TYPE_CHECKING:
    from ..io.storage.base import Stored
    from .guard import Receive, Scope, Send

STORED = "lazyckpt.stored"
"""An extension of ASGI: a message of this type is a part of a response's body, whose bytes are in an open file. The
system sends them from there. ``message["stored"]`` is a `Stored`; parts of other types follow."""

CONNECTIONS = 512  # with the files of a checkpoint they stay below the 1,024 that systems usually let a process open
HEADERS = 256 << 10  # bytes; the name of a tensor may have 10,000 characters, of up to 12 bytes in an address
_PATIENCE = 20.0  # seconds in which a request has to come, from the first byte of its connection to the last header
_STALLED = 60.0  # seconds after which a client that takes nothing of its answer is given up
_AT_ONCE = 2  # connections to which files are sent at the same time
_STEP = 4 << 20  # bytes that a thread sends before it may serve another connection
_POLLED = 5  # milliseconds for which a thread waits for a client, if no other connection waits for a thread
# errors of a connection, not of the file that is sent
_LOST = frozenset(
    (errno.EPIPE, errno.ECONNRESET, errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN)
)
_FULL = f"The server has {CONNECTIONS} connections, and answers no more at the same time. Try again later.\n".encode()


async def _full(scope: Scope, receive: Receive, send: Send) -> None:
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(_FULL)).encode()),
        (b"retry-after", b"5"),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": 503, "headers": headers})
    await send({"type": "http.response.body", "body": _FULL})


def limited(most: int = CONNECTIONS, patience: float = _PATIENCE, stalled: float = _STALLED) -> type[asyncio.Protocol]:
    """Return a protocol for uvicorn.

    Parameters
    ----------
    most
        Number of connections; requests of further ones are answered with 503, and from twice as many on they are
        closed.
    patience
        Seconds in which a request has to come.
    stalled
        Seconds after which a client that takes nothing of its answer is given up.
    """
    from h11 import IDLE, Data
    from uvicorn.protocols.http.h11_impl import H11Protocol

    threads = ThreadPoolExecutor(_AT_ONCE, "lazyckpt sendfile")
    turns = 0  # connections that have a thread or wait for one

    def crowded() -> bool:
        return turns > _AT_ONCE

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None
        _writable: asyncio.Future[None] | None = None
        _ended = False  # whether the client has closed its side

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if SENDS_FILES:
                self.app = partial(self._extended, self.app)
            if len(self.connections) > 2 * most:
                transport.abort()
            elif len(self.connections) > most:
                self.app = _full
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._moves()
            super().connection_lost(exc)
            _set(self._writable)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._asked:
                self._unwatch()
            else:
                self._watch()  # of a part of a request

        def eof_received(self) -> bool:  # type: ignore[override]
            """Answer a client that has closed its side after asking. Computations of the API end: a browser that looks
            away closes both sides, which looks the same."""
            if not self._asked or "/api/" in self.scope["path"]:
                return False
            self._ended = True
            self._last()
            return True

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self._ended:
                self._last()

        def _last(self) -> None:
            """Close the connection after the answer that is being sent, unless another request has come already."""
            if not self.conn.trailing_data[0]:
                self.cycle.keep_alive = False

        def send_400_response(self, msg: str) -> None:
            """Answer what is no HTTP. If it is the body of a request, the answer to the request ends."""
            if self.conn.our_state is IDLE:
                super().send_400_response(msg)
            else:
                self.transport.abort()

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(stalled, self.transport.abort)

        def resume_writing(self) -> None:
            self._moves()
            super().resume_writing()

        async def _extended(self, app: Any, scope: Scope, receive: Receive, send: Send) -> None:
            """Answer a request by an application that may let the system send bytes of a file."""
            scope["extensions"] = {**scope.get("extensions", {}), STORED: {}}
            cycle = self.cycle

            async def sent(message: Any) -> None:
                if message["type"] != STORED:
                    await send(message)
                elif not cycle.disconnected:
                    await apart(self._send_stored(cycle, message["stored"]))

            await app(scope, receive, sent)

        async def _send_stored(self, cycle: Any, stored: Stored) -> None:
            nonlocal turns
            self.transport.set_write_buffer_limits(0)
            await self.flow.drain()  # the transport buffers nothing that has to be sent before
            if cycle.disconnected:
                return
            offset, count = stored.offset, stored.nbytes
            self.conn.send_with_data_passthrough(Data(data=cast(bytes, _Counted(count))))
            out = os.dup(self.transport.get_extra_info("socket").fileno())  # the loop leaves others those of transports
            try:
                while count and not cycle.disconnected:
                    turns += 1
                    try:
                        turn = partial(_send, out, stored.file, offset, min(count, _STEP), crowded)
                        done = await in_threads(threads, turn)
                    except OSError as e:
                        if e.errno not in _LOST:
                            raise stored.failed(e) from e
                        self.transport.abort()
                        return
                    finally:
                        turns -= 1
                    offset, count = offset + done, count - done
                    if not done and not cycle.disconnected:
                        await self._until_writable(out)
            finally:
                os.close(out)
                self.transport.set_write_buffer_limits()

        async def _until_writable(self, out: int) -> None:
            """Wait until the client takes bytes, or is gone. Give it up if it takes none for long."""
            self._writable = self.loop.create_future()
            self.loop.add_writer(out, _set, self._writable)
            try:
                async with asyncio.timeout(stalled):
                    await self._writable
            except TimeoutError:
                self.transport.abort()
            finally:
                self.loop.remove_writer(out)
                self._writable = None

        @property
        def _asked(self) -> bool:
            """Whether a request has come that is not answered yet."""
            return self.cycle is not None and not self.cycle.response_complete

        def _watch(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(patience, self.transport.close)

        def _unwatch(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _moves(self) -> None:
            if self._stalled is not None:
                self._stalled.cancel()
                self._stalled = None

    return Connection


class _Counted:
    """Stands for bytes that are sent elsewhere, where h11 counts those of a body."""

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes

    def __len__(self) -> int:
        return self._nbytes


def _set(future: asyncio.Future[None] | None) -> None:
    if future is not None and not future.done():
        future.set_result(None)


def _send(out: int, file: File, offset: int, count: int, crowded: Callable[[], bool]) -> int:
    """Send bytes of a file as long as the client takes them at once; return how many. The system begins to read from
    the disk what is sent next. If others wait for the thread (``crowded``), it does not wait for the client. Raises
    OSError: of the file, or of the connection."""
    if not (file.cached(offset + count - 1) and file.cached(offset + 2 * count - 1)):
        file.prefetch(offset, 2 * count)
    done, waiting = 0, select.poll()
    waiting.register(out, select.POLLOUT)
    while done < count:
        try:
            sent = file.send(out, offset + done, count - done)
        except BlockingIOError:
            if any(waiting.poll(0 if crowded() else 1) for _ in range(_POLLED)):
                continue
            break
        if not sent:
            raise OSError(errno.ENODATA, "the file is shorter than it was")
        done += sent
    return done
