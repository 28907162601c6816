"""How wide the fused matrices of Mamba layers and of gated delta nets are, by Hugging Face's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .rename.apply import text_config

# Megatron's argument -> the names that the models have for it (configuration_nemotron_h.py; configuration_mamba2.py;
# configuration_falcon_h1.py). A model has all names of one column.
_MAMBA = {
    "mamba_state_dim": ("ssm_state_size", "state_size", "mamba_d_state"),
    "mamba_head_dim": ("mamba_head_dim", "head_dim", "mamba_d_head"),
    "mamba_num_heads": ("mamba_num_heads", "num_heads", "mamba_n_heads"),
    "mamba_num_groups": ("n_groups", "n_groups", "mamba_n_groups"),
}
# (configuration_qwen3_next.py; Megatron's arguments have the same names)
_DELTA = ("linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads", "linear_num_value_heads")


def widths_in(meta: Mapping[str, Any]) -> dict[str, int]:
    """Return Megatron's arguments for these widths; empty if there is no config.json, or if it has none.

    >>> config = {"state_size": 128, "head_dim": 64, "num_heads": 80, "n_groups": 1}
    >>> widths_in({"config": config})["mamba_num_heads"]
    80
    """
    config = text_config(meta)
    columns: list[dict[str, str]] = [{name: names[n] for name, names in _MAMBA.items()} for n in range(3)]
    for names in (*columns, {name: name for name in _DELTA}):
        found = {name: value for name, key in names.items() if type(value := config.get(key)) is int and value > 0}
        if len(found) == len(names):
            return found
    return {}
