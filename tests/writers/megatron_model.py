"""A transformer split over tensor-parallel ranks by hand, in Megatron's names, as the layers of a DeepSpeed pipeline.

Every split parameter is cut from a whole one that all ranks draw alike; ``wholes`` keeps those, so that a writer can
look up what each rank got instead of trusting the code that cut.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from torch import Tensor, nn

from .deepspeed_places import distinct
from .deepspeed_specs import MegatronSpec


@dataclass(frozen=True)
class Slices:
    """The tensor-parallel ranks, and which of them this is."""

    rank: int
    count: int
    group: Any

    def widths(self, total: int, unit: int = 1) -> list[int]:
        """How much of ``total`` each rank has: whole units, the first ranks one more if it does not go up."""
        units, rest = divmod(total // unit, self.count)
        return [unit * (units + (rank < rest)) for rank in range(self.count)]

    def cut(self, whole: Tensor, dim: int, parts: list[list[int]]) -> Tensor:
        """This rank's piece of each of the parts (their widths by rank) that follow each other along ``dim``."""
        pieces, start = [], 0
        for widths in parts:
            begin = start + sum(widths[: self.rank])
            pieces.append(whole.narrow(dim, begin, widths[self.rank]))
            start += sum(widths)
        return torch.cat(pieces, dim)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        ctx.group = slices.group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        grad = grads[0].contiguous().clone()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slices: Slices) -> Tensor:
        x = x.contiguous().clone()
        dist.all_reduce(x, group=slices.group)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Split(nn.Module):
    """Something with parameters that are this rank's cut of whole ones."""

    def __init__(self, slices: Slices) -> None:
        super().__init__()
        self.slices = slices
        self.wholes: dict[str, Tensor] = {}

    def add(self, name: str, shape: tuple[int, ...], dim: int, parts: list[list[int]]) -> None:
        self.wholes[name] = distinct(torch.empty(shape), torch.default_generator)
        p = nn.Parameter(self.slices.cut(self.wholes[name], dim, parts).clone())
        p.tensor_model_parallel = True  # type: ignore[attr-defined]  # as Megatron marks it: for the gradient norm
        self.register_parameter(name, p)

    def reduce(self, x: Tensor) -> Tensor:
        out: Tensor = _Sum.apply(x, self.slices)  # type: ignore[no-untyped-call]
        return out

    def spread(self, x: Tensor) -> Tensor:
        out: Tensor = _Copy.apply(x, self.slices)  # type: ignore[no-untyped-call]
        return out


class ColumnParallel(Split):
    weight: Tensor
    bias: Tensor

    def __init__(self, slices: Slices, inputs: int, parts: list[list[int]]) -> None:
        super().__init__(slices)
        outputs = sum(map(sum, parts))
        self.add("weight", (outputs, inputs), 0, parts)
        self.add("bias", (outputs,), 0, parts)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.spread(x), self.weight, self.bias)


class RowParallel(Split):
    weight: Tensor

    def __init__(self, slices: Slices, widths: list[int], outputs: int) -> None:
        super().__init__(slices)
        self.add("weight", (outputs, sum(widths)), 1, [widths])
        self.bias = nn.Parameter(torch.randn(outputs) * 0.2)  # every rank has it, and adds it after the sum

    def forward(self, x: Tensor) -> Tensor:
        return self.reduce(nn.functional.linear(x, self.weight)) + self.bias


class VocabParallel(Split):
    weight: Tensor

    def __init__(self, slices: Slices, vocab: int, hidden: int) -> None:
        super().__init__(slices)
        widths = slices.widths(vocab)
        self.start, self.count, self.vocab = sum(widths[: slices.rank]), widths[slices.rank], vocab
        self.add("weight", (vocab, hidden), 0, [widths])

    def forward(self, ids: Tensor) -> Tensor:
        local = ids - self.start
        here = (local >= 0) & (local < self.count)
        rows = nn.functional.embedding(local.clamp(0, self.count - 1), self.weight)
        return self.reduce(rows * here.unsqueeze(-1))

    def logits(self, x: Tensor) -> Tensor:
        mine = nn.functional.linear(self.spread(x), self.weight)
        return self.reduce(nn.functional.pad(mine, (self.start, self.vocab - self.start - self.count)))


class Embedding(nn.Module):
    def __init__(self, slices: Slices, vocab: int, hidden: int) -> None:
        super().__init__()
        self.word_embeddings = VocabParallel(slices, vocab, hidden)
        self.position_embeddings = nn.Embedding(7, hidden)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.position_embeddings(torch.arange(ids.shape[1]))
        out: Tensor = self.word_embeddings(ids) + positions
        return out


