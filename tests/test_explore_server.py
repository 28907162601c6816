"""The explorer's server: who is answered, what, and that it holds under many clients."""

from __future__ import annotations

import gc
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
import torch
from safetensors.torch import load

import lazyckpt
from lazyckpt.explore import api as api_module
from lazyckpt.explore import server as server_module
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.connections import limited
from lazyckpt.explore.sending import bounded
from lazyckpt.explore.server import Server
from lazyckpt.explore.subject import Subject
from lazyckpt.exploring import Later, subject_of, title_of

from .hostility import deadline


@pytest.fixture
def model(tmp_path: Path) -> Path:
    torch.save({f"layers.{n}.weight": torch.full((4, 8), float(n)) for n in range(6)}, tmp_path / "model.pt")
    return tmp_path / "model.pt"


@pytest.fixture
def server(model: Path) -> Iterator[Server]:
    with lazyckpt.serve(model) as running:
        yield running


def base(server: Server) -> str:
    return f"http://127.0.0.1:{server.port}"


def test_the_address_leads_to_the_page(server: Server) -> None:
    with httpx.Client() as client:
        first = client.get(server.url)
        assert (first.status_code, first.headers["location"]) == (303, "./")
        cookie = first.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        page = client.get(base(server) + "/")
        assert page.status_code == 200
        assert server.token not in page.text
        for name in ("explorer.js", "explorer.css"):
            assert client.get(f"{base(server)}/assets/{name}").status_code == 200
        about = client.get(f"{base(server)}/api/v1/about").json()
        assert about["sides"][0]["tensors"] == 6


@pytest.mark.parametrize("way", ["query", "bearer", "basic", "path"])
def test_the_token_comes_in_four_ways(server: Server, way: str) -> None:
    url = f"{base(server)}/api/v1/about"
    options: dict[str, Any] = {}
    if way == "query":
        url += f"?token={server.token}"
    elif way == "bearer":
        options = {"headers": {"Authorization": f"Bearer {server.token}"}}
    elif way == "basic":
        options = {"auth": ("me", server.token)}
    else:
        url = f"{base(server)}/t/{server.token}/api/v1/about"
    assert httpx.get(url, **options).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Basic !!"},
        {"Cookie": "lazyckpt-1=x; bad\x01cookie"},
        {"Authorization": "Bearer \xfc"},
    ],
)
def test_without_the_token_nothing_is_shown(server: Server, headers: dict[str, str]) -> None:
    encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    for path in ("/", "/api/v1/about", "/assets/explorer.js", "/t/wrong/api/v1/about", "/api/v1/about?token=wrong"):
        answer = httpx.get(base(server) + path, headers=encoded)
        assert answer.status_code == 403
        assert "layers" not in answer.text


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "evil.example"}, 421),
        ({"Host": "127.0.0.1.evil.example"}, 421),
        ({"Host": "[::1"}, 421),
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"}, 403),
    ],
)
def test_pages_of_other_sites_are_refused(server: Server, headers: dict[str, str], status: int) -> None:
    known = {"Authorization": f"Bearer {server.token}", **headers}
    assert httpx.get(f"{base(server)}/api/v1/about", headers=known).status_code == status


@pytest.mark.parametrize("others", ['a={"b": 1}; ', "path=1; ", "a[b]=1; ", "a=x y; ", ""])
def test_cookies_of_other_ports_change_nothing(server: Server, others: str) -> None:
    own = f"lazyckpt-{server.port}={server.token}"
    url = f"{base(server)}/api/v1/about"
    assert httpx.get(url, headers={"Cookie": f'{others}{own}; c="d'}).status_code == 200
    assert httpx.get(url, headers={"Cookie": f"{others}x{own}"}).status_code == 403


def test_an_origin_that_is_no_address_is_refused(server: Server) -> None:
    headers = {"Origin": "http://[", "Authorization": f"Bearer {server.token}"}
    assert httpx.get(f"{base(server)}/api/v1/about", headers=headers).status_code == 403


@pytest.mark.parametrize("token", ["a b", "a/b", "a;b", "a?b", "a#b", "é", "a\r\nb", "%41"])
def test_a_token_is_a_part_of_an_address(model: Path, token: str) -> None:
    with pytest.raises(lazyckpt.DataError, match="token"):
        lazyckpt.serve(model, token=token)


