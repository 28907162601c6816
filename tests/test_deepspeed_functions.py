"""DeepSpeed's consolidation functions against DeepSpeed's own and against what the processes held."""

from __future__ import annotations

import copy
import json
import shutil
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lazyckpt
from lazyckpt import LazyTensor
from lazyckpt.core.fragments import fragments_of
from lazyckpt.core.plan import plan
from lazyckpt.deepspeed import (
    clone_tensors_for_torch_save,
    convert_zero_checkpoint_to_fp32_state_dict,
    convert_zero_checkpoint_to_state_dict,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from lazyckpt.errors import DataError, DestinationError, FormatError, MissingFileError
from lazyckpt.formats.shared.flat import FlatFragments

from .writers import Case, bit_equal
from .writers.nasty_model import NastyModel

pytestmark = pytest.mark.xdist_group("deepspeed")  # its import takes seconds: in one process only


def _differences(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> set[str]:
    return {
        n
        for n in found.keys() | wanted.keys()
        if n not in found or n not in wanted or not bit_equal(found[n], wanted[n])
    }


def _wanted(case: Case) -> dict[str, torch.Tensor]:
    """What DeepSpeed's zero_to_fp32 gave, and what it loses: frozen parameters of ZeRO-1."""
    wanted = dict(case.reference["zero_to_fp32"])
    if case.info["stage"] == 1:
        held = get_fp32_state_dict_from_zero_checkpoint(case.path).keys()
        wanted |= {n: t for n, t in case.truth["weights"].items() if n in case.info["frozen"] and n in held}
    return wanted


def _has_reference(case: Case) -> bool:
    return "zero_to_fp32" in case.reference


def test_the_state_dict_is_that_of_zero_to_fp32(zero_case: Case) -> None:
    found = get_fp32_state_dict_from_zero_checkpoint(zero_case.path)
    if _has_reference(zero_case):
        assert _differences(found, _wanted(zero_case)) == set()
    for name, truth in zero_case.truth["fp32"].items():
        assert bit_equal(found[name], truth)
    for alias, owner in zero_case.info["tied"].items():
        assert found[alias] is found[owner]


def test_lazy_mode_reads_when_asked(zero_kind: Case) -> None:
    lazy = get_fp32_state_dict_from_zero_checkpoint(zero_kind.path, lazy_mode=True)
    whole = get_fp32_state_dict_from_zero_checkpoint(zero_kind.path)
    assert list(lazy) == list(whole)
    for name, tensor in lazy.items():
        assert isinstance(tensor, LazyTensor) and tensor.shape == whole[name].shape
        assert bit_equal(tensor.contiguous(), whole[name])


def test_frozen_parameters_can_be_left_out(zero_kind: Case) -> None:
    every = get_fp32_state_dict_from_zero_checkpoint(zero_kind.path)
    trained = get_fp32_state_dict_from_zero_checkpoint(zero_kind.path, exclude_frozen_parameters=True)
    frozen = set(zero_kind.info["frozen"]) & every.keys()
    aliases = {a for a, o in zero_kind.info["tied"].items() if o in frozen}
    assert every.keys() - trained.keys() - set(zero_kind.info.get("empty", ())) == frozen | aliases
    assert all(bit_equal(trained[n], every[n]) for n in trained)


@pytest.mark.parametrize("safe", [True, False])
def test_converted_files_hold_the_state_dict(zero_kind: Case, tmp_path: Path, safe: bool) -> None:
    state = {
        n: t.float() if t.is_floating_point() else t
        for n, t in get_fp32_state_dict_from_zero_checkpoint(zero_kind.path).items()
    }
    (file,) = convert_zero_checkpoint_to_fp32_state_dict(zero_kind.path, tmp_path / "out", safe_serialization=safe)
    assert file.name == ("model.safetensors" if safe else "pytorch_model.bin")
    tied = zero_kind.info["tied"]
    if safe:
        assert _differences(load_file(file), {n: t for n, t in state.items() if n not in tied}) == set()
        assert _differences(lazyckpt.open(file).to(), state) == set()
    else:
        found = torch.load(file, weights_only=True)
        assert _differences(found, state) == set()
        assert zipfile.ZipFile(file).testzip() is None
        assert all(found[a].data_ptr() == found[o].data_ptr() for a, o in tied.items() if found[o].numel())
    # what was there is replaced, as DeepSpeed does
    convert_zero_checkpoint_to_fp32_state_dict(zero_kind.path, tmp_path / "out", safe_serialization=safe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["zero1_bf16_dp2", "zero2_bf16_dp3", "zero3_bf16_dp2", "zero3_fp32_dp4"])
def test_files_are_those_of_deepspeed(zero_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    from deepspeed.utils import zero_to_fp32 as theirs

    case = zero_cases[name]
    theirs.convert_zero_checkpoint_to_fp32_state_dict(str(case.path), str(tmp_path / "theirs"), max_shard_size="4KB")
    convert_zero_checkpoint_to_fp32_state_dict(case.path, tmp_path / "ours", max_shard_size="4KB")
    index = "pytorch_model.bin.index.json"
    maps = [json.loads((tmp_path / who / index).read_text())["weight_map"] for who in ("ours", "theirs")]
    found, wanted = (
        {n: torch.load(tmp_path / who / file)[n] for n, file in weight_map.items()}
        for who, weight_map in zip(("ours", "theirs"), maps, strict=True)
    )
    # of ZeRO-1, DeepSpeed loses what was not trained: frozen parameters, and those without elements
    lost = {n for n, t in found.items() if n not in wanted and (n in case.info["frozen"] or not t.numel())}
    assert not lost or case.info["stage"] == 1
    assert _differences({n: t for n, t in found.items() if n not in lost}, wanted) == set()
    if not lost:  # else the shards begin elsewhere
        assert maps[0] == maps[1]
        assert sorted(p.name for p in (tmp_path / "ours").iterdir()) == sorted(
            p.name for p in (tmp_path / "theirs").iterdir()
        )
        for file in sorted(set(maps[0].values())):
            assert torch.load(tmp_path / "ours" / file).keys() == torch.load(tmp_path / "theirs" / file).keys()


@pytest.mark.slow
def test_tied_parameters_do_not_keep_from_safetensors(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    """DeepSpeed's own converter raises: "Some tensors share memory"."""
    from deepspeed.utils import zero_to_fp32 as theirs

    case = zero_cases["zero2_bf16_dp2"]
    with pytest.raises(RuntimeError, match="share memory"):
        theirs.convert_zero_checkpoint_to_fp32_state_dict(str(case.path), str(tmp_path), safe_serialization=True)
    convert_zero_checkpoint_to_fp32_state_dict(case.path, tmp_path / "ours", safe_serialization=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "fp16", "torch.float32", "BF16"])
def test_other_dtypes(zero_cases: dict[str, Case], tmp_path: Path, dtype: Any) -> None:
    case = zero_cases["zero2_bf16_dp2"]
    convert_zero_checkpoint_to_state_dict(case.path, tmp_path, dtype=dtype, max_shard_size=None)
    wanted = {"bf": torch.bfloat16, "fp": torch.float16, "to": torch.float32}[str(dtype).lower()[:2]]
    wanted = torch.bfloat16 if "bfloat16" in str(dtype) else wanted
    state = get_fp32_state_dict_from_zero_checkpoint(case.path)
    found = torch.load(tmp_path / "pytorch_model.bin")
    for name, tensor in state.items():
        assert bit_equal(found[name], tensor.to(wanted) if tensor.is_floating_point() else tensor)
    with pytest.raises(DataError, match="float64"):
        convert_zero_checkpoint_to_state_dict(case.path, tmp_path, dtype="float64")


def test_a_model_is_filled(zero_kind: Case) -> None:
    torch.manual_seed(7)
    shape = zero_kind.truth["fp32"]["embed.weight"].shape
    blocks = {n.split(".")[1] for n in zero_kind.truth["fp32"] if n.startswith("blocks.")}
    model = NastyModel(shape[1], len(blocks), shape[0], with_empty=zero_kind.info["stage"] < 3)
    before = copy.deepcopy(model.state_dict())
    assert load_state_dict_from_zero_checkpoint(model, zero_kind.path) is model
    state = get_fp32_state_dict_from_zero_checkpoint(zero_kind.path)
    for name, tensor in model.state_dict().items():
        assert bit_equal(tensor, state[name].to(tensor.dtype) if name in state else before[name]), name


def test_a_model_of_another_shape_stays_as_it_is(zero_cases: dict[str, Case]) -> None:
    model = torch.nn.Module()
    model.embed = torch.nn.Embedding(3, 5)
    before = model.embed.weight.detach().clone()
    with pytest.raises(DataError, match=r"embed\.weight.*\(3, 5\)"):
        load_state_dict_from_zero_checkpoint(model, zero_cases["zero2_bf16_dp2"].path)
    assert torch.equal(model.embed.weight, before)


def test_what_is_missing_is_told_and_nothing_is_written(zero_cases: dict[str, Case], tmp_path: Path) -> None:
    case = shutil.copytree(zero_cases["zero3_bf16_dp2"].path, tmp_path / "in")
    next(case.glob("*/*zero_pp_rank_1_*optim*")).unlink()
    with pytest.raises(MissingFileError, match="zero_pp_rank_1"):
        convert_zero_checkpoint_to_fp32_state_dict(case, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(MissingFileError, match="no such file"):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path / "nowhere")
    with pytest.raises(MissingFileError, match="global_step9"):
        get_fp32_state_dict_from_zero_checkpoint(zero_cases["zero3_bf16_dp2"].path, tag="global_step9")
    save_file({"a": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError):
        get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_the_checkpoint_itself_is_not_written_to(zero_cases: dict[str, Case]) -> None:
    path = zero_cases["zero2_bf16_dp2"].path
    tag = path / (path / "latest").read_text()
    before = sorted(tag.iterdir())
    with pytest.raises(DestinationError, match="that is read"):
        convert_zero_checkpoint_to_fp32_state_dict(path, tag)
    assert sorted(tag.iterdir()) == before


@pytest.mark.slow
def test_clones_are_like_deepspeeds() -> None:
    from deepspeed.checkpoint.utils import clone_tensors_for_torch_save as theirs

    big = torch.arange(1000.0)
    item = {"a": big[3:5], "b": [big[10:20].view(2, 5).t(), (torch.Size((1, 2)), "text", None)], "c": {1: big[:0]}}
    for device in ("cpu", torch.device("cpu"), "meta"):
        ours, wanted = clone_tensors_for_torch_save(item, device), theirs(item, device)
        assert repr(ours) == repr(wanted)
    ours = clone_tensors_for_torch_save(item)
    assert ours["a"].untyped_storage().nbytes() == 8
    assert type(ours["b"][1]) is tuple
    parameter = torch.nn.Parameter(torch.ones(2))
    assert not clone_tensors_for_torch_save(parameter).requires_grad


def test_a_lazy_tensor_is_read_by_cloning(zero_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(zero_cases["zero2_bf16_dp2"].path)
    cloned = clone_tensors_for_torch_save({"w": view["embed.weight"]})
    assert bit_equal(cloned["w"], view["embed.weight"][...])


def test_what_is_missing_is_known_without_a_plan(zero_kind: Case, tmp_path: Path) -> None:
    copied = shutil.copytree(zero_kind.path, tmp_path / "in")
    for path in (zero_kind.path, copied):
        if path == copied:
            sorted(copied.glob("*/*optim_states.pt"))[-1].unlink()
        for state in lazyckpt.open(path).states.values():
            for tensor in state.values():
                intact = fragments_of(tensor.spec.fragments).intact
                try:
                    plan(tensor.spec, tuple(map(range, tensor.shape)))
                except MissingFileError:
                    assert not intact
                    with pytest.raises(MissingFileError):
                        tensor._check()
                else:
                    assert intact or not isinstance(tensor.spec.fragments, FlatFragments)
                    tensor._check()