class Attention(Split):
    inv_freq: Tensor

    def __init__(self, slices: Slices, hidden: int, heads: tuple[int, int, int]) -> None:
        super().__init__(slices)
        self.size = hidden // heads[0]
        parts = [slices.widths(h * self.size, self.size * (h // heads[2])) for h in heads]
        self.groups, self.mine = heads[0] // heads[2], [widths[slices.rank] for widths in parts]
        self.query_key_value = ColumnParallel(slices, hidden, parts)
        self.dense = RowParallel(slices, parts[0], hidden)
        self.register_buffer("inv_freq", 1.0 / 10 ** torch.arange(0, 1, 2 / self.size))

    def forward(self, x: Tensor) -> Tensor:
        fused = self.query_key_value(x).split(self.mine, -1)
        q, k, v = (t.unflatten(-1, (-1, self.size)).transpose(1, 2) for t in fused)
        k, v = (t.repeat_interleave(self.groups, dim=1) for t in (k, v))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        done: Tensor = self.dense(out.transpose(1, 2).flatten(2))
        return done


class Mlp(Split):
    """SwiGLU: the rows of gate and up in one parameter.  Each rank scales its part by a vector of its own."""

    def __init__(self, slices: Slices, hidden: int, inner: int) -> None:
        super().__init__(slices)
        widths = slices.widths(inner)
        self.dense_h_to_4h = ColumnParallel(slices, hidden, [widths, widths])
        self.dense_4h_to_h = RowParallel(slices, widths, hidden)
        self.smoother = nn.Parameter(1 + torch.randn(hidden) * 0.2)
        self.smoother.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.dense_h_to_4h(self.spread(x) * self.smoother).chunk(2, -1)
        out: Tensor = self.dense_4h_to_h(nn.functional.silu(gate) * up)
        return out


class Layer(nn.Module):
    def __init__(self, slices: Slices, spec: MegatronSpec, frozen: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(spec.hidden)
        self.self_attention = Attention(slices, spec.hidden, spec.heads)
        self.post_attention_layernorm = nn.LayerNorm(spec.hidden)
        self.mlp = Mlp(slices, spec.hidden, spec.mlp)
        if frozen:
            self.mlp.dense_4h_to_h.weight.requires_grad_(False)
            self.mlp.dense_4h_to_h.bias.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attention(self.input_layernorm(x))
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


def to_ids(ids: Tensor) -> Tensor:
    """A layer without a file."""
    return ids + 0


def logits(module: Embedding, x: Tensor) -> Tensor:
    return module.word_embeddings.logits(x)


def layers(spec: MegatronSpec, slices: Slices) -> list[object]:
    tied = {"tied_weight_attr": "word_embeddings.weight"}
    embedding = (slices, spec.padded_vocab, spec.hidden)
    return [
        to_ids,
        TiedLayerSpec("embed", Embedding, *embedding, **tied),
        *(LayerSpec(Layer, slices, spec, frozen=i == 1) for i in range(spec.layers)),
        LayerSpec(nn.LayerNorm, spec.hidden),
        TiedLayerSpec("embed", Embedding, *embedding, forward_fn=logits, **tied),
    ]


def universal_info(spec: MegatronSpec, slices: Slices) -> dict[str, Any]:
    """What Megatron-DeepSpeed puts into its checkpoints for ``ds_to_universal``."""
    size = spec.hidden // spec.heads[0]
    parts = [h * size for h in spec.heads]
    info: dict[str, Any] = {
        "universal_checkpoint_version": 0.4 if spec.uneven else 0.2,
        "original_vocab_size": spec.vocab,
        "padded_vocab_size": spec.padded_vocab,
        "vocabulary_parameter_patterns": [r"tied_modules.embed.word_embeddings.weight"],
        "pipeline_replicated_parameter_patterns": [
            r"tied_modules.embed.word_embeddings.weight",
            r"tied_modules.embed.position_embeddings.weight",
        ],
        "tp_replicated_parameter_patterns": [
            r"tied_modules.embed.position_embeddings.weight",
            r"\d+.input_layernorm.weight",
            r"\d+.input_layernorm.bias",
            r"\d+.post_attention_layernorm.weight",
            r"\d+.post_attention_layernorm.bias",
            r"\d+.self_attention.dense.bias",
            r"\d+.mlp.dense_4h_to_h.bias",
            r"\d+.weight",
            r"\d+.bias",
        ],
        "parameter_to_average_patterns": [r"\d+.mlp.smoother"],
        "parameter_with_row_parallelism_patterns": [
            r"\d+.mlp.dense_4h_to_h.weight",
            r"\d+.self_attention.dense.weight",
        ],
        "parameter_with_2_sub_params_cat_dim_0": [
            r"\d+.mlp.dense_h_to_4h.weight",
            r"\d+.mlp.dense_h_to_4h.bias",
        ],
    }
    fused = r"\d+.self_attention.query_key_value."
    if spec.uneven:  # the parts' sizes, and what each rank has of them
        shapes: tuple[tuple[Any, ...], ...] = ((tuple(parts), -1), (tuple(parts),))
        widths = [slices.widths(h * size, size * (h // spec.heads[2])) for h in spec.heads]
        info["sub_param_shard_widths"] = {fused + "weight": widths, fused + "bias": widths}
    else:  # a number of equal parts
        shapes = ((len(parts), -1), (len(parts),))
    info["parameter_with_sub_params"] = [
        {"patterns": [fused + name], "shape": shape, "partition_dim": 0}
        for name, shape in zip(("weight", "bias"), shapes, strict=True)
    ]
    return info
