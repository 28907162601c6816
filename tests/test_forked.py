"""Stores of obstore in forked processes: a helper process sends their requests."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch.utils import data

import lazyckpt
from lazyckpt.core.index import FileInfo
from lazyckpt.errors import ChangedFileError, DataError, MissingFileError
from lazyckpt.formats import opening
from lazyckpt.io.storage import forked
from lazyckpt.io.storage.repeating import Transient

pytest.importorskip("obstore")
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork"),
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::lazyckpt.errors.CredentialsWarning"),
]

from obstore.exceptions import NotFoundError  # noqa: E402

from .forked_stores import Plain, Strange  # noqa: E402
from .servers.fixtures import Cloud  # noqa: E402
from .workers import Slices, Stored  # noqa: E402

DATA = bytes(range(256)) * 40_000  # 10 MB
LONGEST = 60  # seconds for a child; one that hangs is killed


class _Serve(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if self.path != "/data":
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        tag = hashlib.md5(DATA).hexdigest()
        wanted = self.headers.get("Range")
        start, stop = 0, len(DATA)
        if wanted:
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            start, stop = int(first), int(last) + 1
        self.send_response(206 if wanted else 200)
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{tag}"')
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(DATA)}")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(DATA[start:stop])

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Serve)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


@pytest.fixture
def store(url: str) -> Plain:
    """A store that this process has used."""
    store = Plain(url)
    assert bytes(store.read("data", 5, 3)) == DATA[5:8]
    assert store.pid("data") == os.getpid()
    return store


def in_child(do: Callable[[], Any]) -> Any:
    """Return what a function returns in a forked child, as JSON; raise AssertionError with what it raises."""
    source, target = os.pipe()
    child = os.fork()
    if not child:
        os.close(source)
        try:
            told = json.dumps([True, do()])
        except BaseException:
            told = json.dumps([False, traceback.format_exc()])
        os.write(target, told.encode())
        os._exit(0)
    os.close(target)
    timer = threading.Timer(LONGEST, os.kill, (child, signal.SIGKILL))
    timer.start()
    try:
        with os.fdopen(source, "rb") as pipe:
            told = pipe.read().decode()
    finally:
        timer.cancel()
        os.waitpid(child, 0)
    assert told, "the child hung or was killed"
    done, value = json.loads(told)
    assert done, value
    return value


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def ends(pid: int) -> bool:
    """Wait until a process has ended; return whether it has."""
    for _ in range(500):
        if not is_running(pid):
            return True
        time.sleep(0.02)
    return False


def test_a_forked_child_reads(store: Plain) -> None:
    def child() -> Any:
        whole = bytes(store.read("data", 0, len(DATA)))
        assert whole == DATA
        info = store.stat("data")
        assert info.size == len(DATA)
        assert list(store.list("")) == ["folder"]
        return [os.getpid(), store.pid("data"), Plain(store.url).pid("data"), info.version]

    own, helper, again, version = in_child(child)
    assert helper == again, "one helper for all stores"
    assert helper not in (own, os.getpid())
    assert version == store.stat("data").version
    assert ends(helper)


def test_a_child_of_a_process_that_did_not_use_obstore_needs_no_helper(url: str) -> None:
    code = (
        "import os, sys\nfrom tests.forked_stores import Plain\nstore = Plain(sys.argv[1])\nchild = os.fork()\n"
        "if not child:\n    assert store.pid('data') == os.getpid()\n"
        "    assert bytes(store.read('data', 1, 2)) == b'\\1\\2'\n"
        "    os._exit(7)\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7"
    )
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", code, url], cwd=root, check=True, timeout=LONGEST)


def test_errors_are_the_same(store: Plain) -> None:
    def child() -> None:
        with pytest.raises(MissingFileError, match=r"missing: not there") as missing:
            store._stat("missing")
        assert missing.value.errno == errno.ENOENT
        with pytest.raises((NotFoundError, FileNotFoundError)) as here:
            store._stat("nowhere")
        assert "nowhere" in str(here.value)
        with pytest.raises(Exception, match="strange: strange"):
            store._stat("strange")
        with pytest.raises(AttributeError):
            forked._running().call(store, "_nothing", ("data",), {})
        assert bytes(store.read("data", 7, 2)) == DATA[7:9]

    in_child(child)
    with pytest.raises(Strange):
        store._stat("strange")


def test_pins_hold(store: Plain) -> None:
    good, bad = store.stat("data"), FileInfo(len(DATA), 0, '"other"')

    def child() -> list[str]:
        found = []
        for pin in (good, bad, good):
            own = store._with({"data": pin})
            try:
                own.read("data", 0, 4)
                found.append("read")
            except OSError as e:
                found.append(type(e).__name__)
        return found

    assert in_child(child) == ["read", "ChangedFileError", "read"]


def test_many_threads(store: Plain) -> None:
    def child() -> int:
        def one(n: int) -> bool:
            offset, length = n * 9973 % (len(DATA) - 70_000), 1 + n * 7919 % 65_536
            return bytes(store.read("data", offset, length)) == DATA[offset : offset + length]

        with ThreadPoolExecutor(24) as threads:
            assert all(threads.map(one, range(400)))
        return store.pid("data")

    assert ends(in_child(child))


def test_a_chain_of_forks(store: Plain) -> None:
    """Each process has a helper of its own, also one that forks while its helper runs."""

    def grandchild() -> int:
        assert bytes(store.read("data", 100, 10)) == DATA[100:110]
        return store.pid("data")

    def child() -> list[int]:
        first = store.pid("data")
        second = in_child(grandchild)
        assert store.pid("data") == first
        assert bytes(store.read("data", 3, 4)) == DATA[3:7]
        return [os.getpid(), first, second]

    pids = in_child(child)
    assert len(set(pids)) == 3
    assert all(ends(pid) for pid in pids)


def test_a_killed_child_leaves_no_helper(store: Plain) -> None:
    source, target = os.pipe()
    child = os.fork()
    if not child:
        os.write(target, str(store.pid("data")).encode())
        signal.pause()
    helper = int(os.read(source, 100))
    assert is_running(helper)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert ends(helper)


def test_a_grandchild_that_lives_on_does_not_hold_the_helper(store: Plain) -> None:
    source, target = os.pipe()
    child = os.fork()
    if not child:
        helper = store.pid("data")
        grandchild = os.fork()
        if not grandchild:
            signal.pause()
        os.write(target, f"{helper} {grandchild}".encode())
        os._exit(0)
    helper, grandchild = map(int, os.read(source, 100).split())
    os.waitpid(child, 0)
    try:
        assert ends(helper)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_helper_that_dies_is_replaced(store: Plain) -> None:
    def child() -> int:
        first = store.pid("data")
        helper = forked._running()
        os.kill(first, signal.SIGSTOP)
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(store._stat, "data")
            while not helper._waiting:
                time.sleep(0.01)
            os.kill(first, signal.SIGKILL)
            with pytest.raises(Transient, match="helper process"):
                waiting.result()
        assert bytes(store.read("data", 0, 2)) == DATA[:2]
        assert store.pid("data") != first
        return first

    in_child(child)


def test_what_a_library_prints_is_no_answer(store: Plain) -> None:
    assert in_child(lambda: [store.print("to nobody"), store.print("data")]) == ["to nobody", "data"]


def test_credentials_are_seen_by_nobody(url: str) -> None:
    """They are neither in the command line nor in the environment of the helper."""
    store = Plain(url, {"default_headers": {"x-token": "hush-hush"}})
    store.read("data", 0, 1)

    def child() -> bool:
        pid = store.pid("data")
        for name in ("cmdline", "environ"):
            assert b"hush-hush" not in Path(f"/proc/{pid}/{name}").read_bytes()
        return bytes(store.read("data", 0, 3)) == DATA[:3]

    assert in_child(child)


def test_options_that_cannot_be_sent(store: Plain) -> None:
    def child() -> bool:
        own = Plain(store.url)
        own._options["provider"] = lambda: "secret"
        with pytest.raises(DataError, match=r"cannot be sent to the helper process .* 'spawn'") as error:
            own.read("data", 0, 1)
        assert "secret" not in str(error.value)
        return bytes(store.read("data", 0, 3)) == DATA[:3]

    assert in_child(child)


def test_without_an_interpreter(store: Plain) -> None:
    def child() -> None:
        sys.executable = ""
        with pytest.raises(DataError, match="Start the workers with the method 'spawn'"):
            store.read("data", 0, 1)

    in_child(child)


def test_the_helper_does_not_import_torch() -> None:
    code = "import lazyckpt.io.storage.forked, sys; assert 'torch' not in sys.modules"
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-c", code], cwd=root, check=True, timeout=LONGEST)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(method: str, store: Plain) -> None:
    loader = data.DataLoader(
        Stored(store), batch_size=4, num_workers=2, multiprocessing_context=method, timeout=LONGEST
    )
    found = torch.cat([batch.flatten() for batch in loader])
    assert bytes(found.tolist()) == DATA[:32_000]
    assert pickle.loads(pickle.dumps(store)).url == store.url


# -- views


MODEL = {"a": torch.arange(240_000, dtype=torch.float32).view(240, 1000), "b": torch.arange(7)}


def put_model(cloud: Cloud, name: str = "run/model.safetensors") -> str:
    return cloud.put(name, save(MODEL))


def test_a_view_in_a_forked_child(cloud: Cloud) -> None:
    """Of every kind of store: reads through the view of the parent, and a view that the child opens."""
    url = put_model(cloud)
    view = lazyckpt.open(url, storage_options=cloud.options)
    assert torch.equal(view["a"][3], MODEL["a"][3])

    def child() -> list[int]:
        before = view.io.requests
        assert torch.equal(view["a"][5:100:7], MODEL["a"][5:100:7])
        assert all(torch.equal(tensor, MODEL[name]) for name, tensor in view.to().items())
        own = lazyckpt.open(url, storage_options=cloud.options, cache=False)
        assert torch.equal(own["b"][...], MODEL["b"])
        if cloud.kind != "http":
            folder = lazyckpt.open(url.rpartition("/")[0], storage_options=cloud.options, cache=False)
            assert torch.equal(folder["a"][1], MODEL["a"][1])
        with pytest.raises(MissingFileError):
            lazyckpt.open(cloud.at("run/nothing.safetensors"), storage_options=cloud.options, cache=False)
        return [view.io.requests - before, view.io.bytes]

    requests, nbytes = in_child(child)
    assert requests >= 2, "the child counts its own requests"
    assert nbytes >= 960_000


def test_a_replaced_object_in_a_forked_child(s3: Cloud) -> None:
    view = lazyckpt.open(put_model(s3), storage_options=s3.options)
    assert torch.equal(view["a"][3], MODEL["a"][3])
    s3.put("run/model.safetensors", save({name: tensor + 1 for name, tensor in MODEL.items()}))

    def child() -> None:
        with pytest.raises(ChangedFileError):
            view["a"][5]

    in_child(child)


@pytest.mark.slow
def test_children_of_a_busy_process_use_the_index_cache(
    s3: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks while another thread opens, keeps indexes and reads: a lock that it holds must not be one of the child."""
    monkeypatch.setenv("LAZYCKPT_CACHE", "1")
    monkeypatch.setenv("LAZYCKPT_CACHE_DIR", str(tmp_path / "cache"))
    url = put_model(s3).rpartition("/")[0]

    def use() -> bool:
        opening._indexes.clear()
        with lazyckpt.open(url, storage_options=s3.options) as view:
            return torch.equal(view["a"][3:5], MODEL["a"][3:5])

    def child() -> bool:
        done = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True)
        return use() and done.stdout == "1\n"

    assert use() and list((tmp_path / "cache" / "index").glob("*.index"))
    stop = threading.Event()
    other = threading.Thread(target=lambda: [use() for _ in iter(stop.is_set, True)])
    other.start()
    try:
        assert all(in_child(child) for _ in range(4))
    finally:
        stop.set()
        other.join()


