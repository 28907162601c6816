"""What DeepSpeed's writers themselves get wrong, or leave for a reader to fall over: that each fault is in the files as
said, that reading is right all the same, and where the user is told.

The order under round_robin_gradients, and what ds_to_universal makes of it: also in test_deepspeed_agreement.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.core.extents import Extent
from lazyckpt.testing.oracle import same

from .conftest import complete
from .writers import Case, bit_equal

TAG = "global_step3"


def _equal(view: lazyckpt.CheckpointView, case: Case) -> None:
    for state, tensors in complete(case).truth.items():
        for name, tensor in tensors.items():
            same(view.states[state][name][...], tensor, (state, name))


def _rank_file(case: Case, rank: int) -> Any:
    """What a rank's optimizer file holds beside its tensors."""
    (path,) = (case.path / TAG).glob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    meta: Any = lazyckpt.open(path).meta
    return meta["optimizer_state_dict"]


@pytest.mark.parametrize("name", ["zero1_round_robin", "zero2_round_robin"])
def test_slice_mappings_are_wrong_under_round_robin(zero_cases: dict[str, Case], name: str) -> None:
    """base_optimizer.py `_link_all_hp_params` maps the order that round_robin_gradients has changed."""
    case = zero_cases[name]
    view = lazyckpt.open(case.path)
    shapes = {n: torch.Size(s).numel() for n, s in case.info["shapes"].items()}
    wrong = 0
    for group, mapping in zip(case.info["group_names"], _rank_file(case, 0)["param_slice_mappings"], strict=True):
        starts, at = {}, 0
        for param in group:
            starts[param], at = at, at + shapes[param]
        wrong += sum(address.start != starts[param] for param, address in mapping.items())
    assert wrong, "the fault is in the file"
    _equal(view, case)
    (line,) = view.problems
    assert "param_slice_mappings" in line and "round_robin_gradients" in line and "ds_to_universal" in line


