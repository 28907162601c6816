"""Checkpoints of Megatron-LM in layouts that no installed version writes: old models, old row orders, many ranks.

A whole model is cut here as Megatron-LM's sources say it was (megatron/checkpointing.py, core/tensor_parallel), and
saved with torch.save; the whole is the truth.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Cut = Callable[[Tensor, int, int], Tensor]  # (whole, rank, ranks) -> the rank's shard


def rows(t: Tensor, rank: int, ranks: int) -> Tensor:
    return t.chunk(ranks, 0)[rank]


def columns(t: Tensor, rank: int, ranks: int) -> Tensor:
    return t.chunk(ranks, 1)[rank]


def halves(t: Tensor, rank: int, ranks: int) -> Tensor:
    return torch.cat([half.chunk(ranks, 0)[rank] for half in t.chunk(2, 0)])


def fused(sizes: list[int]) -> Cut:
    """Several matrices one above the other, each cut on its own."""

    def cut(t: Tensor, rank: int, ranks: int) -> Tensor:
        return torch.cat([part.chunk(ranks, 0)[rank] for part in t.split(sizes)])

    return cut


def same(t: Tensor, rank: int, ranks: int) -> Tensor:
    return t


def old_rows(version: int, size: int) -> Cut:
    """Today's rows [heads, 3, size] of a rank as versions 0 ([3, heads, size]) and 1 ([heads, size, 3]) had them."""

    def cut(t: Tensor, rank: int, ranks: int) -> Tensor:
        own = t.chunk(ranks, 0)[rank]
        today = own.view(-1, 3, size, *own.shape[1:])
        old = today.transpose(0, 1) if version == 0 else today.transpose(1, 2)
        return old.reshape(own.shape).contiguous()

    return cut


def args(**more: Any) -> argparse.Namespace:
    values = {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "num_attention_heads": 4,
        "hidden_size": 16,
        "kv_channels": 4,
        "swiglu": False,
        "untie_embeddings_and_output_weights": True,
    }
    return argparse.Namespace(**values | more)


def save_rank(folder: Path, name: str, state: Mapping[str, Any]) -> Path:
    path = folder / name / "model_optim_rng.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"iteration": 3, "checkpoint_version": 3.0, **state}, path)
    return path


def save_tensor_parallel(
    root: Path, model: Mapping[str, tuple[Tensor, Cut]], ranks: int, nest: bool = False, **more: Any
) -> Path:
    """Write a model over tensor-parallel ranks. ``nest``: as nested dicts, as models before megatron-core were."""
    folder = root / "iter_0000003"
    settings = dict(more.pop("args", {}))
    for rank in range(ranks):
        own: dict[str, Any] = {n: cut(t, rank, ranks).clone() for n, (t, cut) in model.items()}
        state = {"args": args(tensor_model_parallel_size=ranks, **settings), "model": _nested(own) if nest else own}
        save_rank(folder, f"mp_rank_{rank:02d}", {**state, **more})
    (root / "latest_checkpointed_iteration.txt").write_text("3")
    return root


def _nested(flat: Mapping[str, Tensor]) -> dict[str, Any]:
    """``language_model`` -> ``embedding`` -> ``word_embeddings`` -> ``weight``; a transformer's own dict is flat."""
    root: dict[str, Any] = {}
    for name, tensor in flat.items():
        parts = name.split(".")
        depth = 2 if parts[1] in ("encoder", "transformer") else len(parts) - 1
        at = root
        for part in parts[:depth]:
            at = at.setdefault(part, {})
        at[".".join(parts[depth:])] = tensor
    return root
