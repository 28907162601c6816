"""`lazyckpt.scan`: every technique is named, nothing runs, and genuine checkpoints are not called dangerous."""

from __future__ import annotations

import io
import json
import os
import pickle
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import lazyckpt
from lazyckpt.cli.program import app
from lazyckpt.io.containers.pickle.audit import judge
from lazyckpt.io.containers.pickle.trace import Held, trace

from .handmade import call, dict_of, named, number, program, text, write_pickle
from .scan_corpus import FILES, OPTIONAL, OTHERS, exploit, live, torch_zip
from .test_pickles_malicious import LOADER, nothing_runs

LIVE = live()


def written(folder: Path, files: dict[str, bytes | str]) -> Path:
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data.encode() if isinstance(data, str) else data)
    return folder


def test_the_pickles_are_live(tmp_path: Path) -> None:
    """Else the next test proves nothing: CPython's own pickle runs every one of them."""
    paths, markers = [], {}
    for n, name in enumerate(LIVE):
        if name in OPTIONAL and find_spec(OPTIONAL[name]) is None:
            continue
        markers[name] = tmp_path / f"marker{n}"
        (tmp_path / f"{n}.pkl").write_bytes(LIVE[name](markers[name]))
        paths.append(str(tmp_path / f"{n}.pkl"))
    done = subprocess.run(
        [sys.executable, "-c", LOADER], input=json.dumps(paths), text=True, timeout=120, check=False, cwd=tmp_path
    )
    assert done.returncode == 0
    for _ in range(100):  # some of them start a process and do not wait for it
        if all(marker.exists() for marker in markers.values()):
            break
        sleep(0.1)
    assert [name for name, marker in markers.items() if not marker.exists()] == []


@pytest.mark.parametrize("name", LIVE)
def test_a_live_pickle_is_an_error_and_does_not_run(name: str, tmp_path: Path) -> None:
    marker, path = tmp_path / "marker", tmp_path / "a" / "data.pkl"
    path.parent.mkdir()
    path.write_bytes(LIVE[name](marker))
    with nothing_runs(lambda: lazyckpt.scan(path)):
        report = lazyckpt.scan(path)
    assert not marker.exists(), "it ran"
    assert report.worst == "error"
    assert all(f.file == "data.pkl" for f in report)
    assert any(f.code == "dangerous-pickle" and str(f) for f in report)


@pytest.mark.parametrize("name", FILES)
def test_a_pickle_is_found_wherever_it_is(name: str, tmp_path: Path) -> None:
    file, data = FILES[name]
    marker, folder = tmp_path / "marker", tmp_path / "a"
    written(folder, {file: data(marker)})
    with nothing_runs(lambda: lazyckpt.scan(folder)):
        report = lazyckpt.scan(folder)
    assert not marker.exists()
    assert any(f.code == "dangerous-pickle" and f.file == file and ".system" in str(f) for f in report), report


