"""The explorer as a local web page: `Server`, which answers the API's requests over HTTP.

The server is read-only, listens on the loopback address unless told otherwise, and answers only those who know its
token (`guard`). It serves the application of ``assets``, the API below ``/api/v1/``, and nothing else of the machine.
"""

from __future__ import annotations

import asyncio
import errno
import gzip
import hashlib
import html
import logging
import os
import re
import socket
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from ..errors import DataError, LazyckptError
from ..io.pool import on
from ..io.reading.keeping import once, once_always
from ..io.system import trim_memory
from ..jobs.pieces import drop_scratch
from .api import Answer, Explorer, failed
from .connections import HEADERS, limited
from .guard import Guard, new_token
from .packing import VERSION, to_json
from .query import Cancelled, parameters
from .sending import Bounded, Room, bounded
from .threads import in_threads

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

ASSETS = {"explorer.js": "text/javascript; charset=utf-8", "explorer.css": "text/css; charset=utf-8"}
_AT_ONCE = 2  # requests that read tensors at the same time, and as many others; the rest waits
_THREADS = max(2, min(4, os.cpu_count() or 1))  # that read and count for them: each keeps some 8 MiB
_LIGHT = re.compile(  # paths whose answers read no tensors: they do not wait for those that do
    r"about|tree|tree/marks|tree/totals|architecture.*|ranks.*|tensor|tensor/layout|experts/layers|compare|run|python"
)
_SENT = 64 << 20, 6 << 20  # bytes of answers that clients are about to take: of light and of heavy ones
_SMALL = 1024  # bytes of an answer that is not compressed


@cache
def asset(name: str) -> bytes:
    """Return a file of the built application."""
    return (files(__package__) / "assets" / name).read_bytes()


def page(host: bytes, title: str, head: str, tail: str) -> bytes:
    """Return the page of the application.

    Parameters
    ----------
    host
        JSON that tells the application where its answers come from.
    title
        The title of the page.
    head, tail
        HTML that loads the style sheet and the script.
    """
    about = host.replace(b"<", b"\\u003c").decode("ascii")  # no text in it may end the element
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(title)}</title>
<link rel="icon" href="data:,">
{head}
</head>
<body>
<div id="explorer" class="lazyckpt-explorer"></div>
<script type="application/json" id="explorer-host">{about}</script>
{tail}
</body>
</html>
""".encode()


def application(opened: Callable[[], Explorer], mounts: Iterable[Any] = ()) -> Starlette:
    """Return the ASGI application, without the guard.

    Parameters
    ----------
    opened
        Returns the explorer. It is called in a thread, at every request; the first calls may wait until the checkpoint
        is open. What it raises is the answer.
    mounts
        Further routes of starlette.
    """
    from starlette.applications import Starlette
    from starlette.responses import PlainTextResponse, Response
    from starlette.routing import Route

    light, heavy = (
        (asyncio.Semaphore(_AT_ONCE), ThreadPoolExecutor(_AT_ONCE, "lazyckpt answer"), Room(sent)) for sent in _SENT
    )
    readers = ThreadPoolExecutor(_THREADS, "lazyckpt read", once_always)
    version = hashlib.sha256(b"".join(asset(name) for name in ASSETS)).hexdigest()[:12]

    async def index(request: Request) -> Response:
        # all relative: a proxy may have the server below a path of its own, which it does not say
        host = {"http": {"base": f"api/v{VERSION}", "token": ""}}
        head = f'<link rel="stylesheet" href="assets/explorer.css?{version}">'
        tail = f'<script type="module" src="assets/explorer.js?{version}"></script>'
        body = page(to_json(host), "lazyckpt", head, tail)
        return Response(body, media_type="text/html", headers={"Cache-Control": "no-store"})

    async def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in ASSETS:
            return PlainTextResponse("no such file", status_code=404)
        kept = {"Cache-Control": "private, max-age=31536000, immutable"} if request.url.query == version else {}
        return _sent(request, Answer(asset(name), ASSETS[name]), kept)

    async def api(request: Request) -> Response | Bounded:
        values = parameters(request.url.query)
        values.pop("token", None)
        gone = threading.Event()
        fresh = {"Cache-Control": "private, no-cache"}

        path = request.path_params["path"]

        def work() -> Response:
            try:
                explorer = opened()
            except (LazyckptError, OSError) as e:
                return _sent(request, failed(e), fresh)
            try:
                with on(readers), once():
                    return _sent(request, explorer.answer(path, values, lambda: not gone.is_set()), fresh)
            finally:
                drop_scratch()
                trim_memory()

        slots, threads, room = light if _LIGHT.fullmatch(path) else heavy
        async with slots:
            task = asyncio.ensure_future(in_threads(threads, work))
            watch = asyncio.ensure_future(_closed(request))
            try:
                await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
                if not task.done():
                    gone.set()
                return await bounded(await task, room)  # while there is no room, no further answers are computed
            except Cancelled:
                return Response(status_code=499)
            finally:
                gone.set()
                watch.cancel()

    routes = [
        Route("/", index),
        Route("/assets/{name}", static),
        Route(f"/api/v{VERSION}/{{path:path}}", api),
        *mounts,
    ]
    app = Starlette(routes=routes)
    app.router.redirect_slashes = False  # it would lead away from the token and from the path of a proxy
    return app


async def _closed(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(0.05)


def _sent(request: Request, answer: Answer, headers: dict[str, str]) -> Response:
    """Return an answer as a response: compressed, with an ETag, and empty if the asker has it."""
    from starlette.responses import Response

    tag = f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'
    headers = {**headers, "ETag": tag, "Vary": "Accept-Encoding"}
    if answer.status == 200 and tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    body = answer.body
    if len(body) > _SMALL and "gzip" in request.headers.get("accept-encoding", ""):
        body = gzip.compress(body, 1, mtime=0)
        headers["Content-Encoding"] = "gzip"
    return Response(body, answer.status, headers, answer.type)


class _Short(logging.Filter):
    """Makes one line of an expected error that ends a response which has begun, and none of requests that `close`
    ends: neither of each nor of their number."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if isinstance(error, asyncio.CancelledError) or str(record.msg).startswith("Cancel "):
            return False
        if isinstance(error, LazyckptError | OSError):
            record.msg, record.args, record.exc_info, record.exc_text = "%s", (error,), None, None
        return True


