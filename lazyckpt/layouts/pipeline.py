"""The layers of each pipeline stage and model chunk: layout strings of megatron-core, and numbers of layers. No I/O.

Source: megatron/core/transformer/pipeline_parallel_layer_layout.py `PipelineParallelLayerLayout` (strings such as
``Et|(tt|)*2,mL``: stages in the order in which the pipeline visits them, chunk 0 of all ranks first; E embedding, t
decoder layer, m layers that predict further tokens, L loss). Wherever a string has E and L, the model has its embedding
on the first stage and its output layer on the last one (models/gpt/gpt_model.py `pre_process`, `post_process`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from ..core.placement import Pipeline
from ..errors import MeshError

MOST_LAYERS = 100_000
_LONGEST = 10_000  # characters of a string
_REPEATED = (r"\(([^)]+)\)\*(\d{1,4})", r"(.)\*(\d{1,4})")

PipelineLayout = str | Sequence[int]


def pipeline_of(pp: int, vpp: int = 1, layout: PipelineLayout | None = None) -> Pipeline:
    """Return the distribution of layers over ``pp`` stages with ``vpp`` model chunks each.

    ``layout`` is a string of megatron-core, or the number of layers of every chunk in the order in which the pipeline
    visits them; its length then decides how many chunks a stage has. None: all chunks have the same number of layers.

    >>> pipeline_of(2, layout="Et|(tt|)*2,mL")
    Pipeline(stages=2, chunks=2, layers=(1, 2, 2, 0), further=3)
    >>> pipeline_of(2, layout=[2, 3])
    Pipeline(stages=2, chunks=1, layers=(2, 3), further=None)

    Raises MeshError for a layout that is not understood or does not fit the degrees.
    """
    if type(vpp) is not int or vpp < 1:
        raise MeshError(f"vpp={vpp!r}: the number of model chunks of a pipeline stage is a number from 1 on")
    further, counts = None, None
    if layout is not None:
        if pp == 1:
            raise MeshError(f"layout={layout!r:.80}: a layout distributes layers over several stages; give pp=, too")
        counts, further = _of_string(layout) if isinstance(layout, str) else (_counts(layout), None)
        if len(counts) % pp:
            raise MeshError(
                f"layout={layout!r:.80}: it has {len(counts)} stages, no multiple of pp={pp}. It lists chunk 0 of all "
                "pipeline stages, then chunk 1 of all, and so on"
            )
        chunks = len(counts) // pp
        if vpp not in (1, chunks):
            raise MeshError(f"layout={layout!r:.80}: it gives each of {pp} stages {chunks} chunks, not vpp={vpp}")
        vpp = chunks
    if vpp > 1 and pp == 1:
        raise MeshError(f"vpp={vpp}: only a pipeline of several stages has several model chunks on each; give pp=, too")
    if further is not None and 0 <= further < pp * (vpp - 1):
        raise MeshError(f"layout={layout!r:.80}: layers m are in the last chunk of a stage, not in an earlier one")
    return Pipeline(pp, vpp, counts, further)


def _of_string(layout: str) -> tuple[tuple[int, ...], int]:
    stages = stages_in(layout)
    if stages is None:
        raise MeshError(
            f"layout={layout!r:.80}: it is no layout of megatron-core, stages of E (embedding), t (layer), m (further "
            "tokens) and L (loss) with | between them, such as 'Ett|(tt|)*6,tL'"
        )
    flat = "".join(stages)
    if not re.fullmatch("Et*m*L", flat):
        raise MeshError(
            f"layout={layout!r:.80}: megatron-core wants one E first, all t, then all m, and one L last; it has "
            f"{flat if len(flat) < 80 else flat[:80] + '...'}"
        )
    further = [at for at, stage in enumerate(stages) if "m" in stage]
    if len(further) > 1:
        raise MeshError(f"layout={layout!r:.80}: all layers m are in one stage, here they are in {len(further)}")
    return tuple(stage.count("t") for stage in stages), (further or [-1])[0]


def _counts(layout: Sequence[int]) -> tuple[int, ...]:
    if not len(layout) or any(type(n) is not int or not 0 <= n < MOST_LAYERS for n in layout):
        raise MeshError(
            f"layout={list(layout)!r:.80}: a list has the number of layers of every stage, such as [3, 4, 4, 3]"
        )
    return tuple(layout)


def layout_of(pipeline: Pipeline, further: int) -> str | None:
    """Return megatron-core's string for a distribution of layers, with ``further`` layers that predict further tokens;
    None if all chunks have the same number.

    >>> layout_of(pipeline_of(2, layout=[1, 2, 2, 0]), further=1)
    'Et|tt|tt|mL'
    """
    if pipeline.layers is None:
        return None
    stages = ["t" * count for count in pipeline.layers]
    stages[-1 if pipeline.further is None else pipeline.further] += "m" * further
    return f"E{'|'.join(stages)}L"


def ends_of(pipeline: Pipeline) -> tuple[int | None, int | None] | None:
    """Return the numbers of layers of the first and of the last stage, as megatron-core's arguments give them beside
    stages that are all the same; None if they cannot describe the distribution.

    >>> ends_of(pipeline_of(4, layout=[3, 4, 4, 2])), ends_of(pipeline_of(2, layout=[2, 3]))
    ((3, 2), (2, None))
    >>> ends_of(pipeline_of(4, layout=[3, 4, 5, 2])), ends_of(pipeline_of(3, layout=[4, 4, 2]))
    (None, (None, 2))
    """
    counts = pipeline.layers
    if counts is None or pipeline.chunks > 1 or pipeline.further is not None:
        return None
    if len(counts) < 3:
        return counts[0], None
    middle = set(counts[1:-1])
    if len(middle) > 1:
        return None
    each = middle.pop()
    return (counts[0] if counts[0] != each else None), (counts[-1] if counts[-1] != each else None)


def stages_in(layout: Any) -> list[str] | None:
    """Return the letters of each stage (E, t, m, L) in a layout: a string as `parse_str_to_list` reads it, a list of
    lists, or the record of a layout object (its ``input_data``). None for anything else.

    >>> stages_in("Et|(tt|)*2,mL"), stages_in([["embedding", "decoder"], ["decoder", "loss"]])
    (['Et', 'tt', 'tt', 'mL'], ['Et', 'tL'])
    """
    if not isinstance(layout, str | list):
        layout = getattr(layout, "input_data", None)
    if isinstance(layout, list):
        if not all(isinstance(row, list) and all(isinstance(item, str) for item in row) for row in layout):
            return None
        rows = [[_LETTERS.get(item.strip().lower(), "?") for item in row] for row in layout]
        return None if any("?" in row for row in rows) else ["".join(row) for row in rows]
    if not isinstance(layout, str) or len(layout) > _LONGEST:
        return None
    text = layout.replace(",", "")
    for repeated in _REPEATED:
        if sum(len(m[1]) * int(m[2]) for m in re.finditer(repeated, text)) > MOST_LAYERS:
            return None
        text = re.sub(repeated, lambda m: m[1] * int(m[2]), text)
    return text.split("|") if set(text) <= set("EtmL|") else None


# names of megatron/core/transformer/enums.py `LayerType` (as in lists) -> letters
_LETTERS = {"embedding": "E", "decoder": "t", "mtp": "m", "loss": "L", "encoder": "e", "t": "t"}
