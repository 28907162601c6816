"""ZeRO-1, ZeRO-2 and ZeRO-3 checkpoints: what the training processes held, from the files of all their ranks."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt.testing import contract
from lazyckpt.testing.contract import Check
from lazyckpt.testing.counting import opened
from lazyckpt.testing.oracle import indexed, keys, same, same_values

from . import processes
from .conftest import complete
from .writers import Case
from .writers.nasty_model import NastyModel

_LAYOUT: tuple[Check, ...] = (
    contract.names_shapes_dtypes,
    contract.sizes_count_each_tensor_once,
    contract.aliases,
    contract.whole_tensors,
    contract.random_slices,
)


@pytest.mark.product
@pytest.mark.parametrize("check", _LAYOUT, ids=lambda check: check.__name__)
def test_every_stage_dtype_degree_and_option(zero_case: Case, check: Check) -> None:
    check(complete(zero_case))


@pytest.mark.product
@pytest.mark.parametrize("check", [c for c in contract.CHECKS if c not in _LAYOUT], ids=lambda check: check.__name__)
def test_contract(zero_kind: Case, check: Check) -> None:
    check(complete(zero_kind))


def ranks_of(case: Case, name: str) -> torch.Tensor:
    """Which rank's optimizer file holds each element of a parameter, by the layout of the stage alone."""
    dp, shapes = case.info["dp"], case.info["shapes"]
    numel = prod(shapes[name])
    if case.info["stage"] == 3:
        return torch.arange(numel).div(-(-numel // dp), rounding_mode="floor").view(shapes[name])
    assert not case.info["spec"]["parameter_alignment"]
    (group,) = [g for g in case.info["group_names"] if name in g]
    sizes = [prod(shapes[n]) for n in group]
    width = -(-sum(sizes) // (2 * dp)) * 2
    start = sum(sizes[: group.index(name)])
    return torch.arange(start, start + numel).div(width, rounding_mode="floor").view(shapes[name])


# -- what the view says


def test_format_mesh_and_problems(zero_case: Case) -> None:
    case = zero_case
    view = lazyckpt.open(case.path)
    assert view.format == f"deepspeed-zero{case.info['stage']}"
    assert view.mesh == lazyckpt.Mesh(tp=1, pp=1, dp=case.info["dp"], ep=1)
    if case.info["stage"] < 3:
        spec = case.info["spec"]  # (with parameter_alignment, the mappings are right)
        mapped_wrong = spec["round_robin"] and not spec["parameter_alignment"]
        assert [line.code == "inconsistent-metadata" for line in view.problems] == [True] * mapped_wrong
        return
    first, *others = (case.rank_buffers[rank] for rank in sorted(case.rank_buffers))
    for name in first:  # every rank of ZeRO-3 saves its own buffers
        differ = any(not torch.equal(first[name], other[name]) for other in others)
        assert any(repr(name) in line for line in view.problems) == differ, (name, view.problems)
    assert len(view.problems) <= len(first)


def test_rank_0s_buffers_are_read_and_the_others_stored(zero_cases: dict[str, Case]) -> None:
    for name in ("zero3_bf16_dp4", "zero3_fp32_dp2"):
        case = zero_cases[name]
        view = lazyckpt.open(case.path)
        for rank, buffers in case.rank_buffers.items():
            for buffer, value in buffers.items():
                raw = f"zero_pp_rank_{rank.removeprefix('rank')}_mp_rank_00_model_states.pt/module.{buffer}"
                same(view.stored[raw][...], value, raw)
                if rank == "rank0":
                    same(view[buffer][...], value, buffer)


def test_meta(zero_cases: dict[str, Case]) -> None:
    for name, case in zero_cases.items():
        meta: Any = lazyckpt.open(case.path).meta
        assert meta["step"] == meta["global_steps"] == 3, name
        assert (meta["tag"], meta["dp_world_size"]) == ("global_step3", case.info["dp"])
        assert meta["ds_config"]["zero_optimization"]["stage"] == case.info["stage"]
        assert meta["lr_scheduler"] == {"last_batch_iteration": 2}
        assert repr(meta["optimizer"])


def test_client_state(zero_cases: dict[str, Case]) -> None:
    view = lazyckpt.open(zero_cases["zero2_client_state"].path)
    meta: Any = view.meta
    assert (meta["epoch"], meta["note"], meta["nested"]) == (7, "ours", {"lr": [0.5, 0.25]})
    same(view.stored["mp_rank_00_model_states.pt/ema"][...], torch.arange(6.0), "ema")
    view = lazyckpt.open(zero_cases["zero3_client_state"].path)
    meta = view.meta
    assert meta["epoch"] == 8
    same(view.stored["zero_pp_rank_1_mp_rank_00_model_states.pt/ema"][...], torch.arange(5), "ema")


def test_stored_has_every_tensor_of_every_file_under_its_raw_name(zero_cases: dict[str, Case]) -> None:
    for name in ("zero2_elastic", "zero2_round_robin", "zero3_sub_groups", "bf16_optimizer_dp3"):
        case = zero_cases[name]
        raw = lazyckpt.open(case.path).stored
        folder = case.path / "global_step3"
        assert {n.split("/")[0] for n in raw} == {p.name for p in folder.glob("*.pt")}
        for path in folder.glob("*model_states.pt"):  # these hold no class of DeepSpeed's
            for key, tensor in torch.load(path)["module"].items():
                same(raw[f"{path.name}/module.{key}"][...], tensor, (path.name, key))
        groups = "fp32_flat_groups" if case.info["stage"] == 3 else "single_partition_of_fp32_groups"
        for path in folder.glob("*optim_states.pt"):
            flat = raw[f"{path.name}/optimizer_state_dict.{groups}.0"]
            assert (flat.ndim, flat.dtype) == (1, torch.float32)
    with pytest.raises(lazyckpt.TensorNotFoundError):
        _ = raw["mp_rank_00_model_states.pt/module.no.such"]


# -- what is read


@pytest.mark.parametrize(
    "name", ["zero1_fp16_dp3", "zero2_bf16_dp4", "zero2_round_robin", "zero3_fp32_dp4", "zero2_dp11"]
)
def test_a_slice_touches_the_ranks_that_hold_it(zero_cases: dict[str, Case], name: str) -> None:
    case = zero_cases[name]
    view, counts = opened(case.path)
    crossing = 0
    for state in ("fp32", "exp_avg", "exp_avg_sq"):
        for param, whole in case.truth[state].items():
            owners, t = ranks_of(case, param), view.states[state][param]
            crossing += int(owners.min() != owners.max())
            counts.clear()
            same(t[...], whole, param)
            assert counts.bytes == t.nbytes, "its own bytes, no neighbour's, nothing twice"
            assert {_rank(path) for path in counts.paths} == set(owners.flatten().tolist())
            for key in keys(whole.shape, f"{name} {state} {param}", 3):
                counts.clear()
                same(t[key], indexed(whole, key), (param, key))
                assert {_rank(path) for path in counts.paths} == set(indexed(owners, key).flatten().tolist())
    assert crossing > 5, "this case should cut parameters across ranks"


def _rank(path: str) -> int:
    assert path.endswith("_optim_states.pt")
    return int(path.rsplit("zero_pp_rank_", 1)[1].split("_")[0])


def test_fragments_name_rank_file_and_span(zero_cases: dict[str, Case]) -> None:
    for name in ("zero2_fp16_dp4", "zero3_fp32_dp4"):
        case = zero_cases[name]
        view = lazyckpt.open(case.path)
        for param, whole in case.truth["exp_avg"].items():
            owners = ranks_of(case, param).flatten()
            fragments = view.states["exp_avg"][param].fragments
            assert len(fragments) == len(list(fragments)) == len(set(owners.tolist()))
            covered = []
            for fragment in fragments:
                assert fragment.span is not None and fragment.rank is not None
                lo, hi = fragment.span
                assert (owners[lo:hi] == fragment.rank.dp).all() and _rank(fragment.extent.path) == fragment.rank.dp
                covered += list(range(lo, hi))
            assert covered == list(range(whole.numel()))


def test_explain_names_files_and_bytes(zero_cases: dict[str, Case]) -> None:
    case = zero_cases["zero3_fp32_dp4"]
    t = lazyckpt.open(case.path).states["exp_avg"]["embed.weight"]
    text = t.explain()
    for rank in range(4):
        assert f"zero_pp_rank_{rank}_" in text
    assert f"{t.nbytes:,} bytes" in text
    row = t.explain(0)
    assert "zero_pp_rank_0_" in row and "zero_pp_rank_3_" not in row
    assert f"{t.nbytes // len(t):,} bytes" in row


# -- the main job


@pytest.mark.parametrize("name", ["zero1_fp32_dp2", "zero2_bf16_dp3", "zero3_bf16_dp2", "bf16_optimizer_dp3"])
@pytest.mark.parametrize("how", ["load_state_dict", "load_into", "on meta"])
def test_the_model_loads(zero_cases: dict[str, Case], name: str, how: str) -> None:
    case = zero_cases[name]
    spec, stage = case.info["spec"], case.info["stage"]
    torch.manual_seed(12345)
    with torch.device("meta" if how == "on meta" else "cpu"):
        model = NastyModel(spec["hidden"], spec["layers"], spec["vocab"], with_empty=stage < 3)
    view = lazyckpt.open(case.path)
    answer = model.load_state_dict(view) if how == "load_state_dict" else view.load_into(model)
    assert tuple(answer) == ([], [])
    truth = complete(case).truth["weights" if stage < 3 else "fp32"]
    assert model.state_dict().keys() == truth.keys()
    for key, tensor in model.state_dict().items():
        want = truth[key] if not truth[key].is_floating_point() else truth[key].float()
        same_values(tensor, want, key)
    assert model.lm_head.weight is model.embed.weight and model.norm.weight is model.norm_alias.weight
    assert not model.anchor.requires_grad and model.mix.requires_grad


@pytest.mark.slow
def test_nothing_of_deepspeed_is_imported(zero_cases: dict[str, Case]) -> None:
    code = """if True:
        import sys
        import lazyckpt
        for path in sys.argv[1:]:
            view = lazyckpt.open(path)
            assert repr(view) and view.explain() and repr(view.meta)
            for state in view.states.values():
                assert state.to()
            assert view.stored.to()
        print(*(name for name in sys.modules if name.split(".")[0] == "deepspeed"))
    """
    paths = [
        str(zero_cases[name].path)
        for name in ("zero1_fp16_dp3", "zero2_bf16_dp2", "zero3_bf16_dp2", "bf16_optimizer_dp1")
    ]
    done = processes.run("-c", code, *paths)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
