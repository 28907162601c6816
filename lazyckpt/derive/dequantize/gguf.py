"""GGUF's tensors of blocks, whose types the files name (formats/gguf.py).

In a big-endian file, the numbers of 16 bits in a block are big-endian, too, as llama.cpp on such a machine has them and
as gguf_convert_endian.py of the gguf package writes them, for the types that it knows. `GGUFWriter` of the same package
does not swap blocks that it is given; nothing in the file tells the two apart.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.dtypes import DType
from ...core.expr import make
from ...core.ops.ggml import SWAPPED, TYPES
from ...errors import DataError, Problem, only_one, some
from ...formats.gguf import BIG_ENDIAN
from ...formats.gguf import TYPES as KEY
from .model import Model, Weight


class Gguf:
    """Tensors of blocks."""

    name = "gguf"
    methods = ("gguf",)

    def detect(self, model: Model) -> bool:
        """Return whether the checkpoint is of GGUF."""
        return model.view._index.format == "gguf"

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the tensors of blocks."""
        meta = model.view._index.meta
        swapped = bool(meta.get(BIG_ENDIAN))
        unknown: dict[str, list[str]] = {}
        assumed = []
        for name, kind in meta.get(KEY, {}).items():
            if name not in model:
                continue
            if kind not in TYPES or (swapped and kind not in SWAPPED):
                unknown.setdefault(kind, []).append(name)
                continue
            try:
                value = make("dequantize.gguf", model.operand(name), type=kind, dtype=dtype, big_endian=swapped)
            except DataError as e:
                yield Problem("contradicting-quantization", f"{name!r}: {e}", name)
                continue
            if swapped and SWAPPED[kind]:
                assumed.append(name)
            yield Weight(name, value, (name,))
        for kind, names in unknown.items():
            order = "in a big-endian file, " if kind in TYPES else ""
            line = f"{len(names):,} tensors are of blocks of {kind}, {order}whose values are not known: {some(names)}"
            yield Problem("undecided-quantization", line, only_one(names))
        if assumed:
            line = (
                f"the file is big-endian: the scales in the blocks of {len(assumed):,} tensors are taken to be, too "
                f"({some(assumed)}). Files that GGUFWriter wrote from quantized blocks have little-endian ones"
            )
            yield Problem("assumed-quantization", line, only_one(assumed))


FAMILY = Gguf()
