"""The recorded checkpoints (recordings.py) are complete, small and comparable; the lanes take what they are to take."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from .lanes import sampled
from .recordings import GOLDEN, GROUPS, archives, differences, pack, recorded, unpack

MOST = 32 << 20  # bytes of all recordings


@pytest.mark.parametrize("group", GROUPS)
def test_every_case_is_recorded_or_listed_as_not_recorded(group: str) -> None:
    found = {path.name.removesuffix(".tar.xz") for path in (GOLDEN / group).glob("*.tar.xz")}
    assert found == set(archives(group)) and found
    assert {*recorded(group), *GROUPS[group].unrecorded} == {*GROUPS[group].names}


@pytest.mark.parametrize("group", GROUPS)
def test_the_versions_of_the_writers_are_recorded(group: str) -> None:
    versions = json.loads((GOLDEN / group / "writers.json").read_text())
    assert set(versions) == set(GROUPS[group].packages)


def test_recordings_are_small() -> None:
    assert sum(path.stat().st_size for path in GOLDEN.rglob("*") if path.is_file()) < MOST


@pytest.fixture
def old(tmp_path: Path) -> Path:
    folder = tmp_path / "old"
    folder.mkdir()
    unpack("huggingface", folder)
    return folder


@pytest.fixture
def new(old: Path) -> Path:
    return shutil.copytree(old, old.parent / "new")


@pytest.mark.slow
def test_equal_cases_do_not_differ_and_give_the_same_archives(old: Path, new: Path) -> None:
    assert list(differences("huggingface", old, new)) == []
    for name in archives("huggingface"):
        assert pack(new, name) == (GOLDEN / "huggingface" / f"{name}.tar.xz").read_bytes()


def test_what_differs_is_named(old: Path, new: Path) -> None:
    weights = new / "llama_single" / "ckpt" / "model.safetensors"
    tensors = load_file(weights)
    changed, reshaped, lost, close = list(tensors)[:4]
    tensors[changed] = tensors[changed] + 1
    tensors[reshaped] = tensors[reshaped].flatten()
    del tensors[lost]
    tensors[close] = tensors[close] * (1 + 1e-6)  # another processor
    save_file(tensors, weights, {"format": "pt"})
    truth = torch.load(new / "bert" / "truth.pt")
    truth["weights"]["more"] = torch.ones(2)
    torch.save(truth, new / "bert" / "truth.pt")
    (new / "mixtral" / "ckpt" / "config.json").unlink()
    shutil.rmtree(new / "bin_sharded")

    found = list(differences("huggingface", old, new))
    for name, what in {
        "llama_single": (changed, reshaped, lost),
        "bert": ("more",),
        "mixtral": ("ckpt/config.json",),
        "bin_sharded": ("no longer written",),
    }.items():
        lines = [line for line in found if line.startswith(name)]
        assert all(any(word in line for line in lines) for word in what), (name, lines)
    assert not any(close in line or line.startswith("llama_sharded") for line in found)


def test_a_sample_marks_the_rest() -> None:
    params = sampled(["a", ("b", 1), "c"], ["a"])
    assert params[0] == "a"
    assert [(p.values, [mark.name for mark in p.marks]) for p in params[1:]] == [
        (("b", 1), ["full"]),
        (("c",), ["full"]),
    ]
    with pytest.raises(ValueError, match="'d'"):
        sampled(["a"], ["d"])
