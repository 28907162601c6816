"""The explorer's server: who is answered, what, and that it holds under many clients."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.server import Server
from lazyckpt.explore.subject import Subject
from lazyckpt.exploring import Later, subject_of, title_of


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
        command = [sys.executable, "-u", "-m", "lazyckpt", "serve", "--token", "abc", url]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            page = process.stdout.readline().split(" at ")[1].strip()
            with pytest.raises(httpx.ReadTimeout):
                httpx.get(page.replace("?token=abc", f"t/abc/{path}"), timeout=1)
            process.send_signal(signal.SIGINT)
            try:
                _, errors = process.communicate(timeout=30)
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


def test_errors_of_opening_are_answers(tmp_path: Path) -> None:
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
        with httpx.Client(timeout=60) as client:
            return all(client.get(url).content == wanted for _ in range(3))

    with ThreadPoolExecutor(100) as pool:
        assert all(pool.map(ask, range(100)))


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
        assert started.wait(5)
        assert ended.wait(5)
