"""Trains tensor-parallel layers in a pipeline: the child's side of the 3D cases of :mod:`.deepspeed_more`."""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.pipe.topology import PipeModelDataParallelTopology
from torch import Tensor

from . import megatron_model, pipe_model
from .deepspeed_held import module_weights
from .deepspeed_pipe import MICRO_BATCHES, merge_stages, pipe_info, pipe_share, train_pipeline
from .deepspeed_places import Place, find_place, merge_slices, rule
from .deepspeed_specs import MegatronSpec
from .deepspeed_train import DTYPES, STEPS, Share, base_config, collect, decay_groups, write_truth
from .optimizers import make_optimizer

AVERAGED, VOCAB = ".mlp.smoother", ".word_embeddings.weight"


def write(spec: MegatronSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    topology = PipeModelDataParallelTopology(num_pp=spec.pp, num_mp=spec.tp, num_dp=spec.dp)
    slices = make_slices(topology, rank)
    layers = megatron_model.layers(spec, slices)
    model = PipelineModule(layers, topology=topology, loss_fn=pipe_model.loss, partition_method="uniform")
    wholes = {
        f"{prefix}.{name}": whole.to(DTYPES[spec.dtype])
        for prefix, module in model.named_modules()
        if isinstance(module, megatron_model.Split)
        for name, whole in module.wholes.items()
    }
    start = {name: t.to(DTYPES[spec.dtype]) for name, t in module_weights(model).items()}
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["gradient_accumulation_steps"] = MICRO_BATCHES
    optimizer = make_optimizer(spec.optimizer, decay_groups(model))
    engine = train_pipeline(model, optimizer, config, spec.vocab, spec.seed)
    engine.save_checkpoint(str(out / "ckpt"), client_state=client_state(spec, slices))
    share = pipe_share(engine)
    share.notes |= {"start": start, "wholes": wholes}
    shares = collect(share)
    if rank == 0:
        (out / "ckpt" / "latest_checkpointed_iteration.txt").write_text(str(STEPS))
        merged, places = merge_tensor_parallel(shares, spec)
        states, differing = merge_stages(merged)
        rules = {n: "averaged" if n.endswith(AVERAGED) else rule(p) for n, p in places.items()}
        info = pipe_info(shares, differing) | {"tp_places": places, "rules": rules}
        info |= {"vocab": spec.vocab, "padded_vocab": spec.padded_vocab}
        info["vocab_tensors"] = [n for n in rules if n.endswith(VOCAB)]
        write_truth(out, spec, engine, shares, states, info)


def make_slices(topology: Any, rank: int) -> megatron_model.Slices:
    groups = [(ranks, dist.new_group(ranks)) for ranks in topology.get_axis_comm_lists("model")]
    ranks, group = next(found for found in groups if rank in found[0])
    return megatron_model.Slices(ranks.index(rank), len(ranks), group)


def merge_tensor_parallel(shares: list[Share], spec: MegatronSpec) -> tuple[list[Share], dict[str, Place]]:
    """For each stage one share of whole tensors; and how the slices make them up.

    Whole as the rules of ``ds_to_universal`` define it: without the padding of the vocabulary, and averaged what each
    rank has a version of.
    """
    merged: list[Share] = []
    every: dict[str, Place] = {}
    for stage in range(spec.pp):
        ranks = sorted((s for s in shares if s.dp == 0 and s.pp == stage), key=lambda s: s.tp)
        places: dict[str, Place] = {}
        for name, first in ranks[0].notes["start"].items():
            starts = [s.notes["start"][name] for s in ranks]
            if name not in ranks[0].notes["wholes"]:  # the same on all ranks
                places[name] = find_place(name, first, starts)
            elif stage == 0 or name not in every:  # DeepSpeed overwrites a tied one with what stage 0 has
                places[name] = find_place(name, ranks[0].notes["wholes"][name], starts)
            else:
                places[name] = every[name]
        averaged = {name for name in places if name.endswith(AVERAGED)}
        plain = [{key: _but(tensors, averaged) for key, tensors in s.states.items()} for s in ranks]
        states = merge_slices(plain, places)
        for key, tensors in ranks[0].states.items():
            for name in averaged & tensors.keys():
                versions = [s.states[key][name] for s in ranks]
                states[key][name] = sum(versions[1:], versions[0]) / len(versions)
            for name in states[key]:
                if name.endswith(VOCAB):
                    states[key][name] = states[key][name][: spec.vocab].clone()
        every |= places
        merged.append(Share(pp=stage, states=states))
    return merged, every


def _but(tensors: dict[str, Tensor], names: set[str]) -> dict[str, Tensor]:
    return {n: t for n, t in tensors.items() if n not in names}


def client_state(spec: MegatronSpec, slices: megatron_model.Slices) -> dict[str, Any]:
    """What Megatron-DeepSpeed gives ``save_checkpoint`` to keep."""
    args = argparse.Namespace(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads[0],
        num_key_value_heads=spec.heads[2],
        ffn_hidden_size=spec.mlp,
        max_position_embeddings=7,
        padded_vocab_size=spec.padded_vocab,
        tensor_model_parallel_size=spec.tp,
        pipeline_model_parallel_size=spec.pp,
        data_parallel_size=spec.dp,
        params_dtype=DTYPES[spec.dtype],
        swiglu=True,
        lr=1e-2,
        attn_mask=torch.ones(1, 1, 7, 7, dtype=torch.bool).tril(),
    )
    rng = {
        "random_rng_state": random.Random(0).getstate(),
        "np_rng_state": np.random.RandomState(0).get_state(),
        "torch_rng_state": torch.get_rng_state(),
    }
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": STEPS,
        "tokens": 1000,
        "rng_state": [rng],
        "universal_checkpoint_info": megatron_model.universal_info(spec, slices),
    }
