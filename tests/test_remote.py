"""Checkpoints behind a URL: fsspec's in-memory file system, and a real HTTP server that serves ranges."""

from __future__ import annotations

import json
import pickle
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem
from safetensors.torch import save
from typer.testing import CliRunner

import lazyckpt
from lazyckpt import cli
from lazyckpt.io.storage.fsspec import FsspecStore
from lazyckpt.testing.counting import opened

from .servers.fixtures import Cloud

TENSORS = {"a.weight": torch.arange(600_000, dtype=torch.float32).reshape(600, 1000), "b": torch.arange(7)}


@pytest.fixture
def memory() -> Iterator[str]:
    fs = fsspec.filesystem("memory")
    with fs.open("/bucket/run/model.pt", "wb") as f:
        torch.save(TENSORS, f)
    yield "memory://bucket/run"
    fs.rm("/bucket", recursive=True)


class Ranges(BaseHTTPRequestHandler):
    """A static server that answers ranges, and writes down which."""

    folder: Path
    asked: list[tuple[int, int]]

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        path = self.folder / self.path.lstrip("/")
        if not path.is_file():
            self.send_error(404)
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        lo, hi = (int(wanted[1]), min(int(wanted[2]) + 1, len(data))) if wanted else (0, len(data))
        self.send_response(206 if wanted else 200)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(hi - lo))
        if wanted:
            self.send_header("Content-Range", f"bytes {lo}-{hi - 1}/{len(data)}")
        self.end_headers()
        if body:
            self.asked.append((lo, hi))
            self.wfile.write(data[lo:hi])

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, list[tuple[int, int]]]]:
    pytest.importorskip("aiohttp", reason="fsspec's http file system needs aiohttp")
    torch.save(TENSORS, tmp_path / "model.pt")
    asked: list[tuple[int, int]] = []
    handler = type("Handler", (Ranges,), {"folder": tmp_path, "asked": asked})
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    yield f"http://127.0.0.1:{httpd.server_address[1]}", asked
    httpd.shutdown()


def test_a_file_in_memory_reads_like_a_local_one(memory: str) -> None:
    view = lazyckpt.open(f"{memory}/model.pt")
    assert view.root == memory
    for name, tensor in TENSORS.items():
        assert torch.equal(view[name][...], tensor)
    assert torch.equal(view["a.weight"][5:400:7, ::100], TENSORS["a.weight"][5:400:7, ::100])
    assert torch.equal(pickle.loads(pickle.dumps(view["a.weight"]))[3], TENSORS["a.weight"][3])


def test_a_folder_in_memory_is_recognised(memory: str) -> None:
    view = lazyckpt.open(memory)  # the only checkpoint in it
    assert view.format == "torch" and set(view) == set(TENSORS)
    with pytest.raises(lazyckpt.MissingFileError):
        lazyckpt.open(memory + "/nothing.pt")


def test_a_file_at_the_root_of_a_protocol(tmp_path: Path) -> None:
    torch.save({"w": torch.arange(3)}, tmp_path / "m.pt")
    fsspec.filesystem("memory").pipe_file("/at-the-root.pt", (tmp_path / "m.pt").read_bytes())
    view = pickle.loads(pickle.dumps(lazyckpt.open("memory://at-the-root.pt")))
    assert view["w"][...].tolist() == [0, 1, 2] and view.root == "memory://"


def test_unknown_protocol_is_reported() -> None:
    with pytest.raises(lazyckpt.FormatError, match="nosuch"):
        lazyckpt.open("nosuch://bucket/model.pt")


def test_a_slice_over_http_asks_for_its_own_bytes(server: tuple[str, list[tuple[int, int]]]) -> None:
    url, asked = server
    view = lazyckpt.open(f"{url}/model.pt")
    asked.clear()
    assert torch.equal(view["a.weight"][100:110], TENSORS["a.weight"][100:110])
    header = 128  # bytes before the tensor's data, which are compared with the zip's directory once
    assert 10 * 1000 * 4 < sum(hi - lo for lo, hi in asked) <= 10 * 1000 * 4 + header
    asked.clear()
    assert torch.equal(view["a.weight"][:, 3], TENSORS["a.weight"][:, 3])
    assert sum(hi - lo for lo, hi in asked) == 600 * 4
    near = lazyckpt.open(f"{url}/model.pt", storage_options={"requests": {"gap": 1 << 20}})
    asked.clear()
    assert torch.equal(near["a.weight"][:, 3], TENSORS["a.weight"][:, 3])
    ((lo, hi),) = asked
    assert 599 * 4000 + 4 < hi - lo <= 599 * 4000 + 4 + 12 + header, "the column, and the header in front of it"


def test_a_truncated_answer_is_an_error(memory: str) -> None:
    store = FsspecStore(memory)
    with pytest.raises(lazyckpt.CorruptError, match=re.escape("model.pt")):
        store.read("model.pt", store.stat("model.pt").size - 10, 20)


class Refusing(MemoryFileSystem):
    """Has errors of its own, as the packages of object stores do."""

    protocol = "refusing"

    def _refuse(self, *_: object, **__: object) -> None:
        raise RuntimeError("Unable to locate\ncredentials")

    info = ls = find = _refuse


