"""What Megatron-LM's training/checkpointing.py `save_checkpoint` does, step by step (no package has megatron.training).

Legacy folders: `get_checkpoint_name`, `generate_state_dict`; torch_dist: megatron.core.dist_checkpointing.save.
"""

from __future__ import annotations

import argparse
import random
import signal
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from .megatron_core import STEPS, MegatronSpec


def unwrap(model: Any) -> Any:
    while hasattr(model, "module"):
        model = model.module
    return model


def args_of(spec: MegatronSpec) -> argparse.Namespace:
    """What of Megatron-LM's arguments tells how the model is cut (and some that only have to be got over)."""
    from megatron.core.enums import ModelType
    from megatron.core.transformer.enums import AttnBackend

    from .megatron_hybrid import SIZES

    hybrid: dict[str, Any] = {}
    if spec.hybrid:
        hybrid = {"hybrid_override_pattern": spec.hybrid, "is_hybrid_model": True, **SIZES}
    return argparse.Namespace(
        **hybrid,
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        virtual_pipeline_model_parallel_size=spec.vpp,
        num_virtual_stages_per_pipeline_rank=spec.vpp,
        expert_model_parallel_size=spec.ep,
        expert_tensor_parallel_size=spec.etp or spec.tp,
        context_parallel_size=1,
        data_parallel_size=spec.dp,
        world_size=spec.world,
        rank=dist.get_rank(),
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        ffn_hidden_size=spec.ffn,
        num_attention_heads=spec.heads,
        group_query_attention=spec.groups is not None,
        num_query_groups=spec.groups or 1,
        kv_channels=spec.hidden // spec.heads,
        swiglu=spec.gated,
        add_bias_linear=spec.bias,
        add_qkv_bias=spec.qkv_bias,
        qk_layernorm=spec.qk_norm,
        multi_latent_attention=spec.mla,
        q_lora_rank=8 if spec.mla else None,
        kv_lora_rank=8,
        qk_pos_emb_head_dim=2 if spec.mla else 64,
        untie_embeddings_and_output_weights=not spec.tied,
        vocab_size=spec.vocab - 1,
        padded_vocab_size=spec.padded_vocab,
        make_vocab_size_divisible_by=spec.divisible,
        num_experts=spec.experts,
        moe_grouped_gemm=spec.grouped,
        moe_use_legacy_grouped_gemm=spec.grouped,
        moe_layer_freq=list(spec.moe_freq) if isinstance(spec.moe_freq, tuple) else spec.moe_freq,
        moe_ffn_hidden_size=spec.ffn,
        moe_shared_expert_intermediate_size=spec.shared,
        normalization=spec.norm,
        position_embedding_type=spec.positions,
        params_dtype=torch.bfloat16 if spec.bf16 else torch.float32,
        bf16=spec.bf16,
        fp16=False,
        use_distributed_optimizer=spec.distributed,
        overlap_grad_reduce=spec.bucket is not None,
        ddp_bucket_size=spec.bucket,
        ckpt_format="torch",
        transformer_impl="transformer_engine" if spec.hybrid else "local",
        use_legacy_models=False,
        decoder_first_pipeline_num_layers=spec.first,
        decoder_last_pipeline_num_layers=spec.last,
        account_for_embedding_in_pipeline_split=spec.account,
        account_for_loss_in_pipeline_split=spec.account,
        pipeline_model_parallel_layout=spec.layout,
        model_type=ModelType.encoder_or_decoder,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        optimizer="dist_muon" if spec.layerwise else "adam",
        lr=1e-2,
        iteration=STEPS,
    )


def rng_state() -> list[dict[str, Any]]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return [
        {
            "random_rng_state": random.getstate(),
            "np_rng_state": np.random.get_state(),
            "torch_rng_state": torch.get_rng_state(),
            "cuda_rng_state": torch.cuda.get_rng_state(),
            "rng_tracker_states": get_cuda_rng_tracker().get_states(),
        }
    ]


def state_dict(
    spec: MegatronSpec, optimizer: Any, scheduler: Any, models: dict[str, Any], optim: Any
) -> dict[str, Any]:
    state: dict[str, Any] = {"args": args_of(spec), "checkpoint_version": 3.0, "iteration": STEPS, **models}
    if not optimizer.is_stub_optimizer:
        state["optimizer"] = optim
    state["opt_param_scheduler"] = scheduler.state_dict()
    state["num_floating_point_operations_so_far"] = 1e9
    return state


def checkpoint_name(spec: MegatronSpec, root: Path) -> Path:
    from megatron.core import mpu

    name = f"mp_rank_{mpu.get_tensor_model_parallel_rank():02d}"
    if spec.pp > 1:
        name += f"_{mpu.get_pipeline_model_parallel_rank():03d}"
    if spec.ep > 1:
        name += f"_{mpu.get_expert_model_parallel_rank():03d}"
    return root / f"iter_{STEPS:07d}" / name


def save_legacy(spec: MegatronSpec, root: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    from megatron.core import mpu

    folder = checkpoint_name(spec, root)
    folder.mkdir(parents=True, exist_ok=True)
    if spec.distributed and not optimizer.is_stub_optimizer:
        optimizer.save_parameter_state(str(folder / "distrib_optim.pt"))
    if spec.layerwise:
        optimizer.save_state_dict_to_file(str(folder / f"layer_wise_optimizer_{mpu.get_data_parallel_rank()}.pt"))
    models = {
        f"model{i}" if len(chunks) > 1 else "model": unwrap(c).state_dict_for_save_checkpoint()
        for i, c in enumerate(chunks)
    }
    if mpu.get_expert_data_parallel_rank() == 0:
        state = state_dict(spec, optimizer, scheduler, models, optimizer.state_dict())
        state["rng_state"] = rng_state()
        torch.save(state, folder / "model_optim_rng.pt")
    _tracker(root)


def save_dist(spec: MegatronSpec, root: Path, chunks: list[Any], optimizer: Any, scheduler: Any) -> None:
    from megatron.core import dist_checkpointing, mpu
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    folder = root / f"iter_{STEPS:07d}"
    if dist.get_rank() == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    group = mpu.get_data_parallel_group(with_context_parallel=True)
    metadata: dict[str, Any] = {"singleton_local_shards": False, "chained_optim_avoid_prefix": True}
    if spec.distributed:
        metadata["distrib_optim_sharding_type"] = spec.dist
        if spec.dist == "fully_reshardable":
            metadata["distrib_optim_fully_reshardable_mem_efficient"] = False
    inside = metadata | {"dp_cp_group": group}
    models = {
        f"model{i}" if len(chunks) > 1 else "model": unwrap(c).sharded_state_dict(metadata=inside)
        for i, c in enumerate(chunks)
    }
    optim = optimizer.sharded_state_dict(models, metadata=inside)
    state = state_dict(spec, optimizer, scheduler, models, optim)
    state["args"].ckpt_format = "torch_dist"
    place = (mpu.get_pipeline_model_parallel_rank(), mpu.get_tensor_model_parallel_rank())
    state["rng_state"] = ShardedObject("rng_state", rng_state(), (spec.pp, spec.tp), place, dist.get_rank(group))
    strategy = FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy("torch_dist"), group, False)
    dist_checkpointing.save(state, str(folder), strategy, content_metadata=metadata)
    _tracker(root)


def _tracker(root: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        (root / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
