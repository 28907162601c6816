"""Trains under AutoTP: the child's side of the AutoTP cases of :mod:`.deepspeed_more`.

Where each rank's rows belong is not taken from what DeepSpeed says about it: the model starts with rows that can be
told apart, and what AutoTP made of them is looked up in the whole parameters of before.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from . import fused_model
from .deepspeed_held import module_weights
from .deepspeed_places import distinct, find_place, merge_slices, rule
from .deepspeed_specs import AutoTPSpec
from .deepspeed_train import (
    BATCH,
    DTYPES,
    LENGTH,
    STEPS,
    base_config,
    check_run,
    collect,
    decay_groups,
    share_of,
    write_truth,
)
from .deepspeed_truth import tied_names
from .optimizers import make_optimizer


def make_model(spec: AutoTPSpec) -> nn.Module:
    sizes: dict[str, Any] = {
        "vocab_size": spec.vocab,
        "hidden_size": spec.heads * spec.head_size,
        "intermediate_size": spec.mlp,
        "num_hidden_layers": spec.layers,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
    }
    model: nn.Module
    if spec.fused:
        model = fused_model.FusedModel(fused_model.FusedConfig(**sizes, head_size=spec.head_size))
    else:
        config = LlamaConfig(**sizes, attention_bias=True, tie_word_embeddings=spec.vocab_parallel)
        model = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    values = torch.Generator().manual_seed(spec.seed)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(distinct(p, values))
    if spec.frozen:
        last: Any = (model.model if isinstance(model, LlamaForCausalLM) else model).layers[-1]
        last.mlp.down_proj.weight.requires_grad_(False)
        last.self_attn.o_proj.bias.requires_grad_(False)
    return model


def make_config(spec: AutoTPSpec, model: Any) -> dict[str, Any]:
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["tensor_parallel"] = {"autotp_size": spec.tp}
    if spec.fused:
        config["tensor_parallel"]["partition_config"] = fused_model.partition_config(model.config)
    if spec.vocab_parallel:
        config["tensor_parallel"]["vocab_parallel_lm_head"] = True
    return config


def write(spec: AutoTPSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    model = make_model(spec)
    tied = tied_names(model)
    whole = {n: t.detach().clone().to(DTYPES[spec.dtype]) for n, t in model.state_dict().items()}
    optimizer = make_optimizer(spec.optimizer, decay_groups(model))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=make_config(spec, model))
    start = module_weights(engine.module)
    tp, dp = groups.get_tensor_model_parallel_rank(), groups.get_data_parallel_rank()
    data = torch.Generator().manual_seed(1000 * spec.seed + dp)  # the ranks of a tensor-parallel group see the same
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        loss = engine(input_ids=ids, labels=ids)[0]
        engine.backward(loss)
        engine.step()
    check_run(engine)
    engine.save_checkpoint(str(out / "ckpt"))
    share = share_of(engine, tp=tp, dp=dp)
    share.notes["start"] = start
    shares = collect(share)
    if rank == 0:
        slices = sorted((s for s in shares if s.dp == 0), key=lambda s: s.tp)
        places = {name: find_place(name, t, [s.notes["start"][name] for s in slices]) for name, t in whole.items()}
        states = merge_slices([s.states for s in slices], places)
        info = {"tied": tied, "tp_places": places, "rules": {n: rule(p) for n, p in places.items()}}
        info["group_param_names"] = {f"mp_rank_{s.tp:02d}": s.groups for s in slices}
        write_truth(out, spec, engine, shares, states, info)
