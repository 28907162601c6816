"""Rank files of DeepSpeed that claim absurd things: one LazyckptError or a line in problems, soon, and nothing else."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import lazyckpt
from lazyckpt import LazyckptError
from lazyckpt.deepspeed import DeepSpeedCheckpoint, get_fp32_state_dict_from_zero_checkpoint
from lazyckpt.layouts.families import family_rules
from lazyckpt.layouts.merge import decide
from lazyckpt.layouts.universal import universal_rules

from .hostility import deadline

HUGE = 10**5000  # Python refuses to print it
EXPERT = "x.deepspeed_moe.experts.deepspeed_experts.0.w"
Files = dict[str, Any]


def _files() -> Files:
    """The files of one rank, honest."""
    flat = torch.arange(20.0)
    model = {
        "module": {"w": flat[:16].view(4, 4).clone(), "b": flat[16:].clone()},
        "buffer_names": [],
        "param_shapes": [{"w": torch.Size((4, 4)), "b": torch.Size((4,))}],
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 2}},
        "shared_params": {},
        "optimizer": None,
    }
    base = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": flat.clone()}}, "param_groups": [{"params": [0]}]}
    state = {
        "zero_stage": 2,
        "single_partition_of_fp32_groups": [flat],
        "base_optimizer_state": base,
        "partition_count": [1],
        "group_paddings": [0],
        "param_slice_mappings": [{}],
    }
    return {
        "mp_rank_00_model_states.pt": model,
        "zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": state},
    }


def _model(**changes: Any) -> Callable[[Files], None]:
    return lambda files: files["mp_rank_00_model_states.pt"].update(changes)


def _optim(**changes: Any) -> Callable[[Files], None]:
    return lambda files: files["zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"].update(changes)


def _base(**changes: Any) -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files["zero_pp_rank_0_mp_rank_00_optim_states.pt"]["optimizer_state_dict"]["base_optimizer_state"] |= changes

    return change


def _more(name: str, value: Any, without: str = "") -> Callable[[Files], None]:
    def change(files: Files) -> None:
        files[name] = files["mp_rank_00_model_states.pt"] if value is None else value
        files["mp_rank_00_model_states.pt"].pop(without, None)

    return change


def _two(**info: Any) -> Callable[[Files], None]:
    """Two tensor-parallel ranks with this universal_checkpoint_info."""

    def change(files: Files) -> None:
        degrees = {"tp_degree": 2, "pp_degree": 1}
        model = files["mp_rank_00_model_states.pt"]
        model |= {"universal_checkpoint_info": info, "mp_world_size": 2, "checkpoint_parallel_dimensions": degrees}
        for name in list(files):
            files[name.replace("mp_rank_00", "mp_rank_01")] = files[name]

    return change


def _alike(layers: int, parameters: int) -> Callable[[Files], None]:
    """A pipeline of ZeRO-0 in which everything has the same shape: any layer may be in any stage."""

    def change(files: Files) -> None:
        del files["zero_pp_rank_0_mp_rank_00_optim_states.pt"]
        model = files["mp_rank_00_model_states.pt"]
        half = parameters // 2
        groups = [{"params": list(range(half))}, {"params": list(range(half, parameters))}]
        optimizer = {"state": {i: {"exp_avg": torch.ones(4)} for i in range(parameters)}, "param_groups": groups}
        model |= {"module": None, "param_shapes": None, "mp_world_size": 8, "optimizer": optimizer}
        model["checkpoint_parallel_dimensions"] = {"tp_degree": 1, "pp_degree": 8}
        files |= {f"mp_rank_{mp:02d}_model_states.pt": model for mp in range(8)}
        layer = {f"x{i}": torch.ones(4) for i in range(6)}
        files |= {f"layer_{n:02d}-model_states.pt": layer for n in range(layers)}

    return change


CLAIMS: dict[str, Callable[[Files], None]] = {
    "a million data-parallel ranks": _model(dp_world_size=10**6),
    "ranks beyond numbers": _model(dp_world_size=HUGE),
    "a million model-parallel ranks": _model(mp_world_size=10**6),
    "a name of rank 999999": _more("mp_rank_999999_model_states.pt", None, without="mp_world_size"),
    "a name of rank 10**18": _more("mp_rank_999999999999999999_model_states.pt", None, without="mp_world_size"),
    "an optimizer's name": _more("zero_pp_rank_999999_mp_rank_00_optim_states.pt", {}, without="dp_world_size"),
    "a layer's name": _more("layer_999999-model_states.pt", {"w": torch.ones(2)}),
    "an expert's name": _more("layer_999999_expert_999999_mp_rank_00_model_states.pt", {EXPERT: torch.ones(2)}),
    "an expert-parallel rank's name": _more("expp_rank_999999_mp_rank_00_optim_states.pt", {"optimizer": {}}),
    "experts": lambda files: (
        _model(num_experts=[(1 << 20) - 1] * 100)(files),
        _more("layer_0_expert_0_mp_rank_00_model_states.pt", {EXPERT: torch.ones(2)})(files),
    )[0],
    "experts of AutoEP": _model(
        ds_autoep_layers=[
            {"expert_key_prefix": "w", "num_experts": 1 << 20, "num_local_experts": 1, "ep_size": 1 << 20}
        ]
        * 1000
    ),
    "partitions": _optim(partition_count=[10**12]),
    "paddings": _optim(group_paddings=[HUGE], param_alignment_paddings=[[HUGE, 1]]),
    "a stage": _optim(zero_stage=HUGE),
    "a shape without elements": _model(param_shapes=[{"w": (0, 10**30)}]),
    "a shape of shapes": _model(param_shapes=[{"w": ((4,), HUGE)}]),
    "numbers of parameters": _base(param_groups=[{"params": [[1]]}]),
    "a number for parameters": _base(param_groups=[{"params": 5}]),
    "a dict for parameters": _base(param_groups=[{"params": {"a": 1}}]),
    "a state's name": _base(state={0: {HUGE: torch.ones(20), (1, 2): torch.ones(20), "../x": torch.ones(20)}}),
    "mappings": _optim(param_slice_mappings=[{"w": 3, 4: None}]),
    "names of layers": lambda files: (
        _model(module=None, param_shapes=[{"9" * 5000 + ".w": (16,), "\u0663.b": (4,)}])(files),
        _more("layer_00-model_states.pt", {"w": torch.ones(4, 4)})(files),
    )[0],
    "layers that are all alike": _alike(64, 40),
    "client state that shadows": _model(tag=3, step="x", frozen_parameters=torch.ones(3), global_steps=[HUGE], args=3),
    "repetitions of repetitions": _two(parameter_with_row_parallelism_patterns=["(w+)+$", "(b|b?)*x"]),
    "patterns that are none": _two(tp_replicated_parameter_patterns=["[", 3, None]),
    "a dimension": _two(parameter_with_sub_params=[{"patterns": ["w"], "shape": (4, 4), "partition_dim": -5}]),
    "no parts": _two(parameter_with_sub_params=[{"patterns": ["w", "b"], "shape": (0, 4), "partition_dim": 0}]),
    "widths": _two(
        parameter_with_sub_params=[{"patterns": ["w"], "shape": ((4, "x"), 4), "partition_dim": 0}],
        sub_param_shard_widths={"w": ["a", 3]},
    ),
    "a vocabulary": _two(vocabulary_parameter_patterns=["w", "b"], original_vocab_size=HUGE),
    "an affine map": _two(affine_map={"version": HUGE, "params": {"w": {}}}),
}


@pytest.fixture
def folder(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    files = _files()
    CLAIMS.get(request.param, lambda _: None)(files)
    (tmp_path / "tag").mkdir()
    (tmp_path / "latest").write_text("tag")
    for name, value in files.items():
        torch.save(value, tmp_path / "tag" / name)
    return tmp_path


@pytest.mark.parametrize("folder", ["nothing"], indirect=True)
def test_the_honest_folder_reads(folder: Path) -> None:
    view = lazyckpt.open(folder)
    assert not view.problems
    assert torch.equal(view.states["exp_avg"]["b"][...], torch.arange(16.0, 20))


@pytest.mark.slow
@pytest.mark.parametrize("folder", CLAIMS, indirect=True)
def test_absurd_claims_are_refused_or_reported(folder: Path) -> None:
    with deadline():
        try:
            view = lazyckpt.open(folder, cache=False)
        except LazyckptError as e:
            assert "tag" in str(e) and len(str(e)) < 1000
        else:
            assert len(view.problems) < 5000
            for state in view.states.values():
                for tensor in state.values():
                    with contextlib.suppress(LazyckptError):
                        tensor[...]
            assert repr(view) and view.explain() and list(view.stored)
        with contextlib.suppress(LazyckptError):
            get_fp32_state_dict_from_zero_checkpoint(folder)
        with contextlib.suppress(LazyckptError), contextlib.redirect_stdout(io.StringIO()):
            ckpt = DeepSpeedCheckpoint(folder)
            assert len(ckpt.validate_files()) < 5000
            ckpt.get_2d_parallel_state(0, 0)
            ckpt.get_zero_checkpoint_state(0, 0, 0)


# -- patterns


def test_a_pattern_that_cannot_be_used_merges_nothing() -> None:
    """Else another rule would: by default shards are concatenated along dimension 0."""
    for pattern in ("[", "(w+)+$", "w*" * 9):
        source = universal_rules({"tp_replicated_parameter_patterns": [pattern]}, family_rules())
        with pytest.raises(ValueError, match="the pattern"):
            decide("w", [(4, 4), (4, 4)], [source])


@pytest.mark.slow
def test_as_many_patterns_as_a_large_model_has_parameters() -> None:
    """AutoTP lists one for each; compiled again for each name, a model of 126 layers took 15 s for every state."""
    names = [f"model.layers.{n}.{part}.weight" for n in range(200) for part in "qkvoabcdef"]
    patterns = [f"^{re.escape(name)}$" for name in names]
    source = universal_rules({"parameter_with_row_parallelism_patterns": patterns}, family_rules())
    with deadline():
        for _ in range(4):
            assert all(decide(name, [(2, 3), (2, 3)], [source]).shape == (2, 6) for name in names)
