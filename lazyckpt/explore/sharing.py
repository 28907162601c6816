"""A view over HTTP as if it had been converted: a virtual folder of safetensors, and a virtual Zarr store.

Both are computed when they are asked for, range by range, and keep nothing. What is served is what a conversion would
write: the bytes of a shard are those of `to_safetensors`, and the keys of the store are those of `interop.zarr_store`.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
import re
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote
from weakref import WeakSet

from ..errors import LazyckptError
from ..export.files import cut_files
from ..export.safetensors import SAFETENSORS
from ..export.writer import check_names
from ..jobs.parts import Content
from ..namespace import Namespace

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_BLOCKS = ((3, 4 << 20), (12, 512 << 10), (1 << 30, 64 << 10))  # up to so many streams -> bytes that are read at a time
_RANGE = re.compile(r"bytes=(\d*)-(\d*)", re.ASCII)
_NODES = 20_000  # maximum number of Zarr nodes whose documents are repeated in that of the root


class Shared(NamedTuple):
    """A file to send: its size in bytes, what identifies its content, its media type, and a function that reads bytes
    ``begin`` to ``end``."""

    size: int
    tag: str
    type: str
    read: Callable[[int, int], bytes | memoryview]


class Folder:
    """A view as a folder of safetensors, as Hugging Face lays it out.

    Parameters
    ----------
    view
        The view.
    beside
        More files of the folder, such as config.json: name -> content.
    max_shard_size
        Largest size of a shard: bytes, or text such as "5GB".

    Raises
    ------
    DataError
        safetensors has no dtype of a tensor.
    """

    def __init__(self, view: Namespace[Any], beside: Mapping[str, bytes], max_shard_size: int | str = "5GB") -> None:
        tensors, aliases = view.once()
        check_names([*tensors, *aliases])
        cut = cut_files(SAFETENSORS, tensors, aliases, max_shard_size)
        self._files = {file.key: file for file in cut.files}
        self._texts = {**beside, **cut.texts}
        self._version = cut.fingerprint
        self._contents: dict[str, Content] = {}

    @property
    def names(self) -> list[str]:
        """The names of the files."""
        return sorted([*self._texts, *self._files])

    def file(self, name: str) -> Shared | None:
        """Return a file; None if there is none of this name."""
        text = self._texts.get(name)
        if text is not None:
            return _of_bytes(text, "application/json" if name.endswith(".json") else "application/octet-stream")
        planned = self._files.get(name)
        if planned is None:
            return None
        content = self._contents.get(name)
        if content is None:
            content = self._contents[name] = Content(planned.layout())
        tag = hashlib.sha256(f"{self._version} {name}".encode()).hexdigest()[:32]
        return Shared(content.size, tag, "application/octet-stream", content.read)


class Zarr:
    """A view as a Zarr store, whose root lists the documents of all nodes, because HTTP has no listing."""

    def __init__(self, view: Namespace[Any]) -> None:
        from ..interop.zarr_store import ViewStore  # zarr takes 50 MB

        self._store = ViewStore(view)

    @cached_property
    def _root(self) -> bytes:
        """The root's document, with those of all nodes (zarr-python's consolidated metadata) unless there are many."""
        root: dict[str, Any] = json.loads(self._store.document("") or b"{}")
        # zarr-python takes only the last run of siblings: those of a group have to follow each other
        nodes = sorted(self._store.nodes, key=lambda path: path.rpartition("/")[0])
        if len(nodes) <= _NODES:
            documents = {path: json.loads(self._store.document(path) or b"{}") for path in nodes if path}
            root["consolidated_metadata"] = {"kind": "inline", "must_understand": False, "metadata": documents}
        return json.dumps(root).encode()

    def file(self, key: str) -> Shared | None:
        """Return a document or a chunk; None if the store has no such key."""
        if key == "zarr.json":
            return _of_bytes(self._root, "application/json")
        path, _, name = key.rpartition("/")
        if name == "zarr.json" and path:
            document = self._store.document(path)
            return None if document is None else _of_bytes(document, "application/json")
        found = self._store.chunk(key)
        if found is None:
            return None
        size, read = found

        def part(begin: int, end: int) -> bytes:
            return bytes(read()[begin:end])

        return Shared(
            size,
            hashlib.sha256(f"{self._store.version} {key}".encode()).hexdigest()[:32],
            "application/octet-stream",
            part,
        )

    async def listed(self, prefix: str) -> list[str]:
        """Return the names below a prefix; those of groups and arrays end with a slash."""
        return [name async for name in self._store.list_dir(prefix)]


def _of_bytes(text: bytes, kind: str) -> Shared:
    return Shared(len(text), hashlib.sha256(text).hexdigest()[:32], kind, lambda begin, end: text[begin:end])


# -- over HTTP


class Streams:
    """Sends files and ranges of them."""

    def __init__(self) -> None:
        self._open: WeakSet[_Stream] = WeakSet()

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
        span = None if wanted is None else _span(wanted, file.size)
        if span == (0, -1):
            return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{file.size}"})
        begin, end = span or (0, file.size)
        headers["Content-Length"] = str(end - begin)
        if span is not None:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{file.size}"
        status = 200 if span is None else 206
        if request.method == "HEAD":
            return Response(status_code=status, headers=headers, media_type=file.type)
        stream = _Stream(file, begin, end, self._open)
        self._open.add(stream)
        await stream.begin()  # errors of the first block get a status of their own
        return StreamingResponse(stream, status, headers, file.type)


class _Stream:
    """Bytes of a file in blocks, of which the next one is read while one is sent."""

    def __init__(self, file: Shared, begin: int, end: int, others: Collection[Any]) -> None:
        self._file, self._at, self._end = file, begin, end
        self._others = others
        self._block: bytes | memoryview = b""

    async def begin(self) -> None:
        """Read the first block."""
        self._block = await self._read()

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        ahead: asyncio.Task[bytes | memoryview] | None = None
        try:
            while self._at < self._end:
                ahead = asyncio.create_task(self._read())
                yield memoryview(self._block)
                self._block = await ahead
            yield memoryview(self._block)
        finally:
            if ahead is not None:
                ahead.cancel()

    async def _read(self) -> bytes | memoryview:
        most = next(size for streams, size in _BLOCKS if len(self._others) <= streams)
        begin, self._at = self._at, min(self._at + most, self._end)
        return await asyncio.to_thread(self._file.read, begin, self._at)


def _span(text: str, size: int) -> tuple[int, int] | None:
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


def routes(folder_of: Callable[[], Folder], store_of: Callable[[], Zarr]) -> list[Any]:
    """Return the routes of the folder, ``/hf/``, and of the store, ``/zarr/``.

    Parameters
    ----------
    folder_of, store_of
        Return them. They are called in threads and may raise what opening raises.
    """
    from starlette.responses import HTMLResponse, PlainTextResponse
    from starlette.routing import Route

    streams = Streams()

    async def folder(request: Request) -> Response:
        name = request.path_params["path"]
        try:
            files = await asyncio.to_thread(folder_of)
            if not name:
                return HTMLResponse(_listing("Files", files.names))
            found = await asyncio.to_thread(files.file, name)
            if found is None:
                return PlainTextResponse("there is no such file\n", status_code=404)
            return await streams.send(request, found)
        except (LazyckptError, OSError) as e:
            return PlainTextResponse(f"{e}\n", status_code=500)

    async def store(request: Request) -> Response:
        key = request.path_params["path"]
        try:
            zarr = await asyncio.to_thread(store_of)
            if not key or key.endswith("/"):
                names = await zarr.listed(key)
                if names:
                    return HTMLResponse(_listing("Keys", names))
            found = await asyncio.to_thread(zarr.file, key)
            if found is None:
                return PlainTextResponse("there is no such key\n", status_code=404)
            return await streams.send(request, found)
        except (LazyckptError, OSError) as e:
            return PlainTextResponse(f"{e}\n", status_code=500)

    return [
        Route("/hf/{path:path}", folder, methods=["GET", "HEAD"]),
        Route("/zarr/{path:path}", store, methods=["GET", "HEAD"]),
    ]


def _listing(title: str, names: list[str]) -> str:
    lines = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>\n' for name in names)
    return f"<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n<ul>\n{lines}</ul>\n"
