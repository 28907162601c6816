"""Choose the table of names for a checkpoint, and build its index under the other names."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core.box import Box
from ...core.compose import compose
from ...core.index import Index
from ...core.placement import Placement
from ...core.specs import TensorSpec, renamed
from ...errors import Problem
from ..megatron import is_gated, second_matrix, stack_of
from ..tables import pattern
from .gguf import from_gguf
from .rewrite import Heads, Report, new_names, rename
from .table import Entry, table

# -- Split the arrays of megatron-core's GroupedMLP, each with all experts, into matrices like those of SequentialMLP.

_MOST = 1 << 16


def apart(states: Mapping[str, Mapping[str, TensorSpec]]) -> dict[str, dict[str, TensorSpec]]:
    """Return all states, with each array of experts split into the matrices of the experts."""
    counts = {
        name: spec.shape[0]
        for specs in states.values()
        for name, spec in specs.items()
        if len(spec.shape) == 3 and spec.shape[0] <= _MOST and stack_of(name)
    }
    return {
        state: {one.name: one for name, spec in specs.items() for one in _apart(spec, counts.get(name, 0))}
        for state, specs in states.items()
    }


def _apart(spec: TensorSpec, count: int) -> Iterator[TensorSpec]:
    match = pattern("megatron.expert_stack").fullmatch(spec.name)
    if match is None or (spec.shape and (len(spec.shape) != 3 or spec.shape[0] != count)) or not count:
        yield spec
        return
    for n in range(count):
        name = f"{match[1]}local_experts.{n}.linear_fc{match[2]}.weight"
        if not spec.shape:  # a scalar, such as a step, is shared by all experts
            yield renamed(spec, name)
            continue
        _, rows, columns = spec.shape
        placement = Placement.of(spec.shape, Box((n, 0, 0), (n + 1, rows, columns)), (0, 0), (2, 1))
        rule = f"expert {n} of {spec.name!r}, transposed"
        rule = f"{spec.rule}; {rule}" if spec.rule else rule
        yield compose(name, (columns, rows), [(spec, placement)], rule, spec.stored_as or spec.name)


# -- Choose a table by the names and shapes of a model.


def hugging_face(specs: Mapping[str, TensorSpec], args: Mapping[str, Any], heads: Heads | None) -> str:
    """Return the table from megatron-core's names to those of the Hugging Face family with this architecture."""
    text = "\n".join(specs)
    gated = _gated(specs, args)
    if gated and ".mlp.experts." in text:
        return "qwen_moe" if ".shared_experts." in text or ".q_layernorm." in text else "mixtral"
    if gated:
        return "llama"
    if "embedding.position_embeddings." in text:
        return "gpt2"
    many = heads is None or heads.queries == heads.groups  # GPT-NeoX has no groups
    return "gpt_neox" if many and ".mlp.experts." not in text and "decoder.final_layernorm.bias" in text else "nemotron"


def megatron(names: Mapping[str, TensorSpec]) -> str:
    """Return the table whose right side has these names."""
    text = "\n".join(names)
    if ".block_sparse_moe." in text:
        return "mixtral"
    if ".mlp.experts." in text:
        return "qwen_moe"
    if "gpt_neox." in text:
        return "gpt_neox"
    if "transformer.h." in text:
        return "gpt2"
    return "nemotron" if ".mlp.up_proj." in text and ".mlp.gate_proj." not in text else "llama"


def _gated(specs: Mapping[str, TensorSpec], args: Mapping[str, Any]) -> bool:
    """Return whether the first MLP matrix fuses gate and up: it has twice the rows that the second has columns."""
    for name, spec in specs.items():
        second = specs.get(second_matrix(name) or "")
        if second is not None and len(spec.shape) == len(second.shape) == 2:
            return spec.shape[0] == 2 * second.shape[1]
        if name.endswith(".experts.weight1") and len(spec.shape) == 3:
            second = specs.get(f"{name[:-1]}2")
            if second is not None and len(second.shape) == 3:
                return spec.shape[2] == 2 * second.shape[1]
    return args.get("swiglu") is not False


