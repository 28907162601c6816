"""Which layers of the whole model a pipeline stage holds: its file counts them from 0. Pure.

Sources: megatron/core/transformer/transformer_layer.py `get_transformer_layer_offset`, transformer_block.py
`get_num_layers_to_build`, pipeline_parallel_layer_layout.py. Whatever the rule, the stages hold the layers in the order
in which the pipeline visits them: chunk 0 of all ranks, then chunk 1 of all ranks, ... So a chunk's first layer is as
many layers in as the chunks before it have; the rules matter only for what is not there to be counted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

Counts = dict[tuple[int, int], int]  # (pipeline rank, chunk) -> layers

_MOST = 100_000


def offsets(pp: int, chunks: int, counts: Mapping[tuple[int, int], int]) -> Counts:
    """The first layer of every chunk whose predecessors are all known.

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
    """How many layers every chunk has as the arguments plan it; {} if they do not say.

    >>> from argparse import Namespace
    >>> planned(Namespace(num_layers=7, account_for_loss_in_pipeline_split=True), 2, 2)
    {(0, 0): 2, (0, 1): 2, (1, 0): 2, (1, 1): 1}
    >>> planned(Namespace(num_layers=5, decoder_first_pipeline_num_layers=2), 2, 1)
    {(0, 0): 2, (1, 0): 3}
    """
    layers = getattr(args, "num_layers", None)
    if type(layers) is not int or not 0 < layers < _MOST:
        return {}
    layout = getattr(args, "pipeline_model_parallel_layout", None)
    if layout is not None:
        table = _layout(layout)
        if table is None or len(table) != pp * chunks or sum(table) != layers:
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
    return value if type(value) is int and 0 <= value < _MOST else None


def _layout(layout: Any) -> list[int] | None:
    """The decoder layers of each stage in a layout as `parse_str_to_list` reads it; also in its record's input.

    >>> _layout("Et|(tt|)*2,mL")
    [1, 2, 2, 0]
    """
    if not isinstance(layout, str | list):
        layout = getattr(layout, "input_data", None)
    if isinstance(layout, list):
        rows = [row for row in layout if isinstance(row, list)]
        if len(rows) < len(layout) or not all(isinstance(item, str) for row in rows for item in row):
            return None
        return [sum(item.strip().lower() in ("decoder", "t") for item in row) for row in rows]
    if not isinstance(layout, str) or len(layout) > 10_000:
        return None
    text = layout.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})"):
        size = sum(len(m[1]) * int(m[2]) for m in re.finditer(pattern, text))
        if size > _MOST:
            return None
        text = re.sub(pattern, lambda m: m[1] * int(m[2]), text)
    return [stage.count("t") for stage in text.split("|")] if set(text) <= set("EtmL|") else None


def contiguous(numbers: Sequence[int]) -> bool:
    """Whether a chunk's layers are 0, 1, 2, ..."""
    return sorted(numbers) == list(range(len(numbers)))
