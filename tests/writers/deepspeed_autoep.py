"""Trains under AutoEP: the child's side of the AutoEP cases of :mod:`.deepspeed_more`.

A tiny Mixtral, whose experts DeepSpeed stacks and spreads over ranks; the truth has the stacks of all of them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.utils import groups
from torch import Tensor
from transformers import MixtralConfig, MixtralForCausalLM

from .deepspeed_held import States
from .deepspeed_specs import AutoEPSpec
from .deepspeed_train import (
    BATCH,
    LENGTH,
    STEPS,
    Share,
    base_config,
    check_run,
    collect,
    same_bits,
    share_of,
    union,
    write_truth,
)

EXPERTS = re.compile(r".*\.mlp\.experts\.w[123]")
ROUTER = re.compile(r"(.*\.mlp)\.gate(\.gate\..*)")
SHAPE: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 23,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}


def write(spec: AutoEPSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    model = MixtralForCausalLM(MixtralConfig(vocab_size=spec.vocab, num_local_experts=spec.experts, **SHAPE))
    config = base_config(spec.stage, spec.dtype)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config["expert_parallel"] = {
        "enabled": True,
        "autoep_size": spec.ep,
        "preset_model": "mixtral",
        "use_grouped_mm": False,
        "disable_triton_grouped_mm": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    check_run(engine)
    engine.save_checkpoint(str(out / "ckpt"))
    name = f"ep_size_{spec.ep}"
    shares = collect(
        share_of(engine, ep=groups._get_expert_parallel_rank(name), dp=groups._get_expert_data_parallel_rank(name))
    )
    if rank == 0:
        names = union(s.states["weights"] for s in shares)
        info = {
            "dp": spec.dp,
            "experts": [n for n in names if EXPERTS.fullmatch(n)],
            "tied": {n: f"{m[1]}.router{m[2]}" for n in names if (m := ROUTER.fullmatch(n))},
        }
        write_truth(out, spec, engine, shares, merge_stacks(shares), info)


def merge_stacks(shares: list[Share]) -> States:
    states: States = {}
    ranks = sorted({s.ep: s for s in shares}.items())
    for key, tensors in shares[0].states.items():
        states[key] = {}
        for name, first in tensors.items():
            held: list[Tensor] = [s.states[key][name] for _, s in ranks]
            if EXPERTS.fullmatch(name):
                states[key][name] = torch.cat(held)
                continue
            for other in held[1:]:
                same_bits(f"what the ranks hold of {key}", {name: other}, {name: first})
            states[key][name] = first
    return states
