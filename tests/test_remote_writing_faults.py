"""Exports to object stores: odd names, lost answers, kills at bad moments, and what must never be replaced."""

from __future__ import annotations

import pickle
import shutil
import socket
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt
from lazyckpt.errors import ChangedFileError, DestinationError, MissingFileError
from lazyckpt.io.storage import repeating, uploads
from lazyckpt.io.storage.uploads import FsspecUploads, uploads_of
from lazyckpt.jobs import parts, unfinished
from lazyckpt.jobs import upload as jobs_upload

from .servers.fixtures import Cloud, cloud_of, need_obstore

pytest.importorskip("boto3")
PART = 5 << 20


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "PART", PART)


@pytest.fixture
def memory() -> Iterator[str]:
    url = "memory://remote-faults"
    yield url
    fs = fsspec.filesystem("memory")
    if fs.exists("/remote-faults"):
        fs.rm("/remote-faults", recursive=True)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    save_file({"a": torch.arange(3.0), "b?*[0]": torch.arange(4.0)}, path)
    return path


def written(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def objects(url: str, options: dict[str, Any]) -> dict[str, bytes]:
    place = uploads_of(url, options)
    return {key: place.get(key) for key in place.list()}


FOLDERS = ["a b", "q?q", "h#h", "p%20p", "[z]", "w*", "ü"]
WRITERS: dict[str, Callable[[Any, Any, dict[str, Any]], Any]] = {
    "m.safetensors": lambda view, dest, o: view.to_safetensors(dest, **o),
    "m.pt": lambda view, dest, o: view.to_torch(dest, manifest=True, **o),
    "dcp": lambda view, dest, o: view.to_dcp(dest, **o),
    "x.zarr": lambda view, dest, o: view.to_zarr(dest, pack=False, verify=True, **o),
    "x.zarr.zip": lambda view, dest, o: view.to_zarr(dest, **o),
}


@pytest.mark.parametrize("folder", FOLDERS)
def test_odd_names(source: Path, tmp_path: Path, s3: Cloud, memory: str, folder: str) -> None:
    """Of folders and of tensors: `?` is no query, and `*` is no pattern, and what is beside an object stays."""
    view = lazyckpt.open(source)
    for url, options in ((s3.at(folder), s3.options), (f"{memory}/{folder}", {})):
        for name, write in WRITERS.items():
            (tmp_path / "out").mkdir(exist_ok=True)
            write(view, tmp_path / "out" / name, {})
            write(view, f"{url}/{name}", {"storage_options": options})
        found, local = objects(url, options), written(tmp_path / "out")
        assert found.keys() == local.keys()
        assert all(found[key] == local[key] for key in found if not key.endswith(".manifest.json"))
        shutil.rmtree(tmp_path / "out")


def test_a_question_mark_in_messages(source: Path, s3: Cloud) -> None:
    view = lazyckpt.open(source)
    result = view.to_torch(s3.at("q?q/m.pt"), manifest=True, storage_options=s3.options)
    assert result.manifest == "s3://bucket/q?q/m.pt.manifest.json"
    with pytest.raises(DestinationError, match=r"bucket/q\?q/m\.pt exists already"):
        view.to_torch(s3.at("q?q/m.pt"), storage_options=s3.options)


def test_an_archive_that_is_read_is_not_replaced(source: Path, tmp_path: Path, s3: Cloud) -> None:
    lazyckpt.open(source).to_dcp(tmp_path / "dcp")
    with zipfile.ZipFile(tmp_path / "x.zip", "w") as archive:
        for path in sorted((tmp_path / "dcp").iterdir()):
            archive.write(path, f"dcp/{path.name}")
    before = (tmp_path / "x.zip").read_bytes()
    s3.put("x.zip", before)
    view = lazyckpt.open(s3.at("x.zip"), storage_options=s3.options)
    with pytest.raises(DestinationError, match="holds the checkpoint that is read"):
        view.to_zarr(s3.at("x.zip"), overwrite=True, storage_options=s3.options)
    assert objects(s3.url, s3.options) == {"x.zip": before}


def test_answers_that_get_lost(source: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is done, but the answer does not arrive, and is asked for again."""
    from botocore.exceptions import ConnectionClosedError
    from botocore.httpsession import URLLib3Session

    view, real = lazyckpt.open(source), URLLib3Session.send
    for number, (method, sign) in enumerate((("POST", "?uploads"), ("POST", "uploadId="), ("PUT", "partNumber="))):
        lost: list[str] = []

        def send(self: Any, request: Any, method: str = method, sign: str = sign, lost: list[str] = lost) -> Any:
            answer = real(self, request)
            if not lost and request.method == method and sign in request.url:
                lost.append(request.url)
                raise ConnectionClosedError(endpoint_url=request.url)
            return answer

        monkeypatch.setattr(URLLib3Session, "send", send)
        url = s3.at(f"{number}/m.safetensors")
        view.to_safetensors(url, storage_options=s3.options)
        assert lost
        place = uploads_of(s3.at(str(number)), s3.options)
        assert place.list().keys() == {"m.safetensors"} and list(place.begun()) == []  # type: ignore[attr-defined]
        found = lazyckpt.open(url, storage_options=s3.options)
        assert all(torch.equal(found[name][...], tensor[...]) for name, tensor in view.items())


def test_uploads_of_a_killed_call_do_not_stay(source: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is killed when it has begun uploads, and before it has recorded them."""
    from lazyckpt.io.storage.s3 import S3Uploads

    class KilledError(BaseException):
        pass

    real = S3Uploads.begin

    def begin(self: Any, key: str, stamp: str) -> str:
        real(self, key, stamp)
        raise KilledError

    view, place = lazyckpt.open(source), uploads_of(s3.url, s3.options)
    others = place.begin("m.safetensors.other", "")  # type: ignore[attr-defined]
    with monkeypatch.context() as patch:
        patch.setattr(S3Uploads, "begin", begin)
        with pytest.raises(KilledError):
            view.to_safetensors(s3.at("m.safetensors"), storage_options=s3.options)
    assert len(list(place.begun())) == 2  # type: ignore[attr-defined]
    view.to_safetensors(s3.at("m.safetensors"), storage_options=s3.options)
    assert list(place.begun()) == [("m.safetensors.other", others)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("then", ["again", "discard", "of something else"])
def test_a_call_that_ends_before_its_uploads_are_recorded(
    tmp_path: Path, s3: Cloud, then: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The marker is written beside the first parts: here it is lost after a part was sent."""
    from lazyckpt.io.storage.s3 import S3Uploads

    path = tmp_path / "large.safetensors"
    save_file({"a": torch.arange(PART // 2), "b": torch.arange(3.0)}, path)  # four parts and a bit
    view, place = lazyckpt.open(path), uploads_of(s3.url, s3.options)
    sent, put, send, marks = threading.Event(), S3Uploads.put, S3Uploads.send, list[str]()

    def lost(self: Any, key: str, content: Any) -> int:
        marks.append(key)
        if len(marks) == 2:
            assert sent.wait(60)
            raise ConnectionResetError("killed")
        return put(self, key, content)

    def noted(self: Any, *about: Any) -> str:
        etag = send(self, *about)
        sent.set()
        return etag

    with monkeypatch.context() as patch:
        patch.setattr(S3Uploads, "put", lost)
        patch.setattr(S3Uploads, "send", noted)
        with pytest.raises(DestinationError, match="killed"):
            view.to_safetensors(s3.at("m.safetensors"), storage_options=s3.options)
    assert place.list().keys() == set(marks) and len(list(place.begun())) == 1  # type: ignore[attr-defined]
    other = place.begin("m.safetensors.other", "")  # type: ignore[attr-defined]
    if then == "discard":
        unfinished.discard(s3.at("m.safetensors"), storage_options=s3.options)
        assert place.list() == {}
    else:
        view = view if then == "again" else view.select("b")
        view.to_safetensors(s3.at("m.safetensors"), storage_options=s3.options, overwrite=then != "again")
        found = lazyckpt.open(s3.at("m.safetensors"), storage_options=s3.options)
        assert all(torch.equal(found[name][...], tensor[...]) for name, tensor in view.items())
    assert list(place.begun()) == [("m.safetensors.other", other)]  # type: ignore[attr-defined]


def test_files_of_a_killed_call_do_not_stay(source: Path, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    view, fs = lazyckpt.open(source), fsspec.filesystem("memory")
    real = FsspecUploads.put

    def put(self: Any, key: str, content: Any) -> int:
        if not key.endswith("-job"):
            fs.pipe(f"/remote-faults/st/.{key}.0123abcd.part", b"half of it")
            raise ConnectionResetError("killed")
        return real(self, key, content)

    fs.pipe("/remote-faults/st/.notes.txt.0123abcd.part", b"of somebody else")
    with monkeypatch.context() as patch:
        patch.setattr(FsspecUploads, "put", put)
        with pytest.raises(DestinationError, match="killed"):
            view.to_safetensors(f"{memory}/st")
    view.to_safetensors(f"{memory}/st")
    assert objects(f"{memory}/st", {}).keys() == {"model.safetensors", ".notes.txt.0123abcd.part"}


@pytest.mark.parametrize("kind", ["memory", "gs", "s3"])
def test_a_source_that_changes_while_a_single_file_is_written(
    tmp_path: Path, memory: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = tmp_path / "in.safetensors", parts.filled
    save_file({"a": torch.zeros(3 << 20)}, path)
    view = lazyckpt.open(path)

    def filled(part: Any, known: Any) -> Any:
        found = real(part, known)
        if part.begin + part.nbytes > 12 << 20:  # the last one
            save_file({"a": torch.ones(3 << 20)}, path)
        return found

    monkeypatch.setattr(parts, "filled", filled)
    monkeypatch.setattr(jobs_upload, "filled", filled)

    def check(url: str, options: dict[str, Any]) -> None:
        with pytest.raises(ChangedFileError):
            view.to_safetensors(f"{url}/m.safetensors", storage_options=options)
        assert objects(url, options) == {}

    if kind == "memory":
        check(memory, {})
        return
    with cloud_of(kind) as cloud:
        check(cloud.at("changing"), cloud.options)


def test_the_same_chunk_has_the_same_bytes(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """gzip writes the time into its header, by which an interrupted zip file could not be resumed or verified."""
    view = lazyckpt.open(source)
    for number in (1, 2):
        monkeypatch.setattr("time.time", lambda number=number: 1e9 + number)
        view.to_zarr(tmp_path / f"{number}.zarr", codec="gzip")
    assert written(tmp_path / "1.zarr") == written(tmp_path / "2.zarr")
    found = lazyckpt.open(tmp_path / "2.zarr")
    assert torch.equal(found["a"][...], view["a"][...])


# -- prune


@pytest.mark.parametrize("kind", ["memory", "gs", "s3"])
def test_a_killed_prune(tmp_path: Path, memory: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody opens half of a checkpoint, and the next prune removes the rest of it, and nothing else."""

    class KilledError(BaseException):
        pass

    def check(url: str, options: dict[str, Any]) -> None:
        save_file({f"w{n}": torch.arange(5.0) for n in range(6)}, tmp_path / "in.safetensors")
        view = lazyckpt.open(tmp_path / "in.safetensors")
        for step in (1, 2):
            view.to_safetensors(f"{url}/checkpoint-{step}", max_shard_size=20, storage_options=options)
            uploads_of(f"{url}/checkpoint-{step}/sub", options).put("more.bin", [b"x"])
        uploads_of(url, options).put("notes.txt", [b"notes"])
        real = unfinished.remove_all

        def remove_all(place: Any, keys: Any, keep: str = "") -> None:
            real(place, [key for key in keys if "index" in key or "00003" in key], keep)
            raise KilledError

        with monkeypatch.context() as patch:
            patch.setattr("lazyckpt.runs.folders.remove_all", remove_all)
            with pytest.raises(KilledError):
                lazyckpt.prune(url, 1, delete=True, storage_options=options)
        with pytest.raises(MissingFileError, match="lazyckpt prune"):
            lazyckpt.open(f"{url}/checkpoint-1", storage_options=options)
        again = lazyckpt.prune(url, 1, storage_options=options)
        assert [one.name for one in again.leftovers] == ["checkpoint-1"] and not again.remove
        lazyckpt.prune(url, 1, delete=True, storage_options=options)
        left = objects(url, options)
        assert {key.partition("/")[0] for key in left} == {"checkpoint-2", "notes.txt"} and len(left) == 9
        found = lazyckpt.open(f"{url}/checkpoint-2", storage_options=options)
        assert all(torch.equal(found[name][...], tensor[...]) for name, tensor in view.items())

    if kind == "memory":
        check(f"{memory}/run", {})
        return
    with cloud_of(kind) as cloud:
        check(cloud.at("run"), cloud.options)


# -- readers


def test_a_reader_that_listed_the_folder_before_it_is_replaced(
    tmp_path: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not seen the marker. What it finds of new files is not read."""
    from lazyckpt.io.storage.object import ObjectStore
    from lazyckpt.io.storage.s3 import S3Uploads

    for value in (1.0, 2.0):
        save_file({f"w{n}": torch.full((500,), value) for n in range(3)}, tmp_path / f"{value}.safetensors")
    old, new = (lazyckpt.open(tmp_path / f"{value}.safetensors") for value in (1.0, 2.0))
    options: dict[str, Any] = {"max_shard_size": 2500, "storage_options": s3.options}
    old.to_safetensors(s3.at("st"), **options)
    opened, completed, began = ObjectStore._open, S3Uploads.complete, list[str]()
    others = threading.Semaphore(0)

    def complete(self: Any, key: str, *about: Any) -> None:
        if "00001" in key:
            assert others.acquire(timeout=60) and others.acquire(timeout=60)
            raise ConnectionResetError("the network is gone")
        completed(self, key, *about)
        others.release()

    def replaced(self: Any, path: str, *about: Any) -> Any:
        if path.endswith("index.json") and not began:
            began.append(path)
            answer = opened(self, path, *about)
            content = [bytes(piece) for piece in answer[1]]
            with pytest.raises(DestinationError, match="network is gone"):
                new.to_safetensors(s3.at("st"), overwrite=True, **options)
            return answer[0], content
        return opened(self, path, *about)

    monkeypatch.setattr(S3Uploads, "complete", complete)
    monkeypatch.setattr(ObjectStore, "_open", replaced)
    view = lazyckpt.open(s3.at("st"), storage_options=s3.options, cache=False)
    assert began and {float(t[0]) for t in view.values()} <= {1.0}
    assert {"w1", "w2"} <= view.unreadable.keys()
    assert all("is not the file that was opened" in why for why in view.unreadable.values())
    for name in ("w1", "w2"):
        for one in (view, pickle.loads(pickle.dumps(view))):
            with pytest.raises(ChangedFileError, match="open it again"):
                one[name]


def test_a_busy_bucket_says_when_to_write_again(source: Path, s3: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(repeating, "pause", waits.append)
    view = lazyckpt.open(source)
    s3.server.set_fault("status", method="PUT", times=1, status=503, headers={"Retry-After": "17"})
    view.to_safetensors(s3.at("m.safetensors"), storage_options=s3.options)
    assert waits == [17.0]
    s3.server.clear_faults()
    s3.server.set_fault("status", method="PUT", times=1, status=503, headers={"Retry-After": "4000"})
    with pytest.raises(DestinationError, match="deadline"):  # longer than that nobody waits
        view.to_safetensors(s3.at("later.safetensors"), storage_options=s3.options)
    assert waits == [17.0]


# -- the deadline


BAD: dict[str, dict[str, Any]] = {
    "busy": {"kind": "status", "status": 503},
    "dropped": {"kind": "drop"},
    "silent": {"kind": "hang"},
    "cut": {"kind": "cut", "after": 3},
}


@pytest.mark.parametrize("fault", ["busy", "silent", "cut"])
def test_a_bucket_that_fails_for_ever(source: Path, s3: Cloud, fault: str) -> None:
    """Writing is given up after the deadline, also if it is the first request that fails."""
    view, bad = lazyckpt.open(source), {**BAD[fault]}
    options = {**s3.options, "requests": {"deadline": 0.3, "timeout": 0.5}}
    s3.server.set_fault(bad.pop("kind"), **bad)
    begin = time.monotonic()
    with pytest.raises(DestinationError, match=r"tried for \d+ s; storage_options"):
        view.to_safetensors(s3.at("m.safetensors"), storage_options=options)
    assert time.monotonic() - begin < 5
    s3.server.clear_faults()
    assert objects(s3.url, s3.options) == {}
    view.to_safetensors(s3.at("m.safetensors"), storage_options=options)
    assert objects(s3.url, s3.options).keys() == {"m.safetensors"}


def test_a_bucket_that_fails_for_a_moment(tmp_path: Path, s3: Cloud) -> None:
    """Also in the middle of an answer, and of an upload in parts."""
    save_file({"a": torch.arange(2 << 20)}, tmp_path / "in.safetensors")
    view = lazyckpt.open(tmp_path / "in.safetensors")
    for number, (fault, method) in enumerate((("busy", "PUT"), ("dropped", "PUT"), ("cut", "GET"), ("cut", "POST"))):
        bad = {**BAD[fault]}
        s3.server.set_fault(bad.pop("kind"), method=method, skip=1, times=1, **bad)
        view.to_safetensors(s3.at(f"{number}/m.safetensors"), storage_options=s3.options)
        s3.server.clear_faults()
        place = uploads_of(s3.at(str(number)), s3.options)
        assert place.list().keys() == {"m.safetensors"} and list(place.begun()) == []  # type: ignore[attr-defined]
        found = lazyckpt.open(s3.at(f"{number}/m.safetensors"), storage_options=s3.options)
        assert torch.equal(found["a"][...], view["a"][...])


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_nobody_at_the_address(source: Path, kind: str) -> None:
    """Connections that are refused count like answers that do not come."""
    need_obstore()
    with socket.create_server(("127.0.0.1", 0)) as found:
        server = f"http://127.0.0.1:{found.getsockname()[1]}"
    name = {"s3": "endpoint", "gs": "base_url"}[kind]
    options = {name: server, "skip_signature": True, "requests": {"deadline": 0.3}}
    begin = time.monotonic()
    with pytest.raises(DestinationError, match=r"127\.0\.0\.1"):
        lazyckpt.open(source).to_safetensors(f"{kind}://bucket/m.safetensors", storage_options=options)
    assert time.monotonic() - begin < 9  # without the deadline it would be ten
