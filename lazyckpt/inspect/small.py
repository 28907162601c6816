"""Digests of small tensors that lie in one file, as columns of numbers: no object is made for a tensor.

Their bytes are read window by window. Of very many, processes of a program without imports (`child`) hash a part each,
because the threads of one process hash only one small tensor at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.columns import ExtentSpecs
from ..core.merkle import SIZE, Form, hash_of
from ..core.names import Same
from ..errors import LazyckptError
from ..io.children import can_start
from ..io.storage.access import OneFile
from ..io.storage.base import Store
from ..io.storage.local import LocalStore
from ..io.system import POSIX
from ..io.tensors import as_bytes
from ..jobs.pieces import scratch
from ..namespace import Namespace

SMALL = 64 << 10  # tensors of up to this many bytes are read together
MANY = 16_384  # small tensors of a file from which on processes of their own hash them
_WINDOW = 4 << 20  # bytes that are read at a time, and of the tensors of a task
_ROWS = 8_192  # most tensors of a task
_GAP = 64 << 10  # bytes; smaller gaps between tensors are read along
_PROCESSES = 16  # most of them
_CHILD = Path(__file__).with_name("child.py")

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Columns:
    """The tensors of a state that lie in one file, each in one piece, as columns in the order of the view.

    ``rows`` maps names to numbers; ``marks`` has the number of the kind of each tensor.
    """

    store: Store
    path: str
    rows: dict[str, int]
    offsets: Ints
    marks: Ints
    kinds: list[Form]

    @property
    def sizes(self) -> Ints:
        """The size of each tensor in bytes."""
        of_kind = np.array([kind.nbytes for kind in self.kinds], np.int64)
        found: Ints = of_kind[self.marks] if len(self.kinds) else np.empty(0, np.int64)
        return found


def columns_of(part: Namespace[Any]) -> Columns | None:
    """Return the tensors of a view as columns; None if they do not lie in one file, or if names are tied or chosen."""
    specs = part.specs
    if not isinstance(specs, ExtentSpecs) or not isinstance(part.full_names, Same):
        return None
    first = next(iter(specs.table), None)
    tensor = None if first is None else part.exact(first)
    if tensor is None:
        return None
    extents, rows = specs.extents, specs.table
    where = np.fromiter(rows.values(), np.int64, len(rows))
    if not np.array_equal(where, np.arange(len(where))):
        rows = dict(zip(rows, range(len(rows)), strict=True))
    kinds = [Form(dtype.name, shape, _size(shape, dtype.itemsize)) for shape, dtype in extents.kinds]
    offsets, numbers = (np.array(column, np.int64)[where] for column in (extents.offsets, extents.numbers))
    return Columns(tensor.store, extents.path, rows, offsets, numbers, kinds)


def _size(shape: Sequence[int], itemsize: int) -> int:
    for n in shape:
        itemsize *= n
    return itemsize


class Rows(NamedTuple):
    """Small tensors of a file, in the order of their offsets, as columns. ``heads`` are hashed before the contents."""

    offsets: Ints
    sizes: Ints
    marks: Ints
    heads: list[bytes]

    def part(self, lo: int, hi: int) -> Rows:
        """Return the tensors from number ``lo`` up to ``hi``."""
        return Rows(self.offsets[lo:hi], self.sizes[lo:hi], self.marks[lo:hi], self.heads)

    def cuts(self) -> Iterator[tuple[int, int]]:
        """Yield the tensors of each task: (first, behind the last)."""
        ends = np.cumsum(self.sizes)
        lo, count = 0, len(self.offsets)
        while lo < count:
            before = int(ends[lo - 1]) if lo else 0
            hi = int(np.searchsorted(ends, before + _WINDOW, "right"))
            hi = min(max(hi, lo + 1), lo + _ROWS)
            yield lo, hi
            lo = hi


class Hashed(NamedTuple):
    """The hashes of the tensors from number ``first`` on; of those that cannot be read zeros, and an error."""

    first: int
    hashes: bytes
    errors: dict[int, str]


def hash_rows(file: OneFile, first: int, rows: Rows, algorithm: str) -> Hashed:
    """Hash tensors of at most `SMALL` bytes. The result is theirs from number ``first`` on."""
    new = hash_of(algorithm)
    begun = [new(head) for head in rows.heads]
    offsets, sizes, marks = (column.tolist() for column in rows[:3])
    found: list[bytes] = []
    errors: dict[int, str] = {}
    n = 0
    while n < len(offsets):
        low = high = offsets[n]
        last = n
        while last < len(offsets) and offsets[last] - high <= _GAP and offsets[last] + sizes[last] - low <= _WINDOW:
            high = max(high, offsets[last] + sizes[last])
            last += 1
        memory = as_bytes(scratch(_WINDOW))
        try:
            file.store.read_into(file.path, low, memory[: high - low])
            whole = True
        except (LazyckptError, OSError):  # perhaps only one of them cannot be read
            whole = False
        for m in range(n, last):
            data = memory[offsets[m] - low : offsets[m] - low + sizes[m]]
            try:
                if not whole:
                    file.store.read_into(file.path, offsets[m], data)
            except (LazyckptError, OSError) as e:
                errors[first + m] = " ".join(str(e).split())
                found.append(bytes(SIZE))
                continue
            one = begun[marks[m]].copy()
            one.update(data)
            found.append(one.digest())
        n = last
    return Hashed(first, b"".join(found), errors)


# -- by processes


def by_processes(store: Store, path: str, rows: Rows) -> bytes | None:
    """Return the SHA-256 of very many small tensors, computed by a process for each core.

    None if that is not possible or does not pay: the file is not local or has changed, there is one core, or this
    program is not run by a Python interpreter that can be started again.
    """
    count = min(_cores(), _PROCESSES)
    if len(rows.offsets) < MANY or count < 2 or not _can_start() or not isinstance(store, LocalStore) or store.guards:
        return None
    try:
        before = store.stat(path)
        fd = os.open(os.path.join(store.root, path), os.O_RDONLY)
    except OSError:
        return None
    try:
        ends = np.cumsum(rows.sizes + 512)  # a hash costs as much as these bytes, whatever its size
        at = np.searchsorted(ends, ends[-1] * np.arange(count + 1) // count).tolist()
        at[-1] = len(rows.offsets)
        with ThreadPoolExecutor(count) as threads:
            parts = [rows.part(lo, hi) for lo, hi in pairwise(at)]
            found = list(threads.map(lambda part: _child(fd, part), parts))
        same = os.path.samestat(os.fstat(fd), os.stat(os.path.join(store.root, path)))
        if not same or store.stat(path) != before or before != store.pins.get(path, before):
            return None  # reading it in this process says what has changed
    except (LazyckptError, OSError):
        return None
    finally:
        os.close(fd)
    whole = b"".join(found)
    return whole if len(whole) == SIZE * len(rows.offsets) else None


def _child(fd: int, rows: Rows) -> bytes:
    about = {"fd": fd, "count": len(rows.offsets), "heads": [head.hex() for head in rows.heads]}
    columns = rows.offsets.astype(np.int64), rows.sizes.astype(np.int32), rows.marks.astype(np.int32)
    text = b"".join([json.dumps(about).encode(), b"\n", *(column.tobytes() for column in columns)])
    command = [sys.executable, "-I", "-S", str(_CHILD)]
    done = subprocess.run(command, input=text, capture_output=True, pass_fds=(fd,), check=False)
    return done.stdout if done.returncode == 0 else b""


def _can_start() -> bool:
    return POSIX and hasattr(os, "preadv") and can_start(_CHILD)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
