"""The metadata of a GGUF file, from config.json and the tokenizer of a Hugging Face folder.

Keys: gguf 0.19.0, constants.py `Keys`; what llama.cpp's convert_hf_to_gguf.py writes for `LlamaModel`, `Qwen2Model` and
`Qwen3Model`. Tokenizers: `TextModel._set_vocab_gpt2` and `_set_vocab_sentencepiece` there. Where that program finds out
by a sample text how a tokenizer cuts words, the regular expression in tokenizer.json decides here.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CorruptError, DataError, LazyckptError, MissingFileError

Entries = dict[str, tuple[str, Any]]  # key -> kind, value

# The `model_type` of config.json -> GGUF's architecture.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# The regular expression that cuts words -> its name in llama.cpp (src/llama-vocab.cpp, `llm_tokenizer_bpe`).
_PRE = {_WORDS % "{1,3}": "llama-bpe", _WORDS % "": "qwen2"}
_NORMAL, _UNKNOWN, _CONTROL, _USER, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6  # kinds of tokens


def config_in(folder: Path | None, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json: that of the view's metadata, or the file in the folder. Raises MissingFileError."""
    told = meta.get("config")
    found = told if isinstance(told, Mapping) else _json(folder, "config.json")
    if not isinstance(found, Mapping):
        raise MissingFileError(
            "to_gguf needs the config.json of the model, which is not beside the checkpoint: name its folder by config="
        )
    return dict(found)


