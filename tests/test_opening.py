"""What opening looks at, and that a file that is one of many says so."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import lazyckpt
from lazyckpt.formats.opening import opened as found_by
from lazyckpt.testing import counting

from .conftest import need
from .writers import Case

# -- everything once


def repeated(names: list[str]) -> set[str]:
    return {name for name in names if names.count(name) > 1}


def described(specs: Mapping[str, lazyckpt.LazyTensor]) -> list[tuple[object, ...]]:
    return [(name, t.shape, t.dtype, t.fragments) for name, t in specs.items()]


@pytest.mark.parametrize("name", ["zero3_bf16_dp2", "zero3_fp32_dp4", "zero2_bf16_dp2"])
def test_opening_looks_at_everything_once(zero_cases: dict[str, Case], name: str) -> None:
    path = zero_cases[name].path
    view, counts = counting.opened(path)
    assert sorted(counts.listed) == ["", (path / "latest").read_text()]
    assert sorted(counts.looked) == sorted(view.files)
    assert counts.made == 0
    assert [request.path for request in counts.log].count("latest") == 1


def test_opening_again_reads_the_tag_alone(zero_cases: dict[str, Case]) -> None:
    path = zero_cases["zero3_bf16_dp2"].path
    first, _ = counting.opened(path, cache=True)
    again, counts = counting.opened(path, cache=True)
    assert sorted(counts.listed) == ["", (path / "latest").read_text()]
    assert (counts.looked, counts.made, counts.paths) == ([], 0, {"latest"})
    assert described(again) == described(first)


def test_a_rank_file_and_its_folder_are_listed_once(zero_cases: dict[str, Case]) -> None:
    path = zero_cases["zero3_bf16_dp2"].path
    file = next((path / (path / "latest").read_text()).glob("*optim_states.pt"))
    _, counts = counting.opened(file)
    assert counts.listed == [""]


def test_megatron_lists_each_folder_once(megatron_cases: dict[str, Case]) -> None:
    view, counts = counting.opened(megatron_cases["tp2_pp2_bf16"].path)
    assert len(counts.listed) == 6  # the run's, the iteration's, four ranks'
    assert not repeated(counts.listed)
    assert sorted(counts.looked) == sorted(view.files)


def test_the_raw_names_take_no_second_look(zero_cases: dict[str, Case]) -> None:
    view, counts = counting.opened(zero_cases["zero3_bf16_dp2"].path)
    counts.clear()
    stored = described(view.stored)
    assert stored
    assert (counts.requests, counts.looked, counts.listed) == (0, [], [])
    copy = pickle.loads(pickle.dumps(view))  # which has to read the pickles
    assert described(copy.stored) == stored
    assert copy._store.counts.requests > 0


def test_wrappers_are_stripped_once(tmp_path: Path) -> None:
    torch.save({"module._orig_mod.a": torch.ones(2)}, tmp_path / "x.pt")
    (_, first), (_, again) = (found_by(tmp_path / "x.pt", None) for _ in range(2))
    assert list(first.states["weights"]) == ["a"]
    assert again is first


# -- a file that is one of many


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
