"""DeepSpeed checkpoints of every other kind than :mod:`.deepspeed_zero`'s, by the real thing, with what it held.

ZeRO-0, pipelines, MoE, AutoTP, Megatron's tensor parallelism in a pipeline, universal checkpoints, several tags in a
folder, and what DeepSpeed's own converters make of them.  :func:`write_all` writes the whole of :data:`SPECS` from one
child process; the truth and the meaning of ``info``'s keys:

* Truth tensors are whole: merged over data-, tensor-, pipeline- and expert-parallel ranks.  "fp32" and the optimizer's
  states hold what the optimizer holds; "weights" the state dict, aliases and buffers too.  Without ZeRO in fp32 there
  are no masters, so no "fp32".
* Names are the training module's; experts have their global numbers; pipelines have ``IDX.NAME`` and
  ``tied_modules.KEY.NAME``, of which ``layer_files`` says which file has which module.
* ``shards``: what each mp rank held before merging.  ``reference``: what DeepSpeed's converters read.
* ``pp``, ``tp``, ``dp``, ``ep``, ``step``, ``tag``, ``tied``, ``frozen``, ``buffers``, ``wrapper`` (the class of the
  optimizer), ``group_param_names`` (rank file -> the names behind the optimizer's numbers, group by group).
* Pipelines: ``replicated_over_stages``, ``differing_over_stages`` (name -> states in which the stages' copies differ;
  the truth is stage 0's).
* Tensor parallelism: ``rules`` (name -> replicated, averaged, cat0, cat1, parts0), ``tp_places`` (name -> dimension and
  the indices that each rank holds, or null), ``vocab``, ``padded_vocab``, ``vocab_tensors``.
* MoE: ``experts``, ``num_experts``, ``ep_of_rank``, ``expert_dp``.
* Universal: ``source``, ``module_only``, ``wrong`` (see ``deepspeed_tools.universal``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .deepspeed_launch import Spec, launch
from .deepspeed_specs import AutoEPSpec, AutoTPSpec, MegatronSpec, MoeSpec, PipeSpec
from .deepspeed_zero import ZeroSpec

__all__ = ["NAMES", "RESHAPED", "SPECS", "TOOLS", "UNRECORDED", "write_all"]

DENSE: dict[str, Spec] = {
    "zero0_fp32": ZeroSpec(stage=0, dtype="fp32"),
    "zero0_bf16": ZeroSpec(stage=0),
    "zero0_fp16": ZeroSpec(stage=0, dtype="fp16"),
    "zero0_lion": ZeroSpec(stage=0, optimizer="lion", dp=1, exclude_frozen=True),
    "zero0_named": ZeroSpec(stage=0, dtype="fp32", named_groups=True),
    "zero0_bf16_named": ZeroSpec(stage=0, named_groups=True),
    "zero1": ZeroSpec(stage=1),
    "zero1_fp16": ZeroSpec(stage=1, dtype="fp16"),
    "zero2_fp32_dp3": ZeroSpec(stage=2, dtype="fp32", dp=3),
    "zero2_round_robin_dp3": ZeroSpec(stage=2, dp=3, round_robin=True),
    "zero3": ZeroSpec(stage=3),
    "zero3_fp32_dp3": ZeroSpec(stage=3, dtype="fp32", dp=3, sub_group_size=900),
    "zero3_hpz_dp4": ZeroSpec(stage=3, dp=4, hpz=2),
    "bf16opt": ZeroSpec(stage=1, bf16_optimizer=True),
}
OPTIMIZERS: dict[str, Spec] = {
    "zero0_8bit": ZeroSpec(stage=0, dtype="fp32", optimizer="8bit"),
    "zero0_bf16_8bit": ZeroSpec(stage=0, optimizer="8bit"),
    "zero1_8bit": ZeroSpec(stage=1, optimizer="8bit"),
    "zero2_8bit_dp3": ZeroSpec(stage=2, dtype="fp32", dp=3, optimizer="8bit"),
    "zero3_8bit": ZeroSpec(stage=3, optimizer="8bit"),
    "zero3_8bit_sub_groups": ZeroSpec(stage=3, dp=3, optimizer="8bit", sub_group_size=300),
    "zero0_adafactor": ZeroSpec(stage=0, dtype="fp32", optimizer="adafactor"),
    "zero0_bf16_adafactor": ZeroSpec(stage=0, optimizer="adafactor"),
    "zero0_torch_adafactor": ZeroSpec(stage=0, dtype="fp32", optimizer="torch_adafactor"),
    "zero1_adafactor": ZeroSpec(stage=1, optimizer="adafactor"),
    "zero3_adafactor": ZeroSpec(stage=3, optimizer="adafactor"),
    "zero2_rmsprop_dp3": ZeroSpec(stage=2, dp=3, optimizer="rmsprop"),
    "zero3_rmsprop": ZeroSpec(stage=3, optimizer="rmsprop"),
    "zero0_adagrad": ZeroSpec(stage=0, dtype="fp32", optimizer="adagrad"),
    "bf16opt_8bit": ZeroSpec(stage=1, bf16_optimizer=True, optimizer="8bit"),
}
PIPELINES: dict[str, Spec] = {
    "pipe_zero0_fp32": PipeSpec(stage=0, dtype="fp32"),
    "pipe_zero0_fp16": PipeSpec(stage=0, dtype="fp16"),
    "pipe_zero0_named": PipeSpec(stage=0, dtype="fp32", named_groups=True),
    "pipe_zero0_bf16_dp2": PipeSpec(stage=0, dp=2, bf16_optimizer=True),
    "pipe_zero0_sgd_dp2": PipeSpec(stage=0, dtype="fp32", dp=2, optimizer="sgd", exclude_frozen=True),
    "pipe_zero0_fp16_named_ties": PipeSpec(stage=0, dtype="fp16", named_groups=True, more_ties=True),
    "pipe_zero1_ties_dp2": PipeSpec(stage=1, dp=2, more_ties=True),
    "pipe_zero1_fp16_ties": PipeSpec(stage=1, dtype="fp16", more_ties=True, model_axis=True),
    "pipe_zero0_bf16_ties": PipeSpec(stage=0, more_ties=True, bf16_optimizer=True),
    "pipe_zero1_dp2": PipeSpec(stage=1, dp=2),
    "pipe_zero1_fp32": PipeSpec(stage=1, dtype="fp32"),
    "pipe_zero1_lion": PipeSpec(stage=1, optimizer="lion", model_axis=True),
    "pipe_zero1_bf16opt_dp2": PipeSpec(stage=1, dp=2, bf16_optimizer=True),
    "pipe_zero1_model_axis_dp2": PipeSpec(stage=1, dp=2, model_axis=True, parallel_write=True),
    "pipe_zero1_pp3": PipeSpec(stage=1, pp=3, head_file=True),
}
EXPERTS: dict[str, Spec] = {
    "moe_zero0_fp32": MoeSpec(stage=0, dtype="fp32"),
    "moe_zero0_fp16_ep1": MoeSpec(stage=0, dtype="fp16", ep=(1, 1)),
    "moe_zero0_mixed_ep_dp4": MoeSpec(stage=0, dtype="fp16", dp=4, ep=(2, 4), experts=(6, 12), residual=True),
    "moe_zero0_bf16_dp4": MoeSpec(stage=0, dp=4, residual=True),
    "moe_zero1_fp32": MoeSpec(stage=1, dtype="fp32"),
    "moe_zero1_ep1": MoeSpec(stage=1, ep=(1, 1)),
    "moe_zero1_residual_dp4": MoeSpec(stage=1, dp=4, residual=True),
    "moe_zero1_data_first_dp4": MoeSpec(stage=1, dp=4, data_before_expert=True),
    "moe_zero1_data_first_mixed_dp4": MoeSpec(stage=1, dp=4, ep=(2, 4), experts=(2, 4), data_before_expert=True),
    "moe_zero2": MoeSpec(stage=2),
    "moe_zero2_mixed_ep": MoeSpec(stage=2, ep=(1, 2), residual=True),
    "moe_bf16opt": MoeSpec(stage=1, bf16_optimizer=True),
}
AUTOEP: dict[str, Spec] = {
    "autoep_zero0_fp32": AutoEPSpec(stage=0, dtype="fp32"),
    "autoep_zero0": AutoEPSpec(stage=0),
    "autoep_zero1_dp4": AutoEPSpec(stage=1, dp=4),
    "autoep_zero2": AutoEPSpec(stage=2, experts=6),
    "autoep_zero2_ep1": AutoEPSpec(stage=2, ep=1),
    "autoep_zero3": AutoEPSpec(stage=3),
    "autoep_zero3_dp4": AutoEPSpec(stage=3, dp=4, dtype="fp32"),
    "autoep_autotp_zero0_fp32": AutoEPSpec(stage=0, tp=2, dp=2, layers=1, mlp=5, vocab=19, dtype="fp32"),
    "autoep_autotp_zero1": AutoEPSpec(stage=1, tp=2, dp=2, layers=1, mlp=5, vocab=19),
    "autoep_autotp_zero2_ep4": AutoEPSpec(stage=2, tp=2, dp=2, layers=1, mlp=5, vocab=19, ep=4),
    "autoep_autotp_zero3": AutoEPSpec(stage=3, tp=2, dp=2, layers=1, mlp=5, vocab=19),
}
AUTOTP: dict[str, Spec] = {
    "autotp_zero0": AutoTPSpec(stage=0),
    "autotp_zero0_fp32_dp2": AutoTPSpec(stage=0, dtype="fp32", dp=2),
    "autotp_zero1": AutoTPSpec(stage=1),
    "autotp_zero1_frozen": AutoTPSpec(stage=1, frozen=True),
    "autotp_zero1_vocab": AutoTPSpec(stage=1, vocab_parallel=True),
    "autotp_zero1_fused": AutoTPSpec(stage=1, fused=True),
    "autotp_zero2_dp2": AutoTPSpec(stage=2, dp=2, frozen=True),
    "autotp_zero3_fp32": AutoTPSpec(stage=3, dtype="fp32"),
    "autotp_zero3_dp2": AutoTPSpec(stage=3, dp=2, frozen=True),
    "autotp_zero3_fused_dp2": AutoTPSpec(stage=3, dp=2, fused=True),
    "autotp_zero0_tp4": AutoTPSpec(stage=0, tp=4),
    "autotp_zero1_tp4": AutoTPSpec(stage=1, tp=4),
    "autotp_zero0_adafactor": AutoTPSpec(stage=0, dtype="fp32", optimizer="adafactor"),
    "autotp_zero2_fused_tp4": AutoTPSpec(stage=2, tp=4, fused=True),
    "autotp_bf16opt_dp2": AutoTPSpec(stage=1, dp=2, bf16_optimizer=True),
}
MEGATRON: dict[str, Spec] = {
    "megatron_tp1_dp2": MegatronSpec(tp=1, dp=2, dtype="fp16", uneven=False),
    "megatron_pp1_fp32": MegatronSpec(pp=1, dtype="fp32"),
    "megatron_3d_zero0_fp32": MegatronSpec(stage=0, dtype="fp32"),
    "megatron_3d": MegatronSpec(),
    "megatron_3d_even_dp2": MegatronSpec(dp=2, uneven=False),
    "megatron_3d_bf16opt_dp2": MegatronSpec(dp=2, bf16_optimizer=True),
}
RESHAPED: dict[str, Spec] = {
    "megatron_four_layers": MegatronSpec(layers=4, dp=2, uneven=False),
    "megatron_tp4": MegatronSpec(layers=2, pp=1, tp=4, uneven=False, dtype="fp32"),
    "megatron_bf16opt": MegatronSpec(dp=2, bf16_optimizer=True),
    "bf16opt_dp3": ZeroSpec(stage=1, dp=3, bf16_optimizer=True),
}
"""For other degrees (`DeepSpeedCheckpoint`)."""
SPECS: dict[str, Spec] = DENSE | OPTIMIZERS | PIPELINES | EXPERTS | AUTOEP | AUTOTP | MEGATRON
"""What :func:`write_all` writes beside :data:`RESHAPED`, by name."""

BOTH = ("zero_to_fp32", "universal")
TOOLS: dict[str, Sequence[str]] = {
    "zero1": BOTH,
    "zero1_fp16": ("zero_to_fp32",),
    "zero2_fp32_dp3": BOTH,
    "zero2_round_robin_dp3": BOTH,
    "zero3": BOTH,
    "zero3_fp32_dp3": BOTH,
    "bf16opt": ("universal",),
    "pipe_zero1_dp2": ("universal",),
    **{name: ("universal",) for name in AUTOTP if "zero0" not in name and "tp4" not in name},
    "autotp_zero1_frozen": ("universal_lax",),
    "autotp_zero2_dp2": ("universal_lax",),
    "autotp_zero3_dp2": ("universal_lax",),
    **{name: ("universal",) for name in MEGATRON if "zero0" not in name},
}
"""Which of DeepSpeed's converters are run on which (``ds_to_universal`` fails where a rank has no attention heads)."""


NAMES = (*SPECS, *(f"{name}.universal" for name, tools in TOOLS.items() if tools != ("zero_to_fp32",)))
"""The cases of :data:`SPECS`, and their universal checkpoints."""

UNRECORDED = {
    "zero0_bf16_named", "zero1_fp16", "zero0_bf16_8bit", "zero1_8bit", "zero0_bf16_adafactor",
    "pipe_zero1_fp16_ties", "moe_zero2_mixed_ep", "moe_zero0_bf16_dp4", "moe_zero1_ep1",
    "autoep_zero0_fp32", "autoep_zero3_dp4", "autotp_zero0_fp32_dp2", "autotp_zero3_fused_dp2", "megatron_pp1_fp32",
    "megatron_3d_bf16opt_dp2",
}  # fmt: skip
"""Combinations of what others have too, one by one."""


def write_all(out_dir: Path) -> None:
    """All cases, in one go."""
    launch(out_dir, SPECS | RESHAPED, TOOLS)
