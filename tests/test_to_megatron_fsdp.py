"""`to_megatron(ckpt_format="fsdp_dtensor")`: the keys that Megatron-FSDP writes, and training goes on from them."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader

import lazyckpt
from lazyckpt.errors import DataError, MeshError

from .conftest import once
from .test_megatron_fsdp import cases
from .writers import Case, bit_equal
from .writers.megatron_core import CASES, MegatronSpec
from .writers.megatron_fsdp import CASES as FSDP
from .writers.megatron_fsdp_resume import resume

__all__ = ["cases"]

WRITTEN = [name for name, spec in FSDP.items() if "hybrid" not in name]
GROUPS = "optimizer.param_to_group_meta."


def loaded(folder: Path) -> dict[str, Any]:
    """Everything in a checkpoint, by key, as torch reads it."""
    about = FileSystemReader(folder).read_metadata().state_dict_metadata
    found: dict[str, Any] = {
        key: torch.empty(entry.size, dtype=entry.properties.dtype) if hasattr(entry, "size") else None
        for key, entry in about.items()
    }
    dcp.load(found, storage_reader=FileSystemReader(folder), no_dist=True)
    return found


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", WRITTEN)
def test_keys_and_values_equal_those_of_megatron(cases: dict[str, Case], tmp_path: Path, name: str) -> None:
    spec = FSDP[name]
    view = lazyckpt.open(cases[name].path)
    lost = view.to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor", tp=spec.tp, ep=spec.ep)
    assert "rng_state" in lost.left_out and "optimizer" not in lost.left_out
    ours, theirs = loaded(tmp_path / "out" / "iter_0000003"), loaded(cases[name].path / "iter_0000003")
    mine = {key for key in ours if key.startswith("opt_param_scheduler.") or key.endswith((".step", "_args"))}
    assert ours.keys() - mine == {key for key in theirs if not key.startswith("rng_state.")} - mine
    for key in theirs.keys() & ours.keys() - {"args"}:
        same = bit_equal if isinstance(theirs[key], torch.Tensor) else (lambda a, b: a == b and type(a) is type(b))
        assert same(ours[key], theirs[key]), key
    if spec.dp > 1:  # the recording's steps are in the groups, as FusedAdam has them; torch's AdamW needs them, too
        assert {float(value) for key, value in ours.items() if key.endswith(".step")} == {3.0}
    again = lazyckpt.open(tmp_path / "out")
    assert (again.format, again.problems) == ("megatron-fsdp", ())
    for state, truth in cases[name].truth.items():
        for key, whole in truth.items():
            assert bit_equal(again.states[state][key][...], whole), (state, key)


def test_from_rank_files(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    """The weights are the fp32 copies; buffers and numbers of experts are those of the model."""
    case = megatron_cases["ep2_distopt"]
    lazyckpt.open(case.path).to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor", ep=2, verify=True)
    view = lazyckpt.open(tmp_path / "out")
    assert set(view) == set(case.truth["weights"]) and "step" in view.states and not view.problems
    for key in view:
        whole = case.truth["fp32"].get(key, case.truth["weights"][key])
        assert view[key].dtype == torch.float32 and bit_equal(view[key][...], whole), key
    assert "model.module.decoder.layers.0.mlp.experts.local_experts.3.linear_fc1.weight_v" in view.stored
    args = view.meta["args"]
    assert (args.ckpt_format, args.use_megatron_fsdp, args.use_distributed_optimizer) == ("fsdp_dtensor", True, True)
    view.to_megatron(tmp_path / "back", ep=2)  # and back
    back = lazyckpt.open(tmp_path / "back")
    for state in ("weights", "fp32", "exp_avg", "exp_avg_sq"):
        assert set(back.states[state]) == set(case.truth[state])
        for key, whole in case.truth[state].items():
            assert bit_equal(back.states[state][key][...], whole), (state, key)


def test_what_megatron_fsdp_cannot_load(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    single = lazyckpt.open(megatron_cases["single"].path)
    with pytest.raises(MeshError, match="pp=2"):
        single.to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor", pp=2)
    with pytest.raises(DataError, match="distributed_optimizer=False"):
        single.to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor", distributed_optimizer=False)
    for name, words in (("ep2_grouped", "GroupedMLP"), ("tp2_hybrid", "Mamba")):
        with pytest.raises(DataError, match=words):
            lazyckpt.open(megatron_cases[name].path).to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor")
    assert not (tmp_path / "out").exists()


def test_a_gate_of_an_unknown_kind(megatron_cases: dict[str, Case], tmp_path: Path) -> None:
    """Megatron-LM stores the gates of SwiGLU as tensors of their own, other gates not."""
    lazyckpt.open(megatron_cases["single"].path).to_safetensors(tmp_path / "plain")
    view = lazyckpt.open(tmp_path / "plain")
    with pytest.raises(DataError, match="SwiGLU"):
        view.to_megatron(tmp_path / "out", ckpt_format="fsdp_dtensor")
    shutil.rmtree(tmp_path / "plain")


# -- Megatron-FSDP goes on

FROM = "tp2_dp2"  # a run of Megatron-FSDP
SOURCES: dict[str, tuple[str, MegatronSpec]] = {
    "itself": (FROM, FSDP[FROM]),
    "fsdp_to_dp3": (FROM, replace(FSDP[FROM], tp=1, dp=3)),
    "stages_to_dp2": ("tp2_pp2_bf16", replace(CASES["tp2_pp2_bf16"], tp=1, pp=1, dp=2, distributed=True)),
    "experts": ("ep2_distopt", CASES["ep2_distopt"]),
    "mtp": ("tp2_dp2_mtp_distopt", replace(CASES["tp2_dp2_mtp_distopt"], tp=1)),
}


@pytest.fixture(scope="session")
def resumed(session_folder: Path, checkpoints: Any, megatron_cases: dict[str, Case]) -> dict[str, dict[str, Any]]:
    sharded = checkpoints("megatron_fsdp")

    def write(folder: Path) -> dict[str, dict[str, Any]]:
        jobs = {"their own": (sharded / FROM / "ckpt", FSDP[FROM])}
        for name, (source, spec) in SOURCES.items():
            path = sharded / source / "ckpt" if source == FROM else megatron_cases[source].path
            lazyckpt.open(path).to_megatron(folder / name, ckpt_format="fsdp_dtensor", tp=spec.tp, ep=spec.ep)
            jobs[name] = (folder / name, spec)
        return resume(folder / "runs", jobs)

    return once(session_folder, "to_megatron_fsdp", write)


@pytest.mark.full
@pytest.mark.parametrize("name", SOURCES)
def test_megatron_fsdp_resumes_training(
    resumed: dict[str, dict[str, Any]], cases: dict[str, Case], megatron_cases: dict[str, Case], name: str
) -> None:
    source, found = SOURCES[name][0], resumed[name]
    truth = (cases if source == FROM else megatron_cases)[source].truth
    assert found["iteration"] == 3 and found["lost"] == []
    for key, whole in (truth["weights"] | truth.get("fp32", {})).items():
        if key in found["loaded"]["weights"]:  # (buffers are not gathered)
            assert bit_equal(found["loaded"]["weights"][key], whole), key
    for state in ("exp_avg", "exp_avg_sq"):
        assert set(found["loaded"][state]) == set(truth[state])
        for key, whole in truth[state].items():
            assert bit_equal(found["loaded"][state][key], whole), (state, key)
    if source == FROM:
        assert found["losses"] == pytest.approx(resumed["their own"]["losses"], rel=1e-2)  # (bf16)
