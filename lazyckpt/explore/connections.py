"""Connections to the server: how many there may be, and how long each may keep the server waiting.

uvicorn limits none of this: clients that open connections and send nothing, a header letter by letter, or read nothing
of the answer would use up the server's connections.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .guard import Receive, Scope, Send

CONNECTIONS = 512  # with the files of a checkpoint they stay below the 1,024 that systems usually let a process open
HEADERS = 256 << 10  # bytes; the name of a tensor may have 10,000 characters, of up to 12 bytes in an address
_PATIENCE = 20.0  # seconds in which a request has to come, from the first byte of its connection to the last header
_STALLED = 60.0  # seconds after which a client that takes nothing of its answer is given up
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
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Connection(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > 2 * most:
                transport.abort()
            elif len(self.connections) > most:
                self.app = _full
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._unwatch()
            self._moves()
            super().connection_lost(exc)

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
            self.cycle.keep_alive = False
            return True

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(stalled, self.transport.abort)

        def resume_writing(self) -> None:
            self._moves()
            super().resume_writing()

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