@pytest.mark.parametrize("command", [["ls", "{}"], ["convert", "memory://conv/model.pt", "{}.zarr"]])
def test_file_system_errors_name_the_url(command: list[str]) -> None:
    fsspec.register_implementation("refusing", Refusing, clobber=True)
    with fsspec.filesystem("memory").open("/conv/model.pt", "wb") as f:
        torch.save(TENSORS, f)
    url = "refusing://bucket/model"
    done = CliRunner().invoke(cli.app, [part.format(url) for part in command])
    asked = command[-1].format(url)
    assert (done.exit_code, done.stderr) == (2, f"error: {asked}: Unable to locate credentials\n")
    with pytest.raises(OSError, match=re.escape(asked)) as caught:
        lazyckpt.open(asked)
    assert caught.value.__cause__ is not None and isinstance(caught.value.__cause__.__cause__, RuntimeError)


def test_server_without_ranges_is_refused_before_it_sends_everything(tmp_path: Path) -> None:
    """As `python -m http.server`. A folder there is a page that lists it."""
    pytest.importorskip("aiohttp", reason="fsspec's http file system needs aiohttp")
    sent: list[int] = []

    class Whole(SimpleHTTPRequestHandler):
        def copyfile(self, source: Any, outputfile: Any) -> None:
            with suppress(OSError):  # the reader hung up
                while piece := source.read(1 << 16):
                    outputfile.write(piece)
                    sent.append(len(piece))

        def log_message(self, format: str, *args: object) -> None:
            pass

    (tmp_path / "folder").mkdir()
    with (tmp_path / "model.safetensors").open("wb") as f:
        f.truncate(1 << 30)
    httpd = ThreadingHTTPServer(("127.0.0.1", 0), partial(Whole, directory=str(tmp_path)))
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{httpd.server_address[1]}"
    with pytest.raises(lazyckpt.FormatError, match=r"model.safetensors: the server does not serve parts of files"):
        lazyckpt.open(f"{url}/model.safetensors")
    with pytest.raises(lazyckpt.FormatError, match=r"folder: the server has a page there .* Name a file"):
        lazyckpt.open(f"{url}/folder")
    httpd.shutdown()
    httpd.server_close()
    assert sum(sent) < 1 << 27


@pytest.mark.parametrize("gap", [0, 64, 1 << 20])
@pytest.mark.parametrize("key", [(slice(0, 2), slice(None, None, 8)), (slice(None), 3), (slice(2, 5),)])
def test_explain_counts_what_is_read_between_runs(tmp_path: Path, gap: int, key: Any) -> None:
    torch.save({"w": torch.randn(20, 40)}, tmp_path / "x.pt")
    view, counts = opened(tmp_path / "x.pt", gap=gap)
    told = int(re.search(r"\(([\d,]+) bytes read\)", view["w"].explain(key))[1].replace(",", ""))  # type: ignore[index]
    counts.clear()
    assert view["w"][key].numel() and counts.bytes == told


def test_options_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the shell, storage options are fsspec's own variables."""
    pytest.importorskip("aiohttp", reason="fsspec's http file system needs aiohttp")
    torch.save(TENSORS, tmp_path / "model.pt")

    class Guarded(Ranges):
        folder, asked = tmp_path, []

        def _answer(self, body: bool) -> None:
            if self.headers.get("X-Key") == "abc":
                super()._answer(body)
            else:
                self.send_error(403)

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Guarded)
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    url = f"http://127.0.0.1:{httpd.server_address[1]}/model.pt"
    refused = CliRunner().invoke(cli.app, ["ls", url])
    assert refused.exit_code == 2 and "403" in refused.stderr and refused.stderr.count("\n") == 1
    conf: dict[str, dict[str, object]] = {}
    fsspec.config.set_conf_env(conf, {"FSSPEC_HTTP": '{"client_kwargs": {"headers": {"X-Key": "abc"}}}'})
    monkeypatch.setitem(fsspec.config.conf, "http", conf["http"])
    let_in = CliRunner().invoke(cli.app, ["ls", url])
    httpd.shutdown()
    assert let_in.exit_code == 0, let_in.output
    assert all(name in let_in.stdout for name in TENSORS)


def test_an_object_that_fails_spoils_no_other(s3: Cloud) -> None:
    """Although tensors of several objects are read together."""
    names = {
        f"{letter}.{n}": f"model-0000{k}-of-00002.safetensors" for k, letter in ((1, "a"), (2, "b")) for n in range(9)
    }
    for file in set(names.values()):
        s3.put(f"m/{file}", save({name: torch.ones(50) for name, own in names.items() if own == file}))
    s3.put("m/model.safetensors.index.json", json.dumps({"weight_map": names}).encode())
    view = lazyckpt.open(s3.at("m"), storage_options=s3.options, cache=False)
    s3.server.set_fault("status", path="*00002-of-00002*", status=403)
    table = view.stats()
    for name in names:
        error = table[name].error
        assert (error is None) == name.startswith("a."), (name, error)
        assert error is None or "access is denied" in str(error)
