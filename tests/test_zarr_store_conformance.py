"""A view as a zarr store, held against zarr's own: its conformance suite, and a store of zarr's with the same content.

The suite (`zarr.testing.store.StoreTests`) writes most of what it reads, which a view does not take. Its tests that
write nothing run here as they are; what the others ask of reading is compared with zarr's `MemoryStore`.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt

pytest.importorskip("zarr.testing.store")
from zarr.abc.store import OffsetByteRequest, RangeByteRequest, SuffixByteRequest
from zarr.core.buffer import default_buffer_prototype
from zarr.core.buffer.cpu import Buffer
from zarr.storage import MemoryStore
from zarr.testing.store import StoreTests

from lazyckpt.interop.zarr_store import ViewStore

OF_BUFFERS = default_buffer_prototype()


class Opened(ViewStore):
    """With the option that the suite passes to every store."""

    def __init__(self, view: Any, read_only: bool = True) -> None:
        assert read_only
        super().__init__(view)


class Suite(StoreTests[Any, Any]):
    store_cls = Opened
    buffer_cls = Buffer


WITHOUT_WRITING: dict[str, dict[str, Any]] = {
    "test_store_type": {},
    "test_store_eq": {},
    "test_store_supports_partial_writes": {},
    "test_store_open_read_only": {"read_only": True},
    "test_store_context_manager": {},
    "test_read_only_store_raises": {},
    "test_getsize_raises": {},
}


@pytest.fixture
def view(tmp_path: Path) -> lazyckpt.CheckpointView:
    model = {
        "a.w": torch.arange(2_000_000.0).view(1000, 2000),  # several chunks
        "a.b": torch.arange(7, dtype=torch.int16),
        "a.b.deep": torch.ones(2, 3, dtype=torch.bfloat16),
        "scalar": torch.tensor(3),
        "none": torch.empty(0, 4),
        "odd/name %": torch.ones(2),
    }
    optimizer = {"state": {0: {"exp_avg": torch.ones(1000, 2000)}}, "param_groups": [{"params": [0]}]}
    torch.save({"model": model, "optimizer": optimizer}, tmp_path / "m.pt")
    return lazyckpt.open(tmp_path / "m.pt", cache=False)


def collected(keys: AsyncIterator[str]) -> list[str]:
    async def collect() -> list[str]:
        return [key async for key in keys]

    return asyncio.run(collect())


def answer(question: Coroutine[Any, Any, Any]) -> Any:
    """What a store answers, or the kind of its error."""
    try:
        found = asyncio.run(question)
    except Exception as e:
        return type(e)
    return found.to_bytes() if isinstance(found, Buffer) else found


@pytest.fixture
def both(view: lazyckpt.CheckpointView) -> tuple[ViewStore, MemoryStore]:
    ours, theirs = ViewStore(view), MemoryStore()
    for key in collected(ours.list()):
        value = asyncio.run(ours.get(key, OF_BUFFERS))
        assert value is not None
        asyncio.run(theirs.set(key, Buffer.from_bytes(value.to_bytes())))
    return ours, theirs


@pytest.mark.parametrize("name", WITHOUT_WRITING)
def test_the_suite_of_zarr(view: lazyckpt.CheckpointView, name: str) -> None:
    options = WITHOUT_WRITING[name]
    suite: Any = Suite
    test = getattr(suite(), name)
    there = {"store_kwargs": {"view": view}, "open_kwargs": {"view": view}, "store": Opened(view)}
    done = test(**options, **{key: there[key] for key in inspect.signature(test).parameters if key in there})
    if inspect.iscoroutine(done):
        asyncio.run(done)


def folders_of(keys: list[str]) -> set[str]:
    return {key.rsplit("/", n)[0] for key in keys for n in range(key.count("/") + 1)}


def test_lists_as_a_store_of_zarr(both: tuple[ViewStore, MemoryStore]) -> None:
    ours, theirs = both
    keys = collected(ours.list())
    assert sorted(keys) == sorted(collected(theirs.list())) and len(keys) > 20
    starts = {key[:n] for key in keys for n in range(len(key) + 1)}
    for start in (*starts, "x", "weights//", "/", "/weights"):
        found = sorted(collected(ours.list_prefix(start)))
        assert found == sorted(collected(theirs.list_prefix(start))) == sorted(k for k in keys if k.startswith(start))
    for folder in ("", *folders_of(keys), "x", "weights/x", "weight"):
        for path in {folder, f"{folder}/" if folder else ""}:
            assert sorted(collected(ours.list_dir(path))) == sorted(collected(theirs.list_dir(path))), path
            assert asyncio.run(ours.is_empty(path)) == asyncio.run(theirs.is_empty(path)), path
            assert asyncio.run(ours.getsize_prefix(path)) == asyncio.run(theirs.getsize_prefix(path)), path


def test_reads_as_a_store_of_zarr(both: tuple[ViewStore, MemoryStore]) -> None:
    ours, theirs = both
    keys = collected(ours.list())
    missing = ["", "/", "foo", "c/0", "weights", "weights/", "weights/c/0", "weights/scalar/c/0", "weights/a/w/c/0"]
    missing += [f"/{key}" for key in keys] + [f"{key}/" for key in keys] + [f"{key}/0" for key in keys]
    missing += [f"weights/a/b/%/c/{'9' * 5000}", "weights/a/b/%/c/01", "weights/a/b/%/c/-0"]
    missing += [key.replace("/", "//", 1) for key in keys if "/" in key]
    ranges: list[Any] = [None, RangeByteRequest(0, 2), RangeByteRequest(1, 1 << 40), RangeByteRequest(5, 5)]
    ranges += [OffsetByteRequest(0), OffsetByteRequest(3), OffsetByteRequest(1 << 40), SuffixByteRequest(1)]
    ranges += [SuffixByteRequest(1 << 40)]
    for key in (*keys, *missing):
        for about in ("exists", "getsize"):
            assert answer(getattr(ours, about)(key)) == answer(getattr(theirs, about)(key)), (about, key[:99])
        for wanted in ranges:
            assert answer(ours.get(key, OF_BUFFERS, wanted)) == answer(theirs.get(key, OF_BUFFERS, wanted)), (
                key[:99],
                wanted,
            )
    asked = [(key, wanted) for key in (*keys[::3], *missing[:5]) for wanted in ranges[:4]]
    got, expected = (asyncio.run(store.get_partial_values(OF_BUFFERS, asked)) for store in both)
    assert [b and b.to_bytes() for b in got] == [b and b.to_bytes() for b in expected]


@pytest.mark.parametrize("wrong", [(0, 2), 3, slice(0, 2), "0-2"])
def test_invalid_range_raises(both: tuple[ViewStore, MemoryStore], wrong: Any) -> None:
    for store in both:
        for key in ("zarr.json", "weights/scalar/c"):
            with pytest.raises((ValueError, TypeError), match=r"Unexpected byte_range, got.*"):
                asyncio.run(store.get(key, OF_BUFFERS, wrong))
