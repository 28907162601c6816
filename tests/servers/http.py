"""HTTP/1.1 over sockets and asyncio: no more than the servers need, and so fast that clients are what is measured."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import IO
from urllib.parse import parse_qsl, unquote

REASONS = {200: "OK", 204: "No Content", 206: "Partial Content", 403: "Forbidden", 404: "Not Found"}
BLOCK = 1 << 20  # bytes sent at once


@dataclass
class Request:
    """A request. ``path`` is decoded and begins with a slash; ``target`` is as it was sent."""

    method: str
    target: str
    headers: dict[str, str]  # by lower-case name
    body: bytes | bytearray = b""

    def __post_init__(self) -> None:
        path, _, self.raw_query = self.target.partition("?")
        self.path = unquote(path)
        self.query = dict(parse_qsl(self.raw_query, keep_blank_values=True))

    def range(self, size: int) -> tuple[int, int] | None:
        """The requested start and stop in an object of this size; None without a range. Raises ValueError for a range
        outside of it."""
        text = self.headers.get("range", "")
        if not text.startswith("bytes=") or "," in text:
            return None
        first, _, last = text.removeprefix("bytes=").partition("-")
        start, stop = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
        if start >= size or start >= stop:
            raise ValueError(text)
        return start, min(stop, size)


@dataclass
class FilePart:
    """Bytes of a file, from ``start`` to ``stop``."""

    path: str
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def read(self) -> bytes:
        with open(self.path, "rb") as f:
            f.seek(self.start)
            return f.read(len(self))


Piece = bytes | bytearray | memoryview | FilePart


@dataclass
class Response:
    """An answer. ``cut`` is the number of bytes of the body after which the connection breaks, ``pause`` the seconds
    between parts of ``pause_size`` bytes."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: Sequence[Piece] = ()
    cut: int | None = None
    pause: float = 0
    pause_size: int = 1 << 10

    @property
    def size(self) -> int:
        return sum(map(len, self.body))

    def bytes(self) -> bytes:
        return b"".join(p.read() if isinstance(p, FilePart) else bytes(p) for p in self.body)


class DropError(Exception):
    """The connection is to break without an answer."""


class Connection:
    """One side of a connection: reads heads and bodies, sends answers."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.loop = asyncio.get_running_loop()
        self.buffer = bytearray()

    async def _more(self) -> None:
        data = await self.loop.sock_recv(self.sock, 1 << 16)
        if not data:
            raise EOFError
        self.buffer += data

    async def until(self, end: bytes) -> bytes:
        """Return what comes before ``end``, and leave ``end`` out. Raises EOFError."""
        seen = 0
        while (at := self.buffer.find(end, seen)) < 0:
            seen = max(0, len(self.buffer) - len(end))
            await self._more()
        found = bytes(self.buffer[:at])
        del self.buffer[: at + len(end)]
        return found

    async def exactly(self, size: int) -> bytearray:
        """Return the next ``size`` bytes. Raises EOFError."""
        data = bytearray(size)
        held = min(size, len(self.buffer))
        data[:held] = self.buffer[:held]
        del self.buffer[:held]
        view = memoryview(data)
        while held < size:
            count = await self.loop.sock_recv_into(self.sock, view[held:])
            if not count:
                raise EOFError
            held += count
        return data

    async def head(self) -> tuple[str, dict[str, str]]:
        """Return the first line and the headers."""
        first, *lines = (await self.until(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.strip().lower()] = value.strip()
        return first, headers

    async def body(self, headers: dict[str, str], to_end: bool = False) -> bytes | bytearray:
        """Return the body that follows a head; with ``to_end``, one of unknown length goes to the connection's end."""
        if "chunked" in headers.get("transfer-encoding", ""):
            return await self._chunks()
        if "content-length" in headers:
            return await self.exactly(int(headers["content-length"]))
        if to_end:
            try:
                while True:
                    await self._more()
            except EOFError:
                return bytes(self.buffer)
        return b""

    async def _chunks(self) -> bytearray:
        body = bytearray()
        while size := int((await self.until(b"\r\n")).split(b";")[0], 16):
            body += await self.exactly(size)
            await self.until(b"\r\n")
        while await self.until(b"\r\n"):  # trailers
            pass
        return body

    async def request(self) -> Request:
        """Return the next request. Raises EOFError at the end of the connection."""
        first, headers = await self.head()
        method, target, _ = first.split(" ", 2)
        if target.startswith("http://"):  # with the server's name (RFC 9112, 3.2.2), as clients of AWS's C libraries do
            target = "/" + target.split("/", 3)[3]
        if "100-continue" in headers.get("expect", "").lower():
            await self.loop.sock_sendall(self.sock, b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await self.body(headers)
        if "aws-chunked" in headers.get("content-encoding", ""):
            body = aws_chunks(body)
        return Request(method, target, headers, body)

    async def answer(self, response: Response, with_body: bool) -> int:
        """Send an answer; return how many bytes of a body were sent. Raises DropError after a cut one."""
        headers = {"Content-Length": str(response.size)} | response.headers
        lines = [f"HTTP/1.1 {response.status} {REASONS.get(response.status, 'Status')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        if response.status in (204, 304) or not with_body:
            await self.loop.sock_sendall(self.sock, head)
            return 0
        left = response.size if response.cut is None else min(response.cut, response.size)
        if left <= BLOCK and not response.pause:
            await self.loop.sock_sendall(self.sock, head + response.bytes()[:left])
            sent = left
        else:
            await self.loop.sock_sendall(self.sock, head)
            sent = 0
            for piece in response.body:
                sent += await self._send(piece, min(len(piece), left - sent), response)
        if response.cut is not None:
            raise DropError
        return sent

    async def _send(self, piece: Piece, size: int, response: Response) -> int:
        step = response.pause_size if response.pause else BLOCK
        if isinstance(piece, FilePart) and not response.pause:
            file: IO[bytes]
            with open(piece.path, "rb") as file:
                if size:  # a count of 0 would be the whole file
                    await self.loop.sock_sendfile(self.sock, file, piece.start, size)
            return size
        view = memoryview(piece.read() if isinstance(piece, FilePart) else piece)
        for at in range(0, size, step):
            await self.loop.sock_sendall(self.sock, view[at : min(at + step, size)])
            if response.pause:
                await asyncio.sleep(response.pause)
        return size

    def close(self, reset: bool = False) -> None:
        if reset:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.sock.close()


def aws_chunks(body: bytes | bytearray) -> bytearray:
    """Return the payload of a body that AWS's client sent in chunks, each with its size and perhaps a signature."""
    found, at = bytearray(), 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end].split(b";")[0], 16)
        if not size:
            return found
        found += body[end + 2 : end + 2 + size]
        at = end + 2 + size + 2


def listen() -> socket.socket:
    """Return a socket that listens at a free port of this machine."""
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    sock.setblocking(False)
    return sock


def cut(pieces: Iterable[Piece], start: int, stop: int) -> list[Piece]:
    """Return the parts of pieces that lie from ``start`` to ``stop`` of all of them together."""
    found: list[Piece] = []
    at = 0
    for piece in pieces:
        lo, hi = max(start - at, 0), min(stop - at, len(piece))
        if lo < hi:
            if isinstance(piece, FilePart):
                found.append(FilePart(piece.path, piece.start + lo, piece.start + hi))
            else:
                found.append(memoryview(piece)[lo:hi])
        at += len(piece)
    return found


def end_with_parent() -> None:
    """End this process when its standard input ends, which whoever started it holds open."""
    while os.read(0, 1 << 10):
        pass
    os._exit(0)
