"""In which order megatron-core's models have their parameters, and on which pipeline stage. Pure.

Sources, in megatron/core: models/gpt/gpt_model.py, models/common/embeddings/language_model_embedding.py,
transformer/transformer_block.py, transformer_layer.py, attention.py (`Attention` makes linear_proj before
`SelfAttention` makes the rest), multi_latent_attention.py, mlp.py, moe/moe_layer.py, moe/shared_experts.py. (In a
module its own parameters come before those of its modules: torch's `Module.named_parameters`.)
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from .layers import Counts

_ORDER = (
    *("embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings"),
    *("decoder", "layers"),
    *("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm", "mlp"),
    *("core_attention", "linear_proj", "linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "linear_q_down_proj"),
    *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *("router", "experts", "shared_experts", "local_experts", "gate_weight", "linear_fc1", "linear_fc2"),
    *("softmax_offset", "layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    *("final_layernorm", "output_layer"),
)
_RANK = {name: n for n, name in enumerate(_ORDER)}
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")
_ONE_EXPERT = re.compile(r"(.*\.experts)\.local_experts\.(\d+)\.(linear_fc[12])\.(weight|bias)")

Key = tuple[int, ...]
# the modules that may have made the same names: experts one after the other (SequentialMLP); all first matrices, then
# all second ones (TEGroupedMLP), with biases beside or behind them
EXPERTS = ("{e}.{fc}.{leaf}", "{fc}.{e}.{leaf}", "{fc}.{leaf}.{e}")


def sort_key(name: str, experts: str = EXPERTS[0], unfused: bool = False) -> Key | None:
    """What sorts names as the model does; None if the place of one is not known. ``unfused``: the norm that is named as
    if it were one with the next matrix is before the attention (stacks.py).

    >>> names = ["linear_qkv.weight", "linear_proj.weight", "linear_qkv.layer_norm_weight"]
    >>> sorted(names, key=sort_key)
    ['linear_proj.weight', 'linear_qkv.layer_norm_weight', 'linear_qkv.weight']
    """
    name = name.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")  # the same place, if there is such a fc1
    if unfused:
        name = name.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
    one = _ONE_EXPERT.fullmatch(name)
    if one is not None:
        head, e, fc, leaf = one.groups()
        name = f"{head}.{experts.format(e=e, fc=fc, leaf=leaf)}"
    found = []
    for part in name.split("."):
        rank = int(part[:9]) if part.isdecimal() else _RANK.get(part)
        if rank is None:
            return None
        found.append(rank)
    return tuple(found)


def staged(names: Iterable[str], starts: Mapping[tuple[int, int], int], counts: Counts) -> dict[str, tuple[int, int]]:
    """The (pipeline rank, chunk) of every parameter. ``starts``, ``counts``: the first layer and the number of layers
    of each. Raises ValueError if a parameter's is not known."""
    first = (0, 0)
    last = max(counts, key=lambda at: (at[1], at[0]))
    stages = {n: at for at, count in counts.items() for n in range(starts[at], starts[at] + count)}
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        layer = LAYER.match(name)
        if layer is not None and int(layer[1][:9]) in stages:
            found[name] = stages[int(layer[1][:9])]
        elif name.startswith("embedding."):
            found[name] = first
        elif name.startswith(("decoder.final_layernorm.", "output_layer.")):
            found[name] = last
        else:
            raise ValueError(f"on which pipeline stage {name!r} is is not known")
    return found
