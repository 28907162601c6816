"""A view of a file that was replaced, truncated or rewritten raises or gives the old bytes, in every way of reading.

The children are processes of their own: touching a mapping past the end of a truncated file kills (SIGBUS).
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from safetensors.torch import save_file

import lazyckpt

from . import processes
from .changing_files import CHANGES, OLD, READS

NEW = -OLD


def child(*args: str | Path) -> subprocess.CompletedProcess[str]:
    return processes.run("-m", "tests.changing_files", *args)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="POSIX files")
@pytest.mark.parametrize("change", CHANGES)
def test_changed_local_file_is_detected_without_a_crash(tmp_path: Path, change: str) -> None:
    done = child(tmp_path / "x.pt", change)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS")
@pytest.mark.parametrize("more", [(), ("faulthandler",)], ids=["alone", "faulthandler"])
def test_access_to_a_mapped_tensor_of_a_truncated_file_raises(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = child(tmp_path / "x.pt", "touch", *more)
    assert done.returncode == 0, f"{done.returncode}: {done.stderr[-2000:]}"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SIGBUS")
@pytest.mark.parametrize("more", [(), ("faulthandler",)], ids=["alone", "faulthandler"])
def test_foreign_bus_errors_end_the_process_as_usual(tmp_path: Path, more: tuple[str, ...]) -> None:
    done = child(tmp_path / "x.pt", "fault", *more)
    assert done.returncode == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(more)


class Served:
    """A web server of one file, ``data``; ``tells``: which headers say what state of the file it is."""

    def __init__(self, data: bytes, tells: tuple[str, ...]) -> None:
        self.data, self.tells = data, tells
        self.asked: list[str] = []
        self.changed_at = time.time() - 1000
        self.after_next: Callable[[], None] | None = None
        served = self

        class Handler(BaseHTTPRequestHandler):
            def do_HEAD(self) -> None:
                self._answer()

            def do_GET(self) -> None:
                self._answer()

            def _answer(self) -> None:
                if self.path != "/x.safetensors" or self.headers.get("X-Key", served.key) != served.key:
                    self.send_error(404)
                    return
                data = served.data
                served.asked.append(self.command)
                wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
                lo, hi = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
                if lo >= hi:
                    self.send_response(416)
                    self.send_header("Content-Range", f"bytes */{len(data)}")
                    self.send_header("Content-Length", "0")
                    self.end_headers()
                    return
                self.send_response(206 if wanted else 200)
                self.send_header("Content-Length", str(hi - lo))
                if wanted:
                    self.send_header("Content-Range", f"bytes {lo}-{hi - 1}/{len(data)}")
                if "etag" in served.tells:
                    self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
                if "modified" in served.tells:
                    self.send_header("Last-Modified", formatdate(served.changed_at, usegmt=True))
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(data[lo:hi])
                    if served.after_next is not None:
                        change, served.after_next = served.after_next, None
                        change()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.key: str | None = None
        self.httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.httpd.serve_forever, args=(0.01,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self.httpd.server_address[1]}/x.safetensors"

    def put(self, data: bytes) -> None:
        self.changed_at += 10
        self.data = data


def stored(path: Path, tensor: torch.Tensor) -> bytes:
    save_file({"w": tensor}, path)
    return path.read_bytes()


@pytest.fixture(params=[("etag",), ("modified",), ("etag", "modified")], ids="+".join)
def served(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    pytest.importorskip("aiohttp", reason="fsspec's http file system needs aiohttp")
    server = Served(stored(tmp_path / "x.safetensors", OLD), request.param)
    yield server
    server.httpd.shutdown()
    server.httpd.server_close()


def every_way(view: lazyckpt.CheckpointView) -> dict[str, Callable[[], Any]]:
    t = view["w"]
    ways: dict[str, Callable[[], Any]] = {name: lambda read=read: read(t) for name, read in READS.items()}
    ways["all of the view"] = view.to
    ways["statistics"] = t.stats
    ways["dask"] = lambda: t.to_dask().compute(scheduler="threads")
    ways["unpickled"] = lambda: pickle.loads(pickle.dumps(t))[3]
    return ways


@pytest.mark.slow
@pytest.mark.parametrize("size", ["same", "shorter", "longer"])
def test_a_file_of_a_web_server_that_was_replaced(served: Served, tmp_path: Path, size: str) -> None:
    view = lazyckpt.open(served.url)
    assert torch.equal(view["w"][5], OLD[5])
    rows = {"same": 600, "shorter": 50, "longer": 900}[size]
    served.put(stored(tmp_path / "new", torch.full((rows, 1100), 7, dtype=torch.int32)))
    for name, read in every_way(view).items():
        with pytest.raises(lazyckpt.ChangedFileError):
            read()
            pytest.fail(name)
    assert lazyckpt.open(served.url)["w"].shape == (rows, 1100), "opened again, it is the new file"
    assert torch.equal(lazyckpt.open(served.url)["w"][1], torch.full((1100,), 7, dtype=torch.int32))


@pytest.mark.slow
def test_a_file_that_is_replaced_between_two_requests_of_one_read(served: Served, tmp_path: Path) -> None:
    big = torch.arange(6 << 20, dtype=torch.int32)  # 24 MiB: three requests
    served.put(stored(tmp_path / "big", big))
    one_by_one = {"requests": {"concurrency": 1}}  # else the server may begin all answers before the first one ends
    t = lazyckpt.open(served.url, storage_options=one_by_one)["w"]
    new = stored(tmp_path / "new", -big)
    served.after_next = lambda: served.put(new)
    with pytest.raises(lazyckpt.ChangedFileError):
        t[...]


def test_checking_costs_no_request_over_http(served: Served) -> None:
    view = lazyckpt.open(served.url)
    served.asked.clear()
    view["w"][3:5], view["w"][...], view.to()
    assert served.asked == ["GET"] * 7  # one for the rows, and three of a MiB for all


@pytest.mark.parametrize("served", [()], indirect=True, ids=["nothing"])
def test_server_that_reports_only_the_size(served: Served, tmp_path: Path) -> None:
    view = lazyckpt.open(served.url)
    assert any(problem.code == "unpinned-file" for problem in view.problems), "that it cannot be noticed is said"
    assert torch.equal(view["w"][...], OLD)
    served.put(stored(tmp_path / "new", NEW[:50]))
    for name, read in every_way(view).items():
        with pytest.raises(lazyckpt.ChangedFileError):
            read()
            pytest.fail(name)
    served.put(stored(tmp_path / "new", NEW.view(1100, 600).contiguous()))
    assert lazyckpt.open(served.url)["w"].shape == (1100, 600), "no index that may be stale is kept"


def test_server_that_reports_versions_causes_no_problem(served: Served) -> None:
    assert not lazyckpt.open(served.url).problems


def test_cached_index_is_compared_with_the_server(served: Served, tmp_path: Path) -> None:
    assert lazyckpt.open(served.url)["w"].shape == (600, 1100)
    served.asked.clear()
    lazyckpt.open(served.url)
    again = len(served.asked)
    served.asked.clear()
    lazyckpt.open(served.url, cache=False)
    assert again < len(served.asked), "the index was used again"
    served.put(stored(tmp_path / "new", NEW.view(1100, 600).contiguous()))
    assert lazyckpt.open(served.url)["w"].shape == (1100, 600)


def test_cached_index_is_used_for_the_same_options_only(served: Served) -> None:
    served.key = "right"
    options = {"client_kwargs": {"headers": {"X-Key": "right"}}}
    assert torch.equal(lazyckpt.open(served.url, storage_options=options)["w"][3], OLD[3])
    with pytest.raises(OSError):
        lazyckpt.open(served.url, storage_options={"client_kwargs": {"headers": {"X-Key": "wrong"}}})


@pytest.mark.parametrize("extension", ["pt", "safetensors"])
def test_a_file_in_memory_that_was_replaced(tmp_path: Path, extension: str) -> None:
    def data(tensor: torch.Tensor) -> bytes:
        path = tmp_path / f"m.{extension}"
        torch.save({"w": tensor}, path) if extension == "pt" else save_file({"w": tensor}, path)
        return path.read_bytes()

    fs = fsspec.filesystem("memory")
    fs.pipe_file(f"/changing/m.{extension}", data(OLD))
    view = lazyckpt.open(f"memory://changing/m.{extension}")
    assert torch.equal(view["w"][5], OLD[5])
    time.sleep(0.01)
    fs.pipe_file(f"/changing/m.{extension}", data(NEW))
    for name, read in every_way(view).items():
        with pytest.raises(lazyckpt.ChangedFileError):
            read()
            pytest.fail(name)
    assert torch.equal(lazyckpt.open(f"memory://changing/m.{extension}")["w"][...], NEW)
    fs.rm("/changing", recursive=True)


def test_bulk_read_checks_each_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where answers do not say what state of the file they are of: one question for a read, not for each request."""
    from fsspec.implementations.memory import MemoryFileSystem

    fs = fsspec.filesystem("memory")
    big = {f"w{n}": torch.full((3 << 20,), n, dtype=torch.int32) for n in range(8)}
    save_file(big, tmp_path / "m.safetensors")
    fs.pipe_file("/bulk/m.safetensors", (tmp_path / "m.safetensors").read_bytes())
    view = lazyckpt.open("memory://bulk/m.safetensors")
    asked: list[str] = []
    info, cat = MemoryFileSystem.info, MemoryFileSystem.cat_file
    monkeypatch.setattr(MemoryFileSystem, "info", lambda *a, **k: (asked.append("info"), info(*a, **k))[1])
    monkeypatch.setattr(MemoryFileSystem, "cat_file", lambda *a, **k: (asked.append("read"), cat(*a, **k))[1])
    read = view.to()
    assert all(read[name].eq(int(name[1:])).all() for name in big)
    assert asked.count("read") == 64 and asked.count("info") == 1
    asked.clear()
    view["w3"][...]
    assert asked.count("info") == 1
    fs.rm("/bulk", recursive=True)


