"""How many requests and bytes a read will take, from what is known before it.

What is looked up first (the ends of an archive, the table of a shard) is counted, and so are the headers that are
compared. Where elements are in an archive that was not looked up yet is guessed: at its begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ...core.box import Selection
from ...core.copies import Copy
from ...core.extents import Archive, Chunk, Extent, Inline, Packed
from ...core.plan import plan
from ...core.requests import Ints
from ...core.specs import TensorSpec
from ..storage.listed import ABSENT
from ..storage.remote import Remote
from .fetching import layout_of
from .packed import ends_of, located

_TABLE = 16  # bytes of an entry of a shard's table


class Forecast(NamedTuple):
    """What a read will take."""

    requests: int
    nbytes: int


def planned_unread(store: Remote, spec: TensorSpec, want: Selection) -> Sequence[Copy]:
    """Plan a selection without reading: archives that are not located yet are at unknown positions. Raises what
    `core.plan.plan` raises."""

    def find(archive: Packed) -> Extent:
        return located(store, archive, spec.name) or archive.as_told

    return plan(spec, want, find)


def forecast(store: Remote, copies: Iterable[Copy]) -> Forecast:
    """Return what reading the copies of a plan takes. Compressed chunks are read as wholes; one whose size is not
    known yet counts with the bytes that it has unpacked."""
    runs: dict[str, list[tuple[Ints, Ints]]] = {}
    archives: dict[tuple[object, ...], Archive] = {}
    chunks: dict[tuple[object, ...], Chunk] = {}
    tables: set[tuple[str, int]] = set()
    looked: set[str] = set()  # files of which it is not known whether they are there
    for copy in copies:
        extent, within = copy.extent, copy.extent.within
        if isinstance(within, Inline) or (isinstance(within, Chunk) and not within.present):
            continue
        window = None
        if isinstance(within, Archive) and within.codecs:
            window = within.offset, within.length
        elif isinstance(within, Archive):
            archives[within.key] = within
        elif within is not None:
            window = _window(store, within)
            if within.window is None and (pin := store.pins.get(within.path)) in (None, ABSENT):
                looked.add(within.path)
                if pin == ABSENT:
                    continue
            if within.shards and within.window is None:
                tables.add((within.path, within.shards[0].chunks))
                chunks[within.key] = within
                continue
        if window is None:
            layout = layout_of(copy, extent.dtype.itemsize)
            size = extent.dtype.itemsize
            offsets = extent.offset + (copy.start + layout.starts) * size
            one = offsets, np.full(len(offsets), layout.reach * size, np.int64)
        else:
            one = np.array(window[:1], np.int64), np.array(window[1:], np.int64)
        runs.setdefault(extent.path, []).append(one)
    wanted = {path: (np.concatenate([o for o, _ in f]), np.concatenate([n for _, n in f])) for path, f in runs.items()}
    first = [request for _, request in store.forecast(ends_of(list(archives.values())))]
    found = [*first, *(request for _, request in store.forecast(store.with_checks(wanted)))]
    return Forecast(
        len(found) + len(looked) + len(tables) + len(chunks),
        sum(request.stop - request.start for request in found)
        + sum(_TABLE * count for _, count in tables)
        + sum(chunk.nbytes for chunk in chunks.values()),
    )


def _window(store: Remote, chunk: Chunk) -> tuple[int, int] | None:
    """Return where a chunk is in its file (offset, length); None if its elements are read apart, or it is unknown."""
    if chunk.window is not None or chunk.shards:
        return chunk.window
    pin = store.pins.get(chunk.path)
    return (0, chunk.nbytes if pin is None else pin.size) if chunk.codecs else None
