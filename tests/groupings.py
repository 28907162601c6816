"""Models, and the ways in which people hand parameters to an optimizer, for tests of names that follow from order.

No model is trained: each parameter's moments are filled with a number of its own, so that a wrong name shows.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Named = list[tuple[str, nn.Parameter]]
Groups = list[Named]


class Block(nn.Module):
    """A layer of Llama's names, without biases; ``wide``: the width of its MLP."""

    def __init__(self, width: int, wide: int) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({k: nn.Linear(width, width, bias=False) for k in ("q", "k", "v", "o")})
        self.mlp = nn.ModuleDict({"gate": nn.Linear(width, wide, bias=False), "up": nn.Linear(width, wide, bias=False)})
        self.mlp["down"] = nn.Linear(wide, width, bias=False)
        self.input_norm = nn.RMSNorm(width)
        self.post_norm = nn.RMSNorm(width)


class GptBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(width, 3 * width), "c_proj": nn.Linear(width, width)})
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 4 * width), "c_proj": nn.Linear(4 * width, width)})


class Stack(nn.Module):
    """An embedding (``rows`` of them, if any), layers, a norm and a head."""

    def __init__(self, layers: list[nn.Module], width: int, rows: int = 0, out: int = 0, bias: bool = False) -> None:
        super().__init__()
        if rows:
            self.embed = nn.Embedding(rows, width)
        self.layers = nn.ModuleList(layers)
        if out:
            self.norm = nn.LayerNorm(width, bias=bias)
            self.head = nn.Linear(width, out, bias=bias)


class MinGpt(nn.Module):
    """karpathy/minGPT: the mask of attention is a float buffer."""

    def __init__(self, count: int, width: int = 4) -> None:
        super().__init__()
        blocks: list[nn.Module] = [GptBlock(width) for _ in range(count)]
        for block in blocks:
            block.attn.register_buffer("bias", torch.tril(torch.ones(3, 3)).view(1, 1, 3, 3))  # type: ignore[union-attr]
        parts = {"wte": nn.Embedding(11, width), "wpe": nn.Embedding(9, width), "h": nn.ModuleList(blocks)}
        self.transformer = nn.ModuleDict({**parts, "ln_f": nn.LayerNorm(width)})
        self.lm_head = nn.Linear(width, 11, bias=False)


def _yolo() -> nn.Module:
    """Convolutions with norms, the widths telling."""
    widths = [3, 4, 6, 5, 7, 7]
    parts: list[nn.Module] = []
    for n, (a, b) in enumerate(itertools.pairwise(widths)):
        parts.append(nn.Sequential(nn.Conv2d(a, b, 1, bias=n == 4), nn.BatchNorm2d(b)))
    return nn.ModuleDict({"model": nn.Sequential(*parts)})


def _tied() -> nn.Module:
    model = Stack([Block(4, 6) for _ in range(12)], 4, 9, 9)
    model.head.weight = model.embed.weight
    return model


def _frozen() -> nn.Module:
    model = Stack([Block(4, 6) for _ in range(11)], 4, 9, 5)
    model.embed.requires_grad_(False)
    for parameter in model.layers[3].parameters():
        parameter.requires_grad_(False)
    return model


def _mlp() -> nn.Module:
    widths = [5, 7, 6, 8, 3]
    return nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))


def _equal(count: int, bias: bool = True) -> list[nn.Module]:
    return [nn.Linear(4, 4, bias=bias) for _ in range(count)]


MODELS: dict[str, Callable[[], nn.Module]] = {
    "12 equal layers": lambda: Stack(_equal(12), 4),
    "3 equal layers": lambda: Stack(_equal(3), 4),
    "12 equal layers without biases": lambda: Stack(_equal(12, bias=False), 4),
    "equal layers and an equal head": lambda: Stack(_equal(12), 4, 4, 4, bias=True),
    "embedding, 12 equal layers, head": lambda: Stack(_equal(12), 4, 9, 5, bias=True),
    "embedding, 12 layers without biases, head": lambda: Stack(_equal(12, bias=False), 4, 9, 9),
    "10 equal layers of Llama": lambda: Stack([Block(4, 4) for _ in range(10)], 4, 9, 9),
    "12 layers of Llama": lambda: Stack([Block(4, 6) for _ in range(12)], 4, 9, 9),
    "2 layers of Llama": lambda: Stack([Block(4, 6) for _ in range(2)], 4, 9, 9),
    "minGPT, 12 layers": lambda: MinGpt(12),
    "minGPT, 2 layers": lambda: MinGpt(2),
    "YOLO": _yolo,
    "a tied head": _tied,
    "frozen parts": _frozen,
    "every shape another": _mlp,
}


def _trained(model: nn.Module) -> Named:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def _decaying(listed: Named) -> Groups:
    return [[x for x in listed if x[1].ndim > 1], [x for x in listed if x[1].ndim <= 1]]


def _min_gpt(model: nn.Module) -> Groups:
    """mingpt/model.py `configure_optimizers`: sorted(list(decay)), sorted(list(no_decay)); embeddings do not decay."""
    embeddings = {f"{n}.weight" for n, m in model.named_modules() if isinstance(m, nn.Embedding)}
    by_name = sorted(_trained(model))
    decay = [x for x in by_name if x[1].ndim > 1 and x[0] not in embeddings]
    chosen = {n for n, _ in decay}
    return [decay, [x for x in by_name if x[0] not in chosen]]


def _of_yolo(model: nn.Module, order: tuple[int, int, int]) -> Groups:
    """ultralytics `build_optimizer`, yolov5 `smart_optimizer`: biases, weights of norms, other weights."""
    kinds: Groups = [[], [], []]
    norms = {id(p) for m in model.modules() if "Norm" in type(m).__name__ for p in m.parameters(recurse=False)}
    for name, p in _trained(model):
        kinds[0 if name.endswith("bias") else 1 if id(p) in norms else 2].append((name, p))
    return [kinds[n] for n in order]


