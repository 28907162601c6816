"""A file that is one of many says so, and a whole one does not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import lazyckpt

from .conftest import need
from .writers import Case


def told(path: Path) -> list[str]:
    return [line for line in lazyckpt.open(path).problems if line.code == "part-of-checkpoint"]


def test_a_rank_file_alone(zero_cases: dict[str, Case]) -> None:
    for name in ("zero2_bf16_dp2", "zero3_bf16_dp2"):
        path = zero_cases[name].path
        tag = path / (path / "latest").read_text()
        for file in tag.glob("*.pt"):
            assert told(file) == [
                f"{file.name} is one file of a checkpoint (deepspeed): open its folder, {tag}, for all of it"
            ]


def test_a_shard_alone(huggingface_cases: dict[str, Case]) -> None:
    for name, kind in (("llama_sharded", "*.safetensors"), ("bin_sharded", "*.bin")):
        files = list(huggingface_cases[name].path.glob(kind))
        assert len(files) > 1
        for file in files:
            assert [line.startswith(f"{file.name} is one file of a checkpoint") for line in told(file)] == [True]
    assert told(huggingface_cases["llama_single"].path / "model.safetensors") == []


def test_an_optimizer_alone(trainer_cases: dict[str, Case]) -> None:
    need("transformers")
    folder = trainer_cases["trainer_llama"].path / "checkpoint-4"
    assert len(told(folder / "optimizer.pt")) == 1
    assert told(folder / "model.safetensors") == []


@pytest.mark.parametrize("name", ["rank0.pt", "model-00001-of-00002.pt", "optimizer.pt", "frankly.pt"])
def test_a_name_is_not_enough(tmp_path: Path, name: str) -> None:
    """Where the folder is no checkpoint there is nothing else to open."""
    torch.save({"w": torch.ones(2)}, tmp_path / name)
    assert told(tmp_path / name) == []
