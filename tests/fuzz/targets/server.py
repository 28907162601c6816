"""Requests to the explorer's server: any method, path, query and headers, to a server of one small checkpoint."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.guard import Guard
from lazyckpt.explore.server import application
from lazyckpt.explore.sharing import Folder, Zarr, routes
from lazyckpt.explore.subject import Subject
from lazyckpt.interop.zarr_store import ViewStore

from ..contract import DifferenceError, Target
from .sources import write

TOKEN = "secret"
STATUSES = {200, 206, 303, 304, 308, 400, 403, 404, 405, 409, 416, 421, 422}
NAMES = ("layers.0.w", "layers.1.w", "", "a/../b", "c\n%2e?\u202e")
Headers = Mapping[str, str]


@functools.cache
def _served() -> tuple[Any, dict[str, bytes]]:
    """The application, and the bytes of every file that it has."""
    path = write("served.pt", b"")
    torch.save({name: torch.arange(300.0).reshape(20, 15) + n for n, name in enumerate(NAMES)}, path)
    view = lazyckpt.open(path, cache=False)
    folder, store, explorer = Folder(view, {"config.json": b"{}"}), Zarr(view), Explorer(Subject(view))
    files = {f"/hf/{name}": folder.file(name) for name in folder.names}
    nodes = ViewStore(view).nodes
    keys = [*(f"{node}/zarr.json".lstrip("/") for node in nodes), *(f"{node}/c/0/0" for node in nodes)]
    files |= {f"/zarr/{key}": store.file(key) for key in keys}
    contents = {}
    for name, file in files.items():
        if file is not None:
            memory = bytearray(file.size)
            if isinstance(file.content, bytes):
                memory[:] = file.content
            else:
                file.content(0, memoryview(memory))
            contents[name] = bytes(memory)

    def app() -> Any:  # of one event loop
        return Guard(application(lambda: explorer, routes(lambda: folder, lambda: store)), TOKEN, "127.0.0.1")

    return app, contents


async def _answer(app: Any, method: str, target: str, headers: list[tuple[bytes, bytes]]) -> tuple[int, Headers, bytes]:
    path, _, query = target.partition("?")
    sent: list[Any] = []

    async def receive() -> Any:
        if not sent:
            sent.append(None)
            return {"type": "http.request", "body": b"", "more_body": False}
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    messages: list[Any] = []

    async def send(message: Any) -> None:
        messages.append(message)

    scope = {
        "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}, "http_version": "1.1", "scheme": "http",
        "method": method, "path": unquote(path), "raw_path": path.encode("latin-1", "replace"), "root_path": "",
        "query_string": query.encode("latin-1", "replace"), "headers": headers, "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
    }  # fmt: skip
    await app(scope, receive, send)
    start = messages[0]
    found = {name.decode("latin-1"): value.decode("latin-1") for name, value in start["headers"]}
    return start["status"], found, b"".join(message.get("body", b"") for message in messages[1:])


def request(data: bytes) -> None:
    """Send requests, one for each paragraph, at the same time, and check that no answer is wrong."""
    wanted = []
    for text in data.decode("latin-1").split("\n\n")[:8]:
        first, *lines = text.split("\n")
        method, _, target = first.partition(" ")
        pairs = [line.partition(":")[::2] for line in lines if ":" in line]
        headers = [(name.strip().lower().encode("latin-1"), value.strip().encode("latin-1")) for name, value in pairs]
        wanted.append((method.upper()[:20], target if target.startswith("/") else f"/{target}", headers))
    make, contents = _served()

    async def main() -> list[Any]:
        app = make()
        return await asyncio.gather(*(_answer(app, *one) for one in wanted))

    for (method, target, headers), answer in zip(wanted, asyncio.run(main()), strict=True):
        _check(method, target, dict(headers), answer, contents)


def _check(
    method: str,
    target: str,
    asked: Mapping[bytes, bytes],
    answer: tuple[int, Headers, bytes],
    contents: dict[str, bytes],
) -> None:
    status, headers, body = answer
    path = unquote(target.partition("?")[0]).removeprefix(f"/t/{TOKEN}")
    if status not in STATUSES:
        raise DifferenceError(f"{method} {target!r:.200}: status {status}: {body[:200]!r}")
    told = TOKEN in target or any(TOKEN.encode() in value or b"Basic" in value for value in asked.values())
    if status < 300 and not told:
        raise DifferenceError(f"{target!r:.200} was answered without the token")
    if status not in (200, 206) or not path.startswith(("/hf/", "/zarr/")) or path.endswith("/"):
        return
    content = contents.get(path)
    if content is None:
        raise DifferenceError(f"{path!r:.200} is no file, and has an answer: {body[:100]!r}")
    begin, end = 0, len(content)
    if status == 206:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", headers["content-range"])
        if match is None or int(match[3]) != len(content) or b"range" not in asked:
            raise DifferenceError(f"{asked.get(b'range')!r} is answered with {headers['content-range']}")
        begin, end = int(match[1]), int(match[2]) + 1
    if int(headers["content-length"]) != end - begin or not 0 <= begin <= end <= len(content):
        raise DifferenceError(f"{path!r:.200}: bytes {begin} to {end} of {len(content)}, {headers['content-length']}")
    if body != (b"" if method == "HEAD" else content[begin:end]):
        raise DifferenceError(f"{path!r:.200}: bytes {begin} to {end} are others")


def _seeds() -> list[bytes]:
    known = f"Host: localhost\nAuthorization: Bearer {TOKEN}"
    _, contents = _served()
    files = [quote(file) for file in sorted(contents)]
    tag = hashlib.sha256(b"{}").hexdigest()[:32]
    ranges = [
        "bytes=0-7",
        "bytes=-5",
        "bytes=5-",
        "bytes=0-0,2-3",
        "bytes=9-3",
        "bytes=99999999999999999999-",
        "bytes=-0",
    ]
    found = [f"GET {file}\n{known}\nRange: {ranges[n % 7]}" for n, file in enumerate(files)]
    found += [
        f'GET /t/{TOKEN}/hf/model.safetensors\nHost: localhost\nRange: bytes=1-{n}\nIf-Range: "{tag}"'
        for n in (1, 4000)
    ]
    found += [
        f"GET /?token={TOKEN}&x=1\nHost: localhost",
        f'HEAD /hf/config.json\n{known}\nIf-None-Match: "{tag}", *',
        f"GET /zarr/\n{known}\nOrigin: http://localhost",
        f"GET /assets/explorer.css?x\n{known}\nAccept-Encoding: gzip",
        f"GET /hf/../../etc/passwd\n{known}",
        f"POST /api/v1/about\n{known}",
        f"GET /api/v1/tensor?name=&state=weights\n{known}\nSec-Fetch-Site: cross-site",
        f"GET /api/v1/about\n{known}\n\nGET {files[0]}\n{known}\n\nGET {files[-1]}\n{known}\nRange: bytes=3-900",
    ]
    paths = ("about", "tree", "tree/marks", "architecture", "ranks", "tensor/layout", "tensor/bits", "tensor/outliers")
    found += [f"GET /api/v1/{path}?name=layers.0.w&step=1&count=3\n{known}" for path in paths]
    for query in ("tile?rows=4&cols=4&r0=1&r1=9", "values?r0=0&c1=3", "histogram?bins=9&scale=log", "norms?rows=3"):
        found.append(f"GET /api/v1/tensor/{query}&name=layers.1.w&at=&dims=0,1&exact=yes\n{known}")
    return [one.encode("latin-1") for one in found]


TARGETS = (Target("server.request", request, _seeds, "text"),)
