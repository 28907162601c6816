"""Names of GGUF files in Hugging Face's terms, by the tables of gguf.toml; values, too, where llama.cpp changes them.

llama.cpp's converter stores q and k of Llama with the rows of each head in another order (`LlamaModel.permute` of
convert_hf_to_gguf.py), and the norms of Gemma plus 1 (`GemmaModel.modify_tensors`). Both are undone here, as
transformers does on loading (modeling_gguf_pytorch_utils.py, `LlamaTensorProcessor`, `Gemma2TensorProcessor`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...core.box import Box
from ...core.compose import compose
from ...core.expr import computed, make, operand
from ...core.index import Index
from ...core.placement import Placement
from ...core.specs import Expr, Input, TensorSpec, kind_of, renamed
from ...errors import FormatError
from ..tables import read_toml
from .rewrite import Report
from .table import Entry, pattern, table

ARCHITECTURE = "general.architecture"
TYPES = "tensor_types"
# Computed from config.json by llama.cpp's converter. Models of Hugging Face have no such tensors.
_COMPUTED = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_MOST = 1 << 16  # experts of a layer
_LOST = ("missing-file", "missing-tensor", "unreadable-file", "part-of-checkpoint")


class Naming(NamedTuple):
    """The names of an architecture, and how llama.cpp stores what they name.

    ``experts`` maps the name of what stacks the matrices of experts to the name of each, with {e} for its number;
    ``rows`` has names of vectors that are matrices of one row in the Hugging Face model.
    """

    entries: list[Entry]
    experts: dict[str, str]
    rows: tuple[str, ...]
    turned: bool
    plus_one: bool


@functools.cache
def naming(architecture: str) -> Naming | None:
    """Return the names of an architecture; None if there is no table."""
    tables = read_toml(__package__, "gguf.toml")
    if architecture not in tables or architecture == "layers":
        return None
    lines: dict[str, Any] = {}
    above: str | None = architecture
    while above is not None:
        lines = lines | {left: right for left, right in tables[above].items() if left not in lines}
        above = tables[above].get("extends")
    own = tables[architecture]
    names = {left: right for left, right in lines.items() if isinstance(right, str) and left != "extends"}
    return Naming(
        table(names),
        own.get("experts", {}),
        tuple(own.get("rows", ())),
        own.get("turned", False),
        own.get("plus_one", False),
    )


def architectures() -> tuple[str, ...]:
    """Return the architectures that have a table."""
    return tuple(name for name in read_toml(__package__, "gguf.toml") if name != "layers")


def from_gguf(index: Index, states: Mapping[str, Mapping[str, TensorSpec]]) -> Index:
    """Return the index with the names, and the values, of the Hugging Face model. Raises FormatError if there is no
    table for its architecture."""
    told = index.meta.get(ARCHITECTURE)
    architecture = told if isinstance(told, str) else ""
    known = naming(architecture)
    if known is None:
        raise FormatError(
            f"there is no table of names for the GGUF architecture {told!r:.80}; there are {', '.join(architectures())}"
        )
    heads = _heads(index.meta, architecture)
    report = Report()
    found: dict[str, dict[str, TensorSpec]] = {}
    types = dict(index.meta.get(TYPES, {}))
    for state, specs in states.items():
        found[state] = {}
        for name in specs:
            new = _new_name(name, known)
            if name in _COMPUTED:
                continue
            if new is None:
                made = _experts(specs[name], known)
                if not made and not _is_renamed(name, known):
                    report.kept[name] = None
                made = made or [specs[name]]
            else:
                made = [_as_stored_by_hf(new, specs, name, known, heads, report)]
            if name in types and made[0].name != name:
                types |= dict.fromkeys([spec.name for spec in made], types.pop(name))
            found[state] |= {spec.name: spec for spec in made}
    unreadable = {_new_name(name, known) or name: why for name, why in index.unreadable.items()}
    aliases = dict(index.aliases)
    head, owner = "lm_head.weight", "model.embed_tokens.weight"
    # (llama.cpp uses the embedding where there is no output)
    whole = head not in unreadable and not any(problem.code in _LOST for problem in index.problems)
    if whole and all(owner in specs and head not in specs for specs in found.values()):
        aliases[head] = owner
    return replace(
        index,
        states=found,
        aliases=aliases,
        meta={**index.meta, TYPES: types},
        problems=(*index.problems, *report.problems()),
        unreadable=unreadable,
        layout=None,
    )


def _new_name(name: str, known: Naming) -> str | None:
    for entry in known.entries:
        match = pattern(entry.left).fullmatch(name)
        if match is not None:
            return entry.right[0].format(**match.groupdict())
    return None


def _is_renamed(name: str, known: Naming) -> bool:
    """Return whether the name is already one of the Hugging Face model."""
    return any(
        pattern(right).fullmatch(name) for right in (*(e.right[0] for e in known.entries), *known.experts.values())
    )


def _experts(spec: TensorSpec, known: Naming) -> list[TensorSpec]:
    """Return the matrices of the experts that a tensor [experts, rows, columns] stacks; [] if it is no such tensor."""
    for left, right in known.experts.items():
        match = pattern(left).fullmatch(spec.name)
        if match is None or len(spec.shape) < 2 or not 0 < spec.shape[0] <= _MOST:
            continue
        count, *inner = spec.shape
        made = []
        for n in range(count):
            block = Box((n, *(0 for _ in inner)), (n + 1, *inner))
            placement = Placement.of(spec.shape, block, (0,) * len(inner), tuple(range(1, len(spec.shape))))
            name = right.format(**match.groupdict(), e=n)
            rule = "; ".join(filter(None, (spec.rule, f"expert {n} of {spec.name!r}")))
            made.append(compose(name, tuple(inner), [(spec, placement)], rule, spec.stored_as or spec.name))
        return made
    return []


def to_gguf_name(name: str, known: Naming) -> str | None:
    """Return the name in a GGUF file of a tensor of the Hugging Face model; None if the table has none."""
    for entry in known.entries:
        match = pattern(entry.right[0]).fullmatch(name)
        if match is not None:
            return entry.left.format(**match.groupdict())
    return None


def _as_stored_by_hf(
    new: str,
    specs: Mapping[str, TensorSpec],
    name: str,
    known: Naming,
    heads: tuple[int, int] | None,
    report: Report,
) -> TensorSpec:
    spec = specs[name]
    if known.plus_one and name.endswith("norm.weight"):
        shape, dtype = kind_of(specs, name)
        one = make("fill", shape=shape, value=1.0, dtype=dtype)
        value = make("linear", operand(spec), one, weights=(1.0, -1.0))
        return computed(new, value, rule="less 1 (llama.cpp stores norms plus 1)", stored_as=name)
    which = ("attn_q", "attn_k").index(kind) if (kind := name.split(".")[-2]) in ("attn_q", "attn_k") else None
    if known.turned and which is not None:
        if heads is None or spec.shape[0] % (2 * heads[which]):
            why = "how many heads there are is not known, or does not divide the rows: their order stays that of GGUF"
            report.unfit.setdefault(why, {})[name] = None
            return spec
        value = turned(operand(spec), heads[which], back=True)
        return computed(new, value, rule="the rows of each head in the order of Hugging Face", stored_as=name)
    if len(spec.shape) == 1 and any(pattern(row).fullmatch(name) for row in known.rows):
        value = make("reshape", operand(spec), shape=(1, *spec.shape))
        return computed(new, value, rule="a matrix of one row (llama.cpp stores a vector)", stored_as=name)
    return renamed(spec, new)


def turned(value: Expr | Input, heads: int, *, back: bool) -> Expr:
    """Return q or k with the rows of each head in the order of GGUF, or ``back`` in that of Hugging Face.

    A head's rows are two halves in Hugging Face's order, and in GGUF's pairs of a row of each.
    """
    rows, *rest = value.shape
    pairs = rows // heads // 2
    split = (heads, pairs, 2, *rest) if back else (heads, 2, pairs, *rest)
    apart = make("reshape", value, shape=split)
    other = make("transpose", apart, axes=(0, 2, 1, *range(3, 3 + len(rest))))
    return make("reshape", other, shape=(rows, *rest))


def _heads(meta: Mapping[str, Any], architecture: str) -> tuple[int, int] | None:
    """Return how many heads q and k have; None if the metadata do not say, or not one number for all layers."""
    queries = meta.get(f"{architecture}.attention.head_count")
    keys = meta.get(f"{architecture}.attention.head_count_kv", queries)
    if all(type(n) is int and n > 0 for n in (queries, keys)):
        return queries, keys  # type: ignore[return-value]
    return None
