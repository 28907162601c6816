"""A server: an application behind the delay, the counts and the faults, controlled over HTTP by `Handle`."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .faults import KINDS, Fault, Faults
from .http import Connection, DropError, Request, Response, end_with_parent, listen

CONTROL = "/_control/"  # no bucket can have this name
LOGGED = 200_000  # requests kept in the log

Application = Callable[[Request], Awaitable[Response]]


class Server:
    """Answers the requests of all connections by ``application``."""

    def __init__(self, application: Application, delay: float) -> None:
        self.application, self.delay = application, delay
        self.faults = Faults()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.log: list[list[Any]] = []
        self.methods: Counter[str] = Counter()
        self.sent = self.received = self.in_flight = self.most = self.connections = 0

    def counts(self) -> dict[str, Any]:
        return {
            "requests": sum(self.methods.values()),
            "methods": self.methods,
            "sent": self.sent,
            "received": self.received,
            "concurrency": self.most,
            "connections": self.connections,
        }

    async def run(self) -> None:
        """Accept connections until the process ends. Prints the port."""
        sock = listen()
        print(sock.getsockname()[1], flush=True)
        loop, tasks = asyncio.get_running_loop(), set()
        while True:
            accepted, _ = await loop.sock_accept(sock)
            task = loop.create_task(self.serve(accepted))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def serve(self, sock: socket.socket) -> None:
        connection = Connection(sock)
        counted = reset = False
        try:
            while True:
                request = await connection.request()
                if request.target.startswith(CONTROL):
                    await connection.answer(self.control(request), True)
                else:
                    self.connections += not counted
                    counted = True
                    await self.one(connection, request)
        except DropError:
            reset = True
        except (EOFError, ConnectionError):
            pass
        finally:
            connection.close(reset)

    async def one(self, connection: Connection, request: Request) -> None:
        """Answer one request, and count it."""
        self.methods[request.method] += 1
        self.received += len(request.body)
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        entry = [request.method, request.target, request.headers.get("range", ""), 0, 0]
        if len(self.log) < LOGGED:
            self.log.append(entry)
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
            response = await self.respond(request)
            entry[3] = response.status
            entry[4] = response.size if request.method != "HEAD" else 0
            self.sent += entry[4]
            await connection.answer(response, request.method != "HEAD")
        finally:
            self.in_flight -= 1

    async def respond(self, request: Request) -> Response:
        fault = self.faults.find(request)
        if fault is None:
            return await self.application(request)
        instead = await self.faults.before(fault, request)
        response = instead or await self.application(request)
        return self.faults.after(fault, response)

    def control(self, request: Request) -> Response:
        what = request.path.removeprefix(CONTROL)
        told = json.loads(request.body or b"null")
        answer: Any = None
        if what == "counts":
            answer = self.counts()
        elif what == "log":
            answer = self.log
        elif what == "reset":
            self.reset()
        elif what == "delay":
            self.delay = told
        elif what == "faults":
            self.faults.faults = [Fault(**fault) for fault in told]
        else:
            return Response(404)
        return Response(200, {}, [json.dumps(answer).encode()])


@dataclass
class Counts:
    """What a server has answered since its counts were reset."""

    requests: int
    methods: dict[str, int]
    sent: int  # bytes of bodies
    received: int
    concurrency: int  # the most requests in flight at a time
    connections: int


@dataclass(frozen=True)
class Logged:
    """One request: its target (path and query as sent), range, status and bytes of its answer's body."""

    method: str
    target: str
    range: str
    status: int
    nbytes: int


@dataclass
class Handle:
    """A running server."""

    port: int
    faults: list[Fault] = field(default_factory=list)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def counts(self) -> Counts:
        return Counts(**self._tell("counts"))

    def log(self) -> list[Logged]:
        """The requests since `reset`, in the order of their arrival."""
        return [Logged(*entry) for entry in self._tell("log")]

    def reset(self) -> None:
        """Count from zero."""
        self._tell("reset")

    def set_delay(self, seconds: float) -> None:
        self._tell("delay", seconds)

    def set_fault(
        self, kind: str, path: str = "*", method: str = "*", what: str = "*", skip: int = 0, times: int | None = None,
        **options: Any,
    ) -> None:  # fmt: skip
        """Add a fault (faults.py says what kinds there are). The first one that concerns a request happens to it."""
        assert kind in KINDS, kind
        self.faults.append(Fault(kind, path, method, what, skip, times, options))
        self._tell("faults", [vars(fault) for fault in self.faults])

    def clear_faults(self) -> None:
        self.faults.clear()
        self._tell("faults", [])

    def _tell(self, what: str, told: Any = None) -> Any:
        request = urllib.request.Request(self.endpoint + CONTROL + what, json.dumps(told).encode(), method="POST")
        with _direct.open(request, timeout=30) as answer:
            return json.loads(answer.read())


_direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(server: Server) -> None:
    """Serve until whoever started this process has ended."""
    gc.freeze()
    threading.Thread(target=end_with_parent, daemon=True).start()
    asyncio.run(server.run())


# glibc keeps the memory of bodies instead of giving it back. Otherwise new pages take the server 0.9 s a GiB, or
# nothing, depending on the sizes of the bodies before: what one client sends makes another one slower.
_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}


@contextmanager
def running(module: str, told: dict[str, Any]) -> Iterator[int]:
    """Run a module of this package as a process that prints its port; yield the port, and end it afterwards."""
    root = Path(__file__).parents[2]
    child = subprocess.Popen(
        [sys.executable, "-m", f"tests.servers.{module}", json.dumps(told)],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root), **_MEMORY},
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        line = child.stdout.readline()
        if not line:
            raise RuntimeError(f"the server {module} has ended with {child.wait()}")
        yield int(line)
    finally:
        child.stdin.close()
        child.kill()
        child.wait()
        child.stdout.close()
