"""Trains under AutoEP: the child's side of the AutoEP cases of :mod:`.deepspeed_more`.

A tiny Mixtral, whose experts DeepSpeed stacks and spreads over ranks; the truth has the stacks of all of them. With
AutoTP, attention is cut over tensor-parallel ranks, and experts are spread over ranks of all kinds.
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

from .deepspeed_held import States, module_weights
from .deepspeed_places import find_place, merge_slices
from .deepspeed_specs import AutoEPSpec
from .deepspeed_train import (
    BATCH,
    DTYPES,
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
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
}


def write(spec: AutoEPSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    sizes = {"num_local_experts": spec.experts, "intermediate_size": spec.mlp, "num_hidden_layers": spec.layers}
    model = MixtralForCausalLM(MixtralConfig(vocab_size=spec.vocab, **sizes, **SHAPE))
    whole = {n: p.detach().clone().to(DTYPES[spec.dtype]) for n, p in model.named_parameters()}
    config = base_config(spec.stage, spec.dtype)
    if spec.tp > 1:
        config["tensor_parallel"] = {"autotp_size": spec.tp, "preset_model": "mixtral"}
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    config["expert_parallel"] = {
        "enabled": True,
        "autoep_size": spec.ep,
        "preset_model": "mixtral",
        "use_grouped_mm": False,
        "disable_triton_grouped_mm": True,
    }
    engine, *_ = deepspeed.initialize(model=model, config=config)
    start = module_weights(engine.module)
    # the ranks of a tensor-parallel group see the same
    data = torch.Generator().manual_seed(1000 * spec.seed + rank // spec.tp)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    check_run(engine)
    engine.save_checkpoint(str(out / "ckpt"))
    name = f"ep_size_{spec.ep}"
    ep, expert_dp = groups._get_expert_parallel_rank(name), groups._get_expert_data_parallel_rank(name)
    if spec.tp > 1:
        share = share_of(engine, tp=rank % spec.tp, dp=rank // spec.tp, ep=ep)
        share.notes["start"] = start
        shares = collect(share)
    else:
        shares = collect(share_of(engine, ep=ep, dp=expert_dp))
    if rank == 0:
        names = union(s.states["weights"] for s in shares)
        info = {
            "dp": spec.dp,
            "experts": [n for n in names if EXPERTS.fullmatch(n)],
            "tied": {n: f"{m[1]}.router{m[2]}" for n in names if (m := ROUTER.fullmatch(n))},
        }
        states = merge_both(shares, whole) if spec.tp > 1 else merge_stacks(shares)
        write_truth(out, spec, engine, shares, states, info)


def merge_both(shares: list[Share], whole: dict[str, Tensor]) -> States:
    """What is cut over tensor-parallel ranks is merged by where its rows were in the parameters before."""
    slices = [next(s for s in shares if s.tp == tp) for tp in range(1 + max(s.tp for s in shares))]
    names = [n for n in slices[0].states["weights"] if not EXPERTS.fullmatch(n)]
    places = {n: find_place(n, whole[n], [s.notes["start"][n] for s in slices]) if n in whole else None for n in names}
    dense = [{state: {n: t for n, t in of.items() if n in places} for state, of in s.states.items()} for s in slices]
    states = merge_slices(dense, places)
    ranks = [next(s for s in shares if s.ep == ep) for ep in range(1 + max(s.ep for s in shares))]
    for state, tensors in ranks[0].states.items():
        for n in filter(EXPERTS.fullmatch, tensors):
            states[state][n] = torch.cat([s.states[state][n] for s in ranks])
    return states


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
