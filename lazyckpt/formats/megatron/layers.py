"""The layers of the whole model on a pipeline stage, whose file counts them from 0. Pure.

Sources: megatron/core/transformer/transformer_layer.py `get_transformer_layer_offset`, transformer_block.py
`get_num_layers_to_build`, pipeline_parallel_layer_layout.py. Whatever the rule, the stages hold the layers in the order
in which the pipeline visits them: chunk 0 of all ranks, then chunk 1 of all ranks, ... So the number of a chunk's first
layer is the number of layers in the chunks before it; the rules matter only where chunks are missing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ...layouts.megatron import place
from ...layouts.pipeline import MOST_LAYERS, stages_in
from ...layouts.tables import pattern

Counts = dict[tuple[int, int], int]  # (pipeline rank, chunk) -> layers


def offsets(pp: int, chunks: int, counts: Mapping[tuple[int, int], int]) -> Counts:
    """Return the first layer of every chunk whose predecessors are all known. ``counts``: layers of each chunk.

    >>> offsets(2, 2, {(0, 0): 1, (1, 0): 2, (0, 1): 1, (1, 1): 2})
    {(0, 0): 0, (1, 0): 1, (0, 1): 3, (1, 1): 4}
    """
    found: Counts = {}
    at = 0
    for chunk in range(chunks):
        for rank in range(pp):
            found[rank, chunk] = at
            if (rank, chunk) not in counts:
                return found
            at += counts[rank, chunk]
    return found


def planned(args: Any, pp: int, chunks: int) -> Counts:
    """Return the number of layers of every chunk as the arguments plan it; {} if they do not determine it.

    >>> from argparse import Namespace
    >>> planned(Namespace(num_layers=7, account_for_loss_in_pipeline_split=True), 2, 2)
    {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 1}
    >>> planned(Namespace(num_layers=5, decoder_first_pipeline_num_layers=2), 2, 1)
    {(0, 0): 2, (1, 0): 3}
    """
    layers = getattr(args, "num_layers", None)
    if type(layers) is not int or not 0 < layers < MOST_LAYERS:
        return {}
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        stages = stages_in(layout)
        table = [stage.count("t") for stage in stages or ()]
        if stages is None or len(table) != pp * chunks or sum(table) != layers:
            return {}
        return {(r, c): table[c * pp + r] for r in range(pp) for c in range(chunks)}
    first = _number(args, "decoder_first_pipeline_num_layers")
    last = _number(args, "decoder_last_pipeline_num_layers")
    if first is not None or last is not None:
        middle = pp - (first is not None) - (last is not None)
        share = (layers - (first or 0) - (last or 0)) // middle if middle else 0
        per_rank = [share] * pp
        if first is not None:
            per_rank[0] = first
        if last is not None:
            per_rank[-1] = last
        found = {(r, c): n // chunks for r, n in enumerate(per_rank) for c in range(chunks)}
    else:
        embedding = bool(getattr(args, "account_for_embedding_in_pipeline_split", False))
        loss = bool(getattr(args, "account_for_loss_in_pipeline_split", False))
        each = (layers + embedding + loss) // pp // chunks
        found = {(r, c): each for r in range(pp) for c in range(chunks)}
        found[0, 0] -= embedding
        found[pp - 1, chunks - 1] -= loss
    return found if sum(found.values()) == layers and min(found.values()) >= 0 else {}


def _number(args: Any, name: str) -> int | None:
    value = getattr(args, name, None)
    return value if type(value) is int and 0 <= value < MOST_LAYERS else None


def contiguous(numbers: Sequence[int]) -> bool:
    """Return whether a chunk's layers are 0, 1, 2, ..."""
    return sorted(numbers) == list(range(len(numbers)))


# -- The order of the parameters in megatron-core's models, and their pipeline stages. Pure.

_ORDER = (
    *("embedding", "word_embeddings", "position_embeddings", "tokentype_embeddings"),
    *("decoder", "layers"),
    *("input_layernorm", "self_attention", "pre_cross_attn_layernorm", "cross_attention", "pre_mlp_layernorm", "mlp"),
    *("core_attention", "linear_proj", "linear_qkv", "linear_q", "linear_kv", "linear_q_proj", "linear_q_down_proj"),
    *("linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj", "q_layernorm", "k_layernorm", "kv_layernorm"),
    *("router", "experts", "shared_experts", "local_experts", "gate_weight", "linear_fc1", "linear_fc2"),
    *("mixer", "dt_bias", "A_log", "D", "in_proj", "conv1d", "norm", "out_proj"),
    *("softmax_offset", "layer_norm_weight", "layer_norm_bias", "weight", "bias"),
    *("enorm", "hnorm", "eh_proj", "transformer_layer", "mtp_model_layer"),
    *("final_layernorm", "final_norm", "mtp", "output_layer"),
)
_RANK = {name: n for n, name in enumerate(_ORDER)}

Key = tuple[int, ...]
# parameter orders of the modules that save experts under the same names: experts one after the other (SequentialMLP);
# all first matrices, then all second ones (TEGroupedMLP), with each expert's bias next to its matrix or after all of
# them
EXPERTS = ("{e}.{fc}.{leaf}", "{fc}.{e}.{leaf}", "{fc}.{leaf}.{e}")


def sort_key(name: str, experts: str = EXPERTS[0], unfused: bool = False) -> Key | None:
    """Return a key that sorts names in the model's order; None if the name's place is not known. ``experts``: one of
    `EXPERTS`; ``unfused``: whether the norm with the name of a fused one precedes the attention (see stacks.py).

    >>> names = ["linear_qkv.weight", "linear_proj.weight", "linear_qkv.layer_norm_weight"]
    >>> sorted(names, key=sort_key)
    ['linear_proj.weight', 'linear_qkv.layer_norm_weight', 'linear_qkv.weight']
    """
    name = name.replace(".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm.")  # the same place, if there is such a fc1
    if unfused:
        name = name.replace(".self_attention.linear_qkv.layer_norm_", ".input_layernorm.")
    one = pattern("megatron.expert_matrix").fullmatch(name)
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


def decoder_layer(name: str) -> int | None:
    """Return the number of the decoder layer that a parameter belongs to; None for other parameters.

    >>> decoder_layer("decoder.layers.12.mlp.linear_fc2.weight"), decoder_layer("mtp.layers.0.eh_proj.weight")
    (12, None)
    """
    at = place(name)
    return at.layer if at.head == "decoder.layers." else None


def staged(names: Iterable[str], starts: Mapping[tuple[int, int], int], counts: Counts) -> dict[str, tuple[int, int]]:
    """Return the (pipeline rank, chunk) of every parameter. ``starts``, ``counts``: the first layer and the number of
    layers of each chunk. Raises ValueError if a parameter's chunk is not known."""
    first = (0, 0)
    last = max(counts, key=lambda at: (at[1], at[0]))
    stages = {n: at for at, count in counts.items() for n in range(starts[at], starts[at] + count)}
    found: dict[str, tuple[int, int]] = {}
    for name in names:
        layer = decoder_layer(name)
        if layer is not None and layer in stages:
            found[name] = stages[layer]
        elif name.startswith("embedding."):
            found[name] = first
        elif name.startswith(("decoder.final_layernorm.", "decoder.final_norm.", "mtp.", "output_layer.")):
            found[name] = last
        else:
            raise ValueError(f"the pipeline stage of {name!r} is not known")
    return found
