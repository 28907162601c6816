"""Models of transformers (and adapters of peft on them), trained and saved as their trainers do: ZeRO-3, FSDP2 through
torch.distributed.checkpoint, FSDP2's rank files as verl has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

from .deepspeed_specs import HFSpec
from .deepspeed_train import BATCH, LENGTH, STEPS, base_config

SIZES: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
TARGETS = ["q_proj", "v_proj"]


def write(spec: HFSpec, rank: int, out: Path) -> None:
    torch.manual_seed(3)
    model: Any = LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=spec.tied))  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=0.3)
    ckpt = out / "ckpt"
    ckpt.mkdir(parents=True, exist_ok=True)
    if rank == 0:
        model.config.save_pretrained(ckpt / "huggingface" if spec.kind == "ranks" else ckpt)
        if spec.lora:
            model.save_pretrained(out / "base")
    if spec.lora:
        model = with_adapter(model, out, rank)
    ids = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) % SIZES["vocab_size"]
    truth = zero3(model, ckpt, ids) if spec.kind == "zero3" else fsdp2(spec, model, ckpt, rank, ids)
    if rank == 0:
        torch.save(truth, out / "truth.pt")
        (out / "info.json").write_text(json.dumps({"tied": spec.tied}))


def with_adapter(model: Any, out: Path, rank: int) -> Any:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=TARGETS, modules_to_save=["lm_head"], use_dora=True, task_type="CAUSAL_LM"
    )
    adapted = get_peft_model(model, config)
    with torch.no_grad():
        for name, p in adapted.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.3)
    if rank == 0:
        adapted.peft_config["default"].save_pretrained(out / "config")
    return adapted


def zero3(model: Any, ckpt: Path, ids: Tensor) -> dict[str, Any]:
    config = base_config(3, "fp32")
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    trained = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=trained, config=config)
    for _ in range(STEPS):
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        engine.step()
    engine.save_checkpoint(str(ckpt))
    with torch.no_grad():
        logits = engine(input_ids=ids).logits
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        weights = {n: p.detach().clone() for n, p in engine.module.named_parameters(remove_duplicate=False)}
    return {"weights": weights, "logits": logits, "ids": ids}


def fsdp2(spec: HFSpec, model: Any, ckpt: Path, rank: int, ids: Tensor) -> dict[str, Any]:
    with torch.no_grad():
        logits = model(ids).logits
    weights = {n: p.detach().clone() for n, p in model.named_parameters(remove_duplicate=False)}
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    if spec.kind == "dcp":
        dcp.save({"model": get_model_state_dict(model, options=StateDictOptions())}, checkpoint_id=ckpt)
    else:
        torch.save(model.state_dict(), ckpt / f"model_world_size_{dist.get_world_size()}_rank_{rank}.pt")
    dist.barrier()
    return {"weights": weights, "logits": logits, "ids": ids}
