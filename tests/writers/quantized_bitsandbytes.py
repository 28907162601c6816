"""Checkpoints of bitsandbytes, quantized and saved by transformers, with the weights that bitsandbytes dequantizes.

The truth is float32: what bitsandbytes' general implementation of `dequantize_4bit` computes (for devices without
kernels), and `int8_vectorwise_dequant`. The kernel of version 0.50.2 for CPUs with AVX-512 takes wrong scales for some
rows that are no multiple of a block: it does not restore what `quantize_4bit` has quantized, with twice the error.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from .quantized_models import hold, llama

__all__ = ["CASES", "write_all"]

_FOUR: dict[str, Any] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": torch.bfloat16}
# Case -> options of BitsAndBytesConfig. Rows of 24 and 41 elements are no multiples of the blocks of 64.
CASES: dict[str, dict[str, Any]] = {
    "nf4_double_sharded_tied": _FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": _FOUR | {"bnb_4bit_quant_type": "fp4"},
    "nf4_in_bf16_words": _FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_quant_storage": torch.bfloat16},
    "int8": {"load_in_8bit": True},
    "nf4_gpt2": _FOUR | {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
}


def write_all(folder: Path) -> None:
    """Each case: ``NAME/ckpt``, ``NAME/truth.pt``, ``NAME/info.json``."""
    for name, options in CASES.items():
        (folder / name).mkdir()
        _write(folder / name, name, options)


def _write(folder: Path, name: str, options: dict[str, Any]) -> None:
    odd = "words" not in name  # words of two bytes need a multiple of four elements
    model: PreTrainedModel = llama(24, 41 if odd else 44, torch.bfloat16, tied="tied" in name)
    if "gpt2" in name:
        torch.manual_seed(0)
        config = GPT2Config(vocab_size=7, n_positions=16, n_embd=24, n_layer=1, n_head=2)
        model = GPT2LMHeadModel(config).to(torch.bfloat16)
    with tempfile.TemporaryDirectory() as plain:
        model.save_pretrained(plain)
        quantized = AutoModelForCausalLM.from_pretrained(
            plain, quantization_config=BitsAndBytesConfig(**options), device_map="cpu", dtype=torch.bfloat16
        )
    quantized.save_pretrained(folder / "ckpt", max_shard_size="10KB" if "sharded" in name else "5GB")
    truth = {n: t for n, t in model.state_dict().items() if n in quantized.state_dict()}
    for n, module in quantized.named_modules():
        if type(module).__name__ in ("Linear4bit", "Linear8bitLt"):
            weight = _dequantized(module.weight)
            truth[f"{n}.weight"] = weight.T.contiguous() if "gpt2" in name else weight
    hold(folder, truth)


def _dequantized(weight: Any) -> Tensor:
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
    from bitsandbytes.functional import dequantize_blockwise, int8_vectorwise_dequant

    state = getattr(weight, "quant_state", None)
    if state is None:
        found: Tensor = int8_vectorwise_dequant(weight.data, weight.SCB)
        return found
    scales = state.absmax
    if state.nested:
        scales = dequantize_blockwise(scales, state.state2) + state.offset
    codes = weight.data.view(torch.uint8).reshape(-1)
    return _dequantize_4bit_compute(codes, scales, state.code, state.blocksize, state.shape, torch.float32)
