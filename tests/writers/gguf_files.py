"""GGUF files of `gguf.GGUFWriter`: both byte orders, versions 1 to 3, every type, split files.

The tensors are held as they are stored: blocks as bytes. ``values.pt`` beside the truth has what the gguf package
computes from the blocks.

`GGUFWriter` writes version 3. Version 2 has the same layout; in version 1, lengths and counts have 32 bits
(docs/gguf.md of ggml-org/ggml, "Historical state of affairs"). Blocks in big-endian files are as gguf_convert_endian.py
writes them.
"""

from __future__ import annotations

import argparse
import builtins
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFEndian, GGUFValueType
from gguf.gguf_writer import WriterState
from gguf.quants import dequantize, quantize

__all__ = ["WORDS", "OldWriter", "blocks", "plain", "write", "write_all"]

WORDS = ["<s>", "</s>", "\N{LOWER ONE EIGHTH BLOCK}a", "größe", "\N{SNOWMAN}", *(f"word{n}" for n in range(50))]
_PLAIN = {"f32": "f4", "f16": "f2", "f64": "f8", "i8": "i1", "i16": "i2", "i32": "i4", "i64": "i8"}

_SCALES = {"Q4_0": (0,), "Q8_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block has numbers of 16 bits

Stored = tuple[np.ndarray[Any, Any], GGMLQuantizationType | None]


class OldWriter(gguf.GGUFWriter):
    """Writes version 1 or 2."""

    old = 2

    def _pack(self, fmt: str, value: Any, skip_pack_prefix: bool = False) -> bytes:
        if fmt == "I" and self.state is WriterState.EMPTY:
            value = self.old
        if fmt == "Q" and self.old == 1:
            fmt = "I"  # (no value of a case is a uint64)
        return super()._pack(fmt, value, skip_pack_prefix)

    def write_ti_data_to_file(self) -> None:
        for file, tensors in zip(self.fout, self.tensors, strict=True):
            at = 0
            for name, info in tensors.items():
                file.write(self._pack_val(name, GGUFValueType.STRING, add_vtype=False))
                file.write(self._pack("I", len(info.shape)))
                for size in reversed(info.shape):
                    file.write(self._pack("Q", size))
                file.write(self._pack("I", info.dtype))
                file.write(super()._pack("Q", at))
                at += self.ggml_pad(info.nbytes, self.data_alignment)
        self.state = WriterState.TI_DATA


def plain(seed: int = 0) -> dict[str, Stored]:
    """Tensors of every plain type."""
    random = np.random.default_rng(seed)
    found: dict[str, Stored] = {
        f"plain.{name}": ((random.standard_normal((3, 5)) * 50).astype(dtype), None) for name, dtype in _PLAIN.items()
    }
    found["plain.four"] = (random.standard_normal((2, 3, 4, 5)).astype(np.float32), None)
    found["plain.vector"] = (random.standard_normal(7).astype(np.float16), None)
    found["plain.empty"] = (np.zeros((0, 4), np.float32), None)
    found["plain.scalar"] = (np.array(2.5, np.float32), None)
    floats = random.standard_normal((4, 6)).astype(np.float32)
    found["plain.bf16"] = (quantize(floats, GGMLQuantizationType.BF16), GGMLQuantizationType.BF16)
    return found


def blocks(*kinds: str) -> dict[str, Stored]:
    """Random blocks of finite values, of the given types or of every type that the gguf package dequantizes."""
    random = np.random.default_rng(23)
    found: dict[str, Stored] = {}
    for kind in GGMLQuantizationType:
        if GGML_QUANT_SIZES[kind][0] == 1 or (kinds and kind.name not in kinds):
            continue
        pool = random.integers(0, 256, (64, GGML_QUANT_SIZES[kind][1]), dtype=np.uint8)
        try:
            with np.errstate(all="ignore"):
                finite = np.isfinite(dequantize(pool, kind)).all(1)
        except NotImplementedError:  # types of activations
            continue
        found[f"blk.0.{kind.name}"] = (pool[finite][:6].reshape(3, -1), kind)
    return found


def _model(writer: gguf.GGUFWriter) -> None:
    writer.add_name("a model")
    writer.add_block_count(2)
    writer.add_rope_freq_base(10000.5)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(WORDS)
    writer.add_token_scores([-float(n) for n in range(len(WORDS))])
    writer.add_token_types([1] * len(WORDS))
    writer.add_add_bos_token(True)
    writer.add_array("test.bools", [True, False])
    writer.add_array("test.nested", [[1, 2], [3]])
    writer.add_uint8("test.u8", 200)
    writer.add_int8("test.i8", -3)
    writer.add_uint16("test.u16", 60000)
    writer.add_int16("test.i16", -300)
    writer.add_int64("test.i64", -(1 << 40))
    writer.add_float64("test.f64", 0.1)


def write(
    path: Path,
    tensors: Mapping[str, Stored],
    *,
    big: bool = False,
    version: int = 3,
    alignment: int | None = None,
    about: Callable[[gguf.GGUFWriter], None] = _model,
    architecture: str = "llama",
    **options: Any,
) -> None:
    """Write a file, or with ``split_max_tensors`` several."""
    kind: type[gguf.GGUFWriter] = gguf.GGUFWriter if version == 3 else OldWriter
    writer = kind(path, architecture, endianess=GGUFEndian.BIG if big else GGUFEndian.LITTLE, **options)
    writer.old = version
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    about(writer)
    for name, (data, raw) in tensors.items():
        # GGUFWriter swaps the bytes of elements, so that bfloat16 has to be words
        writer.add_tensor(name, data.view(np.uint16) if raw is GGMLQuantizationType.BF16 else data, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def to_big_endian(path: Path) -> None:
    """Change the byte order of a file in its place, by the gguf package's script."""
    from gguf.scripts.gguf_convert_endian import convert_byteorder

    reader = gguf.GGUFReader(path, "r+")
    with mock.patch.object(builtins, "input", lambda _: "YES"):
        convert_byteorder(reader, argparse.Namespace(order="big", dry_run=False))
    reader.data.flush()


def truth(tensors: Mapping[str, Stored], swapped: bool = False) -> dict[str, torch.Tensor]:
    """The tensors as they are stored. ``swapped``: the numbers in blocks are big-endian."""
    found = {}
    for name, (data, raw) in tensors.items():
        t = torch.from_numpy(data.copy())
        if raw is not None and swapped:
            for at in _SCALES.get(raw.name, ()):
                rows = t.view(-1, GGML_QUANT_SIZES[raw][1])
                rows[:, at : at + 2] = rows[:, at : at + 2].flip(1)
        found[name] = t.view(torch.bfloat16) if raw is GGMLQuantizationType.BF16 else t
    return found


def values(tensors: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """What the gguf package computes from the blocks."""
    return {
        name: torch.from_numpy(dequantize(data, raw).copy())
        for name, (data, raw) in tensors.items()
        if raw is not None and raw is not GGMLQuantizationType.BF16
    }


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json`` and ``NAME/values.pt``."""
    every = plain() | blocks()
    few = plain(1) | blocks("Q8_0", "Q4_K")
    swappable = {name: t for name, t in plain(2).items() if name.rpartition(".")[2] in ("f32", "f16", "bf16", "four")}
    swappable |= blocks("Q4_0", "Q8_0", "Q4_K", "Q6_K", "MXFP4", "NVFP4")
    cases: dict[str, tuple[dict[str, Stored], dict[str, Any]]] = {
        "every": (every, {"alignment": 64}),
        "version1": (few, {"version": 1}),
        "version2": (few, {"version": 2}),
        "split": (every, {"split_max_tensors": 15}),
        "big_endian": (plain(3), {"big": True}),
        "big_endian_blocks": (swappable, {}),
    }
    for name, (tensors, options) in cases.items():
        path = folder / name / "ckpt/model.gguf"
        path.parent.mkdir(parents=True)
        write(path, tensors, **options)
        if name == "big_endian_blocks":
            to_big_endian(path)
        torch.save({"weights": truth(tensors, name == "big_endian_blocks")}, folder / name / "truth.pt")
        (folder / name / "info.json").write_text(json.dumps({}))
        torch.save(values(tensors), folder / name / "values.pt")
