"""A tiny model that holds, on purpose, everything that makes ZeRO checkpoints hard to read."""

from __future__ import annotations

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        odd = 2 * hidden - 5
        self.gamma = nn.Parameter(torch.rand(1))  # fewer elements than ranks
        self.ln = nn.LayerNorm(hidden)
        self.fc1 = nn.Linear(hidden, odd)
        self.fc2 = nn.Linear(odd, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.fc2(torch.tanh(self.fc1(self.ln(x))))
        return x + self.gamma * out


class NastyModel(nn.Module):
    """Odd sizes, ties, frozen and unused parameters, 3-d and (if wanted) empty ones, buffers that differ by rank."""

    running: torch.Tensor
    counter: torch.Tensor
    mask: torch.Tensor
    scratch: torch.Tensor

    def __init__(self, hidden: int, layers: int, vocab: int, with_empty: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(1))
        self.mix = nn.Parameter(torch.randn(3, 1, 5))
        self.pos = nn.Parameter(torch.randn(7, hidden), requires_grad=False)
        self.anchor = nn.Parameter(torch.randn(13, 11), requires_grad=False)  # no dp from 2 to 10 divides 143
        if with_empty:  # DeepSpeed 0.19 keeps zero-element parameters in ZeRO 1 and 2; ZeRO-3 crashes on them
            self.empty = nn.Parameter(torch.empty(0, hidden))
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden) for _ in range(layers))
        self.adapter = nn.Linear(hidden, hidden)
        self.adapter.weight.requires_grad_(False)
        self.conv = nn.Conv1d(hidden, 3, 3, padding=1)
        self.unused = nn.Linear(5, 3)  # trainable, but never in a graph
        self.norm = nn.LayerNorm(hidden)
        self.norm_alias = nn.LayerNorm(hidden)
        self.norm_alias.weight = self.norm.weight  # ... with a bias of its own
        self.last = self.blocks[0]  # the very same module once more
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.lm_head.weight = self.embed.weight
        self.register_buffer("running", torch.zeros(hidden))
        self.register_buffer("counter", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.zeros(9, dtype=torch.bool))
        self.register_buffer("scratch", torch.ones(4), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x: torch.Tensor = self.embed(ids) + self.pos[: ids.shape[1]]
        with torch.no_grad():  # every rank sees its own data, so these end up different by rank
            self.running.lerp_(x.float().mean((0, 1)).to(self.running.dtype), 0.5)
            self.counter += ids.sum()
            self.mask = (ids.flatten()[:9] % 2).bool()
        for block in self.blocks:
            x = block(x)
        x = self.last(x)
        x = x + self.adapter(x) * self.scale * self.scratch.sum().to(x.dtype)
        # Squares, and a factor: every element must get a gradient of its own, or misplaced states would look right.
        y: torch.Tensor = self.conv(x.transpose(1, 2)).square().mean() + self.mix.square().mean() + self.anchor.mean()
        logits: torch.Tensor = self.lm_head(self.norm(x) + self.norm_alias(x))
        return logits * (1 + y)

    def param_groups(self) -> list[dict[str, object]]:
        """Decay (with a frozen and, if any, the empty parameter in it), no decay, and single elements."""
        seen = dict(self.named_parameters())
        skip = {"adapter.weight", "anchor"}  # frozen and, unlike "pos", not even given to the optimizer
        params = [p for name, p in seen.items() if name not in skip]
        return [
            {"params": [p for p in params if p.ndim >= 2], "weight_decay": 0.1},
            {"params": [p for p in params if p.ndim < 2 and p.numel() > 1], "weight_decay": 0.0},
            {"params": [p for p in params if p.numel() == 1], "weight_decay": 0.0, "lr": 3e-3},
        ]
