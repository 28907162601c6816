"""MXFP4 of gpt-oss: blocks of 32 floats of four bits, each with a power of two.

A weight W of experts is in W_blocks, [experts, out, in / 32, 16], and W_scales, [experts, out, in / 32]. transformers
has it as [experts, in, out] (integrations/mxfp4.py `convert_moe_packed_tensors`, transformers 5.3). In OpenAI's own
checkpoints the names are W.blocks and W.scales, and the weight is [experts, out, in] (openai/gpt-oss
gpt_oss/torch/weights.py `_get_mxfp4_tensor`). A value times a power of two is exact, but for underflow.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...core.dtypes import F8_E8M0FNU, U8, DType
from ...core.expr import make
from ...core.specs import Expr
from ...errors import Problem, some
from .model import Model, Weight
from .scales import Blocks, scaled

_GROUP = 32  # elements that share a scale


class Microscaling:
    """MXFP4 of gpt-oss."""

    name = "mxfp4"
    methods = ("mxfp4",)

    def detect(self, model: Model) -> bool:
        """Return whether config.json says so, or says nothing and no other file does."""
        method = model.evidence.method
        return method in self.methods if method else not model.evidence.says

    def weights(self, model: Model, dtype: DType) -> Iterator[Weight | Problem]:
        """Yield the weights with blocks and scales."""
        unfit = []
        for ends, turned in ((("_blocks", "_scales"), True), ((".blocks", ".scales"), False)):
            for stem in model.ending(*ends):
                names = (stem + ends[0], stem + ends[1])
                blocks, scales = (model.kind(name) for name in names)
                if (
                    blocks.dtype is not U8
                    or scales.dtype not in (U8, F8_E8M0FNU)
                    or blocks.shape[:-1] != scales.shape
                    or blocks.shape[-1] != _GROUP // 2
                    or len(scales.shape) < 2
                    or (turned and len(scales.shape) != 3)
                ):
                    unfit.append(f"{stem} {blocks.dtype} {blocks.shape} with scales {scales.dtype} {scales.shape}")
                    continue
                yield Weight(stem, _value(model, names, dtype, turned), names)
        if unfit:
            line = f"blocks and scales are not those of MXFP4: {some(unfit)}. They stay as they are stored"
            yield Problem("contradicting-quantization", line)


def _value(model: Model, names: tuple[str, str], dtype: DType, turned: bool) -> Expr:
    codes = make("dequantize.fp4", model.operand(names[0]))
    scales = make("dequantize.e8m0", model.operand(names[1]))
    lead = (1,) * (len(scales.shape))
    blocks = Blocks((*scales.shape, 1), (*lead, _GROUP))
    found = make("reshape", scaled(codes, scales, blocks, dtype), shape=(*scales.shape[:-1], scales.shape[-1] * _GROUP))
    return make("transpose", found, axes=(0, 2, 1)) if turned else found


FAMILY = Microscaling()
