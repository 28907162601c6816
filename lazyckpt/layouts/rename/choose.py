"""Choose the table of names for a model: by its `model_type`, and where nothing says it, by its names and shapes.

Names decide only where one architecture, or several with the same result, have them. All else is an error that asks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...core.specs import TensorSpec
from ...errors import FormatError, some
from ..megatron import flag, is_gated, second_matrix
from .pieces import Heads
from .table import Builtin, Entry, builtin, chosen, matched, models, table, why_not

_DIGITS = re.compile(r"(?<=\.)\d+(?=\.|$)|(?<=\.weight)\d+$|(?<=\.bias)\d+$")
# in a model_config.yaml: NeMo 1 saves Falcon with a layer of its own, which has names of megatron-core's other models
_FALCON = "megatron_falcon_gpt"
_ASK = "or name a table: view.rename('llama')"


def of_model(meta: Mapping[str, Any]) -> Builtin | None:
    """Return the table for the `model_type` of config.json; None if there is no config.json, or it says none.

    The configuration of NeMo 1 decides for Falcon.

    Raises FormatError if there is no table for it.
    """
    config, nemo = meta.get("config"), meta.get("model_config")
    if isinstance(nemo, dict) and nemo.get("name") == _FALCON:
        return builtin("falcon")
    kind = config.get("model_type") if isinstance(config, dict) else None
    if not isinstance(kind, str):
        return None
    if kind not in models():
        why = why_not(kind)
        raise FormatError(
            f"config.json: there is no table of names for model_type {kind!r:.80}{why and f' ({why})'}; there are "
            f"{', '.join(models())}. "
            "Give a table of your own, view.rename({...}), " + _ASK
        )
    return builtin(kind)


def hugging_face(specs: Mapping[str, TensorSpec], args: Any, heads: Heads | None) -> Builtin:
    """Return the table from megatron-core's names to those of the Hugging Face family with this architecture.

    Raises FormatError if no family has it, or if several have it whose models compute different results.
    """
    found = _family(specs, args, heads)
    if isinstance(found, tuple) and len(found) > 1:
        raise FormatError(
            f"names and shapes such as those of {some(list(specs), 2)} are those of several architectures "
            f"({', '.join(found)}), and no configuration says which: name the one that was trained, "
            f"view.rename({found[0]!r})"
        )
    name = found[0] if isinstance(found, tuple) else found
    if name is None:
        raise FormatError(
            f"no architecture with a table is like this model ({some(list(specs), 3)}); there are "
            f"{', '.join(chosen())}. Give a table of your own, view.rename({{...}}), " + _ASK
        )
    if name == "nemotron" and not any(n.endswith((".layer_norm_bias", "layernorm.bias")) for n in specs):
        return Builtin(name, "arcee")  # (the same names, with RMSNorm)
    return Builtin(name, name)


def _family(specs: Mapping[str, TensorSpec], args: Any, heads: Heads | None) -> str | tuple[str, ...] | None:
    """Return the family with these names and shapes: one if all that have them compute the same, several if not."""
    text = "\n".join(specs)
    if any(name.startswith("encoder.layers.") for name in specs):
        return _encoder(text)
    gated, experts, norms = _gated(specs, args), ".mlp.experts." in text, "layernorm.bias" in text
    if any(name.startswith(("language_model.", "thinker.")) for name in specs):  # (one of several, with a tower)
        return None
    if ".mamba_mixer.in_proj." in text:
        return "falcon_h1"
    if ".mixer.in_proj." in text:
        return "nemotron_h"
    if ".self_attention.in_proj." in text:  # (Qwen3-Next or 3.5)
        return None
    if ".linear_kv_down_proj." in text:
        norm = ".kv_layernorm." in text or ".linear_kv_up_proj.layer_norm_" in text
        return "deepseek" if gated and norm and ".indexer." not in text else None
    if ".softmax_offset" in text:
        return "gpt_oss" if gated and experts else None
    if ".post_self_attn_layernorm." in text or ".post_mlp_layernorm." in text:
        return "glm4" if gated and not experts else None
    if ".post_layernorm." in text or ".post_feedforward_layernorm." in text:
        before = ".input_layernorm." in text or ".linear_qkv.layer_norm_" in text
        return None if experts or not gated else "gemma2" if before else "exaone4"
    if gated and experts:
        return _mixture(text)
    if gated:
        return "llama"
    if experts:
        return None
    if "embedding.position_embeddings." in text:
        return _with_positions(specs, heads)
    if ".pre_mlp_layernorm." not in text and ".linear_fc1.layer_norm_" not in text:  # (no layers as megatron-core's)
        return None
    if ".self_attention.linear_proj.bias" not in text:
        return None if ".linear_qkv.bias" in text else _without_biases(text, args)
    if _squares(args):  # (of Nemotron's, with biases)
        return "nemotron" if norms else None
    alone = heads is not None and heads.queries == heads.groups  # StarCoder 2 has groups, GPT-NeoX has none
    return "gpt_neox" if alone and norms and "decoder.final_layernorm.bias" in text else None


def _with_positions(specs: Mapping[str, TensorSpec], heads: Heads | None) -> str | tuple[str, ...] | None:
    """Return the family of a model with learned positions: GPT-2 has as many heads of k and v as of q, GPTBigCode
    one."""
    if heads is not None:
        return "gpt2" if heads.groups == heads.queries else "gpt_bigcode" if heads.groups == 1 else None
    shapes = {spec.shape for name, spec in specs.items() if name.endswith(".self_attention.linear_qkv.weight")}
    if all(len(shape) == 2 and shape[0] == 3 * shape[1] for shape in shapes):
        return "gpt2"
    return ("gpt_bigcode", "gpt2") if all(len(shape) == 2 for shape in shapes) else None


def _without_biases(text: str, args: Any) -> str | tuple[str, ...] | None:
    """Return the families without a gate whose attention has no biases. What an MLP does between its matrices, and
    whether it is beside attention or behind it, no name says."""
    squares = _squares(args)
    if not any(name.endswith(("layer_norm_bias", "layernorm.bias")) for name in text.split("\n")):
        return None if squares is False else "nemotron"
    if squares:
        return "nemotron"
    others = ["gpt_neox"] if ".mlp.linear_fc1.bias" in text else ["starcoder2"]
    if others == ["starcoder2"] and ".input_layernorm." in text and ".pre_mlp_layernorm." in text:
        others.append("falcon")
    return tuple(others if squares is False else ["nemotron", *others])


def _squares(args: Any) -> bool | None:
    """Return whether MLPs square what a ReLU gives, and norms are stored less 1, which only Nemotron's do here; None if
    the arguments do not say."""
    return flag(args, "squared_relu", "apply_layernorm_1p")


def _encoder(text: str) -> str | None:
    """Return the family of a model with an encoder."""
    if ".cross_attention." in text:
        return "t5" if "encoder_relative_pos_emb." in text else None
    if "embedding.tokentype_embeddings." not in text:
        return None
    return "bert" if ".post_att_layernorm." in text else "megatron_bert"


def _mixture(text: str) -> str | None:
    if ".shared_experts.gate_weight" in text:
        return "qwen_moe"
    if ".shared_experts." in text:  # (Llama 4, ERNIE, EXAONE, dots and others have no such bias)
        if ".linear_proj.bias" in text:  # (ERNIE with biases)
            return None
        return "glm_moe" if ".linear_qkv.bias" in text and ".router.expert_bias" in text else None
    if ".router.expert_bias" in text:  # (several families, which name it differently)
        return None
    if ".q_layernorm." in text:
        return "qwen_moe"
    return None if ".mlp.linear_fc1.weight" in text else "mixtral"  # (which has no dense layers)


def megatron(specs: Mapping[str, TensorSpec]) -> Builtin:
    """Return the table whose right side has these names.

    Raises FormatError if no table has them, or if several do and give them different names.
    """
    names = {_DIGITS.sub("0", name): name for name in specs}
    results = {}
    for name in chosen():
        entries = table(name)
        found = {short: _result(short, entries, names, specs) for short in names}
        needed = Builtin(name, name).needs
        if all(any(matched(short, one) for short in names) for one in needed):
            results[name] = {short: line for short, line in found.items() if line is not None}
    most = max(map(len, results.values()), default=0)
    best = [name for name, result in results.items() if len(result) == most]
    if not most:
        raise FormatError(
            f"no table has names such as {some(list(specs), 3)} on the side of Hugging Face; there are "
            f"{', '.join(chosen())}. Give a table of your own: view.rename({{...}}, reverse=True)"
        )
    if any(results[name] != results[best[0]] for name in best):
        raise FormatError(
            f"names such as {some(list(specs), 3)} are those of several architectures ({', '.join(best)}), and no "
            f"config.json says which: put it beside the weights, or view.rename({best[0]!r}, reverse=True) names one"
        )
    return Builtin(best[0], best[0])


def check_matrices(
    meta: Mapping[str, Any], specs: Mapping[str, TensorSpec], entries: list[Entry], model: Builtin
) -> None:
    """Raise FormatError if matrices do not lie as in the model of config.json: [in, out] or [out, in], as their biases
    tell. Otherwise the names are those of another model, such as GPT-2's beside a config.json of GPTBigCode."""
    if of_model(meta) is None:
        return
    shorts = {_DIGITS.sub("0", name): name for name in specs if name.endswith(".weight")}
    names = {_DIGITS.sub("0", name): name for name in specs}
    for short, name in shorts.items():
        fitting = [e for e in entries if len(e.right) == 1 and not e.stack and matched(short, e.right[0])]
        if fitting and not any(_lies_so(short, entry, names, specs) for entry in fitting):
            raise FormatError(
                f"config.json is not of this model: {name} has shape {list(specs[name].shape)}, and its bias says that "
                f"it lies otherwise than matrices of model_type {model.model!r}. Put the config.json and the tensors "
                "of one model together, or name a table: view.rename('gpt2')"
            )