def _json(folder: Path | None, name: str) -> Any:
    if folder is None or not (folder / name).is_file():
        return None
    try:
        return json.loads((folder / name).read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise CorruptError(f"{folder / name} is not valid JSON: {e}") from None


def _count(settings: Mapping[str, Any], *keys: str, default: Any = None) -> int:
    """Return a positive number of config.json, by the first key that is there. Raises DataError."""
    value = next((settings[key] for key in keys if settings.get(key) is not None), default)
    if type(value) is not int or not 0 < value < 1 << 32:
        raise DataError(f"config.json: {keys[0]} is {value!r:.40}, and to_gguf needs a positive number")
    return value


def heads(settings: Mapping[str, Any]) -> tuple[int, int]:
    """Return the numbers of heads of q and of k."""
    queries = _count(settings, "num_attention_heads")
    return queries, _count(settings, "num_key_value_heads", default=queries)


def _head_dim(settings: Mapping[str, Any]) -> int:
    return _count(settings, "head_dim", default=_count(settings, "hidden_size") // heads(settings)[0])


def _rope(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of rotary embeddings as transformers 5 writes them, from those of older versions, too."""
    found = settings.get("rope_parameters")
    if isinstance(found, Mapping):
        return found
    scaling = settings.get("rope_scaling")
    found = dict(scaling) if isinstance(scaling, Mapping) else {}
    found.setdefault("rope_type", found.get("type", "default"))
    return {"rope_theta": settings.get("rope_theta", 10000.0), **found}


def metadata(architecture: str, settings: Mapping[str, Any], file_type: int, *, quantized: bool) -> Entries:
    """Return the metadata of the model. Raises DataError for what to_gguf does not write."""
    queries, keys = heads(settings)
    dim, rope = _head_dim(settings), _rope(settings)
    if settings.get("hidden_act", "silu") not in ("silu", "swish"):
        raise DataError(f"config.json: hidden_act is {settings['hidden_act']!r:.40}, and llama.cpp computes silu")
    entries: Entries = {
        "general.architecture": ("str", architecture),
        "general.type": ("str", "model"),
        "general.file_type": ("u32", file_type),
    }
    if quantized:
        entries["general.quantization_version"] = ("u32", 2)
    own: Entries = {
        "block_count": ("u32", _count(settings, "num_hidden_layers")),
        "context_length": ("u32", _count(settings, "max_position_embeddings")),
        "embedding_length": ("u32", _count(settings, "hidden_size")),
        "feed_forward_length": ("u32", _count(settings, "intermediate_size")),
        "vocab_size": ("u32", _count(settings, "vocab_size")),
        "attention.head_count": ("u32", queries),
        "attention.head_count_kv": ("u32", keys),
        "attention.key_length": ("u32", dim),
        "attention.value_length": ("u32", dim),
        "attention.layer_norm_rms_epsilon": ("f32", float(settings.get("rms_norm_eps", 1e-6))),
        "rope.dimension_count": ("u32", dim),
        "rope.freq_base": ("f32", float(rope.get("rope_theta", 10000.0))),
    }
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        own["rope.scaling.type"] = ("str", "linear")
        own["rope.scaling.factor"] = ("f32", float(rope["factor"]))
    elif kind not in ("default", "llama3"):
        raise DataError(f"config.json: rotary embeddings are scaled by {kind!r:.40}, which to_gguf does not write")
    return entries | {f"{architecture}.{key}": value for key, value in own.items()}


def factors(settings: Mapping[str, Any]) -> list[float] | None:
    """Return the tensor ``rope_freqs``: what Llama 3.1 divides the frequencies by; None if the model does not
    (convert_hf_to_gguf.py, `LlamaModel.generate_extra_tensors`)."""
    rope = _rope(settings)
    if rope.get("rope_type") != "llama3":
        return None
    dim = _head_dim(settings)
    steps = np.arange(0, dim, 2, dtype=np.float32) / np.float32(dim)
    frequencies = 1.0 / np.float32(rope.get("rope_theta", 10000.0)) ** steps
    factor = float(rope.get("factor", 8.0))
    low, high = float(rope.get("low_freq_factor", 1.0)), float(rope.get("high_freq_factor", 4.0))
    context = int(rope.get("original_max_position_embeddings", 8192))
    found = []
    for length in (2 * math.pi / float(frequency) for frequency in frequencies):
        if length < context / high:
            found.append(1.0)
        elif length > context / low:
            found.append(factor)
        else:
            smooth = (context / length - low) / (high - low)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return found


# -- the tokenizer


def tokenizer(folder: Path | None, settings: Mapping[str, Any]) -> tuple[Entries, dict[str, str]]:
    """Return the metadata of the tokenizer, and what is left out. Raises DataError for kinds that to_gguf does not
    write."""
    try:
        return _tokenizer(folder, settings)
    except LazyckptError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, struct.error) as e:
        raise CorruptError(f"the tokenizer in {folder} is damaged, or of an unknown form: {e!r:.200}") from None


def _tokenizer(folder: Path | None, settings: Mapping[str, Any]) -> tuple[Entries, dict[str, str]]:
    size = _count(settings, "vocab_size")
    about = _json(folder, "tokenizer.json")
    if folder is not None and (folder / "tokenizer.model").is_file():
        added = about.get("added_tokens") if isinstance(about, Mapping) else None
        entries = _sentencepiece((folder / "tokenizer.model").read_bytes(), added or (), size)
    elif isinstance(about, Mapping):
        entries = _pairs(about, size)
    else:
        entries = {"tokenizer.ggml.model": ("str", "no_vocab")}
        return entries, {"tokenizer": "neither tokenizer.json nor tokenizer.model is beside config.json"}
    words = _json(folder, "tokenizer_config.json")
    words = words if isinstance(words, Mapping) else {}
    ids = {word: n for n, word in enumerate(entries["tokenizer.ggml.tokens"][1])}
    for key, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = words.get(f"{key}_token")
        token = token.get("content") if isinstance(token, Mapping) else token
        number = ids.get(token) if isinstance(token, str) else settings.get(f"{key}_token_id")
        number = number[0] if isinstance(number, list) and number else number
        if type(number) is int and 0 <= number < size:
            entries[f"tokenizer.ggml.{name}_token_id"] = ("u32", number)
    for key in ("add_bos_token", "add_eos_token"):
        if isinstance(words.get(key), bool):
            entries[f"tokenizer.ggml.{key}"] = ("bool", words[key])
    if isinstance(words.get("chat_template"), str):
        entries["tokenizer.chat_template"] = ("str", words["chat_template"])
    return entries, {}


def _pairs(about: Mapping[str, Any], size: int) -> Entries:
    """Return a vocabulary of byte pairs, from tokenizer.json."""
    model = about.get("model")
    model = model if isinstance(model, Mapping) else {}
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise DataError(
            f"tokenizer.json holds a tokenizer of the type {model.get('type')!r:.40}"
            f"{' with bytes as tokens' if model.get('byte_fallback') else ''}, whose scores are in tokenizer.model "
            "only: put that file beside config.json"
        )
    words: dict[int, tuple[str, int]] = {n: (word, _NORMAL) for word, n in model["vocab"].items()}
    for one in about.get("added_tokens") or ():
        words[one["id"]] = one["content"], _CONTROL if one.get("special") else _USER
    tokens, kinds = _filled(words, size)
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", ())]
    return {
        "tokenizer.ggml.model": ("str", "gpt2"),
        "tokenizer.ggml.pre": ("str", _cuts(about.get("pre_tokenizer"))),
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.token_type": ("[i32]", kinds),
        "tokenizer.ggml.merges": ("[str]", merges),
    }


def _filled(words: Mapping[int, tuple[str, int]], size: int) -> tuple[list[str], list[int]]:
    """Return all tokens and their kinds. Rows of the embedding without a token have a name of their own."""
    if any(not 0 <= n < size for n in words):
        raise DataError(f"the tokenizer has {max(words) + 1:,} tokens, and config.json says vocab_size = {size:,}")
    every = [words.get(n, (f"[PAD{n}]", _UNUSED)) for n in range(size)]
    return [word for word, _ in every], [kind for _, kind in every]


def _cuts(pre: Any) -> str:
    """Return llama.cpp's name for how text is cut into words. Raises DataError if it has no known name."""
    parts = pre.get("pretokenizers", [pre]) if isinstance(pre, Mapping) else []
    patterns = [one["pattern"].get("Regex") for one in parts if one.get("type") == "Split"]
    plain = [one for one in parts if one.get("type") == "ByteLevel"]
    if len(plain) == 1 and not patterns and plain[0].get("use_regex", True) and len(parts) == 1:
        return "gpt-2"
    if len(patterns) == 1 and patterns[0] in _PRE and len(plain) == 1 and len(parts) == 2:
        return _PRE[patterns[0]]
    raise DataError(
        "tokenizer.json cuts text into words in a way for which to_gguf knows no name in llama.cpp: "
        "write the file with convert_hf_to_gguf.py of llama.cpp"
    )


def _sentencepiece(data: bytes, added: Any, size: int) -> Entries:
    """Return a vocabulary of sentencepiece, from tokenizer.model (sentencepiece_model.proto, `ModelProto`)."""
    words: dict[int, tuple[str, int]] = {}
    scores: dict[int, float] = {}
    extra: Entries = {}
    for field, value in _fields(data):
        if field == 1:  # pieces
            piece = dict(_fields(value))
            n = len(words)
            words[n] = bytes(piece.get(1, b"")).decode("utf-8"), piece.get(3, _NORMAL)
            (scores[n],) = struct.unpack("<f", piece.get(2, bytes(4)))
        elif field == 2 and dict(_fields(value)).get(3, 1) not in (1, 2):  # trainer_spec.model_type
            raise DataError("tokenizer.model is neither of unigrams nor of byte pairs, which to_gguf does not write")
        elif field == 3:  # normalizer_spec
            spec = dict(_fields(value))
            extra["tokenizer.ggml.add_space_prefix"] = ("bool", bool(spec.get(3, 1)))
    for one in added:
        if words.get(one["id"], ("", 0))[0] != one["content"]:
            words[one["id"]] = one["content"], _CONTROL if one.get("special") else _USER
            scores[one["id"]] = -1000.0
    tokens, kinds = _filled(words, size)
    return {
        "tokenizer.ggml.model": ("str", "llama"),
        "tokenizer.ggml.pre": ("str", "default"),
        "tokenizer.ggml.tokens": ("[str]", tokens),
        "tokenizer.ggml.scores": ("[f32]", [scores.get(n, -10000.0) for n in range(size)]),
        "tokenizer.ggml.token_type": ("[i32]", kinds),
        **extra,
    }


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the fields of a message of protocol buffers: numbers as int, all else as bytes. Raises CorruptError."""
    at = 0

    def number() -> int:
        nonlocal at
        value = shift = 0
        while shift < 64:
            byte = data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
        raise IndexError

    try:
        while at < len(data):
            key = number()
            kind = key & 7
            if kind == 0:
                yield key >> 3, number()
                continue
            size = {1: 8, 5: 4}[kind] if kind != 2 else number()
            if at + size > len(data):
                raise IndexError
            at += size
            yield key >> 3, data[at - size : at]
    except (IndexError, KeyError):
        raise CorruptError("tokenizer.model is no file of sentencepiece, or damaged") from None
