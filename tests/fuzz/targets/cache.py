"""Entries of the index cache. Their authentication is tested elsewhere; here the parser behind it reads any bytes."""

from __future__ import annotations

import functools

from lazyckpt import LazyckptError
from lazyckpt.formats.cache import entries
from lazyckpt.formats.cache.opening import _FAILURES
from lazyckpt.formats.reader import Source
from lazyckpt.formats.registry import read_index
from lazyckpt.io.storage.local import LocalStore

from ..contract import Target
from .sources import golden, scratch


@functools.cache
def _checkpoint() -> str:
    return str(golden("deepspeed_zero", "zero2_bf16_dp1"))


def seeds() -> list[bytes]:
    store = LocalStore(_checkpoint())
    index = read_index(Source(store, ""))
    return [entries.payload({"format": index.format, "folders": []}, index, store)]


def entry(data: bytes) -> None:
    """Read an entry as it is read behind its authentication, then use the index."""
    try:
        about, sections = entries.described(memoryview(data), "entry", str(scratch()))
        index = entries.index_of(about, sections, LocalStore(_checkpoint()))
    except _FAILURES:
        return
    for specs in index.states.values():
        for name in list(specs)[:50]:
            try:
                spec = specs[name]
                list(spec.fragments)
            except LazyckptError as e:
                str(e)


TARGETS = (Target("cache.entry", entry, seeds, "safetensors"),)
