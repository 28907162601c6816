"""Names that no file here has any more, as far as the other ranks' let them be guessed, and why each is lost."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .degrees import number
from .gather import Gathered
from .layers import offsets, planned
from .names import place
from .ranks import Grid

_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.(?:weight|bias)))(\d+)(.*)")


def lost_names(grid: Grid, g: Gathered) -> dict[str, str]:
    """The names of stages that have no file at all, and of experts whose ranks have none -> why."""
    weights = g.states.get("weights", {})
    found = [*_of_stages(grid, list(weights)), *_of_experts(grid, list(weights))]
    return {name: f"{name!r}: {why}" for name, why in found if name not in weights}


def _of_stages(grid: Grid, names: list[str]) -> Iterator[tuple[str, str]]:
    d = grid.degrees
    layers: dict[str, set[str]] = {}
    for name in names:
        at = place(name)
        if at.layer is not None:
            layers.setdefault(f"{at.head}{{}}", set()).add(at.tail)
    counts = planned(grid.args, d.pp, d.chunks) if len(layers) == 1 else {}  # (the arguments tell of one stack)
    starts = offsets(d.pp, d.chunks, counts) if counts else {}
    core = any(name.startswith("decoder.layers.") for name in names)
    for pp in range(d.pp):
        if not all((tp, pp) in grid.lost for tp in range(d.tp)):
            continue
        why = grid.lost[0, pp]
        if core and pp == 0:
            yield "embedding.word_embeddings.weight", why
        if core and pp == d.pp - 1:
            yield "decoder.final_layernorm.weight", why
            if getattr(grid.args, "untie_embeddings_and_output_weights", None) is True:
                yield "output_layer.weight", why
        for chunk in range(d.chunks):
            for layer in range(counts.get((pp, chunk), 0)):
                for head, tails in layers.items():
                    yield from ((head.format(starts[pp, chunk] + layer) + tail, why) for tail in tails)


def _of_experts(grid: Grid, names: list[str]) -> Iterator[tuple[str, str]]:
    experts = number(grid.args, "num_experts", "num_moe_experts")
    if not grid.lost_experts or experts is None:
        return
    each = experts // grid.degrees.ep
    lost = {ep: why for (_, ep), why in grid.lost_experts.items()}
    like = dict.fromkeys((m[1], m[3]) for name in names if (m := _EXPERT.fullmatch(name)))
    for head, tail in like:
        for ep, why in lost.items():
            yield from ((f"{head}{n}{tail}", why) for n in range(ep * each, (ep + 1) * each))