_SHORT = _Short()


class Server:
    """A server of the explorer, which runs in a thread. It stops with `close`, or at the end of a ``with`` block.

    Parameters
    ----------
    opened
        Returns the explorer; called in threads (see `application`).
    host
        The address to listen on. With another one than that of this machine alone, other machines reach the server.
    port
        The port; 0 chooses a free one.
    token
        What one has to know to be answered. By default a random one; "" asks for nothing, and is only for servers that
        listen on this machine alone and that no other user reaches.
    hosts
        More names under which the server is reached: those of a proxy or a tunnel; "*" for any.
    mounts
        Returns further routes of starlette.

    Raises
    ------
    DataError
        starlette or uvicorn is not installed, the address is in use or not one of this machine's, or the token has
        other characters than letters, digits and ``-._~``.
    """

    def __init__(
        self,
        opened: Callable[[], Explorer],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        token: str | None = None,
        hosts: Iterable[str] = (),
        mounts: Callable[[], Iterable[Any]] = tuple,
    ) -> None:
        if find_spec("starlette") is None or find_spec("uvicorn") is None:
            raise DataError("the explorer's server needs starlette and uvicorn: pip install 'lazyckpt[explore]'")
        import uvicorn

        self.token = new_token() if token is None else token
        self._host = host
        app = Guard(application(opened, mounts()), self.token, host, hosts)
        self._socket = _listening(host, port)
        self.port: int = self._socket.getsockname()[1]
        config = uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
            http=limited(),
            h11_max_incomplete_event_size=HEADERS,
            timeout_keep_alive=30,
            timeout_graceful_shutdown=1,
        )
        logging.getLogger("uvicorn.error").addFilter(_SHORT)  # adds it once
        self._server = uvicorn.Server(config)
        self._ended = threading.Event()  # Ctrl-C within `Thread.join` marks a thread as ended that is not (bpo-45274)
        threading.Thread(target=self._run, name="lazyckpt serve", daemon=True).start()

    def _run(self) -> None:
        try:
            asyncio.run(self._server.serve([self._socket]))
        finally:
            self._ended.set()

    @property
    def url(self) -> str:
        """The address of the page, with the token."""
        return self._base + (f"?token={self.token}" if self.token else "")

    @property
    def address(self) -> str:
        """The address with the token as a part of the path, for programs that can be given only a URL: what the server
        offers is below it ("api/v1/about", "hf/config.json", "zarr/zarr.json")."""
        return self._base + (f"t/{self.token}/" if self.token else "")

    @property
    def _base(self) -> str:
        host = "127.0.0.1" if self._host in ("0.0.0.0", "") else self._host
        host = "[::1]" if host in ("::", "::1") else host
        return f"http://{host}:{self.port}/"

    def __repr__(self) -> str:
        return f"<lazyckpt server at {self.url}>"

    def wait(self) -> None:
        """Wait until the server stops."""
        while not self._ended.wait(0.5):
            pass

    @property
    def running(self) -> bool:
        """Whether requests may still be computed. After `close`, it is so while reads of files that do not answer
        last."""
        return not self._ended.is_set()

    def close(self) -> None:
        """Stop the server. Requests that are being answered end first, for at most a second."""
        self._server.should_exit = True
        self._ended.wait(5)
        self._socket.close()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _listening(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    one = socket.socket(family, socket.SOCK_STREAM)
    one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        one.bind((host, port))
        one.listen(256)
    except OSError as e:
        one.close()
        if e.errno == errno.EADDRINUSE:
            raise DataError(f"port {port} of {host} is in use: choose another one, or 0 for any") from None
        raise DataError(f"cannot listen on port {port} of {host!r}: {e.strerror or e}") from None
    except OverflowError:
        one.close()
        raise DataError(f"there is no port {port}: it is a number from 0 to 65535") from None
    return one
