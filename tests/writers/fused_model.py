"""A decoder whose query, key and value, and whose gate and up projection, share a parameter each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass
class FusedConfig:
    """The names under which DeepSpeed's AutoTP looks for head counts."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_size: int

    @property
    def kv_size(self) -> int:
        return self.num_key_value_heads * self.head_size


class Attention(nn.Module):
    def __init__(self, config: FusedConfig) -> None:
        super().__init__()
        self.config = config
        self.qkv_proj = nn.Linear(config.hidden_size, config.hidden_size + 2 * config.kv_size)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        c = self.config
        fused: Tensor = self.qkv_proj(x)
        groups = c.num_attention_heads // c.num_key_value_heads
        kv = fused.shape[-1] // (groups + 2)  # what this rank holds of them
        parts = torch.split(fused, [groups * kv, kv, kv], -1)
        q, k, v = (t.view(*t.shape[:2], -1, c.head_size).transpose(1, 2) for t in parts)
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: Tensor = self.o_proj(out.transpose(1, 2).flatten(2))
        return done


class Mlp(nn.Module):
    def __init__(self, config: FusedConfig) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        out: Tensor = self.down_proj(nn.functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, config: FusedConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.hidden_size), nn.LayerNorm(config.hidden_size)
        self.self_attn = Attention(config)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class FusedModel(nn.Module):
    def __init__(self, config: FusedConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(config.hidden_size)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> tuple[Tensor]:
        x = self.embed_tokens(input_ids)
        for layer in self.layers:
            x = layer(x)
        logits = self.lm_head(self.norm(x)).float()
        return (nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()),)


def partition_config(config: FusedConfig) -> dict[str, object]:
    """In the words of DeepSpeed: how each projection is split."""
    sizes = [config.hidden_size, config.kv_size, config.kv_size]
    return {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.qkv_proj\.weight$"], "partition_type": "column", "shape": [sizes, -1]},
            {"patterns": [r".*\.gate_up_proj\.weight$"], "partition_type": "column", "shape": [2, -1]},
            {"patterns": [r".*\.(o_proj|down_proj)\.weight$"], "partition_type": "row"},
            {"patterns": [r"lm_head\.weight$"], "partition_type": "column", "gather_output": True},
        ],
    }
