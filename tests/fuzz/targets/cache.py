"""Entries of the index cache. Their authentication is tested elsewhere; here the parser behind it reads any bytes."""

from __future__ import annotations

import functools
from pathlib import Path

from lazyckpt import LazyckptError
from lazyckpt.formats.cache import entries
from lazyckpt.formats.cache.members import sections_of, tree_of
from lazyckpt.formats.reader import Source
from lazyckpt.formats.registry import read_index
from lazyckpt.io.limits import Budget
from lazyckpt.io.storage.local import LocalStore
from lazyckpt.io.storage.members import Member, Tree

from ..contract import Target
from .sources import golden, scratch

_ARCHIVE = 10_000  # bytes


@functools.cache
def _checkpoint() -> str:
    return str(golden("deepspeed_zero", "zero2_bf16_dp1"))


def seeds() -> list[bytes]:
    return [_seed(Path(_checkpoint())), _seed(golden("orbax", "ocdbt"))]


def _seed(path: Path) -> bytes:
    store = LocalStore(str(path))
    index = read_index(Source(store, ""))
    return entries.payload({"format": index.format, "folders": []}, index, store)


def entry(data: bytes) -> None:
    """Read an entry as it is read behind its authentication, then use the index."""
    try:
        about, sections = entries.described(memoryview(data), "entry", str(scratch()))
        index = entries.index_of(about, sections, LocalStore(_checkpoint()))
    except entries.FAILURES:
        return
    for specs in index.states.values():
        for name in list(specs)[:50]:
            try:
                spec = specs[name]
                list(spec.fragments)
            except LazyckptError as e:
                str(e)


def _tables() -> list[bytes]:
    tree = Tree("run.tar", Budget("run.tar", _ARCHIVE))
    for name in ("run/a.pt", "run/b/c.safetensors"):
        tree.add(name, Member(512, 700))
    tree.add("run/config.json", Member(2048, 90, 60, 7))
    tree.add_link("run/latest", "b")
    return [entries.packed({"format": "members of an archive"}, sections_of(tree.finish()))]


def members(data: bytes) -> None:
    """Read the table of an archive as it is read behind its authentication, then list it."""
    try:
        _, sections = entries.described(memoryview(data), "entry", str(scratch()))
        tree = tree_of(sections, "run.tar", _ARCHIVE)
    except entries.FAILURES:
        return
    for folder in list(tree.folders)[:50]:
        for name, member in tree.listed(folder):
            assert ".." not in name.split("/")
            assert member is None or 0 <= member.offset <= member.offset + (member.stored or member.size) <= _ARCHIVE


TARGETS = (
    Target("cache.entry", entry, seeds, "safetensors"),
    Target("cache.members", members, _tables, "safetensors"),
)
