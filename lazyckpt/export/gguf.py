"""GGUF files of Hugging Face models: what llama.cpp loads.

The header is that of version 3 (docs/gguf.md of ggml-org/ggml); names and values are those of llama.cpp's
convert_hf_to_gguf.py: matrices of the wanted type, vectors as float32, the rows of q and k of Llama in GGUF's order. A
matrix whose rows are no whole blocks is float16, as there. All matrices have the same type, also the embedding.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core.expr import computed, make, operand
from ..core.ops.ggml_quantizing import TYPES as BLOCKS
from ..errors import DataError, MissingFileError, some
from ..io.storage.urls import is_url
from ..jobs.guard import local_path
from ..jobs.plan import Layout, Placed, WritePlan
from ..jobs.publish import fingerprint
from ..layouts.configured import check_config
from ..layouts.rename.gguf import Naming, naming, to_gguf_name, turned
from ..lazy import LazyArray, shape_of
from .files import Aliases, FileFormat, Tensors, plan_of_files
from .gguf_model import ARCHITECTURES, Entries, config_in, factors, heads, metadata, tokenizer
from .options import WriteOptions
from .writer import WEIGHTS, Amount, Forecast, View, Writer

if TYPE_CHECKING:
    import torch
else:
    from ..deferred import torch

ALIGNMENT = 32
# The name of a type -> its number in GGUF, and the number of files of this type (gguf 0.19, `LlamaFileType`).
DTYPES: dict[str, tuple[int, int]] = {"f32": (0, 0), "f16": (1, 1), "bf16": (30, 32), "q8_0": (8, 7), "q4_0": (2, 2)}
_SPELLINGS = {"fp32": "f32", "float32": "f32", "fp16": "f16", "float16": "f16", "bfloat16": "bf16"}
_COMPUTED = ("rotary_emb.inv_freq", "self_attn.masked_bias", "self_attn.bias")  # buffers that the model computes itself


def _plan(
    view: View,
    dest: str | os.PathLike[str],
    options: WriteOptions,
    *,
    dtype: str = "f16",
    config: str | os.PathLike[str] | None = None,
) -> WritePlan:
    kind = _kind(dtype)
    folder = _folder(view, config)
    settings = config_in(folder, view.meta if config is None else {})
    model = settings.get("model_type")
    architecture = ARCHITECTURES.get(model) if isinstance(model, str) else None
    if architecture is None:
        raise DataError(
            f"to_gguf writes models of the types {', '.join(ARCHITECTURES)}; config.json says {model!r:.80}"
        )
    shapes = {name: shape_of(tensor) for name, tensor in view.once()[0].items()}
    check_config({"config": settings}, shapes, whole=True)
    known = naming(architecture)
    assert known is not None  # every architecture that is written has a table
    tensors, left_out = _tensors(view, known, kind, settings)
    words, lost = tokenizer(folder, settings)
    entries = metadata(architecture, settings, DTYPES[kind][1], quantized=kind.upper() in BLOCKS) | words
    types = {name: number for name, (_, number) in tensors.items()}
    form = FileFormat(
        "model", ".gguf", (".gguf",), False, partial(_size, entries, types), partial(_layout, entries, types)
    )
    arrays = {name: t for name, (t, _) in tensors.items()}
    plan = plan_of_files(form, arrays, {}, dest, None, None, options)
    header = _header(entries, types, arrays)
    where = [(t, (name, types[name])) for name, t in arrays.items()]
    same = fingerprint(where, [header])
    return replace(plan, fingerprint=same, left_out={**left_out, **lost})


def _forecast(
    view: View,
    dest: str,
    options: WriteOptions,
    *,
    dtype: str = "f16",
    config: str | os.PathLike[str] | None = None,
) -> Forecast:
    plan = _plan(view, dest, options, dtype=dtype, config=config)
    amount = Amount(len(plan.tensors), plan.nbytes, (_kind(dtype),))
    return Forecast({view.state: amount}, 1, plan.room)


def _kind(dtype: str) -> str:
    kind = _SPELLINGS.get(str(dtype).lower(), str(dtype).lower())
    if kind not in DTYPES:
        raise DataError(f"to_gguf writes {', '.join(DTYPES)}, not {dtype!r:.40}")
    return kind


def _folder(view: View, config: str | os.PathLike[str] | None) -> Path | None:
    """Return the folder with config.json and the tokenizer. Raises MissingFileError if ``config`` is none."""
    if config is not None:
        found = local_path(config)
        found = found.parent if found.name == "config.json" else found
        if not (found / "config.json").is_file():
            raise MissingFileError(f"{found} has no config.json, which to_gguf needs: name a folder that has one")
        return found
    if is_url(view.root):
        return None
    place = Path(view.root)
    return place if place.is_dir() else place.parent


def _tensors(
    view: View, known: Naming, kind: str, settings: Mapping[str, Any]
) -> tuple[dict[str, tuple[LazyArray, int]], dict[str, str]]:
    """Return the tensors of the file with the numbers of their types, by GGUF's names, and what is left out.

    Raises DataError for names that GGUF has not."""
    if view.state not in WEIGHTS:
        raise DataError(f"a GGUF file holds weights, and the view shows {view.state!r}")
    found: dict[str, tuple[LazyArray, int]] = {}
    left_out: dict[str, str] = {}
    unknown = []
    tensors, aliases = view.once()
    store = None
    for name, tensor in tensors.items():
        if name.endswith(_COMPUTED):
            left_out[name] = "the model computes it itself"
            continue
        new = to_gguf_name(name, known)
        if new is None:
            unknown.append(name)
            continue
        store = tensor._store
        found[new] = _as_gguf(tensor, new, kind, known, settings)
    if unknown:
        raise DataError(
            f"{len(unknown):,} tensors have no name in GGUF files of {settings['model_type']}: {some(unknown)}. Names "
            'have to be those of Hugging Face: use rename("hf"), or select tensors'
        )
    if "token_embd.weight" not in found:
        raise DataError("there is no model.embed_tokens.weight, which every GGUF model has")
    if "output.weight" not in found and not settings.get("tie_word_embeddings", "lm_head.weight" in aliases):
        raise DataError("there is no lm_head.weight, and config.json does not say that it is tied to the embedding")
    extra = factors(settings)
    if extra is not None:
        data = struct.pack(f"<{len(extra)}f", *extra).hex()
        expr = make("constant", data=data, shape=(len(extra),), dtype=torch.float32)
        found["rope_freqs.weight"] = LazyArray(store, computed("rope_freqs.weight", expr)), 0  # type: ignore[arg-type]
    return found, left_out


def _as_gguf(
    tensor: LazyArray, new: str, kind: str, known: Naming, settings: Mapping[str, Any]
) -> tuple[LazyArray, int]:
    if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
        raise DataError(f"{tensor.name!r} is {tensor.dtype}: use dequantize() first")
    value = operand(tensor.spec)
    which = new.split(".")[-2]
    if known.turned and which in ("attn_q", "attn_k"):
        count = heads(settings)[which == "attn_k"]
        if tensor.shape[0] % (2 * count):
            raise DataError(f"{tensor.name!r} has {tensor.shape[0]:,} rows, which are not {count:,} heads")
        value = turned(value, count, back=False)
    if tensor.ndim < 2:
        kind = "f32"
    elif kind.upper() in BLOCKS and tensor.shape[-1] % 32:
        kind = "f16"
    if kind.upper() in BLOCKS:
        value = make("quantize.gguf", value, type=kind.upper())
    else:
        dtype = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}[kind]
        if value.dtype.torch is not dtype:
            value = make("cast", value, dtype=dtype)
    return LazyArray(tensor._store, computed(new, value, stored_as=tensor.name)), DTYPES[kind][0]


# -- the file


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return struct.pack("<Q", len(data)) + data


def _value(kind: str, value: Any) -> bytes:
    """Encode a value: its type, then itself. Kinds: u32, i32, f32, bool, str, and lists of them as "[str]"."""
    numbers = {"u32": (4, "I"), "i32": (5, "i"), "f32": (6, "f"), "bool": (7, "?")}
    if kind.startswith("["):
        inner = kind[1:-1]
        head = struct.pack("<IIQ", 9, 8 if inner == "str" else numbers[inner][0], len(value))
        if inner == "str":
            return head + b"".join(map(_text, value))
        return head + struct.pack(f"<{len(value)}{numbers[inner][1]}", *value)
    if kind == "str":
        return struct.pack("<I", 8) + _text(value)
    number, code = numbers[kind]
    return struct.pack(f"<I{code}", number, value)


def _header(entries: Entries, types: Mapping[str, int], tensors: Tensors) -> bytes:
    parts = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), len(entries))]
    parts += [_text(key) + _value(kind, value) for key, (kind, value) in entries.items()]
    at = 0
    for name, tensor in tensors.items():
        shape: Sequence[int] = _elements(tensor.shape, types[name])
        parts.append(_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], types[name], at))
        at += _padded(tensor.nbytes)
    data = b"".join(parts)
    return data + bytes(_padded(len(data)) - len(data))


def _elements(shape: Sequence[int], number: int) -> Sequence[int]:
    """Return a tensor's shape in elements."""
    for name, (kind, _) in DTYPES.items():
        if kind == number and name.upper() in BLOCKS:
            return (*shape[:-1], shape[-1] // BLOCKS[name.upper()][0] * 32)
    return shape


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def _size(entries: Entries, types: Mapping[str, int], tensors: Tensors, aliases: Aliases) -> int:
    return len(_header(entries, types, tensors)) + sum(_padded(t.nbytes) for t in tensors.values())


def _layout(entries: Entries, types: Mapping[str, int], tensors: Tensors, aliases: Aliases) -> Layout:
    header = _header(entries, types, tensors)
    texts, placed, at = [(0, header)], [], len(header)
    for tensor in tensors.values():
        placed.append(Placed(at, tensor))
        end = at + tensor.nbytes
        at += _padded(tensor.nbytes)
        if end < at:
            texts.append((end, bytes(at - end)))
    return Layout(at, texts, placed)


WRITER = Writer(
    name="gguf",
    what="the models of llama.cpp",
    plan=_plan,
    forecast=_forecast,
    endings=(".gguf",),
    options=frozenset({"dtype"}),
    dtypes=tuple(DTYPES),
    replaces=lambda name: name == "model.gguf",
)
