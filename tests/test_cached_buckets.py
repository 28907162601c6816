"""Checkpoints at URLs with the caches on the disk: requests, bytes, and versions."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.errors import ChangedFileError
from lazyckpt.formats import opening
from lazyckpt.io.storage import segments
from lazyckpt.io.storage.object import ObjectStore

from .index_caches import forget
from .same_views import check_same
from .servers.fixtures import Cloud
from .servers.server import Handle
from .writers import Case

ROWS = torch.arange(3_000_000, dtype=torch.int32).reshape(3000, 1000)


@pytest.fixture(autouse=True)
def _environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index in memory, and a cache folder of the test. LAZYCKPT_CACHE=0, as in all tests."""
    monkeypatch.setattr(opening, "_indexes", {})
    monkeypatch.setenv("LAZYCKPT_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    return str(tmp_path / "bytes")


@pytest.fixture
def model(cloud: Cloud) -> str:
    """A checkpoint of one file in a bucket of each kind."""
    return cloud.put("run/model.safetensors", save({"rows": ROWS, "b": torch.arange(9)}))


def asked(server: Handle) -> dict[str, int]:
    """Count the requests: listings, states, bytes."""
    found = {"list": 0, "head": 0, "get": 0}
    for one in server.log():
        listing = (
            "list-type=" in one.target or "comp=list" in one.target or "/o?" in one.target or "prefix=" in one.target
        )
        found["head" if one.method == "HEAD" else "list" if listing else "get"] += 1
    server.reset()
    return found


def again(url: str, cloud: Cloud, cache: Any) -> lazyckpt.CheckpointView:
    """Open as another process does, which has no index in memory."""
    forget()
    cloud.server.reset()
    return lazyckpt.open(url, cache=cache, storage_options=cloud.options)


# -- bytes


def test_a_second_process_asks_only_whether_the_objects_are_the_same(model: str, cloud: Cloud, blocks: str) -> None:
    first = again(model, cloud, blocks)
    assert torch.equal(first["rows"][:], ROWS)
    assert torch.equal(first["b"][:], torch.arange(9))
    second = again(model, cloud, blocks)
    assert torch.equal(second["rows"][:], ROWS)
    assert torch.equal(second["b"][:], torch.arange(9))
    assert second.io.cache_hits >= 2 and second.io.bytes == 0
    assert asked(cloud.server)["get"] <= (1 if cloud.kind == "http" else 0)  # over http, whether it is a page


def test_an_empty_cache_fetches_no_byte_more(model: str, cloud: Cloud, blocks: str) -> None:
    def read(cache: Any) -> tuple[int, int]:
        view = again(model, cloud, cache)
        begin = view.io.requests, view.io.bytes
        for row in (505, 506, 900, 2999):  # far from what opening has read
            assert torch.equal(view["rows"][row], ROWS[row])
        assert torch.equal(view["rows"][100:200, 3], ROWS[100:200, 3])
        return view.io.requests - begin[0], view.io.bytes - begin[1]

    without = read(False)
    assert read(blocks) == without
    assert read(blocks) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_random_reads_are_right_whatever_is_cached(model: str, cloud: Cloud, blocks: str, seed: int) -> None:
    rng = random.Random(seed)
    view = again(model, cloud, blocks)
    for n in range(30):
        lo = rng.randrange(3000)
        hi = min(3000, lo + int(2 ** rng.uniform(0, 8)))
        key = rng.choice(
            [(slice(lo, hi),), (slice(lo, hi), rng.randrange(1000)), (slice(lo, hi, 7), slice(10, 500)), (lo,)]
        )
        assert torch.equal(view["rows"][key], ROWS[key])
        before = view.io.requests
        if rng.random() < 0.3:
            view["rows"][key]
            assert view.io.requests == before
        if n % 10 == 9:
            view = again(model, cloud, blocks)


def test_a_replaced_object_is_never_mixed_with_the_cached_one(model: str, cloud: Cloud, blocks: str) -> None:
    old = again(model, cloud, blocks)
    assert torch.equal(old["rows"][:100], ROWS[:100])
    cloud.put("run/model.safetensors", save({"rows": -ROWS, "b": torch.arange(9)}))
    assert torch.equal(old["rows"][:100], ROWS[:100])  # the bytes of the version that was opened
    with pytest.raises(ChangedFileError):
        old["rows"][50:1000]
    new = again(model, cloud, blocks)
    assert torch.equal(new["rows"][:], -ROWS)
    assert torch.equal(again(model, cloud, blocks)["rows"][:], -ROWS)


def test_the_environment_turns_it_on_and_false_off(
    model: str, cloud: Cloud, blocks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE", f"{blocks}:1GiB")
    again(model, cloud, False)["rows"][:10]
    assert not os.path.exists(blocks)
    again(model, cloud, True)["rows"][:10]
    assert os.listdir(blocks) == ["blocks"]
    view = again(model, cloud, True)
    assert torch.equal(view["rows"][:10], ROWS[:10])
    assert view.io.bytes == 0


def test_pickled_tensors_keep_the_cache(s3: Cloud, blocks: str, recwarn: pytest.WarningsRecorder) -> None:
    url = s3.put("run/model.safetensors", save({"rows": ROWS}))
    tensor = again(url, s3, blocks)["rows"]
    tensor[:100]
    copy = pickle.loads(pickle.dumps(tensor))
    s3.server.reset()
    assert torch.equal(copy[:100], ROWS[:100])
    assert s3.server.counts().requests == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_what_is_cached_is_read_after_a_fork(s3: Cloud, blocks: str) -> None:
    url = s3.put("run/model.safetensors", save({"rows": ROWS}))
    view = again(url, s3, blocks)
    view["rows"][:100]
    child = os.fork()
    if not child:
        os._exit(0 if torch.equal(view["rows"][:100], ROWS[:100]) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_damaged_blocks_are_fetched_again(s3: Cloud, blocks: str) -> None:
    url = s3.put("run/model.safetensors", save({"rows": ROWS}))
    again(url, s3, blocks)["rows"][:]
    for file in Path(blocks, "blocks").iterdir():
        with file.open("r+b") as opened:
            opened.seek(segments._DATA + (3 << 20))
            opened.write(bytes(100))
    view = again(url, s3, blocks)
    assert torch.equal(view["rows"][:], ROWS)
    assert 0 < view.io.bytes <= 2 << 20
    assert torch.equal(again(url, s3, blocks)["rows"][:], ROWS)


@pytest.mark.parametrize("pieces", [False, True])
def test_cached_bytes_and_an_answer_of_another_version_are_not_mixed(s3: Cloud, blocks: str, pieces: bool) -> None:
    """Also while a checkpoint is opened: its files are not pinned yet, and were listed a moment ago."""
    s3.put("run/x", b"old" * 40_000)

    def opened() -> ObjectStore:
        store = ObjectStore(s3.at("run"), s3.options)
        store.cache = opening.configured(blocks)
        store.expect("", store.list())
        return store

    opened().read("x", 0, 50_000)
    store = opened()
    s3.put("run/x", b"new" * 40_000)
    with pytest.raises(ChangedFileError):
        if pieces:
            store.read_pieces("x", [(0, memoryview(bytearray(10_000))), (20_000, memoryview(bytearray(100_000)))])
        else:
            store.read("x", 0, 120_000)
    assert bytes(opened().read("x", 0, 120_000)) == b"new" * 40_000


# -- indexes


def test_a_second_open_lists_each_folder_and_reads_nothing(
    s3: Cloud, zero_cases: Mapping[str, Case], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE", "1")
    case = zero_cases["zero3_sub_groups"]
    url = s3.put_folder(case.path, "ckpt")
    first = again(url, s3, True)
    assert asked(s3.server)["get"] > 0
    second = again(url, s3, True)
    listed = [one.target for one in s3.server.log() if "list-type=" in one.target]
    assert len(listed) == len(set(listed))
    assert asked(s3.server) == {"list": len(listed), "head": 0, "get": 0}
    check_same(second, again(url, s3, False))
    assert list(first) == list(second)


@pytest.mark.parametrize("cached", ["index", "blocks"])
def test_a_changed_object_is_read_anew(s3: Cloud, blocks: str, cached: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE", "1" if cached == "index" else "0")
    cache = True if cached == "index" else blocks
    url = s3.put("run/model.safetensors", save({"a": torch.zeros(4)})).rpartition("/")[0]
    assert list(again(url, s3, cache)) == list(again(url, s3, cache)) == ["a"]
    assert asked(s3.server)["get"] == 0
    s3.put("run/model.safetensors", save({"b": torch.ones(4)}))
    view = again(url, s3, cache)
    assert list(view) == ["b"] and torch.equal(view["b"][:], torch.ones(4))


# -- listings are never older than the call


class ListingsCached(MemoryFileSystem):
    """A file system that lists from memory, as s3fs does."""

    protocol = "listed"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace("listed://", "memory://")))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)
        if path not in self.dircache:
            self.dircache[path] = super().ls(path, detail=True)
        found = self.dircache[path]
        return found if detail else [entry["name"] for entry in found]

    def invalidate_cache(self, path: str | None = None) -> None:
        self.dircache.clear()


@pytest.fixture
def listed() -> Iterator[tuple[str, Any]]:
    fsspec.register_implementation("listed", ListingsCached, clobber=True)
    fs = fsspec.filesystem("listed")
    yield "listed://bucket", fs.pipe_file
    fs.rm("/bucket", recursive=True)


@pytest.fixture
def bucket(s3: Cloud) -> tuple[str, Any]:
    return s3.at("bucket"), lambda path, data: s3.put(path.removeprefix("/"), data)


@pytest.mark.parametrize("where", ["listed", "bucket"])
@pytest.mark.parametrize("cache", [True, False])
def test_a_new_open_sees_new_files(where: str, cache: bool, request: pytest.FixtureRequest) -> None:
    url, put = request.getfixturevalue(where)
    options = request.getfixturevalue("s3").options if where == "bucket" else None

    def names() -> list[str]:
        return sorted(lazyckpt.open(f"{url}/run", cache=cache, storage_options=options))

    put("/bucket/run/checkpoint-1/model.safetensors", save({"a": torch.zeros(4)}))
    put("/bucket/run/checkpoint-1/trainer_state.json", b'{"global_step": 1}')
    assert names() == ["a"]
    put("/bucket/run/checkpoint-2/model.safetensors", save({"b": torch.zeros(4)}))
    put("/bucket/run/checkpoint-2/trainer_state.json", b'{"global_step": 2}')
    assert names() == ["b"]
    put("/bucket/run/checkpoint-2/model.safetensors", save({"c": torch.zeros(400)}))
    assert names() == ["c"]
    run = lazyckpt.open_run(f"{url}/run", storage_options=options)
    assert 3 not in run.steps
    put("/bucket/run/checkpoint-3/model.safetensors", save({"c": torch.zeros(4)}))
    put("/bucket/run/checkpoint-3/trainer_state.json", b'{"global_step": 3}')
    assert 3 in lazyckpt.open_run(f"{url}/run", storage_options=options).steps


def test_stores_share_what_they_know(s3: Cloud, blocks: str) -> None:
    """A store of a subfolder, and one with pins, have the cache of the store that they come from."""
    s3.put("run/a/x", b"0123456789")
    store = ObjectStore(s3.at("run"), s3.options)
    cache = opening.configured(blocks)
    store.cache = cache
    below = store.below("a")
    below.expect("", below.list())
    assert bytes(below.read("x", 2, 3)) == b"234"
    pinned = below.pinned({"x": below.stat("x")})
    assert pinned.cache is cache
    s3.server.reset()
    assert bytes(pinned.read("x", 2, 3)) == b"234"
    assert s3.server.counts().requests == 0
    assert bytes(pinned.read("x", 0, 10)) == b"0123456789"


# -- `lazyckpt cache`


def told(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["cache", *arguments])
    assert done.exit_code == 0, done.output
    return done.output


def test_the_command_shows_and_clears_both(s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAZYCKPT_CACHE", "disk")
    monkeypatch.setenv("COLUMNS", "200")
    assert "0 entries" in told("ls")
    assert json.loads(told("ls", "--json")) == []
    for name in ("one", "two"):
        url = s3.put(f"{name}/model.safetensors", save({"rows": ROWS}))
        again(url.rpartition("/")[0], s3, True)["rows"][:]
    rows = json.loads(told("ls", "--json"))
    assert [row["kind"] for row in rows] == ["index", "index", "bytes", "bytes"]
    assert {row["url"] for row in rows[2:]} == {f"{s3.url}/{name}/model.safetensors" for name in ("one", "two")}
    assert all(row["nbytes"] >= ROWS.nbytes and row["files"] == 1 and row["version"] for row in rows[2:])
    assert f"{s3.url}/two/model.safetensors" in told("ls") and "bytes of 2 objects" in told("ls")
    assert json.loads(told("clear", f"{s3.url}/one/", "--json")) == {"removed": 1, "files": 1}
    assert json.loads(told("clear", "--limit", "1GiB", "--json")) == {"removed": 0, "files": 0}
    assert json.loads(told("clear", "--limit", "1MiB", "--json")) == {"removed": 0, "files": 1}
    again(f"{s3.url}/two", s3, True)["rows"][:5]
    assert "removed 1 entry and 1 file" in told("clear")
    assert json.loads(told("ls", "--json")) == []