def _head_first(model: nn.Module) -> Groups:
    listed = _trained(model)
    return [[x for x in listed if "head" in x[0]], [x for x in listed if "head" not in x[0]]]


def _layer_wise(model: nn.Module) -> Groups:
    """A group for each layer, and one for what stands before and behind: layer-wise learning rates."""
    parts: dict[str, Named] = {}
    for name, p in _trained(model):
        found = re.search(r"^(.*?\.)?\d+(?=\.)", name)
        parts.setdefault(found[0] if found else name.partition(".")[0], []).append((name, p))
    return list(parts.values())


def _by_shape(model: nn.Module) -> Groups:
    parts: dict[torch.Size, Named] = {}
    for name, p in _trained(model):
        parts.setdefault(p.shape, []).append((name, p))
    return list(parts.values())


def _natural(item: tuple[str, nn.Parameter]) -> list[tuple[int, str | int]]:
    """layers.2 comes before layers.10."""
    return [(1, int(part)) if part.isdigit() else (0, part) for part in re.split(r"(\d+)", item[0])]


def _joined(groups: Groups) -> Groups:
    return [[x for group in groups for x in group]]


def _shuffled(model: nn.Module) -> Groups:
    listed = _trained(model)
    order = torch.randperm(len(listed), generator=torch.Generator().manual_seed(len(listed))).tolist()
    return [[listed[n] for n in order]]


GROUPINGS: dict[str, Callable[[nn.Module], Groups]] = {
    "all": lambda m: [_trained(m)],
    "decay": lambda m: _decaying(_trained(m)),
    "no decay first": lambda m: _decaying(_trained(m))[::-1],
    "sorted": lambda m: [sorted(_trained(m))],
    "sorted, decay": lambda m: _decaying(sorted(_trained(m))),
    "sorted, no decay first": lambda m: _decaying(sorted(_trained(m)))[::-1],
    "sorted by value": lambda m: [sorted(_trained(m), key=_natural)],
    "sorted by value, decay": lambda m: _decaying(sorted(_trained(m), key=_natural)),
    "minGPT": _min_gpt,
    "reversed": lambda m: [_trained(m)[::-1]],
    "reversed, decay": lambda m: _decaying(_trained(m)[::-1]),
    "sorted and reversed, decay": lambda m: _decaying(sorted(_trained(m))[::-1]),
    "head first": _head_first,
    "head first, one group": lambda m: _joined(_head_first(m)),
    "head first, decay": lambda m: _decaying(_joined(_head_first(m))[0]),
    "layer-wise": _layer_wise,
    "layer-wise, last first": lambda m: _layer_wise(m)[::-1],
    "layer-wise, first last": lambda m: _layer_wise(m)[1:] + _layer_wise(m)[:1],
    "one by one": lambda m: [[x] for x in _trained(m)],
    "shapes": _by_shape,
    "by shape": lambda m: _joined(_by_shape(m)),
    "by size": lambda m: [sorted(_trained(m), key=lambda x: x[1].numel())],
    "by size, largest first": lambda m: [sorted(_trained(m), key=lambda x: x[1].numel(), reverse=True)],
    "by size, turned round": lambda m: [sorted(_trained(m), key=lambda x: x[1].numel())[::-1]],
    "by size and name": lambda m: [sorted(_trained(m), key=lambda x: (x[1].numel(), x[0]))],
    "by dimensions, minGPT": lambda m: [sorted(g, key=lambda x: -x[1].ndim) for g in _min_gpt(m)],
    "by dimensions": lambda m: [sorted(_trained(m), key=lambda x: x[1].ndim)],
    "Muon": lambda m: [sorted(g, key=lambda x: x[1].shape, reverse=True) for g in _decaying(_trained(m))],
    "YOLO": lambda m: _of_yolo(m, (0, 2, 1)),
    "yolov5": lambda m: _of_yolo(m, (1, 2, 0)),
    "YOLO, biases last": lambda m: _of_yolo(m, (2, 1, 0)),
    "shuffled": _shuffled,
    "shuffled, decay": lambda m: _decaying(_shuffled(m)[0]),
}


def optimizer_of(groups: Groups, dtype: torch.dtype = torch.float32) -> tuple[torch.optim.Optimizer, dict[str, float]]:
    """AdamW with the groups (the second and further ones without weight decay), and what each one's exp_avg holds."""
    full = [group for group in groups if group]
    listed: list[dict[str, Any]] = [
        {"params": [p for _, p in group], "weight_decay": 0.0 if n else 0.1} for n, group in enumerate(full)
    ]
    optimizer = torch.optim.AdamW(listed, lr=0.1)
    truth = {}
    for n, (name, p) in enumerate(x for group in full for x in group):
        truth[name] = float(n + 1)
        optimizer.state[p] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.full_like(p, n + 1, dtype=dtype),
            "exp_avg_sq": torch.full_like(p, n + 1.5, dtype=dtype),
        }
    return optimizer, truth


def wrong_names(table: Any, truth: dict[str, float]) -> tuple[list[str], int]:
    """Names that read another's moments, and how many have their name. ``table``: exp_avg of a view."""
    wrong, named = [], 0
    for name in table:
        value: Tensor = table[name][...]
        assert value.numel() == 0 or (value == value.flatten()[0]).all(), "no tensor is put together of several"
        if name in truth:
            named += 1
            if value.numel() and value.flatten()[0].item() != truth[name]:
                wrong.append(name)
        elif not name.rpartition(".")[2].isdecimal():
            wrong.append(name)  # a name that the optimizer has not
    return wrong, named