def _result(
    name: str, entries: list[Entry], names: Mapping[str, str], specs: Mapping[str, TensorSpec]
) -> tuple[Any, ...] | None:
    """Return what becomes of a name on the right side, or () for one of the left side, which stays; None if the table
    has no entry whose names are all there."""
    for entry in entries:
        if matched(name, entry.left):
            return ()
        for right in entry.right:
            match = matched(name, right)
            if match is None or not all(one.format(**match.groupdict()) in names for one in entry.right):
                continue
            if entry.beside and entry.beside.format(**match.groupdict()) not in names:
                continue
            if len(entry.right) == 1 and not _lies_so(name, entry, names, specs):
                continue
            return entry.left, entry.right.index(right), entry.cut, entry.transpose, entry.stack
    return None


def _lies_so(name: str, entry: Entry, names: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> bool:
    """Return whether a matrix is [in, out] or [out, in] as an entry says, if its bias tells it."""
    head, _, last = name.rpartition(".")
    bias = names.get(f"{head}.bias") if last == "weight" else None
    shape, length = specs[names[name]].shape, () if bias is None else specs[bias].shape
    return len(shape) != 2 or len(length) != 1 or shape[1 if entry.transpose else 0] == length[0]


def _gated(specs: Mapping[str, TensorSpec], args: Any) -> bool:
    """Return whether the first MLP matrix fuses gate and up: it has twice the rows that the second has columns."""
    for name, spec in specs.items():
        second = specs.get(second_matrix(name) or "")
        if second is not None and len(spec.shape) == len(second.shape) == 2:
            return spec.shape[0] == 2 * second.shape[1]
        if name.endswith(".experts.weight1") and len(spec.shape) == 3:
            second = specs.get(f"{name[:-1]}2")
            if second is not None and len(second.shape) == 3:
                return spec.shape[2] == 2 * second.shape[1]
    return is_gated(args) is not False
