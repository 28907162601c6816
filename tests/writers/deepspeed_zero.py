"""ZeRO and BF16_Optimizer checkpoints of :mod:`.nasty_model`, saved by real DeepSpeed.

The training runs in a child process (:mod:`.deepspeed_launch`); :func:`write_many` pays its start once for all cases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from . import Case
from .deepspeed_launch import launch, load_case

__all__ = ["CROSS", "OPTIONS", "RECORDED", "TagsSpec", "ZeroSpec", "load_tags", "write_many"]


@dataclass(frozen=True, kw_only=True)
class ZeroSpec:
    """One training run of three steps, saved at its end."""

    writer: ClassVar[str] = "deepspeed_dense"

    stage: Literal[0, 1, 2, 3]
    """Stage 0 has no names for its optimizer states on disk: ``info["group_param_names"]`` has them."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    dp: int = 2
    seed: int = 0
    hidden: int = 26
    layers: int = 2
    vocab: int = 103
    optimizer: str = "adamw"
    """One of :func:`.optimizers.make_optimizer`."""
    round_robin: bool = False
    sub_group_size: int | None = None
    """ZeRO-3: elements of a rank's partition per sub-group."""
    hpz: int | None = None
    """ZeRO-3: ranks that share a secondary copy of the weights (``zero_hpz_partition_size``)."""
    exclude_frozen: bool = False
    elastic: bool = False
    parameter_alignment: bool = False
    bf16_optimizer: bool = False
    """fp32 gradient accumulation, which makes DeepSpeed take its BF16_Optimizer (needs stage 1 and bf16)."""
    named_groups: bool = False
    """The optimizer is given named parameters, in an order that is not the module's."""
    client_state: dict[str, Any] | None = None
    """Pickled to the child: its classes must be importable there."""

    @property
    def world(self) -> int:
        return self.dp


@dataclass(frozen=True, kw_only=True)
class TagsSpec:
    """One training run of three steps, saved after each of them."""

    writer: ClassVar[str] = "deepspeed_dense"

    zero: ZeroSpec
    trainer: bool = False
    """As Hugging Face's Trainer has it: ``checkpoint-N/global_stepN``, each with its own ``latest`` and other files.

    Otherwise all tags share a folder, and a tag "best" is there too, saved at step 2 beside its own, not as latest.
    """

    @property
    def world(self) -> int:
        return self.zero.world

    def tags_at(self, step: int) -> list[str]:
        return [f"global_step{step}"] + (["best"] if step == 2 and not self.trainer else [])

    def folder_at(self, step: int) -> str:
        """The folder that holds the tags of this step."""
        return f"checkpoint-{step}" if self.trainer else "."


def _cross() -> dict[str, ZeroSpec]:
    """Every stage with every dtype on 1 to 4 ranks, in changing sizes: padding falls differently in each."""
    specs: dict[str, ZeroSpec] = {}
    for stage in (1, 2, 3):
        for dtype in ("fp32", "bf16", "fp16"):
            for dp in (1, 2, 3, 4):
                n = len(specs)
                sizes = {"hidden": (13, 26, 9, 18)[n % 4], "layers": 1 + n % 2, "vocab": (103, 31, 64)[n % 3]}
                specs[f"zero{stage}_{dtype}_dp{dp}"] = ZeroSpec(stage=stage, dtype=dtype, dp=dp, seed=n, **sizes)  # type: ignore[arg-type]
    return specs


