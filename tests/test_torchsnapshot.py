"""torchsnapshot: objects and numbers, values of several ranks, lost, truncated and hostile files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.errors import CorruptError, FormatError, MissingFileError
from lazyckpt.testing.oracle import same

from .writers import Case

META = ".snapshot_metadata"


@pytest.fixture
def folder(framework_cases: Mapping[str, Case], tmp_path: Path) -> Path:
    return Path(shutil.copytree(framework_cases["snapshot_replicated"].path, tmp_path / "copy"))


def _edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    table = json.loads((folder / META).read_text())
    change(table["manifest"])
    (folder / META).write_text(json.dumps(table))


def test_numbers_texts_and_objects_are_in_meta(framework_cases: Mapping[str, Case]) -> None:
    for name in ("snapshot_replicated", "snapshot_batched_chunks"):
        meta: Any = lazyckpt.open(framework_cases[name].path).meta
        progress = {"step": 2, "lr": 0.5, "name": "a/b%", "done": True, "seen": (3, 4)}
        assert meta["progress"] == progress
        group = meta["optim"]["param_groups"][0]
        assert group["lr"] == 0.01 and group["params"] == list(range(15)) and tuple(group["betas"]) == (0.9, 0.999)


def test_what_the_ranks_have_of_their_own(framework_cases: Mapping[str, Case]) -> None:
    case = framework_cases["snapshot_sharded"]
    view = lazyckpt.open(case.path)
    assert view.meta["rank"] == {"number": 0}
    assert {"0/model/half", "1/model/half", "0/model/table"} < set(view.stored)
    assert len(view.files) > 1


def test_a_lost_shard_is_a_hole(framework_cases: Mapping[str, Case], tmp_path: Path) -> None:
    case = framework_cases["snapshot_sharded"]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    table = json.loads((folder / META).read_text())["manifest"]
    location = table["1/model/table"]["shards"][0]["tensor"]["location"]
    (folder / location).unlink()
    view = lazyckpt.open(folder)
    assert {problem.code for problem in view.problems} == {"missing-file"}
    same(view["table"][:4], case.truth["weights"]["table"][:4], "rank 0")
    with pytest.raises(MissingFileError, match=location.rpartition("/")[2]):
        view["table"][4]


def test_a_truncated_file_is_a_hole(framework_cases: Mapping[str, Case], folder: Path) -> None:
    file = folder / "replicated" / "model" / "head.weight"
    file.write_bytes(file.read_bytes()[:-1])
    view = lazyckpt.open(folder)
    assert [(problem.code, problem.path) for problem in view.problems] == [
        ("missing-file", "replicated/model/head.weight")
    ]
    with pytest.raises(lazyckpt.errors.LazyckptError, match="truncated"):
        view["head.weight"][...]
    same(view["emb.weight"][...], framework_cases["snapshot_replicated"].truth["weights"]["emb.weight"], "emb")


def test_a_folder_without_its_manifest_is_unfinished(folder: Path) -> None:
    (folder / META).unlink()
    with pytest.raises(FormatError):
        lazyckpt.open(folder)


def test_yaml_of_older_versions(folder: Path) -> None:
    (folder / META).write_text("manifest:\n  0/model:\n    type: dict\n")
    with pytest.raises(FormatError, match="YAML"):
        lazyckpt.open(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"location": "../outside"},
        {"location": "/etc/passwd"},
        {"dtype": "torch.nothing"},
        {"shape": [3, -1]},
        {"shape": [1 << 40, 1 << 40]},
        {"shape": "3"},
        {"byte_range": [0, 3]},
        {"byte_range": [8, 4]},
        {"byte_range": [1]},
        {"type": 3},
    ],
    ids=str,
)
def test_entries_that_are_wrong(folder: Path, change: dict[str, Any]) -> None:
    _edit(folder, lambda manifest: manifest["0/model/head.weight"].update(change))
    with pytest.raises(CorruptError, match=r"head\.weight"):
        lazyckpt.open(folder)


def test_chunks_that_overlap_or_leave_gaps(framework_cases: Mapping[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(framework_cases["snapshot_batched_chunks"].path, tmp_path / "copy"))
    table = json.loads((folder / META).read_text())["manifest"]
    key = next(k for k, e in table.items() if e["type"] == "ChunkedTensor" and len(e["chunks"]) > 2)
    _edit(folder, lambda manifest: manifest[key]["chunks"].pop(1))
    view = lazyckpt.open(folder)
    assert [problem.code for problem in view.problems] == ["missing-elements"]
    _edit(folder, lambda manifest: manifest[key]["chunks"].append(manifest[key]["chunks"][0]))
    with pytest.raises(CorruptError, match="overlap"):
        lazyckpt.open(folder)


def test_quantized_tensors_are_told(folder: Path) -> None:
    _edit(folder, lambda m: m["0/model/head.weight"].update(serializer="per_tensor_qtensor", dtype="torch.qint8"))
    view = lazyckpt.open(folder)
    assert "unsupported-tensor" in {problem.code for problem in view.problems}
    with pytest.raises(lazyckpt.errors.LazyckptError):
        view["head.weight"][...]


def test_nothing_in_a_file_is_executed(folder: Path, tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return (open, (str(tmp_path / "written"), "w"))

    location = json.loads((folder / META).read_text())["manifest"]["0/progress/seen"]["location"]
    torch.save(Evil(), folder / location)
    view = lazyckpt.open(folder)
    assert view.problems and not (tmp_path / "written").exists()
