"""Exports to object stores: the bytes, the requests, what a killed export leaves, and what readers see meanwhile."""

from __future__ import annotations

import io
import json
import multiprocessing
import signal
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli import app
from lazyckpt.errors import CorruptError, DestinationError
from lazyckpt.inspect.manifest import Digest
from lazyckpt.io.storage import uploads
from lazyckpt.io.storage.uploads import uploads_of
from lazyckpt.jobs import parts
from lazyckpt.jobs.publish import Busy
from lazyckpt.jobs.unfinished import discard, unfinished

from . import gguf_models, processes
from .servers.fixtures import Cloud, cloud_of

pytest.importorskip("boto3")
PART = 5 << 20  # the least that servers take


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights with moments: of one element, and of more bytes than a part; tied, of several dtypes."""
    torch.manual_seed(0)
    weights = {
        "embed.weight": torch.randn(1500, 1021),
        "layers.0.w": torch.randn(333, 777).to(torch.bfloat16),
        "layers.0.b": torch.randn(5),
        "layers.1.w": torch.randn(2600, 1009),
        "one": torch.tensor(3.5),
        "none": torch.empty(0, 4),
    }
    state = {
        name: {"step": torch.tensor(7.0), "exp_avg": torch.randn(w.shape), "exp_avg_sq": torch.rand(w.shape)}
        for name, w in weights.items()
    }
    path = tmp_path_factory.mktemp("source") / "training.pt"
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": list(state)}]}
    torch.save({"model": weights | {"tied": weights["embed.weight"]}, "optimizer": optimizer, "epoch": 3}, path)
    return path


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART", PART)


Write = Callable[[Any, Any, dict[str, Any]], Any]
WRITERS: dict[str, tuple[str, Write]] = {
    "safetensors": ("model.safetensors", lambda v, d, o: v.to_safetensors(d, **o)),
    "safetensors shards": ("st", lambda v, d, o: v.to_safetensors(d, max_shard_size="8MB", **o)),
    "torch": ("model.pt", lambda v, d, o: v.to_torch(d, **o)),
    "torch shards": ("pt", lambda v, d, o: v.to_torch(d, max_shard_size="8MB", **o)),
    "dcp": ("dcp", lambda v, d, o: v.to_dcp(d, **o)),
    "universal": ("universal", lambda v, d, o: v.to_universal(d, **o)),
    "gguf": ("x.gguf", lambda v, d, o: gguf_models.to_gguf(v, d, dtype="f32", **o)),
    "zarr": ("x.zarr", lambda v, d, o: v.to_zarr(d, chunk="1MB", **o)),
    "zarr shards": ("y.zarr", lambda v, d, o: v.to_zarr(d, chunk="500KB", shard="6MB", pack=True, codec="zstd", **o)),
}
ONLY_PARTS = [name for name in WRITERS if "zarr" not in name]
WRITERS["zarr zip"] = "x.zarr.zip", lambda v, d, o: v.to_zarr(d, chunk="1MB", codec="zstd", **o)


def written(path: Path) -> dict[str, bytes]:
    files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
    root = path.parent if path.is_file() else path
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in files}


def objects(cloud: Cloud, prefix: str) -> dict[str, bytes]:
    import obstore

    keys = [o["path"] for page in obstore.list(cloud.store) for o in page]
    inside = [k for k in keys if k.startswith(f"{prefix}/")] or [k for k in keys if k == prefix]
    names = {k: k.removeprefix(f"{prefix}/") if k != prefix else k.rpartition("/")[2] for k in inside}
    return {name: bytes(obstore.get(cloud.store, key).bytes()) for key, name in names.items()}


def sent_parts(cloud: Cloud) -> list[str]:
    return [one.target for one in cloud.server.log() if one.method == "PUT" and "partNumber" in one.target]


@pytest.mark.parametrize("name", WRITERS)
def test_objects_are_those_of_a_local_export(training: Path, tmp_path: Path, s3: Cloud, name: str) -> None:
    dest, write = WRITERS[name]
    view = lazyckpt.open(training)
    write(view, tmp_path / dest, {})
    url = s3.at(f"run/{dest}")
    result = write(view, url, {"storage_options": s3.options, "verify": True})
    keys = written(tmp_path / dest) if "shards" in name and name[0] in "st" else ("",)
    assert set(result.paths) == {f"{url}/{key}".rstrip("/") for key in keys}
    assert result.nbytes == sum(map(len, written(tmp_path / dest).values()))
    assert objects(s3, f"run/{dest}") == written(tmp_path / dest)
    assert [key for key in uploads_of(s3.url, s3.options).list() if key.endswith("-job")] == []
    with pytest.raises(DestinationError, match="exists already"):
        write(view, url, {"storage_options": s3.options})
    write(view, url, {"storage_options": s3.options, "overwrite": True})
    assert objects(s3, f"run/{dest}") == written(tmp_path / dest)


def test_megatron_and_virtual(tmp_path: Path, s3: Cloud) -> None:
    torch.manual_seed(0)
    weights = {
        "embedding.word_embeddings.weight": torch.randn(64, 32),
        "decoder.layers.0.mlp.linear_fc1.weight": torch.randn(128, 32),
        "decoder.layers.0.mlp.linear_fc2.weight": torch.randn(32, 128),
        "decoder.final_layernorm.weight": torch.randn(32),
        "output_layer.weight": torch.randn(64, 32),
    }
    torch.save(weights, tmp_path / "in.pt")
    view = lazyckpt.open(tmp_path / "in.pt")
    view.to_megatron(tmp_path / "mt", tp=2)
    view.to_megatron(s3.at("mt"), tp=2, storage_options=s3.options)
    assert objects(s3, "mt") == written(tmp_path / "mt")
    view.to_safetensors(tmp_path / "flat.safetensors")
    flat = lazyckpt.open(tmp_path / "flat.safetensors")
    flat.to_virtual(tmp_path / "refs.json")
    flat.to_virtual(s3.at("refs.json"), storage_options=s3.options)
    assert objects(s3, "refs.json") == {"refs.json": (tmp_path / "refs.json").read_bytes()}
    for package in ("kerchunk", "pandas", "pyarrow"):
        pytest.importorskip(package)
    flat.to_virtual(tmp_path / "refs")
    result = flat.to_virtual(s3.at("refs"), storage_options=s3.options)
    assert result.paths == (s3.at("refs"),)
    assert objects(s3, "refs") == written(tmp_path / "refs")
    with pytest.raises(DestinationError, match="exists already"):
        flat.to_virtual(s3.at("refs"), storage_options=s3.options)
    with pytest.raises(DestinationError, match="Icechunk"):
        flat.to_virtual(s3.at("repository"), format="icechunk", storage_options=s3.options)


def test_references_to_objects_beside_them(tmp_path: Path, s3: Cloud) -> None:
    content = torch.arange(12.0).reshape(3, 4)
    torch.save({"a": content}, tmp_path / "a.pt")
    url = s3.put("source/a.pt", (tmp_path / "a.pt").read_bytes())
    lazyckpt.open(url, storage_options=s3.options).to_virtual(s3.at("refs.json"), storage_options=s3.options)
    refs = json.loads(objects(s3, "refs.json")["refs.json"])["refs"]
    target, offset, length = refs["weights/a/c/0/0"]
    assert target == url
    assert objects(s3, "source/a.pt")["a.pt"][offset : offset + length] == content.numpy().tobytes()


def test_nothing_is_written_into_an_archive(training: Path, tmp_path: Path, s3: Cloud) -> None:
    view = lazyckpt.open(training)
    (tmp_path / "x.zip").write_bytes(b"PK")
    s3.put("x.zip", b"PK")
    for dest, options in ((tmp_path / "x.zip" / "new", {}), (s3.at("x.zip/new"), {"storage_options": s3.options})):
        with pytest.raises(DestinationError, match="only read"):
            view.to_dcp(dest, **options)
    view.to_dcp(s3.at("folder.zip/new"), storage_options=s3.options)
    assert ".metadata" in objects(s3, "folder.zip/new")


@pytest.mark.parametrize("name", ["torch", "safetensors shards", "dcp", "zarr"])
def test_other_stores(training: Path, tmp_path: Path, cloud: Cloud, name: str) -> None:
    dest, write = WRITERS[name]
    view = lazyckpt.open(training)
    write(view, tmp_path / dest, {})
    if cloud.kind == "http":
        with pytest.raises(DestinationError, match="only read"):
            write(view, cloud.at(dest), {"storage_options": cloud.options})
        return
    for options in ({}, {"verify": True, "overwrite": True}):
        write(view, cloud.at(f"a b/{dest}"), {"storage_options": cloud.options, **options})
        assert objects(cloud, f"a b/{dest}") == written(tmp_path / dest)
    found = lazyckpt.open(cloud.at(f"a b/{dest}"), storage_options=cloud.options)
    assert all(torch.equal(found[n][...], t[...]) for n, t in view.items())
    assert not [key for key in objects(cloud, "a b") if key.endswith("-job")]


@pytest.mark.parametrize("name", WRITERS)
def test_a_file_system_of_fsspec(training: Path, tmp_path: Path, name: str) -> None:
    dest, write = WRITERS[name]
    view = lazyckpt.open(training)
    write(view, tmp_path / dest, {})
    root = f"memory://remote-writing/{dest}"
    write(view, root, {"verify": True, "overwrite": True})
    fs = fsspec.filesystem("memory")
    base = f"/remote-writing/{dest}"
    files = fs.find(base)
    found = {f.removeprefix(base).lstrip("/") or dest: fs.cat_file(f) for f in files}
    assert found == written(tmp_path / dest)
    assert not [f for f in fs.find("/remote-writing") if f.endswith(("-job", ".part"))]


def test_requests_and_concurrency(tmp_path: Path, s3: Cloud) -> None:
    weights = {f"w{n}": torch.randn(2 << 20) for n in range(10)}  # 80 MiB
    torch.save(weights, tmp_path / "in.pt")
    view = lazyckpt.open(tmp_path / "in.pt")
    s3.server.set_delay(0.3)
    s3.server.reset()
    view.to_safetensors(s3.at("model.safetensors"), storage_options=s3.options)
    counts = s3.server.counts()
    count = -(-(80 << 20) // PART) + 1
    assert count - 1 <= len(sent_parts(s3)) <= count
    # besides the parts: the marker three times, a listing, the marker again, begin and complete, and its removal
    assert counts.requests - len(sent_parts(s3)) <= 10
    assert counts.concurrency >= 8
    assert counts.received < 1.01 * (80 << 20)


@pytest.mark.slow
def test_workers_send_parts_themselves(training: Path, tmp_path: Path, s3: Cloud) -> None:
    view = lazyckpt.open(training)
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        for name in ("torch", "zarr"):
            dest, write = WRITERS[name]
            write(view, tmp_path / dest, {})
            write(view, s3.at(dest), {"storage_options": s3.options, "executor": pool, "verify": True})
            assert objects(s3, dest) == written(tmp_path / dest)
        with pytest.raises(DestinationError, match="memory of this process"):
            view.to_dcp("memory://remote-writing/x", executor=pool)


def test_memory_is_bounded(tmp_path: Path, s3: Cloud) -> None:
    """tracemalloc sees the buffers of parts, which are Python's; tensors are read into them."""
    weights = {f"w{n}": torch.zeros(8 << 20) for n in range(6)}  # 192 MiB
    torch.save(weights, tmp_path / "in.pt")
    view = lazyckpt.open(tmp_path / "in.pt")
    tracemalloc.start()
    try:
        view.to_safetensors(s3.at("model.safetensors"), storage_options=s3.options, memory="64MiB")
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert most < 64 << 20