CROSS = _cross()
OPTIONS = {
    "zero1_round_robin": ZeroSpec(stage=1, dp=2, round_robin=True),
    "zero2_round_robin": ZeroSpec(stage=2, dp=3, round_robin=True),
    "zero1_aligned": ZeroSpec(stage=1, dp=3, parameter_alignment=True),
    "zero2_fp32_aligned": ZeroSpec(stage=2, dtype="fp32", dp=2, parameter_alignment=True),
    "zero2_aligned_round_robin": ZeroSpec(stage=2, dp=4, parameter_alignment=True, round_robin=True),
    "zero1_elastic": ZeroSpec(stage=1, dp=2, elastic=True),
    "zero2_elastic": ZeroSpec(stage=2, dp=3, elastic=True),
    "zero3_sub_groups": ZeroSpec(stage=3, dp=2, sub_group_size=300),
    "zero3_fp32_sub_groups": ZeroSpec(stage=3, dtype="fp32", dp=3, sub_group_size=1000),
    "zero1_no_frozen": ZeroSpec(stage=1, dp=2, exclude_frozen=True),
    "zero2_no_frozen": ZeroSpec(stage=2, dp=2, exclude_frozen=True),
    "zero3_no_frozen": ZeroSpec(stage=3, dp=2, exclude_frozen=True),
    "zero1_amsgrad": ZeroSpec(stage=1, dp=2, optimizer="amsgrad"),
    "zero2_fp16_amsgrad": ZeroSpec(stage=2, dtype="fp16", dp=3, optimizer="amsgrad"),
    "zero3_amsgrad": ZeroSpec(stage=3, dp=2, optimizer="amsgrad"),
    "zero1_sgd": ZeroSpec(stage=1, dtype="fp32", dp=2, optimizer="sgd"),
    "zero2_sgd": ZeroSpec(stage=2, dp=2, optimizer="sgd"),
    "zero3_sgd": ZeroSpec(stage=3, dp=3, optimizer="sgd"),
    "zero1_lion": ZeroSpec(stage=1, dp=3, optimizer="lion"),
    "zero2_fp32_lion": ZeroSpec(stage=2, dtype="fp32", dp=2, optimizer="lion"),
    "zero3_lion": ZeroSpec(stage=3, dp=2, optimizer="lion"),
    "zero2_dp11": ZeroSpec(stage=2, dp=11, hidden=9, layers=1, vocab=31),
    "bf16_optimizer_dp1": ZeroSpec(stage=1, dp=1, bf16_optimizer=True),
    "bf16_optimizer_dp3": ZeroSpec(stage=1, dp=3, bf16_optimizer=True),
    "bf16_optimizer_sgd_aligned": ZeroSpec(
        stage=1, dp=4, bf16_optimizer=True, parameter_alignment=True, optimizer="sgd"
    ),
    "zero2_client_state": ZeroSpec(
        stage=2,
        dp=2,
        client_state={"epoch": 7, "note": "ours", "ema": torch.arange(6.0), "nested": {"lr": [0.5, 0.25]}},
    ),
    "zero3_client_state": ZeroSpec(stage=3, dp=2, client_state={"epoch": 8, "ema": torch.arange(5)}),
}


RECORDED = (
    "zero1_fp32_dp1", "zero1_bf16_dp2", "zero1_bf16_dp3", "zero1_bf16_dp4", "zero1_fp16_dp3", "zero2_fp32_dp2",
    "zero2_fp32_dp4", "zero2_bf16_dp1", "zero2_bf16_dp2", "zero2_bf16_dp3", "zero2_fp16_dp4", "zero3_fp32_dp2",
    "zero3_fp32_dp3", "zero3_fp32_dp4", "zero3_bf16_dp2", "zero3_bf16_dp3", "zero3_bf16_dp4", "zero3_fp16_dp1",
    "zero2_round_robin", "zero1_aligned", "zero2_aligned_round_robin", "zero2_elastic", "zero3_sub_groups",
    "zero1_no_frozen", "zero2_no_frozen", "zero3_no_frozen", "zero2_fp16_amsgrad", "zero3_amsgrad", "zero2_sgd",
    "zero3_sgd", "zero2_fp32_lion", "zero3_lion", "zero2_dp11", "bf16_optimizer_dp1", "bf16_optimizer_dp3",
    "bf16_optimizer_sgd_aligned", "zero2_client_state", "zero3_client_state",
)  # fmt: skip
"""Each stage with each dtype, each number of ranks, and each option: with stage 1 or 2, and 3 if that has it."""


def write_many(out_dir: Path, specs: Mapping[str, ZeroSpec]) -> dict[str, Case]:
    """Write each checkpoint to ``out_dir/NAME``, one after the other from one child process."""
    launch(out_dir, specs)
    return {name: load_case(out_dir / name) for name in specs}


def load_tags(folder: Path, spec: TagsSpec) -> dict[str, Case]:
    """What was written to ``folder``, by tag ("global_step2", "best") or by the Trainer's folder ("checkpoint-2").

    Of tags that share a folder, ``info["open"]`` says which one to open; the folder's ``latest`` is the last step's.
    """
    cases = {}
    for step in range(1, 4):
        for tag in spec.tags_at(step):
            case = load_case(folder / "saves" / spec.folder_at(step) / tag)
            info = case.info if spec.trainer else case.info | {"open": {"tag": tag}}
            path = folder / "ckpt" / spec.folder_at(step)
            cases[spec.folder_at(step) if spec.trainer else tag] = replace(case, path=path, info=info)
    return cases
