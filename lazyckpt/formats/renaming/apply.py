"""Which table, with which heads, for a checkpoint; and its index under the other names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from ...core.index import Index, TensorSpec
from .rename import Heads, rename
from .table import Entry, pattern, table

_TIED = {"lm_head.weight": ("model.embed_tokens.weight", "transformer.wte.weight")}

_GATED = ("swiglu", "quick_geglu", "geglu", "gated_linear_unit")  # Megatron-LM megatron/training/arguments.py
_UNLIKE = {
    "apply_layernorm_1p": "args.apply_layernorm_1p: the weights of norms are stored less 1, as of "
    "Hugging Face's models only Gemma has them; others take them plus 1",
    "rotary_interleaved": "args.rotary_interleaved: rotary embeddings turn neighbouring rows of each head of q and k; "
    "most of Hugging Face's models turn its two halves, the rows are in another order there",
}


def renamed_index(
    index: Index, states: Mapping[str, Mapping[str, TensorSpec]], which: str | Mapping[str, Any], reverse: bool
) -> Index:
    """``states`` of the index under the names of a table: "hf" (from megatron-core's names to Hugging Face's, the table
    that fits the model), "megatron" (back), one by its name, or the user's own. Raises FormatError (no such table)."""
    names = list(dict.fromkeys(name for state in states.values() for name in state))
    back = reverse
    if which == "hf":
        which = _hugging_face(names)
    elif which == "megatron":
        which, back = _megatron(names), not reverse
    entries = table(which)
    heads, gated = heads_of(index.meta), gated_by(index.meta)
    found: dict[str, dict[str, TensorSpec]] = {}
    one: dict[str, str] = {}
    lines: dict[str, None] = {}
    for state, specs in states.items():
        found[state], singles, problems = rename(specs, entries, heads, back, gated)
        one |= singles
        lines |= dict.fromkeys(problems)
    aliases = {
        _alias(a, entries, back): one.get(o, o)
        for a, o in index.aliases.items()
        if any(o in s for s in states.values())
    }
    aliases |= _ties(index.meta, found, entries, back)
    lines |= dict.fromkeys(_unlike(index.meta) if not back else ())
    return replace(index, states=found, aliases=aliases, problems=(*index.problems, *lines))


def heads_of(meta: Mapping[str, Any]) -> Heads | None:
    """From Megatron's args or Hugging Face's config; None if neither tells."""
    args = getattr(meta.get("args"), "__dict__", None)
    if args is not None:
        heads, dim = args.get("num_attention_heads"), args.get("kv_channels")
        groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
        hidden = args.get("hidden_size")
    else:
        config = meta.get("config")
        config = config.get("text_config", config) if isinstance(config, dict) else {}
        heads = config.get("num_attention_heads", config.get("n_head"))
        groups = config.get("num_key_value_heads", heads)
        dim, hidden = config.get("head_dim"), config.get("hidden_size", config.get("n_embd"))
    if dim is None and _counts(heads, hidden):
        dim = hidden // heads
    return Heads(heads, groups, dim) if _counts(heads, groups, dim) else None


def gated_by(meta: Mapping[str, Any]) -> bool | None:
    """Whether Megatron's args give its MLPs a gate; None if they do not tell."""
    args = getattr(meta.get("args"), "__dict__", {})
    said = [args[name] for name in _GATED if isinstance(args.get(name), bool)]
    return any(said) if said else None


def _unlike(meta: Mapping[str, Any]) -> list[str]:
    """Lines on what Megatron's args say of values that mean something else than under Hugging Face's names."""
    args = getattr(meta.get("args"), "__dict__", {})
    return [line for name, line in _UNLIKE.items() if args.get(name) is True]


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _hugging_face(names: Iterable[str]) -> str:
    text = "\n".join(names)
    if ".mlp.experts." in text:
        return "qwen_moe" if ".shared_experts." in text or ".q_layernorm." in text else "mixtral"
    return "gpt2" if "embedding.position_embeddings." in text else "llama"


def _megatron(names: Iterable[str]) -> str:
    text = "\n".join(names)
    if ".block_sparse_moe." in text:
        return "mixtral"
    if ".mlp.experts." in text:
        return "qwen_moe"
    return "gpt2" if "transformer.h." in text else "llama"


def _alias(name: str, entries: Iterable[Entry], back: bool) -> str:
    for entry in entries:
        if len(entry.right) == 1:
            here, there = (entry.right[0], entry.left) if back else (entry.left, entry.right[0])
            match = pattern(here).fullmatch(name)
            if match is not None:
                return there.format(**match.groupdict())
    return name


def _ties(
    meta: Mapping[str, Any], states: Mapping[str, Mapping[str, TensorSpec]], entries: Iterable[Entry], back: bool
) -> dict[str, str]:
    """The output layer of a Megatron model whose args tie it: it has no such tensor, models of Hugging Face do."""
    args = getattr(meta.get("args"), "__dict__", {})
    weights = next(iter(states.values()), {})
    if back or args.get("untie_embeddings_and_output_weights") is not False:
        return {}
    known = {name for entry in entries for name in entry.right}
    return {
        head: owner
        for head, owners in _TIED.items()
        for owner in owners
        if owner in weights and head not in weights and head in known
    }
