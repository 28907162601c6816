"""`to_dcp`: torch loads it on other ranks, with the optimizer; lazyckpt reads back the same view."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystemReader

import lazyckpt
from lazyckpt.errors import CorruptError, DestinationError
from lazyckpt.export import dcp as written
from lazyckpt.jobs import write as stream
from lazyckpt.jobs.publish import unfinished

from .conftest import once
from .writers import Case, bit_equal, deepspeed_zero, ranks, to_dcp_checks

MODULE = "tests.writers.to_dcp_checks"


@pytest.fixture(scope="session")
def loaded(session_folder: Path, zero_cases: dict[str, Case]) -> Path:
    spec = deepspeed_zero.CROSS[ZERO2]
    sizes = {"hidden": spec.hidden, "layers": spec.layers, "vocab": spec.vocab, "with_empty": False}

    def run(folder: Path) -> Path:
        case = zero_cases[ZERO2]
        lazyckpt.open(case.path).states["fp32"].to_dcp(folder / "zero2", verify=True)
        shutil.copytree(case.path.parent / "truth" / "states", folder / "truth")
        (folder / "zero2.json").write_text(json.dumps(sizes))
        return ranks.run_all(MODULE, folder)

    return once(session_folder, "to_dcp", run)


ZERO2 = "zero2_bf16_dp3"


@pytest.mark.slow
@pytest.mark.parametrize("name", to_dcp_checks.CHECKS)
def test_torch_loads_it_into_a_sharded_model(loaded: Path, name: str) -> None:
    said = ranks.verdict(loaded, name, 2)
    assert not said, said


# -- what it holds


@pytest.fixture
def training(tmp_path: Path) -> Path:
    """A file with everything that a state dict may have."""
    torch.manual_seed(0)
    weights: dict[str, Any] = {
        "emb.weight": torch.randn(33, 7),
        "norm": torch.randn(7).bfloat16(),
        "n": torch.tensor(3),
    }
    weights["empty"] = torch.empty(0, 4)
    weights["turned"] = torch.randn(6, 5).t()
    weights["head.weight"] = weights["emb.weight"]
    state = {
        0: {"exp_avg": torch.randn(33, 7), "exp_avg_sq": torch.rand(33, 7), "step": torch.tensor(4.0)},
        1: {"exp_avg": torch.randn(7), "exp_avg_sq": torch.rand(7), "step": torch.tensor(4.0)},
    }
    groups = [{"lr": 0.1, "betas": (0.9, 0.95), "params": [0]}, {"lr": 0.2, "betas": (0.9, 0.99), "params": [1]}]
    content = {
        "model": weights,
        "optimizer": {"state": state, "param_groups": groups},
        "epoch": 3,
        "schedule": {"last": [0.1, 0.2], "nested": {"on": True}},
        "rng": [torch.arange(5, dtype=torch.uint8), 7],
    }
    torch.save(content, tmp_path / "training.pt")
    return tmp_path / "training.pt"


def test_it_is_read_back_as_the_same_view(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "CHUNK", 200)  # of a few rows
    monkeypatch.setattr(written, "FILE", 4000)
    view = lazyckpt.open(training)
    assert view.to_dcp(tmp_path / "out", verify=True) == {}
    found = lazyckpt.open(tmp_path / "out")
    same(found, view)
    assert len(found["emb.weight"].fragments) == 5
    assert len(list((tmp_path / "out").glob("*.distcp"))) > 3
    assert dict(found.aliases) == {"head.weight": "emb.weight"}
    assert dict(found.meta)["epoch"] == 3 and found.meta["schedule"] == {"last": [0.1, 0.2], "nested": {"on": True}}
    groups = found.meta["optim"]["param_groups"]
    assert [group["params"] for group in groups] == [["emb.weight"], ["norm"]]
    assert [group["lr"] for group in groups] == [0.1, 0.2] and groups[1]["betas"] == (0.9, 0.99)
    assert torch.equal(found.stored["rng.0"][...], torch.arange(5, dtype=torch.uint8))
    assert not found.problems

    again = found.to_dcp(tmp_path / "again")  # of its own kind
    assert again == {}
    same(lazyckpt.open(tmp_path / "again"), view)
    assert lazyckpt.open(tmp_path / "again").meta["optim"] == found.meta["optim"]


def test_torch_reads_the_whole(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "CHUNK", 200)
    view = lazyckpt.open(training)
    view.to_dcp(tmp_path / "out")
    metadata = FileSystemReader(tmp_path / "out").read_metadata()
    state = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype)
        for key, entry in metadata.state_dict_metadata.items()
        if hasattr(entry, "chunks")
    }
    dcp.load(state, checkpoint_id=tmp_path / "out")
    for name, tensor in view.items():
        assert bit_equal(state[f"model.{name}"], tensor[...]), name
    for name, tensor in view.states["exp_avg"].items():
        assert bit_equal(state[f"optim.state.{name}.exp_avg"], tensor[...]), name
    partial: dict[str, Any] = {"schedule": {"nested": {"on": None}}, "epoch": 0}
    dcp.load(partial, checkpoint_id=tmp_path / "out")
    assert partial == {"schedule": {"nested": {"on": True}}, "epoch": 3}


def test_parts_and_other_states(training: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(training)
    view.select("*.weight").to_dcp(tmp_path / "part")
    found = lazyckpt.open(tmp_path / "part")
    assert set(found) == {"emb.weight", "head.weight"} and set(found.states["exp_avg"]) == {"emb.weight"}
    view.states["exp_avg_sq"].to_dcp(tmp_path / "moment")
    assert set(FileSystemReader(tmp_path / "moment").read_metadata().state_dict_metadata) == {
        "optim.state.emb.weight.exp_avg_sq",
        "optim.state.norm.exp_avg_sq",
    }


def test_fp32_copies_steps_and_custom_classes(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    """ZeRO-2: fp32 beside the weights, steps, DeepSpeed's groups by name, and objects of its classes left out."""
    view = lazyckpt.open(zero_cases[ZERO2].path)
    lost = view.to_dcp(tmp_path / "out")
    found = lazyckpt.open(tmp_path / "out")
    same(found, view)
    assert dict(found.aliases) == dict(view.aliases)
    assert all("deepspeed" in reason for reason in lost.values()) and lost.left_out
    groups = found.meta["optim"]["param_groups"]
    assert [set(g["params"]) for g in groups] == [set(names) for names in view.meta["param_shapes"]]
    theirs = view.meta["optimizer"]["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
    assert [g["lr"] for g in groups] == [g["lr"] for g in theirs] and groups[0]["weight_decay"] == 0.1
    assert found.meta["global_steps"] == 3


def test_metadata_names_only_classes_of_torch(training: Path, tmp_path: Path) -> None:
    lazyckpt.open(training).to_dcp(tmp_path / "out")
    metadata = pickle.loads((tmp_path / "out" / ".metadata").read_bytes())
    assert type(metadata).__module__ == "torch.distributed.checkpoint.metadata"
    kinds = {type(entry).__name__ for entry in metadata.state_dict_metadata.values()}
    assert kinds == {"TensorStorageMetadata", "BytesStorageMetadata"}
    for item in metadata.storage_data.values():
        data = (tmp_path / "out" / item.relative_path).read_bytes()[item.offset : item.offset + item.length]
        assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None  # the checksums are right
    tied = [metadata.storage_data[index] for index in metadata.storage_data if "emb.weight" in index.fqn]
    assert metadata.planner_data["model.emb.weight"] == ("model", "emb.weight") and tied


# -- how


def test_resume_and_publish(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(written, "CHUNK", 200)
    monkeypatch.setattr(written, "FILE", 4000)
    monkeypatch.setattr("lazyckpt.jobs.executor._TOGETHER", 1)
    real, calls = stream._finish, []

    def finish(*args: Any) -> None:
        calls.append(args)
        if len(calls) == 3:
            raise OSError(28, "No space left on device")
        real(*args)

    monkeypatch.setattr(stream, "_finish", finish)
    out, staging = tmp_path / "out", tmp_path / ".out.incomplete"
    with pytest.raises(DestinationError, match=r"No space left.*call again"):
        lazyckpt.open(training).to_dcp(out)
    assert not out.exists()
    kept = unfinished(out)
    assert kept
    moved, move = [], stream._move
    monkeypatch.setattr(stream, "_move", lambda path, tensor, *args: moved.append(tensor) or move(path, tensor, *args))
    lazyckpt.open(training).to_dcp(out, verify=True)
    again = sum(tensor.nbytes for tensor in moved)
    lazyckpt.open(training).to_dcp(tmp_path / "other")
    assert again + kept == sum(tensor.nbytes for tensor in moved) - again, "what is finished is not written again"
    assert not staging.exists() and not list(out.glob(".lazyckpt*"))
    same(lazyckpt.open(out), lazyckpt.open(training))


def test_verify_finds_damage(training: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = stream._finish

    def finish(path: Path, *args: Any) -> None:
        real(path, *args)
        with Path(path).open("r+b") as file:
            file.seek(750)
            file.write(b"\x55")

    monkeypatch.setattr(stream, "_finish", finish)
    with pytest.raises(CorruptError, match="do not hold what the source holds"):
        lazyckpt.open(training).to_dcp(tmp_path / "out", verify=True)
    assert sorted(os.listdir(tmp_path)) == ["training.pt"]


def test_refused_destinations(training: Path, tmp_path: Path) -> None:
    view = lazyckpt.open(training)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    with pytest.raises(DestinationError, match="no distributed checkpoint"):
        view.to_dcp(tmp_path / "other", overwrite=True)
    with pytest.raises(DestinationError, match="is a file"):
        view.to_dcp(tmp_path / "other" / "notes.txt")
    view.to_dcp(tmp_path / "out")
    with pytest.raises(DestinationError, match="exists already"):
        view.to_dcp(tmp_path / "out")
    view.select("norm").to_dcp(tmp_path / "out", overwrite=True)
    assert list(lazyckpt.open(tmp_path / "out")) == ["norm"]
    found = lazyckpt.open(tmp_path / "out")
    for place in (tmp_path / "out", tmp_path / "out" / "deeper"):
        with pytest.raises(DestinationError, match=r"holds the checkpoint|inside of the checkpoint"):
            found.to_dcp(place, overwrite=True)


def same(found: lazyckpt.CheckpointView, wanted: lazyckpt.CheckpointView) -> None:
    assert set(found.states) == set(wanted.states)
    for state, view in wanted.states.items():
        assert set(found.states[state]) == set(view), state
        for name, tensor in view.items():
            assert bit_equal(found.states[state][name][...], tensor[...]), (state, name)