@pytest.mark.parametrize("name", [*FILES, *OTHERS])
def test_files_behind_a_url_are_judged_as_local_ones(name: str, tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = {FILES[name][0]: FILES[name][1](tmp_path / "marker")} if name in FILES else OTHERS[name][0]
    folder = written(tmp_path / "a", files)
    memory = fsspec.filesystem("memory")
    memory.put(str(folder), "/scanned", recursive=True)
    try:
        report, local = lazyckpt.scan("memory://scanned"), lazyckpt.scan(folder)
    finally:
        memory.rm("/scanned", recursive=True)
    assert [(f.code, f.severity, str(f), f.file) for f in report] == [
        (f.code, f.severity, str(f), f.file) for f in local
    ]


@pytest.mark.parametrize("name", OTHERS)
def test_other_code_and_bombs_are_found(name: str, tmp_path: Path) -> None:
    files, code = OTHERS[name]
    report = lazyckpt.scan(written(tmp_path, files))
    assert any(f.code == code and f.severity != "note" for f in report), report


def test_links_that_leave_the_folder(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {"config.json": "{}"})
    (tmp_path / "outside.bin").write_bytes(exploit(tmp_path / "marker"))
    (folder / "inside.json").symlink_to(folder / "config.json")
    (folder / "weights.bin").symlink_to(tmp_path / "outside.bin")
    report = lazyckpt.scan(folder)
    assert [f.file for f in report if f.code == "outside-link"] == ["weights.bin"]
    assert any(f.code == "dangerous-pickle" and f.file == "weights.bin" for f in report)


def test_links_of_the_cache_of_the_hub_are_ordinary(tmp_path: Path) -> None:
    blobs = written(tmp_path / "models--x" / "blobs", {"abc": "{}"})
    snapshot = tmp_path / "models--x" / "snapshots" / "123"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").symlink_to(Path("..") / ".." / "blobs" / "abc")
    assert blobs.exists() and len(lazyckpt.scan(snapshot)) == 0


def test_ordinary_checkpoints_are_good(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tree = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "rng": np.random.get_state(), "m": model}
    torch.save(tree, tmp_path / "zip.pt")
    torch.save(tree, tmp_path / "legacy.pt", _use_new_zipfile_serialization=False)
    (tmp_path / "tensors.pkl").write_bytes(pickle.dumps(model.state_dict()))  # holds torch files as bytes
    np.savez(tmp_path / "a.npz", x=np.ones(3), y=np.array([{"a": 1}], object))
    (tmp_path / "bytes.pt").write_bytes(torch_zip(pickle.dumps({"extra": io.BytesIO(pickle.dumps({"a": 1}))})))
    (tmp_path / "raw.bin").write_bytes(b"N" * 100_000)
    (tmp_path / "latest").write_text("checkpoint_1\n")
    report = lazyckpt.scan(tmp_path)
    assert len(report) == 0, report
    assert report.facts["files"] == 7 and report.facts["pickles"] >= 10
    assert "torch._utils._rebuild_tensor_v2" in report.facts["names"]["torch"]


def test_names_are_graded(tmp_path: Path) -> None:
    grades = {
        "torch._utils _rebuild_tensor_v2": "torch",
        "collections OrderedDict": "torch",
        "argparse Namespace": "plain",
        "numpy float32": "plain",
        "deepspeed.runtime.fp16.loss_scaler DynamicLossScaler": "framework",
        "megatron.core.enums ModelType": "framework",
        "omegaconf.dictconfig DictConfig": "framework",
        "deepspeed.launcher.runner main": "unknown",
        "transformers.agents PythonInterpreterTool": "unknown",
        "numpy apply_along_axis": "unknown",
        "torch set_default_dtype": "unknown",
        "mypackage Config": "unknown",
        "builtins eval": "dangerous",
        "builtins map": "dangerous",
        "itertools starmap": "dangerous",
        "builtins str.__class__": "dangerous",
        "torch._C PyTorchFileWriter": "dangerous",
        "six.moves.builtins eval": "dangerous",
    }
    for line, grade in grades.items():
        module, name = line.split()
        assert judge(module, name).grade == grade, line
    body = dict_of(
        text("a"), call(named("deepspeed.x", "LossScaler")), text("b"), call(named("mine", "Thing"), number(1))
    )
    report = lazyckpt.scan(write_pickle(tmp_path / "m.pt", program(body)))
    assert {f.code: f.severity for f in report} == {"unknown-global": "warning", "framework-class": "note"}
    assert report.facts["names"]["unknown"] == ["mine.Thing"]


def test_getattr_of_enums_is_harmless_only_if_its_result_is_a_name() -> None:
    good = trace(Held(program(call(named("builtins", "getattr"), named("mine", "Kind"), text("ADAM")))))
    assert not good.odd and ("mine", "Kind.ADAM") in good.named
    for body in (
        call(named("builtins", "getattr"), call(named("mine", "kind")), text("system")),
        dict_of(text("f"), named("builtins", "getattr")),
        call(named("builtins", "getattr"), named("mine", "Kind"), text("ADAM"))
        + b"0"
        + call(named("functools", "partial"), named("builtins", "getattr")),
    ):
        assert trace(Held(program(body))).odd


def test_the_memory_is_not_that_of_large_constants(tmp_path: Path) -> None:
    """A gigabyte in one bytes object is skipped, not read."""
    path = tmp_path / "big.pkl"
    head = b"\x80\x04\x8e" + (1 << 30).to_bytes(8, "little")
    with path.open("wb") as f:
        f.write(head)
        f.seek(len(head) + (1 << 30))
        f.write(b"0" + exploit(tmp_path / "marker")[2:])
    report = lazyckpt.scan(path)
    assert report.worst == "error"


@pytest.mark.parametrize("filler", [b"N" * 1_000_000, b"N0" * 100_000, b"V" + b"x" * 3_000_000 + b"\n0"])
def test_long_fillers_do_not_hide_names(filler: bytes, tmp_path: Path) -> None:
    """Protocol 0 does not begin with a sign of its own, and its arguments may be long."""
    path = tmp_path / "a"
    path.write_bytes(filler + exploit(tmp_path / "marker")[2:])
    assert any("os.system" in str(f) for f in lazyckpt.scan(path) if f.severity == "error")


@pytest.mark.parametrize("end", [b"cos\nsystem|", b"c__main__\n", b"iposix\nsystem\n", b"V"])
def test_names_at_the_very_end_are_followed_as_python_does(end: bytes) -> None:
    """Python's unpickler takes a line that is cut off, but for its last byte."""
    named = []

    class Recorder(pickle._Unpickler):  # type: ignore[name-defined,misc]
        def find_class(self, module: str, name: str) -> Any:
            named.append((module, name))
            return dict

    with pytest.raises((EOFError, IndexError, pickle.UnpicklingError)):
        Recorder(io.BytesIO(b"\x80\x04" + end)).load()
    assert set(trace(Held(b"\x80\x04" + end)).named) == set(named)


def test_a_frame_that_cuts_a_name_is_an_error(tmp_path: Path) -> None:
    """The unpickler written in C drops the part of the name that is in the frame, if it reads from a file."""
    data = b"\x80\x04\x95" + (5).to_bytes(8, "little") + b"cjunkos\nsystem\n."
    named = []

    class Recorder(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            named.append((module, name))
            return dict

    Recorder(io.BytesIO(data)).load()
    (tmp_path / "a.pkl").write_bytes(data)
    assert named == [("os", "system")] and lazyckpt.scan(tmp_path).worst == "error"


def test_many_pickles_in_a_row(tmp_path: Path) -> None:
    path = tmp_path / "many.pkl"
    path.write_bytes(pickle.dumps([1]) * 500 + exploit(tmp_path / "marker"))
    report = lazyckpt.scan(path)
    assert report.facts["pickles"] == 501 and report.worst == "error"


def test_view_problems_say_the_same(tmp_path: Path) -> None:
    """One judgement: what a scan calls dangerous is a problem of the view."""
    bodies = {
        "call": call(named("os", "system"), text("true")),
        "extension": dict_of(text("x"), b"\x82\x05"),
        "persistent id": dict_of(text("x"), text("hello") + b"Q"),
        "memo": dict_of(text("x"), b"Nr\xff\xff\xff\x7f"),
        "bytearray": dict_of(text("x"), call(named("builtins", "bytearray"), number(1 << 40))),
    }
    for name, body in bodies.items():
        path = write_pickle(tmp_path / f"{name}.pt", program(body))
        view = lazyckpt.open(path, cache=False)
        assert [p.code for p in view.problems] == ["unsafe-pickle"], name
        assert lazyckpt.scan(path).worst == "error", name


def test_folders_urls_and_missing_paths(tmp_path: Path) -> None:
    import fsspec

    fs = fsspec.filesystem("memory")
    fs.pipe("/scanned/a/model.pt", torch_zip(exploit(tmp_path / "marker")))
    fs.pipe("/scanned/good.pt", torch_zip(pickle.dumps({"w": 1}, 2)))
    report = lazyckpt.scan("memory://scanned")
    assert report.facts["files"] == 2 and [f.file for f in report] == ["a/model.pt"]
    assert lazyckpt.scan("memory://scanned/good.pt").ok
    with pytest.raises(lazyckpt.MissingFileError):
        lazyckpt.scan(tmp_path / "nothing")


def ran(*args: Any) -> Any:
    return CliRunner().invoke(app, ["scan", *map(str, args)])


def test_the_command(tmp_path: Path) -> None:
    written(tmp_path / "bad", {"model.pt": torch_zip(exploit(tmp_path / "marker"))})
    written(tmp_path / "odd", {"a.pkl": program(call(named("mine", "Thing")))})
    written(tmp_path / "good", {"a.pkl": pickle.dumps([1])})
    assert ran(tmp_path / "good").exit_code == 0
    assert ran(tmp_path / "odd").exit_code == 0
    assert ran(tmp_path / "odd", "--fail-on", "warning").exit_code == 1
    bad = ran(tmp_path / "bad")
    assert bad.exit_code == 1 and "os.system" in bad.output and "model.pt" in bad.output
    assert ran(tmp_path / "bad", "--fail-on", "never").exit_code == 0
    assert "dangerous: os.system" in ran(tmp_path / "bad", "--verbose").output
    about = json.loads(ran(tmp_path / "bad", "--json").output)
    assert about["tool"] == "scan" and about["findings"][0]["details"]["technique"]
    sarif = json.loads(ran(tmp_path / "bad", "--sarif").output)
    assert sarif["runs"][0]["results"][0]["level"] == "error"
    assert not (tmp_path / "marker").exists() and os.listdir(tmp_path / "bad") == ["model.pt"]


def test_the_command_without_a_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "lazyckpt", "scan", str(tmp_path / "nothing")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2 and "no such file" in done.stderr


@pytest.mark.parametrize("escape", [rb"\.", rb"\(", rb"\477", rb"\\.", rb"\x41\q\7", b"\\\n."])
def test_texts_with_unusual_escapes(escape: bytes) -> None:
    """They are decoded as Python does, without its warnings of them."""
    import codecs
    import warnings

    from lazyckpt.io.containers.pickle.trace import _escaped

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wanted = codecs.escape_decode(b"a" + escape + b"b")[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert _escaped(b"a" + escape + b"b", True) == wanted.decode("latin1")
