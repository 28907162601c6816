"""Checks that read no tensor data: what opening found, shapes against the configuration, the bytes of each file."""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from ...core.fragments import fragments_of
from ...core.index import Archive, FileInfo
from ...errors import LazyckptError, some
from ...io.storage.base import Store
from ...lazy import LazyArray, shape_of
from ..report import Finding
from .sweep import Target

_HOUR = 3600 * 10**9
_DOCUMENT = 64 << 20  # bytes of a tokenizer's file that is read
_EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "tok_embeddings.weight",
    "embed_in.weight",
)
_HEADS = ("lm_head.weight", "output_layer.weight", "embed_out.weight")
_SHAPED = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg", "fp32")  # as their parameters


def shapes(states: Mapping[str, Mapping[str, LazyArray]]) -> Iterator[Finding]:
    """Yield the states of the optimizer whose shapes are not those of their parameters."""
    names = list(states)
    if not names:
        return
    weights = states[names[0]]
    for state in names[1:]:
        if state not in _SHAPED:
            continue
        for name, tensor in states[state].items():
            own = weights.get(name) if name in weights else None
            if own is None:
                continue
            have, want = shape_of(tensor), shape_of(own)
            if have != want and not (len(have) == 1 and have[0] == prod(want)):  # flat parameters are undecided
                text = f"{state}: {name} has shape {list(have)}, its parameter has {list(want)}"
                yield Finding("wrong-moment", text, tensor=name, details={"state": state})


