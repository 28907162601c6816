"""Reads that are checked together: of files whose store says only when it is asked what a file is now.

A file that has its pinned version after the last of its bytes came had it all the time. So one question for each file
is enough, however many requests a job makes, if nothing is returned before it is answered.
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
    """The files that a job has read and not asked about yet."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, str], _Verifying] = {}

    def add(self, store: _Verifying, path: str) -> None:
        self._files[id(store), path] = store

    def verify(self) -> None:
        """Ask. Raises ChangedFileError, MissingFileError."""
        for (_, path), store in self._files.items():
            store.verify(path)
        self._files = {}

    @contextmanager
    def joined(self) -> Iterator[None]:
        """What this thread reads belongs to the batch."""
        before = getattr(_own, "batch", None)
        _own.batch = self
        try:
            yield
        finally:
            _own.batch = before


@contextmanager
def checked(apart: bool = False) -> Iterator[Batch]:
    """Check what was read within when it ends, once for each file; where the thread is in such a context already, when
    that one ends. ``apart``: in any case when this one ends, for what is kept and used again.

    Raises ChangedFileError also in place of another error: what did not fit was another file's.
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
    """Check the file when the batch of this thread ends; now if there is none."""
    batch: Batch | None = getattr(_own, "batch", None)
    if batch is None:
        store.verify(path)
    else:
        batch.add(store, path)
