"""Remote reads that meet each other, or an object that changes, at an inconvenient moment."""

from __future__ import annotations

import gzip
import sys
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.io import pool
from lazyckpt.io.reading import packed
from lazyckpt.io.storage import repeating
from lazyckpt.io.storage.fsspec import FsspecStore

fsspec = pytest.importorskip("fsspec")
VALUES = torch.arange(200 * 64, dtype=torch.int32).reshape(200, 64)


@pytest.fixture
def folder() -> Iterator[str]:
    """An empty folder of fsspec's file system in memory."""
    name = f"/{uuid.uuid4().hex}"
    yield name
    fsspec.filesystem("memory").rm(name, recursive=True)


def put_zarr(tmp_path: Path, folder: str, **options: Any) -> dict[str, bytes]:
    save_file({"w": VALUES}, tmp_path / "a.safetensors")
    lazyckpt.open(tmp_path / "a.safetensors").to_zarr(tmp_path / "z", codec="gzip", **options)
    files = [path for path in (tmp_path / "z").rglob("*") if path.is_file()]
    content = {f"{folder}/{path.relative_to(tmp_path / 'z').as_posix()}": path.read_bytes() for path in files}
    fsspec.filesystem("memory").pipe(content)
    return content


def test_a_chunk_that_is_replaced_while_it_is_read(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No listing pins the files of chunks, and fsspec's answers tell no state: it is compared with the first one."""
    content = put_zarr(tmp_path, folder)
    name = next(name for name in content if "/c/" in name)
    old = gzip.decompress(content[name])
    fsspec.filesystem("memory").pipe_file(name, gzip.compress(old, 0))  # stored: of one size, whatever the bytes are
    replacement = gzip.compress(bytes([old[0] ^ 255]) + old[1:], 0)
    t = lazyckpt.open(f"memory://{folder}", cache=False)["w"]
    real = FsspecStore._open

    def replace_first(store: FsspecStore, path: str, start: int, stop: int) -> Any:
        if "/c/" in path:
            fsspec.filesystem("memory").pipe_file(name, replacement)
        return real(store, path, start, stop)

    monkeypatch.setattr(FsspecStore, "_open", replace_first)
    for _ in range(3):  # what was unpacked from the new file is not cached either
        with pytest.raises(lazyckpt.ChangedFileError):
            t[:1]
    with pytest.raises(lazyckpt.ChangedFileError):
        t[...]


def test_threads_that_need_the_table_that_another_one_reads(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table of several requests is read while all threads of the pool wait for it."""
    put_zarr(tmp_path, folder, chunk=256, shard=True)
    t = lazyckpt.open(f"memory://{folder}", cache=False, storage_options={"requests": {"smallest": 100}})["w"]
    reads, waits = threading.Event(), threading.Semaphore(0)
    real_table, real_get = packed._table, packed.Tables.get
    found: dict[str, torch.Tensor] = {}

    def table_when_others_wait(*args: Any) -> Any:
        reads.set()
        for _ in range(64):
            assert waits.acquire(timeout=30)
        return real_table(*args)

    def get(*args: Any) -> Any:
        if reads.is_set():
            waits.release()
        return real_get(*args)

    monkeypatch.setattr(packed, "_table", table_when_others_wait)
    monkeypatch.setattr(packed.Tables, "get", get)
    one = threading.Thread(target=lambda: found.update(one=t[0]), daemon=True)
    every = threading.Thread(target=lambda: found.update(every=t[...]), daemon=True)
    one.start()
    assert reads.wait(30)
    every.start()
    for thread in (one, every):
        thread.join(60)
        assert not thread.is_alive(), "it waits for ever"
    assert torch.equal(found["one"], VALUES[0])
    assert torch.equal(found["every"], VALUES)


def test_an_interrupt_while_a_request_is_handed_to_a_thread() -> None:
    """Python's own semaphore stays locked if Ctrl-C comes just after it is locked: then no thread ever goes on."""
    ready = threading.Barrier(9)
    first = [pool._look_threads().submit(ready.wait) for _ in range(8)]
    ready.wait(30)
    for future in first:
        future.result(30)

    def interrupt(frame: Any, event: str, arg: Any) -> Any:
        if event == "return" and frame.f_code is threading.Condition.__enter__.__code__:
            raise KeyboardInterrupt
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        last = pool._look_threads().submit(int)
    finally:
        sys.settrace(before)
    assert last.result(30) == 0
    done: list[int] = []
    pool.each(done.append, range(100), 64)
    assert sorted(done) == [*range(100)]


def test_a_busy_server_of_fsspec_says_when_to_ask_again(
    tmp_path: Path, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exceptions of HTTP libraries have the answer, or are like one."""
    put_zarr(tmp_path, folder)
    view = lazyckpt.open(f"memory://{folder}", cache=False)
    waits: list[float] = []
    failures = [
        type("ClientResponseError", (Exception,), {"status": 503, "headers": {"Retry-After": "7"}})("busy"),
        type("HTTPError", (Exception,), {"response": SimpleNamespace(status_code=429, headers={"retry-after": "9"})})(),
    ]
    real = type(fsspec.filesystem("memory")).cat_file

    def cat_file(self: Any, path: str, **options: Any) -> Any:
        if failures and "/c/" in path:
            raise failures.pop(0)
        return real(self, path, **options)

    monkeypatch.setattr(type(fsspec.filesystem("memory")), "cat_file", cat_file)
    monkeypatch.setattr(repeating, "pause", waits.append)
    assert torch.equal(view["w"][:1], VALUES[:1])
    assert waits == [7.0, 9.0] and view.io.retries == 2
