"""The tensors and the configuration of a PEFT adapter, from low-rank parts of a model's tensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import DataError
from ...layouts.tables import pattern
from ...lazy import LazyArray
from ...namespace import Namespace
from .extracting import LowRank
from .naming import OUTER

if TYPE_CHECKING:
    import torch
else:
    from ...deferred import torch

CONFIG = "adapter_config.json"
FILE = "adapter_model.safetensors"
# Models of transformers whose linear layers are `Conv1D`, with a row for each input, and the names of these layers
_TURNED_MODELS = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")
_TURNED = ("c_attn", "c_proj", "c_fc", "q_attn")


class AdapterBuilder:
    """Collects what an adapter has.

    Parameters
    ----------
    meta
        The metadata of the base, whose config.json tells models with transposed linear layers.
    base
        The path of the base model, for the configuration.
    dtype
        The dtype of the matrices. None: float32.

    Attributes
    ----------
    tensors
        Name in the adapter's file -> tensor.

    Raises
    ------
    DataError
        The dtype is not floating-point.
    """

    def __init__(self, meta: Mapping[str, Any], base: str, dtype: torch.dtype | None) -> None:
        if dtype is not None and not dtype.is_floating_point:
            raise DataError(f"an adapter has no matrices of {dtype}: name a floating-point dtype, such as bfloat16")
        self.tensors: dict[str, torch.Tensor] = {}
        self._base = base
        self._dtype = torch.float32 if dtype is None else dtype
        self._ranks: dict[str, int] = {}
        self._saved: dict[str, None] = {}
        self._biases: list[tuple[str, torch.Tensor]] = []
        config = meta.get("config")
        model = config.get("model_type") if isinstance(config, Mapping) else None
        self._turned = model in _TURNED_MODELS

    def takes(self, name: str, tensor: LazyArray) -> bool:
        """Return whether an adapter can have a low-rank part of a tensor: whether it is a module's weight."""
        return name.endswith(".weight") and 2 <= tensor.ndim <= 5 and tensor.dtype.is_floating_point

    def add(self, name: str, shape: tuple[int, ...], found: LowRank) -> None:
        """Add the low-rank part of a weight."""
        module = name.removesuffix(".weight")
        left, right = found.left.to(self._dtype), found.right.to(self._dtype)
        key = f"{OUTER}{module}"
        if len(shape) > 2:
            right = right.reshape(-1, *shape[1:])
            left = left.reshape(*left.shape, *(1,) * (len(shape) - 2))
        if len(shape) == 2 and pattern("model.embedding").search(name):
            self.tensors[f"{key}.lora_embedding_A"] = left.T.contiguous()
            self.tensors[f"{key}.lora_embedding_B"] = right.T.contiguous()
        else:
            if self._is_turned(module):
                left, right = right.T, left.T
            self.tensors[f"{key}.lora_A.weight"] = right.contiguous()
            self.tensors[f"{key}.lora_B.weight"] = left.contiguous()
        self._ranks[module] = found.left.shape[1]

    def save(self, name: str, tuned: Namespace[Any]) -> bool:
        """Add a whole tensor: a bias of an adapted module, or all of another module. Return False for a tensor that is
        no module's weight or bias."""
        module, _, param = name.rpartition(".")
        if not module or param not in ("weight", "bias"):
            return False
        if param == "bias":
            self._biases.append((module, tuned.tensor(name)[...]))
        else:
            self._save_module(module, tuned)
        return True

    def _save_module(self, module: str, tuned: Namespace[Any]) -> None:
        self._saved[module] = None
        for param in ("weight", "bias"):
            one = tuned.exact(f"{module}.{param}")
            if one is not None:
                self.tensors[f"{OUTER}{module}.{param}"] = one[...].contiguous()

    def config(self) -> bytes:
        """Return adapter_config.json, after all tensors have been added."""
        for module, bias in self._biases:
            if module not in self._saved:
                inner = f"{module}.base_layer" if module in self._ranks else module
                self.tensors[f"{OUTER}{inner}.bias"] = bias.contiguous()
        ranks = sorted(self._ranks.values())
        common = max(set(ranks), key=ranks.count) if ranks else 8
        others = {_exactly(module): rank for module, rank in self._ranks.items() if rank != common}
        table = {
            "peft_type": "LORA",
            "task_type": None,
            "base_model_name_or_path": self._base,
            "r": common,
            "lora_alpha": common,  # so that each product counts once
            "rank_pattern": others,
            "alpha_pattern": others,
            "target_modules": list(self._ranks),
            "modules_to_save": list(self._saved) or None,
            "bias": "all" if self._biases else "none",
            "fan_in_fan_out": any(map(self._is_turned, self._ranks)),
            "lora_dropout": 0.0,
            "inference_mode": True,
        }
        return (json.dumps(table, indent=2) + "\n").encode()

    def _is_turned(self, module: str) -> bool:
        return self._turned and module.endswith(_TURNED)


def _exactly(module: str) -> str:
    """Return a module's name as the pattern that PEFT looks for at the end of names."""
    return module.replace(".", r"\.")
