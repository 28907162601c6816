"""Logits of models whose fused matrices are cut part by part, of two tensor-parallel ranks of megatron-core.

Each rank loads what `CheckpointView.shard` gives it of a folder of transformers (`megatron_logits`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from . import megatron_logits

__all__ = ["CHECKS"]


def check(name: str, folder: Path) -> None:
    from . import megatron_core, megatron_cpu, megatron_mamba

    megatron_cpu.patch()
    megatron_mamba.patch()
    with megatron_cpu.OnCPU():
        megatron_core.start(megatron_core.MegatronSpec(tp=2))
        far = megatron_logits.difference(name, folder / name, tp=2)
        assert far < 1e-4, far


MODELS = ("qwen3_next", "qwen3_5_text", "nemotron_h")
CHECKS = {name: (2, partial(check, name)) for name in MODELS}
