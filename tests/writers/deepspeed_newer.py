"""DeepSpeed's newer writers, by the real thing: Muon, byte partitions of FastPersist, weights alone, quantized gathers.

``info["also"]`` names the checkpoints that a case has beside ``ckpt``: folder -> the states of the truth that are in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from .deepspeed_launch import launch

__all__ = ["SPECS", "NewerSpec", "write_all"]


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
    muon: bool = False
    """DeepSpeed's own Muon for matrices, its Adam for the rest, two groups for each of the model's."""
    bf16_optimizer: bool = False
    zero: dict[str, Any] = field(default_factory=dict)
    """For the section zero_optimization."""
    config: dict[str, Any] = field(default_factory=dict)
    weights: bool = False
    """Also save_16bit_model, with and without frozen parameters."""

    @property
    def world(self) -> int:
        return self.dp


WEIGHTS: dict[str, NewerSpec] = {
    "weights_zero0": NewerSpec(stage=0, weights=True),
    "weights_zero1": NewerSpec(stage=1, weights=True, seed=1),
    "weights_zero2": NewerSpec(stage=2, dtype="fp16", weights=True, seed=2),
    "weights_zero3": NewerSpec(
        stage=3, dp=3, weights=True, zero={"stage3_gather_16bit_weights_on_model_save": True}, seed=3
    ),
}
MUON: dict[str, NewerSpec] = {
    "muon_zero0": NewerSpec(stage=0, dtype="fp32", muon=True, hidden=7),
    "muon_zero1": NewerSpec(stage=1, muon=True, dp=3, seed=4),
    "muon_zero1_fp32": NewerSpec(stage=1, dtype="fp32", muon=True, seed=5),
    "muon_zero1_fp16_offload": NewerSpec(
        stage=1, dtype="fp16", muon=True, seed=10, zero={"offload_optimizer": {"device": "cpu"}}
    ),
    "muon_zero2_aligned": NewerSpec(stage=2, muon=True, dp=3, seed=9, zero={"parameter_alignment": True}),
    "muon_zero2_round_robin": NewerSpec(stage=2, muon=True, dp=3, seed=11, zero={"round_robin_gradients": True}),
    "muon_zero2_elastic": NewerSpec(stage=2, muon=True, dp=3, seed=12, zero={"elastic_checkpoint": True}),
    "muon_bf16opt": NewerSpec(stage=1, muon=True, dp=3, seed=13, bf16_optimizer=True),
    "muon_zero2": NewerSpec(stage=2, muon=True, seed=6),
    "muon_zero3": NewerSpec(stage=3, muon=True, dp=3, seed=7, zero={"reduce_scatter": False}),
    "muon_zero3_sub_groups": NewerSpec(
        stage=3, dtype="fp32", muon=True, seed=8, zero={"reduce_scatter": False, "sub_group_size": 60}
    ),
}
SPECS: dict[str, NewerSpec] = WEIGHTS | MUON


def write_all(out_dir: Path) -> None:
    launch(out_dir, SPECS)
