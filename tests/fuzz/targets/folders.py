"""Files of checkpoint folders, through the front door: a genuine checkpoint with one file changed."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import lazyckpt

from ... import test_torch_xla
from ..contract import Target
from .sources import golden, replacing, scratch

TOKENIZER = b'{"model": {"vocab": {"a": 0}}, "added_tokens": []}'
# target -> (group, case, folder in the case, file, grammar)
FILES = {
    "huggingface.index": ("huggingface", "llama_sharded", "ckpt", "model.safetensors.index.json", "json"),
    "huggingface.config": ("huggingface", "llama_sharded", "ckpt", "config.json", "json"),
    "huggingface.shard": ("huggingface", "llama_sharded", "ckpt", "model-00002-of-00006.safetensors", "safetensors"),
    "huggingface.bin-index": ("huggingface", "bin_sharded", "ckpt", "pytorch_model.bin.index.json", "json"),
    "megatron.common": ("megatron", "single", "dist/iter_0000003", "common.pt", "zip"),
    "megatron.metadata-json": ("megatron", "single", "dist/iter_0000003", "metadata.json", "json"),
    "megatron.metadata": ("megatron", "single", "dist/iter_0000003", ".metadata", "pickle"),
    "megatron.legacy": ("megatron", "single", "legacy/iter_0000003", "mp_rank_00/model_optim_rng.pt", "zip"),
    "trainers.state": ("trainers", "trainer_gpt2", "ckpt/checkpoint-4", "trainer_state.json", "json"),
    "trainers.optimizer": ("trainers", "trainer_gpt2", "ckpt/checkpoint-4", "optimizer.pt", "zip"),
    "trainers.sharding": ("trainers", "torch_checkpointing", "ckpt", "metadata.pkl", "pickle"),
    "trainers.lightning": ("trainers", "lightning_fsdp", "ckpt", "meta.pt", "zip"),
    "trainers.verl-manifest": ("verl", "verl_megatron_vpp", "ckpt", "ckpt_contents.json", "json"),
    "trainers.verl-config": ("verl", "verl_megatron_vpp", "ckpt", "transformer_config.json", "json"),
    "trainers.litgpt": ("run_folders", "litgpt_pretrain", "ckpt/final", "model_config.yaml", "text"),
    "trainers.colossalai-index": (
        "run_folders", "colossalai_sharded", "ckpt/epoch-0_step-2", "optimizer/pytorch_optim.bin.index.json", "json"
    ),
    "trainers.colossalai-groups": (
        "run_folders", "colossalai_sharded", "ckpt/epoch-0_step-2", "optimizer/pytorch_optim_group.bin", "zip"
    ),
    "trainers.levanter": ("run_folders", "levanter_steps", "ckpt/step-2", "metadata.json", "json"),
    "trainers.mlx": ("run_folders", "mlx_npz", "ckpt", "weights.npz", "zip"),
    "ranks.file": ("rank_files", "verl_one", "ckpt", "model_world_size_1_rank_0.pt", "zip"),
    "ranks.config": ("rank_files", "verl_one", "ckpt", "fsdp_config.json", "json"),
    "deepspeed.model": ("deepspeed_zero", "zero2_bf16_dp1", "ckpt", "global_step3/mp_rank_00_model_states.pt", "zip"),
    "deepspeed.optimizer": (
        "deepspeed_zero", "zero2_bf16_dp1", "ckpt", "global_step3/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "zip"
    ),
    "deepspeed.latest": ("deepspeed_zero", "zero2_bf16_dp1", "ckpt", "latest", "text"),
}  # fmt: skip


def _target(name: str, group: str, case: str, below: str, file: str, grammar: str) -> Target:
    def folder() -> Path:
        return golden(group, case, below)

    return Target(name, replacing(folder, file), lambda: [(folder() / file).read_bytes()], grammar)


@functools.cache
def _torch_xla() -> Path:
    """What three ranks of torch_xla save."""
    to = scratch() / "torch_xla"
    test_torch_xla.write(to, flat=True)
    return to


_RANK = "final_rank-00000000-of-00000003.pth"


# -- documents that verification reads


@functools.cache
def _verified() -> Path:
    """A checkpoint with the records that verification compares: integrity.json, and those of a download."""
    to = scratch() / "verified"  # perhaps made by a child before
    shutil.copytree(golden("dcp", "numbered"), to, dirs_exist_ok=True)
    (to / ".cache/huggingface/download").mkdir(parents=True, exist_ok=True)
    return to


def verified(name: str) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        for other in RECORDS:  # a child that was killed may have left one
            (_verified() / other).unlink(missing_ok=True)
        (_verified() / name).write_bytes(data)
        report = lazyckpt.verify(_verified())
        str(report), report.to_json()

    return run


def _integrity() -> list[bytes]:
    names = (".metadata", "__0_0.distcp")
    files = {name: hashlib.sha256((_verified() / name).read_bytes()).hexdigest() for name in names}
    return [json.dumps({"algorithm": "sha256", "files": files}).encode()]


RECORDS = ("integrity.json", ".cache/huggingface/download/__0_0.distcp.metadata", "tokenizer.json")
TARGETS = (
    *(_target(name, *about) for name, about in FILES.items()),
    Target("ranks.torch_xla", replacing(_torch_xla, _RANK), lambda: [(_torch_xla() / _RANK).read_bytes()], "zip"),
    Target("verify.integrity", verified(RECORDS[0]), _integrity, "json"),
    Target(
        "verify.download", verified(RECORDS[1]),
        lambda: [b"0123456789abcdef\n" + b"0" * 64 + b"\n1700000000.0\n"], "text",
    ),
    Target("verify.tokenizer", verified(RECORDS[2]), lambda: [TOKENIZER], "json"),
)  # fmt: skip
