"""Bytes that lie in local files as they are: the system sends them, and no whole answer has those of a changed file."""

from __future__ import annotations

import errno
import os
import random
import socket
import tarfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.explore import connections, sending
from lazyckpt.explore.server import Server
from lazyckpt.io.system import SENDS_FILES

pytestmark = pytest.mark.skipif(not SENDS_FILES, reason="only Linux sends files without copies")
MIB = 1 << 20


class Sent:
    """What the system was asked to send, and how much it did."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.nbytes = 0
        self._send = os.sendfile
        monkeypatch.setattr(os, "sendfile", self)

    def __call__(self, *args: Any) -> int:
        done = self._send(*args)
        self.nbytes += done
        return done


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> Sent:
    return Sent(monkeypatch)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tensors that lie in the file as they are, between one that is transposed, an empty one, and small ones."""
    path = tmp_path_factory.mktemp("stored") / "model.pt"
    values = torch.arange(5 * MIB // 4, dtype=torch.int32)
    tensors = {"a": values, "b": values[: MIB // 2].reshape(512, 1024).t(), "c": torch.zeros(0), "d": values[:9]}
    torch.save({**tensors, "e": values.flip(0), "f": torch.ones(3)}, path)
    return path


@pytest.fixture(scope="module")
def converted(source: Path) -> bytes:
    lazyckpt.open(source).to_safetensors(source.parent / "out", progress=False)
    return (source.parent / "out" / "model.safetensors").read_bytes()


@pytest.fixture
def server(source: Path) -> Iterator[Server]:
    with lazyckpt.serve(source) as running:
        yield running


def url(server: Server) -> str:
    return f"{server.address}hf/model.safetensors"


def test_stored_bytes_are_sent_by_the_system(server: Server, converted: bytes, sent: Sent) -> None:
    assert httpx.get(url(server)).content == converted
    assert 9 * MIB < sent.nbytes < len(converted)


def test_ranges_begin_and_end_anywhere(
    server: Server, converted: bytes, sent: Sent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sending, "_LEAST", 100)
    monkeypatch.setattr(sending, "_AHEAD", 3 * MIB)
    monkeypatch.setattr(sending, "_PIECE", 4096)

    def read(seed: int) -> None:
        chosen = random.Random(seed)
        with httpx.Client() as client:
            for _ in range(10):
                begin = chosen.choice((0, 1, chosen.randrange(len(converted))))
                end = min(len(converted), begin + chosen.choice((1, 4095, 4097, 100_000, 4 * MIB, 1 << 40)))
                answer = client.get(url(server), headers={"Range": f"bytes={begin}-{end - 1}"})
                assert answer.content == converted[begin:end]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(read, range(8)))
    assert sent.nbytes > MIB


def test_slow_clients_and_clients_that_leave(server: Server, converted: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many more than there are threads: none of them keeps a thread that others wait for."""
    monkeypatch.setattr(connections, "_POLLED", 2000)
    about = f"GET /t/{server.token}/hf/model.safetensors HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    descriptors = len(os.listdir("/proc/self/fd"))
    some: list[socket.socket] = []
    for _ in range(20):
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.connect(("127.0.0.1", server.port))
        one.sendall(about.encode())
        some.append(one)
    before = time.monotonic()
    assert httpx.get(url(server), timeout=60).content == converted  # they do not stop the others
    assert time.monotonic() - before < 10
    for one in some[::2]:
        one.close()
    for one in some[1::2][:2]:
        found = bytearray()
        while data := one.recv(MIB):
            found += data
        assert bytes(found).partition(b"\r\n\r\n")[2] == converted
    for one in some[1::2]:
        one.close()
    for _ in range(200):
        if len(os.listdir("/proc/self/fd")) <= descriptors + 4:
            break
        httpx.get(f"{server.address}hf/config.json")
    assert len(os.listdir("/proc/self/fd")) <= descriptors + 4


def test_a_zarr_chunk_is_sent_by_the_system(server: Server, source: Path, sent: Sent) -> None:
    values = torch.load(source)["a"].numpy()
    answer = httpx.get(f"{server.address}zarr/weights/a/c/0")
    assert answer.status_code == 200
    assert np.array_equal(np.frombuffer(answer.content, np.int32), values[: len(answer.content) // 4])
    assert sent.nbytes > MIB


def test_a_member_of_an_archive_is_sent_by_the_system(source: Path, converted: bytes, sent: Sent) -> None:
    packed = source.parent / "run.tar"
    with tarfile.open(packed, "w") as archive:
        archive.add(source, "run/model.pt")
    with lazyckpt.serve(packed) as server:
        assert httpx.get(url(server)).content == converted
    assert sent.nbytes > 9 * MIB


def test_files_that_the_system_cannot_send_are_read(
    server: Server, converted: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*args: Any) -> int:
        raise OSError(errno.EINVAL, "no such call for this file system")

    monkeypatch.setattr(os, "sendfile", refused)
    assert httpx.get(url(server)).content == converted


@pytest.mark.parametrize("fault", ["written", "shorter"])
def test_no_whole_answer_has_bytes_of_a_changed_file(
    tmp_path: Path, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "model.pt"
    torch.save({"w": torch.zeros(24 * MIB, dtype=torch.uint8)}, path)
    with lazyckpt.serve(path) as server, httpx.stream("GET", url(server), timeout=20) as answer:
        pieces = answer.iter_raw(MIB)
        next(pieces)
        with open(path, "r+b") as file:
            if fault == "shorter":
                file.truncate(2 * MIB)
            else:
                file.seek(20 * MIB)
                file.write(b"1" * MIB)
        with pytest.raises(httpx.RemoteProtocolError, match=r"incomplete|peer closed"):
            list(pieces)
        if fault == "shorter":  # before an answer begins, the error is the answer
            again = httpx.get(url(server), headers={"Range": f"bytes={MIB}-"})
            assert again.status_code == 500 and "Open the checkpoint again" in again.text
    assert [record.message.split(" is ")[0] for record in caplog.records] == [str(path)]


def test_an_error_of_the_disk_names_the_file(
    server: Server, source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*args: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "sendfile", failing)
    with pytest.raises(httpx.RemoteProtocolError):
        httpx.get(url(server))
    assert len(caplog.messages) == 1 and caplog.messages[0].startswith(f"{source}: ")


def test_a_disk_that_does_not_answer_stops_nothing_else(
    server: Server, converted: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even if those who wait for it leave, or the server is closed."""
    answers, begun, send = threading.Event(), threading.Semaphore(0), os.sendfile

    def slow(*args: Any) -> int:
        begun.release()
        answers.wait(20)
        return send(*args)

    monkeypatch.setattr(os, "sendfile", slow)
    asked = f"GET /t/{server.token}/hf/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
    some = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(3)]
    for one in some:
        one.sendall(asked)
    assert begun.acquire(timeout=10) and begun.acquire(timeout=10)
    for one in some[:2]:
        one.close()
    assert httpx.get(f"{server.address}api/v1/about").status_code == 200
    assert httpx.get(url(server), headers={"Range": "bytes=-100"}).content == converted[-100:]
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.15  # nothing turns in circles
    threading.Timer(1.3, answers.set).start()
    server.close()
    assert not server.running and not caplog.messages
    some[2].close()


def test_a_broken_request_ends_its_answer(server: Server, converted: bytes, caplog: pytest.LogCaptureFixture) -> None:
    about = f"GET /t/{server.token}/hf/model.safetensors HTTP/1.1\r\nHost: localhost\r\n"
    found = bytearray()
    with socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(20)
        one.connect(("127.0.0.1", server.port))
        one.sendall(f"{about}Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n".encode())
        found += one.recv(4096)
        one.sendall(b"no number\r\n")
        with suppress(ConnectionResetError):
            while data := one.recv(MIB):
                found += data
    assert found.startswith(b"HTTP/1.1 200") and len(found) < len(converted)
    assert not [record for record in caplog.records if record.exc_info]


def test_all_requests_of_a_client_that_closes_its_side_are_answered(server: Server, converted: bytes) -> None:
    about = f"GET /t/{server.token}/hf/model.safetensors HTTP/1.1\r\nHost: localhost\r\nRange: bytes="
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        one.sendall("".join(f"{about}{span}\r\n\r\n" for span in ("0-9", "1-", "2-5")).encode())
        one.shutdown(socket.SHUT_WR)
        found = b"".join(iter(lambda: one.recv(MIB), b""))
    answers = [answer.partition(b"\r\n\r\n")[2] for answer in found.split(b"HTTP/1.1 206")[1:]]
    assert answers == [converted[:10], converted[1:], converted[2:6]]
