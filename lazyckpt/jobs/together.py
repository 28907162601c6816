"""Joined reads: what several tensors behind a network need, with few requests."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import numpy as np

from ..errors import LazyckptError
from ..io.reading.gather import Run
from ..io.storage.base import Store
from ..lazy import LazyArray

_MOST = 32 << 20  # bytes that are read before several tensors need them


@contextmanager
def read_together(tensors: Iterable[LazyArray]) -> Iterator[None]:
    """Read what several tensors behind a network need with joined requests, and keep the bytes for the reads of this
    thread within the context. Other tensors, and those that are no runs of bytes, are read as without it."""
    found: dict[Store, dict[str, list[Run]]] = {}
    count = size = 0
    for t in tensors:
        if not (isinstance(t, LazyArray) and isinstance(t.store, Store) and t.store.joins and t.nbytes <= _MOST):
            continue
        with suppress(LazyckptError):  # what reads it reports it
            for one in t._runs() or ():
                found.setdefault(t.store, {}).setdefault(one.path, []).append(one)
                count, size = count + 1, size + one.nbytes
    with ExitStack() as until:
        for store, files in found.items() if count > 1 and size <= _MOST else ():
            runs_of = {path: sorted({(one.offset, one.nbytes) for one in own}) for path, own in files.items()}
            columns = {path: np.array(own, np.int64).T for path, own in runs_of.items()}
            until.enter_context(store.holding({path: (own[0], own[1]) for path, own in columns.items()}))
        yield
