"""Merges by mergekit, as the truth for `lazyckpt.merge`: run it where mergekit can be imported.

    PYTHONPATH=FOLDER_OF_MERGEKIT python tests/writers/mergekit_merges.py tests/golden/mergekit

It writes three small Llama models and, for each merge file below, the tensors that mergekit merges, with its version.
tests/test_merging.py compares them. Which of equal magnitudes are kept depends in mergekit on torch's unstable sort,
and so on the machine; here torch sorts stably. The random masks of DARE are given to mergekit, so that its formula is
compared: they are computed here once more, number by number, as docs/how-to/merge.md specifies.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

LAYERS, HIDDEN, INNER, WORDS = 4, 8, 6, 12
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER,
    "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": WORDS,
    "tie_word_embeddings": False, "torch_dtype": "float32", "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip


def shapes() -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (WORDS, HIDDEN)}
    for n in range(LAYERS):
        layer = f"model.layers.{n}"
        found |= {
            f"{layer}.self_attn.q_proj.weight": (HIDDEN, HIDDEN), f"{layer}.self_attn.k_proj.weight": (4, HIDDEN),
            f"{layer}.self_attn.v_proj.weight": (4, HIDDEN), f"{layer}.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
            f"{layer}.mlp.gate_proj.weight": (INNER, HIDDEN), f"{layer}.mlp.up_proj.weight": (INNER, HIDDEN),
            f"{layer}.mlp.down_proj.weight": (HIDDEN, INNER), f"{layer}.input_layernorm.weight": (HIDDEN,),
            f"{layer}.post_attention_layernorm.weight": (HIDDEN,),
        }  # fmt: skip
    return found | {"model.norm.weight": (HIDDEN,), "lm_head.weight": (WORDS, HIDDEN)}


def models() -> dict[str, dict[str, torch.Tensor]]:
    """Three models. The differences in up_proj are multiples of 1/8: many magnitudes are equal."""
    rng = torch.Generator().manual_seed(7)
    base = {name: torch.randn(shape, generator=rng) for name, shape in shapes().items()}
    found = {"base": base}
    for other in ("a", "b"):
        found[other] = {name: t + 0.5 * torch.randn(t.shape, generator=rng) for name, t in base.items()}
    for name in base:
        if "up_proj" in name:
            base[name] = torch.round(base[name] * 8) / 8
            for other in ("a", "b"):
                found[other][name] = base[name] + torch.randint(-6, 7, base[name].shape, generator=rng) / 8
    return found


TWO = [{"model": "a"}, {"model": "b"}]
WEIGHTED = [{"model": "a", "parameters": {"weight": 0.6}}, {"model": "b", "parameters": {"weight": 0.9}}]
THREE = [{"model": "base", "parameters": {"weight": 0.2}}, *WEIGHTED]
FILTERS = [
    {"filter": "self_attn", "value": [0, 0.5, 0.3, 0.7, 1]},
    {"filter": "mlp", "value": [1, 0.5]},
    {"value": 0.4},
]

DENSITIES = [{"filter": "mlp", "value": [0.1, 0.9]}, {"value": 0.5}]
SCALES = [{"filter": "o_proj", "value": 0.5}, {"value": 1.0}]


def tasks(method: str, parameters: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"merge_method": method, "base_model": "base", "models": WEIGHTED, "parameters": parameters, **more}


def sliced(model: str, a: int, b: int, **more: Any) -> dict[str, Any]:
    return {"model": model, "layer_range": [a, b], **more}


CASES: dict[str, dict[str, Any]] = {
    "linear": {"merge_method": "linear", "models": THREE},
    "linear_sum": {"merge_method": "linear", "models": THREE, "parameters": {"normalize": False}},
    "linear_filters": {
        "merge_method": "linear",
        "models": [
            {"model": "a", "parameters": {"weight": FILTERS}},
            {"model": "b", "parameters": {"weight": [0.3, 2]}},
        ],
    },
    "linear_bf16": {"merge_method": "linear", "models": THREE, "dtype": "float32", "out_dtype": "bfloat16"},
    "slerp": {
        "merge_method": "slerp", "base_model": "a", "parameters": {"t": FILTERS},
        "slices": [{"sources": [sliced("a", 0, LAYERS), sliced("b", 0, LAYERS)]}],
    },
    "slerp_models": {"merge_method": "slerp", "base_model": "b", "models": TWO, "parameters": {"t": 0.3}},
    "nuslerp": {"merge_method": "nuslerp", "models": WEIGHTED},
    "nuslerp_base": {"merge_method": "nuslerp", "models": WEIGHTED, "base_model": "base"},
    "multislerp": {"merge_method": "multislerp", "models": THREE},
    "multislerp_base": {"merge_method": "multislerp", "models": WEIGHTED, "base_model": "base"},
    "karcher": {"merge_method": "karcher", "models": [{"model": "base"}, *TWO]},
    "model_stock": {"merge_method": "model_stock", "models": TWO, "base_model": "base"},
    "task_arithmetic": tasks("task_arithmetic", {"lambda": 0.7, "normalize": True}),
    "ties": tasks("ties", {"density": 0.45, "lambda": "1.25"}),
    "ties_rescaled": tasks("ties", {"density": DENSITIES, "rescale": True}),
    "ties_sum": tasks("ties", {"density": 0.3, "normalize": False, "int8_mask": True}, dtype="float32"),
    "dare_ties": tasks("dare_ties", {"density": 0.6, "seed": 5}),
    "dare_linear": tasks("dare_linear", {"density": 0.6, "seed": 5, "normalize": True}),
    "dare_plain": tasks("dare_linear", {"density": 0.4, "seed": 5, "rescale": False}),
    "breadcrumbs": tasks("breadcrumbs", {"density": 0.7, "gamma": 0.1}),
    "breadcrumbs_ties": tasks("breadcrumbs_ties", {"density": 0.5, "gamma": [0.3, 0.0]}),
    "passthrough": {
        "merge_method": "passthrough", "dtype": "float32",
        "slices": [
            {"sources": [sliced("a", 0, 3)]},
            {"sources": [sliced("b", 1, 3, parameters={"scale": SCALES})]},
            {"sources": [sliced("b", 1, LAYERS)]},
        ],
    },
    "slices": {
        "merge_method": "linear",
        "slices": [
            {"sources": [sliced("a", 0, 2, parameters={"weight": [0.2, 0.9]}), sliced("b", 2, 4)]},
            {
                "sources": [sliced("b", 1, 4), sliced("a", 1, 4, parameters={"weight": 3})],
                "parameters": {"weight": 0.7},
            },
        ],
        "parameters": {"weight": 0.4},
    },
}  # fmt: skip


def mask(seed: int, number: int, name: str, count: int, density: float) -> list[bool]:
    """The mask of a tensor, number by number."""
    every = (1 << 64) - 1
    state = int.from_bytes(hashlib.sha256(f"{seed}\0{number}\0{name}".encode()).digest()[:8], "little")
    found = []
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & every
        z = state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & every
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & every
        found.append(((z ^ (z >> 31)) >> 11) / 2**53 < density)
    return found


def give_masks(seed: int) -> None:
    """Let mergekit's bernoulli take the masks of this module."""
    from mergekit.merge_methods import generalized_task_arithmetic as module

    current: dict[str, Any] = {}
    merge_group = module.GeneralizedTaskArithmeticMerge.merge_group

    def merge(self: Any, group: Any, /, **parameters: Any) -> Any:
        current.update(name=group.metadata.name, number=0)
        return merge_group(self, group, **parameters)

    def bernoulli(full: torch.Tensor) -> torch.Tensor:
        found = mask(seed, current["number"], current["name"], full.numel(), round(float(full.flatten()[0]), 6))
        current["number"] += 1
        return torch.tensor(found, dtype=full.dtype).reshape(full.shape)

    module.GeneralizedTaskArithmeticMerge.merge_group = merge
    torch.bernoulli = bernoulli


