"""Quantized checkpoints with scales, and what their writers' own code dequantizes them to.

``python -m tests.writers.quantized_scales FOLDER`` writes the cases whose packages are installed: ``FOLDER/CASE`` has a
model as Hugging Face stores it, in two shards, ``truth.safetensors`` with the dequantized tensors, and ``writer.json``.
tests/golden/quantized has what was written with compressed-tensors 0.20.0 and 0.10.2 (for formats that later versions
have dropped), transformers 5.3.0 and nvidia-modelopt 0.47.0. None of them needs a GPU.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn
LAYERS = "model.layers.{}."


def random(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale


def rest() -> Tensors:
    """What is not quantized."""
    return {
        "model.embed_tokens.weight": random(7, 8, seed=90).bfloat16(),
        "model.layers.0.input_layernorm.weight": random(8, seed=91).bfloat16(),
        "model.layers.0.mlp.gate.e_score_correction_bias": random(5, seed=92),
        "model.norm.weight": random(8, seed=93).bfloat16(),
    }


def write(folder: Path, stored: Tensors, config: Mapping[str, Any], truth: Tensors, **more: Any) -> None:
    """Write a case. Neighbours in the order of names are in different shards, so scales are not beside their codes."""
    folder.mkdir(parents=True)
    stored = {name: t.detach().contiguous() for name, t in {**stored, **rest()}.items()}
    shards: list[Tensors] = [{}, {}]
    for n, name in enumerate(sorted(stored)):
        shards[n % 2][name] = stored[name]
    names = [f"model-{n + 1:05}-of-00002.safetensors" for n in range(2)]
    for name, shard in zip(names, shards, strict=True):
        save_file(shard, folder / name, {"format": "pt"})
    weight_map = {name: names[n % 2] for n, name in enumerate(sorted(stored))}
    total = sum(t.nbytes for t in stored.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    model = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16", "vocab_size": 7}
    model["tie_word_embeddings"] = True
    files = {"model.safetensors.index.json": index, "config.json": {**model, **config}, **more.pop("files", {})}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    save_file({name: t.detach().contiguous() for name, t in {**truth, **rest()}.items()}, folder / "truth.safetensors")
    (folder / "writer.json").write_text(json.dumps(more, indent=1, sort_keys=True) + "\n")


def installed(name: str, package: str, *versions: str) -> str | None:
    """The version of a package that the module's cases need, or None."""
    if importlib.util.find_spec(name) is None:
        return None
    try:
        found = version(package)
    except PackageNotFoundError:
        return None
    return found if not versions or found.startswith(versions) else None


# -- DeepSeek-V3


def dequantized_by_blocks(x: torch.Tensor, s: torch.Tensor, block: int = 128) -> torch.Tensor:
    """What the kernel `weight_dequant_kernel` of deepseek-ai/DeepSeek-V3 inference/kernel.py computes, block by block:
    float32 products, stored as bfloat16."""
    y = torch.empty(x.shape, dtype=torch.bfloat16)
    for i in range(0, x.shape[0], block):
        for j in range(0, x.shape[1], block):
            at = (slice(i, i + block), slice(j, j + block))
            y[at] = x[at].to(torch.float32) * s[i // block, j // block]
    return y


def quantized_by_blocks(w: torch.Tensor, block: int = 128) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and scales of blocks: `weight_quant` of the same file."""
    scales = torch.empty(-(-w.shape[0] // block), -(-w.shape[1] // block))
    codes = torch.empty(w.shape, dtype=FP8)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            at = (slice(i * block, (i + 1) * block), slice(j * block, (j + 1) * block))
            scales[i, j] = w[at].abs().max() / 448.0
            codes[at] = (w[at] / scales[i, j]).to(FP8)
    return codes, scales


def deepseek(folder: Path) -> None:
    stored: Tensors = {}
    truth: Tensors = {}
    shapes = {"self_attn.q_a_proj": (136, 72), "self_attn.kv_b_proj": (40, 131), "mlp.experts.0.up_proj": (128, 128)}
    for layer in range(2):
        for n, (module, shape) in enumerate(shapes.items()):
            name = f"{LAYERS.format(layer)}{module}.weight"
            codes, scales = quantized_by_blocks(random(*shape, seed=10 * layer + n, scale=0.3))
            stored |= {name: codes, f"{name}_scale_inv": scales}
            truth[name] = dequantized_by_blocks(codes, scales)
    config = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
    by = {"writer": "deepseek-ai/DeepSeek-V3 inference/kernel.py", "dtype": "bfloat16"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


# -- transformers


def _class_of_finegrained(name: str) -> Any:
    """A class of transformers' integrations/finegrained_fp8.py, which imports triton for its other functions."""
    spec = importlib.util.find_spec("transformers.integrations.finegrained_fp8")
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text())
    tree.body = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    known: dict[str, Any] = {"torch": torch, "ConversionOps": object, "_FP8_DTYPE": FP8}
    known |= {"_FP8_MIN": torch.finfo(FP8).min, "_FP8_MAX": torch.finfo(FP8).max}
    exec(compile(tree, spec.origin, "exec"), known)
    return known[name]


