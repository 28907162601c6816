"""DeepSpeed's newer writers, and older ones that it has removed: Muon, FastPersist, FP16_Optimizer, weights alone.

``info["also"]`` has further files of a case: path in ``also`` -> the parameters that are not in it. :data:`OLDER` is
written by deepspeed 0.18.9, of the last versions with MiCS and the compressed optimizers, and with an AutoTP that does
not say what is whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from .deepspeed_launch import Spec, launch
from .deepspeed_specs import AutoTPSpec

__all__ = ["OLDER", "SPECS", "NewerSpec", "write_all", "write_older"]

Kind = Literal["adamw", "muon", "fused", "compressed"]


@dataclass(frozen=True, kw_only=True)
class NewerSpec:
    """One training run of three steps of the small nasty model, saved at its end."""

    writer: ClassVar[str] = "deepspeed_newer_train"

    stage: Literal[0, 1, 2, 3]
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    dp: int = 2
    seed: int = 0
    hidden: int = 6
    layers: int = 1
    vocab: int = 11
    kind: Kind = "adamw"
    """``muon``: DeepSpeed's own for matrices, its Adam for the rest, in two groups for each of the model's.  ``fused``:
    FP16_Optimizer.  ``compressed``: one of ``optimizer``, which compresses from the second step on.  In these two, no
    parameter is frozen."""
    optimizer: str = ""
    groups: Literal["one", "decay", "named"] = "one"
    """For ``fused``: one group, matrices and the rest, or one group of named parameters in reverse order."""
    bf16_optimizer: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    """For the section zero_optimization."""
    fast: bool = False
    """FastPersist, with its asynchronous writes, which need a device's library, replaced by ordinary ones."""
    weights: bool = False
    """Also save_16bit_model, with and without frozen parameters."""

    @property
    def world(self) -> int:
        return self.dp

    @property
    def mics(self) -> bool:
        return "mics_shard_size" in self.zero


SPECS: dict[str, NewerSpec] = {
    "weights_zero1": NewerSpec(stage=1, weights=True, seed=1),
    "weights_zero3": NewerSpec(
        stage=3, dp=3, weights=True, zero={"stage3_gather_16bit_weights_on_model_save": True}, seed=3
    ),
    "muon_zero0": NewerSpec(stage=0, dtype="fp32", kind="muon", hidden=7),
    "muon_zero1": NewerSpec(stage=1, kind="muon", dp=3, seed=4),
    "muon_zero2_aligned": NewerSpec(stage=2, kind="muon", dp=3, seed=9, zero={"parameter_alignment": True}),
    "muon_zero2_round_robin": NewerSpec(stage=2, kind="muon", dp=3, seed=11, zero={"round_robin_gradients": True}),
    "muon_zero2_elastic": NewerSpec(stage=2, kind="muon", dp=3, seed=12, zero={"elastic_checkpoint": True}),
    "muon_bf16opt": NewerSpec(stage=1, kind="muon", dp=3, seed=13, bf16_optimizer=True),
    "muon_zero3_sub_groups": NewerSpec(
        stage=3, dp=3, kind="muon", seed=8, zero={"reduce_scatter": False, "sub_group_size": 40}
    ),
    "fast_zero0": NewerSpec(stage=0, dtype="fp32", fast=True, seed=20),
    "fast_zero1": NewerSpec(stage=1, fast=True, seed=21),
    "fast_zero3": NewerSpec(stage=3, fast=True, seed=24),
    "fused_fp16": NewerSpec(stage=0, dtype="fp16", kind="fused", seed=53),
    "fused_groups": NewerSpec(stage=0, kind="fused", seed=54, groups="decay"),
    "fused_named": NewerSpec(stage=0, kind="fused", seed=55, groups="named"),
}
OLDER: dict[str, Spec] = {
    "mics": NewerSpec(stage=3, dp=4, zero={"mics_shard_size": 2}, seed=50),
    "onebit_adam": NewerSpec(stage=0, dtype="fp32", kind="compressed", optimizer="OneBitAdam", seed=52),
    "onebit_adam_fp16": NewerSpec(stage=0, dtype="fp16", kind="compressed", optimizer="OneBitAdam", seed=52),
    "zero_one_adam_fp16": NewerSpec(stage=0, dtype="fp16", kind="compressed", optimizer="ZeroOneAdam", seed=52),
    "autotp": AutoTPSpec(stage=1, heads=4, kv_heads=2, mlp=22, vocab=31, layers=1),
}


def write_all(out_dir: Path) -> None:
    launch(out_dir, SPECS)


def write_older(out_dir: Path) -> None:
    launch(out_dir, OLDER)
