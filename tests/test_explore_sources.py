"""The explorer on sources of every kind: all requests are answered with the right numbers or one clear error, and of a
bucket only what is shown is read."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, save, save_file

import lazyckpt
from lazyckpt.explore.api import Answer, Explorer, endpoint_modules
from lazyckpt.explore.fitting import plans
from lazyckpt.explore.query import Cancelled
from lazyckpt.explore.report import report
from lazyckpt.exploring import subject_of

from .fuzz.targets.sources import golden
from .network import behind, opened
from .recordings import GOLDEN
from .servers.fixtures import Cloud
from .test_every_url import pack
from .test_explore_hosts import answers_in, array_in

pytestmark = pytest.mark.slow
MIB = 1 << 20


def archive(folder: Path) -> Path:
    pack(folder, "model")
    return folder / "model.tar"


def lost_rank(folder: Path) -> Path:
    checkpoint = Path(shutil.copytree(golden("deepspeed_zero", "zero3_fp32_dp3"), folder / "lost"))
    (checkpoint / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    return checkpoint


def stale_rank(folder: Path) -> Path:
    run = Path(shutil.copytree(golden("deepspeed_run", "zero3"), folder / "stale"))
    name = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    (run / "global_step3" / name).write_bytes((run / "global_step1" / name).read_bytes())
    return run / "global_step3"


def one_file(tensors: dict[str, torch.Tensor]) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        save_file(tensors, folder / "one.safetensors")
        return folder / "one.safetensors"

    return write


def delta(folder: Path) -> Path:
    old = {"layers.0.w": torch.randn(20, 30), "layers.1.w": torch.randn(20, 30)}
    torch.save(old, folder / "old.pt")
    torch.save({name: t + (t > 1) for name, t in old.items()}, folder / "new.pt")
    lazyckpt.delta(folder / "new.pt", folder / "old.pt").write(folder / "delta")
    return folder / "delta"


SOURCES: dict[str, tuple[Callable[[Path], Path], str]] = {  # how it is made, and what it is shown as
    "archive": (archive, "checkpoint"),
    "delta": (delta, "checkpoint"),
    "gguf": (lambda _: golden("quantized_gguf", "blocks"), "checkpoint"),
    "float8": (lambda _: GOLDEN / "quantized/deepseek_fp8", "checkpoint"),
    "mlx": (lambda _: golden("quantized_mlx", "mixed"), "checkpoint"),
    "adapters": (lambda _: golden("run_folders", "mlx_adapters"), "run"),
    "megatron-fsdp": (lambda _: golden("megatron_fsdp", "single"), "checkpoint"),
    "orbax of processes": (lambda _: golden("orbax", "processes"), "checkpoint"),
    "lost rank": (lost_rank, "checkpoint"),
    "scalar": (one_file({"x": torch.tensor(3.5)}), "checkpoint"),
    "empty": (one_file({}), "checkpoint"),
}


def answered(answer: Answer) -> Any:
    """Return what an answer says; None if it is an error, which is one of few lines."""
    if answer.status == 200:
        return json.loads(answer.body) if answer.type == "application/json" else answer.body
    error = json.loads(answer.body)["error"]
    assert 400 <= answer.status < 500 and hasattr(lazyckpt, error["kind"])
    assert len(error["message"].splitlines()) <= 3
    return None


@pytest.mark.parametrize("source", SOURCES)
def test_every_request_is_answered(tmp_path: Path, source: str) -> None:
    make, kind = SOURCES[source]
    subject = subject_of(make(tmp_path))
    assert subject.kind == kind
    explorer = Explorer(subject)
    view = subject.view if subject.run is None else subject.at(subject.run.steps[-1])
    always = {"about", "tree", "tree/marks", "tree/norms", "tree/totals", "architecture", "ranks", "python"}
    paths = [path for module in endpoint_modules() for path in module.ENDPOINTS]
    for path in paths:
        found = answered(explorer.answer(path, {"page": "tree"}))
        assert found is not None or path not in always
    for state in ("", *view.states):
        part = view.states[state] if state else view
        for name in list(part)[:1]:
            asked = {"name": name, "state": state, "rows": "1", "cols": "1", "row": "0", "page": "tensor"}
            found = {path: answered(explorer.answer(path, asked)) for path in paths if path.startswith("tensor")}
            assert found["tensor"]["shape"] == list(part[name].shape)
            try:
                values = part[name][...]
            except lazyckpt.MissingFileError:
                assert found["tensor/histogram"] is None and found["tensor/layout"] is not None
                continue
            if values.numel():
                x = values.double()
                assert found["tensor/histogram"]["l2"] == pytest.approx(x.norm().item(), rel=1e-9)
                lowest = array_in(found["tensor/tile"], "min" if values.numel() > 1 else "mean")
                assert lowest.item() == x.min().item()


def test_a_rank_of_another_step_is_told(tmp_path: Path) -> None:
    for make, codes in ((lost_rank, []), (stale_rank, ["differing-steps"])):
        explorer = Explorer(subject_of(make(tmp_path)))
        found = answered(explorer.answer("ranks/steps", {}))["findings"]
        assert [one["code"] for one in found] == codes and all(one["severity"] == "error" for one in found)
        assert all("rank_1_" in one["text"] for one in found)
    with pytest.raises(Cancelled):  # between two reads
        left = iter([True, False])
        Explorer(subject_of(tmp_path / "stale" / "global_step3")).answer("ranks/steps", {}, lambda: next(left))
    shutil.rmtree(tmp_path / "stale")
    explorer.forget()
    assert answered(explorer.answer("ranks/steps", {}))["findings"] == found  # nothing is read again


def test_pages_of_a_bucket_read_what_they_show(tmp_path: Path) -> None:
    save_file({"w": torch.randn(1024, 1024), "small": torch.ones(3)}, tmp_path / "model.safetensors")
    view, traffic = opened(tmp_path / "model.safetensors")
    explorer = Explorer(subject_of(view))
    traffic.clear()
    for path in ("about", "tree", "tree/marks", "tree/totals", "architecture", "architecture/memory", "ranks"):
        assert explorer.answer(path, {}).status == 200
    for path in ("tensor", "tensor/layout", "python"):
        assert explorer.answer(path, {"name": "w", "page": "tensor"}).status == 200
    assert traffic.requests == 0
    assert explorer.answer("tensor/tile", {"name": "w", "rows": "64", "cols": "64"}).status == 200
    assert traffic.nbytes == 4 * MIB and not traffic.twice
    traffic.clear()
    for path in ("tensor/histogram", "tensor/outliers", "tensor/norms", "tensor/values", "tensor/spectrum"):
        assert explorer.answer(path, {"name": "w", "c1": "9", "r1": "9"}).status == 200
    assert traffic.requests == 0  # it was read for the picture
    explorer.forget()
    part = {"r0": "512", "r1": "768", "c0": "512", "c1": "768"}
    assert explorer.answer("tensor/tile", {"name": "w", "rows": "64", "cols": "64", **part}).status == 200
    assert traffic.nbytes <= 2 * 256 * 256 * 4


def test_a_report_reads_no_more_than_it_may(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        weights = {f"layers.{n}.w": torch.randn(128, 128) for n in range(3)}
        (tmp_path / f"run/step_{step}").mkdir(parents=True)
        torch.save(weights, tmp_path / f"run/step_{step}/model.pt")
    size = 3 * 128 * 128 * 4
    for most in (size // 2, 8 * size):
        view, traffic = opened(tmp_path / "run/step_3/model.pt")
        traffic.clear()
        view.report(tmp_path / "out.html", max_read=most)
        assert traffic.nbytes <= most
    traffic = type(traffic)()
    with behind(traffic):
        run = lazyckpt.open_run(tmp_path / "run")
        assert run.steps == (1, 2, 3)
        traffic.clear()
        run.report(tmp_path / "out.html", max_read=1)
    assert not traffic.requests
    planned = {wanted.path for wanted in plans(subject_of(run)) if wanted.reads}
    assert {"run/course", "tensor/tile", "compare/differences"} <= planned


def test_ctrl_c_leaves_no_part_of_a_report(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(3)}, tmp_path / "model.pt")
    explorer = Explorer(subject_of(tmp_path / "model.pt"))
    told: list[int] = []

    def interrupt(held: int, nbytes: int) -> None:
        told.append(nbytes)
        if held == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(explorer, tmp_path / "out.html", told=interrupt)
    with mock.patch("os.replace", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        report(explorer, tmp_path / "out.html")
    assert len(told) == 3 and sorted(told) == told
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]
    with pytest.raises(lazyckpt.DestinationError):
        report(explorer, "out\ud800.html")


def test_a_bucket_may_go_away(s3: Cloud, tmp_path: Path) -> None:
    held = {"w": torch.randn(30, 40), "b": torch.ones(3)}
    url = s3.put("model.safetensors", save(held))
    options = {**s3.options, "access_key_id": "AKIAPUBLIC", "secret_access_key": "verysecret"}
    with lazyckpt.serve(url, storage_options=options) as server, httpx.Client(base_url=server.address) as client:
        asked = "api/v1/tensor/tile?name=w&rows=2"
        s3.server.set_fault("status", status=403, error="AccessDenied")
        gone = client.get(asked)
        assert gone.status_code == 404 and gone.json()["error"]["kind"] == "MissingFileError"
        assert client.get("hf/model.safetensors").status_code == 500
        assert client.get("api/v1/about").status_code == 200
        s3.server.clear_faults()
        assert client.get(asked).status_code == 200
        found = load(client.get("hf/model.safetensors").content)
        assert found.keys() == held.keys() and all(torch.equal(found[name], held[name]) for name in held)
        chunk = np.frombuffer(client.get("zarr/weights/w/c/0/0").content, np.float32)
        assert np.array_equal(chunk.reshape(30, 40), held["w"].numpy())
        texts = [client.get(f"api/v1/{path}").text for path in ("about", "ranks", "python?page=tensor&name=w")]
    lazyckpt.open(url, storage_options=options).report(tmp_path / "out.html")
    page = (tmp_path / "out.html").read_text("utf-8")
    texts += [page, gone.text, *(body.decode("latin-1") for body in answers_in(tmp_path / "out.html").values())]
    assert not any("verysecret" in text or "AKIAPUBLIC" in text for text in texts)
    assert url in texts[0] and math.prod(held["w"].shape) == 1200
