"""Build the index of a checkpoint under the names of a table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from ...core.box import Box
from ...core.compose import compose
from ...core.index import Index
from ...core.placement import Placement
from ...core.specs import TensorSpec, renamed
from ...core.units import plural
from ...errors import FormatError, Problem
from ..configured import check_config
from ..megatron import flag, is_gated, number, stack_of
from ..tables import pattern
from . import choose, mtp
from .gguf import from_gguf
from .pieces import Heads
from .rewrite import Report, new_names, rename
from .table import Builtin, Entry, builtin, less_one_models, table

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


# -- Build the index under the names of a table.

_VALUES = ("weights", "fp32")  # states that have values of parameters
_MEANS = ("ema", "swa")  # in names of states: of parameters, or of gradients
_HEAD = "output_layer.weight"
_TIED = {
    "lm_head.weight": (
        *("model.embed_tokens.weight", "transformer.wte.weight", "backbone.embeddings.weight", "shared.weight"),
        *("transformer.word_embeddings.weight", "model.language_model.embed_tokens.weight"),
    ),
    "cls.predictions.decoder.weight": ("bert.embeddings.word_embeddings.weight",),
    "embed_out.weight": ("gpt_neox.embed_in.weight",),
}


class _Whole(Mapping[str, TensorSpec]):
    """The tensors of all states by name, as a mapping that describes only those that are asked for."""

    def __init__(self, states: Iterable[Mapping[str, TensorSpec]]) -> None:
        self._states = tuple(states)

    def __getitem__(self, name: str) -> TensorSpec:
        for specs in self._states:
            if name in specs:
                return specs[name]
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for specs in self._states for name in specs))

    def __len__(self) -> int:
        return len(list(iter(self)))


def renamed_index(
    index: Index, states: Mapping[str, Mapping[str, TensorSpec]], which: str | Mapping[str, Any], reverse: bool
) -> Index:
    """Return the index with ``states`` under the names of a table.

    ``which`` is "hf" (from megatron-core's names, or GGUF's, to Hugging Face's, by the table that fits the model),
    "megatron" (the reverse, of megatron-core's), the name of a table, a `model_type`, or the user's own table. Raises
    FormatError if there is no such table.
    """
    if which == "hf" and not reverse and index.format == "gguf":
        return from_gguf(index, states)
    args = getattr(index.meta.get("args"), "__dict__", {})
    heads = all_heads_of(index.meta)
    every = {name: spec for state in reversed(list(states.values())) for name, spec in state.items()}
    whole = _Whole(index.states.values())  # not only what the view shows of the model
    back, model = reverse, builtin(which) if isinstance(which, str) else None
    if which == "hf":
        model = choose.of_model(index.meta) or choose.hugging_face(whole, index.meta.get("args"), heads[""])
    elif which == "megatron":
        model, back = choose.of_model(index.meta) or choose.megatron(whole), not reverse
    entries = table(which if model is None else model.name)
    if which in ("hf", "megatron") and index.layout is None:
        shown = next(iter(states.values()), {})
        check_config(index.meta, {name: spec.shape for name, spec in shown.items()}, rows=rows_of(index.meta))
        if back and model is not None:
            choose.check_matrices(index.meta, shown, entries, model)
    if not back and any(".local_experts." in entry.left for entry in entries):
        states = apart(states)
    layers = mtp.layers_of(index.meta)
    if not back and mtp.has_mtp(entries):
        states = mtp.as_decoder(states, layers)
    inner = mtp.per_layer(every, back) if mtp.is_hybrid(entries) else None
    if inner is None and mtp.is_hybrid(entries):  # (nothing to rename, or not known how)
        entries = [entry for entry in entries if not entry.left.startswith("mtp.")]
    if not back and inner is not None:
        states = mtp.flattened(states, inner)
    report, gated = Report(), is_gated(index.meta.get("args"))
    # (Transformer Engine's models are saved under their own names, those of the local spec under others)
    stacked = args.get("transformer_impl") == "transformer_engine"
    counts = {name: spec.shape[0] for name, spec in every.items() if spec.shape}
    found = {
        state: rename(
            specs,
            entries,
            heads,
            back,
            report,
            stacked,
            gated,
            counts,
            values=None if any(one in state for one in _MEANS) else state in _VALUES,
        )
        for state, specs in states.items()
    }
    if back and mtp.has_mtp(entries):
        beyond = mtp.stray(found, index.meta)
        if beyond is not None:
            raise FormatError(
                f"config.json is not of this model: it counts {plural(layers or 0, 'layer')}, and there is a layer "
                f"{beyond}, which does not predict further tokens. Put the config.json and the tensors of one model "
                "together"
            )
        found = mtp.from_decoder(found, layers)
    if back and inner is not None:
        found = mtp.nested(found, inner)
    tied = args.get("untie_embeddings_and_output_weights") is False
    aliases = {
        new: owned
        for old, owner in index.aliases.items()
        if any(owner in s for s in states.values())
        and (owned := report.one.get(owner, owner)) != new_names(old, entries, back)[0]  # two names that are one there
        and not ((new := new_names(old, entries, back)[0]) == _HEAD and tied)  # Megatron's tied models have none
    }
    aliases |= _ties(found, entries) if tied and not back else {}
    unreadable = {new: why for old, why in index.unreadable.items() for new in new_names(old, entries, back)}
    if report.misfit and which in ("hf", "megatron") and "args" not in index.meta:
        raise FormatError(
            f"config.json is not of this model: {report.misfit}. Put the config.json and the tensors of one model "
            "together, or name a table: view.rename('llama')"
        )
    groups = _config(index.meta).get("n_groups")
    unlike = _grouped_norm(groups, "n_groups", model) if back else _unlike(index.meta, model)
    problems = (*index.problems, *report.problems(), *unlike)
    return replace(index, states=found, aliases=aliases, problems=problems, unreadable=unreadable, layout=None)


def all_heads_of(meta: Mapping[str, Any]) -> dict[str, Heads | None]:
    """Return the heads of the language model (""), of its delta nets and of a vision tower, as far as known."""
    args = getattr(meta.get("args"), "__dict__", None)
    config = _config(meta)
    vision = _model(config).get("vision_config", (args or {}).get("vision_config"))
    return {
        "": heads_of(meta),
        "delta": _delta_heads(text_config(meta) if args is None else args),
        "vision": _heads_in(vision, tower=True) if isinstance(vision, dict) else None,
        **(_heads_of_layers(text_config(meta)) if args is None else {}),
    }


def _heads_of_layers(config: Mapping[str, Any]) -> dict[str, Heads | None]:
    """Return the heads of each layer, by its number, of models whose layers differ in them."""
    blocks, pattern = config.get("block_configs"), config.get("hybrid_layer_pattern")
    found: dict[str, Heads | None] = {}
    if config.get("model_type") == "nemotron-nas" and isinstance(blocks, list):  # (configuration_decilm.py)
        heads: Any = config.get("num_attention_heads")
        for n, block in enumerate(blocks):
            attention = block.get("attention") if isinstance(block, dict) else None
            each: Any = attention.get("n_heads_in_group") if isinstance(attention, dict) else None
            if _counts(heads, each):
                found[str(n)] = _heads(heads, heads // each, config.get("head_dim"), config.get("hidden_size"))
    if config.get("model_type") == "mimo_v2_flash" and isinstance(pattern, list):  # (configuration_mimo_v2_flash.py)
        kinds = (_heads_of_kind(config, ""), _heads_of_kind(config, "swa_"))
        found |= {"mtp": kinds[1], **{str(n): kinds[int(kind == 1)] for n, kind in enumerate(pattern)}}
    return found


def _heads_of_kind(config: Mapping[str, Any], prefix: str) -> Heads | None:
    names = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
    found: list[Any] = [config.get(f"{prefix}{name}") for name in names]
    return Heads(*found) if _counts(*found) else None


def rows_of(meta: Mapping[str, Any]) -> int:
    """Return how many rows q, k and v of all heads have by config.json; 0 if it is not known."""
    heads = _heads_in(text_config(meta))
    return 0 if heads is None else (heads.queries + 2 * heads.groups) * heads.dim


def heads_of(meta: Mapping[str, Any]) -> Heads | None:
    """Return the heads by Megatron's args or Hugging Face's config; None if neither has them."""
    args = getattr(meta.get("args"), "__dict__", None)
    if args is None:
        return _heads_in(text_config(meta))
    heads = args.get("num_attention_heads")
    groups = args.get("num_query_groups") if args.get("group_query_attention") else heads
    return _heads(heads, groups, args.get("kv_channels"), args.get("hidden_size"))


def _config(meta: Mapping[str, Any]) -> dict[str, Any]:
    config = meta.get("config")
    return config if isinstance(config, dict) else {}


def _model(config: dict[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the model that reads; of Qwen-Omni another one speaks."""
    found = config.get("thinker_config", config)
    return found if isinstance(found, dict) else {}


def text_config(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says of the language model; empty if there is none."""
    config = _model(_config(meta))
    found = next((config[name] for name in ("text_config", "llm_config") if name in config), config)
    return found if isinstance(found, dict) else {}


def _heads_in(config: Mapping[str, Any], *, tower: bool = False) -> Heads | None:
    def first(*names: str) -> Any:
        return next((config[name] for name in names if name in config), None)

    heads = first(
        "num_attention_heads", "n_head", *(("num_heads",) if tower or "d_kv" in config else ())
    )  # not Mamba's
    groups = first("num_key_value_heads") or _older_groups(config)
    dim, hidden = first("head_dim", "d_kv"), first("embed_dim", "hidden_size", "n_embd", "d_model")
    return _heads(heads, heads if groups is None else groups, dim, hidden)


def _older_groups(config: Mapping[str, Any]) -> Any:
    """Return the groups that Falcon's and GPTBigCode's configurations name otherwise; None if they have none."""
    kind = config.get("model_type")
    if kind in ("RefinedWeb", "falcon") and config.get("new_decoder_architecture", kind == "RefinedWeb"):
        return config.get("num_kv_heads", config.get("n_head_kv"))
    several = kind in ("falcon", "RefinedWebModel", "gpt_bigcode") and config.get("multi_query", True) is True
    return 1 if several else None


def _heads(heads: Any, groups: Any, dim: Any, hidden: Any) -> Heads | None:
    if dim is None and _counts(heads, hidden):
        dim = hidden // heads
    return Heads(heads, groups, dim) if _counts(heads, groups, dim) else None


def _delta_heads(config: Mapping[str, Any]) -> Heads | None:
    """Return the heads of gated delta nets, which Megatron's args and Hugging Face's config name alike."""
    names = ("num_value_heads", "num_key_heads", "key_head_dim", "value_head_dim")
    found: list[Any] = [config.get(f"linear_{name}") for name in names]
    return Heads(*found) if _counts(*found) else None


def _unlike(meta: Mapping[str, Any], model: Builtin | None) -> list[Problem]:
    """Return problems for settings in Megatron's args with which values mean something else in models of a table."""
    args = meta.get("args")
    less_one, turned = flag(args, "apply_layernorm_1p"), flag(args, "rotary_interleaved")
    name = "the model" if model is None else f"Hugging Face's {model.model}"
    lines = []
    if less_one and (model is None or not model.less_one):
        lines.append(
            f"args.apply_layernorm_1p: the weights of norms are stored less 1, and {name} takes them as they "
            f"are ({', '.join(less_one_models())} add 1)"
        )
    if less_one is False and model is not None and model.less_one:
        lines.append(
            f"args.apply_layernorm_1p is off: the weights of norms are stored as they are, and {name} adds 1 to them"
        )
    if turned is not None and turned != (model is not None and model.interleaved):
        here, there = ("neighbouring rows", "two halves")[:: 1 if turned else -1]
        lines.append(
            f"args.rotary_interleaved: rotary embeddings turn {here} of each head of q and k, those of {name} {there}"
        )
    groups = number(args, "mamba_num_groups")
    told = _grouped_norm(groups, "args.mamba_num_groups", model)
    return [*(Problem("unlike-values", line) for line in lines), *told]


def _grouped_norm(groups: Any, source: str, model: Builtin | None) -> list[Problem]:
    """Return a problem if the norms behind Mamba's mixers have groups, which those of Hugging Face's Mamba 2 ignore."""
    if type(groups) is not int or groups < 2 or model is None or model.model != "mamba2":
        return []
    line = (
        f"{source} = {groups}: Megatron's norm behind a mixer is over {groups} groups of columns, that of Hugging "
        "Face's mamba2 over all of them (modeling_mamba2.py MambaRMSNormGated); nemotron_h has groups, too"
    )
    return [Problem("unlike-values", line)]


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
