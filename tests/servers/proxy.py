"""A proxy that delays, counts and spoils requests to another server: moto, Azurite, or any other."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from typing import Any
from urllib.parse import urlsplit

from .http import Connection, Request, Response
from .server import Handle, Server, main, running

HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "expect"}  # of one connection only


class Proxy:
    """The application: asks ``backend``, over connections that it keeps."""

    def __init__(self, backend: str) -> None:
        parts = urlsplit(backend)
        self.address = parts.hostname, parts.port
        self.free: list[Connection] = []
        self.replaced: set[str] = set()

    def replace(self, path: str) -> None:
        """Pretend from now on that an object has other bytes of the same size."""
        self.replaced.add(path)

    async def __call__(self, request: Request) -> Response:
        response = await self._passed_on(request)
        if request.method == "PUT":
            self.replaced.discard(request.path)
        elif request.path in self.replaced and response.status in (200, 206):
            response.headers |= {"ETag": '"replaced"', "Last-Modified": formatdate(usegmt=True)}
            response.body = [bytes(255 - b for b in response.bytes())]
        return response

    async def _passed_on(self, request: Request) -> Response:
        headers = {name: value for name, value in request.headers.items() if name not in HOP}
        headers["content-length"] = str(len(request.body))
        if "aws-chunked" in headers.get("content-encoding", ""):  # the body was decoded
            del headers["content-encoding"]
        lines = [f"{request.method} {request.target} HTTP/1.1", *(f"{n}: {v}" for n, v in headers.items())]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        while self.free:
            try:
                return await self._ask(self.free.pop(), request, head)
            except (EOFError, ConnectionError):  # the backend closed it meanwhile
                continue
        sock = socket.socket()
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, self.address)
        return await self._ask(Connection(sock), request, head)

    async def _ask(self, connection: Connection, request: Request, head: bytes) -> Response:
        await connection.loop.sock_sendall(connection.sock, head + bytes(request.body))
        first, headers = await connection.head()
        while first.split(" ")[1] == "100":
            first, headers = await connection.head()
        version, status = first.split(" ", 2)[:2]
        bodiless = request.method == "HEAD" or status in ("204", "304")
        body = b"" if bodiless else await connection.body(headers, to_end=True)
        ends = "close" in headers.get("connection", "").lower() or version == "HTTP/1.0"
        if ends:
            connection.close()
        else:
            self.free.append(connection)
        kept = {_title(name): value for name, value in headers.items() if name not in HOP}
        if bodiless and "content-length" in headers:
            kept["Content-Length"] = headers["content-length"]
        return Response(int(status), kept, [body] if body else [])


def _title(name: str) -> str:
    return {"etag": "ETag"}.get(name, "-".join(part.capitalize() for part in name.split("-")))


@contextmanager
def serve_proxy(backend: str, delay: float = 0.02) -> Iterator[Handle]:
    """Pass requests on to the server at the URL ``backend``; yield what controls the proxy."""
    with running("proxy", {"backend": backend, "delay": delay}) as port:
        yield Handle(port)


def _main(told: dict[str, Any]) -> None:
    proxy = Proxy(told["backend"])
    server = Server(proxy, told["delay"])
    server.faults.replace = proxy.replace
    main(server)


if __name__ == "__main__":
    _main(json.loads(sys.argv[1]))
