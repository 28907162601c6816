"""The checkpoint of `lazyckpt demo`: a character-level Llama trained with ZeRO-3, for tools/make_demo.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from .deepspeed_held import held
from .deepspeed_train import base_config

__all__ = ["DemoSpec"]

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 72,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
BATCH, LENGTH = 8, 64


@dataclass(frozen=True, kw_only=True)
class DemoSpec:
    """``out/ckpt``: the checkpoint; ``out/truth.json``: the SHA-256 of what the ranks held, by state and parameter."""

    writer: ClassVar[str] = "deepspeed_demo"

    text: str
    """What the model learns to continue, character by character."""
    steps: int = 300
    dp: int = 4

    @property
    def world(self) -> int:
        return self.dp


def write(spec: DemoSpec, rank: int, out: Path) -> None:
    torch.manual_seed(0)
    letters = sorted(set(spec.text))
    ids = torch.tensor([letters.index(letter) for letter in spec.text])
    model: Any = LlamaForCausalLM(  # type: ignore[no-untyped-call]
        LlamaConfig(**SIZES, vocab_size=len(letters), tie_word_embeddings=True)
    )
    config = base_config(3, "bf16") | {"train_micro_batch_size_per_gpu": BATCH}
    config["zero_optimization"]["stage3_param_persistence_threshold"] = 0
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    data = torch.Generator().manual_seed(rank)
    for _ in range(spec.steps):
        starts = torch.randint(len(ids) - LENGTH, (BATCH,), generator=data).tolist()
        batch = torch.stack([ids[at : at + LENGTH] for at in starts])
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
    states = held(engine)
    client = {"loss": round(loss.item(), 4), "letters": "".join(letters)}
    engine.save_checkpoint(str(out / "ckpt"), client_state=client)
    if rank == 0:
        model.config.save_pretrained(out / "ckpt")
        sums = {state: {name: _sha256(t) for name, t in tensors.items()} for state, tensors in states.items()}
        (out / "truth.json").write_text(json.dumps(sums, indent=1) + "\n")
    dist.barrier()


def _sha256(t: Tensor) -> str:
    """Of the elements in C order, little-endian."""
    return hashlib.sha256(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