def test_an_unknown_option_is_an_error_at_once(model: Path) -> None:
    with pytest.raises(TypeError, match="prot"):
        lazyckpt.serve(model, prot=80)


def test_an_error_of_opening_keeps_nothing_of_requests(tmp_path: Path) -> None:
    failing = Later(lambda: lazyckpt.open(tmp_path / "nothing"))
    depths = []
    for _ in range(3):
        with pytest.raises(lazyckpt.MissingFileError) as found:
            failing.get()
        depths.append(len(found.traceback))
    assert depths[1] == depths[2]


def test_rules_are_for_one_checkpoint_of_a_run(tmp_path: Path) -> None:
    for step in (1, 2):
        torch.save({"w": torch.full((2,), float(step))}, tmp_path / f"step_{step}.pt")
    assert subject_of(tmp_path).kind == "run"
    assert subject_of(tmp_path, options={"rules": {"w": "replicated"}}).kind == "checkpoint"


@pytest.mark.parametrize(
    ("source", "title"),
    [
        ("https://me:secret@host/a/model.pt?signature=secret", "https://host/a/model.pt"),
        ("runs/what?/a@b", "runs/what?/a@b"),
        ("hf://org/model@main", "hf://org/model@main"),
    ],
)
def test_titles_have_no_credentials(source: str, title: str) -> None:
    assert title_of(source) == title


def test_what_the_folder_needs_is_light() -> None:
    code = "import sys, lazyckpt.exploring, lazyckpt.recipes.parts, lazyckpt.recipes.unquantized\n"
    code += "sys.exit('torch.distributed.checkpoint' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize("path", ["api/v1/about", "hf/"])
def test_ctrl_c_does_not_wait_for_a_silent_storage(path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/model.safetensors"
        command = [sys.executable, "-m", "lazyckpt", "serve", "--token", "abc", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                with deadline():  # the address is printed at once, not when the server ends
                    page = process.stdout.readline().split(" at ")[1].strip()
                with pytest.raises(httpx.ReadTimeout):
                    httpx.get(page.replace("?token=abc", f"t/abc/{path}"), timeout=1)
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=60)
            finally:
                process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors


def test_only_reading_is_possible(server: Server) -> None:
    known = {"Authorization": f"Bearer {server.token}"}
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS"):
        assert httpx.request(method, f"{base(server)}/api/v1/about", headers=known).status_code == 405


@pytest.mark.parametrize(
    "path", ["/assets/../server.py", "/assets/%2e%2e/server.py", "/assets/..%2fserver.py", "//etc", "/t//x"]
)
def test_nothing_else_of_the_machine_is_served(server: Server, path: str) -> None:
    known = {"Authorization": f"Bearer {server.token}"}
    assert httpx.get(base(server) + path, headers=known).status_code in (403, 404)


def test_answers_are_compressed_and_not_sent_twice(server: Server) -> None:
    known = {"Authorization": f"Bearer {server.token}"}
    first = httpx.get(f"{base(server)}/assets/explorer.js", headers=known)
    assert first.headers["content-encoding"] == "gzip"
    assert "frame-ancestors 'none'" in first.headers["content-security-policy"]
    again = httpx.get(f"{base(server)}/assets/explorer.js", headers={**known, "If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


def test_what_cannot_be_opened_is_not_served(tmp_path: Path) -> None:
    before = threading.active_count()
    with pytest.raises(lazyckpt.MissingFileError, match="nothing"):
        lazyckpt.serve(tmp_path / "nothing")
    assert threading.active_count() == before


def test_errors_of_a_long_opening_are_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lazyckpt.exploring._SOON", 0)
    monkeypatch.setattr("lazyckpt.exploring.Later.start", lambda self: None)
    with lazyckpt.serve(tmp_path / "nothing") as server:
        answer = httpx.get(f"{base(server)}/t/{server.token}/api/v1/about")
    assert answer.status_code == 404
    assert json.loads(answer.content)["error"]["kind"] == "MissingFileError"


def test_a_port_in_use_is_told(server: Server, model: Path) -> None:
    with pytest.raises(lazyckpt.DataError, match="in use"):
        lazyckpt.serve(model, port=server.port)


@pytest.mark.slow
def test_a_hundred_clients_get_the_same_bytes(server: Server) -> None:
    url = f"{base(server)}/t/{server.token}/api/v1/tree"
    wanted = httpx.get(url).content

    def ask(_: int) -> bool:
        with httpx.Client(timeout=60, verify=False) as client:
            return all(client.get(url).content == wanted for _ in range(3))

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(ask, range(100)))


def test_an_answer_that_was_sent_is_released_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.rand(256, 256)}, tmp_path / "large.pt")
    sent: list[weakref.ref[Any]] = []

    class Body(bytearray):
        """Bytes to which there are weak references."""

    async def noted(response: Any, room: Any) -> Any:
        response.body = Body(response.body)
        sent.append(weakref.ref(response.body))
        return await bounded(response, room)

    monkeypatch.setattr(server_module, "bounded", noted)
    gc.disable()  # it would release what refers to itself
    try:
        with lazyckpt.serve(tmp_path / "large.pt") as running:
            for rows in (200, 256):
                url = f"{running.address}api/v1/tensor/tile?name=w&rows={rows}&cols=256&how=mean"
                assert len(httpx.get(url).content) > 128 << 10
            until = time.monotonic() + 10
            while any(one() is not None for one in sent) and time.monotonic() < until:
                time.sleep(0.01)
            assert [one() for one in sent] == [None, None]
    finally:
        gc.enable()