def test_a_file_that_changes_while_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An index is never pinned to another state of a file than the one that it was made from."""
    from lazyckpt.formats import safetensors as format

    path = tmp_path / "x.safetensors"
    save_file({"w": OLD}, path)
    real = format.READER.read

    def read(source: Any) -> Any:
        source.store.read("x.safetensors", 0, 100)
        save_file({"v": OLD[:5], "w": NEW}, path)
        return real(source)

    reader = format.READER.__class__("safetensors", "", format.READER.recognises, read)
    monkeypatch.setattr(format, "READER", reader)
    with pytest.raises(lazyckpt.ChangedFileError):
        lazyckpt.open(path, cache=False)


def test_changed_link_count_is_not_a_change(tmp_path: Path) -> None:
    save_file({"w": OLD}, tmp_path / "x.safetensors")
    t = lazyckpt.open(tmp_path / "x.safetensors")["w"]
    assert torch.equal(t[3], OLD[3])
    os.link(tmp_path / "x.safetensors", tmp_path / "y.safetensors")
    assert torch.equal(t[:, 3], OLD[:, 3]) and torch.equal(t[...], OLD)


def test_a_file_that_is_rewritten_with_its_old_time_is_read_anew(tmp_path: Path) -> None:
    """Also by the process that has its index in memory."""
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.ones(4)}, path)
    os.utime(path, (1_700_000_000,) * 2)
    assert list(lazyckpt.open(path)) == ["a"]
    time.sleep(0.02)  # the clock of the file system
    path.write_bytes(path.read_bytes().replace(b'"a"', b'"b"'))
    os.utime(path, (1_700_000_000,) * 2)
    assert list(lazyckpt.open(path)) == ["b"]
