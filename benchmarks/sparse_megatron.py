"""A checkpoint of Megatron-LM on 1,024 model-parallel ranks (tp=8, pp=16, ep=8), whose tensors take no disk space.

torch.save writes every file; tensors are fake, `torch.serialization.skip_data` leaves holes. Keys, classes and order
are those of files that megatron-core 0.16 wrote; the arguments are as many as Megatron-LM has.
"""

from __future__ import annotations

import argparse
import random
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

TP, PP, EP, LAYERS, EXPERTS = 8, 16, 8, 64, 64
HIDDEN, FFN, HEADS, GROUPS, VOCAB = 6144, 2048, 48, 8, 131072


def args(tp: int, pp: int, ep: int) -> argparse.Namespace:
    other = {f"option_{n}": (None, False, True, 1, 0.1, "none")[n % 6] for n in range(600)}
    return argparse.Namespace(
        **other,
        tensor_model_parallel_size=TP,
        pipeline_model_parallel_size=PP,
        expert_model_parallel_size=EP,
        expert_tensor_parallel_size=TP,
        num_layers=LAYERS,
        num_experts=EXPERTS,
        hidden_size=HIDDEN,
        ffn_hidden_size=FFN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        group_query_attention=True,
        swiglu=True,
        untie_embeddings_and_output_weights=True,
        data_parallel_size=EP,
        rank=tp + TP * (ep + EP * pp),
    )


def model(pp: int) -> OrderedDict[str, Any]:
    bf16 = {"dtype": torch.bfloat16}
    found: OrderedDict[str, Any] = OrderedDict()
    if pp == 0:
        found["embedding.word_embeddings.weight"] = torch.empty(VOCAB // TP, HIDDEN, **bf16)
    for n in range(LAYERS // PP):
        head = f"decoder.layers.{n}."
        found[head + "input_layernorm.weight"] = torch.empty(HIDDEN, **bf16)
        found[head + "self_attention.linear_proj.weight"] = torch.empty(HIDDEN, HIDDEN // TP, **bf16)
        found[head + "self_attention.linear_proj._extra_state"] = None
        rows = (HEADS + 2 * GROUPS) * 128 // TP
        found[head + "self_attention.linear_qkv.weight"] = torch.empty(rows, HIDDEN, **bf16)
        found[head + "self_attention.linear_qkv._extra_state"] = None
        found[head + "pre_mlp_layernorm.weight"] = torch.empty(HIDDEN, **bf16)
        found[head + "mlp.router.weight"] = torch.empty(EXPERTS, HIDDEN, **bf16)
        for j in range(EXPERTS // EP):
            one = f"{head}mlp.experts.local_experts.{j}."
            found[one + "linear_fc1.weight"] = torch.empty(2 * FFN // TP, HIDDEN, **bf16)
            found[one + "linear_fc1._extra_state"] = None
            found[one + "linear_fc2.weight"] = torch.empty(HIDDEN, FFN // TP, **bf16)
            found[one + "linear_fc2._extra_state"] = None
    if pp == PP - 1:
        found["decoder.final_layernorm.weight"] = torch.empty(HIDDEN, **bf16)
        found["output_layer.weight"] = torch.empty(VOCAB // TP, HIDDEN, **bf16)
    return found


def optimizer(weights: OrderedDict[str, Any]) -> list[dict[str, Any]]:
    parts = []
    for experts in (False, True):
        own = [t for n, t in weights.items() if t is not None and (".experts." in n) == experts]
        groups = [[t for t in own if t.ndim > 1], [t for t in own if t.ndim == 1]]
        count = 0
        tables, states, masters = [], {}, []
        for wd, tensors in zip((1.0, 0.0), groups, strict=True):
            ids = list(range(count, count + len(tensors)))
            count += len(tensors)
            tables.append({"wd_mult": wd, "lr_mult": 1.0, "is_expert_parallel": experts, "lr": 1e-4, "params": ids})
            masters.append([torch.empty(t.shape) for t in tensors])
            for i, t in zip(ids, tensors, strict=True):
                states[i] = {
                    "step": torch.empty(()),
                    "exp_avg": torch.empty(t.shape),
                    "exp_avg_sq": torch.empty(t.shape),
                }
        parts.append({"optimizer": {"state": states, "param_groups": tables}, "fp32_from_fp16_params": masters})
    return parts


def write(folder: Path) -> None:
    generator = random.Random(0)
    for pp in range(PP):
        for tp in range(TP):
            for ep in range(EP):
                rng = np.random.RandomState(generator.randrange(1 << 30)).get_state()
                with FakeTensorMode():
                    weights = model(pp)
                    state = {
                        "args": args(tp, pp, ep),
                        "checkpoint_version": 3.0,
                        "iteration": 1000,
                        "model": weights,
                        "optimizer": optimizer(weights),
                        "opt_param_scheduler": {"max_lr": 1e-4, "num_steps": 1000},
                        "rng_state": [{"np_rng_state": rng, "torch_rng_state": torch.empty(5056, dtype=torch.uint8)}],
                        "num_floating_point_operations_so_far": 1e20,
                    }
                    path = folder / "iter_0001000" / f"mp_rank_{tp:02d}_{pp:03d}_{ep:03d}" / "model_optim_rng.pt"
                    path.parent.mkdir(parents=True)
                    with torch.serialization.skip_data(materialize_fake_tensors=True):
                        torch.save(state, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("1000")
