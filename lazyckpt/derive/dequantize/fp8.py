"""FP8 weights with scales: DeepSeek-V3's blocks, and what transformers, FBGEMM and vLLM's fp8 store.

A weight W of float8 has its scales in W_scale_inv (DeepSeek, transformers' FineGrainedFP8; they are multiplied with,
whatever the name says), W_scale (FBGEMM, AutoFP8), or, for ``x.weight``, in ``x.scale`` (DeepSeek's inference code).
Shapes say what shares a scale: the whole tensor, a row, or a block of ``weight_block_size`` elements.

Sources: deepseek-ai/DeepSeek-V3 inference/fp8_cast_bf16.py and inference/kernel.py `weight_dequant`; transformers 5.3
integrations/finegrained_fp8.py `Fp8Dequantize`, integrations/fbgemm_fp8.py `FbgemmFp8Quantize` (whose experts'
``down_proj`` of [experts, in, out] has scales of [experts, out, 1]). All multiply in the dtype of the scales, float32,
and round the product once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...core.box import Shape
from ...core.dtypes import DType
from ...errors import Problem, only_one, some
from .model import Model, Weight
from .scales import FLOAT8, Blocks, blocks_of, excluded, scaled, texts

_DEEPSEEK = (128, 128)  # the block that DeepSeek's script assumes


class Fp8:
    """FP8 weights with scales."""

    name = "fp8"
    methods = ("fp8", "fbgemm_fp8", "finegrained_fp8")

    def detect(self, model: Model) -> bool:
        """Return whether config.json says so, or says nothing and no other file does."""
        method = model.evidence.method
        return method in self.methods if method else not model.evidence.says

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the weights of float8 whose scales are known."""
        settings = model.evidence.quantization
        block = block_in(settings)
        method = model.evidence.method
        barred = [*texts(settings.get("modules_to_not_convert")), *texts(settings.get("ignored_layers"))]
        assumed: list[str] = []
        unfit: list[str] = []
        several: list[str] = []
        contradicting: list[str] = []
        for name in model.names:
            codes = model.kind(name)
            if codes.dtype not in FLOAT8:
                continue
            scales = scales_of(model, name)
            if len(scales) != 1:
                several += [name] if scales else []
                continue
            if excluded(name.rpartition(".")[0], barred):
                contradicting.append(name)
                continue
            shape = model.kind(scales[0]).shape
            blocks = blocks_of(codes.shape, shape, block)
            if method == "fbgemm_fp8" and name.endswith("down_proj") and len(codes.shape) == 3:
                blocks = _of_columns(codes.shape, shape)
            elif blocks is None and block is None:
                blocks = blocks_of(codes.shape, shape, _DEEPSEEK)
                assumed += [name] if blocks is not None else []
            if blocks is None or not model.kind(scales[0]).dtype.is_floating_point:
                unfit.append(f"{name} {codes.shape} with scales of {shape}")
                continue
            value = scaled(model.operand(name), model.operand(scales[0]), blocks, dtype)
            yield Weight(name, value, (name, scales[0]))
        if assumed:
            line = (
                f"the scales of {len(assumed):,} FP8 tensors are taken to be of blocks of 128x128, as their shapes "
                f"allow: no config.json gives weight_block_size ({some(assumed)})"
            )
            yield Problem("assumed-quantization", line, only_one(assumed))
        if unfit:
            of = f"weight_block_size {list(block)}" if block else "no known weight_block_size"
            line = f"the shapes of scales do not fit their FP8 tensors ({of}): {some(unfit)}"
            yield Problem("contradicting-quantization", line)
        if several:
            line = f"{len(several):,} FP8 tensors have scales under several names: {some(several)}"
            yield Problem("contradicting-quantization", line, only_one(several))
        if contradicting:
            line = f"config.json excludes {len(contradicting):,} tensors from quantization that are FP8 with scales: "
            yield Problem("contradicting-quantization", line + some(contradicting), only_one(contradicting))


def block_in(settings: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the ``weight_block_size`` of a quantization_config, or None if it has none."""
    found = settings.get("weight_block_size")
    if isinstance(found, (list, tuple)) and len(found) == 2 and all(type(n) is int and n > 0 for n in found):
        return tuple(found)
    return None


def scales_of(model: Model, name: str) -> tuple[str, ...]:
    """Return the names of the scales that a tensor may have."""
    places = [f"{name}_scale_inv", f"{name}_scale"]
    if name.endswith(".weight"):
        places.append(f"{name.removesuffix('weight')}scale")
    return model.present(places)


def _of_columns(codes: Shape, scales: Shape) -> Blocks | None:
    """Return how the scales of FBGEMM's ``down_proj`` lie, one for each column of each expert."""
    experts, rows, columns = codes
    return Blocks((experts, 1, columns), (1, rows, 1)) if scales == (experts, columns, 1) else None


FAMILY = Fp8()
