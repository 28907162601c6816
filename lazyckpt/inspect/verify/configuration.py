"""Names and shapes against what describes the model: config.json, the arguments of Megatron-LM, the tokenizer.

Shapes of attention and MLP are compared only for the architectures of `configured.PLAIN`, whose names and shapes follow
from the numbers of the configuration. Embeddings, layers and experts are compared for all.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ...errors import LazyckptError, some
from ...io.storage.base import Store
from ...layouts.configured import (
    EMBEDDINGS,
    EXPERTS,
    HEADS,
    HIDDEN,
    LAYERS,
    PLAIN,
    WORDS,
    Rule,
    number,
    of_config,
)
from ...lazy import LazyArray, shape_of
from ..report import Finding

_DOCUMENT = 64 << 20  # bytes of a tokenizer's file that is read
# names of a language model outside its layers
_OUTSIDE = re.compile(
    r"(?:^|\.)(?:embed_tokens|norm|final_layernorm|lm_head|rotary_emb|lora_\w+|modules_to_save)(?:\.|$)"
)
_LAYER = re.compile(r"(.*?\b(?:layers|h|blocks))\.(\d+)\.(.+)")
_EXPERT = re.compile(r"(.*\bexperts)\.(\d+)\.(.+)")


def configuration(store: Store, meta: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield where shapes and names contradict config.json of Hugging Face, or the args of Megatron-LM."""
    config, arguments = _config(meta), _arguments(meta)
    embeddings = [name for name in tensors if name.endswith(EMBEDDINGS)]
    if config:
        yield from _vocabulary(config, embeddings + [name for name in tensors if name.endswith(HEADS)], tensors)
        yield from _shapes(of_config(config), tensors, "config.json")
        yield from _strangers(config, tensors)
    elif arguments:
        yield from _shapes(_of_arguments(arguments), tensors, "the arguments of the run")
    yield from _counts(config or arguments, tensors)
    yield from _tokenizer(store, embeddings, tensors)


