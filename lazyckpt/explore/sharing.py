"""A view over HTTP as if it had been converted: a virtual folder of safetensors, and a virtual Zarr store.

Both are computed when they are asked for, range by range, and keep nothing. What is served is what a conversion would
write: the bytes of a shard are those of `to_safetensors`, and the keys of the store are those of `interop.zarr_store`.
"""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from ..errors import LazyckptError
from ..export.files import cut_files
from ..export.safetensors import SAFETENSORS
from ..export.writer import check_names
from ..jobs.parts import Content
from ..jobs.plan import Layout, Placed
from ..namespace import Namespace
from .blocks import Shared
from .sending import Streams

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response

_NODES = 20_000  # maximum number of Zarr nodes whose documents are repeated in that of the root


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
        return Shared(content.size, tag, "application/octet-stream", content.fill, content.stored)


class Zarr:
    """A view as a Zarr store, whose root lists the documents of all nodes, because HTTP has no listing."""

    def __init__(self, view: Namespace[Any]) -> None:
        from ..interop.zarr_store import ViewStore, chunk_of  # zarr takes 50 MB

        self._store = ViewStore(view)
        self._chunk_of = partial(chunk_of, self._store)

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
        found = self._chunk_of(key)
        if found is None:
            return None
        size, part, read = found

        tag = hashlib.sha256(f"{self._store.version} {key}".encode()).hexdigest()[:32]
        if part is not None:
            content = Content(Layout(size, (), (Placed(0, part),)))
            return Shared(size, tag, "application/octet-stream", content.fill, content.stored)

        def fill(begin: int, target: memoryview) -> None:
            target[:] = read()[begin : begin + len(target)]

        return Shared(size, tag, "application/octet-stream", fill)

    async def listed(self, prefix: str) -> list[str]:
        """Return the names below a prefix; those of groups and arrays end with a slash."""
        return [name async for name in self._store.list_dir(prefix)]


def _of_bytes(text: bytes, kind: str) -> Shared:
    return Shared(len(text), hashlib.sha256(text).hexdigest()[:32], kind, text)


# -- over HTTP


def routes(folder_of: Callable[[], Folder], store_of: Callable[[], Zarr]) -> list[Any]:
    """Return the routes of the folder, ``/hf/``, and of the store, ``/zarr/``.

    Parameters
    ----------
    folder_of, store_of
        Return them. They are called in threads and may raise what opening raises.
    """
    from starlette.responses import HTMLResponse, PlainTextResponse, Response
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

    async def below(request: Request) -> Response:
        name, query = request.url.path.rpartition("/")[2], request.url.query
        where = f"{name}/?{query}" if query else f"{name}/"  # relative, as all links are
        return Response(status_code=308, headers={"Location": where})

    return [
        Route("/hf", below),
        Route("/hf/{path:path}", folder, methods=["GET", "HEAD"]),
        Route("/zarr", below),
        Route("/zarr/{path:path}", store, methods=["GET", "HEAD"]),
    ]


def _listing(title: str, names: list[str]) -> str:
    lines = "".join(f'<li><a href="{quote(name)}">{html.escape(name)}</a></li>\n' for name in names)
    return f"<!doctype html>\n<meta charset=utf-8>\n<title>{title}</title>\n<ul>\n{lines}</ul>\n"