def test_failed_requests_of_a_helper_are_repeated(s3: Cloud) -> None:
    view = lazyckpt.open(put_model(s3), storage_options=s3.options)
    assert torch.equal(view["a"][3], MODEL["a"][3])

    def child() -> int:
        assert torch.equal(view["a"][7], MODEL["a"][7])
        return view.io.retries

    s3.server.set_fault("status", times=2, status=503)
    assert in_child(child) == 2

    def killed() -> bool:
        assert torch.equal(view["a"][8], MODEL["a"][8])
        first = forked._running()._process
        first.kill()
        first.wait()
        assert torch.equal(view["a"][9], MODEL["a"][9])
        return forked._running()._process.pid != first.pid

    assert in_child(killed), "another helper has read the second row"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_data_loader_over_a_bucket(method: str, s3: Cloud) -> None:
    view = lazyckpt.open(put_model(s3), storage_options=s3.options)
    assert torch.equal(view["a"][3], MODEL["a"][3])
    loader = data.DataLoader(
        Slices(view["a"]), batch_size=3, num_workers=2, multiprocessing_context=method, timeout=LONGEST
    )
    found = torch.cat(list(loader))
    assert torch.equal(found, MODEL["a"].view(24, 10, 1000)[:, :2])


def test_requests_of_a_helper_are_concurrent(s3: Cloud) -> None:
    big = torch.arange(4_000_000, dtype=torch.float32)
    view = lazyckpt.open(s3.put("big.safetensors", save({"big": big})), storage_options=s3.options)
    assert torch.equal(view["big"][3:5], big[3:5])
    s3.server.set_delay(0.05)
    s3.server.reset()

    def child() -> bool:
        return torch.equal(view["big"].to(), big)

    assert in_child(child)
    assert s3.server.counts().concurrency >= 4
