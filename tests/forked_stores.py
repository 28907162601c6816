"""A store that uses obstore in the simplest way, for tests of helpers of forked processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import obstore
from obstore.store import HTTPStore

from lazyckpt.core.index import FileInfo
from lazyckpt.errors import MissingFileError
from lazyckpt.io.storage.base import Entry, Fetched, Store
from lazyckpt.io.storage.forked import Recipe, by_helper


class Strange(Exception):
    """An exception whose parameters are not its args."""

    def __init__(self, *, what: str) -> None:
        super().__init__(f"strange: {what}")


class Plain(Store):
    """Files of a web server."""

    def __init__(
        self, url: str, options: Mapping[str, Any] | None = None, pins: Mapping[str, FileInfo] | None = None
    ) -> None:
        super().__init__(pins)
        self.url, self._options = url, dict(options or {})
        self._http = HTTPStore.from_url(url, client_options={"allow_http": True, **self._options})

    def recipe(self) -> Recipe:
        return Plain, (self.url, self._options)

    def __reduce__(self) -> tuple[Any, ...]:
        return Plain, (self.url, self._options, dict(self.pins))

    @property
    def root(self) -> str:
        return self.url

    @property
    def gap(self) -> int:
        return 1 << 16

    def below(self, folder: str) -> Plain:
        return Plain(f"{self.url}/{folder}", self._options)

    @by_helper
    def list(self, folder: str = "") -> Mapping[str, Entry]:
        return {"folder": Entry(FileInfo(0, 0), True)}

    def _with(self, pins: Mapping[str, FileInfo]) -> Plain:
        return Plain(self.url, self._options, pins)

    @by_helper
    def _stat(self, path: str) -> FileInfo:
        if path == "strange":
            raise Strange(what=path)
        if path == "missing":
            error = MissingFileError(f"{self.url}/{path}: not there")
            error.errno = 2
            raise error
        meta = obstore.head(self._http, path)
        return FileInfo(meta["size"], 0, meta["e_tag"] or "")

    @by_helper
    def _fetch(self, path: str, offset: int, target: memoryview) -> Fetched:
        options: Any = {"range": (offset, offset + len(target))}
        if pin := self.pins.get(path):
            options["if_match"] = pin.version
        answer = obstore.get(self._http, path, options=options)
        data = memoryview(answer.bytes())
        target[: len(data)] = data
        return len(data), FileInfo(answer.meta["size"], 0, answer.meta["e_tag"] or "")

    @by_helper
    def pid(self, path: str) -> int:
        """Return the process that sends requests."""
        import os

        return os.getpid()

    @by_helper
    def print(self, path: str) -> str:
        print(path)
        return path