def _config(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    found = meta.get("config")
    if not isinstance(found, Mapping):
        return {}
    inner = found.get("text_config")
    return {**found, **inner} if isinstance(inner, Mapping) else found


def _arguments(meta: Mapping[str, Any]) -> Mapping[str, Any]:
    args = meta.get("args")
    plain = args if isinstance(args, Mapping) else getattr(args, "__dict__", None) or getattr(args, "state", None)
    return plain if isinstance(plain, Mapping) else {}


def _vocabulary(config: Mapping[str, Any], names: Sequence[str], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    hidden, words = number(config, *HIDDEN), number(config, *WORDS)
    for name in names:
        shape = shape_of(tensors[name])
        if len(shape) != 2:
            continue
        if hidden and hidden not in shape and "embedding_size" not in config and "word_embed_proj_dim" not in config:
            text = f"{name} has shape {list(shape)}, and the configuration says hidden size {hidden:,}"
            yield Finding("config-mismatch", text, tensor=name)
        elif words and shape[0] < words:
            text = f"{name} has {shape[0]:,} rows, and the configuration says {words:,} words"
            yield Finding("config-mismatch", text, tensor=name)
        elif words and shape[0] > words:
            text = f"{name} has {shape[0]:,} rows for {words:,} words"
            yield Finding("padded-vocabulary", text, tensor=name, details={"rows": shape[0], "words": words})


def _of_arguments(args: Mapping[str, Any]) -> Iterator[Rule]:
    """Yield the shapes by the arguments of Megatron-LM, for the names of megatron-core."""
    hidden, inner = number(args, "hidden_size"), number(args, "ffn_hidden_size")
    if not hidden:
        return
    # (not the rows: those that Megatron-LM pads the vocabulary with are not in the view)
    yield Rule("word_embeddings.weight", (None, hidden), "hidden_size")
    yield Rule("output_layer.weight", (None, hidden), "hidden_size")
    yield Rule(".input_layernorm.weight", (hidden,), "hidden_size")
    heads, size = number(args, "num_attention_heads"), number(args, "kv_channels")
    if heads and size and not args.get("multi_latent_attention"):
        groups = number(args, "num_query_groups") if args.get("group_query_attention") else heads
        yield Rule(".self_attention.linear_qkv.weight", ((heads + 2 * groups) * size, hidden), "num_attention_heads")
        yield Rule(".self_attention.linear_proj.weight", (hidden, heads * size), "num_attention_heads")
    if inner:
        rows = 2 * inner if args.get("swiglu") else inner
        yield Rule(".mlp.linear_fc1.weight", (rows, hidden), "ffn_hidden_size")
        yield Rule(".mlp.linear_fc2.weight", (hidden, inner), "ffn_hidden_size")


def _shapes(rules: Iterator[Rule], tensors: Mapping[str, LazyArray], by: str) -> Iterator[Finding]:
    """Yield a finding for each rule that tensors contradict."""
    table = {rule.ending: rule for rule in rules}
    endings = tuple(table)
    odd: dict[str, list[str]] = {}
    for name in tensors if endings else ():
        if not name.endswith(endings):
            continue
        ending = next(ending for ending in endings if name.endswith(ending))
        want, have = table[ending].shape, shape_of(tensors[name])
        if len(have) != len(want) or any(b is not None and a != b for a, b in zip(have, want, strict=True)):
            odd.setdefault(ending, []).append(name)
    for ending, names in odd.items():
        told = ", ".join("any" if n is None else "no such length" if n < 0 else f"{n}" for n in table[ending].shape)
        have = shape_of(tensors[names[0]])
        text = f"{names[0]} has shape {list(have)}, by {table[ending].why} in {by} it is [{told}]"
        text += f"; so in {len(names) - 1:,} more" if len(names) > 1 else ""
        yield Finding("config-mismatch", text, tensor=names[0], details={"tensors": names[:1000]})


def _counts(config: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield a finding if there is another number of layers, or of experts, than the configuration says."""
    layers, experts = number(config, *LAYERS), number(config, *EXPERTS)
    if not layers and not experts:
        return
    found: dict[str, set[int]] = {}
    numbers: dict[str, set[int]] = {}
    for name in tensors:
        match = _LAYER.match(name)
        if match is not None:
            found.setdefault(match[1], set()).add(int(match[2]))
        match = _EXPERT.match(name)
        if match is not None:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    more = number(config, "num_nextn_predict_layers", "mtp_num_layers")
    if layers and len(found) == 1:
        (only,) = found.values()
        if len(only) not in (layers, layers + more):
            yield Finding("config-mismatch", f"there are {len(only):,} layers, and the configuration says {layers:,}")
    odd = {where: held for where, held in numbers.items() if experts and len(held) != experts}
    if odd:
        where, held = next(iter(odd.items()))
        text = f"{where} has {len(held):,} experts, and the configuration says {experts:,}"
        text += f"; so in {len(odd) - 1:,} more layers" if len(odd) > 1 else ""
        yield Finding("config-mismatch", text, details={"layers": list(odd)[:1000]})


def _strangers(config: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield a finding about names that a plain language model does not have: outside its layers, or in one layer
    alone, because all layers of these architectures have the same names."""
    architectures = config.get("architectures")
    if config.get("model_type") not in PLAIN or not isinstance(architectures, list):
        return
    if not all(isinstance(name, str) and name.endswith("ForCausalLM") for name in architectures):
        return
    layers: set[str] = set()
    counts: Counter[str] = Counter()
    first: dict[str, str] = {}
    outside: list[str] = []
    for name in tensors:
        match = _LAYER.match(name)
        if match is None:
            outside += [] if _OUTSIDE.search(name) else [name]
        else:
            layers.add(f"{match[1]}.{match[2]}")
            rest = match[3]
            if ".experts." not in rest and not rest.startswith("mlp."):  # in some models, some layers have no experts
                counts[rest] += 1
                first.setdefault(rest, name)
    odd = [first[rest] for rest, count in counts.items() if count == 1 and len(layers) > 1]
    if odd and len(odd) < len(counts) / 2:
        text = f"no other layer has the like of {some(odd)}"
        yield Finding("unexplained-name", text, tensor=odd[0] if len(odd) == 1 else None, details={"tensors": odd})
    if outside and layers:
        text = f"{architectures[0]} has no {some(outside)}"
        details = {"tensors": outside[:1000]}
        yield Finding("unexplained-name", text, tensor=outside[0] if len(outside) == 1 else None, details=details)


def tied(meta: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> list[tuple[str, str]]:
    """Return the pairs of embedding and head that config.json ties, if the files hold both."""
    if _config(meta).get("tie_word_embeddings") is not True:
        return []
    embeddings = [name for name in tensors if name.endswith(EMBEDDINGS)]
    heads = [name for name in tensors if name.endswith(HEADS)]
    return [(embeddings[0], heads[0])] if len(embeddings) == len(heads) == 1 else []


# -- the tokenizer


def _tokenizer(store: Store, embeddings: Sequence[str], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield a finding if the files of a tokenizer have tokens without a row."""
    if len(embeddings) != 1:
        return
    (name,) = embeddings
    rows = shape_of(tensors[name])[0]
    for path, numbers in _TOKENS.items():
        try:
            size = store.stat(path).size
            if size > _DOCUMENT:
                continue
            last = max(numbers(json.loads(bytes(store.read(path, 0, size)))), default=-1)
        except (LazyckptError, OSError):
            continue  # there is none
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            yield Finding("not-examined", f"{path} is of a kind that is not known", path)
            continue
        if type(last) is int and last >= rows:
            text = f"{path} has the token number {last:,}, and {name} has {rows:,} rows"
            yield Finding("tokenizer-mismatch", text, path, name)
            return


def _tokens(about: Any) -> list[int]:
    vocabulary = about["model"]["vocab"]
    numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    return [*numbers, *(token["id"] for token in about.get("added_tokens", ()))]


_TOKENS: dict[str, Callable[[Any], list[int]]] = {
    "tokenizer.json": _tokens,
    "added_tokens.json": lambda about: list(about.values()),
    "tokenizer_config.json": lambda about: [int(number) for number in about.get("added_tokens_decoder", ())],
}