def configuration(store: Store, meta: Mapping[str, Any], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield where shapes and names contradict config.json of Hugging Face, or the args of Megatron-LM."""
    config = _config(store, meta)
    hidden, vocabulary, layers = (_number(config, *names) for names in _CONFIGURED)
    embeddings = [name for name in tensors if name.endswith(_EMBEDDINGS)]
    for name in embeddings + [name for name in tensors if name.endswith(_HEADS)]:
        shape = shape_of(tensors[name])
        if len(shape) != 2 or not vocabulary:
            continue
        if hidden and hidden not in shape:
            text = f"{name} has shape {list(shape)}, and the configuration says hidden size {hidden:,}"
            yield Finding("config-mismatch", text, tensor=name)
        elif shape[0] < vocabulary:
            text = f"{name} has {shape[0]:,} rows, and the configuration says {vocabulary:,} words"
            yield Finding("config-mismatch", text, tensor=name)
        elif shape[0] > vocabulary:
            text = f"{name} has {shape[0]:,} rows for {vocabulary:,} words"
            yield Finding("padded-vocabulary", text, tensor=name, details={"rows": shape[0], "words": vocabulary})
    if layers:
        found = _layers(tensors)
        if found and found != layers:
            text = f"there are {found:,} layers, and the configuration says {layers:,}"
            yield Finding("config-mismatch", text)
    yield from _tokenizer(store, embeddings, tensors)


# keys of config.json, and attributes of Megatron-LM's args
_CONFIGURED = (
    ("hidden_size", "n_embd", "d_model", "dim"),
    ("vocab_size", "padded_vocab_size"),
    ("num_hidden_layers", "n_layer", "num_layers", "n_layers"),
)


def _config(store: Store, meta: Mapping[str, Any]) -> Mapping[str, Any]:
    found = meta.get("config")
    if isinstance(found, Mapping):
        inner = found.get("text_config")
        return {**found, **inner} if isinstance(inner, Mapping) else found
    args = meta.get("args")
    if args is not None:
        plain = args if isinstance(args, Mapping) else getattr(args, "__dict__", None) or getattr(args, "state", None)
        if isinstance(plain, Mapping):
            # without the vocabulary: the rows that Megatron-LM pads it with are not in the view
            return {key: value for key, value in plain.items() if key not in _CONFIGURED[1]}
    return {}


def _number(config: Mapping[str, Any], *names: str) -> int:
    for name in names:
        value = config.get(name)
        if type(value) is int and value > 0:
            return value
    return 0


def _layers(tensors: Mapping[str, LazyArray]) -> int:
    """Return the number of layers by the names; 0 if they do not number them in the usual way."""
    numbers: dict[str, set[int]] = {}
    for name in tensors:
        parts = name.split(".")
        for n, part in enumerate(parts[:-1]):
            if part in ("layers", "h", "blocks") and parts[n + 1].isdecimal():
                numbers.setdefault(".".join(parts[: n + 1]), set()).add(int(parts[n + 1]))
                break
    if len(numbers) != 1:
        return 0
    (only,) = numbers.values()
    return len(only)


def _tokenizer(store: Store, embeddings: Sequence[str], tensors: Mapping[str, LazyArray]) -> Iterator[Finding]:
    """Yield a finding if tokenizer.json has tokens without a row."""
    if len(embeddings) != 1:
        return
    try:
        size = store.stat("tokenizer.json").size
        if size > _DOCUMENT:
            return
        about = json.loads(bytes(store.read("tokenizer.json", 0, size)))
        vocabulary = about["model"]["vocab"]
        numbers = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        added = [token["id"] for token in about.get("added_tokens", ())]
        last = max([*numbers, *added], default=-1)
    except (LazyckptError, OSError):
        return  # there is none
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        yield Finding("not-examined", "tokenizer.json is of a kind that is not known", "tokenizer.json")
        return
    (name,) = embeddings
    rows = shape_of(tensors[name])[0]
    if type(last) is int and last >= rows:
        text = f"tokenizer.json has the token number {last:,}, and {name} has {rows:,} rows"
        yield Finding("tokenizer-mismatch", text, "tokenizer.json", name)


def overlaps(archives: Mapping[str, Sequence[Archive]]) -> Iterator[Finding]:
    """Yield the archives inside a file that overlap without being the same bytes, as those of tied tensors are."""
    for path, held in archives.items():
        reach, owner = 0, None
        for one in sorted(set(held), key=lambda one: (one.offset, -one.length)):
            if owner is not None and one.offset < reach and (one.offset, one.length) != (owner.offset, owner.length):
                text = f"{path}: {owner} and {one} share {min(reach, one.offset + one.length) - one.offset:,} bytes"
                yield Finding("overlapping-data", text, path)
            if one.offset + one.length > reach:
                reach, owner = one.offset + one.length, one


def ages(infos: Mapping[str, FileInfo]) -> Iterator[Finding]:
    """Yield findings about files that were written long before all others of their kind."""
    kinds: dict[str, dict[str, int]] = {}
    for path, info in infos.items():
        if info.mtime_ns:
            kinds.setdefault(posixpath.splitext(path)[1], {})[path] = info.mtime_ns
    for times in kinds.values():
        if len(times) < 4:
            continue
        ordered = sorted(times.values())
        gaps = np.diff(np.array(ordered, np.int64))
        widest = int(gaps.argmax())
        gap, rest = int(gaps[widest]), ordered[-1] - ordered[widest + 1]
        if widest + 1 > len(ordered) // 4 or gap < max(_HOUR, 10 * rest):
            continue
        old = sorted(path for path, time in times.items() if time <= ordered[widest])
        more = len(ordered) - len(old)
        text = f"{some(old)}: written {gap / _HOUR:,.1f} hours before the other {more:,} files of the kind"
        yield Finding("stale-file", text, old[0] if len(old) == 1 else None, details={"files": old})


def archives_of(targets: Sequence[Target]) -> dict[str, list[Archive]]:
    """Return path -> the archives of torch.save inside the file."""
    found: dict[str, list[Archive]] = {}
    for target in targets:
        for packed in fragments_of(target.tensor.spec.fragments).packed():
            if isinstance(packed, Archive) and not packed.codecs:
                found.setdefault(packed.path, []).append(packed)
    return found
