"""The explorer's report and widget: what they hold and answer."""

from __future__ import annotations

import base64
import gzip
import json
import math
import queue
import re
import secrets
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lazyckpt
from lazyckpt.explore.api import Explorer
from lazyckpt.explore.fitting import key_of
from lazyckpt.explore.query import parameters
from lazyckpt.explore.subject import Subject, Wanted
from lazyckpt.explore.widget import Channel

HOSTILE = "</script><script>alert(1)</script>\n\x1b[31m\u202e"


@pytest.fixture
def view(tmp_path: Path) -> lazyckpt.CheckpointView:
    weights = {f"layers.{n}.weight": torch.randn(4, 8) for n in range(3)} | {HOSTILE: torch.ones(2)}
    torch.save(weights, tmp_path / "model.pt")
    return lazyckpt.open(tmp_path / "model.pt")


def host_of(path: Path) -> Any:
    text = path.read_text("utf-8")
    found = re.search(r'<script type="application/json" id="explorer-host">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def answers_in(path: Path) -> dict[str, Any]:
    held = host_of(path)["answers"]
    return {key: gzip.decompress(base64.b64decode(body)) for key, body in held.items()}


def array_in(body: bytes, name: str) -> Any:
    length = int.from_bytes(body[:4], "little")
    about = next(one for one in json.loads(body[4 : 4 + length])["arrays"] if one["name"] == name)
    shape = tuple(about["shape"])
    return np.frombuffer(body, about["dtype"], math.prod(shape), 4 + length + about["offset"]).reshape(shape)


def test_a_report_holds_what_the_explorer_answers(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    written = view.report(tmp_path / "out.html")
    found = answers_in(tmp_path / "out.html")
    assert written.answers == len(found)
    assert written.nbytes == (tmp_path / "out.html").stat().st_size
    assert json.loads(found["about"]) == json.loads(Explorer(Subject(view)).answer("about", {}).body)
    assert "tree" in found


def test_a_report_is_the_same_each_time(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    for name in ("a.html", "b.html"):
        view.report(tmp_path / name)
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_a_comparison_has_its_differences_drawn(tmp_path: Path) -> None:
    a = {f"layers.{n}.weight": torch.randn(40, 200) for n in range(3)} | {"same": torch.ones(2)}
    b = {name: t + (0 if name in ("same", "layers.1.weight") else 0.1) for name, t in a.items()}
    for name, weights in (("a", a), ("b", b)):
        torch.save(weights, tmp_path / f"{name}.pt")
    one, other = (lazyckpt.open(tmp_path / f"{name}.pt") for name in "ab")
    one.report(tmp_path / "out.html", other)
    found = answers_in(tmp_path / "out.html")
    drawn = [key for key in found if key.startswith("compare/tile")]
    assert len(drawn) == 2 and not any("layers.1" in key for key in drawn)
    means = array_in(found[drawn[0]], "mean")
    np.testing.assert_allclose(means[np.isfinite(means)], -0.1, rtol=2.0**-11)
    assert any("side=b" in key for key in found if key.startswith("tensor/tile"))


def test_a_run_has_its_curves(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"run/step_{step}").mkdir(parents=True)
        torch.save({"layers.0.weight": torch.full((4, 4), float(step))}, tmp_path / f"run/step_{step}/model.pt")
    lazyckpt.open_run(tmp_path / "run").report(tmp_path / "out.html")
    found = answers_in(tmp_path / "out.html")
    key = "run/course?kind=layers.%2A.weight&quantity="
    curves = {name: json.loads(found[key.replace("%2A", "*") + name]) for name in ("norm", "change", "drift")}
    assert curves["norm"]["values"] == [[4.0, 8.0, 12.0]]
    assert curves["drift"]["values"][0][-1] == 2.0
    assert "tensor?name=layers.0.weight" in found
    compared = json.loads(found["compare?with=1"])
    assert compared["steps"] == [3, 1] and json.loads(found["compare"])["steps"] == [3, 2]
    (drawn,) = (key for key in found if key.startswith("compare/tile") and "with=1" in key)
    assert (array_in(found[drawn], "mean") == 2).all()
    for step in (1, 2):
        assert {f"{path}?step={step}" for path in ("about", "tree", "tree/marks", "architecture", "ranks")} <= set(
            found
        )
        (drawn,) = (key for key in found if key.startswith("tensor/tile") and f"step={step}" in key)
        assert (array_in(found[drawn], "mean") == step).all()


def test_a_step_that_is_gone_is_an_error_of_a_report(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"run/step_{step}").mkdir(parents=True)
        torch.save({"w": torch.ones(4, 4)}, tmp_path / f"run/step_{step}/model.pt")
    run = lazyckpt.open_run(tmp_path / "run")
    assert run.steps == (1, 2, 3)
    (tmp_path / "run/step_1/model.pt").unlink()
    run.report(tmp_path / "out.html")
    failed, found = host_of(tmp_path / "out.html")["failures"], answers_in(tmp_path / "out.html")
    assert {"1"} == {parameters(key.partition("?")[2])["step"] for key in failed if key.startswith("tensor/")}
    assert any(key.startswith("tensor/tile") and "step=2" in key for key in found)


def test_a_small_report_of_a_run_has_its_first_step(tmp_path: Path) -> None:
    for step in range(9):
        (tmp_path / f"run/step_{step}").mkdir(parents=True)
        torch.save({"w": torch.randn(64, 64)}, tmp_path / f"run/step_{step}/model.pt")
    run = lazyckpt.open_run(tmp_path / "run")
    whole = run.report(tmp_path / "out.html")
    assert not host_of(tmp_path / "out.html")["report"]["left"]
    run.report(tmp_path / "out.html", max_size=whole.nbytes - 150_000)
    held = {key for key in answers_in(tmp_path / "out.html") if key.startswith("tree?step")}
    assert "tree?step=0" in held and len(held) < 8
    assert ["steps that the pages show", 1 + len(held), 9, "size"] in host_of(tmp_path / "out.html")["report"]["left"]


def test_other_names_of_a_tied_tensor_have_its_pictures(tmp_path: Path) -> None:
    weight = torch.randn(4, 8)
    torch.save({"embed": weight, "head": weight, "norm": torch.ones(3)}, tmp_path / "model.pt")
    lazyckpt.open(tmp_path / "model.pt").report(tmp_path / "out.html")
    found, same = answers_in(tmp_path / "out.html"), host_of(tmp_path / "out.html")["same"]
    assert json.loads(found["tensor?name=head"])["owner"] == "embed"
    assert {key.partition("?")[0] for key in same} >= {"tensor/tile", "tensor/histogram", "tensor/values"}
    assert all(held in found and held == key.replace("=head", "=embed") for key, held in same.items())


def test_a_report_says_what_it_lacks(tmp_path: Path) -> None:
    torch.save({f"layers.{n}.weight": torch.randn(64, 64) for n in range(40)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    written = view.report(tmp_path / "out.html", max_read=view.nbytes // 2)
    about = host_of(tmp_path / "out.html")["report"]
    assert written.left_out and about["serve"] == f"lazyckpt serve {tmp_path / 'model.pt'}"
    left = {what: (held, everything, why) for what, held, everything, why in about["left"]}
    held, everything, why = left["pictures of tensors"]
    assert 0 < held < everything == 40 and why == "read"
    assert not host_of_whole(view, tmp_path)["report"]["left"]


def host_of_whole(view: lazyckpt.CheckpointView, tmp_path: Path) -> Any:
    view.report(tmp_path / "whole.html")
    return host_of(tmp_path / "whole.html")


def test_an_error_is_held_as_an_error(tmp_path: Path) -> None:
    torch.save({"a": torch.ones(3)}, tmp_path / "model.pt")
    view = lazyckpt.open(tmp_path / "model.pt")
    (tmp_path / "model.pt").write_bytes(b"")
    view.report(tmp_path / "out.html")
    status, kind, _ = host_of(tmp_path / "out.html")["failures"][
        "tensor/histogram?bins=100&exact=auto&name=a&scale=linear"
    ]
    assert status == 409 and kind == "ChangedFileError"


def test_rounded_pictures_keep_three_digits(view: lazyckpt.CheckpointView) -> None:
    explorer, asked = Explorer(Subject(view)), {"name": "layers.0.weight", "rows": "2", "cols": "4", "how": "mean"}
    whole = array_in(explorer.answer("tensor/tile", asked).body, "mean")
    found = array_in(explorer.answer("tensor/tile", asked | {"fraction": "11"}).body, "mean")
    np.testing.assert_allclose(found, whole, rtol=2.0**-12)
    assert found.dtype == np.float32 and (found.view(np.uint32) & 0xFFF == 0).all()


def test_a_link_in_the_place_of_the_part_is_not_followed(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("as it was")
    (tmp_path / "out.html").symlink_to(tmp_path / "precious")
    view.report(tmp_path / "out.html")
    assert (tmp_path / "precious").read_text() == "as it was"
    assert not (tmp_path / "out.html").is_symlink()
    assert {path.name for path in tmp_path.iterdir()} == {"model.pt", "out.html", "precious"}


def test_names_cannot_leave_their_place(view: lazyckpt.CheckpointView, tmp_path: Path) -> None:
    view.report(tmp_path / "out.html")
    text = (tmp_path / "out.html").read_text("utf-8")
    assert "<script>alert" not in text  # it is compressed inside of an answer, and escaped in requests
    assert text.count("</script>") == 2


def test_a_report_keeps_to_its_size(tmp_path: Path) -> None:
    torch.save({secrets.token_hex(20): torch.ones(1) for _ in range(60)}, tmp_path / "model.pt")
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
    channel = Channel(explorer, lambda content, buffers=(b"",): sent.put((content, buffers[0])))
    for number, request in enumerate(("about", "tree?state=stored", "tree?state=none", "nothing")):
        channel.receive({"id": f"a-{number}", "request": request})
    channel.receive("no message")
    channel.receive({"cancel": "b-99"})
    channel.receive({"ping": "a"})
    messages = [sent.get(timeout=60) for _ in range(5)]
    found = {content["id"]: (content["status"], body) for content, body in messages if "id" in content}
    assert [found[f"a-{n}"][0] for n in range(4)] == [200, 200, 404, 404]
    assert found["a-0"][1] == explorer.answer("about", {}).body
    assert {"pong": "a"} in [content for content, _ in messages]
    channel.close()
    channel.receive({"id": "a-5", "request": "about"})
    channel.receive({"ping": "b"})
    assert sent.get(timeout=60)[0] == {"pong": "b"}  # and nothing else


def test_the_widget_is_one_of_anywidget(view: lazyckpt.CheckpointView) -> None:
    anywidget = pytest.importorskip("anywidget")
    widget = view.widget()
    assert isinstance(widget, anywidget.AnyWidget)
    data = widget._repr_mimebundle_()[0]
    assert widget.model_id == data["application/vnd.jupyter.widget-view+json"]["model_id"]
    assert "layers" in data["text/html"] and "<script>alert" not in data["text/html"]
    widget.close()


def test_pages_are_called_by_the_path_that_was_opened(
    view: lazyckpt.CheckpointView, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("anywidget")
    monkeypatch.chdir(tmp_path)
    for path, title in (("model.pt", "model.pt"), (".", str(Path.cwd()))):
        assert lazyckpt.open(path).widget().title == title
    about = json.loads(Explorer(Subject(lazyckpt.open("model.pt"))).answer("about", parameters("")).body)
    assert about["title"] == "model.pt"
    part = lazyckpt.open("model.pt")["layers"].widget()
    assert part.title == str(Path.cwd() / "model.pt")
