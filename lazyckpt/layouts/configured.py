"""What config.json of Hugging Face says about names and shapes, and whether a model's tensors agree.

A configuration of another model, or of another size, would choose another table of names and other heads without a
word. So what follows its numbers (renaming, writers) checks the shapes before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ..core.box import Shape
from ..errors import FormatError

EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
)
HEADS = ("lm_head.weight", "output_layer.weight", "embed_out.weight")
# keys of config.json, and attributes of Megatron-LM's args
HIDDEN = ("hidden_size", "n_embd", "d_model", "dim")
WORDS = ("vocab_size", "padded_vocab_size")
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
# values of model_type: architectures whose names and shapes follow from the numbers of the configuration
PLAIN = {
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "granite", "olmo",
    "olmo2", "cohere", "starcoder2", "stablelm", "phi", "smollm3",
}  # fmt: skip
# further ones whose fused q, k and v have rows for all heads and nothing else
_FUSED = PLAIN | {"gpt2", "gpt_bigcode", "gpt_neox", "falcon", "RefinedWeb", "RefinedWebModel", "nemotron", "arcee"}
_QKV = (".query_key_value.weight", ".linear_qkv.weight")
_OTHER_WIDTHS = ("embedding_size", "word_embed_proj_dim")  # embeddings that are not of the hidden size


class Rule(NamedTuple):
    """A shape that the configuration says.

    Attributes
    ----------
    ending
        The names that end so have the shape.
    shape
        The shape, in elements; None for a length that is not known.
    why
        The keys that it follows from.
    """

    ending: str
    shape: tuple[int | None, ...]
    why: str


def number(config: Mapping[str, Any], *names: str) -> int:
    """Return the first positive number under one of the names; 0 if there is none.

    >>> number({"n_layer": 2, "hidden_size": None}, "num_hidden_layers", "n_layer")
    2
    """
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return 0


def of_config(config: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the shapes of attention and MLP by config.json of Hugging Face."""
    if config.get("model_type") not in PLAIN or config.get("quantization_config"):
        return
    hidden, heads = number(config, "hidden_size"), number(config, "num_attention_heads")
    inner = number(config, "intermediate_size")
    head = number(config, "head_dim") or (hidden // heads if heads and hidden % heads == 0 else 0)
    groups = number(config, "num_key_value_heads") or heads
    if not hidden:
        return
    if heads and not head:
        head = -1  # no shape has it
    if heads:
        why, size = "num_attention_heads", heads * head
        yield Rule(".self_attn.q_proj.weight", (size, hidden), why)
        yield Rule(".self_attn.o_proj.weight", (hidden, size), why)
        for part in "kv":
            yield Rule(f".self_attn.{part}_proj.weight", (groups * head, hidden), "num_key_value_heads")
    if inner:
        for part in ("gate", "up"):
            yield Rule(f".mlp.{part}_proj.weight", (inner, hidden), "intermediate_size")
        for second in ("down_proj", "linear_fc2"):  # the latter is megatron-core's
            yield Rule(f".mlp.{second}.weight", (hidden, inner), "intermediate_size")
    for norm in (".input_layernorm.weight", ".post_attention_layernorm.weight"):
        yield Rule(norm, (hidden,), "hidden_size")


def check_config(meta: Mapping[str, Any], shapes: Mapping[str, Shape], *, rows: int = 0, whole: bool = False) -> None:
    """Raise FormatError if config.json contradicts the shapes of a model's tensors.

    Nothing is said about quantized models, whose shapes are others. ``rows`` is how many rows all heads of q, k and v
    have by the configuration; 0 if that is not known. ``whole`` says that all layers have to be there, and no other.
    """
    config = meta.get("config")
    if not isinstance(config, Mapping) or any(key in config for key in ("quantization_config", "quantization")):
        return
    inner = config.get("text_config")
    text = {**config, **inner} if isinstance(inner, Mapping) else config
    line = next(_contradictions(text, shapes, rows, whole), None)
    if line is not None:
        kind = config.get("model_type")
        raise FormatError(
            f"config.json is not of this model: {line}. Put the config.json (model_type {kind!r:.80} here) and the "
            "tensors of one model together"
        )


def _contradictions(config: Mapping[str, Any], shapes: Mapping[str, Shape], rows: int, whole: bool) -> Iterator[str]:
    hidden, words, layers = number(config, *HIDDEN), number(config, *WORDS), number(config, *LAYERS)
    embeddings = [name for name in shapes if name.endswith(EMBEDDINGS)]
    for name in (*embeddings, *(name for name in shapes if name.endswith(HEADS))):
        shape = shapes[name]
        if len(shape) != 2:
            continue
        if hidden and hidden not in shape and not any(config.get(key) for key in _OTHER_WIDTHS):
            yield f"{name} has shape {list(shape)}, and config.json says that the hidden size is {hidden:,}"
        elif words and shape[0] < words:
            yield f"{name} has {shape[0]:,} rows, and config.json says that there are {words:,} words"
    if len(embeddings) != 1:  # (of several models, or of a part of one)
        return
    start = embeddings[0].removesuffix("embed_tokens.weight")
    rules = {rule.ending: rule for rule in of_config(config)}
    endings, inside = tuple(rules), (f"{start}layers.", "transformer.h.", "gpt_neox.layers.", "decoder.layers.")
    last = -1
    for name, shape in shapes.items():
        prefix = next((one for one in inside if name.startswith(one)), None)
        if prefix is None:
            continue
        layer = name.removeprefix(prefix).partition(".")[0]
        if rows and shape and shape[0] != rows and name.endswith(_QKV) and config.get("model_type") in _FUSED:
            yield f"{name} has shape {list(shape)}, and by the heads of config.json it has {rows:,} rows"
        last = max(last, int(layer)) if layer.isdecimal() and len(layer) < 10 else last
        if name.endswith(endings):
            rule = next(rules[ending] for ending in endings if name.endswith(ending))
            if shape != rule.shape:
                yield f"{name} has shape {list(shape)}, and by {rule.why} of config.json it is {list(rule.shape)}"
    more = number(config, "num_nextn_predict_layers", "mtp_num_layers")
    if whole and layers and last >= 0 and not layers <= last + 1 <= layers + more:
        yield f"there are {last + 1:,} layers, and config.json says {layers:,}"