def test_an_answer_that_nobody_waits_for_is_not_computed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, ended = threading.Event(), threading.Event()

    class Slow(Explorer):
        def answer(self, path, values, wanted=lambda: True):  # type: ignore[no-untyped-def]
            if path != "slow":
                return super().answer(path, values, wanted)
            started.set()
            while wanted():
                threading.Event().wait(0.01)
            ended.set()
            return super().answer("about", {}, lambda: True)

    explorer = Slow(Subject(lazyckpt.open(model)))
    with Server(lambda: explorer) as server:
        url = f"{base(server)}/t/{server.token}/api/v1/slow"
        with pytest.raises(httpx.ReadTimeout):
            httpx.get(url, timeout=1)
        assert started.wait(60)
        assert ended.wait(60)


# -- connections


def asked(server: Server, *, path: str, close: bool = False) -> bytes:
    """What a plain socket gets as the answer to a GET; with ``close``, it closes its side after asking."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as one:
        one.sendall(f"GET /t/{server.token}/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        if close:
            one.shutdown(socket.SHUT_WR)
        found = b""
        while data := one.recv(1 << 16):
            found += data
    return found


def test_a_client_that_closes_its_side_is_answered(server: Server) -> None:
    path = "hf/model.safetensors"
    whole = httpx.get(server.address + path).content
    for _ in range(5):
        assert asked(server, path=path, close=True).endswith(b"\r\n\r\n" + whole)


def test_connections_are_limited(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "limited", lambda: limited(most=3, patience=0.5))
    with lazyckpt.serve(model) as server:
        idle = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(3)]
        idle[1].sendall(b"GET / HTTP/1.1\r\nHost: loc")  # a header that never ends
        answer = asked(server, path="api/v1/about")
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"connections" in answer.partition(b"\r\n\r\n")[2]
        for one in idle:  # the server ends them
            assert one.recv(100) == b""
            one.close()
        assert asked(server, path="api/v1/about").startswith(b"HTTP/1.1 200 ")


def test_a_client_that_takes_nothing_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "limited", lambda: limited(stalled=0.5))
    torch.save({"w": torch.zeros(16 << 20, dtype=torch.uint8)}, tmp_path / "model.pt")
    with lazyckpt.serve(tmp_path / "model.pt") as server, socket.socket() as one:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.settimeout(60)
        one.connect(("127.0.0.1", server.port))
        one.sendall(f"GET /t/{server.token}/hf/model.safetensors HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        threading.Event().wait(2)
        found = 0
        with suppress(ConnectionResetError):
            while data := one.recv(1 << 16):
                found += len(data)
        assert found < 16 << 20


@pytest.fixture
def proxy(server: Server) -> Iterator[str]:
    """A proxy that has the server below a path of its own, and strips it: as jupyter-server-proxy does."""
    below = "/user/me/proxy/8765"

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path.startswith(f"{below}/"), self.path
            there = http.client.HTTPConnection("127.0.0.1", server.port)
            there.request("GET", self.path.removeprefix(below), headers=dict(self.headers.items()))
            answer = there.getresponse()
            body = answer.read()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Proxy) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{running.server_port}{below}/"
        running.shutdown()


def test_all_links_work_below_the_path_of_a_proxy(server: Server, proxy: str) -> None:
    for begin in (f"{proxy}?token={server.token}", f"{proxy}t/{server.token}"):
        with httpx.Client(follow_redirects=True) as client:
            page = client.get(begin)
            assert page.status_code == 200
            links = re.findall(r'(?:href|src)="([^"]+)"', page.text)
            base = json.loads(re.findall(r'id="explorer-host">(.*?)</script>', page.text)[0])["http"]["base"]
            for link in (*links, f"{base}/about"):
                if not link.startswith("data:"):
                    assert client.get(page.url.join(link)).status_code == 200
            for folder in ("hf/", "zarr/"):
                assert client.get(page.url.join(folder.rstrip("/"))).url == page.url.join(folder)
                (link, *_) = re.findall('href="([^"]+)"', client.get(page.url.join(folder)).text)
                assert client.get(page.url.join(folder).join(link)).status_code == 200


# -- options


def test_options_that_change_nothing_are_refused(model: Path) -> None:
    view = lazyckpt.open(model)
    for options in ({"tag": "global_step3"}, {"format": "torch"}, {"cache": False}):
        with pytest.raises(lazyckpt.DataError, match=next(iter(options))):
            lazyckpt.serve(view, **options)
    with lazyckpt.serve(view, model, format="torch", dtype=torch.bfloat16) as server:
        found = load(httpx.get(server.address + "hf/model.safetensors").content)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    "options",
    [
        {"rename": "nonsense"},
        {"dtype": torch.int8},
        {"dtype": "bf16"},
        {"dequantize": True, "rename": "nonsense"},
        {"max_shard_size": "large"},
    ],
)
def test_options_that_do_not_fit_are_told_at_once(model: Path, options: dict[str, Any]) -> None:
    with pytest.raises((lazyckpt.LazyckptError, ValueError)):
        lazyckpt.serve(model, **options)


# -- names


@pytest.mark.parametrize(
    "name", ["", "..", "a/../b", "%2e", "a?b#c", "a\nb", "\u202egnp.exe", "x" * 10_000, "é" * 10_000]
)
def test_any_name_is_found(tmp_path: Path, name: str) -> None:
    torch.save({name: torch.arange(3.0), "other": torch.zeros(2)}, tmp_path / "model.pt")
    with lazyckpt.serve(tmp_path / "model.pt") as server:
        for path in ("tensor", "tensor/values"):
            answer = httpx.get(f"{server.address}api/v1/{path}", params={"name": name})
            assert answer.status_code == 200, answer.text
        assert torch.equal(load(httpx.get(server.address + "hf/model.safetensors").content)[name], torch.arange(3.0))
        (path,) = (
            path
            for path, node in httpx.get(server.address + "zarr/zarr.json")
            .json()["consolidated_metadata"]["metadata"]
            .items()
            if node["node_type"] == "array" and node["shape"] == [3]
        )
        assert httpx.get(f"{server.address}zarr/{quote(path)}/c/0").content == torch.arange(3.0).numpy().tobytes()


# -- requests that would cost too much


def test_unknown_parameters_take_no_memory(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "_KEPT", 1 << 20)
    explorer = Explorer(Subject(lazyckpt.open(model)))
    tracemalloc.start()
    try:
        for n in range(200):
            explorer.answer("tree/totals", {"nothing": f"{n} " + "x" * 100_000})
        assert tracemalloc.get_traced_memory()[0] < 4 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("path", "values"),
    [
        ("tensor/values", {"name": "long", "wrap": "1", "c0": "0", "c1": "0"}),
        ("architecture/memory", {"pp": "1000000"}),
    ],
)
def test_what_would_take_long_lists_is_refused(tmp_path: Path, path: str, values: dict[str, str]) -> None:
    torch.save({"long": torch.zeros(100_000), "layers.0.weight": torch.zeros(4)}, tmp_path / "model.pt")
    answer = Explorer(Subject(lazyckpt.open(tmp_path / "model.pt"))).answer(path, values)
    assert answer.status == 400
    assert json.loads(answer.body)["error"]["kind"] == "DataError"