def sort_stably() -> None:
    """Let mergekit's sorts keep the order of equal magnitudes."""
    argsort, sort = torch.argsort, torch.sort
    torch.argsort = lambda w, descending=False: argsort(w, descending=descending, stable=True)
    torch.sort = lambda w, descending=False: sort(w, descending=descending, stable=True)


def main(dest: Path) -> None:
    import yaml
    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    give_masks(5)
    sort_stably()
    options = MergeOptions(quiet=True, copy_tokenizer=False, write_model_card=False)
    os.makedirs(dest, exist_ok=True)
    made = models()
    for name, tensors in made.items():
        (dest / name).mkdir(exist_ok=True)
        save_file(tensors, dest / name / "model.safetensors", {"format": "pt"})
        (dest / name / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    truth: dict[str, torch.Tensor] = {}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as scratch:
        for name in made:
            shutil.copytree(dest / name, Path(scratch) / name)
        os.chdir(scratch)
        for name, case in CASES.items():
            text = yaml.safe_dump(case)
            run_merge(MergeConfiguration.model_validate(yaml.safe_load(text)), f"out-{name}", options)
            files = sorted(Path(f"out-{name}").glob("*.safetensors"))
            truth |= {f"{name}/{key}": t.contiguous() for file in files for key, t in load_file(file).items()}
        os.chdir(here)
    save_file(truth, dest / "truth.safetensors")
    (dest / "cases.json").write_text(json.dumps(CASES, indent=1) + "\n")
    (dest / "writers.json").write_text(
        json.dumps({name: version(name) for name in ("mergekit", "torch", "transformers")}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