@pytest.mark.parametrize(
    "name",
    ["zero1_bf16_dp3", "zero2_fp32_dp4", "zero1_aligned", "bf16_optimizer_dp3", "zero3_fp32_dp4", "zero3_bf16_dp3"],
)
def test_padding_is_never_read(zero_cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    """stage3.py leaves uninitialised memory behind a parameter that does not fill its pieces, frozen ones too
    (partition_parameters.py). Here all that no tensor needs is made NaN."""
    case = zero_cases[name]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    view = lazyckpt.open(folder)
    needed: dict[str, list[tuple[int, int]]] = {}
    for tensors in view.states.values():
        for t in tensors.values():
            for fragment in t.fragments:
                assert isinstance(fragment.extent, Extent)
                extent, size = fragment.extent, fragment.extent.dtype.itemsize
                count = torch.Size(extent.shape).numel()
                needed.setdefault(extent.path, []).append((extent.offset, extent.offset + count * size))
    padded = 0
    for raw, t in view.stored.items():
        if not ("frozen_param_fragments" in raw or "_groups" in raw or "exp_avg" in raw):
            continue
        extent = t.fragments[0].extent
        assert isinstance(extent, Extent)
        data = bytearray((folder / extent.path).read_bytes())
        size = extent.dtype.itemsize
        for at in range(extent.offset, extent.offset + t.nbytes, size):
            if not any(lo <= at < hi for lo, hi in needed.get(extent.path, ())):
                data[at : at + size] = b"\xff" * size
                padded += 1
        (folder / extent.path).write_bytes(data)
    assert padded
    _equal(lazyckpt.open(folder, cache=False), case)


@pytest.mark.parametrize("name", ["zero1_bf16_dp2", "zero1_fp32_dp3", "bf16_optimizer_dp1"])
def test_stage_1_has_frozen_parameters_in_the_module_alone(zero_cases: dict[str, Case], name: str) -> None:
    case = zero_cases[name]
    view = lazyckpt.open(case.path)
    meta: Any = view.meta
    assert case.info["frozen"] and meta["frozen_param_shapes"] is None and meta["frozen_param_fragments"] is None
    for frozen in case.info["frozen"]:
        for state in ("weights", "fp32"):
            same(view.states[state][frozen][...], case.truth["weights"][frozen], (state, frozen))
            assert [f.extent.path for f in view.states[state][frozen].fragments] == [
                f"{TAG}/mp_rank_00_model_states.pt"
            ]


@pytest.mark.parametrize("name", ["zero1_bf16_dp2", "zero2_bf16_dp3", "zero3_bf16_dp2", "bf16_optimizer_dp3"])
@pytest.mark.parametrize("prefix", ["", "fp16_"])
def test_the_prefix_of_a_file_name_says_nothing(
    zero_cases: dict[str, Case], tmp_path: Path, name: str, prefix: str
) -> None:
    """engine.py `_get_zero_ckpt_name` puts bf16_ before all that is trained in bf16, whatever optimizer it is."""
    case = zero_cases[name]
    folder = Path(shutil.copytree(case.path, tmp_path / "copy"))
    renamed = 0
    for path in (folder / TAG).glob("bf16_zero_pp_rank_*"):
        path.rename(path.with_name(prefix + path.name.removeprefix("bf16_")))
        renamed += 1
    assert renamed == case.info["dp"]
    view = lazyckpt.open(folder)
    assert view.format == lazyckpt.open(case.path).format
    _equal(view, case)


def test_paddings_that_exceed_the_partition(zero_cases: dict[str, Case]) -> None:
    """bf16_optimizer.py notes the padding of a whole group for the last rank, which may hold less than that."""
    case = zero_cases["bf16_optimizer_dp3"]
    paddings = _rank_file(case, 2)["group_paddings"]
    view = lazyckpt.open(case.path)
    held = [
        view.stored[f"bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt/optimizer_state_dict.{key}.{g}"].numel()
        for g, key in enumerate(["single_partition_of_fp32_groups"] * len(paddings))
    ]
    assert any(padding > n for padding, n in zip(paddings, held, strict=True)), (paddings, held)
    _equal(view, case)


def test_experts_have_local_numbers_in_the_optimizer_files(kinds: dict[str, Case]) -> None:
    case = kinds["moe_zero1_residual_dp4"]
    view = lazyckpt.open(case.path)
    meta: Any = view.meta
    listed = {n for group in meta["param_shapes"] for n in group if ".deepspeed_experts." in n}
    trained = {n for n in case.truth["fp32"] if ".deepspeed_experts." in n}
    assert listed < trained and len(trained) == len(listed) * case.info["ep"]
    for name in trained:
        assert bit_equal(view.states["fp32"][name][...], case.truth["fp32"][name]), name
    first, other = sorted(n for n in trained if n.startswith("moe1") and n.endswith("w_in.weight"))[::3]
    assert not bit_equal(view.states["fp32"][first][...], view.states["fp32"][other][...])


@pytest.mark.parametrize("name", ["pipe_zero1_dp2", "pipe_zero1_pp3", "megatron_3d_even_dp2"])
def test_the_first_stages_copy_of_a_shared_module_is_read(kinds: dict[str, Case], name: str) -> None:
    """What is not in ``tied_weight_attr`` is not kept in step: later stages' copies go stale."""
    case = kinds[name]
    view = lazyckpt.open(case.path)
    assert case.info["differing_over_stages"], "the fault is in the files"
    for shared, states in case.info["differing_over_stages"].items():
        for state in states:
            assert bit_equal(view.states[state][shared][...], case.truth[state][shared]), (state, shared)
        assert any(repr(shared) in line and line.code == "duplicate-tensor" for line in view.problems)
        assert {f.rank.pp for f in view.states["fp32"][shared].fragments if f.rank is not None} == {0}
