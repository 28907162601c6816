"""Blocks of GGUF's types, of random bytes, with the values that the gguf package computes.

There is one case: a safetensors file with a uint8 tensor for each type, and its truth. Only blocks of finite values are
taken.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from .quantized_models import hold

__all__ = ["write_all"]

ROWS, BLOCKS = 3, 2


def write_all(folder: Path) -> None:
    """``blocks/ckpt``, ``blocks/truth.pt``, ``blocks/info.json``."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    random = np.random.default_rng(22)
    stored, truth = {}, {}
    for kind in GGMLQuantizationType:
        size, nbytes = GGML_QUANT_SIZES[kind]
        if size == 1:
            continue
        pool = random.integers(0, 256, (64, nbytes), dtype=np.uint8)
        try:
            with np.errstate(all="ignore"):
                values = dequantize(pool, kind)
        except NotImplementedError:  # types of activations
            continue
        finite = np.isfinite(values).all(1)
        pool, values = pool[finite][: ROWS * BLOCKS], values[finite][: ROWS * BLOCKS]
        stored[kind.name] = torch.from_numpy(pool.reshape(ROWS, BLOCKS * nbytes))
        truth[kind.name] = torch.from_numpy(values.reshape(ROWS, BLOCKS * size).copy())
    target = folder / "blocks"
    (target / "ckpt").mkdir(parents=True)
    save_file(stored, target / "ckpt/model.safetensors")
    (target / "ckpt/config.json").write_text(json.dumps({}))
    hold(target, truth)
