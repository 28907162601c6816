"""The harness that watches other libraries' tests, tried on a small suite; and those tests themselves, on demand."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import lazyckpt

pytestmark = pytest.mark.slow

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SUITES = ("torch", "safetensors", "accelerate", "lightning")

SUITE = """
import io, multiprocessing
from unittest import mock

import lazyckpt, pytest, torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import save_file as save_arrays
from safetensors.torch import save_file

STATE = {"model": {"up.weight": torch.arange(6.0).reshape(2, 3)}, "ids": [torch.arange(4), "text"]}


def test_equal(tmp_path):
    torch.save(STATE, tmp_path / "x.pt")
    torch.save(STATE, io.BytesIO())
    save_file({"w": torch.arange(3.0)}, tmp_path / "x.safetensors")
    with pytest.warns(UserWarning):
        dcp.save({"w": torch.arange(8.0), "step": 3}, checkpoint_id=tmp_path / "dcp")


def test_other_elements(tmp_path):
    torch.save({"w": -torch.ones(3)}, tmp_path / "other.pt")
    other = lazyckpt.open(tmp_path / "other.pt")
    with mock.patch("lazyckpt.open", return_value=other):
        torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    assert torch.load(tmp_path / "x.pt")["w"].sum() == 3


def test_refused(tmp_path):
    with mock.patch("lazyckpt.open", side_effect=lazyckpt.FormatError("not read")):
        torch.save(STATE, tmp_path / "x.pt")


def test_crash(tmp_path):
    with mock.patch("lazyckpt.open", side_effect=ZeroDivisionError):
        torch.save(STATE, tmp_path / "x.pt")


def test_called_damaged(tmp_path):
    with mock.patch("lazyckpt.open", side_effect=lazyckpt.CorruptError("damaged")):
        torch.save(STATE, tmp_path / "x.pt")


def test_spawned(tmp_path):
    import numpy

    arguments = ({"w": numpy.arange(3)}, str(tmp_path / "x.safetensors"))
    child = multiprocessing.get_context("spawn").Process(target=save_arrays, args=arguments)
    child.start()
    child.join()
    assert child.exitcode == 0


def test_that_fails(tmp_path):
    with pytest.raises(RuntimeError):
        torch.save(STATE, tmp_path / "none" / "x.pt")
    assert not STATE
"""


def run(folder: Path, report: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / "run.py"), "--suite", f"fake={folder}", "--report", str(report), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """What the runner said of the small suite, and the records of each of its tests."""
    folder = tmp_path_factory.mktemp("suite")
    (folder / "test_fake.py").write_text(SUITE)
    done = run(folder, folder / "report.jsonl")
    assert done.returncode == 1, done.stdout + done.stderr  # something was read wrongly
    records: dict[str, list[dict[str, Any]]] = {}
    for line in (folder / "report.jsonl").read_text().splitlines():
        record = json.loads(line)
        records.setdefault(record["test"].rpartition("::")[2], []).append(record)
    return done.stdout, records


Finished = tuple[str, dict[str, list[dict[str, Any]]]]


def test_equal_saves_are_compared(finished: Finished) -> None:
    records = finished[1]["test_equal"]
    assert [record["saver"] for record in records] == [
        "torch.save",
        "torch.save to a file object",
        "safetensors.torch.save_file",
        "dcp.save, FileSystemWriter",
    ]
    assert [record["outcome"] for record in records] == ["equal"] * 4
    assert [record["tensors"] for record in records] == [2, 2, 1, 1]
    assert not any(record["problems"] for record in records)


@pytest.mark.parametrize(
    ("test", "outcome"),
    [
        ("test_other_elements", "mismatch"),
        ("test_refused", "refused"),
        ("test_crash", "crash"),
        ("test_called_damaged", "error"),
    ],
)
def test_what_is_read_wrongly_is_recorded(finished: Finished, test: str, outcome: str) -> None:
    said, records = finished
    assert records[test][-1]["outcome"] == outcome
    assert test in said


def test_a_wrongly_read_file_is_kept(finished: Finished) -> None:
    kept = Path(finished[1]["test_other_elements"][-1]["kept"])
    assert torch.load(kept)["w"].tolist() == [1, 1, 1]


def test_spawned_processes_are_watched(finished: Finished) -> None:
    (record,) = finished[1]["test_spawned"]
    assert (record["saver"], record["outcome"], record["tensors"]) == ("safetensors.numpy.save_file", "equal", 1)
    assert record["pid"] != finished[1]["test_equal"][0]["pid"]


def test_the_suite_keeps_its_results(finished: Finished) -> None:
    assert re.search(r"\b1 failed, 6 passed", finished[0])
    assert "test_that_fails" not in finished[1]  # nothing was saved there


# -- what is compared, in this process


@pytest.fixture
def savewatch(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(HERE / "hook"))
    import savewatch.compare  # type: ignore[import-not-found]
    import savewatch.truth  # type: ignore[import-not-found]

    yield savewatch
    for name in [name for name in sys.modules if name.partition(".")[0] == "savewatch"]:
        del sys.modules[name]


def test_tensors_inside_other_objects_are_compared(savewatch: Any, tmp_path: Path) -> None:
    weight = torch.arange(4.0)
    state = {
        "model": torch.nn.Linear(3, 2),
        "sparse": torch.eye(3).to_sparse(),
        "storage": torch.arange(3.0).untyped_storage(),
        "again": [weight, weight[1:3], weight.view(2, 2).T],
        7: torch.quantize_per_tensor(weight, 0.5, 0, torch.qint8),
    }
    torch.save(state, tmp_path / "x.pt")
    truth = savewatch.truth.truth_of(state)
    assert set(truth.named) == {"storage", "again.0", "again.1", "again.2"}
    assert len(truth.others) == 5  # weight, bias; indices, values; the quantized one's integers
    savewatch.compare.same_file(lazyckpt.open(tmp_path / "x.pt"), truth, {})


_ZEROS = torch.zeros(2)


@pytest.mark.parametrize("read", [{"w": -_ZEROS}, {"w": _ZEROS[None]}, {"v": _ZEROS}, {"w": _ZEROS, "v": _ZEROS}, {}])
def test_any_difference_is_wrong(savewatch: Any, tmp_path: Path, read: dict[str, torch.Tensor]) -> None:
    torch.save(read, tmp_path / "x.pt")
    truth = savewatch.truth.truth_of({"w": torch.zeros(2)})
    with pytest.raises(savewatch.compare.Wrong):
        savewatch.compare.same_file(lazyckpt.open(tmp_path / "x.pt"), truth, {})


# -- the suites


@pytest.mark.parametrize("suite", SUITES)
def test_suite(suite: str, tmp_path: Path) -> None:
    """All that a library's own tests save is read as it was in memory. It takes from minutes to hours."""
    variable = f"LAZYCKPT_SUITE_{suite.upper()}"
    if not os.environ.get(variable):
        pytest.skip(f"{variable} does not name a folder with {suite}'s own tests")
    command = [sys.executable, str(HERE / "run.py"), "--suite", f"{suite}={os.environ[variable]}"]
    done = subprocess.run([*command, "--report", str(tmp_path / "report.jsonl")], check=False, cwd=ROOT)
    assert done.returncode == 0
