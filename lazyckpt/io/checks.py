"""Checks that files have not changed, made once for all reads of a job.

Stores that report a file's state with each read do not need them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ..errors import ChangedFileError, MissingFileError

_own = threading.local()


class _Verifying(Protocol):
    def verify(self, path: str) -> None: ...


class Batch:
    """The files that a job has read and whose state is not verified yet."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], _Verifying] = {}

    def add(self, store: _Verifying, path: str) -> None:
        self._files[id(store), path] = store

    def verify(self) -> None:
        """Verify all added files. Raises ChangedFileError, MissingFileError."""
        for (_, path), store in self._files.items():
            store.verify(path)
        self._files = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Add the files that this thread reads within the context to the batch."""
        before = getattr(_own, "batch", None)
        _own.batch = self
        try:
            yield
        finally:
            _own.batch = before


@contextmanager
def checked(apart: bool = False) -> Iterator[Batch]:
    """Verify every file that was read within the context once, when the outermost such context exits.

    With ``apart``, verify when this context exits even if it is nested, before its result goes into a cache. Raises
    ChangedFileError in place of any other error: bytes of a replaced file may have caused that error.
    """
    outer: Batch | None = getattr(_own, "batch", None)
    if outer is not None and not apart:
        yield outer
        return
    batch = Batch()
    try:
        with batch.joined():
            yield batch
    except Exception as e:
        try:
            batch.verify()
        except (ChangedFileError, MissingFileError) as changed:
            raise changed from e
        raise
    batch.verify()


def verify_later(store: _Verifying, path: str) -> None:
    """Verify the file when the current batch of this thread ends, or now if there is no batch."""
    batch: Batch | None = getattr(_own, "batch", None)
    if batch is None:
        store.verify(path)
    else:
        batch.add(store, path)