# -- resuming

CHILD = """
import os, signal, sys, json, threading
import lazyckpt
from lazyckpt.io.storage import uploads
from lazyckpt.io.storage.s3 import S3Uploads
from tests.test_remote_writing import WRITERS, PART
uploads.PART = PART
source, url, name, options, after = sys.argv[1:]
real, lock, done = S3Uploads.send, threading.Lock(), []
def send(self, key, upload, number, data):
    with lock:  # one after the other, so that exactly so many are there
        if len(done) == int(after):
            os.kill(os.getpid(), signal.SIGKILL)
        etag = real(self, key, upload, number, data)
        done.append(number)
        return etag
S3Uploads.send = send
WRITERS[name][1](lazyckpt.open(source), url, {"storage_options": json.loads(options)})
"""


def killed(source: Path, url: str, name: str, options: dict[str, Any], after: int) -> None:
    child = processes.run("-c", CHILD, source, url, name, json.dumps(options), str(after))
    assert child.returncode == -signal.SIGKILL, child.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ONLY_PARTS)
def test_a_killed_export_sends_only_what_is_missing(training: Path, tmp_path: Path, s3: Cloud, name: str) -> None:
    dest, write = WRITERS[name]
    view = lazyckpt.open(training)
    write(view, tmp_path / dest, {})
    total = sum(max(1, -(-len(data) // PART)) for key, data in written(tmp_path / dest).items() if is_file(key))
    after = total // 2
    url = s3.at(dest)
    killed(training, url, name, s3.options, after)
    assert [key for key in objects(s3, dest) if not key.startswith(".")] == []  # no reader sees anything
    assert unfinished(url, storage_options=s3.options)
    with pytest.raises(DestinationError, match="unfinished export of something else"):
        write(view.select("layers*"), url, {"storage_options": s3.options})
    s3.server.reset()
    write(view, url, {"storage_options": s3.options})
    assert len(sent_parts(s3)) == total - after
    assert objects(s3, dest) == written(tmp_path / dest)
    assert unfinished(url, storage_options=s3.options) is None


def is_file(key: str) -> bool:
    """Whether it is one of the plan's files, and no text."""
    small = ("step.pt", "optimizer_state.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt", "__0_0.distcp")
    return key.endswith((".safetensors", ".pt", ".bin", ".distcp", ".gguf")) and not key.endswith(small)


def test_an_interrupted_zip_file(training: Path, tmp_path: Path, moto: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part is known by the MD5 of its bytes."""
    from lazyckpt.io.storage.s3 import S3Uploads

    options = {"endpoint": moto, "access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
    dest, write = WRITERS["zarr zip"]
    view, url = lazyckpt.open(training), f"s3://bucket/zips/{dest}"
    write(view, tmp_path / dest, {})
    real, sent = S3Uploads.send, []

    def send(self: S3Uploads, key: str, upload: str, number: int, data: Any) -> str:
        if number == failing:
            raise ConnectionResetError("the network is gone")
        sent.append(number)
        return real(self, key, upload, number, data)

    monkeypatch.setattr(S3Uploads, "send", send)
    failing = 3
    with pytest.raises(DestinationError, match="network is gone"):
        write(view, url, {"storage_options": options})
    there = set(sent)
    failing, sent[:] = 0, []
    assert {1, 2} <= there and unfinished(url, storage_options=options)
    write(view, url, {"storage_options": options})
    assert 3 in sent and there.isdisjoint(sent)
    assert uploads_of("s3://bucket/zips", options).get(dest) == (tmp_path / dest).read_bytes()


@pytest.mark.slow
def test_discard_and_begin_anew(training: Path, s3: Cloud) -> None:
    url, view = s3.at("st"), lazyckpt.open(training)
    killed(training, url, "safetensors shards", s3.options, 2)
    place = uploads_of(s3.url, s3.options)
    assert isinstance(place, uploads.PartUploads)
    assert len(list(place.begun())) > 1
    discard(url, storage_options=s3.options)
    assert list(place.begun()) == [] and place.list() == {}
    assert unfinished(url, storage_options=s3.options) is None
    killed(training, url, "safetensors shards", s3.options, 2)
    s3.server.reset()
    view.to_safetensors(url, max_shard_size="8MB", storage_options=s3.options, resume=False)
    sizes = [len(data) for key, data in objects(s3, "st").items() if key.endswith(".safetensors")]
    assert len(sent_parts(s3)) == sum(-(-size // PART) for size in sizes)
    assert list(place.begun()) == []


@pytest.mark.parametrize("name", ["safetensors shards", "dcp", "zarr"])
def test_a_kill_while_it_is_published(
    training: Path, tmp_path: Path, s3: Cloud, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some objects are complete, others are not; nothing is sent again."""
    from lazyckpt.io.storage.s3 import S3Uploads

    dest, write = WRITERS[name]
    view, url = lazyckpt.open(training), s3.at(dest)
    write(view, tmp_path / dest, {})
    done: list[str] = []
    complete, put = S3Uploads.complete, S3Uploads.put

    def broken(self: S3Uploads, key: str, *about: Any) -> None:
        if done:
            raise ConnectionResetError("the network is gone")
        done.append(key)
        complete(self, key, *about)

    def no_root(self: S3Uploads, key: str, content: Any) -> int:
        if key in ("zarr.json", ".metadata", "model.safetensors.index.json"):
            raise ConnectionResetError("the network is gone")
        return put(self, key, content)

    monkeypatch.setattr(S3Uploads, "complete", broken)
    monkeypatch.setattr(S3Uploads, "put", no_root)
    with pytest.raises(DestinationError, match=r"network is gone.*call again to go on"):
        write(view, url, {"storage_options": s3.options})
    monkeypatch.undo()
    monkeypatch.setattr(uploads, "PART", PART)
    s3.server.reset()
    write(view, url, {"storage_options": s3.options})
    assert sent_parts(s3) == []
    assert objects(s3, dest) == written(tmp_path / dest)


def test_whole_files_resume_elsewhere(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a store keeps no parts, the files that are there are not written again."""
    url, fs = "memory://remote-writing/again", fsspec.filesystem("memory")
    view = lazyckpt.open(training)
    real = uploads.FsspecUploads.put
    put: list[str] = []

    def failing(self: Any, key: str, content: Any) -> int:
        if len([k for k in put if k.endswith(".safetensors")]) == 2:
            raise ConnectionResetError("the network is gone")
        put.append(key)
        return real(self, key, content)

    monkeypatch.setattr(uploads.FsspecUploads, "put", failing)
    options = {"max_shard_size": "8MB", "executor": ThreadPoolExecutor(1)}
    with pytest.raises(DestinationError, match="network is gone"):
        view.to_safetensors(url, **options)
    there = {k for k in put if k.endswith(".safetensors")}
    assert unfinished(url) == sum(fs.size(f"/remote-writing/again/{key}") for key in there)
    with pytest.raises(lazyckpt.MissingFileError, match="interrupted"):
        lazyckpt.open(url)
    put.clear()
    monkeypatch.setattr(uploads.FsspecUploads, "put", lambda self, key, c: put.append(key) or real(self, key, c))
    view.to_safetensors(url, **options)
    assert there.isdisjoint(put) and put[-1] == "model.safetensors.index.json"
    found = lazyckpt.open(url)
    assert all(torch.equal(found[name][...], tensor[...]) for name, tensor in view.items())


OBJECTS = """
import json, os, signal, sys, threading
import lazyckpt
from lazyckpt.io.storage import uploads
source, url, options, after = sys.argv[1:]
uploads.PART = uploads._SENT = 5 << 20
uploads.HELD = 4 << 20  # so that a shard is sent in parts
real, lock, done = uploads.ObjectUploads.put, threading.Lock(), []
def put(self, key, content):
    if not key.endswith(".safetensors"):
        return real(self, key, content)
    with lock:  # one after the other, so that exactly so many are complete
        def pieces():
            for n, piece in enumerate(content):
                yield piece
                if len(done) == int(after):
                    os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the next one
        size = real(self, key, pieces())
        done.append(key)
        return size
uploads.ObjectUploads.put = put
lazyckpt.open(source).to_safetensors(url, max_shard_size="8MB", storage_options=json.loads(options))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["gs", pytest.param("az", marks=[pytest.mark.slow, pytest.mark.xdist_group("azurite")])]
)
def test_a_killed_export_keeps_whole_objects(
    training: Path, tmp_path: Path, kind: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """obstore cannot go on with an upload of another process: the object that was being sent is sent again."""
    azurite = request.getfixturevalue("azurite") if kind == "az" else None
    view, sent = lazyckpt.open(training), []
    view.to_safetensors(tmp_path / "st", max_shard_size="8MB")
    with cloud_of(kind, azurite=azurite) as cloud:
        url, options = cloud.at("st"), {"storage_options": cloud.options}
        child = processes.run("-c", OBJECTS, training, url, json.dumps(cloud.options), "1")
        assert child.returncode == -signal.SIGKILL, child.stderr
        there = {key for key in objects(cloud, "st") if key.endswith(".safetensors")}
        assert len(there) == 1
        assert unfinished(url, **options) == sum((tmp_path / "st" / key).stat().st_size for key in there)
        with pytest.raises(lazyckpt.MissingFileError, match="interrupted"):
            lazyckpt.open(url, **options)
        real = uploads.ObjectUploads.put
        monkeypatch.setattr(uploads.ObjectUploads, "put", lambda self, key, c: sent.append(key) or real(self, key, c))
        view.to_safetensors(url, max_shard_size="8MB", **options)
        assert there.isdisjoint(sent)
        assert objects(cloud, "st") == written(tmp_path / "st")
        assert unfinished(url, **options) is None


# -- what is in the way


def test_two_exports_at_once(training: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyckpt.io.storage.s3 import S3Uploads

    view, url = lazyckpt.open(training), s3.at("m.safetensors")
    began, go = threading.Event(), threading.Event()
    real = S3Uploads.send

    def send(self: S3Uploads, *about: Any) -> str:
        began.set()
        assert go.wait(30)
        return real(self, *about)

    monkeypatch.setattr(S3Uploads, "send", send)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(view.to_safetensors, url, storage_options=s3.options)
        assert began.wait(30)
        with pytest.raises(Busy):
            view.to_safetensors(url, storage_options=s3.options)
        # another process takes the place
        place = uploads_of(s3.url, s3.options)
        mark = ".m.safetensors.lazyckpt-job"
        place.put(mark, [b'{"fingerprint": "other", "uploads": {}, "owns": false}'])
        go.set()
        with pytest.raises(Busy, match="another export"):
            first.result()
    assert "m.safetensors" not in place.list() and mark in place.list()


def test_the_root_of_a_file_system(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    torch.save({"w": torch.arange(5.0)}, tmp_path / "in.pt")
    try:
        lazyckpt.open(tmp_path / "in.pt").to_safetensors("memory://remote-writing.safetensors", manifest=True)
        assert torch.equal(lazyckpt.open("memory://remote-writing.safetensors")["w"][...], torch.arange(5.0))
        names = {"/remote-writing.safetensors", "/remote-writing.safetensors.manifest.json"}
        assert {name for name in fs.find("/") if "remote-writing" in name} == names
    finally:
        for name in fs.find("/"):
            if name.startswith("/remote-writing."):
                fs.rm_file(name)


def test_places_that_are_refused(training: Path, tmp_path: Path, s3: Cloud) -> None:
    view, options = lazyckpt.open(training), {"storage_options": s3.options}
    s3.put("taken/model-00001-of-00002.safetensors", b"x")
    with pytest.raises(DestinationError, match="holds other weights"):
        view.to_safetensors(s3.at("taken"), **options)
    s3.put("other/notes.txt", b"x")
    with pytest.raises(DestinationError, match=r"not empty, and no distributed checkpoint"):
        view.to_dcp(s3.at("other"), overwrite=True, **options)
    with pytest.raises(DestinationError, match="hf upload"):
        view.to_dcp("hf://someone/model")
    with pytest.raises(DestinationError, match="web server"):
        view.to_universal("https://example.org/x")
    with pytest.raises(DestinationError, match="share"):
        view.to_dcp(s3.at("shared"), share=(0, 2), **options)
    with pytest.raises(DestinationError, match="no such bucket"):
        view.to_safetensors("s3://missing/x.safetensors", **options)
    assert objects(s3, "other") == {"notes.txt": b"x"}


def test_the_source_is_not_written_to() -> None:
    fs = fsspec.filesystem("memory")
    folder = "memory://remote-writing/source"
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name in names:
        fs.pipe(f"/remote-writing/source/{name}", save({name: torch.randn(4, 4)}))
    index = {"metadata": {}, "weight_map": {n: n for n in names}}
    fs.pipe("/remote-writing/source/model.safetensors.index.json", json.dumps(index).encode())
    view = lazyckpt.open(folder)
    before = {f: fs.cat_file(f) for f in fs.find("/remote-writing/source")}
    for write in (
        lambda: view.to_safetensors(folder, overwrite=True),
        lambda: view.to_dcp(folder, overwrite=True),
        lambda: view.to_dcp(f"{folder}/below", overwrite=True),
        lambda: view.to_zarr(f"{folder}/below.zarr"),
        lambda: view.to_dcp("memory://remote-writing", overwrite=True),
        lambda: view.to_safetensors(f"{folder}/model-00001-of-00002.safetensors", overwrite=True),
    ):
        with pytest.raises(DestinationError, match="checkpoint that is read"):
            write()
    assert {f: fs.cat_file(f) for f in fs.find("/remote-writing/source")} == before


def test_other_objects_stay(training: Path, s3: Cloud) -> None:
    view = lazyckpt.open(training)
    s3.put("model/config.json", b"{}")
    view.to_safetensors(s3.at("model"), max_shard_size="8MB", storage_options=s3.options)
    view.to_safetensors(s3.at("model"), max_shard_size="8MB", storage_options=s3.options, overwrite=True)
    assert objects(s3, "model")["config.json"] == b"{}"


def test_verify_finds_what_the_store_has_changed(training: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyckpt.io.storage.s3 import S3Uploads

    real = S3Uploads.send

    def send(self: S3Uploads, key: str, upload: str, number: int, data: Any) -> str:
        data[1000] ^= 1
        return real(self, key, upload, number, data)

    monkeypatch.setattr(S3Uploads, "send", send)
    view = lazyckpt.open(training)
    with pytest.raises(CorruptError, match="do not hold what the source holds"):
        view.to_safetensors(s3.at("st"), max_shard_size="8MB", storage_options=s3.options, verify=True)
    assert objects(s3, "st") == {}


def test_a_source_that_changes(training: Path, tmp_path: Path, s3: Cloud) -> None:
    path = tmp_path / "in.pt"
    path.write_bytes(training.read_bytes())
    view = lazyckpt.open(path)
    with open(path, "r+b") as file:
        file.seek(5000)
        file.write(b"other")
    with pytest.raises(lazyckpt.ChangedFileError):
        view.to_dcp(s3.at("changed"), storage_options=s3.options)
    assert objects(s3, "changed") == {}


def test_no_credentials_in_messages(training: Path) -> None:
    view = lazyckpt.open(training)
    options = {"key": "AKIASECRETNAME", "secret": "topsecretvalue", "endpoint_url": "http://127.0.0.1:9"}
    options |= {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    with pytest.raises(DestinationError) as caught:
        view.to_safetensors("s3://bucket/x.safetensors", storage_options=options)
    text = f"{caught.value!r} {caught.value.__cause__!r} {uploads_of('s3://bucket/x', options)!r}"
    assert "SECRET" not in text and "topsecret" not in text


# -- commands, runs, manifests


def test_convert_from_a_bucket_to_a_bucket(
    training: Path, tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = CliRunner()
    monkeypatch.setitem(fsspec.config.conf, "s3", s3.options)
    view = lazyckpt.open(training)
    s3.put("source/training.pt", training.read_bytes())
    first = runner.invoke(
        app, ["convert", s3.at("source/training.pt"), s3.at("dcp"), "--to", "dcp", "--json", "--verify"]
    )
    assert first.exit_code == 0, first.output
    assert json.loads(first.stdout)["result"]["files"] == ["s3://bucket/dcp"]
    again = runner.invoke(app, ["convert", s3.at("dcp"), s3.at("dcp/below"), "--to", "torch"])
    assert again.exit_code == 2 and "inside of the checkpoint" in " ".join(again.output.split())
    second = runner.invoke(app, ["convert", s3.at("dcp"), str(tmp_path / "hf"), "--to", "safetensors"])
    assert second.exit_code == 0, second.output
    ranks = runner.invoke(app, ["convert", s3.at("dcp"), s3.at("ranks"), "--to", "torch", "--pp", "2"])
    assert ranks.exit_code == 0, ranks.output
    taken = runner.invoke(app, ["convert", str(training), s3.at("dcp"), "--to", "dcp"])
    assert taken.exit_code == 2 and "exists already" in taken.output
    found = lazyckpt.open(tmp_path / "hf")
    assert all(torch.equal(found[n][...], t[...]) for n, t in view.items())


def test_prune(training: Path, s3: Cloud) -> None:
    view = lazyckpt.open(training).select("layers*")
    for step in (1, 2, 3):
        view.to_dcp(s3.at(f"run/step-{step}"), storage_options=s3.options)
    s3.put("run/step-2/.lazyckpt-job", b"{}")
    s3.put("run/step-10-notes.txt", b"notes")
    planned = lazyckpt.prune(s3.at("run"), 1, storage_options=s3.options)
    assert [item.name for item in planned.remove] == ["step-1"] and not planned.deleted
    assert "step-1/.metadata" in objects(s3, "run")
    s3.server.reset()
    done = lazyckpt.prune(s3.at("run"), 1, delete=True, storage_options=s3.options)
    assert [item.name for item in done.remove] == ["step-1"] and done.nbytes == planned.nbytes > 0
    assert {key.partition("/")[0] for key in objects(s3, "run")} == {"step-2", "step-3", "step-10-notes.txt"}
    assert len([one for one in s3.server.log() if "delete" in one.target]) == 2  # of all objects, and of the marker
    again = lazyckpt.prune(s3.at("run"), 1, delete=True, incomplete=True, storage_options=s3.options)
    assert [item.name for item in again.remove] == ["step-2"]


def test_readers_meanwhile(training: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    from lazyckpt.io.storage.s3 import S3Uploads

    view, url, seen = lazyckpt.open(training), s3.at("universal"), []
    real = S3Uploads.complete

    def complete(self: S3Uploads, *about: Any) -> None:
        real(self, *about)
        with pytest.raises(lazyckpt.MissingFileError, match="is being written"):
            lazyckpt.open(url, storage_options=s3.options)
        seen.append(1)

    monkeypatch.setattr(S3Uploads, "complete", complete)
    view.to_universal(url, storage_options=s3.options)
    assert seen
    found = lazyckpt.open(url, storage_options=s3.options)
    assert torch.equal(found["layers.1.w"][...], view["layers.1.w"][...])


@pytest.mark.parametrize("name", ["safetensors", "safetensors shards", "torch", "dcp", "zarr"])
def test_manifests(training: Path, s3: Cloud, name: str) -> None:
    dest, write = WRITERS[name]
    view = lazyckpt.open(training)
    s3.server.reset()
    result = write(view, s3.at(dest), {"storage_options": s3.options, "manifest": True})
    sent_back = s3.server.counts().sent
    beside = name in ("safetensors", "torch", "zarr")
    assert result.manifest == (s3.at(f"{dest}.manifest.json") if beside else s3.at(f"{dest}/lazyckpt-manifest.json"))
    found = Digest.from_json(uploads_of(s3.url, s3.options).get(result.manifest.removeprefix("s3://bucket/")))
    now = lazyckpt.open(s3.at(dest), storage_options=s3.options).digest()
    assert found == now
    assert sent_back < 0.1 * result.nbytes + (1 << 20)  # what was hashed when it was sent is not read back


# -- parts


def test_parts_of_any_layout(training: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts that cut elements, checksums and headers, put together in any order, are the file."""
    from lazyckpt.export import torch as torch_files

    for size in (64, 1000, 4099):
        monkeypatch.setattr(parts, "part_size", lambda nbytes, size=size: size)
        tensors = {"a": torch.arange(1000, dtype=torch.float64), "b": torch.randn(7, 3), "c": torch.tensor(1.5)}
        items, at = [], 0
        for tensor in tensors.values():
            items.append(torch_files.Item(at, torch_files.Held(tensor)))
            at += items[-1].length
        row = b"".join(map(bytes, parts.streamed(torch_files.row(items), [], None)))
        for item, tensor in zip(items, tensors.values(), strict=True):
            assert torch.equal(torch.load(io.BytesIO(row[item.offset : item.offset + item.length])), tensor)
        layout = torch_files.layout_of({name: torch_files.Held(tensor) for name, tensor in tensors.items()})
        whole = b"".join(map(bytes, parts.streamed(layout, [], None)))
        with zipfile.ZipFile(io.BytesIO(whole)) as archive:
            assert archive.testzip() is None and len(whole) == layout.size
        found = torch.load(io.BytesIO(whole))
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_moto(training: Path, tmp_path: Path, moto: str) -> None:
    """Another server's understanding of the protocol."""
    options = {"endpoint": moto, "access_key_id": "x", "secret_access_key": "y", "region": "us-east-1"}
    view = lazyckpt.open(training)
    for name in ("torch", "safetensors shards", "dcp", "zarr"):
        dest, write = WRITERS[name]
        write(view, tmp_path / dest, {})
        write(view, f"s3://bucket/moto/{dest}", {"storage_options": options, "verify": True})
        place = uploads_of("s3://bucket/moto", options)
        found = {key: place.get(key) for key in place.list(dest)}
        assert {k.removeprefix(f"{dest}/"): v for k, v in found.items()} == written(tmp_path / dest)


@pytest.fixture(autouse=True)
def no_rest() -> Iterator[None]:
    yield
    fs = fsspec.filesystem("memory")
    if fs.exists("/remote-writing"):
        fs.rm("/remote-writing", recursive=True)
