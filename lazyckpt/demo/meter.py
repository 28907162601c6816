"""A file system that counts the bytes that are read from it, under URLs ``metered:///path``."""

from __future__ import annotations

import threading
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem


class Meter:
    """Counters of bytes and requests since the last `reset`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        self.bytes = 0
        self.requests = 0

    def add(self, nbytes: int) -> None:
        with self._lock:
            self.bytes += nbytes
            self.requests += 1


meter = Meter()


class MeteredFileSystem(LocalFileSystem):  # type: ignore[misc]
    """The local file system, with every range that is read counted by `meter`."""

    protocol = "metered"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(str(path).removeprefix("metered://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        data: bytes = super().cat_file(path, start, end, **options)
        meter.add(len(data))
        return data


fsspec.register_implementation("metered", MeteredFileSystem, clobber=True)
