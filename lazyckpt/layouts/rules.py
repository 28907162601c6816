"""The sources of the rules by which a whole tensor is cut over tensor-parallel ranks.

In order of precedence: the user, the merge of the tensor's stored shards, universal_checkpoint_info, Megatron's
arguments, Llama's params.json, the names of known families, and shapes if they show what a name leaves open (whether
the first matrix of an MLP is a fused gate and up). Nothing is cut on a guess.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from ..core.box import Shape
from ..core.index import Index
from ..core.specs import TensorSpec
from .autotp import described_rules
from .cut import as_merged
from .families import family_rules
from .llama import llama_rules
from .megatron import is_gated, megatron_rules, mixer_rule, second_matrix, stack_of
from .merge import Rule, Source, concatenated, in_parts, replicated, user_rules
from .mixers import widths_in
from .rename.apply import heads_of
from .rename.pieces import Heads
from .stages import is_stack
from .tables import pattern, patterns

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_megatron(index: Index, names: Mapping[str, TensorSpec]) -> bool:
    """Return whether the names are Megatron's: each rank then counts its layers and experts from 0."""
    return index.format.startswith("megatron") or any(pattern("megatron.own").search(name) for name in names)


def sources_of(index: Index, specs: Mapping[str, TensorSpec], rules: Mapping[str, Any]) -> tuple[Source, ...]:
    """Return the sources for a checkpoint with these tensors, in order of precedence.

    Raises FormatError for a rule that is not understood.
    """
    shapes = {name: spec.shape for name, spec in specs.items()}
    args, info = index.meta.get("args"), index.meta.get("universal_checkpoint_info")
    by_shape = Source(lambda name: _first_matrix(name, shapes))
    universal: tuple[Source, ...] = ()
    if isinstance(info, dict) and info:
        universal = described_rules(info, index.meta.get("ds_config"), shapes, family_rules(is_gated(args)))
    own: list[Source] = []
    if index.format == "llama":
        own.append(llama_rules(index.meta.get("params", {})))
    if is_megatron(index, specs):
        own.append(Source(lambda name: _stack(name, shapes, is_gated(args))))
        own.append(Source(lambda name: _down(name, getattr(args, "transformer_impl", None))))
        widths = widths_in(index.meta)
        if widths and not any(hasattr(args, name) for name in widths):
            own.append(Source(lambda name: mixer_rule(name, Namespace(**widths), "config.json")))
        own += [Source(_without_down(source)) for source in megatron_rules(args, {}, {})]
    else:
        own.append(family_rules())
    stored = Source(lambda name: None if is_stack(name) else as_merged(specs.get(name)))
    return (user_rules(rules), stored, *universal, _remembered((*own, by_shape, Source(_by_name)), shapes))


def _remembered(sources: Sequence[Source], shapes: Mapping[str, Shape]) -> Source:
    """Return a source that caches the answers of others by shape and name without numbers of layers and experts."""
    asked: dict[tuple[str, Shape], tuple[Rule, str] | None] = {}

    def find(name: str) -> tuple[Rule, str] | None:
        key = (_NUMBER.sub("", name), shapes.get(name, ()))
        if key not in asked:
            asked[key] = next((found for source in sources if (found := source.find(name)) is not None), None)
        return asked[key]

    return Source(find)


def heads_in(index: Index) -> Heads | None:
    """Return the numbers of attention heads of the model; None if the checkpoint does not say."""
    params = index.meta.get("params")
    if index.format != "llama" or not isinstance(params, dict):
        return heads_of(index.meta)
    queries, dim = params.get("n_heads"), params.get("dim")
    groups = params.get("n_kv_heads") or queries
    if type(queries) is not int or type(groups) is not int or type(dim) is not int or min(queries, groups) < 1:
        return None
    return Heads(queries, groups, dim // queries)


def _stack(name: str, shapes: Mapping[str, Shape], gated: bool | None) -> tuple[Rule, str] | None:
    """Return the rule of Megatron's GroupedMLP, as [experts, in, out]."""
    which = stack_of(name)
    if which is None or len(shapes.get(name, ())) != 3:
        return None
    if which == 2:
        return concatenated(1), "its name"
    second = shapes.get(f"{name[:-1]}2", ())
    if len(second) == 3:
        gated = shapes[name][2] == 2 * second[1]
    if gated is None:
        return None
    return (in_parts(2, 2) if gated else concatenated(2)), "its name and its shape"


def _first_matrix(name: str, shapes: Mapping[str, Shape]) -> tuple[Rule, str] | None:
    """Return the rule of an MLP's first matrix: gate and up if it has twice as many rows as the second has columns."""
    second = shapes.get(second_matrix(name) or "", ())
    if not shapes.get(name):
        return None
    if len(second) != 2 or shapes[name][0] not in (second[1], 2 * second[1]):
        return None
    gated = shapes[name][0] == 2 * second[1]
    return (in_parts(0, 2) if gated else concatenated(0)), f"its {shapes[name][0]} rows, {second[1]} columns after them"


def _down(name: str, implementation: Any) -> tuple[Rule, str] | None:
    """Return the rule of MLA's down projections: Megatron's layers cut them, Transformer Engine's replicate them."""
    if pattern("megatron.down").search(name) is None or implementation not in ("local", "transformer_engine"):
        return None
    rule = concatenated(0) if implementation == "local" else replicated
    return rule, f"args.transformer_impl = {implementation!r}"


def _without_down(source: Source) -> Any:
    return lambda name: None if pattern("megatron.down").search(name) else source.find(name)


def _by_name(name: str) -> tuple[Rule, str] | None:
    for which, rule in (("column", concatenated(0)), ("row", concatenated(1)), ("replicated", replicated)):
        for one in patterns(f"whole.{which}"):
            if one.search(name):
                return rule, f"the name pattern {one.pattern!r}"
    return None
