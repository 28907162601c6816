"""Faults of DeepSpeed's checkpoints."""

from __future__ import annotations

from typing import Any

import torch

from .fault import FAILS, Fault, copy, cut, edit, flip, record, remove, storage, swap, write

_ZERO2, _ZERO3 = "deepspeed_zero/zero2_bf16_dp2/ckpt", "deepspeed_zero/zero3_bf16_dp3/ckpt"
_PIPE, _TP = "deepspeed_kinds/pipe_zero1_dp2/ckpt", "deepspeed_kinds/autotp_zero1/ckpt"
_MOE, _UNIVERSAL = "deepspeed_kinds/moe_zero2/ckpt", "deepspeed_kinds/autotp_zero1_frozen.universal/ckpt"
_OPTIM, _MODEL = "*zero_pp_rank_1_mp_rank_00_optim_states.pt", "mp_rank_00_model_states.pt"


def _group(state: dict[str, Any], number: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = state["optimizer_state_dict"]["base_optimizer_state"]["state"][number]
    return found


def _later(state: dict[str, Any]) -> None:
    for one in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["step"] += 5


def _master(state: dict[str, Any]) -> None:
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[100:103] += 1


def _nan(state: dict[str, Any]) -> None:
    state["optimizer_state_dict"]["fp32_flat_groups"][0].data[100] = float("nan")


def _short(state: dict[str, Any]) -> None:
    group = _group(state)
    group["exp_avg"] = group["exp_avg"][:-100].clone()


def _all_zero(state: dict[str, Any]) -> None:
    for one in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        one["exp_avg"].zero_()
        one["exp_avg_sq"].zero_()


def _of_module(name: str, change: Any) -> Any:
    def edit_module(state: dict[str, Any]) -> None:
        module = state.get("module", state)
        name_ = next(key for key in module if key.endswith(name))
        change(module[name_].data)

    return edit_module


def _first(value: float) -> Any:
    def change(t: torch.Tensor) -> None:
        t.view(-1)[0] = value

    return change


def _add(t: torch.Tensor) -> None:
    t.view(-1)[3] += 0.5


DEEPSPEED = (
    Fault("the optimizer file of a rank is missing", "DeepSpeed ZeRO-2", _ZERO2, remove(_OPTIM), "quick",
          "missing-file", file="pp_rank_1_mp"),
    Fault("the optimizer file of a rank is missing", "DeepSpeed ZeRO-3", _ZERO3, remove(_OPTIM), "quick",
          "missing-file", file="pp_rank_1_mp"),
    Fault("the model file is missing", "DeepSpeed ZeRO-2", _ZERO2, remove(_MODEL), FAILS),
    Fault("the optimizer file of a rank is cut off", "DeepSpeed ZeRO-3", _ZERO3, cut(_OPTIM), "quick",
          "unreadable-file", file="pp_rank_1_mp"),
    Fault("the optimizer file of a rank is empty", "DeepSpeed ZeRO-2", _ZERO2, cut(_OPTIM, 0), "quick",
          "unreadable-file", file="pp_rank_1_mp"),
    Fault("a rank's file is a copy of another rank's", "DeepSpeed ZeRO-2", _ZERO2,
          copy("*pp_rank_0_mp_rank_00_optim*", _OPTIM), "default", "identical-files", text="rank_0.*rank_1"),
    Fault("the files of two ranks are swapped", "DeepSpeed ZeRO-2", _ZERO2,
          swap("*pp_rank_0_mp_rank_00_optim*", _OPTIM), "full", "rounding-mismatch"),
    Fault("a rank's file is a copy of another rank's", "DeepSpeed ZeRO-3", _ZERO3,
          copy("*pp_rank_0_mp_rank_00_optim*", _OPTIM), "default", "identical-files", text="rank_0.*rank_1"),
    Fault("the optimizer file of a rank is of another step", "DeepSpeed ZeRO-2", _ZERO2, edit(_OPTIM, _later),
          "default", "differing-steps", file="pp_rank_1_mp", text="8"),
    Fault("the file of a save with more ranks lies beside", "DeepSpeed ZeRO-2", _ZERO2,
          copy("*pp_rank_0_mp_rank_00_optim*", "bf16_zero_pp_rank_4_mp_rank_00_optim_states.pt"), "quick",
          "left-over-file", file="pp_rank_4"),
    Fault("`latest` is missing", "DeepSpeed ZeRO-2", _ZERO2, remove("latest"), "quick", "unfinished-save"),
    Fault("`latest` names a tag that is not there", "DeepSpeed ZeRO-2", _ZERO2, write("latest", "global_step9"),
          FAILS),
    Fault("a flipped bit in a storage", "DeepSpeed ZeRO-2", _ZERO2, flip(_OPTIM, storage), "default",
          "wrong-checksum", file="pp_rank_1_mp"),
    Fault("a flipped bit in the pickle", "DeepSpeed ZeRO-2", _ZERO2, flip(_OPTIM, record("data.pkl")), "quick",
          "unreadable-file", text="checksum", file="pp_rank_1_mp"),
    Fault("an fp32 weight does not round to the 16-bit weight", "DeepSpeed ZeRO-2", _ZERO2, edit(_OPTIM, _master),
          "full", "rounding-mismatch", tensor="."),
    Fault("a NaN in a rank's fp32 weights", "DeepSpeed ZeRO-3", _ZERO3, edit(_OPTIM, _nan), "default",
          "not-a-number", file="pp_rank_1_mp", tensor=".", text="row"),
    Fault("an infinity in the 16-bit weights", "DeepSpeed ZeRO-2", _ZERO2,
          edit(_MODEL, _of_module("embed.weight", _first(float("inf")))), "default", "infinite-values",
          file=_MODEL, tensor="embed.weight"),
    Fault("a second moment is negative", "DeepSpeed ZeRO-2", _ZERO2,
          edit(_OPTIM, lambda s: _group(s)["exp_avg_sq"][50].fill_(-1)), "default", "wrong-moment",
          file="pp_rank_1_mp", tensor="."),
    Fault("the moments of a rank are zero after three steps", "DeepSpeed ZeRO-2", _ZERO2, edit(_OPTIM, _all_zero),
          "default", "zero-moments"),
    Fault("a rank's moment is shorter than its weights", "DeepSpeed ZeRO-2", _ZERO2, edit(_OPTIM, _short), "quick",
          "undecided-layout", text="exp_avg"),
    Fault("the file of a pipeline layer is missing", "DeepSpeed pipeline", _PIPE,
          remove("layer_03-model_states.pt"), "quick", "missing-file", file="layer_03"),
    Fault("the file of an expert is missing", "DeepSpeed-MoE", _MOE, remove("layer_0_expert_2_*"), "quick",
          "missing-file", file="expert_2"),
    Fault("an expert is all zero", "DeepSpeed-MoE", _MOE,
          edit("layer_0_expert_2_*", lambda s: [t.data.zero_() for t in s.values()] and None), "default", "all-zero",
          tensor="experts.2"),
    Fault("a norm differs between tensor-parallel ranks", "DeepSpeed tensor-parallel", _TP,
          edit("mp_rank_01_model_states.pt", _of_module("norm.weight", _add)), "full", "differing-replicas",
          tensor="norm", text="mp_rank_01"),
    Fault("the model file of a tensor-parallel rank is missing", "DeepSpeed tensor-parallel", _TP,
          remove("mp_rank_01_model_states.pt"), "quick", "missing-file", file="mp_rank_01"),
    Fault("the folder of a parameter lacks a moment", "DeepSpeed universal", _UNIVERSAL, remove("exp_avg.pt"),
          "quick", "missing-file", file="exp_avg.pt"),
)  # fmt: skip
