"""Faults of elements: each of them in every container, and in a rank's file of DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .fault import Fault, edit
from .others import weights

UP = "model.layers.1.mlp.up.weight"
_STACK = "model.layers.0.experts.up"
Edit = Callable[[dict[str, torch.Tensor]], Any]


def _put(index: Any, value: float) -> Edit:
    def change(state: dict[str, torch.Tensor]) -> None:
        state[UP][index] = value

    return change


def _as(dtype: torch.dtype, index: Any = None, value: float = 0.0) -> Edit:
    """Give all tensors another dtype, and set some elements of one."""

    def change(state: dict[str, torch.Tensor]) -> None:
        for name, t in state.items():
            state[name] = t.to(dtype)
        if index is not None:
            wide = state[UP].float()
            wide[index] = value
            state[UP] = wide.to(dtype)

    return change


def _denormal(state: dict[str, torch.Tensor]) -> None:
    state[UP] *= 1e-40


def _expert(state: dict[str, torch.Tensor]) -> None:
    state[_STACK] = torch.stack([state[UP][:32] + 0.01 * n for n in range(8)])
    state[_STACK][3] = 0


def _row(state: dict[str, torch.Tensor]) -> None:
    state[UP][10, :18] = 1e4


# fault -> (change, code, tensor, part of the sentence)
ELEMENTS: dict[str, tuple[Edit, str, str, str]] = {
    "a NaN": (_put((3, 5), float("nan")), "not-a-number", UP, r"row 3 .*first at \[3, 5\]"),
    "a row of NaN": (_put(7, float("nan")), "not-a-number", UP, "64 NaN among 16,384 elements, in row 7"),
    "a NaN in bf16": (_as(torch.bfloat16, (3, 5), float("nan")), "not-a-number", UP, "row 3"),
    "a NaN in float8_e4m3fn": (_as(torch.float8_e4m3fn, (3, 5), float("nan")), "not-a-number", UP, "row 3"),
    "an infinity": (_put((255, 63), float("inf")), "infinite-values", UP, "row 255"),
    "a negative infinity": (_put((255, 63), float("-inf")), "infinite-values", UP, "row 255"),
    "a matrix of zeros": (lambda s: s[UP].zero_(), "all-zero", UP, "all 16,384"),
    "all elements are the same": (lambda s: s[UP].fill_(0.5), "constant-values", UP, "0.5"),
    "rows of zeros": (_put(slice(4, 7), 0.0), "dead-rows", UP, "3 of 256 rows .*4 to 6"),
    "an expert of a stack is zero": (_expert, "dead-rows", _STACK, "1 of 8 experts .*: 3"),
    "denormal numbers only": (_denormal, "denormal-values", UP, "larger than"),
    "the largest fp32 number": (_put((9, 9), torch.finfo(torch.float32).max), "saturated-values", UP, "row 9"),
    "the largest fp16 number": (_as(torch.float16, (1, 2), 65504), "saturated-values", UP, "row 1 "),
    "fp8 numbers that were cut off": (_as(torch.float8_e4m3fn, slice(0, 3), 448), "saturated-values", UP, "192"),
    "a corrupt element": (_put((200, 1), 3.0e4), "outlying-values", UP, r"1 elements up to 3e\+04.*row 200"),
    "18 corrupt elements in a row": (_row, "outlying-values", UP, "18 elements up to 1e.04.*row 10"),
}


def _safetensors(state: dict[str, torch.Tensor], folder: Path) -> Path:
    from safetensors.torch import save_file

    save_file(state, folder / "model.safetensors")
    return folder / "model.safetensors"


def _torch(state: dict[str, torch.Tensor], folder: Path) -> Path:
    torch.save(state, folder / "model.pt")
    return folder / "model.pt"


def _dcp(state: dict[str, torch.Tensor], folder: Path) -> Path:
    import warnings

    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


def _zarr(state: dict[str, torch.Tensor], folder: Path) -> Path:
    import lazyckpt

    lazyckpt.open(_torch(state, folder)).to_zarr(folder / "x.zarr", chunk="16KB")
    return folder / "x.zarr"


_FORMS = {"safetensors": _safetensors, "torch.save": _torch, "DCP": _dcp, "Zarr (export of lazyckpt)": _zarr}


def _made(change: Edit, form: Callable[[dict[str, torch.Tensor], Path], Path]) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        state = weights()
        change(state)
        return form(state, folder)

    return make


def _shard(state: dict[str, Any]) -> None:
    """Corrupt 18 elements of the embedding, which lies at the begin of the second rank's partition."""
    state["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data[4:22] = 1e6


VALUES: tuple[Fault, ...] = (
    *(
        Fault(what, family, "", _made(change, form), "default", code, "", f"^{tensor}$", text)
        for what, (change, code, tensor, text) in ELEMENTS.items()
        for family, form in _FORMS.items()
    ),
    Fault(
        "18 corrupt elements in one rank's shard", "DeepSpeed ZeRO-2", "deepspeed_zero/zero2_bf16_dp2/ckpt",
        edit("*zero_pp_rank_1_mp_rank_00_optim_states.pt", _shard), "default", "outlying-values",
        file="pp_rank_1_mp", tensor=".", text="18 elements up to 1e.06.*row",
    ),
)  # fmt: skip
