"""Distributed checkpoints as one file, against torch's own dcp_to_torch_save."""

from __future__ import annotations

import io
import os
import shutil
import warnings
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as theirs

import lazyckpt
from lazyckpt.distributed import dcp_to_safetensors, dcp_to_torch_save
from lazyckpt.testing.oracle import same

from .writers import Case
from .writers.torch_dcp import CASES

BEYOND = {"zstd", "unknown_codec", "as_safetensors", "no_collectives"}  # what torch's function cannot read here
HUB = {name for name in CASES if name.startswith("hub_")}


def alike(ours: Any, truth: Any, where: str = "") -> None:
    if isinstance(truth, torch.Tensor):
        same(ours, truth, where)
        assert ours.stride() == truth.stride() and not ours.is_conj()
    elif isinstance(truth, dict):
        assert isinstance(ours, dict) and set(ours) == set(truth), where
        for key in truth:
            alike(ours[key], truth[key], f"{where}.{key}")
    elif isinstance(truth, list | tuple):
        assert type(ours) is type(truth) and len(ours) == len(truth), where
        for n, (a, b) in enumerate(zip(ours, truth, strict=True)):
            alike(a, b, f"{where}.{n}")
    elif isinstance(truth, np.ndarray):
        assert ours.dtype == truth.dtype and np.array_equal(ours, truth), where
    else:
        assert type(ours) is type(truth) and ours == truth, where


def torchs(folder: Path, out: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs(folder, out)
    return torch.load(out, weights_only=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES.keys() - BEYOND - HUB))
def test_the_file_is_that_of_torch(dcp_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    folder = dcp_cases[name].path
    path = dcp_to_torch_save(folder, tmp_path / "ours.pt")
    assert path == tmp_path / "ours.pt" and os.listdir(tmp_path) == ["ours.pt"]
    alike(torch.load(path, weights_only=False), torchs(folder, tmp_path / "theirs.pt"))


@pytest.mark.parametrize("name", sorted(BEYOND - {"unknown_codec"}))
def test_what_torch_cannot_read(dcp_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = dcp_cases[name]
    read = torch.load(dcp_to_torch_save(case.path, tmp_path / "x.pt"), weights_only=False)
    for key, whole in case.truth["weights"].items():
        same(read["model"][key], whole.resolve_conj().resolve_neg(), key)
    if name == "no_collectives":
        assert read["step"] == 12
        exp_avg = {key: state["exp_avg"] for key, state in read["optim"]["state"].items()}
        for key, whole in case.truth["exp_avg"].items():
            same(exp_avg[key], whole, key)
    else:
        assert read["epoch"] == 3


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"unknown_codec", "odd", "zstd"}))
def test_weights_as_safetensors(dcp_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    case = dcp_cases[name]
    path = dcp_to_safetensors(case.path, tmp_path / "model.safetensors")
    view = lazyckpt.open(path)
    assert set(view) == set(case.truth["weights"])
    for key, whole in case.truth["weights"].items():
        same(view[key][...], whole, key)
    assert dcp_to_safetensors(case.path, path) == path, "it is replaced"


@pytest.mark.filterwarnings("ignore")
def test_objects_with_tensors_inside(tmp_path: Path) -> None:
    array = np.arange(4.0, dtype=np.float32)
    state = {
        "model": {"w": torch.arange(4.0)},
        "train_state": {"step": io.BytesIO(b"twelve"), "pair": (torch.arange(3), [torch.ones(2), {"a": array}])},
        "sparse list": [None, torch.ones(1), {"x": 3, "deep": [torch.zeros(2), "y"]}],
    }
    for name, flat in (("flat", True), ("whole", False)):
        dcp.save(
            state, checkpoint_id=tmp_path / name, planner=DefaultSavePlanner(flatten_state_dict=flat), no_dist=True
        )
        read = torch.load(dcp_to_torch_save(tmp_path / name, tmp_path / f"{name}.pt"), weights_only=False)
        truth = torchs(tmp_path / name, tmp_path / "theirs.pt")
        for tree in (read, truth):
            tree["train_state"]["step"] = tree["train_state"]["step"].getvalue()
        alike(read, truth)


class Kind(Enum):
    A = 1


@pytest.mark.filterwarnings("ignore")
def test_an_object_of_a_class_is_refused(tmp_path: Path) -> None:
    dcp.save({"model": {"w": torch.ones(2)}, "kind": Kind.A}, checkpoint_id=tmp_path / "x", no_dist=True)
    with pytest.raises(lazyckpt.DataError, match=r"'kind' holds a .*Kind.*dcp_to_safetensors"):
        dcp_to_torch_save(tmp_path / "x", tmp_path / "x.pt")
    dcp_to_safetensors(tmp_path / "x", tmp_path / "x.safetensors")
    assert not (tmp_path / "x.pt").exists()


def test_what_is_lost_is_told_before_anything_is_written(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    folder = Path(shutil.copytree(dcp_cases["fsdp2"].path, tmp_path / "copy"))
    (folder / "__1_0.distcp").unlink()
    for convert, name in ((dcp_to_torch_save, "x.pt"), (dcp_to_safetensors, "x.safetensors")):
        (tmp_path / name).write_bytes(b"what was there")
        with pytest.raises(lazyckpt.MissingFileError, match=r"__1_0\.distcp"):
            convert(folder, tmp_path / name)
        assert (tmp_path / name).read_bytes() == b"what was there"
    with pytest.raises(lazyckpt.MissingFileError, match=r"'epoch' cannot be read.*stream"):
        dcp_to_torch_save(dcp_cases["unknown_codec"].path, tmp_path / "x.pt")


def test_what_is_no_distributed_checkpoint(dcp_cases: dict[str, Case], tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    for convert in (dcp_to_torch_save, dcp_to_safetensors):
        with pytest.raises(lazyckpt.FormatError, match="no distributed checkpoint"):
            convert(tmp_path / "w.pt", tmp_path / "x")
    with pytest.raises(lazyckpt.FormatError, match="to_torch"):
        dcp_to_torch_save(dcp_cases["hub_ranks"].path, tmp_path / "x.pt")
