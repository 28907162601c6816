"""Trains a model with two MoE layers: the child's side of the MoE cases of :mod:`.deepspeed_more`.

Every rank calls its experts 0, 1, ...; the truth has them under their global numbers, as the expert files have.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import is_moe_param, split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups
from torch import Tensor, nn

from .deepspeed_held import States
from .deepspeed_specs import MoeSpec
from .deepspeed_train import (
    BATCH,
    LENGTH,
    STEPS,
    Share,
    base_config,
    check_run,
    collect,
    decay_groups,
    same_bits,
    share_of,
    union,
    without,
    write_truth,
)
from .optimizers import make_optimizer

EXPERT = re.compile(r"(?P<layer>.*)\.deepspeed_moe\.experts\.deepspeed_experts\.(?P<number>\d+)\.(?P<rest>.*)")


class Expert(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(hidden, 2 * hidden - 5)
        self.w_out = nn.Linear(2 * hidden - 5, hidden, bias=False)
        self.gain = nn.Parameter(torch.rand(1))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.w_out(torch.tanh(self.w_in(x)))
        return out * self.gain


class MoeModel(nn.Module):
    steps: Tensor

    def __init__(self, spec: MoeSpec) -> None:
        super().__init__()
        hidden = spec.hidden
        self.embed = nn.Embedding(spec.vocab, hidden)
        self.moe1 = MoE(hidden, Expert(hidden), spec.experts[0], spec.ep[0], k=1, min_capacity=2)
        self.between = nn.Linear(hidden, hidden)
        self.moe2 = MoE(hidden, Expert(hidden), spec.experts[1], spec.ep[1], k=2, use_residual=spec.residual)
        self.frozen = nn.Linear(hidden, hidden)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(hidden, spec.vocab, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        self.steps += 1
        x = self.embed(ids)
        first, first_loss, _ = self.moe1(x)
        x = x + self.between(x + first)
        second, second_loss, _ = self.moe2(x)
        out: Tensor = self.head(self.frozen(x + second))
        return out, first_loss + second_loss


def write(spec: MoeSpec, rank: int, out: Path) -> None:
    torch.manual_seed(spec.seed)
    model = MoeModel(spec)
    torch.manual_seed(1000 * spec.seed + rank)  # DeepSpeed starts all experts as copies of one, and ranks alike
    for p in model.parameters():
        if is_moe_param(p):
            nn.init.normal_(p, std=0.2)
    groups_split = split_params_into_different_moe_groups_for_optimizer(decay_groups(model))
    groups_split = [group for group in groups_split if group["params"]]
    config = base_config(spec.stage, spec.dtype, spec.bf16_optimizer)
    config["use_data_before_expert_parallelism"] = spec.data_before_expert
    optimizer = make_optimizer(spec.optimizer, groups_split)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    data = torch.Generator().manual_seed(1000 * spec.seed + rank)
    for _ in range(STEPS):
        ids = torch.randint(spec.vocab, (BATCH, LENGTH), generator=data)
        logits, extra = engine(ids)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), ids.flatten()) + 0.01 * extra.float()
        engine.backward(loss)
        engine.step()
    check_run(engine)
    engine.save_checkpoint(str(out / "ckpt"))
    shares = collect(moe_share(engine, spec))
    if rank == 0:
        write_truth(out, spec, engine, shares, merge_experts(shares), moe_info(shares, spec))


def moe_share(engine: Any, spec: MoeSpec) -> Share:
    """With global expert numbers throughout."""
    coordinates = {}
    for layer, ep in zip(("moe1", "moe2"), spec.ep, strict=True):
        coordinates[layer] = groups._get_expert_parallel_rank(f"ep_size_{ep}")
    largest = f"ep_size_{max(spec.ep)}"
    share = share_of(
        engine, ep=groups._get_expert_parallel_rank(largest), dp=groups._get_expert_data_parallel_rank(largest)
    )
    local = {layer: n // ep for layer, n, ep in zip(("moe1", "moe2"), spec.experts, spec.ep, strict=True)}

    def rename(name: str) -> str:
        found = EXPERT.fullmatch(name)
        if not found:
            return name
        first = coordinates[found["layer"]] * local[found["layer"]]
        return expert_name(found["layer"], first + int(found["number"]), found["rest"])

    renamed(share, rename)
    return share


def expert_name(layer: str, number: int, rest: str) -> str:
    return f"{layer}.deepspeed_moe.experts.deepspeed_experts.{number}.{rest}"


def renamed(share: Share, rename: Callable[[str], str]) -> None:
    share.states = {key: {rename(n): t for n, t in tensors.items()} for key, tensors in share.states.items()}
    share.groups = [[rename(n) for n in group] for group in share.groups]


def merge_experts(shares: list[Share]) -> States:
    """Everything once; what several ranks hold must be the same on all."""
    states: States = {}
    for s in shares:
        for key, tensors in s.states.items():
            merged = states.setdefault(key, {})
            known = {n: t for n, t in tensors.items() if n in merged}
            same_bits(f"what the ranks hold of {key}", without(known, s.buffers), merged)
            for name, t in tensors.items():
                merged.setdefault(name, t)
    return {key: dict(sorted(tensors.items())) for key, tensors in states.items()}


def moe_info(shares: list[Share], spec: MoeSpec) -> dict[str, Any]:
    names = union(s.states["weights"] for s in shares)
    firsts = {s.ep: s for s in shares if s.dp == 0}
    return {
        "dp": spec.dp,
        "expert_dp": 1 + max(s.dp for s in shares),
        "tied": {"head.weight": "embed.weight"},
        "experts": sorted(n for n in names if EXPERT.fullmatch(n)),
        "num_experts": list(spec.experts),
        "ep_of_rank": [s.ep for s in shares],
        "group_param_names": {f"expp_rank_{ep}_mp_rank_00": s.groups for ep, s in sorted(firsts.items())},
    }
