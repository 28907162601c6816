"""A tiny pipeline: an embedding tied over the stages that holds more than what is tied, odd blocks, and functions."""

from __future__ import annotations

import torch
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn


class Embedding(nn.Module):
    """Only ``word_embeddings.weight`` is tied. Each stage trains, and saves, a ``position`` of its own."""

    def __init__(self, vocab: int, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(vocab, hidden)
        self.position = nn.Parameter(torch.randn(7, hidden))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point():  # the same module once more, as the last layer
            return logits(self, x)
        out: Tensor = self.word_embeddings(x) + self.position[: x.shape[1]]
        return out


class Block(nn.Module):
    seen: Tensor
    scratch: Tensor

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.rand(1))
        self.ln = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 2 * hidden - 5)
        self.down = nn.Linear(2 * hidden - 5, hidden, bias=False)
        self.froz = nn.Parameter(torch.randn(3, hidden), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen += (x > 0).sum()  # other data, other counts: it differs by data-parallel rank
        out: Tensor = self.down(torch.tanh(self.up(self.ln(x))))
        return x + self.gamma * out + self.froz.mean() * self.scratch[0].to(x.dtype)


class Final(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.gain = nn.Parameter(torch.rand(1))  # DeepSpeed hangs if a stage has fewer parameter groups than another

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(x)
        return out * (1 + self.gain)


class Scale(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.rand(hidden))

    def forward(self, x: Tensor) -> Tensor:
        return scaled(self, x)


def scaled(module: nn.Module, x: Tensor) -> Tensor:
    return x * module.get_parameter("weight")


def shift(ids: Tensor) -> Tensor:
    """A layer without a file."""
    return ids + 1


def halve(x: Tensor) -> Tensor:
    return x * 0.5


def logits(module: nn.Module, x: Tensor) -> Tensor:
    """Uses the untied position too, so that its copy here gets a gradient of its own."""
    position: Tensor = module.get_parameter("position")
    words: Tensor = module.get_parameter("word_embeddings.weight")
    return (x @ words.T) * (1 + position.square().mean())


def loss(out: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(out.float().flatten(0, 1), labels.flatten())


def layers(vocab: int, hidden: int, head_file: bool, more_ties: bool = False) -> list[object]:
    """Eight layers; the last re-uses the embedding, with a file of its own if wanted. With more ties there are two more
    shared modules of one shape, the first of which is used again without a file, the other with one."""
    tied = "word_embeddings.weight"
    head = {} if head_file else {"forward_fn": logits}
    if more_ties:
        return [
            shift,
            TiedLayerSpec("embed", Embedding, vocab + 1, hidden, tied_weight_attr=tied),
            TiedLayerSpec("zoom", Scale, hidden),
            LayerSpec(Block, hidden),
            TiedLayerSpec("again", Scale, hidden),
            LayerSpec(Scale, hidden),
            LayerSpec(Block, hidden),
            TiedLayerSpec("again", Scale, hidden),
            TiedLayerSpec("zoom", Scale, hidden, forward_fn=scaled),
            LayerSpec(Final, hidden),
            TiedLayerSpec("embed", Embedding, vocab + 1, hidden, tied_weight_attr=tied, **head),
        ]
    return [
        shift,
        TiedLayerSpec("embed", Embedding, vocab + 1, hidden, tied_weight_attr=tied),
        LayerSpec(Block, hidden),
        LayerSpec(Block, hidden),
        halve,
        LayerSpec(Block, hidden),
        LayerSpec(Final, hidden),
        TiedLayerSpec("embed", Embedding, vocab + 1, hidden, tied_weight_attr=tied, **head),
    ]