def finegrained(folder: Path) -> None:
    quantize, restore = (_class_of_finegrained(name) for name in ("Fp8Quantize", "Fp8Dequantize"))

    def case(name: str, w: torch.Tensor) -> None:
        made = quantize(quantizer).convert({name: [w]})
        codes, scales = made[name], next(t for key, t in made.items() if "scale_inv" in key)
        key = name.rpartition(".")[0] + ".weight_scale_inv" if name.endswith("weight") else f"{name}_scale_inv"
        stored.update({name: codes, key: scales})
        given = {"weight$": [codes], "weight_scale_inv": [scales]}
        truth[name] = restore(quantizer).convert(given, full_layer_name=name)[name].view(codes.shape)

    block = [16, 32]
    quantizer = SimpleNamespace(quantization_config=SimpleNamespace(weight_block_size=block))
    stored: Tensors = {}
    truth: Tensors = {}
    case("model.layers.0.self_attn.q_proj.weight", random(48, 64, seed=1))
    case("model.layers.1.mlp.experts.gate_up_proj", random(3, 32, 64, seed=2))
    case("model.layers.1.mlp.experts.down_proj", random(3, 64, 32, seed=3))
    stored["model.layers.0.self_attn.q_proj.activation_scale"] = torch.tensor(0.5)
    config = {"activation_scheme": "static", "quant_method": "fp8", "weight_block_size": block}
    config["modules_to_not_convert"] = ["lm_head", "model.layers.0.mlp.gate"]
    by = {"writer": f"transformers {version('transformers')}", "dtype": "float32"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


def fbgemm(folder: Path) -> None:
    """FBGEMM's kernels need a GPU: the formulas are those of `FbgemmFp8Quantize` and `FbgemmFp8Linear`."""

    def rows(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = w.abs().amax(-1) / 448.0
        return (w / scales[..., None]).to(FP8), scales

    codes, scales = rows(random(24, 40, seed=1))
    up, up_scales = rows(random(3, 16, 20, seed=2).transpose(1, 2))
    down, down_scales = rows(random(3, 16, 16, seed=3).transpose(1, 2))
    experts = "model.layers.1.feed_forward.experts"
    stored = {
        "model.layers.0.self_attn.q_proj.weight": codes,
        "model.layers.0.self_attn.q_proj.weight_scale": scales.view(-1, 1),
        f"{experts}.gate_up_proj": up.transpose(1, 2),
        f"{experts}.gate_up_proj_scale": up_scales.view(3, 1, 20),
        f"{experts}.down_proj": down.transpose(1, 2),
        f"{experts}.down_proj_scale": down_scales.view(3, 16, 1),
    }
    truth = {
        "model.layers.0.self_attn.q_proj.weight": codes.float() * scales[:, None],
        f"{experts}.gate_up_proj": (up.float() * up_scales[..., None]).transpose(1, 2),
        f"{experts}.down_proj": (down.float() * down_scales[..., None]).transpose(1, 2),
    }
    config = {"activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"], "quant_method": "fbgemm_fp8"}
    by = {"writer": "formulas of transformers integrations/fbgemm_fp8.py", "dtype": "float32"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


def gpt_oss(folder: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    stored: Tensors = {}
    truth: Tensors = {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(2):
        for proj, out, groups in (("gate_up_proj", 12, 3), ("down_proj", 96, 1)):
            name = f"model.layers.{layer}.mlp.experts.{proj}"
            blocks = torch.randint(0, 256, (3, out, groups, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(100, 140, (3, out, groups), dtype=torch.uint8, generator=generator)
            if layer:
                scales.view(-1)[:6] = torch.tensor([0, 1, 2, 126, 253, 254], dtype=torch.uint8)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales, f"{name}_bias": random(3, out).bfloat16()}
            truth |= {name: convert_moe_packed_tensors(blocks, scales), f"{name}_bias": stored[f"{name}_bias"]}
    config = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.embed_tokens"]}
    by = {"writer": f"transformers {version('transformers')}", "dtype": "bfloat16"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


# -- modelopt


def modelopt(folder: Path, algorithm: str) -> None:
    from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    stored: Tensors = {}
    truth: Tensors = {}
    for n, shape in enumerate([(24, 64), (10, 96), (3, 8, 64)]):
        w = random(*shape, seed=n, scale=0.2)
        w[..., 0] = -1e-4  # a code of -0.0
        stem = f"model.layers.{n}.self_attn.q_proj" if n < 2 else "model.layers.2.mlp.experts"
        name = f"{stem}.weight"
        if algorithm == "NVFP4":
            second = NVFP4QTensor.get_weights_scaling_factor_2(w)
            made, scale, second = NVFP4QTensor.quantize(w, 16, weights_scaling_factor_2=second)
            stored[f"{name}_scale_2"] = second
            found = made.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
        elif algorithm == "MXFP8":
            made, scale = MXFP8QTensor.quantize(w)
            found = made.dequantize(torch.float32, scale=scale)
        elif algorithm == "MXFP4":
            made, scale = MXFP4QTensor.quantize(w, 32)
            scale = scale.view(*shape[:-1], -1)
            found = made.dequantize(torch.float32, scale=scale, block_sizes={-1: 32})
        elif algorithm == "FP8_PB_WO":
            if n == 2:
                continue
            made, scale = FP8QTensor.quantize(w, block_sizes={-1: 16, -2: 16})
            found = made.dequantize(torch.float32, scale=scale, block_sizes={-1: 16, -2: 16})
        elif algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
            made, scale = FP8QTensor.quantize(w, axis=0 if n < 2 else (0, 1))
            found = made.dequantize(torch.float32, scale=scale)
            scale = scale.squeeze(-1)
        else:
            made, scale = FP8QTensor.quantize(w)
            found = made.dequantize(torch.float32, scale=scale.reshape(()))
            scale = scale.reshape(())
        stored |= {name: made._quantized_data, f"{name}_scale": scale, f"{stem}.input_scale": torch.tensor(0.25)}
        truth[name] = found
    stored["model.layers.0.self_attn.k_proj.k_scale"] = torch.tensor(1.5)
    group = {"NVFP4": 16, "FP8_PB_WO": 16, "MXFP8": 32, "MXFP4": 32}.get(algorithm)
    own = {"quant_algo": algorithm, "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head", "model.embed*"]}
    own |= {"group_size": group} if group else {}
    by = f"nvidia-modelopt {version('nvidia-modelopt')}"
    file = {"producer": {"name": "modelopt", "version": version("nvidia-modelopt")}, "quantization": own}
    write(folder, stored, {}, truth, files={"hf_quant_config.json": file}, writer=by, dtype="float32")


def smoothed(folder: Path, algorithm: str) -> None:
    """NVFP4 of modules that multiply their inputs (AWQ) and have a low-rank part (SVDQuant), and Llama 4's experts.

    The truth is the matrix of `SVDQuantLinear.forward`: codes by `NVFP4QTensor.dequantize`, in float32. The low-rank
    part has few bits, so that its product is exact in whatever order it is summed."""
    from modelopt.torch.export.quant_utils import maybe_transpose_expert_weight_dimensions as turned
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    stored: Tensors = {}
    truth: Tensors = {}
    shapes = [(24, 64), (10, 96)] if algorithm == "NVFP4_SVD" else [(24, 64), (3, 8, 64), (2, 48, 32)]
    for n, shape in enumerate(shapes):
        w = random(*shape, seed=n, scale=0.2)
        second = NVFP4QTensor.get_weights_scaling_factor_2(w)
        made, scale, second = NVFP4QTensor.quantize(w, 16, weights_scaling_factor_2=second)
        found = made.dequantize(torch.float32, scale=scale, double_scale=second, block_sizes={-1: 16})
        codes = made._quantized_data
        if len(shape) == 3:
            name = f"model.layers.{n}.feed_forward.experts.gate_up_proj"
            codes, scale = turned(codes, scale)
            stored |= {name: codes, f"{name}_weight_scale": scale, f"{name}_weight_scale_2": second}
            stored[f"{name}_input_scale"] = torch.tensor(0.25)
            truth[name] = found.transpose(-2, -1)
            continue
        module = f"model.layers.{n}.self_attn.q_proj"
        smooth = (random(shape[-1], seed=9 + n).abs() + 0.5).bfloat16()
        stored |= {f"{module}.weight": codes, f"{module}.weight_scale": scale, f"{module}.weight_scale_2": second}
        stored |= {f"{module}.input_scale": torch.tensor(0.25), f"{module}.pre_quant_scale": smooth}
        if algorithm == "NVFP4_SVD":
            a, b = ((random(*size, seed=20 + n) * 8).round().bfloat16() / 64 for size in ((4, shape[1]), (shape[0], 4)))
            stored |= {f"{module}.svdquant_lora_a": a, f"{module}.svdquant_lora_b": b}
            found = found + b.float() @ a.float()
        truth[f"{module}.weight"] = found * smooth.float()
    own = {"quant_algo": algorithm, "group_size": 16, "pre_quant_scale": True, "exclude_modules": ["lm_head"]}
    by = f"nvidia-modelopt {version('nvidia-modelopt')}"
    file = {"producer": {"name": "modelopt", "version": version("nvidia-modelopt")}, "quantization": own}
    write(folder, stored, {}, truth, files={"hf_quant_config.json": file}, writer=by, dtype="float32")


# -- compressed-tensors


def group(format: str, bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False, **more}
    return {"targets": ["Linear"], "weights": weights, "format": format}


def compressed(folder: Path, groups: Mapping[str, Mapping[str, Any]], shapes: list[tuple[int, int]]) -> None:
    """Modules of each group, by compressed-tensors' own `compress`, and what its `decompress` yields."""
    import compressed_tensors
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams

    stored: Tensors = {}
    truth: Tensors = {}
    for g, one in enumerate(groups.values()):
        scheme = QuantizationScheme.model_validate(one)
        args = scheme.weights
        compressor = BaseCompressor.get_value_from_registry(one["format"])
        for n, (rows, columns) in enumerate(shapes):
            module = f"model.layers.{n}.{'self_attn.q_proj' if g == 0 else f'mlp.part_{g}'}"
            w = random(rows, columns, seed=10 * g + n).bfloat16()
            w[:, 0] = -0.0
            size = args.group_size or columns
            if args.strategy == "block":
                height, width = args.block_structure
                padded = torch.nn.functional.pad(w, (0, -columns % width, 0, -rows % height))
                parts = padded.view(padded.shape[0] // height, height, -1, width).transpose(1, 2).flatten(-2)
            elif args.strategy == "tensor":
                parts = w.view(1, -1)
            else:
                parts = w.view(rows, -1, size) if size < columns else w.view(rows, 1, columns)
            low, high = parts.float().amin(-1), parts.float().amax(-1)
            module_state: Tensors = {"weight": w}
            whole = None
            if args.strategy == "tensor_group":
                whole = 448.0 * 6.0 / w.float().abs().max().reshape(1)
                module_state["weight_global_scale"] = whole
            if "mx" in one["format"]:
                top = {4: 6.0, 6: 7.5, 8: 448.0}[args.num_bits]
                scale = torch.exp2(torch.ceil(torch.log2(torch.maximum(low.abs(), high.abs()) / top)))
                zeros = torch.zeros_like(scale)
            else:
                scale, zeros = calculate_qparams(low, high, args, **({} if whole is None else {"global_scale": whole}))
            if args.strategy == "tensor":
                scale, zeros = scale.reshape(1), zeros.reshape(1)
            module_state["weight_scale"] = scale if whole is not None else scale.bfloat16()
            if not args.symmetric:
                module_state["weight_zero_point"] = zeros.to(torch.int8)
            small = compressor.compress(module_state, scheme)
            truth[f"{module}.weight"] = compressor.decompress(small, scheme)["weight"]
            stored |= {f"{module}.{name}": t for name, t in small.items()}
    formats = {one["format"] for one in groups.values()}
    config = QuantizationConfig.model_validate(
        {
            "config_groups": {name: dict(one) for name, one in groups.items()},
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "ignore": ["lm_head"],
            "quantization_status": "compressed",
        }
    )
    made = json.loads(config.model_dump_json()) | {"version": compressed_tensors.__version__}
    by = {"writer": f"compressed-tensors {version('compressed-tensors')}", "dtype": "bfloat16"}
    write(folder, stored, {"quantization_config": made}, truth, **by)


SHAPES = [(24, 64), (10, 96)]
GROUPS: dict[str, dict[str, Any]] = {
    "float_channel": group("float-quantized", 8, "float", "channel"),
    "float_tensor": group("float-quantized", 8, "float", "tensor"),
    "float_block": group("float-quantized", 8, "float", "block", block_structure=[16, 40]),
    "naive_group": group("naive-quantized", 8, "float", "group", group_size=32),
    "int_channel": group("int-quantized", 8, "int", "channel"),
    "int_asymmetric": group("int-quantized", 8, "int", "channel", symmetric=False),
    "pack_4": group("pack-quantized", 4, "int", "group", group_size=32),
    "pack_4_asymmetric": group("pack-quantized", 4, "int", "group", group_size=32, symmetric=False),
    "pack_3_asymmetric": group("pack-quantized", 3, "int", "channel", symmetric=False),
    "pack_8": group("pack-quantized", 8, "int", "channel"),
    "nvfp4": group("nvfp4-pack-quantized", 4, "float", "tensor_group", group_size=16),
    "mxfp4": group("mxfp4-pack-quantized", 4, "float", "group", group_size=32, scale_dtype="torch.uint8"),
    "mxfp6": group("mxfp6-pack-quantized", 6, "float", "group", group_size=32, scale_dtype="torch.uint8"),
    "mxfp8": group("mxfp8-quantized", 8, "float", "group", group_size=32, scale_dtype="torch.uint8"),
}


def mixed(folder: Path) -> None:
    first = {**GROUPS["pack_4"], "targets": ["re:.*self_attn.*"]}
    second = {**GROUPS["float_channel"], "targets": ["re:.*mlp.part_1"]}
    third = {**GROUPS["nvfp4"], "targets": ["Linear"]}
    compressed(folder, {"group_0": first, "group_1": second, "group_2": third}, SHAPES)


# -- formats that compressed-tensors has dropped (0.10.2 writes them)


def older(folder: Path, format: str) -> None:
    """Sparse formats, codes with gaps, and the order of groups by ``weight_g_idx``."""
    from compressed_tensors.compressors.quantized_compressors.pack_quantized import PackedQuantizationCompressor
    from compressed_tensors.compressors.sparse_compressors.sparse_24_bitmask import Sparse24BitMaskTensor
    from compressed_tensors.compressors.sparse_compressors.sparse_bitmask import BitmaskTensor
    from compressed_tensors.quantization import QuantizationArgs

    stored: Tensors = {}
    truth: Tensors = {}
    args: dict[str, Any] = {}
    for n, shape in enumerate([(12, 64), (9, 96)]):
        module = f"model.layers.{n}.self_attn.q_proj"
        w = random(*shape, seed=n)
        if "sparse" in format:
            small = Sparse24BitMaskTensor.from_dense(w.bfloat16()) if "24" in format else None
            small = small or BitmaskTensor.from_dense((w * (w.abs() > 0.7)).bfloat16())
            stored |= small.dict(module, "cpu")
            truth[f"{module}.weight"] = small.decompress()
            continue
        ordered = format == "ordered"
        args = {"num_bits": 4 if ordered else 3, "type": "int", "symmetric": True}
        args |= {"strategy": "group", "group_size": 32} if ordered else {"strategy": "channel"}
        made = QuantizationArgs.model_validate({**args, "actorder": "group"} if ordered else args)
        groups = shape[1] // 32 if ordered else 1
        scale = (random(shape[0], groups, seed=9).abs() / 4 + 0.1).bfloat16()
        index = None
        if ordered:
            order = torch.randperm(shape[1], generator=torch.Generator().manual_seed(n))
            index = (order // 32).to(torch.int32) if n == 0 else torch.full((shape[1],), -1, dtype=torch.int32)
        compressor = PackedQuantizationCompressor()
        state = compressor.compress_weight(w.bfloat16(), scale, made, g_idx=index)
        state |= {"weight_scale": scale} | ({} if index is None else {"weight_g_idx": index})
        truth[f"{module}.weight"] = compressor.decompress_weight(state, made)
        stored |= {f"{module}.{name}": t for name, t in state.items()}
    config: dict[str, Any] = {"quant_method": "compressed-tensors", "version": version("compressed-tensors")}
    if "sparse" in format:
        config["sparsity_config"] = {"format": format, "targets": ["Linear"], "ignore": ["lm_head"]}
    else:
        weights = {**args, "actorder": "group"} if format == "ordered" else args
        config |= {"format": "pack-quantized", "ignore": ["lm_head"]}
        config["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights}}
    by = {"writer": f"compressed-tensors {version('compressed-tensors')}", "dtype": "bfloat16"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


def marlin(folder: Path) -> None:
    """marlin-24 of 4 and 8 bits, by channels and groups of 128. Nothing decompresses it: the truth is the quantized
    weights that `Marlin24Compressor.compress` packs, times their scales, exactly."""
    from compressed_tensors.compressors.sparse_quantized_compressors.marlin_24 import Marlin24Compressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import quantize

    stored: Tensors = {}
    truth: Tensors = {}
    groups: dict[str, Any] = {}
    cases = [("group", 4, (64, 384)), ("group", 8, (64, 256)), ("channel", 4, (128, 64)), ("channel", 8, (64, 32))]
    for n, (strategy, bits, (rows, columns)) in enumerate(cases):
        module = f"model.layers.{n}.self_attn.q_proj"
        one = group("marlin-24", bits, "int", strategy, **({"group_size": 128} if strategy == "group" else {}))
        one["targets"] = [module]
        scheme = QuantizationScheme.model_validate({key: one[key] for key in ("targets", "weights")})
        w = random(rows, columns, seed=n).view(rows, -1, 4)
        w = w.masked_fill(w.abs().argsort(-1).argsort(-1) < 2, 0).view(rows, columns).half()
        w[:, :4] = 0  # four neighbours without a code
        size = 128 if strategy == "group" else columns
        scale = (w.view(rows, -1, size).abs().amax(-1).float() / (2 ** (bits - 1) - 1)).half()
        state = {f"{module}.weight": w, f"{module}.weight_scale": scale}
        small = Marlin24Compressor().compress(dict(state), {module: scheme})
        codes = quantize(x=w, scale=scale, zero_point=None, args=scheme.weights)
        truth[f"{module}.weight"] = codes.to(torch.int8).float() * scale.float().repeat_interleave(size, 1)
        stored |= small
        groups[f"group_{n}"] = one
    config = {"quant_method": "compressed-tensors", "version": version("compressed-tensors"), "format": "marlin-24"}
    config |= {"config_groups": groups, "ignore": ["lm_head"]}
    by = {"writer": f"compressed-tensors {version('compressed-tensors')}", "dtype": "float32"}
    write(folder, stored, {"quantization_config": config}, truth, **by)


ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MXFP8", "MXFP4")
OLDER = ("sparse-24-bitmask", "sparse-bitmask", "gaps", "ordered")


def cases() -> dict[str, Callable[[Path], None]]:
    """The cases whose packages are installed."""
    found: dict[str, Callable[[Path], None]] = {"deepseek_fp8": deepseek, "fbgemm_fp8": fbgemm}
    if installed("transformers", "transformers", "5."):
        found |= {"finegrained_fp8": finegrained, "gpt_oss_mxfp4": gpt_oss}
    if installed("modelopt", "nvidia-modelopt"):
        for one in ALGORITHMS:
            found[f"modelopt_{one.lower()}"] = lambda folder, one=one: modelopt(folder, one)
        for one in ("NVFP4_AWQ", "NVFP4_SVD"):
            found[f"modelopt_{one.lower()}"] = lambda folder, one=one: smoothed(folder, one)
    if installed("compressed_tensors", "compressed-tensors", "0.10."):
        for one in OLDER:
            found[f"compressed_{one.replace('-', '_')}"] = lambda folder, one=one: older(folder, one)
        found["compressed_marlin_24"] = marlin
    elif installed("compressed_tensors", "compressed-tensors"):
        for name, one in GROUPS.items():
            found[f"compressed_{name}"] = lambda folder, one=one: compressed(folder, {"group_0": one}, SHAPES)
        found["compressed_mixed"] = mixed
    return found


if __name__ == "__main__":
    for case, make in cases().items():
        place = Path(sys.argv[1]) / case
        if not place.exists():
            make(place)
            print(case)
