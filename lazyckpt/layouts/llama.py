"""Merge rules for the names of Meta's Llama folders (consolidated.*.pth and params.json)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..core.box import Shape
from ..core.placement import Placement
from .merge import How, Merge, Rule, concatenated, replicated
from .merge import Source as RuleSource
from .tables import pattern

PARAMS = "params.json"


def llama_rules(params: Mapping[str, Any]) -> RuleSource:
    """Return the rules for Meta's names. ``params`` is the content of params.json."""
    return RuleSource(lambda name: _llama_rule(name, params), "names")


def _llama_rule(name: str, params: Mapping[str, Any]) -> tuple[Rule, str] | None:
    why = "Meta's llama/model.py"
    if pattern("llama.replicated").fullmatch(name):
        return replicated, why
    if pattern("llama.row").fullmatch(name):
        return concatenated(1), why
    if pattern("llama.embedding").fullmatch(name):
        dim = params.get("dim")
        return (_embedding(dim), f"{why} and the dim of {PARAMS}") if type(dim) is int else None
    if not pattern("llama.column").fullmatch(name):
        return None
    kv = pattern("llama.kv").search(name)
    heads, queries, dim = (params.get(key) for key in ("n_kv_heads", "n_heads", "dim"))
    if kv and all(type(n) is int and n > 0 for n in (heads, queries, dim)):
        return _shared(heads * (dim // queries)), f"{why} and the heads of {PARAMS}"  # type: ignore[operator]
    return concatenated(0), why


def _embedding(dim: int) -> Rule:
    def rule(shapes: Sequence[Shape]) -> Merge:
        widths = {shape[-1] for shape in shapes}
        return concatenated(0 if widths == {dim} and len(shapes) > 1 else 1)(shapes)

    return rule


def _shared(rows: int) -> Rule:
    """Concatenate along dimension 0 to ``rows`` rows. If the ranks hold more, neighbours hold replicas."""

    def rule(shapes: Sequence[Shape]) -> Merge:
        held = sum(shape[0] for shape in shapes)
        if held == rows or held % rows or len(shapes) % (held // rows):
            return concatenated(0)(shapes)
        times = held // rows
        placements = []
        at = 0
        for n, shape in enumerate(shapes):
            placements.append(Placement.at(shape, (at, *(0,) * (len(shape) - 1))))
            at += shape[0] if n % times == times - 1 else 0
        return Merge((rows, *shapes[0][1:]), tuple(placements), how=How("overlapping", len(shapes), copies=times))

    return rule
