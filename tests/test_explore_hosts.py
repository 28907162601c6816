"""The explorer's report and widget: what they hold and answer."""

from __future__ import annotations

import base64
import gzip
import json
import queue
import re
import secrets
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.query import parameters
from lazyckpt.explore.fitting import key_of
from lazyckpt.explore.subject import Subject, Wanted
from lazyckpt.explore.widget import Channel

HOSTILE = "</script><script>alert(1)</script>\n\x1b[31m\u202e"


@pytest.fixture
def view(tmp_path: Path) -> lazyckpt.CheckpointView:
    weights = {f"layers.{n}.weight": torch.randn(4, 8) for n in range(3)} | {HOSTILE: torch.ones(2)}
    torch.save(weights, tmp_path / "model.pt")
    return lazyckpt.open(tmp_path / "model.pt")


def answers_in(path: Path) -> dict[str, Any]:
    text = path.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="explorer-host">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    held = json.loads(found[1])["answers"]
    return {key: gzip.decompress(base64.b64decode(body)) for key, body in held.items()}


def test_a_report_holds_what_the_explorer_answers(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    written = view.report(tmp_path / "out.html")
    found = answers_in(tmp_path / "out.html")
    assert written.answers == len(found)
    assert written.nbytes == (tmp_path / "out.html").stat().st_size
    assert json.loads(found["about"]) == json.loads(Explorer(Subject(view)).answer("about", {}).body)
    assert "tree" in found


def test_names_cannot_leave_their_place(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    view.report(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "<script>alert" not in text  # it is compressed inside of an answer, and escaped in requests
    assert text.count("</script>") == 2


def test_a_report_keeps_to_its_size(tmp_path: Path) -> None:
    torch.save({secrets.token_hex(20): torch.ones(1) for _ in range(500)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    whole = view.report(tmp_path / "whole.html", max_size="5MiB")
    with pytest.raises(lazyckpt.DataError):
        view.report(tmp_path / "small.html", max_size=1000)
    assert not (tmp_path / "small.html").exists()
    small = view.report(tmp_path / "small.html", max_size=whole.nbytes - 8000)
    assert small.nbytes <= whole.nbytes - 8000
    assert small.left_out > whole.left_out


def test_a_report_never_replaces_the_checkpoint(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    before = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "link.html").symlink_to(tmp_path / "model.pt")
    for name in ("model.pt", "link.html", "."):
        with pytest.raises(lazyckpt.DestinationError):
            view.report(tmp_path / name)
    assert (tmp_path / "model.pt").read_bytes() == before


def test_requests_are_named_as_browsers_name_them() -> None:
    wanted = Wanted("tensor", {"name": "a b/ü#?%&=!'()*~", "state": "", "dim": "1"})
    assert key_of(wanted) == "tensor?dim=1&name=a%20b%2F%C3%BC%23%3F%25%26%3D!'()*~"
    assert key_of(Wanted("tensor", {"name": "\ud800"})) == "tensor?name=%ED%A0%80"


def test_parameters_may_hold_what_utf8_has_not() -> None:
    assert parameters("name=%ED%A0%80+a&of=") == {"name": "\ud800 a", "of": ""}
    assert parameters("name=%FF") == {"name": "\ufffd"}  # no text: read as browsers read it


def test_a_widget_answers_messages(view: lazyckpt.CheckpointView) -> None:
    sent: queue.Queue[tuple[dict[str, Any], bytes]] = queue.Queue()
    explorer = Explorer(Subject(view))
    channel = Channel(explorer, lambda content, buffers: sent.put((content, buffers[0])))
    for number, request in enumerate(("about", "tree?state=stored", "tree?state=none", "nothing")):
        channel.receive({"id": number, "request": request})
    channel.receive("no message")
    channel.receive({"cancel": 99})
    messages = [sent.get(timeout=20) for _ in range(4)]
    found = {content["id"]: (content["status"], body) for content, body in messages}
    assert [found[n][0] for n in range(4)] == [200, 200, 404, 404]
    assert found[0][1] == explorer.answer("about", {}).body


def test_the_widget_is_one_of_anywidget(view: lazyckpt.CheckpointView) -> None:
    anywidget = pytest.importorskip("anywidget")
    assert isinstance(view.widget(), anywidget.AnyWidget)