# -- Build the index under the names of a table.

_HEAD = "output_layer.weight"
_TIED = {
    "lm_head.weight": ("model.embed_tokens.weight", "transformer.wte.weight"),
    "embed_out.weight": ("gpt_neox.embed_in.weight",),
}

_UNLIKE = {
    "apply_layernorm_1p": "args.apply_layernorm_1p: the weights of norms are stored less 1, as of "
    "Hugging Face's models only Gemma has them; others take them plus 1",
    "rotary_interleaved": "args.rotary_interleaved: rotary embeddings turn neighbouring rows of each head of q and k; "
    "most of Hugging Face's models turn its two halves, the rows are in another order there",
}


def renamed_index(
    index: Index, states: Mapping[str, Mapping[str, TensorSpec]], which: str | Mapping[str, Any], reverse: bool
) -> Index:
    """Return the index with ``states`` under the names of a table.

    ``which`` is "hf" (from megatron-core's names, or GGUF's, to Hugging Face's, by the table that fits the model),
    "megatron" (the reverse, of megatron-core's), the name of a table, or the user's own table. Raises FormatError if
    there is no such table.
    """
    if which == "hf" and not reverse and index.format == "gguf":
        return from_gguf(index, states)
    args = getattr(index.meta.get("args"), "__dict__", {})
    heads = heads_of(index.meta)
    every = {name: spec for state in reversed(list(states.values())) for name, spec in state.items()}
    back = reverse
    if which == "hf":
        which = hugging_face(every, args, heads)
    elif which == "megatron":
        which, back = megatron(every), not reverse
    entries = table(which)
    if not back and any(".local_experts." in entry.left for entry in entries):
        states = apart(states)
    report, gated = Report(), is_gated(index.meta.get("args"))
    # (Transformer Engine's models are saved under their own names, those of the local spec under others)
    stacked = args.get("transformer_impl") == "transformer_engine"
    found = {state: rename(specs, entries, heads, back, report, stacked, gated) for state, specs in states.items()}
    tied = args.get("untie_embeddings_and_output_weights") is False
    aliases = {
        new: report.one.get(owner, owner)
        for old, owner in index.aliases.items()
        if any(owner in s for s in states.values())
        and not ((new := new_names(old, entries, back)[0]) == _HEAD and tied)  # Megatron's tied models have none
    }
    aliases |= _ties(found, entries) if tied and not back else {}
    unreadable = {new: why for old, why in index.unreadable.items() for new in new_names(old, entries, back)}
    problems = (*index.problems, *report.problems(), *(() if back else _unlike(index.meta)))
    return replace(index, states=found, aliases=aliases, problems=problems, unreadable=unreadable, layout=None)


def heads_of(meta: Mapping[str, Any]) -> Heads | None:
    """Return the heads by Megatron's args or Hugging Face's config; None if neither has them."""
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


def _unlike(meta: Mapping[str, Any]) -> list[Problem]:
    """Return problems for settings in Megatron's args that change the meaning of values against Hugging Face models."""
    args = getattr(meta.get("args"), "__dict__", {})
    return [Problem("unlike-values", line) for name, line in _UNLIKE.items() if args.get(name) is True]


def _counts(*values: Any) -> bool:
    return all(type(value) is int and value > 0 for value in values)


def _ties(states: Mapping[str, Mapping[str, TensorSpec]], entries: Iterable[Entry]) -> dict[str, str]:
    """Return the tied name of the output layer: tied Megatron models have no such tensor, Hugging Face models do."""
    weights = next(iter(states.values()), {})
    known = {name for entry in entries for name in entry.right}
    return {
        head: owner
        for head, owners in _TIED.items()
        for owner in owners
        if owner in weights and head not in weights and head in known
    }
